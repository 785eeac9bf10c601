"""Describe a run: its strategy, devices, seeds, versions and settings."""

from __future__ import annotations

import importlib.metadata
import platform
import socket

import tensorflow as tf

from keras_dist_ext import __version__
from keras_dist_ext._keras import keras
from keras_dist_ext._keras.optimizers import inner_optimizer
from keras_dist_ext._keras.strategies import is_default_strategy, num_tasks
from keras_dist_ext.monitoring.dashboard.metadata import MANIFEST_VERSION, Manifest, Strategy
from keras_dist_ext.strategy.pick import reason_for
from keras_dist_ext.strategy.workers import workers_of
from keras_dist_ext.training.model import Model

__all__ = ["describe_model", "replica_devices", "build_manifest"]


def build_manifest(model: Model, experiment: str, *, batch_size: int | None = None) -> Manifest:
    """Return the manifest, which does not change while an experiment runs.

    Args:
        model: that is trained.
        experiment: its name.
        batch_size: examples of a global batch, if known.
    """
    strategy = model.distribute_strategy
    workers = workers_of(strategy)
    num_replicas = strategy.num_replicas_in_sync
    strategy_entry = Strategy(
        name=type(strategy).__name__,
        num_replicas=num_replicas,
        num_workers=1 if workers is None else workers.num_workers,
    )
    reason = reason_for(strategy)
    if reason is not None:
        strategy_entry["reason"] = reason
    seed = model.replica_seeds.root
    return Manifest(
        version=MANIFEST_VERSION,
        experiment=experiment,
        strategy=strategy_entry,
        devices=replica_devices(strategy),
        seeds=None if seed is None else {"global": seed, "replicas": [seed + i for i in range(num_replicas)]},
        versions=_versions(),
        batch_size=batch_size,
        host=socket.gethostname(),
    )


def replica_devices(strategy: tf.distribute.Strategy) -> list[str]:
    """Return the device of each replica, over all workers."""
    if is_default_strategy(strategy):
        first = [*tf.config.list_logical_devices("GPU"), *tf.config.list_logical_devices("CPU")][0]
        return [first.name]
    local = list(strategy.extended.worker_devices)
    if workers_of(strategy) is None:
        return local
    tasks = num_tasks(strategy)
    names = [f"/job:{job}/replica:0/task:{task}" for job in ("chief", "worker") for task in range(tasks.get(job, 0))]
    return [f"{name}/device:{device.partition('/device:')[2]}" for name in names for device in local]


def _versions() -> dict[str, str]:
    return {
        "keras_dist_ext": __version__,
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "tensorboard": importlib.metadata.version("tensorboard"),
        "python": platform.python_version(),
    }


def describe_model(model: Model) -> dict[str, str]:
    """Return the settings of a model that determine its training, to be read by people."""
    details = {"model": model.name}
    if model.built:
        details["parameters"] = f"{model.count_params():,}"
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        inner = inner_optimizer(optimizer)
        details["optimizer"] = type(inner).__name__
        details |= {
            name.replace("_", " "): _short(value)
            for name, value in inner.get_config().items()
            if name != "name" and value not in (None, False)
        }
        if inner is not optimizer:
            details["loss scale"] = "dynamic"
    details["precision"] = model.dtype_policy.name
    if model.replica_runtime.chooses_num_steps:
        details["steps per execution"] = "auto"
    else:
        details["steps per execution"] = str(model.steps_per_execution)
    details["run eagerly"] = str(model.run_eagerly)
    details["compiled by XLA"] = str(model.jit_compile)
    virtual = getattr(model, "virtual_replicas", None)
    if virtual is not None:
        details["virtual replicas"] = str(virtual.count)
    return details


def _short(value: object) -> str:
    """Return a setting of an optimizer as short text; a schedule is a config."""
    if isinstance(value, dict) and "class_name" in value:
        return f"{value['class_name']} {value.get('config', '')}"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
