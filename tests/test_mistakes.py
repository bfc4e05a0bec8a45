"""Mistakes that people make in their first hour, and what they are told."""

import contextlib
import gc
import pickle
import re
import traceback
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
import scipy.sparse
from flax import nnx

import distributary as dist
from distributary.launch import misspelled
from tests.interpreters import run_python

BATCH = np.arange(24, dtype=np.float32).reshape(8, 3)
AS_IT_IS = dist.RunOptions(autograph=False)  # otherwise the control flow is converted
Mistake = Callable[[dist.Strategy], Any]
MISTAKES: dict[str, tuple[Mistake, tuple[str, ...]]] = {}


def told(*parts: str) -> Callable[[Mistake], Mistake]:
    """Notes a mistake, with what its message must contain."""

    def note(mistake: Mistake) -> Mistake:
        MISTAKES[mistake.__name__] = mistake, parts
        return mistake

    return note


def told_step(
    *parts: str, args: tuple[Any, ...] = (BATCH,), options: dist.RunOptions | None = None
) -> Callable[[Callable[..., Any]], None]:
    """Notes a step that is a mistake; its message must have its name, and `parts`."""

    def note(step: Callable[..., Any]) -> None:
        run = lambda strategy: strategy.run(step, args=args, options=options)
        MISTAKES[step.__name__] = run, (step.__name__, *parts)

    return note


def told_step_of_w(
    *parts: str, options: dist.RunOptions | None = None
) -> Callable[[Callable[..., Any]], None]:
    """Notes a step of a variable 'w' and a batch that is a mistake, with parts of its message."""

    def note(step: Callable[..., Any]) -> None:
        def run(strategy: dist.Strategy) -> None:
            with strategy.scope():
                w = dist.Variable(np.ones(3, np.float32), name="w")
            (batch,) = strategy.experimental_distribute_dataset([BATCH])
            strategy.run(step, args=(w, batch), options=options)

        MISTAKES[step.__name__] = run, parts

    return note


def told_steps(steps: dict[str, tuple[Any, ...]], options: dist.RunOptions | None = None) -> None:
    """Notes steps by name, with the parts of their messages, the function and its arguments."""
    for name, (parts, step, *args) in steps.items():
        step.__name__ = step.__qualname__ = name
        told_step(*parts.split(" | "), args=tuple(args) or (BATCH,), options=options)(step)


def told_each(mistakes: dict[str, tuple[str, Mistake]]) -> None:
    """Notes mistakes by name, with what their messages must contain, separated by bars."""
    for name, (parts, mistake) in mistakes.items():
        MISTAKES[name] = mistake, tuple(parts.split(" | "))


# Python decides by a traced value


@told_step(
    "if_of_a_batch: `if`, `while`, `assert` or max() at test_mistakes.py",
    "`batch['x']`",
    "jnp.where",
    "jax.lax.cond",
    args=({"x": BATCH, "y": BATCH},),
    options=AS_IT_IS,
)
def if_of_a_batch(batch):
    if batch["x"].mean() > 0:
        return batch["x"]
    return -batch["x"]


@told_step("`batch`", "jax.lax.while_loop", options=AS_IT_IS)
def while_of_a_batch(batch):
    while batch.sum() > 1:
        batch = batch / 2
    return batch


@told_step("`batch`", "return it", options=AS_IT_IS)
def assert_of_a_batch(batch):
    assert jnp.isfinite(batch).all()
    return batch.sum()


@told_step_of_w("if_of_a_variable", "jnp.where", options=AS_IT_IS)
def if_of_a_variable(w, batch):
    if w.value().sum() > 3:
        return batch
    return 2 * batch


@told("update", "`x`", "jnp.where", "jax.lax.cond")
def if_in_a_function(strategy):
    @dist.function(autograph=False)
    def update(x):
        return x if x.sum() > 0 else -x

    update(BATCH)


@told_step("`num_steps`", "jax.lax.fori_loop", args=(BATCH, 3), options=AS_IT_IS)
def range_of_an_argument(batch, num_steps):
    for _ in range(num_steps):
        batch = batch * 2
    return batch


told_steps(
    {
        "max_of_two_values": ("`batch` | jnp.maximum", lambda batch: max(batch.mean(), 1.0)),
        "float_of_a_loss": (
            "`batch` | float() | Return it | strategy.reduce",
            lambda batch: float((batch**2).mean()),
        ),
    },
    AS_IT_IS,
)
told_steps(
    {
        "item_of_a_loss": (
            "`batch` | .item() | Return it | strategy.reduce",
            lambda batch: (batch**2).mean().item(),
        ),
        "shape_from_an_argument": (
            "`size` | shape",
            lambda batch, size: batch.sum() + jnp.zeros((size,)),
            *(BATCH, 3),
        ),
        "slice_to_an_argument": (
            "a slice | jax.lax.dynamic_slice",
            lambda batch, size: batch[:size],
            *(BATCH, 2),
        ),
        "rows_by_a_mask": ("mask | jnp.where", lambda batch: batch[batch > 0].sum()),
        "unique_of_a_batch": ("`batch` | size=", lambda batch: jnp.unique(batch)),
        "numpy_function_of_a_batch": ("`batch` | jnp.log for np.log", lambda batch: np.log(batch)),
        "numpy_array_of_a_batch": ("`batch` | jnp.asarray", lambda batch: np.asarray(batch)),
        "list_by_a_traced_number": (
            "`batch` | jnp.asarray(values)[i]",
            lambda batch: [1.0, 2.0][batch.argmax()],
        ),
        "print_with_a_format": ("jax.debug.print", lambda batch: print(f"{batch.mean():.3f}")),
        "key_of_a_dict": ("hash | jnp", lambda batch: {0: "a"}[batch.argmax()]),
        "generator_from_the_data": (
            "the seed | jax.random.fold_in(key, seed)",
            lambda batch: batch + np.random.default_rng(batch[0].astype(int)).normal(),
        ),
    }
)


