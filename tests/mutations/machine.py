"""Break what tests without a clock hold: waits that an event has to end."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

MUTATIONS = [
    Mutation(
        "zlaunch/supervisor/controller.py",
        "wakeup = SignalWakeup(lambda: self.queue.put((-1, Wake())))",
        "wakeup = SignalWakeup(lambda: None)",
        "a signal that another thread gets ends no wait of the controller",
        ("tests/unit/supervisor/test_signal_wakeup.py",),
    ),
    Mutation(
        "runtime/comm/shared_memory.py",
        "gone = [rank for rank in ranks if self._peers[rank].gone]",
        "gone: list[int] = []",
        "a rank that has ended is waited for until the limit",
        ("tests/runtime/shared_memory/test_memory.py::test_a_killed_rank_is_noticed_and_named",),
    ),
]
