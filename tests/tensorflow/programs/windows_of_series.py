"""Windows of a time series, a recurrent cell unrolled over them by a loop in the step."""

import numpy as np

import distributary.compat.tensorflow as tf

WINDOW, UNITS = 6, 4
series = np.sin(np.arange(64) / 3).astype(np.float32)


def windowed_dataset(series, batch_size):
    dataset = tf.data.Dataset.from_tensor_slices(series)
    dataset = dataset.window(WINDOW + 1, shift=1, drop_remainder=True)
    dataset = dataset.flat_map(lambda window: window.batch(WINDOW + 1))
    dataset = dataset.map(lambda window: (window[:-1], window[-1:]))
    return dataset.batch(batch_size, drop_remainder=True)


random = np.random.default_rng(0)
strategy = tf.distribute.MirroredStrategy()
with strategy.scope():
    w_in = tf.Variable(random.normal(0, 0.5, (1, UNITS)).astype(np.float32))
    w_state = tf.Variable(random.normal(0, 0.5, (UNITS, UNITS)).astype(np.float32))
    w_out = tf.Variable(random.normal(0, 0.5, (UNITS, 1)).astype(np.float32))
    optimizer = tf.keras.optimizers.Adam(0.01)
    error = tf.keras.metrics.MeanAbsoluteError()
weights = [w_in, w_state, w_out]


def predict(x):
    state = tf.zeros([tf.shape(x)[0], UNITS])
    for t in tf.range(WINDOW):
        value = x[:, t]
        state = tf.tanh(tf.matmul(value[:, tf.newaxis], w_in) + tf.matmul(state, w_state))
    return tf.matmul(state, w_out)


@tf.function
def train_epoch(dataset):
    total, count = 0.0, 0
    for x, y in dataset:
        losses = strategy.run(train_step, args=(x, y))
        total += strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)
        count += 1
    return total / tf.cast(count, tf.float32)


def train_step(x, y):
    with tf.GradientTape() as tape:
        prediction = predict(x)
        losses = tf.reduce_mean(tf.math.squared_difference(y, prediction), axis=-1)
        loss = tf.nn.compute_average_loss(losses)
    gradients = tape.gradient(loss, weights)
    if tf.linalg.global_norm(weights) > 1.0:
        gradients = [0.5 * gradient for gradient in gradients]
    optimizer.apply_gradients(zip(gradients, weights))
    error.update_state(y, prediction)
    return loss


dataset = windowed_dataset(series, 8)
dataset = strategy.experimental_distribute_dataset(dataset)
for epoch in range(3):
    loss = train_epoch(dataset)
    print("epoch %d loss %.5f error %.5f" % (epoch, loss, error.result()))
    error.reset_state()
