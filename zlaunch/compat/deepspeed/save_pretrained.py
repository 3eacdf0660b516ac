"""Lets ranks call ``save_pretrained`` with the state that another rank has, as scripts for accelerate do.

Those pass ``is_main_process`` and, at stage 3, the state that rank 0 alone got from the engine. On the others
Transformers would then ask for the module's own state, which is gathered from all ranks: rank 0 would not
take part. They write nothing, so that they need none.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

_NAME = "save_pretrained"


def expect_state_elsewhere(module: nn.Module) -> None:
    """Let this rank's next calls of ``module.save_pretrained`` do without a state, if it writes nothing."""
    if hasattr(type(module), _NAME):
        setattr(module, _NAME, _SavesElsewhere(module))


def forget_state_elsewhere(module: nn.Module) -> None:
    """Take :func:`expect_state_elsewhere` back: after a step, the state that rank 0 got is an old one."""
    vars(module).pop(_NAME, None)


class _SavesElsewhere:
    """Replaces ``save_pretrained`` of a module."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        original: Any = getattr(type(self._module), _NAME)
        call = inspect.signature(original).bind(self._module, *args, **kwargs)
        given = call.arguments
        # PEFT's takes the state among further keywords.
        place = given if "state_dict" in call.signature.parameters else given.setdefault("kwargs", {})
        if given.get("is_main_process") is False and place.get("state_dict") is None:
            place["state_dict"] = {}
        return original(*call.args, **call.kwargs)
