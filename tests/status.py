"""Write docs/status.md: which tests show each feature, on what, and what was never verified.

    python -m tests.status > docs/status.md

The lists are those of tests/data/features.yaml.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

TESTS = Path(__file__).parent
COLUMNS = {
    "Unit test": ("unit",),
    "One node, CPU": ("runtime", "e2e", "compat", "matrix", "numerics", "pretend_gpu"),
    "Three nodes, CPU": ("cluster",),
    "GPU": ("gpu",),
}
"""The columns of the matrix, and the folders of tests that count for each."""


@dataclass(frozen=True)
class Feature:
    """Something that users can do, and the tests that show that it works."""

    name: str
    tests: Sequence[str]
    note: str = ""


@dataclass(frozen=True)
class Lists:
    """What tests/data/features.yaml holds; its comments explain the fields."""

    gpu_runs: Mapping[str, str]
    project_tests: Sequence[str]
    features: Mapping[str, Sequence[Feature]]
    manual: Sequence[str]
    not_verified: Mapping[str, Sequence[str]]


def read_lists() -> Lists:
    """Return what tests/data/features.yaml holds."""
    data = yaml.safe_load((TESTS / "data" / "features.yaml").read_text())
    groups = {group: [Feature(**each) for each in listed] for group, listed in data["features"].items()}
    return Lists(**{**data, "features": groups})


_HEAD = """\
# Status: what is verified, and where

zlaunch is alpha. Its tests run on CPU workers; {gpu}. This page lists the tests
of each feature, what was verified manually, and [what is not verified](#not-verified).

- ✓ means that CI runs a test of the feature. The mark links to one test; the list below the table has all.
- "One node" has 2 or more CPU workers on one machine.
- "Three nodes" are Linux namespaces on that machine, with a real sshd and slurmd.

[benchmarks/results](../benchmarks/results/README.md) has figures and the commands that measured them.
[Numerics](numerics.md) compares results with plain torch.
"""
_GPU = {False: "**no test ever ran on a GPU**", True: "the column GPU names the tests that ran on a GPU"}
_SETUP = """\
## Setup of the tests

The machine has 2 cores, Linux and no GPU, with Python 3.11 and the versions of `constraints.txt` (torch 2.13
for the CPU). `make test-support` runs `tests/runtime` and `tests/unit` with Python 3.10 and torch 2.6, and
with Python 3.12 and torch 2.11 (builds for CUDA, on the same machine). It leaves out the exhaustive tests and
the tests that `tests/support.py` names.

`make test` runs the shorter tests, `make test-all` all tests. CI runs the shorter tests and a quarter of the
others, so four commits in a row run all of them.

This page is generated from `tests/data/features.yaml`: `python -m tests.status > docs/status.md`.
"""


def files_of(name: str) -> list[Path]:
    """Return the test files that a name in the lists stands for."""
    path = TESTS / name
    return sorted(path.rglob("test_*.py")) if path.is_dir() else [path]


def mark(feature: Feature, column: str, gpu_runs: Mapping[str, str]) -> str:
    """Return what a feature's cell says."""
    tests = [test for test in feature.tests if test.partition("/")[0] in COLUMNS[column]]
    if not tests:
        return ""
    link = f"../tests/{tests[0]}"
    if column != "GPU":
        return f"[✓]({link})"
    runs = [gpu_runs[test] for test in tests if test in gpu_runs]
    return f"[✓]({link}) {runs[-1]}" if runs else f"[written, never run]({link})"


def _table(features: Sequence[Feature], gpu_runs: Mapping[str, str]) -> Iterator[str]:
    yield f"| Feature | {' | '.join(COLUMNS)} |"
    yield "|---|" + ":---:|" * len(COLUMNS)
    for feature in features:
        cells = (mark(feature, column, gpu_runs) for column in COLUMNS)
        yield f"| {feature.name} | {' | '.join(cells)} |"


def _tests(features: Sequence[Feature]) -> Iterator[str]:
    for feature in features:
        names = ", ".join(f"`tests/{test}`" for test in feature.tests)
        yield f"- **{feature.name}**: {feature.note + ' ' if feature.note else ''}Tests: {names}."


def page(lists: Lists) -> str:
    """Return the text of docs/status.md."""
    lines = [_HEAD.format(gpu=_GPU[bool(lists.gpu_runs)]).rstrip("\n")]
    for group, features in lists.features.items():
        lines += ["", f"## {group}", "", *_table(features, lists.gpu_runs), "", *_tests(features)]
    lines += ["", "## Verified manually", "", *(f"- {each}" for each in lists.manual)]
    lines += ["", "## Not verified"]
    for where, what in lists.not_verified.items():
        lines += ["", f"### {where}", "", *(f"- {each}" for each in what)]
    lines += ["", _SETUP.rstrip("\n")]
    return "\n".join(lines) + "\n"


def names(lists: Lists) -> set[str]:
    """Return the names of all tests in the lists."""
    of_features = {test for features in lists.features.values() for each in features for test in each.tests}
    return of_features | set(lists.project_tests) | set(lists.gpu_runs)


if __name__ == "__main__":
    print(page(read_lists()), end="")
