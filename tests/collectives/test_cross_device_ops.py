"""The chosen algorithm is the one that is compiled; all give the same numbers and gradients."""

import math
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distributary as dist
from distributary.tools.compilation import collectives_of
from distributary.variables._reductions import reduce_arrays

_SHAPES = [(3,), (4, 2), (), (17,)]


def _strategy(num_replicas, ops=None):
    return dist.MirroredStrategy([f"CPU:{i}" for i in range(num_replicas)], ops)


def _inputs(strategy):
    return [
        strategy.experimental_distribute_values_from_function(
            lambda context, shape=shape: np.full(
                shape, 1.0 + context.replica_id_in_sync_group, np.float32
            )
        )
        for shape in _SHAPES
    ]


def _step(options=None):
    def step(*values):
        # Multiplied, so that no collective is of a constant.
        return dist.get_replica_context().all_reduce(
            "sum", [value * 2.0 for value in values], options
        )

    return step


def _collectives(text):
    """Names and replica groups of the collectives of a compiled program."""
    return [(collective.kind, collective.groups) for collective in collectives_of(text)]


def _compiled(strategy, options=None):
    text = strategy.extended.lower(_step(options), _inputs(strategy)).compile().as_text()
    return _collectives(text)


ALGORITHMS = {
    "default": (None, None),
    "two packs": (lambda: dist.NcclAllReduce(num_packs=2), None),
    "no packing": (lambda: dist.NcclAllReduce(num_packs=0), None),
    "hierarchical": (lambda: dist.HierarchicalCopyAllReduce(), None),
    "one device": (lambda: dist.ReductionToOneDevice(), None),
    "ring": (None, dist.experimental.CommunicationOptions(implementation="ring")),
    "by bytes": (None, dist.experimental.CommunicationOptions(bytes_per_pack=40)),
}


# Algorithms work in rings or levels of replicas, or all at once: with few, odd and many of them.
@pytest.mark.parametrize("num_replicas", [3, 8])
@pytest.mark.parametrize("name", ["two packs", "hierarchical", "ring", "one device"])
def test_every_algorithm_sums_and_averages(name, num_replicas):
    make_ops, options = ALGORITHMS[name]
    strategy = _strategy(num_replicas, make_ops and make_ops())
    total = num_replicas * (num_replicas + 1) / 2

    def step(*values):
        context = dist.get_replica_context()
        return (
            context.all_reduce("SUM", list(values), options),
            context.all_reduce("MEAN", list(values), options),
        )

    sums, means = strategy.run(step, args=_inputs(strategy))

    for shape, summed, mean in zip(_SHAPES, sums, means, strict=True):
        for copy in summed.values:
            np.testing.assert_allclose(copy, np.full(shape, total), rtol=1e-6)
        for copy in mean.values:
            np.testing.assert_allclose(copy, np.full(shape, total / num_replicas), rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("default", ["all-reduce"]),
        ("two packs", ["all-reduce"] * 2),
        ("no packing", ["all-reduce"] * 4),
        ("by bytes", ["all-reduce"] * 2),
        ("one device", ["all-gather"]),
        # The scalar is too small to be scattered.
        ("ring", ["all-gather", "all-reduce", "reduce-scatter"]),
    ],
)
def test_the_algorithm_decides_the_compiled_collectives(name, expected):
    make_ops, options = ALGORITHMS[name]
    strategy = _strategy(4, make_ops and make_ops())

    found = [kind for kind, _ in _compiled(strategy, options)]

    if name in ("one device", "ring"):  # XLA may combine what it gathers and scatters
        assert set(found) == set(expected)
        assert found.count("all-reduce") == expected.count("all-reduce")
    else:
        assert found == expected


