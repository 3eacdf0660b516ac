"""Where things rest."""

from zlaunch.compat.deepspeed.pickled import OffloadDeviceEnum

__all__ = ["OffloadDeviceEnum"]
