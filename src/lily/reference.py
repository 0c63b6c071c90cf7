"""The model in NumPy: what every operation of Qwen3.6-35B-A3B computes, written to be read.

Truth for the backends. One function an op, named as in csrc/ops.h; what flows between the ops has the
names and shapes of LILY_ACTIVATIONS there. It imports NumPy and nothing of Lily's.

Letters, as in csrc/config.h:  T tokens of a pass, D residual width, V vocabulary;  attention: H query heads,
G key/value heads, Dh head width, R rotated width;  Gated DeltaNet: Hk key heads, Hv value heads, Dk and Dv
their widths, C convolution taps, channels = 2 Hk Dk + Hv Dv;  mixture: E experts, K chosen for a token,
F width of an expert, Fs of the shared one.

A layer's state is what its tokens leave behind for later ones. Attention: keys and values, each (G, T, Dh).
Gated DeltaNet: conv (C - 1, channels), oldest first, and S (Hv, Dv, Dk). Ops return new states and never
write into the ones given.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[Any]
State = tuple[Array, Array]

# ---- numbers


def exact(x: Array) -> Array:
    """Return x: the rounding of a computation that does not round."""
    return x


def to_bf16(x: Array) -> Array:
    """Round to the nearest bfloat16, ties to even. Any shape; the type of x is kept."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32).astype(x.dtype).reshape(x.shape)


def to_int8(x: Array) -> Array:
    """Round rows, the last axis, to multiples of the float32 nearest to their largest magnitude over 127."""
    scale = (np.abs(x).max(-1, keepdims=True).astype(np.float32) / np.float32(127)).astype(x.dtype)
    return np.asarray(np.rint(x / np.where(scale > 0, scale, 1)) * scale)


@dataclass(frozen=True)
class Numerics:
    """How numbers are kept: the type of all arithmetic, and what its results are rounded to.

    `round` is applied to the result of every step that a bfloat16 pipeline would store; `round_kv` to keys
    and values as they enter the state.
    """

    dtype: type[np.floating[Any]] = np.float64
    round: Callable[[Array], Array] = exact
    round_kv: Callable[[Array], Array] = exact

    @staticmethod
    def of(dtype: str, kv: str) -> "Numerics":
        """Choose by name. See Model for the names; raises ValueError for others."""
        kinds = {
            "f64": Numerics(np.float64),
            "f32": Numerics(np.float32),
            "bf16": Numerics(np.float32, to_bf16),
        }
        roundings = {"f32": exact, "bf16": to_bf16, "int8": to_int8}
        if dtype not in kinds:
            raise ValueError(f"dtype: expected one of {', '.join(kinds)}, got {dtype!r}")
        if kv not in roundings:
            raise ValueError(f"kv: expected one of {', '.join(roundings)}, got {kv!r}")
        return replace(kinds[dtype], round_kv=roundings[kv])


def sigmoid(x: Array) -> Array:
    """Return 1 / (1 + exp(-x)), accurate in both tails. Any shape."""
    small = np.exp(-np.abs(x))
    return np.asarray(np.where(x >= 0, 1, small) / (1 + small))


def silu(n: Numerics, x: Array) -> Array:
    """Return x sigmoid(x). Any shape. Source: Elfwing et al., "Sigmoid-weighted linear units", 2017."""
    return n.round(x * n.round(sigmoid(x)))


def swiglu(n: Numerics, gate: Array, up: Array) -> Array:
    """Return silu(gate) up, of equal shapes. Source: Shazeer, "GLU variants improve transformer", 2020."""
    return n.round(silu(n, gate) * up)


def softmax(x: Array) -> Array:
    """Return exp(x) / sum(exp(x)) over the last axis."""
    e: Array = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(e / e.sum(-1, keepdims=True))


def rms_norm(n: Numerics, x: Array, weight: Array | None, epsilon: float) -> Array:
    """Divide x (..., width) by its root mean square over the last axis, then scale by weight (width).

    The stored weights already hold the 1 that Qwen adds to them.
    Source: Zhang and Sennrich, "Root mean square layer normalization", 2019.
    """
    y = n.round(x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + n.dtype(epsilon)))
    return y if weight is None else n.round(y * weight)


def unit(n: Numerics, x: Array, scale: float) -> Array:
    """Return scale x / sqrt(sum(x^2) + 1e-6) over the last axis, by way of the root mean square."""
    width = x.shape[-1]
    length = n.round(np.asarray(scale * width**-0.5, n.dtype))
    return n.round(length * rms_norm(n, x, None, 1e-6 / width))


