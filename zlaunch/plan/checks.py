"""Check what the user gave before anything is started. Each check raises LaunchError."""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
import shutil
import socket
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zlaunch.errors import LaunchError
from zlaunch.hostfiles.hostlist import ranges
from zlaunch.plan.trainer_use import trainer_use

if TYPE_CHECKING:
    from zlaunch.plan.plan import Plan
    from zlaunch.runtime.config import MeshShape

_LIKE = 0.6
"""The least similarity of names that are meant for each other, as difflib counts."""
_CONFIG_SUFFIXES = (".json", ".yaml", ".yml")
_TORCH_USERS = {"torch", "zlaunch", "deepspeed", "transformers", "accelerate", "lightning", "torchvision"}
_TRAINS = re.compile(r"\boptim\b|\binitialize\b|\bprepare\b|\bcompile\b|Trainer\b")
"""Finds signs of an optimizer: torch imports its compiler for the first one, which takes a second."""
_SETS_UP_THE_COMPILER = re.compile(r"TORCHDYNAMO|TORCHINDUCTOR|TORCH_COMPILE|TORCH_TRACE")
"""Finds variables that the compiler reads when it is imported: a script may set them before that."""
_CONFIG_USERS = {"zlaunch", "deepspeed", "transformers", "accelerate"}
LAUNCHER_OPTIONS = {"num_gpus", "num_nodes", "nproc_per_node", "nnodes", "hostfile", "include", "exclude"}
LAUNCHER_OPTIONS |= {"num_accelerators", "max_restarts", "dry_run", "detach", "log_ranks", "hang_timeout"}
LAUNCHER_OPTIONS |= {"master_port", "master_addr", "node_rank", "launcher"}
"""Options of launchers that hardly any script has."""
_MOST_RANKS = 1 << 20
_MOST_CORES = 1 << 16
_DISTINCTIVE_KEYS = {"zero_optimization", "train_micro_batch_size_per_gpu"}


def check_script(name: str, commands: Collection[str]) -> None:
    """Check that the script is there; the error names what is near, a file or one of zlaunch's `commands`."""
    path = Path(name)
    if path.is_file():
        return _check_is_python(path)
    if (path / "__main__.py").is_file():
        return
    if path.exists() and not path.is_dir():
        raise LaunchError(f"{name!r} can be read only once, and every worker reads it: save it to a file")
    if path.is_dir():
        raise LaunchError(f"{name!r} is a folder without a __main__.py: name the script in it")
    try:
        beside = os.listdir(path.parent)
    except OSError:
        raise LaunchError(f"no script {name!r}: there is no folder {str(path.parent)!r}") from None
    # a word without a suffix is rather a command than a script
    near = _near(path, beside)
    command = _near_command(name, commands)
    raise LaunchError(f"no script {name!r}{near or command if path.suffix else command or near}")


def _near(path: Path, beside: Sequence[str]) -> str:
    """Return a question that names the file most like `path`; "" if none is. A common suffix counts as
    nothing: nope.json is not like e9.json.
    """
    for name in difflib.get_close_matches(path.name, beside):
        if difflib.SequenceMatcher(None, path.stem, Path(name).stem).ratio() >= _LIKE:
            return f", did you mean {str(path.parent / name)!r}?"
    return ""


def _near_command(name: str, commands: Collection[str]) -> str:
    if name == "last":
        return ", did you mean `zlaunch ps last`, or stop or stacks?"
    near = difflib.get_close_matches(name, commands, n=1, cutoff=0.7)
    return f", did you mean `zlaunch {near[0]}`?" if near else ""


def _check_is_python(path: Path) -> None:
    """Refuse a file that is no Python script. Python itself reports all other errors."""
    try:
        with open(path, "rb") as file:
            start = file.read(256)
    except OSError as error:
        raise LaunchError(f"cannot read the script {str(path)!r}: {error.strerror}") from None
    if path.suffix in _CONFIG_SUFFIXES:
        raise LaunchError(f"{str(path)!r} is a config, not a script: zlaunch SCRIPT --config {path.name}")
    if path.suffix == ".ipynb":
        raise LaunchError(
            f"{str(path)!r} is a notebook: convert it, jupyter nbconvert --to script {path.name}, or train "
            "from its cells with zlaunch.notebook(function)"
        )
    if path.suffix in (".sbatch", ".slurm"):
        raise LaunchError(f"{str(path)!r} is a batch file: submit it, sbatch {path.name}")
    first = start.split(b"\n", 1)[0]
    if path.suffix == ".py":
        return  # whatever its first line says: Python runs it
    if start.startswith(b"\x7fELF") or (first.startswith(b"#!") and b"python" not in first):
        raise LaunchError(f"{str(path)!r} is not a Python script: --no_python runs other programs")


