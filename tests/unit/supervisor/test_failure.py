"""Test which failure is told, and how."""

from __future__ import annotations

import signal
from pathlib import Path

from zlaunch.node.worker import likely_reason, oom_counters, oom_rose
from zlaunch.supervisor.verdict import Failure, choose, report

LOST_PEER = "RuntimeError: [gloo/transport/tcp/pair.cc] Connection closed by peer"


def exception(rank: int, time: float, text: str) -> Failure:
    talk = "lost" if text == LOST_PEER else ""
    return Failure(rank, "h", time, "exception", 1, exception=text, talk=talk)


def died(rank: int, time: float, signum: int = 9) -> Failure:
    return Failure(rank, "h", time, "signal", -signum)


def test_the_cause_is_chosen_over_an_earlier_consequence() -> None:
    assert choose([exception(0, 1.0, LOST_PEER), died(1, 1.4)]).rank == 1
    assert choose([exception(0, 1.0, LOST_PEER), exception(1, 1.4, "ValueError: x")]).rank == 1
    assert choose([exception(0, 1.0, "ValueError: x"), died(1, 1.4, signal.SIGSEGV)]).rank == 1
    watchdog = died(1, 1.4, signal.SIGABRT)
    assert choose([exception(0, 1.0, "ValueError: x"), watchdog]).rank == 0, "NCCL's, after the other's error"
    assert choose([exception(0, 1.0, LOST_PEER), watchdog]).rank == 1


def test_the_earliest_of_equals_and_of_what_is_far_apart() -> None:
    assert choose([exception(1, 1.1, "ValueError: x"), exception(0, 1.0, "KeyError: y")]).rank == 0
    assert choose([died(1, 4.1), exception(0, 1.0, LOST_PEER)]).rank == 0
    assert choose([died(1, 3.9), exception(0, 1.0, LOST_PEER)]).rank == 1, "it took its time to end"
    assert choose([died(1, 2.1), exception(0, 1.0, "ValueError: x")]).rank == 0
    assert choose([Failure(2, "h", 1.0, "exit", 3), exception(0, 0.9, LOST_PEER)]).rank == 2


def test_exit_codes() -> None:
    assert died(0, 0, signal.SIGSEGV).exit_code == 139
    assert Failure(0, "h", 0, "exit", 7).exit_code == 7
    assert Failure(0, "h", 0, "exception").exit_code == 1


def test_reasons() -> None:
    assert likely_reason(signal.SIGKILL, oom_killed="run").startswith("out of host memory")
    assert likely_reason(signal.SIGKILL, oom_killed="host").startswith("killed from outside")
    assert "memory" not in likely_reason(signal.SIGKILL, oom_killed=None)
    assert "/dev/shm" in likely_reason(signal.SIGBUS, oom_killed=None)
    assert likely_reason(60, oom_killed=None) == ""


