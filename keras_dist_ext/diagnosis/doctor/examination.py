"""Hold what is known of a run when it is judged: its setting, where its time went, and what experiments have shown.

All are plain values, so that a judgement can be made, and tested, without TensorFlow.

Letters: R = replicas in sync, over all workers; P = blocks of neighbouring steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from keras_dist_ext.diagnosis.doctor.parts import Parts
from keras_dist_ext.diagnosis.doctor.shapes import Padding, Recompilation
from keras_dist_ext.diagnosis.doctor.trials import Estimate, Trials
from keras_dist_ext.findings import Finding
from keras_dist_ext.step.stats import ReplicaStats

__all__ = [
    "BetweenEpochs",
    "Calls",
    "DtypeSpeed",
    "Estimate",
    "Examination",
    "Largest",
    "Loop",
    "MapLoops",
    "PythonCalls",
    "Setting",
    "PlacedElsewhere",
    "Times",
    "Traces",
    "Trials",
    "blocks_of_steps",
]

Floats = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Loop:
    """A layer that computes one time step after the other."""

    layer: str
    num_steps: int
    parameters: int  # that each time step multiplies by


@dataclasses.dataclass(frozen=True)
class PlacedElsewhere:
    """Heavy work of replicas that was placed on another device than theirs."""

    layer: str  # or what the ops are called
    replicas: tuple[int, ...]  # whose work it is
    device: str  # where it is done, such as "CPU:0"


@dataclasses.dataclass(frozen=True)
class Largest:
    """The largest of the variables that are trained, and what updates it."""

    variable: str  # its path
    num_bytes: int
    optimizer: str  # its class
    num_rows: int = 0  # of a table of which a batch reads some rows, and an update writes all; 0: there is none


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a run is like before any clock is read. Defaults are those of a run with nothing to be said."""

    model: str = "model"
    weights: str = ""  # a digest of the shapes of its weights; "" where it has none yet
    is_ours: bool = True  # else stock Keras, into whose steps nobody can see
    strategy: str = "none"  # none, one_device, mirrored, multi_worker, tpu, parameter_server, or a class' name
    num_replicas: int = 1  # R
    num_workers: int = 1
    devices: tuple[str, ...] = ("CPU:0",)  # of this worker's replicas
    accelerators: tuple[str, ...] = ()  # GPUs and TPUs that this process has
    num_cores: int = 1  # that this process may use
    num_threads: int = 0  # within an op; 0: one a core
    num_workers_here: int = 1  # on this machine
    num_listed_workers: int = 0  # of the cluster that TF_CONFIG, or SLURM, describes; 0: there is none
    cluster_source: str = "TF_CONFIG"
    outside: str = ""  # what lives outside of the scope, in sentences
    num_replicas_meant: int = 0  # of the strategy that the model was to live under, where it does not
    runs_eagerly: bool = False
    eager_because: str = "run_eagerly=True"
    steps_per_execution: int | None = None  # None: as many as fit
    step_watchers: tuple[str, ...] = ()  # callbacks that look at every batch, so that one step is made at a time
    gradient_bytes: int = 0  # that replicas sum in a step
    largest: Largest | None = None
    loops: tuple[Loop, ...] = ()
    placed_elsewhere: tuple[PlacedElsewhere, ...] = ()
    elsewhere_share: float = 0.0  # of a replica's heavy work, 0 to 1; of the one of which most is done elsewhere

    @property
    def shares_cpu(self) -> bool:
        """Whether replicas of this process are logical devices of one physical CPU."""
        return sum(device.startswith("CPU") for device in self.devices) > 1

    @property
    def sums_in_memory(self) -> bool:
        """Whether gradients are not sent anywhere: what ends a step is the update, not the sum."""
        return self.num_workers == 1 and (self.num_replicas == 1 or self.shares_cpu)


@dataclasses.dataclass(frozen=True)
class Calls:
    """What a callback did, batch by batch."""

    name: str  # its class
    hook: str  # the method that took longest
    seconds: float  # in all its calls for batches
    num_calls: int
    fetched: tuple[str, ...] = ()  # the functions by which one call of it fetched values from a device
    is_keras_own: bool = False  # the progress bar and the history, which every run has
    every: int = 1  # which call in a row takes long; 1: each; 0: some, at no period
    num_slow: int = 0  # calls that take long, where that is not each
    argument: str = ""  # of a class of Keras, that says how often: "save_freq=1"
    better: str = ""  # what to give instead: 'save_freq="epoch"'


@dataclasses.dataclass(frozen=True)
class Traces:
    """How often a tf.function was traced after the first executions."""

    function: str
    num_traces: int
    num_executions: int  # in which it was
    seconds: float
    argument: str = ""  # that was another one each time; "" where none could be named
    values: tuple[str, ...] = ()  # some of those it had


@dataclasses.dataclass(frozen=True)
class PythonCalls:
    """Calls of a function of Python by an op of the step, in the steps that are watched."""

    function: str  # its name, and where it is
    num_calls: int  # of all replicas
    seconds: float  # in which at least one of them was under way
    is_even: bool = True  # whether it takes about as long on each replica


