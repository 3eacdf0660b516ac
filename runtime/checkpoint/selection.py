"""Chooses, equally on all ranks, the folder and tag of a save and the checkpoint of a load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from ..comm.collectives import Comm
from ..errors import RankMismatchError
from ..log import warn
from .all_or_none import all_or_none
from .format.commit import check_tag, new_owner
from .format.manifest import Checkpoint, advice, candidates, find, verified
from .format.tensor_file import CheckpointError

T = TypeVar("T")


def choose_target(
    comm: Comm, folder: Path, tag: str, *, node_local: bool, validation: str
) -> tuple[str, str]:
    """Check that all ranks save to one folder; return rank 0's save id and tag.

    Of tags that differ, the ``validation`` "Warn" and "Ignore" take rank 0's; "Fail" is an error. Raises
    CheckpointError on every rank.
    """
    places = comm.exchange((str(folder), tag, new_owner()))
    for rank, (other, _, _) in enumerate(places):
        if other != places[0][0] and not node_local:
            raise CheckpointError(
                f"rank {rank} saves to {other}, but rank 0 to {places[0][0]}: pass the same shared folder on "
                'every rank, or set "use_node_local_storage"'
            )
    _check_tags([str(given) for _, given, _ in places], validation, is_first=comm.rank == 0)
    tag = places[0][1]
    check_tag(tag)
    return str(places[0][2]), tag


def _check_tags(tags: Sequence[str], validation: str, *, is_first: bool) -> None:
    others = [rank for rank, tag in enumerate(tags) if tag != tags[0]]
    if not others or validation == "Ignore":
        return
    said = ", ".join(f"rank {rank} passes tag {tags[rank]!r}" for rank in [0, *others[:3]])
    more = f" and {len(others) - 3} more" if len(others) > 3 else ""
    text = f"save_checkpoint: {said}{more}: pass the same tag on every rank"
    if validation == "Fail":
        raise CheckpointError(f'{text} (checkpoint.tag_validation is "Fail")')
    if is_first:
        warn(f"{text}; saving under rank 0's tag {tags[0]!r}")


def open_chosen(
    comm: Comm, folder: Path, tag: str | None, *, node_local: bool, missing_ok: bool
) -> Checkpoint | None:
    """Open one checkpoint on every rank: the named one, for "auto" the newest whole one, for None what
    ``latest`` names. Returns None if there is none. Collective. Raises RankMismatchError, and CheckpointError
    also for a folder that does not exist, unless ``missing_ok``.
    """
    tags = comm.exchange(tag)
    if any(other != tags[0] for other in tags):
        rank = next(rank for rank, other in enumerate(tags) if other != tags[0])
        raise RankMismatchError(
            f"load_checkpoint: rank {rank} passes tag {tags[rank]!r}, but rank 0 {tags[0]!r}: pass the same "
            "tag on every rank"
        )
    leads = comm.rank == 0
    is_there = all_or_none(
        comm.exchange, comm.rank, lambda: not leads or _check_exists(folder, missing_ok=missing_ok)
    )[0]
    if not is_there:
        return None
    if tag == "auto":
        found = _newest_whole(comm, folder, node_local=node_local)
    else:
        found = all_or_none(comm.exchange, comm.rank, lambda: find(folder, tag) if leads else None)[0]
    if found is None:
        return None
    path = folder if found == folder else folder / found.name
    opened: Checkpoint = all_or_none(
        comm.exchange, comm.rank, lambda: with_advice(path, lambda: Checkpoint(path)), own=True
    )
    saves = comm.exchange(opened.manifest.get("save_id"))
    if any(save != saves[0] for save in saves):
        other = next(rank for rank, save in enumerate(saves) if save != saves[0])
        raise CheckpointError(
            f"{path}: rank {other} and rank 0 have files of different saves under this tag: load another "
            'tag, or tag="auto"'
        )
    return opened


def _check_exists(folder: Path, *, missing_ok: bool) -> bool:
    """Tell whether the folder exists. Raises CheckpointError if it does not, unless ``missing_ok``."""
    if not folder.exists() and not missing_ok:
        raise CheckpointError(
            f"{folder}: no such folder: correct the path. To start without a checkpoint, use "
            "load_checkpoint(zlaunch.resume_dir(folder)) or missing_ok=True"
        )
    if folder.is_file():
        raise CheckpointError(
            f"{folder}: is a file, expected the folder passed to save_checkpoint: pass that folder, and the "
            "name of a checkpoint in it as tag"
        )
    return folder.exists()


def _newest_whole(comm: Comm, folder: Path, *, node_local: bool) -> Path | None:
    """Find the newest checkpoint that is whole wherever it is. Collective."""
    names = all_or_none(comm.exchange, comm.rank, lambda: [path.name for path in candidates(folder)])[0]
    first = ""
    for name in names:

        def verify(path: Path = folder / name) -> object:
            if comm.rank and not node_local:
                return None
            return verified(path)[0].get("save_id")

        try:
            saves = all_or_none(comm.exchange, comm.rank, verify)
        except CheckpointError as error:
            first = first or str(error)
            if comm.rank == 0:
                warn(str(error))
            continue
        if not node_local or all(save == saves[0] for save in saves):
            return folder / str(name)
    if names:
        raise CheckpointError(f"{folder}: none of its {len(names)} checkpoints is complete: {first}")
    return None


def with_advice(path: Path, action: Callable[[], T]) -> T:
    """Call ``action``; add to its CheckpointError what could be loaded instead of the one at ``path``."""
    try:
        return action()
    except CheckpointError as error:
        raise CheckpointError(f"{error}{advice(path.parent, but=path.name)}") from None
