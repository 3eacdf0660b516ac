"""Communicate between ranks: collectives, process groups, shared memory, and the watch for deadlocks."""
