"""Find out by experiment what makes replicas train differently from one device, and say it as findings.

The step that is off is repeated on both sides from the same state, with something removed: uneven rows, the
sample weights or masks of losses, the batch statistics of BatchNormalization, the loss itself. What makes a difference
go when it is taken away, and come when it alone is put back, is the cause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.layers import flat_layers
from keras_dist_ext.aliases import TensorNest
from keras_dist_ext.data.split import num_rows, take_rows
from keras_dist_ext.diagnosis.certificate.draws import Draws
from keras_dist_ext.diagnosis.certificate.lockstep import Comparison, Lockstep
from keras_dist_ext.diagnosis.certificate.training_run import even_bounds
from keras_dist_ext.findings import Finding
from keras_dist_ext.messages import counted
from keras_dist_ext.strategy.scope import describe_strategy, optimizers
from keras_dist_ext.training.deviations import Deviation

__all__ = ["FIX_OF_STOCK", "explain", "listed", "of_draws"]

PARTS = ("weights", "masks", "moments", "loss")
FIX_OF_STOCK = "Derive the model from kde.Model, or take it over by `kde.adopt(model, strategy)`."


def explain(lockstep: Lockstep, comparisons: Sequence[Comparison]) -> list[Finding]:
    """Say why training is off in steps of which the gradients, or the weights, are.

    Args:
        lockstep: both sides; their models are left in any state.
        comparisons: the steps that are off, at least one.
    """
    causes = _RootCauses(lockstep)
    itself = lockstep.distance_to_itself(comparisons[0])
    if itself is not None:
        return [_uncontrolled(sorted(lockstep.draws.unknown), itself)]
    findings: list[Finding] = []
    by_gradient = [c for c in comparisons if any(d.is_beyond for d in c.deviations if d.part == "gradient")]
    if not by_gradient and any(d.part == "gradient" for d in comparisons[0].deviations):
        are_apart = any(d.is_apart for d in comparisons[0].deviations if d.part == "weights")  # `of_deviations` says so
        return [] if are_apart else [causes.update(comparisons[0])]
    comparisons = by_gradient or comparisons
    starved = next((c for c in comparisons if not c.is_finite and 0 in c.sizes), None)
    if starved is not None:
        findings.append(causes.empty_replica(starved))
    even = next((c for c in comparisons if c.is_even), None)
    uneven = next((c for c in comparisons if not c.is_even), None)
    if even is not None:
        findings += causes.of_rows(even)
    if uneven is not None:
        if causes.is_by_uneven_parts(uneven):
            findings.append(causes.uneven_batch(uneven))
        if even is None:
            findings += causes.of_rows(uneven)
    if not findings:
        findings.append(causes.rows_interact(comparisons[0]))
    return findings


class _RootCauses:
    """Experiments on the steps of a lockstep."""

    def __init__(self, lockstep: Lockstep) -> None:
        self.lockstep = lockstep
        self.many = lockstep.many
        self.model = lockstep.many.model
        self._replicas = lockstep.many.num_replicas
        self.fix = "Please report this model: it should not be." if self.many.is_ours else FIX_OF_STOCK
        self._norms = [
            layer
            for layer in flat_layers(self.model)
            if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable
        ]
        is_global = self.many.is_ours and self.model.replica_runtime.batch_statistics == "global"
        self.local_norms = [] if is_global else [layer for layer in self._norms if not layer.synchronized]

    # Experiments

    def again(self, of: Comparison, *, rows: TensorNest = None, without: Sequence[str] = ()) -> Comparison:
        """Make a step again; with ``rows``, on these rows of its batch, split evenly."""
        batch = of.batch if rows is None else take_rows(of.batch, rows)
        bounds = None if rows is None else even_bounds(int(num_rows(batch)), self._replicas)
        return self.lockstep.compare(batch, of.step, before=of.before, bounds=bounds, without=without)

    def deviates(self, of: Comparison, *, rows: object = None, without: Sequence[str] = ()) -> bool:
        """Whether the step is off then, too."""
        return not self.again(of, rows=rows, without=without).excess <= 1.0

    def is_by_uneven_parts(self, of: Comparison) -> bool:
        """Whether a step is off that would not be with equally many rows on all replicas."""
        rest = ("weights", "masks", "moments")
        return self.deviates(of, without=rest) and not self.deviates(of, rows=self.evened(of), without=rest)

    def evened(self, of: Comparison) -> TensorNest:
        """Rows of the batch, the first ones twice where that makes all replicas have equally many."""
        replicas = self._replicas
        rows = sum(of.sizes)
        return np.arange(-(-rows // replicas) * replicas) % rows

    # Causes

    def of_rows(self, off: Comparison) -> Iterator[Finding]:
        """Causes that have nothing to do with how many rows a replica has."""
        rows = self.evened(off)
        alike = np.tile(rows[: len(rows) // self._replicas], self._replicas)
        same = self.again(off, rows=alike)
        if not same.excess <= 1.0:
            ratio = _ratio(same)
            is_by_number = ratio is not None and (
                _is_close(ratio, self._replicas) or _is_close(ratio * self._replicas, 1)
            )
            if ratio is None and self._norms and not self.deviates(off, rows=alike, without=("moments",)):
                yield self.imprecise_statistics(same)
                return
            is_by_loss = not is_by_number and not self.deviates(off, rows=alike, without=("loss",))
            yield self.local_loss(same) if is_by_loss else self.scaled(same, ratio)
            return
        if not off.is_even and not self.deviates(off, rows=rows):
            return
        if self.deviates(off, rows=rows, without=PARTS):
            yield self.rows_interact(off)
            return
        if self.deviates(off, rows=rows, without=("weights", "masks", "moments")):
            yield self.local_loss(off)
        else:
            if self.deviates(off, rows=rows, without=("masks", "moments")):
                yield self.local_count(off, "weights")
            if self.deviates(off, rows=rows, without=("weights", "moments")):
                yield self.local_count(off, "masks")
        if self.local_norms and self.deviates(off, rows=rows, without=("weights", "masks", "loss")):
            yield self.local_statistics(off)

    def uneven_batch(self, off: Comparison) -> Finding:
        """Name replicas whose mean losses count alike, whatever their shares of the rows."""
        return Finding(
            code="uneven-batch",
            what=f"A batch that does not split evenly trains other weights: each of "
            f"{counted(len(off.sizes), 'replica')} counts alike, whatever its share of the examples.",
            evidence=f"{_where(off)}; {_worst(off)}. With even parts, the difference is rounding.",
            fix=f"{self.fix} Or drop the last batch (`drop_remainder=True`).",
        )

    def local_count(self, off: Comparison, part: str) -> Finding:
        """Name losses that each replica divides by its own count."""
        code, noun, makers = {
            "masks": ("local-mask-count", "the mask", self._makers_of_masks()),
            "weights": ("local-weight-count", "the sample weights", ""),
        }[part]
        return Finding(
            code=code,
            what=f"The loss {self._losses()} divides by what one replica counts of {noun}, not by the count of the "
            "global batch, so that examples weigh more on a replica that has few valid ones.",
            evidence=f"{_where(off)}; {_worst(off)}. Without {noun} in the loss, the difference is rounding{makers}.",
            fix=self.fix,
        )

    def local_loss(self, off: Comparison) -> Finding:
        """A loss of the user's own that is not a mean over rows."""
        return Finding(
            code="local-loss",
            what=f"The loss {self._losses()} of a batch is not the mean of its losses of the replicas' parts: it "
            "divides by something that it counts in the batch, or compares examples with each other.",
            evidence=f"{_where(off)}; {_worst(off)}. With the mean square of the outputs as the loss, it is rounding.",
            fix="Return one loss for each example (Keras takes their mean), and what they divide by as sample weights; "
            'or use `reduction="mean_with_sample_weight"` under kde.Model.',
        )

    def local_statistics(self, off: Comparison) -> Finding:
        """What BatchNormalization does unless it is synchronized."""
        names = _paths(self.local_norms)
        return Finding(
            code="local-batch-statistics",
            what=f"BatchNormalization ({names}) normalizes with the statistics of one replica's examples, where one "
            "device takes those of the whole batch. That is how it is defined, and rarely harms; but it is another "
            "model.",
            evidence=f"{_where(off)}; {_worst(off)}. With the moving statistics instead, the difference is rounding.",
            fix='compile(batch_statistics="global")' if self.many.is_ours else "BatchNormalization(synchronized=True)",
        )

    def imprecise_statistics(self, off: Comparison) -> Finding:
        """What Keras' synchronized BatchNormalization makes of inputs far from 0."""
        names = _paths(self._norms)
        return Finding(
            code="imprecise-statistics",
            what=f"BatchNormalization ({names}) computes statistics with too few digits: Keras' synchronized one takes "
            "the square of the mean from the mean square, which are nearly equal far from 0.",
            evidence=f"All replicas were given the same {off.sizes[0]} examples; {_worst(off)}. With the moving "
            "statistics instead, the difference is rounding.",
            fix="Give it inputs near 0, as `keras.layers.Normalization` makes them.",
        )

    def update(self, off: Comparison) -> Finding:
        """Equal gradients, other weights."""
        own = ", ".join(type(optimizer).__name__ for _, optimizer in optimizers(self.model))
        return Finding(
            code="update-differs",
            what=f"Equal gradients make other weights: look at the optimizer ({own}), constraints, and code that "
            "assigns weights.",
            evidence=f"{_where(off)}; {_worst(off)}.",
            fix=self.fix,
        )

    def empty_replica(self, off: Comparison) -> Finding:
        """Name the statistics of no rows."""
        names = listed(
            [d.name for d in off.deviations if not np.isfinite(d.absolute) and d.part in ("weights", "state")]
        )
        cause, proof = "Something divides by no examples", ""
        if self.local_norms and self.again(off, without=("moments",)).is_finite:
            cause = f"BatchNormalization ({_paths(self.local_norms)}) divides by no examples"
            proof = ", and with moving statistics so do the replicas"
        return Finding(
            code="empty-replica",
            what=f"A replica without examples turns the model to NaN. {cause}: {names or 'the loss'}.",
            evidence=f"{_where(off)}; one device stays finite{proof}.",
            fix=f"{self.fix} Or drop the last batch (`drop_remainder=True`).",
        )

    def scaled(self, off: Comparison, ratio: float | None) -> Finding:
        """The replicas' sum is not what one device computes, even of equal rows."""
        replicas = self._replicas
        custom = [type(self.model).__name__] if type(self.model).train_step.__module__.split(".")[0] != "keras" else []
        suspect = f"train_step of {custom[0]}" if custom else f"the loss {self._losses()}"
        if ratio is None:
            what = (
                f"Replicas that all have the same examples still train differently from one device: look at {suspect}."
            )
        else:
            meaning = {
                "R": "the replicas' means are added up, and nothing divides by their number",
                "1/R": "it is divided by the number of replicas twice",
            }.get("R" if _is_close(ratio, replicas) else "1/R" if _is_close(ratio * replicas, 1.0) else "", "")
            what = f"The gradient is {ratio:.4g} times that of one device" + (
                f": {meaning}. Look at {suspect}." if meaning else f". Look at {suspect}."
            )
        mine = (
            "Divide by nothing: write train_step and losses as for one device."
            if self.many.is_ours
            else (
                "Divide losses by the number of replicas once (Keras' own losses do it), or use kde.Model, whose "
                "train_step is written as for one device."
            )
        )
        return Finding(
            code="scaled-gradient",
            what=what,
            evidence=f"All {replicas} replicas were given the same {off.sizes[0]} examples; {_worst(off)}.",
            fix=mine,
        )

    def rows_interact(self, off: Comparison) -> Finding:
        """Nothing that we can take away is the cause."""
        own = [
            f"{layer.path or layer.name} ({type(layer).__name__})"
            for layer in flat_layers(self.model)[1:]
            if type(layer).__module__.split(".")[0] != "keras"
        ]
        suspects = f"layers of your own: {listed(own)}" if own else "what computes across examples"
        return Finding(
            code="rows-interact",
            what=f"What the model computes of an example depends on the other examples of the replica. Suspects are "
            f"{suspects}.",
            evidence=f"{_where(off)}; {_worst(off)}. Neither the loss, nor weights, masks or BatchNormalization are "
            "the cause; with equal examples on all replicas the difference is rounding.",
            fix="Compute across examples with `tf.distribute.get_replica_context().all_reduce`, or not at all.",
        )

    def _losses(self) -> str:
        given = getattr(self.model, "loss", None)
        flat = keras.tree.flatten(given) if given is not None else []
        names = [
            loss if isinstance(loss, str) else getattr(loss, "name", getattr(loss, "__name__", "")) for loss in flat
        ]
        return ", ".join(f"'{name}'" for name in names if name) or "of the model"

    def _makers_of_masks(self) -> str:
        makers = [
            layer.path or layer.name
            for layer in flat_layers(self.model)
            if isinstance(layer, keras.layers.Masking) or getattr(layer, "mask_zero", False)
        ]
        return f"; the mask comes from {listed(makers)}" if makers else ""


