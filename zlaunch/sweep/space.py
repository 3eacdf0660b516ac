"""Read what a sweep tries, from YAML or CSV, and list its trials. Pure, but for reading the file."""

from __future__ import annotations

import csv
import difflib
import io
import itertools
import json
import math
import random
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from zlaunch.errors import LaunchError

Value = str | int | float | bool | None
Values = dict[str, Value]
"""Parameter -> value: `--name` is an argument of the script, any other name a key of its config."""
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_NAME = re.compile(r"--[A-Za-z][\w-]*|[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
_KEYS = ("method", "parameters", "samples", "seed", "metric", "goal", "early_stopping")
_RANGES = ("uniform", "log_uniform", "int_uniform")
_DIGITS = 1000
"""A number with more is infinite, and so a text."""
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C, if libyaml was there
_MOST = 100_000
"""Trials of a sweep; more are a mistake."""
_MOST_VALUES = 10_000_000
"""Values of all trials."""


@dataclass(frozen=True, slots=True)
class EarlyStopping:
    """Says when trials are compared: after `min_steps`, and each time at `factor` times as many."""

    min_steps: int
    factor: int


@dataclass(frozen=True, slots=True)
class SweepSpace:
    """Holds what a sweep tries, and by what it judges."""

    trials: tuple[Values, ...]
    metric: str = "loss"
    goal: str = "min"
    early_stopping: EarlyStopping | None = None


def read_space(path: Path) -> SweepSpace:
    """Read a sweep's file: trials as rows of a CSV, or a grid or random samples described in YAML.

    Raises LaunchError, which names the file and the key.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix == ".csv":
            return SweepSpace(_rows(io.StringIO(text, newline="")))
        loader = _LOADER(text)
        node = loader.get_single_node()
        _check_twice(node, {})
        content = None if node is None else loader.construct_document(node)
    except OSError as error:
        raise LaunchError(f"{path}: {error.strerror}") from None
    except RecursionError:
        raise LaunchError(f"{path} contains itself") from None
    except (UnicodeDecodeError, yaml.YAMLError, csv.Error) as error:
        raise LaunchError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    except _SpaceError as error:
        raise LaunchError(f"{path}: {error}") from None
    try:
        return _space(content)
    except _SpaceError as error:
        raise LaunchError(f"{path}: {error}") from None


class _SpaceError(ValueError):
    """Says what is wrong with a key."""


def _check_twice(node: yaml.Node | None, visited: dict[int, bool]) -> None:
    """Refuse a key that is given twice, of which YAML takes the last. Raises _SpaceError or RecursionError.

    ``visited`` nodes are passed over: aliases of aliases can stand for billions of copies of one node. They
    are true while what is in them is looked at.
    """
    if not isinstance(node, yaml.MappingNode):
        return
    if visited.get(id(node)):
        raise RecursionError
    if id(node) in visited:
        return
    visited[id(node)] = True
    keys: set[str] = set()
    for key, value in node.value:
        if isinstance(key, yaml.ScalarNode):
            if key.value in keys:
                raise _SpaceError(f"{key.value} is given twice")
            keys.add(key.value)
        _check_twice(value, visited)
    visited[id(node)] = False


def _rows(lines: Iterable[str]) -> tuple[Values, ...]:
    reader = csv.DictReader(lines)
    rows = [(reader.line_num, row) for row in reader]
    names: set[str] = set()
    for name in reader.fieldnames or ():
        _check_name(name)
        if name in names:
            raise _SpaceError(f"parameter {name} appears in two columns")
        names.add(name)
    if not rows:
        raise _SpaceError("no rows below the parameter names")
    for number, row in rows:
        if None in row or None in row.values():
            raise _SpaceError(f"line {number} does not have {len(reader.fieldnames or ())} values")
    return tuple({name: _cell(name, text) for name, text in row.items()} for _, row in rows)


def _cell(name: str, text: str) -> Value:
    """Return true, false and null of a CSV as such."""
    if text in ("true", "false", "null"):
        known: Value = json.loads(text)
        return known
    found: Value = _read(name, text)
    return found


def _read(name: str, value: Any) -> Any:
    """Return the number that a text is, for a key of the config: YAML takes 1e-4, without a point, for text.

    A script gets its arguments as they are written.
    """
    return _number(value) if isinstance(value, str) and not name.startswith("--") else value


def _number(text: str) -> Value:
    if not _NUMBER.fullmatch(text):
        return text
    is_whole = text.lstrip("+-").isdecimal() and len(text) < _DIGITS
    number = int(text) if is_whole else float(text)
    return number if math.isfinite(number) else text


def _space(content: object) -> SweepSpace:
    if not isinstance(content, dict):
        raise _SpaceError("the key `parameters` is missing: put names and values below it")
    unknown = [str(key) for key in content if key not in _KEYS]
    if unknown:
        raise _SpaceError(f"{unknown[0]}: unknown key{_near(unknown[0], _KEYS)}")
    parameters = content.get("parameters")
    if not isinstance(parameters, dict) or not parameters:
        raise _SpaceError("parameters: names and values are missing")
    for name in parameters:
        _check_name(name)
    method = content.get("method", "grid")
    if method not in ("grid", "random"):
        raise _SpaceError(f"method: {reprlib.repr(method)} is neither grid nor random")
    if method == "grid":
        for key in ("samples", "seed"):
            if key in content:
                raise _SpaceError(f"{key}: needs `method: random`")
        trials = _grid(parameters)
    else:
        samples = _count(content, "samples")
        seed = content.get("seed", 0)
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise _SpaceError(f"seed: {reprlib.repr(seed)} is not a whole number")
        trials = _random(parameters, samples, random.Random(seed))
    metric = content.get("metric", "loss")
    goal = content.get("goal", "min")
    if not isinstance(metric, str) or not metric:
        raise _SpaceError(f"metric: {reprlib.repr(metric)} is not a name")
    if goal not in ("min", "max"):
        raise _SpaceError(f"goal: {reprlib.repr(goal)} is neither min nor max")
    return SweepSpace(trials, metric, goal, _early_stopping(content.get("early_stopping")))


def _near(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f", did you mean {near[0]}?" if near else f"; there is {', '.join(known)}"


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        shown = reprlib.repr(name)
        raise _SpaceError(
            f"parameter {shown}: write --name for an argument of the script, or a.key of its config"
        )


def _count(content: Mapping[str, Any], key: str, low: int = 1) -> int:
    number = content.get(key)
    if isinstance(number, bool) or not isinstance(number, int) or number < low:
        raise _SpaceError(f"{key}: expected an integer of at least {low}, got {reprlib.repr(number)}")
    return number


def _early_stopping(given: object) -> EarlyStopping | None:
    if given is None:
        return None
    if not isinstance(given, dict):
        raise _SpaceError("early_stopping: expected a section with min_steps and factor")
    for name in given:
        if name not in ("min_steps", "factor"):
            raise _SpaceError(
                f"early_stopping.{name}: unknown key{_near(str(name), ('min_steps', 'factor'))}"
            )
    given = {"factor": 3, **given}
    try:
        return EarlyStopping(_count(given, "min_steps"), _count(given, "factor", 2))
    except _SpaceError as error:
        raise _SpaceError(f"early_stopping.{error}") from None


def _listed(name: str, given: object) -> list[Value] | None:
    """Return the values of a parameter that lists them; None for a range."""
    if isinstance(given, dict):
        if set(given) == {"values"}:
            given = given["values"]
        elif len(given) == 1 and set(given) <= set(_RANGES):
            return None
        else:
            raise _SpaceError(
                f"parameters.{name}: expected a list, or one of {', '.join(('values', *_RANGES))}"
            )
    values = given if isinstance(given, list) else [given]
    if not values:
        raise _SpaceError(f"parameters.{name}: the list is empty")
    for value in values:
        if not isinstance(value, (str, int, float, bool, type(None))):
            shown = reprlib.repr(value)
            raise _SpaceError(
                f"parameters.{name}: expected a string, a number, true, false or null, got {shown}"
            )
    return [_read(name, value) for value in values]


def _grid(parameters: Mapping[str, object]) -> tuple[Values, ...]:
    columns = {name: _listed(name, given) for name, given in parameters.items()}
    for name, values in columns.items():
        if values is None:
            raise _SpaceError(f"parameters.{name}: a range needs `method: random`; a grid needs a list")
    lists = [values or [] for values in columns.values()]
    _check_number("parameters", math.prod(map(len, lists)), len(lists))
    return tuple(dict(zip(columns, row, strict=True)) for row in itertools.product(*lists))


def _check_number(key: str, trials: int, parameters: int) -> None:
    """Refuse more trials than a sweep can have run. Raises _SpaceError."""
    most = min(_MOST, _MOST_VALUES // parameters)
    if trials > most:
        shown = str(trials) if trials < 10**18 else "more than 10**18"
        raise _SpaceError(f"{key}: {shown} trials, the limit is {most}")


def _random(parameters: Mapping[str, object], samples: int, chance: random.Random) -> tuple[Values, ...]:
    _check_number("samples", samples, len(parameters))
    listed = {name: _listed(name, given) for name, given in parameters.items()}
    trials = []
    for _ in range(samples):
        trial: Values = {}
        for name, values in listed.items():
            given = parameters[name]
            if values is not None:
                trial[name] = chance.choice(values)
            else:
                assert isinstance(given, dict)
                [(kind, ends)] = given.items()
                trial[name] = _drawn(name, kind, ends, chance)
        trials.append(trial)
    return tuple(trials)


def _drawn(name: str, kind: str, ends: object, chance: random.Random) -> Value:
    found: list[Any] = ends if isinstance(ends, list) else []
    found = [_number(end) if isinstance(end, str) else end for end in found]
    numbers = [end for end in found if isinstance(end, (int, float)) and not isinstance(end, bool)]
    if (
        len(numbers) != 2
        or len(found) != 2
        or not all(map(math.isfinite, numbers))
        or numbers[0] > numbers[1]
    ):
        raise _SpaceError(f"parameters.{name}.{kind}: expected [LOW, HIGH], got {reprlib.repr(ends)}")
    low, high = numbers
    if kind == "int_uniform":
        if not (isinstance(low, int) and isinstance(high, int)):
            raise _SpaceError(f"parameters.{name}.{kind}: expected integers, got {reprlib.repr(ends)}")
        return chance.randint(low, high)
    if kind == "log_uniform":
        if low <= 0:
            raise _SpaceError(f"parameters.{name}.{kind}: expected numbers above 0, got {reprlib.repr(ends)}")
        return math.exp(chance.uniform(math.log(low), math.log(high)))
    return chance.uniform(low, high)
