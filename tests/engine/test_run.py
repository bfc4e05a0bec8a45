"""Tracing, caching and results of `Strategy.run`."""

import collections
import dataclasses
import gc
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distributary as dist
from distributary.errors import ContextError

Pair = collections.namedtuple("Pair", ["first", "second"])


def _ids(strategy):
    return strategy.experimental_distribute_values_from_function(
        lambda context: np.float32(context.replica_id_in_sync_group)
    )


@pytest.mark.parametrize("num_replicas", [2, 4, 8])
def test_every_replica_receives_its_component_and_its_id(strategy_of, num_replicas):
    strategy = strategy_of(num_replicas)

    def step(own, shared, *, factor):
        context = dist.get_replica_context()
        assert context.num_replicas_in_sync == num_replicas
        assert context.strategy is strategy
        return own * factor + shared, context.replica_id_in_sync_group

    result, ids = strategy.run(step, args=(_ids(strategy), 100.0), kwargs={"factor": 2.0})

    assert [float(v) for v in result.values] == [100.0 + 2 * i for i in range(num_replicas)]
    assert [int(v) for v in ids.values] == list(range(num_replicas))
    assert ids.values[0].dtype == jnp.int32
    assert [next(iter(v.devices())).id for v in result.values] == list(range(num_replicas))


def test_the_step_is_traced_once_per_signature(strategy_of):
    strategy = strategy_of(2)
    traces = []

    def step(x, training, mode=None):
        traces.append((x.shape, x.dtype.name, training, mode))
        return x + 1

    for _ in range(3):
        strategy.run(step, args=(jnp.ones(2), True))
    strategy.run(step, args=(jnp.ones(3), True))
    strategy.run(step, args=(jnp.ones(3, jnp.int32), True))
    strategy.run(step, args=(jnp.ones(3, jnp.int32), False))
    strategy.run(step, args=(jnp.ones(3, jnp.int32), False), kwargs={"mode": "fast"})
    strategy.run(step, args=(jnp.zeros(2), True))

    assert traces == [
        ((2,), "float32", True, None),
        ((3,), "float32", True, None),
        ((3,), "int32", True, None),
        ((3,), "int32", False, None),
        ((3,), "int32", False, "fast"),
    ]


def test_python_numbers_are_data_and_do_not_retrace(strategy_of):
    strategy = strategy_of(2)
    traces = []

    def step(rate):
        traces.append(rate)
        return rate * 2

    results = [strategy.run(step, args=(rate,)).values[0] for rate in (0.5, 0.25)]

    assert [float(r) for r in results] == [1.0, 0.5]
    assert len(traces) == 1


def test_bound_methods_share_a_trace_per_object(strategy_of):
    strategy = strategy_of(2)
    traces = []

    class Model:
        def __init__(self, factor):
            self.factor = factor

        def step(self, x):
            traces.append(self.factor)
            return x * self.factor

    models = [Model(2.0), Model(3.0)]
    for _ in range(2):
        results = [float(strategy.run(m.step, args=(jnp.ones(()),)).values[0]) for m in models]

    assert results == [2.0, 3.0]
    assert traces == [2.0, 3.0]


def test_repeated_retracing_warns_once_and_names_the_cause(strategy_of):
    strategy = strategy_of(1)

    def step(x):
        return x + 1

    with warnings.catch_warnings(record=True, action="always") as caught:
        for size in range(1, 13):
            strategy.run(step, args=(jnp.ones(size),))

    (warning,) = caught
    assert "step" in str(warning.message)
    assert "float32[8] to float32[9]" in str(warning.message)


def test_a_new_function_object_in_every_call_is_named_as_the_cause(strategy_of):
    strategy = strategy_of(1)

    with warnings.catch_warnings(record=True, action="always") as caught:
        for _ in range(12):
            strategy.run(lambda x: x + 1, args=(jnp.ones(2),))

    (warning,) = caught
    assert "new function object" in str(warning.message)


def test_a_step_may_return_constants(strategy_of):
    strategy = strategy_of(2)

    constants = strategy.run(lambda: (jnp.asarray(1.5), jnp.array(3), jnp.ones(2)))

    for value, expected in zip(constants, (np.float32(1.5), np.int32(3), np.ones(2)), strict=True):
        for component in strategy.experimental_local_results(value):
            assert component.dtype == jnp.asarray(expected).dtype
            np.testing.assert_array_equal(component, expected)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_results_keep_their_structure_and_python_values(strategy_of, num_replicas):
    strategy = strategy_of(num_replicas)
    with strategy.scope():
        v = dist.Variable(1.0)

    def step():
        ordered = collections.OrderedDict(b=jnp.ones(()), a=2)
        return Pair(jnp.zeros(2), None), [5, "text", True, 1.5], ordered, v, ()

    pair, constants, ordered, variable, empty = strategy.run(step)

    assert isinstance(pair, Pair)
    assert pair.second is None
    assert isinstance(pair.first, dist.PerReplica) == (num_replicas > 1)
    assert constants == [5, "text", True, 1.5]
    assert type(ordered) is collections.OrderedDict
    assert list(ordered) == ["b", "a"]
    assert ordered["a"] == 2
    assert variable is v
    assert empty == ()


