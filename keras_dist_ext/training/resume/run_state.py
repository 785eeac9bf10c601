"""Capture the state that a model's training depends on, and restore it: variables, seeds, the host's random numbers.

A variable is identified by its role and its index there, because Keras' names depend on the models that were built
before. Most have equal copies on all replicas. Metrics, and gradients in the middle of an accumulation, have a local
term on each, and are saved per replica: summing them would round otherwise than the uninterrupted run. On another
number of replicas the first one gets the sum.

Letters: R = replicas in sync, over all workers; L = replicas of this worker; W = workers.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.layers import flat_layers
from keras_dist_ext._keras.optimizers import accumulated_gradients, optimized_variables
from keras_dist_ext._keras.strategies import first_replica
from keras_dist_ext._keras.variables import components, is_sync_on_read
from keras_dist_ext.aliases import Array, JsonObject
from keras_dist_ext.errors import ResumeError
from keras_dist_ext.messages import counted
from keras_dist_ext.strategy.scope import optimizers, raw_variables
from keras_dist_ext.strategy.workers import Workers
from keras_dist_ext.training.model import Model
from keras_dist_ext.training.resume.contents import numpy_state, python_state

__all__ = ["Snapshot", "restore", "capture", "peek_random"]

_LISTED = 5  # differences that a message names before it counts the rest


class Snapshot(NamedTuple):
    """The state of a run at one moment."""

    metadata: JsonObject  # values that JSON can represent
    values: dict[str, Array | tf.Tensor]  # tensors are immutable, so they can be copied later
    stops: bool  # whether a worker has asked to end training


class _Variable(NamedTuple):
    role: str
    path: str
    variable: tf.Variable | keras.Variable


def capture(model: Model, workers: Workers | None) -> Snapshot:
    """Capture the state that training depends on. All workers participate; the chief gets the state of all.

    It takes about as long as reading each variable: a value is copied later, when it is used, or when a step assigns a
    new one.
    """
    metadata: JsonObject = {"optimizers": _optimizers(model), "variables": [], "per_replica": []}
    values: dict[str, Array] = {}
    per_replica: dict[str, list[Array]] = {}
    for name, (_, path, variable) in _variables(model).items():
        copies = components(variable)
        metadata["variables"].append([name, path, copies[0].dtype.name, copies[0].shape.as_list()])
        if _is_per_replica(model, name, variable):
            per_replica[name] = [copy.read_value().numpy() for copy in copies]
        else:
            values[name] = copies[0].read_value()
    local = {name: np.stack(copies) for name, copies in per_replica.items()}
    local.update({f"host/{name}": value[None] for name, value in _host_state().items()})
    local["stops"] = np.array([[float(model.replica_runtime.stops["train"].is_requested)]])
    for name, array in (local if workers is None else _gather(workers, local)).items():
        values[name] = array
    stops = bool(values.pop("stops").any())
    metadata["per_replica"] = list(per_replica)
    metadata["accumulators_are_split"] = bool(model.replica_runtime.accumulators_are_split)
    metadata["seeds"] = model.replica_seeds.state()
    return Snapshot(metadata, values, stops)


def _variables(model: Model) -> dict[str, _Variable]:
    """All variables of a model, its optimizers and metrics, by role and index; seeds have their own state."""
    found: dict[str, _Variable] = {}
    counts: dict[str, int] = {}
    seen = {id(generator.state) for generator in model.replica_seeds.generators(with_global=True)}
    for role, path, variable in _listed(model):
        if id(variable) not in seen and components(variable)[0].dtype != tf.string:
            seen.add(id(variable))
            number = counts.get(role, 0)
            counts[role] = number + 1
            found[f"{role}/{number}"] = _Variable(role, path, variable)
    return found


def _listed(model: Model) -> Iterator[_Variable]:
    for variable in model.weights:
        yield _Variable("weight", variable.path, variable)
    for layer in flat_layers(model):
        for name, variable in raw_variables(layer):
            yield _Variable("tf.Variable", f"{layer.path or layer.name}/{name}", variable)
    for name, optimizer in _held_optimizers(model):
        for variable in optimizer.variables:
            yield _Variable(f"of {name}", getattr(variable, "path", variable.name), variable)
    for variable in model.metrics_variables:
        yield _Variable("metric", variable.path, variable)


def _is_per_replica(model: Model, name: str, variable: tf.Variable | keras.Variable) -> bool:
    """Whether each replica has a local term: a variable that is summed when read, or gradients being accumulated."""
    if is_sync_on_read(variable):
        return len(components(variable)) > 1 or model.distribute_strategy.num_replicas_in_sync > 1
    if not model.replica_runtime.accumulators_are_split or not name.startswith("of "):
        return False
    accumulated = (gradient for _, optimizer in optimizers(model) for gradient in accumulated_gradients(optimizer))
    return any(gradient is variable for gradient in accumulated)


def _held_optimizers(model: Model) -> Iterator[tuple[str, keras.optimizers.Optimizer]]:
    """The optimizers of a model, and those of its submodels."""
    seen: set[int] = set()
    for number, layer in enumerate(flat_layers(model)):
        for name, optimizer in optimizers(layer):
            if id(optimizer) not in seen:
                seen.add(id(optimizer))
                yield name if layer is model else f"{name} of layer {number}", optimizer


def _optimizers(model: Model) -> dict[str, JsonObject]:
    """The class of each optimizer that is built, and the indices of the weights that it was built for."""
    indices = {id(weight): number for number, weight in enumerate(model.weights)}
    found: dict[str, JsonObject] = {}
    for name, optimizer in _held_optimizers(model):
        if optimizer.built:
            of = [indices.get(id(variable), -1) for variable in optimized_variables(optimizer)]
            found[name] = {"class": type(optimizer).__name__, "of": of}
    return found


def _host_state() -> dict[str, Array]:
    """The states of Python's and NumPy's generators, which differ between workers."""
    version, words, gauss = random.getstate()
    return {
        "python": np.array([version, gauss is not None, gauss or 0.0, *words], np.float64),
        "numpy": _numpy_state(),
    }


def _numpy_state() -> Array:
    """What `contents.numpy_state` reads: nothing of a generator that `numpy.random.set_bit_generator` has put there."""
    now = np.random.get_state(legacy=False)
    if now["bit_generator"] != "MT19937":
        return np.zeros(4 + 624)
    state = now["state"]
    return np.array([True, state["pos"], now["has_gauss"], now["gauss"], *state["key"]], np.float64)


def _gather(workers: Workers, local: Mapping[str, Array]) -> dict[str, Array]:
    """Concatenate the arrays of all workers along the first axis, in one collective; exact for up to 53 bits."""
    sizes = [array.size for array in local.values()]
    local_flat = np.concatenate([np.asarray(array, np.float64).ravel() for array in local.values()])
    gathered_flat = np.zeros([workers.num_workers, sum(sizes)])
    gathered_flat[workers.index] = local_flat
    gathered_flat = workers.sum(gathered_flat.ravel()).reshape(gathered_flat.shape)
    gathered: dict[str, Array] = {}
    for (name, array), flat in zip(local.items(), np.split(gathered_flat, np.cumsum(sizes)[:-1], axis=1), strict=True):
        gathered[name] = flat.reshape(-1, *array.shape[1:]).astype(array.dtype)
    return gathered


# Restoring


def restore(
    model: Model,
    metadata: JsonObject,
    arrays: Mapping[str, Array],
    workers: Workers | None,
    fingerprint: Mapping[str, str],
) -> None:
    """Restore a captured state on this worker's replicas.

    Args:
        model: to be restored.
        metadata: of the state, with the fingerprint of its model.
        arrays: of the state.
        workers: if there are several.
        fingerprint: of this model.

    Raises:
        ResumeError: the state is of another model, optimizer or seed; says what differs. Nothing was changed then.
    """
    _build_optimizers(model, metadata["optimizers"])
    variables = _variables(model)
    _check_same(model, metadata, variables, fingerprint)
    for name, (_, _, variable) in variables.items():
        _assign(model, variable, arrays[name], is_per_replica=name in metadata["per_replica"])
    num_replicas = model.distribute_strategy.num_replicas_in_sync
    has_all_replicas = all(len(arrays[name]) == num_replicas for name in metadata["per_replica"])
    model.replica_runtime.accumulators_are_split = bool(metadata["accumulators_are_split"]) and has_all_replicas
    model.replica_seeds.load(metadata["seeds"])
    num_workers, index = (1, 0) if workers is None else (workers.num_workers, workers.index)
    if len(arrays["host/python"]) == num_workers:
        random.setstate(python_state(arrays["host/python"][index].tolist()))
        state = numpy_state(arrays["host/numpy"][index].tolist())
        if state is not None:
            np.random.set_state(state)


def _build_optimizers(model: Model, saved: Mapping[str, JsonObject]) -> None:
    """Build optimizers that are otherwise built in their first step: the user's own beside that of `compile`."""
    weights = model.weights
    for name, optimizer in _held_optimizers(model):
        of = saved.get(name, {}).get("of", ())
        is_here = all(0 <= number < len(weights) for number in of)
        if of and not optimizer.built and type(optimizer).__name__ == saved[name]["class"] and is_here:
            with model.replica_runtime.in_scope():
                optimizer.build([weights[number] for number in of])


