"""Parts of a model live on devices of their own, and train as on one."""

import functools
import re
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import rotating
from keras import layers
from placement_runs import FIT, WEIGHTS, X, Y, devices_of, make, place, train_in_worker

import keras_dist_ext as kde
from keras_dist_ext import messages
from keras_dist_ext._keras.hooks import intercept
from keras_dist_ext.cluster.launch import launch
from keras_dist_ext.training.placement import timeline as timeline_module
from keras_dist_ext.training.placement import verdict
from keras_dist_ext.training.placement.groups import home_devices
from keras_dist_ext.training.placement.parts import Part
from keras_dist_ext.training.placement.timeline import PartTimes, Timeline, Transfer
from keras_dist_ext.training.placement.trace import Trace

RANDOM = np.random.default_rng(1)
ONE = {"encoder": "CPU:0", "decoder": "CPU:1"}
GROUPS = {"encoder": ["CPU:0", "CPU:2"], "decoder": ["CPU:1", "CPU:3"]}


def default():
    return tf.distribute.get_strategy()


def groups():
    """Two replicas on CPU:0 and CPU:2; CPU:1 and CPU:3 are for their parts."""
    return kde.pick_strategy("mirrored", devices=["CPU:0", "CPU:2"], environ={}).strategy


def one_device():
    return kde.pick_strategy("one_device", devices=["CPU:2"], environ={}).strategy


def values(model):
    state = [*model.variables, *(model.optimizer.variables if model.optimizer else ())]
    names = [re.sub(r"_\d+", "", variable.path) for variable in state]  # optimizers are numbered
    return {f"{i} {name}": keras.ops.convert_to_numpy(v) for i, (name, v) in enumerate(zip(names, state, strict=True))}


def assert_close(model, other, rtol=1e-5):
    ours, theirs = values(model), values(other)
    assert list(ours) == list(theirs)
    for name, value in ours.items():
        np.testing.assert_allclose(value, theirs[name], rtol=rtol, atol=1e-6, err_msg=name)


@functools.cache
def on_one_device():
    model = make()
    history = model.fit(X, Y, sample_weight=WEIGHTS, **FIT)
    return model, history.history


def nodes(model):
    """(name, type, device, inputs) of what its training step was traced to."""
    (graph,) = model.train_function.program.graphs()
    definition = graph.as_graph_def()
    every = [*definition.node, *(node for function in definition.library.function for node in function.node_def)]
    return [(node.name, node.op, node.device.rpartition("device:")[2]) for node in every]


# The same numbers


@pytest.mark.parametrize("micro_batches", rotating([1, 4], [1], slow=[4]))
@pytest.mark.parametrize(
    ("strategy", "parts"), rotating([(default, ONE), (groups, GROUPS)], [(groups, GROUPS)]), ids=["one group", "2 x 2"]
)
def test_a_placed_model_trains_as_on_one_device(strategy, parts, micro_batches):
    model = make(strategy())
    place(model, parts, micro_batches=micro_batches)
    history = model.fit(X, Y, sample_weight=WEIGHTS, **FIT)
    expected, logs = on_one_device()
    assert_close(model, expected)
    for name, value in history.history.items():
        np.testing.assert_allclose(value, logs[name], rtol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("strategy", "parts"),
    rotating([(default, ONE), (groups, GROUPS)], [], slow=[(groups, GROUPS)]),
    ids=["one group", "2 x 2"],
)
@pytest.mark.parametrize(
    "options",
    [
        {"run_eagerly": True},
        {"optimizer": lambda: keras.optimizers.SGD(0.05, gradient_accumulation_steps=2)},
        {"optimizer": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01, clipnorm=0.1))},
    ],
    ids=["eagerly", "accumulation", "loss scale"],
)
def test_options_of_compile_hold_for_a_placed_model(strategy, parts, options):
    def train(strategy, parts):
        with strategy.scope():
            made = {name: value() if callable(value) else value for name, value in options.items()}
        model = make(strategy, **made)
        if parts:
            place(model, parts, micro_batches=2)
        model.fit(X, Y, **FIT)
        return model

    assert_close(train(strategy(), parts), train(default(), None))


