"""What is done between epochs: timed apart from steps, and told with what to change where it takes long."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import pytest
from test_diagnose import HEALTHY, times

from keras_dist_ext.diagnosis.doctor.epoch_clock import EpochClock
from keras_dist_ext.diagnosis.doctor.examination import BetweenEpochs, Calls, Examination
from keras_dist_ext.diagnosis.doctor.host_clock import CallbackClock, TraceWatch
from keras_dist_ext.diagnosis.doctor.rules import judge
from keras_dist_ext.findings import Finding

TIMES = times()  # 80 steps of 20 ms, 1.6 seconds


def examined(seconds: float, validation: float = 0.0, *calls: Calls, num_times: int = 8) -> Examination:
    return Examination(HEALTHY, TIMES, between=BetweenEpochs(num_times, seconds, validation, calls))


def test_validation_that_takes_much_of_the_time_says_how_seldom_it_should_come() -> None:
    report = judge(examined(2.4, 2.4))
    (finding,) = report.findings
    assert finding.code == "long-validation"
    assert finding.evidence == "300 ms after each epoch: 60% of the time"
    assert finding.fix.startswith("`fit(..., validation_freq=14)`, which validates after every 14 epochs")
    assert finding.seconds == pytest.approx(2.4 * 13 / 14)
    assert report.shares["between epochs"] == pytest.approx(0.6)
    assert sum(report.shares.values()) == pytest.approx(1.0)
    (often,) = judge(examined(100.0, 100.0)).findings
    assert "validation_freq=20" in often.fix  # more seldom, nobody sees how training goes


def test_a_callback_that_is_slow_between_epochs_is_named() -> None:
    calls = Calls("Scores", "on_epoch_end", 0.8, 8)
    (finding,) = judge(examined(0.8, 0.0, calls)).findings
    assert (finding.code, finding.seconds) == ("slow-epoch-end", pytest.approx(0.8 * 4 / 5))
    assert finding.evidence == "Scores.on_epoch_end took 100 ms a call, 8 times: 33% of the time"
    assert finding.fix.startswith("Let it work after every 5 epochs, `if epoch % 5: return`; where it predicts")
    (saved,) = judge(examined(0.8, 0.0, Calls("ModelCheckpoint", "on_epoch_end", 0.8, 8))).findings
    assert saved.fix.startswith("Make epochs 5 times as long, `fit(dataset.repeat(5), epochs=...)`")
    board = Calls("TensorBoard", "on_epoch_end", 0.8, 8, argument="histogram_freq=1")
    (written,) = judge(examined(0.8, 0.0, board)).findings
    assert written.fix == "`TensorBoard(histogram_freq=5)` instead of histogram_freq=1, or 0, which writes none."


def test_the_clock_knows_after_how_many_epochs_histograms_are_written(tmp_path: Path) -> None:
    for frequency, argument in ((2, "histogram_freq=2"), (0, "")):
        board = keras.callbacks.TensorBoard(tmp_path, histogram_freq=frequency)
        board.set_model(keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)]))
        watching = CallbackClock([board], but=keras.callbacks.Callback(), hooks=("on_epoch_end",))
        board.on_epoch_end(0, {})
        (calls,) = watching.calls()
        assert calls.argument == argument


def test_epochs_of_few_steps_are_to_be_longer() -> None:
    (finding,) = judge(examined(3.2, num_times=20)).findings
    assert (finding.code, finding.seconds) == ("short-epochs", pytest.approx(3.2 * 17 / 18))
    assert finding.evidence == (
        "3.81 steps an epoch; between them, and until a first batch is there, pass 160 ms: 67% of the time"
    )
    assert finding.fix.startswith("Make epochs 18 times as long, and as many times fewer, `fit(dataset.repeat(18)")


KERAS_OWN = Calls("History", "on_epoch_end", 3.0, 20, is_keras_own=True)
QUICK = Calls("Quick", "on_epoch_end", 0.07, 8)  # less than 10 ms a call


@pytest.mark.parametrize(
    ("examination", "expected"),
    [
        (examined(1.55, 1.55), []),
        (examined(1.65, 1.65), ["long-validation"]),
        (examined(0.52, 0.0, Calls("C", "on_epoch_end", 0.52, 8)), []),
        (examined(0.55, 0.0, Calls("C", "on_epoch_end", 0.55, 8)), ["slow-epoch-end"]),
        (examined(1.55, num_times=20), []),
        (examined(1.65, num_times=20), ["short-epochs"]),
        (Examination(HEALTHY, times(1, step=0.001), between=BetweenEpochs(8, 0.07, 0.0, (QUICK,))), []),
        (Examination(HEALTHY, times(1, step=0.0002, compute=0.0001, input_=0.0, sync=1e-5, host=0.0),
                     between=BetweenEpochs(20, 0.039, 0.0)), []),  # less than 2 ms an epoch
        (examined(3.0, 0.0, KERAS_OWN, num_times=20), ["short-epochs"]),
        (Examination(HEALTHY, TIMES, between=BetweenEpochs(19, 3.2, 0.0)), []),  # few epochs
        (examined(0.0), []),
        (Examination(HEALTHY, None, between=BetweenEpochs(8, 9.0, 9.0)), []),
    ],
)  # fmt: skip
def test_what_takes_little_between_epochs_is_no_finding(examination: Examination, expected: list[str]) -> None:
    assert judge(examination).codes == expected


def test_the_headline_says_why_where_several_share_what_lies_between_epochs() -> None:
    calls = tuple(Calls(f"C{i}", "on_epoch_end", 0.5, 8) for i in range(3))
    report = judge(examined(3.6, 1.4, *calls))
    assert report.codes == []
    assert (
        "nothing is to be gained from the 69% between epochs: it is shared by validation, 175 ms a time, callbacks"
        in (report.headline)
    )


def test_no_two_findings_claim_the_same_seconds_nor_more_than_there_are() -> None:
    pipeline = (Finding("python-map", "", "", "", 9.0),)
    waiting = times(input_=0.012, compute=0.007)
    examination = Examination(HEALTHY, waiting, pipeline=pipeline, between=BetweenEpochs(8, 2.4, 2.39))
    findings = judge(examination).findings
    assert sum(finding.seconds or 0.0 for finding in findings) <= examination.seconds


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_clock_counts_from_the_last_step_of_an_epoch_to_the_next_epoch_but_the_first_time() -> None:
    clock = Clock()
    epochs = EpochClock([], but=keras.callbacks.Callback(), clock=clock)
    epochs.begin_epoch()
    for _ in range(3):
        epochs.end_execution()
        clock.now += 1.0  # a callback, before validation
        epochs.begin_validation()
        clock.now += 4.0
        epochs.end_validation()
        clock.now += 2.0
        epochs.end_epoch()
        clock.now += 0.5
        epochs.begin_epoch()
        clock.now += 100.0  # steps
    epochs.end_execution()
    clock.now += 1.0
    epochs.end_epoch()  # the last one, which no other follows
    epochs.stop()
    assert epochs.between() == BetweenEpochs(3, 2 * 7.5 + 1.0, 8.0)


def test_an_epoch_without_a_step_counts_nothing() -> None:
    clock = Clock()
    epochs = EpochClock([], but=keras.callbacks.Callback(), clock=clock)
    for _ in range(3):
        epochs.begin_epoch()
        epochs.end_validation()  # that never began
        epochs.end_epoch()
        clock.now += 1.0
    assert epochs.between() == BetweenEpochs(0, 0.0, 0.0)


def test_callbacks_are_timed_in_their_hooks_for_epochs_and_left_as_they_were() -> None:
    class Works(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.seen = epoch

    works, idle = Works(), keras.callbacks.Callback()
    epochs = EpochClock([works, idle], but=keras.callbacks.Callback())
    for epoch in range(6):
        epochs.end_execution()
        works.on_epoch_end(epoch)
        epochs.end_epoch()
        epochs.begin_epoch()
    (calls,) = epochs.between().calls
    assert (calls.name, calls.hook, calls.num_calls, calls.fetched) == ("Works", "on_epoch_end", 5, ())
    epochs.stop()
    assert "on_epoch_end" not in vars(works)
    assert works.seen == 5


def test_what_is_traced_between_epochs_is_not_the_next_steps() -> None:
    watch = TraceWatch()
    watch.stop()
    watch.execution = 3
    watch._note("step", {}, 1.0)
    watch.execution = 4
    watch._note("step", {}, 2.0)
    watch._note("predict", {}, 4.0)
    watch.forget_execution()
    assert [(trace.function, trace.seconds) for trace in watch.traces()] == [("step", 1.0)]
