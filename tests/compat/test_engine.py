"""Test members of DeepSpeed's engine and of what comes with it."""

from __future__ import annotations

import gc
import logging
from typing import Any

import pytest
import torch
from torch import nn

from tests.runtime.models import batches, loss_of, net
from tests.runtime.workers import run_workers

GIVEN: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 5}},
    "gradient_clipping": 0.5,
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
}


def _deepspeed() -> Any:
    import zlaunch.compat.deepspeed

    zlaunch.compat.deepspeed.install()
    import deepspeed

    return deepspeed


def _members() -> str:
    deepspeed = _deepspeed()
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    deepspeed.utils.logger.addHandler(handler)
    deepspeed.utils.logger.setLevel(logging.INFO)
    engine, optimizer, loader, schedule = deepspeed.initialize(model=net(), config=GIVEN)
    assert any("DeepSpeed info" in line for line in lines)
    assert isinstance(engine, deepspeed.DeepSpeedEngine) and loader is None
    assert isinstance(optimizer, deepspeed.DeepSpeedOptimizer) and isinstance(
        optimizer, torch.optim.Optimizer
    )
    assert optimizer is engine.optimizer and schedule is engine.lr_scheduler
    assert type(schedule).__name__ in deepspeed.runtime.lr_schedules.VALID_LR_SCHEDULES

    assert engine.config == GIVEN
    assert engine.zero_optimization() and engine.zero_optimization_stage() == 2 and engine.zero_cpu_offload()
    assert engine.zero_optimization_partition_gradients() and not engine.zero_optimization_partition_weights()
    assert engine.gradient_clipping() == 0.5 and engine.optimizer_name() == "AdamW"
    assert engine.scheduler_params()["warmup_num_steps"] == 5 and engine.optimizer_params() == {"lr": 0.01}
    assert not engine.fp16_enabled() and not engine.bfloat16_enabled() and engine.loss_scale() == 0
    assert engine.zero_offload_optimizer().device == "cpu" and engine.zero_offload_param() is None
    assert engine.get_batch_info() == (4 * engine.world_size, 2, 2)
    assert engine.dp_world_size == engine.world_size and engine.mp_world_size == 1
    assert engine.get_mom() == [(0.9, 0.999)] and engine.was_step_applied() is False
    assert not engine.amp_enabled() and engine.amp_params() is False and not engine.torch_autocast_enabled()
    assert engine.torch_autocast_dtype() is torch.bfloat16
    assert engine.torch_autocast_lower_precision_safe_modules() is None
    with pytest.raises(AttributeError, match=r"timers is not supported: use wall_clock_breakdown"):
        engine.timers  # noqa: B018
    with pytest.raises(NotImplementedError, match="custom_load_fn"):
        engine.load_checkpoint("x", custom_load_fn=print)
    assert not hasattr(engine, "no_such_member")

    data = batches(1, 2)[0]
    boundaries = []
    for _ in range(4):
        boundaries.append(engine.is_gradient_accumulation_boundary())
        engine.backward(loss_of(engine, data))
        optimizer.step()
    assert boundaries == [False, True, False, True]
    assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (2, 4, 8 * engine.world_size)
    assert optimizer.overflow is False and optimizer.loss_scale == 1.0 and engine.losses > 0
    assert optimizer.param_groups[0]["lr"] == engine.get_lr()[0] == schedule.get_last_lr()[0]
    assert sum(flat.numel() for flat in optimizer.single_partition_of_fp32_groups) > 0
    optimizer.param_groups[0]["lr"] = 0.123
    assert engine.get_lr() == [0.123]

    engine.set_train_batch_size(2 * engine.world_size)
    assert engine.gradient_accumulation_steps() == 1 and engine.is_gradient_accumulation_boundary()
    engine.set_train_micro_batch_size(4)
    assert engine.train_batch_size() == 4 * engine.world_size
    with pytest.raises(ValueError, match="not a multiple"):
        engine.set_train_batch_size(4 * engine.world_size + 1)

    # a script's own loop: scale, backward, and a second engine on the same model
    loss = loss_of(engine, data)
    engine.scale(loss).backward()
    engine.step()
    assert engine.global_steps == 3
    again, *_ = deepspeed.initialize(model=engine.module, config={**GIVEN, "zero_optimization": {"stage": 3}})
    torch.testing.assert_close(loss_of(again, data), loss_of(again.module, data))
    again.backward(loss_of(again, data))
    offload = again.optimizer.parameter_offload  # what TRL does around a generation
    with deepspeed.zero.GatheredParameters(again.module.parameters()):
        named = (*offload.module.named_parameters(), *offload.module.ds_external_parameters())
        for _, parameter in named:
            parameter.ds_active_sub_modules.clear()
        for hook in [*offload.forward_hooks, *offload.backward_hooks]:
            hook.remove()
        again.module(data)
        offload._register_deepspeed_module(offload.module)
    assert not hasattr(optimizer, "parameter_offload")
    again.destroy()
    return "done"


