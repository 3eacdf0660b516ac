"""Finds what is slow among measured links. Plain numbers; no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

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
    left, said = list(bad), []
    for verb, touches in zip(words.verbs, _SIDES, strict=True) if len(nodes) > 2 else ():
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
