"""Updates by hand: merge_call, update of variables, gradients that several steps add up."""

import numpy as np

import distributary.compat.tensorflow as tf

ACCUMULATE = 2
random = np.random.default_rng(0)
x = random.normal(size=(48, 3)).astype(np.float32)
y = (x @ np.array([[1.0], [-2.0], [0.5]]) + 0.3).astype(np.float32)

strategy = tf.distribute.MirroredStrategy()
num_replicas = strategy.num_replicas_in_sync
with strategy.scope():
    w = tf.Variable(tf.zeros([3, 1]), name="w")
    b = tf.Variable(tf.zeros([1]), name="b")
    velocity = [tf.Variable(tf.zeros_like(v), trainable=False) for v in (w, b)]
    sums = [
        tf.Variable(
            tf.zeros_like(v),
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )
        for v in (w, b)
    ]
    steps = tf.Variable(
        0, dtype=tf.int64, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA, name="steps"
    )
    largest = tf.Variable(
        0.0,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.MEAN,
    )


def momentum_update(strategy, variables, velocities, gradients, rate):
    reduced = strategy.extended.batch_reduce_to(
        tf.distribute.ReduceOp.SUM, list(zip(gradients, variables))
    )

    def update(v, velocity, gradient):
        velocity.assign(0.9 * velocity + gradient)
        v.assign_sub(rate * velocity)

    for v, own, gradient in zip(variables, velocities, reduced):
        strategy.extended.update(v, update, args=(own, gradient), group=False)


@tf.function
def accumulate(inputs):
    def step(x, y):
        with tf.GradientTape() as tape:
            error = tf.matmul(x, w) + b - y
            loss = tf.reduce_sum(error * error) / 8.0
        for total, gradient in zip(sums, tape.gradient(loss, [w, b])):
            total.assign_add(gradient / ACCUMULATE)
        steps.assign_add(1)
        largest.assign(tf.reduce_max(tf.abs(error)) * 0 + 1.0)
        return loss

    losses = strategy.run(step, args=inputs)
    return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)


@tf.function
def apply():
    def step():
        context = tf.distribute.get_replica_context()
        gradients = [total.read_value() for total in sums]
        context.merge_call(momentum_update, args=([w, b], velocity, gradients, 0.05))
        for total in sums:
            total.assign(tf.zeros_like(total))

    strategy.run(step)


dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
for epoch in range(3):
    for number, inputs in enumerate(strategy.experimental_distribute_dataset(dataset)):
        loss = accumulate(inputs)
        if number % ACCUMULATE == ACCUMULATE - 1:
            apply()
    print("epoch %d loss %.5f" % (epoch, loss))
print("w", np.round(w.numpy().ravel(), 4).tolist(), "b %.4f" % b.numpy()[0])
print("steps", int(steps.numpy()), "largest %.1f" % float(largest.read_value()))
print("sums %.1f" % float(tf.reduce_sum(tf.abs(sums[0].read_value()))))
