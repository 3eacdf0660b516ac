"""List mutations of how ranks that share layers divide the tokens."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

TESTS = ("tests/runtime/tensor_parallel/test_token_shards.py",)
AXIS = ("tests/runtime/comm/test_axis.py",)
MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        "runtime/parallel/token_shards.py",
        "        summed[id(parameter)] = parameter\n",
        "        pass\n",
        "gradients of norms are those of one rank's tokens",
        TESTS,
    ),
    Mutation(
        "runtime/parallel/token_shards.py",
        "summed = {id(bias): bias for bias in biases if bias is not None}",
        "summed = {}",
        "gradients of biases behind a sum are those of one rank's tokens",
        TESTS,
    ),
    Mutation(
        "runtime/parallel/token_shards.py",
        "return self._is_on or placeholder.in_backward()",
        "return self._is_on",
        "a recomputed block has other tokens than before",
        TESTS,
    ),
    Mutation(
        "runtime/parallel/token_shards.py",
        "if torch.is_grad_enabled() and not self.is_on:",
        "if False:",
        "a block that is called by itself gets too large gradients",
        TESTS,
    ),
    Mutation(
        "runtime/parallel/token_shards.py",
        "        self._is_on = torch.is_grad_enabled()\n",
        "        self._is_on = True\n",
        "generation divides its one token",
        TESTS,
    ),
    Mutation(
        "runtime/parallel/collectives.py",
        "return sum_to_shard(gradient, ctx.axis, ctx.channel, ctx.dim), None, None, None",
        "return scatter_to(gradient, ctx.axis, ctx.channel, ctx.dim), None, None, None",
        "gradients of divided tokens lack the other ranks' parts",
        AXIS,
    ),
    Mutation(
        "runtime/parallel/collectives.py",
        "in_place = owned and value.is_contiguous()",
        "in_place = owned",
        "a value that is not contiguous is summed in place",
        AXIS,
    ),
    Mutation(
        "runtime/parallel/uses.py",
        "(name in self.mixes or _is_along(self.dim, name, given, args, kwargs))",
        "(name in self.mixes or _is_along(-1, name, given, args, kwargs))",
        "a mean over a rank's tokens is taken for that of all",
        TESTS,
    ),
)
