"""Run inside each process that `launch` starts: a command, a function, a TensorFlow server, or the guard over all.

A process starts as `python -c BOOT ROOT MODE LAUNCHER ...`; on Linux it dies with its launcher. Nothing heavy is
imported before the user's own code runs.
"""

import importlib
import importlib.util
import json
import os
import pickle
import select
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NoReturn

from keras_dist_ext.aliases import Picklable
from keras_dist_ext.cluster import heartbeat
from keras_dist_ext.cluster.orphans import children_of

if TYPE_CHECKING:
    import psutil

__all__ = ["command_line", "main", "LAUNCH_IDS", "pack_call", "packed", "pickled_call", "read_value", "failed_code"]

LAUNCH_IDS = "KERAS_DIST_EXT_LAUNCH"  # environment variable: ids of the launches, outermost first, that a process is in

_MAIN = "__mp_main__"  # what multiprocessing calls the launcher's __main__ inside a child
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def command_line(
    mode: str, *args: str, heartbeat_file: str = "", cpus: Sequence[int] = (), owns_process: bool = False
) -> list[str]:
    """Return what starts this module in a new interpreter.

    Args:
        mode: exec, call, serve or guard.
        args: what the mode takes.
        heartbeat_file: where the worker reports what it does; "" for nowhere.
        cpus: that the process may use; none for all.
        owns_process: whether the launcher does nothing else, as in an actor of Ray's.
    """
    boot = "import sys; sys.path[0] = sys.argv.pop(1); from keras_dist_ext.cluster.worker import main; main()"
    root = str(Path(__file__).resolve().parents[2])
    about_us = {"launcher": os.getpid(), "owns_process": owns_process}
    settings = json.dumps({**about_us, "heartbeat_file": heartbeat_file, "cpus": list(cpus)})
    return [sys.executable, "-c", boot, root, mode, settings, *args]


def main() -> None:
    """Do what the command line of this process says."""
    mode, text, *args = sys.argv[1:]
    settings = json.loads(text)
    if mode == "guard":
        if settings["owns_process"] and os.fork():
            os._exit(0)  # Ray kills the children of an actor that ends, so that the guard must be none
        return _guard(*args)
    _die_with(settings["launcher"])
    if settings["owns_process"]:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # which Ray ignores, and its threads block
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
    if settings["cpus"]:
        os.sched_setaffinity(0, settings["cpus"])
    os.environ.pop(heartbeat.HEARTBEAT_FILE, None)  # of a launch that this one runs in
    if settings["heartbeat_file"]:
        os.environ[heartbeat.HEARTBEAT_FILE] = settings["heartbeat_file"]
    if mode == "exec":
        _exec(args)
    heartbeat.begin()
    return _serve() if mode == "serve" else _call(*args)