def test_what_xla_cannot_do_is_said_and_the_model_trains_without():
    model = make(jit_compile=True)
    place(model, ONE)
    with pytest.warns(UserWarning, match="jit_compile=True: 'net' is placed on several devices"):
        model.fit(X, Y, sample_weight=WEIGHTS, **FIT)
    assert_close(model, on_one_device()[0])


@pytest.mark.rotating
def test_nothing_is_said_of_xla_where_keras_has_chosen_it(monkeypatch):
    monkeypatch.setattr(keras.Model, "_resolve_auto_jit_compile", lambda self: True)  # as with a GPU
    model = make()
    assert model.jit_compile is True
    place(model, ONE)
    model.fit(X, Y, sample_weight=WEIGHTS, **FIT)
    assert_close(model, on_one_device()[0])


@pytest.mark.rotating
def test_a_placed_model_is_watched_as_any():
    model, memory = make(groups()), kde.MemoryWriter()
    place(model, GROUPS, micro_batches=2)
    monitor = kde.ReplicaMonitor(writers=[memory], update_freq="epoch")
    model.fit(X, Y, sample_weight=WEIGHTS, **FIT, callbacks=[monitor])
    assert [stats.examples.sum() for stats in memory.train] == [21, 21]
    assert all(np.isfinite(stats.loss).all() for stats in memory.train)


