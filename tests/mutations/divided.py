"""List mutations of blocks that are divided by their modules, and of frozen blocks."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

_DIVIDED = ("tests/runtime/zero/test_divided_blocks.py",)
_TILED = ("tests/runtime/zero/test_tiled_linear.py",)

MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        "runtime/zero/policy.py",
        "        if own and part.numel >= options.minimum_numel:",
        "        if False:",
        "a block that is too large stays whole",
        _DIVIDED,
    ),
    Mutation(
        "runtime/zero/policy.py",
        " or isinstance(module, Tiles):",
        ":",
        "tiles of a small layer are gathered one at a time",
        _TILED,
    ),
    Mutation(
        "runtime/zero/saved_tensors.py",
        "                place.part = call\n",
        "",
        "a weight is gathered before the recomputation of its product",
        _TILED,
    ),
    Mutation(
        "runtime/zero/saved_tensors.py",
        "        if self._unpacked_in != placeholder.backward_number():",
        "        if True:",
        "a tensor is unpacked a second time in a pass",
        _DIVIDED,
    ),
    Mutation(
        "runtime/zero/policy.py",
        "            parts += _divide(part, options)",
        "            parts.append(part)",
        "a part that is too large stays whole",
        _DIVIDED,
    ),
    Mutation(
        "runtime/zero/policy.py",
        "if users[id(p)] == 1}\n        own",
        "}\n        own",
        "a weight that two parts share belongs to the first",
        _DIVIDED,
    ),
    Mutation(
        "runtime/zero/hooks.py",
        "            if block.around is not None and not self._saved.enter_part(module):",
        "            if False:",
        "a recomputation keeps the weights of all parts",
        _DIVIDED,
    ),
    Mutation(
        "runtime/zero/hooks.py",
        "                if block.around is not None and not needed:",
        "                if False:",
        "parts stay gathered after their recomputation",
        _DIVIDED,
    ),
    Mutation(
        "runtime/zero/hooks.py",
        "            if block.index not in self._backward_order.late:",
        "            if True:",
        "a part is gathered before its recomputation",
        _DIVIDED,
    ),
    Mutation(
        "runtime/zero/hooks.py",
        "            joined = block.around or self._root",
        "            joined = self._root",
        "a part that is used without a call stays gathered through the pass",
        _DIVIDED,
    ),
    Mutation(
        "runtime/zero/hooks.py",
        "                self._passed.append(block)  # no gradient",
        "                pass  # no gradient",
        "frozen blocks stay gathered to the end of the backward pass",
        _DIVIDED,
    ),
    Mutation(
        "runtime/zero/saved_tensors.py",
        "            if active is not None and active[0] in left:",
        "            if active is not None and active[0] is left[0]:",
        "an interrupted part leaves its hooks",
        _DIVIDED,
    ),
    Mutation(
        "runtime/zero/saved_tensors.py",
        "    if any(_is_recomputed(type(mode)) for mode in _get_current_dispatch_mode_stack()):",
        "    if False:",
        "a selective checkpoint counts the operations of gathers",
        _DIVIDED,
    ),
)
