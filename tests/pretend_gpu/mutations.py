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

    wait = Axis._wait

    def changed(self: Axis, *arguments: Any) -> None:
        if self.name != name:
            wait(self, *arguments)

    return [(Axis, "_wait", changed)]


def _the_sum_of_a_layer_is_not_waited_for() -> list[Change]:
    return _nothing_waits_on("tensor")


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
    from zlaunch.runtime.device import stream_mark
    from zlaunch.runtime.zero.unit import Unit

    def without_memory(self: Any) -> Any:
        return stream_mark(self.device)

    return [(Unit, "prepare_gather", without_memory)]


def _a_gather_does_not_wait_for_the_step() -> list[Change]:
    import torch

    from zlaunch.runtime.zero import unit

    def behind_nothing(mark: Any, device: Any) -> Any:
        return torch.cuda.stream(None if mark is None else torch.cuda.Stream())

    return [(unit, "behind", behind_nothing)]


def _units_are_marked_before_they_are_stepped() -> list[Change]:
    from zlaunch.runtime.optim.step import ShardedOptimizer

    describe = ShardedOptimizer._updates_here

    def all_later(self: Any, first: Any) -> Any:
        soon, rest = describe(self, first)
        return [], [*rest, *soon]

    return [(ShardedOptimizer, "_updates_here", all_later)]


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
