"""Trains every feature of the matrix under stage 3, every second one under another stage too, and compares it
with plain torch.

With `--every-case` under all. One set of processes runs a group of features; each is a test of its own here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from tests.matrix.group import Results, describe, run_group
from tests.matrix.registry import STAGES, Feature, load_features

pytestmark = pytest.mark.exhaustive

FEATURES = load_features()
_results: dict[str, Results] = {}


@pytest.fixture(scope="session")
def features(pytestconfig: pytest.Config) -> Mapping[str, Feature]:
    """Give the features, each with the stages that it is trained under."""
    if pytestconfig.getoption("--every-case"):
        return FEATURES
    turns = {key: (number % 3, 3) if number % 2 else (3,) for number, key in enumerate(FEATURES)}
    return {
        key: replace(each, stages=turns[key]) if each.stages == STAGES else each
        for key, each in FEATURES.items()
    }


@pytest.fixture
def results(request: pytest.FixtureRequest, features: Mapping[str, Feature], key: str) -> Results:
    """Give the results of the feature's group, which runs at the first of its features that was selected."""
    group = features[key].group
    if group not in _results:
        selected = [getattr(item, "callspec", None) for item in request.session.items]
        keys = {spec.params.get("key") for spec in selected if spec is not None}
        chosen = [(k, f) for k, f in features.items() if f.group == group and k in keys]
        _results[group] = run_group(chosen)
    return _results[group]


@pytest.mark.parametrize(
    "key",
    [pytest.param(key, marks=pytest.mark.needs("g++")) if "inductor" in key else key for key in FEATURES],
)
def test_feature(key: str, features: Mapping[str, Feature], results: Results) -> None:
    wrong = describe(results[key])
    if wrong:
        pytest.fail(wrong, pytrace=False)
    assert results[key].keys() == set(features[key].stages)
