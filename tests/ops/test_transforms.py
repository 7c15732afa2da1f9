"""`torch.vmap`, `torch.func.grad` and batched gradients equal loops over single samples, on every backend."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, stack_module_state, vmap

from sab.errors import UserError
from sab.ops import batching, dispatch, operation
from sab.ops.cpu import loader
from sab.state import SABState
from tests.ops.cases import (
    BACKENDS,
    DOUBLE,
    assert_close,
    make_layer,
    randn,
    randomize,
    runs_fast,
    warns_slow,
)

SAMPLES = 3
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "deep": {"num_layers": 2, "bidirectional": True, "k_att": 2},
    "affine": {"scorer": "affine", "max_microstates": 4, "incorporate": "concat", "k_top": 2},
    "mlp": {"scorer": "mlp", "weighting": "softmax_sink", "k_top": 2},
    "nothing kept": {"k_att": 20},
    "nothing read": {"k_att": 7, "scorer": "mlp"},
    "no memory": {"k_top": 0},
    "layer norm": {"layer_norm": True},
}
needs_library = pytest.mark.skipif(loader.unavailable() is not None, reason=loader.unavailable() or "")
forward_mode = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own
over_backends = pytest.mark.parametrize("backend", BACKENDS)


def make(cell: str = "lstm", kind: str = "default", backend: str = "auto", seed: int = 0) -> Any:
    return randomize(make_layer(cell, 3, 4, **KINDS[kind], backend=backend), seed)


def total_of(tensors: list[Tensor]) -> Tensor:
    """A scalar that depends on every entry of every tensor, each in its own way, without random numbers."""
    return torch.stack([(one.flatten() * torch.arange(one.numel()).add(1).sin()).sum() for one in tensors]).sum()


def whole(state: Any) -> Any:
    """The state with its memory, whatever a layer returns."""
    return getattr(state, "state", state)


def detached(layer: Any) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in layer.named_parameters()}


def loss_of(layer: Any) -> Callable[..., Tensor]:
    """A number that depends on all that a call returns, as a function of parameters, input and target."""

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        output, state = functional_call(layer, parameters, (x,))
        state = whole(state)
        return (total_of([output, *state, state.microstates, state.keys]) - y).square()

    return loss


def gradients_of(loss: Callable[..., Tensor], parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Those of one sample, by autograd alone, of the parameters and of the input."""
    leaves = {name: parameter.clone().requires_grad_() for name, parameter in parameters.items()}
    x = x.clone().requires_grad_()
    found = torch.autograd.grad(loss(leaves, x, y), [*leaves.values(), x], materialize_grads=True)
    return dict(zip([*leaves, "x"], found, strict=True))


@over_backends
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn_tanh"])
def test_gradients_of_each_sample_equal_a_loop(cell: str, kind: str, backend: str) -> None:
    layer = make(cell, kind, backend)
    loss, parameters, xs, ys = loss_of(layer), detached(layer), randn(SAMPLES, 7, 2, 3), randn(SAMPLES)
    found, of_x = vmap(grad(loss, argnums=(0, 1)), in_dims=(None, 0, 0))(parameters, xs, ys)
    for i in range(SAMPLES):
        for name, expected in gradients_of(loss, parameters, xs[i], ys[i]).items():
            assert_close((found | {"x": of_x})[name][i], expected, f"{name} of sample {i}")


@pytest.mark.skipif(
    dispatch.triton_unavailable() is not None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs Triton and its interpreter",
)
def test_the_kernels_take_samples_as_rows_too() -> None:
    """They pack weights, which samples share."""
    layer = make("lstm", "mlp", "triton")
    loss, parameters, xs, ys = loss_of(layer), detached(layer), randn(2, 5, 1, 3), randn(2)
    found = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, xs, ys)
    judge = make("lstm", "mlp", "reference")
    for i in range(2):
        for name, expected in gradients_of(loss_of(judge), parameters, xs[i], ys[i]).items():
            if name != "x":
                assert_close(found[name][i], expected, name)


