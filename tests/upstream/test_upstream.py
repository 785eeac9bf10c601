"""Show what `_keras/` stands on in Keras and TensorFlow, so that we notice when a file that it names has changed.

None of this is documented upstream. A test that fails here says which function of `_keras/` to look at, before the
numbers of the conformance table go wrong for no visible reason.
"""

import concurrent.futures
import gc
import importlib
import inspect
import random
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from keras.optimizers import SGD
from keras.src.backend.common import global_state
from keras.src.backend.tensorflow import trainer as tf_trainer
from keras.src.losses import loss as loss_module
from keras.src.losses import losses as losses_module
from keras.src.trainers.data_adapters import py_dataset_adapter
from tensorflow.python.distribute import distribute_utils, values_util
from tensorflow.python.distribute.coordinator import values as coordinator_values
from tensorflow.tsl.profiler.protobuf import xplane_pb2
from versions import KERAS_VERSION

import keras_dist_ext as kde
from keras_dist_ext._keras.adapters import (
    ArrayDataAdapter,
    EpochIterator,
    GeneratorDataAdapter,
    first_batch_of_generator,
    make_data_adapter,
    seed_array_shuffles,
    take_examples,
    use_epoch_iterator,
)
from keras_dist_ext._keras.datasets import (
    WrappedDataset,
    auto_shard,
    caches_in_memory,
    checksum_of_constants,
    dataset_graph,
    has_random_order,
    has_unseeded_shuffle,
    iterator_state,
    local_datasets,
    set_iterator_state,
    shard_indices,
    unseeded_random_ops,
    with_seeds,
)
from keras_dist_ext._keras.hooks import current_step, intercept, local_updates, weighs_missed_by_alpha
from keras_dist_ext._keras.interception import install, patched
from keras_dist_ext._keras.layers import (
    copy_mask,
    current_layer_path,
    flat_layers,
    get_layer_losses,
    needs_build,
    own_metrics,
    own_variables,
    preserve_losses,
    seed_generators,
    set_layer_losses,
)
from keras_dist_ext._keras.losses import apply_mask, without_parts
from keras_dist_ext._keras.models import (
    KerasFunctional,
    compile_arguments,
    functional_init_arguments,
    input_like,
    intercept_fit,
    overrides,
    user_metrics,
)
from keras_dist_ext._keras.optimizers import GradientSlots, num_batches_used, optimized_variables
from keras_dist_ext._keras.profiles import op_spans
from keras_dist_ext._keras.py_datasets import py_dataset_batches, resume_py_dataset, seed_py_datasets
from keras_dist_ext._keras.random import (
    clone_seed_generator,
    global_seed_generator,
    intercept_random_ops,
    random_seed,
    use_global_seed_generator,
)
from keras_dist_ext._keras.saving import (
    has_automatic_config,
    has_own_config,
    has_recorded_arguments,
    is_serializable_dict,
    save_as,
    saved_variables,
    share_registered_name,
)
from keras_dist_ext._keras.strategies import (
    is_default_strategy,
    num_tasks,
    regroup,
    replica_id,
    strategy_of_model,
    strategy_of_optimizer,
    strategy_of_variable,
    uses_collectives,
)
from keras_dist_ext._keras.tracing import (
    IteratorFunction,
    capture_thread_context,
    clone_function,
    functions_of_op,
    in_vectorized_map,
    in_xla,
    observe_traces,
    run_independently,
    scratch_graph,
    set_op_device,
    traced_graphs,
)
from keras_dist_ext._keras.variables import (
    NamedVariable,
    components,
    distributed_variable,
    is_sync_on_read,
    local_component,
    move_variable,
    parameter_server_variable,
    variables_of_module,
)
from keras_dist_ext.step.alike_draws import RowsAlike
from keras_dist_ext.step.pass_through import PassThrough

X = np.linspace(-1, 1, 12, dtype="float32").reshape(4, 3)
Y = X.sum(axis=1, keepdims=True)

# Per upstream file: the names that we call or replace, and the arguments that they take.
SIGNATURES = {
    "keras.src.api_export": {"get_name_from_symbol": "symbol"},
    "keras.src.backend.common.name_scope": {"current_path": ""},
    "keras.src.backend.common.stateless_scope": {
        "StatelessScope.__init__": "self state_mapping collect_losses initialize_variables",
        "StatelessScope.add_update": "self update",
        "StatelessScope.get_current_value": "self variable",
    },
    "keras.src.backend.common.masking": {"get_keras_mask": "x", "set_keras_mask": "x mask"},
    "keras.src.backend.tensorflow.core": {
        "Variable._direct_assign": "self value",
        "Variable._initialize": "self value",
    },
    "keras.src.backend.tensorflow.optimizer": {
        "TFOptimizer._all_reduce_sum_gradients": "self grads_and_vars",
        "TFOptimizer.add_variable_from_reference": "self reference_variable name initializer",
    },
    "keras.src.backend.tensorflow.trainer": {
        "TensorFlowTrainer._aggregate_additional_loss": "self loss",
        "TensorFlowTrainer._maybe_symbolic_build": "self iterator data_batch",
        "TensorFlowTrainer.make_predict_function": "self force",
        "TensorFlowTrainer.make_test_function": "self force",
        "TensorFlowTrainer.make_train_function": "self force",
    },
    "keras.src.layers.layer": {
        "Layer._clear_losses": "self",
        "Layer._flatten_layers": "self include_self recursive",
    },
    "keras.src.layers.normalization.batch_normalization": {"BatchNormalization._moments": "self inputs mask"},
    "keras.src.layers.convolutional.base_conv": {"BaseConv.call": "self inputs"},
    "keras.src.layers.convolutional.base_conv_transpose": {"BaseConvTranspose.call": "self inputs"},
    "keras.src.layers.convolutional.base_depthwise_conv": {"BaseDepthwiseConv.call": "self inputs"},
    "keras.src.layers.convolutional.base_separable_conv": {"BaseSeparableConv.call": "self inputs"},
    "keras.src.layers.convolutional.conv1d": {"Conv1D.call": "self inputs"},
    "keras.src.layers.pooling.base_pooling": {"BasePooling.call": "self inputs"},
    "keras.src.losses.loss": {
        "apply_mask": "sample_weight mask dtype reduction",
        "reduce_weighted_values": "values sample_weight mask reduction dtype",
        "scale_loss_for_distribution": "value",
        "unscale_loss_for_distribution": "value",
    },
    "keras.src.losses.losses": {
        "LossFunctionWrapper.call": "self y_true y_pred",
        "dice": "y_true y_pred axis",
        "tversky": "y_true y_pred alpha beta axis",
    },
    "keras.src.layers.rnn.rnn": {"RNN.call": "self sequences initial_state mask training"},
    "keras.src.backend.tensorflow.nn": {
        "conv": "inputs kernel strides padding data_format dilation_rate",
        "conv_transpose": "inputs kernel strides padding output_padding data_format dilation_rate",
        "depthwise_conv": "inputs kernel strides padding data_format dilation_rate",
        "max_pool": "inputs pool_size strides padding data_format",
        "separable_conv": "inputs depthwise_kernel pointwise_kernel strides padding data_format dilation_rate",
    },
    "keras.src.backend.tensorflow.numpy": {"add": "x1 x2"},
    "keras.src.metrics.reduction_metrics": {
        "Mean.update_state": "self values sample_weight",
        "Sum.update_state": "self values sample_weight",
    },
    "keras.src.saving.saving_lib": {"save_model": "model filepath weights_format zipped"},
    "keras.src.legacy.saving.legacy_h5_format": {"save_model_to_hdf5": "model filepath overwrite include_optimizer"},
    "tensorflow.python.ops.ctc_ops": {
        "ctc_loss_dense": "labels logits label_length logit_length logits_time_major unique blank_index name"
    },
    "tensorflow.python.checkpoint.checkpoint": {
        "TrackableSaver.save": "self file_prefix checkpoint_number session options"
    },
    "tensorflow.python.saved_model.save": {
        "save_and_return_nodes": "obj export_dir signatures options experimental_skip_checkpoint"
    },
    "tensorflow.python.distribute.collective_all_reduce_strategy": {
        "CollectiveAllReduceExtended._get_variable_creator_initial_value": "self replica_id device primary_var kwargs"
    },
    "keras.src.utils.io_utils": {"ask_to_proceed_with_overwrite": "filepath", "print_msg": "message line_break"},
    "keras.src.random.seed_generator": {"SeedGenerator.next": "self ordered"},
    "keras.src.models.model": {"functional_init_arguments": "args kwargs"},
    "keras.src.optimizers.base_optimizer": {
        "BaseOptimizer._get_variable_index": "self variable",
        "BaseOptimizer.apply": "self grads trainable_variables",
        "BaseOptimizer.scale_loss": "self loss",
        "BaseOptimizer.update_step": "self gradient variable learning_rate",
    },
    "keras.src.optimizers.loss_scale_optimizer": {
        "LossScaleOptimizer.apply": "self grads trainable_variables",
        "LossScaleOptimizer.scale_loss": "self loss",
    },
    "keras.src.trainers.data_adapters": {
        "get_data_adapter": "x y sample_weight batch_size steps_per_epoch shuffle class_weight"
    },
    "keras.src.trainers.data_adapters.py_dataset_adapter": {
        "PyDatasetAdapter._get_iterator": "self",
        "PyDatasetAdapter.on_epoch_begin": "self",
        "PyDatasetAdapter.on_epoch_end": "self",
    },
    "keras.src.trainers.compile_utils": {"CompileLoss.__call__": "self y_true y_pred sample_weight"},
    "keras.src.trainers.data_adapters.array_data_adapter": {"ArrayDataAdapter.get_tf_dataset": "self"},
    "keras.src.trainers.data_adapters.data_adapter_utils": {"unpack_x_y_sample_weight": "data"},
    "keras.src.trainers.epoch_iterator": {
        "EpochIterator.__init__": "self x y sample_weight batch_size steps_per_epoch shuffle class_weight "
        "steps_per_execution",
        "EpochIterator._enumerate_iterator": "self",
        "EpochIterator._interrupted_warning": "self",
        "EpochIterator.catch_stop_iteration": "self",
        "EpochIterator.reset": "self",
    },
    "keras.src.trainers.trainer": {
        "Trainer._get_metrics_result_or_logs": "self logs",
        "Trainer._symbolic_build": "self iterator data_batch",
    },
    "tensorflow.python.data.experimental.ops.distribute": {
        "_AutoShardDataset.__init__": "self input_dataset num_workers index num_replicas"
    },
    "tensorflow.python.data.ops.dataset_ops": {
        "DatasetV2._inputs": "self",
        "DatasetV2._as_serialized_graph": "self allow_stateful strip_device_assignment external_state_policy",
        "_VariantDataset.__init__": "self dataset_variant element_spec",
    },
    "tensorflow.python.distribute.coordinator.cluster_coordinator": {
        "Worker.create_resource": "self function args kwargs"
    },
    "tensorflow.python.distribute.coordinator.values": {
        "PerWorkerValues.__init__": "self values",
        "deserialize_dataset_from_graph": "graph_def element_spec",
        "serialize_dataset_to_graph": "dataset",
    },
    "tensorflow.python.distribute.distribute_lib": {
        "ReplicaContextBase.merge_call": "self merge_fn args kwargs",
        "StrategyExtendedV1._use_merge_call": "self",
    },
    "tensorflow.python.distribute.distribute_utils": {
        "regroup": "values wrap_class always_wrap",
    },
    "tensorflow.python.distribute.input_lib": {"get_iterator_spec_from_dataset": "strategy dataset"},
    "tensorflow.python.distribute.values": {
        "DistributedVariable._get_on_device_or_primary": "self",
    },
    "tensorflow.python.eager.backprop": {
        "GradientTape.gradient": "self target sources output_gradients unconnected_gradients"
    },
    "tensorflow.python.eager.context": {
        "Context.abort_collective_ops": "self code message",
        "Context.configure_coordination_service": "self service_type service_leader enable_health_check "
        "cluster_register_timeout_in_ms heartbeat_timeout_in_ms shutdown_barrier_timeout_in_ms coordinated_jobs "
        "allow_new_incarnation_to_reconnect",
        "Context.delete_config_key_value": "self key",
        "Context.get_config_key_value": "self key timeout_in_ms",
        "Context.set_config_key_value": "self key value",
    },
    "tensorflow.python.eager.polymorphic_function.polymorphic_function": {
        "Function._clone": "self python_function",
        "Function._list_all_concrete_functions": "self",
    },
    "tensorflow.python.eager.polymorphic_function.tracing_compilation": {
        "_create_concrete_function": "function_type type_context func_graph tracing_options"
    },
    "tensorflow.python.framework.ops": {"Graph.switch_to_thread_local": "self", "Graph.get_name_scope": "self"},
    "tensorflow.python.ops.control_flow_util": {"GraphOrParentsInXlaContext": "graph"},
    "tensorflow.python.ops.nn_impl_distribute": {
        "compute_average_loss": "per_example_loss sample_weight global_batch_size",
        "scale_regularization_loss": "regularization_loss",
    },
}

