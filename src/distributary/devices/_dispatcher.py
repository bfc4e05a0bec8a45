"""The order in which replica-wide programs reach their devices, and how many are in flight."""

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import starmap
from typing import TypeVar, final

import jax

from distributary.devices._job_events import job_programs
from distributary.devices._latest import latest_program
from distributary.devices._nest import Nest
from distributary.devices._thread_pool import cpu_threads_suffice

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