@pytest.mark.parametrize("name", ["no packing", "by bytes"])
def test_what_is_last_travels_first(name):
    make_ops, options = ALGORITHMS[name]
    strategy = _strategy(2, make_ops and make_ops())

    text = strategy.extended.lower(_step(options), _inputs(strategy)).as_text()

    shapes = re.findall(r"\}\) : \(tensor<((?:\d+x)*)f32>\) -> ", text)
    assert [math.prod(map(int, shape.split("x")[:-1])) for shape in shapes] == [17, 1, 8, 3]


@pytest.mark.parametrize("name", ["default", "hierarchical", "one device"])
def test_nothing_is_summed(name):
    make_ops, _ = ALGORITHMS[name]
    strategy = _strategy(4, make_ops and make_ops())
    value = dist.PerReplica([np.zeros((0, 2), np.float32)] * 4)

    assert strategy.reduce("SUM", value, axis=None).shape == (0, 2)


def test_hierarchical_reduces_inside_groups_and_then_across():
    assert "hierarchical" in repr(_strategy(2, dist.HierarchicalCopyAllReduce()))
    assert "replica order" in repr(_strategy(2, dist.ReductionToOneDevice()))

    found = _compiled(_strategy(4, dist.HierarchicalCopyAllReduce()))

    assert found == [
        ("reduce-scatter", ((0, 1), (2, 3))),
        ("all-reduce", ((0, 2), (1, 3))),
        ("all-gather", ((0, 1), (2, 3))),
    ]
    assert [groups for _, groups in _compiled(_strategy(3, dist.HierarchicalCopyAllReduce()))] == [
        ((0, 1, 2),)
    ]


