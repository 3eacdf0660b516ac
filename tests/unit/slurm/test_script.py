"""Test sbatch files, and how they are submitted and followed with stand-ins for SLURM's commands."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.limits import LIMIT_S
from tests.tools import plain_tools
from zlaunch.cli.main import main
from zlaunch.slurm import commands as queue
from zlaunch.slurm.commands import has_restarted, read_node_sizes, was_cancelled
from zlaunch.slurm.environment import SlurmError
from zlaunch.slurm.script import BatchScript, cores_of, render

TEMPLATES = Path(__file__).resolve().parents[3] / "slurm" / "templates"

TRAIN = BatchScript(
    job_name="train",
    gpus_per_node=8,
    cpus_per_task=64,
    time="24:00:00",
    output="%x-%j.out",
    venv=".venv",
    script="train.py",
    script_args=("--config", "ds.json"),
)
PRESETS = {
    "single_node": TRAIN,
    "multi_node": replace(TRAIN, nodes=4),
    "preemptible": replace(TRAIN, nodes=4, signal="USR1@120", requeue=True),
}
"""Lists the options that the files in `templates/` were made with."""

EVERYTHING = BatchScript(
    script="my train.py",
    script_args=("--name", "it's $HOME", "", "two\nlines", "*"),
    zlaunch_args=("--log_ranks", "all"),
    nodes=2,
    gpus_per_node="a100:4",
    cpus_per_task=32,
    time="1-12:00:00",
    partition="gpu",
    account="proj",
    qos="high",
    array="0-9%2",
    job_name="a job",
    output='my logs/%x "1" \\#.out',
    container="nvcr.io#nvidia/pytorch:24.10-py3",
    modules=("cuda/12.4", "nccl"),
    setup=('export DATA="$HOME/data"', "ulimit -n 65536"),
    venv="/home/me/my env",
    python="/opt/py/bin/python",
    signal="USR1@120",
    requeue=True,
    sbatch=("--nice=5", '--constraint="a&b"'),
)

GOLDEN = r"""#!/bin/bash
#SBATCH --job-name="a job"
#SBATCH --partition=gpu
#SBATCH --account=proj
#SBATCH --qos=high
#SBATCH --array=0-9%2
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=a100:4
#SBATCH --cpus-per-task=32
#SBATCH --time=1-12:00:00
#SBATCH --output="my logs/%x \"1\" \\#.out"
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --nice=5
#SBATCH --constraint="a&b"

set -euo pipefail

# Variables of an enclosing job step would mislead srun and zlaunch.
unset ${!SLURM_STEP_*} ${!SLURM_CPU_BIND*}
# srun does not inherit --cpus-per-task from sbatch.
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-32}"
# The workers run in this image: pyxis reads it when zlaunch calls srun. zlaunch itself runs outside it.
export PYXIS_CONTAINER_IMAGE='nvcr.io#nvidia/pytorch:24.10-py3'

# Modules and activation scripts may read unset variables.
set +u
module load cuda/12.4 nccl
source '/home/me/my env/bin/activate'
export DATA="$HOME/data"
ulimit -n 65536
set -u

