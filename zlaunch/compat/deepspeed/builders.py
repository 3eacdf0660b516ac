"""``deepspeed.ops.op_builder``: scripts ask these for a name and whether an operation is there."""

from __future__ import annotations

from typing import Any, NoReturn

from zlaunch.compat.deepspeed.missing import NotInZlaunch


class OpBuilder:
    """An operation of DeepSpeed's; ours need no building."""

    NAME = ""

    def is_compatible(self, verbose: bool = False) -> bool:
        """Tell whether the runtime does what the operation is for."""
        return True

    def load(self, verbose: bool = True) -> NoReturn:
        """Refuse: there is no extension module."""
        raise NotInZlaunch(f"no extension {self.NAME!r}: zlaunch has its own kernels and needs no build")

    def builder(self) -> NoReturn:
        """Refuse: there is nothing to build."""
        self.load()

    def absolute_name(self) -> str:
        """Name the place where DeepSpeed would have the operation."""
        return f"deepspeed.ops.{self.NAME}_op"


def _builder(title: str, name: str, there: bool = True) -> Any:
    members = {"NAME": name, "__doc__": f"``{name}``."}
    if not there:
        members["is_compatible"] = lambda self, verbose=False: False  # type: ignore[assignment]
    return type(title, (OpBuilder,), members)


AsyncIOBuilder = _builder("AsyncIOBuilder", "async_io")
CPUAdamBuilder = _builder("CPUAdamBuilder", "cpu_adam")
CPUAdagradBuilder = _builder("CPUAdagradBuilder", "cpu_adagrad")
CPULionBuilder = _builder("CPULionBuilder", "cpu_lion")
FusedAdamBuilder = _builder("FusedAdamBuilder", "fused_adam")
FusedLionBuilder = _builder("FusedLionBuilder", "fused_lion")
FusedLambBuilder = _builder("FusedLambBuilder", "fused_lamb", there=False)
UtilsBuilder = _builder("UtilsBuilder", "utils")
_OTHERS = (
    "transformer",
    "stochastic_transformer",
    "transformer_inference",
    "inference_core_ops",
    "ragged_ops",
    "random_ltd",
    "quantizer",
    "fp_quantizer",
    "sparse_attn",
    "spatial_inference",
    "evoformer_attn",
    "gds",
    "deep_compile",
)
BUILDERS = (
    AsyncIOBuilder,
    CPUAdamBuilder,
    CPUAdagradBuilder,
    CPULionBuilder,
    FusedAdamBuilder,
    FusedLionBuilder,
    FusedLambBuilder,
    UtilsBuilder,
    *(_builder(name, name, there=False) for name in _OTHERS),
)
