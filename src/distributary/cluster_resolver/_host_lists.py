"""Expands Slurm's short notations for lists of hosts and of numbers."""

import re

from distributary.errors import InvalidValueError

__all__ = ["expand_hosts", "expand_tasks_per_node"]

_MAX_HOSTS = 1_000_000  # a range such as [1-99999999999] is a typo

_COMMA_BETWEEN_HOSTS = re.compile(r",(?![^\[]*\])")  # unlike those in brackets
_PART = re.compile(r"(?:[^\[\],\s]|\[[^\[\]\s]+\])+")
_PIECE = re.compile(r"\[([^\]]+)\]|([^\[\]]+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)
_REPEATED = re.compile(r"(\d+)(?:\(x(\d+)\))?", re.ASCII)


def expand_hosts(text: str, field: str) -> list[str]:
    """Returns the hosts of a list such as `"node[001-003,7],gpu-a"`, in its order.

    Numbers keep their leading zeros. A name may contain several ranges, and text after them.

    Args:
        text: The list.
        field: Where it comes from, for messages.

    Raises:
        InvalidValueError: if it cannot be parsed.

    Source: Slurm's host list expressions, as `scontrol show hostnames` prints them.
    """
    hosts: list[str] = []
    for part in _COMMA_BETWEEN_HOSTS.split(text):
        if not _PART.fullmatch(part):
            raise _no_host_list(text, field, f"{part!r} is not a host or a range of hosts")
        names = [""]
        for ranges, literal in _PIECE.findall(part):
            ends = _numbers(ranges, text, field) if ranges else [literal]
            if len(names) * len(ends) > _MAX_HOSTS:
                raise _no_host_list(text, field, f"it stands for more than {_MAX_HOSTS} hosts")
            names = [name + end for name in names for end in ends]
        hosts += names
    return hosts


def expand_tasks_per_node(text: str, field: str) -> list[int]:
    """Returns the numbers of a list such as `"4(x2),3"`, here 4, 4, 3.

    Args:
        text: The list.
        field: Where it comes from, for messages.

    Raises:
        InvalidValueError: if it cannot be parsed.

    Source: `SLURM_TASKS_PER_NODE` in the manual of `srun`.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _REPEATED.fullmatch(part)
        repetitions = int(match[2] or 1) if match else 0
        if match is None or repetitions > _MAX_HOSTS:
            raise InvalidValueError(
                f"{field} is {text!r}: {part!r} is not a number of tasks. Expected numbers"
                " separated by commas, repeated ones as 4(x2), such as '4(x2),3'."
            )
        counts += [int(match[1])] * repetitions
    return counts


def _numbers(ranges: str, text: str, field: str) -> list[str]:
    numbers: list[str] = []
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise _no_host_list(text, field, f"{part!r} is neither a number nor a range of numbers")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise _no_host_list(text, field, f"the range {part!r} runs backwards")
        if int(last) - int(first) >= _MAX_HOSTS:
            raise _no_host_list(text, field, f"it stands for more than {_MAX_HOSTS} hosts")
        width = len(first)
        numbers += [str(number).zfill(width) for number in range(int(first), int(last) + 1)]
    return numbers


def _no_host_list(text: str, field: str, reason: str) -> InvalidValueError:
    return InvalidValueError(
        f"{field} is {text!r}: {reason}. Expected host names separated by commas, with ranges"
        " of numbers in brackets, such as 'node[001-003,7],gpu-a'."
    )
