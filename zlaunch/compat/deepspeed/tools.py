"""Small helpers that DeepSpeed's scripts import."""

from __future__ import annotations

import functools
import json
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import psutil
import torch
from torch import Tensor

from zlaunch.compat.deepspeed.log import log_dist_once, logger
from zlaunch.runtime.environment import read_environment


def clone_tensors_for_torch_save(item: Any, device: Any = "cpu") -> Any:
    """Copy every tensor into a storage that holds it alone, so that no larger buffer is saved with it."""
    if isinstance(item, Tensor):
        return item.detach().to(device, copy=True)
    if isinstance(item, (list, tuple)):
        return type(item)(clone_tensors_for_torch_save(each, device) for each in item)
    if isinstance(item, dict):
        return type(item)((key, clone_tensors_for_torch_save(value, device)) for key, value in item.items())
    return item


def move_to_device(item: Any, device: Any, criterion_func: Callable[[Tensor], bool] | None = None) -> Any:
    """Move tensors inside lists, tuples and dicts to a device; only those that ``criterion_func`` wants."""
    if isinstance(item, Tensor):
        return item.to(device) if criterion_func is None or criterion_func(item) else item
    if isinstance(item, (list, tuple)):
        return type(item)(move_to_device(each, device, criterion_func) for each in item)
    if isinstance(item, dict):
        return {key: move_to_device(value, device, criterion_func) for key, value in item.items()}
    return item


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log what this process uses, with ``force``."""
    if not force or read_environment().rank:
        return
    used = psutil.virtual_memory()
    device = ""
    if torch.cuda.is_available():
        now, most = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        device = f"GPU {now / 2**30:.2f} GB, at most {most / 2**30:.2f} GB, "
    logger.warning(
        "%s: %sprocess %.2f GB, host %.1f GB (%.0f%%)",
        message,
        device,
        psutil.Process().memory_info().rss / 2**30,
        used.used / 2**30,
        used.percent,
    )


def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2.0, mpu: Any = None) -> Tensor:
    """Call torch's, for parameters that no engine manages."""
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


def set_random_seed(seed: int) -> None:
    """Seed Python, numpy and torch."""
    import numpy

    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def required_torch_version(min_version: float | None = None, max_version: float | None = None) -> bool:
    """Tell whether torch is in this range, compared as (major, minor)."""
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])

    def pair(value: float) -> tuple[int, int]:
        first, _, second = str(value).partition(".")
        return int(first), int(second or 0)

    return (min_version is None or (major, minor) >= pair(min_version)) and (
        max_version is None or (major, minor) <= pair(max_version)
    )


def instrument_w_nvtx(function: Callable[..., Any]) -> Callable[..., Any]:
    """Put an NVTX range around each call, where there is a GPU."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.cuda.is_available():
            return function(*args, **kwargs)
        with torch.cuda.nvtx.range(function.__qualname__):
            return function(*args, **kwargs)

    return call


def warning_once(message: str) -> None:
    """Warn; a message comes once."""
    log_dist_once(message, None, logging.WARNING)


def print_json_dist(message: Any, ranks: Sequence[int] | None = None, path: str | None = None) -> None:
    """Write as JSON to a file, on these ranks."""
    rank = read_environment().rank
    if (ranks is None or rank in ranks or -1 in ranks) and path is not None:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(message, file)


class RepeatingLoader:
    """A loader that begins again when it has ended."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


class OnDevice:
    """``with OnDevice(dtype=torch.float16, device="meta"):`` builds modules there, in that dtype."""

    def __init__(self, dtype: torch.dtype, device: Any = "meta", enabled: bool = True) -> None:
        self.dtype, self.enabled = dtype, enabled
        self._context = torch.device(device)

    def __enter__(self) -> None:
        if self.enabled:
            self._former = torch.get_default_dtype()
            torch.set_default_dtype(self.dtype)
            self._context.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self.enabled:
            self._context.__exit__(*error)
            torch.set_default_dtype(self._former)
