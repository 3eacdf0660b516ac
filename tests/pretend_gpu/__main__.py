"""Train cases on the pretended GPU, in this process, and print what was found as JSON, a line each.

    python -m tests.pretend_gpu [--kernels LIBRARY] CASE...
    python -m tests.pretend_gpu --mutations NAME...

Run by several ranks (RANK, WORLD_SIZE), each prints its own.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import sys
from typing import Any

from tests.limits import LIMIT_S

from . import device
from .threads import meeting


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mutations", nargs="+", default=[], help="waits, each left out of its own case")
    parser.add_argument("--kernels", default="", help="a library of our kernels; without it their twins run")
    parser.add_argument("cases", nargs="*")
    options = parser.parse_args()
    device.install()
    from zlaunch.runtime.offload.disk import DiskTransfer

    from .cases import CASES, train
    from .kernels import install, launched
    from .mutations import MUTATIONS, applied

    if options.kernels:
        install(options.kernels)
    waiting: Any = DiskTransfer
    waiting.wait = meeting(waiting.wait)
    runs = [(MUTATIONS[each][0], each) for each in options.mutations]
    for name, mutation in runs + [(name, "") for name in options.cases]:
        # each case has the whole limit, however many there are; its end shows the stacks of one that hangs
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
        for each in launched:
            each.launched.clear()
        try:
            with applied(mutation):
                found = train(CASES[name])
        except Exception as error:
            from .clocks import findings

            found = {"error": f"{type(error).__name__}: {error}", "races": dict(findings.races)}
        used = sorted({kernel for each in launched for kernel in each.launched})
        print(json.dumps({"case": name, "mutation": mutation, "kernels": used, **found}), flush=True)
    sys.stdout.flush()
    os._exit(0)  # threads of an engine that failed


main()
