"""A check that all workers run the same programs in the same order, at no cost per step."""

import itertools
import json
import zlib
from collections.abc import Sequence
from typing import Any, final

from distributary.devices import JobEvent, job_programs
from distributary.job._consensus import Consensus
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
