"""The command `sab`: parses, calls, prints.

What the user got wrong is told in one sentence on stderr, with exit status 2; a bug shows its traceback.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar

from sab import __version__
from sab import doctor as diagnosis
from sab.errors import Mistake, ValueMistake, check_choice, check_float, check_int
from sab.extras import EXTRAS, missing

POSITIONAL = ("run", "runs", "task", "name", "file")
DONE, DIVERGED, MISTAKEN, INTERRUPTED, UNHEARD = 0, 1, 2, 130, 141
FAILED = DIVERGED


def _say_missing(error: ModuleNotFoundError) -> int:
    """Tells which extra would have installed a package; any other missing module is a bug."""
    package = (error.name or "").partition(".")[0]
    if package not in EXTRAS:
        raise error
    print(f"sab: {missing(package)}", file=sys.stderr)
    return MISTAKEN


try:
    import tyro
    from rich.console import Console
    from rich.text import Text

    from sab import data
    from sab.files import writing
    from sab.models import ModelConfig
    from sab.tasks import TASKS, Split, StoredTask, Task
    from sab.training import Run, RunConfig, TrainConfig, distributed, evaluate
    from sab.training import train as train_model
    from sab.training import train_seeds as train_models
    from sab.training.checkpoint import load_kept, load_model
    from sab.training.config import Device, resolve_device
    from sab.training.evaluation import evaluate_fully
    from sab.training.interrupt import Interrupt
    from sab.training.loop import check_seeds, seed_folder
    from sab.training.progress import progress_for, progress_for_each, show_headline, show_seconds
    from sab.training.run import Result
except ModuleNotFoundError as error:
    sys.exit(diagnosis.main() if sys.argv[1:2] == ["doctor"] else _say_missing(error))

RunFolder = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
RunFolders = Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]")]
Picture = Annotated[Path | None, tyro.conf.arg(aliases=["-o"])]
TaskT = TypeVar("TaskT", bound=Task)


@dataclass(frozen=True)
class TrainOptions(Generic[TaskT]):
    """Train a model on a task into a folder: configuration, metrics, checkpoint, result."""

    task: TaskT
    model: ModelConfig
    training: TrainConfig
    seeds: Annotated[str | None, tyro.conf.arg(metavar="{None}|SEED,SEED,...")] = None
    """Several seeds at once instead of --seed, as in 0,1,2: a run for each, in folders seed-0, seed-1, ... below that
    of --out. They take turns; on a GPU, which one small run leaves mostly idle, they share it."""
    out: Path | None = None
    """Folder of the run; None makes a name below runs/ from the options."""
    resume: bool = False
    """Go on with the run in that folder, or with those of all --seeds; options that are not given are then the run's
    own."""

    @property
    def config(self) -> RunConfig:
        return RunConfig(self.task, self.model, self.training)

    @property
    def folder(self) -> Path:
        if self.out is not None:
            return self.out
        return self.config.default_out() if self.seeds is None else self.config.default_out_of_seeds()


def train(arguments: Sequence[str]) -> int:
    """Train a model on a task."""
    names = ", ".join(TASKS)
    if arguments and arguments[0] in ("-h", "--help"):
        print(f"usage: sab train TASK [OPTIONS]\n\nTASK is one of {names}; `sab train TASK --help` shows its options.")
        return DONE
    if not arguments:
        raise ValueMistake(f"task must be one of {names}; got none.", "task")
    name, *rest = arguments
    check_choice("task", name, TASKS)
    options = _parse_training(name, rest, RunConfig.default(TASKS[name]()))
    seeds = None if options.seeds is None else _parse_seeds(options.seeds)
    if seeds is not None and any(re.match(r"--seed(=|$)", argument) for argument in rest):
        raise ValueMistake("seeds must not be given together with --seed; got both.", "seeds")
    if options.resume:
        first = options.folder if seeds is None else seed_folder(options.folder, seeds[0])
        stored = Run.open(first, "out").config
        if name != stored.task.name:
            where = str(first)
            raise ValueMistake(f"task must be {stored.task.name!r} to resume {where!r}; got {name!r}.", "task")
        options = replace(_parse_training(name, rest, stored), out=options.folder)
    if seeds is not None:
        return _train_seeds(name, options, seeds)
    with contextlib.ExitStack() as silence:
        if not distributed.speaks():
            silence.enter_context(contextlib.redirect_stdout(silence.enter_context(open(os.devnull, "w"))))
        return _train_one(name, options)


def _train_one(name: str, options: TrainOptions) -> int:
    label = f"{options.task.title} {options.model.method}"
    interrupt = Interrupt()
    goes_on = distributed.was_restarted() and (options.folder / "config.json").is_file()
    result = train_model(
        options.task,
        options.model,
        options.training,
        options.folder,
        options.resume or goes_on,
        progress_for(Console(), label),
        interrupt,
    )
    print(f"{result.message[0].upper()}{result.message[1:]}")
    if result.status == "interrupted":
        print(f"Resume with: sab train {name} --out {shlex.quote(str(options.folder))} --resume")
        return interrupt.exit_status
    print(_on_unseen_data(options.task, result))
    print(f"The run is in {options.folder}; see it with: sab plot {shlex.quote(str(options.folder))}")
    return DIVERGED if result.status == "diverged" else DONE


def _train_seeds(name: str, options: TrainOptions, seeds: list[int]) -> int:
    labels = [f"{options.task.title} {options.model.method} seed {seed}" for seed in seeds]
    interrupt = Interrupt()
    results = train_models(
        options.task,
        options.model,
        options.training,
        seeds,
        options.folder,
        options.resume,
        progress_for_each(Console(), labels),
        interrupt,
    )
    for seed, result in results.items():
        print(f"Seed {seed}: {_outcome(options.task, result)}")
    statuses = {result.status for result in results.values()}
    out = shlex.quote(str(options.folder))
    if "interrupted" in statuses:
        print(f"Resume with: sab train {name} --out {out} --seeds {','.join(map(str, seeds))} --resume")
        return interrupt.exit_status
    first = shlex.quote(str(seed_folder(options.folder, seeds[0])))
    print(f"The runs are in {options.folder}; see the first with: sab plot {first}")
    return DIVERGED if "diverged" in statuses else DONE


def _outcome(task: Task, result: Result) -> str:
    if result.status == "interrupted":
        return result.message
    return f"{result.message} {_on_unseen_data(task, result)}"


def _on_unseen_data(task: Task, result: Result) -> str:
    weights = "" if result.best_at is None else f", by the weights of iteration {result.best_at}"
    return f"On unseen data{weights}: {show_headline(task.headline, result.metrics)}{_in_brackets(task)}."


def _in_brackets(task: Task) -> str:
    return f" ({task.title})" if task.title != task.name else ""


def _parse_seeds(given: str) -> list[int]:
    """The seeds in a text such as 0,1,2."""
    parts = [part.strip() for part in given.split(",")]
    seeds = [int(part) for part in parts if re.fullmatch("[0-9]+", part)]
    if len(seeds) < len(parts) or len(set(seeds)) < len(seeds):
        allowed = "different whole numbers of at least 0 with commas between them"
        raise ValueMistake(f"seeds must be {allowed}; got {given!r}.", "seeds")
    return check_seeds(seeds)


def _parse_training(name: str, arguments: Sequence[str], default: RunConfig) -> TrainOptions:
    """The options, where those that are not given are as in `default`."""
    return _parse(
        TrainOptions[type(default.task)],
        arguments,
        prog=f"sab train {name}",
        default=TrainOptions(default.task, default.model, default.training),
        config=(tyro.conf.OmitArgPrefixes,),
    )


def _parse(what: Any, arguments: Sequence[str], **options: Any) -> Any:
    """What tyro makes of the arguments, with its boxes of several lines turned into one sentence."""
    told = io.StringIO()
    for before, argument in zip(("", *arguments), arguments, strict=False):
        if argument == "" and before.startswith("-"):
            raise ValueMistake(f"{before} must not be empty; got ''.")
    # `none` after a flag; anywhere else it may be the name of a folder.
    pairs = zip(("", *arguments), arguments, strict=False)
    arguments = ["None" if one == "none" and before.startswith("-") else one for before, one in pairs]
    try:
        with contextlib.redirect_stderr(told):
            return tyro.cli(what, args=arguments, **options)
    except SystemExit as stop:
        # tyro has put a dataclass's own complaint into a box and into its own words; the sentence itself is clearer.
        cause = stop.__context__
        while cause is not None:
            if isinstance(cause, Mistake):
                raise cause from None
            cause = cause.__context__
        if not stop.code:
            raise
        raise ValueMistake(_sentence(told.getvalue())) from None


def _sentence(box: str) -> str:
    """The sentence in a box of tyro's."""
    # The first line is the title; where the output takes ASCII alone, the box has rules of hyphens and no sides.
    box = re.sub(r"\x1b\[[0-9;]*m", "", box)
    lines = [re.sub(r"[-─]{3,}", "─", line.strip("│╰╯ ")) for line in box.splitlines()[1:]]
    text = " ".join(" ".join(lines).split()).strip("─ ")
    text = re.split(r" ?─+ (?:For full|Argument helptext)", text)[0]
    flag = re.search(r"Error parsing (\S+): ", text)
    given = re.search(r"(?:from \[|(?:int|float)\b.*?: )('.*?')(?:\]|$)", text)
    if flag and given and re.search(r"\b(int|float)\b|INT|FLOAT", text):
        kind = "a whole number" if re.search(r"int\(\)|\bINT\b", text) else "a number"
        return f"{flag[1]} must be {kind}{', or None' if '{None}' in text else ''}; got {given[1]}."
    choice = re.search(r"invalid choice ('.*') for argument '(.*?)'\. Expected one of \((.*?),?\)", text)
    if choice:
        return f"{choice[2]} must be one of {choice[3].replace(chr(39), '')}; got {choice[1]}."
    meant = re.search(r"(?:Perhaps you meant|Arguments similar to \S+): (--?\S+)", text)
    unknown = re.search(r"Unrecognized options: (.*?)(?: ─|$)", text)
    if unknown:
        return f"{unknown[1]} is no option of this command" + (f"; did you mean {meant[1]}?" if meant else ".")
    missing = re.search(r"Missing (?:from [\w ]+: |value for argument ')([\w-]+)", text)
    if missing:
        return f"{missing[1]} must be given a value; got none."
    return re.sub(r" ?─+ ?", " ", text).rstrip(".") + "."


