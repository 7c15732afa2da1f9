"""Every row of the paper's tables is there, with its values and a configuration that can be built without data."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sab.errors import UserError
from sab.lab.data import DATASETS
from sab.lab.experiments.recipe import OURS, ours
from sab.lab.experiments.settings import BATCHES, PAPERS, epochs_in
from sab.lab.experiments.tables import COLUMNS, ROWS, find
from sab.lab.tasks import MNIST, PTB, TASKS, Adding, Text8
from sab.lab.tasks.lengths import grid
from sab.lab.training import RunConfig

ROOT = Path(__file__).parents[3]

COPYING = """
100 bptt 98.8 / 0.030 / 0.002; tbptt-5 31.0 / 1.737 / 0.145; tbptt-10 29.6 / 1.772 / 0.148;
100 tbptt-20 30.5 / 1.714 / 0.143; sab-1-1 17.6 / 2.044 / 0.170; sab-1-10 62.7 / 0.964 / 0.080;
100 sab-5-5 99.6 / 0.017 / 0.001; sab-10-10 100.0 / 0.000 / 0.001;
200 bptt 56.0 / 1.07 / 0.046; tbptt-5 17.1 / 2.03 / 0.092; tbptt-10 20.2 / 1.98 / 0.090;
200 tbptt-20 35.8 / 1.61 / 0.073; tbptt-150 35.0 / 1.596 / 0.073; sab-1-1 29.8 / 1.818 / 0.083;
200 sab-5-5 99.3 / 0.032 / 0.001; sab-10-10 98.7 / 0.049 / 0.002;
300 bptt 35.9 / 0.197 / 0.047; tbptt-1 14.0 / 2.077 / 0.065; tbptt-20 25.7 / 1.848 / 0.197;
300 tbptt-150 24.4 / 1.857 / 0.058; sab-1-1 26.7 / 0.27 / 0.059; sab-1-5 46.5 / 1.340 / 0.042;
300 sab-5-5 98.9 / 0.048 / 0.002;
"""
ADDING = """
200 bptt 0.0000; tbptt-20 0.0011; tbptt-50 0.0003; sab-5-10 0.0004; sab-10-10 0.0001;
400 bptt 0.00000; tbptt-100 0.00068; sab-5-10 0.00037; sab-10-10 0.00014;
"""


PTB_VALUES = """
bptt 1.48 / 1.38; tbptt-1 1.57 / 1.47; tbptt-5 1.54 / 1.44; tbptt-20 1.52 / 1.43; sab-5-5 1.51 / 1.42;
sab-5-10 1.49 / 1.40;
"""
TEXT8_VALUES = "bptt 1.54 / 1.51; tbptt-5 1.64 / 1.60; sab-5-5 1.56 / 1.53"
MNIST_VALUES = "bptt 91.2 / 90.3; sab-14-5 90.6 / 89.8; sab-14-10 92.2 / 90.9; sab-10-10 92.2 / 91.1"


def printed() -> dict[str, str]:
    """The paper's tables, typed in once more: the values by the beginning of a row's id."""

    def entries(line: str) -> Iterator[tuple[str, str]]:
        for entry in line.strip().rstrip(";").split(";"):
            method, value = entry.strip().split(" ", 1)
            yield method, value

    values: dict[str, str] = {}
    for task, text in (("copying", COPYING), ("adding", ADDING)):
        for line in text.strip().splitlines():
            length, rest = line.split(" ", 1)
            values |= {f"{task}-{length}-{method}": value for method, value in entries(rest)}
    for task, text in (("ptb", PTB_VALUES), ("text8", TEXT8_VALUES), ("mnist", MNIST_VALUES)):
        values |= {f"{task}-{method}": value for method, value in entries(text)}
    return values


@pytest.mark.parametrize(("start", "value"), printed().items())
def test_every_row_of_the_paper(start: str, value: str) -> None:
    row = ROWS[f"{start}-ours" if "-sab-" in start else start]
    assert " / ".join(row.paper[column] for column in COLUMNS[row.task]) == value


def test_the_paper_has_forty_five_rows() -> None:
    assert len(printed()) == 45
    assert len([row for row in ROWS.values() if row.is_papers]) == 45
    assert [row.id for row in ROWS.values()] == list(ROWS), "no two rows have the same id"


CONTROLS = [
    *("copying-100-bptt-ours", "copying-100-tbptt-5-ours", "copying-100-tbptt-10-ours"),
    *("ptb-bptt-ours", "ptb-tbptt-5-ours", "text8-tbptt-5-ours"),
    *("mnist-bptt-ours", "mnist-tbptt-14-ours", "mnist-tbptt-10-ours", "mnist-permuted-bptt-ours"),
]
VARIANTS = ("gru", "rnn_tanh", "unclipped")


def test_what_is_in_no_table_of_the_paper() -> None:
    known = printed()
    extra = [row.id for row in ROWS.values() if not row.paper]
    assert sorted(extra) == sorted(
        [
            *CONTROLS,
            *(f"copying-{length}-sab-10-10-ours" for length in (300, 500, 1000, 2000)),
            "mnist-permuted-sab-14-10-ours",
            *(f"ptb-sab-5-10-ours-{variant}" for variant in VARIANTS),
            *(f"mnist-sab-14-10-ours-{variant}" for variant in VARIANTS),
        ]
    )
    readings = [row for row in ROWS.values() if row.reading in ("as written", "as released")]
    assert {row.id.rpartition("-as-")[0] for row in readings} == {
        *(f"copying-{length}-sab-5-5" for length in (100, 200, 300)),
        *(f"copying-{length}-sab-10-10" for length in (100, 200)),
        *("ptb-sab-5-10", "text8-sab-5-5", "mnist-sab-14-10"),
    }
    assert len(ROWS) == len(known) + len(extra) + len(readings)
    assert [row.id for row in ROWS.values() if row.is_control] == CONTROLS


SIZES = {"copying": (128, 64), "adding": (128, 64), "ptb": (1000, 32), "text8": (1000, 64), "mnist": (128, 64)}
RATES = {"ptb": 2e-3}
"""Where the paper's learning rate is not 1e-3."""


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_a_row_is_the_run_that_its_name_says(row) -> None:
    config = row.config(7)
    options = config.options()
    assert RunConfig.from_json(config.to_json()) == config
    assert (options["task"], options["method"], options["cell"]) == (row.task, row.method, row.cell)
    if row.length is not None:
        assert options["length"] == row.length
    assert (options["hidden_size"], options["batch_size"]) == SIZES[row.task]
    assert options["seed"] == 7
    memory = config.model.layer_config()
    assert memory.k_trunc == (None if row.method == "bptt" else row.k_trunc)
    assert (memory.k_top, memory.k_att) == (row.k_top if row.method == "sab" else 0, row.k_att)
    reading = options["scorer"], options["weighting"], options["readout"]
    if row.reading == "as written":
        assert reading == ("affine", "relu", "hidden+weights")
    elif row.reading == "as released":
        assert reading == ("affine_tanh", "relu_norm", "hidden+summary")
    if row.reading != "ours":
        plain = [options[name] for name in ("lr", "lr_decay", "clip", "input_scale")]
        assert plain == [RATES.get(row.task, 1e-3), None, 1.0, 1.0]
        assert options.get("train_lengths", "fixed") == "fixed"
    if row.reading in ("as written", "as released"):
        assert options["max_microstates"] == config.task.steps // row.k_att, "a bias for each"
    assert row.config(0, iterations=5, device="cpu").training.iterations == 5


