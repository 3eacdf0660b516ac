"""Measures the network of a run: ``python -m zlaunch.runtime.comm.benchmark MIB`` on every rank.

Bus bandwidth is what nccl-tests call so (doc/PERFORMANCE.md there): the bytes of the whole buffer divided by
the time, times (n - 1) / n for all-gather and reduce-scatter and twice that for all-reduce, with n ranks. It
can be compared with the speed of a link whatever n is.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..environment import read_environment
from ..log import show
from ..report import announce
from .link import all_gather_flat, reduce_scatter_flat
from .process_group import init_distributed, new_group

# -- slow links -------------------------------------------------------------------------------------
#
# Finds what is slow among measured links. Plain numbers; no torch.


_SLOW = 0.5
"""A bandwidth below this part of the fast ones is slow."""
_LATE = 3.0
"""A latency above this multiple of the quick ones, and ``_LATE_S`` more, is late."""
_LATE_S = 200e-6
_MOST = 0.8
"""A node is slow when this part of its links is."""


@dataclass(frozen=True, slots=True)
class NetworkLink:
    """Holds what one direction between two nodes has been measured to do."""

    source: int
    """Index of the node."""
    target: int
    latency_s: float
    """Half of a round trip."""
    bytes_per_s: float


def best_of(links: Sequence[NetworkLink]) -> list[NetworkLink]:
    """Return one link for each direction that was measured, once or several times: its best numbers."""
    found: dict[tuple[int, int], NetworkLink] = {}
    for link in links:
        known = found.get((link.source, link.target), link)
        found[link.source, link.target] = NetworkLink(
            link.source,
            link.target,
            min(link.latency_s, known.latency_s),
            max(link.bytes_per_s, known.bytes_per_s),
        )
    return list(found.values())


def doubtful(links: Sequence[NetworkLink]) -> list[tuple[int, int]]:
    """Return source and target of the links that are slow or late, to be measured once more."""
    return [(link.source, link.target) for link in links if link in {*_slow(links), *_late(links)}]


def name_slow_links(links: Sequence[NetworkLink], names: Sequence[str]) -> list[str]:
    """Say in a sentence each which nodes, or else which links, are slow or late compared with the others.

    ``names``: the nodes', by index.
    """
    return [
        *_sentences(links, _slow(links), names, _BANDWIDTH),
        *_sentences(links, _late(links), names, _LATENCY),
    ]


def name_slow_nodes(bytes_per_s: Mapping[str, float], what: str) -> list[str]:
    """Say which nodes do ``what`` (a collective inside of them) slower than the others do."""
    fast = _fast(list(bytes_per_s.values()))
    rest = [value for value in bytes_per_s.values() if value >= _SLOW * fast]
    return [
        f"{node} has a slow internal network: {what} reaches {rate(value)}, elsewhere {rate(median(rest))}"
        for node, value in bytes_per_s.items()
        if value < _SLOW * fast
    ]


def rate(bytes_per_s: float) -> str:
    """Write a bandwidth: ``940 MB/s``, ``12.1 GB/s``; decimal units."""
    for factor, unit in ((1e9, "GB/s"), (1e6, "MB/s")):
        if bytes_per_s >= factor:
            return f"{bytes_per_s / factor:.3g} {unit}"
    return f"{bytes_per_s / 1e3:.3g} kB/s"


def duration(seconds: float) -> str:
    """Write a duration: ``85 µs``, ``50.3 ms``, ``1.2 s``."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def _fast(values: Sequence[float]) -> float:
    """Return the median of the largest third: even where most are slow, some are not."""
    largest = sorted(values, reverse=True)
    return median(largest[: (len(largest) + 2) // 3]) if largest else 0.0


def _slow(links: Sequence[NetworkLink]) -> list[NetworkLink]:
    fast = _fast([link.bytes_per_s for link in links])
    return [link for link in links if link.bytes_per_s < _SLOW * fast]


def _late(links: Sequence[NetworkLink]) -> list[NetworkLink]:
    quick = -_fast([-link.latency_s for link in links])
    return [link for link in links if link.latency_s > _LATE * quick + _LATE_S]


@dataclass(frozen=True, slots=True)
class _Words:
    verbs: tuple[str, str, str]
    """For a node whose links are bad in both directions, away from it, towards it."""
    shown: Callable[[Sequence[NetworkLink]], str]


_BANDWIDTH = _Words(
    ("is slow", "sends slowly", "receives slowly"),
    lambda links: rate(median(link.bytes_per_s for link in links)),
)
_LATENCY = _Words(
    ("has high latency", "sends with high latency", "receives with high latency"),
    lambda links: duration(median(link.latency_s for link in links)),
)
_SIDES: tuple[Callable[[NetworkLink, int], bool], ...] = (
    lambda link, node: node in (link.source, link.target),
    lambda link, node: link.source == node,
    lambda link, node: link.target == node,
)


def _sentences(
    links: Sequence[NetworkLink],
    bad: Sequence[NetworkLink],
    names: Sequence[str],
    words: _Words,
) -> list[str]:
    """Blame nodes where they explain the bad links (with two nodes, nobody can tell), else links."""
    nodes = sorted({link.source for link in links})
    good = [link for link in links if link not in bad]
    left = list(bad)
    said = []
    if len(nodes) > 2:
        for verb, touches in zip(words.verbs, _SIDES, strict=True):
            for node in nodes:
                own = [link for link in links if touches(link, node)]
                guilty = [link for link in left if touches(link, node)]
                if len(guilty) >= _MOST * len(own):
                    said.append(f"{names[node]} {verb}: {words.shown(guilty)}, elsewhere {words.shown(good)}")
                    left = [link for link in left if link not in guilty]
    while left:
        link = left[0]
        pair = [other for other in left if {other.source, other.target} == {link.source, link.target}]
        left = [other for other in left if other not in pair]
        ends = names[link.source], names[link.target]
        way = "between {} and {}" if len(pair) == 2 else "from {} to {}"
        said.append(
            f"the link {way.format(*ends)} {words.verbs[0]}: {words.shown(pair)}, "
            f"elsewhere {words.shown(good)}"
        )
    return said


# -- benchmark --------------------------------------------------------------------------------------


OPS = ("all_gather", "reduce_scatter", "all_reduce")
_SMALL_BYTES = 1 << 10
_FIRST_BYTES = 1 << 20
_WANTED_S = 0.1
"""Seconds that one measured transfer should take: long enough for the clock, short enough for many nodes."""
_REPEATS = 3
_SMALL_REPEATS = 11


@dataclass(frozen=True, slots=True)
class CollectiveSpeed:
    """Holds what one collective of some ranks has been measured to do."""

    scope: str
    """``node`` (the ranks of one node), ``nodes`` (one rank of each node) or ``world`` (all ranks)."""
    ranks: tuple[int, ...]
    op: str
    latency_s: float
    """With a buffer of 1 KiB."""
    buffer_bytes: int
    bus_bytes_per_s: float
    """With a buffer of ``buffer_bytes``; see the module."""


class NetworkBenchmark:
    """Measures collectives and links. Its public methods are collective; their results are rank 0's."""

    def __init__(self, device: torch.device, limit_bytes: int) -> None:
        """Learn which ranks share a node. No buffer is larger than ``limit_bytes``."""
        self.device = device
        self.limit_bytes = limit_bytes
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.nodes: list[list[int]] = []
        self.hosts: list[str] = []
        """Name the nodes, as each does itself."""
        mine = read_environment().index_on_node, socket.gethostname()
        for rank, (local_rank, host) in enumerate(_exchange(mine)):
            if local_rank == 0 or not self.nodes:
                self.nodes.append([])
                self.hosts.append(host)
            self.nodes[-1].append(rank)

    def collectives(self) -> list[CollectiveSpeed]:
        """Measure each collective in all nodes at once, then between nodes, then of all ranks."""
        scopes = [("node", self.nodes)]
        if len(self.nodes) > 1:
            scopes.append(("nodes", [[ranks[0] for ranks in self.nodes]]))
        if 1 < len(self.nodes) < self.world_size:
            scopes.append(("world", [list(range(self.world_size))]))
        found = []
        for scope, all_ranks in scopes:
            # All ranks make all groups; then those of a scope measure at the same time.
            groups = [(ranks, new_group(ranks)) for ranks in all_ranks if len(ranks) > 1]
            for ranks, group in groups:
                if self.rank in ranks:
                    speeds = [self._collective(scope, op, tuple(ranks), group) for op in OPS]
                    found += speeds if ranks[0] == self.rank else []
            dist.barrier()
        return [speed for part in _exchange(found) for speed in part]

    def links(self) -> list[NetworkLink]:
        """Measure both directions between every two nodes: several pairs without a common node at a time, and
        those that seem slow once more, alone.
        """
        mine = next(i for i, ranks in enumerate(self.nodes) if self.rank in ranks)
        found: list[NetworkLink] = []
        if self.rank == self.nodes[mine][0]:
            for pairs in rounds(len(self.nodes)):
                for source, target in (*pairs, *((b, a) for a, b in pairs)):
                    if mine in (source, target):
                        found += self._link(source, target, sends=mine == source)
        everything = best_of([link for part in _exchange(found) for link in part])
        again: list[NetworkLink] = []
        for source, target in doubtful(everything):
            if self.rank in (self.nodes[source][0], self.nodes[target][0]):
                again += self._link(source, target, sends=mine == source)
            dist.barrier()
        return best_of([*everything, *(link for part in _exchange(again) for link in part)])

    # -- one collective ------------------------------------------------------------------------

    def _collective(self, scope: str, op: str, ranks: tuple[int, ...], group: Any) -> CollectiveSpeed:
        n = len(ranks)

        def measure(wanted_bytes: int, repeats: int) -> tuple[float, int]:
            """Return the median of seconds on the slowest rank, and the buffer's bytes."""
            shard = torch.zeros(max(1, wanted_bytes // 4 // n), device=self.device)
            buffer = torch.zeros(shard.numel() * n, device=self.device)
            call = _call(op, shard, buffer, n, group)
            call()
            taken = median(self._seconds(call) for _ in range(repeats))
            slowest = torch.tensor([taken], dtype=torch.float64, device=self.device)
            dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
            return float(slowest), buffer.nbytes

        latency_s, _ = measure(_SMALL_BYTES, _SMALL_REPEATS)
        seconds, size = measure(min(_FIRST_BYTES, self.limit_bytes), 1)
        seconds, size = measure(self._enough(size, seconds), _REPEATS)
        share = (n - 1) / n * (2 if op == "all_reduce" else 1)
        return CollectiveSpeed(scope, ranks, op, latency_s, size, size / seconds * share)

    def _enough(self, size: int, seconds: float) -> int:
        """Return how many bytes take long enough to be measured."""
        return int(min(self.limit_bytes, max(size, size * _WANTED_S / max(seconds, 1e-9))))

    def _seconds(self, call: Callable[[], object]) -> float:
        self._synchronize()
        start = time.perf_counter()
        call()
        self._synchronize()
        return max(time.perf_counter() - start, 1e-9)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # -- one link ------------------------------------------------------------------------------

    def _link(self, source: int, target: int, *, sends: bool) -> list[NetworkLink]:
        """Measure one direction, on both leaders at once; return it where it was sent from."""
        peer = self.nodes[target if sends else source][0]

        def exchange(data: Tensor, answer: Tensor) -> None:
            first, second = (dist.send, dist.recv) if sends else (dist.recv, dist.send)
            first(data, peer)
            second(answer, peer)

        def measure(wanted_bytes: int, repeats: int) -> float:
            data = torch.zeros(max(1, wanted_bytes // 4), device=self.device)
            answer = torch.zeros(1, device=self.device)
            exchange(data, answer)
            return min(self._seconds(lambda: exchange(data, answer)) for _ in range(repeats))

        round_trip_s = measure(4, _SMALL_REPEATS)
        first_s = measure(min(_FIRST_BYTES, self.limit_bytes), 1)
        size = torch.tensor([self._enough(min(_FIRST_BYTES, self.limit_bytes), first_s)], device=self.device)
        # The two ends have measured different times; the sender's size counts.
        exchange(size, torch.zeros(1, device=self.device))
        nbytes = int(size)
        seconds = measure(nbytes, _REPEATS) - round_trip_s / 2
        if not sends:
            return []
        return [NetworkLink(source, target, round_trip_s / 2, nbytes / max(seconds, 1e-9))]


def rounds(count: int) -> Iterator[list[tuple[int, int]]]:
    """Pair ``count`` nodes in rounds, so that each meets each once and none is in two pairs of a round (the
    circle method).
    """
    places: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    for _ in range(len(places) - 1):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        yield [(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None]
        places = [places[0], places[-1], *places[1:-1]]


def _call(op: str, shard: Tensor, buffer: Tensor, n: int, group: Any) -> Callable[[], object]:
    """Return what starts the collective and waits for it, in the way the runtime does it."""
    if op == "all_reduce":
        return lambda: dist.all_reduce(buffer, group=group)
    if op == "all_gather":
        return lambda: all_gather_flat(buffer, shard, group=group)
    if buffer.device.type != "cpu":
        return lambda: reduce_scatter_flat(shard, buffer, group=group)
    pieces = torch.empty_like(buffer)

    def over_gloo() -> None:
        dist.all_to_all_single(pieces, buffer, group=group)
        torch.sum(pieces.view(n, -1), 0, out=shard)

    return over_gloo


def _exchange(value: object) -> list[Any]:
    """Return every rank's value, in rank order."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def main() -> None:
    """Measure everything and hand it to the launcher."""
    device = init_distributed()
    benchmark = NetworkBenchmark(device, int(float(sys.argv[1]) * 2**20))
    first = benchmark.rank == 0
    if first and dist.get_world_size() > 1:
        show(f"measuring the collectives of {dist.get_world_size()} ranks", sys.stderr)
    collectives = benchmark.collectives()
    if first and len(benchmark.nodes) > 1:
        show(f"measuring the links between {len(benchmark.nodes)} nodes", sys.stderr)
    links = benchmark.links()
    if first:
        announce(
            "result",
            backend="nccl" if device.type == "cuda" else "gloo",
            nodes=benchmark.nodes,
            hosts=benchmark.hosts,
            collectives=[asdict(speed) for speed in collectives],
            links=[asdict(link) for link in links],
        )


if __name__ == "__main__":
    main()
