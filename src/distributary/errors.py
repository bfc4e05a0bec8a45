"""Exceptions of distributary.

Every exception is a `DistributaryError`, and also the builtin that tf.distribute raises in the
same situation. `except ValueError` and the like keep working:

    DistributaryError
    ├── ContextError (RuntimeError)            wrong scope, replica context or strategy
    ├── BackendStartedError (RuntimeError)     must happen before JAX starts its backends
    ├── DeviceError (ValueError)               a device that cannot be parsed or does not exist
    ├── InvalidValueError (ValueError)         an argument has the right type and a wrong value
    │   ├── ClusterError (RuntimeError)        the cluster description is missing or wrong
    │   │   └── WorkerMismatchError            workers of a job do different things
    │   ├── ReplicaMismatchError               replicas disagree in shape, dtype or structure
    │   └── ReplicaDivergenceError             the copies of a mirrored variable would differ
    ├── InvalidTypeError (TypeError)           an argument has the wrong type
    ├── TracedValueError (TypeError)           Python needs a value that a step does not have yet
    ├── MissingPackageError (ImportError)      an optional package is not installed
    ├── OutOfRangeError (StopIteration)        get_next() after the last element of a dataset
    ├── CancelledError (RuntimeError)          a closure did not run because another one failed
    ├── LaunchError (RuntimeError)             the launcher cannot start or join the job
    ├── UnavailableError (RuntimeError)        tasks that a coordinator needs cannot be reached
    │   ├── CoordinatorReplacedError           another coordinator has taken over the tasks
    │   └── PSUnavailableError                 a parameter server is gone, with its variables
    ├── WorkerLostError (RuntimeError)         another worker of the job has ended or is frozen
    ├── CheckpointError (OSError)              a checkpoint cannot be written, found or read
    ├── CompileError (RuntimeError)            a step cannot be compiled for another machine
    └── UnsupportedError (NotImplementedError) the request has no meaning here

Warnings are `DistributaryWarning`, a `UserWarning`.
"""

import inspect
import math
import re
import sys
import types
import warnings
from numbers import Integral
from typing import Any, Final

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
    "TracedValueError",
    "UnavailableError",
    "UnsupportedError",
    "WorkerLostError",
    "WorkerMismatchError",
]

_MAX_SHOWN = 100


class DistributaryError(Exception):
    """Base class of all exceptions that distributary raises on purpose."""


class ContextError(DistributaryError, RuntimeError):
    """The call is not allowed in the current strategy context."""


class BackendStartedError(DistributaryError, RuntimeError):
    """The call must come before JAX starts its backends, but JAX has started already."""


class DeviceError(DistributaryError, ValueError):
    """A device cannot be parsed, does not exist or is named twice."""


class InvalidValueError(DistributaryError, ValueError):
    """An argument has an unusable value."""


class ClusterError(InvalidValueError, RuntimeError):
    """The cluster manager's description of the job is incomplete or contradicts itself."""


class WorkerMismatchError(ClusterError):
    """The workers of a job run different programs, or the same programs in a different order.

    Every worker raises it before it computes anything from the mismatch. If a worker waits in a
    program that the others never join, its process ends instead, with the same text on stderr and
    the exit code `WorkerLostError.exit_code`.
    """


class ReplicaMismatchError(InvalidValueError):
    """Replicas disagree in the shape, dtype or structure of a value."""


class ReplicaDivergenceError(InvalidValueError):
    """The copies of a mirrored variable would get different values."""


class InvalidTypeError(DistributaryError, TypeError):
    """An argument has an unusable type."""


class TracedValueError(DistributaryError, TypeError):
    """Python code of a step needs the value of an array, which has none while a step is traced.

    Source: the errors about tracers in `jax.errors`, which are `TypeError`s as well.
    """


class MissingPackageError(DistributaryError, ImportError):
    """An optional package is needed here, but it is not installed."""


class OutOfRangeError(DistributaryError, StopIteration):
    """You asked an iterator for an element after its last one."""


class CancelledError(DistributaryError, RuntimeError):
    """A closure did not run because another one failed.

    Source: `tf.errors.CancelledError`.
    """


class LaunchError(DistributaryError, RuntimeError):
    """The launcher cannot start the job or join it."""


class UnavailableError(DistributaryError, RuntimeError):
    """Tasks that a coordinator needs cannot be reached, or keep ending.

    Source: `tf.errors.UnavailableError`.
    """


class CoordinatorReplacedError(UnavailableError):
    """Another coordinator has taken over the workers and servers of this one."""


class PSUnavailableError(UnavailableError):
    """A parameter server cannot be reached, or it restarted without its variables.

    Everything trained since the last checkpoint is lost: create the strategy again, and restore.
    """


