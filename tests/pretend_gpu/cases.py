"""List what is trained on the pretended GPU: every way through the runtime with an order of its own."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BF16: dict[str, Any] = {"bf16": {"enabled": True}}
FP16: dict[str, Any] = {"fp16": {"enabled": True, "initial_scale_power": 8}}
STATIC: dict[str, Any] = {"fp16": {"enabled": True, "loss_scale": 128}}
SKIPPING: dict[str, Any] = {"fp16": {"enabled": True, "initial_scale_power": 24}}
HOST: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}}
HOST_BOTH: dict[str, Any] = {**HOST, "offload_param": {"device": "cpu"}}
UNPINNED: dict[str, Any] = {
    key: {"device": "cpu", "pin_memory": False} for key in ("offload_optimizer", "offload_param")
}
HALF: dict[str, Any] = {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}
_DISK: dict[str, Any] = {"device": "nvme", "nvme_path": "NVME"}
DISK: dict[str, Any] = {"offload_optimizer": _DISK}
DISK_BOTH: dict[str, Any] = {**DISK, "offload_param": {**_DISK, "max_in_cpu": 0}}
SENT_NARROW: dict[str, Any] = {"communication_data_type": "bf16"}
SAVES: dict[str, Any] = {"checkpoint": {"asynchronous": True}}
SAVES_AT_ONCE: dict[str, Any] = {"checkpoint": {"asynchronous": False}}
IN_MEMORY: dict[str, Any] = {"checkpoint": {"in_memory": {"every": 2}}}
OFFLOADED_INPUTS: dict[str, Any] = {"activation_checkpointing": {"cpu_checkpointing": True}}
WATCHED: dict[str, Any] = {
    **{"csv_monitor": {"enabled": True}, "wall_clock_breakdown": True, "steps_per_print": 2},
}
GROUPS: dict[str, Any] = {"shard_group": 2}
COPIES: dict[str, Any] = {"zero_hpz_partition_size": 2}
PACKED_WITH_ERRORS: dict[str, Any] = {"zero_quantized_gradients": True, "zeropp_loco_param": {}}
PACKED_WEIGHTS: dict[str, Any] = {"zero_quantized_weights": True}
PACKED: dict[str, Any] = {"zero_quantized_gradients": True}
LOGGED: dict[str, Any] = {"comms_logger": {"enabled": True}}
_PLAN = {"layers.0.up": "colwise", "layers.0.down": "rowwise"}
SHARED: dict[str, Any] = {"parallel": {"tensor": 2}, "tensor_parallel": {"plan": _PLAN}}
TOKENS: dict[str, Any] = {"parallel": {"tensor": 2}, "tensor_parallel": {"sequence_parallel": True}}
DIVIDED: dict[str, Any] = {"parallel": {"expert": 2}}
BOTH: dict[str, Any] = {**SHARED, "parallel": {"tensor": 2, "expert": 2}}
PIPED: dict[str, Any] = {"parallel": {"pipeline": 2}}
SPLIT: dict[str, Any] = {"parallel": {"sequence": 2}}
STEPPING: dict[str, Any] = {"step_in_backward": True}
PARTS: dict[str, Any] = {"stage3_unit_size": 10_000}
"""Divides each layer, whose two matrices are units then."""
RECOMPUTED: dict[str, Any] = {**BF16, "activation_checkpointing": {"partition_activations": False}}
NARROW: dict[str, Any] = {
    "bf16": {"enabled": True, "master_weights": "stochastic"},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "state_dtype": "int8"}},
}
SPLIT_AND_SHARED: dict[str, Any] = {**SHARED, "parallel": {"sequence": 2, "tensor": 2}}

BEFORE = "Event.synchronize in precision._read < precision.differs"
"""At a step's beginning, for whether the step before was skipped: it ended a whole pass ago."""
PACKED_SAMPLES = "aten::_local_scalar_dense in engine.forward"
"""In a forward pass of transformers without a cache, which looks for packed samples."""
NORM = "tolist in step._step_by_host < step.step"
ORDER = "aten::_local_scalar_dense in step._step_by_host < step.step"
"""Stands for NORM with several ranks: whether they agree is read first."""
NORMS = "tolist in lamb.totals < lamb.run"
ADAFACTOR_SUMS = ("tolist in adafactor.firsts < adafactor.run",)
METRICS = "Event.synchronize in device.read < trackers.read"
"""At a step's end, for the numbers of the step before."""
REPORT = "Event.synchronize in device.read < reporter.flush"
"""At a step's end, for a report of the step before."""
ARRIVAL = "Event.synchronize in transfer.wait < stores.grad"
UPLOAD = "Event.synchronize in transfer.synchronize < stores._retire"
SENT = "Event.synchronize in transfer.synchronize < step.synchronize"
"""At a step's beginning, for masters that the step before has sent: that was a whole pass ago."""
WRITTEN = "save: cuda.synchronize in transfer.release < files.abandon"
LEFT = "Event.synchronize in transfer.wait < states.reload"
"""Where states come back at once: they have to have left before."""
_PAGEABLE = "pageable copy down in transfer.download < stores.add_grad"
BATCHES = "aten::_local_scalar_dense in checks._compare < checks.check"
"""In the first passes, and in some of the later ones: whether ranks that share layers have one batch."""
ROUTING = (
    *("tolist in expert._send < expert.__call__", "aten::nonzero in expert._send < expert.__call__"),
    *("tolist in expert.forward < expert._own", "aten::nonzero in expert.forward < expert._own"),
    "aten::nonzero in expert._compute < expert._send",
)
"""Where the host has to know how many tokens go where."""
LOSSES = "tolist in schedule._take < schedule.train"
"""At the end of a pipeline's step, for the last stage's losses, which all stages return."""
WRITES = (
    "tolist in tensor_file.to_json < shard_io.describe",
    "blocking copy down in shard_io._fill_on < shard_io.take_values",
    "blocking copy up in shard_io._fill_on < shard_io.take_values",
)
"""Where the script reads and writes a shard's values."""
SUM_ON_DISK = "Event.synchronize in transfer.wait < stores._add_to_tile"


