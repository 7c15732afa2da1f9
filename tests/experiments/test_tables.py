"""Every row of the paper's synthetic tables is there, with its values and a configuration that can be built."""

from __future__ import annotations

import pytest
import torch

from sab.errors import Mistake
from sab.experiments.tables import COLUMNS, ROWS, find
from sab.tasks.lengths import grid
from sab.training import RunConfig

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


def printed() -> dict[str, str]:
    """The paper's tables, typed in once more: the values by the beginning of a row's id."""
    values: dict[str, str] = {}
    for task, text in (("copying", COPYING), ("adding", ADDING)):
        for line in text.strip().splitlines():
            length, rest = line.split(" ", 1)
            for entry in rest.rstrip(";").split("; "):
                method, value = entry.split(" ", 1)
                values[f"{task}-{length}-{method}"] = value
    return values


@pytest.mark.parametrize(("start", "value"), printed().items())
def test_every_row_of_the_paper(start: str, value: str) -> None:
    row = ROWS[f"{start}-ours" if "-sab-" in start else start]
    assert " / ".join(row.paper[metric] for metric in COLUMNS[row.task]) == value


def test_what_is_in_no_table_of_the_paper() -> None:
    known = printed()
    extra = [row.id for row in ROWS.values() if not row.paper]
    assert extra == [
        *("copying-100-bptt-ours", "copying-100-tbptt-5-ours", "copying-100-tbptt-10-ours"),
        *(f"copying-{length}-sab-10-10-ours" for length in (300, 500, 1000, 2000)),
    ]
    readings = [row for row in ROWS.values() if row.reading in ("as written", "as released")]
    assert {row.id.rpartition("-as-")[0] for row in readings} == {
        *(f"copying-{length}-sab-5-5" for length in (100, 200, 300)),
        *(f"copying-{length}-sab-10-10" for length in (100, 200)),
    }
    assert len(ROWS) == len(known) + len(extra) + len(readings)
    assert [row.id for row in ROWS.values() if row.is_control] == extra[:3]


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_a_row_is_the_run_that_its_name_says(row) -> None:
    config = row.config(7)
    options = config.options()
    assert RunConfig.from_json(config.to_json()) == config
    assert (options["task"], options["length"], options["method"]) == (row.task, row.length, row.method)
    assert (options["seed"], options["hidden_size"], options["batch_size"]) == (7, 128, 64)
    memory = config.model.memory()
    assert memory.k_trunc == (None if row.method == "bptt" else row.k_trunc)
    assert (memory.k_top, memory.k_att) == (row.k_top if row.method == "sab" else 0, row.k_att)
    reading = options["scorer"], options["weighting"], options["readout"]
    if row.reading == "as written":
        assert reading == ("affine", "relu", "hidden+weights")
    elif row.reading == "as released":
        assert reading == ("affine_tanh", "relu_norm", "hidden+summary")
    if row.reading != "ours":
        plain = [options[name] for name in ("iterations", "lr", "lr_decay", "clip", "input_scale", "train_lengths")]
        assert plain == [20_000, 1e-3, None, 1.0, 1.0, "fixed"]
    if row.reading in ("as written", "as released"):
        assert options["max_microstates"] == config.task.steps // 2, "a bias for each"
    assert row.config(0, iterations=5, device="cpu").training.iterations == 5


def test_k_att_is_the_papers() -> None:
    others = {row.id: row.k_att for row in ROWS.values() if row.k_att != 2}
    assert others == {"adding-400-sab-5-10-ours": 5, "adding-400-sab-10-10-ours": 10}


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
    with pytest.raises(Mistake, match=r"^rows must match at least one of adding-200-bptt, .*; got 'copying-\*'\.$"):
        find(["adding"], ["adding-*", "copying-*"])
    with pytest.raises(Mistake, match=r"^task must be one of copying, adding; got 'mnist'\.$"):
        find(["mnist"])
