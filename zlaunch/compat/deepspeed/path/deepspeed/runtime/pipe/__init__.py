"""Where layers that ranks divide are defined."""

from zlaunch.compat.deepspeed.missing import absent as _absent

from . import engine as engine
from . import module as module
from . import topology as topology
from .module import LayerSpec as LayerSpec
from .module import PipelineModule as PipelineModule
from .module import TiedLayerSpec as TiedLayerSpec
from .topology import ProcessTopology as ProcessTopology

__getattr__ = _absent("deepspeed.runtime.pipe")
