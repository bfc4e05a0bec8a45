"""A loop that stops early, and starts again where it was, as in TensorFlow's checkpoint guide."""

import os

import numpy as np

import distributary.compat.tensorflow as tf

random = np.random.default_rng(0)
inputs = random.normal(size=(24, 3)).astype("float32")
targets = (inputs @ random.normal(size=(3, 2)) + 1.0).astype("float32")


class Net(tf.keras.Model):
    """A simple linear model."""

    def __init__(self):
        super(Net, self).__init__()
        self.l1 = tf.keras.layers.Dense(
            2, kernel_initializer=tf.keras.initializers.Constant(0.3), name="l1"
        )

    def call(self, x):
        return self.l1(x)


def toy_dataset():
    return tf.data.Dataset.from_tensor_slices(dict(x=inputs, y=targets)).repeat().batch(4)


def train_step(net, example, optimizer):
    """Trains `net` on `example` using `optimizer`."""
    with tf.GradientTape() as tape:
        output = net(example["x"])
        loss = tf.reduce_mean(tf.abs(output - example["y"]))
    variables = net.trainable_variables
    gradients = tape.gradient(loss, variables)
    optimizer.apply_gradients(zip(gradients, variables))
    return loss


def train_and_checkpoint(net, manager):
    ckpt.restore(manager.latest_checkpoint)
    if manager.latest_checkpoint:
        print("Restored from {}".format(os.path.basename(manager.latest_checkpoint)))
    else:
        print("Initializing from scratch.")
    for _ in range(20):
        example = next(iterator)
        loss = train_step(net, example, opt)
        ckpt.step.assign_add(1)
        if int(ckpt.step) % 10 == 0:
            save_path = manager.save()
            name = os.path.basename(save_path)
            print("Saved checkpoint for step {}: {}".format(int(ckpt.step), name))
            print("loss {:1.2f}".format(loss.numpy()))


for run in range(2):
    net = Net()
    net(tf.constant(inputs[:1]))
    opt = tf.keras.optimizers.Adam(0.1)
    dataset = toy_dataset()
    iterator = iter(dataset)
    ckpt = tf.train.Checkpoint(step=tf.Variable(1), optimizer=opt, net=net, iterator=iterator)
    manager = tf.train.CheckpointManager(ckpt, "./tf_ckpts", max_to_keep=3)
    train_and_checkpoint(net, manager)
print([os.path.basename(path) for path in manager.checkpoints])

# Under a strategy: ends when the validation loss no longer falls.
strategy = tf.distribute.MirroredStrategy()
with strategy.scope():
    model = Net()
    model(tf.constant(inputs[:1]))
    optimizer = tf.keras.optimizers.SGD(0.4)
    val_loss = tf.keras.metrics.MeanAbsoluteError()
    optimizer.build(model.trainable_variables)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, epoch=tf.Variable(0))
best = tf.train.CheckpointManager(checkpoint, "./best", max_to_keep=1, checkpoint_name="best")


@tf.function
def step(batch):
    def replica(x, y):
        with tf.GradientTape() as tape:
            losses = tf.reduce_mean(tf.abs(model(x) - y), axis=-1)
            loss = tf.nn.compute_average_loss(losses, global_batch_size=6)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    losses = strategy.run(replica, args=(batch["x"], batch["y"]))
    return strategy.reduce("SUM", losses, axis=None)


train = tf.data.Dataset.from_tensor_slices(dict(x=inputs[:18], y=targets[:18])).batch(6)
train = strategy.experimental_distribute_dataset(train)
patience, wait, best_loss = 2, 0, float("inf")
for epoch in range(20):
    for batch in train:
        step(batch)
    val_loss.update_state(targets[18:], model(inputs[18:]))
    current = val_loss.result().numpy()
    val_loss.reset_state()
    if current < best_loss - 0.05:
        best_loss, wait = current, 0
        checkpoint.epoch.assign(epoch)
        best.save()
    else:
        wait += 1
        optimizer.learning_rate = optimizer.learning_rate * 0.5
        if wait >= patience:
            print("stopped in epoch %d, best %.4f" % (epoch, best_loss))
            break
checkpoint.restore(best.latest_checkpoint).assert_consumed()
val_loss.update_state(targets[18:], model(inputs[18:]))
print("restored", os.path.basename(best.latest_checkpoint), "%.4f" % val_loss.result().numpy())
print("of epoch", checkpoint.epoch.numpy(), "rate %.3f" % optimizer.learning_rate.numpy())
