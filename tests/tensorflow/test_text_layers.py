"""Lookups and vectorization of text, with the results of TensorFlow 2.21 as literals."""

import re

import jax
import keras
import numpy as np
import pytest

import distributary.compat.tensorflow as tf
from distributary.errors import ContextError, InvalidTypeError, InvalidValueError, UnsupportedError

IntegerLookup = tf.keras.layers.IntegerLookup
StringLookup = tf.keras.layers.StringLookup
TextVectorization = tf.keras.layers.TextVectorization

_WORDS = [["b", "a"], ["c", "b"], ["d", "a"], ["c", "e"]]
_TEXTS = ["The cat, the DOG!", "the bird  sat\ton É-x", "a\u00a0b dog's", ""]
_HEROES = ["avenger", "ironman", "batman", "hulk", "spiderman", "kingkong", "wonder_woman"]


def _adapted(layer, data):
    layer.adapt(data)
    return layer


def test_other_layers_are_those_of_keras():
    from distributary.compat.tensorflow.keras import layers

    assert layers.StringLookup is StringLookup
    assert tf.keras.layers.Dense is keras.layers.Dense
    assert {name for name in dir(keras.layers) if name[0] != "_"} <= {*dir(tf.keras.layers)}
    assert tf.keras.Input((2,), dtype=tf.string).dtype == "string"
    assert tf.keras.layers.Input((2,), 3, "int32").shape == (3, 2)


@pytest.mark.parametrize(
    "given",
    [np.array([b"hulk", b"other"]), np.array(["hulk", b"other"], object), ["hulk", b"other"]],
    ids=["bytes", "object", "list"],
)
def test_words_become_numbers_of_64_bits(given):
    layer = StringLookup(vocabulary=_HEROES)

    found = layer(given)

    assert found.dtype == np.int64
    assert found.numpy().tolist() == [4, 0]


def test_scalars_and_empty_arrays():
    assert StringLookup(vocabulary=["a", "b"])("b").tolist() == 2
    assert StringLookup(vocabulary=["a", "b"])(b"b").shape == ()
    assert StringLookup(vocabulary=["a"])(np.zeros((0, 3), "U2")).shape == (0, 3)
    assert StringLookup(vocabulary=["a"], output_mode="count")([["a"]] * 0).tolist() == [0, 0]
    assert TextVectorization(vocabulary=["a"])([""]).shape == (1, 0)


def test_the_preprocessing_of_the_tutorial_of_parameter_servers_runs_in_a_dataset():
    examples = {"features": [["avenger", "hulk", "x"], ["hulk", "batman", "ironman"]]}
    examples["label"] = [["yes"], ["no"]]
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        lookup = StringLookup(vocabulary=_HEROES, mask_token=None)
        labels = StringLookup(vocabulary=["yes", "no"], num_oov_indices=0, mask_token=None)
        raw = tf.keras.layers.Input(shape=(3,), dtype=tf.string, name="features")
        stage = tf.keras.Model({"features": raw}, lookup(raw))
        raw_label = tf.keras.layers.Input(shape=(1,), dtype="string", name="label")
        label_stage = tf.keras.Model({"label": raw_label}, labels(raw_label))
    dataset = tf.data.Dataset.from_tensor_slices(examples)

    def prepare(x):
        given = {"features": x["features"]}, {"label": x["label"]}
        return stage(given[0]), label_stage(given[1]), labels(x["label"])

    features, column, label = next(iter(dataset.batch(2).map(prepare)))
    assert features.tolist() == [[1, 4, 0], [4, 3, 2]]
    assert column.tolist() == label.tolist() == [[0], [1]]
    # Without the dim of the batch, as in the tutorial; Keras 3 alone refuses this.
    with pytest.warns(UserWarning, match=r"structure of `inputs` doesn't match"):
        single = [*dataset.map(lambda x: (stage(x["features"]), labels(x["label"])))]
    assert [f.tolist() for f, _ in single] == [[1, 4, 0], [4, 3, 2]]
    assert [one.tolist() for _, one in single] == [[0], [1]]
    inverse = StringLookup(
        vocabulary=["yes", "no"], num_oov_indices=0, mask_token=None, invert=True
    )
    assert inverse(label).tolist() == [["yes"], ["no"]]
    assert inverse(tf.constant(1)).item() == "no"
    assert inverse([2, -1]).tolist() == ["[UNK]", "[UNK]"]


