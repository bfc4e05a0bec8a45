"""A Wasserstein GAN: gradients of gradients in a train_step, several critic steps, a callback."""

import numpy as np

import distributary.compat.tensorflow as tf
from distributary.compat.tensorflow import keras

random = np.random.default_rng(0)
latent_dim, BATCH_SIZE = 3, 16


class WGAN(keras.Model):
    def __init__(
        self, discriminator, generator, latent_dim, discriminator_extra_steps=2, gp_weight=10.0
    ):
        super().__init__()
        self.discriminator = discriminator
        self.generator = generator
        self.latent_dim = latent_dim
        self.d_steps = discriminator_extra_steps
        self.gp_weight = gp_weight

    def compile(self, d_optimizer, g_optimizer, d_loss_fn, g_loss_fn):
        super().compile()
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer
        self.d_loss_fn = d_loss_fn
        self.g_loss_fn = g_loss_fn

    def call(self, inputs):
        return self.discriminator(inputs)

    def gradient_penalty(self, alpha, real_images, fake_images):
        diff = fake_images - real_images
        interpolated = real_images + alpha * diff
        with tf.GradientTape() as gp_tape:
            gp_tape.watch(interpolated)
            pred = self.discriminator(interpolated, training=True)
        grads = gp_tape.gradient(pred, [interpolated])[0]
        norm = tf.sqrt(tf.reduce_sum(tf.square(grads), axis=[1, 2]))
        gp = tf.reduce_mean((norm - 1.0) ** 2)
        return gp

    def train_step(self, data):
        if isinstance(data, tuple):
            real_images, (alpha, random_latent_vectors) = data
        for i in range(self.d_steps):
            with tf.GradientTape() as tape:
                fake_images = self.generator(random_latent_vectors * (i + 1), training=True)
                fake_logits = self.discriminator(fake_images, training=True)
                real_logits = self.discriminator(real_images, training=True)
                d_cost = self.d_loss_fn(real_img=real_logits, fake_img=fake_logits)
                gp = self.gradient_penalty(alpha, real_images, fake_images)
                d_loss = d_cost + gp * self.gp_weight
            d_gradient = tape.gradient(d_loss, self.discriminator.trainable_variables)
            self.d_optimizer.apply_gradients(
                zip(d_gradient, self.discriminator.trainable_variables)
            )
        with tf.GradientTape() as tape:
            generated_images = self.generator(random_latent_vectors, training=True)
            gen_img_logits = self.discriminator(generated_images, training=True)
            g_loss = self.g_loss_fn(gen_img_logits)
        gen_gradient = tape.gradient(g_loss, self.generator.trainable_variables)
        self.g_optimizer.apply_gradients(zip(gen_gradient, self.generator.trainable_variables))
        return {"d_loss": d_loss, "g_loss": g_loss}


def discriminator_loss(real_img, fake_img):
    real_loss = tf.reduce_mean(real_img)
    fake_loss = tf.reduce_mean(fake_img)
    return fake_loss - real_loss


def generator_loss(fake_img):
    return -tf.reduce_mean(fake_img)


def get_discriminator_model():
    img_input = keras.layers.Input(shape=(4, 4))
    x = keras.layers.Flatten()(img_input)
    x = keras.layers.Dense(8, activation=keras.layers.LeakyReLU(0.2))(x)
    x = keras.layers.Dense(1)(x)
    return keras.models.Model(img_input, x, name="discriminator")


def get_generator_model():
    noise = keras.layers.Input(shape=(latent_dim,))
    x = keras.layers.Dense(8, use_bias=False)(noise)
    x = keras.layers.Activation("tanh")(x)
    x = keras.layers.Dense(16)(x)
    x = keras.layers.Reshape((4, 4))(x)
    return keras.models.Model(noise, x, name="generator")


class GANMonitor(keras.callbacks.Callback):
    def __init__(self, latent):
        self.latent = latent

    def on_epoch_end(self, epoch, logs=None):
        generated_images = self.model.generator(self.latent)
        generated_images = (generated_images * 127.5) + 127.5
        print("epoch %d mean %.3f" % (epoch, generated_images.numpy().mean()))


strategy = tf.distribute.MirroredStrategy()
with strategy.scope():
    d_model, g_model = get_discriminator_model(), get_generator_model()
    for model in (d_model, g_model):
        model.set_weights([random.normal(0, 0.4, w.shape) for w in model.get_weights()])
    wgan = WGAN(d_model, g_model, latent_dim=latent_dim)
    wgan.compile(
        d_optimizer=keras.optimizers.Adam(learning_rate=0.002, beta_1=0.5, beta_2=0.9),
        g_optimizer=keras.optimizers.Adam(learning_rate=0.002, beta_1=0.5, beta_2=0.9),
        g_loss_fn=generator_loss,
        d_loss_fn=discriminator_loss,
    )
train_images = random.normal(size=(48, 4, 4)).astype("float32")
alpha = random.random((48, 1, 1)).astype("float32")
latent = random.normal(size=(48, latent_dim)).astype("float32")
dataset = tf.data.Dataset.from_tensor_slices((train_images, (alpha, latent))).batch(BATCH_SIZE)
history = wgan.fit(dataset, epochs=3, verbose=0, callbacks=[GANMonitor(tf.constant(latent[:4]))])
print(sorted(history.history))
print("weights %.4f" % sum(np.abs(w).sum() for w in wgan.get_weights()))
