"""Statements that change lists, dicts, objects and outer names, and syntax of all kinds.

Python itself is the reference. All functions of one kind of argument are one compiled program.
"""

import abc
import collections
import contextlib
import types

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import distributary as dist
from tests.tensorflow.autograph.against_python import assert_results_are_those_of_python

FUNCTIONS = {"numbers": [], "rows": [], "counts": []}
INPUTS = {
    "numbers": [-3.0, 0.0, 0.5, 4.0],
    "rows": [np.float32([1, -2, 3, 5]), np.float32([4, 0.5])],
    "counts": [0, 1, 6],
}
numbers, rows, counts = (
    lambda function, of_kind=of_kind: of_kind.append(function) or function
    for of_kind in FUNCTIONS.values()
)
calls = 0


class Record:
    """An object that functions change."""

    def __init__(self, value=0.0):
        self.value = value
        self.seen = []

    def add(self, x):
        self.value = self.value + x

    def note(self, x):
        self.seen.append(x)
        self.value += x


class Slots:
    __slots__ = ("value",)


@numbers
def new_key_in_both_branches(x):
    found = {}
    if x > 0:
        found["k"] = x
    else:
        found["k"] = 2 * x
    return found


@numbers
def another_name_for_a_list(x):
    found = [1.0]
    other = found
    if x > 0:
        other[0] = x
    return found[0]


@numbers
def append_to_an_argument(x):
    def note(target):
        if x > 0:
            target.append(x)
        else:
            target.append(-x)

    found = []
    note(found)
    return found


@numbers
def a_list_that_is_not_used_after_a_return(x):
    found = []
    if x > 1:
        return x
    found.append(x)
    found.append(2 * x)
    return sum(found) + jnp.stack(found)[0]


@numbers
def a_name_of_the_module(x):
    global calls
    calls = 0

    def add():
        global calls
        calls = calls + 1

    if x > 0:
        add()
    found, calls = calls, 0
    return found


@numbers
def an_attribute_in_slots(x):
    record = Slots()
    record.value = 1.0

    def change():
        record.value = record.value + x

    if x > 0:
        change()
    return record.value


class Counted(abc.ABC):
    total = 0.0

    def __init__(self):
        self.value = 0.0

    @abc.abstractmethod
    def read(self): ...


class Read(Counted):
    def read(self):
        return self.value


class Named(list):
    """A list with attributes."""


def count(x):
    count.calls = count.calls + 1
    return x


@numbers
def attributes_of_classes_functions_and_structures(x):
    Counted.total = count.calls = 0.0
    made, names, space = Read(), Named([1]), types.SimpleNamespace(value=0.0)
    names.value, order = 0.0, collections.OrderedDict(a=1.0, b=2.0)
    if x > 0:
        Counted.total += 1
        made.value = names.value = space.value = x
        count(x)
        order["a"] = 3.0
    total, Counted.total = Counted.total, 0.0
    return total, made.read(), names.value, space.value, count.calls, order["a"], len(order)


@numbers
def a_list_of_two_that_is_only_read(x):
    a, b = [x], [2 * x]
    chosen = a if x > 0 else b
    return sum(chosen), a, b


@numbers
def a_list_that_is_another_after_a_branch(x):
    found = [1.0]
    sums = [v + x for v in range(2)]
    if x > 0:
        found = [x]
        sums = [v * 2 for v in sums]
    found.append(2.0)
    sums[0] = 5.0
    return found, sums


@counts
def functions_that_assign_outer_names(n):
    count = 0
    while count < n:

        def add(number):
            nonlocal count
            count = count + number

        add(2)
    if n > 0:

        def double():
            nonlocal count
            count = 2 * count

        double()
    return count


@numbers
def match_of_values(x, mode="double"):
    match mode:
        case "half":
            y = x / 2
        case "double" | "twice":
            y = x * 2 if x > 0 else x
        case _:
            y = x
    return y


@numbers
def match_of_cases(x):
    match x:
        case 0:
            y = 10
        case 4.0 | 0.5:
            y = 20
        case _ if x < -2:
            y = 30
        case rest:
            y = rest
    return y


@numbers
def membership(x):
    return (1 if x in (0.5, 4.0) else 2), (1 if x not in [0.5] else 2), 3 in [1, 2, 3]


@numbers
def try_with_else_and_finally(x):
    try:
        y = x if x > 0 else -x
    except ValueError:
        y = 0.0
    else:
        y = y + 1
    finally:
        y = y * 2
    return y


