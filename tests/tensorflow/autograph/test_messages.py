"""What cannot be converted is refused with the user's line and variable."""

import contextlib
import re
import traceback

import jax.numpy as jnp
import numpy as np
import pytest

import distributary as dist

CASES = {}


def told(error, *parts, argument=1.0):
    """Notes a function with the error that it gets, and what the message must contain."""

    def note(function):
        CASES[function.__name__] = function, error, parts, argument
        return function

    return note


@told(ValueError, "`y` has shape (2,) after one branch of the `if` at", "(3,) after the other")
def shapes_of_branches(x):
    if x > 0:
        y = jnp.zeros(2)
    else:
        y = jnp.zeros(3)
    return y


@told(TypeError, "`y` has dtype float32 after one branch", "int32 after the other", "x.astype")
def dtypes_of_branches(x):
    if x > 0:
        y = jnp.zeros(2)
    else:
        y = jnp.zeros(2, int)
    return y


@told(dist.errors.UnsupportedError, "takes the next item of", "once, however often", "index that")
def an_iterator_that_goes_on_in_a_loop(x):
    items = iter([1.0, 2.0, 3.0])
    for _ in jnp.arange(3):
        x = x + next(items)
    return x


@told(TypeError, "`y` is", "'b' after the other", "only numbers and arrays can differ")
def objects_of_branches(x):
    if x > 0:
        y = "a"
    else:
        y = "b"
    return y


@told(TypeError, "`y` is", "the same structure in both")
def structures_of_branches(x):
    if x > 0:
        y = (x, x)
    else:
        y = (x,)
    return y


@told(TypeError, "`y` is True after one branch", "None after the other")
def true_of_one_branch_and_none_of_the_other(x):
    if x > 0:
        y = True
    else:
        y = None
    return y


@told(ValueError, "`y` has a value after one branch of the `if` at", "assign it in both")
def a_name_of_one_branch(x):
    if x > 0:
        y = x
    return y


@told(
    dist.errors.UnsupportedError, "one path of the function at", "Return a value of the same shape"
)
def a_result_of_one_path(x):
    if x > 0:
        return x


@told(ValueError, "`x` has shape () before a turn of the `while` at", "(2,) after it")
def shapes_of_turns(x):
    while jnp.max(x) > 0:
        x = jnp.stack([jnp.max(x), -1.0])
    return x


@told(ValueError, "`y` gets its first value in the `while` at", "assign it before the loop")
def a_name_of_a_loop(x):
    while x > 0:
        y = x
        x = x - 1
    return y


@told(TypeError, "`rows` grows in the `while` at", "x.at[i].set(value)")
def a_list_that_grows(x):
    rows = []
    while x > 0:
        rows.append(x)
        x = x - 1
    return rows


@told(
    ValueError,
    "`if` at",
    "needs one truth value",
    "shape (3,)",
    "jnp.where",
    argument=np.zeros(3, np.float32),
)
def an_array_as_a_condition(x):
    if x > 0:
        x = -x
    return x


@told(TypeError, "The `for` at", "has no rows")
def a_number_as_rows(x):
    total = 0.0
    for y in x:
        total += y
    return total


@told(TypeError, "range: got", "expected a whole number")
def a_range_of_a_fraction(x):
    total = 0.0
    for i in range(x):
        total += i
    return total


@told(TypeError, "`rows` has 1 items after one branch of the `if` at", "0 items after the other")
def a_list_that_grows_in_one_branch(x):
    rows = []
    if x > 0:
        rows.append(x)
    return len(rows)


@told(TypeError, "`found` has the keys [1] before a turn of the `while` at", "the keys [1, 2]")
def a_set_that_grows_in_a_loop(x):
    found = {1}
    while x > 0:
        found.add(2)
        x = x - 1
    return len(found)


@told(dist.errors.UnsupportedError, "`chosen` is a copy since the `if` at", "list(a) or dict(a)")
def a_list_of_two_that_is_changed(x):
    a, b = [x], [2 * x]
    if x > 0:
        chosen = a
    else:
        chosen = b
    chosen.append(x)
    return a, b


