"""What a strategy counts about its steps."""

import jax.numpy as jnp
import keras
import numpy as np

import distributary as dist
from distributary.devices import Loop, StepCounts, latest_program

_FEATURES = 4


def _dataset(num_batches, rows=8):
    x = np.ones((num_batches * rows, _FEATURES), np.float32)
    return dist.data.Dataset.from_tensor_slices(x).batch(rows)


def _trainer(strategy):
    """A step that sends four floats, and one that is part of no collective."""
    with strategy.scope():
        weights = dist.Variable(np.zeros(_FEATURES, np.float32))

    def step(x):
        total = dist.get_replica_context().all_reduce("SUM", x.sum(axis=0))
        weights.assign_add(total)
        return x.sum()

    return step


def test_a_loop_counts_examples_host_compute_and_collectives(strategy_of, compilations):
    strategy = strategy_of(2)
    step = _trainer(strategy)

    for batch in strategy.experimental_distribute_dataset(_dataset(30)):
        strategy.run(step, (batch,))

    with compilations() as compiled:
        found = strategy.step_statistics
        assert found.collective_bytes == 30 * _FEATURES * 4
    assert compiled == []
    assert found.num_steps == 28  # the first one compiles, the last one has no end
    assert found.num_examples == 30 * 8
    assert (found.num_runs, found.num_retraces) == (30, 0)
    assert 0 < found.host_seconds < found.seconds
    assert 0 < found.compute_seconds <= found.seconds - found.input_wait_seconds


class _Program:
    def collective_bytes(self):
        return 16


def test_programs_that_have_gone_still_count_and_are_not_kept():
    counts = StepCounts()

    for number in range(1, 100):
        program = _Program()
        counts.runs_of(program).num_runs += 1
        found = counts.snapshot()
        assert (found.collective_bytes, found.num_runs) == (16 * number, number)
    del program

    assert len(counts._programs) < 20


def test_programs_whose_variables_have_gone_send_an_unknown_number_of_bytes(strategy_of):
    strategy, held = strategy_of(2), []
    with strategy.scope():
        held.append(dist.Variable(np.zeros(_FEATURES, np.float32)))

    def step(x):
        held[0].assign_add(dist.get_replica_context().all_reduce("SUM", x.sum(axis=0)))

    strategy.run(step, (np.ones((2, _FEATURES), np.float32),))
    held.clear()

    found = strategy.step_statistics
    assert (found.collective_bytes, found.num_runs) == (0, 1)


def test_traces_for_other_arguments_count_as_retraces(strategy_of):
    strategy = strategy_of(2)
    step = _trainer(strategy)

    for rows in (1, 2, 1, 3):
        strategy.run(step, (np.ones((rows, _FEATURES), np.float32),))

    found = strategy.step_statistics
    assert (found.num_retraces, found.num_runs, found.num_steps) == (2, 4, 0)


def test_steps_of_fit_count(strategy_of):
    strategy = strategy_of(2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((_FEATURES,)), keras.layers.Dense(3, use_bias=False)])
        model.compile("sgd", "mse")
    x, y = np.ones((40, _FEATURES), np.float32), np.ones((40, 3), np.float32)

    model.fit(x, y, batch_size=8, epochs=2, verbose=0)
    of_arrays = strategy.step_statistics
    model.fit(_dataset(5).map(lambda x: (x, np.ones((8, 3), np.float32))), verbose=0)
    found = strategy.step_statistics

    assert of_arrays.num_steps == 2 * 3
    assert of_arrays.num_examples == 2 * 40
    # Gradients of 4 x 3 weights, and what metrics and logs add up.
    assert of_arrays.collective_bytes >= 10 * _FEATURES * 3 * 4
    assert found.num_steps == of_arrays.num_steps + 3
    assert found.num_examples == 120
    assert 0 < found.compute_seconds <= found.seconds


def test_a_forgotten_timer_stops_soon():
    counts = StepCounts()
    loop = Loop(counts)
    for _ in range(2):  # the second step is the first sample
        loop.batch_is_there()
        latest_program.end(None, None)
    assert latest_program.timer is not None

    for _ in range(40):  # the loop was left; programs without one follow
        if latest_program.timer is not None:
            latest_program.begin()
        latest_program.end(jnp.ones(()), None)

    assert latest_program.timer is None
