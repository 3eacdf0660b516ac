"""Defines what the layers of other stages do in a forward pass: hand on what they get."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ParameterError
from ..zero import placeholder
from ..zero.output_tensors import tensors_in
from .line import Line, modules_of
from .trial import ForeignValues


@dataclass
class PartPass:
    """Holds a forward pass through one part of the pipeline."""

    start: int
    stop: int
    received: Any
    """What the part before has handed on; None at the first."""
    captured: Any = None
    """What this part hands on; None at the last."""
    last: Any = None
    """What the last layer that was called has returned."""
    version: int = 0
    """Counts how often that had been changed in place when it was returned."""
    called: int = 0
    """The number of layers that were called."""
    foreign: ForeignValues | None = None
    """Follows what stands for other stages' values, in a trial pass."""

    def stand_in(self, value: Any) -> Any:
        """Return what stands for a value that another stage computes."""
        return value if self.foreign is None else self.foreign.stand_in(value)

    def check_own(self, value: Any, what: str) -> None:
        """Raise ParameterError if a trial pass has computed a value from what other stages have."""
        if self.foreign is not None and self.foreign.are_in(value):
            raise ParameterError(
                f"pipeline parallelism: {what} depends on another stage's values (an output from before or "
                "between the layers, or its parameters); a stage gets only the output of the preceding "
                "layer"
            )


class LayerForward:
    """Replaces a layer's forward: computes it in a pass through its part, and hands on in others what it
    gets, or what this part was given by the one before.
    """

    def __init__(self, module: nn.Module, index: int, passes: Passes) -> None:
        self.module, self.index, self.passes = module, index, passes
        self.inner = module.__dict__.get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if placeholder.in_backward():
            return self._compute(*args, **kwargs)  # a recomputation: only what was computed is
        run = self.passes.run
        if run is None:
            raise ParameterError(
                "pipeline parallelism: a layer was called outside engine.train_batch and eval_batch"
            )
        hidden = args[0] if args else next(iter(kwargs.values()))
        self._check(run, hidden, (args[1:], {k: v for k, v in kwargs.items() if v is not hidden}))
        run.called += 1
        if run.start <= self.index < run.stop:
            run.check_own((args, kwargs), f"an input of {self._name}")
            output = self._compute(*args, **kwargs)
            run.check_own(output, f"the output of {self._name}")
        elif self.index == run.start - 1:
            output = run.received
        else:
            if self.index == run.stop:
                run.captured = hidden
            output = run.stand_in(hidden)
        run.last, run.version = output, _version(output)
        return output

    def _compute(self, *args: Any, **kwargs: Any) -> Any:
        if self.inner is not None:
            return self.inner(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    @property
    def _name(self) -> str:
        return f"{self.passes.line.name}.{self.index}".lstrip(".")

    def _check(self, run: PartPass, hidden: Any, rest: Any) -> None:
        """Raise ParameterError if layers do not simply follow each other."""
        name = self._name
        if run.called != self.index:
            raise ParameterError(
                f"pipeline parallelism: {name} is layer {self.index} of the model, but was called as layer "
                f"{run.called}"
            )
        if self.index and (hidden is not run.last or _version(hidden) != run.version):
            raise ParameterError(
                f"pipeline parallelism: the input of {name} is not the output of the preceding layer: the "
                "model computes something between them, or layers return several tensors. (Checkpoints "
                "around layers need use_reentrant=False)"
            )
        if any(tensor.requires_grad for tensor in tensors_in(rest)):
            raise ParameterError(
                f"pipeline parallelism: {name} gets a second tensor that requires a gradient, which stages "
                "cannot send"
            )


def _version(value: Any) -> int:
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


class Passes:
    """Holds the pass that is going on through a part of the pipeline."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.run: PartPass | None = None

    def __deepcopy__(self, memo: Any) -> Passes:
        return self


class OutsideForward:
    """Replaces the forward of a module outside of the layers: computes it in a pass through the part that it
    belongs to. In others it returns zeros of the shape that its output would have, or what it gets, which
    nobody uses.
    """

    def __init__(self, module: nn.Module, name: str, is_early: bool, passes: Passes) -> None:
        self.module, self.name, self.is_early, self.passes = module, name, is_early, passes
        self.inner = module.__dict__.get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the module, or stand for it. Raises ParameterError if it is used on the other side of the
        layers than it is registered.
        """
        run, line = self.passes.run, self.passes.line
        if run is None or placeholder.in_backward():
            if any(parameter.numel() == 0 for parameter in self.module.parameters()):
                raise ParameterError(
                    f"pipeline parallelism: {self.name}, which is on another stage, was called outside "
                    "engine.train_batch and eval_batch"
                )
            return self._compute(*args, **kwargs)
        if run.called != (0 if self.is_early else len(line.layers)):
            when, place = ("after", "before") if self.is_early else ("before", "after")
            raise ParameterError(
                f"pipeline parallelism: {self.name} is used {when} the layers but registered {place} them"
            )
        if (run.start == 0) if self.is_early else (run.stop == len(line.layers)):
            return self._compute(*args, **kwargs)
        given: Tensor = args[0] if args else next(iter(kwargs.values()))
        module = self.module
        if isinstance(module, nn.Embedding):
            zero = torch.zeros((), dtype=module.weight.dtype, device=given.device)
            return run.stand_in(zero.expand(*given.shape, module.embedding_dim))
        if isinstance(module, nn.Linear):
            return run.stand_in(given.new_zeros(()).expand(*given.shape[:-1], module.out_features))
        return run.stand_in(given)

    def _compute(self, *args: Any, **kwargs: Any) -> Any:
        if self.inner is not None:
            return self.inner(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)


def install(line: Line, passes: Passes) -> None:
    """Replace the forwards of the layers, and of the modules with parameters outside of them.

    Raises ParameterError for a module that cannot be left out.
    """
    layers = {id(each) for layer in line.layers for each in modules_of(layer)}
    has_passed = False
    for name, module in line.model.named_modules():
        has_passed = has_passed or name == line.name
        own = [p for p in module._parameters.values() if p is not None]
        contains = not name or line.name == name or line.name.startswith(f"{name}.")
        if id(module) in layers or contains or not own:
            continue
        simple = isinstance(module, (nn.Embedding, nn.Linear)) or all(p.dim() < 2 for p in own)
        if not simple or next(module.children(), None) is not None:
            raise ParameterError(
                f"pipeline parallelism: {name}, a {type(module).__name__}, must run on every stage, which "
                "is not supported"
            )
        module.forward = OutsideForward(module, name, not has_passed, passes)
    for index, layer in enumerate(line.layers):
        layer.forward = LayerForward(layer, index, passes)