# SLURM sends this signal only to the batch shell. exec replaces the shell with zlaunch, which then gets
# the signal.
exec /opt/py/bin/python -m zlaunch --requeue --log_ranks all 'my train.py' --name 'it'"'"'s $HOME' '' 'two
lines' '*'
"""


def programs(folder: Path, **texts: str) -> Path:
    """Executable files with these texts."""
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        path = folder / name
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return folder


def check_syntax(text: str) -> None:
    result = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, timeout=LIMIT_S)
    assert (result.returncode, result.stderr) == (0, "")


# -- the text


def test_every_option() -> None:
    assert render(EVERYTHING) == GOLDEN
    check_syntax(GOLDEN)


def test_least() -> None:
    text = render(BatchScript(script="train.py"))
    assert [line for line in text.splitlines() if line and not line.startswith("# ")] == [
        "#!/bin/bash",
        "#SBATCH --nodes=1",
        "#SBATCH --ntasks-per-node=1",
        "set -euo pipefail",
        "unset ${!SLURM_STEP_*} ${!SLURM_CPU_BIND*}",
        "exec zlaunch train.py",
    ]


@pytest.mark.parametrize("name", PRESETS)
def test_templates_are_the_presets(name: str) -> None:
    assert (TEMPLATES / f"{name}.sbatch").read_text() == render(PRESETS[name])
    check_syntax(render(PRESETS[name]))


def test_every_template_is_a_preset() -> None:
    assert {path.name for path in TEMPLATES.iterdir()} == {f"{name}.sbatch" for name in PRESETS}


def test_one_node_runs_in_the_container_as_a_whole() -> None:
    text = render(BatchScript(script="t.py", container="docker://x"))
    assert "#SBATCH --container-image=docker://x\n" in text and "PYXIS" not in text


@pytest.mark.parametrize("signal", ["TERM", "USR1@90", "10@5", "B:USR1@90"])
def test_signals_go_to_the_batch_shell(signal: str) -> None:
    text = render(BatchScript(script="t.py", signal=signal))
    assert f"#SBATCH --signal=B:{signal.removeprefix('B:')}\n" in text


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"nodes": 0}, "--num_nodes 0: must be at least 1"),
        ({"cpus_per_task": -1}, "--cpus_per_task -1: must be at least 1"),
        ({"gpus_per_node": 0}, "--num_gpus '0': write it as 8 or a100:8"),
        ({"gpus_per_node": "a100"}, "--num_gpus 'a100'"),
        ({"time": "1h"}, "--time '1h': write it as 90, 24:00:00"),
        ({"time": "1:00\n#SBATCH --uid=0"}, "--time "),
        ({"array": "a"}, "--array 'a': write it as 0-9"),
        ({"signal": "usr1"}, "--signal 'usr1': write it as USR1@120"),
        ({"signal": "USR1@120\n"}, "--signal "),
        ({"job_name": "a\nb"}, r"--job_name 'a\nb': must be one line"),
        ({"partition": ""}, "--partition '': must be one line"),
        ({"output": "a\rb"}, r"--output 'a\rb'"),
        ({"container": "a\0"}, r"--container 'a\x00'"),
        ({"sbatch": ("nice=5",)}, "--sbatch 'nice=5': write one sbatch option"),
        ({"sbatch": ("--nice=5\nrm",)}, "--sbatch "),
        ({"script": ""}, "expected a script, got ''"),
        ({"script": "--nodes"}, "expected a script, got '--nodes'"),
        ({"script_args": ("a\0",)}, r"script argument 'a\x00': sbatch takes no file with a zero byte"),
        ({"setup": ("a\r\n",)}, r"--setup 'a\r\n'"),
        ({"modules": ("\0",)}, "--load "),
    ],
)
def test_values_that_would_be_misread(values: dict[str, Any], words: str) -> None:
    with pytest.raises(SlurmError) as caught:
        BatchScript(**{"script": "t.py", **values})
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def sbatch_words(line: str) -> list[str]:
    """How sbatch reads the rest of an #SBATCH line: inside either quotes a backslash escapes."""
    words: list[str] = []
    word, quote, escaped = "", "", False
    for char in line:
        if escaped:
            word, escaped = word + char, False
        elif char == "\\":
            escaped = True
        elif quote:
            word, quote = (word, "") if char == quote else (word + char, quote)
        elif char in "\"'":
            quote = char
        elif char == "#":
            break
        elif char.isspace():
            words, word = [*words, word] if word else words, ""
        else:
            word += char
    return [*words, word] if word else words


printable = st.text(min_size=1, max_size=20).filter(str.isprintable)


