"""A JSON reader that allows comments and trailing commas, and names the place of every mistake."""

from __future__ import annotations

import json
import re
from typing import Any

_SPACE = re.compile(r"(?:[ \t\r\n]+|//[^\n]*|#[^\n]*|/\*.*?\*/)*", re.DOTALL)
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?")
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


def parse(text: str) -> tuple[Any, list[tuple[str, str]]]:
    """Return the value of `text` and, for each key written twice, its dotted path and a message."""
    reader = _Reader(text)
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
                raise self.problem('expected a key in double quotes or "}"')
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
