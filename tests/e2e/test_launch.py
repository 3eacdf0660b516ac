"""Test the command with real workers (without torch, so that they are fast)."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.e2e.helpers import ROOT, Launch, alive, run
from tests.limits import LIMIT_S, wait_until

DUMP = """
    import json, os, sys
    print(json.dumps({"argv": sys.argv, "env": dict(os.environ), "path": sys.path[0],
                      "stdin": sys.stdin.read(), "name": __name__, "file": __file__, "sid": os.getsid(0)}))
"""


def test_workers_get_their_place(tmp_path: Path) -> None:
    launch = run(tmp_path, "--num_gpus", "2", "--master_addr", "localhost", script=DUMP, env={"RANK": "7"})
    assert launch.process.returncode == 0, launch.err
    dumps = [json.loads(launch.log(rank)) for rank in (0, 1)]
    for rank, dump in enumerate(dumps):
        env = dump["env"]
        expected = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": 2,
            "LOCAL_WORLD_SIZE": 2,
            "LOCAL_SIZE": 2,
            "CROSS_RANK": 0,
            "CROSS_SIZE": 1,
            "MASTER_ADDR": "localhost",
            "OMP_NUM_THREADS": max(1, len(os.sched_getaffinity(0)) // 2),
            "PYTHONUNBUFFERED": 1,
            "ZLAUNCH_RUN_ID": launch.run_id,
            "ZLAUNCH_RUN_DIR": launch.run_dir,
            "GLOO_SOCKET_IFNAME": "lo",
        }
        assert {key: env.get(key) for key in expected} == {k: str(v) for k, v in expected.items()}
        assert dump["argv"] == ["worker.py"]
        assert (dump["path"], dump["stdin"], dump["name"]) == (str(tmp_path), "", "__main__")
        assert dump["file"] == str(tmp_path / "worker.py")
    assert dumps[0]["sid"] != dumps[1]["sid"]
    port = dumps[0]["env"]["MASTER_PORT"]
    assert port == dumps[1]["env"]["MASTER_PORT"]
    assert json.loads(launch.out) == dumps[0], "the console shows rank 0"
    assert sorted(path.name for path in (launch.run_dir / "logs").iterdir()) == [
        ".times",
        "rank_00000.log",
        "rank_00001.log",
    ]


@pytest.mark.parametrize("interpreter_flags", [[], ["--module"]], ids=["script", "module"])
def test_arguments_arrive_untouched(tmp_path: Path, interpreter_flags: list[str]) -> None:
    args = ("a b", "", "--num_gpus", "--", "'q\"$HOME`x`", "line\nline", "ünï ✓", "-q", "--help", "*")
    if interpreter_flags:
        (tmp_path / "pkg").mkdir()
        (tmp_path / "pkg" / "__init__.py").touch()
        (tmp_path / "pkg" / "mod.py").write_text(
            "import sys, json; print(json.dumps([__name__, sys.argv[1:]]))"
        )
        options = ("--no-local-rank", "--module", "pkg.mod", *args)
        launch = run(tmp_path, *options)
        assert json.loads(launch.out) == ["__main__", list(args)], launch.err
    else:
        launch = run(tmp_path, "--no-local-rank", script=DUMP, args=args)
        assert json.loads(launch.out)["argv"] == ["worker.py", *args], launch.err


def test_no_python_runs_anything(tmp_path: Path) -> None:
    options = ("--num_gpus=2", "--log_ranks=all", "--no_python", "sh", "-c", 'echo "$0-$RANK"; exit 0', "a b")
    launch = run(tmp_path, *options)
    assert sorted(launch.out.splitlines()) == ["[rank 0] a b-0", "[rank 1] a b-1"], launch.err


def test_bytes_survive_to_console_and_log(tmp_path: Path) -> None:
    script = """
        import os
        os.write(1, bytes(range(256)) * 3000)
        for number in range(2000):
            os.write(1, b"%d " % number)
        os.write(1, b'\\n{"type":"done","stays":false}\\n{"type":"output","bytes":9}\\nno newline')
    """
    launch = run(tmp_path, script=script)
    expected = bytes(range(256)) * 3000 + b"".join(b"%d " % number for number in range(2000))
    expected += b'\n{"type":"done","stays":false}\n{"type":"output","bytes":9}\nno newline'
    assert launch.log_bytes(0) == expected
    assert launch.out_path.read_bytes() == expected


def test_dry_run_prints_the_plan_and_starts_nothing(tmp_path: Path) -> None:
    launch = run(
        tmp_path, "--dry_run", "--json", "--master_port=29517", "--num_accelerators", "2", "--grace=1.5",
        script="raise SystemExit(9)", args=("--x", "1"),
    )  # fmt: skip
    assert launch.process.returncode == 0, launch.err
    plan = json.loads(launch.out)
    assert not launch.run_dir.exists()
    assert {key: plan[key] for key in ("master_addr", "master_port", "run_dir", "cwd", "grace_s")} == {
        "master_addr": "127.0.0.1",
        "master_port": 29517,
        "run_dir": str(launch.run_dir),
        "cwd": str(tmp_path),
        "grace_s": 1.5,
    }
    [node] = plan["nodes"]
    assert (node["host"], [worker["rank"] for worker in node["workers"]]) == ("localhost", [0, 1])
    assert node["workers"][1]["argv"][-3:] == ["worker.py", "--x", "1"]
    assert node["workers"][1]["env"]["LOCAL_RANK"] == "1"
    table = run(tmp_path, "--dry_run", "--include", "localhost:0,2-3", script="pass")
    assert "WORLD_SIZE=3" in table.out and "LOCAL_RANK=2" in table.out, table.err


MAKES_PARSERS = """
import argparse, os, sys
def parser(*names):
    made = argparse.ArgumentParser()
    for name in ("--epochs", *names):
        made.add_argument(name, type=int)
    return made
