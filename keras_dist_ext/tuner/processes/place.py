"""Say which process of a search this one is: the chief that proposes trials, or a worker that runs them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from keras_dist_ext.errors import LaunchError

__all__ = ["Place", "place_of"]

_TUNER_ID, _IP, _PORT = "KERASTUNER_TUNER_ID", "KERASTUNER_ORACLE_IP", "KERASTUNER_ORACLE_PORT"
_START = "KERAS_DIST_EXT_SEARCH_START"  # which start of this process it is, from 1; unset without our launcher


@dataclass(frozen=True)
class Place:
    """A process' part in a search over several processes."""

    tuner_id: str  # keras-tuner's: one that contains "chief" is the chief; the workers of one trial share one
    address: str  # where the chief's oracle listens, host:port
    start: int = 0  # which start of this process it is, from 1; 0 where no launcher of ours starts it
    member: int = 0  # of the workers that run a trial together; 0 reports what came of it
    num_members: int = 1

    @property
    def is_chief(self) -> bool:
        """Whether this process proposes trials and keeps the results."""
        return "chief" in self.tuner_id

    @property
    def is_launched(self) -> bool:
        """Whether a launcher of ours started this process, and starts it again if it dies."""
        return self.start > 0

    @property
    def may_overwrite(self) -> bool:
        """Whether this process may empty the project's directory: none but the chief when it first starts."""
        return self.is_chief and self.start <= 1

    def environ(self) -> dict[str, str]:
        """Return what tells a process that this is its place; TF_CONFIG comes on top where several share a trial."""
        ip, _, port = self.address.rpartition(":")
        return {_TUNER_ID: self.tuner_id, _IP: ip, _PORT: port, _START: str(self.start)}


def place_of(environ: Mapping[str, str] | None = None) -> Place | None:
    """Return this process' place, or None where it searches alone.

    The workers that run a trial together are those of its TF_CONFIG.

    Args:
        environ: the environment, ``os.environ`` if not given.

    Raises:
        LaunchError: keras-tuner's variables are not all set.
        ClusterError: TF_CONFIG describes no usable cluster.
    """
    environ = os.environ if environ is None else environ
    if _IP not in environ:
        return None
    missing = [name for name in (_TUNER_ID, _PORT) if name not in environ]
    if missing:
        raise LaunchError(
            f"{_IP} is set ({environ[_IP]}), but not {' and '.join(missing)}: this process does not know which one of "
            "the search it is. Set all three, or start the search by `keras-dist-ext launch --tuner`."
        )
    member, num_members = _membership(environ)
    address, start = f"{environ[_IP]}:{environ[_PORT]}", int(environ.get(_START, 0))
    return Place(environ[_TUNER_ID], address, start, member, num_members)


def _membership(environ: Mapping[str, str]) -> tuple[int, int]:
    if environ.get("TF_CONFIG", "").strip() in ("", "{}"):
        return 0, 1
    from keras_dist_ext.cluster.spec import tf_config_cluster

    cluster = tf_config_cluster(environ)
    if cluster.is_independent or cluster.task_type not in ("chief", "worker"):
        return 0, 1
    first = 0 if cluster.task_type == "chief" else len(cluster.chief)
    return first + cluster.task_index, cluster.num_workers
