"""How the replicas' results become one value, and how arguments reach the replicas."""

import collections
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distributary as dist
from distributary.errors import InvalidTypeError, ReplicaMismatchError


class Pair(NamedTuple):
    x: object
    y: object


def _replica_id():
    return dist.get_replica_context().replica_id_in_sync_group


def _plain(value):
    """The same nest with a list of numbers in the place of every `PerReplica`."""
    if isinstance(value, dist.PerReplica):
        return [np.asarray(c).tolist() for c in value.values]
    return np.asarray(value).tolist() if isinstance(value, jax.Array) else value


def _map(tree):
    return jax.tree.map(_plain, tree, is_leaf=lambda x: isinstance(x, dist.PerReplica))


# What a step returns -> with two replicas, with one replica.
RESULTS = {
    "none": (lambda: None, None, None),
    "int": (lambda: 5, 5, 5),
    "text": (lambda: "a", "a", "a"),
    "array": (_replica_id, [0, 1], 0),
    "constant array": (lambda: jnp.float32(3), [3.0, 3.0], 3.0),
    "NumPy array": (lambda: np.arange(2), [[0, 1], [0, 1]], [0, 1]),
    "empty nests": (lambda: ([], {}, ()), ([], {}, ()), ([], {}, ())),
    "tuple": (lambda: (_replica_id(), None, 5), ([0, 1], None, 5), (0, None, 5)),
    "list": (lambda: [_replica_id(), {"a": 1}], [[0, 1], {"a": 1}], [0, {"a": 1}]),
    "namedtuple": (lambda: Pair(_replica_id(), None), Pair([0, 1], None), Pair(0, None)),
    "OrderedDict": (
        lambda: collections.OrderedDict(b=_replica_id(), a=1),
        collections.OrderedDict(b=[0, 1], a=1),
        collections.OrderedDict(b=0, a=1),
    ),
    "defaultdict": (
        lambda: collections.defaultdict(list, {"b": _replica_id()}),
        collections.defaultdict(list, {"b": [0, 1]}),
        collections.defaultdict(list, {"b": 0}),
    ),
}


@pytest.mark.parametrize(("step", "expected", "expected_alone"), RESULTS.values(), ids=RESULTS)
def test_results_are_merged_leaf_by_leaf(step, expected, expected_alone, strategy_of):
    two, one = strategy_of(2).run(step), dist.OneDeviceStrategy("CPU:0").run(step)
    both = dist.function(lambda: strategy_of(2).run(step))()

    for result, should_be in ((two, expected), (one, expected_alone), (both, expected)):
        assert _map(result) == should_be
        assert type(result) is type(should_be) or isinstance(result, (dist.PerReplica, jax.Array))


def test_returned_variables_and_slices(strategy, variable):
    v = variable(1.0)
    rows = lambda: dist.IndexedSlices(jnp.ones((1, 2)) * _replica_id(), jnp.array([3]), (5, 2))

    result = strategy.run(lambda x: {"v": v, "argument": x, "slices": rows()}, (v,))

    assert result["v"] is result["argument"] is v
    slices = result["slices"].values
    assert all(isinstance(c, dist.IndexedSlices) for c in slices)
    assert [float(c.values[0, 0]) for c in slices] == [0.0, 1.0]
    assert [c.dense_shape for c in slices] == [(5, 2)] * 2


