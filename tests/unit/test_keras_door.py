"""What of Keras, TensorFlow and keras-tuner is taken into account, one function at a time, and nothing trained."""

from __future__ import annotations

import itertools
import random
import runpy
import threading
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import keras
import keras_tuner
import numpy as np
import pytest
import tensorflow as tf
from keras.src.losses import losses
from keras.src.saving import saving_lib
from keras.src.utils import io_utils

import keras_dist_ext
import keras_dist_ext as kde
from keras_dist_ext._keras import py_datasets, saving
from keras_dist_ext._keras.adapters import take_examples
from keras_dist_ext._keras.creation import keep_constants
from keras_dist_ext._keras.hooks import _dice, _tversky
from keras_dist_ext._keras.keras_tuner import score_of
from keras_dist_ext._keras.keras_tuner_oracles import redraw, save_files_atomically
from keras_dist_ext._keras.optimizers import GradientSlots, end_accumulation_next, ends_accumulation
from keras_dist_ext._keras.tracing import IteratorFunction
from keras_dist_ext.data.sources import as_dataset
from keras_dist_ext.errors import BackendError
from keras_dist_ext.hashing import replica_offset
from keras_dist_ext.messages import _level_of_user
from keras_dist_ext.monitoring.manifest import describe_model

# Which Keras


