"""What more replicas bring on this machine, and what more machines would.

What `distributary bench` is made of. `import distributary` does not import this package.
"""

from distributary.scaling._measurement import Program, Row, default_replicas, measure
from distributary.scaling._models import MODELS
from distributary.scaling._plot import draw, write_png
from distributary.scaling._prediction import Network, Prediction, predict

__all__ = [
    "MODELS",
    "Network",
    "Prediction",
    "Program",
    "Row",
    "default_replicas",
    "draw",
    "measure",
    "predict",
    "write_png",
]
