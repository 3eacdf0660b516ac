"""Run a job from start to end: connect, meet, run, and again when something failed and that is allowed."""

from __future__ import annotations

import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace

from zlaunch.errors import LaunchError, NodeError
from zlaunch.plan.options import Launch
from zlaunch.plan.plan import Plan
from zlaunch.supervisor import run_folder
from zlaunch.supervisor.controller import STOP_SIGNALS, Controller
from zlaunch.supervisor.end import REFUSED_CODE, End
from zlaunch.supervisor.nodes import (
    AgentConnection,
    LostNodeProcesses,
    Node,
    Rendezvous,
    Say,
    close_all,
    find_rendezvous,
)
from zlaunch.supervisor.provenance import Provenance
from zlaunch.supervisor.verdict import Outcome
from zlaunch.system import boot_clock
from zlaunch.system.interrupts import was_interrupted
from zlaunch.system.messages import Ping, Pong, Preload
from zlaunch.system.processes import PASSED_SIGNALS, signal_name
from zlaunch.view.console import Console

# -- hosts ------------------------------------------------------------------------------------------
#
# Keep what a run knows of its hosts from attempt to attempt: agents, spare hosts, hosts that are gone.


_LOOK_S = 5.0
"""Seconds between two looks whether a host is back."""
_PING_S = 15.0
_IDLE_S = 900.0
_GIVE_UP_S = 2.0
"""Seconds between two signs of life for a spare host's agent, that it waits for one, that it may be late with
an answer.
"""
Connect = Callable[[Sequence[str], Say], tuple[list[Node], list[NodeError]]]
"""Starts an agent on each host."""


class Agents:
    """Keeps the agents of a run from one attempt to the next."""

    def __init__(self, connect: Connect, say: Say) -> None:
        self._connect = connect
        self._say = say
        self._nodes: dict[str, Node] = {}
        self._spares = _PreparedSpares(connect, {}, [], None)

    def connect(self, hosts: Sequence[str]) -> tuple[list[Node], list[NodeError]]:
        """Start agents where there are none; return the nodes in the order of the hosts, and errors."""
        ready = self._spares.stop()
        self._nodes |= {host: ready.pop(host) for host in hosts if host in ready}
        missing = [host for host in hosts if host not in self._nodes]
        found, errors = self._connect(missing, self._say) if missing else ([], [])
        self._nodes |= {node.host: node for node in found}
        return [self._nodes[host] for host in hosts if host in self._nodes], errors

    def show_life(self) -> None:
        """Have the agents that are there wait for their plan a while longer."""
        for node in self._nodes.values():
            node.link.send(Ping(idle_s=_IDLE_S))

    def drop(self, hosts: Collection[str]) -> None:
        """End the agents of these hosts."""
        close_all([self._nodes.pop(host) for host in hosts if host in self._nodes])

    def keep(self, links: Sequence[AgentConnection]) -> None:
        """Take note that only these are left."""
        self._nodes = {node.host: node for node in self._nodes.values() if node.link in links}

    def prepare(self, hosts: Sequence[str], plan: Plan) -> None:
        """Have spare hosts import what a plan's workers do, while these train: in the background, until nodes
        are asked for.
        """
        ready = self._spares.stop()
        order = Preload(plan.preload, plan.cwd, asdict(plan.nodes[0].workers[0]))
        self._spares = _PreparedSpares(self._connect, ready, hosts if plan.preload else (), order)

    def end(self) -> None:
        """End all that are left."""
        self._nodes |= self._spares.stop()
        close_all(list(self._nodes.values()))
        self._nodes.clear()


class _PreparedSpares:
    """Keeps agents on spare hosts, in a thread: has them import, and shows them that the launcher lives."""

    def __init__(
        self, connect: Connect, ready: dict[str, Node], hosts: Sequence[str], order: Preload | None
    ) -> None:
        """Take the agents that are `ready`, which have had the order already."""
        self._connect = connect
        self._nodes = ready
        self._order = order
        self._missing = [host for host in hosts if host not in ready]
        self._end = threading.Event()
        self._given_up = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        if hosts:
            self._thread.start()

    def _run(self) -> None:
        found, _ = self._connect(self._missing, lambda what, seconds: None) if self._missing else ([], [])
        for node in found:
            if self._order is not None:
                with suppress(OSError):  # the first ping says that it is gone
                    node.link.send(self._order)
        self._nodes = {**self._nodes, **{node.host: node for node in found}}
        has_ended = False
        while not has_ended:
            has_ended = self._end.wait(_PING_S)  # and once more at the end: who is handed out lives
            for node in list(self._nodes.values()):
                try:
                    node.link.ask(Ping(idle_s=_IDLE_S), Pong)
                except (NodeError, OSError):  # it is connected to again when it is needed
                    del self._nodes[node.host]
        if self._given_up:
            self._kill()

    def _kill(self) -> None:
        for node in self._nodes.values():
            node.link.transport.kill()

    def stop(self) -> dict[str, Node]:
        """Return the agents that are there, by host; whoever is being waited for is given up."""
        self._end.set()
        if self._given_up:
            return {}
        if self._thread.is_alive():
            self._thread.join(_GIVE_UP_S)
        if not self._thread.is_alive():
            return self._nodes
        self._given_up = True
        self._kill()
        return {}


