"""Test the include/exclude grammar."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zlaunch.hostfiles.filters import FilterError, exclude, include, limit, parse

POOL = {"worker-0": (0, 1, 2, 3), "worker-1": (0, 1), "gpu7": (0,)}


def test_parse_merges_duplicates() -> None:
    assert parse("a:0@b@a:2-3,2@b:1") == {"a": frozenset({0, 2, 3}), "b": None}


def test_include_keeps_the_order_of_the_pool() -> None:
    assert include(POOL, parse("worker-1@worker-0:3,0")) == {"worker-0": (0, 3), "worker-1": (0, 1)}


def test_exclude() -> None:
    assert exclude(POOL, parse("worker-0:1-2@gpu7")) == {"worker-0": (0, 3), "worker-1": (0, 1)}


def test_patterns_stand_for_their_hosts() -> None:
    two = frozenset({0, 1})
    assert parse("n[08-10]:0-1@gpu7") == {"n08": two, "n09": two, "n10": two, "gpu7": None}
    assert parse("n[1-2]:0@n2:1") == {"n1": frozenset({0}), "n2": two}
    assert include(POOL, parse("worker-[0-1]:1")) == {"worker-0": (1,), "worker-1": (1,)}
    assert exclude(POOL, parse("worker-[0-1]")) == {"gpu7": (0,)}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "missing host name"),
        ("a@@b", "missing host name"),
        ("worker-0:", "'' is not a slot"),
        ("worker-0:1,,2", "'' is not a slot"),
        ("worker-0:x", "'x' is not a slot"),
        ("worker-0:-1", "'-1' is not a slot"),
        ("worker-0:3-1", "the range '3-1' is reversed"),
        ("n[3-1]:0", r"'n\[3-1\]:0': .* the range '3-1' is reversed"),
        ("n[1-2", "unbalanced or nested brackets"),
        ("a,n[1-2]", "a host name cannot contain ','; write .*@HOST2"),
        ("n[1-99999]", "99999 hosts, the limit is 65536"),
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
        ("worker-[0-4]:0", "unknown host 'worker-2', did you mean worker-1?"),
        ("worker-1:5", r"worker-1 has no slot 5: it has 2 slots \(0,1\)"),
    ],
)
@pytest.mark.parametrize("apply", [include, exclude])
def test_errors_against_the_pool(apply: object, text: str, words: str) -> None:
    with pytest.raises(FilterError, match=words):
        apply(POOL, parse(text))  # type: ignore[operator]


def test_nothing_left_is_an_error() -> None:
    with pytest.raises(FilterError, match="excludes every slot"):
        exclude(POOL, parse("worker-0@worker-1@gpu7:0"))


@pytest.mark.parametrize(
    ("num_gpus", "pool"),
    [(None, POOL), (1, {"worker-0": (0,), "worker-1": (0,), "gpu7": (0,)})],
)
def test_limit(num_gpus: int | None, pool: dict[str, tuple[int, ...]]) -> None:
    assert limit(POOL, num_gpus) == pool


def test_limit_takes_the_first_slots_that_are_there() -> None:
    assert limit({"a": [1, 3, 5]}, 2) == {"a": (1, 3)}


@pytest.mark.parametrize(
    ("num_gpus", "words"),
    [
        (3, r"--num_gpus 3: worker-1 has 2 slots"),
        (0, r"--num_gpus 0: worker-0 has 4 slots"),
    ],
)
def test_limits_beyond_what_is_there(num_gpus: int, words: str) -> None:
    with pytest.raises(FilterError, match=words):
        limit(POOL, num_gpus)


@given(st.text(alphabet="ab01-:,@ \t9x[]", max_size=20) | st.text(max_size=20))
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


@pytest.mark.parametrize(
    "text", ["@".join(f"h{n}[1-9999]" for n in range(8)), "@".join(f"h{n}:0-99999" for n in range(12))]
)
def test_a_filter_that_stands_for_too_much_is_refused(text: str) -> None:
    with pytest.raises(FilterError, match="exceeds 65536 hosts or 1000000 slots"):
        parse(text)
