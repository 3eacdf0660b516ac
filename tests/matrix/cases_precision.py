"""Define cases of 16 bits and mixed dtypes, compared loosely with plain fp32."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

import zlaunch
from tests.matrix.parts import Layer, Stack
from tests.matrix.registry import feature
from tests.matrix.sides import Side, Trainer
from tests.matrix.train import WIDTH, floats, run_steps, squared, train

BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "loss_scale": 128}}
LOOSE = 3e-2


def loss_in(dtype: torch.dtype | None, call: Any, x: Tensor) -> Tensor:
    """Give the loss of a model that computes in ``dtype``, in fp32; plain torch computes in fp32."""
    plain = not hasattr(call, "backward")
    return squared(call(x.to(torch.float32 if plain or dtype is None else dtype)).float())


def _train(side: Side, config: dict[str, Any], dtype: torch.dtype | None, **options: Any) -> None:
    net = options.pop("net", None) or Stack()
    loss = functools.partial(loss_in, dtype)
    train(side, net, loss=loss, config=config, dtype=torch.float32, **options)


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3, eps=1e-2)


for _name, _config, _dtype in (("bf16", BF16, torch.bfloat16), ("fp16", FP16, torch.float16)):
    for _kind, _options in {
        "": {},
        "_with_accumulation_and_clipping": {"accumulation": 2, "clip": 0.1},
        "_with_adamw": {"optimizer": _adamw},
        "_with_checkpointed_blocks": {"config": {"activation_checkpointing": {"enabled": True}}},
    }.items():
        feature("precision", _name + _kind, tolerance=LOOSE)(
            lambda side, config=_config, dtype=_dtype, options=_options: _train(
                side, {**config, **options.get("config", {})}, dtype,
                **{k: v for k, v in options.items() if k != "config"},
            )
        )  # fmt: skip


@feature("precision", "fp32", tolerance=1e-4)
def fp32(side: Side) -> None:
    _train(side, {}, None)


@feature("precision", "fp16_with_inputs_cast_by_the_engine", tolerance=LOOSE)
def cast(side: Side) -> None:
    _train(side, {"fp16": {"enabled": True, "loss_scale": 64, "auto_cast": True}}, torch.float32)


@feature("precision", "fp16_and_backward_on_the_loss_itself", tolerance=LOOSE)
def on_the_loss(side: Side) -> None:
    trainer = side.start(Stack(), config=FP16, dtype=torch.float32)
    for step in range(4):
        loss_in(torch.float16, trainer.call, side.share(floats(step)[0])).backward()
        trainer.step()


@feature("precision", "fp16_with_dynamic_scale", tolerance=LOOSE)
def dynamic(side: Side) -> None:
    _train(side, {"fp16": {"enabled": True, "initial_scale_power": 8}}, torch.float16)


def _until_applied(trainer: Trainer, count: int) -> int:
    """Train on each batch until a step was applied; how many were not."""
    missed = 0
    for step in range(count):
        for _ in range(40):
            loss = loss_in(torch.float16, trainer.call, trainer.side.share(floats(step)[0]))
            trainer.backward(loss)
            trainer.step()
            if trainer.side.is_plain or trainer.call.was_step_applied():
                break
            missed += 1
    return missed


@feature("precision", "fp16_with_overflow_at_first", tolerance=LOOSE)
def overflow(side: Side) -> None:
    section = {"enabled": True, "initial_scale_power": 24, "hysteresis": 1}
    trainer = side.start(Stack(), config={"fp16": section}, dtype=torch.float32)
    missed = _until_applied(trainer, 4)
    side.record("overflows", side.is_plain or missed > 0)


@feature("precision", "fp16_with_a_bad_batch", tolerance=LOOSE)
def bad_batch(side: Side) -> None:
    """Skip the step of a batch that one rank alone finds infinite."""
    section = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
    trainer = side.start(Stack(), config={"fp16": section}, dtype=torch.float32)
    for step in range(4):
        if not side.is_plain and step == 2:
            x = side.share(floats(60)[0]) * (float("inf") if side.rank else 1.0)
            trainer.backward(loss_in(torch.float16, trainer.call, x))
            trainer.step()
            assert not trainer.call.was_step_applied()
        _one_step(trainer, step, torch.float16)


def _one_step(trainer: Trainer, step: int, dtype: torch.dtype) -> None:
    run_steps(trainer, range(step, step + 1), loss=functools.partial(loss_in, dtype))


class Mixed(nn.Module):
    """Computes partly in fp32, partly in fp64."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(WIDTH).double(), Layer(WIDTH).float(), Layer(WIDTH).double()])
        self.gain = nn.Parameter(torch.ones(WIDTH, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[1](self.layers[0](x).float()) * self.gain
        return self.layers[2](x.double())


@feature("precision", "mixed_dtypes", tolerance=1e-4)
def mixed(side: Side) -> None:
    train(side, Mixed(), dtype=None)


@feature("precision", "mixed_dtypes_inside_a_block", tolerance=1e-4)
def mixed_inside(side: Side) -> None:
    net = Stack().double()

    class Upper(nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.float()).double()

    for layer in net.layers:
        layer.norm = Upper(WIDTH)
    train(side, net, dtype=None)


@feature("precision", "frozen_fp32_under_trainable_fp64", tolerance=1e-4)
def frozen(side: Side) -> None:
    net = Mixed()
    net.layers[1].requires_grad_(False)
    train(side, net, dtype=None)


@feature("precision", "integer_parameter")
def integer(side: Side) -> None:
    class Indexed(Stack):
        order: Tensor

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x[..., self.order])

    net = Indexed()
    net.order = nn.Parameter(torch.arange(WIDTH).flip(0), requires_grad=False)
    train(side, net.double())


@feature("precision", "bf16_model_without_a_section", tolerance=LOOSE)
def bare_bf16(side: Side) -> None:
    dtype = torch.float32 if side.is_plain else torch.bfloat16
    trainer = side.start(Stack(), dtype=dtype)
    run_steps(trainer, range(3), loss=functools.partial(loss_in, torch.bfloat16))


@feature("precision", "float_buffers_in_bf16", tolerance=LOOSE)
def buffers(side: Side) -> None:
    class Scaled(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    net = Scaled()
    net.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))
    loss = functools.partial(loss_in, torch.bfloat16)
    trainer = train(side, net, loss=loss, config=BF16, dtype=torch.float32)
    scale = trainer.module.get_buffer("scale")
    assert torch.equal(scale, torch.linspace(0.5, 1.5, WIDTH))  # it is not rounded


@feature("precision", "bf16_weights_changed_between_steps", tolerance=LOOSE)
def changed(side: Side) -> None:
    trainer = side.start(Stack(), config=BF16, dtype=torch.float32)
    for step in range(4):
        _one_step(trainer, step, torch.bfloat16)
        own = list(trainer.module.parameters())
        with zlaunch.zero.GatheredParameters(own, modifier_rank=0), torch.no_grad():
            for parameter in own:
                parameter.clamp_(-0.1, 0.1)


@feature("precision", "bf16_state_dict_loaded", tolerance=LOOSE)
def loaded(side: Side) -> None:
    trainer = side.start(Stack(), config=BF16, dtype=torch.float32)
    _one_step(trainer, 0, torch.bfloat16)
    trainer.module.load_state_dict({name: value * 0.5 for name, value in trainer.values().items()})
    _one_step(trainer, 1, torch.bfloat16)
