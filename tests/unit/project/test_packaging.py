"""Test what a wheel holds, and that its names never meet the user's."""

from __future__ import annotations

import ast
import importlib
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

import zlaunch
from tests.limits import LIMIT_S
from tests.runtime.workers import run_workers

ROOT = Path(__file__).resolve().parents[3]
LINKED = ("runtime", "cuda_ops", "hostfiles", "slurm")
"""Top-level folders that are packages inside zlaunch, by links."""
LAUNCHER = (
    *("errors", "hostfiles", "slurm", "system", "plan", "node", "transports", "view", "supervisor"),
    *("kubernetes", "launchers", "queue", "sweep", "ui", "cli"),
)
"""The launcher's rooms: each imports only those before it."""


def python(code: str, folder: Path, *path: Path) -> str:
    """The output of `python -c code` run in a folder, with nothing but ``path`` on PYTHONPATH."""
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of a copy of the source tree, where a build can leave its files."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    for name in ("zlaunch", *LINKED):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignore)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    command += ["--no-input", "--disable-pip-version-check", "--wheel-dir", str(out), str(source)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert result.returncode == 0, result.stdout + result.stderr
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_wheel_holds_all_packages_under_one_name(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    sources = {f"zlaunch/{path.relative_to(ROOT)}" for name in LINKED for path in (ROOT / name).rglob("*.py")}
    sources |= {str(path.relative_to(ROOT)) for path in (ROOT / "zlaunch").rglob("*.py")}
    assert sources <= names
    assert {"zlaunch/py.typed", "zlaunch/runtime/engine.py", "zlaunch/hostfiles/filters.py"} <= names
    assert {f"zlaunch/{name}/__init__.py" for name in LINKED} <= names
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"zlaunch"}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


ARCHIVED = ("zlaunch", *LINKED, "tests", "docs", "examples", "benchmarks")
AT_THE_TOP = (
    *("CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in", "Makefile", "README.md"),
    *("constraints.txt", "mkdocs.yml", "pyproject.toml", "setup.py"),
    *("Dockerfile", "SECURITY.md", "environment.yml"),
)


def files_of(folder: Path) -> set[str]:
    """The files and links of a source tree, but those that only a clone has."""
    there = [path for name in ARCHIVED for path in (folder / name).rglob("*")]
    there += [folder / name for name in AT_THE_TOP]
    found = {path.relative_to(folder) for path in there if path.is_symlink() or path.is_file()}
    return {str(path) for path in found if "__pycache__" not in path.parts}


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source archive, unpacked."""
    source, out = tmp_path_factory.mktemp("clone"), tmp_path_factory.mktemp("archive")
    for name in files_of(ROOT):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, source / name, follow_symlinks=False)
    code = f"import setuptools.build_meta as b; print(b.build_sdist({str(out)!r}))"
    made = subprocess.run(
        [sys.executable, "-c", code], cwd=source, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert made.returncode == 0, made.stderr
    (built,) = out.glob("*.tar.gz")
    with tarfile.open(built) as packed:
        packed.extractall(out, filter="data")
    return out / built.name.removesuffix(".tar.gz")


@pytest.mark.exhaustive
def test_the_source_archive_holds_all(archive: Path) -> None:
    ours, there = files_of(ROOT), files_of(archive)
    assert len(ours) > 300 and ours <= there, sorted(ours - there)
    for name in LINKED:
        link = archive / "zlaunch" / name
        assert link.is_symlink() and os.readlink(link) == f"../{name}" and (link / "__init__.py").is_file()
    assert not list(archive.rglob("__pycache__")) and not list(archive.rglob("*.pyc"))


@pytest.mark.exhaustive
def test_a_wheel_of_the_source_archive_is_the_same(archive: Path, wheel: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    command += ["--no-input", "--disable-pip-version-check", "--wheel-dir", str(tmp_path), str(archive)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert result.returncode == 0, result.stdout + result.stderr
    (again,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(again) as other:
        contents = [{info.filename: info.CRC for info in each.infolist()} for each in (one, other)]
    for content in contents:
        assert content.pop(next(name for name in content if name.endswith("/RECORD")))
    assert contents[0] == contents[1]


def test_the_description_of_the_package(unpacked: Path) -> None:
    (text,) = (path.read_text() for path in unpacked.glob("*.dist-info/METADATA"))
    head = text.partition("\n\n")[0].splitlines()
    assert "License-Expression: Apache-2.0" in head and "License-File: LICENSE" in head
    assert "Author: The zlaunch authors" in head and "Requires-Python: >=3.10" in head
    kinds = {line.partition(": ")[2].partition(" ::")[0] for line in head if line.startswith("Classifier: ")}
    assert {"Operating System", "Intended Audience", "Topic", "Development Status"} <= kinds
    assert not [line for line in head if "License ::" in line], "the expression says it"
    assert f"Version: {zlaunch.__version__}" in head and "Description-Content-Type: text/markdown" in head
    links = {line.partition(": ")[2].partition(",")[0] for line in head if line.startswith("Project-URL: ")}
    assert {"Homepage", "Repository", "Documentation", "Issues", "Changelog"} <= links


def test_one_version_everywhere() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    newest = re.search(r"^## (\S+) - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert citation["version"] == newest[1] == zlaunch.__version__
    assert str(citation["date-released"]) == newest[2]


def test_the_command_of_the_wheel_works_in_any_folder(unpacked: Path, tmp_path: Path) -> None:
    """Call what pip writes into `bin/zlaunch`, and `python -m zlaunch`."""
    (scripts,) = (path.read_text() for path in unpacked.glob("*.dist-info/entry_points.txt"))
    assert "zlaunch = zlaunch.__main__:main" in scripts.splitlines()
    script = "import sys; from zlaunch.__main__ import main; sys.argv = ['zlaunch', '-h']; sys.exit(main())"
    assert python(script, tmp_path, unpacked).startswith("Usage: zlaunch")
    module = "import runpy, sys; sys.argv = ['', '--version']; runpy.run_module('zlaunch', {}, '__main__')"
    assert python(module, tmp_path, unpacked) == f"zlaunch {zlaunch.__version__}"


def test_the_modules_of_the_wheel_are_imported_from_it(unpacked: Path, tmp_path: Path) -> None:
    code = """if True:
        import importlib, sys
        for name in ("runtime", "runtime.config", "hostfiles", "slurm", "cuda_ops", "jobs"):
            print(importlib.import_module("zlaunch." + name).__file__)
        print("torch" in sys.modules)
    """
    *files, torch_loaded = python(code, tmp_path, unpacked).splitlines()
    assert len(files) == 6 and all(Path(file).is_relative_to(unpacked) for file in files)
    assert torch_loaded == "False"


@pytest.mark.exhaustive
def test_the_wheel_trains_in_a_folder_without_the_repository(unpacked: Path, tmp_path: Path) -> None:
    shutil.copy(ROOT / "examples" / "quickstart" / "zero3.py", tmp_path / "train.py")
    done = subprocess.run(
        [sys.executable, "-m", "zlaunch", "--num_gpus", "2", "train.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(unpacked)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^step \d+: loss ", done.stdout, re.MULTILINE)) == 5
    assert list((tmp_path / "runs").glob("*/plan.json"))


@pytest.fixture(scope="module")
def said(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What a script says that uses the unpacked wheel beside modules of its own, with their names."""
    folder = tmp_path_factory.mktemp("own")
    for name in ("runtime", "config"):
        (folder / f"{name}.py").write_text(f"mine = 'my {name}'\n")
    code = (
        "import zlaunch.runtime.engine, runtime, config, sys\n"
        "print(runtime.mine, config.mine, zlaunch.__file__, zlaunch.runtime.engine.__file__, sep='|')\n"
        "import zlaunch.compat.deepspeed as ds; ds.install(); import deepspeed, importlib.metadata\n"
        "print(importlib.metadata.version('deepspeed'), deepspeed.__file__, sep='|')"
    )
    return python(code, folder, unpacked).splitlines()


