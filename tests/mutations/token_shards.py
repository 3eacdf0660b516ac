"""List mutations of sequence parallelism in tensor-parallel groups."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

TESTS = ("tests/runtime/tensor_parallel/test_token_shards.py",)
AXIS = ("tests/runtime/comm/test_axis.py",)
MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        "runtime/parallel/token_shards.py",
        "        summed[id(parameter)] = parameter\n",
        "        pass\n",
        "gradients of norms cover one rank's tokens only",
        TESTS,
    ),
    Mutation(
        "runtime/parallel/token_shards.py",
        "summed = {id(bias): bias for bias in biases if bias is not None}",
        "summed = {}",
        "gradients of biases after a row layer cover one rank's tokens only",
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
        "_Gather.apply(shard, axis, channel, dim, sum_to_shard)",
        "_Gather.apply(shard, axis, channel, dim, scatter_to)",
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
        "runtime/parallel/token_shards.py",
        '            raise ParameterError(f"{_WHERE}: {name} has not called its last block: {_ORDER}")\n',
        "            pass\n",
        "a pass without the last block returns some of the tokens",
        TESTS,
    ),
)
