"""`zlaunch doctor`: ask every host what a launch needs, and say what is wrong and what to do."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zlaunch.cli.commands import SETTINGS, Command, with_options
from zlaunch.cli.launch_options import REACH
from zlaunch.errors import LaunchError
from zlaunch.plan.options import Launch, Program, python_there
from zlaunch.system.checkup import Checkup, HostReport, Problem, describe_gpus, judge, size

if TYPE_CHECKING:
    from rich.text import Text

    from zlaunch.launchers.ssh import SshLauncher
    from zlaunch.supervisor.nodes import Node

_CONNECT_TIMEOUT_S = 30.0
_MEET_TIMEOUT_S = 40.0
"""Seconds for finding all hosts that cannot reach node 0: each takes a round of connecting."""
COLUMNS = (
    *("host", "state", "python", "zlaunch", "torch", "GPUs", "driver", "clock"),
    "memory",
    "disk",
    "shm",
    "memlock",
    "nofile",
    "interfaces",
    "NCCL",
    "node 0",
)
"""Columns of the table; a problem names the one that it belongs to."""
_NOT_KNOWN = "-"
_SHOWN_INTERFACES = 4
_STYLES = {"error": "bold red", "warning": "yellow"}


@click.command(
    cls=Command, context_settings=SETTINGS, short_help="Check this machine or hosts before a launch."
)
@click.option("-H", "--hostfile", metavar="FILE", help="Hosts to check.  [default: this machine]")
@with_options(REACH)
@click.option("--json", "as_json", is_flag=True, help="Print all findings as JSON.")
def doctor(hostfile: str | None, as_json: bool, iface: str | None, **given: Any) -> int:
    """Check that this machine or the hosts of a hostfile are ready for a launch.

    It accepts the options of a launch that reach other nodes. Exit code 1 means that a launch would fail.
    """
    reports, problems = _findings(hostfile, iface, given)
    data = _as_data(reports, problems)
    if as_json:
        print(json.dumps(data, indent=2))
    else:
        _show(reports, problems)
    if hostfile is None and os.environ.get("SLURM_JOB_NUM_NODES", "1") != "1":
        every = "srun --ntasks-per-node=1 zlaunch doctor"
        print(f"zlaunch: only this machine was checked; for each node of the job: {every}", file=sys.stderr)
    return 0 if data["ok"] else 1


def own_findings() -> dict[str, Any]:
    """Return what `zlaunch doctor --json` says about this machine. Raises LaunchError, OSError."""
    reach = {
        "ssh_port": None,
        "ssh_config": None,
        "ssh_accept_new": False,
        "venv": None,
        "remote_python": None,
    }
    return _as_data(*_findings(None, None, reach))


def _findings(
    hostfile: str | None, iface: str | None, given: Mapping[str, Any]
) -> tuple[list[HostReport], list[Problem]]:
    from zlaunch.launchers.ssh import SshLauncher

    with tempfile.TemporaryDirectory(prefix="zlaunch-doctor-") as folder:
        Path(folder, "logs").mkdir()
        if hostfile is None:
            hostfile = str(Path(folder, "this_machine"))
            Path(hostfile).write_text("localhost\n")
        reports = _examine(SshLauncher(_launch(folder, hostfile, iface, given), None))
    return reports, judge(reports)


def _launch(folder: str, hostfile: str, iface: str | None, given: Mapping[str, Any]) -> Launch:
    """Make a launch that reaches the hosts as any other would."""
    python_there(given["venv"], given["remote_python"])  # refuses both
    try:
        workdir = os.getcwd()
    except FileNotFoundError:
        raise LaunchError("the current folder was removed: change to another one") from None
    return Launch(
        program=Program("script", "", ()),
        run_id="doctor",
        run_dir=folder,
        hostfile=hostfile,
        iface=iface,
        workdir=workdir,
        connect_timeout_s=_CONNECT_TIMEOUT_S,
        **given,
    )


# -- asking ------------------------------------------------------------------------------------


def _examine(launcher: SshLauncher) -> list[HostReport]:
    """Return a report for every host, in order."""
    from zlaunch.supervisor.checkups import ask_checkups
    from zlaunch.supervisor.nodes import close_all, connect

    launch = launcher.launch
    hosts = launcher.hosts
    nodes, errors = connect(hosts, launcher.open_transport, _CONNECT_TIMEOUT_S)
    nccl_setting = launcher.environ.get("NCCL_SOCKET_IFNAME") or launch.iface
    try:
        reports = ask_checkups(nodes, launch.workdir, nccl_setting, lambda node: node.facts.devices)
        able = [node for node, report in zip(nodes, reports, strict=True) if report.checkup is not None]
        interfaces, meet_errors = _meet(able, launch.iface)
    finally:
        close_all(nodes)
    known = {error.host: HostReport(host=error.host, error=error.text) for error in errors}
    known |= {report.host: report for report in reports}
    return [
        replace(
            known[host],
            slots=launcher.selection.entries[host].slots,
            workdir=launch.workdir,
            iface=launch.iface,
            meets_by=interfaces.get(host),
            meet_error=meet_errors.get(host, ""),
        )
        for host in hosts
    ]


def _meet(nodes: Sequence[Node], iface: str | None) -> tuple[dict[str, str], dict[str, str]]:
    """Have all nodes reach the first one; a node that cannot is left out, and the others try again.

    Maps hosts to the interface by which they and node 0 reach each other, and the others to why they cannot.
    """
    from zlaunch.errors import NodeError
    from zlaunch.supervisor.nodes import find_rendezvous

    left = list(nodes)
    errors = dict[str, str]()
    if len(left) < 2 or (iface is not None and iface not in left[0].facts.addresses):
        return {}, {}  # the report names the second
    deadline = time.monotonic() + _MEET_TIMEOUT_S
    while len(left) > 1 and time.monotonic() < deadline:
        try:
            found = find_rendezvous(left, master_addr=None, master_port=0, iface=iface)
        except NodeError as error:
            errors[error.host] = error.text
            if error.host == left[0].host:
                break
            left = [node for node in left if node.host != error.host]
        else:
            names = [node.host for node in left]
            return dict(zip(names, found.interfaces, strict=True)), errors
    return {}, errors


# -- showing -----------------------------------------------------------------------------------


def table_rows(reports: Sequence[HostReport], problems: Sequence[Problem]) -> list[list[Text]]:
    """Return a row for each host with a cell for each of COLUMNS; errors are red, warnings yellow."""
    from rich.text import Text

    rows = []
    for report in reports:
        levels: dict[str, str] = {}
        for problem in problems:
            if problem.host == report.host and levels.get(problem.check) != "error":
                levels[problem.check] = problem.level
        cells = _cells(report)
        cells["state"] = levels["state"] = min(levels.values(), default="ok")  # error before warning
        rows.append([Text(cells[column], _STYLES.get(levels.get(column, ""), "")) for column in COLUMNS])
    return rows


def _cells(report: HostReport) -> dict[str, str]:
    cells = dict.fromkeys(COLUMNS, _NOT_KNOWN)
    cells["host"] = report.host
    facts = report.facts
    checkup = report.checkup
    if facts is not None:
        cells |= {"python": facts.python, "zlaunch": facts.version, "GPUs": describe_gpus(report) or "0"}
        shown = [f"{name} {addresses[0]}" for name, addresses in facts.addresses.items()]
        more = ["..."] if len(shown) > _SHOWN_INTERFACES else []
        cells["interfaces"] = "\n".join([*shown[:_SHOWN_INTERFACES], *more]) or "none"
    if report.skew_s is not None:
        cells["clock"] = f"{report.skew_s:+.3f} s"
    if report.meets_by is not None or report.meet_error:
        cells["node 0"] = "cannot" if report.meet_error else f"by {report.meets_by}"
    if checkup is not None:
        disk = checkup.disk_free_bytes
        shm = checkup.shm_free_bytes
        memlock = checkup.memlock_bytes
        cells |= {
            "torch": checkup.torch or "none",
            "driver": checkup.driver or "none",
            "memory": size(checkup.memory_free_bytes),
            "disk": "no folder" if disk is None else size(disk),
            "shm": "none" if shm is None else size(shm),
            "memlock": "unlimited" if memlock is None else size(memlock),
            "nofile": "unlimited" if checkup.nofile is None else str(checkup.nofile),
            "NCCL": checkup.nccl_interface or "none",
        }
    return cells


def _show(reports: Sequence[HostReport], problems: Sequence[Problem]) -> None:
    from zlaunch.cli.tables import make_table, stdout_console

    console = stdout_console()
    rows = table_rows(reports, problems)
    padding = (0, 1, 0, 0)
    whole = make_table(COLUMNS, rows, padding=padding)
    if console.measure(whole, options=console.options.update(max_width=1000)).maximum <= console.width:
        console.print(whole)
    else:
        half = COLUMNS.index("memory")
        upper = [row[:half] for row in rows]
        lower = [[row[0], *row[half:]] for row in rows]
        console.print(make_table(COLUMNS[:half], upper, padding=padding))
        console.print(make_table(("host", *COLUMNS[half:]), lower, padding=padding))
    for problem in problems:
        colour = "red" if problem.level == "error" else "yellow"
        text = ": ".join(filter(None, (problem.text, problem.advice)))
        console.print(f"[{colour}]{problem.level}[/]", end=" ")
        console.print(f"{problem.host}: {text}", markup=False, soft_wrap=True)
    if not problems:
        console.print("nothing is wrong")


def _as_data(reports: Sequence[HostReport], problems: Sequence[Problem]) -> dict[str, Any]:
    """Return all findings as data: every host has every key, with None for what is not known."""
    from dataclasses import asdict

    from zlaunch.system.machine import Facts

    hosts = []
    for report in reports:
        own = asdict(report)
        facts = own.pop("facts") or dict.fromkeys(Facts.__slots__)
        checkup = own.pop("checkup") or dict.fromkeys(Checkup.__slots__)
        facts["zlaunch"] = facts.pop("version")
        hosts.append({**own, **facts, **checkup})
    failed = any(problem.level == "error" for problem in problems)
    return {"ok": not failed, "hosts": hosts, "problems": [asdict(problem) for problem in problems]}
