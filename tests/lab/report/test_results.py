"""Records as the tables get them, and how long they took."""

from __future__ import annotations

import json
from pathlib import Path

from sab.lab.experiments import records as stored
from sab.lab.report.results import load, total_time
from tests.lab.report.made_up import SAB, by_row, record


def test_records_are_loaded_in_the_order_of_the_seeds(tmp_path: Path) -> None:
    for seed in (2, 0, 1):
        stored.save(record(seed=seed), tmp_path)
    assert [one["seed"] for one in load(tmp_path)[SAB]] == [0, 1, 2]
    assert json.loads((tmp_path / "copying.jsonl").read_text().splitlines()[0])["seed"] == 2


def test_the_time_of_the_papers_rows() -> None:
    assert total_time({}) == []
    made = by_row(*(record(row, seed) for row in ("copying-300-bptt", SAB, "ptb-bptt-ours") for seed in (0, 1)))
    (told,) = total_time(made)
    assert told.startswith("Of the paper's 45 rows 2 were run. The wall times of one run of each, that of the lowest ")
    assert "add up to 2:30 min on cuda (GPU), or to " in told
