"""List mutations of the runtime that only a comparison with plain torch's own rounding notices."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

_BESIDE_PLAIN_TORCH = ("tests/numerics/test_numerics.py::test_far_positions_in_bf16",)

MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        "runtime/precision.py",
        "return buffer.dtype if mixes else self.trained or buffer.dtype",
        "return self.trained or buffer.dtype",
        "rotary frequencies are rounded to bf16, and positions of a long context with them",
        _BESIDE_PLAIN_TORCH,
    ),
)
