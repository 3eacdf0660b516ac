"""Keep `--local_rank=N`, which DeepSpeed's launcher passes, from argparse's parsers that do not know it.

torchrun passes no such option, so that a script for it would end with "unrecognized arguments". Parsers that
know the option, or one that begins with it, get it. A script that reads sys.argv itself always sees it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from zlaunch.system.import_watch import when_imported

_NAMES = ("--local_rank", "--local-rank")


def watch(argument: str) -> None:
    """Adapt argparse now, or as soon as it is imported. ``argument``: what the launcher has passed."""
    when_imported("argparse", functools.partial(_adapt, argument))


def _adapt(argument: str, module: ModuleType) -> None:
    kind: Any = module.ArgumentParser
    original = kind.parse_args

    @functools.wraps(original)
    def parse_args(self: Any, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        given = sys.argv[1:] if args is None else list(args)
        # Only where it stands first, as the launcher puts it: what the user has passed is the script's.
        if given[:1] == [argument] and not _knows(self):
            args = given[1:]
        return original(self, args, namespace)

    kind.parse_args = parse_args


def _knows(parser: Any) -> bool:
    """Tell whether a parser has the option, or takes it for the beginning of a longer one."""
    return any(option.startswith(_NAMES) for option in parser._option_string_actions)
