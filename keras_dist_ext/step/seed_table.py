"""Show which stream each random generator of a model draws from, on each replica."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

from keras_dist_ext.hashing import MODULUS, replica_offset
from keras_dist_ext.step.distributed_model import DistributedModel
from keras_dist_ext.step.generator import Generator
from keras_dist_ext.step.seeds import seeds_of
from keras_dist_ext.strategy.virtual import num_replicas_of

if TYPE_CHECKING:
    from rich.table import Column, Table
    from rich.text import Text

__all__ = ["SeedRow", "SeedTable", "describe_seeds"]


@dataclasses.dataclass(frozen=True)
class SeedRow:
    """One generator on one replica.

    Attributes:
        generator: the path of the layer, and the generator's name.
        replica: its number over all workers.
        root: the replica's root seed, ``seed + replica``; None if the generator has its own seed.
        stream: the key of the first draw, two numbers below 2**31 - 2; of ``tf.random.Generator``, the key before
            TensorFlow folds the replica into it, and the replica.
        counter: how many draws were made.
    """

    generator: str
    replica: int
    root: int | None
    stream: tuple[int, int]
    counter: int


@dataclasses.dataclass(frozen=True)
class SeedTable:
    """The streams of a model, as values and as a table."""

    rows: tuple[SeedRow, ...]

    def __iter__(self) -> Iterator[SeedRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __rich__(self) -> Table:
        from rich.table import Table

        table = Table("generator", *(_right(name) for name in ("replica", "root", "stream", "counter")))
        for row in self.rows:
            root = "its own" if row.root is None else str(row.root)
            table.add_row(_plain(row.generator), str(row.replica), root, "{} {}".format(*row.stream), str(row.counter))
        return table


def describe_seeds(model: DistributedModel) -> SeedTable:
    """Print and return the streams of a model's random generators.

    Args:
        model: a model of ours, built.

    Returns:
        A row for each generator and replica of all workers.

    Raises:
        SeedError: the model is not one of ours.
    """
    from rich.console import Console

    seeds = seeds_of(model)
    num_real = model.distribute_strategy.num_replicas_in_sync  # a generator of TensorFlow's knows no virtual ones
    rows = [
        _row(generator, replica, seeds.root, 0 if seeds.draws == "global" else replica)
        for generator in seeds.generators()
        for replica in range(num_replicas_of(model) if generator.is_keras else num_real)
    ]
    table = SeedTable(tuple(rows))
    Console().print(table)
    return table


def _row(generator: Generator, replica: int, seed: int | None, own: int) -> SeedRow:
    state = [int(n) for n in generator.read()]
    drawn = None if seed is None else generator.num_draws(seed)
    root = None if seed is None or drawn is None else seed + own
    if not generator.is_keras:
        return SeedRow(generator.label, replica, root, (state[-1], replica), state[0])
    drawn = state[1] if drawn is None else drawn
    first, second = (int(n) for n in replica_offset(own))
    stream = ((state[0] + first) % MODULUS, (state[1] - drawn + second) % MODULUS)
    return SeedRow(generator.label, replica, root, stream, drawn)


def _right(name: str) -> Column:
    from rich.table import Column

    return Column(name, justify="right")


def _plain(text: str) -> Text:
    from rich.text import Text

    return Text(text, overflow="fold")
