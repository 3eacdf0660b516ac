"""Which modules are gathered as one."""

from zlaunch.compat.deepspeed.config import DeepSpeedZeroLeafModuleConfig
from zlaunch.compat.deepspeed.missing import absent as _absent

_defaults = DeepSpeedZeroLeafModuleConfig()
DEFAULT_LEAF_MODULE_CLASSES: list[str] = _defaults.classes
DEFAULT_LEAF_MODULE_NAMES: list[str] = _defaults.names
DEFAULT_LEAF_MODULE_NAME_SUFFIXES: list[str] = _defaults.name_suffixes
__getattr__ = _absent("deepspeed.runtime.zero.leaf_module_config")
