"""Checkpoints: save and restore a training, on any number of replicas and workers."""

from distributary.checkpoint._array_files import (
    ArrayReader,
    SavedPart,
    WrittenFile,
    box_of,
    common_box,
    write_arrays,
)
from distributary.checkpoint._checkpoint import (
    Checkpoint,
    latest_checkpoint,
    list_variables,
    load_variable,
)
from distributary.checkpoint._commit import not_of_keras, numbered, read, read_arrays
from distributary.checkpoint._deferred import settle
from distributary.checkpoint._leaves import RemoteStore, SavedVariable
from distributary.checkpoint._manager import CheckpointManager, keep_programs, remove_programs
from distributary.checkpoint._preemption import PreemptionCheckpointHandler, TerminationConfig
from distributary.checkpoint._save_locks import hold, release
from distributary.checkpoint._whole_files import (
    complete_file,
    is_damaged,
    is_sealed,
    seal,
    write_once,
)

__all__ = [  # for users
    "Checkpoint",
    "CheckpointManager",
    "PreemptionCheckpointHandler",
    "TerminationConfig",
    "latest_checkpoint",
    "list_variables",
    "load_variable",
]
