"""Go on after a crash where a run was last saved, to the bits that it would have had without."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import operator
import os
import random
import re
import time
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from keras_dist_ext._keras.models import set_initial_epoch
from keras_dist_ext.errors import ResumeError
from keras_dist_ext.strategy.consistency import model_fingerprint
from keras_dist_ext.strategy.workers import Workers, workers_of
from keras_dist_ext.training.resume.background_writer import BackgroundWriter
from keras_dist_ext.training.resume.callback_state import CallbackStates
from keras_dist_ext.training.resume.checkpoints import CheckpointStore, unpack
from keras_dist_ext.training.resume.position import Position, is_deterministic
from keras_dist_ext.training.resume.preemption import Preemption
from keras_dist_ext.training.resume.run_state import Snapshot, capture, restore
from keras_dist_ext.training.run_callback import RunCallback
from keras_dist_ext.training.worker_sync import own_callback

__all__ = ["Resume"]

_VERSION = 1
_SAVE, _EXIT = 1, 1 << 20  # what a worker wishes after an execution; summed over all
_TIMES_COST = 100.0  # the end of an epoch is worth saving when training took so many times as long as saving does


class Resume(RunCallback):
    """Save a run as it goes; called again, in a new process, ``fit`` goes on after the last save.

        model.fit(train, epochs=90, callbacks=[kde.Resume("run-7")])

    Have the script start again, as it is, whenever it ends before its time. The run then ends with the bits of one that
    was never interrupted (on CPUs; elsewhere as far as two runs are equal there): weights, optimizers, metrics in the
    middle of an epoch, ``History``, seeds, and what other callbacks have counted or kept, such as EarlyStopping's best
    weights; see ``CallbackStates`` for how. What callbacks write to files is theirs: give ``CSVLogger`` its
    ``append=True``. ``tf.random`` ops in a step are the exception: TensorFlow keeps their place where nothing can save
    it.

    **Data** goes on with the batch after the last one. Its order follows the model's seed; without one it follows a
    seed that is drawn when the run begins. Arrays, ``tf.data``, PyDatasets whose batches depend on their number, and
    iterators with a method ``seek(batch)`` will do; a generator is refused. Arrays with other rows than before, and an
    order that depends on timing, are warned of.

    **Checkpoints** are copied from memory and written while training continues. One that is torn, corrupted or
    unfinished is named in a warning, and the one before it is used; a write that fails is a warning, and tried again.
    Nothing in them is pickled, so loading runs no code.

    **A run that is over** keeps its last save: ``fit``, called again, does nothing but return the full ``History``, and
    leaves the model as the run did. With more ``epochs`` it goes on, unless a callback has stopped it. So each run
    needs a directory of its own; a run that finds saves of another there, made since it began, saves no more.

    **Several workers**: give it to each. The chief writes and reads, and all go on from what it has read, callbacks
    too; make its directory one that outlives its machine. A run may go on with another number of replicas or workers:
    with the same global batches, and with ``virtual_replicas`` the same bits.

    Args:
        directory: where the saves of this run are, and nothing else.
        save_every: ``"epoch"`` (the end of each, but where saving would cost more than 1% of the time), a number of
            steps (batches), or a time such as ``"30s"``, ``"10min"``, ``"2h"`` or a ``datetime.timedelta``.
        keep: how many saves to keep, at least 1; with 1 there is none to fall back to.
        on_preemption: whether SIGTERM and SIGINT have the run saved after the step that is under way, and the process
            ended with exit code 0, also after the last step. A second signal does what it always did. During a
            validation, the end of the epoch is waited for.

    Attributes:
        resumed_from: the ``Position`` that the present run has gone on from; None where it began anew.

    Raises:
        ResumeError: when it is made, if an argument is not what it can be. When training begins: if the directory
            cannot be written to; if the save is of another model, optimizer, seed or data; says what differs.
        DataError: when training begins, if nobody can say where in its data a run is.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        save_every: int | str | datetime.timedelta = "epoch",
        keep: int = 3,
        *,
        on_preemption: bool = False,
    ) -> None:
        super().__init__()
        if not (isinstance(directory, str | os.PathLike) and os.fspath(directory)):
            raise ResumeError(
                f"directory is {directory!r}; it is the path of a directory for the saves of this run alone."
            )
        directory = os.fspath(directory)
        if "://" in directory:
            raise ResumeError(
                f"directory is {directory!r}; files cannot be renamed there in one go, so a save could be half there. "
                "Give a path, such as that of a mounted disk."
            )
        num_kept = _whole(keep)
        if num_kept < 1:
            raise ResumeError(f"keep is {keep!r}; it is how many saves to keep, at least 1.")
        self.directory = directory
        self.save_every = save_every
        self.on_preemption = on_preemption
        self.resumed_from: Position | None = None
        self._steps, self._seconds = _checked_interval(save_every)
        self._saves = CheckpointStore(directory, num_kept)
        self._writer = BackgroundWriter(directory)
        self._states = CallbackStates()
        self._preemption = Preemption()
        self._callbacks: Any = None  # of the run that is under way
        self._others: list[Any] = []
        self._workers: Workers | None = None
        self._loaded: tuple[dict[str, Any], dict[str, Any]] | None = None
        self._computes: dict[str, str] = {}
        self._epoch = 0
        self._used_at_save = 0
        self._saved_at = 0.0
        self._cost_seconds = 0.0
        self._num_saves = 0

    supports_multi_step = True

    def get_run_config(self) -> Mapping[str, Any]:
        """See ``RunCallback``."""
        return {"save_every": self.save_every, "on_preemption": self.on_preemption}

    def on_run_prepare(self, model: Any) -> None:
        """Refuse what cannot be exact."""
        if isinstance(model.distribute_strategy, tf.distribute.ParameterServerStrategy):
            raise ResumeError(
                f"'{model.name}' lives under ParameterServerStrategy, whose workers make steps of their own, each at "
                "its pace: there is no step after which a run could go on. Use BackupAndRestore there."
            )

    def on_run_end(self) -> None:
        """Finish the save that is being written."""
        self._preemption.forget()
        self._writer.close()
        if self._callbacks is not None:
            self._callbacks = self._loaded = None
            set_initial_epoch(self.model, None)
            self.model.replica_seeds.order_root = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Refuse models of stock Keras."""
        if self._callbacks is None:
            raise ResumeError(
                f"'{self.model.name}' is a {type(self.model).__name__} of stock Keras, or its callbacks were given as "
                "a CallbackList: where its data is cannot be seen. Derive it from kde.Model, or rebuild it by "
                "kde.adopt(model, strategy), and give callbacks as a list."
            )

    def on_test_begin(self, logs: Any = None) -> None:
        """Have evaluation go on with its data, too."""
        if self._callbacks is None or self.resumed_from is None:
            return
        feed, test_feed = self._callbacks.feed, self._callbacks.test_feed
        if test_feed is not feed and not test_feed.num_passes:
            test_feed.begin_after(self.resumed_from.num_tests, self.model.replica_seeds.order_of_evaluation())

    # Before and after all other callbacks

    def on_before_train_begin(self, callbacks: Any) -> None:
        """Find the save to go on from, before callbacks know that training begins."""
        alike = [callback.directory for callback in callbacks.callbacks if isinstance(callback, Resume)]
        if len(alike) > 1:
            raise ResumeError(
                f"fit was given {len(alike)} Resume callbacks ({', '.join(alike)}), and a run goes on from one save "
                "alone. Give fit one of them."
            )
        self._callbacks = callbacks
        self._others = [own_callback(c) for c in callbacks.callbacks if not isinstance(c, Resume)]
        self._workers = workers_of(self.model.distribute_strategy)
        self._computes = model_fingerprint(self.model)
        facts = callbacks.feed.data_facts  # refuses a generator
        if callbacks.feed.is_pipeline and not is_deterministic(callbacks.feed.given):
            warnings.warn(
                "The data comes in an order that depends on timing (deterministic=False), so a run that goes on in the "
                "middle of an epoch may use some examples twice and others not at all. Give the pipeline "
                "deterministic=True.",
                stacklevel=2,
            )
        content = self._newest()
        self._loaded = unpack(content) if content else None
        self._states.take_over(self._others, restore=self._loaded is not None)
        if self._loaded is None:
            order_root = self._agreed(_drawn_aside())
        else:
            order_root = _checked(self._loaded[0], self.directory, facts)["order_root"]
        self.model.replica_seeds.order_root = int(order_root)

    def on_after_train_begin(self) -> None:
        """Go on from the save, and begin to save."""
        self._states.begin(self._others)
        self.resumed_from = None
        feed = self._callbacks.feed
        if self._loaded is not None:
            facts = self._loaded[0]
            self.resumed_from = position = Position(**facts["position"])
            is_over = facts["stopped"] or position.epoch >= self.params["epochs"]
            set_initial_epoch(self.model, max(position.epoch, self.params["epochs"]) if is_over else position.epoch)
            if not is_over:
                state = _parts_of(self._loaded[1].get("iterator"))
                feed.seek(position, self.model.replica_seeds.order_of_pass, state)
            self._put_back(position)
            self._warn_of_other_rows(facts["data"].get("checksum"), feed.data_facts["checksum"])
        self._used_at_save = feed.num_batches_used
        self._saved_at = time.monotonic()
        self._num_saves = 0
        feed.plan = self._plan
        if self.on_preemption:
            self._preemption.watch()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Take note of the epoch."""
        self._epoch = epoch

    def on_after_epoch_begin(self) -> None:
        """In the middle of an epoch: undo what callbacks do when one begins, and that metrics were reset."""
        if self._loaded is not None:
            position = Position(**self._loaded[0]["position"])
            if position.step:
                self._put_back(position)
            self._loaded = None

    def on_execution_end(self) -> None:
        """Save if it is time, but for the end of an epoch, which is saved when its callbacks know of it."""
        feed = self._callbacks.feed
        if feed.agreed_wish and not feed.ends_epoch and self._save(self._epoch) and feed.agreed_wish >= _EXIT:
            self._exit()

    def on_after_epoch_end(self, epoch: int) -> None:
        """Save if it is time, and after the last epoch."""
        stopped = bool(self.model.stop_training)
        is_last = stopped or epoch + 1 >= self.params["epochs"]
        must_exit = self._must_exit()
        is_due = is_last or must_exit or bool(self._callbacks.feed.agreed_wish)
        if is_due or (not self._steps and not self._seconds and self._is_worth_it()):
            self._save(epoch + 1, stopped=stopped)
        if must_exit and not is_last:
            self._exit()

    def on_after_train_end(self) -> None:
        """Have the last save on the disk before ``fit`` returns, or the process ends."""
        if self._must_exit():
            self._exit()
        self._writer.wait()

    # When to save

    def _plan(self, num_steps: int) -> tuple[int, int]:
        """Say how many of some steps to make, and whether to save after them. Of several workers the chief decides."""
        if self._preemption.is_near:
            return num_steps, _EXIT
        if not self._is_chief:
            return num_steps, 0
        feed = self._callbacks.feed
        if self._steps:
            left = max(1, self._steps - (feed.num_batches_used - self._used_at_save))
            num_steps = min(num_steps, left) if feed.follows_clock else num_steps
            is_due = num_steps >= left
        else:
            is_due = bool(self._seconds) and time.monotonic() - self._saved_at >= self._seconds
        return num_steps, _SAVE if is_due and not self._writer.is_busy else 0

    def _is_worth_it(self) -> bool:
        seconds = time.monotonic() - self._saved_at
        is_worth_it = not self._num_saves or seconds >= _TIMES_COST * self._cost_seconds
        return bool(self._agreed(float(is_worth_it and not self._writer.is_busy)))

    def _must_exit(self) -> bool:
        """Whether this process, or that of another worker, was asked to end."""
        if not self.on_preemption:
            return False
        is_near = float(self._preemption.is_near)
        return bool(is_near if self._workers is None else self._workers.sum([is_near])[0])

    def _exit(self) -> None:
        """End this process, once the save is on the disk."""
        is_saved = self._agreed(float(self._writer.wait()))
        self._preemption.forget()
        raise SystemExit(0 if is_saved else f"The process was asked to end, and {self.directory} cannot be written to.")

    # Saving, and going on

    def _save(self, epoch: int, *, stopped: bool = False) -> bool:
        """Save; but where a worker has just asked to end training, the epoch ends here, and its end is saved."""
        began = time.perf_counter()
        seeds, feed, test_feed = self.model.replica_seeds, self._callbacks.feed, self._callbacks.test_feed
        num_tests = 0 if self.resumed_from is None else self.resumed_from.num_tests
        if test_feed is not feed:
            num_tests = test_feed.num_passes
        position = feed.position(epoch, order=seeds.num_passes, num_tests=num_tests)
        snapshot = capture(self.model, self._workers)
        if snapshot.stops and not stopped:
            return False
        if self._is_chief:
            self._write(position, snapshot, stopped)
        self._used_at_save = feed.num_batches_used
        self._saved_at = time.monotonic()
        self._cost_seconds = max(time.perf_counter() - began, 0.7 * self._cost_seconds)
        self._num_saves += 1
        return True

    def _write(self, position: Position, snapshot: Snapshot, stopped: bool) -> None:
        states, arrays = self._states.pack()
        iterator = self._callbacks.feed.iterator_state()
        if iterator is not None:
            arrays["iterator"] = _as_array(iterator)
        facts = {
            **snapshot.facts,
            "version": _VERSION,
            "model": self.model.name,
            "computes": self._computes,
            "position": dataclasses.asdict(position),
            "stopped": stopped,
            "order_root": self.model.replica_seeds.order_root,
            "data": self._callbacks.feed.data_facts,
            "callbacks": states,
        }
        self._writer.start(functools.partial(_write, self._saves, facts, {**snapshot.values, **arrays}))

    def _put_back(self, position: Position) -> None:
        assert self._loaded is not None
        facts, arrays = self._loaded
        restore(self.model, facts, arrays, self._workers, self._computes)
        self.model.replica_seeds.num_passes = position.order
        self._states.unpack(facts["callbacks"], arrays)

    def _warn_of_other_rows(self, was: int | None, now: int | None) -> None:
        if self._is_chief and None not in (was, now) and was != now:
            warnings.warn(
                f"The save in {self.directory} is of a run over arrays with as many rows, but not these: the run goes "
                "on and will not end as one that was never interrupted. Where the data is split or shuffled before "
                "fit, do it with a seed.",
                stacklevel=2,
            )

    # Workers

    @property
    def _is_chief(self) -> bool:
        return self._workers is None or self._workers.is_chief

    def _agreed(self, number: float) -> float:
        return number if self._workers is None else float(self._workers.broadcast([number])[0])

    def _newest(self) -> bytes:
        """Return the chief's newest save to all workers; empty where there is none."""
        failure: OSError | None = None
        content = b""
        if self._is_chief:
            try:
                self._saves.prepare()
                content = self._saves.newest() or b""
            except OSError as error:
                failure = error
        if self._agreed(float(failure is not None)):
            cause = f": {type(failure).__name__}: {failure}" if failure else " by the chief, which says why"
            raise ResumeError(
                f"{self.directory} cannot be written to{cause}. A run that is not saved could not go on after a crash. "
                "Give Resume a directory that can be written to."
            )
        return content if self._workers is None else self._workers.broadcast_bytes(content)


