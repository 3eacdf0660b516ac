"""Test what a terminal, a shell or a host may do to a launch, and what it says then."""

from __future__ import annotations

import os
import pty
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.helpers import ROOT, Launch, alive, run
from tests.limits import LIMIT_S, wait_until
from tests.ports import reserved_port
from zlaunch.supervisor import run_folder

PATH = {**os.environ, "PYTHONPATH": str(ROOT)}


def zlaunch(folder: Path, *args: str, **more: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "zlaunch", *args]
    options = {"cwd": folder, "env": PATH, "capture_output": True, "text": True, "timeout": LIMIT_S} | more
    return subprocess.run(command, **options)  # type: ignore[call-overload]  # options vary


@pytest.mark.sampled(1)
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


@pytest.mark.rotated
def test_few_open_files_are_enough_or_named(tmp_path: Path) -> None:
    (tmp_path / "w.py").write_text("")
    for limit, code in ((128, 0), (24, 1)):
        command = f"ulimit -n {limit}; exec {sys.executable} -m zlaunch --num_gpus=8 w.py"
        done = subprocess.run(
            ["sh", "-c", command], cwd=tmp_path, env=PATH, capture_output=True, text=True, timeout=LIMIT_S
        )
        assert done.returncode == code and "Traceback" not in done.stderr, done.stderr
        assert ("ulimit -n, is 24" in done.stderr) == bool(code)


@pytest.mark.rotated
@pytest.mark.sampled(1)
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
        # The few lines before the handler is set can be met in the middle of `import signal`.
        first = ("zlaunch/__init__.py", "zlaunch/__main__.py")
        ours = [line for line in said.splitlines() if "zlaunch/" in line and "File" in line]
        ours = [line for line in ours if not any(name in line for name in first)]
        assert not ours, said


def test_a_ctrl_c_while_a_class_is_made_is_quiet(tmp_path: Path) -> None:
    """Before Python 3.12, the KeyboardInterrupt becomes the cause of a RuntimeError."""
    command = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)  # as in zlaunch/__main__.py
import zlaunch.cli.main as cli
class Field:
    def __set_name__(self, owner, name): signal.raise_signal(signal.SIGINT)
