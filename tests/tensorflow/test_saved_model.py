"""Saved models compute the same numbers again, in programs that do not have their code."""

import re
import sys

import jax
import keras
import numpy as np
import pytest

import distributary as dist
import distributary.compat.tensorflow as tf

ROWS = np.array([[1.0, 2.0], [-3.0, 0.5], [4.0, 0.0]], np.float32)
OPEN = tf.TensorSpec([None, 2], tf.float32)


class Scaled(tf.Module):
    def __init__(self):
        super().__init__()
        self.factor = tf.Variable([1.0, 10.0])
        self.steps = tf.Variable(0)

    @tf.function(input_signature=[OPEN])
    def scale(self, x):
        if tf.reduce_sum(x) > 3:
            return x * self.factor
        return -x * self.factor

    @tf.function
    def mix(self, x, b, times=2):
        return {"times": x * times, "less": x - b}

    @tf.function
    def never_asked(self, x):
        return x

    @tf.function(input_signature=[tf.TensorSpec([], tf.float32)])
    def __call__(self, x):
        return x, x + self.factor


STEPS = tf.Variable(0.0, name="steps")


def _module(name, function, *signature):
    module = tf.Module()
    setattr(module, name, tf.function(function, input_signature=signature or None))
    return module


def test_functions_that_were_called_are_saved_if_none_has_known_arguments(tmp_path):
    class Called(tf.Module):
        def __init__(self):
            super().__init__()
            self.factor = tf.Variable(2.0)

        @tf.function
        def scale(self, x, times=1):
            return x * self.factor * times

    module = Called()
    expected = module.scale(ROWS), module.scale(ROWS[0], times=3)

    tf.saved_model.save(module, tmp_path / "saved")

    loaded = tf.saved_model.load(tmp_path / "saved")
    np.testing.assert_array_equal(loaded.scale(ROWS), expected[0])
    np.testing.assert_array_equal(loaded.scale(ROWS[0]), expected[1])


def test_functions_of_a_module_compute_the_same(tmp_path):
    module = Scaled()
    module.mix.get_concrete_function(OPEN, OPEN)
    module.mix.get_concrete_function(tf.TensorSpec([None], tf.float32), b=1.0, times=5)
    with pytest.raises(ValueError, match=r"signature 'serving_default' is .*never_asked"):
        tf.saved_model.save(module, tmp_path / "model", signatures=module.never_asked)

    tf.saved_model.save(module, tmp_path / "model")
    module.factor.assign([0.0, 0.0])
    loaded = tf.saved_model.load(str(tmp_path / "model"), tags="serve")

    np.testing.assert_array_equal(loaded.scale(ROWS), ROWS * [1, 10])
    np.testing.assert_array_equal(loaded.scale(x=ROWS[:1] - 3), -(ROWS[:1] - 3) * [1, 10])
    mixed = loaded.mix(ROWS[:2], np.ones((2, 2)))
    np.testing.assert_array_equal(mixed["times"], ROWS[:2] * 2)
    np.testing.assert_array_equal(mixed["less"], ROWS[:2] - 1)
    np.testing.assert_array_equal(loaded.mix([3.0, 4.0])["times"], [15.0, 20.0])
    same, moved = loaded(3.0)
    assert float(same) == 3
    np.testing.assert_array_equal(moved, [4.0, 13.0])
    assert loaded.signatures == {}
    assert tf.saved_model.contains_saved_model(tmp_path / "model")


def test_arrays_and_keys_that_a_function_has_captured_are_saved(tmp_path):
    key, table = jax.random.key(3), np.arange(8.0, dtype=np.float32).reshape(2, 4)
    module = _module("noisy", lambda x: x @ table + jax.random.normal(key, (4,)), OPEN)

    tf.saved_model.save(module, tmp_path / "model")
    loaded = tf.saved_model.load(tmp_path / "model")

    expected = ROWS @ table + np.asarray(jax.random.normal(jax.random.key(3), (4,)))
    np.testing.assert_allclose(loaded.noisy(ROWS), expected, rtol=1e-6)


