"""Parse hostfiles: one host or host pattern a line, `[USER@]HOST[:PORT] [slots=N] [port=N]`, `#` comments.

The grammar is a superset of what DeepSpeed and Open MPI read; their words that mean nothing here are passed
over. All bad lines are reported at once.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
from dataclasses import dataclass

from zlaunch.errors import LaunchError
from zlaunch.hostfiles.hostlist import MAX_HOSTS, HostListError, expand_pattern, short

_NUMBER = re.compile(r"\d{1,6}", re.ASCII)
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*\$?")
_IPV6_CHARS = re.compile(r"[0-9A-Za-z:.%_-]+")
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_USER_KEYS = ("user", "username", "user_name", "user-name")
_IGNORED_WORDS = {"nolocal", "sequential"}
_LOWEST_SSH_PORT = 22


class HostfileError(LaunchError, ValueError):
    """Says why a hostfile cannot be read; the text has a line for each problem and is for the user."""


class _BadLine(Exception):
    """Says what is wrong with one line."""


@dataclass(frozen=True, slots=True)
class HostEntry:
    """Describes one host of a hostfile."""

    host: str
    """A name or an address; IPv6 without brackets."""
    slots: int | None = None
    """Number of slots, at least 1; None means all devices found there."""
    user: str | None = None
    port: int | None = None
    """Port of sshd."""
    line: int = 0
    """Number of the line, counted from 1."""


def read(path: str | os.PathLike[str]) -> list[HostEntry]:
    """Parse a file. Raises HostfileError, also when it cannot be read."""
    name = os.fspath(path)
    try:
        with open(name, "rb") as file:
            text = file.read().decode()
    except UnicodeDecodeError as error:
        raise HostfileError(f"{name}: not a text file (byte {error.start} is not UTF-8)") from None
    except OSError as error:
        raise HostfileError(f"hostfile {name}: {error.strerror or error}") from None
    except ValueError as error:  # a zero byte in the path
        raise HostfileError(f"{name!r}: {error}") from None
    return parse(text, name)


def parse(text: str, name: str) -> list[HostEntry]:
    """Parse the text of a file: return the hosts in order, without those with `slots=0`.

    ``name`` is the file's, for messages.
    """
    entries: list[HostEntry] = []
    problems: list[str] = []
    first: dict[str, HostEntry] = {}
    for number, line in enumerate(re.split(r"\r\n|\n|\r", text.removeprefix("\ufeff")), start=1):
        words = re.sub(r"\s*=\s*", "=", line.partition("#")[0]).split()
        try:
            found = _parse_line(words, number) if words else []
            for entry in found:
                if len(first) > MAX_HOSTS:
                    raise HostfileError(f"{name}:{number}: more than {MAX_HOSTS} hosts")
                known = first.setdefault(entry.host.lower(), entry)
                if known is not entry:
                    raise _BadLine(_repeated(entry, known))
        except _BadLine as error:
            problems.append(f"{name}:{number}: {error}")
        else:
            entries += (entry for entry in found if entry.slots != 0)
    if problems:
        raise HostfileError("\n".join(problems))
    if not entries:
        why = "every host has slots=0" if first else "no hosts found"
        raise HostfileError(f"{name}: {why}; write one per line, such as: worker-0 slots=8")
    return entries


def _repeated(entry: HostEntry, known: HostEntry) -> str:
    if known.line == entry.line:
        return f"this line's pattern names host {entry.host!r} twice"
    if entry.port != known.port and entry.port is not None and known.port is not None:
        return (
            f"host {entry.host!r} has port {entry.port} here and {known.port} on line {known.line}; keep one"
        )
    return f"host {entry.host!r} is on line {known.line} already; write it once, with all its slots"


def _parse_line(words: list[str], line: int) -> list[HostEntry]:
    if "=" in words[0]:
        raise _BadLine(f"expected a host, got {short(words[0])}; write HOST slots=N")
    values = _parse_words(words[1:])
    user, host, port_text = _split_address(words[0])
    slots = _parse_slots(values["slots"]) if "slots" in values else None
    port = None if port_text is None else _parse_port(port_text, values)
    if "port" in values:
        named = _parse_port(values["port"])
        if port is not None and port != named:
            raise _BadLine(f"port {port} after the host and port={named}; keep one")
        port = named
    for key in _USER_KEYS:
        if key in values:
            if user is not None and user != values[key]:
                raise _BadLine(f"user {user!r} before the host and {key}={short(values[key])}; keep one")
            user = _checked_user(values[key])
    return [HostEntry(name, slots, user, port, line) for name in _hosts(host)]


def _parse_words(words: list[str]) -> dict[str, str]:
    """Read `key=value` words; keys that are not known are kept too, a near miss of ours is an error."""
    values: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals and key.lower() in _IGNORED_WORDS:
            continue
        if not equals and key in ("slots", "port"):
            raise _BadLine(f"{key!r} needs a number; write {key}=N")
        if not equals:
            hint = (
                f"; write slots={word}"
                if _NUMBER.fullmatch(word)
                else "; write KEY=VALUE, or # before a comment"
            )
            raise _BadLine(f"cannot parse {short(word)}{hint}")
        if not _KEY.fullmatch(key):
            raise _BadLine(f"cannot parse {short(word)}; write KEY=VALUE")
        near = difflib.get_close_matches(key.lower(), ["slots", "port"], n=1, cutoff=0.75)
        if near and key != near[0]:
            raise _BadLine(f"unknown option {short(word)}. Did you mean {f'{near[0]}={value}'!r}?")
        if key in values:
            raise _BadLine(f"{key}= appears twice; keep one")
        values[key] = value
    return values


def _split_address(text: str) -> tuple[str | None, str, str | None]:
    """Split `[USER@]HOST[:PORT]`, where the host may be `[v6]`, bare v6 or a pattern."""
    before, at, address = text.rpartition("@")
    user = _checked_user(before) if at else None
    inside, closed, after = address[1:].partition("]")
    if address.startswith("[") and closed and ":" in inside:
        if after and not after.startswith(":"):
            raise _BadLine(f"{short(address)}: write [ADDRESS]:PORT")
        return user, _checked_ipv6(inside), after[1:] if after else None
    if address.count(":") > 1:
        return user, _checked_ipv6(address), None
    host, colon, port = address.partition(":")
    return user, host, port if colon else None


def _hosts(text: str) -> list[str]:
    if ":" in text:  # IPv6, checked
        return [text]
    try:
        hosts = expand_pattern(text)
    except HostListError as error:
        raise _BadLine(f"{error}; write one host or pattern per line") from None
    for host in hosts:
        if not is_host(host):
            raise _BadLine(f"{short(host)} is not a host name")
    return hosts


def is_host(text: str) -> bool:
    """Tell whether a text can be a host's name."""
    return _HOST.fullmatch(text) is not None


