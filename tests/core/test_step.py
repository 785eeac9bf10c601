"""What replicas compute by themselves, and what they agree on, whatever carries the sums between them."""

import threading
import warnings
from contextlib import nullcontext

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import rotating

import keras_dist_ext as kde
from keras_dist_ext import messages
from keras_dist_ext._keras.variables import components
from keras_dist_ext.errors import DataError
from keras_dist_ext.step import logs, reduce, reducers
from keras_dist_ext.step.reducers import TpuReducer
from keras_dist_ext.step.replica_step import ReplicaStep
from keras_dist_ext.training import xla_rule

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(21, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
WORDS = RANDOM.integers(0, 7, size=(21, 4))
FIT = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}


def hidden():
    return [keras.layers.Dense(4, activation="tanh")]


def dense(lib, strategy, layers=hidden, make=dict, **arguments):
    """Build and compile in scope: `layers` and `make` return what must be made there."""
    keras.utils.set_random_seed(3)
    with strategy.scope():
        net = lib.Sequential([keras.Input((3,)), *layers(), keras.layers.Dense(1)], name="net")
        net.compile(**{"optimizer": keras.optimizers.SGD(0.05), "loss": "mse", **make(), **arguments})
    return net


def replicas_agree_on(net):
    """Assert that no copy of a variable differs from the first, and that all are numbers."""
    for variable in net.variables:
        first, *others = (copy.numpy() for copy in components(variable))
        assert np.isfinite(first).all(), variable.path
        for other in others:
            np.testing.assert_array_equal(first, other, err_msg=variable.path)


def assert_close(one, other):
    for value, expected in zip(one, other, strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)


# Sums by TensorFlow's collectives


@pytest.fixture
def collective(monkeypatch, mirrored):
    """Two replicas that take each other for strangers, as GPUs and workers are: sums go through `batch_reduce_to`."""
    calls = []
    original = type(mirrored.extended).batch_reduce_to

    def batch_reduce_to(self, reduce_op, pairs, options=None):
        calls.append(len(pairs))
        return original(self, reduce_op, pairs, options)

    monkeypatch.setattr(type(mirrored.extended), "batch_reduce_to", batch_reduce_to)
    for module in (reduce, reducers, logs):
        monkeypatch.setattr(module, "shares_memory", lambda strategy: False)
    yield mirrored
    assert calls, "nothing was reduced by a collective"


def embedded(lib, strategy):
    keras.utils.set_random_seed(3)
    with strategy.scope():
        layers = [keras.layers.Embedding(7, 3), keras.layers.Flatten(), keras.layers.Dense(1)]
        net = lib.Sequential([keras.Input((4,), dtype="int32"), *layers])
        net.compile(keras.optimizers.SGD(0.1, clipnorm=0.2), "mse")
    return net


def optimized_by(make):
    return lambda lib, strategy: dense(lib, strategy, make=lambda: {"optimizer": make()})


def metrics():
    return {"metrics": ["mae", keras.metrics.R2Score()], "weighted_metrics": [keras.metrics.MeanSquaredError()]}


def normalized():
    return [keras.layers.Dense(4), keras.layers.BatchNormalization(synchronized=True)]


COLLECTIVE = {
    "metrics": lambda lib, strategy: dense(lib, strategy, make=metrics),
    "Adam": optimized_by(lambda: keras.optimizers.Adam(0.02, epsilon=1e-3)),
    "accumulation": optimized_by(lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=4)),
    "a loss scale": optimized_by(
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05), initial_scale=64)
    ),
    "sparse gradients": embedded,
    "batch normalization": lambda lib, strategy: dense(lib, strategy, normalized),
}


