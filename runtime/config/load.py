"""Reading a config from a file, a dict or a base64 string."""

from __future__ import annotations

import base64
import binascii
import json
import numbers
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import yaml

from ...errors import ZlaunchError
from .check import check, join
from .schema import Config

# -- jsonc ------------------------------------------------------------------------------------------
#
# A JSON reader that allows comments and trailing commas, and names the place of every mistake.


_SPACE = re.compile(r"(?:[ \t\r\n]+|//[^\n]*|#[^\n]*|/\*.*?\*/)*", re.DOTALL)
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?")
_BARE_KEY = re.compile(r"[A-Za-z_][\w.-]*[ \t]*:")
_WORD = re.compile(r"-?[A-Za-z_]\w*")
_WORDS = {
    "true": True,
    "false": False,
    "null": None,
    "NaN": float("nan"),
    "Infinity": float("inf"),
    "-Infinity": float("-inf"),
}
_PYTHON = {"True": "true", "False": "false", "None": "null"}
MAX_DEPTH = 64
_STRINGS = json.JSONDecoder()


class SyntaxProblem(ValueError):
    """A mistake in the text; `where` is "line L, column C"."""

    def __init__(self, text: str, at: int, message: str) -> None:
        self.where = f"line {text.count(chr(10), 0, at) + 1}, column {at - text.rfind(chr(10), 0, at)}"
        self.message = message
        super().__init__(f"{self.where}: {message}")


class BareKeyProblem(SyntaxProblem):
    """A key without quotes, as Hjson allows."""


def parse(text: str) -> tuple[Any, list[tuple[str, str]]]:
    """Return the value of `text` and, for each key written twice, its dotted path and a message."""
    reader = _Reader(text)
    if reader.is_at_bare_key():  # Hjson needs no braces around the whole
        raise BareKeyProblem(text, reader.at, 'expected "{"')
    value = reader.value("", 0)
    reader.skip()
    if reader.at < len(text):
        raise reader.problem("unexpected text after the end")
    return value, reader.duplicates


