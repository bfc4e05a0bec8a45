"""Checkpoint: everything comes back, onto any number of replicas, or nothing does."""

import random
from dataclasses import dataclass
from typing import Any, NamedTuple

import google_crc32c
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distributary as dist
from distributary.checkpoint import Checkpoint, list_variables
from distributary.data import Dataset

ON_READ = dist.VariableSynchronization.ON_READ
Aggregation = dist.VariableAggregation


class _Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class _State:
    step: int
    weights: Any


@dataclass(frozen=True)
class _Frozen:
    rate: float
    slots: tuple[Any, ...]


def _of_replicas(strategy, value, **kwargs):
    """An ON_READ variable in which replica i holds `value + i`."""
    with strategy.scope():
        v = dist.Variable(value, synchronization=ON_READ, **kwargs)
    strategy.run(lambda: v.assign(v + dist.get_replica_context().replica_id_in_sync_group))
    return v


def test_everything_comes_back(strategy_of, tmp_path):
    def objects(seed):
        rng = np.random.default_rng(seed)
        with strategy_of(2).scope():
            mirrored = dist.Variable(rng.normal(size=(3, 4)).astype(np.float32))
            half = dist.Variable(jnp.full((2,), seed, jnp.bfloat16))
            flags = dist.Variable(rng.integers(0, 2, 5).astype(bool))
            empty = dist.Variable(jnp.zeros((0, 3)))
        return {
            "nest": {"mirrored": mirrored, "a/b": [half, (flags, empty)], "none": None},
            "plain": dist.Variable(jnp.int32(seed)),
            "epoch": seed,
            "rate": 0.1 + seed if seed else float("nan"),
            "label": f"run {seed}",
            "done": bool(seed),
            "pair": _Pair(jnp.arange(3) + seed, np.float64(seed)),
            "state": _State(seed, rng.normal(size=4)),
            "frozen": _Frozen(seed / 2, (seed, np.ones(2, np.complex64) * seed)),
            "key": jax.random.key(seed),
            "generators": [rng, np.random.Generator(np.random.MT19937(seed)), random.Random(seed)],
        }

    saved, other = objects(3), objects(0)
    array = other["state"].weights
    path = Checkpoint(**saved).save(tmp_path / "new" / "ckpt")
    checkpoint = Checkpoint(**other)

    checkpoint.restore(path)

    assert path == str(tmp_path / "new" / "ckpt-1")
    for name, expected in saved.items():
        got = getattr(checkpoint, name)
        if name == "generators":
            got, expected = ([g.random() for g in all_of] for all_of in (got, expected))
        assert type(got) is type(expected)
        if name == "key":
            got, expected = jax.random.key_data(got), jax.random.key_data(expected)
        for a, b in zip(_leaves(got), _leaves(expected), strict=True):
            assert np.asarray(a).dtype == np.asarray(b).dtype
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=name)
    assert checkpoint.nest is other["nest"]
    assert checkpoint.state.weights is array  # NumPy arrays are filled in place
    assert checkpoint.save_counter == 1


def _leaves(value):
    if isinstance(value, (_State, _Frozen)):
        value = vars(value)
    return jax.tree.leaves(value, is_leaf=lambda leaf: isinstance(leaf, dist.Variable))


@pytest.mark.parametrize(("here", "there"), [(2, 2), (3, 2)])
def test_values_of_replicas_keep_what_they_add_up_to(here, there, strategy_of, tmp_path):
    aggregations = [Aggregation.SUM, Aggregation.MEAN, Aggregation.ONLY_FIRST_REPLICA]

    def variables(num_replicas, start):
        strategy = strategy_of(num_replicas)
        of = [_of_replicas(strategy, start, aggregation=a) for a in aggregations]
        return [*of, _of_replicas(strategy, np.int32([7, -8]), aggregation=Aggregation.SUM)]

    def check(restored):
        for aggregation, old, new in zip([*aggregations, None], saved, restored, strict=True):
            # The mean of three equal numbers is rounded.
            tolerance = 1e-6 if aggregation is Aggregation.MEAN else 0
            np.testing.assert_allclose(old.numpy(), new.numpy(), rtol=tolerance)

    saved = variables(here, np.float32([0.1, 0.7]))
    path = Checkpoint(v=saved).save(tmp_path / "ckpt")
    restored = variables(there, np.float32([5, 6]))

    Checkpoint(v=restored).restore(path)

    check(restored)
    for old, new in zip(saved, restored, strict=True):
        if here == there:
            for a, b in zip(old.values, new.values, strict=True):
                np.testing.assert_array_equal(a.numpy(), b.numpy())
    # Onto variables that have one value, and from there.
    with dist.OneDeviceStrategy("CPU:1").scope():
        plain = [dist.Variable(np.zeros_like(v.numpy())) for v in saved]
    Checkpoint(v=plain).restore(path)
    check(plain)
    restored = variables(there, np.float32([5, 6]))
    Checkpoint(v=restored).restore(Checkpoint(v=plain).save(tmp_path / "plain"))
    check(restored)