def test_functional_models_take_text_beside_numbers():
    name = tf.keras.Input((1,), dtype=tf.string, name="name")
    age = tf.keras.Input((1,), name="age")
    number = StringLookup(vocabulary=["a", "b"], output_mode="multi_hot")(name)
    model = tf.keras.Model([name, age], tf.keras.layers.Concatenate()([number, age]))

    found = model([np.array(["b", "q"]), np.array([[3], [4]])])

    np.testing.assert_array_equal(found, [[0, 0, 1, 3], [1, 0, 0, 4]])
    with pytest.raises(ValueError, match="incompatible shape"):
        model([np.array([[["b", "q"]]]), np.array([[3]])])


# Of TensorFlow: vocabulary, and results of [["a", "b"], ["z", "z"]], of ["a", "b", "b"] and of "b".
_MODES = {
    ("int", None): (["[UNK]", "c", "b", "a", "e", "d"], [[3, 2], [0, 0]], [3, 2, 2], 2),
    ("int", "a"): (["a", "[UNK]", "c", "b", "e", "d"], [[0, 3], [1, 1]], [0, 3, 3], 3),
    ("multi_hot", None): (
        ["[UNK]", "c", "b", "a", "e", "d"],
        [[0, 0, 1, 1, 0, 0], [1, 0, 0, 0, 0, 0]],
        [0, 0, 1, 1, 0, 0],
        [0, 0, 1, 0, 0, 0],
    ),
    ("one_hot", "a"): (
        ["[UNK]", "c", "b", "e", "d"],
        [[[0, 0, 0, 0, 0], [0, 0, 1, 0, 0]], [[1, 0, 0, 0, 0], [1, 0, 0, 0, 0]]],
        [[0, 0, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 0, 0]],
        [[0, 0, 1, 0, 0]],
    ),
    ("count", "a"): (
        ["[UNK]", "c", "b", "e", "d"],
        [[0, 0, 1, 0, 0], [2, 0, 0, 0, 0]],
        [0, 0, 2, 0, 0],
        [0, 0, 1, 0, 0],
    ),
    ("tf_idf", None): (
        ["[UNK]", "c", "b", "a", "e", "d"],
        [[0, 0, 0.8472978472709656, 0.8472978472709656, 0, 0], [1.8956472873687744, 0, 0, 0, 0, 0]],
        [0, 0, 1.6945956945419312, 0.8472978472709656, 0, 0],
        [0, 0, 0.8472978472709656, 0, 0, 0],
    ),
}


@pytest.mark.parametrize(("mode", "mask"), _MODES)
def test_output_modes(mode, mask):
    vocabulary, two, one, scalar = _MODES[mode, mask]

    layer = _adapted(StringLookup(output_mode=mode, mask_token=mask), np.array(_WORDS))

    assert layer.get_vocabulary() == vocabulary
    special = layer.vocabulary_size() - len(layer.get_vocabulary(include_special_tokens=False))
    assert special == 1 + ((mode, mask) == ("int", "a"))
    for given, expected in (([["a", "b"], ["z", "z"]], two), (["a", "b", "b"], one), ("b", scalar)):
        found = layer(given)
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        assert found.dtype == (np.float32 if mode == "tf_idf" else np.int64)
        assert layer.compute_output_shape(np.shape(given) or (1,)) == (found.shape or (1,))


def test_results_of_max_tokens():
    padded = {"max_tokens": 9, "pad_to_max_tokens": True}

    count = _adapted(StringLookup(output_mode="count", **padded), np.array(_WORDS))
    weighted = _adapted(StringLookup(output_mode="tf_idf", **padded), np.array(_WORDS))

    assert _adapted(StringLookup(max_tokens=4), _WORDS).get_vocabulary() == ["[UNK]", "c", "b", "a"]
    assert count([["a", "b", "b"]]).tolist() == [[0, 0, 2, 1, 0, 0, 0, 0, 0]]
    expected = [[0.9478236436843872, 0, 1.6945956945419312, 0.8472978472709656, 0, 0, 0, 0, 0]]
    np.testing.assert_allclose(weighted([["a", "b", "b", "z"]]), expected, rtol=1e-6)


