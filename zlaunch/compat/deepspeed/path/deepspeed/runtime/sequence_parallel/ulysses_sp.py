"""Sequence parallelism is not here."""

from zlaunch.compat.deepspeed.missing import SEQUENCES, missing_class

UlyssesSPAttentionHF = missing_class("runtime.sequence_parallel.ulysses_sp.UlyssesSPAttentionHF", SEQUENCES)
UlyssesSPDataLoaderAdapter = missing_class(
    "runtime.sequence_parallel.ulysses_sp.UlyssesSPDataLoaderAdapter", SEQUENCES
)
