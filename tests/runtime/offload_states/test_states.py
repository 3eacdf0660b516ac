"""Test ``engine.offload_states`` and ``reload_states``: training goes on to the bit, memory is free."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zlaunch
from tests.runtime.models import batches, config, loss_of, net
from tests.runtime.workers import run_workers
from zlaunch.runtime.zero.placeholder import STATES

TRAINING = [name for name in STATES if name != "lp_params"]
"""What OpenRLHF moves: the weights stay, since it copies them to the inference engine."""
GLOO = {"ZLAUNCH_SHARED_MEMORY": "0"}


def _engine(stage: int, kind: str = "fp32", **extra: Any) -> Any:
    zlaunch.init_distributed()
    model = net(tied=True)
    model.layers[1].requires_grad_(False)
    if kind == "bf16":
        extra["bf16"] = {"enabled": True}
    if kind == "float64":
        model = model.double()
    return zlaunch.initialize(model=model, config=config(stage, 2, 2, 0.05, **extra))[0]


def _train(stage: int, kind: str, moves: bool) -> tuple[list[float], dict[str, Tensor]]:
    """Six steps of two micro-batches; ``moves``: states go and come wherever they may."""
    engine = _engine(stage, kind)
    sets = [None, STATES, TRAINING, ["optim_states"], ["lp_grads"], ["hp_params"], ["lp_params", "hp_params"]]
    losses, turn = [], 0

    def move() -> None:
        nonlocal turn
        if moves:
            engine.offload_states(
                sets[turn % len(sets)], pin_memory=turn % 2 == 0, non_blocking=turn % 3 == 0
            )
            engine.reload_states(non_blocking=turn % 2 == 0)
            turn += 1

    parameters = dict(engine.module.named_parameters())
    grouped = [list(group["params"]) for group in engine.optimizer.param_groups]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in batches(6, 2 * 2 * engine.world_size):
            for micro in batch.chunk(engine.world_size * 2)[engine.global_rank * 2 :][:2]:
                move()
                loss = loss_of(engine, micro)
                engine.backward(loss)
                move()
                engine.step()
                losses.append(loss.item())
    for name, parameter in engine.module.named_parameters():
        assert parameter is parameters[name]
    for group, before in zip(engine.optimizer.param_groups, grouped, strict=True):
        assert all(now is then for now, then in zip(group["params"], before, strict=True))
    assert not moves or turn == 24
    state = {name: value.clone() for name, value in engine.module.state_dict().items()}
    moments = [zlaunch.safe_get_full_optimizer_state(p, "exp_avg") for p in parameters.values()]
    state |= {f"{name}.exp_avg": m for name, m in zip(parameters, moments, strict=True) if m is not None}
    engine.destroy()
    return losses, state


def _equal(stage: int) -> str:
    for kind in ("fp32", "bf16", "float64"):
        losses, state = _train(stage, kind, False)
        moved_losses, moved_state = _train(stage, kind, True)
        assert moved_losses == losses, kind
        assert moved_state.keys() == state.keys()
        assert all(torch.equal(moved_state[name], state[name]) for name in state), kind
    return "equal"


@pytest.mark.exhaustive
@pytest.mark.sampled(1)
@pytest.mark.parametrize("env", [{}, GLOO], ids=["shared", "gloo"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_is_the_same_to_the_bit(stage: int, env: dict[str, str]) -> None:
    assert run_workers(_equal, 2, stage, env=env) == ["equal"] * 2


def _between_forward_and_backward(stage: int) -> str:
    results = []
    for moves in (False, True):
        engine = _engine(stage, "bf16")
        data = batches(1, 2)[0]
        for _ in range(2):
            loss = loss_of(engine, data)
            if moves:
                engine.offload_states()
                with pytest.raises(zlaunch.OffloadedError, match=r"engine\.backward\(\) needs lp_params"):
                    engine.backward(loss)
                with pytest.raises(zlaunch.OffloadedError, match=r"reload_states\(\)"):
                    loss.backward()
                with pytest.raises(zlaunch.OffloadedError, match=r"reload_states\(\)"):
                    loss_of(engine.module, data)
                engine.reload_states()
            if moves:  # autograd has begun that pass and ended it
                loss = loss_of(engine, data)
            engine.backward(loss)
            engine.step()
        results.append({name: value.clone() for name, value in engine.module.state_dict().items()})
        engine.destroy()
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])
    return "equal"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_pass_while_states_are_away_is_refused_and_does_no_harm(stage: int) -> None:
    assert run_workers(_between_forward_and_backward, 2, stage) == ["equal"] * 2


def _storages(engine: Any) -> dict[str, list[Any]]:
    """Every storage of each kind of state."""
    found: dict[str, list[Tensor]] = {name: [] for name in STATES}
    for unit in engine.units:
        found["lp_params"].append(unit.values.tensor if unit.shard_params else unit.full)
        if unit.store is not None and unit.store.master is not None:
            found["hp_params"].append(unit.store.master)
            found["lp_grads"].append(unit.store.grad_memory)
    for state in engine._shard_step.optimizer.state.values():
        found["optim_states"] += [value for value in state.values() if value.dim()]
    found["contiguous_grad_buffer"] = list(engine._reducer._pool.free)
    return {name: [tensor.untyped_storage() for tensor in tensors] for name, tensors in found.items()}


def _is_free(storage: Any) -> bool:
    """Without memory; or, where the other ranks can see it, without pages: then it reads as zeros."""
    if storage.resizable():
        return bool(storage.nbytes() == 0)
    return not torch.empty(0, dtype=torch.uint8).set_(storage).any()


def _memory(stage: int, shared: bool) -> str:
    # Adagrad's step leaves no NumPy array over the memory, which could not be resized then
    engine = _engine(stage, "bf16", optimizer={"type": "Adagrad", "params": {"lr": 0.01}})
    for batch in batches(2, 2):
        for _ in range(2):
            engine.backward(loss_of(engine, batch))
            engine.step()
    everything = _storages(engine)
    before = {name: [storage.nbytes() for storage in own] for name, own in everything.items()}
    assert all(sum(before[name]) > 0 for name in STATES[:4])
    assert shared or all(storage.resizable() for own in everything.values() for storage in own)

    gone: set[str] = set()
    for name in STATES:  # one after the other; those before stay away
        engine.offload_states([name])
        gone.add(name)
        for other, own in everything.items():
            shared_with_values = stage == 3 and other == "hp_params" and "lp_params" not in gone
            wanted = other in gone and not shared_with_values
            assert [_is_free(storage) for storage in own] == [wanted] * len(own), (name, other)
    host = engine._states._links[True].pool.statistics()
    assert host.lent_bytes >= sum(before["optim_states"]) + sum(before["hp_params"])
    moved = len(engine._states._moved)
    engine.offload_states()
    engine.offload_states(["hp_params"])
    assert len(engine._states._moved) == moved
    engine.reload_states()
    engine.reload_states()
    assert {name: [s.nbytes() for s in own] for name, own in everything.items()} == before
    assert not any(_is_free(s) for name in STATES[:3] for s in everything[name])
    assert engine._states._links[True].pool.statistics().held_bytes == 0
    return "free"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("env", [{}, GLOO], ids=["shared", "gloo"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_memory_is_free(stage: int, env: dict[str, str]) -> None:
    assert run_workers(_memory, 2, stage, not env, env=env) == ["free"] * 2


def _masters_that_are_the_parameters(stage: int, kind: str) -> str:
    """One memory is both: it leaves with the second of them."""
    engine = _engine(stage, kind)
    data = batches(1, 2)[0]
    wanted = loss_of(engine, data).item()
    storages = [
        unit.store.master.untyped_storage()
        for unit in engine.units
        if unit.store is not None and unit.store.master is not None
    ]
    engine.offload_states(TRAINING)
    assert not any(_is_free(storage) for storage in storages)
    assert loss_of(engine, data).item() == wanted
    engine.offload_states(["lp_params"])
    assert all(_is_free(storage) for storage in storages)
    engine.reload_states()
    assert loss_of(engine, data).item() == wanted
    return "done"


@pytest.mark.parametrize(("stage", "kind"), [(1, "fp32"), (3, "bf16")])
def test_masters_that_are_the_parameters(stage: int, kind: str) -> None:
    assert run_workers(_masters_that_are_the_parameters, 2, stage, kind) == ["done"] * 2


def _uses(folder: str, stage: int) -> str:
    engine = _engine(stage, "bf16")
    data = batches(1, 2)[0]
    engine.backward(loss_of(engine, data))
    engine.step()
    engine.backward(loss_of(engine, data))
    engine.step()
    engine.save_checkpoint(folder, "before")
    parameter = engine.module.head.weight
    with torch.no_grad():
        wanted = loss_of(engine, data)
    weights = {name: value.clone() for name, value in engine.module.state_dict().items()}

    engine.optimizer.offload_states(include=TRAINING)
    with torch.no_grad():  # the model itself is here
        assert torch.equal(loss_of(engine, data), wanted)
    assert all(torch.equal(value, weights[name]) for name, value in engine.module.state_dict().items())
    assert engine.save_16bit_model(folder)
    steps = engine.micro_steps, engine.global_steps
    refused = {
        r"engine\.backward\(\) needs lp_grads": lambda: engine.backward(loss_of(engine, data)),
        r"using .* needs lp_grads": lambda: loss_of(engine, data).backward(),
        r"engine\.step\(\) needs optim_states, hp_params": engine.step,
        r"engine\.save_checkpoint\(\) needs": lambda: engine.save_checkpoint(folder, "while"),
        r"engine\.load_checkpoint\(\) needs": lambda: engine.load_checkpoint(folder),
        r"using .* needs optim_states": lambda: zlaunch.safe_get_full_fp32_param(parameter),
        r"using .* needs optim_states,": engine.optimizer.state_dict,
        r"using .* needs hp_params": lambda: engine.module.load_state_dict(weights),
    }
    for text, use in refused.items():
        with pytest.raises(zlaunch.OffloadedError, match=text + r".*call engine\.reload_states\(\)"):
            use()
    assert (engine.micro_steps, engine.global_steps) == steps and not Path(folder, "while").exists()

    engine.offload_states()
    refused = {
        "a forward pass needs lp_params": lambda: engine(data[:, :-1]),
        "forward pass needs lp_params": lambda: engine.module(data[:, :-1]),
        "needs lp_params": engine.module.state_dict,
        r"engine\.save_16bit_model\(\) needs lp_params": lambda: engine.save_16bit_model(folder),
    }
    if stage < 3:
        refused[r"using head\.weight|using embedding\.weight"] = lambda: parameter.sum()
        refused[" needs lp_params, which"] = lambda: engine.module.norm(torch.zeros(2, 24).bfloat16())
    for text, use in refused.items():
        with pytest.raises(zlaunch.OffloadedError, match=text):
            use()
    assert parameter.shape == weights["head.weight"].shape and parameter.requires_grad
    engine.zero_grad()
    engine.reload_states()
    with torch.no_grad():
        assert torch.equal(loss_of(engine, data), wanted)
    assert engine.load_checkpoint(folder, "before")[0] is not None
    engine.backward(loss_of(engine, data))
    engine.step()
    assert engine.micro_steps == steps[0] + 1

    engine.reload_states()  # nothing is away
    engine.offload_states()
    engine.destroy()
    with pytest.raises(RuntimeError, match="destroyed"):
        engine.offload_states()
    assert all(torch.equal(value, weights[name]) for name, value in engine.module.state_dict().items())
    return "done"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_needs_them_says_so(tmp_path: Path, stage: int) -> None:
    assert run_workers(_uses, 2, str(tmp_path), stage) == ["done"] * 2


def _accumulated(stage: int) -> str:
    """Gradients of half a step leave and come back, and those of one module can be dropped afterwards."""
    engine = _engine(stage)
    data = batches(1, 2)[0]
    engine.backward(loss_of(engine, data))
    engine.step()
    engine.offload_states(["lp_grads"])
    with pytest.raises(zlaunch.OffloadedError, match="needs lp_grads"):
        engine.module.norm.zero_grad()
    engine.reload_states()
    engine.module.norm.zero_grad()
    engine.backward(loss_of(engine, data))
    engine.step()
    return "done"


@pytest.mark.parametrize("stage", [1, 3])
def test_gradients_of_half_a_step(stage: int) -> None:
    assert run_workers(_accumulated, 2, stage) == ["done"] * 2


def _refusals() -> str:
    engine = _engine(3)
    for include, text in (
        (["optimizer"], "'optimizer' is not one of optim_states, hp_params"),
        ("optim_states", "expected a list"),
        (5, "expected a list"),
    ):
        with pytest.raises(ValueError, match=text):
            engine.offload_states(include)
    with pytest.raises(ValueError, match=r'only "cpu" is supported'):
        engine.offload_states(device="nvme")
    with (
        zlaunch.zero.GatheredParameters(engine.module.parameters()),
        pytest.raises(zlaunch.OffloadedError, match="exit GatheredParameters first"),
    ):
        engine.offload_states()
    said: list[str] = []

    def inside(*args: Any) -> None:
        try:
            engine.offload_states()
        except zlaunch.OffloadedError as error:
            said.append(str(error))

    handle = engine.module.layers[0].register_forward_hook(inside)
    loss_of(engine, batches(1, 2)[0])
    handle.remove()
    assert len(said) == 1 and "between two passes" in said[0]
    engine.offload_states()
    engine.reload_states()

    offloaded = _engine(2, zero={"offload_optimizer": {"device": "cpu"}})
    with pytest.raises(zlaunch.OffloadedError, match=r"zero_optimization\.offload_optimizer"):
        offloaded.offload_states()
    return "done"


def test_what_cannot_be_moved_is_refused() -> None:
    assert run_workers(_refusals, 2) == ["done"] * 2


def _views() -> str:
    """Memory that a script's own tensor lies on stays, and is told."""
    engine = _engine(0)
    before = engine.module.norm.weight.detach().clone()
    mine = engine.module.norm.weight.detach()
    with pytest.warns(UserWarning, match=r"of hp_params, lp_params stay on the device, because the script"):
        engine.offload_states()
    assert torch.equal(mine, before)
    with pytest.raises(zlaunch.OffloadedError):
        engine.module.norm.weight.sum()
    engine.reload_states()
    mine.add_(1)
    assert torch.equal(engine.module.norm.weight, before + 1)
    del mine
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.offload_states()
    engine.reload_states()
    assert torch.equal(engine.module.norm.weight, before + 1)
    return "done"


