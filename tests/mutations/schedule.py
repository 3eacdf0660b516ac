"""List mutations of what is gathered beside the optimizer's step, and of the loss in tiles."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

PREFETCH = ("tests/unit/zero/test_prefetch.py",)
SHARDS = ("tests/runtime/tensor_parallel/test_vocabulary_loss.py",)
LOSS = ("tests/runtime/activation/test_chunked_loss.py",)
CHOICES = ("tests/unit/memory/test_choices.py",)
MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        "runtime/zero/store.py",
        "        self.settled = None\n        if values.data_ptr()",
        "        if values.data_ptr()",
        "a gather does not wait for what a script writes after a step",
        ("tests/unit/zero/test_store.py",),
    ),
    Mutation(
        "runtime/zero/hooks.py",
        "            self.first = self._now[0]\n",
        "",
        "no gather begins beside the optimizer's step",
        PREFETCH,
    ),
    Mutation(
        "runtime/zero/hooks.py",
        "ahead += size if seen else 0",
        "ahead += size",
        "the first block counts as gathered ahead of itself",
        PREFETCH,
    ),
    Mutation(
        "runtime/zero/hooks.py",
        "            if total > self._max_live_numel:\n                break\n",
        "",
        "more than stage3_max_live_parameters is allocated at a step's end",
        PREFETCH,
    ),
    Mutation(
        "runtime/optim/update_rule.py",
        "narrow = update.grad.dtype in HALVES or (update.out is not None and update.out.dtype in HALVES)",
        "narrow = update.out is not None and update.out.dtype in HALVES",
        "a step copies all 16-bit gradients to fp32",
        ("tests/unit/optim/test_update_rule.py",),
    ),
    Mutation(
        "runtime/memory/activations.py",
        "min(tokens, max(1, TILE_NUMEL // vocab)) if tiled_loss else tokens",
        "max(1, TILE_NUMEL // vocab) if tiled_loss else tokens",
        "a short sequence is estimated with the logits of a whole tile",
        CHOICES,
    ),
    Mutation(
        "runtime/memory/advice.py",
        'if of_pass and not known.get("tiled_loss") and self._has_large_logits():',
        "if of_pass and self._has_large_logits():",
        "a key is advised that the config has",
        ("tests/runtime/memory/test_out_of_memory.py",),
    ),
    Mutation(
        "runtime/activation/tiles.py",
        "gradients[rows] = wide.mul_(torch.where(counts[rows], gradient, 0).unsqueeze(1))",
        "gradients[rows] = wide.mul_(gradient)",
        "labels that do not count have a gradient, where the loss is computed in chunks",
        LOSS,
    ),
    Mutation(
        "runtime/activation/tiles.py",
        "        has_graph = torch.is_grad_enabled()\n",
        "        has_graph = False\n",
        "second derivatives leave out the loss",
        LOSS,
    ),
    Mutation(
        "runtime/activation/tiles.py",
        "        ones = is_here.to(norms.dtype)\n",
        "        ones = counts.to(norms.dtype)\n",
        "the word of a label on another rank has a gradient here",
        SHARDS,
    ),
    Mutation(
        "runtime/activation/tiles.py",
        "torch.where(is_here, chosen, 0)",
        "chosen",
        "logits of labels on other ranks are added to the loss",
        SHARDS,
    ),
    Mutation(
        "runtime/parallel/vocabulary_loss.py",
        "shift = self.axis.max(norms.clone(), LAYER)",
        "shift = norms.clone()",
        "exponentials of ranks have different scales",
        SHARDS,
    ),
    Mutation(
        "runtime/activation/tiles.py",
        "    if len(logits) != len(targets):",
        "    if False:",
        "logits are compared with other tokens' labels",
        LOSS,
    ),
    Mutation(
        "runtime/activation/tiles.py",
        "    if is_own:",
        "    if True:",
        "a script's own loss function is replaced",
        LOSS,
    ),
)
