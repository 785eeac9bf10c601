"""A process that has loaded this package trains stock models as one that has not, and finds the same names."""

import json
import subprocess
import sys

import pytest

PROGRAM = """
import copy, inspect, json, pickle, random
if {loads}:
    import keras_dist_ext as kde
    [getattr(kde, name) for name in kde.__all__]  # with all that they replace in Keras
import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

tf.config.experimental.enable_op_determinism()
x, y = load_digits(return_X_y=True)
x = (x[:150] / 16).astype("float32").reshape(-1, 8, 8, 1)
y = y[:150]


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 5

    def __getitem__(self, index):
        return x[30 * index : 30 * (index + 1)], y[30 * index : 30 * (index + 1)]


class OwnStep(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {{"loss": loss}}


def layers():
    return [
        keras.layers.RandomTranslation(0.1, 0.1), keras.layers.Conv2D(4, 3), keras.layers.BatchNormalization(),
        keras.layers.MaxPooling2D(), keras.layers.Flatten(), keras.layers.Dropout(0.3), keras.layers.Dense(10),
    ]


def results(strategy, model_class, data, **compiled):
    keras.utils.set_random_seed(3)
    with strategy.scope():
        inputs = keras.Input((8, 8, 1))
        outputs = inputs
        for layer in layers():
            outputs = layer(outputs)
        model = model_class(inputs, outputs)
        model.compile(
            keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=None if model_class is OwnStep else ["accuracy"], **compiled,
        )
    history = model.fit(*data, epochs=2, verbose=0, **({{}} if len(data) == 1 else {{"batch_size": 30}}))
    return [
        history.history, model.evaluate(*data, verbose=0, return_dict=True),
        [float(np.abs(w).sum()) for w in model.get_weights()], model.predict(x[:3], verbose=0).tolist(),
    ]


one, two = tf.distribute.get_strategy(), tf.distribute.MirroredStrategy(["CPU:0"])
found = {{
    "fit": results(one, keras.Model, (x, y)),
    "own step": results(one, OwnStep, (x, y)),
    "mirrored": results(two, keras.Model, (x, y)),
    "PyDataset": results(one, keras.Model, (Batches(),)),
    "run eagerly": results(one, OwnStep, (x[:30], y[:30]), run_eagerly=True),
    "draws": [
        float(tf.reduce_sum(draw)) for draw in (
            keras.random.normal((3,), seed=2), keras.random.dropout(tf.ones((8,)), 0.5, seed=1),
            tf.random.stateless_uniform((4,), [1, 2]),
        )
    ],
}}

from keras.src.backend.tensorflow import trainer
from keras.src.trainers.data_adapters import py_dataset_adapter

places = [keras, keras.layers, keras.losses, keras.metrics, keras.optimizers, keras.callbacks, keras.random, keras.ops,
          keras.utils, keras.saving, tf, tf.nn, tf.distribute, trainer]
classes = [value for place in places for value in vars(place).values() if inspect.isclass(value)]
for place in [*places, *dict.fromkeys(classes)]:
    name = getattr(place, "__qualname__", place.__name__)
    for key in dir(place):
        value = getattr(place, key, None)
        if callable(value) and not key.startswith("__"):
            try:
                signature = str(inspect.signature(value))
            except (TypeError, ValueError):
                signature = "none"
            found[f"{{place.__module__ if inspect.isclass(place) else ''}}.{{name}}.{{key}}"] = [
                signature.partition(" at 0x")[0], inspect.isclass(value), getattr(value, "__name__", None),
                getattr(value, "__module__", None), str(getattr(value, "__doc__", None))[:80].partition(" at 0x")[0],
            ]

adapter_random = py_dataset_adapter.random
found["identities"] = [
    isinstance(trainer.TFEpochIterator(x=x, distribute_strategy=one), trainer.TFEpochIterator),
    issubclass(trainer.TFEpochIterator, trainer.EpochIterator),
    inspect.ismodule(adapter_random), adapter_random.__name__, adapter_random.random is random.random,
    pickle.loads(pickle.dumps(keras.losses.mean_squared_error)) is keras.losses.mean_squared_error,
    type(pickle.loads(pickle.dumps(keras.losses.Dice()))).__name__,
    pickle.loads(pickle.dumps(keras.Model)) is keras.Model,
    pickle.loads(pickle.dumps(keras.random.SeedGenerator.next)) is keras.random.SeedGenerator.next,
    pickle.loads(pickle.dumps(tf.GradientTape.gradient)) is tf.GradientTape.gradient,
    isinstance(tf.function(len), tf.types.experimental.GenericFunction),
    inspect.getsource(keras.metrics.Mean.update_state), inspect.getsource(tf.GradientTape.gradient),
    inspect.getsource(keras.random.dropout), inspect.unwrap(keras.Model.compute_loss).__qualname__,
    issubclass(keras.layers.Conv1D, keras.layers.Layer),
    isinstance(keras.optimizers.Adam(), keras.optimizers.Optimizer),
    [cls.__name__ for cls in keras.optimizers.LossScaleOptimizer.__mro__], tf.random.uniform.__module__,
]


# What is made of their classes


class OwnOptimizer(keras.optimizers.SGD):
    def apply(self, grads, trainable_variables=None):
        return super().apply([2 * grad for grad in grads], trainable_variables)


class OwnMetric(keras.metrics.Mean):
    def update_state(self, values, sample_weight=None):
        return super().update_state(values * values, sample_weight)


class OwnConv(keras.layers.Conv2D):
    def call(self, inputs):
        return super().call(inputs) + 1.0


class OwnGenerator(keras.random.SeedGenerator):
    def next(self, ordered=True):
        return super().next(ordered) + 1


class OwnTape(tf.GradientTape):
    def gradient(self, target, sources, **options):
        return super().gradient(target, sources, **options)


class OwnLoss(keras.losses.MeanSquaredError):
    def call(self, y_true, y_pred):
        return 2.0 * super().call(y_true, y_pred)


@tf.function
def own_function(a, b=2.0):
    total = a
    while total < 5.0:
        if b > 1.0:
            total += b
        else:
            total += 1.0
    return total


def of_own_classes():
    keras.utils.set_random_seed(5)
    generator = OwnGenerator(3)
    conv, metric, loss, optimizer = OwnConv(2, 3), OwnMetric(), OwnLoss(), OwnOptimizer(0.1)
    weight = keras.Variable([1.0, 2.0])
    with OwnTape(persistent=True) as tape:
        value = tf.reduce_sum(conv(x[:2])) * tf.reduce_sum(weight.value)
        other = tf.square(weight.value)
    optimizer.apply_gradients([(tape.gradient(value, weight.value), weight)])
    metric.update_state(np.array([1.0, 3.0]))
    copies = [copy.deepcopy(each) for each in (keras.losses.Dice(), keras.layers.Dense(2), keras.metrics.Mean())]
    return [
        type(tape).__name__, weight.numpy().tolist(), tape.jacobian(other, weight.value).numpy().tolist(),
        float(metric.result()), float(loss([[1.0]], [[3.0]])), generator.next().numpy().tolist(),
        keras.random.uniform((2,), seed=generator).numpy().tolist(), [type(each).__name__ for each in copies],
        float(copies[0](tf.ones((2, 2)), tf.ones((2, 2)) / 2.0)),
        type(copy.copy(keras.optimizers.SGD(0.1))).__name__, float(own_function(tf.constant(1.0))),
        float(own_function(tf.constant(1.0), b=0.5)), own_function.experimental_get_tracing_count(),
        type(own_function).__name__, own_function.pretty_printed_concrete_signatures(),
        copy.deepcopy(conv.get_config()) == conv.get_config(),
        float(keras.losses.Tversky()(tf.ones((2, 2)), tf.ones((2, 2)))),
        float(tf.nn.compute_average_loss(tf.constant([1.0, 3.0]), global_batch_size=4)),
        float(tf.nn.scale_regularization_loss(tf.constant(3.0))),
        pickle.loads(pickle.dumps(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]))).count_params(),
    ]


found["of own classes"] = of_own_classes()
print(json.dumps(found))
"""


def found_in_a_process(folder, *, loads: bool):
    program = folder / f"program_{loads}.py"  # a file, because AutoGraph reads its source
    program.write_text(PROGRAM.format(loads=loads))
    ended = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.slow
def test_stock_models_and_names_are_the_same_with_and_without_the_package(tmp_path):
    without, loaded = (found_in_a_process(tmp_path, loads=loads) for loads in (False, True))
    assert len(without) > 1000
    assert {name: value for name, value in loaded.items() if without.get(name) != value} == {}
    assert set(without) == set(loaded)