@pytest.mark.parametrize("case", rotating(COLLECTIVE, ["sparse gradients"]))
def test_sums_by_collectives_give_what_one_device_gives(collective, case):
    build = COLLECTIVE[case]
    x = WORDS if case == "sparse gradients" else X
    weights = np.linspace(0, 2, 21)
    nets = build(kde, collective), build(keras, tf.distribute.get_strategy())
    ours, stock = (net.fit(x, Y, sample_weight=weights, **FIT).history for net in nets)
    assert ours.keys() == stock.keys()
    assert_close(ours.values(), stock.values())
    assert_close(nets[0].get_weights(), nets[1].get_weights())
    ours, stock = (net.evaluate(x, Y, batch_size=8, verbose=0, return_dict=True) for net in nets)
    assert ours.keys() == stock.keys()
    assert_close(ours.values(), stock.values())
    ours, stock = (net.predict(x, verbose=0) for net in nets)
    assert_close(ours, stock)
    replicas_agree_on(nets[0])


# Warnings


def test_a_warning_that_no_code_of_the_users_has_led_to_is_given_all_the_same():
    def warn():
        thread = threading.Thread(target=messages.warn, args=("from a thread of ours",))
        thread.start()
        thread.join()

    with pytest.warns(UserWarning, match="^from a thread of ours$") as caught:
        warn()
    assert caught[0].filename == threading.__file__


# XLA


@pytest.fixture
def nothing_warned(monkeypatch):
    monkeypatch.setattr(messages, "_warned", set())


def warnings_of(run):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(w.message) for w in caught if "jit_compile" in str(w.message)]


@pytest.mark.usefixtures("nothing_warned")
@pytest.mark.slow
def test_jit_compile_of_cpus_in_one_process_warns_once_and_trains_on(mirrored):
    def run():
        for _ in range(2):
            net = dense(kde, mirrored, jit_compile=True)
            net.fit(X, Y, **FIT)
            net.evaluate(X, Y, verbose=0)
            net.predict(X, verbose=0)
        expected = dense(keras, tf.distribute.get_strategy())
        expected.fit(X, Y, **FIT)
        assert_close(net.get_weights(), expected.get_weights())

    assert warnings_of(run) == [
        "jit_compile=True: XLA cannot compile for 2 replicas that are CPUs of one process; the step runs without XLA."
    ]


class OwnTrainStep(kde.Sequential):
    def train_step(self, data):
        return super().train_step(data)


@pytest.mark.usefixtures("nothing_warned")
def test_jit_compile_of_a_train_step_of_the_users_own_warns_and_trains_on(mirrored, monkeypatch):
    monkeypatch.setattr(xla_rule, "can_compile", lambda strategy: True)  # as for GPUs

    def run():
        with mirrored.scope():
            net = OwnTrainStep([keras.Input((3,)), keras.layers.Dense(1)], name="net")
            net.compile("sgd", "mse", jit_compile=True)
        before = net.get_weights()
        net.fit(X, Y, **FIT)
        assert np.abs(net.get_weights()[0] - before[0]).max() > 1e-3

    assert warnings_of(run) == [
        "jit_compile=True: 'net' has its own train_step, and XLA cannot compile the reductions over 2 replicas in "
        "it; the step runs without XLA."
    ]


def test_jit_compile_of_a_loss_that_sums_over_replicas_warns_and_trains_on(mirrored, monkeypatch):
    monkeypatch.setattr(xla_rule, "can_compile", lambda strategy: True)  # as for GPUs
    mean = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    weights = np.linspace(0, 2, 21)
    nets = []

    def run():
        nets.append(dense(kde, mirrored, loss=mean, jit_compile=True))
        nets[0].fit(X, Y, sample_weight=weights, **FIT)

    assert warnings_of(run) == [
        "jit_compile=True: 'net' has a loss with a mask or sample weights, or a layer, that sums over replicas while "
        "it is computed, which XLA cannot compile; the step runs without XLA."
    ]
    expected = dense(keras, tf.distribute.get_strategy(), loss=mean)
    expected.fit(X, Y, sample_weight=weights, **FIT)
    assert_close(nets[0].get_weights(), expected.get_weights())


@pytest.mark.parametrize("kind", rotating(["default", "one_device"], []))
def test_jit_compile_of_one_replica_is_done_without_a_warning(strategies, kind):
    nets = []

    def run():
        nets.append(dense(kde, strategies.get(kind), jit_compile=True, metrics=["mae"]))
        nets[0].fit(X, Y, **FIT)

    assert warnings_of(run) == []
    expected = dense(keras, tf.distribute.get_strategy(), metrics=["mae"])
    expected.fit(X, Y, **FIT)
    assert_close(nets[0].get_weights(), expected.get_weights())