@dataclasses.dataclass(frozen=True)
class Times:
    """Where the time of some steps went."""

    blocks: tuple[ReplicaStats, ...]  # P, neighbouring, about as many steps in each; arrays are [R]
    num_executions: int = 1
    calls: tuple[Calls, ...] = ()
    traces: tuple[Traces, ...] = ()
    tracing_seconds: float = 0.0  # of all functions, within the steps that are watched
    others_cores: float | None = None  # that other processes took meanwhile; None: unknown
    python: tuple[PythonCalls, ...] = ()  # by ops of the step itself
    start_seconds: tuple[float, ...] = ()  # waiting for the first batch of each pass, which is in no block

    @property
    def num_steps(self) -> int:
        """Steps in all blocks."""
        return sum(block.num_steps for block in self.blocks)

    @property
    def seconds(self) -> float:
        """Seconds of all steps, with the host's share."""
        return sum(block.seconds for block in self.blocks)

    @property
    def host_seconds(self) -> float:
        """Of these, between executions: callbacks, tracing, and all that Keras and TensorFlow do in Python."""
        return sum(block.host_seconds for block in self.blocks)

    @property
    def callback_seconds(self) -> float:
        """Of the host's, in callbacks."""
        return min(self.host_seconds, sum(calls.seconds for calls in self.calls))

    @property
    def dispatch_seconds(self) -> float:
        """Of the host's, what neither callbacks nor tracing account for, nor Python that steps call."""
        late = self._late_python_seconds - self._seems_input - self._seems_sync
        return max(0.0, self._seems_dispatch - max(0.0, late))

    @property
    def python_seconds(self) -> float:
        """Seconds in which ops of the step called Python."""
        return min(self.seconds, sum(calls.seconds for calls in self.python))

    @property
    def _seems_computing(self) -> float:
        return sum(float(_of_busy(b, b.compute_seconds).max()) * b.num_steps for b in self.blocks)

    @property
    def _late_python_seconds(self) -> float:
        """Python within what seems to be waiting for input, the sum over replicas or the host.

        A step's last clock does not wait for what nothing is computed from.
        """
        return max(0.0, self.python_seconds - self._seems_computing)

    @property
    def _seems_input(self) -> float:
        return sum(float(block.input_seconds.max()) * block.num_steps for block in self.blocks)

    @property
    def _seems_sync(self) -> float:
        return max(0.0, self.seconds - self.host_seconds - self._seems_input - self._seems_computing)

    @property
    def _seems_dispatch(self) -> float:
        return max(0.0, self.host_seconds - self.callback_seconds - self.tracing_seconds)

    @property
    def input_seconds(self) -> float:
        """Seconds that the replica that waited longest has waited for input."""
        return max(0.0, self._seems_input - self._late_python_seconds)

    @property
    def examples(self) -> npt.NDArray[np.int64]:
        """Examples of each replica, [R]."""
        total: npt.NDArray[np.int64] = np.sum([block.examples for block in self.blocks], axis=0)
        return total

    def compute(self) -> float:
        """Return the seconds that a replica computes in a step: the median of blocks of the mean of replicas."""
        return self.typical(lambda block: float(_of_busy(block, block.compute_seconds).mean()))

    def sync(self) -> float:
        """Return the seconds that the last replica to have computed needs to end the step; median of blocks.

        No waiting for others is in it: only the sum over replicas, the update and the metrics.
        """
        return self.typical(lambda block: float(_of_busy(block, block.sync_seconds).min()))

    def step(self) -> float:
        """Return the seconds of a step, with the host's share; median of blocks."""
        return self.typical(lambda block: block.seconds / max(1, block.num_steps))

    def typical(self, of_block: Callable[[ReplicaStats], float]) -> float:
        """Return the median over blocks of what a function says of each."""
        return float(np.median([of_block(block) for block in self.blocks]))

    def shares(self) -> dict[str, float]:
        """Return which share of the time went where, 0 to 1; together 1. Waiting for first batches is a part of it."""
        seconds, starting = max(self.seconds, 1e-9), sum(self.start_seconds)
        total = seconds + starting
        of_input = self._seems_input - self.input_seconds
        of_sync = min(self._seems_sync, self._late_python_seconds - of_input)
        of_host = self._seems_dispatch - self.dispatch_seconds
        steps = seconds - self.host_seconds - of_input - of_sync
        computing = min(self._seems_computing, max(0.0, steps - self.input_seconds))
        host = max(self.host_seconds, 1e-12)
        callbacks = self.callback_seconds
        tracing = min(self.tracing_seconds, host - callbacks)
        return {
            "computing": computing / total,
            "Python in the step": (of_input + of_sync + of_host) / total,
            "input": min(self.input_seconds, steps) / total,
            "first batches": starting / total,
            "synchronising": max(0.0, steps - self.input_seconds - computing) / total,
            "callbacks": callbacks / total,
            "tracing": tracing / total,
            "host": max(0.0, self.host_seconds - callbacks - tracing - of_host) / total,
        }