@told_step(".at[")
def assign_an_item(batch):
    batch[0] = 0.0
    return batch


# Methods of arrays of other libraries


told_steps(
    {
        "numpy_method": (".numpy() | Return the array", lambda batch: batch.numpy().mean()),
        "to_a_device": (".to() | device", lambda batch: batch.to("cuda")),
        "backward_of_a_loss": (
            ".backward() | value_and_grad",
            lambda batch: (batch**2).mean().backward(),
        ),
        "detach_an_array": (".detach() | jax.lax.stop_gradient", lambda batch: batch.detach()),
    }
)


@told_step(
    "a_number_into_an_item_of_numpy: an item of a NumPy array at test_mistakes.py",
    ".at[i].set(value)",
)
def a_number_into_an_item_of_numpy(batch):
    sums = np.zeros(2)
    sums[0] = batch.sum()
    return batch + sums[0]


@told_step(
    "rows_into_items_of_numpy: a function of NumPy at test_mistakes.py",
    "`batch`",
    ".at[i].set(value)",
)
def rows_into_items_of_numpy(batch):
    padded = np.zeros((16, 3))
    padded[: len(batch)] += batch
    return padded


@told("batch", "on the host", "for x in dataset.batch(n): x * value")
def a_traced_value_in_a_padded_batch(strategy):
    @dist.function
    def total(factor):
        rows = dist.data.Dataset.from_generator(lambda: (np.ones(n) for n in range(3)))
        return sum(x.sum() for x in rows.map(lambda x: x * factor).padded_batch(2))

    total(2.0)


# Objects of other libraries


def _foreign(module: str, name: str, **attributes: Any) -> Any:
    """Returns an object that looks like one of torch or TensorFlow, which tests do not install."""
    text = "tensor([[1.0, 2.0], [3.0, 4.0]])\n" * 30
    return type(name, (), {"__module__": module, "__repr__": lambda self: text, **attributes})()


def train_step(batch):
    return batch


_TENSOR = _foreign("tensorflow.python.framework.ops", "EagerTensor", __hash__=None)
told_steps(
    {
        "tensor_of_torch": (
            "torch.Tensor | .numpy()",
            lambda batch: batch["x"],
            {"x": _foreign("torch", "Tensor")},
        ),
        "tensor_of_tensorflow": ("`batch` | tf.Tensor | .numpy()", lambda batch: batch, _TENSOR),
        "model_of_torch": (
            "torch model | Keras | Flax",
            lambda model, batch: batch,
            *(_foreign("torch.nn.modules.linear", "Linear"), BATCH),
        ),
    }
)


@told("train_step", "dist.nnx.State", "state.merged()")
def captured_nnx_optimizer(strategy):
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    def train_step(batch):
        loss, gradients = nnx.value_and_grad(lambda model: model(batch).mean())(model)
        optimizer.update(model, gradients)
        return loss

    strategy.run(train_step, args=(BATCH,))


# Arguments of run


told_steps(
    {
        "missing_argument": (
            "missing_argument(x, y) | 1 argument | 'y' | args=(x, y)",
            lambda x, y: x,
        ),
        "parts_of_a_batch": (
            "parts_of_a_batch(batch) | 2 arguments | args=((x, y),)",
            lambda batch: batch[0],
            *(BATCH, BATCH),
        ),
        "strings_in_a_batch": (
            "`names` | numbers",
            lambda batch, names: batch,
            *(BATCH, np.array(["a", "b"])),
        ),
        "scipy_matrix": ("sparse | toarray", lambda batch: batch, scipy.sparse.csr_matrix(BATCH)),
        "value_before_operation_in_a_step": (
            "all_reduce | SUM",
            lambda batch: dist.get_replica_context().all_reduce(batch, "SUM"),
        ),
        "axis_of_pmap": (
            "'batch' | get_replica_context().all_reduce",
            lambda batch: jax.lax.pmean(batch, axis_name="batch"),
        ),
    }
)


@told_step("async", "plain function")
async def coroutine_as_step(batch):
    return batch


@told_step("yield")
def generator_as_step(batch):
    yield batch


told_each(
    {
        "captured_nnx_module": (
            "<lambda> | dist.nnx.State | state.merged()",
            lambda s: (lambda norm: s.run(lambda x: norm(x).mean(), args=(BATCH,)))(
                nnx.BatchNorm(3, rngs=nnx.Rngs(0))
            ),
        ),
        "batch_in_a_tuple": (
            "<lambda>(x, y) | a tuple of 2 | args=batch",
            lambda s: s.run(
                lambda x, y: x,
                args=(next(iter(s.experimental_distribute_dataset([(BATCH, BATCH)]))),),
            ),
        ),
        "bare_array_as_args": (
            "train_step | args=(value,)",
            lambda s: s.run(train_step, args=BATCH),
        ),
        "called_step": ("strategy.run(step, args= | array", lambda s: s.run(train_step(BATCH))),
        "run_in_jit": (
            "jax.jit | distributary.function",
            lambda s: jax.jit(lambda batch: s.run(train_step, args=(batch,)))(BATCH),
        ),
        "object_in_a_result": (
            "object in result['model'] | returned | arrays",
            lambda s: s.run(lambda batch: {"model": object()}, args=(BATCH,)),
        ),
        "dict_as_options": (
            "Strategy.run: options is {'a': 1}, expected distributary.RunOptions or None",
            lambda s: s.run(train_step, (BATCH,), options={"a": 1}),
        ),
        "bare_array_as_kwargs": ("kwargs | dict", lambda s: s.run(lambda x: x, (BATCH,), BATCH)),
    }
)


# What is not an argument, or is a value of an earlier step


@told("train_step", "Return", "distributary.Variable")
def value_of_the_step_before(strategy):
    class Trainer:
        last = None

        def train_step(self, batch):
            last, self.last = self.last, batch.mean()
            return self.last if last is None else self.last - last

    trainer = Trainer()
    strategy.run(trainer.train_step, args=(BATCH,))
    strategy.run(trainer.train_step, args=(BATCH[:4],))


