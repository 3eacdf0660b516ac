"""Checking a plain dict against the models: unknown keys, "auto", values, support, cross checks."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from . import optim
from .fields import Level, Section, real
from .schema import Config

S = TypeVar("S", bound=Section)
_LATER: dict[Level, str] = {
    "speed": "not supported yet, ignored (it changes only speed or diagnostics)",
    "results": "is not supported yet, and ignoring it would change results or memory use; remove it",
}
_EXPECTED = {
    "bool_type": "true or false",
    "string_type": "a string",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}


@dataclass
class Report:
    """What was found; every list keeps the order of the file."""

    strict: bool = True
    problems: list[tuple[str, str]] = field(default_factory=list)
    warnings: list[tuple[str, str]] = field(default_factory=list)
    given: set[str] = field(default_factory=set)
    auto: set[str] = field(default_factory=set)


def check(data: dict[str, Any]) -> tuple[Config | None, Report]:
    """Validate `data`; the config is None only if there are problems."""
    report = Report(strict=data.get("strict") is not False)
    clean = _walk(data, Config, "", report)
    _named(clean, "optimizer", report)
    _named(clean, "scheduler", report)
    config = _validate(Config, clean, "", report)
    if config is not None:
        _support(config, "", report)
        _cross(config, report)
    return config, report


def show(value: Any) -> str:
    """Return `value` as short JSON."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = f"this {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."


def join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def extra(info: FieldInfo) -> dict[str, Any]:
    return info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}


def section_of(info: FieldInfo) -> type[Section] | None:
    """Return the model of a sub-section, or None for a plain value."""
    for kind in (info.annotation, *get_args(info.annotation)):
        if isinstance(kind, type) and issubclass(kind, Section):
            return kind
    return None


@cache
def names(model: type[Section]) -> dict[str, str]:
    """Map every accepted spelling to the field's name."""
    spelled = {
        alias: name for name, info in model.model_fields.items() for alias in extra(info).get("aliases", ())
    }
    return {**{name: name for name in model.model_fields}, **spelled}


@cache
def _homes() -> dict[str, str]:
    """Map each key to the section it lives in, to help with a key in the wrong place."""
    homes: dict[str, str] = {}

    def visit(model: type[Section], path: str) -> None:
        for spelling in names(model):
            homes[spelling] = "" if spelling in homes else path  # an ambiguous key gets no advice
        for name, info in model.model_fields.items():
            if inner := section_of(info):
                visit(inner, join(path, name))

    visit(Config, "")
    return homes


def _unknown(key: str, path: str, known: list[str]) -> str:
    ours = optim.OTHER_NAMES.get(key, "")
    if close := [ours] if ours in known else difflib.get_close_matches(key, known, 1):
        return f"unknown key, did you mean {close[0]}?"
    if (home := _homes().get(key)) and home != path:
        return f"unknown key here, it belongs in {home}"
    if path == "" or len(known) > 12:
        return "unknown key"
    return f"unknown key, expected one of {', '.join(known)}"


def _takes_auto(info: FieldInfo) -> bool:
    """Tell whether "auto" is a value of this field itself."""
    seen: list[Any] = [info.annotation]
    for kind in seen:
        if kind == "auto" or kind is Any:
            return True
        seen += get_args(kind)
    return False


def _walk(data: dict[str, Any], model: type[Section], path: str, report: Report) -> dict[str, Any]:
    """Return `data` under the fields' own names, without unknown keys and "auto"."""
    clean: dict[str, Any] = {}
    spellings = names(model)
    seen: dict[str, str] = {}
    for key, value in data.items():
        name = spellings.get(key)
        here = join(path, name or key)
        if name is None and model.model_config.get("extra") == "allow":
            clean[key] = value
            report.given.add(here)
            continue
        if name is None:
            advice = _unknown(key, path, list(spellings))
            if report.strict:
                report.problems.append((here, advice))
            else:
                report.warnings.append((here, advice + " (ignored)"))
            continue
        if name in seen:
            report.problems.append((here, f"given twice, as {seen[name]} and as {key}"))
            continue
        seen[name] = key
        info = model.model_fields[name]
        inner = section_of(info)
        if inner is None and value == "auto" and not _takes_auto(info):
            report.auto.add(here)
        elif inner is not None and value is None:
            continue
        elif inner is not None and isinstance(value, dict):
            clean[name] = _walk(value, inner, here, report)
        else:
            report.given.add(here)
            clean[name] = value
    return clean


def _named(clean: dict[str, Any], key: str, report: Report) -> None:
    """Check the type and the params of the optimizer or the scheduler, in place."""
    part = clean.get(key)
    if not isinstance(part, dict):
        return
    models = optim.OPTIMIZER_PARAMS if key == "optimizer" else optim.SCHEDULER_PARAMS
    known = optim.OPTIMIZERS if key == "optimizer" else optim.SCHEDULERS
    later = optim.LATER_OPTIMIZERS if key == "optimizer" else optim.LATER_SCHEDULERS
    path = f"{key}.params"
    if part.get("params", {}) is None:
        del part["params"]
    params = part.get("params", {})
    if key == "optimizer" and isinstance(params, dict) and "max_grad_norm" in params:
        report.problems.append((f"{path}.max_grad_norm", "set gradient_clipping at the top level instead"))
        params = part["params"] = {k: v for k, v in params.items() if k != "max_grad_norm"}
    kind = part.get("type")
    if not isinstance(kind, str):
        return
    canonical = {name.lower(): name for name in (*known, *later)}.get(kind.lower())
    if canonical is None:
        close = difflib.get_close_matches(kind, known, 1, 0.5)
        advice = f"did you mean {close[0]}?" if close else f"expected one of {', '.join(known)}"
        report.problems.append((f"{key}.type", f"{show(kind)} is not known, {advice}"))
        return
    if canonical in later:
        report.problems.append((f"{key}.type", f"{show(kind)} is not supported yet"))
        return
    part["type"] = canonical
    if not isinstance(params, dict):
        return
    report.given.discard(path)
    if model := models.get(canonical):
        checked = _validate(model, _walk(params, model, path, report), path, report)
        if checked is None:
            return
        _support(checked, path, report)
        for name in model.required:
            if getattr(checked, name) is None and f"{path}.{name}" not in report.auto:
                report.problems.append((f"{path}.{name}", f"is required for {canonical}"))
        part["params"] = checked.model_dump(exclude_unset=True)
    else:
        part["params"] = _free_params(params, path, report)


