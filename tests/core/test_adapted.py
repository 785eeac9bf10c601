"""Layers that were adapted to data before, outside of the scope, work in a model that is made inside."""

import re

import keras
import numpy as np
import odd_batch_runs
import pytest
import tensorflow as tf
from cases import rotating
from strategies import strategies
from two_workers import on_two_workers

import keras_dist_ext as kde
from keras_dist_ext._keras.strategies import strategy_of_variable
from keras_dist_ext._keras.variables import components
from keras_dist_ext.strategy.adapted import adapted_fingerprint
from keras_dist_ext.strategy.consistency import differences

X = np.random.default_rng(2).normal(2, 3, size=(22, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
WORDS = np.array(["a b", "b c d", "a d", "c", "d d"] * 4 + ["e", "a"])
CASES = {
    "Normalization": (X, keras.layers.Normalization),
    "Discretization": (X, lambda: keras.layers.Discretization(num_bins=4)),
    "TextVectorization": (WORDS, lambda: keras.layers.TextVectorization(output_mode="tf_idf")),
    "StringLookup": (WORDS, lambda: keras.layers.StringLookup(output_mode="one_hot")),
}


def train(lib, strategy, x, layer, size=8):
    keras.utils.set_random_seed(3)
    with strategy.scope():
        net = lib.Sequential(
            [
                keras.Input(x.shape[1:], dtype="string" if x.dtype.kind == "U" else None),
                layer,
                keras.layers.Rescaling(1.0),
                keras.layers.Dense(1),
            ]
        )
        net.compile(keras.optimizers.SGD(0.01), "mse")
    data = tf.data.Dataset.from_tensor_slices((x, Y)).batch(size)
    history = net.fit(data, epochs=2, verbose=0).history["loss"]
    return [history, net.predict(data, verbose=0), *(w.numpy() for w in net.weights)]


@pytest.mark.parametrize("name", rotating(CASES, ("Normalization", "TextVectorization")))
@pytest.mark.parametrize(
    ("kind", "size"),  # 22 examples: even or not, and one in the last batch
    rotating([("mirrored2", 8), ("mirrored4", 8), ("mirrored2", 7), ("mirrored4", 7)], [("mirrored2", 8)]),
)
def test_a_layer_adapted_outside_of_the_scope_computes_what_it_does_in_stock_keras(name, kind, size):
    x, make = CASES[name]
    ours, stock = make(), make()
    for layer in (ours, stock):
        layer.adapt(x)
    learnt = [v.numpy() for v in ours.variables]
    results = train(kde, strategies.get(kind), x, ours, size)
    expected = train(keras, strategies.get("default"), x, stock, size)
    for one, other in zip(results, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    for variable, value in zip(ours.variables, learnt, strict=True):
        assert strategy_of_variable(variable) is strategies.get(kind)
        for copy in components(variable):
            np.testing.assert_array_equal(copy.numpy(), value)


@pytest.mark.rotating
@pytest.mark.parametrize(
    "size", [pytest.param(n, marks=on_two_workers(odd_batch_runs.adapted_on_workers, n)) for n in (8, 7)]
)
def test_so_it_does_on_two_workers_that_adapt_it_alike(values, size):
    for found in values:
        for one, other in zip(found, odd_batch_runs.adapted(size), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_a_layer_that_was_moved_can_still_be_adapted_and_used_outside():
    layer = keras.layers.Normalization()
    layer.adapt(X)
    with strategies.get("mirrored2").scope():
        net = kde.Sequential([keras.Input((3,)), layer])
    net.predict(X, verbose=0)
    layer.adapt(2 * X)
    other = keras.layers.Normalization()
    other.adapt(2 * X)
    np.testing.assert_array_equal(layer(X), other(X))
    np.testing.assert_allclose(keras.Sequential([layer]).predict(X, verbose=0), other(X), rtol=1e-6)


def test_what_was_learnt_tells_workers_apart():
    def fingerprint(data):
        layer = keras.layers.StringLookup()
        layer.adapt(data)
        return adapted_fingerprint(keras.Sequential([keras.Input((1,), dtype="string"), layer]))

    assert fingerprint(WORDS) == fingerprint(WORDS)
    assert fingerprint(WORDS) != fingerprint(WORDS[:3])


def test_workers_whose_frozen_layers_differ_are_told_which():
    def fingerprint(value):
        frozen = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, kernel_initializer=value)])
        frozen.trainable = False
        return adapted_fingerprint(keras.Sequential([frozen, keras.layers.Dense(1)]))

    assert differences([fingerprint("ones"), fingerprint("ones")]) == []
    (found,) = differences([fingerprint("ones"), fingerprint("zeros")])
    assert re.fullmatch(r"frozen layer 1 is Dense \w{8} on worker 1, and Dense \w{8} on worker 0", found)


def pretrained(trainable=False):
    inputs = keras.Input((3,))
    hidden = keras.layers.BatchNormalization()(keras.layers.Dense(4, "tanh", name="hidden")(inputs))
    net = keras.Model(inputs, hidden)
    net.compile("sgd", "mse", metrics=["mae"])
    net.fit(X, np.repeat(Y, 4, 1), batch_size=11, shuffle=False, verbose=0)
    net.trainable = trainable
    return net


def trained_on_top(lib, strategy, backbone, **compiled):
    with strategy.scope():
        net = lib.Sequential([keras.Input((3,)), backbone, keras.layers.Dense(1)])
        net.compile(keras.optimizers.SGD(0.01), "mse", **compiled)
    history = net.fit(X, Y, batch_size=8, shuffle=False, epochs=2, verbose=0).history["loss"]
    return [history, net.predict(X, verbose=0), *(w.numpy() for w in net.weights)]


@pytest.mark.parametrize("kind", rotating(["mirrored2", "mirrored4"], [], slow=["mirrored2"]))
def test_a_frozen_backbone_made_outside_of_the_scope_trains_a_head_as_in_stock_keras(kind):
    results = []
    for lib, strategy in ((keras, strategies.get("default")), (kde, strategies.get(kind))):
        keras.utils.set_random_seed(3)
        backbone = pretrained()
        results.append(trained_on_top(lib, strategy, backbone))
        results[-1] += [backbone.predict(X, verbose=0)]  # it still works outside
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_layers_made_outside_that_are_trained_are_named_where_the_model_was_made_inside():
    with pytest.raises(kde.ScopeError, match="hidden/kernel.* Make the layers that hold them inside `with strategy.sc"):
        trained_on_top(kde, strategies.get("mirrored2"), pretrained(trainable=True))


@pytest.mark.parametrize("method", rotating(["fit", "evaluate", "predict"], ["fit"]))
def test_where_layers_that_are_trained_were_made_outside_those_that_are_not_stay_there_too(method):
    adapted = keras.layers.Normalization()
    adapted.adapt(X)
    frozen = keras.layers.Dense(4, trainable=False)
    outside = keras.Sequential([keras.Input((3,)), adapted, frozen, keras.layers.Dense(1, name="head")])
    with strategies.get("mirrored2").scope():
        net = kde.Sequential([*outside.layers])
        net.build((None, 3))
        net.compile("sgd", "mse")
    held = [variable.value for variable in outside.variables]
    with pytest.raises(kde.ScopeError, match="2 of 2 trainable variables .*head/kernel, .*head/bias "):
        getattr(net, method)(*(X, Y)[: 1 if method == "predict" else 2], verbose=0)
    assert all(one is v.value for one, v in zip(held, outside.variables, strict=True))
    assert {strategy_of_variable(variable) for variable in outside.variables} == {None}
