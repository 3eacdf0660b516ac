"""Define the options of the command that launches, in the groups of its long help.

Other commands share some: `doctor` those that reach other nodes, `bench net` those that choose the ranks.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import click

from zlaunch.cli.commands import count_option, option, seconds_option
from zlaunch.cli.flags import deepspeed_flags, take_launcher
from zlaunch.launchers.registry import NAMED
from zlaunch.plan.options import BIND_CHOICES, COMPAT_CHOICES

_PLACE = "Where to run"
_WORKERS = "Workers"
_FAILURES = "Failures"
_OUTPUT = "Output"
_SLURM = "SLURM"

_TAKEN = ("last", "latest")
"""Words for the newest run: the second is the link in the folder of runs."""


def _steps(_context: click.Context, _option: click.Parameter, text: str | None) -> str | None:
    """Check a range of steps."""
    if text is None:
        return None
    found = re.fullmatch(r"([1-9][0-9]{0,8})(?:-([1-9][0-9]{0,8}))?", text)
    if found is None or int(found[2] or found[1]) < int(found[1]):
        raise click.BadParameter(f"{text!r} is not a step or a range of steps such as 10-12")
    return text


def _debugged(_context: click.Context, _option: click.Parameter, text: str | None) -> int | None:
    """Read a rank. accelerate has a switch of this name."""
    if text is not None and not re.fullmatch(r"[0-9]{1,6}", text, re.ASCII):
        raise click.BadParameter(
            f"{text!r} is not a rank; --debug 0 debugs rank 0. accelerate's --debug is "
            "--env ACCELERATE_DEBUG_MODE=true"
        )
    return None if text is None else int(text)


def _label(_context: click.Context, given: click.Parameter, value: Any) -> Any:
    """Check names and tags: tables, addresses and command lines show them as they are."""
    for text in value if isinstance(value, tuple) else () if value is None else (value,):
        if not re.fullmatch(r"\w[\w@+.:=-]{0,63}", text, re.ASCII) or text in _TAKEN:
            raise click.BadParameter(
                f"{text!r} is not a {given.name}: use up to 64 letters, digits and . _ - + : = @, "
                "not `last` or `latest`, and begin with a letter or digit"
            )
    return value


_place = partial(option, group=_PLACE)
_worker = partial(option, group=_WORKERS)
_failure = partial(option, group=_FAILURES)
_output = partial(option, group=_OUTPUT)

_MOST_WORKERS = 4096
"""Workers on a node: more is a typo, whose plan would fill the memory."""


class _GpuCount(click.IntRange):
    """Takes a number of GPUs; names the right option for a list of them."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and re.fullmatch(r"\d+([,-]\d+)+", value):
            self.fail(
                f"{value} is a list of GPUs, not their number: use --include localhost:{value}", param, ctx
            )
        return super().convert(value, param, ctx)