def test_oom_counters_of_both_cgroup_versions(tmp_path: Path) -> None:
    def write(name: str, text: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    write("proc/vmstat", "nr_free 5\noom_kill 2\n")
    write("proc/self/cgroup", "4:cpu,memory:/job/step\n0::/slice/run\n")
    write("sys/fs/cgroup/slice/run/memory.events", "oom 1\noom_kill 1\noom_group_kill 0\n")
    write("sys/fs/cgroup/memory/job/memory.oom_control", "under_oom 0\noom_kill 3\n")
    before = oom_counters(tmp_path)
    assert before == {"run": 4, "host": 2}
    assert oom_rose(before, oom_counters(tmp_path)) is None
    write("sys/fs/cgroup/memory/job/memory.oom_control", "under_oom 0\noom_kill 4\n")
    assert oom_rose(before, oom_counters(tmp_path)) == "run"
    assert oom_counters(tmp_path / "nothing") == {}


def test_an_oom_kill_elsewhere_on_the_machine_is_not_blamed(tmp_path: Path) -> None:
    for name, text in {
        "proc/vmstat": "oom_kill 2\n",
        "proc/self/cgroup": "0::/slice/run\n",
        "sys/fs/cgroup/slice/memory.events": "oom_kill 7\n",
        "sys/fs/cgroup/slice/run/memory.events": "oom_kill 0\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    before = oom_counters(tmp_path)
    (tmp_path / "proc/vmstat").write_text("oom_kill 3\n")
    (tmp_path / "sys/fs/cgroup/slice/memory.events").write_text("oom_kill 8\n")
    assert oom_rose(before, oom_counters(tmp_path)) is None
    (tmp_path / "proc/self/cgroup").unlink()  # a kernel without control groups says it of the machine only
    assert oom_rose({"host": 2}, oom_counters(tmp_path)) == "host"


def test_report_names_all_there_is_to_know() -> None:
    failure = Failure(3, "node7", 0, "signal", -9, reason="because")
    text = report(failure, ["one", "two"], "/runs/x/logs/rank_00003.log")
    for words in ("rank 3", "node7", "SIGKILL", "137", "because", "| one", "| two", "rank_00003.log"):
        assert words in text
    assert "hint" not in text


def test_report_hints_at_no_local_rank() -> None:
    for said in (
        "t.py: error: unrecognized arguments: --local_rank=0",
        "ValueError: Unknown config key: local_rank",  # nanoGPT's configurator
        "│ No such option: --local_rank                    │",  # typer with rich
        "FATAL Flags parsing error: Unknown command line flag 'local_rank'",  # absl
        "ERROR: Could not consume arg: --local_rank=0",  # fire
    ):
        assert "--no_local_rank" in report(Failure(0, "h", 0, "exit", 2), ["usage", said], "log")
    assert "--no_local_rank" not in report(Failure(0, "h", 0, "exit", 2), ["local_rank 0: Error"], "log")


def test_report_hints_at_a_name_that_deepspeed_has() -> None:
    said = "ImportError: cannot import name 'FPDTAttention' from 'deepspeed.sequence.layer' (/x/layer.py)"
    text = report(Failure(0, "h", 0, "exception", 1), [said], "log")
    assert "hint: zlaunch's deepspeed does not have this name: docs/migrating/deepspeed-missing.md" in text
    other = said.replace("deepspeed.", "deepspeedometer.")
    assert "hint" not in report(Failure(0, "h", 0, "exception", 1), [other], "log")


def test_report_hints_at_an_incomplete_checkpoint_of_a_trainer() -> None:
    line = "FileNotFoundError: [Errno 2] No such file or directory: 'out/checkpoint-300/trainer_state.json'"
    text = report(Failure(0, "localhost", 0.0, "exception", 1, exception=line), [line], "log")
    assert (
        "hint: this checkpoint-N does not exist, or is incomplete" in text
        and "zlaunch.resume_dir(output_dir)" in text
    )


def test_report_names_the_arguments_that_stand_on_the_wrong_side() -> None:
    both = "t.py: error: unrecognized arguments: --local_rank=0 --num_gpus 2 --lr 1"
    text = report(Failure(0, "h", 0, "exit", 2), ["usage", both], "log")
    assert text.count("hint: ") == 2 and "--no_local_rank" in text
    assert "--num_gpus stands after the script and went to it; zlaunch's options go before the script" in text
    config = "t.py: error: unrecognized arguments: --config=ds.json"
    text = report(Failure(0, "h", 0, "exit", 2), ["usage", config], "log")
    assert text.count("hint: ") == 1 and "the script does not know --config: add it to the parser" in text
    own = "t.py: error: unrecognized arguments: --lr 1"
    assert "hint" not in report(Failure(0, "h", 0, "exit", 2), ["usage", own], "log")


def test_report_hints_at_different_collectives() -> None:
    gloo = (
        "[enforce fail at /x/gloo/gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 16 vs 8."
    )
    text = report(
        Failure(0, "h", 0, "signal", -6), [f"  what():  {gloo}", "Fatal Python error: Aborted"], "log"
    )
    assert "hint: the ranks called different collectives" in text


def test_the_cause_stands_in_the_report_once() -> None:
    traceback = "Traceback (most recent call last):\n  File 'x.py'\nValueError: bad shape\n"
    failure = Failure(1, "h", 0, "exception", 1, exception="ValueError: bad shape", traceback=traceback)
    for tail, shown in (
        (traceback.splitlines(), False),  # in its output, which nobody has seen
        (["step 1"], False),  # only told as an event
        (traceback.splitlines(), True),
        ([], False),
    ):
        text = report(failure, tail, "log", shown=shown)
        assert text.count("ValueError: bad shape") == 1, text


def test_report_hints_at_the_argument_of_a_trainer() -> None:
    said = "ValueError: Some specified arguments are not used by the HfArgumentParser: "
    for left, is_config in (
        ("['--config', 'ds.json']", True),
        ("['--config=ds.json']", True),
        ("['--x']", False),
    ):
        text = report(Failure(0, "h", 0, "exit", 1), [said + left], "log")
        assert ("takes --deepspeed FILE, not --config" in text) == is_config
