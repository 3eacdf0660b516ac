"""Choose hosts and slots: what a hostfile or an allocation names, less what the filters leave out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from zlaunch.errors import LaunchError
from zlaunch.hostfiles import filters
from zlaunch.hostfiles.grammar import HostEntry
from zlaunch.plan.options import Options


class HostSelection:
    """Holds the hosts that were named, and the slots chosen on them as soon as these are known."""

    def __init__(self, options: Options, entries: Sequence[HostEntry]) -> None:
        """Choose the slots if the entries say how many there are. Raises LaunchError."""
        self.options = options
        if options.num_gpus is not None:  # CPU workers: as many as asked for
            entries = [entry if entry.slots else replace(entry, slots=options.num_gpus) for entry in entries]
        self.entries = {entry.host: entry for entry in entries}
        self.chosen: filters.Pool | None = None
        """Host -> slots; None while some hosts' slots have to be asked for."""
        self.apply_filters()

    def hosts(self) -> tuple[str, ...]:
        """Return the hosts to connect to."""
        return tuple(self.chosen if self.chosen is not None else self._left_hosts())

    def _left_hosts(self) -> list[str]:
        """Return the hosts that the filters leave, whatever their slots."""
        o = self.options
        names = list(self.entries)
        if o.include is not None:
            with _naming("--include", o.include):
                wanted = _known(o.include, names)
            names = [host for host in names if host in wanted]
        if o.exclude is not None:
            with _naming("--exclude", o.exclude):
                unwanted = _known(o.exclude, names)
            names = [host for host in names if unwanted.get(host, frozenset()) is not None]
        if o.num_nodes is not None:
            if o.num_nodes > len(names):
                raise LaunchError(f"--num_nodes {o.num_nodes}: there are {len(names)} hosts")
            names = names[: o.num_nodes]
        return names

    def apply_filters(self, found: Mapping[str, int] = {}) -> None:
        """Choose the slots if every host's number is known: from its entry, or as found there."""
        pool: filters.Pool = {}
        for host in self._left_hosts():
            slots = self.entries[host].slots if self.entries[host].slots is not None else found.get(host)
            if slots is None:
                return
            pool[host] = tuple(range(slots))
        o = self.options
        if o.include is not None:
            with _naming("--include", o.include):
                pool = filters.include(pool, filters.parse(o.include))
        elif o.exclude is not None:
            with _naming("--exclude", o.exclude):
                kept = {host: slots for host, slots in filters.parse(o.exclude).items() if host in pool}
                pool = filters.exclude(pool, kept)
        self.chosen = filters.limit(pool, o.num_gpus)


@contextmanager
def _naming(option: str, text: str) -> Iterator[None]:
    """Add the option to the text of a filter's error."""
    try:
        yield
    except filters.FilterError as error:
        raise LaunchError(f"{option} {text!r}: {error}") from None


def _known(text: str, names: Sequence[str]) -> filters.Selection:
    """Read a filter whose hosts are all among these. Raises FilterError."""
    selection = filters.parse(text)
    filters.include(dict.fromkeys(names, (0,)), dict.fromkeys(selection))
    return selection
