"""The order in which blocks were used last time: a hint for what to gather ahead, never a requirement."""

from __future__ import annotations


class OrderHint:
    """Remembers which block followed which in the last complete pass."""

    def __init__(self) -> None:
        self._now: list[int] = []
        self._after: dict[int, int] = {}
        self._last: int | None = None

    def visit(self, block: int) -> None:
        """Take note that ``block`` is used now."""
        if not self._now or self._now[-1] != block:
            self._now.append(block)

    def after(self, block: int) -> int | None:
        """The block that followed ``block`` last time, or None."""
        return self._after.get(block)

    def is_last(self, block: int) -> bool:
        """Whether the last pass ended with ``block``."""
        return self._last == block

    def end(self) -> None:
        """The pass is over: it becomes the hint."""
        if self._now:
            self._after = {}
            for current, following in zip(self._now, self._now[1:], strict=False):
                self._after.setdefault(current, following)
            self._last = self._now[-1]
        self._now = []