def _up(where: str) -> str:
    """Steps that ranks make together move little between host and device, and wait for it."""
    return f"blocking copy up in {where}"


def _down(where: str) -> str:
    return f"blocking copy down in {where}"


@dataclass(frozen=True)
class Case:
    """One configuration."""

    name: str
    stage: int
    zero: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    accumulation: int = 1
    world: int = 1
    init: bool = False
    """Make the model inside of zlaunch.zero.Init."""
    more_waits: tuple[str, ...] = ()
    """Adds waits of the host to :attr:`waits`."""
    experts: bool = False
    """Trains a mixture of experts."""
    attends: bool = False
    """Trains a layer of attention."""
    divides: bool = False
    """Trains a Llama between whose layers ranks divide the tokens."""
    loads: bool = False
    """Loads a checkpoint after a step."""
    writes: bool = False
    """Changes a parameter after each step, by its shard and by the gathered whole."""
    touches: bool = False
    """Changes a parameter after each step, in place."""
    rests: bool = False
    """Takes all states off the device and back after each step."""
    looks: bool = False
    """Looks at events as it goes: the host may know already what it would wait for."""

    @property
    def waits(self) -> set[str]:
        """Return how the training thread waits for the device in a step, once things have settled."""
        # the CPU's step needs the norm, and so does one that ranks make together; one inside the backward
        # pass lets the next pass know it
        needing = {"offload_optimizer", "offload_param", "step_in_backward"}
        together = self.options.get("optimizer", {"type": "AdamW"})["type"] != "AdamW"
        # a stage has no gradients of the others' parameters, and asks how many ranks have them
        is_stage = "pipeline" in self.options.get("parallel", {})
        if self.divides:  # what is awaited in the forward pass comes behind the step before
            return {PACKED_SAMPLES, *self.more_waits}
        if self.zero.keys() & needing or together or is_stage:
            return {ORDER if self.world > 1 else NORM, *self.more_waits}
        return {*([BEFORE] if self.options.keys() & {"bf16", "fp16"} else []), *self.more_waits}


