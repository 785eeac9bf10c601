"""The one door to Keras, and the one place that touches what Keras and TensorFlow do not document.

Everything private is one function here, with the upstream file it stands on; ``tests/upstream`` fails when
one of them changes. Written against Keras 3.15.1 and TensorFlow 2.21.0.

While a replica's step is traced, Keras' own code must do what is right for *all* replicas: a loss divides by the
global number of elements, an optimizer sums gradients once. ``intercept(step)`` sends those few calls of the current
thread to ``step`` (see ``step.ReplicaStep``); outside of it, and for models that are not ours, nothing changes.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import pathlib
import random
import threading
import time
import uuid
import weakref
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import h5py
import numpy as np
import tensorflow as tf

from keras_dist_ext.errors import BackendError

if os.environ.get("TF_USE_LEGACY_KERAS", "0").lower() not in ("0", "", "false"):
    raise BackendError(
        "TF_USE_LEGACY_KERAS is set, so tf.keras is Keras 2 (tf_keras); keras_dist_ext is built on Keras 3. "
        "Unset TF_USE_LEGACY_KERAS before TensorFlow is imported."
    )

import keras

if keras.backend.backend() != "tensorflow":
    raise BackendError(
        f"Keras runs on the backend {keras.backend.backend()!r}; tf.distribute needs 'tensorflow'. "
        'Set KERAS_BACKEND=tensorflow, or "backend": "tensorflow" in ~/.keras/keras.json, before Keras is imported.'
    )

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from keras.src import api_export
from keras.src.backend.common import global_state, masking
from keras.src.backend.common.name_scope import current_path
from keras.src.backend.common.stateless_scope import StatelessScope
from keras.src.backend.tensorflow import nn as tf_nn
from keras.src.backend.tensorflow import numpy as tf_numpy
from keras.src.backend.tensorflow import optimizer as tf_optimizer
from keras.src.backend.tensorflow import random as tf_random
from keras.src.backend.tensorflow import trainer as tf_trainer
from keras.src.layers.convolutional.base_conv import BaseConv
from keras.src.layers.convolutional.base_conv_transpose import BaseConvTranspose
from keras.src.layers.convolutional.base_depthwise_conv import BaseDepthwiseConv
from keras.src.layers.convolutional.base_separable_conv import BaseSeparableConv
from keras.src.layers.convolutional.conv1d import Conv1D
from keras.src.layers.pooling.base_pooling import BasePooling
from keras.src.losses import loss as loss_module
from keras.src.losses import losses as losses_module
from keras.src.metrics import reduction_metrics
from keras.src.models.functional import Functional
from keras.src.models.model import functional_init_arguments
from keras.src.optimizers import base_optimizer, loss_scale_optimizer
from keras.src.random import seed_generator
from keras.src.saving import object_registration, serialization_lib
from keras.src.saving.keras_saveable import KerasSaveable
from keras.src.trainers import compile_utils, data_adapters
from keras.src.trainers.data_adapters import data_adapter_utils, py_dataset_adapter
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter
from keras.src.trainers.epoch_iterator import EpochIterator
from tensorflow.core.framework import graph_pb2
from tensorflow.python.data.experimental.ops import distribute as data_distribute
from tensorflow.python.data.ops import dataset_ops, iterator_ops
from tensorflow.python.distribute import distribute_utils, input_lib, numpy_dataset
from tensorflow.python.distribute import values as distribute_values
from tensorflow.python.distribute.coordinator import values as coordinator_values
from tensorflow.python.eager import context as tf_context
from tensorflow.python.eager.polymorphic_function import polymorphic_function, tracing_compilation
from tensorflow.python.framework import ops as tf_ops
from tensorflow.python.framework import random_seed
from tensorflow.python.ops import (
    control_flow_util,
    gen_random_ops,
    gen_stateless_random_ops,
    gen_stateless_random_ops_v2,
    handle_data_util,
    resource_variable_ops,
    summary_ops_v2,
)
from tensorflow.tsl.profiler.protobuf import xplane_pb2

__all__ = [
    "ArrayDataAdapter",
    "EpochIterator",
    "Functional",
    "GeneratorDataAdapter",
    "KerasSaveable",
    "StatelessScope",
    "TFDatasetAdapter",
    "functional_init_arguments",
    "intercept",
    "keras",
]

tree = keras.tree
Variable = keras.Variable
Unpack = data_adapter_utils.unpack_x_y_sample_weight


class Step(Protocol):
    """What Keras' code asks of the replica whose step is being traced."""

    def reduce_loss(self, local: Any, sample_weight: Any, mask: Any, reduction: str | None, dtype: Any) -> Any: ...

    def note_loss(self, value: Any) -> None: ...

    def as_mean(self, value: Any) -> Any: ...

    def mean_update(self, metric: Any, values: Any, sample_weight: Any) -> tuple[Any, Any]: ...

    def sum_update(self, metric: Any, values: Any, sample_weight: Any) -> tuple[Any, Any]: ...

    def scale_loss(self, optimizer: Any, loss: Any, original: Callable[[Any], Any]) -> Any: ...

    def apply(self, optimizer: Any, grads: Any, variables: Any, original: Callable[..., None]) -> None: ...

    def all_reduce_gradients(self, grads_and_vars: Any) -> Any: ...

    def all_reduce(self, reduce_op: Any, value: Any, original: Callable[..., Any]) -> Any: ...

    def next_seed(self, generator: Any, ordered: bool, original: Callable[[bool], Any]) -> Any: ...

    def op_seeds(self, op_seed: Any, original: Callable[[Any], Any]) -> Any: ...

    def constant_seed(self, seed: int) -> None: ...

    def compiled_draw(self, kind: str, shape: Any, dtype: Any, **key: Any) -> Any: ...

    def assign(self, variable: Any, value: Any, original: Callable[[Any], None]) -> None: ...

    def trace_of(self, function: Any) -> Any: ...

    def on_rows(self, inputs: Any, op: Callable[[Any], Any]) -> Any: ...

    def check_stateful(self, layer: Any) -> None: ...


_thread = threading.local()


@contextlib.contextmanager
def intercept(step: Step | None) -> Iterator[None]:
    """Send this thread's losses, metrics, assignments and optimizer calls to ``step``; ``None`` sends them to Keras."""
    before = getattr(_thread, "step", None)
    _thread.step = step
    try:
        yield
    finally:
        _thread.step = before


def current_step() -> Step | None:
    """The step whose replica this thread is tracing, if any."""
    return getattr(_thread, "step", None)


