"""Define errors: training that goes on after one, and mistakes that must be told."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import zlaunch
from tests.matrix.parts import Layer, Stack
from tests.matrix.registry import feature
from tests.matrix.sides import Side, Trainer, settings
from tests.matrix.train import WIDTH, floats, run_steps, squared


class Failing(Stack):
    """Raises what it is told to, in the middle of a pass."""

    error: BaseException | None = None
    where = "forward"

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[1](self.layers[0](x))
        error, self.error = self.error, None
        if error is not None and self.where == "forward":
            raise error
        if error is not None:
            x.register_hook(lambda grad: _raise(error))
        return self.head(self.layers[2](x))


def _raise(error: BaseException) -> None:
    raise error


def _goes_on(
    side: Side, error: BaseException, where: str, evaluation: bool = False, drop: bool = True
) -> None:
    """Train, fail in one pass, forget its gradients and train on."""
    trainer = side.start(Failing())
    run_steps(trainer, range(2))
    for _ in range(2):
        trainer.module.error, trainer.module.where = error, where
        try:
            with torch.set_grad_enabled(not evaluation):
                loss = squared(trainer.call(side.share(floats(50)[0])))
                trainer.backward(loss)
        except (ValueError, KeyboardInterrupt):
            if drop:
                trainer.drop()
        else:
            raise AssertionError("the pass should have failed")
    run_steps(trainer, range(2, 5))


_ERRORS: dict[str, Callable[[], BaseException]] = {
    "error": lambda: ValueError("bad data"),
    "keyboard_interrupt": lambda: KeyboardInterrupt(),
}
for _kind, _make in _ERRORS.items():
    for _where in ("forward", "backward"):
        feature("errors", f"{_kind}_in_{_where}_and_on")(
            lambda side, make=_make, where=_where: _goes_on(side, make(), where)
        )
feature("errors", "error_in_forward_and_on_without_zero_grad")(
    lambda side: _goes_on(side, ValueError("bad data"), "forward", drop=False)
)
feature("errors", "error_in_evaluation_and_on")(
    lambda side: _goes_on(side, ValueError("bad data"), "forward", evaluation=True)
)


@feature("errors", "error_in_one_block_that_the_model_catches")
def caught(side: Side) -> None:
    class Catching(Failing):
        def forward(self, x: Tensor) -> Tensor:
            try:
                return super().forward(x)
            except ValueError:
                return self.head(self.layers[0](x))

    trainer = side.start(Catching())
    for step in range(4):
        trainer.module.error = ValueError("caught") if step % 2 else None
        run_steps(trainer, range(step, step + 1))


def _mistake(
    name: str, pattern: str, *, stages: tuple[int, ...] = (0, 1, 2, 3), train: bool = True
) -> Callable[[Callable[[Trainer], Any]], Callable[[Trainer], Any]]:
    """Register a mistake that comes after a step and must be told before the end of another one."""

    def register(act: Callable[[Trainer], Any]) -> Callable[[Trainer], Any]:
        def run(side: Side) -> None:
            trainer = side.start(Stack())
            run_steps(trainer, range(1))
            act(trainer)
            if train:
                run_steps(trainer, range(1, 3))

        feature("errors", name, refuses=pattern, stages=stages)(run)
        return act

    return register


@_mistake("step_without_backward", "backward|no gradient", train=False)
def step_without_backward(trainer: Trainer) -> None:
    trainer.call.step()


@_mistake("step_after_zero_grad", "backward|no gradient", train=False)
def step_after_zero_grad(trainer: Trainer) -> None:
    trainer.backward(squared(trainer.call(trainer.side.share(floats(7)[0]))))
    trainer.drop()
    trainer.call.step()


@_mistake("loss_without_a_graph", "does not depend|does not require grad|trainable")
def loss_without_a_graph(trainer: Trainer) -> None:
    with torch.no_grad():
        loss = squared(trainer.call(trainer.side.share(floats(7)[0])))
    trainer.backward(loss)


MOVED = r"\.data|storage|replaced|load_state_dict|GatheredParameters|copy_"


@_mistake("data_of_a_parameter_replaced", MOVED)
def data_replaced(trainer: Trainer) -> None:
    weight = trainer.module.layers[1].up.weight
    weight.data = torch.randn(weight.shape, dtype=weight.dtype)


@_mistake("data_of_a_root_parameter_replaced", MOVED)
def root_data_replaced(trainer: Trainer) -> None:
    trainer.module.head.bias.data = torch.zeros(WIDTH, dtype=torch.float64)


@_mistake("data_of_two_parameters_swapped", MOVED)
def swapped(trainer: Trainer) -> None:
    a, b = trainer.module.layers[0].up.weight, trainer.module.layers[1].up.weight
    a.data, b.data = b.data, a.data


CHANGED = "replaced|added|registered|new parameter|after zlaunch.initialize|not one of|does not belong"


@_mistake("parameter_replaced", CHANGED)
def parameter_replaced(trainer: Trainer) -> None:
    trainer.module.head.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64))


@_mistake("block_replaced", CHANGED)
def block_replaced(trainer: Trainer) -> None:
    trainer.module.layers[1] = Layer(WIDTH).double()


@_mistake("block_added", CHANGED)
def block_added(trainer: Trainer) -> None:
    trainer.module.layers.append(Layer(WIDTH).double())


@_mistake("block_wrapped_in_lora", CHANGED)
def block_wrapped(trainer: Trainer) -> None:
    class Lora(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base, self.extra = base, nn.Linear(WIDTH, WIDTH).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.extra(x)

    trainer.module.layers[0] = Lora(trainer.module.layers[0])


def _before_step(name: str, pattern: str) -> Callable[[Callable[[Trainer], Any]], Callable[[Trainer], Any]]:
    """Register a mistake between backward and step."""

    def register(act: Callable[[Trainer], Any]) -> Callable[[Trainer], Any]:
        def run(side: Side) -> None:
            trainer = side.start(Stack())
            for step in range(2):
                trainer.backward(squared(trainer.call(side.share(floats(step)[0]))))
                act(trainer)
                trainer.step()

        feature("errors", name, refuses=pattern)(run)
        return act

    return register


GRADIENTS = r"gradient_clipping|safe_get_full_grad|safe_set_full_grad"


@_before_step("clip_grad_norm_by_the_user", "gradient_clipping")
def clip_grad_norm(trainer: Trainer) -> None:
    nn.utils.clip_grad_norm_(trainer.module.parameters(), 0.1)


@_before_step("clip_grad_value_by_the_user", GRADIENTS)
def clip_grad_value(trainer: Trainer) -> None:
    nn.utils.clip_grad_value_(trainer.module.parameters(), 0.1)


@_before_step("gradients_read_by_the_user", GRADIENTS)
def gradients_read(trainer: Trainer) -> None:
    sum(float(p.grad.norm()) for p in trainer.module.parameters() if p.grad is not None)


@_before_step("gradients_scaled_by_the_user", GRADIENTS)
def gradients_scaled(trainer: Trainer) -> None:
    for parameter in trainer.module.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


@_before_step("gradients_written_by_the_user", GRADIENTS + "|grad")
def gradients_written(trainer: Trainer) -> None:
    for parameter in trainer.module.parameters():
        parameter.grad = torch.ones(parameter.shape, dtype=parameter.dtype)


SHARDED = "shard|GatheredParameters"

IN_PLACE: dict[str, Callable[[Tensor], Any]] = {
    "fill": lambda p: p.fill_(1.0),
    "zero": lambda p: p.zero_(),
    "add": lambda p: p.add_(1.0),
    "copy": lambda p: p.copy_(torch.ones(p.shape, dtype=p.dtype)),
    "mul_operator": lambda p: p.__imul__(2.0),
    "index": lambda p: p.__setitem__(0, 1.0),
    "view": lambda p: p.view(-1).fill_(1.0),
    "data_fill": lambda p: p.data.fill_(1.0),
    "detached_fill": lambda p: p.detach().fill_(1.0),
    "foreach": lambda p: torch._foreach_add_([p], 1.0),
    "init_normal": lambda p: nn.init.normal_(p),
    "init_zeros": lambda p: nn.init.zeros_(p),
    "init_xavier_uniform": lambda p: nn.init.xavier_uniform_(p),
    "init_kaiming_uniform": lambda p: nn.init.kaiming_uniform_(p),
    "init_orthogonal": lambda p: nn.init.orthogonal_(p),
    "init_trunc_normal": lambda p: nn.init.trunc_normal_(p),
    "out_argument": lambda p: torch.ones(p.shape, dtype=p.dtype, out=p.detach()),
}


def _in_place(side: Side, write: Callable[[Tensor], Any]) -> None:
    trainer = side.start(Stack())
    run_steps(trainer, range(1))
    with torch.no_grad():
        write(trainer.module.layers[1].up.weight)


for _name, _write in IN_PLACE.items():
    feature("errors", f"sharded_in_place_{_name}", stages=(3,), refuses=SHARDED)(
        lambda side, write=_write: _in_place(side, write)
    )


@feature("errors", "sharded_parameter_read_without_grad_is_nan", stages=(3,))
def nan(side: Side) -> None:
    if side.is_plain:
        side.record("is nan", True)
        return
    trainer = side.start(Stack())
    run_steps(trainer, range(1))
    weight = trainer.module.layers[1].up.weight
    with torch.no_grad():
        shape = weight.shape == (4 * WIDTH, WIDTH)
        side.record("is nan", shape and bool(weight.isnan().all()) and bool(weight.sum().isnan()))
    side.close()
    side.records = {"is nan": side.records["is nan"]}


@feature("errors", "sharded_parameter_read_with_grad", stages=(3,), refuses=SHARDED)
def read_with_grad(side: Side) -> None:
    trainer = side.start(Stack())
    run_steps(trainer, range(1))
    trainer.module.layers[1].up.weight.sum().backward()


@feature("errors", "sharded_model_copied", stages=(3,), refuses="cannot be copied")
def copied(side: Side) -> None:
    copy.deepcopy(side.start(Stack()).module)


@feature("errors", "sharded_model_pickled", stages=(3,), refuses="cannot be pickled")
def pickled(side: Side) -> None:
    torch.save(side.start(Stack()).module, io.BytesIO())


@feature("errors", "model_converted", refuses="before zlaunch.initialize")
def converted(side: Side) -> None:
    side.start(Stack()).module.float()


@feature("errors", "engine_used_after_destroy", refuses="destroyed")
def destroyed(side: Side) -> None:
    trainer = side.start(Stack())
    trainer.call.destroy()
    run_steps(trainer, range(1))


def _initialize(side: Side, net: nn.Module) -> None:
    zlaunch.initialize(
        model=net,
        config=settings(side.stage or 0, optimizer={"type": "SGD", "params": {"lr": 0.1}}),
    )


@feature("errors", "complex_parameters", refuses=r"complex.*phase|phase.*complex")
def complex_parameters(side: Side) -> None:
    net = Stack()
    net.phase = nn.Parameter(torch.zeros(4, dtype=torch.complex64))
    _initialize(side, net)


@feature("errors", "meta_parameters", refuses=r"(meta.*layers\.1|layers\.1.*meta)")
def meta_parameters(side: Side) -> None:
    net = Stack()
    net.layers[1] = Layer(WIDTH).to("meta")
    _initialize(side, net)


@feature("errors", "lazy_parameters", refuses=r"(lazy|uninitialized).*late|late.*(lazy|uninitialized)")
def lazy_parameters(side: Side) -> None:
    net = Stack()
    net.late = nn.LazyLinear(3)
    _initialize(side, net)


@feature("errors", "dtensor_parameters", refuses=r"DTensor.*head|head.*DTensor")
def dtensor_parameters(side: Side) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    net = Stack()
    mesh = init_device_mesh("cpu", (side.world,))
    net.head.weight = nn.Parameter(distribute_tensor(net.head.weight.detach(), mesh, [Replicate()]))
    _initialize(side, net)


@feature("errors", "sparse_parameters", refuses=r"sparse.*thin|thin.*sparse")
def sparse_parameters(side: Side) -> None:
    net = Stack()
    net.thin = nn.Parameter(torch.eye(4).to_sparse())
    _initialize(side, net)


@feature("errors", "optimizer_of_another_model", refuses="not a parameter of the model")
def another_model(side: Side) -> None:
    other = list(Stack().parameters())
    side.start(Stack(), optimizer=torch.optim.SGD, client=True, groups=lambda m: other)