def evaluate_run(
    run: RunFolder,
    split: Split = "test",
    batches: int | None = None,
    length: int | None = None,
    streams: int | None = None,
    memory: int | None = None,
    data_dir: Path | None = None,
    device: Device = "auto",
) -> int:
    """Evaluate the best weights of a run that keeps them, or the newest ones.

    Args:
        run: Folder of the run.
        split: Which data to evaluate on.
        batches: How many batches to take; None means all data or, where they have no end, as many as in training.
        length: Length of the task's sequences; None means the one trained on.
        streams: At how many places side by side a text is read with the state carried through; None means as many as
            a batch has sequences, and 1 reads it from its first character to its last.
        memory: How many of the latest microstates are carried on with it; None means as many as a sequence has.
        data_dir: Folder of the data sets; None means SAB_DATA or the user's cache.
        device: Where to evaluate; auto takes CUDA where there is one.
    """
    opened = Run.open(run)
    task = opened.config.task
    if length is not None:
        if "length" not in task.options():
            raise ValueMistake(
                f"length must not be given for task {task.name}, which has none; got {length}.", "length"
            )
        task = replace(task, length=length)  # pyright: ignore[reportArgumentType, reportCallIssue]
    if data_dir is not None:
        if not isinstance(task, StoredTask):
            raise ValueMistake(f"data_dir must not be given for task {task.name}, which reads no files.", "data_dir")
        task = replace(task, data_dir=data_dir)
    model, best_at = load_kept(opened, resolve_device(device))
    if batches is None:
        found = evaluate_fully(model, task, opened.config.training, split, streams, memory)
    else:
        found = evaluate(model, task, opened.config.training, split, batches)
    label = _label(task, best_at)
    for metric, value in found.items():
        print(f"{metric} {value:.6g}{label}")
    return DONE


