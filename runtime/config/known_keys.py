"""The names of all keys, and what to say about one that is unknown where it stands."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from functools import cache
from typing import Any, get_args

from pydantic.fields import FieldInfo

from .field_types import Section
from .foreign_keys import find_wish
from .optimizers import OPTIMIZER_PARAMS, OTHER_NAMES, SCHEDULER_PARAMS
from .schema import Config

_NOTE = re.compile(r"[^A-Za-z]|comments?$")
"""Top-level keys that are somebody's own remarks, whatever they resemble: _comment, $schema, //."""
_CLOSE = 0.75
"""At the top level a key of another tool is no typo; inside a section any likeness counts."""


def join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def extra(info: FieldInfo) -> dict[str, Any]:
    return info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}


def section_of(info: FieldInfo) -> type[Section] | None:
    """Return the model of a sub-section, or None for a plain value."""
    for kind in (info.annotation, *get_args(info.annotation)):
        if isinstance(kind, type) and issubclass(kind, Section):
            return kind
    return None


@cache
def names(model: type[Section]) -> dict[str, str]:
    """Map every accepted spelling to the field's name."""
    spelled = {
        alias: name for name, info in model.model_fields.items() for alias in extra(info).get("aliases", ())
    }
    return {**{name: name for name in model.model_fields}, **spelled}


@cache
def homes() -> dict[str, list[str]]:
    """Map each key to the sections that have it, the top level being ""."""
    found: dict[str, list[str]] = {}

    def visit(model: type[Section], path: str) -> None:
        for spelling in names(model):
            places = found.setdefault(spelling, [])
            if path not in places:
                places.append(path)
        for name, info in model.model_fields.items():
            if inner := section_of(info):
                visit(inner, join(path, name))

    visit(Config, "")
    for model in OPTIMIZER_PARAMS.values():
        visit(model, "optimizer.params")
    for model in SCHEDULER_PARAMS.values():
        visit(model, "scheduler.params")
    return found


def unknown(key: str, path: str, known: Iterable[str], value: Any = None) -> tuple[str, bool]:
    """Return what to say about an unknown key of the section ``path`` and its value, and whether it must be a
    mistake.
    """
    known = list(known)
    if OTHER_NAMES.get(key) in known:
        return f"unknown key, did you mean {OTHER_NAMES[key]}?", True
    if places := [place for place in homes().get(key, ()) if place != path]:
        return f"unknown key here, it belongs {_belongs(places)}", True
    is_note = not path and _NOTE.match(key) is not None
    if not path and not is_note and (wish := find_wish(key, value)) is not None:
        return wish, True
    if path:
        close = difflib.get_close_matches(key, known, 1)
    else:
        close = [] if is_note else difflib.get_close_matches(key, known, 1, _CLOSE)
    if close:
        return f"unknown key, did you mean {close[0]}?", True
    if path == "" or len(known) > 12:
        return "unknown key", path != ""
    return f"unknown key, expected one of {', '.join(known)}", True


def _belongs(places: list[str]) -> str:
    sections = [place for place in places if place]
    if not sections:
        return "to the top level"
    shown = ([] if len(sections) == len(places) else ["the top level"]) + sections
    if len(shown) > 3:
        return f"in a section, such as {', '.join(shown[:3])}"
    return f"in {' or '.join((', '.join(shown[:-1]), shown[-1])) if len(shown) > 1 else shown[0]}"
