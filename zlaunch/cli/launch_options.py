"""Define the options of the command that launches. `doctor` shares those that reach other nodes."""

from __future__ import annotations

import re

import click

from zlaunch.cli.commands import count_option, seconds_option
from zlaunch.cli.deepspeed_flags import deepspeed_flags, launcher_name
from zlaunch.launchers.registry import NAMED
from zlaunch.plan.options import COMPAT_CHOICES


def _steps(_context: click.Context, _option: click.Parameter, text: str | None) -> str | None:
    """Check a range of steps."""
    if text is None:
        return None
    found = re.fullmatch(r"([1-9][0-9]{0,8})(?:-([1-9][0-9]{0,8}))?", text)
    if found is None or int(found[2] or found[1]) < int(found[1]):
        raise click.BadParameter(f"{text!r} is no step, or first and last one, such as 10-12")
    return text


REACH = (
    click.option("--ssh_port", type=click.IntRange(1, 65535), metavar="PORT", help="Port of sshd."),
    click.option("--ssh_config", metavar="FILE", help="Instead of ~/.ssh/config."),
    click.option(
        "--ssh_accept_new", is_flag=True, help="Trust host keys that are not known yet, and remember them."
    ),
    click.option(
        "--remote_python", metavar="PATH", help="Python on the nodes.  [default: the path of this one]"
    ),
    click.option("--venv", metavar="DIR", help="Virtual environment on the nodes; its Python is taken."),
    click.option("--iface", metavar="NAME", help="Network interface for rendezvous and traffic."),
)
"""Lists the options that reach other nodes."""
WHERE = (
    count_option(
        "--num_gpus",
        "--num_accelerators",
        help="Workers on each node: one a GPU; without a GPU any number.  [default: all GPUs, or 1]",
    ),
    click.option("-H", "--hostfile", metavar="FILE", help="Hosts to run on: lines of HOST slots=N."),
    count_option("--num_nodes", help="Use the first N hosts."),
    click.option("-i", "--include", metavar="FILTER", help="Hosts and slots to use: node1:0,2-3@node[2-4]."),
    click.option("-e", "--exclude", metavar="FILTER", help="Hosts and slots to leave out, in the same form."),
    click.option(
        "--launcher",
        metavar=f"[{'|'.join(NAMED)}]",
        callback=launcher_name,
        help="How to reach the nodes; openssh is the ssh program.  [default: found out, and said]",
    ),
    click.option(
        "--master_port", type=int, default=0, metavar="PORT", help="Rendezvous port; 0 takes a free one."
    ),
    click.option(
        "--master_addr", metavar="ADDR", help="Rendezvous address.  [default: one of node 0 that all reach]"
    ),
    *REACH,
    seconds_option("--connect_timeout", "For a node to answer at the start.", default=60.0, low=1),
    click.option(
        "--env", multiple=True, metavar="KEY[=VAL]", help="Export a variable to the nodes; repeatable."
    ),
)
"""Lists the options that choose the ranks of a run and reach their nodes."""
LAUNCH = (
    *WHERE,
    click.option("--no_ssh", is_flag=True, help="The same command is started on each node by hand."),
    click.option(
        "--node_rank", type=int, metavar="N", help="Which of the nodes this is, of those started by hand."
    ),
    *deepspeed_flags(),
    click.option("--workdir", metavar="DIR", help="Folder to run in on every node.  [default: this one]"),
    seconds_option("--heartbeat", "A node silent for so long is lost.", default=15.0, low=1),
    count_option(
        "--max_restarts",
        low=0,
        default=0,
        show_default=True,
        help="Start all workers anew after a failure, so many times.",
    ),
    count_option("--min_nodes", help="Go on without dead nodes while N are left."),
    count_option("--spares", help="Keep the last N hosts for the place of dead ones."),
    seconds_option(
        "--hang_timeout",
        "Stop, with the stacks of all ranks, when no rank has written anything for so long.",
        default=0.0,
    ),
    click.option(
        "--requeue",
        is_flag=True,
        help="In SLURM: requeue the job after a stop asked for by SIGUSR1 or SIGTERM.",
    ),
    click.option(
        "--bind_cores_to_rank", is_flag=True, help="Give each worker its share of the node's cores."
    ),
    click.option("--bind_core_list", metavar="CORES", help="The same, of these cores: 0-7,16-23."),
    click.option(
        "--run_dir",
        "--enable_each_rank_log",
        metavar="DIR",
        help="Logs, plan, events.  [default: runs/TIME-ID]",
    ),
    click.option(
        "--log_ranks",
        metavar="RANKS",
        help="Ranks shown on the console: 0,2-3 or all; the logs have every rank.  [default: 0]",
    ),
    count_option(
        "--log_max_mb", help="Of each rank's log keep the newest N MB, in two files.  [default: all]"
    ),
    click.option(
        "--profile",
        metavar="STEPS",
        callback=_steps,
        help="Write a trace of these steps, such as 10 or 10-12, of rank 0: traces in the run's folder.",
    ),
    click.option("-m", "--module", is_flag=True, help="The script is a module name, as in python -m."),
    click.option(
        "--no_python", is_flag=True, help="The script is a program of any kind; it gets no --local_rank."
    ),
    click.option(
        "--no_preload", is_flag=True, help="Start each worker by itself, not as forks of one process."
    ),
    click.option("--no_local_rank", is_flag=True, help="Do not pass --local_rank=N to the script."),
    seconds_option(
        "--grace",
        "Time between SIGTERM and SIGKILL when the run is stopped.  [default: 3; with --requeue 25]",
    ),
    click.option(
        "--compat",
        type=click.Choice(COMPAT_CHOICES),
        help="What `import deepspeed` is: auto, zlaunch where the real one is not installed; deepspeed, "
        "zlaunch in any case; none, the real one.  [default: auto]",
    ),
    click.option(
        "--detach",
        is_flag=True,
        help="Print the run's name and return; the run goes on without this terminal: zlaunch attach.",
    ),
    click.option("--dry_run", is_flag=True, help="Print the plan and start nothing."),
    click.option("--json", "as_json", is_flag=True, help="With --dry_run: the plan as JSON."),
    click.option("--run_id", hidden=True),
    click.option("--parent", type=int, hidden=True),
    click.option("--first_attempt", type=int, default=0, hidden=True),
    click.option("-q", "--quiet", is_flag=True, help="Show only the workers' output and failures."),
)
"""Lists the options of the command that launches."""
