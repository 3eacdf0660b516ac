"""Run the command line: the `zlaunch` script, or `python -m zlaunch`."""

import signal
import sys


def main() -> int:
    """Run the command line and return its exit code."""
    # Ctrl-C while the rest is imported ends us without a traceback; the command takes it over.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    import contextlib
    import os
    import threading

    from zlaunch.cli.main import main as command

    code = command()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is over: one more Ctrl-C changes nothing
    if threading.active_count() > 1:
        # Threads that hang in a login: the interpreter cannot end them, and may be aborted in trying to.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, OSError, ValueError):
                stream.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
