"""Choose which of the launching machine's variables go to the other nodes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from zlaunch.errors import LaunchError
from zlaunch.system.user import home

_PREFIXES = (
    *("NCCL_", "GLOO_", "UCX_", "FI_", "MV2_"),
    *("TORCH_", "TORCHINDUCTOR_", "PYTORCH_", "TRITON_", "CUDA_", "CUPY_"),
    *("PYTHON", "OMP_", "MKL_", "KMP_", "OPENBLAS_"),
    *("HF_", "HUGGINGFACE_", "TRANSFORMERS_", "TOKENIZERS_", "ACCELERATE_", "DS_"),
    *("WANDB_", "MLFLOW_", "COMET_", "TENSORBOARD_"),
)
"""Variables for communication, torch and its compilers, Python and its threads, libraries, trackers."""
_NAMES = (
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "GLIBC_TUNABLES", "TZ", "LANG", "LC_ALL"),
    *("ZLAUNCH_SHARED_MEMORY", "ZLAUNCH_DEBUG_FREE", "ZLAUNCH_QUIET", "ZLAUNCH_VERBOSE"),
)
_NEVER = ("CUDA_VISIBLE_DEVICES",)
"""Variables that each node sets for itself."""

OWN = frozenset(
    (
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"),
        *("CROSS_RANK", "CROSS_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    )
)
ENV_FILES = (".deepspeed_env", ".zlaunch_env")
"""Looked for in the home folder and then in the current one; later ones win."""

_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


class EnvError(LaunchError, ValueError):
    """Names a variable that cannot be exported; the text is for the user."""


def forwarded_env(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that go to the other nodes without being asked for: an allow-list."""
    return {
        key: value
        for key, value in environ.items()
        if (key.startswith(_PREFIXES) or key in _NAMES) and key not in _NEVER
    }


def requested_env(
    environ: Mapping[str, str], given: Iterable[str] = (), folders: Iterable[Path] | None = None
) -> dict[str, str]:
    """Return the variables of the env files and then of `--env KEY[=VALUE]`, for workers anywhere.

    Raises EnvError, also for a variable that each worker gets from the launcher.
    """
    chosen: dict[str, str] = {}
    if folders is None:
        folders = [folder for folder in (home(), Path.cwd()) if folder is not None]
    for folder in folders:
        for name in ENV_FILES:
            chosen |= read_env_file(folder / name)
    for item in given:
        key, equals, value = item.partition("=")
        if not _KEY.fullmatch(key):
            raise EnvError(f"--env {item!r}: {key!r} is not a variable's name")
        if key in OWN:
            raise EnvError(f"--env {key}: zlaunch sets this variable for every worker")
        if not equals and key not in environ:
            raise EnvError(f"--env {key}: not set in this environment; write --env {key}=VALUE")
        chosen[key] = value if equals else environ[key]
    return chosen


def read_env_file(path: Path) -> dict[str, str]:
    """Read KEY=VALUE lines; `#` comments, blank lines, a leading `export` and quotes are fine.

    A file that is not there has no variables. Raises EnvError naming file and line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise EnvError(f"{path}: cannot be read: {error}") from None
    found = {}
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.strip().removeprefix("export ").strip()
        if not line or line.startswith("#"):
            continue
        key, equals, value = line.partition("=")
        key, value = key.strip(), value.strip()
        if not equals or not _KEY.fullmatch(key):
            raise EnvError(f"{path}:{number}: {line!r} is not KEY=VALUE")
        if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
            value = value[1:-1]
        found[key] = value
    return found
