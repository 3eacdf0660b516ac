"""Checking a plain dict against the models: unknown keys, "auto", values, support, cross checks."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, TypeVar, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from . import optimizers
from .cross_checks import LATER, cross, show
from .field_types import Section, real
from .foreign_keys import CONTAINERS, FOREIGN, WAY_OUT, Advice, advise
from .forms import as_switch, forms, required_form, section_form
from .known_keys import extra, join, names, section_at, section_of, unknown
from .other_names import read_optimizer, read_scheduler
from .report import ConfigReport
from .schema import EDITOR_KEY, Config
from .spellings import modern

S = TypeVar("S", bound=Section)
_OFFLOADED = "zero_optimization.offload_optimizer.device"
_IGNORED = "not supported yet, ignored (it changes only speed or diagnostics)"
_EXPECTED = {
    "bool_type": "true or false",
    "string_type": "a string",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}


def check(data: dict[str, Any]) -> tuple[Config | None, ConfigReport]:
    """Validate `data`; the config is None only if there are problems."""
    strict = data.get("strict")
    report = ConfigReport(strict=strict if isinstance(strict, bool) else None)
    data, report.problems = modern(data)
    clean = _walk(data, Config, "", report)
    _named(clean, "optimizer", report)
    _named(clean, "scheduler", report)
    config = _validate(Config, clean, "", report)
    if config is not None:
        _support(config, "", report)
        config = cross(config, report)
    _say_the_way_out_once(report)
    if report.without_effect:
        keys = ", ".join(report.without_effect)
        report.warnings.append(("", f"no effect, docs/config.md names the fixed behavior: {keys}"))
    return config, report


def _say_the_way_out_once(report: ConfigReport) -> None:
    """Leave it to the last of the problems that it applies to."""
    found = [index for index, (_, text) in enumerate(report.problems) if text.endswith(WAY_OUT)]
    for index in found[:-1]:
        here, text = report.problems[index]
        report.problems[index] = (here, text.removesuffix(WAY_OUT))


def _takes_auto(info: FieldInfo) -> bool:
    """Tell whether "auto" is a value of this field itself."""
    seen: list[Any] = [info.annotation]
    for kind in seen:
        if kind == "auto" or kind is Any:
            return True
        seen += get_args(kind)
    return False


def _walk(data: dict[str, Any], model: type[Section], path: str, report: ConfigReport) -> dict[str, Any]:
    """Return `data` under the fields' own names, without unknown keys and "auto"."""
    clean: dict[str, Any] = {}
    spellings = names(model)
    seen: dict[str, str] = {}
    for key, value in data.items():
        if not path and key == EDITOR_KEY:
            continue
        name = spellings.get(key)
        here = join(path, name or key)
        if name is None and model.model_config.get("extra") == "allow":
            clean[key] = value
            report.given.add(here)
            continue
        if name is None:
            is_container = not path and key in CONTAINERS
            inside = _look_inside(value, here) if is_container and isinstance(value, dict) else []
            advice = unknown(key, path, spellings, value)
            if advice.text not in [found.text for _, found in inside]:
                inside.insert(0, (here, advice))
            for place, found in inside:
                _report(found, place, report)
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


def _report(advice: Advice, here: str, report: ConfigReport) -> None:
    if report.strict or (advice.is_mistake and report.strict is None):
        report.problems.append((here, advice.text))
    else:
        report.warnings.append((here, f"{advice.text.removesuffix(WAY_OUT)}, ignored"))


def _look_inside(section: dict[str, Any], path: str) -> list[tuple[str, Advice]]:
    """Return what to say about the settings of another tool that stand in a section of that tool."""
    found = [(join(path, key), advise(key, value)) for key, value in section.items()]
    return [(here, advice) for here, advice in found if advice is not None and advice.is_mistake]


def _named(clean: dict[str, Any], key: str, report: ConfigReport) -> None:
    """Check the type and the params of the optimizer or the scheduler, in place."""
    part = clean.get(key)
    if not isinstance(part, dict):
        return
    models = optimizers.OPTIMIZER_PARAMS if key == "optimizer" else optimizers.SCHEDULER_PARAMS
    known = optimizers.OPTIMIZERS if key == "optimizer" else optimizers.SCHEDULERS
    later = optimizers.LATER_OPTIMIZERS if key == "optimizer" else optimizers.LATER_SCHEDULERS
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
        report.problems.append((f"{key}.type", f"{show(kind)} is not known, {_meant(key, kind, known)}"))
        return
    if canonical in later:
        report.problems.append((f"{key}.type", f"{show(kind)} is not supported yet"))
        return
    part["type"] = canonical
    if not isinstance(params, dict):
        return
    report.given.discard(path)
    if "state_dtype" in params and canonical in optimizers.OPTIMIZERS and canonical not in optimizers.NARROW:
        if params["state_dtype"] not in (None, "fp32"):
            why = (
                f"{canonical} supports fp32 state only: use {', '.join(optimizers.NARROW)}, or remove the key"
            )
            report.problems.append((f"{path}.state_dtype", why))
        params = part["params"] = {k: v for k, v in params.items() if k != "state_dtype"}
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