REACH = (
    _place("--ssh_port", type=click.IntRange(1, 65535), metavar="PORT", help="Port of sshd on the nodes."),
    _place("--ssh_config", metavar="FILE", help="ssh configuration to use instead of ~/.ssh/config."),
    _place("--ssh_accept_new", is_flag=True, help="Accept and store host keys that ssh does not know yet."),
    _place(
        "--remote_python", metavar="PATH", help="Python on the nodes.  [default: the path of this Python]"
    ),
    _place("--venv", metavar="DIR", help="Virtual environment on the nodes, whose Python runs the workers."),
    _place("--iface", metavar="NAME", help="Network interface for the rendezvous, NCCL and Gloo."),
)
"""Lists the options that reach other nodes."""
WHERE = (
    _place(
        "--num_gpus",
        "--num_accelerators",
        type=_GpuCount(1, _MOST_WORKERS),
        metavar="N",
        common=True,
        help="Workers per node, one per GPU.  [default: all GPUs]",
    ),
    _place(
        "-H",
        "--hostfile",
        metavar="FILE",
        common=True,
        help="Hosts to run on, one line `HOST slots=N` each.",
    ),
    count_option("--num_nodes", group=_PLACE, common=True, help="Use only the first N hosts."),
    _place(
        "-i",
        "--include",
        metavar="FILTER",
        common=True,
        help="Hosts and GPUs to use: node1:0,2-3@node[2-4].",
    ),
    _place("-e", "--exclude", metavar="FILTER", help="Hosts and GPUs to leave out: node1:0,2-3@node[2-4]."),
    _place(
        "--launcher",
        metavar=f"[{'|'.join(NAMED)}]",
        callback=take_launcher,
        help="How to start the agents on the nodes; openssh runs the ssh program.  [default: auto]",
    ),
    _place(
        "--master_port",
        type=int,
        default=0,
        metavar="PORT",
        help="Rendezvous port.  [default: a free port]",
    ),
    _place(
        "--master_addr",
        metavar="ADDR",
        help="Rendezvous address.  [default: an address of node 0 that all nodes reach]",
    ),
    *REACH,
    seconds_option(
        "--connect_timeout",
        "Fail if a node does not answer within this many seconds at the start.",
        default=60.0,
        low=1,
        group=_PLACE,
    ),
    _worker(
        "--env",
        multiple=True,
        metavar="KEY[=VAL]",
        help="Export an environment variable to all workers; repeatable.",
    ),
)
"""Lists the options that choose the ranks of a run and reach their nodes."""
LAUNCH = (
    *WHERE,
    _place("--no_ssh", is_flag=True, help="You start the same command on every node yourself."),
    _place(
        "--node_rank", type=int, metavar="N", help="Rank of this node, where you start every node yourself."
    ),
    _place("--workdir", metavar="DIR", help="Working directory on every node.  [default: the current one]"),
    _worker(
        "--bind",
        type=click.Choice(BIND_CHOICES),
        help="Bind each worker to the CPU cores near its GPU (node), to its share of them (cores), or not at "
        "all.  [default: node]",
    ),
    _worker("--bind_cores_to_rank", is_flag=True, help="The same as --bind cores."),
    _worker("--bind_core_list", metavar="CORES", help="Cores to share out between the workers: 0-7,16-23."),
    _worker("-m", "--module", is_flag=True, help="SCRIPT is a module name, as with python -m."),
    _worker(
        "--no_python", is_flag=True, help="SCRIPT is an executable, not Python; it gets no --local_rank."
    ),
    _worker(
        "--no_preload",
        is_flag=True,
        help="Start each worker as a new process instead of forking one that has imported torch.",
    ),
    _worker(
        "--no_local_rank", is_flag=True, help="Pass no --local_rank=N, not even to a script that knows it."
    ),
    _worker(
        "--compat",
        type=click.Choice(COMPAT_CHOICES),
        help="Module that `import deepspeed` loads: deepspeed loads zlaunch, none the real DeepSpeed, auto "
        "zlaunch if DeepSpeed is not installed.  [default: auto]",
    ),
    _worker(
        "--debug",
        metavar="RANK",
        callback=_debugged,
        help="Wait in this rank for a debugger (VS Code) before the script runs; needs zlaunch[debug].",
    ),
    count_option(
        "--max_restarts",
        low=0,
        default=0,
        show_default=True,
        group=_FAILURES,
        common=True,
        help="Restart up to N times after failures.",
    ),
    count_option(
        "--min_nodes",
        group=_FAILURES,
        help="Continue without dead nodes as long as N nodes remain.",
    ),
    count_option(
        "--spares", group=_FAILURES, help="Reserve the last N hosts as spares that replace dead nodes."
    ),
    _failure(
        "--health",
        is_flag=True,
        help="Check memory, disk and GPUs of each node before workers start, and start none on a bad node.",
    ),
    _failure(
        "--exclude_unhealthy",
        is_flag=True,
        help="Continue without nodes that --health finds bad; needs --min_nodes or --spares.",
    ),
    seconds_option(
        "--heartbeat",
        "Declare a node dead after this many seconds without a heartbeat.",
        default=15.0,
        low=1,
        group=_FAILURES,
    ),
    seconds_option(
        "--hang_timeout",
        "Stop and print the stacks of all ranks after this many seconds without output.  [default: off]",
        default=0.0,
        group=_FAILURES,
    ),
    seconds_option(
        "--grace",
        "Seconds between SIGTERM and SIGKILL when workers are stopped.  [default: 3, with --requeue 25]",
        group=_FAILURES,
    ),
    _output(
        "--run_dir",
        "--enable_each_rank_log",
        metavar="DIR",
        common=True,
        help="Folder of logs and events.  [default: runs/TIME-ID]",
    ),
    _output(
        "--name",
        metavar="NAME",
        callback=_label,
        help="Name of the run. Commands accept it for the newest run in runs/ with this name.",
    ),
    _output("--tag", multiple=True, metavar="TAG", callback=_label, help="Label of the run; repeatable."),
    _output(
        "--log_ranks",
        metavar="RANKS",
        help="Ranks whose output the console shows: 0,2-3 or all. The log files have every rank.  "
        "[default: 0]",
    ),
    count_option(
        "--log_max_mb",
        group=_OUTPUT,
        help="Keep only the newest N MB of each rank's log, in two files.  [default: no limit]",
    ),
    _output(
        "--profile",
        metavar="STEPS",
        callback=_steps,
        help="Write a profiler trace of rank 0 for step 10, or for steps 10-12, into the run's folder.",
    ),
    _output(
        "--detach",
        is_flag=True,
        common=True,
        help="Run in the background and print the run's name.",
    ),
    _output("--dry_run", is_flag=True, common=True, help="Print the plan and start nothing."),
    _output("--json", "as_json", is_flag=True, help="Print the plan of --dry_run as JSON."),
    _output("-q", "--quiet", is_flag=True, help="Show only the workers' output, warnings and failures."),
    _output("-v", "--verbose", is_flag=True, help="Show how the launcher, memory and mesh were chosen."),
    option(
        "--requeue",
        is_flag=True,
        group=_SLURM,
        help="Requeue the SLURM job when SIGUSR1 or SIGTERM stops the run.",
    ),
    *deepspeed_flags(),
    option("--run_id", hidden=True),
    option("--parent", type=int, hidden=True),
    option("--first_attempt", type=int, default=0, hidden=True),
)
"""Lists the options of the command that launches."""
