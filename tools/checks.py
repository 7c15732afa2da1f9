"""The kernels of this GPU against float64: random configurations, each precision, outputs and every gradient.

`python -m tools.checks measure OUT.jsonl [--slice I/N] [--cases FIRST,END] [--commit C]` compares them here, without
the case END. Most of its time is compilation, so N processes share the cases. `python -m tools.checks sanitize
OUT.jsonl` runs layers with random shapes under NVIDIA's compute-sanitizer. `python -m tools.checks` makes the table of
docs/engine-appendix.md from benchmarks/checks/h200.jsonl.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

import sab
from sab.parts.scorers import turn

ROOT = Path(__file__).parents[1]
PAGE, RECORDS = ROOT / "docs" / "engine-appendix.md", ROOT / "benchmarks" / "checks" / "h200.jsonl"
CASES = 96
"""How many configurations there are; every third has a large hidden size."""
PRECISIONS = {"float32": "ieee", "TF32": "tf32", "bfloat16": "tf32"}
"""By name, what cuDNN's RNNs may do with float32."""


@dataclass(frozen=True)
class Case:
    """A configuration and what it is run on, drawn from its number."""

    number: int
    n: int
    steps: int
    batch: int
    cell: str
    scorer: str
    weighting: str
    incorporate: str
    k_top: int
    k_att: int
    k_trunc: int | None
    attention_size: int | None
    lengths: bool
    in_pieces: bool
    """Whether the sequence is run in two pieces, the second with the first one's state."""
    max_memory: int | None
    forget: str


def case_of(number: int) -> Case:
    """The same for the same number, always."""
    draw = random.Random(number)
    is_large = number % 3 == 2
    n = (
        draw.choice([136, 200, 256, 300, 512, 650, 1000, 1500])
        if is_large
        else draw.choice([*range(5, 129), 32, 64, 128])
    )
    k_att = draw.choice([1, 2, 3])
    steps = draw.randint(2, 40)
    everything = draw.random() < 0.5  # then rounding changes no selection
    k_top = min(steps // k_att + 1, 64) if everything else draw.randint(1, 12)
    is_bounded = not everything and draw.random() < 0.4
    case = Case(
        number=number,
        n=n,
        steps=steps,
        batch=draw.choice([1, 2, 5, 17, 64, 70]),
        cell=draw.choice(["lstm", "lstm", "gru", "rnn_tanh", "rnn_relu"]),
        scorer=draw.choice(["cosine", "cosine", "cosine", "dot", "mlp", "affine", "affine_tanh"]),
        weighting=draw.choice(["softmax", "softmax", "softmax_sink", "relu", "relu_norm"]),
        incorporate=draw.choice(["gate", "gate", "add", "add_bounded", "concat"]),
        k_top=k_top,
        k_att=k_att,
        k_trunc=draw.choice([None, 3, 10]),
        attention_size=draw.choice([None, None, 32, 100]),
        lengths=draw.random() < 0.4,
        in_pieces=draw.random() < 0.4,
        max_memory=draw.randint(2, 12) if is_bounded else None,
        forget=draw.choice(["recent", "most_read", "reservoir"]),
    )
    return replace(case, attention_size=300) if is_large and draw.random() < 0.2 else case


def main() -> None:
    if len(sys.argv) == 1:
        from tools.pages import replace_part

        replace_part(PAGE, "checks", page_part(RECORDS.read_text(encoding="utf-8")))
        return
    parser = argparse.ArgumentParser(prog="python -m tools.checks")
    kinds = parser.add_subparsers(dest="kind", required=True)
    measuring, sanitizing = kinds.add_parser("measure"), kinds.add_parser("sanitize")
    for one in (measuring, sanitizing):
        one.add_argument("out", type=Path)
        one.add_argument("--commit", default=None)
    measuring.add_argument("--slice", default="1/1")
    measuring.add_argument("--cases", default=f"0,{CASES}")
    sanitizing.add_argument("--layer", default="SABLSTM")
    sanitizing.add_argument("--n", type=int, default=33)
    sanitizing.add_argument("--shapes", type=int, default=334)
    sanitizing.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU.")
    if asked.kind == "sanitize" and shutil.which("compute-sanitizer") is None:
        parser.error("compute-sanitizer is not on the PATH; it comes with NVIDIA's CUDA toolkit.")
    if asked.kind == "sanitize":
        (run_shapes if asked.inside else sanitize)(asked)
        return
    (own, shared), (first, last) = map(int, asked.slice.split("/")), map(int, asked.cases.split(","))
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)  # and fresh memory is full of NaN
    for number in range(first + own - 1, last, shared):
        for precision in PRECISIONS:
            record = measure(case_of(number), precision, asked.commit)
            with asked.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")


def about_now(commit: str | None) -> dict[str, Any]:
    """What a record says of where and when it was made; commit: None for that of the checkout."""
    from sab.lab.training.run import provenance

    about = provenance(torch.device("cuda"))
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return {"device": about.device, "versions": about.versions, "commit": commit or about.commit, "date": date}