def _label(task: Task, best_at: int | None) -> str:
    """What goes with every figure of a run: the task's data where its name is not enough, and the best weights."""
    told = [task.title] if task.title != task.name else []
    told += [] if best_at is None else [f"weights of iteration {best_at}"]
    return f"  # {', '.join(told)}" if told else ""


def sample(
    run: RunFolder,
    prompt: str | None = None,
    length: int = 400,
    temperature: float = 0.8,
    seed: int = 0,
    memory: int | None = None,
    device: Device = "auto",
) -> int:
    """Let a character model go on with a text.

    A character costs one step from the state before it, which does not grow with the text.

    Args:
        run: Folder of a run on ptb or text8.
        prompt: What the text begins with; None begins a line, or a word.
        length: How many characters to make up.
        temperature: Below 1 the likely characters become likelier still; 0 takes the likeliest each time.
        seed: What the choice among them depends on.
        memory: How many of the latest microstates are kept; None means as many as a sequence has in training.
        device: Where to compute; auto takes CUDA where there is one.
    """
    from sab.training import text

    opened = Run.open(run)
    task = text.character_task(opened.config.task)
    model = load_model(opened, resolve_device(device))
    made = text.sample(model, task, opened.config.training, prompt, length, temperature, seed, memory)
    print(prompt or "", end="", flush=True)
    for character in made:
        print(character, end="", flush=True)
    print()
    return DONE


def score(
    run: RunFolder,
    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")],
    skip_unknown: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    memory: int | None = None,
    device: Device = "auto",
) -> int:
    """Tell how well a character model knows a text of yours, in bits per character.

    Once with a fresh state for each sequence, as in training, and once with the state carried through the whole text.

    Args:
        run: Folder of a run on ptb or text8.
        file: The text, in UTF-8; .gz and .xz are unpacked.
        skip_unknown: Leave out the characters that the model does not know, instead of stopping at the first.
        memory: How many of the latest microstates are carried on; None means as many as a sequence has in training.
        device: Where to compute; auto takes CUDA where there is one.
    """
    from sab.training import text

    opened = Run.open(run)
    task = opened.config.task
    given = text.read_text(file, task)
    model, best_at = load_kept(opened, resolve_device(device))
    label = _label(task, best_at)
    for what, value in text.score(model, task, opened.config.training, given, skip_unknown, memory).items():
        print(f"{what} {value:.6g}{label}" if isinstance(value, float) else f"{what} {value}")
    return DONE


