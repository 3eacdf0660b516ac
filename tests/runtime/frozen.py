"""Keep what the fork server has imported out of garbage collections, in it and in its forks.

A collection in a rank would walk half a million objects of the imports, and copy their pages: an engine that
is made while another one is open collects garbage, which took a rank up to ten times as long as its test.
"""

import gc

gc.collect()
gc.freeze()
