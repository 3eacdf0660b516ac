"""Names that scripts import."""

from datetime import timedelta

TORCH_DISTRIBUTED_DEFAULT_PORT = 29500
CROSS_RANK = "CROSS_RANK"
CROSS_SIZE = "CROSS_SIZE"
LOCAL_RANK = "LOCAL_RANK"
default_pg_timeout = timedelta(minutes=10)
