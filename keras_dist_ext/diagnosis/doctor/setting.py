"""Read the setting of a run: where its model lives, on which devices, and what its traced steps hold."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.layers import flat_layers
from keras_dist_ext._keras.optimizers import inner_optimizer
from keras_dist_ext._keras.strategies import is_default_strategy
from keras_dist_ext._keras.variables import Variable
from keras_dist_ext.cluster.cores import num_cores
from keras_dist_ext.cluster.spec import Cluster
from keras_dist_ext.diagnosis.doctor.examination import Largest, Loop, PlacedElsewhere, Setting
from keras_dist_ext.errors import ClusterError
from keras_dist_ext.monitoring.manifest import replica_devices
from keras_dist_ext.strategy.resources import find_resources, list_devices
from keras_dist_ext.strategy.scope import ScopeReport, check_scope, optimizers
from keras_dist_ext.strategy.workers import workers_of
from keras_dist_ext.training.runtime import runtime_of

__all__ = ["read_setting", "placed_elsewhere_in", "layer_of"]


def read_setting(
    model: keras.Model,
    *,
    strategy: tf.distribute.Strategy | None = None,
    step_watchers: Sequence[str] = (),
    graphs: Iterable[tf.Graph] = (),
    environ: Mapping[str, str] = os.environ,
) -> Setting:
    """Return what is known of a run before any clock is read.

    Args:
        model: any Keras model, of ours or not.
        strategy: the one that it is meant to live under; None is its own.
        step_watchers: the names of callbacks that look at every batch.
        graphs: the graphs of its training function, as far as it was traced.
        environ: where TF_CONFIG and SLURM's variables are read.
    """
    own = model.distribute_strategy
    meant = own if strategy is None else strategy
    report = check_scope(model, meant)
    workers = workers_of(own)
    cluster = _cluster(environ)
    devices = _names(own.extended.worker_devices if not is_default_strategy(own) else replica_devices(own))
    placed_elsewhere, share = placed_elsewhere_in(graphs, devices, [layer.name for layer in flat_layers(model)])
    runtime = runtime_of(model)
    automatic = runtime is not None and runtime.chooses_num_steps
    compiled_eagerly = bool(getattr(model, "run_eagerly", False))
    return Setting(
        model=model.name,
        weights=_shapes(model),
        is_ours=runtime is not None,
        strategy=_kind(own),
        num_replicas=own.num_replicas_in_sync,
        num_workers=1 if workers is None else workers.num_workers,
        devices=devices,
        accelerators=tuple(name for name in list_devices() if name.startswith(("GPU", "TPU:"))),
        num_cores=num_cores(),
        num_threads=tf.config.threading.get_intra_op_parallelism_threads()
        or int(environ.get("TF_NUM_INTRAOP_THREADS", "0") or 0),
        num_workers_here=1 if workers is None else _num_tasks_here(own),
        num_listed_workers=0 if cluster is None else cluster.num_workers,
        cluster_source="TF_CONFIG" if cluster is None else cluster.source,
        outside=_outside(report),
        num_replicas_meant=meant.num_replicas_in_sync,
        runs_eagerly=compiled_eagerly or tf.config.functions_run_eagerly(),
        eager_because="run_eagerly=True" if compiled_eagerly else "tf.config.run_functions_eagerly(True)",
        steps_per_execution=None if automatic else int(getattr(model, "steps_per_execution", 1)),
        step_watchers=tuple(step_watchers),
        gradient_bytes=sum(_num_bytes(variable) for variable in model.trainable_variables),
        largest=_largest(model),
        loops=tuple(_loops(model)),
        placed_elsewhere=placed_elsewhere,
        elsewhere_share=share,
    )


def _shapes(model: keras.Model) -> str:
    """Return a digest of the shapes of a model's weights, which stay when its names get other numbers."""
    shapes = [tuple(weight.shape) for weight in model.weights]
    return hashlib.sha256(repr(shapes).encode()).hexdigest()[:16] if shapes else ""


def _outside(report: ScopeReport) -> str:
    outside = report.outside
    if not outside:
        return ""
    shown = ", ".join(f"{entry.path} ({entry.role}, under {entry.place})" for entry in outside[:3])
    rest = f" and {len(outside) - 3} more" if len(outside) > 3 else ""
    return (
        f"{len(outside)} of {len(report.entries)} parts of '{report.model}' do not live under {report.strategy}: "
        f"{shown}{rest}"
    )


def _kind(strategy: tf.distribute.Strategy) -> str:
    if is_default_strategy(strategy):
        return "none"
    kinds = {
        "multi_worker": tf.distribute.MultiWorkerMirroredStrategy,
        "mirrored": tf.distribute.MirroredStrategy,
        "one_device": tf.distribute.OneDeviceStrategy,
        "tpu": tf.distribute.TPUStrategy,
        "parameter_server": tf.distribute.ParameterServerStrategy,
    }
    return next((name for name, kind in kinds.items() if isinstance(strategy, kind)), type(strategy).__name__)


def _names(devices: Iterable[str]) -> tuple[str, ...]:
    """Return `CPU:0` for TensorFlow's full name."""
    return tuple(device.rpartition("/")[2].removeprefix("device:").upper() for device in devices)


def _cluster(environ: Mapping[str, str]) -> Cluster | None:
    try:
        return find_resources(environ).cluster
    except ClusterError:
        return None  # `pick_strategy` says what is wrong with it


