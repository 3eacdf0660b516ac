"""Names for loaders, and of config keys."""

from zlaunch.compat.deepspeed.config import GRADIENT_CLIPPING, GRADIENT_CLIPPING_DEFAULT

ROUTE_TRAIN = "train"
ROUTE_EVAL = "eval"
ROUTE_PREDICT = "predict"
ROUTE_ENCODE = "encode"
__all__ = [
    "GRADIENT_CLIPPING",
    "GRADIENT_CLIPPING_DEFAULT",
    "ROUTE_ENCODE",
    "ROUTE_EVAL",
    "ROUTE_PREDICT",
    "ROUTE_TRAIN",
]
