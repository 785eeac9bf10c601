"""Predict what more replicas would give, from a short measured run: ``kde.plan``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from keras_dist_ext import arguments
from keras_dist_ext._keras import keras, tree
from keras_dist_ext._keras.strategies import is_default_strategy
from keras_dist_ext.aliases import FitArgument, FitData
from keras_dist_ext.data.sources import as_dataset, checked_batch_size, kind_of
from keras_dist_ext.diagnosis.plan.assumptions import assumptions_of
from keras_dist_ext.diagnosis.plan.links import Link, SumTimes, read_network
from keras_dist_ext.diagnosis.plan.measure import measure_one_replica
from keras_dist_ext.diagnosis.plan.measurements import Measurements
from keras_dist_ext.diagnosis.plan.plan_report import Plan
from keras_dist_ext.diagnosis.plan.scaling import KINDS, draw_curve
from keras_dist_ext.diagnosis.plan.step_costs import Devices, resampled_costs, step_costs
from keras_dist_ext.diagnosis.plan.sums import time_sums_in_memory
from keras_dist_ext.diagnosis.plan.sums_in_steps import time_sums_in_steps
from keras_dist_ext.diagnosis.plan.what_ifs import what_ifs
from keras_dist_ext.errors import MonitorError
from keras_dist_ext.step.reduce import shares_memory
from keras_dist_ext.strategy.given import checked_strategy
from keras_dist_ext.strategy.scope import describe_strategy
from keras_dist_ext.training.adoption.adopt import adopt
from keras_dist_ext.training.runtime import runtime_of
from keras_dist_ext.training.snapshot import kept_random

__all__ = ["REPLICAS", "checked_network", "checked_replicas", "plan", "predict"]

REPLICAS = (1, 2, 4, 8, 16)
_MOST_REPLICAS, _MOST_NUMBERS = 1_000_000, 64
_NETWORK = "a string such as '10Gb/s, 50us' or 'nvlink', or a strategy of several replicas"


def plan(
    model: keras.Model,
    data: object,
    y: object = None,
    *,
    replicas: Sequence[int] = REPLICAS,
    devices: Devices = "own",
    network: str | tf.distribute.Strategy | None = None,
    num_steps: int = 60,
    callbacks: Sequence[keras.callbacks.Callback] = (),
    **fit_arguments: FitArgument,
) -> Plan:
    """Say what more replicas would give, and leave the model bit for bit as it was.

        print(kde.plan(model, train, replicas=[1, 2, 4, 8], network="10Gb/s, 50us"))

    A copy of the model trains on one device for some steps. Measured are steps with as many examples as replicas would
    have, the update of the weights, Python between steps, the data's pipeline by itself, and sums over replicas, where
    there are some. From that it predicts the step, examples a second, what decides and which number pays: where all
    replicas share a batch of the data, and where each has as many examples. What was not measured is in
    ``assumptions``.

    The data is read as often as needed, so it must be data that can be read again.

    Args:
        model: a compiled model under no strategy, OneDeviceStrategy or MirroredStrategy.
        data: what `fit` takes: a dataset, arrays, a PyDataset.
        y: targets, where ``data`` are arrays.
        replicas: their numbers.
        devices: ``"own"``: each replica has a device like the one here, and cores for itself; ``"shared"``: all are on
            this machine and share its cores, as logical CPU devices do.
        network: what replicas sum gradients over: a bandwidth and a latency, such as ``"10Gb/s, 50us"``; the name of a
            link with documented figures, such as ``"nvlink"``; or a strategy of several replicas, to be measured (of
            several workers, all must call this). By default the model's own strategy, where its replicas do not share
            memory, and the memory of this machine, where they do; else sums are left out, which is said.
        num_steps: to train for, at least.
        callbacks: those of the run, to be timed.
        fit_arguments: others of `fit`, such as ``batch_size``.

    Returns:
        The plan: print it.

    Raises:
        MonitorError: an argument is invalid, or steps cannot be measured.
        DataError: the data is none that `fit` takes, or has no batch.
        ScopeError: the model cannot be rebuilt for one device.
    """
    if not isinstance(model, keras.Model):
        arguments.refuse("model", model, "a compiled Keras model", MonitorError)
    numbers = checked_replicas(replicas)
    devices = _checked_devices(devices)
    link, measured_on = checked_network(network)
    num_steps = arguments.integer("num_steps", num_steps, least=1, error=MonitorError)
    callbacks = arguments.instances(
        "callbacks", callbacks, keras.callbacks.Callback, wanted="callbacks", error=MonitorError
    )
    if y is not None and not all(hasattr(leaf, "shape") for leaf in tree.flatten(y) or [None]):
        arguments.refuse("y", y, "arrays, or None", MonitorError)
    dataset = _as_batches(data, y, fit_arguments)
    _check_model(model)
    with kept_random():  # of which copies take their seeds
        strategy = model.distribute_strategy
        if runtime_of(model) is not None and is_default_strategy(strategy):
            one = model
        else:
            one = adopt(model, tf.distribute.get_strategy())
        measured = measure_one_replica(
            one, dataset, numbers, num_steps=num_steps, callbacks=callbacks, fit_arguments=fit_arguments
        )

        def sums_on(strategy: tf.distribute.Strategy) -> SumTimes:
            return time_sums_in_steps(
                model,
                one,
                strategy,
                dataset,
                batch_size=measured.batch_size,
                gradient_bytes=measured.gradient_bytes,
                num_gradients=measured.num_gradients,
            )

        if link is not None:
            measured = dataclasses.replace(measured, given_link=link)
        elif measured_on is not None:
            measured = dataclasses.replace(measured, sums=sums_on(measured_on))
        elif devices == "shared" and max(numbers) > 1:
            num_replicas = min(8, max(numbers))
            measured = dataclasses.replace(measured, sums=time_sums_in_memory(num_replicas, measured.gradient_bytes))
        elif strategy.num_replicas_in_sync > 1 and not shares_memory(strategy):
            measured = dataclasses.replace(measured, sums=sums_on(strategy))
    return predict(measured, numbers, devices)


def predict(measured: Measurements, replicas: Sequence[int], devices: Devices = "own") -> Plan:
    """Return the plan that measurements give.

    Args:
        measured: of one replica.
        replicas: their numbers, ascending.
        devices: see ``plan``.
    """
    costs, draws = step_costs(measured), resampled_costs(measured)
    curves = tuple(draw_curve(kind, replicas, measured, costs, draws, devices) for kind in KINDS)
    changes = {curve.kind: what_ifs(curve.stops_at or curve.points[-1], measured, costs, devices) for curve in curves}
    return Plan(measured, costs, curves, changes, assumptions_of(measured, costs, curves, devices))


def checked_replicas(replicas: object) -> tuple[int, ...]:
    """Return numbers of replicas, each once, ascending.

    Raises:
        MonitorError: they are something else.
    """
    if not isinstance(replicas, list | tuple | range) or not 0 < len(replicas) <= _MOST_NUMBERS:
        wanted = f"a list of 1 to {_MOST_NUMBERS} numbers of replicas, such as [1, 2, 4]"
        arguments.refuse("replicas", replicas, wanted, MonitorError)
    return tuple(
        sorted(
            {
                arguments.integer("replicas", number, least=1, most=_MOST_REPLICAS, error=MonitorError)
                for number in replicas
            }
        )
    )


def _checked_devices(devices: object) -> Devices:
    return (
        "shared" if arguments.one_of("devices", devices, ("own", "shared"), error=MonitorError) == "shared" else "own"
    )


def checked_network(network: object) -> tuple[Link | None, tf.distribute.Strategy | None]:
    """Return the link that was given, or what it is to be measured on.

    Raises:
        MonitorError: it is neither.
        StrategyError: it looks like a strategy and is none.
    """
    if network is None:
        return None, None
    if isinstance(network, str):
        return read_network(network), None
    if (not hasattr(network, "extended") and not hasattr(network, "strategy")) or isinstance(network, type):
        arguments.refuse("network", network, f"{_NETWORK}, or None", MonitorError)
    strategy: tf.distribute.Strategy = checked_strategy(network, "network")
    if isinstance(strategy, tf.distribute.ParameterServerStrategy) or strategy.num_replicas_in_sync < 2:
        raise MonitorError(
            f"network is {describe_strategy(strategy)}, which sums nothing over replicas. Give one of several replicas "
            "in sync, or a bandwidth and a latency such as '10Gb/s, 50us'."
        )
    return None, strategy


def _check_model(model: keras.Model) -> None:
    """Refuse models of which no copy on one device can be timed here.

    Raises:
        MonitorError: it is one.
    """
    if not getattr(model, "compiled", False):
        raise MonitorError(f"The model '{model.name}' is not compiled, so no step can be made. Compile it.")
    strategy = model.distribute_strategy
    on_one_machine = (tf.distribute.OneDeviceStrategy, tf.distribute.MirroredStrategy)
    if not is_default_strategy(strategy) and not isinstance(strategy, on_one_machine):
        raise MonitorError(
            f"The model '{model.name}' lives under {describe_strategy(strategy)}, and a plan is made from one device: "
            "make the model outside of the scope. Sums over replicas of the strategy are measured by network=strategy."
        )
    if tf.distribute.has_strategy():
        raise MonitorError("kde.plan was called inside of a strategy's scope. Leave the scope before it.")


def _as_batches(data: FitData, y: FitData, fit_arguments: dict[str, FitArgument]) -> tf.data.Dataset:
    """Return the batches that `fit` would read; what made them is taken from its arguments.

    Raises:
        MonitorError: the data can be read once only, or arguments of `fit` do not go with it.
        DataError: it is none that `fit` takes.
    """
    if data is None:
        arguments.refuse("data", data, "what `fit` takes", MonitorError)
    kind = kind_of(data)
    if kind == "generator":
        raise MonitorError(
            "data is a generator, which can be read only once, and a plan reads it several times. Give a "
            "tf.data.Dataset, arrays or a PyDataset."
        )
    weights = fit_arguments.get("sample_weight")
    if kind != "arrays" and (y is not None or weights is not None):
        name = "y" if y is not None else "sample_weight"
        raise MonitorError(f"{name} was given beside data that is no array. Put it into the batches.")
    for name in ("epochs", "initial_epoch", "verbose", "validation_data", "validation_split", "validation_batch_size"):
        if name in fit_arguments:
            raise MonitorError(f"{name} has no place in a plan, which trains for num_steps. Leave it out.")
    batch_size = checked_batch_size(fit_arguments.pop("batch_size", None))
    shuffle = fit_arguments.pop("shuffle", None)
    fit_arguments.pop("sample_weight", None)
    if kind != "arrays":
        return as_dataset(data)
    if y is None and weights is not None:
        raise MonitorError("sample_weight was given without y. Give y, too.")
    whole = data if y is None else (data, y) if weights is None else (data, y, weights)
    return as_dataset(whole, batch_size=batch_size, shuffle=None if shuffle is None else bool(shuffle))