@pytest.mark.parametrize("batched", [False, True])
def test_layers_adapt_to_datasets(batched):
    texts = tf.data.Dataset.from_tensor_slices(_TEXTS)
    words = tf.data.Dataset.from_tensor_slices(_WORDS)
    if batched:
        texts, words = texts.batch(2), words.batch(3)

    text = _adapted(TextVectorization(output_mode="tf_idf"), texts)
    word = _adapted(StringLookup(output_mode="tf_idf"), words)
    first = TextVectorization()
    first.adapt(texts, steps=1)

    expected = [[0, 0.8472978472709656, 0, 0, 0, 0, 0, 1.0986123085021973, 0, 0]]
    np.testing.assert_allclose(text(["the cat"]), expected, rtol=1e-6)
    assert word.get_vocabulary() == ["[UNK]", "c", "b", "a", "e", "d"]
    expected = [[0, 0, 0.8472978472709656, 0.8472978472709656, 0, 0]]
    np.testing.assert_allclose(word([["a", "b"]]), expected, rtol=1e-6)
    assert first.vocabulary_size() == (9 if batched else 5)
    assert next(iter(texts.map(text))).shape == ((2, 10) if batched else (10,))


def test_integers():
    layer = _adapted(IntegerLookup(), [5, 5, 7, 7, 9, -1, 3])
    masked = {"vocabulary": [3, 4], "invert": True, "mask_token": 0}
    several = IntegerLookup(num_oov_indices=3, vocabulary=[5, 6], mask_token=0)

    assert layer.get_vocabulary() == [-1, 7, 5, 9, 3]
    assert layer([[5, 100], [3, -1]]).tolist() == [[2, 0], [4, 0]]
    assert layer(jax.numpy.array([5, 1])).tolist() == [2, 0]
    assert layer(5).shape == ()
    assert IntegerLookup(vocabulary=[3, 4], invert=True)([0, 1, 2, 7]).tolist() == [-1, 3, 4, -1]
    assert IntegerLookup(**masked)([0, 1, 2, 3, 7]).tolist() == [0, -1, 3, 4, -1]
    assert several([5, 6, 7, 8, 9, 0, -1]).tolist() == [4, 5, 2, 3, 1, 0, 3]
    assert several.get_vocabulary() == [0, -1, -1, -1, 5, 6]


def test_unknown_words_share_several_numbers():
    layer = StringLookup(num_oov_indices=3, vocabulary=["a"])
    words = [f"word {i}" for i in range(50)]

    found = layer(words)

    assert {*found.tolist()} == {0, 1, 2}
    assert found.tolist() == layer(words).tolist()
    assert layer("a").tolist() == 3


def test_vocabularies_in_files(tmp_path):
    words, numbers = tmp_path / "words.txt", tmp_path / "numbers.txt"
    words.write_text("x\ny\n[UNK]\n", encoding="utf-8")
    numbers.write_text("4\n7\n", encoding="utf-8")

    layer = StringLookup(vocabulary=str(words))

    assert layer.get_vocabulary() == ["[UNK]", "x", "y", "[UNK]"]
    assert IntegerLookup(vocabulary=str(numbers))([7, 4, 1]).tolist() == [2, 1, 0]
    assert layer.get_config()["vocabulary"] is None
    with pytest.raises(InvalidValueError, match=r"names the file '/etc/passwd'"):
        StringLookup.from_config({"vocabulary": "/etc/passwd"})


