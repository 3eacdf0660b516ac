"""The include/exclude grammar."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zlaunch.hostfiles.filters import FilterError, exclude, include, parse

POOL = {"worker-0": (0, 1, 2, 3), "worker-1": (0, 1), "gpu7": (0,)}


def test_parse_merges_duplicates() -> None:
    assert parse("a:0@b@a:2-3,2@b:1") == {"a": frozenset({0, 2, 3}), "b": None}


def test_include_keeps_the_order_of_the_pool() -> None:
    assert include(POOL, parse("worker-1@worker-0:3,0")) == {"worker-0": (0, 3), "worker-1": (0, 1)}


def test_exclude() -> None:
    assert exclude(POOL, parse("worker-0:1-2@gpu7")) == {"worker-0": (0, 3), "worker-1": (0, 1)}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "a host name is missing"),
        ("a@@b", "a host name is missing"),
        ("worker-0:", "'' is not a slot"),
        ("worker-0:1,,2", "'' is not a slot"),
        ("worker-0:x", "'x' is not a slot"),
        ("worker-0:-1", "'-1' is not a slot"),
        ("worker-0:3-1", "the range '3-1' runs backwards"),
    ],
)
def test_errors_of_form_name_the_token(text: str, words: str) -> None:
    with pytest.raises(FilterError, match=words):
        parse(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("worker_0", "unknown host 'worker_0', did you mean worker-0?"),
        ("zzz", "unknown host 'zzz'; known: worker-0, worker-1, gpu7"),
        ("worker-1:5", r"worker-1 has no slot 5: it has 2 slot\(s\) \(0,1\)"),
    ],
)
@pytest.mark.parametrize("apply", [include, exclude])
def test_errors_against_the_pool(apply: object, text: str, words: str) -> None:
    with pytest.raises(FilterError, match=words):
        apply(POOL, parse(text))  # type: ignore[operator]


def test_nothing_left_is_an_error() -> None:
    with pytest.raises(FilterError, match="leaves no slot"):
        exclude(POOL, parse("worker-0@worker-1@gpu7:0"))


@given(st.text(alphabet="ab01-:,@ \t9x", max_size=20) | st.text(max_size=20))
def test_any_text_gives_a_selection_or_our_error(text: str) -> None:
    try:
        selection = parse(text)
    except FilterError:
        return
    for apply in (include, exclude):
        try:
            result = apply({"a": (0, 1), "b": (0,)}, selection)
        except FilterError:
            continue
        assert all(result.values())


slots = st.frozensets(st.integers(0, 5))
pools = st.dictionaries(st.sampled_from("abcd"), st.just(tuple(range(6))), min_size=1)


@given(pools, st.dictionaries(st.sampled_from("abcd"), slots.filter(bool) | st.none(), min_size=1))
def test_include_and_exclude_share_the_pool(
    pool: dict[str, tuple[int, ...]], selection: dict[str, frozenset[int] | None]
) -> None:
    """What one keeps the other drops, and a filter survives being written and read."""
    selection = {host: chosen for host, chosen in selection.items() if host in pool}
    if not selection:
        return
    text = "@".join(h if s is None else f"{h}:{','.join(map(str, sorted(s)))}" for h, s in selection.items())
    assert parse(text) == selection
    kept = include(pool, selection)
    try:
        dropped = exclude(pool, selection)
    except FilterError:
        dropped = {}
    for host, all_slots in pool.items():
        assert sorted(kept.get(host, ()) + dropped.get(host, ())) == list(all_slots)
    assert list(kept) == [host for host in pool if host in kept]
