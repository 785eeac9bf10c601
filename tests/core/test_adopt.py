"""A model that exists is rebuilt under a strategy with all that it knows, or refused with the reason."""

import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import rotating
from versions import KERAS_VERSION

import keras_dist_ext as kde
from keras_dist_ext._keras.layers import flat_layers
from keras_dist_ext.training.adoption.adopt import adopt, clone_model, load_model
from keras_dist_ext.training.adoption.recipe import CannotRebuildError
from keras_dist_ext.training.adoption.variable_pairs import _read, assign, take_over_trainable
from keras_dist_ext.training.model import Functional

X = np.random.default_rng(0).normal(size=(16, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


class Net(keras.Model):
    def __init__(self, units, rate=0.0, **kwargs):
        super().__init__(**kwargs)
        self.units, self.rate = units, rate
        self.body = [keras.layers.Dense(units, activation="tanh"), keras.layers.Dropout(rate, seed=3)]
        self.head = keras.layers.Dense(1)

    def call(self, x, training=False):
        return self.head(self.body[1](self.body[0](x), training=training))

    def get_config(self):
        return {"units": self.units, "rate": self.rate, "name": self.name}


class OwnStep(keras.Model):
    steps = 0

    def train_step(self, data):
        type(self).steps += 1
        return super().train_step(data)


class OwnGraph(keras.Model):
    def __init__(self, units, **kwargs):
        inputs = keras.Input((3,))
        outputs = keras.layers.Dense(1)(keras.layers.Dense(units, name="body")(inputs))
        super().__init__(inputs=inputs, outputs=outputs, **kwargs)
        self.units = units

    def get_config(self):
        return {"units": self.units, "name": self.name}


class NoArguments(keras.Model):
    def __init__(self):
        super().__init__()
        self.head = keras.layers.Dense(1)

    def call(self, x):
        return self.head(x)


class OwnSequential(keras.Sequential):
    def predict_step(self, data):
        return super().predict_step(data) + 0.0


class KdeNet(kde.Model):
    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.body, self.head = keras.layers.Dense(units), keras.layers.Dense(1)

    def call(self, x):
        return self.head(self.body(x))

    def get_config(self):
        return {"units": self.units, "name": self.name}


def make_sequential(cls=keras.Sequential):
    return cls(
        [
            keras.Input((3,)),
            keras.layers.Dense(4, activation="tanh"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(1),
        ],
        name="net",
    )


def make_functional(cls=keras.Model):
    inputs = keras.Input((3,), name="x")
    twice = keras.layers.Dense(3, name="twice")
    x = twice(twice(inputs))
    return cls(inputs, keras.layers.Dense(1, name="head")(x) + x[:, :1], name="net")


def make_lazily():
    net = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(1)], name="net")
    net(X)
    return net


def called(net):
    net(X)
    return net


KINDS = {
    "sequential": (make_sequential, kde.Sequential),
    "sequential built by a call": (make_lazily, kde.Sequential),
    "functional": (make_functional, Functional),
    "subclassed": (lambda: called(Net(4, name="net")), Net),
    "without arguments": (lambda: called(NoArguments()), NoArguments),
    "functional with its own step": (lambda: make_functional(OwnStep), OwnStep),
    "functional with its own constructor": (lambda: OwnGraph(4, name="net"), OwnGraph),
    "sequential with its own step": (lambda: make_sequential(OwnSequential), OwnSequential),
    "ours, sequential": (lambda: make_sequential(kde.Sequential), kde.Sequential),
    "ours, functional": (lambda: make_functional(kde.Model), Functional),
    "ours, subclassed": (lambda: called(KdeNet(4, name="net")), KdeNet),
}


QUICK = ("functional with its own step",)


@pytest.fixture(params=rotating(KINDS, QUICK))
def kind(request):
    return KINDS[request.param]


def assert_equal(one, other):
    assert [v.path for v in one.weights] == [v.path for v in other.weights]
    for v, w in zip(one.variables, other.variables, strict=True):
        assert v.dtype == w.dtype
        assert v.trainable == w.trainable
        np.testing.assert_array_equal(v.numpy(), w.numpy(), err_msg=v.path)


def assert_equal_optimizers(one, other):
    assert type(one) is type(other)
    assert [v.path for v in one.variables] == [v.path for v in other.variables]
    for v, w in zip(one.variables, other.variables, strict=True):
        np.testing.assert_array_equal(v.numpy(), w.numpy(), err_msg=v.path)


def fit(net, **arguments):
    return net.fit(X, Y, batch_size=8, shuffle=False, verbose=0, **arguments)


# Every kind of model


def test_every_kind_of_model_comes_out_equal_and_in_scope(mirrored, kind):
    make, cls = kind
    net = make()
    net.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    fit(net)
    before = net.get_weights()
    adopted = adopt(net, mirrored)
    assert isinstance(adopted, cls)
    assert isinstance(adopted, kde.Model)
    assert adopted.name == net.name
    kde.check_scope(adopted, mirrored).raise_if_bad()
    if cls is not OwnGraph:  # whose constructor names its layers anew
        assert_equal(net, adopted)
        assert_equal_optimizers(net.optimizer, adopted.optimizer)
    np.testing.assert_allclose(net.predict(X, verbose=0), adopted.predict(X, verbose=0), rtol=1e-5, atol=1e-6)
    fit(adopted)
    for value, now in zip(before, net.get_weights(), strict=True):
        np.testing.assert_array_equal(value, now)  # nothing is shared with the model that was given


@pytest.mark.parametrize("before", ["default", "one_device", "mirrored2", "mirrored3"])
@pytest.mark.parametrize("after", ["default", "one_device", "mirrored2", "mirrored4"])
def test_any_strategy_can_follow_any_other(strategies, before, after):
    with strategies.get(before).scope():
        net = make_functional()
        net.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        net.optimizer.build(net.trainable_variables)
    adopted = adopt(net, strategies.get(after))
    assert_equal(net, adopted)
    assert_equal_optimizers(net.optimizer, adopted.optimizer)
    kde.check_scope(adopted, strategies.get(after)).raise_if_bad()


def test_training_goes_on_as_it_would_have_on_one_device(mirrored):
    net = make_functional()
    net.compile(keras.optimizers.Adam(0.01), "mse")
    fit(net, epochs=3)
    adopted = adopt(net, mirrored)
    assert adopted.optimizer.iterations.numpy() == 6
    fit(net, epochs=3)
    fit(adopted, epochs=3)
    for v, w in zip(net.weights, adopted.weights, strict=True):
        np.testing.assert_allclose(v.numpy(), w.numpy(), rtol=1e-4, atol=1e-6)


def test_the_users_methods_stay_in_force(mirrored):
    net = make_functional(OwnStep)
    net.compile("sgd", "mse")
    adopted = adopt(net, mirrored)
    OwnStep.steps = type(adopted).steps = 0
    fit(adopted)
    assert type(adopted).steps > 0


def test_the_class_of_an_adopted_model_has_the_users_name_and_is_made_once(mirrored):
    one, other = (adopt(called(Net(4)), mirrored) for _ in range(2))
    assert type(one) is type(other)
    assert type(one) is not Net
    assert (type(one).__name__, type(one).__module__, type(one).__qualname__) == ("Net", __name__, "Net")
    assert Net.__bases__ == (keras.Model,)


# Graphs


def test_shared_layers_stay_shared_and_equal_names_in_nested_models_are_kept_apart(mirrored):
    shared = keras.layers.Dense(3, name="same")
    inner = keras.Sequential([keras.layers.Dense(2, name="other"), keras.layers.Dense(3, name="same")], name="inner")
    inputs = keras.Input((3,))
    net = keras.Model(inputs, shared(inner(shared(inputs))))
    adopted = adopt(net, mirrored)
    assert len(adopted.trainable_variables) == len(net.trainable_variables) == 6
    assert_equal(net, adopted)
    assert type(adopted.get_layer("inner")) is keras.Sequential
    np.testing.assert_allclose(net.predict(X, verbose=0), adopted.predict(X, verbose=0), rtol=1e-5)


def test_a_layer_shared_between_nested_models_stays_one(mirrored):
    shared = keras.layers.Dense(3)
    left, right = (keras.Sequential([keras.Input((3,)), shared], name=name) for name in ("left", "right"))
    inputs = keras.Input((3,))
    adopted = adopt(keras.Model(inputs, left(inputs) + right(inputs)), mirrored)
    assert adopted.get_layer("left").layers[0] is adopted.get_layer("right").layers[0]
    assert len(adopted.weights) == 2


@pytest.mark.slow
def test_inputs_and_outputs_keep_their_structure(mirrored):
    inputs = {"a": keras.Input((2,), name="a"), "b": keras.Input((1,), name="b", dtype="int32")}
    embedded = keras.layers.Flatten()(keras.layers.Embedding(5, 2)(inputs["b"]))
    both = keras.layers.Concatenate()([inputs["a"], embedded])
    net = keras.Model(inputs, {"p": keras.layers.Dense(1, name="p")(both), "q": keras.layers.Dense(2, name="q")(both)})
    net.compile("adam", {"p": "mse", "q": "mae"}, metrics={"p": ["mae"]}, loss_weights={"p": 1.0, "q": 0.5})
    data = {"a": X[:, :2], "b": np.arange(16)[:, None] % 5}
    target = {"p": Y, "q": X[:, :2]}
    net.fit(data, target, batch_size=8, verbose=0)
    adopted = adopt(net, mirrored)
    assert adopted.input_shape == net.input_shape
    assert adopted.output_names == net.output_names
    one, other = net.evaluate(data, target, verbose=0), adopted.evaluate(data, target, verbose=0)
    np.testing.assert_allclose(one, other, rtol=1e-5)
    assert [m.name for m in net.metrics] == [m.name for m in adopted.metrics]


def test_a_variable_that_the_graph_uses_itself_becomes_the_new_one(mirrored):
    inputs = keras.Input((3,))
    tied = keras.layers.Dense(3, use_bias=False)
    net = keras.Model(inputs, keras.ops.matmul(tied(inputs), tied.kernel))
    net.compile("sgd", "mse")
    adopted = adopt(net, mirrored)
    before = net.predict(X, verbose=0)
    adopted.fit(X, X, batch_size=8, verbose=0)
    assert not np.allclose(before, adopted.predict(X, verbose=0))
    kernel = adopted.weights[0].numpy()
    np.testing.assert_allclose(adopted.predict(X, verbose=0), X @ kernel @ kernel, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(before, net.predict(X, verbose=0))


def test_a_variable_is_found_in_whatever_layer_before_the_operation_has_it(mirrored):
    inputs = keras.Input((3,))
    first = keras.layers.Dense(4)
    second = keras.layers.Dense(2)
    net = keras.Model(inputs, second(first(inputs)) + second.bias, name="net")
    second.bias.assign([1.0, 2.0])
    adopted = adopt(net, mirrored)
    np.testing.assert_array_equal(adopted(X), net(X))
    adopted.layers[2].bias.assign([0.0, 0.0])
    np.testing.assert_allclose(adopted(X), net(X) - 2 * np.array([1.0, 2.0]), rtol=1e-5, atol=1e-5)


def test_a_model_that_builds_itself_is_not_built_again(mirrored):
    class Built(NoArguments):
        def __init__(self):
            super().__init__()
            self.head = keras.layers.Dense(1, name="head")
            self.head.build((None, 3))
            self.built = True

    net = Built()
    assert_equal(net, adopt(net, mirrored))


def test_flags_go_down_to_whatever_a_layer_holds(mirrored):
    old, new = keras.layers.Dense(1), keras.layers.Dense(1)
    old.trainable = False
    take_over_trainable([(old, new)])
    assert not new.trainable


def test_a_variable_of_no_layer_in_the_graph_is_refused(mirrored):
    stray = keras.Variable(np.eye(3, dtype="float32"), name="stray")
    inputs = keras.Input((3,))
    net = keras.Model(inputs, keras.ops.matmul(inputs, stray), name="net")
    with pytest.raises(kde.ScopeError, match="an operation uses the variable 'stray', which belongs to no layer"):
        adopt(net, mirrored)


def test_a_functional_model_in_a_stack_is_made_again(mirrored):
    net = keras.Sequential([keras.Input((3,)), make_functional(), keras.layers.Dense(2)])
    adopted = adopt(net, mirrored)
    assert_equal(net, adopted)
    assert type(adopted.layers[0]) is type(net.layers[0])
    np.testing.assert_array_equal(adopted(X), net(X))


def test_an_operation_that_cannot_be_made_again_is_shared(mirrored):
    class Scale(keras.Operation):
        def __init__(self, by):
            super().__init__()
            self.by = by

        def call(self, x):
            return x * self.by

        def compute_output_spec(self, x):
            return keras.KerasTensor(x.shape, x.dtype)

        def get_config(self):
            raise NotImplementedError

    inputs = keras.Input((3,))
    net = keras.Model(inputs, Scale(3.0)(keras.layers.Dense(2)(inputs)), name="net")
    adopted = adopt(net, mirrored)
    assert_equal(net, adopted)
    np.testing.assert_array_equal(adopted(X), net(X))


# What a model knows besides its weights


def test_trainable_flags_are_taken_over_for_shared_layers_too(mirrored):
    shared = keras.layers.Dense(3, name="shared")
    left, right = (keras.Sequential([keras.Input((3,)), shared, keras.layers.Dense(3)], name=n) for n in ("l", "r"))
    inputs = keras.Input((3,))
    net = keras.Model(inputs, left(inputs) + right(inputs))
    right.trainable = False
    shared.trainable = True
    net.layers[1].layers[1].bias.trainable = False
    adopted = adopt(net, mirrored)
    assert [v.path for v in adopted.trainable_variables] == [v.path for v in net.trainable_variables]
    assert [layer.trainable for layer in flat_layers(adopted)] == [layer.trainable for layer in flat_layers(net)]
    assert_equal(net, adopted)


def test_wrapped_layers_keep_their_paths(mirrored):
    net = keras.Sequential([keras.Input((4, 3)), keras.layers.Bidirectional(keras.layers.LSTM(2))])
    assert_equal(net, adopt(net, mirrored))


def test_seeds_go_on_from_where_they_were(mirrored):
    net = keras.Sequential([keras.Input((3,)), keras.layers.Dropout(0.5, seed=1), keras.layers.Dense(1)])
    net.compile("sgd", "mse")
    fit(net)
    state = net.layers[0].seed_generator.state.numpy()
    assert state[1] > 0
    np.testing.assert_array_equal(adopt(net, mirrored).layers[0].seed_generator.state.numpy(), state)


def test_vocabularies_and_statistics_are_taken_over(mirrored):
    normalize = keras.layers.Normalization()
    normalize.adapt(X)
    net = keras.Sequential([keras.Input((3,)), normalize, keras.layers.Dense(1)])
    np.testing.assert_allclose(adopt(net, mirrored).predict(X, verbose=0), net.predict(X, verbose=0), rtol=1e-5)

    lookup = keras.layers.StringLookup(output_mode="multi_hot")
    lookup.adapt(tf.constant(["a", "b", "c"]))
    inputs = keras.Input((1,), dtype="string")
    words = keras.Model(inputs, keras.layers.Dense(1)(lookup(inputs)))
    text = tf.constant([["c"], ["a"], ["?"], ["b"]])
    np.testing.assert_allclose(adopt(words, mirrored).predict(text, verbose=0), words.predict(text, verbose=0))


def test_tf_variables_that_a_layer_holds_are_taken_over(mirrored):
    class Counts(keras.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.seen, self._last = tf.Variable(0), [tf.Variable("")]

        def call(self, x):
            return x

    net = keras.Sequential([keras.Input((3,)), Counts(), keras.layers.Dense(1)])
    net.layers[0].seen.assign(7)
    net.layers[0]._last[0].assign("a word")
    adopted = adopt(net, mirrored)
    assert adopted.layers[0].seen.numpy() == 7
    assert adopted.layers[0]._last[0].numpy() == b"a word"
    kde.check_scope(adopted, mirrored).raise_if_bad()


def test_what_a_first_step_has_made_is_made_again(mirrored):
    class Late(keras.Model):
        def train_step(self, data):
            if not hasattr(self, "steps"):
                self.scale = keras.layers.Dense(2, name="scale")
                self.scale.build((None, 3))
                self.steps = self.add_weight(shape=(), dtype="float32", initializer="ones", trainable=False, name="n")
                self.last = tf.Variable([4, 5], trainable=False)
                self.seen = keras.metrics.Mean(name="seen")
                self.note = "of the user's"
            self.steps.assign_add(1.0)
            return {}

    net = Late()
    net.train_step(None)
    net.built = True
    adopted = adopt(net, mirrored)
    assert_equal(net, adopted)
    assert float(adopted.steps.numpy()) == 2.0
    assert adopted.last.numpy().tolist() == [4, 5]
    assert adopted.last.dtype == tf.int32
    assert adopted.seen.name == "seen"
    assert adopted.seen is not net.seen
    kde.check_scope(adopted, mirrored).raise_if_bad()


def test_a_sum_over_replicas_is_taken_over_as_what_is_read_of_it(mirrored):
    with mirrored.scope():
        net = kde.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        how = {"synchronization": tf.VariableSynchronization.ON_READ, "aggregation": tf.VariableAggregation.SUM}
        net.layers[0].count = tf.Variable(0.0, trainable=False, **how)
    mirrored.run(lambda: net.layers[0].count.assign_add(2.0))
    assert _read(net.layers[0].count) == 4.0


def test_the_dtype_policy_is_taken_over(mirrored):
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        net = make_sequential()
    finally:
        keras.config.set_dtype_policy("float32")
    adopted = adopt(net, mirrored)
    assert adopted.dtype_policy.name == "mixed_bfloat16"
    assert {layer.compute_dtype for layer in adopted.layers} == {"bfloat16"}
    assert_equal(net, adopted)


def test_nan_weights_are_equal_too(mirrored):
    net = make_sequential()
    net.weights[0].assign(np.full((3, 4), np.nan))
    assert_equal(net, adopt(net, mirrored))


# Functions and classes of the user's


def test_lambdas_keep_their_globals_and_closures(mirrored):
    scale = 3.0
    net = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(2, activation=lambda x: tf.nn.relu(x) * scale),
            keras.layers.Lambda(lambda x: x * Y.mean() + np.pi),
        ]
    )
    adopted = adopt(net, mirrored)
    assert adopted.layers[1].function is net.layers[1].function
    assert adopted.layers[0].activation is net.layers[0].activation
    assert adopted.layers[1].function.__name__ == "<lambda>"
    np.testing.assert_allclose(net.predict(X, verbose=0), adopted.predict(X, verbose=0), rtol=1e-5)


def test_functions_of_the_same_name_are_told_apart(mirrored):
    def make(factor):
        def same(x):
            return x * factor

        return same

    class Two(keras.Layer):
        def __init__(self, first, second, **kwargs):
            super().__init__(**kwargs)
            self.first, self.second = keras.activations.get(first), keras.activations.get(second)

        def call(self, x):
            return self.first(x) - self.second(x)

        def get_config(self):
            functions = {name: keras.activations.serialize(getattr(self, name)) for name in ("first", "second")}
            return {**super().get_config(), **functions}

    net = keras.Sequential([keras.Input((3,)), Two(make(5.0), make(2.0)), keras.layers.Dense(1)])
    adopted = adopt(net, mirrored)
    assert adopted.layers[0].first is net.layers[0].first
    assert adopted.layers[0].second is net.layers[0].second
    assert net.layers[0].first.__name__ == "same"


def test_classes_that_nobody_registered_are_found(mirrored):
    class Shifted(keras.initializers.Initializer):
        def __call__(self, shape, dtype=None):
            return keras.ops.ones(shape, dtype)

        def get_config(self):
            return {}

    class Scale(keras.Layer):
        def __init__(self, initializer, **kwargs):
            super().__init__(**kwargs)
            self.initializer = keras.initializers.get(initializer)

        def build(self, shape):
            self.scale = self.add_weight(name="scale", shape=(shape[-1],), initializer=self.initializer)

        def call(self, x):
            return x * self.scale

        def get_config(self):
            return {**super().get_config(), "initializer": keras.initializers.serialize(self.initializer)}

    net = keras.Sequential([keras.Input((3,)), Scale(Shifted()), keras.layers.Dense(1)])
    assert_equal(net, adopt(net, mirrored))


def test_an_own_class_from_a_module_whose_name_begins_with_keras_is_found(mirrored):
    class Doubled(keras.Layer):
        def call(self, x):
            return x * 2

    Doubled.__module__ = "keras_of_mine"
    net = keras.Sequential([keras.Input((4, 3)), keras.layers.TimeDistributed(Doubled()), keras.layers.Flatten()])
    assert type(adopt(net, mirrored).layers[0].layer) is Doubled


# What was compiled


@pytest.mark.slow
def test_everything_given_to_compile_is_taken_over(mirrored):
    def loss(y_true, y_pred):
        return keras.ops.mean((y_true - y_pred) ** 2, axis=-1)

    metric = keras.metrics.MeanSquaredError(name="squares")
    net = make_sequential()
    net.compile(
        keras.optimizers.AdamW(0.02, weight_decay=0.1, clipnorm=1.0, use_ema=True),
        loss,
        loss_weights=[2.0],
        metrics=["mae", metric],
        weighted_metrics=[keras.metrics.MeanAbsoluteError(name="weighted")],
        run_eagerly=True,
        steps_per_execution=3,
    )
    fit(net)
    adopted = adopt(net, mirrored)
    assert adopted.loss is loss
    assert adopted.run_eagerly
    assert adopted.steps_per_execution == 3
    assert adopted.jit_compile == net.jit_compile
    assert adopted.optimizer.get_config() == net.optimizer.get_config()
    assert_equal_optimizers(net.optimizer, adopted.optimizer)
    assert all(m is not metric for m in adopted.metrics)
    weights = np.linspace(0, 1, 16)
    one, other = (m.evaluate(X, Y, sample_weight=weights, verbose=0, return_dict=True) for m in (net, adopted))
    assert list(one) == list(other) == ["loss", "mae", "squares", "weighted"]
    np.testing.assert_allclose(list(one.values()), list(other.values()), rtol=1e-5)


def test_a_metric_that_was_given_twice_stays_one(mirrored):
    net, metric = make_sequential(), keras.metrics.MeanAbsoluteError(name="error")
    net.compile("sgd", "mse", metrics=[metric], weighted_metrics=[metric])
    adopted = adopt(net, mirrored)
    (one,), (other,) = adopted._compile_metrics._user_metrics, adopted._compile_metrics._user_weighted_metrics
    assert one is other
    assert one is not metric


def test_a_learning_rate_changed_since_compile_is_kept(mirrored):
    net = make_sequential()
    net.compile(keras.optimizers.Adam(0.1), "mse")
    net.optimizer.learning_rate = 0.025
    assert adopt(net, mirrored).optimizer.learning_rate.numpy() == pytest.approx(0.025)


def test_a_schedule_goes_on(mirrored):
    net = make_sequential()
    net.compile(keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)), "mse")
    fit(net)
    assert float(adopt(net, mirrored).optimizer.learning_rate) == pytest.approx(0.05)


