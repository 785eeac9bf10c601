"""Every variable, optimizer, metric and seed outside the strategy is found, named, and told how to mend."""

import dataclasses
import os
import re
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import rotating

import keras_dist_ext as kde
from keras_dist_ext.strategy.scope import ScopeEntry, ScopeReport, describe_strategy, optimizers

X = np.linspace(-1, 1, 24, dtype="float32").reshape(8, 3)
Y = X.sum(axis=1, keepdims=True)

MIRRORED = "MirroredStrategy (2 replicas)"
BUILD_INSIDE = "Build the model inside `with strategy.scope():`."
MIXING = "'Mixing different tf.distribute.Strategy objects'"


@pytest.fixture(params=["stock", "kde"])
def api(request):
    """`keras` itself, or us: both have `Model` and `Sequential`."""
    return {"stock": keras, "kde": kde}[request.param]


def sequential(api, *layers):
    return api.Sequential([keras.Input((3,)), *(layers or (keras.layers.Dense(1, name="head"),))], name="net")


def outside(report, role):
    return [entry.path for entry in report.outside if entry.role == role]


# What lives under the strategy is let through


def test_model_built_and_compiled_in_scope_passes_under_every_strategy(strategy, api):
    with strategy.scope():
        net = sequential(api, keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5))
        net.compile("adam", "mse", metrics=["mae", keras.metrics.AUC()], weighted_metrics=[keras.metrics.Mean()])
        net.optimizer.build(net.trainable_variables)
    report = kde.check_scope(net, strategy)
    assert report.ok, str(report)
    assert report.outside == ()
    report.raise_if_bad()
    roles = {entry.role for entry in report.entries}
    assert roles == {
        *("model", "trainable", "non-trainable", "seed"),
        *("optimizer", "optimizer variable", "metric variable"),
    }
    assert str(report) == f"All {len(report.entries)} parts of 'net' live under {describe_strategy(strategy)}."


def test_model_made_without_a_strategy_passes_when_none_is_asked_for(api):
    net = sequential(api)
    net.compile("adam", "mse")
    assert kde.check_scope(net, None).ok
    assert kde.check_scope(net, tf.distribute.get_strategy()).ok


def test_model_trained_in_scope_still_passes(mirrored):
    with mirrored.scope():
        net = sequential(kde)
        net.compile("adam", "mse", metrics=["mae"])
    net.fit(X, Y, batch_size=4, verbose=0)
    kde.check_scope(net, mirrored).raise_if_bad()


def test_metrics_that_are_not_made_yet_are_not_in_the_wrong_place(mirrored, api):
    with mirrored.scope():
        net = sequential(api)
        net.compile("sgd", "mse", metrics=["mae", "mse"])
    report = kde.check_scope(net, mirrored)
    assert [entry.path for entry in report.entries if entry.role == "metric variable"] == ["loss/total", "loss/count"]
    assert report.ok


def test_unbuilt_model_in_scope_passes(mirrored, api):
    with mirrored.scope():
        net = api.Sequential([keras.layers.Dense(1)], name="net")
    assert kde.check_scope(net, mirrored).ok


def test_a_layer_is_checked_like_a_model(mirrored):
    layer = keras.layers.Dense(1, name="head")
    layer.build((None, 3))
    assert outside(kde.check_scope(layer, mirrored), "trainable") == ["head/kernel", "head/bias"]


# What lives elsewhere is named


def test_model_built_outside_scope_names_the_variables_and_the_fix(mirrored, api):
    net = sequential(api)
    with pytest.raises(kde.ScopeError) as error:
        kde.check_scope(net, mirrored).raise_if_bad()
    assert str(error.value) == (
        f"2 of 2 trainable variables of 'net' were created outside {MIRRORED}: net/head/kernel, net/head/bias "
        f"(under no strategy). TensorFlow would train them on one device, or fail later with {MIXING}. "
        f"{BUILD_INSIDE} `kde.adopt(model, strategy)` rebuilds one that exists there, with equal weights."
    )


