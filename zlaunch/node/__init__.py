"""Run one node's part of a launch: the agent, its workers, and what watches over both. No torch."""
