"""Test that parameters are rounded for a pass alone: whatever a script reads, writes or saves is exact."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zlaunch
from tests.runtime.mesh.nodes import join_nodes
from tests.runtime.models import batches, config, net, train_engine
from tests.runtime.workers import run_workers

MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "world": (4, {}),
    "node": (2, {"shard_group": "node"}),
    "copies": (2, {"zero_hpz_partition_size": 2}),
    "cpu": (2, {"zero_hpz_partition_size": 2, "offload_param": {"device": "cpu"}}),
}
GLOO = {"ZLAUNCH_SHARED_MEMORY": "0"}
WEIGHTS = {"zero_quantized_weights": True}


def _values(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    with zlaunch.zero.GatheredParameters(module):
        return {name: value.detach().clone() for name, value in module.named_parameters()}


def _engine(mesh: str, model: torch.nn.Module, zero: dict[str, Any], lr: float = 0.0) -> Any:
    per_node, group = MESHES[mesh]
    join_nodes(per_node)
    settings = config(3, 4, zero={**group, **zero})
    settings["optimizer"] = {"type": "AdamW", "params": {"lr": lr, "weight_decay": 0.0}}
    return zlaunch.initialize(model=model, config=settings)[0]


def _equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def _watch(engine: Any, seen: dict[str, torch.Tensor]) -> None:
    """Keep what each module's own parameters are in its call."""

    def note(module: torch.nn.Module, args: Any, output: Any) -> None:
        for name, value in module.named_parameters(recurse=False):
            seen[f"{names[module]}.{name}"] = value.detach().clone()

    names = {module: name for name, module in engine.module.named_modules()}
    for module in names:
        module.register_forward_hook(note)


def _differ(seen: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> list[str]:
    """Names of parameters that a pass saw rounded; no value is further off than 1/254 of the largest."""
    assert seen.keys() <= wanted.keys() and seen
    largest = max(value.abs().max() for value in wanted.values())
    for name, value in seen.items():
        assert (value - wanted[name]).abs().max() <= largest / 250, name
    return [name for name, value in seen.items() if not torch.equal(value, wanted[name])]


def _exact(mesh: str, folder: str) -> None:
    torch.manual_seed(0)
    model = net(width=64, depth=4)
    wanted = {name: value.detach().clone() for name, value in model.named_parameters()}
    engine = _engine(mesh, model, WEIGHTS)
    seen: dict[str, torch.Tensor] = {}
    _watch(engine, seen)
    data = batches(3, 16)
    train_engine(engine, data)  # with a rate of 0
    assert len(_differ(seen, wanted)) >= len(wanted) / 2
    assert _equal(_values(engine.module), wanted)

    # in the middle of a pass, with gathers under way and rounded copies in the node
    met: list[bool] = []
    inner = engine.module.layers[-1].down

    def read(module: torch.nn.Module, args: Any) -> None:
        met.append(_equal(_values(engine.module), wanted))

    train_engine(engine, data[:1])  # after which no exact copy is valid
    handle = inner.register_forward_pre_hook(read)
    train_engine(engine, data[:1])
    handle.remove()
    assert met == [True]

    # what is written is kept to the bit, and read again
    name, parameter = next((n, p) for n, p in engine.module.named_parameters() if p.dim() == 2)
    for number in range(2):
        with zlaunch.zero.GatheredParameters([parameter], modifier_rank=number):
            if dist.get_rank() == number:
                with torch.no_grad():
                    parameter.mul_(1.0 + 1e-3)
        wanted[name] = wanted[name] * (1.0 + 1e-3)
        train_engine(engine, data[:1])
        assert _equal(_values(engine.module), wanted)

    engine.save_checkpoint(folder, tag="one")
    assert _equal(_values(engine.module), wanted)
    engine.destroy()
    assert _equal({n: p.detach() for n, p in engine.module.named_parameters()}, wanted)

    again = _engine("world", net(width=64, depth=4), {})
    again.load_checkpoint(folder, tag="one")
    assert _equal(_values(again.module), wanted)
    again.destroy()


@pytest.mark.exhaustive
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("mesh", "env"), [*((mesh, GLOO) for mesh in MESHES), ("copies", {})], ids=[*MESHES, "copies in memory"]
)
def test_what_is_read_written_and_saved_is_exact(mesh: str, env: dict[str, str], tmp_path: Path) -> None:
    run_workers(_exact, 4, mesh, str(tmp_path), env=env)