CASES = {
    case.name: case
    for case in (
        *(Case(f"stage {stage} bf16", stage, options=BF16) for stage in range(4)),
        *(Case(f"stage {stage} fp32", stage) for stage in (0, 3)),
        *(Case(f"stage {stage} fp16", stage, options=FP16) for stage in (1, 3)),
        Case("stage 2 fp16 static", 2, options=STATIC),
        Case("stage 3 resting", 3, options=BF16, rests=True, more_waits=(LEFT,), looks=True),
        Case("stage 1 host skipping", 1, HOST, SKIPPING),
        Case("stage 2 disk in blocks", 2, DISK, {**BF16, "aio": {"block_size": 4096}}),
        *(Case(f"stage {stage} accumulated", stage, options=BF16, accumulation=2) for stage in (1, 2, 3)),
        *(Case(f"stage {stage} host", stage, HOST, BF16) for stage in (1, 2, 3)),
        Case("stage 1 half", 1, HALF, BF16),
        Case("stage 3 host fp32", 3, HOST_BOTH),
        Case("stage 3 host both", 3, HOST_BOTH, BF16),
        Case("stage 3 host both unpinned", 3, UNPINNED, BF16, more_waits=(_PAGEABLE,)),
        Case("stage 3 host fp16", 3, HOST_BOTH, FP16),
        Case("stage 3 host parameters", 3, {"offload_param": {"device": "cpu"}}, BF16),
        Case("stage 2 host accumulated", 2, HOST, BF16, accumulation=2),
        Case("stage 3 host both accumulated", 3, HOST_BOTH, BF16, accumulation=2),
        Case("stage 2 disk", 2, DISK, BF16),
        Case("stage 3 disk both", 3, DISK_BOTH, BF16),
        Case("stage 3 disk accumulated", 3, DISK_BOTH, BF16, accumulation=2, more_waits=(SUM_ON_DISK,)),
        Case("stage 3 saves", 3, options={**BF16, **SAVES}, more_waits=(f"save: {BEFORE}",)),
        Case("stage 2 host saves", 2, HOST, {**BF16, **SAVES}),
        Case("stage 3 in memory", 3, options={**BF16, **IN_MEMORY}),
        Case("stage 2 host in memory", 2, HOST, {**BF16, **IN_MEMORY}),
        Case("stage 3 host both saves", 3, HOST_BOTH, {**BF16, **SAVES}),
        Case(
            "stage 3 saves at once",
            3,
            options={**BF16, **SAVES_AT_ONCE},
            more_waits=(f"save: {BEFORE}", WRITTEN),
        ),
        Case("stage 2 half saves at once", 2, HALF, {**BF16, **SAVES_AT_ONCE}, more_waits=(WRITTEN,)),
        Case(
            "stage 3 disk both saves at once",
            3,
            DISK_BOTH,
            {**BF16, **SAVES_AT_ONCE},
            more_waits=(WRITTEN,),
        ),
        Case("stage 1 offloaded", 1, options={**BF16, **OFFLOADED_INPUTS}),
        Case("stage 3 offloaded", 3, HOST_BOTH, {**BF16, **OFFLOADED_INPUTS}),
        Case("stage 3 init", 3, options=BF16, init=True),
        Case("stage 3 init host both", 3, HOST_BOTH, BF16, init=True),
        *(Case(f"stage {stage} stepping", stage, STEPPING, BF16) for stage in (2, 3)),
        *(Case(f"stage {stage} stepping on two", stage, STEPPING, BF16, world=2) for stage in (2, 3)),
        Case("stage 3 stepping fp32 by value", 3, {**STEPPING, "step_in_backward_clipping": "value"}),
        *(Case(f"stage {stage} narrow", stage, options=NARROW) for stage in (1, 3)),
        Case("stage 3 narrow host", 3, HOST, NARROW, more_waits=(SENT,)),
        Case("stage 3 narrow stepping", 3, STEPPING, NARROW),
        Case("stage 2 watched", 2, options={**BF16, **WATCHED}, more_waits=(METRICS, REPORT)),
        *(Case(f"stage {stage} on two", stage, options=BF16, world=2) for stage in range(4)),
        Case("stage 3 written on two", 3, options=BF16, world=2, writes=True, more_waits=WRITES, looks=True),
        Case("stage 1 touched on two", 1, options=BF16, world=2, touches=True),
        Case(
            "stage 2 watched on two",
            2,
            options={**BF16, **WATCHED},
            world=2,
            more_waits=(METRICS, REPORT),
            looks=True,  # one rank of them writes
        ),
        Case("stage 3 packed weights alone on two", 3, PACKED_WEIGHTS, BF16, world=2),
        Case(
            "stage 0 OneBitAdam logged on two",
            0,
            options={**BF16, **LOGGED, "optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 2}}},
            world=2,
            looks=True,
        ),
        Case(
            "stage 2 Lamb host fp32 on two",
            2,
            HOST,
            {"optimizer": {"type": "Lamb", "params": {}}},
            world=2,
            more_waits=(NORMS, ARRIVAL, _up("lamb.add < lamb.run")),
            looks=True,
        ),
        *(
            Case(f"stage {stage} sent in bf16 on two", stage, options=SENT_NARROW, accumulation=2, world=2)
            for stage in (0, 1)
        ),
        Case("stage 3 accumulated on two", 3, options=BF16, accumulation=2, world=2),
        Case("stage 3 parts on two", 3, PARTS, BF16, world=2),
        Case("stage 3 parts recomputed on two", 3, PARTS, RECOMPUTED, world=2),
        Case("stage 3 parts host both recomputed on two", 3, {**PARTS, **HOST_BOTH}, RECOMPUTED, world=2),
        Case("stage 2 host on two", 2, HOST, BF16, world=2, more_waits=(ARRIVAL, UPLOAD)),
        Case("stage 3 host both on two", 3, HOST_BOTH, BF16, world=2),
        Case("stage 3 disk both on two", 3, DISK_BOTH, BF16, world=2),
        Case(
            "stage 3 saves on two",
            3,
            options={**BF16, **SAVES},
            world=2,
            more_waits=(f"save: {BEFORE}",),
        ),
        *(
            Case(
                f"stage {stage} host loads on two",
                stage,
                HOST,
                {**BF16, **SAVES_AT_ONCE},
                world=2,
                more_waits=(ARRIVAL, UPLOAD, WRITTEN),
                loads=True,
                looks=True,
            )
            for stage in (2, 3)
        ),
        Case(
            "stage 3 loads on two",
            3,
            options={**BF16, **SAVES_AT_ONCE},
            world=2,
            more_waits=(f"save: {BEFORE}", WRITTEN),
            loads=True,
            looks=True,
        ),
        Case("stage 3 in memory on two", 3, options={**BF16, **IN_MEMORY}, world=2),
        *(
            Case(f"stage {stage} logged on two", stage, options={**BF16, **LOGGED}, world=2, looks=True)
            for stage in (0, 1, 3)
        ),
        *(
            Case(
                f"stage {stage} {name}",
                stage,
                options={**BF16, **option},
                world=world,
                more_waits=waits,
                experts="experts" in name,
                attends="sequence" in name,
                divides="tokens" in name,
                looks=True,
            )
            for stage in (0, 3)
            for name, option, world, waits in (
                ("tensor on two", SHARED, 2, (BATCHES,)),
                ("tensor, tokens divided, on two", TOKENS, 2, (BATCHES,)),
                ("experts on two", DIVIDED, 2, ROUTING),
                ("experts and tensor on four", BOTH, 4, (BATCHES, *ROUTING)),
                ("sequence on two", SPLIT, 2, ()),
                ("sequence and tensor on four", SPLIT_AND_SHARED, 4, (BATCHES,)),
            )
        ),
        Case(
            "stage 3 tensor host on two",
            3,
            HOST_BOTH,
            {**BF16, **SHARED},
            world=2,
            more_waits=(BATCHES,),
            looks=True,
        ),
        *(
            Case(
                f"stage {stage} pipeline on two",
                stage,
                options={**BF16, **PIPED},
                accumulation=3,
                world=2,
                more_waits=(LOSSES,),
            )
            for stage in (0, 1)
        ),
        Case("stage 3 init on two", 3, options=BF16, init=True, world=2),
        *(Case(f"stage {stage} groups on four", stage, GROUPS, BF16, world=4) for stage in (0, 1, 2, 3)),
        *(Case(f"stage {stage} copies on four", stage, COPIES, BF16, world=4) for stage in (1, 3)),
        Case("stage 3 copies accumulated on four", 3, COPIES, BF16, accumulation=2, world=4),
        Case("stage 3 copies host both on four", 3, {**COPIES, **HOST_BOTH}, BF16, world=4),
        Case("stage 3 packed on four", 3, {**COPIES, **PACKED}, BF16, world=4),
        Case("stage 3 packed weights on four", 3, {**COPIES, **PACKED_WEIGHTS}, BF16, world=4),
        Case("stage 3 packed weights in groups on four", 3, {**GROUPS, **PACKED_WEIGHTS}, BF16, world=4),
        Case(
            "stage 3 packed weights host both on four",
            3,
            {**COPIES, **PACKED_WEIGHTS, **PACKED, **HOST_BOTH},
            BF16,
            world=4,
        ),
        Case("stage 2 packed groups on four", 2, {**GROUPS, **PACKED_WITH_ERRORS}, BF16, world=4),
        *(
            Case(
                f"stage {stage} {kind} {place} on two",
                stage,
                zero,
                {**BF16, "optimizer": {"type": kind, "params": params}},
                world=2,
                more_waits=waits,
                looks=True,
            )
            for kind, stage, place, zero, params, waits in (
                ("Lamb", 2, "alone", {}, {}, (NORMS,)),
                ("Lamb", 3, "host both", HOST_BOTH, {}, (NORMS, ARRIVAL, _up("lamb.add < lamb.run"))),
                ("Adafactor", 2, "alone", {}, {}, ADAFACTOR_SUMS),
                (
                    *("Adafactor", 3, "host both", HOST_BOTH, {}),
                    (
                        *ADAFACTOR_SUMS,
                        ARRIVAL,
                        _up("adafactor.all_reduce < adafactor.run"),
                        _down("adafactor.all_reduce < adafactor.run"),
                    ),
                ),
                ("Muon", 1, "alone", {}, {}, ()),
                (
                    *("Muon", 3, "host both", HOST_BOTH, {}),
                    (
                        ARRIVAL,
                        _up("muon._run_batch < muon.run"),
                        _down("muon.apply_change < muon._run_batch"),
                    ),
                ),
                ("OneBitAdam", 0, "alone", {}, {"freeze_step": 2}, ()),
                (
                    *("OneBitAdam", 3, "host both", HOST_BOTH, {"freeze_step": 2}),
                    (ARRIVAL, _down("one_bit.averaged < one_bit.step_apart")),
                ),
                (
                    *("ZeroOneAdam", 0, "alone", {}),
                    {"var_freeze_step": 1, "local_step_scaler": 1, "local_step_clipper": 2},
                    ("aten::_local_scalar_dense in local_steps.refuse_writes < one_bit._refuse_writes",),
                ),
                (
                    *("OneBitLamb", 1, "alone", {}, {"freeze_step": 2}),
                    ("tolist in lamb.totals < one_bit.step_unit",),
                ),
            )
        ),
        Case("stage 3 groups logged on four", 3, GROUPS, {**BF16, **LOGGED}, world=4, looks=True),
    )
}
_WARM = 3
"""Steps before waits are counted: the first ones find orders and settle sizes."""
_STEPS, _SAMPLES = 6, 12


def train(case: Case) -> dict[str, Any]:
    """Train, and return the losses and what was found. The pretended GPU is installed."""
    import torch
    import torch.distributed as dist

    import zlaunch
    from tests.runtime.models import batches, config, loss_of, net

    from .clocks import findings
    from .layers import attending, llama, loss_of_llama, loss_of_logits, loss_of_parts, mixture
    from .modes import running

    findings.clear()
    with running(), _folder(case) as folder:
        os.environ["ZLAUNCH_MEMORY_DIR"] = f"{folder}/memory"
        device = zlaunch.init_distributed()
        axes = case.options.get("parallel", {})
        shared = axes.get("tensor", 1) * axes.get("sequence", 1) * axes.get("pipeline", 1)
        parts, rank = dist.get_world_size() // shared, dist.get_rank() // shared
        small = {"stage3_param_persistence_threshold": 0, "sub_group_size": 4096, "reduce_bucket_size": 9000}
        settings = config(
            case.stage,
            _SAMPLES // parts,
            case.accumulation,
            0.05,
            zero={**small, **_placed(case.zero, folder)},
            **case.options,
        )
        settings.setdefault("steps_per_print", 1000)
        if "csv_monitor" in settings:
            settings["csv_monitor"] = {**settings["csv_monitor"], "output_path": folder}
        if case.init:
            with zlaunch.zero.Init(config_dict_or_path=settings):
                model = net(width=48, depth=2)
        else:
            model = net(width=48, depth=2)
        if case.experts:
            model.layers[1] = mixture(48)
        if case.attends:
            model.layers[1] = attending(48)
        if case.divides:
            model = llama(48)
        if "activation_checkpointing" in case.options:
            zlaunch.checkpointing.checkpoint_blocks(model)
        engine, *_ = zlaunch.initialize(model=model, config=settings)
        assert device.type == engine.device.type == "cuda"
        engine.client_state = dict
        losses: list[Any] = []
        waits: dict[Any, Any] = {}
        for index, batch in enumerate(batches(_STEPS, _SAMPLES * case.accumulation)):
            micros = [micro.chunk(parts)[rank].pin_memory() for micro in batch.chunk(case.accumulation)]
            if index == _WARM:
                findings.waits.clear()
            if "pipeline" in axes:
                inputs = [micro.to(device, non_blocking=True) for micro in micros]
                pairs = [(each[:, :-1], each[:, 1:]) for each in inputs]
                losses.append(engine.train_batch(iter(pairs), loss_of_logits))
                continue
            for micro in micros:
                compute = loss_of_llama if case.divides else loss_of_parts if case.attends else loss_of
                loss = compute(engine, micro.to(device, non_blocking=True))
                engine.backward(loss)
                engine.step()
            losses.append(loss.detach())
            if case.writes:
                _write(model, by_shard=index % 2 == 0)
            if case.touches:
                with torch.no_grad():
                    next(model.parameters()).mul_(0.5)
            if case.rests:
                engine.offload_states(non_blocking=True)
                engine.reload_states(non_blocking=True)
            if "asynchronous" in case.options.get("checkpoint", {}) and index in (1, 4):
                waits |= {} if index < _WARM else findings.waits
                findings.waits.clear()
                engine.save_checkpoint(folder)  # written while the next steps are made
                waits |= {} if index < _WARM else {f"save: {how}": n for how, n in findings.waits.items()}
                findings.waits.clear()
            if case.loads and index == _WARM - 1:
                engine.load_checkpoint(folder)  # while the device may still compute the step
        waits |= findings.waits
        values = [float(loss) for loss in losses]
        torch.cuda.synchronize()
        engine.destroy()
    return {
        "losses": values,
        "races": dict(findings.races),
        "mixes": dict(findings.mixes),
        "waits": waits,
    }


def _write(model: Any, *, by_shard: bool) -> None:
    """Change the parameter that the next pass uses first."""
    import torch

    import zlaunch
    from zlaunch.compat.fp32_access import safe_get_local_fp32_param, safe_set_local_fp32_param

    weight = next(model.parameters())
    if by_shard:
        values = safe_get_local_fp32_param(weight)
        if values is not None:
            safe_set_local_fp32_param(weight, values * 0.5)
        return
    with zlaunch.zero.GatheredParameters([weight], modifier_rank=0), torch.no_grad():
        weight.mul_(0.5)


@contextmanager
def _folder(case: Case) -> Iterator[str]:
    """A folder for this case; several ranks have one, by the port at which they meet."""
    if case.world == 1:
        with tempfile.TemporaryDirectory() as folder:
            yield folder
        return
    path = Path(tempfile.gettempdir(), f"pretended-{os.environ['MASTER_PORT']}-{case.name.replace(' ', '-')}")
    path.mkdir(exist_ok=True)
    try:
        yield str(path)
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _placed(zero: dict[str, Any], folder: str) -> dict[str, Any]:
    """Put a folder on the disk into the settings, and return them."""
    return {
        key: _placed(value, folder) if isinstance(value, dict) else folder if value == "NVME" else value
        for key, value in zero.items()
    }