class _Reader:
    """Recursive descent over one text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.duplicates: list[tuple[str, str]] = []

    def problem(self, message: str, at: int | None = None) -> SyntaxProblem:
        return SyntaxProblem(self.text, self.at if at is None else at, message)

    def skip(self) -> None:
        """Pass over spaces and comments."""
        match = _SPACE.match(self.text, self.at)
        self.at = match.end() if match else self.at
        if self.text.startswith("/*", self.at):
            raise self.problem("this comment is never closed")

    def peek(self) -> str:
        """Return the next character that is not space or comment, or an empty string at the end."""
        self.skip()
        return self.text[self.at : self.at + 1]

    def value(self, path: str, depth: int) -> Any:
        start = self.peek()
        if depth > MAX_DEPTH:
            raise self.problem(f"nested more than {MAX_DEPTH} deep")
        if start == "{":
            return self.object(path, depth)
        if start == "[":
            return self.array(path, depth)
        if start == '"':
            return self.string()
        if match := _NUMBER.match(self.text, self.at) or _WORD.match(self.text, self.at):
            return self.scalar(match)
        raise self.problem("expected a value" if start else "the text ends where a value should be")

    def is_at_bare_key(self) -> bool:
        """Tell whether a word and a colon come next."""
        self.skip()
        return _BARE_KEY.match(self.text, self.at) is not None

    def scalar(self, match: re.Match[str]) -> Any:
        word = match.group()
        after = self.text[match.end() : match.end() + 1]
        if after and (after.isalnum() or after in "_.+-"):
            raise self.problem("this is not a JSON number or word")
        if word[-1].isdigit() and word.lstrip("-")[0].isdigit():
            if len(word) > 400:
                raise self.problem("this number is too long")
            self.at = match.end()
            return float(word) if set(word) & set(".eE") else int(word)
        if word not in _WORDS:
            right = f"write {_PYTHON[word]}" if word in _PYTHON else "strings need double quotes"
            raise self.problem(f"{word[:40]!r} is not a JSON value ({right})")
        self.at = match.end()
        return _WORDS[word]

    def string(self) -> str:
        try:
            value, self.at = _STRINGS.raw_decode(self.text, self.at)
        except json.JSONDecodeError as error:
            raise self.problem(error.msg, error.pos) from None
        return str(value)

    def array(self, path: str, depth: int) -> list[Any]:
        items: list[Any] = []
        self.at += 1
        while self.peek() != "]":
            items.append(self.value(f"{path}.{len(items)}", depth + 1))
            self.comma("]")
        self.at += 1
        return items

    def object(self, path: str, depth: int) -> dict[str, Any]:
        items: dict[str, Any] = {}
        self.at += 1
        while (start := self.peek()) != "}":
            if start != '"':
                kind = BareKeyProblem if self.is_at_bare_key() else SyntaxProblem
                raise kind(self.text, self.at, 'expected a key in double quotes or "}"')
            place = self.at
            key = self.string()
            full = f"{path}.{key}" if path else key
            if self.peek() != ":":
                raise self.problem('expected ":" after the key')
            self.at += 1
            value = self.value(full, depth + 1)
            if key in items:
                where = self.problem("", place).where
                self.duplicates.append((full, f"key is given twice ({where})"))
            items[key] = value
            self.comma("}")
        self.at += 1
        return items

    def comma(self, close: str) -> None:
        """Step over the comma between items; the closing bracket may follow it."""
        if self.peek() == ",":
            self.at += 1
        elif self.peek() != close:
            starts_another = self.peek() in ('"', "{", "[")
            missing = ": a comma is missing before this" if starts_another else ""
            raise self.problem(f'expected "," or "{close}"{missing}')


# -- load -------------------------------------------------------------------------------------------


_MOST_CHARS = 1 << 24
_YAML = (".yaml", ".yml")
_BASE64 = re.compile(r"[A-Za-z0-9_-]+={0,2}")
_MAX_VALUES = 200_000


class ConfigError(ZlaunchError, ValueError):
    """Everything that is wrong with a config, one problem a line; ``warnings`` were found beside them."""

    def __init__(self, problems: Sequence[str], warnings: Sequence[str] = ()) -> None:
        self.problems = tuple(problems)
        self.warnings = tuple(warnings)
        super().__init__("\n".join(problems))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problems, self.warnings)


class ConfigFileError(ConfigError):
    """A source that cannot be read as a config at all: missing, empty or broken; one line."""


@dataclass(frozen=True)
class Loaded:
    """A checked config in which "auto" is still open."""

    config: Config
    """The config; keys set to "auto" have their defaults here."""
    raw: dict[str, Any]
    """What was read, unchanged."""
    origin: str
    """File name, "<dict>" or "<base64>"."""
    given: frozenset[str]
    """Dotted paths that the source sets, without those set to "auto"."""
    auto: frozenset[str]
    """Dotted paths set to "auto"."""
    warnings: tuple[str, ...]
    """One line each."""
    dropped: Mapping[str, str]
    """Dotted paths that the source sets and that are ignored as a whole, and why."""


def load(source: str | os.PathLike[str] | Mapping[str, Any]) -> Loaded:
    """Read and check a config; raise ConfigError with all problems.

    `source` is the path of a JSON file (comments and trailing commas allowed) or a YAML file, a dict,
    or JSON in url-safe base64.
    """
    origin, value, doubled = _read(source)
    plain = _Plain()
    raw = plain.copy(value, "", 0)
    problems = [*doubled, *plain.problems]
    if not isinstance(raw, dict):
        kind = "a list" if isinstance(raw, list) else "nothing" if raw is None else "a single value"
        form = '{"KEY": VALUE, ...}'
        problems.append(("", f"expected an object of keys and values at the top, {form}, not {kind}"))
        raw = {}
    config, report = check(raw)
    problems += report.problems
    warnings = tuple(_line(origin, *warning) for warning in report.warnings)
    if problems or config is None:
        raise ConfigError([_line(origin, *problem) for problem in dict.fromkeys(problems)], warnings)
    return Loaded(
        config, raw, origin, frozenset(report.given), frozenset(report.auto), warnings, report.dropped
    )


def _line(origin: str, path: str, message: str) -> str:
    return f"{origin}: {path}: {message}" if path else f"{origin}: {message}"


def _fail(origin: str, message: str) -> NoReturn:
    raise ConfigFileError([f"{origin}: {message}"])


def _read(source: object) -> tuple[str, Any, list[tuple[str, str]]]:
    """Return where the config comes from, its value and the keys that are given twice."""
    if isinstance(source, Mapping):
        return "<dict>", source, []
    if not isinstance(source, (str, os.PathLike)):
        _fail("config", f"expected a path, a dict or a base64 string, not {type(source).__name__}")
    path = os.fspath(source)
    if not isinstance(path, str):
        _fail("config", "the path must be a string, not bytes")
    if "\0" in path or not os.path.lexists(path):
        if isinstance(source, str) and (text := _from_base64(source)) is not None:
            return "<base64>", *_parse_json(text, "<base64>")
        named = path.lower().endswith((".json", *_YAML))
        shown = path if len(path) <= 200 else path[:197] + "..."
        _fail(shown, "no such file" if named else "no such file (and not base64 JSON)")
    try:
        with open(path, encoding="utf-8-sig") as file:
            text = file.read(_MOST_CHARS + 1)
    except UnicodeDecodeError as error:
        _fail(path, f"not UTF-8 text (byte {error.start})")
    except IsADirectoryError:
        _fail(path, "this is a folder, expected a JSON or YAML file")
    except OSError as error:
        _fail(path, f"cannot be read: {error.strerror or error}")
    if len(text) > _MOST_CHARS:
        _fail(path, f"is larger than {_MOST_CHARS >> 20} MiB: too large for a config")
    if not text.strip():
        _fail(path, "the file is empty")
    if path.lower().endswith(".toml"):
        _fail(path, "TOML is not supported, write the config as JSON or YAML")
    read = _parse_yaml if path.lower().endswith(_YAML) else _parse_json
    return os.path.basename(path), *read(text, path)


def _from_base64(text: str) -> str | None:
    """Return the JSON text inside, or None if this is no base64 of an object."""
    if not _BASE64.fullmatch(text):
        return None
    try:
        plain = base64.urlsafe_b64decode(text.rstrip("=") + "=" * (-len(text.rstrip("=")) % 4)).decode()
    except (binascii.Error, ValueError):
        return None
    return plain if plain.lstrip().startswith("{") else None


def _parse_json(text: str, path: str) -> tuple[Any, list[tuple[str, str]]]:
    try:
        return parse(text)
    except BareKeyProblem as error:
        return _parse_hjson(text, path, error)
    except SyntaxProblem as error:
        _fail(path, str(error))


_TO_THE_END = "Hjson reads text without quotes up to the end of its line"
_SWALLOWED = re.compile(r',$|["{}]|\s(#|//|/\*)')
"""Matches what no value of a config contains: a comma at the end, a quote, a brace, a comment."""


class _HjsonObject(dict[str, Any]):
    """An object of Hjson, with the keys that it has more than once."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        counts = Counter(key for key, _ in pairs)
        self.doubled = [key for key, count in counts.items() if count > 1]


