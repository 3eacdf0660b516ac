"""Writes a checkpoint: every rank its shards, whole or not at all."""

from __future__ import annotations

import atexit
import copy
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from ...cuda_ops.pinned import PAGE_BYTES
from ..comm.collectives import Comm
from ..comm.link import ALIGN_NUMEL
from ..comm.pending import DONE, Exchange, Pending
from ..comm.shard_spec import full_shape, spec_of
from ..log import fail, warn
from ..offload.transfer import HostLink
from ..optim.slices import ShardSlice
from ..optim.update_rule import State
from ..threads import make_thread
from ..zero.hooks import ShardedModel
from ..zero.unit import Unit
from .agree import HostChannel, all_or_none
from .format.commit import SaveTarget, point_to, prepare, prune, put_in_place, write_manifest
from .format.files import FileWriter
from .format.manifest import WHOLE
from .format.tensor_file import NAMES, CheckpointError
from .shard_io import Described, Description, ShardBlock, blocks_of, describe, persistent

# -- snapshot ---------------------------------------------------------------------------------------
#
# Copies to host memory what a save still has to write, so that training can go on.


_SEGMENT_BYTES = 256 << 20


class Snapshot:
    """Holds flat tensors by name. The memory, page-locked where there is a GPU, is kept for the next
    snapshot.

    Tensors on a GPU are copied on a separate stream: the host waits for it only in :meth:`arrived`.
    """

    def __init__(self, link: HostLink) -> None:
        self._link = link
        self._segments: list[Tensor] = []
        self._current = 0
        self._filled = 0
        self._segment_bytes = _SEGMENT_BYTES
        self._tensors: dict[str, dict[str, list[Tensor]]] = {}
        self._last: Pending = DONE
        """The copy that was started last; copies end in their order."""

    @property
    def held_bytes(self) -> int:
        """Return the bytes of memory that the snapshot holds."""
        return sum(segment.numel() for segment in self._segments)

    def reserve(self, nbytes: int) -> None:
        """Take the memory for so many bytes beforehand; the system makes new memory much slower than it
        copies.
        """
        self.begin(nbytes)
        while self.held_bytes < nbytes + PAGE_BYTES:
            self._add_segment()
            # Touches every page. Untouched memory would be made at the first copy, while training waits.
            self._segments[-1].zero_()

    def begin(self, nbytes: int) -> None:
        """Forget the former content and use its memory again. About ``nbytes`` will come."""
        self._segment_bytes = min(_SEGMENT_BYTES, nbytes + PAGE_BYTES)
        self._tensors.clear()
        self._current = self._filled = 0

    def take(self, prefix: str, pieces: Mapping[str, Sequence[Tensor]]) -> None:
        """Start to copy tensors, each given as consecutive pieces on any device."""
        self._tensors[prefix] = {
            kind: [copy for part in parts for copy in self._copy(part.detach())]
            for kind, parts in pieces.items()
        }

    def _copy(self, part: Tensor) -> list[Tensor]:
        copies = []
        at = 0
        while at < part.numel():
            room = self._room()
            count = min(part.numel() - at, room.numel() // part.dtype.itemsize)
            copy = room[: count * part.dtype.itemsize].view(part.dtype)
            source = part[at : at + count]
            if source.is_cuda:
                self._last = self._link.download(source, copy)
            else:
                copy.copy_(source)
            copies.append(copy)
            # A view of another dtype must begin at a multiple of its item size.
            self._filled += -(-count * part.dtype.itemsize // 64) * 64
            at += count
        return copies

    def _room(self) -> Tensor:
        """Return what is left of the present segment."""
        if self._segments and self._filled + PAGE_BYTES > self._segments[self._current].numel():
            self._current = self._current + 1
            self._filled = 0
        if self._current == len(self._segments):
            self._add_segment()
        return self._segments[self._current][self._filled :]

    def _add_segment(self) -> None:
        self._segments.append(self._link.pool.take(self._segment_bytes))

    def arrived(self) -> None:
        """Return when everything has been copied."""
        self._last.wait()
        self._last = DONE

    @contextmanager
    def open(self, prefix: str) -> Iterator[Mapping[str, Sequence[Tensor]]]:
        """Give what was taken under this name, once it has arrived."""
        self.arrived()
        yield self._tensors[prefix]

    def close(self) -> None:
        """Give the memory back, once all copies have arrived."""
        self.arrived()
        self._tensors.clear()
        for segment in self._segments:
            self._link.pool.drop(segment)
        self._segments.clear()


# -- save -------------------------------------------------------------------------------------------


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

    Both are collective, and raise CheckpointError on every rank (Note [All or none] in agree.py); the former
    checkpoints stay unchanged then.
    """

    def __init__(self, source: Source, target: SaveTarget, link: HostLink) -> None:
        self._link = link
        self._source = source
        self._target = target
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
        exchange = self._comm.exchange
        rank = self._comm.rank
        target = self._target
        # An exchange on its own: no rank can create its file before the folder exists.
        all_or_none(exchange, rank, lambda: prepare(target) if target.leader else None)
        try:
            all_or_none(exchange, rank, lambda: self._begin(snapshot), own=True)
        except BaseException:
            self._give_up()
            raise

    def _begin(self, snapshot: Snapshot | None) -> None:
        source = self._source
        target = self._target
        rank = self._comm.rank
        blocks = list(_blocks(source, target))
        # A FileWriter takes tensors in the announced order. Blocks on disk are written now and those in
        # memory by finish(), so the former come first in the file.
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
        # Otherwise the files are made in the background, too.
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
            # The next forward pass may write to buffers (running means), before the thread has written them.
            self._whole = {name: value.detach().cpu().clone() for name, value in self._whole.items()}
            # The next step must not overwrite what the copies to the host still read.
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
        rank = self._comm.rank
        target = self._target
        try:
            # See Note [Atomic saves] in format/commit.py. Each phase ends with an exchange: the manifest is
            # written only when every rank has synced its file, and `latest` replaced only when the checkpoint
            # has its name.
            parts = all_or_none(exchange, rank, self._finish)
            all_or_none(exchange, rank, lambda: self._complete(parts) if target.leader else None)
        except BaseException:
            self._give_up()
            raise
        # From here on the checkpoint exists. A failure of what follows leaves it, and `latest` as it was.
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
        # With node-local storage each node's leader has written this file, and client_state and buffers may
        # differ between nodes: a node's manifest has the checksum of the file beside it.
        files[WHOLE] = parts[self._comm.rank]["files"][WHOLE]
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
        # With more copies than aligned parts, some ranks have nothing to write.
        if low < high:
            slices = by_unit.get(id(unit), [])
            found += blocks_of(unit, f"{index:04d}", slices, source.state, low, high)
    return found


def _owned(unit: Unit, comm: Comm, target: SaveTarget) -> tuple[int, int]:
    """Return the range of the flat buffer that this rank writes: its shard. Ranks that have the same elements
    write equal parts of them, or where nodes have separate folders, the first such rank of each node all.
    """
    layout = unit.layout
    shards = unit.link.shards
    whole = unit.stop - unit.start == unit.numel
    if target.host is not None:
        # A node's folder must hold all that its ranks read after a restart, so parts are not split between
        # nodes.
        return (0, unit.numel if target.leader else 0) if whole else (unit.start, unit.stop)
    low, high = layout.shard_range(unit.link.position)
    # of a pipeline's unit, other stages may have some parameters
    here = next((index for index, shape in enumerate(unit.shapes) if shape.numel()), 0)
    spec = spec_of(unit.parameters[here])
    in_axis = comm.find_shard_link(unit.parameters[here])[2]
    copies = in_axis * (unit.data.size // shards)
    if copies == 1:
        return low, high
    place = comm.rank % comm.mesh.tensor if spec is None else spec.copy_index
    # Parts start at multiples of ALIGN_NUMEL, as shards do.
    step = -(-(high - low) // (copies * ALIGN_NUMEL)) * ALIGN_NUMEL
    low += (place + in_axis * (unit.data.position // shards)) * step
    return min(low, high), min(low + step, high)


def _describe_all(source: Source, blocks: Sequence[ShardBlock], rank: int) -> dict[str, Any]:
    """List the parts of parameters that lie in the blocks, by name."""
    found: dict[str, Any] = {}
    if rank == 0:
        for unit in source.sharded.units:
            for index, slot in enumerate(unit.layout.slots):
                shape = full_shape(unit.parameters[index], unit.shapes[index])
                if not slot.numel and 0 in shape:  # in no block
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
    spec = spec_of(parameter)
    part = {} if spec is None else {"parts": [{"box": json.loads(json.dumps(spec.box)), "slices": slices}]}
    return {
        **part,
        "dtype": NAMES[unit.dtype],
        "shape": list(full_shape(parameter, unit.shapes[index])),
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
                # _merge() appends to it, and the entry belongs to a rank's part.
                merged[name] = copy.deepcopy(entry)
    # Merging lists parameters in the order of the ranks; the manifest has the model's order.
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


# -- background save --------------------------------------------------------------------------------
#
# Writes a save in a thread, from a snapshot, while training goes on.


_all: WeakSet[BackgroundSave] = WeakSet()


@atexit.register
def _fail_if_unsaved() -> None:
    """End the process with code 1 if a save has failed and the script has not been told."""
    # Exit handlers run after the interpreter has joined the threads that write, so every save has ended here.
    for saves in list(_all):
        if saves.has_unreported_failure:
            # An exception here would not change the exit code, and os._exit() flushes nothing.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)


class BackgroundSave:
    """Writes one save at a time; keeps the memory of its snapshot for the next."""

    def __init__(self, comm: Comm, link: HostLink, *, is_needed: bool = True) -> None:
        """Write by ``comm`` and ``link``. Where saves are not needed, a failure is a warning, said once until
        one ends well.
        """
        self._comm = comm
        self._link = link
        self._is_needed = is_needed
        self._has_warned = False
        self._snapshot: Snapshot | None = None
        self._reserving: threading.Thread | None = None
        self._writing: HostChannel | None = None
        self._polling: HostChannel | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        _all.add(self)

    @property
    def has_unreported_failure(self) -> bool:
        """Tell whether a save has failed and no call has raised its error."""
        return self._thread is not None and self._error is not None

    def reserve(self, measure: Callable[[], int]) -> None:
        """Take the memory for snapshots once, beside training; ``measure`` returns its bytes."""
        if self._snapshot is not None:
            return
        self._snapshot = snapshot = Snapshot(self._link)
        try:
            nbytes = measure()
        except CheckpointError:
            return  # a save will say so

        def take() -> None:
            with suppress(OSError, MemoryError):  # then the save itself will say so
                snapshot.reserve(nbytes)

        # A daemon: memory for later saves is no reason to keep a process that ends.
        self._reserving = make_thread(take, "zlaunch-snapshot", daemon=True)
        self._reserving.start()

    def start(self, save: Save, then: Callable[[Path], None]) -> None:
        """Copy what is to be saved and begin to write it; call ``then`` with the checkpoint's path when it is
        there. Collective. Raises CheckpointError on every rank.
        """
        self._snapshot = self._snapshot or Snapshot(self._link)
        if self._reserving is not None:
            # Both would append segments to the snapshot.
            self._reserving.join()
        if self._writing is None:
            self._writing = HostChannel(self._comm)
            # Two channels: the thread that writes and the main thread exchange at the same time, in another
            # order on each rank, and one group pairs messages by their order.
            self._polling = HostChannel(self._comm)
        try:
            save.begin(self._snapshot)
        except CheckpointError as error:
            if self._is_needed:
                raise
            self._warn(error)
            return
        # Not a daemon: the interpreter waits for it, so a script that ends right after save_checkpoint()
        # still has its checkpoint.
        self._thread = make_thread(partial(self._finish, save, self._writing, then), "zlaunch-checkpoint")
        self._thread.start()

    def _finish(self, save: Save, channel: HostChannel, then: Callable[[Path], None]) -> None:
        try:
            then(save.finish(channel.exchange))
            self._has_warned = False
        # Also what is not a CheckpointError: the main thread has to hear of it from poll(), and a thread's
        # exception reaches nobody.
        except BaseException as error:
            if not self._is_needed and isinstance(error, CheckpointError):
                self._warn(error)
                return
            self._error = error
            if self._comm.rank == 0:
                fail(f"the checkpoint was not saved: {error}")

    def _warn(self, error: CheckpointError) -> None:
        if self._comm.rank == 0 and not self._has_warned:
            warn(f"in-memory snapshot failed, training continues: {error}")
        self._has_warned = True

    def poll(self) -> None:
        """Raise, on all ranks in one step, what the save failed with. Collective while there is one."""
        if self._thread is None or self._polling is None:
            return
        # Ranks end their threads at different times. The exchange makes all of them raise a failure, or
        # forget the save, at the same step.
        running, failed = self._polling.any(self._thread.is_alive(), self._error is not None)
        if failed or not running:
            self.wait()

    def wait(self) -> None:
        """Return when the save has ended. Raises what it failed with."""
        if self._thread is None:
            return
        self._thread.join()
        # Cleared before the error is raised, so that it is raised once and the next save can start.
        self._thread = None
        error = self._error
        self._error = None
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait, and give the memory for snapshots back. Raises as :meth:`wait`."""
        try:
            self.wait()
        finally:
            if self._reserving is not None:
                self._reserving.join()
            if self._snapshot is not None:
                self._snapshot.close()
                self._snapshot = None
            self._link.close()