def test_signatures_have_names_and_return_dicts_as_in_tensorflow(tmp_path):
    module = Scaled()
    mix = module.mix.get_concrete_function(OPEN, OPEN)
    tf.saved_model.save(module, tmp_path / "one", signatures=module.scale)
    tf.saved_model.save(module, tmp_path / "two", signatures={"mix": mix, "call": module.__call__})

    one = tf.saved_model.load(tmp_path / "one").signatures
    two = tf.saved_model.load(tmp_path / "two").signatures

    assert list(one) == ["serving_default"]
    (result,) = one["serving_default"](x=ROWS).items()
    assert result[0] == "output_0"
    np.testing.assert_array_equal(result[1], ROWS * [1, 10])
    np.testing.assert_array_equal(two["mix"](b=ROWS, x=ROWS * 3)["less"], ROWS * 2)
    assert {key: np.shape(value) for key, value in two["call"](x=1.0).items()} == {
        "output_0": (),
        "output_1": (2,),
    }


def _sequential():
    return keras.Sequential(
        [
            keras.Input((2,)),
            keras.layers.Dense(3, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(2),
        ]
    )


def test_a_model_predicts_the_same_and_its_variables_are_saved_once(tmp_path):
    strategy = dist.MirroredStrategy()
    with strategy.scope():
        model = _sequential()
        model.compile("sgd", "mse")
    model.fit(np.tile(ROWS, (8, 1)), np.zeros((24, 2)), batch_size=24, verbose=0)

    tf.saved_model.save(model, tmp_path / "model")
    loaded = tf.saved_model.load(tmp_path / "model")

    expected = model.predict(ROWS, verbose=0)
    np.testing.assert_allclose(loaded(ROWS), expected, rtol=1e-6)
    served = loaded.signatures["serving_default"](inputs=ROWS[:1])
    np.testing.assert_allclose(served["output_0"], expected[:1], rtol=1e-6)
    saved = [shape for _, shape in tf.train.list_variables(tmp_path / "model")]
    assert sorted(saved) == [[2], [2, 3], [3], [3], [3], [3], [3], [3, 2]]


def test_a_model_with_several_inputs_takes_them_as_it_did(tmp_path):
    a, b = keras.Input((2,), name="a"), keras.Input((2,), name="b")
    of_dict = keras.Model({"a": a, "b": b}, {"sum": a + b, "difference": a - b})
    of_list = keras.Model([a, b], [a + b, a - b])

    tf.saved_model.save(of_dict, tmp_path / "dict")
    tf.saved_model.save(of_list, tmp_path / "list")
    dicts, lists = tf.saved_model.load(tmp_path / "dict"), tf.saved_model.load(tmp_path / "list")

    np.testing.assert_array_equal(dicts({"a": ROWS, "b": ROWS})["sum"], 2 * ROWS)
    np.testing.assert_array_equal(lists([ROWS, ROWS * 3])[1], -2 * ROWS)
    served = lists.signatures["serving_default"](inputs=ROWS, inputs_1=ROWS * 3)
    np.testing.assert_array_equal(served["output_1"], -2 * ROWS)


_LOADS = """
import sys
import numpy as np
import distributary.compat.tensorflow as tf

loaded = tf.saved_model.load(sys.argv[1])
np.save(sys.argv[2], loaded(np.ones((7, 2), np.float32)))
model = tf.keras.models.load_model(sys.argv[3])
print(np.asarray(model(np.array(["a b", "c"]))).tolist())
"""


def test_a_new_process_loads_models_without_their_code_and_with_their_vocabulary(
    tmp_path, run_python
):
    model = _sequential()
    tf.saved_model.save(model, tmp_path / "model")
    raw = tf.keras.Input((1,), dtype=tf.string)
    layers = [
        tf.keras.layers.TextVectorization(output_mode="tf_idf"),
        tf.keras.layers.StringLookup(output_mode="one_hot"),
        tf.keras.layers.StringLookup(vocabulary=["b"], output_mode="count"),
    ]
    for layer in layers[:2]:
        layer.adapt(["a b", "b", "c d"])
    of_text = keras.Model(raw, keras.layers.Concatenate()([layer(raw) for layer in layers]))
    of_text.save(tmp_path / "text.keras")

    printed = run_python(_LOADS, tmp_path / "model", tmp_path / "out.npy", tmp_path / "text.keras")

    expected = model.predict(np.ones((7, 2)), verbose=0)
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), expected, rtol=1e-6)
    assert printed.strip() == str(np.asarray(of_text(np.array(["a b", "c"]))).tolist())


