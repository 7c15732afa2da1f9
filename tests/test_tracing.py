"""What a trace tells against autograd: on the reference, on every backend, and in pieces through the layer's state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

import sab
from sab.config import FORGETS, SABConfig
from sab.errors import UserError
from sab.lab.models import ModelConfig, SequenceModel
from sab.ops import dispatch
from sab.parts.registry import SCORERS
from sab.parts.scorers import ScorerWeights
from tests.comparing import randomize_surely
from tests.ops.cases import (
    BACKENDS,
    CELLS,
    DOUBLE,
    INCORPORATIONS,
    WEIGHTINGS_AND_FORWARDS,
    assert_close,
    make_layer,
    randn,
    randomize,
    run,
    weighted_sum,
)
from tests.ops.cases import (
    SCORERS as SCORER_NAMES,
)


def hidden_gradients(module: nn.Module, layer: Any, x: Tensor, target: Any) -> list[Tensor]:
    """The gradient of a target at the hidden states of each of a stack's layers, [T, B, n], as autograd sums it up on
    the graph of the reference."""
    recorded: list[Tensor] = []
    recurrence = dispatch.recurrence

    def recording(*arguments: Any) -> Any:
        result = recurrence(*arguments)
        recorded.append(result.output)
        return result

    configured = layer.config
    layer.config = replace(configured, backend="reference")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dispatch, "recurrence", recording)
        outputs = module(x)
    layer.config = configured
    arrived = [[torch.zeros_like(h) for h in output] for output in recorded]
    for index, output in enumerate(recorded):
        assert output.grad_fn is not None
        for step, (node, _) in enumerate(output.grad_fn.next_functions):  # what made the hidden state of a step
            assert node is not None

            def keep(gradients: Any, index: int = index, step: int = step) -> None:
                arrived[index][step] = gradients[0]

            node.register_prehook(keep)
    target(outputs[0] if isinstance(outputs, tuple) else outputs).backward()
    return [torch.stack(steps) for steps in arrived]


def every_entry(outputs: Tensor) -> Tensor:
    return weighted_sum([outputs])


def check_sums(trace: sab.Trace, tolerance: float = 1e-10) -> None:
    """The paths and the rest are what came over skips."""
    skip = trace.rest.clone()
    for path in trace.paths:
        skip[path.skips[-1].kept_at - 1] += path.gradient
    assert_close(skip, trace.skip, "paths and rest", tolerance)
    norms = [path.norm for path in trace.paths]
    assert norms == sorted(norms, reverse=True)
    everything = sum(norms) + trace.rest.norm(dim=-1).sum().item()
    for path in trace.paths:
        assert path.norm == pytest.approx(path.gradient.norm().item())
        assert path.share == pytest.approx(path.norm / everything)
        for skip_taken in path.skips:
            assert skip_taken.kept_at in trace.kept_at[skip_taken.step - 1].tolist()
        for one, following in pairwise(path.skips):
            assert one.kept_at >= following.step


@pytest.mark.parametrize("weighting_and_forward", WEIGHTINGS_AND_FORWARDS)
@pytest.mark.parametrize(
    ("cell", "scorer", "incorporate"),
    [
        *(("lstm", scorer, "add") for scorer in SCORER_NAMES),
        *((cell, "mlp", "add") for cell in CELLS[1:]),
        *(("lstm", "mlp", incorporate) for incorporate in INCORPORATIONS[1:]),
    ],
)
def test_parts_add_up_to_autograds_gradient(
    cell: str, scorer: str, incorporate: str, weighting_and_forward: tuple[str, str]
) -> None:
    weighting, forward = weighting_and_forward
    options = {"scorer": scorer, "weighting": weighting, "forward": forward, "incorporate": incorporate}
    x = randn(9, 2, 2)
    layer = randomize_surely(make_layer(cell, 2, 3, k_top=3, k_att=1, k_trunc=4, **options), x)
    (expected,) = hidden_gradients(layer, layer, x, every_entry)
    trace = sab.trace(layer, x, target=every_entry, row=1)
    assert_close(trace.total, expected[:, 1], "gradient")
    assert trace.skip.any()
    check_sums(trace)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scorer", SCORER_NAMES)
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_each_part_is_what_autograd_sends_that_way(cell: str, scorer: str, backend: str) -> None:
    """The layer goes on from a state whose h is the chain's way back, and whose newest microstate is the skips'."""
    layer = randomize(make_layer(cell, 2, 3, k_top=2, k_att=2, k_trunc=3, scorer=scorer, backend=backend))
    x = randn(9, 1, 2)
    trace = sab.trace(layer, x, target=every_entry)
    scale = torch.autograd.grad(every_entry(ones := torch.ones(9, 1, 3, dtype=DOUBLE, requires_grad=True)), ones)[0]
    for step in range(1, 9):
        state = run(layer, x[:step])[1].detach()
        h, microstates = (tensor.clone().requires_grad_() for tensor in (state.h, state.microstates))
        keys = state.keys
        if step % 2 == 0:
            weights = ScorerWeights(*(getattr(layer, f"attn_{name}_l0", None) for name in ScorerWeights._fields))
            newest = SCORERS[scorer].key(weights, microstates[:, :, -1], state.numbers[:, :, -1])
            keys = torch.cat([keys[:, :, :-1], newest.unsqueeze(2)], dim=2)
        output, _ = layer(x[step:], replace(state, h=h, microstates=microstates, keys=keys))
        value = (output * scale[step:]).sum()
        to_h, to_microstates = torch.autograd.grad(value, [h, microstates], materialize_grads=True)
        assert_close(trace.chain[step - 1], to_h[0, 0], f"chain to {step}")
        assert_close(trace.direct[step - 1], scale[step - 1, 0], f"direct to {step}")
        over_skips = to_microstates[0, 0, -1] if step % 2 == 0 else torch.zeros(3, dtype=DOUBLE)
        assert_close(trace.skip[step - 1], over_skips, f"skips to {step}")


def jacobian_of_step(layer: Any, x: Tensor, step: int, microstate: int | None) -> Tensor:
    """The Jacobian of (h, c) after a step, by the (h, c) before it or by one microstate, through the layer's state."""
    state = layer(x[: step - 1])[1].detach()

    def after(h: Tensor, c: Tensor, microstates: Tensor) -> Tensor:
        keys = torch.nn.functional.linear(microstates, layer.attn_w_memory_l0)
        end = layer(x[step - 1 : step], replace(state, h=h, c=c, microstates=microstates, keys=keys))[1]
        return torch.cat([end.h.flatten(), end.c.flatten()])

    by_h, by_c, by_microstates = torch.autograd.functional.jacobian(after, (state.h, state.c, state.microstates))
    if microstate is not None:
        return by_microstates[:, 0, 0, microstate]
    return torch.cat([by_h.flatten(1), by_c.flatten(1)], dim=1)


