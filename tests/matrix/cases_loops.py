"""Define training loops that are not forward, backward, step."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from tests.matrix.parts import Stack
from tests.matrix.registry import feature
from tests.matrix.sides import Side, Trainer
from tests.matrix.train import WIDTH, floats, run_steps, squared, train


def _gan(side: Side, clear: str) -> None:
    """Train two engines of which each one's backward pass leaves gradients in the other."""
    maker, critic = side.start(Stack()), side.start(Stack())

    def forget() -> None:
        if clear == "optimizer":
            critic.optimizer.zero_grad()
        elif clear == "model":
            critic.module.zero_grad()
        else:
            critic.call.zero_grad()

    for step in range(4):
        real, noise = side.share(floats(step)[0]), side.share(floats(100 + step)[0])
        forget()
        critic.backward(squared(critic.call(real)) + critic.call(maker.call(noise).detach()).mean())
        critic.step()
        loss = critic.call(maker.call(noise)).square().mean()
        maker.backward(loss)
        maker.step()
        side.record_mean(f"loss {step}", loss)
    forget()


for _clear in ("optimizer", "model", "engine"):
    feature("loops", f"gan_with_zero_grad_of_the_{_clear}")(lambda side, clear=_clear: _gan(side, clear))


@feature("loops", "gan_with_requires_grad_switched_off")
def gan_frozen(side: Side) -> None:
    maker, critic = side.start(Stack()), side.start(Stack())
    for step in range(4):
        real, noise = side.share(floats(step)[0]), side.share(floats(100 + step)[0])
        critic.module.requires_grad_(True)
        critic.backward(squared(critic.call(real)) + critic.call(maker.call(noise).detach()).mean())
        critic.step()
        critic.module.requires_grad_(False)
        maker.backward(critic.call(maker.call(noise)).square().mean())
        maker.step()
    critic.module.requires_grad_(True)


for _count in (1, 2, 3):
    feature("loops", f"accumulation_{_count}")(
        lambda side, count=_count: train(side, Stack(), accumulation=count)
    )
    feature("loops", f"accumulation_{_count}_with_clipping")(
        lambda side, count=_count: train(side, Stack(), accumulation=count, clip=0.05)
    )


@feature("loops", "clipping_that_does_nothing")
def no_clipping(side: Side) -> None:
    train(side, Stack(), clip=1e6)


REFUSES_NO_SYNC = "no_sync.*gradient_accumulation_steps"


@feature("loops", "no_sync", refuses={2: REFUSES_NO_SYNC, 3: REFUSES_NO_SYNC})
def no_sync(side: Side) -> None:
    trainer = side.start(Stack())
    for step in range(3):
        first, second = (side.share(floats(2 * step + i)[0]) for i in range(2))
        if side.is_plain:
            trainer.backward(squared(trainer.call(first)))
        else:
            with trainer.call.no_sync():
                trainer.backward(squared(trainer.call(first)))
        trainer.backward(squared(trainer.call(second)))
        trainer.step()


@feature("loops", "accumulation_by_hand_without_no_sync")
def by_hand(side: Side) -> None:
    trainer = side.start(Stack())
    for step in range(3):
        for micro in range(3):
            trainer.backward(squared(trainer.call(side.share(floats(3 * step + micro)[0]))) / 3)
        trainer.step()


@feature("loops", "several_forwards_before_one_backward")
def forwards(side: Side) -> None:
    trainer = side.start(Stack())
    for step in range(3):
        losses = [squared(trainer.call(side.share(floats(3 * step + i)[0]))) for i in range(3)]
        trainer.backward(losses[0] + 2 * losses[1] - 0.5 * losses[2])
        trainer.step()


@feature("loops", "outputs_that_go_in_again")
def recurrent(side: Side) -> None:
    trainer = side.start(Stack())
    for step in range(3):
        x = side.share(floats(step)[0])
        trainer.backward(squared(trainer.call(trainer.call(trainer.call(x)).tanh())))
        trainer.step()


@feature("loops", "backward_on_the_loss_itself")
def on_the_loss(side: Side) -> None:
    trainer = side.start(Stack())
    for step in range(4):
        squared(trainer.call(side.share(floats(step)[0]))).backward()
        trainer.step()