def data_command(arguments: Sequence[str]) -> int:
    """Get the public data sets, or list them."""
    commands = {"get": data_get, "list": data_list}
    if arguments and arguments[0] in ("-h", "--help"):
        print(f"usage: sab data {'|'.join(commands)} [OPTIONS]\n")
        for name, command in commands.items():
            print(f"  {name:10}{(command.__doc__ or '').splitlines()[0]}")
        print("\n`sab data get --help` shows the options.")
        return DONE
    name, *rest = arguments or [""]
    if name not in commands:
        raise ValueMistake(f"data must be followed by {' or '.join(commands)}; got {name or 'nothing'}.")
    return _call(commands[name], rest, f"sab data {name}")


def data_get(
    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")],
    source: Annotated[Path | None, tyro.conf.arg(name="from")] = None,
    data_dir: Path | None = None,
) -> int:
    """Get a data set: ptb, text8 or mnist.

    Args:
        name: Which data set.
        source: Folder or archive (.zip, .tar.gz) that has its files, plain or as .gz or .xz, or the one file that it
            is; None gets them from their public source.
        data_dir: Folder of the data sets; None means SAB_DATA or, without one, the user's cache.
    """
    from sab.data.progress import Bar

    with Bar(Console(stderr=True)) as bar:
        dataset, paths = data.get(name, data_dir, source, bar.heard)
    print(f"{dataset.name}: {dataset.summary}. Its checksums are right.")
    for path in paths:
        print(path)
    return DONE


def data_list(data_dir: Path | None = None) -> int:
    """List the data sets, and whether they are here.

    Args:
        data_dir: Folder of the data sets; None means SAB_DATA or, without one, the user's cache.
    """
    folder = data.folder_of(data_dir)
    print(f"In {folder}:")
    width = max(map(len, data.DATASETS))
    for name, dataset in data.DATASETS.items():
        print(f"{name:{width}}  {data.state_of(dataset, folder)[1]}  ({dataset.summary})")
    return DONE


def plot(run: RunFolder, out: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None) -> int:
    """Draw a run's learning curve and, where it has a memory, its attention; `sab plot KIND` draws one figure.

    KIND is attention, credit-paths, learning-curve, gradient-norms, scaling or bench, and has options of its own:
    `sab plot KIND --help` shows them.

    Args:
        run: Folder of the run.
        out: Folder for the pictures; None means that of the run.
    """
    from sab.report.figures import attention_map, learning_curves, save  # matplotlib takes a while to import

    opened = Run.open(run)
    folder = run if out is None else out
    figures = {"learning_curve.png": learning_curves({opened.config.model.method: opened})}
    if opened.config.task.steps <= opened.config.model.k_att:
        print("No attention map: the sequences are not longer than k_att, so there is nothing to attend to.")
    elif opened.config.model.memory().k_top > 0:
        figures["attention.png"] = attention_map(opened)
    with writing(folder, "out"):
        folder.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        save(figure, folder / name)
        print(folder / name)
    return DONE


def plot_attention(run: RunFolder, out: Picture = None) -> int:
    """Draw what a run's model reads: a heat map of the mean weights over a test batch.

    Args:
        run: Folder of the run.
        out: The picture, which ends in .png, .pdf or .svg; None means attention.png in the run's folder.
    """
    from sab.report import figures  # matplotlib takes a while to import

    return _draw(lambda: figures.attention_map(Run.open(run)), out, run / "attention.png")


def plot_credit_paths(
    run: RunFolder,
    target_step: int | None = None,
    target_unit: int | None = None,
    row: int = 0,
    out: Picture = None,
) -> int:
    """Draw to which past moments an output is credited, and by which paths: `sab.trace` on a test sequence.

    Args:
        run: Folder of the run.
        target_step: The step whose output it is, counted from 1; None means the last.
        target_unit: Which entry of that output, counted from 0; None means the largest.
        row: Which sequence of the test batch.
        out: The picture, which ends in .png, .pdf or .svg; None means credit-paths.png in the run's folder.
    """
    from sab.report import figures, traces  # matplotlib takes a while to import

    def figure() -> Any:
        return traces.credit_paths(figures.trace_of(Run.open(run), target_step, target_unit, row))

    return _draw(figure, out, run / "credit-paths.png")