def sanitize(asked: argparse.Namespace) -> None:
    """A record of what compute-sanitizer finds when a layer takes random shapes."""
    own = [sys.executable, "-m", "tools.checks", "sanitize", str(asked.out), "--inside"]
    own += ["--layer", asked.layer, "--n", str(asked.n), "--shapes", str(asked.shapes)]
    tool = ["compute-sanitizer", "--tool", "memcheck"]
    done = subprocess.run([*tool, *own], capture_output=True, text=True)
    last = done.stdout.splitlines()[-1] if done.stdout else done.stderr[-300:]
    found = re.search(r"ERROR SUMMARY: (\d+) error", last)
    counted = [line for line in done.stdout.splitlines() if line.startswith("shapes: ")]
    record: dict[str, Any] = {"tool": " ".join(tool), "layer": asked.layer, "n": asked.n}
    record |= {"shapes": int(counted[-1].removeprefix("shapes: ")) if counted else 0}
    record |= {"errors": int(found[1])} if found and done.returncode == 0 else {"error": last}
    with asked.out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record | about_now(asked.commit)) + "\n")


def run_shapes(asked: argparse.Namespace) -> None:
    """A forward and a backward of a layer in each of so many random shapes and lengths."""
    torch.manual_seed(0)
    draw = random.Random(asked.n)
    layer = getattr(sab, asked.layer)(7, asked.n, backend="triton", device="cuda")
    for shape in range(asked.shapes):
        steps, batch = draw.randint(1, 60), draw.randint(1, 80)
        lengths = torch.tensor([draw.randint(1, steps) for _ in range(batch)])
        x = torch.randn(steps, batch, 7, device="cuda", requires_grad=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=shape % 2 == 0):
            output, _ = layer(x, **({"lengths": lengths} if shape % 3 == 0 else {}))
        output.float().square().sum().backward()
        torch.cuda.synchronize()
        sys.stdout.write(f"shapes: {shape + 1}\n")


