"""Check the files by which people get started: the image, the conda environment, issue forms."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = set(PROJECT["optional-dependencies"])
DOCKERFILE = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")


def instructions(word: str) -> list[str]:
    """Return what stands behind a word at the beginning of the Dockerfile's lines."""
    return re.findall(rf"^{word} (.+)$", DOCKERFILE, re.MULTILINE)


def ignored() -> list[str]:
    """Return what .dockerignore lets into the image."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in lines
    return [line[1:] for line in lines if line.startswith("!")]


def test_the_image_is_given_what_it_is_built_from() -> None:
    there = set(ignored())
    assert all((ROOT / name).exists() for name in there)
    linked = {path.name for path in (ROOT / "zlaunch").iterdir() if path.is_symlink()}
    assert {"zlaunch", *linked, "pyproject.toml", "setup.py", "README.md", "LICENSE"} <= there
    for words in instructions("COPY"):
        *sources, _ = words.split()
        assert all(source == "." or source in there for source in sources)
    assert set(instructions("ARG")[0].removeprefix("EXTRAS=").split(",")) <= EXTRAS


@pytest.mark.parametrize("index", ["", "https://example.org/cpu"])
def test_the_images_steps_are_commands_of_a_shell(tmp_path: Path, index: str) -> None:
    for step in instructions("RUN"):
        subprocess.run(["/bin/sh", "-n", "-c", step], check=True)
    (torch,) = [step for step in instructions("RUN") if step.endswith(" torch")]
    (tmp_path / "pip").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "pip").chmod(0o755)
    asked = subprocess.run(
        ["/bin/sh", "-c", torch],
        env={"PATH": str(tmp_path), "TORCH_INDEX": index},
        capture_output=True,
        text=True,
    )
    assert asked.stdout.startswith("install -c /src/constraints.txt ") and asked.stdout.endswith(" torch\n")
    assert ("--index-url https://example.org/cpu " in asked.stdout) is bool(index)


def test_the_conda_environment() -> None:
    content = yaml.safe_load((ROOT / "environment.yml").read_text())
    *packages, with_pip = content["dependencies"]
    (python,) = [name.partition("=")[2] for name in packages if name.startswith("python")]
    assert f"Programming Language :: Python :: {python}" in PROJECT["classifiers"]
    assert with_pip["pip"][0] == "-c constraints.txt"
    editable = re.fullmatch(r"-e \.\[(.+)\]", with_pip["pip"][1])
    assert editable is not None and set(editable[1].split(",")) <= EXTRAS


def test_issue_forms() -> None:
    forms = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    for path in forms:
        content = yaml.safe_load(path.read_text())
        if path.stem == "config":
            continue
        assert {"name", "description", "body"} <= content.keys(), path.name
        ids = [part["id"] for part in content["body"]]
        assert len(set(ids)) == len(ids) and all(part["attributes"]["label"] for part in content["body"])
    assert len(forms) == 3
