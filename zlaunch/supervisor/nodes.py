"""Start agents on the nodes of a run, keep what they say about themselves, and find where they can meet."""

from __future__ import annotations

import math
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from zlaunch.errors import NodeError
from zlaunch.supervisor.clock_bound import ClockBound
from zlaunch.supervisor.step_signal import STEP_SIGNAL
from zlaunch.system import boot_clock
from zlaunch.system.events import Event, Output
from zlaunch.system.machine import Facts
from zlaunch.system.messages import (
    AgentEvent,
    Command,
    Damaged,
    Hello,
    HelloAnswer,
    Listen,
    Listening,
    MissingField,
    Pause,
    Ping,
    Pong,
    Reach,
    Reached,
    Signalled,
    Sweep,
    Swept,
    decode_event,
    encode_command,
)
from zlaunch.system.processes import Process
from zlaunch.transports import Transport

# -- nodes ------------------------------------------------------------------------------------------


PARALLEL = 64
"""Nodes that are connected to at one time."""
SLOW_S = 5.0
"""Seconds after which the user is told of a start that is still going on."""
_ANSWER_TIMEOUT_S = 15.0
_TIMEOUT_PER_ADDRESS_S = 4.0
_SWEEP_S = 10.0
_MEET_LIMIT_S = 600.0
"""Seconds that finding the rendezvous takes at most."""


_SSH_FAILED = 255

_A = TypeVar("_A")
"""An answer of an agent."""
_R = TypeVar("_R")
"""Return type of the function that `_all` runs on each host."""


class AgentConnection:
    """Connects the launcher to a started agent: sends commands, receives events in one thread at a time."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.host = transport.host
        self.clock = ClockBound()
        self.events: Generator[AgentEvent, None, None] = self._decoded(transport.events())

    def _decoded(self, events: Iterator[Event | Output]) -> Generator[AgentEvent, None, None]:
        for event in events:
            if isinstance(event, Output):
                yield event
                continue
            if "beat" in event:
                self.clock.hear(float(event["beat"]), boot_clock.now_s())
            try:
                decoded = decode_event(event)
            except MissingField as error:
                decoded = Damaged(str(error))
            if isinstance(decoded, Signalled):
                STEP_SIGNAL.relay(decoded.signum)
            yield decoded

    def send(self, command: Command) -> None:
        """Send a command; never raises and never blocks for long. Safe in a signal handler."""
        self.transport.send(encode_command(command))

    def ask(self, command: Command, answer: type[_A]) -> _A:
        """Send a command and wait for the event that answers it. Raises NodeError when the agent ends.

        The caller bounds the time, and ends the wait by `transport.kill`.
        """
        self.send(command)
        return self.await_answer(answer)

    def await_answer(self, answer: type[_A]) -> _A:
        """Wait for an event of this type. Raises NodeError when the agent ends."""
        for event in self.events:
            if isinstance(event, answer):
                return event
            if isinstance(event, Damaged):
                self.transport.kill()
                raise NodeError(self.host, f"it sends damaged data: {event.why}")
        code = self.transport.close(timeout_s=2.0)
        raise NodeError(self.host, _why_no_agent(code, self.transport.diagnostics()))

    def end(self) -> None:
        """Let the agent end, and kill it if it does not."""
        if self.transport.close(timeout_s=2.0) is None:
            self.transport.kill()
            self.transport.close(timeout_s=2.0)
        with suppress(ValueError):  # another thread still reads, to the end that it sees now
            self.events.close()


_NOT_FOUND = re.compile(r"(\S+): (No such file or directory|command not found|not found|Permission denied)")


def _why_no_agent(code: int | None, said: str) -> str:
    if code == 127 or "execve()" in said:
        # one of several lines of srun: `... execve(): /venv/bin/python: No such file or directory`
        missing = _NOT_FOUND.search(said)
        if missing is not None:
            there = f"there is no such Python: {missing[1]} ({missing[2]})"
            return f"{there}. --remote_python or --venv has to name one that this host has"
        return f"there is no such Python: {said or 'exit code 127'}. Name it with --remote_python or --venv"
    if "No module named" in said and "zlaunch" in said:
        return (
            f"{said.splitlines()[-1]}: install zlaunch into that Python, or name another one with "
            "--remote_python or --venv"
        )
    last = said.rpartition("\n")[2]
    if "node/rendezvous.py" in said and last.startswith("KeyError: "):  # a zlaunch that says nothing itself
        return f"its zlaunch is another one and ended with {last}: install the same zlaunch as here"
    if code == _SSH_FAILED and said:
        return f"ssh: {said}"
    how = "without an exit code" if code is None or code == -1 else f"with exit code {code}"
    return f"the agent ended {how}" + (f": {said}" if said else "")


@dataclass(frozen=True, slots=True)
class Node:
    """Holds a node that has answered."""

    link: AgentConnection
    facts: Facts

    @property
    def host(self) -> str:
        """Return the node's name as the user wrote it."""
        return self.link.host


