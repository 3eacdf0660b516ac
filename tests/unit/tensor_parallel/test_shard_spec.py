"""Test that parts of tensors are taken and put together again."""

from __future__ import annotations

import copy
from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st

from zlaunch.runtime.comm.shard_spec import ShardSpec, box_shape, full_box, put, take
from zlaunch.runtime.parallel.tensor import _even_boxes

SHAPES = st.lists(st.integers(1, 4), min_size=1, max_size=3)


@given(SHAPES, st.data())
def test_parts_make_up_the_whole(shape: list[int], data: st.DataObject) -> None:
    size, packed = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    shape[dim] *= size * packed
    boxes = _even_boxes(shape, dim, size, packed)
    assert boxes is not None
    whole = torch.arange(prod(shape)).view(shape)
    again = torch.full_like(whole, -1)
    for position, box in enumerate(boxes):
        spec = ShardSpec(tuple(shape), boxes, position, None)
        part = spec.shard(whole)
        assert tuple(part.shape) == box_shape(box) and spec.copies == 1 and spec.copy_index == 0
        put(again, box, part)
    assert torch.equal(again, whole)
    assert torch.equal(take(whole, full_box(shape)), whole)


def test_what_cannot_be_divided_has_no_parts() -> None:
    assert _even_boxes((5, 4), 0, 2) is None
    assert _even_boxes((6, 4), 0, 2, 2) is None


def test_equal_parts_are_counted_and_copies_keep_the_cut() -> None:
    boxes = ((((0, 2),),), (((0, 2),),), (((2, 4),),), (((2, 4),),))
    spec = ShardSpec((4,), boxes, 3, None)
    assert (spec.copies, spec.copy_index) == (2, 1)
    assert copy.deepcopy(spec) is spec