def check_module(name: str) -> None:
    """Check that the module's top-level package can be found; nothing of it is imported."""
    top = name.partition(".")[0]
    if name.endswith(".py") and Path(name).is_file():
        raise LaunchError(f"{name!r} is a file, but -m needs a module name: remove -m")
    if _find(top) is None:
        raise LaunchError(f"no module named {top!r}")


def _find(top: str) -> ModuleSpec | None:
    """Find a top-level package where `python -m` would."""
    sys.path.insert(0, os.getcwd())
    try:
        return importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    finally:
        del sys.path[0]


def shared_imports(name: str, *, module: bool) -> tuple[str, ...]:
    """Return what a Python target will import that takes long and can be shared between forked workers.

    Judged by its own source, without running it: a wrong guess costs no more than the time of an import.
    """
    if module and name.startswith("zlaunch.node."):
        return ()  # ours, which imports zlaunch without torch
    text = _text_of(name, module=module)
    named = _imported(text)
    found = []
    if named & _TORCH_USERS:
        found.append("torch")
    if named & {"zlaunch", "deepspeed"}:
        if _TRAINS.search(text) and not _SETS_UP_THE_COMPILER.search(text):
            found.append("torch._dynamo")
        found.append("zlaunch.runtime.api")
    return tuple(found)


def _text_of(name: str, *, module: bool) -> str:
    """Return the source of a Python target; "" where it cannot be read."""
    try:
        return source_of(name, module=module).read_text(encoding="utf-8", errors="replace")
    except (OSError, ImportError, ValueError):
        return ""


def _imported(text: str) -> set[str]:
    """Return the top-level packages that a Python source names in its imports."""
    lines = re.findall(r"^[ \t]*(?:from[ \t]+(\w+)|import[ \t]+([\w., \t]+))", text, re.MULTILINE)
    named = {word.strip().partition(".")[0] for one, many in lines for word in (one, *many.split(","))}
    return {word.partition(" ")[0] for word in named}


def _hands_to_trainer(name: str, *, module: bool) -> bool:
    """Tell whether a script reads the arguments of a Trainer of Hugging Face from its command line."""
    try:
        use = trainer_use(str(source_of(name, module=module)))
    except (OSError, ImportError, ValueError):
        return False
    return use is not None and use.parses_arguments


def launch_options_of_the_script(command: Sequence[str], *, module: bool) -> str | None:
    """Return a warning where the script gets an option that was meant for zlaunch.

    That is one of a launcher alone, and the script's source does not name it.
    """
    given = [word for word in command[1:] if word.startswith("--")]
    names = {word: word.partition("=")[0][2:].replace("-", "_") for word in given}
    suspects = {word: name for word, name in names.items() if name in LAUNCHER_OPTIONS}
    if not suspects:
        return None
    try:
        text = source_of(command[0], module=module).read_text(encoding="utf-8", errors="replace")
    except (OSError, ImportError, ValueError):
        return None
    text = text.replace("-", "_")
    misplaced = [word for word, name in suspects.items() if name not in text]
    if not misplaced:
        return None
    return (
        f"{', '.join(misplaced)} stands after {command[0]} and goes to the script. "
        f"If it is for zlaunch, put it before {command[0]}"
    )


def source_of(name: str, *, module: bool) -> Path:
    if not module:
        return Path(name)
    spec = _find(name.partition(".")[0])
    if spec is None or spec.origin is None:
        raise ImportError(name)
    inner = name.split(".")[1:]
    return Path(spec.origin).parent.joinpath(*inner).with_suffix(".py") if inner else Path(spec.origin)


def check_program(name: str) -> None:
    """Check that a program for --no_python can be found."""
    if shutil.which(name) is None:
        raise LaunchError(f"--no_python: no program {name!r}")


def check_port(port: int) -> None:
    """Check that a number can be a port, or 0 for a free one."""
    if not 0 <= port <= 65535:
        raise LaunchError(f"--master_port {port}: a port is a number from 1 to 65535 (0 takes a free one)")