@pytest.mark.parametrize("value", ["1", "True"])
def test_keras_2_is_refused_with_what_to_unset(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", value)
    with pytest.raises(BackendError, match="TF_USE_LEGACY_KERAS is set.*Unset TF_USE_LEGACY_KERAS before TensorFlow"):
        _imported()


def test_another_backend_is_refused_with_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_USE_LEGACY_KERAS", raising=False)
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(BackendError, match="Keras runs on the backend 'jax'.*Set KERAS_BACKEND=tensorflow"):
        _imported()


def _imported() -> None:
    runpy.run_path(str(Path(keras_dist_ext.__file__).parent / "_keras" / "__init__.py"))


# Losses


@pytest.mark.parametrize("axis", [(1,), (1, 2)])
def test_losses_that_divide_sums_of_each_row_are_those_of_keras(axis: tuple[int, ...]) -> None:
    y, p = np.random.default_rng(1).random((2, 3, 4, 2), "float32")
    y_true, y_pred = tf.constant(y), tf.constant(p)
    np.testing.assert_array_equal(_dice(losses.dice, y_true, y_pred, axis=axis), losses.dice(y_true, y_pred, axis=axis))
    given: dict[str, Any] = {"alpha": 0.3, "beta": 0.6, "axis": axis}
    np.testing.assert_array_equal(
        _tversky(losses.tversky, y_true, y_pred, **given), losses.tversky(y_true, y_pred, **given)
    )


# Data


class Frame:
    """As of pandas."""

    shape = (3, 2)

    def __init__(self, values: Any) -> None:
        self._values, self.iloc = values, self

    def __getitem__(self, rows: Any) -> Any:
        return SimpleNamespace(to_numpy=lambda: self._values[rows])


def test_rows_are_taken_of_all_kinds_of_arrays_and_of_no_others() -> None:
    values, rows = np.arange(6.0).reshape(3, 2), np.array([2, 0])
    adapter: Any = SimpleNamespace(_inputs=[Frame(values), values, tf.constant(values), None])
    for taken in take_examples(adapter, rows):
        np.testing.assert_array_equal(taken, [[4.0, 5.0], [0.0, 1.0]])
    adapter._inputs = ["abc"]
    with pytest.raises(TypeError, match="str"):
        take_examples(adapter, rows)


def test_the_order_of_a_py_dataset_is_random_s_own_unless_it_is_seeded() -> None:
    order: Any = py_datasets._py_dataset_order
    with py_datasets.preserve_py_dataset_order():
        py_datasets.seed_py_datasets(1)
        seeded = order.Random(7)  # by which Keras shuffles from 3.16 on, by the epoch
        numbers = list(range(20))
        seeded.shuffle(numbers)
        assert numbers != sorted(numbers) == list(range(20))
        py_datasets.seed_py_datasets(1)
        again = list(range(20))
        order.shuffle(again)
        assert again == numbers
    assert order.Random(7).random() == order.Random(7).random()


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("length", [6, None])
def test_the_rest_of_a_pass_asks_for_no_batch_before_it(length: int | None, seed: int | None) -> None:
    adapter: Any = SimpleNamespace(
        num_batches=length,
        shuffle=True,
        py_dataset=range(10**9),
        _standardize_batch=lambda batch: batch,
        _get_iterator=None,
    )
    adapter.get_tf_dataset = lambda: list(itertools.islice(adapter._get_iterator(), 4))
    if seed is None:
        random.seed(5)
    rest: Any = py_datasets._rest_of_py_dataset(adapter, 2, seed)
    expected = list(range(6))
    if length is not None:  # else there is no order without end
        random.Random(5 if seed is None else seed).shuffle(expected)
    assert rest == expected[2:]
    assert not hasattr(adapter, "_get_iterator")


@pytest.mark.parametrize("seed", [None, 3])
def test_a_pass_over_a_py_dataset_leaves_the_order_of_others_as_it_was(
    seed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Numbers(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> Any:
            return np.array([[index]])

    passes: list[Any] = []

    def noted(one_pass: Any, output_signature: Any) -> tf.data.Dataset:
        passes.append(one_pass)
        return tf.data.Dataset.from_tensors(0)

    monkeypatch.setattr(tf.data.Dataset, "from_generator", noted)
    as_dataset(Numbers(), seed=seed)
    as_dataset(Numbers(), seed=seed)
    order: Any = py_datasets._py_dataset_order
    before = order.generator
    ours, others = passes[1::2]  # each after Keras' own, of which the shapes are
    first, second, again = ([int(batch[0][0, 0]) for batch in one()] for one in (ours, ours, others))
    assert order.generator is before
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second
    assert (first == again) == (seed is not None)


@pytest.mark.slow
def test_what_tensorflow_has_distributed_is_read_by_the_function_itself(mirrored: Any) -> None:
    dataset = tf.data.Dataset.from_tensor_slices(np.arange(4.0)).batch(4)
    iterator = iter(mirrored.experimental_distribute_dataset(dataset))
    read = IteratorFunction(tf.function(lambda given: mirrored.experimental_local_results(next(given))))
    assert [part.numpy().tolist() for part in read(iterator)] == [[0.0, 1.0], [2.0, 3.0]]


# Saving


def test_variables_are_read_from_folders_and_archives_and_none_where_there_are_no_weights(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    assert saving.saved_variables(folder, "seeds") == {}
    with h5py.File(folder / "model.weights.h5", "w") as file:
        file["seeds/vars/0"] = np.arange(3)
    with zipfile.ZipFile(tmp_path / "model.keras", "w") as archive:
        archive.write(folder / "model.weights.h5", "model.weights.h5")
    with zipfile.ZipFile(tmp_path / "empty.keras", "w") as archive:
        archive.writestr("config.json", "{}")
    for path in (folder, tmp_path / "model.keras"):
        (values,) = saving.saved_variables(path, "seeds").values()
        assert values.tolist() == [0, 1, 2]
        assert saving.saved_variables(path, "others") == {}
    assert saving.saved_variables(tmp_path / "empty.keras", "seeds") == {}


@pytest.mark.parametrize(("answered", "asked"), [(True, []), (False, []), (None, ["model.keras"])])
def test_whether_to_overwrite_is_asked_at_the_terminal_where_nobody_answers(
    answered: bool | None, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def ask(path: str) -> bool:
        seen.append(path)
        return True

    monkeypatch.setattr(io_utils, "ask_to_proceed_with_overwrite", ask)
    saving.answer_overwriting_by(lambda path: answered)
    assert io_utils.ask_to_proceed_with_overwrite("model.keras") == (answered is not False)
    assert seen == asked


def test_saves_are_hooked_once() -> None:
    hooked, hooks = saving_lib.save_model, list(saving.SAVE_HOOKS)
    saving._hook_saves(saving_lib, "save_model")
    assert saving_lib.save_model is hooked
    assert hooks == saving.SAVE_HOOKS


# Optimizers and layers


def test_an_accumulation_of_gradients_is_ended_by_the_next_batch_once_it_has_begun() -> None:
    optimizer = keras.optimizers.SGD(gradient_accumulation_steps=4)
    end_accumulation_next(optimizer)
    assert not optimizer.built
    optimizer.build([keras.Variable(1.0)])
    for iterations, expected in ((0, 3), (3, 3), (5, 7)):
        optimizer._iterations.assign(iterations)
        end_accumulation_next(optimizer)
        assert int(optimizer._iterations) == expected
        assert bool(ends_accumulation(optimizer))


def test_gradients_of_an_optimizer_that_is_built_again_are_kept_once() -> None:
    optimizer, variables = keras.optimizers.SGD(), [keras.Variable(1.0), keras.Variable([1.0, 2.0])]
    slots = GradientSlots(optimizer)
    for _ in range(2):
        optimizer.build(variables)
        assert [(of.shape, kept.shape) for of, kept in slots.pairs] == [((), ()), ((2,), (2,))]


@pytest.mark.slow
def test_what_a_layer_keeps_of_the_batch_stays_in_the_graph_and_constants_leave_it() -> None:
    layer = keras.layers.Layer()

    def trace(x: Any) -> Any:
        vars(layer).update(mean=2.0 * x, scale=2.0 * tf.ones([2]))
        keep_constants(layer)
        return x

    tf.function(trace, autograph=False).get_concrete_function(tf.TensorSpec([]))
    assert layer.scale.numpy().tolist() == [2.0, 2.0]
    assert not hasattr(layer.mean, "numpy")


def test_a_model_that_is_not_built_is_described_without_parameters(mirrored: Any) -> None:
    with mirrored.scope():
        model = kde.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse", virtual_replicas=4)
    described = describe_model(model)
    assert "parameters" not in described
    assert (described["virtual replicas"], described["optimizer"]) == ("4", "SGD")
    model.build((None, 2))
    assert describe_model(model)["parameters"] == "3"


# Searches


def test_results_without_the_objective_have_no_score() -> None:
    objective = keras_tuner.Objective("score", "min")
    assert score_of({"score": 2}, objective) == 2.0
    assert score_of({"loss": 2}, objective) is None


@pytest.mark.parametrize("bears", [True, False])
def test_what_cannot_run_is_drawn_again_up_to_50_times(bears: bool) -> None:
    drawn: list[int] = []

    def draw() -> dict[str, int]:
        drawn.append(len(drawn))
        return {"x": len(drawn)}

    def propose(trial_id: str) -> dict[str, Any]:
        return {"status": "RUNNING", "values": {"x": 0}}

    oracle = object.__new__(keras_tuner.oracles.BayesianOptimizationOracle)
    oracle._random_values, oracle.populate_space = draw, propose
    redraw(oracle, lambda values: not bears or values["x"] < 3)  # type: ignore[operator]
    assert oracle.populate_space("0") == {"status": "RUNNING", "values": {"x": 3 if bears else 51}}
    assert len(drawn) == (3 if bears else 51)


def test_files_of_no_file_system_of_this_machine_are_written_as_keras_tuner_does() -> None:
    oracle: Any = SimpleNamespace(_project_dir="gs://bucket/project")
    save_files_atomically(oracle)
    assert vars(oracle) == {"_project_dir": "gs://bucket/project"}


# Small things


@pytest.mark.parametrize("replica", [0, 1, 5, 300])
def test_the_offset_of_a_replica_is_the_same_in_a_graph(replica: int) -> None:
    np.testing.assert_array_equal(replica_offset(tf.constant(replica, tf.int64)), replica_offset(replica))


def test_a_warning_of_a_thread_of_ours_is_at_its_own_line() -> None:
    levels: list[int] = []
    scope: dict[str, Any] = {"__name__": "keras_dist_ext.made_up", "level": _level_of_user, "levels": levels}
    exec("def run(): levels.append(level())", scope)
    thread = threading.Thread(target=scope["run"])
    thread.start()
    thread.join()
    assert levels == [2]
    assert _level_of_user() == 1
