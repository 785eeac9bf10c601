"""Couple batch size, learning rate and accumulation to the number of replicas of a trial's strategy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tensorflow as tf

from keras_dist_ext import arguments
from keras_dist_ext._keras import keras
from keras_dist_ext._keras.keras_tuner import keras_tuner
from keras_dist_ext._keras.optimizers import inner_optimizer
from keras_dist_ext.aliases import Config, FitArgument, JsonValue
from keras_dist_ext.errors import TunerError
from keras_dist_ext.tuner.failures import Failure, InfeasibleError

__all__ = ["Coupled", "CoupledValues", "ScaledLearningRate", "batch_data", "check_fixed_batch", "apply_coupled"]

_RULES = ("none", "linear", "sqrt")
_BATCH, _RULE, _WARM_UP = "batch_size_per_replica", "learning_rate_scaling", "warmup_steps"
_ACCUMULATION, _STEPS = "gradient_accumulation_steps", "steps_per_execution"


@dataclass(frozen=True)
class Coupled:
    """Hyperparameters that belong to the strategy of a trial; each has one value for all trials, or a list to search.

        kde.tuner.Coupled(batch_size_per_replica=[32, 64], learning_rate_scaling="linear", warmup_steps=100)

    They are hyperparameters under the names below, which a `build(hp)` may read.

    Args:
        batch_size_per_replica: examples of a replica in a step. The tuner batches the data: give `search` arrays, or a
            `tf.data.Dataset` of single examples; the global batch is this times the number of replicas.
        learning_rate_scaling: ``"linear"`` multiplies the learning rate that the model was compiled with by the ratio
            of an update's examples to `reference_batch_size`, ``"sqrt"`` by the square root of the ratio, ``"none"``
            leaves it. An update has the examples of the global batch, times `gradient_accumulation_steps`.
        reference_batch_size: the batch size that the learning rate in `build` was chosen for; by default the first
            `batch_size_per_replica`, on one replica.
        warmup_steps: updates over which the learning rate grows linearly from the one in `build` to the scaled one
            (https://arxiv.org/abs/1706.02677, 2.2). A trial that Hyperband continues has no warm-up.
        gradient_accumulation_steps: batches in an update; 1 = no accumulation.
        steps_per_execution: of the compiled model; by default as many as fit into about a tenth of a second.

    Raises:
        TunerError: a value is invalid, or the learning rate is to be scaled and there is no batch size to scale by.
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
                raise TunerError(f"{name} is empty: give an integer, or a list of integers to search.")
            for value in _several(getattr(self, name)):
                arguments.integer(name, value, least=least, most=arguments.MOST_EXAMPLES, error=TunerError)
        if not _several(self.learning_rate_scaling):
            raise TunerError(f"learning_rate_scaling is empty; give one of {', '.join(_RULES)}.")
        for rule in _several(self.learning_rate_scaling):
            if not isinstance(rule, str) or rule not in _RULES:
                shown = arguments.shown(rule)
                raise TunerError(f"learning_rate_scaling must be one of {', '.join(_RULES)}, got {shown}.")
        scales = any(rule != "none" for rule in _several(self.learning_rate_scaling))
        if scales and self.batch_size_per_replica is None:
            raise TunerError(
                "learning_rate_scaling depends on the global batch size, which the tuner knows only if it makes the "
                "batches. Give batch_size_per_replica, too."
            )
        reference, most = self.reference_batch_size, arguments.MOST_EXAMPLES
        arguments.optional(arguments.integer, "reference_batch_size", reference, least=1, most=most, error=TunerError)
        if reference is not None and not scales:
            raise TunerError(
                f"reference_batch_size is {reference}, and needs learning_rate_scaling 'linear' or 'sqrt'. Give it, or "
                "leave this out."
            )
        if any(_several(self.warmup_steps)) and not scales:
            raise TunerError("warmup_steps grows the learning rate to the scaled one. Give learning_rate_scaling, too.")

    def declare(self, hp: keras_tuner.HyperParameters) -> None:
        """Add those that were given to `hp`, the hyperparameters of a trial."""
        for name in (_BATCH, _RULE, _WARM_UP, _ACCUMULATION, _STEPS):
            values = self._given(name)
            if name in hp or not values:
                continue
            if len(values) == 1:
                hp.Fixed(name, values[0])
            else:
                hp.Choice(name, values)

    def _given(self, name: str) -> list[JsonValue]:
        """Return the values that were given; none where they are the default."""
        values = _several(getattr(self, name))
        return [] if values in ([0], ["none"]) else values

    def values(self, hp: keras_tuner.HyperParameters, num_replicas: int) -> CoupledValues:
        """Return the coupled values of a trial.

        Args:
            hp: the trial's.
            num_replicas: of the trial's strategy, over all workers.
        """

        def read(name: str, default: JsonValue) -> JsonValue:
            # Without the first condition, it would be a hyperparameter of the user's with the same name.
            return hp.get(name) if self._given(name) and name in hp else default

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


def _several(given: object) -> list[JsonValue]:
    if given is None:
        return []
    return list(given) if isinstance(given, Sequence) and not isinstance(given, str | bytes) else [given]


@dataclass(frozen=True)
class CoupledValues:
    """What is coupled to the strategy of one trial."""

    global_batch_size: int | None = None  # examples; None: not set by the tuner
    learning_rate_factor: float = 1.0
    warmup_steps: int = 0  # updates
    accumulation: int = 1  # batches in an update
    steps_per_execution: int | None = None  # None: as compiled


def apply_coupled(model: keras.Model, values: CoupledValues) -> None:
    """Set the coupled values on a model that is compiled, and has not been trained.

    Raises:
        TunerError: the model has no optimizer on which they can be set.
        InfeasibleError: the model takes batches of a size that its replicas do not get.
    """
    check_fixed_batch(model, values.global_batch_size)
    if values.steps_per_execution is not None:
        model.steps_per_execution = values.steps_per_execution
        model.replica_runtime.chooses_num_steps = False
    if values.learning_rate_factor == 1.0 and values.accumulation == 1:
        return
    optimizer = inner_optimizer(getattr(model, "optimizer", None))
    if optimizer is None:
        raise TunerError(
            f"'{model.name}' is not compiled, so it has no learning rate to scale. Compile it in build, or give the "
            "tuner an optimizer."
        )
    if values.accumulation > 1:
        if optimizer.built or optimizer.gradient_accumulation_steps:
            raise TunerError(
                f"The optimizer of '{model.name}' already accumulates gradients, or was used: the tuner cannot set "
                "gradient_accumulation_steps. Create it in build, without gradient_accumulation_steps."
            )
        optimizer.gradient_accumulation_steps = values.accumulation
    if values.learning_rate_factor != 1.0:
        _scale_learning_rate(model, optimizer, values)


def _scale_learning_rate(model: keras.Model, optimizer: keras.optimizers.Optimizer, values: CoupledValues) -> None:
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
        factor: of the learning rate.
        warmup_steps: over which it grows.
    """

    def __init__(
        self,
        base: float | keras.optimizers.schedules.LearningRateSchedule | Config,
        factor: float,
        warmup_steps: int = 0,
    ) -> None:
        self.base = base if isinstance(base, float) else _schedule(base)
        self.factor = factor
        self.warmup_steps = warmup_steps

    def __call__(self, step: object) -> tf.Tensor:
        """Return the learning rate at a step."""
        base = self.base(step) if callable(self.base) else tf.constant(self.base, tf.float32)
        if not self.warmup_steps:
            return base * self.factor
        share = tf.minimum(tf.cast(step, tf.float32) / self.warmup_steps, 1.0)
        return base * (1.0 + (self.factor - 1.0) * share)

    def get_config(self) -> Config:
        """Return the arguments."""
        base = keras.optimizers.schedules.serialize(self.base) if callable(self.base) else self.base
        return {"base": base, "factor": self.factor, "warmup_steps": self.warmup_steps}


def _schedule(base: object) -> float | keras.optimizers.schedules.LearningRateSchedule:
    return keras.optimizers.schedules.deserialize(base) if isinstance(base, dict) else base


def check_fixed_batch(model: keras.Model, global_batch: int | None) -> None:
    """Refuse a model whose inputs have a fixed batch size, where a replica gets another number of examples."""
    if global_batch is None or not getattr(model, "built", False):
        return
    num_replicas = model.distribute_strategy.num_replicas_in_sync
    for tensor in keras.tree.flatten(getattr(model, "inputs", None) or []):
        batch_size = tensor.shape[0] if tensor.shape else None
        if batch_size is not None and batch_size * num_replicas != global_batch:
            raise InfeasibleError(
                Failure(
                    "indivisible batch",
                    f"an input of '{model.name}' takes batches of {batch_size} examples, and each of {num_replicas} "
                    f"replicas gets {global_batch / num_replicas:g} of {global_batch}",
                )
            )


def batch_data(
    arguments: Sequence[FitArgument],
    named: Mapping[str, FitArgument],
    global_batch: int,
    model: keras.Model | None = None,
) -> tuple[list[FitArgument], dict[str, FitArgument]]:
    """Return the arguments of `fit` with data in batches of a given size.

    Args:
        arguments: as given to `search`, by position: x, y, batch_size and so on.
        named: likewise, by name.
        global_batch: examples in a batch.
        model: whose inputs, if it has any yet, show whether elements of a dataset are examples or batches.

    Raises:
        TunerError: the tuner cannot batch the data, or a batch size was given.
    """
    given, named = list(arguments), dict(named)
    if len(given) > 2 or named.get("batch_size") is not None:
        raise TunerError(
            "search was given a batch_size, and batch_size_per_replica is coupled to the strategy. Give one of them."
        )
    x = given[0] if given else named.get("x")
    if isinstance(x, tf.data.Dataset):
        x = _batch_dataset(x, global_batch, "x", model)
        if given:
            given[0] = x
        else:
            named["x"] = x
    else:
        _check_arrays(x, "x")
        named["batch_size"] = global_batch
    validation = named.get("validation_data")
    if isinstance(validation, tf.data.Dataset):
        named["validation_data"] = _batch_dataset(validation, global_batch, "validation_data", model)
    elif validation is not None:
        _check_arrays(validation, "validation_data")
        if named.get("validation_batch_size") is None:
            named["validation_batch_size"] = global_batch
    return given, named


def _batch_dataset(dataset: tf.data.Dataset, batch_size: int, name: str, model: keras.Model | None) -> tf.data.Dataset:
    shapes = [spec.shape for spec in keras.tree.flatten(dataset.element_spec)]
    if all(shape.rank and shape[0] is None for shape in shapes) or _are_batches(dataset.element_spec, model):
        raise TunerError(
            f"{name} gives batches ({', '.join(map(str, shapes))}), which batch_size_per_replica has the tuner make. "
            "Give a dataset of single examples: without .batch(...), or with .unbatch()."
        )
    return dataset.batch(batch_size).prefetch(tf.data.AUTOTUNE)


def _are_batches(spec: object, model: keras.Model | None) -> bool:
    """Whether elements have the shapes of a model's inputs: batches of a fixed size, by `drop_remainder=True`."""
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


def _check_arrays(data: object, name: str) -> None:
    leaves = keras.tree.flatten(data)
    if data is None or any(not hasattr(leaf, "shape") for leaf in leaves if leaf is not None):
        raise TunerError(
            f"{name} is a {type(data).__name__}, which the tuner cannot batch; with batch_size_per_replica give "
            "arrays, or a tf.data.Dataset of single examples."
        )