def measure(case: Case, precision: str, commit: str | None) -> dict[str, Any]:
    """A record of one case in one precision; commit: None for that of the checkout."""
    record: dict[str, Any] = {**asdict(case), "precision": precision, **about_now(commit)}
    try:
        exact = results(case, "reference", "cpu", None)[0]
        plain = results(case, "reference", "cuda", precision)[0]
        found, gap = results(case, "triton", "cuda", precision)
        again = results(case, "triton", "cuda", precision)[0]
    except Exception as error:
        return record | {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
    same = (found["numbers"].cpu() == exact["numbers"]).double().mean().item()
    # Where a gradient is 0 in exact numbers, as that of an affine scorer's query, the others say how much is much.
    least = 1e-6 * max(tensor.norm().item() for name, tensor in exact.items() if name.startswith("d"))
    errors = {name: relative(tensor, exact[name], least) for name, tensor in found.items() if name != "numbers"}
    worst = max(errors, key=lambda name: errors[name])
    repeats = all(torch.equal(_bits(one), _bits(again[name])) for name, one in found.items())
    own = {"same_selection": same, "gap": gap, "repeats": repeats, "worst": worst, "largest_error": errors[worst]}
    return record | own | {"error_of_pytorch": relative(plain[worst], exact[worst], least)}


def _bits(tensor: Tensor) -> Tensor:
    """A tensor as whole numbers, of which NaN equals itself."""
    return tensor.contiguous().view(torch.int32) if tensor.dtype == torch.float32 else tensor


def relative(tensor: Tensor, exact: Tensor, least: float) -> float:
    """How far a tensor is from the exact one, as a share of its length or, if that is larger, of the least one."""
    difference = (tensor.double().cpu() - exact).norm().item()
    return difference / max(exact.norm().item(), least) if not math.isnan(difference) else math.inf


def results(case: Case, backend: str, device: str, precision: str | None) -> tuple[dict[str, Tensor], float | None]:
    """What a layer gives, and the gradients of all its parameters and its input; the gap of what was selected."""
    sizes, kind = (7, case.n), case.cell.removeprefix("rnn_")
    options: dict[str, Any] = {"nonlinearity": kind} if case.cell.startswith("rnn_") else {}
    names = ["scorer", "weighting", "incorporate", "k_top", "k_att", "k_trunc", "max_memory"]
    names += ["forget"] if case.max_memory is not None else []
    names += [] if case.scorer.startswith("affine") else ["attention_size"]
    options |= {name: getattr(case, name) for name in names}
    layer_class: Any = {"lstm": sab.SABLSTM, "gru": sab.SABGRU}.get(case.cell, sab.SABRNN)
    layer = layer_class(*sizes, backend=backend, dtype=torch.float64, **options)
    generator = torch.Generator().manual_seed(case.number)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(randn(*parameter.shape) * case.n**-0.5)
    x = randn(case.steps, case.batch, 7)
    lengths = torch.tensor([1 + random.Random(row).randrange(case.steps) for row in range(case.batch)])
    direction = randn(case.steps, case.batch, case.n)
    if precision is not None:
        layer, x, direction = layer.to(device, torch.float32), x.float().to(device), direction.float().to(device)
        torch.backends.cudnn.rnn.fp32_precision = torch.backends.cuda.matmul.fp32_precision = PRECISIONS[precision]  # pyright: ignore[reportAttributeAccessIssue]
    x.requires_grad_()
    half = case.steps // 2
    bounds = [(0, half), (half, case.steps)] if case.in_pieces and not case.lengths else [(0, case.steps)]
    outputs: list[Tensor] = []
    numbers: list[Tensor] = []
    state, gaps = None, [0.0]
    with torch.autocast(device, torch.bfloat16, enabled=precision == "bfloat16"), _passes() as passes:
        for first, last in bounds:
            given = {"lengths": lengths} if case.lengths else {}
            output, state, attention = layer(x[first:last], state, return_attention=True, **given)
            outputs.append(output)
            numbers.append(attention.numbers)
    if backend == "triton":
        gaps += [gap_of(plan, buffers, layer) for plan, buffers in passes]
    total = (torch.cat(outputs).to(direction.dtype) * direction).sum()
    inputs = {"x": x, **dict(layer.named_parameters())}
    found = torch.autograd.grad(total, list(inputs.values()), allow_unused=True, materialize_grads=True)
    given = {"output": torch.cat(outputs).detach(), "numbers": torch.cat(numbers)}
    return given | {f"d{name}": one for name, one in zip(inputs, found, strict=True)}, max(gaps)


@contextlib.contextmanager
def _passes() -> Iterator[list[Any]]:
    """The plan and the buffers of each pass of the Triton backend in this context."""
    from sab.ops.triton import engine

    seen: list[Any] = []
    forward = engine.forward

    def spy(plan: Any, weights: Any, buffers: Any, *others: Any) -> None:
        forward(plan, weights, buffers, *others)
        seen.append((plan, buffers))

    engine.forward = spy
    try:
        yield seen
    finally:
        engine.forward = forward


def gap_of(plan: Any, buffers: Any, layer: Any) -> float:
    """How far the best score that was not selected is above the worst one that was, as a share of the largest.

    Of all steps and rows, by a full sort of the scores of the pass's own queries and keys in float64; 0 where there are
    no such scores.
    """
    if plan.config.k_top == 0 or plan.is_affine or plan.config.forgets or plan.config.scorer == "mlp":
        return 0.0
    query, keys, selected = (
        tensor.detach().double().cpu() for tensor in (buffers.query, buffers.keys, buffers.selected)
    )
    largest_gap = 0.0
    for t in range(plan.first_read, plan.steps):
        used, asked = plan.slots_at(t), query[t]
        if plan.config.scorer == "cosine":
            asked = turn(asked * layer.attn_v_l0.detach().double().cpu(), torch.tensor([plan.seen + t]))
        scores = torch.einsum("bsd,bd->bs", keys[:, :used], asked)
        for row in range(plan.batch):
            if buffers.lengths is not None and t >= int(buffers.lengths[row]):
                continue
            own = selected[t, row].long()
            own = own[own >= 0]
            others = torch.ones(used, dtype=torch.bool)
            others[own] = False
            if len(own) != min(plan.config.k_top, used) or len(set(own.tolist())) != len(own):
                return math.inf
            if others.any():
                gap = (scores[row][others].max() - scores[row][own].min()) / scores[row].abs().max().clamp_min(1e-30)
                largest_gap = max(largest_gap, gap.item())
    return largest_gap


COLUMNS = (
    *("kernels", "precision", "cases", "same selection", "median error", "over PyTorch's", "more than twice"),
    *("same bits", "largest gap"),
)


def page_part(records: str) -> str:
    """The generated part of the page.

    A row of the table has the errors of the cases with a finite result in which everything was selected as in exact
    numbers. What is 0 in exact numbers has no relative error.
    """
    found = [json.loads(line) for line in records.splitlines()]
    lines = ["| " + " | ".join(COLUMNS) + " |", "| " + " | ".join("---" for _ in COLUMNS) + " |"]
    for kernels in ("small", "large"):
        for precision in PRECISIONS:
            done = [
                one
                for one in found
                if one.get("precision") == precision
                and (one["n"] > 128) == (kernels == "large")
                and math.isfinite(one.get("largest_error", math.inf))
            ]
            same = [one for one in done if one["same_selection"] == 1 and one["error_of_pytorch"] < 1]
            if not same:
                continue
            ratios = [one["largest_error"] / max(one["error_of_pytorch"], 1e-30) for one in same]
            cells = [kernels, precision, len(done), len(same), f"{median(one['largest_error'] for one in same):.0e}"]
            cells += [f"{median(ratios):.2f}", sum(ratio > 2 for ratio in ratios)]
            repeats, gap = all(one["repeats"] for one in done), max(one["gap"] for one in done)
            lines.append("| " + " | ".join(map(str, [*cells, "all" if repeats else "not all", f"{gap:.0e}"])) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
