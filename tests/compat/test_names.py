"""Test the modules and names of DeepSpeed that scripts import, and what becomes of those not here."""

from __future__ import annotations

import importlib
import importlib.util
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.compat.test_engine import GIVEN, _deepspeed
from tests.runtime.models import batches, loss_of, net
from tests.runtime.workers import join, run_workers

DATA = Path(__file__).resolve().parents[1] / "data"


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("deepspeed.inference", "vLLM"),
        ("deepspeed.inference.v2.engine_v2", "vLLM"),
        ("deepspeed.compression.compress", "torchao"),
        ("deepspeed.autotuning", "batch sizes"),
        ("deepspeed.sequence.fpdt_layer", "zlaunch.sequence"),
        ("deepspeed.launcher.launch", "zlaunch"),
        ("deepspeed.module_inject", "vLLM"),
        ("deepspeed.linear", "PEFT"),
        ("deepspeed.model_implementations.transformers", "vLLM"),
        ("deepspeed.runtime.pipe.p2p", "PipelineModule"),
        ("deepspeed.pipe.module", "PipelineModule"),
        ("deepspeed.moe.mappings", "experts"),
        ("deepspeed.utils.debug", "docs/migrating/deepspeed.md"),
        ("deepspeed.no_such_module", "docs/migrating/deepspeed.md"),
    ],
)
def test_modules_that_are_not_here(deepspeed: Any, name: str, advice: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'deepspeed\.") as caught:
        importlib.import_module(name)
    assert "not supported" in str(caught.value) and advice in str(caught.value)
    assert caught.value.name is not None and name.startswith(caught.value.name)
    parent, _, last = name.rpartition(".")
    if parent == "deepspeed":
        assert importlib.util.find_spec(name) is None
        with pytest.raises(AttributeError, match=advice):
            getattr(deepspeed, last)
    with pytest.raises(pytest.skip.Exception):
        pytest.importorskip(name)


def test_names_that_are_not_here(deepspeed: Any) -> None:
    from deepspeed.elasticity import compute_elastic_config, elasticity_enabled
    from deepspeed.profiling.flops_profiler import FlopsProfiler, get_model_profile
    from deepspeed.runtime.state_dict_factory import MegatronSDLoader
    from deepspeed.runtime.utils import all_gather_dp_groups
    from deepspeed.utils.zero_to_fp32 import parse_optim_states

    refused = [
        (MegatronSDLoader, "Megatron"),
        (all_gather_dp_groups, "safe_set_full_fp32_param"),
        (parse_optim_states, "get_fp32_state_dict_from_zero_checkpoint"),
        (FlopsProfiler, "FlopCounterMode"),
        (get_model_profile, "FlopCounterMode"),
        (compute_elastic_config, "any number of ranks"),
        (deepspeed.InferenceEngine, "vLLM"),
    ]
    for what, advice in refused:
        with pytest.raises(NotImplementedError, match=rf"not supported: .*{advice}"):
            what({})
    from deepspeed.runtime.sequence_parallel import ulysses_sp

    with pytest.raises(AttributeError, match=r"SequenceTiledCompute is not supported: .*tiled_mlp"):
        ulysses_sp.SequenceTiledCompute  # noqa: B018
    with pytest.raises(AttributeError, match=r"InferenceEngine\.module is not supported: .*vLLM"):
        deepspeed.InferenceEngine.module  # noqa: B018
    missing = deepspeed.InferenceEngine
    assert not hasattr(FlopsProfiler, "__betas__") and not isinstance(nn.Linear(1, 1), missing)

    class Layer(missing, nn.Module):  # type: ignore[misc, valid-type]  # its class is made at run time
        own = 3

    assert Layer.own == 3 and issubclass(Layer, missing)
    assert elasticity_enabled({"elasticity": {"enabled": True}}) and not elasticity_enabled({})


def test_files_of_deepspeeds_checkpoints(deepspeed: Any, tmp_path: Path) -> None:
    from deepspeed.utils.zero_to_fp32 import get_model_state_file, get_model_state_files, get_optim_files

    saved = DATA / "deepspeed_checkpoints"
    stage3 = str(saved / "stage3-2" / "tag")
    names = [f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(2)]
    assert [Path(file).name for file in get_model_state_files(stage3)] == names
    assert get_model_state_file(stage3, 3) == str(Path(stage3, names[0]))
    assert Path(get_model_state_file(str(saved / "stage2-2" / "tag"), 2)).name == "mp_rank_00_model_states.pt"
    for rank in (10, 9):
        (tmp_path / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").touch()
    ranks = [int(Path(file).name.split("_")[3]) for file in get_optim_files(str(tmp_path))]
    assert ranks == [9, 10]
    with pytest.raises(FileNotFoundError, match=r"has no \*_model_states\.pt, .*get_fp32_state_dict"):
        get_model_state_files(str(tmp_path))
    with pytest.raises(FileNotFoundError, match="there is no such folder"):
        get_optim_files(str(tmp_path / "none"))


def test_helpers_that_projects_import(deepspeed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.comm import mpi_discovery
    from deepspeed.runtime import config_utils
    from deepspeed.runtime.utils import call_to_str, partition_balanced, partition_uniform, prefix_sum_inc
    from deepspeed.runtime.zero.linear import LinearModuleForZeroStage3, zero3_linear_wrap

    pairs = config_utils.dict_raise_error_on_duplicate_keys
    assert pairs([("a", 1), ("b", 2)]) == {"a": 1, "b": 2}
    with pytest.raises(ValueError, match="keys a more than once"):
        pairs([("a", 1), ("b", 2), ("a", 3)])
    assert call_to_str("f") == "f()" and call_to_str("f", 1, key="x") == "f(1, key='x')"
    assert prefix_sum_inc([3, 4, 5]) == [3, 7, 12]
    assert partition_uniform(5, 3) == [0, 2, 4, 5] and partition_uniform(2, 4) == [0, 1, 2, 2, 2]
    assert partition_balanced([1, 1, 1, 3], 2) == [0, 3, 4] == partition_balanced([0.1, 0.1, 0.1, 0.3], 2)
    layer = LinearModuleForZeroStage3(2, 3, bias=False)
    assert torch.equal(layer(torch.ones(1, 2)), zero3_linear_wrap(torch.ones(1, 2), layer.weight))
    weight = torch.ones(2, requires_grad=True)
    detach_variable = deepspeed.checkpointing.detach_variable
    found = detach_variable((weight * 2, weight.detach(), "text"), device="cpu")
    assert found[0].is_leaf and found[0].requires_grad
    assert not found[1].requires_grad and found[2] == "text"
    with pytest.raises(RuntimeError, match="takes a tuple, not list"):
        detach_variable([weight])
    # Another test of this process may have begun a process group, and then nothing is left to find out.
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    given = {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        # Set and removed, so that what the function sets is removed afterwards.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    mpi_discovery(12345, verbose=False)
    places = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")]
    assert places == ["1", "2", "127.0.0.1", "12345"]


def _reduce_and_scatter() -> list[list[float]]:
    _deepspeed()
    from deepspeed.runtime.comm.coalesced_collectives import reduce_scatter_coalesced

    rank = join()
    tensors = [torch.arange(6.0).view(2, 3) * rank, torch.arange(3.0) * rank, torch.ones(1)]
    before = [tensor.clone() for tensor in tensors]
    shares = reduce_scatter_coalesced(tensors)
    torch.testing.assert_close(tensors, before)
    return [share.tolist() for share in shares]


def test_tensors_are_reduced_and_scattered_in_one_collective() -> None:
    first, second = run_workers(_reduce_and_scatter, 2)
    assert first == [[0.0, 0.5, 1.0], [0.0, 0.5], [1.0]]
    assert second == [[1.5, 2.0, 2.5], [1.0], []]


def test_groups_of_a_model_without_experts(deepspeed: Any) -> None:
    from deepspeed.moe import utils

    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    everything = list(model.parameters())
    group = {"params": everything, "lr": 0.1, "name": "all"}
    for given in (group, [group], (group,)):
        assert utils.split_params_into_different_moe_groups_for_optimizer(given) == [group]
    with pytest.raises(ValueError, match="param group"):
        utils.split_params_into_different_moe_groups_for_optimizer(everything[0])
    assert utils.configure_moe_param_groups(everything)[0]["params"] == everything
    assert utils.configure_moe_param_groups([group]) == [group]
    with pytest.raises(TypeError, match="list of parameters"):
        utils.configure_moe_param_groups(iter(everything))
    assert utils.has_moe_layers(model) == (False, 0) and not utils.is_moe_param_group(group)
    assert not any(utils.is_moe_param(p) for p in everything)
    assert utils.split_params_into_shared_and_expert_params(everything) == (everything, [])
    everything[0].grad = torch.ones(3, 2)
    shared, own = utils.split_params_grads_into_shared_and_expert_params(everything)
    assert torch.equal(shared[0], torch.ones(3, 2)) and len(shared) == 1 and own == []

    everything[1].allreduce = False  # type: ignore[attr-defined]  # as Megatron and Tutel mark what each rank has by itself
    assert utils.is_moe_param(everything[1])
    for use in (
        lambda: utils.split_params_into_different_moe_groups_for_optimizer(group),
        lambda: deepspeed.initialize(model=model, config=GIVEN),
    ):
        with pytest.raises(NotImplementedError, match="experts of another library are not supported"):
            use()


def test_sections_as_objects(deepspeed: Any) -> None:
    from deepspeed.runtime.zero import config, offload_config

    offload = offload_config.DeepSpeedZeroOffloadParamConfig(device="nvme", nvme_path="/d", max_in_cpu=1e6)
    assert offload.device is offload_config.OffloadDeviceEnum.nvme and offload.max_in_cpu == 10**6
    assert offload.pin_memory is True and offload.model_dump()["nvme_path"] == "/d"
    other = offload_config.DeepSpeedZeroOffloadOptimizerConfig(device="cpu", ratio=0.5)
    assert other.device == "cpu" and other.ratio == 0.5 and other.pipeline_read is False
    zero = config.DeepSpeedZeroConfig(
        stage=3,
        stage3_prefetch_bucket_size=5e7,
        param_persistence_threshold="auto",
        offload_param=offload,
        offload_optimizer={"device": "cpu"},
    )
    assert zero.stage is config.ZeroStageEnum.weights and zero.stage == 3
    assert zero.prefetch_bucket_size == zero.stage3_prefetch_bucket_size == 50_000_000
    assert zero.param_persistence_threshold == 100_000 and zero.offload_param == offload
    assert zero.offload_optimizer.device == "cpu" and config.DeepSpeedZeroConfig().offload_param is None
    assert config.get_zero_config({"zero_optimization": {"stage": 1}}).stage == 1
    assert config.get_zero_config({}).stage is config.ZeroStageEnum.disabled
    assert [config.DeepSpeedZeroConfig(stage=stage).overlap_comm for stage in (2, 3)] == [False, True]
    assert config.DeepSpeedZeroConfig(overlap_comm=False, stage=3).overlap_comm is False
    assert offload_config.DeepSpeedZeroOffloadOptimizerConfig(pipeline_write=True).pipeline is True
    assert other.pipeline is False
    whole = deepspeed.DeepSpeedConfig({"train_batch_size": 4, "zero_optimization": {"stage": 2}})
    assert isinstance(whole.zero_config, config.DeepSpeedZeroConfig) and whole.zero_config.stage == 2
    with pytest.raises(deepspeed.DeepSpeedConfigError, match=r"stage: 4 is not allowed"):
        config.DeepSpeedZeroConfig(stage=4)
    with pytest.raises(deepspeed.DeepSpeedConfigError, match=r"pin_memry: unknown key, did you mean"):
        offload_config.DeepSpeedZeroOffloadParamConfig(pin_memry=True)
    with pytest.raises(AttributeError, match=r"DeepSpeedZeroConfig\.nothing is not supported"):
        zero.nothing  # noqa: B018


def test_sections_that_other_packages_define(deepspeed: Any) -> None:
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel, get_scalar_param
    from pydantic import Field, ValidationError

    class Inner(DeepSpeedConfigModel):
        size: int = 1

    # pydantic's type has values of JSON alone, but DeepSpeed keeps a function here.
    replaced: Any = {"deprecated": True, "new_param": "inner.size", "new_param_fn": lambda x: x * 2}

    class Outer(DeepSpeedConfigModel):
        inner: Inner = Inner()
        width: int = Field(3, alias="w")
        old: int | None = Field(None, json_schema_extra=replaced)

    assert (Outer().width, Outer(width=4).width, Outer(w=5).width, Outer(width="auto").width) == (3, 4, 5, 3)
    assert Outer(old=4).inner.size == 8 and Outer().inner.size == 1
    with pytest.raises(AssertionError, match=r"give old or inner\.size, not both"):
        Outer(old=4, inner=Inner(size=1))
    for wrong in ({"widht": 1}, {"width": "x"}, {"width": "auto", "strict": True}):
        with pytest.raises(ValidationError):
            Outer(**wrong)
    assert get_scalar_param({"a": 1}, "a", 2) == 1 and get_scalar_param({}, "a", 2) == 2


def test_precision_and_leaf_sections(deepspeed: Any) -> None:
    from deepspeed.runtime import precision_config
    from deepspeed.runtime.zero.leaf_module_config import (
        DEFAULT_LEAF_MODULE_CLASSES,
        DeepSpeedZeroLeafModuleConfig,
    )

    fp16 = precision_config.get_float16_config({"fp16": {"enabled": True, "initial_scale_power": 8}})
    assert fp16.enabled and fp16.initial_dynamic_scale() == 256
    assert fp16.dynamic_loss_scale_args() == {
        **{"init_scale": 256, "scale_window": 1000, "delayed_shift": 2},
        **{"consecutive_hysteresis": False, "min_scale": 1},
    }
    assert not precision_config.get_float16_config({}).enabled
    assert precision_config.get_bfloat16_config({"bfloat16": {"enabled": True}}).enabled
    assert precision_config.get_bfloat16_config({}).check_grad_overflow in (True, False)
    leaves = DeepSpeedZeroLeafModuleConfig(names=["experts"])
    assert leaves.names == ["experts"] and leaves.classes == DEFAULT_LEAF_MODULE_CLASSES
    with pytest.raises(deepspeed.DeepSpeedConfigError, match="unknown key"):
        precision_config.DeepSpeedFP16Config(enable=True)


def test_the_report_of_the_environment(deepspeed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from deepspeed import env_report

    env_report.main(hide_operator_status=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "DeepSpeed general environment info:"
    assert f"torch version .................... {torch.__version__}" in lines
    assert any(line.startswith("deepspeed info") and "0.19.8, zlaunch" in line for line in lines)
    assert env_report.human_readable_size(3 << 29) == "1.50 GB"


def _throughput() -> str:
    deepspeed = _deepspeed()
    engine, *_ = deepspeed.initialize(model=net(), config=GIVEN)
    timer, data = engine.tput_timer, batches(1, 2)[0]
    assert timer.avg_samples_per_sec() == float("-inf")
    begin = time.perf_counter()
    for _ in range(10):
        engine.backward(loss_of(engine, data))
        engine.step()
    wall = time.perf_counter() - begin
    assert (timer.global_step_count, timer.micro_step_count, timer.started) == (5, 10, False)
    assert 0 < timer.total_elapsed_time <= wall
    counted = 3 * engine.train_batch_size()  # all but the first two
    assert timer.avg_samples_per_sec() == pytest.approx(counted / timer.total_elapsed_time)
    engine.eval()
    loss_of(engine, data)
    assert not timer.started

    before = timer.total_elapsed_time
    timer.stop(global_step=True)
    assert timer.total_elapsed_time == before and timer.global_step_count == 5
    timer.start()
    begin = time.perf_counter()
    while time.perf_counter() == begin:
        pass
    timer.stop(global_step=True)
    assert timer.total_elapsed_time > before and timer.global_step_count == 6
    return "done"


def test_throughput_timer() -> None:
    assert run_workers(_throughput, 2) == ["done"] * 2


def _sleep_mode(stage: int, sleeps: bool) -> list[float]:
    """What OpenRLHF does around a generation, in its words."""
    deepspeed = _deepspeed()
    from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum

    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    given = {**GIVEN, "gradient_accumulation_steps": 1, "bf16": {"enabled": True}, "zero_optimization": zero}
    model, *_ = deepspeed.initialize(model=net(), config=given)

    def sleep() -> None:
        offload_state_types = [
            OffloadStateTypeEnum.optim_states,
            OffloadStateTypeEnum.contiguous_grad_buffer,
            OffloadStateTypeEnum.hp_params,
        ]
        offload_state_types += [OffloadStateTypeEnum.lp_grads]
        model.optimizer.offload_states(
            include=offload_state_types, device=OffloadDeviceEnum.cpu, pin_memory=True, non_blocking=True
        )
        model.empty_partition_cache()
        with torch.no_grad():  # and the weights are copied to the engine that generates
            loss_of(model, data)
        with deepspeed.zero.GatheredParameters(list(model.module.parameters())):
            assert all(bool(p.isfinite().all()) for p in model.module.parameters())
        with pytest.raises(RuntimeError, match=r"call engine\.reload_states\(\)"):
            model.step()
        model.reload_states(non_blocking=True)

    def sleep_deeply() -> None:
        model.offload_states()
        if stage == 3:
            with pytest.raises(RuntimeError, match=r"call engine\.reload_states\(\)"):
                model.module.embedding.weight.ds_tensor.sum()
        with pytest.raises(RuntimeError, match=r"call engine\.reload_states\(\)"):
            model.optimizer.fp32_partitioned_groups_flat  # noqa: B018
        model.optimizer.reload_states()

    losses = []
    for data in batches(4, 2):
        if sleeps:
            sleep()
            sleep_deeply()
        loss = loss_of(model, data)
        model.backward(loss)
        model.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("stage", [2, 3])
def test_sleep_mode(stage: int) -> None:
    assert run_workers(_sleep_mode, 2, stage, True) == run_workers(_sleep_mode, 2, stage, False)


def test_optimizers_that_ranks_step_together(deepspeed: Any) -> None:
    from deepspeed.ops.lamb import FusedLamb
    from deepspeed.runtime.fp16.onebit import OnebitAdam, OnebitLamb, ZeroOneAdam
    from deepspeed.runtime.fp16.onebit.zoadam import ZeroOneAdam as Again

    weight = [nn.Parameter(torch.zeros(2, 2))]
    lamb = FusedLamb(weight, lr=0.5, max_coeff=0.3, bias_correction=False)
    assert isinstance(lamb, FusedLamb) and type(lamb).__name__ == "Lamb"
    wanted = {"lr": 0.5, "max_coeff": 0.3, "bias_correction": False}
    assert {key: lamb.param_groups[0][key] for key in wanted} == wanted
    first = OnebitAdam(weight, None, 0.5, freeze_step=7, comm_backend_name="mpi")
    assert (first.param_groups[0]["lr"], first.param_groups[0]["freeze_step"]) == (0.5, 7)
    assert OnebitLamb(weight, factor_max=2.0).param_groups[0]["factor_max"] == 2.0
    assert Again is ZeroOneAdam and ZeroOneAdam(weight).param_groups[0]["local_step_clipper"] == 16
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    vector = nn.Parameter(torch.zeros(2))
    groups = [{"params": weight, "use_muon": True, "lr": 0.1}, {"params": [vector], "use_muon": False}]
    muon = MuonWithAuxAdam(groups)
    assert isinstance(muon, MuonWithAuxAdam) and type(muon).__name__ == "Muon"
    assert [g["lr"] for g in muon.param_groups] == [0.1, 3e-4] and muon.param_groups[0]["momentum"] == 0.95
    assert (muon.param_groups[1]["adam_eps"], muon.param_groups[1]["betas"]) == (1e-10, (0.9, 0.95))
    for mistake in ({"params": weight}, {"params": weight, "use_muon": True, "betas": (0.9, 0.9)}):
        with pytest.raises(ValueError, match="MuonWithAuxAdam: param group 0 has"):
            MuonWithAuxAdam([mistake])
    for make, options in (
        (ZeroOneAdam, {"amsgrad": True}),
        (OnebitAdam, {"max_grad_norm": 1.0}),
        (OnebitLamb, {"eps_inside_sqrt": True}),
        (FusedLamb, {"amsgrad": True}),
    ):
        with pytest.raises(ValueError, match="not supported"):
            make(weight, **options)


def test_names_that_projects_import(
    deepspeed: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from deepspeed.checkpoint import UNIVERSAL_CHECKPOINT_INFO, get_model_ckpt_name_for_rank
    from deepspeed.compression.helper import recursive_getattr, recursive_setattr
    from deepspeed.runtime import config, constants
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
    from deepspeed.runtime.zero.utils import ZeRORuntimeException
    from deepspeed.utils import module_utils
    from deepspeed.utils.logging import print_dist

    inner = nn.Sequential(nn.Linear(2, 2))
    model = nn.Sequential(inner, nn.Linear(2, 1))
    assert recursive_getattr(model, "0.0") is inner[0]
    recursive_setattr(model, "0.0", nn.Identity())
    recursive_setattr(model, "1", inner)
    assert isinstance(inner[0], nn.Identity) and model[1] is inner
    assert module_utils.recursive_getattr is recursive_getattr
    with pytest.raises(AttributeError):
        recursive_getattr(model, "0.7")

    files = TorchCheckpointEngine()
    path = get_model_ckpt_name_for_rank(str(tmp_path / "a"), "00")
    files.makedirs(str(tmp_path / "a"))
    files.save({UNIVERSAL_CHECKPOINT_INFO: {"at": 3}}, path)
    assert files.load(path) == {"universal_checkpoint_info": {"at": 3}}
    assert path.endswith("/a/mp_rank_00_model_states.pt")

    assert (config.ADAM_OPTIMIZER, config.LAMB_OPTIMIZER) == ("adam", "lamb")
    assert (constants.GRADIENT_CLIPPING, constants.GRADIENT_CLIPPING_DEFAULT) == ("gradient_clipping", 1.0)
    assert config.get_gradient_clipping({"gradient_clipping": 0.5}) == 0.5
    assert config.get_gradient_clipping({}) == 1.0
    assert issubclass(ZeRORuntimeException, Exception) and not isinstance(model, BF16_Optimizer)
    with pytest.raises(NotImplementedError, match=r"made by deepspeed\.initialize"):
        BF16_Optimizer(None)
    print_dist("here", ranks=[0])
    assert capsys.readouterr().out == "[Rank 0] here\n"


def test_hostfiles_for_other_launchers(deepspeed: Any, tmp_path: Path) -> None:
    from deepspeed.launcher.runner import EXPORT_ENVS, fetch_hostfile, parse_inclusion_exclusion

    file = tmp_path / "hosts"
    file.write_text("# two nodes\nworker-0 slots=4\nworker-1 slots=2\n")
    pool = fetch_hostfile(str(file))
    assert list(pool.items()) == [("worker-0", 4), ("worker-1", 2)] and "PYTHON" in EXPORT_ENVS
    assert fetch_hostfile(str(tmp_path / "none")) is None
    everything = {"worker-0": [0, 1, 2, 3], "worker-1": [0, 1]}
    assert parse_inclusion_exclusion(pool, "", "") == everything
    assert parse_inclusion_exclusion(pool, "worker-1@worker-0:1,3", "") == {
        "worker-0": [1, 3],
        "worker-1": [0, 1],
    }
    assert parse_inclusion_exclusion(pool, "", "worker-0") == {"worker-1": [0, 1]}
    for inclusion, exclusion in (("worker-2", ""), ("worker-1:2", ""), ("worker-0", "worker-1")):
        with pytest.raises(ValueError):
            parse_inclusion_exclusion(pool, inclusion, exclusion)
    for text in ("worker-0\n", "worker-0 slots=1\nworker-0 slots=1\n", "\n", "worker-0 slots=many\n"):
        file.write_text(text)
        with pytest.raises(ValueError):
            fetch_hostfile(str(file))


def _kinds(fp16: bool, stage: int) -> tuple[bool, bool, bool]:
    deepspeed = _deepspeed()
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer

    config = {**GIVEN, "zero_optimization": {"stage": stage}, "fp16" if fp16 else "bf16": {"enabled": True}}
    engine, optimizer, *_ = deepspeed.initialize(model=net(), config=config)
    same = engine.data_parallel_group is torch.distributed.group.WORLD
    return isinstance(optimizer, FP16_Optimizer), isinstance(optimizer, BF16_Optimizer), same


@pytest.mark.parametrize(
    ("fp16", "stage", "kinds"),
    [
        (True, 0, (True, False)),
        (False, 1, (False, True)),
        (True, 2, (False, False)),
        (False, 3, (False, False)),
    ],
)
def test_the_optimizer_is_of_the_class_for_its_precision(
    fp16: bool, stage: int, kinds: tuple[bool, bool]
) -> None:
    assert run_workers(_kinds, 1, fp16, stage) == [(*kinds, True)]
