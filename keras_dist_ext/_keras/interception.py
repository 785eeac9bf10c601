"""Send calls that a thread makes in Keras' code to the step whose replica it is tracing."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Protocol, TypeAlias

import tensorflow as tf

from keras_dist_ext import versions
from keras_dist_ext._keras import keras
from keras_dist_ext.aliases import DType, Gradient, Original, TensorNest, TracedFunction

__all__ = ["thread", "OpSeeds", "Step", "Hook", "HOOKS", "definer", "install", "patched", "put"]


OpSeeds: TypeAlias = tuple[int | None, int | None]
"""The seeds of an op of ``tf.random``: of the graph and its own, or None and None."""


class Step(Protocol):
    """The hooks that Keras' code calls in the replica whose step is being traced."""

    def reduce_loss(
        self, local: tf.Tensor, sample_weight: TensorNest, mask: TensorNest, reduction: str | None, dtype: DType | None
    ) -> tf.Tensor: ...

    def begin_loss(self) -> None: ...

    def note_loss(self, value: tf.Tensor) -> None: ...

    def as_mean(self, value: tf.Tensor) -> tf.Tensor: ...

    def mean_update(
        self, metric: keras.Metric, values: tf.Tensor, sample_weight: TensorNest
    ) -> tuple[TensorNest, TensorNest]: ...

    def sum_update(
        self, metric: keras.Metric, values: tf.Tensor, sample_weight: TensorNest
    ) -> tuple[TensorNest, TensorNest]: ...

    def scale_loss(
        self, optimizer: keras.optimizers.Optimizer, loss: tf.Tensor, original: Callable[[tf.Tensor], tf.Tensor]
    ) -> tf.Tensor: ...

    def apply(
        self,
        optimizer: keras.optimizers.Optimizer,
        grads: Sequence[Gradient],
        variables: Sequence[keras.Variable],
        original: Callable[..., None],
    ) -> None: ...

    def all_reduce_gradients(self, grads_and_vars: TensorNest) -> TensorNest: ...

    def all_reduce(
        self, reduce_op: tf.distribute.ReduceOp | str, value: tf.Tensor, original: Original
    ) -> tf.Tensor: ...

    def sum_duplicates(self, slices: tf.IndexedSlices) -> tf.IndexedSlices: ...

    def to_dense(self, slices: tf.IndexedSlices) -> tf.Tensor: ...

    def next_seed(
        self, generator: keras.random.SeedGenerator, ordered: bool, original: Callable[[bool], tf.Tensor]
    ) -> tf.Tensor: ...

    def op_seeds(self, op_seed: int | None, original: Callable[[int | None], OpSeeds]) -> OpSeeds: ...

    def constant_seed(self, seed: int) -> None: ...

    def draw(self, kind: str, given: Mapping[str, TensorNest], draw: Callable[..., tf.Tensor]) -> tf.Tensor: ...

    def assign(self, variable: keras.Variable, value: tf.Tensor, original: Callable[[tf.Tensor], None]) -> None: ...

    def call_function(
        self, original: Original, function: TracedFunction, args: TensorNest, kwargs: TensorNest
    ) -> TensorNest: ...

    def on_rows(self, inputs: TensorNest, op: Callable[[tf.Tensor], TensorNest]) -> TensorNest: ...

    def check_stateful(self, layer: keras.Layer) -> None: ...

    @property
    def has_global_statistics(self) -> bool: ...


versions.check({"tensorflow": tf.__version__, "keras": keras.__version__})  # before anything of theirs is replaced

thread = threading.local()


@dataclasses.dataclass(frozen=True)
class Hook:
    """A function of Keras or TensorFlow that calls a hook of the step that is traced.

    Attributes:
        owner: the module or class whose attribute it is.
        name: of the attribute.
        file: where Keras or TensorFlow defines it.
    """

    owner: type | ModuleType
    name: str
    file: str

    def __str__(self) -> str:
        return f"{self.owner.__name__.rpartition('.')[2]}.{self.name}"


HOOKS: list[Hook] = []
"""All that are installed.

A step with a set `called_hooks` finds those there that were called while it was traced; one with `plain_calls` has that
call them.
"""


def definer(cls: type, name: str) -> type:
    """Return the class of a class' bases, or itself, that defines a method."""
    return next(base for base in cls.__mro__ if name in vars(base))


def install(owner: type | ModuleType, name: str) -> Callable[[Original], None]:
    """Replace ``owner.name`` by ``hook(original, step, *args)`` for threads with a step, once per process.

    Raises:
        ImportError: Keras or TensorFlow has no such function any more.
    """
    if not hasattr(owner, name):
        place = getattr(owner, "__module__", owner.__name__)
        raise ImportError(f"cannot import name {name!r} from {owner!r}", name=f"{place}.{name}")
    original = getattr(owner, name)

    def decorate(hook: Original) -> None:
        if getattr(original, "is_kde_hook", False):
            return
        noted = Hook(owner, name, f"{original.__module__.replace('.', '/')}.py")
        HOOKS.append(noted)
        label = str(noted)

        @functools.wraps(original)
        def hooked(*args: object, **kwargs: object) -> TensorNest:
            step = getattr(thread, "step", None)
            if step is None:
                return original(*args, **kwargs)
            called_hooks = getattr(step, "called_hooks", None)
            if called_hooks is not None:
                called_hooks.add(label)
            calls = getattr(step, "plain_calls", None)
            if calls is not None:
                return calls.call(label, functools.partial(hook, original, step), *args, **kwargs)
            return hook(original, step, *args, **kwargs)

        hooked.is_kde_hook = True  # type: ignore[attr-defined]
        put(owner, name, hooked)

    return decorate


def put(owner: type | ModuleType, name: str, function: Original) -> None:
    """Replace a function of a class or module where it is defined: there pickle looks for it."""
    if isinstance(owner, type):
        setattr(definer(owner, name), name, function)
        return
    original = getattr(owner, name)
    home, own_name = sys.modules[original.__module__], original.__qualname__
    if getattr(home, own_name, None) is original:
        setattr(home, own_name, function)
    setattr(owner, name, function)


@contextlib.contextmanager
def patched(owner: object, name: str, value: object) -> Iterator[None]:
    """Give a module or a class another attribute for a while."""
    own = name in vars(owner)
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before) if own else delattr(owner, name)