@told("train_step assigns weights", "later runs", "Return the new weights", "Variable")
def weights_of_the_function_around(strategy):
    weights = {"kernel": jnp.zeros(3)}

    def train_step(batch):
        nonlocal weights
        weights = jax.tree.map(lambda w: w + batch.mean(), weights)

    strategy.run(train_step, args=(BATCH,))


@told("Trainer.train_step assigns self.weights", "later runs", "Return the new self.weights")
def weights_of_an_object(strategy):
    class Trainer:
        def __init__(self):
            self.weights = [np.zeros(3)]

        def train_step(self, batch):
            self.weights[0] = self.weights[0] + batch.mean()

    strategy.run(Trainer().train_step, args=(BATCH,))


@told("assigns state", "later runs", "Return the new state")
def weights_in_a_function_that_the_step_calls(strategy):
    state = {"weights": jnp.zeros(3)}

    def update(gradient):
        state["weights"] = state["weights"] - gradient

    @dist.function
    def train_step(batch):
        strategy.run(lambda: update(batch.mean()))

    train_step(BATCH)


# Results

_PER_REPLICA = "PerReplica | strategy.reduce | experimental_local_results"


def _rows(strategy):
    return strategy.run(jnp.asarray, args=(BATCH,))


def _sums(strategy):
    return strategy.run(jnp.sum, args=(BATCH,))


told_each(
    {
        "reduce_in_a_step": (
            "<lambda> | all_reduce | get_replica_context()",
            lambda s: s.run(lambda batch: s.reduce("SUM", batch, axis=None), args=(BATCH,)),
        ),
        "format_of_a_result": (_PER_REPLICA, lambda s: f"{_sums(s):.3f}"),
        "reduce_of_nothing": (
            "reduce: value is None | Return the value from the step",
            lambda s: s.reduce("MEAN", s.run(lambda x: None, args=(BATCH,)), axis=None),
        ),
        "reduce_without_axis": ("reduce | axis=None | axis=0", lambda s: s.reduce("SUM", _sums(s))),
        "float_of_a_result": (_PER_REPLICA, lambda s: float(_sums(s))),
        "method_of_a_result": (_PER_REPLICA, lambda s: _rows(s).mean()),
        "length_of_a_result": (_PER_REPLICA, lambda s: len(_rows(s))),
        "item_of_a_result": (_PER_REPLICA, lambda s: _rows(s)[0]),
        "if_of_a_result": (_PER_REPLICA, lambda s: 1 if _sums(s) else 2),
        "loop_over_a_result": (_PER_REPLICA, lambda s: list(_sums(s))),
        "axis_of_a_number": (
            "reduce: axis 0 is out of range | axis=None",
            lambda s: s.reduce("SUM", _sums(s), axis=0),
        ),
        "jnp_of_a_result": ("PerReplica | strategy.reduce", lambda s: jnp.mean(_sums(s))),
        "gather_without_axis": ("gather | axis=0", lambda s: s.gather(_rows(s))),
        "rank_of_a_replica": (
            "replica_id_in_sync_group",
            lambda s: s.run(lambda: dist.get_replica_context().rank),
        ),
        "average_as_operation": (
            "reduce | SUM | MEAN",
            lambda s: s.reduce("AVG", _sums(s), axis=None),
        ),
        "value_before_operation": (
            "reduce | comes first",
            lambda s: s.reduce(_sums(s), "SUM", axis=None),
        ),
    }
)


# Variables and models


@told("train_step", "'w'", "strategy.scope()")
def variable_outside_of_the_scope(strategy):
    w = dist.Variable(1.0, name="w")

    def train_step(batch):
        w.assign_add(batch.sum())

    strategy.run(train_step, args=(BATCH,))


def _gradient(target, sources):
    with dist.GradientTape() as tape:
        value = target()
    return tape.gradient(value, sources)


_OF_W = {
    "assignment_without_aggregation": (
        "all_reduce | 'w'",
        lambda w, batch: w.assign_add(batch.sum(0)),
    ),
    "gradient_that_is_not_called": (
        "gradient_that_is_not_called | 'w' | <lambda> | call what distributary.grad returns",
        lambda w, batch: w.assign_sub(dist.grad(lambda: (batch @ w).sum(), w)),
    ),
    "gradient_that_is_none": (
        "'w' | got None | A gradient is None if the loss does not use the variable",
        lambda w, batch: w.assign_sub(_gradient(lambda: batch.sum(), w)),
    ),
    "product_with_a_gradient_that_is_none": (
        "test_mistakes.py | computes with None | A gradient is None if the loss does not use",
        lambda w, batch: w.assign_sub(0.1 * _gradient(lambda: batch.sum(), w)),
    ),
    "target_after_the_sources": (
        "target is | 'w:0' | Write tape.gradient(loss, variables)",
        lambda w, batch: _gradient(lambda: w, (batch @ w).sum()),
    ),
    "gradient_of_a_value": (
        "a function that computes the loss | an array float32[] | def loss(): return",
        lambda w, batch: dist.grad((batch @ w).sum(), w)(),
    ),
    "gradient_of_jax_by_a_variable": (
        "gradient_of_jax_by_a_variable | variable | dist.grad | .value()",
        lambda w, batch: jax.grad(lambda w: (batch @ w).sum())(w),
    ),
}
for name, (parts, step) in _OF_W.items():
    step.__name__ = step.__qualname__ = name
    told_step_of_w(*parts.split(" | "))(step)


@told_step_of_w("value_and_gradient_that_are_not_called", "dist.value_and_grad(loss, variables)()")
def value_and_gradient_that_are_not_called(w, batch):
    value, gradient = dist.value_and_grad(lambda: (batch @ w).sum(), w)
    return value, gradient


@told("'w' does not take +=", "v.assign_add(x)")
def variable_plus_equals(strategy):
    with strategy.scope():
        w = dist.Variable(np.ones(3), name="w")
    w += 1


