"""The one door to Keras, and the one place that touches what Keras and TensorFlow do not document.

Everything private is one function here, with the upstream file it stands on; ``tests/test_upstream.py`` fails when
one of them changes. Written against Keras 3.15.1 and TensorFlow 2.21.0.

While a replica's step is traced, Keras' own code must do what is right for *all* replicas: a loss divides by the
global number of elements, an optimizer sums gradients once. ``intercept(step)`` sends those few calls of the current
thread to ``step`` (see ``step.ReplicaStep``); outside of it, and for models that are not ours, nothing changes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

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

from keras.src import api_export
from keras.src.backend.common import global_state
from keras.src.backend.common.stateless_scope import StatelessScope
from keras.src.backend.tensorflow import optimizer as tf_optimizer
from keras.src.backend.tensorflow import trainer as tf_trainer
from keras.src.losses import loss as loss_module
from keras.src.metrics import reduction_metrics
from keras.src.models.functional import Functional
from keras.src.models.model import functional_init_arguments
from keras.src.optimizers import base_optimizer, loss_scale_optimizer
from keras.src.random import seed_generator
from keras.src.saving import object_registration, serialization_lib
from keras.src.trainers.data_adapters import data_adapter_utils
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.epoch_iterator import EpochIterator
from tensorflow.core.framework import graph_pb2
from tensorflow.python.data.ops import dataset_ops
from tensorflow.python.distribute import distribute_utils, input_lib
from tensorflow.python.distribute.coordinator import values as coordinator_values
from tensorflow.python.eager import context as tf_context
from tensorflow.python.framework import ops as tf_ops
from tensorflow.python.ops import control_flow_util

__all__ = [
    "ArrayDataAdapter",
    "EpochIterator",
    "Functional",
    "StatelessScope",
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

    def mean_update(self, metric: Any, values: Any, sample_weight: Any) -> tuple[Any, Any]: ...

    def scale_loss(self, optimizer: Any, loss: Any, original: Callable[[Any], Any]) -> Any: ...

    def apply(self, optimizer: Any, grads: Any, variables: Any, original: Callable[..., None]) -> None: ...

    def all_reduce_gradients(self, grads_and_vars: Any) -> Any: ...

    def all_reduce(self, reduce_op: Any, value: Any, original: Callable[..., Any]) -> Any: ...

    def next_seed(self, seed: Any) -> Any: ...

    def assign(self, variable: Any, value: Any, original: Callable[[Any], None]) -> None: ...


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
        return local
    return step.reduce_loss(local, sample_weight, mask, reduction, dtype)


# keras/src/metrics/reduction_metrics.py
@_install(reduction_metrics.Mean, "update_state")
def _(original: Any, step: Step, metric: Any, values: Any, sample_weight: Any = None) -> Any:
    values, sample_weight = step.mean_update(metric, values, sample_weight)
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


# keras/src/random/seed_generator.py: its state is mirrored, so that all replicas would draw the same numbers.
@_install(keras.random.SeedGenerator, "next")
def _(original: Any, step: Step, generator: Any, *args: Any, **kwargs: Any) -> Any:
    return step.next_seed(original(generator, *args, **kwargs))


# tensorflow/python/distribute/distribute_lib.py: BatchNormalization(synchronized=True) calls it in the forward pass.
@_install(tf.distribute.ReplicaContext, "all_reduce")
def _(original: Any, step: Step, context: Any, reduce_op: Any, value: Any, options: Any = None) -> Any:
    return step.all_reduce(reduce_op, value, functools.partial(original, context, options=options))


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
    extended._use_merge_call = lambda: False
    try:
        with intercept(step):
            yield
    finally:
        extended.__dict__.pop("_use_merge_call", None)


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


def global_seed_generator() -> Any:
    """The generator behind ``seed=None``, made here and now if there is none (random/seed_generator.py).

    It is the thread's, and TensorFlow runs each replica in a thread of its own.
    """
    state = random.getstate()
    try:
        return seed_generator.global_seed_generator()
    finally:
        random.setstate(state)


def share_global_seed_generator(generator: Any) -> None:
    """Make it the generator behind ``seed=None`` of this thread."""
    global_state.set_global_attribute("global_seed_generator", generator)


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
    """The graph of a dataset as tf.data serializes it, or None where it cannot (dataset_ops.py)."""
    try:
        return graph_pb2.GraphDef.FromString(dataset._as_serialized_graph(strip_device_assignment=True).numpy())
    except (tf.errors.OpError, ValueError):
        return None


def shard_indices(graph: Any) -> list[tuple[int, ...]]:
    """The (number of shards, index) of each ``Dataset.shard`` in the graph."""
    constants = {n.name: n for n in graph.node if n.op == "Const"}

    def value(name: str) -> int:
        node = constants.get(name)
        return -1 if node is None else int(tf.make_ndarray(node.attr["value"].tensor))

    return [tuple(value(i) for i in node.input[1:3]) for node in graph.node if node.op == "ShardDataset"]


def with_shuffle_seeds(dataset: tf.data.Dataset, graph: Any, seed: int) -> tf.data.Dataset:
    """Return the dataset with a seed of its own in each shuffle that has none.

    A shuffle without a seed draws one when it is made, differently in each process. tf.data's ShuffleDatasetV3 holds
    it in a resource; ShuffleDataset (version 1) is the same with the seed in the graph (shuffle_dataset_op.cc).
    """
    constants = {n.name: n for n in graph.node if n.op == "Const"}
    found = 0
    for node in list(graph.node):
        if node.op != "ShuffleDatasetV3" or not all(name in constants for name in node.input[2:4]):
            continue
        seeds = [int(tf.make_ndarray(constants[name].attr["value"].tensor)) for name in node.input[2:4]]
        if seeds != [0, 0]:
            continue
        found += 1
        node.op = "ShuffleDataset"
        del node.input[4:]
        for position, part in enumerate((seed, found)):
            constant = graph.node.add(name=f"{node.name}/seed_{position}", op="Const")
            constant.attr["dtype"].type = tf.int64.as_datatype_enum
            constant.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(part + 1, tf.int64))
            node.input[2 + position] = constant.name
    if not found:
        return dataset
    variant = tf.raw_ops.DatasetFromGraph(graph_def=graph.SerializeToString())
    seeded = dataset_ops._VariantDataset(variant, dataset.element_spec)
    return seeded.with_options(dataset.options())


@contextlib.contextmanager
def global_tf_seed(seed: int) -> Iterator[None]:
    """Set TensorFlow's global seed for the ops that are made inside, and put the user's back (context.py)."""
    context = tf_context.context()
    before, rng = context._seed, getattr(context, "_rng", None)
    tf.random.set_seed(seed)
    try:
        yield
    finally:
        context._seed = before
        if rng is not None:
            context._rng = rng


def save_as(cls: type, keras_class: type) -> None:
    """Have instances of ``cls`` saved under the name of one of Keras' own classes (keras/src/api_export.py)."""
    name = api_export.get_name_from_symbol(keras_class) or f"{keras_class.__module__}.{keras_class.__name__}"
    api_export.REGISTERED_OBJS_TO_NAMES[cls] = name


