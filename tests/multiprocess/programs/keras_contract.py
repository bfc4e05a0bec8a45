"""What Keras does under every synchronous strategy, printed as JSON.

The numbers are the same for any number of workers with as many devices in all.

keras_contract.py FOLDER [sharded | host]
"""

import json
import os
import random as random_of_python
import sys
from pathlib import Path

os.environ["KERAS_BACKEND"] = "jax"

import jax
import numpy as np

import distributary as dist
from distributary.data import Dataset, FixedLengthRecordDataset

directory, *options = sys.argv[1:]
divided = "host" if "host" in options else "sharded" in options
strategy = dist.MultiWorkerMirroredStrategy(experimental_shard_parameters=divided)

import keras  # noqa: E402  (it must not start JAX before the strategy connects it)

extended = strategy.extended
worker = extended.worker_number
folder = Path(directory)
result = {"num_replicas": strategy.num_replicas_in_sync, "worker": worker}

random = np.random.RandomState(0)
x = random.randn(52, 4).astype(np.float32)
y = (x.sum(axis=1) > 0).astype(np.int32)


def rounded(value):
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64).round(6).tolist(), value)


def make_model(dropout=0.0):
    # Not the same on all workers: the chief's initial values count.
    keras.utils.set_random_seed(1 + worker)
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(64, activation="relu"),  # large enough to be divided
            *(
                [keras.layers.BatchNormalization(), keras.layers.Dropout(dropout)]
                if dropout
                else ()
            ),
            keras.layers.Dense(2),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(0.05),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def summary(model, history=None):
    return rounded(
        {
            "weights": model.get_weights(),
            "optimizer": [v.numpy() for v in model.optimizer.variables],
            "history": {} if history is None else history.history,
        }
    )


class StopsOnOneWorker(keras.callbacks.Callback):
    """Only the last worker wants to stop, after the second epoch."""

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1 and worker == extended.num_workers - 1:
            self.model.stop_training = True


with strategy.scope():
    model = make_model(dropout=0.2)
result["initial"] = rounded(model.get_weights())
num_parts = {"host": 2, True: 4, False: 1}[divided]
assert model.weights[0]._value.addressable_shards[0].data.size == 4 * 64 // num_parts
result["read"] = rounded([keras.ops.sum(model.weights[0]), model.weights[0] * 2])

# Shuffled arrays whose last batch is uneven; validation; files of callbacks and of the user.
history = model.fit(
    x,
    y,
    batch_size=12,
    epochs=5,
    validation_data=(x[:24], y[:24]),
    class_weight={0: 1.0, 1: 2.0},
    verbose=2,
    callbacks=[
        keras.callbacks.CSVLogger(folder / "log.csv"),
        keras.callbacks.ModelCheckpoint(folder / "epoch{epoch}.keras", save_freq="epoch"),
        StopsOnOneWorker(),
    ],
)
result["fit"] = summary(model, history)
result["evaluate"] = rounded(model.evaluate(x, y, batch_size=12, verbose=0))
result["predict"] = rounded(model.predict(x, batch_size=12, verbose=0))
assert keras.ops.sum(model.weights[0]).is_fully_addressable

result["train_on_batch"] = rounded(model.train_on_batch(x[:12], y[:12]))
result["predict_on_batch"] = rounded(model.predict_on_batch(x[:12]))
model.save(folder / "shared.keras")
own = folder / f"of_worker{worker}.weights.h5"
model.save_weights(own)
assert own.exists()
model.load_weights(folder / "of_worker0.weights.h5")
with strategy.scope():
    uncompiled = keras.models.clone_model(model)
uncompiled.load_weights(folder / "of_worker0.weights.h5")
result["uncompiled"] = rounded(uncompiled.get_weights())
model.save(folder / "folder", zipped=False)
loaded = keras.models.load_model(folder / "folder")
result["loaded without a strategy"] = rounded(loaded.predict(x, batch_size=12, verbose=0))
with strategy.scope():
    loaded = keras.models.load_model(folder / "shared.keras")
result["loaded"] = rounded(loaded.evaluate(x[:48], y[:48], batch_size=12, verbose=0))
for end in ("keras", "h5"):  # every worker has a file of its own, and the chief's counts
    make_model().save(folder / f"own{worker}.{end}")
    with strategy.scope():
        loaded = keras.models.load_model(folder / f"own{worker}.{end}")
    result[f"loaded {end}"] = rounded(loaded.get_weights())

