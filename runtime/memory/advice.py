"""Explains an out-of-memory error: the plan beside what was allocated, what holds it, what would help."""

from __future__ import annotations

import gc
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from ..activation.checkpointing import has_blocks
from ..activation.tiles import changes_logits, find_head, has_causal_loss
from ..host_memory import host_bytes
from ..models import causal_model
from ..zero.placeholder import shape_of
from ..zero.unit import Unit
from .activations import activations_per_token, logits_bytes
from .estimate import GIB, Setting, alternatives, narrowed, plan, shown_bytes

# -- holders ----------------------------------------------------------------------------------------
#
# Finds what holds a process's tensor memory.


def find_holders(
    units: Iterable[Unit], optimizer: torch.optim.Optimizer | None, device: torch.device
) -> list[tuple[str, int, int]]:
    """Return what holds memory of ``device``: a name, the number of tensors and their bytes, the largest
    first. Those of the engine are summed up by purpose, others by dtype and shape. What autograd alone keeps
    for the backward pass is not among them: Python does not know it.
    """
    labels = _labels(units, optimizer)
    sizes: dict[int, tuple[str, int]] = {}
    for each in gc.get_objects():
        if not issubclass(type(each), Tensor):
            continue
        try:
            if each.device.type != device.type:
                continue
            storage = each.untyped_storage()
            key = int(storage._cdata)
            nbytes = storage.nbytes()
            shape = f"{str(each.dtype).removeprefix('torch.')} {list(each.shape)}"
        except Exception:  # a tensor without memory of its own: fake, functional, of a subclass
            continue
        # of several views the one that shows all of the memory names it
        if key not in sizes or each.nbytes == nbytes:
            sizes[key] = labels.get(key, shape), nbytes
    found: dict[str, list[int]] = defaultdict(list)
    for label, nbytes in sizes.values():
        found[label].append(nbytes)
    held = [(label, len(each), sum(each)) for label, each in found.items() if sum(each)]
    return sorted(held, key=lambda each: -each[2])


def _labels(units: Iterable[Unit], optimizer: torch.optim.Optimizer | None) -> dict[int, str]:
    """Name the engine's storages by purpose."""
    named: list[tuple[object, str]] = []
    for unit in units:
        named.append((unit.full, "parameters"))
        if hasattr(unit.store, "__dict__"):
            for name, value in vars(unit.store).items():
                named.append((value, "gradients" if "grad" in name else "fp32 values"))
        named.append((unit.values.tensor, "parameters"))
    if optimizer is not None:
        for state in optimizer.state.values():
            named += [(value, "optimizer state") for value in state.values()]
        for group in optimizer.param_groups:
            named += [(parameter.grad, "gradients") for parameter in group["params"]]
    labels: dict[int, str] = {}
    for value, label in named:
        if isinstance(value, Tensor):
            labels.setdefault(int(value.untyped_storage()._cdata), label)
    return labels


# -- advice -----------------------------------------------------------------------------------------


_HOST_WORDS = "DefaultCPUAllocator: can't allocate memory"
_MOST_HOLDERS = 5
_LEAST_SHARE = 0.01
"""The holders that are named: so many at most, each with such a share of the largest one."""
_WORTH_IT = 0.25
"""The share of what was asked for that a change has to save where none saves it all; the share of a token's
activations that logits have to be.
"""
_SIZES = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": GIB}
_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)")