def plot_learning_curve(runs: RunFolders, out: Picture = None) -> int:
    """Draw the training loss and the headline metric of runs of one task over the iterations.

    Args:
        runs: Folders of the runs.
        out: The picture, which ends in .png, .pdf or .svg; None means learning-curve.png in the first run's folder.
    """
    from sab.report import figures  # matplotlib takes a while to import

    opened = figures.labelled(runs)
    return _draw(lambda: figures.learning_curves(opened), out, runs[0] / "learning-curve.png")


def plot_gradient_norms(runs: RunFolders, out: Picture = None) -> int:
    """Draw the gradient norms of runs, before clipping, over the iterations.

    Args:
        runs: Folders of the runs.
        out: The picture, which ends in .png, .pdf or .svg; None means gradient-norms.png in the first run's folder.
    """
    from sab.report import figures  # matplotlib takes a while to import

    opened = figures.labelled(runs)
    return _draw(lambda: figures.gradient_norms(opened), out, runs[0] / "gradient-norms.png")


def plot_scaling(
    records: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILE [FILE ...]")],
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("scaling.png"),
) -> int:
    """Draw what a step costs against the number of steps and the hidden size.

    Args:
        records: What `sab bench --output` wrote; of several records about the same thing the newest counts.
        out: The picture, which ends in .png, .pdf or .svg.
    """
    from sab.report import figures, performance  # matplotlib takes a while to import

    if not records:
        raise ValueMistake("FILE must be given at least once; got none.")
    return _draw(lambda: figures.scaling(performance.load(records)), out, out)


def _draw(figure: Callable[[], Any], out: Path | None, default: Path) -> int:
    """Writes a figure, after a look at whether the place suits."""
    from sab.report.figures import check_picture, save

    path = default if out is None else out
    check_picture(path)
    made = figure()
    with writing(path, "out"):
        path.parent.mkdir(parents=True, exist_ok=True)
    save(made, path)
    print(path)
    return DONE


def plot_bench(
    records: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILE")],
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("."),
    page: Path | None = None,
) -> int:
    """Draw the benchmark's sweeps, and show its table as Markdown or renew the page that holds it.

    Args:
        records: What `sab bench --output` wrote; of several records about the same thing the newest counts.
        out: Folder for the pictures.
        page: Page whose table is to be renewed; None prints the table.
    """
    from sab.report import performance
    from sab.report.figures import save, step_times  # matplotlib takes a while to import

    if not records:
        raise ValueMistake("FILE must be given at least once; got none.")
    read = performance.load(records)
    with writing(out, "out"):
        out.mkdir(parents=True, exist_ok=True)
    for case in performance.SWEPT:
        if swept := performance.swept_records(read, case):
            picture = out / performance.sweep_picture(case)
            save(step_times(swept, case), picture)
            print(picture, file=sys.stderr if page is None else sys.stdout)
    images = Path(os.path.relpath(out, Path(".") if page is None else page.parent)).as_posix()
    if page is None:
        print(performance.page_part(read, images))
    else:
        performance.renew(page, read, images)
        print(page)
    return DONE


def report(
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]")] = (),
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("report.html"),
) -> int:
    """Make one HTML page of runs or records: tables, curves, the credit explorer.

    Args:
        runs: Folders of runs, folders with runs below them, folders of records such as results/, or files of records
            that `sab bench --output` wrote.
        out: The page, one file that needs nothing else to be opened.
    """
    from sab.report.page import document, material

    document.check_out(out)
    with Console(stderr=True).status("reading") as status:  # on a terminal alone
        document.write(material.gather(runs), out, lambda name: status.update(Text(f"tracing {name}")))
    print(out)
    return DONE


def watch(run: RunFolder, port: int = 8765) -> int:
    """Serve the page of a run on this machine alone, kept fresh while it trains.

    Args:
        run: Folder of the run.
        port: Port on 127.0.0.1; 0 takes one that is free.
    """
    from sab.report.page import live

    try:
        live.serve(run, port, lambda address: print(f"{run} is at {address}; Ctrl-C ends the watch.", flush=True))
    except KeyboardInterrupt:
        print()
    return DONE


def info(
    run: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")] = None,
    backends: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
) -> int:
    """Tell what a run is and how far it has come, or what computes on this machine.

    Args:
        run: Folder of the run.
        backends: Tell of each backend whether it can be used here, or why not, and which one `auto` takes.
    """
    if backends:
        _show(_backends())
        return DONE
    if run is None:
        raise ValueMistake("run must be given a value, or --backends; got none.", "run")
    opened = Run.open(run)
    result, evaluations = opened.result(), opened.evaluations()
    facts = dict(opened.config.options())
    if result is not None:
        facts |= {"status": result.status, "ended": result.message, "solved_at": result.solved_at}
        facts["best_at"] = result.best_at
        facts |= {"wall_time": show_seconds(result.wall_time), "trained_on": result.device, "commit": result.commit}
        for split, metrics in {"valid": result.valid, "test": result.metrics}.items():
            facts |= {f"{split} {metric}": value for metric, value in metrics.items()}
    else:
        facts["status"] = "not at its end"
    if evaluations:
        facts["last evaluation"] = f"iteration {evaluations[-1]['step']}"
        facts |= {f"last valid {metric}": value for metric, value in evaluations[-1]["metrics"].items()}
    _show(facts)
    return DONE


