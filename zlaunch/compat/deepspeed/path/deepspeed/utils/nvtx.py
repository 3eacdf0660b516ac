"""``instrument_w_nvtx``."""

from zlaunch.compat.deepspeed.tools import instrument_w_nvtx
