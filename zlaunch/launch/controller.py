"""Runs a plan on agents that are there: follows their events, stops them, and says how it ended.

Reader threads (one a node) fill a queue, the main thread empties it. Every wait has an end.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Literal

from zlaunch.launch import failure as failures
from zlaunch.launch import record
from zlaunch.launch.events import Event, encode
from zlaunch.launch.failure import Failure
from zlaunch.launch.fleet import Link
from zlaunch.launch.monitor import HangWatch, Heartbeat
from zlaunch.launch.plan import Plan
from zlaunch.launch.processes import PASSED_SIGNALS, sweep
from zlaunch.view.console import Console

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_OUTPUT_IN_FLIGHT = 256
"""Chunks of output between reader threads and the main thread; more wait in the agent and the pipes."""
_TAIL_BYTES = 1 << 14
_PATIENCE_S = 0.3
"""A second signal within this time is taken for the first one."""
_MARGIN_S = 6.0
"""Beyond the grace period: settling, sweeping, a slow machine."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    code: int
    """The launcher's exit code."""
    signum: int = 0
    """The signal that the launcher was stopped by."""
    lost: frozenset[str] = frozenset()
    """Nodes that are gone."""
    port_taken: bool = False
    """Nothing was wrong but the rendezvous port."""
    save_asked: bool = False
    """The workers were asked to save and stop."""
    refused: bool = False
    """Nothing was started: the nodes cannot run this, and trying again would not help."""


