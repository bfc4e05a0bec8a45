"""Programs of all workers: the same in the same order, and compiled once for a machine."""

import itertools
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import jax

from distributary.devices import JobEvent, job_programs, key_of_devices, set_key_of_devices
from distributary.job._consensus import Consensus, consensus
from distributary.tracing import script_line

_MAX_AGREED = 4096
_MAX_TEXT_CHARACTERS = 160


@final
class EventSequence:
    """The events that the workers have agreed to run next.

    Two workers that run different programs at the same time would mix their numbers, or wait for
    each other forever. So they meet before an event and compare it. That takes 0.1 to 0.2 ms, too
    long for every step. But a training loop repeats itself: once the workers have agreed that event
    `d` follows `a, b, c`, they need not meet when it does so again:

        step step step step step | evaluation step step ...
                           ^ nobody meets here: after four steps a fifth one is agreed
                                       ^ everybody meets, as this is new after four steps

    A worker that does not follow the agreement waits in a meeting, and the others wait for it in
    their program. So no number is handed out, and `Liveness` sees the difference.

    Invariant: workers that have done the same have agreed on the same.

    Args:
        consensus: Consensus of the workers.
    """

    def __init__(self, consensus: Consensus) -> None:
        self._consensus = consensus
        self._agreed: dict[tuple[int, ...], tuple[int, tuple[Any, ...]]] = {}
        self._before: tuple[int, ...] = (0, 0, 0, 0)

    def enter(self, event: JobEvent, values: tuple[Any, ...]) -> bool:
        """Meets the other workers unless they have agreed on this; see `JobPrograms.begin`."""
        before = self._before
        key = event.key
        self._before = (before[1], before[2], before[3], key)
        if self._agreed.get(before) == (key, values):
            job_programs.position += 1
            return False
        self._meet(event, values)
        if len(self._agreed) >= _MAX_AGREED:
            self._agreed.clear()
        self._agreed[before] = (key, values)
        return True

    def _meet(self, event: JobEvent, values: tuple[Any, ...]) -> None:
        message = json.dumps([event.key, repr(values)]).encode()
        said = self._consensus.exchange(event.name, message)
        if said.count(said[0]) == len(said):
            return
        details = json.dumps(
            [list(event.describe()), [repr(value) for value in values], script_line()]
        )
        compressed = self._consensus.exchange(
            f"a difference in {event.name}", zlib.compress(details.encode(), 1)
        )
        described = [json.loads(zlib.decompress(one)) for one in compressed]
        raise self._consensus.mismatch(
            f"The workers differ in {event.name}: {self._difference(described)}. All workers must"
            " do the same with the same numbers. Pass values that differ between workers, such as"
            " data, through strategy.experimental_distribute_values_from_function."
        )

    def forget(self) -> None:
        """Starts again after a difference, so that scripts that catch the error can go on."""
        self._agreed.clear()
        self._before = (0, 0, 0, 0)

    def _difference(self, described: Sequence[Any]) -> str:
        (lines, values, script), *others = described
        for number, (other_lines, other_values, other_script) in enumerate(others, start=1):
            names = (
                f"{self._consensus.names[0]} ({script})",
                f"{self._consensus.names[number]} ({other_script})",
            )
            texts = first_difference(lines, other_lines)
            if texts is not None:
                return " and ".join(
                    f"{name} has {text}" for name, text in zip(names, texts, strict=True)
                )
            for pair in zip(values, other_values, strict=False):
                if pair[0] != pair[1]:
                    return f"{names[0]} gives it {pair[0]} and {names[1]} {pair[1]}"
        return "they describe it in the same way, and name it by other keys"


def first_difference(
    one: Sequence[tuple[str, str]], other: Sequence[tuple[str, str]]
) -> tuple[str, str] | None:
    """Returns the first difference between two descriptions of an event, or None."""
    for mine, theirs in itertools.zip_longest(one, other, fillvalue=("nothing more", "")):
        if mine[0] != theirs[0]:
            letters = enumerate(zip(mine[0], theirs[0], strict=False))
            num_equal = next((at for at, (a, b) in letters if a != b), 0)
            return _shown(mine, num_equal), _shown(theirs, num_equal)
    return None


def _shown(line: tuple[str, str], at: int) -> str:
    """Returns the text of a line and its place; of a long text, the part around position `at`."""
    text, where = line
    if len(text) > _MAX_TEXT_CHARACTERS:
        begin = max(0, at - _MAX_TEXT_CHARACTERS // 3)
        end = begin + _MAX_TEXT_CHARACTERS
        text = f"{'... ' if begin else ''}{text[begin:end]}{' ...' if end < len(text) else ''}"
    return f"{text} at {where}" if where else text


# Programs that one worker compiles for all workers of its machine.
#
# The workers of a machine share its cores, so each would wait for the compilers of the others. JAX
# can pass a program on. It finds it by a key, as in its folder of compiled programs, which on CPUs
# describes the process, too. Here all workers take the key of worker 0: it has the same processor.

_is_shared = False


def share_compilation(devices: Sequence[jax.Device]) -> None:
    """Lets worker 0 compile what spans all workers, if they are on one machine and have CPUs.

    All workers call it together.
    """
    global _is_shared
    job = consensus()
    if job is None or not job.is_on_one_machine or devices[0].platform != "cpu" or _is_shared:
        return
    flags = job.exchange("the flags of compilers", os.environ.get("XLA_FLAGS", "").encode())
    if flags.count(flags[0]) == len(flags):  # or the keys differ, and the others wait for worker 0
        key = job.broadcast("the key of the devices", lambda: key_of_devices(devices))
        _is_shared = set_key_of_devices(key)


@contextmanager
def compiled_once(title: str, is_new: bool) -> Iterator[None]:
    """Lets worker 0 compile what runs in the block; call it when all workers have met.

    Args:
        title: The program in messages, the same on all workers.
        is_new: Whether this worker has not compiled the program yet. Where garbage is collected at
            other times, some have and others have not; then each compiles its own.
    """
    job = consensus()
    if not _is_shared or job is None:
        yield
        return
    is_shared = all(job.exchange(f"a first run of {title}", b"." * is_new))
    jax.config.update("jax_share_binary_between_hosts", is_shared)
    try:
        yield
    finally:
        jax.config.update("jax_share_binary_between_hosts", False)
