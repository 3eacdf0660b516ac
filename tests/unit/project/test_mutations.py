"""Test that the recorded mutations still fit the source. ``python -m tests.mutations`` runs them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.mutations.__main__ import mutated, mutations

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.rotated
def test_every_mutation_fits_the_source() -> None:
    """The text to replace occurs once, the new one differs, and Python still compiles the file."""
    found = mutations()
    assert found
    for mutation in found:
        text = (ROOT / mutation.file).read_text()
        assert mutation.new != mutation.old, mutation
        changed = mutated(mutation, text)
        if mutation.file.endswith(".py"):
            compile(changed, mutation.file, "exec")


def test_every_mutation_names_its_tests() -> None:
    for mutation in mutations():
        assert mutation.tests, mutation
        for name in mutation.tests:
            file, _, function = name.partition("::")
            assert (ROOT / file).is_file(), (mutation.breaks, name)
            wanted = f"def {function.partition('[')[0]}(" if function else ""
            assert wanted in (ROOT / file).read_text(), (mutation.breaks, name)


def test_no_two_mutations_have_the_same_words() -> None:
    count = Counter(mutation.breaks for mutation in mutations())
    assert not [breaks for breaks, times in count.items() if times > 1]
