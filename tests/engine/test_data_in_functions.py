"""What compiled functions take from iterators over datasets: the next element in every call."""

import csv
import io
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distributary as dist
from distributary.data import Dataset
from distributary.errors import ContextError

_FOUR = np.array([5.0, 6.0, 7.0, 8.0], np.float32)


def test_an_iterator_gives_a_function_its_next_batch_in_every_call_and_then_ends(compilations):
    iterator = iter(Dataset.from_tensor_slices(_FOUR).batch(2))

    @dist.function
    def of_argument(iterator):
        return jnp.sum(next(iterator))

    assert [float(of_argument(iterator)), float(of_argument(iterator))] == [11, 15]
    for _ in range(2):
        with pytest.raises(StopIteration):
            of_argument(iterator)

    with compilations() as compiled:
        assert float(of_argument(iter(Dataset.from_tensor_slices(_FOUR).batch(2)))) == 11
    assert compiled == []


def test_captured_iterators_give_the_next_batch():
    iterators = {
        "closure": iter(Dataset.from_tensor_slices(_FOUR).batch(2)),
        "plain": Dataset.from_tensor_slices(_FOUR).batch(2).as_numpy_iterator(),
        "default": iter(
            dist.get_strategy().experimental_distribute_dataset(
                Dataset.from_tensor_slices(_FOUR).batch(2)
            )
        ),
    }
    for iterator in iterators.values():
        function = dist.function(lambda iterator=iterator: jnp.sum(iterator.get_next()))
        assert [float(function()), float(function())] == [11, 15]
        with pytest.raises(dist.errors.OutOfRangeError):
            function()


def test_an_iterator_given_twice_takes_turns_with_itself_and_batches_may_differ_in_shape():
    @dist.function
    def sums(one, other):
        first, second = next(one), next(other)
        return jnp.sum(first), jnp.sum(second), first.size + second.size

    iterator = iter(Dataset.from_tensor_slices(np.arange(11.0)).batch(3))
    assert [tuple(map(float, sums(iterator, iterator))) for _ in range(2)] == [
        (3, 12, 6),
        (21, 19, 5),
    ]
    difference = dist.function(lambda a, b: next(a)[0] - next(b)[0])
    one, other = (iter(Dataset.from_tensor_slices(_FOUR).batch(1)) for _ in range(2))

    assert difference(one, one) == -1  # 5, 6
    assert difference(one, other) == 2  # 7, 5
    assert difference(other, one) == -2  # 6, 8


def test_a_loop_over_a_dataset_is_a_new_pass_in_every_call():
    dataset = Dataset.from_tensor_slices(np.arange(6.0)).shuffle(6, seed=3).batch(4)
    expected = [np.concatenate(list(dataset)) for _ in range(4)]
    dataset = Dataset.from_tensor_slices(np.arange(6.0)).shuffle(6, seed=3).batch(4)

    @dist.function
    def of_argument(dataset):
        return jnp.concatenate(list(dataset))

    @dist.function
    def captured():
        return jnp.concatenate([2 * batch for batch in dataset.map(lambda x: x + 1)])

    orders = [of_argument(dataset), of_argument(dataset), of_argument(dataset)]
    mapped = [captured() for _ in range(3)]
    np.testing.assert_array_equal([*orders, np.concatenate(list(dataset))], expected)
    assert len({tuple(np.asarray(order)) for order in mapped}) == 3
    assert all(sorted(order) == [2, 4, 6, 8, 10, 12] for order in np.asarray(mapped).tolist())


def test_a_dataset_may_grow_between_calls():
    rows = [1.0, 2.0]
    dataset = Dataset.from_generator(lambda: iter(rows))
    total = dist.function(lambda dataset: sum(dataset, jnp.zeros(())))

    assert total(dataset) == 3
    rows.append(4.0)
    assert total(dataset) == 7
    rows.clear()
    assert total(dataset) == 0


