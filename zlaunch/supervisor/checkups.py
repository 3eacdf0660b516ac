"""Ask nodes for their checkups, for `zlaunch doctor` and `--health`, and find those that are not healthy."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from zlaunch import __version__
from zlaunch.errors import NodeError
from zlaunch.supervisor.nodes import PARALLEL, Node
from zlaunch.system.checkup import Checkup, HostReport, judge, size
from zlaunch.system.gpu_health import GpuHealth
from zlaunch.system.messages import CheckUp, CheckUpAnswer, Ping, Pong
from zlaunch.view.console import Console

_ANSWER_TIMEOUT_S = 20.0
_PINGS = 3
_NOT_KNOWN = "?"


def ask_checkups(
    nodes: Sequence[Node],
    workdir: str,
    nccl_setting: str | None,
    gpus_of: Callable[[Node], Sequence[str]],
) -> list[HostReport]:
    """Return the report of every node, in order; `gpus_of`: the GPUs there whose health is examined."""

    def ask(node: Node) -> HostReport:
        return _ask(node, workdir, nccl_setting, gpus_of(node))

    with ThreadPoolExecutor(PARALLEL) as pool:
        return list(pool.map(ask, nodes))


def _ask(node: Node, workdir: str, nccl_setting: str | None, gpus: Sequence[str]) -> HostReport:
    """Ask one host for its clock and checkup, in a bounded time."""
    report = HostReport(host=node.host, facts=node.facts, workdir=workdir)
    if node.facts.version != __version__:  # it may not know what to answer
        return report
    timer = threading.Timer(_ANSWER_TIMEOUT_S, node.link.transport.kill)
    timer.daemon = True
    timer.start()
    started = time.monotonic()
    try:
        skew = _skew_s(node)
        answer = node.link.ask(CheckUp(workdir, list(gpus), nccl_setting), CheckUpAnswer)
        checkup = Checkup.from_event(answer.content)
        return replace(report, checkup=checkup, skew_s=skew)
    except NodeError as error:
        late = time.monotonic() - started >= _ANSWER_TIMEOUT_S
        text = f"no answer within {_ANSWER_TIMEOUT_S:g} s" if late else error.text
        return replace(report, error=text)
    except KeyError as error:
        text = f"its zlaunch {__version__} answers without {error}: install the same code as here"
        return replace(report, error=text)
    except TypeError as error:
        text = f"its zlaunch {__version__} answers otherwise ({error}): install the same code as here"
        return replace(report, error=text)
    finally:
        timer.cancel()


def _skew_s(node: Node) -> float:
    """Return a node's clock less ours, by the fastest of some pings, half of whose time is taken off."""
    best_s = float("inf")
    skew_s = 0.0
    for _ in range(_PINGS):
        sent = time.time()
        started = time.monotonic()
        there = node.link.ask(Ping(), Pong).time
        round_trip_s = time.monotonic() - started
        if round_trip_s < best_s:
            best_s = round_trip_s
            skew_s = there - sent - round_trip_s / 2
    return skew_s


def find_unhealthy(
    nodes: Sequence[Node], workdir: str, gpus_of: Callable[[Node], Sequence[str]], console: Console
) -> list[NodeError]:
    """Show the health of each node, and return an error for each that is not healthy."""
    reports = ask_checkups(nodes, workdir, None, gpus_of)
    for report in reports:
        if report.checkup is not None:
            console.message(f"health of {report.host}: {describe_health(report.checkup)}")
    wrong: dict[str, list[str]] = {report.host: [report.error] for report in reports if report.error}
    for problem in judge(reports):
        if problem.unhealthy:
            text = ": ".join(filter(None, (problem.text, problem.advice)))
            wrong.setdefault(problem.host, []).append(text)
    return [NodeError(host, f"it is not healthy: {'; '.join(texts)}") for host, texts in wrong.items()]


def describe_health(checkup: Checkup) -> str:
    """Return a line for people on what a node has reported."""
    disk = checkup.disk_free_bytes
    found = checkup.gpu_report
    memory = f"{size(checkup.memory_free_bytes)} of memory"
    said = [f"{memory} and {'no folder' if disk is None else f'{size(disk)} of disk'} free"]
    said += [_describe_gpu(gpu) for gpu in found.gpus]
    if found.log_unknown:
        said.append(f"Xid errors are unknown ({found.log_unknown})")
    return "; ".join(said)


def _describe_gpu(gpu: GpuHealth) -> str:
    known = (gpu.temperature_c, gpu.clock_mhz, gpu.max_clock_mhz, gpu.ecc_errors)
    temperature, clock, highest, errors = (_NOT_KNOWN if value is None else value for value in known)
    text = f"GPU {gpu.token} {temperature} C, {clock} of {highest} MHz, {errors} ECC errors"
    return f"{text}, Xid {', '.join(map(str, gpu.xids))}" if gpu.xids else text
