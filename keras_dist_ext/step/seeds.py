"""One seed to distinct, repeatable streams of random numbers: by replica, by generator, by step.

A generator of Keras holds ``[seed, counter]``, and each draw takes both as the key of a counter-based generator
(Philox). With the global seed S, all replicas hold the same state of the generator g, and replica i moves it by
``replica_offset(i)`` when it draws:

    root of replica i        S + i                                          modulo M = 2**31 - 2
    key of its k-th draw     (root + h1(g), k + h2(g) + i * 0x9E3779B1)      each modulo M

where h1 and h2 are the halves of ``hashing.fold_in(0, name of g)``. Keras takes both halves modulo M
(keras/src/backend/tensorflow/random.py, ``_cast_seed``), so a hash of (S, i, g) into the first half alone would
collide: 2.4 pairs are expected for 100 generators and 1024 replicas. Here two replicas of a generator differ in the
first half, always; two runs whose seeds differ by d share a first half for replicas d apart only, and there a step of
the golden ratio keeps their counters far apart (hundreds of millions of draws for 8 replicas, 900,000 for 1024); two
generators collide with a chance of about 2**-62 for each draw, and ``Seeds.begin`` checks those of the model at hand.

Replica 0 draws what one device would, and nothing has to be made anew when a state is saved, loaded, or goes on under
another number of replicas. Letters: S = the global seed; i = a replica's number over all workers.
"""

from __future__ import annotations

import json
import random
import weakref
from collections.abc import Iterator, Mapping, MutableMapping, Sequence

import numpy as np
import tensorflow as tf

from keras_dist_ext import arguments
from keras_dist_ext._keras import keras
from keras_dist_ext._keras.layers import attributes, flat_layers, seed_generators
from keras_dist_ext._keras.saving import Saveable
from keras_dist_ext._keras.strategies import first_replica
from keras_dist_ext.aliases import Array
from keras_dist_ext.errors import SeedError
from keras_dist_ext.hashing import MODULUS, checked_seed, fold_in
from keras_dist_ext.step.draw_refusals import refuse_model
from keras_dist_ext.step.generator import Generator, stream
from keras_dist_ext.step.global_generator import global_generator_of
from keras_dist_ext.strategy.virtual import num_replicas_of

__all__ = ["Seeds", "seed_replicas", "seeds_of"]


def seed_replicas(model: keras.Model, seed: int) -> None:
    """Give all random generators of a model their streams of a global seed, from the first draw on.

    For loops without ``fit``; ``fit`` does it with the callback ``ReplicaSeeds(seed)``, which lets a model continue
    drawing where it has stopped.

    Args:
        model: a model of ours; built, since layers may make generators when they are built.
        seed: the global seed, from 0 to 2**31 - 3.

    Raises:
        SeedError: the seed is not in this range, or the model is not one of ours.
    """
    seeds_of(model).restart(checked_seed(seed))


def seeds_of(model: keras.Model) -> Seeds:
    """The seeds of a model of ours.

    Raises:
        SeedError: it is another model.
    """
    seeds = getattr(model, "replica_seeds", None)
    if not isinstance(seeds, Seeds):
        if not isinstance(model, keras.Model):
            arguments.refuse("model", model, "a model of ours", SeedError)
        raise SeedError(
            f"The model '{model.name}' is a {type(model).__name__} of stock Keras, whose random layers draw "
            "the same numbers on every replica. Derive it from kde.Model, or rebuild it by kde.adopt(model, strategy)."
        )
    return seeds


