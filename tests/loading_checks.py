"""What the loader's tests check: that every tensor is bound where it belongs, and what a refusal says."""

import re
from pathlib import Path

import numpy as np
import pytest

from checkpoint_maker import PREFIX, Checkpoint, widen
from lily._core import Weights
from lily.errors import ModelFilesError

NUMPY_TYPE = {"u32": np.uint32, "bf16": np.uint16, "f16": np.float16, "f32": np.float32}
STORED_TYPE = {"u32": "U32", "bf16": "BF16", "f16": "F16", "f32": "F32"}

# The core's names and the checkpoint's, written down a second time on purpose: a swapped pair is found here.
BARE_NAMES = {
    "embedding": "embed_tokens",
    "head": "lm_head",
    "norm": "norm.weight",
    "input_norm": "input_layernorm.weight",
    "post_norm": "post_attention_layernorm.weight",
    "gdn.in_qkv": "linear_attn.in_proj_qkv",
    "gdn.in_z": "linear_attn.in_proj_z",
    "gdn.in_b": "linear_attn.in_proj_b",
    "gdn.in_a": "linear_attn.in_proj_a",
    "gdn.out": "linear_attn.out_proj",
    "gdn.conv": "linear_attn.conv1d.weight",
    "gdn.a_log": "linear_attn.A_log",
    "gdn.dt_bias": "linear_attn.dt_bias",
    "gdn.norm": "linear_attn.norm.weight",
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.out": "self_attn.o_proj",
    "attn.q_norm": "self_attn.q_norm.weight",
    "attn.k_norm": "self_attn.k_norm.weight",
    "moe.router": "mlp.gate",
    "moe.gate": "mlp.switch_mlp.gate_proj",
    "moe.up": "mlp.switch_mlp.up_proj",
    "moe.down": "mlp.switch_mlp.down_proj",
    "moe.shared_gate": "mlp.shared_expert.gate_proj",
    "moe.shared_up": "mlp.shared_expert.up_proj",
    "moe.shared_down": "mlp.shared_expert.down_proj",
    "moe.shared_expert_gate": "mlp.shared_expert_gate",
}


def published_name(name: str) -> str:
    layer, rest = re.fullmatch(r"(layers\.\d+\.)?(.+)", name).groups()  # type: ignore[union-attr]
    module, dot, part = rest.rpartition(".")
    if module in BARE_NAMES and part in ("weight", "scales", "biases"):
        bare = BARE_NAMES[module] + dot + part
    else:
        bare = BARE_NAMES[rest]
    return ("language_model." if bare.startswith("lm_head") else PREFIX) + (layer or "") + bare


def check_bound(weights: Weights, checkpoint: Checkpoint) -> None:
    """Every tensor of the checkpoint is bound where it belongs, with the values it has there."""
    seen = set()
    for name, dtype, shape in weights.tensor_table():
        stored = checkpoint.tensors[published_name(name)]
        values = np.frombuffer(weights.tensor_bytes(name), NUMPY_TYPE[dtype]).reshape(shape)
        if dtype == "f32" and not name.endswith((".weight", ".scales", ".biases")):
            expected, rows = widen(stored), shape[0]
        else:
            assert STORED_TYPE[dtype] == stored.dtype, name
            expected, rows = stored.array, np.prod(stored.array.shape[:-1], dtype=int)
        np.testing.assert_array_equal(values, expected.reshape(rows, -1).reshape(shape), name)
        seen.add(published_name(name))
    assert seen == set(checkpoint.tensors)
    assert weights.tensors == len(checkpoint.tensors)
    assert weights.nbytes == sum(t.array.nbytes for t in checkpoint.tensors.values())


def refusal(folder: Path) -> str:
    """The message with which loading the folder fails."""
    with pytest.raises(ModelFilesError) as caught:
        Weights(str(folder))
    message = str(caught.value)
    assert message.count("\n") < 20
    return message


def assert_says(message: str, *parts: str) -> None:
    for part in parts:
        assert part in message, f"{part!r} is not in {message!r}"
