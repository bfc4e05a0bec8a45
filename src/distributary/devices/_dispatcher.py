"""The order in which programs reach their devices, how many are in flight, and Ctrl-C between."""

import contextlib
import hashlib
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import starmap
from types import FrameType
from typing import Any, TypeAlias, TypeVar, final

import jax

from distributary.devices._local_devices import cpu_threads_suffice

Nest: TypeAlias = Any
"""A nest of tuples, lists and dictionaries with arrays or numbers as leaves: a pytree of JAX."""


# Timing of programs on devices.

_MAX_PROGRAMS = 16

Output: TypeAlias = jax.Array | list[jax.Array] | None
"""An array that a program makes, a list with one per replica, or None."""


@final
class ProgramTimer:
    """A timer for a number of programs, each of which runs with nothing else in flight.

    Attributes:
        seconds: Time of all programs together, each from its dispatch until its results are there.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._num_left = _MAX_PROGRAMS
        self._begin: float | None = None  # set while a program is in flight

    @property
    def is_over(self) -> bool:
        """True after too many programs: the loop has ended without taking its timer away."""
        return not self._num_left

    def start(self, before: Output) -> float:
        """Waits for the output of an earlier program; returns the seconds that this took."""
        begin = time.perf_counter()
        wait_for_output(before)
        self._begin = now = time.perf_counter()
        return now - begin

    def stop(self, output: Output) -> float:
        """Waits for the output of the program dispatched since `start`; returns the seconds."""
        begin = time.perf_counter()
        wait_for_output(output)
        end = time.perf_counter()
        if self._begin is not None:  # `start` was called before the program was dispatched
            self.seconds += end - self._begin
            self._num_left -= 1
        self._begin = None
        return end - begin


def wait_for_output(output: Output) -> None:
    """Waits for an array or for all arrays of a list; does nothing for None."""
    # If a program has failed, the error is raised where its output is read.
    with contextlib.suppress(jax.errors.JaxRuntimeError, RuntimeError, ValueError):
        for array in output if isinstance(output, list) else [output]:
            if array is not None and not array.is_deleted():
                array.block_until_ready()


# The program that this process has dispatched last.


@final
@dataclass(eq=False)
class LatestProgram:
    """The program that was dispatched last in this process.

    Attributes:
        count: Number of programs dispatched so far.
        output: An array that the program makes, a list with one per replica, or None.
        lock: Held while a program that may consume that array is dispatched.
        dispatched_at: Time at which it had been dispatched, by `time.perf_counter`.
        blocked_seconds: Time that dispatches have waited for earlier programs so far.
        timer: Timer of programs, while a step is a sample.
    """

    count: int = 0
    output: Output = None
    lock: threading.RLock = field(default_factory=threading.RLock)
    dispatched_at: float = 0.0
    blocked_seconds: float = 0.0
    timer: ProgramTimer | None = None

    def wait(self) -> None:
        """Waits until the devices have finished it."""
        with self.lock:
            wait_for_output(self.output)

    def begin(self) -> None:
        """Starts the timer if there is one; call it before a program is dispatched."""
        timer = self.timer
        if timer is not None and timer.is_over:
            self.timer = None
        elif timer is not None:
            self.blocked_seconds += timer.start(self.output)

    def end(self, output: Output, result: Output) -> None:
        """Records a program; call it after the program was dispatched.

        Args:
            output: An array that the program makes, a list with one per replica, or None.
            result: The same, but of outputs that no later program consumes, if there are any.
        """
        self.count += 1
        self.output = output
        timer = self.timer
        if timer is not None:
            self.blocked_seconds += timer.stop(output if result is None else result)
        self.dispatched_at = time.perf_counter()

    def is_running(self) -> bool:
        """Returns whether the devices are still at work on it."""
        # jaxlib 0.10.2 ends the process if you ask a deleted array whether it is ready.
        with self.lock:
            output: Any = self.output[0] if isinstance(self.output, list) else self.output
            if not hasattr(output, "is_ready"):  # nothing, or a random key
                return False
            return not output.is_deleted() and not output.is_ready()


latest_program = LatestProgram()


# The events of a job, which all its processes begin in the same order.


@final
class JobEvent:
    """An event of a job: all workers do it together, such as a program, an assignment, a new epoch.

    Args:
        name: Name of the event, for people.
        describe: Returns the parts of the event as texts, which have to be the same on every
            worker. Each comes with the place in the script that it comes from, or "".

    Attributes:
        key: Hash of the name and the texts, the same on every worker.
    """

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
@dataclass(eq=False)
class JobPrograms:
    """The events of a job, which all workers begin in the same order.

    Attributes:
        position: Number of events that this process has begun; the same on every worker that has
            come as far.
        num_meetings: Number of events at which this process has waited for the others.
        error: Reason why no further event can begin.
        explain: Turns an error of a program into the one to raise, while a job is watched.
        enter: Makes sure that the other workers do the same, as long as there are any.
        latest: The last event that was begun, with its values.
    """

    position: int = 0
    num_meetings: int = 0
    error: Exception | None = None
    explain: Callable[[Exception], Exception] | None = None
    enter: Callable[[JobEvent, tuple[Any, ...]], bool] | None = None
    latest: tuple[str, tuple[Any, ...]] = "the start", ()
    _is_alone: bool = False

    def explained(self, error: Exception) -> Exception:
        """Returns the error to raise for `error`; if another worker caused it, that reason."""
        return error if self.explain is None else self.explain(error)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Lets this process do something that others do not, such as reading a file for all."""
        self._is_alone, before = True, self._is_alone
        try:
            yield
        finally:
            self._is_alone = before

    def begin(self, event: JobEvent, values: tuple[Any, ...] = ()) -> bool:
        """Announces what this process and all others do next; call it before doing it.

        Args:
            event: The event.
            values: Python numbers that belong to it, which may be others next time.

        Returns:
            Whether it waited for the others here; if so, each of them did.

        Raises:
            WorkerMismatchError: if the others do something else.
            Exception: `error`.
        """
        if self.error is not None:
            raise self.error
        if self.enter is not None and not self._is_alone:
            self.latest = event.name, values
            return self.enter(event, values)
        return False


