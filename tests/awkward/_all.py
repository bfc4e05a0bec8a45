"""All cases: the modules that register them, in the order in which they run."""

from tests.awkward import _fit, _layers, _losses, _metrics, _models, _optimizers, _replicas, _steps
from tests.awkward._case import CASES, Case

__all__ = ["CASES", "Case"]

_ = (_losses, _layers, _metrics, _optimizers, _steps, _replicas, _models, _fit)
