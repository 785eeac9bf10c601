"""Every argument of every public function, constructor and method is checked before anything happens.

Each argument of a valid call is replaced in turn by each of some bad values. What comes is an error that names the
argument, unless the value is listed as valid for it. A public name without an entry fails.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import keras
import keras_tuner
import numpy as np
import pytest
import tensorflow as tf

import keras_dist_ext as kde
from keras_dist_ext.monitoring.writers import Writer

BAD = {
    "None": None,
    "an object": object(),
    "text": "x",
    "bytes": b"x",
    "empty text": "",
    "negative": -1,
    "half": 0.5,
    "nan": math.nan,
    "infinite": math.inf,
    "empty list": [],
    "huge": 10**30,
    "an array": np.arange(3),
    "True": True,
}
ERRORS = (kde.KerasDistError, ValueError, TypeError)
FLAG = {"True"}
NUMBER = {"half"}
PATH = {"text"}


@dataclasses.dataclass(frozen=True)
class Entry:
    """A valid call, and what is valid besides.

    Args:
        call: what is called, with all arguments by name.
        valid: makes arguments that are valid, of which only some need be given.
        accepts: by argument, the bad values that are valid for it.
        called: by argument, a pattern for what a message calls it instead.
        runs: whether calls with accepted values are made.
        arguments: their names, where the signature does not say them.
    """

    call: Callable[..., Any]
    valid: Callable[[], dict[str, Any]] = dict
    accepts: Mapping[str, set[str]] = dataclasses.field(default_factory=dict)
    called: Mapping[str, str] = dataclasses.field(default_factory=dict)
    runs: bool = True
    arguments: tuple[str, ...] = ()

    def names(self) -> list[str]:
        if self.arguments:
            return list(self.arguments)
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        return [p.name for p in inspect.signature(self.call).parameters.values() if p.kind in named]


def model() -> Any:
    made = kde.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="head")])
    made.compile("sgd", "mse")
    return made


def stock() -> Any:
    made = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    made.compile("sgd", "mse")
    return made


def rows() -> Any:
    return np.ones((4, 2), "float32")


def step(replica: Any, batch: Any) -> Any:
    return {}


def loop() -> Any:
    return kde.TrainLoop(step, parts={}, reduce={})


def hypermodel(hp: Any) -> Any:
    return stock()


def two_replicas() -> Any:
    return kde.pick_strategy("mirrored", num_replicas=2, environ={}).strategy


def tuner(**given: Any) -> Any:
    return kde.tuner.RandomSearch(hypermodel, "loss", project_name="p", **given)


def strategy_of(hp: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return tuner(strategies="one_device", directory=folder).strategy_of(hp)


def measure(**given: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is of little use
        return kde.place(model(), {"head": "CPU:1"}).measure(rows(), rows()[:, :1], **given)


STRATEGY = {"None"}
TUNER = Entry(
    tuner,
    lambda: {"strategies": ["one_device"]},
    {"strategies": {"None"}, "coupled": {"None"}, "screening": {"None"}, "log_dir": {"None", *PATH}},
    {"strategies": "strategies|strategy"},
    runs=False,
    arguments=("strategies", "coupled", "screening", "log_dir"),
)
DATA = {"dataset": "data|dataset"}

PUBLIC: dict[str, Entry] = {
    "EventWriter": Entry(kde.EventWriter, lambda: {"log_dir": "logs"}, {"log_dir": PATH, "flush_seconds": NUMBER}),
    "JsonLinesWriter": Entry(kde.JsonLinesWriter, lambda: {"path": "file"}, {"path": PATH, "flush_seconds": NUMBER}),
    "MemoryWriter": Entry(kde.MemoryWriter),
    "Model": Entry(
        lambda strategy, seed: kde.Model(strategy=strategy, seed=seed),
        lambda: {"strategy": None, "seed": 1},
        {"strategy": STRATEGY, "seed": {"None"}},
    ),
    "Model.compile": Entry(
        lambda **given: model().compile("sgd", "mse", **given),
        accepts={"virtual_replicas": {"None"}, "batch_statistics": {"None"}, "exact": FLAG},
        arguments=("virtual_replicas", "steps_per_execution", "batch_statistics", "exact"),
    ),
    "NonFinite": Entry(kde.NonFinite),
    "ParallelismDoctor": Entry(
        kde.ParallelismDoctor,
        accepts={
            "log_dir": {"None", *PATH},
            "json": {"None", *PATH},
            "interventions": FLAG,
            "show": FLAG,
            "writers": {"empty list"},
            "strategy": STRATEGY,
            "num_steps": {"None"},
        },
    ),
    "Placement.measure": Entry(measure, arguments=("num_steps",)),
    "ReplicaMonitor": Entry(
        kde.ReplicaMonitor,
        lambda: {"log_dir": "logs"},
        {
            "log_dir": PATH,
            "experiment": {"text", "empty text"},
            "writers": {"empty list"},
            "terminal": FLAG,
            "gradient_norm": FLAG,
            "check_divergence_every": {"None"},
            "straggler_threshold": NUMBER,
            "flush_seconds": NUMBER,
        },
    ),
    "ReplicaMonitor.add_findings": Entry(
        kde.ReplicaMonitor("logs").add_findings,
        lambda: {"kind": "diagnosis", "findings": []},
        {"kind": {"text"}, "findings": {"empty list"}},
        runs=False,  # there is no run
    ),
    "ReplicaMonitor.use_subdirectory": Entry(
        lambda name: kde.ReplicaMonitor("logs").use_subdirectory(name), accepts={"name": {"text"}}
    ),
    "RayCluster": Entry(
        kde.RayCluster,
        accepts={
            "address": {"text"},
            "cpus_per_worker": NUMBER,
            "gpus_per_worker": {"zero", *NUMBER},
            "runtime_env": {"None"},
        },
    ),
    "ReplicaSeeds": Entry(kde.ReplicaSeeds, lambda: {"seed": 1}, {"draws": {"None"}, "enable_op_determinism": FLAG}),
    "Resume": Entry(
        kde.Resume, lambda: {"directory": "run"}, {"directory": PATH, "save_every": {"huge"}, "on_preemption": FLAG}
    ),
    "RunCallback": Entry(kde.RunCallback),
    "ScopeGuard": Entry(kde.ScopeGuard, accepts={"strategy": STRATEGY}),
    "Sequential": Entry(
        lambda strategy, seed: kde.Sequential([], strategy=strategy, seed=seed),
        lambda: {"strategy": None, "seed": 1},
        {"strategy": STRATEGY, "seed": {"None"}},
    ),
    "TerminalWriter": Entry(
        kde.TerminalWriter,
        accepts={"console": {"None"}, "seconds_between_lines": NUMBER, "seconds_between_frames": NUMBER},
    ),
    "TrainLoop": Entry(
        kde.TrainLoop,
        lambda: {"step": step, "parts": {}, "reduce": {}},
        {
            "test": {"None"},
            "predict": {"None"},
            "run_eagerly": FLAG,
            "check": FLAG,
            "exact": FLAG,
            "name": {"text"},
            "strategy": STRATEGY,
            "seed": {"None"},
        },
    ),
    "TrainLoop.kept": Entry(lambda kind: loop().kept(kind)),
    "TrainLoop.rows": Entry(lambda kind: loop().rows(kind)),
    "VirtualReplicas": Entry(kde.VirtualReplicas, lambda: {"count": 2}),
    "adopt": Entry(
        kde.adopt,
        lambda: {"model": stock(), "strategy": two_replicas()},
        {"strategy": STRATEGY, "compile": FLAG},
    ),
    "audit": Entry(
        kde.audit,
        lambda: {"dataset": rows()},
        {
            "dataset": {"an array"},
            "strategy": STRATEGY,
            "ids": {"None"},
            "expected": {"None", "empty list", "an array"},
            "stock_policy": {"None"},
            "batch_size": {"None"},
            "max_steps": {"None"},
        },
        {**DATA, "stock_policy": "AutoShardPolicy"},
    ),
    "bucket_by_length": Entry(
        kde.bucket_by_length,
        lambda: {"dataset": np.ones((4, 6), "i"), "batch_size": 2, "tokens": 60},
        {
            "boundaries": {"empty list"},
            "strategy": STRATEGY,
            "batch_size": {"None"},
            "tokens": {"None"},
            "length": {"None"},
            "pool": {"None"},
            "max_padding": NUMBER,
            "padding_value": {"negative", "True"},
            "sequences": {"None"},
            "seed": {"None"},
        },
        {"dataset": "data|dataset|leaf"},
    ),
    "certify": Entry(
        kde.certify,
        lambda: {"build_model": stock, "strategy": two_replicas(), "data": (rows(), rows()[:, :1])},
        {"allow": {"text", "empty list"}, "seeds": {"None"}},
        runs=False,
    ),
    "check_scope": Entry(kde.check_scope, lambda: {"model": model(), "strategy": None}, {"strategy": STRATEGY}),
    "clone_model": Entry(kde.clone_model, lambda: {"model": model()}, {"strategy": STRATEGY}),
    "describe_seeds": Entry(kde.describe_seeds),
    "diagnose": Entry(
        kde.diagnose,
        lambda: {"model": model(), "data": rows(), "y": rows()[:, :1]},
        {"data": {"None"}, "y": {"None"}, "interventions": FLAG, "strategy": STRATEGY, "callbacks": {"empty list"}},
        {"data": "data|x"},
        runs=False,
    ),
    "distribute": Entry(
        kde.distribute,
        lambda: {"dataset": rows()},
        {
            "dataset": {"an array"},
            "strategy": STRATEGY,
            "batch_size": {"None"},
            "per_replica_batch_size": {"None"},
            "seed": {"None"},
            "shuffle": {"None", *FLAG},
        },
        DATA,
    ),
    "every": Entry(kde.every, lambda: {"num_steps": 2, "action": print}),
    "gather": Entry(
        kde.gather, lambda: {"values": tf.ones((2, 2))}, {"values": {"None", "empty list"}, "strategy": STRATEGY}
    ),
    "heartbeat": Entry(kde.heartbeat),
    "inspect": Entry(
        kde.inspect,
        lambda: {"dataset": rows(), "num_batches": 1, "seconds": 0.1},
        {"dataset": {"an array"}, "strategy": STRATEGY, "seconds": NUMBER, "batch_size": {"None"}},
        DATA,
    ),
    "launch": Entry(
        kde.launch,
        lambda: {"num_workers": 1, "work": ["true"], "environ": {"PATH": "/bin:/usr/bin"}},
        {
            "args": {"empty list"},
            "kwargs": {"None"},
            "timeout": {"None", *NUMBER},
            "time_limit": {"None", *NUMBER},
            "grace_seconds": NUMBER,
            "pause_seconds": NUMBER,
            "threads_per_worker": {"None"},
            "affinity": FLAG,
            "environ": {"None"},
            "log_dir": {"None", *PATH},
            "on": {"None"},
            "quiet": FLAG,
            "stream": {"None"},
        },
        runs=False,
    ),
    "load_model": Entry(
        kde.load_model,
        lambda: {"path": "none.keras"},
        {"strategy": STRATEGY, "custom_objects": {"None"}, "compile": FLAG, "safe_mode": FLAG},
        {"path": "path|filepath"},  # Keras' word
        runs=False,
    ),
    "local_copy": Entry(kde.local_copy, lambda: {"model": stock()}),
    "on_improvement": Entry(kde.on_improvement, lambda: {"name": "loss", "action": print}, {"name": {"text"}}),
    "on_preemption": Entry(kde.on_preemption),
    "per_replica": Entry(kde.per_replica, lambda: {"function": print}, {"strategy": STRATEGY}),
    "pick_strategy": Entry(
        kde.pick_strategy,
        lambda: {"name": "mirrored", "num_replicas": 2, "environ": {}},
        {
            "devices": {"None"},
            "num_replicas": {"None"},
            "cluster_resolver": {"None"},
            "tpu": {"None"},
            "timeout_seconds": {"None"},
            "wait_seconds": NUMBER,
        },
        {"name": "name|strategy", "timeout_seconds": "timeout_seconds"},
    ),
    "place": Entry(kde.place, lambda: {"model": model(), "parts": {"head": "CPU:0"}}, called={"parts": "parts?"}),
    "plan": Entry(
        kde.plan,
        lambda: {"model": model(), "data": rows(), "y": rows()[:, :1]},
        {"y": {"None"}, "network": {"None"}, "callbacks": {"empty list"}},
        {"data": "data|x"},
        runs=False,
    ),
    "replay": Entry(kde.replay, lambda: {"path": "file", "writer": kde.MemoryWriter()}, {"path": PATH}, runs=False),
    "seed_replicas": Entry(kde.seed_replicas, lambda: {"model": model(), "seed": 1}),
    "tuner.BayesianOptimization": TUNER,
    "tuner.Coupled": Entry(
        kde.tuner.Coupled,
        lambda: {"batch_size_per_replica": 8, "learning_rate_scaling": "linear"},
        {
            "reference_batch_size": {"None"},
            "gradient_accumulation_steps": {"None"},
            "steps_per_execution": {"None"},
            "warmup_steps": {"None"},
        },
    ),
    "tuner.GridSearch": TUNER,
    "tuner.Hyperband": TUNER,
    "tuner.RandomSearch": TUNER,
    "tuner.Screening": Entry(kde.tuner.Screening, accepts={"seconds": NUMBER, "tolerance": NUMBER}),
    "tuner.StrategySearch": TUNER,
    "tuner.StrategySearch.strategy_of": Entry(strategy_of),
    "tuner.cost": Entry(
        kde.tuner.cost,
        lambda: {"quality": "val_loss", "seconds": 1.0},
        {"seconds": {"huge", *NUMBER}, "direction": {"None"}},
        {"quality": "quality|'x'"},
    ),
    "tuner.examples_per_second": Entry(kde.tuner.examples_per_second),
    "tuner.launch_search": Entry(
        kde.tuner.launch_search,
        lambda: {"work": ["true"], "environ": {"PATH": "/bin:/usr/bin"}},
        {
            "gpus_per_trial": {"None"},
            "args": {"empty list"},
            "kwargs": {"None"},
            "timeout": {"None", *NUMBER},
            "time_limit": {"None", *NUMBER},
            "grace_seconds": NUMBER,
            "environ": {"None"},
            "on": {"None"},
            "log_dir": {"None", *PATH},
            "quiet": FLAG,
            "stream": {"None"},
        },
        runs=False,
    ),
    "tuner.seconds_to": Entry(
        kde.tuner.seconds_to,
        lambda: {"metric": "val_loss", "value": 1.0},
        {"value": {"negative", "half", "huge"}, "direction": {"None"}},
        {"metric": "metric|'x'"},
    ),
    "tuner.with_strategies": Entry(kde.tuner.with_strategies, called={"cls": "keras_tuner.Tuner"}),
}

# What the package makes, and users read.
MADE = {"Certificate", "Placement", "Replica", "StrategyChoice", "tuner.SearchRun", "tuner.StrategyReport"}
# What the package calls; and what is called in a step, where TensorFlow looks at shapes and types.
OWN = {
    "EventWriter.write_plan",
    "Model.add_recorder",
    "Model.drop_recorder",
    "Model.guard_steps",
    "NonFinite.set_state",
    "Placement.virtual",
    "Replica.mean_loss",
    "Replica.reduce_gradients",
    "Replica.sum",
    "VirtualReplicas.check",
    "VirtualReplicas.noted_in",
    "VirtualReplicas.num_turns",
    "VirtualReplicas.of",
    "VirtualReplicas.read_from",
    "VirtualReplicas.read_from_file",
    "gather_rows",
    "reduce_gradients",
    "row_indices",
    "tuner.Coupled.declare",
    "tuner.Coupled.values",
}


def public() -> Iterator[tuple[str, Any]]:
    """All public names but errors, and the public methods of classes that Keras' and ours do not call by themselves."""
    names = [(name, getattr(kde, name)) for name in kde.__all__ if name != "tuner"]
    names += [(f"tuner.{name}", getattr(kde.tuner, name)) for name in kde.tuner.__all__]
    for name, thing in names:
        if not (inspect.isclass(thing) and issubclass(thing, Exception)):
            yield name, thing
        for method, function in vars(thing).items() if inspect.isclass(thing) else ():
            bases = (keras.Model, keras.callbacks.Callback, kde.RunCallback, keras_tuner.Tuner, Writer)
            is_hook = any(hasattr(base, method) for base in bases if issubclass(thing, base))
            if method.startswith("_") or is_hook or not callable(getattr(thing, method)):
                continue
            if len(inspect.signature(getattr(thing, method)).parameters) > 1 or isinstance(function, staticmethod):
                yield f"{name}.{method}", getattr(thing, method)


