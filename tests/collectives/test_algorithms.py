"""Every algorithm beyond its sum: gradients, uneven batches, results that replicas agree on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distributary as dist
from distributary.variables import reduce_arrays

OPTIONS = dist.experimental.CommunicationOptions
ALGORITHMS = {
    "one pack": (dist.NcclAllReduce(), None),
    "hierarchical": (dist.HierarchicalCopyAllReduce(), None),
    "one device": (dist.ReductionToOneDevice(), None),
    "ring": (None, OPTIONS(implementation="RING")),
    "by bytes": (None, OPTIONS(bytes_per_pack=8)),
}


@pytest.fixture(params=ALGORITHMS)
def algorithm(request):
    """A strategy of 4 replicas and the options that make it use the algorithm."""
    ops, options = ALGORITHMS[request.param]
    return dist.MirroredStrategy([f"CPU:{i}" for i in range(4)], ops), options


def test_gradients_go_through_and_reduced_values_may_be_assigned(algorithm):
    # The analysis of what can differ between replicas must see that all of them agree.
    strategy, options = algorithm
    with strategy.scope():
        variables = [dist.Variable(jnp.zeros(6)), dist.Variable(1.0)]

    def step(x):
        context = dist.get_replica_context()
        totals = context.all_reduce("SUM", [x, jnp.sum(x)], options)
        for variable, total in zip(variables, totals, strict=True):
            variable.assign_add(total)

        def loss(x):
            a, b = context.all_reduce("SUM", [x, 2.0 * x], options)
            return jnp.sum(a * b)

        return jax.grad(loss)(x)

    rows = np.arange(24, dtype=np.float32).reshape(4, 6)
    results = strategy.run(step, (dist.PerReplica(list(rows)),)).values

    np.testing.assert_allclose(variables[0].numpy(), rows.sum(0))
    assert variables[1].numpy() == 1 + rows.sum()
    # Every replica's loss is 2 * total², and each of the four counts.
    for result in results:
        np.testing.assert_allclose(result, 16.0 * rows.sum(0), rtol=1e-6)


def test_uneven_batches(algorithm):
    strategy, options = algorithm

    def step(x):
        return dist.get_replica_context().all_reduce("MEAN", [jnp.sum(x), jnp.max(x) ** 2], options)

    parts = [np.arange(n, dtype=np.float32) + 1 for n in (3, 2, 2, 1)]
    result = strategy.run(step, (dist.PerReplica(parts),))

    for copy in result[0].values:
        assert copy == (6 + 3 + 3 + 1) / 4
    assert result[1].values[2] == (9 + 4 + 4 + 1) / 4


def test_mean_of_many_small_integers():
    # 20 replicas are more than the tests have devices: the sums are taken here.
    num_replicas, value = 20, 119

    def add(parts):
        return [(part.astype(jnp.int32) * num_replicas).astype(part.dtype) for part in parts]

    (mean,) = reduce_arrays(dist.ReduceOp.MEAN, [jnp.int8(value)], num_replicas, add)

    assert mean == value


def test_a_subclass_may_use_collectives_on_its_own_component(strategy_of):
    class LargestOfAll(dist.CrossDeviceOps):
        def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
            return jax.lax.pmax(per_replica_value.payload, "replica")

    strategy = dist.MirroredStrategy(["CPU:0", "CPU:1"], LargestOfAll())
    with strategy.scope():
        v = dist.Variable(0.0)

    def step(x):
        largest = dist.get_replica_context().all_reduce("SUM", [x, -x])
        v.assign(largest[0])
        return largest

    result = strategy.run(step, (dist.PerReplica([1.0, 3.0]),))

    assert [r.values[0] for r in result] == [3.0, -1.0]
    assert v.numpy() == 3.0
    assert strategy.reduce("SUM", dist.PerReplica([1.0, 3.0]), axis=None) == 3.0
    with pytest.raises(TypeError, match="abstract class CrossDeviceOps"):
        dist.CrossDeviceOps()


def test_a_subclass_may_combine_all_values_of_a_call_itself():
    calls = []

    class Counting(dist.CrossDeviceOps):
        def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
            raise AssertionError("not used")

        def batch_reduce_implementation(self, reduce_op, value_destination_pairs, options):
            calls.append((reduce_op, len(value_destination_pairs), options.bytes_per_pack))
            return [dist.Mirrored(sum(value.values), 2) for value, _ in value_destination_pairs]

    strategy = dist.MirroredStrategy(["CPU:0", "CPU:1"], Counting())

    def step(x):
        context = dist.get_replica_context()
        return context.all_reduce("MEAN", {"a": x, "b": x * 2}, OPTIONS(bytes_per_pack=3))

    result = strategy.run(step, (dist.PerReplica([1.0, 2.0]),))

    assert result["b"].values == (6.0, 6.0)
    assert calls == [(dist.ReduceOp.MEAN, 2, 3)]


def test_accumulation_function_gets_the_replicas_in_order(strategy_of):
    def first_minus_the_rest(parts):
        return parts[0] - parts[1] - parts[2]

    ops = dist.ReductionToOneDevice(accumulation_fn=first_minus_the_rest)
    strategy = dist.MirroredStrategy([f"CPU:{i}" for i in range(3)], ops)

    result = strategy.run(
        lambda x: dist.get_replica_context().all_reduce("SUM", x),
        (dist.PerReplica([10.0, 2.0, 3.0]),),
    )

    assert result.values == (5.0, 5.0, 5.0)
    with pytest.raises(TypeError, match="accumulation_fn is 3, expected a function"):
        dist.ReductionToOneDevice(accumulation_fn=3)
