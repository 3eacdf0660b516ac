"""List waits of the runtime, each of which can be left out, to see that it is missed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

Change = tuple[Any, str, Any]
"""An object, the name of an attribute, and what it is replaced by."""


def _nothing(*arguments: Any, **more: Any) -> None:
    return None


def _downloads_do_not_wait_for_what_made_the_values() -> list[Change]:
    import torch

    from zlaunch.runtime.offload.transfer import HostEvent, HostLink

    def download(self: Any, source: Any, target: Any) -> Any:
        with torch.cuda.stream(self._down):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._down)
        return HostEvent(event)

    return [(HostLink, "download", download)]


def _uploads_do_not_wait() -> list[Change]:
    from zlaunch.runtime.offload.transfer import HostLink

    upload = HostLink.upload
    return [(HostLink, "upload", lambda self, source, target, *after: upload(self, source, target))]


def _parameters_are_uploaded_into_memory_that_is_in_use() -> list[Change]:
    return _uploads_do_not_wait()


def _parameters_are_read_from_disk_into_memory_that_is_in_use() -> list[Change]:
    return _uploads_do_not_wait()


def _what_is_uploaded_is_used_at_once() -> list[Change]:
    from zlaunch.runtime.offload.transfer import StreamEvent

    return [(StreamEvent, "wait", _nothing)]


def _gathers_do_not_wait_for_uploads() -> list[Change]:
    from contextlib import nullcontext

    from zlaunch.runtime.offload.transfer import HostLink

    return [(HostLink, "behind_uploads", lambda self: nullcontext())]


def _a_source_is_dropped_while_it_is_copied() -> list[Change]:
    import torch

    from zlaunch.runtime.offload.stores import HostStore

    deliver = HostStore.add_grad

    def no_source(self: Any, shard: Any, **how: Any) -> None:
        deliver(self, shard, **how)
        self._source = None

    return [(torch.Tensor, "record_stream", _nothing), (HostStore, "add_grad", no_source)]


def _a_checkpoint_is_loaded_into_memory_that_is_in_use() -> list[Change]:
    from zlaunch.runtime.checkpoint import shard_io

    return [(shard_io, "stream_mark", _nothing)]


def _the_step_reads_gradients_before_they_arrive() -> list[Change]:
    from zlaunch.runtime.offload.transfer import HostEvent

    return [(HostEvent, "wait", _nothing)]


def _new_values_overwrite_what_is_being_uploaded() -> list[Change]:
    from zlaunch.runtime.offload.transfer import StreamEvent

    return [(StreamEvent, "synchronize", _nothing)]


def _a_gather_does_not_wait_for_the_values_home() -> list[Change]:
    from zlaunch.runtime.comm.pending import DONE
    from zlaunch.runtime.offload.stores import HostValues

    write = HostValues.write

    def forgets(self: Any, start: int, values: Any, after: Any = None) -> Any:
        pending = write(self, start, values, after)
        self._sent = DONE
        return pending

    return [(HostValues, "write", forgets)]


def _the_next_forward_does_not_wait_for_the_step() -> list[Change]:
    from zlaunch.runtime.offload import step

    return [(step._Arrival, "wait", _nothing)]


def _a_snapshot_is_written_before_it_is_taken() -> list[Change]:
    from zlaunch.runtime.checkpoint.save import Snapshot

    return [(Snapshot, "arrived", _nothing)]


def _a_step_changes_what_a_snapshot_is_taken_of() -> list[Change]:
    from zlaunch.runtime.offload.transfer import HostLink

    return [(HostLink, "after_downloads", _nothing)]


def _a_file_is_written_before_its_values_arrive() -> list[Change]:
    from zlaunch.runtime.offload.transfer import HostEvent

    return [(HostEvent, "wait", _nothing)]


def _a_buffer_is_lent_again_while_it_is_read() -> list[Change]:
    from zlaunch.runtime.offload.transfer import HostLink

    return [(HostLink, "give_back", lambda self, buffer: self.pool.give_back(buffer))]


def _memory_is_released_under_a_copy() -> list[Change]:
    import torch

    return [(torch.cuda, "synchronize", _nothing)]


def _a_gradient_is_written_to_disk_before_it_arrives() -> list[Change]:
    from zlaunch.runtime.offload.disk import DiskEngine

    write = DiskEngine.write
    return [
        (
            DiskEngine,
            "write",
            lambda self, file, buffer, offset=0, after=None: write(self, file, buffer, offset),
        )
    ]


def _offloaded_inputs_are_used_before_they_are_back() -> list[Change]:
    from zlaunch.runtime.activation.offload import OffloadedTensor

    return [(OffloadedTensor, "_await_copy", _nothing)]


def _collectives_are_not_waited_for() -> list[Change]:
    from zlaunch.runtime.comm.pending import Work

    def wait(self: Any) -> None:
        self.work, self._keep = None, ()

    return [(Work, "wait", wait)]


def _a_log_is_all_that_waits_for_collectives() -> list[Change]:
    return _collectives_are_not_waited_for()


def _hops_do_not_wait_for_what_they_send() -> list[Change]:
    from zlaunch.runtime.comm import two_hops

    return [(two_hops, "follow", _nothing)]


def _the_second_hop_is_not_waited_for() -> list[Change]:
    from zlaunch.runtime.comm.two_hops import OnStream

    return [(OnStream, "wait", _nothing)]


def _the_second_hop_does_not_wait_for_the_first() -> list[Change]:
    from zlaunch.runtime.comm.link import RankLink
    from zlaunch.runtime.comm.pending import DONE

    reduce = RankLink.reduce_scatter

    def reduce_scatter(self: Any, *arguments: Any) -> Any:
        pending = reduce(self, *arguments)
        return DONE if self.reduce_group is not None and self.size == 2 else pending

    return [(RankLink, "reduce_scatter", reduce_scatter)]


def _nothing_waits_on(name: str) -> list[Change]:
    from zlaunch.runtime.comm.axis import Axis
    from zlaunch.runtime.comm.pending import DONE

    begun = Axis._begun

    def changed(self: Axis, *arguments: Any) -> Any:
        pending = begun(self, *arguments)
        return DONE if self.name == name else pending

    return [(Axis, "_begun", changed)]


def _the_sum_of_a_layer_is_not_waited_for() -> list[Change]:
    return _nothing_waits_on("tensor")


def _the_sum_of_an_inputs_gradient_is_not_waited_for() -> list[Change]:
    from zlaunch.runtime.comm.axis import Axis
    from zlaunch.runtime.comm.pending import DONE
    from zlaunch.runtime.zero import placeholder

    begin = Axis.begin_sum

    def begin_sum(self: Axis, *arguments: Any) -> Any:
        pending = begin(self, *arguments)
        return DONE if placeholder.in_backward() else pending

    return [(Axis, "begin_sum", begin_sum)]


def _tokens_are_computed_before_they_arrive() -> list[Change]:
    return _nothing_waits_on("expert")


def _heads_are_computed_before_they_arrive() -> list[Change]:
    return _nothing_waits_on("sequence")


def _a_unit_is_stepped_before_its_gradient_is_there() -> list[Change]:
    from zlaunch.runtime.zero.reduce import GradientReducer

    retire = GradientReducer._retire

    def too_early(self: Any) -> None:
        pending = self._in_flight[0].pending
        work = getattr(pending, "before", pending)
        work.work, work._keep = None, ()
        retire(self)

    return [(GradientReducer, "_retire", too_early)]


def _signs_are_read_before_they_arrive() -> list[Change]:
    from zlaunch.runtime.optim.sign_exchange import Sent

    return [(Sent, "result", lambda self: self._got)]


def _threads_do_not_choose_their_device() -> list[Change]:
    from zlaunch.runtime import threads

    return [(threads, "use_device", _nothing)]


def _a_rank_does_not_choose_its_device() -> list[Change]:
    from zlaunch.runtime import threads
    from zlaunch.runtime.comm import process_group

    return [(threads, "use_device", _nothing), (process_group, "choose_device", _nothing)]


def _streams_are_made_on_the_first_device() -> list[Change]:
    import torch

    stream = torch.cuda.Stream

    return [(torch.cuda, "Stream", lambda device=None, **more: stream(torch.device("cuda", 0), **more))]


def _what_a_stage_receives_is_used_before_it_arrives() -> list[Change]:
    from .device import Transfer

    return [(Transfer, "wait_on_stream", lambda self: None)]


def _a_gather_fills_memory_that_is_in_use() -> list[Change]:
    from zlaunch.runtime.zero.store import SettledValues
    from zlaunch.runtime.zero.unit import Unit

    def without_memory(self: Any) -> Any:
        return SettledValues.now(self.device)

    return [(Unit, "prepare_gather", without_memory)]


def _a_gather_does_not_wait_for_the_step() -> list[Change]:
    import torch

    from zlaunch.runtime.zero.store import SettledValues

    return [(SettledValues, "behind", lambda self: torch.cuda.stream(torch.cuda.Stream()))]


def _units_are_marked_before_they_are_stepped() -> list[Change]:
    from zlaunch.runtime.optim.step import ShardedOptimizer

    describe = ShardedOptimizer._updates_here

    def all_later(self: Any, first: Any) -> Any:
        soon, rest = describe(self, first)
        return [], [*rest, *soon]

    return [(ShardedOptimizer, "_updates_here", all_later)]


def _within(function: Callable[..., Any], owner: Any, attribute: str, value: Any) -> Callable[..., Any]:
    """Return a function that runs with something else replaced, too."""

    def changed(*arguments: Any, **more: Any) -> Any:
        former = getattr(owner, attribute)
        setattr(owner, attribute, value)
        try:
            return function(*arguments, **more)
        finally:
            setattr(owner, attribute, former)

    return changed


def _elsewhere(start: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that starts a collective on a stream that waits for nothing."""
    import torch

    def started(*arguments: Any, **more: Any) -> Any:
        with torch.cuda.stream(torch.cuda.Stream()):
            return start(*arguments, **more)

    return started


