"""Marks in a stream, from which a resumed run reads on without reading the stream from its beginning.

A stream that has ``state_dict`` and ``load_state_dict``, as Hugging Face's do, can continue at a sample.
Every rank and worker process reads the same stream, so one mark serves all, and any number of ranks.

Note [Marks are tested]. A stream's state may be incomplete: Hugging Face's leaves out the samples in a
shuffle buffer, which would never be trained on. So a mark has a digest of all samples between it
and the next one. A resumed run reads these samples again, since it was saved behind them; if one differs, it
reads the stream from its beginning. So it does after any error on the way.

Note [A copy is moved]. A state is loaded into a copy of the stream. The stream itself begins at its beginning
whoever iterates over it: the next epoch, another loader, the script. No other iterator is open on the copy:
Hugging Face's iterators read ahead in threads, which would move it.

Note [Draws between marks]. What a stream draws from the global generators begins anew at each mark, with a
seed of its place, as the generators' states are not saved. Marks are at multiples of a number of samples, so
the draws do not depend on the ranks, and are the same without a resume.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .draws import Draws
from .same_order import Digest

DISTANCE = 1024
"""Is the number of samples between two marks."""
_LARGEST_STATE = 1 << 20
"""Bounds a state, in characters of JSON: each process makes one at each mark, and checkpoints have it."""
_SEEDS_APART = 1_000_003
"""Separates the seeds of marks from the seeds of epochs, which are consecutive."""


@dataclass(frozen=True)
class Mark:
    """Is a place in a stream and how to continue there."""

    position: int
    """Counts the samples of the stream before the mark."""
    state: Any
    """Is what the stream's ``state_dict`` returned there, as JSON has it."""
    digest: int
    """Identifies the ``DISTANCE`` samples behind the mark."""

    def as_dict(self) -> dict[str, Any]:
        """Return it for a checkpoint."""
        return {"position": self.position, "state": self.state, "digest": self.digest}

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> Mark:
        """Return what :meth:`as_dict` has saved."""
        return cls(int(saved["position"]), saved["state"], int(saved["digest"]))


def has_state(stream: Any) -> bool:
    """Return whether a stream has ``state_dict()`` and ``load_state_dict(state)``."""
    try:
        inspect.signature(stream.state_dict).bind()
        inspect.signature(stream.load_state_dict).bind({})
    except (AttributeError, TypeError, ValueError):
        return False
    return True


class MarkedStream:
    """Reads a stream and notes its marks; the last one whose samples have all been read is in ``mark``."""

    def __init__(self, stream: Any, draws: Draws, seed: int, complain: Callable[[str], None]) -> None:
        """``complain`` is called with the reason if the stream has a state that cannot be saved."""
        self._stream = stream
        self._draws = draws
        self._seed = seed
        self._complain = complain
        self._can_mark = has_state(stream)
        self.mark: Mark | None = None

    def read(self, samples: Iterator[Any], mark: Mark | None = None) -> Iterator[Any]:
        """Yield the samples, which begin at ``mark``, or at the stream's beginning. Read it within
        ``Draws.active``.
        """
        begin = 0 if mark is None else mark.position
        position = begin
        state = None if mark is None else mark.state
        found = Digest()
        if position:
            self._draws.begin_anew(self._seed_at(position))
        while True:
            if self._can_mark and position > begin and position % DISTANCE == 0:
                if state is not None:
                    self.mark = Mark(position - DISTANCE, state, found.value())
                state = self._plain_state()
                found = Digest()
                self._draws.begin_anew(self._seed_at(position))
            try:
                sample = next(samples)
            except StopIteration:
                return
            if state is not None:
                found.add(sample)
            position += 1
            yield sample

    def _seed_at(self, position: int) -> int:
        return self._seed + position * _SEEDS_APART

    def _plain_state(self) -> Any:
        """Return a copy of the stream's state; None where there is none that JSON keeps."""
        try:
            state = self._stream.state_dict()
            text = json.dumps(state)
            copy = json.loads(text)
            if copy != state:
                why = "JSON would change it"
            elif len(text) > _LARGEST_STATE:
                why = f"it is larger than {_LARGEST_STATE} characters"
            else:
                return copy
        except Exception as error:  # a resume would be slow; that is no reason to end the training
            why = f"{type(error).__name__}: {error}"
        self._can_mark = False
        self._complain(f"its state cannot be saved ({why})")
        return None

    def continue_at(self, mark: Mark, iterate: Callable[[], Iterator[Any]]) -> Iterator[Any] | None:
        """Return the samples that follow ``DISTANCE`` behind the mark; None if the stream does not yield what
        it did when the mark was made. ``iterate`` begins to iterate over the stream.
        """
        self._stream.load_state_dict(mark.state)
        samples = self.read(iterate(), mark)
        found = Digest()
        with self._draws.active():
            for _ in range(DISTANCE):
                try:
                    found.add(next(samples))
                except StopIteration:
                    return None
        return samples if found.value() == mark.digest else None
