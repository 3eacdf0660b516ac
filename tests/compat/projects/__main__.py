"""Run other projects' scripts under zlaunch and beside it under the launcher that they were written for.

    python -m tests.compat.projects CLONES [--deepspeed FOLDER] [--only TEXT] [--path FOLDER]

CLONES has a clone of each repository of ``rows.SOURCES``. A row whose clone or packages are missing fails,
with what to get. Rows for DeepSpeed's launcher run beside it where --deepspeed names a folder that has it.
DeepSpeed-Chat, LLaMA-Factory, ms-swift and axolotl need other versions of packages: run them with --only and
--path.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path

import click
from packaging.requirements import Requirement

from tests.ports import reserved_port

from .inputs import make_inputs
from .rows import PROJECTS, SOURCES, Project

ROOT = Path(__file__).resolve().parents[3]
STAND_INS = Path(__file__).parent / "stand_ins"
LIMIT_S = 600


@click.command()
@click.argument("clones", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--deepspeed", "deepspeed", multiple=True, help="Folder with DeepSpeed or what it needs; repeatable."
)
@click.option("--only", default="", help="Run the rows whose name contains this text.")
@click.option("--path", "paths", multiple=True, help="Folder with more packages for all runs; repeatable.")
def main(clones: Path, deepspeed: tuple[str, ...], only: str, paths: tuple[str, ...]) -> None:
    """Run each row, and print a line for it. Exits with 1 if one has failed."""
    failed = 0
    sys.path[:0] = paths
    with tempfile.TemporaryDirectory(prefix="projects-") as folder:
        work = Path(folder)
        make_inputs(work / "inputs")
        for project in PROJECTS:
            if only not in project.name:
                continue
            problem, said = _run_row(project, clones.resolve(), work, list(deepspeed), list(paths))
            failed += bool(problem)
            print(f"{'FAILED' if problem else 'passed'}  {project.name}: {problem or said}", flush=True)
    sys.exit(1 if failed else 0)


def _run_row(
    project: Project, clones: Path, work: Path, deepspeed: list[str], paths: list[str]
) -> tuple[str, str]:
    """Return what has failed, and what to say if nothing has."""
    if missing := [need for need in project.needs if not _is_installed(need)]:
        return f"pip install {shlex.join(missing)}, or name a folder that has them with --path", ""
    source = clones / project.root
    if project.root.startswith("@"):
        source = Path(str(files(project.root[1:])))
    if not source.is_dir():
        url, commit = SOURCES[project.root.partition("/")[0]]
        return f"no {source}: git clone {url}, which ran at commit {commit}", ""
    ours, code = _run(project, project.command, _launcher(project, is_ours=True), source, work, paths)
    if code:
        return f"zlaunch exited with {code}:\n{ours[-3000:]}", ""
    mine = _numbers(project, ours)
    if project.prints and not mine:
        return f"it printed nothing that matches {project.prints!r}:\n{ours[-3000:]}", ""
    if project.beside is None:
        return "", f"ran; nothing beside it: {project.why}"
    if project.starts == "deepspeed" and not deepspeed:
        return "", f"ran, {len(mine)} numbers; not compared without --deepspeed"
    more = paths + (deepspeed if project.starts == "deepspeed" else [])
    command = project.beside or project.command
    theirs, code = _run(project, command, _launcher(project, is_ours=False), source, work, more)
    if code:
        return f"it ran, but what runs beside us exited with {code}:\n{theirs[-3000:]}", ""
    other = _numbers(project, theirs)
    if project.is_repeated:
        mine = sorted(mine)
        other = sorted(other)[::2]
    if len(mine) != len(other):
        return f"{len(mine)} numbers, {len(other)} beside us: {mine} {other}", ""
    if not project.prints:
        return "", f"ran, and what runs beside it too; {project.why}"
    far = max((abs(one - two) for one, two in zip(mine, other, strict=True)))
    if far > project.nearness:
        return f"up to {far:.2g} from the numbers beside us, {project.nearness:g} allowed: {mine} {other}", ""
    reason = f" ({project.why})" if project.why else ""
    return "", f"{len(mine)} numbers, at most {far:.2g} from those beside it{reason}"


def _launcher(project: Project, *, is_ours: bool) -> list[str]:
    """Return the command before the script."""
    if is_ours:
        own = (
            ["--num_gpus", "2"]
            if project.starts == "deepspeed"
            else ["--standalone", "--nproc_per_node", "2"]
        )
        return ["zlaunch", *own, "--compat", "deepspeed"]
    if project.starts == "torchrun":
        return ["torch.distributed.run", "--standalone", "--nproc_per_node", str(project.beside_ranks)]
    world = base64.urlsafe_b64encode(json.dumps({"localhost": [0, 1]}).encode()).decode()
    with reserved_port() as port:
        return [
            "deepspeed.launcher.launch",
            f"--world_info={world}",
            "--master_addr=127.0.0.1",
            f"--master_port={port}",
        ]


def _run(
    project: Project, command: str, launcher: list[str], source: Path, work: Path, paths: list[str]
) -> tuple[str, int]:
    """Return the output and the exit code of a command in a new copy of the project."""
    copy = Path(tempfile.mkdtemp(dir=work)) / source.name
    is_package = project.root.startswith("@")
    if is_package:
        copy.mkdir()
    else:
        shutil.copytree(source, copy, ignore=shutil.ignore_patterns(".git"))
    out = copy.parent / "out"
    out.mkdir()
    if project.prepare is not None:
        project.prepare(copy)
    places = {"inputs": str(work / "inputs"), "out": str(out)}
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(STAND_INS), str(copy), *paths, str(ROOT)]),
        "STAND_IN_CUDA": str(int(project.names_cuda)),
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        **{name: value.format(**places) for name, value in project.env.items()},
    }
    folder = copy / project.folder
    if project.first:
        subprocess.run([sys.executable, *shlex.split(project.first)], cwd=folder, env=env, check=True)
    words = shlex.split(command.format(**places))
    if is_package:
        words[0] = str(source / words[0])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", *launcher, *words],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
    )
    shutil.rmtree(copy.parent)
    return done.stdout, done.returncode


def _numbers(project: Project, output: str) -> list[float]:
    return [float(each) for each in re.findall(project.prints, output)] if project.prints else []


def _is_installed(need: str) -> bool:
    wanted = Requirement(need)
    try:
        return wanted.specifier.contains(version(wanted.name), prereleases=True)
    except PackageNotFoundError:
        return False


if __name__ == "__main__":
    main()
