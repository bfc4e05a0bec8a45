"""Exceptions of distributary.

Every exception is a `DistributaryError` and also the builtin that tf.distribute raises in the
same situation, so `except ValueError` and friends keep working:

    DistributaryError
    ├── ContextError (RuntimeError)            wrong scope, replica context or strategy
    ├── BackendStartedError (RuntimeError)     must happen before JAX starts its backends
    ├── DeviceError (ValueError)               a device that cannot be parsed or does not exist
    ├── InvalidValueError (ValueError)         an argument has the right type and a wrong value
    │   ├── ClusterError (RuntimeError)        what describes the cluster is missing or wrong
    │   │   └── WorkerMismatchError            workers of a job do different things
    │   ├── ReplicaMismatchError               replicas disagree in shape, dtype or structure
    │   └── ReplicaDivergenceError             copies of a mirrored variable would differ
    ├── InvalidTypeError (TypeError)           an argument has the wrong type
    ├── MissingPackageError (ImportError)      an optional package is not installed
    ├── OutOfRangeError (StopIteration)        get_next() at the end of a dataset
    ├── CancelledError (RuntimeError)          a closure was not run because another one failed
    ├── LaunchError (RuntimeError)             the launcher cannot start or join the job
    ├── UnavailableError (RuntimeError)        tasks that a coordinator needs cannot be reached
    │   ├── CoordinatorReplacedError           another coordinator has taken over the tasks
    │   └── PSUnavailableError                 a parameter server is gone, and its variables
    ├── WorkerLostError (RuntimeError)         another worker of the job has ended or is frozen
    ├── CheckpointError (OSError)              a checkpoint cannot be written, found or read
    ├── CompileError (RuntimeError)            a step cannot be compiled for another machine
    └── UnsupportedError (NotImplementedError) the request has no meaning here

Warnings are `DistributaryWarning`, a `UserWarning`.
"""

from typing import Final

__all__ = [
    "BackendStartedError",
    "CancelledError",
    "CheckpointError",
    "ClusterError",
    "CompileError",
    "ContextError",
    "CoordinatorReplacedError",
    "DeviceError",
    "DistributaryError",
    "DistributaryWarning",
    "InvalidTypeError",
    "InvalidValueError",
    "LaunchError",
    "MissingPackageError",
    "OutOfRangeError",
    "PSUnavailableError",
    "ReplicaDivergenceError",
    "ReplicaMismatchError",
    "UnavailableError",
    "UnsupportedError",
    "WorkerLostError",
    "WorkerMismatchError",
]


class DistributaryError(Exception):
    """Base of every exception raised on purpose by distributary."""


class ContextError(DistributaryError, RuntimeError):
    """The call is not allowed in the current strategy context."""


class BackendStartedError(DistributaryError, RuntimeError):
    """The call must come before JAX starts its backends, and JAX has started."""


class DeviceError(DistributaryError, ValueError):
    """A device cannot be parsed, does not exist or is named twice."""


class InvalidValueError(DistributaryError, ValueError):
    """An argument has an unusable value."""


class ClusterError(InvalidValueError, RuntimeError):
    """What a cluster manager says about the job is missing or contradicts itself."""


class WorkerMismatchError(ClusterError):
    """The workers of a job run different programs, or the same ones in another order.

    Every worker gets it, before a value is computed from what they do differently. A worker that
    waits in a program which the others never join is ended instead, with the same text on stderr
    and the exit code `WorkerLostError.exit_code`.
    """


class ReplicaMismatchError(InvalidValueError):
    """Replicas disagree in the shape, dtype or structure of a value."""


class ReplicaDivergenceError(InvalidValueError):
    """The copies of a mirrored variable would hold different values."""


class InvalidTypeError(DistributaryError, TypeError):
    """An argument has an unusable type."""


class MissingPackageError(DistributaryError, ImportError):
    """A package that is not among the dependencies is needed here and not installed."""


class OutOfRangeError(DistributaryError, StopIteration):
    """An iterator was asked for an element after its last one."""


class CancelledError(DistributaryError, RuntimeError):
    """A closure was not run because another one had failed.

    Source: `tf.errors.CancelledError`.
    """


class LaunchError(DistributaryError, RuntimeError):
    """The launcher cannot start the job or join it."""


class UnavailableError(DistributaryError, RuntimeError):
    """Tasks that a coordinator needs cannot be reached, or end again and again.

    Source: `tf.errors.UnavailableError`.
    """


class CoordinatorReplacedError(UnavailableError):
    """Another coordinator has taken over the workers and servers of this one."""


class PSUnavailableError(UnavailableError):
    """A parameter server cannot be reached, or was started again without its variables.

    What has been trained since the last checkpoint is lost: create the strategy again, and restore.
    """


class WorkerLostError(DistributaryError, RuntimeError):
    """Another worker of the job has ended or is frozen, so this one cannot go on.

    The process has a second to clean up; then it is ended.

    Attributes:
        exit_code: Exit code of a worker that ends because another one was lost, `EX_TEMPFAIL` of
            `<sysexits.h>`. `distributary launch` looks for the worker that ended first.
        line_prefix: Beginning of what such a worker says on stderr, up to the end of the line:
            which one was lost.

    Source: `tf.errors.UnavailableError`, which a collective raises in this situation.
    """

    exit_code: Final = 75
    line_prefix: Final = "distributary: "


class CheckpointError(DistributaryError, OSError):
    """A checkpoint cannot be written, found or read."""


class CompileError(DistributaryError, RuntimeError):
    """`distributary compile` cannot compile the step of a script for another machine."""


class UnsupportedError(DistributaryError, NotImplementedError):
    """The operation is not defined for this kind of value or variable."""


class DistributaryWarning(UserWarning):
    """Something works, but slower or otherwise than the user probably expects."""
