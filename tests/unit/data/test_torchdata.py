"""Test what an engine's loader takes from torchdata's StatefulDataLoader."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, WeightedRandomSampler

from tests.needs import needs_package
from tests.unit.data.test_marks import Numbers
from zlaunch.runtime.data import read_source
from zlaunch.runtime.errors import ParameterError

pytestmark = needs_package("torchdata")
DATA = TensorDataset(torch.arange(12.0))


def sources(rank: int = 0, ranks: int = 1, **arguments: Any) -> list[Any]:
    """Return what is read off a loader of torch and one of torchdata with the same arguments."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    loaders = [DataLoader(DATA, **arguments), StatefulDataLoader(DATA, **arguments)]
    return [read_source(loader, rank=rank, ranks=ranks) for loader in loaders]


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"batch_size": 3, "drop_last": True},
        {"batch_size": None},
        {"batch_size": 3, "shuffle": True},
        {"batch_size": 3, "shuffle": True, "generator": torch.Generator().manual_seed(7)},
        {"batch_size": 3, "num_workers": 2, "prefetch_factor": 4, "persistent_workers": True},
        {"batch_size": 3, "sampler": WeightedRandomSampler(torch.ones(12), 12)},  # type: ignore[arg-type]
        {"batch_size": 3, "sampler": DistributedSampler(DATA, 1, 0, seed=5)},
    ],
    ids=lambda arguments: ",".join(arguments) or "default",
)
def test_it_is_read_like_torchs(arguments: dict[str, Any]) -> None:
    plain, stateful = sources(**arguments)
    assert stateful == plain


def test_its_own_distributed_sampler_is_torchs() -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    loader = StatefulDataLoader(DATA, 2, sampler=StatefulDistributedSampler(DATA, 2, 1, seed=5))
    found = read_source(loader, rank=1, ranks=2)
    assert found.shuffle and found.seed == 5 and found.sampler is None
    with pytest.raises(ParameterError, match="is for rank 1 of 2"):
        read_source(loader, rank=0, ranks=2)


def test_a_stream_is_read_as_it_is() -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    stream = Numbers()
    assert read_source(StatefulDataLoader(stream, batch_size=2), rank=0, ranks=1).dataset is stream


def test_a_state_that_the_script_has_loaded_is_refused() -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader = StatefulDataLoader(DATA, batch_size=2)
    iterator = iter(loader)
    next(iterator)
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(ParameterError, match=r"leave out loader\.load_state_dict"):
        read_source(loader, rank=0, ranks=1)
