"""Values per replica as objects."""

import copy
import operator
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distributary as dist


def _components(num_replicas=2):
    return [jnp.arange(2.0) + i for i in range(num_replicas)]


@pytest.fixture(params=["components", "of a step"])
def per_replica(request, strategy_of):
    """[0, 1] on replica 0 and [1, 2] on replica 1."""
    if request.param == "components":
        return dist.PerReplica(_components())
    return strategy_of(2).run(
        lambda: jnp.arange(2.0) + dist.get_replica_context().replica_id_in_sync_group
    )


@pytest.fixture(params=["nothing known", "of an update"])
def mirrored(request, strategy_of):
    """[1, 2] on both replicas."""
    if request.param == "nothing known":
        return dist.Mirrored(jnp.array([1.0, 2.0]), 2)
    strategy = strategy_of(2)
    with strategy.scope():
        v = dist.Variable([0.0, 0.0])
    return strategy.extended.update(v, lambda v: v.assign([1.0, 2.0]))


def _through_pickle(value):
    return pickle.loads(pickle.dumps(value))


# PerReplica


def test_per_replica_shows_its_components(per_replica):
    assert isinstance(per_replica, dist.DistributedValues)
    assert isinstance(per_replica.values, tuple)
    assert per_replica.num_replicas == 2
    np.testing.assert_array_equal(per_replica.values, [[0, 1], [1, 2]])
    assert repr(per_replica) == (
        "PerReplica:{\n  0: Array([0., 1.], dtype=float32),\n  1: Array([1., 2.], dtype=float32)\n}"
    )
    assert str(per_replica) == "PerReplica:{\n  0: [0. 1.],\n  1: [1. 2.]\n}"
    assert per_replica == per_replica != dist.PerReplica(_components())
    assert {per_replica: 1}[per_replica] == 1
    nests = dist.PerReplica([{"x": jnp.ones(2), "y": 1}, {"x": jnp.ones(3), "y": 2}])
    assert [(c["x"].shape, c["y"]) for c in nests.values] == [((2,), 1), ((3,), 2)]


def _of_a_step(strategy):
    return strategy.run(lambda: jnp.arange(2.0) + _replica_id())


def _of_a_dataset(strategy):
    dataset = strategy.experimental_distribute_dataset([np.array([0.0, 1.0, 1.0, 2.0])])
    return next(iter(dataset))


def _of_an_on_read_variable(strategy):
    with strategy.scope():
        v = dist.Variable([0.0, 0.0], synchronization=dist.VariableSynchronization.ON_READ)
    strategy.run(lambda: v.assign(jnp.arange(2.0) + _replica_id()))
    return v


def _replica_id():
    return dist.get_replica_context().replica_id_in_sync_group


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (_of_a_step, dist.experimental.CentralStorageStrategy),
        (_of_a_dataset, dist.MirroredStrategy),
        (_of_an_on_read_variable, dist.experimental.CentralStorageStrategy),
    ],
)
def test_components_mix_in_arithmetic(make, kind):
    strategy = kind(["CPU:1", "CPU:2"])
    with strategy.scope():
        mirrored = dist.Variable([10.0, 10.0])

    first, second = strategy.experimental_local_results(make(strategy))
    total = strategy.reduce("sum", _of_a_step(strategy), axis=None)

    np.testing.assert_array_equal(sum((first, second)), [1, 3])
    np.testing.assert_array_equal(second - first, [1, 1])
    arrays = jnp.asarray(first), jnp.asarray(second)
    np.testing.assert_array_equal(jax.jit(lambda x, y: x * y)(*arrays), [0, 2])
    np.testing.assert_array_equal(jnp.stack(arrays), [[0, 1], [1, 2]])
    np.testing.assert_array_equal(second + mirrored.value() + total, [12, 15])
    np.testing.assert_array_equal(first + jax.device_put(np.ones(2), jax.devices()[3]), [1, 2])


def test_random_keys_of_replicas_mix(strategy):
    keys = strategy.experimental_local_results(
        strategy.run(lambda: jax.random.fold_in(jax.random.key(0), _replica_id()))
    )

    expected = [jax.random.fold_in(jax.random.key(0), i) for i in range(2)]
    assert [key.devices() for key in keys] == [{jax.devices()[0]}, {jax.devices()[1]}]
    assert jnp.array_equal(jnp.stack(keys), jnp.stack(expected))


@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        (lambda x: 1.0 * x, TypeError, "not a number"),
        (operator.index, TypeError, "PerReplica"),
        (lambda x: x.shape, AttributeError, "'shape'"),
        (np.asarray, ValueError, r"PerReplica cannot be converted.*of 2 replicas.*reduce"),
        (lambda x: jnp.ones(2) + x, ValueError, r"PerReplica cannot be converted.*reduce"),
        (lambda x: np.ones(2) + x, ValueError, r"PerReplica cannot be converted.*reduce"),
        (lambda x: setattr(x, "values", 1), AttributeError, "values"),
    ],
)
def test_per_replica_is_opaque(use, error, message, per_replica):
    with pytest.raises(error, match=message):
        use(per_replica)


def test_per_replica_captured_by_a_step_is_refused(per_replica, strategy):
    for use in (lambda: jnp.asarray(per_replica), lambda: jnp.ones(2) * per_replica):
        with pytest.raises(ValueError, match=r"args, not through a closure"):
            strategy.run(use)
    context = dist.get_replica_context
    for use in (
        lambda: context().all_reduce("SUM", per_replica),
        lambda: jax.tree.map(lambda x: 2 * x, per_replica),
        lambda: context().merge_call(lambda s: s.reduce("SUM", per_replica, axis=None)),
    ):
        with pytest.raises(TypeError, match=r"replica cannot use this PerReplica: .*not through a"):
            strategy.run(use)


