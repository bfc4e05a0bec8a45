"""Checkpoints: save and restore a training, on any number of replicas and workers."""

from distributary.checkpoint._array_files import (
    ArrayReader as ArrayReader,
    SavedPart as SavedPart,
    WrittenFile as WrittenFile,
    box_of as box_of,
    common_box as common_box,
    write_arrays as write_arrays,
)
from distributary.checkpoint._checkpoint import (
    Checkpoint,
    latest_checkpoint,
    list_variables,
    load_variable,
)
from distributary.checkpoint._commit import (
    not_of_keras as not_of_keras,
    read as read,
    read_arrays as read_arrays,
)
from distributary.checkpoint._compiled import (
    keep_programs as keep_programs,
    remove_programs as remove_programs,
)
from distributary.checkpoint._deferred import settle as settle
from distributary.checkpoint._manager import CheckpointManager
from distributary.checkpoint._preemption import PreemptionCheckpointHandler, TerminationConfig
from distributary.checkpoint._remote_store import (
    RemoteStore as RemoteStore,
    SavedVariable as SavedVariable,
)
from distributary.checkpoint._save_locks import hold as hold, release as release

__all__ = [  # for users
    "Checkpoint",
    "CheckpointManager",
    "PreemptionCheckpointHandler",
    "TerminationConfig",
    "latest_checkpoint",
    "list_variables",
    "load_variable",
]
