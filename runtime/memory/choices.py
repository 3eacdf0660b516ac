"""Compares the stages and offloads for a model and machines; writes the config of the fastest that fits."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...cuda_ops.narrow_state import STATE_BYTES
from ..mesh import MeshShape
from ..offload.manager import OffloadOptions, Tier
from ..optimizer_specs import ESTIMATED
from .activations import AUTOCAST, Activations
from .estimate import GIB, MemoryPlan, Setting, nccl_bytes, plan
from .model import ModelSizes

_BLOCKS_OF_BUCKETS = 2
"""Blocks that the backward pass has left, with their activations, when most gradient buckets are alive."""
_CONTEXT_BYTES = GIB
"""Is assumed for the CUDA context, the libraries' buffers and what the allocator cannot use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """Describes equal machines; memory in bytes, None where it is not known."""

    nodes: int
    gpus: int
    """Counts the GPUs of a machine."""
    gpu_bytes: int | None
    host_bytes: int | None
    """Counts the host memory of a machine, which its ranks share."""
    axes: MeshShape = field(default_factory=MeshShape)
    """Says how many ranks share layers, sequences, experts and stages; its data axis does not count."""

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.nodes * self.gpus

    @property
    def reserved_bytes(self) -> int:
        """Return the bytes of each GPU that the model cannot have: CUDA's, and NCCL's with several ranks."""
        data = self.world_size * self.axes.data // self.axes.ranks
        return _CONTEXT_BYTES + nccl_bytes(replace(self.axes, data=data))

    @property
    def reserved_text(self) -> str:
        """Say what is reserved, and for whom."""
        whom = "CUDA and NCCL" if self.world_size > 1 else "CUDA"
        return f"{self.reserved_bytes / GIB:.1f} for {whom}"

    @property
    def shards(self) -> int:
        """Return the number of ranks that have the same parameters, among which ZeRO shards."""
        return self.world_size // (self.axes.tensor * self.axes.pipeline)


@dataclass(frozen=True, slots=True)
class Bits:
    """Says what an optimizer keeps of each element, and in how many bits."""

    state_dtype: str = "fp32"
    optimizer: str = "AdamW"
    stochastic: bool = False
    """Tells whether bf16 weights are stepped without fp32 masters."""

    @property
    def is_narrow(self) -> bool:
        """Tell whether anything has fewer than 32 bits; records on NVMe have not."""
        return self.stochastic or self.state_dtype != "fp32"


@dataclass(frozen=True, slots=True)
class Choice:
    """Names a stage, where the states are kept, and whether blocks are checkpointed."""

    stage: int
    optimizer: Tier = Tier.DEVICE
    parameters: Tier = Tier.DEVICE
    checkpointed: bool = False
    steps_in_backward: bool = False

    @property
    def name(self) -> str:
        """Return the choice in words, without the checkpointing."""
        places = {Tier.HOST: "CPU", Tier.DISK: "NVMe"}
        parts = [f"stage {self.stage}"]
        if self.optimizer is not Tier.DEVICE:
            what = "optimizer and parameters" if self.parameters is not Tier.DEVICE else "optimizer"
            parts.append(f"{what} on {places[self.optimizer]}")
        if self.steps_in_backward:
            parts.append("step in backward")
        return ", ".join(parts)


_PLACES = (
    *((stage, Tier.DEVICE, Tier.DEVICE) for stage in (0, 1, 2)),
    (3, Tier.DEVICE, Tier.DEVICE),
    (1, Tier.HOST, Tier.DEVICE),
    (2, Tier.HOST, Tier.DEVICE),
    (3, Tier.HOST, Tier.DEVICE),
    (3, Tier.HOST, Tier.HOST),
    (3, Tier.DISK, Tier.DISK),
)
"""Lists stages and tiers of optimizer and parameters, the fastest first where links reach 10 GB/s. Stage 3
gathers parameters over them; offload moves gradients and parameters to the host and back, and steps there.
"""


