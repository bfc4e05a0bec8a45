"""The TensorFlow peers: strategies of `tf.distribute`, in processes of their own."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf
from _peers import Peer, stepping, timed
from _workloads import NUM_HEADS, NUM_LAYERS, ROW_BATCH, WORKLOADS, Workload, random_rows

__all__ = ["LOSSES", "peers"]

Tensor: TypeAlias = Any
Parameters: TypeAlias = Mapping[str, Tensor]

_BETA_1, _BETA_2, _EPSILON = 0.9, 0.999, 1e-8


def peers(
    names: Sequence[str], workload: str = "", num_replicas: int | None = None, num_steps: int = 0
) -> list[Peer]:
    """Returns peers of a process; without a number of replicas, of a worker of several.

    Args:
        names: `"loop"` for a custom loop, `"fit"` for that of Keras, `"tf.data"` for an input.
        workload: What is trained.
        num_replicas: Logical CPU devices that are used.
        num_steps: Longest epoch.
    """
    if names == ["tf.data"]:
        return [_batches_from_memory()]
    strategy = (
        tf.distribute.MultiWorkerMirroredStrategy()
        if num_replicas is None
        else _mirrored(num_replicas)
    )
    if names == ["loop"]:
        return [_build(WORKLOADS[workload], strategy)]
    import _keras

    np.random.seed(0)
    model = _keras.build_model(WORKLOADS[workload], strategy.scope())
    return [_keras.fit("fit", model, WORKLOADS[workload], num_steps)]


def _mirrored(num_replicas: int) -> Any:
    """Returns a `MirroredStrategy` of logical CPU devices; before TensorFlow has started."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * num_replicas
    )
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(num_replicas)])


def _batches_from_memory() -> Peer:
    rows = random_rows()
    dataset = tf.data.Dataset.from_tensor_slices(rows).shuffle(len(rows)).repeat().batch(ROW_BATCH)
    batches = dataset.prefetch(tf.data.AUTOTUNE).as_numpy_iterator()

    def take(num_steps: int) -> None:
        for _ in range(num_steps):
            next(batches)

    return timed("tf.data", take)


def _build(workload: Workload, strategy: Any) -> Peer:
    with strategy.scope():
        variables = {
            name: tf.Variable(value, name=name.replace("/", "_"))
            for name, value in workload.parameters().items()
        }
        update = _adam(workload, variables) if workload.optimizer == "adam" else _sgd(workload)
    sum_of_losses = LOSSES[workload.model]
    names = list(variables)

    def replica_step(x: Tensor, y: Tensor) -> Tensor:
        with tf.GradientTape() as tape:
            parameters: Parameters = variables
            if workload.model == "wide" and not workload.sparse:
                # An identity in between makes the gradient of the look-up dense.
                parameters = {**variables, "table": tf.identity(variables["table"])}
            loss = sum_of_losses(parameters, x, y) / workload.global_batch_size
        gradients = tape.gradient(loss, [variables[name] for name in names])
        if workload.model == "wide" and not workload.sparse:
            gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
        context = tf.distribute.get_replica_context()
        *gradients, loss = context.all_reduce(tf.distribute.ReduceOp.SUM, [*gradients, loss])
        update(dict(zip(names, gradients, strict=True)), variables)
        return loss

    @tf.function
    def step(x: Tensor, y: Tensor) -> Tensor:
        return strategy.experimental_local_results(strategy.run(replica_step, args=(x, y)))[0]

    def distribute(array: Any) -> Tensor:
        return strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(array[context.replica_id_in_sync_group])
        )

    batches = [
        tuple(map(distribute, batch)) for batch in workload.batches(strategy.num_replicas_in_sync)
    ]
    return stepping(
        "loop",
        lambda number: step(*batches[number % len(batches)]),
        lambda loss: loss.numpy(),
        lambda loss: float(loss.numpy()),
    )


