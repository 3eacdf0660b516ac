"""Keep what the fork server has imported out of garbage collections, in it and in its forks.

A collection in a rank would walk half a million objects of the imports, and copy their pages. An engine that
is made while another one is open collects garbage: the body of mesh/test_equivalence.py took 5.2 CPU s in a
rank without this module, and takes 1.5 with it.
"""

import gc

gc.collect()
gc.freeze()