def _uncontrolled(names: Sequence[str], deviation: Deviation) -> Finding:
    """One device that does not repeat itself."""
    which = f" Random ops that are not held still: {', '.join(names)}." if names else ""
    return Finding(
        code="uncontrolled-draws",
        what="One device does not repeat its own step, so nothing can be said about this step on replicas: something "
        f"random, or kept outside of variables, is in it.{which}",
        evidence=f"{deviation.part} of {deviation.name} is {deviation.relative:.2g} (relative) from itself, from equal "
        "state and examples.",
        fix="Draw by keras.random with a SeedGenerator (not by numpy, Python or the ops named), then certify again.",
    )


def of_draws(draws: Sequence[Draws], strategy: tf.distribute.Strategy | None, *, is_ours: bool) -> Iterator[Finding]:
    """Say what is wrong with random numbers."""
    fix = "Give random ops a keras.random.SeedGenerator as their seed." if is_ours else FIX_OF_STOCK
    same = [d for d in draws if d.is_equal]
    if same:
        yield Finding(
            code="same-draws",
            what=f"Replicas of {describe_strategy(strategy)} draw the same random numbers: "
            f"{listed([d.layer for d in same])}. Rows on different replicas get the same masks "
            "and noise, which regularizes less.",
            evidence=f"all of {sum(d.num_numbers for d in same)} numbers looked at are equal on two replicas",
            fix=fix,
        )
    for d in draws:
        if not d.keeps_right and d.rate is not None and d.kept is not None:
            yield Finding(
                code="keep-rate",
                what=f"{d.layer} keeps another share of units than its rate of {d.rate:g} says.",
                evidence=f"{d.kept:.4f} are kept, and {1 - d.rate:.4f} should be",
                fix="Look at how the layer draws.",
            )


