"""Gathers the whole values of sharded parameters for a while."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

from torch import Tensor, nn

from ..backward_step.reducer import check_step
from ..errors import UnsupportedError
from ..mesh.choice import divides_layers
from ..zero.unit import owner_of

_EXPECTED = "GatheredParameters: params: expected a parameter, a module or an iterable of parameters"


@contextmanager
def GatheredParameters(
    params: Tensor | nn.Module | Iterable[Tensor],
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> Iterator[None]:
    """Unshard parameters inside the context. Collective: every rank must enter it with the same parameters.

    With ``modifier_rank``, the changes of that rank are copied to all ranks and to the master values.
    Without it, changes of sharded parameters are lost. Parameters that no engine manages are left unchanged.

    Raises:
        TypeError: An argument is not a tensor, such as a pair from ``named_parameters()``.
    """
    if isinstance(params, nn.Module):
        params = list(params.parameters())
    elif isinstance(params, Tensor):
        params = [params]
    if not isinstance(params, Iterable) or isinstance(params, Mapping):
        raise TypeError(f"{_EXPECTED}, got {type(params).__name__}")
    params = list(params)
    for entry in params:
        if not isinstance(entry, Tensor):
            raise TypeError(f"{_EXPECTED}, got one of {type(entry).__name__}")
    owners = [owner_of(parameter) for parameter in params] if enabled else []
    units = list({id(unit): unit for unit in owners if unit is not None}.values())
    with ExitStack() as stack:
        for unit in units:
            check_step(unit)
            stack.enter_context(unit.hold())
        yield
        if modifier_rank is not None:
            for unit in units:
                if divides_layers(unit.comm):
                    raise UnsupportedError(
                        f"GatheredParameters(modifier_rank={modifier_rank}) does not support "
                        f"tensor-parallel parameters such as {unit.names[0]}: change them on all ranks with "
                        "engine.module.load_state_dict()"
                    )
            for unit in units:
                unit.comm.broadcast(unit.full, modifier_rank)
                unit.write_back()
