"""Find the numbers of workers that a run may have, with every choice of hosts that failures may leave."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache


@lru_cache
def possible_world_sizes(slots: tuple[int, ...], spares: int, min_nodes: int | None) -> tuple[int, ...]:
    """Return the number of workers without a failure, then all others in order.

    Args:
        slots: workers of each host, those of the spare hosts last.
        spares: hosts that take the place of failed ones.
        min_nodes: the fewest hosts to continue with; None: failed hosts are always replaced.
    """
    wanted = len(slots) - spares
    fewest = wanted if min_nodes is None else min(min_nodes, wanted)
    full = sum(slots[:wanted])
    if fewest == len(slots):
        return (full,)
    # sums[n]: bit s is set where some n hosts have s workers together
    sums = [1, *[0] * wanted]
    for workers, hosts in Counter(slots).items():
        before = list(sums)
        for taken in range(1, min(hosts, wanted) + 1):
            for others in range(wanted - taken + 1):
                sums[others + taken] |= before[others] << taken * workers
    found = 0
    for count in range(fewest, wanted + 1):
        found |= sums[count]
    rest = [size for size in range(found.bit_length()) if found >> size & 1 and size != full]
    return (full, *rest)
