"""A small transformer in plain JAX, trained with momentum in a `dist.function`."""

import jax
import jax.numpy as jnp
import numpy as np

import distributary as dist

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS = 256, 16, 128, 4, 1

rng = np.random.default_rng(0)
strategy = dist.MultiWorkerMirroredStrategy()


def weight(name, *shape):
    return dist.Variable(rng.normal(0, 0.02, shape).astype(np.float32), name=name)


def layer():
    return {
        "attend": weight("attend", WIDTH, 3 * WIDTH),
        "mix": weight("mix", WIDTH, WIDTH),
        "up": weight("up", WIDTH, 4 * WIDTH),
        "down": weight("down", 4 * WIDTH, WIDTH),
    }


with strategy.scope():
    embedding = weight("embedding", VOCABULARY, WIDTH)
    layers = [layer() for _ in range(LAYERS)]
    weights = [embedding, *(w for each in layers for w in each.values())]
    momenta = [dist.Variable(np.zeros(w.shape, np.float32), trainable=False) for w in weights]


def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def attention(x, each):
    heads = (norm(x) @ each["attend"]).reshape(*x.shape[:2], HEADS, -1)
    query, key, value = jnp.split(heads, 3, -1)
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(WIDTH / HEADS)
    scores = jnp.where(np.tri(LENGTH, dtype=bool), scores, -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value).reshape(x.shape)


def loss_of(tokens):
    x = embedding.value()[tokens]
    for each in layers:
        x = x + attention(x, each) @ each["mix"]
        x = x + jax.nn.gelu(norm(x) @ each["up"]) @ each["down"]
    chances = jax.nn.log_softmax(norm(x) @ embedding.value().T)
    return -jnp.mean(jnp.take_along_axis(chances[:, :-1], tokens[:, 1:, None], -1))


def step(tokens):
    with dist.GradientTape() as tape:
        loss = loss_of(tokens)
    context = dist.get_replica_context()
    gradients = context.all_reduce("mean", tape.gradient(loss, weights))
    for variable, momentum, gradient in zip(weights, momenta, gradients, strict=True):
        momentum.assign(0.9 * momentum + gradient)
        variable.assign_sub(0.1 * momentum)
    return loss


@dist.function
def train(tokens):
    return strategy.reduce("mean", strategy.run(step, args=(tokens,)), axis=None)


tokens = dist.data.Dataset.from_tensor_slices(rng.integers(0, VOCABULARY, (64, LENGTH)))
for batch in strategy.experimental_distribute_dataset(tokens.batch(64)):
    train(batch)
