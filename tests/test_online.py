"""Learning while a sequence runs: its gradients are those of the whole sequence, and its cost stays what it is."""

from __future__ import annotations

import copy
import gc
import io
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call

import sab
from sab.errors import UserError
from sab.online import Learner, Step
from sab.online.credit import Arrived, due
from sab.online.stream import Chunk, Horizon, Stream
from sab.ops import reference

CELLS = {"lstm": sab.SABLSTM, "gru": sab.SABGRU, "tanh": sab.SABRNN}


class Model(nn.Module):
    """An encoder, a layer and a readout, of its steps or of the last one alone."""

    def __init__(self, cell: str = "lstm", form: str = "steps", **options: Any):
        super().__init__()
        options = {"k_top": 2, "k_att": 2, "k_trunc": 5} | options
        self.form = form
        self.encoder = nn.Linear(3, 4)
        self.rnn = CELLS[cell](4, 6, **options)
        self.readout = nn.Linear(12 if form == "summary" else 6, 2)
        self.double()

    def forward(self, x: Tensor) -> Any:
        x = self.encoder(x)
        if self.form == "summary":
            output, _, attention = self.rnn(x, return_attention=True)
            return self.readout(torch.cat((output, attention.summary), -1))
        output, state = self.rnn(x)
        if self.form == "end":
            return self.readout(state[0][-1] if isinstance(state, sab.SABState) else state[-1]), state
        return self.readout(output)


class Recorder(torch.optim.SGD):
    """Adds up the gradients that it is given."""

    def __init__(self, model: nn.Module, lr: float = 0.0):
        super().__init__(model.parameters(), lr=lr)
        self.sums = {name: torch.zeros_like(one) for name, one in model.named_parameters()}
        self.updates = 0
        self._named = dict(model.named_parameters())

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for name, parameter in self._named.items():
            if parameter.grad is not None:
                self.sums[name] += parameter.grad
        self.updates += 1
        super().step()


def squares(prediction: Tensor, y: Tensor) -> Tensor:
    return (prediction - y).square().sum()


def sharp(prediction: Tensor, y: Tensor) -> Tensor:
    """The same, but for a y of one column, whose loss is 0 and has no finite gradient."""
    return squares(prediction, y) if y.shape[-1] > 1 else (prediction - prediction.detach()).abs().sqrt().sum()


