"""Where things rest."""

from zlaunch.compat.deepspeed.pickled import OffloadDeviceEnum, OffloadStateTypeEnum

__all__ = ["OffloadDeviceEnum", "OffloadStateTypeEnum"]
