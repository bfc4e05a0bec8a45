"""Turns: one worker acts alone, and the others do with it what it cannot do alone."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

from distributary.devices import job_programs
from distributary.errors import InvalidValueError
from distributary.job._consensus import Consensus, consensus

_END = "end"


@final
@dataclass(frozen=True)
class Turn:
    """What one worker does; in the end, its turn is over for all.

    Args:
        job: The consensus of the workers.
        place: Name of what the worker does, for people.
    """

    job: Consensus
    place: str

    def say(self, what: str, detail: object) -> None:
        """Tells the others what this worker does next, or how its turn has ended."""
        self.job.exchange(self.place, json.dumps([what, detail]).encode())

    def follow(self, worker: int, take_part: Callable[[str, Any], None]) -> Any:
        """Does what a worker says until its turn ends; returns its error as texts, or None."""
        while True:
            what, detail = json.loads(self.job.exchange(self.place, b"")[worker])
            if what == _END:
                return detail
            take_part(what, detail)


def in_turn(
    worker: int, place: str, act: Callable[[Turn], None], take_part: Callable[[str, Any], None]
) -> Exception | None:
    """Runs `act` on one worker, and `take_part` on the others, for everything that it says.

    All workers call this.

    Args:
        worker: Number of the worker.
        place: Name of what the worker does, for people.
        act: Gets the turn.
        take_part: Gets what the worker has said: a word, and a detail that JSON can hold.

    Returns:
        On the other workers, an error if `act` has raised one: an `OSError` for an `OSError`, and
        an `InvalidValueError` for others.
    """
    job = consensus()
    assert job is not None
    turn = Turn(job, place)
    with job_programs.alone():
        if job.number != worker:
            problem = turn.follow(worker, take_part)
            if problem is None:
                return None
            is_of_files, text = problem
            return OSError(text) if is_of_files else InvalidValueError(text)
        ended = None
        try:
            act(turn)
        except BaseException as raised:
            ended = [isinstance(raised, OSError), f"{type(raised).__name__}: {raised}"]
            raise
        finally:
            turn.say(_END, ended)
    return None