def _install(owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
    """Replace ``owner.name`` by ``hook(original, step, *args)`` for threads with a step, once per process."""
    original = getattr(owner, name)

    def decorate(hook: Callable[..., Any]) -> None:
        if getattr(original, "_kde_hook", False):
            return

        @functools.wraps(original)
        def hooked(*args: Any, **kwargs: Any) -> Any:
            step = getattr(_thread, "step", None)
            return original(*args, **kwargs) if step is None else hook(original, step, *args, **kwargs)

        hooked._kde_hook = True  # type: ignore[attr-defined]
        setattr(owner, name, hooked)

    return decorate


# keras/src/losses/loss.py: losses are local means; the step makes their sum over replicas exact.
@_install(loss_module, "scale_loss_for_distribution")
def _(original: Any, step: Step, value: Any) -> Any:
    return value


@_install(loss_module, "unscale_loss_for_distribution")
def _(original: Any, step: Step, value: Any) -> Any:
    return value


@_install(loss_module, "reduce_weighted_values")
def _(
    original: Any,
    step: Step,
    values: Any,
    sample_weight: Any = None,
    mask: Any = None,
    reduction: str | None = "sum_over_batch_size",
    dtype: Any = None,
) -> Any:
    local = original(values, sample_weight=sample_weight, mask=mask, reduction=reduction, dtype=dtype)
    if len(getattr(values, "shape", ())) == 0:
        return step.as_mean(local)
    return step.reduce_loss(local, sample_weight, mask, reduction, dtype)


# keras/src/trainers/trainer.py
@_install(keras.Model, "compute_loss")
def _(original: Any, step: Step, *args: Any, **kwargs: Any) -> Any:
    loss = original(*args, **kwargs)
    step.note_loss(loss)
    return loss


# keras/src/metrics/reduction_metrics.py
@_install(reduction_metrics.Mean, "update_state")
def _(original: Any, step: Step, metric: Any, values: Any, sample_weight: Any = None) -> Any:
    values, sample_weight = step.mean_update(metric, values, sample_weight)
    return original(metric, values, sample_weight=sample_weight)


@_install(reduction_metrics.Sum, "update_state")
def _(original: Any, step: Step, metric: Any, values: Any, sample_weight: Any = None) -> Any:
    values, sample_weight = step.sum_update(metric, values, sample_weight)
    return original(metric, values, sample_weight=sample_weight)


# keras/src/optimizers/base_optimizer.py, loss_scale_optimizer.py
for _optimizer_class in (base_optimizer.BaseOptimizer, loss_scale_optimizer.LossScaleOptimizer):

    @_install(_optimizer_class, "apply")
    def _(original: Any, step: Step, optimizer: Any, grads: Any, trainable_variables: Any = None) -> None:
        step.apply(optimizer, grads, trainable_variables, functools.partial(original, optimizer))

    @_install(_optimizer_class, "scale_loss")
    def _(original: Any, step: Step, optimizer: Any, loss: Any) -> Any:
        return step.scale_loss(optimizer, loss, functools.partial(original, optimizer))


# keras/src/backend/tensorflow/optimizer.py: the step has summed the gradients already.
@_install(tf_optimizer.TFOptimizer, "_all_reduce_sum_gradients")
def _(original: Any, step: Step, optimizer: Any, grads_and_vars: Any) -> Any:
    return step.all_reduce_gradients(grads_and_vars)


# keras/src/backend/tensorflow/core.py
@_install(keras.Variable, "_direct_assign")
def _(original: Any, step: Step, variable: Any, value: Any) -> None:
    step.assign(variable, value, functools.partial(original, variable))


def _read_as(kind: type) -> Callable[[Any], Any]:
    return lambda variable: kind(variable.numpy())


# tensorflow/python/distribute/values.py: `float(optimizer.learning_rate)` works with a variable of one device only.
for _number in (int, float):
    if f"__{_number.__name__}__" not in vars(distribute_values.DistributedVariable):
        setattr(distribute_values.DistributedVariable, f"__{_number.__name__}__", _read_as(_number))


# keras/src/backend/common/variables.py: initial values are drawn alike on all replicas.
@_install(keras.Variable, "__init__")
def _(original: Any, step: Step, variable: Any, *args: Any, **kwargs: Any) -> None:
    with intercept(None):
        original(variable, *args, **kwargs)


# keras/src/random/seed_generator.py: its state is mirrored, so that all replicas would draw the same numbers.
@_install(keras.random.SeedGenerator, "next")
def _(original: Any, step: Step, generator: Any, ordered: bool = True) -> Any:
    return step.next_seed(generator, ordered, functools.partial(original, generator))


# keras/src/backend/tensorflow/random.py: an integer as a seed is a constant.
@_install(tf_random, "draw_seed")
def _(original: Any, step: Step, seed: Any) -> Any:
    if isinstance(seed, int):
        step.constant_seed(seed)
    return original(seed)


# tensorflow/python/framework/random_seed.py: the seeds of tf.random.* ops are alike on all workers, or not set.
@_install(random_seed, "get_seed")
def _(original: Any, step: Step, op_seed: Any) -> Any:
    return step.op_seeds(op_seed, original)


# tensorflow/python/ops/gen_stateless_random_ops_v2.py: XLA makes other floats of the same random bits.
for _kind in ("uniform", "normal"):

    @_install(gen_stateless_random_ops_v2, f"stateless_random_{_kind}_v2")
    def _(
        original: Any,
        step: Step,
        shape: Any,
        key: Any,
        counter: Any,
        alg: Any,
        dtype: Any = tf.float32,
        name: Any = None,
        kind: str = _kind,
    ) -> Any:
        drawn = step.compiled_draw(kind, shape, tf.as_dtype(dtype), key=key, counter=counter, alg=alg)
        return original(shape, key, counter, alg, dtype, name) if drawn is None else drawn


# tensorflow/python/distribute/distribute_lib.py: BatchNormalization(synchronized=True) calls it in the forward pass.
@_install(tf.distribute.ReplicaContext, "all_reduce")
def _(original: Any, step: Step, context: Any, reduce_op: Any, value: Any, options: Any = None) -> Any:
    return step.all_reduce(reduce_op, value, functools.partial(original, context, options=options))


# tensorflow/python/eager/backprop.py: what a step of the user's own differentiates is looked at before it runs.
@_install(tf.GradientTape, "gradient")
def _(
    original: Any, step: Step, tape: Any, target: Any, sources: Any, output_gradients: Any = None, **kwargs: Any
) -> Any:
    def gradient(target: Any, output_gradients: Any) -> Any:
        return original(tape, target, sources, output_gradients, **kwargs)

    if output_gradients is None and hasattr(step, "differentiate"):
        return step.differentiate(gradient, target, sources)
    return gradient(target, output_gradients)


# tensorflow/python/ops/nn_impl_distribute.py: these divide by the number of replicas, over which steps here are means.
@_install(tf.nn, "compute_average_loss")
def _(
    original: Any, step: Step, per_example_loss: Any, sample_weight: Any = None, global_batch_size: Any = None
) -> Any:
    rows = tf.shape(per_example_loss)[0] if global_batch_size is None else global_batch_size
    return original(per_example_loss, sample_weight=sample_weight, global_batch_size=rows)


@_install(tf.nn, "scale_regularization_loss")
def _(original: Any, step: Step, regularization_loss: Any) -> Any:
    return tf.reduce_sum(regularization_loss)


# keras/src/backend/tensorflow/nn.py: TensorFlow's kernels fail on no rows, and some end the process.
for _op_name in ("conv", "conv_transpose", "depthwise_conv", "separable_conv", "max_pool"):

    @_install(tf_nn, _op_name)
    def _(original: Any, step: Step, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return step.on_rows(inputs, lambda rows: original(rows, *args, **kwargs))


# keras/src/layers/convolutional, pooling: around the whole layer, so that TensorFlow still fuses it with its bias.
for _layer_class in (Conv1D, BaseConv, BaseConvTranspose, BaseDepthwiseConv, BaseSeparableConv, BasePooling):

    @_install(_layer_class, "call")
    def _(original: Any, step: Step, layer: Any, inputs: Any) -> Any:
        return step.on_rows(inputs, lambda rows: original(layer, rows))


# keras/src/backend/tensorflow/nn.py: the kernel behind it fails on no rows too.
@_install(tf_nn, "ctc_loss")
def _(
    original: Any, step: Step, target: Any, output: Any, target_length: Any, output_length: Any, mask_index: int = 0
) -> Any:
    others = [tf.convert_to_tensor(value) for value in (target, target_length, output_length)]

    def of_as_many(rows: tf.Tensor) -> Any:
        missing = tf.shape(rows)[0] - tf.shape(others[0])[0]
        padded = [tf.pad(value, [[0, missing], *[[0, 0]] * (value.shape.rank - 1)]) for value in others]
        return original(padded[0], rows, padded[1], padded[2], mask_index)

    return step.on_rows(output, of_as_many)


# keras/src/losses/losses.py: Dice and Tversky divide sums over all rows by each other, which is no mean over rows.
@_install(losses_module.LossFunctionWrapper, "call")
def _(original: Any, step: Step, loss: Any, y_true: Any, y_pred: Any) -> Any:
    for keras_own, over_all in ((losses_module.dice, _dice), (losses_module.tversky, _tversky)):
        if loss.fn is keras_own:
            loss = losses_module.LossFunctionWrapper(functools.partial(over_all, keras_own), **loss._fn_kwargs)
            break
    return original(loss, y_true, y_pred)


def _dice(keras_own: Any, y_true: Any, y_pred: Any, axis: Any = None) -> Any:
    if not _spans_rows(y_pred, axis):
        return keras_own(y_true, y_pred, axis=axis)
    y_true = tf.cast(y_true, y_pred.dtype)
    both, true, predicted = _sums_over_replicas([tf.reduce_sum(v, axis) for v in (y_true * y_pred, y_true, y_pred)])
    return 1 - 2 * both / (true + predicted + keras.backend.epsilon())


def _tversky(keras_own: Any, y_true: Any, y_pred: Any, alpha: float = 0.5, beta: float = 0.5, axis: Any = None) -> Any:
    if not _spans_rows(y_pred, axis):
        return keras_own(y_true, y_pred, alpha=alpha, beta=beta, axis=axis)
    y_true = tf.cast(y_true, y_pred.dtype)
    parts = y_true * y_pred, (1 - y_pred) * y_true, y_pred * (1 - y_true)
    both, missed, wrong = _sums_over_replicas([tf.reduce_sum(part, axis) for part in parts])
    return 1 - both / (both + alpha * missed + beta * wrong + keras.backend.epsilon())


def _spans_rows(y_pred: Any, axis: Any) -> bool:
    return axis is None or any(place % len(y_pred.shape) == 0 for place in tree.flatten(axis))


def _sums_over_replicas(values: list[Any]) -> list[Any]:
    context = tf.distribute.get_replica_context()
    return list(context.all_reduce(tf.distribute.ReduceOp.SUM, values))


# keras/src/layers/normalization/batch_normalization.py: with a mask, Keras' moments are those of a replica's own rows.
@_install(keras.layers.BatchNormalization, "_moments")
def _(original: Any, step: Step, layer: Any, inputs: Any, mask: Any) -> Any:
    if mask is None or not layer.synchronized:
        return original(layer, inputs, mask)
    is_valid = tf.broadcast_to(tf.cast(tf.expand_dims(mask, -1), tf.bool), tf.shape(inputs))

    def sums(*values: Any) -> list[Any]:
        return _sums_over_replicas([tf.reduce_sum(value, layer._reduction_axes, keepdims=True) for value in values])

    total, count = sums(tf.where(is_valid, inputs, 0), tf.cast(is_valid, inputs.dtype))
    count += keras.backend.epsilon()
    mean = total / count
    (squares,) = sums(tf.square(tf.where(is_valid, inputs - mean, 0)))
    return tf.squeeze(mean), tf.squeeze(squares / count)


# keras/src/layers/rnn/rnn.py: `states` has a row for each of the whole batch.
@_install(keras.layers.RNN, "call")
def _(original: Any, step: Step, layer: Any, *args: Any, **kwargs: Any) -> Any:
    if layer.stateful:
        step.check_stateful(layer)
    return original(layer, *args, **kwargs)


# keras/src/backend/tensorflow/numpy.py: takes what has no rows for the vector of a bias, since 0 is no more than 1.
@_install(tf_numpy, "add")
def _(original: Any, step: Step, x1: Any, x2: Any) -> Any:
    if 0 not in (getattr(x2, "shape", None) or ()):
        return original(x1, x2)
    dtype = keras.backend.result_type(*(getattr(x, "dtype", type(x)) for x in (x1, x2)))
    return tf.add(*(tf.cast(keras.ops.convert_to_tensor(x), dtype) for x in (x1, x2)))


# tensorflow/python/eager/polymorphic_function/polymorphic_function.py: a trace is used again on the same device.
@_install(polymorphic_function.Function, "__call__")
def _(original: Any, step: Step, function: Any, *args: Any, **kwargs: Any) -> Any:
    return original(step.trace_of(function), *args, **kwargs)


def copy_of_function(function: Any) -> Any:
    """A tf.function like another, without its traces (polymorphic_function.py).

    One that was loaded from a file has nothing but its traces (saved_model/function_deserialization.py), and is itself.
    """
    return function._clone(None) if type(function) is polymorphic_function.Function else function


_stock_epoch_iterator = tf_trainer.TFEpochIterator


@functools.wraps(_stock_epoch_iterator, updated=())
def _epoch_iterator(*args: Any, **kwargs: Any) -> Any:
    make = getattr(_thread, "epoch_iterator", None)
    return _stock_epoch_iterator(*args, **kwargs) if make is None else make(*args, **kwargs)


tf_trainer.TFEpochIterator = _epoch_iterator


@contextlib.contextmanager
def epoch_iterators(make: Callable[..., Any]) -> Iterator[None]:
    """Have ``fit``, ``evaluate`` and ``predict`` of this thread read their data through ``make(**kwargs)``.

    keras/src/backend/tensorflow/trainer.py builds a ``TFEpochIterator`` by name in each of them.
    """
    before = getattr(_thread, "epoch_iterator", None)
    _thread.epoch_iterator = make
    try:
        yield
    finally:
        _thread.epoch_iterator = before


@contextlib.contextmanager
def local_updates(strategy: tf.distribute.Strategy, step: Step) -> Iterator[None]:
    """Let each replica update its own copy of mirrored variables, without leaving its thread, by ``step.assign``.

    tensorflow/python/distribute/mirrored_strategy.py and values.py do so when ``extended._use_merge_call()`` is false
    (under XLA on GPUs). All replicas hold the same reduced gradients, so their copies stay equal; and the conditionals
    of Keras' optimizers (loss scale, EMA, accumulation) become ordinary graph code.
    """
    extended = strategy.extended
    if "_use_merge_call" not in vars(extended):  # once, because other threads may train under the strategy too
        of_strategy = extended._use_merge_call
        extended._use_merge_call = lambda: not getattr(_thread, "updates_locally", False) and of_strategy()
    _thread.updates_locally = True
    try:
        with intercept(step):
            yield
    finally:
        _thread.updates_locally = False


def local_component(variable: Any) -> Any:
    """The copy of a mirrored ``tf.Variable`` that belongs to the current replica (values.py)."""
    value = variable._value if isinstance(variable, keras.Variable) else variable
    return value._get_on_device_or_primary() if hasattr(value, "_get_on_device_or_primary") else value


def is_sync_on_read(variable: Any) -> bool:
    """Whether each replica holds its own part of the variable, to be summed when read (values.py)."""
    value = variable._value if isinstance(variable, keras.Variable) else variable
    return getattr(value, "synchronization", None) == tf.VariableSynchronization.ON_READ and hasattr(value, "_values")


def components(variable: Any) -> tuple[Any, ...]:
    """The copies of a variable on this worker's replicas, or the variable itself (values.py)."""
    value = variable._value if isinstance(variable, keras.Variable) else variable
    return tuple(getattr(value, "_values", (value,)))


def whole_variable(variable: Any) -> Any:
    """The mirrored variable that a copy of it belongs to, or the variable itself (distribute_utils.py)."""
    return distribute_utils.value_container(variable)


def served_variable(variable: Any) -> Any:
    """What a parameter server holds, which is what graphs know of a variable; or the variable itself (ps_values.py)."""
    return getattr(variable, "_v", variable)


def regroup(values: Sequence[Any]) -> Any:
    """One value a local replica, as what ``strategy.run`` and ``merge_call`` take (distribute_utils.py)."""
    return distribute_utils.regroup(tuple(values), always_wrap=True)


def apply_mask(sample_weight: Any, mask: Any, dtype: Any, reduction: str | None) -> Any:
    """Merge a mask into sample weights as keras/src/losses/loss.py does."""
    return loss_module.apply_mask(sample_weight, mask, dtype=dtype, reduction=reduction)


def replica_id() -> Any:
    """The current replica's number over all workers: an int but on TPUs (distribute_lib.py hides it in a constant)."""
    number = tf.distribute.get_replica_context().replica_id_in_sync_group
    static = tf.get_static_value(number) if tf.is_tensor(number) else number
    return number if static is None else int(static)


def local_replica() -> int:
    """The current replica's number in this process; outside of replicas that of the first, 0."""
    context = tf.distribute.get_replica_context()
    return 0 if context is None else int(replica_id()) - first_replica(context.strategy)


def move_variable(variable: Any, strategy: tf.distribute.Strategy, devices: Sequence[str]) -> None:
    """Make the `tf.Variable` of a Keras variable anew on other devices, one for each replica, with the same values.

    A MirroredStrategy makes a mirrored variable on the `_devices` of what it is to lie beside, a OneDeviceStrategy on
    a `SingleDevice` (tensorflow/python/distribute/mirrored_strategy.py, one_device_strategy.py, `_create_variable`;
    public is `extended.colocate_vars_with`, which takes a variable). A Keras variable makes its `tf.Variable` in
    `_initialize` (keras/src/backend/tensorflow/core.py).
    """
    values = [copy.numpy() for copy in components(variable)]
    places = [f"/device:{device}" for device in devices]
    if is_default_strategy(strategy):
        with tf.device(places[0]):
            variable._initialize(values[0])
        return
    is_mirrored = not isinstance(strategy, tf.distribute.OneDeviceStrategy)
    beside = _Beside(tuple(places)) if is_mirrored else numpy_dataset.SingleDevice(places[0])

    def create(next_creator: Any, **kwargs: Any) -> Any:
        return next_creator(**{**kwargs, "colocate_with": beside})

    with strategy.scope(), tf.variable_creator_scope(create):
        variable._initialize(values[0])
    for copy, value in zip(components(variable), values, strict=True):
        copy.assign(value)


class _Beside(NamedTuple):
    """Stands for a variable that others are to lie beside."""

    devices: tuple[str, ...]

    @property
    def _devices(self) -> tuple[str, ...]:
        return self.devices


def functions_of_op(op: Any) -> list[Any]:
    """The graphs of the functions that an op calls: that of a call, of each branch, or of a loop's body and condition.

    tensorflow/python/framework/ops.py keeps the functions of a graph (`Graph._get_function`), and
    eager/polymorphic_function/atomic_function.py the graph that one was traced to. None are known of other ops.
    """
    given = [op.get_attr(name) for name in _FUNCTIONS_OF_OP.get(op.type, ())]
    functions = given[0] if op.type in ("Case", "StatelessCase") else given
    found = []
    for function in functions:
        graph = op.graph
        while graph is not None and graph._get_function(function.name) is None:
            graph = getattr(graph, "outer_graph", None)
        if graph is None:
            return []
        found.append(graph._get_function(function.name).graph)
    return found


_FUNCTIONS_OF_OP = {
    **dict.fromkeys(("PartitionedCall", "StatefulPartitionedCall"), ("f",)),
    **dict.fromkeys(("If", "StatelessIf"), ("then_branch", "else_branch")),
    **dict.fromkeys(("Case", "StatelessCase"), ("branches",)),
    **dict.fromkeys(("While", "StatelessWhile"), ("body", "cond")),
}


def set_device(op: Any, device: str) -> None:
    """Have an op of a graph that is being traced run on a device (tensorflow/python/framework/ops.py)."""
    op._set_device(device if device.startswith("/") else f"/device:{device}")


def keep_mask(tensor: Any, other: Any) -> None:
    """Give a tensor the mask that Keras keeps at another (keras/src/backend/common/masking.py)."""
    mask = masking.get_keras_mask(tensor)
    if mask is not None:
        masking.set_keras_mask(other, mask)


def op_spans(directory: str) -> Iterator[tuple[str, float, float]]:
    """When ops ran, by name, of the profile that `tf.profiler.experimental.stop` has written to a directory.

    The profiler's files hold an event `name:type` for each op, in picoseconds after its line's begin
    (tensorflow/tsl/profiler/protobuf/xplane.proto; named in tensorflow/core/framework/op_kernel.cc, `TraceString`).
    """
    for path in pathlib.Path(directory).rglob("*.xplane.pb"):
        for plane in xplane_pb2.XSpace.FromString(path.read_bytes()).planes:
            names = {number: event.name.partition(":")[0] for number, event in plane.event_metadata.items()}
            for line in plane.lines:
                for event in line.events:
                    begin = line.timestamp_ns * 1e-9 + event.offset_ps * 1e-12
                    yield names[event.metadata_id], begin, begin + event.duration_ps * 1e-12


def global_seed_generator() -> Any:
    """The generator behind ``seed=None``, made here and now if there is none (random/seed_generator.py).

    It is the thread's, and TensorFlow runs each replica in a thread of its own.
    """
    state = random.getstate()
    try:
        return seed_generator.global_seed_generator()
    finally:
        random.setstate(state)


@contextlib.contextmanager
def draws_without_seed(generator: Any) -> Iterator[None]:
    """Have ``seed=None`` of this thread draw from ``generator`` (random/seed_generator.py, a global of the thread)."""
    before = global_state.get_global_attribute("global_seed_generator")
    global_state.set_global_attribute("global_seed_generator", generator)
    try:
        yield
    finally:
        global_state.set_global_attribute("global_seed_generator", before)


def copy_of_seed_generator(generator: Any) -> Any:
    """A generator in the same state, made in the scope that is entered (random/seed_generator.py).

    Of several workers all get the chief's seed, which TensorFlow hands out when the variable is made.
    """
    seed, counter = (int(n) for n in components(generator.state)[0].numpy())
    copy = keras.random.SeedGenerator(seed)
    for state in components(copy.state):
        state.assign([state[0], counter])
    return copy


def seed_generators(layer: Any) -> list[Any]:
    """A layer's own generators, without those of the layers in it (keras/src/layers/layer.py)."""
    return list(layer._seed_generators)


def first_replica(strategy: tf.distribute.Strategy) -> int:
    """The number of this worker's first replica (distribute/collective_all_reduce_strategy.py)."""
    worker = int(getattr(strategy.extended, "_id_in_cluster", 0))
    return worker * len(strategy.extended.worker_devices) if worker else 0


@contextlib.contextmanager
def kept_losses(model: Any) -> Iterator[None]:
    """Keep what layers were given to ``add_loss`` while other replicas of the model use the same lists (layer.py)."""
    kept = losses_of_layers(model)
    yield
    set_losses_of_layers(kept)


def losses_of_layers(model: Any) -> list[tuple[Any, list[Any], set[int]]]:
    """What each layer was given to ``add_loss`` since the model was last called (keras/src/layers/layer.py)."""
    return [(layer, list(layer._losses), set(layer._loss_ids)) for layer in model._flatten_layers()]


def set_losses_of_layers(losses: Sequence[tuple[Any, list[Any], set[int]]]) -> None:
    """Put back what ``losses_of_layers`` has returned (keras/src/layers/layer.py)."""
    for layer, given, ids in losses:
        layer._losses[:] = given
        layer._loss_ids.clear()
        layer._loss_ids.update(ids)


def this_place(context: tf.distribute.ReplicaContext) -> Callable[[str], contextlib.AbstractContextManager[None]]:
    """Note where a replica's thread is, for other threads to enter there: graph, device, globals, summaries.

    tensorflow/python/distribute/mirrored_run.py has threads for replicas, which it prepares likewise. Keras' globals
    belong to a thread (keras/src/backend/common/global_state.py).

    Args:
        context: the replica context to enter.

    Returns:
        What enters, and takes a name for the scope of the ops.
    """
    graph, is_eager = tf_ops.get_default_graph(), tf.executing_eagerly()
    with tf.init_scope():
        outside = tf_ops.get_default_graph(), tf.executing_eagerly()
    globals_of_keras = dict(vars(global_state.GLOBAL_STATE_TRACKER))
    summaries = dict(vars(summary_ops_v2._summary_state))
    if is_eager:
        device, scope = tf_context.context().device_name, ""
    else:
        graph.switch_to_thread_local()
        devices, scope = graph._device_function_stack.copy(), graph.get_name_scope()

    @contextlib.contextmanager
    def enter(name: str) -> Iterator[None]:
        vars(global_state.GLOBAL_STATE_TRACKER).update(globals_of_keras)
        vars(summary_ops_v2._summary_state).update(summaries)
        with contextlib.ExitStack() as stack:
            for place, eagerly in (outside, (graph, is_eager)):
                stack.enter_context(place.as_default())
                if eagerly:
                    stack.enter_context(tf_context.eager_mode())
            if is_eager:
                stack.enter_context(tf.device(device))
            else:
                graph._device_function_stack = devices.copy()
                stack.enter_context(tf.name_scope(f"{scope}/{name}/" if scope else f"{name}/"))
            stack.enter_context(context)
            yield

    return enter


def run_in_any_order(value: tf.Tensor) -> None:
    """Let the stateful op that makes a tensor run as soon as its inputs are there, while a function is traced.

    Stateful ops without a resource run in the order in which they were traced, those of one replica after those of the
    replicas before it (python/framework/auto_control_deps.py, `run_independently`).
    """
    manager = getattr(tf_ops.get_default_graph(), "experimental_acd_manager", None)
    if manager is not None and not tf.executing_eagerly():
        manager.run_independently(value.op)


class NamedVariable:
    """A variable on the current device, in a strategy's scope too, that graphs may find by its name.

    What a graph captures becomes an argument. Those and whatever else waits for nothing are handed to threads one by
    one when a call begins (``ScheduleReady`` in core/common_runtime/executor.cc), and who calls looks at each: together
    some 1 µs a handle. In a loop it is the other way around: what is captured costs nothing there.

    Args:
        initial_value: a tensor.

    Attributes:
        handle: to be used eagerly, or captured.
    """

    def __init__(self, initial_value: tf.Tensor) -> None:
        self._named = {
            "dtype": initial_value.dtype,
            "shape": initial_value.shape,
            "shared_name": f"keras_dist_ext_{uuid.uuid4().hex}",
        }
        self.handle: Any = tf.raw_ops.VarHandleOp(**self._named)
        self.handle._handle_data = handle_data_util.create_handle_data(initial_value.shape, initial_value.dtype)
        self._deleter = resource_variable_ops.EagerResourceDeleter(self.handle, self.handle.device)
        tf.raw_ops.AssignVariableOp(resource=self.handle, value=initial_value)

    def handle_in_graph(self) -> tf.Tensor:
        """Return its handle in the graph that is traced, on the current device; what it waits for, it waits for."""
        handle = tf.raw_ops.VarHandleOp(**self._named)
        run_in_any_order(handle)
        return handle

    def value(self) -> tf.Tensor:
        """Read it, eagerly; methods of variables take several times as long."""
        return tf.raw_ops.ReadVariableOp(resource=self.handle, dtype=self._named["dtype"])

    def assign(self, value: Any) -> None:
        """Set it, eagerly."""
        tf.raw_ops.AssignVariableOp(resource=self.handle, value=value)


def in_xla() -> bool:
    """Whether the code being traced will be compiled by XLA."""
    return bool(control_flow_util.GraphOrParentsInXlaContext(tf_ops.get_default_graph()))


def overrides(model: Any, name: str) -> bool:
    """Whether a user's class replaces the method ``name`` of Keras' trainer."""
    return getattr(getattr(type(model), name), "__module__", "").split(".")[0] not in ("keras", "keras_dist_ext")


def per_worker_values(strategy: Any, values: Sequence[Any]) -> Any:
    """Put one value on each worker of a ParameterServerStrategy: a tensor, or an iterator over a dataset.

    TensorFlow's ``create_per_worker_dataset`` (coordinator/values.py, cluster_coordinator.py) gives all workers the
    same dataset; here each has its own, sent as a graph just as there. A worker that comes back makes its value again.
    """
    workers = tf.distribute.coordinator.ClusterCoordinator(strategy)._cluster.workers
    made = []
    for worker, value in zip(workers, values, strict=True):
        if isinstance(value, tf.data.Dataset):
            graph, spec = coordinator_values.serialize_dataset_to_graph(value), value.element_spec
            make = tf.function(functools.partial(coordinator_values.deserialize_dataset_from_graph, graph, spec))
            traced = make.get_concrete_function()
            remote = worker.create_resource(lambda dataset=traced: iter(dataset()))
            remote._type_spec = input_lib.get_iterator_spec_from_dataset(strategy, traced.structured_outputs)
        else:
            remote = worker.create_resource(tf.function(functools.partial(tf.constant, value)).get_concrete_function())
        made.append(remote)
    return tf.distribute.coordinator.PerWorkerValue(made)


def dataset_graph(dataset: tf.data.Dataset) -> Any:
    """The graph of a dataset as tf.data serializes it, or None where it cannot (dataset_ops.py).

    Of the device of a `tf.py_function`, TensorFlow leaves "/device::0", which it refuses when a dataset is made of it.
    """
    try:
        graph = graph_pb2.GraphDef.FromString(dataset._as_serialized_graph(strip_device_assignment=True).numpy())
    except (tf.errors.OpError, ValueError, DecodeError):
        return None
    for function in graph.library.function:
        for node in function.node_def:
            if "/device::" in node.device:
                node.device = ""
    return graph


def iterator_state(iterator: Any) -> list[bytes] | None:
    """What a dataset's iterator holds, buffers included; None where it depends on what TensorFlow cannot save.

    tensorflow/python/data/ops/iterator_ops.py does the same for `tf.train.Checkpoint`, which writes files.
    """
    fail = tf.data.experimental.ExternalStatePolicy.FAIL.value
    try:
        state = tf.raw_ops.SerializeIterator(resource_handle=iterator._iterator_resource, external_state_policy=fail)
        return [tf.io.serialize_tensor(part).numpy() for part in tf.unstack(state)]
    except (tf.errors.OpError, AttributeError):
        return None


def shuffles_without_seed(dataset: tf.data.Dataset) -> bool:
    """Whether a dataset shuffles by a seed that TensorFlow draws, told without its graph (data/ops/shuffle_op.py)."""
    own = [getattr(dataset, name, 1) for name in ("_seed", "_seed2")]
    is_shuffle = type(dataset).__name__ == "_ShuffleDataset"
    return (is_shuffle and not any(int(seed) for seed in own)) or any(map(shuffles_without_seed, dataset._inputs()))


def draws_order(graph: Any) -> bool:
    """Whether a dataset shuffles, or has a source of random numbers, also in its functions (dataset_ops.py).

    The state of an iterator then does not bring back what comes after this pass: saved when a shuffle has taken the
    last element of its input, it loses count of the passes (core/kernels/data/shuffle_dataset_op.cc, TensorFlow 2.21).
    """
    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    return any(node.op.startswith(("Shuffle", "RandomDataset")) for node in nodes)


def set_iterator_state(iterator: Any, state: Sequence[bytes]) -> bool:
    """Put back what ``iterator_state`` has returned; return whether that has worked (iterator_ops.py)."""
    try:
        parts = tf.stack([tf.io.parse_tensor(part, tf.variant) for part in state])
        tf.raw_ops.DeserializeIterator(resource_handle=iterator._iterator_resource, serialized=parts)
    except (tf.errors.OpError, AttributeError):
        return False
    return True


def shard_indices(graph: Any) -> list[tuple[int, ...]]:
    """The (number of shards, index) of each ``Dataset.shard`` in the graph."""
    constants = {n.name: n for n in graph.node if n.op == "Const"}

    def value(name: str) -> int:
        node = constants.get(name)
        return -1 if node is None else int(tf.make_ndarray(node.attr["value"].tensor))

    return [tuple(value(i) for i in node.input[1:3]) for node in graph.node if node.op == "ShardDataset"]


def checksum_of_constants(graph: Any) -> int:
    """Tell the arrays and lists of files apart that a dataset is made of (dataset_ops.py: `Const` nodes).

    Of a text, the part after its last slash counts: folders may be called differently on each machine.
    """
    checksum = 0
    states = [node.name for node, _ in generator_states(graph)]  # random, where a layer was given no seed
    for node in graph.node:
        tensor = node.attr["value"].tensor
        if node.op != "Const" or not tensor.tensor_shape.dim or node.name in states:
            continue
        if tensor.dtype == tf.string.as_datatype_enum:
            texts = tf.io.parse_tensor(tensor.SerializeToString(), tf.string).numpy().ravel()
            texts = [text.rpartition(b"/")[2] for text in texts]
            checksum = zlib.crc32(repr(texts).encode(), checksum)
        else:
            checksum = zlib.crc32(tensor.SerializeToString(deterministic=True), checksum)
    return checksum


def with_seeds(
    dataset: tf.data.Dataset,
    graph: Any,
    seed: int,
    map_seed: int | None = None,
    *,
    same_passes: bool = False,
    over_global: bool = False,
) -> tf.data.Dataset:
    """Return the dataset with a seed of its own in each shuffle and random op that has none, also in its functions.

    A shuffle without a seed draws one when it is made, differently in each process. tf.data's ShuffleDatasetV3 and
    RandomDatasetV2 hold it in a resource; ShuffleDataset and RandomDataset are the same with the seed in the graph
    (shuffle_dataset_op.cc, random_dataset_op.cc).

    Args:
        dataset: what ``graph`` was made of.
        graph: is changed.
        seed: for shuffles.
        map_seed: for random ops in functions such as that of ``map``, and for the generators that they draw from,
            which are copies in what is made anew; None leaves them alone.
        same_passes: whether shuffles give the same order in each pass, also those that have a seed.
        over_global: whether what has a seed because of ``tf.random.set_seed`` only counts as having none.
    """
    found = 0
    for nodes, of_output in [(graph.node, ""), *((f.node_def, ":output:0") for f in graph.library.function)]:
        constants = {f"{n.name}{of_output}": n for n in nodes if n.op == "Const"}
        for node in list(nodes):
            first = {"ShuffleDatasetV3": 2, "RandomDatasetV2": 0}.get(node.op)
            if first is None or not all(name in constants for name in node.input[first : first + 2]):
                continue
            places = range(first, first + 2)
            seeds = [int(tf.make_ndarray(constants[node.input[i]].attr["value"].tensor)) for i in places]
            is_seeded = any(seeds) and not (over_global and _is_of_global_seed(seeds, 2**16, 2**31))
            if is_seeded and not same_passes:
                continue
            found += 1
            node.op = node.op[:-2]
            node.attr.pop("rerandomize_each_iteration", None)
            del node.input[first + 2 :]
            if same_passes and "reshuffle_each_iteration" in node.attr:
                node.attr["reshuffle_each_iteration"].b = False
            if is_seeded:
                continue
            for i, part in zip(places, (seed % 2**62, found), strict=True):
                constant = nodes.add(name=f"{node.name}/seed_{i}", op="Const")
                constant.attr["dtype"].type = tf.int64.as_datatype_enum
                constant.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(part + 1, tf.int64))
                node.input[i] = f"{constant.name}{of_output}"
    if map_seed is not None:
        for node in unseeded_ops(graph, over_global=over_global):
            found += 1
            node.attr["seed"].i, node.attr["seed2"].i = map_seed % 2**62 + 1, found
        for constant, state in generator_states(graph):
            found += 1
            key = (map_seed + found * 0x9E3779B1) % (2**31 - 2)
            begin = [key, 0] if len(state) == 2 else [0, 0, key]
            constant.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(np.array(begin, state.dtype)))
    if not found:
        return dataset
    variant = tf.raw_ops.DatasetFromGraph(graph_def=graph.SerializeToString())
    seeded = dataset_ops._VariantDataset(variant, dataset.element_spec)
    return seeded.with_options(dataset.options())


