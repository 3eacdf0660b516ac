"""Test what an optimizer itself keeps in its param groups, and variants that no kernel has."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zlaunch.cuda_ops.step import SliceUpdate
from zlaunch.runtime.checkpoint.load import groups_of, restore_groups
from zlaunch.runtime.optim.step import InnerOptimizer
from zlaunch.runtime.optim.update_rule import UpdateRule


class Counting(torch.optim.Optimizer):
    """Keeps a count in its groups, as schedule-free optimizers and Prodigy do, and steps by it."""

    def __init__(self, parameters: Any, lr: float = 1.0) -> None:
        super().__init__(parameters, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] += 1
            group["sum"] = group.get("sum", 0) + group["k"]
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] / group["k"])


def pieces(count: int, group: int = 0) -> list[SliceUpdate]:
    return [SliceUpdate(group, torch.zeros(4), torch.ones(4)) for _ in range(count)]


def test_a_step_in_pieces_counts_once() -> None:
    rule = UpdateRule(Counting([nn.Parameter(torch.zeros(1))]))
    first, second = pieces(2)
    moved = 0.0
    for step in (1, 2, 3):
        moved -= 1 / step
        rule.begin(1.0)
        for piece in (first, second):
            piece.grad = torch.ones(4)
            rule.apply([piece], {})
        rule.end()
        group = rule.optimizer.param_groups[0]
        assert (group["k"], group["sum"]) == (step, step * (step + 1) // 2)
        for piece in (first, second):
            torch.testing.assert_close(piece.leaf, torch.full((4,), moved))


def test_what_the_script_sets_meanwhile_is_kept() -> None:
    rule = UpdateRule(Counting([nn.Parameter(torch.zeros(1))]))
    rule.begin(1.0)
    rule.optimizer.param_groups[0]["lr"] = 0.5
    rule.apply(pieces(1), {})
    rule.end()
    group = rule.optimizer.param_groups[0]
    assert (group["lr"], group["k"]) == (0.5, 1), "a rate set while the step was under way"


def test_each_group_has_its_count() -> None:
    members = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    rule = UpdateRule(
        Counting([{"params": [p], "k": start} for p, start in zip(members, (0, 7), strict=True)])
    )
    first, second = *pieces(1), *pieces(1, group=1)
    rule.begin(1.0)
    rule.apply([first, second], {})
    rule.end()
    assert [group["k"] for group in rule.optimizer.param_groups] == [1, 8]
    torch.testing.assert_close(second.leaf, torch.full((4,), -1 / 8))


class NeedsMembers(Counting):
    """Cannot step a group without parameters."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            assert group["params"][0].device.type == "cpu"
        return super().step(closure)


class NeedsElements(Counting):
    """Cannot step a group without elements either."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            torch.cat([p.flatten() for p in group["params"]])[0]
        return super().step(closure)


@pytest.mark.parametrize(
    ("kind", "counts"), [(Counting, [1, 8]), (NeedsMembers, [1, 8]), (NeedsElements, [1, 7])]
)
def test_a_group_of_which_this_rank_has_no_piece(
    kind: type[Counting], counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its counter advances where the optimizer can step such a group, and a warning says where it cannot."""
    said: list[str] = []
    monkeypatch.setattr("zlaunch.runtime.optim.update_rule.warn", said.append)
    members = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    rule = UpdateRule(kind([{"params": [p], "k": start} for p, start in zip(members, (0, 7), strict=True)]))
    for _ in range(2):
        rule.begin(1.0)
        rule.apply(pieces(1), {})
        rule.end()
    wanted = [2 * counts[0], 7 + 2 * (counts[1] - 7)]
    assert [group["k"] for group in rule.optimizer.param_groups] == wanted
    assert len(said) == (kind is NeedsElements), "once, not at each step"
    assert all("NeedsElements cannot step a param group without parameters" in each for each in said)


def test_counts_reach_the_script_and_its_changes_the_shards() -> None:
    outer = Counting([nn.Parameter(torch.zeros(1))])
    inner = InnerOptimizer(outer)
    inner.optimizer.param_groups[0]["params"] = [leaf := torch.zeros(4, requires_grad=True)]
    for step in (1, 2):
        inner.take()
        leaf.grad = torch.ones(4)
        inner.optimizer.step()
        inner.give()
        assert outer.param_groups[0]["k"] == step
    outer.param_groups[0]["k"] = 10
    inner.take()
    assert inner.optimizer.param_groups[0]["k"] == 10


def test_counts_are_saved_and_restored() -> None:
    outer, again = (Counting([nn.Parameter(torch.zeros(1))]) for _ in range(2))
    inner, loaded = InnerOptimizer(outer), InnerOptimizer(again)
    inner.optimizer.param_groups[0] |= {"k": 5, "sum": 15}
    inner.optimizer.param_groups[0]["betas"] = (0.5, 0.25)
    saved = groups_of(inner.optimizer)
    assert "params" not in saved[0]
    again.param_groups[0]["betas"] = (0.0, 0.0)
    loaded.take()
    restore_groups(loaded.optimizer, saved)
    loaded.give()
    assert loaded.optimizer.param_groups[0]["sum"] == 15, "an entry that a new optimizer does not have yet"
    assert again.param_groups[0]["k"] == 5 and again.param_groups[0]["betas"] == (0.5, 0.25)


OPTIMIZERS: dict[str, Any] = {
    "Adam": lambda p, **more: torch.optim.Adam(p, lr=0.1, fused=True, **more),
    "AdamW": lambda p, **more: torch.optim.AdamW(p, lr=0.1, fused=True, **more),
    "SGD": lambda p, **more: torch.optim.SGD(p, lr=0.1, momentum=0.9, **more),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("variant", ["maximize", "amsgrad"])
def test_a_variant_that_no_kernel_has_is_torch_s(name: str, variant: str) -> None:
    """With a copy in 16 bits beside fp32 values, which a kernel writes in one pass without the variant."""
    if name == "SGD" and variant == "amsgrad":
        return
    gradients = [torch.tensor([1.0, -2.0, 0.5, 4.0]), torch.tensor([-3.0, 1.0, 0.25, 4.0])]
    plain = nn.Parameter(torch.ones(4))
    theirs = OPTIMIZERS[name]([plain], **{variant: True})
    rule = UpdateRule(OPTIMIZERS[name]([nn.Parameter(torch.ones(4))], **{variant: True}))
    leaf, out = torch.ones(4), torch.zeros(4, dtype=torch.bfloat16)
    state: dict[Tensor, dict[str, Any]] = defaultdict(dict)
    for gradient in gradients:
        plain.grad = gradient.clone()
        theirs.step()
        rule.begin(2.0)
        rule.apply([SliceUpdate(0, leaf, 2 * gradient, out)], state)
        rule.end()
        torch.testing.assert_close(leaf, plain.detach())
        assert torch.equal(out, leaf.to(torch.bfloat16))


def test_a_group_without_a_piece_on_this_rank_counts_too() -> None:
    members = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    rule = UpdateRule(Counting([{"params": [p]} for p in members]))
    for used in (pieces(1), pieces(1, group=1), []):
        rule.begin(2.0)
        rule.apply(used, {})
        rule.end()
    assert [group["k"] for group in rule.optimizer.param_groups] == [3, 3]
