"""Megatron's random-number tracker for tensor parallelism.

``with get_cuda_rng_tracker().fork():`` draws from a second sequence, which
``model_parallel_cuda_manual_seed`` seeds differently on each tensor-parallel rank. A recomputed call draws
the same numbers as its forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from zlaunch.compat.deepspeed.accelerator import get_accelerator
from zlaunch.errors import ZlaunchError
from zlaunch.runtime.activation import checkpointing
from zlaunch.runtime.activation.checkpointing import model_parallel_rank

MODEL_PARALLEL = "model-parallel-rng"
_FIRST_SEED = 2718
"""Offset of the tensor-parallel seed, as in Megatron."""


class RngTrackerError(ZlaunchError):
    """A sequence of random numbers that does not exist, or that exists already."""


class CudaRNGStatesTracker:
    """Keeps states of this device's generator by name. Without a GPU it is the CPU's generator."""

    def __init__(self) -> None:
        self.states_: dict[str, Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        """Forget all states."""
        self.states_ = {}
        self.seeds_ = set()

    def get_states(self) -> dict[str, Tensor]:
        """Return the states by name, for a checkpoint."""
        return dict(self.states_)

    def set_states(self, states: dict[str, Tensor]) -> None:
        """Take the states that :meth:`get_states` has returned."""
        self.states_ = dict(states)

    def copy(self) -> CudaRNGStatesTracker:
        """Return a tracker with the same names, states and seeds."""
        other = CudaRNGStatesTracker()
        other.states_ = dict(self.states_)
        other.seeds_ = set(self.seeds_)
        return other

    def take(self, other: CudaRNGStatesTracker) -> None:
        """Take the names, states and seeds of another tracker."""
        self.states_ = other.states_
        self.seeds_ = other.seeds_

    def add(self, name: str, seed: int) -> None:
        """Begin a sequence with a seed. Raises RngTrackerError for a name or seed that is in use."""
        if seed in self.seeds_:
            raise RngTrackerError(f"the seed {seed} is in use already: each name needs another")
        if name in self.states_:
            raise RngTrackerError(f"the name {name!r} is in use already: call reset() before")
        self.seeds_.add(seed)
        before = get_accelerator().get_rng_state()
        get_accelerator().manual_seed(seed)
        self.states_[name] = get_accelerator().get_rng_state()
        get_accelerator().set_rng_state(before)

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """Draw from a sequence inside the block. Raises RngTrackerError for a name that was not added."""
        if name not in self.states_:
            raise RngTrackerError(f"there is no {name!r}: call model_parallel_cuda_manual_seed(seed) before")
        before = get_accelerator().get_rng_state()
        get_accelerator().set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = get_accelerator().get_rng_state()
            get_accelerator().set_rng_state(before)


_tracker = CudaRNGStatesTracker()


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """Return the tracker of this process."""
    return _tracker


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the device's generator with ``seed``, and the tracker's sequence by the tensor-parallel rank too.
    The rank comes from the ``mpu_`` of ``checkpointing.configure``; without one it is 0.
    """
    _tracker.reset()
    get_accelerator().manual_seed(seed)
    _tracker.add(MODEL_PARALLEL, seed + _FIRST_SEED + model_parallel_rank())


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Seed the tracker's sequence alone again."""
    with _tracker.fork():
        get_accelerator().manual_seed(seed + _FIRST_SEED + model_parallel_rank())


class _Replay:
    """Restores the tracker's states of the forward pass while a call is recomputed.

    A class, not a generator: with ``retain_graph``, each backward pass enters it.
    """

    def __init__(self) -> None:
        self._then = _tracker.copy()
        self._before: list[CudaRNGStatesTracker] = []

    def __enter__(self) -> None:
        self._before.append(_tracker.copy())
        _tracker.take(self._then.copy())

    def __exit__(self, *error: object) -> None:
        _tracker.take(self._before.pop())


class _TrackerRecomputation(checkpointing.Recomputation):
    """Lets recomputed calls draw the tracker's numbers again."""

    def has_state(self) -> bool:
        """Tell whether the tracker has sequences."""
        return bool(_tracker.states_)

    def context(self) -> _Replay:
        """Return a context that restores the tracker's present states."""
        return _Replay()


checkpointing.recomputation = _TrackerRecomputation()