@pytest.mark.parametrize("result", [object(), {1, 2}, len])
def test_results_that_cannot_leave_a_program_are_refused(strategy_of, result):
    with pytest.raises(TypeError, match="the function returned"):
        strategy_of(2).run(lambda: result)


@pytest.mark.parametrize("args", [3.0, np.ones(2), "ab", {1: 2}])
def test_args_must_be_a_list_or_tuple(strategy_of, args):
    with pytest.raises(ValueError, match=r"args=\(value,\)"):
        strategy_of(2).run(lambda x: x, args=args)


def test_an_exception_in_the_step_keeps_its_type_and_leaves_no_context_behind(strategy_of):
    strategy = strategy_of(2)
    with strategy.scope():
        v = dist.Variable(1.0)

    def step():
        v.assign_add(1.0)
        raise KeyError("missing")

    with pytest.raises(KeyError, match="missing"):
        strategy.run(step)

    assert not dist.has_strategy()
    assert v.numpy() == 1.0


def test_arguments_on_other_devices_are_brought_along(strategy_of):
    strategy = strategy_of(2)
    elsewhere = jax.device_put(jnp.ones(3), jax.devices()[5])

    result = strategy.run(lambda x: x * 2, args=(elsewhere,))

    np.testing.assert_array_equal(result.values[1], [2, 2, 2])


def test_closures_over_arrays_and_static_objects(strategy_of):
    strategy = strategy_of(2)
    captured = jax.device_put(jnp.arange(3.0), jax.devices()[4])
    config = {"scale": 3.0}

    result = strategy.run(lambda x: x + captured * config["scale"], args=(np.ones(3),))

    np.testing.assert_array_equal(result.values[0], [1, 4, 7])


def test_a_per_replica_captured_by_closure_is_refused(strategy_of):
    strategy = strategy_of(2)
    captured = _ids(strategy)

    with pytest.raises(ValueError, match="through args"):
        strategy.run(lambda: jnp.sin(captured))


def test_random_keys_give_each_replica_its_own_numbers(strategy_of):
    strategy = strategy_of(2)

    def step(key):
        context = dist.get_replica_context()
        own = jax.random.fold_in(key, context.replica_id_in_sync_group)
        return jax.random.normal(own, (3,)), jax.random.normal(key, (3,))

    for key in (jax.random.key(0), jax.random.PRNGKey(0)):
        own, shared = strategy.run(step, args=(key,))

        expected = [jax.random.normal(jax.random.fold_in(key, i), (3,)) for i in range(2)]
        np.testing.assert_allclose(own.values[0], expected[0], rtol=1e-6)
        np.testing.assert_allclose(own.values[1], expected[1], rtol=1e-6)
        np.testing.assert_array_equal(shared.values[0], shared.values[1])


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_what_a_step_has_left_outside_is_named(num_replicas, strategy_of):
    strategy = strategy_of(num_replicas)
    left = []
    strategy.run(lambda x: left.append(x * 2), (jnp.ones(2),))
    dist.function(left.append)(jnp.ones(3))

    for value in left:
        with pytest.raises(ContextError, match=r"was given .*, which an earlier step has left in"):
            strategy.run(lambda x: x + value[0], (jnp.ones(2),))  # noqa: B023
        with pytest.raises(ContextError, match=r"was given .*, which an earlier step has left in"):
            strategy.run(lambda x: x, (value,))
        with pytest.raises(ContextError, match=r"was given .*, which an earlier step has left in"):
            dist.function(lambda x: x)(value)


def test_run_inside_jit_is_refused(strategy_of):
    strategy = strategy_of(2)
    with strategy.scope():
        v = dist.Variable(1.0)

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


def test_state_buffers_are_donated_and_old_values_stay_valid(strategy_of):
    strategy = strategy_of(2)
    with strategy.scope():
        v = dist.Variable(jnp.zeros(4))
    strategy.run(lambda: v.assign_add(jnp.ones(4)))
    buffer = v._value
    old = v.value()

    strategy.run(lambda: v.assign_add(jnp.ones(4)))
    np.testing.assert_array_equal(old, np.ones(4))  # copied, because somebody holds it
    buffer = v._value
    strategy.run(lambda: v.assign_add(jnp.ones(4)))

    assert buffer.is_deleted()
    np.testing.assert_array_equal(v.numpy(), np.full(4, 3.0))


def test_equal_components_given_as_a_per_replica_are_stacked(strategy_of):
    strategy = strategy_of(2)
    value = dist.PerReplica([1.0, 2.0])

    result = strategy.run(lambda x: x * 10, args=(value,))

    assert [float(v) for v in result.values] == [10.0, 20.0]


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (dist.PerReplica([1.0, 2.0, 3.0]), ValueError, "3 components"),
        (dist.PerReplica([1.0, [2.0]]), ValueError, "replica 1 has structure"),
        (dist.PerReplica(["a", "b"]), TypeError, "replica 0 is 'a'"),
        (np.array(["a"]), TypeError, "strings"),
    ],
)
def test_unusable_arguments_are_refused(strategy_of, value, error, message):
    with pytest.raises(error, match=message):
        strategy_of(2).run(lambda x: x, args=(value,))