def _a_download_is_marked_before_it_is_queued() -> list[Change]:
    import torch

    from zlaunch.runtime.offload.transfer import HostEvent, HostLink

    def download(self: Any, source: Any, target: Any) -> Any:
        self._down.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._down):
            event = self._down.record_event()
            target.copy_(source, non_blocking=True)
        source.record_stream(self._down)
        return HostEvent(event)

    return [(HostLink, "download", download)]


def _an_upload_is_marked_on_the_stream_of_the_computation() -> list[Change]:
    import torch

    from zlaunch.runtime.offload.transfer import HostLink, StreamEvent

    start = HostLink.upload

    def upload(self: Any, source: Any, target: Any, *after: Any) -> Any:
        start(self, source, target, *after)
        return StreamEvent(torch.cuda.current_stream(self.device).record_event())

    return [(HostLink, "upload", upload)]


def _a_sum_is_uploaded_before_it_is_home() -> list[Change]:
    from zlaunch.runtime.offload.transfer import HostLink

    upload = HostLink.upload

    def after_one(self: Any, source: Any, target: Any, *after: Any) -> Any:
        return upload(self, source, target, *after[:1])

    return [(HostLink, "upload", after_one)]


def _a_sum_is_cast_on_the_host_before_it_is_home() -> list[Change]:
    import torch

    from zlaunch.runtime.offload.stores import HostStore

    def added(self: Any, shard: Any) -> Any:
        there = torch.empty_like(self._home, dtype=torch.float64, device=shard.device)
        self._link.upload(self._home, there, self._link.mark(), self._arrival.event).wait()
        return there.to(self._accumulation_dtype).add_(shard)

    return [(HostStore, "_added", added)]


