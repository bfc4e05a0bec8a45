"""Workers that differ in what the arguments name, one difference after the other.

Each case is a function of whether this worker is the odd one. What it raises is printed.
"""

import gc
import json
import os
import sys
import traceback

import jax
import jax.numpy as jnp
import keras
import numpy as np

import distributary as dist
from distributary.data import Dataset

heartbeat_timeout_seconds = 3.0
strategy = dist.MultiWorkerMirroredStrategy(
    communication_options=dist.experimental.CommunicationOptions(
        heartbeat_timeout_seconds=heartbeat_timeout_seconds
    )
)
worker, num_workers = strategy.extended.worker_number, strategy.extended.num_workers
odd = worker == num_workers - 1
SUM, MEAN = dist.ReduceOp.SUM, dist.ReduceOp.MEAN
_IN_KERAS = {
    "the_activation_of_a_layer",
    "fit_and_evaluate",
    "validation",
    "a_batch",
    "a_variable_made_outside_of_the_scope_and_assigned",
}
_OURS = os.path.dirname(dist.__file__)
cases = {}


def case(function):
    cases[function.__name__] = function
    return function


def context():
    return dist.get_replica_context()


def variable(name="v", shape=(3,), dtype=np.float32, **options):
    with strategy.scope():
        return dist.Variable(np.zeros(shape, dtype), name=name, **options)


def total(value, op=SUM):
    """Sums a value of the replicas in a program."""

    def step():
        return context().all_reduce(op, value)

    return strategy.run(step)


def per_worker(value):
    return strategy.experimental_distribute_values_from_function(lambda _: value)


def model(activation="relu", optimizer="sgd"):
    keras.utils.clear_session()  # names do not depend on the cases before
    with strategy.scope():
        built = keras.Sequential(
            [keras.Input((3,)), keras.layers.Dense(4, activation), keras.layers.Dense(1)],
            name="net",
        )
        built.compile(optimizer, "mse")
    return built


x, y = np.ones((32, 3), np.float32), np.ones((32, 1), np.float32)


def fit(built, **options):
    return built.fit(x, y, **{"batch_size": 8, "epochs": 1, "verbose": 0, **options})


def summed(rate):
    return strategy.run(lambda rate: context().all_reduce(SUM, rate), args=(rate,))


ONES = np.ones(2, np.float32)
cases |= {
    # Programs.
    "operation": lambda: total(ONES, MEAN if odd else SUM),
    "a_large_constant": lambda: total(np.where(np.arange(10_000) == 7777, np.float32(odd), 0)),
    "a_python_argument": lambda: summed(0.2 if odd else 0.1),
    "an_array_with_a_number": lambda: summed(jnp.float32(0.2 if odd else 0.1)),
    "the_shape_of_an_argument": lambda: strategy.run(
        lambda x: context().all_reduce(SUM, x.sum()), args=(np.ones(3 + odd),)
    ),
    # Variables.
    "the_name_of_a_variable": lambda: variable(name="other" if odd else "one"),
    "an_assigned_value": lambda: variable().assign(np.full(3, float(odd), np.float32)),
    # Outside of run.
    "reduce_and_gather": lambda: (
        strategy.gather(per_worker(ONES), axis=0)
        if odd
        else strategy.reduce(SUM, per_worker(ONES), axis=None)
    ),
    "the_structure_of_values": lambda: per_worker({"a": ONES} if odd else [ONES]),
    # Keras.
    "the_activation_of_a_layer": lambda: fit(model("tanh" if odd else "relu")),
    "the_learning_rate": lambda: fit(model(optimizer=keras.optimizers.SGD(0.2 if odd else 0.1))),
    "validation": lambda: fit(model(), validation_data=(x, y) if odd else None),
    "a_batch": lambda: model().train_on_batch(x, y + odd),
    "fit_and_evaluate": lambda: (
        model().evaluate(x, y, batch_size=8, verbose=0) if odd else fit(model())
    ),
}


@case
def garbage():
    """What one worker has not found yet as garbage when a trace ends; no difference."""

    constant, later = (np.arange(9, dtype=np.float32) + k for k in range(2))

    def keep(value):
        if odd:
            circle = [value]
            circle.append(circle)

    def first_kept_then_used(value):
        keep(value + 1)
        return value

    @jax.checkpoint
    def wave(x):
        keep(jnp.sin(x) * jnp.arange(50.0)[7])
        return jnp.sum(jnp.sin(x) * first_kept_then_used(later))

    def step(x):
        keep(jnp.asarray(np.arange(50, dtype=np.float32)))  # used by nothing
        y = jax.jit(lambda x: x * constant)(x)
        y += jax.lax.scan(lambda c, row: (c + row * constant, c), x, jnp.ones((3, 1)))[0]
        y += jax.grad(wave)(x)
        return context().all_reduce(SUM, y * later + jax.linearize(wave, x)[1](x))

    gc.disable()
    strategy.run(step, args=(per_worker(np.ones(9, np.float32)),))
    gc.enable()


@case
def a_variable_made_outside_of_the_scope():
    plain = dist.Variable(np.full(3, float(odd), np.float32), name="plain")
    total(plain)


