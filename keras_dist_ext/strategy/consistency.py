"""Check that all workers are about to do the same, and say what differs; else they would deadlock.

What a worker is about to do is written as a fingerprint: names, each with a text or a list of texts. Workers exchange
them without a collective, so that one that does something else, or does not come at all, is an error on all others.
"""

from __future__ import annotations

import json
import platform
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import tensorflow as tf

from keras_dist_ext import __version__
from keras_dist_ext._keras import keras, tree
from keras_dist_ext._keras.layers import flat_layers
from keras_dist_ext._keras.models import compile_arguments
from keras_dist_ext._keras.optimizers import num_batches_used
from keras_dist_ext.errors import WorkersError
from keras_dist_ext.messages import counted, warn
from keras_dist_ext.strategy.adapted import adapted_fingerprint
from keras_dist_ext.strategy.key_value import KeyValueStore
from keras_dist_ext.strategy.scope import optimizers
from keras_dist_ext.strategy.virtual import num_replicas_of

__all__ = [
    "Fingerprint",
    "differences",
    "exchange_fingerprints",
    "data_fingerprint",
    "model_fingerprint",
    "run_fingerprint",
]

Fingerprint = Mapping[str, str | list[str]]


class HasRunConfig(Protocol):
    """A callback that says what must be alike on all workers, as ``kde.RunCallback`` does."""

    def get_run_config(self) -> Mapping[str, object]:
        """Return its settings."""


_NOTICE_SECONDS = 30.0
_AT_ONCE_SECONDS = 1.0  # that TensorFlow waits: Python hears of Ctrl-C after that
_LISTED = 5  # differences that a message names before it counts the rest


# What a run depends on


def run_fingerprint(
    model: keras.Model, arguments: Mapping[str, object], callbacks: Sequence[HasRunConfig]
) -> Fingerprint:
    """Describe a run of training, as far as it must be alike on all workers.

    Names that Keras has made up are left out: they count on from models that were made before.

    Args:
        model: of ours.
        arguments: of ``fit``.
        callbacks: those of type ``RunCallback`` that all workers must have.
    """
    fingerprint: dict[str, str | list[str]] = {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "TensorFlow": tf.__version__,
        "Keras": keras.__version__,
        "keras_dist_ext": __version__,
        "strategy": f"{type(model.distribute_strategy).__name__} of "
        f"{counted(model.distribute_strategy.num_replicas_in_sync, 'replica')}",
        "replicas": str(num_replicas_of(model)),
        "class of the model": type(model).__name__,
        "layer": [_layer(layer) for layer in flat_layers(model)],
        "weight": [_weight(weight) for weight in model.weights],
        **adapted_fingerprint(model),
        "loss": _compiled(model, "loss"),
        "metrics": _compiled(model, "metrics"),
        "weighted_metrics": _compiled(model, "weighted_metrics"),
        "metric": [_metric(metric) for metric in model.metrics],  # in the order in which their state is added up
        "jit_compile": str(model.jit_compile),
        "run_eagerly": str(model.run_eagerly),
        "steps_per_execution": "auto" if model.replica_runtime.chooses_num_steps else str(model.steps_per_execution),
        "global seed": str(model.replica_seeds.wanted),
        "check": str(model.replica_runtime.check),
        "batch_statistics": model.replica_runtime.batch_statistics,
        "exact": str(model.replica_runtime.exact),
        "gradient_compression": str(getattr(model.replica_runtime.compression, "kind", None)),
    }
    for name, optimizer in optimizers(model):
        fingerprint[name] = type(optimizer).__name__
        fingerprint.update({f"{key} of {name}": value for key, value in _config(optimizer).items()})
    fingerprint.update({name: _plain(arguments.get(name)) for name in _ARGUMENTS})
    fingerprint["validation_data"] = "none" if arguments.get("validation_data") is None else "given"
    fingerprint["callback of all workers"] = [_callback(callback) for callback in callbacks]
    return fingerprint


def model_fingerprint(model: keras.Model) -> dict[str, str]:
    """Describe what a model computes, as far as it must be alike in a run that is resumed.

    Not a learning rate that may have changed since: that of an optimizer which was used.
    """
    layers = [_layer(layer) for layer in flat_layers(model)]
    fingerprint = {"loss": _compiled(model, "loss"), "layers": str(len(layers))}
    fingerprint.update({f"layer {number}": text for number, text in enumerate(layers, 1)})
    for name, optimizer in optimizers(model):
        changing = _RATES if optimizer.built and num_batches_used(optimizer) else ()
        kept = {key: value for key, value in _config(optimizer).items() if key not in changing}
        fingerprint.update({f"{key} of {name}": value for key, value in kept.items()})
    return fingerprint