"""
# This script declares the option: its file has the option's name in strings.
DECLARES = (
    MAKES_PARSERS
    + """
def unrecognized(*names, given=None):
    made = parser()
    if names:
        made.add_subparsers().add_parser("train").add_argument(*names)
    try:
        made.parse_args(given)
    except SystemExit:
        return True
own = ["--epochs=3", "--local_rank=0"]
assert "ZLAUNCH_PASSES_LOCAL_RANK" not in os.environ
assert vars(parser("--local_rank").parse_args()) == {"epochs": 3, "local_rank": 0}, "as under deepspeed"
assert vars(parser("--local-rank").parse_args()) == {"epochs": 3, "local_rank": 0}, "torch.distributed's"
assert parser().parse_known_args()[1] == ["--local_rank=0"], "a second parser may know it"
assert parser().parse_args(each for each in own[:1]).epochs == 3, "an iterator"
assert unrecognized(given=own), "what the launcher has not put first is the user's"
assert unrecognized("--local_rank"), "a command alone cannot be given it"
assert vars(parser("--local_rank_offset").parse_args())["local_rank_offset"] is None, "no abbreviation of it"
assert sys.argv[1:] == ["--epochs", "3"], "what starts with these arguments parses them as well"
for parse in (parser().parse_args, parser().parse_intermixed_args):
    assert vars(parse()) == {"epochs": 3}, "as under torchrun"
print("all parsed")
"""
)


# The script imports this module; its own file does not declare the option.
PARSERS = (
    MAKES_PARSERS
    + """
def is_unrecognized(given):
    try:
        parser().parse_args(given)
    except SystemExit:
        return True
