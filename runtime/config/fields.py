"""Value types, support levels and the base class that every config section shares."""

from __future__ import annotations

import ast
import inspect
import math
import numbers
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, WithJsonSchema

# -- field types ------------------------------------------------------------------------------------


Level = Literal["supported", "speed", "results", "always"]
MAX = sys.maxsize


class Section(BaseModel):
    """A config section: unknown keys are refused and values never change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    level: ClassVar[Level] = "supported"
    """Support level of the fields that name none themselves."""
    gate: ClassVar[str] = ""
    """The field that switches the section on; while it has its default, the rest says nothing."""


class OpenSection(Section):
    """A section that is only recognised: its keys are kept, not checked."""

    model_config = ConfigDict(extra="allow")


def describe_fields(model: type[Section]) -> dict[str, str]:
    """Return what each field of a section is for, by its name: its docstring in the source, or the text that
    it was made with. Fields of a module whose source is not there are missing.

    Only the reference page and the schema need these. pydantic's `use_attribute_docstrings` parses every
    class when it is defined, which took more than half of the time of each import of the config.
    """
    described: dict[str, str] = {}
    for kind in reversed(model.__mro__):
        described |= _docstrings(kind.__module__).get(kind.__name__, {})
    described |= {name: info.description for name, info in model.model_fields.items() if info.description}
    return {name: described[name] for name in model.model_fields if name in described}


@cache
def _docstrings(module: str) -> dict[str, dict[str, str]]:
    """Return the docstrings of fields in a module: class -> field -> text."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError):
        return {}
    classes = (node for node in tree.body if isinstance(node, ast.ClassDef))
    return {node.name: dict(_documented(node.body)) for node in classes}


