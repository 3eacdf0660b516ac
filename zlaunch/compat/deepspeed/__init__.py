"""``import deepspeed`` resolved to this runtime.

Which name is what stands in ``path/deepspeed``. ``path/`` is a folder for ``sys.path``: it holds a package
``deepspeed`` of thin modules over the modules here and the runtime, and
the ``dist-info`` folder by which ``importlib.metadata`` and what is built on it find a version.
:func:`install` adds that folder, for this process and, by ``PYTHONPATH``, for those that it starts.
Nothing is written anywhere.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

VERSION = "0.19.8"
"""The DeepSpeed whose interface this is: what ``deepspeed.__version__`` says, since callers compare it."""
FOLDER = Path(__file__).parent / "path"
CHOICES = ("auto", "deepspeed", "none")
"""``--compat`` and ``ZLAUNCH_COMPAT``: auto is ours where the real package is absent."""
_ENTRY = str(FOLDER)


def install() -> None:
    """Make ``import deepspeed`` mean zlaunch from now on, here and in child processes, whatever is installed.

    Call it before importing transformers, accelerate or lightning: they ask once, when they are imported,
    whether there is a DeepSpeed. Raises RuntimeError when the real DeepSpeed has been imported already.
    """
    loaded = sys.modules.get("deepspeed")
    if loaded is not None and not _is_ours(getattr(loaded, "__file__", None)):
        raise RuntimeError(
            f"deepspeed is already imported, from {getattr(loaded, '__file__', None)}: call "
            "zlaunch.compat.deepspeed.install() at the top of the script, before other imports"
        )
    real = real_location()
    late = [name for name in ("transformers", "accelerate", "lightning") if name in sys.modules]
    if late and not is_installed() and real is None:
        print(
            f"zlaunch: warning: {', '.join(late)} was imported before zlaunch.compat.deepspeed.install() and "
            "has found no DeepSpeed: call install() first",
            file=sys.stderr,
            flush=True,
        )
    path = _without(sys.path)
    given = os.environ.get("PYTHONPATH")
    variable = _without(given.split(os.pathsep)) if given else []
    if real is None:
        at = len(path)
    else:  # before it; the script's own folder stays first if it can
        at = 0 if path and Path(real).is_relative_to(path[0] or os.getcwd()) else 1
    path.insert(at, _ENTRY)
    variable.insert(len(variable) if real is None else 0, _ENTRY)
    sys.path[:] = path
    os.environ["PYTHONPATH"] = os.pathsep.join(variable)
    importlib.invalidate_caches()


def uninstall() -> None:
    """Undo :func:`install` for imports to come; modules that are imported stay."""
    variable = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if _ENTRY in sys.path or _ENTRY in variable:
        sys.path[:] = _without(sys.path)
        os.environ["PYTHONPATH"] = os.pathsep.join(_without(variable))
        importlib.invalidate_caches()


def _without(path: Sequence[str]) -> list[str]:
    return [entry for entry in path if entry != _ENTRY]


def is_installed() -> bool:
    """Tell whether ``import deepspeed`` would be, or is, zlaunch."""
    loaded = sys.modules.get("deepspeed")
    if loaded is not None:
        return _is_ours(getattr(loaded, "__file__", None))
    return _ENTRY in sys.path


def real_location() -> str | None:
    """Return the file of the real DeepSpeed package, if there is one; nothing is imported."""
    for finder in sys.meta_path:  # an editable install has one of its own
        if finder is PathFinder:
            spec = PathFinder.find_spec("deepspeed", _without(sys.path))
        else:
            spec = finder.find_spec("deepspeed", None)
        if spec is not None and spec.origin is not None:  # a folder without __init__.py has no origin
            return spec.origin
    return None


def install_as_asked(choice: str) -> None:
    """Do what ``--compat`` (one of CHOICES) asks of a worker at its start."""
    real = real_location()
    if choice == "deepspeed" or (choice == "auto" and real is None):
        install()
        return
    uninstall()
    if choice == "auto" and os.environ.get("RANK", "0") == "0":
        from zlaunch.runtime.log import say  # 17 ms, in every worker of every script

        say(f"`import deepspeed` is the installed {real} (--compat deepspeed: zlaunch)", sys.stderr)


def _is_ours(file: str | None) -> bool:
    return file is not None and Path(file).is_relative_to(FOLDER)
