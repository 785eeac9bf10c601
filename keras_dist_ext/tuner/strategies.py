"""Name the strategies of a search, declare them as a hyperparameter, and create the one of a trial."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import tensorflow as tf

from keras_dist_ext._keras.keras_tuner import keras_tuner
from keras_dist_ext._keras.strategies import is_default_strategy, uses_collectives
from keras_dist_ext.errors import KerasDistError, StrategyError, TunerError
from keras_dist_ext.messages import close_name
from keras_dist_ext.strategy.decision import NAMES
from keras_dist_ext.strategy.pick import StrategyChoice, pick_strategy
from keras_dist_ext.strategy.scope import describe_strategy

__all__ = ["HYPERPARAMETER", "Strategies", "StrategyEntry"]

HYPERPARAMETER = "distribution_strategy"

StrategyEntry: TypeAlias = str | StrategyChoice | tf.distribute.Strategy | Callable[[], tf.distribute.Strategy | None]


class Strategies:
    """The strategies of a search, by name.

        >>> Strategies.of(["one_device", "mirrored(2)"]).names
        ('one_device', 'mirrored(2)')
        >>> Strategies.of(["miror"])
        Traceback (most recent call last):
        keras_dist_ext.errors.TunerError: There is no strategy 'miror'; did you mean 'mirrored'? There are auto, ...

    A strategy is created when it is first needed, and then kept. A `MirroredStrategy` that reduces by collectives, as
    it does by default, is replaced by an earlier one on the same devices: a second one would reuse its collective keys,
    and fail (tensorflow#62790).
    """

    def __init__(self, entries: Mapping[str, StrategyEntry]) -> None:
        self._entries = dict(entries)
        self._choices: dict[str, StrategyChoice] = {}

    @staticmethod
    def of(given: Sequence[StrategyEntry] | Mapping[str, StrategyEntry] | StrategyEntry) -> Strategies:
        """Return the strategies that a user gives.

        Args:
            given: names as `pick_strategy` takes them, with a number of replicas as in ``"mirrored(2)"``; choices that
                it made; strategies; functions that return one of these. A mapping gives each its own name.

        Raises:
            TunerError: there is none, one is invalid, or two have the same name.
        """
        if isinstance(given, Mapping):
            entries = dict(given)
        else:
            several = given if isinstance(given, Sequence) and not isinstance(given, str) else [given]
            entries = {}
            for entry in several:
                name = _name_of(entry)
                if name in entries:
                    raise TunerError(
                        f"Two strategies are called {name!r}, so a trial could not tell which is its own. Name them: "
                        "strategies={'first': ..., 'second': ...}."
                    )
                entries[name] = entry
        if not entries:
            raise TunerError(f"strategies is empty; give at least one, such as 'auto'. There are {', '.join(NAMES)}.")
        for name, entry in entries.items():
            if not isinstance(name, str):
                raise TunerError(f"strategies has the name {name!r}; names must be strings.")
            _name_of(entry, is_named=True)
        return Strategies(entries)

    @property
    def names(self) -> tuple[str, ...]:
        """The names, in the order given; the first is where a search begins."""
        return tuple(self._entries)

    def declare(self, hp: keras_tuner.HyperParameters) -> str:
        """Add the strategy to hyperparameters that do not have it yet, and return its name."""
        if HYPERPARAMETER not in hp:
            if len(self.names) == 1:
                hp.Fixed(HYPERPARAMETER, self.names[0])
            else:
                hp.Choice(HYPERPARAMETER, list(self.names))
        return str(hp.get(HYPERPARAMETER))

    def create_all(self) -> None:
        """Create those that are available here, now."""
        for name in self.names:
            with contextlib.suppress(StrategyError):
                self.get(name)

    def reserve_devices(self) -> None:
        """Create those whose name has a number of replicas, the largest first, and warn of those that cannot be made.

        On CPUs they need logical devices, whose number TensorFlow fixes when it runs the first operation.
        """
        numbers = {name: _parsed(entry)[1] for name, entry in self._entries.items() if isinstance(entry, str)}
        for name in sorted(numbers, key=lambda name: numbers[name] or 0, reverse=True):
            if numbers[name]:
                try:
                    self.get(name)
                except StrategyError as error:
                    warnings.warn(
                        f"strategies: {name!r} cannot be made here, so each of its trials will fail. {error}",
                        stacklevel=4,
                    )

    def get(self, name: str) -> StrategyChoice:
        """Return a strategy by name, the same object each time.

        Raises:
            StrategyError: it is not available here.
            TunerError: no strategy has this name, or its function did not return one.
        """
        if name not in self._choices:
            if name not in self._entries:
                raise TunerError(
                    f"The trial needs the strategy {name!r}, which this search does not have; it has "
                    f"{', '.join(self.names)}. Give the strategies that the project was started with."
                )
            self._choices[name] = _on_existing_devices(name, _create(name, self._entries[name]))
        return self._choices[name]

    def first_available(self) -> StrategyChoice | None:
        """Return the first strategy that is available here; None where none is."""
        for name in self.names:
            with contextlib.suppress(StrategyError):
                return self.get(name)
        return None


def _name_of(entry: StrategyEntry, *, is_named: bool = False) -> str:
    """Return the name of an entry.

    Raises:
        TunerError: it is invalid, or has no name.
    """
    if isinstance(entry, str):
        base = _parsed(entry)[0]
        if base not in NAMES:
            guess = close_name(base.removesuffix("strategy"), NAMES) or "."
            raise TunerError(f"There is no strategy {entry!r}{guess} There are {', '.join(NAMES)}, and mirrored(2).")
        return entry
    if isinstance(entry, StrategyChoice):
        return f"{entry.name}({entry.strategy.num_replicas_in_sync})" if entry.name == "mirrored" else entry.name
    if isinstance(entry, tf.distribute.Strategy):
        return describe_strategy(entry)
    if not callable(entry):
        raise TunerError(
            f"strategies has {entry!r}, of type {type(entry).__name__}. Give names as pick_strategy takes them, "
            "choices that it made, or functions that return a strategy."
        )
    name = getattr(entry, "__name__", "<none>")
    if name.startswith("<") and not is_named:
        raise TunerError(
            "strategies has a function without a name (a lambda or a partial), so a reloaded project could not tell "
            "which it was. Name it: strategies={'a name': function}."
        )
    return str(name)


def _parsed(name: str) -> tuple[str, int | None]:
    match = re.fullmatch(r"(\w+)\((\d+)\)", name)
    return (match[1], int(match[2])) if match else (name, None)


def _create(name: str, entry: StrategyEntry) -> StrategyChoice | tf.distribute.Strategy:
    if isinstance(entry, str):
        base, num_replicas = _parsed(entry)
        return pick_strategy(base, num_replicas=num_replicas)
    if isinstance(entry, StrategyChoice | tf.distribute.Strategy):
        return entry
    try:
        created = entry()
    except KerasDistError:
        raise
    except (ValueError, RuntimeError, tf.errors.OpError) as error:  # TensorFlow's, where a device is missing
        raise StrategyError(
            f"The strategy {name!r} is not available here: its function raised {type(error).__name__}: {error}"
        ) from error
    if not isinstance(created, StrategyChoice | tf.distribute.Strategy):
        raise TunerError(
            f"The function for the strategy {name!r} returned {created!r}. Let it return a tf.distribute.Strategy, or "
            "what kde.pick_strategy returns."
        )
    return created


def _on_existing_devices(name: str, created: StrategyChoice | tf.distribute.Strategy) -> StrategyChoice:
    """Return the choice, with the one MirroredStrategy of its devices.

    Raises:
        StrategyError: it uses devices that do not exist.
    """
    choice = created if isinstance(created, StrategyChoice) else StrategyChoice(created, name, "given to the search")
    strategy = choice.strategy
    if is_default_strategy(strategy) or type(strategy).__name__ not in ("MirroredStrategy", "OneDeviceStrategy"):
        return choice
    devices = [tf.DeviceSpec.from_string(device) for device in strategy.extended.worker_devices]
    names = [f"{device.device_type}:{device.device_index or 0}" for device in devices]
    existing = {device.name.removeprefix("/device:") for device in tf.config.list_logical_devices()}
    if missing := [device for device in names if device not in existing]:
        raise StrategyError(
            f"The strategy {name!r} uses {', '.join(missing)}, which this process does not have; training there would "
            f"hang. TensorFlow has {', '.join(sorted(existing))}."
        )
    if type(strategy).__name__ == "MirroredStrategy" and uses_collectives(strategy):
        strategy = _MIRRORED.setdefault(frozenset(names), strategy)
    return StrategyChoice(strategy, choice.name, choice.reason)


# The one MirroredStrategy that uses collectives, by its set of devices.
_MIRRORED: dict[frozenset[str], tf.distribute.Strategy] = {}
