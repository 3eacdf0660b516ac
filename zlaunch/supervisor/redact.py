"""Find secrets in texts and in JSON, and take them out. Pure."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote, quote_plus

from zlaunch.plan.plan import (
    IN_ADDRESS,
    NOT_SHOWN,
    SECRET_WORDS,
    is_secret,
    secret_assignment,
    without_secrets,
)
from zlaunch.system.events import Event, decode

# -- redact -----------------------------------------------------------------------------------------


Span = tuple[int, int]

_SHORTEST_VALUE = 8
"""Characters of a secret that is looked for everywhere; a shorter one may be part of any word."""
_SHORTEST_LINE = 16
"""Characters of one line of a secret with several lines, such as a key, that is looked for by itself."""
_KEY_CHARACTERS = 16_000
"""The longest block of a private key; more than that of a cut text is not needed to see where one began."""
_NAME_CHARACTERS = 200

FAMILIES = {
    "Hugging Face": r"hf_[A-Za-z0-9]{16,}",
    "GitHub": r"gh[opsur]_[A-Za-z0-9]{16,}",
    "GitHub, fine-grained": r"github_pat_\w{16,}",
    "GitLab": r"glpat-[\w-]{16,}",
    "NVIDIA": r"nvapi-[\w-]{16,}",
    "PyPI": r"pypi-[\w-]{32,}",
    "npm": r"npm_[A-Za-z0-9]{16,}",
    "Docker": r"dckr_pat_[\w-]{16,}",
    "Slack webhook": r"hooks\.slack\.com/(?:services|workflows)/[\w/-]{16,}",
    "Discord webhook": r"discord(?:app)?\.com/api/webhooks/\d+/[\w-]{16,}",
}
"""Tokens that can be told by their form, wherever they stand."""
FAMILIES_OF_WORDS = {
    "AWS": r"(?:AKIA|ASIA)[0-9A-Z]{16}",
    "Google": r"AIza[\w-]{30,}",
    "OpenAI": r"sk-[\w-]{16,}",
    "Slack": r"xox[a-z]-[\w-]{10,}",
    "Google, access": r"ya29\.[\w-]{16,}",
    "SendGrid": r"SG\.[\w-]{16,}\.[\w-]{16,}",
    "JSON web token": r"eyJ[\w-]{5,}\.[\w-]{5,}\.[\w-]*",
    "header": r"(?:Bearer|Basic)[ ]+[\w.~+/-]{16,}=*",
}
"""Tokens whose first letters also end other words, so that they count only where a word begins."""
_WELL_KNOWN = re.compile(
    "|".join(FAMILIES.values())
    # A word also begins after a color, or after a line break that is written as \n.
    + r"|(?:(?<![A-Za-z0-9])|(?<=[\[;0-9]m)|(?<=\\[nrt]))"
    + f"(?:{'|'.join(FAMILIES_OF_WORDS.values())})"
)
_PRIVATE_KEY = re.compile(
    r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----"
    rf"(?:[\s\S]{{0,{_KEY_CHARACTERS}}}?-----END [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----|[A-Za-z0-9+/=\\\s]*)"
)
_COOKIE = re.compile(r"\bCookie:[ \t]*([^\r\n\"']+)", re.IGNORECASE)
_ADDRESS = re.compile(IN_ADDRESS)
IN_CONTEXT = {
    "signature of a shared address": r"[?&]sig=([\w%+/=-]{16,})",
    "sshpass": r"\bsshpass[ \t]+-p[ \t]*(VALUE)",
    "mysql": r"\b(?:mysql|mysqldump|mysqladmin|mariadb)\b[^\n|;]{0,500}?[ \t]-p(VALUE)",
    "curl": r"\bcurl\b[^\n|;]{0,500}?[ \t](?:-u|--user)[ \t=]*([\"']?[^\s:]+:VALUE)",
    "netrc": r"\blogin[ \t]+\S+\s+password[ \t]+(VALUE)",
}
"""Secrets that can be told by what stands before them. The group is what is taken out."""

_WORD = re.compile(SECRET_WORDS, re.IGNORECASE)
_NAME_END = re.compile(r"[\w.-]*")
_NAME_START = re.compile(r"[\w.-]*\Z")
_GAP = r"((?:[ \t]|\x1b\[[0-9;]*m)*)"  # blanks and colours
_ASSIGNMENT = re.compile(rf"""(\\*["'])?{_GAP}(=(?!=)|:(?!:)){_GAP}""")
_NEXT_ARGUMENT = re.compile(r"""\\*["']?,?(?:[ \t]|\\\r?\n)+(?!\\*["']?-)""")
_QUOTED = re.compile(
    r"""(?P<quote>\\+["'])(?P<escaped>[^\n]*?)(?:(?P=quote)|$)|"(?P<double>(?:[^"\\\n]|\\.)*)"""
    r"""|'(?P<single>(?:[^'\\\n]|\\.)*)""",
    re.MULTILINE,
)
_REMOVED = rf"(?:{re.escape(NOT_SHOWN)}|\(left out\))"  # one word, although it has a blank
_BARE = re.compile(rf"(?:{_REMOVED}|[^\s\x1b])+")
_MEMBER = re.compile(rf"(?:{_REMOVED}|[^\s,}}\]])+")
_WHOLE_LINE = re.compile(
    rf"(?:(?:Basic|Bearer|Digest|Token)[ \t]+)?(?:{_REMOVED}|\S)+(?=[ \t]*(?:\r|\n|#|$))", re.IGNORECASE
)
_LIKE_A_TOKEN = re.compile(r"(?=[^\s\d]*\d)[\w+/=-]{12,}(?![\w.])")
_HARMLESS = re.compile(
    r"[\[({]*(?i:true|false|none|null|nan|inf|default|[-+]?\d*\.\d+(?:e[-+]?\d+)?|[-+]?\d+e[-+]?\d+"
    rf"|{_REMOVED})[,;)}}\]]*"
)
_SHORT_NUMBER = re.compile(r"[\[({]*[-+]?\d{1,6}[,;)}\]]*")
_ERRORS = ("error", "exception", "warning")
_OF_MODELS = re.compile("TOKEN|KEY", re.IGNORECASE)
"""Words that names of plain numbers have as well: pad_token_id, num_key_value_heads."""


_IN_CONTEXT = tuple(re.compile(form.replace("VALUE", _BARE.pattern)) for form in IN_CONTEXT.values())


def secret_values(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the values of variables with secret names, in each spelling in which one may be printed."""
    found: dict[str, None] = {}
    for name, given in environ.items():
        value = given.strip()
        if not is_secret(name) or len(value) < _SHORTEST_VALUE:
            continue
        lines = value.splitlines() if "\n" in value else ()
        for text in (value, *(line for line in lines if len(line) >= _SHORTEST_LINE)):
            data = text.encode("utf-8", "surrogateescape")
            spellings = (json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1], repr(text)[1:-1])
            found |= dict.fromkeys((text, *spellings, quote(data), quote(data, safe=""), quote_plus(data)))
    return tuple(found)


def redact(text: str, values: Sequence[str] = (), start: int = 0, stop: int | None = None) -> tuple[str, int]:
    """Return a text, or its part from start to stop, without secrets, and how many were taken out.

    A secret that lies across the edge of the part is taken out as a whole: half of it is not left.
    """
    return _without(text, [*_given(text, values), *_by_form(text), *_by_name(text)], start, stop)


def redact_arguments(arguments: Sequence[str], values: Sequence[str] = ()) -> tuple[str, ...]:
    """Return a command line without secrets, argument by argument."""
    shown: list[str] = []
    name = ""
    for argument in arguments:
        if name and not argument.startswith("-") and not _is_harmless(name, argument):
            shown.append(NOT_SHOWN)
        elif (found := secret_assignment(argument)) and not _is_harmless(
            argument[slice(*found)], argument[found[1] :]
        ):
            shown.append(argument[: found[1]] + NOT_SHOWN)  # all of it, blanks too
        else:
            shown.append(redact(argument, values)[0])
        is_name = argument.startswith("-") and "=" not in argument and is_secret(argument)
        name = argument if is_name else ""
    return tuple(shown)


def redact_json(text: str, values: Sequence[str] = (), indent: int | None = None) -> tuple[str, int]:
    """Return JSON without secrets, and how many were taken out. What is not JSON is taken as text."""
    try:
        data = json.loads(text)
        if not isinstance(data, (dict, list)):
            return redact(text, values)
        shown, count = _redact_data(data, values)
        written = json.dumps(shown, indent=indent, separators=None if indent else (",", ":"))
    except (ValueError, RecursionError):
        return redact(text, values)
    # A value that JSON has as a number, or in some other way that the walk has not seen, goes as text.
    written, more = _without(written, _given(written, values))
    return written, count + more


def _redact_data(data: Any, values: Sequence[str]) -> tuple[Any, int]:
    if isinstance(data, str):
        return redact(data, values)
    if isinstance(data, list):
        if all(isinstance(each, str) for each in data):  # it may be a command line
            shown = without_secrets(data)
            count = sum(after != before for after, before in zip(shown, data, strict=True))
            data = list(shown)
        else:
            count = 0
        pairs = [_redact_data(each, values) for each in data]
        return [each for each, _ in pairs], count + sum(more for _, more in pairs)
    if isinstance(data, dict):
        found = {}
        count = 0
        for name, value in data.items():
            shown, more = _hide(name, value) if is_secret(name) else _redact_data(value, values)
            found[redact(name, values)[0]] = shown
            count += more
        return found, count
    return data, 0


def _hide(name: str, data: Any) -> tuple[Any, int]:
    """Hide the texts and whole numbers under a secret name; other numbers, such as a loss, are no secrets."""
    if isinstance(data, dict):
        members = {inner: _hide(name, value) for inner, value in data.items()}
        count = sum(more for _, more in members.values())
        return {inner: shown for inner, (shown, _) in members.items()}, count
    if isinstance(data, list):
        parts = [_hide(name, value) for value in data]
        return [shown for shown, _ in parts], sum(more for _, more in parts)
    if isinstance(data, (bool, float)) or data is None or _is_harmless(name, str(data)):
        return data, 0
    return NOT_SHOWN, 1


def _without(text: str, spans: Iterable[Span], start: int = 0, stop: int | None = None) -> tuple[str, int]:
    """Replace what is in the spans, in a part of a text."""
    stop = len(text) if stop is None else stop
    pieces: list[str] = []
    count = 0
    at = start
    for first, last in _merged(spans):
        if last <= start or first >= stop:
            continue
        pieces += [text[at : max(at, first)], NOT_SHOWN]
        count = count + 1
        at = last
    return "".join([*pieces, text[at:stop]]), count


def _merged(spans: Iterable[Span]) -> list[Span]:
    found: list[Span] = []
    for first, last in sorted(spans):
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(last, found[-1][1]))
        else:
            found.append((first, last))
    return found


# -- where they are ----------------------------------------------------------------------------


def _given(text: str, values: Sequence[str]) -> Iterator[Span]:
    """Find values that are known to be secret."""
    for value in values:
        at = text.find(value)
        while at >= 0:
            yield at, at + len(value)
            at = text.find(value, at + len(value))


def _by_form(text: str) -> Iterator[Span]:
    """Find what looks like a secret whatever it is called."""
    for pattern in (_WELL_KNOWN, _PRIVATE_KEY):
        for match in pattern.finditer(text):
            yield match.span()
    for match in _ADDRESS.finditer(text):
        yield match.start() + len("://"), match.end() - 1
    for pattern in (_COOKIE, *_IN_CONTEXT):
        for match in pattern.finditer(text):
            if not _HARMLESS.fullmatch(match[1]):
                yield match.span(1)


def _by_name(text: str) -> Iterator[Span]:
    """Find the values of NAME=value, "name": "value", `name: value` and --name value with secret names."""
    at = 0
    while word := _WORD.search(text, at):
        # The patterns are matched at the end of the name: to search for whole names would take the square
        # of the length of a long word.
        start = word.start()
        end = _NAME_END.match(text, word.end()).end()  # type: ignore[union-attr]
        near = max(0, start - _NAME_CHARACTERS)
        line = text.rfind("\n", near, start) + 1 or near
        start = line + _NAME_START.search(text[line:start]).start()  # type: ignore[union-attr]
        name = text[start:end]
        found = _assigned(text, name, end, is_first=not text[line:start].strip(" \t-"))
        if found is None and name[0] == "-":
            found = _argument(text, end)
        if found is not None and not _is_harmless(name, text[slice(*found)]):
            yield found
        at = max(end, found[1] if found is not None else 0)


def _is_harmless(name: str, value: str) -> bool:
    """Tell whether a value is a plain number or word although its name is secret."""
    if not value or _HARMLESS.fullmatch(value):
        return True
    return not is_secret(_OF_MODELS.sub("", name)) and _SHORT_NUMBER.fullmatch(value) is not None


def _assigned(text: str, name: str, end: int, *, is_first: bool) -> Span | None:
    """Return where the value is that a name is given, if there is one: text that only looks alike stays.

    `is_first`: nothing stands in front of the name in its line.
    """
    if (sign := _ASSIGNMENT.match(text, end)) is None:
        return None
    mark, space, how, space_after = sign.groups()
    if quoted := _inside(text, sign.end()):
        return quoted
    if how == "=":
        pattern = _BARE
    elif mark:
        pattern = _MEMBER
    elif name.lower().endswith(_ERRORS):
        return None  # the last line of a traceback
    else:
        pattern = _WHOLE_LINE if is_first else _LIKE_A_TOKEN
    found = pattern.match(text, sign.end())
    if found is None or (how == "=" and (space or space_after) and re.search(r"[(\[{]", found[0])):
        return None  # source code, such as `key = make(...)`, says more than it hides
    return found.span()


def _argument(text: str, end: int) -> Span | None:
    """Return where the argument after a flag is."""
    if (gap := _NEXT_ARGUMENT.match(text, end)) is None:
        return None
    if quoted := _inside(text, gap.end()):
        return quoted
    found = _BARE.match(text, gap.end())
    return found.span() if found else None


def _inside(text: str, at: int) -> Span | None:
    """Return what is inside of the quotes that begin here."""
    if (match := _QUOTED.match(text, at)) is None:
        return None
    name = next(name for name in ("escaped", "double", "single") if match[name] is not None)
    return match.span(name) if match[name] else None


# -- excerpts ---------------------------------------------------------------------------------------
#
# Read the files of a run's folder for a report: only those in it, a bounded part of each, no secrets.


HEAD_BYTES = 16 << 10
TAIL_BYTES = 64 << 10
"""Limits what is taken of a log's beginning and end."""
FIRST_METRICS = 50
LAST_METRICS = 500
"""Lines of metrics that are taken."""
_MARGIN_BYTES = 16 << 10
"""Read beyond a cut, so that a secret that lies across it is seen whole."""
_NEAR_BYTES = 4 << 10
"""A log is cut between two lines where there is a line break so near."""
_EVENT_BYTES = 1 << 20
_FILE_BYTES = 16 << 20
_METRICS = b'"type":"metrics"'
_NOISE = (b'"type":"output"', b'"type":"pong"')


@dataclass(frozen=True, slots=True)
class Excerpt:
    """Holds the part of a file that goes into a report."""

    text: str
    secrets: int
    """Counts those that were taken out."""
    size: int
    """Bytes of the whole file."""
    left_out: int = 0
    """Bytes of a log, or lines of the events, that are not in the text."""


@dataclass(slots=True)
class KnownEvents:
    """Holds the events of a run: the text for the report, and those that are no metrics."""

    excerpt: Excerpt
    events: list[Event] = field(default_factory=list)


def open_inside(folder: Path, name: str) -> BinaryIO:
    """Open a plain file in a folder. Raises OSError, also for a link that leads out of the folder."""
    try:
        path = (folder / name).resolve(strict=True)
    except RuntimeError:  # Python before 3.13 says so of links in a circle
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from None
    if not path.is_relative_to(folder.resolve()):
        raise OSError(errno.EPERM, "it is a link to outside of the run's folder")
    # O_NONBLOCK: to open a FIFO would wait for somebody who writes into it.
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is no plain file")
    return open(fd, "rb")


def as_text(data: bytes) -> str:
    """Decode what may be any bytes, so that `as_bytes` gives the same ones again."""
    return data.decode("utf-8", "surrogateescape")


def as_bytes(text: str) -> bytes:
    """Encode what `as_text` has decoded, or anything else."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # half of a character, which JSON may name
        return text.encode("utf-8", "backslashreplace")


def read_whole(folder: Path, name: str, values: tuple[str, ...]) -> Excerpt:
    """Read a JSON file. Raises OSError."""
    with open_inside(folder, name) as file:
        size = os.fstat(file.fileno()).st_size
        if size > _FILE_BYTES:
            raise OSError(errno.EFBIG, f"it has {size} bytes, which is too much")
        text, secrets = redact_json(as_text(file.read(_FILE_BYTES)), values, indent=1)
    return Excerpt(text + "\n", secrets, size)


def read_ends(folder: Path, name: str, values: tuple[str, ...]) -> Excerpt:
    """Read the beginning and the end of a log, cut between lines where that is possible. Raises OSError."""
    with open_inside(folder, name) as file:
        size = os.fstat(file.fileno()).st_size  # of a log that grows, what is there now
        if size <= HEAD_BYTES + TAIL_BYTES:
            text, secrets = redact(as_text(file.read(size)), values)
            return Excerpt(text, secrets, size)
        head = file.read(HEAD_BYTES + _MARGIN_BYTES)
        file.seek(size - TAIL_BYTES - _MARGIN_BYTES)
        tail = file.read(TAIL_BYTES + _MARGIN_BYTES)
    stop = head.rfind(b"\n", HEAD_BYTES - _NEAR_BYTES, HEAD_BYTES) + 1 or HEAD_BYTES
    start = tail.find(b"\n", _MARGIN_BYTES - 1, _MARGIN_BYTES + _NEAR_BYTES) + 1 or _MARGIN_BYTES
    first, count = redact(as_text(head), values, 0, len(as_text(head[:stop])))
    last, more = redact(as_text(tail), values, len(as_text(tail[:start])))
    left_out = size - stop - (len(tail) - start)
    note = f"\n[zlaunch bundle: {left_out} bytes left out here]\n"
    return Excerpt(first.removesuffix("\n") + note + last, count + more, size, left_out)


def read_events(folder: Path, name: str, values: tuple[str, ...]) -> KnownEvents:
    """Read all events but output and pongs, and of the metrics the first and the last. Raises OSError."""
    kept: list[tuple[int, str]] = []
    events: list[Event] = []
    last: deque[tuple[int, bytes]] = deque(maxlen=LAST_METRICS)
    secrets = metrics = long = 0

    def keep(number: int, line: bytes) -> None:
        nonlocal secrets
        text, count = redact_json(as_text(line.rstrip(b"\n")), values)
        kept.append((number, text))
        secrets += count

    with open_inside(folder, name) as file:
        size = os.fstat(file.fileno()).st_size
        number = 0
        is_rest = False
        while line := file.readline(_EVENT_BYTES):
            number += 1
            whole = line.endswith(b"\n")
            if is_rest or (not whole and len(line) == _EVENT_BYTES):
                long += not is_rest
                is_rest = not whole
            elif not whole and decode_safely(line) is None:
                continue  # the rest of it may still be on its way, and half a secret is at its end
            elif _METRICS in line:  # not parsed: most lines of a long run are metrics
                metrics += 1
                if metrics <= FIRST_METRICS:
                    keep(number, line)
                else:
                    last.append((number, line))
            elif not any(mark in line for mark in _NOISE):
                if event := decode_safely(line):  # else another program has written into the file
                    events.append(event)
                keep(number, line)
    for number, line in last:
        keep(number, line)
    text = "".join(f"{line}\n" for _, line in sorted(kept))
    left_out = max(0, metrics - FIRST_METRICS - LAST_METRICS) + long
    return KnownEvents(Excerpt(text, secrets, size, left_out), events)


def decode_safely(line: bytes) -> Event | None:
    """Read a line as an event; None also for one that is nested too deep."""
    try:
        return decode(line)
    except RecursionError:
        return None
