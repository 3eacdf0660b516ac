"""Test compressed host lists."""

from __future__ import annotations

import os
import random
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.limits import LIMIT_S
from zlaunch.hostfiles.hostlist import MAX_HOSTS, HostListError, expand, expand_pattern


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", ""),
        ("  ", ""),
        ("localhost", "localhost"),
        ("a,b[1-2],c", "a b1 b2 c"),
        (" a , b[1, 3-4] ", "a b1 b3 b4"),
        ("node[01-03,20]", "node01 node02 node03 node20"),
        ("n[8-11]", "n8 n9 n10 n11"),
        ("n[098-101]", "n098 n099 n100 n101"),
        ("n[1,02,003]", "n1 n02 n003"),
        ("n[001-3]", "n001 n002 n003"),
        ("n[3,1,1]", "n3 n1 n1"),
        ("n[1-2]r[01-03]", "n1r01 n1r02 n1r03 n2r01 n2r02 n2r03"),
        ("gpu[1-2].x.org", "gpu1.x.org gpu2.x.org"),
        ("[1-2]", "1 2"),
        ("10.0.0.[8-10]", "10.0.0.8 10.0.0.9 10.0.0.10"),
        ("b,a,b", "b a b"),
    ],
)
def test_expand(text: str, hosts: str) -> None:
    assert expand(text) == hosts.split()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,,b", "'': missing host name"),
        ("a,", "'': missing host name"),
        ("n[1-2", "'n[1-2': unbalanced or nested brackets"),
        ("n1]", "'n1]': unbalanced or nested brackets"),
        ("n[1[2]]", "'n[1[2]]': unbalanced or nested brackets"),
        ("ok,n[]", "'n[]': '' is not a number or a range"),
        ("n[a-b]", "'n[a-b]': 'a-b' is not a number"),
        ("n[1-]", "'1-' is not a number"),
        ("n[\u0661]", "is not a number"),
        ("n[3-1]", "'n[3-1]': the range '3-1' is reversed"),
        ("n[1-70000]", "'n[1-70000]': 70000 hosts, the limit is 65536"),
        ("n[1-300]m[1-300]", "90000 hosts"),
        ("a,n[1-65536]", "'n[1-65536]': the list exceeds 65536 hosts"),
        ("a b", "a host name cannot contain ' '"),
        (f"{'x' * 254}[08-10]", "a host name exceeds 255 characters"),
        ("9" * 5000 + "[" + "9" * 5000 + "]", "is not a number"),
    ],
)
def test_errors_name_the_token(text: str, words: str) -> None:
    with pytest.raises(HostListError) as caught:
        expand(text)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_pattern_has_no_comma_outside_brackets() -> None:
    assert expand_pattern("n[1,3]") == ["n1", "n3"]
    with pytest.raises(HostListError, match="a host name cannot contain ','"):
        expand_pattern("a,b")


def test_the_limit_is_the_most_that_one_pattern_gives() -> None:
    assert expand(f"n[0-{MAX_HOSTS - 1}]") == [f"n{index}" for index in range(MAX_HOSTS)]


names = (
    st.text(alphabet="ab01289.-_", min_size=1, max_size=8)
    | st.builds("{}{:0{}}".format, st.sampled_from(["n", "", "r1c"]), st.integers(0, 120), st.integers(1, 3))
    | st.builds("n{}".format, st.integers(10**17, 10**20))
)


@given(st.lists(names, max_size=12))
def test_names_without_brackets_stay_as_they_are(hosts: list[str]) -> None:
    assert expand(",".join(hosts)) == hosts


@given(st.text(alphabet="n019[]-,. \n", max_size=16) | st.text(max_size=24))
def test_any_text_gives_hosts_or_our_error(text: str) -> None:
    try:
        hosts = expand(text)
    except HostListError:
        return
    assert expand(",".join(hosts)) == hosts


def show_hostnames(text: str, environ: dict[str, str]) -> list[str] | None:
    result = subprocess.run(
        ["scontrol", "show", "hostnames", text], env=environ, capture_output=True, text=True, timeout=LIMIT_S
    )
    return result.stdout.split() if result.returncode == 0 else None


@pytest.mark.needs("scontrol")
def test_expands_as_scontrol_does(tmp_path: Path) -> None:
    environ = dict(os.environ)
    if show_hostnames("a[1-2]", environ) is None:  # it wants a configuration, not a controller
        (tmp_path / "slurm.conf").write_text("ClusterName=x\nSlurmctldHost=localhost\nNodeName=localhost\n")
        environ["SLURM_CONF"] = str(tmp_path / "slurm.conf")
        assert show_hostnames("a[1-2]", environ) == ["a1", "a2"]
    chance = random.Random(7)

    def group() -> str:
        width = chance.randint(1, 4)
        items = []
        for _ in range(chance.randint(1, 3)):
            low = chance.randint(0, 120)
            high = chance.choice(["", f"-{str(low + chance.randint(0, 12)).zfill(width)}"])
            items.append(f"{str(low).zfill(width)}{high}")
        return f"[{','.join(items)}]"

    for _ in range(60):
        forms = [f"node{group()}", f"r{group()}n{group()}", "login", "gpu7"]
        text = ",".join(chance.choices(forms, k=chance.randint(1, 3)))
        assert expand(text) == show_hostnames(text, environ), text
