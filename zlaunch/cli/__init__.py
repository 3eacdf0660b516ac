"""The command line: one file a subcommand, `run` the default; heavy imports wait until they are needed."""
