"""The launcher: a plan is made, one agent a node carries it out, the controller follows. No torch."""
