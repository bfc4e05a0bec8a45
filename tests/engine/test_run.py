"""What `Strategy.run` and `distributary.function` do with steps, and keep of them."""

import warnings

import jax
import jax.numpy as jnp
import pytest

import distributary as dist
from distributary.errors import ContextError


def test_a_new_function_object_in_every_call_is_named_as_the_cause(strategy_of):
    strategy = strategy_of(1)

    with warnings.catch_warnings(record=True, action="always") as caught:
        for _ in range(12):
            strategy.run(lambda x: x + 1, args=(jnp.ones(2),))

    (warning,) = caught
    assert "new function object" in str(warning.message)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_what_a_step_has_left_outside_is_named(num_replicas, strategy_of):
    strategy = strategy_of(num_replicas)
    left = []
    strategy.run(lambda x: left.append(x * 2), (jnp.ones(2),))
    dist.function(left.append)(jnp.ones(3))

    for value in left:
        for use in (
            lambda value: strategy.run(lambda x: x + value[0], (jnp.ones(2),)),
            lambda value: strategy.run(lambda x: x, (value,)),
            dist.function(lambda x: x),
        ):
            with pytest.raises(ContextError, match=r"was given .*, which an earlier step"):
                use(value)


def test_run_inside_jit_is_refused(strategy, variable):
    v = variable(1.0)

    def step(x):
        v.assign(dist.get_replica_context().all_reduce("sum", x))
        return x

    for call in (
        lambda: jax.jit(lambda x: strategy.run(step, args=(x,)).values[0])(1.0),
        lambda: jax.grad(lambda x: strategy.run(step, args=(x,)).values[0])(1.0),
        lambda: jax.jit(lambda: strategy.run(step, args=(1.0,)).values[0])(),
        lambda: jax.vmap(lambda x: strategy.run(step, args=(x,)).values[0])(jnp.ones(3)),
    ):
        with pytest.raises(RuntimeError, match=r"distributary\.function"):
            call()
    assert v.numpy() == 1.0


def test_a_function_is_retraced_in_another_scope_and_works_as_a_method(strategy):
    seen = []

    class Model:
        @dist.function
        def step(self, x):
            seen.append(dist.get_strategy().num_replicas_in_sync)
            return x + 1

    model = Model()
    model.step(1.0)
    with strategy.scope():
        model.step(1.0)
    model.step(2.0)

    assert seen == [1, 2]


def test_updating_many_variables_with_one_function_does_not_warn(strategy):
    with strategy.scope():
        variables = [dist.Variable(1.0, name=f"v{i}") for i in range(12)]

    def apply(variable, gradient):
        variable.assign_sub(gradient)

    for variable in variables:
        strategy.extended.update(variable, apply, (0.5,))

    assert [float(v.numpy()) for v in variables] == [0.5] * 12