@told_step_of_w("'w' does not take", "items", ".at[i].set(x)")
def item_of_a_variable(w, batch):
    w[0] = batch.sum()


def _apply(strategy, apply):
    with strategy.scope():
        optimizer = keras.optimizers.SGD()
        w = keras.Variable(np.ones(3, np.float32))

    def train_step(batch):
        apply(optimizer, [batch.mean(0)], [w])

    strategy.run(train_step, args=(BATCH,))


_ZIP = "apply_gradients(zip(gradients, variables))"
told_each(
    {
        "variables_before_gradients": (
            f"an array float32[3] | in the place of a variable | {_ZIP}",
            lambda s: _apply(
                s,
                lambda opt, grads, vs: opt.apply_gradients(
                    [*map(tuple, zip(vs, grads, strict=True))]
                ),
            ),
        ),
        "gradients_without_zip": (
            f"train_step: test_mistakes.py | {_ZIP}",
            lambda s: _apply(s, lambda opt, grads, vs: opt.apply_gradients(grads, vs)),
        ),
        "dtype_in_the_place_of_trainable": (
            "trainable is 'float32', expected True or False | dtype=",
            lambda s: dist.Variable(np.ones(3), "float32"),
        ),
        "name_of_a_synchronization": (
            "synchronization is 'ON_READ' | Write distributary.VariableSynchronization.ON_READ.",
            lambda s: dist.Variable(1.0, synchronization="ON_READ"),
        ),
        "minimize_of_tensorflow": (
            f"train_step: test_mistakes.py | takes pairs | {_ZIP}",
            lambda s: _apply(s, lambda opt, grads, vs: opt.minimize(lambda: grads[0].sum(), vs)),
        ),
        "misspelled_synchronization": (
            "synchronization is 'on_reed' | VariableSynchronization: | ON_WRITE, ON_READ",
            lambda s: dist.Variable(1.0, synchronization="on_reed"),
        ),
    }
)


@told("A step makes", "gone when the step ends", "before, in strategy.scope()")
def model_made_in_a_step(strategy):
    def train_step(batch):
        result = keras.Sequential([keras.layers.Dense(1)])(batch)
        gc.collect()
        return result

    strategy.run(train_step, args=(BATCH,))


@told("train_step", "Strategy.run", "fit")
def fit_in_a_step(strategy):
    model = _model(strategy)

    def train_step(batch):
        model.fit(batch, batch, verbose=0)

    strategy.run(train_step, args=(BATCH,))


@told("Net.call", "a function of NumPy", "needs the value of an array")
def numpy_in_a_keras_model(strategy):
    class Net(keras.Model):
        def call(self, x):
            return np.log(x)

    with strategy.scope():
        model = Net()
        model.compile("sgd", "mse", jit_compile=True)
    model.fit(np.ones((4, 3)), np.ones((4, 3)), verbose=0)


@told("call", "jnp.where")
def if_in_a_layer(strategy):
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x):
            y = self.dense(x)
            if y.mean() > 0:
                return y
            return -y

    with strategy.scope():
        model = Net()
        model.compile("sgd", "mse")
    model.fit(BATCH, BATCH[:, :1], verbose=0)


_EMPTY = dist.data.Dataset.from_tensor_slices((BATCH, BATCH)).batch(16, drop_remainder=True)


def _model(strategy, loss="mse", **options):
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)])
        model.compile("sgd", loss, **options)
    return model


def _quietly(mistake):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Keras, about the structure of the inputs
        return mistake()