def unseeded_ops(graph: Any, *, over_global: bool = False) -> list[Any]:
    """The random ops without a seed in the functions of a dataset's graph (python/ops/random_ops.py)."""
    found = []
    for function in graph.library.function:
        ops = [node for node in function.node_def if node.op in _RANDOM_OPS]
        for node in ops:
            seeds = [node.attr["seed"].i, node.attr["seed2"].i]
            if not any(seeds) or (over_global and _is_of_global_seed(seeds, 0, len(ops))):
                found.append(node)
    return found


def generator_states(graph: Any) -> list[tuple[Any, Any]]:
    """The states of generators that a dataset's functions draw from: constants of its graph, with their values.

    A variable that a function captures is written down as one that begins with what it holds (framework/
    resource_var.cc, `AsGraphDef`). Those of Keras' layers hold [seed, counter], those of `tf.random.Generator` three.
    """
    ops = {node.op for function in graph.library.function for node in function.node_def}
    sizes = {2 for op in ("StatelessRandomGetKeyCounter", "RngReadAndSkip") if op in ops}
    sizes |= {3} if "RngReadAndSkip" in ops else set()
    constants = {n.name: n for n in graph.node if n.op == "Const"}
    assigned = [constants.get(node.input[1]) for node in graph.node if node.op == "AssignVariableOp"]
    states = [(node, tf.make_ndarray(node.attr["value"].tensor)) for node in assigned if node is not None]
    return [(node, s) for node, s in states if s.dtype.kind in "iu" and s.ndim == 1 and len(s) in sizes]


