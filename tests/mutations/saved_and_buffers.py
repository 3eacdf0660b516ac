"""List mutations of what a Function saves, of the dtypes of buffers, and of parameters made of parameters."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

_FUNCTIONS = ("tests/runtime/zero/test_own_functions.py",)
_BUFFERS = ("tests/runtime/precision/test_buffers.py",)
_ALIASES = ("tests/runtime/construction/test_weight_norm.py",)

MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        "runtime/zero/saved_tensors.py",
        "            _give_parameters_back()\n",
        "",
        "a Function finds bare tensors in place of the parameters that it saved",
        _FUNCTIONS,
    ),
    Mutation(
        "runtime/zero/saved_tensors.py",
        "        if torch.is_grad_enabled():\n            return unpacked\n",
        "",
        "a graph of a backward pass saves a parameter that is resharded",
        _FUNCTIONS,
    ),
    Mutation(
        "runtime/zero/saved_tensors.py",
        "and parameter.requires_grad == tensor.requires_grad  #",
        "#",
        "a tensor that was saved detached comes back as the parameter",
        _FUNCTIONS,
    ),
    Mutation(
        "runtime/zero/hooks.py",
        "return self._unhooked or due",
        "return self._unhooked",
        "GatheredParameters in a backward pass reshards a unit whose gradients are due",
        _FUNCTIONS,
    ),
    Mutation(
        "runtime/zero/hooks.py",
        "return self._unhooked or due",
        "return due",
        "without hooks, GatheredParameters in a forward pass reshards what the graph holds",
        _FUNCTIONS,
    ),
    Mutation(
        "runtime/zero/hooks.py",
        "                if unit.has_empty_placeholders:\n                    handles",
        "                if False:\n                    handles",
        "a gradient that arrives at an empty placeholder has another shape",
        _FUNCTIONS,
    ),
    Mutation(
        "runtime/zero/placeholder.py",
        "    _allow_aliases()\n",
        "",
        "weight norm cannot be built in zero.Init",
        _ALIASES,
    ),
    Mutation(
        "runtime/zero/placeholder.py",
        "        if isinstance(data, FreedView):\n",
        "        if False:\n",
        "a parameter can be made of a sharded one's NaN",
        _ALIASES,
    ),
    Mutation(
        "runtime/precision.py",
        "mixes = self.trained is None or not _meets_parameters(module, name)",
        "mixes = self.trained is None",
        "every buffer is rounded to the training dtype",
        _BUFFERS,
    ),
    Mutation(
        "runtime/precision.py",
        "        return bool(module.affine)\n",
        "        return False\n",
        "a batch norm's running statistics stay in fp32 beside a 16-bit weight",
        _BUFFERS,
    ),
    Mutation(
        "runtime/precision.py",
        "        if self.trained is torch.float16:\n",
        "        if self.trained is not None:\n",
        "_keep_in_fp32_modules counts under bf16",
        _BUFFERS,
    ),
    Mutation(
        "runtime/precision.py",
        "if not any(re.search(_glob(each), name) for name in names)]",
        "if not names]",
        "a pattern of keep_in_fp32_modules that names nothing is silent",
        _BUFFERS,
    ),
    Mutation(
        "runtime/zero/policy.py",
        "            if id(buffer) not in placed:\n",
        "            if True:\n",
        "a buffer of two modules becomes two",
        _BUFFERS,
    ),
    Mutation(
        "runtime/script/construct.py",
        "        self._types.keep(module)  #",
        "        pass  #",
        "a listed buffer that is built in 16 bits rounds the checkpoint's values",
        _BUFFERS,
    ),
    Mutation(
        "runtime/engine.py",
        "                if better is not None:\n                    raise better from error\n",
        "",
        "a mismatch of dtypes does not say what to do",
        _BUFFERS,
    ),
)