def _show(facts: dict[str, Any]) -> None:
    width = max(map(len, facts))
    for fact, value in facts.items():
        print(f"{fact:{width}}  {value}")


def _backends() -> dict[str, str]:
    """What is to be told of the backends, and what `auto` takes for the default layer on each kind of device."""
    import torch

    from sab.layers import SABLSTM
    from sab.ops import dispatch

    facts = {name: f"{'usable' if usable else 'not usable'}: {why}" for name, (usable, why) in dispatch.here().items()}
    for device in ("cuda", "cpu") if torch.cuda.is_available() else ("cpu",):
        taken = SABLSTM(128, 128, device=device).backend_for(torch.zeros(2, 1, 128, device=device))
        facts[f"auto on {device}"] = taken
    return facts


def doctor(out: Path = diagnosis.RUNS, data_dir: Path | None = None) -> int:
    """Look at what is installed here, and whether it works.

    Args:
        out: Folder that runs are to be kept below.
        data_dir: Folder of the data sets; None means SAB_DATA or, without one, the user's cache.
    """
    return diagnosis.main(out, data_dir)


def tasks() -> int:
    """List the tasks."""
    for name, task in TASKS.items():
        print(f"{name:{max(map(len, TASKS))}}  {task.summary}")
    return DONE


def demo(out: Path | None = None, seed: int = 0) -> int:
    """Train SAB and truncated backpropagation side by side on a problem that only one of them can learn.

    Args:
        out: Folder for the two runs and the pictures; None means runs/demo-seed<seed>.
        seed: What the data and the initial weights depend on.
    """
    from sab.experiments.demo import demo as run_demo  # matplotlib takes a while to import

    folder = Path(f"runs/demo-seed{seed}") if out is None else out
    results = run_demo(folder, seed, console=Console())
    if any(result.status == "interrupted" for result in results.values()):
        print(f"Interrupted. Go on with: sab demo --out {shlex.quote(str(folder))} --seed {seed}")
        return INTERRUPTED
    print(f"Pictures: {folder / 'attention.png'}, {folder / 'curves.png'}")
    print(f"Runs: {folder / 'sab'}, {folder / 'tbptt'}")
    return DONE


def bench(
    cases: Annotated[str | None, tyro.conf.arg(metavar="{None}|CASE,CASE,...")] = None,
    device: Device = "auto",
    minutes: float | None = None,
    seconds: float | None = None,
    output: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None,
    quick: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    jobs: int | None = None,
    compiled_steps: int = 32,
    commit: str | None = None,
) -> int:
    """Measure the layer beside torch.nn.LSTM of the same size.

    Args:
        cases: Which cases, as in A,B; None means those that were chosen for the device.
        device: Where to measure; auto takes CUDA where there is one.
        minutes: After so many minutes nothing further is begun; None sets no limit.
        seconds: How long each measurement goes on; None means 0.25 on a GPU and 2 elsewhere.
        output: File for the records as JSON lines, written anew after each of them; None writes none.
        quick: Tiny sizes and few repeats, to see that it works.
        jobs: How many processes compile kernels ahead on a GPU; None means as many as there are cores, up to 12.
        compiled_steps: Length of the sequence with which torch.compile of the reference is measured.
        commit: What the records give as the commit; None means that of the checkout that the code is in.
    """
    from sab.experiments import bench as benchmark
    from sab.experiments.progress import Bar
    from sab.report import performance

    where = resolve_device(device)
    names = benchmark.default_cases(where) if cases is None else [name.strip() for name in cases.split(",")]
    if seconds is None:
        seconds = 0.25 if where.type == "cuda" else 2.0
    check_float("seconds", seconds, above=0)
    deadline = None if minutes is None else time.monotonic() + 60 * check_float("minutes", minutes, above=0)
    jobs = min(os.cpu_count() or 1, 12) if jobs is None else check_int("jobs", jobs, 0)
    chosen = benchmark.rows(names, where, check_int("compiled_steps", compiled_steps, 1), quick)
    if output is not None:
        with writing(output, "output"):
            output.parent.mkdir(parents=True, exist_ok=True)
    records: list[dict[str, Any]] = []
    console = Console()
    with Bar(console, len(chosen)) as bar:
        for record in benchmark.bench(chosen, where, 0.001 if quick else seconds, deadline, jobs, bar.begin):
            record["commit"] = commit or record["commit"]
            records.append(record)
            bar.end(performance.line(record))
            if output is not None:
                benchmark.save(records, output)
    if any(record["kind"] != "context" for record in records):
        console.width = console.width if console.is_terminal else 120
        console.print(performance.table(records))
    for sentence in performance.summary(records):
        console.print(sentence, soft_wrap=True, highlight=False)
    left = len(chosen) - len(records)
    if left:
        first = chosen[len(records)].label
        print(f"The time was over before {left} of {len(chosen)} rows were begun, the first of them {first}.")
    if output is not None:
        print(f"Records: {output}")
    return DONE


