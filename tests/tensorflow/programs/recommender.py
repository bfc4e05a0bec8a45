"""A recommender with tables and interactions of their rows, trained by `fit` and `AUC`."""

import numpy as np

import distributary.compat.tensorflow as tf

TABLES = [17, 9, 5]
WIDTH = 4


class Recommender(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.tables = [tf.keras.layers.Embedding(size, WIDTH) for size in TABLES]
        self.bottom = [tf.keras.layers.Dense(n, activation="relu") for n in (8, WIDTH)]
        self.top = [tf.keras.layers.Dense(8, activation="relu"), tf.keras.layers.Dense(1)]

    def call(self, inputs):
        dense, sparse = inputs["dense"], inputs["sparse"]
        for layer in self.bottom:
            dense = layer(dense)
        rows = [table(sparse[:, i]) for i, table in enumerate(self.tables)]
        features = tf.stack([dense, *rows], axis=1)
        products = tf.matmul(features, features, transpose_b=True)
        upper = [products[:, i, j] for i in range(len(rows) + 1) for j in range(i)]
        x = tf.concat([dense, tf.stack(upper, axis=1)], axis=1)
        for layer in self.top:
            x = layer(x)
        return tf.squeeze(x, axis=-1)


random = np.random.default_rng(0)
count = 90
inputs = {
    "dense": random.normal(size=(count, 3)).astype(np.float32),
    "sparse": np.stack([random.integers(0, size, count) for size in TABLES], 1).astype(np.int32),
}
clicks = (inputs["sparse"].sum(1) % 3 == 0).astype(np.float32)

strategy = tf.distribute.MirroredStrategy()
with strategy.scope():
    model = Recommender()
    model({name: tf.constant(value[:1]) for name, value in inputs.items()})
    model.set_weights([random.normal(0, 0.3, w.shape) for w in model.get_weights()])
    model.compile(
        optimizer=tf.keras.optimizers.Adagrad(0.1),
        loss=tf.keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[
            tf.keras.metrics.AUC(name="auc", from_logits=True, num_thresholds=50),
            tf.keras.metrics.BinaryAccuracy(name="accuracy", threshold=0.0),
        ],
    )

weights = np.where(clicks > 0, 2.0, 1.0).astype(np.float32)
dataset = tf.data.Dataset.from_tensor_slices((inputs, clicks, weights)).batch(20)
history = model.fit(dataset, epochs=3, verbose=0, class_weight=None)
for name in sorted(history.history):
    print(name, ["%.4f" % value for value in history.history[name]])
results = model.evaluate(dataset, verbose=0, return_dict=True)
print({name: "%.4f" % value for name, value in sorted(results.items())})
scores = model.predict(dataset, verbose=0)
print(scores.shape, "%.4f" % np.abs(scores).mean())
