"""Give `--local_rank=N`, which DeepSpeed's launcher puts before each script's arguments, where it is known.

Note [Local rank]
A script for torchrun does not expect the option: its parser would end it, and a script that looks at
``sys.argv[1]`` or ``len(sys.argv)`` would find something else there. Without it, the
ranks of a script for DeepSpeed may each train alone.

- A script whose file declares the option gets it as DeepSpeed's launcher gives it. Only a parser of argparse
  that does not know it does not get it, because the file may also have other parsers.
- In another script, parsers of argparse that know the option, maybe in another file, get it with the
  arguments of the command. Nothing else sees it.

A parser that knows `--local-rank`, as torch.distributed.launch passes it, gets that.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

from zlaunch.system.import_watch import when_imported

_NAME = "--local_rank"
_OTHER_NAME = "--local-rank"
_FROM_PARAMETERS = {"fire", "tyro", "jsonargparse"}
"""Names libraries that make options of a function's parameters or a class's fields."""


def spelling_in(text: bytes) -> str:
    """Return the option as the source text of a script declares it; "" if it does not.

    A string that is the option declares it, as argparse and click have it. Without the dashes, as absl,
    getopt and a search in ``sys.argv`` may have it, the name declares it unless the script reads LOCAL_RANK:
    then it may be one of the script's own. So does a parameter or a field of this name where the script
    imports what makes options of these.
    """
    if b"local_rank" not in text and b"local-rank" not in text:
        return ""
    import ast  # few scripts come here

    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError):
        return ""  # running the script tells what is wrong
    strings = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    options = {each.rstrip("=") for each in strings}
    for spelling in (_NAME, _OTHER_NAME):
        if spelling in options:
            return spelling
    if "LOCAL_RANK" in strings:
        return ""
    if "local_rank" in options:
        return _NAME
    imported = {each.name for node in nodes if isinstance(node, ast.Import) for each in node.names}
    imported |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    if not _FROM_PARAMETERS & {name.partition(".")[0] for name in imported}:
        return ""
    parameters = {node.arg for node in nodes if isinstance(node, ast.arg)}
    fields = {
        each.target.id
        for node in nodes
        if isinstance(node, ast.ClassDef)
        for each in node.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    return _NAME if "local_rank" in parameters | fields else ""


def watch(value: str, *, is_passed: bool) -> None:
    """Adapt argparse now, or as soon as it is imported.

    Args:
        value: this worker's local rank.
        is_passed: ``sys.argv`` has the option, as its first argument.
    """
    adapt = _hide_where_unknown if is_passed else _give_where_known
    when_imported("argparse", functools.partial(adapt, f"{_NAME}={value}"))


# -- a script that declares it ----------------------------------------------------------------------


def _hide_where_unknown(argument: str, module: ModuleType) -> None:
    def adapted(self: Any, given: list[str], is_command: bool) -> list[str]:
        # Only where it stands first, as the launcher puts it: what the user has passed is the script's.
        if given[:1] not in ([argument], [argument.replace(_NAME, _OTHER_NAME)]):
            return given
        known = _as_known(argument, self)
        if is_command and not known:
            # Processes that the script starts parse it as well.
            sys.argv.remove(given[0])
        return [*known, *given[1:]]

    # Not ``parse_known_args``: a second parser may know what it leaves.
    for name in ("parse_args", "parse_intermixed_args"):
        _wrap(module.ArgumentParser, name, adapted)


def _as_known(argument: str, parser: Any) -> list[str]:
    """Return the argument as a parser knows it; none if neither it nor one of a command of it does."""
    if own := _known_by(argument, parser):
        return own
    return [argument] if any(_as_known(argument, command) for command in _commands(parser)) else []


def _commands(parser: Any) -> Iterator[Any]:
    """Yield the parsers of a parser's commands. One that alone knows the option cannot be given it, so the
    error of argparse stays.
    """
    for action in parser._actions:
        if isinstance(action.choices, Mapping):
            yield from (each for each in action.choices.values() if hasattr(each, "_option_string_actions"))


# -- another script ---------------------------------------------------------------------------------


def _give_where_known(argument: str, module: ModuleType) -> None:
    def adapted(self: Any, given: list[str], is_command: bool) -> list[str]:
        return [*_known_by(argument, self), *given] if _has_command_of(given) else given

    # all ways to parse lead to one of these two
    for name in ("parse_known_args", "parse_known_intermixed_args"):
        _wrap(module.ArgumentParser, name, adapted)


def _has_command_of(given: Sequence[str]) -> bool:
    """Tell whether arguments come from the command line: all of them, some of them, or all among others."""
    command = sys.argv[1:]
    if given == command:
        return True
    left = iter(command)
    is_part = bool(given) and all(each in left for each in given)
    starts = range(len(given) - len(command) + 1)
    return is_part or (bool(command) and any(given[at : at + len(command)] == command for at in starts))


# -- both -------------------------------------------------------------------------------------------


def _wrap(kind: Any, name: str, adapted: Any) -> None:
    """Let a method of a class of parsers parse ``adapted(parser, arguments, whether they are sys.argv)``."""
    original = getattr(kind, name)

    @functools.wraps(original)
    def parse(self: Any, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        given = list(sys.argv[1:] if args is None else args)
        return original(self, adapted(self, given, args is None), namespace)

    setattr(kind, name, parse)


def _known_by(argument: str, parser: Any) -> list[str]:
    """Return the argument as a parser itself knows it, if it does."""
    known = parser._option_string_actions
    if _NAME in known:
        return [argument]
    return [argument.replace(_NAME, _OTHER_NAME)] if _OTHER_NAME in known else []