RENAMED = {  # from Keras 3.16 on
    "keras.src.backend.tensorflow.core:": "keras.src.backend.tensorflow.ops.core:",
    "keras.src.backend.tensorflow.nn:": "keras.src.backend.tensorflow.ops.nn:",
    "keras.src.backend.tensorflow.numpy:": "keras.src.backend.tensorflow.ops.numpy:",
    "keras.src.trainers.trainer:Trainer.": "keras.src.trainers.trainer:BaseTrainer.",
    ":TensorFlowTrainer.": ":Trainer.",
}
if KERAS_VERSION >= (3, 16):
    SIGNATURES["keras.src.saving.saving_lib"]["save_model"] = "model filepath zipped"


@pytest.mark.parametrize(
    ("file", "name", "arguments"),
    [
        pytest.param(file, name, arguments, id=f"{file.rpartition('.')[2]}-{name}")
        for file, names in SIGNATURES.items()
        for name, arguments in names.items()
    ],
)
def test_what_we_call_or_replace_takes_the_same_arguments(file: str, name: str, arguments: str) -> None:
    place = f"{file}:{name}"
    for before, after in RENAMED.items() if KERAS_VERSION >= (3, 16) else ():
        place = place.replace(before, after)
    file, _, name = place.partition(":")
    found: Any = importlib.import_module(file)
    for part in name.split("."):
        found = getattr(found, part)
    assert " ".join(inspect.signature(inspect.unwrap(found)).parameters) == arguments


# The calls that `intercept` sends to a step


class Recorder:
    """A `Step` that notes what Keras asks, and answers as Keras itself would."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []

    def count(self) -> Counter[str]:
        return Counter(name for name, _ in self.asked)

    def about(self, name: str) -> list[Any]:
        return [what for asked, what in self.asked if asked == name]

    def reduce_loss(self, local: Any, sample_weight: Any, mask: Any, reduction: Any, dtype: Any) -> Any:
        self.asked.append(("reduce_loss", (local, sample_weight, mask, reduction, dtype)))
        return local

    def as_mean(self, value: Any) -> Any:
        self.asked.append(("as_mean", value))
        return value

    def mean_update(self, metric: Any, values: Any, sample_weight: Any) -> tuple[Any, Any]:
        self.asked.append(("mean_update", (metric.name, values, sample_weight)))
        return values, sample_weight

    def sum_update(self, metric: Any, values: Any, sample_weight: Any) -> tuple[Any, Any]:
        self.asked.append(("sum_update", (metric.name, values, sample_weight)))
        return values, sample_weight

    def begin_loss(self) -> None:
        self.asked.append(("begin_loss", None))

    def note_loss(self, value: Any) -> None:
        self.asked.append(("note_loss", value))

    def scale_loss(self, optimizer: Any, loss: Any, original: Any) -> Any:
        self.asked.append(("scale_loss", optimizer))
        return original(loss)

    def apply(self, optimizer: Any, grads: Any, variables: Any, original: Any) -> None:
        self.asked.append(("apply", optimizer))
        original(grads, variables)

    def all_reduce_gradients(self, grads_and_vars: Any) -> Any:
        self.asked.append(("all_reduce_gradients", [(tuple(g.shape), tuple(v.shape)) for g, v in grads_and_vars]))
        return grads_and_vars

    def next_seed(self, generator: Any, ordered: bool, original: Any) -> Any:
        seed = original(ordered)
        self.asked.append(("next_seed", seed))
        return seed

    def op_seeds(self, op_seed: Any, original: Any) -> Any:
        self.asked.append(("op_seeds", op_seed))
        return original(op_seed)

    has_global_statistics = False

    def constant_seed(self, seed: int) -> None:
        self.asked.append(("constant_seed", seed))

    def draw(self, kind: str, given: Mapping[str, Any], draw: Callable[..., Any]) -> Any:
        self.asked.append(("draw", kind))
        assert {"shape", "key", "counter", "alg"} < set(given)
        return draw(given["shape"], given["counter"])

    def all_reduce(self, reduce_op: Any, value: Any, original: Any) -> Any:
        self.asked.append(("all_reduce", reduce_op))
        return original(reduce_op, value)

    def assign(self, variable: Any, value: Any, original: Any) -> None:
        self.asked.append(("assign", variable.path))
        original(value)

    def call_function(self, original: Any, function: Any, args: Any, kwargs: Any) -> Any:
        self.asked.append(("call_function", function))
        return original(function, *args, **kwargs)


def compiled(*middle: Any, optimizer: Any = None, **arguments: Any) -> Any:
    net = keras.Sequential([keras.Input((3,)), layers.Dense(2, name="first"), *middle, layers.Dense(1, name="head")])
    net.compile(optimizer or SGD(0.1), "mse", **arguments)
    return net


def asked_in_a_step(net: Any, data: Any = (X, Y)) -> Recorder:
    net._symbolic_build(data_batch=data)
    recorder = Recorder()
    with intercept(recorder):
        net.train_step(tuple(tf.constant(part) for part in data))
    return recorder


def test_keras_asks_once_a_step_for_each_loss_metric_gradient_and_state() -> None:
    net = compiled(layers.BatchNormalization(name="norm"), metrics=["mae"], weighted_metrics=["mape"])
    recorder = asked_in_a_step(net)
    expected = {"reduce_loss": 1, "mean_update": 3, "scale_loss": 1, "apply": 1, "all_reduce_gradients": 1}
    assert {name: recorder.count()[name] for name in expected} == expected
    assert recorder.about("scale_loss") == recorder.about("apply") == [net.optimizer]
    (pairs,) = recorder.about("all_reduce_gradients")
    assert pairs == [((3, 2), (3, 2)), ((2,), (2,)), ((2,), (2,)), ((2,), (2,)), ((2, 1), (2, 1)), ((1,), (1,))]
    paths = recorder.about("assign")
    assert sum("norm/moving_mean" in path for path in paths) == 1
    assert sum("norm/moving_variance" in path for path in paths) == 1


def test_loss_tracker_gets_the_loss_as_a_scalar_with_the_number_of_rows() -> None:
    recorder = asked_in_a_step(compiled())
    ((name, value, weight),) = recorder.about("mean_update")
    assert name == "loss"
    assert value.shape == ()
    assert int(weight) == len(X)


def test_loss_is_reduced_with_the_weights_the_mask_and_the_name_of_the_reduction() -> None:
    recorder = Recorder()
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight", dtype="float32")
    prediction = tf.constant(Y)
    prediction._keras_mask = tf.constant([True, False, True, True])
    with intercept(recorder):
        loss(tf.constant(Y), prediction, sample_weight=tf.constant([1.0, 2.0, 3.0, 4.0]))
    ((local, weight, mask, reduction, dtype),) = recorder.about("reduce_loss")
    assert local.shape == ()
    assert np.asarray(weight).tolist() == [1, 2, 3, 4]
    assert np.asarray(mask).tolist() == [True, False, True, True]
    assert (reduction, dtype) == ("mean_with_sample_weight", "float32")


def test_loss_without_a_reduction_has_its_rows_left() -> None:
    recorder = Recorder()
    with intercept(recorder):
        keras.losses.MeanSquaredError(reduction=None)(tf.constant(Y), tf.constant(Y))
    ((local, *_, reduction, _dtype),) = recorder.about("reduce_loss")
    assert local.shape == (4,)
    assert reduction in (None, "none")


def test_loss_scale_optimizer_is_asked_before_the_optimizer_in_it() -> None:
    inner = SGD(0.1)
    net = compiled(optimizer=keras.optimizers.LossScaleOptimizer(inner))
    recorder = asked_in_a_step(net)
    assert recorder.about("scale_loss")[0] is net.optimizer
    assert recorder.about("apply")[0] is net.optimizer
    assert recorder.count()["all_reduce_gradients"] == 1
    assert net.optimizer.inner_optimizer is inner


def test_synchronized_batch_normalization_reduces_through_the_replica_context() -> None:
    recorder = asked_in_a_step(compiled(layers.BatchNormalization(synchronized=True)))
    assert set(recorder.about("all_reduce")) == {tf.distribute.ReduceOp.SUM}


def test_layers_draw_two_int_seeds_through_their_generators() -> None:
    """keras/src/random/seed_generator.py: `[seed, counter]`; `seed=None` is one generator a thread."""
    drop = layers.Dropout(0.5, seed=7)
    recorder = asked_in_a_step(compiled(drop))
    (seed,) = recorder.about("next_seed")
    assert seed.shape == (2,)
    first, counter = np.asarray(seed).tolist()
    assert first == 7
    with intercept(recorder):
        keras.random.uniform([1], seed=drop.seed_generator)
        assert np.asarray(recorder.about("next_seed")[-1]).tolist() == [7, counter + 1]
        keras.random.uniform([1])
    assert len(recorder.about("next_seed")) == 3


def test_constant_seeds_tf_random_ops_and_draws_are_asked_about() -> None:
    """keras/src/backend/tensorflow/random.py; random_seed.py and op_def_library.py of TensorFlow."""
    recorder = Recorder()
    with intercept(recorder), scratch_graph("draws"):
        keras.random.normal([2], seed=5)
        keras.layers.Dropout(0.5, dtype="float16")(tf.ones([2, 2]), training=True)
        tf.random.uniform([2], seed=6)
        tf.random.shuffle([1, 2])
        keras.random.truncated_normal([2], seed=5)
        keras.random.randint([2], 0, 3, seed=5)
        tf.random.split([1, 2], 2)
        tf.raw_ops.StatelessRandomUniformV2(
            shape=[2], key=tf.zeros([1], tf.uint64), counter=tf.zeros([2], tf.uint64), alg=1
        )
    assert recorder.about("constant_seed") == [5] * 3
    kinds = ["normal", "uniform", "truncated_normal", "uniform_int", "uniform_full_int", "uniform"]
    assert recorder.about("draw") == kinds
    assert recorder.about("op_seeds") == [6, None]


def test_seeds_of_layers_their_copies_and_what_they_saved_are_found(tmp_path: Any) -> None:
    drop = layers.Dropout(0.5, seed=7)
    (generator,) = seed_generators(drop)
    generator.next()
    copy = clone_seed_generator(generator)
    assert copy.state.numpy().tolist() == generator.state.numpy().tolist() == [7, 1]
    net = compiled(drop)
    net.save(tmp_path / "net.keras")
    assert saved_variables(tmp_path / "net.keras", "layers/dense").keys() == {"0", "1"}
    assert saved_variables(tmp_path / "net.keras", "none") == {}
    assert saved_variables(tmp_path, "none") == {}


def test_seeds_of_datasets_are_in_their_graphs() -> None:
    tf.random.set_seed(None)
    random_map = tf.data.Dataset.range(8).shuffle(8).map(lambda x: tf.cast(x, tf.float32) + tf.random.uniform([]))
    graph = dataset_graph(random_map)
    assert [node.op for node in unseeded_random_ops(graph)] == ["RandomUniform"]
    assert not caches_in_memory(graph)
    first, again, other = (
        list(with_seeds(random_map, dataset_graph(random_map), seed, seed).as_numpy_iterator()) for seed in (1, 1, 2)
    )
    assert first == again != other
    assert sorted(map(int, first)) == sorted(map(int, other)) == list(range(8))
    assert caches_in_memory(dataset_graph(random_map.cache()))


def test_the_order_of_py_datasets_is_drawn_by_a_seed() -> None:
    """keras/src/trainers/data_adapters/py_dataset_adapter.py shuffles by its module's `random`."""

    def order(seed: int | None) -> list[int]:
        seed_py_datasets(seed)
        indices = list(range(20))
        py_dataset_adapter.random.shuffle(indices)
        return indices

    assert order(1) == order(1) != order(2)
    random.seed(3)
    by_python = order(None)
    random.seed(3)
    assert order(None) == by_python


