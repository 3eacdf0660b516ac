"""Test what is said of ranks that hang, from stacks that faulthandler has written and what ranks report."""

from __future__ import annotations

from typing import Any

from zlaunch.supervisor.hang import (
    HangWatch,
    Stand,
    explain,
    find_position,
    named,
    note_standing,
    read_stacks,
    where,
)
from zlaunch.system.messages import Exited, StandsStill

BOTTOM = """  File "/opt/venv/lib/python3.11/site-packages/zlaunch/node/bootstrap.py", line 154 in _run_script
  File "<frozen runpy>", line 198 in _run_module_as_main
"""
OUTSIDE = "with no collective in its stack"
DIFFERENT = "these are different collectives: ranks of one group must call the same, in the same order"
OTHER = """Thread 0x00007f19cdffb6c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait
  File "/home/me/loader.py", line 3 in worker

"""
TORCH = "/opt/venv/lib/python3.11/site-packages/torch"
OWN = "/opt/venv/lib/python3.11/site-packages/zlaunch/runtime"


def dump(*frames: str, other: str = "") -> str:
    main = "".join(f"  File {frame}\n" for frame in frames)
    return f"step 5\n{other}Current thread 0x00007fdc4d3f6b80 (most recent call first):\n{main}{BOTTOM}"


LOADS = dump('"/home/me/zlaunch/train.py", line 8 in load', '"/home/me/zlaunch/train.py", line 17 in main')
REDUCES = dump(
    f'"{TORCH}/distributed/distributed_c10d.py", line 3000 in all_reduce',
    f'"{TORCH}/distributed/c10d_logger.py", line 83 in wrapper',
    '"train.py", line 40 in average',
    other=OTHER,
)
BACKWARD = dump(
    f'"{TORCH}/autograd/graph.py", line 979 in _engine_run_backward',
    f'"{TORCH}/_tensor.py", line 623 in backward',
    '"train.py", line 10 in <module>',
)
GATHERS = dump(
    f'"{OWN}/comm/pending.py", line 90 in await_work',
    f'"{OWN}/zero/unit.py", line 90 in gather',
    f'"{OWN}/engine.py", line 9 in __call__',
    '"train.py", line 11 in main',
)


def test_places_and_calls() -> None:
    own = find_position(LOADS)
    assert own is not None and (own.place, own.call, own.waits) == ("train.py:8 in load", "", False)
    called = find_position(REDUCES)
    assert called is not None and (called.place, called.call, called.waits) == (
        "train.py:40 in average",
        "all_reduce",
        True,
    )
    passed = find_position(BACKWARD)
    assert passed is not None and (passed.call, passed.waits) == ("backward", False)
    inside = find_position(GATHERS)
    assert inside is not None and (inside.call, inside.waits) == ("__call__", True)


def test_a_backward_pass_whose_hooks_another_thread_runs() -> None:
    device = 'Thread 0x00007f19cdffb6c0 (most recent call first):\n  File "%s", line 90 in wait\n\n'
    text = BACKWARD.replace("Current", device % f"{OWN}/comm/pending.py" + "Current")
    found = find_position(text)
    assert found is not None and found.waits and found.place == "train.py:10 in <module>"
    found = find_position(BACKWARD.replace("Current", device % "/home/me/loader.py" + "Current"))
    assert found is not None and not found.waits


def test_the_last_of_several_dumps_counts() -> None:
    assert str(read_stacks(LOADS + "step 6\n" + BACKWARD)[0][2]) == "train.py:10 in <module>"
    assert len(read_stacks(REDUCES)) == 2
    assert find_position("") is None and find_position("no stacks at all\n  File x") is None


def test_who_is_waited_for() -> None:
    hosts = {0: "n1", 1: "n1", 2: "n2", 3: "n2"}

    def said(**texts: str) -> list[str]:
        return where({int(name[1:]): text for name, text in texts.items()}, {}, hosts, hosts)

    assert said(r0=REDUCES, r1=LOADS, r2=REDUCES, r3=REDUCES) == [
        f"rank 1 on n1 is at train.py:8 in load, {OUTSIDE}: the others probably wait for it",
        "ranks 0, 2, 3 wait in all_reduce (train.py:40 in average)",
    ]
    assert said(r0=BACKWARD, r1=LOADS, r2=BACKWARD, r3=BACKWARD)[0].endswith(
        f"{OUTSIDE}: the others probably wait for it"
    )
    assert said(r0=BACKWARD, r1=REDUCES, r2=BACKWARD, r3=BACKWARD) == [
        "ranks 0, 2, 3 are in backward (train.py:10 in <module>): the others probably wait for them",
        "rank 1 on n1 waits in all_reduce (train.py:40 in average)",
    ]
    assert said(r0=REDUCES, r1=REDUCES, r3=REDUCES) == [
        "rank 2 on n2 gives no answer",
        "ranks 0, 1, 3 wait in all_reduce (train.py:40 in average)",
    ]
    assert said(r0=LOADS, r1=LOADS, r2=LOADS, r3=LOADS) == [
        "ranks 0-3 are at train.py:8 in load, with no collective in their stacks"
    ]
    assert explain({}, {}, [0, 1, 2, 5]) == ["ranks 0-2, 5 give no answer"]
    assert named([7], {}) == "rank 7"


