"""Turns torch's optimizer, which the script holds, into one whose methods lead to the engine.

The object that the script has made (or that was made from the config) keeps its identity, its groups of the
model's parameters and its hyper-parameters; schedulers go on writing into them. Its class is changed in place
to a subclass in which every method is forwarded to the engine or refused, because the numbers that it would
work on are elsewhere: an inner optimizer of the original class steps this rank's flat shards.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..engine import Engine
from ..errors import OptimizerError
from ..log import warn

MARK = "zlaunch"
"""Names the entry of a state dict that tells whose shards it has."""


class _SpreadState(MutableMapping[Any, Any]):
    """Replaces ``optimizer.state``, which has no entry of a whole parameter.

    It reads as empty, with a warning, where a library goes through all entries (Lightning's teardown moves
    them to the CPU). Whoever asks for an entry, or sets one, gets an OptimizerError.
    """

    _has_warned = False

    def _refuse(self, *arguments: Any) -> NoReturn:
        raise OptimizerError(
            "the engine owns optimizer.state: read an entry with "
            'zlaunch.safe_get_full_optimizer_state(parameter, "exp_avg"), set it with '
            "safe_set_full_optimizer_state, save all state with engine.save_checkpoint"
        )

    __getitem__ = __setitem__ = __delitem__ = clear = _refuse

    def _warn(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            warn(
                "the engine owns optimizer.state, which reads as empty: read an entry with "
                'zlaunch.safe_get_full_optimizer_state(parameter, "exp_avg")'
            )

    def __iter__(self) -> Iterator[Any]:
        self._warn()
        return iter(())

    def __len__(self) -> int:
        self._warn()
        return 0

    def __contains__(self, key: object) -> bool:
        self._warn()
        return False

    def __repr__(self) -> str:
        return "<owned by the engine>"


class _LostState(_SpreadState):
    """Replaces the state of an optimizer whose engine has been destroyed: a step would restart without it."""

    def _refuse(self, *arguments: Any) -> NoReturn:
        raise OptimizerError(
            "this optimizer's state was sharded and is lost since engine.destroy(): make a new optimizer. To "
            "keep the state, call engine.save_checkpoint or zlaunch.safe_get_full_optimizer_state before "
            "destroy()"
        )

    __getitem__ = __setitem__ = __delitem__ = clear = __iter__ = __len__ = __contains__ = _refuse

    def __repr__(self) -> str:
        return "<lost with the engine>"


def has_lost_state(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether an optimizer's state was sharded, and is lost with its engine."""
    return isinstance(optimizer.state, _LostState)


