"""The Triton kernels are compiled for a GPU, which needs none: what only the compiler minds shows here."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

SIZES = """
SIZES = ("steps", "batch", "first_slots", "slots", "seen", "k_att", "k_trunc", "bias_size", "most", "discount")
"""
PROGRAM = """
import sys
import torch, triton
from triton.backends.compiler import GPUTarget
from sab.config import SABConfig
from sab.ops.triton import around, functions, small

cell, scorer, weighting, incorporate, n, k_top, dtype, tf32, forget = eval(sys.argv[1])
config = SABConfig(k_top, 2, 3, scorer, weighting, "sparse", incorporate)
key_size = 1 if scorer in ("affine", "affine_tanh") else n
half = {torch.float32: "fp16", torch.bfloat16: "bf16"}[dtype]
unbounded = functions.Bound(None, k_top)
held = small.Held(functions.parts_of(cell, config), k_top, n, key_size, dtype, tf32, unbounded)
constants = held.constants()
assert constants["RESIDENT"] == (tf32 or dtype == torch.bfloat16)
assert held.in_lanes == (constants["RESIDENT"] and key_size > 1 and 0 < k_top <= 32)
of_compute = "bf16" if dtype == torch.bfloat16 else "fp32"
has_bias = scorer != "dot"
if held.in_lanes:
    part = held.parts
    is_mapped, padded = part.incorporation.has_weights, constants["P"]
    sizes = n, key_size, padded, part.cell.gates, part.cell.splits_gates, 16
    kernels = {
        small.lanes_forward_kernel: small._lanes_forward_launch(held, n < 128, True, True, has_bias),
        small.lanes_backward_kernel: small._lanes_backward_launch(held, padded < 128, True, True, True, True),
        around.lanes_prepare_kernel: around._prepare_constants(n, key_size, part.cell.gates, is_mapped, padded, True),
        around.lanes_gradients_kernel: around._gradient_constants(sizes, dtype, is_mapped, True, has_bias, has_bias),
    }
else:
    kernels = {
        small.forward_kernel: small._forward_launch(held, True, True, has_bias),
        small.backward_kernel: small._backward_launch(held, True, True, True, True),
    }
cases = [(kernel, launch, unbounded) for kernel, launch in kernels.items()]
if forget is not None:
    bound = functions.Bound(forget, k_top)
    own = held._replace(bound=bound)
    if held.in_lanes:
        cases.append((small.lanes_forward_kernel, small._lanes_forward_launch(own, False, True, True, has_bias), bound))
    else:
        cases.append((small.forward_kernel, small._forward_launch(own, True, True, has_bias), bound))
for kernel, launch, bound in cases:
    is_loop = kernel not in (around.lanes_prepare_kernel, around.lanes_gradients_kernel)
    values = dict(launch.values)
    warps = values.pop("num_warps")
    types = {}
    for name in kernel.arg_names:
        if (name == "live" and bound.forget is None) or (name == "reads" and bound.forget != "most_read"):
            values[name] = None
        if name in values:
            types[name] = "constexpr"
        elif name in SIZES:
            types[name] = "i32"
        elif name in ("first_read", "inputs", "parts", "w_ih_count", "bias_count", "x_count"):
            types[name] = "i32"
        elif name == "w_held":
            types[name] = "*i16" if constants["RESIDENT"] else "*" + of_compute
        elif name in ("w_all", "w", "packed"):
            types[name] = "*" + (half if constants["RESIDENT"] else of_compute)
        elif name in "gates keys hidden_new mapped dgates dhidden dquery dincorporated w_ih_to bias_to x_to".split():
            types[name] = "*" + of_compute
        else:
            whole = ("selected", "turn_rates", "threads", "live")
            types[name] = "*i64" if name in ("lengths", "reads") else "*i32" if name in whole else "*fp32"
    source = triton.compiler.ASTSource(fn=kernel, signature=types, constexprs=values)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    assert compiled.metadata.shared <= 227 << 10, compiled.metadata.shared
    if constants["RESIDENT"] and kernel is not around.lanes_prepare_kernel:
        assert "mma" in compiled.asm["ptx"]
    if held.in_lanes and is_loop:  # which thread has what matters, and shared memory is not the compiler's
        ttgir = compiled.asm["ttgir"]
        (layout,) = [line for line in ttgir.splitlines() if "#ttg.blocked<{sizePerThread = [1, 1]" in line]
        assert f"threadsPerWarp = [1, 32], warpsPerCTA = [{warps}, 1]" in layout
        assert "convert_layout" not in ttgir
        assert ttgir.count(".b8 boxes") == 1
        assert compiled.metadata.shared == (131072 if values["SHELVED"] > 0 else 0)
