"""Provide the modes under which code sees a GPU: what tensors say of themselves, what operations touch."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .clocks import findings, host, host_waits, lock, where
from .memory import allocate, block_of, blocks, is_on_device, is_page_locked, key_of, launch
from .streams import current_stream, note_device, place

CPU = torch.device("cpu")
_WAITS = frozenset(
    f"aten::{name}"
    for name in (
        *("_local_scalar_dense", "equal", "nonzero", "is_nonzero", "masked_select"),
        *("_unique2", "unique_dim", "repeat_interleave.Tensor"),
    )
)
"""Operations whose result the host needs."""
_NO_READ = ("_like", "new_", "empty", "record_stream")
_NO_WRITE = ("aten::resize_", "aten::set_")
_INDEXING = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
_COPIES = ("aten::copy_", "aten::_to_copy")
_FACTORIES = (torch.empty, torch.zeros, torch.ones, torch.full, torch.tensor)
_wish = threading.local()


@contextmanager
def placed(on_device: bool) -> Iterator[None]:
    """Let what is made inside be on the device, or on the host."""
    before = getattr(_wish, "on_device", None)
    _wish.on_device = on_device
    try:
        yield
    finally:
        _wish.on_device = before


@contextmanager
def running() -> Iterator[None]:
    """Let what runs inside, in this thread, see a GPU."""
    with pretending(), Record():
        yield


@contextmanager
def pretending() -> Iterator[None]:
    """Let tensors answer as on a GPU, where they do not yet: two such modes would undo each other."""
    if any(isinstance(mode, Pretend) for mode in _get_current_function_mode_stack()):
        yield
        return
    with Pretend():
        yield


# -- what operations touch


@functools.cache
def _makes_views(operation: Any) -> bool:
    schema = operation._schema
    infos = [result.alias_info for result in schema.returns]
    makes = any(info is not None and not info.is_write for info in infos)
    return makes and not any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)


@functools.cache
def _arguments(operation: Any) -> list[tuple[str, bool]]:
    """Return the names of an operation's arguments, and whether it writes to them."""
    infos = [(argument.name, argument.alias_info) for argument in operation._schema.arguments]
    return [(name, info is not None and info.is_write) for name, info in infos]


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return []
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


class Record(TorchDispatchMode):
    """Notes what each operation reads and writes, and on which stream."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _makes_views(func):
            return func(*args, **kwargs)
        if func.namespace == "c10d":  # its own threads work, and drop tensors while this one waits for them
            return self._run(func, args, kwargs)
        with lock:
            return self._run(func, args, kwargs)

    def _run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        name = func._schema.name
        reads: list[Tensor] = []
        writes: list[Tensor] = []
        arguments = _arguments(func)
        for (_, does_write), value in zip(arguments, args, strict=False):
            (writes if does_write else reads).extend(_tensors(value))
        for argument, does_write in arguments:
            if argument in kwargs:
                (writes if does_write else reads).extend(_tensors(kwargs[argument]))
        for tensor in (*reads, *writes):
            block_of(tensor)
        follow = any(is_on_device(tensor) for tensor in (*reads, *writes))
        seen = {key_of(tensor) for tensor in (*reads, *writes)}
        result = func(*args, **kwargs)
        made = [tensor for tensor in _tensors(result) if key_of(tensor) not in seen]
        wish = getattr(_wish, "on_device", None)
        for tensor in made:
            block = block_of(tensor)
            block.on_device = follow if wish is None else wish
            if block.on_device:
                allocate(block)
            elif follow and name == "aten::_to_copy" and kwargs.get("non_blocking"):
                block.pinned_by_torch = True  # so the host need not wait, and has to wait itself
        if any(part in name for part in _NO_READ):
            reads = []
        writes = [] if "empty" in name or name in _NO_WRITE else [*writes, *made]
        self._note(name, reads, writes, args, kwargs)
        return result

    def _note(
        self,
        name: str,
        reads: list[Tensor],
        writes: list[Tensor],
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> None:
        there = [tensor for tensor in (*reads, *writes) if is_on_device(tensor)]
        here = [tensor for tensor in (*reads, *writes) if not is_on_device(tensor)]
        if not there:
            launch(name, reads, writes, host())
            return
        stream = current_stream()
        if here and name in _COPIES:
            given = args[2] if name == "aten::copy_" and len(args) > 2 else kwargs.get("non_blocking", False)
            _copy(name, here, there, down=not is_on_device(writes[0]), non_blocking=bool(given))
            return
        if here:
            _check_mix(name, here, writes)
            launch(name, here, [], host())
        launch(
            name,
            [tensor for tensor in reads if is_on_device(tensor)],
            [tensor for tensor in writes if is_on_device(tensor)],
            stream.actor,
        )
        by_mask = name in _INDEXING and any(t.dtype == torch.bool for t in _tensors(args[1]))
        if name in _WAITS or by_mask:
            host_waits(stream.actor, name)


def _copy(name: str, here: list[Tensor], there: list[Tensor], *, down: bool, non_blocking: bool) -> None:
    """Note a copy between the host and the device. What is not page-locked the host reads before it goes up,
    and writes after it has come down; so does torch where it casts, by way of other memory.
    """
    actor = current_stream().actor
    is_cast = here[0].dtype != there[0].dtype
    by_host = is_cast or not all(map(is_page_locked, here))
    if by_host and not down:
        launch(name, here, [], host())
    mine = [] if by_host else here
    launch(name, there if down else mine, mine if down else there, actor)
    if not non_blocking or (by_host and down):
        how = "pageable" if non_blocking else "blocking"
        host_waits(actor, f"{how} copy {'down' if down else 'up'}")
    if by_host and down:
        launch(name, [], here, host())


def _check_mix(name: str, here: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
    """A GPU takes numbers and indices of the host; all else has to be with it."""
    if name in _INDEXING:
        return
    if any(tensor.dim() > 0 for tensor in here) or any(tensor is each for tensor in here for each in writes):
        findings.mixes[f"{name} in {where()}"] += 1


# -- what tensors say of themselves


class Pretend(TorchFunctionMode):
    """Answers for tensors of the device, and makes them where they are asked for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        answer = _ANSWERS.get(func)
        if answer is not None:
            return answer(func, args, kwargs)
        device = _device_of(kwargs.get("device"))
        if device is not None:
            if device.type == "cuda":
                note_device(device)
            return self._make(func, args, kwargs, on_device=device.type == "cuda")
        if func in _FACTORIES and kwargs.pop("pin_memory", False):
            made = func(*args, **kwargs)
            block_of(made).pinned_by_torch = True
            return made
        return func(*args, **kwargs)

    def _make(self, func: Any, args: Any, kwargs: dict[str, Any], *, on_device: bool) -> Any:
        kwargs["device"] = CPU
        pin = kwargs.pop("pin_memory", False) if func in _FACTORIES else False
        with placed(on_device):
            made = func(*args, **kwargs)
        for tensor in _tensors(made):
            if key_of(tensor) not in blocks:
                block_of(tensor, on_device)
            if pin:
                block_of(tensor).pinned_by_torch = True
        made_up = on_device and func in (torch.tensor, torch.as_tensor)
        if made_up and not isinstance(args[0], (bool, int, float)):
            host_waits(current_stream().actor, "values made up")
        return made


