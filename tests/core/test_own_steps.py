"""Models with steps of their own need no `call`, no form of a batch, and no variables before their first step."""

import functools
import re

import keras
import numpy as np
import own_steps
import pytest
import tensorflow as tf
from cases import rotating
from own_steps import PROGRAMS, Base, X, Y, batches, descend
from strategies import strategies
from two_workers import on_two_workers

import keras_dist_ext as kde
from keras_dist_ext._keras.tracing import scratch_graph
from keras_dist_ext.errors import LoopError
from keras_dist_ext.training import building, step_planning

ADOPTED = ("no call", "a gan of parts made in the step")
QUICK = (
    "a gan of parts made in the step",
    "a step that is a function with a branch",
)


@functools.cache
def on_one_device(name, size=8):
    return own_steps.run(name, Base(size=size))


@pytest.mark.parametrize("name", rotating(PROGRAMS, QUICK, slow=["results of before an update"]))
def test_it_gives_on_two_replicas_what_stock_keras_gives_on_one_device(name):
    own_steps.compare(on_one_device(name), own_steps.run(name, Base(kde, strategies.get("mirrored2"))))


@pytest.mark.parametrize("kind", ["default", "one_device", "mirrored3", "mirrored4"])
@pytest.mark.parametrize("name", rotating(PROGRAMS, ()))
def test_it_gives_on_any_number_of_replicas_what_stock_keras_gives_on_one_device(name, kind):
    strategy = None if kind == "default" else strategies.get(kind)
    own_steps.compare(on_one_device(name), own_steps.run(name, Base(kde, strategy)))


@pytest.mark.parametrize("kind", ["mirrored2", "mirrored4"])
@pytest.mark.parametrize("name", rotating(PROGRAMS, ()))
def test_so_it_does_where_the_last_batch_is_a_single_example(name, kind):
    own_steps.compare(on_one_device(name, 7), own_steps.run(name, Base(kde, strategies.get(kind), 7)))


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(name, size, marks=[on_two_workers(own_steps.on_workers, name, size), pytest.mark.rotating])
        for name in PROGRAMS
        for size in (8, 7)
    ],
)
def test_so_it_does_on_two_workers(name, size, values):
    for found in values:
        own_steps.compare(on_one_device(name, size), found)


@pytest.mark.slow
def test_under_no_strategy_python_calls_a_model_no_more_often_than_in_stock_keras():
    def calls(lib):
        class Net(lib.Model):
            def __init__(self):
                super().__init__()
                self.dense, self.calls = keras.layers.Dense(1), []

            def call(self, x):
                self.calls.append(x.shape)
                return self.dense(x)

        net = Net()
        net.compile("sgd", "mse")
        counts = []
        for run in (net.fit, net.evaluate, net.train_on_batch):
            run(X, Y, **({} if run == net.train_on_batch else {"verbose": 0}))
            counts.append(len(net.calls))
        return counts

    found, stock = calls(kde), calls(keras)
    assert all(ours <= theirs for ours, theirs in zip(found, stock, strict=True)), (found, stock)


@pytest.fixture
def plans(monkeypatch):
    """A name for each trace in a scratch graph by which a step's plan is made."""
    found = []

    def noted(name):
        found.append(name)
        return scratch_graph(name)

    monkeypatch.setattr(step_planning, "scratch_graph", noted)
    return found


class Penalty(keras.layers.Layer):
    def call(self, x):
        self.add_loss(tf.reduce_sum(tf.square(x)))
        return x


def own_step(strategy, *, adds_loss=False, uses_results=False, in_function=False):
    """A model whose step descends by itself, and what else is asked for."""

    class Net(kde.Model):
        def __init__(self):
            super().__init__()
            self.parts = [keras.layers.Dense(3), *([Penalty()] if adds_loss else []), keras.layers.Dense(1)]
            self.update = tf.function(self.descend) if in_function else self.descend

        def call(self, x):
            for part in self.parts:
                x = part(x)
            return x

        def descend(self, x, y):
            with tf.GradientTape() as tape:
                y_pred = self(x)
                loss = self.compute_loss(x, y, y_pred)
            variables = self.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            return y_pred

        def train_step(self, data):
            x, y = data[:2]
            logs = self.compute_metrics(x, y, self.update(x, y))
            return {**logs, "twice": 2 * logs["mae"]} if uses_results else logs

    with strategy.scope():
        net = Net()
        net.compile("adam", "mse", metrics=["mae"])
    return net


