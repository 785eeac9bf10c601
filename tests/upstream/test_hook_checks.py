"""A hook that Keras or TensorFlow no longer calls is an error before the first step."""

import inspect
import pickle
import random
import re
import subprocess
import sys
import tempfile
import types
from concurrent import futures

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import rotating
from keras.src.losses import losses as losses_module
from keras.src.random import seed_generator
from tensorflow.python.autograph.operators import control_flow
from tensorflow.python.eager import record
from tensorflow.python.framework.func_graph import FuncGraph
from tensorflow.python.ops import cond as cond_module
from tensorflow.python.ops import control_flow_util_v2

import keras_dist_ext as kde
from keras_dist_ext._keras import backend, py_datasets
from keras_dist_ext._keras.adapters import tf_trainer
from keras_dist_ext._keras.datasets import dataset_graph
from keras_dist_ext._keras.draw_hooks import DRAWS
from keras_dist_ext._keras.interception import HOOKS
from keras_dist_ext._keras.models import HookedModel
from keras_dist_ext._keras.py_datasets import py_dataset_adapter, seed_py_datasets
from keras_dist_ext._keras.saving import SAVE_HOOKS, Saveable
from keras_dist_ext.step import hook_checks, hook_uses, state_checks
from keras_dist_ext.step.save_hook_checks import uncalled_save_hooks
from keras_dist_ext.training import worker_saves  # noqa: F401 - installs hooks

X = np.linspace(-1, 1, 12, dtype="float32").reshape(4, 3)
Y = X.sum(axis=1, keepdims=True)
TRIED = {str(hook): hook for hook in HOOKS}
OF_SAVES = {str(hook): hook for hook in SAVE_HOOKS}
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


def stock(module, name):
    """A module like another, without the hook in it."""
    other = types.ModuleType(module.__name__)
    vars(other).update(vars(module), **{name: vars(module)[name].__wrapped__})
    return other


def silence_save(monkeypatch, name):
    """The same for what is asked before a save: a function, or a method that our models override."""
    hook = OF_SAVES[name]
    if hook.owner is HookedModel:
        monkeypatch.delattr(HookedModel, hook.name)
    elif hook.owner is Saveable:  # which Keras asks what it is, and saves it
        monkeypatch.delattr(Saveable, "_obj_type")
    else:
        monkeypatch.setattr(hook.owner, hook.name, getattr(hook.owner, hook.name).__wrapped__)


def small_model(strategy):
    with strategy.scope():
        model = kde.Sequential([keras.Input((3,)), keras.layers.Dense(1), keras.layers.Dropout(0.5)], name="small")
        model.compile("sgd", "mse")
    return model


def error_of_first_fit(strategy):
    """What the first `fit` of a process ends with, before it has changed a weight."""
    model = small_model(strategy)
    before = model.get_weights()
    hook_checks.check_hooks.cache_clear()
    try:
        with pytest.raises(kde.BackendError) as raised:
            model.fit(X, Y, verbose=0)
    finally:
        hook_checks.check_hooks.cache_clear()
    np.testing.assert_equal(model.get_weights(), before)
    return str(raised.value)


def test_each_hook_is_called_by_what_should_call_it_whatever_the_process_is_set_to():
    assert hook_checks.uncalled_hooks() == {}
    assert len(TRIED) == len(HOOKS) > 40


def test_pickle_finds_what_is_replaced():
    replaced = {str(hook): getattr(hook.owner, hook.name) for hook in HOOKS}
    replaced |= {"shuffle": tf.random.shuffle, "stateless_shuffle": tf.random.experimental.stateless_shuffle}
    assert {name for name, each in replaced.items() if pickle.loads(pickle.dumps(each)) is not each} == set()


@pytest.mark.parametrize(
    "setting", rotating(["0", "87654321", "float64", "float16", "channels_first", "eager", "scope"], ["0"])
)
def test_no_setting_of_the_process_keeps_a_hook_from_being_called(setting, mirrored):
    kept = keras.config.floatx(), keras.config.image_data_format(), keras.config.dtype_policy()
    try:
        if setting.startswith("float"):
            keras.config.set_floatx(setting)
            keras.config.set_dtype_policy(setting)
        elif setting == "channels_first":
            keras.config.set_image_data_format(setting)
        elif setting.isdigit():
            keras.utils.set_random_seed(int(setting))
        tf.config.run_functions_eagerly(setting == "eager")
        with (mirrored if setting == "scope" else tf.distribute.get_strategy()).scope():
            assert hook_checks.uncalled_hooks() == {}
            assert hook_checks.states_elsewhere() == []
    finally:
        keras.config.set_floatx(kept[0])
        keras.config.set_image_data_format(kept[1])
        keras.config.set_dtype_policy(kept[2])
        tf.config.run_functions_eagerly(False)
        tf.random.set_seed(None)


