"""Plan for the model that a training script is about to train: run it up to its first `fit`."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Sequence

from keras_dist_ext.diagnosis.first_fit import run_to_first_fit
from keras_dist_ext.diagnosis.plan.plan import REPLICAS, checked_network, checked_replicas, plan
from keras_dist_ext.diagnosis.plan.plan_report import Plan
from keras_dist_ext.diagnosis.plan.step_costs import Devices
from keras_dist_ext.errors import MonitorError
from keras_dist_ext.monitoring.event_files import EventWriter
from keras_dist_ext.whole_files import write_whole

__all__ = ["plan_script"]

_KEPT = ("y", "sample_weight", "batch_size", "shuffle", "class_weight", "steps_per_epoch")  # of what `fit` was given


def plan_script(
    path: str,
    args: Sequence[str] = (),
    *,
    replicas: Sequence[int] = REPLICAS,
    devices: Devices = "own",
    network: str | None = None,
    num_steps: int = 60,
    json: str | os.PathLike[str] | None = None,
    log_dir: str | os.PathLike[str] | None = None,
    show: bool = True,
) -> Plan:
    """Plan for what a script trains in its first `fit`, with that data; what comes after is not run.

    Its callbacks are left out: they would save what a plan trains.

    Args:
        path: the script.
        args: its command line arguments.
        replicas: see ``kde.plan``.
        devices: see there.
        network: see there.
        num_steps: see there.
        json: a file for the plan.
        log_dir: where TensorBoard's Replicas tab finds it, as experiment "plan".
        show: whether to print it.

    Returns:
        The plan.

    Raises:
        MonitorError: there is no such script, it never calls `fit`, ``log_dir`` cannot be written, or an argument is
            invalid.
        Exception: whatever the script raises before.
    """
    if not pathlib.Path(path).is_file():
        raise MonitorError(f"There is no script {path}. Give the path of what you run by `python`.")
    numbers = checked_replicas(replicas)
    checked_network(network)  # before the script runs
    if log_dir is not None:
        EventWriter(log_dir).check("plan")
    fit = run_to_first_fit(path, args, "plan for", MonitorError)
    given = {name: fit.given[name] for name in _KEPT if fit.given.get(name) is not None}
    made = plan(
        fit.model,
        fit.given.get("x"),
        replicas=numbers,
        devices=devices,
        network=network,
        num_steps=num_steps,
        **given,
    )
    if fit.callbacks:
        names = ", ".join(sorted({type(callback).__name__ for callback in fit.callbacks}))
        left_out = f"The script's callbacks were left out, and with them the time that they take: {names}."
        made = dataclasses.replace(made, assumptions=(*made.assumptions, left_out))
    if show:
        made.show()
    if json is not None:
        write_whole(json, made.to_json() + "\n")
    if log_dir is not None:
        made.save(log_dir)
    return made
