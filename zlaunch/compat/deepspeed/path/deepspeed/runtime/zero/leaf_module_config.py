"""Which modules are gathered as one."""

from zlaunch.compat.deepspeed.config import DeepSpeedZeroLeafModuleConfig
from zlaunch.compat.deepspeed.missing import absent as _absent

__getattr__ = _absent("deepspeed.runtime.zero.leaf_module_config")
