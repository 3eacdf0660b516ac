"""Counts the operations of each module in one micro-batch, by torch's own counter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ..config.schema import FlopsProfilerSection
from ..log import fail, show


class FlopsProfiler:
    """Counts the floating point operations of the first micro-batch of one step.

    A multiply and an add are two. What torch's FlopCounterMode does not know, such as element-wise operations
    and kernels of one's own, counts as nothing.
    """

    def __init__(
        self,
        module: nn.Module,
        section: FlopsProfilerSection,
        steps: Callable[[], int],
        on_counted: Callable[[int], None],
    ) -> None:
        """Profile a model; ``steps`` returns the steps that have been made, ``on_counted`` is given the
        operations of a micro-batch, forward and backward.
        """
        self._module = module
        self._prefix = f"{type(module).__name__}."  # as the counter names it
        self._section = section
        self._steps = steps
        self._on_counted = on_counted
        self._forward: dict[str, int] | None = None
        self._is_done = False

    def surround(self, name: str, call: AbstractContextManager[None]) -> AbstractContextManager[None]:
        """Return a call with a counter around it, if it is one to be counted."""
        if self._forward is None:
            return self._counted(call) if name == "forward" and self._is_due() else call
        if self._is_done:
            return call
        if name == "step":  # the script has called backward of its own loss
            self._finish(0)
        return self._counted(call) if name == "backward" else call

    def _is_due(self) -> bool:
        return torch.is_grad_enabled() and self._steps() >= self._section.profile_step

    @contextmanager
    def _counted(self, call: AbstractContextManager[None]) -> Iterator[None]:
        counter = FlopCounterMode(display=False)
        with call, counter:
            yield
        if self._forward is None:
            self._forward = self._by_module(counter)
            return
        self._finish(int(counter.get_total_flops()))

    def _finish(self, backward: int) -> None:
        assert self._forward is not None
        self._is_done = True
        self._on_counted(self._forward[""] + backward)
        self._print(describe(self._module, self._forward, backward, self._steps() + 1, self._section))

    def _by_module(self, counter: FlopCounterMode) -> dict[str, int]:
        """Return the operations by the module's name; "" is the whole model."""
        found = {"": int(counter.get_total_flops())}
        for name, by_operation in counter.get_flop_counts().items():
            if name.startswith(self._prefix):
                found[name.removeprefix(self._prefix)] = sum(by_operation.values())
        return found

    def _print(self, lines: list[str]) -> None:
        if self._section.output_file is None:
            for line in lines:
                show(line)
            return
        try:
            Path(self._section.output_file).write_text("\n".join(lines) + "\n")
        except OSError as error:
            fail(f"flops_profiler.output_file {self._section.output_file}: {error.strerror}")


def describe(
    module: nn.Module,
    forward: Mapping[str, int],
    backward: int,
    step: int,
    section: FlopsProfilerSection,
) -> list[str]:
    """Return the lines that show a profile. ``forward``: operations by module name, "" for all of them."""
    parameters = sum(parameter.numel() for parameter in module.parameters())
    back = amount(backward) if backward else "unknown: no engine.backward(loss) call"
    lines = [
        f"zlaunch: FLOPs of a micro-batch in step {step}: forward {amount(forward[''])}, "
        f"backward {back}; {parameters:,} parameters"
    ]
    modules = dict(module.named_modules())
    by_depth: dict[int, list[str]] = {}
    for name in forward:
        depth = name.count(".") + 1 if name else 0
        if name in modules and (section.module_depth < 0 or depth <= section.module_depth):
            by_depth.setdefault(depth, []).append(name)
    whole = max(forward[""], 1)
    for depth, names in sorted(by_depth.items()):
        top = sorted(names, key=lambda name: forward[name], reverse=True)[: section.top_modules]
        shares = ", ".join(f"{name} {forward[name] / whole:.1%}" for name in top)
        lines += [f"  most at depth {depth}: {shares}"] if depth else []
    if section.detailed:
        shown = {name for names in by_depth.values() for name in names}
        for name, each in modules.items():  # in the model's own order
            if name in shown:
                indent = "  " * (name.count(".") + 1 if name else 0)
                own = sum(parameter.numel() for parameter in each.parameters())
                title = f"({name.rpartition('.')[2]}) " if name else ""
                lines.append(
                    f"  {indent}{title}{type(each).__name__}: {amount(forward[name])}, "
                    f"{forward[name] / whole:.1%}, {own:,} parameters"
                )
    return lines


def amount(operations: int) -> str:
    """Write a number of operations: ``1.77 GFLOP``."""
    for factor, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if operations >= factor:
            return f"{operations / factor:.3g} {unit}FLOP"
    return f"{operations} FLOP"
