"""Test YAML's merge keys in a config: a mapping may have several, but no other key twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from zlaunch.runtime.config import ConfigError, load


def write(folder: Path, text: str) -> str:
    path = folder / "ds.yaml"
    path.write_text(text)
    return str(path)


def test_a_mapping_may_merge_two_others(tmp_path: Path) -> None:
    """Each `<<` is a key of its own to YAML, and none is a key of the config."""
    text = "zero_optimization:\n  <<: &a {stage: 2}\n  <<: &b {overlap_comm: false}\n"
    zero = load(write(tmp_path, f"train_batch_size: 4\n{text}")).config.zero_optimization
    assert (zero.stage, zero.overlap_comm) == (2, False)


def test_what_a_mapping_says_itself_wins_over_what_it_merges(tmp_path: Path) -> None:
    text = "zero_optimization:\n  stage: 1\n  <<: {stage: 2}\n  <<: {stage: 3}\n"
    assert load(write(tmp_path, text)).config.zero_optimization.stage == 1


@pytest.mark.parametrize(
    "text",
    [
        "  stage: 1\n  stage: 2\n",
        "  <<: {stage: 1, stage: 2}\n",
        "  <<: {stage: 1}\n  stage: 1\n  stage: 2\n",
    ],
)
def test_a_key_that_is_given_twice_is_refused_beside_a_merge_key_and_in_one(
    tmp_path: Path, text: str
) -> None:
    with pytest.raises(ConfigError, match=r"stage: key is given twice \(line \d\)"):
        load(write(tmp_path, f"zero_optimization:\n{text}"))
