"""Test what the Makefile's targets and a plain `pip install` ask for."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests import support

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
MODULES = {"pyyaml": "yaml"}
"""Where a package's module has another name."""


def package(requirement: str) -> str:
    """The name alone, as registries compare it."""
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None
    return re.sub(r"[-_.]+", "-", match[0]).lower()


RUNTIME = {package(each) for each in PROJECT["dependencies"]}


def pip_lines(target: str, *variables: str) -> list[list[str]]:
    """The words after `pip install` of each such line that `make TARGET` would run in a fresh clone."""
    command = ["make", "-n", target, "VENV=/nonexistent/venv", *variables]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.replace("\\\n", " ").splitlines()
    found = [re.search(r"-m pip install ([^|;]*)", line) for line in lines]
    return [shlex.split(match[1]) for match in found if match is not None]


def requirements(words: list[str]) -> list[str]:
    """What is installed, without pip's own options."""
    with_value = ("-c", "--progress-bar", "--retries", "--timeout", "--index-url", "-e")
    asked, rest = [], iter(words)
    for word in rest:
        if word == "-e":
            asked.append(next(rest))
        elif word in with_value:
            next(rest)
        elif not word.startswith("-"):
            asked.append(word)
    return asked


@pytest.mark.needs("make")
def test_the_demo_installs_what_a_run_needs_and_no_more() -> None:
    torch, project = pip_lines("demo", "TORCH_INDEX=https://example.org/cpu")
    assert requirements(torch) == ["torch"] and "--no-deps" in torch
    assert torch[torch.index("--index-url") + 1] == "https://example.org/cpu"
    assert requirements(project) == ["."], "no extras"
    for words in (torch, project):
        assert words[words.index("-c") + 1] == "constraints.txt"
    tools = {"ruff", "mypy", "pytest", "hypothesis", "transformers", "accelerate", "peft", "build", "numba"}
    assert not tools & RUNTIME
    assert not [name for name in RUNTIME if name.startswith(("types-", "cupy", "nvidia"))]


@pytest.mark.needs("make")
@pytest.mark.parametrize("target", ["test", "test-fast", "test-all", "lint", "bench"])
def test_other_targets_install_the_tools_too(target: str) -> None:
    *_, last = pip_lines(target)
    assert requirements(last) == [".[test]"]
    names = {package(each) for each in EXTRAS["test"]}
    assert {"ruff", "mypy", "pytest", "hypothesis", "transformers", "build"} <= names


@pytest.mark.needs("make")
def test_the_site_installs_what_it_is_made_with() -> None:
    *_, last = pip_lines("docs")
    assert requirements(last) == [".[docs]"]


def test_all_that_is_asked_for_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {package(line) for line in lines if "==" in line and not line.startswith("#")}
    extras = ("test", "docs", "hf", "bench", "cpu", "cuda12")
    wanted = RUNTIME | {package(each) for name in extras for each in EXTRAS[name]}
    assert sorted(wanted - pinned) == []


def imports(path: Path) -> set[str]:
    """The packages that a file needs to be imported: what is imported outside of functions."""
    names: set[str] = set()
    nodes: list[ast.AST] = [ast.parse(path.read_text())]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Try)):
            nodes += ast.iter_child_nodes(node)
    return names


def test_every_import_is_a_dependency() -> None:
    dependencies = {MODULES.get(name, name.replace("-", "_")) for name in RUNTIME}
    known = dependencies | set(sys.stdlib_module_names) | {"zlaunch", "deepspeed", "gpt"}
    folders = ("zlaunch", "runtime", "cuda_ops", "hostfiles", "slurm")
    files = [path for name in folders for path in (ROOT / name).rglob("*.py")]
    files += [
        ROOT / "examples" / name for name in ("train_gpt.py", "train_gpt_pipeline.py", "sample.py", "gpt.py")
    ]
    assert len(files) > 100
    unknown = {(path.name, name) for path in files for name in imports(path) - known}
    # these files are imported where the package is there
    assert unknown == {("host_kernels.py", "numba"), ("trainer_callback.py", "transformers")}


def test_a_missing_interpreter_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(support.SupportError, match=r"no Python 3\.10 .* put python3\.10 on PATH"):
        support.interpreter("3.10")
    broken = tmp_path / "python3.10"
    broken.write_text("#!/bin/sh\nexit 127\n")  # as pyenv's shims of versions that are not chosen
    broken.chmod(0o755)
    own = tmp_path / ".pyenv" / "versions" / "3.10.4" / "bin" / "python"
    own.parent.mkdir(parents=True)
    own.write_text("#!/bin/sh\n")
    own.chmod(0o755)
    assert support.interpreter("3.10") == str(own)


def test_the_versions_that_are_tested_are_those_that_are_promised() -> None:
    said = " ".join(PROJECT["classifiers"])
    readme = (ROOT / "README.md").read_text()
    for each in support.COMBINATIONS:
        assert f"Python :: {each.python}" in said
        assert f"Python {each.python} with torch {each.torch.rpartition('.')[0]}" in readme
    oldest = support.COMBINATIONS[0]
    assert PROJECT["requires-python"] == f">={oldest.python}"
    assert f"torch>={oldest.torch.rpartition('.')[0]}" in PROJECT["dependencies"]
