"""Any model of this architecture, stored in any of the ways Lily reads: logits against reference.py."""

import numpy as np
import pytest

import checkpoint_maker as maker
from lily import _core, reference
from support import code_paths, compare

TOKENS = np.random.default_rng(5).integers(0, 640, 40).astype(np.int32)
OPTIONS = {"kv": "f32", "prefill_chunk": "16"}
MATRICES = [
    *("embed_tokens", "lm_head", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
    *(
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate",
        "shared_expert_gate",
        "gate_proj",
        "up_proj",
        "down_proj",
    ),
]


def check(folder, simd):
    """Compare all logits, and the states of every layer."""
    session = _core.Session(_core.Weights(str(folder)), OPTIONS | {"simd": simd})
    state = session.new_state()
    got = session.logits(state, TOKENS)
    want, states = reference.Model(folder).forward(TOKENS)
    compare("logits", got, want, 1e-4)
    for layer, wanted in enumerate(states):
        for part, array in enumerate(session.layer_state(state, layer)):
            compare(f"layer {layer} part {part}", array, wanted[part], 1e-4)


def restore(checkpoint, name, how):
    """Store a matrix in another way: a number of bits, or a float type."""
    values = maker.widen(checkpoint.tensors[name + ".scales"])
    values = np.random.default_rng(len(name)).standard_normal((*values.shape[:-1], values.shape[-1] * 64))
    values = values.astype(np.float32) / np.sqrt(values.shape[-1])
    for part in ("weight", "scales", "biases"):
        del checkpoint.tensors[f"{name}.{part}"]
    for section in ("quantization", "quantization_config"):
        checkpoint.config[section][name] = {"group_size": 64, "bits": how} if isinstance(how, int) else False
    if isinstance(how, int):
        checkpoint.tensors.update(maker.quantised(name, values, how))
    else:
        checkpoint.tensors[name + ".weight"] = maker.store(values, how)


def modules(checkpoint, kind):
    return [
        name.removesuffix(".weight")
        for name in checkpoint.tensors
        if name.endswith(f".{kind}.weight") and name.removesuffix("weight") + "scales" in checkpoint.tensors
    ]


@pytest.mark.parametrize("simd", code_paths())
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"num_hidden_layers": 1},  # no attention at all
        {"num_hidden_layers": 5},
        {"num_attention_heads": 8, "num_key_value_heads": 1},
        {"num_attention_heads": 2, "num_key_value_heads": 2},
        {"num_attention_heads": 33, "num_key_value_heads": 3, "head_dim": 64},  # 11 queries a key: 8 + 2 + 1
        {"head_dim": 128, "num_attention_heads": 1, "num_key_value_heads": 1},
        {"head_dim": 80, "num_attention_heads": 4},  # no power of two
        {"linear_num_key_heads": 1, "linear_num_value_heads": 3},
        {"linear_key_head_dim": 16, "linear_num_key_heads": 4, "linear_num_value_heads": 4},
        {"linear_value_head_dim": 80, "linear_num_value_heads": 4},
        {"linear_conv_kernel_dim": 2},
        {"linear_conv_kernel_dim": 7},
        {"num_experts": 7, "num_experts_per_tok": 3},
        {"num_experts": 5, "num_experts_per_tok": 5},
        {"num_experts_per_tok": 1},
        {"moe_intermediate_size": 192, "shared_expert_intermediate_size": 320},
        {"hidden_size": 192},  # three groups: half of a register's last load
        {"hidden_size": 64},
    ],
    ids=lambda sizes: ",".join(f"{name}={value}" for name, value in sizes.items()) or "tiny",
)
def test_sizes(sizes, simd, tmp_path):
    check(maker.write(tmp_path / "model", maker.make(seed=2, **sizes)), simd)


@pytest.mark.parametrize("simd", code_paths())
@pytest.mark.parametrize("how", [4, 8, "BF16", "F16", "F32"])
def test_every_matrix_in_every_storage(how, simd, tmp_path):
    checkpoint = maker.make(seed=3)
    for kind in MATRICES:
        for name in modules(checkpoint, kind):
            restore(checkpoint, name, how)
    check(maker.write(tmp_path / "model", checkpoint), simd)


@pytest.mark.parametrize("seed", range(6))
def test_storages_mixed_within_a_layer_and_off_alignment(seed, tmp_path):
    checkpoint = maker.make(seed=seed)
    rng = np.random.default_rng(seed)
    for kind in MATRICES:
        for name in modules(checkpoint, kind):
            how = rng.choice(np.array(["4", "8", "BF16", "F16", "F32"]))
            restore(checkpoint, name, int(how) if how.isdigit() else str(how))
    folder = maker.write(tmp_path / "model", checkpoint)
    maker.write_file(folder / "model.safetensors", checkpoint.tensors, spaces=seed)
    for simd in code_paths():
        check(folder, simd)


@pytest.mark.parametrize("dtype", ["F16", "F32"])
def test_scales_and_vectors_in_other_types(dtype, tmp_path):
    checkpoint = maker.make(seed=4)
    for name, stored in checkpoint.tensors.items():
        if stored.dtype != "U32":
            checkpoint.tensors[name] = maker.store(maker.widen(stored), dtype)
    for simd in code_paths():
        check(maker.write(tmp_path / "model", checkpoint), simd)
