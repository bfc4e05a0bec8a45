"""A model with a `train_step` of its own, two optimizers and metrics, in `fit`."""

import numpy as np

import distributary.compat.tensorflow as tf


class GAN(tf.keras.Model):
    def __init__(self, discriminator, generator, latent_dim):
        super().__init__()
        self.discriminator = discriminator
        self.generator = generator
        self.latent_dim = latent_dim

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer
        self.loss_fn = loss_fn
        self.d_loss_metric = tf.keras.metrics.Mean(name="d_loss")
        self.g_loss_metric = tf.keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self):
        return [self.d_loss_metric, self.g_loss_metric]

    def call(self, inputs):
        return self.discriminator(inputs)

    def train_step(self, data):
        real, noise = data
        batch_size = tf.shape(real)[0]
        generated = self.generator(noise)
        combined = tf.concat([generated, real], axis=0)
        labels = tf.concat([tf.ones((batch_size, 1)), tf.zeros((batch_size, 1))], axis=0)

        with tf.GradientTape() as tape:
            predictions = self.discriminator(combined)
            d_loss = self.loss_fn(labels, predictions)
        grads = tape.gradient(d_loss, self.discriminator.trainable_weights)
        self.d_optimizer.apply_gradients(zip(grads, self.discriminator.trainable_weights))

        misleading_labels = tf.zeros((batch_size, 1))
        with tf.GradientTape() as tape:
            predictions = self.discriminator(self.generator(noise))
            g_loss = self.loss_fn(misleading_labels, predictions)
        grads = tape.gradient(g_loss, self.generator.trainable_weights)
        self.g_optimizer.apply_gradients(zip(grads, self.generator.trainable_weights))

        self.d_loss_metric.update_state(d_loss)
        self.g_loss_metric.update_state(g_loss)
        return {"d_loss": self.d_loss_metric.result(), "g_loss": self.g_loss_metric.result()}


random = np.random.default_rng(0)
real = random.normal(2.0, 0.5, (48, 4)).astype(np.float32)
noise = random.normal(size=(48, 3)).astype(np.float32)


def dense_net(sizes, inputs):
    layers = [tf.keras.layers.Input((inputs,))]
    layers += [tf.keras.layers.Dense(size, activation="tanh") for size in sizes[:-1]]
    net = tf.keras.Sequential([*layers, tf.keras.layers.Dense(sizes[-1])])
    net.set_weights([random.normal(0, 0.3, w.shape) for w in net.get_weights()])
    return net


strategy = tf.distribute.MirroredStrategy()
with strategy.scope():
    gan = GAN(dense_net([8, 1], 4), dense_net([8, 4], 3), 3)
    gan.compile(
        d_optimizer=tf.keras.optimizers.SGD(0.1),
        g_optimizer=tf.keras.optimizers.SGD(0.2),
        loss_fn=tf.keras.losses.BinaryCrossentropy(from_logits=True),
    )
dataset = tf.data.Dataset.from_tensor_slices((real, noise)).batch(16)
history = gan.fit(dataset, epochs=3, verbose=0)
for name in sorted(history.history):
    print(name, ["%.4f" % value for value in history.history[name]])
print("generated %.4f" % gan.generator.predict(noise, verbose=0).mean())