def choices(shards: int, stages: int = 1, *, steps_in_backward: bool = False) -> Iterator[Choice]:
    """Yield every choice, the fastest first. One rank has nothing to shard without offload, and a pipeline of
    several ``stages`` goes with ZeRO's stages 0 and 1 alone. ``steps_in_backward``: where that is
    possible, at stages 2 and 3 without offload.
    """
    for stage, optimizer, parameters in _PLACES:
        is_offloaded = optimizer is not Tier.DEVICE
        steps = steps_in_backward and stage >= 2 and not is_offloaded
        if shards == 1 and stage > 0 and not is_offloaded and not steps:
            continue
        if (stages > 1 and stage > 1) or (stages == 1 and stage == 1 and is_offloaded):
            continue  # at stage 2 as much is offloaded, and less is kept
        for checkpointed in (False, True):
            yield Choice(stage, optimizer, parameters, checkpointed, steps)


@dataclass(frozen=True, slots=True)
class Estimated:
    """Holds what a choice needs on each rank."""

    choice: Choice
    states: MemoryPlan
    activations: int | None
    """Counts the bytes of activations; None where they are not known."""

    @property
    def device(self) -> int:
        """Return the bytes on the GPU, with activations where they are known."""
        return self.states.total.device + (self.activations or 0)

    def fits(self, machines: Machines) -> bool | None:
        """Tell whether it fits; None where that is not known: no size of the GPUs, or no activations."""
        if machines.gpu_bytes is None:
            return None
        on_host = self.states.total.host * machines.gpus
        enough_host = machines.host_bytes is None or on_host <= machines.host_bytes
        if self.device + machines.reserved_bytes > machines.gpu_bytes or not enough_host:
            return False
        return None if self.activations is None else True


def compare(
    model: ModelSizes,
    machines: Machines,
    activations: Activations | None,
    *,
    dtype_bytes: int,
    steps_in_backward: bool = False,
    kept: Bits = Bits(),
) -> list[Estimated]:
    """Estimate all choices, the fastest first; ``model`` is what one rank has of the model."""
    found = []
    wide_bytes = dtype_bytes if kept.stochastic else 4
    states = len(ESTIMATED[kept.optimizer].states)
    for choice in choices(machines.shards, machines.axes.pipeline, steps_in_backward=steps_in_backward):
        if choice.checkpointed and (activations is None or activations.checkpointed is None):
            continue
        if kept.is_narrow and choice.optimizer is Tier.DISK:
            continue
        blocks = model.blocks_at(choice.stage)
        freed = 0
        if activations is not None and not choice.checkpointed:
            freed = _BLOCKS_OF_BUCKETS * activations.plain // len(blocks)
        setting = Setting(
            stage=choice.stage,
            world_size=machines.shards,
            blocks=blocks,
            experts=model.experts,
            expert_shards=machines.shards // machines.axes.expert,
            frozen_blocks=model.frozen_blocks if choice.stage == 3 else [model.frozen],
            dtype_bytes=dtype_bytes,
            states=states,
            master_bytes=wide_bytes,
            state_bytes=STATE_BYTES[kept.state_dtype],
            grad_bytes=wide_bytes,
            offload=OffloadOptions(
                optimizer=choice.optimizer,
                parameters=choice.parameters,
                state_count=states,
                narrow_masters=kept.stochastic,
            ),
            freed_by_backward=freed,
            steps_in_backward=choice.steps_in_backward,
        )
        nbytes = None
        if activations is not None:
            nbytes = activations.checkpointed if choice.checkpointed else activations.plain
        found.append(Estimated(choice, plan(setting), nbytes))
    return found


def fastest_that_fits(found: Sequence[Estimated], machines: Machines) -> Estimated | None:
    """Return the first that fits, None if none does."""
    return next((each for each in found if each.fits(machines)), None)


