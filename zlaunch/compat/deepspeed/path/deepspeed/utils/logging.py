"""The logger."""

from zlaunch.compat.deepspeed.log import log_dist, log_dist_once, logger, set_log_level_from_string
from zlaunch.compat.deepspeed.tools import print_json_dist, warning_once