def _checked_ipv6(text: str) -> str:
    try:
        if _IPV6_CHARS.fullmatch(text) and ipaddress.IPv6Address(text):
            return text
    except ValueError:
        pass
    raise _BadLine(f"{short(text)} is not an IPv6 address; with a port, write [ADDRESS]:PORT")


def _checked_user(text: str) -> str:
    if not _USER.fullmatch(text):
        raise _BadLine(f"{short(text)} is not a user name; write USER@HOST")
    return text


def _parse_slots(text: str) -> int:
    if _NUMBER.fullmatch(text):
        return int(text)
    if re.fullmatch(r"-\d+", text):
        raise _BadLine(f"slots={short(text)} is negative; write the number of workers, or 0 to skip the host")
    raise _BadLine(f"slots={short(text)} is not a number; write the number of workers, such as slots=8")


def _parse_port(text: str, values: dict[str, str] | None = None) -> int:
    """Read a port; with ``values`` it was written after a colon, where others mean slots."""
    if not _NUMBER.fullmatch(text) or not 1 <= int(text) <= 65535:
        raise _BadLine(f"{short(text)} is not a port; write a number from 1 to 65535")
    port = int(text)
    if values is not None and port < _LOWEST_SSH_PORT and "slots" not in values:
        raise _BadLine(
            f"':{port}' after a host is its ssh port; write slots={port} for workers, or port={port} for ssh"
        )
    return port