# Replicas without rows


class Ratio(keras.layers.Layer):
    """Divides by a mean over rows, which is not a number where there are none."""

    def call(self, x):
        return x / (1 + keras.ops.mean(keras.ops.abs(x)))


LAYERS = {
    "BatchNormalization": lambda: [keras.layers.BatchNormalization()],
    "synchronized BatchNormalization": lambda: [keras.layers.BatchNormalization(synchronized=True)],
    "BatchNormalization and Dropout": lambda: [keras.layers.BatchNormalization(), keras.layers.Dropout(0.3, seed=1)],
    "LayerNormalization": lambda: [keras.layers.LayerNormalization()],
    "a ratio of means": lambda: [Ratio()],
    "an activity regularizer": lambda: [keras.layers.Dense(3, activity_regularizer="l2")],
}


EAGERLY = ["BatchNormalization", "a ratio of means"]


@pytest.mark.checks_fit
@pytest.mark.parametrize(
    ("case", "run_eagerly"),
    rotating(
        [*((case, False) for case in LAYERS), *((case, True) for case in EAGERLY)],
        [],
        slow=[("BatchNormalization and Dropout", False)],
    ),
)
def test_replicas_without_rows_leave_numbers_and_agree(strategies, case, run_eagerly):
    net = dense(
        kde,
        strategies.get("mirrored3"),
        layers=LAYERS[case],
        make=lambda: {
            "optimizer": keras.optimizers.Adam(0.01, global_clipnorm=1.0),
            "metrics": ["mae", keras.metrics.RootMeanSquaredError()],
        },
        run_eagerly=run_eagerly,
    )
    batches = tf.data.Dataset.from_tensor_slices((X[:5], Y[:5])).batch(2)  # 2, 2 and 1 rows for 3 replicas
    differs = case == "a ratio of means"
    with pytest.warns(UserWarning, match="not train on 3 replicas as on one device") if differs else nullcontext():
        history = net.fit(batches, epochs=2, shuffle=False, verbose=0).history
    assert np.isfinite(list(history.values())).all()
    assert np.isfinite(net.evaluate(batches, verbose=0)).all()
    prediction = net.predict(batches, verbose=0)
    assert prediction.shape == (5, 1)
    assert np.isfinite(prediction).all()
    replicas_agree_on(net)
    assert all(np.isfinite(v.numpy()).all() for v in net.optimizer.variables)


def two_outputs(lib, strategy):
    keras.utils.set_random_seed(3)
    with strategy.scope():
        inputs = keras.Input((3,))
        net = lib.Model(inputs, [keras.layers.Dense(1, kernel_regularizer="l2")(inputs) for _ in range(2)])
        net.compile(keras.optimizers.SGD(0.1), ["mse", "mae"])
    return net


class Counted(keras.layers.Layer):
    """Counts steps and rows, and remembers whether it has met any."""

    def build(self, input_shape):
        weights = {"steps": "int64", "rows": "int32", "has_met_rows": "bool"}
        for name, dtype in weights.items():
            setattr(self, name, self.add_weight(shape=(), dtype=dtype, initializer="zeros", trainable=False, name=name))

    def call(self, x, training=False):
        if training:
            rows = keras.ops.shape(x)[0]
            self.steps.assign_add(1)
            self.rows.assign_add(rows)
            self.has_met_rows.assign(keras.ops.logical_or(self.has_met_rows, rows > 0))
        return x


@pytest.mark.parametrize("run_eagerly", rotating([False, True], [True]))
def test_replicas_agree_on_integers_and_bools_that_a_layer_assigns(strategies, run_eagerly):
    net = dense(kde, strategies.get("mirrored3"), layers=lambda: [Counted()], run_eagerly=run_eagerly, check=False)
    batches = tf.data.Dataset.from_tensor_slices((X[:7], Y[:7])).batch(2)  # 2, 2, 2 and 1 rows for 3 replicas
    net.fit(batches, epochs=2, verbose=0)
    replicas_agree_on(net)
    steps, rows, has_met_rows = (v.numpy() for v in net.layers[0].variables)
    assert (steps, has_met_rows) == (8, True)
    assert rows == 8  # of replicas that have any, each has one