def rope(n: Numerics, x: Array, position: int, rotary_dim: int, theta: float) -> Array:
    """Rotate the first R of Dh dimensions of x (T, heads, Dh), whose first row is the token at `position`.

    Dimension i is paired with i + R / 2 and turned by position theta^(-2 i / R); the other Dh - R pass.
    Source: Su et al., "RoFormer", 2021, in the half-split layout.
    """
    half = rotary_dim // 2
    positions = np.arange(position, position + len(x), dtype=np.float64)
    angle = positions[:, None] * theta ** (-2.0 * np.arange(half) / rotary_dim)  # (T, R / 2)
    cos, sin = np.cos(angle)[:, None].astype(n.dtype), np.sin(angle)[:, None].astype(n.dtype)
    a, b = x[..., :half], x[..., half:rotary_dim]
    turned = [n.round(a * cos - b * sin), n.round(a * sin + b * cos)]
    return np.concatenate([*turned, x[..., rotary_dim:]], axis=-1)


# ---- the checkpoint


@dataclass(frozen=True)
class Config:
    """The model's dimensions; a key that config.json lacks has the value of the published 35B."""

    layers: int = 40
    hidden: int = 2048
    vocab: int = 248320
    norm_epsilon: float = 1e-6
    heads: int = 16
    kv_heads: int = 2
    head_dim: int = 256
    rotary_dim: int = 64
    rope_theta: float = 1e7
    key_heads: int = 16
    value_heads: int = 32
    key_dim: int = 128
    value_dim: int = 128
    conv_taps: int = 4
    experts: int = 256
    experts_per_token: int = 8
    attention: tuple[bool, ...] = ()  # (layers): true for full attention, false for Gated DeltaNet

    @property
    def channels(self) -> int:
        """Number of channels that are convolved: those of q, k and v together."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


CONFIG_KEYS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "vocab": "vocab_size",
    "norm_epsilon": "rms_norm_eps",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "conv_taps": "linear_conv_kernel_dim",
    "experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
}


def read_config(directory: Path) -> Config:
    """Read the dimensions of the text model from DIRECTORY/config.json."""
    whole = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    text = whole.get("text_config", whole)
    config = Config(**{name: text[key] for name, key in CONFIG_KEYS.items() if key in text})
    rope_values = {
        "partial_rotary_factor": 0.25,
        "rope_theta": 1e7,
        **text,
        **text.get("rope_parameters", {}),
    }
    interval = text.get("full_attention_interval", 4)
    every = [
        "full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(config.layers)
    ]
    return replace(
        config,
        rotary_dim=int(config.head_dim * rope_values["partial_rotary_factor"]),
        rope_theta=float(rope_values["rope_theta"]),
        attention=tuple(kind == "full_attention" for kind in text.get("layer_types", every)),
    )


STORED = {"U32": np.uint32, "BF16": np.uint16, "F16": np.float16, "F32": np.float32}
GROUP = 64  # consecutive inputs that share a scale and a bias


def read_tensors(directory: Path) -> dict[str, Array]:
    """Map every text tensor of DIRECTORY/model*.safetensors, by its name without `language_model.`.

    An array is a view of the file in its stored type; bfloat16 appears as uint16. Vision and
    multi-token-prediction tensors are left out. Raises FileNotFoundError when there is no such file.
    """
    files = sorted(directory.glob("model*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{directory}: no model*.safetensors")
    tensors: dict[str, Array] = {}
    for file in files:
        raw = np.memmap(file, np.uint8, mode="r")
        start = 8 + int.from_bytes(raw[:8].tobytes(), "little")
        for name, entry in json.loads(raw[8:start].tobytes()).items():
            if name == "__metadata__" or name.startswith(("vision_tower", "model.visual")) or "mtp." in name:
                continue
            begin, end = entry["data_offsets"]
            view = raw[start + begin : start + end].view(STORED[entry["dtype"]])
            tensors[name.removeprefix("language_model.")] = view.reshape(entry["shape"])
    return tensors


def widen(stored: Array, dtype: type[np.floating[Any]]) -> Array:
    """Convert an array as stored, any shape, to dtype. Exact for dtype float32 and float64."""
    if stored.dtype == np.uint16:
        stored = (stored.astype(np.uint32) << 16).view(np.float32)
    return np.asarray(stored, dtype)


def dequantise(words: Array, scales: Array, biases: Array) -> Array:
    """Return scale q + bias: MLX's affine quantisation, groups of 64 along the last axis.

    words: (..., columns bits / 32) uint32; element j of a row is `bits` wide and starts at bit j bits,
    lowest first.  scales, biases: (..., columns / 64).
    Returns (..., columns) in the type of scales. Raises ValueError for other widths than 4 and 8 bits.
    """
    columns = scales.shape[-1] * GROUP
    bits, rest = divmod(words.shape[-1] * 32, columns)
    if bits not in (4, 8) or rest:
        raise ValueError(
            f"expected 4 or 8 bits in groups of 64, got {words.shape} words for {scales.shape} scales"
        )
    q = (words[..., None] >> np.arange(0, 32, bits, dtype=np.uint32)) & np.uint32(2**bits - 1)
    q = q.reshape(*scales.shape, GROUP).astype(scales.dtype)
    return (q * scales[..., None] + biases[..., None]).reshape(*scales.shape[:-1], columns)


@dataclass(frozen=True)
class Weights:
    """A checkpoint's tensors, or those of one layer: `prefix` stands before every name asked for.

    Dequantised matrices are kept until they fill `keep_bytes`. Later ones are made anew at each use, which
    serves passes that go through all of them in the same order better than dropping the oldest would.
    """

    config: Config
    numerics: Numerics
    tensors: dict[str, Array]
    keep_bytes: int
    kept: dict[str, Array] = field(default_factory=dict)
    prefix: str = ""

    def layer(self, index: int) -> "Weights":
        """Return the weights of a layer."""
        return replace(self, prefix=f"model.layers.{index}.")

    def vector(self, name: str) -> Array:
        """Return a small tensor that is never quantised, widened."""
        return widen(self.tensors[self.prefix + name], self.numerics.dtype)

    def rows(self, name: str, index: Any) -> Array:
        """Dequantise matrix[index] of a matrix (rows, columns) or of stacked ones (E, rows, columns)."""
        path, dtype = self.prefix + name, self.numerics.dtype
        stored = self.tensors[path + ".weight"][index]
        if stored.dtype != np.uint32:
            return widen(stored, dtype)
        scales, biases = (
            widen(self.tensors[f"{path}.{part}"][index], dtype) for part in ("scales", "biases")
        )
        return dequantise(stored, scales, biases)

    def linear(self, name: str, x: Array, index: int | slice = slice(None)) -> Array:
        """Return x W^T, (..., rows), for x (..., columns) and W = matrix[index]."""
        key = f"{self.prefix}{name}[{index}]"
        matrix = self.kept.get(key)
        if matrix is None:
            matrix = self.rows(name, index)
            if matrix.nbytes + sum(other.nbytes for other in self.kept.values()) <= self.keep_bytes:
                self.kept[key] = matrix
        return self.numerics.round(x @ matrix.T)


# ---- the ops


def embed(weights: Weights, tokens: Array) -> Array:
    """Look up the embedding of each token, unscaled.

    tokens: (T) int.  Returns x (T, D).
    """
    return weights.numerics.round(weights.rows("model.embed_tokens", tokens))


def gdn_in(layer: Weights, x: Array) -> tuple[Array, Array, Array, Array]:
    """Normalise the residual and project it for Gated DeltaNet.

    x: (T, D).
    Returns qkv (T, channels): q, k, v before the convolution; z (T, Hv Dv): the output gate;
    b (T, Hv): before the sigmoid that makes beta; a (T, Hv): before the softplus of the decay.
    """
    h = rms_norm(layer.numerics, x, layer.vector("input_layernorm.weight"), layer.config.norm_epsilon)
    qkv, z, b, a = (layer.linear(f"linear_attn.in_proj_{name}", h) for name in ("qkv", "z", "b", "a"))
    return qkv, z, b, a


def gdn_mix(layer: Weights, qkv: Array, b: Array, a: Array, state: State) -> tuple[Array, State]:
    """Convolve q, k and v over time, then apply the gated delta rule.

    qkv: (T, channels).  b, a: (T, Hv).  state: conv (C - 1, channels), S (Hv, Dv, Dk).
    Returns y (T, Hv Dv) and the new state. Value head j uses key head j / (Hv / Hk).
    beta = sigmoid(b): the part of its error that a head corrects.  decay = exp(-exp(A_log) softplus(a +
    dt_bias)): the part of S that a token leaves, computed in full precision.
    Source: Yang, Kautz and Hatamizadeh, "Gated Delta Networks", 2024; decay: Gu and Dao, "Mamba", 2023.
    """
    c, n = layer.config, layer.numerics
    conv, S = state
    T, keys = len(qkv), c.key_heads * c.key_dim

    taps = layer.vector("linear_attn.conv1d.weight").reshape(c.channels, c.conv_taps)
    window = np.concatenate([conv, qkv])  # the last tap multiplies the current token
    shifted = (window[j : j + T] * taps[:, j] for j in range(c.conv_taps))
    mixed = silu(n, n.round(np.asarray(sum(shifted))))
    q = unit(n, mixed[:, :keys].reshape(T, c.key_heads, c.key_dim), c.key_dim**-0.5)
    k = unit(n, mixed[:, keys : 2 * keys].reshape(T, c.key_heads, c.key_dim), 1.0)
    v = mixed[:, 2 * keys :].reshape(T, c.value_heads, c.value_dim)

    beta = n.round(sigmoid(b))
    step = n.round(np.logaddexp(n.round(a + layer.vector("linear_attn.dt_bias")), 0))
    decay = np.exp(-np.exp(layer.vector("linear_attn.A_log")) * step)
    share = c.value_heads // c.key_heads
    y, S = delta_rule(np.repeat(q, share, axis=1), np.repeat(k, share, axis=1), v, decay, beta, S)
    return n.round(y).reshape(T, -1), (window[T:], S)


def delta_rule(q: Array, k: Array, v: Array, decay: Array, beta: Array, S: Array) -> tuple[Array, Array]:
    """Forget, read what is stored under k, correct it towards v, then answer q; token after token.

    q, k: (T, Hv, Dk).  v: (T, Hv, Dv).  decay, beta: (T, Hv).  S: (Hv, Dv, Dk).
    Returns y (T, Hv, Dv) and the new S.
    """
    y = np.empty_like(v)
    for t in range(len(v)):
        S = decay[t, :, None, None] * S
        error = v[t] - (S @ k[t, :, :, None])[..., 0]
        S += (beta[t, :, None] * error)[:, :, None] * k[t, :, None, :]
        y[t] = (S @ q[t, :, :, None])[..., 0]
    return y, S


def gdn_out(layer: Weights, x: Array, y: Array, z: Array) -> Array:
    """Normalise each head, gate it with silu(z), project, and add to the residual.

    x: (T, D).  y, z: (T, Hv Dv).  Returns x (T, D). All heads share one norm weight (Dv).
    """
    c, n = layer.config, layer.numerics
    y, z = (part.reshape(len(x), c.value_heads, c.value_dim) for part in (y, z))
    y = rms_norm(n, y, layer.vector("linear_attn.norm.weight"), c.norm_epsilon)
    y = n.round(z * sigmoid(z) * y).reshape(len(x), -1)
    return n.round(x + layer.linear("linear_attn.out_proj", y))


def attn_in(layer: Weights, x: Array) -> tuple[Array, Array, Array]:
    """Normalise the residual and project it for attention.

    x: (T, D).  Returns qg (T, H 2 Dh): per head Dh of query, then Dh of gate; k and v (T, G Dh).
    """
    h = rms_norm(layer.numerics, x, layer.vector("input_layernorm.weight"), layer.config.norm_epsilon)
    qg, k, v = (layer.linear(f"self_attn.{name}_proj", h) for name in ("q", "k", "v"))
    return qg, k, v


def attn_mix(layer: Weights, qg: Array, k: Array, v: Array, state: State) -> tuple[Array, State]:
    """Normalise and rotate q and k, append k and v to the state, attend, and gate the result.

    qg: (T, H 2 Dh).  k, v: (T, G Dh).  state: keys, values (G, S, Dh) of the S tokens before.
    Returns y (T, H Dh) and the new state, (G, S + T, Dh) each.
    Source: Ainslie et al., "GQA", 2023; the sigmoid gate: Qiu et al., "Gated attention", 2025.
    """
    c, n = layer.config, layer.numerics
    keys, values = state
    T, position = len(qg), keys.shape[1]
    qg = qg.reshape(T, c.heads, 2, c.head_dim)
    k, v = (part.reshape(T, c.kv_heads, c.head_dim) for part in (k, v))
    q = rms_norm(n, qg[:, :, 0], layer.vector("self_attn.q_norm.weight"), c.norm_epsilon)
    k = rms_norm(n, k, layer.vector("self_attn.k_norm.weight"), c.norm_epsilon)
    q, k = (rope(n, part, position, c.rotary_dim, c.rope_theta) for part in (q, k))
    keys = np.concatenate([keys, n.round_kv(k).transpose(1, 0, 2)], axis=1)
    values = np.concatenate([values, n.round_kv(v).transpose(1, 0, 2)], axis=1)
    y = n.round(causal_attention(q, keys, values))
    y = n.round(y * n.round(sigmoid(qg[:, :, 1])))
    return y.reshape(T, -1), (keys, values)


def causal_attention(q: Array, keys: Array, values: Array) -> Array:
    """Let each of the last T tokens attend to itself and to all before it.

    q: (T, H, Dh).  keys, values: (G, S, Dh), S >= T.  Returns (T, H, Dh).
    Query head h reads key/value head h / (H / G); scores are scaled by Dh^-1/2.
    """
    T, heads, head_dim = q.shape
    groups, length, _ = keys.shape
    later = np.triu(np.ones((T, length), bool), k=length - T + 1)
    y = np.empty_like(q)
    for h in range(heads):
        g = h // (heads // groups)
        scores = (q[:, h] @ keys[g].T) * q.dtype.type(head_dim**-0.5)  # (T, S)
        scores[later] = -np.inf
        y[:, h] = softmax(scores) @ values[g]
    return y


def attn_out(layer: Weights, x: Array, y: Array) -> Array:
    """Project the mixer's output and add it to the residual.  x: (T, D).  y: (T, H Dh).  Returns x (T, D)."""
    return layer.numerics.round(x + layer.linear("self_attn.o_proj", y))


