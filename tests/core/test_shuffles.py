"""A shuffled dataset has in each pass the order that stock Keras gives it."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import rotating
from strategies import strategies

import keras_dist_ext as kde


class StopIn(keras.callbacks.Callback):
    """Asks for a stop in the second epoch: after a batch, or at its end."""

    def __init__(self, hook):
        super().__init__()
        setattr(self, hook, lambda number, logs=None: number != 1 or setattr(self.model, "stop_training", True))


def evaluates_and_fits(model, data, **more):
    for run in (model.evaluate, model.evaluate, model.predict, model.predict):
        run(data, verbose=0, **more)
    model.fit(data, epochs=2, verbose=0)


def fits_twice(model, data, epochs=3, **more):
    for _ in range(2):
        model.fit(data, epochs=epochs, verbose=0, **more)


SHUFFLED_RUNS = {
    "two fits": fits_twice,
    "validation on the same data": lambda model, data: fits_twice(model, data, validation_data=data),
    "validation at every second epoch": lambda model, data: fits_twice(
        model, data, validation_data=data, validation_freq=2
    ),
    "evaluate and predict": evaluates_and_fits,
    "a stop after a batch": lambda model, data: fits_twice(model, data, callbacks=[StopIn("on_train_batch_end")]),
    "a stop after an epoch": lambda model, data: fits_twice(model, data, callbacks=[StopIn("on_epoch_end")]),
    "steps_per_epoch": lambda model, data: fits_twice(model, data, steps_per_epoch=2),
    "steps_per_epoch, and validation on the same data": lambda model, data: fits_twice(
        model, data, steps_per_epoch=2, validation_data=data, validation_steps=2
    ),
    "two epochs of each pass": lambda model, data: fits_twice(model, data, epochs=4, steps_per_epoch=1),
    "more steps than there are": lambda model, data: fits_twice(model, data, steps_per_epoch=3),
    "steps of evaluate and predict": lambda model, data: evaluates_and_fits(model, data, steps=2),
    "a length that is not known": lambda model, data: fits_twice(model, data.filter(lambda x, y: True)),
    "a cache": lambda model, data: fits_twice(model, data),
}


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("kind", rotating(["default", "mirrored2"], ["mirrored2"]))
@pytest.mark.parametrize("run", rotating(SHUFFLED_RUNS, ["two fits", "steps_per_epoch"]))
def test_a_shuffle_has_the_order_in_each_epoch_that_it_has_in_stock_keras(run, kind):
    def seen(lib, strategy):
        rows = []

        def note(row):
            rows.append(float(row[0]))
            return row

        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = lib.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        x = np.arange(6, dtype="float32")[:, None]
        data = tf.data.Dataset.from_tensor_slices(x)
        data = (data.cache() if run == "a cache" else data).shuffle(6)  # by the seed of the process
        data = data.map(lambda row: tf.ensure_shape(tf.numpy_function(note, [row], tf.float32), (1,)))
        SHUFFLED_RUNS[run](model, data.map(lambda row: (row, row)).batch(3))
        return rows

    expected = seen(keras, strategies.get("default"))
    assert len({tuple(expected[i : i + 6]) for i in range(0, len(expected), 6)}) > 1
    assert seen(kde, strategies.get(kind)) == expected