@over_backends
@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn_tanh"])
@pytest.mark.parametrize("shape", ["batch", "batch first", "unbatched"])
def test_vmap_over_inputs_equals_a_loop(cell: str, shape: str, backend: str) -> None:
    layer = make(cell, "deep", backend)
    layer.batch_first = shape == "batch first"
    xs = randn(SAMPLES, 7, 3) if shape == "unbatched" else randn(SAMPLES, 7, 2, 3)

    def results(x: Tensor) -> tuple[Tensor, ...]:
        output, state, attention = layer(x, return_attention=True)
        state = whole(state)
        return output, *state, state.microstates, state.keys, state.numbers, attention.numbers, attention.weights

    expected = [torch.stack(parts) for parts in zip(*map(results, xs), strict=True)]
    for found, wanted in zip(vmap(results)(xs), expected, strict=True):
        assert_close(found, wanted)
    for found, wanted in zip(vmap(results, in_dims=1, chunk_size=2)(xs.movedim(0, 1)), expected, strict=True):
        assert_close(found, wanted)


@over_backends
@pytest.mark.parametrize("mapped", ["both", "input", "state"])
def test_vmap_over_states(mapped: str, backend: str) -> None:
    layer, xs = make("lstm", "default", backend), randn(SAMPLES, 7, 2, 3)
    h, c = randn(SAMPLES, 1, 2, 4, seed=5), randn(SAMPLES, 1, 2, 4, seed=6)
    dims = {"both": (0, 0, 0), "input": (0, None, None), "state": (None, 0, 0)}[mapped]
    given = [tensor if dim == 0 else tensor[0] for tensor, dim in zip((xs, h, c), dims, strict=True)]

    def continued(x: Tensor, h: Tensor, c: Tensor) -> Tensor:
        first, state = layer(x, (h, c))
        second, state = layer(x, state)  # with a memory
        return total_of([first, second, *state, state.microstates])

    argnums = (0, 1, 2)
    found = vmap(grad(continued, argnums), in_dims=dims)(*given)
    for i in range(SAMPLES):
        leaves = [
            (tensor[i] if dim == 0 else tensor).clone().requires_grad_()
            for tensor, dim in zip(given, dims, strict=True)
        ]
        expected = torch.autograd.grad(continued(*leaves), leaves)
        for one, other in zip(found, expected, strict=True):
            assert_close(one[i], other)


@over_backends
def test_a_state_that_all_samples_share(backend: str) -> None:
    layer, xs = make("gru", "default", backend), randn(SAMPLES, 7, 2, 3)
    state = layer(randn(5, 2, 3, seed=3))[1].detach()
    assert_close(vmap(lambda x: layer(x, state)[0])(xs), torch.stack([layer(x, state)[0] for x in xs]))


@needs_library
@pytest.mark.parametrize("dim", [0, 1])
def test_lengths_of_each_sample(dim: int) -> None:
    """They lie in any order in memory, which the compiled loops read."""
    layer, xs = make("lstm", "deep", "cpu"), randn(SAMPLES, 7, 2, 3)
    lengths = torch.tensor([[7, 2], [1, 7], [4, 4]])

    def results(x: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        output, state = layer(x, lengths=lengths)
        return output, state.h, state.c, state.numbers

    found = vmap(results, in_dims=(0, dim))(xs, lengths.movedim(0, dim).contiguous())
    expected = [torch.stack(parts) for parts in zip(*map(results, xs, lengths), strict=True)]
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other)
    assert_close(vmap(lambda x: results(x, lengths[0])[0])(xs), torch.stack([results(x, lengths[0])[0] for x in xs]))


