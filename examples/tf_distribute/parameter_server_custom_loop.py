"""Parameter servers with a training loop of one's own: the chief schedules steps on workers.

    distributary launch --workers 2 --ps 1 parameter_server_custom_loop.py

The chief, the workers and the servers run the same program for tf.distribute; only its import is
another one.
"""

import argparse
from pathlib import Path

import numpy as np

import distributary.compat.tensorflow as tf

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--epochs", type=int, default=5, help="default %(default)s")
options = parser.parse_args()

digits = np.load(Path(__file__).parents[1] / "digits.npz")
images, labels = digits["images"].reshape(-1, 64), digits["labels"]
num_train, batch_size, steps_per_epoch = 1400, 32, 60


def dataset_fn():
    """What each worker makes for itself."""
    dataset = tf.data.Dataset.from_tensor_slices((images[:num_train], labels[:num_train]))
    return dataset.shuffle(num_train).repeat().batch(batch_size).prefetch(2)


# Workers and servers wait here for the chief, until the job ends.
resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
if resolver.task_type in ("worker", "ps"):
    server = tf.distribute.Server(
        resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id
    )
    server.join()

strategy = tf.distribute.ParameterServerStrategy(resolver)
with strategy.scope():
    model = tf.keras.Sequential(
        [
            tf.keras.Input((64,)),
            tf.keras.layers.Dense(64, activation="relu"),
            tf.keras.layers.Dense(10),
        ]
    )
    optimizer = tf.keras.optimizers.Adam(0.005)
    optimizer.build(model.trainable_variables)
    accuracy = tf.keras.metrics.SparseCategoricalAccuracy()
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)


@tf.function
def train_step(iterator):
    def replica_fn(batch):
        features, targets = batch
        with tf.GradientTape() as tape:
            logits = model(features, training=True)
            loss = tf.nn.compute_average_loss(loss_of(targets, logits))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        accuracy.update_state(targets, logits)
        return loss

    losses = strategy.run(replica_fn, args=(next(iterator),))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)


coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
per_worker_iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))
for epoch in range(options.epochs):
    accuracy.reset_state()
    for _ in range(steps_per_epoch):
        loss = coordinator.schedule(train_step, args=(per_worker_iterator,))
    coordinator.join()  # until all scheduled steps are done
    print(
        f"Epoch {epoch + 1}: accuracy {accuracy.result().numpy():.3f},"
        f" loss of the last step {loss.fetch():.3f}"
    )

logits = model(images[num_train:])
test_accuracy = tf.reduce_mean(tf.cast(tf.argmax(logits, axis=1) == labels[num_train:], tf.float32))
print(f"On the test set: accuracy {test_accuracy.numpy():.3f}")
