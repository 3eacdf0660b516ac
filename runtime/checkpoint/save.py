"""Writes a checkpoint: every rank its shards, whole or not at all."""

from __future__ import annotations

import copy
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..comm.collectives import Comm
from ..comm.pending import Exchange
from ..cut import cut_of, whole_shape
from ..offload.transfer import HostLink
from ..optim.slices import ShardSlice
from ..optim.update_rule import State
from ..zero.hooks import ShardedModel
from ..zero.layout import ALIGN_NUMEL
from ..zero.unit import Unit
from .all_or_none import all_or_none
from .format.commit import SaveTarget, point_to, prepare, prune, put_in_place, write_manifest
from .format.manifest import WHOLE
from .format.tensor_file import NAMES, CheckpointError
from .format.writer import FileWriter
from .shard_io import Described, Description, ShardBlock, blocks_of, describe, persistent
from .snapshot import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Holds what is saved."""

    sharded: ShardedModel
    slices: Sequence[ShardSlice]
    state: State
    optimizer: str
    """Name of the optimizer's class."""
    facts: Mapping[str, Any]
    """Entries of the manifest: counters, config, the caller's client_state; JSON."""
    tensors: Mapping[str, Tensor]
    """Tensors of ``facts``; equal on every rank."""
    rank_facts: Any
    """Entries of this rank alone, JSON."""
    rank_tensors: Mapping[str, Tensor]


Announced = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""Dtype and shape of each tensor of a file, in their order."""


def rank_file(rank: int) -> str:
    """Return the name of one rank's file of tensors."""
    return f"rank_{rank:05d}.safetensors"


