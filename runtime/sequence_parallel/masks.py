"""Lets Hugging Face models make masks of whole sequences, where each rank has a part of each."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..errors import ParameterError

_MADE_LOCALLY = ("or_mask_function", "and_mask_function", "block_sequence_ids", "encoder_hidden_states")


@dataclass(frozen=True, slots=True)
class WholeSequences:
    """Holds what a forward pass knows of the whole sequences."""

    length: int
    position_ids: Tensor | None
    """The positions of all tokens, (batch or 1, length), which tell documents in one row apart; None where
    the model would not ask: transformers do so without a cache alone."""


passes: list[WholeSequences] = []
"""Holds the forward passes that are going on, the innermost last."""


def wrap_mask_functions(model: nn.Module) -> bool:
    """Let the functions that make masks, where the model's modules use them, make those of whole sequences
    while a pass of :data:`passes` is going on. Tell whether there are any.
    """
    from transformers import masking_utils

    makers = {
        getattr(masking_utils, name): name
        for name in dir(masking_utils)
        if name.startswith("create_") and name.endswith("_mask")
    }
    found = False
    for name in {type(module).__module__ for module in model.modules()}:
        namespace: dict[str, Any] = vars(sys.modules[name])
        if namespace is vars(masking_utils):
            continue
        for key, value in list(namespace.items()):
            if inspect.isfunction(value) and value in makers:
                namespace[key] = _of_whole_sequences(value)
            found = found or hasattr(namespace[key], "zlaunch_wraps")
    return found


def _of_whole_sequences(make: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(make)

    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        if not passes:
            return make(*args, **kwargs)
        whole, given = passes[-1], signature.bind(*args, **kwargs).arguments
        problems = [name for name in _MADE_LOCALLY if given.get(name) is not None]
        if given.get("past_key_values") is not None:
            problems.append("past_key_values")
        if problems:
            raise ParameterError(
                f"sequence parallelism: the model builds its masks with {problems[0]}, which is not supported"
            )
        # only the shape of the embeddings is asked for
        given["inputs_embeds"] = given["inputs_embeds"][:, :1].expand(-1, whole.length, -1)
        if given.get("position_ids") is not None:
            given["position_ids"] = whole.position_ids
        return make(**given)

    made.zlaunch_wraps = make  # type: ignore[attr-defined]  # marks what is wrapped already
    return made
