"""Turn the command line into a run on this machine, on hosts over ssh, or inside a scheduler's job."""