@pytest.mark.parametrize(
    ("asked", "num_traces"),
    [({"adds_loss": True}, 1), ({"uses_results": True}, 2), ({"in_function": True}, 2)],
    ids=["a loss that a layer adds", "results of metrics", "a tf.function"],
)
def test_a_plan_takes_a_second_trace_only_where_the_first_was_of_another_step(asked, num_traces, plans):
    net = own_step(strategies.get("mirrored2"), **asked)
    net.train_on_batch(X, Y)
    assert plans == ["plan_of_a_step"] * num_traces


def test_a_plan_builds_the_optimizer_that_its_step_is_the_first_to_use(plans, monkeypatch):
    expected = own_step(strategies.get("mirrored2"))
    expected.train_on_batch(X, Y)
    monkeypatch.setattr(building, "_built_by_step", lambda *_: False)
    net = own_step(strategies.get("mirrored2"))
    plans.clear()
    net.train_on_batch(X, Y)
    assert plans == ["plan_of_a_step"]
    made, others = ([(re.sub(r"_\d+", "", v.path), v.shape) for v in m.optimizer.variables] for m in (net, expected))
    assert made == others


def test_a_step_of_ones_own_is_traced_aside_once_for_all_runs_on_such_batches(monkeypatch):
    class Net(kde.Sequential):
        def train_step(self, batch):
            return super().train_step(batch)

    aside = []
    built = building._built_by_step
    monkeypatch.setattr(building, "_built_by_step", lambda *given: aside.append(given[1]) or built(*given))
    with strategies.get("mirrored2").scope():
        net = Net([keras.layers.Dense(1)])
        net.compile("sgd", "mse")
    for _ in range(2):
        net.fit(X[:16], Y[:16], batch_size=8, validation_data=(X[:4], Y[:4]), verbose=0)
    assert aside == ["train"]


def asks_for_a_value(model, loss):
    model.last = loss.numpy()


def asks_python(model, loss):
    if loss > 1:
        model.above.assign_add(1.0)


def runs_on_replicas(model, loss):
    model.distribute_strategy.run(tf.identity, args=(loss,))


def writes_rows(model, loss):
    model.buffer.scatter_nd_update([[0]], [loss])


@pytest.mark.parametrize(
    ("mistake", "message"),
    rotating(
        [
            (
                asks_for_a_value,
                r"asks for the value of a tensor, by \.numpy\(\), .*to see, among the logs, and look",
            ),
            (asks_python, r"asks Python for the value of a tensor, by an if.* Use tf\.where, tf\.cond"),
            (
                runs_on_replicas,
                r"calls a method of the strategy.*and metrics add up over replicas by themselves",
            ),
            (
                writes_rows,
                r"calls scatter_nd_update of a variable.*`rows = kde\.gather_rows\(rows\)`, then `variable",
            ),
        ],
        [],
    ),
)
@pytest.mark.parametrize("run", ["fit", "train_on_batch"])
def test_a_step_that_cannot_be_compiled_for_replicas_says_why_and_what_to_do(run, mistake, message):
    class Net(kde.Sequential):
        def train_step(self, batch):
            x, y = batch[:2]
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x) - y) ** 2)
            descend(tape, loss, self.trainable_variables, self.optimizer)
            mistake(self, loss)
            return {"error": loss}

    with strategies.get("mirrored2").scope():
        net = Net([keras.Input((6,)), keras.layers.Dense(1)], name="net")
        net.compile("sgd")
        net.buffer = tf.Variable(tf.zeros([8]), trainable=False)
    given = {"verbose": 0} if run == "fit" else {}
    with pytest.raises(LoopError, match=f"The step 'net.train_step' {message}"):
        getattr(net, run)(X, Y, **given)