def _device_of(value: Any) -> torch.device | None:
    if isinstance(value, int):
        return torch.device("cuda", value)
    if isinstance(value, str):
        value = torch.device(value)
    return value if isinstance(value, torch.device) and value.type in ("cuda", "cpu") else None


def move(tensor: Tensor, on_device: bool, *, non_blocking: bool = False, dtype: Any = None) -> Tensor:
    """Copy a tensor to the device or the host, unless it is there."""
    if on_device == is_on_device(tensor):
        return tensor if dtype is None else Tensor.to(tensor, dtype)
    with placed(on_device):
        return Tensor.to(tensor, dtype or tensor.dtype, non_blocking=non_blocking, copy=True)


def _say_device(func: Any, args: Any, kwargs: Any) -> Any:
    return place.device if is_on_device(args[0]) else func(*args)


def _pin(func: Any, args: Any, kwargs: Any) -> Tensor:
    with placed(False):
        copy = args[0].clone()
    block_of(copy).pinned_by_torch = True
    return copy


def _read_by_host(func: Any, args: Any, kwargs: Any) -> Any:
    if is_on_device(args[0]):
        if func is not Tensor.tolist:
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        host_waits(current_stream().actor, "tolist")
    launch(func.__name__, [args[0]], [], host())
    return func(*args, **kwargs)


def _to(func: Any, args: Any, kwargs: Any) -> Any:
    tensor, rest = args[0], args[1:]
    named = {name: value for name, value in kwargs.items() if name != "copy"}
    if rest and isinstance(rest[0], Tensor):
        device = place.device if is_on_device(rest[0]) else CPU
        dtype = rest[0].dtype
        non_blocking = kwargs.get("non_blocking", False)
    else:
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*rest, **named)
        if device is not None and device.type == "cuda":
            note_device(device)
    if device is not None and "torch/optim" in sys._getframe(2).f_code.co_filename:
        device = (
            place.device if is_on_device(tensor) else CPU
        )  # C++ has told the optimizer where it really is
    if device is not None and (device.type == "cuda") != is_on_device(tensor):
        return move(tensor, device.type == "cuda", non_blocking=non_blocking, dtype=dtype)
    if device is not None and device.type == "cuda":
        return Tensor.to(tensor, dtype or tensor.dtype, copy=kwargs.get("copy", False))
    return func(*args, **kwargs)


def _one_hot(func: Any, args: Any, kwargs: Any) -> Tensor:
    with placed(is_on_device(args[0])):  # C++ makes the zeros, and asks the indices for their real device
        made: Tensor = func(*args, **kwargs)
    return made


_ANSWERS: dict[Any, Any] = {
    torch.nn.functional.one_hot: _one_hot,
    Tensor.device.__get__: _say_device,
    Tensor.is_cuda.__get__: lambda func, args, kwargs: is_on_device(args[0]),  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: lambda func, args, kwargs: not is_on_device(args[0]),  # type: ignore[attr-defined]
    Tensor.get_device: lambda func, args, kwargs: place.device.index if is_on_device(args[0]) else -1,
    Tensor.pin_memory: _pin,
    Tensor.is_pinned: lambda func, args, kwargs: is_page_locked(args[0]),
    Tensor.cuda: lambda func, args, kwargs: move(
        args[0], True, non_blocking=kwargs.get("non_blocking", False)
    ),
    Tensor.cpu: lambda func, args, kwargs: move(args[0], False),
    Tensor.numpy: _read_by_host,
    Tensor.__array__: _read_by_host,
    Tensor.tolist: _read_by_host,
    Tensor.to: _to,
}
