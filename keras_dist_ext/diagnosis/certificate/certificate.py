"""Certify that a strategy trains a model as one device would, or name what makes it train otherwise."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import tensorflow as tf

from keras_dist_ext import arguments
from keras_dist_ext._keras import keras
from keras_dist_ext._keras.random import intercept_random_ops
from keras_dist_ext.aliases import Array, JsonValue, TensorNest
from keras_dist_ext.data.split import num_rows
from keras_dist_ext.diagnosis.certificate.certifiable import check_certifiable
from keras_dist_ext.diagnosis.certificate.crashes import crash_finding
from keras_dist_ext.diagnosis.certificate.deviation_findings import of_deviations
from keras_dist_ext.diagnosis.certificate.drawn_numbers import Alike, checked_seeds
from keras_dist_ext.diagnosis.certificate.draws import Draws, watch_draws
from keras_dist_ext.diagnosis.certificate.global_batches import global_batches
from keras_dist_ext.diagnosis.certificate.lockstep import Comparison, Lockstep
from keras_dist_ext.diagnosis.certificate.root_causes import explain, of_draws
from keras_dist_ext.diagnosis.certificate.seeded_steps import compare_seeded, of_seeded_steps
from keras_dist_ext.diagnosis.certificate.training_run import on_one_device, without_retracing_warnings
from keras_dist_ext.errors import BackendError, CertificateError
from keras_dist_ext.findings import Finding
from keras_dist_ext.messages import counted
from keras_dist_ext.step.hook_checks import check_hooks
from keras_dist_ext.strategy.scope import describe_strategy
from keras_dist_ext.training.callbacks import ReplicaSeeds
from keras_dist_ext.training.deviations import Deviation

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["Certificate", "certify"]


def certify(
    build_model: Callable[[], keras.Model],
    strategy: tf.distribute.Strategy,
    data: object,
    steps: int = 10,
    *,
    batch_size: int = 32,
    allow: Collection[str] = (),
    seeds: ReplicaSeeds | None = None,
) -> Certificate:
    """Train on one device and under a strategy, step by step from equal state, and say whether both do the same.

    Both models are new, and thrown away. Every step takes the same global batch on both sides. What is compared after
    each: the gradient of each variable as the optimizer uses it, weights, non-trainable state and the optimizer's own
    variables (on every replica), and the results of loss and metrics. A deviation counts where rounding does not
    explain it: ``deviations`` states the bounds, which are 1e-5 of a tensor's largest value in float32, and more where
    rounding moves one device further. Then the steps that are off are repeated without parts of them, to find the
    cause.

    Random numbers cannot be equal, unless ``seeds`` has replicas draw those of one device. While steps are compared,
    each random op draws the same numbers for each example, and on both sides. How each replica draws is looked at in
    two more steps: replicas must differ, and dropout must keep its share. With ``seeds``, all steps are compared once
    more, with the numbers that they draw, in place of that.

    Traces of a `tf.function` of your own, made meanwhile, stay with it: certify in a process that does nothing else.

    Of arrays, a ``PyDataset``, and a dataset of known length (up to 1000 batches) the last batch, which may be partial,
    is among those trained on. Not compared: what ``fit`` does around steps (callbacks, epochs, validation), but for
    what stock Keras does before the first.

    Args:
        build_model: builds and compiles a model, stock Keras' or ours. It is called once inside the strategy's scope,
            and once outside of all; it must not enter a scope by itself.
        strategy: MirroredStrategy, or any other whose replicas are all in this process.
        data: global batches: a `tf.data.Dataset`, a `keras.utils.PyDataset`, an iterable of batches, or arrays
            ``(x, y)`` or ``(x, y, sample_weight)``.
        steps: how many steps to make; data is begun again when it has fewer batches.
        batch_size: examples of a global batch, of arrays.
        allow: codes of findings that do not count, such as "local-batch-statistics".
        seeds: ``ReplicaSeeds(seed, draws="global")``, as `fit` is given; for models of this package.

    Returns:
        The certificate: print it, ask for ``is_equivalent``, ``findings`` and ``deviations``.

    Raises:
        CertificateError: the model fails on one device, differs between the two calls, or enters a scope by itself;
            the data holds no batch; by the seeds each replica draws its own numbers, or the model is stock Keras'; the
            strategy's replicas are not all in this process; or a strategy's scope is entered.
    """
    check_certifiable(build_model, strategy)
    steps = arguments.integer("steps", steps, least=1, most=_MOST_STEPS, error=CertificateError)
    most = arguments.MOST_EXAMPLES
    batch_size = arguments.integer("batch_size", batch_size, least=1, most=most, error=CertificateError)
    codes = [allow] if isinstance(allow, str) else allow
    allowed = arguments.texts("allow", codes, wanted="codes of findings", error=CertificateError)
    trial = _Trial(build_model, strategy, global_batches(data, steps, batch_size), checked_seeds(seeds))
    with without_retracing_warnings():
        trial.run()
    return trial.certificate(frozenset(allowed))


_MOST_STEPS = 100_000  # the batches of all are kept


@dataclass(frozen=True)
class Certificate:
    """What came of training a model on one device and under a strategy.

    Attributes:
        model: the model's name.
        strategy: a description, such as "MirroredStrategy (2 replicas)".
        num_steps: steps that were made on both sides.
        rows: of each replica in each step.
        deviations: the worst step of each variable's gradient, weights, state and optimizer state, and of each metric.
        draws: what random layers drew.
        findings: causes of deviations beyond rounding.
        allowed: findings that were said not to count.
        drift: how far the weights are from one device's after all steps without taking over its state in between,
            relative to the largest weight; None where that was not tried.
        drift_of_reordered: the same of one device whose batches have their rows in another order.
        seed: by which both sides have also drawn the same random numbers in all steps; None if they have not.
    """

    model: str
    strategy: str
    num_steps: int
    rows: tuple[tuple[int, ...], ...]
    deviations: tuple[Deviation, ...]
    draws: tuple[Draws, ...]
    findings: tuple[Finding, ...]
    allowed: tuple[Finding, ...] = ()
    drift: float | None = None
    drift_of_reordered: float | None = None
    seed: int | None = None

    @property
    def is_equivalent(self) -> bool:
        """Whether the run is that of one device but for rounding."""
        return not self.findings

    @property
    def largest(self) -> Deviation | None:
        """The deviation that is largest relative to what rounding explains."""
        return max(self.deviations, key=lambda d: d.excess, default=None)

    def __str__(self) -> str:
        lines = [self._verdict(), *(str(finding) for finding in self.findings)]
        lines += [f"allowed: {finding.code}: {finding.what}" for finding in self.allowed]
        return "\n".join(lines)

    def _verdict(self) -> str:
        run = f"'{self.model}' under {self.strategy}, {counted(self.num_steps, 'step')}"
        if self.findings:
            return f"{run}: not what one device trains, {counted(len(self.findings), 'finding')}."
        allowed = f", but for {', '.join(f.code for f in self.allowed)}" if self.allowed else ""
        if self.largest is None:
            return f"{run}: equivalent to one device{allowed}."
        within = (
            f"the largest deviation is {self.largest.relative:.1e} (the {self.largest.part} of {self.largest.name})"
        )
        return f"{run}: equivalent to one device{allowed}; {within}."

    def to_json(self) -> str:
        """Return all of it as one JSON object; numbers that are not finite are strings there."""
        fields = {**dataclasses.asdict(self), "is_equivalent": self.is_equivalent}
        fields["deviations"] = [{**dataclasses.asdict(d), "is_beyond": d.is_beyond} for d in self.deviations]
        return json.dumps(_finite(fields), allow_nan=False)

    def __rich_console__(self, console: object, options: object) -> Iterator[RenderableType]:
        """Show the verdict, the findings, and tables of deviations and draws, with rich."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        yield Text(self._verdict(), style="bold green" if self.is_equivalent else "bold red")
        for finding in (*self.findings, *self.allowed):
            yield Text(str(finding), style="dim" if finding in self.allowed else "")
        table = Table(title="deviation from one device (worst step)", title_justify="left", box=box.SIMPLE_HEAD)
        for name in ("", "of", "largest", "relative", "of rounding", "between replicas", "step"):
            table.add_column(name, justify="left" if name in ("", "of") else "right", overflow="fold")
        for deviation in sorted(self.deviations, key=lambda d: -d.excess):
            cells = (
                f"{deviation.absolute:.2g}",
                f"{deviation.relative:.1e}",
                f"{deviation.excess:.2g}",
                f"{deviation.spread:.2g}",
                str(deviation.step),
            )
            table.add_row(
                deviation.part, deviation.name, *cells, style="red" if deviation.is_beyond or deviation.is_apart else ""
            )
        yield table
        if self.draws:
            table = Table(title="random numbers", title_justify="left", box=box.SIMPLE_HEAD)
            for name in ("layer", "ops", "numbers", "equal on two replicas", "kept", "to keep"):
                table.add_column(name, justify="left" if name == "layer" else "right", overflow="fold")
            for d in self.draws:
                kept = ("", "") if d.kept is None or d.rate is None else (f"{d.kept:.3f}", f"{1 - d.rate:.3f}")
                table.add_row(
                    d.layer,
                    str(d.num_ops),
                    str(d.num_numbers),
                    f"{d.equal:.1%}",
                    *kept,
                    style="red" if d.is_equal else "",
                )
            yield table
        if self.seed is not None:
            yield Text(f"Replicas and one device have drawn the same random numbers, by the seed {self.seed}.")
        if self.drift is not None and self.drift_of_reordered is not None:
            yield Text(
                f"Weights after {counted(self.num_steps, 'step')} in a row: {self.drift:.1e} from one device; one "
                f"device with its examples in another order: {self.drift_of_reordered:.1e}."
            )


