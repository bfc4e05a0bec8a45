"""Compiling: what other threads can do meanwhile, and what is said of it."""

import logging
import threading

import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir

import distributary as dist

_TIMEOUT_SECONDS = 20


def test_steps_of_other_threads_go_on_while_one_compiles(strategy, variable):
    compiles, others_have_run = threading.Event(), threading.Event()

    def lower(context, value):
        compiles.set()
        assert others_have_run.wait(_TIMEOUT_SECONDS)
        return [value]

    slow_p = Primitive("slow_to_compile")
    slow_p.def_abstract_eval(lambda aval: aval)
    mlir.register_lowering(slow_p, lower)
    slow, fast = variable(0.0), variable(0.0)

    def slow_step():
        slow.assign_add(slow_p.bind(jnp.float32(1.0)))

    def fast_step():
        fast.assign_add(1.0)

    strategy.run(fast_step)
    thread = threading.Thread(target=strategy.run, args=(slow_step,))
    thread.start()
    assert compiles.wait(_TIMEOUT_SECONDS)
    for _ in range(3):
        strategy.run(fast_step)
    others_have_run.set()
    thread.join()

    assert float(fast.value()) == 4.0
    assert float(slow.value()) == 1.0


def test_a_step_that_compiles_for_long_is_said_once(strategy, monkeypatch, caplog):
    monkeypatch.setattr("distributary.devices._progress._PATIENCE_SECONDS", 0.0)
    said, log = threading.Event(), logging.getLogger("distributary.devices._progress")
    log.addFilter(show := lambda record: said.set() or True)

    def step():
        assert said.wait(60)  # while it is traced
        return jnp.float32(1)

    try:
        for _ in range(3):
            strategy.run(step)
    finally:
        log.removeFilter(show)

    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("Compiling a step for more than 0 s. This comes once for each shape")


class _Drawn:
    """A function that makes its variables when it is first called."""

    v = None

    def __init__(self, num_steps=None):
        self.steps = num_steps

    @dist.function
    def __call__(self, x):
        if self.v is None:
            self.counts = None if self.steps is None else dist.Variable(self.steps)
            self.v = dist.Variable(jnp.cumsum(x) * 2, name="v")
            self.w = dist.Variable(jnp.sum(x))
        return self.v.assign_add(x) * self.w


def test_a_function_creates_variables_with_values_that_it_computes():
    ones, sevens = jnp.ones(2), jnp.full(2, 7.0)
    drawn, other = _Drawn(), _Drawn()

    results = [drawn(ones), drawn(ones), drawn(sevens), other(sevens)]

    np.testing.assert_array_equal(results, [[6, 10], [8, 12], [22, 26], [294, 490]])
    np.testing.assert_array_equal(drawn.v, [11, 13])
    assert type(drawn).__call__.num_traces > 0


def test_a_function_that_computes_a_new_variable_in_every_call_is_refused():
    function = dist.function(lambda x: dist.Variable(x * 2, name="new") + 1)

    assert float(function(jnp.float32(3))) == 7
    with pytest.raises(ValueError, match="'new': initial_value is computed by the traced function"):
        function(jnp.float32(3))
    with pytest.raises(ValueError, match="'v': initial_value is computed by the traced function"):
        _Drawn(num_steps=0)(jnp.ones(2))  # a trace that has created another variable is not left