def test_keras_finds_all_else_of_python_s_random_beside_the_order_of_py_datasets() -> None:
    stood_for = py_dataset_adapter.random
    assert inspect.ismodule(stood_for)
    assert [name for name in vars(random) if not hasattr(stood_for, name)] == []
    random.seed(3)
    drawn = stood_for.random()
    random.seed(3)
    assert drawn == random.random()
    assert stood_for.Random is random.Random


def test_keras_remembers_the_seed_that_a_thread_has_set() -> None:
    keras.utils.set_random_seed(7)
    assert random_seed() == 7
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        assert thread.submit(random_seed).result() is None


def test_the_generator_behind_no_seed_is_the_threads_and_can_be_shared() -> None:
    keras.utils.clear_session()
    state = random.getstate()
    made = global_seed_generator()
    assert random.getstate() == state
    assert global_seed_generator() is made

    def other() -> Any:
        found.append(global_seed_generator())
        with use_global_seed_generator(made):
            found.append(global_seed_generator())
        found.append(global_seed_generator())

    found: list[Any] = []
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert found[0] is not made
    assert found[1] is made
    assert found[2] is found[0]


def test_without_a_step_and_in_other_threads_keras_answers_for_itself() -> None:
    recorder = Recorder()
    with intercept(recorder):
        assert current_step() is recorder
        with intercept(None):
            compiled().evaluate(X, Y, verbose=0)
        thread = threading.Thread(target=lambda: compiled().evaluate(X, Y, verbose=0))
        thread.start()
        thread.join()
    assert recorder.asked == []
    assert current_step() is None


def test_keras_takes_what_has_no_rows_for_a_bias_and_a_step_adds_it() -> None:
    nothing = tf.zeros([0, 3])
    if KERAS_VERSION < (3, 16):
        with pytest.raises(Exception, match="rank|bias|1-D|1D"):
            keras.ops.add(nothing, nothing)
    with intercept(PassThrough()):
        assert keras.ops.add(nothing, nothing).shape == (0, 3)
        assert keras.ops.add(tf.ones([2, 3], tf.int32), 0.5).dtype == tf.float32


def test_sums_and_scalar_losses_are_asked_about_and_averages_are_of_the_rows_at_hand(
    mirrored: Any,
) -> None:
    recorder = Recorder()
    with intercept(recorder):
        keras.metrics.Sum().update_state(2.0, sample_weight=3.0)
        losses_module.LossFunctionWrapper(lambda y, y_pred: tf.reduce_sum(y_pred))(Y, Y)
    assert [values[1:] for values in recorder.about("sum_update")] == [(2.0, 3.0)]
    assert len(recorder.about("as_mean")) == 1

    def averages() -> Any:
        losses = tf.constant([1.0, 2.0, 6.0])
        return tf.nn.compute_average_loss(losses), tf.nn.scale_regularization_loss(losses)

    def of_step() -> Any:
        with intercept(PassThrough()):
            return averages()

    first, second = (mirrored.experimental_local_results(value)[0] for value in mirrored.run(of_step))
    assert (float(first), float(second)) == (3.0, 9.0)
    first, second = (mirrored.experimental_local_results(value)[0] for value in mirrored.run(averages))
    assert (float(first), float(second)) == (1.5, 4.5)  # of TensorFlow: divided by the replicas


def test_a_hook_is_installed_once() -> None:
    before = loss_module.scale_loss_for_distribution
    install(loss_module, "scale_loss_for_distribution")(lambda *_: None)
    assert loss_module.scale_loss_for_distribution is before


def test_keras_divides_losses_by_the_replicas_and_a_step_gets_them_undivided(mirrored: Any) -> None:
    """Both ways must be found by name in keras/src/losses/loss.py, where the trainer looks them up too."""
    assert tf_trainer.loss_module is loss_module
    loss = keras.losses.MeanSquaredError()
    zeros, twos = tf.zeros([4, 1]), tf.fill([4, 1], 2.0)

    def values() -> Any:
        return loss(zeros, twos), loss_module.unscale_loss_for_distribution(tf.constant(1.0))

    with mirrored.scope():
        assert [float(value) for value in values()] == [2, 2]
        with intercept(Recorder()):
            assert [float(value) for value in values()] == [4, 1]


@pytest.mark.parametrize("reduction", ["mean_with_sample_weight", "sum"])
def test_mask_times_weight_is_what_a_weighted_mean_divides_by(reduction: str) -> None:
    mask, weight = tf.constant([True, False, True]), tf.constant([2.0, 3.0, 4.0])
    assert np.asarray(apply_mask(weight, mask, "float32", reduction)).tolist() == [2, 0, 4]
    assert np.asarray(apply_mask(None, mask, "float32", reduction)).tolist() == [1, 0, 1]


# Keras' loops over our epoch iterators


class Scripted(EpochIterator):
    """An epoch of two executions: steps 0 to 2, and 3 to 4."""

    def __init__(self, distribute_strategy: Any = None, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.num_resets = 0

    def reset(self) -> None:
        super().reset()
        self.num_resets += 1

    def _enumerate_iterator(self) -> Any:
        yield 0, 2, iter(["first"])
        yield 3, 4, iter(["second"])

    def __next__(self) -> Any:
        return next(self._epoch_iterator)


class Told(keras.callbacks.Callback):
    """Notes the steps that Keras tells callbacks about."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[str, int]] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.steps.append(("train begin", batch))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps.append(("train end", batch))

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps.append(("test end", batch))

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps.append(("predict end", batch))


class Watched(keras.Sequential):
    """Notes what Keras' loops call on the way."""

    def _maybe_symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        self.__dict__.setdefault("built_from", []).append(iterator)
        self._symbolic_build(data_batch=(tf.TensorSpec([None, 3]), tf.TensorSpec([None, 1])))


def watched(given: list[Any]) -> Any:
    """A model whose step functions note what they are given."""
    net = Watched([layers.Dense(1)])
    net.compile("sgd", "mse")

    def step(iterator: Any) -> Any:
        given.append(next(iterator) if not isinstance(iterator, list) else iterator)
        return {"loss": 1.0}

    def predict(batches: Any) -> Any:
        given.append(batches)
        return tf.zeros([2, 1])

    net.train_function, net.test_function, net.predict_function = step, step, predict
    net.make_train_function = net.make_test_function = net.make_predict_function = lambda force=False: None
    return net


def test_fit_evaluate_and_predict_read_their_data_through_our_iterator() -> None:
    given: list[Any] = []
    arguments: list[set[str]] = []
    made: list[Scripted] = []

    def make(**kwargs: Any) -> Scripted:
        arguments.append(set(kwargs))
        made.append(Scripted(**kwargs))
        return made[-1]

    told, net = Told(), watched(given)
    with use_epoch_iterator(make):
        net.fit(X, Y, validation_data=(X, Y), verbose=0, callbacks=[told])
        net.evaluate(X, Y, verbose=0)
        outputs = net.predict(X, verbose=0, callbacks=[told])
    known = set(inspect.signature(EpochIterator).parameters) | {"distribute_strategy"}
    assert len(arguments) == 4
    assert all(names <= known for names in arguments), arguments
    assert given == ["first", "second"] * 3 + [["first"], ["second"]]
    assert told.steps == [
        *[("train begin", 0), ("train end", 2), ("train begin", 3), ("train end", 4)],
        *[("test end", 2), ("test end", 4), ("predict end", 2), ("predict end", 4)],
    ]
    assert made[0].num_resets == 1
    assert net.built_from[0] is made[0]
    assert outputs.shape == (4, 1)
    compiled().fit(X, Y, verbose=0)  # without `epoch_iterators`, Keras' own
    assert len(arguments) == 4


def test_fit_stops_between_executions_when_the_model_wants_to() -> None:
    given: list[Any] = []
    net = watched(given)
    stop = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: setattr(net, "stop_training", True))
    with use_epoch_iterator(Scripted):
        net.fit(X, Y, epochs=2, verbose=0, callbacks=[stop])
    assert given == ["first"]


def test_fit_begins_at_the_epoch_that_a_callback_has_restored() -> None:
    """keras/src/callbacks/backup_and_restore.py sets `_initial_epoch` in `on_train_begin`."""
    net = watched([])
    assert net._initial_epoch is None
    restore = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: setattr(net, "_initial_epoch", 3))
    with use_epoch_iterator(Scripted):
        history = net.fit(X, Y, epochs=5, verbose=0, callbacks=[restore])
    assert history.epoch == [3, 4]


def test_epoch_iterator_keeps_its_adapter_and_counts_under_the_names_that_we_read() -> None:
    iterator = EpochIterator(X, Y, batch_size=3, steps_per_execution=1)
    assert isinstance(iterator.data_adapter, ArrayDataAdapter)
    assert (iterator._num_batches, iterator._steps_seen, iterator.steps_per_epoch) == (2, 0, None)
    assert [tuple(spec.shape)[1:] for spec in iterator.data_adapter.get_tf_dataset().element_spec] == [(3,), (1,)]
    iter(iterator)
    assert inspect.isgenerator(iterator._epoch_iterator)
    with pytest.warns(UserWarning, match="Your input ran out of data"):
        iterator._interrupted_warning()