def _a_buffer_is_given_back_behind_the_computation_alone() -> list[Change]:
    import torch

    from zlaunch.runtime.offload.stores import _Reading

    release = _Reading.release

    def early(self: Any) -> None:
        with torch.cuda.stream(torch.cuda.default_stream()):
            release(self)

    return [(_Reading, "release", early)]


def _a_gradient_overwrites_one_of_a_skipped_step() -> list[Change]:
    from zlaunch.runtime.offload.stores import HostStore

    return [(HostStore, "before_gradient", _nothing)]


def _a_tile_is_read_over_values_that_are_uploaded() -> list[Change]:
    from zlaunch.runtime.offload.stores import _TileInBuffer

    def close(self: Any) -> None:
        self._store._write(self._tile, self._access, self._buffer)

    return [(_TileInBuffer, "close", close)]


def _the_last_tile_of_a_unit_is_not_waited_for() -> list[Change]:
    from zlaunch.runtime.offload.step import _Arrival

    come = _Arrival.come
    return [(_Arrival, "come", lambda self, uploads, error=None: come(self, uploads[:-1], error))]


def _only_the_first_block_waits_for_a_gradient() -> list[Change]:
    from zlaunch.runtime.offload.disk import DiskEngine

    write = DiskEngine.write

    def first_waits(self: Any, file: Any, buffer: Any, offset: int = 0, *, after: Any = None) -> Any:
        left = [after] if after is not None else []

        def once() -> None:
            for wait in left[:]:
                left.clear()
                wait()

        return write(self, file, buffer, offset, after=once)

    return [(DiskEngine, "write", first_waits)]


