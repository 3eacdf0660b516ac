"""The logger."""

from zlaunch.compat.deepspeed.tools import (
    log_dist,
    log_dist_once,
    logger,
    print_dist,
    print_json_dist,
    set_log_level_from_string,
    warning_once,
)
