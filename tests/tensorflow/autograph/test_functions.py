"""Control flow over traced values computes what Python computes."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distributary as dist
from tests.tensorflow.autograph.against_python import assert_results_are_those_of_python

CASES = {}


def case(*inputs):
    """Notes a function, with tuples of arguments; Python itself is the reference."""

    def note(function):
        CASES.setdefault(repr(inputs), (inputs, []))[1].append(function)
        return function

    return note


NUMBERS = [(-3.0,), (0.0,), (0.5,), (4.0,)]
ROWS = [(np.array([1.0, -2.0, 3.0, 5.0], np.float32),), (np.array([4.0, 0.5], np.float32),)]
COUNTS = [(0,), (1,), (6,)]


@case(*NUMBERS)
def logic_with_python_values(x, flag=True, other=None):
    if flag and x > 0:
        x = x + 1
    if other is not None and x > other:
        x = x + 10
    if flag or x / 0 > 1:
        x = x + 100
    return x


@case(*NUMBERS)
def a_number_takes_the_dtype_of_the_loop(x):
    total = 0
    for _ in range(3):
        total = total + 0.5
    while x > 1:
        x = x - 1
        total += x
    return total


@case((2, 9, 3), (5, 1, -2), (0, 3, 1), (3, 0, 1))
def for_over_range_with_steps(start, stop, step):
    total = 0
    for i in range(start, stop, step):
        total = total * 2 + i
    return total


@case(*COUNTS)
def for_over_python_values(n):
    total = 0
    for i, (name, weight) in enumerate(zip("abc", [1, 2, 3], strict=True)):
        if n > i:
            total += weight * len(name)
    for key, value in {"x": 1, "y": 2}.items():
        if n > 3 and key == "y":
            total += value
    return total


@case(*NUMBERS)
def builtins_on_values(x):
    return (
        max(x, 1.0),
        min(x, 1.0, -1.0),
        abs(x),
        int(x),
        float(x),
        1 if any([x > 0, x < -1]) else 0,
        1 if all([x > 0, x < 1]) else 0,
        1 if bool(x > 0) else 0,
    )


@case(*NUMBERS)
def functions_that_are_called(x):
    def inner(y, *more, scale=2.0, **options):
        if y > 0:
            return y * scale + len(more) + len(options)
        return y

    return inner(x) + inner(x, 1, 2, scale=3.0, a=1) + _elsewhere(x)


def _elsewhere(x):
    while x > 1:
        x = x / 2
    return x


@case(*NUMBERS)
def recursion(x, depth=3):
    if depth == 0:
        return x
    if x > 0:
        x = x - 1
    return recursion(x, depth - 1)


@case(*NUMBERS)
def lambdas_and_partials(x):
    clipped = lambda y: y if y < 1 else 1.0
    scaled = functools.partial(_scaled, scale=3.0)
    return clipped(x), scaled(x)


def _scaled(x, scale):
    if x > 0:
        return x * scale
    return x


@case(*NUMBERS)
def comprehensions_and_generators(x):
    return sum(y * 2 for y in [x, 1.0]) + sum([y if y > 0 else 0.0 for y in (x, -x)])


def _doubled(function):
    @functools.wraps(function)
    def call(*args):
        return 2 * function(*args)

    return call


@_doubled
def _decorated(x):
    if x > 1:
        return x
    return 0.0 * x


@case(*NUMBERS)
def decorated_functions(x):
    return _decorated(x)


class _Base:
    def scale(self, x):
        return x * 2


class _Derived(_Base):
    bias = 1.0

    def scale(self, x):
        if x > 0:
            return super().scale(x) + self.bias
        return x

    def __call__(self, x):
        while x < 20:
            x = self.scale(x) + 5
        return x

    @staticmethod
    def clipped(x):
        return x if x < 1 else 1.0

    @property
    def half(self):
        return 0.5


@case(*NUMBERS)
def methods_and_objects(x):
    made = _Derived()
    return made(x), made.scale(x), made.clipped(x) * made.half


@case(*NUMBERS)
def objects_stay_objects(x, name="a", function=math.floor):
    label = name
    if x > 0:
        x = x + function(2.5)
    return x * (label == "a")


_MIXED = [(-3, 2, 5), (0, 0, 1), (7, -4, 2), (1, 9, 3), (12, 30, 7), (21, 4, 0), (11, 9, 2)]


@case(*_MIXED)
def every_way_out_of_loops_in_loops(a, b, n):
    for i in range(n % 4):
        a = (a + i) % 101
        if 0 < (b + i) % 7 < 3:
            continue
        j = 0
        while j < 4 and (a % 5 > 0 or b != n):
            j += 1
            for row in [1, 5, 2]:
                if row * j > n + a % 3:
                    break
                b = (b * row - a) % 101 if row != i else b + 1
                if b % 11 == 7:
                    return a, -b
            if (a + b) % 4 == 0 and j > 1:
                break
            a = (a * 2 + j) % 101
    return a, b


@case(*_MIXED)
def loops_in_branches_in_a_loop(a, b, n):
    for x in jnp.array([3, 1, 4]):
        if a > b and n > 1:
            if a % 2 == 0 or not b > 2:
                a = (a + x) % 101
            else:
                continue
        else:
            b = (a - b) // 3 % 101 if 0 < n < 5 else b + 2
            if b == x + 1:
                break
        while b < 40 and n != 1:
            b = b * 2 + x
            if b % 3 == 0:
                a -= b
                break
            if a + b > 75:
                return b, a
    else:
        a += 100
    return a, b


@case(*NUMBERS)
def items_whose_number_changes_after_them(x):
    values, numbers, k, key = [1, 2, 3], {"a": 1, "b": 2}, 0, "a"
    if x > 0:
        values[k] = 7
        k = 2
        numbers[key] = 5
        key = "a"
    return values[0] * 100 + values[2] * 10 + numbers["a"]


class _Doubled:
    def __init__(self):
        self._value = 1

    @property
    def value(self):
        return self._value

    @value.setter
    def value(self, value):
        self._value = 2 * value


@case(*NUMBERS)
def a_property_is_set_once(x):
    doubled = _Doubled()
    if x > 0:
        doubled.value = 3
    return doubled.value * 10


@case(*COUNTS)
def variables_that_only_a_lambda_reads(n):
    count = 1
    get = lambda: count
    for _ in range(n):
        count = count * 2
    if n > 3:
        count = count + 1
    return get()


@case(*NUMBERS)
def parameters_of_several_functions_with_one_name(x):
    shifted = (lambda t, *more, k=1: t + k)(x)
    total = sum(t * 0.5 for t in (x, shifted))
    if x > 0:
        y = (lambda t: t * 2)(shifted)
    else:
        y = (lambda i, t: (i, t + total))(0, x)[1]
    if y > 3:

        def halved(t):
            return t / 2

        y = halved(y) + sum(t for t in (x, y))
    while y < 10:
        y = (lambda t, x: t + 1 + x * 0)(y, y) + (lambda x: x * 0)(total)
    return y


@case(*NUMBERS)
def conditions_in_conditions(x):
    sign = 1 if x > 0 else (-1 if x < 0 else 0)
    return sign * (10 if (x if x > 0 else -x) > 3 else 20)


@case(*NUMBERS)
def annotated_variables(x):
    best: int = 0
    for i in range(3):
        if x > i:
            best: int = i
    return best


@case(*NUMBERS)
def loops_that_only_return_ends(x):
    def above(y, limit):
        turns = 0
        while True:
            for step in range(2):
                y = y + step
                if y > limit:
                    return y, turns
            turns += 1

    return above(x, 3), above(x, 6)[1] if x > 0 else -1


@pytest.mark.parametrize("inputs", CASES)
def test_results_are_those_of_python(inputs):
    values, functions = CASES[inputs]
    assert_results_are_those_of_python(functions, values)


def test_only_functions_that_need_it_are_converted():
    traces = []

    @dist.function
    def plain(x):
        traces.append(1)
        return x + 1

    @dist.function
    def flows(x):
        traces.append(1)
        return x if x > 0 else -x

    plain(1.0)
    assert len(traces) == 1
    assert float(flows(-2.0)) == 2.0
    assert len(traces) == 3  # as it is, then converted


def test_functions_in_functions_keep_their_own_option():
    @dist.function(autograph=False)
    def inner(x):
        return x if x > 0 else -x

    @dist.function(autograph=True)
    def converted(x):
        return x if x > 0 else -x

    @dist.function(autograph=True)
    def outer(x):
        return inner(x)

    @dist.autograph.do_not_convert
    def unconverted(x):
        return x if x > 0 else -x

    @dist.function
    def calls(x):
        return unconverted(x)

    with pytest.raises(dist.errors.TracedValueError, match="needs a value"):
        outer(1.0)
    with pytest.raises(dist.errors.TracedValueError, match=r"calls: `if`, .* at test_functions.py"):
        calls(1.0)
    assert float(dist.function(lambda x: converted(x), autograph=False)(-2.0)) == 2


def test_a_function_without_source_says_so():
    space = {}
    exec("def no_source(x):\n    return x if x > 0 else -x", space)

    with pytest.raises(dist.errors.TracedValueError) as caught:
        dist.function(space["no_source"])(1.0)

    assert any("AutoGraph has not converted no_source" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("turns", [0, 64, 65, 300])
def test_gradients_of_long_loops(turns):
    w = dist.Variable(1.01)

    @dist.function
    def gradients(x, n):
        with dist.GradientTape() as tape:
            tape.watch(x)
            y, i = x, 0
            while i < n:
                y = y * w + 0.01 * jnp.sin(y)
                i += 1
        return y, *tape.gradient(y, [w, x])

    def by_hand(w, x):
        return jax.lax.fori_loop(0, turns, lambda _, y: y * w + 0.01 * jnp.sin(y), x)

    expected = by_hand(1.01, 0.7), *jax.grad(by_hand, (0, 1))(1.01, 0.7)
    np.testing.assert_allclose(gradients(jnp.float32(0.7), jnp.int32(turns)), expected, rtol=1e-4)


def test_the_largest_number_of_turns():
    @dist.function
    def doubled(x):
        while x < 100:
            dist.autograph.set_loop_options(maximum_iterations=4)
            x = 2 * x
        return x

    assert float(doubled(1.0)) == 16
    assert float(doubled(40.0)) == 160


def test_steps_of_replicas(strategy):
    num_replicas = strategy.num_replicas_in_sync
    with strategy.scope():
        total = dist.Variable(0.0, aggregation=dist.VariableAggregation.SUM)
        largest = dist.Variable(-1.0, synchronization=dist.VariableSynchronization.ON_READ)
    batches = [np.arange(8, dtype=np.float32), np.arange(5, dtype=np.float32)]

    def step(xs):
        context = dist.get_replica_context()
        own = 0.0
        for x in xs:
            if x > 1:
                own += x
            if x > largest.value():
                largest.assign(x)
        if context.replica_id_in_sync_group == 0:
            own += 1000
        if context.all_reduce("SUM", own) > 1010:
            own = context.all_reduce("SUM", own)
        total.assign_add(own)
        return own

    dataset = dist.data.Dataset.from_generator(lambda: iter(batches))
    expected, running = [], 0.0
    for xs, values in zip(batches, strategy.experimental_distribute_dataset(dataset), strict=True):
        got = strategy.experimental_local_results(strategy.run(step, (values,)))
        parts = np.array_split(xs, num_replicas)
        owns = [part[part > 1].sum() + (1000 if i == 0 else 0) for i, part in enumerate(parts)]
        if sum(owns) > 1010:
            owns = [sum(owns)] * num_replicas
        running += sum(owns)
        np.testing.assert_allclose(got, owns)
        np.testing.assert_allclose(total.numpy(), running)
        expected.append(owns)
    assert max(float(v) for v in strategy.experimental_local_results(largest)) == 7


def test_print_shows_the_values(capfd):
    @dist.function
    def printed(x):
        if x > 0:
            print("x is", x, {"twice": 2 * x}, sep=":")
        return x

    printed(2.0)
    printed(-2.0)
    jax.effects_barrier()
    assert capfd.readouterr().out.split("\n")[0].startswith("x is:2.0:")


def test_elements_are_taken_once():
    iterator = iter(dist.data.Dataset.range(20))

    @dist.function
    def total(n):
        found = 0
        for _ in range(n):
            found += next(iterator)
        return found

    assert [int(total(n)) for n in (3, 2, 0, 4)] == [3, 7, 0, 26]


def test_a_loop_ends_where_its_iterator_does(strategy_of):
    strategy = strategy_of(2)
    batches = iter(strategy.experimental_distribute_dataset([np.ones(4, np.float32)] * 3))

    @dist.function
    def total():
        found = 0.0
        for _ in jnp.arange(2):
            element = batches.get_next_as_optional()
            if not element.has_value():
                break
            sums = strategy.run(jnp.sum, args=(element.get_value(),))
            found += strategy.reduce("SUM", sums, axis=None)
        return found

    assert [float(total()) for _ in range(3)] == [8, 4, 0]
