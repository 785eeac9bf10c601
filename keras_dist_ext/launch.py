"""Start, watch and end one process per worker of this machine, each with its TF_CONFIG.

    result = launch(2, ["train.py", "--epochs", "3"])    # a command: result.exit_code, as a shell would give it
    values = launch(2, train, args=(3,)).values          # a function: what it returned on worker 0, on worker 1
    launch(2, ["train.py"], num_ps=1)                    # a chief that trains on two workers and a parameter server

Without `num_ps` every process runs the command or function, for tf.distribute.MultiWorkerMirroredStrategy; worker 0 is
the chief. With it, only the chief does, for tf.distribute.ParameterServerStrategy: workers and parameter servers run
`tf.distribute.Server(...).join()`, as TensorFlow's guide has them do, and end with the chief.

The first process that fails ends all others. Nothing outlives a launch: not grandchildren, not after Ctrl-C, and not
when the launcher itself is killed with SIGKILL (on Linux each process dies with it, and a guard process ends what those
have started). What should live on, such as a TensorBoard, must be started elsewhere.

Security: TensorFlow's server in each process listens on all network interfaces, whatever address TF_CONFIG says, and
runs what anyone who connects sends, without a password. Launch where nobody else reaches the machine's ports.
"""

import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from keras_dist_ext.errors import LaunchError
from keras_dist_ext.processes import worker
from keras_dist_ext.processes.generation import Failure, Generation
from keras_dist_ext.processes.process import Process, code_text, show

__all__ = ["launch", "LaunchResult", "WorkerRun", "WorkerFailed"]