def _parse_hjson(text: str, path: str, problem: SyntaxProblem) -> tuple[Any, list[tuple[str, str]]]:
    """Read Hjson, which DeepSpeed takes. Only bare keys lead here: in a text whose keys have quotes, Hjson
    would read a mistake as a string.
    """
    try:
        import hjson
    except ImportError:
        _fail(path, f"{problem} (keys without quotes are Hjson, which needs `pip install hjson`)")
    try:
        value = hjson.loads(text, object_pairs_hook=_HjsonObject)
    except hjson.HjsonDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        _fail(path, f"{problem}; as Hjson: {where}: {error.msg} ({_TO_THE_END})")
    except (IndexError, ArithmeticError, ValueError, RecursionError) as error:
        # hjson's own failures: a comment without an end, a number that is too large, too many levels.
        _fail(path, f"{problem}; as Hjson: it cannot be read ({error})")
    problems: list[tuple[str, str]] = []
    _find_hjson_mistakes(value, "", problems)
    return value, problems


def _find_hjson_mistakes(value: Any, path: str, problems: list[tuple[str, str]]) -> None:
    """Note keys that are given twice, and strings that have swallowed what follows them on their line."""
    if isinstance(value, _HjsonObject):
        problems += [(join(path, key), "key is given twice") for key in value.doubled]
        for key, item in value.items():
            _find_hjson_mistakes(item, join(path, key), problems)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _find_hjson_mistakes(item, join(path, index), problems)
    elif isinstance(value, str) and _SWALLOWED.search(value):
        problems.append((path, f"{value!r} is one text: {_TO_THE_END}; put it in quotes"))


