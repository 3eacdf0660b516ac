"""Takes snapshots of an engine's state while it trains, and goes on from the newest after a restart."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..config import Effective
from ..config.schema import CheckpointSection, InMemorySection
from ..environment import read_environment
from ..log import say, warn
from ..offload.transfer import HostLink
from ..report import announce
from ..trust import make_folder
from .agree import HostChannel, all_or_none
from .checkpointer import Checkpointer
from .format.commit import absolute
from .format.manifest import MANIFEST, candidates, find, read_manifest
from .format.tensor_file import CheckpointError
from .save import rank_file

# -- transfers --------------------------------------------------------------------------------------
#
# Sends files of a snapshot from node to node.


_PIECE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Places:
    """Says which ranks keep their snapshots in one place: those of a node, in general."""

    ranks: Mapping[str, Sequence[int]]
    """Ranks by folder, both in the order of the ranks."""

    @staticmethod
    def of(folders: Sequence[str]) -> Places:
        """Group ranks by their folders, which are given in the order of the ranks."""
        found: dict[str, list[int]] = {}
        for rank, folder in enumerate(folders):
            found.setdefault(folder, []).append(rank)
        return Places(found)

    def leader(self, folder: str) -> int:
        """Return the first rank of a place."""
        return self.ranks[folder][0]

    def keepers(self, copies: int) -> Iterator[tuple[int, int]]:
        """Yield pairs of ranks: the second keeps a copy of the first one's file. Each place gives its files
        to the ``copies - 1`` places behind it, in a ring.
        """
        places = list(self.ranks.values())
        for away in range(1, min(copies, len(places))):
            for index, own in enumerate(places):
                others = places[(index + away) % len(places)]
                for position, rank in enumerate(own):
                    yield rank, others[position % len(others)]


def send_files(
    channel: HostChannel,
    rank: int,
    transfers: Sequence[tuple[int, int, str]],
    path_of: Callable[[str], Path],
) -> None:
    """Send files between ranks: ``transfers`` are equal on all of them, ``(from, to, name)``. A file is there
    under its name once it is whole. Collective. Raises CheckpointError on every rank where one has no room.
    """
    # A receiver has to make its file in full size before it is sent, and only the sender knows the size.
    own = {name: path_of(name).stat().st_size for source, _, name in transfers if source == rank}
    sizes: dict[tuple[int, str], int] = {}
    for source, found in enumerate(channel.exchange(own)):
        sizes |= {(source, name): size for name, size in found.items()}
    coming = {name: path_of(name).with_name(f".{name}.coming") for _, to, name in transfers if to == rank}

    def make_room() -> None:
        for source, target, name in transfers:
            if target == rank:
                coming[name].parent.mkdir(parents=True, exist_ok=True)
                _make_room(coming[name], sizes[source, name])

    all_or_none(channel.exchange, rank, make_room)  # nobody sends to a rank that has no room
    # All ranks walk `transfers` in one order: gloo pairs the messages of two ranks by their order.
    works = []
    for source, target, name in transfers:
        size = sizes[source, name]
        if rank == source:
            works += [channel.send(piece, target) for piece in _pieces(path_of(name), size, writes=False)]
        elif rank == target:
            works += [channel.receive(piece, source) for piece in _pieces(coming[name], size, writes=True)]
    for work in works:
        work.wait()
    for name, temporary in coming.items():
        # Only when all pieces are there: _look() counts a file that has its name as present.
        os.replace(temporary, path_of(name))
    # After this, every copy of every rank is whole: the caller may delete the snapshot before.
    channel.exchange(None)


def _make_room(path: Path, size: int) -> None:
    """Make a file of this size, whose memory is taken: writing to a map of it must not fail."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        if size:
            # A write to a map without memory behind it is a SIGBUS, which ends the process, not an OSError.
            os.posix_fallocate(fd, 0, size)
    finally:
        os.close(fd)


def _pieces(path: Path, size: int, *, writes: bool) -> list[Tensor]:
    """Return a file's bytes as tensors that lie on its memory."""
    if not size:
        return []
    whole = torch.from_file(str(path), shared=writes, size=size, dtype=torch.uint8)
    return list(torch.split(whole, _PIECE_BYTES))


# -- snapshots --------------------------------------------------------------------------------------


_numbers = itertools.count()


class _Seen(NamedTuple):
    """Describes a snapshot as a node has it."""

    tag: str
    save_id: str
    moment: float
    world_size: int
    needed: tuple[str, ...]
    present: frozenset[str]


