"""Test when the ssh configuration asks for what only the `ssh` program can do."""

from __future__ import annotations

from pathlib import Path

import pytest

from zlaunch.transports.ssh import reason_for_openssh, resolve


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("ProxyCommand nc %h %p", "proxycommand"),
        ("HostKeyAlias other", "hostkeyalias"),
        ("IdentityAgent /run/agent.sock", "identityagent"),
        ("CertificateFile {folder}/cert", "certificatefile"),
        ("ControlMaster auto", "controlmaster"),
        ("ControlPath /tmp/%C", "controlpath"),
        ("PKCS11Provider /usr/lib/p11.so", "pkcs11provider"),
        ("KnownHostsCommand /bin/echo", "knownhostscommand"),
        pytest.param(
            "IdentityFile {folder}/key-%r", "identityfile with tokens", marks=pytest.mark.needs("ssh")
        ),
        ("IdentityFile {folder}/signed", "a certificate beside the identityfile"),
        ("IdentityFile {folder}/token", "an identityfile on a security key"),
        ("UserKnownHostsFile {folder}/known", "@cert-authority in known_hosts"),
        ("IdentityFile {folder}/plain", ""),
        ("IdentityAgent SSH_AUTH_SOCK", ""),
        ("ProxyCommand none", ""),
        ("ControlMaster no", ""),
    ],
)
def test_what_needs_the_ssh_program(tmp_path: Path, line: str, reason: str) -> None:
    for name in ("signed", "signed-cert.pub", "token", "plain", "plain.pub", "cert"):
        (tmp_path / name).write_text("ssh-ed25519 AAAA\n")
    (tmp_path / "token.pub").write_text("sk-ssh-ed25519@openssh.com AAAA\n")
    (tmp_path / "known").write_text("host ssh-ed25519 AAAA\n@cert-authority *.x ssh-ed25519 AAAA\n")
    quiet = "" if line.startswith("UserKnown") else f"UserKnownHostsFile {tmp_path}/none\n"
    (tmp_path / "config").write_text(
        f"{line.format(folder=tmp_path)}\n{quiet}GlobalKnownHostsFile /dev/null\n"
    )
    assert resolve("somewhere", config=str(tmp_path / "config")).needs_openssh == reason


def test_a_hop_on_the_way_counts(tmp_path: Path) -> None:
    text = "Host far\n  ProxyJump near\nHost near\n  HostKeyAlias other\n"
    (tmp_path / "config").write_text(text)
    assert resolve("far", config=str(tmp_path / "config")).needs_openssh == "hostkeyalias"


def test_hops_are_gone_through_in_the_order_of_the_line(tmp_path: Path) -> None:
    text = "Host far\n  ProxyJump me@first:2201,second\nHost first\n  HostName 10.0.0.1\n"
    (tmp_path / "config").write_text(text)
    far = resolve("far", config=str(tmp_path / "config"))
    assert far.jump is not None and far.jump.alias == "second" and far.jump.jump is not None
    first = far.jump.jump
    assert (first.alias, first.hostname, first.user, first.port) == ("first", "10.0.0.1", "me", 2201)
    assert first.jump is None


def test_nothing_asked_for_needs_nothing() -> None:
    assert reason_for_openssh({}) == ""
