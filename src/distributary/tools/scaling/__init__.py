"""Measures what more replicas gain on this machine, and predicts what more machines would gain.

The command `distributary bench` is built on it. `import distributary` does not import this
package.
"""

from typing import TYPE_CHECKING

from distributary._late import late_names

if TYPE_CHECKING:
    from distributary.tools.scaling._measurement import (
        Network,
        Prediction,
        default_replicas,
        measure,
        predict,
    )
    from distributary.tools.scaling._models import MODELS
    from distributary.tools.scaling._plot import draw, write_png
    from distributary.tools.scaling._timer import Timing

__all__ = [
    "MODELS",
    "Network",
    "Prediction",
    "Timing",
    "default_replicas",
    "draw",
    "measure",
    "predict",
    "write_png",
]

# Imported on first use: the command line shows its help without JAX.
if not TYPE_CHECKING:  # or type checkers accept any name
    __getattr__ = late_names(
        __name__,
        {
            "_measurement": "Network Prediction default_replicas measure predict",
            "_models": "MODELS",
            "_plot": "draw write_png",
            "_timer": "Timing",
        },
    )