def test_k_att_is_the_papers() -> None:
    others = {row.id: row.k_att for row in ROWS.values() if row.method == "sab" and row.k_att != 2}
    start = "mnist-sab-14-10"
    assert others == {
        "adding-400-sab-5-10-ours": 5,
        "adding-400-sab-10-10-ours": 10,
        **{f"text8-sab-5-5-{reading}": 5 for reading in ("as-written", "as-released", "ours")},
        **{f"{start}-{reading}": 14 for reading in ("as-written", "as-released", "ours")},
        **{f"{start}-ours-{variant}": 14 for variant in VARIANTS},
        "mnist-sab-14-5-ours": 14,
        "mnist-sab-10-10-ours": 10,
        "mnist-permuted-sab-14-10-ours": 14,
    }


@pytest.mark.parametrize("row", [row for row in ROWS.values() if row.length is None], ids=lambda row: row.id)
def test_tasks_with_data_are_trained_for_epochs(row) -> None:
    config = row.config(0)
    training = config.training
    batches = BATCHES[config.task.dataset]
    setting = OURS[row.task] if row.reading == "ours" else PAPERS[row.task]
    epochs = 8 if row.id == "text8-sab-5-5-ours" else 5 if row.id == "ptb-sab-5-10-ours-rnn_tanh" else setting.epochs
    assert training.iterations == row.otherwise.get("iterations", epochs * batches)
    assert training.patience is None or training.lr_decay is None  # a falling rate is to fall to its end
    assert training.eval_every == training.checkpoint_every == batches
    assert training.eval_batches is None
    assert (training.patience, training.keep) == (row.otherwise.get("patience", setting.patience), "best")
    is_mnist_as_in_the_paper = row.task == "mnist" and row.reading != "ours"
    assert training.precision == ("float32" if is_mnist_as_in_the_paper else "bfloat16")
    assert config.options().get("permuted", False) == row.is_permuted == ("permuted" in row.id)
    assert (training.clip is None) == row.id.endswith("unclipped")
    assert epochs_in(config.task, 3 * batches) == 3
    if row.reading == "ours":
        assert config.model.memory.scorer == "mlp"
        usual = "add_bounded" if row.cell != "lstm" else "concat" if row.task in ("ptb", "text8") else "add"
        assert config.model.memory.incorporate == row.otherwise.get("incorporate", usual)