class Hosts:
    """Says which hosts the next attempt runs on."""

    def __init__(self, hosts: Sequence[str], spares: int, min_nodes: int | None) -> None:
        """Take all hosts; the last ones are `spares`. `min_nodes`: go on with so many; None: all."""
        self._all = tuple(hosts)
        self.wanted = len(hosts) - spares
        self.used = self._all[: self.wanted]
        self.needed = self.wanted if min_nodes is None else min_nodes
        self._spares = list(self._all[self.wanted :])
        self._may_shrink = min_nodes is not None
        self._unhealthy: set[str] = set()

    @property
    def spares(self) -> list[str]:
        """List the hosts that wait to take another's place."""
        return list(self._spares)

    @property
    def absent(self) -> list[str]:
        """List the hosts that are gone and may come back. An unhealthy host answers all the time, and would
        end one attempt after another.
        """
        others = {*self.used, *self._spares, *self._unhealthy}
        return [host for host in self._all if host not in others]

    def suffice_without(self, unhealthy: Collection[str]) -> bool:
        """Tell whether the run could have enough hosts without these, once all that are gone are back."""
        return len({*self._all} - {*self._unhealthy, *unhealthy}) >= self.needed

    def lose(self, lost: Collection[str], unhealthy: Collection[str] = ()) -> str:
        """Go on without lost and unhealthy hosts, if that is possible; return what to tell the user, "" if it
        is not.
        """
        lost = {*lost, *unhealthy}
        gone = [host for host in self.used if host in lost]
        taken = dict(zip(gone, self._spares, strict=False))
        left = tuple(taken.get(host, host) for host in self.used if host in taken or host not in gone)
        whole = len(left) == len(self.used)
        if not gone or not (whole or (self._may_shrink and len(left) >= self.needed)):
            return ""
        self._spares = self._spares[len(taken) :]
        self._unhealthy |= set(unhealthy)
        self.used = left
        said = [f"{spare} takes the place of {host}" for host, spare in taken.items()]
        if not whole:
            names = ", ".join(sorted(host for host in gone if host not in taken))
            said.append(f"going on with {len(left)} of {self.wanted} nodes, without {names}")
        return "; ".join(said)

    def take_back(self, host: str) -> None:
        """Use a host again that was gone, or keep it as a spare."""
        if len(self.used) < self.wanted:
            self.used = tuple(each for each in self._all if each in (*self.used, host))
        elif host not in self._spares:
            self._spares.append(host)


class HostReturnWatcher:
    """Polls, in a thread, whether lost hosts answer again."""

    def __init__(self, connect: Connect, hosts: Sequence[str]) -> None:
        self._connect = connect
        self._hosts = list(hosts)
        self._found: list[str] = []
        self._end = threading.Event()
        if hosts:
            threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while self._hosts and not self._end.wait(_LOOK_S):
            nodes, _ = self._connect(self._hosts, lambda what, seconds: None)
            close_all(nodes)
            for node in nodes:
                self._hosts.remove(node.host)
                self._found.append(node.host)

    def found(self) -> list[str]:
        """List the hosts that are back."""
        return list(self._found)

    def end(self) -> None:
        """Look no more."""
        self._end.set()


# -- job --------------------------------------------------------------------------------------------


_FIRST_PAUSE_S = 5.0
_LONGEST_PAUSE_S = 60.0
"""Seconds between attempts while hosts refuse; doubled each time."""
_SHORT_WAIT_S = 2.0
"""Seconds of a wait that the user need not be told about."""


