"""Runs the command line: the `zlaunch` script, or `python -m zlaunch`."""

import signal
import sys


def main() -> int:
    """Run the command line and return its exit code."""
    # Ctrl-C while the rest is imported ends us without a traceback; the command takes it over.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from zlaunch.cli.main import main as command

    code = command()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is over: one more Ctrl-C changes nothing
    return code


if __name__ == "__main__":
    sys.exit(main())
