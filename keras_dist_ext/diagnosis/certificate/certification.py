"""Certify that a strategy trains a model as one device would, or name what makes it train otherwise."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Collection

import tensorflow as tf

from keras_dist_ext import arguments
from keras_dist_ext._keras import keras
from keras_dist_ext._keras.random import intercept_random_ops
from keras_dist_ext.aliases import Array, TensorNest
from keras_dist_ext.data.split import num_rows
from keras_dist_ext.diagnosis.certificate.certifiable import check_certifiable
from keras_dist_ext.diagnosis.certificate.certificate import Certificate
from keras_dist_ext.diagnosis.certificate.crashes import crash_finding
from keras_dist_ext.diagnosis.certificate.deviation_findings import of_deviations
from keras_dist_ext.diagnosis.certificate.drawn_numbers import Alike, checked_seeds, seeds_of_run
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

__all__ = ["certify"]


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
        seeds: ``ReplicaSeeds(seed, draws="global")``, as `fit` is given; for models of this package. One that is
            compiled with ``exact=True`` needs none: its steps are compared with what they draw by the seed 0.

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
    certification = _Certification(build_model, strategy, global_batches(data, steps, batch_size), checked_seeds(seeds))
    with without_retracing_warnings():
        certification.run()
    return certification.certificate(frozenset(allowed))


_MOST_STEPS = 100_000  # the batches of all are kept


class _Certification:
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
            is_exact = self._is_ours and lockstep.many.model.replica_runtime.exact
            self._seeds = seeds_of_run(self._seeds, is_exact=is_exact)
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
                        "The single-device reference produced NaN or Inf at step 1, so there is nothing to compare "
                        "with. Look at the data, the loss and the learning rate."
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