def config_text(
    chosen: Estimated,
    machines: Machines,
    *,
    dtype: str,
    micro_batch: int,
    axes: MeshShape,
    kept: Bits = Bits(),
    tiled_loss: bool = False,
) -> str:
    """Return the config of a choice: JSON whose comments, which zlaunch reads over, give the reasons."""
    choice = chosen.choice
    lines = [f'"train_micro_batch_size_per_gpu": {micro_batch},  // estimated: {need_text(chosen, machines)}']
    asked = ", ".join(f'"{name}": {size}' for name, size in axes.axes.items() if name != "data")
    if axes.pipeline > 1:
        fill = "// one per pipeline stage; more micro-batches mean a smaller pipeline bubble"
        lines.append(f'"gradient_accumulation_steps": {axes.pipeline},  {fill}')
    if asked:
        lines.append(f'"parallel": {{{asked}}},  // as requested; the other ranks are data-parallel')
    if dtype in AUTOCAST:
        section = f'"torch_autocast": {{"enabled": true, "dtype": "{AUTOCAST[dtype]}"}}'
        lines.append(f"{section},  // 16-bit matrix products; parameters stay fp32")
    elif dtype != "fp32":
        own = ', "master_weights": "stochastic"' if kept.stochastic else ""
        lines.append(f'"{dtype}": {{"enabled": true{own}}},  // halves parameter memory and traffic')
    rate = "1e-4" if kept.state_dtype == "fp32" else f'1e-4, "state_dtype": "{kept.state_dtype}"'
    more = ESTIMATED[kept.optimizer].estimated or {}
    rate += "".join(f', "{name}": {json.dumps(value)}' for name, value in more.items())
    lines.append(
        f'"optimizer": {{"type": "{kept.optimizer}", "params": {{"lr": {rate}}}}},  // set your learning rate'
    )
    zero = [f'"stage": {choice.stage}']
    for key, tier in (("offload_optimizer", choice.optimizer), ("offload_param", choice.parameters)):
        if tier is Tier.HOST:
            zero.append(f'"{key}": {{"device": "cpu"}}')
        elif tier is Tier.DISK:
            zero.append(f'"{key}": {{"device": "nvme", "nvme_path": "/local_nvme"}}')
    if choice.steps_in_backward:
        zero.append('"step_in_backward": true')
    recomputed = {
        '"enabled": true': "activations do not fit without it" if choice.checkpointed else "",
        '"tiled_loss": true': "as requested: no logits of whole sequences" if tiled_loss else "",
    }
    keys = [key for key, reason in recomputed.items() if reason]
    ending = "," if keys else ""
    lines.append(f'"zero_optimization": {{{", ".join(zero)}}}{ending}  // {reason_text(chosen)}')
    if keys:
        reasons = "; ".join(filter(None, recomputed.values()))
        lines.append(f'"activation_checkpointing": {{{", ".join(keys)}}}  // {reasons}')
    return "{\n  " + "\n  ".join(lines) + "\n}"


def need_text(chosen: Estimated, machines: Machines) -> str:
    """Return the GPU memory that a choice needs, in words."""
    return f"{chosen.device / GIB:.1f} GiB of GPU memory per rank, plus {machines.reserved_text}"


def reason_text(chosen: Estimated) -> str:
    """Return why a choice is the fastest that fits."""
    choice = chosen.choice
    if choice.steps_in_backward:
        return "as requested: updates during the backward pass, with one micro-batch per step"
    return _REASONS[choice.stage, choice.optimizer]


_REASONS = {
    (0, Tier.DEVICE): "everything fits on each GPU; this is the fastest stage",
    (1, Tier.DEVICE): "stage 0 does not fit; sharding optimizer state adds no traffic",
    (2, Tier.DEVICE): "stage 1 does not fit; sharding gradients adds no traffic",
    (1, Tier.HOST): "optimizer state does not fit on the GPU; the CPU updates it",
    (2, Tier.HOST): "optimizer state does not fit on the GPU; the CPU updates it",
    (3, Tier.DEVICE): "stage 2 does not fit; gathering parameters adds 50% traffic",
    (3, Tier.HOST): "stage 3 does not fit; states are in host memory",
    (3, Tier.DISK): "host memory is too small; states are on NVMe (set your path)",
}


def as_json(found: Sequence[Estimated], machines: Machines, more: Sequence[Mapping[str, Any]] = ()) -> str:
    """Return all estimates as JSON, each with what ``more`` has for it; sizes in bytes of a rank."""
    rows = []
    for i, each in enumerate(found):
        parts = {"parameters": each.states.parameters, "gradients": each.states.gradients}
        parts["optimizer"] = each.states.optimizer
        rows.append(
            {
                "stage": each.choice.stage,
                "offload_optimizer": each.choice.optimizer.value,
                "offload_param": each.choice.parameters.value,
                "activation_checkpointing": each.choice.checkpointed,
                "step_in_backward": each.choice.steps_in_backward,
                "gpu": {
                    **{name: part.device for name, part in parts.items()},
                    "activations": each.activations,
                    "total": each.device,
                },
                "host": each.states.total.host,
                "nvme": each.states.total.disk,
                "fits": each.fits(machines),
                **(more[i] if more else {}),
            }
        )
    return json.dumps(rows, indent=1)
