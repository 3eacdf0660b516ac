"""Write HTML of which every value is escaped, unless it is HTML that this module made."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from urllib.parse import urlencode


def as_text(name: str) -> str:
    """Return a name of the file system as text that any page and address can hold."""
    return name.encode("utf-8", "backslashreplace").decode()


class Html(str):
    """Marks text that is HTML already."""


def html(template: str, **values: object) -> Html:
    """Fill a template's {names}; whatever is no Html is escaped."""
    safe = {
        name: value if isinstance(value, Html) else escape(as_text(str(value)))
        for name, value in values.items()
    }
    return Html(template.format(**safe))


def join(parts: Iterable[Html]) -> Html:
    """Return parts one after another."""
    return Html("".join(parts))


def address(path: str, name: str) -> str:
    """Return the address of the run or sweep with a name."""
    return f"{path}?{urlencode({'name': name})}"