def test_an_epoch_has_as_many_batches_as_the_data_sets_say() -> None:
    for task, batch_size in ((PTB(), 32), (Text8(), 64), (Text8(part="prefix"), 64), (MNIST(), 64)):
        count = DATASETS[task.dataset].counts[0]
        examples = count if isinstance(task, MNIST) else (count - 1) // task.length
        assert BATCHES[task.dataset] == examples // batch_size
    assert epochs_in(Adding(), 100) is None


def test_a_variant_differs_from_its_row_in_its_thing_alone() -> None:
    def differing(one: str, other: str) -> set[str]:
        first, second = (ROWS[row].config(0).options() for row in (one, other))
        return {option for option in first if first[option] != second[option]}

    for plain in ("ptb-sab-5-10-ours", "mnist-sab-14-10-ours"):
        for cell in ("gru", "rnn_tanh"):
            usual = {"cell", "weighting", "incorporate", "initial_score", "initial_summary", "readout"}
            usual |= {"lr", "memory_lr"}
            if (plain, cell) == ("ptb-sab-5-10-ours", "rnn_tanh"):
                usual |= {"dropout", "weight_decay", "shifted", "iterations"}
            assert differing(plain, f"{plain}-{cell}") <= usual | ROWS[f"{plain}-{cell}"].otherwise.keys()
        assert differing(plain, f"{plain}-unclipped") == {"clip"}
    assert differing("mnist-sab-14-10-ours", "mnist-permuted-sab-14-10-ours") == {"permuted"}


def test_text8_is_read_as_far_as_it_is_there(tiny_data: Path, tmp_path: Path) -> None:
    row = ROWS["text8-bptt"]
    assert row.on(tiny_data).config(0).task == Text8()
    prefix = DATASETS["text8 prefix"].files[0].name
    (tmp_path / "text8").mkdir()
    (tmp_path / "text8" / prefix).write_bytes((tiny_data / "text8" / prefix).read_bytes())
    there = row.on(tmp_path)
    assert there.id == row.id
    assert there.config(0).task == Text8(part="prefix")
    assert there.config(0).training.iterations < row.config(0).training.iterations
    assert row.as_in(there.config(0)) == there
    assert row.on(tmp_path / "nothing").config(0).task == Text8()
    other = ROWS["ptb-bptt"]
    assert other.on(tmp_path) == other.as_in(other.config(0)) == other


