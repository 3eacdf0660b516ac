"""Collectives between ranks, and the process groups and links that carry them.

Read ``collectives`` (every collective of the runtime goes through it), ``link`` (within one group of
ranks) and ``pending`` (what is under way). ``process_group`` joins the ranks; ``shared_memory`` carries
collectives between CPU ranks of one machine; ``two_hops`` and ``nodes`` serve units that are sharded over
a part of the ranks; ``shard_spec`` and ``axis`` serve parallel axes; ``given_groups``
checks a script's own; ``deadlock`` finds ranks that wait for each other; ``benchmark`` measures links.
"""