cli._check_folder = lambda: type("Owner", (), {"field": Field()})
raise SystemExit(cli.main(["--num_gpus=1", "w.py"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", command],
        cwd=tmp_path,
        env=PATH,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 130 and not done.stderr, done.stderr


def test_a_ctrl_c_that_a_finalizer_has_swallowed_ends_the_launch(tmp_path: Path) -> None:
    (tmp_path / "w.py").write_text("import time; time.sleep(600)")
    command = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)  # as in zlaunch/__main__.py
import zlaunch.cli.main as cli
class Finalized:
    def __del__(self): signal.raise_signal(signal.SIGINT)
cli._check_folder = lambda: ([Finalized()].clear(), print("it went on", file=sys.stderr))
raise SystemExit(cli.main(["--num_gpus=1", "w.py"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", command],
        cwd=tmp_path,
        env=PATH,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 130 and "stopped by SIGINT" in done.stderr, done.stderr
    assert "it went on" in done.stderr and "Traceback" not in done.stderr, done.stderr


@pytest.mark.exhaustive
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
    arguments = ("--api_key=QUJDREVG==", "--password", "two_words", "cfg.api_key=SEK8==", "http://bob:pw1@h/")
    launch = run(tmp_path, *options, script=script, args=arguments)
    assert launch.out == "abc123 false\n"
    plan = launch.run_dir / "plan.json"
    text = "".join(
        p.read_text(errors="replace")
        for p in launch.run_dir.rglob("*")
        if p.is_file() and p.parent.name != "logs"
    )
    for secret in ("abc123", "hf_456", "QUJDREVG", "two_words", "SEK8", "pw1"):
        assert secret not in text
    assert '"TOKENIZERS_PARALLELISM": "false"' in plan.read_text()
    assert plan.stat().st_mode & 0o777 == 0o600
    shown = zlaunch(tmp_path, "--dry_run", "--json", *options, "worker.py").stdout
    assert "WANDB_API_KEY" in shown and "abc123" not in shown


@pytest.mark.exhaustive
def test_a_slow_start_says_what_it_waits_for(tmp_path: Path) -> None:
    from tests.e2e.test_preload import _broken_torch

    env = _broken_torch(tmp_path, "time.sleep(600)")
    launch = Launch(tmp_path, "--num_gpus=2", script="import torch", env=env)
    wait_until(lambda: "waiting for torch on localhost" in launch.err, lambda: launch.err)
    run_id = launch.run_id
    launch.process.send_signal(signal.SIGINT)
    assert launch.wait() == 130
    wait_until(lambda: not alive(run_id), "nothing is left")


@pytest.mark.exhaustive
def test_pods_train_together(tmp_path: Path) -> None:
    """Two launchers with PyTorchJob's variables, as two pods would have them."""
    script = """
        import os, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        x = torch.ones(1)
        dist.all_reduce(x)
        print("sum", int(x), "of", os.environ["RANK"])
    """
    launches = []
    (tmp_path / "shared").mkdir()
    with reserved_port() as port:
        common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        common["GLOO_SOCKET_IFNAME"] = "lo"
        for rank in "01":
            folder = tmp_path / rank
            folder.mkdir()
            (folder / "run").symlink_to(tmp_path / "shared")  # as of pods with one volume
            launches.append(Launch(folder, "--num_gpus=2", script=script, env={**common, "RANK": rank}))
        assert [launch.wait() for launch in launches] == [0, 0], launches[0].err + launches[1].err
    assert [launch.log(rank) for launch, rank in zip(launches, (0, 2), strict=True)] == [
        "sum 4 of 0\n",
        "sum 4 of 2\n",
    ]


def test_a_full_disk_under_the_logs_is_told_once(tmp_path: Path) -> None:
    script = "for i in range(50): print('x' * 10000, flush=True)"
    limited = 'set -o pipefail; prlimit --fsize=100000 "$@" | cat'
    launch = run(tmp_path, script=script, prefix=("bash", "-c", limited, "bash"))
    assert launch.process.returncode == 0 and len(launch.out) == 50 * 10001
    assert launch.err.count("cannot write") == 1 and "the run goes on" in launch.err, launch.err


@pytest.mark.exhaustive
def test_two_launches_into_one_folder(tmp_path: Path) -> None:
    (tmp_path / "w.py").write_text("import time; time.sleep(3)")
    command = [sys.executable, "-m", "zlaunch", "-q", "--run_dir=run", "w.py"]
    both = [subprocess.Popen(command, cwd=tmp_path, env=PATH, stderr=subprocess.PIPE) for _ in range(2)]
    said = [process.communicate(timeout=LIMIT_S)[1] for process in both]
    assert sorted(process.returncode for process in both) == [0, 2], said
    assert any(b"--run_dir" in text for text in said)


def test_a_code_of_75_means_nothing_where_nobody_asked_to_save(tmp_path: Path) -> None:
    script = """
        import os, sys, time
        if os.environ["RANK"] == "1": sys.exit(75)
        time.sleep(600)
    """
    launch = run(tmp_path, "--num_gpus=2", "--grace=0.5", script=script)
    assert launch.process.returncode == 75
    assert "rank 1 on localhost failed first: it exited with code 75" in launch.err


def test_the_cause_may_be_slow_to_die(tmp_path: Path) -> None:
    """Rank 1 raises and uploads its logs; meanwhile rank 0 is aborted, as NCCL's watchdog does."""
    script = """
        import atexit, os, time
        if os.environ["RANK"] == "1":
            atexit.register(time.sleep, 0.6)
            raise ValueError("the real cause")
        time.sleep(0.5)
        while not os.path.exists("raised"): time.sleep(0.01)
        time.sleep(0.2)
        os.abort()
    """.replace("raise ValueError", 'open("raised", "w").close(); raise ValueError')
    launch = run(tmp_path, "--num_gpus=2", "-q", script=script)
    assert launch.process.returncode == 1 and "ValueError: the real cause" in launch.err, launch.err
    assert "rank 1 on localhost failed first" in launch.err


def test_a_host_file_without_slots_whose_host_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "w.py").write_text("")
    (tmp_path / "hosts").write_text("nohost.invalid\n")
    for launcher in ("ssh", "openssh"):
        done = zlaunch(tmp_path, f"--launcher={launcher}", "--hostfile=hosts", "w.py")
        assert done.returncode == 2 and "nohost.invalid: " in done.stderr, done.stderr
        assert "filter" not in done.stderr


@pytest.mark.exhaustive
def test_a_master_that_has_no_address(tmp_path: Path) -> None:
    (tmp_path / "w.py").write_text("")
    pod = {**PATH, "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "nohost.invalid"}
    done = zlaunch(tmp_path, "--connect_timeout=6", "w.py", env=pod)
    assert done.returncode == 2 and "nohost.invalid has no address" in done.stderr, done.stderr
    assert "waiting for an address of nohost.invalid" in done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--log_ranks=0-99999999999",), "not a range of ranks"),
        (("--log_ranks=1-0",), "not a range of ranks"),
        (("--bind_core_list=0-99999999999",), "that many cores"),
        (("--config", "ds.json"), "put it after the script"),
        (("--master_addr=",), "--master_addr is empty"),
        (("--hostfile=nothere",), "hostfile nothere: No such file"),
    ],
)
def test_options_that_cannot_be_meant(tmp_path: Path, options: tuple[str, ...], words: str) -> None:
    (tmp_path / "w.py").write_text("")
    done = zlaunch(tmp_path, *options, "w.py")
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_a_full_disk_under_a_new_run(tmp_path: Path) -> None:
    """The size limit of a file stands for the disk: an empty file can be made in both cases."""
    (tmp_path / "w.py").write_text("")
    command = f"trap '' XFSZ; ulimit -f 1; exec {sys.executable} -m zlaunch w.py"
    done = subprocess.run(
        ["sh", "-c", command], cwd=tmp_path, env=PATH, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 2 and "cannot write there" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_records_that_somebody_has_written_into(tmp_path: Path) -> None:
    run(tmp_path, script="pass")
    good = (tmp_path / "run" / "launcher.json").read_text()
    bad = [
        good.replace('"started": ', '"started": "yesterday", "x": '),
        "[" * 100_000,
        good.replace('"hosts": [', '"hosts": [1, '),
        "{}",
    ]
    for number, text in enumerate(bad):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "launcher.json").write_text(text)
    (tmp_path / "fifo").mkdir()
    os.mkfifo(tmp_path / "fifo" / "launcher.json")
    with open(tmp_path / "run" / "events.jsonl", "a") as events:
        events.write('{"type":"spawn"}\n{"type":"exit","rank":0}\n{"type":"spawn","rank":[1]}\n')
    for arguments in (("ps", "-a", "."), ("ps", "run")):
        done = zlaunch(tmp_path, *arguments)
        assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr


def test_names_that_fit_no_encoding_are_shown(tmp_path: Path) -> None:
    (tmp_path / "w.py").write_text("")
    environ = {**PATH, "PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    done = zlaunch(tmp_path, "--dry_run", "w.py", "\u2603 \udcff", env=environ)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr


def test_a_reset_download_is_the_scripts_own_error(tmp_path: Path) -> None:
    launch = run(tmp_path, script="raise ConnectionResetError(104, 'Connection reset by peer')")
    assert launch.process.returncode == 1
    assert "lost another rank" not in launch.err and "worker.py" in launch.log(0)


@pytest.mark.exhaustive
def test_a_rank_that_ended_too_early_is_named(tmp_path: Path) -> None:
    script = """
        import sys, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        if dist.get_rank() == 1:
            sys.exit(0)
        for _ in range(3):
            dist.all_reduce(torch.ones(1))
    """
    launch = run(tmp_path, "--num_gpus=2", script=script)
    assert launch.process.returncode == 1
    told = launch.err[launch.err.index("zlaunch: rank 1 on localhost ended with exit code 0") :]
    lead, next_line = told.splitlines()[:2]
    assert lead.endswith("while others still ran: the script returned early on this rank")
    assert next_line == "  rank 0 on localhost failed after that: it exited with code 1"
    assert "dist.all_reduce" in told


def test_what_a_script_leaves_running_is_said(tmp_path: Path) -> None:
    launch = run(tmp_path, script="import subprocess; subprocess.Popen(['sleep', '300'])")
    assert launch.process.returncode == 0
    assert "localhost: ended 1 process that the script had left running" in launch.err


def test_signals_between_attempts(tmp_path: Path) -> None:
    """They come at any time of many short attempts; one that ends the run is written down."""
    launch = Launch(tmp_path, "--max_restarts=100000", script="raise SystemExit(7)")
    wait_until(lambda: "restart 1 of" in launch.err, lambda: launch.err)
    for count in range(60):
        launch.process.send_signal(signal.SIGUSR2)
        time.sleep(0.005 * (count % 7))
    assert launch.process.poll() is None, launch.err
    launch.process.send_signal(signal.SIGTERM)
    assert launch.wait() == 143
    assert "stopped by SIGTERM" in launch.err and "Traceback" not in launch.err
    assert run_folder.read(launch.run_dir).exit_code == 143  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["ds.json"], "is a config, not a script"),
        (["/dev/stdin"], "can be read only once"),
        (["--run_dir", "", "ds.json"], "--run_dir is empty"),
        (["x" * 300], "File name too long"),
    ],
)
def test_what_is_no_script(tmp_path: Path, words: list[str], answer: str) -> None:
    (tmp_path / "ds.json").write_text("{}")
    done = zlaunch(tmp_path, *words, input="pass")
    assert done.returncode == 2 and answer in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_what_is_asked_for_and_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text("print('hi')")
    done = zlaunch(tmp_path, "--workdir", str(tmp_path / "no"), "t.py")
    assert done.returncode == 2 and "no: there is no such folder" in done.stderr
    done = zlaunch(tmp_path, "--num_gpus", "1", "t.py", env={**PATH, "ZLAUNCH_COMPAT": "foo"})
    assert done.returncode == 2 and "ZLAUNCH_COMPAT=foo: expected auto, deepspeed, none" in done.stderr
    done = zlaunch(tmp_path, "config")
    assert done.returncode == 2 and done.stderr.startswith("Usage: zlaunch config")


@pytest.mark.exhaustive
def test_a_limit_of_cpu_time_is_named(tmp_path: Path) -> None:
    """The kernel ends what has used it up with SIGKILL, as others do."""
    (tmp_path / "t.py").write_text("while True: pass")
    limit = lambda: resource.setrlimit(resource.RLIMIT_CPU, (2, 2))  # noqa: E731
    done = zlaunch(tmp_path, "--num_gpus", "1", "t.py", preexec_fn=limit)
    assert done.returncode == 137 and "or the CPU time limit of 2 s: ulimit -t" in done.stderr
