"""The API inside a step, and its misuse."""

import collections

import jax.numpy as jnp
import numpy as np
import pytest

import distributary as dist
from distributary.errors import ContextError


def _context():
    return dist.get_replica_context()


def _floats(per_replica):
    return [float(x) for x in per_replica.values]


# The default replica context


def test_default_replica_context():
    context = _context()

    assert context is _context()
    assert context.strategy is dist.get_strategy()
    assert context.num_replicas_in_sync == 1
    assert context.replica_id_in_sync_group == 0
    assert isinstance(context.replica_id_in_sync_group, int)
    assert "default strategy" in repr(context)
    assert context.devices == ("/job:localhost/replica:0/task:0/device:CPU:0",)
    replica_id = dist.get_strategy().run(lambda: _context().replica_id_in_sync_group)
    assert (int(replica_id), replica_id.dtype) == (0, jnp.int32)


def test_collectives_of_the_default_replica_context_give_the_value():
    context = _context()

    assert context.all_reduce("sum", 3.0) == 3.0
    assert context.all_reduce("sum", 3.0).dtype == jnp.float32
    assert context.all_reduce("MEAN", jnp.int32(3)).dtype == jnp.float32
    np.testing.assert_array_equal(context.all_gather([jnp.ones(2)], 0)[0], [1, 1])
    merged = context.merge_call(
        lambda strategy, x, y: (strategy, dist.in_cross_replica_context(), x, y), (4,), {"y": 5}
    )
    assert merged == (dist.get_strategy(), True, 4, 5)


# Inside a step


def test_replica_context_in_a_step(strategy):
    seen = []

    def step():
        context = _context()
        seen.append((context.devices, repr(context)))
        return context.replica_id_in_sync_group

    ids = strategy.run(step).values

    assert {i.dtype for i in ids} == {jnp.dtype("int32")}
    assert seen == [(strategy.extended.worker_devices, f"<ReplicaContext of {strategy!r}>")]


@pytest.mark.parametrize(
    "use",
    [
        lambda context: context.all_reduce("sum", 1.0),
        lambda context: context.all_gather(jnp.ones(1), 0),
        lambda context: context.merge_call(lambda strategy: None),
        lambda context: context.replica_id_in_sync_group,
    ],
    ids=["all_reduce", "all_gather", "merge_call", "replica_id_in_sync_group"],
)
def test_replica_context_is_refused_where_it_is_not_current(use, strategy_of, request):
    name = request.node.callspec.id
    strategy, other = strategy_of(2), strategy_of(4)
    kept = []
    strategy.run(lambda: kept.append(_context()))
    (stale,) = kept
    default = _context()

    def in_merge_call():
        context = _context()
        context.merge_call(lambda _: use(context))

    for call, where in (
        (lambda: use(stale), r"outside of Strategy\.run"),
        (lambda: strategy.run(lambda: use(stale)), r"inside Mirrored.*2 replicas\.run"),
        (lambda: other.run(lambda: use(stale)), r"inside Mirrored.*4 replicas\.run"),
        (lambda: strategy.run(in_merge_call), "in a cross-replica context"),
    ):
        with pytest.raises(ContextError, match=rf"{name}: this ReplicaContext of .*{where}"):
            call()
    with strategy.scope(), pytest.raises(ContextError, match="in a cross-replica context"):
        use(stale)
    if name != "replica_id_in_sync_group":  # which is 0 everywhere
        message = r"default strategy.*not the current"
        with strategy.scope(), pytest.raises(ContextError, match=message):
            use(default)
    assert stale.num_replicas_in_sync == 2
    assert stale.strategy is strategy


# merge_call


def test_merge_fn_runs_once_and_its_result_is_given_back(strategy_of):
    Pair = collections.namedtuple("Pair", "own shared")
    strategy = strategy_of(4)
    calls = []

    with strategy.scope():
        v = dist.Variable(1.0)

    def merge_fn(merged_strategy, x, *variables, nest, number, text, nothing):
        calls.append((merged_strategy, number, text, nothing, type(x).__name__, type(nest["y"])))
        assert variables == (v, [v])
        total = merged_strategy.reduce("sum", x, axis=None)
        weighted = sum((i + 1) * component for i, component in enumerate(x.values))
        mean = merged_strategy.reduce("mean", nest["y"], axis=None)
        return {"pair": Pair(x, 3.0), "text": "a", "none": None, "list": [total, weighted, mean]}

    def step():
        replica_id = _context().replica_id_in_sync_group
        result = _context().merge_call(
            merge_fn,
            (replica_id, v, [v]),
            {"nest": {"y": replica_id * 2.0}, "number": 5, "text": "a", "nothing": None},
        )
        assert isinstance(result["pair"], Pair)
        assert (result["text"], result["none"], result["pair"].shared) == ("a", None, 3.0)
        return result["pair"].own, *result["list"]

    results = strategy.run(step)

    assert calls == [(strategy, 5, "a", None, "PerReplica", dist.PerReplica)]
    weighted = 0 * 1 + 1 * 2 + 2 * 3 + 3 * 4
    expected = [0, 1, 2, 3], [6] * 4, [weighted] * 4, [3] * 4
    assert [_floats(result) for result in results] == list(expected)


def test_run_and_update_in_a_merge_fn(strategy):
    with strategy.scope():
        v = dist.Variable(1.0)

    def merge_fn(merged, x):
        plus_id = merged.run(lambda y: y + _context().replica_id_in_sync_group, (x,))
        total = merged.reduce("sum", plus_id, axis=None)
        merged.extended.update(v, lambda v, t: v.assign_add(t), (total,))
        return total

    def step():
        return _context().merge_call(merge_fn, (_context().replica_id_in_sync_group * 10.0,))

    assert _floats(strategy.run(step)) == [11.0, 11.0]
    assert v.numpy() == 12.0


@pytest.mark.parametrize("args", [3, "text", {"x": 1}, jnp.ones(2), None], ids=repr)
def test_arguments_of_a_merge_call_are_a_list_or_tuple(args, strategy_of):
    with pytest.raises(TypeError, match=r"merge_call: args is .*expected a list or tuple"):
        strategy_of(2).run(lambda: _context().merge_call(lambda *_: None, args))