def holds_variables(graph: Any) -> bool:
    """Whether a dataset's functions read variables other than those of generators, see ``generator_states``."""
    return bool(sum(node.op == "AssignVariableOp" for node in graph.node) > len(generator_states(graph)))


def _is_of_global_seed(seeds: Sequence[int], begin: int, end: int) -> bool:
    """Whether `tf.random.set_seed` alone has given these: the second is none that anybody would.

    tensorflow/python/framework/random_seed.py puts the global seed first, or a constant if there is none, and then the
    seed of the op: without one a number of 31 bits, or in a function how many ops had none before. So a seed given to
    an op as well is taken for none if it is so small, or to a shuffle if it is so large.
    """
    return seeds[0] != random_seed.DEFAULT_GRAPH_SEED and begin <= seeds[1] < end


_RANDOM_OPS = {
    "Multinomial",
    "ParameterizedTruncatedNormal",
    "RandomGamma",
    "RandomPoissonV2",
    "RandomShuffle",
    "RandomStandardNormal",
    "RandomUniform",
    "RandomUniformInt",
    "TruncatedNormal",
}


def caches_in_memory(graph: Any) -> bool:
    """Whether a dataset keeps elements in memory, which making it anew would lose (dataset_ops.py, `cache`)."""
    constants = {n.name: n for n in graph.node if n.op == "Const"}
    caches = [node for node in graph.node if node.op in ("CacheDataset", "CacheDatasetV2")]
    names = [constants.get(node.input[1]) for node in caches]
    return any(name is None or not tf.make_ndarray(name.attr["value"].tensor).item() for name in names)