@feature("loops", "evaluation_between_steps")
def evaluation(side: Side) -> None:
    trainer = side.start(Stack())
    for step in range(4):
        run_steps(trainer, range(step, step + 1))
        trainer.call.eval()
        with torch.no_grad() if step % 2 else torch.inference_mode():
            side.record_share(f"output {step}", trainer.call(side.share(floats(50 + step)[0])).clone())
        trainer.call.train()


@feature("loops", "evaluation_before_the_first_step")
def evaluation_first(side: Side) -> None:
    trainer = side.start(Stack())
    with torch.inference_mode():
        side.record_share("output", trainer.call(side.share(floats(50)[0])).clone())
    run_steps(trainer, range(3))


@feature("loops", "evaluation_between_micro_batches")
def evaluation_in_a_step(side: Side) -> None:
    trainer = side.start(Stack(), accumulation=2)
    for micro in range(6):
        trainer.backward(squared(trainer.call(side.share(floats(micro)[0]))))
        with torch.no_grad():
            side.record_share(f"output {micro}", trainer.call(side.share(floats(50 + micro)[0])))
        trainer.step()


@feature("loops", "evaluation_with_gradients_that_nobody_uses")
def evaluation_with_grad(side: Side) -> None:
    trainer = side.start(Stack())
    for step in range(3):
        trainer.call.eval()
        side.record_share(f"output {step}", trainer.call(side.share(floats(50 + step)[0])))
        trainer.call.train()
        run_steps(trainer, range(step, step + 1))


@feature("loops", "one_of_the_losses_is_skipped")
def skipped(side: Side) -> None:
    trainer = side.start(Stack())
    for step in range(4):
        loss = squared(trainer.call(side.share(floats(step)[0])))
        if step == 2:
            continue
        trainer.backward(loss)
        trainer.step()


@feature("loops", "bad_batch_dropped_by_zero_grad")
def bad_batch(side: Side) -> None:
    trainer = side.start(Stack())
    for step in range(4):
        trainer.backward(squared(trainer.call(side.share(floats(50 + step)[0]))))
        trainer.drop()
        run_steps(trainer, range(step, step + 1))


@feature("loops", "zero_grad_first_and_not_to_none")
def not_to_none(side: Side) -> None:
    trainer = side.start(Stack())
    for step in range(4):
        trainer.optimizer.zero_grad(set_to_none=False)
        loss = squared(trainer.call(side.share(floats(step)[0])))
        trainer.backward(loss)
        if side.is_plain:
            trainer.optimizer.step()
        else:
            trainer.call.step()


@feature("loops", "zero_grad_between_backward_and_step_of_micro_batches")
def dropped_micro(side: Side) -> None:
    """Drop what a whole accumulation has gathered so far."""
    trainer = side.start(Stack())
    for step in range(3):
        trainer.backward(squared(trainer.call(side.share(floats(60 + step)[0]))))
        trainer.backward(squared(trainer.call(side.share(floats(70 + step)[0]))))
        trainer.drop()
        trainer.backward(squared(trainer.call(side.share(floats(step)[0]))))
        trainer.step()


class Coder(Stack):
    """Has methods of its own beside forward."""

    def encode(self, x: Tensor) -> Tensor:
        for layer in self.layers[:2]:
            x = layer(x)
        return x

    def decode(self, x: Tensor) -> Tensor:
        return self.head(self.layers[2](x))

    def compute_loss(self, x: Tensor) -> Tensor:
        return squared(self.decode(self.encode(x)))

    def whole_loss(self, x: Tensor) -> Tensor:
        return squared(self(x))


@feature("loops", "method_that_calls_submodules")
def method(side: Side) -> None:
    train(side, Coder(), loss=lambda call, x: call.compute_loss(x))


@feature("loops", "method_that_calls_the_module")
def method_whole(side: Side) -> None:
    train(side, Coder(), loss=lambda call, x: call.whole_loss(x))


@feature("loops", "methods_of_the_module_one_by_one")
def methods(side: Side) -> None:
    trainer = side.start(Coder())
    for step in range(4):
        code = trainer.module.encode(side.share(floats(step)[0]))
        trainer.backward(squared(trainer.module.decode(code)) + code.square().mean())
        trainer.step()


