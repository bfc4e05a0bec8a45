"""A module with variables, trained eagerly and by functions, as in TensorFlow's basics guides."""

import numpy as np

import distributary.compat.tensorflow as tf

TRUE_W, TRUE_B = 3.0, 2.0
random = np.random.default_rng(0)
x = tf.linspace(-2, 2, 101)
x = tf.cast(x, tf.float32)
noise = tf.constant(random.normal(size=101).astype(np.float32))
y = x * TRUE_W + TRUE_B + noise


class MyModel(tf.Module):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.w = tf.Variable(5.0)
        self.b = tf.Variable(0.0)

    def __call__(self, x):
        return self.w * x + self.b


model = MyModel()
print("variables", [v.numpy() for v in model.variables], len(model.trainable_variables))


def loss(target_y, predicted_y):
    return tf.reduce_mean(tf.square(target_y - predicted_y))


print("untrained loss %1.4f" % loss(y, model(x)).numpy())


def train(model, x, y, learning_rate):
    with tf.GradientTape() as t:
        current_loss = loss(y, model(x))
    dw, db = t.gradient(current_loss, [model.w, model.b])
    model.w.assign_sub(learning_rate * dw)
    model.b.assign_sub(learning_rate * db)


weights = []
for epoch in range(5):
    train(model, x, y, learning_rate=0.1)
    weights.append(model.w.numpy())
    print("epoch %d: w = %.4f, b = %.4f" % (epoch, model.w.numpy(), model.b.numpy()))


class Dense(tf.Module):
    def __init__(self, in_features, out_features, name=None):
        super().__init__(name=name)
        self.w = tf.Variable(tf.ones([in_features, out_features]) * 0.5, name="w")
        self.b = tf.Variable(tf.zeros([out_features]), name="b")

    def __call__(self, x):
        y = tf.matmul(x, self.w) + self.b
        return tf.nn.relu(y)


class Sequential(tf.Module):
    def __init__(self, name=None):
        super().__init__(name=name)
        self.dense_1 = Dense(in_features=3, out_features=3)
        self.dense_2 = Dense(in_features=3, out_features=2)

    @tf.function
    def __call__(self, x):
        x = self.dense_1(x)
        return self.dense_2(x)


nested = Sequential(name="the_model")
print("nested", nested(tf.constant([[2.0, 2.0, 2.0]])).numpy(), len(nested.submodules))
with tf.GradientTape() as tape:
    value = tf.reduce_sum(nested(tf.constant([[2.0, 2.0, 2.0]])))
print("gradient", tape.gradient(value, nested.dense_2.w).numpy().ravel())


# Functions, graphs and control flow.
@tf.function
def tf_sum(values):
    total = 0.0
    for value in values:
        if value > 0:
            total += value
        else:
            continue
    return total


print("sum", tf_sum(tf.constant([1.0, -2.0, 3.0])).numpy())


@tf.function
def collatz(n):
    steps = 0
    while n > 1:
        if n % 2 == 0:
            n = n // 2
        else:
            n = 3 * n + 1
        steps += 1
    return steps


print("collatz", int(collatz(tf.constant(27))))


@tf.custom_gradient
def clipped(x):
    def grad(upstream):
        return tf.clip_by_norm(upstream, 0.5)

    return x, grad


v = tf.Variable(2.0)
with tf.GradientTape() as t:
    output = clipped(v * v)
print("clipped", t.gradient(output, v).numpy())