@told(
    dist.errors.UnsupportedError, "`i > 1` is a copy since the `if` at", "only when the step runs"
)
def a_dict_of_two_that_a_turn_changes(x):
    a, b = {"k": x}, {"k": 2 * x}
    for i in range(jnp.int32(x)):
        chosen = a if i > 1 else b
        b["k"] = chosen["k"] + 1
    return a, b


@told(dist.errors.UnsupportedError, "`state` is a copy since the `while` at", "known only when")
def a_list_that_turns_replace_and_change(x):
    state = first = [x, 0.0]
    while x > 0:
        state[1] = state[1] + 1
        state = [state[1], x]
        x = x - 1
    return first, state


@told(
    dist.errors.UnsupportedError, "`state` is a copy since the `for` at", "make new ones in place"
)
def a_list_that_turns_replace_and_that_changes_later(x):
    state = other = [x, 0.0]
    for i in range(jnp.int32(x)):
        state = [state[1], x + i]
    state[0] = 5.0
    return other, state


@told(ValueError, "`y` has shape (2,) after one branch of the `if` at")
def an_error_of_a_branch_that_is_handled(x):
    try:
        if x > 0:
            y = jnp.zeros(2)
        else:
            y = jnp.zeros(3)
    except ValueError:
        return x
    return jnp.sum(y)


@told(ValueError, "`y` has shape () before a turn of the `while` at")
def an_error_of_a_turn_that_is_handled(x):
    y = 0.0
    with contextlib.suppress(Exception):
        while x > 0:
            x, y = x - 1, jnp.zeros(3)
    return y


@told(dist.errors.UnsupportedError, "changes an array of NumPy in place", "array.at[i].set(value)")
def an_array_of_numpy_in_a_branch(x):
    found = np.zeros(3)
    if x > 0:
        found[1:][0] = 1.0
    return found


@told(dist.errors.UnsupportedError, "changes an array of NumPy in place", "array.at[i].set(value)")
def an_array_of_numpy_in_a_loop(x):
    found = np.frombuffer(bytearray(4), np.int8)
    while x > 0:
        found += 1
        x = x - 1
    return found


@told(TypeError, r"`found` has the keys [b'\x07']", "after the other")
def bytes_that_change(x):
    found = bytearray(1)
    if x > 0:
        found[0] = 7
    return found[0]


@told(TypeError, "has a dict at", "whose keys cannot be sorted", "Use keys of one type")
def keys_of_two_types(x):
    if x > 0:
        found = {1: x, "a": x}
    else:
        found = {1: -x, "a": x}
    return found["a"]


@told(
    dist.errors.UnsupportedError,
    "has 300 turns, and each looks at a list",
    "at most 256",
    argument=np.zeros(300, np.float32),
)
def a_long_list_that_turns_look_at(xs):
    found = [0.0]
    for x in xs:
        found.append(found[-1] + x)
    return found


@pytest.mark.parametrize("name", CASES)
def test_the_message_names_the_line_and_the_variable(name):
    function, error, parts, argument = CASES[name]

    with pytest.raises(error) as caught:
        dist.function(function, autograph=True)(argument)

    text = str(caught.value)
    assert [part for part in parts if part not in text] == [], text
    assert re.search(r"test_messages.py:\d+", text), text
    frames = traceback.extract_tb(caught.tb)
    own = [frame for frame in frames if frame.name == name]
    assert own
    assert all(frame.filename == __file__ and frame.line for frame in own)
    assert not any("malt" in frame.filename for frame in frames)


def test_arrays_of_numpy_can_be_written_again():
    base = np.zeros(3)
    views = [base[1:], np.frombuffer(bytearray(2), np.int8), base]

    @dist.function(autograph=True)
    def step(x):
        return x + views[0][0] + views[1][0] + views[2][0] if x > 0 else x

    assert float(step(1.0)) == 1
    for array in views:
        array[:] = 1


def test_elements_that_are_gone_are_refused_in_a_step():
    def step(x):
        total = 0.0
        for y in (value for value in [1.0, 2.0]):
            if y > x:
                break
            total += y
        return total

    with pytest.raises(dist.errors.UnsupportedError, match=r"The `for` at .* ends early"):
        dist.OneDeviceStrategy("CPU:0").run(step, (1.0,))
    assert float(dist.function(step)(1.0)) == 1  # a function can run on the host
