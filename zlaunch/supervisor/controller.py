"""Run a plan on agents that are there: follow their events, stop them, and say how it ended.

Reader threads (one a node) fill a queue, the main thread empties it. Every wait has an end, and a signal
puts something into the queue, so that it ends at once.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, cast

from zlaunch.plan.plan import Plan, shown_host
from zlaunch.supervisor import run_folder
from zlaunch.supervisor.debugger import advice
from zlaunch.supervisor.end import End
from zlaunch.supervisor.hang import HangWatch
from zlaunch.supervisor.nodes import SLOW_S, AgentConnection, Heartbeat, HeartbeatTimeout, LostNodeProcesses
from zlaunch.supervisor.provenance import Provenance
from zlaunch.supervisor.run_files import RunFiles
from zlaunch.supervisor.step_signal import STEP_SIGNAL
from zlaunch.supervisor.verdict import Outcome, Verdict
from zlaunch.system.events import Event, Output
from zlaunch.system.messages import (
    ANSWERS,
    NOTHING_SAVES,
    AgentEvent,
    AgentStarted,
    Damaged,
    Debugger,
    Done,
    Exited,
    Failed,
    FromScript,
    Kill,
    ListPackages,
    MadeEngine,
    Metrics,
    Notice,
    OnlyRecorded,
    Other,
    Packages,
    Pong,
    Raised,
    SaveAsked,
    Saved,
    Signal,
    Signalled,
    SnapshotTaken,
    Spawned,
    StandsStill,
    Start,
    Stop,
    Stopping,
    decode_worker_event,
    encode_event,
)
from zlaunch.system.processes import PASSED_SIGNALS, Process, adopt_orphans, kill_leftovers, signal_name
from zlaunch.view.bottleneck import what_bounds
from zlaunch.view.console import Console

# -- signal wakeup ----------------------------------------------------------------------------------
#
# Wake the main thread when a signal has come to another thread of this process.


class SignalWakeup:
    """Calls a function after each signal, from a thread of its own.

    The kernel may give a signal to any thread (after SIGSTOP and SIGCONT it often does). Python then runs the
    handler in the main thread, but only once that goes on: a wait for a queue would last to its end.
    """

    def __init__(self, wake: Callable[[], object]) -> None:
        """Begin. Call it in the main thread."""
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        threading.Thread(target=self._run, args=(self._reader, wake), daemon=True).start()

    @staticmethod
    def _run(reader: int, wake: Callable[[], object]) -> None:
        while os.read(reader, 512):
            wake()
        os.close(reader)

    def close(self) -> None:
        """End the thread and give back what was set before."""
        signal.set_wakeup_fd(self._before)
        os.close(self._writer)


# -- controller -------------------------------------------------------------------------------------


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_OUTPUT_IN_FLIGHT = 256
"""Chunks of output between reader threads and the main thread; more wait in the agent and the pipes."""
_PATIENCE_S = 0.3
"""Seconds within which a second signal is taken for the first one."""
_MARGIN_S = 6.0
"""Seconds beyond the grace period: for settling, sweeping, a slow machine."""
_LONGEST_WAIT_S = 60.0
_WAITED_S = 1.0
"""Seconds between two words about a slow start; the console decides which ones are shown."""
_PAUSE_SENT_S = 0.5
"""Seconds in which the threads of ssh connections send the word before the process stands still."""


class Eof(NamedTuple):
    """Tells that nothing more comes from an agent."""


class Wake(NamedTuple):
    """Ends a wait of the main thread."""


Received = AgentEvent | HeartbeatTimeout | Eof | Wake
_RECORDED = frozenset(
    (AgentStarted, Spawned, Exited, Notice, Failed, Signalled, Stopping, Done, Other, *ANSWERS)
)
"""Events that go into events.jsonl as they come. Handlers write others: those of scripts, some answers."""


class Controller:
    """Runs one attempt on agents that have been started."""

    def __init__(
        self,
        plan: Plan,
        console: Console,
        links: Sequence[AgentConnection],
        *,
        hang_timeout_s: float = 0.0,
        log_bytes: int | None = None,
        attempt: int = 0,
        regroups: Callable[[], bool] = lambda: False,
        provenance: Provenance | None = None,
        save_asked: Callable[[], bool] = lambda: False,
    ) -> None:
        """Take the plan and started agents. `regroups` tells whether another attempt with more nodes may
        begin as soon as the run has saved; `save_asked`, whether an earlier signal asks the workers to save.
        """
        self.regroups = regroups
        self.regrouping = False
        self.provenance = provenance
        self.plan = plan
        self.log_bytes = log_bytes
        self.console = console
        self.links = links
        self.attempt = attempt
        self.queue: queue.SimpleQueue[tuple[int, Received]] = queue.SimpleQueue()
        self.room = threading.BoundedSemaphore(_OUTPUT_IN_FLIGHT)
        self.heartbeat = Heartbeat(links, plan.heartbeat_s, self.queue)
        self.hosts = {worker.rank: node.host for node in plan.nodes for worker in node.workers}
        self.shown_hosts = {rank: shown_host(host) for rank, host in self.hosts.items()}
        self.hang = HangWatch(hang_timeout_s, self.shown_hosts)
        self.open_nodes = set(range(len(links)))
        self.waiting: set[int] = set()
        """Nodes whose agents have ended this attempt, and wait for the next one."""
        self.verdict = Verdict(plan, console)
        self.sessions: dict[int, Process] = {}
        """The workers of this machine that have not ended, by rank."""
        self.started: dict[int, list[Process]] = {index: [] for index in range(len(links))}
        """The agent and the workers of each node, as far as they have been reported."""
        self.pid_namespaces: dict[int, int] = {}
        self.running = set(self.hosts)
        """Ranks whose end has not been reported."""
        self.gone: set[int] = set()
        """Nodes whose agents are gone without a word, or silent."""
        self.starting = set(self.hosts)
        self.started_at = time.monotonic()
        self.wait_told_at = self.started_at + SLOW_S - _WAITED_S
        self.signum = 0
        self.signalled_at = 0.0
        self.save_asked = False
        """True once the workers must save and stop."""
        self.save_asked_before = save_asked
        """Returns True if they must because of a signal that came before this controller handled signals."""
        self.acts_on_save = False
        """Whether the script or its engine saves when it is asked to, as rank 0 says."""
        self.has_saved_since = False
        """Whether it has saved since it was asked to, or a signal has stopped it."""
        self.has_told_unsaved = False
        self.last_saved: tuple[object, ...] = ()
        self.has_engine = False
        """Whether the script has made an engine."""
        self.deadline = float("inf")
        self.run_dir = Path(plan.run_dir)
        self.progress = console.progress
        # Event type -> handler, called by `_on_event` (and by `_on_script` for what workers report).
        self.handlers: Mapping[type, Callable[[int, Any], None]] = {
            Output: self._on_output,
            FromScript: self._on_script,
            Pong: self._on_pong,
            HeartbeatTimeout: self._on_heartbeat_timeout,
            Damaged: self._on_damaged,
            Eof: self._on_eof,
            Wake: self._ignore,
            AgentStarted: self._on_agent_started,
            Spawned: self._on_spawned,
            Packages: self._on_packages,
            Notice: self._on_notice,
            Exited: self._on_exited,
            Failed: self._on_failed,
            Signalled: self._ignore,
            Stopping: self._on_stopping,
            Done: self._on_done,
            Other: self._ignore,
            **dict.fromkeys(ANSWERS, self._ignore),
            Raised: self._on_raised,
            Metrics: self._on_metrics,
            MadeEngine: self._on_made_engine,
            StandsStill: self._on_standing,
            SaveAsked: self._on_save_asked,
            Saved: self._on_saved,
            SnapshotTaken: self._on_snapshot,
            Debugger: self._on_debugger,
            OnlyRecorded: self._ignore,
        }
        """Says what to do at each kind of event."""

    def run(self) -> Outcome:
        """Hand out the plan, follow the run to its end, and return its outcome."""
        self.files = RunFiles(
            self.run_dir, self.hosts, self.console.error, goes_on=self.attempt > 0, log_bytes=self.log_bytes
        )
        self.files.plan(self.plan)
        wakeup = SignalWakeup(lambda: self.queue.put((-1, Wake())))
        taken = (*STOP_SIGNALS, *PASSED_SIGNALS, signal.SIGTSTP)
        handlers = {signum: signal.getsignal(signum) for signum in taken}
        for signum in STOP_SIGNALS:
            if signum != signal.SIGHUP or handlers[signum] is not signal.SIG_IGN:  # nohup stays nohup
                signal.signal(signum, self._on_signal)
        for signum in PASSED_SIGNALS:
            signal.signal(signum, self._pass_on)
        signal.signal(signal.SIGTSTP, self._on_suspend)
        run_folder.started(self.plan, self.attempt)
        try:
            self._hand_out()
            # For the case that an agent and its watchdog are killed together; the workers start meanwhile.
            adopt_orphans()
            self._follow()
        finally:
            self.heartbeat.stop()
            self._finish()
            for signum, handler in handlers.items():
                signal.signal(signum, handler)
            wakeup.close()
            self.files.event({"type": "outcome", "errors": self.verdict.errors})
            self.files.close()
            self.console.close()
        outcome = self.verdict.outcome(
            self.signum,
            save_asked=self.save_asked,
            saved=self.has_saved_since,
            regroups=self.regrouping,
            vanished=len(self.gone) == len(self.links),
        )
        if outcome.code == 0:  # after a failure the user looks for its cause
            self._tell_of_steps()
        elif self.save_asked and self.has_engine and not (self.has_saved_since or outcome.saved):
            self._tell_unsaved(signal.SIGUSR1)
        return outcome

    def _tell_unsaved(self, signum: int) -> None:
        """Say once that nothing acts on a signal that asks the workers to save."""
        if not self.acts_on_save and not self.has_told_unsaved:
            self.has_told_unsaved = True
            self.console.message(f"{signal_name(signum)}: {NOTHING_SAVES}")

    def _tell_of_steps(self) -> None:
        if bound := what_bounds(self.progress, self.shown_hosts):
            self.console.message(bound)
        profiled = any(
            worker.rank == 0 and "ZLAUNCH_PROFILE" in worker.env
            for node in self.plan.nodes
            for worker in node.workers
        )
        if profiled and not self.has_engine:
            self.console.message(
                "--profile has written no trace: it records steps of an engine, and the script made none. "
                "Call zlaunch.initialize, or use torch.profiler in the script"
            )

    # -- the run -------------------------------------------------------------------------------

    def _hand_out(self) -> None:
        hosts = [node.host for node in self.plan.nodes]
        nodes = self.plan.part.node_count if self.plan.part else len(hosts)
        now = time.time()
        start: Event = {"type": "start", "attempt": self.attempt, "hosts": hosts, "nodes": nodes, "time": now}
        self.files.event(start)
        self.progress.take(start)
        self.console.place({w.rank: w.local_rank for node in self.plan.nodes for w in node.workers})
        for index, link in enumerate(self.links):
            threading.Thread(target=self._read, args=(index, link), daemon=True).start()
            link.send(Start(asdict(self.plan.for_node(index)), self.heartbeat.first_grant(index)))
            if self.signum:
                self._stop()  # this agent had no plan yet when the signal came
        self.heartbeat.start()

    def _read(self, index: int, link: AgentConnection) -> None:
        """Put one agent's events of this attempt into the queue. Each reader thread runs this."""
        own = {worker.rank for worker in self.plan.nodes[index].workers}
        try:
            for event in link.events:
                self.heartbeat.heard(index, event)
                if isinstance(event, (Output, FromScript)) and event.rank not in own:
                    event = Damaged(f"there is no rank {event.rank} on this node")
                if isinstance(event, Output):
                    # While the console takes nothing, answers wait behind output: not the node's silence.
                    with self.heartbeat.excused(index):
                        self.room.acquire()
                self.queue.put((index, event))
                if isinstance(event, Damaged) or (isinstance(event, Done) and event.stays):
                    break
        finally:
            self.queue.put((index, Eof()))  # after the end of the attempt it means nothing

    def _follow(self) -> None:
        while self.open_nodes:
            if self.deadline <= time.monotonic():
                for index in self.open_nodes:
                    self._lose(
                        index,
                        f"did not stop in time (last heard {self.heartbeat.silence_s(index):.0f} s ago)",
                    )
                return
            try:
                index, event = self.queue.get(timeout=self._wait_s())
            except queue.Empty:
                self._on_quiet()
            else:
                self._on_event(index, event)
            self.console.tick()
            stop_at = self.verdict.stop_at
            if stop_at is not None and self.deadline == float("inf") and time.monotonic() >= stop_at:
                self._stop_after_failure()

    def _wait_s(self) -> float:
        """Return the seconds in which nothing can become due. A signal that comes now wakes the wait."""
        moments = [self.deadline]
        if self.verdict.stop_at is not None and self.deadline == float("inf"):
            moments.append(self.verdict.stop_at)
        if self.starting:
            moments.append(self.wait_told_at + _WAITED_S)
        left = min(moments) - time.monotonic()
        return max(0.0, min(left, self.hang.next_s(), self.console.next_tick_s(), _LONGEST_WAIT_S))

    def _on_quiet(self) -> None:
        """Do what is due when nothing has happened for a while."""
        now = time.monotonic()
        if self.starting and now >= self.wait_told_at + _WAITED_S:
            self.wait_told_at = now
            self.console.waiting(self._still_starting(), now - self.started_at)
        if self.hang.due():
            self._pass_on(signal.SIGUSR2, None)
        elif self.hang.over() and self.deadline == float("inf"):
            self.verdict.errors.append(self.hang.report())
            self._stop()

    def _still_starting(self) -> str:
        hosts = [n.host for n in self.plan.nodes if any(w.rank in self.starting for w in n.workers)]
        first = shown_host(hosts[0])
        where = first if len(hosts) == 1 else f"{first} and {len(hosts) - 1} more"
        what = self.plan.preload[0] if self.plan.preload else "the workers' start"
        return f"{what} on {where}"

    def _stop_after_failure(self) -> None:
        if len(self.sessions) or len(self.plan.nodes) > 1:
            self.console.message(f"a worker failed; stopping the others (up to {self.plan.grace_s:g} s)")
        self._stop()

    def _lose(self, index: int, how: str) -> None:
        """Give up a node; its agent, if it lives, stops its workers when it hears nothing."""
        link = self.links[index]
        self.gone.add(index)
        self.verdict.errors.append(f"{shown_host(link.host)} {how}")
        self.verdict.lost.add(link.host)
        self._note_left(index)
        self.files.event({"type": "lost", "host": link.host, "why": how})
        link.transport.kill()

    def _note_left(self, index: int) -> None:
        """Note what a lost node may still run: nothing where all its workers are known to be dead, or where
        this process itself ends what is left.
        """
        link = self.links[index]
        workers = self.plan.nodes[index].workers
        ends = self.heartbeat.give_up(index)
        if not link.transport.local and any(worker.rank in self.running for worker in workers):
            namespace = self.pid_namespaces.get(index, 0)
            self.verdict.left[link.host] = LostNodeProcesses(ends, tuple(self.started[index]), namespace)

    # -- events --------------------------------------------------------------------------------

    def _on_event(self, index: int, event: Received) -> None:
        if type(event) in _RECORDED:
            self.files.event(encode_event(cast("AgentEvent", event)))
        self.handlers[type(event)](index, event)

    def _ignore(self, index: int, event: object) -> None:
        """Do nothing: the event is only written down, or wakes the main thread."""

    def _on_output(self, _index: int, event: Output) -> None:
        """Write and show what a rank has printed."""
        self.room.release()
        rank, stream, data = event
        self.hang.output(rank, data)
        self.files.output(rank, stream, data)
        self.verdict.output(rank, data)
        self.console.output(rank, stream, data)

    def _on_script(self, index: int, event: FromScript) -> None:
        """Handle what a script has reported."""
        record = {**event.event, "rank": event.rank, "host": self.hosts[event.rank]}
        self.files.event(record)
        decoded = decode_worker_event(record)
        if isinstance(decoded, (Metrics, MadeEngine, StandsStill)):
            self.progress.take(record)
        self.handlers[type(decoded)](index, decoded)

    # of the connection

    def _on_pong(self, index: int, event: Pong) -> None:
        """Write an answer down now and then."""
        if self.heartbeat.worth_noting(index):
            self.files.event(encode_event(event))

    def _on_heartbeat_timeout(self, index: int, event: HeartbeatTimeout) -> None:
        """Give up a node that no longer answers: see Note [Silent node] in `nodes.py`."""
        self._lose_open(
            index,
            f"fell silent: nothing heard for {event.silence_s:.0f} s "
            "(network cut, power loss, or a machine that stands still)",
        )

    def _on_damaged(self, index: int, event: Damaged) -> None:
        """Give up a node whose words cannot be read."""
        self._lose_open(
            index,
            f"sends damaged data: {event.why}. Another program may write to the agent's output, "
            "such as one that a shell's start files leave in the background",
        )

    def _lose_open(self, index: int, how: str) -> None:
        """Give up a node that takes part, and stop the others."""
        if index in self.open_nodes:
            self.open_nodes.discard(index)
            self._lose(index, how)
            self._stop()

    def _on_eof(self, index: int, _event: Eof) -> None:
        """Record that an agent is gone. Without its "done" it died, and its workers with it."""
        if index not in self.open_nodes:
            return
        self.open_nodes.discard(index)
        self.gone.add(index)
        transport = self.links[index].transport
        code = transport.close(timeout_s=2.0)
        if transport.local:
            how = "is stuck" if code is None else signal_name(-code) if code < 0 else f"exit code {code}"
        else:
            how = f"exit code {code}" if code is not None and code >= 0 else "killed, or the node went down"
            self.verdict.lost.add(transport.host)
            self.verdict.died.add(transport.host)
            self._note_left(index)
        text = f"agent on {shown_host(transport.host)} died ({how})"
        if said := transport.diagnostics():
            text += "\n  it said: " + said.replace("\n", "\n  ")
        self.verdict.errors.append(text)
        died = transport.local and code is not None and code < 0
        self.verdict.agent_code = 128 - code if died and code is not None else 1
        self._stop()

    # of agents

    def _on_agent_started(self, index: int, event: AgentStarted) -> None:
        """Note the agent's process."""
        self.started[index].append(Process(event.pid, event.start_ticks))
        self.pid_namespaces[index] = event.pid_namespace

    def _on_spawned(self, index: int, event: Spawned) -> None:
        """Note a worker's process. Once all have started, look at what they run."""
        self.starting.discard(event.rank)
        if not self.starting:
            self.console.waiting("", 0.0)
            self._on_all_started()
            if self.save_asked or self.save_asked_before():  # who started after the signal has not got it
                self._pass_on(signal.SIGUSR1, None)
        process = Process(event.pid, event.start_ticks)
        self.started[index].append(process)
        if self.links[index].transport.local:
            self.sessions[event.rank] = process

    def _on_all_started(self) -> None:
        """Find out what the run is made of, where this launcher has rank 0."""
        for link, node in zip(self.links, self.plan.nodes, strict=True):
            if self.provenance is not None and any(worker.rank == 0 for worker in node.workers):
                self.provenance.workers_started(partial(link.send, ListPackages()))

    def _on_packages(self, _index: int, event: Packages) -> None:
        """Add the packages to the record of the run."""
        if self.provenance is not None:
            self.provenance.take_packages(event)

    def _on_notice(self, _index: int, event: Notice) -> None:
        """Show a message."""
        self.console.message(event.message)

    def _on_exited(self, _index: int, event: Exited) -> None:
        """Note that a worker has ended; the verdict says what that means."""
        self.sessions.pop(event.rank, None)  # the agent ends what it has left; its id is free now
        self.running.discard(event.rank)
        self.verdict.exit(event)
        self.hang.exited(event)

    def _on_failed(self, index: int, event: Failed) -> None:
        """Note what an agent could not do."""
        self.verdict.errors.append(event.message)
        if event.refused:
            self.verdict.refused_by.append(self.links[index].host)

    def _on_stopping(self, _index: int, event: Stopping) -> None:
        """Bound the time of a node that stops. Where it was not told to, stop the others."""
        if self.deadline == float("inf"):
            if not self.verdict.failures and not self.verdict.errors:
                self.verdict.errors.append(f"the run on {shown_host(event.host)} was stopped: {event.why}")
                self.verdict.agent_code = 128 + signal.SIGTERM
            if len(self.open_nodes) > 1:
                self._stop()
        self._bound(event.grace_s)

    def _on_done(self, index: int, event: Done) -> None:
        """Close a node's part of the attempt."""
        self.starting -= {worker.rank for worker in self.plan.nodes[index].workers}
        self.open_nodes.discard(index)
        if event.stays:
            self.waiting.add(index)
        if event.swept and not self.signum and not self.verdict.failures:
            host = self.links[index].transport.host
            plural = "processes" if event.swept > 1 else "process"
            why = "a run ends with its workers"
            self.console.message(
                f"{host}: ended {event.swept} {plural} that the script had left running: {why}"
            )

    # of workers

    def _on_raised(self, _index: int, event: Raised) -> None:
        """Judge an uncaught exception."""
        self.verdict.exception(event)

    def _on_metrics(self, _index: int, event: Metrics) -> None:
        """Show the numbers of a step."""
        self.hang.activity()
        self.verdict.has_progressed = True
        self.console.metrics(event)

    def _on_made_engine(self, _index: int, event: MadeEngine) -> None:
        """Record the engine's batch."""
        self.has_engine = True
        run_folder.made_engine(self.plan, self.attempt, event)
        self.hang.activity()

    def _on_standing(self, _index: int, event: StandsStill) -> None:
        """Note where a rank waits."""
        self.hang.standing(event)

    def _on_save_asked(self, _index: int, event: SaveAsked) -> None:
        """Note whether the script saves when it is asked to."""
        self.acts_on_save = self.acts_on_save or event.acts is True
        # With time to save, a worker takes SIGTERM for the request, also where a failure of another stops it.
        asked = self.save_asked or self.save_asked_before() or bool(self.signum)
        if asked or not self.verdict.failures:
            self._tell_unsaved(self.signum or signal.SIGUSR1)

    def _on_saved(self, _index: int, event: Saved) -> None:
        """Record a checkpoint. A node that is back may take part from here on."""
        self.has_saved_since = self.save_asked or bool(self.signum)
        self.hang.activity()
        self.verdict.may_have_saved = self.verdict.has_progressed = True
        run_folder.saved(self.plan, event)
        saved = (event.tag, event.folder, event.step)
        if saved != self.last_saved:  # the Trainer saves twice at a step of stage 3
            self.console.message(f"checkpoint {event.tag} is in {event.folder}")
        self.last_saved = saved
        self._regroup()

    def _on_snapshot(self, _index: int, _event: SnapshotTaken) -> None:
        """Let a node that is back take part from here on."""
        self._regroup()

    def _on_debugger(self, _index: int, event: Debugger) -> None:
        """Say where a rank waits for a debugger, also with --quiet, and that one has come."""
        if event.attached:
            self.console.message(f"a debugger is attached to rank {event.rank}")
        else:
            self.console.text(advice(event.rank, shown_host(event.host), event.address, event.port))

    # -- ending --------------------------------------------------------------------------------

    def _regroup(self) -> None:
        """End the attempt if a node that was gone is back: what it has done is saved."""
        if not self.regrouping and self.deadline == float("inf") and self.regroups():
            self.regrouping = True
            self._stop()

    def _bound(self, grace_s: float) -> None:
        self.deadline = min(self.deadline, time.monotonic() + grace_s + _MARGIN_S)

    def _stop(self) -> None:
        for link in self.links:
            link.send(Stop(self.plan.grace_s))
        self._bound(self.plan.grace_s)
        self.queue.put((-1, Wake()))

    def _on_suspend(self, _signum: int, _frame: FrameType | None) -> None:
        """Stop this process as Ctrl-Z asks; the nodes are told, so that they do not take it for dead."""
        self.heartbeat.pause()
        self.console.step_aside()
        time.sleep(_PAUSE_SENT_S if self.heartbeat.watches else 0.0)
        os.kill(os.getpid(), signal.SIGSTOP)
        self.heartbeat.resume()

    def _on_signal(self, signum: int, _frame: FrameType | None) -> None:
        """Stop from the handler, not from the loop: the main thread may be stuck at a halted terminal."""
        is_slurms = STEP_SIGNAL.is_expected(signum)
        if self.signum and (is_slurms or time.monotonic() - self.signalled_at < _PATIENCE_S):
            return  # `timeout` and terminals signal a process and its group, which is not impatience
        if self.signum:
            for link in self.links:
                link.send(Kill())
                link.transport.kill()
            self._kill_leftovers()
            run_folder.ended(self.plan.run_dir, End.of_code(128 + self.signum))
            os._exit(128 + self.signum)
        self.signum = signum
        self.signalled_at = time.monotonic()
        self._stop()
        what = f"{signal_name(signum)}: stopping the workers (up to {self.plan.grace_s:g} s)"
        self.queue.put((-1, Notice(f"{what}; a second one kills them at once")))

    def _pass_on(self, signum: int, _frame: FrameType | None) -> None:
        """Send a signal to every worker; a program that is not Python would die of it."""
        if self.plan.python:
            if signum == signal.SIGUSR2:
                self.queue.put((-1, Notice("asked for the stacks of all ranks (SIGUSR2)")))
            if signum == signal.SIGUSR1 and not self.save_asked:
                self.save_asked = True
                self.queue.put((-1, Notice("SIGUSR1: asked the workers to save")))
            self.verdict.may_have_saved = self.verdict.may_have_saved or self.save_asked
            for link in self.links:
                link.send(Signal(int(signum)))

    def _kill_leftovers(self) -> None:
        """Leave no process of the run on this machine, where its agent is gone."""
        if any(link.transport.local for index, link in enumerate(self.links) if index not in self.waiting):
            spared = () if self.provenance is None else self.provenance.pids
            kill_leftovers(
                self.plan.run_id, tuple(self.sessions.values()), ancestor=os.getpid(), spared=spared
            )

    def _finish(self) -> None:
        """Leave no process of the run on this machine and no agent, but those that wait for another attempt,
        whatever happened before.
        """
        parted = [link for index, link in enumerate(self.links) if index not in self.waiting]
        threads = [threading.Thread(target=self._part, args=(link,)) for link in parted]
        for thread in threads:
            thread.start()
        for thread in threads:  # an error in one of them keeps nothing else from being ended
            thread.join()
        self._kill_leftovers()
        self._take_rest()

    def _part(self, link: AgentConnection) -> None:
        if self.open_nodes:
            link.transport.kill()
        link.end()

    def _take_rest(self) -> None:
        """Handle the events that the readers still had when the run was cut short."""
        while True:
            try:
                index, event = self.queue.get_nowait()
            except queue.Empty:
                return
            if isinstance(event, (Output, Exited, FromScript)):
                self._on_event(index, event)