def moe_route(layer: Weights, x: Array) -> tuple[Array, Array, Array, Array]:
    """Normalise the residual, score the experts, and run the shared expert's first half.

    x: (T, D).
    Returns h (T, D): the normed residual; router (T, E): logits; shared_gate (T, 1): a logit;
    shared (T, Fs): the shared expert after SwiGLU.
    """
    n = layer.numerics
    h = rms_norm(n, x, layer.vector("post_attention_layernorm.weight"), layer.config.norm_epsilon)
    gate, up = (layer.linear(f"mlp.shared_expert.{name}_proj", h) for name in ("gate", "up"))
    router, shared_gate = layer.linear("mlp.gate", h), layer.linear("mlp.shared_expert_gate", h)
    return h, router, shared_gate, swiglu(n, gate, up)


def moe_up(layer: Weights, h: Array, router: Array) -> tuple[Array, Array, Array]:
    """Choose K experts for each token and run their first half.

    h: (T, D).  router: (T, E).
    Returns expert (T, K) int32, best first, ties to the lower id; weight (T, K): their probabilities,
    scaled to sum to 1; hidden (T, K F): the chosen experts after SwiGLU, in that order.
    Source: Shazeer et al., "Outrageously large neural networks", 2017; renormalised as in Qwen3.
    """
    n = layer.numerics
    probability = n.round(softmax(router))
    expert = np.argsort(-probability, axis=-1, kind="stable")[:, : layer.config.experts_per_token]
    weight = np.take_along_axis(probability, expert, axis=-1)
    weight = n.round(weight / n.round(weight.sum(-1, keepdims=True)))
    width = layer.tensors[layer.prefix + "mlp.switch_mlp.gate_proj.weight"].shape[-2]
    hidden = np.empty((*expert.shape, width), h.dtype)
    for e, chosen in by_expert(expert):
        rows = h[chosen[0]]
        gate, up = (layer.linear(f"mlp.switch_mlp.{name}_proj", rows, e) for name in ("gate", "up"))
        hidden[chosen] = swiglu(n, gate, up)
    return expert.astype(np.int32), weight, hidden.reshape(len(h), -1)


