"""Write the results of the table as a page of the documentation."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.numerics.cell import PRECISIONS, RATIO, STEPS, Cell, Result, cells_of
from tests.numerics.families import FAMILIES

RECORDED = Path(__file__).parents[1] / "data" / "numerics_deepspeed.json"
"""What tests.numerics.record_deepspeed wrote."""
HEAD = """\
# Numerics

This page shows how far training under zlaunch is from exact arithmetic, beside plain PyTorch in the same
precision. `make numerics` runs the table and writes this page; don't edit it.

Each cell trains a tiny model for {steps} AdamW steps on two CPU ranks, beside plain PyTorch in one process,
which sums the gradients of the same micro-batches. Both are compared with float64. A cell passes if

- the errors of losses, gradients, master weights and buffers against float64 are at most {ratio} times plain
  PyTorch's, plus a rounding floor ({floors});
- buffers have plain PyTorch's dtypes;
- `save_16bit_model` and the fp32 weights of `save_checkpoint` equal the trained weights bit for bit, under
  plain PyTorch's names.

A tensor's error is the norm of the difference, relative to the tensor's norm. Models with rotary embeddings
(marked R) see positions up to 32767. Models come from their constructor (`plain`), from `zero.Init` (`init`),
from `from_pretrained` (`pretrained`), or get LoRA adapters of PEFT (`peft`). Under `init` in 16 bits a model
draws its initial values in 16 bits, so these are compared in shape alone.

{cells} of the table's {all_cells} cells, {wrong} failed, {refused} refused with an error.
{equal} cells have plain PyTorch's losses and gradients bit for bit in the first step.
transformers {transformers}, peft {peft}, torch {torch}.

## Gradient errors

The largest relative error of a gradient over all stages and ways, then plain PyTorch's in the same
cell.{deepspeed}

"""
DEEPSPEED = """ The last column is DeepSpeed 0.19.8 in bf16: its largest error over stages 1 to 3, from the
same values on the same batches."""


def read_deepspeed(path: Path = RECORDED) -> dict[str, dict[str, Any]]:
    """Read the recorded results of DeepSpeed by family and stage; empty without a record."""
    return dict(json.loads(path.read_text())) if path.exists() else {}


def _worst(results: Iterable[Result]) -> str:
    """Give the largest error of gradients, and plain torch's there."""
    pairs = [result.errors["gradients"] for result in results if "gradients" in result.errors]
    if not pairs:
        return "failed"
    return "{:.1e} / {:.1e}".format(*max(pairs))


def _theirs(recorded: Mapping[str, Any]) -> str:
    """Give the largest error that DeepSpeed's gradients have at any stage, or that it doesn't run."""
    errors = [stage["gradients"] for stage in recorded.values() if "gradients" in stage]
    if not errors:
        return "doesn't run" if recorded else ""
    failed = sorted(number for number, stage in recorded.items() if "gradients" not in stage)
    return f"{max(errors):.1e}" + (f" (not at {', '.join(failed)})" if failed else "")


def page(results: Mapping[Cell, Result], deepspeed: Mapping[str, Mapping[str, Any]]) -> str:
    """Give the text of the page."""
    families: dict[str, dict[str, list[Result]]] = defaultdict(lambda: defaultdict(list))
    for cell, result in results.items():
        families[cell.family][cell.precision].append(result)
    wrong = {cell: result for cell, result in results.items() if result.wrong}
    text = HEAD.format(
        steps=STEPS,
        ratio=RATIO,
        floors=", ".join(f"{name} {precision.floor:.0e}" for name, precision in PRECISIONS.items()),
        cells=len(results),
        all_cells=sum(len(cells_of(family)) for family in FAMILIES),
        wrong=len(wrong),
        refused=sum(result.refused for result in results.values()),
        equal=sum(result.equal for result in results.values()),
        deepspeed=DEEPSPEED if deepspeed else "",
        **{name: version(name) for name in ("transformers", "peft", "torch")},
    )
    columns = ["family", *PRECISIONS, *(["DeepSpeed, bf16"] if deepspeed else [])]
    lines = [_row(columns), _row(["---"] * len(columns))]
    for family, found in families.items():
        name = family + (" (R)" if FAMILIES[family].is_rotary else "")
        cells = [_worst(found[precision]) if precision in found else "" for precision in PRECISIONS]
        lines.append(_row([name, *cells, *([_theirs(deepspeed.get(family, {}))] if deepspeed else [])]))
    if wrong:
        lines += ["", "## Failed cells", ""]
        lines += [f"- `{cell}`: {result.wrong[0].splitlines()[0]}" for cell, result in wrong.items()]
    if refused := [f"`{cell}`" for cell, result in results.items() if result.refused]:
        lines += ["", "## Refused cells", "", REFUSED, "", ", ".join(refused) + "."]
    reasons: dict[str, list[str]] = defaultdict(list)
    for family, stages in deepspeed.items():
        for number, stage in stages.items():
            if "error" in stage:
                reasons[stage["error"]].append(f"{family} ({number})")
    if reasons:
        lines += [
            "",
            "## Where DeepSpeed 0.19.8 doesn't run",
            "",
            "Families, with the stage in parentheses.",
            "",
        ]
        lines += [f"- `{reason}`: {', '.join(where)}" for reason, where in reasons.items()]
    return text + "\n".join(lines) + "\n"


REFUSED = """\
`from_pretrained` at stage 3 ends with an error: transformers initializes loaded modules a second time and
reads the shapes of parameters that are already sharded. DeepSpeed 0.19.8 ends with the same errors. Load
such a model before `TrainingArguments` or `HfDeepSpeedConfig` exist; `initialize` shards it then."""


def _row(columns: Iterable[str]) -> str:
    return "| " + " | ".join(columns) + " |"


def write_page(
    path: Path, results: Mapping[Cell, Result], deepspeed: Mapping[str, Mapping[str, Any]]
) -> None:
    """Write the page."""
    path.write_text(page(results, deepspeed))
