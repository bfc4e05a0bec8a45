"""State of a checkpoint that waits for objects that are not built yet."""

import keras
import numpy as np
import pytest

import distributary as dist
from distributary.checkpoint import Checkpoint

X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
Y = X.sum(axis=1, keepdims=True)


class _Net(keras.Model):
    """A model whose variables come with its first call."""

    def __init__(self, units=4, head=True):
        super().__init__()
        self.first = keras.layers.Dense(units, activation="tanh")
        self.norm = keras.layers.BatchNormalization()
        self.head = keras.layers.Dense(1) if head else None

    def call(self, x, training=False):
        x = self.norm(self.first(x), training=training)
        return x if self.head is None else self.head(x)


def _loop(strategy, make, wrap):
    with strategy.scope():
        model, optimizer = make(), wrap(keras.optimizers.Adam(0.1))

    def step(x, y):
        with dist.GradientTape() as tape:
            loss = keras.ops.sum((model(x, training=True) - y) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return model, optimizer, lambda: strategy.run(step, args=(X, Y))


def _assert_same_variables(one, other):
    assert len(one.variables) == len(other.variables) > 0
    for wanted, own in zip(one.variables, other.variables, strict=True):
        np.testing.assert_array_equal(np.asarray(own.value), np.asarray(wanted.value))


def _sequential():
    return keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(1)])


def _built():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])


@pytest.mark.parametrize(
    ("make", "wrap", "others", "unbuilt"),
    [
        (
            _Net,
            keras.optimizers.LossScaleOptimizer,
            {},
            r"model/dense/kernel.*\nNot built yet: model, optimizer\.",
        ),
        (_built, lambda x: x, {}, None),  # the optimizer is built for the model
        (_built, lambda x: x, {"critic": _built()}, r"optimizer/.*\nNot built yet: optimizer\."),
    ],
)
def test_a_loop_goes_on_where_it_was_although_not_all_is_built(
    make, wrap, others, unbuilt, strategy_of, tmp_path
):
    model, optimizer, train = _loop(strategy_of(2), make, wrap)
    for _ in range(2):
        train()
    path = Checkpoint(model=model, optimizer=optimizer, epoch=1, **others).write(tmp_path / "ckpt")
    train()
    for _ in range(2):
        other, other_optimizer, train_other = _loop(strategy_of(2), make, wrap)
        checkpoint = Checkpoint(model=other, optimizer=other_optimizer, epoch=0, **others)

        status = checkpoint.restore(path)

        assert checkpoint.epoch == 1
        assert int(other_optimizer.iterations.value) == 2
        assert other_optimizer.built == (unbuilt is None)
        status.assert_existing_objects_matched()
        if unbuilt is not None:
            with pytest.raises(ValueError, match=unbuilt):
                status.assert_consumed()
        # What still waits is saved again, under the names that it has in this checkpoint.
        nested = Checkpoint(all=[other, other_optimizer])
        nested.write(tmp_path / "nested")
        path = checkpoint.write(tmp_path / "again")
        train_other()
        status.assert_consumed()
        _assert_same_variables(model, other)
        _assert_same_variables(optimizer, other_optimizer)
    other, other_optimizer, train_other = _loop(strategy_of(2), make, wrap)
    Checkpoint(all=[other, other_optimizer]).restore(tmp_path / "nested")
    train_other()
    _assert_same_variables(optimizer, other_optimizer)


@pytest.mark.parametrize(
    ("make", "how"), [(_sequential, "build"), (_Net, "call"), (_Net, "fit"), (_Net, "function")]
)
def test_values_arrive_however_the_model_is_built(make, how, strategy_of, tmp_path):
    strategy = strategy_of(2)
    with strategy.scope():
        model, other = make(), make()
        for own in (model, other):
            own.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    model.fit(X, Y, batch_size=8, verbose=0, shuffle=False)
    path = Checkpoint(model=model).write(tmp_path / "ckpt")
    expected = np.asarray(model(X))

    status = Checkpoint(model=other).restore(path)
    if how == "call":
        np.testing.assert_array_equal(np.asarray(other(X)), expected)
    elif how == "build":
        other.build((None, 3))
    elif how == "function":
        np.testing.assert_allclose(np.asarray(dist.function(other)(X)), expected, rtol=1e-5)
    else:
        other.fit(X, Y, batch_size=8, verbose=0, shuffle=False)
        model.fit(X, Y, batch_size=8, verbose=0, shuffle=False)
        status.assert_consumed()
        assert int(other.optimizer.iterations.value) == 2
    _assert_same_variables(model, other)
    if how != "fit":
        with strategy.scope():
            other.optimizer.build(other.trainable_variables)
        status.assert_consumed()
    _assert_same_variables(model.optimizer, other.optimizer)


