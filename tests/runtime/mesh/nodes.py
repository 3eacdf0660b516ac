"""Let the workers of one machine take themselves for the ranks of several nodes."""

from __future__ import annotations

import os

import zlaunch


def join_nodes(ranks_of_a_node: int) -> None:
    """Join the workers as a launcher would start them, with some on each node."""
    rank = int(os.environ["RANK"])
    os.environ["LOCAL_RANK"] = str(rank % ranks_of_a_node)
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks_of_a_node)
    zlaunch.init_distributed()
