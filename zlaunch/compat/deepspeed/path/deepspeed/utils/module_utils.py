"""Attributes by a dotted name."""

from zlaunch.compat.deepspeed.tools import recursive_getattr, recursive_setattr