@given(printable | st.text(alphabet="a \\\"'#$`%", min_size=1, max_size=12))
def test_values_survive_sbatch(value: str) -> None:
    text = render(BatchScript(script="t.py", output=value))
    (line,) = [line for line in text.split("\n") if line.startswith("#SBATCH --output")]
    assert sbatch_words(line.removeprefix("#SBATCH")) == [f"--output={value}"]


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a `zlaunch` that prints its arguments as JSON."""
    code = f"#!{sys.executable} -ISXutf8\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n"
    return programs(tmp_path_factory.mktemp("bin"), zlaunch=code)


words = st.text(
    alphabet=st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12
) | st.text(alphabet="a '\"$`\\\n!*~;&|<>(){}#-=", max_size=12)


@pytest.mark.rotated
@settings(max_examples=40)
@given(st.lists(words.filter(lambda word: "\r\n" not in word), max_size=12))
def test_arguments_survive_bash(stand_in: Path, args: list[str]) -> None:
    batch = BatchScript(script="a b.py", script_args=tuple(args), zlaunch_args=("--run_dir", "$x 'y'"))
    result = subprocess.run(
        ["bash", "-c", render(batch)],
        env={"PATH": f"{stand_in}:/usr/bin:/bin", "SLURM_STEP_ID": "0"},
        capture_output=True,
        timeout=LIMIT_S,
    )
    assert result.stderr == b""
    assert json.loads(result.stdout) == ["--run_dir", "$x 'y'", "a b.py", *args]


def test_a_whole_file_runs(stand_in: Path, tmp_path: Path) -> None:
    """Modules, activation and setup take effect; what a step left behind does not."""
    venv = tmp_path / "my env"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "activate").write_text('ACTIVE="yes$NOT_SET"\n')
    code = f"#!{sys.executable} -ISXutf8\nimport json, os\nprint(json.dumps(dict(os.environ)))\n"
    folder = programs(tmp_path / "bin", zlaunch=code, module='#!/bin/sh\necho "$@" >"$LOADED"\n')
    batch = BatchScript(
        script="t.py", cpus_per_task=3, modules=("cuda/12", "a b"), venv=str(venv), setup=("export ACTIVE",)
    )
    path = tmp_path / "job.sbatch"
    path.write_text(render(batch))
    environ = {
        "PATH": f"{folder}:/usr/bin:/bin",
        "LOADED": str(tmp_path / "loaded"),
        "SLURM_STEP_ID": "0",
        "SLURM_CPU_BIND_LIST": "0x1",
        "SLURM_JOB_ID": "7",
    }
    result = subprocess.run(["bash", path], env=environ, capture_output=True, text=True, timeout=LIMIT_S)
    assert result.stderr == ""
    seen = json.loads(result.stdout)
    assert (tmp_path / "loaded").read_text() == "load cuda/12 a b\n"
    assert (seen["ACTIVE"], seen["SRUN_CPUS_PER_TASK"], seen["SLURM_JOB_ID"]) == ("yes", "3", "7")
    assert not {"SLURM_STEP_ID", "SLURM_CPU_BIND_LIST"} & set(seen)


# -- submitting


@pytest.fixture
def bin_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The first folder on PATH, and no SLURM of this machine behind it: only what the programs here use."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{plain_tools(tmp_path / 'tools')}")
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    return programs(tmp_path / "bin")


def shell(out: str = "", err: str = "", code: int = 0) -> str:
    return f"#!/bin/sh\ncat <<'END'\n{out}\nEND\ncat >&2 <<'END'\n{err}\nEND\nexit {code}\n"


@pytest.mark.parametrize("out", ["42", "42;cluster", "hello from a site wrapper\n42"])
def test_submit_gives_the_id(bin_folder: Path, out: str) -> None:
    programs(bin_folder, sbatch=shell(out))
    assert queue.submit("job.sbatch") == "42"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (shell(err="sbatch: error: no partition\nsbatch: bad", code=1), "no partition; sbatch: bad"),
        (shell(code=3), "sbatch rejected job.sbatch: exit code 3"),
        (shell("Submitted"), "expected a job ID from sbatch, got 'Submitted\\n'"),
    ],
)
def test_submit_passes_on_what_sbatch_says(bin_folder: Path, text: str, words: str) -> None:
    programs(bin_folder, sbatch=text)
    with pytest.raises(SlurmError) as caught:
        queue.submit("job.sbatch")
    assert words in str(caught.value)


def test_submit_without_sbatch(bin_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(bin_folder))
    with pytest.raises(SlurmError, match="sbatch not found on PATH"):
        queue.submit("job.sbatch")


def test_a_job_does_not_inherit_the_one_it_is_submitted_from(
    bin_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs(bin_folder, sbatch=f'#!/bin/sh\nenv >{tmp_path}/env\necho "$2" >{tmp_path}/path\necho 1\n')
    for name in ("SLURM_JOB_ID", "SLURM_CPU_BIND", "SLURM_CONF", "SBATCH_ACCOUNT", "PMIX_RANK"):
        monkeypatch.setenv(name, "x")
    queue.submit("job.sbatch")
    seen = {line.partition("=")[0] for line in (tmp_path / "env").read_text().splitlines()}
    assert {"SLURM_CONF", "SBATCH_ACCOUNT"} <= seen
    assert not {"SLURM_JOB_ID", "SLURM_CPU_BIND", "PMIX_RANK"} & seen
    assert (tmp_path / "path").read_text() == f"{os.getcwd()}/job.sbatch\n"


GONE = shell(err="slurm_load_jobs error: Invalid job id specified", code=1)
SILENT = shell(err="Unable to contact slurm controller", code=1)


@pytest.mark.parametrize(
    ("squeue", "scontrol", "sacct", "state"),
    [
        (shell("RUNNING"), SILENT, SILENT, "RUNNING"),
        (shell("PENDING\nRUNNING"), SILENT, SILENT, "PENDING"),
        (shell(), shell("JobId=7 JobName=x\n   JobState=TIMEOUT Reason=None"), SILENT, "TIMEOUT"),
        (GONE, GONE, shell("CANCELLED by 1000"), "CANCELLED"),
        (GONE, GONE, shell("RUNNING"), "UNKNOWN"),
        (GONE, GONE, SILENT, "UNKNOWN"),
        (SILENT, GONE, shell("FAILED"), "FAILED"),
        (SILENT, shell("   JobState=RUNNING"), SILENT, "RUNNING"),
    ],
)
def test_state(bin_folder: Path, squeue: str, scontrol: str, sacct: str, state: str) -> None:
    programs(bin_folder, squeue=squeue, scontrol=scontrol, sacct=sacct)
    assert queue.state("7") == state


def test_state_when_slurm_is_silent(bin_folder: Path) -> None:
    programs(bin_folder, squeue=SILENT, scontrol=SILENT, sacct=shell("COMPLETED"))
    with pytest.raises(SlurmError, match="squeue: Unable to contact slurm controller"):
        queue.state("7")


def test_find_output(bin_folder: Path) -> None:
    assert shutil.which("scontrol") is None, "not this machine's"
    assert queue.find_output("7") is None
    programs(bin_folder, scontrol=shell("JobId=7 JobName=x\n   StdErr=/e\n   StdOut=/my logs/%x-%j.out"))
    assert queue.find_output("7") == Path("/my logs/x-7.out")


def sequence(folder: Path, output: Path, *steps: str) -> str:
    """A squeue that runs one line of shell a call; the last one again and again."""
    (folder / "steps").write_text("".join(f"{step}\n" for step in steps))
    return (
        f"#!/bin/sh\nprintf x >>{folder}/calls\nn=$(wc -c <{folder}/calls)\n"
        f'[ "$n" -gt {len(steps)} ] && n={len(steps)}\nout={output}\n'
        f'eval "$(sed -n "${{n}}p" {folder}/steps)"\n'
    )


def test_follow_shows_all_output_until_the_end(bin_folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "job.out"
    squeue = sequence(
        tmp_path,
        output,
        "echo PENDING",
        "printf 'one\\ntw' >$out; echo RUNNING",
        "exit 1",
        "echo PREEMPTED",
        "printf 'o\\n' >>$out; echo RUNNING",
        "echo COMPLETED",
        "printf end >>$out; echo COMPLETED",
    )
    programs(bin_folder, squeue=squeue, scontrol=SILENT, sacct=SILENT)
    shown: list[bytes] = []
    assert queue.follow("7", output, shown.append, poll_s=0.001, ask_s=0.002) == "COMPLETED"
    assert b"".join(shown) == b"one\ntwo\nend"


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        ("", "has ended (CANCELLED), and has never started (DependencyNeverSatisfied)"),
        ("(null)", "has ended (CANCELLED), and has never started (DependencyNeverSatisfied)"),
        ("n[1-2]", "has ended (CANCELLED)"),
    ],
)
def test_a_job_that_was_cancelled_while_it_waited_has_never_started(
    bin_folder: Path, nodes: str, said: str
) -> None:
    """SLURM 22.05 gives it a StartTime and no node."""
    job = f"""JobId=3 JobName=wrap
   JobState=CANCELLED Reason=DependencyNeverSatisfied Dependency=afterok:2(failed)
   StartTime=2026-11-29T04:53:20 EndTime=2026-11-29T04:53:20 Deadline=N/A
   ReqNodeList=(null) ExcNodeList=(null)
   NodeList={nodes}
   NumNodes=1"""
    programs(bin_folder, scontrol=shell(job))
    assert queue.describe("3", "CANCELLED") == said


def test_follow_says_why_a_job_waits(bin_folder: Path, tmp_path: Path) -> None:
    squeue = sequence(tmp_path, tmp_path / "none", *["echo PENDING"] * 4, "echo FAILED")
    answers = ("None", "Priority", "Priority", "PartitionTimeLimit")
    lines = "".join(
        f"{number}) echo 'JobState=PENDING Reason={why} Dep';;\n" for number, why in enumerate(answers)
    )
    reasons = f"#!/bin/sh\nn=$(wc -c <{tmp_path}/calls)\ncase $((n-1)) in\n{lines}esac\n"
    programs(bin_folder, squeue=squeue, scontrol=reasons)
    said: list[str] = []
    queue.follow("7", tmp_path / "none", bytes, say=said.append, poll_s=0.001, ask_s=0.002)
    assert said == ["job 7 is pending: Priority", "job 7 is pending: PartitionTimeLimit"]


def test_follow_reads_a_file_that_was_truncated_again(bin_folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "job.out"
    output.write_text("first try")
    squeue = sequence(tmp_path, output, "echo RUNNING", "printf again >$out; echo RUNNING", "echo FAILED")
    programs(bin_folder, squeue=squeue)
    shown: list[bytes] = []
    assert queue.follow("7", output, shown.append, poll_s=0.001, ask_s=0.002) == "FAILED"
    assert b"".join(shown) == b"first tryagain"


def test_follow_gives_up_on_a_silent_slurm(
    bin_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs(bin_folder, squeue=SILENT, scontrol=SILENT)
    monkeypatch.setattr(queue, "PATIENCE_S", 0.02)
    with pytest.raises(SlurmError, match="Unable to contact"):
        queue.follow("7", tmp_path / "none", bytes, poll_s=0.001, ask_s=0.002)


# -- the command


def test_script_prints_and_leaves_the_scripts_options_alone(capfd: pytest.CaptureFixture[str]) -> None:
    command = ["slurm", "script", "--nodes=2", "--gpus_per_node", "8", "--load", "cuda", "--load", "nccl"]
    command += ["--sbatch", "--nice=5", "--zlaunch-args", "--log_ranks 'all'", "dir/train.py", "--nodes", "3"]
    assert main([*command, "-o", "x y"]) == 0
    batch = BatchScript(
        script="dir/train.py",
        script_args=("--nodes", "3", "-o", "x y"),
        zlaunch_args=("--log_ranks", "all"),
        nodes=2,
        gpus_per_node="8",
        modules=("cuda", "nccl"),
        sbatch=("--nice=5",),
        job_name="train",
    )
    assert capfd.readouterr().out == render(batch)


def test_script_writes_a_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.sbatch"
    assert main(["slurm", "script", "-o", str(path), "-J", "x", "train.py", os.fsdecode(b"\xff")]) == 0
    assert path.read_bytes().endswith(b"exec zlaunch train.py '\xff'\n")
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["script"], "no script given"),
        (["submit"], "no script given"),
        (["script", "--time", "soon", "t.py"], "--time 'soon': write it as 90"),
        (["script", "--zlaunch-args", "'", "t.py"], '--zlaunch_args "\'": No closing quotation'),
        (
            ["submit", "--zlaunch_args", "--num_gpuss 1", "t.py"],
            "--zlaunch_args: No such option --num_gpuss. Did you mean --num_gpus?",
        ),
        (["script", "--zlaunch_args", "--help", "t.py"], "--zlaunch_args '--help': starts no run"),
        (["script", "-o", "/no/such/dir/f", "t.py"], "-o /no/such/dir/f: No such file or directory"),
        (["submit", "/no/such/dir/t.py"], "no script '/no/such/dir/t.py'"),
        (["submit", "none.sbatch"], "no file 'none.sbatch'"),
        (["submit", "--follow", "--array=0-1", "t.py"], "--follow works with one job, not with --array"),
    ],
)
def test_user_errors_are_one_line(command: list[str], words: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["slurm", *command]) == 2
    error = capfd.readouterr().err
    assert words in error and error.startswith("zlaunch slurm: error: ") and error.count("\n") == 1


def test_submit_makes_a_file_or_takes_one(
    bin_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    programs(bin_folder, sbatch=f'#!/bin/sh\ncat "$2" >{tmp_path}/seen\nbasename "$2" >&2\necho 42\n')
    train, ready = tmp_path / "train.py", tmp_path / "ready.sbatch"
    train.touch()
    ready.write_text("#!/bin/bash\n")
    assert main(["slurm", "submit", "--nodes", "2", str(train), "--lr", "1"]) == 0
    assert (tmp_path / "seen").read_text().endswith(f"exec zlaunch {train} --lr 1\n")
    assert main(["slurm", "submit", str(ready)]) == 0
    assert (tmp_path / "seen").read_text() == "#!/bin/bash\n"
    assert capfd.readouterr().out == "42\n42\n"
    for command in (["--nodes", "2", str(ready)], [str(ready), "more"]):
        assert main(["slurm", "submit", *command]) == 2
        assert "belong in the file" in capfd.readouterr().err


@pytest.mark.parametrize(("state", "code"), [("COMPLETED", 0), ("FAILED", 1)])
def test_submit_and_follow(
    bin_folder: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    state: str,
    code: int,
) -> None:
    output, ready = tmp_path / "job.out", tmp_path / "ready.sbatch"
    output.write_text("the output\n")
    ready.touch()
    programs(bin_folder, sbatch=shell("42"), squeue=shell(state), scontrol=shell(f"   StdOut={output}"))
    monkeypatch.setattr(queue, "follow", partial(queue.follow, poll_s=0.001, ask_s=0.002))
    assert main(["slurm", "submit", "--follow", str(ready)]) == code
    captured = capfd.readouterr()
    assert captured.out == "42\nthe output\n"
    assert f"following {output}" in captured.err and f"job 42: {state}" in captured.err


def test_what_slurm_could_not_start_is_explained(
    bin_folder: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ready = tmp_path / "ready.sbatch"
    ready.touch()
    job = "   JobState=FAILED Reason=JobLaunchFailure\n   WorkDir=/home/me/here\n   StdOut=/nowhere/out"
    programs(bin_folder, sbatch=shell("42"), squeue=shell("FAILED"), scontrol=shell(job))
    monkeypatch.setattr(queue, "follow", partial(queue.follow, poll_s=0.001, ask_s=0.002))
    assert main(["slurm", "submit", "--follow", str(ready)]) == 1
    said = capfd.readouterr().err
    assert "job 42: FAILED (JobLaunchFailure): does the folder /home/me/here exist on the nodes" in said


@pytest.mark.parametrize("command", ["slurm submit", "submit --queue slurm"])
def test_a_job_that_sbatch_refuses_is_explained_before(
    bin_folder: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    Path("train.py").touch()
    sinfo = "#!/bin/sh\ncase $* in *%c*) echo 'all*|16|gpu:2';; *%D*) echo 'all*|3';; *) echo gpu:2;; esac\n"
    programs(bin_folder, sbatch=shell("", "not available", 1), sinfo=sinfo)
    assert main([*command.split(), "--num_gpus", "8", "train.py"]) == 2
    *_, warning, _, error = capfd.readouterr().err.splitlines()
    assert warning.endswith("no node of the default partition has that many GPUs; the maximum is 2")
    assert error.endswith("error: sbatch rejected the job of train.py: not available")


@pytest.mark.parametrize("is_known", [True, False])
def test_a_job_after_another_ends_with_it_and_needs_one_that_slurm_knows(
    bin_folder: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    is_known: bool,
) -> None:
    """SLURM would start a job after an unknown one at once, and keep one after a failed one for ever."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    Path("train.py").touch()
    sbatch = "#!/bin/sh\nfor file; do :; done\ncat $file >job.txt\necho 43\n"
    answers = (
        {"squeue": shell("RUNNING")} if is_known else dict.fromkeys(("squeue", "scontrol", "sacct"), GONE)
    )
    programs(bin_folder, sbatch=sbatch, sinfo=shell("gpu:2"), **answers)
    code = main(["submit", "--queue", "slurm", "--after", "42", "--num_gpus", "1", "train.py"])
    if is_known:
        text = Path("job.txt").read_text()
        assert code == 0 and "#SBATCH --dependency=afterok:42\n#SBATCH --kill-on-invalid-dep=yes\n" in text
    else:
        assert code == 2 and "--after 42: SLURM does not know this job" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("state", "run", "limit", "cancelled"),
    [
        ("RUNNING", "00:00:10", "00:01:00", False),
        ("COMPLETING", "00:00:10", "00:01:00", True),
        ("CANCELLED", "1-00:00:10", "UNLIMITED", True),
        ("COMPLETING", "2-00:00:30", "2-00:00:00", False),
        ("TIMEOUT", "00:01:00", "00:01:00", False),
    ],
)
def test_who_cancels_a_job_does_not_want_it_back(state: str, run: str, limit: str, cancelled: bool) -> None:
    text = f"JobId=1 JobName=x\n   JobState={state} Reason=None\n   RunTime={run} TimeLimit={limit}\n"
    assert was_cancelled(text) == cancelled


