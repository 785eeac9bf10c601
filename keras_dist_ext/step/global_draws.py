"""Draw a replica's own rows of the random numbers that one device would draw for the global batch, bit for bit.

A counter-based generator (Philox) computes a group of g numbers from each value of its counter. So if a replica's rows
begin with the e-th number, they begin in group e // g: the counter is advanced to it, and the numbers before the rows
are dropped. A truncated normal number may need several tries: TensorFlow reserves 64 values of the counter for each
number (tensorflow/core/kernels/random_op_cpu.h, ``kReservedSamplesPerOutput``).

The number of rows is unknown while a step is traced (``of_any_number``), so a fully known shape has no dimension of
examples; ``drawn_shapes`` decides it for shapes with an unknown size.
Letters: n = rows of a replica, N = rows of the global batch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import tensorflow as tf

from keras_dist_ext._keras import tree
from keras_dist_ext._keras.tracing import in_xla
from keras_dist_ext.aliases import TensorNest
from keras_dist_ext.data.graph_checks import require
from keras_dist_ext.errors import SeedError
from keras_dist_ext.step.all_rows import AllRows
from keras_dist_ext.step.ancestry import decisions, operations
from keras_dist_ext.step.draw_refusals import FIX, HostDraws
from keras_dist_ext.step.drawn_shapes import NotedDraw, UnknownDraws, has_examples, static_shape
from keras_dist_ext.step.reducers import RowRange

__all__ = ["GlobalDraws", "draw_rows", "of_any_number"]

Draw: TypeAlias = Callable[..., tf.Tensor]

_DRAWS = re.compile(
    "(Stateless)?(Random|TruncatedNormal|ParameterizedTruncatedNormal|Multinomial|Shuffle)|StatelessSample|SampleDistorted"
    "|Stateful(Random|Uniform|Standard|Truncated)|Rng|NonDeterministicInts|.*CandidateSampler"
)
_SCOPE = "rows_of_global_draw"
_IN_SCOPE = re.compile(rf"(^|/){_SCOPE}(_\d+)?/")
_OWN = re.compile(rf"(^|/)own_{_SCOPE}(_\d+)?$")


def of_any_number(batch: TensorNest) -> TensorNest:
    """Return a batch whose number of rows is unknown while a graph is traced.

    Raises:
        SeedError: there is no graph.
    """
    if tf.executing_eagerly():
        raise SeedError(
            'draws="global" was asked for a step that runs eagerly, where nothing tells a dimension of examples from '
            "another of the same size. Compile the model with run_eagerly=False. " + FIX
        )
    return tree.map_structure(_of_any_number, batch)


def _of_any_number(leaf: TensorNest) -> TensorNest:
    if not tf.is_tensor(leaf) or not leaf.shape.rank:
        return leaf
    if isinstance(leaf, tf.RaggedTensor | tf.SparseTensor):
        if leaf.shape[0] is None:
            return leaf
        raise SeedError(
            f'draws="global" was asked for batches with a {type(leaf).__name__} of {leaf.shape[0]} rows, which numbers '
            "drawn for it could not be told by. Leave the number of rows open (batch without drop_remainder). " + FIX
        )
    return tf.raw_ops.PlaceholderWithDefault(input=leaf, shape=[None, *leaf.shape[1:]])


class GlobalDraws:
    """What one replica draws in a step.

    Args:
        name: of the model.
        all_rows: knows where the replica's rows are in the global batch.
        noted: what the step drew in the scratch graphs; None if it was not traced in them yet.
        note_own: returns numbers as those that the replica has for itself; all others are the same on all replicas.
    """

    def __init__(
        self,
        name: str,
        all_rows: AllRows,
        noted: Sequence[NotedDraw] | None,
        note_own: Callable[[tf.Tensor], tf.Tensor],
    ) -> None:
        self._name = name
        self._note_own = note_own
        self._rows = all_rows.range  # takes a collective, which a branch or a loop of the graph cannot have
        self._of_one_batch = all_rows.are_of_one_batch
        self._noted = noted
        self._num_draws = 0
        self._host = HostDraws()

    def draw(self, kind: str, given: Mapping[str, TensorNest], draw: Draw) -> tf.Tensor:
        """Draw the replica's own rows, or, without a dimension of examples, the same numbers as all other replicas.

        Args:
            kind: of the numbers, see ``draw_rows``.
            given: the arguments of the op that draws them.
            draw: see ``draw_rows``.

        Raises:
            SeedError: it is not known whether there is a dimension of examples.
            UnknownDraws: the step must be traced in scratch graphs first.
        """
        place, self._num_draws = self._num_draws, self._num_draws + 1
        static = static_shape(given["shape"])
        if in_xla() and not static.is_fully_defined():
            raise SeedError(
                'draws="global" was asked for a step that XLA compiles, which does not draw by rows. Compile the model '
                "with jit_compile=False. " + FIX
            )
        if self._noted is None:
            raise UnknownDraws
        if place >= len(self._noted) or self._noted[place].kind != kind:
            raise self._others()
        if not has_examples(self._noted[place], static, of_one_batch=self._of_one_batch):
            with tf.name_scope(_SCOPE):
                return draw(given["shape"], given["counter"])
        dtype = given["dtype"] if "dtype" in given else tf.convert_to_tensor(given["minval"]).dtype
        own = draw_rows(kind, given["shape"], tf.as_dtype(dtype), given["counter"], draw, self._rows)
        return self._note_own(tf.ensure_shape(own, static))

    def check(self) -> None:
        """Refuse a traced step with random numbers that cannot be drawn row by row.

        Raises:
            SeedError: there are some.
        """
        self._host.refuse(self._name)
        graph = tf.compat.v1.get_default_graph()
        _refuse_other_draws(graph, self._name)
        _refuse_sorted(graph, self._name)
        if self._noted is not None and len(self._noted) != self._num_draws:
            raise self._others()

    def _others(self) -> SeedError:
        self._host.refuse(self._name)
        return SeedError(
            f"draws=\"global\": a step of '{self._name}' draws other random numbers where the number of rows is known "
            "than where it is not, so which of them have a dimension of examples is unknown. " + FIX
        )


def draw_rows(
    kind: str, shape: TensorNest, dtype: tf.DType, counter: tf.Tensor, draw: Draw, rows: RowRange
) -> tf.Tensor:
    """Draw, by a key and a counter, what one device would draw for the replica's rows.

    Args:
        kind: of the numbers: "uniform", "normal", "truncated_normal", "uniform_int" or "uniform_full_int".
        shape: of the result, whose first dimension is that of examples.
        dtype: of the result.
        counter: of the first number of the global batch.
        draw: takes a shape, a counter and a name for the op.
        rows: the replica's rows in the global batch.
    """
    shape = tf.convert_to_tensor(shape)
    per_row = static_shape(shape)[1:].num_elements()
    with tf.control_dependencies([_check_rows(shape, rows)]):
        shape = tf.identity(shape)
    group = 2 if dtype.size == 8 else 4
    values = 64 * group if kind == "truncated_normal" else 1  # of the counter, for a group
    first = tf.cast(rows.first, tf.int64)
    if per_row is not None and per_row % group == 0:  # so each row begins with a group
        with tf.name_scope(_SCOPE):
            return draw(shape, _advanced(counter, first, per_row // group * values), name=None)
    sizes = tf.cast(shape, tf.int64)
    before = first * tf.reduce_prod(sizes[1:])
    count = tf.reduce_prod(sizes)
    counter = _advanced(counter, before // group, values)
    with tf.name_scope(_SCOPE):
        numbers = draw(tf.reshape(count + group, [1]), counter, name=None)
    return tf.reshape(tf.slice(numbers, [before % group], [count]), shape, name=f"own_{_SCOPE}")


def _advanced(counter: tf.Tensor, count: tf.Tensor, values: int) -> tf.Tensor:
    """Move the lower half of a counter on by so many values for each of a count."""
    return counter + tf.cast(count * tf.constant([values, 0], tf.int64), counter.dtype)


def _refuse_other_draws(graph: tf.Graph, name: str) -> None:
    """Refuse random numbers of a step that are neither drawn by rows nor the same on all replicas.

    Args:
        graph: of the traced step.
        name: of the model.

    Raises:
        SeedError: there are some.
    """
    in_branches = {id(op) for op, _ in decisions(graph)}
    for op in operations(graph):
        if not _DRAWS.match(op.type) or op.type.endswith("Grad"):
            continue
        shapes = [output.shape for output in op.outputs]
        if not op.type.startswith("Stateless"):
            why = "keeps its own place in its numbers, so that its rows cannot be drawn by themselves"
        elif id(op) in in_branches:
            why = "is in a loop or a branch of the graph, which replicas may not take alike"
        elif not all(shape.is_fully_defined() for shape in shapes) and not _IN_SCOPE.search(op.name):
            why = f"gives numbers of the shape {shapes[0]}, whose rows cannot be drawn by themselves"
        else:
            continue
        raise SeedError(
            f"draws=\"global\": a step of '{name}' draws by {op.type} ({op.name}), which {why}. Use "
            "keras.random.uniform, normal, truncated_normal, randint or dropout, with a SeedGenerator of the layer or "
            "seed=None, outside of loops. " + FIX
        )


def _refuse_sorted(graph: tf.Graph, name: str) -> None:
    """Refuse a step that sorts one random number for each example, as ``keras.random.shuffle`` does.

    Raises:
        SeedError: it does.
    """
    drawn = [op for op in operations(graph) if op.type == "Reshape" and _OWN.search(op.name)]
    todo = [op.outputs[0] for op in drawn if op.outputs[0].shape.rank == 1]
    while todo:
        for op in todo.pop().consumers():
            if op.type in _SORTS:
                raise SeedError(
                    f"draws=\"global\": a step of '{name}' shuffles its examples by keras.random.shuffle, or sorts one "
                    f"random number for each of them ({op.name}): on one device a row may go to where another "
                    "replica's rows are. Shuffle in the dataset. " + FIX
                )
            if op.type in _ELEMENTWISE:
                todo += op.outputs


_SORTS = ("TopK", "TopKV2", "ArgMax", "ArgMin")
_ELEMENTWISE = ("Add", "AddV2", "Cast", "EnsureShape", "Identity", "Mul", "Neg", "Reshape", "Sub", "Transpose")


def _check_rows(shape: tf.Tensor, rows: RowRange) -> tf.Operation:
    return require(
        tf.equal(tf.cast(shape[0], tf.int64), tf.cast(rows.count, tf.int64)),
        'draws="global" was asked for random numbers with {} rows where the replica has {} examples, so which rows one '
        "device would draw for them is unknown. Draw for parts of that many rows each by themselves.",
        tf.cast(shape[0], tf.int32),
        tf.cast(rows.count, tf.int32),
    )
