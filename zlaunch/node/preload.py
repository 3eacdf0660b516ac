"""Import once what all workers of a node will import, and fork them: `python -m zlaunch.node.preload`.

Importing torch takes a second of CPU and reads hundreds of files; on a cluster's shared file system that is
most of a start. The process is started by the agent, forks every worker before any thread or CUDA call of the
user's, says their process ids, and ends, so that the workers become children of the agent (which adopts
orphans). No worker begins before the agent knows all of them: when a fork fails, those that were forked end,
so that nothing runs twice. Its arguments are the workers' own: they are what `ps` shows.
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
from collections.abc import Sequence
from typing import Any, NoReturn

from zlaunch.plan.plan import WorkerPlan
from zlaunch.system.processes import die_with_parent

_GO = b"go"
_MAX_FDS = 4
"""The most descriptors of a worker: stdout, stderr, events, and rank 0's stdin."""
_POLL_S = 0.001


class Preloader:
    """Holds the agent's side of a preloading process."""

    def __init__(self, process: subprocess.Popen[bytes], connection: socket.socket) -> None:
        self.pid = process.pid
        self.connection = connection
        process.returncode = 0  # the agent waits for all its children itself; Popen must not

    def release(self) -> list[int] | None:
        """Take the workers' process ids, in the order they were asked for, and let them begin.

        None when it failed: what it has forked ends then.
        """
        try:
            data = self.connection.recv(1 << 20, socket.MSG_DONTWAIT)
            pids = [int(pid) for pid in json.loads(data)] if data else None
            for _ in pids or ():
                self.connection.send(_GO)
            return pids
        except (OSError, ValueError):
            return None
        finally:
            self.connection.close()


def start(
    modules: Sequence[str],
    plans: Sequence[WorkerPlan],
    pipes: Sequence[Sequence[int]],
    cwd: str,
    user_input: int | None = None,
) -> Preloader:
    """Start the process for these workers, whose (stdout, stderr, events) write ends are `pipes`; rank 0
    reads from `user_input`. Raises OSError.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
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
            stdout=pipes[0][0],
            stderr=pipes[0][1],
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )
    preloader = Preloader(process, ours)
    ours.sendall(json.dumps({"modules": list(modules), "workers": len(plans)}).encode())
    for plan, fds in zip(plans, pipes, strict=True):
        own = {key: value for key, value in plan.env.items() if key not in common}
        message = json.dumps({"argv": plan.argv[position + 1 :], "env": own}).encode()
        own_fds = [*fds, *([user_input] if user_input is not None and plan.rank == 0 else [])]
        ours.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", own_fds))])
    return preloader


def main() -> None:
    """Import the modules, fork the workers, report their ids, and end."""
    agent = int(os.environ.pop("ZLAUNCH_AGENT_PID"))
    die_with_parent(agent)
    connection = socket.socket(fileno=int(os.environ.pop("ZLAUNCH_PRELOAD_FD")))
    order = json.loads(connection.recv(1 << 16))
    jobs = [_receive(connection) for _ in range(order["workers"])]
    for module in order["modules"]:
        importlib.import_module(module)
    gc.freeze()  # the workers share these pages until one of them writes
    pids = []
    own = os.getpid()  # a child that asks for its parent may be told of the next one already
    for job, fds in jobs:
        pid = os.fork()
        if pid == 0:
            others = [fd for _, theirs in jobs for fd in theirs if fd not in fds]
            _become(connection, job, fds, others, own, agent)
        pids.append(pid)
    connection.sendall(json.dumps(pids).encode())
    os._exit(0)


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    data, extra, _, _ = connection.recvmsg(1 << 20, socket.CMSG_SPACE(_MAX_FDS * array.array("i").itemsize))
    fds = array.array("i")
    fds.frombytes(extra[0][2])
    return json.loads(data), list(fds)


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
    for fd in others:
        os.close(fd)
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
