"""Training, evaluation and prediction that a callback stops anywhere end as stock Keras' do on one device."""

import functools

import keras
import numpy as np
import pytest
import stop_runs as runs
import tensorflow as tf
from cases import rotating
from two_workers import on_two_workers

import keras_dist_ext as kde


@functools.cache
def stock(data):
    return runs.all_stops(runs.make(keras), data)


def assert_same(found, expected, *, asked=True):
    assert len(found) == len(expected)
    for place, one, other in zip([*runs.TRAINING, *runs.ALONE], found, expected, strict=True):
        calls = other["calls"] if asked else [(*call[:3], None) for call in other["calls"]]
        assert one["calls"] == calls, place
        for name in other.keys() - {"calls", "history", "weights", "values"}:
            assert one[name] == other[name], (place, name)
        close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6, err_msg=str(place))
        if "values" in other:
            close(one["values"], other["values"])
            continue
        assert one["history"].keys() == other["history"].keys(), place
        for name, values in other["history"].items():
            close(one["history"][name], values)
        for value, expected_value in zip(one["weights"], other["weights"], strict=True):
            close(value, expected_value)


@pytest.mark.parametrize("data", rotating(runs.DATA, [], slow=["arrays"]))
def test_a_stop_anywhere_ends_the_step_and_leaves_the_validation_whole(mirrored, data):
    assert_same(runs.all_stops(runs.make(kde, mirrored), data), stock(data))


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(data, marks=[on_two_workers(runs.stops_of_worker_1, data), *marks])
        for data, marks in (
            ("arrays", [pytest.mark.slow]),
            ("endless", [pytest.mark.rotating]),
            ("PyDataset", [pytest.mark.rotating]),
        )
    ],
)
def test_a_stop_that_one_worker_asks_for_ends_both_there(values, data):
    assert_same(values[0], stock(data), asked=False)
    assert_same(values[1], stock(data))


@pytest.mark.rotating
@pytest.mark.parametrize("data", ["arrays", "endless"])
def test_a_loop_of_ones_own_stops_as_fit_does(mirrored, data):
    assert_same(runs.all_stops(runs.make_loop(mirrored), data), stock(data))


@pytest.mark.rotating
@on_two_workers(runs.stops_of_a_loop, "arrays")
def test_a_loop_of_ones_own_stops_on_both_workers_where_one_asks(values):
    assert_same(values[0], stock("arrays"), asked=False)
    assert_same(values[1], stock("arrays"))


class StopsFromTheStart(keras.callbacks.Callback):
    """Looks at no batch, so that several steps are made at once."""

    def on_epoch_begin(self, epoch, logs=None):
        self.model.stop_training = epoch == 1


@pytest.mark.parametrize(("steps_per_execution", "steps"), [("auto", 1), (1, 1), (4, 4)])
def test_an_epoch_that_is_to_stop_as_it_begins_makes_one_execution(mirrored, steps_per_execution, steps):
    model = runs.make(kde, mirrored, steps_per_execution=steps_per_execution)
    history = model.fit(**runs.DATA["arrays"](), epochs=3, verbose=0, callbacks=[StopsFromTheStart()]).history
    assert int(model.optimizer.iterations) == 6 + steps
    assert len(history["val_loss"]) == 2


def test_gradients_that_were_being_accumulated_are_whole_after_a_stop(mirrored):
    found = []
    for library, strategy in ((keras, None), (kde, mirrored)):
        model = runs.make(library, strategy)
        with (strategy or tf.distribute.get_strategy()).scope():
            model.compile(keras.optimizers.SGD(0.05, gradient_accumulation_steps=4), "mse")
        stop = runs.Calls(("on_train_batch_end", 1, "stop_training"))
        model.fit(runs.X, runs.Y, batch_size=runs.BATCH, shuffle=False, verbose=0, callbacks=[stop])
        found.append([np.asarray(variable) for variable in model.optimizer.variables])
    for value, expected in zip(found[1], found[0], strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)
