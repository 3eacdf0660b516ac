"""Say what other projects' configs, commands and names of DeepSpeed mean to zlaunch, and to DeepSpeed itself.

    python -m tests.compat.projects.survey FOLDER --deepspeed FOLDER [--deepspeed FOLDER] [--list N]

FOLDER has a folder for each project, with its files. Everything is read and nothing of it runs:

- configs: JSON files with keys of DeepSpeed. A value "auto" is filled as the Trainer fills it.
- commands: lines of scripts and pages that start DeepSpeed's launcher. A shell variable becomes a 1.
- names: what Python files import from deepspeed, or read as attributes of it.

Each is tried with the real DeepSpeed and with zlaunch. What DeepSpeed takes and zlaunch does not is listed
with the reason. Projects and files that are copies of DeepSpeed's own code do not count. Two things are
counted apart: configs that DeepSpeed takes because it ignores a key that it does not know, in which zlaunch
says where the key belongs; and names that can be imported, but are an error when used.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from zlaunch.runtime.config import ConfigError, load

_OF_DEEPSPEED = re.compile(r"deepspeed(ai)?\+|microsoft\+(deepspeed|megatron-deepspeed)", re.IGNORECASE)
_COPIES = re.compile(
    r"megatron-deepspeed|deepspeedfugaku|learndeepspeed|deepspeec-megatron|deepspeed-chat|deepspeedexamples|gdgpt|habanaai",
    re.IGNORECASE,
)
_KEYS = {"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size", "fp16", "bf16", "zero"}


@dataclass
class Count:
    """Counts the cases that DeepSpeed takes, and how many of them zlaunch takes."""

    taken: int = 0
    ours: int = 0
    apart: int = 0
    """Counts configs with a key that DeepSpeed ignores, or names that are an error when used."""
    refused: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Maps why zlaunch does not take a case to the cases."""

    def add(self, case: str, problem: str) -> None:
        """Count a case that DeepSpeed takes; ``problem`` says why zlaunch does not, "" if it does."""
        self.taken += 1
        self.ours += not problem
        if problem:
            self.refused[problem].append(case)

    def show(self, title: str, most: int, apart: str = "") -> None:
        """Print the share, and the reasons with the most cases; ``apart`` says what ``apart`` counts."""
        share = 100 * self.ours / self.taken if self.taken else 0
        print(
            f"{title}: {self.ours} of {self.taken} that DeepSpeed takes, {share:.1f}%"
            + f"; {self.apart} {apart}" * bool(apart)
        )
        for problem, cases in sorted(self.refused.items(), key=lambda each: -len(each[1]))[:most]:
            print(f"  {len(cases):4}  {problem[:160]}")
            print(f"        {cases[0]}" + (f" and {len(cases) - 1} more" if len(cases) > 1 else ""))


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--deepspeed", "paths", multiple=True, required=True, help="Folder with DeepSpeed; repeatable.")
@click.option("--list", "most", default=20, help="List this many reasons of each kind.")
def main(folder: Path, paths: tuple[str, ...], most: int) -> None:
    """Print the three shares."""
    projects = [
        each
        for each in sorted(folder.iterdir())
        if each.is_dir() and not _OF_DEEPSPEED.match(each.name) and not _COPIES.search(each.name)
    ]
    real = _Real(paths)
    print(f"{len(projects)} projects")
    _configs(projects, real).show("configs", most, "of the others have a key that DeepSpeed ignores")
    _commands(projects, real).show("commands", most)
    _names(projects, real).show("names", most, "of them are an error when used")


class _Real:
    """Asks the real DeepSpeed, in a separate process."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._path = os.pathsep.join(paths)

    def ask(self, question: str, cases: list[Any]) -> list[bool]:
        """Return for each case whether DeepSpeed takes it; ``question`` names a function below."""
        environment = {**os.environ, "PYTHONPATH": self._path, "DS_ACCELERATOR": "cpu", "WORLD_SIZE": "1"}
        done = subprocess.run(
            [sys.executable, "-W", "ignore", str(Path(__file__).with_name("real_deepspeed.py")), question],
            input=json.dumps(cases),
            capture_output=True,
            text=True,
            env=environment,
            check=False,
        )
        if done.returncode:
            raise click.ClickException(f"DeepSpeed failed:\n{done.stderr[-3000:]}")
        answers: list[bool] = json.loads(done.stdout.rpartition("answers:")[2])
        assert len(answers) == len(cases)
        return answers


def _files(projects: Iterable[Path], *suffixes: str) -> Iterator[tuple[str, str]]:
    """Yield the place and the text of all files with these suffixes."""
    for project in projects:
        for path in sorted(project.rglob("*")):
            if path.is_file() and (path.suffix in suffixes or path.name in suffixes):
                yield f"{project.name}/{path.relative_to(project)}", path.read_text(errors="replace")


# -- configs


def _configs(projects: list[Path], real: _Real) -> Count:
    found: dict[str, str] = {}
    for place, text in _files(projects, ".json"):
        try:
            config = json.loads(text)
        except ValueError:
            continue
        if isinstance(config, dict) and _KEYS & config.keys() and "train" in text:
            found.setdefault(json.dumps(_filled(config), sort_keys=True), place)
    count = Count()
    cases = [json.loads(text) for text in found]
    for place, config, taken in zip(found.values(), cases, real.ask("takes_config", cases), strict=True):
        if taken:
            problem = _config_problem(config)
            count.add(place, problem)
            count.apart += "unknown key" in problem or "unknown section" in problem
    return count


_BY_TRAINER: Mapping[str, Any] = {
    **{"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0},
    **{"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0, "enabled": False},
    **{"warmup_min_lr": 0.0, "warmup_max_lr": 1e-4, "warmup_num_steps": 10, "total_num_steps": 100},
    **{"reduce_bucket_size": 1_000_000, "stage3_prefetch_bucket_size": 1_000_000},
    **{"stage3_param_persistence_threshold": 10_000, "steps_per_print": 10, "device": "cpu"},
}


def _filled(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with "auto" replaced; a batch size that cannot be known is left out."""
    found = {}
    for key, value in config.items():
        if isinstance(value, dict):
            found[key] = _filled(value)
        elif value != "auto":
            found[key] = value
        elif key in _BY_TRAINER:
            found[key] = _BY_TRAINER[key]
    return found


