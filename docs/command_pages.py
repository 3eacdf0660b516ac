"""Write the reference of zlaunch's commands as Markdown, from the commands themselves."""

from __future__ import annotations

import html
import inspect
import pkgutil
import re
from collections.abc import Iterator

import click

from zlaunch.cli.commands import Option

_BLOCK = re.compile(
    r"^::: command\n +:module: (?P<module>\S+)\n +:command: (?P<name>\S+)\n +:prog_name: (?P<words>.+)$",
    re.MULTILINE,
)
_EXTRA = re.compile(r"\s+\[((?:default|required|[\d.]*<?=?x)[^\[\]]*)\](?=\s|$)")
"""Matches the default and the range that click appends to a help text."""
_CODE = re.compile(
    r'((?<![\w/-])--?[a-zA-Z][\w-]*(?:=[^\s,.;:"]+)?|[^\s"]*[\[{<*_][^\s"]*?(?=[.,;:)"]*(?:\s|$)))'
)
"""Matches options, patterns and config keys, which the page shows as code."""
_LEVEL = 3
"""Level of the heading of a command; option groups are one level lower."""
_OTHERS = "Other options"


def expand(markdown: str) -> str:
    """Return the page with each block ``::: command`` replaced by the reference of that command."""

    def written(block: re.Match[str]) -> str:
        command = pkgutil.resolve_name(f"{block['module']}:{block['name']}")
        return "\n".join(_reference(block["words"], command, None))

    return _BLOCK.sub(written, markdown)


def _reference(words: str, command: click.Command, parent: click.Context | None) -> Iterator[str]:
    context = click.Context(command, parent, info_name=words.rpartition(" ")[2], **command.context_settings)
    yield f"{'#' * (_LEVEL + (parent is not None))} {words}\n"
    yield f"```text\n{words} {' '.join(command.collect_usage_pieces(context))}\n```\n"
    yield from (f"{_text(paragraph)}\n" for paragraph in _paragraphs(command.help or ""))
    for title, rows in _options(command, context).items():
        if title:
            yield f"**{title}**\n"
        yield "| option | |\n|---|---|"
        yield from (f"| {names} | {text} |" for names, text in rows)
        yield ""
    if isinstance(command, click.Group):
        for name, below in command.commands.items():
            yield from _reference(f"{words} {name}", below, context)


def _options(command: click.Command, context: click.Context) -> dict[str, list[tuple[str, str]]]:
    """Return the rows of the tables of options, by the tables' titles; a single table has no title."""
    found: dict[str, list[tuple[str, str]]] = {}
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context) if isinstance(parameter, click.Option) else None
        if record is not None:
            group = parameter.group if isinstance(parameter, Option) else None
            found.setdefault(group or _OTHERS, []).append((_names(record[0]), _text(record[1])))
    if list(found) == [_OTHERS]:
        return {"": found[_OTHERS]}
    return dict(sorted(found.items(), key=lambda table: table[0] == _OTHERS))


def _paragraphs(text: str) -> list[str]:
    """Return the paragraphs of a help; one after click's mark keeps its lines."""
    parts = inspect.cleandoc(text.partition("\f")[0]).split("\n\n")
    return [
        f"```text\n{part[2:]}\n```" if part.startswith("\b\n") else part for part in parts if part.strip()
    ]


def _names(record: str) -> str:
    """Return an option's names and what it takes, each in code."""
    return ", ".join(
        f"<code>{html.escape(name).replace('|', '&#124;')}</code>" for name in record.split(", ")
    )


def _text(text: str) -> str:
    """Return a help as Markdown that shows it unchanged, with its code as code."""
    if text.startswith("```"):
        return text
    parts = re.split(r"(`[^`]+`)", _EXTRA.sub(_sentences, text))
    shown = "".join(part if part.startswith("`") else _plain(part) for part in parts)
    return shown.replace("|", "&#124;")


def _sentences(extra: re.Match[str]) -> str:
    said = extra[1].replace("default: ", "Default: ").replace("required", "Required")
    parts = re.split(r"; (?=Required|[\d.]*<?=?x)", said)
    return "".join(f" {part}." if part[0].isupper() else f" Range: {part}." for part in parts)


def _plain(text: str) -> str:
    parts = [html.escape(part, quote=False) for part in _CODE.split(text)]
    return "".join(f"<code>{part}</code>" if i % 2 else part for i, part in enumerate(parts))
