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
    from keras_dist_ext.actions import every, on_improvement, on_preemption
    from keras_dist_ext.adoption import adopt, clone_model, load_model
    from keras_dist_ext.audit import audit
    from keras_dist_ext.buckets import bucket_by_length
    from keras_dist_ext.callbacks import ReplicaSeeds, ScopeGuard
    from keras_dist_ext.certificate import Certificate, certify
    from keras_dist_ext.diagnose import diagnose
    from keras_dist_ext.doctor import ParallelismDoctor
    from keras_dist_ext.errors import (
        BackendError,
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
    from keras_dist_ext.gathering import gather, per_replica
    from keras_dist_ext.launch import launch
    from keras_dist_ext.loop import TrainLoop
    from keras_dist_ext.model import Model, Sequential
    from keras_dist_ext.monitor import ReplicaMonitor
    from keras_dist_ext.monitoring.event_files import EventWriter
    from keras_dist_ext.monitoring.json_lines import JsonLinesWriter, replay
    from keras_dist_ext.monitoring.terminal import TerminalWriter
    from keras_dist_ext.nonfinite import NonFinite
    from keras_dist_ext.pipeline import inspect
    from keras_dist_ext.placement import Placement, place
    from keras_dist_ext.processes.pulse import heartbeat
    from keras_dist_ext.replica import Replica
    from keras_dist_ext.resume import Resume
    from keras_dist_ext.scope import check_scope
    from keras_dist_ext.seed_table import describe_seeds
    from keras_dist_ext.seeds import seed_replicas
    from keras_dist_ext.sharding import distribute
    from keras_dist_ext.strategy import StrategyChoice, pick_strategy
    from keras_dist_ext.virtual import VirtualReplicas
    from keras_dist_ext.writers import MemoryWriter

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
    "launch",
    "heartbeat",
    "KerasDistError",
    "StrategyError",
    "ClusterError",
    "ScopeError",
    "SeedError",
    "DataError",
    "MonitorError",
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
    "pick_strategy": "strategy",
    "StrategyChoice": "strategy",
    "Model": "model",
    "Sequential": "model",
    "VirtualReplicas": "virtual",
    "adopt": "adoption",
    "load_model": "adoption",
    "clone_model": "adoption",
    "place": "placement",
    "Placement": "placement",
    "TrainLoop": "loop",
    "Replica": "replica",
    "per_replica": "gathering",
    "gather": "gathering",
    "distribute": "sharding",
    "bucket_by_length": "buckets",
    "audit": "audit",
    "inspect": "pipeline",
    "check_scope": "scope",
    "ScopeGuard": "callbacks",
    "ReplicaSeeds": "callbacks",
    "describe_seeds": "seed_table",
    "seed_replicas": "seeds",
    "ReplicaMonitor": "monitor",
    "NonFinite": "nonfinite",
    "ParallelismDoctor": "doctor",
    "diagnose": "diagnose",
    "certify": "certificate",
    "Certificate": "certificate",
    "EventWriter": "monitoring.event_files",
    "JsonLinesWriter": "monitoring.json_lines",
    "replay": "monitoring.json_lines",
    "MemoryWriter": "writers",
    "TerminalWriter": "monitoring.terminal",
    "Resume": "resume",
    "every": "actions",
    "on_improvement": "actions",
    "on_preemption": "actions",
    "launch": "launch",
    "heartbeat": "processes.pulse",
    "KerasDistError": "errors",
    "StrategyError": "errors",
    "ClusterError": "errors",
    "ScopeError": "errors",
    "SeedError": "errors",
    "DataError": "errors",
    "MonitorError": "errors",
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
    import_module(f"{__name__}.processes.pulse").begin()