def check():
    own = ["--epochs", "3"]
    assert sys.argv[1:] == own, sys.argv
    assert "ZLAUNCH_PASSES_LOCAL_RANK" not in os.environ
    for given in (None, sys.argv[1:]):
        assert vars(parser("--local_rank").parse_args(given)) == {"epochs": 3, "local_rank": 0}
    assert vars(parser("--local-rank").parse_args()) == {"epochs": 3, "local_rank": 0}, "torch.distributed's"
    assert parser("--local_rank").parse_intermixed_args().local_rank == 0
    for parse in (parser().parse_args, parser().parse_intermixed_args):
        assert vars(parse()) == {"epochs": 3}, "as under torchrun"
    first, rest = argparse.ArgumentParser().parse_known_args()
    assert rest == own and vars(first) == {}, "the rest is the command's alone"
    for given in (rest, ["--epochs", "1", *rest]):
        assert vars(parser("--local_rank").parse_args(given)) == {"epochs": 3, "local_rank": 0}, given
    assert parser().parse_args(each for each in ["--epochs=3"]).epochs == 3, "an iterator"
    for given in ([], ["--epochs=4"], ["--epochs", "4"]):
        assert parser("--local_rank").parse_args(given).local_rank is None, "arguments of the script"
    assert parser("--local_rank").parse_args(["--local_rank=7"]).local_rank == 7
    assert is_unrecognized([*own, "--local_rank=0"]), "which nobody has passed for the launcher"
    assert vars(parser("--local_rank_offset").parse_args())["local_rank_offset"] is None, "no abbreviation"
    nested = parser()
    nested.add_subparsers().add_parser("train").add_argument("--local_rank")
    assert nested.parse_args().epochs == 3
    print("all parsed")
