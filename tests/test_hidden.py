"""The second result as `torch.nn`'s users know it: a GRU's is the tensor h_n, and yet has the memory with it."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any, assert_type

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import sab
from tests.comparing import randomize_surely, selects_surely
from tests.ops.cases import (
    CELLS,
    DOUBLE,
    PLAIN,
    Case,
    assert_close,
    both,
    cases,
    gradients,
    make_layer,
    pieces,
    randn,
    randomize,
    run,
)

WITHOUT_C = [cell for cell in CELLS if cell != "lstm"]
IDIOMS: dict[str, Callable[[Tensor], Any]] = {
    "last layer": lambda h: h[-1],
    "both directions": lambda h: torch.cat((h[-2], h[-1]), -1),
    "by layer": lambda h: h.view(2, -1, *h.shape[1:]),
    "squeezed": lambda h: h[-1:].squeeze(0),
    "through a layer": lambda h: nn.Linear(4, 2, dtype=h.dtype).requires_grad_(False)(h),
    "transposed": lambda h: h.transpose(0, 1).reshape(h.shape[1], -1),
    "a loop": lambda h: torch.stack(list(h)),
    "unpacked": lambda h: (lambda first, *others: first)(*h),
    "arithmetic": lambda h: 2 * h + 1,
    "in place": lambda h: h.clone().mul_(3),
    "a function": torch.tanh,
    "numbers": lambda h: h.detach().numpy(),
    "shape": lambda h: (h.shape, h.dim(), h.size(-1), len(h), h.dtype, h.requires_grad, h.is_contiguous()),
}


def same(one: Any, other: Any) -> None:
    if isinstance(one, tuple):
        assert one == other
    else:
        assert_close(torch.as_tensor(one), torch.as_tensor(other))
        assert getattr(one, "requires_grad", False) == getattr(other, "requires_grad", False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("form", ["batched", "unbatched", "packed"])
@pytest.mark.parametrize(("layers", "bidirectional"), [(2, False), (1, True), (2, True)])
@pytest.mark.parametrize("cell", WITHOUT_C)
def test_the_idioms_of_torch_give_what_they_give_there(
    cell: str, layers: int, bidirectional: bool, form: str, dtype: torch.dtype
) -> None:
    theirs, ours = both(cell, 3, 4, layers, bidirectional=bidirectional, dtype=dtype)
    x: Any = randn(6, 3, 3).to(dtype)
    if form == "packed":
        x = pack_padded_sequence(x, torch.tensor([4, 6, 1]), enforce_sorted=False)
    if form == "unbatched":
        x = x[:, 0]
    (_, expected), (_, h) = theirs(x), ours(x)
    assert isinstance(h, Tensor)
    assert isinstance(h, sab.SABHidden)
    for name, idiom in IDIOMS.items():
        torch.manual_seed(0)
        wanted = idiom(expected)
        torch.manual_seed(0)
        got = idiom(h)
        same(got, wanted)
        assert type(got) is not sab.SABHidden or name == "in place"
    (wanted,) = torch.autograd.grad(expected.square().sum(), theirs.weight_hh_l0)
    (got,) = torch.autograd.grad(h.square().sum(), ours.weight_hh_l0)
    assert_close(got, wanted, tolerance=1e-5)


def test_detaching_in_place_is_refused_where_there_is_a_graph() -> None:
    h = sab.SABGRU(3, 4)(torch.randn(6, 3, 3))[1]
    with pytest.raises(TypeError, match=r"h must be detached with h = h\.detach\(\)"):
        h.detach_()
    detached = h.detach()
    assert detached.detach_() is detached


def test_one_layer_and_one_direction() -> None:
    theirs, ours = both("gru", 3, 4)
    (_, expected), (_, h) = theirs(randn(6, 3, 3)), ours(randn(6, 3, 3))
    linear = nn.Linear(4, 2, dtype=DOUBLE)
    assert_close(linear(h.squeeze(0)), linear(expected.squeeze(0)))
    (first,) = h
    assert_close(first, expected[0])


def repackage_hidden(h: Any) -> Any:
    """As the examples of torch have it."""
    if isinstance(h, Tensor):
        return h.detach()
    return tuple(repackage_hidden(v) for v in h)


REPACKAGES: dict[str, Callable[[Any], Any]] = {
    "not at all": lambda h: h,
    "recursively": repackage_hidden,
    "by detach": lambda h: h.detach(),
    "by data": lambda h: tuple(v.data for v in h) if isinstance(h, sab.SABState) else h.data,
    "by clone": lambda h: h.clone(),
    "by cpu": lambda h: tuple(v.cpu() for v in h) if isinstance(h, sab.SABState) else h.cpu(),
    "by contiguous": lambda h: [v.contiguous() for v in h] if isinstance(h, sab.SABState) else h.contiguous(),
    "there and back": lambda h: h.to(torch.float64).to("cpu"),
    "as the state": lambda h: h.state if isinstance(h, sab.SABHidden) else h,
    "stored": lambda h: loaded(h.detach()),
    "pickled": lambda h: pickle.loads(pickle.dumps(h.detach())),
    "deeply copied": lambda h: copy.deepcopy(h.detach()),
    "copied": lambda h: copy.copy(h.detach()),
    "as a tree": lambda h: pytree.tree_map(lambda v: v.clone(), h) if isinstance(h, sab.SABState) else h,
}


def loaded(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("name", REPACKAGES)
@pytest.mark.parametrize("cell", CELLS)
def test_the_memory_stays_with_what_is_passed_back(cell: str, name: str) -> None:
    x = randn(9, 2, 2)
    layer = randomize_surely(make_layer(cell, 2, 3, 2, k_top=2, k_att=1), x)
    whole, whole_state = run(layer, x)
    first, h = layer(x[:5])
    second, end = run(layer, x[5:], REPACKAGES[name](h))
    assert_close(torch.cat([first, second]), whole)
    for name in ("h", "microstates", "numbers", "steps"):
        assert_close(getattr(end, name), getattr(whole_state, name))


@given(cases(bidirectional=False, ragged=False, max_steps=9), st.data())
def test_pieces_equal_the_whole_with_nothing_but_h(case: Case, data: st.DataObject) -> None:
    layer, x = case.layer(), case.x().requires_grad_()
    assume(selects_surely(layer, x))
    whole, end = layer(x)
    outputs, h = [], None
    for piece in data.draw(pieces(case.steps)):
        output, h = layer(x[piece], h)
        outputs.append(output)
        if isinstance(h, sab.SABState):
            h = tuple(h)
    assert h is not None
    assert_close(torch.cat(outputs), whole)
    assert_close(h[0], end[0])
    leaves = [x, *layer.parameters()]
    found = gradients([torch.cat(outputs), h[0]], leaves)
    for one, other in zip(found, gradients([whole, end[0]], leaves), strict=True):
        assert_close(one, other, "a gradient through h and its memory", tolerance=1e-9)


def test_gradients_flow_through_h_alone_and_through_its_memory() -> None:
    layer, x = randomize(make_layer("gru", 2, 3, k_top=2, k_att=1, k_trunc=1)), randn(5, 1, 2).requires_grad_()
    h = layer(x)[1]
    (of_h,) = torch.autograd.grad(h.sum(), x, retain_graph=True)
    assert of_h.any()
    plain = h.detach().clone().requires_grad_()
    output, _ = layer(randn(2, 1, 2, seed=4), h)
    (of_memory,) = torch.autograd.grad(output[1:].sum(), x)  # the chain is cut before the second step
    assert of_memory.any()
    output, _ = layer(randn(2, 1, 2, seed=4), plain)
    assert torch.autograd.grad(output.sum(), plain)[0].shape == h.shape


def test_detach_cuts_the_memory_too() -> None:
    h = randomize(make_layer("gru", 2, 3, k_top=2, k_att=1))(randn(5, 1, 2))[1]
    assert h.state.microstates.requires_grad
    cut = h.detach()
    assert not any(tensor.requires_grad for tensor in (cut, cut.state.microstates, cut.state.keys))
    assert cut.data_ptr() == h.data_ptr()


def test_what_is_one_thing() -> None:
    layer = make_layer("gru", 2, 3, k_top=2)
    h = layer(randn(5, 1, 2))[1]
    assert h.state.h is h
    assert h.state.c is None
    with pytest.raises(AttributeError):
        h.microstates  # noqa: B018
    h.requires_grad_()
    assert isinstance(h, sab.SABHidden)
    assert "SABHidden" in repr(h)


def test_what_the_layers_return_is_known_to_a_type_checker() -> None:
    x = torch.randn(4, 2, 3)
    assert_type(sab.SABGRU(3, 4).forward(x), tuple[Tensor, sab.SABHidden])
    assert_type(sab.SABRNN(3, 4).forward(x, return_attention=True), tuple[Tensor, sab.SABHidden, sab.Attention])
    assert_type(sab.SABLSTM(3, 4).forward(x), tuple[Tensor, sab.SABState])
    output, h = sab.SABGRU(3, 4).forward(x)
    assert_type(h[-1], Tensor)
    assert_type(h.detach(), sab.SABHidden)
    assert output.shape == (4, 2, 4)


def test_an_older_file_loads() -> None:
    """States were stored as their fields, with a number that is not read."""
    layer = randomize(make_layer("gru", 2, 3, k_top=2, k_att=1))
    state = layer(randn(5, 2, 2))[1].detach().state
    old = object.__new__(sab.SABState)
    old.__setstate__({**state.__getstate__(), "_seen": 2**62})
    assert old._seen is None
    assert_close(layer(randn(3, 2, 2), old)[0], layer(randn(3, 2, 2), state)[0])
    assert isinstance(old.h, sab.SABHidden)


class TestState:
    """What a whole state can do as a tensor can."""

    def state(self, cell: str = "lstm") -> tuple[Any, sab.SABState]:
        layer = randomize(make_layer(cell, 2, 3, k_top=2, k_att=1))
        return layer, run(layer, randn(5, 2, 2), lengths=[5, 3])[1]

    def test_a_clone_shares_nothing_and_has_its_gradient(self) -> None:
        _, state = self.state()
        twin = state.clone()
        for name in ("h", "c", "microstates", "keys", "numbers", "steps"):
            assert torch.equal(getattr(twin, name), getattr(state, name))
            assert getattr(twin, name).data_ptr() != getattr(state, name).data_ptr()
        assert twin.microstates.requires_grad
        assert isinstance(twin.h, sab.SABHidden)

    def test_cpu_is_the_same_there(self) -> None:
        _, state = self.state()
        assert torch.equal(state.cpu().microstates, state.microstates)
        assert state.to("meta").h.is_meta

    @pytest.mark.gpu
    def test_cuda_and_pinned_memory(self) -> None:
        layer, state = self.state()
        x = randn(4, 2, 2)
        expected = layer(x, state)[0]
        assert state.pin_memory().microstates.is_pinned()
        moved = state.pin_memory().cuda(non_blocking=True)
        assert moved.numbers.is_cuda
        assert moved.steps.device.type == "cpu"
        assert_close(layer.cuda()(x.cuda(), moved)[0].cpu(), expected)

    def test_pin_memory_needs_what_torchs_needs(self) -> None:
        if torch.cuda.is_available():
            pytest.skip("there is a device")
        _, state = self.state()
        with pytest.raises(RuntimeError):
            state.pin_memory()

    @pytest.mark.parametrize("cell", ["lstm", "gru"])
    def test_it_is_a_tree_whose_leaves_are_its_tensors(self, cell: str) -> None:
        layer, state = self.state(cell)
        leaves, spec = pytree.tree_flatten(state)
        assert len(leaves) == (6 if cell == "lstm" else 5)
        assert all(type(leaf) is Tensor for leaf in leaves)
        again = pytree.tree_unflatten(leaves, spec)
        x = randn(3, 2, 2)
        assert torch.equal(layer(x, again)[0], layer(x, state)[0])
        assert pytree.tree_map(lambda leaf: leaf.dim(), state).microstates == 4
        assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec
        keys = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(state)[0]]
        assert keys[0] == ".h"
        assert keys[-1] == ".steps"

    @pytest.mark.parametrize("reentrant", [False, True])
    @pytest.mark.parametrize("cell", ["lstm", "gru"])
    def test_checkpointing_with_a_state_that_goes_through(self, cell: str, reentrant: bool) -> None:
        layer, x = randomize(make_layer(cell, 2, 3, k_top=2, k_att=1)), randn(8, 2, 2).requires_grad_()
        leaves = [x, *layer.parameters()]

        def loss(call: Callable[..., Any]) -> Tensor:
            _, h = call(x[:4], None)
            return call(x[4:], h)[0].square().sum()

        expected = torch.autograd.grad(loss(layer), leaves)
        if reentrant and cell == "lstm":
            pytest.skip("it takes tensors and tuples of tensors alone")
        call = lambda x, h: checkpoint(layer, x, h, use_reentrant=reentrant)  # noqa: E731
        loss(call).backward()
        if not reentrant:  # which cuts what is no tensor among the arguments, as it does for every module
            for leaf, gradient in zip(leaves, expected, strict=True):
                assert_close(leaf.grad, gradient)

    @pytest.mark.parametrize("cell", ["lstm", "gru"])
    def test_function_transforms_take_it_as_an_argument(self, cell: str) -> None:
        layer, x = randomize(make_layer(cell, 2, 3, k_top=2, k_att=1)), randn(4, 2, 2)
        state = run(layer, randn(5, 2, 2))[1].detach()
        parameters = {name: parameter.detach() for name, parameter in layer.named_parameters()}

        def loss(parameters: Any, state: Any) -> Tensor:
            output, end = torch.func.functional_call(layer, parameters, (x, state))
            return output.square().sum() + end[0].sum()

        floats = pytree.tree_map(lambda leaf: leaf, state)
        of_parameters = torch.func.grad(loss)(parameters, floats)
        output, end = layer(x, state)
        expected = torch.autograd.grad(output.square().sum() + end[0].sum(), list(layer.parameters()))
        for one, other in zip(of_parameters.values(), expected, strict=True):
            assert_close(one, other)

    def test_a_loader_makes_a_batch_of_unbatched_states(self) -> None:
        for cell in ("lstm", "gru"):
            layer = randomize(make_layer(cell, 2, 3, 2, k_top=2, k_att=1))
            rows = [randn(steps, 2, seed=steps) for steps in (3, 5)]
            states = [layer(row)[1].detach() for row in rows]
            (batch,) = DataLoader(states, batch_size=2)  # type: ignore[arg-type]
            assert type(batch) is type(states[0])
            x = randn(4, 2, 2)
            output, _ = layer(x, batch)
            for row, state in enumerate(states):
                assert_close(output[:, row], layer(x[:, row], state)[0])
        with pytest.raises(TypeError, match="states must be those of unbatched sequences"):
            next(iter(DataLoader([layer(randn(3, 1, 2))[1].detach()])))  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore")  # of the compiler's own parts
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_a_compiled_function_takes_and_returns_it(cell: str) -> None:
    torch._dynamo.reset()
    layer, x = randomize(make_layer(cell, 2, 3, k_top=2, k_att=1)), randn(4, 2, 2)

    def step(x: Tensor, h: Any) -> tuple[Tensor, Any]:
        output, h = layer(x, h)
        return layer(x, h.detach())[0] + output + h[0][-1], repackage_hidden(h)

    compiled: Any = torch.compile(step, fullgraph=True, backend="aot_eager")
    h = layer(x)[1].detach()
    (expected, end), (output, compiled_end) = step(x, h), compiled(x, h)
    assert_close(output, expected)
    assert type(compiled_end) is type(end)
    assert_close(layer(x, compiled_end)[0], layer(x, end)[0])
    assert_close(compiled(x, compiled_end)[0], step(x, end)[0])


def test_without_memory_it_is_the_same_kind_of_thing() -> None:
    h = make_layer("gru", 2, 3, **PLAIN)(randn(5, 2, 2))[1]
    assert isinstance(h, sab.SABHidden)
    assert h.state.microstates.shape == (1, 2, 0, 3)


# What does not fit its memory


@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("pass_on", [lambda state: state, lambda state: state.detach()], ids=["itself", "detached"])
def test_a_state_that_was_changed_in_place_is_refused(cell: str, steps: int, pass_on: Any) -> None:
    layer = make_layer(cell, 3, 4)
    with torch.no_grad():
        _, state = layer(randn(9, 2, 3))
        (state.h if cell == "lstm" else state)[:, 0] = 0
        with pytest.raises(ValueError, match=r"hx must not be changed in place, .* use state\.reset"):
            layer(randn(steps, 2, 3), pass_on(state))
        plain = (state.h[:], state.c) if cell == "lstm" else state[:]
        assert layer(randn(steps, 2, 3), plain)[0].shape == (steps, 2, 4)


@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn_tanh"])
@pytest.mark.parametrize("steps", [1, 7])
def test_rows_begin_anew(cell: str, steps: int) -> None:
    layer, x = randomize(make_layer(cell, 3, 4, k_top=3, k_trunc=3)), randn(steps, 3, 3, seed=5)
    _, before = layer(randn(9, 3, 3))
    state = before if cell == "lstm" else before.state
    output, anew, on = layer(x, state.reset([0, 2]))[0], layer(x)[0], layer(x, before)[0]
    assert_close(output[:, [0, 2]], anew[:, [0, 2]])
    assert_close(output[:, 1], on[:, 1])
    assert_close(layer(x, state.reset(slice(None)))[0], anew)
    _, unbatched = layer(x[:, 0])
    with pytest.raises(ValueError, match="rows must be those of a batch"):
        (unbatched if cell == "lstm" else unbatched.state).reset(0)


def test_the_state_of_a_layer_that_keeps_other_steps_is_refused() -> None:
    often, rarely = make_layer("gru", 3, 4), make_layer("gru", 3, 4, k_att=10)
    with torch.no_grad():
        _, h = often(randn(40, 2, 3))
        _, streamed = often(randn(1, 2, 3), h)
        for steps in (1, 6):
            for state in (h, streamed):
                with pytest.raises(ValueError, match="hx must be the state of a layer with k_att 10"):
                    rarely(randn(steps, 2, 3), state)


def test_a_layer_without_memory_takes_any_state_and_gives_one_to_any() -> None:
    encoder, plain, x = make_layer("gru", 3, 4), make_layer("gru", 3, 4, k_top=0), randn(6, 2, 3)
    _, h = encoder(randn(9, 2, 3))
    assert_close(plain(x, h)[0], plain(x, h[:])[0])
    _, h = plain(randn(9, 2, 3))
    assert encoder(x, h)[1].state.steps.tolist() == [15, 15]
    with pytest.raises(ValueError, match=r"hx must have keys of shape .*; the state of another layer begins"):
        make_layer("gru", 3, 4, attention_size=2)(x, encoder(randn(9, 2, 3))[1])
