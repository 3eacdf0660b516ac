"""Start a run: on this machine, on hosts over ssh, inside a scheduler's job. One file for each way."""
