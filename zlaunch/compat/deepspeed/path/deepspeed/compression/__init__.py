"""Only what projects use that compress nothing."""

from zlaunch.compat.deepspeed.missing import absent

from . import helper as helper

__getattr__ = absent("deepspeed.compression")
