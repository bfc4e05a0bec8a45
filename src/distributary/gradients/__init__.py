"""Gradients with respect to variables."""

from distributary.gradients._functional import grad, value_and_grad
from distributary.gradients._global_batch import global_batch_loss
from distributary.gradients._tape import GradientTape, UnconnectedGradients
