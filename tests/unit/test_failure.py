"""Which failure is told, and how."""

from __future__ import annotations

import signal
from pathlib import Path

from zlaunch.launch.failure import Failure, choose, likely_reason, oom_counters, oom_rose, report

LOST_PEER = "RuntimeError: [gloo/transport/tcp/pair.cc] Connection closed by peer"


def exception(rank: int, time: float, text: str) -> Failure:
    return Failure(rank, "h", time, "exception", 1, exception=text)


def died(rank: int, time: float, signum: int = 9) -> Failure:
    return Failure(rank, "h", time, "signal", -signum)


def test_the_cause_is_chosen_over_an_earlier_consequence() -> None:
    assert choose([exception(0, 1.0, LOST_PEER), died(1, 1.4)]).rank == 1
    assert choose([exception(0, 1.0, LOST_PEER), exception(1, 1.4, "ValueError: x")]).rank == 1
    assert choose([exception(0, 1.0, "ValueError: x"), died(1, 1.4, signal.SIGABRT)]).rank == 1


def test_the_earliest_of_equals_and_of_what_is_far_apart() -> None:
    assert choose([exception(1, 1.1, "ValueError: x"), exception(0, 1.0, "KeyError: y")]).rank == 0
    assert choose([died(1, 3.0), exception(0, 1.0, LOST_PEER)]).rank == 0
    assert choose([Failure(2, "h", 1.0, "exit", 3), exception(0, 0.9, LOST_PEER)]).rank == 2


def test_exit_codes() -> None:
    assert died(0, 0, signal.SIGSEGV).exit_code == 139
    assert Failure(0, "h", 0, "exit", 7).exit_code == 7
    assert Failure(0, "h", 0, "exception").exit_code == 1


def test_reasons() -> None:
    assert "out of host memory" in likely_reason(signal.SIGKILL, oom_killed=True)
    assert "from outside" in likely_reason(signal.SIGKILL, oom_killed=False)
    assert "/dev/shm" in likely_reason(signal.SIGBUS, oom_killed=False)
    assert likely_reason(60, oom_killed=False) == ""


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
    assert sorted(before.values()) == [1, 2, 3]
    assert not oom_rose(before, oom_counters(tmp_path))
    write("sys/fs/cgroup/memory/job/memory.oom_control", "under_oom 0\noom_kill 4\n")
    assert oom_rose(before, oom_counters(tmp_path))
    assert oom_counters(tmp_path / "nothing") == {}


def test_report_names_all_there_is_to_know() -> None:
    failure = Failure(3, "node7", 0, "signal", -9, reason="because")
    text = report(failure, ["one", "two"], "/runs/x/logs/rank_00003.log")
    for words in ("rank 3", "node7", "SIGKILL", "137", "because", "| one", "| two", "rank_00003.log"):
        assert words in text
    assert "hint" not in text


def test_report_hints_at_no_local_rank() -> None:
    tail = ["usage: t.py [-h]", "t.py: error: unrecognized arguments: --local_rank=0"]
    assert "--no_local_rank" in report(Failure(0, "h", 0, "exit", 2), tail, "log")
