"""Gradients of one replica; `Strategy.reduce` and optimizers combine those of all replicas."""

from distributary.gradients._functional import global_batch_loss, grad, value_and_grad
from distributary.gradients._tape import GradientTape, UnconnectedGradients
