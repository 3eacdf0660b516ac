"""Trains every feature of the matrix under every stage and compares it with plain torch.

One set of processes runs a group of features; each feature is a test of its own here.
"""

from __future__ import annotations

import pytest

from tests.matrix.group import Results, describe, run_group
from tests.matrix.registry import load_features

pytestmark = pytest.mark.exhaustive

FEATURES = load_features()
_results: dict[str, Results] = {}


@pytest.fixture
def results(request: pytest.FixtureRequest, key: str) -> Results:
    """Give the results of the feature's group, which runs at the first of its features that was selected."""
    group = FEATURES[key].group
    if group not in _results:
        selected = [getattr(item, "callspec", None) for item in request.session.items]
        keys = {spec.params.get("key") for spec in selected if spec is not None}
        chosen = [(k, f) for k, f in FEATURES.items() if f.group == group and k in keys]
        _results[group] = run_group(chosen)
    return _results[group]


@pytest.mark.parametrize("key", FEATURES)
def test_feature(key: str, results: Results) -> None:
    wrong = describe(results[key])
    if wrong:
        pytest.fail(wrong, pytrace=False)
    assert results[key].keys() == set(FEATURES[key].stages)
