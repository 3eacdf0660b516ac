"""`python -m zlaunch`."""

import signal
import sys

# Ctrl-C while the rest is imported ends us without a traceback; `main` takes it over.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from zlaunch.cli.main import main

sys.exit(main())
