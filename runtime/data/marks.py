"""Marks in a stream, from which a resumed run reads on without reading the stream from its beginning.

A stream that has ``state_dict`` and ``load_state_dict``, as Hugging Face's do, can continue at a sample.
Every rank and worker process reads the same stream, so one mark serves all, and any number of ranks.

Note [Marks are tested]. A stream's state may have less than it takes: those of Hugging Face leave out the
samples in a shuffle buffer, which would never be trained on. So a mark has witnesses, digests of samples that
followed it. A resumed run reads the same samples again, since it was saved behind them; if one differs, it
reads the stream from its beginning.

Note [Draws between marks]. What a stream draws from the global generators begins anew at each mark, with a
seed of its place, as the generators' states are not saved. Marks are at multiples of a number of samples, so
the draws do not depend on the ranks, and are the same without a resume.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from .draws import Draws
from .same_order import digest

DISTANCE = 1024
"""Is the number of samples between two marks."""
_WITNESS_DISTANCE = 64
_SEEDS_APART = 1_000_003
"""Keeps the seeds of marks apart from those of epochs, which are consecutive."""


@dataclass(frozen=True)
class Mark:
    """Is a place in a stream and how to continue there."""

    position: int
    """Counts the samples of the stream before the mark."""
    state: Any
    """Is what the stream's ``state_dict`` returned there; JSON has it as it is."""
    witnesses: tuple[int, ...]
    """Has digests of every 64th sample between this mark and the next one."""

    def as_dict(self) -> dict[str, Any]:
        """Return it for a checkpoint."""
        return {"position": self.position, "state": self.state, "witnesses": list(self.witnesses)}

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> Mark:
        """Return what :meth:`as_dict` has saved."""
        return cls(int(saved["position"]), saved["state"], tuple(saved["witnesses"]))


def can_mark(stream: Any) -> bool:
    """Tell whether a stream has a state that can be saved and loaded."""
    methods = (getattr(stream, name, None) for name in ("state_dict", "load_state_dict"))
    return all(map(callable, methods))


class MarkedStream:
    """Reads a stream and notes its marks; the last one that has all its witnesses is in ``mark``."""

    def __init__(self, stream: Any, draws: Draws, seed: int) -> None:
        self._stream = stream
        self._draws = draws
        self._seed = seed
        self._can_mark = can_mark(stream)
        self.mark: Mark | None = None

    def read(self, samples: Iterator[Any], mark: Mark | None = None) -> Iterator[Any]:
        """Yield the samples, which begin at ``mark``, or at the stream's beginning. Read it within
        ``Draws.active``.
        """
        position = begin = 0 if mark is None else mark.position
        state = None if mark is None else mark.state
        witnesses: list[int] = []
        if position:
            self._draws.begin_anew(self._seed_at(position))
        while True:
            if self._can_mark and position > begin and position % DISTANCE == 0:
                if state is not None:
                    self.mark = Mark(position - DISTANCE, state, tuple(witnesses))
                state = self._plain_state()
                witnesses = []
                self._draws.begin_anew(self._seed_at(position))
            try:
                sample = next(samples)
            except StopIteration:
                return
            if state is not None and position % _WITNESS_DISTANCE == 0:
                witnesses.append(digest(sample))
            position += 1
            yield sample

    def _seed_at(self, position: int) -> int:
        return self._seed + position * _SEEDS_APART

    def _plain_state(self) -> Any:
        """Return a copy of the stream's state; None where JSON would change it."""
        state = self._stream.state_dict()
        try:
            copy = json.loads(json.dumps(state))
        except (TypeError, ValueError):
            return None
        return copy if copy == state else None

    def continue_at(self, mark: Mark, iterate: Callable[[], Iterator[Any]]) -> Iterator[Any] | None:
        """Return the samples that follow ``DISTANCE`` behind the mark; None if the stream does not yield what
        it did when the mark was made. ``iterate`` begins to iterate over the stream.
        """
        self._stream.load_state_dict(mark.state)
        samples = self.read(iterate(), mark)
        with self._draws.active():
            again = list(islice(samples, DISTANCE))
        witnesses = tuple(map(digest, again[::_WITNESS_DISTANCE]))
        return samples if len(again) == DISTANCE and witnesses == mark.witnesses else None
