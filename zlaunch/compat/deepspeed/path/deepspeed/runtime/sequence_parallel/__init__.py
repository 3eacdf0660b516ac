"""Sequence parallelism is not here."""

from . import ulysses_sp as ulysses_sp
