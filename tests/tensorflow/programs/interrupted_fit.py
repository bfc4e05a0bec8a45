"""`fit` on workers, broken off and taken up again, as in TensorFlow's tutorial."""

import json
import os
import sys

import numpy as np

import distributary.compat.tensorflow as tf

sys.path.insert(0, ".")
per_worker_batch_size = 8
tf_config = json.loads(os.environ.get("TF_CONFIG") or "{}")
num_workers = len(tf_config["cluster"]["worker"]) if tf_config else 1
folder = os.environ.get("SHARED_FOLDER", ".")


def mnist_dataset(batch_size):
    random = np.random.default_rng(0)
    x_train = random.integers(0, 255, (64, 6, 6)).astype("uint8") / np.float32(255)
    y_train = random.integers(0, 4, 64).astype(np.int64)
    train_dataset = tf.data.Dataset.from_tensor_slices((x_train, y_train)).repeat()
    return train_dataset.batch(batch_size)


def build_and_compile_cnn_model():
    model = tf.keras.Sequential(
        [
            tf.keras.layers.InputLayer(shape=(6, 6)),
            tf.keras.layers.Reshape(target_shape=(6, 6, 1)),
            tf.keras.layers.Conv2D(4, 3, activation="relu"),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(4),
        ]
    )
    values = np.random.default_rng(1)
    model.set_weights([values.normal(0, 0.2, w.shape) for w in model.get_weights()])
    model.compile(
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=tf.keras.optimizers.SGD(learning_rate=0.1),
        metrics=["accuracy"],
    )
    return model


strategy = tf.distribute.MultiWorkerMirroredStrategy(
    communication_options=tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation.AUTO
    )
)
options = tf.data.Options()
options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
global_batch_size = per_worker_batch_size * num_workers
multi_worker_dataset = mnist_dataset(global_batch_size).with_options(options)


class InterruptingCallback(tf.keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            raise RuntimeError("Interruption")


def callbacks():
    return [
        tf.keras.callbacks.BackupAndRestore(backup_dir=os.path.join(folder, "backup")),
        tf.keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: started.append(epoch)),
    ]


started = []
with strategy.scope():
    multi_worker_model = build_and_compile_cnn_model()
try:
    multi_worker_model.fit(
        multi_worker_dataset,
        epochs=4,
        steps_per_epoch=4,
        callbacks=[*callbacks(), InterruptingCallback()],
        verbose=0,
    )
except RuntimeError as error:
    print("interrupted:", error)
with strategy.scope():
    multi_worker_model = build_and_compile_cnn_model()
history = multi_worker_model.fit(
    multi_worker_dataset, epochs=4, steps_per_epoch=4, callbacks=callbacks(), verbose=0
)
print("epochs", started, history.epoch)
print("iterations", multi_worker_model.optimizer.iterations.numpy())


def _is_chief(task_type, task_id):
    return (task_type == "worker" and task_id == 0) or task_type is None


def write_filepath(filepath, task_type, task_id):
    dirpath = os.path.dirname(filepath)
    base = os.path.basename(filepath)
    if not _is_chief(task_type, task_id):
        dirpath = os.path.join(dirpath, "workertemp_" + str(task_id))
        tf.io.gfile.makedirs(dirpath)
    return os.path.join(dirpath, base)


task_type, task_id = strategy.cluster_resolver.task_type, strategy.cluster_resolver.task_id
model_path = os.path.join(folder, "keras-model.keras")
write_model_path = write_filepath(model_path, task_type, task_id)
multi_worker_model.save(write_model_path)
if not _is_chief(task_type, task_id):
    tf.io.gfile.rmtree(os.path.dirname(write_model_path))
else:
    loaded_model = tf.keras.models.load_model(model_path)
    x, y = next(iter(mnist_dataset(16)))
    print("loaded", np.allclose(loaded_model(x), multi_worker_model(x), atol=1e-5))
    print("loss %.4f" % loaded_model.evaluate(x, y, verbose=0)[0])
