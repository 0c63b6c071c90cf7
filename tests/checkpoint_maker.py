"""Write small random checkpoints in the layout of mlx-community/Qwen3.6-35B-A3B-4bit, with NumPy alone.

A checkpoint is a dict of name -> Stored and a config dict; tests change either before writing it.
"""

import json
import struct
from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

TINY: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "vocab_size": 640,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
PREFIX = "language_model.model."
ITEM_BYTES = {"U32": 4, "F32": 4, "BF16": 2, "F16": 2, "U8": 1}


class Stored(NamedTuple):
    """A tensor as a file has it. BF16 is kept as its 16 bits."""

    dtype: str
    array: np.ndarray


class Checkpoint(NamedTuple):
    """Tensors and config, ready to be written."""

    tensors: dict[str, Stored]
    config: dict[str, Any]

    def copy(self) -> "Checkpoint":
        return Checkpoint(dict(self.tensors), deepcopy(self.config))


def to_bf16(values: np.ndarray) -> np.ndarray:
    """Round float32 to the nearest bfloat16, ties to even, as uint16."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def store(values: np.ndarray, dtype: str) -> Stored:
    """Convert float32 values to a stored type."""
    if dtype == "BF16":
        return Stored(dtype, to_bf16(values))
    return Stored(dtype, values.astype({"F16": np.float16, "F32": np.float32}[dtype]))


def widen(stored: Stored) -> np.ndarray:
    """The float32 values of a stored tensor."""
    if stored.dtype == "BF16":
        return (stored.array.astype(np.uint32) << 16).view(np.float32)
    return stored.array.astype(np.float32)


def quantise(values: np.ndarray, bits: int = 4, group: int = 64) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Quantise the last axis the way MLX does; returns packed uint32, scales, biases (both float32).

    Source: model-spec 1.3. The scale is negative when the largest magnitude is positive.
    """
    w = values.reshape(*values.shape[:-1], -1, group).astype(np.float32)
    top = np.float32(2**bits - 1)
    low, high = w.min(-1, keepdims=True), w.max(-1, keepdims=True)
    scale = np.maximum((high - low) / top, np.float32(1e-7))
    negative = np.abs(low) > np.abs(high)
    scale = np.where(negative, scale, -scale)
    edge = np.where(negative, low, high)
    steps = np.rint(edge / scale)
    scale = np.where(steps != 0, edge / np.where(steps != 0, steps, 1), scale)
    bias = np.where(steps != 0, edge, np.float32(0))
    q = np.clip(np.rint((w - bias) / scale), 0, top).astype(np.uint32)
    q = q.reshape(*values.shape[:-1], -1, 32 // bits)
    packed = np.bitwise_or.reduce(q << (np.arange(32 // bits, dtype=np.uint32) * bits), axis=-1)
    return packed.astype(np.uint32), scale[..., 0], bias[..., 0]


def quantised(name: str, values: np.ndarray, bits: int = 4, dtype: str = "BF16") -> dict[str, Stored]:
    """The three tensors of a quantised module."""
    packed, scales, biases = quantise(values, bits)
    return {
        f"{name}.weight": Stored("U32", packed),
        f"{name}.scales": store(scales, dtype),
        f"{name}.biases": store(biases, dtype),
    }


def make(seed: int = 0, **changes: Any) -> Checkpoint:
    """Make a random checkpoint: TINY with the given keys of text_config changed."""
    sizes = TINY | changes
    rng = np.random.default_rng(seed)
    D, E, F = sizes["hidden_size"], sizes["num_experts"], sizes["moe_intermediate_size"]
    Fs, V = sizes["shared_expert_intermediate_size"], sizes["vocab_size"]
    queries = sizes["num_attention_heads"] * sizes["head_dim"]
    keys = sizes["num_key_value_heads"] * sizes["head_dim"]
    delta_keys = sizes["linear_num_key_heads"] * sizes["linear_key_head_dim"]
    delta_values = sizes["linear_num_value_heads"] * sizes["linear_value_head_dim"]
    channels, taps = 2 * delta_keys + delta_values, sizes["linear_conv_kernel_dim"]
    tensors: dict[str, Stored] = {}
    overrides: dict[str, Any] = {}

    def linear(name: str, *shape: int, bits: int = 4) -> None:
        values = rng.standard_normal(shape, dtype=np.float32) / np.sqrt(shape[-1])
        tensors.update(quantised(name, values, bits))
        if bits != 4:
            overrides[name] = {"group_size": 64, "bits": bits}

    def vector(name: str, *shape: int, dtype: str = "BF16") -> None:
        tensors[name] = store(1 + 0.1 * rng.standard_normal(shape, dtype=np.float32), dtype)

    linear(PREFIX + "embed_tokens", V, D)
    linear("language_model.lm_head", V, D)
    vector(PREFIX + "norm.weight", D)
    kinds = []
    for l in range(sizes["num_hidden_layers"]):  # noqa: E741
        path = f"{PREFIX}layers.{l}."
        vector(path + "input_layernorm.weight", D)
        vector(path + "post_attention_layernorm.weight", D)
        kinds.append("linear_attention" if (l + 1) % 4 else "full_attention")
        if kinds[-1] == "linear_attention":
            linear(path + "linear_attn.in_proj_qkv", channels, D)
            linear(path + "linear_attn.in_proj_z", delta_values, D)
            linear(path + "linear_attn.in_proj_b", sizes["linear_num_value_heads"], D)
            linear(path + "linear_attn.in_proj_a", sizes["linear_num_value_heads"], D)
            linear(path + "linear_attn.out_proj", D, delta_values)
            vector(path + "linear_attn.conv1d.weight", channels, taps, 1)
            vector(path + "linear_attn.A_log", sizes["linear_num_value_heads"], dtype="F32")
            vector(path + "linear_attn.dt_bias", sizes["linear_num_value_heads"])
            vector(path + "linear_attn.norm.weight", sizes["linear_value_head_dim"])
        else:
            linear(path + "self_attn.q_proj", 2 * queries, D)
            linear(path + "self_attn.k_proj", keys, D)
            linear(path + "self_attn.v_proj", keys, D)
            linear(path + "self_attn.o_proj", D, queries)
            vector(path + "self_attn.q_norm.weight", sizes["head_dim"])
            vector(path + "self_attn.k_norm.weight", sizes["head_dim"])
        linear(path + "mlp.gate", E, D, bits=8)
        linear(path + "mlp.shared_expert_gate", 1, D, bits=8)
        linear(path + "mlp.switch_mlp.gate_proj", E, F, D)
        linear(path + "mlp.switch_mlp.up_proj", E, F, D)
        linear(path + "mlp.switch_mlp.down_proj", E, D, F)
        linear(path + "mlp.shared_expert.gate_proj", Fs, D)
        linear(path + "mlp.shared_expert.up_proj", Fs, D)
        linear(path + "mlp.shared_expert.down_proj", D, Fs)

    quantization = {"group_size": 64, "bits": 4, "mode": "affine"} | overrides
    rope = {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25}
    config = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "tie_word_embeddings": False,
        "quantization": quantization,
        "quantization_config": deepcopy(quantization),
        "text_config": sizes
        | {
            "model_type": "qwen3_5_moe_text",
            "layer_types": kinds,
            "full_attention_interval": 4,
            "hidden_act": "silu",
            "attention_bias": False,
            "attn_output_gate": True,
            "rms_norm_eps": 1e-06,
            "max_position_embeddings": 4096,
            "rope_parameters": rope,
        },
    }
    return Checkpoint(tensors, config)


@cache
def made() -> Checkpoint:
    """The checkpoint of make(), made once. Copy it before changing it."""
    return make()


def file_bytes(header: bytes, data: bytes = b"") -> bytes:
    """A safetensors file with this header, well-formed or not."""
    return struct.pack("<Q", len(header)) + header + data


def header_of(tensors: Mapping[str, Stored]) -> dict[str, Any]:
    """The header of a file that holds these tensors one after another."""
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    at = 0
    for name, (dtype, array) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [at, at + array.size * ITEM_BYTES[dtype]],
        }
        at += array.size * ITEM_BYTES[dtype]
    return header


def write_file(path: Path, tensors: Mapping[str, Stored], spaces: int = 0) -> None:
    """Write a safetensors file; spaces after the header move the tensors to other addresses, as MLX's do."""
    header = json.dumps(header_of(tensors), separators=(",", ":")).encode() + b" " * spaces
    path.write_bytes(file_bytes(header, b"".join(array.tobytes() for _, array in tensors.values())))


def write(folder: Path, checkpoint: Checkpoint, shards: int = 1, index: bool = True) -> Path:
    """Write a checkpoint's folder. Companions of one weight land in different shards."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(checkpoint.config, indent=4))
    if shards == 1:
        write_file(folder / "model.safetensors", checkpoint.tensors)
        return folder
    names = sorted(checkpoint.tensors)
    weight_map = {}
    for s in range(shards):
        file = f"model-{s + 1:05d}-of-{shards:05d}.safetensors"
        write_file(folder / file, {name: checkpoint.tensors[name] for name in names[s::shards]}, spaces=s)
        weight_map |= dict.fromkeys(names[s::shards], file)
    if index:
        write_index(folder, weight_map)
    return folder


def write_index(folder: Path, weight_map: Mapping[str, str]) -> None:
    """Write model.safetensors.index.json."""
    text = json.dumps({"metadata": {"total_size": 0}, "weight_map": dict(weight_map)}, indent=4)
    (folder / "model.safetensors.index.json").write_text(text)