def _what_is_read_from_disk_is_used_at_once() -> list[Change]:
    from zlaunch.runtime.offload.disk import DiskEngine

    read = DiskEngine.read

    def over(self: Any, *arguments: Any) -> Any:
        transfer = read(self, *arguments)
        transfer._parts = ()
        return transfer

    return [(DiskEngine, "read", over)]


def _what_is_uploaded_from_pageable_memory_is_used_at_once() -> list[Change]:
    return _what_is_uploaded_is_used_at_once()


def _states_come_back_into_memory_that_is_in_use() -> list[Change]:
    from zlaunch.runtime.offload.states import StateMover
    from zlaunch.runtime.offload.transfer import HostLink

    ((_, _, upload),) = _uploads_do_not_wait()
    return [(StateMover, "reload", _within(StateMover.reload, HostLink, "upload", upload))]


def _states_are_used_before_they_are_back() -> list[Change]:
    from zlaunch.runtime.offload.states import StateMover
    from zlaunch.runtime.offload.transfer import StreamEvent

    return [(StateMover, "reload", _within(StateMover.reload, StreamEvent, "wait", _nothing))]


def _states_come_back_before_they_have_left() -> list[Change]:
    from zlaunch.runtime.offload.states import StateMover
    from zlaunch.runtime.offload.transfer import HostEvent

    return [(StateMover, "reload", _within(StateMover.reload, HostEvent, "wait", _nothing))]


def _a_mark_serves_two_gathers() -> list[Change]:
    from zlaunch.runtime.zero.unit import Unit

    gather = Unit.gather_from
    release = Unit._release_memory

    def keeping(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *arguments: Any) -> Any:
            settled = self.values.settled
            result = function(self, *arguments)
            self.values.settled = settled
            return result

        return call

    return [(Unit, "gather_from", keeping(gather)), (Unit, "_release_memory", keeping(release))]


def _a_touch_does_not_wait_for_a_refresh() -> list[Change]:
    from zlaunch.runtime.zero.unit import Unit

    return [(Unit, "_guard", _nothing)]


def _a_tile_is_closed_before_it_is_stepped() -> list[Change]:
    from zlaunch.runtime.zero import store

    def each_tile(work: Any, access: Any) -> Iterator[Any]:
        for kept, tile, item in work:
            opened = kept.open(tile, access)
            view = opened.wait()
            opened.close()
            yield item, opened, view

    return [(store, "_each_tile", each_tile)]


def _a_bucket_is_lent_again_while_it_is_sent() -> list[Change]:
    from zlaunch.runtime.zero.reduce import GradientReducer

    reduce = GradientReducer._reduce_transient

    def gives_back(self: Any, bucket: Any) -> Any:
        reduction = reduce(self, bucket)
        if reduction.lent is not None:
            self._pool.give_back(reduction.lent)
            reduction.lent = None
        return reduction

    return [(GradientReducer, "_reduce_transient", gives_back)]