@pytest.mark.parametrize("built", [False, True])
def test_models_build_from_specs_without_data(built: bool) -> None:
    """keras/src/trainers/trainer.py, `_symbolic_build`: layers, loss, metrics and optimizer."""
    net = keras.Sequential([*([keras.Input((3,))] if built else []), layers.Dense(1)])
    net.compile("adam", "mse", metrics=["mae"])
    net._symbolic_build(data_batch=(tf.TensorSpec([None, 3]), tf.TensorSpec([None, 1]), tf.TensorSpec([None])))
    assert net.built
    assert net.optimizer.built
    assert [metric.name for metric in net._compile_metrics.metrics] == ["mae"]
    assert int(net.optimizer.iterations) == 0


@pytest.mark.parametrize("shuffle", [True, "batch"])
def test_array_adapter_shuffles_in_the_order_of_a_seed_that_is_asked_for_in_each_pass(shuffle: bool | str) -> None:
    """keras/src/trainers/data_adapters/array_data_adapter.py, `get_tf_dataset`."""
    adapter = EpochIterator(np.arange(64.0), batch_size=8, shuffle=shuffle).data_adapter
    seeds = iter([1, 2, 1])
    with seed_array_shuffles(lambda: seeds.__next__() if shuffle is True else 3):
        dataset = adapter.get_tf_dataset()

    def order() -> list[list[float]]:
        return [[float(v) for v in tf.nest.flatten(batch)[0]] for batch in dataset]

    if shuffle is True:
        first, second, third = order(), order(), order()
        assert first == third != second
    else:
        first = order()
        assert first == order()
        within = {tuple(v - min(batch) for v in batch) for batch in first}
        assert len(within) == len(first)  # each batch in an order of its own
    assert sorted(tf.random.shuffle([1, 2, 3]).numpy().tolist()) == [1, 2, 3]


def test_initial_values_are_not_drawn_apart() -> None:
    recorder = Recorder()
    with intercept(recorder):
        layers.Dense(2).build((None, 3))
    assert recorder.asked == []


# What a step does with the model, its metrics and its optimizer


class Penalty(layers.Layer):
    """Gives to `add_loss`."""

    def call(self, x: Any) -> Any:
        self.add_loss(keras.ops.sum(x))
        return x


def test_each_additional_loss_is_aggregated_as_the_layer_gave_it() -> None:
    """keras/src/trainers/trainer.py, `_compute_loss` and `compute_loss`; keras/src/layers/layer.py, `_losses`."""
    seen: list[Any] = []

    class Net(keras.Sequential):
        def _aggregate_additional_loss(self, loss: Any) -> Any:
            seen.append(loss)
            return super()._aggregate_additional_loss(loss)

    net = Net([keras.Input((3,)), layers.Dense(2, kernel_regularizer="l2"), Penalty(), layers.Dense(1)])
    net.compile("sgd", "mse")
    prediction = net(X, training=True)
    given = [loss for layer in net._flatten_layers() for loss in layer._losses]
    net.compute_loss(X, Y, prediction, None)
    assert len(given) == 1
    assert [loss is given[0] for loss in seen] == [True, False]  # the second one is the regularizer's
    net._clear_losses()
    assert not [loss for layer in net._flatten_layers() for loss in layer._losses]


def test_results_of_metrics_come_from_the_method_on_the_object() -> None:
    net = compiled(metrics=["mae"])
    net.evaluate(X, Y, verbose=0)
    for metric in (net._loss_tracker, *net._compile_metrics.metrics):
        metric.__dict__["result"] = lambda: tf.constant(7.0)
    assert {name: float(value) for name, value in net.get_metrics_result().items()} == {"loss": 7, "mae": 7}


def test_metric_variables_add_up_over_replicas_when_read(mirrored: Any) -> None:
    """keras/src/metrics/metric.py, `add_variable`, since Keras 3.10; before, they were mirrored."""
    with mirrored.scope():
        metric = keras.metrics.Mean()
        weight = keras.Variable(1.0)
        plain = tf.Variable(1.0)
    assert all(is_sync_on_read(variable) for variable in metric.variables)
    assert not is_sync_on_read(weight)
    assert not is_sync_on_read(plain)
    assert not is_sync_on_read(keras.metrics.Mean().variables[0])


def test_stateless_scope_maps_variables_by_identity_and_collects_assignments() -> None:
    variable, other = keras.Variable(1.0), keras.Variable(2.0)
    with keras.StatelessScope(state_mapping=[(variable, tf.constant(5.0))]) as scope:
        variable.assign(variable + 1)
        assert float(variable.value) == 6
        assert float(other.value) == 2
        assert float(scope.get_current_value(variable)) == 6
        assert set(scope.state_mapping) == {id(variable)}
    assert float(variable.value) == 1


def test_accumulated_gradients_are_added_and_emptied_at_the_update() -> None:
    """keras/src/optimizers/base_optimizer.py: `_accumulated_gradients`, in the order of `_get_variable_index`."""
    variable = keras.Variable([1.0, 1.0])
    optimizer = SGD(1.0, gradient_accumulation_steps=2)
    optimizer.build([variable])
    accumulator = optimizer._accumulated_gradients[optimizer._get_variable_index(variable)]
    optimizer.apply([tf.constant([1.0, 2.0])], [variable])
    assert np.asarray(accumulator).tolist() == [1, 2]
    assert int(optimizer._iterations) == 1
    optimizer.apply([tf.constant([3.0, 4.0])], [variable])
    assert np.asarray(variable).tolist() == [-1, -2]
    assert np.asarray(accumulator).tolist() == [0, 0]


def test_loss_scale_is_a_variable_that_divides_the_gradients() -> None:
    variable = keras.Variable([1.0])
    optimizer = keras.optimizers.LossScaleOptimizer(SGD(1.0), initial_scale=8.0)
    optimizer.build([variable])
    assert float(tf.convert_to_tensor(optimizer.dynamic_scale)) == 8
    assert float(optimizer.scale_loss(tf.constant(2.0))) == 16
    optimizer.apply([tf.constant([8.0])], [variable])
    assert np.asarray(variable).tolist() == [0]


# Variables and replicas


def test_under_local_updates_each_replica_writes_its_own_copy(mirrored: Any) -> None:
    """tensorflow/python/distribute: mirrored_strategy.py, values.py and `interim.maybe_merge_call`."""
    recorder, asked_here = Recorder(), []
    with mirrored.scope():
        variable = tf.Variable(0.0)

    @tf.function
    def run() -> Any:
        def replica() -> None:
            with local_updates(mirrored, recorder):
                asked_here.append(current_step() is recorder)
                variable.assign_add(1.0 + tf.cast(replica_id(), tf.float32))
                tf.__internal__.distribute.interim.maybe_merge_call(
                    lambda strategy, v: strategy.extended.update(v, lambda v: v.assign_add(10.0), group=False),
                    mirrored,
                    variable,
                )

        mirrored.run(replica)

    run()
    assert [float(copy) for copy in components(variable)] == [11, 12]
    assert all(asked_here)
    assert mirrored.extended._use_merge_call()


def test_local_updates_of_one_thread_are_not_another_ones(mirrored: Any) -> None:
    asked = []
    with local_updates(mirrored, Recorder()):
        other = threading.Thread(target=lambda: asked.append(mirrored.extended._use_merge_call()))
        other.start()
        other.join()
        asked.append(mirrored.extended._use_merge_call())
    assert asked == [True, False]


def test_local_component_is_the_copy_of_the_replica_that_asks(mirrored: Any) -> None:
    with mirrored.scope():
        variable = keras.Variable([0.0])
    ids = []

    @tf.function
    def run() -> Any:
        def replica() -> Any:
            ids.append(replica_id())
            local = local_component(variable)
            local.assign([float(replica_id())])
            return local.read_value()

        return mirrored.run(replica)

    assert [value.numpy().tolist() for value in mirrored.experimental_local_results(run())] == [[0], [1]]
    assert [copy.numpy().tolist() for copy in components(variable)] == [[0], [1]]
    assert sorted(set(ids)) == [0, 1]


def test_variable_without_replicas_is_its_own_component() -> None:
    variable = keras.Variable(3.0)
    assert components(variable) == (variable.value,)
    assert local_component(variable) is variable.value


def test_a_copy_of_a_mirrored_variable_leads_back_to_it(mirrored: Any) -> None:
    with mirrored.scope():
        variable = tf.Variable(1.0)
    assert all(distributed_variable(copy) is variable for copy in components(variable))
    alone = tf.Variable(1.0)
    assert distributed_variable(alone) is alone


def test_a_graph_knows_of_what_a_parameter_server_holds() -> None:
    from tensorflow.python.distribute import ps_values

    held = tf.Variable(1.0)
    cached = ps_values.CachingVariable(held)
    graph = tf.function(lambda: cached * 2, autograph=False).get_concrete_function().graph
    assert graph.variables[0] is held is parameter_server_variable(cached)
    assert parameter_server_variable(held) is held


def test_regrouped_values_are_one_a_replica(mirrored: Any) -> None:
    values = regroup([tf.constant(1.0), tf.constant(2.0)])
    assert isinstance(values, tf.distribute.DistributedValues)
    doubled = mirrored.run(lambda value: 2 * value, args=(values,))
    assert [float(value) for value in mirrored.experimental_local_results(doubled)] == [2, 4]
    same = tf.constant(1.0)
    assert isinstance(regroup([same, same]), tf.distribute.DistributedValues)  # always_wrap


def test_all_reduce_of_a_replica_context_is_the_one_that_we_replace(mirrored: Any) -> None:
    recorder = Recorder()

    def replica() -> Any:
        with intercept(recorder):
            return tf.distribute.get_replica_context().all_reduce("SUM", tf.constant(1.0))

    total = mirrored.run(replica)
    assert [float(value) for value in mirrored.experimental_local_results(total)] == [2, 2]
    assert recorder.about("all_reduce") == ["SUM", "SUM"]


def test_a_named_variable_is_one_in_a_strategys_scope_and_gone_with_its_object(mirrored: Any) -> None:
    with mirrored.scope(), tf.device("CPU:1"):
        variable, other = NamedVariable(tf.zeros([3, 2])), NamedVariable(tf.ones([3, 2]))
    handle = variable.handle
    assert handle.device.endswith("CPU:1")
    assert variable.value().numpy().tolist() == [[0, 0]] * 3
    assert other.value().numpy().tolist() == [[1, 1]] * 3
    del variable
    with pytest.raises(tf.errors.FailedPreconditionError):
        tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)
    assert other.value().numpy().tolist() == [[1, 1]] * 3


