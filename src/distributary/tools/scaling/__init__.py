"""Measures what more replicas gain on this machine, and predicts what more machines would gain.

The command `distributary bench` is built on it. `import distributary` does not import this
package.
"""

from distributary.tools.scaling._measurement import (
    Network,
    Prediction,
    default_replicas,
    draw,
    measure,
    predict,
    write_png,
)
from distributary.tools.scaling._models import MODELS
from distributary.tools.scaling._timer import Timing