class Snapshots(Checkpointer):
    """Keeps the newest state in the nodes' memory: a checkpoint in a folder that is no disk's, which
    zlaunch's agent on each node removes when the run ends.
    """

    def __init__(self, *parts: Any, section: InMemorySection, folder: Path, **named: Any) -> None:
        """Prepare to keep snapshots below ``folder``. Takes a Checkpointer's arguments, too."""
        options = CheckpointSection(asynchronous=True, use_node_local_storage=True)
        super().__init__(*parts, options=options, is_needed=False, **named)
        self._every = int(section.every)
        self._copies = int(section.copies)
        self._memory = folder / f"engine_{next(_numbers)}"
        self._channel: HostChannel | None = None
        self._may_go_on = True
        """Tells whether the next load is that of a run that begins."""
        self.damage = ""
        """Why the snapshot to go on from could not be loaded, empty if it could."""
        self._taken = 0
        """The step of the last snapshot."""

    # -- while it trains

    def after_step(
        self, prepare_save: Callable[[], None], client_state: Callable[[], Mapping[str, Any]] | None
    ) -> None:
        """Begin to take a snapshot if one is due. Collective. Raises CheckpointError."""
        # A run that has made a step is not at its beginning; a later load means what the script names.
        self._may_go_on = False
        self.poll()
        if client_state is None:  # said at the first step, not only at the first snapshot
            raise CheckpointError(
                "checkpoint.in_memory needs the script's state at every snapshot: before the first step, set "
                "engine.client_state to a function that returns it ({} for none). Under the Hugging Face "
                "Trainer, remove the key: the Trainer loads no snapshots, and saves with save_steps"
            )
        steps = self._run.global_steps
        if steps % self._every or steps == self._taken:
            return
        self._taken = steps
        prepare_save()
        comm = self._comm
        state = all_or_none(comm.exchange, comm.rank, client_state, own=True)
        # Collective the first time: here, where all ranks are at the same place. _tell() runs in a thread.
        self._places()
        self.save(self._memory, None, state)

    def _tell(self, path: Path, steps: int, is_latest: bool) -> None:
        """Give copies to other nodes, and drop the snapshots before this one. Collective, in a thread."""
        channel, places = self._places()
        rank = self._comm.rank
        # Only the files of ranks. Each node's leader has written the others itself.
        keepers = [(source, to, rank_file(source)) for source, to in places.keepers(self._copies)]
        leads = rank == places.leader(str(self._memory))
        if keepers:
            try:
                send_files(channel, rank, keepers, lambda name: path / name)
            except CheckpointError:  # the snapshot before stays, which is whole
                if leads:
                    shutil.rmtree(path, ignore_errors=True)
                raise
        if leads:
            # The former snapshot goes last. Until send_files() has ended on all ranks, it is the only one
            # that survives the loss of a node.
            for other in path.parent.iterdir():
                if other.is_dir() and other != path:
                    shutil.rmtree(other, ignore_errors=True)
        if rank == 0:
            announce("snapshot", step=steps)

    def _leads_node(self) -> bool:
        return self._comm.rank == self._places()[1].leader(str(self._memory))

    def _places(self) -> tuple[HostChannel, Places]:
        """Return who keeps snapshots where, and the way between. Collective the first time."""
        if self._channel is None:
            self._channel = HostChannel(self._comm)
            self._found = Places.of(self._channel.exchange(str(self._memory)))
            if self._copies > len(self._found.ranks) > 1 and self._comm.rank == 0:
                nodes = len(self._found.ranks)
                warn(f"checkpoint.in_memory.copies is {self._copies}, but the run has {nodes} nodes")
        return self._channel, self._found

    # -- after a restart

    def go_on(self, folder: Path | None, *, strict: bool) -> tuple[str | None, dict[str, Any]] | None:
        """Load the newest snapshot, if this is the first load of a run that was restarted and nothing newer
        is in ``folder``; else return None. Collective. Raises CheckpointError.
        """
        if not self._may_go_on:
            return None
        self._may_go_on = False
        comm = self._comm
        seen = comm.exchange((str(self._memory), self._look()))
        if not any(found for _, found in seen):
            return None
        leads = comm.rank == 0
        on_disk = all_or_none(comm.exchange, comm.rank, lambda: _moment(folder) if leads else 0.0)[0]
        places = Places.of([place for place, _ in seen])
        by_place = dict(seen)
        chosen = _choose(list(by_place.values()))
        # Both are times of the state, not of the writing, so a snapshot that ended late does not win over a
        # newer checkpoint.
        if chosen is None or chosen.moment < on_disk:
            if leads:
                why = "some shards are lost" if chosen is None else "the disk has a newer checkpoint"
                say(f"ignoring the in-memory snapshot: {why}")
            return None
        channel, _ = self._places()
        transfers = _fetches(chosen, places, by_place, comm.world_size)
        target = self._memory / chosen.tag
        # A node may have another save under this tag (from before an earlier restart). Its files must not be
        # mixed with those that are fetched.
        stale = any(seen.tag == chosen.tag and seen.save_id != chosen.save_id for seen in self._look())
        if stale and comm.rank == places.leader(str(self._memory)):
            shutil.rmtree(target, ignore_errors=True)
        channel.exchange(None)
        send_files(channel, comm.rank, transfers, lambda name: target / name)
        parts = {"with_optimizer": True, "with_schedule": True, "with_run": True}
        try:
            return self.load(self._memory, chosen.tag, strict=strict, **parts)
        except CheckpointError as error:
            self.damage = str(error)
        if leads:
            warn(f"ignoring the in-memory snapshot: {self.damage}")
        # Otherwise the next attempt would choose it again.
        if comm.rank == places.leader(str(self._memory)):
            shutil.rmtree(target, ignore_errors=True)
        return None

    def _look(self) -> list[_Seen]:
        """List this node's snapshots, whole or not."""
        found = []
        for path in candidates(self._memory):
            with suppress(CheckpointError, OSError, KeyError):
                manifest = read_manifest(path)
                found.append(
                    _Seen(
                        path.name,
                        manifest["save_id"],
                        manifest["time"],
                        manifest["world_size"],
                        (MANIFEST, *manifest["files"]),
                        frozenset(entry.name for entry in path.iterdir()),
                    )
                )
        return found


