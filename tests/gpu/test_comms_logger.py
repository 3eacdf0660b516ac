"""Test on one GPU that times between events are read, without a wait while training."""

from __future__ import annotations

import pytest
import torch

import zlaunch
from zlaunch.runtime.config.schema import CommsLoggerSection
from zlaunch.runtime.observe.comms_logger import CommsLogger

pytestmark = pytest.mark.gpu


def test_a_time_is_read_once_the_device_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    device = zlaunch.init_distributed()
    log = CommsLogger(CommsLoggerSection(enabled=True), prints=True)
    tensor = torch.ones(1 << 20, device=device)
    for _ in range(3):
        with log.timing("all_reduce", tensor.nbytes, 2, on_gpu=True):
            tensor += 1
    (row,) = log.rows.values()
    assert row.count == 3 >= row.timed
    torch.cuda.synchronize()
    log.poll()
    assert row.timed == 3 and row.seconds > 0
    with log.timing("all_reduce", tensor.nbytes, 2, on_gpu=True):
        tensor += 1
    log.finish(wait=True)
    assert row.timed == 4
    assert capsys.readouterr().out.splitlines()[2].split()[:5] == ["all_reduce", "4.00", "MiB", "2", "4"]