def test_the_memory_of_text8_is_read_out_and_learns_slowly() -> None:
    sab, control = (ROWS[row].config(0) for row in ("text8-sab-5-5-ours", "text8-tbptt-5-ours"))
    assert (sab.model.memory.incorporate, sab.model.initial_summary) == ("concat", 0.0)
    assert (sab.model.memory.weighting, sab.model.readout) == ("softmax", "hidden+summary")
    assert (sab.training.memory_lr, control.training.memory_lr) == (0.03, 1.0)
    assert 3 * sab.training.iterations == 2 * control.training.iterations
    different = replace(sab.training, memory_lr=1.0, iterations=control.training.iterations)
    assert different == control.training, "all else is the same training"
    for cell in ("gru", "rnn_tanh", "rnn_relu"):
        other = ours("text8", None, "sab", 5, 5, 5, cell)
        assert (other.model.memory.incorporate, other.model.readout) == ("add_bounded", "hidden")
        assert (other.training.memory_lr, other.training.iterations) == (1.0, control.training.iterations)


def test_ptb_is_not_learnt_by_heart() -> None:
    for row in ("ptb-sab-5-10-ours", "ptb-sab-5-10-ours-gru", "ptb-tbptt-5-ours", "ptb-bptt-ours"):
        config = ROWS[row].config(0)
        assert (config.training.dropout, config.training.weight_decay, config.task) == (0.3, 0.05, PTB(shifted=True))
    for row in ("ptb-sab-5-10-ours-rnn_tanh", "ptb-sab-5-10-as-released", "ptb-bptt"):
        config = ROWS[row].config(0)
        assert (config.training.dropout, config.training.weight_decay, config.task) == (0.0, 0.0, PTB())
    assert ours("ptb", None, "sab", 5, 10, 2, shifted=False).task == PTB(), "what is asked for comes first"


def test_the_recipe_takes_what_a_task_has() -> None:
    config = ours("mnist", None, "sab", 14, 10, 14, "gru", permuted=True)
    assert (config.task, config.model.cell) == (MNIST(permuted=True), "gru")
    with pytest.raises(UserError, match=r"^length must be None for task mnist; got 5\.$"):
        ours("mnist", 5, "sab", 14, 10, 14)
    with pytest.raises(UserError, match=r"^length must be a whole number"):
        ours("copying", None, "sab", 5, 5, 2)


def test_rows_keep_their_ids() -> None:
    for path in (ROOT / "results" / f"{task}.jsonl" for task in COLUMNS):
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            assert record["row"] in ROWS, path.name
            assert set(record["config"]["task"]) - {"name"} <= set(ROWS[record["row"]].config(0).task.options())


def test_the_recipe_is_trained_on_a_grid_of_lengths() -> None:
    task = ROWS["copying-300-sab-5-5-ours"].config(0).task
    assert {len(task.batch(0, index, 1)[0]) - 20 for index in range(200)} == set(grid(1, 300))


def test_a_paper_reading_makes_an_iteration() -> None:
    for row in ("copying-100-sab-5-5-as-written", "copying-100-sab-5-5-as-released"):
        config = ROWS[row].config(0)
        torch.manual_seed(0)
        inputs, targets = config.task.batch(0, 0, 2)
        outputs, _ = config.build_model(torch.device("cpu"))(inputs)
        config.task.loss(outputs, targets).backward()


def test_rows_are_found_by_task_and_pattern() -> None:
    assert find() == list(ROWS.values())
    assert {row.task for row in find(["adding"])} == {"adding"}
    found = find(["copying"], ["copying-100-sab-*-ours", "*-2000-*", "copying-100-sab-5-5-ours"])
    assert [row.id for row in found] == [
        *(f"copying-100-sab-{k}-ours" for k in ("1-1", "1-10", "5-5", "10-10")),
        "copying-2000-sab-10-10-ours",
    ]
    with pytest.raises(UserError, match=r"^rows must match at least one of adding-200-bptt, .*; got 'copying-\*'\.$"):
        find(["adding"], ["adding-*", "copying-*"])
    names = ", ".join(TASKS)
    with pytest.raises(UserError, match=rf"^task must be one of {names}; got 'imagenet'\.$"):
        find(["imagenet"])