def is_default_strategy(strategy: Any) -> bool:
    """Whether it is what `tf.distribute.get_strategy()` gives outside of all scopes (distribute/distribute_lib.py)."""
    return type(strategy).__name__ == "_DefaultDistributionStrategy"


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


def own_metrics(layer: Any) -> list[Any]:
    """The metrics that a layer tracks as its attributes, without those of `compile` (keras/src/layers/layer.py)."""
    return list(layer._metrics)


def given_metrics(model: Any) -> list[Any]:
    """The metric objects given to `compile`, also before the first step (keras/src/trainers/compile_utils.py)."""
    compiled = getattr(model, "_compile_metrics", None)
    if compiled is None:
        return []
    given = keras.tree.flatten([compiled._user_metrics, compiled._user_weighted_metrics])
    return [metric for metric in given if isinstance(metric, keras.Metric)]


def own_variables(layer: Any) -> list[Any]:
    """The weights and seed states of a layer, without those of the layers in it (keras/src/layers/layer.py)."""
    seeds = [generator.state for generator in layer._seed_generators]
    return [*layer._trainable_variables, *layer._non_trainable_variables, *seeds]


def optimized_variables(optimizer: Any) -> list[Any]:
    """The variables that an optimizer was built for, in its order (keras/src/optimizers/base_optimizer.py, `build`).

    Before Keras 3.12 a LossScaleOptimizer leaves them to the optimizer in it (loss_scale_optimizer.py, `build`).
    """
    return list(getattr(optimizer, "inner_optimizer", optimizer)._trainable_variables)


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


def is_serializable_dict(value: Any) -> bool:
    """Whether it holds constructor arguments for a config (keras/src/saving/serialization_lib.py)."""
    return isinstance(value, serialization_lib.SerializableDict)


def share_registered_name(cls: type, twin: type) -> None:
    """Have `twin` saved under the name of `cls`, without loading it by that name (saving/object_registration.py)."""
    if cls in object_registration.GLOBAL_CUSTOM_NAMES:
        object_registration.GLOBAL_CUSTOM_NAMES[twin] = object_registration.GLOBAL_CUSTOM_NAMES[cls]


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
