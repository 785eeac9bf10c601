"""Every replica draws numbers of its own, and the same at every run."""

from __future__ import annotations

import functools
import pathlib
import pickle
import random
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import seed_runs
import tensorflow as tf
from cases import rotating
from hypothesis import given
from hypothesis import strategies as st
from keras.src.trainers.data_adapters import py_dataset_adapter
from seed_runs import draws, noting_model, order_of_data
from two_workers import on_two_workers

import keras_dist_ext as kde
from keras_dist_ext.cluster.launch import launch
from keras_dist_ext.hashing import MODULUS, fold_in, replica_offset
from keras_dist_ext.step.generator import stream
from keras_dist_ext.step.xla import draw_as_uncompiled

# Streams


@pytest.mark.rotating
def test_fold_in_gives_no_number_twice_for_a_million_seeds_replicas_and_generators() -> None:
    numbers = {fold_in(s, i, g) for s in range(100) for i in range(100) for g in range(100)}
    assert len(numbers) == 10**6
    assert all(0 <= number < 2**62 for number in numbers)


def test_fold_in_is_the_same_on_every_platform() -> None:
    assert fold_in(0) == 2387258451469953642
    assert fold_in(42, 3, "dropout") == 3122398143968431703
    assert fold_in(-1, 2**70, "ü") == 2489936066558793795


@given(st.integers(), st.lists(st.integers() | st.text(), max_size=3), st.lists(st.integers() | st.text(), max_size=3))
def test_fold_in_tells_apart_all_arguments(root: int, a: list[Any], b: list[Any]) -> None:
    assert (fold_in(root, *a) == fold_in(root, *b)) == (a == b)
    assert fold_in(root, *a) != fold_in(root + 1, *a)