@case
def a_variable_made_outside_of_the_scope_and_assigned():
    plain, same = (dist.Variable(np.zeros(3, np.float32), name=name) for name in ("plain", "same"))
    built = model()

    def loss(y, p):
        plain.assign(plain.value() + 1)
        return keras.ops.mean((y - p) ** 2) * keras.ops.sum(plain.value() * same.value())

    built.compile("sgd", loss)
    fit(built)  # 4 steps
    for variable in (plain, same):
        variable.assign_add(np.ones(3, np.float32))
    fit(built)
    np.testing.assert_array_equal(plain.numpy(), np.full(3, 9.0))
    np.testing.assert_array_equal(same.value(), np.ones(3))
    plain.assign_add(np.full(3, float(odd), np.float32))
    fit(built)


@case
def a_compiled_function():
    @dist.function
    def twice():
        return strategy.reduce(SUM, strategy.run(lambda: jnp.float32(1 + odd)), axis=None)

    twice()


@case
def another_dataset_first():
    one = strategy.experimental_distribute_dataset(Dataset.range(8).batch(4))
    value = per_worker(np.ones(2, np.float32))
    if odd:
        strategy.reduce(SUM, value, axis=None)
    next(iter(one))


@case
def an_assigned_learning_rate():
    built = model()
    built.optimizer.learning_rate = 0.5 if odd else 0.25


def distributed(dataset):
    return strategy.experimental_distribute_dataset(dataset)


@case
def the_rows_of_a_dataset():
    rows = np.arange(12.0)
    distributed(Dataset.from_tensor_slices(rows).shuffle(9).batch(4))
    distributed([rows, rows])
    distributed(Dataset.from_tensor_slices(rows + odd).map(np.square).batch(4))


@case
def the_first_of_a_list_of_batches():
    distributed([(x + odd, y), (x, y)])


@case
def equal_text():
    text = np.array([["a word"], ["and more"]] * 8, object)
    distributed(Dataset.from_tensor_slices(text).map(lambda row: np.float32(len(row[0]))).batch(4))


# From here on a worker waits in a program which the others do not join.


def train(skips=()):
    """Trains on a dataset; the odd worker skips some steps."""
    v = variable()
    data = strategy.experimental_distribute_dataset(Dataset.range(40).batch(4))

    def step(batch):
        v.assign_add(context().all_reduce(SUM, batch.sum() * np.ones(3, np.float32)))
        return v.value()[0]

    iterator = iter(data)
    for i in range(10):
        batch = next(iterator)
        if not (odd and i in skips):
            float(strategy.experimental_local_results(strategy.run(step, args=(batch,)))[0])
    return v


@case
def a_skipped_step():
    train(skips=(6,))


@case
def a_step_after_the_others_have_ended():
    left = strategy.distribute_datasets_from_function(lambda context: [np.zeros(2)])
    if not odd:
        sys.exit(0)
    next(iter(left))


@case
def a_variable_that_only_the_chief_reads():
    with strategy.scope():
        seen = dist.Variable(
            0.0,
            synchronization=dist.VariableSynchronization.ON_READ,
            aggregation=dist.VariableAggregation.SUM,
        )

    def step():
        seen.assign_add(1.0)
        return context().all_reduce(SUM, jnp.float32(1))

    for i in range(10):
        strategy.run(step)
        if i == 6 and not odd:
            print(float(seen.numpy()), flush=True)


@case
def an_assignment_on_one_worker():
    v = train()
    if odd:
        v.assign(np.ones(3, np.float32))
    for _ in range(3):
        strategy.run(lambda: context().all_reduce(SUM, v.value()))


@case
def evaluation_in_a_callback_of_one_worker():
    class Evaluates(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if odd and epoch == 1:
                self.model.evaluate(x, y, batch_size=8, verbose=0)

    fit(model(), epochs=4, callbacks=[Evaluates()])


@case
def training_that_one_worker_ends():
    class Stops(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if odd and batch == 2:
                self.model.stop_training = True

    fit(model(), epochs=3, callbacks=[Stops()])


@case
def copies_that_drift():
    v = variable("w")
    if odd:  # broken memory
        v._value = v._layout.place(np.full(3, 0.5, np.float32), np.float32)

    def step():
        v.assign_add(context().all_reduce(SUM, np.ones(3, np.float32)))

    for _ in range(40):
        strategy.run(step)


@case
def a_checkpoint_of_one_worker():
    v = train()
    checkpoint = dist.checkpoint.Checkpoint(v=v)
    if odd:
        checkpoint.write(os.path.join(sys.argv[1], "checkpoint"))
    strategy.run(lambda: context().all_reduce(SUM, v.value()))


results = {}
for name in sys.argv[2:]:
    try:
        cases[name]()
        results[name] = None
    except dist.errors.WorkerMismatchError as error:
        results[name] = str(error)
        files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        is_of_keras = any("/keras/" in file for file in files) or name in _IN_KERAS
        ours = [file for file in files if file.startswith(_OURS)]
        assert len(ours) <= 2 or not is_of_keras, traceback.format_exc()
    except ValueError as error:
        if not isinstance(error, dist.errors.DistributaryError):
            raise
        results[name] = f"{type(error).__name__}: {error}"
    print(json.dumps({name: results[name]}), flush=True)
# After all that, they agree again.
assert float(strategy.reduce(SUM, strategy.run(lambda: jnp.float32(1)), axis=None)) == num_workers
print(json.dumps(results))