def _held(value: object) -> Iterator[tf.random.Generator]:
    """The generators of TensorFlow in an attribute, which may be a list or a dict of several."""
    if isinstance(value, tf.random.Generator):
        yield value
    elif isinstance(value, list | tuple | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _held(part)


class Seeds(Saveable):
    """The random generators of a model, and the global seed that they stem from; saved with the model's weights.

    Keras saves the state of no generator (``model.weights`` leaves it out), so that a resumed run would begin with the
    first masks again. This object is an attribute of each model of ours, where ``.keras`` and ``.weights.h5`` files
    and, as ``in_checkpoint``, ``tf.train.Checkpoint`` meet it. Stock Keras does not look for it.

    A generator's name is its number among the model's generators, in the order in which layers are tracked: the names
    of layers count on from models that were made before.

    Attributes:
        root: the global seed S, or None while generators have their own seeds.
        wanted: the seed given to the model's constructor or by ``ReplicaSeeds``, for when a run begins.
        wanted_draws: likewise of ``draws``; None is what the model was loaded with.
        num_passes: how many times training has gone through its data since it was seeded.
        order_root: orders the data where there is no global seed; None leaves its order to chance.
        uses_global: whether a step of the model has drawn with ``seed=None``.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = weakref.ref(model)  # which Keras, loading, would find in here, and here in it, and so on
        self._loaded: dict[str, Array] = {}
        self._left: dict[str, Array] = {}
        self._known: set[int] = set()
        self.root: int | None = None
        self.wanted: int | None = None
        self.num_passes = 0
        self.order_root: int | None = None
        self.uses_global = False
        self._draws = "replica"
        self.wanted_draws: str | None = None
        self._has_seeded_host = False
        self._is_to_begin = True
        self.in_checkpoint = _InCheckpoint(self)

    def generators(self, *, with_global: bool = False) -> list[Generator]:
        """The model's generators: Keras', TensorFlow's, and the one behind ``seed=None`` if a step has used it."""
        made = self._own_generators()
        return [*made, self._global_generator()] if self.uses_global or with_global else made

    def will_begin(self) -> None:
        """Note that what comes is a new run."""
        self._is_to_begin = True

    def begin(self) -> None:
        """Begin a run: give streams of the seed to the generators that have none of it, and let the others go on.

        Does nothing in the middle of one.

        Raises:
            SeedError: two generators would draw the same numbers.
        """
        if not self._is_to_begin:
            return
        self._is_to_begin = False
        self._set_draws(self.wanted_draws or self._draws)
        if self.draws == "global" and (self._draws == "global" or num_replicas_of(self._made_model()) > 1):
            refuse_model(self._made_model(), flat_layers(self._made_model()))
        self.assign_loaded()
        if self.wanted is not None and self.wanted != self.root:
            self.restart(self.wanted)
        elif self.root is not None:
            for generator in self.generators(with_global=True):
                if generator.num_draws(self.root) is None:  # it is new, or another model has it too
                    left = self._left.get(generator.name)
                    generator.write(generator.initial_state(self.root) if left is None else left)
        if self.wanted is not None and not self._has_seeded_host:
            self._has_seeded_host = True
            self._seed_host()

    def end(self) -> None:
        """Note where a run of training has stopped: another model that has the same layers may move their streams."""
        if self.root is not None:
            self._left = {generator.name: generator.read() for generator in self.generators()}

    def restart(self, seed: int) -> None:
        """Set all generators to their first draw."""
        self._check_distinct(self._own_generators(), seed)
        self._left = {}
        self._set_root(seed)
        self.num_passes = 0
        self._has_seeded_host = False
        for generator in self.generators(with_global=True):
            generator.write(generator.initial_state(seed))

    def _seed_host(self) -> None:
        """Seed what draws outside of steps: Python's and NumPy's generators by worker, TensorFlow's alike on all."""
        assert self.root is not None
        first = first_replica(self._strategy)
        random.seed(fold_in(self.root + first, "python", first))
        np.random.seed(fold_in(self.root + first, "numpy", first) % 2**32)
        tf.random.set_seed(fold_in(self.root, "tensorflow") % MODULUS)  # datasets shuffle by it, alike on all workers

    def order_of_next_pass(self) -> int | None:
        """Return the seed of the data's order in the next pass of training, alike on all workers."""
        self.num_passes += 1
        return self.order_of_pass(self.num_passes)

    def order_of_evaluation(self) -> int | None:
        """Return the seed of the data's order in evaluation and prediction."""
        return self.order_of_pass(0)

    def order_of_pass(self, number: int) -> int | None:
        """Return the seed of the data's order in a pass, counted from 1."""
        root = self.order_root if self.root is None else self.root
        return None if root is None else fold_in(root, "data", number)

    def has(self, generator: keras.random.SeedGenerator) -> bool:
        """Whether a ``SeedGenerator`` is one of the model's."""
        if id(generator) not in self._known:
            layers = flat_layers(self._made_model())
            self._known = {id(own) for layer in layers for own in seed_generators(layer)}
        return id(generator) in self._known

    @property
    def draws(self) -> str:
        """Whether each "replica" draws from its own streams, or all draw what one device does ("global")."""
        return "global" if self.is_exact else self._draws

    @property
    def is_exact(self) -> bool:
        """Whether the model was compiled to do what one device does, random numbers included."""
        return bool(self._made_model().replica_runtime.exact)

    @property
    def _strategy(self) -> tf.distribute.Strategy:
        return self._made_model().distribute_strategy

    def _made_model(self) -> keras.Model:
        model = self._model()
        assert model is not None
        return model

    def _set_draws(self, draws: str) -> None:
        if draws != self._draws:
            self._draws = draws
            self._forget_compiled()

    def _set_root(self, root: int | None) -> None:
        if root != self.root:
            self.root = root
            self._forget_compiled()

    def _forget_compiled(self) -> None:
        model = self._made_model()  # what it has compiled holds streams of the old one
        model.train_function = model.test_function = model.predict_function = None

    def _own_generators(self) -> list[Generator]:
        found: dict[int, Generator] = {}
        count = {"keras": 0, "tensorflow": 0}

        def add(kind: str, label: str, owner: keras.random.SeedGenerator | tf.random.Generator) -> None:
            if id(owner) not in found:
                found[id(owner)] = Generator(f"{kind}_{count[kind]}", label, owner.state)
                count[kind] += 1

        for layer in flat_layers(self._made_model()):
            path = layer.path or layer.name
            own = seed_generators(layer)
            for generator in own:
                add("keras", path if len(own) == 1 else f"{path}/{generator.name}", generator)
            for name, value in attributes(layer):
                for one in _held(value):
                    add("tensorflow", f"{path}/{name}", one)
        return list(found.values())

    def _global_generator(self) -> Generator:
        generator = global_generator_of(self._strategy, is_seeded=self.root is not None)
        return Generator("global", "keras.random, seed=None", generator.state)

    def _check_distinct(self, generators: Sequence[Generator], seed: int) -> None:
        num_replicas = num_replicas_of(self._made_model())
        taken: dict[tuple[int, int], tuple[str, int]] = {}
        for generator in generators:
            for replica in range(num_replicas if generator.is_keras else 0):
                other, _ = taken.setdefault(stream(seed, replica, generator.name), (generator.label, replica))
                if other != generator.label:
                    raise SeedError(
                        f"{other} and {generator.label} would draw the same numbers on replica {replica}, because "
                        "their names hash alike. Add the layers of the model in another order."
                    )

    # What is saved

    def state(self) -> dict[str, list[int]]:
        """Return all that a run needs to go on drawing, by name."""
        if not self._has_state():
            return {}
        state = {generator.name: [int(n) for n in generator.read()] for generator in self.generators()}
        return {**state, "run": self.run}

    @property
    def run(self) -> list[int]:
        """The global seed (-1 for none), how often the data was read, whether steps draw with ``seed=None``.

        And, if so, that they draw what one device would.
        """
        run = [-1 if self.root is None else self.root, self.num_passes, int(self.uses_global)]
        return [*run, 1] if self._draws == "global" else run

    def load(self, state: Mapping[str, Sequence[int] | Array]) -> None:
        """Take over a state; what belongs to generators that are not made yet waits for them until a run begins."""
        if "run" in state:
            root, self.num_passes, uses_global, *is_global = (int(n) for n in state["run"])
            self._set_draws(self.wanted_draws or ("global" if any(is_global) else "replica"))
            self.uses_global = self.uses_global or bool(uses_global)
            self._set_root(None if root < 0 else root)
        self._left = {}
        self._loaded = {name: np.asarray(value, np.int64) for name, value in state.items() if name != "run"}
        self.assign_loaded()

    def resume_from(self, other: Seeds) -> None:
        """Take over the state of the same model's seeds elsewhere."""
        self.wanted, self.wanted_draws = other.wanted, other.wanted_draws
        self.load(other.state())

    def assign_loaded(self) -> None:
        """Give loaded states to the generators that exist by now."""
        if self._loaded:
            for generator in self.generators():
                value = self._loaded.pop(generator.name, None)
                if value is not None and value.shape == tuple(generator.state.shape):
                    generator.write(value)

    def _has_state(self) -> bool:
        return self.root is not None or bool(self.generators())

    def save_own_variables(self, store: MutableMapping[str, Array]) -> None:
        """Save into a Keras file."""
        for name, value in self.state().items():
            store[name] = np.array(value, np.int64)

    def load_own_variables(self, store: MutableMapping[str, Array]) -> None:
        """Load from a Keras file; files of stock Keras hold nothing."""
        self.load({name: np.asarray(store[name]) for name in store.keys()})  # noqa: SIM118 (Keras' own kind of mapping)


class _InCheckpoint(tf.train.experimental.PythonState):  # type: ignore[misc]
    """The seeds of a model as ``tf.train.Checkpoint`` saves them."""

    def __init__(self, seeds: Seeds) -> None:
        super().__init__()
        self._seeds = seeds

    def serialize(self) -> str:
        return json.dumps(self._seeds.state())

    def deserialize(self, string_value: str | bytes) -> None:
        self._seeds.load(json.loads(string_value))