@pytest.mark.parametrize("k_trunc", [None, 4])
def test_a_path_is_the_product_of_its_steps(k_trunc: int | None) -> None:
    layer = randomize(make_layer("lstm", 2, 3, k_top=2, k_att=2, k_trunc=k_trunc, scorer="dot", backend="reference"))
    x = randn(8, 1, 2)
    trace = sab.trace(layer, x, target_step=8, target_unit=1, max_paths=1_000)
    jacobian = cache(lambda step, microstate: jacobian_of_step(layer, x, step, microstate))
    assert not trace.rest.any()
    assert max(len(path.skips) for path in trace.paths) >= 2
    for path in trace.paths:
        gradient, at = torch.zeros(6, dtype=DOUBLE), 8
        gradient[1] = 1.0
        for step, kept_at in path.skips:
            for passed in range(at, step, -1):
                gradient = gradient @ jacobian(passed, None)
            reached = gradient @ jacobian(step, kept_at // 2 - 1)
            gradient, at = torch.cat([reached, torch.zeros(3, dtype=DOUBLE)]), kept_at
        assert_close(path.gradient, gradient[:3], str(path.skips))


def test_few_paths_and_few_hops_leave_the_rest_together() -> None:
    layer = randomize(make_layer("lstm", 2, 3, k_top=2, k_trunc=None))
    x = randn(16, 2)
    every = sab.trace(layer, x, max_paths=100_000)
    few = sab.trace(layer, x, max_paths=5)
    one = sab.trace(layer, x, max_hops=1)
    assert not every.rest.any()
    assert len(few.paths) == 5
    assert few.rest.any()
    assert {len(path.skips) for path in one.paths} == {1}
    assert [path.skips for path in one.paths] == [path.skips for path in every.paths if len(path.skips) == 1]
    for trace in (few, one):
        assert_close(trace.total, every.total, "gradient")
        check_sums(trace)


@pytest.mark.parametrize("backend", BACKENDS)
def test_selections_are_those_of_the_run(backend: str) -> None:
    layer = sab.SABGRU(3, 8, k_top=4, k_att=3, backend=backend, batch_first=True)
    x = torch.randn(2, 20, 3)
    _, _, attention = layer(x, return_attention=True)
    trace = sab.trace(layer, x, row=1)
    assert torch.equal(trace.numbers, attention.numbers[1])
    torch.testing.assert_close(trace.weights, attention.weights[1])
    assert torch.equal(trace.kept_at, torch.where(trace.numbers < 0, 0, (trace.numbers + 1) * 3))


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    layer = randomize(sab.SABLSTM(3, 16, k_top=4, k_trunc=5)).cuda()
    x = torch.randn(40, 2, 3, device="cuda")
    assert layer.backend_for(x) == "triton"
    _, _, attention = layer(x, return_attention=True)
    trace = sab.trace(layer, x, row=1)
    assert torch.equal(trace.numbers, attention.numbers[:, 1].cpu())
    torch.testing.assert_close(trace.weights, attention.weights[:, 1].cpu(), rtol=1e-2, atol=1e-2)
    assert trace.skip.any()
    check_sums(trace, tolerance=1e-3)


@pytest.mark.parametrize("readout", ["hidden", "hidden+weights", "hidden+summary"])
@pytest.mark.parametrize("layers", [1, 2])
def test_models_that_read_their_attention(layers: int, readout: Any) -> None:
    config = ModelConfig(hidden_size=4, readout=readout, num_layers=layers, memory=SABConfig(k_top=3, k_trunc=3))
    model = SequenceModel(config, encoding="onehot", input_size=4, output_size=5, steps=10).double()
    x = torch.arange(20).reshape(10, 2) % 4

    def loss(outputs: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs[3:, 1], torch.arange(7) % 5)

    expected = hidden_gradients(model, model.layers, x, loss)
    for index in range(layers):
        trace = sab.trace(model, x, target=loss, row=1, layer=index)
        assert trace.value == pytest.approx(loss(model(x)[0]).item())
        assert trace.target_step is None
        assert_close(trace.total, expected[index][:, 1], f"layer {index}")


class Classifier(nn.Module):
    """A model with one answer for a sequence, made from the state that its layer ends in."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn: Any = sab.SABLSTM(2, 3, 2, batch_first=True, dropout=0.5, k_top=2, k_trunc=4, dtype=DOUBLE)
        self.out = nn.Linear(6, 4, dtype=DOUBLE)

    def forward(self, x: Tensor) -> Tensor:
        _, (h, c) = self.rnn(x)
        return self.out(torch.cat([h[0] + c[1], h[1]], dim=-1))


class GRUClassifier(Classifier):
    """The same from a tensor h."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = sab.SABGRU(2, 3, 2, batch_first=True, dropout=0.5, k_top=2, k_trunc=4, dtype=DOUBLE)

    def forward(self, x: Tensor) -> Tensor:
        _, h = self.rnn(x)
        return self.out(torch.cat((h[-2], h[-1]), 1))


@pytest.mark.parametrize("kind", [Classifier, GRUClassifier])
def test_a_model_that_reads_the_last_state(kind: type[Classifier]) -> None:
    model = kind()
    x = randn(2, 9, 2)

    def largest(outputs: Tensor) -> Tensor:
        return outputs[1].max()

    assert model.training
    trace = sab.trace(model, x, row=1, layer=0)
    assert model.training
    assert model.rnn.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert (trace.target_step, trace.value) == (None, pytest.approx(largest(model.eval()(x)).item()))
    expected = hidden_gradients(model, model.rnn, x, largest)
    assert_close(trace.total, expected[0][:, 1], "gradient")
    assert_close(sab.trace(model, x, row=1).total, expected[1][:, 1], "gradient")


def test_the_target_is_an_entry_of_a_steps_output() -> None:
    layer = sab.SABRNN(2, 4, k_top=2)
    x = torch.randn(8, 3, 2)
    output, _ = layer(x)
    assert sab.trace(layer, x, 5, 2, row=1).value == pytest.approx(output[4, 1, 2].item())
    assert sab.trace(layer, x, 5, row=1).value == pytest.approx(output[4, 1].max().item())
    last = sab.trace(layer, x)
    assert (last.value, last.target_step) == (pytest.approx(output[7, 0].max().item()), 8)
    earlier = sab.trace(layer, x, 5)
    assert earlier.direct.nonzero()[:, 0].tolist() == [4]
    assert not earlier.total[5:].any()
    total, direct, chain, skip = earlier.credit
    assert direct[4] == 1.0
    for norms, part in ((total, earlier.total), (chain, earlier.chain), (skip, earlier.skip)):
        torch.testing.assert_close(norms, part.norm(dim=-1))


def test_a_trace_is_printed_in_a_few_lines() -> None:
    layer, x = make_layer("lstm", 3, 5, k_top=2, k_att=1), randn(12, 1, 3)
    randomize_surely(layer, x)
    found = sab.trace(layer, x, 12, 0)
    first, *paths = repr(found).splitlines()
    assert first == f"Trace of 12 steps, target {found.value:.4g} at step 12, {len(found.paths)} paths:"
    assert [path.strip() for path in paths] == [repr(path) for path in found.paths[:3]]
    step, kept_at = found.paths[0].skips[0]
    assert repr(found.paths[0]).startswith(f"Path({step} read {kept_at}")


def test_without_a_memory_all_credit_comes_along_the_chain() -> None:
    trace = sab.trace(sab.SABLSTM(2, 4, k_top=0, k_trunc=3), torch.randn(8, 2))
    assert trace.paths == ()
    assert not trace.skip.any()
    assert trace.chain.any(dim=-1).tolist() == [False] * 6 + [True, False]


def mean_product(microstates: Tensor, h: Tensor) -> Tensor:
    centred = microstates - microstates.mean(1, keepdim=True)
    return (centred * h.unsqueeze(1)).sum(-1)


def test_a_scorer_that_looks_at_all_microstates_together() -> None:
    layer = randomize(make_layer("gru", 2, 3, k_top=2, k_trunc=3, scorer=mean_product))
    x = randn(9, 1, 2)
    (expected,) = hidden_gradients(layer, layer, x, every_entry)
    trace = sab.trace(layer, x, target=every_entry)
    assert_close(trace.total, expected[:, 0], "gradient")


@pytest.mark.parametrize("forget", FORGETS)
@pytest.mark.parametrize(
    "options", [{"scorer": mean_product}, {"forward": "dense"}, {}], ids=["callable", "dense", "sparse"]
)
def test_a_bounded_macrostate(options: dict[str, Any], forget: str) -> None:
    x, options = randn(14, 1, 2), {"k_att": 1, "max_memory": 3, "forget": forget, **options}
    layer = randomize_surely(make_layer("gru", 2, 3, k_top=2, k_trunc=3, backend="reference", **options), x)
    (expected,) = hidden_gradients(layer, layer, x, every_entry)
    trace = sab.trace(layer, x, target=every_entry)
    assert_close(trace.total, expected[:, 0], "gradient")
    assert torch.equal(trace.numbers, layer(x, return_attention=True)[2].numbers[:, 0])


class Around(nn.Module):
    """A model with something before its layer and something after it, and dropout in both places where there can be."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.before = nn.Linear(2, 3, dtype=DOUBLE)
        self.rnn = randomize(make_layer("gru", 3, 4, 3, dropout=0.5, k_top=2, k_trunc=3, **options))
        self.after = nn.Sequential(nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 5, dtype=DOUBLE))

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.after(self.rnn(self.before(x))[0]), None


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize(("batch_first", "shape"), [(False, (9, 2, 2)), (True, (2, 9, 2)), (False, (9, 2))])
def test_a_stack_inside_of_a_model_that_trains(batch_first: bool, shape: tuple[int, ...], layer: int) -> None:
    model, x = Around(batch_first=batch_first), randn(*shape)
    row = len(shape) - 2
    trace = sab.trace(model, x, target=every_entry, row=row, layer=layer)
    assert model.rnn.training
    assert all(parameter.grad is None for parameter in model.parameters())
    expected = hidden_gradients(model.eval(), model.rnn, x, every_entry)[layer]
    assert_close(trace.total, expected[:, row], "gradient")
    check_sums(trace)


class Calling(Classifier):
    """A classifier whose call of its layer is given."""

    def __init__(self, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.rnn, x)


ZEROS = torch.zeros(2, 2, 3, dtype=DOUBLE)
READS_MICROSTATES = "module must read its layer's output, h, c or attention to be traced; it reads microstates."


@pytest.mark.parametrize(
    ("module", "options", "sentence"),
    [
        (nn.Linear(2, 3), {}, "module must be or have one SAB layer, which may be a stack; got 0."),
        (None, {}, "module must be a torch.nn.Module; got NoneType."),
        (sab.SABLSTM(2, 3, bidirectional=True), {}, "module must have a layer of one direction to be traced"),
        (
            Calling(lambda rnn, x: rnn(x)[0] + rnn(x)[0]),
            {},
            "module must call its layer once to be traced",
        ),
        (Calling(lambda rnn, x: x), {}, "module must call its layer once to be traced; it did not."),
        (
            Calling(lambda rnn, x: rnn(x, (ZEROS, ZEROS))[0]),
            {},
            "module must call its layer without hx",
        ),
        (
            Calling(lambda rnn, x: rnn(x, lengths=torch.tensor([2, 1]))[0]),
            {},
            "module must call its layer without lengths",
        ),
        (Calling(lambda rnn, x: rnn(x)[1].microstates[0].sum(1)), {}, READS_MICROSTATES),
        (Calling(lambda rnn, x: (lambda y, state: y + state.keys.sum())(*rnn(x))), {}, READS_MICROSTATES),
        (Classifier(), {"row": 2}, "row must be a whole number of at least 0, and at most 1; got 2."),
        (Classifier(), {"layer": 2}, "layer must be a whole number of at least -2, and at most 1; got 2."),
        (Classifier(), {"max_hops": 0}, "max_hops must be a whole number of at least 1, or None; got 0."),
        (Classifier(), {"max_paths": 0}, "max_paths must be a whole number of at least 1; got 0."),
        (Classifier(), {"target_unit": 4}, "target_unit must be a whole number of at least 0, and at most 3; got 4."),
        (
            Classifier(),
            {"target_step": 1},
            "target must be given where the outputs are not of shape [2, 2] and a size, the layer's own; got [2, 4].",
        ),
        (Classifier(), {"target": 3}, "target must be a function of the outputs; got int."),
        (Classifier(), {"target": lambda y: y}, "target must give a tensor with one entry; got [2, 4]."),
        (Classifier(), {"target": lambda y: 1.0}, "target must give a tensor with one entry; got float."),
        (
            Classifier(),
            {"target": lambda y: y.detach().sum()},
            "target must be made from the layer's outputs; what it gives has no gradient.",
        ),
        (
            Classifier(),
            {"target": torch.sum, "target_step": 1},
            "target must be None where target_step or target_unit is given; got both.",
        ),
    ],
)
def test_mistakes(module: Any, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as raised:
        sab.trace(module, randn(2, 2, 2), **options)
    assert str(raised.value).startswith(sentence)


def test_a_step_past_the_end_and_a_packed_sequence() -> None:
    layer = sab.SABLSTM(2, 3)
    with pytest.raises(ValueError, match="target_step must be a whole number of at least 1, and at most 4; got 5"):
        sab.trace(layer, torch.randn(4, 2), 5)
    with pytest.raises(TypeError, match="module must call its layer with a tensor to be traced; got a PackedSequence"):
        sab.trace(layer, pack_sequence([torch.randn(4, 2)]))


def test_tensors_of_inference_mode() -> None:
    layer, x = randomize(make_layer("lstm", 2, 3, k_top=2, k_trunc=3)), randn(9, 2)
    with torch.inference_mode():
        of_inference, made_there = x.clone(), make_layer("lstm", 2, 3)
        trace = sab.trace(layer, of_inference)
    assert_close(trace.total, sab.trace(layer, x).total)
    assert of_inference.is_inference()
    sentence = "module must have been made outside of torch.inference_mode to be traced; its parameters were not."
    with pytest.raises(ValueError, match=sentence):
        sab.trace(made_there, x)
