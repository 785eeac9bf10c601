"""What a model is compiled with, or trained by, and what it cannot have where it lives."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import keras_dist_ext as kde
from keras_dist_ext import messages
from keras_dist_ext.errors import CallbackError, SeedError, StepError, StrategyError
from keras_dist_ext.training.batch_spec import rows_of_one
from keras_dist_ext.training.batch_statistics import checked_statistics
from keras_dist_ext.training.building import build_for_run
from keras_dist_ext.training.compile_config import read_arguments
from keras_dist_ext.training.exactness import checked_exact
from keras_dist_ext.training.model import Functional
from keras_dist_ext.training.parameter_server.coordinator import check_asynchronous
from keras_dist_ext.training.snapshot import kept_numbers
from keras_dist_ext.training.whole_batch_layers import check_whole_batch_layers

X = np.random.default_rng(0).normal(size=(6, 3)).astype("float32")


def living_under(strategy: Any, **options: Any) -> Any:
    """A model as far as what refuses its strategy looks at it."""
    given = {"name": "net", "distribute_strategy": object.__new__(strategy), "run_eagerly": False}
    return types.SimpleNamespace(**given | options)


# Under parameter servers and on a TPU


def test_asynchronous_workers_have_no_global_batch() -> None:
    strategy = object.__new__(tf.distribute.ParameterServerStrategy)
    with pytest.raises(StrategyError, match=r'batch_statistics="global" under a ParameterServerStrategy, .* no global'):
        checked_statistics("global", strategy)
    assert checked_statistics(None, strategy) == "replica"
    with pytest.raises(StrategyError, match=r"exact=True under a ParameterServerStrategy, .* Compile without exact=Tr"):
        checked_exact(True, batch_statistics=None, jit_compile="auto", strategy=strategy)
    assert not checked_exact(False, batch_statistics=None, jit_compile="auto", strategy=strategy)


@pytest.mark.parametrize("strategy", [tf.distribute.ParameterServerStrategy, tf.distribute.TPUStrategy])
def test_steps_that_replicas_do_not_make_together_cannot_be_left_out(strategy: Any) -> None:
    with pytest.raises(
        CallbackError, match=r"'net' lives under \w+, where NonFinite cannot .* Use keras\.callbacks\.T"
    ):
        kde.NonFinite("skip").on_run_prepare(living_under(strategy))


def test_a_worker_of_parameter_servers_has_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    model = living_under(tf.distribute.ParameterServerStrategy)
    monkeypatch.setattr(tf.distribute.ParameterServerStrategy, "num_replicas_in_sync", 2)
    with pytest.raises(
        StrategyError, match=r"Each worker has 2 GPUs, and a step .* uses one\. Start a worker for each"
    ):
        check_asynchronous(model)


# Callbacks


def test_what_steps_nonfinite_has_left_out_is_known_after_a_resume() -> None:
    state = {"num_left_out": 3, "left_out": [[1, 7, [0], [1, 2], []]]}
    callback = kde.NonFinite("skip")
    callback.set_state(state)
    (step,) = callback.left_out
    assert (step.epoch, step.step, step.loss, step.gradients, step.data) == (1, 7, (0,), (1, 2), ())
    assert callback.get_state() == state


def test_streams_of_replicas_contradict_exact() -> None:
    model = kde.Sequential([keras.Input((3,)), layers.Dense(1)], name="net")
    model.compile("sgd", "mse", exact=True)
    with pytest.raises(
        CallbackError, match=r'draws="replica"\), and \'net\' is compiled with exact=True, .* Leave out'
    ):
        kde.ReplicaSeeds(3, draws="replica").on_run_prepare(model)


def test_op_determinism_is_asked_of_tensorflow_where_a_run_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(tf.config.experimental, "enable_op_determinism", lambda: asked.append(True))
    model = kde.Sequential([keras.Input((3,)), layers.Dense(1)])
    model.compile("sgd", "mse")
    kde.ReplicaSeeds(3).on_run_prepare(model)
    assert asked == []
    kde.ReplicaSeeds(3, enable_op_determinism=True).on_run_prepare(model)
    assert asked == [True]
    with pytest.raises(SeedError, match="is a Sequential of stock Keras, whose random layers draw the same numbers"):
        kde.ReplicaSeeds(3).on_run_prepare(keras.Sequential([layers.Dense(1)]))


def test_a_signal_is_noticed_in_the_main_thread_only() -> None:
    failed: list[BaseException] = []

    def prepare() -> None:
        try:
            kde.on_preemption(lambda model: None).on_run_prepare(None)
        except CallbackError as error:
            failed.append(error)

    thread = threading.Thread(target=prepare)
    thread.start()
    thread.join()
    assert "on_preemption in a thread: Python delivers signals to the main thread only" in str(failed[0])


# Layers that see the whole batch

WHOLE: dict[str, Callable[[], Any]] = {
    "a histogram of all images": lambda: layers.Equalization(value_range=(0, 255), name="wide"),
    "the largest one of all examples": lambda: layers.MelSpectrogram(name="wide", power_to_db=True),
}


@pytest.mark.parametrize("what", WHOLE)
def test_a_layer_that_computes_something_of_all_examples_is_named(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "_warned", set())
    model = keras.Sequential([WHOLE[what]()])
    with pytest.raises(
        StepError, match=rf"The layer '.*wide' .*{what}.*dataset\.map\(.*; or compile without exact=True"
    ):
        check_whole_batch_layers(model, "train", exact=True)
    with pytest.warns(
        UserWarning, match=rf"The layer '.*wide' .*{what}.* so it gives other numbers than on one device"
    ):
        check_whole_batch_layers(model, "train", exact=False)


def test_layers_that_look_at_one_example_at_a_time_are_no_matter(recwarn: pytest.WarningsRecorder) -> None:
    apart = [layers.Dense(1), layers.MelSpectrogram(power_to_db=False), layers.MelSpectrogram(top_db=float("inf"))]
    check_whole_batch_layers(keras.Sequential(apart), "train", exact=True)
    check_whole_batch_layers(keras.Sequential([layers.Equalization()]), "test", exact=True)
    assert not recwarn.list


# Building


class Asks(kde.Model):
    """Calls a function with the number of examples, as far as it is known while it is traced."""

    def __init__(self, ask: Callable[[int | None], None]) -> None:
        super().__init__()
        self.ask = ask
        self.head = layers.Dense(1)

    def call(self, x: Any) -> Any:
        self.ask(x.shape[0])
        return self.head(x)


def built(ask: Callable[[int | None], None], num_rows: int | None = 4) -> Any:
    model = Asks(ask)
    model.compile("sgd", "mse")
    of_any = (tf.TensorSpec([None, 3]), tf.TensorSpec([None, 1]))
    exact = (tf.TensorSpec([num_rows, 3]), tf.TensorSpec([num_rows, 1]))
    build_for_run(model, "train", of_any, exact, was_traced=False)
    return model


def needs_rows(rows: int | None) -> None:
    if rows is None:
        raise ValueError("it must know the number of rows")


def test_a_model_that_must_know_the_number_of_examples_is_built_by_that_of_the_batch() -> None:
    assert tuple(built(needs_rows).head.kernel.shape) == (3, 1)
    with pytest.raises(ValueError, match="it must know the number of rows"):
        built(needs_rows, None)


def test_an_error_of_a_model_is_that_of_any_number_of_examples() -> None:
    def fails(rows: int | None) -> None:
        raise ValueError(f"wrong with {rows} rows")

    with pytest.raises(ValueError, match="wrong with None rows"):
        built(fails)

    def refuses(rows: int | None) -> None:
        raise StepError(f"refused with {rows} rows")

    with pytest.raises(StepError, match="refused with None rows"):
        built(refuses)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_replica_gets_as_many_rows_of_a_sparse_or_ragged_batch_as_of_a_dense_one(num_replicas: int) -> None:
    sparse = rows_of_one(tf.sparse.eye(5, 4), num_replicas)
    ragged = rows_of_one(tf.ragged.constant([[1.0], [], [2.0, 3.0], [], []]), num_replicas)
    rows = 5 if num_replicas == 1 else 3
    assert sparse == tf.SparseTensorSpec([rows, 4], tf.float32)
    assert ragged == tf.RaggedTensorSpec([rows, None], tf.float32, 1, tf.int64)


# Saving what it was compiled with


def test_arguments_are_saved_with_an_optimizer_that_is_given_by_its_name() -> None:
    class Named(kde.Model):
        """Says what it was compiled with by itself, as a class may."""

        def call(self, x: Any) -> Any:
            return x

    model = Named()
    model.compile("sgd", "mse", check="raise", virtual_replicas=None)
    model._compile_config.config["optimizer"] = "sgd"
    config: Any = model.get_compile_config()
    assert config["optimizer"]["class_name"] == "SGD"
    found = read_arguments(config)
    assert found["check"] == "raise"
    assert isinstance(found["optimizer"], keras.optimizers.SGD)


def test_steps_per_execution_of_a_file_are_those_that_it_was_compiled_with() -> None:
    for given, saved in (("auto", "auto"), (1, "auto"), (4, 4)):  # stock Keras, which may load it, has no "auto"
        model = kde.Sequential([keras.Input((3,)), layers.Dense(1)])
        model.compile("sgd", "mse", steps_per_execution=given)
        config: Any = model.get_compile_config()
        assert read_arguments(config)["steps_per_execution"] == saved


def test_without_an_optimizer_nothing_of_ours_is_saved() -> None:
    model = kde.Sequential([keras.Input((3,)), layers.Dense(1)])
    model.compile(None, "mse", check="raise")
    config: Any = model.get_compile_config()
    assert config["optimizer"] is None
    assert read_arguments(config)["check"] is True


def test_what_python_counts_meanwhile_is_taken_back() -> None:
    model = kde.Sequential([keras.Input((3,)), layers.Dense(1, name="head")])
    model.head = model.get_layer("head")
    model.head.calls, model.head.note = 3, "before"
    with kept_numbers(model):
        model.head.calls += 1
        model.head.note = "after"
        model.head.made = 1
    assert (model.head.calls, model.head.note) == (3, "before")
    assert not hasattr(model.head, "made")


class Named:
    """Beside a model."""

    def number_of_layers(self) -> int:
        return len(self.layers)  # type: ignore[attr-defined]


def test_a_class_beside_a_model_may_be_functional_too() -> None:
    class Net(Named, kde.Model):
        pass

    inputs = keras.Input((3,))
    net = Net(inputs, layers.Dense(1)(inputs))
    assert net.number_of_layers() == 2
    assert tuple(net(X).shape) == (6, 1)
    assert isinstance(net, Functional)


def test_a_class_that_compiles_by_itself_is_told_to_load_by_itself_as_by_keras() -> None:
    class Own(kde.Sequential):
        def compile(self, *args: Any, **kwargs: Any) -> None:
            super().compile(*args, **kwargs)

    model = Own([keras.Input((3,)), layers.Dense(1)])
    with pytest.warns(UserWarning, match="`compile\\(\\)` was not called as part of model loading"):
        model.compile_from_config({"optimizer": "sgd"})
    assert not model.compiled


def test_a_model_that_is_not_built_yet_builds_no_optimizer_when_it_is_loaded() -> None:
    config: Any = None
    for is_built in (True, False):
        model = kde.Sequential([*([keras.Input((3,))] if is_built else []), layers.Dense(1)])
        if is_built:
            model.compile("adam", "mse")
            config = model.get_compile_config()
        model.compile_from_config(config)
        assert model.optimizer.built is is_built


def test_the_guard_of_steps_is_kept_for_the_next_run() -> None:
    model = kde.Sequential([keras.Input((3,)), layers.Dense(1)])
    model.compile("sgd", "mse")
    assert model.guard_steps(0) is model.guard_steps(2)


def test_compiling_again_ends_what_waits_for_workers() -> None:
    closed: list[int] = []
    model = kde.Sequential([keras.Input((3,)), layers.Dense(1)])
    model.replica_runtime._coordinator = types.SimpleNamespace(close=lambda: closed.append(1))
    model.compile("sgd", "mse")
    model.compile("sgd", "mse")
    assert closed == [1]
    assert model.replica_runtime._coordinator is None
