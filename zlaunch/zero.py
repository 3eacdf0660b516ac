"""``zlaunch.zero``: building models sharded, and reaching into sharded ones."""

from zlaunch.runtime.construction.gathered import GatheredParameters
from zlaunch.runtime.construction.init import Init

__all__ = ["GatheredParameters", "Init"]
