"""A loop with several steps per function, a schedule and clipped gradients, as in model gardens."""

import numpy as np

import distributary.compat.tensorflow as tf

strategy = tf.distribute.MirroredStrategy()
random = np.random.default_rng(0)
vocabulary, length, width = 16, 6, 8
ids = random.integers(0, vocabulary, (64, length)).astype(np.int32)
labels = (ids.sum(axis=1) % 2).astype(np.int32)
global_batch_size = 16
steps_per_loop = 4


class Warmup(tf.keras.optimizers.schedules.LearningRateSchedule):
    def __init__(self, rate, warmup_steps):
        super().__init__()
        self.rate = rate
        self.warmup_steps = warmup_steps

    def __call__(self, step):
        step = tf.cast(step, tf.float32)
        return tf.where(
            step < self.warmup_steps, self.rate * (step + 1.0) / self.warmup_steps, self.rate
        )


with strategy.scope():
    words = tf.keras.Input((length,), dtype="int32")
    x = tf.keras.layers.Embedding(vocabulary, width)(words)
    attended = tf.keras.layers.MultiHeadAttention(2, 4)(x, x)
    x = tf.keras.layers.LayerNormalization()(x + attended)
    x = tf.keras.layers.GlobalAveragePooling1D()(x)
    model = tf.keras.Model(words, tf.keras.layers.Dense(2)(x))
    values = np.random.default_rng(1)
    model.set_weights([values.normal(0, 0.3, w.shape) for w in model.get_weights()])
    optimizer = tf.keras.optimizers.SGD(Warmup(0.5, 3), momentum=0.9)
    global_step = tf.Variable(
        0, dtype=tf.int64, trainable=False, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA
    )
    train_loss = tf.keras.metrics.Mean("training_loss", dtype=tf.float32)
    accuracy = tf.keras.metrics.SparseCategoricalAccuracy("accuracy")


def replicated_step(inputs):
    features, targets = inputs
    with tf.GradientTape() as tape:
        logits = model(features, training=True)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=targets, logits=logits)
        loss = tf.reduce_sum(losses) / global_batch_size
    variables = model.trainable_variables
    grads = tape.gradient(loss, variables)
    context = tf.distribute.get_replica_context()
    grads = context.all_reduce(tf.distribute.ReduceOp.SUM, grads)
    grads, _ = tf.clip_by_global_norm(grads, 1.0)
    # Each replica has the sum; the optimizer would sum again.
    grads = [tf.convert_to_tensor(grad) / strategy.num_replicas_in_sync for grad in grads]
    optimizer.apply_gradients(zip(grads, variables))
    train_loss.update_state(losses)
    accuracy.update_state(targets, logits)


@tf.function
def train_steps(iterator, steps):
    for _ in tf.range(steps):
        strategy.run(replicated_step, args=(next(iterator),))
        global_step.assign_add(1)


dataset = tf.data.Dataset.from_tensor_slices((ids, labels)).repeat().batch(global_batch_size)
iterator = iter(strategy.experimental_distribute_dataset(dataset))
for loop in range(3):
    train_loss.reset_state()
    accuracy.reset_state()
    train_steps(iterator, tf.constant(steps_per_loop, dtype=tf.int32))
    print(
        "step",
        global_step.numpy(),
        "loss",
        train_loss.result().numpy(),
        "accuracy",
        accuracy.result().numpy(),
    )
tf.debugging.assert_equal(global_step, tf.constant(12, tf.int64))
