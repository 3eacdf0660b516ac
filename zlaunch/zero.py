"""``zlaunch.zero``: building models sharded, and reaching into sharded ones."""

from zlaunch.runtime.script.construct import GatheredParameters, Init

__all__ = ["GatheredParameters", "Init"]