"""
)


def _run_as_module(folder: Path, text: str) -> Launch:
    (folder / "package").mkdir()
    (folder / "package/__init__.py").touch()
    (folder / "package/module.py").write_text(text)
    return run(folder, "--num_gpus=1", "--module", "package.module", "--epochs", "3")


@pytest.mark.rotated
def test_a_script_that_declares_local_rank_gets_it(tmp_path: Path) -> None:
    launch = run(tmp_path, "--num_gpus=1", "--no_preload", script=DECLARES, args=("--epochs", "3"))
    assert launch.process.returncode == 0 and "all parsed" in launch.out, launch.err
    launch = _run_as_module(tmp_path, DECLARES.replace("import argparse", "import torch, argparse"))
    assert launch.process.returncode == 0 and "all parsed" in launch.out, launch.err
    first = "import argparse; argparse.ArgumentParser().parse_args()"
    launch = run(tmp_path, "--num_gpus=1", "--no_local_rank", script=first, args=("--local_rank=0",))
    assert "unrecognized arguments: --local_rank=0" in launch.err
    for says, wanted in (("'--local-rank'", "['--local-rank=0']"), ("'local_rank'", "['--local_rank=0']")):
        launch = run(
            tmp_path, "--num_gpus=1", script=f"import sys\n{says}\nname = {says}\nprint(sys.argv[1:])"
        )
        assert wanted in launch.out


@pytest.mark.rotated
def test_argparse_gets_local_rank_where_it_knows_it(tmp_path: Path) -> None:
    (tmp_path / "parsers.py").write_text(PARSERS)
    script = "import parsers\nparsers.check()  # not --local_rank"
    launch = run(tmp_path, "--num_gpus=1", "--no_preload", script=script, args=("--epochs", "3"))
    assert launch.process.returncode == 0 and "all parsed" in launch.out, launch.err
    launch = _run_as_module(tmp_path, f"import torch\n{script}")
    assert launch.process.returncode == 0 and "all parsed" in launch.out, launch.err
    first = "import parsers; print(parsers.parser('--' + 'local' + '_rank').parse_args())"
    launch = run(tmp_path, "--num_gpus=1", "--no_local_rank", script=first)
    assert "local_rank=None" in launch.out, launch.err


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        ("raise SystemExit(3)", 3, "exited with code 3"),
        ("sys.exit('bad data')", 1, "| bad data"),
        ("os._exit(7)", 7, "exited with code 7"),
        ("raise ValueError('boom')", 1, "| ValueError: boom"),
        ("os.kill(os.getpid(), 11)", 139, "SIGSEGV"),
        ("os.kill(os.getpid(), 9)", 137, "SIGKILL"),
        ("raise ValueError('Unknown config key: local_rank')", 1, "zlaunch --no_local_rank"),
        ("def f(:", 1, "SyntaxError"),
    ],
)
def test_first_failure_is_told_and_gives_the_exit_code(
    tmp_path: Path, body: str, code: int, words: str
) -> None:
    indented = body if body.startswith("def") else f"if os.environ['RANK'] == '1': {body}"
    script = f"import os, sys, time\nprint('last words', flush=True)\n{indented}\ntime.sleep(600)\n"
    (tmp_path / "w.py").write_text(script)
    launch = run(tmp_path, "--num_gpus=2", "w.py")
    assert launch.process.returncode == code, launch.err
    assert words in launch.err
    if not body.startswith("def"):
        assert "rank 1 on localhost failed first" in launch.err
        assert "| last words" in launch.err
        assert "rank_00001.log" in launch.err
    if words != "SIGSEGV":  # faulthandler shows all frames there are
        assert "bootstrap.py" not in launch.err and "runpy" not in launch.err
    assert not alive(launch.run_id)


def test_a_lost_connection_is_not_the_cause(tmp_path: Path) -> None:
    """Rank 0 notices first that its peer is gone; the report still names rank 1."""
    script = """
        import os, sys, time
        if os.environ["RANK"] == "0":
            while not os.path.exists("failing"): time.sleep(0.01)
            raise RuntimeError("[/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer")
        open("failing", "w").close()
        time.sleep(0.3)
        raise KeyError("the cause")
    """
    launch = run(tmp_path, "--num_gpus=2", script=script)
    assert "rank 1 on localhost failed first" in launch.err and "KeyError" in launch.err


def test_interrupt_of_a_worker_is_a_failure(tmp_path: Path) -> None:
    launch = Launch(tmp_path, script="import time; print('up', flush=True); time.sleep(600)")
    wait_until(lambda: "up" in launch.out, "worker up")
    os.kill(launch.worker_pid(0), signal.SIGINT)
    assert launch.wait() == 130
    assert "KeyboardInterrupt" in launch.err


def test_stacks_on_sigusr2(tmp_path: Path) -> None:
    script = "import time\ndef waiting_here():\n    print('up', flush=True); time.sleep(600)\nwaiting_here()"
    launch = Launch(tmp_path, script=script)
    wait_until(lambda: "up" in launch.out, "worker up")
    os.kill(launch.worker_pid(0), signal.SIGUSR2)
    wait_until(lambda: "waiting_here" in launch.err, "stacks printed")
    launch.process.send_signal(signal.SIGINT)
    assert launch.wait() == 130


@pytest.mark.rotated
@pytest.mark.parametrize("mode", ["script", "module"])
def test_a_file_that_is_left_open_is_written_at_the_end(tmp_path: Path, mode: str) -> None:
    """Although the script's names are in a cycle that is not collected, as with a live graph of autograd."""
    text = textwrap.dedent("""
        import gc
        left_open = open("output", "w")
        def uses_the_names(): return left_open
        left_open.write("written")
        gc.freeze()
    """)
    launch = (
        run(tmp_path, "--num_gpus=1", script=text) if mode == "script" else _run_as_module(tmp_path, text)
    )
    assert launch.wait() == 0, launch.err
    assert (tmp_path / "output").read_text() == "written"


def test_own_modules_never_mix_with_ours(tmp_path: Path) -> None:
    for name in ("runtime", "config", "hostfiles", "slurm", "queue_", "events", "failure", "plan"):
        (tmp_path / f"{name}.py").write_text("OWNER = 'user'\n")
    script = """
        import runtime, config, hostfiles, slurm, events, failure, plan
        assert {m.OWNER for m in (runtime, config, hostfiles, slurm, events, failure, plan)} == {"user"}
        import zlaunch.runtime, zlaunch.hostfiles.filters, zlaunch.plan.plan
        assert zlaunch.runtime is not runtime and not hasattr(zlaunch.runtime, "OWNER")
    """
    assert run(tmp_path, script=script).process.returncode == 0


