"""Run the pages of the documentation that show a cluster or SLURM, and compare what they print."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cluster.testbed import Testbed
from tests.docs_commands import check_page, pages_for, read_page


@pytest.mark.exhaustive
@pytest.mark.parametrize("path", pages_for("cluster"))
def test_the_commands_of_a_page_do_what_it_says(cluster: Testbed, path: Path, tmp_path: Path) -> None:
    # for the reader's ~/.ssh/config: ssh takes the home folder from the user database, not from HOME
    ssh = tmp_path / "home" / "bin" / "ssh"
    ssh.parent.mkdir(parents=True)
    ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {cluster.ssh_config} "$@"\n')
    ssh.chmod(0o755)
    (tmp_path / "page").mkdir()
    shutil.copy(cluster.hostfile, tmp_path / "page" / "hosts")
    slurm = {"SLURM_CONF": str(cluster.slurm_conf)}
    check_page(read_page(path), tmp_path, ("here", "cluster", "slurm"), slurm)
