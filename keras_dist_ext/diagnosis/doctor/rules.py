"""Say why a run is not faster and what to change: from timings and plain facts to findings.

    examination -> judge -> Report(findings, notes, ...)

Rules look at an ``Examination`` one by one, and know nothing of each other; what one finding explains is not said
twice. No findings means that nothing here is worth a change. Notes are no faults: they say what limits the run, or
what could not be looked at. That replicas share one physical CPU is such a note, since it is what logical devices are
for; complaints about missing speed-up are not made then.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from keras_dist_ext.diagnosis.doctor.callback_rules import slow_callbacks
from keras_dist_ext.diagnosis.doctor.dtype_rules import slow_dtypes
from keras_dist_ext.diagnosis.doctor.epoch_rules import between_epochs
from keras_dist_ext.diagnosis.doctor.examination import Estimate, Examination
from keras_dist_ext.diagnosis.doctor.map_loop_rules import map_loops
from keras_dist_ext.diagnosis.doctor.part_rules import PART_RULES
from keras_dist_ext.diagnosis.doctor.python_rules import python_in_step
from keras_dist_ext.diagnosis.doctor.replica_rules import REPLICA_RULES
from keras_dist_ext.diagnosis.doctor.report import Report
from keras_dist_ext.diagnosis.doctor.setting_rules import SETTING_RULES, shared_cpu
from keras_dist_ext.diagnosis.doctor.shape_rules import SHAPE_RULES, padding_of_stock
from keras_dist_ext.diagnosis.doctor.update_rules import long_updates
from keras_dist_ext.diagnosis.doctor.waiting_rules import WAITING_RULES
from keras_dist_ext.diagnosis.doctor.why_not import why_not
from keras_dist_ext.findings import Finding, worst_first

__all__ = ["judge"]


def judge(examination: Examination) -> Report:
    """Return what is to be said of a run.

    >>> from keras_dist_ext.diagnosis.doctor.examination import Setting
    >>> judge(Examination(Setting(strategy="mirrored"))).findings[0].code
    'mirrored-one-device'
    """
    found = [finding for rule in SETTING_RULES for finding in [rule(examination)] if finding is not None]
    times = examination.times
    if times is not None and times.blocks and times.num_steps and times.seconds > 0:
        for rule in (
            *WAITING_RULES,
            slow_callbacks,
            *REPLICA_RULES,
            long_updates,
            python_in_step,
            between_epochs,
            slow_dtypes,
            map_loops,
            *SHAPE_RULES,
            *PART_RULES,
        ):
            found += rule(examination)
    if examination.stock_steps is not None:
        found += [*examination.pipeline, *padding_of_stock(examination)]
    explained = {effect.code for cause in found for effect in found if _explains(cause, effect)}
    notes = [note for note in (shared_cpu(examination.setting), *_notes(examination)) if note is not None]
    findings = _claimed_once([finding for finding in found if finding.code not in explained], _watched(examination))
    return Report(
        findings=(*findings, *examination.mixing),
        notes=tuple(notes),
        examination=examination,
        speedup=_speedup(examination),
        why_not=why_not(examination, [finding.code for finding in findings]),
    )


# What is measured of a run is an effect of the first where that is found: it says nothing of its own.
_EXPLAINS: dict[str, tuple[str, ...]] = {
    "eager": ("host-bound", "batch-too-small", "sync-bound", "sequential-model", "straggler", "retracing"),
    "pinned-device": ("sync-bound", "straggler", "batch-too-small", "sequential-model"),
    "python-in-step": ("input-bound", "host-bound", "batch-too-small", "sync-bound", "sequential-model"),
    "summaries-in-step": ("input-bound", "host-bound", "batch-too-small", "sync-bound", "update-bound"),
    "retracing": ("host-bound", "slow-callback", "fetching-callback"),
    "slow-callback": ("host-bound",),
    "fetching-callback": ("host-bound",),
    "unequal-shards": ("straggler",),
    "update-bound": ("batch-too-small",),
    "straggler": ("sync-bound",),
    "sequential-model": ("batch-too-small",),
    "slow-start-of-epochs": ("short-epochs",),
    "costly-metric": ("batch-too-small",),
    "loop-in-step": ("batch-too-small", "sequential-model"),
    "mostly-padding": ("sequential-model",),
    "recompiling": ("batch-too-small", "sequential-model", "straggler", "sync-bound"),
    "outside-scope": ("mirrored-one-device", "idle-accelerators"),
    "cluster-ignored": ("mirrored-one-device",),
}


def _explains(cause: Finding, effect: Finding) -> bool:
    """Whether one finding makes another one nothing of its own."""
    if effect.code not in _EXPLAINS.get(cause.code, ()):
        return False
    if cause.code in (
        "slow-callback",
        "fetching-callback",
        "python-in-step",
        "summaries-in-step",
    ):
        # seconds of callbacks are not among those of the host
        return (effect.seconds or 0.0) <= (cause.seconds or 0.0)
    return True


def _watched(examination: Examination) -> float:
    return examination.seconds if examination.stock_steps is None else examination.stock_steps[1]


def _claimed_once(findings: list[Finding], seconds: float) -> list[Finding]:
    """Sort findings, and leave to each no more seconds than those before it have left of the run's."""
    left, claimed = seconds, []
    for finding in worst_first(findings):
        if finding.seconds is not None and finding.seconds > left:
            finding = dataclasses.replace(finding, seconds=left if left > _LEFT * finding.seconds else None)
        left -= finding.seconds or 0.0
        claimed.append(finding)
    return worst_first(claimed)


