"""``zlaunch.zero``: building models sharded, and reaching into sharded ones."""

from zlaunch.runtime.construction.init import Init
from zlaunch.runtime.zero.gathered import GatheredParameters

__all__ = ["GatheredParameters", "Init"]