class Controller:
    """One attempt at a run, on agents that have been started."""

    def __init__(
        self,
        plan: Plan,
        console: Console,
        links: Sequence[Link],
        *,
        heartbeat_s: float = 0.0,
        hang_timeout_s: float = 0.0,
        attempt: int = 0,
    ) -> None:
        self.plan = plan
        self.console = console
        self.links = links
        self.attempt = attempt
        self.queue: queue.SimpleQueue[tuple[int, Event]] = queue.SimpleQueue()
        self.room = threading.BoundedSemaphore(_OUTPUT_IN_FLIGHT)
        self.heartbeat = Heartbeat(links, heartbeat_s, self.queue)
        self.hang = HangWatch(hang_timeout_s)
        self.open_nodes = set(range(len(links)))
        self.lost: set[str] = set()
        self.sessions: set[int] = set()
        self.failures: dict[int, Failure] = {}
        self.tails: dict[int, bytes] = {}
        self.errors: list[str] = []
        self.agent_code: int | None = None
        self.signum = 0
        self.signalled_at = 0.0
        self.save_asked = False
        self.saved = False
        self.deadline = float("inf")
        self.run_dir = Path(plan.run_dir)

    def run(self) -> Outcome:
        """Hand out the plan, follow, end."""
        logs = self.run_dir / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        (self.run_dir / "plan.json").write_text(self.plan.to_json(indent=1) + "\n")
        ranks = [worker.rank for node in self.plan.nodes for worker in node.workers]
        mode = "ab" if self.attempt else "wb"
        self.logs = {rank: self.log_path(rank).open(mode, buffering=0) for rank in ranks}
        self.event_log = (self.run_dir / "events.jsonl").open(mode, buffering=0)
        handlers = {signum: signal.getsignal(signum) for signum in (*_STOP_SIGNALS, *PASSED_SIGNALS)}
        for signum in _STOP_SIGNALS:
            if signum != signal.SIGHUP or handlers[signum] is not signal.SIG_IGN:  # nohup stays nohup
                signal.signal(signum, self._on_signal)
        for signum in PASSED_SIGNALS:
            signal.signal(signum, self._pass_on)
        record.started(self.plan, self.attempt)
        try:
            self._hand_out()
            self._follow()
        finally:
            self.heartbeat.stop()
            self._finish()
            for signum, handler in handlers.items():
                signal.signal(signum, handler)
            for file in (*self.logs.values(), self.event_log):
                file.close()
            self.console.close()
        return self._verdict()

    def log_path(self, rank: int) -> Path:
        """Where a rank's output goes."""
        return self.run_dir / "logs" / f"rank_{rank:05d}.log"

    # -- the run -------------------------------------------------------------------------------

    def _hand_out(self) -> None:
        self._log(
            {"type": "start", "attempt": self.attempt, "hosts": [node.host for node in self.plan.nodes]}
        )
        for index, link in enumerate(self.links):
            threading.Thread(target=self._read, args=(index, link), daemon=True).start()
            link.transport.send(_as_event(self.plan.for_node(index)))
            if self.signum:
                self._stop()  # this agent had no plan yet when the signal came
        self.heartbeat.start()

    def _read(self, index: int, link: Link) -> None:
        """A reader thread's life."""
        try:
            for event in link.events:
                self.heartbeat.heard(index)
                if event.get("type") == "output":
                    # While the console takes nothing, answers wait behind output: not the node's silence.
                    with self.heartbeat.excused(index):
                        self.room.acquire()
                self.queue.put((index, event))
        finally:
            self.queue.put((index, {"type": "eof"}))

    def _follow(self) -> None:
        while self.open_nodes:
            left = self.deadline - time.monotonic()
            if left <= 0:
                for index in self.open_nodes:
                    self._lose(
                        index,
                        f"did not stop in time (last heard {self.heartbeat.silence_s(index):.0f} s ago)",
                    )
                return
            try:
                index, event = self.queue.get(timeout=min(left, self.hang.next_s(), 60.0))
            except queue.Empty:
                self._on_quiet()
                continue
            self._on_event(index, event)

    def _on_quiet(self) -> None:
        """Nothing has happened for a while."""
        if self.hang.due():
            self._pass_on(signal.SIGUSR2, None)
        elif self.hang.over() and self.deadline == float("inf"):
            self.errors.append(
                f"hang: no rank has written anything for {self.hang.timeout_s:g} s; what each was doing:\n"
                + self.hang.stacks()
            )
            self._stop()

    def _lose(self, index: int, how: str) -> None:
        """A node is of no more use; its agent, if it lives, stops its workers when it hears nothing."""
        link = self.links[index]
        self.errors.append(f"{link.host} {how}")
        self.lost.add(link.host)
        self._log({"type": "lost", "host": link.host, "why": how})
        link.transport.kill()

    def _log(self, event: Event) -> None:
        try:
            self.event_log.write(encode({**event, "time": event.get("time", time.time())}))
        except OSError as error:  # a full disk must not end the training
            self.console.message(f"cannot write {self.run_dir / 'events.jsonl'}: {error.strerror}")

    def _on_event(self, index: int, event: Event) -> None:
        kind = event.get("type")
        if kind == "output":
            self.room.release()
            self._on_output(event)
            return
        if kind == "eof":
            self._on_eof(index)
            return
        if kind == "silent":
            if index in self.open_nodes:
                self.open_nodes.discard(index)
                self._lose(
                    index,
                    f"fell silent: nothing heard for {event['silence_s']:.0f} s "
                    "(network cut, power loss, or a machine that stands still)",
                )
                self._stop()
            return
        if kind == "pong" and not self.heartbeat.worth_noting(index):
            return
        self._log(event)
        if kind == "spawn":
            if self.links[index].transport.local:
                self.sessions.add(event["pid"])
        elif kind == "metrics":
            self.hang.activity()
            self.console.metrics(event)
        elif kind == "checkpoint":
            self.hang.activity()
            record.saved(self.plan, event)
            self.console.message(f"checkpoint {event.get('tag')} is in {event.get('folder')}")
        elif kind in ("exception", "exit"):
            self._on_worker_end(event)
        elif kind == "error":
            self.errors.append(event["message"])
        elif kind == "stopping":
            if self.deadline == float("inf"):
                self._on_stop_by_agent(event)
            self._bound(event["grace_s"])
        elif kind == "done":
            self.open_nodes.discard(index)

    def _on_stop_by_agent(self, event: Event) -> None:
        """An agent ends the run without having been told to; the other nodes follow."""
        if self.failures:
            self.console.message(f"a worker failed; stopping the others (up to {event['grace_s']:g} s)")
        elif not self.errors:
            self.errors.append(f"the run on {event['host']} was stopped: {event['why']}")
            self.agent_code = 128 + signal.SIGTERM
        if len(self.open_nodes) > 1:
            self._stop()

    def _on_output(self, event: Event) -> None:
        rank = event["rank"]
        self.hang.output(rank, event["text"])
        data = event["text"].encode("utf-8", "surrogateescape")
        try:
            self.logs[rank].write(data)
        except OSError as error:  # a full disk must not end the training
            self.console.message(f"cannot write {self.log_path(rank)}: {error.strerror}")
        self.tails[rank] = (self.tails.get(rank, b"") + data)[-_TAIL_BYTES:]
        self.console.output(rank, event["stream"], data)

    def _on_worker_end(self, event: Event) -> None:
        rank, known = event["rank"], self.failures.get(event["rank"])
        if event["type"] == "exception":
            text = str(event.get("exception", ""))
            when = float(event.get("time", time.time()))
            self.failures.setdefault(rank, Failure(rank, event["host"], when, "exception", exception=text))
            return
        code = event["returncode"]
        if event["after_stop"]:
            return  # our own doing
        if code == failures.SAVED_CODE and self.plan.python and known is None:
            self.saved = True
            return
        if known is not None:
            self.failures[rank] = replace(known, returncode=code or None, reason=event["reason"])
        elif code != 0:
            kind: Literal["signal", "exit"] = "signal" if code < 0 else "exit"
            self.failures[rank] = Failure(
                rank, event["host"], event["time"], kind, returncode=code, reason=event["reason"]
            )

    def _on_eof(self, index: int) -> None:
        """An agent is gone. Without its "done" it died, and its workers with it."""
        if index not in self.open_nodes:
            return
        self.open_nodes.discard(index)
        transport = self.links[index].transport
        code = transport.close(timeout_s=2.0)
        if transport.local:
            how = (
                "is stuck"
                if code is None
                else failures.signal_name(-code)
                if code < 0
                else f"exit code {code}"
            )
        else:
            how = f"exit code {code}" if code is not None and code >= 0 else "killed, or the node went down"
            self.lost.add(transport.host)
        text = f"agent on {transport.host} died ({how})"
        if said := transport.diagnostics():
            text += "\n  it said: " + said.replace("\n", "\n  ")
        self.errors.append(text)
        self.agent_code = 128 - code if transport.local and code is not None and code < 0 else 1
        self._stop()

    # -- ending --------------------------------------------------------------------------------

    def _bound(self, grace_s: float) -> None:
        self.deadline = min(self.deadline, time.monotonic() + grace_s + _MARGIN_S)

    def _stop(self) -> None:
        for link in self.links:
            link.transport.send({"cmd": "stop", "grace_s": self.plan.grace_s})
        self._bound(self.plan.grace_s)

    def _on_signal(self, signum: int, _frame: FrameType | None) -> None:
        """Stop from here, not from the loop: the main thread may be stuck writing to a halted terminal."""
        if self.signum and time.monotonic() - self.signalled_at < _PATIENCE_S:
            return  # `timeout` and terminals signal a process and its group, which is not impatience
        if self.signum:
            for link in self.links:
                link.transport.send({"cmd": "kill"})
                link.transport.kill()
            self._sweep()
            os._exit(128 + self.signum)
        self.signum, self.signalled_at = signum, time.monotonic()
        self._stop()

    def _pass_on(self, signum: int, _frame: FrameType | None) -> None:
        """To every worker; a program that is not Python would die of it."""
        if self.plan.python:
            self.save_asked = self.save_asked or signum == signal.SIGUSR1
            for link in self.links:
                link.transport.send({"cmd": "signal", "signum": int(signum)})

    def _sweep(self) -> None:
        """Leave no process of the run on this machine, if there were any."""
        if any(link.transport.local for link in self.links):
            sweep(self.plan.run_id, self.sessions)

    def _finish(self) -> None:
        """Leave no agent and no process of the run on this machine, whatever happened before."""
        clean = not self.open_nodes
        threads = [threading.Thread(target=self._part, args=(link, clean)) for link in self.links]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._sweep()
        self._take_rest()

    @staticmethod
    def _part(link: Link, clean: bool) -> None:
        if not clean or link.transport.close(timeout_s=2.0) is None:
            link.transport.kill()
            link.transport.close(timeout_s=2.0)

    def _take_rest(self) -> None:
        """Whatever the readers still had when the run was cut short."""
        while True:
            try:
                index, event = self.queue.get_nowait()
            except queue.Empty:
                return
            if event.get("type") in ("output", "exit", "exception"):
                self._on_event(index, event)

    def _verdict(self) -> Outcome:
        """Say what went wrong, if anything."""
        lost = frozenset(self.lost)
        if self.signum:
            self.console.message(f"stopped by {failures.signal_name(self.signum)}")
            return Outcome(128 + self.signum, self.signum, lost, save_asked=self.save_asked)
        for error in self.errors:
            self.console.error(error)
        code = self.agent_code or (1 if self.errors else 0)
        port_taken = False
        if self.failures:
            first = failures.choose(self.failures.values())
            path = self.log_path(first.rank)
            print(failures.report(first, self._tail(first.rank), str(path)), file=sys.stderr)
            code = first.exit_code
            port_taken = failures.is_port_taken(first.exception)
        elif self.saved and not code:
            self.console.message("the run has saved, as it was asked to, and wants to be started again")
            return Outcome(failures.SAVED_CODE, 0, lost, save_asked=True)
        return Outcome(code, 0, lost, port_taken, self.save_asked)

    def _tail(self, rank: int) -> Sequence[str]:
        text = self.tails.get(rank, b"").decode("utf-8", "replace")
        return text.splitlines()[-failures.TAIL_LINES :]


def _as_event(plan: Plan) -> Event:
    from dataclasses import asdict

    return asdict(plan)
