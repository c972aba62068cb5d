"""Transformer stacks as models have them: separate q, k, v and gate, up, in plain PyTorch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional


class Sizes(NamedTuple):
    """A stack and what one step of it sees."""

    block: type[Block]
    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int  # of the MLP
    vocabulary: int
    head: bool  # an LM head and cross entropy; else the mean square of what the blocks give
    batch: int
    length: int

    def small(self) -> Sizes:
        """For a smoke run."""
        kv = 2 if self.kv_heads < self.heads else 4
        small = self._replace(layers=1, width=64, heads=4, kv_heads=kv, hidden=96)
        return small._replace(vocabulary=128, batch=1, length=16)


class Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads, self.kv_heads = sizes.heads, sizes.kv_heads

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal, of q [B,T,H x D], k and v [B,T,KV x D]."""
        q = q.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (t.unflatten(-1, (self.kv_heads, -1)).transpose(1, 2) for t in (k, v))
        grouped = self.kv_heads != self.heads
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return y.transpose(1, 2).flatten(-2)


class LlamaBlock(Block):
    """RMSNorm, grouped attention, SwiGLU; no biases, and no rotary embedding."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        width, hidden = sizes.width, sizes.hidden
        kv = width // sizes.heads * sizes.kv_heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.o = nn.Linear(width, width, False), nn.Linear(width, width, False)
        self.k, self.v = nn.Linear(width, kv, False), nn.Linear(width, kv, False)
        self.gate, self.up = nn.Linear(width, hidden, False), nn.Linear(width, hidden, False)
        self.down = nn.Linear(hidden, width, False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        x = x + self.o(self.attention(self.q(h), self.k(h), self.v(h)))
        h = self.norm2(x)
        return x + self.down(functional.silu(self.gate(h)) * self.up(h))


class GPTBlock(Block):
    """LayerNorm, q, k and v in one linear, GELU; with biases."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        width, hidden = sizes.width, sizes.hidden
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.o = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.o(self.attention(*self.qkv(self.norm1(x)).chunk(3, -1)))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Stack(nn.Module):
    """forward(tokens [B,T], targets [B,T]) -> loss."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.blocks = nn.ModuleList(sizes.block(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, False) if sizes.head else None

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if self.head is None:
            return x.float().square().mean()
        return functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


# Widths of known models, as many layers as fit beside each other; the last one's vocabulary is
# small where its head would outweigh the few layers.
STACKS = {
    "gpt2-124M": Sizes(GPTBlock, 12, 768, 12, 12, 3072, 50304, True, 16, 1024),
    "llama-1B": Sizes(LlamaBlock, 8, 2048, 32, 8, 8192, 1024, False, 4, 2048),
    "llama-8B": Sizes(LlamaBlock, 4, 4096, 32, 8, 14336, 1024, False, 4, 2048),
    "llama-70B": Sizes(LlamaBlock, 1, 8192, 64, 8, 28672, 1024, False, 4, 2048),
}


def build(sizes: Sizes, device: torch.device) -> Stack:
    """The same parameters each time, in bf16."""
    torch.manual_seed(0)
    with device:
        return Stack(sizes).to(torch.bfloat16)
