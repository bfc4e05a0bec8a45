"""Gradients that a `train_step` adds up over several batches before they are applied."""

import numpy as np

import distributary.compat.tensorflow as tf


class CustomTrainStep(tf.keras.Model):
    def __init__(self, n_gradients, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.n_gradients = tf.constant(n_gradients, dtype=tf.int32)
        self.n_acum_step = tf.Variable(0, dtype=tf.int32, trainable=False)
        self.gradient_accumulation = [
            tf.Variable(tf.zeros_like(v, dtype=tf.float32), trainable=False)
            for v in self.trainable_variables
        ]

    def train_step(self, data):
        self.n_acum_step.assign_add(1)
        x, y = data
        # Gradient Tape
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=y_pred)
        # Calculate batch gradients
        gradients = tape.gradient(loss, self.trainable_variables)
        # Accumulate batch gradients
        for i in range(len(self.gradient_accumulation)):
            self.gradient_accumulation[i].assign_add(gradients[i])
        # If n_acum_step reach the n_gradients then we apply accumulated gradients
        tf.cond(
            tf.equal(self.n_acum_step, self.n_gradients), self.apply_accu_gradients, lambda: None
        )
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics}

    def apply_accu_gradients(self):
        # apply accumulated gradients
        self.optimizer.apply_gradients(zip(self.gradient_accumulation, self.trainable_variables))
        # reset
        self.n_acum_step.assign(0)
        for i in range(len(self.gradient_accumulation)):
            self.gradient_accumulation[i].assign(
                tf.zeros_like(self.trainable_variables[i], dtype=tf.float32)
            )


random = np.random.default_rng(0)
x = random.normal(size=(64, 6)).astype("float32")
y = (x[:, :1] > 0).astype("float32")

inputs = tf.keras.Input(shape=(6,))
hidden = tf.keras.layers.Dense(8, activation="relu")(inputs)
outputs = tf.keras.layers.Dense(1)(hidden)
custom_model = CustomTrainStep(n_gradients=4, inputs=[inputs], outputs=[outputs])
custom_model.set_weights([random.normal(0, 0.3, w.shape) for w in custom_model.get_weights()])
custom_model.compile(
    loss=tf.keras.losses.BinaryCrossentropy(from_logits=True),
    metrics=["mae"],
    optimizer=tf.keras.optimizers.Adam(learning_rate=0.01),
)
dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
before = [w.copy() for w in custom_model.get_weights()]
history = custom_model.fit(dataset, epochs=3, verbose=0)
print("updates", custom_model.optimizer.iterations.numpy(), custom_model.n_acum_step.numpy())
for name in sorted(history.history):
    print(name, ["%.4f" % value for value in history.history[name]])
after = custom_model.get_weights()
print("changed", [bool(np.abs(a - b).max() > 0) for a, b in zip(before[:4], after[:4])])


# A loop with an accumulator on each replica, as training scripts for BERT have it.
class GradientAccumulator:
    """Adds up gradients; each replica has sums of its own, which are not exchanged."""

    def __init__(self, trainable_variables):
        self.accum_steps = tf.Variable(
            tf.constant(0, dtype=tf.int64),
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        )
        self.accum_vars = [
            tf.Variable(
                tf.zeros_like(variable),
                trainable=False,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.NONE,
            )
            for variable in trainable_variables
        ]

    @property
    def step(self):
        """Number of accumulated steps."""
        return self.accum_steps.value()

    @property
    def gradients(self):
        """The accumulated gradients on the current replica."""
        return [accum_var.value() for accum_var in self.accum_vars]

    def __call__(self, gradients):
        for accum_var, gradient in zip(self.accum_vars, gradients):
            accum_var.assign_add(gradient)
        self.accum_steps.assign_add(1)

    def reset(self):
        """Resets the accumulated gradients on the current replica."""
        self.accum_steps.assign(0)
        for accum_var in self.accum_vars:
            accum_var.assign(tf.zeros_like(accum_var))


strategy = tf.distribute.MirroredStrategy()
with strategy.scope():
    model = tf.keras.models.clone_model(tf.keras.Model(inputs, outputs))
    values = np.random.default_rng(1)
    model.set_weights([values.normal(0, 0.3, w.shape) for w in model.get_weights()])
    optimizer = tf.keras.optimizers.Adam(0.05)
    optimizer.build(model.trainable_variables)
    gradient_accumulator = GradientAccumulator(model.trainable_variables)
    loss_object = tf.keras.losses.BinaryCrossentropy(
        from_logits=True, reduction=tf.keras.losses.Reduction.NONE
    )
NUM_ACCUMULATED = 4


def forward(features, labels):
    with tf.GradientTape() as tape:
        per_example = loss_object(labels, model(features, training=True))
        loss = tf.nn.compute_average_loss(per_example, global_batch_size=8 * NUM_ACCUMULATED)
    gradient_accumulator(tape.gradient(loss, model.trainable_variables))
    return loss


def apply_gradients():
    gradients = gradient_accumulator.gradients
    optimizer.apply_gradients(list(zip(gradients, model.trainable_variables)))
    gradient_accumulator.reset()


@tf.function
def train_step(batch):
    losses = strategy.run(forward, args=batch)
    return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)


@tf.function
def update():
    strategy.run(apply_gradients)


for epoch in range(3):
    total = 0.0
    for batch in strategy.experimental_distribute_dataset(dataset):
        total += train_step(batch)
        if gradient_accumulator.step == NUM_ACCUMULATED:
            update()
            print("epoch %d loss %.4f" % (epoch, total))
            total = 0.0
print("updates", optimizer.iterations.numpy())