@numbers
def try_with_conditions_in_else(x):
    y = steps = 0
    for i in range(4):
        try:
            y = y + (x if i < 3 else [x][i])
        except IndexError:
            y = y * 2
        else:
            if x > 1:
                break
            y = y + i
        finally:
            steps = steps + 1
    try:
        y = y + 1
    except ValueError:
        y = 0
    else:
        if x > 0:
            return y, steps
    return y + 1, steps


@numbers
def try_with_names_of_errors(x):
    y = x
    try:
        for i in range(2):
            y = y + i if x > 0 else y - i
        raise RuntimeError("expected")
    except ValueError as error:
        y = error
    except Exception as error:
        y = y * len(str(error)) if x > 1 else y
        try:
            raise KeyError(1, 2) from error
        except KeyError as other:
            y = y + len(other.args)
    return y


@numbers
def return_inside_of_with(x):
    with contextlib.nullcontext():
        if x > 0:
            return x
        return -x * 2


@numbers
def and_with_a_side_effect(x):
    record = Record()

    def add():
        record.add(1.0)
        return record.value > 0

    return (1 if x > 0 and add() else 2), (1 if x > 0 or add() else 2), record.value


@numbers
def an_iterator_of_the_branch(x):
    sizes = {"a": 2.0, "b": 3.0}
    if x > 0:
        items = iter(sizes.values())
        x = x * next(items) + next(items)
    return x + next(value for value in sizes.values() if value > 2)


@numbers
def none_until_the_first_value(x):
    best = None
    for factor in range(3):
        if best is None or x * factor > best:
            best = x * factor
    return best


@rows
def a_sum_of_all_before(xs):
    found = [0.0]
    for x in xs:
        found.append(found[-1] + x)
    return found


@rows
def a_list_whose_length_counts_later(xs):
    found = []
    for x in xs:
        found.append(x)
        if len(found) > 2:
            found.append(-x)
    return found


@rows
def a_list_of_nests_with_none(xs):
    total, found, names = 0.0, [], []
    for x in xs:
        total += x
        found.append((total, None))
        names.append("a")
    return [y for y, none in found if none is None], len(names)


@rows
def an_object_in_a_loop(xs):
    record = Record()
    for x in xs:
        record.note(x)
    return record.value, record.seen


@rows
def a_name_of_an_outer_function_in_a_loop(xs):
    count = 0

    def add():
        nonlocal count
        count += 1

    for x in xs:
        if x > 0:
            add()
    return count


@rows
def lists_that_turns_replace_or_change(xs):
    state, kept, found = (first := [0.0, 1.0]), {"k": 0.0}, [0.0, 0.0]
    same = kept
    for x in xs:
        state = [state[1], x]
        found[0] = found[1] + x
        if x > 2:
            kept["k"] += x
            kept = kept
    return state, first, kept, same, found


@rows
def dicts_that_turns_replace_and_that_change_later(xs):
    sums = {"x": 0.0, "n": 0}
    last = [0.0, 0.0]
    for x in xs:
        sums = {"x": sums["x"] + x, "n": sums["n"] + 1}
        last = [last[1], x]
    sums["n"] = sums["n"] * 2
    last.append(5.0)
    return {**sums}, [*last]


@rows
def enumerate_and_zip(xs):
    total = 0.0
    for i, x in enumerate(xs):
        if x > 4:
            break
        total += x * i
    for a, b in zip(xs, xs[::-1], strict=True):
        total += a * b if a > b else a
    return total


@rows
def reversed_and_sorted(xs):
    total = 0.0
    for x in reversed(xs):
        total = total * 2 + x
    return total, sorted(xs), sorted(xs, reverse=True)[0]


@rows
def else_of_for(xs):
    total = 0.0
    for x in xs:
        if x > 4.5:
            break
        total += x
    else:
        total = -1.0
    for x in xs:
        total += x
    else:
        total += 100
    return total


@counts
def else_of_while(n):
    i = 0
    while i < n:
        i += 1
        if i == 4:
            break
    else:
        i = 100
    return i


@counts
def walrus_in_while(n):
    total = 0
    while (double := total * 2) < n:
        total += 1
    return total, double


@counts
def a_condition_that_changes_something(n):
    box = [0]

    def more():
        box[0] += 1
        return box[0] < n

    turns = 0
    while more():
        turns += 1
    return turns, box[0]


