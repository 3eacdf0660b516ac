"""Test that the styles of all Hugging Face plans are known, and what their patterns mean."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import pytest
from torch import nn

from zlaunch.runtime.tensor_parallel.plan import STYLES, find_plan

transformers = pytest.importorskip("transformers")


def plans() -> dict[str, dict[str, str]]:
    """Return the plan of every config class that has one."""
    found = {}
    models = importlib.import_module("transformers.models")
    for module in pkgutil.iter_modules(models.__path__):
        name = f"transformers.models.{module.name}.configuration_{module.name}"
        try:
            configs = importlib.import_module(name)
        except ImportError:
            continue
        for key, value in vars(configs).items():
            plan = getattr(value, "base_model_tp_plan", None)
            if isinstance(value, type) and value.__module__ == name and isinstance(plan, dict) and plan:
                found[f"{module.name}.{key}"] = plan
    return found


LISTED = {"mla_kv_a_proj", "moe_identity_expert", "sequence_parallel"}
"""Styles that are refused by name."""


def test_the_styles_of_all_plans_are_known_or_listed() -> None:
    found = plans()
    assert len(found) > 100
    unknown = {style for plan in found.values() for style in plan.values()} - STYLES - LISTED
    assert not unknown - {"colwise_rep", "rowwise_rep"}


def test_a_plan_of_patterns_names_modules_and_parameters() -> None:
    model = nn.ModuleDict(
        {"layers": nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), "head": nn.Linear(4, 2)}
    )
    plan: dict[str, Any] = find_plan(model, {"layers.*": "colwise", "head.weight": "rowwise"})
    assert plan == {"layers.0": "colwise", "layers.1": "colwise", "head.weight": "rowwise"}