def pick_port(port: int) -> int:
    """Return the port to meet at: the given one if nobody has it, otherwise one that is free now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise LaunchError(
                f"--master_port {port}: {error.strerror}; leave it out for a free one"
            ) from None
        return int(probe.getsockname()[1])


def parse_ranks(option: str, text: str, example: str = "0,2-3") -> list[int]:
    """Return the ranks that an option names as `0,2-3`, sorted."""
    ranks: set[int] = set()
    for token, numbers in ranges(text):
        if numbers is None:
            raise LaunchError(f"{option} {text!r}: {token!r} is not a rank; write {example}")
        if not numbers or numbers.stop > _MOST_RANKS:
            raise LaunchError(f"{option} {text!r}: {token!r} is not a range of ranks")
        ranks.update(numbers)
    return sorted(ranks)


def parse_shown_ranks(text: str, world_size: int | None) -> list[int] | None:
    """Return the ranks of --log_ranks; None for `all`. A world size that is not known yet allows any."""
    if text == "all":
        return None
    ranks = parse_ranks("--log_ranks", text, "all, or 0,2-3")
    if world_size is not None and ranks[-1] >= world_size:
        raise LaunchError(f"--log_ranks {text!r}: there is no rank {ranks[-1]}; the last is {world_size - 1}")
    return ranks


def check_shown_local_ranks(ranks: Sequence[int] | None, plan: Plan) -> None:
    """Check those of --local_ranks_filter. Raises LaunchError."""
    most = max(worker.local_rank for node in plan.nodes for worker in node.workers)
    if ranks and ranks[-1] > most:
        raise LaunchError(f"--local_ranks_filter: no node has a local rank {ranks[-1]}; the last is {most}")


def how_to_bind(given: str | None, to_rank: bool, *, has_list: bool) -> str:
    """Return how workers are bound to cores, by --bind, --bind_cores_to_rank and --bind_core_list. Raises
    LaunchError where these differ.
    """
    other = "--bind_cores_to_rank" if to_rank else "--bind_core_list" if has_list else None
    if other is not None and given not in (None, "cores"):
        raise LaunchError(f"--bind {given} and {other} cannot be used together")
    return "cores" if other is not None else given or "node"


def parse_cores(text: str) -> tuple[int, ...]:
    """Return the cores of --bind_core_list, such as `0-3,8`, in the given order."""
    option = f"--bind_core_list {text!r}"
    cores: list[int] = []
    for token, numbers in ranges(text):
        if not numbers:
            raise LaunchError(f"{option}: {token!r} is not a core or a range such as 0-3")
        if numbers.stop > _MOST_CORES:
            raise LaunchError(f"{option}: {token!r}: no machine has that many cores")
        cores += numbers
    if len(set(cores)) < len(cores):
        raise LaunchError(f"{option}: a core appears twice")
    return tuple(cores)


def check_configs(
    command: Sequence[str],
    *,
    module: bool = False,
    folder: str | None = None,
    world_sizes: Sequence[int] = (),
) -> list[str]:
    """Check every DeepSpeed config among the script's arguments and return warnings.

    ``world_sizes`` has the numbers of ranks that the run may have, as far as they are known. ``folder`` is
    where the script will run, None for this one. Of ``--config`` it is not sure whose it is: a script that
    imports none of those who read such files may mean any file, or a name that only it knows: a missing file
    is then a warning.
    """
    if folder is not None and not os.path.isdir(folder):
        return []  # only the nodes have it
    found: list[str] = []
    for option, name, surely_ours in config_arguments(command[1:]):
        script = command[0] if module else os.path.join(folder or "", command[0])
        is_used = surely_ours or bool(_imported(_text_of(script, module=module)) & _CONFIG_USERS)
        path = os.path.join(folder or "", name)
        if not is_used and not os.path.exists(path):
            found.append(f"{option} {name}: no such file{_config_near(path)}")
        elif is_used or os.path.isfile(path):
            found += _check_config(option, path, surely_ours, world_sizes if is_used else (), is_used)
            # After that check, which names the line of a mistake in a file that nobody could read.
            if (
                option == "--deepspeed"
                and not is_plain_json(path)
                and _hands_to_trainer(script, module=module)
            ):
                raise LaunchError(
                    f"{option} {name}: the Hugging Face Trainer reads plain JSON: remove comments and "
                    "trailing commas, and convert YAML"
                )
    return found


def names_no_config(command: Sequence[str], *, module: bool, folder: str | None) -> bool:
    """Tell whether a script of a library that reads configs has none among its arguments: it may name one
    itself, which :func:`check_configs` does not see.
    """
    script = command[0] if module else os.path.join(folder or "", command[0])
    if any(config_arguments(command[1:])) or not os.path.exists(script):
        return False
    return bool(_imported(_text_of(script, module=module)) & _CONFIG_USERS)


def _check_config(
    option: str, path: str, surely_ours: bool, world_sizes: Sequence[int], is_used: bool
) -> tuple[str, ...]:
    from zlaunch.runtime.config import ConfigError, ConfigFileError, check_batch, load

    ours = surely_ours or _looks_like_ours(path)
    try:
        loaded = load(path)
        if ours and world_sizes:
            check_batch(loaded, world_sizes)
    except ConfigFileError as error:
        if ours or (is_used and _is_broken(path)):
            raise LaunchError(f"{option}: {error}{_config_near(path)}") from None
    except ConfigError as error:
        if ours:
            raise LaunchError(f"{path} is not a valid config:\n{error}") from None
    else:
        return loaded.warnings if ours else ()
    return ()


def find_mesh(
    command: Sequence[str], *, module: bool, folder: str | None, world_size: int
) -> MeshShape | None:
    """Return the mesh of ranks that a command's config asks for; None where each rank has whole layers."""
    from zlaunch.runtime.config import ConfigError, load, mesh_shape

    for _, name, surely_ours in config_arguments(command[1:]):
        script = command[0] if module else os.path.join(folder or "", command[0])
        path = os.path.join(folder or "", name)
        if not os.path.isfile(path):
            continue
        if surely_ours or _imported(_text_of(script, module=module)) & _CONFIG_USERS:
            with suppress(ConfigError, ValueError):
                mesh = mesh_shape(load(path).config, world_size)
                return mesh if len(mesh.axes) > 1 else None
    return None


