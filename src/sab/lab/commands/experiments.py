"""`sab demo`, `bench`, `reproduce`, `reproduce drop-in` and `reproduce rivals`."""

from __future__ import annotations

import os
import shlex
import sys
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from sab.errors import UserValueError, check_float, check_int
from sab.lab.commands.parsing import parse_rates, parse_seeds
from sab.lab.files import writing
from sab.lab.training.config import Device, resolve_device
from sab_cli.exits import DONE, FAILED, INTERRUPTED

TRACED = 600
"""Over how many steps the demonstration's page traces answers: enough for all ten, in a few seconds."""


def demo(out: Path | None = None, seed: int = 0) -> int:
    """Train SAB and truncated backpropagation side by side on a problem that only one of them can learn.

    Args:
        out: Folder for the two runs, the pictures and the report page; None means runs/demo-seed<seed>.
        seed: Seed of the data and of the initial weights.
    """
    from sab.lab.experiments import demo as demonstration
    from sab.lab.report import figures  # matplotlib takes a while to import
    from sab.lab.report.page import document, material

    folder, console = Path(f"runs/demo-seed{seed}") if out is None else out, Console()
    results = demonstration.demo(folder, seed, console=console)
    if any(result.status == "interrupted" for result in results.values()):
        print(f"Interrupted. Go on with: sab demo --out {shlex.quote(str(folder))} --seed {seed}")
        return INTERRUPTED
    runs = {label: folder / method for method, label in demonstration.LABELS.items()}
    figures.save(figures.learning_curve(runs), folder / "curves.png")
    figures.save(figures.attention(folder / "sab"), folder / "attention.png")
    console.print(demonstration.table(results))
    page = folder / "report.html"
    with console.status("making the report page"):
        document.write(material.gather([folder / method for method in demonstration.LABELS]), page, traced_steps=TRACED)
    print(f"Pictures: {folder / 'attention.png'}, {folder / 'curves.png'}")
    print(f"Runs: {folder / 'sab'}, {folder / 'tbptt'}")
    print(f"Report page, to open in a browser: {page}")
    return DONE


def bench(
    cases: Annotated[str | None, tyro.conf.arg(metavar="{None}|PATTERN,PATTERN,...")] = None,
    device: Device = "auto",
    minutes: float | None = None,
    seconds: float | None = None,
    output: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None,
    quick: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    jobs: int | None = None,
    commit: str | None = None,
) -> int:
    """Measure the layers, compared with torch.nn's of the same cell and size.

    Args:
        cases: Which cases, as in A,B or 'n-*'; None means those of the device, with --quick all.
        device: Where to measure; auto takes CUDA where there is one.
        minutes: After so many minutes nothing further is begun; None sets no limit.
        seconds: How long each measurement goes on; None means 0.5 on a GPU and 2 elsewhere.
        output: File for the records as JSON lines, written anew after each of them; None writes none.
        quick: Tiny sizes and few repeats, to see that it works.
        jobs: How many processes compile kernels ahead on a GPU; None means as many as there are cores, up to 12.
        commit: The commit that the records name; None means that of the checkout that the code is in.
    """
    from sab.lab.experiments import bench as benchmark
    from sab.lab.experiments.progress import Bar
    from sab.lab.report import performance

    where = resolve_device(device)
    if seconds is None:
        seconds = 0.5 if where.type == "cuda" else 2.0
    check_float("seconds", seconds, above=0)
    deadline = None if minutes is None else time.monotonic() + 60 * check_float("minutes", minutes, above=0)
    jobs = min(os.cpu_count() or 1, 12) if jobs is None else check_int("jobs", jobs, 0)
    chosen = benchmark.cases(cases, where, quick)
    if output is not None:
        with writing(output, "output"):
            output.parent.mkdir(parents=True, exist_ok=True)
    records: list[dict[str, Any]] = []
    console = Console()
    if quick:
        cut = "--quick cut the sizes and the repeats: this shows that the benchmark works, not how fast the layer is."
        console.print(cut, soft_wrap=not console.is_terminal, highlight=False)
    with Bar(console, len(chosen)) as bar:
        for record in benchmark.bench(chosen, where, 0.001 if quick else seconds, deadline, jobs, bar.begin):
            record["commit"] = commit or record["commit"]
            records.append(record)
            bar.end(performance.line(record))
            if output is not None:
                benchmark.save(records, output)
    if records:
        console.width = console.width if console.is_terminal else 120
        console.print(performance.table(records))
    for sentence in performance.summary(records):
        console.print(sentence, soft_wrap=not console.is_terminal, highlight=False)
    left = len(chosen) - len(records)
    if left:
        first = chosen[len(records)].case
        print(f"The time was over before {left} of {len(chosen)} cases were begun, the first of them {first}.")
    if output is not None:
        print(f"Records: {output}")
    return DONE