@pytest.mark.parametrize(
    ("restarts", "own", "restarted"), [(0, None, False), (1, None, True), (2, "2", False), (3, "2", True)]
)
def test_slurm_itself_has_requeued_a_job(restarts: int, own: str | None, restarted: bool) -> None:
    text = f"JobId=1 JobName=x\n   JobState=COMPLETING\n   Requeue=1 Restarts={restarts} BatchFlag=1\n"
    environ = {} if own is None else {"SLURM_RESTART_COUNT": own}
    assert has_restarted(text, environ) == restarted


SINFO = "cpu*|16|(null)\ngpu|64+|gpu:a100:8(S:0-1),nic:1\ngpu|32|gpu:4\nbig|128|gpu:8"


@pytest.mark.parametrize(
    ("partition", "gpus", "cores"),
    [
        ("gpu", 8, 64),
        ("gpu", "a100:4", 32),
        ("gpu", 2, 16),
        ("big", 1, 16),
        (None, 2, None),
        ("gpu", 9, None),
    ],
)
def test_a_job_gets_its_gpus_share_of_a_nodes_cores(
    partition: str | None, gpus: int | str, cores: int | None
) -> None:
    """As sinfo tells: without an option it lists all partitions, and the default one has an asterisk."""
    lines = [line for line in SINFO.splitlines() if partition in (None, line.partition("|")[0])]
    sizes = read_node_sizes("\n".join(lines), default_only=partition is None)
    assert cores_of(gpus, sizes) == cores


