"""Models that leave Python, or the process: torch.export, ONNX, torch.jit.trace. Each equals the layer itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sab
from tests.comparing import randomize_surely
from tests.ops.cases import CELLS, INCORPORATIONS, PLAIN, SCORERS, WEIGHTINGS, assert_close, make_layer

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # torch's, of itself
OPEN = torch.export.Dim.DYNAMIC


class Model(nn.Module):
    """A layer between two others, as a user has it."""

    def __init__(self, layer: Any):
        super().__init__()
        self.layer, self.readout = layer, nn.Linear(layer.hidden_size * (1 + layer.bidirectional), 2)

    def forward(self, x: Tensor) -> Tensor:
        output, _ = self.layer(x)
        return self.readout(output)


class Streaming(nn.Module):
    """A layer with its state in and out."""

    def __init__(self, layer: Any):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, state: sab.SABState) -> tuple[Tensor, sab.SABState]:
        output, after = self.layer(x, state)
        return output, after if isinstance(after, sab.SABState) else after.state


def as_state(after: Any) -> sab.SABState:
    """What a layer returned second as a SABState through which no gradient flows."""
    return (after if isinstance(after, sab.SABState) else after.state).detach()


def tensors(state: sab.SABState) -> list[Tensor]:
    """The tensors of a state in their order."""
    c = [] if state.c is None else [state.c]
    return [state.h.as_subclass(Tensor), *c, state.microstates, state.keys, state.numbers, state.steps]


def open_sizes(state: sab.SABState) -> list[dict[int, Any]]:
    """Batch and number of microstates are open."""
    *others, _ = tensors(state)
    return [
        *({1: OPEN} if tensor.dim() == 3 and tensor.is_floating_point() else {1: OPEN, 2: OPEN} for tensor in others),
        {0: OPEN},
    ]


def float_layer(cell: str, **options: Any) -> Any:
    """A layer in float32 whose selections are certain for `example(12)`."""
    return randomize_surely(make_layer(cell, 3, 4, dtype=torch.float32, **options).eval(), example(12))


def example(steps: int, batch: int = 2, batch_first: bool = False, seed: int = 5) -> Tensor:
    shape = (batch, steps, 3) if batch_first else (steps, batch, 3)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# torch.export


@pytest.mark.parametrize("cell", CELLS)
def test_exported_model_equals_the_model(cell: str) -> None:
    model = Model(make_layer(cell, 3, 4, dtype=torch.float32, batch_first=True))
    program = torch.export.export(model, (example(6, batch_first=True),), dynamic_shapes=({0: OPEN, 1: OPEN},))
    for steps, batch in ((6, 2), (5, 3), (40, 1)):  # fewer and more steps than k_top * k_att
        x = example(steps, batch, batch_first=True)
        assert_close(program.module()(x), model(x))


def test_exported_model_learns() -> None:
    model = Model(make_layer("gru", 3, 4, dtype=torch.float32))
    exported, x = torch.export.export(model, (example(6),)).module(), example(6)
    exported(x).square().sum().backward()
    model(x).square().sum().backward()
    for name, parameter in model.named_parameters():
        found, expected = dict(exported.named_parameters())[name].grad, parameter.grad
        assert found is not None
        assert expected is not None
        assert_close(found, expected, name)


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_exported_layer_continues_from_a_state(cell: str) -> None:
    layer = make_layer(cell, 3, 4, 2, dtype=torch.float32)
    state = as_state(layer(example(9))[1])
    sizes = ({0: OPEN, 1: OPEN}, open_sizes(state))
    exported = torch.export.export(Streaming(layer), (example(6), state), dynamic_shapes=sizes).module()
    x, state = example(9, 3), as_state(layer(example(21, 3))[1])
    for piece in (x[:3], x[3:7], x[7:]):  # from an odd and from an even step
        output, after = layer(piece, state)
        found, found_after = exported(piece, state)
        assert_close(found, output)
        for one, other in zip(tensors(as_state(found_after)), tensors(as_state(after)), strict=True):
            assert_close(one, other)
        state = as_state(after)
    ragged = as_state(layer(example(9, 3), lengths=torch.tensor([9, 4, 8]))[1])
    with pytest.raises(RuntimeError, match="hx must be a state whose rows have seen the same number of steps"):
        exported(x, ragged)


LOADS = """
import sys, torch
path, x, expected = sys.argv[1], *torch.load(sys.argv[2])
try:
    torch.export.load(path)