def _num_tasks_here(strategy: tf.distribute.Strategy) -> int:
    """Return how many workers run on this machine, judged by their addresses."""
    resolver = strategy.cluster_resolver
    tasks = resolver.cluster_spec().as_dict()
    hosts = [_host(address) for job in ("chief", "worker") for address in tasks.get(job, [])]
    own = _host(tasks[resolver.task_type][resolver.task_id])
    return hosts.count(own)


def _host(address: str) -> str:
    host = address.rpartition(":")[0]
    return "localhost" if host in ("127.0.0.1", "[::1]", "localhost") else host


def _num_bytes(variable: Variable) -> int:
    return int(np.prod(variable.shape)) * int(tf.as_dtype(variable.dtype).size)


def _largest(model: keras.Model) -> Largest | None:
    """Return the largest of the variables that are trained; None where no optimizer is known."""
    optimizer = next((inner_optimizer(optimizer) for _, optimizer in optimizers(model)), None)
    variable = max(model.trainable_variables, key=_num_bytes, default=None)
    if optimizer is None or variable is None:
        return None
    layers = [layer for layer in flat_layers(model) if isinstance(layer, keras.layers.Embedding) and layer.built]
    is_table = any(variable is layer.embeddings for layer in layers) and not _writes_rows_only(optimizer)
    return Largest(
        variable.path, _num_bytes(variable), type(optimizer).__name__, int(variable.shape[0]) if is_table else 0
    )


def _writes_rows_only(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether an update touches only the rows of a table that have a gradient (keras/src/optimizers/sgd.py)."""
    is_plain = isinstance(optimizer, keras.optimizers.SGD) and not optimizer.momentum
    return is_plain and not (optimizer.weight_decay or optimizer.use_ema or optimizer.gradient_accumulation_steps)


def _loops(model: keras.Model) -> list[Loop]:
    """Return the recurrent layers."""
    layers = [
        layer
        for layer in flat_layers(model)
        if isinstance(layer, keras.layers.RNN) and not layer.unroll and layer.built
    ]
    return [Loop(layer.name, _num_time_steps(layer, model), int(layer.count_params())) for layer in layers]


def _num_time_steps(layer: keras.layers.Layer, model: keras.Model) -> int:
    """Return the length of a layer's input, or of the model's; 0 where it is not fixed."""
    try:
        shape = layer.input.shape
    except (AttributeError, ValueError):  # it was called in no graph of layers
        runtime = runtime_of(model)
        leaves = [] if runtime is None else keras.tree.flatten(runtime.batch_spec)
        shapes = [tuple(leaf.shape) for leaf in leaves if getattr(leaf, "shape", None) is not None]
        shape = next((shape for shape in shapes if len(shape) == 3), (None, None))
    return int(shape[1] or 0)


_HEAVY = re.compile(
    r"(Batch)?MatMul(V\d)?|Einsum|Conv\w+|DepthwiseConv\w+|CudnnRNN\w*|_?FusedBatchNorm\w*|(Stateless)?While"
)
_REPLICA = re.compile(r"(?:^|/)replica_(\d+)/")


def placed_elsewhere_in(
    graphs: Iterable[tf.Graph], devices: Sequence[str], layers: Sequence[str]
) -> tuple[tuple[PlacedElsewhere, ...], float]:
    """Find heavy work that is placed on another device than its replica's.

    TensorFlow names the ops of replicas but the first by their number, and places all of them. Looked at are those of
    the forward pass: the others go where their replica is.

    Args:
        graphs: of training functions.
        devices: of this worker's replicas.
        layers: the names of the model's layers.

    Returns:
        What is done elsewhere, by layer, and its share of a replica's heavy ops, of the replica that has most.
    """
    if len(devices) < 2:
        return (), 0.0
    found: dict[tuple[str, str], set[int]] = {}
    num_heavy, num_elsewhere = [0] * len(devices), [0] * len(devices)
    for graph in graphs:
        definition = graph.as_graph_def()
        for node in [*definition.node, *(n for f in definition.library.function for n in f.node_def)]:
            if not node.device or not _HEAVY.fullmatch(node.op) or node.name.startswith("gradient"):
                continue
            match = _REPLICA.search(node.name)
            replica = int(match[1]) if match else 0
            if replica >= len(devices):
                continue
            (device,) = _names([node.device])
            num_heavy[replica] += 1
            if device != devices[replica]:
                num_elsewhere[replica] += 1
                found.setdefault((layer_of(node.name, layers), device), set()).add(replica)
    placed_elsewhere = tuple(
        PlacedElsewhere(layer, tuple(sorted(replicas)), device) for (layer, device), replicas in found.items()
    )
    return placed_elsewhere, max(
        elsewhere / max(1, heavy) for elsewhere, heavy in zip(num_elsewhere, num_heavy, strict=True)
    )


def layer_of(name: str, layers: Sequence[str]) -> str:
    """Return the innermost layer that an op's name tells of, or else where it lies.

    TensorFlow puts a number behind a name that was there before.
    """
    parts = name.split("/")[:-1] or [name]
    for part in reversed(parts):
        named = [layer for layer in layers if part == layer or re.fullmatch(re.escape(layer) + r"_\d+", part)]
        if named:
            return max(named, key=len)
    return parts[-1]