@pytest.mark.parametrize("world", [1, 2])
def test_members(world: int) -> None:
    assert run_workers(_members, world) == ["done"] * world


def _fp16() -> list[Any]:
    """Nothing moves while the loss scale is too high."""
    deepspeed = _deepspeed()
    given = {**GIVEN, "gradient_accumulation_steps": 1, "fp16": {"enabled": True, "initial_scale_power": 32}}
    engine, optimizer, _, schedule = deepspeed.initialize(model=net(), config=given)
    before = {name: value.clone() for name, value in engine.module.state_dict().items()}
    engine.backward(loss_of(engine, batches(1, 2)[0]))
    engine.step()
    same = all(torch.equal(value, before[name]) for name, value in engine.module.state_dict().items())
    assert schedule.last_batch_iteration == -1  # it waits for a step that counts
    return [same, optimizer.overflow, engine.skipped_steps, engine.dynamic_loss_scale()]


def test_overflow() -> None:
    assert run_workers(_fp16, 2) == [[True, True, 1, True]] * 2


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x)[..., :64]


class Experts(nn.Module):
    """Every rank uses another expert."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(4))

    def forward(self, x: torch.Tensor, chosen: int) -> torch.Tensor:
        return x + self.experts[chosen](x)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts() for _ in range(2))

    def forward(self, x: torch.Tensor, chosen: int) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, chosen)
        return x.square().mean()


def _leaves(by_config: bool) -> list[Any]:
    deepspeed = _deepspeed()
    from deepspeed.utils import get_z3_leaf_modules, set_z3_leaf_modules, unset_z3_leaf_modules

    model = Mixture()
    if not by_config:
        assert len(set_z3_leaf_modules(model, [Experts])) == 2 == len(get_z3_leaf_modules(model))
    with pytest.raises(ValueError, match="no module"):
        set_z3_leaf_modules(model, [nn.Conv1d])
    given = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": GIVEN["optimizer"],
        "zero_optimization": {"stage": 3},
    }
    given["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    if by_config:
        given["zero_optimization"]["leaf_module"] = {"classes": ["Experts"]}
    engine, *_ = deepspeed.initialize(model=model, config=given)
    units = [unit.name for unit in engine.units]
    losses = []
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(1))
    for step in range(4):
        loss = engine(x, (engine.global_rank + step) % 4)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    unset_z3_leaf_modules(model, [Experts])
    return [units, losses[-1] < losses[0], len(get_z3_leaf_modules(model))]


@pytest.mark.parametrize("by_config", [False, True])
def test_leaf_modules(by_config: bool) -> None:
    assert run_workers(_leaves, 2, by_config) == [[["layers.0", "layers.1"], True, 0]] * 2


def _lives() -> str:
    """Engines that nobody keeps, that are destroyed twice, or whose model has gone to another."""
    deepspeed = _deepspeed()
    data, results = batches(1, 2)[0], []
    for stage in (2, 3):
        model = net()
        given = {**GIVEN, "gradient_accumulation_steps": 1, "zero_optimization": {"stage": stage}}
        given["zero_optimization"]["stage3_param_persistence_threshold"] = 0

        def go(model: Any, given: Any) -> float:
            engine, *_ = deepspeed.initialize(model=model, config=given)
            loss = engine.backward(loss_of(engine, data))
            engine.step()
            return float(loss)

        first = go(model, given)
        if deepspeed.comm.get_rank() == 0:
            gc.collect()
        results.append(go(model, given) < first + 1)
        former, *_ = deepspeed.initialize(model=model, config=given)
        present, *_ = deepspeed.initialize(model=model, config=given)
        former.destroy()
        with pytest.raises(RuntimeError, match="passed to another engine"):
            former.step()
        present.destroy()
        present.destroy()
        with pytest.raises(RuntimeError, match="was destroyed"):
            present.backward(torch.zeros(1, requires_grad=True).sum())
    return f"{results}"


def test_lives_of_engines() -> None:
    assert run_workers(_lives, 2) == ["[True, True]"] * 2


def _loop() -> str:
    """What a script's loop may do beside the usual."""
    deepspeed = _deepspeed()
    from deepspeed.runtime.constants import ROUTE_EVAL

    given = {key: value for key, value in GIVEN.items() if key != "scheduler"}
    given["zero_optimization"] = {"stage": 3, "stage3_param_persistence_threshold": 0}
    engine, optimizer, _, _ = deepspeed.initialize(
        model=net(),
        config=given,
        lr_scheduler=lambda inner: torch.optim.lr_scheduler.ReduceLROnPlateau(inner, patience=0),
    )
    data, rank = batches(1, 2)[0], deepspeed.comm.get_rank()
    rates = []
    for _ in range(2):
        for _ in range(2):
            loss = loss_of(engine, data)
            torch.testing.assert_close(engine.backward(loss), loss / 2)
            engine.step(lr_kwargs={"metrics": 1.0})
        rates.append(engine.get_lr()[0])
    assert rates[1] == pytest.approx(rates[0] / 10)
    with pytest.raises(ValueError, match="not a parameter of this engine"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    rows = [torch.tensor([float(i)]) for i in range(8)]
    first = next(iter(engine.deepspeed_io(rows, batch_size=2, route=ROUTE_EVAL)))
    assert first.tolist() == [[rank], [rank + 2.0]]
    loaded = []
    engine.load_module_state_dict({"module": {}}, custom_load_fn=lambda src, dst: loaded.append(dst))
    assert loaded == [engine.module]

    weight = engine.module.layers[0].up.weight
    gathered = deepspeed.zero.GatheredParameters([weight])
    for _ in range(2):
        with gathered:
            assert weight.numel() == weight.ds_numel
    weight.all_gather()
    weight.data.fill_(7.0)
    weight.partition(has_been_updated=True)
    with gathered:
        assert weight.eq(7).all()
    mine = deepspeed.utils.safe_get_local_fp32_param(weight)
    if rank == 0:  # of its own part alone, without the other
        deepspeed.utils.safe_set_local_fp32_param(weight, torch.zeros_like(mine))
    with gathered:
        zeros = torch.tensor([float(mine.numel()) if rank == 0 else 0.0])
        deepspeed.comm.all_reduce(zeros)
        assert int(weight.eq(0).sum()) == int(zeros) > 0
        assert int(weight.eq(7).sum()) == weight.numel() - int(zeros)
    engine.destroy()
    return "done"


def test_a_scripts_loop() -> None:
    assert run_workers(_loop, 2) == ["done"] * 2


@pytest.mark.parametrize("name", ["SGD", "RMSprop", "Adafactor", "NAdam"])
def test_the_groups_of_another_optimizer_do_not_become_adams(name: str) -> None:
    """accelerate passes them with offload_optimizer: see map_pytorch_optim_to_deepspeed."""
    from zlaunch.compat.deepspeed.optimizers import DeepSpeedCPUAdam

    cpu_adam: Any = DeepSpeedCPUAdam
    weight = nn.Parameter(torch.zeros(4))
    with pytest.raises(ValueError, match="param groups of another optimizer"):
        cpu_adam(getattr(torch.optim, name)([weight], lr=0.1).param_groups, lr=0.1, adamw_mode=False)
    made = cpu_adam(torch.optim.AdamW([weight], lr=0.1).param_groups, lr=0.1, adamw_mode=True)
    assert type(made) is torch.optim.AdamW


def _rest() -> str:
    deepspeed = _deepspeed()
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.ops.aio import AsyncIOBuilder
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.utils import OnDevice, groups

    deepspeed.init_distributed(dist_backend="nccl")  # gloo, where there is no GPU
    deepspeed.init_distributed()
    comm = deepspeed.comm
    tensor = torch.ones(3) * (comm.get_rank() + 1)
    comm.all_reduce(tensor, op=comm.ReduceOp.SUM, prof=True)
    assert (
        tensor.tolist() == [3.0] * 3 and comm.get_world_size() == 2 == groups._get_data_parallel_world_size()
    )
    comm.barrier()
    both, one = torch.zeros(2), torch.zeros(1)
    comm.all_gather_into_tensor(both, tensor=torch.ones(1))
    comm.reduce_scatter_tensor(output_tensor=one, tensor=both.clone())
    assert both.tolist() == [1.0, 1.0] and one.tolist() == [2.0]
    comm.all_reduce(one, comm.ReduceOp.SUM, None, False, False, "name")
    handle = comm.all_reduce_coalesced([one, both], async_op=True)
    handle.wait()
    assert one.tolist() == [8.0] and both.tolist() == [2.0, 2.0]
    device = get_accelerator()
    assert device.current_device_name() == "cpu" and device.communication_backend_name() == "gloo"
    assert device.is_available() and device.device_count() == 2 and device.total_memory() > 1 << 30
    assert deepspeed.ops.__compatible_ops__[AsyncIOBuilder.NAME] is True
    weight = nn.Parameter(torch.zeros(4))
    made = FusedAdam([weight], lr=0.1), DeepSpeedCPUAdam([weight], lr=0.1, adamw_mode=False)
    assert type(made[0]) is torch.optim.AdamW and type(made[1]) is torch.optim.Adam
    assert made[0].param_groups[0]["weight_decay"] == 0.0 and isinstance(made[0], FusedAdam)
    with OnDevice(dtype=torch.float16, device="meta"):
        layer = nn.Linear(10, 10)
    assert layer.weight.is_meta and layer.weight.dtype == torch.float16
    settled = DeepSpeedConfig(
        {"train_batch_size": 8, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
    )
    assert settled.train_micro_batch_size_per_gpu == 4 and settled.zero_enabled and settled.bfloat16_enabled
    with pytest.raises(deepspeed.DeepSpeedConfigError, match="train_batch_size"):
        DeepSpeedConfig({"train_batch_size": "x"})
    nested = deepspeed.runtime.utils.move_to_device({"a": [torch.ones(1), 2]}, "cpu")
    assert nested["a"][1] == 2
    assert deepspeed.utils.torch.required_torch_version(min_version=2.0, max_version=99)
    layers = [nn.Linear(4, 4) for _ in range(2)]
    x = torch.randn(2, 4, requires_grad=True)
    deepspeed.checkpointing.checkpoint(layers[0], x).sum().backward()
    assert x.grad is not None
    return "done"


def test_the_rest() -> None:
    assert run_workers(_rest, 2) == ["done"] * 2


def test_getters_of_autocast(deepspeed: Any) -> None:
    section = {"enabled": True, "dtype": "float16", "lower_precision_safe_modules": ["torch.nn.Linear"]}
    plain = {key: value for key, value in GIVEN.items() if key not in ("fp16", "bf16")}
    engine, *_ = deepspeed.initialize(model=net(), config={**plain, "torch_autocast": section})
    assert engine.torch_autocast_enabled() and not engine.fp16_enabled() and not engine.amp_enabled()
    assert engine.torch_autocast_dtype() is torch.float16
    assert engine.torch_autocast_lower_precision_safe_modules() == ["torch.nn.Linear"]
    assert engine.optimizer.dynamic_loss_scale and engine.optimizer.loss_scale == 65536.0
    engine.destroy()
    engine, *_ = deepspeed.initialize(
        model=net(), config={**plain, "amp": {"enabled": True, "loss_scale": 8}}
    )
    assert engine.amp_enabled() and engine.amp_params() == {"loss_scale": 8}
    assert not engine.torch_autocast_enabled() and engine.optimizer.loss_scale == 8.0
    engine.destroy()