def launch(
    num_workers: int,
    work: Sequence[str] | Callable[..., Any],
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_ps: int = 0,
    timeout: float | None = None,
    grace_seconds: float = 5.0,
    threads_per_worker: int | None = None,
    environ: Mapping[str, str] | None = None,
    log_dir: str | os.PathLike[str] | None = None,
    quiet: bool = False,
    stream: IO[str] | None = None,
) -> "LaunchResult":
    """Run a command or a function as the workers of one cluster on this machine, and wait for the end.

    SIGINT and SIGTERM are passed on to the workers, which have `grace_seconds` to end; a second one ends them at once.
    Then the signal takes its usual course here: KeyboardInterrupt, the end of this process, or a handler of your own.
    Python hands signals to the main thread alone: when `launch` is called in another, they act on this process as
    they would without it, and the workers end with this process.

    Args:
        num_workers: how many workers; with `num_ps` the chief comes on top of them.
        work: a command, as a list of strings (a script that ends in `.py` runs under this Python), or a function that
            other processes can import: defined at the top level of a module or script.
        args: for the function; they and its value are pickled.
        kwargs: for the function.
        num_ps: how many parameter servers. With any, only the chief runs `work`.
        timeout: seconds that the whole may take.
        grace_seconds: from SIGTERM, or the signal that came here, to SIGKILL. TensorFlow's workers swallow SIGTERM, so
            they often use all of it.
        threads_per_worker: threads of each of TensorFlow's pools, and of OpenMP, in each process. None leaves
            TensorFlow's default, where every process makes as many as there are cores.
        environ: the environment of the processes, instead of `os.environ`. All of them see the same accelerators.
        log_dir: where to keep the output of each, as `worker-0.log` and so on.
        quiet: do not show the output as it comes.
        stream: where to show it, each line with the name of its worker; `sys.stdout` if not given.

    Raises:
        LaunchError: the arguments make no launch, or a function ran out of time.
        WorkerFailed: a worker, the first one that did, failed to run the function. A command that fails or runs out of
            time raises nothing: see `exit_code` and `failure` of the result.
    """
    started = time.monotonic()
    base = dict(os.environ if environ is None else environ)
    _check(num_workers, num_ps, timeout, threads_per_worker, base)
    program = _packed_call(work, args, kwargs or {}) if callable(work) else _command(work, args, kwargs, base)
    base |= {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", **_thread_settings(threads_per_worker)}
    stream = sys.stdout if stream is None else stream
    with ExitStack() as stack:
        signals = stack.enter_context(_caught_signals())
        tasks = stack.enter_context(_cluster(num_workers, num_ps))
        generation = stack.enter_context(Generation(None if quiet else stream, log_dir))
        for task in tasks:
            work_here = None if task.serves else program
            generation.start(str(task), work_here, base | {"TF_CONFIG": _tf_config(task, tasks)})
        failure = generation.watch(signals, None if timeout is None else started + timeout)
        ended = generation.end(signals, grace_seconds)
        runs = tuple(_run(process, generation, process in ended) for process in generation.processes)
    if signals:
        signal.raise_signal(signals[0])  # every process is gone: now the signal takes its usual course
    if failure is None:
        return LaunchResult(0, runs, time.monotonic() - started, None)
    if callable(work):
        raise _error(failure)
    show(f"launch: {failure.message}\n", stream)
    return LaunchResult(failure.exit_code, runs, time.monotonic() - started, failure.message)


@dataclass(frozen=True)
class LaunchResult:
    """What became of a launch."""

    exit_code: int  # 0, or the first failure's, fit for sys.exit: 128 + n for signal n, 124 for the time limit
    workers: tuple["WorkerRun", ...]  # chief, workers, parameter servers
    seconds: float
    failure: str | None  # what failed, with its last lines

    @property
    def values(self) -> tuple[Any, ...]:
        """What the function returned: one value a worker, or the chief's alone."""
        return tuple(run.value for run in self.workers if not run.served)


@dataclass(frozen=True)
class WorkerRun:
    """What became of one process."""

    name: str  # "worker 0", "chief 0", "ps 1"
    served: bool  # it ran TensorFlow's server, not the command or function
    exit_code: int  # as subprocess has it: -9 = SIGKILL
    ended_by_launch: bool  # it had not ended, or failed, by itself
    seconds: float
    value: Any  # what the function returned; None for a command
    last_lines: tuple[str, ...]  # the last traceback and what followed, or the last 20 lines
    log: Path | None  # all its output; None without log_dir


class WorkerFailed(LaunchError):
    """A worker could not run the function to its end; all others were ended.

    Attributes:
        worker: its name, such as "worker 1".
        exit_code: as subprocess has it: -9 = SIGKILL.
        signal_name: the signal that ended it, such as "SIGKILL"; None for an exit code.
        last_lines: its traceback, or its last lines.
    """

    def __init__(self, message: str, worker: str, exit_code: int, last_lines: tuple[str, ...]):
        super().__init__(message, worker, exit_code, last_lines)
        self.worker, self.exit_code, self.last_lines = worker, exit_code, last_lines
        self.signal_name = code_text(exit_code) if exit_code < 0 else None

    def __str__(self) -> str:
        return str(self.args[0])


def _run(process: Process, generation: Generation, ended_by_launch: bool) -> WorkerRun:
    value = None
    if process.outcome and process.exit_code == 0 and process.failure_code is None:
        try:
            value = worker.read_value(process.outcome)
        except Exception as error:
            raise LaunchError(
                f"What the function returned on {process.name} cannot be read here ({error!r}). Return numbers, "
                "strings, arrays, lists or dicts of them."
            ) from error
    return WorkerRun(
        name=process.name,
        served=process in generation.serving,
        exit_code=process.failure_code or 0,
        ended_by_launch=ended_by_launch,
        seconds=process.seconds,
        value=value,
        last_lines=process.last_lines,
        log=process.log,
    )


def _error(failure: Failure) -> LaunchError:
    process = failure.process
    if process is None:
        return LaunchError(failure.message)
    return WorkerFailed(failure.message, process.name, process.failure_code or 0, process.last_lines)


@dataclass(frozen=True)
class _Task:
    """One line of the cluster."""

    kind: str  # chief, worker or ps
    index: int
    address: str
    serves: bool

    def __str__(self) -> str:
        return f"{self.kind} {self.index}"


@contextmanager
def _cluster(num_workers: int, num_ps: int) -> Iterator[list[_Task]]:
    """Give each task an address with a port that stays ours: no other program is handed it while the cluster lives."""
    kinds = ["chief"] * (num_ps > 0) + ["worker"] * num_workers + ["ps"] * num_ps
    with ExitStack() as held:
        tasks: list[_Task] = []
        for kind in kinds:
            # On Linux a socket that is bound, but does not listen, keeps the kernel from handing its port to others,
            # and TensorFlow's server (SO_REUSEADDR, all interfaces) can listen on it all the same.
            held_socket = held.enter_context(socket.socket())
            held_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held_socket.bind(("", 0))
            index = sum(task.kind == kind for task in tasks)
            address = f"127.0.0.1:{held_socket.getsockname()[1]}"
            tasks.append(_Task(kind, index, address, serves=num_ps > 0 and kind != "chief"))
        if sys.platform != "linux":
            held.close()  # elsewhere the port can only be chosen, not kept
        yield tasks


def _tf_config(task: _Task, tasks: Sequence[_Task]) -> str:
    cluster = {kind: [other.address for other in tasks if other.kind == kind] for kind in ("chief", "worker", "ps")}
    return json.dumps(
        {
            "cluster": {kind: addresses for kind, addresses in cluster.items() if addresses},
            "task": {"type": task.kind, "index": task.index},
        }
    )


def _check(
    num_workers: int, num_ps: int, timeout: float | None, threads_per_worker: int | None, environ: Mapping[str, str]
) -> None:
    for name, value, least in (
        ("num_workers", num_workers, 1),
        ("num_ps", num_ps, 0),
        ("threads_per_worker", 1 if threads_per_worker is None else threads_per_worker, 1),
    ):
        if not isinstance(value, int) or value < least:
            raise LaunchError(f"{name}={value!r} makes no cluster: give a whole number, {least} or more.")
    if timeout is not None and not timeout > 0:
        raise LaunchError(f"timeout={timeout!r} leaves no time to run: give seconds above 0, or None for no limit.")
    if environ.get("TF_CONFIG", "").strip() not in ("", "{}"):
        raise LaunchError(
            f"TF_CONFIG is already set ({environ['TF_CONFIG']}): something else starts the workers here, and each "
            "would start a cluster of its own. Run the script itself, without launch, or unset TF_CONFIG."
        )
    if os.name != "posix":
        raise LaunchError("launch needs sessions and signals as Linux and macOS have them; on Windows, use it in WSL.")


def _command(
    work: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any] | None, environ: Mapping[str, str]
) -> list[str]:
    """Return the command line of a process, after a look whether it can run."""
    if isinstance(work, str | bytes) or not work or not all(isinstance(word, str | os.PathLike) for word in work):
        raise LaunchError(f"{work!r} is no command: give a list of strings such as ['train.py', '--epochs', '3'].")
    if args or kwargs:
        raise LaunchError("args and kwargs are for a function: put a command's arguments into its list.")
    program, *rest = (os.fspath(word) for word in work)
    if program.endswith(".py"):
        if not os.path.isfile(program):
            raise LaunchError(f"There is no script {program!r} (looked in {os.getcwd()}), so no worker could start.")
        return [sys.executable, program, *rest]
    if shutil.which(program, path=environ.get("PATH")) is None:
        raise LaunchError(
            f"{program!r} is no program that PATH knows, so no worker could start. A Python script ends in .py, "
            "a module runs as ['python', '-m', NAME]."
        )
    return [program, *rest]


def _packed_call(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    try:
        return worker.pack_call(function, args, kwargs)
    except ValueError as error:
        raise LaunchError(str(error)) from error


def _thread_settings(threads: int | None) -> dict[str, str]:
    names = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS")
    return {} if threads is None else dict.fromkeys(names, str(threads))


@contextmanager
def _caught_signals() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM instead of acting on them, where this thread may."""
    caught: list[int] = []
    before = {}
    if threading.current_thread() is threading.main_thread():
        for signum in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(signum) is not signal.SIG_IGN:  # a parent such as nohup wants it ignored
                before[signum] = signal.signal(signum, lambda number, _: caught.append(number))
    try:
        yield caught
    finally:
        for signum, handler in before.items():
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)
