"""Test configs as projects ship them: taken, or refused for the one feature that is missing."""

from pathlib import Path

import pytest

from zlaunch.runtime.config import ConfigError, load, refuse_open, resolve

FILES = {path.stem: path for path in sorted((Path(__file__).parents[2] / "data" / "configs").iterdir())}
REFUSED = {
    "accelerate_msamp": ("msamp.enabled", "MS-AMP"),
    "deepspeed_chat_hybrid_engine": ("hybrid_engine.enabled", "Hybrid engine"),
    "examples_compression": ("compression_training", "compression"),
    "examples_curriculum": ("curriculum_learning.enabled", "Curriculum learning"),
    "examples_elastic": ("elasticity.enabled", "Elastic batch sizes"),
    "examples_random_ltd": ("data_efficiency.enabled", "Data efficiency"),
}
"""Name of the file, the key that is refused and what of the message names the feature."""
WARNED = {
    "accelerate_plugin_zero2_offload": ["zero_optimization.offload_param"],
    "deepspeed_chat_eval": ["zero_optimization.offload_param", "no effect: memory_efficient_linear"],
    "deepspeed_chat_mixed_precision_lora": ["no effect: memory_efficient_linear"],
    "deepspeed_chat_zero2": ["no effect: memory_efficient_linear"],
    "deepspeed_chat_zero2_offload": ["zero_optimization.offload_param", "no effect: memory_efficient_linear"],
    "deepspeed_chat_zero3_offload": ["no effect: memory_efficient_linear"],
    "examples_megatron_zero2": [
        "activation_checkpointing.contiguous_memory_optimization",
        "activation_checkpointing.synchronize_checkpoint_boundary",
    ],
    "llama_factory_z0": ["no effect: overlap_comm"],
    "llama_factory_z2": ["no effect: overlap_comm"],
    "llama_factory_z2_offload": ["no effect: overlap_comm"],
    "llama_factory_z3": ["no effect: overlap_comm"],
    "llama_factory_z3_offload": ["no effect: overlap_comm"],
    "notes": ["_comment", "experiment_id"],
    "openrlhf_eval": ["zero_optimization.offload_param"],
    "openrlhf_zero2_offload": ["zero_optimization.offload_param"],
    "transformers_zero3_nvme": ["no effect: fast_init"],
}
"""Of the files that are taken, all that have something to say."""
WORLD = 8


def key_of(warning: str) -> str:
    _, key, rest = warning.split(": ", 2)
    if not key.startswith("no effect"):
        return key
    assert "," not in rest
    return f"no effect: {rest.split(' ')[0].rpartition('.')[2]}"


@pytest.mark.parametrize("name", FILES)
def test_shipped_config(name: str) -> None:
    if name in REFUSED:
        path, feature = REFUSED[name]
        with pytest.raises(ConfigError) as caught:
            load(FILES[name])
        (line,) = caught.value.problems
        assert line.startswith(f"{FILES[name].name}: {path}: ")
        assert feature in line and "is not supported yet" in line
        return
    loaded = load(FILES[name])
    assert [key_of(warning) for warning in loaded.warnings] == WARNED.get(name, [])
    if "scheduler.params.total_num_steps" in loaded.auto:
        with pytest.raises(ConfigError, match=r"total_num_steps.*set a value"):
            resolve(loaded, world_size=WORLD)
    else:
        config = resolve(loaded, world_size=WORLD, hidden_size=64).config
        assert config.train_batch_size is not None and config.train_batch_size % WORLD == 0
    if "gradient_clipping" in loaded.auto:
        with pytest.raises(ConfigError, match="gradient_clipping"):
            refuse_open(loaded)
    else:
        refuse_open(loaded)


def test_the_lists_name_files_that_are_there() -> None:
    assert set(REFUSED) | set(WARNED) <= set(FILES) and not set(REFUSED) & set(WARNED)
    assert len(FILES) > 50
