"""Checkpoints: save and restore a training, on any number of replicas and workers."""

from distributary.checkpoint._checkpoint import (
    Checkpoint,
    latest_checkpoint,
    list_variables,
    load_variable,
)
from distributary.checkpoint._commit import not_of_keras, numbered, read, read_arrays
from distributary.checkpoint._files import (
    ArrayReader,
    SavedPart,
    WrittenFile,
    box_of,
    common_box,
    complete_file,
    is_damaged,
    is_sealed,
    seal,
    write_arrays,
    write_once,
)
from distributary.checkpoint._leaves import RemoteStore, SavedVariable, settle
from distributary.checkpoint._manager import (
    CheckpointManager,
    PreemptionCheckpointHandler,
    TerminationConfig,
    keep_programs,
    remove_programs,
)
from distributary.checkpoint._save_locks import hold, release

__all__ = [  # for users
    "Checkpoint",
    "CheckpointManager",
    "PreemptionCheckpointHandler",
    "TerminationConfig",
    "latest_checkpoint",
    "list_variables",
    "load_variable",
]