class Save:
    """Runs one save. :meth:`begin` takes what changes with the next step, :meth:`finish` may run beside
    training.

    Both are collective, and raise CheckpointError on every rank; the former checkpoints stay unchanged then.
    """

    def __init__(self, source: Source, target: SaveTarget, link: HostLink) -> None:
        self._link = link
        self._source, self._target = source, target
        self._comm = source.sharded.comm
        # The age of a checkpoint is that of its state. A save in the background may end after a later one.
        self._taken_at = time.time()
        self._writer: FileWriter | None = None
        self._whole_writer: FileWriter | None = None
        self._later: list[ShardBlock] = []
        self._announced: Announced = {}
        self._part: dict[str, Any] = {}
        self._whole: dict[str, Tensor] = {}

    @staticmethod
    def resident_bytes(source: Source, target: SaveTarget) -> int:
        """Return the bytes that a snapshot takes."""
        return sum(block.nbytes for block in _blocks(source, target) if block.resident)

    def begin(self, snapshot: Snapshot | None) -> None:
        """Make the files and write what rests on disk; copy the rest to ``snapshot``, if there is one."""
        exchange, rank = self._comm.exchange, self._comm.rank
        target = self._target
        all_or_none(exchange, rank, lambda: prepare(target) if target.leader else None)
        try:
            all_or_none(exchange, rank, lambda: self._begin(snapshot), own=True)
        except BaseException:
            self._give_up()
            raise

    def _begin(self, snapshot: Snapshot | None) -> None:
        source, target, rank = self._source, self._target, self._comm.rank
        blocks = list(_blocks(source, target))
        blocks.sort(key=lambda block: block.resident)
        for block in blocks:
            for kind, dtype in block.kinds.items():
                self._announced[f"{block.prefix}.{kind}"] = dtype, (block.last - block.first,)
        self._announced |= _announce(source.rank_tensors)
        self._part = {
            "parameters": _describe_all(source, blocks, rank),
            "rank_state": source.rank_facts,
        }
        if target.leader:
            self._whole = {**source.tensors}
            self._whole |= {f"buffer.{name}": value for name, value in persistent(source.sharded).items()}
        if snapshot is None or not all(block.resident for block in blocks):
            self._open_files()
        if snapshot is not None:
            snapshot.begin(sum(block.nbytes for block in blocks if block.resident))
        for block in blocks:
            if not block.resident:
                self._write(block)
            elif snapshot is None:
                self._later.append(block)
            else:
                with block.open() as pieces:
                    snapshot.take(block.prefix, pieces)
                self._later.append(replace(block, open=partial(snapshot.open, block.prefix)))
        if snapshot is not None:
            self._whole = {name: value.detach().cpu().clone() for name, value in self._whole.items()}
            self._link.after_downloads()

    def _open_files(self) -> None:
        if self._writer is not None:
            return
        folder = self._target.temporary
        self._writer = FileWriter(folder / rank_file(self._comm.rank), self._announced, self._link)
        if self._target.leader:
            try:
                self._whole_writer = FileWriter(folder / WHOLE, _announce(self._whole), self._link)
            except FileExistsError:
                raise CheckpointError(
                    f"{folder / WHOLE}: another node writes this file, so the nodes share the folder: set "
                    "use_node_local_storage to false"
                ) from None

    def _write(self, block: ShardBlock) -> None:
        assert self._writer is not None
        with block.open() as pieces:
            for kind in block.kinds:
                for piece in pieces[kind]:
                    self._writer.write(f"{block.prefix}.{kind}", piece)

    def finish(self, exchange: Exchange) -> Path:
        """Write the rest, put the whole in its place, and return the checkpoint's folder."""
        rank, target = self._comm.rank, self._target
        try:
            parts = all_or_none(exchange, rank, self._finish)
            all_or_none(exchange, rank, lambda: self._complete(parts) if target.leader else None)
        except BaseException:
            self._give_up()
            raise
        if target.save_latest:
            all_or_none(exchange, rank, lambda: point_to(target) if target.leader else None)
        if target.keep_last is not None:
            all_or_none(exchange, rank, lambda: prune(target) if target.leader else None)
        return target.folder / target.tag

    def _finish(self) -> dict[str, Any]:
        self._open_files()
        assert self._writer is not None
        for block in self._later:
            self._write(block)
        for name, tensor in self._source.rank_tensors.items():
            self._writer.write(name, tensor)
        entry = {**self._writer.close(), "host": self._target.host}
        files = {rank_file(self._comm.rank): entry}
        if self._target.leader:
            assert self._whole_writer is not None
            for name, tensor in self._whole.items():
                self._whole_writer.write(name, tensor)
            files[WHOLE] = {**self._whole_writer.close(), "host": None}
        return {**self._part, "files": files}

    def _complete(self, parts: Sequence[Mapping[str, Any]]) -> None:
        target = self._target
        files = {name: entry for part in parts for name, entry in part["files"].items()}
        entries = {"time": self._taken_at, **_entries(self._source, target, parts)}
        write_manifest(target.temporary, entries, self._whole, files)
        put_in_place(target.temporary, target.folder / target.tag)

    def _give_up(self) -> None:
        for writer in (self._writer, self._whole_writer):
            if writer is not None:
                writer.abandon()
        if self._target.leader:
            shutil.rmtree(self._target.temporary, ignore_errors=True)


def _announce(tensors: Mapping[str, Tensor]) -> Announced:
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


# -- what this rank writes


def _blocks(source: Source, target: SaveTarget) -> list[ShardBlock]:
    comm = source.sharded.comm
    by_unit: dict[int, list[Described]] = {}
    for part in source.slices:
        what = describe(part, source.state, source.optimizer)
        by_unit.setdefault(id(part.unit), []).append((part, what))
    found: list[ShardBlock] = []
    for index, unit in enumerate(source.sharded.units):
        if not unit.trainable and target.exclude_frozen:
            continue
        low, high = _owned(unit, comm, target)
        if low < high:
            slices = by_unit.get(id(unit), [])
            found += blocks_of(unit, f"{index:04d}", slices, source.state, low, high)
    return found


