"""A Keras model on parameter servers: training, and evaluation by the coordinator."""

import os
import socket

import numpy as np

import distributary.compat.tensorflow as tf

NUM_PS = 2
NUM_WORKERS = 1


def pick_unused_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def create_in_process_cluster(num_workers, num_ps):
    """Creates and starts local servers and returns the cluster_resolver."""
    worker_ports = [pick_unused_port() for _ in range(num_workers)]
    ps_ports = [pick_unused_port() for _ in range(num_ps)]

    cluster_dict = {}
    cluster_dict["worker"] = ["localhost:%s" % port for port in worker_ports]
    if num_ps > 0:
        cluster_dict["ps"] = ["localhost:%s" % port for port in ps_ports]

    cluster_spec = tf.train.ClusterSpec(cluster_dict)

    for i in range(num_workers):
        tf.distribute.Server(cluster_spec, job_name="worker", task_index=i, protocol="grpc")
    for i in range(num_ps):
        tf.distribute.Server(cluster_spec, job_name="ps", task_index=i, protocol="grpc")

    return tf.distribute.cluster_resolver.SimpleClusterResolver(cluster_spec, rpc_layer="grpc")


os.environ["GRPC_FAIL_FAST"] = "use_caller"
cluster_resolver = create_in_process_cluster(NUM_WORKERS, NUM_PS)

strategy = tf.distribute.ParameterServerStrategy(cluster_resolver)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)

feature_vocab = ["avenger", "ironman", "batman", "hulk", "spiderman", "kingkong"]
weights = np.random.default_rng(3)


def feature_and_label(step, count):
    data = np.random.default_rng(step)
    ids = data.integers(0, len(feature_vocab), (count, 3)).astype(np.int32)
    return ids, (ids.max(1, keepdims=True) > 3).astype(np.float32)


with strategy.scope():
    model_input = tf.keras.layers.Input(shape=(3,), dtype=tf.int32, name="model_input")
    emb_layer = tf.keras.layers.Embedding(input_dim=len(feature_vocab), output_dim=4)
    x = tf.keras.layers.GlobalAveragePooling1D()(emb_layer(model_input))
    dense_output = tf.keras.layers.Dense(units=1, activation="sigmoid")(x)
    model = tf.keras.Model(model_input, dense_output)
    model.set_weights([weights.normal(0, 0.5, w.shape) for w in model.get_weights()])
    optimizer = tf.keras.optimizers.SGD(learning_rate=0.2, momentum=0.5)
    accuracy = tf.keras.metrics.Accuracy()


def dataset_fn(_):
    ids, labels = feature_and_label(0, 96)
    dataset = tf.data.Dataset.from_tensor_slices((ids, labels)).repeat().batch(32)
    return dataset.prefetch(tf.data.experimental.AUTOTUNE)


@tf.function
def step_fn(iterator):
    def replica_fn(batch_data, labels):
        with tf.GradientTape() as tape:
            pred = model(batch_data, training=True)
            per_example_loss = tf.keras.losses.BinaryCrossentropy(
                reduction=tf.keras.losses.Reduction.NONE
            )(labels, pred)
            loss = tf.nn.compute_average_loss(per_example_loss)
            gradients = tape.gradient(loss, model.trainable_variables)

        optimizer.apply_gradients(zip(gradients, model.trainable_variables))

        actual_pred = tf.cast(tf.math.greater(pred, 0.5), tf.int64)
        accuracy.update_state(labels, actual_pred)
        return loss

    batch_data, labels = next(iterator)
    losses = strategy.run(replica_fn, args=(batch_data, labels))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)


@tf.function
def per_worker_dataset_fn():
    return strategy.distribute_datasets_from_function(dataset_fn)


per_worker_dataset = coordinator.create_per_worker_dataset(per_worker_dataset_fn)
per_worker_iterator = iter(per_worker_dataset)

for i in range(4):
    accuracy.reset_state()
    for _ in range(3):
        coordinator.schedule(step_fn, args=(per_worker_iterator,))
    # Wait at epoch boundaries.
    coordinator.join()
    print("Finished epoch %d, accuracy is %f." % (i, accuracy.result().numpy()))

loss = coordinator.schedule(step_fn, args=(per_worker_iterator,))
print("Final loss is %f" % loss.fetch())

# Inline evaluation on the coordinator.
eval_ids, eval_labels = feature_and_label(7, 24)
eval_accuracy = tf.keras.metrics.Accuracy()
for ids, labels in tf.data.Dataset.from_tensor_slices((eval_ids, eval_labels)).batch(8):
    pred = model(ids, training=False)
    actual_pred = tf.cast(tf.greater(pred, 0.5), tf.int64)
    eval_accuracy.update_state(labels, actual_pred)
print("Evaluation accuracy: %f" % eval_accuracy.result())