@counts
def and_that_guards_a_loop(n):
    def turns(m):
        count = 0
        while m != 1:
            m = m // 2 if m % 2 == 0 else 3 * m + 1
            count += 1
        return count

    return 1 if n > 0 and turns(n) > 5 else 0


make_generator = np.random.default_rng  # a function of C, with members that cannot be set


@counts
def a_loop_that_refers_to_a_function_of_c(n):
    while n < 4:
        if make_generator is not None:
            n += 1
    return n


@numbers
def lists_that_code_reads_and_changes(x):
    ws, gs, named = [x, 2 * x], list(map(abs, (1.0, x))), dict(a=x)
    gs_too, both, twice = gs.copy(), ws + gs, [x] * 2
    backward, rest, tree = both[::-1], both[1:], jax.tree.map(lambda w: w + 1, ws)
    if x > 0:
        ws = [w - g for w, g in zip(ws, gs, strict=True)]
        gs, gs_too, named = sorted([0.5, 0.25]), [x, x], {"a": 3 * x}
        both = both[:1] + ws + list(gs)[1:]
        twice, backward, rest = [g * g for _, g in enumerate(gs)], rest + both[:1], [x, x, x]
        tree = [*reversed(tree)]
    norm = sum(g * g for g in gs) + sum(named.values())
    for key, value in named.items():
        norm += value if key == "a" else 0.0
    if ws and not len(named) > 3:
        ws.append(norm)
    gs.extend(ws)
    for k, g in enumerate(gs):
        norm += g * k
    for k in range(2):
        gs_too[k] = gs_too[k] + max(ws)
        tree[k] += 1
    both.append(x)
    backward[0], rest[0], twice[0] = x, x, x
    named["b"] = x
    return ws, gs_too, named, both, backward, rest, tree, twice, norm


@numbers
def a_list_that_a_function_inside_reads(x):
    state = [x]

    def last():
        return state[-1] + len(state)

    if x > 0:
        state = [x * 2]
    else:
        state[0] = last()
    state.append(last())
    return last() + sum(state), state[0]


@numbers
def copies_of_a_list_before_it_is_replaced(x):
    first = [x]
    other, kept = list(first), dict(k=first)
    if x > 0:
        other = [x * 2]
    other.append(x)
    return other, first, kept


@pytest.mark.parametrize("kind", INPUTS)
def test_results_are_those_of_python(kind):
    inputs = [(x,) for x in INPUTS[kind]]
    assert_results_are_those_of_python(FUNCTIONS[kind], inputs)


def test_what_a_step_changes_stays_if_it_runs():
    total = dist.Variable(0.0)

    @dist.function(autograph=True)
    def step(x, n):
        def add():
            total.assign_add(1.0)
            return total.value()

        both = x > 0 and add() > 0
        while add() < n:
            both = both or add() > 100
        return total.value()

    def expected(x, n):
        value = 1.0 if x > 0 else 0.0
        both, value = x > 0, value + 1
        while value < n:
            if not both:
                value += 1
            value += 1
        return value

    for x, n in [(1.0, 5.0), (-1.0, 5.0), (-1.0, 0.0)]:
        total.assign(0.0)
        assert float(step(x, n)) == expected(x, n)


class Counting(keras.layers.Layer):
    """A layer with attributes of its own."""

    def __init__(self):
        super().__init__()
        self.count, self.seen = 0.0, [0.0]

    def call(self, x):
        if jnp.sum(x) > 0:
            self.count = 1.0
            self.seen[0] = jnp.sum(x)
        return jnp.sum(x) + self.count + self.seen[0]


