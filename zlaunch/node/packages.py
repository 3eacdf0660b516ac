"""List the packages of the workers' interpreter: `python -m zlaunch.node.packages PARENT_PID`.

The agent of rank 0 runs it in a process of its own while the workers train: reading the metadata of some
hundred packages takes half a second. It prints one JSON object.
"""

from __future__ import annotations

import json
import platform
import re
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib import metadata
from typing import Any

from zlaunch.system.processes import die_with_parent


def list_packages(found: Iterable[metadata.Distribution] | None = None) -> list[str]:
    """Return a line for each package, as pip reads them: `name==version`, `name @ URL` for a package from a
    URL or a repository, `-e PATH  # name==version` for an editable one. The first one on the import path
    counts, as for an import.
    """
    lines: dict[str, str] = {}
    # A checkout on the path has an egg-info folder, which does not say where the package was installed from.
    for each in sorted(metadata.distributions() if found is None else found, key=_is_of_checkout):
        name = each.metadata["Name"] if each.metadata is not None else None
        if not name:  # what a broken installation leaves behind
            where = getattr(each, "_path", "?")
            lines.setdefault(f"~{where}", f"# {where}: its metadata cannot be read")
            continue
        key = re.sub(r"[-_.]+", "-", name).lower()
        lines.setdefault(key, _line(name, each.version, _direct_url(each)))
    return [lines[key] for key in sorted(lines)]


def _is_of_checkout(package: metadata.Distribution) -> bool:
    return str(getattr(package, "_path", "")).endswith(".egg-info")


def _direct_url(package: metadata.Distribution) -> Mapping[str, Any]:
    """Return where a package came from if that is no index (PEP 610)."""
    with suppress(OSError, ValueError):
        content = json.loads(package.read_text("direct_url.json") or "{}")
        return content if isinstance(content, dict) else {}
    return {}


def _line(name: str, version: str, source: Mapping[str, Any]) -> str:
    url = source.get("url")
    if not isinstance(url, str):
        return f"{name}=={version}"
    folder = source.get("dir_info")
    if isinstance(folder, dict) and folder.get("editable"):
        return f"-e {url.removeprefix('file://')}  # {name}=={version}"
    repository = source.get("vcs_info")
    if isinstance(repository, dict):
        url = f"{repository.get('vcs')}+{url}@{repository.get('commit_id')}"
    inside = f"#subdirectory={source['subdirectory']}" if source.get("subdirectory") else ""
    return f"{name} @ {url}{inside}"


def describe() -> dict[str, Any]:
    """Return this interpreter and its packages."""
    return {"python": platform.python_version(), "executable": sys.executable, "lines": list_packages()}


def main() -> None:
    """Print what `describe` returns."""
    die_with_parent(int(sys.argv[1]))
    print(json.dumps(describe()))


if __name__ == "__main__":
    main()
