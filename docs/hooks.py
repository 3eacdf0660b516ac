"""Adjust pages where the site differs from the repository; mkdocs calls these functions by their names."""

from __future__ import annotations

import logging
import os
import posixpath
import re
from typing import Literal

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

_LOG = logging.getLogger("mkdocs.hooks.zlaunch")
_LINK = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+[^)\s]+)\)")
_ROLE = re.compile(r":(?:func|meth|class|attr|mod|data|exc):(?=<code>)")
_FROM_THE_NETWORK = re.compile(r"<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=[\"']?(?:https?:)?//[^>]*>")


def on_startup(*, command: Literal["build", "gh-deploy", "serve"], dirty: bool) -> None:
    """Give the help of commands one width, whatever the terminal has."""
    os.environ["COLUMNS"] = "100"


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Write the path in place of a link to a file of the repository that is no page."""
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def written(link: re.Match[str]) -> str:
        text, target = link[1].strip("`"), posixpath.normpath(posixpath.join(folder, link[2]))
        if target.startswith("docs/"):
            return link[0]
        return f"`{target}`" if text == target else f"{link[1]} (`{target}`)"

    return _LINK.sub(written, markdown)


def on_page_content(html: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Take the roles of docstrings away, which editors read."""
    return _ROLE.sub("", html)


def on_post_page(output: str, *, page: Page, config: MkDocsConfig) -> str:
    """Warn about what a reader's browser would load from the network; a strict build fails then."""
    for found in _FROM_THE_NETWORK.findall(output):
        _LOG.warning("%s loads from the network: %s", page.file.src_uri, found)
    return output
