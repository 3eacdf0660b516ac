"""Keep `--local_rank=N`, which DeepSpeed's launcher passes, from argparse's parsers that do not know it.

torchrun passes no such option, so that a script for it would end with "unrecognized arguments", or argparse
would take it for the beginning of a longer option. A parser that knows `--local-rank`, as
torch.distributed.launch passes it, gets that. ``parse_known_args`` still returns the option among the
unknown arguments, because a script may parse those with a second parser.
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


def watch(argument: str) -> None:
    """Adapt argparse now, or as soon as it is imported. ``argument``: what the launcher has put first."""
    when_imported("argparse", functools.partial(_adapt, argument))


def _adapt(argument: str, module: ModuleType) -> None:
    for name in ("parse_args", "parse_intermixed_args"):
        _wrap(module.ArgumentParser, name, argument)


def _wrap(kind: Any, name: str, argument: str) -> None:
    original = getattr(kind, name)

    @functools.wraps(original)
    def parse(self: Any, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        given = list(sys.argv[1:] if args is None else args)
        # Only where it stands first, as the launcher puts it: what the user has passed is the script's.
        if given[:1] == [argument]:
            known = _as_known(argument, self)
            given[:1] = known
            if args is None and not known:
                # Processes that the script starts parse it as well.
                sys.argv.remove(argument)
        return original(self, given, namespace)

    setattr(kind, name, parse)


def _as_known(argument: str, parser: Any) -> list[str]:
    """Return the argument as a parser knows it; none if neither it nor one of a command of it does."""
    known = parser._option_string_actions
    if _NAME in known:
        return [argument]
    if _OTHER_NAME in known:
        return [argument.replace(_NAME, _OTHER_NAME)]
    return [argument] if any(_as_known(argument, command) for command in _commands(parser)) else []


def _commands(parser: Any) -> Iterator[Any]:
    """Yield the parsers of a parser's commands. One that alone knows the option cannot be given it, so the
    error of argparse stays.
    """
    for action in parser._actions:
        if isinstance(action.choices, Mapping):
            yield from (each for each in action.choices.values() if hasattr(each, "_option_string_actions"))
