"""Checks of what the user wrote, with errors that say where it is."""

from collections.abc import Mapping, Sequence

from distributary.errors import InvalidTypeError, check_type, checked_int, shown


def checked_counts(counts: Mapping[str, int], field: str, expected: str) -> dict[str, int]:
    """Returns a dict from names to numbers, after checking it.

    Raises:
        InvalidTypeError: if it is not a dict to ints.
        InvalidValueError: if a number is negative.
    """
    check_type(field, counts, Mapping, f"a dict {expected}")
    return {
        name: checked_int(f'{field}["{name}"]', count, minimum=0) for name, count in counts.items()
    }


def checked_strs(value: Sequence[str], field: str, expected: str) -> list[str]:
    """Returns a list of strings, after checking it.

    Raises:
        InvalidTypeError: if it is not a list or tuple of strings, or is empty.
    """
    is_list = isinstance(value, (list, tuple)) and len(value) > 0
    if not is_list or not all(isinstance(item, str) for item in value):
        raise InvalidTypeError(f"{field} is {shown(value)}, expected {expected}.")
    return list(value)


def checked_task_id(task_id: object, field: str) -> int:
    """Returns the number of a task from an int, or from a string of digits as in TensorFlow.

    Raises:
        InvalidTypeError: if it is neither.
        InvalidValueError: if it is negative.
    """
    number = number_in(task_id)
    if number is not None:
        return number
    return checked_int(field, task_id, "the number of a task; they count from 0", minimum=0)


def number_in(text: object) -> int | None:
    """Returns the number that a string of ASCII digits stands for; None for anything else."""
    return int(text) if isinstance(text, str) and text.isascii() and text.isdecimal() else None
