"""Models of other packages, a small adapter each. Their blocks, norms and starts are the packages' own."""

from __future__ import annotations

from math import ceil
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sab.errors import UserValueError
from sab.lab.rivals.base import Backbone, Parts, Sizes, load, step_by_step

HEAD = 32
"""Size of a Transformer's heads; there are as many as make up its width."""
SPARSE_HEAD = 16
SPARSE = {
    "sliding_window_size": 16,
    "compress_block_size": 4,
    "compress_block_sliding_stride": 4,
    "selection_block_size": 4,
    "num_selected_blocks": 4,
}
"""What a step of the sparse Transformer attends to: its last steps, four selected blocks, and means of all blocks."""
XLSTM_HEADS = 4


class MinGRU(Backbone):
    """minGRU with residual connections (Feng et al., 2024, arXiv 2410.01201); package minGRU-pytorch."""

    def __init__(self, sizes: Sizes):
        package, n = load("minGRU_pytorch"), sizes.hidden_size
        blocks = [nn.ModuleList([nn.RMSNorm(n), package.minGRU(n)]) for _ in range(sizes.num_layers)]
        super().__init__(sizes, nn.ModuleList(blocks), nn.RMSNorm(n))

    def whole(self, x: Tensor) -> Tensor:
        return self.stream(x, None)[0]

    def stream(self, x: Tensor, parts: Parts | None) -> tuple[Tensor, Parts]:
        ends: list[Tensor] = []
        blocks: Any = self.blocks
        for number, (norm, layer) in enumerate(blocks):
            before = None if parts is None else parts[number]
            y, end = layer(norm(x), before, return_next_prev_hidden=True)
            x = x + y
            ends.append(end)
        return x, tuple(ends)


class Mamba(Backbone):
    """Mamba (Gu and Dao, 2023, arXiv 2312.00752); package mambapy."""

    def __init__(self, sizes: Sizes):
        package = load("mambapy.mamba")
        self._config = package.MambaConfig(d_model=sizes.hidden_size, n_layers=sizes.num_layers)
        super().__init__(sizes, package.Mamba(self._config), nn.RMSNorm(sizes.hidden_size))

    def whole(self, x: Tensor) -> Tensor:
        return self.blocks(x)

    def stream(self, x: Tensor, parts: Parts | None) -> tuple[Tensor, Parts]:
        config, blocks = self._config, self.blocks
        if parts is None:
            zeros = [(config.d_inner, config.d_state), (config.d_inner, config.d_conv - 1)] * config.n_layers
            parts = tuple(x.new_zeros(len(x), *shape) for shape in zeros)

        def step(one: Tensor, carried: Parts) -> tuple[Tensor, Parts]:
            caches: Any = list(zip(carried[::2], carried[1::2], strict=True))
            y, caches = blocks.step(one.squeeze(1), caches)  # pyright: ignore[reportCallIssue]
            return y.unsqueeze(1), tuple(part for cache in caches for part in cache)

        return step_by_step(x, step, parts)


class XLSTM(Backbone):
    """xLSTM, mLSTM and sLSTM blocks in turn (Beck et al., 2024, arXiv 2405.04517); package xlstm.

    A sequence that is longer than in training is read step by step, since the parallel form of the mLSTM has a matrix
    of all pairs of steps.
    """

    def __init__(self, sizes: Sizes):
        package = load("xlstm")
        rounded = {"round_proj_up_to_multiple_of": 2 * XLSTM_HEADS}
        matrix = package.mLSTMLayerConfig(num_heads=XLSTM_HEADS, **rounded)
        scalar = package.sLSTMLayerConfig(num_heads=XLSTM_HEADS, backend="vanilla")
        config = package.xLSTMBlockStackConfig(
            mlstm_block=package.mLSTMBlockConfig(mlstm=matrix),
            slstm_block=package.sLSTMBlockConfig(
                slstm=scalar, feedforward=package.FeedForwardConfig(proj_factor=1.3, **rounded)
            ),
            context_length=sizes.steps,
            num_blocks=sizes.num_layers,
            embedding_dim=sizes.hidden_size,
            slstm_at=list(range(1, sizes.num_layers, 2)),
        )
        stack = package.xLSTMBlockStack(config)
        for number in config.slstm_at:
            stack.blocks[number].xlstm.slstm_cell.pointwise = slstm_step
        super().__init__(sizes, stack)
        self._longest = sizes.steps

    def whole(self, x: Tensor) -> Tensor:
        return self.blocks(x) if x.shape[1] <= self._longest else self.stream(x, None)[0]

    def stream(self, x: Tensor, parts: Parts | None) -> tuple[Tensor, Parts]:
        blocks: Any = self.blocks
        outputs, carried = step_by_step(x, lambda one, carried: blocks.step(one, state=carried), self._nested(parts))
        return outputs, tuple(part for block in carried.values() for part in _flat(block))

    def _nested(self, parts: Parts | None) -> dict[str, Any] | None:
        """The parts as the package has them."""
        if parts is None:
            return None
        rest, found = iter(parts), dict[str, Any]()
        blocks: Any = self.blocks.blocks
        for number, block in enumerate(blocks):
            if hasattr(block.xlstm, "mlstm_cell"):
                matrix = next(rest), next(rest), next(rest)
                found[f"block_{number}"] = {"mlstm_state": matrix, "conv_state": (next(rest),)}
            else:
                conv, scalar = next(rest), next(rest)
                found[f"block_{number}"] = {"conv_state": (conv,), "slstm_state": scalar.transpose(0, 1).contiguous()}
        return found


