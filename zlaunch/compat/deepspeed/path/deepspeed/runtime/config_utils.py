"""Reading of configs."""

from collections import Counter as _Counter
from typing import Any as _Any

from zlaunch.compat.deepspeed.config import DeepSpeedConfigModel, get_scalar_param
from zlaunch.compat.deepspeed.missing import absent as _absent

get_list_param = get_scalar_param
get_dict_param = get_scalar_param


def dict_raise_error_on_duplicate_keys(ordered_pairs: list[tuple[str, _Any]]) -> dict[str, _Any]:
    """Make a dict: an ``object_pairs_hook`` of json. Raises ValueError for a key that comes twice."""
    doubled = [key for key, count in _Counter(key for key, _ in ordered_pairs).items() if count > 1]
    if doubled:
        raise ValueError(f"the config has the keys {', '.join(doubled)} more than once")
    return dict(ordered_pairs)


__all__ = [
    "DeepSpeedConfigModel",
    "dict_raise_error_on_duplicate_keys",
    "get_dict_param",
    "get_list_param",
    "get_scalar_param",
]
__getattr__ = _absent("deepspeed.runtime.config_utils")
