"""``required_torch_version``."""

from zlaunch.compat.deepspeed.tools import required_torch_version
