"""``zlaunch.zero``: building models sharded, and reaching into sharded ones."""

from zlaunch.runtime.offload.options import init_stores
from zlaunch.runtime.zero.init import GatheredParameters, ShardedInit

__all__ = ["GatheredParameters", "Init"]


class Init(ShardedInit):
    """Builds a model sharded, on the device, in host memory or on disk."""

    __doc__ = ShardedInit.__doc__
    make_stores = staticmethod(init_stores)