"""


@pytest.mark.parametrize(
    "options",
    [
        ("lstm", "cosine", "softmax", "gate", 128, 10, "float32", True),
        ("lstm", "cosine", "softmax", "gate", 128, 10, "bfloat16", False),
        ("lstm", "cosine", "softmax_sink", "gate", 32, 32, "bfloat16", False, "most_read"),
        ("lstm", "dot", "softmax", "gate", 64, 40, "bfloat16", False),
        ("gru", "cosine", "softmax", "gate", 128, 10, "bfloat16", False),
        ("rnn_tanh", "cosine", "softmax", "gate", 64, 10, "float32", False),
        ("lstm", "mlp", "softmax", "add", 128, 10, "float32", True),
        ("lstm", "dot", "softmax_sink", "concat", 100, 20, "bfloat16", False, "reservoir"),
        ("gru", "affine_tanh", "relu_norm", "add_bounded", 33, 5, "float32", True, "most_read"),
        ("rnn_relu", "affine", "relu", "add", 7, 1, "bfloat16", False),
        ("lstm", "mlp", "softmax", "gate", 128, 3, "float32", False),
        ("rnn_tanh", "mlp", "softmax", "add", 16, 0, "float32", True),
    ],
)
def test_the_small_kernels_compile(options: tuple[object, ...]) -> None:
    compile_kernels(PROGRAM, options)


def compile_kernels(program: str, options: tuple[object, ...]) -> None:
    """Run a program with these options: parts and sizes, a type, whether TF32 is allowed, perhaps a rule."""
    *others, dtype, tf32, forget = options if isinstance(options[-1], str) else (*options, None)
    argument = f"(*{others}, torch.{dtype}, {tf32}, {forget!r})"
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"}
    run = subprocess.run(
        [sys.executable, "-c", SIZES + program, argument], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]


LARGE_PROGRAM = """
import sys
import torch, triton
from triton.backends.compiler import GPUTarget
from sab.config import SABConfig
from sab.ops.triton import functions, large
from sab.ops.triton.large_backward import backward_kernel
from sab.ops.triton.large_forward import forward_kernel

cell, scorer, weighting, incorporate, n, batch, k_top, dtype, tf32, forget = eval(sys.argv[1])
parts = functions.parts_of(cell, SABConfig(k_top, 2, 3, scorer, weighting, "sparse", incorporate))
is_affine = scorer == "affine"
has_values = parts.incorporation.has_weights and not is_affine
unbounded = functions.Bound(None, k_top)
shape = large.Shape(parts, k_top, batch, n, 1 if is_affine else n, dtype, tf32, 132, has_values, unbounded)
of_compute = "bf16" if dtype == torch.bfloat16 else "fp32"
cases = [(forward_kernel, large._forward_launch, unbounded), (backward_kernel, large._backward_launch, unbounded)]
if forget is not None:
    cases.append((forward_kernel, large._forward_launch, functions.Bound(forget, k_top)))
for kernel, constants_of, bound in cases:
    values = dict(constants_of(shape._replace(bound=bound))[0].values)
    options = {"num_warps": values.pop("num_warps")}
    del values["launch_cooperative_grid"]
    types, attributes = {}, {}
    for position, name in enumerate(kernel.arg_names):
        if name not in values and name in ("dcells", "dsummary", "dweights"):
            values[name] = None
        if (name in ("live", "lost") and bound.forget is None) or (name == "reads" and bound.forget != "most_read"):
            values[name] = None
        if name in values:
            types[name] = "constexpr"
            continue
        if name in SIZES:
            types[name] = "i32"
            continue
        attributes[(position,)] = [["tt.divisibility", 16]]
        if name in ("selected", "turn_rates", "counter", "best_slot", "live", "lost"):
            types[name] = "*i32"
        elif name in ("lengths", "reads"):
            types[name] = "*i64"
        elif name.startswith("w_") or name.endswith("_left") or name in (
            "gates", "hidden_new", "keys", "values", "mapped", "dgates", "dhidden", "dquery", "dincorporated"
        ):
            types[name] = "*" + of_compute
        else:
            types[name] = "*fp32"
    source = triton.compiler.ASTSource(fn=kernel, signature=types, constexprs=values, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert compiled.metadata.shared <= 227 << 10, compiled.metadata.shared
    if dtype == torch.bfloat16:  # all factors are loaded ahead
        lines = compiled.asm["ttgir"].splitlines()
        loads = [line for line in lines if "tt.load" in line and "x128x!tt.ptr<bf16>" in line]
        assert not loads, loads[0]
"""


@pytest.mark.parametrize(
    "options",
    [
        ("lstm", "cosine", "softmax", "gate", 1000, 64, 10, "bfloat16", False),
        ("gru", "mlp", "relu_norm", "add", 200, 5, 3, "float32", True),
        ("rnn_tanh", "affine", "softmax", "concat", 136, 1, 20, "float32", False, "most_read"),
    ],
)
def test_the_large_kernels_compile(options: tuple[object, ...]) -> None:
    compile_kernels(LARGE_PROGRAM, options)


COPIES_PROGRAM = """
import sys
import torch, triton
from triton.backends.compiler import GPUTarget
from sab.ops.triton import copies

turned, rounds, has_sources, *types = eval(sys.argv[1])[:5]
values = dict(copies._constants(turned, rounds).values)
options = {"num_warps": values.pop("num_warps")}
signature = {}
for name in copies.copies_kernel.arg_names:
    if name.startswith("source") and not has_sources or name[-1] == "7" and name in copies.TENSORS:
        values[name] = None
    if name in values:
        signature[name] = "constexpr"
    else:
        signature[name] = "*" + types[name.startswith("source")] if name in copies.TENSORS else "i32"
source = triton.compiler.ASTSource(fn=copies.copies_kernel, signature=signature, constexprs=values)
triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
"""


@pytest.mark.parametrize(
    "options",
    [
        (5, False, True, "bf16", "fp32", "float32", False),
        (0, True, True, "fp32", "fp32", "float32", False),
        (0, False, False, "i32", "i32", "float32", False),
    ],
)
def test_the_copies_compile(options: tuple[object, ...]) -> None:
    compile_kernels(COPIES_PROGRAM, options)
