"""Pipeline parallelism is not here."""

from zlaunch.compat.deepspeed.missing import missing_class

_INSTEAD = "pipeline parallelism is for Megatron or torch.distributed.pipelining"
PipelineModule = missing_class("pipe.PipelineModule", _INSTEAD)
LayerSpec = missing_class("pipe.LayerSpec", _INSTEAD)
TiedLayerSpec = missing_class("pipe.TiedLayerSpec", _INSTEAD)
