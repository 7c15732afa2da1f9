"""What `help(sab.SABLSTM)` says."""

from __future__ import annotations

import ast
import inspect
import itertools
import re

import pytest

import sab
from sab.config import BACKENDS
from sab.parts.registry import INCORPORATIONS, SCORERS, WEIGHTINGS


@pytest.mark.parametrize("kind", [sab.SABLSTM, sab.SABGRU, sab.SABRNN])
def test_help_explains_every_argument(kind: type) -> None:
    """Those of the memory in the words of SABConfig, with the names that they may have."""
    _, _, listed = inspect.cleandoc(kind.__init__.__doc__ or "").partition("Args:\n")
    entries = [" ".join(entry.split()) for entry in re.split(r"\n {4}(?=\w)", f"\n{listed}")[1:]]
    explained = dict(entry.split(": ", 1) for entry in entries)
    names = [*inspect.signature(sab.SABLSTM).parameters]
    if kind is sab.SABRNN:
        names.insert(names.index("bias"), "nonlinearity")
    assert list(explained) == names
    fields = ast.parse(inspect.getsource(sab.SABConfig)).body[0]
    assert isinstance(fields, ast.ClassDef)
    for field, text in itertools.pairwise(fields.body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            assert isinstance(field.target, ast.Name)
            assert isinstance(text.value, ast.Constant)
            assert explained[field.target.id].endswith(" ".join(str(text.value.value).split()))
    choices = {"scorer": SCORERS, "weighting": WEIGHTINGS, "incorporate": INCORPORATIONS, "backend": BACKENDS}
    for option, known in choices.items():
        assert all(f"`{name}`" in explained[option] for name in known)
