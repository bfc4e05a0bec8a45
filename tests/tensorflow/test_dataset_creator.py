"""A function that makes datasets, for every strategy; servers and workers are in this process."""

import numpy as np
import pytest

import distributary.compat.tensorflow as tf
from distributary.experimental import local_cluster


def _dataset_fn(context):
    x = np.arange(64, dtype=np.float32).reshape(32, 2) / 64
    dataset = tf.data.Dataset.from_tensor_slices((x, x.sum(1, keepdims=True))).repeat()
    return dataset.batch(context.get_per_replica_batch_size(8))


def test_models_train_alike_under_every_strategy(strategy_of):
    def losses(strategy):
        with strategy.scope():
            tf.keras.utils.set_random_seed(1)
            model = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        data = tf.keras.utils.experimental.DatasetCreator(_dataset_fn)
        history = model.fit(data, epochs=2, steps_per_epoch=4, verbose=0)
        return [*history.history["loss"], model.evaluate(data, steps=4, verbose=0)]

    with_one_replica = pytest.approx(losses(strategy_of(1)), rel=1e-5)

    assert losses(strategy_of(2)) == with_one_replica
    servers = tf.distribute.ParameterServerStrategy(local_cluster(workers=1, ps=1))
    assert losses(servers) == with_one_replica


def test_the_function_is_checked_where_it_is_given():
    with pytest.raises(TypeError, match=r"DatasetCreator: dataset_fn is .*, expected a function"):
        tf.keras.utils.experimental.DatasetCreator([1, 2])