@pytest.mark.parametrize("is_captured", [False, True])
def test_rows_that_are_counted_and_put_into_a_table_are_in_it_in_order(is_captured: bool) -> None:
    table, count = (NamedVariable(value) for value in (tf.zeros([5, 2]), tf.constant(0)))

    @tf.function
    def fill(num_rows: Any) -> None:
        for i in tf.range(num_rows):
            handles = [each.handle if is_captured else each.handle_in_graph() for each in (table, count)]
            index = tf.raw_ops.ResourceCountUpTo(resource=handles[1], limit=5, T=tf.int32)
            row = tf.cast(tf.stack([i, -i]), tf.float32)
            tf.raw_ops.ResourceScatterUpdate(resource=handles[0], indices=index, updates=row)

    fill(tf.constant(3))
    fill(tf.constant(2))
    assert int(count.value()) == 5
    assert table.value().numpy()[:, 0].tolist() == [0, 1, 2, 0, 1]
    assert table.value().numpy()[:, 1].tolist() == [0, -1, -2, 0, -1]
    with pytest.raises(tf.errors.OutOfRangeError):
        fill(tf.constant(1))
    count.assign(np.int32(0))
    fill(tf.constant(1))
    assert bool(fill.get_concrete_function(tf.constant(1)).captured_inputs) == is_captured


def test_code_to_be_compiled_knows_it() -> None:
    seen = []

    def function(x: Any) -> Any:
        seen.append(in_xla())
        return x

    tf.function(function)(tf.constant(1.0))
    tf.function(function, jit_compile=True, autograph=False)(tf.constant(1.0))
    nested = tf.function(function, autograph=False)
    tf.function(lambda x: nested(x), jit_compile=True, autograph=False)(tf.constant(1))
    assert seen == [False, True, True]


def test_overrides_tells_a_users_method_from_those_of_keras() -> None:
    class Net(keras.Model):
        def train_step(self, data: Any) -> Any:
            return {}

    assert overrides(Net(), "train_step")
    assert not overrides(Net(), "test_step")
    assert not overrides(keras.Sequential(), "compute_metrics")


# Classes and names of Keras


def test_inputs_and_outputs_make_a_functional_model() -> None:
    inputs = keras.Input((3,))
    assert functional_init_arguments((inputs, inputs), {})
    assert functional_init_arguments((), {"inputs": inputs, "outputs": inputs})
    assert not functional_init_arguments((), {"name": "net"})
    assert type(keras.Model(inputs, layers.Dense(1)(inputs))) is KerasFunctional


def test_a_class_saved_as_one_of_keras_own_is_written_under_its_name() -> None:
    class Clone(keras.Sequential):
        pass

    save_as(Clone, keras.Sequential)
    written = keras.saving.serialize_keras_object(Clone([keras.Input((3,)), layers.Dense(1)]))
    assert (written["module"], written["class_name"]) == ("keras", "Sequential")
    assert written["registered_name"] is None
    assert type(keras.saving.deserialize_keras_object(written)) is keras.Sequential


def test_data_unpacks_into_x_y_and_weights() -> None:
    assert keras.utils.unpack_x_y_sample_weight((1, 2)) == (1, 2, None)
    assert keras.utils.unpack_x_y_sample_weight((1, 2, 3)) == (1, 2, 3)
    assert keras.utils.unpack_x_y_sample_weight([1]) in [([1], None, None), (1, None, None)]


# What a model is made of, and where


def test_everything_keeps_the_strategy_in_whose_scope_it_was_made(mirrored: Any) -> None:
    outside = keras.Variable(1.0)
    assert strategy_of_variable(outside) in (None, tf.distribute.get_strategy())
    assert is_default_strategy(tf.distribute.get_strategy())
    with mirrored.scope():
        net = compiled()
        made = keras.Variable(1.0)
    assert not is_default_strategy(mirrored)
    assert uses_collectives(mirrored)
    other = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=tf.distribute.ReductionToOneDevice())
    assert not uses_collectives(other)
    assert strategy_of_model(net) is mirrored
    assert strategy_of_optimizer(net.optimizer) is mirrored
    assert strategy_of_variable(made) is mirrored
    assert strategy_of_variable(made.value) is mirrored


def test_strategy_without_its_own_resolver_tells_its_tasks() -> None:
    class UnderParameterServers:
        cluster_resolver = None
        _cluster_resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec({"worker": ["a:1", "b:1"], "ps": ["c:1"]})
        )

    assert num_tasks(UnderParameterServers()) == {"worker": 2, "ps": 1}  # type: ignore[arg-type]
    source = inspect.getsource(tf.distribute.ParameterServerStrategy)
    assert "self._cluster_resolver = " in source


def test_layers_metrics_and_variables_are_found_where_keras_keeps_them() -> None:
    given = keras.metrics.MeanAbsoluteError(name="given")
    net = compiled(layers.Dropout(0.5), layers.BatchNormalization(name="norm"), metrics=[given, "mse"])
    net.own = keras.metrics.Mean(name="own")
    dropout, norm = net.layers[1], net.get_layer("norm")
    assert flat_layers(net)[0] is net
    assert {id(layer) for layer in net.layers} <= {id(layer) for layer in flat_layers(net)}
    assert own_metrics(net) == [net.own]
    assert user_metrics(net) == [given]
    assert user_metrics(keras.Sequential()) == []
    names = [variable.name for variable in own_variables(norm)]
    assert names == ["gamma", "beta", "moving_mean", "moving_variance"]
    assert own_variables(dropout) == [dropout.seed_generator.state]


@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, keras.optimizers.LossScaleOptimizer])
def test_optimizer_remembers_its_variables_in_their_order(wrap: Any) -> None:
    variables = [keras.Variable(1.0), keras.Variable([1.0])]
    optimizer = wrap(SGD(0.1))
    optimizer.build(variables)
    assert [v is w for v, w in zip(optimized_variables(optimizer), variables, strict=True)] == [True, True]


@pytest.mark.parametrize("is_scaled", [False, True])
def test_optimizer_counts_batches_also_while_it_accumulates(is_scaled: bool) -> None:
    inner = SGD(0.1, gradient_accumulation_steps=2)
    optimizer = keras.optimizers.LossScaleOptimizer(inner) if is_scaled else inner
    variable = keras.Variable(1.0)
    for _ in range(3):
        optimizer.apply([tf.constant(1.0)], [variable])
    assert num_batches_used(optimizer) == 3
    assert int(keras.ops.convert_to_numpy(optimizer.iterations)) == 1


def test_compile_keeps_the_objects_that_it_was_given() -> None:
    optimizer, loss = SGD(0.1), keras.losses.MeanSquaredError()
    net = keras.Sequential([layers.Dense(1)])
    net.compile(optimizer, loss, metrics=["mae"], steps_per_execution=3)
    arguments = compile_arguments(net)
    assert arguments["optimizer"] is optimizer
    assert arguments["loss"] is loss
    assert arguments["metrics"] == ["mae"]
    assert arguments["steps_per_execution"] == 3
    assert set(arguments) == {"optimizer", "loss", "loss_weights", "metrics", "weighted_metrics", "run_eagerly",
                              "steps_per_execution", "jit_compile"}  # fmt: skip


def test_models_of_keras_do_not_record_their_arguments_and_those_of_ours_do() -> None:
    """keras/src/ops/operation.py, `__new__`, which `keras.Model.__new__` calls without arguments."""

    class Plain(keras.Model):
        def __init__(self, units: int) -> None:
            super().__init__()

    class Own(Plain):
        def get_config(self) -> Any:
            return {"units": 1}

    class Ours(kde.Model):
        def __init__(self, units: int) -> None:
            super().__init__()

    assert [has_own_config(net) for net in (Plain(2), Own(2), Ours(2))] == [False, True, False]
    assert has_recorded_arguments(Ours(2))
    assert Ours(2)._auto_config.config == {"units": 2}
    assert [has_automatic_config(thing) for thing in (Ours(2), Own(2), layers.Dense(2))] == [True, False, False]
    assert is_serializable_dict(Ours(2)._auto_config)
    assert not is_serializable_dict({})


def test_a_clone_is_saved_under_the_registered_name_of_the_users_class() -> None:
    @keras.saving.register_keras_serializable("upstream")
    class Registered(layers.Layer):
        pass

    class Clone(Registered):
        pass

    share_registered_name(Registered, Clone)
    assert keras.saving.get_registered_name(Clone) == "upstream>Registered"
    assert keras.saving.get_registered_object("upstream>Registered") is Registered


def test_a_symbolic_tensor_leads_back_to_its_input() -> None:
    tensor = keras.Input((None, 3), dtype="int32", name="ids")
    again = input_like(tensor)
    assert again is not tensor
    assert (again.shape, again.dtype, again.name) == ((None, None, 3), "int32", "ids")


# Graphs of datasets


def values_of(dataset: tf.data.Dataset) -> list[int]:
    return [int(value) for value in dataset]


def test_dataset_graph_names_shards() -> None:
    dataset = tf.data.Dataset.range(10).shard(4, 3).map(lambda x: x + 1).shard(2, 1)
    assert sorted(shard_indices(dataset_graph(dataset))) == [(2, 1), (4, 3)]
    assert shard_indices(dataset_graph(tf.data.Dataset.range(3))) == []


def test_shuffles_without_a_seed_get_ours() -> None:
    tf.random.set_seed(None)  # with a global seed, each shuffle has one

    def shuffled(seed: int, times: int = 1) -> tf.data.Dataset:
        dataset = tf.data.Dataset.range(50).map(lambda x: x)
        for _ in range(times):
            dataset = dataset.shuffle(50)
        options = tf.data.Options()
        options.deterministic = True
        dataset = dataset.with_options(options)
        seeded = with_seeds(dataset, dataset_graph(dataset), seed)
        assert seeded.element_spec == dataset.element_spec
        assert seeded.options().deterministic is True
        return seeded

    first, again = shuffled(3), shuffled(3)
    passes = values_of(first), values_of(first)
    assert passes == (values_of(again), values_of(again))
    assert passes[0] != passes[1]  # reshuffled each iteration, as without a seed
    assert sorted(passes[0]) == list(range(50))
    assert values_of(shuffled(4)) != passes[0]
    assert values_of(shuffled(3, times=2)) == values_of(shuffled(3, times=2))


def test_shuffles_in_functions_get_our_seed_too() -> None:
    tf.random.set_seed(None)
    parts = tf.data.Dataset.range(3).interleave(lambda i: tf.data.Dataset.range(9 * i, 9 * i + 9).shuffle(9))
    passes = [values_of(with_seeds(parts, dataset_graph(parts), seed)) for seed in (1, 1, 2)]
    assert passes[0] == passes[1] != passes[2]
    assert sorted(passes[0]) == sorted(passes[2]) == list(range(27))


def test_a_shuffle_without_a_seed_is_known_without_a_graph() -> None:
    tf.random.set_seed(None)
    numbers = tf.data.Dataset.range(9)
    assert has_unseeded_shuffle(tf.data.Dataset.zip((numbers, numbers.shuffle(3).map(lambda i: i))).batch(2))
    assert not has_unseeded_shuffle(numbers.shuffle(3, seed=1).batch(2))


def test_some_rows_are_taken_of_any_arrays_that_are_in_memory() -> None:
    x, y = np.arange(12.0).reshape(6, 2), tf.range(6)
    adapter = ArrayDataAdapter({"a": x, "b": tf.constant(x)}, y)
    assert [part.tolist() for part in take_examples(adapter, np.array([1, 5]))] == [
        [[2.0, 3.0], [10.0, 11.0]],
        [[2.0, 3.0], [10.0, 11.0]],
        [1, 5],
    ]
    with pytest.raises(TypeError, match="RaggedTensor"):
        take_examples(ArrayDataAdapter(tf.ragged.constant([[1.0], [1.0, 2.0]])), np.array([1]))


