"""``zlaunch.zero``: building models sharded, and reaching into sharded ones."""

from zlaunch.runtime.script.construct import GatheredParameters, Init
from zlaunch.runtime.script.tiled_linear import TiledLinear, TiledLinearReturnBias

__all__ = ["GatheredParameters", "Init", "TiledLinear", "TiledLinearReturnBias"]