def _where(off: Comparison) -> str:
    return f"step {off.step}, {counted(sum(off.sizes), 'example')} split into {list(off.sizes)}"


def _worst(off: Comparison) -> str:
    order: Callable[[Deviation], tuple[bool, float]] = lambda d: (d.part == "gradient", d.excess)  # noqa: E731
    beyond = [d for d in off.deviations if d.is_beyond]
    if not beyond:
        return "no difference beyond rounding"
    worst = max(beyond, key=order)
    return f"the {worst.part} of {worst.name} is {worst.relative:.2g} (relative) off"


def _ratio(off: Comparison) -> float | None:
    """By what number the gradient of one device must be multiplied, if one number does it for all variables."""
    keys = [key for key in off.expected if key[0] == "gradient"]
    one = np.concatenate([np.ravel(off.expected[key][0]).astype(np.float64) for key in keys] or [np.zeros(1)])
    many = np.concatenate([np.ravel(off.found[key][0]).astype(np.float64) for key in keys] or [np.zeros(1)])
    if not one.any():
        return None
    ratio = float(one @ many / (one @ one))
    return ratio if np.abs(many - ratio * one).max() <= 1e-3 * max(np.abs(many).max(), 1e-30) else None


def _is_close(one: float, other: float) -> bool:
    return abs(one - other) <= 1e-3 * abs(other)


def _paths(layers: Sequence[keras.Layer]) -> str:
    return listed([layer.path or layer.name for layer in layers])


def listed(names: Sequence[str]) -> str:
    """Return the first five of some names, and how many more there are."""
    unique = list(dict.fromkeys(names))
    rest = f" and {len(unique) - 5} more" if len(unique) > 5 else ""
    return ", ".join(unique[:5]) + rest
