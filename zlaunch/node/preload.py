"""Import once what all workers of a node will import, and fork them: `python -m zlaunch.node.preload`.

Importing torch takes a second of CPU and reads hundreds of files; on a cluster's shared file system that is
most of a start. The process is started by the agent, forks every worker before any thread or CUDA call of the
user's, says their process ids, and ends, so that the workers become children of the agent (which adopts
orphans). Its arguments are the workers' own: they are what `ps` shows.

Note [Nothing runs twice]. A forked worker waits for a message (_GO) before it becomes the user's program. The
agent sends it only when it has the ids of all workers. If the preloader dies before, or a fork fails, the
agent closes the connection: the workers that were forked read its end and exit, and the agent starts each
worker separately. A worker that began at once would run a second time then.

Where the run may be restarted, one more fork stays behind as a standby: it has everything imported and has
run nothing, and forks the workers of the next attempt as the first process has.
"""

from __future__ import annotations

import array
import gc
import importlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from zlaunch.plan.plan import WorkerPlan
from zlaunch.system.processes import die_with_parent

_GO = b"go"
_MAX_FDS = 4
"""The most descriptors of a worker: stdout, stderr, events, and rank 0's stdin."""
Jobs = list[tuple[dict[str, Any], list[int]]]
_POLL_S = 0.001


class Preloader:
    """Holds the agent's side of a preloading process."""

    def __init__(self, pid: int, connection: socket.socket, env: Mapping[str, str]) -> None:
        self.pid = pid
        self.connection = connection
        self.env = env
        """Holds what has been added to its environment."""
        self.standby: Preloader | None = None
        """The process that stays behind, once the workers have begun."""
        self._next: socket.socket | None = None

    def order(
        self,
        modules: Sequence[str],
        plans: Sequence[WorkerPlan],
        pipes: Sequence[Sequence[int]],
        user_input: int | None,
        *,
        standby: bool,
    ) -> None:
        """Ask for workers, whose (stdout, stderr, events) write ends are `pipes`; rank 0 reads from
        `user_input`. Raises OSError where the process is gone.
        """
        order = {"modules": list(modules), "workers": len(plans)}
        self._next, theirs = _pair() if standby else (None, None)
        try:
            self._send(order, [theirs.fileno()] if theirs is not None else [])
        finally:
            if theirs is not None:
                theirs.close()
        for plan, fds in zip(plans, pipes, strict=True):
            unset = [key for key in self.env if key not in plan.env]
            own = {key: value for key, value in plan.env.items() if self.env.get(key) != value}
            position = plan.argv.index("zlaunch.node.bootstrap")
            fds = [*fds, *([user_input] if user_input is not None and plan.rank == 0 else [])]
            self._send({"argv": plan.argv[position + 1 :], "env": own, "unset": unset}, fds)

    def _send(self, message: Mapping[str, Any], fds: Sequence[int]) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.connection.sendmsg([json.dumps(message).encode()], rights)

    def release(self) -> list[int] | None:
        """Take the workers' process ids, in the order they were asked for, and let them begin.

        None when it failed: what it has forked ends then.
        """
        pids = None
        try:
            data = self.connection.recv(1 << 20, socket.MSG_DONTWAIT)
            if data:
                answer = json.loads(data)
                pids = [int(pid) for pid in answer["workers"]]
                # One message for each worker. All of them read from this end, and SEQPACKET gives each reader
                # a whole message. See Note [Nothing runs twice].
                for _ in pids:
                    self.connection.send(_GO)
                if self._next is not None:
                    self.standby = Preloader(int(answer["standby"]), self._next, self.env)
        except (OSError, ValueError):
            pids = None
        self.close()
        return pids

    def close(self) -> None:
        """Close the connection: the process ends, and what it has forked and was not let go."""
        self.connection.close()
        if self._next is not None and self.standby is None:
            self._next.close()


def pids_of(standby: Preloader | None) -> tuple[int, ...]:
    """Return the process that stays for the next attempt, if there is one."""
    return () if standby is None else (standby.pid,)


def _pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def start(plans: Sequence[WorkerPlan], pipes: Sequence[Sequence[int]], cwd: str) -> Preloader:
    """Start the process for these workers; it writes to the first one's pipes. Raises OSError."""
    ours, theirs = _pair()
    common = {
        key: value for key, value in plans[0].env.items() if all(plan.env.get(key) == value for plan in plans)
    }
    position = plans[0].argv.index("zlaunch.node.bootstrap")
    command = [*plans[0].argv[:position], "zlaunch.node.preload", *plans[0].argv[position + 1 :]]
    env = {**os.environ, **common}
    env |= {"ZLAUNCH_PRELOAD_FD": str(theirs.fileno()), "ZLAUNCH_AGENT_PID": str(os.getpid())}
    with theirs:
        process = subprocess.Popen(
            command,
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            # What the imports print, and their errors, appear as the first worker's output.
            stdout=pipes[0][0],
            stderr=pipes[0][1],
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )
    process.returncode = 0  # the agent waits for all its children itself; Popen must not
    return Preloader(process.pid, ours, common)


