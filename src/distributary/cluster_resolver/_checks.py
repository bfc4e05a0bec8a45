"""Checks of what the user wrote, with errors that say where it is."""

from collections.abc import Mapping

from distributary.errors import InvalidTypeError, InvalidValueError


def wrong_type(value: object, field: str, expected: str) -> InvalidTypeError:
    """Returns the error for a value of the wrong type.

    Args:
        value: The value.
        field: Where the user wrote it, for messages: `'TF_CONFIG["cluster"]["worker"][1]'`. The
            other functions take it, too.
        expected: Description of a right value.
    """
    return InvalidTypeError(f"{field} is {value!r} ({type(value).__name__}), expected {expected}.")


def checked_str(value: object, field: str, expected: str = "a string") -> str:
    """Returns a string, after checking that it is one.

    Raises:
        InvalidTypeError: if it is not a string.
    """
    if not isinstance(value, str):
        raise wrong_type(value, field, expected)
    return value


def checked_name(value: object, field: str, expected: str = "a name") -> str:
    """Returns a string, after checking that it is one and not empty.

    Raises:
        InvalidTypeError: if it is not a string, or is empty.
    """
    if not isinstance(value, str) or not value:
        raise wrong_type(value, field, expected)
    return value


def checked_int(
    value: object, field: str, expected: str = "", *, minimum: int, maximum: int | None = None
) -> int:
    """Returns a number, after checking it.

    Raises:
        InvalidTypeError: if it is not an int.
        InvalidValueError: if it is less than `minimum` or more than `maximum`.
    """
    expected = expected or f"a number >= {minimum}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong_type(value, field, expected)
    if value < minimum or (maximum is not None and value > maximum):
        raise InvalidValueError(f"{field} is {value}, expected {expected}.")
    return value


def checked_counts(counts: object, field: str, expected: str, *, minimum: int) -> dict[str, int]:
    """Returns a dict from names to numbers, after checking it.

    Raises:
        InvalidTypeError: if it is not a dict from names to ints, or is empty.
        InvalidValueError: if a number is less than `minimum`.
    """
    if not isinstance(counts, Mapping) or not counts:
        raise wrong_type(counts, field, f"a dict, not empty, {expected}")
    return {
        checked_name(name, f"{field} has a key that"): checked_int(
            count, f'{field}["{name}"]', minimum=minimum
        )
        for name, count in counts.items()
    }


def checked_task_id(task_id: object, field: str) -> int:
    """Returns the number of a task from an int, or from a string of digits as in TensorFlow.

    Raises:
        InvalidTypeError: if it is neither.
        InvalidValueError: if it is negative.
    """
    number = number_in(task_id)
    if number is not None:
        return number
    return checked_int(task_id, field, "the number of a task; they count from 0", minimum=0)


def number_in(text: object) -> int | None:
    """Returns the number that a string of ASCII digits stands for; None for anything else."""
    return int(text) if isinstance(text, str) and text.isascii() and text.isdecimal() else None
