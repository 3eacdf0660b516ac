"""The command line, a file for each subcommand. Only this folder imports click.

Read ``main``, ``commands`` (the list of subcommands, each imported when it is called), ``run`` (the
launch itself) and ``launch_options``.
"""
