"""Runs on this machine alone."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from zlaunch.hostfiles import filters
from zlaunch.launch.run_record import resume_folder
from zlaunch.plan.options import Options, bound_cores, own_names
from zlaunch.plan.plan import NodeSpec, Plan, make_plan
from zlaunch.system.processes import python_module_argv

if TYPE_CHECKING:
    from zlaunch.launch.job import Job
    from zlaunch.launch.nodes import Link, Node, NodeError, Say


def local_node(options: Options) -> NodeSpec:
    """This machine's slots after --num_gpus or the filters."""
    from zlaunch.system.devices import discover
    from zlaunch.system.facts import cores_by_numa

    if options.num_nodes not in (None, 1):
        raise click.UsageError(
            f"--num_nodes {options.num_nodes}: there is this machine alone; give a --hostfile"
        )
    num_gpus, include, exclude = options.num_gpus, options.include, options.exclude
    if num_gpus is not None and (include is not None or exclude is not None):
        raise click.UsageError("--num_gpus does not go with --include or --exclude")
    devices = discover(os.environ)
    count = len(devices.tokens)
    filter_text = include if include is not None else exclude
    if filter_text is None:
        if num_gpus is not None and count and num_gpus > count:
            raise click.UsageError(f"--num_gpus {num_gpus}: this machine has {devices.describe()}")
        slots = tuple(range(num_gpus or count or 1))
    else:
        try:
            selection = _as_localhost(filters.parse(filter_text))
            # Without GPUs a slot is a CPU worker, and there are as many as are named.
            named = [slot for chosen in selection.values() for slot in chosen or ()]
            pool = {"localhost": range(count or max(named, default=0) + 1)}
            choose = filters.exclude if include is None else filters.include
            slots = choose(pool, selection)["localhost"]
        except filters.FilterError as error:
            hidden = f"; CUDA_VISIBLE_DEVICES={devices.visible}" if devices.visible is not None else ""
            option = "--exclude" if include is None else "--include"
            raise click.UsageError(f"{option} {filter_text!r}: {error}{hidden}") from None
    tokens = tuple(devices.tokens[slot] for slot in slots) if count else ()
    cores = cores_by_numa()
    bound = bound_cores(options, cores, len(slots), "localhost")
    return NodeSpec(
        "localhost", workers=len(slots), cores=len(cores), devices=tokens, bound=bound, env=options.worker_env
    )


def _as_localhost(selection: filters.Selection) -> filters.Selection:
    """This machine's own names mean localhost; any other host is refused."""
    own = own_names()
    merged: filters.Selection = {}
    for host, slots in selection.items():
        if host not in own:
            raise filters.FilterError(
                f"unknown host {host!r}: without a hostfile only localhost can be chosen"
            )
        known = merged.get("localhost", frozenset())
        merged["localhost"] = None if slots is None or known is None else known | slots
    return merged


def local_plan(options: Options, node: NodeSpec, attempt: int = 0) -> Plan:
    """Make the plan for this machine alone. Raises click.UsageError for a --workdir that is no folder."""
    from zlaunch.plan.checks import pick_port

    if not os.path.isdir(options.workdir):
        raise click.UsageError(f"--workdir {options.workdir}: there is no such folder")
    return make_plan(
        options.target,
        [node],
        run_id=options.run_id,
        run_dir=options.run_dir,
        master_addr=options.master_addr or "127.0.0.1",
        master_port=pick_port(options.master_port),
        cwd=options.workdir,
        grace_s=options.grace_s,
        bootstrap=python_module_argv("zlaunch.node.bootstrap"),
        environ=os.environ,
        restart_count=attempt,
        resume_dir=resume_folder(options.run_dir, options.run_id, attempt, options.target, os.environ),
    )


def open_local(options: Options, host: str) -> Link:
    from zlaunch.launch.nodes import Link, NodeError
    from zlaunch.node.agent import agent_argv
    from zlaunch.transports.local import LocalTransport

    try:
        return Link(LocalTransport(host, agent_argv(), Path(options.run_dir, "logs", f"agent_{host}.log")))
    except OSError as error:
        raise NodeError(host, f"cannot start an agent: {error}") from None


def await_name(host: str, timeout_s: float, say: Say) -> None:
    """Wait until a name has an address: a pod's may come a little after the pod. Raises NodeError."""
    from zlaunch.launch.nodes import SLOW_S, NodeError

    started = said_at = time.monotonic()
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except (OSError, UnicodeError) as error:
            now = time.monotonic()
            if now - started >= timeout_s:
                text = f"--master_addr {host} has no address: {error}; looked for {timeout_s:g} s"
                raise NodeError(host, text) from None
            if now - said_at >= SLOW_S:
                said_at = now
                say(f"waiting for an address of {host} ({now - started:.0f} s)")
            time.sleep(min(0.5, timeout_s))


def local_job(options: Options, make: Callable[[int], Plan]) -> Job:
    """A job on this machine; `make` gives the plan of an attempt."""
    from zlaunch.launch.job import Job
    from zlaunch.launch.nodes import Node, NodeError
    from zlaunch.system.facts import own_facts

    def connect(hosts: Sequence[str], say: Say) -> tuple[list[Node], list[NodeError]]:
        try:
            if options.master_addr is not None:
                await_name(options.master_addr, options.connect_timeout_s, say)
            return [Node(open_local(options, "localhost"), own_facts(with_network=False))], []
        except NodeError as error:
            return [], [error]

    return Job(
        run_dir=options.run_dir,
        hosts=("localhost",),
        connect=connect,
        plan=lambda nodes, meet, attempt: make(attempt),
    )