def test_half_outside_counts_the_half(mirrored, api):
    body, head = keras.layers.Dense(2, name="body"), keras.layers.Dense(1, name="head")
    body.build((None, 3))
    with mirrored.scope():
        net = sequential(api, body, head)
    message = str(kde.check_scope(net, mirrored))
    assert message.startswith(
        f"2 of 4 trainable variables of 'net' were created outside {MIRRORED}: body/kernel, body/bias "
        "(under no strategy). "
    )


def test_unbuilt_model_made_outside_is_found_by_its_own_strategy(mirrored, api):
    net = api.Sequential([keras.layers.Dense(1)], name="net")
    message = str(kde.check_scope(net, mirrored))
    assert message.startswith(
        f"The model was created outside {MIRRORED}: net (under no strategy). TensorFlow would train"
    )
    assert BUILD_INSIDE in message


def test_functional_model_with_a_backbone_from_outside_names_the_backbone(mirrored, api):
    backbone = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="stem")], name="backbone")
    with mirrored.scope():
        inputs = keras.Input((3,))
        net = api.Model(inputs, keras.layers.Dense(1, name="head")(backbone(inputs)), name="net")
    report = kde.check_scope(net, mirrored)
    assert outside(report, "trainable") == ["backbone/stem/kernel", "backbone/stem/bias"]
    assert "2 of 4 trainable variables of 'net'" in str(report)


def test_frozen_backbone_is_named_as_non_trainable(mirrored):
    backbone = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="stem")], name="backbone")
    backbone.trainable = False
    with mirrored.scope():
        net = sequential(kde, backbone, keras.layers.Dense(1))
    assert "2 of 2 non-trainable variables of 'net' were created outside" in str(kde.check_scope(net, mirrored))


def test_subclassed_model_with_layers_in_lists_and_dicts_is_searched(mirrored, api):
    class Net(api.Model):
        def __init__(self):
            super().__init__(name="net")
            self.many = [keras.layers.Dense(2, name="first")]
            self.named = {"last": keras.layers.Dense(1, name="last")}

        def call(self, x):
            return self.named["last"](self.many[0](x))

    net = Net()
    net(X)
    report = kde.check_scope(net, mirrored)
    assert [path.removeprefix("net/") for path in outside(report, "trainable")] == [
        *("first/kernel", "first/bias", "last/kernel", "last/bias")
    ]


def test_optimizer_made_outside_is_refused_even_before_it_has_slots(mirrored, api):
    optimizer = keras.optimizers.Adam(name="adam")
    with mirrored.scope():
        net = sequential(api)
        net.compile(optimizer, "mse")
    report = kde.check_scope(net, mirrored)
    assert outside(report, "optimizer") == ["adam"]
    assert outside(report, "optimizer variable") == ["adam/iteration", "adam/learning_rate"]
    assert str(report) == (
        f"1 of 1 optimizer of 'net' was created outside {MIRRORED}: adam (under no strategy). TensorFlow would fail "
        f"with {MIXING} when the optimizer makes its slot variables (plain SGD has none). "
        "Make the optimizer, and call `compile`, inside `with strategy.scope():`."
    )


def test_the_optimizer_inside_a_loss_scale_optimizer_is_looked_at(mirrored):
    inner = keras.optimizers.Adam(name="adam")
    with mirrored.scope():
        net = sequential(kde)
        net.compile(keras.optimizers.LossScaleOptimizer(inner, name="scaled"), "mse")
    report = kde.check_scope(net, mirrored)
    assert outside(report, "optimizer") == ["adam"]
    assert "1 of 2 optimizers of 'net' was created outside" in str(report)


def test_optimizers_in_lists_and_dicts_of_a_model_are_looked_at(mirrored):
    with mirrored.scope():
        net = sequential(kde)
        net.critics = [keras.optimizers.SGD(name="inside")]
    net.critics.append(keras.optimizers.Adam(name="of_a_list"))
    net.of = {"actor": {"slow": keras.optimizers.Adam(name="of_a_dict")}}
    net.again = net.critics[1]
    assert [name for name, _ in optimizers(net)] == ["again", "critics[0]", "of['actor']['slow']"]
    report = kde.check_scope(net, mirrored)
    assert outside(report, "optimizer") == ["of_a_list", "of_a_dict"]


