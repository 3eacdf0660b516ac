"""Test what tells ranks whose collectives have different orders."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from zlaunch.runtime.comm.collectives import Order


def orders(*labels: list[int], channel: int = 1) -> list[Order]:
    """Make each rank's order, of these labels in one channel and an equal one in the other."""
    found = []
    for mine in labels:
        order = Order(len(labels), 2)
        order.add(1 - channel, 5)
        for label in mine:
            order.add(channel, label)
        found.append(order)
    return found


def differ(ranks: list[Order]) -> bool:
    sums: Tensor = torch.tensor([rank.marks() for rank in ranks], dtype=torch.float64).sum(0)
    answers = {bool(rank.differs(sums)) for rank in ranks}
    assert len(answers) == 1
    return answers.pop()


@pytest.mark.parametrize(
    ("labels", "wanted"),
    [
        ([[1, 2, 3], [1, 2, 3]], False),
        ([[1, 2, 3], [1, 3, 2]], True),
        ([[1, 2, 3], [1, 2]], True),
        ([[1], [0]], True),
        ([[], [0]], True),
        ([[7, 7], [7]], True),
        ([[1, 2]] * 4, False),
        ([[1, 2]] * 3 + [[2, 1]], True),
        ([[1, 3], [2, 2], [3, 1]], True),
    ],
)
@pytest.mark.parametrize("channel", [0, 1])
def test_different_orders_are_told(labels: list[list[int]], wanted: bool, channel: int) -> None:
    assert differ(orders(*labels, channel=channel)) is wanted


def test_long_orders_that_differ_early_are_told() -> None:
    same = list(range(3000))
    assert not differ(orders(same, same))
    assert differ(orders([1, 0, *same], [0, 1, *same]))


def test_the_first_difference_is_named() -> None:
    ranks = orders([1, 2, 3], [1, 2, 3], [1, 4])
    everyone = [rank.recent() for rank in ranks]
    assert ranks[0].first_difference(everyone) == (1, 2, 4, 2)
    ranks = orders([1, 2, 3], [1, 2])
    assert ranks[0].first_difference([rank.recent() for rank in ranks]) == (1, 1, None, 3)


def test_labels_are_forgotten_but_what_they_told_is_not() -> None:
    ranks = orders([1, 2], [2, 1])
    for rank in ranks:
        rank.forget()
        assert rank.recent() == [[], []]
        rank.add(1, 9)
        assert rank.recent() == [[], [9]]
    assert differ(ranks), "the hashes go on"
