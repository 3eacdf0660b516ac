"""Define a mutation: a change of the source that breaks it, and the tests that should notice."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """A piece of source text, and what it is replaced by.

    Args:
        file: Path of the source file from the repository's root, such as ``"runtime/zero/reduce.py"``.
        old: Text that occurs exactly once in the file.
        new: What replaces it.
        breaks: What goes wrong then, in a few words; names the mutation in reports.
        tests: The tests nearest to the code, as arguments of pytest: files or single tests.
    """

    file: str
    old: str
    new: str
    breaks: str
    tests: tuple[str, ...]
