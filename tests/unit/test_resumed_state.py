"""What a checkpoint holds of callbacks, models and generators, and what becomes of what it cannot hold."""

from __future__ import annotations

import contextlib
import os
import random
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_dist_ext as kde
from keras_dist_ext.errors import ResumeError
from keras_dist_ext.training.resume.callback_state import CallbackStates
from keras_dist_ext.training.resume.checkpoints import CheckpointStore
from keras_dist_ext.training.resume.contents import check_contents
from keras_dist_ext.training.resume.frozen_values import Opaque, check_packed, freeze, is_same, pack, thaw
from keras_dist_ext.training.resume.position import Position
from keras_dist_ext.training.resume.run_state import capture, restore
from keras_dist_ext.training.resume.shared_checkpoints import newest_of_chief


class Notes(keras.callbacks.Callback):
    """Has whatever state it is given."""

    def __init__(self, **held: Any) -> None:
        super().__init__()
        vars(self).update(held)


def saved(callback: Any, change: Any) -> tuple[CallbackStates, Any, Any]:
    """What is saved of a callback that changes in training."""
    states = CallbackStates()
    states.prepare([callback], reset=False)
    states.begin([callback])
    change(callback)
    return states, *states.pack()


# Callbacks


def test_a_callback_that_trains_again_keeps_its_state_and_one_that_resumes_begins_anew() -> None:
    notes = Notes(count=0)
    states, _, _ = saved(notes, lambda callback: setattr(callback, "count", 3))
    states.prepare([notes], reset=False)
    assert notes.count == 3
    states.prepare([notes], reset=True)
    assert notes.count == 0


def test_generators_of_a_callback_are_restored() -> None:
    def draw(callback: Any) -> Any:
        return keras.ops.convert_to_numpy(keras.random.uniform([3], seed=callback.seeds))

    notes = Notes(seeds=keras.random.SeedGenerator(5))
    states, packed, arrays = saved(notes, draw)
    expected = draw(notes)
    states.unpack(packed, arrays)
    np.testing.assert_array_equal(draw(notes), expected)


def test_variables_that_a_callback_has_no_more_are_named_and_the_others_left_alone() -> None:
    states, packed, arrays = saved(Notes(sums=tf.Variable([1.0])), lambda callback: callback.sums.assign([2.0]))
    for held in (None, tf.Variable([7.0, 7.0])):
        notes = Notes(sums=held)
        states.begin([notes])
        with pytest.warns(
            UserWarning, match=r"variables in sums of the callback Notes, of shapes \(1,\), and they do not exist"
        ):
            states.unpack(packed, arrays)
        assert notes.sums is held
    np.testing.assert_array_equal(notes.sums, [7.0, 7.0])


def test_a_callback_that_defines_its_state_since_is_not_given_attributes() -> None:
    class WithState(Notes):
        def get_state(self) -> Any:
            return self.count

        def set_state(self, state: Any) -> None:
            self.count = state

    notes = WithState(count=1)
    states, packed, arrays = saved(notes, lambda callback: setattr(callback, "count", 2))
    (name,) = packed
    notes.count = 0
    states.unpack({name: {"other": 5}}, arrays)
    assert vars(notes)["count"] == 0
    assert not hasattr(notes, "other")
    states.unpack(packed, arrays)
    assert notes.count == 2


def test_the_progress_bar_of_keras_is_no_state_of_a_run() -> None:
    states, packed, _ = saved(keras.callbacks.ProgbarLogger(), lambda callback: setattr(callback, "seen", 3))
    assert not packed
    notes = Notes()
    states.begin([keras.callbacks.ProgbarLogger(), notes])
    notes.seen = 3
    assert list(states.pack()[0]) == [f"{__name__}.Notes[0]"]


# Values


def test_a_dict_of_what_cannot_be_saved_is_none_that_can() -> None:
    assert isinstance(freeze({"a": 1, "b": [object()]}), Opaque)
    with pytest.raises(TypeError, match="here has a object, which Resume cannot save"):
        freeze({"a": object()}, "here")
    assert thaw(freeze({"a": [1, (2.0, "x")]})) == {"a": [1, (2.0, "x")]}


def test_a_tensor_of_a_graph_has_no_value_to_be_saved() -> None:
    found: list[Any] = []

    def step() -> None:
        found.append(freeze(tf.range(3)))

    tf.function(step, autograph=False).get_concrete_function()
    assert isinstance(found[0], Opaque)


def test_an_object_whose_numbers_or_lengths_change_has_changed() -> None:
    tracker = types.SimpleNamespace(best=1.0, names=["a"], other=object())
    before = freeze(tracker)
    assert is_same(before, freeze(tracker))
    for change in (lambda: setattr(tracker, "best", 2.0), lambda: tracker.names.append("b")):
        now = freeze(tracker)
        change()
        assert not is_same(now, freeze(tracker))


def test_a_number_that_is_an_array_is_malformed() -> None:
    arrays: dict[str, Any] = {}
    packed = pack(freeze(np.float32(3.0)), arrays)
    check_packed(packed, arrays)
    with pytest.raises(ValueError, match="'callbacks/0' is not a single number"):
        check_packed(packed, {"callbacks/0": np.zeros(2)})


# Models