def test_per_replica_is_a_pytree(per_replica):
    doubled = jax.tree.map(lambda x: x * 2, {"x": per_replica})
    leaves, tree = jax.tree.flatten(per_replica)

    assert isinstance(doubled["x"], dist.PerReplica)
    np.testing.assert_array_equal(doubled["x"].values, [[0, 2], [2, 4]])
    np.testing.assert_array_equal(jax.tree.unflatten(tree, leaves).values, per_replica.values)
    tripled = jax.jit(lambda x: jax.tree.map(lambda leaf: leaf * 3, x))(
        dist.PerReplica([np.ones(2), np.ones(3)])
    )
    assert [c.shape for c in tripled.values] == [(2,), (3,)]


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, _through_pickle])
def test_values_are_copied(duplicate, per_replica, mirrored):
    for value in (per_replica, mirrored):
        result = duplicate(value)

        assert type(result) is type(value)
        np.testing.assert_array_equal(result.values, value.values)


@pytest.mark.parametrize("values", [[], (), 3, "ab", np.ones(2), None, {"a": 1}], ids=repr)
def test_components_are_a_list_or_tuple(values):
    with pytest.raises(TypeError, match=r"PerReplica: got .*non-empty list or tuple"):
        dist.PerReplica(values)


def test_components_looked_at_first_in_a_step_are_arrays(strategy):
    captured = strategy.run(lambda: jnp.ones(2))

    first = strategy.run(lambda: captured.values[1] * 2)
    second = strategy.run(lambda: captured.values[1] * 3)

    assert isinstance(captured.values[1], jax.Array)
    assert not isinstance(captured.values[1], jax.core.Tracer)
    np.testing.assert_array_equal(first.values, np.full((2, 2), 2))
    np.testing.assert_array_equal(second.values, np.full((2, 2), 3))


def test_merged_components_are_of_use_in_every_trace(strategy):
    def merge_fn(_, x):
        add = lambda total, _: (total + x.values[1], None)
        gradient = jax.grad(lambda scale: scale * x.values[1])(1.0)
        return gradient + x.values[0] + jax.lax.scan(add, 0.0, length=2)[0]

    def step():
        return dist.get_replica_context().merge_call(merge_fn, (_replica_id() + 1.0,))

    assert [float(x) for x in strategy.run(step).values] == [7.0, 7.0]


# Mirrored


def test_mirrored_behaves_like_the_value_it_holds(mirrored, strategy):
    assert isinstance(mirrored, dist.DistributedValues)
    assert (mirrored.shape, mirrored.dtype, mirrored.ndim) == ((2,), jnp.float32, 1)
    assert len(mirrored) == 2
    assert [float(x) for x in mirrored] == [1.0, 2.0]
    assert (float(mirrored[1]), float(mirrored.sum())) == (2.0, 3.0)
    for convert in (np.asarray, jnp.asarray, lambda x: x.numpy(), jax.jit(lambda x: x.value())):
        np.testing.assert_array_equal(convert(mirrored), [1, 2])
    assert repr(mirrored) == (
        "Mirrored:{\n  0: Array([1., 2.], dtype=float32),\n  1: Array([1., 2.], dtype=float32)\n}"
    )
    np.testing.assert_array_equal(mirrored.values, [[1, 2], [1, 2]])
    np.testing.assert_array_equal(sum(mirrored.values), [2, 4])
    doubled = jax.tree.map(lambda x: x * 2, [mirrored])[0]
    assert isinstance(doubled, dist.Mirrored)
    for values in (doubled.values, strategy.run(lambda x: x * 2, (mirrored,)).values):
        np.testing.assert_array_equal(values, [[2, 4], [2, 4]])
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = mirrored.no_such_name
    with pytest.raises(TypeError, match="unhashable"):
        hash(mirrored)


def test_components_lie_on_the_devices_of_their_replicas(strategy_of):
    strategy = strategy_of(4)
    with strategy.scope():
        v = dist.Variable([0.0, 0.0])
    result = strategy.run(lambda: jnp.ones(2))
    updated = strategy.extended.update(v, lambda v: v.assign([1.0, 2.0]))
    broadcast = strategy.extended.broadcast_to(jnp.ones(2), v)

    for value in (result, updated, broadcast):
        assert [c.devices() for c in value.values] == [{d} for d in jax.devices()[:4]]
    assert result.values is result.values


# IndexedSlices


def test_indexed_slices():
    slices = dist.IndexedSlices(jnp.array([[1.0], [2.0], [3.0]]), jnp.array([0, 2, 0]), (3, 1))

    assert (slices.dtype, slices.shape) == (jnp.float32, (3, 1))
    np.testing.assert_array_equal(slices.to_dense(), [[4.0], [0.0], [2.0]])
    doubled = jax.tree.map(lambda x: x * 2, slices)
    assert isinstance(doubled, dist.IndexedSlices)
    assert doubled.dense_shape == (3, 1)
    assert repr(slices).startswith("IndexedSlices(values=Array([[1.]")
    with pytest.raises(ValueError, match=r"values has shape \(3, 1\) and indices \(2,\)"):
        dist.IndexedSlices(jnp.ones((3, 1)), jnp.array([0, 1]))
    with pytest.raises(ValueError, match=r"values has shape \(2, 1\) and indices \(2, 1\)"):
        dist.IndexedSlices(jnp.ones((2, 1)), jnp.zeros((2, 1), int))
    with pytest.raises(ValueError, match="dense_shape is None"):
        dist.IndexedSlices(jnp.ones((1, 1)), jnp.array([0])).to_dense()
