"""Test what Adam's state holds before a step of ours: nothing, torch's, or a loaded one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zlaunch.cuda_ops.step import SliceUpdate, rule_of
from zlaunch.runtime.optim.lion import Lion
from zlaunch.runtime.optim.update_rule import UpdateRule


@pytest.mark.parametrize("count", [None, 3, 3.0, torch.tensor(3.0)])
def test_steps_are_counted_from_what_is_there(count: Any) -> None:
    leaf = torch.zeros(4)
    rule = UpdateRule(torch.optim.AdamW([torch.nn.Parameter(torch.zeros(4))], fused=True))
    state: dict[torch.Tensor, dict[str, Any]] = {leaf: {"exp_avg": torch.ones(4)}}
    if count is not None:
        state[leaf]["step"] = count.clone() if isinstance(count, torch.Tensor) else count
    begin = 0.0 if count is None else 3.0
    for found_inf, steps in ((None, 1), (torch.tensor(0.0), 2), (torch.tensor(1.0), 2)):
        rule.begin(1.0, found_inf)
        rule.apply([SliceUpdate(0, leaf, torch.zeros(4), torch.zeros(4, dtype=torch.bfloat16))], state)
        assert float(state[leaf]["step"]) == begin + steps
    torch.testing.assert_close(state[leaf]["exp_avg"], torch.full((4,), 0.9**2), msg="what is there stays")
    assert torch.equal(state[leaf]["exp_avg_sq"], torch.zeros(4))


class Own(torch.optim.SGD):
    step_rule = "cosine"


class Sub(torch.optim.AdamW):
    pass


@pytest.mark.parametrize("kind", [Own, Sub, torch.optim.RMSprop])
def test_a_class_of_the_script_has_no_kernel(kind: type[torch.optim.Optimizer]) -> None:
    optimizer = kind([torch.nn.Parameter(torch.zeros(1))])  # type: ignore[call-arg]  # the base class needs defaults
    assert rule_of(optimizer) is None
    assert rule_of(Lion([torch.nn.Parameter(torch.zeros(1))])) is Lion.step_rule


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, Lion])
def test_a_kernel_reads_16_bit_gradients_as_they_are(kind: Any, dtype: torch.dtype) -> None:
    """The step equals one with the gradient in fp32, and makes no fp32 copy of it."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(64, generator=generator)
    gradients = [torch.randn(64, generator=generator).to(dtype) for _ in range(3)]
    more = {"fused": True} if kind is torch.optim.AdamW else {}
    leaf = torch.nn.Parameter(start.clone())
    optimizer = kind([leaf], lr=0.1, **more)
    rule = UpdateRule(optimizer)
    plain = torch.nn.Parameter(start.clone())
    other = kind([plain], lr=0.1, **more)
    for gradient in gradients:
        rule.begin(2.0)
        assert not rule.apply([SliceUpdate(0, leaf, gradient.clone())], optimizer.state, live=True)
        assert leaf.grad is None
        plain.grad = gradient.float() / 2
        other.step()
    torch.testing.assert_close(leaf, plain, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_kernel_takes_a_rate_that_is_a_tensor(dtype: torch.dtype) -> None:
    found = []
    for rate in (0.125, torch.tensor(0.125, dtype=dtype), torch.tensor([0.125], dtype=dtype)):
        leaf = torch.nn.Parameter(torch.ones(8))
        optimizer = torch.optim.AdamW([leaf], lr=0.1, fused=True)
        optimizer.param_groups[0]["lr"] = rate
        rule = UpdateRule(optimizer)
        rule.begin(1.0)
        rule.apply([SliceUpdate(0, leaf, torch.ones(8, dtype=torch.bfloat16))], optimizer.state, live=True)
        found.append(leaf.detach())
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
