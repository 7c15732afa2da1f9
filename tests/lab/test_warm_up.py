"""`sab warm-up`, with Triton's interpreter in the place of a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from sab.lab import cli
from sab.lab.commands import machine
from sab.ops.triton import around, launch, small
from sab.ops.triton.launch import INTERPRETED

Capture = pytest.CaptureFixture[str]
KERNELS = {
    "prepare": around.lanes_prepare_kernel,
    "forward": small.lanes_forward_kernel,
    "backward": small.lanes_backward_kernel,
    "gradients": around.lanes_gradients_kernel,
}


def run(*arguments: str) -> int:
    return cli.main(["warm-up", *arguments])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "warm-up must run where torch finds an NVIDIA GPU, whose kernels it compiles; it finds none here."),
        (["--hidden-size", "0"], "--hidden-size must be a whole number of at least 1; got 0."),
        (["--k-top", "-1"], "--k-top must be a whole number of at least 0; got -1."),
        (["--scorer", "x"], "--scorer must be one of affine, affine_tanh, mlp, dot, cosine; got 'x'."),
    ],
)
def test_what_cannot_be_is_one_sentence(arguments: list[str], sentence: str, capsys: Capture) -> None:
    assert run(*arguments) == 2
    assert capsys.readouterr().err == f"sab: {sentence}\n"


def test_without_triton(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(machine.dispatch, "triton_unavailable", lambda: "triton is not installed")
    assert run() == 2
    sentence = "warm-up must run where Triton compiles the kernels; it cannot here: triton is not installed."
    assert capsys.readouterr().err == f"sab: {sentence}\n"


@pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET=1 must be set before triton is imported")
@pytest.mark.parametrize("lengths", [False, True])
def test_the_kernels_of_a_training_step_are_launched(
    lengths: bool, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(machine, "_gpu", lambda: torch.device("cpu"))
    launched: list[str] = []

    def note(kernel: object, programs: int, tensors: object, sizes: object, constants: launch.Constants) -> None:
        (name,) = (name for name, one in KERNELS.items() if one is kernel)
        launched.append(name)
        if name in ("forward", "backward"):
            assert programs == 2
            assert constants.values["HAS_LENGTHS"] == lengths
            assert constants.values["K"] == 3, "as in a long sequence"
        launch._made.append(0.5)

    for module in small, around:  # nothing runs: without the loops, the others would read what nobody wrote
        monkeypatch.setattr(module, "launch", note)
    monkeypatch.setattr(launch, "_made", [])
    arguments = ["--cell", "gru", "--hidden-size", "8", "--batch-size", "2", "--k-top", "3"]
    assert run(*arguments, *(["--lengths"] if lengths else [])) == 0
    assert launched == ["prepare", "forward", "backward", "gradients"]
    ready, kept = capsys.readouterr().out.splitlines()
    sizes = f"hidden size 8, batches of 2, float32{', with lengths' * lengths}"
    assert ready.startswith(f"Ready: 4 kernels of SABGRU ({sizes}) in ")
    assert kept == f"Triton keeps them in {launch.cache_folder()}; what was there already took no compilation."