@pytest.mark.parametrize(
    ("result", "named"),
    [({1, 2}, "a set"), (object(), "an object"), (range(3), "a range"), (Pair, "a type")],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_result_that_is_no_array_is_refused(result, named, strategy):
    def step():
        return [jnp.ones(1), result]

    for call, what in (
        (lambda: strategy.run(step), r"Strategy.run\(step\)"),
        (dist.function(step), "distributary.function"),
    ):
        with pytest.raises(InvalidTypeError, match=rf"{what}: the function returned .*{named}"):
            call()


def test_keys_that_cannot_be_sorted_are_refused_in_results_and_values(strategy):
    nest = {1: dist.PerReplica([1.0, 2.0]), "b": 0.0}

    def step():
        return [{1: jnp.ones(()), "b": jnp.ones(())}]

    for call in (
        lambda: strategy.run(step),
        dist.function(step),
        lambda: strategy.reduce("SUM", nest, axis=None),
        lambda: strategy.experimental_local_results(nest),
    ):
        with pytest.raises(InvalidTypeError, match=r"keys \[1, 'b'\], which JAX cannot sort"):
            call()


# Arguments


def test_every_replica_receives_its_component(strategy):
    nest = {
        "components": dist.PerReplica([np.float32(1), np.float32(2)]),
        "numbers": dist.PerReplica([1, 2]),
        "arrays": dist.PerReplica([jnp.ones(2), 2 * jnp.ones(2)]),
        "nests": dist.PerReplica([Pair(1.0, [2]), Pair(3.0, [4])]),
        "of a run": strategy.run(_replica_id),
        "of a function": strategy.experimental_distribute_values_from_function(
            lambda c: c.replica_id_in_sync_group * 1.0
        ),
        "on other devices": dist.PerReplica(
            [jax.device_put(np.float32(i), jax.devices()[5 + i]) for i in range(2)]
        ),
        "shared": 3,
        "none": None,
        "text": "a",
    }
    seen = {}

    def step(args, *, keyword):
        seen.update(args)
        assert isinstance(args["nests"], Pair)
        return {**args}, keyword

    for run in (strategy.run, dist.function(lambda *a, **k: strategy.run(*a, **k))):
        result, keyword = run(step, (nest,), {"keyword": dist.PerReplica([1, 2])})

        assert (seen["none"], seen["text"]) == (None, "a")
        for name in ("components", "numbers", "shared"):
            assert isinstance(seen[name], jax.Array), name
        assert _plain(keyword) == [1, 2]
        assert _map(result) == {
            "components": [1.0, 2.0],
            "numbers": [1, 2],
            "arrays": [[1, 1], [2, 2]],
            "nests": Pair([1.0, 3.0], [[2, 4]]),
            "of a run": [0, 1],
            "of a function": [0.0, 1.0],
            "on other devices": [0.0, 1.0],
            "shared": [3, 3],
            "none": None,
            "text": "a",
        }


def test_every_replica_receives_its_random_key(strategy):
    keys = jax.random.split(jax.random.key(3), 2)
    expected = [float(jax.random.uniform(key)) for key in keys]

    for devices in (jax.devices()[:1] * 2, jax.devices()[:2], jax.devices()[5:7]):
        given = dist.PerReplica([jax.device_put(k, d) for k, d in zip(keys, devices, strict=True)])
        drawn = strategy.run(jax.random.uniform, (given,))
        assert [float(number) for number in drawn.values] == expected


def _run(strategy, value):
    return strategy.run(lambda x: x, (value,))


def _reduce(strategy, value):
    return strategy.reduce("sum", value, axis=None)


@pytest.mark.parametrize("use", [_run, _reduce])
@pytest.mark.parametrize(
    ("components", "error", "message"),
    [
        ([{"a": 1}, {"b": 1}], ReplicaMismatchError, "replica 1 has structure .*replica 0"),
        ([[1], (1,)], ReplicaMismatchError, "replica 1 has structure"),
        ([jnp.ones(1), None], ReplicaMismatchError, "replica 1 has structure"),
        ([1, 2, 3], ReplicaMismatchError, "3 components.*2 replicas"),
        ([1, object()], InvalidTypeError, "replica 1 is an object"),
        ([np.array(["a"]), np.array(["b"])], InvalidTypeError, "dtype <U1"),
    ],
)
def test_components_that_do_not_agree_are_refused(components, error, message, use, strategy_of):
    with pytest.raises(error, match=message):
        use(strategy_of(2), dist.PerReplica(components))


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_keys_of_results_keep_their_order(num_replicas, strategy_of):
    strategy = strategy_of(num_replicas)
    one = jnp.float32(1)

    def step():
        return {"z": one, "a": (one, [{"q": one, "b": one}])}

    def orders(nest):
        return [*nest], [*nest["a"][1][0]]

    expected = ["z", "a"], ["q", "b"]
    found = strategy.run(step)
    assert orders(found) == expected
    assert orders(strategy.reduce("SUM", found, axis=None)) == expected
    assert all(orders(part) == expected for part in strategy.experimental_local_results(found))
    assert orders(dist.function(step)()) == expected
    assert float(strategy.reduce("SUM", found, axis=None)["a"][1][0]["q"]) == num_replicas
    (batch,) = strategy.experimental_distribute_dataset([np.arange(3, dtype=np.float32)])
    uneven = strategy.run(lambda x: {"z": x.sum(), "a": 1}, args=(batch,))
    assert [*uneven] == ["z", "a"]