def test_metric_made_outside_is_found_before_the_first_step(mirrored, api):
    auc = keras.metrics.AUC(name="auc", num_thresholds=3)
    with mirrored.scope():
        net = sequential(api)
        net.compile("sgd", "mse", weighted_metrics=[auc])
    report = kde.check_scope(net, mirrored)
    assert len(outside(report, "metric variable")) == 4
    assert str(report).endswith(
        "(under no strategy). All replicas would write to one copy, in no order. "
        "Make the metrics, and call `compile`, inside `with strategy.scope():`."
    )


def test_metrics_tracked_by_the_model_and_by_nested_models_are_found(mirrored, api):
    class Inner(keras.Model):
        def __init__(self, metric):
            super().__init__()
            self.seen = metric

        def call(self, x):
            return x

    class Net(api.Model):
        def __init__(self, metric, inner):
            super().__init__(name="net")
            self.own, self.inner, self.head = metric, inner, keras.layers.Dense(1)

        def call(self, x):
            return self.head(self.inner(x))

    own, nested = keras.metrics.Mean(name="own"), keras.metrics.Mean(name="nested")
    with mirrored.scope():
        net = Net(own, Inner(nested))
    assert outside(kde.check_scope(net, mirrored), "metric variable") == [
        *("own/total", "own/count", "nested/total", "nested/count")
    ]


def test_seed_made_outside_is_named(mirrored, api):
    dropout = keras.layers.Dropout(0.5, name="drop")
    with mirrored.scope():
        net = sequential(api, dropout, keras.layers.Dense(1))
    message = str(kde.check_scope(net, mirrored))
    assert re.match(
        r"1 of 1 seed state of 'net' was created outside MirroredStrategy \(2 replicas\): "
        r"\S*seed_generator_state \(under no strategy\)\. All replicas would write to one copy, in no order\. ",
        message,
    )
    assert BUILD_INSIDE in message


def test_tf_variables_that_a_layer_holds_are_named_by_attribute(mirrored, api):
    class Counts(keras.Layer):
        def __init__(self):
            super().__init__(name="counts")
            self.steps, self._private = tf.Variable(0), tf.Variable(0)
            self.more = {"a": [tf.Variable(1.0), 2]}
            self.rng = tf.random.Generator.from_seed(1)

        def call(self, x):
            return x

    layer = Counts()
    with mirrored.scope():
        net = sequential(api, layer, keras.layers.Dense(1))
    report = kde.check_scope(net, mirrored)
    names = ["steps", "_private", "rng/state", "more/a/0"]
    assert outside(report, "tf.Variable") == [f"net/counts/{name}" for name in names]
    assert "4 of 4 tf.Variables of 'net' were created outside" in str(report)


def test_everything_that_is_outside_is_said_in_one_message(mirrored):
    net = sequential(keras)
    net.compile("adam", "mse")
    message = str(kde.check_scope(net, mirrored))
    assert message.count("created outside") == 3
    assert "2 of 2 trainable variables" in message
    assert "1 of 1 optimizer of 'net'" in message
    assert "2 of 2 metric variables of 'net' were created outside MirroredStrategy (2 replicas): loss/total" in message


def test_long_lists_name_five_and_count_the_rest(mirrored):
    net = sequential(keras, *(keras.layers.Dense(3, name=f"d{i}") for i in range(8)))
    assert (
        "16 of 16 trainable variables of 'net' were created outside MirroredStrategy (2 replicas): "
        "net/d0/kernel, net/d0/bias, net/d1/kernel, net/d1/bias, net/d2/kernel and 11 more (under no strategy)."
    ) in str(kde.check_scope(net, mirrored))


# Other strategies than the one asked about


def test_another_strategy_is_named(mirrored, strategies, api):
    with strategies.get("mirrored3").scope():
        net = sequential(api)
    assert (
        f"were created outside {MIRRORED}: net/head/kernel, net/head/bias (under MirroredStrategy (3 replicas)). "
    ) in str(kde.check_scope(net, mirrored))


def test_two_strategies_on_equal_devices_are_told_apart(mirrored):
    other = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with other.scope():
        net = sequential(keras)
    message = str(kde.check_scope(net, mirrored))
    assert f"net/head/kernel, net/head/bias (under another {MIRRORED})." in message
    assert (
        "Two MirroredStrategy objects are two strategies, even on the same devices: make one, and use it everywhere "
        "(`kde.pick_strategy` returns the same object for the same devices)."
    ) in message