@pytest.mark.rotating
def test_a_step_that_runs_eagerly_and_decides_by_its_own_loss_says_so():
    class Net(kde.Sequential):
        def train_step(self, batch):
            x, y = batch
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x) - y) ** 2)
            if float(loss) >= 0:  # not of a replica that has no examples
                descend(tape, loss, self.trainable_variables, self.optimizer)
            return {"error": loss}

    with strategies.get("mirrored2").scope():
        net = Net([keras.Input((6,)), keras.layers.Dense(1)], name="net")
        net.compile("sgd", run_eagerly=True, check=False)
    expected = r"The step 'net.train_step', which runs eagerly, asks Python for .* loss = kde\.reduce_gradients\(loss\)"
    with pytest.raises(LoopError, match=expected):
        net.fit(X[:9], Y[:9], batch_size=8, verbose=0)


def test_a_variable_made_of_the_batch_names_itself_and_the_fix():
    class Net(kde.Model):
        def train_step(self, x):
            if not hasattr(self, "first_row"):
                self.first_row = keras.Variable(x[0], name="first_row")
            return {"error": tf.reduce_mean(x - self.first_row)}

    with strategies.get("mirrored2").scope():
        net = Net()
        net.compile()
    with pytest.raises(kde.ScopeError, match="makes the variable 'first_row' when it first runs, of a value that it"):
        net.fit(batches(X), verbose=0)


def test_constants_of_layers_that_the_step_makes_are_there_for_all_its_graphs():
    """Stock Keras makes them in the graph that it traces first, and fails in the next one."""

    class Net(kde.Model):
        norm = None

        def train_step(self, batch):
            x, text = batch
            if self.norm is None:
                self.norm = keras.layers.Normalization(axis=None, mean=1.0, variance=4.0)
                self.words = keras.layers.TextVectorization(vocabulary=["a", "b"], output_mode="count")
            count = tf.cast(self.words(text), tf.float32)
            return {"mean": tf.reduce_mean(self.norm(x)), "a": tf.reduce_mean(count[:, 1])}

    with strategies.get("mirrored2").scope():
        net = Net()
        net.compile()
    seen = net.fit(batches(X[:8], own_steps.TEXT[:8]), verbose=0).history
    np.testing.assert_allclose(seen["mean"], np.mean((X[:8] - 1) / 2), rtol=1e-5)
    np.testing.assert_allclose(seen["a"], np.mean([text.split().count("a") for text in own_steps.TEXT[:8]]), rtol=1e-5)


