"""Sequence parallelism is not here."""

from zlaunch.compat.deepspeed.missing import missing_class

_INSTEAD = "long sequences: activation_checkpointing with cpu_checkpointing, or torch's context_parallel"
UlyssesSPAttentionHF = missing_class("runtime.sequence_parallel.ulysses_sp.UlyssesSPAttentionHF", _INSTEAD)
UlyssesSPDataLoaderAdapter = missing_class(
    "runtime.sequence_parallel.ulysses_sp.UlyssesSPDataLoaderAdapter", _INSTEAD
)