def by_expert(expert: Array) -> Iterator[tuple[int, tuple[Array, Array]]]:
    """Yield each expert in use and where: (tokens, places) such that expert[tokens, places] is that one."""
    for e in np.unique(expert):
        tokens, places = np.nonzero(expert == e)
        yield int(e), (tokens, places)


@dataclass(frozen=True)
class Routed:
    """What moe_route and moe_up leave for moe_down, with the shapes they give there."""

    shared_gate: Array
    shared: Array
    expert: Array
    weight: Array
    hidden: Array


def moe_down(layer: Weights, x: Array, routed: Routed) -> Array:
    """Run the experts' second half, add them up by weight, and add the gated shared expert and the residual.

    x: (T, D).  Returns x (T, D).
    """
    n = layer.numerics
    hidden = routed.hidden.reshape(*routed.expert.shape, -1)
    parts = np.empty((*routed.expert.shape, layer.config.hidden), x.dtype)  # (T, K, D)
    for e, chosen in by_expert(routed.expert):
        parts[chosen] = layer.linear("mlp.switch_mlp.down_proj", hidden[chosen], e)
    y = n.round(n.round(parts * routed.weight[..., None]).sum(axis=1))
    shared = layer.linear("mlp.shared_expert.down_proj", routed.shared)
    shared = n.round(n.round(sigmoid(routed.shared_gate)) * shared)
    return n.round(x + n.round(y + shared))


