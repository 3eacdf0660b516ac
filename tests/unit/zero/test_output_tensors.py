"""Test finding the tensors in outputs of any structure."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from zlaunch.runtime.zero.tensors import tensors_in

A, B, C = torch.zeros(1), torch.ones(2), torch.ones(3)
Pair = namedtuple("Pair", "left right")


@dataclass
class Output:
    loss: Any = None
    logits: Any = None


def same(found: Any, *expected: torch.Tensor) -> bool:
    found = list(found)
    return len(found) == len(expected) and all(a is b for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (A, [A]),
        (torch.nn.Parameter(A), None),
        ((A, [B, (C,)]), [A, B, C]),
        (Pair(A, B), [A, B]),
        ({"x": A, "y": {"z": B}}, [A, B]),
        (OrderedDict(b=B, a=A), [B, A]),
        (UserDict(x=A), [A]),
        (Output(A, (B, C)), [A, B, C]),
        ([Output(loss=A), {"k": Output(logits=B)}], [A, B]),
        ({A}, [A]),
        ((A, A), [A, A]),
    ],
)
def test_finds_tensors_in_order(value: Any, expected: list[torch.Tensor] | None) -> None:
    assert same(tensors_in(value), *([value] if expected is None else expected))


@pytest.mark.parametrize(
    "value", [None, 3, 1.5, "text", b"bytes", object(), Output, [], {}, torch.float32, {1: "x"}]
)
def test_finds_nothing_where_there_is_none(value: Any) -> None:
    assert list(tensors_in(value)) == []


def test_a_structure_that_holds_itself_ends() -> None:
    loop: list[Any] = [A]
    loop.append(loop)
    found = list(tensors_in(loop))
    assert found and all(tensor is A for tensor in found)


def test_hugging_face_style_mapping_and_dataclass_is_visited_once() -> None:
    @dataclass
    class Both(OrderedDict[str, Any]):
        loss: Any = None

        def __post_init__(self) -> None:
            self["loss"] = self.loss

    assert same(tensors_in(Both(loss=A)), A)