def test_the_loss_scale_and_the_inner_optimizer_are_taken_over(mirrored):
    net = make_sequential()
    net.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(), initial_scale=8.0), "mse")
    fit(net)
    net.optimizer.dynamic_scale.assign(4.0)
    adopted = adopt(net, mirrored)
    assert adopted.optimizer.dynamic_scale.numpy() == 4.0
    assert_equal_optimizers(net.optimizer, adopted.optimizer)


def test_mixed_float16_does_not_wrap_the_optimizer_twice_nor_against_the_users_will(mirrored):
    keras.config.set_dtype_policy("mixed_float16")
    try:
        nets = [make_sequential(), make_sequential()]
    finally:
        keras.config.set_dtype_policy("float32")
    for net, scaled in zip(nets, (True, False), strict=True):
        net.compile("sgd", "mse", auto_scale_loss=scaled)
        adopted = adopt(net, mirrored)
        assert isinstance(adopted.optimizer, keras.optimizers.LossScaleOptimizer) == scaled
        assert not isinstance(getattr(adopted.optimizer, "inner_optimizer", None), keras.optimizers.LossScaleOptimizer)


def test_an_optimizer_built_before_layers_were_frozen_keeps_its_slots(mirrored):
    net = make_functional()
    net.compile("adam", "mse")
    fit(net)
    net.get_layer("twice").trainable = False
    assert_equal_optimizers(net.optimizer, adopt(net, mirrored).optimizer)


