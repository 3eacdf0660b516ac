"""Test which hosts an attempt runs on after some were lost, and after some are back."""

from __future__ import annotations

from zlaunch.supervisor.job import Hosts


def test_a_spare_takes_a_lost_host_s_place() -> None:
    hosts = Hosts(("a", "b", "c", "d"), spares=1, min_nodes=None)
    assert (hosts.used, hosts.needed, hosts.absent) == (("a", "b", "c"), 3, [])
    assert hosts.lose(["b"]) == "d takes the place of b"
    assert (hosts.used, hosts.absent) == (("a", "d", "c"), ["b"])
    assert hosts.lose(["c"]) == "" and hosts.used == ("a", "d", "c")


def test_a_host_that_is_back_is_a_spare_where_no_place_is_free() -> None:
    hosts = Hosts(("a", "b", "c"), spares=1, min_nodes=None)
    assert hosts.lose(["a"])
    hosts.take_back("a")
    assert (hosts.used, hosts.absent) == (("c", "b"), [])
    assert hosts.lose(["b"]) == "a takes the place of b" and hosts.used == ("c", "a")


def test_hosts_are_left_out_while_enough_remain_and_taken_back_in_their_order() -> None:
    hosts = Hosts(("a", "b", "c"), spares=0, min_nodes=2)
    assert hosts.lose(["a"]) == "going on with 2 of 3 nodes, without a"
    assert (hosts.used, hosts.absent) == (("b", "c"), ["a"])
    assert hosts.lose(["c"]) == ""
    hosts.take_back("a")
    assert (hosts.used, hosts.absent) == (("a", "b", "c"), [])


def test_spares_come_first_and_what_they_cannot_replace_is_left_out() -> None:
    hosts = Hosts(("a", "b", "c", "d"), spares=1, min_nodes=1)
    assert hosts.lose(["a", "b"]) == "d takes the place of a; going on with 2 of 3 nodes, without b"
    assert hosts.used == ("d", "c")


def test_each_spare_takes_one_place() -> None:
    hosts = Hosts(("a", "b", "c", "d", "e"), spares=3, min_nodes=None)
    assert hosts.lose(["a", "b"]) == "c takes the place of a; d takes the place of b"
    assert (hosts.used, hosts.spares) == (("c", "d"), ["e"])


def test_a_host_that_takes_no_part_is_no_loss() -> None:
    hosts = Hosts(("a", "b"), spares=1, min_nodes=None)
    assert hosts.lose(["b"]) == "" and hosts.lose([]) == "" and hosts.used == ("a",)


def test_hosts_that_are_gone_count_and_unhealthy_ones_do_not() -> None:
    hosts = Hosts(("a", "b", "c"), spares=0, min_nodes=1)
    assert hosts.lose(["a"], ["b"])
    assert hosts.suffice_without(["c"]), "a may come back"
    assert not hosts.suffice_without(["a", "c"])


def test_an_unhealthy_host_is_not_taken_back() -> None:
    hosts = Hosts(("a", "b", "c", "d"), spares=1, min_nodes=2)
    assert hosts.lose(["a"], ["b"]) == "d takes the place of a; going on with 2 of 3 nodes, without b"
    assert (hosts.used, hosts.absent) == (("d", "c"), ["a"])