class Job(ABC):
    """Describes what is to be run, for every attempt alike. Launchers are such jobs."""

    launch: Launch

    @property
    @abstractmethod
    def hosts(self) -> tuple[str, ...]:
        """Return the hosts to connect to."""

    @abstractmethod
    def connect(self, hosts: Sequence[str], say: Say) -> tuple[list[Node], list[NodeError]]:
        """Start an agent on each host; `say` tells the user what it waits for."""

    @abstractmethod
    def gpus_of(self, node: Node) -> Sequence[str]:
        """Return the GPUs that the run uses on a node, as tokens of CUDA_VISIBLE_DEVICES."""

    @abstractmethod
    def plan(self, nodes: Sequence[Node], rendezvous: Rendezvous | None, attempt: int) -> Plan:
        """Make the plan for the nodes that answered; one node has no rendezvous. Raises NodeError."""

    def find_surprises(self, nodes: Sequence[Node]) -> Sequence[str]:
        """Return warnings about nodes that differ from what was planned; none by default."""
        return ()

    @abstractmethod
    def kill_leftovers(self, lost: Mapping[str, LostNodeProcesses], run_id: str) -> frozenset[str]:
        """End what is left of a run on hosts whose agents have died; return those where certainly nothing is
        left.
        """

    def end_of(self, outcome: Outcome) -> End:
        """Return the end of a run, as its record has it."""
        return outcome.end


def run_job(
    job: Job,
    console: Console,
    provenance: Provenance | None = None,
    *,
    save_asked: bool = False,
) -> Outcome:
    """Run the job until it ends well, or no restart is left. `save_asked`: the workers must save and stop as
    soon as there are some.
    """
    with pre_run_signals() as signals:
        signals.save_asked = save_asked
        try:
            if was_interrupted():
                raise Stopped(signal.SIGINT)
            outcome = _run(job, console, provenance, signals)
        except Stopped as stopped:
            signals.end()  # a second signal must not end this report of the first
            console.message(f"stopped by {signal_name(stopped.signum)}")
            outcome = Outcome(128 + stopped.signum, signum=stopped.signum)
        except BaseException as error:
            signals.end()
            refused = isinstance(error, LaunchError)
            end = End(REFUSED_CODE, "refused") if refused else End(1, "failed")
            run_folder.ended(job.launch.run_dir, end)
            raise
        signals.end()
        run_folder.ended(job.launch.run_dir, job.end_of(outcome))
    return outcome


class Stopped(BaseException):
    """Carries a signal that ends the run while no worker is there."""

    def __init__(self, signum: int) -> None:
        self.signum = signum


class PreRunSignals:
    """Records what signals asked for while no controller handled them."""

    def __init__(self) -> None:
        self.save_asked = False
        """True once the workers must save and stop, as soon as there are some."""
        self._ended = False

    def end(self) -> None:
        """Let signals change nothing any more: the outcome is known."""
        self._ended = True

    def stop(self, signum: int, frame: object) -> None:
        """Handle a signal that ends the run. Raises Stopped."""
        if not self._ended:
            raise Stopped(signum)

    def note(self, signum: int, frame: object) -> None:
        """Handle a signal that is passed on to workers."""
        self.save_asked = self.save_asked or signum == signal.SIGUSR1


@contextmanager
def pre_run_signals() -> Iterator[PreRunSignals]:
    """Handle a run's signals while no controller does: while nodes are waited for or connected to, and after
    the last attempt. None may kill the launcher before it has written its record.

    Raises Stopped in the block.
    """
    signals = PreRunSignals()
    before = {signum: signal.getsignal(signum) for signum in (*STOP_SIGNALS, *PASSED_SIGNALS)}
    for signum in before:
        if before[signum] is not signal.SIG_IGN:
            signal.signal(signum, signals.stop if signum in STOP_SIGNALS else signals.note)
    try:
        yield signals
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _run(job: Job, console: Console, provenance: Provenance | None, signals: PreRunSignals) -> Outcome:
    agents = Agents(job.connect, console.waiting)
    try:
        return _attempts(job, agents, console, provenance, signals)
    finally:
        agents.end()


def _attempts(
    job: Job,
    agents: Agents,
    console: Console,
    provenance: Provenance | None,
    signals: PreRunSignals,
) -> Outcome:
    hosts = Hosts(job.hosts, job.launch.spares, job.launch.min_nodes)
    attempt = job.launch.first_attempt
    restarts = 0
    port_retried = False
    pause_s = _FIRST_PAUSE_S
    while True:
        outcome = _attempt(job, agents, hosts, console, attempt, provenance, signals)
        if not outcome.signum:
            _await_leases(outcome.left, console)
        attempt += outcome.started
        pause_s = pause_s if outcome.is_refused else _FIRST_PAUSE_S
        if outcome.regroups:
            console.message(f"going on with {len(hosts.used)} of {hosts.wanted} nodes")
            continue
        if outcome.code == 0 or outcome.signum or outcome.save_asked:
            return outcome
        if outcome.port_taken and not port_retried and not job.launch.master_port:
            port_retried = True
            console.message("the rendezvous port was taken in the meantime: once more with another one")
        elif said := hosts.lose(outcome.lost):
            console.message(said)
        elif restarts < job.launch.max_restarts and outcome.is_final:
            needed = f"{hosts.needed} of {len(job.hosts)} hosts"
            console.message(f"no restart: the run needs {needed}, and uses no unhealthy one")
            return outcome
        elif restarts < job.launch.max_restarts:
            restarts += 1
            when = f" in {pause_s:g} s" if outcome.is_refused else ""
            console.message(f"restart {restarts} of {job.launch.max_restarts}{when}")
            if outcome.is_refused:  # what keeps a host out, such as its reboot, takes a while
                agents.show_life()
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        else:
            return outcome


