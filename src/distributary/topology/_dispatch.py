"""The order in which replica-wide programs reach their devices, and how many are in flight."""

import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import starmap
from typing import Any, TypeVar, final

import jax
import numpy as np

from distributary.errors import InvalidValueError
from distributary.topology._cpu import cpu_threads_suffice
from distributary.topology._timing import ProgramTimer, wait_for_output

__all__ = [
    "Dispatcher",
    "JobEvent",
    "JobPrograms",
    "LatestProgram",
    "dispatcher_for",
    "job_programs",
    "latest_program",
    "progress",
]

_T = TypeVar("_T")

# With a pool of two threads per device no number in flight was seen to starve a program; the window
# then only keeps a loop from running far ahead. In a pool that is too small it is what protects.
_MAX_IN_FLIGHT = 32
_MAX_IN_FLIGHT_IN_A_SMALL_POOL = 4
# Both reentrant: a program may have to be dispatched while another one is being prepared.
_cpu_lock = threading.RLock()
_accelerator_lock = threading.RLock()


def _stride_of(max_in_flight: int) -> int:
    """Every how many-th program keeps a token."""
    return max(1, max_in_flight // 4)


@final
class Dispatcher:
    """Dispatches replica-wide programs so that their collectives cannot wait for each other.

    A program with collectives needs all its devices at once. Two threads that dispatch such
    programs could reach the devices in different order, so only one dispatches at a time. XLA:CPU
    also runs all devices on one thread pool, where a program that waits for its last device can be
    starved by the programs dispatched behind it, so few of those are in flight.

    Most callers want `dispatcher_for`, which shares one dispatcher between all meshes that share
    a thread pool.

    Args:
        lock: Held during each dispatch; None if nothing has to be kept in order.
        max_in_flight: How many programs may be dispatched and not finished, over all threads; None
            for any number. Needs a lock.

    Programs with collectives end in the order in which they were dispatched, so of a wide window
    only every eighth keeps a token: to look at one costs as much as the rest of a dispatch.

    Attributes:
        bounded: Whether the number in flight is bounded, so that `run` needs tokens.

    Raises:
        InvalidValueError: if `max_in_flight` is below 1 or comes without a lock.
    """

    __slots__ = ("_lock", "_max_in_flight", "_since_token", "_stride", "_tokens", "bounded")

    def __init__(
        self, lock: AbstractContextManager[object] | None, max_in_flight: int | None = None
    ) -> None:
        if max_in_flight is not None and (max_in_flight < 1 or lock is None):
            raise InvalidValueError(
                f"Dispatcher: max_in_flight is {max_in_flight} with lock {lock}, expected a number"
                " >= 1 and a lock, or None."
            )
        self.bounded = max_in_flight is not None
        self._lock = lock
        self._max_in_flight = max_in_flight or 0
        self._stride = _stride_of(self._max_in_flight)
        # Guarded by `_lock`: outputs of every `_stride`-th of the latest programs, oldest first,
        # and the number of programs after the last of them. All other programs have finished.
        self._tokens: deque[jax.Array] = deque()
        self._since_token = 0

    def narrow(self, max_in_flight: int) -> None:
        """Lowers the number in flight to `max_in_flight`, if it is higher."""
        if max_in_flight >= self._max_in_flight:
            return
        with self._lock or nullcontext():
            # The few programs after the last token stay uncounted; they need a smaller mesh.
            while self._tokens:
                _wait_for(self._tokens.popleft())
            self._since_token = 0
            self._max_in_flight = max_in_flight
            self._stride = _stride_of(max_in_flight)

    def run(
        self, call: Callable[..., _T], token_of: Callable[[_T], jax.Array | None], *args: Any
    ) -> _T:
        """Dispatches one program, after waiting for an earlier one if too many are in flight.

        Args:
            call: Dispatches the program and returns its outputs. Trace and compile beforehand:
                other threads wait while it runs, so it must not wait for them.
            token_of: From the outputs of `call`, a small array that has a shard on every device of
                this process and is never donated to a later program; None for a program without
                collectives. Not called unless `bounded`.
            *args: Arguments of `call`.

        Returns:
            What `call` returns.

        Raises:
            JaxRuntimeError: if an earlier token was donated or deleted.
            WorkerLostError: if the program has failed because another worker was lost.
        """
        made: list[_T] = []
        self.run_into(made, call, token_of, args)
        return made[0]

    def run_into(
        self,
        made: list[_T],
        call: Callable[..., _T],
        token_of: Callable[[_T], jax.Array | None],
        args: tuple[Any, ...],
    ) -> None:
        """Like `run`, for programs that consume arguments: `made` gets what `call` returns.

        It has it also if Ctrl-C comes while the program is dispatched: Python raises that between
        two of its instructions, and between the call of a compiled function and the end of
        `list.extend` there is none.
        """
        try:
            lock = self._lock
            if lock is None:
                made.extend(starmap(call, (args,)))
                return
            with lock:
                if not self.bounded:
                    made.extend(starmap(call, (args,)))
                    return
                tokens, stride = self._tokens, self._stride
                while len(tokens) * stride + self._since_token >= self._max_in_flight:
                    begin = time.perf_counter()
                    _wait_for(tokens.popleft())
                    latest_program.blocked_seconds += time.perf_counter() - begin
                made.extend(starmap(call, (args,)))
                if self._since_token + 1 < stride:
                    self._since_token += 1
                    return
                token = token_of(made[0])
                if token is not None:
                    tokens.append(token)
                    self._since_token = 0
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            explained = job_programs.explained(error)
            if explained is error:
                raise
            raise explained from error


# One thread pool in the process, so one window over all meshes of CPU devices.
_direct = Dispatcher(lock=None)
_ordered = Dispatcher(lock=_accelerator_lock)
_ordered_and_bounded = Dispatcher(lock=_cpu_lock, max_in_flight=_MAX_IN_FLIGHT)


def dispatcher_for(mesh_devices: tuple[jax.Device, ...]) -> Dispatcher:
    """The dispatcher of programs that run on all of the given devices.

    Args:
        mesh_devices: The devices of a mesh, those of other processes included.

    Returns:
        With one device in this process, a dispatcher that only calls; with several CPU devices, the
        one that all such meshes share, with at most 32 programs in flight, 4 once a mesh has more
        devices than XLA's thread pool has room for; with several GPUs or TPUs, the one that keeps
        their order.
    """
    this_process = jax.process_index()
    platforms = [d.platform for d in mesh_devices if d.process_index == this_process]
    if len(platforms) <= 1:
        return _direct
    if platforms[0] != "cpu":
        return _ordered
    if not cpu_threads_suffice(len(platforms)):
        _ordered_and_bounded.narrow(_MAX_IN_FLIGHT_IN_A_SMALL_POOL)
    return _ordered_and_bounded


def _wait_for(token: jax.Array) -> None:
    try:
        token.block_until_ready()
    except jax.errors.JaxRuntimeError:
        # A program that failed is finished, too: whoever reads its outputs gets the error. But a
        # token that is gone would leave the number in flight without a bound.
        if token.is_deleted():
            raise


@final
class LatestProgram:
    """The program that was dispatched last in this process.

    Attributes:
        count: Number of programs dispatched so far.
        output: An array it makes, a list with one per replica, or None.
        lock: Held while a program is dispatched that may consume that array.
        dispatched_at: When it was on its way, by `time.perf_counter`.
        blocked_seconds: How long dispatches have waited for earlier programs so far.
        timer: What times programs, while a step is a sample.
    """

    __slots__ = ("blocked_seconds", "count", "dispatched_at", "lock", "output", "timer")

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.count = 0
        self.output: Any = None
        self.dispatched_at = 0.0
        self.blocked_seconds = 0.0
        self.timer: ProgramTimer | None = None

    def wait(self) -> None:
        """Waits until devices are no longer at work on it."""
        with self.lock:
            wait_for_output(self.output)

    def begin(self) -> None:
        """To be called before a program is dispatched if there is a timer."""
        timer = self.timer
        if timer is not None and timer.is_over:
            self.timer = None
        elif timer is not None:
            self.blocked_seconds += timer.start(self.output)

    def end(self, output: Any, result: Any) -> None:
        """To be called when one was dispatched.

        Args:
            output: An array it makes, a list with one per replica, or None.
            result: Likewise, of those that no later program consumes, if there are any.
        """
        self.count += 1
        self.output = output
        timer = self.timer
        if timer is not None:
            self.blocked_seconds += timer.stop(output if result is None else result)
        self.dispatched_at = time.perf_counter()

    def is_running(self) -> bool:
        """Whether devices are still at work on it."""
        # jaxlib 0.10.2 ends the process when a deleted array is asked whether it is ready.
        with self.lock:
            output = self.output[0] if isinstance(self.output, list) else self.output
            return output is not None and not output.is_deleted() and not output.is_ready()


latest_program = LatestProgram()


@final
class JobEvent:
    """Something that all workers of a job do together: a program, an assignment, a new epoch.

    Args:
        name: What it is, for people.
        describe: Returns what it consists of: texts, which have to be the same on every worker,
            each with the place of the script that it comes from, or "".

    Attributes:
        key: The same for events of the same name and texts, on every worker.
    """

    __slots__ = ("describe", "key", "name")

    def __init__(
        self, name: str, describe: Callable[[], Sequence[tuple[str, str]]] = lambda: ()
    ) -> None:
        self.name = name
        self.describe = describe
        digest = hashlib.blake2b(name.encode(), digest_size=8)
        for text, _ in describe():
            digest.update(b"\n" + text.encode())
        self.key = int.from_bytes(digest.digest(), "little")


@final
class JobPrograms:
    """What all workers of a job do together, in the order in which they do it.

    Attributes:
        position: Number of events that this process has begun; the same on every worker that has
            got as far.
        num_meetings: Number of those at which it has waited for the others.
        error: Why no further one can begin.
        explain: From an error of a program to the one that is raised, while a job is watched.
        enter: Makes sure that the others do the same, while there are others.
        latest: The event that was begun last, with its values.
    """

    __slots__ = ("_is_alone", "enter", "error", "explain", "latest", "num_meetings", "position")

    def __init__(self) -> None:
        self.position = 0
        self.num_meetings = 0
        self.error: Exception | None = None
        self.explain: Callable[[Exception], Exception] | None = None
        self.enter: Callable[[JobEvent, tuple[Any, ...]], None] | None = None
        self.latest: tuple[str, tuple[Any, ...]] = "the start", ()
        self._is_alone = False

    def explained(self, error: Exception) -> Exception:
        """Returns the error to raise for `error`: its reason, if another worker is behind it."""
        return error if self.explain is None else self.explain(error)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Lets this process do what the others do not, such as reading a file for all of them."""
        self._is_alone, before = True, self._is_alone
        try:
            yield
        finally:
            self._is_alone = before

    def begin(self, event: JobEvent, values: tuple[Any, ...] = ()) -> None:
        """Says what this process does next with all others; call it before.

        Args:
            event: What it is.
            values: Python numbers that belong to it, which may be others next time.

        Raises:
            WorkerMismatchError: if the others do something else.
            Exception: `error`.
        """
        if self.error is not None:
            raise self.error
        if self.enter is not None and not self._is_alone:
            self.latest = event.name, values
            self.enter(event, values)


job_programs = JobPrograms()


@final
class Progress:
    """How far this process is, for somebody who watches it.

    Attributes:
        is_watched: Whether somebody does; nothing is counted otherwise.
        num_steps: Steps of `fit` and of loops over distributed datasets, and closures.
        num_examples: Examples in them, of this process.
        values: Numbers that a program has of its own, such as its loss, the latest by name.
    """

    __slots__ = ("is_watched", "num_examples", "num_steps", "values")

    def __init__(self) -> None:
        self.is_watched = False
        self.num_steps = 0
        self.num_examples = 0
        self.values: dict[str, float] = {}

    def add(self, num_steps: int, num_examples: int) -> None:
        """Counts steps."""
        self.num_steps += num_steps
        self.num_examples += num_examples

    def note_logs(self, logs: Any) -> None:
        """Takes the numbers in the logs of Keras, which are there already."""
        if isinstance(logs, dict):
            kinds = (jax.Array, np.ndarray, np.generic, float, int)
            numbers = {k: v for k, v in logs.items() if isinstance(v, kinds) and np.ndim(v) == 0}
            self.values = {**self.values, **{k: float(v) for k, v in numbers.items()}}


progress = Progress()