def _padded(x):
    return tf.concat([x[:, :-1], tf.ones([x.shape[0], 3])], axis=1) - tf.range(9.0)


KERNEL = np.linspace(-1, 1, 40, dtype=np.float32)


@pytest.mark.parametrize(
    ("function", "rank", "fits", "others", "says"),
    [
        (lambda x: x - KERNEL, 2, [(3, 40), (1, 40)], [(3, 41), (3, 1)], "dim0_1 == 40"),
        (lambda x: x @ KERNEL.reshape(5, 8), 3, [(2, 3, 5), (4, 1, 5)], [(2, 3, 6)], "dim0_2 == 5"),
        (_padded, 2, [(3, 7)], [(3, 9)], "dim0_1 == 7"),
        (
            lambda x: tf.reshape(x, [-1, 8]) @ KERNEL.reshape(8, 5),
            *(4, [(3, 4, 2, 1), (2, 2, 2, 2)], [(3, 3, 1, 1)], r"mod\(.*8\) == 0"),
        ),
        (
            lambda x: tf.nn.conv2d(x, KERNEL.reshape(2, 2, 2, 5), 1, "SAME"),
            *(4, [(1, 4, 3, 2), (2, 2, 5, 2)], [(1, 4, 3, 3)], "dim0_3 == 2"),
        ),
    ],
    ids=["broadcast", "matmul", "concat", "reshape", "conv2d"],
)
def test_open_dims_are_saved_for_the_sizes_that_the_function_fits(
    function, rank, fits, others, says, tmp_path, caplog
):
    spec = tf.TensorSpec([None] * rank, tf.float32)

    tf.saved_model.save(_module("apply", function, spec), tmp_path / "model")
    loaded = tf.saved_model.load(tmp_path / "model")

    for shape in fits:
        x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) / 7
        np.testing.assert_allclose(loaded.apply(x), function(tf.constant(x)), rtol=1e-5, atol=1e-5)
    for shape in others:
        with pytest.raises((TypeError, ValueError), match="apply: the arguments have the shapes"):
            loaded.apply(np.zeros(shape, np.float32))
    assert re.search(f"'apply' takes only sizes with {says}, because", caplog.text)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (
            _module("count", lambda x: x + STEPS.assign_add(1.0), OPEN),
            "the function 'count' assigns 'steps'. Return the new values",
        ),
        (
            _module("show", lambda x: tf.print(x) or x, OPEN),
            "the function 'show' calls Python when it runs",
        ),
        (
            _module("label", lambda x: {"x": x, "label": "cat"}, OPEN),
            "'label' cannot be exported .* returns .*str.* arrays in dicts",
        ),
        (
            _module("grid", lambda x: x.reshape(int(x.shape[0]), 2), OPEN),
            "'grid' cannot be exported .* Give dims of size None their sizes",
        ),
        (
            _module("both", lambda x: (x - KERNEL, x - KERNEL[:8]), tf.TensorSpec([None, None])),
            r"'both' cannot be exported .* shapes=\[\(batch, dim0_1\), \(40,\)\]",
        ),
        (
            _module("step", lambda x: dist.get_strategy().run(lambda: x.sum()), OPEN),
            "the function 'step' calls Strategy.run",
        ),
        (
            _module("total", lambda x: tf.reduce_sum(x), tf.TensorSpec(None, tf.float32)),
            "'total' takes TensorSpec.*Give it a number of dims",
        ),
        (
            _module("later", lambda x: x),
            "has no function with known arguments. Give a tf.function an input_signature",
        ),
        (tf.function(lambda x: x), "has no function with known arguments"),
    ],
)
def test_what_cannot_be_saved_is_refused_with_its_name_and_nothing_is_written(
    module, message, tmp_path
):
    with pytest.raises((NotImplementedError, ValueError), match=message):
        tf.saved_model.save(module, tmp_path / "model")

    assert list(tmp_path.iterdir()) == []


