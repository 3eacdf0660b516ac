"""Describe each optimizer in one row. Imports neither torch nor the models of the config.

Note [Optimizer specs]
Each fact about an optimizer is in its row, and nowhere else. All others query the rows: the config (names,
arguments, "auto"), the choice of the step, checkpoints, `zlaunch estimate` and the advice in messages. Rows
name classes by their dotted path, because the command line reads them without importing torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """Describe an optimizer: one row of :data:`SPECS`."""

    name: str
    """The class's own name, which is also the config's ``optimizer.type``."""
    in_config: Literal["supported", "later", "unknown"] = "supported"
    """Whether a config may name it. "later": the config says that it is not supported yet."""
    classes: tuple[str, ...] = ()
    """Dotted paths of its classes. The config builds the first; others are stepped in the same way."""
    other_names: tuple[str, ...] = ()
    """Names of other packages' classes with the same ``needs``."""
    needs: Literal["element", "parameter", "ranks", "unknown"] = "element"
    """What the update of an element depends on: its own gradient and state ("element": it can step flat
    shards and tiles), its whole parameter, or the gradients of all ranks before they are reduced."""
    step: str = ""
    """Dotted path of the CollectiveStep with which ranks step it together; "" if it has none."""
    has_kernel: bool = False
    """Whether a fused kernel steps it, which ``state_dtype`` and stochastic master weights need."""
    states: tuple[str, ...] = ()
    """Names of the tensors that it stores for each element, with the arguments in ``estimated``."""
    parameter_states: tuple[str, ...] = ()
    """Names of the tensors that it stores for a parameter, each of another shape than the parameter's."""
    arguments: str = ""
    """Dotted path of the model that checks its arguments; without one, the class gets them unchecked."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that may be "auto" in a config, with the values they become: torch's defaults."""
    reads: tuple[str, ...] = ()
    """Names of other optimizers whose state in a checkpoint it continues with."""
    estimated: Mapping[str, Any] | None = None
    """Arguments besides lr that `zlaunch estimate` writes into a config; None if it does not offer it."""
    refused: str = ""
    """Why the engine rejects an object of this class, as the end of "it ..."; "" if it does not."""


_ADAM = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
_PLAIN = {"lr": 1e-2, "weight_decay": 0.0}
MOMENTS = ("exp_avg", "exp_avg_sq")

