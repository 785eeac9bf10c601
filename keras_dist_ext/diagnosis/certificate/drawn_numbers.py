"""What random ops draw while steps are compared: the same numbers for all examples, or those of a run with a seed."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol, TypeAlias

from keras_dist_ext import arguments
from keras_dist_ext._keras import keras
from keras_dist_ext.aliases import Array
from keras_dist_ext.errors import CertificateError
from keras_dist_ext.step.alike_draws import RowsAlike
from keras_dist_ext.step.seeds import seeds_of
from keras_dist_ext.training.callbacks import ReplicaSeeds

__all__ = ["Alike", "AsSeeded", "DrawnNumbers", "checked_seeds", "seeds_of_run"]

Places: TypeAlias = dict[str, Array]


def checked_seeds(seeds: object) -> ReplicaSeeds | None:
    """Return seeds by which one device and replicas draw the same numbers, or None.

    Raises:
        CertificateError: they are others.
    """
    if seeds is None:
        return None
    if not isinstance(seeds, ReplicaSeeds):
        arguments.refuse("seeds", seeds, 'ReplicaSeeds(seed, draws="global") or None', CertificateError)
    if seeds.draws == "replica":
        raise _own_numbers(seeds)
    return seeds


def seeds_of_run(seeds: ReplicaSeeds | None, *, is_exact: bool) -> ReplicaSeeds | None:
    """Return seeds by which the replicas of a model draw what one device draws; None if it does not draw so.

    Args:
        seeds: that were asked for.
        is_exact: whether the model is compiled with ``exact=True``, so that it draws so by any seed.

    Raises:
        CertificateError: by these, each replica draws its own numbers.
    """
    if is_exact:
        return ReplicaSeeds(0) if seeds is None else seeds
    if seeds is not None and seeds.draws != "global":
        raise _own_numbers(seeds)
    return seeds


def _own_numbers(seeds: ReplicaSeeds) -> CertificateError:
    return CertificateError(
        f"With ReplicaSeeds({seeds.seed}) each replica draws its own numbers, and no one device draws them, so "
        f'nothing says what is right. Certify with ReplicaSeeds({seeds.seed}, draws="global"), or without seeds.'
    )


class DrawnNumbers(Protocol):
    """Says what a model draws in a step.

    Attributes:
        depend_on_rows: whether an example that comes at another place in its batch gets other numbers.
    """

    depend_on_rows: bool

    @property
    def unknown(self) -> Collection[str]:
        """Names of ops that draw as they like."""

    def begin(self, model: keras.Model) -> None:
        """Know a model that was built."""

    def at(self, model: keras.Model, step: int) -> None:
        """Have it draw the numbers of a step, counted from 1."""

    def note(self, model: keras.Model, step: int) -> None:
        """Know that it has made the step."""


class Alike(RowsAlike):
    """The same numbers for all examples: random ops are to be sent to it (``_keras.random.intercept_random_ops``)."""

    depend_on_rows = False

    def begin(self, model: keras.Model) -> None:
        """See ``DrawnNumbers``."""

    def at(self, model: keras.Model, step: int) -> None:
        """See ``DrawnNumbers``."""
        self.step.assign(step)

    def note(self, model: keras.Model, step: int) -> None:
        """See ``DrawnNumbers``."""


class AsSeeded:
    """The numbers of a run with ``ReplicaSeeds``; both sides begin a step at the same place in them.

    Args:
        seeds: by which replicas draw what one device draws.
    """

    depend_on_rows = True
    unknown: Collection[str] = ()

    def __init__(self, seeds: ReplicaSeeds) -> None:
        self._seeds = seeds
        self._places: dict[int, Places] = {}

    def begin(self, model: keras.Model) -> None:
        """See ``DrawnNumbers``.

        Raises:
            SeedError: the model is not one of ours, or a layer cannot draw so.
        """
        self._seeds.on_run_prepare(model)
        seeds_of(model).will_begin()
        seeds_of(model).begin()
        self._places.setdefault(1, _places(model))

    def at(self, model: keras.Model, step: int) -> None:
        """See ``DrawnNumbers``."""
        for generator in seeds_of(model).generators(with_global=True):
            generator.write(self._places[step][generator.name])

    def note(self, model: keras.Model, step: int) -> None:
        """See ``DrawnNumbers``."""
        self._places.setdefault(step + 1, _places(model))


def _places(model: keras.Model) -> Places:
    return {generator.name: generator.read() for generator in seeds_of(model).generators(with_global=True)}
