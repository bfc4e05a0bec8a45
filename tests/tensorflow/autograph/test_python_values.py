"""Flags, counters and parts that Python makes once, in branches of converted steps."""

import threading
from functools import partial

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import distributary as dist
from distributary.tensorflow.autograph._reached import Reached
from distributary.tensorflow.autograph._recorded import check_handler


class Late(keras.layers.Layer):
    """A layer that makes its parts at its first use."""

    def __init__(self):
        super().__init__()
        self.weight = self.part = self.table = self.factor = None
        self.parts, self.sizes = [], {}
        self.is_used, self.calls = False, 0

    def build(self, shape):
        self.weight = self.add_weight(shape=(shape[-1],), initializer="ones")
        self.part = keras.layers.Dense(shape[-1], kernel_initializer="identity")
        self.parts.append(keras.layers.Dense(shape[-1], kernel_initializer="identity"))
        self.factor = 0.5

    def call(self, x):
        if self.table is None:
            self.table = np.arange(2.0, dtype=np.float32)
            self.sizes["x"] = x.shape
        if not self.is_used:
            self.is_used = True
        self.calls += 1
        return self.parts[0](self.part(x)) * self.weight * self.factor + self.table


class Last(keras.metrics.Metric):
    """A metric that makes its variable at its first use."""

    def __init__(self):
        super().__init__()
        self.value = None

    def update_state(self, value):
        if self.value is None:
            self.value = self.add_variable((), "zeros", name="value")
        self.value.assign(value)

    def result(self):
        return self.value


def test_layers_and_metrics_make_their_parts_in_a_branch():
    layer, metric = Late(), Last()

    @dist.function(autograph=True)
    def step(x):
        if jnp.sum(x) > 0:
            y = layer(layer(x))
            metric.update_state(jnp.sum(x))
        else:
            y = layer(-x)
        return y

    def expected(x):
        once = lambda x: x * 0.5 + np.arange(2.0)
        return once(once(x)) if np.sum(x) > 0 else once(-x)

    for x in (np.array([[-1.0, -2.0]]), np.array([[1.0, 2.0]])):
        np.testing.assert_allclose(step(x), expected(x))
    assert float(metric.result()) == 3
    assert layer.is_used is True
    assert type(layer.calls) is int
    np.testing.assert_allclose(layer(x), x * 0.5 + np.arange(2.0))  # also without a step
    assert len(layer.weights) == 5


class Counted:
    calls = 0


def counted(x):
    counted.calls += 1
    Counted.calls += 1
    return x


def test_counters_of_classes_and_functions_stay_numbers():
    counted.calls = Counted.calls = 0

    @dist.function(autograph=True)
    def step(x):
        return counted(x) if x > 0 else 2 * x

    assert [float(step(x)) for x in (1.0, -1.0)] == [1, -2]
    assert (counted.calls, Counted.calls) == (1, 1)


class Scaled(keras.layers.Layer):
    """A layer with an attribute that is an array after one branch and a number after the other."""

    def __init__(self, sign):
        super().__init__()
        self.scale, self.sign = 0, sign

    def call(self, x):
        if self.sign * jnp.sum(x) > 0:
            self.scale = 2
        else:
            self.scale = jnp.max(x)
        return self.scale * jnp.sum(x)


@pytest.mark.parametrize("sign", [1, -1])
def test_an_attribute_is_an_array_after_one_branch_and_a_number_after_the_other(sign):
    layer = Scaled(sign)

    @dist.function(autograph=True)
    def step(x):
        result = layer.call(x)
        layer.scale = 0
        return result

    for x in (np.array([1.0, 3.0]), np.array([-1.0, -3.0])):
        scale = 2 if sign * np.sum(x) > 0 else np.max(x)
        assert float(step(x)) == scale * np.sum(x)


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
