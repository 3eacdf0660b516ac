"""Decide which trials of a sweep are not worth going on with: asynchronous successive halving. Pure.

L. Li et al., A System for Massively Parallel Hyperparameter Tuning (2020), in the form that stops trials and
never starts one again: at min_steps, and each time at `factor` times as many, a trial goes on only while it
is among the best 1/factor of those that have come there.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

from zlaunch.sweep.space import EarlyStopping


class SuccessiveHalving:
    """Compares trials at the last rung that each has come to."""

    def __init__(self, rules: EarlyStopping, goal: str) -> None:
        """Take the rules; `goal` is `min` or `max`."""
        self._rules, self._sign = rules, 1.0 if goal == "min" else -1.0
        self._rungs: dict[int, dict[int, float]] = defaultdict(dict)
        """Steps of a rung -> trial -> its metric there, the smaller the better."""

    def goes_on(self, trial: int, reports: Iterable[tuple[float, float]]) -> bool:
        """Take a trial's new reports, step and metric, in their order; tell whether it goes on.

        At a rung its first report there counts.
        """
        for step, value in reports:
            rung = self._rules.min_steps
            while rung <= step < math.inf:
                self._rungs[rung].setdefault(trial, self._sign * value if math.isfinite(value) else math.inf)
                rung *= self._rules.factor
        last = max((rung for rung, known in self._rungs.items() if trial in known), default=None)
        if last is None:
            return True
        known = self._rungs[last]
        better = sum(other < known[trial] for other in known.values())
        return math.isfinite(known[trial]) and better < math.ceil(len(known) / self._rules.factor)
