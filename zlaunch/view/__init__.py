"""What the user sees: the console during a run, the plan as a table."""
