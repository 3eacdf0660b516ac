"""Compile the host's kernels in the fork server, and keep what it has imported out of garbage collections.

A rank that loads numba's kernels from their cache takes 3 CPU s for numba's registries alone, one without a
cache ten; as forks of a process that has them, ranks pay nothing.
A collection in a rank would walk half a million objects of the imports, and copy their pages. An engine that
is made while another one is open collects garbage: the body of mesh/test_equivalence.py took 5.2 CPU s in a
rank without this module, and takes 1.5 with it.
"""

import fcntl
import gc
import os
import sys
from contextlib import suppress
from pathlib import Path

sys.dont_write_bytecode = False  # ranks import test modules, which pytest compiles for itself alone

with suppress(ImportError):  # without numba the twins work
    from zlaunch.cuda_ops import host_kernels, narrow_host_kernels, quantize_host_kernels, signs_host_kernels

    folder = os.open(Path(__file__).parent, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)  # each process of pytest has a fork server: the first fills the cache
    for name in ("adam", "sgd", "lion"):
        host_kernels.ready(name)
        narrow_host_kernels.ready(name)
    quantize_host_kernels.compile_all()
    signs_host_kernels.compile_all()
    os.close(folder)

gc.collect()
gc.freeze()