def test_a_long_loop_runs_on_the_host_and_takes_every_element_once():
    dataset = Dataset.range(150).batch(1)
    iterator = iter(dataset)
    w = dist.Variable(0)
    step = dist.function(lambda x: w.assign_add(x[0]))

    @dist.function
    def epoch(batches):
        for batch in batches:
            step(batch)
        return w.read_value()

    assert epoch(dataset) == 11175
    assert epoch(iterator) == 2 * 11175
    assert epoch(iterator) == 2 * 11175
    assert epoch(dataset) == 3 * 11175


def test_an_endless_loop_beside_a_tape_is_refused():
    w = dist.Variable(1.0)

    @dist.function
    def train(iterator):
        for batch in iterator:
            with dist.GradientTape() as tape:
                loss = w * batch
            w.assign_sub(tape.gradient(loss, w))

    with pytest.raises(ValueError, match=r"more than 100 elements .* call the function for every"):
        train(iter(Dataset.from_tensors(1.0).repeat()))


def test_data_reaches_tapes_steps_and_variables_of_the_function():
    """Against NumPy: gradient descent on (w * x - y) ** 2, with the variable made while tracing."""
    xs, ys = np.float32([1, 2, 3, 4]), np.float32([2, 3, 5, 9])
    strategy = dist.OneDeviceStrategy("CPU:1")
    variables = []

    @dist.function
    def train(iterator):
        def step():
            x, y = next(iterator)  # in a step of one replica
            with dist.GradientTape() as tape:
                loss = jnp.sum((variables[0] * x - y) ** 2)
            assert tape.watched_variables() == (variables[0],)
            variables[0].assign_sub(0.01 * tape.gradient(loss, variables[0]))
            return loss

        if not variables:
            variables.append(dist.Variable(1.0))
        return strategy.run(step)

    w, losses, expected = 1.0, [], []
    with strategy.scope():
        iterator = iter(Dataset.from_tensor_slices((xs, ys)).batch(1).repeat(3))
        for i in range(12):
            losses.append(float(train(iterator)))
            x, y = xs[i % 4], ys[i % 4]
            expected.append((w * x - y) ** 2)
            w -= 0.01 * 2 * (w * x - y) * x

    np.testing.assert_allclose(losses, expected, rtol=1e-4)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_captured_distributed_iterators_give_the_next_batch(num_replicas, strategy_of):
    strategy = strategy_of(num_replicas)
    dataset = strategy.experimental_distribute_dataset(
        Dataset.from_tensor_slices(_FOUR).shuffle(4, seed=1).batch(3)
    )
    expected = [sum(np.sum(x) for x in strategy.experimental_local_results(v)) for v in dataset]
    dataset = strategy.experimental_distribute_dataset(
        Dataset.from_tensor_slices(_FOUR).shuffle(4, seed=1).batch(3)
    )
    iterator = iter(dataset)

    @dist.function
    def total():
        return strategy.reduce("SUM", strategy.run(jnp.sum, args=(next(iterator),)), axis=None)

    @dist.function
    def first_of_a_pass():
        return strategy.reduce("SUM", strategy.run(jnp.sum, args=(next(iter(dataset)),)), axis=None)

    assert [float(total()), float(total())] == expected
    with pytest.raises(StopIteration):
        total()
    assert len({float(first_of_a_pass()) for _ in range(8)}) > 1


def test_what_jax_would_keep_is_refused():
    iterator = iter(Dataset.from_tensor_slices(_FOUR))
    calls = {
        "jit": lambda: jax.jit(lambda: next(iterator))(),
        "scan": lambda: jax.lax.scan(lambda c, _: (c + next(iterator), None), 0.0, None, 3),
        "cond": lambda: jax.lax.cond(True, lambda: next(iterator), lambda: next(iterator)),
    }
    for call in calls.values():
        with pytest.raises(ContextError, match=r"keep one element forever\. Take the element"):
            dist.function(call)()
        with pytest.raises(ContextError, match="keep one element forever"):
            call()

    assert next(iterator) == 5