# A loop of one's own over a Keras model.
with strategy.scope():
    model = make_model()
    optimizer = keras.optimizers.Adam(0.05)


def step(inputs, labels):
    with dist.GradientTape() as tape:
        logits = model(inputs, training=True)
        losses = keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
        loss = keras.ops.sum(losses) / 12
    variables = model.trainable_variables
    optimizer.apply(tape.gradient(loss, variables), variables)
    return loss


losses = []
in_order = Dataset.from_tensor_slices((x[:48], y[:48])).batch(12)
for batch in strategy.experimental_distribute_dataset(in_order):
    losses.append(strategy.reduce("SUM", strategy.run(step, args=batch), axis=None))
result["loop"] = rounded([losses, model.get_weights()])

# A table, of which a batch looks up few rows.
with strategy.scope():
    keras.utils.set_random_seed(1 + worker)
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Embedding(4096, 8),
            keras.layers.Flatten(),
            keras.layers.Dense(2),
        ]
    )
    optimizer = keras.optimizers.Adagrad(0.1)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
ids = random.randint(0, 4096, (52, 4))
ids[::5] = 7
history = model.fit(ids, y, batch_size=12, verbose=0)
result["table"] = rounded([history.history, model.predict(ids, batch_size=12, verbose=0)])


def shown():
    hidden = [p.name for p in folder.glob(".*") if not p.name.endswith("-lock")]
    print(json.dumps(result | {"hidden files": hidden}))


if "host" in options:  # what follows is about data, which the parts do not change
    shown()
    sys.exit()

# A dataset shuffled without a seed; several steps in one program.
with strategy.scope():
    model = make_model()
    model.steps_per_execution = 2
dataset = Dataset.from_tensor_slices((x[:48], y[:48])).shuffle(48).batch(12)
result["dataset"] = summary(model, model.fit(dataset, epochs=2, verbose=0))

# Data that each worker reads for itself: every example counts once, predictions keep their order.
files = folder / f"data{worker}"
files.mkdir()
for i, (start, end) in enumerate([(0, 20), (20, 33), (33, 52)]):
    x[start:end].tofile(files / f"{i}.bin")
records = FixedLengthRecordDataset(sorted(files.glob("*.bin")), x[0].nbytes)
of_files = records.map(lambda row: np.frombuffer(row, x.dtype)).batch(12)
predicted = model.predict(of_files, verbose=0)
result["predict files"] = rounded(predicted)
of_array = model.predict(x, batch_size=12, verbose=0)
np.testing.assert_allclose(predicted, of_array, rtol=0, atol=1e-6)


def dataset_fn(context):
    own = Dataset.from_tensor_slices((x[:48], y[:48]))
    own = own.shard(context.num_input_pipelines, context.input_pipeline_id)
    return own.batch(context.get_per_replica_batch_size(12))


of_function = strategy.distribute_datasets_from_function(dataset_fn)
result["evaluate function"] = rounded(model.evaluate(of_function, verbose=0))
evaluated = model.evaluate(x[:48], y[:48], batch_size=12, verbose=0)
assert np.allclose(result["evaluate function"], evaluated, atol=1e-5)


# Batches that every worker makes for itself, operation by operation.
def batches():
    for start in range(0, 48, 12):
        yield x[start : start + 12], y[start : start + 12]


with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse", run_eagerly=True)
result["eager"] = rounded(model.fit(batches(), verbose=0).history)


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 5

    def __getitem__(self, index):
        rows = slice(12 * index, 12 * index + 12)
        return x[rows], y[rows]


# Batches that Keras shuffles, in a thread or not; the seeds of the workers differ.
with strategy.scope():
    model = make_model()
for threads in (1, 2):
    random_of_python.seed(threads + worker)
    history = model.fit(Batches(workers=threads), epochs=2, verbose=0)
    result[f"shuffled with {threads} threads"] = summary(model, history)

# Workers that are given different data end with a sentence, all of them.
try:
    model.compile(optimizer="sgd", loss="mse")
    model.fit(x + worker, y, verbose=0, shuffle=False)
    result["different data"] = None
except ValueError as error:
    result["different data"] = str(error)

shown()
