"""Files by torch.save, for scripts that write their own."""

from zlaunch.compat.deepspeed.missing import absent as _absent

from .checkpoint_engine import CheckpointCommitInfo, CheckpointEngine
from .torch_checkpoint_engine import TorchCheckpointEngine

__getattr__ = _absent("deepspeed.runtime.checkpoint_engine")
