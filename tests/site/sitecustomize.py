"""Every Python that tests start imports this: its search for garbage is that of conftest.py."""

import gc

gc.set_threshold(20_000)