def test_variables_of_several_strategies_are_listed_by_strategy(mirrored, strategies):
    layers = [keras.layers.Dense(1, name=name) for name in ("none", "one", "right")]
    layers[0].build((None, 3))
    with strategies.get("one_device").scope():
        layers[1].build((None, 1))
    with mirrored.scope():
        net = sequential(keras, *layers)
    assert (
        "4 of 6 trainable variables of 'net' were created outside MirroredStrategy (2 replicas): "
        "none/kernel, none/bias (under no strategy); one/kernel, one/bias (under OneDeviceStrategy (1 replica))."
    ) in str(kde.check_scope(net, mirrored))


def test_variables_under_a_strategy_in_a_model_under_none_are_refused(mirrored, api):
    head = keras.layers.Dense(1, name="head")
    with mirrored.scope():
        head.build((None, 3))
    net = sequential(api, head)
    assert str(kde.check_scope(net, None)) == (
        "2 of 2 trainable variables of 'net' were created under a strategy, while it runs under none: "
        f"head/kernel, head/bias (under {MIRRORED}). TensorFlow would fail in the first step with a TypeError about a "
        "MirroredVariable. Build and compile the model inside `with strategy.scope():`. "
        "`kde.adopt(model, strategy)` rebuilds one that exists there, with equal weights."
    )


def test_nested_model_of_another_strategy_is_refused_before_it_is_built(mirrored, strategies):
    with strategies.get("mirrored3").scope():
        inner = kde.Sequential([keras.layers.Dense(1)], name="inner")
    with mirrored.scope():
        net = kde.Sequential([inner], name="net")
    message = str(kde.check_scope(net, mirrored))
    assert f"The model was created outside {MIRRORED}: inner (under MirroredStrategy (3 replicas))." in message


def test_strategies_are_described_by_name_and_size(strategies):
    assert describe_strategy(None) == describe_strategy(tf.distribute.get_strategy()) == "no strategy"
    assert describe_strategy(strategies.get("one_device")) == "OneDeviceStrategy (1 replica)"
    assert describe_strategy(strategies.get("mirrored3")) == "MirroredStrategy (3 replicas)"


# The report is values


def test_report_is_frozen_and_says_where_each_thing_lives(mirrored):
    net = sequential(keras)
    report = kde.check_scope(net, mirrored)
    assert report == ScopeReport(
        "net",
        MIRRORED,
        (
            ScopeEntry("net", "model", "no strategy", inside=False),
            ScopeEntry("net/head/kernel", "trainable", "no strategy", inside=False),
            ScopeEntry("net/head/bias", "trainable", "no strategy", inside=False),
        ),
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.entries[0].inside = True


def test_only_models_and_layers_are_checked(mirrored):
    with pytest.raises(TypeError, match="model must be a Keras model or layer, got 'net'"):
        kde.check_scope("net", mirrored)


# ScopeGuard


def run(net, method, guard):
    if method == "fit":
        return net.fit(X, Y, batch_size=4, verbose=0, callbacks=[guard])
    if method == "evaluate":
        return net.evaluate(X, Y, batch_size=4, verbose=0, callbacks=[guard])
    return net.predict(X, batch_size=4, verbose=0, callbacks=[guard])


METHODS = pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])


@pytest.mark.parametrize("method", rotating(["fit", "evaluate", "predict"], ["fit"]))
def test_guard_lets_a_model_in_scope_pass(mirrored, api, method):
    with mirrored.scope():
        net = sequential(api)
        net.compile("adam", "mse", metrics=["mae"])
    run(net, method, kde.ScopeGuard())
    run(net, method, kde.ScopeGuard(mirrored))


@METHODS
def test_guard_stops_a_model_made_outside_before_the_first_step(mirrored, api, method):
    net = sequential(api)
    net.compile("sgd", "mse")
    before = net.get_weights()
    with pytest.raises(
        kde.ScopeError, match=r"^2 of 2 trainable variables of 'net' were created outside MirroredStrategy \(2 rep"
    ):
        run(net, method, kde.ScopeGuard(mirrored))
    assert int(net.optimizer.iterations) == 0
    np.testing.assert_array_equal(before[0], net.get_weights()[0])