told_each(
    {
        "list_of_batches": (
            ".fit: x is a list of 2 tuples | a dataset or a generator | fit(x, y)",
            lambda s: _quietly(lambda: _model(s).fit([(BATCH, np.ones((8, 4)))] * 2, verbose=0)),
        ),
        "columns_of_x": (
            ".fit: x has shape (8, 5) | keras.Input((3,)) takes (rows, 3) | keras.Input((5,))",
            lambda s: _model(s).fit(np.ones((8, 5)), np.ones((8, 4)), verbose=0),
        ),
        "columns_of_y": (
            ".evaluate: y has shape (8, 5), but the model returns (8, 4) | units of the last layer",
            lambda s: _model(s).evaluate(BATCH, np.ones((8, 5)), verbose=0),
        ),
        "dataset_without_a_batch": (
            ".fit: <distributary.data.Dataset: | has no batch | drop_remainder=True",
            lambda s: _model(s).fit(_EMPTY, verbose=0),
        ),
        "batch_size_0": (
            "fit: batch_size is 0, expected a whole number from 1",
            lambda s: _model(s).fit(BATCH, np.ones((8, 4)), batch_size=0, verbose=0),
        ),
        "steps_of_a_division": (
            ".fit: steps_per_epoch is 2.0, expected a whole number",
            lambda s: _model(s).fit(BATCH, np.ones((8, 4)), steps_per_epoch=8 / 4, verbose=0),
        ),
        "epochs_in_quotes": (
            ".fit: epochs is '2', expected a whole number",
            lambda s: _model(s).fit(BATCH, np.ones((8, 4)), epochs="2", verbose=0),
        ),
        "x_and_y_in_a_tuple": (
            ".fit: x is a tuple of 2 ndarrays | gets no y | fit(x, y)",
            lambda s: _quietly(lambda: _model(s).fit((BATCH, np.ones((8, 4))), verbose=0)),
        ),
        "no_y": (".fit: the loss gets no y | fit(x, y)", lambda s: _model(s).fit(BATCH, verbose=0)),
        "validation_data_without_y": (
            "the loss gets no y | validation_data=(x_val, y_val)",
            lambda s: _model(s).fit(BATCH, np.ones((8, 4)), validation_data=BATCH, verbose=0),
        ),
        "lists_of_numbers": (
            "fit: x is a list of numbers | np.asarray(x)",
            lambda s: _model(s).fit(BATCH.tolist(), np.ones((8, 4)), verbose=0),
        ),
        "iterator_of_a_distributed_dataset": (
            "predict: x is an iterator | the distributed dataset itself",
            lambda s: _model(s).predict(iter(s.experimental_distribute_dataset([BATCH]))),
        ),
        "function_as_callback": (
            "fit: callbacks has the function <lambda> | LambdaCallback(on_epoch_end=function)",
            lambda s: _model(s).fit(
                BATCH, np.ones((8, 4)), callbacks=[lambda epoch, logs: None], verbose=0
            ),
        ),
        "rows_of_classes_for_a_sparse_loss": (
            "(8, 4) | whole numbers, one per row, need sparse_categorical_crossentropy",
            lambda s: _model(s, "sparse_categorical_crossentropy").fit(
                BATCH, np.eye(4)[np.zeros(8, int)], verbose=0
            ),
        ),
        "labels_for_a_dense_loss": (
            "(8,) | a number per class categorical_crossentropy",
            lambda s: _model(s, "categorical_crossentropy").fit(BATCH, np.zeros(8, int), verbose=0),
        ),
        "optax_in_compile": (
            ".compile: optimizer is a GradientTransformation | keras.optimizers.Adam",
            lambda s: _model(s).compile(optax.adam(0.1), "mse"),
        ),
        "train_step_without_a_result": (
            "train_step: the result is None, expected a dict of logs: return",
            lambda s: _fit_own_step(s, lambda loss: None),
        ),
        "save_in_a_step": (
            ".save was called inside Strategy.run | call it outside",
            lambda s: (lambda model: s.run(lambda: model.save("model.keras")))(_model(s)),
        ),
        "class_as_callback": (
            "fit: callbacks has <class | EarlyStopping'>, | Call a class with its arguments",
            lambda s: _model(s).fit(
                BATCH, np.ones((8, 4)), callbacks=[keras.callbacks.EarlyStopping], verbose=0
            ),
        ),
        "model_of_another_strategy": (
            "another strategy, MirroredStrategy of 2 replicas, is current | Create the model in",
            lambda s: (lambda model: s.run(lambda: model.layers[0].kernel + 1))(
                _model(dist.MirroredStrategy(["CPU:2", "CPU:3"]))
            ),
        ),
        "metric_made_in_a_step": (
            "A step makes the variable 'new_metric/total' | before, in strategy.scope()",
            lambda s: s.run(
                lambda batch: keras.metrics.Mean("new_metric").update_state(batch), args=(BATCH,)
            ),
        ),
    }
)


# Names and arguments of tf.distribute, and of others


told_each(
    {
        "scope_of_the_class": (
            "MirroredStrategy.scope() is called on the class | strategy = MirroredStrategy()",
            lambda s: dist.MirroredStrategy.scope(),
        ),
        "with_the_strategy_itself": ("strategy.scope()", lambda s: ExitStack().enter_context(s)),
        "experimental_run_v2": (
            "experimental_run_v2 | strategy.run",
            lambda s: s.experimental_run_v2(lambda x: x, args=(BATCH,)),
        ),
        "numpy_dataset": (
            "experimental_make_numpy_dataset | distributary.data.Dataset.from_tensor_slices",
            lambda s: s.experimental_make_numpy_dataset(BATCH),
        ),
        "num_gpus": ("num_gpus | devices=", lambda s: dist.MirroredStrategy(num_gpus=2)),
        "one_device_without_a_device": (
            "'device' | OneDeviceStrategy(\"GPU:0\")",
            lambda s: dist.OneDeviceStrategy(),
        ),
        "number_of_devices": ("devices | list", lambda s: dist.MirroredStrategy(2)),
        "gpu_that_is_not_there": (
            "'gpu:0' | CPU:0 to CPU:7 | jax[cuda",
            lambda s: dist.MirroredStrategy(devices=["gpu:0", "gpu:1"]),
        ),
        "cuda_device": ("cuda:0 | GPU:0", lambda s: dist.MirroredStrategy(devices=["cuda:0"])),
        "parameter_servers_without_resolver": (
            "cluster_resolver | ParameterServerStrategy",
            lambda s: dist.experimental.ParameterServerStrategy(),
        ),
        "distributed_data_parallel": (
            "DistributedDataParallel | MirroredStrategy",
            lambda s: dist.DistributedDataParallel,
        ),
        "init_process_group": (
            "init_process_group | MultiWorkerMirroredStrategy",
            lambda s: dist.init_process_group("nccl"),
        ),
        "all_reduce_of_the_module": (
            "all_reduce | get_replica_context().all_reduce",
            lambda s: dist.all_reduce(BATCH),
        ),
        "name_of_tensorflow": (
            "has no attribute 'reduce_mean'. | distributary.compat.tensorflow",
            lambda s: dist.reduce_mean(BATCH),
        ),
        "autotune": ("'AUTOTUNE' | distributary.data", lambda s: dist.AUTOTUNE),
        "collective_hints": (
            "CollectiveHints | CommunicationOptions",
            lambda s: dist.experimental.CollectiveHints,
        ),
        "abstract_strategy": ("Strategy | MirroredStrategy", lambda s: dist.Strategy()),
        "average_of_reduce_op": (
            "ReduceOp has no attribute 'AVG'. Write ReduceOp.MEAN.",
            lambda s: dist.ReduceOp.AVG,
        ),
        "argument_without_experimental": (
            "'shard_optimizer_state' | Did you mean 'experimental_shard_optimizer_state'?",
            lambda s: dist.MirroredStrategy(shard_optimizer_state=True),
        ),
        "layout_map_without_devices_that_divide": (
            "experimental_layout_map | experimental_model_parallel=k",
            lambda s: dist.MirroredStrategy(experimental_layout_map={"a": (None, "model")}),
        ),
        "shards_by_a_number": (
            "experimental_shard_parameters is 1, expected True, False",
            lambda s: dist.MirroredStrategy(experimental_shard_parameters=1),
        ),
        "shards_of_hosts_for_the_optimizer": (
            "experimental_shard_optimizer_state is 'host', expected True or False",
            lambda s: dist.MirroredStrategy(experimental_shard_optimizer_state="host"),
        ),
        "seconds_in_quotes": (
            "timeout_seconds is '10', expected a number of seconds",
            lambda s: dist.experimental.CommunicationOptions(timeout_seconds="10"),
        ),
        "pickled_strategy": (
            "cannot be pickled | each process | distributary.checkpoint.Checkpoint",
            lambda s: pickle.dumps(s),
        ),
    }
)


