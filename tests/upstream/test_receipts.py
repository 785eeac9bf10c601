"""A hook that Keras or TensorFlow no longer calls is an error before the first step."""

import random
import re
from concurrent import futures

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import rotating

import keras_dist_ext as kde
from keras_dist_ext._keras.interception import HOOKS
from keras_dist_ext.step import receipts

X = np.linspace(-1, 1, 12, dtype="float32").reshape(4, 3)
Y = X.sum(axis=1, keepdims=True)
TRIED = {str(hook): hook for hook in HOOKS}
OF_STEPS = {
    "Model.compute_loss": "train",
    "Mean.update_state": "test",
    "GradientTape.gradient": "train",
    "Optimizer.apply": "train",
    "Variable._direct_assign": "train",
    "SeedGenerator.next": "train",
}


def silence(monkeypatch, name):
    """Have Keras and TensorFlow call their own function, as a release does that no longer asks the module for it."""
    hook = TRIED[name]
    monkeypatch.setattr(hook.owner, hook.name, getattr(hook.owner, hook.name).__wrapped__)


def small_model(strategy):
    with strategy.scope():
        model = kde.Sequential([keras.Input((3,)), keras.layers.Dense(1), keras.layers.Dropout(0.5)], name="small")
        model.compile("sgd", "mse")
    return model


def test_each_hook_is_called_by_what_should_call_it_whatever_the_process_is_set_to():
    assert receipts.uncalled_hooks() == []
    assert len(TRIED) == len(HOOKS) > 40


@pytest.mark.parametrize("setting", rotating(["float64", "float16", "channels_first", "eager", "scope"], []))
def test_no_setting_of_the_process_keeps_a_hook_from_being_called(setting, mirrored):
    kept = keras.config.floatx(), keras.config.image_data_format(), keras.config.dtype_policy()
    try:
        if setting.startswith("float"):
            keras.config.set_floatx(setting)
            keras.config.set_dtype_policy(setting)
        elif setting == "channels_first":
            keras.config.set_image_data_format(setting)
        tf.config.run_functions_eagerly(setting == "eager")
        with (mirrored if setting == "scope" else tf.distribute.get_strategy()).scope():
            assert receipts.uncalled_hooks() == []
    finally:
        keras.config.set_floatx(kept[0])
        keras.config.set_image_data_format(kept[1])
        keras.config.set_dtype_policy(kept[2])
        tf.config.run_functions_eagerly(False)


@pytest.mark.parametrize("name", rotating(TRIED, ["loss.reduce_weighted_values"]))
def test_a_hook_that_is_silent_is_named_by_the_first_trace_of_a_process(name, monkeypatch, mirrored):
    silence(monkeypatch, name)
    model = small_model(mirrored)
    before = model.get_weights()
    receipts.check_hooks.cache_clear()
    try:
        with pytest.raises(kde.BackendError) as raised:
            model.fit(X, Y, verbose=0)
    finally:
        receipts.check_hooks.cache_clear()
    assert re.search(
        rf"With TensorFlow \d\S+ and Keras \d\S+: a small stock model no longer calls (.*, )?{re.escape(name)} "
        r"\((keras|tensorflow)/\S+\.py\).*, by which keras_dist_ext makes .*\. Nothing was trained\. .*pip install "
        "'tensorflow<",
        str(raised.value),
    )
    np.testing.assert_equal(model.get_weights(), before)


@pytest.mark.parametrize("name", rotating(OF_STEPS, ["Model.compute_loss"]))
def test_a_hook_that_only_the_step_of_a_model_does_not_call_is_named_by_its_first_trace(name, monkeypatch, mirrored):
    receipts.check_hooks()
    model = small_model(mirrored)
    silence(monkeypatch, name)
    run = model.fit if OF_STEPS[name] == "train" else model.evaluate
    before = model.get_weights()
    with pytest.raises(kde.BackendError, match=rf"the {OF_STEPS[name]} step of 'small', which is .*{re.escape(name)}"):
        run(X, Y, verbose=0)
    np.testing.assert_equal(model.get_weights(), before)