def _config_near(path: str) -> str:
    """Return a hint at a config that exists, for one that does not."""
    if os.path.lexists(path):
        return ""
    try:
        beside = [name for name in os.listdir(Path(path).parent) if name.endswith(_CONFIG_SUFFIXES)]
    except OSError:
        return ""
    return _near(Path(path), beside)


def config_arguments(args: Sequence[str]) -> Iterator[tuple[str, str, bool]]:
    """Yield option, file and whether it is surely DeepSpeed's, of each config among a script's arguments."""
    for index, arg in enumerate(args):
        option, equals, value = arg.partition("=")
        name = option.replace("-", "_")
        if name not in ("__config", "__deepspeed_config", "__deepspeed"):
            continue
        if not equals:
            value = args[index + 1] if index + 1 < len(args) else ""
        if value.endswith(_CONFIG_SUFFIXES):
            yield option, value, name != "__config"


def replace_config(command: Sequence[str], config: str, path: str) -> list[str]:
    """Return a command line with another config file."""
    found = []
    for word in command:
        option, equals, value = word.partition("=")
        found.append(path if word == config else f"{option}={path}" if equals and value == config else word)
    return found


def is_plain_json(path: str) -> bool:
    """Tell whether Python's json module reads a config, as other tools do. One in base64 is not looked at."""
    import json

    try:
        json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError:
        return True
    except ValueError:
        return False
    return True


def _is_broken(path: str) -> bool:
    """Tell whether no program could read a file: it is empty, or no YAML, whatever its tags."""
    import yaml

    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        for _ in yaml.parse(text):
            pass
    except (OSError, ValueError, yaml.YAMLError):
        return True
    return not text.strip()


def _looks_like_ours(path: str) -> bool:
    """Tell whether a file that does not load is meant as a DeepSpeed config.

    A script's own config may well have an `optimizer` too: a key that nobody else has decides, or the
    majority.
    """
    import yaml

    from zlaunch.runtime.config import Config

    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    try:
        data: Any = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        # also JSON with comments, or broken: go by the words
        data = dict.fromkeys(re.findall(r"""^\s*["']?(\w+)["']?\s*:""", text, re.MULTILINE))
    if not isinstance(data, Mapping):
        return False
    known = set(data) & set(Config.model_fields)
    return bool(known & _DISTINCTIVE_KEYS) or (bool(known) and 2 * len(known) >= len(data))