def _check_same(
    model: Model, metadata: JsonObject, variables: Mapping[str, _Variable], fingerprint: Mapping[str, str]
) -> None:
    saved = {name: (path, f"{dtype} {tuple(shape)}") for name, path, dtype, shape in metadata["variables"]}
    now: dict[str, tuple[str, str]] = {}
    for name, (_, path, variable) in variables.items():
        copy = components(variable)[0]
        now[name] = (path, f"{copy.dtype.name} {tuple(copy.shape.as_list())}")
    differences: list[str] = []
    for name, given in metadata["optimizers"].items():
        found = _optimizers(model).get(name, {}).get("class", "none")
        if found != given["class"]:
            differences.append(f"{name} is {found}, was {given['class']}")
    for name in {**now, **saved}:
        here, there = now.get(name), saved.get(name)
        if here is None and there is not None:
            differences.append(f"{name} ({there[0]}, {there[1]}) is missing")
        elif there is None and here is not None:
            differences.append(f"{name} ({here[0]}, {here[1]}) is new")
        elif here is not None and there is not None and here[1] != there[1]:
            differences.append(f"{name} ({here[0]}) is {here[1]}, was {there[1]}")
    seeds = (
        metadata["seeds"].get("run", [-1])[0],
        (model.replica_seeds.root if model.replica_seeds.root is not None else -1),
    )
    if seeds[0] != seeds[1]:
        differences.append("the seed is {1}, was {0}".format(*("none" if seed < 0 else seed for seed in seeds)))
    saved_fingerprint = metadata.get("fingerprint", {})
    differences += [
        f"{name} is {fingerprint[name]}, was {was}"
        for name, was in saved_fingerprint.items()
        if name in fingerprint and fingerprint[name] != was
    ]
    if differences:
        more = f"; and {counted(len(differences) - _LISTED, 'other')}" if len(differences) > _LISTED else ""
        raise ResumeError(
            f"The checkpoint is not of this run of '{model.name}': {'; '.join(differences[:_LISTED])}{more}. "
            "Build and compile the model as it was, or give Resume another directory."
        )


