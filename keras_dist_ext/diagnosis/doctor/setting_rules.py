"""Judge the setting of a run, before any clock is read: strategy, devices, scope, eager execution, threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from keras_dist_ext.diagnosis.doctor.examination import Examination, Setting
from keras_dist_ext.findings import Finding
from keras_dist_ext.messages import counted

__all__ = ["SETTING_RULES", "shared_cpu"]

Rule = Callable[[Examination], Finding | None]

_OVERSUBSCRIBED = 2.0  # threads a core; TensorFlow's own default is 1 for each process
_ELSEWHERE_SHARE = 0.15  # of a replica's heavy ops


def _one_replica(examination: Examination) -> Finding | None:
    """MirroredStrategy with one device."""
    setting = examination.setting
    if setting.strategy != "mirrored" or setting.num_replicas != 1 or _idle(setting):
        return None
    return Finding(
        "mirrored-one-device",
        "MirroredStrategy has one device, so nothing is parallel: its machinery costs time and gains none.",
        f"its only replica is on {setting.devices[0]}; this process has no other accelerator",
        "Let `kde.pick_strategy()` choose by the devices at hand; or give all of them, as in "
        '`kde.pick_strategy("mirrored", devices=["GPU:0", "GPU:1"])`.',
    )


def _idle_accelerators(examination: Examination) -> Finding | None:
    """GPUs or TPUs that no replica is on."""
    setting = examination.setting
    idle = _idle(setting)
    if not idle or setting.strategy in ("parameter_server", "tpu"):
        return None
    used = [device for device in setting.devices if not device.startswith("CPU")]
    what = f"{', '.join(idle)} {'is' if len(idle) == 1 else 'are'} idle: "
    what += f"the model trains on {', '.join(setting.devices)} alone."
    return Finding(
        "idle-accelerators",
        what,
        f"{counted(len(setting.accelerators), 'accelerator')} in this process, {len(used)} with a replica, under "
        f"{_name(setting)}",
        "Build and compile the model under all of them: `strategy = kde.pick_strategy().strategy`, then "
        "`with strategy.scope(): ...`; or hide those that are not yours by CUDA_VISIBLE_DEVICES.",
        _lost(examination, len(used) / len(setting.accelerators)),
    )


def _idle(setting: Setting) -> list[str]:
    return [device for device in setting.accelerators if device not in setting.devices]


def _cluster_ignored(examination: Examination) -> Finding | None:
    """A strategy of one process, where there is a cluster."""
    setting = examination.setting
    workers = setting.num_listed_workers
    if workers < 2 or setting.num_workers > 1 or setting.strategy in ("multi_worker", "parameter_server", "tpu"):
        return None
    return Finding(
        "cluster-ignored",
        f"{setting.cluster_source} lists {workers} workers, but {_name(setting)} trains in one process: each worker "
        "would train by itself, on all the data.",
        f"{setting.cluster_source} with {workers} workers; {counted(setting.num_replicas, 'replica')}, all of this "
        "process",
        'Take `strategy = kde.pick_strategy("multi_worker").strategy`, before anything else uses TensorFlow; or unset '
        f"{setting.cluster_source} where one process is meant.",
        _lost(examination, 1 / workers),
    )


def _no_cluster(examination: Examination) -> Finding | None:
    """MultiWorkerMirroredStrategy of one worker."""
    setting = examination.setting
    if setting.strategy != "multi_worker" or setting.num_workers > 1:
        return None
    seen = "TF_CONFIG is not set" if not setting.num_listed_workers else f"{setting.cluster_source} lists one worker"
    return Finding(
        "no-cluster",
        "MultiWorkerMirroredStrategy has no other workers, so it trains in this process alone.",
        f"{seen}; {counted(setting.num_replicas, 'replica')}",
        "Start the workers: `keras-dist-ext launch --workers 2 train.py`, or set TF_CONFIG on each machine. For the "
        'devices of one process take `kde.pick_strategy("mirrored")`.',
    )


def _outside_scope(examination: Examination) -> Finding | None:
    """A model, or parts of it, made elsewhere."""
    setting = examination.setting
    if not setting.outside:
        return None
    return Finding(
        "outside-scope",
        "The model, or a part of it, was made outside of the strategy's scope: it trains on one device, or fails.",
        setting.outside,
        "Build and compile it inside `with strategy.scope():`; or rebuild it there, with equal weights: "
        "`model = kde.adopt(model, strategy)`.",
        _lost(examination, 1 / setting.num_replicas_meant) if setting.num_replicas_meant > 1 else None,
    )


def _eager(examination: Examination) -> Finding | None:
    """Steps that Python makes op by op."""
    setting, trials = examination.setting, examination.trials
    if not setting.runs_eagerly:
        return None
    seconds, measured = None, ""
    if trials is not None and trials.has("as it was", "compiled") and examination.times is not None:
        saved = trials.saved("compiled")
        measured = f"; compiled, a step took {saved.show(' ms', 1e3)} less"
        seconds = max(0.0, saved.value) * examination.times.num_steps
    return Finding(
        "eager",
        "Steps run eagerly: Python makes every op of every replica, one replica after the other.",
        f"{setting.eager_because}{measured}",
        "Compile without it, `model.compile(..., run_eagerly=False)`, and call "
        "`tf.config.run_functions_eagerly(False)`; for debugging use `tf.print` and `tf.debugging`.",
        seconds,
    )


def _pinned(examination: Examination) -> Finding | None:
    """Heavy work of replicas on a device that is not theirs."""
    setting = examination.setting
    if not setting.placed_elsewhere or setting.elsewhere_share < _ELSEWHERE_SHARE:
        return None
    times = examination.times
    seconds = None
    if times is not None and setting.num_replicas > 1 and not setting.shares_cpu:
        seconds = times.compute() * times.num_steps * setting.elsewhere_share * (1 - 1 / setting.num_replicas)
    devices = sorted({placed.device for placed in setting.placed_elsewhere})
    layers = list(dict.fromkeys(placed.layer for placed in setting.placed_elsewhere))
    replicas = sorted({replica for placed in setting.placed_elsewhere for replica in placed.replicas})
    shown = ", ".join(layers[:5]) + (f" and {len(layers) - 5} more" if len(layers) > 5 else "")
    return Finding(
        "pinned-device",
        f"Work of {'replica' if len(replicas) == 1 else 'replicas'} {', '.join(map(str, replicas))} is pinned to "
        f"{', '.join(devices)}, where it waits for that of the other replicas.",
        f"{setting.elsewhere_share:.0%} of the heavy ops of a replica (matrix products, convolutions, loops) are "
        f"placed on a device that is not its own: {shown}",
        f"Remove `tf.device({devices[0]!r})` around these layers: the strategy places each replica's ops.",
        seconds,
    )


def _oversubscribed(examination: Examination) -> Finding | None:
    """More threads than cores."""
    setting = examination.setting
    if not all(device.startswith("CPU") for device in setting.devices):
        return None
    threads = setting.num_threads or setting.num_cores
    total = threads * setting.num_workers_here
    if total <= _OVERSUBSCRIBED * setting.num_cores:
        return None
    share = max(1, setting.num_cores // setting.num_workers_here)
    each = f" in each of {setting.num_workers_here} workers on this machine" if setting.num_workers_here > 1 else ""
    return Finding(
        "oversubscribed-threads",
        f"{total} threads compute on {counted(setting.num_cores, 'core')}: they take turns, and each turn costs.",
        f"{counted(threads, 'thread')} within an op{each}"
        + ("" if setting.num_threads else ", which is TensorFlow's default: one a core"),
        f"Before anything else uses TensorFlow: `tf.config.threading.set_intra_op_parallelism_threads({share})`; or "
        f"`keras-dist-ext launch --threads {share} ...`.",
    )


SETTING_RULES: Sequence[Rule] = (
    _outside_scope,
    _cluster_ignored,
    _no_cluster,
    _idle_accelerators,
    _one_replica,
    _eager,
    _pinned,
    _oversubscribed,
)


def shared_cpu(setting: Setting) -> Finding | None:
    """Say that no speed-up is possible here. A note, not a fault: it is what logical devices are for."""
    if not setting.shares_cpu:
        return None
    return Finding(
        "shared-cpu",
        f"The {len(setting.devices)} replicas are logical devices of one physical CPU: they share its "
        f"{counted(setting.num_cores, 'core')}, so no speed-up over one replica is possible here.",
        f"{', '.join(setting.devices)}; one replica's ops use all cores as well",
        "Nothing, where this is to try things. To be faster, give each replica a GPU, or a machine of its own: "
        "`keras-dist-ext launch`.",
    )


def _name(setting: Setting) -> str:
    names = {
        "none": "no strategy",
        "one_device": "OneDeviceStrategy",
        "mirrored": "MirroredStrategy",
        "multi_worker": "MultiWorkerMirroredStrategy",
    }
    return names.get(setting.strategy, setting.strategy)


def _lost(examination: Examination, used: float) -> float | None:
    """Return the seconds that a run on all devices would have saved at best, if only this share of them was used."""
    if examination.times is None or examination.setting.shares_cpu:
        return None
    return examination.times.seconds * (1 - used)
