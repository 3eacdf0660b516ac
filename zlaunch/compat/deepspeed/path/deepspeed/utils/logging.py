"""The logger."""

from zlaunch.compat.deepspeed.log import log_dist, log_dist_once, logger, set_log_level_from_string
from zlaunch.compat.deepspeed.tools import print_json_dist, warning_once

__all__ = [
    "log_dist",
    "log_dist_once",
    "logger",
    "print_json_dist",
    "set_log_level_from_string",
    "warning_once",
]