def _checked_interval(save_every: Any) -> tuple[int, float]:
    """Return the steps and the seconds between two saves; 0 for what does not count."""
    if _whole(save_every) >= 1:
        return _whole(save_every), 0.0
    if isinstance(save_every, datetime.timedelta) and save_every.total_seconds() > 0:
        return 0, save_every.total_seconds()
    if save_every == "epoch":
        return 0, 0.0
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(s|min|h)", save_every) if isinstance(save_every, str) else None
    if match is None or not float(match[1]):
        raise ResumeError(
            f"save_every is {save_every!r}; it is 'epoch', a number of steps such as 500, or a time such as '30s', "
            "'10min' or '2h'."
        )
    return 0, float(match[1]) * {"s": 1, "min": 60, "h": 3600}[match[2]]


def _whole(number: Any) -> int:
    """Return a whole number, of numpy too; 0 for anything else."""
    try:
        return 0 if isinstance(number, bool | np.bool_) else operator.index(number)
    except TypeError:
        return 0


def _drawn_aside() -> int:
    """Draw from Python's generator without moving it: the same after ``keras.utils.set_random_seed``."""
    state = random.getstate()
    try:
        return random.randrange(2**31)
    finally:
        random.setstate(state)


def _checked(facts: dict[str, Any], directory: str, data: dict[str, Any]) -> dict[str, Any]:
    """Return the facts of a save of a run over the same data.

    Raises:
        ResumeError: they are of another version, or of a run over other data.
    """
    if facts["version"] != _VERSION:
        raise ResumeError(
            f"{directory} holds saves of version {facts['version']}; this package reads version {_VERSION}. Finish the "
            "run with the package that began it, or give Resume another directory."
        )
    saved = facts["data"]
    differences = [
        f"{name}: {data.get(name)}, and was {saved[name]}"
        for name in saved
        if name != "checksum" and saved[name] != data.get(name)
    ]
    if differences:
        raise ResumeError(
            f"The save in {directory} is of a run over other data, so nobody knows where in this data to go on. "
            f"{'; '.join(differences)}. Give fit what it was given, or Resume another directory."
        )
    return facts


def _as_array(parts: list[bytes]) -> np.ndarray[Any, Any]:
    sizes = np.array([len(parts), *map(len, parts)], np.int64).tobytes()
    return np.frombuffer(sizes + b"".join(parts), np.uint8)


def _parts_of(array: np.ndarray[Any, Any] | None) -> list[bytes] | None:
    if array is None:
        return None
    data = array.tobytes()
    num_parts = int(np.frombuffer(data, np.int64, 1)[0])
    ends = 8 * (1 + num_parts) + np.cumsum(np.frombuffer(data, np.int64, num_parts, 8))
    return [data[begin:end] for begin, end in zip([8 * (1 + num_parts), *ends], ends, strict=False)]


def _write(saves: CheckpointStore, facts: dict[str, Any], values: dict[str, Any]) -> None:
    saves.write(facts, {name: v.numpy() if hasattr(v, "numpy") else v for name, v in values.items()})
