"""Choose hosts and slots by the include/exclude grammar: `NODE[:SLOT[,SLOT|A-B]...][@NODE...]`.

`worker-0@worker-1:0,2-3` names all slots of worker-0 and slots 0, 2, 3 of worker-1; a NODE may be a pattern,
as in `node[01-04]:0-1`. Pure functions; the result always keeps the order of the given pool, because that
order is the rank order.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from zlaunch.errors import LaunchError
from zlaunch.hostfiles.hostlist import MAX_HOSTS, HostListError, expand_pattern, ranges

Pool = dict[str, tuple[int, ...]]
"""Host -> its slots, both in rank order."""

Selection = dict[str, "frozenset[int] | None"]
"""Host -> the slots named for it; None means all of them."""

_MOST_SLOTS = 1_000_000


class FilterError(LaunchError, ValueError):
    """Says what is wrong with a filter: it cannot be read, or names what is not there; for the user."""


def parse(text: str) -> Selection:
    """Read a filter; several mentions of one host are merged, and a bare host covers its slots."""
    selection: Selection = {}
    chosen = 0
    for part in text.split("@"):
        host, colon, slots = (piece.strip() for piece in part.partition(":"))
        if not host:
            raise FilterError(f"{text!r}: missing host name in {part.strip()!r}; write HOST:0,2-3@HOST2")
        named = _parse_slots(slots, part.strip()) if colon else None
        for name in _parse_hosts(host, part.strip()):
            known = selection.get(name, frozenset())
            selection[name] = None if named is None or known is None else known | named
            chosen += len(named or ())
            if len(selection) > MAX_HOSTS or chosen > _MOST_SLOTS:
                raise FilterError(
                    f"{part.strip()!r}: the filter exceeds {MAX_HOSTS} hosts or {_MOST_SLOTS} slots"
                )
    return selection


def _parse_hosts(text: str, part: str) -> list[str]:
    if "[" not in text:
        return [text]
    try:
        return expand_pattern(text)
    except HostListError as error:
        raise FilterError(f"{part!r}: {error}; write HOST[01-04]:0,2-3@HOST2") from None


def _parse_slots(text: str, part: str) -> frozenset[int]:
    slots: set[int] = set()
    for token, numbers in ranges(text):
        if numbers is None or numbers.stop > _MOST_SLOTS:
            raise FilterError(f"{part!r}: {token!r} is not a slot; write a number or a range such as 0-3")
        if not numbers:
            raise FilterError(f"{part!r}: the range {token!r} is reversed")
        slots.update(numbers)
    return frozenset(slots)


def _check(pool: Mapping[str, Sequence[int]], selection: Selection) -> None:
    for host, slots in selection.items():
        if host not in pool:
            near = difflib.get_close_matches(host, pool, n=1)
            hint = f", did you mean {near[0]}?" if near else f"; known: {', '.join(pool) or 'none'}"
            raise FilterError(f"unknown host {host!r}{hint}")
        missing = sorted((slots or frozenset()) - set(pool[host]))
        if missing:
            there = ",".join(map(str, pool[host]))
            raise FilterError(
                f"{host} has no slot {missing[0]}: it has {_slots(len(pool[host]))}"
                + f" ({there})" * bool(there)
            )


def include(pool: Mapping[str, Sequence[int]], selection: Selection) -> Pool:
    """Keep only the hosts and slots that the selection names."""
    return _filter(pool, selection, keep=True)


def exclude(pool: Mapping[str, Sequence[int]], selection: Selection) -> Pool:
    """Keep all hosts and slots except those that the selection names."""
    return _filter(pool, selection, keep=False)


def _filter(pool: Mapping[str, Sequence[int]], selection: Selection, *, keep: bool) -> Pool:
    _check(pool, selection)
    kept: Pool = {}
    for host, slots in pool.items():
        named = selection.get(host, frozenset())
        kept[host] = tuple(slot for slot in slots if (named is None or slot in named) == keep)
    return _not_empty(kept)


def limit(pool: Mapping[str, Sequence[int]], num_gpus: int | None) -> Pool:
    """Keep the first ``num_gpus`` slots of each host; None means all."""
    kept: Pool = {}
    for host, slots in pool.items():
        if num_gpus is not None and not 1 <= num_gpus <= len(slots):
            raise FilterError(f"--num_gpus {num_gpus}: {host} has {_slots(len(slots))}")
        kept[host] = tuple(slots[:num_gpus])
    return _not_empty(kept)


def _slots(count: int) -> str:
    return f"{count} slot{'' if count == 1 else 's'}"


def _not_empty(pool: Pool) -> Pool:
    pool = {host: slots for host, slots in pool.items() if slots}
    if not pool:
        raise FilterError("the filter excludes every slot")
    return pool