def _await_leases(left: Mapping[str, LostNodeProcesses], console: Console) -> None:
    """Wait until lost nodes run nothing any more (Note [Lease] in `zlaunch/node/lease.py`). Otherwise a rank
    could be there twice, and both would save into one folder.
    """
    ends = max((each.lease_ends for each in left.values()), default=0.0)
    wait_s = ends - boot_clock.now_s()
    if wait_s > _SHORT_WAIT_S:
        hosts = ", ".join(sorted(left))
        console.message(f"waiting {wait_s:.0f} s: until then, workers on {hosts} may still run")
    while (wait_s := ends - boot_clock.now_s()) > 0:
        time.sleep(wait_s)


def _attempt(
    job: Job,
    agents: Agents,
    hosts: Hosts,
    console: Console,
    attempt: int,
    provenance: Provenance | None,
    signals: PreRunSignals,
) -> Outcome:
    nodes = _gather(job, agents, hosts, console)
    if isinstance(nodes, Outcome):
        return nodes
    try:
        rendezvous = None
        if len(nodes) > 1:
            launch = job.launch
            rendezvous = find_rendezvous(
                nodes, master_addr=launch.master_addr, master_port=launch.master_port, iface=launch.iface
            )
        plan = replace(job.plan(nodes, rendezvous, attempt), restarts=job.launch.may_restart)
        if attempt == job.launch.first_attempt:
            for text in job.find_surprises(nodes):
                console.message(f"warning: {text}")
    except NodeError as error:
        console.error(f"{error.host}: {error.text}")
        return _refused_by([error])
    watcher = HostReturnWatcher(job.connect, hosts.absent)
    agents.prepare(hosts.spares, plan)
    controller = Controller(
        plan,
        console,
        [node.link for node in nodes],
        hang_timeout_s=job.launch.hang_timeout_s,
        log_bytes=job.launch.log_bytes,
        attempt=attempt,
        regroups=lambda: len(hosts.used) < hosts.wanted and bool(watcher.found()),
        provenance=provenance,
        save_asked=lambda: signals.save_asked,
    )
    try:
        outcome = controller.run()
    finally:
        watcher.end()
    for host in watcher.found():
        hosts.take_back(host)
    agents.keep([controller.links[index] for index in controller.waiting])
    if outcome.died:
        died = {host: outcome.left.get(host, LostNodeProcesses()) for host in sorted(outcome.died)}
        clean = job.kill_leftovers(died, plan.run_id)
        outcome = replace(outcome, left={host: at for host, at in outcome.left.items() if host not in clean})
    return outcome


def _gather(job: Job, agents: Agents, hosts: Hosts, console: Console) -> list[Node] | Outcome:
    """Return the nodes of an attempt: all of them answer, and are healthy where that is asked for."""
    while True:
        nodes, dead = agents.connect(hosts.used)
        sick = _find_unhealthy(job, nodes, console) if job.launch.checks_health else []
        errors = [*dead, *sick]
        if not errors:
            return nodes
        for error in errors:
            console.error(f"{error.host}: {error.text}")
        dead_hosts = [error.host for error in dead]
        sick_hosts = [error.host for error in sick]
        agents.drop(sick_hosts)
        said = "" if sick and not job.launch.exclude_unhealthy else hosts.lose(dead_hosts, sick_hosts)
        if not said:
            if len(hosts.used) > 1:
                text = f"{len(errors)} of {len(hosts.used)} nodes cannot take part; nothing was started"
                console.error(text)
            if sick and len(hosts.used) > 1 and not job.launch.exclude_unhealthy:
                console.message("--exclude_unhealthy continues without them, with --min_nodes or --spares")
            is_final = job.launch.exclude_unhealthy and not hosts.suffice_without(sick_hosts)
            return replace(_refused_by(errors), is_final=is_final)
        console.message(said)


def _find_unhealthy(job: Job, nodes: Sequence[Node], console: Console) -> list[NodeError]:
    from zlaunch.supervisor.checkups import find_unhealthy  # a launch that does not ask is not slower

    return find_unhealthy(nodes, job.launch.workdir, job.gpus_of, console)


def _refused_by(errors: Sequence[NodeError]) -> Outcome:
    end = End.refused_by(errors)
    return Outcome(end.code, refused_by=end.hosts, refused_slots=end.slots, started=False)
