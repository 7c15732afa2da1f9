"""The tables of "Two levels" in docs/long-memory.md."""

from __future__ import annotations

import torch

import sab
from tools import levels
from tools.pages import with_part


def test_the_page_has_the_tables_of_its_records() -> None:
    page = levels.PAGE.read_text(encoding="utf-8")
    assert with_part(page, "levels", levels.page_part(levels.load())) == page


def test_the_keys_of_blocks_find_a_key_that_stands_out() -> None:
    """One of 400 keys has by far the highest score: all bounds find it; nothing else is found where few are read."""
    config = sab.SABConfig(k_top=1, **{**levels.WAYS["hierarchical"], "blocks": 1})
    keys = torch.randn(1, 400, 8, generator=torch.Generator().manual_seed(0)) / 10
    query = torch.eye(8)[:1]
    keys[0, 123] = 5 * query[0]
    reads = levels._reads(query, keys, keys @ query[0], config)
    assert {name: found.item() for name, (found, _) in reads.items()} == {"bounds": 1, "mean": 1, "ball": 1}