def test_a_step_does_not_take_from_an_iterator(strategy_of):
    iterator = iter(Dataset.from_tensor_slices(_FOUR))
    for strategy in (strategy_of(2), dist.get_strategy()):
        for _ in range(2):
            with pytest.raises(ValueError, match=r"run\(step, args=\(next\(iterator\),\)"):
                strategy.run(lambda: next(iterator))
        with pytest.raises(ValueError, match="Take the batch outside"):
            strategy_of(2).run(lambda it: next(it), args=(iterator,))
    distributed = strategy_of(2).experimental_distribute_dataset([_FOUR])
    with pytest.raises(ValueError, match="pass the batches to run"):
        strategy_of(2).run(lambda: next(iter(distributed)))

    assert next(iterator) == 5


def test_functions_of_a_dataset_compute_while_another_function_is_traced():
    inner = Dataset.from_tensor_slices(_FOUR)

    def rows():
        for x in inner:  # a loop of its own
            yield np.asarray(jax.jit(lambda x: x + 1)(jnp.asarray(x)))

    iterator = iter(Dataset.from_generator(rows).map(lambda x: np.asarray(jnp.sqrt(x * x))))

    taken = dist.function(lambda: next(iterator))

    assert [float(taken()) for _ in range(4)] == [6, 7, 8, 9]


def test_what_a_function_has_not_taken_stays():
    iterator = iter(Dataset.range(6))
    takes = [2]

    @dist.function
    def taken(x):
        return [next(iterator) for _ in range(takes[0])]

    assert taken(1.0) == [0, 1]
    with pytest.raises(ZeroDivisionError):
        dist.function(lambda: 1 / 0 + next(iterator))()
    takes[0] = 1
    assert taken(jnp.ones(2)) == [2]
    assert iterator.get_state()["position"] == 3
    assert next(iterator) == 3


def test_a_function_that_makes_a_dataset_runs_on_the_host(strategy):
    @dist.function
    def made():
        return strategy.experimental_distribute_dataset(Dataset.from_tensor_slices(_FOUR).batch(4))

    for _ in range(2):
        (batch,) = made()
        np.testing.assert_array_equal(batch.values, [[5, 6], [7, 8]])


def test_strings_of_a_dataset_are_refused():
    iterator = iter(Dataset.from_tensor_slices(np.array(["a", "b"])))

    with pytest.raises(TypeError, match=r"holds np.str_\('a'\) .*pass its arrays"):
        dist.function(lambda: next(iterator))()


def _generator():
    yield from range(100)


_FOREIGN = {
    "generator": _generator,
    "list": lambda: iter([1.0, 2.0]),
    "cycle": lambda: itertools.cycle([1.0, 2.0]),
    "csv": lambda: csv.reader(io.StringIO("1,2\n3,4\n")),
}


# JAX warns of some of them among arguments, whose elements it may flatten some day.
@pytest.mark.filterwarnings("ignore:Python iterable type:DeprecationWarning")
@pytest.mark.parametrize("make", _FOREIGN.values(), ids=_FOREIGN)
def test_iterators_of_python_as_arguments_are_refused(make):
    def step(it):
        return jnp.zeros(()) + next(it)

    for call in (dist.function(step), lambda it: dist.get_strategy().run(step, args=(it,))):
        with pytest.raises(TypeError, match=r"`it` is a Python iterator .*Pass next\(iterator\)"):
            call(make())


def test_iterators_that_a_trace_makes_are_fine():
    names = ["a", "b"]

    @dist.function
    def total(x):
        sums = [x * i for i, _ in enumerate(names)]
        sums += [x + y for x, y in zip([x], [x], strict=True)]
        return sum(sums) + next(iter(map(jnp.square, [x])))

    assert total(2.0) == 2 + 4 + 4


def test_iterators_that_an_object_holds_are_taken_from():
    class Doubled:
        def start(self):
            self.rows = iter(Dataset.from_tensor_slices(_FOUR))

        def __next__(self):
            return 2 * next(self.rows)

        @dist.function
        def step(self):
            return next(self.rows)

    doubled = Doubled()
    function = dist.function(lambda it: next(it))
    for _ in range(2):  # the second iterator takes the place of the first, which is gone
        doubled.start()
        assert [float(doubled.step()) for _ in range(2)] == [5, 6]
        assert [float(function(doubled)) for _ in range(2)] == [14, 16]