def test_a_model_that_is_not_compiled_stays_so(mirrored):
    assert not adopt(make_sequential(), mirrored).compiled


def test_compile_false_leaves_the_compile_state(mirrored):
    net = make_sequential()
    net.compile("adam", "mse")
    assert not adopt(net, mirrored, compile=False).compiled


class Gan(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.left, self.right = keras.layers.Dense(1), keras.layers.Dense(1)

    def call(self, x):
        return self.left(x) + self.right(x)

    def get_config(self):
        return {"name": self.name}

    def compile(self, left_optimizer, right_optimizer):
        super().compile(optimizer=None)
        self.left_optimizer, self.right_optimizer = left_optimizer, right_optimizer


class RepeatableGan(Gan):
    def get_compile_config(self):
        return {
            name: keras.saving.serialize_keras_object(getattr(self, name))
            for name in ("left_optimizer", "right_optimizer")
        }

    def compile_from_config(self, config):
        self.compile(**{name: keras.saving.deserialize_keras_object(value) for name, value in config.items()})


def test_a_compile_of_the_users_own_is_repeated_if_it_says_how(mirrored):
    net = called(RepeatableGan())
    net.compile(keras.optimizers.Adam(0.1), keras.optimizers.SGD(0.2, momentum=0.9))
    net.left_optimizer.build(net.left.trainable_variables)
    net.right_optimizer.build(net.right.trainable_variables)
    net.left_optimizer.variables[2].assign(np.ones((3, 1)))
    adopted = adopt(net, mirrored)
    assert_equal_optimizers(net.left_optimizer, adopted.left_optimizer)
    assert_equal_optimizers(net.right_optimizer, adopted.right_optimizer)
    kde.check_scope(adopted, mirrored).raise_if_bad()


class GanWithList(RepeatableGan):
    def compile(self, left_optimizer, right_optimizer):
        super().compile(left_optimizer, right_optimizer)
        del self.left_optimizer, self.right_optimizer
        self.both = [left_optimizer, right_optimizer]

    def get_compile_config(self):
        names = ("left_optimizer", "right_optimizer")
        return dict(zip(names, map(keras.saving.serialize_keras_object, self.both), strict=True))


def test_the_state_of_optimizers_in_a_list_is_taken_over(mirrored):
    net = called(GanWithList())
    net.compile(keras.optimizers.Adam(0.1), keras.optimizers.SGD(0.2, momentum=0.9))
    for optimizer, part in zip(net.both, (net.left, net.right), strict=True):
        optimizer.build(part.trainable_variables)
    net.both[0].variables[2].assign(np.ones((3, 1)))
    adopted = adopt(net, mirrored)
    for one, other in zip(net.both, adopted.both, strict=True):
        assert_equal_optimizers(one, other)
    kde.check_scope(adopted, mirrored).raise_if_bad()


def test_a_compile_of_the_users_own_is_refused_if_it_does_not(mirrored):
    net = called(Gan())
    net.compile(keras.optimizers.Adam(), keras.optimizers.SGD())
    with pytest.raises(
        kde.ScopeError, match=r"Gan has a `compile` of its own, and does not say how to repeat it\. Giv"
    ):
        adopt(net, mirrored)
    assert not adopt(net, mirrored, compile=False).compiled


# What cannot be rebuilt is refused


def refused(net, strategy):
    with pytest.raises(kde.ScopeError) as error:
        adopt(net, strategy)
    return str(error.value)


def test_an_unbuilt_model_is_refused(mirrored):
    assert refused(keras.Sequential([keras.layers.Dense(1)], name="net"), mirrored) == (
        "'net' is not built, so it has no weights to take over. Call it on a batch first; or make it inside "
        "`with strategy.scope():`; or, for new weights, use `kde.clone_model(model, strategy)`."
    )


def test_a_model_whose_arguments_nobody_recorded_is_refused(mirrored):
    class Unknown(keras.Model):
        def __init__(self, rate=0.1):
            super().__init__(name="net")
            self.head = keras.layers.Dense(1)

        def call(self, x):
            return self.head(x)

    assert refused(called(Unknown(rate=0.9)), mirrored) == (
        "kde.adopt cannot make 'net' (Unknown) again: Unknown has no `get_config`, so the arguments that it was "
        "made with are unknown: rate. Give it a `get_config` that returns the arguments of its constructor. "
        "Or build the model inside `with strategy.scope():`, and load its weights there."
    )


def test_a_layer_without_a_config_is_named(mirrored):
    class Opaque(keras.Layer):
        def __init__(self, thing):
            super().__init__(name="opaque")
            self.thing = thing

        def call(self, x):
            return x

    net = keras.Sequential([keras.Input((3,)), Opaque(object())], name="net")
    message = refused(net, mirrored)
    assert message.startswith("kde.adopt cannot make 'net' (Sequential) again: 'opaque' (Opaque) gives no config: ")
    assert "Give Opaque a `get_config` that returns the arguments of its constructor." in message


def test_a_config_that_does_not_fit_the_constructor_is_refused(mirrored):
    class Wrong(Net):
        def get_config(self):
            return {"units": self.units, "colour": "red"}

    message = refused(called(Wrong(2, name="net")), mirrored)
    assert message.startswith("kde.adopt cannot make 'net' (Wrong) again: 'net' (Wrong) cannot be made from its config")
    assert "colour" in message


def test_a_config_that_gives_other_weights_is_refused_by_their_names(mirrored):
    class Forgetful(Net):
        def __init__(self, width, **kwargs):
            super().__init__(width, **kwargs)

        def get_config(self):
            return {"width": 5}

    message = refused(called(Forgetful(2, name="net")), mirrored)
    assert "has the weights kernel (3, 2), bias (2,), and what its config makes has kernel (3, 5)" in message


def test_a_config_that_gives_other_layers_is_refused_by_their_classes(mirrored):
    class Either(keras.Model):
        def __init__(self, is_dense=True, **kwargs):
            super().__init__(**kwargs)
            self.head = keras.layers.Dense(2) if is_dense else keras.layers.EinsumDense("ab,bc->ac", 2)

        def call(self, x):
            return self.head(x)

        def get_config(self):
            return {"is_dense": True}

    message = refused(called(Either(False, name="net")), mirrored)
    assert "'net' holds 1 layers (EinsumDense), and what its config makes holds 1 (Dense)." in message


def test_a_class_that_fails_to_be_made_is_named_with_its_error(mirrored):
    class Once(NoArguments):
        is_made = False

        def __init__(self):
            if self.is_made:
                raise RuntimeError("there is one already.")
            super().__init__()

    net = called(Once())
    Once.is_made = True
    assert "`Once()` fails: RuntimeError: there is one already." in refused(net, mirrored)


def test_two_classes_of_one_name_are_refused(mirrored):
    def make():
        class Twice(keras.layers.Layer):
            def call(self, x):
                return 2.0 * x

        return Twice()

    class Holds(keras.layers.Layer):
        def __init__(self, one=None, other=None, **kwargs):
            super().__init__(**kwargs)
            self.one, self.other = one or make(), other or make()

        def call(self, x):
            return self.other(self.one(x))

        def get_config(self):
            return {**super().get_config(), "one": self.one, "other": self.other}

    net = keras.Sequential([keras.Input((3,)), Holds()], name="net")
    assert "holds two classes of the name Twice, and Keras' configs tell classes apart by name." in refused(
        net, mirrored
    )


def test_a_value_that_a_variable_does_not_keep_is_refused(monkeypatch):
    one, other = keras.Variable([1.0], name="one"), keras.Variable([0.0], name="other")
    monkeypatch.setattr(other, "assign", lambda value: None)
    with pytest.raises(CannotRebuildError, match="the variable 'one' did not keep its value of dtype float32"):
        assign(other, one)


def test_a_config_that_forgets_an_argument_is_refused(mirrored):
    class Sloppy(Net):
        def get_config(self):
            return {"units": self.units}

    assert_equal(*(lambda net: (net, adopt(net, mirrored)))(called(Sloppy(2, name="net"))))  # rate is at its default
    assert (
        "'net' (Sloppy) was made with rate=0.5, and what its config makes has rate=0.0. "
        "Have the `get_config` of Sloppy return rate."
    ) in refused(called(Sloppy(2, rate=0.5, name="net")), mirrored)


def test_a_nested_model_whose_arguments_nobody_recorded_is_refused(mirrored):
    class Scaled(keras.Model):
        def __init__(self, factor=2.0):
            super().__init__(name="scaled")
            self.factor = factor

        def call(self, x):
            return x * self.factor

    inputs = keras.Input((3,))
    net = keras.Model(inputs, keras.layers.Dense(1)(Scaled(3.0)(inputs)), name="net")
    assert "Scaled has no `get_config`, so the arguments that it was made with are unknown: factor." in refused(
        net, mirrored
    )


def test_a_metric_that_forgets_an_argument_is_refused(mirrored):
    class Above(keras.metrics.Metric):
        def __init__(self, limit=0.5, name="above", **kwargs):
            super().__init__(name=name, **kwargs)
            self.threshold = limit
            self.count = self.add_variable((), "zeros", name="count")

    net = make_sequential()
    net.compile("sgd", "mse", metrics=[Above(0.9)])
    assert (
        "the config of 'above' (Above) leaves out limit, which its constructor takes. "
        "Have the `get_config` of Above return limit."
    ) in refused(net, mirrored)


def test_a_nested_model_without_arguments_is_made_again(mirrored):
    inputs = keras.Input((3,))
    net = keras.Model(inputs, NoArguments()(inputs))
    adopted = adopt(net, mirrored)
    assert_equal(net, adopted)
    assert type(adopted.layers[1]) is NoArguments


def test_layers_that_are_attached_beside_the_graph_are_refused(mirrored):
    net = make_functional()
    net.extra = keras.layers.Dense(1)
    net.extra.build((None, 3))
    if KERAS_VERSION < (3, 15):  # such a layer is no part of the model (keras/src/models/functional.py)
        assert_equal(net, adopt(net, mirrored))
        return
    assert "kernel (3, 1), bias (1,) belong to layers that were attached to it beside its graph." in (
        refused(net, mirrored)
    )


def test_a_tf_variable_that_nothing_makes_again_is_refused(mirrored):
    net = make_sequential()
    net.layers[0].steps, net.layers[0].table = tf.Variable(7), tf.Variable([[1.0]])
    assert (
        "'dense' (Dense) has the tf.Variables steps (), table (1, 1), and what its config makes has none. "
        "Make them in its constructor or in `build`."
    ) in refused(net, mirrored).replace(net.layers[0].name, "dense")


def test_an_optimizer_that_nothing_makes_again_is_refused(mirrored):
    net = make_sequential()
    net.compile("adam", "mse")
    net.other_optimizer = keras.optimizers.SGD(name="other")
    assert (
        "its optimizer 'other' is the attribute other_optimizer, which neither its constructor nor its `compile` makes."
    ) in refused(net, mirrored)


def test_an_optimizer_of_other_variables_is_refused(mirrored):
    net = make_sequential()
    net.compile(keras.optimizers.Adam(name="adam"), "mse")
    other = keras.layers.Dense(1)
    other.build((None, 3))
    net.optimizer.build(other.trainable_variables)
    assert "its optimizer 'adam' trains variables that are not the model's." in refused(net, mirrored)


def test_scopes_of_two_strategies_are_not_nested(mirrored, strategies):
    with strategies.get("mirrored3").scope(), pytest.raises(kde.ScopeError) as error:
        adopt(make_sequential(), mirrored)
    assert str(error.value) == (
        "kde.adopt was called inside the scope of MirroredStrategy (3 replicas) for MirroredStrategy (2 replicas). "
        "TensorFlow does not nest scopes of two strategies: leave the first, or give its strategy."
    )


def test_a_model_of_another_strategy_is_not_read_inside_a_scope(mirrored, strategies):
    with strategies.get("mirrored3").scope():
        net = make_sequential()
    with mirrored.scope(), pytest.raises(kde.ScopeError) as error:
        adopt(net, mirrored)
    assert str(error.value) == (
        "kde.adopt was called inside the scope of MirroredStrategy (2 replicas), where the variables of 'net', which "
        "live under MirroredStrategy (3 replicas), cannot be read. Leave the scope."
    )


def test_only_models_are_adopted(mirrored):
    with pytest.raises(TypeError, match="kde.adopt takes a Keras model, and got Dense: <Dense"):
        adopt(keras.layers.Dense(1), mirrored)


# Cloning


def test_a_clone_has_new_weights_and_the_same_compile_arguments(mirrored, kind):
    make, cls = kind
    net = make()
    net.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    fit(net)
    adopted = clone_model(net, mirrored)
    assert isinstance(adopted, cls)
    assert isinstance(adopted, kde.Model)
    assert [v.shape for v in adopted.weights] == [v.shape for v in net.weights]
    assert not np.array_equal(adopted.weights[0].numpy(), net.weights[0].numpy())
    assert adopted.optimizer.iterations.numpy() == 0
    kde.check_scope(adopted, mirrored).raise_if_bad()
    fit(adopted)


def test_a_clone_lives_in_the_scope_that_is_entered_or_with_its_model(mirrored, strategies):
    with mirrored.scope():
        net = make_sequential(kde.Sequential)
    assert kde.check_scope(clone_model(net), mirrored).ok
    with strategies.get("mirrored3").scope():
        assert kde.check_scope(clone_model(net), strategies.get("mirrored3")).ok
    assert kde.check_scope(clone_model(make_sequential()), None).ok


@pytest.mark.parametrize("make", [make_sequential, make_functional])
def test_keras_own_clone_is_a_stock_sequential_or_a_functional_model_of_ours(make):
    ours = make({make_sequential: kde.Sequential, make_functional: kde.Model}[make])
    assert type(clone_model(ours)) is type(ours)
    # Should Keras begin to keep the class of a Sequential, what `kde.clone_model` says of it must go.
    assert (
        type(keras.models.clone_model(ours)) is {make_sequential: keras.Sequential, make_functional: Functional}[make]
    )


def test_an_unbuilt_model_can_be_cloned(mirrored):
    adopted = clone_model(keras.Sequential([keras.layers.Dense(1)]), mirrored)
    adopted.compile("sgd", "mse")
    fit(adopted)
    kde.check_scope(adopted, mirrored).raise_if_bad()


# Files


@pytest.mark.parametrize("make", rotating([make_sequential, make_functional], [make_functional]))
def test_a_file_of_stock_keras_is_loaded_as_ours_with_its_optimizer(tmp_path, mirrored, make):
    net = make()
    net.compile(
        keras.optimizers.Adam(0.01), keras.losses.MeanSquaredError(), metrics=[keras.metrics.MeanSquaredError()]
    )
    fit(net)
    net.save(tmp_path / "net.keras")
    adopted = load_model(tmp_path / "net.keras", mirrored)
    assert isinstance(adopted, kde.Model)
    assert_equal(net, adopted)
    for v, w in zip(net.optimizer.variables, adopted.optimizer.variables, strict=True):
        np.testing.assert_array_equal(v.numpy(), w.numpy())
    kde.check_scope(adopted, mirrored).raise_if_bad()
    fit(adopted)


@pytest.mark.parametrize("make", rotating([make_sequential, make_functional], [make_sequential]))
def test_a_file_of_ours_is_loaded_as_ours_with_its_optimizer(tmp_path, mirrored, make):
    with mirrored.scope():
        net = make({make_sequential: kde.Sequential, make_functional: kde.Model}[make])
        net.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    fit(net)
    net.save(tmp_path / "net.keras")
    adopted = load_model(tmp_path / "net.keras", mirrored)
    assert type(adopted) is type(net)
    for v, w in zip(net.variables, adopted.variables, strict=True):
        np.testing.assert_array_equal(v.numpy(), w.numpy())
    for v, w in zip(net.optimizer.variables, adopted.optimizer.variables, strict=True):
        np.testing.assert_array_equal(v.numpy(), w.numpy())
    kde.check_scope(adopted, mirrored).raise_if_bad()


def test_a_legacy_file_is_loaded_as_ours(tmp_path, mirrored):
    net = make_sequential()
    net.compile("adam", keras.losses.MeanSquaredError())
    net.save(tmp_path / "net.h5")
    adopted = load_model(tmp_path / "net.h5", mirrored)
    assert type(adopted) is kde.Sequential
    assert_equal(net, adopted)
    kde.check_scope(adopted, mirrored).raise_if_bad()
    fit(adopted)


def test_a_file_of_the_users_class_needs_custom_objects_as_in_keras(tmp_path, mirrored):
    net = called(Net(4, name="net"))
    net.compile("adam", "mse")
    fit(net)
    net.save(tmp_path / "net.keras")
    adopted = load_model(tmp_path / "net.keras", mirrored, custom_objects={"Net": Net})
    assert isinstance(adopted, Net)
    assert isinstance(adopted, kde.Model)
    for v, w in zip(net.weights, adopted.weights, strict=True):
        np.testing.assert_array_equal(v.numpy(), w.numpy())
    with pytest.raises(TypeError, match="Could not locate class 'Net'"):
        load_model(tmp_path / "net.keras", mirrored)


def test_an_adopted_model_is_saved_as_the_users_class(tmp_path, mirrored):
    adopted = adopt(called(Net(4, name="net")), mirrored)
    adopted.save(tmp_path / "net.keras")
    stock = keras.models.load_model(tmp_path / "net.keras", custom_objects={"Net": Net})
    assert type(stock) is Net
    for v, w in zip(stock.weights, adopted.weights, strict=True):
        np.testing.assert_array_equal(v.numpy(), w.numpy())


def test_an_adopted_model_of_a_registered_class_is_loaded_by_its_registered_name(tmp_path, mirrored):
    @keras.saving.register_keras_serializable(package="test_adopt")
    class Registered(Net):
        pass

    adopted = adopt(called(Registered(4)), mirrored)
    adopted.save(tmp_path / "net.keras")
    assert type(keras.models.load_model(tmp_path / "net.keras")) is Registered
    assert isinstance(load_model(tmp_path / "net.keras", mirrored), kde.Model)


def test_an_adopted_model_can_be_pickled(mirrored):
    net = called(Net(4, name="net"))
    net.compile("adam", "mse")
    fit(net)
    adopted = adopt(net, mirrored)
    again = pickle.loads(pickle.dumps(adopted))
    assert type(again) is type(adopted)
    for v, w in zip(adopted.weights, again.weights, strict=True):
        np.testing.assert_array_equal(v.numpy(), w.numpy())
    assert again.optimizer.iterations.numpy() == 2


def test_loading_without_compile_leaves_the_model_uncompiled(tmp_path, mirrored):
    net = make_sequential()
    net.compile("adam", "mse")
    net.save(tmp_path / "net.keras")
    assert not load_model(tmp_path / "net.keras", mirrored, compile=False).compiled


def test_loading_takes_the_scope_that_is_entered(tmp_path, mirrored, strategies):
    make_sequential().save(tmp_path / "net.keras")
    with mirrored.scope():
        assert kde.check_scope(load_model(tmp_path / "net.keras"), mirrored).ok
        with pytest.raises(kde.ScopeError, match="kde.load_model was called inside the scope of MirroredStrategy"):
            load_model(tmp_path / "net.keras", strategies.get("mirrored3"))
    assert kde.check_scope(load_model(tmp_path / "net.keras"), None).ok


def test_code_in_a_file_is_refused_unless_it_is_trusted(tmp_path, mirrored):
    net = keras.Sequential([keras.Input((3,)), keras.layers.Lambda(lambda x: x * 2)])
    net.save(tmp_path / "net.keras")
    with pytest.raises(ValueError, match="safe_mode=False"):
        load_model(tmp_path / "net.keras", mirrored)
    adopted = load_model(tmp_path / "net.keras", mirrored, safe_mode=False)
    np.testing.assert_allclose(adopted.predict(X, verbose=0), X * 2)