@feature("loops", "blocks_called_by_the_loop")
def blocks(side: Side) -> None:
    trainer = side.start(Stack())
    for step in range(4):
        x = side.share(floats(step)[0])
        for layer in trainer.module.layers:
            x = layer(x)
        trainer.backward(squared(trainer.module.head(x)))
        trainer.step()


@feature("loops", "encoder_in_evaluation_beside_training")
def encoder(side: Side) -> None:
    trainer = side.start(Coder())
    for step in range(3):
        with torch.no_grad():
            side.record_share(f"code {step}", trainer.module.encode(side.share(floats(50 + step)[0])))
        run_steps(trainer, range(step, step + 1))


@feature("loops", "two_engines_whose_losses_meet")
def two(side: Side) -> None:
    first, second = side.start(Stack()), side.start(Stack())
    for step in range(4):
        x = side.share(floats(step)[0])
        (squared(first.call(x)) + squared(second.call(x))).backward()
        first.step()
        second.step()


@feature("loops", "two_engines_one_after_the_other")
def chained(side: Side) -> None:
    first, second = side.start(Stack()), side.start(Stack())
    for step in range(4):
        loss = squared(second.call(first.call(side.share(floats(step)[0]))))
        first.backward(loss)
        first.step()
        second.step()


@feature("loops", "teacher_and_student_with_contrast")
def distillation(side: Side) -> None:
    teacher = copy.deepcopy(Stack()).double().requires_grad_(False)
    trainer = side.start(Stack())
    for step in range(3):
        x = side.share(floats(step)[0])
        trainer.backward((trainer.call(x) - teacher(x)).square().mean())
        trainer.step()


def _samples(count: int = 24) -> Tensor:
    return torch.cat([floats(i)[0] for i in range(count // 4)])


@feature("loops", "torch_data_loader")
def data_loader(side: Side) -> None:
    data = torch.utils.data.TensorDataset(_samples())
    sampler: Any = None
    if not side.is_plain:
        sampler = torch.utils.data.DistributedSampler(data, side.world, side.rank, shuffle=False)
    size = 4 if side.is_plain else 4 // side.world
    loader = torch.utils.data.DataLoader(data, batch_size=size, sampler=sampler)
    trainer = side.start(Stack())
    for (x,) in loader:
        trainer.backward(squared(trainer.call(x)))
        trainer.step()


@feature("loops", "training_data")
def training_data(side: Side) -> None:
    """Train from the loader that initialize returns, and plain torch on what it gave."""
    if side.is_plain:
        side.record("difference", 0.0)
        return
    samples = _samples()
    data = torch.utils.data.TensorDataset(samples, torch.arange(len(samples)))
    plain = Stack().double()
    net = copy.deepcopy(plain)
    trainer = side.start(net, training_data=data)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    for _ in range(2):
        for x, index in trainer.call.training_dataloader:
            trainer.backward(squared(trainer.call(x)))
            trainer.step()
            everyone: list[Any] = [None] * side.world
            torch.distributed.all_gather_object(everyone, index.tolist())
            squared(plain(samples[[i for mine in everyone for i in mine]])).backward()
            optimizer.step()
            optimizer.zero_grad()
    got, want = trainer.values(), plain.state_dict()
    side.record("difference", max(float((got[name] - want[name]).abs().max()) for name in want))
    trainer.call.destroy()
    side.trainers.clear()


class Actor(nn.Module):
    """Acts for several steps before it learns."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.policy, self.value = Stack(), nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.body(x)
        return self.policy(y), self.value(y)


@feature("loops", "reinforcement_learning")
def reinforcement(side: Side) -> None:
    """Act without gradients, then learn from what was collected in several epochs."""
    trainer: Trainer = side.start(Actor())
    for step in range(2):
        collected = []
        x = side.share(floats(step)[0])
        with torch.no_grad():
            for _ in range(3):
                logits, value = trainer.call(x)
                collected.append((x, logits.argmax(-1), value))
                x = x.roll(1, 1) + logits.mean(-1, keepdim=True)
        for _ in range(2):
            for x, action, old in collected:
                logits, value = trainer.call(x)
                chosen = logits.log_softmax(-1).gather(-1, action[..., None])
                trainer.backward(-(chosen * (1 - old)).mean() + (value - 1).square().mean())
                trainer.step()