def reproduce(
    tasks: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[TASK ...]")] = (),
    rows: Annotated[str | None, tyro.conf.arg(metavar="{None}|PATTERN,PATTERN,...")] = None,
    paper: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    seeds: Annotated[str | None, tyro.conf.arg(metavar="{None}|SEED,SEED,...")] = None,
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
) -> int:
    """Train every row of the paper's tables, and compare with the paper's numbers.

    Two other tables: `sab reproduce drop-in` trains torch.nn's layers and SAB's with default options, `sab reproduce
    rivals` SAB and the alternatives. Their options differ: `sab reproduce rivals --help` shows them.

    Args:
        tasks: Whose tables; none means all that there are.
        rows: Which rows, by patterns of their ids as in 'copying-100-*'; None means all. --list shows the ids.
        paper: The paper's own rows alone, those of SAB as we train it: no further readings, controls, cells or lengths.
        seeds: The seeds of each row, as in 0,1,2; None means those that the row needs: 0,1,2 for most, 0 for a few.
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
        address: Address of the cluster, as in 10.0.0.1:6379, or auto for the one that this machine is part of; None
            means RAY_ADDRESS or, without one, a local cluster that is started and ended by this command.
        show_list: Show the rows with the paper's values, and train nothing.
        status: Show how many rows have all their seeds, and which runs have ended, run or are left; train nothing.
    """
    from sab.lab.experiments import reproduce as runner
    from sab.lab.experiments.tables import find
    from sab.lab.report import results as tables

    chosen = find(tasks, None if rows is None else [pattern.strip() for pattern in rows.split(",")], paper)
    numbers = None if seeds is None else parse_seeds(seeds)
    if show_list:
        print("\n".join(tables.listing([row.on(data_dir) for row in chosen])))
        return DONE
    if status:
        standings = runner.standings(runner.jobs_of(chosen, numbers, out, iterations, device, data_dir), results)
        of_paper, of_others = ([row for row in chosen if row.is_papers == whose] for whose in (True, False))
        kinds = {"Rows of the paper": of_paper, "Other rows": of_others}
        covered = {kind: runner.coverage(rows_of_kind, results) for kind, rows_of_kind in kinds.items()}
        print("\n".join([*tables.coverage_lines(covered), *tables.standing_lines(standings)]))
        return DONE
    if address is not None and on is None:
        raise UserValueError(f"address must be given together with --on ray; got {address!r} alone.", "address")
    options = minutes, iterations, device, together, commit, data_dir, Console()
    if on is None:
        outcome = runner.reproduce(chosen, numbers, out, results, *options)
    else:
        from sab.lab.experiments.cluster import reproduce_on_ray

        outcome = reproduce_on_ray(chosen, numbers, out, results, *options, address)
    for label, sentence in outcome.failed.items():
        print(f"sab: {label} failed: {sentence}", file=sys.stderr)
    total = sum(row.seeds if numbers is None else len(numbers) for row in chosen)
    if outcome.left:
        given = {"rows": rows, "seeds": seeds, "minutes": minutes, "iterations": iterations, "out": out}
        given |= {"results": results, "device": device, "together": together, "data-dir": data_dir, "commit": commit}
        given |= {"on": on, "address": address}
        words = [word for option, value in given.items() if value is not None for word in (f"--{option}", str(value))]
        words += ["--paper"] if paper else []
        print(f"{len(outcome.left)} of {total} runs are not at their end, the first of them {outcome.left[0].label}.")
        print(f"Go on with: {shlex.join(['sab', 'reproduce', *tasks, *words])}")
    else:
        print(f"All {total} runs are at their end; their records are in {results}.")
    if outcome.was_interrupted:
        return INTERRUPTED
    return FAILED if outcome.failed else DONE


