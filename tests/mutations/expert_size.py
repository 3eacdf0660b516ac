"""List mutations of the choice of an expert-parallel size."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

TESTS = ("tests/runtime/expert_parallel/test_auto_size.py",)
FILE = "runtime/parallel/expert_size.py"
MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        FILE,
        " and local % (size * inner) == 0",
        "",
        "tokens cross nodes in each layer",
        TESTS,
    ),
    Mutation(
        FILE,
        "local % (size * inner)",
        "local % size",
        "tensor-parallel groups push the experts to other nodes",
        TESTS,
    ),
    Mutation(
        FILE,
        "return all(",
        "return any(",
        "a size does not divide the experts of every module",
        TESTS,
    ),
    Mutation(
        FILE,
        "        with_expert_size(loaded, fitting[-1])\n",
        "        pass\n",
        "a size is chosen that other keys do not allow",
        TESTS,
    ),
    Mutation(
        FILE,
        "    dist.all_reduce(smallest, dist.ReduceOp.MIN)\n",
        "",
        "ranks choose different sizes and wait for each other's groups",
        TESTS,
    ),
)