def head(weights: Weights, x: Array) -> Array:
    """Apply the final norm and the output matrix.  x: (T, D).  Returns logits (T, V)."""
    x = rms_norm(weights.numerics, x, weights.vector("model.norm.weight"), weights.config.norm_epsilon)
    name = "lm_head" if "lm_head.weight" in weights.tensors else "model.embed_tokens"
    block = 16384  # rows dequantised at a time: a whole head of the 35B would be 4 GB of float64
    parts = [weights.linear(name, x, slice(i, i + block)) for i in range(0, weights.config.vocab, block)]
    return np.concatenate(parts, axis=-1)


# ---- sampling
#
# From the scaled logits on, numbers are integers: fixed point with the unit that each function names. Sums of
# integers do not depend on their order, and integers have no modes of rounding, so a backend that adds in
# parallel, or has no float64, still draws the same token. Before that there are float32 sums, products and
# comparisons, one at a time.


@dataclass(frozen=True)
class Sampling:
    """What a token is drawn by; docs/sampling.md has the formulas. The defaults change nothing.

    temperature: 0 takes the best token.  top_k: 0 for all.  logit_bias: addends by token id, -inf to exclude.
    The penalties are for tokens generated before.  seed: 64 bits unsigned.
    """

    temperature: float = 1
    top_k: int = 0
    top_p: float = 1
    min_p: float = 0
    repetition_penalty: float = 1
    presence_penalty: float = 0
    frequency_penalty: float = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0


