"""Pipeline parallelism is not here."""

from zlaunch.compat.deepspeed.missing import PIPELINE, absent, missing_class

PipelineModule = missing_class("pipe.PipelineModule", PIPELINE)
LayerSpec = missing_class("pipe.LayerSpec", PIPELINE)
TiedLayerSpec = missing_class("pipe.TiedLayerSpec", PIPELINE)

__getattr__ = absent("deepspeed.pipe")
