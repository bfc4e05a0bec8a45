"""Variables whose arrays programs take and leave together, as if each were asked."""

import copy
import gc
import random
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distributary as dist

SIZE = 3


def _variables(strategy, num):
    with strategy.scope():
        return [dist.Variable(np.full(SIZE, i, np.float32), name=f"v{i}") for i in range(num)]


def _adds_to(variables, numbers, amount):
    def step():
        for number in numbers:
            variables[number].assign_add(jnp.full(SIZE, amount * (number + 1)))

    return step


def _are_together(variables):
    states = variables[0]._slot[0]
    return all(v._slot == (states, i) for i, v in enumerate(variables))


@pytest.mark.parametrize(("kind", "seed"), [("one", 0), ("two", 1), ("central", 2)])
def test_programs_that_write_the_same_variables_in_turns_equal_numpy(strategy_of, kind, seed):
    strategy = (
        dist.CentralStorageStrategy(["CPU:0", "CPU:1"])
        if kind == "central"
        else strategy_of(1 if kind == "one" else 2)
    )
    variables = _variables(strategy, 6)
    expected = [np.full(SIZE, i, np.float32) for i in range(6)]
    writes = [(0, 1, 2, 3, 4, 5), (5, 3), (2, 0, 4), (1,)]
    steps = [_adds_to(variables, numbers, 10.0**i) for i, numbers in enumerate(writes)]
    rng = random.Random(seed)
    held = []
    together = 0
    for _ in range(150):
        number = rng.randrange(6)
        v = variables[number]
        action = rng.choice(["run", "run", "run", "read", "assign", "add", "scatter", "copy"])
        if action == "run":
            k = rng.choice([0, 0, 0, 1, 2, 3])
            for _ in range(rng.randrange(1, 6)):
                strategy.run(steps[k])
                for i in writes[k]:
                    expected[i] = expected[i] + np.float32(10.0**k * (i + 1))
            together += _are_together([variables[i] for i in writes[k]])
        elif action == "read":
            held.append((v.value(), expected[number]))
        elif action == "assign":
            expected[number] = rng.randrange(9) * np.ones(SIZE, np.float32)
            v.assign(expected[number])
        elif action == "add":
            expected[number] = expected[number] + np.float32(1)
            v.assign_add(np.ones(SIZE, np.float32))
        elif action == "scatter":
            expected[number] = expected[number] + np.float32([0, 5, 0])
            v.scatter_add(dist.IndexedSlices(np.float32([5]), np.array([1])))
        else:
            held.append((copy.deepcopy(v), expected[number]))
        for variable, value in zip(variables, expected, strict=True):
            np.testing.assert_array_equal(variable.numpy(), value)

    assert together > 10
    for value, as_it_was in held:
        np.testing.assert_array_equal(np.asarray(value), as_it_was)


def test_a_collected_variable_frees_its_array_and_the_others_go_on(strategy):
    kept, dropped = _variables(strategy, 2)
    model = [kept, dropped]

    def step():
        for v in model:
            v.assign_add(jnp.ones(SIZE))

    for _ in range(4):
        strategy.run(step)
    assert _are_together(model)
    num_before = len(jax.live_arrays())
    del dropped, model[1]
    gc.collect()

    assert len(jax.live_arrays()) == num_before - 1
    for _ in range(4):
        strategy.run(step)
    np.testing.assert_array_equal(kept.numpy(), np.full(SIZE, 8.0))
    assert _are_together([kept])


@pytest.mark.parametrize("kind", ["value", "numpy", "values", "on read", "first of on read"])
def test_values_read_while_another_thread_runs_steps_are_of_one_step(strategy, variable, kind):
    options = {}
    if "on read" in kind:
        aggregation = "ONLY_FIRST_REPLICA" if "first" in kind else "MEAN"
        options = {
            "synchronization": dist.VariableSynchronization.ON_READ,
            "aggregation": dist.VariableAggregation[aggregation],
        }
    v = variable(np.zeros(SIZE, np.float32), **options)
    read = {"numpy": v.numpy, "values": lambda: np.asarray(v.values[1])}.get(
        kind, lambda: np.asarray(v.value())
    )
    other = _variables(strategy, 2)
    steps = [_adds_to([v, *other], numbers, 1.0) for numbers in ((0, 1, 2), (2, 0))]
    seen, failures = [], []
    is_over = threading.Event()

    def read_on():
        try:
            while not is_over.is_set():
                seen.append(read())
        except RuntimeError as error:
            failures.append(error)

    reader = threading.Thread(target=read_on)
    reader.start()
    for k in (0, 0, 0, 1, 1, 1, 1, 0) * 40:
        strategy.run(steps[k])
    is_over.set()
    reader.join()

    assert not failures
    assert len(seen) > 1
    assert all(len(set(rows)) == 1 for rows in seen)
    assert [rows[0] for rows in seen] == sorted(rows[0] for rows in seen)
    np.testing.assert_array_equal(v.numpy(), np.full(SIZE, 320.0))