class _PyDatasetOrder:
    """Stands for the module `random` where Keras shuffles the batches of a PyDataset."""

    def __init__(self) -> None:
        self.generator: Any = random

    def shuffle(self, indices: list[int]) -> None:
        """Shuffle in place."""
        self.generator.shuffle(indices)


_py_dataset_order = _PyDatasetOrder()
py_dataset_adapter.random = _py_dataset_order


def order_py_datasets_by(seed: int | None) -> None:
    """Shuffle the batches of a PyDataset by this seed; None by Python's generator, as Keras does.

    keras/src/trainers/data_adapters/py_dataset_adapter.py shuffles by `random`, in a thread of its own.
    """
    _py_dataset_order.generator = random if seed is None else random.Random(seed)


@contextlib.contextmanager
def kept_order_of_py_datasets() -> Iterator[None]:
    """Afterwards, shuffle the batches of a PyDataset as before."""
    before = _py_dataset_order.generator
    try:
        yield
    finally:
        _py_dataset_order.generator = before


def first_batch_of_generator(adapter: Any) -> list[Any]:
    """The arrays of a generator's first batch, which Keras has looked at (data_adapters/generator_data_adapter.py)."""
    return [part for part in tree.flatten(adapter._first_batches[0]) if isinstance(part, np.ndarray | tf.Tensor)]