def _assign(model: Model, variable: tf.Variable | keras.Variable, value: Array, *, is_per_replica: bool) -> None:
    copies = components(variable)
    first = first_replica(model.distribute_strategy)
    if is_per_replica and len(value) == model.distribute_strategy.num_replicas_in_sync:
        values = list(value[first : first + len(copies)])
    else:
        is_summed = _is_summed(variable)
        if is_per_replica:
            value = value.sum(axis=0, dtype=value.dtype) if is_summed else value[0]
        is_for_first = is_sync_on_read(variable) and is_summed
        values = [np.zeros_like(value) if is_for_first and first + i else value for i in range(len(copies))]
    for copy, part in zip(copies, values, strict=True):
        copy.assign(tf.constant(part, copy.dtype))


def _is_summed(variable: tf.Variable | keras.Variable) -> bool:
    """Whether a variable's local terms are summed when it is read, as for Keras' metrics."""
    value = variable.value if isinstance(variable, keras.Variable) else variable
    aggregation = getattr(value, "aggregation", tf.VariableAggregation.SUM)
    return not is_sync_on_read(variable) or aggregation == tf.VariableAggregation.SUM


def peek_random() -> int:
    """Draw from Python's generator without advancing it: the same after ``keras.utils.set_random_seed``."""
    state = random.getstate()
    try:
        return random.randrange(2**31)
    finally:
        random.setstate(state)