def _free_params(params: dict[str, Any], path: str, report: Report) -> dict[str, Any]:
    """Take arguments of a torch class as they are; YAML's numeric strings become numbers."""
    clean: dict[str, Any] = {}
    for name, value in params.items():
        if name in optim.OTHER_NAMES:
            report.problems.append((f"{path}.{name}", _unknown(name, path, [optim.OTHER_NAMES[name]])))
        if value == "auto":
            report.auto.add(f"{path}.{name}")
            continue
        report.given.add(f"{path}.{name}")
        number = real(value) if isinstance(value, str) else None
        clean[name] = value if number is None else number
    return clean


def _validate(model: type[S], data: dict[str, Any], path: str, report: Report) -> S | None:
    """Build the model; wrong values are reported and dropped, so that the other checks still run."""
    for _ in range(4):
        try:
            return model.model_validate(data)
        except ValidationError as error:
            for item in error.errors(include_url=False):
                loc = item["loc"]
                here = ".".join(str(part) for part in ((path, *loc) if path else loc))
                report.problems.append((here, _message(item)))  # type: ignore[arg-type]
                _drop(data, loc)
    return None


def _message(item: dict[str, Any]) -> str:
    kind = item["type"]
    context = item.get("ctx") or {}
    if kind == "missing":
        return "is required"
    if kind == "value_error":
        expected = str(context.get("error"))
    elif kind == "literal_error":
        expected = "one of " + str(context.get("expected")).replace("'", "").replace(" or ", ", ")
    else:
        expected = _EXPECTED.get(kind, "") or item["msg"]
    return f"{show(item['input'])} is not allowed, expected {expected}"


def _drop(data: dict[str, Any], loc: tuple[int | str, ...]) -> None:
    """Delete what `loc` names, or the innermost object around it that holds it."""
    parent, name = data, loc[0]
    for part in loc[1:]:
        inner = parent.get(str(name))
        if not isinstance(inner, dict) or part not in inner:
            break
        parent, name = inner, part
    parent.pop(str(name), None)


def _support(part: Section, path: str, report: Report) -> None:
    """Report keys that are known but not supported yet and set to something else than their default."""
    fields = type(part).model_fields
    if part.gate:
        if getattr(part, part.gate) == fields[part.gate].default:
            return
        fields = {part.gate: fields[part.gate]}
    for name, info in fields.items():
        value = getattr(part, name)
        level = extra(info).get("support")
        here = join(path, name)
        if isinstance(value, Section) and level is None:
            _support(value, here, report)
            continue
        level = level or part.level
        off = value == info.default or (info.default is None and not value)
        if level == "supported" or (isinstance(value, Section) and info.default_factory) or off:
            continue
        if level == "speed":
            report.warnings.append((here, _LATER["speed"]))
        else:
            default = "" if info.default is None else f" or set it to {show(info.default)}"
            given = "" if isinstance(value, (dict, Section)) else show(value) + " "
            report.problems.append((here, f"{given}{_LATER['results']}{default}"))


def _cross(config: Config, report: Report) -> None:
    """Check what depends on several keys."""
    problems = report.problems
    if config.fp16.enabled and config.bf16.enabled:
        problems.append(("bf16.enabled", "fp16 and bf16 are both enabled, enable only one"))
    if config.gradient_allreduce_op == "sum" and config.zero_optimization.stage == 3:
        problems.append(("gradient_allreduce_op", '"sum" is not allowed with ZeRO stage 3, expected "mean"'))
    _offload(config, problems)
    grad = config.data_types.grad_accum_dtype
    if grad not in (None, "fp32"):
        problems.append(
            ("data_types.grad_accum_dtype", f'{show(grad)} {_LATER["results"]} or set it to "fp32"')
        )
    mode = "fp16" if config.fp16.enabled else "bf16" if config.bf16.enabled else "fp32"
    param = config.data_types.param_dtype
    unsettled = report.auto & {"fp16.enabled", "bf16.enabled"}
    if param not in (None, mode) and not unsettled:
        problems.append(
            ("data_types.param_dtype", f"{show(param)} does not agree with the training type {mode}")
        )


def _offload(config: Config, problems: list[tuple[str, str]]) -> None:
    zero = config.zero_optimization
    if config.aio.block_size % 4096:
        problems.append(("aio.block_size", f"{config.aio.block_size} is not a multiple of 4096"))
    for name, part, stages in (
        ("offload_optimizer", zero.offload_optimizer, (1, 2, 3)),
        ("offload_param", zero.offload_param, (3,)),
    ):
        if part is None or part.device == "none":
            continue
        here = f"zero_optimization.{name}"
        if zero.stage not in stages:
            wanted = "stage 1, 2 or 3" if len(stages) > 1 else "stage 3"
            problems.append((f"{here}.device", f"{show(part.device)} needs {wanted}, not {zero.stage}"))
        if part.device == "nvme" and not part.nvme_path:
            problems.append((f"{here}.nvme_path", 'is required for device "nvme": a folder on that drive'))
