"""What comes before a forward loop, by torch's operations: the input's part of the gates."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from sab.ops.arguments import Given, Options, Parameters
from sab.ops.buffers import Inputs, gate_bias
from sab.ops.precision import as_type, contiguous


def inputs_of(given: Given, parameters: Parameters, options: Options) -> Inputs:
    """What the input's part of the gates is made from."""
    compute, b_ih = options.compute, parameters.b_ih
    return Inputs(
        contiguous(as_type(given.x, compute)),
        contiguous(as_type(parameters.w_ih, compute)),
        None if options.layer_norm or b_ih is None else contiguous(as_type(b_ih, compute)),
    )


def input_gates(given: Given, parameters: Parameters, options: Options) -> Tensor:
    """The input's part of the gates of all steps, in one product; with both biases where the cell adds them up."""
    compute = options.compute
    bias = None if options.layer_norm else gate_bias(parameters.b_ih, parameters.b_hh, options.cell)
    x, w_ih = contiguous(as_type(given.x, compute)), as_type(parameters.w_ih, compute)
    return F.linear(x, w_ih, None if bias is None else as_type(bias, compute))
