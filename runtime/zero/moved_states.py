"""States of units that ``engine.offload_states()`` has moved to host memory (``offload/states.py``)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from ..errors import OffloadedError
from . import placeholder

if TYPE_CHECKING:
    from .hooks import ShardedModel
    from .reduce import GradientReducer
    from .unit import Unit

OPTIMIZER, MASTERS, VALUES, GRADIENTS, BUFFERS = STATES = (
    "optim_states",
    "hp_params",
    "lp_params",
    "lp_grads",
    "contiguous_grad_buffer",
)
"""DeepSpeed's names: the optimizer's state, the fp32 masters, what the model computes with, the reduced
gradients, and the memory that gradients are sent from.
"""


def check_here(away: Collection[str], needed: Sequence[str], what: str) -> None:
    """Raise OffloadedError if a state that ``what`` needs is away."""
    missing = [name for name in needed if name in away]
    if missing:
        raise OffloadedError(
            f"{what} needs {', '.join(missing)}, which engine.offload_states() has moved to host memory: "
            "call engine.reload_states() on all ranks first"
        )


def hide(unit: Unit) -> None:
    """Make every use of the parameters of a unit that is FULL an error: its values leave."""
    from .unit import UnitState

    unit._move((UnitState.FULL,), UnitState.AWAY)
    unit._point(unit._placeholders, [kinds.sharded for kinds in unit._kinds])
    unit.on_demand = _refuse


def show(unit: Unit) -> None:
    """Make a unit whose values are back FULL again."""
    from .unit import UnitState

    unit._move((UnitState.AWAY,), UnitState.FULL)
    unit._point(unit._views, [kinds.managed for kinds in unit._kinds])
    unit.on_demand = None


def _refuse(unit: Unit) -> bool:
    unit.check_here(VALUES)
    return False


def value_tensors(unit: Unit) -> Iterator[Tensor]:
    """Yield the tensors on the memory of a unit that is not sharded."""
    yield from (unit.full, *unit._views)
    if unit.on_demand is not _refuse:
        yield from unit.parameters


def gradient_tensors(reducer: GradientReducer) -> Iterator[Tensor]:
    """Yield the tensors on the memory that gradients have been collected in."""
    for bucket in reducer._buckets.values():
        for tensor in (bucket.tensor, bucket.carry, bucket.unit.grad, *bucket.views):
            if tensor is not None:
                yield tensor


def release_buffers(reducer: GradientReducer) -> None:
    """Give up the memory that is kept to send gradients from; it comes back when it is written."""
    for buffer in reducer._pool._free:
        reducer.comm.release(buffer.untyped_storage())


def is_in_pass(sharded: ShardedModel) -> bool:
    """Tell whether a forward or backward pass is going on, or one has ended in an exception with gradients on
    their way.
    """
    reducer = sharded.reducer
    left = bool(reducer._in_flight) or (
        reducer.options.transient and any(b.tensor is not None for b in reducer._buckets.values())
    )
    calling = bool(sharded._pass.depth) and not sharded._pass.was_cut_off()
    return placeholder.in_backward() or calling or left