def slstm_step(
    x_gates: Tensor, h_gates: Tensor, bias: Tensor, states: Tensor, constants: dict[str, float]
) -> tuple[Tensor, Tensor]:
    """A step of an sLSTM: the states h, c, n, m [4, B, H] after it, and its gates [4, B, H].

    The package's own step asks the device at each step whether n is still 0 everywhere. This one never waits for an
    answer, so that a training step can be a CUDA graph.
    """
    _, c, n, m = states.unbind(0)
    into, forget, candidate, out = (x_gates + h_gates + bias).unflatten(1, (4, -1)).unbind(1)
    kept = m + F.logsigmoid(forget)
    largest = torch.where((n == 0).all(), into, torch.maximum(into, kept))
    input_gate, forget_gate = ((gate - largest).exp().clamp(max=1.0) for gate in (into, kept))
    output_gate = torch.sigmoid(out)
    c = forget_gate * c + input_gate * torch.tanh(candidate)
    n = forget_gate * n + input_gate
    return torch.stack((output_gate * c / n, c, n, largest)), torch.stack(
        (input_gate, forget_gate, candidate, output_gate)
    )


def _flat(block: dict[str, Any]) -> list[Tensor]:
    """The parts of a block of xLSTM, each with the batch first."""
    if "mlstm_state" in block:
        return [*block["mlstm_state"], *block["conv_state"]]
    return [*block["conv_state"], block["slstm_state"].transpose(0, 1)]


class Transformer(Backbone):
    """A Transformer decoder with rotary positions (Su et al., 2021, arXiv 2104.09864); package x-transformers."""

    def __init__(self, sizes: Sizes):
        package = load("x_transformers.x_transformers")
        self._types = package.LayerIntermediates, package.Intermediates
        decoder = package.Decoder(
            dim=sizes.hidden_size,
            depth=sizes.num_layers,
            heads=max(ceil(sizes.hidden_size / HEAD), 2),  # a single head would have no output projection
            attn_dim_head=HEAD,
            rotary_pos_emb=True,
            rotary_emb_dim=HEAD,
            attn_flash=True,
            use_rmsnorm=True,
        )
        super().__init__(sizes, decoder)

    def whole(self, x: Tensor) -> Tensor:
        return self.blocks(x)

    def stream(self, x: Tensor, parts: Parts | None) -> tuple[Tensor, Parts]:
        cache = None
        if parts is not None:
            pairs = zip(parts[::2], parts[1::2], strict=True)
            every, one = self._types
            cache = every(attn_intermediates=[one(cached_kv=pair) for pair in pairs], cache_length=parts[0].shape[-2])
        y, after = self.blocks(x, cache=cache, cache_age=x.shape[1], return_hiddens=True)
        return y, tuple(part for layer in after.attn_intermediates for part in layer.cached_kv)


class SparseTransformer(Backbone):
    """A Transformer with native sparse attention (Yuan et al., 2025, arXiv 2502.11089) and rotary positions.

    Package native-sparse-attention-pytorch. It cannot stream here: it reads a context as a whole.
    """

    def __init__(self, sizes: Sizes):
        package, n = load("native_sparse_attention_pytorch.transformer"), sizes.hidden_size
        options: dict[str, Any] = {"dim_head": SPARSE_HEAD, "heads": ceil(n / SPARSE_HEAD), "use_triton_kernel": False}
        attention = [package.SparseAttention(dim=n, causal=True, **options, **SPARSE) for _ in range(sizes.num_layers)]
        blocks = [nn.ModuleList([one, package.FeedForward(n)]) for one in attention]
        super().__init__(sizes, nn.ModuleList(blocks), nn.RMSNorm(n))

    def whole(self, x: Tensor) -> Tensor:
        blocks: Any = self.blocks
        for attention, feed_forward in blocks:
            x = x + attention(x)
            x = x + feed_forward(x)
        return x

    def stream(self, x: Tensor, parts: Parts | None) -> tuple[Tensor, Parts]:
        raise UserValueError("method must be one that can read a stream; 'sparse_transformer' cannot.", "method")
