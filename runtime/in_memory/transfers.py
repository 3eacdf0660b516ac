"""Sends files of a snapshot from node to node."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..checkpoint.all_or_none import all_or_none
from ..checkpoint.host_channel import HostChannel

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
        os.replace(temporary, path_of(name))
    channel.exchange(None)


def _make_room(path: Path, size: int) -> None:
    """Make a file of this size, whose memory is taken: writing to a map of it must not fail."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        if size:
            os.posix_fallocate(fd, 0, size)
    finally:
        os.close(fd)


def _pieces(path: Path, size: int, *, writes: bool) -> list[Tensor]:
    """Return a file's bytes as tensors that lie on its memory."""
    if not size:
        return []
    whole = torch.from_file(str(path), shared=writes, size=size, dtype=torch.uint8)
    return list(torch.split(whole, _PIECE_BYTES))
