"""Resume a run after a crash from its last checkpoint, bit for bit as if it had not been interrupted."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import os
import threading
import time
from collections.abc import Mapping

import tensorflow as tf

from keras_dist_ext import arguments
from keras_dist_ext._keras import keras
from keras_dist_ext._keras.models import set_initial_epoch
from keras_dist_ext._keras.random import random_seed
from keras_dist_ext.aliases import Array, JsonObject, Logs
from keras_dist_ext.cluster import heartbeat
from keras_dist_ext.errors import ResumeError
from keras_dist_ext.messages import warn
from keras_dist_ext.step.compression import sends_rounded
from keras_dist_ext.strategy.consistency import model_fingerprint
from keras_dist_ext.strategy.workers import Workers, workers_of
from keras_dist_ext.training.callbacks import RunCallbackList
from keras_dist_ext.training.epoch_data import EpochData
from keras_dist_ext.training.model import Model
from keras_dist_ext.training.resume.background_writer import BackgroundWriter
from keras_dist_ext.training.resume.callback_state import CallbackStates
from keras_dist_ext.training.resume.checkpoints import CheckpointStore, unpack
from keras_dist_ext.training.resume.contents import check_contents, iterator_array, iterator_parts
from keras_dist_ext.training.resume.position import Position, is_deterministic, replay_evaluations
from keras_dist_ext.training.resume.preemption import Preemption
from keras_dist_ext.training.resume.run_state import Snapshot, capture, peek_random, restore
from keras_dist_ext.training.resume.same_run import VERSION, check_same_run, check_version
from keras_dist_ext.training.resume.save_schedule import SaveSchedule
from keras_dist_ext.training.resume.save_wishes import EXIT, LEAVE, SaveWishes
from keras_dist_ext.training.resume.shared_checkpoints import newest_of_chief
from keras_dist_ext.training.resume.tests_before import TestsBefore
from keras_dist_ext.training.run_callback import RunCallback
from keras_dist_ext.training.worker_sync import own_callback

__all__ = ["Resume"]


class Resume(RunCallback):
    """Write checkpoints of a run; called again, in a new process, ``fit`` continues after the last one.

        model.fit(train, epochs=90, callbacks=[kde.Resume("run-7")])

    Restart the same script whenever it ends early. The run then ends bit for bit as if it had not been interrupted (on
    CPUs; elsewhere as far as two runs are equal there): weights, optimizers, metrics in the middle of an epoch,
    ``History``, seeds, and the state of other callbacks, such as EarlyStopping's best weights; see ``CallbackStates``
    for how. Files that callbacks write are not included: give ``CSVLogger`` its ``append=True``. ``tf.random`` ops in a
    step are an exception: TensorFlow keeps their state where it cannot be saved.

    **Data** continues with the batch after the last one. Its order follows the model's seed; without one it follows a
    seed that is drawn when the run begins. Supported are arrays, ``tf.data``, PyDatasets whose batches depend on their
    index, and iterators with a method ``seek(batch)``; a generator is refused. Arrays with other values than before,
    and an order that depends on timing, give a warning.

    **Checkpoints** are copied from memory and written while training continues. One that is truncated, corrupted or
    unfinished is named in a warning, and the one before it is used; a write that fails is a warning, and retried when
    the next one is due. Nothing in them is pickled, so loading runs no code.

    **A run that has ended** keeps its last checkpoint: ``fit``, called again, only returns the full ``History``, and
    leaves the model as the run did. With more ``epochs`` it continues, unless a callback has stopped it. So each run
    needs its own directory; a run that finds newer checkpoints of another run there stops writing its own.

    **Several workers**: give it to each. The chief writes and reads, and all workers resume from what it has read,
    callbacks too; use a directory that outlives the chief's machine. A run may resume on another number of replicas or
    workers: with the same global batches, and with ``virtual_replicas`` bit for bit.

    Args:
        directory: for the checkpoints of this run, and nothing else.
        save_every: ``"epoch"`` (the end of each, unless writing would take more than 1% of the time), a number of steps
            (batches), or a time such as ``"30s"``, ``"10min"``, ``"2h"`` or a ``datetime.timedelta``.
        keep: how many checkpoints to keep, at least 1; with 1 there is no earlier one to fall back to.
        on_preemption: whether SIGTERM and SIGINT write a checkpoint after the present step, and end the process with
            exit code 0, also after the last step. A second signal has its previous effect. During validation, the end
            of the epoch is awaited.

    Attributes:
        resumed_from: the ``Position`` from which the present run has resumed; None if it started from the beginning.

    Raises:
        ResumeError: in the constructor, if an argument is invalid. When training begins: if the directory cannot be
            written to; if the checkpoint is of another model, optimizer, seed or data; says what differs.
        DataError: when training begins, if a run cannot resume in the middle of this data.
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
        wanted = "the path of a directory for the checkpoints of this run"
        directory = arguments.path("directory", directory, wanted=wanted, error=ResumeError)
        if "://" in directory:
            raise ResumeError(
                f"directory is {directory!r}; files cannot be renamed atomically there, so a checkpoint could be "
                "incomplete. Give a path, such as that of a mounted disk."
            )
        num_kept = arguments.integer("keep", keep, least=1, error=ResumeError)
        self.directory = directory
        self.save_every = save_every
        self.on_preemption = arguments.flag("on_preemption", on_preemption, error=ResumeError)
        self.resumed_from: Position | None = None
        self._schedule = SaveSchedule(save_every)
        try:
            self._checkpoints = CheckpointStore(directory, num_kept)
        except OSError as error:
            raise ResumeError(
                f"directory={directory!r} is relative to the working directory, which is not available: {error}. Give "
                "an absolute path."
            ) from error
        self._writer = BackgroundWriter(directory, self._checkpoints.outlook)
        self._states = CallbackStates()
        self._preemption = Preemption()
        self._callbacks: RunCallbackList | None = None  # of the present run
        self._others: list[keras.callbacks.Callback] = []
        self._workers: Workers | None = None
        self._wishes = self._wishes_of(None)
        self._loaded: tuple[JsonObject, dict[str, Array]] | None = None
        self._fingerprint: dict[str, str] = {}
        self._random_seed: int | None = None  # of keras.utils.set_random_seed, when the run began
        self._epoch = 0
        self._tests_before: TestsBefore | None = None

    supports_multi_step = True

    def get_run_config(self) -> Mapping[str, object]:
        """See ``RunCallback``."""
        return {"save_every": self.save_every, "on_preemption": self.on_preemption}

    def on_run_prepare(self, model: Model) -> None:
        """Refuse what cannot be resumed exactly."""
        if isinstance(model.distribute_strategy, tf.distribute.ParameterServerStrategy):
            raise ResumeError(
                f"'{model.name}' lives under ParameterServerStrategy, whose workers run their steps asynchronously: "
                "there is no step from which a run could resume. Use BackupAndRestore there."
            )

    def on_run_end(self) -> None:
        """Finish the checkpoint that is being written."""
        self._preemption.uninstall()
        heartbeat.can_leave(False)
        self._writer.close()
        if self._callbacks is not None:
            self._callbacks = self._loaded = None
            set_initial_epoch(self.model, None)
            self.model.replica_seeds.order_root = None

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Refuse models of stock Keras."""
        if self._callbacks is None:
            raise ResumeError(
                f"'{self.model.name}' is a {type(self.model).__name__} of stock Keras, or its callbacks were given as "
                "a CallbackList, so the position in its data is unknown. Derive it from kde.Model, or rebuild it by "
                "kde.adopt(model, strategy), and give callbacks as a list."
            )

    def on_test_begin(self, logs: Logs | None = None) -> None:
        """Let evaluation continue with its data, too."""
        if self._callbacks is None or self.resumed_from is None:
            return
        data, test_data = self._callbacks.data, self._callbacks.test_data
        if test_data is not data and not test_data.dataset.num_passes:
            num_tests, order = self.resumed_from.num_tests, self.model.replica_seeds.order_of_evaluation()
            replay_evaluations(test_data.data_adapter, num_tests)
            if self._tests_before is not None and self._tests_before.are_replayed:
                test_data.dataset.num_passes = num_tests
            else:
                test_data.passes.begin_after(num_tests, order, num_tests * (test_data.steps_per_epoch or 0))

    # Before and after all other callbacks

    def on_before_train_begin(self, callbacks: RunCallbackList) -> None:
        """Find the checkpoint to resume from, before `on_train_begin` of any callback."""
        directories = [callback.directory for callback in callbacks.callbacks if isinstance(callback, Resume)]
        if len(directories) > 1:
            raise ResumeError(
                f"Only one Resume callback is allowed, and fit was given {len(directories)} "
                f"({', '.join(directories)}). Give fit one of them."
            )
        self._callbacks = callbacks
        self._others = [own_callback(c) for c in callbacks.callbacks if not isinstance(c, Resume)]
        self._workers = workers_of(self.model.distribute_strategy)
        self._wishes = self._wishes_of(self._workers)
        self._fingerprint = model_fingerprint(self.model)
        data = callbacks.data.dataset.facts  # refuses a generator
        if callbacks.data.dataset.is_pipeline and not is_deterministic(callbacks.data.dataset.given):
            warn(
                "The order of the data depends on timing (deterministic=False), so a run that resumes in the middle of "
                "an epoch may use some examples twice and others not at all. Give the pipeline deterministic=True."
            )
        if sends_rounded(self.model.distribute_strategy, self.model.replica_runtime.compression):
            warn(
                "gradient_compression keeps on each replica what rounding has left of its gradients, and checkpoints "
                "do not hold it: a run that resumes continues without, and differs by the rounding of a step from one "
                "that was not interrupted. Compile without gradient_compression if the bits are to be the same."
            )
        content = newest_of_chief(self._checkpoints, self._workers, self.directory)
        self._loaded = unpack(content) if content else None
        seed = random_seed()
        chief_seed = int(self._from_chief(-1.0 if seed is None else float(seed)))
        self._random_seed = None if chief_seed < 0 else chief_seed
        self._states.prepare(self._others, reset=self._loaded is not None)
        if self._loaded is None:
            order_root = self._from_chief(peek_random())
        else:
            check_version(self._loaded[0], self.directory)
            check_contents(*self._loaded, self._states.check, self.directory)
            check_same_run(self._loaded[0], data, self._random_seed, self.directory)
            order_root = self._loaded[0]["order_root"]
        self.model.replica_seeds.order_root = int(order_root)

    def on_after_train_begin(self) -> None:
        """Resume from the checkpoint, and start to write checkpoints."""
        self._states.begin(self._others)
        self.resumed_from = self._tests_before = None
        assert self._callbacks is not None
        data = self._callbacks.data
        if self._loaded is not None:
            metadata = self._loaded[0]
            self.resumed_from = position = Position(**metadata["position"])
            self._callbacks.evaluation_passes.num_before = position.num_tests
            is_over = metadata["stopped"] or position.epoch >= self.params["epochs"]
            set_initial_epoch(self.model, max(position.epoch, self.params["epochs"]) if is_over else position.epoch)
            if not is_over:
                state = iterator_parts(self._loaded[1].get("iterator"))
                seeds, strategy = self.model.replica_seeds, self.model.distribute_strategy
                self._tests_before = TestsBefore(self._callbacks.validation, position, strategy, seeds)
                data.seek(position, state, self._tests_before)
            self._restore(position)
            self._warn_of_other_arrays(metadata["data"].get("checksum"), data.dataset.facts["checksum"])
        self._schedule.begin(data.num_batches_used)
        data.planner.wishes = self._wishes
        if self.on_preemption:
            self._preemption.install()
        heartbeat.can_leave(threading.current_thread() is threading.main_thread())  # by SystemExit

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Remember the epoch."""
        self._epoch = epoch

    def on_after_epoch_begin(self) -> None:
        """In the middle of an epoch, restore again what callbacks and metrics reset when one begins."""
        if self._loaded is not None:
            position = Position(**self._loaded[0]["position"])
            if position.step:
                self._restore(position)
            self._loaded = None

    def on_execution_end(self) -> None:
        """Write a checkpoint if it is due; at the end of an epoch, `on_after_epoch_end` does."""
        data = self._data
        wish = data.planner.agreed_wish
        if wish and not data.ends_epoch and self._save(self._epoch) and wish >= LEAVE:
            self._end(wish)

    def on_after_epoch_end(self, epoch: int) -> None:
        """Write a checkpoint if it is due, and after the last epoch."""
        stopped = bool(self.model.stop_training)
        is_last = stopped or epoch + 1 >= self.params["epochs"]
        wish = self._wishes.after_epoch(self._data.planner.agreed_wish, is_last=is_last)
        is_saved = bool(is_last or wish) and self._save(epoch + 1, stopped=stopped)
        if not is_last and (wish >= EXIT or (wish >= LEAVE and is_saved)):
            self._end(wish)

    def on_after_train_end(self) -> None:
        """Wait until the last checkpoint is on the disk, before ``fit`` returns or the process exits."""
        if self._wishes.must_exit():
            self._end(EXIT)
        self._writer.wait()

    @property
    def _data(self) -> EpochData:
        assert self._callbacks is not None
        return self._callbacks.data

    def _wishes_of(self, workers: Workers | None) -> SaveWishes:
        preemption = self._preemption if self.on_preemption else None
        return SaveWishes(self._schedule, self._writer, preemption, workers)

    def _end(self, wish: int) -> None:
        """End this process when the checkpoint is on the disk, as it was asked to, or as an elastic launch wishes."""
        is_saved = self._from_chief(float(self._writer.wait()))
        if wish < EXIT and not is_saved:
            return  # who would leave now would lose steps
        if wish < EXIT:
            heartbeat.leaves()
        self._preemption.uninstall()
        raise SystemExit(
            0 if is_saved else f"The process was asked to exit, and {self.directory} cannot be written to."
        )

    # Saving and resuming

    def _save(self, epoch: int, *, stopped: bool = False) -> bool:
        """Write a checkpoint, except where a worker has just stopped training: then the end of the epoch is saved."""
        began = time.perf_counter()
        data = self._data
        position = data.position(epoch)
        snapshot = capture(self.model, self._workers)
        if snapshot.stops and not stopped:
            return False
        if self._is_chief:
            self._write(position, snapshot, stopped)
        self._schedule.note_save(data.num_batches_used, began)
        return True

    def _write(self, position: Position, snapshot: Snapshot, stopped: bool) -> None:
        states, arrays = self._states.pack()
        iterator = self._data.iterator_state()
        if iterator is not None:
            arrays["iterator"] = iterator_array(iterator)
        metadata = {
            **snapshot.metadata,
            "version": VERSION,
            "model": self.model.name,
            "fingerprint": self._fingerprint,
            "position": dataclasses.asdict(position),
            "stopped": stopped,
            "random_seed": self._random_seed,
            "order_root": self.model.replica_seeds.order_root,
            "data": self._data.dataset.facts,
            "callbacks": states,
        }
        self._writer.start(functools.partial(_write, self._checkpoints, metadata, {**snapshot.values, **arrays}))

    def _restore(self, position: Position) -> None:
        assert self._loaded is not None
        metadata, arrays = self._loaded
        restore(self.model, metadata, arrays, self._workers, self._fingerprint)
        self.model.replica_seeds.num_passes = position.order
        self._states.unpack(metadata["callbacks"], arrays)

    def _warn_of_other_arrays(self, was: int | None, now: int | None) -> None:
        if self._is_chief and None not in (was, now) and was != now:
            warn(
                f"The checkpoint in {self.directory} is of a run over other arrays of the same length: the run "
                "continues, but will not end like one that was not interrupted. If the data is split or shuffled "
                "before fit, do so with a seed."
            )

    # Workers

    @property
    def _is_chief(self) -> bool:
        return self._workers is None or self._workers.is_chief

    def _from_chief(self, number: float) -> float:
        return number if self._workers is None else float(self._workers.broadcast([number])[0])


def _write(checkpoints: CheckpointStore, metadata: JsonObject, values: dict[str, Array]) -> None:
    checkpoints.write(metadata, {name: v.numpy() if hasattr(v, "numpy") else v for name, v in values.items()})
