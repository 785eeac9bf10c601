"""Swapping the base class keeps all of `keras.Model`, and adds that it lives under its strategy."""

import abc
import contextlib
import copy
import gc
import inspect
import pickle
import pydoc
import subprocess
import sys
import textwrap

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import rotating
from strategies import Strategies
from tensorflow.python.framework.func_graph import FuncGraph

import keras_dist_ext as kde
from keras_dist_ext._keras.models import HookedModel
from keras_dist_ext._keras.strategies import strategy_of_variable
from keras_dist_ext._keras.variables import components
from keras_dist_ext.training import epoch_data
from keras_dist_ext.training.execution import Execution
from keras_dist_ext.training.model import Functional

X = np.random.default_rng(0).normal(size=(21, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
FIT = {"batch_size": 8, "shuffle": False, "verbose": 0}


class Net(kde.Model):
    def __init__(self, units, activation="tanh", **kwargs):
        super().__init__(**kwargs)
        self.body, self.head = keras.layers.Dense(units, activation), keras.layers.Dense(1)

    def call(self, x):
        return self.head(self.body(x))


class FromInputs(kde.Model):
    """Called with inputs and outputs, as Keras allows for subclasses that have no constructor."""


def sequential(lib=kde):
    layers = [keras.layers.Dense(4, activation="tanh", name="body"), keras.layers.Dense(1, name="head")]
    return lib.Sequential([keras.Input((3,), name="x"), *layers], name="net")


def functional(lib=kde):
    inputs = keras.Input((3,), name="x")
    hidden = keras.layers.Dense(4, activation="tanh", name="body")(inputs)
    return lib.Model(inputs, keras.layers.Dense(1, name="head")(hidden), name="net")


def subclass(lib=kde):
    net = Net(4, name="net")
    net(X[:1])
    return net


def from_inputs(lib=kde):
    inputs = keras.Input((3,))
    return FromInputs(inputs, keras.layers.Dense(1)(inputs), name="net")


KINDS = {"sequential": sequential, "functional": functional, "subclass": subclass, "inputs and outputs": from_inputs}


@pytest.fixture(params=rotating(KINDS, ["functional", "subclass"]))
def kind(request):
    return KINDS[request.param]


def momentum():
    return keras.optimizers.SGD(0.05, momentum=0.9)


def made(make, strategy=None, *args, optimizer=momentum, loss="mse", **arguments):
    """Build and compile, seeded, in scope."""
    keras.utils.set_random_seed(3)
    with (strategy or tf.distribute.get_strategy()).scope():
        net = make(*args)
        net.compile(optimizer(), loss, **arguments)
    return net


def stock(make=sequential, **arguments):
    return made(make, None, keras, **arguments)


def lives_under(net, strategy):
    """Whether all variables do, the optimizer's too."""
    variables = [*net.variables, *(net.optimizer.variables if net.compiled else ())]
    return variables and all(strategy_of_variable(v) is strategy for v in variables)


def iterations(net):
    return int(net.optimizer.iterations.numpy())


def assert_close(one, other):
    for value, expected in zip(one, other, strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)


def assert_same_weights(one, other):
    assert_close(one.get_weights(), other.get_weights())


def assert_same_state(one, other):
    assert_same_weights(one, other)
    assert_close(*([v.numpy() for v in net.optimizer.variables] for net in (one, other)))


# What it looks like


@pytest.mark.rotating
def test_a_summary_is_that_of_keras(mirrored):
    summaries = []
    for net in (made(functional, mirrored), stock(functional)):
        net.fit(X, Y, **FIT)
        lines = []
        net.summary(print_fn=lambda line, line_break=True, lines=lines: lines.append(line))
        summaries.append("\n".join(lines))
    assert summaries[0] == summaries[1]
    assert "Trainable params: 21" in summaries[0]


@pytest.mark.parametrize("name", ["fit", "evaluate", "predict"])
def test_the_signature_and_help_of_a_loop_are_those_of_keras(name):
    ours, theirs = getattr(kde.Model, name), getattr(keras.Model, name)
    assert inspect.signature(ours) == inspect.signature(theirs)
    assert inspect.getdoc(ours) == inspect.getdoc(theirs)
    assert pydoc.render_doc(ours).count("batch_size") > 2


def test_the_signature_of_compile_differs_by_arguments_of_ours_and_the_default_of_steps_per_execution():
    ours, theirs = (inspect.signature(lib.Model.compile).parameters for lib in (kde, keras))
    assert list(ours) == [*theirs, "virtual_replicas", "check", "batch_statistics", "exact", "gradient_compression"]
    assert [name for name in theirs if ours[name].default != theirs[name].default] == ["steps_per_execution"]


def test_the_signature_of_a_subclass_is_its_own_with_a_strategy_and_a_seed():
    assert str(inspect.signature(Net)) == "(units, activation='tanh', *, strategy=None, seed=None, **kwargs)"
    assert "Net(units, activation='tanh', *, strategy=None, seed=None, **kwargs)" in pydoc.render_doc(
        Net, renderer=pydoc.plaintext
    )


def test_models_are_instances_of_keras_classes(mirrored):
    with mirrored.scope():
        assert isinstance(functional(), keras.Model)
        assert isinstance(functional(), Functional)
        assert isinstance(sequential(), keras.Sequential)
        assert isinstance(from_inputs(), FromInputs)


def test_a_subclass_called_with_inputs_and_outputs_leaves_public_classes_alone():
    class Base(kde.Model):
        pass

    class Sub(Base):
        pass

    before = kde.Model.__bases__, kde.Sequential.__bases__, keras.Model.__bases__
    inputs = keras.Input((3,))
    net = Sub(inputs, keras.layers.Dense(1)(inputs))
    assert (kde.Model.__bases__, kde.Sequential.__bases__, keras.Model.__bases__) == before
    assert kde.Model.__bases__ == (HookedModel,)
    assert HookedModel.__bases__ == (keras.Model,)
    assert isinstance(net, Sub)
    assert net.input_shape == (None, 3)  # it is a graph
    assert Net.__bases__ == (kde.Model,)
    assert not issubclass(Net, Functional)


# Where it lives


def test_a_strategy_given_to_the_constructor_is_the_one_to_live_under(mirrored):
    with mirrored.scope():
        inputs = keras.Input((3,))
        outputs = keras.layers.Dense(1)(inputs)
    nets = (
        kde.Sequential([keras.layers.Dense(4), keras.layers.Dense(1)], strategy=mirrored),
        kde.Model(inputs, outputs, strategy=mirrored),
        FromInputs(inputs, outputs, strategy=mirrored),
    )
    for net in nets:
        net.compile("adam", "mse")
        net.fit(X, Y, **FIT)
        assert net.distribute_strategy is mirrored
        assert lives_under(net, mirrored)


def test_a_subclass_takes_a_strategy_and_its_own_arguments(mirrored):
    net = Net(4, strategy=mirrored, name="net")
    net.compile("adam", "mse", metrics=["mae"])
    net.fit(X, Y, **FIT)
    assert net.name == "net"
    assert net.body.units == 4
    assert lives_under(net, mirrored)


def test_a_class_has_its_own_argument_named_strategy(mirrored):
    class Pooled(kde.Model):
        def __init__(self, strategy):
            super().__init__()
            self.strategy_given, self.head = strategy, keras.layers.Dense(1)

        def call(self, x):
            return self.head(x)

    with mirrored.scope():
        assert Pooled(strategy="mean").strategy_given == "mean"
    net = Pooled(strategy=mirrored)
    assert net.strategy_given is net.distribute_strategy is mirrored


def test_a_choice_instead_of_a_strategy_is_refused(mirrored):
    choice = kde.pick_strategy("one_device", devices=["CPU:0"], environ={})
    wanted = [
        lambda: kde.Sequential([keras.layers.Dense(1)], strategy=choice),
        lambda: kde.adopt(stock(), choice),
        lambda: kde.load_model("net.keras", choice),
        lambda: kde.check_scope(stock(), choice),
        lambda: kde.ScopeGuard(choice),
    ]
    for wants_a_strategy in wanted:
        with pytest.raises(
            kde.StrategyError, match="^strategy must be a tf.distribute.Strategy, got .*`StrategyChoice.strategy`"
        ):
            wants_a_strategy()


def test_a_class_may_be_abstract(mirrored):
    class Base(kde.Model, abc.ABC):
        @abc.abstractmethod
        def width(self):
            """Return the number of units."""

    class Leaf(Base):
        def __init__(self):
            super().__init__()
            self.head = keras.layers.Dense(self.width())

        def width(self):
            return 1

        def call(self, x):
            return self.head(x)

    with pytest.raises(TypeError, match="abstract"):
        Base()
    net = Leaf(strategy=mirrored)
    net.compile("sgd", "mse")
    net.fit(X, Y, **FIT)
    assert lives_under(net, mirrored)


def test_a_lazy_model_built_outside_the_scope_lands_in_its_strategy(mirrored):
    with mirrored.scope():
        nets = Net(4), kde.Sequential([keras.layers.Dense(4), keras.layers.Dense(1)])
    for net in nets:
        assert not net.variables
        net(X[:1])
        assert lives_under(net, mirrored)


def test_a_model_compiled_with_strings_outside_the_scope_lands_in_its_strategy(mirrored):
    with mirrored.scope():
        net = sequential()
    net.compile("adam", "mse", metrics=["mae", "mse"], weighted_metrics=["mae"])
    net.fit(X, Y, **FIT)
    assert lives_under(net, mirrored)
    kde.check_scope(net, mirrored).raise_if_bad()


def grown(strategy):
    net = kde.Sequential(strategy=strategy)
    for layer in (keras.Input((3,)), keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dense(1)):
        net.add(layer)
    return net


def built_by_its_class(strategy):
    class Scaled(kde.Model):
        def build(self, input_shape):
            self.scale = self.add_weight(shape=(input_shape[-1],), name="scale")

        def call(self, x):
            return x * self.scale

    net = Scaled(strategy=strategy)
    net.build((None, 3))
    return net


def quantized(strategy):
    with strategy.scope():
        net = sequential()
    net.quantize("int8")
    return net


@pytest.mark.filterwarnings("ignore:Layer InputLayer does not have a `quantize`")
@pytest.mark.parametrize("make", [grown, built_by_its_class, quantized])
def test_what_makes_variables_outside_of_the_scope_makes_them_in_it(mirrored, make):
    net = make(mirrored)
    net.compile("adam", "mse")
    assert lives_under(net, mirrored)
    assert net.predict(X, verbose=0).shape[0] == len(X)


def test_layers_of_a_model_that_keras_takes_for_built_are_made_in_scope(mirrored):
    net = Net(4, strategy=mirrored)
    with pytest.warns(UserWarning, match="does not have a `build"):
        net.build((None, 3))  # makes nothing, and yet the model counts as built
    net(X[:1])
    assert len(net.variables) == 4
    net.compile("sgd", "mse")
    assert lives_under(net, mirrored)


def elsewhere(part, strategy):
    layer = keras.layers.Dense(4, name="body")
    layer.build((None, 3))
    backbone = stock()
    optimizer, metrics = keras.optimizers.Adam(name="foreign_adam"), [keras.metrics.Precision(name="foreign_metric")]
    with strategy.scope():
        body = {"layer": layer, "backbone": backbone}.get(part) or keras.layers.Dense(4)
        net = kde.Sequential([keras.Input((3,)), body, keras.layers.Dense(1, name="head")], name="ours")
        net.compile(
            optimizer if part == "optimizer" else "adam", "mse", metrics=metrics if part == "metric" else ["mae"]
        )
    return net


@pytest.mark.parametrize(
    ("part", "named"),
    [
        ("optimizer", "1 of 1 optimizer of 'ours' was created outside MirroredStrategy (2 replicas): foreign_adam"),
        ("metric", "foreign_metric/true_positives"),
        ("layer", "2 of 4 trainable variables of 'ours' were created outside MirroredStrategy (2 replicas): body/k"),
        ("backbone", "4 of 6 trainable variables of 'ours' were created outside MirroredStrategy (2 replicas): net/b"),
    ],
)
def test_what_was_made_elsewhere_is_refused_before_the_first_step(mirrored, part, named):
    net = elsewhere(part, mirrored)
    before = net.get_weights()

    def read():
        raise AssertionError("the data was read")
        yield

    spec = (tf.TensorSpec((None, 3)), tf.TensorSpec((None, 1)))
    data = tf.data.Dataset.from_generator(read, output_signature=spec)
    for call in (net.fit, net.evaluate):
        with pytest.raises(kde.ScopeError) as error:
            call(data, verbose=0)
        assert named in str(error.value)
    assert_close(before, net.get_weights())


@pytest.mark.rotating
def test_fit_inside_the_scope_is_fit_outside(mirrored):
    inside, outside = made(sequential, mirrored), made(sequential, mirrored)
    with mirrored.scope():
        history = inside.fit(X, Y, validation_data=(X, Y), epochs=2, **FIT).history
        results = inside.evaluate(X, Y, verbose=0)
        prediction = inside.predict(X, verbose=0)
    expected = outside.fit(X, Y, validation_data=(X, Y), epochs=2, **FIT).history
    assert_close(history.values(), expected.values())
    assert_close([results, prediction], [outside.evaluate(X, Y, verbose=0), outside.predict(X, verbose=0)])
    assert_same_state(inside, outside)


@pytest.mark.rotating
def test_models_under_different_strategies_do_not_disturb_each_other(strategies):
    kinds = ["mirrored2", "mirrored3", "default", "mirrored2"]
    nets, expected = [made(sequential, strategies.get(kind)) for kind in kinds], stock()
    for _ in range(2):
        for net in (*nets, expected):
            net.fit(X, Y, **FIT)
    for net in nets:
        assert_same_state(net, expected)


# Configs and clones


def test_the_config_of_a_subclass_holds_its_arguments():
    net = Net(5, activation="relu", name="net")
    config = net.get_config()
    assert (config["units"], config["activation"], config["name"]) == (5, "relu", "net")
    again = Net.from_config(config)
    assert (again.body.units, again.name) == (5, "net")


def test_the_config_of_a_subclass_without_a_strategy_holds_none(mirrored):
    assert "strategy" not in Net(5, strategy=mirrored).get_config()


@pytest.mark.parametrize("make", [sequential, functional, from_inputs])
def test_a_graph_made_from_its_config_is_of_its_class_and_strategy(mirrored, make):
    net = made(make, mirrored)
    with mirrored.scope():
        again = type(net).from_config(net.get_config())
    assert type(again) is type(net)
    assert again.distribute_strategy is mirrored
    assert [(v.name, v.shape) for v in again.variables] == [(v.name, v.shape) for v in net.variables]
    assert lives_under(again, mirrored)


@pytest.mark.rotating
def test_a_functional_clone_by_keras_in_scope_is_trained_like_the_model(mirrored):
    net = made(functional, mirrored)  # of a Sequential, Keras makes its own class: kde.clone_model makes ours
    with mirrored.scope():
        clone = keras.models.clone_model(net)
        clone.compile(momentum(), "mse")
    clone.set_weights(net.get_weights())
    for each in (net, clone):
        each.fit(X, Y, **FIT)
    assert isinstance(clone, kde.Model)
    assert_same_state(clone, net)


def test_a_clone_by_us_lives_with_its_model(mirrored, kind):
    net = made(kind, mirrored)
    clone = kde.clone_model(net)
    assert isinstance(clone, type(net))
    assert clone.distribute_strategy is mirrored
    clone.fit(X, Y, **FIT)
    assert lives_under(clone, mirrored)


# Files


CONTINUE = """
    import sys
    sys.modules["keras_dist_ext"] = None  # whoever imports it fails
    import keras, numpy as np
    directory = sys.argv[1]
    data = np.load(directory + "/data.npz")
    for name in ("sequential", "functional"):
        net = keras.models.load_model(f"{directory}/{name}.keras")
        assert type(net).__module__.startswith("keras."), type(net)
        assert int(net.optimizer.iterations) == 3
        net.fit(data["x"], data["y"], batch_size=8, shuffle=False, verbose=0)
        np.savez(f"{directory}/{name}.npz", *net.get_weights())
"""


@pytest.mark.rotating
def test_a_file_of_ours_goes_on_in_stock_keras_that_does_not_know_us(tmp_path, mirrored):
    np.savez(tmp_path / "data.npz", x=X, y=Y)
    expected = {}
    for make in (sequential, functional):
        net = made(make, mirrored, metrics=["mae"])
        net.fit(X, Y, **FIT)
        net.save(tmp_path / f"{make.__name__}.keras")
        expected[make.__name__] = stock(make)
        expected[make.__name__].fit(X, Y, epochs=2, **FIT)
    command = [sys.executable, "-c", textwrap.dedent(CONTINUE), str(tmp_path)]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    for name, net in expected.items():
        with np.load(tmp_path / f"{name}.npz") as weights:
            assert_close(weights.values(), net.get_weights())


@pytest.mark.slow
def test_weights_files_are_exchanged_with_stock_keras(tmp_path, mirrored):
    net, other = made(functional, mirrored), stock(functional)
    net.fit(X, Y, **FIT)
    net.save_weights(tmp_path / "ours.weights.h5")
    other.load_weights(tmp_path / "ours.weights.h5")
    assert_same_weights(net, other)
    other.fit(X, Y, **FIT)
    other.save_weights(tmp_path / "stock.weights.h5")
    net.load_weights(tmp_path / "stock.weights.h5")
    assert_same_weights(net, other)
    for variable in net.trainable_variables:
        first, second = (part.numpy() for part in components(variable))
        np.testing.assert_array_equal(first, second)


@pytest.mark.slow
def test_an_exported_model_serves_what_the_model_predicts(tmp_path, mirrored):
    net = made(functional, mirrored)
    net.fit(X, Y, **FIT)
    net.export(tmp_path / "exported", verbose=False)
    exported = tf.saved_model.load(str(tmp_path / "exported"))
    np.testing.assert_allclose(exported.serve(X), net.predict(X, verbose=0), rtol=1e-5, atol=1e-6)


def pickled(net):
    return pickle.loads(pickle.dumps(net))


@pytest.mark.parametrize("transport", rotating([pickled, copy.deepcopy], [pickled]))
def test_a_pickled_model_comes_back_as_ours_and_goes_on(mirrored, kind, transport):
    net = made(kind, mirrored)
    net.fit(X, Y, **FIT)
    with mirrored.scope():
        again = transport(net)
    assert type(again) is type(net)
    assert lives_under(again, mirrored)
    assert_same_state(again, net)
    for each in (net, again):
        each.fit(X, Y, **FIT)
    assert_same_state(again, net)


def test_a_pickled_model_comes_back_without_a_strategy_where_no_scope_is_entered(mirrored, kind):
    net = made(kind, mirrored)
    net.fit(X, Y, **FIT)
    again = pickle.loads(pickle.dumps(net))
    assert type(again) is type(net)
    assert not tf.distribute.has_strategy()
    assert again.distribute_strategy is tf.distribute.get_strategy()
    assert_same_state(again, net)


def normalized(lib=kde):
    return lib.Sequential([keras.Input((3,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])


@pytest.mark.rotating
def test_replicas_agree_on_batch_normalization_after_training_and_after_saving(tmp_path, strategies):
    mirrored = strategies.get("mirrored3")
    net = made(normalized, mirrored)
    net.fit(X, Y, epochs=2, **FIT)
    net.save(tmp_path / "net.keras")
    loaded, alone = kde.load_model(tmp_path / "net.keras", mirrored), keras.models.load_model(tmp_path / "net.keras")
    for each in (net, loaded):
        for variable in each.variables:
            first, *others = (part.numpy() for part in components(variable))
            for other in others:
                np.testing.assert_array_equal(first, other, err_msg=variable.path)
    assert np.abs(net.layers[0].moving_mean.numpy()).max() > 1e-3
    assert_same_weights(loaded, net)
    prediction = net.predict(X, verbose=0)
    assert_close([prediction] * 2, [each.predict(X, verbose=0) for each in (loaded, alone)])
    for row in (0, 10, 20):  # whichever replica gets it
        np.testing.assert_allclose(net.predict(X[row : row + 1], verbose=0), prediction[row : row + 1], rtol=1e-4)


def accumulating():
    return keras.optimizers.SGD(0.05, momentum=0.9, gradient_accumulation_steps=4)


class SaveAt(keras.callbacks.Callback):
    def __init__(self, batch, path):
        super().__init__()
        self.batch, self.path = batch, path

    def on_train_batch_end(self, batch, logs=None):
        if batch == self.batch:
            self.model.save(self.path)


@pytest.mark.parametrize("batch", rotating([0, 2], []))
def test_gradients_that_are_accumulated_survive_a_file(tmp_path, mirrored, batch):
    """3 batches an epoch and updates every 4: each file is written in the middle of an accumulation."""
    path = tmp_path / "net.keras"
    net, expected = made(sequential, mirrored, optimizer=accumulating), stock(optimizer=accumulating)
    net.fit(X, Y, callbacks=[SaveAt(batch, path)], **FIT)
    expected.fit(X[: 8 * (batch + 1)], Y[: 8 * (batch + 1)], **FIT)
    loaded, alone = kde.load_model(path, mirrored), keras.models.load_model(path)
    assert_same_state(alone, expected)
    for each in (loaded, alone, expected):
        each.fit(X, Y, epochs=3, **FIT)
    assert iterations(loaded) == iterations(expected) == (batch + 10) // 4
    assert_same_state(loaded, expected)
    assert_same_state(alone, expected)


@pytest.mark.slow
def test_a_file_written_in_the_middle_of_an_accumulation_does_not_disturb_training(tmp_path, mirrored):
    net, expected = made(sequential, mirrored, optimizer=accumulating), stock(optimizer=accumulating)
    net.fit(X, Y, epochs=3, callbacks=[SaveAt(1, tmp_path / "net.keras")], **FIT)
    expected.fit(X, Y, epochs=3, **FIT)
    assert_same_state(net, expected)


# Loops


@pytest.fixture
def executions(monkeypatch):
    """How many steps each execution was to make."""
    found = []

    class Counted(Execution):
        def __init__(self, reader, num_steps, first=1):
            super().__init__(reader, num_steps, first)
            found.append(num_steps)

    monkeypatch.setattr(epoch_data, "Execution", Counted)
    return found


@pytest.mark.parametrize("length_is_known", rotating([False, True], [True]))
@pytest.mark.parametrize("kind", rotating(["default", "mirrored2"], ["mirrored2"]))
def test_executions_of_one_step_have_a_graph_without_a_loop(kind, length_is_known, strategies):
    batches = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    if not length_is_known:
        batches = batches.filter(lambda *_: True)
    trained = []
    for steps in (1, 3):
        net = made(sequential, strategies.get(kind), steps_per_execution=steps)
        history = net.fit(batches, epochs=2, verbose=0, validation_data=batches).history
        trained.append((history, net.get_weights()))
        for function in (net.train_function, net.test_function):
            (graph,) = function.program.graphs()
            assert any(op.type == "While" for op in graph.get_operations()) == (steps == 3)
    (history, weights), (expected_history, expected_weights) = trained
    assert history == expected_history
    for value, expected in zip(weights, expected_weights, strict=True):
        np.testing.assert_array_equal(value, expected)


class Batches(keras.callbacks.Callback):
    """Notes batches, and asks to stop after one of them."""

    def __init__(self, stop_after=None):
        super().__init__()
        self.seen, self.logs, self.stop_after = [], [], stop_after

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(batch)
        self.logs.append(dict(logs))
        self.model.stop_training = batch == self.stop_after


MANY = np.tile(X, (50, 1)), np.tile(Y, (50, 1))  # 131 batches of 8 and one of 2


def test_executions_grow_while_nobody_looks_at_batches(mirrored, executions):
    net = made(sequential, mirrored)
    quiet = [
        keras.callbacks.EarlyStopping(monitor="loss"),
        keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: None),
    ]
    net.fit(*MANY, callbacks=quiet, **FIT)
    assert max(executions) > 4
    assert sum(executions) == iterations(net) == 132


def test_a_callback_that_looks_at_batches_gets_every_one(mirrored, executions):
    seen, net = Batches(), made(sequential, mirrored)
    net.fit(*MANY, callbacks=[seen], **FIT)
    assert set(executions) == {1}
    assert seen.seen == list(range(132))
    assert len({logs["loss"] for logs in seen.logs}) > 100


def test_one_that_looks_at_batches_of_a_validation_does_not_slow_down_training(mirrored, executions):
    batches = []
    look = keras.callbacks.LambdaCallback()
    look.on_test_batch_end = lambda batch, logs=None: batches.append(batch)
    made(sequential, mirrored).fit(*MANY, validation_data=(X, Y), validation_batch_size=4, callbacks=[look], **FIT)
    assert batches == list(range(6))
    assert max(executions) > 4


def test_a_number_of_steps_per_execution_is_kept(mirrored, executions):
    net = made(sequential, mirrored, steps_per_execution=50)
    net.fit(*MANY, callbacks=[Batches()], **FIT)
    assert executions == [50, 50, 32]


def test_stop_training_after_a_batch_stops_there(mirrored):
    net, expected = made(sequential, mirrored), stock()
    for each in (net, expected):
        history = each.fit(*MANY, epochs=5, callbacks=[Batches(stop_after=4)], **FIT).history
        assert len(history["loss"]) == 1
        assert iterations(each) == 5
    assert net.stop_training
    assert_same_state(net, expected)


def test_stop_training_acts_on_executions_of_many_steps(mirrored):
    net = made(sequential, mirrored, steps_per_execution=10)
    net.fit(*MANY, epochs=5, callbacks=[Batches(stop_after=19)], **FIT)
    assert iterations(net) == 20


def test_stop_training_at_the_end_of_an_epoch_stops_there_and_the_next_fit_goes_on(mirrored, executions):
    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = epoch == 1

    net = made(sequential, mirrored)
    assert len(net.fit(X, Y, epochs=5, callbacks=[Stop()], **FIT).history["loss"]) == 2
    assert iterations(net) == 6
    assert len(net.fit(X, Y, epochs=3, **FIT).history["loss"]) == 3
    assert iterations(net) == 15


@pytest.mark.rotating
def test_fit_twice_is_fit_for_as_many_epochs(mirrored):
    net, expected = made(sequential, mirrored), stock()
    net.fit(X, Y, **FIT)
    net.fit(X, Y, initial_epoch=1, epochs=3, **FIT)
    expected.fit(X, Y, epochs=3, **FIT)
    assert iterations(net) == 9
    assert_same_state(net, expected)


class LooksInside(keras.callbacks.Callback):
    """Evaluates and predicts in the middle of training."""

    def __init__(self, at):
        super().__init__()
        self.at, self.found = at, []

    def look(self, at):
        if at == self.at:
            loss = self.model.evaluate(X[:9], Y[:9], batch_size=4, verbose=0)
            self.found += [loss, self.model.predict(X[:9], batch_size=4, verbose=0)]

    def on_epoch_end(self, epoch, logs=None):
        self.look("epoch")


class LooksInsideAtBatches(LooksInside):
    def __init__(self, at):
        super().__init__(at)
        self.batches = []

    def on_train_batch_end(self, batch, logs=None):
        self.look("batch")
        self.batches.append(batch)


@pytest.mark.parametrize("at", rotating(["epoch", "batch"], []))
def test_evaluate_and_predict_inside_callbacks_are_those_of_one_device(mirrored, at):
    results = []
    for net in (made(sequential, mirrored), stock()):
        looks = LooksInside(at) if at == "epoch" else LooksInsideAtBatches(at)
        history = net.fit(
            X, Y, validation_data=(X[9:], Y[9:]), validation_batch_size=5, epochs=2, callbacks=[looks], **FIT
        ).history
        assert at == "epoch" or looks.batches == [0, 1, 2] * 2
        results.append([*looks.found, *history.values(), *net.get_weights()])
    assert len(results[0]) == (4 if at == "epoch" else 12) + 2 + 4
    assert_close(*results)


@pytest.mark.rotating
def test_a_validation_has_its_own_batch_size(mirrored):
    class Validated(keras.callbacks.Callback):
        batches = 0

        def on_test_batch_end(self, batch, logs=None):
            self.batches += 1

    validated = Validated()
    net, expected = made(sequential, mirrored, metrics=["mae"]), stock(metrics=["mae"])
    history, by_stock = (
        each.fit(X, Y, validation_data=(X, 2 * Y), validation_batch_size=2, callbacks=[validated], **FIT).history
        for each in (net, expected)
    )
    assert validated.batches == 11 + 11
    assert history.keys() == by_stock.keys()
    assert_close(history.values(), by_stock.values())


@pytest.mark.rotating
def test_evaluate_and_predict_before_fit(mirrored):
    net, expected = made(sequential, mirrored), stock()
    for _ in range(2):
        assert_close(*([each.evaluate(X, Y, batch_size=8, verbose=0)] for each in (net, expected)))
        assert_close(*(each.predict(X, batch_size=8, verbose=0) for each in (net, expected)))
        for each in (net, expected):
            each.fit(X, Y, **FIT)
    assert_same_state(net, expected)


@pytest.mark.rotating
def test_a_lazy_model_can_be_evaluated_and_predict_first(mirrored):
    for method in ("evaluate", "predict"):
        net = Net(4, strategy=mirrored)
        net.compile("adam", "mse")
        getattr(net, method)(X, **({"y": Y} if method == "evaluate" else {}), verbose=0)
        net.fit(X, Y, **FIT)
        assert lives_under(net, mirrored)


@pytest.mark.parametrize("number", [0, -2, 2.5, "many", None])
def test_a_number_of_steps_that_is_none_is_refused(number):
    with pytest.raises(ValueError, match=f"steps_per_execution must be an integer >= 1, or 'auto', got {number!r}"):
        sequential().compile("sgd", "mse", steps_per_execution=number)


@pytest.mark.slow
def test_compiling_again_changes_loss_optimizer_and_metrics(mirrored):
    net, expected = made(sequential, mirrored), stock()
    for each in (net, expected):
        each.fit(X, Y, **FIT)
        each.compile("sgd", "mae", metrics=["mse"])
    history, by_stock = (each.fit(X, Y, **FIT).history for each in (net, expected))
    assert list(history) == ["loss", "mse"]
    assert_close(history.values(), by_stock.values())
    assert_same_state(net, expected)


@pytest.mark.rotating
def test_freezing_a_layer_and_compiling_again_trains_the_rest(mirrored):
    net, expected = made(sequential, mirrored), stock()
    for each in (net, expected):
        each.fit(X, Y, **FIT)
        each.layers[0].trainable = False
        with each.distribute_strategy.scope():
            each.compile(momentum(), "mse")
        each.fit(X, Y, **FIT)
    assert len(net.trainable_variables) == 2
    assert_same_state(net, expected)


@pytest.mark.rotating
def test_a_learning_rate_assigned_between_fits_is_used(mirrored):
    net, expected = made(sequential, mirrored), stock()
    for each in (net, expected):
        each.fit(X, Y, **FIT)
        each.optimizer.learning_rate = 0.001
        each.fit(X, Y, **FIT)
    assert_same_state(net, expected)


# What a model leaves behind


@pytest.mark.parametrize("kind", rotating(["default", "mirrored2"], [], slow=["mirrored2"]))
def test_a_model_that_is_gone_has_taken_its_graphs_along(strategies, kind):
    def num_graphs():
        gc.collect()
        return sum(isinstance(thing, FuncGraph) for thing in gc.get_objects())

    def train():
        with strategies.get(kind).scope():
            model = kde.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])
            model.compile("adam", "mse")
        model.fit(np.ones((16, 4)), np.ones((16, 1)), batch_size=8, verbose=0, validation_split=0.5)
        keras.backend.clear_session()

    train()
    before = num_graphs()
    train()
    assert num_graphs() <= before


@pytest.mark.parametrize("persistent", rotating([False, True], [True]))
@pytest.mark.parametrize("kind", rotating(Strategies.KINDS, [], slow=["mirrored2"]))
def test_a_run_inside_of_a_tape_is_as_outside(kind, persistent, strategies):
    strategy = strategies.get(kind)
    x = np.random.default_rng(0).random((40, 3), dtype="float32")
    y = x.sum(axis=1, keepdims=True)

    class OwnStep(kde.Sequential):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
            weights = self.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            return {"loss": loss}

    def ran(tape):
        found = []
        for cls in (kde.Sequential, OwnStep):
            keras.utils.set_random_seed(1)
            with strategy.scope():
                model = cls([keras.Input((3,)), keras.layers.Dense(2), keras.layers.Dense(1)])
                model.compile("sgd", "mse")
            with tape:
                given = {"epochs": 2, "batch_size": 10, "validation_data": (x, y), "verbose": 0}
                found += model.fit(x, y, **given).history["loss"]
                found.append(model.evaluate(x, y, verbose=0))
                found += list(model.predict(x, verbose=0)[:2].ravel())
        return found

    assert ran(tf.GradientTape(persistent=persistent)) == ran(contextlib.nullcontext())