def dense(name: str = "net", **options: Any) -> Any:
    model = kde.Sequential([keras.Input((2,)), keras.layers.Dense(3, name="head")], name=name)
    model.compile(keras.optimizers.SGD(0.1), "mse", **options)
    return model


def restored(model: Any, snapshot: Any) -> None:
    arrays = {name: np.asarray(value) for name, value in snapshot.values.items()}
    restore(model, snapshot.metadata, arrays, None, {})


class Holder(kde.Model):
    """Has variables and optimizers beside what Keras knows."""

    def __init__(self, *, is_built: bool, with_total: bool = True) -> None:
        super().__init__()
        self.head = keras.layers.Dense(1)
        self.head.build((None, 2))
        self.own = keras.optimizers.SGD(0.1, momentum=0.9)
        self.head.of_whom_it_trains = self.own
        if is_built:
            self.own.build(self.head.trainable_variables)
        self.word = tf.Variable("a word")
        if with_total:
            self.total = tf.Variable(1.0)

    def call(self, x: Any) -> Any:
        return self.head(x)


def test_variables_and_optimizers_beside_those_of_keras_are_restored_each_once() -> None:
    model = Holder(is_built=True)
    model.total.assign(5.0)
    model.own.apply([tf.ones([2, 1]), tf.ones([1])])
    snapshot = capture(model, None)
    paths = [path for _, path, _, _ in snapshot.metadata["variables"]]
    assert sum("momentum" in path for path in paths) == 2
    assert sum("total" in path for path in paths) == 1
    assert not any("word" in path for path in paths)

    other = Holder(is_built=False)  # the user's own optimizer is built in the first step
    restored(other, snapshot)
    assert float(other.total) == 5.0
    assert other.own.built
    for one, same in zip(model.own.variables, other.own.variables, strict=True):
        np.testing.assert_array_equal(one, same)


def test_a_variable_that_the_model_has_no_more_is_named() -> None:
    snapshot = capture(Holder(is_built=True), None)
    with pytest.raises(ResumeError, match=r"tf.Variable/0 \(holder.*/total, float32 \(\)\) is missing"):
        restored(Holder(is_built=True, with_total=False), snapshot)


# Random numbers of the host


@contextlib.contextmanager
def numpy_generator(kind: Any) -> Iterator[None]:
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(kind(3))
    try:
        yield
    finally:
        np.random.set_bit_generator(before)


def test_random_numbers_of_python_and_numpy_go_on() -> None:
    model = dense()
    np.random.normal()  # the second of a pair is kept
    snapshot = capture(model, None)
    drawn = random.random(), np.random.normal(), np.random.normal()
    restored(model, snapshot)
    assert (random.random(), np.random.normal(), np.random.normal()) == drawn


def test_another_generator_of_numpy_is_left_as_it_is(recwarn: pytest.WarningsRecorder) -> None:
    model = dense()
    with numpy_generator(np.random.PCG64):
        snapshot = capture(model, None)
        drawn = np.random.random()
        restored(model, snapshot)
        assert np.random.random() != drawn
    of_twister = np.random.random()
    restored(model, snapshot)
    assert np.random.random() != of_twister
    assert not recwarn.list


def test_a_checkpoint_of_data_of_unknown_length_and_another_generator_is_well_formed() -> None:
    model = dense()
    with numpy_generator(np.random.PCG64):
        snapshot = capture(model, None)
    arrays = {name: np.asarray(value) for name, value in snapshot.values.items()}
    where = vars(Position(2, 1, 2, 3, 1, 15, 3, num_tests=2, num_tests_before=1))
    metadata = {
        **snapshot.metadata,
        "position": where,
        "stopped": False,
        "random_seed": None,
        "order_root": 3,
        "data": {"batches of a pass": None, "steps_per_epoch": None},
        "callbacks": {},
        "fingerprint": {},
    }
    check_contents(metadata, arrays, lambda *_: None, "here")
    metadata["position"] = {**where, "num_pass_batches": 16}
    with pytest.raises(ResumeError, match="num_pass_batches of the position is 16, of at most 15"):
        check_contents(metadata, arrays, lambda *_: None, "here")


# The directory


def test_a_directory_that_is_not_there_has_no_checkpoint(tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path / "none", 3).newest() is None
    assert not (tmp_path / "none").exists()


def test_an_error_of_the_chief_that_says_what_to_do_is_raised_as_it_is(tmp_path: Path) -> None:
    class Full(CheckpointStore):
        def newest(self) -> bytes | None:
            raise ResumeError("it does not fit into memory. Resume where there is more.")

    with pytest.raises(ResumeError, match=r"^it does not fit into memory. Resume where there is more.$"):
        newest_of_chief(Full(tmp_path, 3), None, str(tmp_path))


def test_a_relative_directory_needs_a_working_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone() -> str:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(os, "getcwd", gone)
    with pytest.raises(ResumeError, match=r"directory='runs' is relative to the working directory, which .* Give an a"):
        kde.Resume("runs")


def test_asynchronous_workers_have_no_step_to_resume_from() -> None:
    strategy = object.__new__(tf.distribute.ParameterServerStrategy)
    model: Any = types.SimpleNamespace(name="net", distribute_strategy=strategy)
    with pytest.raises(ResumeError, match=r"'net' lives under ParameterServerStrategy, .* Use BackupAndRestore there"):
        kde.Resume("runs").on_run_prepare(model)