class WorkerLostError(DistributaryError, RuntimeError):
    """Another worker of the job has ended or is frozen, so this one cannot continue.

    The process has one second to clean up; then it is ended.

    Attributes:
        exit_code: Exit code of a worker that ends because another one was lost, `EX_TEMPFAIL` of
            `<sysexits.h>`. With it, `distributary launch` knows that another worker ended first.
        line_prefix: Text that such a worker writes to stderr. The rest of the line says which
            worker was lost.

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
    """Something works, but more slowly or differently than you probably expect."""


def warn(text: str) -> None:
    """Warns of something, at the line of the user's code that led here."""
    frame: Any = sys._getframe(1)
    level = 2
    inside = ("distributary.", "jax.", "keras.src.")
    while frame is not None and frame.f_globals.get("__name__", "").startswith(inside):
        frame = frame.f_back
        level += 1
    warnings.warn(text, DistributaryWarning, stacklevel=level)


def check_type(what: str, value: object, kind: Any, expected: str) -> None:
    """Raises `InvalidTypeError` if an argument is not of a type.

    Args:
        what: Function and name of the argument.
        value: The argument.
        kind: Type, or union of types.
        expected: What it should be, for people.
    """
    if not isinstance(value, kind):
        raise InvalidTypeError(f"{what} is {shown(value)}, expected {expected}.")


def checked_int(what: str, value: Any, expected: str = "", *, minimum: float = -math.inf) -> int:
    """Returns an argument that is a whole number, after checking it.

    Args:
        what: Function and name of the argument.
        value: The argument, an int or one of NumPy's.
        expected: What it should be, for people; "an int" or "a number >= 1" unless given.
        minimum: The smallest number that is allowed.

    Raises:
        InvalidTypeError: if it is not an int.
        InvalidValueError: if it is less than `minimum`.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InvalidTypeError(f"{what} is {shown(value)}, expected {expected or 'an int'}.")
    if value < minimum:
        expected = expected or f"a number >= {minimum}"
        raise InvalidValueError(f"{what} is {value}, expected {expected}.")
    return int(value)


def check_takes(what: str, function: Any, call: str) -> None:
    """Raises `InvalidTypeError` if a function cannot be called with as many arguments as it is.

    Args:
        what: Who calls it.
        function: The argument.
        call: How it is called, such as "dataset_fn(context)".
    """
    if not callable(function):
        name = call.partition("(")[0]
        raise InvalidTypeError(f"{what}: {name} is {shown(function)}, expected a function {call}.")
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):  # written in C
        return
    try:
        signature.bind(*call.split(","))
    except TypeError as error:
        raise InvalidTypeError(
            f"{what} calls {shown(function)} as {call}: {error}. Write def {call}:"
        ) from None


def shown(value: Any) -> str:
    """Returns a value for a message: its `repr` if that is short, and no items of arrays."""
    kind = type(value)
    if isinstance(value, types.FunctionType | types.MethodType):
        return f"the function {value.__name__}"
    if hasattr(value, "num_replicas_in_sync"):
        if kind.__name__ == "DefaultStrategy":
            return "the default strategy"
        # Not of the strategy: in a step of the global view, that is 1.
        extended = getattr(value, "extended", None)
        known = value.num_replicas_in_sync if extended is None else extended.placement.num_replicas
        count = int(known)
        return f"{kind.__name__} of {count} replica{'s' * (count != 1)}"
    is_scalar = kind.__module__ == "numpy" and kind.__name__ != "ndarray"
    if hasattr(value, "shape") and hasattr(value, "dtype") and not is_scalar:
        named = f" {value.name!r}" if isinstance(getattr(value, "name", None), str) else ""
        what = "an array" if _is_array(value) else f"{a_kind(kind)}{named}"
        return f"{what} {value.dtype}{[*value.shape]}"
    if isinstance(value, (list, tuple, dict)):
        parts = value.values() if isinstance(value, dict) else value
        if any(hasattr(part, "dtype") for part in parts) or len(repr(value)) > _MAX_SHOWN:
            kinds = sorted({"array" if _is_array(p) else type(p).__name__ for p in parts})
            return f"{a_kind(kind)} of {len(value)} ({', '.join(kinds)})"
    text = repr(value)
    if "\n" in text or " at 0x" in text or len(text) > _MAX_SHOWN:
        return a_kind(kind)
    return text


def _is_array(value: object) -> bool:
    is_of_library = type(value).__module__.partition(".")[0] in ("jax", "jaxlib", "numpy")
    return is_of_library and hasattr(value, "shape")


def described(value: object) -> str:
    """Returns a value for a message, with its type."""
    text = shown(value)
    return text if text.startswith(("a ", "an ", "the ")) else f"{text}, {a_kind(type(value))}"


def a_kind(kind: type) -> str:
    """Returns the name of a type with its article."""
    return f"{'an' if kind.__name__[0] in 'AEIOaeio' else 'a'} {kind.__name__}"


def pip_install(extra: str) -> str:
    """Returns the command that installs the packages of an extra of distributary.

    It names the packages themselves: distributary may be installed from a folder, and an index may
    have another package, or none, under its name.
    """
    import importlib.metadata  # takes a while

    packages = []
    for requirement in importlib.metadata.requires("distributary") or ():
        package, _, condition = requirement.partition(";")
        if re.fullmatch(rf"\s*extra\s*==\s*['\"]{extra}['\"]\s*", condition):
            packages.append(f"'{package.strip()}'")
    return " ".join(["pip install", *packages])
