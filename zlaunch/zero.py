"""``zlaunch.zero``: building models sharded, and reaching into sharded ones."""

from zlaunch.runtime.zero.init import GatheredParameters, Init

__all__ = ["GatheredParameters", "Init"]
