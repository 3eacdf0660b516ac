"""Adjust pages where the site differs from the repository; mkdocs calls these functions by their names."""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from docs.command_pages import expand

ROOT = Path(__file__).resolve().parents[1]

_LOG = logging.getLogger("mkdocs.hooks.zlaunch")
_VERSION = re.compile(r'^__version__ = "([^"]+)"', re.MULTILINE)
_FROM_THE_ROOT = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
"""Page -> file of the repository that it shows."""
_LINK = re.compile(r"\[([^\]]*)\]\((?!https?://|#)([^)\s]+)\)")
_ROLE = re.compile(r":(?:func|meth|class|attr|mod|data|exc):(?=<code>)")
_FROM_THE_NETWORK = re.compile(
    r"<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=[\"']?(?:https?:)?//[^>]*>"
    r"|<[^>]*data-md-component=[\"']?source\b[^>]*>"  # the theme's script asks GitHub about that one
)
_STACKED = ("cli.md", "config.md")
"""Pages with wide tables: docs/assets/site.css puts each row into a block on a narrow screen."""
_TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
_ROW = re.compile(r"<tr>.*?</tr>", re.DOTALL)
_HEAD = re.compile(r"<th[^>]*>(.*?)</th>", re.DOTALL)
_BLOCK = re.compile(r"(<pre\b.*?</pre>)", re.DOTALL)
_INLINE_CODE = re.compile(r"(<code[^>]*>)(.*?)(</code>)", re.DOTALL)
_TAG = re.compile(r"(<[^>]*>)")
_DASHES = re.compile(r"(?<![^\s\[>])(--?[a-zA-Z0-9]+)")
_BREAK_AFTER = re.compile(r"(?<=\w)([_./=])(?=[\w{])")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Show the version beside the repository's name and in the footer."""
    found = _VERSION.search((ROOT / "zlaunch" / "__init__.py").read_text())
    assert found is not None
    config.extra["zlaunch_version"] = found[1]
    config.copyright = f"zlaunch {found[1]}"
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages that stand in the repository's root."""
    for page, source in _FROM_THE_ROOT.items():
        text = (ROOT / source).read_text()
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in the commands; link files that are no pages to the repository on the web."""
    source = page.file.src_uri
    repository = (config.repo_url or "").rstrip("/")
    folder = "" if source in _FROM_THE_ROOT else posixpath.join("docs", posixpath.dirname(source))

    def linked(link: re.Match[str]) -> str:
        text, (target, hash_, anchor) = link[1], link[2].partition("#")
        path = posixpath.normpath(posixpath.join(folder, target))
        pages = {name: page for page, name in _FROM_THE_ROOT.items()}
        inside = pages.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
        if inside is not None:
            return f"[{text}]({posixpath.relpath(inside, posixpath.dirname(source))}{hash_}{anchor})"
        if not (ROOT / path).exists():
            return link[0]  # mkdocs warns about it
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"[{text}]({repository}/{kind}/main/{path}{hash_}{anchor})"

    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.DOTALL | re.MULTILINE)
    return expand("".join(part if part.startswith("```") else _LINK.sub(linked, part) for part in parts))


def on_page_content(html: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let keys and options wrap after "_", "." and "/"; remove docstrings' roles, which editors read."""
    html = _ROLE.sub("", html)
    if page.file.src_uri in _STACKED:
        html = _TABLE.sub(lambda table: f'<div class="stacked">{_labelled(table[0])}</div>', html)
    parts = _BLOCK.split(html)
    return "".join(part if part.startswith("<pre") else _breakable(part) for part in parts)


def _labelled(table: str) -> str:
    """Name each cell's column, for where the head is not shown."""
    names = [re.sub(r"<[^>]+>", "", head) for head in _HEAD.findall(table)]

    def label(row: re.Match[str]) -> str:
        left = iter(names)
        return re.sub(r"<td\b", lambda cell: f'<td data-label="{next(left, "")}"', row[0])

    return _ROW.sub(label, table)


def _breakable(html: str) -> str:
    def wrapped(part: str) -> str:
        if part.startswith("<"):
            return part
        return _DASHES.sub(r'<span class="whole">\1</span>', _BREAK_AFTER.sub(r"\1<wbr>", part))

    def code(found: re.Match[str]) -> str:
        return found[1] + "".join(map(wrapped, _TAG.split(found[2]))) + found[3]

    return _INLINE_CODE.sub(code, html)


def on_post_page(output: str, *, page: Page, config: MkDocsConfig) -> str:
    """Warn about what a reader's browser would load from the network; a strict build fails then."""
    for found in _FROM_THE_NETWORK.findall(output):
        _LOG.warning("%s loads from the network: %s", page.file.src_uri, found)
    return output