def _a_gather_begins_before_its_part_is_cast() -> list[Change]:
    from zlaunch.runtime.comm import link
    from zlaunch.runtime.comm.pending import Work

    gather = link.RankLink.all_gather

    def all_gather(self: Any, full: Any, source: Any, label: int, note: Any, rounded: bool = False) -> Any:
        own = self.part_of(full)
        if self.size == 1 or own.data_ptr() == source.data_ptr():
            return gather(self, full, source, label, note, rounded)
        work = link.all_gather_flat(full, own, group=self.gather_group, async_op=True)
        own.copy_(source, non_blocking=True)
        return Work(work, *note, full)

    return [(link.RankLink, "all_gather", all_gather)]


def _reductions_do_not_wait_for_the_gradients() -> list[Change]:
    from zlaunch.runtime.comm import link

    return [(link, "reduce_scatter_flat", _elsewhere(link.reduce_scatter_flat))]


def _memory_of_hops_is_dropped_while_they_run() -> list[Change]:
    from zlaunch.runtime.comm.two_hops import OnStream

    start = OnStream.__init__
    return [(OnStream, "__init__", lambda self, side, hops, *keep: start(self, side, hops))]


def _packed_values_are_in_memory_of_another_stream() -> list[Change]:
    from zlaunch.runtime.comm.link import RankLink
    from zlaunch.runtime.comm.two_hops import PackedLink

    return [(PackedLink, "gathers_on_any_stream", RankLink.gathers_on_any_stream)]


def _what_follows_a_collective_comes_before_it() -> list[Change]:
    from zlaunch.runtime.comm.pending import DONE, _Then

    def wait(self: Any) -> None:
        function = self._function
        before = self.before
        self._function = _nothing
        self.before = DONE
        function()
        before.wait()

    return [(_Then, "wait", wait)]


def _what_a_collective_sends_is_dropped() -> list[Change]:
    from zlaunch.runtime.comm.pending import Work

    make = Work.__init__

    def keeps_nothing(self: Any, work: Any, key: Any, what: str, *keep: Any) -> None:
        make(self, work, key, what, *(each.new_empty(0) for each in keep))

    return [(Work, "__init__", keeps_nothing)]


def _tokens_are_summed_before_they_are_computed() -> list[Change]:
    from zlaunch.runtime.comm import axis, link

    return [(axis, "reduce_scatter_flat", _elsewhere(link.reduce_scatter_flat))]


def _a_norm_is_used_before_it_is_summed() -> list[Change]:
    import torch.distributed as dist

    from zlaunch.runtime.comm.collectives import Comm

    def all_reduce_scalars(self: Any, tensor: Any, what: str = "") -> Any:
        dist.all_reduce(tensor, group=self._world.reduce_group, async_op=True)
        return tensor

    return [(Comm, "all_reduce_scalars", all_reduce_scalars)]


def _first_values_are_used_before_they_arrive() -> list[Change]:
    import torch.distributed as dist

    from zlaunch.runtime.comm.collectives import Comm

    def broadcast(self: Any, tensor: Any, source: int = 0, among: Any = None) -> None:
        group = (among or self._world).gather_group
        dist.broadcast(tensor, dist.get_global_rank(group, source), group=group, async_op=True)

    return [(Comm, "broadcast", broadcast)]


def _a_unit_is_stepped_on_a_stream_that_nothing_waits_for() -> list[Change]:
    import torch

    from zlaunch.runtime.optim.in_backward import BackwardStep

    step = BackwardStep._step

    def aside(self: Any, unit: Any, slices: Any) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step(self, unit, slices)

    return [(BackwardStep, "_step", aside)]


def _matrices_are_sent_before_they_are_computed() -> list[Change]:
    import torch.distributed as dist

    return [(dist, "all_to_all_single", _elsewhere(dist.all_to_all_single))]


def _what_ranks_step_together_is_used_before_it_is_uploaded() -> list[Change]:
    from zlaunch.runtime.optim.collective import CollectiveStep

    return [(CollectiveStep, "await_uploads", lambda self: self._uploads.clear())]


def _a_matrix_is_used_before_it_is_on_the_host() -> list[Change]:
    from zlaunch.runtime.optim import muon

    apply = muon.apply_change

    def early(values: Any, change: Any, *rest: Any) -> None:
        apply(values, change.to(values.device, non_blocking=True), *rest)

    return [(muon, "apply_change", early)]


