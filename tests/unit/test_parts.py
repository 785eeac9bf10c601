"""Single parts of a step, metrics and layers that loop, are told where they cost much."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import pytest
from test_diagnose import HEALTHY, times

from keras_dist_ext.diagnosis.doctor.examination import Examination, Largest
from keras_dist_ext.diagnosis.doctor.layout_speed import measure_layout
from keras_dist_ext.diagnosis.doctor.parts import Layout, Looped, Metered, OneHot, Parts, RecurrentDropout, Summaries
from keras_dist_ext.diagnosis.doctor.rules import judge
from keras_dist_ext.diagnosis.doctor.trials import Trials


def taking(**milliseconds: float) -> Trials:
    return Trials({name.replace("_", " "): (1e-3 * each,) * 5 for name, each in milliseconds.items()})


METRIC = Metered(
    "auc", "AUC", taking(as_it_was=20, without=12), "num_thresholds=200000", "num_thresholds=200"
)  # 8 of 20 ms
LOOP = Looped("scan", taking(as_it_was=20, without=5, compiled=10), 600, 2e-5)


def test_a_costly_metric_names_itself_and_the_argument_that_makes_it_so() -> None:
    (finding,) = judge(Examination(HEALTHY, times(), parts=Parts(metrics=(METRIC,)))).findings
    assert (finding.code, finding.seconds) == ("costly-metric", pytest.approx(80 * 0.008))
    assert finding.what == "The metric AUC(num_thresholds=200000) takes much of each step."
    assert finding.evidence == "without it a step took 8 ms (8 to 8) less, of 20 ms, on the same batch"
    assert finding.fix.startswith("`keras.metrics.AUC(num_thresholds=200)`, the default; or leave it out of `compile`")


def test_a_costly_metric_of_ones_own_is_told_by_its_name() -> None:
    own = dataclasses.replace(METRIC, name="pairs", kind="Pairs", argument="", better="")
    (finding,) = judge(Examination(HEALTHY, times(), parts=Parts(metrics=(own,)))).findings
    assert finding.what == "The metric 'pairs' (Pairs) takes much of each step."
    assert finding.fix.startswith("Make it cheaper, or leave it out of `compile`, or of a loop's step, and")


@pytest.mark.parametrize(
    ("trials", "given", "is_found"),
    [
        (taking(as_it_was=20, without=14.9), {}, True),
        (taking(as_it_was=20, without=15.1), {}, False),  # less than a quarter of the time
        (taking(as_it_was=1, without=0.55), {"step": 0.001, "compute": 0.0009, "input_": 0, "sync": 0}, False),
        (Trials(skipped={"without": "it fails"}), {}, False),
        (Trials({"as it was": (0.02, 0.01, 0.02), "without": (0.01, 0.02, 0.01)}), {}, False),  # it varies
    ],
)
def test_a_metric_that_costs_little_is_no_finding(trials: Trials, given: Any, is_found: bool) -> None:
    examination = Examination(
        HEALTHY, times(**given), parts=Parts(metrics=(dataclasses.replace(METRIC, trials=trials),))
    )
    assert ("costly-metric" in judge(examination).codes) == is_found


@pytest.mark.parametrize(("milliseconds", "is_found"), [(0, True), (14, False)])
def test_what_metrics_take_is_not_taken_for_the_update(milliseconds: float, is_found: bool) -> None:
    largest = Largest("table", 48_000_000, "Adam")
    setting = dataclasses.replace(HEALTHY, num_replicas=1, gradient_bytes=50_000_000, largest=largest)
    metric = dataclasses.replace(METRIC, trials=taking(as_it_was=20, without=20 - milliseconds))
    examined = Examination(setting, times(compute=0.002, sync=0.016), parts=Parts(metrics=(metric,)))
    assert ("update-bound" in judge(examined).codes) == is_found


def test_a_loop_says_what_its_turns_take_and_what_xla_makes_of_it() -> None:
    (finding,) = judge(Examination(HEALTHY, times(), parts=Parts(loops=(LOOP,)))).findings
    assert (finding.code, finding.seconds) == ("loop-in-step", pytest.approx(80 * 0.010))
    assert finding.evidence == (
        "without scan a step took 15 ms (15 to 15) less, of 20 ms: 600 turns of 25 µs, forward and back; one that "
        "computes nothing takes 20 µs here; compiled by XLA, a step took 10 ms (10 to 10) less"
    )
    assert "`compile(jit_compile=True)`, by which XLA makes one program of the loop" in finding.fix


def test_a_loop_that_xla_cannot_compile_says_how_it_can() -> None:
    loop = dataclasses.replace(LOOP, trials=taking(as_it_was=20, without=5))
    (finding,) = judge(Examination(HEALTHY, times(), parts=Parts(loops=(loop,)))).findings
    assert "`tf.while_loop(..., maximum_iterations=n)` and `compile(jit_compile=True)`" in finding.fix
    (finding,) = judge(
        Examination(HEALTHY, times(), parts=Parts(loops=(dataclasses.replace(loop, layer=""),)))
    ).findings
    assert finding.what == "The loss goes round in a loop, and each turn costs more than it computes."
    assert finding.evidence.startswith("without the loss a step took")


@pytest.mark.parametrize(
    ("facts", "is_found"),
    [
        ({}, True),
        ({"trials": taking(as_it_was=20, without=5, compiled=17)}, False),  # XLA brings little
        ({"trials": taking(as_it_was=20, without=13, compiled=10)}, False),  # something else takes long
        ({"trials": taking(as_it_was=20, without=5), "num_turns": 180}, False),  # turns that compute
        ({"trials": taking(as_it_was=20, without=5), "num_turns": 200}, True),
        ({"num_turns": 0}, False),
        ({"trials": Trials(skipped={"without": "it fails"})}, False),
    ],
)
def test_a_loop_that_computes_is_no_finding(facts: Any, is_found: bool) -> None:
    examination = Examination(HEALTHY, times(), parts=Parts(loops=(dataclasses.replace(LOOP, **facts),)))
    assert ("loop-in-step" in judge(examination).codes) == is_found


@pytest.mark.parametrize(
    ("parts", "code", "what", "fix"),
    [
        (
            Parts(one_hots=(OneHot("first", 20000, 32, taking(as_it_was=20, without=12)),)),
            "one-hot-product",
            "The layer first multiplies one-hot vectors of 20,000 numbers by its kernel",
            "`keras.layers.Embedding(20000, 32)` of the numbers",
        ),
        (
            Parts(recurrent_dropouts=(RecurrentDropout("rnn", "LSTM", 0.2, taking(as_it_was=20, without=12)),)),
            "recurrent-dropout",
            "LSTM(recurrent_dropout=0.2) computes each time step of rnn gate by gate, in small products.",
            "`keras.layers.LSTM(..., dropout=0.2)`",
        ),
    ],
)
def test_what_a_layer_does_that_need_not_cost_so_much_says_what_does_it(
    parts: Parts, code: str, what: str, fix: str
) -> None:
    (finding,) = judge(Examination(HEALTHY, times(), parts=parts)).findings
    assert (finding.code, finding.seconds) == (code, pytest.approx(80 * 0.008))
    assert finding.what.startswith(what)
    assert finding.evidence == "without it a step took 8 ms (8 to 8) less, of 20 ms, on the same batch"
    assert finding.fix.startswith(fix)


@pytest.mark.parametrize("trials", [taking(as_it_was=20, without=15.1), Trials(skipped={"without": "it fails"})])
def test_what_a_layer_does_that_costs_little_is_no_finding(trials: Trials) -> None:
    parts = Parts(
        one_hots=(OneHot("first", 20000, 32, trials),),
        recurrent_dropouts=(RecurrentDropout("rnn", "LSTM", 0.2, trials),),
    )
    assert judge(Examination(HEALTHY, times(), parts=parts)).findings == ()


SUMMARIES = Parts(summaries=Summaries(("kernel", "bias"), 6, taking(as_it_was=20, without=12)))


def test_summaries_that_each_step_writes_say_which_and_how_to_write_fewer() -> None:
    (finding,) = judge(Examination(HEALTHY, times(), parts=SUMMARIES)).findings
    assert (finding.code, finding.seconds) == ("summaries-in-step", pytest.approx(80 * 0.008))
    assert finding.what == "Each step writes 6 summaries (tf.summary), and waits for it."
    assert (
        finding.evidence == "kernel, bias, ...: without it a step took 8 ms (8 to 8) less, of 20 ms, on the same batch"
    )
    assert finding.fix.startswith("Write at some steps alone: `with tf.summary.record_if(self.optimizer.iterations")


@pytest.mark.parametrize(("input_", "codes"), [(0.006, ["summaries-in-step"]), (0.012, ["input-bound"])])
def test_writing_summaries_is_not_taken_for_waiting_for_input(input_: float, codes: list[str]) -> None:
    """A step's last clock does not wait for what nothing is computed from."""
    examination = Examination(HEALTHY, times(input_=input_, compute=0.018 - input_), parts=SUMMARIES)
    assert judge(examination).codes[:1] == codes


