"""Compiling: what other threads can do meanwhile, and what is said of it."""

import logging
import threading

import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir

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
