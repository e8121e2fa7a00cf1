"""An EAGLE-3 head written anew in torch from its description: the oracle of the Flax one.

No cache: each draft step runs the whole sequence again. Weights are a dictionary in the naming of the `speculators`
format; flags are passed by their names there.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

Weights = dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class TorchHead:
    weights: Weights
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    eps: float = 1e-6
    num_layers: int = 1
    qk_norm: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    def features(self, aux: list[Tensor]) -> Tensor:
        if self.fc_norm:
            aux = [self._norm(x, f"fc_norm.{i}") for i, x in enumerate(aux)]
        fused = torch.cat(aux, dim=-1)
        if self.norm_before_fc:
            fused = self._norm(fused, "input_norm")
        return fused @ self.weights["fc.weight"].T

    def draft(self, aux: list[Tensor], tokens: Tensor, embedding: Tensor, steps: int) -> list[tuple[Tensor, Tensor]]:
        """Logits and fed-back states of the last position, for each of `steps` greedy draft steps.

        `tokens` [B,T] are one ahead of `aux` [B,T,Dt]. The draft vocabulary is mapped by `d2t` as an offset.
        """
        hidden, results = self.features(aux), []
        for _ in range(steps):
            out = self._layers(embedding[tokens], hidden)
            normed = self._norm(out, "norm")
            logits = normed[:, -1] @ self.weights["lm_head.weight"].T
            fed = (normed if self.norm_output else out)[:, -1:]
            guess = logits.argmax(dim=-1)
            tokens = torch.cat([tokens, (guess + self.weights["d2t"][guess])[:, None]], dim=1)
            hidden = torch.cat([hidden, fed], dim=1)
            results.append((logits, fed))
        return results

    def _layers(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        for i in range(self.num_layers):
            name = f"layers.{i}."
            if i == 0:
                normed = self._norm(hidden, name + "hidden_norm")
                x = torch.cat([self._norm(embeds, name + "input_layernorm"), normed], dim=-1)
                residual = normed if self.norm_before_residual else hidden
            else:
                x, residual = self._norm(hidden, name + "input_layernorm"), hidden
            hidden = residual + self._attention(x, name + "self_attn.")
            hidden = hidden + self._mlp(self._norm(hidden, name + "post_attention_layernorm"), name + "mlp.")
        return hidden

    def _attention(self, x: Tensor, name: str) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            self._linear(x, f"{name}{part}_proj").view(batch, length, -1, self.head_dim).transpose(1, 2)
            for part in "qkv"
        )
        if self.qk_norm:
            q, k = self._norm(q, name + "q_norm"), self._norm(k, name + "k_norm")
        repeat = self.num_heads // self.num_kv_heads
        q, k, v = self._rope(q), self._rope(k).repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
        scores = (q @ k.mT) * self.head_dim**-0.5
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
        out = (scores.softmax(dim=-1) @ v).transpose(1, 2).reshape(batch, length, -1)
        return self._linear(out, name + "o_proj")

    def _rope(self, x: Tensor) -> Tensor:
        """x [B,heads,T,H]: position t turns the pair (i, i + H/2) by t / theta^(2i/H)."""
        half = self.head_dim // 2
        turns = self.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = (torch.arange(x.shape[2])[:, None] * turns).float()
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)

    def _mlp(self, x: Tensor, name: str) -> Tensor:
        gate = torch.nn.functional.silu(self._linear(x, name + "gate_proj"))
        return self._linear(gate * self._linear(x, name + "up_proj"), name + "down_proj")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        y = x @ self.weights[name + ".weight"].T
        return y + self.weights[name + ".bias"] if name + ".bias" in self.weights else y

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + self.eps) * self.weights[name + ".weight"]