@pytest.mark.parametrize(
    ("layout", "is_found"),
    [
        (Layout("conv", "CPU:0", 0.002, 0.001, 0.9), True),
        (Layout("conv", "CPU:0", 0.00125, 0.001, 1.0), False),  # hardly slower
        (Layout("conv", "CPU:0", 0.002, 0.001, 0.42), False),  # of a small part of the model
    ],
)
def test_channels_first_say_what_channels_last_would_save(layout: Layout, is_found: bool) -> None:
    findings = judge(Examination(HEALTHY, times(), parts=Parts(layout=layout))).findings
    assert [finding.code for finding in findings] == ["slow-layout"] * is_found
    for finding in findings:
        assert finding.seconds == pytest.approx(80 * 0.018 * 0.9 / 2)
        assert finding.evidence == (
            "a convolution like conv, with its gradients, took 2 ms, and with channels last 1 ms; about 90% of the "
            "model are such convolutions"
        )


@pytest.mark.parametrize(("first", "device"), [(True, "CPU:0"), (False, "CPU:0"), (True, "GPU:0")])
def test_the_largest_convolution_with_channels_first_is_timed_on_a_cpu(first: bool, device: str) -> None:
    data_format = "channels_first" if first else "channels_last"
    layers = [
        keras.layers.Conv2D(4, 3, data_format=data_format, name="small"),
        keras.layers.Conv2D(8, 3, data_format=data_format, name="large"),
        keras.layers.GlobalAveragePooling2D(data_format=data_format),
        keras.layers.Dense(1),
    ]
    model = keras.Sequential([keras.Input((3, 9, 9) if first else (9, 9, 3)), *layers])
    layout = measure_layout(model, device)
    if not first or device != "CPU:0":
        assert layout is None
        return
    assert layout is not None
    small, large = 4 * 28 * 49, 8 * 37 * 25  # weights, at each place of what they give
    assert (layout.layer, layout.device) == ("large", "CPU:0")
    assert layout.share == pytest.approx((small + large) / (small + large + 9))
    assert min(layout.first_seconds, layout.last_seconds) > 0