def drop_in(
    tasks: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[TASK ...]")] = (),
    cells: Annotated[str | None, tyro.conf.arg(metavar="{None}|CELL,CELL,...")] = None,
    methods: Annotated[str | None, tyro.conf.arg(metavar="{None}|METHOD,METHOD,...")] = None,
    rates: Annotated[str | None, tyro.conf.arg(metavar="{None}|RATE,RATE,...")] = None,
    seeds: Annotated[str | None, tyro.conf.arg(metavar="{None}|SEED,SEED,...")] = None,
    slice: Annotated[str | None, tyro.conf.arg(metavar="{None}|I/N")] = None,
    minutes: float | None = None,
    iterations: int | None = None,
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("runs/drop-in"),
    results: Path = Path("results"),
    device: Device = "auto",
    together: int | None = None,
    threads: int | None = None,
    data_dir: Path | None = None,
    commit: str | None = None,
    show_list: Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(name="list")] = False,
) -> int:
    """Train torch.nn's layers and SAB's with default options, all alike: the table of docs/drop-in.md.

    On real data the learning rate is first chosen on validation data, by runs from a seed of their own. A run that is
    recorded is not made again.

    Args:
        tasks: Which tasks, as in copying-100 or 'copying-*'; none means all. --list shows them.
        cells: Which cells, as in lstm,gru; None means all.
        methods: Which methods, as in torch,sab; None means all.
        rates: Which learning rates, as in 5e-4,2e-3; None means all. On real data one of these is chosen.
        seeds: The seeds that are reported, as in 0,1; None means those of the table.
        slice: As in 2/16: every 16th run from the 2nd on, so that 16 processes share the table; None means all.
        minutes: After so many minutes every run writes its checkpoint and the same command goes on; None: no limit.
        iterations: How many iterations each run has, for a short trial; None means as many as the table says.
        out: Folder for the runs, which are continued where they are there already.
        results: Folder for the records, one JSON line a run in dropin.jsonl.
        device: Where to train; auto takes CUDA where there is one.
        together: How many runs take turns in this process; None means 8 on a GPU and 1 elsewhere.
        threads: How many CPU threads torch may use; None leaves that to torch. With many processes 1 is best.
        data_dir: Folder of the data sets; None means SAB_DATA or, without one, the user's cache.
        commit: What the records give as the commit; None means that of the checkout that the code is in.
        show_list: Show the runs and which of them are recorded, and train nothing.
    """
    from sab.lab.experiments import dropin

    part = dropin.Part(tasks, *_part(rates, seeds), slice, _words(cells), _words(methods))
    options = minutes, iterations, device, together, threads, commit, data_dir
    return _train_part(part, out, results, options, show_list)


