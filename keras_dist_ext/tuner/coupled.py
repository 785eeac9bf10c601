"""Couple batch size, learning rate and accumulation to the number of replicas of a trial's strategy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from keras_dist_ext._keras import keras
from keras_dist_ext.errors import TunerError
from keras_dist_ext.tuner.failures import Failure, Infeasible

__all__ = ["Coupled", "CoupledValues", "ScaledLearningRate", "batched", "check_fixed_batch", "couple"]

_RULES = ("none", "linear", "sqrt")
_BATCH, _RULE, _WARM_UP = "batch_size_per_replica", "learning_rate_scaling", "warmup_steps"
_ACCUMULATION, _STEPS = "gradient_accumulation_steps", "steps_per_execution"


@dataclass(frozen=True)
class Coupled:
    """Hyperparameters that belong to the strategy of a trial. Of each: one value for all trials, or a list to search.

        kde.tuner.Coupled(batch_size_per_replica=[32, 64], learning_rate_scaling="linear", warmup_steps=100)

    They are hyperparameters under the names below, which a `build(hp)` may read.

    Args:
        batch_size_per_replica: rows a replica takes in a step. The tuner batches the data: give `search` arrays, or a
            `tf.data.Dataset` of single examples; the global batch is this times the number of replicas.
        learning_rate_scaling: ``"linear"`` multiplies the learning rate that the model was compiled with by how many
            times `reference_batch_size` an update is made of, ``"sqrt"`` by the square root of it, ``"none"`` leaves
            it. An update is made of the global batch, times the batches whose gradients are accumulated.
        reference_batch_size: what the learning rate in `build` was chosen for; by default the first
            `batch_size_per_replica`, on one replica.
        warmup_steps: updates in which the learning rate goes from the one in `build` to the scaled one, in a line
            (https://arxiv.org/abs/1706.02677, 2.2). A trial that Hyperband continues is warm.
        gradient_accumulation_steps: batches that make an update; 1 is none.
        steps_per_execution: of the compiled model; by default as many as fit into about a tenth of a second.

    Raises:
        TunerError: a value is none that it can be, or scaling has no batch size to go by.
    """

    batch_size_per_replica: int | Sequence[int] | None = None
    learning_rate_scaling: str | Sequence[str] = "none"
    reference_batch_size: int | None = None
    warmup_steps: int | Sequence[int] = 0
    gradient_accumulation_steps: int | Sequence[int] | None = None
    steps_per_execution: int | Sequence[int] | None = None

    def __post_init__(self) -> None:
        """Check each value."""
        for name, least in ((_BATCH, 1), (_WARM_UP, 0), (_ACCUMULATION, 1), (_STEPS, 1)):
            if getattr(self, name) is not None and not _several(getattr(self, name)):
                raise TunerError(f"{name} is empty: give a whole number, or a list of those to search.")
            for value in _several(getattr(self, name)):
                if type(value) is not int or value < least:
                    raise TunerError(f"{name} has the value {value!r}; give whole numbers from {least} up.")
        if not _several(self.learning_rate_scaling):
            raise TunerError(f"learning_rate_scaling is empty; there are {', '.join(_RULES)}.")
        for rule in _several(self.learning_rate_scaling):
            if rule not in _RULES:
                raise TunerError(f"learning_rate_scaling is {rule!r}; there are {', '.join(_RULES)}.")
        scales = any(rule != "none" for rule in _several(self.learning_rate_scaling))
        if scales and self.batch_size_per_replica is None:
            raise TunerError(
                "learning_rate_scaling goes by the global batch, which the tuner knows only if it makes the batches. "
                "Give batch_size_per_replica, too."
            )
        if self.reference_batch_size is not None and (
            type(self.reference_batch_size) is not int or self.reference_batch_size < 1 or not scales
        ):
            raise TunerError(
                f"reference_batch_size is {self.reference_batch_size!r}; it is a number of rows, for "
                "learning_rate_scaling 'linear' or 'sqrt'."
            )
        if any(_several(self.warmup_steps)) and not scales:
            raise TunerError(
                "warmup_steps leads from the learning rate in build to the scaled one. Give learning_rate_scaling, too."
            )

    def declare(self, hp: Any) -> None:
        """Add the hyperparameters to ``hp``, a `keras_tuner.HyperParameters`."""
        for name in (_BATCH, _RULE, _WARM_UP, _ACCUMULATION, _STEPS):
            values = self._given(name)
            if name in hp or not values:
                continue
            if len(values) == 1:
                hp.Fixed(name, values[0])
            else:
                hp.Choice(name, values)

    def _given(self, name: str) -> list[Any]:
        """Return what was given; nothing where it is what goes without saying."""
        values = _several(getattr(self, name))
        return [] if values in ([0], ["none"]) else values

    def values(self, hp: Any, num_replicas: int) -> CoupledValues:
        """Return what the hyperparameters of a trial come to.

        Args:
            hp: the trial's.
            num_replicas: of the trial's strategy, over all workers.
        """

        def read(name: str, default: Any) -> Any:
            return hp.get(name) if self._given(name) and name in hp else default  # else one of the user's own

        per_replica = read(_BATCH, None)
        accumulation = read(_ACCUMULATION, 1)
        global_batch = None if per_replica is None else per_replica * num_replicas
        factor = 1.0
        if global_batch is not None:
            ratio = (
                global_batch * accumulation / (self.reference_batch_size or _several(self.batch_size_per_replica)[0])
            )
            factor = {"none": 1.0, "linear": ratio, "sqrt": ratio**0.5}[read(_RULE, "none")]
        is_continued = bool(hp.values.get("tuner/initial_epoch", 0))
        return CoupledValues(
            global_batch_size=global_batch,
            learning_rate_factor=factor,
            warmup_steps=0 if is_continued else read(_WARM_UP, 0),
            accumulation=accumulation,
            steps_per_execution=read(_STEPS, None),
        )


def _several(given: Any) -> list[Any]:
    if given is None:
        return []
    return list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]


@dataclass(frozen=True)
class CoupledValues:
    """What the coupled hyperparameters of one trial come to."""

    global_batch_size: int | None = None  # None: not the tuner's to set
    learning_rate_factor: float = 1.0
    warmup_steps: int = 0  # updates
    accumulation: int = 1  # batches that make an update
    steps_per_execution: int | None = None  # None: as compiled


def couple(model: Any, values: CoupledValues) -> None:
    """Set what was coupled on a model of ours that is compiled, and has not been trained.

    Raises:
        TunerError: the model has no optimizer of which that can be set.
        Infeasible: the model takes batches of a size that its replicas do not get.
    """
    check_fixed_batch(model, values.global_batch_size)
    if values.steps_per_execution is not None:
        model.steps_per_execution = values.steps_per_execution
        model.replica_runtime.chooses_num_steps = False
    if values.learning_rate_factor == 1.0 and values.accumulation == 1:
        return
    optimizer = getattr(model, "optimizer", None)
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    if optimizer is None:
        raise TunerError(
            f"'{model.name}' is not compiled, so it has no learning rate to scale. Compile it in build, or give the "
            "tuner an optimizer."
        )
    if values.accumulation > 1:
        if optimizer.built or optimizer.gradient_accumulation_steps:
            raise TunerError(
                f"The optimizer of '{model.name}' accumulates gradients already, or was used: the tuner cannot set "
                "gradient_accumulation_steps. Make it in build, without."
            )
        optimizer.gradient_accumulation_steps = values.accumulation
    if values.learning_rate_factor != 1.0:
        _scale_learning_rate(model, optimizer, values)


def _scale_learning_rate(model: Any, optimizer: Any, values: CoupledValues) -> None:
    base = optimizer.get_config()["learning_rate"]
    schedule = base
    if not isinstance(base, float):
        schedule = keras.optimizers.schedules.deserialize(base)
        if not isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
            raise TunerError(
                f"The learning rate of '{model.name}' is a function, which cannot be scaled. Give a number or a "
                "LearningRateSchedule."
            )
    if isinstance(schedule, float) and not values.warmup_steps:
        optimizer.learning_rate = schedule * values.learning_rate_factor
    else:
        # Keras counts batches where gradients accumulate.
        warm_up = values.warmup_steps * values.accumulation
        optimizer.learning_rate = ScaledLearningRate(schedule, values.learning_rate_factor, warm_up)


@keras.saving.register_keras_serializable(package="keras_dist_ext")
class ScaledLearningRate(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]
    """A learning rate times a factor, which grows from 1 to its value in the first steps.

    Args:
        base: a number, or a schedule.
        factor: see above.
        warmup_steps: in which it grows.
    """

    def __init__(self, base: Any, factor: float, warmup_steps: int = 0) -> None:
        self.base = base if isinstance(base, float) else _schedule(base)
        self.factor = factor
        self.warmup_steps = warmup_steps

    def __call__(self, step: Any) -> Any:
        """Return the learning rate at a step."""
        base = self.base(step) if callable(self.base) else tf.constant(self.base, tf.float32)
        if not self.warmup_steps:
            return base * self.factor
        share = tf.minimum(tf.cast(step, tf.float32) / self.warmup_steps, 1.0)
        return base * (1.0 + (self.factor - 1.0) * share)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments."""
        base = keras.optimizers.schedules.serialize(self.base) if callable(self.base) else self.base
        return {"base": base, "factor": self.factor, "warmup_steps": self.warmup_steps}


def _schedule(base: Any) -> Any:
    return keras.optimizers.schedules.deserialize(base) if isinstance(base, dict) else base


def check_fixed_batch(model: Any, global_batch: int | None) -> None:
    """Refuse a model whose inputs say how many rows a batch has, where a replica gets another number."""
    if global_batch is None or not getattr(model, "built", False):
        return
    num_replicas = model.distribute_strategy.num_replicas_in_sync
    for tensor in keras.tree.flatten(getattr(model, "inputs", None) or []):
        rows = tensor.shape[0] if tensor.shape else None
        if rows is not None and rows * num_replicas != global_batch:
            raise Infeasible(
                Failure(
                    "indivisible batch",
                    f"an input of '{model.name}' takes batches of {rows} rows, and each of {num_replicas} replicas "
                    f"gets {global_batch / num_replicas:g} of {global_batch}",
                )
            )


def batched(
    arguments: Sequence[Any], named: dict[str, Any], global_batch: int, model: Any = None
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of `fit` with data in batches of so many rows.

    Args:
        arguments: as given to `search`, by position: x, y, batch_size and so on.
        named: likewise, by name.
        global_batch: rows of a batch.
        model: whose inputs tell an example from a batch, if it has any yet.

    Raises:
        TunerError: the data cannot be batched by the tuner, or a batch size was given.
    """
    given, named = list(arguments), dict(named)
    if len(given) > 2 or named.get("batch_size") is not None:
        raise TunerError(
            "search was given a batch_size, and batch_size_per_replica is coupled to the strategy. Give one of them."
        )
    x = given[0] if given else named.get("x")
    if isinstance(x, tf.data.Dataset):
        x = _batched(x, global_batch, "x", model)
        if given:
            given[0] = x
        else:
            named["x"] = x
    else:
        _check_arrays(x, "x")
        named["batch_size"] = global_batch
    validation = named.get("validation_data")
    if isinstance(validation, tf.data.Dataset):
        named["validation_data"] = _batched(validation, global_batch, "validation_data", model)
    elif validation is not None:
        _check_arrays(validation, "validation_data")
        if named.get("validation_batch_size") is None:
            named["validation_batch_size"] = global_batch
    return given, named


def _batched(dataset: tf.data.Dataset, rows: int, name: str, model: Any) -> tf.data.Dataset:
    shapes = [spec.shape for spec in keras.tree.flatten(dataset.element_spec)]
    if all(shape.rank and shape[0] is None for shape in shapes) or _are_batches(dataset.element_spec, model):
        raise TunerError(
            f"{name} gives batches ({', '.join(map(str, shapes))}), which batch_size_per_replica has the tuner make. "
            "Give a dataset of single examples: without .batch(...), or with .unbatch()."
        )
    return dataset.batch(rows).prefetch(tf.data.AUTOTUNE)


def _are_batches(spec: Any, model: Any) -> bool:
    """Whether elements are as a model's inputs are: batches of a fixed size, of `.batch(32, drop_remainder=True)`."""
    inputs = keras.tree.flatten(getattr(model, "inputs", None) or [])
    given = keras.tree.flatten(spec[0] if isinstance(spec, tuple) else spec)
    return (
        bool(inputs)
        and len(inputs) == len(given)
        and all(
            one.shape.rank == len(other.shape) and one.shape[1:].is_compatible_with(other.shape[1:])
            for one, other in zip(given, inputs, strict=True)
        )
    )


def _check_arrays(data: Any, name: str) -> None:
    leaves = keras.tree.flatten(data)
    if data is None or any(not hasattr(leaf, "shape") for leaf in leaves if leaf is not None):
        raise TunerError(
            f"{name} is a {type(data).__name__}, whose batches the tuner cannot make; batch_size_per_replica takes "
            "arrays, or a tf.data.Dataset of single examples."
        )