def test_initial_values_and_what_is_drawn_are_those_of_one_device_where_parts_are_made_in_the_step():
    def values(base):
        class Net(base.Model):
            def train_step(self, x):
                if not hasattr(self, "hidden"):
                    self.hidden = keras.layers.Dense(3, kernel_initializer=keras.initializers.HeNormal())
                    self.drop = keras.layers.Dropout(0.5, seed=4)
                return {"error": tf.reduce_sum(self.drop(self.hidden(x), training=True))}

        keras.utils.set_random_seed(11)
        with base.scope():
            net = Net()
            net.compile()
        net.fit(batches(X[:8]), verbose=0)
        return [net.hidden.kernel.numpy(), net.drop.seed_generator.state.numpy()]

    for one, other in zip(values(Base()), values(Base(kde, strategies.get("mirrored2"))), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", rotating(ADOPTED, ("no call",)))
def test_adopt_takes_over_what_only_a_step_has_built(name, monkeypatch):
    class Kept(keras.Model):
        def fit(self, *args, **kwargs):
            kept.append(self)
            return super().fit(*args, **kwargs)

    class Stock(Base):
        def __init__(self):
            super().__init__()
            self.Model = Kept

    kept = []
    own_steps.run(name, Stock())
    stock = kept[-1]
    ours = kde.adopt(stock, strategies.get("mirrored2"), compile=name != "a gan of parts made in the step")
    assert [w.path.partition("/")[2] for w in ours.weights] == [w.path.partition("/")[2] for w in stock.weights]
    for one, other in zip(ours.weights, stock.weights, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())
    if ours.compiled:
        losses = [model.fit(batches(X), verbose=0).history["error"] for model in (ours, stock)]
        np.testing.assert_allclose(*losses, rtol=1e-5)
        own_steps.compare(own_steps.outcome(stock), own_steps.outcome(ours))


def test_a_step_writes_summaries_and_calls_functions_whose_argument_is_named_step(tmp_path):
    written = tf.summary.create_file_writer(str(tmp_path))

    @tf.function
    def scaled(value, step, original):
        return value * tf.cast(step, tf.float32) + original

    class Net(kde.Sequential):
        def train_step(self, data):
            logs = super().train_step(data)
            with written.as_default(step=self.optimizer.iterations):
                tf.summary.scalar("loss", logs["loss"])
                tf.summary.image("batch", tf.reshape(data[0], [1, -1, 1, 1]))
            return {**logs, "one": scaled(tf.zeros([]), step=tf.shape(data[0])[0], original=1.0)}

    with strategies.get("mirrored2").scope():
        net = Net([keras.layers.Dense(1)])
        net.compile("sgd", "mse", check=False)
    history = net.fit(X, Y, epochs=2, verbose=0).history
    assert history["one"] == [1.0, 1.0]
    written.close()
    (file,) = tmp_path.iterdir()
    steps = [
        (event.step, value.tag)
        for event in tf.compat.v1.train.summary_iterator(str(file))
        for value in event.summary.value
    ]
    assert len(set(steps)) > 2
    assert {tag for _, tag in steps} == {"loss", "batch"}


class OfOwn:
    """A model of two layers that are built when its own step first calls them."""

    def __init__(self):
        super().__init__()
        self.parts = [keras.layers.Dense(3, "tanh", kernel_initializer="ones"), keras.layers.Dense(1)]
        self.parts[1].kernel_initializer = keras.initializers.Constant(0.5)
        self.num_traces = 0

    def call(self, x):
        return self.parts[1](self.parts[0](x))

    def train_step(self, data):
        self.num_traces += 1
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        self.metrics[0].update_state(loss)
        return self.logs(loss)

    def logs(self, loss):
        return {"loss": self.metrics[0].result()}


def logs_losses(model, loss):
    return {"loss": loss, "twice": 2 * loss}


def makes_a_variable(model, loss):
    if not hasattr(model, "total"):
        model.total = tf.Variable(1.0, trainable=False)
    model.total.assign_add(loss)
    return {"loss": model.metrics[0].result(), "total": model.total.read_value()}


def computes_with_results(model, loss):
    return {"loss": 2 * model.metrics[0].result()}


@pytest.mark.parametrize(
    ("logs", "is_built", "num_traces"),
    [
        (OfOwn.logs, False, 1),
        pytest.param(OfOwn.logs, True, 1, marks=pytest.mark.slow),
        (logs_losses, False, 2),
        pytest.param(computes_with_results, False, 3, marks=pytest.mark.slow),
        pytest.param(makes_a_variable, False, 3, marks=pytest.mark.slow),
    ],
)
def test_on_one_device_a_step_is_traced_again_only_where_its_logs_hold_more_than_results(logs, is_built, num_traces):
    def fit(base):
        model = type("Net", (OfOwn, base), {"logs": logs})()
        if is_built:
            model.build((None, X.shape[1]))
        model.compile(keras.optimizers.Adam(0.05), "mse")
        history = [model.fit(X[:14], Y[:14], batch_size=4, shuffle=False, verbose=0).history for _ in range(2)]
        return history, model

    expected, stock = fit(keras.Model)
    found, model = fit(kde.Model)
    assert model.num_traces == num_traces
    for one, other in zip(found, expected, strict=True):
        own_steps.compare(other, one)
    for one, other in zip(model.get_weights(), stock.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)


@pytest.mark.slow
def test_the_result_of_a_metric_in_a_branch_is_that_of_all_replicas():
    class Net(kde.Sequential):
        def train_step(self, data):
            logs = super().train_step(data)
            (mean,) = [metric for metric in self.metrics if metric.name == "loss"]
            is_late = self.optimizer.iterations > 1
            return {**logs, "so far": tf.cond(is_late, lambda: 2.0 * mean.result(), lambda: tf.constant(0.0))}

    def trained(strategy):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = Net([keras.Input((X.shape[1],)), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.1), "mse")
        data = tf.data.Dataset.from_tensor_slices((X[:22], X[:22].sum(axis=1, keepdims=True))).batch(9)
        history = model.fit(data, epochs=2, verbose=0).history
        assert history["so far"][0] == pytest.approx(2.0 * history["loss"][0])
        return [*history["so far"], *history["loss"]]

    np.testing.assert_allclose(trained(strategies.get("mirrored2")), trained(tf.distribute.get_strategy()), rtol=1e-5)
