"""Every row of the paper's tables is there, with its values and a configuration that can be built without data."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sab.config import SABConfig
from sab.errors import UserError
from sab.lab.data import DATASETS
from sab.lab.experiments.recipe import ours, self_attention
from sab.lab.experiments.rivals import CONTENDERS
from sab.lab.experiments.settings import BATCHES, epochs_in
from sab.lab.experiments.tables import COLUMNS, ROWS, Row, find
from sab.lab.tasks import CIFAR10, MNIST, PTB, Adding, CharacterTask, ImageTask, Text8
from sab.lab.training import RunConfig
from tests.lab.older import NEWER_OPTIONS

ROOT = Path(__file__).parents[3]


def test_the_paper_has_forty_five_rows() -> None:
    papers = [row for row in ROWS.values() if row.is_papers]
    assert len(papers) == 45
    assert all(row.paper.keys() == set(COLUMNS[row.task]) for row in papers)
    assert [row.id for row in ROWS.values()] == list(ROWS), "no two rows have the same id"


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_a_row_is_the_run_that_its_name_says(row: Row) -> None:
    config = row.config(7)
    options = config.options()
    assert RunConfig.from_json(config.to_json()).difference(config) is None
    assert (options["task"], options["method"], options["cell"]) == (row.task, row.method, row.cell)
    assert options.get("length") == row.length or row.length is None
    assert options["seed"] == 7
    memory = config.model.layer_config()
    if not row.reads_all:
        assert memory.k_trunc == (None if row.method == "bptt" else row.k_trunc)
        assert (memory.k_top, memory.k_att) == (row.k_top if row.method == "sab" else 0, row.k_att)
    assert (options["iterations"] == 200_000) == row.id.endswith("full-budget")
    assert (config.training.clip is None) == row.id.endswith("unclipped")
    assert options.get("permuted", False) == ("permuted" in row.id)
    if row.reading in ("as written", "as released"):
        assert options["max_microstates"] == config.task.steps // row.k_att, "a bias for each"
    assert row.config(0, iterations=5, device="cpu").training.iterations == 5


def test_baselines_with_the_papers_own_budget() -> None:
    longer = {row.id.removesuffix("-full-budget"): row for row in ROWS.values() if row.is_full_budget}
    seeds = {name: row.seeds for name, row in longer.items()}
    baselines = ["bptt", "tbptt-5", "tbptt-10", "tbptt-20"]
    assert seeds == {
        **{f"copying-100-{name}": 3 for name in (*baselines, "chrono", "sab-5-5-as-released", "sab-10-10-as-released")},
        **dict.fromkeys(["copying-200-bptt", "copying-200-sab-1-5-as-released", "copying-300-bptt"], 1),
        **dict.fromkeys(["adding-200-bptt", "adding-400-bptt"], 1),
    }
    for name, row in longer.items():
        config = row.config(0)
        if name in ROWS:  # the same run, ten times as long
            assert config.difference(ROWS[name].config(0)) is None
            assert row.paper == ROWS[name].paper
        assert not row.is_papers, "the paper's rows are counted once"
    today = longer["copying-100-chrono"].config(0)
    assert (today.model.method, today.training.lr_decay, today.training.lr) == ("chrono", 0.5, 1e-3)
    assert longer["copying-100-chrono"].credit == "bptt"
    checkpoint = longer["copying-200-sab-1-5-as-released"].config(0)
    assert (checkpoint.training.clip, checkpoint.model.memory.k_trunc, checkpoint.model.memory.k_top) == (0.5, 1, 5)
    assert checkpoint.model.memory.weighting == "relu_norm"


def test_full_self_attention_reads_every_state_and_cuts_nothing() -> None:
    rows = [row for row in ROWS.values() if row.reads_all]
    assert [row.id for row in rows] == [f"copying-{length}-self-attention-ours" for length in (100, 200, 300)]
    assert rows[0].other_lengths == (200, 300, 400, 2000, 5000)
    for row in rows:
        config = row.config(0)
        memory, contender = config.model.memory, CONTENDERS["self_attention"].model(128, config.task).memory
        assert memory == contender
        assert (memory.k_top, memory.k_att, memory.k_trunc) == (config.task.steps, 1, None)
        assert config.training == ROWS[f"copying-{row.length}-sab-10-10-ours"].config(0).training
    config = replace(rows[0], length=3).config(0)
    torch.manual_seed(0)
    model = config.build_model(torch.device("cpu"))
    _, _, attention = model(config.task.batch(0, 0, 2, "valid")[0], return_attention=True)
    assert (attention.weights[-1] > 0).sum(-1).tolist() == [config.task.steps - 1] * 2


def test_rows_that_need_one_seed_alone() -> None:
    few = {row.id for row in ROWS.values() if row.seeds < 3}
    text8 = {f"text8-{name}" for name in ("bptt", "tbptt-5", "bptt-ours", "tbptt-5-ours")}
    assert few - text8 == {row.id for row in ROWS.values() if row.is_full_budget and row.length != 100}
    assert text8 <= few
    assert {row.seeds for row in ROWS.values()} == {1, 3}


def test_every_table_has_truncated_and_full_backpropagation_in_our_training() -> None:
    for row in [row for row in ROWS.values() if row.is_papers and row.reading == "ours"]:
        same = [other for other in ROWS.values() if (other.task, other.length) == (row.task, row.length)]
        assert {other.credit for other in same if other.is_control and not other.is_permuted} == {"bptt", "tbptt"}


def test_an_epoch_has_as_many_batches_as_the_data_sets_say() -> None:
    for task, batch_size in ((PTB(), 32), (Text8(), 64), (Text8(part="prefix"), 64), (MNIST(), 64), (CIFAR10(), 64)):
        count = DATASETS[task.dataset].counts[0]
        examples = count if isinstance(task, ImageTask) else (count - 1) // task.length
        assert BATCHES[task.dataset] == examples // batch_size
    assert epochs_in(Adding(), 100) is None


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


def test_the_recipe_takes_what_a_task_has() -> None:
    config = ours("mnist", None, "sab", 14, 10, 14, "gru", permuted=True)
    assert (config.task, config.model.cell) == (MNIST(permuted=True), "gru")
    with pytest.raises(UserError, match=r"^length must be None for task mnist; got 5\.$"):
        ours("mnist", 5, "sab", 14, 10, 14)
    with pytest.raises(UserError, match=r"^length must be a whole number"):
        ours("copying", None, "sab", 5, 5, 2)


def test_rows_keep_their_ids() -> None:
    for path in (path for task in COLUMNS if (path := ROOT / "results" / f"{task}.jsonl").exists()):
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            assert record["row"] in ROWS, path.name
            assert set(record["config"]["task"]) - {"name"} <= set(ROWS[record["row"]].config(0).task.options())


def test_ours_is_the_default_memory_trained_like_the_baselines_and_other_cells() -> None:
    for row in (row for row in ROWS.values() if row.reading == "ours"):
        config = row.config(0)
        memory = SABConfig(k_trunc=row.k_trunc, k_top=row.k_top, k_att=row.k_att)
        memory = replace(memory, **self_attention(config.task)) if row.reads_all else memory
        assert config.model.memory == memory
        assert config.model.readout == "hidden"
        clip = config.training.clip if row.is_clipped else replace(row, is_clipped=True).config(0).training.clip
        plain = ours(row.task, row.length, "tbptt", 5, 0, 2, **row.options)
        assert replace(config.training, clip=clip) == plain.training
        assert config.task == plain.task
        assert config.model.hidden_size == plain.model.hidden_size


def papers_rows() -> dict[str, dict[str, Any]]:
    """The configurations of the rows in the paper's setting, as they were stored before the default memory changed."""
    lines = (Path(__file__).parent / "papers_rows.jsonl").read_text(encoding="utf-8").splitlines()
    return {stored["row"]: stored["config"] for stored in map(json.loads, lines)}


