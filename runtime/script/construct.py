"""Shards a model while it is built."""

from __future__ import annotations

import functools
import gc
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet, finalize, ref

import torch
from torch import Tensor, nn

from ..comm import deadlock
from ..comm.collectives import Comm
from ..comm.nodes import divides_layers
from ..comm.process_group import init_distributed
from ..config import load
from ..errors import UnsupportedError
from ..log import detail, set_level
from ..offload.manager import Offload, init_stores
from ..optim.in_backward import check_step
from ..precision import BufferTypes, choose_precision, dtype_named
from ..zero import placeholder
from ..zero.layout import make_layout
from ..zero.placeholder import UnitState
from ..zero.policy import is_shardable
from ..zero.unit import Unit, owner_of

if TYPE_CHECKING:
    from typing_extensions import Self


# -- init -------------------------------------------------------------------------------------------


M = TypeVar("M", bound=nn.Module)
_LOOKS = 20
_LOOK_S = 0.001
_IGNORED = {
    "zero_param_parallel_group",
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
    "sequence_data_parallel_group",
    "param_swapper",
    "tensor_overrides",
}
"""Names further keywords of DeepSpeed's; where parameters rest and how they travel is the config's."""


class Init:
    """Shard a model while it is built: each module is built whole, then only this rank's shard is kept.

    ``with zlaunch.zero.Init():`` builds a model larger than GPU memory, or larger than host memory with
    ``remote_device="nvme"``. Pass the model to :func:`zlaunch.initialize` at stage 3. Each module runs its
    own constructor, so the values are the same as without it. All ranks get rank 0's values.
    Collective: every rank must build the same modules in the same order.

    Inside the context, code that touches a parameter of an earlier module (``model.apply(init)``, tied or
    copied weights) sees the whole parameter, which is resharded afterwards.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        enabled: bool = True,
        dtype: torch.dtype | str | None = None,
        mpu: Any = None,
        **ignored: Any,
    ) -> None:
        """Set up the context with DeepSpeed's arguments; no effect if the config's stage is below 3.

        Args:
            module: Module to shard at once.
            remote_device: ``"cpu"``, ``"nvme"``, or None for the config's ``offload_param``.
            dtype: Dtype of the parameters; by default the config's.

        Raises:
            ConfigError: The config is invalid.
            DiskError: The offload folder cannot be used.
        """
        if unknown := sorted(ignored.keys() - _IGNORED):
            raise TypeError(f"zero.Init() got an unexpected keyword argument {unknown[0]!r}")
        source = config if config is not None else config_dict_or_path
        settings = load(source).config if source is not None else None
        set_level(settings.log_level if settings is not None else None)
        self.enabled = enabled and (settings is None or settings.zero_optimization.stage == 3)
        self._dtype = dtype_named(dtype) if isinstance(dtype, str) else dtype
        if dtype is None and settings is not None:
            self._dtype = choose_precision(settings).dtype
        listed = None if settings is None else settings.data_types.keep_in_fp32_modules
        self._types = BufferTypes(self._dtype, listed=None if listed is None else tuple(listed))
        self._stores = init_stores(settings, remote_device, pin_memory)
        self._builder: _Builder | None = None
        if module is not None and self.enabled:
            builder = self._make_builder()
            for member in module.modules():
                builder.shard(member)

    def _make_builder(self) -> _Builder:
        deadlock.install()
        comm = Comm(init_distributed())
        return _Builder(comm, self._stores(comm), self._dtype, self._types)

    def __enter__(self) -> Self:
        if self.enabled:
            self._builder = self._make_builder()
            self._builder.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._builder is not None:
            self._builder.close(whole=kind is None)
            self._builder = None


class _Builder:
    """Shards modules as soon as their constructors have returned."""

    def __init__(self, comm: Comm, stores: Offload, dtype: torch.dtype | None, types: BufferTypes) -> None:
        self._comm = comm
        self._dtype = dtype
        self._types = types
        self._stores = stores
        self._under_construction: set[int] = set()
        self._touched: dict[int, Unit] = {}
        self._alive: set[Unit] = set()
        self._modules: WeakSet[nn.Module] = WeakSet()
        self._restore = ExitStack()
        """Restores torch's classes."""
        self._is_open = False
        self._largest = 0
        """Counts the bytes of the largest module while it was whole."""

    # -- while the context is open

    def open(self) -> None:
        for kind in _subclasses(nn.Module):
            if "__init__" in kind.__dict__:
                self._wrap(kind)
        wrap = self._wrap
        original = nn.Module.__dict__.get("__init_subclass__")

        def init_subclass(kind: type[nn.Module], /, **options: Any) -> None:
            super(nn.Module, kind).__init_subclass__(**options)
            if "__init__" in kind.__dict__:
                wrap(kind)

        nn.Module.__init_subclass__ = classmethod(init_subclass)  # type: ignore[assignment,method-assign]
        if original is None:
            self._restore.callback(delattr, nn.Module, "__init_subclass__")
        else:
            self._restore.callback(setattr, nn.Module, "__init_subclass__", original)
        self._restore.callback(setattr, nn.Module, "apply", nn.Module.apply)
        nn.Module.apply = self._apply  # type: ignore[method-assign]
        self._is_open = True

    def close(self, *, whole: bool) -> None:
        """Restore torch's classes. ``whole``: the model has been built. After an exception nothing collective
        may follow: the other ranks need not have had it.
        """
        self._restore.close()
        if whole:
            self.reshard_touched()
            self._say()
        self._is_open = False
        used = {id(p) for module in self._modules for p in module._parameters.values() if p is not None}
        for unit in list(self._alive):  # parameters that were replaced, as tied weights are
            for parameter in list(unit.parameters):
                if id(parameter) not in used:
                    unit.hand_over(parameter)
            if placeholder.settings.empty_placeholders:
                unit.empty_placeholders()

    def _say(self) -> None:
        """Print what the ranks keep, since no plan has been made yet."""
        if self._comm.rank or not self._alive:
            return
        numel = sum(unit.numel for unit in self._alive)
        nbytes = sum(unit.layout.shard_numel * unit.dtype.itemsize for unit in self._alive)
        places = {"disk" if (t := u.values.tensor) is None else t.device.type for u in self._alive}
        dtypes = ", ".join(sorted({str(unit.dtype) for unit in self._alive}))
        detail(
            f"zero.Init: {numel:,} elements in {dtypes}, {nbytes / 2**20:,.1f} MiB on each rank "
            f"({', '.join(sorted(places))}), and {self._largest / 2**20:,.1f} MiB for one module at the peak"
        )

    def _wrap(self, kind: type[nn.Module]) -> None:
        original = kind.__dict__["__init__"]
        builder = ref(self)

        @functools.wraps(original)
        def construct(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            own = builder()
            if own is None or not own._is_open:
                original(module, *args, **kwargs)
                return
            outermost = id(module) not in own._under_construction
            own._under_construction.add(id(module))
            try:
                original(module, *args, **kwargs)
            finally:
                if outermost:
                    own._under_construction.discard(id(module))
            if outermost:
                for member in module.modules():  # a copy of a module has parameters, but ran no constructor
                    if member is module or id(member) not in own._under_construction:
                        own.shard(member)
                own.reshard_touched()

        def restore() -> None:
            # a class imported meanwhile may have a decorator's constructor around this one: both stay
            if kind.__dict__["__init__"] is construct:
                kind.__init__ = original  # type: ignore[method-assign]

        kind.__init__ = construct  # type: ignore[method-assign,assignment]
        self._restore.callback(restore)

    @property
    def _apply(self) -> Callable[..., Any]:
        def apply(module: M, function: Callable[[nn.Module], None]) -> M:
            for child in module.children():
                child.apply(function)
            function(module)
            self.reshard_touched()
            return module

        return apply

    # -- units

    def shard(self, module: nn.Module) -> None:
        """Keep this rank's slice of the module's direct parameters, not of its children's."""
        self._modules.add(module)
        self._types.keep(module)  # before a checkpoint's values are copied into buffers that would round them
        kinds: dict[torch.dtype, list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in module._parameters.items():
            if parameter is None or parameter.is_meta or not is_shardable(parameter):
                continue
            if placeholder.owner(parameter) is None and not nn.parameter.is_lazy(parameter):
                kinds.setdefault(parameter.dtype, []).append((name, parameter))
        for dtype, members in kinds.items():
            nbytes = sum(p.numel() for _, p in members) * (dtype.itemsize + (self._dtype or dtype).itemsize)
            self._largest = max(self._largest, nbytes)
            layout = make_layout([p.numel() for _, p in members], [0] * len(members), self._comm.link.shards)
            unit = Unit(
                type(module).__name__,
                [name for name, _ in members],
                [parameter for _, parameter in members],
                layout,
                self._comm,
                dtype=self._dtype or dtype,
                shard_optimizer=True,
                shard_params=True,
                stores=self._stores,
                provisional=True,
            )
            unit.on_demand = self._on_demand
            self._keep(module, unit)

    def _keep(self, module: nn.Module, unit: Unit) -> None:
        """Keep the unit until an engine has taken its parameters, or nobody has them any more."""
        alive = self._alive
        alive.add(unit)

        def release() -> None:
            orphans.discard(unit)
            alive.discard(unit)
            if not alive and not self._is_open:
                self._stores.close()

        def end() -> None:
            # LoRA's layers take over the parameters of the layer that they replace, so the parameters outlive
            # their module. While the module is being freed, its dict still counts as a holder.
            if _most_holders(unit) > 1:
                orphans.add(unit, release)
            else:
                release()

        unit.on_empty = release
        finalize(module, end)

    def _on_demand(self, unit: Unit) -> bool:
        assert isinstance(unit, Unit)
        if not self._is_open:
            if placeholder.settings.empty_placeholders:
                return False
            raise RuntimeError(
                f"{unit.name}.{unit.names[0]} was built in zlaunch.zero.Init and is sharded: pass the model "
                "to zlaunch.initialize, or read its values in zlaunch.zero.GatheredParameters"
            )
        unit.wait_unsharded()
        self._touched.setdefault(id(unit), unit)
        return True

    def reshard_touched(self) -> None:
        """Reshard the units that were touched, with rank 0's values, unless a view of them is still held."""
        touched = [unit for unit in self._touched.values() if unit.state is UnitState.UNSHARDED]
        if not touched:
            return
        viewed = [float(self._is_open and _stays_viewed(unit)) for unit in touched]
        # views are counted by references, which may differ between ranks at one moment
        counts = self._comm.all_reduce_scalars(torch.tensor(viewed, device=self._comm.device))
        for unit, count in zip(touched, counts.tolist(), strict=True):
            if not count:
                self._comm.broadcast(unit.full)
                unit.write_back()
                unit.reshard()
                del self._touched[id(unit)]


# -- orphans ----------------------------------------------------------------------------------------
#
# Keeps the units whose module is gone while others hold their parameters.


class _Orphans:
    """Holds units until nothing but themselves has their parameters, which it looks at after each run of
    Python's collector: nothing tells when the last holder goes.

    They are held here because a unit, its parameters and what releases them are a cycle otherwise, which the
    collector would free with the values.
    """

    def __init__(self) -> None:
        self._releases: dict[Unit, Callable[[], None]] = {}

    def add(self, unit: Unit, release: Callable[[], None]) -> None:
        """Hold a unit; call ``release`` when nobody has its parameters."""
        if self._after_collection not in gc.callbacks:
            gc.callbacks.append(self._after_collection)
        self._releases[unit] = release

    def discard(self, unit: Unit) -> None:
        """Hold a unit no longer."""
        self._releases.pop(unit, None)

    def _after_collection(self, phase: str, _: dict[str, int]) -> None:
        if phase == "stop":
            for unit, release in list(self._releases.items()):
                if not _most_holders(unit):
                    release()


orphans = _Orphans()
"""Holds the orphans of all models that are built sharded."""


def _references(objects: Sequence[object]) -> list[int]:
    return [sys.getrefcount(each) for each in objects]


_OWN = _references([object()])[0]
"""Counts the references of a list and of the loop, which versions of Python count differently."""


def _most_holders(unit: Unit) -> int:
    """Count the references to that parameter of a unit which has most, besides the unit's own."""
    return max(_references(unit.parameters), default=_OWN) - _OWN


# -- values of a unit -------------------------------------------------------------------------------


def _stays_viewed(unit: Unit) -> bool:
    """Tell whether a view is held, and not only by a gloo thread that is about to drop it."""
    for _ in range(_LOOKS):
        if not unit.is_viewed():
            return False
        time.sleep(_LOOK_S)
    return True


def _subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    seen: set[type[Any]] = set()
    todo = [kind]
    while todo:
        for child in todo.pop().__subclasses__():
            if child not in seen:
                seen.add(child)
                todo.append(child)
                yield child


# -- gathered ---------------------------------------------------------------------------------------
#
# Gathers the whole values of sharded parameters for a while.


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
