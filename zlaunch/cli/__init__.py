"""Define the command line, one file for each subcommand. Heavy imports wait until they are needed."""
