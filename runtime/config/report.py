"""Collects what is found in a config."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class ConfigReport:
    """Collects what was found; every list keeps the order of the file."""

    strict: bool | None = None
    """True: every unknown key is a problem; False: none is; None: what could be a mistake is."""
    problems: list[tuple[str, str]] = field(default_factory=list)
    warnings: list[tuple[str, str]] = field(default_factory=list)
    given: set[str] = field(default_factory=set)
    auto: set[str] = field(default_factory=set)
    dropped: dict[str, str] = field(default_factory=dict)
    """Keeps what was given and is ignored, with the reason."""
    without_effect: list[str] = field(default_factory=list)
    """Keys, with their values, that ask for the opposite of what always holds."""