def test_values_without_an_aggregation_need_as_many_replicas(strategy_of, tmp_path):
    path = Checkpoint(v=_of_replicas(strategy_of(2), 1.0)).save(tmp_path / "ckpt")
    same, other = _of_replicas(strategy_of(2), 5.0), _of_replicas(strategy_of(3), 5.0)

    Checkpoint(v=same).restore(path)
    with pytest.raises(ValueError, match="v holds a value for each of 2 replicas and aggregation"):
        Checkpoint(v=other).restore(path)

    assert [float(v.numpy()) for v in same.values] == [1, 2]
    assert [float(v.numpy()) for v in other.values] == [5, 6, 7]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(extra=1, more=[2.0]), "Not in the checkpoint: extra, more/0.\n"),
        (dict(w=np.zeros(2)), "w has dtype float32, and here float64"),
        (dict(w=np.zeros(3, np.float32)), r"w has shape \(2,\), and here \(3,\)"),
        (dict(epoch=1.5), "epoch is of type int, and here of type float"),
        (dict(epoch=np.zeros(2)), "epoch is of type int, and here it is an array"),
        (dict(epoch={"a": 1}), "Not in the checkpoint: epoch/a.\nOnly in the checkpoint: epoch."),
        (dict(it=4), "it is the state of an object, and here of type int"),
        (dict(it=iter(Dataset.range(5))), "the state belongs to another dataset"),
    ],
)
def test_what_does_not_fit_changes_nothing(change, message, tmp_path):
    def objects(start):
        it = iter(Dataset.range(10))
        for _ in range(start):
            next(it)
        w = dist.Variable(np.full(2, start, np.float32))
        return dict(first=iter(Dataset.range(start and 3)), w=w, epoch=start, it=it)

    def with_first_moved(objects):
        objects["first"] = iter(Dataset.range(3))
        next(objects["first"])
        return objects

    path = Checkpoint(**with_first_moved(objects(4))).save(tmp_path / "ckpt")
    here = with_first_moved(objects(2))
    next(here["first"])
    before = [here["w"].numpy().tolist(), here["it"].get_state(), here["first"].get_state()]
    checkpoint = Checkpoint(**here | change)

    with pytest.raises(ValueError, match=message):
        checkpoint.restore(path)

    after = [here["w"].numpy().tolist(), here["it"].get_state(), here["first"].get_state()]
    assert after == before
    if "epoch" not in change:
        assert checkpoint.epoch == 2


def test_what_was_restored_can_be_asked_as_in_tensorflow(tmp_path, caplog):
    checkpoint = Checkpoint(a=1, b={"c": 2})
    with pytest.raises(ValueError, match=r"restore\(None\) has restored nothing"):
        checkpoint.restore(None).expect_partial().assert_consumed()
    path = checkpoint.save(tmp_path / "ckpt")
    checkpoint.restore(path).assert_consumed().assert_existing_objects_matched()

    # Objects that only the checkpoint has are left alone.
    status = Checkpoint(a=0).restore(path)

    assert "also holds b, which this Checkpoint does not have" in caplog.text
    status.assert_existing_objects_matched()
    with pytest.raises(ValueError, match="Only in the checkpoint: b/c"):
        status.assert_consumed()
    with pytest.raises(ValueError, match="Not in the checkpoint: d"):
        Checkpoint(a=0, d=3).restore(path)


