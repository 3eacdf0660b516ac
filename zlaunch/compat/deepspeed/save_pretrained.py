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


class SavePretrained:
    """Replaces ``save_pretrained`` of an engine's module. On a copy of the module it serves the copy."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.is_state_elsewhere = False
        """Records that rank 0 alone got the present state: this rank needs none if it writes nothing."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        original: Any = getattr(type(self._module), _NAME)
        call = inspect.signature(original).bind(self._module, *args, **kwargs)
        given = call.arguments
        # PEFT's takes the state among further keywords.
        place = given if "state_dict" in call.signature.parameters else given.setdefault("kwargs", {})
        is_writer = given.get("is_main_process", True)
        if self.is_state_elsewhere and not is_writer and place.get("state_dict") is None:
            place["state_dict"] = {}
        return original(*call.args, **call.kwargs)


def replace_save_pretrained(module: nn.Module) -> None:
    """Replace the method from the start: scripts look it up before they ask for the state that it gets."""
    if hasattr(type(module), _NAME):
        setattr(module, _NAME, SavePretrained(module))


def restore_save_pretrained(module: nn.Module) -> None:
    """Take :func:`replace_save_pretrained` back."""
    vars(module).pop(_NAME, None)


def note_state(module: nn.Module, *, is_elsewhere: bool) -> None:
    """Note whether rank 0 alone has the module's present state."""
    replaced = vars(module).get(_NAME)
    if isinstance(replaced, SavePretrained):
        replaced.is_state_elsewhere = is_elsewhere
