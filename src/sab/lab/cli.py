"""The command `sab` once torch is imported: finds the command, runs it, and reports what went wrong.

A user's mistake is one sentence on stderr with exit status 2; a bug shows its traceback.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import sab_cli
from sab import __version__
from sab.errors import UserError, UserValueError, check_choice
from sab.extras import explain
from sab.lab.commands import datasets, experiments, machine, models, pictures, training
from sab.lab.commands.parsing import call, with_flag
from sab_cli.exits import DONE, INTERRUPTED, OUTPUT_CLOSED, USER_ERROR
from sab_cli.sentences import not_a_choice
from sab_cli.wrapping import print_mistake


def _print_missing(error: ModuleNotFoundError) -> int:
    """Prints which extra installs a missing package; any other missing module is a bug."""
    sentence = explain(error)
    if sentence is None:
        raise error
    print_mistake(sentence)
    return USER_ERROR


COMMANDS: dict[str, Callable[..., int]] = {
    "train": training.train,
    "eval": models.evaluate_run,
    "sample": models.sample,
    "score": models.score,
    "data": datasets.data_command,
    "plot": pictures.plot,
    "report": pictures.report,
    "watch": pictures.watch,
    "info": machine.info,
    "doctor": machine.doctor,
    "tasks": machine.tasks,
    "warm-up": machine.warm_up,
    "demo": experiments.demo,
    "bench": experiments.bench,
    "reproduce": experiments.reproduce,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line, by default that of the process; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a file's name may have what no encoding has
            with contextlib.suppress(OSError):  # where something else was put in the stream's place
                stream.reconfigure(errors="backslashreplace")
    try:
        status = _dispatch(arguments)
        print(end="", flush=True)
        return status
    except UserError as mistake:
        print_mistake(with_flag(mistake))
        return USER_ERROR
    except ModuleNotFoundError as error:
        return _print_missing(error)
    except (MemoryError, RuntimeError, TypeError) as error:
        if not _is_out_of_memory(error):
            raise
        advice = "make --hidden-size, --batch-size, --length or --k-top smaller"
        print_mistake(f"there is not enough memory; {advice}.")
        return USER_ERROR
    except KeyboardInterrupt:
        print("sab: interrupted.", file=sys.stderr)
        return INTERRUPTED
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # of which rich makes an exit
            return OUTPUT_CLOSED
        raise
    except OSError as error:
        return _print_refused(error) if error.filename is not None else sab_cli.print_output_error(error)


def _print_refused(error: OSError) -> int:
    """Prints which file or folder the system refused, such as one without permission."""
    print_mistake(f"{error.filename!r} must be there and open to you; it is not: {error.strerror}.")
    return USER_ERROR


def summaries() -> dict[str, str]:
    """What each command does, in a line."""
    return {name: (command.__doc__ or "").splitlines()[0] for name, command in COMMANDS.items()}


def _dispatch(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(sab_cli.usage(summaries()))
        return DONE if arguments else USER_ERROR
    name, *rest = arguments
    if name == "--version":
        print(f"sab {__version__}")
        return DONE
    check_choice("command", name, COMMANDS)
    if name == "train":
        return training.train(rest)
    if name == "data":
        return datasets.data_command(rest)
    command, called = COMMANDS[name], f"sab {name}"
    words = [word for word in rest[:2] if not word.startswith("-")]
    if name == "plot" and len(words) == 2 and rest[0] not in pictures.PLOTS:  # a single word is a run
        raise UserValueError(not_a_choice("KIND", pictures.PLOTS, repr(rest[0])))
    if name == "plot" and len(words) == 1 and rest[0] not in pictures.PLOTS and not Path(words[0]).exists():
        kinds = ", ".join(pictures.PLOTS)
        raise UserValueError(f"RUN must be the folder of a run, or KIND one of {kinds}; got {words[0]!r}.")
    if name == "plot" and rest and rest[0] in pictures.PLOTS:  # the run in a folder of this name is ./bench
        command, called, rest = pictures.PLOTS[rest[0]], f"sab plot {rest[0]}", rest[1:]
    if name == "reproduce" and rest and rest[0] in experiments.TABLES:
        command, called, rest = experiments.TABLES[rest[0]], f"sab reproduce {rest[0]}", rest[1:]
    return call(command, rest, called)


def _is_out_of_memory(error: Exception) -> bool:
    """Whether an error means that a tensor is too large; torch has several such errors."""
    words = (
        "allocate memory",
        "not enough memory",
        "out of memory",
        "calculation overflowed",
        "multiplication overflow",
    )
    message = str(error)
    return isinstance(error, MemoryError) or any(word in message for word in (*words, "Overflow when unpacking"))
