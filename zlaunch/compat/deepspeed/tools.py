"""Small helpers that DeepSpeed's scripts import."""

from __future__ import annotations

import functools
import json
import logging
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from zlaunch.runtime.activation.checkpointing import (
    checkpoint,
    configure,
    is_configured,
    reset,
    set_num_layers,
)
from zlaunch.runtime.environment import read_environment

# -- log --------------------------------------------------------------------------------------------
#
# ``deepspeed.utils.logger`` and ``log_dist``.


logger = logging.getLogger("DeepSpeed")
"""Warnings and up are shown, on stderr; ``logger.setLevel(logging.INFO)`` shows more."""


class _Stream(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to what ``sys.stderr`` is at that moment."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> object:
        return sys.stderr


if not logger.handlers:
    handler = _Stream()
    handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    logger.propagate = False


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on these ranks; -1 is all, None is none where there are several."""
    if _is_named(ranks):
        logger.log(level, "[Rank %d] %s", read_environment().rank, message)


def log_dist_once(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on these ranks as :func:`log_dist` does, each message once."""
    if message not in _logged:
        _logged.add(message)
        log_dist(message, ranks, level)


def print_dist(message: str, ranks: Sequence[int] | None = None) -> None:
    """Print on these ranks, as :func:`log_dist` logs, whatever the level."""
    if _is_named(ranks):
        print(f"[Rank {read_environment().rank}] {message}", flush=True)


def _is_named(ranks: Sequence[int] | None) -> bool:
    """Tell whether this rank is among them; a lone one always is."""
    place = read_environment()
    named = ranks or ()
    return place.world_size == 1 or place.rank in named or -1 in named


def recursive_getattr(model: Any, module_name: str) -> Any:
    """Return the attribute at a dotted name."""
    return attrgetter(module_name)(model)


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    """Set the attribute at a dotted name."""
    *parents, name = module_name.split(".")
    parent = attrgetter(".".join(parents))(model) if parents else model
    setattr(parent, name, module)


_logged: set[str] = set()
_LEVELS = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error", "critical")}


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Set the level, ``"debug"`` to ``"critical"``. Raises ValueError."""
    if log_level_str.lower() not in _LEVELS:
        raise ValueError(f"log level {log_level_str!r}: expected one of {', '.join(_LEVELS)}")
    (custom_logger or logger).setLevel(_LEVELS[log_level_str.lower()])


# -- tools ------------------------------------------------------------------------------------------


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
        now = torch.cuda.memory_allocated()
        most = torch.cuda.max_memory_allocated()
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
        self.dtype = dtype
        self.enabled = enabled
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


# -- timer ------------------------------------------------------------------------------------------
#
# ``engine.tput_timer``: samples per second, measured.


WARM_UP = 2
"""Steps that are not counted, as in DeepSpeed: memory is allocated and kernels are chosen in them."""

_Mark = float | torch.cuda.Event


class ThroughputTimer:
    """Measures the time between :meth:`start` and :meth:`stop`: the engine calls them around each forward
    pass in training mode and its step.

    On a GPU the marks are events on the present stream, so that nobody waits for the device until the number
    is asked for.

    Attributes
        global_step_count: steps that have ended, those of the warm-up among them.
        micro_step_count, epoch_count: what their names say.
    """

    def __init__(
        self, device: torch.device, batch_size: Callable[[], int], start_step: int = WARM_UP
    ) -> None:
        """``batch_size``: samples of a step, over all ranks; ``start_step``: steps to leave out first."""
        self._device = device
        self._batch_size = batch_size
        self.start_step = start_step
        self.global_step_count = self.micro_step_count = self.epoch_count = 0
        self._since: _Mark | None = None
        self._open: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._elapsed_s = 0.0
        self._samples = 0

    @property
    def started(self) -> bool:
        """Tell whether :meth:`stop` will measure something."""
        return self._since is not None

    @property
    def batch_size(self) -> int:
        """Return the samples of a step, over all ranks."""
        return self._batch_size()

    @property
    def total_elapsed_time(self) -> float:
        """Return the seconds measured so far, without the warm-up."""
        while self._open:
            self._settle(wait=True)
        return self._elapsed_s

    def update_epoch_count(self) -> None:
        """Count an epoch; the present step begins anew."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        """Measure from now on."""
        self._since = self._mark()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """Measure up to now, if started; with ``global_step`` a step has ended. ``report_speed`` is accepted:
        the launcher shows the speed.
        """
        since = self._since
        self._since = None
        if since is None:
            return
        self.micro_step_count += 1
        if self.global_step_count >= self.start_step:
            now = self._mark()
            if isinstance(since, float) and isinstance(now, float):
                self._elapsed_s += now - since
            elif isinstance(since, torch.cuda.Event) and isinstance(now, torch.cuda.Event):
                self._open.append((since, now))
                while self._open and self._open[0][1].query():  # type: ignore[no-untyped-call]
                    self._settle()
        if global_step:
            if self.global_step_count >= self.start_step:
                self._samples += self.batch_size
            self.global_step_count += 1

    def avg_samples_per_sec(self) -> float:
        """Divide the samples of the steps measured by their time; minus infinity before there is one, as
        in DeepSpeed.
        """
        elapsed = self.total_elapsed_time
        return self._samples / elapsed if self._samples and elapsed else float("-inf")

    def _mark(self) -> _Mark:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _settle(self, wait: bool = False) -> None:
        first, last = self._open.popleft()
        if wait:
            last.synchronize()
        self._elapsed_s += first.elapsed_time(last) / 1000


# -- recompute --------------------------------------------------------------------------------------
#
# ``deepspeed.checkpointing``: the runtime's, and the names of Megatron's scripts.


non_reentrant_checkpoint = checkpoint


class CheckpointFunction:
    """``CheckpointFunction.apply(function, outputs, *args)`` in old scripts."""

    @staticmethod
    def apply(run_function: Any, all_outputs: list[Any], *args: Any) -> None:
        """Run it; the results are appended to ``all_outputs``."""
        result = checkpoint(run_function, *args)
        all_outputs += [result] if isinstance(result, torch.Tensor) else list(result)


def detach_variable(inputs: Any, device: Any = None) -> tuple[Any, ...]:
    """Return a tuple's tensors outside of the graph, on ``device`` where one is given; each requires a
    gradient if it did before. Raises RuntimeError for what is no tuple.
    """
    if not isinstance(inputs, tuple):
        raise RuntimeError(f"detach_variable takes a tuple, not {type(inputs).__name__}")
    found = []
    for value in inputs:
        if isinstance(value, torch.Tensor):
            moved = value if device is None else value.to(device)
            value = moved.detach().requires_grad_(value.requires_grad)
        found.append(value)
    return tuple(found)


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Switch ``partition_activations``."""
    configure(None, partition_activations=partition_activation)


__all__ = [
    "CheckpointFunction",
    "checkpoint",
    "configure",
    "detach_variable",
    "is_configured",
    "non_reentrant_checkpoint",
    "partition_activations_in_checkpoint",
    "reset",
    "set_num_layers",
]


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """Return a call as text: ``base(1, key=2)``."""
    given = [*map(repr, args), *(f"{key}={value!r}" for key, value in kwargs.items())]
    return f"{base}({', '.join(given)})"


# -- layers -----------------------------------------------------------------------------------------
#
# ``deepspeed.runtime.zero.linear``. The runtime gathers every layer's weights again for its backward pass, so
# torch's linear layer saves as much memory as DeepSpeed's.


class LinearModuleForZeroStage3(nn.Linear):
    """Is torch's linear layer."""


zero3_linear_wrap = nn.functional.linear