def test_our_packages_are_loaded_under_one_name(tmp_path: Path) -> None:
    script = """
        import sys
        import zlaunch.runtime, zlaunch.hostfiles.filters, zlaunch.slurm, zlaunch.cuda_ops
        assert not {"runtime", "hostfiles", "slurm", "cuda_ops", "config"} & set(sys.modules)
        assert "torch" not in sys.modules
    """
    launch = run(tmp_path, "--no_preload", script=script)
    assert launch.process.returncode == 0, launch.err


def test_standard_library_names_in_the_working_folder_do_no_harm(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "train.py").write_text("import sys; print(sys.path[0])")
    if sys.version_info >= (3, 11):
        (tmp_path / "selectors.py").write_text("raise SystemExit(99)")
        (tmp_path / "subprocess.py").write_text("raise SystemExit(99)")
    # As the installed command does, without the current folder on its own path.
    entry = "import sys; sys.path[0] = sys.argv.pop(1); from zlaunch.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", entry, str(ROOT), "-q", "sub/train.py"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.returncode, done.stdout.strip()) == (0, str(tmp_path / "sub")), done.stderr


def test_multiprocessing_spawn_and_classes_of_main(tmp_path: Path) -> None:
    script = """
        import multiprocessing, pickle

        class Point:
            def __init__(self, x): self.x = x

        def double(point): return Point(2 * point.x)

        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(double, [Point(21)])[0].x, pickle.loads(pickle.dumps(Point(1))).x)
    """
    launch = run(tmp_path, script=script)
    assert (launch.process.returncode, launch.out) == (0, "42 1\n"), launch.err


def test_metrics_and_quiet(tmp_path: Path) -> None:
    script = """
        import json, os
        values = {"step": 1, "steps": 2, "loss": 2.5, "memory_gb": 0.5}
        event = {"type": "metrics", "rank": 0, "time": 0.0, "values": values}
        fd = int(os.environ["ZLAUNCH_EVENT_FD"])
        os.write(fd, b"scribble\\n" + json.dumps(event).encode() + b"\\n" + b'{"type": "done"}\\n')
        # the agent's own words: the end of an attempt, a heartbeat; and half a character
        odd = {"type": "metrics", "stays": True, "beat": "x", "host": 7, "values": {"a": "b"}}
        os.write(fd, json.dumps(odd).encode() + b"\\n")
        os.write(fd, b'{"type": "checkpoint", "tag": "\\\\ud83d", "folder": "/saved", "step": 1}\\n')
        os.system("echo child")
        print("end")
    """
    launch = run(tmp_path, script=script)
    assert sorted(launch.out.splitlines()) == ["child", "end", "step 1/2 loss 2.5 mem 0.50 GB"], launch.err
    assert launch.events("metrics")[0]["values"]["loss"] == 2.5
    assert not launch.events("output")
    assert "checkpoint ? is in /saved" in launch.err
    quiet = run(tmp_path, "-q", script=script)
    assert (quiet.out, quiet.err) == ("child\nend\n", "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no script given"),
        (["trian.py"], "no script 'trian.py', did you mean 'train.py'?"),
        (["nowhere/train.py"], "there is no folder 'nowhere'"),
        (["--module", "no_such_module"], "no module named 'no_such_module'"),
        (["--no_python", "no-such-program"], "no program 'no-such-program'"),
        (["--module", "--no_python", "x"], "cannot be used together"),
        (["--num_gpus", "0", "train.py"], "--num_gpus"),
        (["--num_gpsu", "1", "train.py"], "--num_gpus"),
        (["-i", "localhost:0", "-e", "localhost:1", "train.py"], "cannot be used together"),
        (["--num_gpus", "1", "-i", "localhost", "train.py"], "cannot be combined with"),
        (["-i", "worker-1:0", "train.py"], "unknown host 'worker-1'"),
        (["-i", "localhost:a", "train.py"], "'a' is not a slot"),
        (["-e", "localhost:0", "train.py"], "excludes every slot"),
        (["--master_port", "70000", "train.py"], "from 1 to 65535"),
        (["--log_ranks", "5", "train.py"], "no rank 5"),
        (["--run_dir", "train.py/x", "train.py"], "cannot write there"),
        (["--json", "train.py"], "--dry_run"),
    ],
)
def test_user_errors_are_one_clear_message(tmp_path: Path, arguments: list[str], words: str) -> None:
    (tmp_path / "train.py").touch()
    launch = run(tmp_path, *arguments)
    assert launch.process.returncode == 2, launch.err
    assert launch.err.startswith("zlaunch: error: ") and words in launch.err
    assert launch.err.count("\n") == 1 and launch.out == ""