def _slow_reader() -> bool:
    """One rank of each node announces its part of an exact gather, and reads the other's later, when that one
    has begun a pass. Whether what it reads is exact.
    """
    torch.manual_seed(0)
    model = torch.nn.Linear(256, 256, bias=False)
    wanted = model.weight.detach().clone()
    engine = _engine("copies", model, WEIGHTS)
    (unit,), link = engine.units, engine.comm.link
    with torch.no_grad():
        engine(torch.zeros(1, 256))  # compiles what rounds
    reads_late = dist.get_rank() % 2 == 1
    if reads_late:
        unit.unshard()
        while not link._gathers.is_empty:  # both hops begun, and nothing read: that takes link.advance()
            link._gathers.advance()
    dist.barrier()
    if reads_late:
        time.sleep(0.5)
    unit.wait_unsharded()
    exact = torch.equal(model.weight, wanted)
    unit.reshard()
    with torch.no_grad():
        engine(torch.zeros(1, 256))
    engine.destroy()
    return exact


def test_a_copy_keeps_its_values_while_it_is_read() -> None:
    assert run_workers(_slow_reader, 4) == [True] * 4


def _written(how: str) -> str:
    """What is said of a parameter that a hook reads or writes in a forward pass, where it is rounded."""
    engine = _engine("world", net(width=64, depth=2), WEIGHTS)
    layer: Any = engine.module.layers[1]

    def hook(module: torch.nn.Module, args: Any) -> None:
        if how == "read":
            layer.up.weight.data.norm()
        else:
            for parameter in layer.parameters():  # so that every rank's part is another one
                parameter.data.mul_(2.0)
        if how == "written, then gathered":
            with zlaunch.zero.GatheredParameters([layer.up.weight]):
                pass

    layer.up.register_forward_pre_hook(hook)
    try:
        train_engine(engine, batches(1, 16))
    except zlaunch.ParameterError as error:
        return str(error).partition(",")[0]
    return ""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", ["read", "written", "written, then gathered"])
def test_a_write_to_rounded_values_is_noticed_and_a_read_is_none(how: str) -> None:
    said = "" if how == "read" else "layers.1 was changed in place while gathered (ZeRO stage 3)"
    assert run_workers(_written, 4, how, env=GLOO) == [said] * 4


def _frozen(mesh: str, zero: dict[str, Any]) -> tuple[int, int]:
    """How many frozen and how many trained parameters a pass sees rounded."""
    torch.manual_seed(0)
    model = net(width=64, depth=4)
    trained = {name for name, _ in model.named_parameters() if name.endswith("bias")}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    wanted = {name: value.detach().clone() for name, value in model.named_parameters()}
    engine = _engine(mesh, model, zero)
    seen: dict[str, torch.Tensor] = {}
    _watch(engine, seen)
    train_engine(engine, batches(2, 16))
    assert _equal(_values(engine.module), wanted)
    rounded = _differ(seen, wanted)
    engine.destroy()
    return sum(name not in trained for name in rounded), sum(name in trained for name in rounded)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mesh", ["world", "copies"])
def test_frozen_parameters_alone_are_rounded(mesh: str) -> None:
    zero = {"zero_quantized_nontrainable_weights": True}
    for frozen, trained in run_workers(_frozen, 4, mesh, zero, env=GLOO):
        assert frozen and not trained


def _unfrozen() -> tuple[bool, bool]:
    """Whether units that are no more have left nothing: copies, and errors of their gradients."""
    zero = {"zero_quantized_gradients": True, "zeropp_loco_param": {}}
    model = net(width=64, depth=4)
    model.layers[0].requires_grad_(False)
    engine = _engine("copies", model, zero, lr=0.01)
    train_engine(engine, batches(2, 16))
    link = engine.comm.link
    before = {unit.tag for unit in engine.units}
    kept = {label for label, _ in link._copies} | set(link.inner._errors) | set(link.outer._errors)
    model.layers[0].requires_grad_(True)
    train_engine(engine, batches(2, 16))
    after = {unit.tag for unit in engine.units}
    left = {label for label, _ in link._copies} | set(link.inner._errors) | set(link.outer._errors)
    engine.destroy()
    return bool(kept & (before - after)), left <= after


def test_nothing_is_kept_of_units_that_are_no_more() -> None:
    for had_some, left_none in run_workers(_unfrozen, 4, env=GLOO):
        assert had_some and left_none