def _meant(key: str, kind: str, known: Sequence[str]) -> str:
    """Return what to write for an unknown type of an optimizer or a scheduler."""
    if read := read_optimizer(kind) if key == "optimizer" else read_scheduler(kind):
        note = " (at stage 1, 2 or 3)" if _OFFLOADED in read else ""
        return f"write {forms(read)}{note}"
    lower = {name.lower(): name for name in known}
    if close := difflib.get_close_matches(kind.lower(), lower, 1, 0.75):
        return f"did you mean {lower[close[0]]}?"
    return f"expected one of {', '.join(known)}"


def _free_params(params: dict[str, Any], path: str, report: ConfigReport) -> dict[str, Any]:
    """Take arguments of a torch class as they are; YAML's numeric strings become numbers."""
    clean: dict[str, Any] = {}
    for name, value in params.items():
        meant = FOREIGN[name].keys if name in FOREIGN else ()
        if any(key.startswith(f"{path}.") and key != f"{path}.{name}" for key in meant):
            report.problems.append((f"{path}.{name}", unknown(name, path, (), value).text))
        if value == "auto":
            report.auto.add(f"{path}.{name}")
            continue
        report.given.add(f"{path}.{name}")
        number = real(value) if isinstance(value, str) else None
        clean[name] = value if number is None else number
    return clean


def _validate(model: type[S], data: dict[str, Any], path: str, report: ConfigReport) -> S | None:
    """Build the model; wrong values are reported and dropped, so that the other checks still run."""
    for _ in range(4):
        try:
            return model.model_validate(data)
        except ValidationError as error:
            for item in error.errors(include_url=False):
                loc = item["loc"]
                here = ".".join(str(part) for part in ((path, *loc) if path else loc))
                report.problems.append((here, _message(item, here)))  # type: ignore[arg-type]
                _drop(data, loc)
    return None


def _message(item: dict[str, Any], path: str) -> str:
    kind, value = item["type"], item["input"]
    context = item.get("ctx") or {}
    if kind == "missing":
        return f"is required{required_form(path)}"
    if kind == "value_error":
        expected = str(context.get("error"))
    elif kind == "literal_error":
        expected = "one of " + str(context.get("expected")).replace("'", "").replace(" or ", ", ")
    else:
        expected = _EXPECTED.get(kind, "") or item["msg"]
    if expected == _EXPECTED["dict_type"]:
        section = section_at(path)
        has_switch = section is not None and "enabled" in section.model_fields
        example = section_form(path, value, has_switch)
        expected += f": {example}" if example else ""
    elif kind == "bool_type" and isinstance(value, str) and (switch := as_switch(value)) is not None:
        quoted = value.strip().lower() in ("true", "false")
        expected = f"{show(switch)}, without quotes" if quoted else show(switch)
    return f"{show(value)} is not allowed, expected {expected}"


def _drop(data: dict[str, Any], loc: tuple[int | str, ...]) -> None:
    """Delete what `loc` names, or the innermost object around it that holds it."""
    parent, name = data, loc[0]
    for part in loc[1:]:
        inner = parent.get(str(name))
        if not isinstance(inner, dict) or part not in inner:
            break
        parent, name = inner, part
    parent.pop(str(name), None)


def _support(part: Section, path: str, report: ConfigReport, feature: str = "") -> None:
    """Report keys that are set to something else than their default and are not used as they say.

    ``feature``: what the section is, if a key that switches it on is to be refused by that name.
    """
    fields = type(part).model_fields
    if part.gate:
        if _is_off(getattr(part, part.gate), fields[part.gate]):
            return
        if part.level != "supported":
            fields = {part.gate: fields[part.gate]}
    for name, info in fields.items():
        value = getattr(part, name)
        level = extra(info).get("support")
        here = join(path, name)
        if isinstance(value, Section) and level is None:
            _support(value, here, report, (info.description or "").rstrip("."))
            continue
        level = level or part.level
        if level == "always":
            holds = extra(info).get("holds", value)
            if here in report.given and value != holds:
                report.without_effect.append(f"{here} {show(value)}")
            continue
        if level == "supported" or (isinstance(value, Section) and info.default_factory):
            continue
        if _is_off(value, info):
            continue
        if level == "speed":
            report.warnings.append((here, _IGNORED))
            continue
        missing = extra(info).get("feature") or (feature if name == part.gate else "")
        default = "" if info.default is None else f" or set it to {show(info.default)}"
        given = "" if isinstance(value, (dict, Section)) else f"{show(value)} "
        asks = f"{given}asks for {missing}, which " if missing else given
        report.problems.append((here, f"{asks}{LATER}{default}"))


def _is_off(value: Any, info: FieldInfo) -> bool:
    """Tell whether the field asks for nothing."""
    return (
        value == info.default or value in extra(info).get("off", ()) or (info.default is None and not value)
    )