def start_standby(worker: WorkerPlan, modules: Sequence[str], cwd: str) -> Preloader | None:
    """Start a process that only leaves a standby behind, for workers like this one; None where it cannot be
    started: workers then import by themselves.
    """
    try:
        with open(os.devnull, "wb") as null:
            preloader = start([worker], [(null.fileno(), null.fileno())], cwd)
        preloader.order(modules, [], [], None, standby=True)
    except OSError:
        return None
    return preloader


def main() -> None:
    """Import the modules, fork the workers, report their ids, and end; a standby waits for the next order."""
    agent = int(os.environ.pop("ZLAUNCH_AGENT_PID"))
    die_with_parent(agent)
    connection: socket.socket | None = socket.socket(fileno=int(os.environ.pop("ZLAUNCH_PRELOAD_FD")))
    while connection is not None:
        connection = _serve(connection, agent)
    sys.exit(0)


def _serve(connection: socket.socket, agent: int) -> socket.socket | None:
    """Carry out an order. Returns in the standby alone, with what the next order comes by; None in a worker
    that has ended.
    """
    order, of_standby = _receive(connection)
    jobs = [_receive(connection) for _ in range(order["workers"])]
    for module in order["modules"]:
        before = dict(os.environ)
        importlib.import_module(module)
        if module == "torch._dynamo":
            # It sets TORCHINDUCTOR_CACHE_DIR, and a script may set that if nobody else has.
            for name in os.environ.keys() - before.keys():
                del os.environ[name]
    gc.freeze()  # the workers share these pages until one of them writes
    own = os.getpid()  # a child that asks for its parent may be told of the next one already
    standby = 0
    if of_standby:
        standby = os.fork()
        if standby == 0:
            return _stand_by(connection, of_standby[0], jobs, own, agent)
        os.close(of_standby[0])
    pids = []
    for job, fds in jobs:
        pid = os.fork()
        if pid == 0:
            others = [fd for _, theirs in jobs for fd in theirs if fd not in fds]
            _become(connection, job, fds, others, own, agent)
        pids.append(pid)
    connection.sendall(json.dumps({"workers": pids, "standby": standby}).encode())
    # Without exit handlers: those that the imports have registered are the workers'.
    os._exit(0)


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    data, extra, _, _ = connection.recvmsg(1 << 20, socket.CMSG_SPACE(_MAX_FDS * array.array("i").itemsize))
    if not data:
        os._exit(0)  # the agent needs no other attempt
    fds = array.array("i")
    for _, _, content in extra:
        fds.frombytes(content)
    return json.loads(data), list(fds)


def _stand_by(connection: socket.socket, own: int, jobs: Jobs, preloader: int, agent: int) -> socket.socket:
    """Turn this forked process into one that waits for the next order, with nothing of this one."""
    os.setsid()
    connection.close()
    # A write end that stayed open here would keep the agent from seeing the end of a worker's output.
    for _, fds in jobs:
        for fd in fds:
            os.close(fd)
    null = os.open(os.devnull, os.O_RDWR)
    for stdio in (1, 2):
        os.dup2(null, stdio)
    os.close(null)
    # PDEATHSIG is about the parent at the time of the call: only the agent's death may end this process.
    while os.getppid() == preloader:
        time.sleep(_POLL_S)
    die_with_parent(agent)
    return socket.socket(fileno=own)


def _become(
    connection: socket.socket,
    job: dict[str, Any],
    fds: list[int],
    others: list[int],
    preloader: int,
    agent: int,
) -> NoReturn:
    """Turn this forked process into a worker as if it had been started by itself."""
    os.setsid()
    # The write ends of other workers' pipes: the agent sees the end of their output only when nobody has
    # them.
    for fd in others:
        os.close(fd)
    # See Note [Nothing runs twice].
    if connection.recv(len(_GO)) != _GO:
        os._exit(1)  # the agent does not know of it, and starts the workers in another way
    connection.close()
    out, err, events, *user_input = fds
    if user_input:
        os.dup2(user_input[0], 0)
        os.close(user_input[0])
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.close(out)
    os.close(err)
    os.set_inheritable(events, True)
    while os.getppid() == preloader:  # until the agent is the parent, whose death is to end this process
        time.sleep(_POLL_S)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # like `random`, which reseeds by itself
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    for key in job["unset"]:
        os.environ.pop(key, None)
    os.environ.update(job["env"])
    os.environ.update(ZLAUNCH_EVENT_FD=str(events), ZLAUNCH_AGENT_PID=str(agent))
    sys.argv = [sys.argv[0], *job["argv"]]
    from zlaunch.node import bootstrap

    bootstrap.main()
    sys.exit(0)


if __name__ == "__main__":
    # The target replaces sys.modules["__main__"]; this reference keeps our own globals alive until the end.
    _own_module = sys.modules["__main__"]
    main()
