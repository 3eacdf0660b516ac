"""`python -m zlaunch`."""

import sys

from zlaunch.cli.main import main

sys.exit(main())