def test_a_copy_of_a_function_is_traced_anew_but_for_what_was_loaded(tmp_path: Any) -> None:
    traced: list[int] = []

    class Doubles(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec([], tf.float32)])
        def double(self, x: tf.Tensor) -> tf.Tensor:
            traced.append(1)
            return 2 * x

    module = Doubles()
    copy = clone_function(module.double)
    assert float(module.double(1.0)) == float(copy(1.0)) == 2
    assert len(traced) == 2
    tf.saved_model.save(module, str(tmp_path / "saved"))
    loaded = tf.saved_model.load(str(tmp_path / "saved"))
    assert clone_function(loaded.double) is loaded.double


def test_shuffles_with_a_seed_keep_it() -> None:
    dataset = tf.data.Dataset.range(50).shuffle(50, seed=1)
    assert with_seeds(dataset, dataset_graph(dataset), 3) is dataset


@pytest.mark.parametrize("seed", [7, 0])
def test_what_has_a_seed_from_tensorflows_global_one_only_can_be_told(seed: int) -> None:
    tf.random.set_seed(seed)
    try:
        plain = tf.data.Dataset.range(50).shuffle(50).map(lambda x: tf.random.uniform([]) + tf.cast(x, tf.float32))
        own = tf.data.Dataset.range(50).shuffle(50, seed=1).map(lambda x: tf.random.uniform([], seed=5))
    finally:
        tf.random.set_seed(None)
    for dataset, is_own in ((plain, False), (own, True)):
        graph = dataset_graph(dataset)
        assert bool(unseeded_random_ops(graph, over_global=True)) is not is_own
        assert not unseeded_random_ops(graph)
        assert (with_seeds(dataset, graph, 3, 3, over_global=True) is dataset) is is_own
    orders = [values_of(with_seeds(plain, dataset_graph(plain), seed, over_global=True)) for seed in (1, 1, 2)]
    assert [int(value) for value in orders[0]] == [int(value) for value in orders[1]]
    assert [int(value) for value in orders[0]] != [int(value) for value in orders[2]]


def test_variables_of_a_module_are_named_by_where_they_are() -> None:
    module, inner = tf.Module(), tf.Module()
    inner.b, module.inner = tf.Variable(1.0), inner
    module.kernels = [tf.Variable(2.0), {"a": tf.Variable(3.0)}]
    named = variables_of_module(module)
    assert [name for name, _ in named] == ["kernels/0", "kernels/1/a", "inner/b"]
    assert [id(variable) for _, variable in named] == [id(variable) for variable in module.variables]


def test_a_step_sees_what_is_differentiated() -> None:
    seen: list[Any] = []

    class Step:
        def differentiate(
            self, gradient: Any, target: Any, sources: Any, output_gradients: Any = None, *, of_keras: Any = None
        ) -> Any:
            seen.append((target, sources, output_gradients, of_keras))
            return gradient([target], [tf.constant(3.0)])

    variable = tf.Variable(2.0)
    for step, factor in ((Step(), 3.0), (None, 1.0)):
        with intercept(step), tf.GradientTape() as tape:  # type: ignore[arg-type]
            loss = variable**2
            gradient = tape.gradient(loss, [variable])
        assert float(gradient[0]) == 4.0 * factor
    assert len(seen) == 1
    assert (float(seen[0][0]), seen[0][1][0] is variable, *seen[0][2:]) == (4.0, True, None, None)


def test_a_step_of_keras_own_says_which_optimizer_gets_its_gradients() -> None:
    """keras/src/backend/tensorflow/trainer.py, `train_step`."""
    seen: list[Any] = []

    class Step(PassThrough):
        def differentiate(self, gradient: Any, target: Any, sources: Any, above: Any, *, of_keras: Any) -> Any:
            seen.append(of_keras)
            return gradient(target, above)

    model = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
    model.compile("sgd", "mse")
    with intercept(Step()):
        model.train_step((tf.constant(X), tf.constant(Y)))
    assert seen == [model.optimizer]


def test_a_wrapped_dataset_gives_what_it_wraps_and_carries_its_options(mirrored: Any) -> None:
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    wrapped = WrappedDataset(tf.data.Dataset.range(6).batch(2).with_options(options))
    assert [batch.numpy().tolist() for batch in wrapped] == [[0, 1], [2, 3], [4, 5]]
    assert wrapped.options().experimental_distribute.auto_shard_policy.name == "DATA"
    assert int(wrapped.cardinality()) == 3
    (distributed, *_) = mirrored.experimental_distribute_dataset(wrapped)
    assert [part.numpy().tolist() for part in mirrored.experimental_local_results(distributed)] == [[0], [1]]
    with mirrored.scope():
        model = kde.Sequential([layers.Dense(1)])
    model.compile("sgd", "mse")
    pairs = WrappedDataset(tf.data.Dataset.from_tensor_slices((X, Y)).batch(2))
    assert len(model.fit(pairs, epochs=2, verbose=0).history["loss"]) == 2


@pytest.mark.parametrize("worker", [0, 1])
def test_a_worker_reads_its_shard_and_no_batch_is_cut(worker: int) -> None:
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    shard = auto_shard(tf.data.Dataset.range(8).batch(2).with_options(options), 2, worker)
    assert [batch.numpy().tolist() for batch in shard] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]][worker]
    assert shard_indices(dataset_graph(shard)) == [(2, worker)]


def test_replicas_take_what_their_worker_reads_in_turn(mirrored: Any) -> None:
    distributed = mirrored.experimental_distribute_dataset(tf.data.Dataset.range(6).batch(4))
    (dataset,) = local_datasets(distributed)
    parts = [part for batch in distributed for part in mirrored.experimental_local_results(batch)]
    assert [e.numpy().tolist() for e in dataset] == [e.numpy().tolist() for e in parts] == [[0, 1], [2, 3], [4], [5]]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_pass_over_a_py_dataset_is_begun_and_ended(workers: int) -> None:
    calls = []

    class Batches(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, i: int) -> Any:
            return (np.full((2, 1), i),)

        def on_epoch_begin(self) -> None:
            calls.append("begin")

        def on_epoch_end(self) -> None:
            calls.append("end")

    adapter = make_data_adapter(Batches(workers=workers), None, None, batch_size=None, shuffle=False)
    for _ in range(2):
        assert [int(x[0, 0]) for (x,) in py_dataset_batches(adapter)] == [0, 1, 2]
    begun = py_dataset_batches(adapter)
    next(begun)
    begun.close()
    assert calls == ["begin", "end"] * 3


def test_datasets_travel_to_workers_as_graphs() -> None:
    """tensorflow/python/distribute/coordinator/values.py and cluster_coordinator.py, for `per_worker_values`."""
    from tensorflow.python.distribute.coordinator import cluster_coordinator

    dataset = tf.data.Dataset.range(3).batch(2)
    graph = coordinator_values.serialize_dataset_to_graph(dataset)
    there = coordinator_values.deserialize_dataset_from_graph(graph, dataset.element_spec)
    assert [batch.numpy().tolist() for batch in there] == [[0, 1], [2]]
    assert tf.distribute.coordinator.PerWorkerValue is coordinator_values.PerWorkerValues
    assert "self._cluster = " in inspect.getsource(cluster_coordinator.ClusterCoordinator)
    assert "self.workers = " in inspect.getsource(cluster_coordinator.Cluster)
    like_ours = inspect.getsource(coordinator_values.PerWorkerDatasetFromDatasetFunction)
    assert "._type_spec = " in like_ours
    assert "get_iterator_spec_from_dataset(" in like_ours


def test_an_iterator_goes_on_from_its_state() -> None:
    data = tf.data.Dataset.range(20).map(lambda i: 2 * i, num_parallel_calls=2).batch(2).prefetch(3)
    iterator = iter(data)
    for _ in range(4):
        next(iterator)
    state = iterator_state(iterator)
    other = iter(data)
    assert state is not None
    assert set_iterator_state(other, state)
    assert [x.numpy().tolist() for x in other] == [x.numpy().tolist() for x in iterator]
    assert not set_iterator_state(iter(tf.data.Dataset.range(3)), state)


def test_what_depends_on_python_has_no_iterator_state() -> None:
    data = tf.data.Dataset.from_generator(lambda: iter(range(4)), output_signature=tf.TensorSpec([], tf.int64))
    assert iterator_state(iter(data)) is None


def test_pipelines_that_draw_an_order_are_known() -> None:
    numbers = tf.data.Dataset.range(9)
    nested = numbers.interleave(lambda i: tf.data.Dataset.range(3).shuffle(2))
    for data in (numbers.shuffle(5).batch(2), numbers.shuffle(3, seed=1), nested, tf.data.Dataset.random().take(3)):
        assert has_random_order(dataset_graph(data))
    assert not has_random_order(dataset_graph(numbers.map(lambda i: 2 * i).batch(2).repeat()))


