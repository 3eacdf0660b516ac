"""Megatron's tracker of random numbers: ranks that share layers draw different ones where layers differ.

``with get_cuda_rng_tracker().fork():`` draws from a second sequence, which
``model_parallel_cuda_manual_seed`` seeds by this rank's place among those ranks. A checkpointed call draws
the same numbers when it is recomputed.
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
"""Is added to the seed of the ranks that share layers, as Megatron does."""


class RngTrackerError(ZlaunchError):
    """A sequence of random numbers that there is not, or that there is already."""


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
        self.states_ = states

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
    """Seed the device's generator with ``seed``, and the tracker by this rank's place among the ranks that
    share layers, which ``checkpointing.configure(mpu)`` has said: without one it is the first.
    """
    _tracker.reset()
    get_accelerator().manual_seed(seed)
    _tracker.add(MODEL_PARALLEL, seed + _FIRST_SEED + model_parallel_rank())


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Seed the tracker's sequence alone again."""
    with _tracker.fork():
        get_accelerator().manual_seed(seed + _FIRST_SEED + model_parallel_rank())


class _Replay:
    """Gives the tracker the states of now again, while a call is recomputed.

    A class, not a generator: with ``retain_graph``, each backward pass enters it.
    """

    def __init__(self) -> None:
        self._states = _tracker.get_states()
        self._before: list[dict[str, Tensor]] = []

    def __enter__(self) -> None:
        self._before.append(_tracker.get_states())
        _tracker.set_states(dict(self._states))

    def __exit__(self, *error: object) -> None:
        _tracker.set_states(self._before.pop())


checkpointing.recomputation = _Replay
