"""Test the hostfile parser."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zlaunch.hostfiles.grammar import HostEntry, HostfileError, parse, read

SAMPLES = Path(__file__).resolve().parents[3] / "hostfiles" / "samples"


@pytest.mark.parametrize(
    ("line", "entry"),
    [
        ("w0", HostEntry("w0")),
        ("w0 slots=4", HostEntry("w0", 4)),
        ("\t w0\tslots = 4  # trailing", HostEntry("w0", 4)),
        ("w0 slots=004#close", HostEntry("w0", 4)),
        ("alice@w0 slots=4", HostEntry("w0", 4, "alice")),
        ("w0 slots=4 user=alice", HostEntry("w0", 4, "alice")),
        ("alice@w0 username=alice", HostEntry("w0", None, "alice")),
        ("w0:2222", HostEntry("w0", None, None, 2222)),
        ("w0 port=8 slots=2", HostEntry("w0", 2, None, 8)),
        ("w0:8 slots=2", HostEntry("w0", 2, None, 8)),
        ("w0:22 port=22", HostEntry("w0", None, None, 22)),
        ("a.b-c_d@10.0.0.7:22 slots=1", HostEntry("10.0.0.7", 1, "a.b-c_d", 22)),
        ("fe80::1%eth0 slots=2", HostEntry("fe80::1%eth0", 2)),
        ("[::1]", HostEntry("::1")),
        ("bob@[fd00::2]:2222 slots=2", HostEntry("fd00::2", 2, "bob", 2222)),
        ("w0 slots=2 max_slots=4 max-slots=4 slots_max=4", HostEntry("w0", 2)),
        ("w0 cpu=2 count=2 boards=1 sockets=2 cores=8 rank=0 nolocal", HostEntry("w0")),
    ],
)
def test_one_line(line: str, entry: HostEntry) -> None:
    assert parse(line, "hosts") == [replace(entry, line=1)]


def test_lines_are_counted_through_comments_blanks_crlf_and_bom() -> None:
    text = "\ufeff# head\r\n\r\nw0 slots=2\r\n   # indented\r\nw1\r\n"
    assert parse(text, "hosts") == [HostEntry("w0", 2, line=3), HostEntry("w1", line=5)]


def test_patterns_expand_and_zero_slots_are_left_out() -> None:
    found = parse("bob@n[01-03,7]:2222 slots=8\nn5 slots=0\nlast", "hosts")
    expected = [HostEntry(host, 8, "bob", 2222, 1) for host in ("n01", "n02", "n03", "n7")]
    assert found == [*expected, HostEntry("last", line=3)]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("w0 slots=x", "slots='x' is not a number; write the number of workers, such as slots=8"),
        ("w0 slots=", "slots='' is not a number"),
        ("w0 slots=1.5", "slots='1.5' is not a number"),
        ("w0 slots=\u0664", "is not a number"),
        ("w0 slots=-1", "slots='-1' is negative; write the number of workers, or 0 to skip the host"),
        ("w0 slots", "'slots' needs a number; write slots=N"),
        ("w0 4", "cannot parse '4'; write slots=4"),
        ("w0 w1", "cannot parse 'w1'; write KEY=VALUE, or # before a comment"),
        ("w0 slots=2 slots=4", "slots= appears twice"),
        ("w0 slot=4", "unknown option 'slot=4'. Did you mean 'slots=4'?"),
        ("w0 Slots=4", "unknown option 'Slots=4'. Did you mean 'slots=4'?"),
        ("w0 prot=22", "unknown option 'prot=22'. Did you mean 'port=22'?"),
        ("w0 ports=22", "unknown option 'ports=22'. Did you mean 'port=22'?"),
        ("w0 a+b=2", "cannot parse 'a+b=2'"),
        ("slots=4", "expected a host, got 'slots=4'; write HOST slots=N"),
        ("slots = 4 w0", "expected a host, got 'slots=4'"),
        ("w0:x", "'x' is not a port; write a number from 1 to 65535"),
        ("w0:", "'' is not a port"),
        ("w0 port=0", "'0' is not a port"),
        ("w0 port=65536", "'65536' is not a port"),
        ("w0:4", "':4' after a host is its ssh port; write slots=4 for workers, or port=4 for ssh"),
        ("w0:2222 port=22", "port 2222 after the host and port=22; keep one"),
        ("a@w0 user=b", "user 'a' before the host and user='b'; keep one"),
        ("@w0", "'' is not a user name; write USER@HOST"),
        ("-l@w0", "'-l' is not a user name"),
        ("a@", "missing host name"),
        ("-oProxyCommand", "'-oProxyCommand' is not a host name"),
        ("w\u00f6", "is not a host name"),
        ("w0,w1 slots=2", "a host name cannot contain ','; write one host or pattern per line"),
        ("n[1-2 slots=2", "'n[1-2': unbalanced or nested brackets"),
        ("n[3-1]", "the range '3-1' is reversed"),
        ("n[1,1]", "this line's pattern names host 'n1' twice"),
        ("::1:x:2222", "'::1:x:2222' is not an IPv6 address; with a port, write [ADDRESS]:PORT"),
        ("[::1]22", "'[::1]22': write [ADDRESS]:PORT"),
        ("[::1]:", "'' is not a port"),
    ],
)
def test_errors_say_where_what_and_what_to_do(line: str, words: str) -> None:
    with pytest.raises(HostfileError) as caught:
        parse(f"# head\n{line}", "my/hosts")
    assert str(caught.value).startswith("my/hosts:2: ")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ("W1 slots=4", "hosts:3: host 'W1' is on line 1 already; write it once, with all its slots"),
        ("bob@w[0-1]", "hosts:3: host 'w1' is on line 1 already"),
        ("w1:23 slots=2", "hosts:3: host 'w1' has port 23 here and 22 on line 1; keep one"),
    ],
)
def test_a_repeated_host_names_the_first_line(second: str, words: str) -> None:
    with pytest.raises(HostfileError) as caught:
        parse(f"w1:22 slots=2\n\n{second}\n", "hosts")
    assert words in str(caught.value)


def test_all_bad_lines_are_reported_at_once() -> None:
    with pytest.raises(HostfileError) as caught:
        parse("w0 slots=x\nw1 slots=2\nw2 slot=2\nw1\nslots=4\n", "hosts")
    lines = str(caught.value).splitlines()
    assert [line.split(": ")[0] for line in lines] == ["hosts:1", "hosts:3", "hosts:4", "hosts:5"]


@pytest.mark.parametrize(
    ("text", "words"), [("", "no host"), ("# only\n\n", "no host"), ("w0 slots=0", "every host has slots=0")]
)
def test_no_host_is_an_error(text: str, words: str) -> None:
    with pytest.raises(HostfileError, match=f"^hosts: {words}.*worker-0 slots=8"):
        parse(text, "hosts")


def test_read(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_bytes(b"\xef\xbb\xbfw0 slots=2\r\n")
    assert read(path) == read(str(path)) == [HostEntry("w0", 2, line=1)]


@pytest.mark.parametrize(
    ("name", "words"),
    [("none", "No such file"), ("", "Is a directory"), ("utf16", "not a text file"), ("a\0b", "null byte")],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "utf16").write_bytes("w0 slots=2".encode("utf-16"))
    with pytest.raises(HostfileError, match=words) as caught:
        read(f"{tmp_path}/{name}")
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("sample", "hosts", "first"),
    [
        ("two_nodes", 2, HostEntry("worker-0", 8, line=4)),
        ("mixed_ports_and_users", 5, HostEntry("gpu-a.example.org", 4, "alice", 2222, 3)),
        ("pattern_cluster", 25, HostEntry("node01", 8, line=3)),
        ("mpi_style", 3, HostEntry("node-a", 4, line=3)),
    ],
)
def test_samples(sample: str, hosts: int, first: HostEntry) -> None:
    found = read(SAMPLES / sample)
    assert (len(found), found[0]) == (hosts, first)
    assert sorted(path.name for path in SAMPLES.iterdir()) == sorted(
        ["two_nodes", "mixed_ports_and_users", "pattern_cluster", "mpi_style"]
    )


@given(st.text(alphabet="w01 =-#@:[],%\n\rslotpre", max_size=40) | st.text(max_size=40))
def test_any_text_gives_entries_or_our_error(text: str) -> None:
    try:
        entries = parse(text, "hosts")
    except HostfileError as error:
        assert str(error).startswith("hosts:")
        return
    assert entries and all(entry.slots != 0 and entry.line >= 1 for entry in entries)


@given(st.binary(max_size=40))
def test_any_bytes_give_entries_or_our_error(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "bytes"
    path.write_bytes(data)
    try:
        read(path)
    except HostfileError as error:
        assert str(path) in str(error)


hosts = st.from_regex(r"[a-z][a-z0-9.-]{0,6}", fullmatch=True) | st.ip_addresses().map(str)
specs = st.tuples(
    hosts,
    st.none() | st.integers(1, 99),
    st.none() | st.from_regex(r"[a-z]{1,4}", fullmatch=True),
    st.none() | st.integers(22, 65535),
    st.sampled_from(["", " # comment", " max_slots=9", "\n", "\n# between"]),
    st.booleans(),
)


@given(st.lists(specs, min_size=1, max_size=6, unique_by=lambda spec: spec[0]))
def test_entries_survive_being_written_and_read(
    chosen: list[tuple[str, int | None, str | None, int | None, str, bool]],
) -> None:
    text, expected, line = "", [], 1
    for host, slots, user, port, after, port_as_key in chosen:
        address = f"[{host}]" if ":" in host and not port_as_key else host
        text += f"{user}@{address}" if user else address
        if port:
            text += f" port={port}" if port_as_key else f":{port}"
        text += f" slots={slots}" if slots else ""
        text += f"{after}\n"
        expected.append(HostEntry(host, slots, user, port, line))
        line += 1 + after.count("\n")
    assert parse(text, "hosts") == expected


def test_lines_that_stand_for_too_many_hosts_are_refused() -> None:
    text = "\n".join(f"rack{n}node[1-9999] slots=8" for n in range(8))
    with pytest.raises(HostfileError, match="hosts:7: more than 65536 hosts"):
        parse(text, "hosts")