@METHODS
def test_guard_without_a_strategy_refuses_a_model_made_under_none(api, method):
    net = sequential(api)
    net.compile("sgd", "mse")
    with pytest.raises(kde.ScopeError) as error:
        run(net, method, kde.ScopeGuard())
    assert str(error.value) == (
        f"'net' was made under no strategy, so `{method}` would run it on one device. {BUILD_INSIDE} "
        "`kde.adopt(model, strategy)` rebuilds one that exists there, with equal weights. "
        "If one device is what you want, say so: `ScopeGuard(tf.distribute.get_strategy())`."
    )


def test_guard_without_a_strategy_asks_for_the_scope_that_is_entered(mirrored):
    net = sequential(keras)
    net.compile("sgd", "mse")
    with mirrored.scope(), pytest.raises(kde.ScopeError, match=r"created outside MirroredStrategy \(2 replicas\)"):
        run(net, "predict", kde.ScopeGuard())


def test_guard_told_that_one_device_is_wanted_lets_it_pass(api):
    guard = kde.ScopeGuard(tf.distribute.get_strategy())
    net = sequential(api)
    net.compile("sgd", "mse")
    run(net, "fit", guard)


def test_guard_refuses_sgd_made_outside_which_tensorflow_lets_pass(mirrored):
    optimizer = keras.optimizers.SGD(name="sgd")
    with mirrored.scope():
        net = sequential(keras)
        net.compile(optimizer, "mse")
    net.fit(X, Y, batch_size=4, verbose=0)  # fault 16: stock Keras says nothing
    with pytest.raises(kde.ScopeError, match="1 of 1 optimizer of 'net' was created outside"):
        run(net, "fit", kde.ScopeGuard())


def test_guard_sees_a_metric_made_outside_in_validation_too(mirrored):
    metric = keras.metrics.MeanAbsoluteError(name="mae")
    with mirrored.scope():
        net = sequential(keras)
        net.compile("sgd", "mse", metrics=[metric])
    with pytest.raises(kde.ScopeError, match="2 of 4 metric variables of 'net' were created outside"):
        run(net, "evaluate", kde.ScopeGuard())


# Strategies that need servers, in a process of their own


OTHER_STRATEGIES = """
import socket, sys
import keras, numpy as np, tensorflow as tf
import keras_dist_ext as kde
from keras_dist_ext.training.adoption.adopt import adopt
from keras_dist_ext.strategy.scope import describe_strategy

def addresses(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    found = ["127.0.0.1:%d" % s.getsockname()[1] for s in sockets]
    [s.close() for s in sockets]
    return found

def parameter_server():
    found = addresses(3)
    cluster = tf.train.ClusterSpec({"worker": found[:1], "ps": found[1:]})
    for job, task in (("worker", 0), ("ps", 0), ("ps", 1)):
        servers.append(tf.distribute.Server(cluster, job_name=job, task_index=task, protocol="grpc"))
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(cluster, rpc_layer="grpc")
    partitioner = tf.distribute.experimental.partitioners.FixedShardsPartitioner(2)
    return tf.distribute.experimental.ParameterServerStrategy(resolver, variable_partitioner=partitioner)

servers = []
for make in (tf.distribute.MultiWorkerMirroredStrategy, parameter_server):
    strategy = make()  # the second renames all devices of the process
    layers = [keras.Input((4,)), keras.layers.Dense(4, name="head"), keras.layers.Dropout(0.1)]
    net = keras.Sequential(layers, name="net")
    net.compile(keras.optimizers.Adam(name="adam"), "mse")
    net.optimizer.build(net.trainable_variables)
    print(describe_strategy(strategy))
    print(str(kde.check_scope(net, strategy)).partition(":")[0])
    adopted = adopt(net, strategy)
    print(type(adopted.layers[0].kernel.value).__name__, kde.check_scope(adopted, strategy).ok)
    whole = [tf.convert_to_tensor(v.value).numpy() for v in adopted.weights]  # of all shards
    print(all(np.array_equal(v.numpy(), w) for v, w in zip(net.weights, whole)))
    back = adopt(adopted, tf.distribute.get_strategy())
    print(all(np.array_equal(v.numpy(), w.numpy()) for v, w in zip(net.weights, back.weights)))
sys.stdout.flush()
os._exit(0)  # in-process servers cannot be stopped
"""