# Of TensorFlow: vocabulary after the special tokens, and results of two texts and "the zzz".
_VECTORS = [
    (
        {},
        ["the", "Éx", "sat", "on", "dogs", "dog", "cat", "bird", "a\xa0b"],
        [[2, 8, 2, 7, 0], [2, 9, 4, 5, 3], [2, 1, 0, 0, 0]],
    ),
    (
        {"standardize": None},
        ["the", "É-x", "sat", "on", "dog's", "cat,", "bird", "a\xa0b", "The", "DOG!"],
        [[10, 7, 2, 11, 0], [2, 8, 4, 5, 3], [2, 1, 0, 0, 0]],
    ),
    (
        {"standardize": "strip_punctuation", "max_tokens": 5},
        ["the", "Éx", "sat"],
        [[1, 1, 2, 1, 0], [2, 1, 4, 1, 3], [2, 1, 0, 0, 0]],
    ),
    (
        {"split": "character", "output_sequence_length": 8, "max_tokens": 10},
        [" ", "t", "o", "h", "e", "d", "a", "s"],
        [[3, 5, 6, 2, 1, 8, 3, 2], [3, 5, 6, 2, 1, 1, 1, 7], [3, 5, 6, 2, 1, 1, 1, 0]],
    ),
    ({"split": None}, ["the cat the dog", "the bird  sat\ton Éx", "a\xa0b dogs"], [2, 3, 1]),
    (
        {"ngrams": (2, 3)},
        [
            *["the dog", "the cat the", "the cat", "the bird sat", "the bird", "sat on Éx"],
            *["sat on", "on Éx", "cat the dog", "cat the", "bird sat on", "bird sat"],
            "a\xa0b dogs",
        ],
        [[4, 11, 2, 3, 10, 0, 0], [6, 13, 8, 9, 5, 12, 7], [1, 0, 0, 0, 0, 0, 0]],
    ),
    (
        {"output_mode": "binary", "max_tokens": 12, "pad_to_max_tokens": True},
        ["the", "Éx", "sat", "on", "dogs", "dog", "cat", "bird", "a\xa0b"],
        [
            [0, 1, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0],
            [0, 1, 1, 1, 1, 0, 0, 0, 1, 0, 0, 0],
            [1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        ],
    ),
    (
        {"standardize": tf.strings.upper, "split": lambda text: tf.strings.split(text, sep="T")},
        ["HE DOG!", "HE CA", "HE BIRD  SA", "A\xa0B DOG'S", ", ", "\tON É-X"],
        [[0, 3, 6, 2], [0, 4, 7, 0], [0, 1, 0, 0]],
    ),
]


@pytest.mark.parametrize(("arguments", "vocabulary", "expected"), _VECTORS)
def test_texts_become_rows_of_numbers(arguments, vocabulary, expected):
    layer = _adapted(TextVectorization(**arguments), _TEXTS)
    texts = [*_TEXTS[:2], "the zzz"]

    found = layer(texts)

    assert layer.get_vocabulary(include_special_tokens=False) == vocabulary
    assert found.tolist() == expected
    assert found.dtype == np.int64
    assert layer(np.array(texts)[:, None]).tolist() == layer([[text] for text in texts]).tolist()
    if arguments.get("split", "whitespace"):
        assert layer([text.encode() for text in texts]).tolist() == expected
        rows = [row[: len(layer(text))] for text, row in zip(texts, expected, strict=True)]
        assert [layer(text).tolist() for text in texts] == rows


def test_texts_of_several_dims():
    layer = TextVectorization(vocabulary=["", "[UNK]", "a"])
    tokens = TextVectorization(vocabulary=["a"], split=None, output_sequence_length=3)

    found = layer([[["a b"], ["c"]], [["a"], ["a a a"]]])

    assert found.tolist() == [[[2, 1, 0], [1, 0, 0]], [[2, 0, 0], [2, 2, 2]]]
    assert tokens([["a", "b"], ["c", "a"]]).tolist() == [[2, 1, 0], [1, 2, 0]]
    with pytest.raises(InvalidValueError, match=r"texts have shape \(1, 2\)"):
        layer([["a", "b"]])


_WRONG = [
    (lambda: StringLookup(pad_to_max_tokens=True), InvalidValueError, "needs max_tokens"),
    (lambda: StringLookup(output_mode="x"), InvalidValueError, "output_mode is 'x', expected one"),
    (
        lambda: StringLookup(invert=True, output_mode="count"),
        InvalidValueError,
        "'count', but invert",
    ),
    (lambda: StringLookup(sparse=True), ValueError, "sparse is True, expected one of False"),
    (lambda: StringLookup(num_oov_indices=2, salt=1), UnsupportedError, "salt=1"),
    (lambda: StringLookup(encoding="latin-1"), ValueError, "'latin-1', expected one of"),
    (lambda: StringLookup(vocabulary=["a", "a"]), ValueError, r"more than once: \['a'\]"),
    (lambda: StringLookup(vocab=["a"]), TypeError, "unexpected keyword argument 'vocab'"),
    (lambda: StringLookup(vocabulary=["b", "m"], mask_token="m"), ValueError, r"has \['m'\]"),
    (
        lambda: StringLookup(vocabulary=["b", "[UNK]"], invert=True),
        ValueError,
        r"\['\[UNK\]'\] elsewhere",
    ),
    (lambda: StringLookup(vocabulary=["a", "b"], max_tokens=2), ValueError, "has 3 tokens"),
    (lambda: StringLookup(vocabulary=["a"], output_mode="tf_idf"), ValueError, "idf_weights is"),
    (lambda: StringLookup(vocabulary=["a"]).adapt(["b"]), ValueError, "cannot adapt"),
    (lambda: StringLookup()("a"), ContextError, "has no vocabulary"),
    (lambda: StringLookup(vocabulary=["a"])([1]), InvalidTypeError, "Use IntegerLookup"),
    (lambda: IntegerLookup(vocabulary=[1])(["1"]), InvalidTypeError, "expected integers"),
    (
        lambda: StringLookup(vocabulary=["yes"], num_oov_indices=0)(["maybe", "yes"]),
        InvalidValueError,
        r"\['maybe'\] are not in the vocabulary, and num_oov_indices is 0",
    ),
    (lambda: TextVectorization(ragged=True), UnsupportedError, "there are no ragged arrays"),
    (lambda: TextVectorization(standardize="x"), InvalidValueError, "standardize is 'x'"),
    (
        lambda: TextVectorization(output_mode="count", output_sequence_length=3),
        InvalidValueError,
        "with output_sequence_length is 'count'",
    ),
    (
        lambda: _adapted(StringLookup(output_mode="multi_hot"), ["a", "b"]).adapt(["a"]),
        ContextError,
        "new vocabulary has 2 tokens, but results have 3",
    ),
    (
        lambda: tf.function(IntegerLookup(vocabulary=[3, 4]))(tf.constant([3])),
        UnsupportedError,
        r"IntegerLookup: .* in Dataset\.map",
    ),
]


@pytest.mark.parametrize(("make", "error", "message"), _WRONG, ids=[m for _, _, m in _WRONG])
def test_wrong_arguments_are_errors(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_models_that_train_refuse_text():
    layer = _adapted(TextVectorization(output_sequence_length=4), _TEXTS)
    inputs = tf.keras.Input((1,), dtype=tf.string)
    model = tf.keras.Sequential([inputs, layer, tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    texts, labels = np.array(_TEXTS), np.zeros(4, np.float32)
    dataset = tf.data.Dataset.from_tensor_slices((texts, labels)).batch(2)
    advice = re.escape("cannot go to a device. Map them to numbers first")

    for call in (
        lambda: model.predict(texts, verbose=0),
        lambda: model.fit(texts, labels, verbose=0),
        lambda: model.fit(dataset, verbose=0),
    ):
        with pytest.raises(InvalidTypeError, match=advice):
            call()


@keras.saving.register_keras_serializable("tests")
def _shout(texts):
    return np.char.upper(texts)


def test_layers_are_made_from_their_configuration():
    layers = [
        StringLookup(vocabulary=["a", "b"], mask_token="", max_tokens=5, num_oov_indices=2),
        IntegerLookup(vocabulary=np.array([4, 5]), output_mode="multi_hot", name="own"),
        TextVectorization(vocabulary=["A", "A B"], standardize=_shout, ngrams=(1, 2)),
    ]

    for layer in layers:
        config = keras.saving.serialize_keras_object(layer)
        made = keras.saving.deserialize_keras_object(config)

        assert made.get_config() == layer.get_config()
        assert made.get_vocabulary() == layer.get_vocabulary()
        assert made.name == layer.name
    assert made(["a b"]).tolist() == [[2, 1, 3]]