class _YamlLoader(yaml.SafeLoader):
    """YAML where only true and false are booleans, and 1:30 is no number."""

    def construct_number(self, node: yaml.ScalarNode) -> Any:
        """Return a number; YAML 1.1 would read 1:30 as 90, it stays the text that somebody wrote."""
        if ":" in node.value:
            return node.value
        whole = node.tag.endswith(":int")
        return self.construct_yaml_int(node) if whole else self.construct_yaml_float(node)


for _kind in ("int", "float"):
    _YamlLoader.add_constructor(f"tag:yaml.org,2002:{_kind}", _YamlLoader.construct_number)
# YAML 1.1 also reads yes, no, on, off as booleans and dates as dates: none is meant in a config.
_YamlLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in rules if not tag.endswith((":bool", ":timestamp"))]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)


def _parse_yaml(text: str, path: str) -> tuple[Any, list[tuple[str, str]]]:
    doubled: list[tuple[str, str]] = []
    try:
        loader = _YamlLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None, []
        _find_doubled(node, "", 0, doubled, set())
        return loader.construct_document(node), doubled
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        _fail(path, f"{where}{error.problem or error.context}")
    except yaml.YAMLError as error:
        _fail(path, str(error).replace("\n", " "))
    except (ValueError, TypeError, RecursionError) as error:
        _fail(path, f"cannot be read as YAML: {error}".splitlines()[0][:200])


def _find_doubled(
    node: yaml.Node, path: str, depth: int, found: list[tuple[str, str]], visited: set[int]
) -> None:
    if id(node) in visited:  # anchors may share nodes, even in a circle
        return
    visited.add(id(node))
    if depth > MAX_DEPTH:
        raise ValueError(f"nested more than {MAX_DEPTH} deep")
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _find_doubled(item, join(path, index), depth + 1, found, visited)
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            name = str(key.value) if isinstance(key, yaml.ScalarNode) else "?"
            if name in seen and name not in ("?", "<<"):
                found.append((join(path, name), f"key is given twice (line {key.start_mark.line + 1})"))
            seen.add(name)
            _find_doubled(value, join(path, name), depth + 1, found, visited)


class _Plain:
    """Copies a value into plain JSON types and reports what does not fit."""

    def __init__(self) -> None:
        self.problems: list[tuple[str, str]] = []
        self.count = 0

    def copy(self, value: Any, path: str, depth: int) -> Any:
        self.count += 1
        if depth > MAX_DEPTH or self.count > _MAX_VALUES:
            self.problem(path, "nested too deeply" if depth > MAX_DEPTH else "too many values")
            return None
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            if not self.unicode(value):
                self.problem(path, "not valid Unicode text")
                return None
            return str.__str__(value)
        if isinstance(value, Mapping):
            return self.copy_mapping(value, path, depth)
        if isinstance(value, (list, tuple)):
            items = []
            for index, item in enumerate(value):
                if self.count > _MAX_VALUES:
                    break
                items.append(self.copy(item, join(path, index), depth + 1))
            return items
        return self.copy_leaf(value, path)

    def copy_mapping(self, value: Mapping[Any, Any], path: str, depth: int) -> dict[str, Any]:
        items = {}
        for key, item in value.items():
            if self.count > _MAX_VALUES:
                break
            if isinstance(key, str) and not self.unicode(key):
                self.problem(path, "a key is not valid Unicode text")
            elif isinstance(key, str):
                items[str.__str__(key)] = self.copy(item, join(path, key), depth + 1)
            else:
                self.problem(path, f"keys must be strings, not {type(key).__name__}")
        return items

    def copy_leaf(self, value: Any, path: str) -> Any:
        try:
            if str(getattr(value, "dtype", "")) == "bool" and getattr(value, "shape", None) == ():  # numpy's
                return bool(value)
            if isinstance(value, numbers.Integral):
                return int(value)
            if isinstance(value, numbers.Real):
                return float(value)
            if isinstance(value, os.PathLike):
                return str(os.fspath(value))
        except (OverflowError, ValueError):
            self.problem(path, "this number is too large")
            return None
        self.problem(path, f"expected a JSON value, not {type(value).__name__}")
        return None

    @staticmethod
    def unicode(text: str) -> bool:
        """Tell whether `text` can be written out; JSON escapes can name half a character."""
        try:
            text.encode()
        except UnicodeEncodeError:
            return False
        return True

    def problem(self, path: str, message: str) -> None:
        """Report once for each kind, so that a huge value gives one line."""
        if len(self.problems) < 50:
            self.problems.append((path[:200], message))