def py_dataset_from(adapter: Any, batch: int, seed: int | None) -> tf.data.Dataset:
    """The rest of a pass over a PyDataset, from a batch on; those before it are not asked for.

    keras/src/trainers/data_adapters/py_dataset_adapter.py makes a dataset of what `_get_iterator` gives.
    """

    def rest() -> Iterator[Any]:
        length = adapter.num_batches
        numbers: Any = itertools.count() if length is None else list(range(length))
        if adapter.shuffle and length is not None:
            (random if seed is None else random.Random(seed)).shuffle(numbers)
        for number in itertools.islice(numbers, batch, None):
            yield adapter._standardize_batch(adapter.py_dataset[number])

    adapter._get_iterator = rest
    try:
        return adapter.get_tf_dataset()
    finally:
        del adapter._get_iterator


def some_rows(adapter: Any, rows: Any) -> list[Any]:
    """Some rows of each of the arrays that `fit` was given (trainers/data_adapters/array_data_adapter.py).

    Raises:
        TypeError: one is neither of NumPy nor of pandas nor of TensorFlow, as Keras takes them too.
    """
    given = [array for array in tree.flatten(adapter._inputs) if array is not None]
    taken = []
    for array in given:
        if hasattr(array, "iloc"):
            taken.append(array.iloc[rows].to_numpy())
        elif isinstance(array, np.ndarray):
            taken.append(array[rows])
        elif isinstance(array, tf.Tensor):
            taken.append(tf.gather(array, rows).numpy())
        else:
            raise TypeError(type(array).__name__)
    return taken


@contextlib.contextmanager
def arrays_ordered_by(seed: Callable[[], int]) -> Iterator[None]:
    """Have the array datasets that are made inside shuffle by ``seed()``, asked when a pass begins.

    keras/src/trainers/data_adapters/array_data_adapter.py shuffles by `tf.random.shuffle`, all indices at once, or
    those of each batch (shuffle="batch"). Its order could be seeded only by making the dataset anew for each pass.
    """
    _thread.order = seed
    try:
        yield
    finally:
        del _thread.order


_stock_shuffle = tf.random.shuffle


@functools.wraps(_stock_shuffle)
def _shuffle(value: Any, seed: Any = None, name: Any = None) -> Any:
    order = getattr(_thread, "order", None)
    if order is None:
        return _stock_shuffle(value, seed, name)
    of_pass = tf.numpy_function(lambda: np.int64(order()), [], tf.int64)
    return tf.random.experimental.stateless_shuffle(value, tf.stack([of_pass, tf.cast(value[0], tf.int64)]))


tf.random.shuffle = _shuffle


def save_as(cls: type, keras_class: type) -> None:
    """Have instances of ``cls`` saved under the name of one of Keras' own classes (keras/src/api_export.py)."""
    name = api_export.get_name_from_symbol(keras_class) or f"{keras_class.__module__}.{keras_class.__name__}"
    api_export.REGISTERED_OBJS_TO_NAMES[cls] = name


def is_default_strategy(strategy: Any) -> bool:
    """Whether it is what `tf.distribute.get_strategy()` gives outside of all scopes (distribute/distribute_lib.py)."""
    return type(strategy).__name__ == "_DefaultDistributionStrategy"


def uses_collectives(strategy: tf.distribute.Strategy) -> bool:
    """Whether a MirroredStrategy reduces by collectives, as it does by default (distribute/mirrored_strategy.py)."""
    return type(strategy.extended._cross_device_ops).__name__ == "CollectiveAllReduce"


def num_tasks(strategy: tf.distribute.Strategy) -> dict[str, int]:
    """How many tasks of each job the strategy's cluster has.

    `cluster_resolver` is public, and None under parameter servers (distribute/parameter_server_strategy_v2.py).
    """
    cluster = (strategy.cluster_resolver or strategy._cluster_resolver).cluster_spec()
    return {job: cluster.num_tasks(job) for job in cluster.jobs}


def strategy_of_variable(variable: Any) -> tf.distribute.Strategy | None:
    """The strategy in whose scope a variable of Keras, a `tf.Variable` or a `ShardedVariable` was made.

    Every kind of variable keeps it (tensorflow/python/ops/resource_variable_ops.py, distribute/values.py,
    sharded_variable.py, ps_values.py).
    """
    value = variable.value if isinstance(variable, keras.Variable) else variable
    return getattr(value, "_distribute_strategy", None)


def strategy_of_model(model: Any) -> tf.distribute.Strategy | None:
    """The strategy in whose scope a model was made (keras/src/backend/tensorflow/trainer.py, `__init__`)."""
    return getattr(model, "_distribute_strategy", None)


def strategy_of_optimizer(optimizer: Any) -> tf.distribute.Strategy | None:
    """The strategy in whose scope an optimizer was made (keras/src/backend/tensorflow/optimizer.py, `__init__`)."""
    return getattr(optimizer, "_distribution_strategy", None)


def flat_layers(layer: Any) -> list[Any]:
    """A layer or model, and all layers in it, each once (keras/src/layers/layer.py, `_flatten_layers`)."""
    return list(layer._flatten_layers())


def has_to_be_built(layer: Any) -> bool:
    """Whether a layer may have variables to make when it is first called: not if it has Keras' own, empty `build`.

    keras/src/utils/python_utils.py, `default`, marks it, and layers/layer.py wraps it.
    """
    return not layer.built and not getattr(layer.build, "_is_default", False)


def child_layers(layer: Any) -> list[Any]:
    """The layers that a layer or model holds itself (keras/src/layers/layer.py, `_flatten_layers`)."""
    return list(layer._flatten_layers(include_self=False, recursive=False))


def own_metrics(layer: Any) -> list[Any]:
    """The metrics that a layer tracks as its attributes, without those of `compile` (keras/src/layers/layer.py)."""
    return list(layer._metrics)


def tracks_loss(model: Any, metric: Any) -> bool:
    """Whether a metric is one to which Keras itself gives losses (trainers/trainer.py, trainers/compile_utils.py)."""
    of_compile = getattr(model, "_compile_loss", None)
    given = [getattr(model, "_loss_tracker", None), *(of_compile.metrics if of_compile is not None else ())]
    return any(metric is one for one in given)


def given_metrics(model: Any) -> list[Any]:
    """The metric objects given to `compile`, also before the first step (keras/src/trainers/compile_utils.py)."""
    compiled = getattr(model, "_compile_metrics", None)
    if compiled is None:
        return []
    given = keras.tree.flatten([compiled._user_metrics, compiled._user_weighted_metrics])
    return [metric for metric in given if isinstance(metric, keras.Metric)]


def variables_of_module(module: tf.Module) -> list[tuple[str, Any]]:
    """The variables of a ``tf.Module`` with where it holds them, as ``blocks/0/kernel``; their own names may be alike.

    tensorflow/python/module/module.py finds them so for ``module.variables``.
    """
    found = module._flatten(predicate=lambda value: isinstance(value, tf.Variable), with_path=True)
    return [("/".join(map(str, path)), variable) for path, variable in found]


def own_variables(layer: Any) -> list[Any]:
    """The weights and seed states of a layer, without those of the layers in it (keras/src/layers/layer.py)."""
    seeds = [generator.state for generator in layer._seed_generators]
    return [*layer._trainable_variables, *layer._non_trainable_variables, *seeds]


def optimized_variables(optimizer: Any) -> list[Any]:
    """The variables that an optimizer was built for, in its order (keras/src/optimizers/base_optimizer.py, `build`).

    Before Keras 3.12 a LossScaleOptimizer leaves them to the optimizer in it (loss_scale_optimizer.py, `build`).
    """
    return list(getattr(optimizer, "inner_optimizer", optimizer)._trainable_variables)


def batches_used(optimizer: Any) -> int:
    """How many batches an optimizer has used, also those whose gradients it still accumulates.

    Public is `iterations`, which counts updates (keras/src/optimizers/base_optimizer.py). A LossScaleOptimizer leaves
    counting to the optimizer in it (loss_scale_optimizer.py).
    """
    return int(components(getattr(optimizer, "inner_optimizer", optimizer)._iterations)[0].numpy())


