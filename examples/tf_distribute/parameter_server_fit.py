"""Keras' fit with parameter servers: a recommender, whose tables the servers divide.

    distributary launch --workers 2 --ps 2 parameter_server_fit.py

The chief, the workers and the servers run the same program for tf.distribute; only its import is
another one.
"""

import argparse

import numpy as np

import distributary.compat.tensorflow as tf

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--epochs", type=int, default=15, help="default %(default)s")
parser.add_argument("--checkpoints", help="folder of the chief, from which a new start continues")
options = parser.parse_args()

# Workers and servers wait here for the chief, until the job ends.
resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
if resolver.task_type in ("worker", "ps"):
    server = tf.distribute.Server(
        resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id
    )
    server.join()

# What users think of items: +1 where the hidden tastes of both agree, else 0.
num_users, num_items = 200, 100
rng = np.random.default_rng(0)
users = rng.integers(0, num_users, 8000)
items = rng.integers(0, num_items, 8000)
user_tastes, item_tastes = rng.normal(size=(num_users, 2)), rng.normal(size=(num_items, 2))
likes = ((user_tastes[users] * item_tastes[items]).sum(axis=1) > 0).astype("float32")

partitioner = tf.distribute.experimental.partitioners.MinSizePartitioner(
    min_shard_bytes=2 << 10, max_shards=2
)
strategy = tf.distribute.ParameterServerStrategy(resolver, variable_partitioner=partitioner)


class Recommender(tf.keras.Model):
    """How well a user and an item fit: the product of what the tables say of them."""

    def __init__(self):
        super().__init__()
        self.users = tf.keras.layers.Embedding(num_users, 8)
        self.items = tf.keras.layers.Embedding(num_items, 8)

    def call(self, inputs):
        user, item = inputs[:, 0], inputs[:, 1]
        product = tf.reduce_sum(self.users(user) * self.items(item), axis=-1, keepdims=True)
        return tf.nn.sigmoid(8 * product)


with strategy.scope():
    model = Recommender()
    model.compile(tf.keras.optimizers.Adam(0.02), loss="binary_crossentropy", metrics=["accuracy"])

ids = np.stack([users, items], axis=1)
dataset = tf.data.Dataset.from_tensor_slices((ids[:7000], likes[:7000]))
dataset = dataset.shuffle(7000).batch(64).prefetch(2)
backup = tf.keras.callbacks.BackupAndRestore
callbacks = [backup(options.checkpoints, delete_checkpoint=False)] if options.checkpoints else []
model.fit(dataset, epochs=options.epochs, callbacks=callbacks, verbose=0)
loss, accuracy = model.evaluate(ids[7000:], likes[7000:], batch_size=250, verbose=0)
print(f"Pairs of the test set: loss {loss:.3f}, accuracy {accuracy:.3f}")