_LEFT = 0.1  # of what a finding claims: less is no figure of its


def _stock_note(examination: Examination) -> Finding:
    name, reason = examination.setting.model, examination.not_copied
    what = f"'{name}' is a model of stock Keras: what happens inside of its steps cannot be seen. "
    evidence = "judged are its strategy, scope, eager execution, threads, callbacks and data"
    if reason:
        fix = "Make it one of ours: swap the base class for `kde.Model` or `kde.Sequential`."
        return Finding("stock-model", f"{what}No copy could be made of it to watch: {reason}", evidence, fix)
    return Finding(
        "stock-model",
        f"{what}`kde.diagnose(model, data)` watches the steps of a copy; a model that `kde.adopt(model, strategy)` "
        "gives can be watched in `fit`.",
        evidence,
        "`kde.diagnose(model, data)`, or `model = kde.adopt(model, strategy)`, which has equal weights.",
    )


def _notes(examination: Examination) -> list[Finding]:
    """Say what limits the judgement."""
    setting, times, trials = examination.setting, examination.times, examination.trials
    notes = []
    if not setting.is_ours:
        notes.append(_stock_note(examination))
    elif times is None:
        notes.append(
            Finding(
                "too-few-steps",
                "Too few steps were made to say where their time goes; only the setting was judged.",
                "fewer than 8 steps after the first two executions, which trace; or no data",
                "Train for longer: more epochs, or `num_steps`.",
            )
        )
    others = None if times is None else times.others_cores
    if others is not None and others > max(0.5, 0.25 * setting.num_cores):
        notes.append(
            Finding(
                "busy-machine",
                f"Other processes took {others:.2g} of {setting.num_cores} cores meanwhile.",
                "processor time of the machine less that of this process, over the steps that were watched",
                "Measure again when they are done: what is lost to them is in all these figures.",
            )
        )
    if trials is not None and trials.skipped:
        listed = "; ".join(f"{name}: {why}" for name, why in trials.skipped.items())
        notes.append(
            Finding(
                "skipped-experiments",
                "Some experiments could not be made; what they would have shown is judged by timings alone.",
                listed,
                "Nothing, unless a finding below is in doubt.",
            )
        )
    return notes


def _speedup(examination: Examination) -> Estimate | None:
    """Return how many times as fast the run is as one replica doing all of its work; None where that is unknown."""
    times, trials, setting = examination.times, examination.trials, examination.setting
    if trials is not None and trials.has("as it was", "one device"):
        return trials.ratio("one device")
    if times is None or not times.blocks or setting.num_replicas < 2 or setting.shares_cpu:
        return None
    return Estimate.of([float(np.sum(b.compute_seconds)) * b.num_steps / max(b.seconds, 1e-9) for b in times.blocks])
