"""The base class."""

from zlaunch.compat.deepspeed.checkpoint_files import CheckpointCommitInfo, CheckpointEngine
