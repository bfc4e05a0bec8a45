"""One loop under several strategies: the same numbers, whatever keeps the variables."""

import numpy as np

import distributary.compat.tensorflow as tf

x = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
y = np.sin(x.sum(1, keepdims=True)).astype(np.float32)


def train(strategy):
    with strategy.scope():
        model = tf.keras.Sequential(
            [
                tf.keras.layers.Input((4,)),
                tf.keras.layers.Dense(5, activation="tanh"),
                tf.keras.layers.Dense(1),
            ]
        )
        weights = np.random.default_rng(1)
        model.set_weights([weights.normal(0, 0.5, w.shape) for w in model.get_weights()])
        optimizer = tf.keras.optimizers.RMSprop(0.01)
        mean = tf.keras.metrics.Mean()

    def step(inputs):
        features, targets = inputs
        with tf.GradientTape() as tape:
            errors = tf.keras.losses.MeanSquaredError(reduction="none")(targets, model(features))
            loss = tf.nn.compute_average_loss(errors, global_batch_size=8)
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables))
        mean.update_state(errors)
        return loss

    @tf.function
    def distributed_step(inputs):
        losses = strategy.run(step, args=(inputs,))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    for inputs in strategy.experimental_distribute_dataset(dataset):
        loss = distributed_step(inputs)
    print("%.5f %.5f %.5f" % (loss, mean.result(), np.abs(model.get_weights()[0]).sum()))


for strategy in (
    tf.distribute.get_strategy(),
    tf.distribute.OneDeviceStrategy("/cpu:0"),
    tf.distribute.MirroredStrategy(),
    tf.distribute.MultiWorkerMirroredStrategy(),
):
    train(strategy)
print(tf.distribute.has_strategy(), tf.distribute.in_cross_replica_context())