def test_a_port_in_use_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        launch = run(tmp_path, f"--master_port={taken.getsockname()[1]}", "train.py")
    assert launch.process.returncode == 2 and "in use" in launch.err


@pytest.mark.parametrize("form", ["--config={}", "--config {}", "--deepspeed_config {}", "--deepspeed {}"])
def test_a_bad_config_stops_before_any_worker(tmp_path: Path, form: str) -> None:
    (tmp_path / "ds.json").write_text('{"train_batch_size": 8, "zero_optimization": {"overlap_com": true}}')
    args = tuple(form.format("ds.json").split())
    launch = run(tmp_path, script="open('started', 'w')", args=args)
    assert launch.process.returncode == 2
    assert "overlap_com" in launch.err and "overlap_comm" in launch.err and "Traceback" not in launch.err
    assert not (tmp_path / "started").exists()


@pytest.mark.rotated
def test_the_scripts_own_config_is_its_own_business(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("model: gpt\ndata: x\noptimizer: fast\n")
    (tmp_path / "mine.toml").write_text("zero_optimization = 1\n")
    for args in (("--config", "mine.yaml"), ("--config=mine.toml",), ("--config", "made_later.json")):
        assert run(tmp_path, script="pass", args=args).process.returncode == 0


def test_help_loads_little() -> None:
    """What makes a start slow is what is imported: click, and nothing else that is not Python's own."""
    program = (
        "import sys; from zlaunch.cli.main import main; main(['--help']); "
        "print(*sorted({name.partition('.')[0] for name in sys.modules} - sys.stdlib_module_names))"
    )
    command = [sys.executable, "-S", "-c", f"import sys; sys.path[:] = {sys.path!r}; {program}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "--num_gpus" in done.stdout, done.stderr
    assert set(done.stdout.splitlines()[-1].split()) <= {"__main__", "click", "zlaunch"}


def test_a_rendezvous_port_that_was_taken_is_tried_once_more(tmp_path: Path) -> None:
    script = """
        import os
        print("port", os.environ["MASTER_PORT"], flush=True)
        if os.environ["ZLAUNCH_RESTART_COUNT"] == "0" and os.environ["RANK"] == "0":
            raise OSError(98, "Address already in use")
    """
    launch = run(tmp_path, "--num_gpus=2", script=script)
    assert launch.process.returncode == 0, launch.err
    ports = [line for line in launch.log(0).splitlines() if line.startswith("port")]
    assert len(set(ports)) == 2 and "once more with another one" in launch.err

    (tmp_path / "always").mkdir()
    launch = run(tmp_path / "always", "--num_gpus=1", script="raise OSError(98, 'Address already in use')")
    assert launch.process.returncode == 1 and launch.err.count("once more") == 1


def test_workers_are_bound_to_their_share_of_the_cores(tmp_path: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    script = "import os; print(sorted(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS'])"
    launch = run(tmp_path, "--num_gpus=2", "--bind_cores_to_rank", script=script)
    half = max(1, len(cores) // 2)
    shares = [eval(launch.log(rank).rpartition(" ")[0]) for rank in range(2)]
    assert [len(share) for share in shares] == [half, half]
    if len(cores) > 1:
        assert not set(shares[0]) & set(shares[1])
    assert launch.log(0).split()[-1] == str(half)

    (tmp_path / "one").mkdir()
    launch = run(tmp_path / "one", "--num_gpus=2", f"--bind_core_list={cores[-1]}", script=script)
    assert [launch.log(rank) for rank in range(2)] == [f"[{cores[-1]}] 1\n"] * 2
    launch = run(tmp_path / "one", "--bind_core_list=9999", script=script)
    assert launch.process.returncode == 2 and "has no core 9999" in launch.err


@pytest.mark.exclusive  # resident memory is less where the kernel takes pages back for others
def test_a_worker_that_prints_100_mb_disturbs_nobody(tmp_path: Path) -> None:
    script = """
        import os, sys, time
        if os.environ["RANK"] == "0":
            for _ in range(100):
                sys.stdout.write("x" * 999_999 + "\\n")
        else:
            for i in range(20):
                print(i, flush=True)
                time.sleep(0.02)
    """
    launch = Launch(tmp_path, "--num_gpus=2", "--log_ranks=1", script=script)
    peak_kb = 0
    while launch.process.poll() is None:
        try:
            status = Path(f"/proc/{launch.process.pid}/status").read_text()
            peak_kb = max(peak_kb, *(int(x.split()[1]) for x in status.splitlines() if x.startswith("VmHWM")))
        except (OSError, TypeError, ValueError):
            break
        time.sleep(0.02)
    assert launch.wait() == 0, launch.err
    assert len(launch.log_bytes(0)) == 100_000_000
    assert launch.log(1).split() == [str(i) for i in range(20)]
    assert 0 < peak_kb < 150_000
    assert json.loads((launch.run_dir / "launcher.json").read_text())["exit_code"] == 0


def test_variables_given_go_to_local_workers_too(tmp_path: Path) -> None:
    (tmp_path / ".zlaunch_env").write_text("# mine\nFROM_FILE='a b'\n")
    script = "import os; print(os.environ['FROM_FILE'], os.environ['MINE'])"
    launch = run(tmp_path, "--env=MINE=x y", script=script)
    assert launch.log(0) == "a b x y\n", launch.err
    for option, words in (
        ("--env=RANK=3", "zlaunch sets this variable"),
        ("--ssh_port=99", "--ssh_port has no effect here"),
        ("--requeue", "works only inside a SLURM job"),
    ):
        launch = run(tmp_path, option, script=script)
        assert launch.process.returncode == 2 and words in launch.err


def test_two_signals_at_once_leave_the_workers_their_grace(tmp_path: Path) -> None:
    script = """
        import os, signal, sys, time
        def save(*_):
            time.sleep(0.3)
            print("saved", flush=True)
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        print("ready", flush=True)
        time.sleep(600)
    """
    launch = Launch(tmp_path, "--num_gpus=2", script=script)
    wait_until(lambda: launch.run_dir.exists() and "ready" in launch.out, "ready")
    wait_until(lambda: "ready" in launch.log(1), "ready")
    for signum in (signal.SIGSTOP, signal.SIGTERM, signal.SIGINT, signal.SIGCONT):
        launch.process.send_signal(signum)  # the two in the middle arrive together
    assert launch.wait() in (130, 143)
    assert "saved" in launch.log(0) and "saved" in launch.log(1)


def test_a_folder_with_a_living_run_is_refused(tmp_path: Path) -> None:
    launch = Launch(tmp_path, script="import time\nprint('up', flush=True)\ntime.sleep(600)")
    wait_until(lambda: "up" in launch.out, "worker up")
    second = subprocess.run(
        [sys.executable, "-m", "zlaunch", f"--run_dir={launch.run_dir}", "worker.py"],
        cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert second.returncode == 2 and "a job is running there" in second.stderr
    launch.process.terminate()
    assert launch.wait() == 143