Say = Callable[[str, float], None]
"""Tells the user what a start is waiting for, and for how many seconds; empty text ends it."""
_SAID_S = 1.0
"""Seconds between two such words."""


def connect(
    hosts: Sequence[str],
    open_transport: Callable[[str], Transport],
    timeout_s: float,
    say: Say = lambda what, seconds: None,
) -> tuple[list[Node], list[NodeError]]:
    """Start an agent on every host at once; return the nodes that answered, in order, and the others' errors.

    `open_transport` may raise NodeError. A host that has not answered within `timeout_s` is given up,
    whatever it hangs in: `open_transport` need not return then.
    """
    links: dict[str, AgentConnection] = {}
    given_up: set[str] = set()
    # Agents that have answered wait for those that have not, and for the rendezvous.
    waves = -(-len(hosts) // PARALLEL)
    idle_s = waves * timeout_s + _MEET_LIMIT_S

    def say_hello(host: str) -> Node:
        link = links[host] = AgentConnection(open_transport(host))
        if host in given_up:
            link.transport.kill()
        answer = link.ask(Hello(idle_s), HelloAnswer)
        try:
            return Node(link, Facts.from_event(answer.content))
        except KeyError as error:
            text = f"its zlaunch answers without {error}: install the same zlaunch as here"
            raise NodeError(host, text) from None

    def give_up(host: str) -> str:
        given_up.add(host)
        if host not in links:
            return "the login, or the start of the agent there, hangs"
        links[host].transport.kill()
        return "the agent there does not answer"

    results = _all(hosts, say_hello, give_up, timeout_s, say)
    nodes = [result for result in results if isinstance(result, Node)]
    return nodes, [result for result in results if isinstance(result, NodeError)]


def _all(
    hosts: Sequence[str],
    work: Callable[[str], _R],
    give_up: Callable[[str], str],
    timeout_s: float,
    say: Say = lambda what, seconds: None,
) -> list[_R | NodeError]:
    """Call `work(host)` for every host in threads, and return the results in order.

    A host that takes too long is given up: its thread is left in the call that it hangs in, and `give_up`
    says what that is.
    """
    waiting = list(reversed(hosts))
    deadlines: dict[str, float] = {}
    outcomes: dict[str, _R | NodeError] = {}
    ended: queue.SimpleQueue[tuple[str, _R | NodeError]] = queue.SimpleQueue()

    def run(host: str) -> None:
        try:
            ended.put((host, work(host)))
        except NodeError as error:
            ended.put((host, error))
        except Exception as error:
            ended.put((host, NodeError(host, f"{type(error).__name__}: {error}")))

    started = time.monotonic()
    said_at = started + SLOW_S - _SAID_S
    while len(outcomes) < len(hosts):
        while waiting and len(deadlines) < PARALLEL:
            host = waiting.pop()
            deadlines[host] = time.monotonic() + timeout_s
            threading.Thread(target=run, args=(host,), daemon=True).start()
        moment = min(*deadlines.values(), said_at + _SAID_S)
        try:
            host, outcome = ended.get(timeout=max(0.0, moment - time.monotonic()))
            if deadlines.pop(host, None) is not None:
                outcomes[host] = outcome
        except queue.Empty:
            now = time.monotonic()
            for host in [host for host, deadline in deadlines.items() if deadline <= now]:
                del deadlines[host]
                outcomes[host] = NodeError(host, f"no answer within {timeout_s:g} s: {give_up(host)}")
            if deadlines and now >= said_at + _SAID_S:
                said_at = now
                first = next(iter(deadlines))
                more = len(hosts) - len(outcomes) - 1
                others = f" and {more} more" if more else ""
                say(f"{first}{others}", now - started)
    say("", 0.0)
    return [outcomes[host] for host in hosts]


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Says where the workers meet, and the interface that each node uses for it (empty: unknown)."""

    address: str
    port: int
    interfaces: tuple[str, ...]


def find_rendezvous(
    nodes: Sequence[Node], *, master_addr: str | None, master_port: int, iface: str | None
) -> Rendezvous:
    """Have node 0 listen, and every other node try its addresses by connecting.

    Raises NodeError naming the node that cannot reach node 0, or node 0 when the port is taken.
    """
    first = nodes[0]
    others = nodes[1:]
    known = first.facts.addresses
    if iface is not None and iface not in known:
        raise NodeError(
            first.host, f"--iface {iface}: it has no such interface that is up; it has {', '.join(known)}"
        )
    if master_addr is not None:
        candidates = [master_addr]
    elif iface is not None:
        candidates = list(known[iface])
    else:
        candidates = [address for addresses in known.values() for address in addresses]
    if not candidates:
        raise NodeError(first.host, "it has no network address that the other nodes could reach")
    timeout_s = _ANSWER_TIMEOUT_S + _TIMEOUT_PER_ADDRESS_S * len(candidates)
    token = os.urandom(16).hex()
    by_host = {node.host: node for node in nodes}

    def give_up(host: str) -> str:
        by_host[host].link.transport.kill()
        return "the agent there does not answer"

    def ask(hosts: Sequence[Node], command: Command, answer: type[_A]) -> list[_A]:
        outcomes = _all(
            [n.host for n in hosts],
            lambda h: by_host[h].link.ask(command, answer),
            give_up,
            timeout_s,
        )
        answers: list[_A] = []
        for outcome in outcomes:
            if isinstance(outcome, NodeError):
                raise outcome
            answers.append(outcome)
        return answers

    (listening,) = ask([first], Listen(master_port, token), Listening)
    if listening.error:
        raise NodeError(
            first.host, f"--master_port {master_port}: {listening.error}; leave it out for a free one"
        )
    port = listening.port
    reached: list[Reached] = []
    while candidates:
        reached = ask(others, Reach(candidates, port, token), Reached)
        lost = [node.host for node, answer in zip(others, reached, strict=True) if not answer.address]
        if lost:
            raise NodeError(
                lost[0],
                f"it cannot reach {first.host} at {' or '.join(candidates)} (port {port}): a firewall, "
                "or the wrong network; name one with --iface or --master_addr",
            )
        chosen = {answer.address for answer in reached}
        if len(chosen) <= 1:
            break
        # The nodes found different ones: what remains is what a node further down the list has found.
        candidates = candidates[max(candidates.index(address) for address in chosen) :]
    address = reached[0].address if reached else candidates[0]
    own = iface or next((name for name, addresses in known.items() if address in addresses), "")
    return Rendezvous(address, port, (own, *(iface or answer.interface for answer in reached)))


@dataclass(frozen=True, slots=True)
class LostNodeProcesses:
    """Describes the processes that a lost node may still run, and when they are dead at the latest."""

    lease_ends: float = 0.0
    """When its workers are dead, whatever has become of it, on this CLOCK_BOOTTIME: Note [Lease]."""
    sessions: tuple[Process, ...] = ()
    """Its agent and workers, as far as they are known."""
    pid_namespace: int = 0
    """Where these process ids hold; 0: unknown."""


def kill_leftovers_on_hosts(
    lost: Mapping[str, LostNodeProcesses], open_transport: Callable[[str], Transport], run_id: str
) -> frozenset[str]:
    """End the processes of a run on hosts whose agent and watchdog are dead; return the hosts that have said
    that nothing is left. A host that is down says nothing.
    """

    def work(host: str) -> Swept:
        link = links[host] = AgentConnection(open_transport(host))
        left = lost[host]
        return link.ask(Sweep(run_id, left.sessions, left.pid_namespace, _SWEEP_S), Swept)

    def give_up(host: str) -> str:
        return "it does not answer"

    links: dict[str, AgentConnection] = {}
    answers = _all(tuple(lost), work, give_up, _SWEEP_S)
    for link in links.values():
        link.transport.kill()
    said = zip(lost, answers, strict=True)
    return frozenset(host for host, answer in said if isinstance(answer, Swept) and answer.clean)


def close_all(nodes: Sequence[Node]) -> None:
    """End agents that have no plan."""
    if nodes:
        with ThreadPoolExecutor(PARALLEL) as pool:
            list(pool.map(lambda node: node.link.end(), nodes))


# -- heartbeat --------------------------------------------------------------------------------------
#
# Watch for nodes that no longer answer.
#
# Note [Silent node]
# What happens when a network cut, a power loss or a halted machine silences a node:
#
# 1. `Heartbeat` pings. If nothing was heard from the node for --heartbeat seconds, it reports a
#    `HeartbeatTimeout`.
# 2. The controller loses the node (`_on_heartbeat_timeout`, `_lose`): it grants no more leases (`give_up`),
#    notes until when workers may live there (`LostNodeProcesses`), and kills the transport. Then it stops the
#    other nodes.
# 3. On the node the lease runs out, since no ping renews it. The agent sends SIGTERM before its end
#    (`too_silent` in `node/agent.py`) and SIGKILL at its end (`lease_is_over`). See Note [Lease] in
#    `node/lease.py`.
# 4. The job waits until the leases of all lost nodes are over (`_await_leases` in `job.py`). It does not wait
#    for a node whose workers have all reported their end.
# 5. The next attempt uses spares, or fewer nodes with --min_nodes (`Hosts.lose`). Otherwise it is a restart
#    on the same hosts, if --max_restarts allows one.


_PINGS_PER_PERIOD = 4
_NOTE_EVERY_S = 60.0
_PAUSE_S = 86400.0
"""Seconds that the nodes wait for a launcher that has been stopped in its terminal (Ctrl-Z)."""
_LATE_S = 0.5
"""Seconds beyond a lease's end: for clocks that do not run alike, and for the last process to die."""


class HeartbeatTimeout(NamedTuple):
    """Reports a node from which nothing was heard for a heartbeat period."""

    silence_s: float


class Heartbeat:
    """Pings every agent from its own thread, grants each its lease (Note [Lease] in `zlaunch/node/lease.py`),
    and reports those that have been silent for a period.

    A period of 0 means that there is nothing to watch: the agents are on this machine.
    """

    def __init__(
        self, links: Sequence[AgentConnection], period_s: float, events: queue.SimpleQueue[tuple[int, Any]]
    ) -> None:
        """Watch agents. Puts a HeartbeatTimeout into `events`, with the index of its agent."""
        self._links = links
        self._period_s = period_s
        self._events = events
        self._heard = [boot_clock.now_s()] * len(links)
        self._noted = [-math.inf] * len(links)
        self._excused = [False] * len(links)
        self._long_until = [0.0] * len(links)
        """Until when nodes have a longer lease, because this process was stopped in its terminal."""
        self._pauses = 0
        self._given_up: set[int] = set()
        self._end = threading.Event()
        self._sending = threading.RLock()
        self._paused = False

    def start(self) -> None:
        """Start the thread, if there is anything to watch."""
        if self._period_s > 0:
            self._heard = [boot_clock.now_s()] * len(self._links)
            threading.Thread(target=self._run, daemon=True).start()

    def stop(self) -> None:
        """End the thread."""
        self._end.set()

    @property
    def watches(self) -> bool:
        """Tell whether there is anything to watch."""
        return self._period_s > 0

    def pause(self) -> None:
        """Stop the pings, which would tell the nodes that this process continues, and grant a long lease."""
        with self._sending:
            self._paused = True
            self._pauses += 1
        for index, link in enumerate(self._links):
            if index in self._given_up:
                continue
            if self.watches:
                self._long_until[index] = boot_clock.now_s() + _PAUSE_S
            link.send(Pause(self._grant(index)))

    def resume(self) -> None:
        """Ping the nodes after a pause: the leases are short again."""
        self.forgive()
        for index in range(len(self._links)):
            self._ping(index)

    def forgive(self) -> None:
        """Count anew from now: this process stood still, so it has not heard the nodes."""
        self._paused = False
        self._heard = [boot_clock.now_s()] * len(self._links)

    def heard(self, index: int, event: AgentEvent | None = None) -> None:
        """Record that a node has sent something."""
        self._heard[index] = boot_clock.now_s()
        if isinstance(event, Pong) and event.pauses == self._pauses:
            self._long_until[index] = 0.0  # it knows that the last pause is over

    def first_grant(self, index: int) -> float | None:
        """Return the lease that goes out with a node's plan now."""
        self.heard(index)
        return self._grant(index)

    def give_up(self, index: int) -> float:
        """Grant a node nothing more. Return when all its workers are dead, whatever becomes of it; 0 without
        a lease.
        """
        with self._sending:
            self._given_up.add(index)
        return self.lease_ends(index)

    def lease_ends(self, index: int) -> float:
        """Return when all workers of a node are dead if nothing more is granted; 0 without a lease."""
        if not self.watches:
            return 0.0
        return max(self._until(index), self._long_until[index]) + _LATE_S

    def _until(self, index: int) -> float:
        """Return when a lease ends that is granted now."""
        last = boot_clock.now_s() if self._excused[index] else self._heard[index]
        return last + self._period_s

    def _grant(self, index: int) -> float | None:
        """Return a lease: the moment when it ends, on the agent's clock."""
        ahead_s = self._links[index].clock.ahead_s
        if ahead_s is None or not self.watches:
            return None
        return (self._long_until[index] if self._paused else self._until(index)) - ahead_s

    def _ping(self, index: int) -> None:
        with self._sending:
            if not self._paused and index not in self._given_up:
                self._links[index].send(Ping(self._grant(index), self._pauses))

    @contextmanager
    def excused(self, index: int) -> Iterator[None]:
        """Forgive a node's silence while this side does not listen to it."""
        self._excused[index] = True
        try:
            yield
        finally:
            self.heard(index)
            self._excused[index] = False

    def worth_noting(self, index: int) -> bool:
        """Tell whether an answer of this node belongs into the log: not every one, for long runs."""
        now = boot_clock.now_s()
        if now - self._noted[index] < _NOTE_EVERY_S:
            return False
        self._noted[index] = now
        return True

    def silence_s(self, index: int) -> float:
        """Return the seconds since the node was last heard."""
        return boot_clock.now_s() - self._heard[index]

    def _run(self) -> None:
        reported: set[int] = set()
        pause_s = self._period_s / _PINGS_PER_PERIOD
        looked_at = boot_clock.now_s()
        while not self._end.wait(pause_s):
            now = boot_clock.now_s()
            if now - looked_at > 2 * pause_s:
                self.forgive()
            looked_at = now
            for index in range(len(self._links)):
                self._ping(index)
                silence_s = self.silence_s(index)
                if silence_s > self._period_s and not self._excused[index] and index not in reported:
                    reported.add(index)
                    self._events.put((index, HeartbeatTimeout(silence_s)))
