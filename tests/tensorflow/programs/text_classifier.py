"""A small encoder of text with attention: warm-up of the rate, clipped gradients, masks."""

import numpy as np

import distributary.compat.tensorflow as tf

VOCABULARY, LENGTH, WIDTH, HEADS, GLOBAL_BATCH = 30, 6, 8, 2, 8


class WarmUp(tf.keras.optimizers.schedules.LearningRateSchedule):
    def __init__(self, peak, warmup_steps, total_steps):
        super().__init__()
        self.peak, self.warmup_steps, self.total_steps = peak, warmup_steps, total_steps

    def __call__(self, step):
        step = tf.cast(step, tf.float32)
        warm = self.peak * (step + 1) / self.warmup_steps
        decayed = self.peak * (1.0 - step / self.total_steps)
        return tf.cond(step < self.warmup_steps, lambda: warm, lambda: decayed)

    def get_config(self):
        return {}


class EncoderBlock(tf.keras.layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.attention = tf.keras.layers.MultiHeadAttention(HEADS, WIDTH // HEADS)
        self.norms = [tf.keras.layers.LayerNormalization(epsilon=1e-6) for _ in range(2)]
        self.feed_forward = tf.keras.Sequential(
            [tf.keras.layers.Dense(2 * WIDTH, activation="gelu"), tf.keras.layers.Dense(WIDTH)]
        )

    def call(self, x, mask=None):
        pairs = mask[:, tf.newaxis, :]
        x = self.norms[0](x + self.attention(x, x, attention_mask=pairs))
        return self.norms[1](x + self.feed_forward(x))


class Classifier(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.tokens = tf.keras.layers.Embedding(VOCABULARY, WIDTH)
        self.positions = tf.keras.layers.Embedding(LENGTH, WIDTH)
        self.blocks = [EncoderBlock(name="block_%d" % i) for i in range(2)]
        self.head = tf.keras.layers.Dense(2)

    def call(self, ids, training=False):
        mask = tf.not_equal(ids, 0)
        x = self.tokens(ids) + self.positions(tf.range(LENGTH))
        for block in self.blocks:
            x = block(x, mask=mask)
        weights = tf.cast(mask, tf.float32)[..., tf.newaxis]
        pooled = tf.reduce_sum(x * weights, axis=1) / tf.reduce_sum(weights, axis=1)
        return self.head(pooled)


random = np.random.default_rng(0)
ids = random.integers(1, VOCABULARY, (40, LENGTH))
ids *= np.arange(LENGTH) < random.integers(2, LENGTH + 1, (40, 1))
labels = (ids.sum(1) % 2).astype(np.int64)

strategy = tf.distribute.MirroredStrategy()
with strategy.scope():
    model = Classifier()
    model(tf.zeros([1, LENGTH], tf.int32) + 1)
    model.set_weights([random.normal(0, 0.2, w.shape) for w in model.get_weights()])
    optimizer = tf.keras.optimizers.AdamW(WarmUp(0.01, 4, 20), weight_decay=0.01)
    optimizer.exclude_from_weight_decay(var_names=["bias", "gamma", "beta"])
    accuracy = tf.keras.metrics.SparseCategoricalAccuracy()

dataset = tf.data.Dataset.from_tensor_slices((ids.astype(np.int32), labels))
dataset = strategy.experimental_distribute_dataset(dataset.batch(GLOBAL_BATCH))


@tf.function
def train_step(dist_inputs):
    def step_fn(ids, labels):
        with tf.GradientTape() as tape:
            logits = model(ids, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
            loss = tf.nn.compute_average_loss(losses, global_batch_size=GLOBAL_BATCH)
        variables = model.trainable_variables
        gradients = tape.gradient(loss, variables)
        context = tf.distribute.get_replica_context()
        gradients = context.all_reduce(tf.distribute.ReduceOp.SUM, gradients)
        gradients, norm = tf.clip_by_global_norm(gradients, 0.5)
        # The sum of the gradients is already that of all replicas.
        scale = 1.0 / context.num_replicas_in_sync
        optimizer.apply_gradients(
            [(tf.convert_to_tensor(g) * scale, v) for g, v in zip(gradients, variables)]
        )
        accuracy.update_state(labels, logits)
        return loss, norm

    loss, norm = strategy.run(step_fn, args=dist_inputs)
    total = strategy.reduce(tf.distribute.ReduceOp.SUM, loss, axis=None)
    return total, strategy.reduce(tf.distribute.ReduceOp.MEAN, norm, axis=None)


for epoch in range(2):
    for step, inputs in enumerate(dataset):
        loss, norm = train_step(inputs)
        if step % 2 == 0:
            print("epoch %d step %d loss %.4f norm %.4f" % (epoch, step, loss, norm))
    print("accuracy %.4f" % accuracy.result().numpy())
    accuracy.reset_state()