job_programs = JobPrograms()


# The dispatcher

_T = TypeVar("_T")

# With two threads per device in the pool, no number of programs in flight was seen to starve one.
# The limit then only keeps a loop from running far ahead. In a pool that is too small, it prevents
# deadlocks.
_MAX_IN_FLIGHT = 32
_MAX_IN_FLIGHT_IN_A_SMALL_POOL = 4
# Both are reentrant: while one program is prepared, another may have to be dispatched.
_cpu_lock = threading.RLock()
_accelerator_lock = threading.RLock()


def _stride_of(max_in_flight: int) -> int:
    """Returns the number of programs from one kept token to the next."""
    return max(1, max_in_flight // 4)


@final
class Dispatcher:
    """A dispatcher of replica-wide programs whose collectives cannot deadlock.

    A program with collectives needs all its devices at once. Two threads that dispatch such
    programs could reach the devices in a different order, so only one thread dispatches at a time.
    XLA:CPU also runs all devices on one thread pool. There, a program that waits for its last
    device can be starved by programs that were dispatched after it, so only a few are in flight.

    Programs with collectives end in the order in which they were dispatched. So if many may be in
    flight, only every eighth keeps a token: checking a token costs as much as the rest of a
    dispatch.

    Most callers want `dispatcher_for`, which shares one dispatcher between all meshes that share a
    thread pool.

    Args:
        lock: Held during each dispatch; None if there is no order to keep.
        max_in_flight: Number of programs, over all threads, that may be dispatched and not
            finished; None for no limit. Needs a lock.

    Attributes:
        bounded: Whether the number in flight is limited, so that `run` needs tokens.
    """

    def __init__(
        self, lock: AbstractContextManager[object] | None, max_in_flight: int | None = None
    ) -> None:
        self.bounded = max_in_flight is not None
        self._lock = lock
        self._max_in_flight = max_in_flight or 0
        self._stride = _stride_of(self._max_in_flight)
        # Guarded by `_lock`: the outputs of every `_stride`-th of the latest programs, oldest
        # first, and the number of programs after the last of them. All other programs have
        # finished.
        self._tokens: deque[jax.Array] = deque()
        self._since_token = 0

    def narrow(self, max_in_flight: int) -> None:
        """Lowers the limit of programs in flight to `max_in_flight`, if it is higher."""
        if max_in_flight >= self._max_in_flight:
            return
        with self._lock or nullcontext():
            # The few programs after the last token are not counted; they were for a smaller mesh.
            while self._tokens:
                _wait_for(self._tokens.popleft())
            self._since_token = 0
            self._max_in_flight = max_in_flight
            self._stride = _stride_of(max_in_flight)

    def run(
        self, call: Callable[..., _T], token_of: Callable[[_T], jax.Array | None], *args: Nest
    ) -> _T:
        """Dispatches one program; if too many are in flight, waits for an earlier one first.

        Args:
            call: Dispatches the program and returns its outputs. Trace and compile beforehand:
                other threads wait while it runs, so it must not wait for them.
            token_of: Returns, from the outputs of `call`, a small array that has a shard on every
                device of this process and is never donated to a later program; None for a program
                without collectives. Only called if `bounded`.
            *args: Arguments of `call`.

        Returns:
            The outputs of `call`.

        Raises:
            JaxRuntimeError: if an earlier token was donated or deleted.
            WorkerLostError: if the program failed because another worker was lost.
        """
        outputs: list[_T] = []
        self.run_into(outputs, call, token_of, args)
        return outputs[0]

    def run_into(
        self,
        outputs: list[_T],
        call: Callable[..., _T],
        token_of: Callable[[_T], jax.Array | None],
        args: tuple[Nest, ...],
    ) -> None:
        """Dispatches like `run`, for programs that consume arguments; appends to `outputs`.

        `outputs` gets them even if Ctrl-C comes while the program is dispatched. Python raises
        it only between two of its instructions, and there is none between the call of a compiled
        function and the end of `list.extend`.
        """
        try:
            lock = self._lock
            if lock is None:
                outputs.extend(starmap(call, (args,)))
                return
            with lock:
                if not self.bounded:
                    outputs.extend(starmap(call, (args,)))
                    return
                tokens, stride = self._tokens, self._stride
                while len(tokens) * stride + self._since_token >= self._max_in_flight:
                    begin = time.perf_counter()
                    _wait_for(tokens.popleft())
                    latest_program.blocked_seconds += time.perf_counter() - begin
                outputs.extend(starmap(call, (args,)))
                if self._since_token + 1 < stride:
                    self._since_token += 1
                    return
                token = token_of(outputs[0])
                if token is not None:
                    tokens.append(token)
                    self._since_token = 0
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            explained = job_programs.explained(error)
            if explained is error:
                raise
            raise explained from error


# The process has one thread pool, so one limit holds for all meshes of CPU devices.
_direct = Dispatcher(lock=None)
_ordered = Dispatcher(lock=_accelerator_lock)
_ordered_and_bounded = Dispatcher(lock=_cpu_lock, max_in_flight=_MAX_IN_FLIGHT)


def dispatcher_for(mesh_devices: tuple[jax.Device, ...]) -> Dispatcher:
    """Returns the dispatcher of programs that run on all of the given devices.

    Args:
        mesh_devices: The devices of a mesh, including those of other processes.

    Returns:
        With one device in this process, a dispatcher that only calls. With several CPU devices, the
        one that all such meshes share: at most 32 programs are in flight, and at most 4 once a mesh
        has more devices than XLA's thread pool has room for. With several GPUs or TPUs, the one
        that keeps their order.
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
        # A program that failed has finished, too: the error is raised where its outputs are read.
        # But without this token, the number in flight would have no limit.
        if token.is_deleted():
            raise


# Ctrl-C, which waits until the result of a step is stored.

_Handler: TypeAlias = Callable[[int, FrameType | None], Any]


@final
class _Interrupts:
    """A delay of Ctrl-C: inside of `watched`, it waits for the end of a `with interrupts:` block.

    Python handles signals in its main thread; in other threads, both do nothing.
    """

    def __init__(self) -> None:
        self._handler: _Handler | None = None  # the program's own
        self._is_held = False
        self._caught: tuple[int, FrameType | None] | None = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Makes `with interrupts:` work. Enter it once for many steps, because it takes 20 us."""
        is_main = threading.current_thread() is threading.main_thread()
        handler = signal.getsignal(signal.SIGINT) if is_main and self._handler is None else None
        if not callable(handler):
            yield
            return
        self._handler = handler
        signal.signal(signal.SIGINT, self._receive)
        try:
            yield
        finally:
            if signal.getsignal(signal.SIGINT) == self._receive:  # else a callback has set its own
                signal.signal(signal.SIGINT, handler)
            self._handler = None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._is_held:
            self._caught = number, frame
        else:
            (self._handler or signal.default_int_handler)(number, frame)

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._is_held = True

    def __exit__(self, *exc_info: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._is_held = False
        details, self._caught = self._caught, None
        if details is not None:
            self._receive(*details)


interrupts = _Interrupts()
"""Object that delays Ctrl-C in this process."""
