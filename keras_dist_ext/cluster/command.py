"""Check that the function or command of a launch can run, and turn it into what a process runs, before any starts."""

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import PathFinder

from keras_dist_ext import arguments
from keras_dist_ext.cluster import worker
from keras_dist_ext.errors import LaunchError

__all__ = [
    "MOST_THREADS",
    "check_counts",
    "check_folder",
    "check_limits",
    "check_output",
    "check_waits",
    "environment",
    "program_for",
]

MOST_THREADS = 4096


def program_for(
    work: Sequence[str] | Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object] | None,
    environ: Mapping[str, str],
    pack: Callable[[Callable[..., object], Sequence[object], Mapping[str, object]], bytes] = worker.pack_call,
) -> list[str] | bytes:
    """Return a command line, or a packed call of a function.

    Args:
        work: a command or a function.
        args: for the function.
        kwargs: for the function.
        environ: of the processes.
        pack: pickles a call of a function.

    Raises:
        LaunchError: it could not run in another process; the message says why.
    """
    if not isinstance(args, list | tuple):
        arguments.refuse("args", args, "a tuple of what the function is called with", LaunchError)
    wanted = "a dict of what the function is called with, by name"
    named = {} if kwargs is None else arguments.mapping("kwargs", kwargs, wanted=wanted, error=LaunchError)
    if not all(isinstance(name, str) for name in named):
        arguments.refuse("kwargs", kwargs, wanted, LaunchError)
    if not callable(work):
        return _command(work, args, named, environ)
    try:
        return pack(work, args, named)
    except ValueError as error:
        raise LaunchError(str(error)) from error


def _command(
    work: Sequence[str], args: Sequence[object], kwargs: Mapping[str, object] | None, environ: Mapping[str, str]
) -> list[str]:
    """Return the command line of a process, after a look whether it can run."""
    is_list = isinstance(work, Sequence) and not isinstance(work, str | bytes)
    if not is_list or not work or not all(isinstance(word, str | os.PathLike) for word in work):
        wanted = "a function, or a command as a list of strings such as ['train.py', '--epochs', '3']"
        arguments.refuse("work", work, wanted, LaunchError)
    if args or kwargs:
        raise LaunchError("args and kwargs are for a function: put a command's arguments into its list.")
    program, *rest = (os.fspath(word) for word in work)
    if program == "-m":
        _check_module(rest, environ)
        return [sys.executable, program, *rest]
    if program.endswith(".py"):
        if not os.path.isfile(program):
            raise LaunchError(f"There is no script {program!r} (looked in {os.getcwd()}), so no worker could start.")
        return [sys.executable, program, *rest]
    if shutil.which(program, path=environ.get("PATH")) is None:
        if os.path.isfile(program):
            raise LaunchError(
                f"The file {program!r} is not executable, or not under that name, so no worker could start. Make "
                f"it executable and give its path, as './{os.path.basename(program)}'; or give what runs it, as "
                f"['bash', {program!r}]."
            )
        raise LaunchError(
            f"{program!r} is not a program on PATH, so no worker could start. A Python script ends in .py, "
            "a module runs as ['-m', NAME]."
        )
    return [program, *rest]


def _check_module(words: Sequence[str], environ: Mapping[str, str]) -> None:
    if not words:
        raise LaunchError("['-m'] is missing the name of a module: give ['-m', NAME].")
    package = words[0].partition(".")[0]  # looking further would import it
    places = [os.getcwd(), *filter(None, environ.get("PYTHONPATH", "").split(os.pathsep)), *sys.path]
    if not package or (PathFinder.find_spec(package, places) is None and importlib.util.find_spec(package) is None):
        raise LaunchError(
            f"There is no module {words[0]!r} (looked in {os.getcwd()}, PYTHONPATH and what is installed), so no "
            "worker could start."
        )


def check_counts(**given: tuple[object, int, int]) -> None:
    """Check numbers, each given with the least and the most it may be.

    Raises:
        LaunchError: one is not an integer within these bounds.
    """
    for name, (value, least, most) in given.items():
        arguments.integer(name, value, least=least, most=most, error=LaunchError)


def check_limits(**given: object) -> None:
    """Check times, None for no limit.

    Raises:
        LaunchError: one is not a number of seconds > 0.
    """
    for name, value in given.items():
        arguments.optional(arguments.seconds, name, value, error=LaunchError)


def check_waits(**given: object) -> None:
    """Check how long to wait for something.

    Raises:
        LaunchError: one is not a number of seconds >= 0.
    """
    for name, value in given.items():
        arguments.number(
            name, value, least=0.0, most=arguments.LONGEST_SECONDS, wanted="a number of seconds", error=LaunchError
        )


def check_folder() -> None:
    """Check that there is a working directory, in which the processes start.

    Raises:
        LaunchError: it was removed.
    """
    try:
        os.getcwd()
    except OSError as error:
        raise LaunchError(
            f"The working directory was removed ({error.strerror}), and the processes would start in it. Change to one "
            "that exists."
        ) from error


def check_output(log_dir: object, quiet: object, stream: object) -> None:
    """Check where output goes.

    Raises:
        LaunchError: it cannot go there.
    """
    arguments.optional(arguments.path, "log_dir", log_dir, error=LaunchError)
    arguments.flag("quiet", quiet, error=LaunchError)
    if stream is not None and not callable(getattr(stream, "write", None)):
        arguments.refuse("stream", stream, "a text file such as sys.stdout, or None", LaunchError)


def environment(given: Mapping[str, str] | None) -> dict[str, str]:
    """Return the environment of processes, a copy of what was given or by default of ours.

    Raises:
        LaunchError: they cannot have it, something else has made this process part of a cluster, or this system cannot
            launch.
    """
    if given is not None:
        arguments.mapping("environ", given, wanted="a dict of strings, or None", error=LaunchError)
    environ = dict(os.environ if given is None else given)
    for name, value in environ.items():
        if not (isinstance(name, str) and isinstance(value, str)):
            raise LaunchError(f"environ has {name!r}: {value!r}, but takes strings only: give str({value!r}).")
    is_in_cluster = environ.get("TF_CONFIG", "").strip() not in ("", "{}")
    if is_in_cluster and worker.LAUNCH_IDS in environ:
        raise LaunchError(
            "This process is itself a worker of a launch, so launch would start another cluster in it. Workers "
            "that run a function import the script that has launched them: put its own call of launch under "
            "`if __name__ == '__main__':`. For a cluster within a cluster, give environ without TF_CONFIG."
        )
    if is_in_cluster:
        raise LaunchError(
            f"TF_CONFIG is already set ({environ['TF_CONFIG']}): something else starts the workers here, and each "
            "would start a cluster of its own. Run the script itself, without launch, or unset TF_CONFIG."
        )
    if os.name != "posix":
        raise LaunchError("launch needs the sessions and signals of Linux and macOS; on Windows, use it in WSL.")
    return environ