def _finite(value: object) -> JsonValue:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


class _Trial:
    """The run of one certificate."""

    def __init__(
        self,
        build_model: Callable[[], keras.Model],
        strategy: tf.distribute.Strategy,
        batches: list[TensorNest],
        seeds: ReplicaSeeds | None,
    ) -> None:
        self._build_model = build_model
        self._strategy = strategy
        self._batches = batches
        self._seeds = seeds
        self._seed: int | None = None  # by which steps were compared
        self._findings: list[Finding] = []
        self._worst: dict[tuple[str, str], Deviation] = {}
        self._rows: list[tuple[int, ...]] = []
        self._draws: tuple[Draws, ...] = ()
        self._drift: tuple[float | None, float | None] = (None, None)
        self._name = ""
        self._is_ours = False

    def run(self) -> None:
        """Make all steps, experiments and looks at random numbers."""
        draws = Alike()
        with contextlib.suppress(BackendError):  # of a model of ours, its first step raises it
            check_hooks()  # here, as they are tried with random ops that are TensorFlow's
        with intercept_random_ops(draws):
            try:
                lockstep = Lockstep(self._build_model, self._strategy, self._batches[0], draws)
            except CertificateError:
                raise
            except Exception as error:
                on_one_device(self._build_model, self._batches[0])  # or it is no matter of the strategy
                self._findings.append(crash_finding(error, self._strategy, "Building the model", is_ours=False))
                return
            self._name, self._is_ours = lockstep.many.model.name, lockstep.many.is_ours
            if self._seeds is not None and not self._is_ours:
                raise CertificateError(
                    f"'{self._name}' is a model of stock Keras, whose replicas do not draw by ReplicaSeeds. Certify it "
                    "without seeds, or derive it from kde.Model."
                )
            if lockstep.many.trouble_of_fit is not None:
                trouble = lockstep.many.trouble_of_fit
                self._findings.append(
                    crash_finding(trouble, self._strategy, "`fit`, before its first step,", is_ours=False)
                )
            try:
                self._run(lockstep)
            except CertificateError:
                raise
            except Exception as error:
                self._findings.append(crash_finding(error, self._strategy, "A step", is_ours=self._is_ours))
                return
        if self._seeds is not None:
            self._run_seeded(self._seeds)
        elif draws.has_drawn and self._rows:
            batch = max(self._batches, key=lambda batch: int(num_rows(batch)))
            bounds = lockstep.bounds(int(num_rows(batch)))
            self._draws = watch_draws(lockstep.many, batch, bounds)
            self._findings += of_draws(self._draws, self._strategy, is_ours=self._is_ours)

    def _run(self, lockstep: Lockstep) -> None:
        lockstep.build_optimizers(self._batches[0])
        start = lockstep.one.state()
        off: list[Comparison] = []
        for step, batch in enumerate(self._batches, 1):
            try:
                comparison = lockstep.compare(batch, step)
            except CertificateError:
                raise
            except Exception as error:
                self._findings.append(self._broken(error, step, lockstep.bounds(int(num_rows(batch)))))
                break
            if not comparison.is_finite_on_one_device:
                if step == 1:
                    raise CertificateError(
                        "One device itself comes to numbers that are not finite in the first step, so nothing says "
                        "what is right. Look at the data, the loss and the learning rate."
                    )
                break
            self._rows.append(comparison.sizes)
            for deviation in comparison.deviations:
                self._note(deviation)
            is_first_of_kind = all(c.is_even != comparison.is_even for c in off)
            is_first_nan = not comparison.is_finite and all(c.is_finite for c in off)
            if (not comparison.excess <= 1.0 and is_first_of_kind) or is_first_nan:
                off.append(comparison)
        if not self._rows:
            return
        if off:
            self._findings += explain(lockstep, off)
        elif not self._findings:
            self._measure_drift(lockstep, start)
        self._findings += of_deviations(lockstep, tuple(self._worst.values()), bool(off))
        self._try_several_steps(lockstep)

    def _run_seeded(self, seeds: ReplicaSeeds) -> None:
        """Make the steps with the numbers that they draw, where only what is no matter of these was found."""
        codes = {finding.code for finding in self._findings}
        if not self._rows or codes - {"local-batch-statistics"}:
            return
        without = ("moments",) if codes else ()
        batches = self._batches[: len(self._rows)]
        try:
            comparisons = compare_seeded(self._build_model, self._strategy, batches, seeds, without)
        except CertificateError:
            raise
        except Exception as error:
            self._findings.append(crash_finding(error, self._strategy, "A step with seeds", is_ours=self._is_ours))
            return
        self._seed = seeds.seed
        for deviation in itertools.chain.from_iterable(comparison.deviations for comparison in comparisons):
            self._note(deviation)
        self._findings += of_seeded_steps(comparisons)

    def _broken(self, error: Exception, step: int, bounds: list[int]) -> Finding:
        """Name a step that ends with an error, for want of rows where others, in which all had some, do not."""
        crash = crash_finding(error, self._strategy, "A step", is_ours=self._is_ours)
        sizes = [stop - start for start, stop in itertools.pairwise(bounds)]
        if crash.code != "does-not-run" or 0 not in sizes or any(0 in rows for rows in self._rows) or not self._rows:
            return crash
        return dataclasses.replace(
            crash,
            code="empty-replica",
            what=f"A replica without examples ends the step with {type(error).__name__}: TensorFlow has operations "
            "that fail without examples, such as convolutions of oneDNN.",
            evidence=f"step {step}, {counted(bounds[-1], 'example')} split into {sizes}; steps in which all replicas "
            f"had examples did not fail; {crash.evidence}",
            fix=f"{crash.fix} Or drop the last batch (`drop_remainder=True`).",
        )

    def _note(self, deviation: Deviation) -> None:
        worst = self._worst.setdefault((deviation.part, deviation.name), deviation)
        if deviation is not worst:
            spread, apart = max(worst.spread, deviation.spread), worst.is_apart or deviation.is_apart
            worse = worst if worst.excess >= deviation.excess else deviation
            self._worst[deviation.part, deviation.name] = dataclasses.replace(worse, spread=spread, is_apart=apart)

    def _measure_drift(self, lockstep: Lockstep, start: list[Array]) -> None:
        """Train without taking over state in between, on replicas, on one device, and there with rows reordered."""
        self._drift = lockstep.train_freely(self._batches[: len(self._rows)], start)

    def _try_several_steps(self, lockstep: Lockstep) -> None:
        """Stock Keras loops over several steps in its own way, in which it may fail."""
        model = lockstep.many.model
        if self._is_ours or lockstep.many.num_replicas == 1 or model.steps_per_execution == 1:
            return
        repeated = tf.data.Dataset.from_tensors(self._batches[0]).repeat(model.steps_per_execution)
        try:
            model.train_function(iter(self._strategy.experimental_distribute_dataset(repeated)))
        except Exception as error:
            what = f"`fit` with steps_per_execution={model.steps_per_execution}"
            self._findings.append(crash_finding(error, self._strategy, what, is_ours=False))

    def certificate(self, allow: Collection[str]) -> Certificate:
        """Return what came of it."""
        unique = {finding.code: finding for finding in reversed(self._findings)}
        ordered = [finding for finding in self._findings if unique.get(finding.code) is finding]
        return Certificate(
            model=self._name,
            strategy=describe_strategy(self._strategy),
            num_steps=len(self._rows),
            rows=tuple(self._rows),
            deviations=tuple(self._worst.values()),
            draws=self._draws,
            findings=tuple(finding for finding in ordered if finding.code not in allow),
            allowed=tuple(finding for finding in ordered if finding.code in allow),
            drift=self._drift[0],
            drift_of_reordered=self._drift[1],
            seed=self._seed,
        )
