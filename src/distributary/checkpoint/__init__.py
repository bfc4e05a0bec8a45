"""Saving and restoring the state of a training, on any number of replicas and workers."""

from distributary.checkpoint._checkpoint import Checkpoint
from distributary.checkpoint._manager import CheckpointManager

__all__ = ["Checkpoint", "CheckpointManager"]
