"""Ranks of tests load quickly: half of what their frameworks take to come and go is the collector, looking for garbage.

Python imports this by itself, where it is in PYTHONPATH.
"""

import atexit
import gc

gc.set_threshold(50_000, 20, 100)
atexit.register(gc.freeze)
