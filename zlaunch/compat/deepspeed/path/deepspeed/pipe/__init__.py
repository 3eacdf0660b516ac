"""Layers that ranks divide."""

from zlaunch.compat.deepspeed.missing import absent as _absent
from zlaunch.compat.deepspeed.pipe import LayerSpec as LayerSpec
from zlaunch.compat.deepspeed.pipe import PipelineModule as PipelineModule
from zlaunch.compat.deepspeed.pipe import TiedLayerSpec as TiedLayerSpec

__getattr__ = _absent("deepspeed.pipe")
