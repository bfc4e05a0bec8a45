"""What importing and using the module changes for the rest of the process.

JAX has one class for all arrays, so all of them get TensorFlow's methods. Keras gets layers of
text, where it has none because TensorFlow is missing, and its models what steps for Keras 2 use.
Nothing else changes.
"""

_PROGRAM = """
import builtins, os, threading, types
from operator import attrgetter
import jax, jax.numpy, keras, numpy

def surroundings():
    modules = (builtins, jax, jax.numpy, jax.nn, keras, keras.ops, keras.layers, numpy)
    classes = (jax.Array, jax.numpy.ones(1).__class__, numpy.ndarray, keras.Variable, keras.Model)
    found = {owner: dict(vars(owner)) for owner in (*modules, *classes)}
    return found

def changed(before):
    after = surroundings()
    return {
        (owner is jax.Array, name)
        for owner, own in after.items()
        for name in own.keys() | before[owner].keys()
        if own.get(name) is not before[owner].get(name)
        and not isinstance(own.get(name), types.ModuleType)
    }

names = "numpy get_shape set_shape assign assign_add assign_sub"
layers = "Input IntegerLookup StringLookup TextVectorization"
models = "compiled_loss compiled_metrics distribute_strategy"
CHANGES = {(True, name) for name in names.split()}
CHANGES |= {(False, name) for name in f"{layers} {models}".split()}
before, environ = surroundings(), dict(os.environ)
import distributary.compat.tensorflow as tf
assert changed(before) == CHANGES, changed(before)
assert dict(os.environ) == environ

total = tf.reduce_sum(tf.constant([1.0, 2.0]))
for x in tf.data.Dataset.range(2).batch(2):
    assert x.numpy().tolist() == [0, 1]
assert total.numpy() == 3 and type(total.numpy()) is numpy.float32
assert changed(before) == CHANGES, changed(before)

import distributary as dist
(plain,) = dist.data.Dataset.range(1)
assert type(plain) is type(numpy.int64(0)), type(plain)

names = ["cast", "random.normal", "train.Example", "io.decode_raw", "strings.join", "nn.relu"]
start, found = threading.Barrier(8), []

def look_up(number):
    start.wait()
    found.append({name: attrgetter(name)(tf) for name in names[number:] + names[:number]})

threads = [threading.Thread(target=look_up, args=(number % len(names),)) for number in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert found == [found[0]] * 8, found
"""


def test_import_and_use_give_arrays_methods_and_keras_layers_and_can_be_in_threads(run_python):
    run_python(_PROGRAM, KERAS_BACKEND="jax")
