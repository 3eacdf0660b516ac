"""What a terminal, a shell or a host may do to a launch, and what it says then."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.helpers import ROOT, Launch, alive, run
from tests.limits import LIMIT_S, wait_until

PATH = {**os.environ, "PYTHONPATH": str(ROOT)}


def zlaunch(folder: Path, *args: str, **more: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "zlaunch", *args]
    options = {"cwd": folder, "env": PATH, "capture_output": True, "text": True, "timeout": LIMIT_S} | more
    return subprocess.run(command, **options)  # type: ignore[call-overload, no-any-return]  # options vary


@pytest.mark.parametrize("torch", ["", "import torch"])
def test_rank_0_reads_what_is_typed(tmp_path: Path, torch: str) -> None:
    (tmp_path / "w.py").write_text(
        f"import os, sys\n{torch}\nprint(os.environ['RANK'], 'read', repr(sys.stdin.readline()))\n"
    )
    done = zlaunch(tmp_path, "--num_gpus=2", "--log_ranks=all", "w.py", input="typed\n")
    assert sorted(done.stdout.splitlines()) == [
        "[rank 0] 0 read 'typed\\n'",
        "[rank 1] 1 read ''",
    ], done.stderr


def test_a_debugger_in_rank_0(tmp_path: Path) -> None:
    (tmp_path / "w.py").write_text("answer = 41\nbreakpoint()\nprint('answer', answer)\n")
    done = zlaunch(tmp_path, "-q", "w.py", input="answer = 42\nc\n")
    assert done.returncode == 0 and "answer 42" in done.stdout, done.stdout + done.stderr


def test_a_launcher_in_the_background_of_a_terminal_leaves_it_alone(tmp_path: Path) -> None:
    """Rank 0 would take what is typed for the shell."""
    (tmp_path / "w.py").write_text("import sys\nopen('read', 'w').write(repr(sys.stdin.readline()))\n")
    # The shell of a terminal, with job control: the launch is in the background.
    shell = f"set -m; {sys.executable} -m zlaunch -q w.py & wait"
    controller, terminal = pty.openpty()
    process = subprocess.Popen(
        ["bash", "-c", f"exec 0<>$(tty); {shell}"],
        cwd=tmp_path,
        env=PATH,
        stdin=terminal,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=_own_terminal,
        start_new_session=True,
    )
    os.close(terminal)
    os.write(controller, b"for the shell\n")
    assert process.wait(LIMIT_S) == 0
    os.close(controller)
    assert (tmp_path / "read").read_text() == "''"


def _own_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def test_what_is_no_script_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("#!/bin/bash\necho\n")
    for name in ("/bin/true", "run.sh"):
        done = zlaunch(tmp_path, name)
        assert done.returncode == 2 and "--no_python" in done.stderr and "Traceback" not in done.stderr


def test_a_deleted_folder(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    command = f"rmdir ../gone && exec {sys.executable} -P -m zlaunch x.py"
    if sys.version_info < (3, 11):
        command = command.replace(" -P", "")
    done = subprocess.run(
        ["sh", "-c", command], cwd=gone, env=PATH, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 2 and "current folder" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("stdout", [">&-", ">/dev/full", "<&-"])
def test_a_run_outlives_its_output(tmp_path: Path, stdout: str) -> None:
    (tmp_path / "w.py").write_text("print('x' * 100000, flush=True)\nopen('done', 'w').close()\n")
    command = f"exec {sys.executable} -m zlaunch --run_dir=run w.py {stdout}"
    done = subprocess.run(
        ["sh", "-c", command], cwd=tmp_path, env=PATH, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0 and (tmp_path / "done").exists(), done.stderr
    assert len((tmp_path / "run/logs/rank_00000.log").read_text()) == 100001
    assert "Traceback" not in done.stderr


def test_few_open_files_are_enough_or_named(tmp_path: Path) -> None:
    (tmp_path / "w.py").write_text("")
    for limit, code in ((128, 0), (24, 1)):
        command = f"ulimit -n {limit}; exec {sys.executable} -m zlaunch --num_gpus=8 w.py"
        done = subprocess.run(
            ["sh", "-c", command], cwd=tmp_path, env=PATH, capture_output=True, text=True, timeout=LIMIT_S
        )
        assert done.returncode == code and "Traceback" not in done.stderr, done.stderr
        assert ("ulimit -n, is 24" in done.stderr) == bool(code)


@pytest.mark.parametrize("command", ["-m zlaunch", "-c 'from zlaunch.__main__ import main; main()'"])
def test_ctrl_c_at_any_moment_of_the_start_is_quiet(tmp_path: Path, command: str) -> None:
    (tmp_path / "w.py").write_text("import time; time.sleep(600)")
    for delay_s in (0.03, 0.06, 0.1, 0.15, 0.2, 0.3, 0.5, 0.8):
        process = subprocess.Popen(
            f"exec {sys.executable} -X importtime {command} w.py 2>err".replace(" -X importtime", ""),
            shell=True,
            cwd=tmp_path,
            env=PATH,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        time.sleep(delay_s)
        process.send_signal(signal.SIGINT)
        process.wait(LIMIT_S)
        said = (tmp_path / "err").read_text()
        ours = [line for line in said.splitlines() if "zlaunch/" in line and "File" in line]
        assert not ours, said


def test_a_peer_that_has_gone_is_one_line_and_the_cause_stands_once(tmp_path: Path) -> None:
    script = """
        import os, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        if os.environ["RANK"] == "1":
            raise ValueError("the cause")
        dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(1))
    """
    launch = run(tmp_path, "--num_gpus=2", script=script)
    assert launch.process.returncode == 1
    assert launch.err.count("ValueError: the cause") == 1, launch.err
    assert launch.err.count("Traceback") == 1, launch.err
    assert "rank 1 on localhost failed first" in launch.err


def test_the_report_shows_a_progress_bar_once(tmp_path: Path) -> None:
    script = """
        import os, sys
        for i in range(100): print(f"\\rstep {i}", end="", flush=True)
        print(flush=True)
        if os.environ["RANK"] == "1": sys.exit(3)
    """
    launch = run(tmp_path, "--num_gpus=2", script=script)
    assert launch.process.returncode == 3
    assert "| step 99" in launch.err and "step 98" not in launch.err


def test_secrets_are_not_written_down(tmp_path: Path) -> None:
    script = "import os\nprint(os.environ['WANDB_API_KEY'], os.environ['TOKENIZERS_PARALLELISM'])"
    options = ("--env=WANDB_API_KEY=abc123", "--env=HF_TOKEN=hf_456", "--env=TOKENIZERS_PARALLELISM=false")
    launch = run(tmp_path, *options, script=script)
    assert launch.out == "abc123 false\n"
    plan = launch.run_dir / "plan.json"
    text = "".join(
        p.read_text() for p in launch.run_dir.rglob("*") if p.is_file() and p.parent.name != "logs"
    )
    assert "abc123" not in text and "hf_456" not in text
    assert '"TOKENIZERS_PARALLELISM": "false"' in plan.read_text()
    assert plan.stat().st_mode & 0o777 == 0o600
    shown = zlaunch(tmp_path, "--dry_run", "--json", *options, "worker.py").stdout
    assert "WANDB_API_KEY" in shown and "abc123" not in shown


def test_a_slow_start_says_what_it_waits_for(tmp_path: Path) -> None:
    from tests.e2e.test_preload import _broken_torch

    env = _broken_torch(tmp_path, "time.sleep(600)")
    launch = Launch(tmp_path, "--num_gpus=2", script="import torch", env=env)
    wait_until(lambda: "waiting for torch on localhost" in launch.err, lambda: launch.err)
    run_id = launch.run_id
    launch.process.send_signal(signal.SIGINT)
    assert launch.wait() == 130
    wait_until(lambda: not alive(run_id), "nothing is left")


def test_pods_train_together(tmp_path: Path) -> None:
    """Two launchers with PyTorchJob's variables, as two pods would have them."""
    from zlaunch.cli.checks import pick_port

    port = str(pick_port(0))
    script = """
        import os, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        x = torch.ones(1)
        dist.all_reduce(x)
        print("sum", int(x), "of", os.environ["RANK"])
    """
    launches = []
    for rank in "01":
        folder = tmp_path / rank
        folder.mkdir()
        pod = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        launches.append(
            Launch(folder, "--num_gpus=2", script=script, env={**pod, "GLOO_SOCKET_IFNAME": "lo"})
        )
    assert [launch.wait() for launch in launches] == [0, 0], launches[0].err + launches[1].err
    assert [launch.log(rank) for launch, rank in zip(launches, (0, 2), strict=True)] == [
        "sum 4 of 0\n",
        "sum 4 of 2\n",
    ]


def test_a_full_disk_under_the_logs_is_told_once(tmp_path: Path) -> None:
    logs = tmp_path / "run" / "logs"
    logs.mkdir(parents=True)
    (logs / "rank_00000.log").symlink_to("/dev/full")
    script = "for i in range(50): print('x' * 10000, flush=True)"
    launch = run(tmp_path, script=script)
    assert launch.process.returncode == 0 and len(launch.out) == 50 * 10001
    assert launch.err.count("cannot write") == 1 and "the run goes on" in launch.err, launch.err