def _owned(unit: Unit, comm: Comm, target: SaveTarget) -> tuple[int, int]:
    """Return the range of the flat buffer that this rank writes: its shard. Ranks that have the same elements
    write equal parts of them, or where nodes have separate folders, the first such rank of each node all.
    """
    layout, shards = unit.layout, unit.link.shards
    whole = unit.stop - unit.start == unit.numel
    if target.host is not None:
        return (0, unit.numel if target.leader else 0) if whole else (unit.start, unit.stop)
    low, high = layout.shard_range(unit.link.position)
    # of a pipeline's unit, other stages may have some parameters
    here = next((index for index, shape in enumerate(unit.shapes) if shape.numel()), 0)
    cut = cut_of(unit.parameters[here])
    in_axis = comm.holders_of(unit.parameters[here])[2]
    copies = in_axis * (unit.data.size // shards)
    if copies == 1:
        return low, high
    place = comm.rank % comm.mesh.tensor if cut is None else cut.copy_index
    step = -(-(high - low) // (copies * ALIGN_NUMEL)) * ALIGN_NUMEL
    low += (place + in_axis * (unit.data.position // shards)) * step
    return min(low, high), min(low + step, high)


def _describe_all(source: Source, blocks: Sequence[ShardBlock], rank: int) -> dict[str, Any]:
    """List the parts of parameters that lie in the blocks, by name."""
    found: dict[str, Any] = {}
    for unit in source.sharded.units if rank == 0 else ():
        for index, slot in enumerate(unit.layout.slots):
            if not slot.numel and 0 in whole_shape(unit.parameters[index], unit.shapes[index]):  # in no block
                found[unit.names[index]] = _entry(unit, index, Description(), [])
    for block in blocks:
        unit = block.unit
        for index, first, last in unit.layout.overlaps(block.first, block.last):
            slot = unit.layout.slots[index]
            # file, prefix in it, first element there, first element of the parameter, elements
            piece = [
                rank_file(rank),
                block.prefix,
                first - block.first,
                first - slot.offset,
                last - first,
            ]
            entry = found.get(unit.names[index])
            if entry is not None:
                _pieces_of(entry).append(piece)
                continue
            at = first - unit.start
            what = next((what for part, what in block.slices if part.start <= at < part.stop), Description())
            found[unit.names[index]] = _entry(unit, index, what, [piece])
    return found


def _entry(unit: Unit, index: int, what: Description, slices: list[Any]) -> dict[str, Any]:
    parameter = unit.parameters[index]
    cut = cut_of(parameter)
    part = {} if cut is None else {"parts": [{"box": json.loads(json.dumps(cut.box)), "slices": slices}]}
    return {
        **part,
        "dtype": NAMES[unit.dtype],
        "shape": list(whole_shape(parameter, unit.shapes[index])),
        "trainable": unit.trainable,
        "group": unit.layout.slots[index].group,
        "state": what.as_json(),
        "slices": [] if part else slices,
    }


def _pieces_of(entry: dict[str, Any]) -> list[Any]:
    """Return the list of pieces of a parameter's entry that one rank has made."""
    found: list[Any] = entry["parts"][0]["slices"] if "parts" in entry else entry["slices"]
    return found


def _merge(entry: dict[str, Any], further: Mapping[str, Any]) -> None:
    """Add the pieces that another rank has of a parameter."""
    entry["slices"] += further["slices"]
    for part in further.get("parts", ()):
        same = next((known for known in entry["parts"] if known["box"] == part["box"]), None)
        if same is None:
            entry["parts"].append(part)
        else:
            same["slices"] += part["slices"]


def _tied(sharded: ShardedModel) -> dict[str, str]:
    """Return the further names of parameters that have several, each with its first name."""
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    for name, parameter in sharded.module.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(parameter), name)
        if known != name:
            found[name] = known
    return found


# -- the whole


def _entries(source: Source, target: SaveTarget, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Put together the manifest's entries about the run and its parameters."""
    merged: dict[str, Any] = {}
    for part in parts:
        for name, entry in part["parameters"].items():
            if name in merged:
                _merge(merged[name], entry)
            else:
                merged[name] = copy.deepcopy(entry)
    ordered = [name for name, _ in source.sharded.module.named_parameters() if name in merged]
    left_out = [unit for unit in source.sharded.units if target.exclude_frozen and not unit.trainable]
    return {
        "save_id": target.owner,
        "world_size": source.sharded.comm.world_size,
        **source.facts,
        "rank_states": [part["rank_state"] for part in parts],
        "parameters": {name: merged[name] for name in ordered},
        "excluded": [name for unit in left_out for name in unit.names if name not in merged],
        "tied": _tied(source.sharded),
    }
