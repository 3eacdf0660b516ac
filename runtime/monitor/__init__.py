"""Write a run's metrics to the trackers that the config names, and time the parts of its steps."""