def _die_with(launcher: int) -> None:
    """Have the kernel kill this process when the launcher's thread that started it ends, however it ends."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != launcher:  # it ended before the line above
        os._exit(1)


def _exec(command: list[str]) -> NoReturn:
    signal.signal(heartbeat.STACKS_SIGNAL, signal.SIG_IGN)  # it would end a program that writes no heartbeat
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"cannot start {command[0]!r}: {error}")


def _serve() -> None:
    """Serve as this worker or parameter server until killed, as tf.distribute.ParameterServerStrategy asks for."""
    os.environ.setdefault("GRPC_FAIL_FAST", "use_caller")  # the coordinator then sees a dead peer as an error
    import tensorflow as tf

    task = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    tf.distribute.Server(task.cluster_spec(), task.task_type, task.task_id, protocol="grpc").join()


def pickled_call(
    dumps: Callable[[object], bytes],
    function: Callable[..., Picklable],
    args: Sequence[Picklable],
    kwargs: Mapping[str, Picklable],
    *,
    advice: str,
) -> bytes:
    """Pickle a function with its arguments.

    Args:
        dumps: pickles a value.
        function: to be called.
        args: for it.
        kwargs: for it.
        advice: what to do where that fails.

    Raises:
        ValueError: it cannot be pickled; the message says why.
    """
    try:
        return dumps((function, tuple(args), dict(kwargs)))
    except Exception as error:
        label = getattr(function, "__qualname__", repr(function))
        raise ValueError(
            f"{label!r} or its arguments cannot be pickled ({error}), so no other process can run it. {advice}"
        ) from error


def pack_call(function: Callable[..., Picklable], args: Sequence[Picklable], kwargs: Mapping[str, Picklable]) -> bytes:
    """Pickle a call, with what another process needs to find the modules in which its parts are defined.

    Raises:
        ValueError: a part cannot be found from another process; the message says which and what to do.
    """
    label = getattr(function, "__qualname__", repr(function))
    advice = "Define the function at the top level of a module or script, and pass it plain values."
    call = pickled_call(pickle.dumps, function, args, kwargs, advice=advice)
    names = {getattr(function, "__module__", None) or type(function).__module__}
    names |= {"__main__"} if b"__main__" in call else set()
    modules = [(name, *_origin(name, label)) for name in sorted(names)]
    return packed(call, sys.path, modules)


def packed(
    call: bytes, sys_path: Sequence[str] | None = None, modules: Sequence[tuple[str, str, str | None]] = ()
) -> bytes:
    """Pack a pickled call, as this module runs it.

    Args:
        call: see `pickled_call`.
        sys_path: for the worker; None for its own.
        modules: to import before: what the call knows it as, its name, its file.
    """
    return pickle.dumps({"sys_path": sys_path, "argv": sys.argv, "modules": modules, "call": call})


def _origin(name: str, label: str) -> tuple[str, str | None]:
    """Return the name and the file by which another process imports what this one knows as module `name`."""
    module = sys.modules.get(name)
    spec, file = getattr(module, "__spec__", None), getattr(module, "__file__", None)
    if name == "__main__" and not file:
        raise ValueError(
            f"{label!r} or its arguments come from an interactive session, which no other process can import. Put "
            "them in a file and import it."
        )
    if name == "__main__":
        name = spec.name if spec else _MAIN
    return name, file and os.path.abspath(file)


def _call(job_path: str, outcome_path: str) -> None:
    """Run a packed call and leave what it returned, or that it failed, in the folder of the launch."""
    job = pickle.loads(Path(job_path).read_bytes())
    sys.argv[:] = job["argv"]
    if job["sys_path"] is not None:
        sys.path[:] = job["sys_path"]
    try:
        for known_as, name, file in job["modules"]:
            module = _import(name, file)
            if known_as == "__main__":
                sys.modules["__main__"] = sys.modules[_MAIN] = module
        function, args, kwargs = pickle.loads(job["call"])
        value = function(*args, **kwargs)
        Path(outcome_path).write_bytes(_pickle_value(value, function))
    except BaseException as error:
        code = _report(error)
        # The launcher must not wait for exit handlers and threads, which may wait for the other workers: the others
        # would complain first, and hide the cause.
        if code:
            _failed_path(Path(outcome_path)).write_text(str(code))
        else:
            Path(outcome_path).write_bytes(pickle.dumps(None))
        sys.exit(code)


def _import(name: str, file: str | None) -> ModuleType:
    """Import a module by name, or from its file when the name finds nothing or something else."""
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if file is None or error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
    else:
        found = getattr(module, "__file__", None)
        if file is None or (found and os.path.samefile(found, file)):
            return module
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _pickle_value(value: object, function: Callable[..., Picklable]) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:
        raise TypeError(
            f"{getattr(function, '__qualname__', function)!r} returned a {type(value).__name__} that cannot be pickled "
            f"({error}), so it cannot reach the launcher. Return numbers, strings, arrays, lists or dicts of them."
        ) from error


def _report(error: BaseException) -> int:
    """Print what the interpreter would print for an exception that nobody caught, and return its exit code."""
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr, flush=True)  # noqa: T201 - as sys.exit(message) does
        return 1
    frames = error.__traceback__ and error.__traceback__.tb_next  # without the frame of `_call`
    traceback.print_exception(type(error), error, frames)
    sys.stderr.flush()
    return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


def _failed_path(outcome: Path) -> Path:
    return outcome.with_suffix(".failed")


def failed_code(outcome: Path) -> int | None:
    """Return the exit code of a function that has failed, though its process may take a while to end."""
    try:
        return int(_failed_path(outcome).read_text() or 1)
    except FileNotFoundError:
        return None


def read_value(pickled: bytes) -> Picklable:
    """Return what the function returned."""
    sys.modules.setdefault(_MAIN, sys.modules["__main__"])  # where a class of the user's script now comes from
    return pickle.loads(pickled)


def _guard(launch_id: str, folder: str) -> None:
    """Wait until the launcher is done or dead, then end what is left of its processes, and its temporary folder."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    import psutil

    sessions: set[int] = set()
    descendants: dict[int, psutil.Process] = {}  # also those that have left their session, with another environment
    data = b""
    while True:  # until the launcher closes the pipe, or the kernel does
        if select.select([sys.stdin], [], [], _LOOK_SECONDS if sessions else None)[0]:
            new = os.read(sys.stdin.fileno(), 1 << 12)
            if not new:
                break
            *lines, data = (data + new).split(b"\n")
            sessions.update(int(line) for line in lines if line)
        _note_descendants(sessions, descendants)
    for _ in range(20):  # a process may fork while we look
        _note_descendants(sessions, descendants)
        left = list(_members(launch_id, sessions, descendants))
        for process in left:
            try:
                process.kill()
            except psutil.Error:
                continue
        if not left:
            break
        psutil.wait_procs(left, timeout=0.5)
    shutil.rmtree(folder, ignore_errors=True)


_LOOK_SECONDS = 1.0


def _note_descendants(sessions: set[int], descendants: "dict[int, psutil.Process]") -> None:
    """Remember all processes that descend from those that lead a session, while their parents live."""
    import psutil

    for pid, process in list(descendants.items()):
        if not process.is_running():
            del descendants[pid]
    new = [*sessions, *descendants]
    while new:
        for child in _children(new.pop()):
            if child not in descendants and child not in sessions:
                try:
                    descendants[child] = psutil.Process(child)
                except psutil.Error:
                    continue
                new.append(child)


def _children(pid: int) -> list[int]:
    if sys.platform == "linux":  # reading them costs a hundredth of a look at all processes
        return children_of(pid)
    import psutil

    try:
        return [child.pid for child in psutil.Process(pid).children()]
    except psutil.Error:
        return []


def _members(
    launch_id: str, sessions: set[int], descendants: "Mapping[int, psutil.Process]"
) -> "Iterator[psutil.Process]":
    """Yield the living processes of a launch: by session, by environment for those that left theirs, by descent."""
    import psutil

    for process in descendants.values():
        try:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                yield process
        except psutil.Error:
            continue

    for process in psutil.process_iter():
        try:
            if process.status() == psutil.STATUS_ZOMBIE or process.pid == os.getpid():
                continue
            if process.pid in descendants:
                continue
            if os.getsid(process.pid) in sessions or launch_id in process.environ().get(LAUNCH_IDS, ""):
                yield process
        except (psutil.Error, OSError):
            continue