except RuntimeError:  # what it needs is in torch's log
    assert "sab" not in sys.modules
    import sab
    found = torch.export.load(path).module()(x)
    torch.testing.assert_close(found, expected)
    print("equal")
"""


def test_saved_program_needs_sab_and_says_so(tmp_path: Path) -> None:
    model, x = Model(sab.SABLSTM(3, 4, 2, bidirectional=True)), example(6, batch=3)
    program = torch.export.export(model, (example(6),), dynamic_shapes=({1: OPEN},)).run_decompositions()
    torch.export.save(program, tmp_path / "model.pt2")
    torch.save((x, model(x).detach()), tmp_path / "expected.pt")
    command = [sys.executable, "-c", LOADS, tmp_path / "model.pt2", tmp_path / "expected.pt"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.stdout == "equal\n", done.stderr
    assert "failed to resolve torch.ops.sab.recurrence.default to an operator" in done.stderr
    assert "Please import the custom op" in done.stderr


# ONNX

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {"cell": "lstm"},
    "both directions": {"cell": "lstm", "bidirectional": True, "layer_norm": True},
    "no memory": {"cell": "gru", **PLAIN},
    "affine": {"cell": "gru", "scorer": "affine", "weighting": "relu", "incorporate": "add", "max_microstates": 2},
    "affine_tanh": {
        "cell": "rnn_tanh",
        "scorer": "affine_tanh",
        "weighting": "relu_norm",
        "incorporate": "add_bounded",
        "bias": False,
        "k_att": 1,
    },
    "mlp": {
        "cell": "rnn_relu",
        "scorer": "mlp",
        "weighting": "softmax_sink",
        "forward": "dense",
        "incorporate": "concat",
        "attention_size": 5,
        "k_att": 3,
    },
    "dot": {"cell": "gru", "scorer": "dot", "forward": "dense", "k_top": 20},
}
"""Layers by what they show; together they have every part."""


class Several(nn.Module):
    """Layers with different parts, side by side."""

    def __init__(self, layers: list[Any]):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, lengths: Tensor) -> list[tuple[Tensor, ...]]:
        """Of each layer the output, and what it selected."""
        found = []
        for layer in self.layers:
            output, _, attention = layer(x, lengths=lengths, return_attention=True)
            found.append((output, attention.numbers, attention.weights))
        return found


def session(path: Path) -> Any:
    import onnx
    import onnxruntime

    onnx.checker.check_model(path, full_check=True)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options)


def run(running: Any, *arguments: Tensor) -> list[Tensor]:
    names = [given.name for given in running.get_inputs()]
    assert len(names) == len(arguments)
    fed = {name: value.numpy() for name, value in zip(names, arguments, strict=True)}
    return [torch.from_numpy(found) for found in running.run(None, fed)]


def test_the_variants_have_every_part() -> None:
    for option, names in (
        ("cell", CELLS),
        ("scorer", SCORERS),
        ("weighting", WEIGHTINGS),
        ("incorporate", INCORPORATIONS),
    ):
        default = getattr(sab.SABConfig, option, None)
        assert {one.get(option, default) for one in VARIANTS.values()} == set(names), option


def test_onnx_equals_the_layers(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="needs the extra `dev`")
    few: dict[str, Any] = {"k_top": 3}
    layers = {name: float_layer(**few | one) for name, one in VARIANTS.items()}
    with torch.no_grad():
        layers["both directions"].attn_v_l0_reverse.zero_()  # all scores are 0, so that ties decide
    model, x, lengths = Several(list(layers.values())).eval(), example(12), torch.tensor([12, 7])
    path, open_sizes = tmp_path / "model.onnx", ({0: OPEN, 1: OPEN}, {0: OPEN})
    sab.export.to_onnx(model, (x, lengths), path, dynamic_shapes=open_sizes)
    running = session(path)
    for part in ((x, lengths), (x[:7], torch.tensor([2, 7])), (x[:1, :1].contiguous(), torch.tensor([1]))):
        with torch.no_grad():
            expected = [value for one in model(*part) for value in one]
        for index, (found, value) in enumerate(zip(run(running, *part), expected, strict=True)):
            assert_close(found, value, list(layers)[index // 3])


def test_onnx_goes_step_by_step_from_an_empty_memory(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="needs the extra `dev`")
    layer, x = float_layer("lstm"), example(12)
    _, after = layer(x)
    sizes = ({1: OPEN}, open_sizes(as_state(after)))
    model = Streaming(layer).eval()
    sab.export.to_onnx(model, (x[:1], as_state(after)), tmp_path / "step.onnx", dynamic_shapes=sizes)
    running = session(tmp_path / "step.onnx")
    h, c, *memory, steps = map(torch.zeros_like, tensors(as_state(after)))
    state, outputs = [h, c, *(tensor[:, :, :0] for tensor in memory), steps], []
    for t in range(12):
        output, *state = run(running, x[t : t + 1], *state)
        outputs.append(output)
    with torch.no_grad():
        assert_close(torch.cat(outputs), layer(x)[0])
    for one, other in zip(state, tensors(as_state(after)), strict=True):
        assert_close(one, other)


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnx", reason="needs the extra `onnx`")
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ImportError, match="onnxscript is missing; install the extra 'onnx'"):
        sab.export.to_onnx(sab.SABGRU(3, 4).eval(), (example(6),))


def test_what_cannot_be_exported_says_so() -> None:
    x = example(6)
    callable_scorer = sab.SABGRU(3, 4, scorer=lambda microstates, h: microstates.sum(-1))
    with pytest.raises(ValueError, match=r"backend .* torch\.export .* cpu: it does not take a callable as the scorer"):
        torch.export.export(callable_scorer, (x,))
    with pytest.raises(ValueError, match="model must have SAB layers with a named scorer; got a callable"):
        sab.export.to_onnx(callable_scorer.eval(), (x,))
    with pytest.raises(TypeError, match=r"model must have SAB layers in float32 or float64; got torch\.bfloat16"):
        sab.export.to_onnx(sab.SABGRU(3, 4, dtype=torch.bfloat16).eval(), (x,))
    with pytest.raises(ValueError, match="model must be in evaluation mode"):
        sab.export.to_onnx(sab.SABGRU(3, 4), (x,))
    for module in (sab.SABGRU(3, 4), Model(sab.SABLSTM(3, 4))):
        with pytest.raises(TypeError, match=r"torch\.jit\.script cannot compile SAB layers; use torch\.export"):
            torch.jit.script(module)


# torch.jit.trace


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # torch.nn's layers have them, too
@pytest.mark.parametrize("cell", CELLS)
def test_traced_model_equals_the_model(cell: str, tmp_path: Path) -> None:
    model = Model(make_layer(cell, 3, 4, 2, dtype=torch.float32, bidirectional=True))
    for example_grad in (True, False):
        with torch.set_grad_enabled(example_grad):
            traced: Any = torch.jit.trace(model, (example(6),))
        torch.jit.save(traced, tmp_path / "model.pt")
        x = example(6, seed=9)
        with torch.no_grad():
            assert_close(torch.jit.load(tmp_path / "model.pt")(x), model(x))
        found = torch.autograd.grad(traced(x).square().sum(), list(traced.parameters()))
        expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other)
