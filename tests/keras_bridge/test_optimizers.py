"""Arguments of optimizers; tests/awkward and `test_sharded_state` hold the steps that they take."""

import keras
import numpy as np


def test_gradients_and_variables_may_be_iterators():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    optimizer = keras.optimizers.SGD(0.5)
    before = model.get_weights()

    optimizer.apply((np.ones(v.shape) for v in model.weights), iter(model.trainable_variables))

    for weight, old in zip(model.get_weights(), before, strict=True):
        np.testing.assert_allclose(weight, old - 0.5, rtol=1e-6)