def compile_arguments(model: Any) -> dict[str, Any]:
    """What was given to `compile`, as the objects themselves (keras/src/trainers/trainer.py, `compile`)."""
    given = dict(model._compile_config.config)
    # Ours keep beside it that "auto" was asked for (keras_dist_ext/model.py); of stock Keras, 1 is the default.
    automatic = getattr(model, "_steps_per_execution_is_auto", model.steps_per_execution == 1)
    return {**given, "steps_per_execution": "auto" if automatic else model.steps_per_execution}


def has_own_config(model: Any) -> bool:
    """Whether a model's `get_config` is not Keras' own (keras/src/layers/layer.py, models/functional.py)."""
    return bool(type(model).get_config.__module__.partition(".")[0] != "keras")


def has_recorded_arguments(model: Any) -> bool:
    """Whether Keras' own `get_config` has arguments to give (ops/operation.py); of stock models these are defaults."""
    recorded = getattr(model, "_auto_config", None)
    return bool(recorded is not None and recorded.config)


def has_automatic_config(thing: Any) -> bool:
    """Whether `get_config` gives the recorded arguments of the constructor (ops/operation.py).

    Keras 3.11 records those that were given, so others have their defaults; Keras 3.15 records all.
    """
    return bool(getattr(type(thing).get_config, "_is_default", False))


def is_serializable_dict(value: Any) -> bool:
    """Whether it holds constructor arguments for a config (keras/src/saving/serialization_lib.py)."""
    return isinstance(value, serialization_lib.SerializableDict)


def share_registered_name(cls: type, twin: type) -> None:
    """Have `twin` saved under the name of `cls`, without loading it by that name (saving/object_registration.py)."""
    if cls in object_registration.GLOBAL_CUSTOM_NAMES:
        object_registration.GLOBAL_CUSTOM_NAMES[twin] = object_registration.GLOBAL_CUSTOM_NAMES[cls]


def saved_variables(path: Any, group: str) -> dict[str, Any]:
    """The variables that an attribute of a model has saved in a `.keras` file or directory (saving/saving_lib.py).

    ``path`` may be a file object.
    """
    with contextlib.ExitStack() as opened:
        if zipfile.is_zipfile(path):
            archive = opened.enter_context(zipfile.ZipFile(path))
            if "model.weights.h5" not in archive.namelist():
                return {}
            weights: Any = opened.enter_context(archive.open("model.weights.h5"))
        else:
            weights = os.path.join(path, "model.weights.h5")
            if not os.path.exists(weights):
                return {}
        file = opened.enter_context(h5py.File(weights, "r"))
        return {name: value[()] for name, value in file.get(f"{group}/vars", {}).items()}


def new_input(tensor: Any) -> Any:
    """A new `keras.Input` like the one that a symbolic tensor came from (keras/src/backend/common/keras_tensor.py)."""
    layer = tensor._keras_history.operation
    return keras.Input(
        batch_shape=tensor.shape,
        dtype=tensor.dtype,
        sparse=tensor.sparse,
        name=layer.name,
        optional=getattr(layer, "optional", False),
    )


class KeptGradients:
    """The gradient of each variable's last update, which an optimizer keeps from now on.

    keras/src/optimizers/base_optimizer.py: ``build`` makes slots by ``add_variable_from_reference``, and
    ``update_step`` takes each gradient as it is used: summed over replicas, unscaled, clipped.

    Attributes:
        pairs: of each variable and its gradient, once the optimizer is built.
        are_given: set to have the updates that are traced from now on take the gradients kept here for their own.
    """

    def __init__(self, optimizer: Any) -> None:
        self.pairs: list[tuple[Any, Any]] = []
        self.are_given = False
        self._optimizer = getattr(optimizer, "inner_optimizer", optimizer)
        self._build_without, self._update_without = self._optimizer.build, self._optimizer.update_step
        if self._optimizer.built:
            self._build(None)
        self._optimizer.build, self._optimizer.update_step = self._build, self._update_step

    def _build(self, variables: Any) -> None:
        optimizer = self._optimizer
        self._build_without(variables)
        if not self.pairs:
            trained = optimizer._trainable_variables
            made = [optimizer.add_variable_from_reference(v, name="kept_gradient") for v in trained]
            self.pairs = list(zip(trained, made, strict=True))

    def _update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        _, kept = self.pairs[self._optimizer._get_variable_index(variable)]
        if self.are_given:
            gradient = kept.value
        else:
            self._optimizer.assign(kept, tf.convert_to_tensor(gradient))
        self._update_without(gradient, variable, learning_rate)


@contextlib.contextmanager
def draws_sent_to(draw: Callable[..., Any]) -> Iterator[None]:
    """Send the random ops that all threads make to ``draw(name, original, *args, **kwargs)``, also those of Keras.

    tensorflow/python/ops: random_ops.py, stateless_random_ops.py and stateful_random_ops.py call these by module.
    """
    with contextlib.ExitStack() as stack:
        for module, names in _RANDOM_FUNCTIONS.items():
            for name in names:
                stack.enter_context(replaced(module, name, functools.partial(draw, name, getattr(module, name))))
        yield


_RANDOM_FUNCTIONS = {
    gen_stateless_random_ops_v2: (
        "stateless_random_uniform_v2",
        "stateless_random_normal_v2",
        "stateless_truncated_normal_v2",
        "stateless_random_uniform_int_v2",
        "stateless_random_gamma_v3",
        "stateless_shuffle",
    ),
    gen_stateless_random_ops: (
        "stateless_multinomial",
        "stateless_random_binomial",
        "stateless_random_poisson",
        "stateless_parameterized_truncated_normal",
    ),
    gen_random_ops: (
        "random_uniform",
        "random_standard_normal",
        "truncated_normal",
        "random_uniform_int",
        "multinomial",
        "random_gamma",
        "random_poisson_v2",
        "random_shuffle",
        "parameterized_truncated_normal",
    ),
}


@contextlib.contextmanager
def dropouts_sent_to(dropout: Callable[..., Any]) -> Iterator[None]:
    """Send Keras' dropout of all threads to ``dropout(original, inputs, rate, ...)`` (backend/tensorflow/random.py)."""
    with replaced(tf_random, "dropout", functools.partial(dropout, tf_random.dropout)):
        yield