def sequence(steps: int, batch: int | None = 2, batch_first: bool = False, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (steps,) if batch is None else (batch, steps) if batch_first else (steps, batch)
    x, y = (torch.randn(*shape, size, dtype=torch.float64, generator=generator) for size in (3, 2))
    return x, y


def gradients_of(value: Tensor, model: nn.Module) -> dict[str, Tensor]:
    named = dict(model.named_parameters())
    found = torch.autograd.grad(value, list(named.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(named, found, strict=True))


def assert_close(found: Tensor, wanted: Tensor, name: str = "") -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10, msg=lambda text: f"{name} {text}")


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, gradient in wanted.items():
        assert_close(found[name], gradient, name)


def follow(learner: Learner, x: Tensor, y: Tensor, sizes: int | list[int], time: int = 0) -> list[Step]:
    """Give a learner a sequence in pieces of these sizes."""
    pieces = zip(x.split(sizes, time), y.split(sizes, time), strict=True)
    return [learner.step(*piece) for piece in pieces]


@pytest.mark.parametrize(
    ("cell", "layers", "piece"),
    [("lstm", 1, 1), ("lstm", 2, 7), ("gru", 1, 12), ("gru", 2, 3), ("tanh", 1, 5), ("tanh", 2, 4)],
)
def test_gradients_are_those_of_the_whole_sequence(cell: str, layers: int, piece: int) -> None:
    """5 divides neither the pieces nor k_att; every chunk reads chunks that read others."""
    model, (x, y) = Model(cell, num_layers=layers), sequence(28)
    whole = Model(cell, num_layers=layers, backend="reference")
    whole.load_state_dict(model.state_dict())
    wanted = gradients_of(squares(whole(x), y), whole)
    for weights in ("now", "then"):
        optimizer = Recorder(model)
        steps = follow(Learner(model, optimizer, squares, weights=weights), x, y, piece)
        assert_equal(optimizer.sums, wanted)
        assert_close(torch.cat([step.prediction for step in steps]), whole(x).detach())
        assert sum(step.loss or 0 for step in steps) == pytest.approx(squares(whole(x), y).item())


@given(data=st.data())
def test_gradients_are_those_of_the_whole_sequence_for_any_options(data: st.DataObject) -> None:
    draw = data.draw
    batch, batch_first = draw(st.sampled_from([None, 1, 3])), draw(st.booleans())
    options: dict[str, Any] = {
        "k_top": draw(st.integers(0, 4)),
        "k_att": draw(st.integers(1, 7)),
        "k_trunc": draw(st.integers(1, 9)),
    }
    options["scorer"] = draw(st.sampled_from(["cosine", "mlp", "affine"]))
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    torch.manual_seed(draw(st.integers(0, 9)))
    form = draw(st.sampled_from(["steps", "summary"]))
    model = Model(draw(st.sampled_from(list(CELLS))), form, batch_first=batch_first, **options)
    x, y = sequence(sum(sizes), batch, batch_first)
    time = 1 if batch_first and batch is not None else 0
    optimizer = Recorder(model)
    every = draw(st.integers(1, 3))
    learner = Learner(model, optimizer, squares, update_every=every, weights=draw(st.sampled_from(["now", "then"])))
    follow(learner, x, y, sizes, time)
    learner.update()
    assert learner.seen == sum(sizes)
    assert optimizer.updates == -(-len(sizes) // every)
    assert_equal(optimizer.sums, gradients_of(squares(model(x), y), model))


def test_a_model_may_predict_once_for_a_piece_and_some_pieces_may_have_no_target() -> None:
    model, (x, _) = Model("gru", "end"), sequence(40)
    targets = [torch.ones(2, 2, dtype=torch.float64) * place if place % 3 else None for place in range(10)]
    hidden = model.rnn(model.encoder(x))[0]
    total = sum(squares(model.readout(hidden[4 * place + 3]), y) for place, y in enumerate(targets) if y is not None)
    assert isinstance(total, Tensor)
    wanted = gradients_of(total, model)
    for every in (1, 4):
        optimizer = Recorder(model)
        learner = Learner(model, optimizer, squares, update_every=every)
        steps = [learner.step(*piece) for piece in zip(x.split(4), targets, strict=True)]
        learner.update()
        assert [step.loss is None for step in steps] == [y is None for y in targets]
        assert_equal(optimizer.sums, wanted)
        assert optimizer.updates == {1: 6, 4: 3}[every]


def test_embedded_symbols_are_a_stream_too() -> None:
    rnn = sab.SABGRU(4, 6, k_top=2, k_trunc=3, batch_first=True)
    model = nn.Sequential(nn.Embedding(5, 4), rnn).double()
    x, y = torch.randint(5, (2, 21)), torch.randn(2, 21, 6, dtype=torch.float64)
    optimizer = Recorder(model)
    follow(Learner(model, optimizer, squares), x, y, 4, time=1)
    assert_equal(optimizer.sums, gradients_of(squares(model(x)[0], y), model))


def test_a_limit_of_chunks_is_kept_and_takes_those_with_most_gradient() -> None:
    x, y = sequence(43)
    found: dict[int | None, dict[str, Tensor]] = {}
    counts: dict[int | None, list[tuple[int, int]]] = {}
    for limit in (None, 99, 2, 1, 0):
        model, optimizer = _model(), None
        optimizer = Recorder(model)
        steps = follow(Learner(model, optimizer, squares, max_chunks=limit), x, y, 5)
        found[limit], counts[limit] = optimizer.sums, [(step.chunks, step.dropped) for step in steps]
    assert_equal(found[99], found[None])
    assert max(chunks for chunks, _ in counts[None]) > 2
    assert not any(dropped for _, dropped in counts[None])
    wanted = found[None]["rnn.weight_hh_l0"]
    errors = [(found[limit]["rnn.weight_hh_l0"] - wanted).norm().item() for limit in (2, 1, 0)]
    assert 0 < errors[0] < errors[1] < errors[2]  # so skips of skips count, and more of them are closer
    for limit in (2, 1, 0):
        assert max(chunks for chunks, _ in counts[limit]) == limit
        assert any(dropped for _, dropped in counts[limit])
    model = _model()
    optimizer = Recorder(model)
    follow(Learner(model, optimizer, squares, max_chunks=0), x, y, 5)
    assert_equal(optimizer.sums, _truncated(model, x, y))


def test_chunks_with_most_gradient_are_run_and_those_without_any_are_not_due() -> None:
    """Four chunks of two steps, each of which made a microstate; all zeros, but for the gradients that have arrived."""
    horizon, none = Horizon(k_att=2, k_trunc=2, max_memory=9, has_memory=True), torch.zeros(1, 1, 4, 1)
    chunks = tuple(Chunk(first, none[0], None) for first in (0, 2, 4, 6))
    stream = Stream(8, 0, none[:0], none[0], None, none, none, 0, chunks)

    def run(masses: list[float], limit: int | None) -> dict[int, bool]:
        arrived = Arrived(None, None, torch.tensor(masses).reshape(1, 1, 4, 1), none)
        return {chunk.first: runs for chunk, runs in due(stream, horizon, arrived, limit)}

    assert run([5.0, 1.0, 3.0, 2.0], None) == {6: True, 4: True, 2: True, 0: True}
    assert run([5.0, 1.0, 3.0, 2.0], 3) == {6: True, 4: True, 2: False, 0: True}
    assert run([5.0, 1.0, 3.0, 2.0], 2) == {6: False, 4: True, 2: False, 0: True}
    assert run([5.0, 0.0, 3.0, 0.0], 1) == {4: False, 0: True}
    assert run([0.0, -4.0, 3.0, 0.0], 0) == {4: False, 2: False}


def _model(**options: Any) -> Model:
    torch.manual_seed(0)
    return Model(**options)


def _truncated(model: Model, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The gradients of pieces of 5 steps whose memory is constant."""
    sums = {name: torch.zeros_like(one) for name, one in model.named_parameters()}
    state = None
    for piece, target in zip(x.split(5), y.split(5), strict=True):
        hidden, state = model.rnn(model.encoder(piece), state)
        state = state.detach()
        for name, gradient in gradients_of(squares(model.readout(hidden), target), model).items():
            sums[name] += gradient
    return sums


@pytest.mark.parametrize("piece", [2, 5, 8])
@pytest.mark.parametrize(("max_memory", "k_att"), [(1, 2), (4, 2), (7, 1), (2, 7)])
def test_what_is_forgotten_is_not_read_and_gets_no_gradient(max_memory: int, k_att: int, piece: int) -> None:
    """Compared with autograd over the stream from its beginning, for each piece anew."""
    model, (x, y) = _model(k_att=k_att), sequence(42)
    optimizer = Recorder(model)
    steps = follow(Learner(model, optimizer, squares, max_memory=max_memory), x, y, piece)
    sums = {name: torch.zeros_like(one) for name, one in model.named_parameters()}
    predictions = []
    for first in range(0, 42, piece):
        last = min(first + piece, 42)
        prediction = _from_the_beginning(model, x, first, last, max_memory)
        predictions.append(prediction.detach())
        for name, gradient in gradients_of(squares(prediction, y[first:last]), model).items():
            sums[name] += gradient
    assert_close(torch.cat([step.prediction for step in steps]), torch.cat(predictions))
    assert_equal(optimizer.sums, sums)


@pytest.mark.parametrize("piece", [2, 5, 8])
@pytest.mark.parametrize(("max_memory", "k_att"), [(3, 2), (4, 2), (7, 1), (2, 7)])
def test_a_layer_that_forgets_by_itself_is_followed(max_memory: int, k_att: int, piece: int) -> None:
    """It forgets at every step: the memory and the gradients are those of the layer run over the whole stream."""
    model, (x, y) = _model(k_att=k_att, max_memory=max_memory), sequence(42)
    optimizer = Recorder(model)
    learner = Learner(model, optimizer, squares)
    assert learner.max_memory == max_memory
    steps = follow(learner, x, y, piece)
    sums = {name: torch.zeros_like(one) for name, one in model.named_parameters()}
    for first in range(0, 42, piece):
        last = min(first + piece, 42)
        prediction = _from_the_beginning(model, x, first, last, max_memory, layer_forgets=True)
        for name, gradient in gradients_of(squares(prediction, y[first:last]), model).items():
            sums[name] += gradient
    assert_close(torch.cat([step.prediction for step in steps]), model(x).detach())
    assert_equal(optimizer.sums, sums)


def test_a_layer_with_another_memory_is_refused_in_a_sentence() -> None:
    for of_layer, options, sentence in (
        ({"max_memory": 4, "forget": "most_read"}, {}, "forget must be 'recent'"),
        ({"max_memory": 4}, {"max_memory": 5}, "max_memory must be the layer's own, 4, or be left out; got 5"),
        ({"max_memory": 2}, {}, "max_memory of the layer must be at least 3"),
    ):
        model = _model(**of_layer)
        with pytest.raises(UserError, match=sentence):
            Learner(model, Recorder(model), squares, **options)  # pyright: ignore[reportArgumentType]


def _from_the_beginning(
    model: Model, x: Tensor, first: int, last: int, max_memory: int, layer_forgets: bool = False
) -> Tensor:
    """The prediction for steps first + 1 to last, with a graph of the chunks that are kept after `first` steps."""
    config, state, outputs = model.rnn.config, None, []
    k, k_att = config.k_trunc or 0, config.k_att
    oldest = max(0, (first if layer_forgets else first - first % k) // k_att - max_memory)
    for begin in range(0, last, k):
        if state is not None:
            state = state.recent(max_memory)
        end = min(begin + k, last)
        with torch.set_grad_enabled(begin + k > first or (begin + k) // k_att > oldest):
            output, state = model.rnn(model.encoder(x[begin:end]), state)
        outputs.append(output)
    return model.readout(torch.cat(outputs)[first:last])


def test_then_is_the_gradient_with_respect_to_the_weights_that_each_step_used() -> None:
    model, (x, y) = _model(), sequence(36)
    optimizer = Recorder(model, lr=0.05)
    learner = Learner(model, optimizer, squares, weights="then")
    used: list[dict[str, Tensor]] = []
    predictions: list[Tensor] = []
    for piece, target in zip(x.split(4), y.split(4), strict=True):
        used.append({name: one.detach().clone().requires_grad_() for name, one in model.named_parameters()})
        optimizer.sums = {name: torch.zeros_like(one) for name, one in used[-1].items()}
        predictions.append(learner.step(piece, target).prediction)
    state, found = None, None
    for weights, piece, prediction in zip(used, x.split(4), predictions, strict=True):
        hidden, state = functional_call(
            model.rnn,
            _part(weights, "rnn."),
            (functional_call(model.encoder, _part(weights, "encoder."), piece), state),
        )
        found = functional_call(model.readout, _part(weights, "readout."), hidden)
        assert_close(prediction, found.detach())
    assert found is not None
    flat = [one for weights in used for one in weights.values()]
    of_all = torch.autograd.grad(squares(found, y[-4:]), flat, allow_unused=True, materialize_grads=True)
    names = list(used[0])
    wanted = {name: sum(of_all[place :: len(names)]) for place, name in enumerate(names)}
    assert_equal(optimizer.sums, wanted)  # pyright: ignore[reportArgumentType]


def _part(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): one for name, one in weights.items() if name.startswith(prefix)}


def test_now_is_the_gradient_of_the_kept_chunks_run_with_the_present_weights() -> None:
    model, (x, y) = _model(cell="gru"), sequence(10)
    optimizer = Recorder(model, lr=0.05)
    learner = Learner(model, optimizer, squares)
    with torch.no_grad():
        kept = model.rnn(model.encoder(x[:5]))[1].state
    learner.step(x[:5], y[:5])
    microstates, keys = (part.detach().requires_grad_() for part in (kept.microstates, kept.keys))
    state = sab.SABState(kept.h, None, microstates, keys, kept.numbers, kept.steps)
    hidden, _ = model.rnn(model.encoder(x[5:]), state)
    loss = squares(model.readout(hidden), y[5:])
    arrived = torch.autograd.grad(loss, [microstates, keys], retain_graph=True)
    wanted = gradients_of(loss, model)
    again = model.rnn(model.encoder(x[:5]))[1].state
    through_memory = (again.microstates * arrived[0]).sum() + (again.keys * arrived[1]).sum()
    for name, gradient in gradients_of(through_memory, model).items():
        wanted[name] = wanted[name] + gradient
    optimizer.sums = {name: torch.zeros_like(one) for name, one in wanted.items()}
    learner.step(x[5:], y[5:])
    assert_equal(optimizer.sums, wanted)


@pytest.mark.parametrize("update_every", [1, 3])
@pytest.mark.parametrize("weights", ["now", "then"])
def test_it_goes_on_bit_for_bit_from_a_file(weights: str, update_every: int) -> None:
    x, y = sequence(60)
    learner = _learner(weights=weights, update_every=update_every)
    pieces = list(zip(x.split(3), y.split(3), strict=True))
    for piece in pieces[:11]:  # in the midst of a chunk, and of a period where there is one
        learner.step(*piece)
    file = io.BytesIO()
    torch.save(learner.state_dict(), file)
    wanted = [learner.step(*piece) for piece in pieces[11:]]
    resumed = _learner(weights=weights, update_every=update_every)
    resumed.step(*pieces[0])
    file.seek(0)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert resumed.seen == 33
    _assert_same(wanted, [resumed.step(*piece) for piece in pieces[11:]])
    assert torch.equal(learner.explain().credit, resumed.explain().credit)
    for one, other in zip(learner.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    """A limit on the size of files does what a full disk does."""
    x, y = sequence(40)
    usual, learner = _learner(update_every=2), _learner(update_every=2)
    pieces, path = list(zip(x.split(4), y.split(4), strict=True)), tmp_path / "learner.pt"
    for piece in pieces[:3]:
        _assert_same([usual.step(*piece)], [learner.step(*piece)])
    learner.save(path)
    before = path.read_bytes()
    for piece in pieces[3:5]:
        _assert_same([usual.step(*piece)], [learner.step(*piece)])
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limits[1]))
    try:
        with pytest.raises(UserError, match=r"path '.*learner.pt' must be a place that can be written to; it is not"):
            learner.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == before
    _assert_same([usual.step(*piece) for piece in pieces[5:]], [learner.step(*piece) for piece in pieces[5:]])
    resumed, again = _learner(update_every=2), _learner(update_every=2)
    resumed.load(path)
    for piece in pieces[:3]:
        again.step(*piece)
    _assert_same([again.step(*piece) for piece in pieces[3:]], [resumed.step(*piece) for piece in pieces[3:]])


def test_a_file_that_cannot_be_read_or_written_is_told_in_a_sentence(tmp_path: Path) -> None:
    learner, (x, y) = _learner(), sequence(10)
    learner.step(x, y)
    learner.save(tmp_path / "whole.pt")
    (tmp_path / "half.pt").write_bytes((tmp_path / "whole.pt").read_bytes()[:-900])
    (tmp_path / "text.pt").write_text("no state")
    (tmp_path / "empty.pt").touch()
    torch.save(object, tmp_path / "other.pt")
    for name, sentence in (
        ("half.pt", "must be a file of Learner.save; it is damaged, or another"),
        ("text.pt", "must be a file of Learner.save; it is damaged, or another"),
        ("empty.pt", "must be a file of Learner.save; it is damaged, or another"),
        ("other.pt", "must be a file of Learner.save; it is damaged, or another"),
        ("none.pt", "No such file or directory"),
        (".", "must be a file that can be read; Is a directory"),
    ):
        with pytest.raises(UserError) as refusal:
            learner.load(tmp_path / name)
        assert sentence in str(refusal.value)
    with pytest.raises(UserError, match="No such file or directory"):
        learner.save(tmp_path / "none" / "learner.pt")
    assert learner.seen == 10


def test_what_is_saved_can_be_loaded(tmp_path: Path) -> None:
    x, y = sequence(12)
    learner, path = _learner(), tmp_path / "learner.pt"
    learner.optimizer.param_groups[0]["lr"] = numpy.float64(1e-3)  # as numpy.logspace gives it
    learner.step(x[:8], y[:8])
    learner.save(path)
    resumed = _learner()
    resumed.load(path)
    _assert_same([learner.step(x[8:], y[8:])], [resumed.step(x[8:], y[8:])])
    before = path.read_bytes()
    learner.optimizer.param_groups[0]["note"] = object()
    with pytest.raises(UserError, match=r"^the optimizer's options and y must be numbers, text and tensors in plain"):
        learner.save(path)
    assert path.read_bytes() == before
    for wrong in (3, None, io.BytesIO()):
        with pytest.raises(UserError, match=r"^path must be a str or a pathlib.Path; got"):
            learner.save(wrong)  # pyright: ignore[reportArgumentType]


def test_a_state_from_before_an_option_existed_is_loaded() -> None:
    x, y = sequence(12)
    learner, resumed = _learner(), _learner()
    learner.step(x[:8], y[:8])
    state = learner.state_dict()
    for newer in ("memory", "block_size", "blocks"):
        del state["made_by"][newer]
    assert not {"backend", "recompute", "offload"} & state["made_by"].keys(), "these are free"
    resumed.load_state_dict(state)
    _assert_same([learner.step(x[8:], y[8:])], [resumed.step(x[8:], y[8:])])
    state["made_by"]["memory"] = "hierarchical"
    with pytest.raises(UserError, match="with the same memory, 'flat'; got 'hierarchical'"):
        resumed.load_state_dict(state)


def test_a_state_with_larger_keys_than_layers_have_by_default_can_be_loaded() -> None:
    """A layer took keys as large as its hidden state once, and None for the option that says so."""

    def make(size: int | None) -> Learner:
        torch.manual_seed(1)
        model = Model("gru")
        model.rnn, model.readout = sab.SABGRU(4, 130, attention_size=size), nn.Linear(130, 2)
        return Learner(model.double(), torch.optim.SGD(model.parameters(), lr=0.01), squares)

    x, y = sequence(4)
    older = make(130)
    older.step(x, y)
    state = older.state_dict()
    state["made_by"]["attention_size"] = None
    resumed = make(130)
    resumed.load_state_dict(state)
    _assert_same([older.step(x, y)], [resumed.step(x, y)])
    with pytest.raises(UserError, match=r"; its \S+ has shape \[130, 130\] and not \[128, 130\]: .*attention_size=130"):
        make(None).load_state_dict(state)


def _learner(optimizer: Any = torch.optim.Adam, cell: str = "lstm", **options: Any) -> Learner:
    torch.manual_seed(1)
    model = Model(cell)
    options = {"clip": 1.0, "max_memory": 6} | options
    return Learner(model, optimizer(model.parameters(), lr=0.01), sharp, **options)


def _assert_same(wanted: list[Step], found: list[Step]) -> None:
    for one, other in zip(wanted, found, strict=True):
        assert torch.equal(one.prediction, other.prediction)
        assert one[1:] == other[1:]


def _nan(x: Tensor) -> Tensor:
    bad = x.clone()
    bad[0, 0, 0] = torch.nan
    return bad


BAD: dict[str, tuple[Callable[[Learner, Tensor, Tensor], Any], str]] = {
    "batch": (lambda learner, x, y: learner.step(x[:, :1], y[:, :1]), "x must be like the stream's first, [T, 2, 3]"),
    "features": (lambda learner, x, y: learner.step(x[..., :2], y), "got [T, 2, 2]"),
    "no batch": (lambda learner, x, y: learner.step(x[:, 0], y[:, 0]), "got [T, 3]"),
    "type": (lambda learner, x, y: learner.step(x.float(), y), "torch.float64"),
    "list": (
        lambda learner, x, y: learner.step([x], y),  # pyright: ignore[reportArgumentType]
        "x must be a tensor",
    ),
    "no steps": (lambda learner, x, y: learner.step(x[:0], y[:0]), "at least one step"),
    "x": (lambda learner, x, y: learner.step(_nan(x), y), "x must be finite"),
    "y": (lambda learner, x, y: learner.step(x, _nan(y)), "y must be finite"),
    "loss": (lambda learner, x, y: _with_loss(learner, lambda p, y: p.sum() * torch.inf, x, y), "loss must be finite"),
    "entries": (lambda learner, x, y: _with_loss(learner, lambda p, y: p - y, x, y), "a tensor with one entry"),
    "constant": (lambda learner, x, y: _with_loss(learner, lambda p, y: y.sum(), x, y), "has no gradient"),
    "gradient": (lambda learner, x, y: learner.step(x, y[..., :1]), "a finite gradient"),
    "row": (lambda learner, x, y: learner.explain(row=2), "row must be"),
    "target": (lambda learner, x, y: learner.explain(lambda prediction: prediction), "one entry"),
    "another model": (
        lambda learner, x, y: learner.load_state_dict(_learner(cell="gru").state_dict()),
        "the same cell, 'lstm'; got 'gru'",
    ),
    "another optimizer": (
        lambda learner, x, y: learner.load_state_dict(_learner(torch.optim.SGD).state_dict()),
        "the same optimizer, 'Adam'; got 'SGD'",
    ),
    "another memory": (
        lambda learner, x, y: learner.load_state_dict(
            _learner(max_memory=7, update_every=learner.update_every).state_dict()
        ),
        "the same max_memory, 6; got 7",
    ),
    "no state": (lambda learner, x, y: learner.load_state_dict({}), "what Learner.state_dict returned"),
    "damaged": (lambda learner, x, y: learner.load_state_dict(_damaged(learner)), "its stream is damaged"),
    "damaged pieces": (
        lambda learner, x, y: learner.load_state_dict(learner.state_dict() | {"pieces": [(x[..., :2], y)]}),
        "state must be that of a learner",
    ),
}


def _with_loss(learner: Learner, loss: Any, x: Tensor, y: Tensor) -> None:
    usual, learner.loss = learner.loss, loss
    try:
        learner.step(x, y)
    finally:
        learner.loss = usual


def _damaged(learner: Learner) -> dict[str, Any]:
    state = learner.state_dict()
    state["stream"]["microstates"] = state["stream"]["microstates"][..., 1:, :]
    return state


@pytest.mark.parametrize("update_every", [1, 3])
@pytest.mark.parametrize("name", BAD)
def test_what_is_refused_changes_nothing(name: str, update_every: int) -> None:
    bad, sentence = BAD[name]
    x, y = sequence(40)
    pieces = list(zip(x.split(4), y.split(4), strict=True))
    usual, other = _learner(update_every=update_every), _learner(update_every=update_every)
    for learner in (usual, other):
        for piece in pieces[:5]:
            learner.step(*piece)
    with pytest.raises(UserError) as refusal:
        bad(other, *pieces[5])
    assert sentence in str(refusal.value)
    assert str(refusal.value).count("\n") == 0
    assert other.seen == usual.seen
    _assert_same([usual.step(*piece) for piece in pieces[6:]], [other.step(*piece) for piece in pieces[6:]])


def _calling(forward: Callable[[sab.SABGRU, Tensor], Any]) -> nn.Module:
    class Calling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = sab.SABGRU(3, 4)

        def forward(self, x: Tensor) -> Any:
            return forward(self.rnn, x)

    return Calling()


class Forgetful(sab.SABGRU):
    """Keeps one microstate alone."""

    def forward(self, *args: Any, **options: Any) -> Any:
        output, state = super().forward(*args, **options)
        return output, state.state.recent(1)


MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "none": (lambda: nn.Linear(3, 4), "have one SAB layer, which may be a stack; got 0"),
    "two": (lambda: nn.Sequential(sab.SABGRU(3, 4), sab.SABGRU(4, 4)), "got 2"),
    "both ways": (lambda: sab.SABGRU(3, 4, bidirectional=True), "one direction to learn from a stream"),
    "uncut": (lambda: sab.SABGRU(3, 4, k_trunc=None), "k_trunc must be a number"),
    "no module": (lambda: None, "model must be a torch.nn.Module"),
    "twice": (lambda: _calling(lambda rnn, x: rnn(x)[0] + rnn(x)[0]), "it does so more often"),
    "never": (lambda: _calling(lambda rnn, x: x), "it did not"),
    "state": (lambda: _calling(lambda rnn, x: rnn(x, torch.zeros(1, 2, 4))), "without hx"),
    "lengths": (lambda: _calling(lambda rnn, x: rnn(x, lengths=torch.tensor([1, 2]))), "without lengths"),
    "dictionary": (lambda: _calling(lambda rnn, x: {"y": rnn(x)[0]}), "a tensor, or a tuple that begins with one"),
    "other steps": (lambda: _calling(lambda rnn, x: rnn(x[::2])), "x must have its steps in dimension 0"),
    "forgetful": (lambda: Forgetful(3, 4, k_att=1), "a layer that forgets by its max_memory alone"),
    "dropout": (lambda: nn.Sequential(sab.SABGRU(3, 4), nn.Dropout(0.1)), "no dropout"),
    "dropout of states": (lambda: sab.SABGRU(3, 4, recurrent_dropout=0.1), "no dropout"),
    "batch norm": (lambda: nn.Sequential(nn.BatchNorm1d(3), sab.SABGRU(3, 4)), "no batch norm"),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_cannot_learn_from_a_stream_is_refused(name: str) -> None:
    make, sentence = MODELS[name]
    model: Any = make()
    optimizer = torch.optim.SGD(model.parameters() if isinstance(model, nn.Module) else [torch.zeros(1)], lr=0.1)
    with pytest.raises(UserError) as refusal:
        Learner(model, optimizer, squares).step(torch.randn(4, 2, 3), torch.randn(4, 2, 4))
    assert sentence in str(refusal.value)


def test_options_are_checked() -> None:
    model = _model()
    for options, sentence in (
        ({"update_every": 0}, "update_every must be a whole number of at least 1"),
        ({"weights": "later"}, "weights must be one of now, then"),
        ({"clip": 0}, "clip must be a finite number above 0"),
        ({"max_memory": 0}, "max_memory must be"),
        ({"max_chunks": -1}, "max_chunks must be"),
    ):
        with pytest.raises(UserError, match=sentence):
            Learner(model, Recorder(model), squares, **options)  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match="optimizer must have parameters of the model alone"):
        Learner(model, Recorder(Model()), squares)
    with pytest.raises(UserError, match="other than LBFGS"):
        Learner(model, torch.optim.LBFGS(model.parameters()), squares)
    with pytest.raises(UserError, match="loss must be a function"):
        Learner(model, Recorder(model), None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match="there is no prediction yet"):
        Learner(model, Recorder(model), squares).explain()


def test_what_the_caller_does_with_x_later_changes_nothing() -> None:
    x, y = sequence(40)
    usual, other, buffer = _learner(update_every=2), _learner(update_every=2), torch.empty(4, 2, 3).double()
    for piece, target in zip(x.split(4), y.split(4), strict=True):
        wanted = usual.step(piece, target)
        _assert_same([wanted], [other.step(buffer.copy_(piece), target)])


@pytest.mark.parametrize("weights", ["now", "then"])
def test_cost_does_not_grow(weights: str) -> None:
    """What is kept, and all tensors that there are."""
    learner = _learner(weights=weights, max_chunks=1, max_memory=12)
    x, y = sequence(20)
    kept, alive, done = [], [], []
    for steps in range(20, 2001, 20):
        done = follow(learner, x, y, 5)
        if steps in (200, 2000):
            gc.collect()
            kept.append((learner.chunks, learner.nbytes, len(_saved(learner))))
            alive.append(sum(one.nbytes for one in gc.get_objects() if type(one) in (Tensor, nn.Parameter)))
    assert learner.seen == 2000
    assert kept[0][:2] == kept[1][:2]
    assert kept[0][0] == 5  # 12 microstates, of 2 to 3 steps of each chunk of 5
    assert abs(kept[0][2] - kept[1][2]) < 100  # numbers have more digits
    assert alive[1] <= alive[0] + 1000
    assert done[-1].chunks == 1


def _saved(learner: Learner) -> bytes:
    file = io.BytesIO()
    torch.save(learner.state_dict(), file)
    return file.getvalue()


@pytest.mark.parametrize("update_every", [1, 2])
@pytest.mark.parametrize("cell", CELLS)
def test_a_receipt_has_the_steps_whose_inputs_receive_gradient(cell: str, update_every: int) -> None:
    """Those of autograd over the whole sequence, and as much, with the weights that made the prediction."""
    model, (x, y) = _model(cell=cell, k_top=1, k_att=3), sequence(38)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    learner = Learner(model, optimizer, squares, update_every=update_every)
    lengths = set()
    for seen, (piece, target) in enumerate(zip(x.split(2), y.split(2), strict=True), start=1):
        learner.step(piece, target)
        inputs = model.encoder(x[: 2 * seen]).detach().requires_grad_()
        wanted = model.readout(model.rnn(inputs)[0])[-1, 1].max()
        norms = torch.autograd.grad(wanted, inputs)[0].flatten(1).norm(dim=1)
        receipt = learner.explain(row=1)
        assert receipt.steps.tolist() == (norms.nonzero().flatten() + 1).tolist()
        assert_close(receipt.credit, norms[norms > 0])
        assert receipt.value == pytest.approx(wanted.item())
        assert receipt.step == 2 * seen
        assert receipt.beyond.tolist() == []
        assert receipt.top(1)[0].credit == norms.max().item() or receipt.top(1)[0].step == norms.argmax() + 1
        lengths.add(len(receipt.steps) / (2 * seen))
    assert min(lengths) < 0.9  # some steps get none


def test_a_receipt_is_of_the_weights_that_made_the_prediction() -> None:
    learner, (x, y) = _learner(torch.optim.SGD), sequence(30)
    for piece in zip(x.split(5), y.split(5), strict=True):
        step = learner.step(*piece)
        assert learner.explain().value == pytest.approx(step.prediction[-1, 0].max().item())
        assert learner.explain(lambda prediction: prediction.sum()).value == pytest.approx(step.prediction.sum().item())


def test_a_receipt_tells_where_it_ends() -> None:
    model, (x, y) = _model(), sequence(60)
    learner = Learner(model, Recorder(model), squares, max_memory=4)
    receipts = [
        (follow(learner, *piece, 5), learner.explain())[1] for piece in zip(x.split(5), y.split(5), strict=True)
    ]
    assert receipts[0].beyond.tolist() == receipts[1].beyond.tolist() == []
    assert len(receipts[-1].beyond) > 0
    for receipt in receipts:
        assert receipt.steps[-1] == receipt.step
        if len(receipt.beyond) > 0:
            assert receipt.beyond.max() < receipt.steps.min()


def test_inputs_that_a_receipt_does_not_name_can_be_removed() -> None:
    """With selections and the states at the cuts held, the prediction depends on the named inputs and on no others."""
    model, (x, y) = _model(k_top=1, k_att=3), sequence(47, batch=1)
    learner = Learner(model, Recorder(model), squares)
    follow(learner, x, y, 5)
    receipt = learner.explain()
    named = set(receipt.steps.tolist())
    assert 5 < len(named) < 42
    held, wanted = _held(model, x)
    assert torch.equal(held(x), wanted)
    for step in range(1, 48):
        removed = x.clone()
        removed[step - 1] = 0.0
        assert torch.equal(held(removed), wanted) == (step not in named), step
    others = torch.tensor([step - 1 for step in range(1, 48) if step not in named])
    removed = x.clone()
    removed[others] = 0.0
    assert torch.equal(held(removed), wanted)  # all of them at once


def _held(model: Model, x: Tensor) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """The last prediction as a function of the inputs, with the selections and cut states of x; and its value at x."""
    rnn, config = model.rnn, model.rnn.config
    weights, selected, ends = rnn._weights(0), [], []

    @torch.no_grad()
    def run(inputs: Tensor, is_first: bool) -> Tensor:
        gates = nn.functional.linear(model.encoder(inputs), weights.w_ih, weights.b_ih)
        h = c = torch.zeros(1, 6, dtype=torch.float64)
        memory = [h.new_zeros(1, 0, size) for size in (6, rnn._key_size)]
        numbers = torch.zeros(1, 0, dtype=torch.int64)
        for place in range(len(inputs)):
            if is_first:
                ends.append((h, c))
            elif place % config.k_trunc == 0:
                h, c = ends[place]
            chosen = numbers if is_first else torch.where(torch.isin(numbers, selected[place]), numbers, -1)
            seen = torch.tensor([place])
            h, c, read = reference.step(gates[place], h, c, seen, *memory, chosen, weights, "lstm", config)
            if is_first:
                selected.append(read.numbers)
            if (place + 1) % config.k_att == 0:
                number = torch.tensor([numbers.shape[1]])
                key = reference.key_of(h, number, weights.scorer, config)
                memory = [torch.cat((old, new.unsqueeze(1)), 1) for old, new in zip(memory, (h, key), strict=True)]
                numbers = torch.cat((numbers, number.unsqueeze(1)), 1)
        return model.readout(h).max()

    wanted = run(x, True)
    return lambda inputs: run(inputs, False), wanted


def cues(seed: int, rows: int) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Pieces of 5 steps: a cue of three, noise, and in every sixth piece the question what the cue was."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        answer = torch.randint(3, (rows,), generator=generator)
        for place in range(6):
            x = torch.zeros(5, rows, 8)
            x[..., 5:] = torch.randn(5, rows, 3, generator=generator)
            if place == 0:
                x[1] = nn.functional.one_hot(answer, 8).float()
            if place == 5:
                x[4] = torch.tensor([0.0] * 4 + [1.0] + [0.0] * 3)
            yield x, answer if place == 5 else None


def test_it_learns_what_truncated_backpropagation_cannot() -> None:
    """The cue lies 27 steps back, the chain is cut every 5."""
    found = {}
    for k_top in (3, 0):
        torch.manual_seed(0)
        rnn = sab.SABGRU(8, 24, k_top=k_top, k_att=1, k_trunc=5)
        model = nn.ModuleDict({"rnn": rnn, "readout": nn.Linear(24, 3)})
        model.forward = lambda x, model=model: model["readout"](model["rnn"](x)[0][-1])  # pyright: ignore[reportAttributeAccessIssue]
        learner = Learner(model, torch.optim.Adam(model.parameters(), 0.01), nn.functional.cross_entropy, max_memory=30)
        right = []
        for (x, y), _ in zip(cues(0, 16), range(6 * 90), strict=False):
            step = learner.step(x, y)
            if y is not None:
                right.append((step.prediction.argmax(-1) == y).float().mean().item())
        found[k_top] = sum(right[-15:]) / 15
    assert found[3] > 0.9
    assert found[0] < 0.6


def test_a_copy_of_a_learner_goes_its_own_way() -> None:
    learner, (x, y) = _learner(), sequence(20)
    follow(learner, x, y, 5)
    twin = copy.deepcopy(learner)
    _assert_same(follow(learner, x, y, 5), follow(twin, x, y, 5))