def test_a_layer_that_keeps_a_state_for_each_row_is_refused(mirrored):
    with mirrored.scope():
        net = kde.Sequential([keras.Input(batch_shape=(4, 2, 3)), keras.layers.LSTM(3, stateful=True)])
        net.compile("sgd", "mse")
    x = np.ones((4, 2, 3), "float32")
    for call in (net.fit, net.predict, net.train_on_batch):
        with pytest.raises(DataError, match="'lstm.*' is stateful: .*each of the 2 replicas has only some of the rows"):
            call(x, *([np.ones((4, 3), "float32")] if call != net.predict else []))


def test_shares_are_as_exact_as_the_model(strategies):
    """A third of a batch as a float32 would leave 1e-9 of a float64."""
    floatx, policy = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        nets = [
            dense(lib, strategy, loss=keras.losses.MeanSquaredError("mean_with_sample_weight"))
            for lib, strategy in ((kde, strategies.get("mirrored3")), (keras, tf.distribute.get_strategy()))
        ]
        batches = tf.data.Dataset.from_tensor_slices((X, Y, np.linspace(0, 2, 21))).batch(8)
        ours, stock = (net.fit(batches, epochs=3, verbose=0).history["loss"] for net in nets)
    finally:
        keras.config.set_floatx(floatx)
        keras.config.set_dtype_policy(policy)
    np.testing.assert_allclose(ours, stock, rtol=1e-13)
    for one, other in zip(nets[0].get_weights(), nets[1].get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)


@pytest.mark.rotating
def test_losses_and_regularizers_of_a_single_row_are_those_of_one_device(mirrored):
    ours, stock = two_outputs(kde, mirrored), two_outputs(keras, tf.distribute.get_strategy())
    for net in (ours, stock):
        net.train_on_batch(X[:1], [Y[:1], Y[:1]])  # a static number of rows: Keras does not reduce losses of none
    assert_close(ours.get_weights(), stock.get_weights())
    assert_close(*(net.test_on_batch(X[:1], [Y[:1], Y[:1]]) for net in (ours, stock)))


@pytest.mark.parametrize("run_eagerly", rotating([False, True], [False]))
def test_additional_losses_are_each_replicas_own_where_another_loss_sums_over_replicas(mirrored, run_eagerly):
    """While a loss by sample weights waits for the other replicas' sums, their layers make losses of their own."""

    def build(lib, strategy):
        return dense(
            lib,
            strategy,
            lambda: [keras.layers.Dense(3, activity_regularizer=keras.regularizers.L2(0.1))],
            loss=keras.losses.MeanSquaredError("mean_with_sample_weight"),
            run_eagerly=run_eagerly,
        )

    weights = np.linspace(0, 2, 21)
    nets = build(kde, mirrored), build(keras, tf.distribute.get_strategy())
    ours, stock = (net.fit(X, Y, sample_weight=weights, **FIT).history for net in nets)
    assert_close(ours.values(), stock.values())
    assert_close(nets[0].get_weights(), nets[1].get_weights())


def test_add_loss_in_eager_steps_loses_no_batch(mirrored):
    regularized = {"layers": lambda: [keras.layers.Dense(3, activity_regularizer="l2")], "run_eagerly": True}
    ours, stock = dense(kde, mirrored, **regularized), dense(keras, tf.distribute.get_strategy(), **regularized)
    for net in (ours, stock):
        net.fit(X[:20], Y[:20], batch_size=10, shuffle=False, verbose=0)
    assert int(ours.optimizer.iterations.numpy()) == 2
    assert_close(ours.get_weights(), stock.get_weights())


# Random numbers