class ZeroOptimizer(torch.optim.Optimizer):
    """Leads an optimizer's methods to its engine. Also an instance of the class that it was made with.

    Attributes
        param_groups: live, with the model's parameters; change hyper-parameters here, and the parameters
            with :meth:`add_param_group` alone.
    """

    _engine: Engine
    _kind: type[torch.optim.Optimizer]

    @property
    def state(self) -> Any:
        """Return an empty mapping. Reading or setting an entry raises OptimizerError."""
        return self.__dict__["state"]

    @state.setter
    def state(self, state: Any) -> None:
        self.__dict__["state"]._refuse()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Call ``engine.step()``, which updates at the accumulation boundary. Raises OptimizerError for a
        closure."""
        if closure is not None:
            raise OptimizerError(
                "optimizer.step(closure) is not supported: call engine.backward(loss), then step()"
            )
        self._engine.step()

    # torch's schedules ask whether they come after a step; the engine sees to that
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Call ``engine.zero_grad()``, which drops the accumulated gradients."""
        self._engine.zero_grad()

    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        """Call ``engine.offload_states()``: move states to host memory. Collective."""
        self._engine.offload_states(*args, **kwargs)

    def reload_states(self, *args: Any, **kwargs: Any) -> None:
        """Call ``engine.reload_states()``: move them back to the device. Collective."""
        self._engine.reload_states(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train further parameters of the model, frozen so far or not given to the optimizer. Collective.

        Raises OptimizerError for a tensor that is not a parameter of the engine's model, ValueError for one
        that is in a group already.
        """
        self._engine.handles.add_param_group(self, param_group)
        follow = getattr(self._engine.lr_scheduler, "follow_groups", None)
        if follow is not None:  # at once: a load may set the group's rate before the next step
            follow()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's shards of the state, for :meth:`load_state_dict` on this rank of an equal run.
        To save and resume use ``engine.save_checkpoint``. Raises OptimizerError where state is kept on NVMe.
        """
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        result = self._engine.handles.state_dict()
        for change in self._optimizer_state_dict_post_hooks.values():
            changed = change(self, result)
            result = changed if changed is not None else result
        return result

    def load_state_dict(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Load what :meth:`state_dict` gave on this rank. Raises OptimizerError for anything else."""
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = changed if changed is not None else state_dict
        self._engine.handles.load_state_dict(state_dict)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __getstate__(self) -> dict[str, Any]:
        raise OptimizerError("an engine's optimizer cannot be pickled or copied: use engine.save_checkpoint")

    def __deepcopy__(self, memo: Any) -> Any:
        return self.__getstate__()


def _refused(name: str, kind: str) -> Callable[..., Any]:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise OptimizerError(
            f"{kind}.{name} is not supported under ZeRO: it needs whole parameters and their state"
        )

    return refuse


def guard(
    optimizer: torch.optim.Optimizer, engine: Engine, base: type[ZeroOptimizer] = ZeroOptimizer
) -> None:
    """Forward ``optimizer``'s methods to ``engine``, by a class derived from ``base`` and its class."""
    kind: Any = type(optimizer)

    class Guarded(base, kind):  # type: ignore[misc, valid-type]
        __module__ = kind.__module__
        __doc__ = kind.__doc__

    Guarded.__name__ = kind.__name__
    Guarded.__qualname__ = kind.__qualname__
    for name in dir(kind):
        own = not name.startswith("_") and not hasattr(base, name)
        if own and callable(getattr(kind, name, None)):
            setattr(Guarded, name, _refused(name, kind.__name__))
    for name in ("step", "zero_grad", "state_dict", "load_state_dict"):
        optimizer.__dict__.pop(name, None)  # a scheduler's wrapper, which calls the former class
    optimizer._engine = engine  # type: ignore[attr-defined]
    optimizer._kind = kind  # type: ignore[attr-defined]
    optimizer.state = _SpreadState()  # type: ignore[assignment]
    optimizer._opt_called = True  # type: ignore[attr-defined]
    optimizer.__class__ = Guarded


def unguard(optimizer: torch.optim.Optimizer, state: Mapping[Tensor, dict[str, Any]] | None) -> None:
    """Turn a guarded optimizer back into a plain one with ``state``; leave others unchanged. Without one
    (None), it raises OptimizerError as soon as it needs its state.
    """
    if isinstance(optimizer, ZeroOptimizer):
        kind: Any = optimizer._kind
        del optimizer._engine, optimizer._kind
        optimizer.__class__ = kind
        optimizer.__dict__["state"] = _LostState() if state is None else defaultdict(dict, state)


def check_mark(state_dict: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise OptimizerError if a state dict lacks the shards that ``own`` describes."""
    given = state_dict.get(MARK)
    if given is None:
        raise OptimizerError(
            "this state dict is not from an engine's optimizer: to import the state of a plain torch "
            "optimizer, save it with torch.distributed.checkpoint and run `zlaunch checkpoint import`"
        )
    for key, value in own.items():
        if given.get(key) != value:
            raise OptimizerError(
                f"this state dict is from a different {key.replace('_', ' ')} ({given.get(key)}, here "
                f"{value}): optimizer.state_dict() has only this rank's shards. Use engine.save_checkpoint "
                "and load_checkpoint, which support any number of ranks and any stage"
            )