def stand(what: str, unfinished: Any = None, begun: Any = None) -> StandsStill:
    return StandsStill(0, "n", what, unfinished or [], begun or {})


def known(**events: StandsStill) -> dict[int, Stand]:
    found: dict[int, Stand] = {}
    for name, event in events.items():
        note_standing(found, event._replace(rank=int(name[1:])))
    return found


def test_the_runtimes_own_words() -> None:
    hosts = {0: "n1", 1: "n1"}
    told = known(r0=stand("reduces the gradients of root"), r1=stand("calls torch.distributed.barrier"))
    assert where({0: GATHERS, 1: BACKWARD}, told, hosts, hosts) == [
        "rank 0 on n1 waits in a collective that reduces the gradients of root (train.py:11 in main)",
        "rank 1 on n1 waits in torch.distributed.barrier (train.py:10 in <module>)",
        DIFFERENT,
    ]
    assert not known(r0=stand("")), "an empty text means that it goes on"
    assert not known(r0=StandsStill(0, "n", 3), r1=stand("x", unfinished=[["0", "one", "x"]]))


def test_ranks_that_wait_for_their_gpu() -> None:
    """`loss.item()` is a line of the script like any other: the numbers of the collectives tell."""
    text = "nccl:all_reduce (number 12 in its group, shape [64])"
    waiting = stand("", [["0", 12, text]], {"0": 13})
    hosts = {0: "n1", 1: "n1", 2: "n2"}
    told = known(r0=waiting, r1=stand("", [], {"0": 11}), r2=waiting)
    assert where(dict.fromkeys(hosts, LOADS), told, hosts, hosts) == [
        f"rank 1 on n1 is at train.py:8 in load, {OUTSIDE}, and has not begun {text}, in which others wait",
        f"ranks 0, 2 wait in {text} (train.py:8 in load)",
    ]


def test_a_rank_inside_of_the_others_collective_is_not_late() -> None:
    text = "nccl:all_reduce (number 12 in its group, shape [64])"
    told = known(r0=stand("", [["0", 12, text]], {"0": 12}), r1=stand("", [["0", 12, text]], {"0": 12}))
    hosts = {0: "n1", 1: "n1"}
    assert where(dict.fromkeys(hosts, LOADS), told, hosts, hosts) == [
        f"ranks 0, 1 wait in {text} (train.py:8 in load)"
    ]


def test_what_is_not_known_is_not_said() -> None:
    """Point-to-point calls, several ranks outside of collectives, calls that are none."""
    hosts = {0: "n1", 1: "n1", 2: "n2"}
    receives = REDUCES.replace("in all_reduce", "in recv")
    runs = dump('"/usr/lib/python3.11/subprocess.py", line 5 in run', '"train.py", line 9 in main')
    for texts in (
        {0: LOADS, 1: receives, 2: receives},
        {0: LOADS, 1: LOADS.replace("line 8", "line 9"), 2: REDUCES},
        {0: LOADS, 1: runs, 2: runs},
    ):
        assert "wait for" not in "\n".join(where(texts, {}, hosts, hosts)), texts


def test_dumps_that_are_none_and_dumps_that_are_cut() -> None:
    own = 'Thread 0x00007f3847fff6c0 (most recent call first):\n  File "evil.py", line 6 in f\n'
    found = find_position(REDUCES + "said\n" + own)
    assert found is not None and found.place == "train.py:40 in average"
    cut = find_position(OTHER * 100 + "...\n")
    assert cut is not None and "leave out" in cut.call
    lines = where({0: OTHER * 100 + "...\n", 1: REDUCES}, {}, {0: "n1", 1: "n1"}, [0, 1])
    assert lines[0] == "rank 0 on n1 is in a call that its stacks leave out (it has too many threads)"


def test_ranks_that_have_ended() -> None:
    watch = HangWatch(5, {0: "n1", 1: "n1", 2: "n2"})
    watch.exited(Exited("n", 1, 7, 0, "", False, 0.0))
    lines = watch.report().splitlines()
    assert lines[1] == "  rank 1 on n1 has ended with code 0"
    assert lines[2] == "  ranks 0, 2 give no answer"
    assert "what each was doing" not in "\n".join(lines), "nobody has answered"


def test_ranks_that_have_never_said_anything_may_still_be_starting() -> None:
    advice = "  they may still be starting: give --hang_timeout more seconds"
    for acts in (False, True):
        watch = HangWatch(1e-9, {0: "n1"})
        if acts:
            watch.output(0, b"step 1\n")
        assert watch.due()
        watch.output(0, b"its stacks")
        assert (advice in watch.report().splitlines()) != acts


def test_a_rank_in_a_collective_has_started() -> None:
    watch = HangWatch(1e-9, {0: "n1"})
    assert watch.due()
    watch.output(0, REDUCES.encode())
    assert "  rank 0 on n1 waits in all_reduce" in watch.report() and "starting" not in watch.report()