def test_partial_restores_what_is_in_both(tmp_path):
    path = Checkpoint(a=1, b=2).save(tmp_path / "ckpt")
    other = Checkpoint(b=0, c=3)

    status = other.restore(path, partial=True)

    assert (other.b, other.c) == (2, 3)
    with pytest.raises(ValueError, match=r"in part.\nNot in the checkpoint: c.\nOnly .*: a\.$"):
        status.assert_consumed()
    with pytest.raises(ValueError, match=r"in part.\nNot in the checkpoint: c\.$"):
        status.expect_partial().assert_existing_objects_matched()
    Checkpoint(b=0).restore(path, partial=True).assert_existing_objects_matched()
    with pytest.raises(ValueError, match="b is of type int, and here of type str"):
        Checkpoint(b="x").restore(path, partial=True)


@pytest.mark.parametrize("there", [1, 4])
def test_datasets_go_on_where_they_were(there, strategy_of, tmp_path):
    def checkpoint(num_replicas):
        strategy = strategy_of(num_replicas)
        data = Dataset.range(40).shuffle(40, seed=1).batch(4).repeat()
        batches = iter(strategy.experimental_distribute_dataset(data))
        return Checkpoint(batches=batches, own=iter(Dataset.range(9))), strategy

    def rows(checkpoint, strategy, num_steps):
        taken = [strategy.gather(next(checkpoint.batches), axis=0) for _ in range(num_steps)]
        return np.concatenate(taken).tolist(), int(next(checkpoint.own))

    first, strategy = checkpoint(2)
    rows(first, strategy, 13)
    path = first.save(tmp_path / "ckpt")
    second, other_strategy = checkpoint(there)

    second.restore(path)

    assert rows(second, other_strategy, 9) == rows(first, strategy, 9)
    for one in (first, second):
        one.batches.close()


def test_objects_found_twice_are_saved_once(tmp_path):
    shared = dist.Variable(1.0)
    path = Checkpoint(list=[shared, shared], shared=shared).save(tmp_path / "ckpt")

    assert list_variables(path) == [("shared", [])]


def test_writing_again_replaces(tmp_path):
    checkpoint = Checkpoint(step=1)
    checkpoint.write(tmp_path / "ckpt")
    checkpoint.step = 2
    checkpoint.write(tmp_path / "ckpt")
    checkpoint.step = 3

    checkpoint.restore(tmp_path / "ckpt")

    assert checkpoint.step == 2
    assert [entry.name for entry in tmp_path.glob("[!.]*")] == ["ckpt"]
    checkpoint.restore(None)  # a new training


def test_objects_that_cannot_be_saved_are_named(strategy_of, tmp_path):
    with pytest.raises(TypeError, match=r"'a/b/0' is an object, which cannot be saved"):
        Checkpoint(a={"b": [object()]})
    with pytest.raises(ValueError, match="'save' is a name of Checkpoint itself"):
        Checkpoint(save=1)
    with pytest.raises(NotImplementedError, match="Values of replicas are results, not state"):
        Checkpoint(a=strategy_of(2).run(lambda: jnp.ones(2)))
    with pytest.raises(TypeError, match="the array 'a' has dtype <U1"):
        Checkpoint(a=np.array(["x"])).save(tmp_path / "ckpt")
    with pytest.raises(AttributeError, match="has no 'b'; it holds a"):
        _ = Checkpoint(a=1).b
    with pytest.raises(RuntimeError, match=r"inside Strategy\.run"):
        strategy_of(2).run(lambda: Checkpoint(a=1).save(tmp_path / "ckpt"))


def test_a_format_of_a_later_version_is_named(tmp_path):
    checkpoint = Checkpoint(a=1, b=np.arange(1000.0))
    path = checkpoint.save(tmp_path / "ckpt")
    index = tmp_path / "ckpt-1" / "checkpoint.json"
    text = index.read_text(encoding="utf-8")

    checked, mark, _ = text.replace('"format": 3', '"format": 4').partition('"crc32c": "')
    checksum = google_crc32c.value((checked + mark).encode())
    index.write_text(f'{checked}{mark}{checksum:08x}"\n}}', encoding="utf-8")
    with pytest.raises(OSError, match="has format 4, and this version of distributary reads"):
        checkpoint.restore(path)
