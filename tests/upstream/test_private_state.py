"""What the functions of `_keras/` read of Keras' and TensorFlow's private state means what they say."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_dist_ext._keras.adapters import array_shuffle, make_data_adapter, num_array_examples
from keras_dist_ext._keras.callbacks import saves_each_epoch, traces_batches
from keras_dist_ext._keras.layers import attributes, call_with_training, clear_losses, layer_losses
from keras_dist_ext._keras.models import (
    compile_arguments,
    compute_loss,
    initial_epoch,
    set_initial_epoch,
    update_loss_tracker,
)
from keras_dist_ext._keras.optimizers import (
    accumulated_gradients,
    accumulators_of,
    ends_accumulation,
    inner_optimizer,
    num_batches_used,
    slots_by_attribute,
)
from keras_dist_ext._keras.strategies import has_several_workers, spec_of_replica
from keras_dist_ext._keras.variables import tf_variable

X = np.linspace(-1, 1, 12, dtype="float32").reshape(4, 3)
Y = X.sum(axis=1, keepdims=True)


def variables() -> list[Any]:
    return [keras.Variable([1.0, 2.0], name="first"), keras.Variable([3.0], name="second")]


# Optimizers


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_gradients_are_accumulated_where_we_look_until_the_batch_that_ends_the_accumulation(is_wrapped: bool) -> None:
    first, second = variables()
    inner = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
    optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=1.0) if is_wrapped else inner
    assert accumulated_gradients(optimizer) == []
    optimizer.build([first, second])
    assert inner_optimizer(optimizer) is inner
    of_first, of_second = accumulated_gradients(optimizer)
    assert [a is b for a, b in zip(accumulators_of(optimizer, [second, first]), (of_second, of_first), strict=True)]
    assert not bool(ends_accumulation(optimizer))
    optimizer.apply([tf.constant([4.0, 6.0]), tf.constant([8.0])], [first, second])
    assert (of_first.numpy().tolist(), of_second.numpy().tolist()) == ([4.0, 6.0], [8.0])
    assert bool(ends_accumulation(optimizer))
    assert num_batches_used(optimizer) == 1
    optimizer.apply([tf.constant([0.0, 0.0]), tf.constant([0.0])], [first, second])
    assert first.numpy().tolist() == [-1.0, -1.0]
    assert of_first.numpy().tolist() == [0.0, 0.0]


def test_an_optimizer_without_accumulation_has_no_accumulators() -> None:
    optimizer = keras.optimizers.SGD()
    optimizer.build(variables())
    assert accumulated_gradients(optimizer) == []


def test_what_an_optimizer_keeps_is_found_by_kind() -> None:
    optimizer = keras.optimizers.Adam()
    optimizer.build(variables())
    slots = slots_by_attribute(optimizer)
    assert {kind: len(kept) for kind, kept in slots.items() if kept} == {"momentums": 2, "velocities": 2}
    assert [slot.shape for slot in slots["velocities"]] == [(2,), (1,)]


# Layers and models


class Added(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        self.add_loss(keras.ops.max(x))
        return x


class TakesTraining(keras.layers.Layer):
    def call(self, x: Any, training: bool = False) -> Any:
        return x * (2.0 if training else 1.0)


def test_what_a_layer_adds_to_the_loss_is_its_own_until_it_is_cleared() -> None:
    added = Added()
    net = keras.Sequential([keras.Input((3,)), added, keras.layers.Dense(1)])
    net(X)
    assert [float(loss) for loss in layer_losses(added)] == [1.0]
    assert layer_losses(net) == []
    clear_losses(net)
    assert layer_losses(added) == []


def test_training_is_given_to_a_layer_that_takes_it() -> None:
    layer = TakesTraining()
    assert float(call_with_training(layer, tf.constant(1.0), training=True)) == 2.0
    assert float(call_with_training(layer, tf.constant(1.0), training=False)) == 1.0
    assert call_with_training(Added(), X, training=True) is not None


def test_attributes_of_a_layer_leave_out_what_tensorflow_tracks() -> None:
    layer = keras.layers.Layer()
    layer.held = tf.Variable(1.0)
    named = [name for name, value in attributes(layer) if value is layer.held]
    assert named == ["held"]
    assert any(name.startswith("_self_") for name in vars(layer))


def compiled(**arguments: Any) -> Any:
    net = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    net.compile(**{"optimizer": "sgd", "loss": "mse", **arguments})
    return net


def test_the_loss_of_a_step_is_that_of_compute_loss_and_is_logged_by_the_number_of_examples() -> None:
    net = compiled()
    net.train_on_batch(X, Y)  # builds it
    net.reset_metrics()
    loss = compute_loss(net, x=X, y=Y, y_pred=net(X), sample_weight=None, training=True)
    assert float(loss) == pytest.approx(float(net.compute_loss(X, Y, net(X))))
    update_loss_tracker(net, 1.0, num_examples=3)
    update_loss_tracker(net, 5.0, num_examples=1)
    assert float(net.get_metrics_result()["loss"]) == 2.0


def test_a_compute_loss_that_does_not_take_training_is_called_without_it() -> None:
    class Own(keras.Sequential):
        def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None) -> Any:
            return keras.ops.sum(y_pred)

    net = Own([keras.Input((3,)), keras.layers.Dense(1)])
    net.compile("sgd", "mse")
    assert compute_loss(net, x=X, y=Y, y_pred=net(X), sample_weight=None, training=True) is not None


def test_the_loss_that_was_given_to_compile_is_known() -> None:
    loss = keras.losses.MeanAbsoluteError()
    assert compile_arguments(compiled(loss=loss))["loss"] is loss


def test_fit_begins_with_the_epoch_that_it_was_told() -> None:
    net, epochs = compiled(), []
    assert initial_epoch(net) is None

    class Restore(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            set_initial_epoch(self.model, 2)

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            epochs.append(epoch)

    net.fit(X, Y, epochs=4, verbose=0, callbacks=[Restore()])
    assert epochs == [2, 3]
    assert initial_epoch(net) == 2


# Data, callbacks, strategies, variables


@pytest.mark.parametrize("shuffle", [True, False, "batch"])
def test_arrays_tell_how_many_examples_they_have_and_how_they_are_shuffled(shuffle: Any) -> None:
    adapter = make_data_adapter(X, Y, None, batch_size=2, shuffle=shuffle)
    assert (num_array_examples(adapter), array_shuffle(adapter)) == (4, shuffle)


def test_callbacks_of_keras_tell_whether_they_look_at_batches(tmp_path: Any) -> None:
    path, callbacks = str(tmp_path), keras.callbacks
    assert saves_each_epoch(callbacks.ModelCheckpoint(f"{path}/net.keras"))
    assert not saves_each_epoch(callbacks.ModelCheckpoint(f"{path}/net.keras", save_freq=3))
    assert saves_each_epoch(callbacks.BackupAndRestore(path))
    assert not saves_each_epoch(callbacks.BackupAndRestore(path, save_freq=3))
    assert [traces_batches(callbacks.TensorBoard(path, profile_batch=batches)) for batches in (0, 2)] == [False, True]


def test_a_spec_of_replicas_is_told_as_that_of_one(mirrored: Any) -> None:
    distributed = mirrored.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(X).batch(4))
    spec = spec_of_replica(distributed.element_spec)
    assert isinstance(spec, tf.TensorSpec)
    assert spec.shape.as_list() == [None, 3]
    assert spec_of_replica(spec) is spec


def test_strategies_of_one_process_have_no_workers(mirrored: Any) -> None:
    assert not has_several_workers(mirrored)
    assert not has_several_workers(tf.distribute.MultiWorkerMirroredStrategy())
    assert not has_several_workers(tf.distribute.get_strategy())


def test_the_variable_of_tensorflow_behind_one_of_keras_is_reached() -> None:
    variable = keras.Variable([1.0])
    assert isinstance(tf_variable(variable), tf.Variable)
    assert tf_variable(tf_variable(variable)) is tf_variable(variable)
    with keras.StatelessScope():
        assert tf_variable(keras.Variable(initializer="zeros", shape=(1,), dtype="float32")) is None