def test_trying_the_hooks_leaves_names_and_seeds_of_keras_as_they_are():
    def made(*, is_tried):
        keras.utils.set_random_seed(1)
        names = [keras.layers.Dense(1).name]
        assert not is_tried or receipts.uncalled_hooks() == []
        names += [keras.layers.Dense(1).name, keras.layers.SimpleRNN(1).name]
        draws = [random.random(), np.random.random(), *keras.random.SeedGenerator().state.numpy()]
        return names, draws, keras.random.uniform((2,)).numpy().tolist()

    found = []
    for is_tried in (False, True):  # each in a thread of its own, where Keras begins to count
        with futures.ThreadPoolExecutor(1) as executor:
            found.append(executor.submit(made, is_tried=is_tried).result())
    assert found[0] == found[1]


class NoLoss(kde.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        return {"mean": tf.reduce_mean(self(data[0], training=True))}


def frozen():
    model = kde.Sequential([keras.Input((3,)), keras.layers.Dense(1, trainable=False), keras.layers.Dropout(0.0)])
    model.compile("sgd", "mse")
    return model


class Calm(kde.Sequential):
    """Drops nothing, whatever it is told."""

    def call(self, x, training=None):
        return super().call(x, training=False)


class Traced(kde.Sequential):
    @tf.function
    def call(self, x, training=None):
        return super().call(x, training=training)


class Averages(keras.optimizers.SGD):
    """Holds another optimizer, and gives it nothing."""

    inner_optimizer = None


def calls_of_its_own(cls=Calm, optimizer="sgd"):
    model = cls([keras.Input((3,)), keras.layers.Dense(1), keras.layers.Dropout(0.5)])
    model.compile(optimizer, "mse")
    return model


def silent_dropout():
    model = calls_of_its_own(kde.Sequential)
    model.layers[-1].call = lambda x, training=False: x
    return model


def added_loss():
    inputs = keras.Input((3,))
    outputs = keras.layers.Dropout(0.5)(keras.layers.Dense(1, activity_regularizer="l2")(inputs), training=False)
    model = kde.Model(inputs, outputs)
    model.compile("sgd")
    return model


def without_a_loss():
    model = NoLoss()
    model.compile()
    return model


def step_of_an_object():
    model = frozen()
    model.train_step = lambda data: {"mean": tf.reduce_mean(model(data[0]))}
    return model


MODELS = {
    "a step of an object": step_of_an_object,
    "frozen": frozen,
    "an added loss": added_loss,
    "without a loss": without_a_loss,
    "its own call": calls_of_its_own,
    "a call that is a tf.function": lambda: calls_of_its_own(Traced),
    "an optimizer that holds another": lambda: calls_of_its_own(kde.Sequential, Averages(0.1)),
    "a silent dropout": silent_dropout,
}


@pytest.mark.parametrize("made", rotating(MODELS, ["an added loss", "its own call"]))
@pytest.mark.parametrize("options", rotating([{}, {"run_eagerly": True}, {"jit_compile": True}], [{}]))
@pytest.mark.filterwarnings("ignore:The model does not have any trainable")
def test_steps_that_call_less_are_let_be(made, options, strategies):
    kind = "one_device" if options.get("jit_compile") else "mirrored2"  # XLA compiles for no replicas that share a CPU
    with strategies.get(kind).scope():
        model = MODELS[made]()
        model.run_eagerly = options.get("run_eagerly", False)
        model.jit_compile = options.get("jit_compile", False)
    model.fit(X, Y, verbose=0)
    model.predict(X, verbose=0)


@pytest.mark.checks_fit
def test_the_first_fit_of_a_process_is_checked(mirrored):
    """The check leaves parts of layers out, which are not to be missed then."""

    class Centres(keras.layers.Layer):
        def call(self, x):
            return x - keras.ops.mean(x, axis=0)

    with mirrored.scope():
        model = kde.Sequential([keras.Input((3,)), Centres(), keras.layers.Dense(1)])
        model.compile("sgd", "mse", check="raise")
    receipts.check_hooks.cache_clear()
    for _ in range(2):  # and it stays so
        with pytest.raises(kde.StepError, match="does not train on 2 replicas"):
            model.fit(X, Y, verbose=0)