def test_the_file_asks_for_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "bin" / "sinfo"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 'gpu*|64|gpu:8'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.py").touch()
    line = ["slurm", "script", "--num_gpus", "2", "t.py"]
    assert main(line) == 0
    shown = capfd.readouterr()
    assert "#SBATCH --cpus-per-task=16\n" in shown.out and shown.err == ""
    assert "SRUN_CPUS_PER_TASK" in shown.out, "srun has to be told as well"
    program.write_text("#!/bin/sh\nexit 1\n")
    assert main(line) == 0
    shown = capfd.readouterr()
    assert "cpus-per-task" not in shown.out
    assert shown.err.startswith("zlaunch: warning: SLURM may give each node a single CPU core.")
    assert "--cpus_per_task N" in shown.err and "#SBATCH --cpus-per-task=N" in shown.err


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        ("train.py", ""),
        ("no/train.py", "no file 'no/train.py' on this machine"),
        ("--zlaunch_args --module pkg.train", ""),
        ("--venv env train.py", ""),
        ("--venv none train.py", "--venv none: no bin/activate there"),
        ("--signal USR1@120 --time 2 train.py", "--signal USR1@120 and --time 2: the job gets the signal"),
        ("--signal USR1@119 --time 2 train.py", ""),
        ("--signal USR1 --time 1 train.py", "--signal USR1 and --time 1"),
        ("--signal USR1@120 --time infinite train.py", ""),
        ("--num_gpus 4 train.py", "--num_gpus 4: no node of the default partition has that many GPUs"),
        ("--num_gpus a100:3 --partition x train.py", "--num_gpus a100:3: no node of partition x has"),
        ("--num_nodes 3 train.py", ""),
        ("--num_nodes 4 train.py", "--num_nodes 4: the default partition has fewer nodes; the maximum is 3"),
        ("-N 9 --partition x train.py", "--num_nodes 9: partition x has fewer nodes; the maximum is 8"),
        ("-N 9 --partition x,gpus train.py", "--partition gpus: this cluster has x"),
    ],
)
def test_what_is_probably_a_mistake_is_a_warning(
    options: str,
    warned: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "env" / "bin").mkdir(parents=True)
    (tmp_path / "env" / "bin" / "activate").touch()
    gpus = () if "num_gpus" in options else ("--num_gpus", "2")
    monkeypatch.setattr(queue, "node_sizes", lambda partition: [(64, 2), (64, 0)])
    lines = ["x|8"] if "--partition" in options else ["gpu*|2", "x|5", "gpu*|1"]
    counts = "\n".join(lines)
    names = "\n".join(line.partition("|")[0] for line in lines)
    sinfo = f'#!/bin/sh\ncase "$*" in *%D*) echo "{counts}";; *) echo "{names}";; esac\n'
    program = programs(tmp_path / "bin", sinfo=sinfo)
    monkeypatch.setenv("PATH", f"{program}:{os.environ['PATH']}")
    assert main(["slurm", "script", "-c", "8", *gpus, *options.split()]) == 0
    shown = capfd.readouterr()
    assert shown.out.startswith("#!/bin/bash")
    assert shown.err.startswith(f"zlaunch: warning: {warned}") if warned else not shown.err


def test_the_folder_of_the_output_is_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    line = ["slurm", "script", "-c", "8", "--output"]
    assert main([*line, "logs/%x/%x-%j.out", "dir/train.py"]) == 0
    assert (tmp_path / "logs" / "train").is_dir()
    assert main([*line, "%x-%j.out", "train.py"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logs"]
    capfd.readouterr()
    assert main([*line, "logs/%j/out", "train.py"]) == 2
    assert capfd.readouterr().err.startswith(
        "zlaunch slurm: error: --output logs/%j/out: SLURM does not create folders"
    )


def test_a_job_without_gpus_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    for options, is_told in (((), True), (("--sbatch=--gres=gpu:2",), False)):
        assert main(["slurm", "script", "-c", "8", *options, "train.py"]) == 0
        assert ("the job asks for no GPU" in capfd.readouterr().err) == is_told
