"""The steps of TensorFlow's TPU guide: where there is no TPU, it takes the other devices."""

import numpy as np

import distributary.compat.tensorflow as tf

try:
    resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu="")
    tf.config.experimental_connect_to_cluster(resolver)
    tf.tpu.experimental.initialize_tpu_system(resolver)
    strategy = tf.distribute.TPUStrategy(resolver)
except (ValueError, RuntimeError, tf.errors.NotFoundError):
    strategy = tf.distribute.MirroredStrategy()

batch_size = 16
steps_per_epoch = 64 // batch_size
random = np.random.default_rng(0)
images = random.integers(0, 255, (64, 8, 8, 1)).astype(np.uint8)
labels = (images.mean((1, 2, 3)) > 127).astype(np.int32)


def create_model():
    regularizer = tf.keras.regularizers.L2(1e-5)
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Input(shape=(8, 8, 1)),
            tf.keras.layers.Conv2D(4, 3, activation="relu", kernel_regularizer=regularizer),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(2, kernel_regularizer=regularizer),
        ]
    )
    weights = np.random.default_rng(1)
    model.set_weights([weights.normal(0, 0.1, w.shape) for w in model.get_weights()])
    return model


def get_dataset(batch_size, is_training=True):
    dataset = tf.data.Dataset.from_tensor_slices((images, labels))

    def scale(image, label):
        image = tf.cast(image, tf.float32)
        image /= 255.0
        return image, label

    dataset = dataset.map(scale)
    if is_training:
        dataset = dataset.repeat()
    return dataset.batch(batch_size, drop_remainder=is_training)


with strategy.scope():
    model = create_model()
    model.compile(
        optimizer="adam",
        steps_per_execution=2,
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["sparse_categorical_accuracy"],
    )
history = model.fit(
    get_dataset(batch_size),
    epochs=2,
    steps_per_epoch=steps_per_epoch,
    validation_data=get_dataset(batch_size, is_training=False),
    validation_steps=steps_per_epoch,
    verbose=0,
)
for name in sorted(history.history):
    print(name, ["%.4f" % value for value in history.history[name]])

# An own loop, with several steps in each call of the function.
with strategy.scope():
    model = create_model()
    optimizer = tf.keras.optimizers.Adam()
    training_loss = tf.keras.metrics.Mean("training_loss", dtype=tf.float32)
    training_accuracy = tf.keras.metrics.SparseCategoricalAccuracy("training_accuracy")

per_replica_batch_size = batch_size // strategy.num_replicas_in_sync
train_dataset = strategy.distribute_datasets_from_function(
    lambda _: get_dataset(per_replica_batch_size, is_training=True)
)


@tf.function
def train_multiple_steps(iterator, steps):
    def step_fn(inputs):
        images, labels = inputs
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            per_example_loss = tf.keras.losses.sparse_categorical_crossentropy(
                labels, logits, from_logits=True
            )
            loss = tf.nn.compute_average_loss(per_example_loss)
            model_losses = model.losses
            if model_losses:
                loss += tf.nn.scale_regularization_loss(tf.add_n(model_losses))
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(list(zip(grads, model.trainable_variables)))
        training_loss.update_state(loss * strategy.num_replicas_in_sync)
        training_accuracy.update_state(labels, logits)

    for _ in tf.range(steps):
        strategy.run(step_fn, args=(next(iterator),))


train_iterator = iter(train_dataset)
for epoch in range(2):
    train_multiple_steps(train_iterator, tf.convert_to_tensor(steps_per_epoch))
    print(
        "Current step: {}, training loss: {:.4f}, training accuracy: {:.2f}%".format(
            int(optimizer.iterations.numpy()),
            float(training_loss.result()),
            float(training_accuracy.result()) * 100,
        )
    )
    training_loss.reset_state()
    training_accuracy.reset_state()
