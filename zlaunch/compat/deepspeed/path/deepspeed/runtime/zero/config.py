"""The stages."""

from zlaunch.compat.deepspeed.pickled import ZeroStageEnum

__all__ = ["ZeroStageEnum"]
