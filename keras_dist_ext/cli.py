"""Offer the package on the command line: `keras-dist-ext demo | launch | doctor | plan | devices`."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from keras_dist_ext import __version__
from keras_dist_ext.argument_types import (
    amount,
    count,
    counts,
    path,
    process_count,
    process_count_or_zero,
    restart_count,
    seconds,
    worker_count,
)
from keras_dist_ext.errors import KerasDistError, LaunchError
from keras_dist_ext.examples.demo_options import add_options, given_options

if TYPE_CHECKING:
    from keras_dist_ext.cluster.ray_cluster import RayCluster

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return the exit code: 0, 2 for a wrong command line, 1 or a worker's own for a failure."""
    arguments = _parser().parse_args(argv)
    try:
        code = int(arguments.run(arguments))
        _flush()
        return code
    except KerasDistError as error:
        print(f"keras-dist-ext: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # whoever read our output has gone, as in `keras-dist-ext launch ... | head`
        _drop_output()
        return 128 + signal.SIGPIPE


def _flush() -> None:
    """Write what is left of our output, or drop it, as on a full disk: the interpreter would fail when it exits."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        _drop_output()


def _drop_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter fails again when it exits


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="keras-dist-ext", description="Train Keras models under tf.distribute.")
    parser.add_argument("--version", action="version", version=f"keras_dist_ext {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_demo(commands.add_parser("demo", help="train a small CNN on handwritten digits, under several replicas"))
    _add_launch(
        commands.add_parser(
            "launch",
            help="run a script as the workers of a cluster, on this machine or on Ray",
            usage="keras-dist-ext launch --workers N|A:B [--ps M | --tuner] [option ...] [-m] SCRIPT.py [ARG ...]",
            description="Start a process for each worker, with its TF_CONFIG, on this machine or on Ray, and wait. The "
            "first that fails, or hangs for --timeout, ends all; with --max-restarts all start again. SIGTERM and "
            "SIGINT go to the workers: when all of them end well, as by Resume(on_preemption=True), the exit code is "
            "0. With --workers A:B all start again with fewer workers where places are gone after a failure, and with "
            "more where places have come, at a checkpoint of Resume; a place is a core, or as many as --threads, and "
            "on Ray room for a worker. With --ps the script runs in a chief process, and workers and parameter servers "
            "serve it.",
            allow_abbrev=False,
        )
    )
    _add_doctor(
        commands.add_parser(
            "doctor",
            help="run a script for some steps of training, and say why it is not faster",
            usage="keras-dist-ext doctor [option ...] SCRIPT.py [ARG ...]\n"
            "       keras-dist-ext doctor --compare BEFORE.json AFTER.json",
            description="Run a script until a call of fit, or several together, have made some steps, and say what "
            "keeps those of the longest call from being parallel, and what to change. What comes after is not run. Of "
            "models of stock Keras it judges strategy, scope, eager execution and threads.",
            allow_abbrev=False,
        )
    )
    _add_plan(
        commands.add_parser(
            "plan",
            help="measure what a script trains, and predict what more replicas would give",
            usage="keras-dist-ext plan [option ...] SCRIPT.py [ARG ...]",
            description="Run a script up to its first call of fit, measure a copy of its model on one device, and "
            "predict for each number of replicas the step, examples a second, the memory of a device and what decides; "
            "say which number pays, and what to change first. The script's training is not run, and its callbacks are "
            "left out.",
            allow_abbrev=False,
        )
    )
    _add_devices(commands.add_parser("devices", help="list devices, and the strategy that would be chosen for them"))
    return parser


def _add_demo(parser: argparse.ArgumentParser) -> None:
    add_options(parser)
    parser.set_defaults(run=_demo)


def _demo(arguments: argparse.Namespace) -> int:
    from keras_dist_ext.examples import digits

    return digits.main(**given_options(arguments))


def _add_launch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workers",
        type=worker_count,
        required=True,
        metavar="N",
        help="worker processes; A:B for as many as there are places for, from A to B; with --tuner also auto",
    )
    parser.add_argument("--ps", type=process_count_or_zero, default=0, metavar="M", help="parameter server processes")
    parser.add_argument("--tuner", action="store_true", help="search with keras-tuner: the workers run one trial each")
    parser.add_argument("--workers-per-trial", type=process_count, metavar="N", help="with --tuner: share a trial (1)")
    parser.add_argument(
        "--gpus-per-trial", type=process_count, metavar="N", help="with --tuner: for each trial (1 a worker)"
    )
    parser.add_argument("--on", choices=["ray"], help="run on a Ray cluster instead of this machine")
    parser.add_argument("--address", metavar="A", help="with --on ray: of the cluster, as ray.init takes it (auto)")
    parser.add_argument("--cpus-per-worker", type=amount, metavar="C", help="with --on ray: Ray's CPUs for each (1)")
    parser.add_argument("--gpus-per-worker", type=amount, metavar="G", help="with --on ray: GPUs for each (0)")
    parser.add_argument(
        "--max-restarts",
        type=restart_count,
        metavar="K",
        help="how often all start again after a failure (0); with --tuner, a worker in one trial (2)",
    )
    parser.add_argument(
        "--timeout", type=seconds, metavar="S", help="seconds without a finished step after which a worker hangs"
    )
    parser.add_argument("--time-limit", type=seconds, metavar="S", help="seconds that the whole may take")
    parser.add_argument("--log-dir", type=path, metavar="DIR", help="keep each process' output here, as worker-0.log")
    parser.add_argument("--threads", type=count, metavar="N", help="threads of each pool in each process")
    parser.add_argument("--affinity", action="store_true", help="divide the CPUs, and with them threads (Linux)")
    parser.add_argument("--grace", type=seconds, default=20.0, metavar="S", help="seconds from SIGTERM to SIGKILL (20)")
    parser.add_argument("--quiet", action="store_true", help="do not show the workers' output")
    parser.add_argument("-m", action="store_true", dest="is_module", help="SCRIPT.py is the name of a module")
    parser.add_argument("script", metavar="SCRIPT.py", help="what to run: a script, or a program such as python")
    rest = parser.add_argument("args", nargs=argparse.REMAINDER, metavar="ARG", help="passed to it untouched")
    rest.required = False  # argparse would ask for it when the script is missing
    parser.set_defaults(run=_launch)


def _launch(arguments: argparse.Namespace) -> int:
    if arguments.tuner:
        return _launch_search(arguments)
    if arguments.workers == "auto" or arguments.workers_per_trial or arguments.gpus_per_trial:
        raise LaunchError("--workers auto, --workers-per-trial and --gpus-per-trial are for a search: add --tuner.")
    on = _ray_cluster(arguments)
    from keras_dist_ext.cluster.launch import launch
    from keras_dist_ext.cluster.signals import caught_signals

    with caught_signals() as signals:  # where workers end well in time, so does the launch
        result = launch(
            arguments.workers,
            _command(arguments),
            num_ps=arguments.ps,
            max_restarts=arguments.max_restarts or 0,
            timeout=arguments.timeout,
            time_limit=arguments.time_limit,
            grace_seconds=arguments.grace,
            threads_per_worker=arguments.threads,
            affinity=arguments.affinity,
            on=on,
            log_dir=arguments.log_dir,
            quiet=arguments.quiet,
        )
    if signals and result.exit_code:
        signal.raise_signal(signals[0])
    return result.exit_code


def _ray_cluster(arguments: argparse.Namespace) -> "RayCluster | None":
    """Return where to launch, None for this machine."""
    names = ("address", "cpus_per_worker", "gpus_per_worker")
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    if arguments.on == "ray":
        from keras_dist_ext.cluster.ray_cluster import RayCluster

        return RayCluster(**given)
    if given:
        raise LaunchError("--address, --cpus-per-worker and --gpus-per-worker are for a Ray cluster: add --on ray.")
    return None


def _command(arguments: argparse.Namespace) -> list[str]:
    return [*(["-m"] if arguments.is_module else []), arguments.script, *arguments.args]


def _launch_search(arguments: argparse.Namespace) -> int:
    if isinstance(arguments.workers, tuple):
        least, most = arguments.workers
        raise LaunchError(f"--workers {least}:{most} is not for a search: give one number, or auto.")
    if arguments.ps or arguments.threads or arguments.affinity:
        raise LaunchError("--ps, --threads and --affinity are not for a search: --tuner divides the machine by itself.")
    from keras_dist_ext.cluster.signals import caught_signals
    from keras_dist_ext.tuner.processes.launch_search import launch_search

    with caught_signals() as signals:
        run = launch_search(
            _command(arguments),
            arguments.workers,
            workers_per_trial=arguments.workers_per_trial or 1,
            gpus_per_trial=arguments.gpus_per_trial,
            max_restarts=2 if arguments.max_restarts is None else arguments.max_restarts,
            timeout=arguments.timeout,
            time_limit=arguments.time_limit,
            grace_seconds=arguments.grace,
            on=_ray_cluster(arguments),
            log_dir=arguments.log_dir,
            quiet=arguments.quiet,
        )
    if signals:
        signal.raise_signal(signals[0])
    return run.exit_code


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=count, metavar="N", help="steps to watch, about (200), or to certify (10)")
    parser.add_argument(
        "--certify", action="store_true", help="say instead whether it trains what one device would; exit code 1 if not"
    )
    parser.add_argument("--allow", action="append", default=[], metavar="CODE", help="a finding that --certify accepts")
    parser.add_argument("--interventions", action="store_true", help="make experiments too, for about ten seconds")
    parser.add_argument(
        "--json", type=path, metavar="FILE", help="write the report there, too; say what changed since the one there"
    )
    parser.add_argument("--log-dir", type=path, metavar="DIR", help="for TensorBoard")
    parser.add_argument(
        "--compare",
        type=path,
        metavar="BEFORE.json",
        help="say what a change brought: AFTER.json follows",
    )
    parser.add_argument("script", metavar="SCRIPT.py")
    rest = parser.add_argument("args", nargs=argparse.REMAINDER, metavar="ARG", help="passed to it untouched")
    rest.required = False  # argparse would ask for it when the script is missing
    parser.set_defaults(run=_doctor, parser=parser)


def _doctor(arguments: argparse.Namespace) -> int:
    if arguments.compare is not None:
        return _compare(arguments)
    if arguments.certify:
        return _certify(arguments)
    from keras_dist_ext.diagnosis.doctor.doctor_command import examine_script

    examine_script(
        arguments.script,
        arguments.args,
        num_steps=arguments.steps or 200,
        interventions=arguments.interventions,
        json=arguments.json,
        log_dir=arguments.log_dir,
    )
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    if arguments.args:
        arguments.parser.error(f"--compare takes two reports, got {2 + len(arguments.args)}")
    from keras_dist_ext.diagnosis.doctor.comparison import compare_files

    print(compare_files(arguments.compare, arguments.script))
    return 0


def _certify(arguments: argparse.Namespace) -> int:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from keras_dist_ext.diagnosis.certificate.certified_script import certify_script, print_certificate

    certificate = certify_script(
        arguments.script, arguments.args, steps=arguments.steps or 10, allow=tuple(arguments.allow)
    )
    return print_certificate(certificate, arguments.json)


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--replicas", type=counts, default=(1, 2, 4, 8, 16), metavar="N,N", help="numbers of replicas (1,2,4,8,16)"
    )
    parser.add_argument(
        "--devices",
        choices=["own", "shared"],
        default="own",
        help="a device and cores for each replica (own), or this machine's cores for all",
    )
    parser.add_argument(
        "--network",
        metavar="NET",
        help='what replicas sum over: a bandwidth and a latency such as "10Gb/s, 50us", or the name of a link: nvlink, '
        "nvlink3, pcie4, pcie5",
    )
    parser.add_argument("--steps", type=count, default=60, metavar="N", help="steps to train for, about (60)")
    parser.add_argument("--json", type=path, metavar="FILE", help="write the plan there, too")
    parser.add_argument("--log-dir", type=path, metavar="DIR", help="write it for TensorBoard's Replicas tab, too")
    parser.add_argument("script", metavar="SCRIPT.py")
    rest = parser.add_argument("args", nargs=argparse.REMAINDER, metavar="ARG", help="passed to it untouched")
    rest.required = False  # argparse would ask for it when the script is missing
    parser.set_defaults(run=_plan)


def _plan(arguments: argparse.Namespace) -> int:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from keras_dist_ext.diagnosis.plan.planned_script import plan_script

    plan_script(
        arguments.script,
        arguments.args,
        replicas=arguments.replicas,
        devices=arguments.devices,
        network=arguments.network,
        num_steps=arguments.steps,
        json=arguments.json,
        log_dir=arguments.log_dir,
    )
    return 0


def _add_devices(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_devices)


def _devices(arguments: argparse.Namespace) -> int:
    del arguments
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # what TensorFlow says about missing GPUs is not asked for
    import tensorflow as tf

    from keras_dist_ext.strategy.decision import decide
    from keras_dist_ext.strategy.resources import find_resources, list_devices

    print(f"TensorFlow {tf.__version__}")
    for device in tf.config.list_physical_devices():
        model = tf.config.experimental.get_device_details(device).get("device_name", "")
        print(f"physical  {device.name.removeprefix('/physical_device:')}  {model}".rstrip())
    for name in list_devices():
        print(f"logical   {name}")
    choice = decide("auto", find_resources())  # chosen, not built: a worker's strategy would wait for the other workers
    print(f"pick_strategy() would choose {choice.name}: {choice.reason}")
    return 0
