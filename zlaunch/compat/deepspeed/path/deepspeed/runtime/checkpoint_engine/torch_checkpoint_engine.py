"""By torch.save."""

from zlaunch.compat.deepspeed.checkpoint_files import TorchCheckpointEngine
