"""Measures what more replicas gain on this machine, and predicts what more machines would gain.

The command `distributary bench` is built on it. `import distributary` does not import this
package.
"""

from distributary.scaling._measurement import (
    Network,
    Prediction,
    Program,
    default_replicas,
    measure,
    predict,
)
from distributary.scaling._models import MODELS
from distributary.scaling._plot import draw, write_png
from distributary.scaling._timer import Timing

__all__ = [
    "MODELS",
    "Network",
    "Prediction",
    "Program",
    "Timing",
    "default_replicas",
    "draw",
    "measure",
    "predict",
    "write_png",
]
