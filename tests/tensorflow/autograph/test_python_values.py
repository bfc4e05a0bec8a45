"""Flags, counters and parts that Python makes once, in branches of converted steps."""

from functools import partial

import numpy as np

from distributary.tensorflow.autograph._failures import check_handler
from distributary.tensorflow.autograph._reached import Reached


def test_methods_of_a_base_without_code():
    class Wrapped:
        """As a class of a library whose methods wrap a ufunc and a partial."""

        def __init__(self):
            self.value = 1.0

        def add(self): ...

        def half(self): ...

    Wrapped.add.__wrapped__, Wrapped.half.__wrapped__ = np.add, partial(np.multiply, 0.5)
    Wrapped.__module__ = "keras"

    class Mine(Wrapped): ...

    mine = Mine()
    Reached(lambda: mine)


def test_causes_of_an_error_that_form_a_circle():
    first, second = ValueError("first"), KeyError("second")
    first.__cause__, second.__cause__ = second, first

    check_handler(first)  # returns
