"""Test the batch sizes of a run that may continue on another number of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zlaunch.runtime.config import ConfigError, check_batch, load, resolve
from zlaunch.runtime.world_sizes import FirstBatch, read_first_batches, read_world_sizes, write_world_sizes

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
GAS = "gradient_accumulation_steps"


def batch(
    source: Any, world: int, sizes: tuple[int, ...], first: int | None = None
) -> tuple[tuple[int | None, ...], str]:
    """Return the batch sizes and the warnings of an attempt on `world` ranks; `first`: the global batch of
    the first attempt, on all ranks.
    """
    batches = () if first is None else (FirstBatch(first, 2, sizes[0]),)
    effective = resolve(load(source), world_size=world, world_sizes=sizes, first_batches=batches)
    config = effective.config
    found = config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps
    return found, "\n".join(effective.batch_warnings)


def refusal(source: Any, sizes: tuple[int, ...]) -> str:
    """Return why the first attempt is refused."""
    with pytest.raises(ConfigError) as caught:
        resolve(load(source), world_size=sizes[0], world_sizes=sizes)
    (problem,) = caught.value.problems
    return problem


def test_a_micro_batch_alone_keeps_the_global_batch_by_accumulation() -> None:
    sizes = (4, 1, 2, 3)
    assert batch({MICRO: 2}, 4, sizes) == ((8, 2, 1), "")
    assert batch({MICRO: 2}, 2, sizes, 8) == ((8, 2, 2), "")
    assert batch({MICRO: 2}, 1, sizes, 8) == ((8, 2, 4), "")
    assert batch({MICRO: 4}, 2, sizes, 8) == ((8, 4, 1), ""), "the script has derived it from the ranks"


def test_an_engine_repeats_one_with_its_micro_batch_and_only_on_other_ranks() -> None:
    """A script that skips its first phase makes the second engine alone."""
    first = (FirstBatch(16, 8, 2), FirstBatch(4, 2, 2))
    for world, accumulation in ((2, 1), (1, 2)):
        found = resolve(load({MICRO: 2}), world_size=world, world_sizes=(2, 1), first_batches=first)
        assert not found.batch_warnings
        assert (found.config.train_batch_size, found.config.gradient_accumulation_steps) == (4, accumulation)


def test_first_batches_are_written_as_they_are_read() -> None:
    first = (FirstBatch(16, 8, 2), FirstBatch(4, 2, 2))
    assert read_first_batches(" ".join(map(str, first))) == first and read_first_batches("") == ()
    with pytest.raises(ValueError, match="'6' is not"):
        read_first_batches("6")


def test_a_global_batch_that_cannot_be_kept_is_said_with_the_old_one() -> None:
    found, warning = batch({MICRO: 2}, 2, (3, 2), 6)
    assert found == (4, 2, 1)
    assert warning == (
        "<dict>: the global batch is 4 on 2 ranks, and 6 in the first attempt: 6 is not a multiple of "
        f"{MICRO} 2 * world size 2"
    )


def test_a_first_attempt_without_all_nodes_has_the_batch_of_all_where_that_is_sure(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({MICRO: 2}))
    assert batch(str(path), 2, (4, 2)) == ((8, 2, 2), "")
    found, warning = batch({MICRO: 2}, 2, (4, 2))
    assert found == (4, 2, 1) and "and 8 on all 4 with the same micro-batch" in warning


def test_ranks_that_share_samples_count_once() -> None:
    source = {MICRO: 2, "parallel": {"tensor": 2}}
    assert batch(source, 4, (8, 4), 8) == ((8, 2, 2), "")
    assert "a restart on 3 ranks, which --min_nodes or --spares allows, would fail: parallel.tensor: 2" in (
        refusal(source, (4, 3))
    )


@pytest.mark.parametrize("more", [{GAS: 1}, {"managed_gradient_accumulation": False}])
def test_who_counts_micro_batches_alone_keeps_the_count(more: dict[str, Any]) -> None:
    """The Trainer and accelerate set the accumulation, and step at their own boundaries."""
    found, warning = batch({MICRO: 2, **more}, 2, (4, 2), 8)
    assert found == (4, 2, 1) and "the global batch is 4 on 2 ranks, and 8 in the first attempt" in warning
    assert next(iter(more)) in warning


def test_a_step_in_the_backward_pass_has_one_micro_batch() -> None:
    zero = {"stage": 2, "step_in_backward": True}
    found, warning = batch({MICRO: 2, "zero_optimization": zero}, 2, (4, 2), 8)
    assert found == (4, 2, 1) and "zero_optimization.step_in_backward" in warning
    assert "a restart on 2 ranks" in refusal({TRAIN: 8, MICRO: 2, "zero_optimization": zero}, (4, 2))


def test_interleaved_stages_take_multiples_of_their_number() -> None:
    source = {
        TRAIN: 24,
        MICRO: 2,
        "parallel": {"pipeline": 2},
        "pipeline": {"stages": 2, "schedule": "interleaved"},
    }
    assert "a restart on 8 ranks" in refusal(source, (6, 8))


@pytest.mark.parametrize(
    ("source", "advice"),
    [
        ({TRAIN: 6, MICRO: 2}, "set it to 12, leave it out, or raise --min_nodes"),
        ({TRAIN: 9}, f"set it to 12, leave it out and give {MICRO}, or raise --min_nodes"),
    ],
)
def test_a_batch_size_that_a_restart_would_refuse_is_refused_at_the_first_start(
    source: dict[str, Any], advice: str
) -> None:
    for refused in (refusal(source, (3, 2)), _before_launch(source, (3, 2))):
        assert refused.startswith("<dict>: a restart on 2 ranks, which --min_nodes or --spares allows, would")
        assert f"{TRAIN}: {source[TRAIN]} is not a multiple of" in refused and refused.endswith(advice)
    assert batch(source, 3, (3,))[1] == ""


def _before_launch(source: Any, sizes: tuple[int, ...]) -> str:
    with pytest.raises(ConfigError) as caught:
        check_batch(load(source), sizes)
    return str(caught.value)


def test_all_three_keys_of_a_file_are_refused_and_of_a_script_warned_of(tmp_path: Path) -> None:
    """The Trainer passes a dict with all three, which it derives from the number of ranks."""
    source = {TRAIN: 12, MICRO: 2, GAS: 2}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(source))
    assert refusal(str(path), (3, 2)).endswith(f"leave out {GAS}, or raise --min_nodes")
    found, warning = batch(source, 3, (3, 2))
    assert found == (12, 2, 2) and "unless the script derives these sizes" in warning
    found, warning = batch({**source, TRAIN: 8}, 2, (3, 2), 12)
    assert found == (8, 2, 2) and "the global batch is 8 on 2 ranks, and 12 in the first attempt" in warning


def test_ranks_that_the_launcher_did_not_count_are_on_their_own() -> None:
    assert batch({TRAIN: 6, MICRO: 2}, 1, (3, 2)) == ((6, 2, 3), "")


@given(st.integers(1, 8), st.lists(st.integers(1, 8), min_size=1, max_size=4, unique=True))
def test_every_attempt_of_a_config_that_starts_can_run(micro: int, sizes: list[int]) -> None:
    source = {TRAIN: 24, MICRO: micro}
    try:
        first, _ = batch(source, sizes[0], tuple(sizes))
    except ConfigError:
        assert any(24 % (micro * size) for size in sizes)
        return
    assert all(batch(source, size, tuple(sizes))[0][0] == first[0] for size in sizes)


@given(st.lists(st.integers(1, 200), min_size=1, unique=True))
def test_world_sizes_as_text(sizes: list[int]) -> None:
    found = read_world_sizes(write_world_sizes(sizes))
    assert found[0] == sizes[0] and sorted(found) == sorted(sizes)


def test_the_text_of_many_world_sizes_is_short() -> None:
    assert write_world_sizes((8000, *range(8, 8000, 8))) == "8000 8-7992:8"
    for text in ("8 x", "0", "8-16", "8-16:0", "-8"):
        with pytest.raises(ValueError, match="is not a number of ranks"):
            read_world_sizes(text)
