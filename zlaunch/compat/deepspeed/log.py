"""``deepspeed.utils.logger`` and ``log_dist``."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from zlaunch.runtime.environment import read_environment

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
    place = read_environment()
    rank = place.rank
    if place.world_size == 1 or rank in (ranks or ()) or -1 in (ranks or ()):
        logger.log(level, "[Rank %d] %s", rank, message)


def log_dist_once(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on these ranks as :func:`log_dist` does, each message once."""
    if message not in _logged:
        _logged.add(message)
        log_dist(message, ranks, level)


_logged: set[str] = set()
_LEVELS = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error", "critical")}


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Set the level, ``"debug"`` to ``"critical"``. Raises ValueError."""
    if log_level_str.lower() not in _LEVELS:
        raise ValueError(f"log level {log_level_str!r}: expected one of {', '.join(_LEVELS)}")
    (custom_logger or logger).setLevel(_LEVELS[log_level_str.lower()])