def _norms_are_read_before_they_are_on_the_host() -> list[Change]:
    from zlaunch.runtime.optim.lamb import Norms

    def totals(self: Any) -> Any:
        sums = self._comm.all_reduce_scalars(self._sums.view(-1), "all-reduces parameter norms")
        pairs = sums.view(-1, 2).to("cpu", non_blocking=True).tolist()
        return lambda part: tuple(pairs[self._row(part)])

    return [(Norms, "totals", totals)]


def _sums_of_rows_are_read_before_they_are_on_the_host() -> list[Change]:
    from zlaunch.runtime.optim.adafactor import ParameterSums

    def all_reduce(self: Any, what: str) -> None:
        device = self._comm.device
        total = self._on(device)
        others = [known for known in self._sums if known != device]
        for other in others:
            total += self._sums[other].to(device)
        self._comm.all_reduce_scalars(total, what)
        for other in others:
            self._sums[other] = total.to(other, non_blocking=True)

    return [(ParameterSums, "all_reduce", all_reduce)]


def _a_mean_is_used_before_it_is_on_the_host() -> list[Change]:
    from zlaunch.runtime.optim.sign_exchange import SignExchange

    end = SignExchange.end
    return [(SignExchange, "end", lambda self, average: end(self, average).to("cpu", non_blocking=True))]


def _signs_are_sent_before_they_are_computed() -> list[Change]:
    from zlaunch.runtime.comm import link
    from zlaunch.runtime.optim import sign_exchange

    return [(sign_exchange, "all_gather_flat", _elsewhere(link.all_gather_flat))]


def _inputs_are_offloaded_before_they_are_computed() -> list[Change]:
    import torch

    from zlaunch.runtime.activation.offload import OffloadedTensor

    def copy(self: Any, target: Any, source: Any) -> Any:
        stream = self._room.stream
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            return stream.record_event()

    return [(OffloadedTensor, "_copy", copy)]


def _an_input_is_let_go_while_it_is_copied() -> list[Change]:
    from zlaunch.runtime.activation.offload import OffloadedTensor

    let_go = _within(OffloadedTensor.let_go, OffloadedTensor, "_await_copy", _nothing)
    return [(OffloadedTensor, "let_go", let_go)]


def _a_snapshot_waits_for_its_first_copy_alone() -> list[Change]:
    from zlaunch.runtime.checkpoint.save import Snapshot
    from zlaunch.runtime.comm.pending import DONE

    copy = Snapshot._copy

    def keeps_first(self: Any, part: Any) -> Any:
        first = self._last
        copies = copy(self, part)
        self._last = self._last if first is DONE else first
        return copies

    return [(Snapshot, "_copy", keeps_first)]


def _a_snapshot_is_taken_over_one_that_is_written() -> list[Change]:
    from zlaunch.runtime.checkpoint.save import BackgroundSave

    def forgets(self: Any) -> None:
        self._thread = None

    return [(BackgroundSave, "wait", forgets)]


def _a_shard_is_filled_before_it_is_on_the_host() -> list[Change]:
    from zlaunch.runtime.checkpoint import shard_io

    def fill_on(target: Any, first: int, kind: str, fill: Any) -> None:
        host = target.detach().to("cpu", non_blocking=True)
        fill(host, first, kind)
        target.detach().copy_(host)

    return [(shard_io, "_fill_on", fill_on)]


def _loaded_values_are_used_before_they_are_uploaded() -> list[Change]:
    from zlaunch.runtime.checkpoint import load, shard_io
    from zlaunch.runtime.offload.transfer import StreamEvent

    return [(load, "take_values", _within(shard_io.take_values, StreamEvent, "synchronize", _nothing))]


def _numbers_of_a_step_are_marked_before_they_are_copied() -> list[Change]:
    import torch

    from zlaunch.runtime.precision import StepResult

    def send(self: Any, stuck: Any) -> None:
        if self._values is not None or self._host is not None:
            return
        stuck = torch.zeros((), device=self._facts[0].device) if stuck is None else stuck
        values = torch.stack([torch.as_tensor(fact).double() for fact in (*self._facts, stuck)])
        self._host = torch.empty(5, dtype=torch.float64, pin_memory=True)
        self._event = torch.cuda.Event()
        self._event.record()
        self._host.copy_(values, non_blocking=True)

    return [(StepResult, "send", send)]