@pytest.mark.parametrize(
    ("strategy", "parts"), rotating([(default, ONE), (groups, GROUPS)], []), ids=["one group", "2 x 2"]
)
def test_evaluate_and_predict_give_what_one_device_gives(strategy, parts):
    model, plain = make(strategy()), make()
    place(model, parts, micro_batches=2)
    np.testing.assert_allclose(model.predict(X, verbose=0), plain.predict(X, verbose=0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(model.evaluate(X, Y, verbose=0), plain.evaluate(X, Y, verbose=0), rtol=1e-5)


# Where things live


def test_weights_and_slots_live_on_the_device_of_their_part_in_each_group():
    model = make(groups())
    place(model, GROUPS)
    model.fit(X, Y, **FIT)
    for variable in [*model.trainable_variables, *model.optimizer.variables]:
        path = variable.path.replace("_", "/")
        wanted = ["CPU:1", "CPU:3"] if "decoder" in path else ["CPU:0", "CPU:2"]
        assert devices_of(variable) == wanted, variable.path


def test_without_a_strategy_weights_and_slots_live_on_the_device_of_their_part():
    model = make()
    place(model, {"decoder": "CPU:3"})
    model.fit(X, Y, **FIT)
    for variable in [*model.trainable_variables, *model.optimizer.variables]:
        assert devices_of(variable) == ["CPU:3" if "decoder" in variable.path else "CPU:0"], variable.path


@pytest.mark.slow
def test_under_a_one_device_strategy_the_rest_stays_on_its_device():
    model = make(one_device())
    placement = place(model, {"decoder": "CPU:3"})
    model.fit(X, Y, sample_weight=WEIGHTS, **FIT)
    assert {path: devices_of(v) for path, v in ((v.path, v) for v in model.weights) if "decoder" not in path} == {
        v.path: ["CPU:2"] for v in model.weights if "decoder" not in v.path
    }
    assert devices_of(model.get_layer("decoder").weights[0]) == ["CPU:3"]
    assert placement.homes == ("CPU:2",)
    assert_close(model, on_one_device()[0])


@pytest.mark.parametrize(
    ("strategy", "parts"), rotating([(default, ONE), (groups, GROUPS)], [(default, ONE)]), ids=["one group", "2 x 2"]
)
def test_a_part_computes_on_its_device_forward_and_backward(strategy, parts):
    model = make(strategy())
    place(model, parts)
    model.fit(X, Y, **FIT)
    products = [(name, device) for name, op, device in nodes(model) if op == "MatMul" and "decoder" in name]
    backward = [name for name, _ in products if "gradient_tape" in name]
    assert len(products) == 6 * len(model.placement.homes)  # two layers: forward, and gradients of weights and inputs
    assert len(backward) == 4 * len(model.placement.homes)
    of_second = {device for name, device in products if "replica_1" in name}
    assert {device for name, device in products if "replica_1" not in name} == {"CPU:1"}
    assert of_second == ({"CPU:3"} if strategy is groups else set())


def test_what_is_left_over_is_on_the_replicas_own_device_and_said():
    model = make()
    placement = place(model, {"decoder": "CPU:1"})
    assert placement.left_over == ["encoder", "head"]
    assert "left over: CPU:0 (encoder, head)" in str(placement)
    model.fit(X, Y, **FIT)
    heads = {device for name, op, device in nodes(model) if op == "MatMul" and "head" in name}
    assert heads == {"CPU:0"}


def test_a_loss_is_computed_where_its_part_is():
    model = make()
    place(model, {"encoder": "CPU:0", "decoder": "CPU:1", "head": "CPU:1"})
    model.fit(X, Y, **FIT)
    squares = {device for name, op, device in nodes(model) if op == "Square" or op == "SquaredDifference"}
    assert squares == {"CPU:1"}


def test_ops_outside_of_parts_go_where_their_inputs_come_from_and_constants_to_who_needs_them():
    with tf.Graph().as_default():
        with Trace().step(["CPU:1", "CPU:2"], 0):
            with tf.device("CPU:1"):
                first = tf.random.normal([3])
            with tf.device("CPU:2"):
                second = tf.random.normal([3])
            given = tf.compat.v1.placeholder(tf.float32, [3])
            scaled, both = first * 2.0, first + second
            loss = scaled - given
        devices = [value.op.device for value in (scaled, scaled.op.inputs[1], loss, both, given)]
    assert devices == ["/device:CPU:1", "/device:CPU:1", "/device:CPU:1", "", ""]


# When it is placed


@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.rotating
def test_a_model_that_has_trained_takes_its_optimizer_along(is_scaled):
    def optimizer():
        adam = keras.optimizers.Adam(0.01)
        return keras.optimizers.LossScaleOptimizer(adam) if is_scaled else adam

    model, plain = make(optimizer=optimizer()), make(optimizer=optimizer())
    for net in (model, plain):
        net.fit(X, Y, **FIT)
    place(model, ONE)
    for net in (model, plain):
        net.fit(X, Y, **FIT)
    assert_close(model, plain)
    slots = [v for v in model.optimizer.variables if "decoder" in v.path]
    assert len(slots) == 8
    assert {device for slot in slots for device in devices_of(slot)} == {"CPU:1"}


@pytest.mark.parametrize(
    ("strategy", "devices"), [(default, "CPU:1"), pytest.param(groups, ["CPU:1", "CPU:3"], marks=pytest.mark.rotating)]
)
def test_layers_that_are_built_in_fit_are_moved_before_the_first_step(strategy, devices):
    class Net(kde.Model):
        def __init__(self):
            super().__init__(name="net")
            self.encoder, self.heads = layers.Dense(8, "tanh", name="first"), [layers.Dense(1, name="last")]

        def call(self, x):
            return self.heads[0](self.encoder(x))

    def train(strategy, parts):
        keras.utils.set_random_seed(3)
        with strategy.scope():
            net = Net()
            net.compile(keras.optimizers.Adam(0.01), "mse")
        if parts:
            place(net, parts)
        net.fit(X, Y, **FIT)
        return net

    placed, plain = train(strategy(), {"heads0": devices}), train(default(), None)
    assert_close(placed, plain)
    wanted = [devices] if isinstance(devices, str) else devices
    assert [devices_of(v) for v in placed.heads[0].weights] == [wanted, wanted]


@pytest.mark.rotating
def test_what_another_placement_leaves_out_goes_back_to_the_replicas_own_device():
    model = make()
    expected = model(X)
    place(model, {"decoder": "CPU:1"})
    placement = place(model, {"encoder": "CPU:2"})
    assert devices_of(model.get_layer("encoder").weights[0]) == ["CPU:2"]
    assert devices_of(model.get_layer("decoder").weights[0]) == ["CPU:0"]
    assert "decoder" in placement.left_over
    np.testing.assert_array_equal(model(X), expected)


def test_a_variable_of_tensorflow_that_stays_where_it_was_is_said():
    class Counts(layers.Layer):
        def __init__(self):
            super().__init__(name="counts")
            with tf.device("CPU:0"):
                self.seen = tf.Variable(0.0)

        def call(self, x):
            return x

    model = kde.Sequential([keras.Input((6,)), Counts(), layers.Dense(1, name="head")], name="net")
    placement = place(model, {"counts": "CPU:1", "head": "CPU:0"})
    assert "tf.Variables that stay where they were made, and are copied each step: net/counts/seen" in str(placement)


@pytest.mark.slow
def test_another_placement_takes_the_place_of_the_first():
    model = make()
    place(model, {"decoder": "CPU:1"})
    model.fit(X, Y, **{**FIT, "epochs": 1})
    place(model, {"encoder": "CPU:2", "decoder": "CPU:3"}, micro_batches=2)
    model.fit(X, Y, **{**FIT, "epochs": 1})
    assert devices_of(model.get_layer("decoder").weights[0]) == ["CPU:3"]
    products = {device for name, op, device in nodes(model) if op == "MatMul" and "encoder" in name}
    assert products == {"CPU:2"}
    plain = make()
    plain.fit(X, Y, **FIT)
    assert_close(model, plain)


@pytest.mark.slow
def test_a_placed_model_is_saved_and_loaded_as_any(tmp_path):
    model = make()
    place(model, ONE)
    model.fit(X, Y, **FIT)
    model.save(tmp_path / "net.keras")
    again = kde.load_model(tmp_path / "net.keras")
    np.testing.assert_allclose(again.predict(X, verbose=0), model.predict(X, verbose=0), rtol=1e-6)
    place(again, {"decoder": "CPU:3"})
    for net in (model, again):
        net.fit(X, Y, **FIT)
    for ours, theirs in zip(again.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


# Layers of all kinds


@functools.cache
def kinds():
    """By name: what two parts are given, and their layers."""
    images, words = RANDOM.normal(size=(21, 8, 8, 3)).astype("float32"), RANDOM.integers(0, 7, size=(21, 4))
    return {
        "convolutions": (
            images,
            lambda: [layers.Conv2D(4, 3), layers.ReLU()],
            lambda: [layers.Conv2D(2, 3), layers.Flatten()],
        ),
        "masked words": (
            words,
            lambda: [layers.Embedding(7, 5, mask_zero=True)],
            lambda: [layers.LSTM(3)],
        ),
        "norms": (
            X,
            lambda: [layers.Dense(8), layers.LayerNormalization()],
            lambda: [
                layers.Dense(8, kernel_regularizer="l2"),
                layers.BatchNormalization(synchronized=True),
                layers.ReLU(),
            ],
        ),
    }


def train_kind(name, strategy, parts, **options):
    x, first, second = kinds()[name]
    keras.utils.set_random_seed(3)
    with strategy.scope():
        inputs = keras.Input(x.shape[1:], dtype="int32" if x.dtype == int else "float32")
        encoder, decoder = keras.Sequential(first(), name="encoder"), keras.Sequential(second(), name="decoder")
        model = kde.Model(inputs, layers.Dense(1)(decoder(encoder(inputs))), name="net")
        model.compile(keras.optimizers.SGD(0.05), "mse")
    if parts:
        place(model, parts, **options)
    model.fit(x, Y, sample_weight=WEIGHTS, **FIT)
    return model


KINDS = [
    (name, strategy, parts, micro_batches)
    for name in ("convolutions", "masked words", "norms")
    for strategy, parts in ((default, ONE), (groups, GROUPS))
    for micro_batches in (1, 2)
]


@pytest.mark.parametrize(
    ("name", "strategy", "parts", "micro_batches"),
    rotating(KINDS, [], slow=[("masked words", default, ONE, 2)]),
)
def test_layers_of_all_kinds_train_as_on_one_device(name, strategy, parts, micro_batches):
    model, plain = train_kind(name, strategy(), parts, micro_batches=micro_batches), train_kind(name, default(), None)
    assert_close(model, plain)


@pytest.mark.rotating
def test_gradients_of_a_recurrent_layer_are_computed_on_its_device():
    model = train_kind("masked words", default(), ONE)
    loops = [(name, device) for name, op, device in nodes(model) if "While" in op and "decoder" in name]
    assert [device for name, device in loops if "gradient_tape" in name] == ["CPU:1"]
    assert {device for _, device in loops} == {"CPU:1"}


# Micro-batches


def ancestors(graph, op):
    found, pending = set(), [op]
    while pending:
        op = pending.pop()
        for before in (*(value.op for value in op.inputs), *op.control_inputs):
            if before.name not in found:
                found.add(before.name)
                pending.append(before)
    return found


def test_a_part_makes_micro_batches_in_order_while_others_have_the_last_ones():
    model = make()
    place(model, {"encoder": "CPU:0", "decoder": "CPU:1"}, micro_batches=3)
    program = model.make_train_function().program
    model._symbolic_build(data_batch=(tf.TensorSpec([None, 6]), tf.TensorSpec([None, 1])))
    run = program._of_batch.get_concrete_function((tf.TensorSpec([None, 6]), tf.TensorSpec([None, 1])))
    products = {op.name: op for op in run.graph.get_operations() if op.type == "MatMul"}

    def of(part, turn, is_gradient=False):
        return {
            name
            for name in products
            if part in name and f"virtual_replica_{turn}/" in name and ("gradient_tape" in name) == is_gradient
        }

    before = {name: ancestors(run.graph, op) & set(products) for name, op in products.items()}
    (first,) = (name for name in of("encoder", 1) if "wide" in name)
    waits_for = before[first]
    assert of("encoder", 0) <= waits_for, "the encoder begins with the second when it has made the first"
    assert not of("decoder", 0) & waits_for, "while the decoder has the first"
    backward = set().union(*(before[name] for name in of("decoder", 1, is_gradient=True)))
    of_inputs = {name for name in of("decoder", 0, is_gradient=True) if name.endswith("MatMul/MatMul")}
    assert len(of_inputs) == 2
    assert of_inputs <= backward
    assert not of("encoder", 0, is_gradient=True) & backward


def test_micro_batches_of_integers_have_an_order_too():
    trace, made = Trace(), []
    with tf.Graph().as_default() as graph:
        words = tf.compat.v1.placeholder(tf.int32, [3])
        for turn in range(3):
            with intercept(types.SimpleNamespace(virtual_replica=turn)):
                made.append(trace.call("words", "CPU:1", 0, lambda words: tf.one_hot(words, 7), words))
        assert made[1].op.name in ancestors(graph, made[2].op)
        assert made[0].op.name in ancestors(graph, made[1].op)


def test_virtual_replicas_and_micro_batches_would_cut_a_batch_twice():
    model = make(virtual_replicas=4)
    with pytest.raises(kde.PlacementError, match="micro_batches=2, and the model is compiled with virtual_replicas=4"):
        kde.place(model, ONE, micro_batches=2)
    model = make()
    place(model, ONE, micro_batches=2)
    model.compile("sgd", "mse", virtual_replicas=4)
    with pytest.raises(kde.PlacementError, match="micro_batches=2, and the model is compiled with virtual_replicas=4"):
        model.fit(X, Y, **FIT)


# Loops of one's own


def make_loop(strategy, parts, **options):
    keras.utils.set_random_seed(3)
    with strategy.scope():
        net = make(strategy)
        optimizer = keras.optimizers.SGD(0.05)

    def step(replica, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = replica.mean_loss((net(x) - y) ** 2)
        optimizer.apply(tape.gradient(loss, net.trainable_variables), net.trainable_variables)
        return {"loss": loss}

    loop = kde.TrainLoop(step, parts={"net": net, "opt": optimizer}, reduce={"loss": "mean"}, strategy=strategy)
    if parts:
        place(loop, parts, **options)
    return loop


@pytest.mark.parametrize(
    ("strategy", "devices"),
    rotating([(default, "CPU:1"), (groups, ["CPU:1", "CPU:3"])], [(default, "CPU:1")]),
)
def test_a_loop_with_a_placed_part_trains_as_on_one_device(strategy, devices):
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    loop, plain = make_loop(strategy(), {"net/decoder": devices}), make_loop(default(), None)
    for each in (loop, plain):
        each.fit(data, epochs=2, verbose=0)
    assert_close(loop.net, plain.net)
    wanted = [devices] if isinstance(devices, str) else devices
    assert devices_of(loop.net.get_layer("decoder").weights[0]) == wanted
    assert {device for name, op, device in nodes(loop) if op == "MatMul" and "decoder" in name} == set(wanted)


def test_micro_batches_of_a_loop_are_refused():
    with pytest.raises(kde.PlacementError, match="micro_batches=2 for 'loop', a TrainLoop: its step is a function"):
        make_loop(default(), {"net/decoder": "CPU:1"}, micro_batches=2)


# Workers


@pytest.mark.multiworker
@pytest.mark.parametrize("micro_batches", rotating([1, 2], []))
def test_workers_that_are_groups_train_as_one_device(micro_batches):
    expected, logs = on_one_device()
    for weights, devices, history in launch(
        2, functools.partial(train_in_worker, micro_batches), time_limit=100
    ).values:
        assert devices == ["CPU:1"]
        for ours, theirs in zip(weights, expected.get_weights(), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(history["loss"], logs["loss"], rtol=1e-5)


# What cannot be


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        (
            {"decodr": "CPU:1"},
            kde.PlacementError,
            "There is no part 'decodr'; did you mean 'decoder'? In 'net' there are 'encoder', 'decoder', 'head'.",
        ),
        (
            {"decoder/wid": "CPU:1"},
            kde.PlacementError,
            "There is no part 'decoder/wid'; did you mean 'wide'? In 'decoder' of 'net' there are 'wide', 'out'.",
        ),
        ({"block*": "CPU:1"}, kde.PlacementError, "There is no part 'block*'. In 'net' there are"),
        ({}, kde.PlacementError, "No part is named, so nothing would move. 'net' has 'encoder', 'decoder', 'head'."),
        (
            {"decoder": "CPU:1", "*coder": "CPU:2"},
            kde.PlacementError,
            "'decoder' and '*coder' both mean the layer 'decoder', which can live on one device only.",
        ),
        (
            {"decoder": "CPU:4"},
            kde.StrategyError,
            "Part 'decoder' is to live on CPU:4, which this process does not have. TensorFlow has CPU:0, CPU:1, CPU:2",
        ),
        ({"decoder": "second"}, kde.StrategyError, "'second' is not the name of a device."),
        (
            {"decoder": ["CPU:1", "CPU:3"]},
            kde.StrategyError,
            "Part 'decoder' is given 2 devices (CPU:1, CPU:3), and the model has 1 replica (CPU:0).",
        ),
    ],
)
def test_what_does_not_exist_is_an_error_that_lists_what_does(parts, error, message):
    with pytest.raises(error) as caught:
        kde.place(make(), parts)
    assert message in str(caught.value)


def test_each_replica_needs_a_device_of_its_own_for_a_part():
    model = make(groups())
    with pytest.raises(
        kde.StrategyError, match=r"given 1 device \(CPU:1\), and the model has 2 replicas \(CPU:0, CPU:2\)"
    ):
        kde.place(model, {"decoder": "CPU:1"})
    with pytest.raises(
        kde.StrategyError, match="CPU:2 is given to part 'decoder' of replica 0, and to replica 1 as its"
    ):
        kde.place(model, {"decoder": ["CPU:2", "CPU:3"]})
    with pytest.raises(
        kde.StrategyError, match="CPU:1 is given to part 'decoder' of replica 1, and to replica 0 as part"
    ):
        kde.place(model, {"decoder": ["CPU:1", "CPU:1"]})


def test_a_strategy_that_deals_out_devices_in_another_way_is_refused():
    central = tf.distribute.experimental.CentralStorageStrategy(compute_devices=["/CPU:0", "/CPU:1"])
    with pytest.raises(kde.StrategyError, match=r"the model lives under CentralStorageStrategy \(2 replicas\)"):
        home_devices(central)


def test_a_layer_that_two_parts_use_needs_a_place_of_its_own():
    shared = layers.Dense(6, name="shared")
    first, second = (keras.Sequential([shared, layers.Dense(6)], name=name) for name in ("first", "second"))
    inputs = keras.Input((6,))
    model = kde.Model(inputs, second(first(inputs)), name="net")
    parts = {"first": "CPU:0", "second": "CPU:1"}
    message = (
        r"The layer 'shared' is used by 'first' \(CPU:0\) and by 'second' \(CPU:1\), and its weights can live on one"
    )
    with pytest.raises(kde.PlacementError, match=message):
        kde.place(model, parts)
    place(model, {**parts, "first/shared": "CPU:2"})
    assert devices_of(shared.weights[0]) == ["CPU:2"]


def test_a_model_that_is_not_ours_is_refused():
    with pytest.raises(kde.PlacementError, match="place was given Sequential, whose step is not ours"):
        kde.place(keras.Sequential([layers.Dense(1, name="last")]), {"last": "CPU:1"})


def test_parts_are_called_by_their_names():
    with pytest.raises(kde.PlacementError, match="parts must be a dict of devices by name of a layer, such as"):
        kde.place(make(), {3: "CPU:1"})


def test_an_optimizer_that_cannot_be_made_anew_is_placed_before_it_is_built():
    class Own(keras.optimizers.SGD):
        def get_config(self):
            raise NotImplementedError("no config")

    model = make(optimizer=Own(0.1, name="own"))
    place(model, {"decoder": "CPU:1"})
    model.optimizer.build(model.trainable_variables)
    message = r"The optimizer 'own' is built already, .* cannot be made anew from its config \(no config\)\. Call place"
    with pytest.raises(kde.PlacementError, match=message):
        place(model, {"encoder": "CPU:2"})


@pytest.mark.parametrize("number", [0, -1, True, 1.5])
def test_a_number_of_micro_batches_is_at_least_one(number):
    with pytest.raises(kde.PlacementError, match=f"micro_batches must be an integer >= 1, got {number!r}"):
        kde.place(make(), ONE, micro_batches=number)


# What does not help


def test_a_placement_on_logical_devices_says_that_it_makes_nothing_faster(monkeypatch):
    monkeypatch.setattr(messages, "_warned", set())
    with pytest.warns(UserWarning, match="CPU:0 and CPU:2 are logical devices of one processor"):
        placement = kde.place(make(), {"decoder": "CPU:2"}, micro_batches=5)
    assert [finding.code for finding in placement.findings] == ["one-processor"]


def findings_of(part_devices, processors, micro_batches=1):
    parts = [Part(name, (), (device,)) for name, device in part_devices.items()]
    return {finding.code: finding for finding in verdict.of_devices(parts, ["GPU:0"], processors, micro_batches)}


def test_one_device_for_all_parts_is_found():
    (finding,) = findings_of({"a": "GPU:0", "b": "GPU:0"}, {"GPU:0": "gpu a"}).values()
    assert finding.code == "one-device"
    assert "All parts of a replica are on one device, GPU:0" in finding.what


def test_parts_that_take_turns_are_found_and_micro_batches_are_the_fix():
    processors = {"GPU:0": "gpu a", "GPU:1": "gpu b"}
    found = findings_of({"a": "GPU:0", "b": "GPU:1"}, processors)
    assert list(found) == ["parts-take-turns"]
    assert "micro_batches=4" in found["parts-take-turns"].fix
    assert not findings_of({"a": "GPU:0", "b": "GPU:1"}, processors, micro_batches=4)


def timeline(first=(0.01, 0.02), second=(0.01, 0.02), transfers=(), num_busy=1.8, micro_batches=4):
    parts = (PartTimes("a", 0, "GPU:0", *first), PartTimes("b", 0, "GPU:1", *second))
    return Timeline(5, 0.05, micro_batches, num_busy, parts, tuple(transfers))


def test_parts_of_a_size_that_overlap_have_no_finding():
    assert not verdict.of_times(timeline(transfers=[Transfer("b", "GPU:0", "GPU:1", 2**20, 0.001)]))


def test_a_part_that_dominates_is_found():
    (finding,) = verdict.of_times(timeline(first=(0.001, 0.002)))
    assert finding.code == "unequal-parts"
    assert "GPU:1 has 91% of the computing: with perfect overlap a step would be 1.10 times as fast" in finding.what
    assert "Cut 'b' in two" in finding.fix


def test_a_transfer_that_takes_longer_than_its_part_is_found():
    (finding,) = verdict.of_times(timeline(transfers=[Transfer("b", "GPU:0", "GPU:1", 2**20, 0.05)]))
    assert finding.code == "slow-transfer"
    assert finding.seconds == pytest.approx(0.02)
    assert "1 MiB from GPU:0 to GPU:1 and back: 50 ms a step; b computes 30 ms" in finding.evidence


def test_micro_batches_that_do_not_overlap_are_found():
    assert [finding.code for finding in verdict.of_times(timeline(num_busy=1.05))] == ["no-overlap"]
    assert not verdict.of_times(timeline(num_busy=1.05, micro_batches=1))


@pytest.mark.checks_fit
@pytest.mark.rotating
def test_measuring_leaves_the_check_of_steps_to_training():
    def largest(y_true, y_pred):
        return tf.reduce_max(tf.square(y_pred - y_true))

    model = make(groups())
    placement = place(model, GROUPS)
    model.compile("sgd", largest)
    placement.measure(X, Y)
    with pytest.warns(UserWarning, match="does not train on 2 replicas as on one device"):
        model.fit(X, Y, **FIT)


@pytest.mark.slow
def test_what_the_profiler_has_not_seen_is_an_error_that_says_why(monkeypatch):
    monkeypatch.setattr(timeline_module, "op_spans", lambda directory: [])
    model = make(run_eagerly=True)
    placement = place(model, {"decoder": "CPU:1"})
    before = values(model)
    with pytest.raises(kde.PlacementError, match=r"recorded no op of a part, .* compile without run_eagerly"):
        placement.measure(X[:2], Y[:2], num_steps=1)
    after = values(model)
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value, err_msg=name)


@pytest.mark.slow
def test_measuring_sees_each_part_work_and_leaves_the_model_as_it_was():
    model = make(groups())
    placement = place(model, GROUPS, micro_batches=2)
    model.fit(X, Y, **FIT)
    before = values(model)
    times = placement.measure(X, Y)
    assert [(part.name, part.replica, part.device) for part in times.parts] == [
        ("encoder", 0, "CPU:0"),
        ("encoder", 1, "CPU:2"),
        ("decoder", 0, "CPU:1"),
        ("decoder", 1, "CPU:3"),
        ("left over", 0, "CPU:0"),
        ("left over", 1, "CPU:2"),
    ]
    for part in times.parts:
        assert 0 < part.forward_seconds < times.step_seconds
        assert 0 < part.backward_seconds < times.step_seconds
    assert 1 <= times.num_busy <= 2
    assert [(t.part, t.source, t.target, t.num_bytes) for t in times.transfers] == [
        ("decoder", "CPU:0", "CPU:1", 2 * 5 * 8 * 4),  # two micro-batches of 5 rows, or 6, of 8 floats
        ("left over", "CPU:1", "CPU:0", 2 * 5 * 4 * 4),
    ]
    assert "of 2 devices work at once" in str(times)
    for name, value in values(model).items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)