def reproduce(
    tasks: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[TASK ...]")] = (),
    rows: Annotated[str | None, tyro.conf.arg(metavar="{None}|PATTERN,PATTERN,...")] = None,
    seeds: Annotated[str, tyro.conf.arg(metavar="SEED,SEED,...")] = "0,1,2",
    minutes: float | None = None,
    iterations: int | None = None,
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("runs/reproduce"),
    results: Path = Path("results"),
    device: Device = "auto",
    together: int | None = None,
    data_dir: Path | None = None,
    commit: str | None = None,
    on: Literal["ray"] | None = None,
    address: str | None = None,
    show_list: Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(name="list")] = False,
    status: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    report: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
) -> int:
    """Train every row of the paper's tables, and show the paper's numbers beside ours.

    Args:
        tasks: Whose tables; none means all that there are.
        rows: Which rows, by patterns of their ids as in 'copying-100-*'; None means all. --list shows the ids.
        seeds: The seeds of each row, as in 0,1,2.
        minutes: After so many minutes every run writes its checkpoint and the same command goes on; None: no limit.
        iterations: How many iterations each row has; None means as many as its table says.
        out: Folder for the runs, which are skipped or continued where they are there already.
        results: Folder for the records, one JSON line a run in a file for each task.
        device: Where to train; auto takes CUDA where there is one.
        together: How many runs take turns, or with --on ray share a GPU; None means 8 on a GPU, which one leaves
            mostly idle, and 1 elsewhere. Runs with a hidden size above 128 have it to themselves.
        data_dir: Folder of the data sets; None means SAB_DATA or, without one, the user's cache.
        commit: What the records give as the commit; None means that of the checkout that the code is in.
        on: Where the runs are tasks: ray is a Ray cluster, whose machines share the folders --out and --data-dir; None
            trains in this process.
        address: That of the cluster, as in 10.0.0.1:6379, or auto for the one that this machine is part of; None means
            RAY_ADDRESS or, without one, a local cluster that is started and ended by this command.
        show_list: Show the rows with the paper's values, and train nothing.
        status: Show what has ended, is under way or left, and train nothing.
        report: Make docs/results.md, the README's table and the figures from the records, and train nothing.
    """
    from sab.experiments import reproduce as runner
    from sab.experiments.tables import find
    from sab.report import results as tables

    chosen = find(tasks, None if rows is None else [pattern.strip() for pattern in rows.split(",")])
    numbers = _parse_seeds(seeds)
    if show_list:
        print("\n".join(tables.listing([row.on(data_dir) for row in chosen])))
        return DONE
    if status:
        standings = runner.standings(runner.jobs_of(chosen, numbers, out, iterations, device, data_dir), results)
        print("\n".join(tables.standing_lines(standings)))
        return DONE
    if report:
        return _report(results)
    if address is not None and on is None:
        raise ValueMistake(f"address must be given together with --on ray; got {address!r} alone.", "address")
    options = minutes, iterations, device, together, commit, data_dir, Console()
    if on is None:
        outcome = runner.reproduce(chosen, numbers, out, results, *options)
    else:
        from sab.experiments.cluster import reproduce_on_ray

        outcome = reproduce_on_ray(chosen, numbers, out, results, *options, address)
    for label, sentence in outcome.failed.items():
        print(f"sab: {label} failed: {sentence}", file=sys.stderr)
    if outcome.left:
        given = {"rows": rows, "seeds": seeds, "minutes": minutes, "iterations": iterations, "out": out}
        given |= {"results": results, "device": device, "together": together, "data-dir": data_dir, "commit": commit}
        given |= {"on": on, "address": address}
        words = [word for option, value in given.items() if value is not None for word in (f"--{option}", str(value))]
        total = len(chosen) * len(numbers)
        print(f"{len(outcome.left)} of {total} runs are not at their end, the first of them {outcome.left[0].label}.")
        print(f"Go on with: {shlex.join(['sab', 'reproduce', *tasks, *words])}")
    else:
        print(f"All {len(chosen) * len(numbers)} runs are at their end; their records are in {results}.")
    if outcome.was_interrupted:
        return INTERRUPTED
    return FAILED if outcome.failed else DONE


