"""Reads what a Hugging Face model says about itself: its plans for sharing it, and its config."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn


def matching(module: nn.Module, pattern: str) -> list[str]:
    """Return the names of the modules and parameters in a module that a pattern means; "*" is any number."""
    expression = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
    names = [name for name, _ in module.named_modules()]
    names += [name for name, _ in module.named_parameters(remove_duplicate=False)]
    return [name for name in names if expression.fullmatch(name)]


def suggestion(names: Iterable[str], pattern: str) -> str:
    """Return a question about the name that comes next to a pattern that means none; empty without one."""
    if "*" in pattern:
        names = [".".join("*" if part.isdigit() else part for part in name.split(".")) for name in names]
    close = difflib.get_close_matches(pattern, dict.fromkeys(names), 1)
    return f", did you mean {close[0]}?" if close else ""


def own_plan(model: nn.Module, kind: str) -> dict[str, str]:
    """Return the plan of a kind ("tp" or "ep") of the first module that has one, by names in the model."""
    for prefix, module in model.named_modules():
        own: Any = getattr(module, f"_{kind}_plan", None)
        base: Any = getattr(getattr(module, "config", None), f"base_model_{kind}_plan", None)
        if not own and base:
            inner = getattr(module, "base_model_prefix", "")
            inside = f"{inner}." if inner and hasattr(module, inner) else ""
            own = {f"{inside}{name}": style for name, style in base.items()}
        # wrappers such as PEFT's give the plan of the model inside, with its names, as theirs
        if isinstance(own, Mapping) and any(matching(module, name) for name in own):
            return {f"{prefix}.{name}" if prefix else name: style for name, style in own.items()}
    return {}


def text_config(model: nn.Module) -> Any:
    """Return the config of the text model that a model is or contains; None without one."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "get_text_config"):
            return config.get_text_config()
    return getattr(model, "config", None)


def find_hidden_size(model: nn.Module) -> tuple[int | None, str]:
    """Find the width of a model, for ``"auto"`` bucket sizes; return it and where it was found."""
    described = getattr(model, "config", None)
    for name in ("hidden_size", "d_model", "n_embd", "hidden_sizes"):
        value = getattr(described, name, None)
        if isinstance(value, (list, tuple)) and value:
            value = max(value)
        if isinstance(value, int) and not isinstance(value, bool):
            return value, f"model.config.{name}"
    widths = [m.embedding_dim for m in model.modules() if isinstance(m, nn.Embedding)]
    if widths:
        return max(widths), "the model's widest embedding"
    widths = [m.out_features for m in model.modules() if isinstance(m, nn.Linear)]
    return (max(widths), "the model's widest linear layer") if widths else (None, "")


def causal_model(model: nn.Module) -> Any:
    """Return the Hugging Face model that a model is or contains; None without one."""
    transformers = sys.modules.get("transformers.modeling_utils")
    if transformers is None:
        return None
    return next((each for each in model.modules() if isinstance(each, transformers.PreTrainedModel)), None)
