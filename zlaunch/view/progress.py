"""Follow a run by its events: how far each rank is, what the numbers were, where the time goes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from zlaunch.system.events import Event
from zlaunch.system.processes import signal_name

_MOST_POINTS = 1000
_MOST_NAMES = 64
"""Series that are kept: a script may report under as many names as it likes."""
_RECENT = 32
"""Reports of a rank whose times are averaged."""
_COUNTS = (
    "step",
    "steps",
    "of_epoch",
    "engine_step",
    "rows",
    "timed_steps",
    "micro_tokens",
    "moved_mb",
    "disk_mb",
)
_LARGEST = 1e100
TIMES = ("forward_ms", "backward_ms", "step_ms", "communication_ms", "disk_ms", "script_ms")
"""Names the parts of a step's time in a report; together they are `all_ms`."""


class Series:
    """Holds the points of a curve, at most a thousand: then neighbours become their mean."""

    def __init__(self) -> None:
        self.points: list[tuple[float, float]] = []
        self._stride = 1
        self._open: list[tuple[float, float]] = []

    def add(self, x: float, y: float) -> None:
        """Add a point of finite numbers."""
        self._open.append((x, y))
        if len(self._open) < self._stride:
            return
        self.points.append(_mean(self._open))
        self._open = []
        if len(self.points) >= _MOST_POINTS:
            pairs = zip(self.points[::2], self.points[1::2], strict=False)
            self.points = [_mean(pair) for pair in pairs]
            self._stride *= 2

    def shown(self) -> list[tuple[float, float]]:
        """Return the points, with those that have no mean yet."""
        return [*self.points, *([_mean(self._open)] if self._open else [])]


@dataclass(slots=True)
class RankProgress:
    """Holds what is known of one rank."""

    host: str = ""
    state: str = "starting"
    values: dict[str, float] = field(default_factory=dict)
    """The last values of each name."""
    heard: float = 0.0
    """When it last reported, in seconds since the epoch."""
    peak_gb: float = 0.0
    recent: list[dict[str, float]] = field(default_factory=list)
    """The times of its last reports."""

    def times(self) -> dict[str, float]:
        """Return the mean milliseconds of a step's parts, and `all_ms`; empty where none are known."""
        names = (*TIMES, "all_ms")
        if not self.recent:
            return {}
        counts = [each.get("timed_steps", 1.0) for each in self.recent]
        pairs = list(zip(self.recent, counts, strict=True))
        whole = max(sum(counts), 1.0)
        return {name: sum(each.get(name, 0.0) * count for each, count in pairs) / whole for name in names}


