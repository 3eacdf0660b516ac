"""Carry out one node's part of a run: `python -m zlaunch.node.agent`.

The first line on stdin is the plan (with this node alone), later ones are commands; events leave as JSON
lines on stdout. One thread, one loop, no blocking call: whatever a worker or the launcher does, the agent can
still stop the run. It reports what happens to its workers, and the launcher alone decides what that means. By
itself it ends the run only on SIGTERM and when the launcher is gone. After the workers of a plan it waits for
the plan of the next attempt, until the launcher hangs up.

How long it stays in a state: without a plan, as long as the launcher said (`hello`); with workers, as long as
the launcher lives and, where it is on another machine, the lease lasts (Note [Lease] in `lease.py`);
stopping, the grace period within the lease; handing over the last output, as long as the launcher takes some
of it.
"""

from __future__ import annotations

import os
import select
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import Enum, auto
from functools import partial
from typing import Any, NoReturn

from zlaunch.node.lease import Lease
from zlaunch.node.pacing import Pacing
from zlaunch.node.package_list import PackageList
from zlaunch.node.preload import Preloader, pids_of, start_standby
from zlaunch.node.rendezvous import Handshake
from zlaunch.node.watchdog import fork_under_watchdog
from zlaunch.node.worker import (
    CHUNK_BYTES,
    Batch,
    Worker,
    blames_host,
    likely_reason,
    oom_counters,
    oom_rose,
    read_chunk,
    spawn,
    why_not_started,
)
from zlaunch.plan.plan import Plan, WorkerPlan
from zlaunch.system import boot_clock
from zlaunch.system.events import WORKER_EVENTS, Event, LineBuffer, encode, encode_output, in_envelope
from zlaunch.system.messages import (
    AgentEvent,
    AgentStarted,
    Command,
    Done,
    Exited,
    Failed,
    Hello,
    Kill,
    ListPackages,
    MissingField,
    Notice,
    Packages,
    Pause,
    Ping,
    Pong,
    Preload,
    Signal,
    Signalled,
    Spawned,
    Start,
    Stop,
    Stopping,
    Sweep,
    decode_command,
    encode_event,
)
from zlaunch.system.pipes import widen
from zlaunch.system.processes import (
    PASSED_SIGNALS,
    adopt_orphans,
    kill,
    kill_leftovers,
    open_pidfd,
    pid_namespace,
    run_processes,
    signal_groups,
    signal_name,
    start_ticks,
)

# -- outbox -----------------------------------------------------------------------------------------
#
# Write the agent's events: they are queued in memory and never block it.


_FULL_BYTES = 8 << 20


class Outbox:
    """Writes to the launcher's pipe. When the launcher is gone, all that is put in is dropped; see `lost`."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.lost = False
        self._pending = bytearray()
        os.set_blocking(fd, False)

    @property
    def pending(self) -> int:
        """Return the bytes that wait for room in the pipe."""
        return len(self._pending)

    @property
    def full(self) -> bool:
        """Tell whether so much waits that the workers' output had better stay in their own pipes."""
        return len(self._pending) >= _FULL_BYTES

    def put(self, event: Event) -> None:
        """Queue an event and write what the pipe takes."""
        self._send(encode(event))

    def put_output(self, rank: int, stream: str, data: bytes) -> None:
        """Queue what a worker has printed, and write what the pipe takes."""
        self._send(encode_output(rank, stream, data))

    def _send(self, data: bytes) -> None:
        if not self.lost:
            self._pending += data
            self.flush()

    def flush(self) -> None:
        """Write until the queue is empty or the pipe is full."""
        try:
            while self._pending:
                with memoryview(self._pending)[: 1 << 20] as part:
                    written = os.write(self.fd, part)
                del self._pending[:written]
        except BlockingIOError:
            pass
        except OSError:
            self.lost = True
            self._pending.clear()


# -- descriptors ------------------------------------------------------------------------------------
#
# Wait for an agent's file descriptors, each with a handler to call when it is ready.