@needs_library
def test_a_state_that_is_mapped_with_its_memory() -> None:
    """All of its tensors, steps and numbers too, so that how many steps there were is read off the mapped ones."""
    layer, xs = make("lstm"), randn(SAMPLES, 7, 2, 3)
    states = [layer(x)[1] for x in xs]
    names = ("h", "c", "microstates", "keys", "numbers", "steps")
    stacked = [torch.stack([getattr(state, name) for state in states]).detach() for name in names]
    with runs_fast():
        found = vmap(lambda x, *tensors: layer(x, SABState(*tensors))[0])(xs, *stacked)
    assert_close(found, torch.stack([layer(x, state)[0] for x, state in zip(xs, states, strict=True)]))


@pytest.mark.parametrize("what", ["input", "lengths", "hx"])
def test_mistakes_inside_of_a_map_are_told(what: str) -> None:
    layer, xs, lengths = make("lstm", "deep"), randn(SAMPLES, 7, 2, 3), torch.full((SAMPLES, 2), 7)
    steps = torch.zeros(SAMPLES, 2, dtype=torch.int64)
    if what == "input":
        xs[1, 3, 0, 0] = torch.nan
    elif what == "lengths":
        lengths[2, 1] = 8
    else:
        steps[0, 0] = -1

    def run(x: Tensor, lengths: Tensor, steps: Tensor) -> Tensor:
        zeros, nothing = torch.zeros(4, 2, 4, dtype=DOUBLE), torch.zeros(4, 2, 0, 4, dtype=DOUBLE)
        state = SABState(zeros, zeros, nothing, nothing, nothing[..., 0].long(), steps)
        return layer(x, state, lengths=lengths)[0]

    with pytest.raises(UserError) as caught:
        vmap(run)(xs, lengths, steps)
    assert caught.value.option == what


@over_backends
@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn_tanh"])
@pytest.mark.parametrize("inputs", [None, 0])
def test_ensembles(cell: str, inputs: int | None, backend: str) -> None:
    """Other weights for each sample, with one input for all or one for each."""
    layers = [make(cell, "affine", backend, seed) for seed in range(SAMPLES)]
    stacked, buffers = stack_module_state(layers)
    xs, y = randn(SAMPLES, 7, 2, 3), torch.zeros((), dtype=DOUBLE)
    x = xs if inputs == 0 else xs[0]
    loss = loss_of(layers[0])
    parameters = {name: tensor.detach() for name, tensor in stacked.items()}
    assert buffers == {}
    found, of_x = vmap(grad(loss, argnums=(0, 1)), in_dims=(0, inputs, None))(parameters, x, y)
    for i, layer in enumerate(layers):
        own = xs[i] if inputs == 0 else xs[0]
        for name, expected in gradients_of(loss, detached(layer), own, y).items():
            assert_close((found | {"x": of_x})[name][i], expected, f"{name} of layer {i}")


@over_backends
def test_samples_share_a_mask_of_recurrent_dropout_or_have_their_own(backend: str) -> None:
    layer = randomize(make_layer("lstm", 3, 4, recurrent_dropout=0.5, backend=backend))
    x = randn(7, 2, 3).expand(SAMPLES, -1, -1, -1)
    parameters, y = detached(layer), torch.zeros((), dtype=DOUBLE)

    def gradients(randomness: str) -> Tensor:
        torch.manual_seed(3)
        mapped = vmap(grad(loss_of(layer)), in_dims=(None, 0, None), randomness=randomness)
        return mapped(parameters, x, y)["weight_hh_l0"]

    same, different = gradients("same"), gradients("different")
    torch.manual_seed(3)
    expected = gradients_of(loss_of(layer), parameters, x[0], y)["weight_hh_l0"]
    for i in range(SAMPLES):
        assert_close(same[i], expected)
    assert not torch.allclose(different[0], different[1])