def test_every_public_name_has_an_entry() -> None:
    names = {name for name, _ in public()}
    assert names - PUBLIC.keys() - MADE - OWN == set()


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_a_bad_value_of_an_argument_is_an_error_that_names_it_before_anything_happens(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    entry = PUBLIC[name]
    found = [
        f"{argument}={kind}: {what}"
        for argument in entry.names()
        for kind, value in BAD.items()
        if (what := outcome(entry, argument, kind, value))
    ]
    assert "\n".join(found) == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", sorted(name for name in PUBLIC if "strategy" in PUBLIC[name].names()))
def test_the_class_of_a_strategy_is_refused_with_what_to_give(name: str) -> None:
    entry = PUBLIC[name]
    match = r"strategy must be a tf\.distribute\.Strategy, got .*; make one of this class: `MirroredStrategy\(\.\.\.\)`"
    with pytest.raises(kde.KerasDistError, match=match):
        entry.call(**{**entry.valid(), "strategy": tf.distribute.MirroredStrategy})


def outcome(entry: Entry, argument: str, kind: str, value: Any) -> str:
    """Say what is wrong with what comes of a call."""
    is_valid = kind in entry.accepts.get(argument, ())
    if is_valid and not entry.runs:
        return ""
    try:
        entry.call(**{**entry.valid(), argument: value})
    except ERRORS as error:
        if is_valid:
            return f"is valid, but {error!r}"
        is_named = re.search(rf"(?<!\w)({entry.called.get(argument, argument)})(?!\w)", str(error)) is not None
        return "" if is_named else f"is not named by {error!r}"
    except Exception as error:
        return f"ends with {error!r}"
    return "" if is_valid else "is accepted"