@pytest.mark.rotating
@pytest.mark.parametrize("name", ["no folder", "no room"])
def test_no_hook_of_saves_is_missed_where_nothing_can_be_saved(name):
    program = "from keras_dist_ext.step import hook_checks\n"
    program += {
        "no folder": "import tempfile; tempfile.tempdir = '/proc/none'",
        "no room": "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))",
    }[name]
    program += "\nprint(hook_checks.check_hooks())"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert ended.stdout == "None\n", ended.stderr


@pytest.mark.rotating
def test_datasets_in_debug_mode_keep_no_hook_from_being_called():
    program = (
        "import tensorflow as tf; tf.data.experimental.enable_debug_mode()\n"  # for good
        "from keras_dist_ext.step import hook_checks\n"
        "print(hook_checks.states_elsewhere(), hook_checks.uncalled_hooks())"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert ended.stdout == "[] {}\n", ended.stderr


@pytest.mark.parametrize("name", rotating(TRIED, ["loss.reduce_weighted_values"]))
def test_a_hook_that_is_silent_is_named_by_the_first_trace_of_a_process(name, monkeypatch, mirrored):
    silence(monkeypatch, name)
    assert re.search(
        rf"With TensorFlow \d\S+ and Keras \d\S+: a small stock model no longer calls (.*, )?{re.escape(name)} "
        r"\((keras|tensorflow)/\S+\.py\).*, by which keras_dist_ext makes .*\. Nothing was trained\. .*pip install "
        "'tensorflow<",
        error_of_first_fit(mirrored),
    )


@pytest.mark.parametrize("name", rotating(OF_STEPS, ["Model.compute_loss"]))
def test_a_hook_that_only_the_step_of_a_model_does_not_call_is_named_by_its_first_trace(name, monkeypatch, mirrored):
    hook_checks.check_hooks()
    model = small_model(mirrored)
    silence(monkeypatch, name)
    run = model.fit if OF_STEPS[name] == "train" else model.evaluate
    before = model.get_weights()
    with pytest.raises(kde.BackendError, match=rf"the {OF_STEPS[name]} step of 'small', which is .*{re.escape(name)}"):
        run(X, Y, verbose=0)
    np.testing.assert_equal(model.get_weights(), before)


def plain_normal(shape, mean=0.0, stddev=1.0, dtype=None, seed=None):
    return tf.random.stateless_normal(shape, [1, 2])


def plain_dice(loss, y_true, y_pred):
    return losses_module.dice(y_true, y_pred)


USES = {  # what calls less, and which hook is missed in what
    "keras.random.normal": (backend.random, "normal", plain_normal, "SeedGenerator.next"),
    "Dice": (keras.losses.Dice, "call", plain_dice, "LossFunctionWrapper.call"),
    "AutoGraph": (control_flow, "tf_cond", stock(cond_module, "cond"), "cond.cond"),
}


@pytest.mark.parametrize("what", rotating(USES, ["keras.random.normal"]))
def test_a_hook_that_is_silent_in_one_thing_alone_is_named_with_it(what, monkeypatch):
    owner, name, other, hook = USES[what]
    monkeypatch.setattr(owner, name, other, raising=False)
    assert what in hook_checks.uncalled_hooks()[hook]
    with pytest.raises(kde.BackendError, match=rf"no longer calls (.*, )?{hook} \(\S+/\S+\.py\) in {what}[, ].* wrong"):
        hook_checks.check_hooks.__wrapped__()


def test_an_op_that_draws_no_longer_is_named_though_its_hook_is_called(monkeypatch):
    use = hook_uses.Use("keras.random.uniform", lambda: tf.ones((2,)) + 1.0, (DRAWS,), "uniform")
    monkeypatch.setattr(hook_checks, "uses_of_hooks", lambda step: [use])
    assert hook_checks.uncalled_hooks()[DRAWS] == ["keras.random.uniform"]


def test_autograph_is_tried_where_there_is_a_source_to_convert(monkeypatch):
    function = hook_uses._branch_and_loop
    converted = tf.autograph.to_graph(function)
    for x, expected in ((-3.0, 3.0), (1.0, 2.0), (5.0, 5.0)):
        assert float(converted(tf.constant(x))) == float(function(tf.constant(x))) == expected
    assert [use.what for use in hook_uses._uses_of_autograph()] == ["AutoGraph"]

    def no_source(function):
        raise OSError("could not get source code")

    monkeypatch.setattr(inspect, "getsource", no_source)
    assert hook_uses._uses_of_autograph() == []


def test_what_fails_where_all_hooks_are_called_is_told_with_its_error(monkeypatch):
    monkeypatch.setattr(tf, "case", lambda *args, **kwargs: tf.cond(*args))
    with pytest.raises(kde.BackendError, match=r"A small stock model fails with RuntimeError: tf\.case: TypeError: "):
        hook_checks.uncalled_hooks()


def of_another_store(name, value):
    """As a release does that keeps the globals of a thread elsewhere."""


def renamed(dataset):
    graph = dataset_graph(dataset)
    for node in (*graph.node, *(node for function in graph.library.function for node in function.node_def)):
        node.op = {"ShuffleDatasetV3": "ShuffleDatasetV4", "RandomUniform": "RandomUniformV2"}.get(node.op, node.op)
    return graph


NOTHING = property(lambda self: None, lambda self, value: None)
STATES = {
    "the generator of draws": (seed_generator, "global_seed_generator", lambda: keras.random.SeedGenerator(2)),
    "the state of a thread": (backend.global_state, "set_global_attribute", of_another_store),
    "the metrics of losses": (keras.Model, "_loss_tracker", NOTHING),
    "functions of metrics": (keras.metrics.MeanMetricWrapper, "_fn", NOTHING),
    "what tapes record": (record, "could_possibly_record", lambda: False),
    "graphs of branches": (control_flow_util_v2, "CondBranchFuncGraph", FuncGraph),
    "functions of a graph": (tf.Graph, "_get_function", lambda graph, name: None),
    "how slices become a tensor": (tf, "convert_to_tensor", lambda value: tf.scatter_nd([[0]], value.values, [2])),
    "seeds in the graph of a dataset": (state_checks, "dataset_graph", renamed),
}


def test_all_that_is_kept_is_where_it_was_also_for_a_global_seed():
    assert hook_checks.states_elsewhere() == []
    assert len(STATES) == len(state_checks.STATES)
    tf.random.set_seed(1)
    draws = tf.random.uniform((3,)).numpy().tolist()
    tf.random.set_seed(1)
    assert hook_checks.states_elsewhere() == []
    assert tf.random.uniform((3,)).numpy().tolist() == draws
    tf.random.set_seed(None)


@pytest.mark.parametrize("what", rotating(STATES, ["what tapes record", "seeds in the graph of a dataset"]))
def test_what_is_kept_elsewhere_is_named_before_the_first_step(what, monkeypatch):
    owner, name, other = STATES[what]
    monkeypatch.setattr(owner, name, other, raising=False)
    monkeypatch.setattr(hook_checks, "uncalled_hooks", dict)  # looked at before
    hook_checks.check_hooks.cache_clear()
    with pytest.raises(
        kde.BackendError,
        match=rf"With TensorFlow \S+ and Keras \S+: not where it was: (.*, )?{what}[^(]*\(\S+/\S+\.py\)",
    ):
        hook_checks.check_hooks()


def test_what_cannot_be_looked_at_any_more_is_not_where_it_was(monkeypatch):
    gone = state_checks.State("the state of a thread", "keras/src/gone.py", lambda: keras.src.gone)
    monkeypatch.setattr(hook_checks, "STATES", [gone, *state_checks.STATES])
    assert hook_checks.states_elsewhere() == [gone]


def test_nothing_is_said_of_saves_where_there_is_no_folder_for_them(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/proc/none")
    assert uncalled_save_hooks() == []


def test_each_hook_of_saves_is_called_by_what_saves_and_nothing_is_said(capfd, caplog):
    assert uncalled_save_hooks() == []
    assert len(OF_SAVES) == len(SAVE_HOOKS) > 9
    assert capfd.readouterr() == ("", "")
    assert caplog.records == []


@pytest.mark.parametrize("name", rotating(OF_SAVES, ["saving_lib.save_model", "HookedModel._trackable_children"]))
def test_a_hook_of_saves_that_is_silent_is_named_before_the_first_step(name, monkeypatch, mirrored):
    monkeypatch.setattr(hook_checks, "uncalled_hooks", dict)  # of steps, which are not looked at here
    silence_save(monkeypatch, name)
    assert re.search(
        rf"With TensorFlow \d\S+ and Keras \d\S+: what saves a small model no longer calls {re.escape(name)} "
        r"\((keras|tensorflow)/\S+\.py\), by which .* Nothing was trained\. .*pip install 'tensorflow<",
        error_of_first_fit(mirrored),
    )


def keeps_its_own_iterator(monkeypatch):
    monkeypatch.setattr(tf_trainer, "TFEpochIterator", tf_trainer.TFEpochIterator.__mro__[1])


def builds_otherwise(monkeypatch):
    monkeypatch.delattr(HookedModel, "_maybe_symbolic_build")


class OwnFunction(kde.Sequential):
    def make_train_function(self, force=False):
        self.train_function = lambda iterator: [self.train_on_batch(*batch) for batch in iterator][-1]


def makes_its_own_function(monkeypatch):
    monkeypatch.delattr(kde.Model, "make_train_function")


FEEDS = {
    "fit keeps its own iterator": (keeps_its_own_iterator, "fit", "TFEpochIterator"),
    "evaluate keeps its own iterator": (keeps_its_own_iterator, "evaluate", "TFEpochIterator"),
    "predict keeps its own iterator": (keeps_its_own_iterator, "predict", "TFEpochIterator"),
    "fit makes its own function": (makes_its_own_function, "fit", "make_train_function"),
    "fit does not ask for a build": (builds_otherwise, "fit", "_maybe_symbolic_build"),
    "evaluate does not ask for a build": (builds_otherwise, "evaluate", "_maybe_symbolic_build"),
}


@pytest.mark.parametrize("made", rotating(FEEDS, ["fit keeps its own iterator"]))
@pytest.mark.parametrize("kind", rotating(["mirrored2", "one_device"], ["mirrored2"]))
def test_keras_loops_that_no_longer_ask_for_data_or_a_build_are_an_error_before_the_first_step(
    made, kind, monkeypatch, strategies
):
    silent, method, named = FEEDS[made]
    model = small_model(strategies.get(kind))
    model.predict(X, verbose=0)
    before = model.get_weights()
    silent(monkeypatch)
    with pytest.raises(
        kde.BackendError, match=rf"With TensorFlow .*{named}.* \(keras/src/.*No step was made\. This release"
    ):
        getattr(model, method)(X, *([] if method == "predict" else [Y]), verbose=0)
    np.testing.assert_equal(model.get_weights(), before)


def test_a_train_function_of_the_user_s_is_told_to_override_the_step(mirrored):
    with mirrored.scope():
        model = OwnFunction([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    with pytest.raises(kde.BackendError, match=r"make_train_function, .* is overridden: override train_step"):
        model.fit(X, Y, verbose=0)


@pytest.mark.parametrize("batch", rotating(["train_on_batch", "test_on_batch", "predict_on_batch"], []))
def test_callbacks_may_give_a_run_s_model_batches_of_their_own(batch, mirrored):
    model = small_model(mirrored)
    given = (X,) if batch == "predict_on_batch" else (X, Y)
    made = []

    class OfItsOwn(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            made.append(getattr(model, batch)(*given))

        on_epoch_end = on_test_begin = lambda self, *args: self.on_train_begin()

    model.fit(X, Y, validation_data=(X, Y), callbacks=[OfItsOwn()], epochs=2, verbose=0)
    model.evaluate(X, Y, callbacks=[OfItsOwn()], verbose=0)
    assert len(made) == 6


def test_a_py_dataset_that_keras_shuffles_otherwise_is_an_error_where_a_seed_is_given(monkeypatch):
    monkeypatch.setattr(py_dataset_adapter, "random", random)
    py_datasets._check_py_dataset_order.cache_clear()
    with pytest.raises(kde.BackendError, match=r"PyDataset is no longer shuffled .*py_dataset_adapter\.py\), so its"):
        seed_py_datasets(1)
    seed_py_datasets(None)


def test_a_py_dataset_whose_rest_keras_does_not_take_is_an_error_where_a_run_is_resumed(monkeypatch):
    py_datasets._check_py_dataset_rest.cache_clear()
    monkeypatch.setattr(
        py_dataset_adapter.PyDatasetAdapter,
        "get_tf_dataset",
        lambda adapter: tf.data.Dataset.from_tensor_slices([adapter.py_dataset[i][0, 0] for i in range(2)]),
    )
    with pytest.raises(kde.BackendError, match=r"no longer made of what .*_get_iterator gives .* at which it was"):
        py_datasets.resume_py_dataset(None, 1, None)


def test_arrays_that_keras_shuffles_otherwise_are_an_error_where_a_seed_is_given(monkeypatch):
    for owner, name in [(tf.random, "shuffle"), (tf.random.experimental, "stateless_shuffle")]:
        monkeypatch.setattr(owner, name, getattr(owner, name).__wrapped__)
    with pytest.raises(kde.BackendError, match=r"arrays are no longer shuffled .*array_data_adapter\.py\), so their"):
        kde.distribute((X, Y), batch_size=2, seed=1)


def test_trying_the_hooks_leaves_names_and_seeds_of_keras_as_they_are():
    def made(*, is_tried):
        keras.utils.set_random_seed(1)
        names = [keras.layers.Dense(1).name]
        assert not is_tried or hook_checks.uncalled_hooks() == {}
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
    hook_checks.check_hooks.cache_clear()
    for _ in range(2):  # and it stays so
        with pytest.raises(kde.StepError, match="does not train on 2 replicas"):
            model.fit(X, Y, shuffle=False, verbose=0)  # else both halves may have the mean of the whole
