"""Sequence parallelism."""

from . import parallel_state_sp as parallel_state_sp
from . import ulysses_sp as ulysses_sp