@pytest.mark.parametrize("num_packs", [-1, 1.5, True])
def test_wrong_numbers_of_packs_are_refused(num_packs):
    with pytest.raises(ValueError, match=f"num_packs is {num_packs}"):
        dist.NcclAllReduce(num_packs=num_packs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bytes_per_pack": -1}, "bytes_per_pack is -1"),
        ({"timeout_seconds": -2.0}, "timeout_seconds is -2.0"),
        ({"heartbeat_timeout_seconds": 2}, "heartbeat_timeout_seconds is 2"),
        ({"heartbeat_timeout_seconds": float("nan")}, "heartbeat_timeout_seconds is nan"),
        ({"implementation": "carrier pigeon"}, "carrier pigeon"),
        (
            {"implementation": "ring", "hierarchical": True},
            "hierarchical=True does not work with .*'RING'",
        ),
    ],
)
def test_communication_options_check_themselves(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        dist.experimental.CommunicationOptions(**options)


def test_merged_options_take_what_was_set():
    options = dist.experimental.CommunicationOptions
    first = options(bytes_per_pack=5, timeout_seconds=3.0)

    merged = first.merge(options(implementation="NCCL", timeout_seconds=4.0))

    assert merged == options(5, 4.0, dist.experimental.CommunicationImplementation.NCCL)
    assert first.merge(None) is first


@pytest.mark.parametrize(
    ("platform", "chosen", "has_levels"),
    [
        ("tpu", None, True),
        ("tpu", False, False),
        ("tpu", True, True),
        ("gpu", None, False),
        ("gpu", True, True),
    ],
)
def test_slices_of_tpus_are_reduced_inside_first_unless_told_otherwise(
    platform, chosen, has_levels
):
    devices = [SimpleNamespace(platform=platform, slice_index=i // 2) for i in range(4)]
    options = dist.experimental.CommunicationOptions(hierarchical=chosen)

    described = dist.NcclAllReduce().for_devices(devices).describe(platform, 2, options)

    assert ("reduce-scatter in groups of 2" in described) == has_levels


def test_equal_steps_of_two_strategies_use_each_its_own_algorithm():
    # A nested jit is cached by JAX across the two.
    @jax.jit
    def helper(value):
        return dist.get_replica_context().all_reduce("sum", value)

    def step(value):
        return helper(value * 2.0)

    kinds = []
    for ops in (None, dist.ReductionToOneDevice()):
        strategy = _strategy(2, ops)
        text = strategy.extended.lower(step, _inputs(strategy)[:1]).compile().as_text()
        kinds.append({kind for kind, _ in _collectives(text)})

    assert kinds == [{"all-reduce"}, {"all-gather"}]


def test_all_gradients_of_a_step_travel_in_one_all_reduce():
    strategy = _strategy(4)
    with strategy.scope():
        variables = [dist.Variable(jnp.ones(shape)) for shape in _SHAPES]

    def step(x):
        def loss_fn():
            return sum(jnp.sum(v * x) for v in variables)

        loss, gradients = dist.value_and_grad(loss_fn, variables)()
        gradients, loss = dist.get_replica_context().all_reduce("sum", (gradients, loss))
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign_sub(0.1 * gradient)
        return loss

    x = strategy.experimental_distribute_values_from_function(
        lambda context: np.float32(context.replica_id_in_sync_group)
    )
    text = strategy.extended.lower(step, (x,)).compile().as_text()

    assert [kind for kind, _ in _collectives(text)] == ["all-reduce"]


_EVERY_KIND = pytest.mark.parametrize(
    "name", ["default", "hierarchical", "one device", "ring", "by bytes"]
)


@_EVERY_KIND
def test_gradients_go_through_and_reduced_values_may_be_assigned(name):
    # The analysis of what can differ between replicas must see that all of them agree.
    make_ops, options = ALGORITHMS[name]
    strategy = _strategy(4, make_ops and make_ops())
    with strategy.scope():
        variables = [dist.Variable(jnp.zeros(12)), dist.Variable(1.0)]

    def step(x):
        context = dist.get_replica_context()
        totals = context.all_reduce("SUM", [x, jnp.sum(x)], options)
        for variable, total in zip(variables, totals, strict=True):
            variable.assign_add(total)

        def loss(x):
            a, b = context.all_reduce("SUM", [x, 2.0 * x], options)
            return jnp.sum(a * b)

        return jax.grad(loss)(x)

    rows = np.arange(48, dtype=np.float32).reshape(4, 12)
    results = strategy.run(step, (dist.PerReplica(list(rows)),)).values

    np.testing.assert_allclose(variables[0].numpy(), rows.sum(0))
    assert variables[1].numpy() == 1 + rows.sum()
    # Every replica's loss is 2 * total², and each of the four counts.
    for result in results:
        np.testing.assert_allclose(result, 16.0 * rows.sum(0), rtol=1e-6)


@_EVERY_KIND
def test_uneven_batches(name):
    make_ops, options = ALGORITHMS[name]
    strategy = _strategy(4, make_ops and make_ops())

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


def test_a_subclass_may_use_collectives_on_its_own_component():
    class LargestOfAll(dist.CrossDeviceOps):
        def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
            return jax.lax.pmax(per_replica_value.payload, "replica")

    strategy = _strategy(2, LargestOfAll())
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

    strategy = _strategy(2, Counting())

    def step(x):
        context = dist.get_replica_context()
        return context.all_reduce(
            "MEAN", {"a": x, "b": x * 2}, dist.experimental.CommunicationOptions(bytes_per_pack=3)
        )

    result = strategy.run(step, (dist.PerReplica([1.0, 2.0]),))

    assert result["b"].values == (6.0, 6.0)
    assert calls == [(dist.ReduceOp.MEAN, 2, 3)]


def test_accumulation_function_gets_the_replicas_in_order():
    def first_minus_the_rest(parts):
        return parts[0] - parts[1] - parts[2]

    ops = dist.ReductionToOneDevice(accumulation_fn=first_minus_the_rest)
    strategy = _strategy(3, ops)

    result = strategy.run(
        lambda x: dist.get_replica_context().all_reduce("SUM", x),
        (dist.PerReplica([10.0, 2.0, 3.0]),),
    )

    assert result.values == (5.0, 5.0, 5.0)
    with pytest.raises(TypeError, match="accumulation_fn is 3, expected a function"):
        dist.ReductionToOneDevice(accumulation_fn=3)