_RATES = ("learning_rate", "inner_optimizer")  # the config of a LossScaleOptimizer holds that of another one


def _compiled(model: keras.Model, name: str) -> str:
    return _name_of(compile_arguments(model).get(name) if model.compiled else None)


def _metric(metric: keras.Metric) -> str:
    """Name a metric without the number that Keras counts on from models that were made before."""
    return f"{type(metric).__name__} {re.sub(r'_[0-9]+$', '', metric.name)}"


_ARGUMENTS = (
    "epochs",
    "initial_epoch",
    "steps_per_epoch",
    "batch_size",
    "shuffle",
    "class_weight",
    "validation_split",
    "validation_freq",
    "validation_steps",
    "validation_batch_size",
)


def _callback(callback: HasRunConfig) -> str:
    """Name a callback with what must be equal on all workers."""
    return f"{type(callback).__name__}({', '.join(map(str, callback.get_run_config().values()))})"


def data_fingerprint(spec: object, num_batches: int | None, *, own_rows: bool) -> Fingerprint:
    """Describe the data of a run, as far as it must be alike on all workers.

    Args:
        spec: of a batch, with any number of examples.
        num_batches: of a pass, or None.
        own_rows: whether each worker reads its own examples, of which it may have any number.
    """
    leaves = tree.flatten_with_path(spec)
    return {
        "part of a batch": [f"{'/'.join(map(str, path)) or 'x'}: {_shape_of(leaf)}" for path, leaf in leaves],
        "number of batches": "any" if own_rows else "unknown" if num_batches is None else str(num_batches),
    }


def _layer(layer: keras.Layer | keras.losses.Loss) -> str:
    """Name a layer or a loss with the numbers in its config: before it is built, these tell a layer's weights."""
    kind = type(layer).__name__
    if isinstance(layer, keras.Model):
        return kind
    numbers = {
        name: value
        for name, value in _config(layer).items()
        if re.fullmatch(r"\w+" if name == "activation" else _NUMBER, value)
    }
    return f"{kind}({', '.join(f'{name}={value}' for name, value in numbers.items() if 'seed' not in name)})"


_NUMBER = r"-?\d+(\.\d+)?(e-?\d+)?|True|False"


def _weight(variable: keras.Variable) -> str:
    kind = "" if variable.trainable else ", not trained"
    return f"{variable.dtype} {tuple(variable.shape)}{kind}{_NAMED}{variable.path}"


_NAMED = ", named "


def _shape_of(spec: object) -> str:
    if spec is None:
        return "none"
    shape = getattr(spec, "shape", None)
    return f"{getattr(getattr(spec, 'dtype', None), 'name', type(spec).__name__)} {shape}"


def _name_of(thing: object) -> str:
    """Name a loss, or several, without what differs between processes."""
    if isinstance(thing, str) or thing is None:
        return str(thing)
    if isinstance(thing, dict):
        return ", ".join(f"{key}: {_name_of(value)}" for key, value in thing.items())
    if isinstance(thing, list | tuple):
        return ", ".join(map(_name_of, thing))
    if isinstance(thing, keras.losses.Loss):
        return _layer(thing)
    return str(getattr(thing, "__name__", type(thing).__name__))


def _config(thing: keras.Layer | keras.optimizers.Optimizer | keras.losses.Loss) -> dict[str, str]:
    try:
        config = thing.get_config()
    except Exception:  # the user's own class
        return {}
    return {name: _plain(value) for name, value in config.items() if name != "name"}


