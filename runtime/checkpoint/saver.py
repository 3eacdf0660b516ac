"""An engine's saves: one at a time, at once or beside training."""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch

from ..comm.pending import HostChannel
from ..environment import read_environment
from ..offload.manager import Offload
from ..offload.transfer import HostLink
from ..optim.sharded_optimizer import ShardedOptimizer
from ..zero.hooks import ShardedModel
from . import rng_state
from .all_or_none import agree
from .format.commit import Target, absolute, check_tag, new_owner
from .format.jsonable import encode
from .format.tensor_file import CheckpointError
from .save import Save, Source
from .snapshot import Snapshot

_all: WeakSet[Saver] = WeakSet()


@atexit.register
def _fail_if_unsaved() -> None:
    """A script that ends before it can be told of a failed save has not succeeded."""
    for saver in list(_all):
        if saver.has_unreported_failure:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)


class Saver:
    """Saves one engine's state."""

    def __init__(
        self,
        sharded: ShardedModel,
        shard_step: ShardedOptimizer | None,
        offload: Offload | None,
        *,
        asynchronous: bool,
        node_local: bool,
        keep_last: int | None,
        tag_validation: str = "Warn",
    ) -> None:
        """``tag_validation``: of tags that differ between ranks, "Warn" and "Ignore" take rank 0's; "Fail" is
        an error.
        """
        self._sharded, self._shard_step = sharded, shard_step
        self._tag_validation = tag_validation
        self._offload, self._comm = offload, sharded.comm
        self._asynchronous, self._node_local, self._keep_last = asynchronous, node_local, keep_last
        self._link = HostLink(self._comm.device, pin=self._comm.device.type == "cuda")
        self._snapshot: Snapshot | None = None
        self._reserving: threading.Thread | None = None
        self._writing: HostChannel | None = None
        self._polling: HostChannel | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.folder: Path | None = None
        """Where was last saved to, or resumed from."""
        _all.add(self)

    @property
    def has_unreported_failure(self) -> bool:
        """A save in the background has failed and nobody has been told."""
        return self._thread is not None and self._error is not None

    def prepare(self) -> None:
        """After the first step, when all state is there: take the memory for snapshots, beside training."""
        if not self._asynchronous or self._snapshot is not None:
            return
        if self._shard_step is not None:
            self._shard_step.wait()
        self._snapshot = snapshot = Snapshot(self._link)
        try:
            nbytes = Save.resident_bytes(*self._describe(Path(), "", dict, None, False, False, ""))
        except CheckpointError:
            return  # a save will say so

        def reserve() -> None:
            self._use_device()
            with suppress(OSError, MemoryError):  # then the save itself will say so
                snapshot.reserve(nbytes)

        self._reserving = threading.Thread(target=reserve, name="zlaunch-snapshot", daemon=True)
        self._reserving.start()

    def save(
        self,
        folder: str | os.PathLike[str],
        tag: str,
        facts: Callable[[], Mapping[str, Any]],
        client_state: Any,
        *,
        save_latest: bool,
        exclude_frozen: bool,
        at_once: bool = False,
        then: Any = None,
    ) -> None:
        """Save under ``folder/tag``, with rank 0's tag; in the background where that is configured, unless
        ``at_once``. ``then`` is called with the checkpoint's path when it is there. Collective. Raises
        CheckpointError, the same on every rank.
        """
        self.wait()
        folder = absolute(folder)
        comm = self._comm
        owner, tag = self._check_places(folder, tag)
        source, target = agree(
            comm.exchange,
            comm.rank,
            lambda: self._describe(folder, tag, facts, client_state, save_latest, exclude_frozen, owner),
            own=True,
        )
        save = Save(self._without_repetition(source), target, self._link)
        self.folder = folder
        if at_once or not self._asynchronous:
            save.begin(None)
            path = save.finish(comm.exchange)
            if then is not None:
                then(path)
            return
        self._snapshot = self._snapshot or Snapshot(self._link)
        if self._reserving is not None:
            self._reserving.join()
        if self._writing is None:
            self._writing, self._polling = comm.host_channel(), comm.host_channel()
        save.begin(self._snapshot)
        self._thread = threading.Thread(
            target=self._finish, args=(save, self._writing, then), name="zlaunch-checkpoint"
        )
        self._thread.start()

    def _use_device(self) -> None:
        """Choose this rank's GPU in a thread of its own."""
        if self._comm.device.type == "cuda":
            torch.cuda.set_device(self._comm.device)

    def _finish(self, save: Save, channel: HostChannel, then: Any) -> None:
        try:
            self._use_device()
            path = save.finish(channel.exchange)
            if then is not None:
                then(path)
        except BaseException as error:
            self._error = error
            if self._comm.rank == 0:
                print(f"zlaunch: the checkpoint was not saved: {error}", flush=True)

    def _check_places(self, folder: Path, tag: str) -> tuple[str, str]:
        """Return who rank 0 is, and its tag. Raises CheckpointError if the ranks do not mean the same."""
        places = self._comm.exchange((str(folder), tag, new_owner()))
        for rank, (other, _, _) in enumerate(places):
            if other != places[0][0] and not self._node_local:
                raise CheckpointError(
                    f"rank {rank} saves to {other} and rank 0 to {places[0][0]}: every rank has to give the "
                    'same folder, which all see (or set "use_node_local_storage")'
                )
        tag = places[0][1]
        self._check_tags([str(given) for _, given, _ in places])
        check_tag(tag)
        return str(places[0][2]), tag

    def _check_tags(self, tags: list[str]) -> None:
        """Warn of different tags, or raise CheckpointError, as ``tag_validation`` says."""
        others = [rank for rank, tag in enumerate(tags) if tag != tags[0]]
        if not others or self._tag_validation == "Ignore":
            return
        said = ", ".join(f"rank {rank} under the tag {tags[rank]!r}" for rank in [0, *others[:3]])
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        text = f"save_checkpoint: {said}{more}: every rank has to give the same"
        if self._tag_validation == "Fail":
            raise CheckpointError(f'{text} (checkpoint.tag_validation is "Fail")')
        if self._comm.rank == 0:
            print(f"zlaunch: warning: {text}; all are saved under {tags[0]!r}, rank 0's", flush=True)

    def _describe(
        self,
        folder: Path,
        tag: str,
        facts: Callable[[], Mapping[str, Any]],
        client_state: Any,
        save_latest: bool,
        exclude_frozen: bool,
        owner: str,
    ) -> tuple[Source, Target]:
        rank = self._comm.rank
        if self._shard_step is not None:
            self._shard_step.wait()
        tensors: dict[str, torch.Tensor] = {}
        rank_tensors: dict[str, torch.Tensor] = {}
        entries = {name: encode(value, tensors, name) for name, value in facts().items()}
        if client_state is not None and not isinstance(client_state, Mapping):
            raise CheckpointError(f"client_state is a {type(client_state).__name__}: it has to be a dict")
        entries["client_state"] = encode(client_state or {}, tensors, "client_state")
        own = encode(client_state or {}, rank_tensors, "client_state")
        if self._asynchronous:  # the caller may change them while they are written
            rank_tensors = {name: value.detach().cpu().clone() for name, value in rank_tensors.items()}
        random = encode(rng_state.capture(self._comm.device), rank_tensors, "random")
        optimizer = self._shard_step.optimizer if self._shard_step is not None else None
        source = Source(
            sharded=self._sharded,
            slices=self._shard_step.slices if self._shard_step is not None else [],
            state=optimizer.state if optimizer is not None else {},
            optimizer=type(optimizer).__name__,
            facts=entries,
            tensors=tensors,
            rank_facts={"random": random, "client_state": own},
            rank_tensors=rank_tensors,
        )
        target = Target(
            folder=folder,
            tag=tag,
            exclude_frozen=exclude_frozen,
            save_latest=save_latest,
            keep_last=self._keep_last,
            owner=owner,
            leader=read_environment().local_rank == 0 if self._node_local else rank == 0,
            host=socket.gethostname() if self._node_local else None,
        )
        return source, target

    def _without_repetition(self, source: Source) -> Source:
        """A client_state that is rank 0's on this rank, too, is kept once. Collective."""
        own = {name: t for name, t in source.rank_tensors.items() if name.startswith("client_state.")}
        digest = hashlib.sha256(json.dumps(source.rank_facts["client_state"]).encode())
        for tensor in own.values():
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        if digest.hexdigest() != self._comm.exchange(digest.hexdigest())[0]:
            return source
        rest = {name: tensor for name, tensor in source.rank_tensors.items() if name not in own}
        return replace(source, rank_facts={"random": source.rank_facts["random"]}, rank_tensors=rest)

    def poll(self) -> None:
        """Raises, on every rank in the same step, what a save in the background failed with. Collective while
        there is one.
        """
        if self._thread is None or self._polling is None:
            return
        running, failed = self._polling.any(self._thread.is_alive(), self._error is not None)
        if failed or not running:
            self.wait()

    def wait(self) -> None:
        """Return when the save in the background has ended. Raises what it failed with."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        error, self._error = self._error, None
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