def _moment(folder: Path | None) -> float:
    """Return when the checkpoint that a folder's ``latest`` names was written; 0 if there is none."""
    with suppress(CheckpointError):
        path = find(folder) if folder is not None else None
        return float(read_manifest(path)["time"]) if path is not None else 0.0
    return 0.0


def _choose(places: list[list[_Seen]]) -> _Seen | None:
    """Return the newest snapshot all of whose files are somewhere."""
    everywhere = sorted((seen for place in places for seen in place), key=lambda seen: seen.moment)
    for seen in reversed(everywhere):
        same = [other for other in everywhere if other.save_id == seen.save_id]
        # A file may be on any node: after the loss of a node, its files are those that the next node keeps.
        if set().union(*(other.present for other in same)).issuperset(seen.needed):
            return seen
    return None


def _fetches(
    chosen: _Seen, places: Places, by_place: Mapping[str, list[_Seen]], world_size: int
) -> list[tuple[int, int, str]]:
    """List what has to be sent: from leader to leader of a place, a file's name. A place needs the files of
    its own ranks, or all where the number of ranks has changed.
    """
    present = {
        place: next((seen.present for seen in found if seen.save_id == chosen.save_id), frozenset())
        for place, found in by_place.items()
    }
    everyones = {name for name in chosen.needed if not name.startswith("rank_")}
    found = []
    for place, ranks in places.ranks.items():
        same = chosen.world_size == world_size
        needed = everyones | {rank_file(rank) for rank in ranks} if same else set(chosen.needed)
        for name in sorted(needed - present[place]):
            source = next(other for other, files in present.items() if name in files)
            found.append((places.leader(source), places.leader(place), name))
    return found


class CheckpointerWithSnapshots(Checkpointer):
    """Saves and loads as a Checkpointer, and keeps snapshots, too."""

    def __init__(self, *parts: Any, snapshots: Snapshots, **named: Any) -> None:
        """Take a Checkpointer's arguments, and the snapshots."""
        super().__init__(*parts, **named)
        self._snapshots = snapshots

    def close(self) -> None:
        try:
            self._snapshots.close()
        finally:
            super().close()

    def prepare(self) -> None:
        super().prepare()
        self._snapshots.prepare()

    def after_step(
        self, prepare_save: Callable[[], None], client_state: Callable[[], Mapping[str, Any]] | None
    ) -> None:
        """Take a snapshot if one is due. Collective. Raises CheckpointError."""
        super().after_step(prepare_save, client_state)
        self._snapshots.after_step(prepare_save, client_state)

    def load(
        self,
        folder: str | os.PathLike[str] | None,
        tag: str | None,
        *,
        strict: bool,
        missing_ok: bool = False,
        **parts: bool,
    ) -> tuple[str | None, dict[str, Any]]:
        """Load a checkpoint, or in a run that was restarted a newer snapshot. Collective. Raises
        CheckpointError on every rank.
        """
        # A load of a named tag, or of weights alone, asks for that checkpoint and not for the newest state.
        if tag is None and all(parts.values()):
            path = absolute(folder) if folder is not None else None
            found = self._snapshots.go_on(path, strict=strict)
            if found is not None:
                self._folder = path
                return found
        loaded = super().load(folder, tag, strict=strict, missing_ok=missing_ok, **parts)
        if loaded[0] is None and self._snapshots.damage:  # some values are the snapshot's by now
            raise CheckpointError(f"{self._snapshots.damage}; the next restart does not use this snapshot")
        return loaded


def make_checkpointer(
    *parts: Any, effective: Effective, make_link: Callable[[], HostLink], **named: Any
) -> Checkpointer:
    """Make an engine's Checkpointer, with snapshots if the config asks for them and something outlives the
    workers.
    """
    section = effective.config.checkpoint.in_memory
    folder = read_environment().memory_dir
    named["effective"] = effective
    if section is not None and folder is not None:
        make_folder(Path(folder))
        snapshots = Snapshots(*parts, section=section, folder=Path(folder), link=make_link(), **named)
        return CheckpointerWithSnapshots(*parts, snapshots=snapshots, link=make_link(), **named)
    if section is not None and read_environment().rank == 0:
        warn(
            "checkpoint.in_memory has no effect without the zlaunch launcher, whose agents hold the snapshots"
        )
    return Checkpointer(*parts, link=make_link(), **named)