SPECS = (
    OptimizerSpec(
        name="Adam",
        classes=("torch.optim.Adam",),
        has_kernel=True,
        states=MOMENTS,
        arguments="zlaunch.runtime.config.optimizers.AdamParams",
        defaults=_ADAM,
        reads=("AdamW",),
    ),
    OptimizerSpec(
        name="AdamW",
        classes=("torch.optim.AdamW",),
        has_kernel=True,
        states=MOMENTS,
        arguments="zlaunch.runtime.config.optimizers.AdamParams",
        defaults={**_ADAM, "weight_decay": 1e-2},
        reads=("Adam",),
        estimated={},
    ),
    OptimizerSpec(
        name="SGD",
        classes=("torch.optim.SGD",),
        has_kernel=True,
        states=("momentum_buffer",),
        arguments="zlaunch.runtime.config.optimizers.SGDParams",
        defaults={"lr": 1e-3, "momentum": 0.0, "weight_decay": 0.0},
        estimated={"momentum": 0.9},
    ),
    OptimizerSpec(
        name="ASGD",
        classes=("torch.optim.ASGD",),
        states=("ax",),
        defaults=_PLAIN,
    ),
    OptimizerSpec(
        name="Adadelta",
        classes=("torch.optim.Adadelta",),
        states=("square_avg", "acc_delta"),
        defaults={"lr": 1.0, "eps": 1e-6, "weight_decay": 0.0},
    ),
    OptimizerSpec(
        name="Adafactor",
        classes=("torch.optim.Adafactor",),
        needs="parameter",
        step="zlaunch.runtime.optim.adafactor.AdafactorStep",
        parameter_states=("row_var", "col_var"),
        arguments="zlaunch.runtime.config.optimizers.AdafactorParams",
        defaults=_PLAIN,
    ),
    OptimizerSpec(
        name="Adagrad",
        classes=("torch.optim.Adagrad",),
        states=("sum",),
        defaults={**_PLAIN, "eps": 1e-10},
        estimated={},
    ),
    OptimizerSpec(
        name="Adamax",
        classes=("torch.optim.Adamax",),
        states=("exp_avg", "exp_inf"),
        defaults={**_ADAM, "lr": 2e-3},
    ),
    OptimizerSpec(
        name="Lamb",
        classes=("zlaunch.runtime.optim.lamb.Lamb",),
        other_names=("LAMB",),
        needs="parameter",
        step="zlaunch.runtime.optim.lamb.LambStep",
        states=MOMENTS,
        arguments="zlaunch.runtime.config.optimizers.LambParams",
        defaults=_ADAM,
        estimated={},
    ),
    OptimizerSpec(
        name="Lion",
        classes=("zlaunch.runtime.optim.lion.Lion",),
        has_kernel=True,
        states=("exp_avg",),
        arguments="zlaunch.runtime.config.optimizers.LionParams",
        defaults={"lr": 1e-4, "betas": [0.9, 0.99], "weight_decay": 0.0},
        estimated={},
    ),
    OptimizerSpec(
        name="Muon",
        classes=("zlaunch.runtime.optim.muon.Muon", "torch.optim.Muon"),
        needs="parameter",
        step="zlaunch.runtime.optim.muon.MuonStep",
        states=("momentum_buffer",),  # of matrices; AdamW steps the few other parameters
        arguments="zlaunch.runtime.config.optimizers.MuonParams",
        defaults={"lr": 1e-3, "momentum": 0.95, "weight_decay": 0.1, "betas": [0.9, 0.999], "eps": 1e-8},
        estimated={},
    ),
    OptimizerSpec(
        name="NAdam",
        classes=("torch.optim.NAdam",),
        states=MOMENTS,
        defaults={**_ADAM, "lr": 2e-3},
    ),
    OptimizerSpec(
        name="OneBitAdam",
        classes=("zlaunch.runtime.optim.one_bit.OneBitAdam",),
        needs="ranks",
        step="zlaunch.runtime.optim.one_bit.OneBitAdamStep",
        states=MOMENTS,
        arguments="zlaunch.runtime.config.optimizers.OneBitAdamParams",
        defaults=_ADAM,
    ),
    OptimizerSpec(
        name="OneBitLamb",
        classes=("zlaunch.runtime.optim.one_bit.OneBitLamb",),
        needs="ranks",
        step="zlaunch.runtime.optim.one_bit.OneBitLambStep",
        states=(*MOMENTS, "exp_avg_sq_fresh"),
        arguments="zlaunch.runtime.config.optimizers.OneBitLambParams",
        defaults=_ADAM,
    ),
    OptimizerSpec(
        name="RAdam",
        classes=("torch.optim.RAdam",),
        states=MOMENTS,
        defaults=_ADAM,
    ),
    OptimizerSpec(
        name="RMSprop",
        classes=("torch.optim.RMSprop",),
        states=("square_avg",),
        defaults={**_PLAIN, "eps": 1e-8, "momentum": 0.0},
    ),
    OptimizerSpec(
        name="Rprop",
        classes=("torch.optim.Rprop",),
        states=("prev", "step_size"),
        defaults={"lr": 1e-2},
    ),
    OptimizerSpec(
        name="ZeroOneAdam",
        classes=("zlaunch.runtime.optim.one_bit.ZeroOneAdam",),
        needs="ranks",
        step="zlaunch.runtime.optim.one_bit.ZeroOneAdamStep",
        states=MOMENTS,
        arguments="zlaunch.runtime.config.optimizers.ZeroOneAdamParams",
        defaults=_ADAM,
    ),
    # The config builds this class for Adam and AdamW with "bias_correction": false.
    OptimizerSpec(
        name="UncorrectedAdam",
        in_config="unknown",
        classes=("zlaunch.runtime.optim.uncorrected_adam.UncorrectedAdam",),
        has_kernel=True,
        states=MOMENTS,
    ),
    # The class of the same name in transformers, with another rule and other state.
    OptimizerSpec(
        name="Adafactor",
        in_config="unknown",
        classes=("transformers.optimization.Adafactor",),
        needs="parameter",
        step="zlaunch.runtime.optim.adafactor.AdafactorStep",
        parameter_states=("exp_avg_sq_row", "exp_avg_sq_col"),
    ),
    # Classes of other packages, known by name.
    OptimizerSpec(name="LARS", in_config="unknown", other_names=("Lars",), needs="parameter"),
    OptimizerSpec(name="Shampoo", in_config="unknown", needs="parameter"),
    OptimizerSpec(name="SOAP", in_config="unknown", needs="parameter"),
    OptimizerSpec(name="MuAdam", in_config="later", needs="unknown"),
    OptimizerSpec(name="MuAdamW", in_config="later", needs="unknown"),
    OptimizerSpec(name="MuSGD", in_config="later", needs="unknown"),
    OptimizerSpec(
        name="LBFGS",
        in_config="later",
        needs="unknown",
        refused="runs the model several times in one step",
    ),
    OptimizerSpec(
        name="SparseAdam",
        in_config="later",
        needs="unknown",
        refused="needs sparse gradients, and the engine's are dense",
    ),
)
"""One row for each optimizer, in the order in which messages list them."""