def test_memory_that_the_script_holds_stays() -> None:
    assert run_workers(_views, 1) == ["done"]


def _without_optimizer() -> str:
    zlaunch.init_distributed()
    model = net()
    engine = zlaunch.initialize(
        model=model.requires_grad_(False),
        config={"train_batch_size": 2, "zero_optimization": {"stage": 3}},
    )[0]
    data = batches(1, 2)[0]
    wanted = loss_of(engine, data)
    engine.offload_states()
    with pytest.raises(zlaunch.OffloadedError):
        loss_of(engine, data)
    engine.reload_states()
    assert torch.equal(loss_of(engine, data), wanted)
    return "done"


def test_a_model_without_an_optimizer() -> None:
    assert run_workers(_without_optimizer, 2) == ["done"] * 2


def _together(kind: str) -> None:
    """Optimizers that step slices of one parameter each: nothing stays on the device, at any stage."""
    for stage in (0, 1, 2, 3):
        zlaunch.init_distributed()
        section = {"type": kind, "params": {"lr": 1e-3}}
        given = config(stage, 2, optimizer=section)
        engine = zlaunch.initialize(model=net(tied=True), config=given)[0]
        for batch in batches(2, 2 * engine.world_size):
            engine.backward(loss_of(engine, batch.chunk(engine.world_size)[engine.global_rank]))
            engine.step()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            engine.offload_states()
        for name, storages in _storages(engine).items():
            assert all(map(_is_free, storages)), (stage, name)
        engine.reload_states()
        engine.destroy()


@pytest.mark.parametrize("kind", ["Lamb", "Muon", "OneBitAdam"])
def test_nothing_stays_of_optimizers_that_ranks_step_together(kind: str) -> None:
    run_workers(_together, 1, kind)
