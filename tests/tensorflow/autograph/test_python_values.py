"""Flags, counters and parts that Python makes once, in branches of converted steps."""

import threading
from functools import partial

import numpy as np
import pytest

import distributary as dist
from distributary.tensorflow.autograph._failures import check_handler
from distributary.tensorflow.autograph._reached import Reached


def test_other_threads_write_to_an_array_while_a_branch_is_traced():
    array, errors = np.zeros(3), []

    def write():
        try:
            array[0] = 1
            array[0] = 0
        except ValueError as error:
            errors.append(error)

    def read():
        thread = threading.Thread(target=write)
        thread.start()
        thread.join()
        return array[0]

    assert float(dist.function(lambda x: x + read() if x > 0 else x, autograph=True)(1.0)) == 1
    assert errors == []


def test_an_array_that_changes_before_a_branch_raises_is_refused():
    array = np.zeros(3)

    @dist.function(autograph=True)
    def step(x):
        if x > 0:
            array[0] = 1
            raise ValueError("no")
        return x

    with pytest.raises(dist.errors.UnsupportedError, match="in place, `array`, or another thread"):
        step(-1.0)


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
