"""What the steps of healthy runs took, measured once: the doctor's verdicts on them hang on no clock of today's."""

from __future__ import annotations

import dataclasses

import numpy as np

from keras_dist_ext.diagnosis.doctor.examination import Examination, Times
from keras_dist_ext.diagnosis.doctor.report import Report
from keras_dist_ext.diagnosis.doctor.rules import judge
from keras_dist_ext.findings import Finding
from keras_dist_ext.step.stats import ReplicaStats

__all__ = ["HEALTHY", "Healthy", "alarms", "judge_on_exact_times", "share"]


@dataclasses.dataclass(frozen=True)
class Healthy:
    """Milliseconds of the steps of a run, [R] where replicas differ.

    Measured on 2 cores, logical CPU devices, 2026-11-26.
    """

    input: float
    compute: tuple[float, ...]
    sync: tuple[float, ...]
    host: float  # between two executions
    steps: int  # an execution
    examples: int = 128  # a replica

    def times(self, num_steps: int = 80, examples: np.ndarray | None = None) -> Times:
        """Return so many steps of it.

        Args:
            num_steps: at least one a block, of which there are eight at most.
            examples: of each replica in all, [R], where a run had its own.
        """
        num_blocks = min(8, num_steps)
        ends = [num_steps * (i + 1) // num_blocks for i in range(num_blocks)]
        blocks = tuple(
            self._block(end - begin, examples, num_steps) for begin, end in zip([0, *ends], ends, strict=False)
        )
        return Times(blocks, num_executions=max(1, num_steps // self.steps))

    def _block(self, num_steps: int, examples: np.ndarray | None, of_steps: int) -> ReplicaStats:
        compute, sync = 1e-3 * np.array(self.compute), 1e-3 * np.array(self.sync)
        if examples is None:
            examples = np.full(len(compute), self.examples * of_steps)
        num_replicas = len(examples)
        compute, sync = np.resize(compute, num_replicas), np.resize(sync, num_replicas)
        input_seconds, host = 1e-3 * self.input, 1e-3 * self.host / self.steps
        step = input_seconds + float((compute + sync).max()) + host
        return ReplicaStats(
            kind="train",
            step=0,
            num_steps=num_steps,
            wall_time=0.0,
            seconds=num_steps * step,
            host_seconds=num_steps * host,
            loss=np.ones(num_replicas),
            examples=np.asarray(examples) * num_steps // of_steps,
            input_seconds=np.full(num_replicas, input_seconds),
            compute_seconds=compute,
            sync_seconds=sync,
        )


HEALTHY = {
    "perceptron": Healthy(0.058, (0.434, 0.603), (0.362, 0.163), 1.389, 26),
    "arrays": Healthy(0.146, (2.774, 3.322), (1.102, 0.586), 0.184, 8),
    "convolutions": Healthy(0.064, (1.431, 1.444), (0.089, 0.063), 0.736, 26, 32),
    "normalization and dropout": Healthy(0.054, (0.905, 0.730), (0.083, 0.246), 0.838, 26),
    "text": Healthy(0.074, (1.360, 1.503), (0.840, 0.683), 0.745, 26, 64),
    "recurrent": Healthy(0.056, (2.515, 2.883), (0.374, 0.017), 0.862, 19, 32),
    "autoencoder": Healthy(0.121, (0.889, 0.396), (0.134, 0.662), 1.013, 26),
    "tiny": Healthy(0.095, (0.092, 0.054), (0.057, 0.087), 0.690, 26),
    "a Python generator": Healthy(0.106, (0.542, 0.652), (0.359, 0.225), 0.822, 26),
    "batches that are split before": Healthy(0.856, (4.077, 4.583), (1.120, 0.678), 12.491, 13, 224),
    "one step an execution": Healthy(0.0, (5.818, 7.604), (2.228, 0.197), 2.319, 1),
    "one device": Healthy(0.039, (1.284,), (0.010,), 0.616, 26, 64),
}


def share(report: Report, finding: Finding) -> float:
    """How much of a run a finding claims, from 0 to 1: all of it where it rests on no clock."""
    times = report.examination.times
    return 1.0 if times is None or finding.seconds is None else finding.seconds / times.seconds


def alarms(report: Report, planted: str = "") -> list[str]:
    """The codes of findings; of those that rest on seconds, the planted one, and what claims most of the run.

    What others take of this machine looks like waiting, too. Whatever else the doctor would say is judged on exact
    times: of real runs by `judge_on_exact_times`, of steps that read a made-up clock in tests/doctor/test_doctor.py,
    and rule by rule in tests/unit/test_diagnose.py.
    """
    return [finding.code for finding in report.findings if finding.code == planted or share(report, finding) >= 0.6]


def judge_on_exact_times(examination: Examination) -> Report:
    """Judge a run as if its steps had taken what those of a healthy one do: what is left is no matter of the clock."""
    times = examination.times
    if times is None:
        return judge(examination)
    figures = HEALTHY["one device" if len(times.examples) == 1 else "perceptron"]
    exact = dataclasses.replace(
        figures.times(times.num_steps, times.examples),
        calls=tuple(dataclasses.replace(calls, seconds=0.0) for calls in times.calls),
        traces=tuple(dataclasses.replace(traces, seconds=0.0) for traces in times.traces),
        start_seconds=tuple(0.0 for _ in times.start_seconds),
    )
    return judge(dataclasses.replace(examination, times=exact, trials=None))