# Data


told_each(
    {
        "batch_of_a_distributed_dataset": (
            "batch | experimental_distribute_dataset | before",
            lambda s: s.experimental_distribute_dataset([BATCH]).batch(4),
        ),
        "array_as_dataset": (
            "Dataset: got an array float32[8, 3] | Use Dataset.from_tensor_slices",
            lambda s: dist.data.Dataset(BATCH),
        ),
        "file_as_dataset": (
            "got 'train.tfrecord', a str | distributary.data.Dataset",
            lambda s: s.experimental_distribute_dataset("train.tfrecord"),
        ),
        "function_as_dataset": (
            "the function <lambda> | Expected an iterable of batches",
            lambda s: s.experimental_distribute_dataset(lambda context: [BATCH]),
        ),
        "dataset_function_without_a_context": (
            "distribute_datasets_from_function | the function <lambda> | def dataset_fn(context):",
            lambda s: s.distribute_datasets_from_function(lambda: [BATCH]),
        ),
        "value_function_without_a_context": (
            "experimental_distribute_values_from_function | def value_fn(context):",
            lambda s: s.experimental_distribute_values_from_function(lambda: 1),
        ),
        "value_in_place_of_a_function": (
            "value_fn is 3, expected a function value_fn(context)",
            lambda s: s.experimental_distribute_values_from_function(3),
        ),
        "merge_function_without_a_strategy": (
            "merge_call calls the function <lambda> as merge_fn(strategy, value)",
            lambda s: s.run(
                lambda x: dist.get_replica_context().merge_call(lambda x: x, args=(x,)),
                args=(BATCH,),
            ),
        ),
        "past_the_end_of_a_dataset": (
            "no more elements | iter(dataset)",
            lambda s: [next(it) for it in [iter(s.experimental_distribute_dataset([]))]],
        ),
        "part_of_an_array": (
            "the part 'image' of an array | yield dicts",
            lambda s: s.run(lambda batch: batch["image"], args=(BATCH,)),
        ),
    }
)


@pytest.fixture(scope="module")
def strategy() -> dist.MirroredStrategy:
    return dist.MirroredStrategy(["CPU:0", "CPU:1"])


@pytest.mark.parametrize("name", MISTAKES)
def test_the_message_says_what_to_write_instead(name, strategy):
    mistake, parts = MISTAKES[name]

    with pytest.raises(Exception) as caught:  # noqa: PT011  (the table has the texts)
        mistake(strategy)

    text = "".join(traceback.format_exception_only(caught.value))
    assert [part for part in parts if part not in text] == [], text
    _check_short(text)
    _check_traceback(caught.value)


def _check_short(text: str) -> None:
    assert len(text.splitlines()) <= 10
    assert len(text) < 900
    assert not re.search(r"array\(\[|Array\(\[|tensor\(\[", text), "it prints an array"
    assert not re.search(r"<\w+Strategy: ", text), "it prints the whole repr of a strategy"
    assert " at 0x" not in text, "it prints an address"
    ours = text.split("\n-----")[0].partition(": ")[2]
    if "distributary.errors" in text:
        sentences = re.split(r"(?<=\w)[.:?] (?=[A-Z])|\. (?=[`A-Z])", ours)
        assert len(sentences) <= 4, sentences


def _check_traceback(error: BaseException) -> None:
    """Checks that a traceback shows the mistake and few frames of libraries."""
    frames = traceback.extract_tb(error.__traceback__)
    files = [frame.filename for frame in frames]
    inside = [file for file in files if "/distributary/" in file or "/jax/" in file]
    inside += [file for file in files if "/keras/src/" in file]
    assert len(inside) <= 5, "".join(traceback.format_list(frames))
    assert error.__cause__ is None
    assert error.__context__ is None or error.__suppress_context__
    assert __file__ in files[1:]


def test_errors_that_are_not_explained_keep_their_type_and_the_users_frames(strategy):
    def helper(x):
        return {}["missing"]

    def train_step(batch):
        return helper(batch)

    with pytest.raises(KeyError, match="missing") as caught:
        strategy.run(train_step, args=(BATCH,))

    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert names[1:] == ["train_step", "helper"]


def test_all_frames_stay_if_jax_shows_its_own(strategy):
    def train_step(batch):
        return batch.sum().item()

    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    try:
        with pytest.raises(dist.errors.TracedValueError) as caught:
            strategy.run(train_step, args=(BATCH,))
    finally:
        jax.config.update("jax_traceback_filtering", before)

    files = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert any("/jax/" in file for file in files)
    assert any("/distributary/" in file for file in files)


# Warnings: Keras trains, and the numbers are wrong

_mse = keras.losses.MeanSquaredError()
_SPARSE = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
_WITHOUT_FIRST = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)
_LABELS = np.resize(range(4), 8)


def _fit(strategy, loss, *data, **options):
    """Trains a model with 4 outputs on batches of 4 rows."""
    dataset = dist.data.Dataset.from_tensor_slices(data).batch(4)
    _model(strategy, loss, **options).fit(dataset, verbose=0)


def _fit_outputs(strategy, y):
    with strategy.scope():
        x = keras.Input((3,))
        model = keras.Model(x, {name: keras.layers.Dense(4, name=name)(x) for name in ("a", "b")})
        model.compile("sgd", {"a": "mse", "b": _SPARSE})
    model.fit(BATCH, y, verbose=0)


