"""The reference page of the config, made from the models: python -m zlaunch.runtime.config.reference."""

from __future__ import annotations

import json
from collections.abc import Iterator

from .field_types import MAX, Section
from .known_keys import extra, join, section_of
from .optimizers import OPTIMIZER_PARAMS, SCHEDULER_PARAMS, AdamParams
from .schema import Config

_SUPPORT = {
    "supported": "yes",
    "speed": "ignored with a warning",
    "results": "refused",
    "always": "always so",
}
_INTRO = """\
# Config reference

Made from the models by `python -m zlaunch.runtime.config.reference`; do not edit.

zlaunch reads DeepSpeed's config files: JSON with comments, YAML, a dict, or url-safe base64 JSON. Keys and
defaults are DeepSpeed's. An unknown key is an error inside a section, and at the top level where it is close
to a known one or belongs elsewhere; another one there is a warning. `strict` makes all of them errors, or
none. A plain value may be `"auto"`.
"Always so" is a key that nothing reads, because its effect is always there or never needed; a file that sets
the opposite is told at the start. "Ignored with a warning" and "refused" hold for keys set to something else
than their default, and in a section with a switch only once the switch is on.
"""


def markdown() -> str:
    """Return the reference as Markdown."""
    parts = [_INTRO, *_section(Config, "", "Top level")]
    parts += _section(AdamParams, "optimizer.params", "`optimizer.params` of Adam and AdamW")
    for name, model in OPTIMIZER_PARAMS.items():
        if model is not AdamParams:
            parts += _section(model, "optimizer.params", f"`optimizer.params` of {name}")
    for name, model in SCHEDULER_PARAMS.items():
        parts += _section(model, "scheduler.params", f"`scheduler.params` of {name}")
    return "\n".join(parts)


def _section(model: type[Section], path: str, title: str) -> Iterator[str]:
    yield f"## {title}\n"
    if path:
        yield f"{(model.__doc__ or '').strip()}\n"
    yield "| key | default | supported | |"
    yield "|---|---|---|---|"
    inner: list[tuple[type[Section], str]] = []
    for name, info in model.model_fields.items():
        below = section_of(info)
        if below:
            inner.append((below, join(path, name)))
        level = extra(info).get("support")
        gated = model.gate not in ("", name)
        support = "" if below and not level else _SUPPORT[level or ("supported" if gated else model.level)]
        support = "with the switch" if gated and model.level != "supported" and not level else support
        if info.is_required():
            default = "required"
        elif below:
            default = "null" if info.default_factory is None else "section"
        else:
            value = info.get_default(call_default_factory=True)
            default = "no limit" if value == MAX and type(value) is int else f"`{json.dumps(value)}`"
        text = " ".join((info.description or "").split())
        if why := extra(info).get("why"):
            text += f" Always: {why}."
        if aliases := extra(info).get("aliases"):
            text += f" Also `{'`, `'.join(aliases)}`."
        yield f"| `{name}` | {default} | {support} | {text} |"
    yield ""
    for below, here in inner:
        yield from _section(below, here, f"`{here}`")


if __name__ == "__main__":
    print(markdown(), end="")
