"""Say in one sentence what bounds a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from zlaunch.view.progress import TIMES, RunProgress

_SLOW_RANK = 0.15
"""A rank is slow when it works longer than the others by this part of a step."""
_LOW_MFU = 0.25
_FEW_TOKENS = 1024
"""A batch is small where a pass has fewer tokens and reaches less of what matrix multiplications do."""
_LATENCY = 0.25
"""Messages are small where their bytes explain no more than this part of the time."""
_NOTHING: Mapping[str, float] = {}
_OWN = tuple(name for name in TIMES if name != "communication_ms")
_PLAIN = {
    "forward_ms": "its forward pass",
    "backward_ms": "its backward pass",
    "step_ms": "its optimizer step",
    "disk_ms": "its disk",
    "script_ms": "its script (data, evaluation, saving)",
}


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """Names what bounds a step."""

    kind: str
    """``compute``, ``small batch``, ``communication``, ``disk``, ``optimizer``, ``script``, ``slow rank``."""
    sentence: str
    slow_rank: int | None = None


def find_bottleneck(
    times: Mapping[int, Mapping[str, float]],
    hosts: Mapping[int, str],
    facts: Mapping[str, float] = _NOTHING,
    *,
    node_count: int | None = None,
) -> Bottleneck | None:
    """Return what bounds the step of a run; None where no rank has reported times.

    ``times``: the milliseconds of a step's parts by rank, as in a report. ``facts``: by name what else is
    known, of a report and of what was measured at the start: ``mfu``, ``micro_tokens``, ``moved_mb``,
    ``link_gbs``, ``disk_mb``, ``disk_gbs``. ``node_count``: the run's nodes, where other launchers report
    the ranks of some. Ranks wait for each other in
    collectives, so the one that waits least while it works longest is the one that the others wait for.
    """
    if not times:
        return None
    whole = median(each["all_ms"] for each in times.values())
    slow = _find_slow_rank(times, whole)
    if slow is not None:
        rank, extra, part = slow
        where = f"rank {rank} on {hosts[rank]}" if hosts.get(rank) else f"rank {rank}"
        return Bottleneck(
            "slow rank",
            f"{where} bounds the step: the others wait {_number(extra)} of {_number(whole)} ms for "
            f"{_PLAIN[part]}",
            rank,
        )
    means = {name: sum(each[name] for each in times.values()) / len(times) for name in TIMES}
    compute = means["forward_ms"] + means["backward_ms"]
    shares = {
        "compute": compute,
        "communication": means["communication_ms"],
        "disk": means["disk_ms"],
        "optimizer": means["step_ms"],
        "script": means["script_ms"],
    }
    kind = max(shares, key=lambda name: shares[name])
    took = f"{_number(shares[kind])} of {_number(whole)} ms ({shares[kind] / whole:.0%})"
    nodes = node_count or len({hosts.get(rank) for rank in times})
    tokens = facts.get("micro_tokens", 0.0)
    if kind == "compute" and facts.get("mfu", 1.0) < _LOW_MFU and 0 < tokens < _FEW_TOKENS:
        return Bottleneck(
            "small batch",
            f"a small batch bounds the step: forward and backward passes of {tokens:.0f} tokens each take "
            f"{took}{_reached(facts)}; larger micro-batches may use the device better",
        )
    more = _reached(facts) if kind == "compute" else ""
    if kind == "communication":
        moved = facts.get("moved_mb", 0.0)
        speed = facts.get("link_gbs", 0.0)
        more = _least_time(moved, speed)
        if more and moved / speed < _LATENCY * shares[kind]:
            more += ": the rest is latency of small messages, or waiting for ranks that are late in turn"
    elif kind == "disk":
        more = _least_time(facts.get("disk_mb", 0.0), facts.get("disk_gbs", 0.0))
    return Bottleneck(kind, _sentence(kind, took, nodes, backward=means["backward_ms"]) + more)


def _number(value: float) -> str:
    """Write three digits."""
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _reached(facts: Mapping[str, float]) -> str:
    """Say which part of the measured limit a computation reaches, where that is known."""
    mfu = facts.get("mfu", 0.0)  # a script may report one of its own, in percent
    return f", at {100 * mfu:.2g}% of what matrix multiplications reach here" if 0 < mfu <= 1 else ""


def _least_time(moved: float, speed: float) -> str:
    """Say how long it takes at least to move so many MB, by the GB/s measured at the start."""
    if moved <= 0 or speed <= 0:
        return ""
    least_ms = moved / speed
    return (
        f". What a rank moves, {moved:.3g} MB, takes {least_ms:.3g} ms at the {speed:.3g} GB/s of the start"
    )


def _sentence(kind: str, took: str, nodes: int, *, backward: float) -> str:
    if kind == "compute":
        return f"computation bounds the step: forward and backward passes take {took}"
    if kind == "communication":
        where = f"between {nodes} nodes" if nodes > 1 else "inside of the node"
        more = (
            "`zlaunch bench net` measures the links" if nodes > 1 else "larger micro-batches need less of it"
        )
        return f"communication {where} bounds the step: ranks wait {took} for it; {more}"
    if kind == "disk":
        return f"the disk bounds the step: ranks wait {took} for it; `zlaunch bench io` measures it"
    if kind == "optimizer":
        return f"the optimizer's step bounds the step: it takes {took}"
    if backward == 0.0:
        where = "between the engine's calls, with its own backward pass"
        return f"the script bounds the step: {took} pass {where}"
    return f"the script bounds the step: {took} pass between the engine's calls (data, evaluation, saving)"


def _find_slow_rank(times: Mapping[int, Mapping[str, float]], whole: float) -> tuple[int, float, str] | None:
    """Return a rank that works longer than the others do, by how many milliseconds, and in which part.

    Others wait for it in the runtime's collectives, or in those of the script, which count as the script's.
    """
    if len(times) < 2:
        return None
    waits: tuple[str, ...] = ("communication_ms",)
    for names in (_OWN, tuple(name for name in _OWN if name != "script_ms")):
        own = {rank: sum(each[name] for name in names) for rank, each in times.items()}
        waited = {rank: sum(each[name] for name in waits) for rank, each in times.items()}
        slowest = max(own, key=lambda rank: own[rank])  # it is called at once
        others = [rank for rank in times if rank != slowest]
        extra = own[slowest] - median(own[rank] for rank in others)
        if min(extra, median(waited[rank] for rank in others) - waited[slowest]) >= _SLOW_RANK * whole:
            more = {name: times[slowest][name] - median(times[r][name] for r in others) for name in names}
            return slowest, extra, max(more, key=lambda name: more[name])
        waits = ("communication_ms", "script_ms")
    return None


_ENOUGH_STEPS = 10
"""Steps after which it can be said what bounds them: the first ones do much for the first time."""


def bottleneck_of(progress: RunProgress, hosts: Mapping[int, str] | None = None) -> Bottleneck | None:
    """Return what bounds the steps of an attempt. ``hosts``: the names of the ranks' nodes for the user."""
    names = {rank: known.host for rank, known in progress.ranks.items()} if hosts is None else hosts
    return find_bottleneck(progress.times(), names, progress.facts(), node_count=progress.node_count)


def what_bounds(progress: RunProgress, hosts: Mapping[int, str]) -> str:
    """Say what bounded the steps of an attempt; "" where there were too few."""
    found = bottleneck_of(progress, hosts)
    return found.sentence if found is not None and (progress.step or 0) >= _ENOUGH_STEPS else ""