def _metrics_are_read_before_they_arrive() -> list[Change]:
    import torch

    from zlaunch.runtime.device import HostCopy

    return [(HostCopy, "read", _within(HostCopy.read, torch.cuda.Event, "synchronize", _nothing))]


def _a_clock_waits_on_a_stream_of_its_own() -> list[Change]:
    from zlaunch.runtime.observe.clock import StepClock

    return [(StepClock, "_wait_on_stream", _elsewhere(StepClock._wait_on_stream))]


MUTATIONS: dict[str, tuple[str, Callable[[], list[Change]]]] = {
    make.__name__.strip("_").replace("_", " "): (case, make)
    for case, make in (
        ("stage 2 host", _downloads_do_not_wait_for_what_made_the_values),
        ("stage 2 host accumulated", _uploads_do_not_wait),
        ("stage 3 host both", _parameters_are_uploaded_into_memory_that_is_in_use),
        ("stage 3 disk both", _parameters_are_read_from_disk_into_memory_that_is_in_use),
        ("stage 3 host both", _what_is_uploaded_is_used_at_once),
        ("stage 2 host", _a_source_is_dropped_while_it_is_copied),
        ("stage 2 host loads on two", _a_checkpoint_is_loaded_into_memory_that_is_in_use),
        ("stage 2 host", _the_step_reads_gradients_before_they_arrive),
        ("stage 2 host", _new_values_overwrite_what_is_being_uploaded),
        ("stage 3 host parameters", _a_gather_does_not_wait_for_the_values_home),
        ("stage 3 host both", _the_next_forward_does_not_wait_for_the_step),
        ("stage 3 saves", _a_snapshot_is_written_before_it_is_taken),
        ("stage 3 saves", _a_step_changes_what_a_snapshot_is_taken_of),
        ("stage 3 saves at once", _a_file_is_written_before_its_values_arrive),
        ("stage 3 disk both", _a_buffer_is_lent_again_while_it_is_read),
        ("stage 3 init host both", _memory_is_released_under_a_copy),
        ("stage 2 disk", _a_gradient_is_written_to_disk_before_it_arrives),
        ("stage 1 offloaded", _offloaded_inputs_are_used_before_they_are_back),
        ("stage 3 on two", _collectives_are_not_waited_for),
        ("stage 3 stepping on two", _a_unit_is_stepped_before_its_gradient_is_there),
        ("stage 0 OneBitAdam alone on two", _signs_are_read_before_they_arrive),
        ("stage 3 logged on two", _a_log_is_all_that_waits_for_collectives),
        ("stage 3 groups on four", _hops_do_not_wait_for_what_they_send),
        ("stage 3 groups on four", _the_second_hop_is_not_waited_for),
        ("stage 3 groups on four", _the_second_hop_does_not_wait_for_the_first),
        ("stage 0 tensor on two", _the_sum_of_a_layer_is_not_waited_for),
        ("stage 0 tensor on two", _the_sum_of_an_inputs_gradient_is_not_waited_for),
        ("stage 1 pipeline on two", _what_a_stage_receives_is_used_before_it_arrives),
        ("stage 0 experts on two", _tokens_are_computed_before_they_arrive),
        ("stage 0 sequence on two", _heads_are_computed_before_they_arrive),
        ("stage 3 host both on two", _gathers_do_not_wait_for_uploads),
        ("stage 3 on two", _a_gather_fills_memory_that_is_in_use),
        ("stage 3 on two", _a_gather_does_not_wait_for_the_step),
        ("stage 2 on two", _units_are_marked_before_they_are_stepped),
        ("stage 2 on two", _a_rank_does_not_choose_its_device),
        ("stage 3 host both on two", _streams_are_made_on_the_first_device),
        ("stage 2 host", _threads_do_not_choose_their_device),
        ("stage 2 host", _a_download_is_marked_before_it_is_queued),
        ("stage 3 host both", _an_upload_is_marked_on_the_stream_of_the_computation),
        ("stage 2 host accumulated", _a_sum_is_uploaded_before_it_is_home),
        ("stage 2 host accumulated", _a_sum_is_cast_on_the_host_before_it_is_home),
        ("stage 3 disk both", _a_buffer_is_given_back_behind_the_computation_alone),
        ("stage 1 host skipping", _a_gradient_overwrites_one_of_a_skipped_step),
        ("stage 2 disk", _a_tile_is_read_over_values_that_are_uploaded),
        ("stage 2 host", _the_last_tile_of_a_unit_is_not_waited_for),
        ("stage 2 disk in blocks", _only_the_first_block_waits_for_a_gradient),
        ("stage 3 disk both", _what_is_read_from_disk_is_used_at_once),
        ("stage 3 resting", _states_come_back_into_memory_that_is_in_use),
        ("stage 3 resting", _states_are_used_before_they_are_back),
        ("stage 3 resting", _states_come_back_before_they_have_left),
        ("stage 3 on two", _a_mark_serves_two_gathers),
        ("stage 1 touched on two", _a_touch_does_not_wait_for_a_refresh),
        ("stage 2 host", _a_tile_is_closed_before_it_is_stepped),
        ("stage 3 host both unpinned", _what_is_uploaded_from_pageable_memory_is_used_at_once),
        ("stage 2 on two", _a_bucket_is_lent_again_while_it_is_sent),
        ("stage 3 on two", _a_gather_begins_before_its_part_is_cast),
        ("stage 1 on two", _reductions_do_not_wait_for_the_gradients),
        ("stage 3 groups on four", _memory_of_hops_is_dropped_while_they_run),
        ("stage 3 packed weights alone on two", _packed_values_are_in_memory_of_another_stream),
        ("stage 0 sent in bf16 on two", _what_follows_a_collective_comes_before_it),
        ("stage 0 OneBitAdam logged on two", _what_a_collective_sends_is_dropped),
        ("stage 0 tensor, tokens divided, on two", _tokens_are_summed_before_they_are_computed),
        ("stage 2 on two", _a_norm_is_used_before_it_is_summed),
        ("stage 3 on two", _first_values_are_used_before_they_arrive),
        ("stage 3 stepping", _a_unit_is_stepped_on_a_stream_that_nothing_waits_for),
        ("stage 1 Muon alone on two", _matrices_are_sent_before_they_are_computed),
        ("stage 2 Lamb host fp32 on two", _what_ranks_step_together_is_used_before_it_is_uploaded),
        ("stage 3 Muon host both on two", _a_matrix_is_used_before_it_is_on_the_host),
        ("stage 2 Lamb alone on two", _norms_are_read_before_they_are_on_the_host),
        ("stage 3 Adafactor host both on two", _sums_of_rows_are_read_before_they_are_on_the_host),
        ("stage 3 OneBitAdam host both on two", _a_mean_is_used_before_it_is_on_the_host),
        ("stage 0 OneBitAdam alone on two", _signs_are_sent_before_they_are_computed),
        ("stage 1 offloaded", _inputs_are_offloaded_before_they_are_computed),
        ("stage 1 offloaded", _an_input_is_let_go_while_it_is_copied),
        ("stage 3 saves", _a_snapshot_waits_for_its_first_copy_alone),
        ("stage 3 saves", _a_snapshot_is_taken_over_one_that_is_written),
        ("stage 3 loads on two", _a_shard_is_filled_before_it_is_on_the_host),
        ("stage 2 host loads on two", _loaded_values_are_used_before_they_are_uploaded),
        ("stage 3 bf16", _numbers_of_a_step_are_marked_before_they_are_copied),
        ("stage 2 watched", _metrics_are_read_before_they_arrive),
        ("stage 2 watched on two", _a_clock_waits_on_a_stream_of_its_own),
    )
}
"""Maps what is left out to the case in which that must be found, and to what is changed for it."""


@contextmanager
def applied(name: str) -> Iterator[None]:
    """Leave one wait out; none for an empty name."""
    with ExitStack() as stack:
        if name:
            for owner, attribute, value in MUTATIONS[name][1]():
                stack.callback(setattr, owner, attribute, getattr(owner, attribute))
                setattr(owner, attribute, value)
        yield