@pytest.mark.exhaustive
def test_the_deepspeed_alias_comes_with_it(wheel: Path, unpacked: Path, said: list[str]) -> None:
    version, file = said[1].split("|")
    assert version == "0.19.8" and Path(file).is_relative_to(unpacked)
    with zipfile.ZipFile(wheel) as archive:
        program = archive.getinfo("zlaunch/compat/deepspeed/bin/deepspeed")
    assert program.external_attr >> 16 & 0o111  # pip keeps it executable


@pytest.mark.exhaustive
def test_users_own_runtime_and_config_stay_theirs(unpacked: Path, said: list[str]) -> None:
    own_runtime, own_config, package, engine = said[0].split("|")
    assert (own_runtime, own_config) == ("my runtime", "my config")
    assert Path(package) == unpacked / "zlaunch" / "__init__.py"
    assert Path(engine) == unpacked / "zlaunch" / "runtime" / "engine.py"


def _loaded() -> set[str]:
    """The modules after the import of all of ours, in a process that has torch."""
    for found in pkgutil.walk_packages(zlaunch.__path__, "zlaunch."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)
    return set(sys.modules)


def test_nothing_is_loaded_under_a_top_level_name() -> None:
    (loaded,) = run_workers(_loaded, 1)
    assert len([name for name in loaded if name.startswith("zlaunch.")]) > 40
    assert not loaded & set(LINKED)


def test_launcher_imports_no_torch(tmp_path: Path) -> None:
    code = """if True:
        import importlib, pkgutil, sys
        import zlaunch
        for room in ROOMS:
            package = importlib.import_module("zlaunch." + room)
            for found in pkgutil.walk_packages(getattr(package, "__path__", ()), package.__name__ + "."):
                importlib.import_module(found.name)
        import zlaunch.runtime.config
        print(sum(n.startswith("zlaunch.supervisor.") for n in sys.modules), "torch" in sys.modules)
    """
    count, torch_loaded = python(code.replace("ROOMS", repr(LAUNCHER)), tmp_path, ROOT).split()
    assert int(count) > 5
    assert torch_loaded == "False"


def imported(path: Path) -> set[str]:
    """Every module that a file of ours imports, anywhere in it, by its full name."""
    package = ("zlaunch", *(part for part in path.relative_to(ROOT).parent.parts if part != "zlaunch"))
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*above, *filter(None, [node.module])))
            names |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return names


def test_runtime_imports_nothing_of_the_launcher() -> None:
    files = sorted((ROOT / "runtime").rglob("*.py"))
    assert len(files) > 20
    launcher = tuple(f"zlaunch.{room}" for room in LAUNCHER if room != "errors")
    for path in files:
        for name in imported(path):
            assert not f"{name}.".startswith(tuple(f"{part}." for part in launcher)), f"{path}: {name}"
            assert name.split(".")[0] not in LINKED, f"{path}: {name} would be loaded twice"


def test_rooms_of_the_launcher_import_those_below_them() -> None:
    for above, room in enumerate(LAUNCHER):
        later = {f"zlaunch.{name}" for name in LAUNCHER[above + 1 :]}
        for path in [*(ROOT / "zlaunch" / room).glob("*.py"), *(ROOT / "zlaunch").glob(f"{room}.py")]:
            for name in imported(path):
                assert ".".join(name.split(".")[:2]) not in later, f"{path}: {name}"
                assert name != "click" or room == "cli", f"{path}: only the command line knows click"