def _evaluate(strategy, *data):
    _model(strategy, _SPARSE).evaluate(*data, verbose=0)


def _validate(strategy, *data):
    model = _model(strategy, _SPARSE)
    model.fit(BATCH, _LABELS, validation_data=data, verbose=0)


def _fit_masked(strategy, ids, labels):
    with strategy.scope():
        layers = [keras.layers.Embedding(5, 3, mask_zero=True), keras.layers.Dense(4)]
        model = keras.Sequential([keras.Input((2,), dtype="int32"), *layers])
        model.compile("sgd", _SPARSE)
    model.fit(ids, labels, verbose=0)


def _fit_ids(strategy, ids):
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,), dtype="int32"), keras.layers.Embedding(5, 3)])
        model.compile("sgd", "mse")
    model.fit(ids, np.ones((*ids.shape, 3)), batch_size=2, verbose=0)


class _OwnStep(keras.Model):
    def __init__(self, log):
        super().__init__()
        self.dense, self.log = keras.layers.Dense(1), log

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        return self.log(keras.ops.mean((self(data[0]) - data[1]) ** 2))


def _fit_own_step(strategy, log):
    with strategy.scope():
        model = _OwnStep(log)
        model.compile("sgd", "mse")
    model.fit(BATCH, BATCH[:, :1], verbose=0)


_WARNED: dict[str, tuple[str, Mistake]] = {
    "label_in_a_later_batch": (
        "y has the label 4, but the 4 classes of the output are 0 to 3 | Number them from 0",
        lambda s: _fit(s, _SPARSE, BATCH, [0, 0, 0, 0, 0, 4, 0, 0]),
    ),
    "label_in_several_steps": (
        "y has the label 4, but the 4 classes of the output are 0 to 3",
        lambda s: _fit(s, _SPARSE, BATCH, _LABELS + 1, steps_per_execution=2),
    ),
    "label_of_one_of_two_outputs": (
        "y has the label -1, but the 4 classes of the output are 0 to 3",
        lambda s: _fit_outputs(s, {"a": BATCH[:, :1].repeat(4, 1), "b": _LABELS - 1}),
    ),
    "label_in_evaluate": (
        "y has the label 4, but the 4 classes of the output are 0 to 3",
        lambda s: _evaluate(s, BATCH, _LABELS + 1),
    ),
    "label_in_validation": (
        "y has the label 4, but the 4 classes of the output are 0 to 3",
        lambda s: _validate(s, BATCH, _LABELS + 1),
    ),
    "third_class_of_two": (
        "y has the label 2, and binary_crossentropy takes 0 to 1 | sparse_categorical_crossentropy",
        lambda s: _fit(s, "binary_crossentropy", BATCH, np.full((8, 4), 2)),
    ),
    "id_beyond_the_embedding": (
        "x has the id 5, but those of embedding | are 0 to 4 | NaN | input_dim",
        lambda s: _fit_ids(s, np.array([[0, 1], [2, 3], [4, 5]])),
    ),
    "one_column_of_four": (
        "y has shape (4, 1), and the output (4, 4): the one column is repeated | units",
        lambda s: _fit(s, "mse", BATCH, BATCH[:, :1]),
    ),
    "loss_beside_its_metric": (
        "train_step returns 'loss', but Keras shows the metric | call its update_state(value)",
        lambda s: _fit_own_step(s, lambda loss: {"loss": loss}),
    ),
}


@pytest.mark.parametrize("name", _WARNED)
def test_a_warning_says_what_to_write_instead(name, strategy):
    parts, mistake = _WARNED[name]

    with pytest.warns(dist.errors.DistributaryWarning) as caught:
        mistake(strategy)

    (warning,) = caught
    text = str(warning.message)
    assert [part for part in parts.split(" | ") if part not in text] == [], text
    assert warning.filename == __file__
    _check_short(text)


@pytest.mark.parametrize(
    "fit",
    [
        lambda s: _fit(s, _SPARSE, BATCH, _LABELS - 1, np.float32(_LABELS > 0)),
        lambda s: _fit(s, _SPARSE, BATCH, _LABELS - 1, np.float32(_LABELS > 0)[:, None]),
        lambda s: _fit(s, "binary_crossentropy", BATCH, np.full((8, 4), 0.5)),
        lambda s: _fit(s, "binary_crossentropy", BATCH, np.full((8, 4), 1 + 1e-6)),
        lambda s: _fit(s, lambda y, z: _mse([y[:, 0]], [z[:, 0]]), BATCH, BATCH),
        lambda s: _fit(s, _WITHOUT_FIRST, BATCH, _LABELS + 1),
        lambda s: _fit_masked(s, np.array([[1, 0], [2, 0]]), np.array([[1, -1], [0, -1]])),
        lambda s: _fit(s, "mse", BATCH, np.full((8, 4), 5)),
        lambda s: _fit(s, lambda y, z: (y[:, :1] - z) ** 2, BATCH, np.ones((8, 1))),
        lambda s: _fit_outputs(s, {"a": np.full((8, 4), 5), "b": _LABELS}),
        lambda s: _fit_ids(s, np.array([[0, 4]])),
        lambda s: _fit_own_step(s, lambda loss: {"another": loss}),
    ],
)
def test_numbers_that_a_model_takes_are_no_mistake(fit, strategy):
    fit(strategy)  # warnings are errors


def test_nothing_is_said_of_y_if_a_step_fails_for_another_reason(strategy):
    def loss(y_true, y_pred):
        raise ValueError("weights are missing")

    model = _model(strategy)
    model.compile("sgd", loss)

    with pytest.raises(ValueError, match="weights are missing") as caught:
        model.fit(BATCH, np.ones((8, 5)), verbose=0)

    assert not getattr(caught.value, "__notes__", [])


_OUTSIDE = """
import warnings, keras, numpy as np
import distributary as dist

dist.config.set_logical_cpu_devices(2)
strategy = dist.MirroredStrategy(["CPU:0", "CPU:1"])
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        model.fit(np.ones((8, 3)), np.ones((8, 1)), verbose=0)
for warning in caught:
    print(warning.filename, warning.message)
"""


