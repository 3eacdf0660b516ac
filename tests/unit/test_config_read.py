"""Every accepted key is read, or says why it need not be."""

import ast
from pathlib import Path

import pytest
import torch

from zlaunch.runtime.config import Config, load
from zlaunch.runtime.config.keys import extra, section_of
from zlaunch.runtime.config.optimizers import OPTIMIZER_PARAMS, SCHEDULER_PARAMS
from zlaunch.runtime.config.reference import markdown
from zlaunch.runtime.optim.registry import build_optimizer, build_scheduler

ROOT = Path(__file__).parents[2]
SETTLED_INSIDE = {
    "strict": "read before the models are",
    "zero_optimization.cpu_offload": "rewritten as offload_optimizer",
    "zero_optimization.cpu_offload_param": "rewritten as offload_param",
    "data_types.grad_accum_dtype": "only fp32 passes the check",
    "data_types.param_dtype": "only the training type passes the check",
    "checkpoint.asynchronous": "read through is_asynchronous",
    "checkpoint.writer.decoupled": "read through is_asynchronous",
}
"""Keys that `runtime/config` itself has done with."""


def attributes_read():
    found = set()
    for place in ("runtime", "zlaunch/compat", "zlaunch/launch", "zlaunch/cli"):
        for path in (ROOT / place).rglob("*.py"):
            if path.is_relative_to(ROOT / "runtime" / "config"):
                continue
            tree = ast.parse(path.read_text(encoding="utf-8"))
            found |= {
                node.attr
                for node in ast.walk(tree)
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
            }
    return found


def fields(level, model=Config, path=""):
    for name, info in model.model_fields.items():
        here = f"{path}.{name}" if path else name
        inner = section_of(info)
        own = extra(info).get("support")
        if inner and not own:
            yield from fields(level, inner, here)
        elif (own or model.level) == level and model.gate in ("", name):
            yield here, info


def test_every_supported_key_is_read():
    read = attributes_read()
    supported = [path for path, _ in fields("supported")]
    assert len(supported) > 60
    unread = {path for path in supported if path.rpartition(".")[2] not in read}
    assert unread == set(SETTLED_INSIDE)


def test_every_key_that_is_always_so_says_why():
    page = markdown()
    always = dict(fields("always"))
    assert len(always) >= 20
    for path, info in always.items():
        row = next(line for line in page.splitlines() if line.startswith(f"| `{path.rpartition('.')[2]}` |"))
        assert extra(info)["why"] and f"Always: {extra(info)['why']}." in row
        assert "| always so |" in row


def test_the_opposite_of_what_holds_is_said_in_one_line():
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
        "<dict>: no effect, docs/config.md says what holds instead: zero_optimization.contiguous_gradients "
        "false, zero_optimization.overlap_comm false, zero_optimization.offload_optimizer.fast_init false, "
        "zero_optimization.memory_efficient_linear false",
    )
    assert load({"zero_optimization": {"stage": 2}}).warnings == ()
    adam = {"type": "Adam", "params": {"torch_adam": True, "set_grad_none": False}}
    assert load({"optimizer": adam}).warnings == ()


@pytest.mark.parametrize(
    ("source", "path"),
    [
        (
            {"zero_optimization": {"load_from_fp32_weights": False}},
            "zero_optimization.load_from_fp32_weights",
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"bias_correction": False}}},
            "optimizer.params.bias_correction",
        ),
    ],
)
def test_what_would_change_results_is_refused(source, path):
    with pytest.raises(ValueError) as caught:
        load(source)
    (line,) = caught.value.problems
    assert line.startswith(f"<dict>: {path}: false asks for ") and "is not supported yet" in line


def test_granularity_threshold_is_used():
    source = {"zero_optimization": {"stage": 3, "stage3_module_granularity_threshold": 5000}}
    assert load(source).warnings == ()


def test_log_level_is_a_level():
    assert load({"log_level": "WARNING"}).config.log_level == "warning"
    with pytest.raises(ValueError, match="expected one of debug, info, warning, error, critical"):
        load({"log_level": "loud"})


SAMPLES = {"fused": None, "foreach": False, "amsgrad": True, "nesterov": False, "cycle_momentum": False}


def sample(name, info):
    default = info.default
    if name in SAMPLES:
        return SAMPLES[name]
    return 7 if default is None else default


@pytest.mark.parametrize("kind", OPTIMIZER_PARAMS)
def test_every_argument_of_an_optimizer_is_taken(kind):
    group = [{"params": [torch.nn.Parameter(torch.zeros(2))]}]
    for name, info in OPTIMIZER_PARAMS[kind].model_fields.items():
        if extra(info).get("support") != "results":
            build_optimizer(kind, {name: sample(name, info)}, group)


@pytest.mark.parametrize("kind", SCHEDULER_PARAMS)
def test_every_argument_of_a_scheduler_is_taken(kind):
    model = SCHEDULER_PARAMS[kind]
    needed = dict.fromkeys(model.required, 3)
    for name, info in model.model_fields.items():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
        build_scheduler(kind, {**needed, name: sample(name, info)}, optimizer)
