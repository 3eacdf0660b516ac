"""Test which package `import deepspeed` finds, and what is said of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.helpers import ROOT, run
from tests.limits import LIMIT_S

ASK = """
import importlib.metadata, importlib.util
spec = importlib.util.find_spec("deepspeed")
if spec is None or spec.origin is None:
    print("none")
else:
    print("zlaunch" if "zlaunch" in spec.origin else "installed", importlib.metadata.version("deepspeed"))
"""


def python(code: str, folder: Path, *path: Path, env: dict[str, str] | None = None) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, *path))), **(env or {})},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip() + ("\n" + result.stderr.strip() if result.stderr.strip() else "")


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder with another package `deepspeed`, as pip would leave it."""
    site = tmp_path / "site"
    (site / "deepspeed").mkdir(parents=True)
    (site / "deepspeed" / "__init__.py").write_text("print('the installed one')\n")
    info = site / "deepspeed-0.5.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.5.0\n")
    return site


@pytest.mark.parametrize(
    ("options", "is_installed", "expected"),
    [
        ((), False, "zlaunch 0.19.8"),
        ((), True, "installed 0.5.0"),
        (("--compat", "deepspeed"), True, "zlaunch 0.19.8"),
        (("--compat", "none"), False, "none"),
        (("--compat", "none"), True, "installed 0.5.0"),
    ],
)
def test_workers_find(
    tmp_path: Path, installed: Path, options: tuple[str, ...], is_installed: bool, expected: str
) -> None:
    path = f"{ROOT}{os.pathsep}{installed}" if is_installed else str(ROOT)
    launch = run(tmp_path, "--num_gpus", "1", *options, script=ASK, env={"PYTHONPATH": path})
    assert expected in launch.out.splitlines()
    said = f"`import deepspeed` is the installed {installed}" in launch.err
    assert said == (is_installed and not options)


def test_a_folder_of_that_name_is_not_the_package(tmp_path: Path) -> None:
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "ds_config.json").write_text("{}")
    assert "zlaunch 0.19.8" in run(tmp_path, "--num_gpus", "1", script=ASK).out.splitlines()


def test_programs_and_child_processes_find_it_too(tmp_path: Path) -> None:
    (tmp_path / "child.py").write_text(ASK)
    script = "import subprocess, sys; subprocess.run([sys.executable, 'child.py'], check=True)"
    assert "zlaunch 0.19.8" in run(tmp_path, "--num_gpus", "1", script=script).out.splitlines()
    launch = run(tmp_path, "--num_gpus", "1", "--no_python", sys.executable, "child.py")
    assert "zlaunch 0.19.8" in launch.out.splitlines()


@pytest.mark.exhaustive
def test_everybody_who_asks_is_told(tmp_path: Path) -> None:
    said = python(
        """
        import os
        os.environ["ZLAUNCH_VERBOSE"] = "1"
        import zlaunch.compat.deepspeed as ds
        assert not ds.is_installed()
        ds.install()
        assert ds.is_installed()
        import importlib.metadata, importlib.util, sys
        assert importlib.util.find_spec("deepspeed") is not None
        assert "torch" not in sys.modules
        assert importlib.util.find_spec("deepspeed.runtime.zero.stage3") is not None
        assert importlib.util.find_spec("deepspeed.nonsense") is None
        assert importlib.metadata.version("deepspeed") == "0.19.8"
        assert importlib.metadata.metadata("deepspeed")["Name"] == "deepspeed"
        assert importlib.metadata.packages_distributions()["deepspeed"] == ["deepspeed"]
        from accelerate.utils import compare_versions, is_deepspeed_available
        assert is_deepspeed_available() and compare_versions("deepspeed", ">=", "0.18.2")
        from transformers.dependency_versions_check import dep_version_check
        from transformers.integrations import is_deepspeed_available
        assert is_deepspeed_available()
        dep_version_check("deepspeed")
        import deepspeed
        assert deepspeed.__version__ == "0.19.8" and deepspeed.__version_minor__ == 19
        ds.install()
        """.replace("\n        ", "\n"),
        tmp_path,
    )
    assert said.count("zlaunch: `import deepspeed` is zlaunch") == 1


@pytest.mark.exhaustive
def test_names_that_are_not_here(tmp_path: Path) -> None:
    said = python(
        """
        import zlaunch.compat.deepspeed as ds
        ds.install()
        import deepspeed

        class Engine(deepspeed.InferenceEngine):
            pass

        for make in (Engine, deepspeed.init_inference, deepspeed.zero.MiCS_Init):
            try:
                make(1)
            except NotImplementedError as error:
                print(error)
        for module in (deepspeed, deepspeed.comm, deepspeed.utils, deepspeed.zero):
            try:
                module.no_such_name
            except AttributeError as error:
                print(error)
        try:
            from deepspeed.comm import no_such_name
        except ImportError as error:
            print("ImportError", error)
        try:
            import deepspeed.compression.compress
        except ModuleNotFoundError as error:
            print(error)
        """.replace("\n        ", "\n"),
        tmp_path,
    )
    for text in (
        "InferenceEngine is not supported",
        "init_inference is not",
    ):
        assert text in said
    assert said.count("docs/migrating/deepspeed.md") == 5
    assert "ImportError cannot import name 'no_such_name'" in said
    assert "No module named 'deepspeed.compression.compress'" in said and "use torchao" in said


@pytest.mark.rotated
def test_install_comes_too_late(tmp_path: Path, installed: Path) -> None:
    said = python(
        "import deepspeed, zlaunch.compat.deepspeed as ds\n"
        "try: ds.install()\nexcept RuntimeError as error: print(error)",
        tmp_path,
        installed,
    )
    assert "the installed one" in said and "deepspeed is already imported" in said
    said = python("import transformers, zlaunch.compat.deepspeed as ds; ds.install()", tmp_path)
    assert "transformers was imported before" in said


def test_running_a_command_under_it(tmp_path: Path) -> None:
    module = [sys.executable, "-m", "zlaunch.compat.deepspeed"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}

    def said(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*module, *command], cwd=tmp_path, env=env, capture_output=True, text=True)

    assert said(sys.executable, "-c", ASK).stdout.strip() == "zlaunch 0.19.8"
    lines = said().stdout
    shell = f'{lines}\ncommand -v deepspeed && {sys.executable} -c "$ASK"'
    result = subprocess.run(["sh", "-c", shell], env={**env, "ASK": ASK}, capture_output=True, text=True)
    assert "bin/deepspeed" in result.stdout and "zlaunch 0.19.8" in result.stdout
    assert said("no-such-program").returncode == 127