class Descriptors:
    """Waits for all descriptors at once and calls the handlers of those that are ready."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def watch(self, fd: int, handler: Callable[[], object]) -> None:
        """Call a handler whenever the descriptor can be read."""
        self._selector.register(fd, selectors.EVENT_READ, handler)

    def unwatch(self, fd: int) -> None:
        """Forget a descriptor, if it is watched."""
        if fd in self._selector.get_map():
            self._selector.unregister(fd)

    def close(self, fd: int) -> None:
        """Forget a descriptor, and close it."""
        self.unwatch(fd)
        os.close(fd)

    def watch_outbox(self, outbox: Outbox) -> None:
        """Wait for room to write only when there is something to write."""
        waiting = outbox.fd in self._selector.get_map()
        if outbox.pending and not waiting:
            self._selector.register(outbox.fd, selectors.EVENT_WRITE, outbox.flush)
        elif waiting and not outbox.pending:
            self._selector.unregister(outbox.fd)

    def wait(self, timeout_s: float) -> None:
        """Wait for the first ready descriptors, and call their handlers."""
        for key, _ in self._selector.select(timeout_s):
            # A handler before it in this round may have closed the descriptor.
            if key.fd in self._selector.get_map():
                key.data()


# -- ending -----------------------------------------------------------------------------------------
#
# Decide when an ending run's workers and their leftovers are looked for, asked to end, and killed. Pure.


_SCAN_INTERVAL_S = 0.1
_LEFTOVER_S = 0.5
"""Seconds in which helpers of a finished worker (trackers, uploaders) may end by themselves."""


class Due(Enum):
    """Says what the agent has to do now."""

    NOTHING = auto()
    SCAN = auto()
    """Look for what the workers have left."""
    KILL = auto()
    """Kill all that is there."""


class Ending:
    """Keeps the times of a run's end, in monotonic seconds."""

    def __init__(self) -> None:
        self.stopping = False
        """Tells whether the agent ends the workers; otherwise they end by themselves."""
        self._kill_at: float | None = None
        self._scan_at = 0.0

    def stop(self, now: float, grace_s: float) -> None:
        """Give the workers `grace_s` seconds to end."""
        self.stopping = True
        self._kill_at = now + grace_s

    def kill(self, now: float) -> None:
        """Let the next `due` be KILL."""
        self._kill_at = now

    def due(self, now: float, *, all_exited: bool) -> Due:
        """Return what is due. The end also begins when all workers have exited."""
        if self._kill_at is None and all_exited:
            self._kill_at = now + _LEFTOVER_S
        if self._kill_at is None:
            return Due.NOTHING
        if now >= self._kill_at:
            return Due.KILL
        if all_exited and now >= self._scan_at:
            self._scan_at = now + _SCAN_INTERVAL_S
            return Due.SCAN
        return Due.NOTHING

    def wait_s(self, now: float, longest_s: float, *, all_exited: bool) -> float:
        """Return the seconds in which nothing can become due."""
        moments = [now + longest_s]
        if self._kill_at is not None:
            moments += [self._kill_at, *([self._scan_at] if all_exited else [])]
        return max(0.0, min(moments) - now)


# -- uplink -----------------------------------------------------------------------------------------
#
# Connect an agent to its launcher: commands in, events out, and how long either may be silent.


_IDLE_S = 300.0
"""Seconds that an agent waits for its plan when the launcher has not said how long that may take."""
_HALTED_S = 86400.0
"""Seconds that a launcher on this machine may take nothing of the last output: its terminal may be halted."""
_GOODBYE_S = 5.0
"""Seconds that a launcher that has hung up may take nothing of the last output."""


