"""What a wheel holds, and that its names never meet the user's own."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.limits import LIMIT_S

ROOT = Path(__file__).resolve().parents[2]
LINKED = ("runtime", "cuda_ops", "hostfiles", "slurm")
"""Top-level folders that are packages inside zlaunch, by links."""


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


def test_the_deepspeed_alias_comes_with_it(wheel: Path, unpacked: Path, tmp_path: Path) -> None:
    code = (
        "import zlaunch.compat.deepspeed as ds; ds.install(); import deepspeed, importlib.metadata\n"
        "print(importlib.metadata.version('deepspeed'), deepspeed.__file__, sep='|')"
    )
    version, file = python(code, tmp_path, unpacked).split("|")
    assert version == "0.19.8" and Path(file).is_relative_to(unpacked)
    with zipfile.ZipFile(wheel) as archive:
        program = archive.getinfo("zlaunch/compat/deepspeed/bin/deepspeed")
    assert program.external_attr >> 16 & 0o111  # pip keeps it executable


def test_users_own_runtime_and_config_stay_theirs(unpacked: Path, tmp_path: Path) -> None:
    for name in ("runtime", "config"):
        (tmp_path / f"{name}.py").write_text(f"mine = 'my {name}'\n")
    code = (
        "import zlaunch.runtime.engine, runtime, config, sys\n"
        "print(runtime.mine, config.mine, zlaunch.__file__, zlaunch.runtime.engine.__file__, sep='|')"
    )
    own_runtime, own_config, package, engine = python(code, tmp_path, unpacked).split("|")
    assert (own_runtime, own_config) == ("my runtime", "my config")
    assert Path(package) == unpacked / "zlaunch" / "__init__.py"
    assert Path(engine) == unpacked / "zlaunch" / "runtime" / "engine.py"


def test_nothing_is_loaded_under_a_top_level_name(tmp_path: Path) -> None:
    code = """if True:
        import importlib, pkgutil, sys
        import zlaunch
        for found in pkgutil.walk_packages(zlaunch.__path__, "zlaunch."):
            if not found.name.endswith("__main__"):
                importlib.import_module(found.name)
        print(*sys.modules)
    """
    loaded = set(python(code, tmp_path, ROOT).split())
    assert len([name for name in loaded if name.startswith("zlaunch.")]) > 40
    assert not loaded & set(LINKED)


def test_launcher_imports_no_torch(tmp_path: Path) -> None:
    code = """if True:
        import importlib, pkgutil, sys
        import zlaunch, zlaunch.cli, zlaunch.launch, zlaunch.view, zlaunch.hostfiles, zlaunch.slurm
        for package in (zlaunch.cli, zlaunch.launch, zlaunch.view, zlaunch.hostfiles, zlaunch.slurm):
            for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
                importlib.import_module(found.name)
        import zlaunch.runtime.config
        print(sum(n.startswith("zlaunch.launch.") for n in sys.modules), "torch" in sys.modules)
    """
    count, torch_loaded = python(code, tmp_path, ROOT).split()
    assert int(count) > 5
    assert torch_loaded == "False"


def imported(path: Path) -> set[str]:
    """Every module that a file of runtime/ imports, anywhere in it, by its full name."""
    package = ("zlaunch", *path.relative_to(ROOT).parent.parts)
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
    launcher = ("zlaunch.launch", "zlaunch.cli", "zlaunch.view", "zlaunch.hostfiles", "zlaunch.slurm")
    for path in files:
        for name in imported(path):
            assert not f"{name}.".startswith(tuple(f"{part}." for part in launcher)), f"{path}: {name}"
            assert name.split(".")[0] not in LINKED, f"{path}: {name} would be loaded twice"
