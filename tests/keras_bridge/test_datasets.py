"""`distributary.data.Dataset` and distributed datasets in fit, evaluate and predict."""

import contextlib
import gc
import itertools
import threading
import warnings

import keras
import numpy as np
import pytest

from distributary.data import Dataset
from tests.keras_bridge import small

_WAIT_SECONDS = 30.0


def _dataset(rows=14):
    return Dataset.from_tensor_slices(small.data(rows)).batch(4)


_FORMS = {
    "dataset": lambda strategy: _dataset(),
    "unknown length": lambda strategy: Dataset.from_generator(lambda: iter(_dataset())),
    "distributed": lambda strategy: strategy.experimental_distribute_dataset(_dataset()),
    "from function": lambda strategy: strategy.distribute_datasets_from_function(
        lambda _: _dataset().rebatch(2)
    ),
}


@pytest.mark.parametrize("form", _FORMS)
def test_datasets_equal_arrays_on_one_device(form, strategy):
    model, reference = small.model(strategy), small.model(None)
    data = _FORMS[form](strategy)
    x, y = small.data(14)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        history = model.fit(data, validation_data=_dataset(6), epochs=2, verbose=0).history
        evaluated = model.evaluate(data, verbose=0, return_dict=True)
        predicted = model.predict(_dataset().map(lambda x, y: x), verbose=0)

    expected = small.fit(reference, x, y, validation_data=small.data(6)).history
    small.assert_equal_logs(history, expected)
    small.assert_equal_weights(model, reference)
    wanted = reference.evaluate(x, y, batch_size=4, verbose=0, return_dict=True)
    small.assert_equal_logs(evaluated, wanted)
    np.testing.assert_allclose(predicted, reference.predict(x, verbose=0), **small.CLOSE)


def test_datasets_give_several_outputs_their_labels(strategy):
    def make(strategy):
        with strategy.scope() if strategy else contextlib.nullcontext():
            keras.utils.set_random_seed(3)
            x = keras.Input((3,))
            model = keras.Model(x, [keras.layers.Dense(n, name=f"d{n}")(x) for n in (1, 3)])
            losses = ["mse", keras.losses.SparseCategoricalCrossentropy(from_logits=True)]
            model.compile("sgd", losses)
        return model

    x, y = small.data(8)
    labels = (y, np.arange(8) % 3)
    model, reference = make(strategy), make(None)

    history = model.fit(Dataset.from_tensor_slices((x, labels)).batch(4), epochs=2, verbose=0)

    small.assert_equal_logs(history.history, small.fit(reference, x, list(labels)).history)
    small.assert_equal_weights(model, reference)


def test_datasets_train_models_without_a_strategy_too():
    model, reference = small.model(steps_per_execution=3), small.model()

    model.fit(_dataset(), epochs=2, verbose=0)
    small.fit(reference, *small.data(14))
    small.assert_equal_weights(model, reference)
    assert model.predict(_dataset().map(lambda x, y: x), verbose=0).shape == (14, 1)


def test_endless_datasets_need_a_number_of_steps(strategy_of):
    model = small.model(strategy_of(2))
    endless = _dataset().repeat()

    with pytest.raises(ValueError, match=r"an epoch would never end. Give steps_per_epoch"):
        model.fit(endless, verbose=0)
    seen = []
    counted = Dataset.from_generator(
        lambda: (seen.append(i) or batch for i, batch in enumerate(itertools.cycle(_dataset())))
    )
    model.fit(counted, steps_per_epoch=3, epochs=2, verbose=0)
    # It goes on in the second epoch; besides, Keras looks at a first batch to build the model.
    assert 6 <= len(seen) <= 12
    assert max(seen) >= 5
    history = model.fit(endless, steps_per_epoch=5, verbose=0).history
    assert len(history["loss"]) == 1
    assert model.evaluate(endless, steps=2, verbose=0)
    with pytest.raises(ValueError, match="steps to evaluate"):
        model.evaluate(endless, verbose=0)


def test_targets_next_to_a_dataset_are_refused(strategy_of):
    model = small.model(strategy_of(2))

    with pytest.raises(ValueError, match=r"so y cannot be given .* yield \(x, y\)"):
        model.fit(_dataset(), np.zeros(14))
    with pytest.raises(ValueError, match="single examples"):
        model.fit(_dataset().unbatch(), verbose=0)


def test_an_interrupted_fit_leaves_no_thread(strategy_of):
    model = small.model(strategy_of(2))

    def stop(batch, logs):
        if batch == 1:
            raise KeyboardInterrupt

    callback = keras.callbacks.LambdaCallback(on_train_batch_end=stop)
    with pytest.raises(KeyboardInterrupt):
        model.fit(_dataset().repeat(), steps_per_epoch=50, callbacks=[callback], verbose=0)
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "distributary-prefetch":
            thread.join(_WAIT_SECONDS)
    assert "distributary-prefetch" not in [t.name for t in threading.enumerate()]
    model.fit(_dataset(), verbose=0)


def test_every_epoch_is_shuffled_anew_and_reproducibly(strategy_of):
    def trained(**kwargs):
        model = small.model(strategy_of(2))
        rows = Dataset.from_tensor_slices(small.data(12)).shuffle(12, seed=5, **kwargs)
        model.fit(rows.batch(4), epochs=3, verbose=0)
        return model.get_weights()[0]

    first = trained()
    np.testing.assert_array_equal(first, trained())
    assert not np.array_equal(first, trained(reshuffle_each_iteration=False))