@dataclass(frozen=True, slots=True)
class MemoryAdviser:
    """Knows what an engine has planned to hold, and what its config says."""

    setting: Setting
    units: Sequence[Unit]
    optimizer: torch.optim.Optimizer | None
    device: torch.device
    config: Mapping[str, Any]
    """The config as it was given."""
    checkpoints: bool
    """Tells whether the model's blocks are checkpointed by the config."""
    model: nn.Module

    def explain(self, asked_bytes: int, where: str, micro_batch: int, accumulation: int) -> str:
        """Say in lines what was planned, what is allocated and by what, and what to change. ``where`` says
        what ran: a forward or backward pass, or the step.
        """
        planned = shown_bytes(self._planned(self.setting))
        lines = [f"{self._allocated()}; planned without activations: {planned}"]
        holders = find_holders(self.units, self.optimizer, self.device)[:_MOST_HOLDERS]
        held = [
            f"{name}{f' x {n}' if n > 1 else ''} {shown_bytes(nbytes)}"
            for name, n, nbytes in holders
            if nbytes >= holders[0][2] * _LEAST_SHARE
        ]
        is_pass = where != "step" and torch.is_grad_enabled()
        besides = "; plus the activations saved for the backward pass" if is_pass else ""
        lines.append(f"largest tensors: {', '.join(held) or 'none'}{besides}")
        changes = self.changes(asked_bytes, micro_batch, accumulation, of_pass=is_pass)
        if changes:
            lines += ["each of these config settings saves memory, cheapest first:"]
            lines += [f"  {change}" for change in changes]
        else:
            lines += ["no config setting saves much: use more GPUs, shorter inputs or a smaller model"]
        return "\n".join(f"  {line}" for line in lines)

    def _planned(self, setting: Setting) -> int:
        """Return the bytes that a setting takes of the memory that was not enough."""
        total = plan(setting).total
        return total.device + (total.host if setting.device_is_host else 0)

    def _allocated(self) -> str:
        if self.device.type == "cuda":
            allocated = torch.cuda.memory_allocated()
            reserved = torch.cuda.memory_reserved()
            whole = torch.cuda.mem_get_info()[1]
            text = f"allocated {shown_bytes(allocated)} of {shown_bytes(whole)}"
            return f"{text} ({shown_bytes(reserved)} reserved by the allocator)"
        memory = psutil.Process().memory_info().rss
        return f"this process uses {shown_bytes(memory)}, {shown_bytes(host_bytes())} are free on the machine"

    def changes(self, asked_bytes: int, micro_batch: int, accumulation: int, *, of_pass: bool) -> list[str]:
        """Return lines for the config that save memory, with the keys that it has already. ``of_pass``: also
        those that save memory in a forward and backward pass.
        """
        found: list[dict[str, Any]] = []
        before = self._planned(self.setting)
        saving = [
            (before - self._planned(setting), json.loads(f"{{{text}}}"))
            for text, setting in alternatives(self.setting)
        ]
        enough = [change for saved, change in saving if saved >= max(1, asked_bytes)]
        most, change = max(saving, key=lambda each: each[0], default=(0, {}))
        if enough or most > asked_bytes * _WORTH_IT:
            change = enough[0] if enough else change
            section = self.config.get("zero_optimization")
            found.append({"zero_optimization": {**(section if isinstance(section, dict) else {}), **change}})
        # an optimizer that the script makes takes no arguments from the config
        if "optimizer" in self.config:
            for bits, setting in narrowed(self.setting):
                if before - self._planned(setting) >= max(1, asked_bytes):
                    found.append(self._merged(bits))
                    break
        section = self.config.get("activation_checkpointing")
        known = section if isinstance(section, dict) else {}
        if of_pass and not known.get("tiled_loss") and self._has_large_logits():
            found.append({"activation_checkpointing": {**known, "tiled_loss": True}})
        if of_pass and not self.checkpoints and has_blocks(self.model):
            found.append({"activation_checkpointing": {**known, "enabled": True}})
        if of_pass and micro_batch > 1:
            part = next(n for n in range(2, micro_batch + 1) if micro_batch % n == 0)
            found.append(
                {
                    "train_micro_batch_size_per_gpu": micro_batch // part,
                    "gradient_accumulation_steps": part * accumulation,
                }
            )
        return [json.dumps(change, default=str)[1:-1] for change in found]

    def _has_large_logits(self) -> bool:
        """Tell whether logits are a large part of a token's activations, and need not be kept."""
        model = causal_model(self.model)
        head = find_head(model)
        nbytes = self.setting.dtype_bytes
        known = None if head is None else activations_per_token(model, nbytes)
        if known is None or known.checkpointed is None or changes_logits(model):
            return False
        all_bytes = known.checkpointed if self.checkpoints else known.plain
        logits = logits_bytes(1, shape_of(head.weight)[0], nbytes, chunked=has_causal_loss(model))
        return logits >= _WORTH_IT * all_bytes

    def _merged(self, change: Mapping[str, Any]) -> dict[str, Any]:
        """Return the config's sections that a change names, with all else that they have."""
        merged: dict[str, Any] = {}
        for name, entries in change.items():
            known = self.config.get(name)
            merged[name] = {**(known if isinstance(known, dict) else {}), **entries}
            params = known.get("params") if isinstance(known, dict) else None
            if isinstance(params, dict) and "params" in entries:
                merged[name]["params"] = {**params, **entries["params"]}
        return merged


def raise_with_advice(error: BaseException | None, where: str, explain: Callable[[int, str], str]) -> None:
    """Raise an error for memory that could not be allocated again, as the same type, with what ``explain``
    returns for the bytes that were asked for and ``where``, what ran. Others pass.
    """
    is_hosts = type(error) is RuntimeError and _HOST_WORDS in str(error)
    if not is_hosts and not isinstance(error, torch.OutOfMemoryError):
        return
    text = str(error)
    found = _ASKED.search(text)
    asked = int(float(found[1]) * _SIZES[found[2]]) if found else 0
    try:
        more = explain(asked, where)
    except Exception as problem:  # to explain takes memory too
        more = f"  memory use unknown: {type(problem).__name__}: {problem}"
    kind = RuntimeError if is_hosts else torch.OutOfMemoryError
    raise kind(f"{text}\nzlaunch: out of memory in {where}:\n{more}") from error
