"""Two models with an optimizer each, as in TensorFlow's tutorial of generative models."""

import numpy as np

import distributary.compat.tensorflow as tf

strategy = tf.distribute.MirroredStrategy()
BATCH_SIZE = 16
noise_dim = 4
random = np.random.default_rng(0)
images = random.normal(size=(32, 6)).astype("float32")
noises = random.normal(size=(32, noise_dim)).astype("float32")


def with_values(model):
    values = np.random.default_rng(len(model.weights))
    model.set_weights([values.normal(0, 0.3, w.shape) for w in model.get_weights()])
    return model


with strategy.scope():
    generator = with_values(
        tf.keras.Sequential(
            [
                tf.keras.Input((noise_dim,)),
                tf.keras.layers.Dense(8, use_bias=False),
                tf.keras.layers.LeakyReLU(),
                tf.keras.layers.Dense(6, activation="tanh"),
            ]
        )
    )
    discriminator = with_values(
        tf.keras.Sequential(
            [
                tf.keras.Input((6,)),
                tf.keras.layers.Dense(8),
                tf.keras.layers.LeakyReLU(),
                tf.keras.layers.Dense(1),
            ]
        )
    )
    cross_entropy = tf.keras.losses.BinaryCrossentropy(
        from_logits=True, reduction=tf.keras.losses.Reduction.NONE
    )
    generator_optimizer = tf.keras.optimizers.Adam(1e-3)
    discriminator_optimizer = tf.keras.optimizers.Adam(1e-3)


def discriminator_loss(real_output, fake_output):
    real_loss = cross_entropy(tf.ones_like(real_output), real_output)
    fake_loss = cross_entropy(tf.zeros_like(fake_output), fake_output)
    return tf.nn.compute_average_loss(real_loss + fake_loss, global_batch_size=BATCH_SIZE)


def generator_loss(fake_output):
    loss = cross_entropy(tf.ones_like(fake_output), fake_output)
    return tf.nn.compute_average_loss(loss, global_batch_size=BATCH_SIZE)


def train_step(images, noise):
    with tf.GradientTape() as gen_tape, tf.GradientTape() as disc_tape:
        generated_images = generator(noise, training=True)
        real_output = discriminator(images, training=True)
        fake_output = discriminator(generated_images, training=True)
        gen_loss = generator_loss(fake_output)
        disc_loss = discriminator_loss(real_output, fake_output)
    gen_gradients = gen_tape.gradient(gen_loss, generator.trainable_variables)
    disc_gradients = disc_tape.gradient(disc_loss, discriminator.trainable_variables)
    generator_optimizer.apply_gradients(zip(gen_gradients, generator.trainable_variables))
    discriminator_optimizer.apply_gradients(zip(disc_gradients, discriminator.trainable_variables))
    return gen_loss, disc_loss


@tf.function
def distributed_train_step(batch):
    losses = strategy.run(train_step, args=batch)
    return [strategy.reduce(tf.distribute.ReduceOp.SUM, loss, axis=None) for loss in losses]


dataset = tf.data.Dataset.from_tensor_slices((images, noises)).batch(BATCH_SIZE)
dataset = strategy.experimental_distribute_dataset(dataset)
for epoch in range(2):
    for batch in dataset:
        gen_loss, disc_loss = distributed_train_step(batch)
        print("losses", float(gen_loss), float(disc_loss))
