"""Check that every accepted key is read, or says why it need not be."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic.fields import FieldInfo

from zlaunch.runtime.config import Config, ConfigError, load
from zlaunch.runtime.config.check import extra, section_of
from zlaunch.runtime.config.fields import Section
from zlaunch.runtime.config.optimizers import SCHEDULER_PARAMS, optimizer_models
from zlaunch.runtime.config.reference import markdown
from zlaunch.runtime.optim.registry import build_optimizer, build_scheduler

ROOT = Path(__file__).parents[3]
SETTLED_INSIDE = {
    "strict": "read before the models are",
    "zero_optimization.cpu_offload": "rewritten as offload_optimizer",
    "zero_optimization.cpu_offload_param": "rewritten as offload_param",
    "bf16.bf16_master_weights_and_grads": "rewritten as bf16.master_weights",
    "bf16.bf16_optimizer_states": "rewritten as optimizer.params.state_dtype",
    "torch_autocast.enabled": "read through autocast",
    "torch_autocast.lower_precision_safe_modules": "nothing is rounded on the way",
    "amp.loss_scale": "read through autocast",
    "amp.min_loss_scale": "read through autocast",
    "data_types.param_dtype": "only the training type passes the check",
    "parallel.data": "read through mesh_shape",
    "parallel.tensor": "read through tensor_size",
    "parallel.sequence": "read through sequence_size",
    "parallel.pipeline": "read through pipeline_size",
    "pipeline.stages": "read through pipeline_size",
    "sequence_parallel_size": "read through sequence_size",
    "data_parallel_size": "read through mesh_shape",
    "parallel.shard_group": "rewritten as zero_optimization.shard_group",
    "parallel.expert": "read through expert_size",
    "expert_parallel.enabled": "read through expert_size",
    "expert_parallel.autoep_size": "read through expert_size",
    "checkpoint.asynchronous": "read through is_asynchronous",
    "checkpoint.writer.decoupled": "read through is_asynchronous",
    "zero_force_ds_cpu_optimizer": "read by accelerate, from the file",
}
"""Keys that `runtime/config` itself has done with."""


SECTIONS: dict[str, type[Section]] = {}
"""Models by the names that annotations use."""


def collect(model: type[Section]) -> None:
    SECTIONS[model.__name__] = model
    for info in model.model_fields.values():
        if inner := section_of(info):
            collect(inner)


collect(Config)


class Reads(ast.NodeVisitor):
    """Finds `section.key` in one module, where it is known which section that is.

    Known are the `config` of an effective or loaded config, parameters annotated as a section or Config, what
    is reached from these by attributes, names that either is bound to in the same function, and attributes of
    `self` in the same class.
    """

    def __init__(self) -> None:
        self.known: dict[str, set[type[Section]]] = {}
        self.kept: dict[str, set[type[Section]]] = {}
        """Holds what `self` has got in an earlier method of its class."""
        self.found: set[tuple[type[Section], str]] = set()

    def models(self, node: ast.expr | None) -> set[type[Section]]:
        if isinstance(node, ast.Name):
            return self.known.get(node.id, set())
        if isinstance(node, ast.IfExp):
            return self.models(node.body) | self.models(node.orelse)
        if isinstance(node, ast.BoolOp):
            return set().union(*map(self.models, node.values))
        if isinstance(node, ast.NamedExpr):
            return self.models(node.value)
        if isinstance(node, ast.ListComp):  # of what it holds, for a loop
            return self.models(node.elt)
        if not isinstance(node, ast.Attribute):
            return set()
        if ast.unparse(node) in self.kept:
            return self.kept[ast.unparse(node)]
        holder = ast.unparse(node.value).rpartition(".")[2].lstrip("_")
        if node.attr == "effective_config" or (node.attr == "config" and holder in ("effective", "loaded")):
            return {Config}
        below = [model.model_fields.get(node.attr) for model in self.models(node.value)]
        return {inner for info in below if info is not None and (inner := section_of(info))}

    def bind(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one, its in zip(target.elts, value.elts, strict=True):
                self.bind(one, its)
        elif isinstance(target, ast.Name) and (models := self.models(value)):
            self.known.setdefault(target.id, set()).update(models)
        elif ast.unparse(target).startswith("self.") and (models := self.models(value)):
            self.kept[ast.unparse(target)] = models

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.kept = {}
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            self.bind(target, node.value)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.bind(node.target, node.value)
        self.generic_visit(node)

    def visit_For(self, node: ast.For | ast.comprehension) -> None:
        for item in node.iter.elts if isinstance(node.iter, (ast.Tuple, ast.List)) else (node.iter,):
            self.bind(node.target, item)
        self.generic_visit(node)

    visit_comprehension = visit_For

    def visit_ListComp(self, node: ast.ListComp | ast.GeneratorExp) -> None:
        for generator in node.generators:  # they bind what the element reads
            self.visit(generator)
        self.generic_visit(node)

    visit_GeneratorExp = visit_ListComp

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        around = {name: set(models) for name, models in self.known.items()}
        for argument in (*node.args.args, *node.args.kwonlyargs):
            words = ast.unparse(argument.annotation).split(" | ") if argument.annotation else []
            if models := {SECTIONS[word] for word in words if word in SECTIONS}:
                self.known[argument.arg] = models
            else:
                self.known.pop(argument.arg, None)
        self.generic_visit(node)
        self.known = around

    def visit_Attribute(self, node: ast.Attribute) -> None:
        for model in self.models(node.value):
            if isinstance(node.ctx, ast.Load) and node.attr in model.model_fields:
                self.found.add((model, node.attr))
        self.generic_visit(node)


def keys_read() -> set[tuple[type[Section], str]]:
    found = set()
    for place in ("runtime", "zlaunch/compat", "zlaunch/supervisor", "zlaunch/cli"):
        for path in (ROOT / place).rglob("*.py"):
            if not path.is_relative_to(ROOT / "runtime" / "config"):
                reads = Reads()
                reads.visit(ast.parse(path.read_text(encoding="utf-8")))
                found |= reads.found
    return found


def fields(
    level: str, model: type[Section] = Config, path: str = ""
) -> Iterator[tuple[str, type[Section], FieldInfo]]:
    for name, info in model.model_fields.items():
        here = f"{path}.{name}" if path else name
        inner = section_of(info)
        own = extra(info).get("support")
        if inner and not own:
            yield from fields(level, inner, here)
        elif (own or model.level) == level and (model.level == "supported" or model.gate in ("", name)):
            yield here, model, info


def test_every_supported_key_is_read() -> None:
    read = keys_read()
    supported = [(path, model) for path, model, _ in fields("supported")]
    assert len(supported) > 60
    unread = {path for path, model in supported if (model, path.rpartition(".")[2]) not in read}
    assert unread == set(SETTLED_INSIDE)


def test_a_read_is_known_by_its_section() -> None:
    reads = Reads()
    reads.visit(
        ast.parse(
            "def f(effective, other, section: FP16 | None):\n"
            "    zero, deep = effective.config.zero_optimization, other.zero_optimization\n"
            "    use(zero.stage, deep.reduce_bucket_size, other.config.gradient_clipping)\n"
            "    section.loss_scale\n"
            "    for part in (zero.offload_param, zero.offload_optimizer):\n"
            "        part.device\n"
            "    parts = [part for part in (zero.offload_param, zero.offload_optimizer) if part]\n"
            "    all(each.pin_memory for each in parts)\n"
            "def g(zero):\n"
            "    zero.sub_group_size\n"
        )
    )
    found = {(model.__name__, key) for model, key in reads.found}
    assert found == {
        ("Config", "zero_optimization"),
        ("FP16", "loss_scale"),
        ("OffloadOptimizer", "device"),
        ("OffloadOptimizer", "pin_memory"),
        ("OffloadParam", "device"),
        ("OffloadParam", "pin_memory"),
        ("Zero", "offload_optimizer"),
        ("Zero", "offload_param"),
        ("Zero", "stage"),
    }


def test_every_key_that_is_always_so_says_why() -> None:
    page = markdown()
    always = {path: info for path, _, info in fields("always")}
    assert len(always) >= 20
    for path, info in always.items():
        row = next(line for line in page.splitlines() if line.startswith(f"| `{path.rpartition('.')[2]}` |"))
        assert extra(info)["why"] and f"Always: {extra(info)['why']}." in row
        assert "| always so |" in row


def test_the_opposite_of_what_holds_is_said_in_one_line() -> None:
    source = {
        "zero_forced": 1,
        "zero_optimization": {
            "stage": 1,
            "overlap_comm": False,
            "contiguous_gradients": False,
            "reduce_scatter": True,
            "memory_efficient_linear": False,
            "gather_16bit_weights_on_model_save": False,
            "round_robin_gradients": True,
            "stage3_max_reuse_distance": 7,
            "offload_optimizer": {"device": "cpu", "fast_init": False, "pipeline_read": True},
        },
    }
    assert load(source).warnings == (
        "<dict>: zero_forced: unknown key, ignored",
        "<dict>: no effect, docs/config.md names the fixed behavior: zero_optimization.contiguous_gradients "
        "false, zero_optimization.overlap_comm false, zero_optimization.offload_optimizer.fast_init false, "
        "zero_optimization.memory_efficient_linear false",
    )
    assert load({"zero_optimization": {"stage": 2}}).warnings == ()
    adam = {"type": "Adam", "params": {"torch_adam": True, "set_grad_none": False}}
    assert load({"optimizer": adam}).warnings == ()


@pytest.mark.parametrize(
    ("source", "path"),
    [({"zero_optimization": {"legacy_stage1": True}}, "zero_optimization.legacy_stage1")],
)
def test_what_would_change_results_is_refused(source: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(source)
    (line,) = caught.value.problems
    assert line.startswith(f"<dict>: {path}: true asks for ") and "is not supported yet" in line


def test_granularity_threshold_is_used() -> None:
    source = {"zero_optimization": {"stage": 3, "stage3_module_granularity_threshold": 5000}}
    assert load(source).warnings == ()


def test_log_level_is_a_level() -> None:
    assert load({"log_level": "WARNING"}).config.log_level == "warning"
    with pytest.raises(ValueError, match="expected one of debug, info, warning, error, critical"):
        load({"log_level": "loud"})


SAMPLES = {
    "fused": None,
    "foreach": False,
    "amsgrad": True,
    "nesterov": False,
    "cycle_momentum": False,
    "adjust_lr_fn": "original",
}


def sample(name: str, info: FieldInfo) -> Any:
    default = info.default
    if name in SAMPLES:
        return SAMPLES[name]
    return 7 if default is None else default


@pytest.mark.parametrize("kind", optimizer_models())
def test_every_argument_of_an_optimizer_is_taken(kind: str) -> None:
    group = [{"params": [torch.nn.Parameter(torch.zeros(2))]}]
    for name, info in optimizer_models()[kind].model_fields.items():
        if extra(info).get("support") != "results":
            build_optimizer(kind, {name: sample(name, info)}, group, torch.nn.Linear(1, 1))


@pytest.mark.parametrize("kind", SCHEDULER_PARAMS)
def test_every_argument_of_a_scheduler_is_taken(kind: str) -> None:
    model = SCHEDULER_PARAMS[kind]
    needed = dict.fromkeys(model.required, 3)
    for name, info in model.model_fields.items():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
        build_scheduler(kind, {**needed, name: sample(name, info)}, optimizer)
