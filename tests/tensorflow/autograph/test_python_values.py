"""Flags, counters and parts that Python makes once, in branches of converted steps."""

from distributary.tensorflow.autograph._failures import check_handler


def test_causes_of_an_error_that_form_a_circle():
    first, second = ValueError("first"), KeyError("second")
    first.__cause__, second.__cause__ = second, first

    check_handler(first)  # returns