@pytest.mark.parametrize("seed", [0, 1, 1337, 2**31 - 3])
def test_each_of_1024_replicas_draws_from_a_stream_of_its_own(monkeypatch, seed):
    replica_step = ReplicaStep(None, 1, 1024, reducer=TpuReducer(1024))
    given, drawn = tf.constant([seed, 5], tf.int64), []
    for replica in range(1024):
        monkeypatch.setattr("keras_dist_ext.step.reducers.replica_id", lambda replica=replica: replica)
        state = replica_step.next_seed(None, True, lambda ordered: given)
        drawn.append(tuple((state % (2**31 - 2)).numpy().tolist()))
    assert drawn[0] == (seed, 5)  # the first draws what one device draws
    assert len({first for first, _ in drawn}) == 1024
    assert len({counter for _, counter in drawn}) == 1024


class Draws(keras.layers.Layer):
    """Gives every row the three numbers that its replica draws, and remembers them in training."""

    def __init__(self, has_generator, **kwargs):
        super().__init__(**kwargs)
        self.generator = keras.random.SeedGenerator(11) if has_generator else None
        self.drawn = tf.Variable([0, 0, 0], trainable=False)  # unlike a weight of Keras, each replica's own

    def call(self, x):
        numbers = keras.random.uniform((3,), seed=self.generator)
        self.drawn.assign(keras.ops.cast(numbers * 1e6, "int32"))
        return keras.ops.zeros_like(x) + numbers


def draws(lib, strategy, has_generator):
    keras.utils.clear_session()  # before Keras 3.13, set_random_seed leaves the generator behind seed=None as it is
    keras.utils.set_random_seed(5)
    with strategy.scope():
        net = lib.Sequential([keras.Input((3,)), Draws(has_generator), keras.layers.Dense(1)])
        net.compile("sgd", "mse")
    return net


@pytest.mark.parametrize("has_generator", rotating([True, False], [False]), ids=["a SeedGenerator", "seed=None"])
@pytest.mark.parametrize("kind", rotating(["mirrored2", "mirrored4"], ["mirrored4"]))
def test_replicas_draw_different_numbers_and_the_first_those_of_one_device(strategies, kind, has_generator):
    strategy, drawn = strategies.get(kind), []
    for lib, its_strategy in ((kde, strategy), (keras, tf.distribute.get_strategy())):
        net = draws(lib, its_strategy, has_generator)
        steps = []
        for _ in range(3):
            net.train_on_batch(X[:8], Y[:8])
            steps.append([tuple(copy.numpy().tolist()) for copy in components(net.layers[0].drawn)])
        drawn.append(steps)
    ours, stock = drawn
    for replicas in ours:
        assert len(set(replicas)) == strategy.num_replicas_in_sync
    assert [replicas[0] for replicas in ours] == [alone for (alone,) in stock]
    assert len({numbers for replicas in ours for numbers in replicas}) == 3 * strategy.num_replicas_in_sync


@pytest.mark.parametrize("has_generator", rotating([True, False], [False]), ids=["a SeedGenerator", "seed=None"])
@pytest.mark.rotating
def test_the_numbers_of_a_replica_do_not_depend_on_how_many_there_are(strategies, has_generator):
    drawn = {}
    for kind in ("mirrored2", "mirrored4"):
        net = draws(kde, strategies.get(kind), has_generator)
        net.train_on_batch(X[:8], Y[:8])
        drawn[kind] = [tuple(copy.numpy().tolist()) for copy in components(net.layers[0].drawn)]
    assert drawn["mirrored4"][:2] == drawn["mirrored2"]


@pytest.mark.parametrize("has_generator", rotating([True, False], [True]), ids=["a SeedGenerator", "seed=None"])
@pytest.mark.rotating
def test_the_same_run_draws_the_same_numbers_again(mirrored, has_generator):
    drawn = []
    for _ in range(2):
        net = draws(kde, mirrored, has_generator)
        net.fit(X, Y, **FIT)
        drawn.append([copy.numpy().tolist() for copy in components(net.layers[0].drawn)])
    assert drawn[0] == drawn[1]


def test_replicas_draw_different_numbers_in_predict(mirrored):
    with mirrored.scope():
        net = kde.Sequential([keras.Input((3,)), Draws(True)])
    rows = net.predict(X[:8], verbose=0)
    assert len({tuple(row) for row in rows[:4]}) == 1
    assert len({tuple(row) for row in rows}) == 2