def rivals(
    tasks: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[TASK ...]")] = (),
    methods: Annotated[str | None, tyro.conf.arg(metavar="{None}|METHOD,METHOD,...")] = None,
    rates: Annotated[str | None, tyro.conf.arg(metavar="{None}|RATE,RATE,...")] = None,
    seeds: Annotated[str | None, tyro.conf.arg(metavar="{None}|SEED,SEED,...")] = None,
    slice: Annotated[str | None, tyro.conf.arg(metavar="{None}|I/N")] = None,
    minutes: float | None = None,
    iterations: int | None = None,
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("runs/rivals"),
    results: Path = Path("results"),
    device: Device = "auto",
    together: int | None = None,
    threads: int | None = None,
    data_dir: Path | None = None,
    commit: str | None = None,
    costs: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    seconds: float = 2.0,
    show_list: Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(name="list")] = False,
) -> int:
    """Train SAB and the alternatives, at equal parameters and equally long: the table of docs/rivals.md.

    The learning rate of each method is first chosen on validation data, by runs from a seed of their own. A run that is
    recorded is not made again. Most methods need the extra `rivals`.

    Args:
        tasks: Which tasks, as in copying-300 or 'copying-*'; none means all. --list shows them.
        methods: Which methods, as in sab,lstm; None means all.
        rates: Which learning rates, as in 5e-4,2e-3; None means all. One of these is chosen.
        seeds: The seeds that are reported, as in 0,1; None means those of the table.
        slice: As in 2/16: every 16th run from the 2nd on, so that 16 processes share the table; None means all.
        minutes: After so many minutes every run writes its checkpoint and the same command goes on; None: no limit.
        iterations: How many iterations each run has, for a short trial; None means as many as the table says.
        out: Folder for the runs, which are continued where they are there already.
        results: Folder for the records, one JSON line a run in rivals.jsonl.
        device: Where to train; auto takes CUDA where there is one.
        together: How many runs take turns in this process; None means 8 on a GPU and 1 elsewhere.
        threads: How many CPU threads torch may use; None leaves that to torch. With many processes 1 is best.
        data_dir: Folder of the data sets; None means SAB_DATA or, without one, the user's cache.
        commit: What the records give as the commit; None means that of the checkout that the code is in.
        costs: Train nothing, but measure time and memory of an update and of a step of streaming inference, each method
            alone on the device, into rivals-costs.jsonl.
        seconds: How long each measurement of --costs goes on.
        show_list: Show the runs and which of them are recorded, and train nothing.
    """
    from sab.lab.experiments import rivals as table

    part = table.Part(tasks, *_part(rates, seeds), slice, _words(methods))
    if costs and not show_list:
        return _measure_costs(
            part, results, device, check_float("seconds", seconds, above=0), minutes, threads, data_dir, commit
        )
    options = minutes, iterations, device, together, threads, commit, data_dir
    return _train_part(part, out, results, options, show_list, table.RivalRunner)


def _measure_costs(
    part: Any,
    results: Path,
    device: str,
    seconds: float,
    minutes: float | None,
    threads: int | None,
    data_dir: Path | None,
    commit: str | None,
) -> int:
    from sab.lab.experiments import costs

    left = 0
    measured = costs.measure_part(part, results, resolve_device(device), seconds, minutes, threads, data_dir, commit)
    for label, record in measured:
        left += record is None
        if record is not None:
            print(f"{label}: {record['update_milliseconds']:.2f} ms an update, {record['parameters']:,} parameters")
    if left:
        print(f"{left} methods are left. The same command goes on.")
    else:
        print(f"All are measured; their records are in {results / f'{costs.FILE}.jsonl'}.")
    return DONE


def _part(rates: str | None, seeds: str | None) -> tuple[tuple[float, ...] | None, tuple[int, ...] | None]:
    """The learning rates and seeds that a part of a table has."""
    return None if rates is None else parse_rates(rates), None if seeds is None else tuple(parse_seeds(seeds))


def _train_part(
    part: Any, out: Path, results: Path, options: tuple[Any, ...], show_list: bool, runner_type: Any = None
) -> int:
    """Trains a part of a table whose rates are chosen, or lists its runs."""
    from sab.lab.experiments import selection

    if show_list:
        found = selection.states(part, results, options[1])
        width = max(map(len, found), default=0)
        print("\n".join(f"{label:{width}}  {state}" for label, state in found.items()))
        return DONE
    came_to = selection.train_part(part, out, results, *options, runner_type=runner_type)
    for label, sentence in came_to.outcome.failed.items():
        print(f"sab: {label} failed: {sentence}", file=sys.stderr)
    if came_to.left:
        print(f"{len(came_to.left)} of {came_to.total} runs are not at their end, the first of them {came_to.left[0]}.")
        if came_to.undecided:
            print(f"{len(came_to.undecided)} of them wait for selection runs that are not recorded yet.")
        print("The same command goes on.")
    else:
        file = results / f"{part.table.file}.jsonl"
        print(f"All {came_to.total} runs are at their end; their records are in {file}.")
    if came_to.outcome.was_interrupted:
        return INTERRUPTED
    return FAILED if came_to.outcome.failed else DONE


def _words(given: str | None) -> tuple[str, ...] | None:
    """The words in a text such as lstm,gru."""
    return None if given is None else tuple(word.strip() for word in given.split(","))


TABLES = {"drop-in": drop_in, "rivals": rivals}
"""The tables with a command of their own, below `sab reproduce`."""