def _config_problem(config: dict[str, Any]) -> str:
    try:
        load(config)
    except ConfigError as error:
        return str(error).splitlines()[0]
    return ""


# -- commands


_START = re.compile(r"^[\s$>]*(?:[A-Z_]+=\S+\s+)*deepspeed\s+(?=\S)")
_VARIABLE = re.compile(r"\$\{[^}]*\}|\$\([^)]*\)|\$\w+")


def _commands(projects: list[Path], real: _Real) -> Count:
    found: dict[str, tuple[str, list[str]]] = {}
    for place, text in _files(projects, ".sh", ".md", ".txt", ".slurm", ".sbatch", "Makefile"):
        for line in text.replace("\\\r\n", " ").replace("\\\n", " ").splitlines():
            if (start := _START.match(line)) is None:
                continue
            try:
                words = shlex.split(_VARIABLE.sub("1", line[start.end() :]), comments=True)
            except ValueError:
                continue
            # A sentence that begins with the word, and a command whose script is a variable
            if any(word.endswith(".py") for word in words) or words[0].startswith("--"):
                found.setdefault(shlex.join(words), (place, _first_command(words)))
    count = Count()
    cases = [words for _, words in found.values()]
    for (place, words), taken in zip(found.values(), real.ask("takes_command", cases), strict=True):
        if taken:
            count.add(f"{place}: {shlex.join(words)[:150]}", _command_problem(words))
    return count


def _first_command(words: list[str]) -> list[str]:
    """Return the words before one that ends a command of the shell."""
    for index, word in enumerate(words):
        if word in ("|", "||", "&&", "&", ";", ">", ">>", "2>&1", "2>", "&>") or word.startswith(("2>", ">")):
            return words[:index]
    return words


def _command_problem(words: list[str]) -> str:
    from zlaunch.cli.run import run

    try:
        given = run.make_context("zlaunch", list(words))
    except click.exceptions.Exit as end:
        return f"ends with {end.exit_code}" if end.exit_code else ""
    except click.ClickException as error:
        return re.sub(r"'[^']*'", "'...'", error.format_message()).splitlines()[0]
    return "" if given.params["command"] else "no script"


# -- names


def _names(projects: list[Path], real: _Real) -> Count:
    found: dict[tuple[str, str], str] = {}
    for place, text in _files(projects, ".py"):
        if "DeepSpeed Team" in text:
            continue  # a copy of a file of DeepSpeed's
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError):
            continue
        project = place.partition("/")[0]
        for name in _read_names(tree):
            found.setdefault((project, name), place)
    count = Count()
    names = sorted({name for _, name in found})
    taken = dict(zip(names, real.ask("has_name", names), strict=True))
    ours = dict(zip(names, _ours(names), strict=True))
    for (_, name), place in found.items():
        if taken[name]:
            count.add(place, name if ours[name] == "missing" else "")
            count.apart += ours[name] == "error"
    return count


def _read_names(tree: ast.AST) -> Iterator[str]:
    """Yield the dotted names below deepspeed that a file imports or reads."""
    known = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "deepspeed":
                    yield alias.name
                    known.add(alias.asname or "deepspeed")
        elif (
            isinstance(node, ast.ImportFrom) and not node.level and f"{node.module}.".startswith("deepspeed.")
        ):
            yield from (f"{node.module}.{alias.name}" for alias in node.names if alias.name != "*")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (name := _dotted(node)) and name.split(".")[0] in known:
            # What follows two names may be an attribute of an object.
            yield ".".join(["deepspeed", *name.split(".")[1:3]])


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        before = _dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return node.id if isinstance(node, ast.Name) else ""


def _ours(names: list[str]) -> list[str]:
    """Tell which names the alias has ("here"), of which it has what is an "error" when used, and which are
    "missing", in a process that has installed it.
    """
    code = (
        "import json, sys, zlaunch.compat.deepspeed as alias; alias.install(); "
        "from zlaunch.compat.deepspeed import missing; "
        "from tests.compat.projects.real_deepspeed import find_name\n"
        "def kind(name):\n"
        "    try: found = find_name(name)\n"
        "    except Exception: return 'missing'\n"
        "    makers = getattr(found, '__module__', ''), type(found).__module__\n"
        "    return 'error' if missing.__name__ in makers else 'here'\n"
        "print('answers:' + json.dumps([kind(name) for name in json.load(sys.stdin)]))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        input=json.dumps(names),
        capture_output=True,
        text=True,
        check=True,
    )
    answers: list[str] = json.loads(done.stdout.rpartition("answers:")[2])
    return answers


if __name__ == "__main__":
    main()
