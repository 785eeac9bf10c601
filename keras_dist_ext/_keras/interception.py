"""Send calls that a thread makes in Keras' code to the step whose replica it is tracing."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import tensorflow as tf

from keras_dist_ext import versions
from keras_dist_ext._keras import keras
from keras_dist_ext.aliases import TensorNest

__all__ = ["thread", "Step", "Hook", "HOOKS", "definer", "install", "patched", "put"]


class Step(Protocol):
    """What Keras' code asks of the replica whose step is being traced."""

    def reduce_loss(
        self, local: tf.Tensor, sample_weight: TensorNest, mask: TensorNest, reduction: str | None, dtype: Any
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
        self, optimizer: keras.optimizers.Optimizer, loss: tf.Tensor, original: Callable[[Any], Any]
    ) -> tf.Tensor: ...

    def apply(
        self, optimizer: keras.optimizers.Optimizer, grads: Any, variables: Any, original: Callable[..., None]
    ) -> None: ...

    def all_reduce_gradients(self, grads_and_vars: TensorNest) -> TensorNest: ...

    def all_reduce(
        self, reduce_op: tf.distribute.ReduceOp | str, value: tf.Tensor, original: Callable[..., Any]
    ) -> tf.Tensor: ...

    def sum_duplicates(self, slices: tf.IndexedSlices) -> tf.IndexedSlices: ...

    def to_dense(self, slices: tf.IndexedSlices) -> Any: ...

    def next_seed(
        self, generator: keras.random.SeedGenerator, ordered: bool, original: Callable[[bool], Any]
    ) -> tf.Tensor: ...

    def op_seeds(self, op_seed: Any, original: Callable[[Any], Any]) -> Any: ...

    def constant_seed(self, seed: int) -> None: ...

    def draw(self, kind: str, given: Mapping[str, Any], draw: Callable[..., Any]) -> tf.Tensor: ...

    def assign(self, variable: keras.Variable, value: tf.Tensor, original: Callable[[Any], None]) -> None: ...

    def call_function(self, original: Callable[..., Any], function: Any, args: Any, kwargs: Any) -> Any: ...

    def on_rows(self, inputs: TensorNest, op: Callable[[Any], Any]) -> TensorNest: ...

    def check_stateful(self, layer: keras.Layer) -> None: ...

    @property
    def has_global_statistics(self) -> bool: ...


versions.check({"tensorflow": tf.__version__, "keras": keras.__version__})  # before anything of theirs is replaced

thread = threading.local()


@dataclasses.dataclass(frozen=True)
class Hook:
    """A function of Keras or TensorFlow that asks the step whose replica is traced.

    Attributes:
        owner: the module or class whose attribute it is.
        name: of the attribute.
        file: where Keras or TensorFlow defines it.
    """

    owner: Any
    name: str
    file: str

    def __str__(self) -> str:
        return f"{self.owner.__name__.rpartition('.')[2]}.{self.name}"


HOOKS: list[Hook] = []
"""All that are installed. A step with a set `called_hooks` finds those there that were called while it was traced."""


def definer(cls: type, name: str) -> type:
    """Return the class of a class' bases, or itself, that defines a method."""
    return next(base for base in cls.__mro__ if name in vars(base))


def install(owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
    """Replace ``owner.name`` by ``hook(original, step, *args)`` for threads with a step, once per process.

    Raises:
        ImportError: Keras or TensorFlow has no such function any more.
    """
    if not hasattr(owner, name):
        place = getattr(owner, "__module__", owner.__name__)
        raise ImportError(f"cannot import name {name!r} from {owner!r}", name=f"{place}.{name}")
    original = getattr(owner, name)

    def decorate(hook: Callable[..., Any]) -> None:
        if getattr(original, "is_kde_hook", False):
            return
        noted = Hook(owner, name, f"{original.__module__.replace('.', '/')}.py")
        HOOKS.append(noted)
        label = str(noted)

        @functools.wraps(original)
        def hooked(*args: Any, **kwargs: Any) -> Any:
            step = getattr(thread, "step", None)
            if step is None:
                return original(*args, **kwargs)
            called_hooks = getattr(step, "called_hooks", None)
            if called_hooks is not None:
                called_hooks.add(label)
            return hook(original, step, *args, **kwargs)

        hooked.is_kde_hook = True  # type: ignore[attr-defined]
        put(owner, name, hooked)

    return decorate


def put(owner: Any, name: str, function: Callable[..., Any]) -> None:
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
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give a module or a class another attribute for a while."""
    own = name in vars(owner)
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before) if own else delattr(owner, name)