def test_fold_in_refuses_what_is_neither_a_number_nor_a_name() -> None:
    with pytest.raises(TypeError):
        fold_in(1, 2.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        fold_in("1")  # type: ignore[arg-type]


@pytest.mark.rotating
def test_streams_of_a_million_seeds_replicas_and_generators_are_distinct() -> None:
    names = [f"keras_{n}" for n in range(100)]
    first = np.array([stream(0, 0, name) for name in names], np.int64)[None, None]
    seeds = np.array([[s, 0] for s in range(100)], np.int64)[:, None, None]
    offsets = np.stack([replica_offset(i) for i in range(100)])[None, :, None]
    streams = ((first + seeds + offsets) % MODULUS).reshape(-1, 2)
    assert tuple(streams[12_345]) == stream(1, 23, "keras_45")
    assert len({(int(a), int(b)) for a, b in streams}) == 10**6


def test_a_replica_that_only_the_graph_knows_gets_its_own_streams() -> None:
    offsets = tf.function(replica_offset, input_signature=[tf.TensorSpec((), tf.int64)], autograph=False)
    for replica in (0, 1, 1023):
        np.testing.assert_array_equal(offsets(replica), replica_offset(replica))


@given(st.integers(0, MODULUS - 1), st.integers(1, 1023), st.text(max_size=8))
def test_streams_of_near_seeds_with_one_root_are_far_apart(seed: int, replica: int, generator: str) -> None:
    (a, first), (b, second) = stream(seed, replica, generator), stream((seed + replica) % MODULUS, 0, generator)
    assert a == b  # both stem from the root `seed + replica`
    assert 900_000 < (first - second) % MODULUS < MODULUS - 900_000


@pytest.mark.parametrize("seed", [True, -1, MODULUS, 1.5, "1", None])
def test_a_seed_that_keras_would_fold_onto_another_is_refused(seed: Any) -> None:
    with pytest.raises(kde.SeedError, match="A seed must be an integer, got|The seed is [-0-9]"):
        kde.ReplicaSeeds(seed)


# Runs

STEPS = 6  # of two epochs


@pytest.fixture(scope="module")
def two(strategies: Any) -> seed_runs.Draws:
    return draws(strategies.get("mirrored2"))


def test_masks_differ_between_replicas_steps_layers_and_epochs(two: seed_runs.Draws) -> None:
    assert sorted(two) == [0, 1]
    for source in range(4):
        drawn = [step[source] for replica in two.values() for step in replica]
        assert len(drawn) == 2 * STEPS == len(set(drawn))
    for steps in two.values():
        for step in steps:
            assert step[0] != step[1]


@pytest.mark.parametrize(
    "arguments",
    rotating(
        [{}, {"steps_per_execution": 1}, {"steps_per_execution": 50}, {"run_eagerly": True}, {"num_fits": 2}],
        [{"steps_per_execution": 50}, {"num_fits": 2}],
    ),
    ids=str,
)
def test_masks_are_the_same_again(arguments: Any, mirrored: Any, two: seed_runs.Draws) -> None:
    assert draws(mirrored, **arguments) == two


@pytest.mark.rotating
def test_masks_are_the_same_in_a_new_process(two: seed_runs.Draws) -> None:
    (again,) = launch(1, seed_runs.draws_in_new_process, time_limit=120).values
    assert again == two


def test_another_seed_gives_other_masks(mirrored: Any, two: seed_runs.Draws) -> None:
    other = draws(mirrored, 43)
    for source in range(4):
        assert not {s[source] for r in two.values() for s in r} & {s[source] for r in other.values() for s in r}


@pytest.mark.parametrize(
    "kind", rotating(["default", "one_device", "mirrored3", "mirrored4"], ["default", "mirrored3"])
)
def test_a_replica_draws_the_same_whatever_the_number_of_replicas(
    kind: str, strategies: Any, two: seed_runs.Draws
) -> None:
    drawn = draws(strategies.get(kind))
    for replica in set(two) & set(drawn):
        assert drawn[replica] == two[replica]


def test_the_seed_can_be_given_to_the_model(mirrored: Any) -> None:
    def losses(**arguments: Any) -> Any:
        with mirrored.scope():
            layers = [keras.Input((8,)), keras.layers.Dropout(0.5), keras.layers.Dense(1, kernel_initializer="ones")]
            model = kde.Sequential(layers, **arguments)
            model.compile("sgd", "mse")
        return model.fit(np.ones((16, 8)), np.ones((16, 1)), batch_size=4, verbose=0).history["loss"]

    assert losses(seed=1) == losses(seed=1) != losses(seed=2)


def test_a_class_that_takes_a_seed_itself_keeps_it(mirrored: Any) -> None:
    class Seeded(kde.Model):
        def __init__(self, seed: int = 0) -> None:
            super().__init__()
            self.given = seed

    model = Seeded(seed=5, strategy=mirrored)
    assert (model.given, model.replica_seeds.wanted) == (5, None)
    assert kde.Sequential([], seed=5).replica_seeds.wanted == 5


def test_seed_replicas_begins_all_streams_anew(mirrored: Any, two: seed_runs.Draws) -> None:
    model = noting_model(mirrored)
    draws(mirrored, model=model)
    model.draws.clear()
    kde.seed_replicas(model, 42)
    again = draws(mirrored, None, model=model)
    assert {r: [s[:3] for s in steps] for r, steps in again.items()} == {
        r: [s[:3] for s in steps] for r, steps in two.items()
    }  # but for tf.random ops, which TensorFlow does not let begin anew


AUGMENTATIONS: dict[str, dict[str, Any]] = {
    "AugMix": {"value_range": (0, 1)},
    "MixUp": {},
    "RandAugment": {"value_range": (0, 1)},
    "RandomColorDegeneration": {"factor": 0.9},
    "RandomColorJitter": {"value_range": (0, 1), "brightness_factor": 0.5},
    "RandomCrop": {"height": 3, "width": 2},
    "RandomElasticTransform": {"factor": 1.0},
    "RandomErasing": {"factor": 1.0},
    "RandomFlip": {},
    "RandomGaussianBlur": {"factor": 1.0, "sigma": 1.0, "value_range": (0, 1)},
    "RandomHue": {"factor": 0.5, "value_range": (0, 1)},
    "RandomInvert": {"factor": 0.5, "value_range": (0, 1)},
    "RandomPerspective": {"factor": 1.0},
    "RandomPosterization": {"factor": 4, "value_range": (0, 1)},
    "RandomRotation": {"factor": 0.5},
    "RandomSaturation": {"factor": (0.1, 0.9), "value_range": (0, 1)},
    "RandomSharpness": {"factor": 0.9, "value_range": (0, 1)},
    "RandomShear": {"x_factor": 0.5},
}


def augmentation(name: str) -> Any:
    """A layer of Keras that changes images of 10 times 4 pixels in 3 colours."""
    images = keras.layers.Reshape((10, 4, 3))
    layer = getattr(keras.layers, name)(**AUGMENTATIONS[name])
    return InTurn([images, layer])


def in_function(draw: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    functions: dict[int, Any] = {}
    return lambda self, x: functions.setdefault(id(self), tf.function(lambda x: draw(self, x)))(x)


RANDOM_LAYERS: dict[str, Callable[[], Any]] = {
    "Dropout": lambda: keras.layers.Dropout(0.5),
    "SpatialDropout1D": lambda: keras.layers.SpatialDropout1D(0.5),
    "GaussianNoise": lambda: keras.layers.GaussianNoise(1.0),
    "GaussianDropout": lambda: keras.layers.GaussianDropout(0.5),
    "AlphaDropout": lambda: keras.layers.AlphaDropout(0.5),
    "LSTM": lambda: keras.layers.LSTM(10, dropout=0.5, return_sequences=True),
    "LSTM, recurrent": lambda: keras.layers.LSTM(10, recurrent_dropout=0.5, return_sequences=True),
    "GRU, recurrent": lambda: keras.layers.GRU(10, recurrent_dropout=0.5, return_sequences=True),
    "MultiHeadAttention": lambda: SelfAttention(),
    "RandomTranslation": lambda: AsImage(keras.layers.RandomTranslation(0.4, 0.4)),
    "RandomFlip and RandomZoom": lambda: AsImage(keras.layers.RandomZoom(0.5)),
    "RandomBrightness": lambda: AsImage(keras.layers.RandomBrightness(0.5, value_range=(0.0, 1.0))),
    "RandomContrast": lambda: AsImage(keras.layers.RandomContrast(0.5)),
    "keras.random, a generator": lambda: Adds(lambda self, x: keras.random.normal((1,), seed=self.generator)),
    "keras.random, no seed": lambda: Adds(lambda self, x: keras.random.normal((1,))),
    "tf.random.normal": lambda: Adds(lambda self, x: tf.random.normal((1,))),
    "tf.random.uniform, a seed": lambda: Adds(lambda self, x: tf.random.uniform((1,), seed=5)),
    "tf.random.shuffle": lambda: Adds(lambda self, x: tf.cast(tf.random.shuffle(tf.range(1000)), tf.float32)[:1]),
    "tf.random.Generator": lambda: Adds(lambda self, x: self.tf_generator.normal((1,))),
    "tf.random.Generators in a list": lambda: Adds(lambda self, x: self.tf_generators[1].normal((1,))),
    "tf.random.normal, in a tf.function": lambda: Adds(in_function(lambda self, x: tf.random.normal((1,)))),
    "keras.random, in a tf.function": lambda: Adds(
        in_function(lambda self, x: keras.random.normal((1,), seed=self.generator))
    ),
    "Bidirectional LSTM, recurrent": lambda: keras.layers.Bidirectional(
        keras.layers.LSTM(5, recurrent_dropout=0.5, return_sequences=True, seed=1)
    ),
    **{name: functools.partial(augmentation, name) for name in AUGMENTATIONS},
}
FEW_OUTCOMES = {"RandomCrop", "RandomFlip", "RandomInvert", "RandomPosterization"}  # two steps may well be equal
QUICK_LAYERS = (
    "Dropout", "keras.random, no seed", "tf.random.Generators in a list",
)  # fmt: skip


@keras.saving.register_keras_serializable("seeds")
class SelfAttention(keras.layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.attention = keras.layers.MultiHeadAttention(2, 4, dropout=0.5)

    def call(self, x: Any, training: bool = False) -> Any:
        return self.attention(x, x, training=training)


@keras.saving.register_keras_serializable("seeds")
class AsImage(keras.layers.Layer):
    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def call(self, x: Any, training: bool = False) -> Any:
        return self.layer(x[..., None], training=training)[..., 0]


@keras.saving.register_keras_serializable("seeds")
class Adds(keras.layers.Layer):
    """Adds something random, in training and else."""

    def __init__(self, draw: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.draw = draw
        self.generator = keras.random.SeedGenerator(1)
        self.tf_generator = tf.random.Generator.from_seed(1)
        self.tf_generators = [tf.random.Generator.from_seed(1) for _ in range(2)]

    def call(self, x: Any) -> Any:
        return x + self.draw(self, x)


class InTurn(keras.layers.Layer):
    """Layers in a list, one after the other; gives rows of 120 numbers."""

    def __init__(self, layers: list[Any]) -> None:
        super().__init__()
        self.layers = layers

    def call(self, x: Any, training: bool = False) -> Any:
        first, second = self.layers
        made = second(first(x), training=training)
        return tf.pad(tf.reshape(made, [tf.shape(x)[0], -1]), [[0, 0], [0, 120]])[:, :120]


def outputs_by_replica(make: Callable[[], Any], strategy: Any, seed: int) -> list[np.ndarray]:
    """What a layer makes of the same rows in 3 steps, on each replica."""

    class Net(kde.Model):
        def __init__(self) -> None:
            super().__init__()
            self.layer = make()
            self.head = keras.layers.Dense(1, kernel_initializer="zeros")
            self.made: dict[int, list[Any]] = {}

        def call(self, x: Any, training: bool = False) -> Any:
            made = self.layer(x, training=training) if self.layer._call_has_training_arg else self.layer(x)
            if training:
                replica = tf.distribute.get_replica_context().replica_id_in_sync_group
                tf.py_function(lambda r, m: self.made.setdefault(int(r), []).append(m.numpy()), [replica, made], [])
            return self.head(tf.reshape(made, [tf.shape(x)[0], 120])[:, :4])

    with strategy.scope():
        keras.utils.set_random_seed(3)
        model = Net()
        model.compile("sgd", "mse")
    row = np.random.default_rng(0).random((1, 12, 10)).astype("float32")
    x, y = np.repeat(row, 12, axis=0), np.zeros((12, 1))
    model.fit(x, y, batch_size=4, verbose=0, callbacks=[kde.ReplicaSeeds(seed)])
    return [np.stack(model.made[replica]) for replica in sorted(model.made)]


@pytest.mark.parametrize("name", rotating(RANDOM_LAYERS, QUICK_LAYERS))
def test_every_random_layer_and_op_draws_apart_on_replicas_and_alike_on_runs(name: str, mirrored: Any) -> None:
    first, second = outputs_by_replica(RANDOM_LAYERS[name], mirrored, 42)
    again = outputs_by_replica(RANDOM_LAYERS[name], mirrored, 42)
    np.testing.assert_array_equal(again[0], first)
    np.testing.assert_array_equal(again[1], second)
    if name in FEW_OUTCOMES:
        assert not np.array_equal(first, second)
    for step in range(0 if name in FEW_OUTCOMES else 3):
        assert not np.array_equal(first[step], second[step])
        assert not np.array_equal(first[step], first[(step + 1) % 3])
    assert not np.array_equal(outputs_by_replica(RANDOM_LAYERS[name], mirrored, 43)[0], first)


def test_replicas_draw_independently_and_keep_the_right_share(mirrored: Any) -> None:
    num_draws = 1_000_000
    kept: dict[int, np.ndarray] = {}

    class Net(kde.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = keras.layers.Dropout(0.3)
            self.head = keras.layers.Dense(1)

        def call(self, x: Any, training: bool = False) -> Any:
            if training:
                mask = self.dropout(tf.ones([num_draws]), training=True) > 0
                replica = tf.distribute.get_replica_context().replica_id_in_sync_group
                tf.py_function(lambda r, m: kept.update({int(r): m.numpy()}), [replica, mask], [])
            return self.head(x)

    with mirrored.scope():
        model = Net()
        model.compile("sgd", "mse")
    model.fit(np.ones((2, 1)), np.ones((2, 1)), verbose=0, callbacks=[kde.ReplicaSeeds(1)])
    noise = 5 / np.sqrt(num_draws)  # five standard deviations
    assert abs(np.corrcoef(kept[0], kept[1])[0, 1]) < noise
    assert abs(np.corrcoef(kept[0][1:], kept[1][:-1])[0, 1]) < noise
    for mask in kept.values():
        assert abs(mask.mean() - 0.7) < noise * np.sqrt(0.21)


@on_two_workers(seed_runs.worker_draws)
def test_two_workers_draw_what_two_replicas_of_one_process_draw(two: seed_runs.Draws, values: Any) -> None:
    assert [drawn for drawn, _ in values] == [{worker: two[worker]} for worker in (0, 1)]
    assert values[0][1] != values[1][1]  # outside of steps


@pytest.mark.rotating
@on_two_workers(seed_runs.worker_draws_otherwise)
def test_so_they_do_whatever_runs_a_step_and_share_out_the_examples(two: seed_runs.Draws, values: Any) -> None:
    for worker, value in enumerate(values):
        assert value["by one step an execution"] == {worker: two[worker]}
        assert {r: [s[:3] for s in steps] for r, steps in value["restored"].items()} == {
            worker: [step[:3] for step in draws_of_four_epochs()[worker]]
        }
    assert values[0]["weights"] == values[1]["weights"]
    for kind in values[0]["orders"]:
        both = [[{*a}, {*b}] for a, b in zip(values[0]["orders"][kind], values[1]["orders"][kind], strict=True)]
        for mine, others in both:
            assert not mine & others
            assert mine | others == set(range(12))


def draws_of_four_epochs() -> seed_runs.Draws:
    from strategies import strategies

    return draws(strategies.get("mirrored2"), epochs=4)


@pytest.mark.rotating
def test_initial_values_that_predict_asks_for_are_no_draws_of_its_step(mirrored: Any) -> None:
    class Net(kde.Model):
        def __init__(self) -> None:
            super().__init__()
            self.head = keras.layers.Dense(2)

        def call(self, x: Any) -> Any:
            return self.head(x)

        def predict_step(self, data: Any) -> Any:
            return 2 * self(data)

    with mirrored.scope():
        model = Net()
        model.compile("sgd", "mse")
    with warnings.catch_warnings(record=True) as said:  # Keras catches what is raised where it asks for shapes
        warnings.simplefilter("always")
        model.predict(np.ones((6, 3), "float32"), batch_size=3, verbose=0)
    assert not [one for one in said if "keras.random was called" in str(one.message)]


@pytest.mark.rotating
def test_deterministic_ops_give_the_same_bits_at_every_run() -> None:
    first, second = (launch(1, seed_runs.deterministic_weights, time_limit=120).values[0] for _ in range(2))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


# XLA


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "rtol"),
    rotating([("float32", 3e-5), ("mixed_float16", 2e-3), ("mixed_bfloat16", 5e-3)], [("float32", 3e-5)]),
)
@pytest.mark.parametrize(
    "layer",
    rotating(
        [keras.layers.Dropout, keras.layers.GaussianNoise, keras.layers.GaussianDropout],
        [keras.layers.GaussianDropout],
        slow=[keras.layers.Dropout],
    ),
)
def test_masks_do_not_depend_on_jit_compile(layer: Any, dtype: str, rtol: float) -> None:
    def run(jit_compile: bool, seed: int = 7) -> Any:
        layers = [keras.Input((64,)), layer(0.5, dtype=dtype), keras.layers.Dense(1, kernel_initializer="ones")]
        model = kde.Sequential(layers, seed=seed)
        model.compile(keras.optimizers.SGD(1e-3), "mse", jit_compile=jit_compile)
        model.fit(np.ones((16, 64)), np.zeros((16, 1)), batch_size=8, epochs=3, verbose=0)
        return model.get_weights()[0]

    compiled = run(True)
    np.testing.assert_allclose(compiled, run(False), rtol=rtol)
    assert np.max(np.abs(run(False, seed=8) - compiled) / compiled) > 10 * rtol  # other masks would be seen


@pytest.mark.parametrize("kind", ["uniform", "normal"])
@pytest.mark.parametrize("dtype", [tf.float32, tf.float16, tf.bfloat16])
def test_xla_draws_what_is_drawn_without_it(kind: str, dtype: tf.DType) -> None:
    key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=[3, 9])
    op = {"uniform": tf.raw_ops.StatelessRandomUniformV2, "normal": tf.raw_ops.StatelessRandomNormalV2}[kind]
    plain = op(shape=[7, 3], key=key, counter=counter, alg=1, dtype=dtype)

    @tf.function(jit_compile=True)
    def compiled(key: Any, counter: Any) -> Any:
        return draw_as_uncompiled(kind, tf.constant([7, 3]), dtype, key=key, counter=counter, alg=1)

    drawn = compiled(key, counter)
    rtol = {tf.float32: 1e-5, tf.float16: 2e-3, tf.bfloat16: 2e-2}[dtype] if kind == "normal" else 0
    np.testing.assert_allclose(tf.cast(drawn, tf.float32), tf.cast(plain, tf.float32), rtol=rtol, atol=rtol)


# Saved


def small_model(strategy: Any) -> Any:
    with strategy.scope():
        keras.utils.set_random_seed(1)
        model = kde.Sequential(
            [
                keras.Input((16,)),
                keras.layers.Dropout(0.5),
                keras.layers.Dense(8),
                keras.layers.GaussianNoise(0.5),
                keras.layers.Dense(1),
            ]
        )
        model.compile("adam", "mse")
    with strategy.scope():
        model.optimizer.build(model.trainable_variables)
    return model


def losses(model: Any, until: int, *, begin: int = 0, callbacks: list[Any] | None = None) -> list[float]:
    x = np.random.default_rng(0).random((24, 16)).astype("float32")
    seeds = [kde.ReplicaSeeds(5)] if callbacks is None else callbacks
    fit = model.fit(
        x, x.sum(1, keepdims=True), batch_size=8, epochs=until, initial_epoch=begin, verbose=0, callbacks=seeds
    )
    return fit.history["loss"]  # type: ignore[no-any-return]


def by_keras_file(model: Any, folder: pathlib.Path, strategy: Any) -> Any:
    model.save(folder / "model.keras")
    return kde.load_model(folder / "model.keras", strategy)


def by_weights_file(model: Any, folder: pathlib.Path, strategy: Any) -> Any:
    model.save_weights(folder / "model.weights.h5")
    loaded = small_model(strategy)
    loaded.load_weights(folder / "model.weights.h5")
    return loaded


def by_checkpoint(model: Any, folder: pathlib.Path, strategy: Any) -> Any:
    path = tf.train.Checkpoint(model=model).write(str(folder / "checkpoint"))
    loaded = small_model(strategy)
    tf.train.Checkpoint(model=loaded).read(path).assert_consumed()
    return loaded


def by_pickle(model: Any, folder: pathlib.Path, strategy: Any) -> Any:
    with strategy.scope():
        return pickle.loads(pickle.dumps(model))


def by_adoption(model: Any, folder: pathlib.Path, strategy: Any) -> Any:
    return kde.adopt(model, strategy)


@pytest.mark.parametrize(
    "way",
    rotating([by_keras_file, by_weights_file, by_checkpoint, by_adoption, by_pickle], [], slow=[by_keras_file]),
)
@pytest.mark.parametrize("with_callback", rotating([True, False], [True]))
def test_a_run_that_was_saved_goes_on_as_if_it_had_not_stopped(
    way: Any, with_callback: bool, mirrored: Any, tmp_path: pathlib.Path
) -> None:
    whole = losses(small_model(mirrored), 4)
    model = small_model(mirrored)
    begun = losses(model, 2)
    resumed = losses(way(model, tmp_path, mirrored), 4, begin=2, callbacks=None if with_callback else [])
    np.testing.assert_allclose(begun + resumed, whole, rtol=1e-6)


@pytest.mark.rotating
def test_a_run_goes_on_under_another_number_of_replicas(mirrored: Any, strategies: Any, tmp_path: pathlib.Path) -> None:
    model = noting_model(strategies.get("mirrored4"))
    draws(strategies.get("mirrored4"), model=model)
    model.save_weights(tmp_path / "model.weights.h5")
    resumed = noting_model(mirrored)
    resumed.build((None, seed_runs.NUM_FEATURES))
    resumed.load_weights(tmp_path / "model.weights.h5")
    drawn = draws(mirrored, model=resumed)
    whole = draws(mirrored, epochs=4)
    for replica in (0, 1):
        assert [step[:3] for step in drawn[replica]] == [step[:3] for step in whole[replica][STEPS:]]


@pytest.mark.slow
def test_stock_keras_loads_what_ours_saved(mirrored: Any, tmp_path: pathlib.Path) -> None:
    model = small_model(mirrored)
    losses(model, 1)
    x = np.ones((2, 16), "float32")
    expected = model.predict(x, verbose=0)
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    model.export(tmp_path / "exported", verbose=False)
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded) is keras.Sequential
    np.testing.assert_allclose(loaded.predict(x, verbose=0), expected, rtol=1e-6)
    stock = keras.models.clone_model(loaded)
    stock.load_weights(tmp_path / "model.weights.h5")
    np.testing.assert_allclose(stock.predict(x, verbose=0), expected, rtol=1e-6)
    exported = tf.saved_model.load(tmp_path / "exported")
    np.testing.assert_allclose(exported.serve(x), expected, rtol=1e-5)


def test_ours_loads_what_stock_keras_saved(mirrored: Any, tmp_path: pathlib.Path) -> None:
    stock = keras.Sequential([keras.Input((4,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
    stock.compile("sgd", "mse")
    stock.save(tmp_path / "model.keras")
    stock.save_weights(tmp_path / "model.weights.h5")
    model = kde.load_model(tmp_path / "model.keras", mirrored)
    model.load_weights(tmp_path / "model.weights.h5")
    assert model.replica_seeds.root is None
    np.testing.assert_array_equal(model.get_weights()[0], stock.get_weights()[0])


# Data


@pytest.mark.parametrize(
    "kind",
    rotating(
        ["numpy", "tf.data", "tf.data, cached", "tf.data, random map", "PyDataset", "PyDataset, threads"],
        ["tf.data, random map"],
        slow=["PyDataset, threads"],
    ),
)
def test_the_order_of_data_is_the_same_at_every_run_and_another_every_epoch(kind: str, mirrored: Any) -> None:
    first = order_of_data(kind, strategy=mirrored, epochs=4)
    orders = [tuple(sorted(epoch[i : i + 4]) for i in (0, 4, 8)) for epoch in first]  # replicas note in any order
    for changes in ({"num_fits": 1}, {"num_fits": 2}):
        again = order_of_data(kind, strategy=mirrored, epochs=4, **changes)
        assert [tuple(sorted(epoch[i : i + 4]) for i in (0, 4, 8)) for epoch in again] == orders
    assert len(set(map(str, orders))) == 4
    if "random" not in kind:
        assert all(sorted(epoch) == list(range(12)) for epoch in first)


@pytest.mark.parametrize("kind", rotating(["tf.data", "tf.data, cached", "tf.data, random map"], []))
def test_data_made_under_a_global_seed_of_tensorflow_follows_the_seed_of_the_run(kind: str, mirrored: Any) -> None:
    def orders(global_seed: int | None, seed: int = 42) -> list[Any]:
        epochs = order_of_data(kind, strategy=mirrored, epochs=3, seed=seed, global_seed=global_seed)
        return [sorted(sorted(epoch[i : i + 4]) for i in (0, 4, 8)) for epoch in epochs]

    first = orders(None)
    assert orders(7) == orders(8) == first
    assert orders(7, seed=43) != first
    assert first[0] != first[1] != first[2]


@pytest.mark.rotating
def test_pythons_and_numpys_generators_are_seeded(mirrored: Any) -> None:
    def after_fit(seed: int) -> tuple[float, float, float]:
        draws(mirrored, seed)
        return random.random(), float(np.random.random()), float(tf.random.uniform(()))

    first = after_fit(1)
    random.seed(99)
    assert after_fit(1) == first
    assert all(a != b for a, b in zip(after_fit(2), first, strict=True))


# What stays as it is


@pytest.mark.rotating
def test_initial_weights_are_those_of_set_random_seed(mirrored: Any) -> None:
    def weights(*callbacks: Any) -> Any:
        keras.utils.set_random_seed(8)
        with mirrored.scope():
            model = kde.Sequential([keras.layers.Dropout(0.5), keras.layers.Dense(3)])
            model.compile(keras.optimizers.SGD(0.0), "mse")
        model.fit(np.ones((4, 2)), np.ones((4, 3)), verbose=0, callbacks=list(callbacks))
        for variable in model.trainable_variables:
            first, second = mirrored.experimental_local_results(variable.value)
            np.testing.assert_array_equal(first, second)
        return model.get_weights()[0]

    np.testing.assert_array_equal(weights(kde.ReplicaSeeds(1)), weights())


def test_without_the_callback_replicas_still_draw_apart(mirrored: Any) -> None:
    drawn = draws(mirrored, None)
    for source in range(3):
        everything = [step[source] for steps in drawn.values() for step in steps]
        assert len(set(everything)) == len(everything)


@pytest.mark.slow
def test_on_one_device_numbers_without_a_seed_go_on_after_training_as_with_stock_keras() -> None:
    class Noise(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return x + keras.random.normal(tf.shape(x))

    def found(library: Any) -> list[Any]:
        keras.utils.set_random_seed(7)
        model = library.Sequential([keras.Input((3,)), Noise(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        before = keras.random.normal((2,))
        model.fit(np.ones((8, 3)), np.ones((8, 1)), batch_size=4, verbose=0)
        between = keras.random.normal((2,))
        return [
            before,
            *model.get_weights(),
            between,
            model.predict(np.ones((2, 3)), verbose=0),
            keras.random.normal((2,)),
        ]

    for expected, ours in zip(found(keras), found(kde), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-6)


# Said


def test_the_table_shows_roots_streams_and_counters(mirrored: Any, capsys: Any) -> None:
    model = noting_model(mirrored)
    draws(mirrored, model=model)
    table = kde.describe_seeds(model)
    assert len(table) == 6
    assert [row.root for row in table] == [42, 43] * 3
    assert [row.replica for row in table] == [0, 1] * 3
    assert {row.counter for row in table} == {STEPS}
    assert [row.stream for row in table][:2] == [stream(42, 0, "keras_0"), stream(42, 1, "keras_0")]
    assert len({row.stream for row in table}) == 6
    printed = capsys.readouterr().out
    for text in ("generator", "keras.random, seed=None", str(stream(42, 1, "keras_0")[1])):
        assert text in printed


def test_the_table_shows_generators_of_tensorflow_with_the_key_that_replicas_share(mirrored: Any) -> None:
    with mirrored.scope():
        model = kde.Sequential([keras.Input((2,)), Adds(lambda self, x: self.tf_generator.normal((1,)))])
    kde.seed_replicas(model, 42)
    rows = [row for row in kde.describe_seeds(model) if "tf_generator" in row.generator]
    assert [row.root for row in rows] == [42, 43] * 3
    assert [row.stream[1] for row in rows] == [0, 1] * 3
    assert {row.counter for row in rows} == {0}
    assert len({row.stream[0] for row in rows}) == 3


def test_a_state_of_another_shape_is_that_of_another_generator_and_is_left(mirrored: Any) -> None:
    with mirrored.scope():
        model = kde.Sequential([keras.Input((2,)), keras.layers.Dropout(0.5)])
    (generator,) = model.replica_seeds.generators()
    before = generator.read().tolist()
    model.replica_seeds.load({generator.name: [1, 2, 3]})
    assert generator.read().tolist() == before
    model.replica_seeds.load({generator.name: [1, 2]})
    assert generator.read().tolist() == [1, 2]


def test_the_table_of_a_model_without_a_seed_says_so(mirrored: Any, capsys: Any) -> None:
    rows = kde.describe_seeds(small_model(mirrored))
    assert {row.root for row in rows} == {None}
    assert "its own" in capsys.readouterr().out


def test_models_of_stock_keras_are_refused_by_name(mirrored: Any) -> None:
    with mirrored.scope():
        stock = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)], name="stock")
        stock.compile("sgd", "mse")
    with pytest.raises(kde.SeedError, match=r"'stock' is a Sequential of stock Keras.*kde\.adopt"):
        stock.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0, callbacks=[kde.ReplicaSeeds(1)])
    with pytest.raises(kde.SeedError, match="kde.Model"):
        kde.seed_replicas(stock, 1)


@pytest.mark.slow
def test_an_integer_as_a_seed_in_a_step_is_warned_of_once_unless_the_run_is_seeded(mirrored: Any) -> None:
    def fit(*callbacks: Any) -> None:
        with mirrored.scope():
            model = kde.Sequential([keras.Input((2,)), Adds(lambda self, x: keras.random.normal((1,), seed=77))])
            model.compile(loss="mse")
        model.evaluate(np.ones((4, 2)), np.ones((4, 2)), verbose=0, callbacks=list(callbacks))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(kde.ReplicaSeeds(1))
    with pytest.warns(UserWarning, match=r"seed=77 in a step.*every replica draws the same numbers"):
        fit()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit()


def test_scope_guard_warns_that_stock_models_repeat_their_draws(mirrored: Any) -> None:
    with mirrored.scope():
        stock = keras.Sequential([keras.Input((2,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)], name="plain")
        stock.compile("sgd", "mse")
    with pytest.warns(UserWarning, match=r"'plain' .* the same numbers on all 2 replicas: dropout"):
        stock.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0, callbacks=[kde.ScopeGuard()])


def test_generators_that_would_draw_alike_are_named(mirrored: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from keras_dist_ext.step import generator

    model = small_model(mirrored)
    monkeypatch.setattr(generator, "fold_in", lambda root, *ids: 1)
    with pytest.raises(
        kde.SeedError, match=r"dropout\S* and gaussian_noise\S* would draw the same numbers on replica 0"
    ):
        losses(model, 1)


@pytest.mark.rotating
def test_the_generator_without_a_seed_is_one_for_each_strategy(strategies: Any) -> None:
    with strategies.get("mirrored2").scope():
        keras.random.normal((1,))  # makes Keras' own there
    for kind in ("default", "one_device", "mirrored2", "mirrored4"):
        drawn = draws(strategies.get(kind), None)
        assert len({step[2] for step in drawn[0]}) == STEPS


# Whatever else uses the same generators


class Masks(kde.Model):
    """Notes the masks that its dropout, perhaps shared with another model, draws in training."""

    def __init__(self, *dropouts: Any) -> None:
        super().__init__()
        self.dropouts = list(dropouts)
        self.head = keras.layers.Dense(1)
        self.masks: list[Any] = []

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            mask = self.dropouts[-1](tf.ones([20]), training=True) > 0
            tf.py_function(lambda m: self.masks.append(tuple(m.numpy())), [mask], [])
        return self.head(x)


def masks_of_a_fit(model: Any, seed: int) -> list[Any]:
    if not model.compiled:
        model.compile("sgd", "mse")
    begin = len(model.masks)
    model.fit(np.ones((6, 2)), np.ones((6, 1)), batch_size=2, verbose=0, callbacks=[kde.ReplicaSeeds(seed)])
    return list(model.masks[begin:])


@pytest.mark.parametrize("other_seed", rotating([5, 6], [6]))
def test_models_that_share_a_layer_go_on_with_streams_of_their_own(other_seed: int) -> None:
    alone = Masks(keras.layers.Dropout(0.5))
    whole = [*masks_of_a_fit(alone, 5), *masks_of_a_fit(alone, 5)]
    assert len(set(whole)) == 6
    shared = keras.layers.Dropout(0.5)
    one, other = Masks(shared), Masks(keras.layers.Dropout(0.5), shared)
    begun, between, ended = masks_of_a_fit(one, 5), masks_of_a_fit(other, other_seed), masks_of_a_fit(one, 5)
    assert begun + ended == whole
    assert not {*begun, *ended} & {*between, *masks_of_a_fit(other, other_seed)}


@pytest.mark.parametrize("kind", rotating(["default", "one_device", "mirrored2"], [], slow=["mirrored2"]))
def test_what_predict_draws_without_a_seed_follows_the_models(kind: str, strategies: Any) -> None:
    class Draws(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return keras.ops.stack([keras.random.normal(()) + 0 * x[:, 0], tf.random.normal([]) + 0 * x[:, 0]], axis=1)

    def predicted(seed: int) -> Any:
        with strategies.get(kind).scope():
            keras.random.normal((1,))  # moves the generator behind seed=None
            model = kde.Sequential([keras.Input((1,)), Draws()], seed=seed)
        return model.predict(np.ones((2, 1), "float32"), batch_size=2, verbose=0)[0].tolist()

    assert predicted(1) == predicted(1)
    assert not {*predicted(1)} & {*predicted(2)}


@pytest.mark.parametrize("draw", rotating(["keras.random", "tf.random"], ["tf.random"]))
def test_on_one_device_a_tf_function_draws_anew_in_each_step_and_by_the_seed(draw: str) -> None:
    class Net(kde.Model):
        def __init__(self) -> None:
            super().__init__()
            self.generator = keras.random.SeedGenerator()
            self.head = keras.layers.Dense(1)
            self.drawn: list[float] = []

        @tf.function
        def draw(self) -> Any:
            is_keras = draw == "keras.random"
            return keras.random.normal((), seed=self.generator) if is_keras else tf.random.normal(())

        def call(self, x: Any, training: bool = False) -> Any:
            if training:
                tf.py_function(lambda n: self.drawn.append(float(n)), [self.draw()], [])
            return self.head(x)

    def drawn(seed: int) -> list[float]:
        model = Net()
        model.compile("sgd", "mse")
        model.fit(np.ones((6, 2)), np.ones((6, 1)), batch_size=2, verbose=0, callbacks=[kde.ReplicaSeeds(seed)])
        return list(model.drawn)

    assert len({*drawn(1)}) == 3
    assert drawn(1) == drawn(1) != drawn(2)


def test_a_generator_that_the_model_does_not_hold_is_warned_of_once() -> None:
    class Policy:
        def __init__(self) -> None:
            self.generator = keras.random.SeedGenerator(3)

    class Net(kde.Model):
        def __init__(self) -> None:
            super().__init__()
            self.policy = Policy()
            self.head = keras.layers.Dense(1)

        def call(self, x: Any) -> Any:
            return self.head(x) + keras.random.normal((1,), seed=self.policy.generator)

    def fit_and_evaluate() -> None:
        model = Net()
        model.compile("sgd", "mse")
        model.fit(np.ones((2, 1)), np.ones((2, 1)), verbose=0, callbacks=[kde.ReplicaSeeds(1)])
        model.evaluate(np.ones((2, 1)), np.ones((2, 1)), verbose=0)

    with pytest.warns(UserWarning, match=r"draws from 'seed_generator.*', a SeedGenerator that neither") as warned:
        fit_and_evaluate()
    assert len([w for w in warned if "neither the model" in str(w.message)]) == 1


def test_afterwards_py_datasets_are_shuffled_by_python_again() -> None:
    model = kde.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    order = py_dataset_adapter.random
    model.fit(np.ones((2, 1)), np.ones((2, 1)), verbose=0, callbacks=[kde.ReplicaSeeds(1)])
    assert order.generator is random


@pytest.mark.parametrize("num_threads", [1, 2])
def test_data_in_the_order_of_a_seed_leaves_other_py_datasets_to_python(num_threads: int, mirrored: Any) -> None:
    class Numbers(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 20

        def __getitem__(self, number: int) -> Any:
            return np.full([2, 1], number, "float32")

    def order(passes: int) -> list[list[float]]:
        data = kde.distribute(Numbers(workers=num_threads), mirrored, seed=1)
        found = []
        for _ in range(passes):
            found.append([])
            for (batch,) in data:
                assert py_dataset_adapter.random.generator is random
                found[-1].append(float(batch[0, 0]))
        return found

    first, second = order(2)
    assert order(1) == [first]
    assert sorted(first) == sorted(second) == list(range(20))
    assert list(range(20)) != first != second


def test_random_ops_of_a_pipeline_that_caches_are_warned_of() -> None:
    data = tf.data.Dataset.from_tensor_slices(np.ones((4, 1), "float32")).cache()
    data = data.map(lambda x: (x + tf.random.normal([1]), x)).batch(2)
    model = kde.Sequential([keras.Input((1,)), keras.layers.Dense(1)], seed=1)
    model.compile("sgd", "mse")
    with pytest.warns(UserWarning, match=r"\(cache\(\)\) and draws random numbers in its functions, which therefore"):
        model.fit(data, shuffle=False, verbose=0)


@pytest.mark.parametrize("kind", rotating(["layer of Keras", "tf.random.Generator"], ["tf.random.Generator"]))
def test_generators_of_a_pipelines_functions_follow_the_seed_from_pass_to_pass(kind: str) -> None:
    def read(seed: int) -> list[list[float]]:
        layer, generator = keras.layers.GaussianNoise(1.0), tf.random.Generator.from_non_deterministic_state()

        def noisy(x: Any) -> Any:
            drawn = layer(x, training=True) if kind == "layer of Keras" else x + generator.normal([1])
            return drawn, x

        data = tf.data.Dataset.from_tensor_slices(np.zeros([6, 1], "float32")).shuffle(6).map(noisy).batch(2)
        return read_in_training(data, seed)

    first = read(1)
    assert len(set(np.ravel(first))) == 12  # 2 passes
    assert first == read(1) != read(2)


def test_a_variable_that_a_pipeline_reads_is_warned_of_where_a_copy_is_read() -> None:
    strength = tf.Variable(1.0)
    data = tf.data.Dataset.from_tensor_slices(np.ones([4, 1], "float32"))

    def train(dataset: Any) -> None:
        model = kde.Sequential([keras.Input((1,)), keras.layers.Dense(1)], seed=1)
        model.compile("sgd", "mse")
        model.fit(dataset.map(lambda x: (x * strength, x)).batch(2), shuffle=False, verbose=0)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(data.shuffle(4, seed=3))
    with pytest.warns(UserWarning, match=r"read a tf\.Variable.* in the middle of a pass is seen in the next one"):
        train(data.shuffle(4))


def test_python_functions_of_a_pipeline_may_stand_behind_a_shuffle() -> None:
    def by_python(i: Any) -> Any:
        x = tf.ensure_shape(tf.py_function(np.float32, [i], tf.float32), [])
        return x[None], x[None]

    data = tf.data.Dataset.range(6).shuffle(6).map(by_python).batch(2)
    met = read_in_training(data, 1)
    assert sorted(np.ravel(met[:3])) == list(range(6))
    assert met == read_in_training(data, 1)


def read_in_training(data: Any, seed: int) -> list[list[float]]:
    """The batches of two epochs."""
    met: list[list[float]] = []

    class Net(kde.Model):
        def __init__(self) -> None:
            super().__init__()
            self.head = keras.layers.Dense(1)

        def call(self, x: Any, training: bool = False) -> Any:
            if training:
                tf.py_function(lambda x: met.append(np.ravel(x).tolist()), [x], [])
            return self.head(x)

    model = Net()
    model.compile("sgd", "mse")
    model.fit(data, epochs=2, shuffle=False, verbose=0, callbacks=[kde.ReplicaSeeds(seed)])
    return met


@pytest.mark.rotating
def test_files_that_are_shuffled_each_by_itself_are_read_in_the_same_order_at_every_run() -> None:
    def read(seed: int) -> list[list[float]]:
        tf.random.set_seed(None)
        files = tf.data.Dataset.range(3)
        data = files.interleave(lambda i: tf.data.Dataset.range(8 * i, 8 * i + 8).shuffle(8), cycle_length=2)
        data = data.map(lambda i: (tf.cast([i], tf.float32), tf.cast([i], tf.float32))).batch(4)
        return read_in_training(data, seed)

    first = read(1)
    assert sorted(np.ravel(first[:6])) == list(range(24))
    assert first == read(1) != read(2)
    assert first[:6] != first[6:]
