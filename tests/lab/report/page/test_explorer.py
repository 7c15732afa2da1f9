from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import sab
from sab.config import SABConfig
from sab.errors import UserValueError
from sab.lab.models import ModelConfig
from sab.lab.report.page import document, explorer
from sab.lab.report.page.explorer import Moment
from sab.lab.report.page.material import Material
from sab.lab.tasks import Copying
from sab.lab.training import Run, TrainConfig, train
from sab.lab.training.checkpoint import load_model, load_moment
from sab.lab.training.evaluation import mean_attention
from tests.lab.report import made_up


def test_a_run_is_told_as_it_is_traced(trained: Run) -> None:
    made = explorer.of_run("one", trained, 23 * 2)
    model = load_model(trained, torch.device("cpu"))
    inputs, _ = trained.config.task.batch(0, 0, 3, "valid")
    (moment,) = made.moments
    assert moment.iteration == 4
    assert list(moment.credit) == [18, 23]
    for step in moment.credit:
        traced = sab.trace(model, inputs[:, :1], step, max_paths=explorer.MOST_PATHS)
        credit = moment.credit[step]
        largest = traced.credit.total.max().item()
        for name in ("direct", "chain", "skip"):
            norms = getattr(traced.credit, name)
            told = dict(zip(credit["steps"], credit[name], strict=True))
            for at, norm in enumerate(norms.tolist(), start=1):
                assert told.get(at, 0.0) == pytest.approx(norm, rel=0.01, abs=0.005 * largest)
        shares = [path.share for path in traced.paths]
        assert [share for share, _ in credit["paths"]] == pytest.approx(shares, rel=0.01)
        assert credit["paths"][0][1] == [[skip.step, skip.kept_at] for skip in traced.paths[0].skips]
        read = dict(zip(traced.kept_at[step - 1].tolist(), traced.weights[step - 1].tolist(), strict=True))
        assert {int(at): weight for at, weight in moment.reads[step]} == pytest.approx(read, rel=0.01)
    weights = mean_attention(model, trained.config.task, trained.config.training, "valid")[-1]
    assert torch.tensor([[one or 0.0 for one in row] for row in moment.attention]) == pytest.approx(
        weights.nan_to_num().numpy(), abs=6e-4
    )
    assert moment.attention[0][-1] is None


def test_as_many_answers_are_traced_as_are_allowed(trained: Run) -> None:
    assert list(explorer.of_run("one", trained, 23 * 3).moments[0].credit) == [15, 19, 23]
    assert list(explorer.of_run("one", trained, 1).moments[0].credit) == [23]


def test_without_a_memory_there_is_the_chain(forgetful: Run) -> None:
    made = explorer.of_run("other", forgetful, 1)
    (moment,) = made.moments
    assert moment.reads == {}
    assert moment.attention == []
    assert moment.credit[23]["paths"] == []
    assert moment.credit[23]["steps"] == [21, 22, 23]
    assert explorer.spec(made)["map"] is None


def test_the_number_of_threads_is_as_before(trained: Run) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        explorer.of_run("one", trained, 1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def attention(columns: int = 109) -> dict[str, Any]:
    def weights(place: int) -> list[list[float | None]]:
        rows: list[list[float | None]] = [[0.0] * columns for _ in range(11)]
        rows[3][place] = 0.9
        rows[3][0] = 0.1
        rows[0][-1] = None
        return rows

    return {"k_att": 2, "first": 210, "moments": {"600": weights(1), "100": weights(4)}}


def test_a_record_has_its_moments() -> None:
    made = explorer.of_record(made_up.record("copying-200-sab-10-10-ours", attention=attention()))
    assert [moment.iteration for moment in made.moments] == [100, 600]
    assert made.moments[0].reads[213] == [[10, 0.9], [2, 0.1]]
    assert made.moments[1].reads[213] == [[4, 0.9], [2, 0.1]]
    assert 212 not in made.moments[0].reads
    inputs, _ = Copying(length=200).batch(0, 0, 64, "valid")
    assert made.scene.seen[:10] == [str(one) for one in inputs[:10, 0].tolist()]
    spec = json.loads(json.dumps(explorer.spec(made), allow_nan=False))
    assert spec["start"] == 213
    assert spec["map"]["data"][0]["y"] == list(range(210, 221))
    assert spec["moments"][1]["attention"][3][1] == 0.9
    assert "yaxis4" not in spec["timeline"]["layout"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"first": 211},
        {"k_att": 3},
        {"k_att": 0},
        {"moments": {"x": attention()["moments"]["600"]}},
        {"moments": {"1": [[0.5]]}},
    ],
)
def test_attention_that_is_of_another_sequence_is_refused(wrong: dict[str, Any]) -> None:
    record = made_up.record("copying-200-sab-10-10-ours", attention=attention() | wrong)
    with pytest.raises(UserValueError, match="attention must be of steps that copying-200-grid has"):
        explorer.of_record(record)
    assert document.explorers(Material(by_row={record["row"]: [record]})) == []


