"""Test the sentence that says what bounds a step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zlaunch.view.bottleneck import find_bottleneck
from zlaunch.view.progress import TIMES

SHORT = ("forward", "backward", "step", "communication", "disk", "script")


def times(**parts: float) -> dict[str, float]:
    """A rank's times; their sum is the whole."""
    found = {f"{name}_ms": parts.get(name, 0.0) for name in SHORT}
    assert tuple(found) == TIMES
    return {**found, "all_ms": sum(found.values())}


@pytest.mark.parametrize(
    ("parts", "kind", "text"),
    [
        (
            {"forward": 30, "backward": 60, "step": 5, "communication": 5},
            "compute",
            "computation bounds the step: forward and backward passes take 90 of 100 ms (90%)",
        ),
        (
            {"forward": 10, "backward": 20, "communication": 70},
            "communication",
            "communication inside of the node bounds the step: ranks wait 70 of 100 ms (70%) for it; "
            "larger micro-batches need less of it",
        ),
        (
            {"forward": 10, "backward": 20, "disk": 70},
            "disk",
            "the disk bounds the step: ranks wait 70 of 100 ms (70%) for it; `zlaunch bench io` measures it",
        ),
        (
            {"forward": 10, "backward": 20, "step": 70},
            "optimizer",
            "the optimizer's step bounds the step: it takes 70 of 100 ms (70%)",
        ),
        (
            {"forward": 10, "backward": 20, "script": 70},
            "script",
            "the script bounds the step: 70 of 100 ms (70%) pass between the engine's calls (data, "
            "evaluation, saving)",
        ),
        (
            {"forward": 30, "script": 70},
            "script",
            "the script bounds the step: 70 of 100 ms (70%) pass between the engine's calls, with its own "
            "backward pass",
        ),
    ],
)
def test_one_part(parts: dict[str, float], kind: str, text: str) -> None:
    found = find_bottleneck({0: times(**parts), 1: times(**parts)}, {0: "n1", 1: "n1"})
    assert found is not None and (found.kind, found.sentence, found.slow_rank) == (kind, text, None)


def test_between_nodes() -> None:
    each = times(forward=10, communication=70)
    found = find_bottleneck({0: each, 1: each}, {0: "n1", 1: "n2"})
    assert found is not None and found.sentence.startswith("communication between 2 nodes bounds the step")


def test_between_nodes_of_which_others_report() -> None:
    """In a step of SLURM each task's launcher knows its own rank."""
    found = find_bottleneck({0: times(forward=10, communication=70)}, {0: "n1"}, node_count=2)
    assert found is not None and found.sentence.startswith("communication between 2 nodes bounds the step")


def test_parts_of_what_was_measured() -> None:
    def sentence(parts: dict[str, float], **facts: float) -> str:
        each = times(**parts)
        found = find_bottleneck({0: each, 1: each}, {0: "n1", 1: "n2"}, facts)
        assert found is not None
        return found.sentence

    busy = {"forward": 30.0, "backward": 60.0, "step": 10.0}
    assert sentence(busy, mfu=0.451).endswith("(90%), at 45% of what matrix multiplications reach here")
    assert sentence(busy, mfu=0.1, micro_tokens=4096.0).startswith("computation bounds the step")
    assert sentence(busy, mfu=0.1, micro_tokens=64.0) == (
        "a small batch bounds the step: forward and backward passes of 64 tokens each take 90 of 100 ms "
        "(90%), at 10% of what matrix multiplications reach here; larger micro-batches may use the device "
        "better"
    )
    sends = {"forward": 10.0, "backward": 20.0, "communication": 70.0}
    speed = ". What a rank moves, 50 MB, takes 50 ms at the 1 GB/s of the start"
    assert sentence(sends, moved_mb=50.0, link_gbs=1.0).endswith(speed)
    few = sentence(sends, moved_mb=5.0, link_gbs=1.0)
    assert few.endswith(": the rest is latency of small messages, or waiting for ranks that are late in turn")
    assert ". What" not in sentence(sends, moved_mb=50.0)
    reads = {"forward": 30.0, "disk": 70.0}
    assert sentence(reads, disk_mb=100.0, disk_gbs=2.0).endswith(
        "`zlaunch bench io` measures it. What a rank moves, 100 MB, takes 50 ms at the 2 GB/s of the start"
    )


@pytest.mark.parametrize("part", [name for name in SHORT if name != "communication"])
def test_a_slow_rank(part: str) -> None:
    usual = {"forward": 10.0, "backward": 20.0, "communication": 55.0, "script": 1.0}
    slow = {**usual, "communication": 5.0, part: usual.get(part, 0.0) + 50.0}
    ranks = {0: times(**usual), 1: times(**slow), 2: times(**usual)}
    found = find_bottleneck(ranks, {0: "n1", 1: "n2", 2: "n2"})
    assert found is not None and (found.kind, found.slow_rank) == ("slow rank", 1)
    assert found.sentence.startswith("rank 1 on n2 bounds the step: the others wait 50 of 86 ms for its ")


def test_a_slow_rank_that_is_waited_for_in_a_collective_of_the_script() -> None:
    fast, slow = (
        times(forward=5, backward=5, script=56, communication=1),
        times(forward=60, backward=5, script=1),
    )
    found = find_bottleneck({0: fast, 1: slow}, {0: "n1", 1: "n1"})
    assert found is not None and found.slow_rank == 1
    assert found.sentence.endswith("for its forward pass")


def test_nothing_is_known() -> None:
    assert find_bottleneck({}, {}) is None


NUMBER = st.floats(0, 1e4)


@given(st.lists(st.tuples(*[NUMBER] * len(SHORT)), min_size=1, max_size=8))
def test_equal_ranks_have_no_slow_one(rows: list[tuple[float, ...]]) -> None:
    each = times(**dict(zip(SHORT, rows[0], strict=True)))
    if each["all_ms"] > 0:
        found = find_bottleneck(dict.fromkeys(range(len(rows)), each), {})
        assert found is not None and found.slow_rank is None
    ranks = {rank: times(**dict(zip(SHORT, row, strict=True))) for rank, row in enumerate(rows)}
    if all(each["all_ms"] > 0 for each in ranks.values()):
        assert find_bottleneck(ranks, {}) is not None
