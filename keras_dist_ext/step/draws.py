"""The random numbers of one replica's step: each has its own stream, the same in every run with a seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.interception import OpSeeds
from keras_dist_ext._keras.tracing import in_xla
from keras_dist_ext.aliases import TensorNest
from keras_dist_ext.errors import SeedError
from keras_dist_ext.hashing import fold_in, replica_offset
from keras_dist_ext.messages import warn_once
from keras_dist_ext.step.all_rows import AllRows
from keras_dist_ext.step.distributed_model import DistributedModel
from keras_dist_ext.step.drawn_shapes import NotedDraw
from keras_dist_ext.step.global_draws import GlobalDraws
from keras_dist_ext.step.observer import StepObserver
from keras_dist_ext.step.reducers import Reducer
from keras_dist_ext.step.seeds import Seeds
from keras_dist_ext.step.xla import draw_as_uncompiled

__all__ = ["RandomStreams"]


class RandomStreams:
    """What one replica draws in a step.

    Attributes:
        is_drawing: whether a generator is giving a seed just now, and assigns its state for that.

    Args:
        model: the Keras model, with its ``replica_seeds``.
        reducer: adds up over replicas.
        global_generator: the generator behind ``seed=None``.
        observer: is called with what is drawn as on one device.
    """

    def __init__(
        self,
        model: DistributedModel,
        reducer: Reducer,
        global_generator: keras.random.SeedGenerator,
        observer: StepObserver,
    ) -> None:
        self.is_drawing = False
        self._model = model
        self._reducer = reducer
        self._seeds: Seeds | None = getattr(model, "replica_seeds", None)
        self._global_generator = global_generator
        self._observer = observer
        self._num_ops = 0  # of `tf.random` so far
        self._global: GlobalDraws | None = None

    def begin(self, all_rows: AllRows, noted: Sequence[NotedDraw] | None) -> None:
        """Set where the replica's rows are, and what the step drew in a scratch graph, if it was traced in one."""
        if self.are_global:
            self._global = GlobalDraws(
                self._model.name, all_rows, noted, lambda rows: all_rows.note_own(self._observer.on_draw(rows))
            )

    def next_seed(
        self, generator: keras.random.SeedGenerator, ordered: bool, original: Callable[[bool], tf.Tensor]
    ) -> tf.Tensor:
        """Give each replica its own stream; the first replica's is that of one device (see ``seeds``)."""
        seeds = self._seeds
        if seeds is not None and generator is self._global_generator:
            seeds.uses_global = True
            ordered = ordered or seeds.root is not None
        elif seeds is not None and seeds.root is not None and not seeds.has(generator):
            warn_once(
                f"A step of '{self._model.name}' draws from {generator.name!r}, a SeedGenerator that neither the model "
                "nor a layer of it holds: it keeps its own seed, and what it has drawn is not saved. Make it an "
                "attribute of the layer or the model."
            )
        self.is_drawing = True
        try:
            state = original(ordered)
        finally:
            self.is_drawing = False
        replica = self._reducer.replica_id
        if self.are_global or self._reducer.num_replicas == 1 or (isinstance(replica, int) and replica == 0):
            return state
        return state + tf.cast(replica_offset(replica), state.dtype)

    def op_seeds(self, op_seed: int | None, original: Callable[[int | None], OpSeeds]) -> OpSeeds:
        """Seed a ``tf.random`` op: by its place in the step from the global seed, else apart from other replicas'."""
        replica = self._reducer.replica_id
        if self.are_global:
            raise SeedError(
                f"draws=\"global\": a step of '{self._model.name}' draws by an op of tf.random, which keeps its own "
                "place in its numbers, so that its rows cannot be drawn by themselves. Use keras.random with "
                "seed=None or with a SeedGenerator of the layer."
            )
        if not isinstance(replica, int):
            return original(op_seed)  # one trace for all replicas of a TPU
        if op_seed is None and self._seeds is not None and self._seeds.root is not None:
            self._num_ops += 1
            number = fold_in(self._seeds.root + replica, "tf.random", replica, self._num_ops)
            return number % 2**31, number >> 31
        first, second = original(op_seed)
        if replica == 0 or first is None or second is None:
            return first, second
        offset = replica_offset(replica)
        return (first + int(offset[0])) % 2**31, (second + int(offset[1])) % 2**31

    def constant_seed(self, seed: int) -> None:
        """Warn that an integer as a seed gives every replica the same numbers."""
        is_seeded = self._seeds is not None and self._seeds.root is not None
        is_initializer = tf.executing_eagerly()  # it runs outside of the graph, and all replicas want its numbers
        if self._reducer.num_replicas > 1 and not is_seeded and not is_initializer and not self.are_global:
            warn_once(
                f"keras.random was called with seed={seed} in a step: an integer is a constant, so every replica draws "
                "the same numbers, at every step. Pass a keras.random.SeedGenerator instead; or, if that is what you "
                "want, say so by the callback ReplicaSeeds(seed)."
            )

    @property
    def are_global(self) -> bool:
        """Whether the replicas draw what one device would draw for the global batch."""
        return self._reducer.num_replicas > 1 and self._seeds is not None and self._seeds.draws == "global"

    def draw(self, kind: str, given: Mapping[str, TensorNest], draw: Callable[..., tf.Tensor]) -> tf.Tensor:
        """Draw by a key: as one device does where that is wanted, and under XLA and a global seed as without XLA."""
        if self._global is not None:
            return self._global.draw(kind, given, draw)
        if kind in ("uniform", "normal") and self._seeds is not None and self._seeds.root is not None and in_xla():
            key = {name: given[name] for name in ("key", "counter", "alg")}
            drawn = draw_as_uncompiled(kind, given["shape"], tf.as_dtype(given["dtype"]), **key)
            if drawn is not None:
                return drawn
        numbers = draw(given["shape"], given["counter"])
        self._observer.on_numbers(kind, numbers.shape)  # TensorFlow knows sizes that follow from those of the batch
        return numbers

    def check(self) -> None:
        """Refuse what one device does not draw row by row, where that is wanted, of all that was traced."""
        if self._global is not None:
            self._global.check()
