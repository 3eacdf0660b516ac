"""Test the mesh of ranks that a config asks for."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zlaunch.runtime.config import ConfigError, load, mesh_shape, resolve
from zlaunch.runtime.mesh import MeshShape

SIZES = st.integers(1, 5)


MESHES = st.builds(MeshShape, data=SIZES, expert=SIZES, sequence=SIZES, tensor=SIZES)


@given(MESHES)
def test_each_rank_has_coordinates_of_its_own(mesh: MeshShape) -> None:
    found = [mesh.coordinates(rank) for rank in range(mesh.ranks)]
    assert len({tuple(each.items()) for each in found}) == len(found)
    for rank, each in enumerate(found):
        place = each["data"] * mesh.expert + each.get("expert", 0)
        assert mesh.sample_position(rank) == place
        place = place * mesh.sequence + each.get("sequence", 0)
        assert rank == place * mesh.tensor + each.get("tensor", 0)


@given(MESHES, st.sets(st.sampled_from(("data", "expert", "sequence", "tensor"))))
def test_a_group_differs_on_its_axes_alone(mesh: MeshShape, names: set[str]) -> None:
    groups = mesh.groups(*names)
    assert sorted(rank for ranks in groups for rank in ranks) == list(range(mesh.ranks))
    for ranks in groups:
        assert ranks == sorted(ranks)
        places = [mesh.coordinates(rank) for rank in ranks]
        for name, size in mesh.axes.items():
            assert len({place[name] for place in places}) == (size if name in names else 1)


@given(SIZES, SIZES, SIZES, SIZES)
def test_samples_are_those_of_the_data_and_expert_axes(
    data: int, expert: int, sequence: int, tensor: int
) -> None:
    sizes = {"tensor": tensor, "expert": expert, "sequence": sequence}
    loaded = load({"train_micro_batch_size_per_gpu": 3, "parallel": sizes})
    ranks = data * expert * sequence * tensor
    assert mesh_shape(loaded.config, ranks) == MeshShape(data, **sizes)
    assert resolve(loaded, world_size=ranks).config.train_batch_size == 3 * data * expert


@pytest.mark.parametrize(
    ("section", "ranks", "said"),
    [
        (
            {"expert": 3},
            4,
            "parallel.expert: 3 does not divide the 4 ranks; set it to 2 or 4, or start 6 ranks",
        ),
        (
            {"tensor": 3},
            4,
            "parallel.tensor: 3 does not divide the 4 ranks; set it to 2 or 4, or start 6 ranks",
        ),
        (
            {"expert": 4, "tensor": 2},
            4,
            "parallel.expert: 4 does not divide the 4 ranks / tensor 2; set it to 2, or start 8 ranks",
        ),
        (
            {"data": 2, "expert": 2, "tensor": 2},
            4,
            "parallel.data: 2 * expert 2 * tensor 2 is 8, not the 4 ranks; set it to 1 or",
        ),
        ({"data": 2}, 4, "parallel.data: 2 is 2, not the 4 ranks; set it to 4 or"),
    ],
    ids=["expert", "tensor", "both", "data", "data alone"],
)
def test_sizes_that_do_not_fit_are_refused(section: dict[str, Any], ranks: int, said: str) -> None:
    with pytest.raises(ValueError, match="parallel") as caught:
        mesh_shape(load({"train_batch_size": 8, "parallel": section}).config, ranks)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"parallel": {"tensor": 2}, "tensor_parallel": {"autotp_size": 4}}, "contradicts tensor_parallel"),
        (
            {"parallel": {"expert": 2}, "expert_parallel": {"enabled": True, "autoep_size": 4}},
            "contradicts expert_parallel",
        ),
        (
            {"parallel": {"expert": 2}, "zero_optimization": {"stage": 3, "mics_shard_size": 2}},
            "not supported together with expert parallelism",
        ),
        (
            {"parallel": {"tensor": 2}, "zero_optimization": {"stage": 3, "shard_group": "node"}},
            "not supported together with tensor parallelism",
        ),
        (
            {"parallel": {"tensor": 2}, "checkpoint": {"in_memory": {"every": 5}}},
            "checkpoint.in_memory.*not supported together with tensor parallelism",
        ),
        *(
            (
                {"parallel": {"tensor": 2, other: 2}, "tensor_parallel": {"sequence_parallel": True}},
                rf"tensor_parallel.sequence_parallel: does not work with parallel.{other} 2 yet",
            )
            for other in ("pipeline", "sequence", "expert")
        ),
        (
            {
                "parallel": {"tensor": 2},
                "tensor_parallel": {"sequence_parallel": True},
                "activation_checkpointing": {"enabled": True, "tiled_mlp": True},
            },
            "activation_checkpointing.tiled_mlp: does not work with tensor_parallel.sequence_parallel yet",
        ),
    ],
    ids=["tensor", "expert", "groups", "node", "memory", "stages", "sequence", "experts", "tiles"],
)
def test_contradictions_are_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load({"train_batch_size": 8, **config})


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"expert_parallel": {"autoep_size": 2}}, "expert_parallel.autoep_size: no effect: enabled is false"),
        ({"expert_parallel": {"experts": ["a"]}}, "expert_parallel.experts: no effect"),
        ({"tensor_parallel": {"plan": {"a": "colwise"}}}, "tensor_parallel.plan: no effect"),
    ],
    ids=["size", "experts", "plan"],
)
def test_what_has_no_effect_is_told(config: dict[str, Any], said: str) -> None:
    assert any(said in warning for warning in load({"train_batch_size": 8, **config}).warnings)


@pytest.mark.parametrize("key", ["sequence_parallel", "vocab_parallel_loss"])
def test_keys_of_tensor_parallelism_without_it_are_warned_of(key: str) -> None:
    (said,) = load({"train_batch_size": 8, "tensor_parallel": {key: True}}).warnings
    assert f"tensor_parallel.{key}" in said and "no effect: tensor parallelism is off" in said


def test_the_vocabulary_parallel_loss_and_tiles_exclude_each_other() -> None:
    both: dict[str, dict[str, Any]] = {
        "tensor_parallel": {"autotp_size": 2, "vocab_parallel_loss": True},
        "activation_checkpointing": {"tiled_loss": True},
    }
    with pytest.raises(ConfigError, match=r"tiled_loss: does not work with tensor_parallel\.vocab_parallel"):
        load(both)
    both["tensor_parallel"]["autotp_size"] = 1
    load(both)
