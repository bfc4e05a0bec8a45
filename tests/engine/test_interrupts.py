"""Ctrl-C in a custom loop: variables have what the last step that was begun made of them."""

import random
import signal
import threading

import keras
import numpy as np
import pytest

import distributary as dist

NUM_INTERRUPTS = 25


def _interrupt_after(seconds):
    main = threading.main_thread().ident
    threading.Timer(seconds, signal.pthread_kill, (main, signal.SIGINT)).start()


@pytest.mark.parametrize(
    ("kind", "num_replicas"),
    [("list", 1), ("one by one", 2), ("keras", 2), ("function", 2), ("central", 2)],
)
def test_after_ctrl_c_all_variables_are_those_of_one_step(strategy_of, kind, num_replicas):
    strategy = (
        dist.CentralStorageStrategy(["CPU:0", "CPU:1"])
        if kind == "central"
        else strategy_of(num_replicas)
    )
    create = keras.Variable if kind == "keras" else dist.Variable
    with strategy.scope():
        variables = [create(np.zeros(3, np.float32)) for _ in range(5)]

    def step():
        for variable in variables:
            variable.assign(variable + 1.0)

    def run():
        if kind == "one by one":
            variables[2].value()  # the program copies what somebody holds
        strategy.run(step)

    call = dist.function(run) if kind == "function" else run
    for _ in range(4):  # compiles
        call()
    rng = random.Random(0)
    num_finished = 4
    for num_interrupts in range(1, NUM_INTERRUPTS + 1):
        with pytest.raises(KeyboardInterrupt):
            _interrupt_after(rng.uniform(0, 0.004))
            while True:
                call()
                num_finished += 1

        values = {float(variable.numpy()[i]) for variable in variables for i in range(3)}
        assert len(values) == 1
        # An interrupted call counts if its step was begun.
        assert num_finished <= values.pop() <= num_finished + num_interrupts
    call()
