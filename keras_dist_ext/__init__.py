"""Train Keras 3 models under tf.distribute, get one device's numbers, and see what every replica does.

Importing this package imports no TensorFlow: each name below loads its module when it is first used.
"""

import os
import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keras_dist_ext import tuner as tuner
    from keras_dist_ext.cluster.heartbeat import heartbeat
    from keras_dist_ext.cluster.launch import launch
    from keras_dist_ext.data.audit import audit
    from keras_dist_ext.data.buckets import bucket_by_length
    from keras_dist_ext.data.distribute import distribute
    from keras_dist_ext.data.pipeline import inspect
    from keras_dist_ext.diagnosis.certificate.certificate import Certificate, certify
    from keras_dist_ext.diagnosis.doctor.bounded_run import diagnose
    from keras_dist_ext.diagnosis.doctor.doctor import ParallelismDoctor
    from keras_dist_ext.errors import (
        BackendError,
        CallbackError,
        CertificateError,
        ClusterError,
        DataError,
        KerasDistError,
        LaunchError,
        LoopError,
        MonitorError,
        NonFiniteError,
        PlacementError,
        ResumeError,
        ScopeError,
        SeedError,
        StrategyError,
        TunerError,
        WorkersError,
    )
    from keras_dist_ext.monitoring.event_files import EventWriter
    from keras_dist_ext.monitoring.json_lines import JsonLinesWriter, replay
    from keras_dist_ext.monitoring.monitor import ReplicaMonitor
    from keras_dist_ext.monitoring.terminal import TerminalWriter
    from keras_dist_ext.monitoring.writers import MemoryWriter
    from keras_dist_ext.step.seed_table import describe_seeds
    from keras_dist_ext.step.seeds import seed_replicas
    from keras_dist_ext.strategy.pick import StrategyChoice, pick_strategy
    from keras_dist_ext.strategy.scope import check_scope
    from keras_dist_ext.strategy.virtual import VirtualReplicas
    from keras_dist_ext.training.actions import every, on_improvement, on_preemption
    from keras_dist_ext.training.adoption.adopt import adopt, clone_model, load_model
    from keras_dist_ext.training.callbacks import ReplicaSeeds, ScopeGuard
    from keras_dist_ext.training.loop.gathering import gather, per_replica
    from keras_dist_ext.training.loop.replica import Replica
    from keras_dist_ext.training.loop.train_loop import TrainLoop
    from keras_dist_ext.training.model import Model, Sequential
    from keras_dist_ext.training.nonfinite import NonFinite
    from keras_dist_ext.training.placement.place import Placement, place
    from keras_dist_ext.training.resume.callback import Resume
    from keras_dist_ext.training.run_callback import RunCallback

__version__ = "0.1.0"

# In the order in which a training script meets them. Written out, because mypy and editors read it.
__all__ = [
    "pick_strategy",
    "StrategyChoice",
    "Model",
    "Sequential",
    "VirtualReplicas",
    "adopt",
    "load_model",
    "clone_model",
    "place",
    "Placement",
    "TrainLoop",
    "Replica",
    "per_replica",
    "gather",
    "distribute",
    "bucket_by_length",
    "audit",
    "inspect",
    "check_scope",
    "ScopeGuard",
    "ReplicaSeeds",
    "describe_seeds",
    "seed_replicas",
    "ReplicaMonitor",
    "NonFinite",
    "ParallelismDoctor",
    "diagnose",
    "certify",
    "Certificate",
    "EventWriter",
    "JsonLinesWriter",
    "replay",
    "MemoryWriter",
    "TerminalWriter",
    "Resume",
    "every",
    "on_improvement",
    "on_preemption",
    "RunCallback",
    "launch",
    "heartbeat",
    "KerasDistError",
    "StrategyError",
    "ClusterError",
    "ScopeError",
    "SeedError",
    "DataError",
    "MonitorError",
    "CallbackError",
    "NonFiniteError",
    "WorkersError",
    "CertificateError",
    "ResumeError",
    "LoopError",
    "PlacementError",
    "TunerError",
    "LaunchError",
    "BackendError",
]

_MODULE_OF = {
    "pick_strategy": "strategy.pick",
    "StrategyChoice": "strategy.pick",
    "Model": "training.model",
    "Sequential": "training.model",
    "VirtualReplicas": "strategy.virtual",
    "adopt": "training.adoption.adopt",
    "load_model": "training.adoption.adopt",
    "clone_model": "training.adoption.adopt",
    "place": "training.placement.place",
    "Placement": "training.placement.place",
    "TrainLoop": "training.loop.train_loop",
    "Replica": "training.loop.replica",
    "per_replica": "training.loop.gathering",
    "gather": "training.loop.gathering",
    "distribute": "data.distribute",
    "bucket_by_length": "data.buckets",
    "audit": "data.audit",
    "inspect": "data.pipeline",
    "check_scope": "strategy.scope",
    "ScopeGuard": "training.callbacks",
    "ReplicaSeeds": "training.callbacks",
    "describe_seeds": "step.seed_table",
    "seed_replicas": "step.seeds",
    "ReplicaMonitor": "monitoring.monitor",
    "NonFinite": "training.nonfinite",
    "ParallelismDoctor": "diagnosis.doctor.doctor",
    "diagnose": "diagnosis.doctor.bounded_run",
    "certify": "diagnosis.certificate.certificate",
    "Certificate": "diagnosis.certificate.certificate",
    "EventWriter": "monitoring.event_files",
    "JsonLinesWriter": "monitoring.json_lines",
    "replay": "monitoring.json_lines",
    "MemoryWriter": "monitoring.writers",
    "TerminalWriter": "monitoring.terminal",
    "Resume": "training.resume.callback",
    "every": "training.actions",
    "on_improvement": "training.actions",
    "on_preemption": "training.actions",
    "RunCallback": "training.run_callback",
    "launch": "cluster.launch",
    "heartbeat": "cluster.heartbeat",
    "KerasDistError": "errors",
    "StrategyError": "errors",
    "ClusterError": "errors",
    "ScopeError": "errors",
    "SeedError": "errors",
    "DataError": "errors",
    "MonitorError": "errors",
    "CallbackError": "errors",
    "NonFiniteError": "errors",
    "WorkersError": "errors",
    "CertificateError": "errors",
    "ResumeError": "errors",
    "LoopError": "errors",
    "PlacementError": "errors",
    "TunerError": "errors",
    "LaunchError": "errors",
    "BackendError": "errors",
}


_PACKAGES = ("tuner",)  # reached as `kde.tuner`, and lazy themselves


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"{__name__}.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value  # the next look-up does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES})


class _Package(ModuleType):
    """Keep `launch` the function when the import system binds the submodule `launch` on this package."""

    def __setattr__(self, name: str, value: object) -> None:
        if isinstance(value, ModuleType) and name in _MODULE_OF:
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package

if "KERAS_DIST_EXT_PULSE" in os.environ:  # `launch` has started this process, and wants to know what it is at
    import_module(f"{__name__}.cluster.heartbeat").begin()