@pytest.fixture
def saved(tmp_path):
    """A checkpoint of a whole model, and one of a model without a head."""
    paths = []
    for head in (True, False):
        model = _Net(head=head)
        model(X)
        paths.append(Checkpoint(model=model).write(tmp_path / str(head)))
    return paths


def test_what_does_not_fit_is_named_when_it_is_built(saved):
    wide = _Net(5)
    Checkpoint(model=wide).restore(saved[0])

    with pytest.raises(
        ValueError, match=r"does not fit 'model/dense'.\n.*kernel has shape \(3, 4\), and"
    ):
        wide(X)


def test_values_that_have_no_place_are_named_when_the_model_is_built(saved, caplog):
    headless = _Net(head=False)
    status = Checkpoint(model=headless).restore(saved[0])

    headless(X)

    assert "'model' is built, and these values have no place in it: model/dense_1" in caplog.text
    status.assert_existing_objects_matched()
    with pytest.raises(ValueError, match=r"Only in the checkpoint: model/dense_1/kernel, model/de"):
        status.assert_consumed()


@pytest.mark.parametrize("partial", [False, True])
def test_values_that_are_missing_are_named_unless_that_was_expected(partial, saved):
    whole = _Net()
    status = Checkpoint(model=whole).restore(saved[1])

    if partial:
        status.expect_partial()
        whole(X)
    with pytest.raises(ValueError, match="Not in the checkpoint: model/dense_1"):
        status.assert_existing_objects_matched() if partial else whole(X)


def test_the_last_checkpoint_counts(tmp_path):
    model, other = _sequential(), _sequential()
    model(X)
    paths = []
    for number in range(2):
        model.layers[0].bias.assign(np.full(4, number))
        paths.append(Checkpoint(model=model).write(tmp_path / f"{number}"))

    first = Checkpoint(model=other).restore(paths[1])
    Checkpoint(model=other).restore(paths[0])
    other(X)

    np.testing.assert_array_equal(np.asarray(other.layers[0].bias.value), np.zeros(4))
    with pytest.raises(ValueError, match="Only in the checkpoint"):
        first.assert_consumed()


def test_a_checkpoint_can_be_a_part_of_another(tmp_path):
    inner = Checkpoint(v=dist.Variable(np.float32([1, 2])), epoch=3)
    path = Checkpoint(a=inner, step=5).write(tmp_path / "ckpt")
    again = Checkpoint(v=dist.Variable(np.float32([0, 0])), epoch=0)

    Checkpoint(a=again, step=0).restore(path).assert_consumed()

    np.testing.assert_array_equal(again.v.numpy(), [1, 2])
    assert again.epoch == 3


def test_values_arrive_on_servers(tmp_path):
    with dist.experimental.local_cluster(workers=1, ps=2) as cluster:
        partitioner = dist.experimental.partitioners.FixedShardsPartitioner(2)
        strategy = dist.ParameterServerStrategy(cluster, partitioner)
        with strategy.scope():
            models = [_sequential(), _sequential()]
            for own in models:
                own.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
            metric, other_metric = keras.metrics.Mean(), keras.metrics.Mean()
        metric.total.assign(3.0)
        model, other = models
        model.fit(X, Y, batch_size=8, verbose=0, shuffle=False)
        path = Checkpoint(model=model, metric=metric).write(tmp_path / "ckpt")

        status = Checkpoint(model=other, metric=other_metric).restore(path)
        for own in models:
            own.fit(X, Y, batch_size=8, verbose=0, shuffle=False)

        status.assert_consumed()
        _assert_same_variables(model, other)
        _assert_same_variables(model.optimizer, other.optimizer)
        _assert_same_variables(metric, other_metric)