def _of_busy(block: ReplicaStats, values: Floats) -> Floats:
    """Return the values of the replicas that had examples; of all where none had."""
    busy = block.examples > 0
    return values[busy] if busy.any() else values


def blocks_of_steps(parts: Sequence[ReplicaStats], most: int) -> list[ReplicaStats]:
    """Merge neighbours, two and two, until there are at most so many."""
    blocks = list(parts)
    while len(blocks) > most:
        pairs = [blocks[i : i + 2] for i in range(0, len(blocks), 2)]
        blocks = [pair[0] if len(pair) == 1 else _merged(*pair) for pair in pairs]
    return blocks


def _merged(one: ReplicaStats, other: ReplicaStats) -> ReplicaStats:
    total = one.num_steps + other.num_steps

    def mean(name: str) -> Floats:
        first, second = getattr(one, name), getattr(other, name)
        value: Floats = (first * one.num_steps + second * other.num_steps) / total
        return value

    return dataclasses.replace(
        other,
        num_steps=total,
        seconds=one.seconds + other.seconds,
        host_seconds=one.host_seconds + other.host_seconds,
        examples=one.examples + other.examples,
        input_seconds=mean("input_seconds"),
        compute_seconds=mean("compute_seconds"),
        sync_seconds=mean("sync_seconds"),
    )


@dataclasses.dataclass(frozen=True)
class DtypeSpeed:
    """How long a device takes in the dtype that most of a model is computed with."""

    dtype: str
    device: str
    operation: str  # that was timed
    seconds: float
    float32_seconds: float
    share: float = 1.0  # of the products of a step, by the layers' weights and how often they are used


@dataclasses.dataclass(frozen=True)
class MapLoops:
    """Loops of `tf.map_fn` in a step."""

    layers: tuple[str, ...]  # or what they lie in
    num_turns: int  # of all of them, in a step of a replica
    turn_seconds: float  # that a turn takes which computes next to nothing, forward and back


@dataclasses.dataclass(frozen=True)
class BetweenEpochs:
    """What happened between the last step of an epoch and the first one of the next, after the first such time.

    Waiting for the first batch is no part of it.
    """

    num_times: int
    seconds: float  # in all
    validation_seconds: float  # of these
    calls: tuple[Calls, ...] = ()  # of callbacks, in their hooks for epochs

    @property
    def callback_seconds(self) -> float:
        """Seconds in callbacks."""
        return min(self.seconds - self.validation_seconds, sum(calls.seconds for calls in self.calls))


@dataclasses.dataclass(frozen=True)
class Examination:
    """All that is known of a run."""

    setting: Setting
    times: Times | None = None  # None: nothing could be measured
    trials: Trials | None = None  # None: no experiments were made
    pipeline: tuple[Finding, ...] = ()  # what is to be said of the data's own graph, whatever it cost
    mixing: tuple[Finding, ...] = ()  # where the data's own graph mixes less than it seems; no matter of time
    batch_seconds: float | None = None  # that the pipeline takes for a batch by itself; None: unknown
    stock_steps: tuple[int, float] | None = None  # how many steps of stock Keras took how many seconds
    not_copied: str = ""  # why no copy of a model of stock Keras could be made whose steps can be seen
    between: BetweenEpochs | None = None  # None: there were too few epochs
    dtype: DtypeSpeed | None = None  # None: it is float32
    map_loops: MapLoops | None = None  # None: there are none
    padding: Padding | None = None  # None: little of the batches is padding, or nothing could be timed
    recompilation: Recompilation | None = None  # None: XLA compiles nothing, or for few shapes
    parts: Parts = dataclasses.field(default_factory=Parts)  # of a step, that were timed

    @property
    def seconds(self) -> float:
        """Seconds that were watched, with those of first batches and between epochs."""
        seconds = 0.0 if self.between is None else self.between.seconds
        return seconds if self.times is None else seconds + self.times.seconds + sum(self.times.start_seconds)

    def shares(self) -> dict[str, float]:
        """Return which share of the time went where, 0 to 1, together 1; empty where nothing was measured."""
        if self.times is None or not self.times.blocks:
            return {}
        name = "updating" if self._is_update else "synchronising"
        between = 0.0 if self.between is None else self.between.seconds / max(self.seconds, 1e-9)
        shares = {key: (1 - between) * value for key, value in self.times.shares().items()}
        shares = {name if key == "synchronising" else key: value for key, value in shares.items()}
        return shares if self.between is None else {**shares, "between epochs": between}

    @property
    def _is_update(self) -> bool:
        """Whether what ends a step is the update and not the sum over replicas, as far as can be told."""
        if self.times is not None and self.trials is not None and self.trials.has("as it was", "no sum"):
            return self.trials.saved("no sum").value < self.times.sync() / 2
        return self.setting.sums_in_memory
