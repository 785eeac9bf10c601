"""The number of replicas that a run is defined for, whatever devices run them.

Virtual replicas as such are known from VirtualFlow (https://arxiv.org/abs/2009.09523), and an order of sums that does
not depend on the devices from EasyScale (https://arxiv.org/abs/2208.14228). ``step.virtual_replicas`` runs them.

Letters: V = virtual replicas, P = real ones, both over all workers.
"""

from __future__ import annotations

import dataclasses
import json
import os
import zipfile
from typing import IO, Literal, Protocol

import tensorflow as tf

from keras_dist_ext import arguments
from keras_dist_ext.aliases import Config
from keras_dist_ext.errors import StrategyError

__all__ = ["VirtualReplicas", "num_replicas_of"]

MOST_VIRTUAL = 65536  # a step is traced once for each that a device carries
_NOTE = "keras_dist_ext.virtual_replicas"


@dataclasses.dataclass(frozen=True)
class VirtualReplicas:
    """For how many replicas a run is defined, whatever devices carry them.

    ``model.compile(..., virtual_replicas=8)`` trains on 1, 2, 4 or 8 devices as on 8: each virtual replica has its rows
    of the global batch, its random streams and its batch statistics, and a device makes the steps of V / P of them, one
    after the other. It is saved with the model, so that a run resumes elsewhere.

    What it covers: training, and evaluation, whose metrics are equal to rounding. State that layers assign becomes the
    mean over all, weighted by rows; integers must not depend on the rows. Of random numbers, those of ``keras.random``
    and Keras' layers; those of ``tf.random`` ops where the model has a global seed. Not covered: a
    ``tf.random.Generator``, state in a ``tf.Variable`` of TensorFlow's own, and the random numbers of ``predict``.
    Steps run without XLA. A step is traced V / P times into one graph, so tracing takes that much longer.

    Bits depend on more than the order of sums: the kind of processor, the number of intra-op threads, oneDNN, XLA and
    op determinism must be alike.

    Args:
        count: V, a multiple of the number of replicas of every strategy that is to carry the run.
        reduction: "ordered" adds up gradients in an order that depends only on V: the weights have the same bits on 1
            or V replicas. On several GPUs or workers it gathers as many gradients as there are replicas, instead of
            reducing them to one. "fast" adds up as TensorFlow does: the weights are equal to float32 rounding.

    Raises:
        StrategyError: ``count`` is not an integer >= 1, or ``reduction`` is neither.
    """

    count: int
    reduction: Literal["ordered", "fast"] = "ordered"

    def __post_init__(self) -> None:
        count = arguments.integer("count", self.count, least=1, most=MOST_VIRTUAL, error=StrategyError)
        if not isinstance(self.reduction, str) or self.reduction not in ("ordered", "fast"):
            raise StrategyError(
                f"VirtualReplicas({count}, reduction={arguments.shown(self.reduction)}): there is no such reduction. "
                'Use "ordered" for the same bits on any number of replicas, or "fast" for the same numbers to rounding.'
            )
        object.__setattr__(self, "count", count)

    @staticmethod
    def of(value: VirtualReplicas | int | None, strategy: tf.distribute.Strategy) -> VirtualReplicas | None:
        """Return what ``compile(virtual_replicas=value)`` means under a strategy; None where nothing is virtual.

        Args:
            value: what `compile` was given.
            strategy: of the model.

        Raises:
            StrategyError: it is not an integer >= 1, or the replicas of the strategy cannot run them.
        """
        if value is None:
            return None
        virtual = (
            value
            if isinstance(value, VirtualReplicas)
            else VirtualReplicas(
                arguments.integer("virtual_replicas", value, least=1, most=MOST_VIRTUAL, error=StrategyError)
            )
        )
        virtual.check(strategy)
        return None if virtual.count == 1 else virtual

    def check(self, strategy: tf.distribute.Strategy) -> None:
        """See that the replicas of a strategy can carry them.

        Args:
            strategy: of the model.

        Raises:
            StrategyError: they cannot.
        """
        kind, num_replicas = type(strategy).__name__, strategy.num_replicas_in_sync
        if isinstance(strategy, tf.distribute.ParameterServerStrategy | tf.distribute.TPUStrategy):
            raise StrategyError(
                f"virtual_replicas={self.count} under {kind}, which cannot run virtual replicas, so the result would "
                "differ from that of others. Compile without virtual_replicas, or under a mirrored strategy."
            )
        if self.count % num_replicas:
            fitting = [str(n) for n in range(1, self.count + 1) if self.count % n == 0]
            raise StrategyError(
                f"virtual_replicas={self.count} cannot be divided evenly among the {num_replicas} replicas of {kind}. "
                f"Use {' or '.join(fitting)} replicas, or a multiple of {num_replicas} as virtual_replicas."
            )

    @property
    def is_ordered(self) -> bool:
        """Whether the order of sums is that of the virtual replicas."""
        return self.reduction == "ordered"

    # Saved among the arguments of `compile`

    def noted_in(self, config: Config) -> Config:
        """Return the compile config ``config`` with a note of it, beside the optimizer, where Keras does not look."""
        optimizer = config.get("optimizer")
        if not isinstance(optimizer, dict):
            return config
        return {**config, "optimizer": {**optimizer, _NOTE: dataclasses.asdict(self)}}

    @staticmethod
    def read_from(config: Config | None) -> VirtualReplicas | None:
        """Return what ``noted_in`` has noted in the compile config ``config``."""
        optimizer = (config or {}).get("optimizer")
        note = optimizer.get(_NOTE) if isinstance(optimizer, dict) else None
        return None if note is None else VirtualReplicas(**note)

    @staticmethod
    def read_from_file(file: str | os.PathLike[str] | IO[bytes]) -> VirtualReplicas | None:
        """Return what a `.keras` file says of its model; legacy files say nothing.

        Args:
            file: a path, or an open file.
        """
        if not zipfile.is_zipfile(file):
            return None
        with zipfile.ZipFile(file) as archive:
            return VirtualReplicas.read_from(json.loads(archive.read("config.json")).get("compile_config"))

    def num_turns(self, strategy: tf.distribute.Strategy) -> int:
        """How many steps each real replica of ``strategy`` makes in turns: V / P; 0 where its own step is enough."""
        turns = self.count // strategy.num_replicas_in_sync
        return 0 if turns == 1 and not self.is_ordered else turns


class RunsOnReplicas(Protocol):
    """A model of ours, as far as its number of replicas goes."""

    @property
    def virtual_replicas(self) -> VirtualReplicas | None:
        """As it was compiled."""

    @property
    def distribute_strategy(self) -> tf.distribute.Strategy:
        """The strategy that it lives under."""


def num_replicas_of(model: RunsOnReplicas) -> int:
    """For how many replicas a model of ours runs: virtual ones, if it was compiled for these."""
    virtual = model.virtual_replicas
    return int(model.distribute_strategy.num_replicas_in_sync) if virtual is None else virtual.count