@over_backends
def test_maps_of_maps(backend: str) -> None:
    """Of samples and targets with one layer; of layers and samples."""
    layers = [make("lstm", "affine", backend, seed) for seed in range(2)]
    loss, xs, ys = loss_of(layers[0]), randn(SAMPLES, 7, 2, 3), randn(2)
    parameters = detached(layers[0])
    inner = vmap(grad(loss), in_dims=(None, 0, None))
    by_target = vmap(inner, in_dims=(None, None, 0))(parameters, xs, ys)
    stacked = {name: tensor.detach() for name, tensor in stack_module_state(layers)[0].items()}
    by_layer = vmap(inner, in_dims=(0, None, None))(stacked, xs, ys[0])
    for j in range(2):
        for i in range(SAMPLES):
            expected, of_layer = (
                gradients_of(loss, parameters, xs[i], ys[j]),
                gradients_of(loss, detached(layers[j]), xs[i], ys[0]),
            )
            for name in parameters:
                assert_close(by_target[name][j, i], expected[name], name)
                assert_close(by_layer[name][j, i], of_layer[name], name)


@over_backends
def test_autograd_goes_through_a_map(backend: str) -> None:
    """The gradient of a map, by `torch.func.grad` and by autograd itself, is the sum over samples."""
    layer, xs = make("gru", "mlp", backend), randn(SAMPLES, 7, 2, 3)
    parameters = detached(layer)

    def total(parameters: dict[str, Tensor]) -> Tensor:
        return total_of([vmap(lambda x: functional_call(layer, parameters, (x,))[0])(xs)])

    looped = total_of([torch.stack([layer(x)[0] for x in xs])])
    expected = torch.autograd.grad(looped, list(layer.parameters()))
    by_autograd = torch.autograd.grad(total(dict(layer.named_parameters())), list(layer.parameters()))
    for one, other, wanted in zip(grad(total)(parameters).values(), by_autograd, expected, strict=True):
        assert_close(one, wanted)
        assert_close(other, wanted)