class Scaling(keras.layers.Layer):
    """A layer that notes itself that it is built."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones")
        self.built = True

    def call(self, x):
        return x * self.scale


def test_attributes_of_layers_change_where_the_branch_runs():
    counting, scaling = Counting(), Scaling()

    @dist.function(autograph=True)
    def step(x):
        return scaling(x) if x > 3 else 2 * x  # built in a branch: that is Keras' own record

    assert float(dist.function(counting.call)(jnp.full(2, -2.0))) == -4
    assert [float(step(x)) for x in (2.0, 5.0)] == [4, 5]


def test_errors_that_a_step_raises_when_it_runs():
    strategy = dist.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        state = dist.Variable(1.0, aggregation=dist.VariableAggregation.SUM)

    def step(x):
        if jnp.sum(x) > 100:
            raise ValueError("too large")
        assert jnp.sum(x) > 0, f"the sum is {jnp.sum(x):.1f}"
        state.assign(jnp.sum(x))
        return x

    step_of = lambda *parts: strategy.run(step, (dist.PerReplica(list(map(jnp.asarray, parts))),))
    step_of([1.0], [2.0])
    with pytest.raises(ValueError, match="too large"):
        step_of([1.0], [200.0])
    with pytest.raises(AssertionError, match=r"the sum is -2.0 \(the assert at test_changes.py"):
        step_of([1.0], [-2.0])
    with pytest.raises(AssertionError, match=r"the sum is -2.0"):
        step_of([1.0, 2.0], [-2.0])  # an uneven batch
    assert float(state) == 3  # as before the failed steps
    step_of([4.0], [2.0])
    assert float(state) == 6


def test_a_list_that_turns_only_append_to_may_be_long():
    @dist.function(autograph=True)
    def sums(xs):
        total, found = 0.0, []
        for x in xs:
            total += x
            found.append(total)
        return jnp.stack(found)

    np.testing.assert_array_equal(sums(jnp.ones(300)), np.arange(1, 301))


def a_parameter(x, a, other):
    if x > 0:
        a = [x * 2]
    a.append(x)


def a_default(x, a, other, given=()):
    given = a
    if x > 0:
        given = [x * 2]
    given.append(x)


def a_variable_of_the_outer_function(x, a, other):
    held = [x]

    def replace():
        nonlocal held
        held = a

    replace()
    if x > 0:
        held = [x * 2]
    held.append(x)


def a_view(x, a, other):
    made = {"a": x}
    values = made.values()
    if x > 0:
        made = {"a": x * 2}
    made["b"] = x
    return sum(values)


def a_bound_method(x, a, other):
    made = [x]
    append = made.append
    if x > 0:
        made = [x * 2]
    append(x)
    return sum(made)


def the_longer_of_two(x, a, other):
    made = [x]
    longer = max(made, [x * 2], key=len)
    if x > 0:
        made = [x * 9]
    made.append(x)
    return sum(longer)


def the_start_of_a_sum(x, a, other):
    made = [x]
    same = sum([], made)
    if x > 0:
        made = [x * 9]
    made.append(x)
    return sum(same)


def twice(x):
    made = [x]
    if x > 0:
        made = [x * 2]
        return made, made
    return made, made


def with_reader(x):
    made = [x]
    read = lambda: made[-1]
    if x > 0:
        made = [x * 2]
    return made, read


def a_list_returned_twice(x, a, other):
    first, second = twice(x)
    first.append(x)
    return sum(second)


def a_list_and_a_function_that_reads_it(x, a, other):
    made, read = with_reader(x)
    made.append(x * 7)
    return read()


def a_list_that_a_generator_reads_later(x, a, other):
    made = [x]
    later = (value for value in made)
    if x > 0:
        made = [x * 2]
    made.append(x)
    return sum(later)


def a_name_of_a_builtin_function(x, a, other):
    list = lambda values: values
    made = list(a)
    if x > 0:
        made = [x * 2]
    made.append(x)


def a_sum_with_what_is_no_list(x, a, other):
    made = [x]
    same = made + other
    if x > 0:
        same = [x * 2]
    same.append(x)


def a_loop_over_a_list_that_turns_replace(x, a, other):
    made, total = [x, x], 0.0
    for k, value in enumerate(made):
        total += value
        if x > 0:
            made = [x * 2, x * 3]
        made[1] = x + k + 5
    return total


class Kept:
    """A list is what it holds when something is added to that."""

    def __init__(self, held):
        self.held = held

    def __radd__(self, other):
        return self.held


@pytest.mark.parametrize(
    "function",
    [
        a_parameter,
        a_default,
        a_variable_of_the_outer_function,
        a_view,
        a_bound_method,
        the_longer_of_two,
        the_start_of_a_sum,
        a_list_returned_twice,
        a_list_and_a_function_that_reads_it,
        a_list_that_a_generator_reads_later,
        a_name_of_a_builtin_function,
        a_sum_with_what_is_no_list,
        a_loop_over_a_list_that_turns_replace,
    ],
)
def test_lists_to_which_others_refer_are_not_replaced_and_changed(function):
    @dist.function(autograph=True)
    def step(x):
        a = [x * 5]
        result = function(x, a, Kept(a))
        return sum(a), result

    with pytest.raises(dist.errors.UnsupportedError, match="is a copy since the `if`"):
        step(1.0)