def test_a_function_compiles_runs_and_reductions_into_one_program(strategy_of):
    strategy = strategy_of(2)
    with strategy.scope():
        v = dist.Variable(1.0)
    traces = []

    @dist.function
    def train(x):
        traces.append(x)
        first = strategy.run(lambda y: y * v, args=(x,))
        v.assign_add(strategy.reduce("sum", first, axis=None))
        second = strategy.run(lambda y: y * v, args=(x,))
        return strategy.reduce("sum", second, axis=None), v.value()

    results = [jax.tree.map(float, train(_ids(strategy))) for _ in range(2)]

    assert results == [(2.0, 2.0), (4.0, 4.0)]
    assert len(traces) == 1
    assert v.numpy() == 4.0


def test_a_function_is_retraced_in_another_scope_and_works_as_a_method(strategy_of):
    strategy = strategy_of(2)
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


def test_a_function_given_a_dataset_runs_its_loop_on_the_host(strategy_of):
    strategy = strategy_of(2)
    with strategy.scope():
        total = dist.Variable(0.0, aggregation=dist.VariableAggregation.SUM)
    calls = []

    @dist.function
    def epoch(dataset):
        for batch in dataset:
            calls.append(1)
            strategy.run(lambda x: total.assign_add(jnp.sum(x)), args=(batch,))

    epoch(strategy.experimental_distribute_dataset([np.ones(3, np.float32)] * 4))

    assert len(calls) == 4
    assert total.numpy() == 12.0


def test_the_default_strategy_and_one_device_run_on_one_replica():
    one = dist.OneDeviceStrategy("/cpu:2")
    with one.scope():
        v = dist.Variable(1.0)

    def step(x):
        v.assign_add(x)
        return v.value(), dist.get_replica_context().replica_id_in_sync_group

    value, replica_id = one.run(step, args=(2.0,))

    assert (float(value), int(replica_id)) == (3.0, 0)
    assert value.devices() == {jax.devices()[2]}
    assert float(dist.get_strategy().run(lambda x: x + 1, args=(1.0,))) == 2.0
    assert one.experimental_local_results([1, 2]) == ([1, 2],)
    with pytest.raises(RuntimeError, match="no devices of its own"):
        _ = dist.get_strategy().extended.worker_devices


def test_values_from_a_function(strategy_of):
    strategy = strategy_of(2)

    value = strategy.experimental_distribute_values_from_function(
        lambda context: {
            "id": context.replica_id_in_sync_group,
            "rows": np.ones((1 + context.replica_id_in_sync_group, 2)),
            "name": f"replica {context.replica_id_in_sync_group}",
        }
    )

    assert [int(v) for v in value["id"].values] == [0, 1]
    assert [v.shape for v in value["rows"].values] == [(1, 2), (2, 2)]
    assert value["name"].values == ("replica 0", "replica 1")
    assert (
        dist.OneDeviceStrategy("CPU:0").experimental_distribute_values_from_function(
            lambda context: context.num_replicas_in_sync
        )
        == 1
    )


def test_python_results_that_differ_between_replicas_are_refused(strategy_of):
    uneven = dist.PerReplica([jnp.ones(2), jnp.ones(3)])

    with pytest.raises(ValueError, match=r"\[2\] on one replica and \[3\] on another"):
        strategy_of(2).run(lambda x: x.shape[0], (uneven,))


@dataclasses.dataclass
class _Trainer:
    scale: float

    def step(self):
        return jnp.float32(self.scale)

    @dist.function
    def compiled(self):
        return jnp.float32(self.scale)


def test_methods_of_objects_without_a_hash(strategy_of):
    strategy = strategy_of(1)
    trainers = [_Trainer(2.0), _Trainer(3.0)]

    assert [float(strategy.run(t.step)) for t in trainers] == [2.0, 3.0]
    assert [float(t.compiled()) for t in trainers] == [2.0, 3.0]
    assert len(strategy.extended.engine.cache) == 2


def test_updating_many_variables_with_one_function_does_not_warn(strategy_of):
    strategy = strategy_of(2)
    with strategy.scope():
        variables = [dist.Variable(1.0, name=f"v{i}") for i in range(12)]

    def apply(variable, gradient):
        variable.assign_sub(gradient)

    for variable in variables:
        strategy.extended.update(variable, apply, (0.5,))

    assert [float(v.numpy()) for v in variables] == [0.5] * 12


def test_a_step_must_be_callable(strategy_of):
    with pytest.raises(TypeError, match="fn is 3"):
        strategy_of(2).run(3)


def test_a_function_keeps_no_strategy_alive(strategy_of):
    holder = [strategy_of(2)]
    compiled = dist.function(lambda: holder[0].run(lambda: jnp.ones(1)))
    compiled()
    reference = weakref.ref(holder.pop())
    gc.collect()

    assert reference() is None
