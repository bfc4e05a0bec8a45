"""A convolutional variational autoencoder, as in TensorFlow's tutorial of generative models."""

import numpy as np

import distributary.compat.tensorflow as tf

LATENT_DIM, BATCH_SIZE, EPOCHS = 2, 16, 2
random = np.random.default_rng(0)
# The tutorial draws `eps` in the model; here it comes with the images, to compare the numbers.
images = np.where(random.random((40, 8, 8, 1)) > 0.5, 1.0, 0.0).astype("float32")
noise = random.normal(size=(40, LATENT_DIM)).astype("float32")


class CVAE(tf.keras.Model):
    """Convolutional variational autoencoder."""

    def __init__(self, latent_dim):
        super(CVAE, self).__init__()
        self.latent_dim = latent_dim
        self.encoder = tf.keras.Sequential(
            [
                tf.keras.layers.InputLayer(input_shape=(8, 8, 1)),
                tf.keras.layers.Conv2D(filters=4, kernel_size=3, strides=(2, 2), activation="relu"),
                tf.keras.layers.Flatten(),
                tf.keras.layers.Dense(latent_dim + latent_dim),
            ]
        )
        self.decoder = tf.keras.Sequential(
            [
                tf.keras.layers.InputLayer(input_shape=(latent_dim,)),
                tf.keras.layers.Dense(units=4 * 4 * 2, activation=tf.nn.relu),
                tf.keras.layers.Reshape(target_shape=(4, 4, 2)),
                tf.keras.layers.Conv2DTranspose(
                    filters=4, kernel_size=3, strides=2, padding="same", activation="relu"
                ),
                tf.keras.layers.Conv2DTranspose(
                    filters=1, kernel_size=3, strides=1, padding="same"
                ),
            ]
        )

    @tf.function
    def sample(self, eps=None):
        if eps is None:
            eps = tf.random.normal(shape=(100, self.latent_dim))
        return self.decode(eps, apply_sigmoid=True)

    def encode(self, x):
        mean, logvar = tf.split(self.encoder(x), num_or_size_splits=2, axis=1)
        return mean, logvar

    def reparameterize(self, mean, logvar, eps):
        return eps * tf.exp(logvar * 0.5) + mean

    def decode(self, z, apply_sigmoid=False):
        logits = self.decoder(z)
        if apply_sigmoid:
            probs = tf.sigmoid(logits)
            return probs
        return logits


def log_normal_pdf(sample, mean, logvar, raxis=1):
    log2pi = tf.math.log(2.0 * np.pi)
    return tf.reduce_sum(
        -0.5 * ((sample - mean) ** 2.0 * tf.exp(-logvar) + logvar + log2pi), axis=raxis
    )


def compute_loss(model, x, eps):
    mean, logvar = model.encode(x)
    z = model.reparameterize(mean, logvar, eps)
    x_logit = model.decode(z)
    cross_ent = tf.nn.sigmoid_cross_entropy_with_logits(logits=x_logit, labels=x)
    logpx_z = -tf.reduce_sum(cross_ent, axis=[1, 2, 3])
    logpz = log_normal_pdf(z, 0.0, 0.0)
    logqz_x = log_normal_pdf(z, mean, logvar)
    return tf.nn.compute_average_loss(-(logpx_z + logpz - logqz_x), global_batch_size=BATCH_SIZE)


strategy = tf.distribute.MirroredStrategy()
with strategy.scope():
    model = CVAE(LATENT_DIM)
    for part in (model.encoder, model.decoder):
        part.set_weights([random.normal(0, 0.2, w.shape) for w in part.get_weights()])
    optimizer = tf.keras.optimizers.Adam(1e-3)
    optimizer.build(model.trainable_variables)


@tf.function
def train_step(model, x, eps, optimizer):
    """Executes one training step and returns the loss."""

    def replica_step(x, eps):
        with tf.GradientTape() as tape:
            loss = compute_loss(model, x, eps)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    per_replica = strategy.run(replica_step, args=(x, eps))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica, axis=None)


train = tf.data.Dataset.from_tensor_slices((images[:32], noise[:32])).batch(BATCH_SIZE)
train = strategy.experimental_distribute_dataset(train)
test = tf.data.Dataset.from_tensor_slices((images[32:], noise[32:])).batch(8)
for epoch in range(1, EPOCHS + 1):
    for x, eps in train:
        step_loss = train_step(model, x, eps, optimizer)
        print("step %.3f" % step_loss)
    loss = tf.keras.metrics.Mean()
    for test_x, test_eps in test:
        loss(compute_loss(model, test_x, test_eps))
    elbo = -loss.result()
    print("Epoch: {}, Test set ELBO: {:.3f}".format(epoch, elbo.numpy()))

predictions = model.sample(tf.constant(noise[:4]))
print(predictions.shape, "%.4f" % tf.reduce_mean(predictions))
