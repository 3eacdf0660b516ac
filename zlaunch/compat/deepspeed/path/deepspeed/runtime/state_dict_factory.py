"""Loading of Megatron's checkpoints, which zlaunch leaves to Megatron's tools."""

from zlaunch.compat.deepspeed.missing import MODULES as _MODULES
from zlaunch.compat.deepspeed.missing import missing_class as _missing

_INSTEAD = _MODULES["runtime.state_dict_factory"]
SDLoaderFactory = _missing("runtime.state_dict_factory.SDLoaderFactory", _INSTEAD)
MegatronSDLoader = _missing("runtime.state_dict_factory.MegatronSDLoader", _INSTEAD)
