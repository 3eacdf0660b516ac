"""Test that NVML answers about the NVLink domain of a GPU."""

from __future__ import annotations

import re

import pytest
import torch

from zlaunch.runtime.comm.nvlink import find_nvlink_domain

pytestmark = pytest.mark.gpu


def test_a_gpu_is_in_a_cluster_and_clique_or_in_no_domain() -> None:
    found = find_nvlink_domain(torch.device("cuda", 0))
    assert found is None or re.fullmatch(r"[0-9a-f]{32}/\d+", found)