def test_a_model_that_does_not_know_its_inputs_needs_a_signature(tmp_path):
    class Doubling(keras.Model):
        def call(self, x):
            return 2 * x

    model = Doubling()
    with pytest.raises(ValueError, match=r"keras.Model\(x, model\(x\)\)"):
        tf.saved_model.save(model, tmp_path / "model")
    serve = tf.function(lambda x: model(x, training=False), input_signature=[OPEN])
    tf.saved_model.save(model, tmp_path / "model", signatures=serve)

    served = tf.saved_model.load(tmp_path / "model").signatures["serving_default"](x=ROWS)
    np.testing.assert_array_equal(served["output_0"], 2 * ROWS)


def test_without_flatbuffers_the_package_is_named(tmp_path, monkeypatch):
    tf.saved_model.save(Scaled(), tmp_path / "here")
    monkeypatch.setitem(sys.modules, "flatbuffers", None)  # it cannot be imported
    for name in [own for own in sys.modules if own.startswith("jax") and "serialization" in own]:
        monkeypatch.delitem(sys.modules, name)

    message = "tf.saved_model.{} needs flatbuffers.*pip install flatbuffers$"
    with pytest.raises(ImportError, match=message.format("save")):
        tf.saved_model.save(Scaled(), tmp_path / "new")
    with pytest.raises(ImportError, match=message.format("load")):
        tf.saved_model.load(tmp_path / "here")
    assert not (tmp_path / "new").exists()


def test_calls_that_do_not_fit_name_what_was_saved(tmp_path):
    tf.saved_model.save(Scaled(), tmp_path / "model")
    loaded = tf.saved_model.load(tmp_path / "model")

    with pytest.raises(TypeError, match=r"scale: .*\(3, 3\).* saved for \['x'\].*None, 2"):
        loaded.scale(np.ones((3, 3)))
    with pytest.raises(TypeError, match=r"scale: .* saved for"):
        loaded.scale(y=ROWS)
    with pytest.raises(AttributeError, match=r"'never_asked'.* get_concrete_function"):
        loaded.never_asked(ROWS)
    with pytest.raises(ValueError, match="tags is 'train', expected 'serve'"):
        tf.saved_model.load(tmp_path / "model", tags="train")


def test_a_saved_model_is_replaced_and_nothing_else_is(tmp_path):
    module, path = Scaled(), tmp_path / "model"
    path.mkdir()
    tf.saved_model.save(module, path)
    module.factor.assign([2.0, 2.0])
    tf.saved_model.save(module, path)
    np.testing.assert_array_equal(tf.saved_model.load(path).scale(ROWS), ROWS * 2)
    assert [entry.name for entry in tmp_path.glob("[!.]*")] == ["model"]

    tf.train.Checkpoint(module=module).write(tmp_path / "checkpoint")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "text").write_text("mine", encoding="utf-8")
    for name in ("checkpoint", "notes"):
        assert not tf.saved_model.contains_saved_model(tmp_path / name)
        with pytest.raises(OSError, match=f"{name} is not a saved model, and is not replaced"):
            tf.saved_model.save(module, tmp_path / name)


def test_folders_that_are_not_saved_models_are_refused(tmp_path):
    (tmp_path / "saved_model.pb").write_bytes(b"\x08\x01")

    with pytest.raises(NotImplementedError, match=r"TensorFlow has written .* model.save"):
        tf.saved_model.load(tmp_path)
    with pytest.raises(OSError, match=r"there is no saved model at .*nowhere"):
        tf.saved_model.load(tmp_path / "nowhere")
    assert not tf.saved_model.contains_saved_model(tmp_path)