def test_a_run_has_the_moments_that_were_noted(trained: Run, tmp_path: Path) -> None:
    shutil.copytree(trained.path, tmp_path / "seed0")
    run, notes = Run.open(tmp_path / "seed0"), tmp_path / "seed0.json"
    weights = [[0.25] * 11 for _ in range(11)]
    notes.write_text(json.dumps({"attention": {"k_att": 2, "first": 13, "moments": {"3": weights, "1": weights}}}))
    made = explorer.of_run("run", run, 1)
    assert [(moment.iteration, moment.is_mean) for moment in made.moments] == [(1, True), (3, True), (4, False)]
    assert made.moments[0].reads[23] == [[at, 0.25] for at in range(2, 23, 2)]
    notes.write_text("somebody else's")
    assert len(explorer.of_run("run", run, 1).moments) == 1


def test_moments_come_in_order_and_do_not_become_too_many(trained: Run) -> None:
    made = explorer.of_run("one", trained, 1)
    (last,) = made.moments
    earlier: list[Moment] = [replace(last, iteration=iteration) for iteration in (3, 1, 2, 4)]
    assert [moment.iteration for moment in made.with_earlier(earlier).moments] == [1, 2, 3, 4]
    assert made.with_earlier(earlier).moments[-1] is last
    many = [replace(last, iteration=iteration) for iteration in range(-100, 4)]
    kept = made.with_earlier(many).moments
    assert len(kept) <= explorer.MOST_MOMENTS
    assert kept[-1] is last


@pytest.fixture(scope="module")
def with_moments(tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = tmp_path_factory.mktemp("runs") / "several"
    training = TrainConfig(iterations=4, batch_size=3, eval_every=2, eval_batches=1, moments_every=1)
    train(Copying(length=3), ModelConfig(hidden_size=6, memory=SABConfig(k_top=3, k_trunc=4)), training, path)
    return Run.open(path)


def test_a_run_that_keeps_moments_has_all_of_them_traced(with_moments: Run) -> None:
    made = explorer.of_run("one", with_moments, 23 * 12)
    assert [moment.iteration for moment in made.moments] == [1, 2, 3, 4]
    inputs, _ = with_moments.config.task.batch(0, 0, 3, "valid")
    for moment in made.moments:
        model = load_moment(with_moments, torch.device("cpu"), moment.iteration)
        traced = sab.trace(model, inputs[:, :1], 23)
        read = dict(zip(traced.kept_at[22].tolist(), traced.weights[22].tolist(), strict=True))
        assert {int(at): weight for at, weight in moment.reads[23]} == pytest.approx(read, rel=0.01)
    assert [list(moment.credit) for moment in made.moments] == [[18, 23]] * 3 + [list(range(14, 24))]
    assert explorer.spec(made)["start"] in (18, 23)


def test_the_best_weights_are_told_among_the_moments(tmp_path: Path) -> None:
    options: dict[str, Any] = {"batch_size": 3, "eval_every": 1, "eval_batches": 1, "moments_every": 1, "keep": "best"}
    training = TrainConfig(iterations=4, lr=1.0, **options)
    train(
        Copying(length=3), ModelConfig(hidden_size=6, memory=SABConfig(k_top=3, k_trunc=4)), training, tmp_path / "run"
    )
    run = Run.open(tmp_path / "run")
    result = run.result()
    assert result is not None
    assert result.best_at in (1, 2, 3), "others come after it"
    told = explorer.of_run("one", run, 1).about
    assert told.endswith(
        f"with the weights of 4 moments of the training; the best are those of iteration {result.best_at}."
    )


def test_moments_have_no_more_room_than_there_is(with_moments: Run) -> None:
    assert [one.iteration for one in explorer.of_run("one", with_moments, 1, 23 * 3 * 2).moments] == [3, 4]
    assert [one.iteration for one in explorer.of_run("one", with_moments, 1, 1).moments] == [4]


def test_a_damaged_moment_is_left_out_and_told_of(with_moments: Run, tmp_path: Path) -> None:
    shutil.copytree(with_moments.path, tmp_path / "run")
    (tmp_path / "run" / "moments" / "step-00000002" / "model.safetensors").write_bytes(b"cut short")
    made = explorer.of_run("one", Run.open(tmp_path / "run"), 1)
    assert [moment.iteration for moment in made.moments] == [1, 3, 4]
    assert "step-00000002" in made.about


def test_moments_that_are_known_are_not_traced_again(with_moments: Run) -> None:
    first = explorer.of_run("one", with_moments, 1)
    again = explorer.of_run("one", with_moments, 1, known=first.moments)
    assert [one is other for one, other in zip(first.moments, again.moments, strict=True)] == [True, True, True, False]