def _adam(workload: Workload, variables: Parameters) -> Callable[[Parameters, Parameters], None]:
    first = {name: tf.Variable(tf.zeros_like(value)) for name, value in variables.items()}
    second = {name: tf.Variable(tf.zeros_like(value)) for name, value in variables.items()}
    power_1, power_2 = tf.Variable(1.0), tf.Variable(1.0)

    def update(gradients: Parameters, variables: Parameters) -> None:
        power_1.assign(power_1 * _BETA_1)
        power_2.assign(power_2 * _BETA_2)
        # TensorFlow's fused kernel adds epsilon to the uncorrected root; the factor turns that
        # into optax's rule, which adds it to the corrected one.
        epsilon = _EPSILON * tf.sqrt(1.0 - power_2)
        for name, gradient in gradients.items():
            tf.raw_ops.ResourceApplyAdam(
                var=variables[name].handle,
                m=first[name].handle,
                v=second[name].handle,
                beta1_power=power_1.read_value(),
                beta2_power=power_2.read_value(),
                lr=workload.learning_rate,
                beta1=_BETA_1,
                beta2=_BETA_2,
                epsilon=epsilon,
                grad=tf.convert_to_tensor(gradient),
            )

    return update


def _sgd(workload: Workload) -> Callable[[Parameters, Parameters], None]:

    def update(gradients: Parameters, variables: Parameters) -> None:
        rate = workload.learning_rate
        for name, gradient in gradients.items():
            if isinstance(gradient, tf.IndexedSlices):
                tf.raw_ops.ResourceScatterSub(
                    resource=variables[name].handle,
                    indices=gradient.indices,
                    updates=rate * gradient.values,
                )
            else:
                variables[name].assign_sub(rate * gradient)

    return update


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return tf.nn.sparse_softmax_cross_entropy_with_logits(targets, logits)


def _mlp_loss(p: Parameters, x: Tensor, y: Tensor) -> Tensor:
    hidden = tf.nn.relu(x @ p["hidden_kernel"] + p["hidden_bias"])
    return tf.reduce_sum(_cross_entropy(hidden @ p["output_kernel"] + p["output_bias"], y))


def _normalize(x: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    centred = x - tf.reduce_mean(x, axis=-1, keepdims=True)
    variance = tf.reduce_mean(tf.square(centred), axis=-1, keepdims=True)
    return centred * tf.math.rsqrt(variance + 1e-5) * scale + offset


def _transformer_loss(p: Parameters, tokens: Tensor, targets: Tensor) -> Tensor:
    x = tf.gather(p["tokens"], tokens) + p["positions"]
    num_examples, length, width = x.shape

    def dense(x: Tensor, name: str) -> Tensor:
        flat = tf.reshape(x, [-1, x.shape[-1]])
        flat = tf.nn.bias_add(flat @ p[f"{name}_kernel"], p[f"{name}_bias"])
        return tf.reshape(flat, [num_examples, length, -1])

    def norm(x: Tensor, name: str) -> Tensor:
        return _normalize(x, p[f"{name}_norm_scale"], p[f"{name}_norm_offset"])

    def heads(x: Tensor) -> Tensor:
        x = tf.reshape(x, [num_examples, length, NUM_HEADS, width // NUM_HEADS])
        return tf.transpose(x, [0, 2, 1, 3])

    for layer in range(NUM_LAYERS):
        normed = norm(x, f"{layer}/attention")
        query, key, value = (
            heads(dense(normed, f"{layer}/{name}")) for name in ("query", "key", "value")
        )
        scores = tf.matmul(query, key, transpose_b=True) * (width // NUM_HEADS) ** -0.5
        mixed = tf.transpose(tf.nn.softmax(scores) @ value, [0, 2, 1, 3])
        mixed = tf.reshape(mixed, [num_examples, length, width])
        x = x + dense(mixed, f"{layer}/projection")
        expanded = tf.nn.relu(dense(norm(x, f"{layer}/feedforward"), f"{layer}/expand"))
        x = x + dense(expanded, f"{layer}/contract")
    logits = dense(_normalize(x, p["norm_scale"], p["norm_offset"]), "output")
    return tf.reduce_sum(tf.reduce_mean(_cross_entropy(logits, targets), axis=1))


def _wide_loss(p: Parameters, ids: Tensor, y: Tensor) -> Tensor:
    features = tf.reshape(tf.nn.embedding_lookup(p["table"], ids), [ids.shape[0], -1])
    hidden = tf.nn.relu(features @ p["hidden_kernel"] + p["hidden_bias"])
    logits = (hidden @ p["output_kernel"] + p["output_bias"])[:, 0]
    return tf.reduce_sum(tf.nn.sigmoid_cross_entropy_with_logits(y, logits))


LOSSES: Mapping[str, Callable[[Parameters, Tensor, Tensor], Tensor]] = {
    "mlp": _mlp_loss,
    "transformer": _transformer_loss,
    "wide": _wide_loss,
}
"""The sums of the examples' losses."""