def _plain(value: object) -> str:
    """Write a value of a config as text that is alike in all processes."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, dict):
        kept = {str(key): _plain(item) for key, item in value.items() if key not in ("name", "build_config")}
        return json.dumps(kept, sort_keys=True)
    if isinstance(value, list | tuple):
        return json.dumps([_plain(item) for item in value])
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value) if isinstance(value, str | int | bool | None) else type(value).__name__


# Comparing them


def exchange_fingerprints(
    store: KeyValueStore,
    topic: str,
    fingerprint: Fingerprint,
    *,
    what: str,
    wait_seconds: float,
    clock: Callable[[], float],
    look: Callable[[], None] = lambda: None,
) -> list[Fingerprint]:
    """Publish what this worker is about to do, and return the fingerprints of all workers, in their order.

    Args:
        store: of the workers.
        topic: under which each says it.
        fingerprint: of this worker.
        what: they are about to do, such as "call fit".
        wait_seconds: for all of them.
        clock: seconds that only go forward.
        look: called now and then while it waits; may raise.

    Raises:
        WorkersError: one has not published its own in time.
    """
    store.set(topic, json.dumps(fingerprint))
    begin = clock()
    fingerprints: dict[int, Fingerprint] = {store.index: fingerprint}
    is_noticed = False
    while len(fingerprints) < store.num_workers:
        look()
        for worker in store.others:
            if worker in fingerprints:
                continue
            left = wait_seconds - (clock() - begin)
            text = store.get(topic, worker, max(0.01, min(_AT_ONCE_SECONDS, left)))
            if text is not None:
                fingerprints[worker] = json.loads(text)
        missing = [worker for worker in store.others if worker not in fingerprints]
        waited = clock() - begin
        if missing and waited >= wait_seconds:
            raise WorkersError(
                f"Worker {store.index} is about to {what}, and {_named(missing)} did not arrive within "
                f"{wait_seconds:g} s: a worker runs another program, has not loaded its data yet, or waits for the "
                "others somewhere else. Start the same program on all workers. Where one needs longer, give "
                "pick_strategy(wait_seconds=...)."
            )
        if missing and waited >= _NOTICE_SECONDS and not is_noticed:
            is_noticed = True
            warn(
                f"Worker {store.index} is about to {what} and waits for {_named(missing)}, for {waited:.0f} s so "
                f"far. It gives up after {wait_seconds:g} s."
            )
    return [fingerprints[worker] for worker in range(store.num_workers)]


def check_consistency(
    store: KeyValueStore,
    topic: str,
    fingerprint: Fingerprint,
    *,
    what: str,
    wait_seconds: float,
    clock: Callable[[], float] = time.monotonic,
    look: Callable[[], None] = lambda: None,
) -> None:
    """Check that all workers are about to do the same; see ``exchange_fingerprints``.

    Raises:
        WorkersError: they are not, or one has not published its own in time; the same on all workers.
    """
    fingerprints = exchange_fingerprints(
        store, topic, fingerprint, what=what, wait_seconds=wait_seconds, clock=clock, look=look
    )
    found = differences(fingerprints)
    if found:
        more = f"; and {counted(len(found) - _LISTED, 'other difference')}" if len(found) > _LISTED else ""
        raise WorkersError(
            f"The workers are about to {what}, and disagree, so that they would deadlock, or "
            f"train different models: {'; '.join(found[:_LISTED])}{more}. Start the same program with the same "
            "arguments, packages and data on all workers."
        )


def differences(fingerprints: Sequence[Fingerprint]) -> list[str]:
    """Say in what workers differ from the first one, a text for each fact that does.

    Entries that not all of them have, such as an option of another optimizer, count where nothing else differs.
    """
    found: dict[bool, list[str]] = {True: [], False: []}
    for name in {name: None for fingerprint in fingerprints for name in fingerprint}:
        values = [fingerprint.get(name, "none") for fingerprint in fingerprints]
        others = [worker for worker, value in enumerate(values) if _bare(value) != _bare(values[0])]
        if others:
            is_known = all(name in fingerprint for fingerprint in fingerprints)
            found[is_known].append(_difference(name, values[0], values[others[0]], others))
    return found[True] or found[False]


def _bare(value: str | list[str]) -> str | list[str]:
    """Without the paths of variables: Keras' names count on from models that were made before."""
    return value if isinstance(value, str) else [item.partition(_NAMED)[0] for item in value]


def _difference(name: str, first: str | list[str], other: str | list[str], workers: Sequence[int]) -> str:
    where = f"worker {workers[0]}" + (f" ({counted(len(workers) - 1, 'other')} too)" if len(workers) > 1 else "")
    if isinstance(first, str) or isinstance(other, str):
        return f"{name} is {other} on {where}, and {first} on worker 0"
    pairs = zip([*first, *["none"] * len(other)], [*other, *["none"] * len(first)], strict=False)
    place, (mine, theirs) = next((i, pair) for i, pair in enumerate(pairs) if _bare([pair[0]]) != _bare([pair[1]]))
    counts = f" (of {len(other)} and {len(first)})" if len(first) != len(other) else ""
    return f"{name} {place + 1}{counts} is {theirs} on {where}, and {mine} on worker 0"


def _named(workers: Sequence[int]) -> str:
    return f"worker{'' if len(workers) == 1 else 's'} {', '.join(map(str, workers))}"