IN_CONFIG = {spec.name: spec for spec in SPECS if spec.in_config == "supported"}
"""What a config may name, by ``optimizer.type``."""
LATER_NAMES = tuple(spec.name for spec in SPECS if spec.in_config == "later")
KERNEL_NAMES = tuple(name for name, spec in IN_CONFIG.items() if spec.has_kernel)
"""Optimizers that step everything, fused and with narrow state: messages advise them."""
SIGN_NAMES = tuple(name for name, spec in IN_CONFIG.items() if spec.needs == "ranks")
ESTIMATED = {
    spec.name: spec
    for spec in sorted(SPECS, key=lambda spec: (-len(spec.states), spec.name))
    if spec.estimated is not None
}
"""Optimizers that `zlaunch estimate` offers, those with the most states first."""
USE_ELEMENTWISE = f"use an element-wise optimizer ({', '.join(KERNEL_NAMES)})"


def find_spec(name: str) -> OptimizerSpec | None:
    """Return the spec of the class with this name, also in another package; None if it is unknown."""
    return next((spec for spec in SPECS if name in (spec.name, *spec.other_names)), None)


def find_by_type(kind: str) -> OptimizerSpec | None:
    """Return the spec of an ``optimizer.type`` in any case, None if no config may name it."""
    return next((spec for name, spec in IN_CONFIG.items() if name.lower() == kind.lower()), None)


def can_read(name: str, saved: str) -> bool:
    """Return whether optimizer ``name`` can load the state of optimizer ``saved`` from a checkpoint."""
    spec = find_spec(name)
    return name == saved or (spec is not None and spec.name == name and saved in spec.reads)


def foreign_states(own: tuple[str, ...]) -> set[str]:
    """Return the names of ``parameter_states`` that no optimizer with ``own`` ones has."""
    return {name for spec in SPECS for name in spec.parameter_states} - set(own)


def listed(names: Iterable[str], word: str) -> str:
    """Return names as text, with a word before the last: "Adam, SGD and Lion"."""
    *first, last = names
    return f"{', '.join(first)} {word} {last}" if first else last


def load_object(path: str) -> Any:
    """Import and return what a dotted path of a spec names. Raises ImportError or AttributeError."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)
