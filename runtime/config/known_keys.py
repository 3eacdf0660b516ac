"""The names of all keys, and what to say about one that is unknown where it stands."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from functools import cache
from typing import Any, get_args

from pydantic.fields import FieldInfo

from .field_types import Section
from .foreign_keys import CONTAINERS, Advice, advise
from .forms import form
from .optimizers import OPTIMIZER_PARAMS, SCHEDULER_PARAMS
from .schema import Config

_NOTE = re.compile(r"[^A-Za-z\s]|comments?$|$")
"""Top-level keys that are somebody's own remarks, whatever they resemble: _comment, $schema, //."""
_CLOSE = 0.75
"""Least likeness of a typo to the key that is meant: a wrong suggestion is worse than none."""
_ALIKE = 0.9
"""Least likeness of names that differ in their number of words."""
_PRECISIONS = frozenset(("fp16", "bf16", "torch_autocast"))
"""Sections of which a config enables one."""
_COMMON = frozenset(
    (
        *("classes", "copies", "data", "debug", "every", "fast", "gamma", "group", "metric", "mode", "names"),
        *("offload", "online", "overwrite", "params", "passes", "plan", "profile", "project", "ratio"),
        *("schedule", "stability", "team", "theta", "tol", "type", "verbose", "verbosity", "version"),
        "workspace",
    )
)
"""Keys of sections whose names scripts use for other things: at the top level nothing says what is meant."""
_LONGEST = 100
"""Most characters of a value that is shown in its right place."""


def join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key) or '""'


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


def section_at(path: str) -> type[Section] | None:
    """Return the model of the section at a dotted path, or None if there is none."""
    model: type[Section] | None = Config
    if not path:
        return model
    for name in path.split("."):
        info = model.model_fields.get(name) if model else None
        model = section_of(info) if info else None
    return model


def unknown(key: str, path: str, known: Iterable[str], value: Any = None) -> Advice:
    """Return what to say about an unknown key of the section ``path`` and its value."""
    known = list(known)
    bare = key.strip().lower()
    if bare != key and (exact := {name.lower(): name for name in known}.get(bare)):
        written = "without spaces" if key != key.strip() else "in small letters"
        return Advice(f"unknown key {key!r}, write {exact}, {written}", True)
    is_note = not path and _NOTE.match(key) is not None
    if not is_note and (found := advise(key, value, path)) is not None:
        return found
    places = [place for place in homes().get(key, ()) if place != path]
    if path in _PRECISIONS and places and _PRECISIONS.issuperset(places):
        # moved to the other section, it would switch nothing on, or the wrong dtype
        return Advice(
            f"unknown key, only {' and '.join(places)} {'have' if len(places) > 1 else 'has'} it", True
        )
    if places and (path or key not in _COMMON):
        example = form(join(places[0], key), value) if len(places) == 1 and value is not None else ""
        shown = f": {example}" if example and len(example) <= _LONGEST else ""
        return Advice(f"unknown key here, it belongs {_belongs(places)}{shown}", True)
    if not is_note and (path or key not in CONTAINERS) and (close := _closest(key, known)):
        return Advice(f"unknown key, did you mean {close}?", True)
    if path == "" or len(known) > 12:
        return Advice("unknown key", path != "")
    return Advice(f"unknown key, expected one of {', '.join(known)}", True)


def _closest(key: str, known: Iterable[str]) -> str:
    """Return the known key that ``key`` is a typo of, or a part of; "" if none is close enough.

    eval_batch_size is like train_batch_size, and is something else: each word must be like the known one.
    """
    known = list(known)
    spelled = {name.lower(): name for name in known}
    for near in difflib.get_close_matches(key.lower(), spelled, 5, _CLOSE):
        if _is_typo(key.lower(), near):
            return spelled[near]
    parts = [name for name in known if f"_{name}_".startswith(f"_{key}_") or f"_{name}_".endswith(f"_{key}_")]
    return parts[0] if "_" in key and len(parts) == 1 else ""


def _is_typo(key: str, known: str) -> bool:
    pairs = zip(key.split("_"), known.split("_"), strict=False)
    if key.count("_") == known.count("_") and all(_ratio(*pair) >= _CLOSE for pair in pairs):
        return True
    return _ratio(key.replace("_", ""), known.replace("_", "")) >= _ALIKE


def _ratio(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def _belongs(places: list[str]) -> str:
    sections = [place for place in places if place]
    if not sections:
        return "to the top level"
    shown = ([] if len(sections) == len(places) else ["the top level"]) + sections
    if len(shown) > 3:
        return f"in a section, such as {', '.join(shown[:3])}"
    return f"in {' or '.join((', '.join(shown[:-1]), shown[-1])) if len(shown) > 1 else shown[0]}"