@pytest.mark.slow
def test_multi_worker_and_parameter_server_variables_are_recognised():
    # A process of its own: the servers stay for as long as it lives.
    ran = subprocess.run(
        [sys.executable, "-c", f"import os\n{OTHER_STRATEGIES}"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    assert ran.stdout.splitlines() == [
        "MultiWorkerMirroredStrategy (1 worker, 1 replica)",
        "2 of 2 trainable variables of 'net' were created outside MultiWorkerMirroredStrategy (1 worker, 1 replica)",
        *("MirroredVariable True", "True", "True"),
        "ParameterServerStrategy (1 worker, 2 parameter servers)",
        "2 of 2 trainable variables of 'net' were created outside "
        "ParameterServerStrategy (1 worker, 2 parameter servers)",
        *("ShardedVariable True", "True", "True"),
    ], ran.stderr[-3000:]


MAKES = {
    "SGD": lambda: keras.optimizers.SGD(0.1),
    "Adam with a schedule": lambda: keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)),
    "a loss scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01)),
}


@pytest.mark.parametrize("name", rotating(MAKES, ["SGD", "a loss scale"]))
def test_compile_outside_of_scopes_moves_new_optimizers_and_metrics_into_the_models(name, mirrored):
    model = kde.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)], strategy=mirrored)
    optimizer, metric = MAKES[name](), keras.metrics.MeanAbsoluteError()
    model.compile(optimizer, "mse", metrics=[metric])
    model.fit(np.ones((8, 3)), np.ones((8, 1)), verbose=0)
    assert model.optimizer is optimizer
    assert kde.check_scope(model, mirrored).ok
    assert int(keras.ops.convert_to_numpy(optimizer.iterations)) == 1


class Unconfigured(keras.optimizers.SGD):
    """Its constructor takes what its config does not tell."""

    def __init__(self, factor):
        super().__init__(0.1 * factor)


class Halves(keras.optimizers.Optimizer):
    """Its config is Keras', and so tells nothing of its own."""

    def __init__(self, factor=2.0):
        super().__init__(0.1)
        self.factor = factor


def counted():
    metric = keras.metrics.Mean()
    metric.update_state(1.0)
    return metric


STAY = {
    "an optimizer of a constructor that takes more": lambda: Unconfigured(2.0),
    "an optimizer without a config of its own": lambda: Halves(3.0),
    "a metric that has counted": counted,
}


@pytest.mark.parametrize("name", STAY)
def test_what_cannot_be_made_anew_stays_as_it_is_and_is_found_outside(name, mirrored):
    model = kde.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)], strategy=mirrored)
    made = STAY[name]()
    before = dict(vars(made))
    if isinstance(made, keras.metrics.Metric):
        model.compile("sgd", "mse", metrics=[made])
    else:
        model.compile(made, "mse")
        assert outside(kde.check_scope(model, mirrored), "optimizer")
    assert {key: vars(made)[key] for key in before} == before


def test_an_optimizer_made_outside_is_refused_by_a_compile_inside_the_scope(mirrored):
    optimizer = keras.optimizers.Adam()
    with mirrored.scope():
        model = kde.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
        model.compile(optimizer, "mse")
    with pytest.raises(kde.ScopeError, match=r"1 of 1 optimizer .* outside MirroredStrategy \(2 replicas\)"):
        model.fit(np.ones((8, 3)), np.ones((8, 1)), verbose=0)


def test_an_optimizer_that_has_trained_another_model_is_refused(mirrored):
    stock = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    stock.compile(keras.optimizers.Adam(), "mse")
    stock.fit(np.ones((8, 3)), np.ones((8, 1)), verbose=0)
    model = kde.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)], strategy=mirrored)
    model.compile(stock.optimizer, "mse")
    with pytest.raises(kde.ScopeError, match="optimizer"):
        model.fit(np.ones((8, 3)), np.ones((8, 1)), verbose=0)