def _documented(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    """Yield the fields that a string follows, with that string."""
    for field, after in pairwise(body):
        match field, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield name, inspect.cleandoc(text)


def ok(default: Any, *aliases: str) -> Any:
    """Return a field that the runtime reads, also accepted under `aliases`."""
    return Field(default, json_schema_extra={"aliases": list(aliases)} if aliases else {})


def always(default: Any, why: str, *aliases: str, holds: Any = None) -> Any:
    """Return a field that needs no reading, and say why: its effect is always there, or never needed.

    ``holds`` is the value that always holds: a file that sets another is told so; None if any will do.
    """
    extra: dict[str, Any] = {"support": "always", "why": why}
    if aliases:
        extra["aliases"] = list(aliases)
    if holds is not None:
        extra["holds"] = holds
    return Field(default, json_schema_extra=extra)


def section(model: type[Section], *aliases: str) -> Any:
    """Return a sub-section that is filled with its defaults when absent."""
    return Field(default_factory=model, json_schema_extra={"aliases": list(aliases)} if aliases else {})


def real(value: Any) -> int | float | None:
    """Return `value` as a number, reading numeric strings (YAML reads 5e8 as one); None if it is not."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        if len(value) > 64:
            return None
        try:
            return int(value)
        except ValueError:
            try:
                return float(value)
            except ValueError:
                return None
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    return None


def _finite(value: Any) -> int | float | None:
    """Return `value` as a number that fits a finite float; None if it is not one."""
    number = real(value)
    try:
        return number if number is not None and math.isfinite(number) else None
    except OverflowError:  # of a huge whole number
        return None


def _whole(low: int, high: int = MAX, infinite: bool = False) -> Callable[[Any], int | None]:
    """Return a validator for whole numbers; with `infinite`, inf means never and becomes None."""
    bound = f"a whole number, {low} or more" if high == MAX else f"a whole number from {low} to {high}"
    expected = bound + (" (or inf)" if infinite else "")

    def check(value: Any) -> int | None:
        if infinite and (value is None or real(value) == math.inf):
            return None
        number = _finite(value)
        if number is None or number != int(number) or not low <= number <= high:
            raise ValueError(expected)
        return int(number)

    return check


def _size(low: int) -> Callable[[Any], int]:
    """Return a validator for element counts: fractions are cut, anything huge means no limit."""

    def check(value: Any) -> int:
        number = _finite(value)
        if number is None or number < low:
            raise ValueError(f"a number, {low} or more")
        return min(int(number), MAX)

    return check


def _float(low: float | None = None, high: float = math.inf, above: bool = False) -> Callable[[Any], float]:
    """Return a validator for finite numbers from `low` (or `above` it) to `high`."""
    least = -math.inf if low is None else low
    expected = "a number"
    if low is not None:
        expected += f" above {low:g}" if above else f", {low:g} or more"
    if high != math.inf:
        expected += f", at most {high:g}"

    def check(value: Any) -> float:
        number = _finite(value)
        if number is None or number < least or number > high or (above and number == least):
            raise ValueError(expected)
        return float(number)

    return check


def _per_group(value: Any) -> float | list[float]:
    """Validate a number for all param groups, or a list of a number for each."""
    number = _float(0)
    try:
        return [number(each) for each in value] if isinstance(value, list) else number(value)
    except ValueError as error:
        raise ValueError(f"{error}, or a list of one for each param group") from None


def _schema(kind: str, low: float | None = None, high: float | None = None, above: bool = False) -> Any:
    schema: dict[str, Any] = {"type": kind}
    if low is not None:
        schema["exclusiveMinimum" if above else "minimum"] = low
    if high is not None:
        schema["maximum"] = high
    return WithJsonSchema(schema)


def _betas(value: Any) -> list[float]:
    numbers_ = [real(item) for item in value] if isinstance(value, (list, tuple)) else []
    good = [float(n) for n in numbers_ if n is not None and 0 <= n < 1]
    if len(good) != 2 or len(numbers_) != 2:
        written = [float(n) for n in re.findall(r"\d*\.\d+", value)] if isinstance(value, str) else []
        example = written if len(written) == 2 and max(written) < 1 else [0.9, 0.999]
        raise ValueError(f"two numbers, 0 or more and below 1, such as {example}")
    return good


def _stage(value: Any) -> int:
    number = real(value)
    if number not in (0, 1, 2, 3):
        raise ValueError("one of 0, 1, 2, 3")
    return int(number or 0)


_DTYPES = {
    **dict.fromkeys(("fp16", "float16", "half"), "fp16"),
    **dict.fromkeys(("bf16", "bfloat16"), "bf16"),
    **dict.fromkeys(("fp32", "float32", "float"), "fp32"),
}


def _dtype(value: Any) -> str:
    name = value.lower().removeprefix("torch.") if isinstance(value, str) else ""
    if name not in _DTYPES:
        raise ValueError("one of fp16, bf16, fp32 (or float16, bfloat16, float32)")
    return _DTYPES[name]


def _low_dtype(value: Any) -> str:
    name = value.lower().removeprefix("torch.") if isinstance(value, str) else ""
    if _DTYPES.get(name, "fp32") == "fp32":
        raise ValueError("one of bfloat16, float16 (or bf16, fp16)")
    return _DTYPES[name]


_LEVELS = ("debug", "info", "warning", "error", "critical")


def _log_level(value: Any) -> str:
    name = value.lower() if isinstance(value, str) else ""
    if name not in _LEVELS:
        raise ValueError(f"one of {', '.join(_LEVELS)}")
    return name


def _epsilons(value: Any) -> list[float | None]:
    given = list(value) if isinstance(value, (list, tuple)) else []
    numbers = [0.0 if place == 0 and each is None else _finite(each) for place, each in enumerate(given)]
    good = [number for number in numbers if number is not None and number >= 0]
    if len(good) != 2 or len(given) != 2:
        raise ValueError("two numbers of 0 or more, such as [null, 0.001]; the first may be null")
    return [None if given[0] is None else good[0], good[1]]


def _auto_int(value: Any) -> int | str:
    if value == "auto":
        return "auto"
    number = _finite(value)
    if number is None or number != int(number) or number < 1:
        raise ValueError('"auto" or a whole number, 1 or more')
    return int(number)


Bool = StrictBool
Count = Annotated[int, BeforeValidator(_whole(1)), _schema("integer", 1)]
Whole = Annotated[int, BeforeValidator(_whole(0)), _schema("integer", 0)]
Integer = Annotated[int, BeforeValidator(_whole(-1)), _schema("integer", -1)]
Power = Annotated[int, BeforeValidator(_whole(0, 127)), _schema("integer", 0, 127)]
Steps = Annotated[int | None, BeforeValidator(_whole(1, infinite=True)), _schema("number", 1)]
Size = Annotated[int, BeforeValidator(_size(0)), _schema("number", 0)]
Bucket = Annotated[int, BeforeValidator(_size(1)), _schema("number", 1)]
Number = Annotated[float, BeforeValidator(_float()), _schema("number")]
Positive = Annotated[float, BeforeValidator(_float(0, above=True)), _schema("number", 0, above=True)]
NonNegative = Annotated[float, BeforeValidator(_float(0)), _schema("number", 0)]
PerGroup = Annotated[
    float | list[float],
    BeforeValidator(_per_group),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "minimum": 0},
                {"type": "array", "items": {"type": "number", "minimum": 0}},
            ]
        }
    ),
]
Fraction = Annotated[float, BeforeValidator(_float(0, 1)), _schema("number", 0, 1)]
Epsilons = Annotated[
    list[float | None],
    BeforeValidator(_epsilons),
    WithJsonSchema(
        {"type": "array", "items": {"type": ["number", "null"]}, "minItems": 2, "maxItems": 2},
    ),
]
Betas = Annotated[
    list[float],
    BeforeValidator(_betas),
    WithJsonSchema({"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2}),
]
Stage = Annotated[Literal[0, 1, 2, 3], BeforeValidator(_stage)]
Dtype = Annotated[Literal["fp16", "bf16", "fp32"], BeforeValidator(_dtype)]
LowDtype = Annotated[Literal["fp16", "bf16"], BeforeValidator(_low_dtype)]
LogLevel = Annotated[Literal["debug", "info", "warning", "error", "critical"], BeforeValidator(_log_level)]
AutoInt = Annotated[
    Literal["auto"] | int,
    BeforeValidator(_auto_int),
    WithJsonSchema({"anyOf": [{"const": "auto"}, {"type": "integer", "minimum": 1}]}),
]


# -- spellings --------------------------------------------------------------------------------------
#
# Old spellings that DeepSpeed still takes, turned into today's before anything is checked.


Problems = list[tuple[str, str]]
_MOVED = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}


_STOCHASTIC = "zlaunch rounds them stochastically, where DeepSpeed rounds to the nearest"


def modern(data: dict[str, Any]) -> tuple[dict[str, Any], Problems, Problems]:
    """Return the config in zlaunch's spelling, leaving ``data`` as it is, what is wrong with the old one, and
    what is different.
    """
    data, problems = _modern_offload(data)
    data, more, notes = _modern_bf16(data)
    data, curves = _known_warmup(data)
    return data, problems + more, notes + curves


WARMUP_TYPES = ("log", "linear")


def _known_warmup(data: dict[str, Any]) -> tuple[dict[str, Any], Problems]:
    """Replace a schedule's unknown ``warmup_type`` by the default, as DeepSpeed does."""
    section = data.get("scheduler")
    params = section.get("params") if isinstance(section, dict) else None
    if not isinstance(section, dict) or not isinstance(params, dict):
        return data, []
    kind = params.get("warmup_type")
    if not isinstance(kind, str) or kind in (*WARMUP_TYPES, "auto"):
        return data, []
    note = (
        "scheduler.params.warmup_type",
        f'"{kind}" is taken as "log", as in DeepSpeed: the curves are {" and ".join(WARMUP_TYPES)}',
    )
    return {**data, "scheduler": {**section, "params": {**params, "warmup_type": WARMUP_TYPES[0]}}}, [note]


def _modern_bf16(data: dict[str, Any]) -> tuple[dict[str, Any], Problems, Problems]:
    """Add the keys of what DeepSpeed's switches for a step in bf16 keep in bf16."""
    bf16 = data.get("bf16")
    if not isinstance(bf16, dict) or bf16.get("enabled", False) is False:
        return data, [], []
    problems: Problems = []
    notes: Problems = []
    masters = "bf16_master_weights_and_grads"
    if bf16.get(masters) is True:
        data = {**data, "bf16": {"master_weights": "stochastic", **bf16}}
        notes.append((f"bf16.{masters}", _STOCHASTIC))
        if data["bf16"]["master_weights"] != "stochastic":
            problems.append((f"bf16.{masters}", "true contradicts master_weights: remove one of them"))
    states = "bf16_optimizer_states"
    if bf16.get(states) is True:
        optimizer = data.get("optimizer")
        params = optimizer.get("params") or {} if isinstance(optimizer, dict) else None
        notes.append((f"bf16.{states}", _STOCHASTIC))
        if optimizer is None:
            why = "true needs the optimizer in the config: a script's own chooses the type of its state"
            problems.append((f"bf16.{states}", why))
        elif isinstance(params, dict):
            params = {"state_dtype": "bf16", **params}
            data = {**data, "optimizer": {**optimizer, "params": params}}
            if params["state_dtype"] != "bf16":
                why = "true contradicts optimizer.params.state_dtype: remove one of them"
                problems.append((f"bf16.{states}", why))
    return data, problems, notes


def _modern_offload(data: dict[str, Any]) -> tuple[dict[str, Any], Problems]:
    """Turn the old switches of offload, and a bool as the whole section, into sections."""
    zero = data.get("zero_optimization")
    if isinstance(zero, bool):
        return {**data, "zero_optimization": {"stage": int(zero)}}, []
    if not isinstance(zero, dict) or not zero.keys() & _MOVED.keys():
        return data, []
    problems: Problems = []
    moved = {key: value for key, value in zero.items() if not (key in _MOVED and isinstance(value, bool))}
    for old, new in _MOVED.items():
        if zero.get(old) is not True:
            continue
        if zero.get(new) is not None:
            problems.append((f"zero_optimization.{old}", f"is the old spelling of {new}, give only that"))
        else:
            moved[new] = {"device": "cpu"}
    return {**data, "zero_optimization": moved}, problems