@over_backends
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["a batch", "unbatched", "large"])
def test_batched_gradients_equal_single_ones(
    kind: str, backend: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large: what a forward left is not copied more than once."""
    if how == "large":
        monkeypatch.setattr(batching, "LARGEST_COPY", 0)
    layer, x = make("lstm", kind, backend), randn(7, 2, 3)
    x = (x[:, 0] if how == "unbatched" else x).requires_grad_()
    output, state = layer(x)
    outputs, inputs = [output, state.h, state.c], [x, *layer.parameters()]
    weights = [randn(SAMPLES, *tensor.shape, seed=9) for tensor in outputs]
    options: dict[str, Any] = {"retain_graph": True, "allow_unused": True}
    found = torch.autograd.grad(outputs, inputs, weights, is_grads_batched=True, **options)
    for i in range(SAMPLES):
        expected = torch.autograd.grad(outputs, inputs, [weight[i] for weight in weights], **options)
        for one, other in zip(found, expected, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                assert_close(one[i], other)


@forward_mode
@over_backends
@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn_tanh"])
def test_jacobians(cell: str, backend: str) -> None:
    layer, x = make(cell, "default", backend), randn(4, 2, 3)

    def output(x: Tensor) -> Tensor:
        return layer(x)[0]

    expected = torch.autograd.functional.jacobian(output, x)
    with torch.no_grad():
        assert_close(jacrev(output)(x), expected)
    assert_close(torch.autograd.functional.jacobian(output, x, vectorize=True), expected)
    if backend == "reference":
        assert_close(jacfwd(output)(x), expected)


@needs_library
def test_what_is_mapped_runs_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a fall-back, forward and backward: the samples are rows. An ensemble is a pass for each layer."""
    forwards, backwards = [], []
    run, run_back = operation._forward, operation._backward
    monkeypatch.setattr(operation, "_forward", lambda given, *rest: forwards.append(given) or run(given, *rest))
    monkeypatch.setattr(
        operation, "_backward", lambda outside, given, *rest, **options: backwards.append(given)
        or run_back(outside, given, *rest, **options),
    )  # fmt: skip
    layer, xs, ys = make(), randn(SAMPLES, 7, 2, 3), randn(SAMPLES)
    with runs_fast():
        vmap(grad(loss_of(layer)), in_dims=(None, 0, 0))(detached(layer), xs, ys)
    assert [tuple(given.x.shape) for given in forwards] == [(7, SAMPLES * 2, 3)]
    assert [tuple(given.x.shape) for given in backwards] == [(7, SAMPLES * 2, 3)]
    forwards.clear()
    stacked = stack_module_state([make(seed=seed) for seed in range(SAMPLES)])[0]
    with runs_fast():
        vmap(lambda parameters: functional_call(layer, parameters, (xs[0],))[0])(stacked)
    assert len(forwards) == SAMPLES


@forward_mode
@needs_library
@pytest.mark.parametrize("which", ["jacfwd", "hessian", "grad of grad", "a penalty"])
def test_what_the_fast_backends_lack_falls_back_and_says_so(which: str) -> None:
    layer, judge, x = make("gru"), make("gru", backend="reference"), randn(4, 2, 3)

    def of(layer: Any) -> Tensor:
        def output(x: Tensor) -> Tensor:
            return layer(x)[0]

        def loss(x: Tensor) -> Tensor:
            return total_of([layer(x)[0]])

        if which == "jacfwd":
            return jacfwd(output)(x)
        if which == "hessian":
            return hessian(loss)(x)
        if which == "grad of grad":
            with torch.no_grad():
                return grad(lambda x: total_of([grad(loss)(x)]))(x)
        penalty = grad(loss)(x).square().sum()  # its own gradient is autograd's
        return torch.autograd.grad(penalty, [layer.weight_hh_l0])[0]

    reason = {
        "jacfwd": "no forward-mode derivatives",
        "hessian": "no forward-mode derivatives",
        "grad of grad": "no second derivatives",
        "a penalty": r"under torch.no_grad\(\), or with detached parameters, the call is fast",
    }[which]
    with warns_slow(reason):
        found = of(layer)
    assert_close(found, of(judge))
    with pytest.raises((UserError, RuntimeError), match=r"backend must be auto or one that|has second derivatives"):
        of(make("gru", backend="cpu"))


@needs_library
def test_a_gradient_that_nobody_can_differentiate_again_is_fast() -> None:
    layer, x = make(), randn(7, 2, 3)
    with runs_fast():
        with torch.no_grad():
            grad(lambda x: layer(x)[0].sum())(x)
        grad(lambda parameters: functional_call(layer, parameters, (x,))[0].sum())(detached(layer))
        vmap(lambda x: layer(x)[0])(x.unsqueeze(0)).sum().backward()


@pytest.mark.parametrize("steps", [0, 1])
def test_a_state_that_was_made_outside_can_be_used_inside_and_after(steps: int) -> None:
    """It is made when it is first looked at, which is inside here."""
    layer, x = make_layer("lstm", 3, 4).requires_grad_(False), randn(6, 2, 3)
    with torch.no_grad():
        _, state = layer(x)
        for step in x[:steps]:
            _, state = layer(step[None], state)
    expected = torch.func.grad(lambda x: layer(x, state)[0].square().sum())(x)
    torch.save(state, io.BytesIO())
    with torch.no_grad():
        _, state = layer(x)
        for step in x[:steps]:
            _, state = layer(step[None], state)
    assert_close(torch.func.grad(lambda x, state: layer(x, state)[0].square().sum())(x, state), expected)


def test_a_hidden_state_without_its_memory_is_refused() -> None:
    layer, x = make_layer("gru", 3, 4).requires_grad_(False), randn(6, 2, 3)
    _, h = layer(x)
    with pytest.raises(TypeError, match=r"hx must be a SABState \(h\.state\) inside of a function transform"):
        torch.func.grad(lambda x, h: layer(x, h)[0].sum())(x, h)
    inside = torch.func.grad(lambda x, state: layer(x, state)[0].sum())(x, h.state)
    assert_close(inside, torch.func.grad(lambda x: layer(x, h)[0].sum())(x))
