"""Show a run to the user: the console during the run, the plan as a table."""