class RunProgress:
    """Takes the events of a run, in their order, and knows where it stands."""

    def __init__(self, shown: Callable[[str], str] = str) -> None:
        """Make the progress of a run without events; ``shown`` returns the user's name of a node."""
        self.shown = shown
        self.ranks: dict[int, RankProgress] = {}
        self.series: dict[str, Series] = {}
        """The curves of rank 0 over steps, by name."""
        self.memory: dict[int, Series] = {}
        """GB over minutes, by rank."""
        self.started = self.last = 0.0
        self.attempt = 0
        self.node_count: int | None = None
        """Counts the nodes of the whole run. With one launcher per node, that is more than this launcher's
        own. None if no event has told it.
        """
        self.restarts: list[float] = []
        self.failures: list[str] = []
        self.checkpoints: list[tuple[float, str]] = []
        self.limits: dict[str, float] = {}
        """Holds what rank 0 can reach, by name, as it has measured at its start."""
        self._first_step: tuple[float, float] | None = None

    def take_all(self, events: Iterable[Event]) -> RunProgress:
        """Take several events; return this object."""
        for event in events:
            self.take(event)
        return self

    def take(self, event: Event) -> None:
        """Take one event. One that another program has written, and makes no sense, changes nothing."""
        kind = event.get("type")
        rank = event.get("rank")
        when = _number(event.get("time"))
        if when is None:
            return
        self.last = max(self.last, when)
        if kind == "start":
            self._start(event, when)
        elif kind == "lost":
            lost = self.shown(str(event.get("host")))
            self.failures.append(f"{lost} {event.get('why')}")
            for known in self.ranks.values():
                if known.host == lost:
                    known.state = "node lost"
        elif kind == "error":
            self.failures.append(str(event.get("message")))
        elif kind == "checkpoint":
            self.checkpoints.append((when, str(event.get("tag"))))
        elif kind == "outcome" and isinstance(event.get("errors"), list):
            texts = [str(text) for text in event["errors"]]
            self.failures += [text for text in texts if text not in self.failures]
        elif isinstance(rank, int):
            known = self.ranks.setdefault(rank, RankProgress())
            known.host = self.shown(str(event.get("host", known.host)))
            if kind == "spawn":
                known.state = "running"
            elif kind == "exit":
                known.state = _end_of(event.get("returncode"))
                if known.state not in ("done", "ended") and not event.get("after_stop"):
                    reason = f": {event['reason']}" if event.get("reason") else ""
                    self.failures.append(f"rank {rank} on {known.host}: {known.state}{reason}")
            elif kind == "environment" and isinstance(event.get("limits"), dict):
                read = {str(name): _number(value) for name, value in event["limits"].items()}
                self.limits = {name: value for name, value in read.items() if value is not None}
            elif kind == "exception":
                self.failures.append(f"rank {rank}: {event.get('exception')}")
            elif kind == "metrics" and isinstance(event.get("values"), dict):
                self._metrics(rank, known, event["values"], when)

    @property
    def failure(self) -> str:
        """Return the first failure of the last attempt in one line: of a hang also where the first rank is.
        Empty where it had none.
        """
        if not self.failures:
            return ""
        first, *more = self.failures[0].strip().splitlines() or [""]
        place = next((line.strip() for line in more if line.startswith("  rank ")), "")
        return f"{first}; {place}" if first.startswith("hang: ") and place else first

    def _start(self, event: Event, when: float) -> None:
        self.started = self.started or when
        attempt = event.get("attempt")
        self.attempt = attempt if isinstance(attempt, int) else 0
        nodes = event.get("nodes")
        self.node_count = nodes if isinstance(nodes, int) and nodes > 0 else None
        if self.attempt:
            self.restarts.append(when)
            self.failures = []  # of the attempt before
        self._first_step = None
        self.ranks = {}

    def _metrics(self, rank: int, known: RankProgress, given: Mapping[str, Any], when: float) -> None:
        read = {str(name): _number(value) for name, value in given.items()}
        values = {name: value for name, value in read.items() if value is not None}
        # a total without an epoch is the run's: the script has begun to report its own
        replaced = {*read, "of_epoch"} if "steps" in read else read
        known.values = {name: v for name, v in known.values.items() if name not in replaced} | values
        known.heard = when
        memory = values.get("memory_gb")
        if memory is not None:
            known.peak_gb = max(known.peak_gb, memory)
            self.memory.setdefault(rank, Series()).add((when - (self.started or when)) / 60, memory)
        if "all_ms" in values:
            known.recent = [*known.recent[1 - _RECENT :], values]
        if rank != 0:
            return
        step = values.get("step", known.values.get("step"))
        if step is None:
            return
        if self._first_step is None:
            self._first_step = step, when
        for name, value in values.items():
            if name not in _COUNTS and (name in self.series or len(self.series) < _MOST_NAMES):
                self.series.setdefault(name, Series()).add(step, value)

    # -- what follows from that

    @property
    def step(self) -> int | None:
        """Return the step that rank 0 last reported."""
        return self._whole("step")

    @property
    def steps(self) -> int | None:
        """Return how many steps there will be, where the run has said it."""
        return self._whole("steps")

    @property
    def of_epoch(self) -> int | None:
        """Return the epoch that `steps` ends; None where it ends the run."""
        return self._whole("of_epoch")

    def _whole(self, name: str) -> int | None:
        value = self.ranks[0].values.get(name) if 0 in self.ranks else None
        return int(value) if value is not None else None

    def seconds_left(self, now: float | None = None) -> float | None:
        """Return how long the rest takes at the mean speed of this attempt, from the last report on, or from
        ``now``; None where that is not known, or if it should have ended by now.
        """
        step = self.step
        steps = self.steps
        if step is None or not steps or self._first_step is None or step <= self._first_step[0]:
            return None
        first, when = self._first_step
        heard = self.ranks[0].heard
        left = (heard - when) / (step - first) * (steps - step)
        since = 0.0 if now is None else max(0.0, now - heard)
        return left - since if left >= since else None

    def facts(self) -> dict[str, float]:
        """Return what is known of rank 0's steps besides times: its last values, and what it can reach."""
        return {**self.limits, **(self.ranks[0].values if 0 in self.ranks else {})}

    def times(self) -> dict[int, dict[str, float]]:
        """Return the mean milliseconds of a step's parts of each rank that has reported some."""
        found = {rank: known.times() for rank, known in sorted(self.ranks.items())}
        return {rank: times for rank, times in found.items() if times.get("all_ms", 0.0) > 0}


def span(seconds: float) -> str:
    """Write a time such as `42 s`, `3 min 12 s`, `5 h 02 min`."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _number(value: object) -> float | None:
    """Return a finite number of a size that can be drawn; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if -_LARGEST < value < _LARGEST else None


def _mean(points: Iterable[tuple[float, float]]) -> tuple[float, float]:
    xs, ys = zip(*points, strict=True)
    return sum(xs) / len(xs), sum(ys) / len(ys)


def _end_of(code: object) -> str:
    if not isinstance(code, int):
        return "ended"
    return "done" if code == 0 else f"exit {code}" if code > 0 else signal_name(-code)
