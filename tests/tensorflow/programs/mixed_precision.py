"""Halves and a scaled loss, in `fit` and in a loop, as in TensorFlow's guide to mixed precision."""

import numpy as np

import distributary.compat.tensorflow as tf
from distributary.compat.tensorflow.keras import layers, mixed_precision

mixed_precision.set_global_policy("mixed_float16")
policy = mixed_precision.global_policy()
print("Compute dtype: %s" % policy.compute_dtype, "Variable dtype: %s" % policy.variable_dtype)

BATCH_SIZE = 8
random = np.random.default_rng(0)
x_train = random.normal(size=(32, 6)).astype("float32")
y_train = random.integers(0, 3, 32)

strategy = tf.distribute.MirroredStrategy()
with strategy.scope():
    inputs = tf.keras.Input(shape=(6,), name="digits")
    dense1 = layers.Dense(16, activation="relu", name="dense_1")
    x = dense1(inputs)
    print(dense1.dtype_policy.name, "x.dtype:", x.dtype, "kernel:", dense1.kernel.dtype)
    x = layers.Dense(3, name="dense_logits")(x)
    outputs = layers.Activation("softmax", dtype="float32", name="predictions")(x)
    print("Outputs dtype: %s" % outputs.dtype)
    model = tf.keras.Model(inputs=inputs, outputs=outputs)
    initial_weights = [random.normal(0, 0.3, w.shape) for w in model.get_weights()]
    model.set_weights(initial_weights)
    model.compile(
        loss="sparse_categorical_crossentropy",
        optimizer=tf.keras.optimizers.RMSprop(0.01),
        metrics=["accuracy"],
    )
history = model.fit(x_train, y_train, batch_size=8, epochs=2, shuffle=False, verbose=0)
print("fit", ["%.2f" % loss for loss in history.history["loss"]])
print(type(model.optimizer).__name__)

model.set_weights(initial_weights)
with strategy.scope():
    optimizer = tf.keras.optimizers.RMSprop(0.01)
    optimizer = mixed_precision.LossScaleOptimizer(
        optimizer, initial_scale=2.0**30, dynamic_growth_steps=3
    )
    optimizer.build(model.trainable_variables)
    loss_object = tf.keras.losses.SparseCategoricalCrossentropy(reduction="none")
    train_loss = tf.keras.metrics.Mean()


def replica_step(x, y):
    with tf.GradientTape() as tape:
        predictions = model(x)
        losses = loss_object(y, predictions)
        loss = tf.nn.compute_average_loss(losses, global_batch_size=BATCH_SIZE)
        scaled_loss = optimizer.scale_loss(loss)
    scaled_gradients = tape.gradient(scaled_loss, model.trainable_variables)
    optimizer.apply_gradients(zip(scaled_gradients, model.trainable_variables))
    train_loss.update_state(losses)
    return loss


@tf.function
def train_step(x, y):
    losses = strategy.run(replica_step, args=(x, y))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)


dataset = tf.data.Dataset.from_tensor_slices((x_train, y_train)).batch(BATCH_SIZE)
dataset = strategy.experimental_distribute_dataset(dataset)
for epoch in range(3):
    for x, y in dataset:
        loss = train_step(x, y)
    print("Epoch {}: loss={:.2f}".format(epoch, train_loss.result()))
    print("scale 2^%.0f" % np.log2(optimizer.dynamic_scale.numpy()))
    train_loss.reset_state()
print("steps", optimizer.inner_optimizer.iterations.numpy())
mixed_precision.set_global_policy("float32")