def test_a_model_outside_of_the_scope_is_told_so_once(tmp_path):
    script = tmp_path / "outside.py"
    script.write_text(_OUTSIDE)

    (line,) = run_python(script).stdout.splitlines()
    assert line.startswith(f"{script} sequential.fit runs on one device")
    assert "with strategy.scope():" in line
    _check_short(line.removeprefix(str(script)))


@pytest.mark.parametrize(
    ("backend", "told"),
    [
        ("Jax", "KERAS_BACKEND is 'Jax', which Keras does not know: write KERAS_BACKEND=jax."),
        ("tensorflow", "'tensorflow', which is not installed: write KERAS_BACKEND=jax."),
        ("torch", None),
    ],
)
def test_a_backend_of_keras_that_fails_is_told(backend, told):
    ended = run_python("-c", "import distributary", environ={"KERAS_BACKEND": backend})

    assert ended.returncode == 0
    assert told in ended.stderr if told else not ended.stderr


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("DISTRIBUTARY_NPROCS", "Did you mean DISTRIBUTARY_NPROC?"),
        ("DISTRIBUTARY_TOKENS", "Did you mean DISTRIBUTARY_TOKEN?"),
        ("DISTRIBUTARY_SERVICE_PORT", None),  # as Kubernetes sets for a service of this name
        ("DISTRIBUTARY_TOKEN", None),
    ],
)
def test_a_misspelled_variable_of_the_environment_is_told(name, told, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import distributary as dist\ndist.OneDeviceStrategy('CPU:0')\n")

    stderr = run_python(script, environ={name: "4"}).stderr

    assert ("distributary does not read DISTRIBUTARY_" in stderr) == (told is not None)
    assert told is None or f"{script}:2: " in stderr
    assert (told or "") in stderr


def test_every_variable_of_the_environment_is_known():
    text = "".join(file.read_text() for file in Path(dist.__file__).parent.rglob("*.py"))
    names = set(re.findall('"(DISTRIBUTARY_[A-Z_]+)"', text))

    assert names
    assert [name for name in names if not [*misspelled({f"{name}X": ""})]] == []


@pytest.mark.parametrize("value", [np.broadcast_to(np.float32(0), 1 << 45), 1 << 45])
def test_a_variable_that_is_too_large_for_memory_is_named(value, strategy):
    make = value if isinstance(value, np.ndarray) else lambda: jnp.zeros(value)

    for scope in (strategy.scope(), contextlib.nullcontext()):
        with pytest.raises((MemoryError, jax.errors.JaxRuntimeError)) as caught, scope:
            dist.Variable(make, name="table")

        notes = "".join(caught.value.__notes__)
        assert "Variable 'table'" in notes
        assert notes.count("experimental_shard_parameters=True") == 1


def test_a_second_model_on_one_device_is_no_mistake(strategy):
    with strategy.scope():
        keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.fit(BATCH, BATCH[:, :1], verbose=0)


def test_is_chief_is_true_in_a_single_process(strategy):
    servers = dist.ParameterServerStrategy(dist.experimental.local_cluster(workers=1, ps=1))
    others = dist.OneDeviceStrategy("CPU:0"), dist.get_strategy()
    assert all(one.is_chief for one in (strategy, servers, *others))


@pytest.mark.parametrize("name", ["num_workers", "rank", "num_ps"])
def test_arguments_that_ask_for_workers_are_told_of_launch(name):
    with pytest.raises(TypeError, match=f"'{name}'.*distributary launch --workers 2"):
        dist.MultiWorkerMirroredStrategy(**{name: 2})


def test_a_remote_value_is_no_number():
    strategy = dist.ParameterServerStrategy(dist.experimental.local_cluster(workers=1, ps=1))
    coordinator = dist.coordinator.ClusterCoordinator(strategy)
    value = coordinator.schedule(lambda: 3.0)

    for use in (float, lambda v: v + 1, lambda v: f"{v:.2f}", lambda v: v.numpy(), round, sum):
        with pytest.raises(TypeError, match=r"value\.fetch\(\)"):
            use(value)
    assert "RemoteValue" in f"{value}"
    assert value.fetch() == 3


def test_layers_that_are_frozen_after_compile_are_told(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(BATCH, BATCH[:, :1], verbose=0)
    model.layers[0].trainable = False

    with pytest.raises(ValueError, match=r"2 trainable variables.* 0 now.*compile the model again"):
        model.fit(BATCH, BATCH[:, :1], verbose=0)


def test_an_iterator_of_batches_is_told(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")

    with pytest.raises(TypeError, match=r"x is a list_iterator.*\(batch for batch in x\)"):
        model.fit(iter([(BATCH, BATCH[:, :1])]), verbose=0)


def test_a_map_that_returns_nothing_is_told():
    dataset = dist.data.Dataset.range(2).map(lambda x: None).batch(2)

    with pytest.raises(TypeError, match=r"function <lambda>, which returned None\. Return"):
        next(iter(dataset))


@pytest.mark.parametrize("name", ["reset_default_graph", "estimator", "contrib"])
def test_names_of_tensorflow_1_are_told(name):
    import distributary.compat.tensorflow as tf

    with pytest.raises(AttributeError, match=r"graphs and sessions|tf\.keras"):
        getattr(tf, name)


def test_set_memory_growth_of_a_name_is_told():
    import distributary.compat.tensorflow as tf

    with pytest.raises(ValueError, match=r"'GPU:0' is no GPU.*list_physical_devices"):
        tf.config.experimental.set_memory_growth("GPU:0", True)


def test_a_dict_as_args_is_told_of_kwargs(strategy):
    with pytest.raises(ValueError, match=r"args=\(value,\)\. To pass .* write kwargs=batch"):
        strategy.run(lambda x, y: x + y, args={"x": BATCH, "y": BATCH})
