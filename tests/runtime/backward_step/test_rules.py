"""Test what steps inside the backward pass refuse, and that it is refused before or told after a change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zlaunch
from tests.runtime.backward_step.test_equality import SAMPLES, engine_of, settings
from tests.runtime.models import Layer, batches, config, loss_of, net, train_engine, with_forward
from tests.runtime.workers import join, run_workers
from zlaunch.errors import ZlaunchError
from zlaunch.runtime.config import ConfigError, load

(TOKENS,) = batches(1, SAMPLES)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"zero": {"stage": 1}}, "needs stage 2 or 3"),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps is 2"),
        ({"fp16": {"enabled": True}}, "use bf16"),
        ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, "use bf16"),
        ({"zero": {"offload_optimizer": {"device": "cpu"}}}, "is not supported with offload_optimizer"),
        ({"zero": {"stage": 3, "offload_param": {"device": "cpu"}}}, "is not supported with offload_param"),
        ({"zero": {"stage": 1}, "parallel": {"pipeline": 2}}, "pipeline parallelism"),
        ({"zero": {"step_in_backward_clipping": "norm"}}, "step_in_backward_clipping"),
    ],
)
def test_configs_that_cannot_be(changes: dict[str, Any], said: str) -> None:
    zero = {"stage": 2, "step_in_backward": True, **changes.pop("zero", {})}
    with pytest.raises(ConfigError, match=said):
        load({**config(2, 1), "zero_optimization": zero, **changes})


def test_a_clipping_without_the_step_is_told() -> None:
    zero = {"stage": 2, "step_in_backward_clipping": "value"}
    found = load({**config(2, 1), "zero_optimization": zero})
    assert any("no effect: step_in_backward is false" in each for each in found.warnings)


def _refused() -> dict[str, str]:
    """Returns what each wrong call says; afterwards the parameters are those of an ordinary run."""
    join()
    found: dict[str, str] = {}

    def note(what: str, call: Any) -> None:
        try:
            call()
        except ZlaunchError as error:
            found[what] = str(error)

    derived = settings(2) | {"train_batch_size": 4 * SAMPLES}
    del derived["gradient_accumulation_steps"]
    note("derived", lambda: zlaunch.initialize(model=net(), config=derived))
    lamb = settings(2) | {"optimizer": {"type": "Lamb", "params": {"lr": 1e-3}}}
    note("lamb", lambda: zlaunch.initialize(model=net(), config=lamb))

    engine = engine_of(net().double(), 2)
    note("retain", lambda: engine.backward(loss_of(engine, TOKENS), retain_graph=True))
    note("batch", lambda: engine.set_batch(24, 12, 2))
    note("boundary", lambda: engine.set_gradient_accumulation_boundary(False))
    parameter = engine.module.head.weight
    engine.backward(loss_of(engine, TOKENS))
    note("forward", lambda: engine(TOKENS))
    note("module", lambda: engine.module(TOKENS))
    note("zero_grad", engine.zero_grad)
    note("optimizer", engine.optimizer.zero_grad)
    note("none", lambda: setattr(parameter, "grad", None))
    note("grad", lambda: parameter.grad)
    note("state", engine.module.state_dict)
    note("load", lambda: engine.module.load_state_dict({}, strict=False))
    note("optimizer's state", engine.optimizer.state_dict)
    note("master", lambda: zlaunch.safe_get_full_fp32_param(parameter))
    note("save", lambda: engine.save_checkpoint("/nowhere"))
    note("weights", lambda: engine.save_16bit_model("/nowhere"))
    engine.step()
    engine.zero_grad()
    note("get", lambda: zlaunch.safe_get_full_grad(parameter))
    note("set", lambda: zlaunch.safe_set_full_grad(parameter, torch.zeros_like(parameter)))
    plain = engine_of(net().double(), 2, step_in_backward=True)
    train_engine(plain, [TOKENS])
    for name, value in plain.module.state_dict().items():
        assert torch.equal(value, engine.module.state_dict()[name]), name

    engine.backward(loss_of(engine, TOKENS))
    engine.optimizer.param_groups[0]["lr"] *= 2
    note("rate", engine.step)
    note("rate's next", lambda: engine(TOKENS))
    engine = engine_of(net().double(), 2)

    def stop(*_: Any) -> None:
        raise zlaunch.OptimizerError("my hook's own")

    handle = engine.optimizer.register_step_pre_hook(stop)
    engine.backward(loss_of(engine, TOKENS))
    note("hook", engine.step)
    note("hook's next", engine.zero_grad)
    handle.remove()
    engine = engine_of(net().double(), 2)
    losses = [loss_of(engine, TOKENS) for _ in range(2)]
    losses[0].backward()
    note("second", losses[1].backward)
    return found


def test_calls_that_cannot_be() -> None:
    (found,) = run_workers(_refused, 1)
    said = {
        "derived": "gradient_accumulation_steps is 4",
        "lamb": "is not element-wise",
        "retain": "retain_graph=True",
        **dict.fromkeys(("batch", "boundary"), "micro-batches per step"),
        **dict.fromkeys(
            ("forward", "module", "save", "weights", "state", "load", "optimizer's state", "master"),
            "engine.step() has not completed",
        ),
        **dict.fromkeys(("zero_grad", "optimizer", "none"), "cannot drop gradients"),
        "grad": "zlaunch.safe_get_full_grad",
        **dict.fromkeys(("get", "set"), "cannot be read or set"),
        "rate's next": "engine.step() has not completed",
        "hook": "my hook's own",
        "hook's next": "cannot drop gradients",
        "rate": "lr of parameter group 0 was changed after backward() started",
        "second": "second backward pass before engine.step()",
    }
    assert found.keys() == said.keys()
    assert {what for what, text in said.items() if text not in found[what]} == set()


def _written(when: str) -> tuple[list[str], list[Tensor]]:
    """Returns what three steps say, with looks at a parameter, or a change of it in the last, and the
    parameters.
    """
    join()
    engine, *_ = zlaunch.initialize(model=net().bfloat16(), config={**settings(2), "bf16": {"enabled": True}})
    parameter = engine.module.get_parameter("head.weight")
    held = parameter.data if "held" in when else None
    said = []
    for step in range(3):
        if when == "look before":
            assert parameter.data.norm() > 0
        engine.backward(loss_of(engine, TOKENS.chunk(engine.world_size)[engine.global_rank]))
        with torch.no_grad():
            if step < 2 or when in ("nothing", "look before", "held"):
                pass
            elif when == "look between":
                assert parameter.data.norm() > 0
            elif when == "change":
                parameter.mul_(2.0)
            elif when == "change data":
                parameter.data[-1, -1] += 1.0
            else:
                assert held is not None and when == "change what is held"
                held[0, 0] += 1.0
        try:
            engine.step()
        except ZlaunchError as error:
            said.append(str(error))
        else:
            said.append("")
    values = [] if said[-1] else [value.clone() for value in engine.module.state_dict().values()]
    return said, values


@pytest.mark.parametrize("change", ["change", "change data", "change what is held"])
def test_parameters_that_are_changed_between_pass_and_step(change: str) -> None:
    found = [said for said, _ in run_workers(_written, 2, change)]
    assert [said[:2] for said in found] == [["", ""]] * 2
    assert any("was changed between the backward pass and engine.step()" in said[2] for said in found)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("look", ["look before", "look between", "held"])
def test_parameters_may_be_looked_at_at_any_time(look: str, world: int) -> None:
    plain = run_workers(_written, world, "nothing")
    for (said, looked), (_, values) in zip(run_workers(_written, world, look), plain, strict=True):
        assert said == ["", "", ""]
        assert all(torch.equal(*pair) for pair in zip(looked, values, strict=True))


class _Stop(Exception):
    pass


def _half_way(folder: str) -> list[str]:
    """A pass that ends after the first units were stepped, and what follows; then a load."""
    join()
    engine = engine_of(net().double(), 3)
    train_engine(engine, [TOKENS])
    engine.save_checkpoint(folder)
    wanted = {name: value.clone() for name, value in engine.module.state_dict().items()}
    loss = loss_of(engine, TOKENS)

    def stop(gradient: Tensor) -> None:
        raise _Stop

    said = []
    engine.module.layers[0].norm.weight.register_hook(stop)
    with torch.enable_grad():
        loss = loss_of(engine, TOKENS)
    with pytest.raises(_Stop):
        engine.backward(loss)
    for call in (
        lambda: engine(TOKENS),
        engine.zero_grad,
        lambda: engine.save_checkpoint(folder),
        engine.step,
    ):
        with pytest.raises(ZlaunchError) as caught:
            call()
        said.append(str(caught.value))
    assert engine.load_checkpoint(f"{folder}/none", missing_ok=True) == (None, {})
    with pytest.raises(ZlaunchError, match="midway"):
        engine(TOKENS)
    engine.load_checkpoint(folder)
    for name, value in engine.module.state_dict().items():
        assert torch.equal(value, wanted[name]), name
    with torch.no_grad():
        engine(TOKENS)
    return said


def test_a_pass_that_ends_half_way(tmp_path: Path) -> None:
    (said,) = run_workers(_half_way, 1, str(tmp_path))
    assert ["midway" in each for each in said] == [True, False, True, True]
    assert "cannot drop gradients" in said[1]


def _not_finite(checks: bool) -> str:
    join()
    options = settings(2) | {"bf16": {"enabled": True, "check_grad_overflow": checks}}
    engine, *_ = zlaunch.initialize(model=net(), config=options)
    engine.backward(loss_of(engine, TOKENS) * float("inf"))
    try:
        engine.step()
    except ZlaunchError as error:
        with pytest.raises(ZlaunchError, match="load the last checkpoint"):
            engine(TOKENS)
        return str(error)
    return "went on"


def test_gradients_that_are_not_finite() -> None:
    assert all("gradients are not finite" in said for said in run_workers(_not_finite, 2, True))
    assert run_workers(_not_finite, 1, False) == ["went on"]


def _used_again(stage: int, how: str) -> str:
    join()
    torch.manual_seed(5)
    model: Any = nn.Sequential(*(Layer(24) for _ in range(3)))

    def shared(x: Tensor) -> Tensor:  # one layer in two reentrant checkpoints, alone in its unit
        x = checkpoint(model[1], model[0](x), use_reentrant=True)
        return checkpoint(model[1], model[2](x), use_reentrant=True)

    def detached(x: Tensor) -> Tensor:  # its values are needed after its gradient has come
        own = model[1].up.weight.detach()
        return model[1](model[2](torch.tanh(model[0](x) @ own.T) @ own))

    engine = engine_of(with_forward(model.double(), {"shared": shared, "detached": detached}[how]), stage)
    try:
        x = torch.randn(2, 24, dtype=torch.float64, requires_grad=True)
        engine.backward(engine(x).square().mean())
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("how", ["shared", "detached"])
def test_a_use_after_the_step_is_an_error(stage: int, how: str) -> None:
    (said,) = run_workers(_used_again, 1, stage, how)
    expected = {
        "shared": ("after its step in this backward pass", "used again after its step"),
        "detached": ("has changed it", "modified by an inplace operation", "used again after its step"),
    }
    assert any(text in said for text in expected[how]), said


def _data_in_the_forward(change: float) -> str:
    """Train at stage 3 with a forward that takes ``data`` of a parameter of the root unit and multiplies it;
    return the error. That unit stays gathered until all is stepped.
    """
    join()
    model: Any = net().double()
    inner = model.head.forward

    def forward(x: Tensor) -> Any:
        data = model.head.weight.data
        if change != 1.0:
            data.mul_(change)
        return inner(x)

    with_forward(model.head, forward)
    engine, *_ = zlaunch.initialize(model=model, config=config(3, SAMPLES, zero={"step_in_backward": True}))
    try:
        train_engine(engine, batches(3, SAMPLES))
    except ZlaunchError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("change", [1.0, 1.5])
def test_a_forward_that_reads_data_at_stage_3_is_no_write(change: float) -> None:
    """The values of a stepped unit differ from what was gathered: only a write of the script is an error."""
    (said,) = run_workers(_data_in_the_forward, 1, change)
    assert ("was changed in place while gathered" in said) == (change != 1.0), said