def _report(results: Path) -> int:
    """Renews the tables and the figures of the repository in the current folder."""
    from sab.report import figures, pages  # matplotlib takes a while to import
    from sab.report import results as tables

    read = tables.load(results)
    images = Path("docs/images")
    pages.renew(Path("docs/results.md"), "results", tables.page_part(read, "images"))
    pages.renew(Path("README.md"), "results", tables.readme_part(read))
    print("docs/results.md\nREADME.md")
    with writing(images):
        images.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.of_results(read).items():
        figures.save(figure, images / name)
        print(images / name)
    return DONE


PLOTS: dict[str, Callable[..., int]] = {
    "attention": plot_attention,
    "credit-paths": plot_credit_paths,
    "learning-curve": plot_learning_curve,
    "gradient-norms": plot_gradient_norms,
    "scaling": plot_scaling,
    "bench": plot_bench,
}
"""What `sab plot KIND` draws."""
COMMANDS: dict[str, Callable[..., int]] = {
    "train": train,
    "eval": evaluate_run,
    "sample": sample,
    "score": score,
    "data": data_command,
    "plot": plot,
    "report": report,
    "watch": watch,
    "info": info,
    "doctor": doctor,
    "tasks": tasks,
    "demo": demo,
    "bench": bench,
    "reproduce": reproduce,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line, by default that of the process; gives the exit status."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        status = _dispatch(arguments)
        print(end="", flush=True)
        return status
    except Mistake as mistake:
        print(f"sab: {_with_flag(mistake)}", file=sys.stderr)
        return MISTAKEN
    except ModuleNotFoundError as error:
        return _say_missing(error)
    except (MemoryError, RuntimeError, TypeError) as error:
        if not _is_out_of_memory(error):
            raise
        advice = "make --hidden-size, --batch-size, --length or --k-top smaller"
        print(f"sab: there is not enough memory; {advice}.", file=sys.stderr)
        return MISTAKEN
    except KeyboardInterrupt:
        print("sab: interrupted.", file=sys.stderr)
        return INTERRUPTED
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # of which rich makes an exit
            return UNHEARD
        raise
    except OSError as error:
        return _say_refused(error) if error.filename is not None else _say_unheard(error)


def _say_refused(error: OSError) -> int:
    """Tells which file or folder the system refused, as one that is closed to this user."""
    print(f"sab: {error.filename!r} must be there and open to you; it is not: {error.strerror}.", file=sys.stderr)
    return MISTAKEN


def _say_unheard(error: OSError) -> int:
    """Tells why stdout takes no more, as on a full disk; nothing where its reader went away, as `head` does."""
    try:
        print(flush=True)  # if it is stdout that failed, it fails again
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python tries again when it ends
        if isinstance(error, BrokenPipeError):
            return UNHEARD
        print(f"sab: stdout must be a place that can be written to; it is not: {error.strerror}.", file=sys.stderr)
        return MISTAKEN
    raise error


def _dispatch(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: sab COMMAND [OPTIONS]\n")
        for name, command in COMMANDS.items():
            print(f"  {name:10}{(command.__doc__ or '').splitlines()[0]}")
        print("\n`sab COMMAND --help` shows a command's options, `sab --version` the version.")
        return DONE if arguments else MISTAKEN
    name, *rest = arguments
    if name == "--version":
        print(f"sab {__version__}")
        return DONE
    check_choice("command", name, COMMANDS)
    if name == "train":
        return train(rest)
    if name == "data":
        return data_command(rest)
    command, called = COMMANDS[name], f"sab {name}"
    if name == "plot" and rest and rest[0] in PLOTS:  # the run in a folder of this name is ./bench
        command, called, rest = PLOTS[rest[0]], f"sab plot {rest[0]}", rest[1:]
    return _call(command, rest, called)


def _call(command: Callable[..., int], arguments: Sequence[str], called: str) -> int:
    """What a command does with its arguments, which its signature tells how to parse."""

    @functools.wraps(command)  # parsed first and called later, since what is written to stderr meanwhile is tyro's
    def parsed(*positional: Any, **options: Any) -> Any:
        return functools.partial(command, *positional, **options)

    return _parse(parsed, arguments, prog=called)()


def _is_out_of_memory(error: Exception) -> bool:
    """Whether an error is torch's or Python's way to say that a tensor is too large; torch has several."""
    words = (
        "allocate memory",
        "not enough memory",
        "out of memory",
        "calculation overflowed",
        "multiplication overflow",
    )
    told = str(error)
    return isinstance(error, MemoryError) or any(word in told for word in (*words, "Overflow when unpacking"))


def _with_flag(mistake: Mistake) -> str:
    """The sentence, with the option spelled as it is on the command line."""
    sentence, option = str(mistake), mistake.option
    if option is None or option == "command":
        return sentence
    flag = option.upper() if option in POSITIONAL else "--" + option.replace("_", "-")
    return re.sub(rf"(?<![\w-]){re.escape(option)}(?![\w-])", flag, sentence, count=1)
