"""A layer of the model in torch: what bench/layers.py holds a device to, where NumPy would take too long.

Written after reference.py, in bfloat16 or float32. Only matrices that are met are dequantised, an expert at a
time, so that a layer of the 35B needs little memory.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lily import reference

GROUP = reference.GROUP
Array = NDArray[Any]


class Torch:
    """A checkpoint's layers, evaluated by torch from an empty past.

    name: str, what it is and computes in.
    """

    def __init__(self, directory: Path, dtype: str, device: str) -> None:
        """Map a checkpoint. dtype: "bfloat16" or "float32". device: torch's.

        Raises ImportError without torch.
        """
        import torch

        torch.backends.cuda.matmul.allow_tf32 = False
        self._torch: Any = torch
        self._dtype = getattr(torch, dtype)
        self._device = device
        self._config = reference.read_config(directory)
        self._tensors = reference.read_tensors(directory)
        self.name = f"torch {torch.__version__} {dtype} on {device}"

    def layer(self, index: int, x: Array) -> tuple[Array, Array]:
        """Run a layer on x (T, D). Returns x (T, D) float32 and the experts (T, K) of each row."""
        t, prefix = self._torch, f"model.layers.{index}."
        with t.no_grad():
            rows = t.tensor(x, device=self._device).to(self._dtype)
            mix = self._attention if self._config.attention[index] else self._delta
            mixed = rows + mix(prefix, self._norm(rows, prefix + "input_layernorm.weight"))
            h = self._norm(mixed, prefix + "post_attention_layernorm.weight")
            y, expert = self._mixture(prefix + "mlp.", h)
            out = (mixed + y).float().cpu().tolist()
        return np.asarray(out, np.float32), np.asarray(expert.cpu().tolist(), np.int32)

    # Weights

    def _stored(self, name: str, index: Any = ...) -> Any:
        stored = np.array(self._tensors[name][index])  # a copy, since no tensor of a file is aligned
        if stored.dtype == np.uint16:
            return self._torch.tensor(reference.widen(stored, np.float32), device=self._device)
        kind = np.int32 if stored.dtype == np.uint32 else np.float32
        return self._torch.tensor(
            stored.view(np.int32) if kind is np.int32 else stored.astype(kind), device=self._device
        )

    def _matrix(self, path: str, index: Any = ...) -> Any:
        words = self._stored(path + ".weight", index)
        if words.dtype != self._torch.int32:
            return words.to(self._dtype)
        scales, biases = (self._stored(f"{path}.{part}", index) for part in ("scales", "biases"))
        bits = words.shape[-1] * 32 // (scales.shape[-1] * GROUP)
        shifts = self._torch.arange(0, 32, bits, device=self._device, dtype=self._torch.int32)
        q = ((words[..., None] >> shifts) & (2**bits - 1)).reshape(*scales.shape, GROUP)
        return (q * scales[..., None] + biases[..., None]).flatten(-2).to(self._dtype)

    def _linear(self, path: str, x: Any, index: Any = ...) -> Any:
        return x @ self._matrix(path, index).T

    def _norm(self, x: Any, name: str, epsilon: float | None = None) -> Any:
        wide = x.float()
        epsilon = self._config.norm_epsilon if epsilon is None else epsilon
        y = wide * self._torch.rsqrt((wide * wide).mean(-1, keepdim=True) + epsilon)
        return (y * self._stored(name) if name else y).to(self._dtype)

    # Steps

    def _delta(self, prefix: str, h: Any) -> Any:
        t, c, path = self._torch, self._config, prefix + "linear_attn."
        T, keys, share = len(h), c.key_heads * c.key_dim, c.value_heads // c.key_heads
        qkv, z, b, a = (self._linear(f"{path}in_proj_{name}", h) for name in ("qkv", "z", "b", "a"))
        taps = self._stored(path + "conv1d.weight").reshape(c.channels, c.conv_taps)
        window = t.cat([t.zeros_like(qkv[: c.conv_taps - 1]), qkv]).float()
        if len(window) < T + c.conv_taps - 1:  # fewer rows than taps
            lead = T + c.conv_taps - 1 - len(window)
            window = t.cat([t.zeros(lead, c.channels, device=self._device), window])
        mixed = sum(window[j : j + T] * taps[:, j] for j in range(c.conv_taps))
        mixed = t.nn.functional.silu(mixed).to(self._dtype)
        q = mixed[:, :keys].reshape(T, c.key_heads, c.key_dim)
        k = mixed[:, keys : 2 * keys].reshape(T, c.key_heads, c.key_dim)
        v = mixed[:, 2 * keys :].reshape(T, c.value_heads, c.value_dim).float()
        unit = [self._norm(part, "", 1e-6 / c.key_dim).float() * c.key_dim**-0.5 for part in (q, k)]
        q, k = (part.repeat_interleave(share, 1) for part in (unit[0] * c.key_dim**-0.5, unit[1]))
        beta = t.sigmoid(b.float())
        step = t.nn.functional.softplus(a.float() + self._stored(path + "dt_bias"), threshold=80)
        decay = t.exp(-t.exp(self._stored(path + "A_log")) * step)
        S, parts = t.zeros(c.value_heads, c.value_dim, c.key_dim, device=self._device), []
        for i in range(T):
            S = decay[i, :, None, None] * S
            error = v[i] - (S @ k[i, :, :, None])[..., 0]
            S = S + (beta[i, :, None] * error)[:, :, None] * k[i, :, None, :]
            parts.append((S @ q[i, :, :, None])[..., 0])
        y = self._norm(t.stack(parts).to(self._dtype), path + "norm.weight")
        gate = z.reshape(T, c.value_heads, c.value_dim).float()
        y = (t.nn.functional.silu(gate) * y.float()).to(self._dtype)
        return self._linear(path + "out_proj", y.reshape(T, -1))

    def _attention(self, prefix: str, h: Any) -> Any:
        t, c, path = self._torch, self._config, prefix + "self_attn."
        T, share = len(h), c.heads // c.kv_heads
        qg, k, v = (self._linear(f"{path}{name}_proj", h) for name in ("q", "k", "v"))
        qg = qg.reshape(T, c.heads, 2, c.head_dim)
        k, v = (part.reshape(T, c.kv_heads, c.head_dim) for part in (k, v))
        q = self._rope(self._norm(qg[:, :, 0], path + "q_norm.weight"))
        k = self._rope(self._norm(k, path + "k_norm.weight"))
        k, v = (part.repeat_interleave(share, 1) for part in (k, v))
        scores = t.einsum("qhd,shd->hqs", q, k).float() * c.head_dim**-0.5
        later = t.ones(T, T, dtype=t.bool, device=self._device).triu(1)
        weights = scores.masked_fill(later, -t.inf).softmax(-1).to(self._dtype)
        y = t.einsum("hqs,shd->qhd", weights, v) * t.sigmoid(qg[:, :, 1])
        return self._linear(path + "o_proj", y.reshape(T, -1))

    def _rope(self, x: Any) -> Any:
        t, c = self._torch, self._config
        half = c.rotary_dim // 2
        rates = c.rope_theta ** (-2.0 * t.arange(half, dtype=t.float64) / c.rotary_dim)
        angle = (t.arange(len(x), dtype=t.float64)[:, None] * rates)[:, None].to(self._device)
        cos, sin, wide = angle.cos().float(), angle.sin().float(), x.float()
        a, b = wide[..., :half], wide[..., half : c.rotary_dim]
        turned = t.cat([a * cos - b * sin, a * sin + b * cos, wide[..., c.rotary_dim :]], -1)
        return turned.to(self._dtype)

    def _swiglu(self, path: str, h: Any, index: Any = ...) -> Any:
        gate, up = (self._linear(f"{path}{name}_proj", h, index) for name in ("gate", "up"))
        return self._torch.nn.functional.silu(gate) * up

    def _mixture(self, path: str, h: Any) -> tuple[Any, Any]:
        t, c = self._torch, self._config
        probability = self._linear(path + "gate", h).float().softmax(-1)
        weight, expert = probability.sort(dim=-1, descending=True, stable=True)
        weight, expert = weight[:, : c.experts_per_token], expert[:, : c.experts_per_token]
        weight = weight / weight.sum(-1, keepdim=True)
        y = t.zeros(h.shape, device=self._device)
        for e in expert.unique().tolist():
            rows, places = (expert == e).nonzero(as_tuple=True)
            part = self._linear(
                path + "switch_mlp.down_proj", self._swiglu(path + "switch_mlp.", h[rows], e), e
            )
            y.index_add_(0, rows, part.float() * weight[rows, places, None])
        shared = self._linear(path + "shared_expert.down_proj", self._swiglu(path + "shared_expert.", h))
        gate = t.sigmoid(self._linear(path + "shared_expert_gate", h).float())
        return (y + gate * shared.float()).to(self._dtype), expert
