"""A run for V virtual replicas gives the same numbers on any number of real ones."""

import collections
import functools
import pickle
import threading
import warnings
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import rotating
from strategies import strategies
from two_workers import on_two_workers
from virtual_runs import (
    CASES,
    FIT,
    OF_WORKERS,
    Case,
    X,
    Y,
    randomized,
    rows_of_worker,
    run_on_both,
    state_of,
    train_on_rows_of_their_own,
)

import keras_dist_ext as kde
from keras_dist_ext import messages
from keras_dist_ext._keras.hooks import current_step
from keras_dist_ext.step import logs, reduce
from keras_dist_ext.step import virtual_replicas as turns

ORDERED, FAST = kde.VirtualReplicas(4), kde.VirtualReplicas(4, reduction="fast")
KINDS = {1: "default", 2: "mirrored2", 3: "mirrored3", 4: "mirrored4"}


@functools.cache
def run(name, num_replicas, virtual):
    """What a case has come to, and its logs: each run is made once for all tests."""
    return CASES[name].run(strategies.get(KINDS[num_replicas]), virtual)


def assert_same_bits(one, other):
    differing = [name for name in one if one[name].tobytes() != other[name].tobytes()]
    assert one.keys() == other.keys()
    assert not differing


def assert_close(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_allclose(value, other[name], rtol=1e-4, atol=1e-5, err_msg=name)


# The same run


@pytest.mark.parametrize("name", rotating(CASES, ["a mask"], slow=["logs computed from results"]))
def test_ordered_sums_give_the_same_bits_on_one_and_two_replicas(name):
    assert_same_bits(run(name, 1, ORDERED)[0], run(name, 2, ORDERED)[0])


@pytest.mark.parametrize("name", rotating(CASES, []))
def test_four_virtual_replicas_on_one_train_as_four_real_ones(name):
    (on_one, logs_on_one), (plain, plain_logs) = run(name, 1, ORDERED), run(name, 4, None)
    assert_close(on_one, plain)
    assert_close(logs_on_one, plain_logs)


@pytest.mark.parametrize("name", rotating(CASES, [], slow=["a mask", "batch normalization and dropout"]))
def test_ordered_sums_give_the_same_bits_on_four_replicas(name):
    assert_same_bits(run(name, 1, ORDERED)[0], run(name, 4, ORDERED)[0])


@pytest.mark.parametrize("name", rotating(CASES, [], slow=["a mask"]))
def test_fast_sums_give_the_same_numbers_to_rounding(name):
    for num_replicas in (1, 2):
        fast, logs = run(name, num_replicas, FAST)
        assert_close(fast, run(name, 1, ORDERED)[0])
        assert_close(logs, run(name, 1, ORDERED)[1])


@pytest.mark.rotating
def test_six_virtual_replicas_are_the_same_on_one_two_and_three():
    six = kde.VirtualReplicas(6)  # whose tree is not full: two replicas have three leaves each
    name = "accumulation of gradients"
    on_one = run(name, 1, six)[0]
    assert_same_bits(on_one, run(name, 2, six)[0])
    assert_same_bits(on_one, run(name, 3, six)[0])


@pytest.mark.slow
def test_batches_that_tensorflow_has_distributed_are_dealt_on(mirrored):
    batches = tf.data.Dataset.from_tensor_slices((X[:16], Y[:16])).batch(8, drop_remainder=True)
    nets = [Case(randomized).build(strategy, ORDERED) for strategy in (mirrored, strategies.get("default"))]
    nets[0].fit(mirrored.experimental_distribute_dataset(batches), verbose=0)
    nets[1].fit(batches, verbose=0)
    assert_same_bits(state_of(nets[0]), state_of(nets[1]))


@pytest.mark.parametrize(
    "name", rotating(["accumulation of gradients", "sparse gradients"], [], slow=["accumulation of gradients"])
)
def test_collectives_give_the_bits_that_memory_gives(name, monkeypatch):
    for module in (reduce, logs):
        monkeypatch.setattr(module, "shares_memory", lambda strategy: False)
    gathers = []
    original = tf.distribute.ReplicaContext.all_gather
    monkeypatch.setattr(
        tf.distribute.ReplicaContext,
        "all_gather",
        lambda self, value, axis: gathers.append(value) or original(self, value, axis),
    )
    six = kde.VirtualReplicas(6)  # each of the two has two nodes to give; of four virtual ones, one sum is left to make
    gathered = CASES[name].run(strategies.get("mirrored2"), six)[0]
    assert gathers
    assert_same_bits(gathered, run(name, 1, six)[0])


@pytest.mark.rotating
def test_a_run_goes_on_with_other_numbers_of_replicas(tmp_path):
    case = CASES["batch normalization and dropout"]
    net = case.build(strategies.get("mirrored2"), ORDERED)
    net.fit(**case.data, **{**FIT, "epochs": 1})
    net.save(tmp_path / "net.keras")
    net = kde.load_model(tmp_path / "net.keras", strategies.get("mirrored4"))
    net.fit(**case.data, **{**FIT, "epochs": 1})
    assert_same_bits(state_of(net), run("batch normalization and dropout", 1, ORDERED)[0])  # two epochs


# What a virtual replica has for itself


class Drawn(keras.metrics.Metric):
    """What the model gave for each example, named by its target."""

    def __init__(self):
        super().__init__(name="drawn")
        self.drawn = self.add_weight(shape=(8,), initializer="zeros", name="drawn")

    def update_state(self, y_true, y_pred, sample_weight=None):
        one_hot = keras.ops.one_hot(keras.ops.cast(keras.ops.reshape(y_true, (-1,)), "int32"), 8)
        self.drawn.assign_add(keras.ops.sum(one_hot * keras.ops.reshape(y_pred, (-1, 1)), axis=0))

    def result(self):
        return keras.ops.convert_to_tensor(self.drawn)


class Draw(keras.Layer):
    """Gives a random number for each row."""

    def __init__(self):
        super().__init__()
        self.seed = keras.random.SeedGenerator(11)
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        return self.scale * keras.random.uniform((keras.ops.shape(x)[0], 1), seed=self.seed)


class DrawInFunction(Draw):
    """Draws inside of a tf.function, which is traced when it is first called, and then again only if it must be."""

    @tf.function
    def call(self, x):
        return self.scale * keras.random.uniform((tf.shape(x)[0], 1), seed=self.seed)


class DrawByOp(Draw):
    """Draws by an op of TensorFlow's, which has a seed of its own if the model has one."""

    def call(self, x):
        return self.scale * tf.random.uniform((tf.shape(x)[0], 1))


def draws(layer, num_replicas, virtual, *, seed=None, **arguments):
    with strategies.get(KINDS[num_replicas]).scope():
        net = kde.Sequential([keras.Input((1,)), layer()], seed=seed)
        net.compile(keras.optimizers.SGD(0.0), "mse", metrics=[Drawn()], virtual_replicas=virtual, **arguments)
    rows = np.arange(8, dtype="float32")[:, None]
    drawn = net.fit(rows, rows, batch_size=8, epochs=1, shuffle=False, verbose=0).history["drawn"][0]
    return np.asarray(drawn), np.asarray(net.layers[-1].seed.state)


@pytest.mark.parametrize("layer", rotating([Draw, DrawInFunction], [DrawInFunction]))
def test_each_virtual_replica_draws_what_a_real_one_would(layer):
    drawn, state = draws(layer, 1, 4)
    expected, _ = draws(Draw, 4, None)
    np.testing.assert_array_equal(drawn, expected)
    assert len(np.unique(drawn)) == 8
    assert state[1] == 1, "the counter goes on as for one"


@pytest.mark.rotating
def test_ops_of_tensorflow_draw_for_each_virtual_replica_by_the_seed_of_the_model():
    drawn, _ = draws(DrawByOp, 2, 4, seed=42)
    np.testing.assert_array_equal(drawn, draws(DrawByOp, 4, None, seed=42)[0])
    assert len(np.unique(drawn)) == 8


@pytest.mark.parametrize("num_replicas", rotating([1, 2], [2]))
def test_batch_statistics_are_those_of_each_virtual_replica(num_replicas):
    with strategies.get(KINDS[num_replicas]).scope():
        normalize = keras.layers.BatchNormalization(momentum=0.0)
        net = kde.Sequential([keras.Input((6,)), normalize, keras.layers.Dense(1)])
        net.compile("sgd", "mse", virtual_replicas=4)
    net.fit(X[:8], Y[:8], batch_size=8, epochs=1, shuffle=False, verbose=0)
    pairs = X[:8].reshape(4, 2, 6)
    np.testing.assert_allclose(normalize.moving_mean, X[:8].mean(axis=0), atol=1e-6)
    np.testing.assert_allclose(normalize.moving_variance, pairs.var(axis=1).mean(axis=0), rtol=1e-5)


def test_a_virtual_replica_begins_when_the_gradients_of_the_last_are_there(monkeypatch):
    """So that what a gradient is computed from need not be held for all of them at once."""
    waits = []

    def apart(value):
        kept = reduce.optimization_barrier(value)
        waits.append(sorted(op.name.split("/")[-1] for op in kept.op.control_inputs))
        return kept

    monkeypatch.setattr(turns, "optimization_barrier", apart)
    net = Case(list).build(strategies.get("default"), 2)
    net.train_on_batch(X, Y)
    assert waits[:2] == [[], []], "the first one's inputs and targets wait for nothing"
    assert waits[2:] == [waits[2]] * 2
    assert len(waits[2]) == 2, "a kernel's and a bias's gradient"


def ops(net):
    """How many ops of each type its training was traced to."""
    net.fit(X, Y, **FIT)
    definitions = [graph.as_graph_def() for graph in net.train_function.program.graphs()]
    bodies = [definition.node for definition in definitions]
    bodies += [function.node_def for definition in definitions for function in definition.library.function]
    return collections.Counter(node.op for body in bodies for node in body)


@pytest.mark.rotating
def test_a_virtual_replica_for_each_real_one_adds_nothing_to_a_fast_step():
    case, strategy = CASES["batch normalization and dropout"], strategies.get("mirrored4")
    plain = ops(case.build(strategy, None))
    assert ops(case.build(strategy, FAST)) == plain
    assert ops(case.build(strategy, ORDERED)) != plain, "in an order of its own"
    assert case.build(strategies.get("default"), 1).virtual_replicas is None


# Compile


@pytest.mark.parametrize(
    ("virtual", "kind", "message"),
    [
        (0, "default", "virtual_replicas must be an integer >= 1, got 0"),
        (-4, "default", "virtual_replicas must be an integer >= 1, got -4"),
        (True, "default", "virtual_replicas must be an integer >= 1, got True"),
        (2.0, "default", "virtual_replicas must be an integer >= 1, got 2.0"),
        ("4", "default", "virtual_replicas must be an integer >= 1, got '4'"),
        (
            6,
            "mirrored4",
            "virtual_replicas=6 cannot be divided evenly among the 4 replicas of MirroredStrategy. Use 1 or 2 or 3 or 6"
            " replicas, or a multiple of 4 as virtual_replicas.",
        ),
        (1, "mirrored2", "virtual_replicas=1 cannot be divided evenly among the 2 replicas of MirroredStrategy."),
    ],
)
def test_compile_refuses_what_replicas_cannot_carry_and_changes_nothing(virtual, kind, message):
    with strategies.get(kind).scope():
        net = kde.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
        net.compile("sgd", "mse", virtual_replicas=4)
        before = net.optimizer
        with pytest.raises(kde.StrategyError) as raised:
            net.compile("adam", "mse", virtual_replicas=virtual)
    assert message in str(raised.value)
    assert net.optimizer is before
    assert net.virtual_replicas == ORDERED


def test_a_config_without_an_optimizer_to_note_them_beside_stays_as_it_is():
    for config in ({"loss": "mse"}, {"optimizer": None}):
        assert ORDERED.noted_in(config) is config
        assert kde.VirtualReplicas.read_from(config) is None


def test_an_unknown_reduction_is_refused():
    with pytest.raises(kde.StrategyError, match=r"VirtualReplicas\(4, reduction='exact'\): there is no such reduction"):
        kde.VirtualReplicas(4, reduction="exact")


@pytest.mark.parametrize("cls", [tf.distribute.ParameterServerStrategy, tf.distribute.TPUStrategy])
def test_strategies_whose_replicas_cannot_take_turns_are_refused(cls):
    strategy = mock.Mock(spec=cls, num_replicas_in_sync=2)
    with pytest.raises(kde.StrategyError, match="which cannot run virtual replicas"):
        ORDERED.check(strategy)


def test_jit_compile_warns_once_and_runs_without_xla(monkeypatch):
    monkeypatch.setattr(messages, "_warned", set())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        nets = [
            Case(randomized, compile={"jit_compile": True}).build(strategies.get("default"), ORDERED) for _ in range(2)
        ]
    assert [str(w.message) for w in caught if "jit_compile" in str(w.message)] == [
        "jit_compile=True: with virtual_replicas=4 the step runs without XLA, which cannot compile for every number of "
        "devices, and computes other numbers."
    ]
    assert not nets[0].jit_compile


def sequential(strategy):
    return Case(randomized).build(strategy, FAST)


def functional(strategy):
    with strategy.scope():
        x = keras.Input((6,))
        net = kde.Model(x, keras.layers.Dense(1)(x))
        net.compile("adam", "mse", virtual_replicas=FAST)
    return net


@pytest.mark.parametrize("make", [sequential, functional])
def test_files_pickles_and_copies_carry_the_number_of_virtual_replicas(make, mirrored, tmp_path):
    net = make(mirrored)
    net.save(tmp_path / "net.keras")
    default = strategies.get("default")
    assert kde.load_model(tmp_path / "net.keras", default).virtual_replicas == FAST
    assert pickle.loads(pickle.dumps(net)).virtual_replicas == FAST
    assert kde.adopt(net, default).virtual_replicas == FAST
    assert kde.clone_model(net).virtual_replicas == FAST
    with pytest.raises(kde.StrategyError, match="virtual_replicas=4 cannot be divided evenly among the 3 replicas"):
        kde.load_model(tmp_path / "net.keras", strategies.get("mirrored3"))


@pytest.mark.parametrize("make", [sequential, functional])
def test_stock_keras_loads_the_files(make, tmp_path):
    net = make(strategies.get("default"))
    net.save(tmp_path / "net.keras")
    stock = keras.models.load_model(tmp_path / "net.keras")
    assert not isinstance(stock, kde.Model)
    assert stock.optimizer.get_config() == net.optimizer.get_config()
    stock.fit(X, Y, **FIT)


# What is refused


class Faulty(kde.Sequential):
    """A model whose step does something that replicas cannot."""

    fault = ""

    def train_step(self, data):
        if self.fault == "fails":
            self.calls = getattr(self, "calls", 0) + 1
            if self.calls == 3:
                raise ZeroDivisionError("the third call")
        elif self.fault == "gathers":
            tf.distribute.get_replica_context().all_gather(data[1], axis=0)
        elif self.fault == "differs":
            if getattr(current_step(), "virtual_replica", None) == 1:
                return {"loss": tf.constant(0.0)}
        elif self.fault == "in a branch":
            return tf.cond(tf.constant(True), lambda: super(Faulty, self).train_step(data), lambda: {"loss": 0.0})
        elif self.fault == "in a function":
            return tf.function(super().train_step)(data)
        return super().train_step(data)


FAULTS = {
    "fails": (ZeroDivisionError, "the third call"),
    "gathers": (kde.StrategyError, "A step calls merge_call of tf.distribute, as all_gather does"),
    "differs": (kde.StrategyError, "Virtual replica 0 stopped for 'update' with 2 values, and 1 for 'end' with"),
    "in a branch": (kde.LoopError, "inside of a tf.function, or of a branch or loop in the graph, where replicas"),
    "in a function": (
        Exception,
        "StrategyError: A step sums over replicas inside of a tf.function, or of a branch or loop",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_cannot_take_turns_is_an_error_and_leaves_no_thread(fault):
    error, message = FAULTS[fault]
    before = set(threading.enumerate())
    net = Case(list, cls=lambda: Faulty).build(strategies.get("default"), ORDERED)
    net.fault = fault
    net.replica_runtime.check = False  # which would make calls of its own
    with pytest.raises(error) as raised:
        net.fit(X, Y, **FIT)
    assert message in str(raised.value)
    assert not [thread for thread in set(threading.enumerate()) - before if "virtual_replica" in thread.name]


def test_a_tf_function_that_assigns_in_an_eager_run_is_refused():
    with pytest.raises(Exception, match="StrategyError: .* is assigned inside of a tf.function, in a model that runs"):
        draws(DrawInFunction, 1, 4, run_eagerly=True)


# Two workers


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[mark, on_two_workers(run_on_both, name, "ordered")])
        for name, mark in zip(OF_WORKERS, [pytest.mark.slow, pytest.mark.rotating, pytest.mark.rotating], strict=True)
    ],
)
def test_two_workers_come_to_the_bits_that_one_process_comes_to(name, values):
    for (on_workers, their_logs), (on_one, its_logs) in values:
        assert_same_bits(on_workers, on_one)
        assert_close(their_logs, its_logs)
        assert_close(on_one, run(name, 1, ORDERED)[0])


@pytest.mark.slow
@on_two_workers(train_on_rows_of_their_own)
def test_rows_that_a_worker_reads_are_dealt_to_the_virtual_replicas_that_it_carries(values):
    net = CASES["accumulation of gradients"].build(strategies.get("default"), 4)
    batches = tf.data.Dataset.zip(rows_of_worker(0), rows_of_worker(1))
    net.fit(batches.map(lambda *parts: tuple(tf.concat(pair, 0) for pair in zip(*parts, strict=True))), verbose=0)
    for worker in values:
        assert_same_bits(worker, state_of(net))


@pytest.mark.rotating
@on_two_workers(run_on_both, OF_WORKERS[0], "fast")
def test_two_workers_come_to_the_same_numbers_by_fast_sums(values):
    for (on_workers, _), (on_one, _) in values:
        assert_close(on_workers, on_one)