def philox(counter: Sequence[ArrayLike], key: tuple[int, int]) -> list[Array]:
    """Return the four words of Philox-4x32-10 for four counter words, each () or (n), and two key words.

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011.
    """
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    c0, c1, c2, c3 = np.broadcast_arrays(*(np.atleast_1d(np.asarray(word, np.uint64)) for word in counter))
    k0, k1 = key
    for _ in range(10):
        a, b = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1 = (b >> half) ^ c1 ^ np.uint64(k0), b & low
        c2, c3 = (a >> half) ^ c3 ^ np.uint64(k1), a & low
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return [word.astype(np.uint32) for word in (c0, c1, c2, c3)]


def random_words(tokens: Array, seed: int, position: int) -> Array:
    """Return 32 random bits for each token id of tokens (n), the same whenever asked again.

    Four consecutive ids share a Philox block: counter (id / 4, position low, position high, 0), word id % 4.
    """
    low = 0xFFFFFFFF
    words = np.stack(philox((tokens // 4, position & low, position >> 32, 0), (seed & low, seed >> 32)))
    return np.asarray(words[tokens % 4, np.arange(len(tokens))])


# Coefficients, lowest first, of the polynomials that interpolate the function at its Chebyshev nodes, in
# 2^-30; tests/test_reference_sample.py computes them.
LN_RATIO = (  # ln(1 + r) / r for sqrt(1/2) <= 1 + r <= sqrt(2)
    1073741825, -536870906, 357913612, -268436126, 214775591, -178955778,
    152603315, -133367554, 128267892, -124775757, 70569817,
)  # fmt: skip
EXP2_RATIO = (-744261112, 257940802, -59591844, 10304738, -1386885, 123394)  # (2^-f - 1) / f for 0 <= f <= 1
LN_2 = 49946518145322874  # in 2^-56
LOG2_E = 1549082005  # in 2^-30
SQRT_2 = 6074001000  # in 2^-32


def polynomial(coefficients: Sequence[int], x: Array, bits: int) -> Array:
    """Evaluate by Horner's rule, rounding each product down.  x: (n) int64 in 2^-bits.  Returns 2^-30."""
    y = np.full(x.shape, coefficients[-1], np.int64)
    for coefficient in coefficients[-2::-1]:
        y = coefficient + ((x * y) >> bits)
    return y


def fixed_ln(x: Array) -> Array:
    """Return ln x in 2^-56 for integers x (n) > 0, below 2^62; a multiple of ln 2 plus a small part.

    The small part is good to 2^-28 of itself, so ln(x / 2^n) is too, however close x comes to 2^n.
    """
    top = np.zeros(x.shape, np.int64)  # the place of x's top bit
    for step in (32, 16, 8, 4, 2, 1):
        top += np.where(x >> (top + step) > 0, step, 0)
    m = np.where(top > 32, x >> np.maximum(top - 32, 0), x << np.maximum(32 - top, 0))  # 1 <= m < 2, in 2^-32
    up = m > SQRT_2
    r = np.where(up, m - 2**33, 2 * (m - 2**32))  # in 2^-33
    return np.asarray((top + up) * LN_2 + ((r * polynomial(LN_RATIO, r, 33)) >> 7))


def gumbel(words: Array) -> Array:
    """Return -ln(-ln u) in 2^-24, int64, for u = (2 word + 1) / 2^33; words: (n) uint32.

    Source: Gumbel, 1954: the largest of logit + gumbel is a draw from the softmax.
    """
    exponential = 33 * LN_2 - fixed_ln(2 * words.astype(np.int64) + 1)  # -ln u in 2^-56
    return np.asarray((56 * LN_2 - fixed_ln(exponential)) >> 32)


def mass(z: Array) -> Array:
    """Return e^z in 2^-40, int64, for z (n) int64 in 2^-24, -64 <= z <= 0; 0 where it is less than that."""
    y = -z * LOG2_E  # e^z = 2^-y, in 2^-54
    whole, f = y >> 54, (y >> 24) & (2**30 - 1)
    fraction = 2**30 + ((f * polynomial(EXP2_RATIO, f, 30)) >> 30)
    return np.asarray((fraction << 10) >> np.minimum(whole, 63))


def adjust(
    logits: ArrayLike, s: Sampling, counts: Mapping[int, int] | None = None, allowed: Array | None = None
) -> Array:
    """Return logits (V) as float32 after, in this order, the mask, logit_bias and the penalties.

    counts: how often each generated token was.  allowed: (V / 32) uint32, bit i % 32 of word i / 32 for token
    i; None for all. What is excluded becomes -inf.
    Raises FloatingPointError for logits that are not finite, ValueError if no token is left.
    """
    x = np.array(logits, np.float32)
    if not np.isfinite(x).all():
        raise FloatingPointError(f"logits: wanted finite numbers, got {x[~np.isfinite(x)][0]}")
    if allowed is not None:
        i = np.arange(len(x))
        x[(allowed[i // 32] >> (i % 32).astype(np.uint32)) & 1 == 0] = -np.inf
    with np.errstate(over="ignore"):
        for token, bias in s.logit_bias.items():
            x[token] += np.float32(bias)
        repetition = np.float32(s.repetition_penalty)
        for token, count in (counts or {}).items():
            x[token] *= repetition if x[token] < 0 else np.float32(1) / repetition
            x[token] -= np.float32(s.presence_penalty) + np.float32(s.frequency_penalty) * np.float32(count)
    x = np.minimum(x, np.finfo(np.float32).max)
    if x.max() == -np.inf:
        raise ValueError("no token is left to draw")
    return x


def scale(x: Array, temperature: float) -> Array:
    """Return (x - max x) / temperature in 2^-24, int64, not below -64.  x: (V) float32, -inf for excluded.

    A temperature below 2^-20 counts as that.
    """
    factor = np.float32(2**24) / max(np.float32(temperature), np.float32(2**-20))
    with np.errstate(over="ignore"):
        return np.asarray(np.maximum((x - x.max()) * factor, np.float32(-(2**30))), np.int64)


def keep(x: Array, s: Sampling) -> Array:
    """Return the ids that may be drawn, best first, ties to the lower id.  x: (V) float32, adjusted.

    top_k: how many at most.  top_p: of those, as few of the best as have this much of the probability, but at
    least one.  min_p: of those, the ones that have this much of the best one's probability.
    Source of top_p: Holtzman et al., 2019.
    """
    kept = np.argsort(-x, kind="stable")
    if s.top_k > 0:
        kept = kept[: s.top_k]
    share = mass(scale(x, s.temperature)[kept])
    if np.float32(s.top_p) < 1:
        total, part = int(share.sum()), int(float(np.float32(s.top_p)) * 2**32)
        target = (total >> 32) * part + ((total & 0xFFFFFFFF) * part >> 32)
        before = np.cumsum(share) - share
        count = max(1, int((before < target).sum()))
        kept, share = kept[:count], share[:count]
    return kept[share >= int(float(np.float32(s.min_p)) * 2**40)]


def sample(
    logits: ArrayLike,
    s: Sampling,
    position: int,
    counts: Mapping[int, int] | None = None,
    allowed: Array | None = None,
) -> int:
    """Draw the token at a position, 64 bits unsigned; equal arguments draw equal tokens.

    logits, counts, allowed, and what is raised: as for adjust.
    """
    x = adjust(logits, s, counts, allowed)
    if np.float32(s.temperature) == 0:
        return int(np.argmax(x))
    kept = np.sort(keep(x, s))
    score = scale(x, s.temperature)[kept] + gumbel(random_words(kept, s.seed, position))
    return int(kept[np.argmax(score)])


# ---- the model


class Model:
    """A checkpoint, run in NumPy."""

    def __init__(
        self, directory: str | Path, dtype: str = "f64", kv: str = "f32", keep_bytes: int = 1 << 30
    ) -> None:
        """Map the checkpoint in a directory.

        dtype: "f64" is the truth; "f32" computes in float32; "bf16" computes each step in float32 and rounds
        its result to bfloat16: an ideal bfloat16 pipeline, the yardstick for those that are not.
        kv: what keys and values are rounded to in the state, "f32" (not at all), "bf16" or "int8".
        keep_bytes: how much memory may hold dequantised matrices for the next pass.
        Raises FileNotFoundError, KeyError or ValueError for files it cannot read.
        """
        directory, numerics = Path(directory), Numerics.of(dtype, kv)
        self.config = read_config(directory)
        self.weights = Weights(self.config, numerics, read_tensors(directory), keep_bytes)
        self.layers = [self.weights.layer(index) for index in range(self.config.layers)]

    def new_states(self) -> list[State]:
        """Return the states before the first token, one a layer: no keys and values, or zeros."""
        c, dtype = self.config, self.weights.numerics.dtype
        attention = (c.kv_heads, 0, c.head_dim)
        conv, S = (c.conv_taps - 1, c.channels), (c.value_heads, c.value_dim, c.key_dim)
        shapes = ((attention, attention) if kind else (conv, S) for kind in c.attention)
        return [(np.zeros(first, dtype), np.zeros(second, dtype)) for first, second in shapes]

    def forward(self, tokens: ArrayLike, states: list[State] | None = None) -> tuple[Array, list[State]]:
        """Take in tokens after those that states hold; without states, from the start.

        tokens: (T) int.  Returns logits (T, V) and the new states.
        Raises ValueError for an empty pass or an id outside the vocabulary.
        """
        tokens = np.asarray(tokens)
        if tokens.ndim != 1 or tokens.size == 0 or tokens.dtype.kind not in "iu":
            raise ValueError(f"tokens: expected (T) integers, T >= 1, got {tokens.shape} {tokens.dtype}")
        if tokens.min() < 0 or tokens.max() >= self.config.vocab:
            raise ValueError(
                f"tokens: expected ids in [0, {self.config.vocab}), got {tokens.min()} to {tokens.max()}"
            )
        x = embed(self.weights, tokens)
        after = []
        for index, state in enumerate(self.new_states() if states is None else states):
            x, state = self.mix(index, x, state)
            x = self.moe(index, x)
            after.append(state)
        return head(self.weights, x), after

    def mix(self, index: int, x: Array, state: State) -> tuple[Array, State]:
        """Run a layer's first half, which mixes tokens.  x: (T, D).  Returns x (T, D) and the new state."""
        layer = self.layers[index]
        if self.config.attention[index]:
            qg, k, v = attn_in(layer, x)
            y, state = attn_mix(layer, qg, k, v, state)
            return attn_out(layer, x, y), state
        qkv, z, b, a = gdn_in(layer, x)
        y, state = gdn_mix(layer, qkv, b, a, state)
        return gdn_out(layer, x, y, z), state

    def moe(self, index: int, x: Array) -> Array:
        """Run a layer's second half, the mixture of experts.  x: (T, D).  Returns x (T, D)."""
        layer = self.layers[index]
        h, router, shared_gate, shared = moe_route(layer, x)
        expert, weight, hidden = moe_up(layer, h, router)
        return moe_down(layer, x, Routed(shared_gate, shared, expert, weight, hidden))

    def logits(self, tokens: ArrayLike) -> Array:
        """Return the logits (T, V) after each of tokens (T), from the start."""
        return self.forward(tokens)[0]