def test_the_state_of_a_shuffle_at_the_end_of_its_input_loses_count_of_the_passes() -> None:
    def orders(num_read: int) -> tuple[list[list[int]], list[list[int]]]:
        data, other = (tf.data.Dataset.range(44).shuffle(20, seed=7).batch(8) for _ in range(2))
        iterator, restored = iter(data), iter(other)
        for _ in range(num_read):
            next(iterator)
        set_iterator_state(restored, iterator_state(iterator) or [])
        return [x.numpy().tolist() for x in data], [x.numpy().tolist() for x in other]

    one, other = orders(2)
    assert one == other
    one, other = orders(6)
    assert one != other  # when this fails, `draws_order` has no reason any more


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_rest_of_a_pass_over_a_py_dataset_asks_for_no_more(shuffle: bool) -> None:
    class Batches(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 6

        def __getitem__(self, number: int) -> Any:
            return np.full([2, 1], number, "float32"), np.zeros([2, 1], "float32")

    adapter = py_dataset_adapter.PyDatasetAdapter(Batches(), shuffle=shuffle)
    seed_py_datasets(5)
    whole = [float(x[0, 0]) for x, _ in adapter.get_tf_dataset()]
    seed_py_datasets(None)
    rest = [float(x[0, 0]) for x, _ in resume_py_dataset(adapter, 2, 5)]
    assert rest == whole[2:]
    assert (whole == sorted(whole)) != shuffle


# Threads for virtual replicas


def in_thread(function: Any) -> Any:
    result: list[Any] = []
    thread = threading.Thread(target=lambda: result.append(function()))
    thread.start()
    thread.join()
    return result[0]


def test_another_thread_enters_the_graph_device_and_globals_of_a_replica() -> None:
    """tensorflow/python/distribute/mirrored_run.py and keras/src/backend/common/global_state.py, for `this_place`."""
    seen: list[Any] = []

    @tf.function
    def traced() -> None:
        graph = tf.compat.v1.get_default_graph()
        with tf.device("CPU:1"), tf.name_scope("outer"), use_global_seed_generator("a generator"):
            enter = capture_thread_context(tf.distribute.get_replica_context())

            def elsewhere() -> Any:
                with enter("inner"):
                    op = tf.zeros([]).op
                    with tf.init_scope():
                        is_eager_outside = tf.executing_eagerly()
                    without_seed = global_state.get_global_attribute("global_seed_generator")
                    return op.graph is graph, op.device[-5:], op.name, is_eager_outside, without_seed

            seen.append(in_thread(elsewhere))

    traced.get_concrete_function()
    assert seen == [(True, "CPU:1", "outer/inner/zeros", True, "a generator")]


def test_another_thread_enters_the_device_of_an_eager_replica() -> None:
    with tf.device("CPU:1"):
        enter = capture_thread_context(tf.distribute.get_replica_context())

    def elsewhere() -> str:
        with enter("inner"):
            return tf.zeros([]).device[-5:]  # type: ignore[no-any-return]

    assert in_thread(elsewhere) == "CPU:1"


def test_another_thread_writes_summaries_where_a_replica_would(tmp_path: Any) -> None:
    """tensorflow/python/ops/summary_ops_v2.py keeps the writer in the thread, for `this_place`."""
    with tf.summary.create_file_writer(str(tmp_path)).as_default(step=0):
        enter = capture_thread_context(tf.distribute.get_replica_context())

        def elsewhere() -> bool:
            with enter("inner"):
                return bool(tf.summary.scalar("loss", 1.0))

        assert in_thread(elsewhere)


def test_a_copy_of_a_function_is_traced_again() -> None:
    """polymorphic_function.py, for `copy_of_function`."""
    traces: list[int] = []

    class Holder:
        @tf.function
        def method(self, x: Any) -> Any:
            traces.append(1)
            return x + 1

    method = Holder().method
    one = tf.constant(1)
    assert (int(method(one)), int(method(one)), len(traces)) == (2, 2, 1)
    assert (int(clone_function(method)(one)), len(traces)) == (2, 2)
    recorder = Recorder()
    with intercept(recorder):
        method(one)
    assert recorder.about("call_function") == [method]


def test_each_trace_of_a_function_is_noted_once_with_its_arguments() -> None:
    """tracing_compilation.py, for `note_traces`; polymorphic_function.py, for `graphs_of`."""
    noted: list[tuple[str, dict[str, str]]] = []

    @tf.function
    def inner(value: Any) -> Any:
        return value + 1

    @tf.function
    def outer(step: Any, value: Any) -> Any:
        return inner(value) + step

    outer(0, tf.constant(1))  # an earlier trace makes variables, if it wants any
    stop = observe_traces(lambda name, arguments, seconds: noted.append((name, arguments)))
    try:
        for step in (1, 1, 2):
            outer(step, tf.constant(1))
    finally:
        stop()
    outer(3, tf.constant(1))
    assert [name for name, _ in noted] == ["outer", "outer"]
    assert [arguments["step"] for _, arguments in noted] == ["1", "2"]
    assert noted[0][1]["value"] == noted[1][1]["value"]
    assert len(traced_graphs(outer)) == 4
    assert traced_graphs(len) == []


def test_calls_of_fit_go_through_a_hook_once_and_then_no_more() -> None:
    """backend/tensorflow/trainer.py, whose `fit` is inherited, for `fits_through`."""
    seen: list[str] = []

    def hook(fit: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(type(model).__module__.partition(".")[0])
        return fit(model, *args, **kwargs)

    models = [keras.Sequential([layers.Dense(1)]), kde.Sequential([layers.Dense(1)])]
    for model in models:
        model.compile("sgd", "mse")
    with intercept_fit(hook, [keras.Model, kde.Model]):
        for model in models:
            model.fit(X, Y, verbose=0)
    models[0].fit(X, Y, verbose=0)
    assert seen == ["keras", "keras_dist_ext"]
    assert "fit" not in vars(keras.Model)


def test_losses_of_layers_come_back() -> None:
    """keras/src/layers/layer.py, for `losses_of_layers` and `set_losses_of_layers`."""
    net = keras.Sequential([keras.Input((3,)), layers.Dense(2, activity_regularizer="l2")])
    net(X)
    first, kept = net.losses, get_layer_losses(net)
    net(X + 1)
    assert net.losses[0] is not first[0]
    set_layer_losses(kept)
    assert net.losses[0] is first[0]
    with preserve_losses(net):
        net(X + 1)
    assert net.losses[0] is first[0]


# What a certificate stands on


@pytest.mark.parametrize("is_scaled", [False, True])
def test_an_optimizer_keeps_the_gradients_that_it_uses(is_scaled: bool) -> None:
    model = keras.Sequential([layers.Input((3,)), layers.Dense(1)])
    optimizer = SGD(0.5)
    model.compile(keras.optimizers.LossScaleOptimizer(optimizer) if is_scaled else optimizer, "mse")
    gradients = GradientSlots(model.optimizer)
    before = model.get_weights()
    model.train_on_batch(X, Y)
    assert [id(variable) for variable, _ in gradients.pairs] == [id(v) for v in model.trainable_variables]
    for was, (variable, gradient) in zip(before, gradients.pairs, strict=True):
        np.testing.assert_allclose((was - variable.numpy()) / 0.5, gradient.numpy(), rtol=1e-5)

    gradients.are_given = True
    for _, gradient in gradients.pairs:
        gradient.assign(tf.ones_like(gradient))
    before = model.get_weights()
    model.make_train_function(force=True)
    model.train_on_batch(X, Y)
    for was, (variable, _) in zip(before, gradients.pairs, strict=True):
        np.testing.assert_allclose(was - variable.numpy(), 0.5, rtol=1e-5)


LOGITS = tf.zeros([2, 3])
DRAWS = {
    "tf uniform": lambda: tf.random.uniform([2]),
    "tf integers": lambda: tf.random.uniform([2], maxval=5, dtype=tf.int32),
    "tf normal": lambda: tf.random.normal([2]),
    "tf truncated": lambda: tf.random.truncated_normal([2]),
    "tf gamma": lambda: tf.random.gamma([2], 1.0),
    "tf poisson": lambda: tf.random.poisson([2], 1.0),
    "tf categorical": lambda: tf.random.categorical(LOGITS, 1),
    "tf stateless": lambda: tf.random.stateless_uniform([2], [1, 2]),
    "tf generator": lambda: tf.random.Generator.from_seed(1).normal([2]),
    "keras dropout": lambda: keras.random.dropout(X, 0.5, seed=1),
    "keras normal": lambda: keras.random.normal([2], seed=1),
    "keras truncated": lambda: keras.random.truncated_normal([2], seed=1),
    "keras integers": lambda: keras.random.randint([2], 0, 5, seed=1),
    "keras gamma": lambda: keras.random.gamma([2], 1.0, seed=1),
    "keras binomial": lambda: keras.random.binomial([2], 3.0, 0.5, seed=1),
    "keras categorical": lambda: keras.random.categorical(LOGITS, 1, seed=1),
    "keras shuffle": lambda: keras.random.shuffle(X, seed=1),
}


@pytest.mark.parametrize("kind", DRAWS)
def test_random_ops_are_sent_where_we_want_them(kind: str) -> None:
    asked = []

    def draw(name: str, original: Any, /, *args: Any, **kwargs: Any) -> Any:
        asked.append(name)
        return original(*args, **kwargs)

    with intercept_random_ops(draw):
        DRAWS[kind]()
    assert len(asked) == 1
    DRAWS[kind]()
    assert len(asked) == 1


def test_rows_draw_alike_whatever_their_number() -> None:
    alike = RowsAlike()
    with intercept_random_ops(alike):
        few, many = keras.random.normal([2, 7, 3], seed=1), tf.random.normal([5, 7, 3])
        assert np.unique(keras.random.randint([4, 1], 0, 9, seed=1)).size == 1
        alike.step.assign(1)
        later = tf.random.normal([5, 7, 3])
    assert not alike.unknown
    np.testing.assert_array_equal(np.unique(many, axis=0), few[:1])
    assert np.unique(few).size == 3
    assert not np.isin(later, many).any()


def loss_of_a_step(parts: tuple[str, ...]) -> float:
    """The loss, whose rows have other weights and a mask, behind a BatchNormalization with given statistics."""
    keras.utils.set_random_seed(1)
    norm = layers.BatchNormalization()
    model = keras.Sequential([layers.Input((3, 1)), layers.Masking(), norm, layers.Dense(1)])
    model.compile(SGD(0.0), "mse")
    norm.moving_mean.assign([7.0])
    with without_parts(parts):
        x = X[..., None] * (np.arange(3) > 0)[:, None]
        return float(model.train_on_batch(x, x + 1, sample_weight=np.arange(12.0).reshape(4, 3)))


def test_each_part_of_a_step_can_be_left_out() -> None:
    parts = ("weights", "masks", "moments", "loss")
    losses = [loss_of_a_step(without) for without in ((), *((part,) for part in parts), parts[:2])]
    assert len({round(loss, 4) for loss in losses}) == len(losses)
    assert loss_of_a_step(()) == losses[0]


def test_a_layer_that_is_called_knows_its_path() -> None:
    class Asks(layers.Layer):
        def call(self, x: Any) -> Any:
            self.found = current_layer_path()
            return x

    asks = Asks(name="asks")
    keras.Sequential([layers.Input((3,)), asks], name="net")(X)
    assert asks.found == "net/asks"
    assert current_layer_path() == ""


# Parts of a model on devices of their own


@pytest.mark.parametrize("kind", ["default", "one_device", "mirrored2"])
def test_a_variable_is_made_anew_on_other_devices_with_the_same_values(strategies, kind):
    strategy = strategies.get(kind)
    devices = ["CPU:3", "CPU:2"][: strategy.num_replicas_in_sync]
    with strategy.scope():
        variable = keras.Variable(X, name="kernel")
    before = strategy_of_variable(variable)
    move_variable(variable, strategy, devices)
    assert [copy.device.rpartition("device:")[2] for copy in components(variable)] == devices
    assert strategy_of_variable(variable) is before
    for copy in components(variable):
        np.testing.assert_array_equal(copy, X)
    with strategy.scope():
        optimizer = SGD(momentum=0.9)
        optimizer.build([variable])
    (slot,) = (v for v in optimizer.variables if "momentum" in v.path)
    assert [copy.device.rpartition("device:")[2] for copy in components(slot)] == devices


def test_gradients_are_computed_in_the_scope_of_the_ops_that_they_are_of():
    @tf.function(autograph=False)
    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            with tf.name_scope("outer"), tf.name_scope("inner"):
                y = tf.matmul(x, X)
        return tape.gradient(y, x)

    ops = gradient.get_concrete_function(tf.TensorSpec([2, 4])).graph.get_operations()
    products = [op.name for op in ops if op.type == "MatMul"]
    assert products[0] == "outer/inner/MatMul"
    assert products[1].startswith("gradient_tape/outer/inner/MatMul/")


def test_an_op_that_is_traced_is_sent_to_a_device():
    with tf.Graph().as_default():
        op = tf.constant(1.0).op
        set_op_device(op, "CPU:1")
        assert op.device == "/device:CPU:1"
        set_op_device(op, "/job:localhost/replica:0/task:0/device:CPU:2")
        assert op.device == "/job:localhost/replica:0/task:0/device:CPU:2"


def test_a_mask_goes_along():
    mask = tf.constant([True, False])
    tensor, other, without = tf.constant([1.0, 2.0]), tf.constant([3.0, 4.0]), tf.constant([5.0])
    tensor._keras_mask = mask
    copy_mask(tensor, other)
    assert other._keras_mask is mask
    copy_mask(without, other)
    assert other._keras_mask is mask


def test_the_profiler_says_when_an_op_ran(tmp_path):
    @tf.function(autograph=False)
    def product(x):
        with tf.name_scope("placed"):
            return tf.matmul(x, x, name="product")

    x = tf.random.normal([300, 300])
    product(x)
    tf.profiler.experimental.start(str(tmp_path), tf.profiler.experimental.ProfilerOptions(host_tracer_level=3))
    for _ in range(3):
        product(x)
    tf.profiler.experimental.stop()
    spans = [(begin, end) for name, begin, end in op_spans(str(tmp_path)) if name == "placed/product"]
    assert len(spans) == 3
    assert all(1e-6 < end - begin < 1 for begin, end in spans)


def test_the_profile_of_a_gpu_names_the_op_of_a_kernel(tmp_path: Any) -> None:
    """As an H200 has written it: events are kernels, and the op is a stat of theirs."""
    space = xplane_pb2.XSpace()
    plane = space.planes.add(name="/device:GPU:0")
    words = ["tf_op", "net/first/MatMul:MatMul", "net/first/BiasAdd/_1:_Send", "kernel_details", ""]
    for number, word in enumerate(words, 1):
        plane.stat_metadata[number].name = word
    for number, name in enumerate(["void gemmSN_NN_kernel<float, 128>(int)", "MemcpyD2D", "Memset 3"], 1):
        plane.event_metadata[number].name = name
    line = plane.lines.add(name="Stream #13(Compute,Memset)", timestamp_ns=5_000)
    for kernel, op in ((1, 2), (2, 3), (3, None)):
        event = line.events.add(metadata_id=kernel, offset_ps=1_000_000 * kernel, duration_ps=500_000)
        event.stats.add(metadata_id=4, ref_value=5)
        if op is not None:
            event.stats.add(metadata_id=1, ref_value=op)
    (tmp_path / "host.xplane.pb").write_bytes(space.SerializeToString())
    spans = {name: (begin, end) for name, begin, end in op_spans(str(tmp_path))}
    assert set(spans) == {"net/first/MatMul", "Memset 3"}
    assert spans["net/first/MatMul"] == pytest.approx((6e-6, 6.5e-6))


def test_a_function_of_an_iterator_does_what_a_tf_function_does() -> None:
    """concrete_function.py, for `FunctionOfIterator`."""
    total = tf.Variable(0, dtype=tf.int64)

    @tf.function(autograph=False, reduce_retracing=True)
    def step(iterator: Any, factor: Any) -> Any:
        batch = iterator.get_next()
        total.assign_add(tf.cast(factor, tf.int64))
        return iterator.get_next_as_optional(), {"sum": (batch["a"] + batch["b"]) * factor, "none": None}

    called = IteratorFunction(step)
    numbers = tf.data.Dataset.range(4).map(lambda i: {"a": i, "b": 10 * i})
    for _ in range(2):
        iterator = iter(numbers)
        following, logs = called(iterator, tf.constant(3, tf.int64))
        assert (int(logs["sum"]), logs["none"]) == (0, None)
        assert following.get_value()["b"].numpy() == 10
        following, logs = called(iterator, tf.constant(2, tf.int64))
        assert int(logs["sum"]) == 44
        assert not iterator.get_next_as_optional().has_value()
    assert total.numpy() == 10
    assert len(traced_graphs(called)) == 1
    with pytest.raises(tf.errors.OutOfRangeError):
        called(iterator, tf.constant(2, tf.int64))
    fractions = numbers.map(lambda row: {name: tf.cast(value, tf.float32) / 2 for name, value in row.items()})
    _, logs = called(iter(fractions.skip(1)), tf.constant(4.0))
    assert float(logs["sum"]) == 22.0
    assert len(traced_graphs(called)) == 2
    held = weakref.ref(iterator)
    del iterator
    gc.collect()
    assert held() is None


def test_stateful_ops_run_in_the_order_of_tracing_unless_they_are_said_to_be_independent() -> None:
    @tf.function
    def clocks(x: Any) -> Any:
        first = tf.timestamp()
        with tf.control_dependencies([x]):
            second = tf.timestamp()
            third = tf.timestamp()
        run_independently(third)
        return first, second, third

    _, second, third = (
        op for op in clocks.get_concrete_function(tf.constant(1.0)).graph.get_operations() if op.type == "Timestamp"
    )
    assert sorted(op.type for op in second.control_inputs) == ["Placeholder", "Timestamp"]
    assert [op.type for op in third.control_inputs] == ["Placeholder"]
    run_independently(tf.timestamp())  # eagerly there is nothing to do


def test_a_checksum_tells_what_a_dataset_is_made_of() -> None:
    def checksum(values: Any) -> int:
        return checksum_of_constants(dataset_graph(tf.data.Dataset.from_tensor_slices(values).shuffle(9).batch(2)))

    rows = np.arange(6.0)
    assert checksum(rows) == checksum(rows.copy()) != checksum(rows[::-1].copy())
    assert checksum((rows, rows)) != checksum((rows, rows[::-1].copy()))
    assert checksum(tf.ragged.constant([[1, 2], [3]])) == checksum(tf.ragged.constant([[1, 2], [3]]))
    assert checksum(["/a/1", "/a/2"]) == checksum(["/b/1", "/b/2"]) != checksum(["/a/1", "/a/3"])


def test_what_keras_has_looked_at_of_a_generator_is_at_hand() -> None:
    adapter = make_data_adapter((pair for pair in [(X, Y), (X, Y)]), None, None, batch_size=None, shuffle=False)
    assert isinstance(adapter, GeneratorDataAdapter)
    x, y = first_batch_of_generator(adapter)
    assert x is X
    assert y is Y


def test_functions_that_ops_call_are_at_hand() -> None:
    @tf.function(autograph=False)
    def called(x: Any) -> Any:
        return x - 1.0

    @tf.function(autograph=False)
    def calls(x: Any) -> Any:
        inner = tf.function(lambda x: called(x) * 2.0)(x)
        branch = tf.cond(x > 0, lambda: x * 3.0, lambda: tf.switch_case(tf.cast(x, tf.int32), [lambda: x - 4.0]))
        (loop,) = tf.while_loop(lambda x: x < 5.0, lambda x: (x / 6.0,), (x,))
        return inner + branch + loop

    graph = calls.get_concrete_function(tf.constant(1.0)).graph
    found = {op.type: functions_of_op(op) for op in graph.get_operations() if functions_of_op(op)}

    def types(inner: Any) -> list[str]:
        return [op.type for op in inner.get_operations() if op.type in ("Mul", "Sub", "RealDiv", "Less")]

    assert {name: [types(inner) for inner in inners] for name, inners in found.items()} == {
        "PartitionedCall": [["Mul"]],
        "StatelessIf": [["Mul"], []],
        "StatelessWhile": [["RealDiv"], ["Less"]],
    }
    (inner,), (_, other) = found["PartitionedCall"], found["StatelessIf"]
    assert [types(functions_of_op(op)[0]) for op in inner.get_operations() if functions_of_op(op)] == [["Sub"]]
    nested = [op for op in other.get_operations() if functions_of_op(op)]
    assert [types(functions_of_op(op)[0]) for op in nested] in ([["Sub"]], [])  # a case of one is none
    gradient = tf.function(lambda x: tf.gradients(calls(x), x)[0]).get_concrete_function(tf.constant(1.0)).graph
    assert all(inner.inputs for op in gradient.get_operations() for inner in functions_of_op(op))


def test_layers_without_a_build_of_their_own_need_none() -> None:
    class Own(layers.Layer):
        def build(self, shape: Any) -> None:
            self.weight = self.add_weight()

    assert [needs_build(layer) for layer in (layers.Dropout(0.5), layers.Dense(1), Own())] == [
        False,
        True,
        True,
    ]
    built = layers.Dense(1)
    built.build((None, 2))
    assert not needs_build(built)
    with tf.distribute.get_strategy().scope():
        assert needs_build(kde.Sequential([layers.Dense(1)]))


def test_a_sum_that_is_read_over_replicas_cannot_be_added_to_outside_of_them_but_where_keras_calls_layers(mirrored):
    """values.py; keras/src/backend/tensorflow/core.py names the graph."""
    of_sum = {"synchronization": tf.VariableSynchronization.ON_READ, "aggregation": tf.VariableAggregation.SUM}
    with mirrored.scope():
        total = tf.Variable(0.0, trainable=False, **of_sum)
        with pytest.raises(ValueError, match="does not support `assign_add` in cross-replica context"):
            values_util.on_read_assign_add_cross_replica.__wrapped__(total, 1.0)
        names = []

        class Layer(keras.layers.Layer):
            def call(self, x):
                names.append(tf.compat.v1.get_default_graph().name)
                total.assign_add(1.0)
                return x

        Layer()(keras.Input((2,)))
    assert names[0].startswith("scratch_graph")
    assert float(total.read_value()) == 0.0


@pytest.mark.parametrize("in_function", [False, True])
def test_a_turn_of_a_vectorized_map_is_told_by_its_scope(in_function):
    seen = []

    def turn(x):
        seen.append(in_vectorized_map())
        return 2.0 * x

    def doubled():
        seen.append(in_vectorized_map())
        return tf.vectorized_map(turn, tf.ones([3]))

    assert (tf.function(doubled) if in_function else doubled)().numpy().tolist() == [2.0] * 3
    assert seen == [False, True]


def test_tensorflow_gives_each_replica_the_initial_value_of_a_sum_and_divides_what_it_assigns_and_restores(mirrored):
    """Where it no longer does, what _keras/variables.py replaces for sums goes."""
    of_sum = {"synchronization": tf.VariableSynchronization.ON_READ, "aggregation": tf.VariableAggregation.SUM}
    make = distribute_utils.create_mirrored_variable
    with mirrored.scope(), patched(distribute_utils, "create_mirrored_variable", make.__wrapped__):
        total = tf.Variable(5, trainable=False, **of_sum)
    assert int(total.read_value()) == 10
    with mirrored.scope():
        values_util.on_read_assign_cross_replica.__wrapped__(total, 7)
    assert [int(part) for part in total.values] == [3, 3]
    values_util.get_on_read_restore_ops.__wrapped__(total, tf.constant(9), total.aggregation)
    assert [int(part) for part in total.values] == [4, 4]


def test_alpha_of_tversky_is_what_this_keras_makes_of_it() -> None:
    true, predicted = tf.constant([1.0, 0.0, 1.0, 1.0]), tf.constant([0.9, 0.4, 0.2, 0.7])
    both, missed, wrong = (
        float(tf.reduce_sum(part)) for part in (true * predicted, true * (1 - predicted), (1 - true) * predicted)
    )

    def by(alpha_of: float, beta_of: float) -> float:
        return 1 - both / (both + 0.3 * alpha_of + 0.7 * beta_of)

    def swapped(y_true: Any, y_pred: Any, alpha: float, beta: float) -> Any:
        return keras.losses.tversky(y_true, y_pred, alpha=beta, beta=alpha)

    of_missed = weighs_missed_by_alpha(keras.losses.tversky)
    expected = by(missed, wrong) if of_missed else by(wrong, missed)
    assert float(keras.losses.tversky(true, predicted, alpha=0.3, beta=0.7)) == pytest.approx(expected, rel=1e-5)
    assert weighs_missed_by_alpha(swapped) != of_missed