class Uplink:
    """Reads commands and writes events; neither of its descriptors ever blocks the agent."""

    def __init__(self, stdin: int, stdout: int) -> None:
        self.stdin = stdin
        self.outbox = Outbox(stdout)
        self.idle_s = _IDLE_S
        self.heartbeat_s: float | None = None
        """Seconds that a lease lasts (Note [Lease]); None before the plan; 0 for a local launcher, whose pipe
        ends.
        """
        self.lease = Lease()
        self._heard_at = boot_clock.now_s()
        self._lines = LineBuffer()
        os.set_blocking(stdin, False)

    def read(self) -> list[Command] | None:
        """Take the commands that have come; None when the launcher has hung up. Raises MissingField."""
        chunk = read_chunk(self.stdin)
        if chunk == b"":
            return None
        if chunk:
            self._heard_at = boot_clock.now_s()
        decoded = [decode_command(message) for message in self._lines.feed(chunk or b"")]
        commands = [command for command in decoded if command is not None]
        for command in commands:
            if isinstance(command, (Hello, Sweep, Ping)) and command.idle_s is not None:
                self.idle_s = float(command.idle_s)
            if isinstance(command, (Ping, Pause)) and command.lease is not None:
                self.lease.extend(float(command.lease))
        return commands

    def take_plan(self, heartbeat_s: float, lease_end: float | None) -> bool:
        """Begin the lease of a plan. Return False where it has ended: the plan was on its way too long."""
        self.heartbeat_s = heartbeat_s
        # The end that the launcher meant, also for a plan that was on its way for long: see Note [Lease].
        end = boot_clock.now_s() + heartbeat_s if lease_end is None else lease_end
        self.lease.begin(heartbeat_s, end)
        return not self.lease_is_over()

    def await_plan(self) -> None:
        """Allow the launcher to be silent for as long as it has said, from now on."""
        self.heartbeat_s = None
        self._heard_at = boot_clock.now_s()
        self.lease.close()

    def too_silent(self, grace_s: float) -> str:
        """Return why the run has to end here: no plan has come in time, or the lease ends within the grace
        period; "" while it may go on.
        """
        now = boot_clock.now_s()
        if self.heartbeat_s is None:
            return "no plan has come" if now - self._heard_at > self.idle_s else ""
        stop_at = self.lease.stop_at(grace_s)
        if stop_at is None or now < stop_at:
            return ""
        return f"the launcher has not been heard for {now - self._heard_at:.0f} s, and this node's lease ends"

    def lease_is_over(self) -> bool:
        """Tell whether the workers have to be killed at once."""
        kill_at = self.lease.kill_at()
        return kill_at is not None and boot_clock.now_s() >= kill_at

    def next_s(self, grace_s: float, longest_s: float) -> float:
        """Return the seconds in which the lease asks for nothing, `longest_s` at most."""
        now = boot_clock.now_s()
        moments = (self.lease.stop_at(grace_s), self.lease.kill_at())
        return min([longest_s, *(moment - now for moment in moments if moment is not None and moment > now)])

    def hand_over(self) -> None:
        """Write the rest of the output, for as long as the launcher takes some of it or is heard.

        A launcher on this machine may take its time: its terminal may be halted.
        """
        limit_s = self.heartbeat_s or _HALTED_S
        moved_at = boot_clock.now_s()
        listening = True
        while self.outbox.pending:
            until = moved_at + limit_s
            if listening:  # a launcher that has been stopped in its terminal has granted a long lease
                until = max(until, self.lease.kill_at() or 0.0)
            left = until - boot_clock.now_s()
            if left <= 0:
                return
            before = self.outbox.pending
            readable, _, _ = select.select([self.stdin] if listening else [], [self.outbox.fd], [], left)
            self.outbox.flush()
            if self.outbox.pending < before:
                moved_at = boot_clock.now_s()
            if readable and self.read() is None:
                listening = False
                limit_s = _GOODBYE_S
            elif readable:
                moved_at = boot_clock.now_s()


def take_user_input() -> int | None:
    """Return the descriptor of the user's own input, which rank 0 gets, if the launcher has handed it on."""
    fd = int(os.environ.pop("ZLAUNCH_STDIN_FD", "-1"))
    if fd < 0:
        return None
    os.set_inheritable(fd, False)
    return fd


