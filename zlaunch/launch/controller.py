"""Runs a plan: starts the agents, follows their events, stops them, and says how it ended.

Reader threads (one a node) fill a queue, the main thread empties it. Every wait has an end.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Literal

from zlaunch.launch import failure as failures
from zlaunch.launch.events import Event, encode
from zlaunch.launch.failure import Failure
from zlaunch.launch.plan import Plan
from zlaunch.launch.processes import sweep
from zlaunch.launch.transports import Transport
from zlaunch.view.console import Console

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_OUTPUT_IN_FLIGHT = 256
"""Chunks of output between reader threads and the main thread; more wait in the agent and the pipes."""
_TAIL_BYTES = 1 << 14
_MARGIN_S = 6.0
"""Beyond the grace period: settling, sweeping, a slow machine."""


class Controller:
    """One run. `run` returns the exit code of the launcher."""

    def __init__(self, plan: Plan, console: Console, start: Callable[[int], Transport]) -> None:
        self.plan = plan
        self.console = console
        self.start = start
        """Starts the agent of node i."""
        self.queue: queue.SimpleQueue[tuple[int, Event]] = queue.SimpleQueue()
        self.room = threading.BoundedSemaphore(_OUTPUT_IN_FLIGHT)
        self.transports: list[Transport] = []
        self.open_nodes: set[int] = set()
        self.sessions: set[int] = set()
        self.failures: dict[int, Failure] = {}
        self.tails: dict[int, bytes] = {}
        self.errors: list[str] = []
        self.agent_code: int | None = None
        self.signum = 0
        self.deadline = float("inf")
        self.run_dir = Path(plan.run_dir)

    def run(self) -> int:
        """Start, follow, end."""
        logs = self.run_dir / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        (self.run_dir / "plan.json").write_text(self.plan.to_json(indent=1) + "\n")
        ranks = [worker.rank for node in self.plan.nodes for worker in node.workers]
        self.logs = {rank: self.log_path(rank).open("wb", buffering=0) for rank in ranks}
        self.event_log = (self.run_dir / "events.jsonl").open("wb", buffering=0)
        previous = {signum: signal.getsignal(signum) for signum in _SIGNALS}
        for signum in _SIGNALS:
            if signum != signal.SIGHUP or previous[signum] is not signal.SIG_IGN:  # nohup stays nohup
                signal.signal(signum, self._on_signal)
        try:
            self._start_agents()
            self._follow()
        finally:
            self._finish()
            for signum, handler in previous.items():
                signal.signal(signum, handler)
            for file in (*self.logs.values(), self.event_log):
                file.close()
            self.console.close()
        return self._verdict()

    def log_path(self, rank: int) -> Path:
        """Where a rank's output goes."""
        return self.run_dir / "logs" / f"rank_{rank:05d}.log"

    # -- the run -------------------------------------------------------------------------------

    def _start_agents(self) -> None:
        for index, node in enumerate(self.plan.nodes):
            try:
                transport = self.start(index)
            except OSError as error:
                self.errors.append(f"cannot start the agent on {node.host}: {error}")
                self._stop()
                return
            self.transports.append(transport)
            self.open_nodes.add(index)
            threading.Thread(target=self._read, args=(index, transport), daemon=True).start()
            transport.send(_as_event(self.plan.for_node(index)))
            if self.signum:
                self._stop()  # this agent was not there yet when the signal came

    def _read(self, index: int, transport: Transport) -> None:
        """A reader thread's life."""
        try:
            for event in transport.events():
                if event.get("type") == "output":
                    self.room.acquire()
                self.queue.put((index, event))
        finally:
            self.queue.put((index, {"type": "eof"}))

    def _follow(self) -> None:
        while self.open_nodes:
            left = self.deadline - time.monotonic()
            if left <= 0:
                self.errors.append("the agents did not end in time and were killed")
                return
            try:
                index, event = self.queue.get(timeout=min(left, 60.0))
            except queue.Empty:
                continue
            self._on_event(index, event)

    def _on_event(self, index: int, event: Event) -> None:
        kind = event.get("type")
        if kind == "output":
            self.room.release()
            self._on_output(event)
            return
        if kind == "eof":
            self._on_eof(index)
            return
        self.event_log.write(encode(event))
        if kind == "spawn":
            self.sessions.add(event["pid"])
        elif kind == "metrics":
            self.console.metrics(event)
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
        transport = self.transports[index]
        code = transport.close(timeout_s=2.0)
        how = "is stuck" if code is None else failures.signal_name(-code) if code < 0 else f"exit code {code}"
        text = f"agent on {transport.host} died ({how})"
        if said := transport.diagnostics():
            text += "\n  it said: " + said.replace("\n", "\n  ")
        self.errors.append(text)
        self.agent_code = 128 - code if code is not None and code < 0 else 1
        self._stop()

    # -- ending --------------------------------------------------------------------------------

    def _bound(self, grace_s: float) -> None:
        self.deadline = min(self.deadline, time.monotonic() + grace_s + _MARGIN_S)

    def _stop(self) -> None:
        for transport in self.transports:
            transport.send({"cmd": "stop", "grace_s": self.plan.grace_s})
        self._bound(self.plan.grace_s)

    def _on_signal(self, signum: int, _frame: FrameType | None) -> None:
        """Stop from here, not from the loop: the main thread may be stuck writing to a halted terminal."""
        if self.signum:
            for transport in self.transports:
                transport.kill()
            sweep(self.plan.run_id, self.sessions)
            os._exit(128 + self.signum)
        self.signum = signum
        self._stop()

    def _finish(self) -> None:
        """Leave no agent and no process of the run on this machine, whatever happened before."""
        clean = not self.open_nodes
        for transport in self.transports:
            if not clean or transport.close(timeout_s=2.0) is None:
                transport.kill()
                transport.close(timeout_s=2.0)
        sweep(self.plan.run_id, self.sessions)
        self._take_rest()

    def _take_rest(self) -> None:
        """Whatever the readers still had when the run was cut short."""
        while True:
            try:
                index, event = self.queue.get_nowait()
            except queue.Empty:
                return
            if event.get("type") in ("output", "exit", "exception"):
                self._on_event(index, event)

    def _verdict(self) -> int:
        """Say what went wrong, if anything, and return the exit code."""
        if self.signum:
            self.console.message(f"stopped by {failures.signal_name(self.signum)}")
            return 128 + self.signum
        for error in self.errors:
            print(f"zlaunch: error: {error}", file=sys.stderr)
        if self.failures:
            first = failures.choose(self.failures.values())
            path = self.log_path(first.rank)
            print(failures.report(first, self._tail(first.rank), str(path)), file=sys.stderr)
            return first.exit_code
        return self.agent_code or (1 if self.errors else 0)

    def _tail(self, rank: int) -> Sequence[str]:
        text = self.tails.get(rank, b"").decode("utf-8", "replace")
        return text.splitlines()[-failures.TAIL_LINES :]


def _as_event(plan: Plan) -> Event:
    from dataclasses import asdict

    return asdict(plan)