def test_the_papers_rows_stay_as_they_are() -> None:
    stored = papers_rows()
    assert list(stored) == [row.id for row in ROWS.values() if row.reading != "ours" and not row.is_full_budget]
    for name, config in stored.items():
        model, now = config["model"], ROWS[name].config(0)
        start = [model.pop(option) for option in ("input_scale", "initial_score", "initial_summary")]
        assert start == [1.0, 0.0, 1.0]
        newer = {"input_start": "torch", **NEWER_OPTIONS}
        task = {**config["task"], **({"carried": 1} if isinstance(now.task, CharacterTask) else {})}
        assert now.to_json() == {**config, "task": task, "model": {**model, **newer}}
        assert RunConfig.from_json(config) == now


@pytest.mark.parametrize(
    "row", ["copying-100-sab-5-5-as-written", "copying-100-sab-5-5-as-released", "copying-100-bptt"]
)
def test_the_papers_rows_start_from_torchs_own_weights(row: str) -> None:
    config = ROWS[row].config(0)
    size, bound = config.model.hidden_size, config.model.hidden_size**-0.5
    torch.manual_seed(0)
    model = config.build_model(torch.device("cpu"))
    torch.manual_seed(0)
    plain = torch.nn.LSTM(config.task.input_size, size)
    scorer = {
        name: torch.empty_like(parameter).uniform_(-bound, bound)
        for name, parameter in model.layers.named_parameters()
        if name not in dict(plain.named_parameters())
    }
    assert all(name.startswith("attn_") for name in scorer)
    expected = {f"layers.{name}": weight for name, weight in (*plain.named_parameters(), *scorer.items())}
    readout = torch.nn.Linear(size, config.task.output_size)
    expected |= {"readout.weight": readout.weight, "readout.bias": readout.bias}
    if model.readout_attention is not None:
        attention = torch.nn.Linear(*model.readout_attention.weight.shape[::-1], bias=False)
        expected["readout_attention.weight"] = attention.weight
    assert expected.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name]), name


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
    names = ", ".join(dict.fromkeys(row.task for row in ROWS.values()))
    with pytest.raises(UserError, match=rf"^task must be one of {names}; got 'imagenet'\.$"):
        find(["imagenet"])
