"""Write each trial's logs into its own folder: what each replica did, hyperparameters and results."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Mapping

import tensorflow as tf
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams import api_pb2, summary, summary_v2
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from keras_dist_ext.monitoring.monitor import ReplicaMonitor

__all__ = ["TrialLogs"]


class TrialLogs:
    """The logs of a search, for ``tensorboard --logdir``.

    ``<log_dir>/trial_<id>`` has the runs of a trial's replicas, for the tab Replicas; ``result`` beside them has its
    hyperparameters and results, for the tab HParams, which takes everything below its own folder for metrics.

    Args:
        log_dir: of the search.
        several: whether a trial trains several models, each then in its own folder below the trial's.
    """

    def __init__(self, log_dir: str | os.PathLike[str], *, several: bool) -> None:
        self.log_dir = os.fspath(log_dir)
        self._several = several

    def folder(self, trial_id: str) -> str:
        """Return where a trial's logs are."""
        return f"{self.log_dir}/trial_{trial_id}"

    def monitor(self, trial_id: str, execution: int) -> ReplicaMonitor:
        """Return the callback that monitors the replicas of one execution of a trial."""
        name = f"execution_{execution}" if self._several else ""
        return ReplicaMonitor(self.folder(trial_id), experiment=name)

    def write(
        self, trial_id: str, values: Mapping[str, object], metrics: Mapping[str, float], *, step: int, completed: bool
    ) -> None:
        """Write a trial's hyperparameters and results.

        Args:
            trial_id: of the trial.
            values: of its hyperparameters.
            metrics: by name.
            step: the epoch that they are of.
            completed: False if it has failed.
        """
        shown = {name: value for name, value in values.items() if isinstance(value, bool | int | float | str)}
        status = api_pb2.STATUS_SUCCESS if completed else api_pb2.STATUS_FAILURE
        scalars = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in metrics.items()])
        try:
            writer = EventFileWriter(f"{self.folder(trial_id)}/result")
            try:
                now = time.time()
                for part in (summary_v2.hparams_pb(shown, trial_id=trial_id), scalars, summary.session_end_pb(status)):
                    # The plugin's Summary class is compiled elsewhere, from the same protocol.
                    message = Summary.FromString(part.SerializeToString())
                    writer.add_event(Event(wall_time=now, step=step, summary=message))
            finally:
                writer.close()
        except (OSError, tf.errors.OpError) as error:
            warnings.warn(
                f"The results of trial {trial_id} could not be logged to {self.folder(trial_id)} ({error}). The search "
                "continues, and keeps them in its project.",
                stacklevel=2,
            )
