"""Finds in a script's source whether it trains with a Trainer of Hugging Face."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

_PACKAGES = ("transformers", "trl")
_PARSERS = ("HfArgumentParser", "TrlParser")


@dataclass(frozen=True, slots=True)
class TrainerUse:
    """Describes a script that imports a Trainer."""

    parses_arguments: bool
    """True if the script reads TrainingArguments from its command line."""


def trainer_use(script: str) -> TrainerUse | None:
    """Return how `script` uses a Trainer; None if it imports none, or cannot be read as Python."""
    try:
        tree = ast.parse(Path(script).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    names = set()
    modules = _module_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in _PACKAGES:
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute) and _first_name(node) in modules:
            names.add(node.attr)
    if not any(name.endswith("Trainer") for name in names):
        return None
    return TrainerUse(parses_arguments=not names.isdisjoint(_PARSERS))


def takes_deepspeed_config(script: str) -> bool:
    """Tell whether `script` calls `deepspeed.add_config_arguments`, and so takes --deepspeed_config."""
    try:
        tree = ast.parse(Path(script).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False
    called = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return any(
        isinstance(function, ast.Attribute)
        and function.attr == "add_config_arguments"
        and _first_name(function) == "deepspeed"
        for function in called
    )


def _module_names(tree: ast.Module) -> set[str]:
    """Return the names under which the script has imported the packages, or modules of theirs."""
    imported = [alias for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    ours = [alias for alias in imported if alias.name.split(".")[0] in _PACKAGES]
    return {*_PACKAGES, *(alias.asname or alias.name.split(".")[0] for alias in ours)}


def _first_name(node: ast.expr) -> str | None:
    """Return the `transformers` of `transformers.trainer.Trainer`."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None
