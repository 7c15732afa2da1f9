"""Models that leave Python: `to_onnx` writes a trained one as an ONNX file.

torch exports everything but the operation `sab::recurrence`, which is translated here into a `Loop` of standard
operators over the steps, with the macrostate as tensors that grow. The step inside the loop is the reference's,
exported by torch itself: a part that has a reference has a translation. Of equal scores ONNX selects those of the lower
slots first, so ties go to the older microstate there too.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from sab import extras
from sab.errors import UserTypeError, UserValueError
from sab.layers import SABLayer
from sab.ops import reference, schedule
from sab.ops.arguments import FORWARD, Given, Initial, Options, Parameters, split
from sab.ops.types import LayerWeights
from sab.parts.cells import linear
from sab.parts.registry import CELLS
from sab.parts.scorers import ScorerWeights

TYPES = (torch.float32, torch.float64)
"""The types of layers that can be written."""


def to_onnx(
    model: nn.Module,
    args: tuple[Any, ...],
    path: str | os.PathLike[str] | None = None,
    *,
    kwargs: dict[str, Any] | None = None,
    dynamic_shapes: Any = None,
    **options: Any,
) -> Any:
    """Write a model with SAB layers, or a layer itself, as an ONNX file for inference.

    `args` and `kwargs` are example arguments of the model's `forward`; a `SABState` among them, or among what it
    returns, becomes its tensors: h, c of an LSTM, microstates, keys, numbers and steps. `dynamic_shapes` says which
    sizes stay open, as for `torch.export.export`; without it, the file takes the examples' sizes alone. `options` go to
    `torch.onnx.export`, for example `input_names` and `output_names`. The model must be in evaluation mode, its layers
    in float32 or float64.

    Returns torch's `ONNXProgram`, and writes it to `path` where one is given. It needs the extra `onnx`.

    ```python
    open_sizes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    sab.export.to_onnx(model.eval(), (x,), "model.onnx", dynamic_shapes=(open_sizes,))
    ```
    """
    extras.require("onnx", "onnxscript")
    if not isinstance(model, nn.Module):
        raise UserTypeError(f"model must be a torch.nn.Module; got {type(model).__name__}.", "model")
    _check(model)
    with torch.no_grad(), warnings.catch_warnings():
        for category in (DeprecationWarning, FutureWarning):
            warnings.simplefilter("ignore", category)  # torch's exporter warns of itself
        exported = torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes)
        translator = _Translator()
        table = {torch.ops.sab.recurrence.default: lambda *arguments: translator.translate(*arguments)}
        program = _translated(exported, table, **options)
    if path is not None:
        program.save(path)
    return program


def _translated(exported: Any, table: Any, **options: Any) -> Any:
    """An exported program as an ONNX one."""
    options = {"verbose": False, **options, "dynamo": True, "custom_translation_table": table}
    return torch.onnx.export(exported, **options)


def _check(model: nn.Module) -> None:
    if model.training:
        raise UserValueError("model must be in evaluation mode: call model.eval() first.", "model")
    for layer in model.modules():
        if not isinstance(layer, SABLayer):
            continue
        if layer.weight_hh_l0.dtype not in TYPES:
            raise UserTypeError(
                f"model must have SAB layers in float32 or float64; got {layer.weight_hh_l0.dtype}.", "model"
            )
        if layer.config.forgets:
            raise UserValueError(
                f"model must have SAB layers without max_memory; got max_memory={layer.config.max_memory}.", "model"
            )
        if layer.config.is_hierarchical:
            raise UserValueError("model must have SAB layers with memory='flat'; got 'hierarchical'.", "model")
        if layer.config.k_top > 0 and not isinstance(layer.config.scorer, str):
            raise UserValueError("model must have SAB layers with a named scorer; got a callable.", "model")


class _Step(nn.Module):
    """A step of the reference, of tensors alone."""

    def __init__(self, options: Options, names: tuple[str, ...]):
        super().__init__()
        self.cell, self.config, self.names = options.cell, options.config(), names

    def forward(
        self, seen: Tensor, x: Tensor, h: Tensor, c: Tensor | None, memory: list[Tensor], parameters: list[Tensor]
    ) -> list[Tensor]:
        """The step after `seen` [1] ones: h, c if there is one, and with a memory the key, weights, slots and summary.

        The slots stand where the microstates' numbers would, so that what was selected comes as slots.
        """
        given = dict(zip(self.names, parameters, strict=True))
        all_of: Any = Parameters._make(map(given.get, Parameters._fields))
        weights = LayerWeights._make([*all_of[:4], ScorerWeights._make(all_of[4:8]), *all_of[8:]])
        nothing = h.new_zeros(h.shape[0], 0, 1)
        microstates, keys, slots = memory or (nothing, nothing, nothing.squeeze(-1))
        x_gates = linear(x, weights.w_ih, weights.b_ih, weights.norm_ih)
        h_new, c_new, read = reference.step(
            x_gates, h, c, seen, microstates, keys, slots, weights, self.cell, self.config
        )
        found = [h_new] if c_new is None else [h_new, c_new]
        if self.config.k_top > 0:
            key = reference.key_of(h_new, schedule.next_number(seen, self.config.k_att), weights.scorer, self.config)
            found += [key, read.weights, read.numbers, read.summary]
        return found


def _export_step(options: Options, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> Any:
    """The step as an ONNX model, whose inputs are those of `_Step.forward`, one after another."""
    import onnxscript

    op: Any = onnxscript.opset18
    k_top, (_, inputs), (_, n) = options.k_top, shapes["w_ih"], shapes["w_hh"]
    batch, slots = 3, _empty_slots(options) + 2  # of the example; both stay open

    def example(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    def first_of_sorted(self: Any, *, stable: bool, dim: int, descending: bool) -> Any:
        return op.TopK(self, op.Constant(value_ints=[k_top]), axis=dim, largest=int(descending))

    rows, places = torch.export.Dim("batch"), torch.export.Dim("slots", min=_empty_slots(options))
    c = example(batch, n) if CELLS[options.cell].has_c else None
    memory = []
    if k_top > 0:
        sizes = (n, _key_size(shapes["w_memory"]))
        memory = [*(example(batch, slots, size) for size in sizes), torch.zeros(batch, slots, dtype=torch.int64)]
    parameters = [example(*shape) for shape in shapes.values()]
    exported = torch.export.export(
        _Step(options, tuple(shapes)).eval(),
        (torch.tensor([1]), example(batch, inputs), example(batch, n), c, memory, parameters),
        dynamic_shapes=(
            *(None, {0: rows}, {0: rows}, None if c is None else {0: rows}),
            [{0: rows, 1: places}] * len(memory),
            [None] * len(parameters),
        ),
    )
    return _translated(exported, {torch.ops.aten.sort.stable: first_of_sorted}).model_proto


def _empty_slots(options: Options) -> int:
    """How many slots that hold nothing come before all others, so that there always are more than are selected."""
    return options.k_top + 1


def _key_size(w_memory: tuple[int, ...]) -> int:
    return w_memory[0] if len(w_memory) == 2 else 1


class _Nodes:
    """ONNX nodes, recorded one after another."""

    def __init__(self) -> None:
        import onnx_ir as ir

        self._ir, self._tape = ir, ir.tape.Tape()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._tape.nodes)

    def __call__(self, kind: str, *inputs: Any, **attributes: Any) -> Any:
        return self._tape.op(kind, inputs, attributes)

    def several(self, kind: str, *inputs: Any, outputs: int, **attributes: Any) -> list[Any]:
        """A node with more than one output."""
        return list(self._tape.op_multi_out(kind, inputs, attributes, num_outputs=outputs))

    def constant(self, value: Any, dtype: Any = None) -> Any:
        return self("Constant", value=self._ir.tensor(value, dtype=dtype or self._ir.DataType.INT64))

    def full(self, value: float, dtype: Any, *sizes: Any) -> Any:
        """A tensor of one value; its sizes are whole numbers or tensors [1]."""
        shape = [self.constant([size]) if isinstance(size, int) else size for size in sizes]
        return self("ConstantOfShape", self("Concat", *shape, axis=0), value=self._ir.tensor([value], dtype=dtype))

    def size(self, of: Any, dimension: int) -> Any:
        """The size of a dimension as a tensor [1]."""
        return self("Shape", of, start=dimension, end=dimension + 1)

    def range(self, end: Any) -> Any:
        """The numbers from 0 to a tensor [1]."""
        return self("Range", self.constant(0), self("Squeeze", end), self.constant(1))


class _Translator:
    """Translates the calls of `sab::recurrence` in one model."""

    def __init__(self) -> None:
        self._steps: dict[Any, Any] = {}
        """The steps that were exported, by all that they depend on."""
        self._calls = count()

    def translate(self, *arguments: Any) -> list[Any]:
        """The results of a call: `sab.ops.arguments.Results` without what the configuration does not have."""
        from onnxscript import evaluator

        given, initial, parameters, options, purpose = split(arguments, FORWARD)
        assert not purpose.saves, "without gradients nothing is saved"
        op = _Nodes()
        carried = _first_carried(op, given, initial, parameters, options)
        body = self._body(op, given.x, parameters, options)
        steps = op.size(given.x, 0)
        outputs = op.several("Loop", op("Squeeze", steps), None, *carried, outputs=len(body.outputs) - 1, body=body)
        last, collected = outputs[: len(carried)], outputs[len(carried) :]
        if given.lengths is not None:
            real = op("Less", op("Unsqueeze", op.range(steps), op.constant([1])), given.lengths)
            real = op("Unsqueeze", real, op.constant([2]))
            blanks = [op.constant(0.0, given.x.dtype)] * len(collected)
            if options.k_top > 0:
                blanks[-2] = op.constant(-1)  # nothing was selected
            collected = [op("Where", real, *pair) for pair in zip(collected, blanks, strict=True)]
        store = [op("Unsqueeze", carried[0], op.constant([0])), collected[0]]
        if initial.microstates is not None:
            store.insert(0, op("Transpose", initial.microstates, perm=[1, 0, 2]))
        results = [collected[0], op("Concat", *store, axis=0)]
        if CELLS[options.cell].has_c:
            results.append(op("Concat", op("Unsqueeze", carried[1], op.constant([0])), collected[1], axis=0))
        if options.k_top > 0:
            keys, (weights, selected, summary) = last[-2], collected[-3:]
            ends = op.constant([_empty_slots(options)]), op.constant([torch.iinfo(torch.int64).max])
            keys = op("Slice", keys, *ends, op.constant([1]))  # without the slots that hold nothing
            results += [keys, weights, op("Cast", selected, to=_ir().DataType.INT32), summary]
        recorder: Any = evaluator.default()  # torch's, which collects the nodes of a translation
        recorder.nodes.extend(op)
        return results

    def _body(self, outside: _Nodes, x: Any, parameters: Parameters, options: Options) -> Any:
        """The body of the loop: from what it carries to that after the step, and what of the step is collected."""
        ir, name, states = _ir(), f"recurrence_{next(self._calls)}", 1 + CELLS[options.cell].has_c
        dtype, whole = x.dtype, ir.DataType.INT64
        forms = [(whole, 0), (ir.DataType.BOOL, 0), *[(dtype, 2)] * states]  # types and numbers of dimensions
        if options.k_top > 0:
            forms += [(dtype, 3), (dtype, 3), (whole, 2)]
        inputs = [
            ir.Value(name=f"{name}_in_{place}", type=ir.TensorType(kind), shape=ir.Shape([None] * dimensions))
            for place, (kind, dimensions) in enumerate(forms)
        ]
        index, goes_on, *carried = inputs
        one, before, after = outside.constant([1]), _Nodes(), _Nodes()
        first = options.seen
        first = outside.constant([first]) if isinstance(first, int) else outside("Reshape", first, one)
        seen = before("Add", first, index)
        x_now = before("Gather", x, index, axis=0)
        step, found = self._step(outside, [seen, x_now, *carried], parameters, options, dtype)
        collected = after_step = found[:states]
        if options.k_top > 0:
            key, *read = found[-4:]
            collected = [*after_step, *read]
            memory = carried[-3:]
            place = after("Mod", after("Add", seen, one), outside.constant([options.k_att]))
            kept = after("Cast", after("Equal", place, outside.constant([0])), to=whole)
            slot = after("Sub", after.size(memory[0], 1), outside.constant([_empty_slots(options)]))
            new = (found[0], key, after("Expand", slot, after.size(memory[0], 0)))
            ends = outside.constant([0]), kept, one  # nothing or one
            new = [after("Slice", after("Unsqueeze", value, one), *ends) for value in new]
            after_step = [*after_step, *(after("Concat", *pair, axis=1) for pair in zip(memory, new, strict=True))]
        outputs = [after("Identity", value) for value in (goes_on, *collected)]
        nodes = [*before, *step, *after]
        for number, node in enumerate(nodes):  # names of a body must not be those of what is around it
            node.name = f"{name}_{number}"
            for place, value in enumerate(node.outputs):
                value.name, value.shape = f"{name}_{number}_{place}", None
        return ir.Graph(inputs, [outputs[0], *after_step, *outputs[1:]], nodes=nodes, name=name)

    def _step(
        self, outside: _Nodes, inputs: list[Any], parameters: Parameters, options: Options, dtype: Any
    ) -> tuple[list[Any], list[Any]]:
        """The nodes of a step and its outputs; its constants go outside."""
        ir = _ir()
        used = {name: value for name, value in parameters._asdict().items() if value is not None}
        shapes = {name: tuple(map(int, value.shape)) for name, value in used.items()}
        key = (options._replace(seen=0), *shapes.items(), dtype)
        if key not in self._steps:
            torch_type = torch.float64 if dtype == ir.DataType.DOUBLE else torch.float32
            self._steps[key] = _export_step(options, shapes, torch_type)
        graph = ir.from_proto(self._steps[key]).graph
        nodes, outputs = list(graph), list(graph.outputs)
        graph.outputs.clear()
        graph.remove(nodes)
        for value, other in zip(graph.inputs, (*inputs, *used.values()), strict=True):
            ir.convenience.replace_all_uses_with(value, other)
        for value in list(graph.initializers.values()):
            ir.convenience.replace_all_uses_with(value, outside("Constant", value=value.const_value))
        return nodes, outputs


def _first_carried(op: _Nodes, given: Given, initial: Initial, parameters: Parameters, options: Options) -> list[Any]:
    """What the loop starts from: h, c if there is one, and with a memory microstates, keys and slots."""
    dtype, whole, n = given.x.dtype, _ir().DataType.INT64, int(parameters.w_hh.shape[1])
    batch, empty = op.size(given.x, 1), _empty_slots(options)
    given_states = (initial.h, initial.c) if CELLS[options.cell].has_c else (initial.h,)
    states = [op.full(0.0, dtype, batch, n) if state is None else state for state in given_states]
    if options.k_top == 0:
        return states
    assert parameters.w_memory is not None
    sizes = n, _key_size(tuple(map(int, parameters.w_memory.shape)))
    memory = [*(op.full(0.0, dtype, batch, empty, size) for size in sizes), op.full(-1, whole, batch, empty)]
    if initial.microstates is not None:
        count = op.size(initial.microstates, 1)
        slots = op("Expand", op.range(count), op("Concat", batch, count, axis=0))
        held = initial.microstates, initial.keys, slots
        memory = [op("Concat", *pair, axis=1) for pair in zip(memory, held, strict=True)]
    return [*states, *memory]


def _ir() -> Any:
    import onnx_ir

    return onnx_ir