@contextlib.contextmanager
def without_parts(parts: Collection[str]) -> Iterator[None]:
    """Have what all threads trace go without some parts of a step; what was traced before stays as it is.

    Args:
        parts: "weights" and "masks" that losses take (keras/src/losses/loss.py, ``reduce_weighted_values``), "moments"
            that BatchNormalization takes of a batch (batch_normalization.py, ``_moments``; its moving statistics
            instead), the "loss" of ``compile`` (trainers/compile_utils.py; the mean square of the outputs instead).
    """
    reduce_values = loss_module.reduce_weighted_values

    def reduce_all_alike(values: Any, sample_weight: Any = None, mask: Any = None, *args: Any, **kwargs: Any) -> Any:
        kept = (None if "weights" in parts else sample_weight, None if "masks" in parts else mask)
        return reduce_values(values, *kept, *args, **kwargs)

    def moving(layer: Any, inputs: Any, mask: Any) -> tuple[Any, Any]:
        return tuple(tf.cast(v.value, inputs.dtype) for v in (layer.moving_mean, layer.moving_variance))

    def mean_square(_: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        outputs = [tf.cast(y, tf.float32) for y in tree.flatten(y_pred) if tf.as_dtype(y.dtype).is_floating]
        means = [tf.math.divide_no_nan(tf.reduce_sum(y * y), tf.cast(tf.size(y), tf.float32)) for y in outputs]
        return loss_module.scale_loss_for_distribution(tf.add_n(means))

    with contextlib.ExitStack() as stack:
        if {"weights", "masks"} & set(parts):
            stack.enter_context(replaced(loss_module, "reduce_weighted_values", reduce_all_alike))
        if "moments" in parts:
            stack.enter_context(replaced(keras.layers.BatchNormalization, "_moments", moving))
        if "loss" in parts:
            stack.enter_context(replaced(compile_utils.CompileLoss, "__call__", mean_square))
        yield


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give a module or a class another attribute for a while."""
    own = name in vars(owner)
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before) if own else delattr(owner, name)


def stateless_draws() -> tuple[Callable[..., Any], ...]:
    """The ops that draw uniform, normal, truncated normal and integer numbers by a key (stateless_random_ops.py)."""
    ops = gen_stateless_random_ops_v2
    return (
        ops.stateless_random_uniform_v2,
        ops.stateless_random_normal_v2,
        ops.stateless_truncated_normal_v2,
        ops.stateless_random_uniform_int_v2,
    )


def layer_being_called() -> str:
    """The path of the layer that this thread is calling, empty outside of all (backend/common/name_scope.py)."""
    return str(current_path())


def metric_results(model: Any, logs: Any) -> dict[str, Any]:
    """What ``fit`` logs at the end of an epoch, of the logs of its last step (keras/src/trainers/trainer.py).

    In the order in which the model has its metrics: Keras numbers the names of those that were given none.
    """

    def leaves(results: Any, path: str) -> Iterator[tuple[str, Any]]:
        if isinstance(results, dict):
            for name, value in results.items():
                yield from leaves(value, f"{path}/{name}" if path else str(name))
        else:
            yield path, np.asarray(results)

    results = model._get_metrics_result_or_logs(logs)
    return dict(leaves(results, "")) if isinstance(results, dict) else {}


def build_from_batch(model: Any, batch: Any) -> None:
    """Build a model, its metrics and its optimizer as ``fit`` does (trainer.py, ``_symbolic_build``)."""
    model._symbolic_build(data_batch=batch)


def begin_fit(model: Any, split_batch: Any) -> None:
    """Do what ``fit`` of stock Keras does before its first step (backend/tensorflow/trainer.py)."""
    model._maybe_symbolic_build(iterator=[(0, 1, iter([split_batch]))])


class WrappedDataset(tf.data.Dataset):  # type: ignore[misc]
    """A dataset that gives what another gives, for classes that have more to say about it.

    tensorflow_io derives its datasets from tf.data.Dataset in the same way; `_inputs` carries options on
    (tensorflow/python/data/ops/dataset_ops.py).
    """

    def __init__(self, dataset: tf.data.Dataset) -> None:
        self._wrapped = dataset
        super().__init__(tf.data.experimental.to_variant(dataset))

    def _inputs(self) -> list[tf.data.Dataset]:
        return [self._wrapped]

    @property
    def element_spec(self) -> Any:
        """Specs of an element."""
        return self._wrapped.element_spec


def num_local_replicas(strategy: tf.distribute.Strategy) -> int:
    """How many replicas this worker has; the default strategy does not tell (distribute/distribute_lib.py)."""
    return 1 if is_default_strategy(strategy) else len(strategy.extended.worker_devices)


def sharded(dataset: tf.data.Dataset, num_workers: int, worker: int) -> tf.data.Dataset:
    """A worker's part of a dataset under the `auto_shard_policy` of its options, without any batch being cut.

    tensorflow/python/data/experimental/ops/distribute.py; the graph is rewritten in core/grappler/optimizers/data/
    auto_shard.cc. `strategy.experimental_distribute_dataset` does the same, and more.
    """
    return data_distribute._AutoShardDataset(dataset, num_workers, worker)


def datasets_of_worker(distributed: Any) -> list[tf.data.Dataset]:
    """What this worker reads of `strategy.experimental_distribute_dataset`: its replicas take elements in turn.

    tensorflow/python/distribute/input_lib.py. Reading it waits for no other worker.
    """
    return list(distributed._cloned_datasets)


def data_adapter(
    x: Any,
    y: Any,
    sample_weight: Any,
    *,
    batch_size: int | None,
    shuffle: bool,
    class_weight: Mapping[int, float] | None = None,
) -> Any:
    """What `fit` makes of its data (keras/src/trainers/data_adapters/__init__.py)."""
    return data_adapters.get_data_adapter(
        x, y, sample_weight, batch_size=batch_size, shuffle=shuffle, class_weight=class_weight
    )


def py_dataset_batches(adapter: Any) -> Iterator[Any]:
    """One pass over a PyDataset, begun and ended as `fit` does an epoch, also when it is left early.

    keras/src/trainers/data_adapters/py_dataset_adapter.py.
    """
    adapter.on_epoch_begin()
    try:
        yield from adapter._get_iterator()
    finally:
        adapter.on_epoch_end()


def note_traces(note: Callable[[str, dict[str, str], float], None]) -> Callable[[], None]:
    """Have ``note(name, arguments, seconds)`` called for each tf.function that is traced outside of others.

    TensorFlow traces in one place (eager/polymorphic_function/tracing_compilation.py), and warns of frequent tracing
    without naming the argument that changes.

    Returns:
        What ends it.
    """
    original = tracing_compilation._create_concrete_function

    def create(function_type: Any, *args: Any, **kwargs: Any) -> Any:
        if tf.inside_function():
            return original(function_type, *args, **kwargs)
        begin = time.perf_counter()
        made = original(function_type, *args, **kwargs)
        options = kwargs.get("tracing_options", args[-1] if args else None)
        constraints = {name: parameter.type_constraint for name, parameter in function_type.parameters.items()}
        arguments = {name: str(getattr(c, "value", c)) for name, c in constraints.items()}
        note(str(getattr(options, "name", "a function")), arguments, time.perf_counter() - begin)
        return made

    def stop() -> None:
        if tracing_compilation._create_concrete_function is create:
            tracing_compilation._create_concrete_function = original

    tracing_compilation._create_concrete_function = create
    return stop


def limit_wait_for_cluster(jobs: dict[str, int], wait_seconds: float) -> None:
    """Have the strategy of several workers that is made next wait so long for its cluster, instead of an hour.

    tensorflow/python/distribute/collective_all_reduce_strategy.py configures the coordination service the same way, but
    for the time (python/eager/context.py), and leaves one alone that is configured already. The task that leads it
    would wait an hour for what the others tell of their devices, whatever the time is; where all register at a barrier,
    it waits for them there (xla/tsl/distributed_runtime/coordination/coordination_service.cc; not in TensorFlow 2.18).

    Args:
        jobs: how many tasks "chief" and "worker" have.
        wait_seconds: see above.
    """
    leader = "chief" if jobs.get("chief") else "worker"
    context = tf_context.context()
    context.configure_coordination_service(
        "standalone",
        service_leader=f"/job:{leader}/replica:0/task:0",
        cluster_register_timeout_in_ms=max(1, round(1000 * wait_seconds)),
        coordinated_jobs=[
            tf_context.coordination_config_pb2.CoordinatedJob(name=job, num_tasks=count)
            for job, count in jobs.items()
            if count
        ],
    )
    config = context.coordination_service
    if "cluster_register_with_barrier" in config.DESCRIPTOR.fields_by_name:
        config.cluster_register_with_barrier = True


def is_initialized() -> bool:
    """Whether TensorFlow has begun to work, so that devices and clusters are settled (python/eager/context.py)."""
    return tf_context.context()._context_handle is not None


def post(key: str, text: str) -> None:
    """Store a text for all workers under a key that has none yet (python/eager/context.py)."""
    tf_context.context().set_config_key_value(key, text)


def posted(key: str, wait_seconds: float) -> str | None:
    """Return what a worker has stored under a key, or None if nobody has after so long (python/eager/context.py)."""
    try:
        return str(tf_context.context().get_config_key_value(key, max(1, round(1000 * wait_seconds))))
    except (tf.errors.DeadlineExceededError, tf.errors.NotFoundError):
        return None


def take_back(key: str) -> None:
    """Forget what was stored under a key (python/eager/context.py)."""
    tf_context.context().delete_config_key_value(key)


def abort_collectives(message: str) -> None:
    """End all collectives that this worker waits in, and all to come, by an error (python/eager/context.py)."""
    tf_context.context().abort_collective_ops(tf.errors.INTERNAL, message)


def is_of_unlike_collectives(error: Exception) -> bool:
    """Whether workers have met in a collective with values of different shapes, types or purposes.

    tensorflow/core/common_runtime/collective_param_resolver_local.cc says so in these words.
    """
    text = str(error)
    return isinstance(error, tf.errors.OpError) and (
        "mismatch in the collective instance" in text or ("Collective instance" in text and "expected" in text)
    )


class FunctionOfIterator:
    """A tf.function that is called again and again with an iterator over a dataset as its first argument.

    Which trace fits, and what it has captured, is found out once an iterator, not at each call: to look whether
    arguments fit takes as long as some hundred small ops (python/eager/polymorphic_function/concrete_function.py).

    Args:
        function: a ``tf.function``. What other arguments it has are of one shape and dtype for each iterator.
    """

    def __init__(self, function: Any) -> None:
        self.function = function
        self._iterator: Callable[[], Any] = lambda: None
        self._trace: Any = None
        self._captured: list[Any] | None = None  # None: it is another thing at each call

    def __call__(self, iterator: Any, *others: Any) -> Any:
        """Call the function."""
        if not isinstance(iterator, iterator_ops.OwnedIterator):  # say, one that TensorFlow has distributed
            return self.function(iterator, *others)
        if self._iterator() is not iterator:
            trace = self._trace = self.function.get_concrete_function(iterator, *others)
            self._captured = None if any(map(callable, trace._captured_inputs)) else trace.captured_inputs
            self._iterator = weakref.ref(iterator)
        captured = self._trace.captured_inputs if self._captured is None else self._captured
        return self._trace._call_flat(tf.nest.flatten((iterator, *others), expand_composites=True), captured)


def graphs_of(function: Any) -> list[Any]:
    """The graphs that a tf.function was traced to so far (polymorphic_function.py); none of a plain function."""
    function = function.function if isinstance(function, FunctionOfIterator) else function
    traces: list[Any] = getattr(function, "_list_all_concrete_functions", list)()
    return [trace.graph for trace in traces]


@contextlib.contextmanager
def fits_through(hook: Callable[..., Any], classes: Sequence[type]) -> Iterator[None]:
    """Send calls of ``fit`` of these classes to ``hook(original, model, *args, **kwargs)``; nested ones pass by.

    For a script that is run to be looked at. `fit` is public, but made in keras/src/backend/tensorflow/trainer.py and
    inherited by ``keras.Model``.
    """
    before = {cls: vars(cls).get("fit") for cls in classes}

    def wrapped(original: Any) -> Any:
        @functools.wraps(original)
        def fit(model: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(_thread, "fits", False):
                return original(model, *args, **kwargs)
            _thread.fits = True
            try:
                return hook(original, model, *args, **kwargs)
            finally:
                _thread.fits = False

        return fit

    for cls in classes:
        cls.fit = wrapped(cls.fit)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for cls, own in before.items():
            if own is None:
                del cls.fit  # type: ignore[attr-defined]
            else:
                cls.fit = own  # type: ignore[attr-defined]