# -- agent ------------------------------------------------------------------------------------------


_DRAIN_LIMIT_BYTES = 4 << 20
"""Bytes that a dead worker's pipe may still give: a grandchild can go on writing for ever."""

_PIPE_BYTES = 1 << 16
"""What a pipe holds by default."""
_ALL_PIPES_BYTES = 8 << 20


class Agent:
    """Runs one node's part in one loop. Times are monotonic seconds."""

    def __init__(self, watchdog: int, stdin: int = 0, stdout: int = 1) -> None:
        self.watchdog = watchdog
        self.uplink = Uplink(stdin, stdout)
        self.outbox = self.uplink.outbox
        self.descriptors = Descriptors()
        self.handlers: Mapping[type, Callable[[Any], None]] = {
            Start: self._on_plan,
            Ping: self._on_ping,
            Pause: self._on_pause,
            Stop: self._on_stop,
            Kill: self._on_kill,
            Signal: self._on_signal_command,
            ListPackages: self._list_packages,
            Preload: self._on_preload,
        }
        """Says what to do at each command; the handshake handles the others."""
        self.user_input = take_user_input()
        self.poll_s = 1.0
        self.asked_by_signal = 0
        self.has_told_signal = False
        self.ended = False
        self.standby: Preloader | None = None
        """Has the modules of all workers imported, for the next attempt."""
        self.packages: PackageList | None = None
        """The process that lists the packages, from when the launcher asks for them."""
        self.leaving = False
        """Tells that no other plan is waited for: the launcher is gone, or a signal has asked for the end."""
        self._await_plan()

    def _await_plan(self) -> None:
        """Begin anew, without a plan."""
        self.reading_output = True
        self.pacing = Pacing()
        self.plan: Plan | None = None
        self.uplink.await_plan()
        self.handshake = Handshake(self._answer, self.descriptors.watch)
        self.workers: dict[int, Worker] = {}
        self.batch: Batch | None = None
        """Workers that are being forked."""
        self.oom_before = oom_counters()
        self.ending = Ending()
        self.leftovers_asked = False

    def run(self) -> int:
        """Serve until the run is over and the launcher has been told."""
        wake_reader, wake_writer = os.pipe()
        os.set_blocking(wake_reader, False)
        os.set_blocking(wake_writer, False)
        # The loop waits in select(), which a signal handler in Python does not end.
        signal.set_wakeup_fd(wake_writer)
        # Handlers, not SIG_IGN: an ignored signal would stay ignored in every worker.
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGHUP, self._on_signal)
        for signum in (signal.SIGINT, *PASSED_SIGNALS):
            signal.signal(signum, lambda *_: None)
        self.descriptors.watch(wake_reader, lambda: os.read(wake_reader, 512))
        self.descriptors.watch(self.uplink.stdin, self._on_stdin)
        while not self.ended:
            self.descriptors.watch_outbox(self.outbox)
            self._hold_back_output()
            longest_s = self.uplink.next_s(self._grace_s(), self.poll_s)
            now = time.monotonic()
            self.descriptors.wait(self.ending.wait_s(now, longest_s, all_exited=self._all_exited()))
            self._reap()
            self._tick()
            self.pacing.end_round()
        self.uplink.hand_over()
        return 0

    def _hold_back_output(self) -> None:
        """Leave the output in the workers' own pipes while the launcher takes too little of it."""
        if self.reading_output != self.outbox.full:
            return
        self.reading_output = not self.outbox.full
        for worker in self.workers.values():
            for stream in worker.streams.keys() - worker.finished_fds:
                self.descriptors.unwatch(stream)
                if self.reading_output:
                    self.descriptors.watch(stream, partial(self._on_output, worker, stream))
            if worker.event_fd not in worker.finished_fds:
                self.descriptors.unwatch(worker.event_fd)
                if self.reading_output:
                    self.descriptors.watch(worker.event_fd, partial(self._on_worker_event, worker))

    # -- input ---------------------------------------------------------------------------------

    def _on_signal(self, signum: int, _frame: object) -> None:
        """Record the signal and no more: this runs between any two steps of the loop."""
        self.asked_by_signal = signum

    def _on_stdin(self) -> None:
        commands = self.uplink.read()
        if commands is None:
            self.descriptors.unwatch(self.uplink.stdin)
            self._on_orphaned()
        for command in commands or ():
            self._on_command(command)

    def _on_orphaned(self) -> None:
        """Stop, and tell the other launchers of a SLURM step: they would wait for this one's ranks."""
        in_step = self.plan is not None and self.plan.in_step
        others = in_step and not self.ending.stopping and not self._all_exited()
        # sshd hangs up when the process that it has started, the watchdog, is gone.
        self._leave("the agent's watchdog was killed" if self._is_alone() else "the launcher is gone")
        if others:
            from zlaunch.slurm.commands import cancel_step
            from zlaunch.slurm.environment import SlurmError

            with suppress(SlurmError):  # no launcher is left to be told
                cancel_step(os.environ)

    def _on_asked_by_signal(self) -> None:
        """Stop. A SIGTERM in a SLURM job is meant for the launcher too, which may not have got it."""
        if self._is_alone():
            self._leave("the agent's watchdog was killed")
            return
        if (
            not self.has_told_signal
            and self.asked_by_signal == signal.SIGTERM
            and "SLURM_JOB_ID" in os.environ
        ):
            self.has_told_signal = True
            self.send(Signalled(self._host(), int(self.asked_by_signal), time.time()))
        self._leave(f"the agent got {signal_name(self.asked_by_signal)}")

    def _leave(self, why: str, grace_s: float | None = None) -> None:
        """Stop the workers, and then end."""
        self.leaving = True
        self.ended = self.ended or self.plan is None
        self.stop(why, grace_s)

    def _is_alone(self) -> bool:
        return os.getppid() != self.watchdog

    # -- commands ------------------------------------------------------------------------------

    def _on_command(self, command: Command) -> None:
        handler = self.handlers.get(type(command))
        if handler is not None:
            handler(command)
        elif self.plan is None:
            self.handshake.handle(command)

    def _on_plan(self, command: Start) -> None:
        """Start the workers; a second plan changes nothing."""
        if self.plan is None:
            self._start(Plan.from_dict(command.plan), command.lease)

    def _on_ping(self, command: Ping) -> None:
        """Show life."""
        self.send(Pong(self._host(), boot_clock.now_s(), command.pauses, time.time()))

    def _on_pause(self, command: Pause) -> None:
        """Do nothing: the uplink has extended the lease."""

    def _on_stop(self, command: Stop) -> None:
        """Stop the workers, and stay."""
        self.stop("the launcher asked for it", command.grace_s)

    def _on_kill(self, command: Kill) -> None:
        """Kill the workers in the next round, and leave."""
        self._leave("the launcher asked for it", 0.0)
        self.ending.kill(time.monotonic())

    def _on_signal_command(self, command: Signal) -> None:
        """Send the workers a signal, not what they have started: "save and stop", "show your stacks"."""
        for pid in self._living():
            with suppress(OSError):
                os.kill(pid, int(command.signum))

    def _on_preload(self, command: Preload) -> None:
        """Import what the workers of a plan would, for a plan that may come."""
        worker = WorkerPlan(**command.worker)
        if preloader := start_standby(worker, command.modules, command.cwd):
            self.descriptors.watch(preloader.connection.fileno(), partial(self._on_ready, preloader))

    def _on_output(self, worker: Worker, fd: int) -> bool:
        """Forward one chunk; False when there is nothing (yet or any more)."""
        chunk = read_chunk(fd)
        if chunk:
            self.outbox.put_output(worker.plan.rank, worker.streams[fd], chunk)
            self.pacing.took(len(chunk))
        elif chunk is not None:
            self.descriptors.unwatch(fd)
            worker.finished_fds.add(fd)
        return bool(chunk)

    def _on_worker_event(self, worker: Worker) -> bool:
        chunk = read_chunk(worker.event_fd)
        for event in worker.events.feed(chunk or b""):
            if event.get("type") in WORKER_EVENTS:
                self._pass_up(worker, event)
        if worker.events.left_out:
            self._leave_out(worker, "its line is too long")
        if chunk == b"":
            self.descriptors.unwatch(worker.event_fd)
            worker.finished_fds.add(worker.event_fd)
        return bool(chunk)

    def _pass_up(self, worker: Worker, event: Event) -> None:
        try:
            self.outbox.put(in_envelope(worker.plan.rank, event))
        except ValueError as error:
            self._leave_out(worker, str(error))

    def _leave_out(self, worker: Worker, why: str) -> None:
        """Say once that the launcher does not get all that a script reports."""
        if not worker.has_left_out:
            worker.has_left_out = True
            text = f"rank {worker.plan.rank} on {self._host()} has reported something that zlaunch leaves out"
            self._notify(f"{text}: {why}")

    # -- workers -------------------------------------------------------------------------------

    def _grace_s(self) -> float:
        return self.plan.grace_s if self.plan else 0.0

    def _host(self) -> str:
        return self.plan.nodes[0].host if self.plan else socket.gethostname()

    def send(self, event: AgentEvent) -> None:
        """Send an event."""
        self.outbox.put(encode_event(event))

    def _notify(self, text: str) -> None:
        """Have the launcher show a message."""
        self.send(Notice(text, self._host(), time.time()))

    def _answer(self, event: AgentEvent) -> None:
        """Answer the launcher before there is a plan."""
        self.outbox.put({**encode_event(event), "beat": boot_clock.now_s()})

    def _start(self, plan: Plan, lease_end: float | None) -> None:
        self.plan = plan
        is_in_time = self.uplink.take_plan(plan.heartbeat_s, lease_end)
        listener = self.handshake.close()
        if listener is not None:
            self.descriptors.unwatch(listener)
        own = os.getpid()
        self.send(AgentStarted(self._host(), own, start_ticks(own) or 0, pid_namespace(), time.time()))
        if not is_in_time:
            self._leave("the plan came too late: the launcher may have given this node up", 0.0)
            return
        if plan.preload:
            try:
                standby = self.standby
                self.standby = None
                given = (plan.nodes[0].workers, plan.preload, plan.cwd, self.user_input)
                self.batch = Batch(*given, standby=standby, stays=plan.restarts)
            except OSError:
                pass  # one by one then, which says what is wrong
            else:
                self.descriptors.watch(self.batch.preloader.connection.fileno(), self._on_batch)
                self._wake_at_end_of(self.batch.preloader.pid)
                return
        self._spawn_each()

    def _on_batch(self) -> None:
        """Take over the workers that the preloader has forked; start them one by one where it has failed."""
        assert self.batch is not None
        batch = self.batch
        self.batch = None
        self.descriptors.unwatch(batch.preloader.connection.fileno())
        if self.ending.stopping:
            batch.close()
            return
        workers = batch.workers()
        if workers is None:
            what = " and ".join(name.partition(".")[0] for name in self.plan.preload) if self.plan else ""
            text = f"{self._host()}: the process that imports {what} for all workers has failed: "
            self._notify(text + "each starts by itself")
            self._spawn_each()
        self.standby = batch.preloader.standby
        for worker in workers or ():
            self._watch_worker(worker)

    def _on_ready(self, preloader: Preloader) -> None:
        """Keep the standby of a spare node, unless it came too late for the plan."""
        self.descriptors.unwatch(preloader.connection.fileno())
        preloader.release()
        if self.plan is None:
            self.standby = preloader.standby
        elif preloader.standby:
            preloader.standby.close()

    def _spawn_each(self) -> None:
        assert self.plan is not None
        for worker in self.plan.nodes[0].workers:
            try:
                self._watch_worker(spawn(worker, self.plan.cwd, self.user_input))
            except OSError as error:
                text = why_not_started(error, worker, self.plan)
                self.send(Failed(self._host(), text, blames_host(error), time.time()))
                self.stop("a worker could not be started")
                return

    def _watch_worker(self, worker: Worker) -> None:
        plan = worker.plan
        self.workers[worker.pid] = worker
        for fd in worker.streams:
            widen(fd, self._pipe_bytes())
            self.descriptors.watch(fd, partial(self._on_output, worker, fd))
        self.descriptors.watch(worker.event_fd, partial(self._on_worker_event, worker))
        self._wake_at_end_of(worker.pid)
        ticks = start_ticks(worker.pid) or 0
        self.send(Spawned(self._host(), plan.rank, plan.local_rank, worker.pid, ticks, time.time()))

    def _list_packages(self, _command: ListPackages) -> None:
        """Start listing the packages of this interpreter while the workers run."""
        is_listing = self.packages is not None and self.packages.fd is not None
        if self.plan is None or is_listing or self._all_exited():
            return
        try:
            listing = PackageList(self.plan.nodes[0].workers[0].env, self.plan.cwd)
        except OSError as error:
            self.send(Packages(self._host(), time.time(), why=f"cannot list them: {error}"))
            return
        self.packages = listing
        if listing.fd is not None:
            self.descriptors.watch(listing.fd, self._on_packages)

    def _on_packages(self) -> None:
        assert self.packages is not None
        if (about := self.packages.read()) is not None:
            self.send(Packages.of(self._host(), time.time(), about))
            self._stop_listing()

    def _stop_listing(self) -> None:
        """Kill the listing: it must not make a run longer."""
        if self.packages is not None and self.packages.fd is not None:
            self.descriptors.close(self.packages.fd)
            self.packages.fd = None
            self.packages.kill()

    def _not_leftovers(self) -> tuple[int, ...]:
        """Return the processes of this agent's own that the end of an attempt does not wait for."""
        listing = None if self.packages is None else self.packages.pid
        return (*pids_of(self.standby), *(() if listing is None else (listing,)))

    def _pipe_bytes(self) -> int:
        """Return the size of a pipe for output. All together are bounded: beyond /proc/sys/fs/
        pipe-user-pages-soft, a user's new pipes have room for a page or two.
        """
        count = len(self.plan.nodes[0].workers) if self.plan else 1
        return max(_PIPE_BYTES, min(CHUNK_BYTES, _ALL_PIPES_BYTES // (2 * count)))

    def _wake_at_end_of(self, pid: int) -> None:
        pidfd = open_pidfd(pid)
        if pidfd is None:
            self.poll_s = 0.05
        else:
            # Readable is all it says; the loop reaps after every round.
            self.descriptors.watch(pidfd, partial(self.descriptors.close, pidfd))

    def _reap(self) -> None:
        """Take the status of all children that ended: workers, and orphans that were adopted."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            worker = self.workers.get(pid)
            if worker is not None and worker.returncode is None:
                self._on_exit(worker, os.waitstatus_to_exitcode(status))
            elif self.batch is not None and pid == self.batch.preloader.pid:
                self._on_batch()  # what it forked keeps the connection open
            elif self.standby is not None and pid == self.standby.pid:
                self.standby.close()
                self.standby = None
            elif self.packages is not None and pid == self.packages.pid:
                self.packages.pid = None

    def _on_exit(self, worker: Worker, code: int) -> None:
        self._drain(worker)
        worker.returncode = code
        reason = ""
        if code < 0 and not self.ending.stopping:
            reason = likely_reason(-code, oom_killed=oom_rose(self.oom_before, oom_counters()))
        about = (worker.plan.rank, worker.pid, code, reason, self.ending.stopping)
        self.send(Exited(self._host(), *about, time.time()))
        if self._all_exited():
            self._stop_listing()

    def _drain(self, worker: Worker) -> None:
        """Take what a dead worker left in its pipes; their end may never come, grandchildren hold them."""
        readers = [partial(self._on_worker_event, worker)]
        readers += [partial(self._on_output, worker, fd) for fd in worker.streams]
        for read in readers:
            budget = _DRAIN_LIMIT_BYTES
            while budget > 0 and read():
                budget -= CHUNK_BYTES

    # -- ending --------------------------------------------------------------------------------

    def stop(self, why: str, grace_s: float | None = None) -> None:
        """Send SIGTERM to every worker's process group; what is left after the grace period is killed."""
        if self.ending.stopping or self.plan is None:
            return
        self._reap()  # what has failed by now was not our doing
        grace_s = self.plan.grace_s if grace_s is None else grace_s
        self.ending.stop(time.monotonic(), grace_s)
        signal_groups(self._living(), signal.SIGTERM)
        # SIGCONT: a worker that was stopped (SIGSTOP) could not act on the SIGTERM.
        signal_groups(self._living(), signal.SIGCONT)
        self.send(Stopping(self._host(), why, grace_s, time.time()))

    def _living(self) -> list[int]:
        """List the workers whose status has not been taken: no other process can have their ids."""
        return [worker.pid for worker in self.workers.values() if worker.returncode is None]

    def _all_exited(self) -> bool:
        # Workers that are being forked count as running, or the attempt would end before they are known.
        forking = self.batch is not None and not self.ending.stopping
        return not forking and all(worker.returncode is not None for worker in self.workers.values())

    def _tick(self) -> None:
        """Do what is due by the clock or in the present state."""
        if self.outbox.lost:
            self._on_orphaned()
        if self.asked_by_signal:
            self._on_asked_by_signal()
        if silence := self.uplink.too_silent(self._grace_s()):
            self._leave(silence)
        if self.uplink.lease_is_over():
            self.ending.kill(time.monotonic())
        if self.plan is None or self.ended:
            return
        due = self.ending.due(time.monotonic(), all_exited=self._all_exited())
        if due is Due.KILL:
            self._end()
        elif due is Due.SCAN:
            self._await_leftovers(self.plan.run_id)

    def _await_leftovers(self, run_id: str) -> None:
        """Wait for processes that the workers have started; in a stop, send them one SIGTERM."""
        # Again and again, because a process that ends may have started another one.
        found = run_processes(run_id, ancestor=os.getpid(), spared=self._not_leftovers())
        if not found:
            self._end()
        elif self.ending.stopping and not self.leftovers_asked:
            self.leftovers_asked = True
            for process in found:
                kill(process, signal.SIGTERM)

    def _end(self) -> None:
        """Kill all that is left, take the last output, and report the end of the attempt."""
        assert self.plan is not None
        signal_groups(self._living(), signal.SIGKILL)
        self._stop_listing()
        spared = self._not_leftovers()
        swept = kill_leftovers(self.plan.run_id, ancestor=os.getpid(), spared=spared, reap=self._reap)
        for worker in self.workers.values():
            self._drain(worker)
            for fd in (*worker.streams, worker.event_fd):
                self.descriptors.close(fd)
        # Last, when nothing of the attempt is left: the launcher starts the next one after this.
        self.send(Done(self._host(), swept, not self.leaving, time.time()))
        self.workers.clear()
        self.ended = self.leaving
        if not self.ended:
            self._await_plan()


def main() -> NoReturn:
    """Run the agent under its watchdog, and end at once: the launcher waits for it."""
    watchdog = fork_under_watchdog()
    adopt_orphans()
    try:
        code = Agent(watchdog).run()
    except MissingField as error:
        text = f"the launcher's zlaunch sends {error}: install the same zlaunch here and there"
        print(text, file=sys.stderr, flush=True)
        code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    os._exit(code)


if __name__ == "__main__":
    main()
