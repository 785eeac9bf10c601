"""Determine the role of a process in a search: the only one, the chief that proposes trials, or a worker."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from keras_dist_ext.errors import LaunchError

__all__ = ["ProcessRole", "process_role"]

_TUNER_ID, _IP, _PORT = "KERASTUNER_TUNER_ID", "KERASTUNER_ORACLE_IP", "KERASTUNER_ORACLE_PORT"
_START = "KERAS_DIST_EXT_SEARCH_START"  # how often this process was started, from 1; unset without our launcher


@dataclass(frozen=True)
class ProcessRole:
    """The role of a process in a search: the only process (all defaults), the chief, or a worker."""

    tuner_id: str = ""  # keras-tuner's: one that contains "chief" is the chief's; the workers of one trial share one
    address: str = ""  # where the chief's oracle listens, host:port; "" = this is the only process
    start: int = 0  # how often this process was started, from 1; 0 where our launcher does not start it
    worker_index: int = 0  # among the workers that run a trial together; worker 0 reports the results
    num_workers: int = 1  # that run a trial together

    @property
    def is_single(self) -> bool:
        """Whether this process searches by itself."""
        return not self.address

    @property
    def is_chief(self) -> bool:
        """Whether this process proposes trials for others, and keeps the results."""
        return "chief" in self.tuner_id

    @property
    def has_oracle(self) -> bool:
        """Whether the oracle that proposes trials is in this process."""
        return self.is_single or self.is_chief

    @property
    def reports(self) -> bool:
        """Whether this process writes the results of a trial; one of those that run it together does."""
        return self.worker_index == 0

    @property
    def is_managed(self) -> bool:
        """Whether our launcher started this process, and restarts it if it dies."""
        return self.start > 0

    @property
    def may_overwrite(self) -> bool:
        """Whether this process may empty the project's directory: of several, only the chief at its first start."""
        return self.is_single or (self.is_chief and self.start <= 1)

    def environ(self) -> dict[str, str]:
        """Return the environment variables of this role; TF_CONFIG is added where several workers share a trial."""
        ip, _, port = self.address.rpartition(":")
        return {_TUNER_ID: self.tuner_id, _IP: ip, _PORT: port, _START: str(self.start)}


def process_role(environ: Mapping[str, str] | None = None) -> ProcessRole:
    """Return the role of this process.

    The workers that run a trial together are those of its TF_CONFIG.

    Args:
        environ: the environment, ``os.environ`` if not given.

    Raises:
        LaunchError: keras-tuner's variables are not all set.
        ClusterError: TF_CONFIG describes no usable cluster.
    """
    environ = os.environ if environ is None else environ
    if _IP not in environ:
        return ProcessRole()
    missing = [name for name in (_TUNER_ID, _PORT) if name not in environ]
    if missing:
        raise LaunchError(
            f"{_IP} is set ({environ[_IP]}), but not {' and '.join(missing)}, so the role of this process in the "
            "search is unknown. Set all three, or start the search by `keras-dist-ext launch --tuner`."
        )
    worker_index, num_workers = _worker_position(environ)
    address, start = f"{environ[_IP]}:{environ[_PORT]}", int(environ.get(_START, 0))
    return ProcessRole(environ[_TUNER_ID], address, start, worker_index, num_workers)


def _worker_position(environ: Mapping[str, str]) -> tuple[int, int]:
    """Return the index of this worker among those that run a trial together, and their number."""
    if environ.get("TF_CONFIG", "").strip() in ("", "{}"):
        return 0, 1
    from keras_dist_ext.cluster.spec import tf_config_cluster

    cluster = tf_config_cluster(environ)
    if cluster.is_independent or cluster.task_type not in ("chief", "worker"):
        return 0, 1
    first = 0 if cluster.task_type == "chief" else len(cluster.chief)
    return first + cluster.task_index, cluster.num_workers
