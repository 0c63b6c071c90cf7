"""What the loader takes: every tensor bound where it belongs, whatever the files look like."""

import json
import os
import re
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from checkpoint_maker import (
    PREFIX,
    Checkpoint,
    Stored,
    file_bytes,
    header_of,
    made,
    make,
    quantised,
    store,
    widen,
    write,
    write_file,
)
from lily._core import Weights
from loading_checks import check_bound

DEMO = Path(__file__).parents[1] / "src/lily/demo/lily-tales-22m-4bit"


@pytest.fixture
def tiny() -> Checkpoint:
    """A checkpoint to change: the tensors are shared, the dicts are not."""
    return made().copy()


def test_every_tensor_is_bound_where_it_belongs(tiny: Checkpoint, tmp_path: Path) -> None:
    weights = Weights(str(write(tmp_path, tiny)))
    check_bound(weights, tiny)
    assert weights.warnings == []
    assert weights.skipped == 0


def test_config_is_read(tiny: Checkpoint, tmp_path: Path) -> None:
    config = Weights(str(write(tmp_path, tiny))).config
    override = config.pop("override")
    assert config == {
        "layers": 4,
        "hidden": 128,
        "vocab": 640,
        "norm_epsilon": 1e-6,
        "max_positions": 4096,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 64,
        "rotary_dim": 16,
        "rope_theta": 1e7,
        "key_heads": 2,
        "value_heads": 4,
        "key_dim": 64,
        "value_dim": 64,
        "conv_taps": 4,
        "experts": 8,
        "experts_per_token": 2,
        "expert_width": 64,
        "shared_width": 64,
        "tied": False,
        "attention": [False, False, False, True],
        "quantisation": {"bits": 4, "group": 64},
    }
    gates = [f"layers.{layer}.mlp.{gate}" for layer in range(4) for gate in ("gate", "shared_expert_gate")]
    assert override == {gate: {"bits": 8, "group": 64} for gate in gates}


@pytest.mark.parametrize("spaces", range(8))
def test_tensors_may_begin_at_any_byte(tiny: Checkpoint, tmp_path: Path, spaces: int) -> None:
    write(tmp_path, tiny)
    write_file(tmp_path / "model.safetensors", tiny.tensors, spaces)
    check_bound(Weights(str(tmp_path)), tiny)


@pytest.mark.parametrize("index", [True, False])
def test_companions_may_lie_in_different_shards(tiny: Checkpoint, tmp_path: Path, index: bool) -> None:
    weights = Weights(str(write(tmp_path, tiny, shards=4, index=index)))
    check_bound(weights, tiny)
    assert weights.warnings == []


@pytest.mark.parametrize(
    ("text", "head"),
    [
        ("model.", ""),
        ("model.language_model.", ""),
        ("model.language_model.", "model.language_model."),
        ("", ""),
    ],
)
def test_names_may_have_another_prefix(tiny: Checkpoint, tmp_path: Path, text: str, head: str) -> None:
    def renamed(name: str) -> str:
        return name.replace(PREFIX, text).replace("language_model.lm_head", head + "lm_head")

    weights = Weights(
        str(write(tmp_path, Checkpoint({renamed(k): v for k, v in tiny.tensors.items()}, tiny.config)))
    )
    check_bound(weights, tiny)
    assert weights.warnings == []


def test_config_may_be_flat(tiny: Checkpoint, tmp_path: Path) -> None:
    flat = {**tiny.config.pop("text_config"), "quantization": tiny.config["quantization"]}
    write(tmp_path / "nested", make())
    weights = Weights(str(write(tmp_path / "flat", Checkpoint(tiny.tensors, flat))))
    assert weights.config == Weights(str(tmp_path / "nested")).config


def test_absent_keys_are_those_of_the_35b_model(tiny: Checkpoint, tmp_path: Path) -> None:
    """Only what the tiny model changes is said; the rest, rotation and layer kinds included, has defaults."""
    text = tiny.config["text_config"]
    for key in (
        "rope_parameters",
        "layer_types",
        "full_attention_interval",
        "linear_conv_kernel_dim",
        "hidden_act",
        "attention_bias",
        "attn_output_gate",
        "rms_norm_eps",
        "max_position_embeddings",
        "model_type",
    ):
        del text[key]
    config = Weights(str(write(tmp_path, tiny))).config
    assert config["attention"] == [False, False, False, True]
    assert (config["rotary_dim"], config["rope_theta"], config["norm_epsilon"]) == (16, 1e7, 1e-6)
    assert (config["conv_taps"], config["max_positions"]) == (4, 262144)


def test_rotation_may_be_spelled_at_either_place(tiny: Checkpoint, tmp_path: Path) -> None:
    text = tiny.config["text_config"]
    text["rope_parameters"] = {"type": "default", "mrope_section": [3, 3, 2]}
    text |= {"partial_rotary_factor": 0.5, "rope_theta": 5e5, "rope_scaling": None}
    config = Weights(str(write(tmp_path, tiny))).config
    assert (config["rotary_dim"], config["rope_theta"]) == (32, 5e5)


def test_head_may_be_the_embedding(tiny: Checkpoint, tmp_path: Path) -> None:
    for part in ("weight", "scales", "biases"):
        del tiny.tensors[f"language_model.lm_head.{part}"]
    tiny.config["tie_word_embeddings"] = True
    weights = Weights(str(write(tmp_path, tiny)))
    assert weights.config["tied"]
    assert weights.warnings == []
    assert weights.tensor_bytes("head.weight") == tiny.tensors[PREFIX + "embed_tokens.weight"].array.tobytes()


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_modules_may_be_unquantised(tiny: Checkpoint, tmp_path: Path, dtype: str) -> None:
    rng = np.random.default_rng(1)
    for name in [n for n in tiny.tensors if n.endswith(".scales")]:
        module = name.removesuffix(".scales")
        packed = tiny.tensors[module + ".weight"].array
        columns = tiny.tensors[name].array.shape[-1] * 64
        del tiny.tensors[name], tiny.tensors[module + ".biases"]
        values = rng.standard_normal((*packed.shape[:-1], columns), dtype=np.float32)
        tiny.tensors[module + ".weight"] = store(values, dtype)
    del tiny.config["quantization"], tiny.config["quantization_config"]
    weights = Weights(str(write(tmp_path, tiny)))
    check_bound(weights, tiny)
    assert weights.config["quantisation"] is None
    assert weights.warnings == []


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_scales_and_vectors_may_have_any_float_type(tiny: Checkpoint, tmp_path: Path, dtype: str) -> None:
    for name, stored in tiny.tensors.items():
        if stored.dtype != "U32":
            tiny.tensors[name] = store(widen(stored), dtype)
    check_bound(Weights(str(write(tmp_path, tiny))), tiny)


def test_half_precision_widens_exactly(tiny: Checkpoint, tmp_path: Path) -> None:
    """Zeros of both signs, subnormals, the smallest and largest normal numbers."""
    values = np.array([0.0, -0.0, 2**-24, -(2**-24), 1023 * 2**-24, 2**-14, 65504, -65504, 1 / 3], np.float16)
    name = PREFIX + "norm.weight"
    tiny.tensors[name] = Stored("F16", np.resize(values, 128))
    weights = Weights(str(write(tmp_path, tiny)))
    assert weights.tensor_bytes("norm") == np.resize(values, 128).astype(np.float32).tobytes()


def test_demo_checkpoint_loads() -> None:
    weights = Weights(str(DEMO))
    assert (weights.tensors, weights.skipped, weights.warnings) == (357, 0, [])
    assert weights.config["attention"] == [False, False, False, True] * 2
    header_bytes = struct.unpack("<Q", (DEMO / "model.safetensors").read_bytes()[:8])[0]
    assert weights.nbytes == (DEMO / "model.safetensors").stat().st_size - 8 - header_bytes


def test_vision_and_prediction_tensors_are_skipped(tiny: Checkpoint, tmp_path: Path) -> None:
    extra = {
        "vision_tower.patch_embed.proj.weight": Stored("BF16", np.zeros((4, 2, 2, 2, 3), np.uint16)),
        "model.visual.pos_embed.weight": Stored("BF16", np.zeros((4, 4), np.uint16)),
        "visual.merger.norm.weight": Stored("U8", np.zeros(4, np.uint8)),
        "mtp.layers.0.mlp.gate.weight": Stored("U32", np.zeros((4, 4), np.uint32)),
        "language_model.mtp.fc.scales": Stored("BF16", np.zeros((4, 4), np.uint16)),
    }
    tiny.config["text_config"]["mtp_num_hidden_layers"] = 1
    for section in ("quantization", "quantization_config"):
        tiny.config[section]["mtp.layers.0.mlp.gate"] = {"group_size": 32, "bits": 6}
        tiny.config[section]["vision_tower.blocks.0.attn.qkv"] = {
            "group_size": 32,
            "bits": 4,
            "mode": "mxfp4",
        }
    weights = Weights(str(write(tmp_path, Checkpoint(tiny.tensors | extra, tiny.config))))
    assert weights.skipped == 5
    assert weights.warnings == []
    check_bound(weights, tiny)


def test_prediction_layers_promised_by_the_config_may_be_absent(tiny: Checkpoint, tmp_path: Path) -> None:
    tiny.config["text_config"]["mtp_num_hidden_layers"] = 1
    assert Weights(str(write(tmp_path, tiny))).warnings == []


def test_code_beside_the_weights_is_not_run(tiny: Checkpoint, tmp_path: Path) -> None:
    write(tmp_path, tiny)
    ran = tmp_path / "ran"
    (tmp_path / "modeling_qwen.py").write_text(f"open({str(ran)!r}, 'w')")
    (tmp_path / "pytorch_model.bin").write_bytes(b"cbuiltins\nexec\n(S'1/0'\ntR.")
    config = tiny.config | {"auto_map": {"AutoModelForCausalLM": "modeling_qwen.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    Weights(str(tmp_path))
    assert not ran.exists()


def test_threads_load_side_by_side(tiny: Checkpoint, tmp_path: Path) -> None:
    write(tmp_path, tiny, shards=3)
    with ThreadPoolExecutor(8) as pool:
        prints = set(pool.map(lambda _: Weights(str(tmp_path)).fingerprint, range(32)))
    assert len(prints) == 1


MEASURE = """
import resource, sys, time
from lily._core import Weights
unit = 1 if sys.platform == "darwin" else 1024
before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
weights = Weights(sys.argv[1])
seconds = time.perf_counter() - start
print(weights.nbytes, seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit)
"""


def test_loading_reads_no_weights(tiny: Checkpoint, tmp_path: Path) -> None:
    """An embedding of 2 GiB, a hole in the file, is mapped at once and not read."""
    name = PREFIX + "embed_tokens.weight"
    tiny.config["text_config"]["vocab_size"] = rows = 1 << 22
    tiny.config["tie_word_embeddings"] = True
    others = {k: v for k, v in tiny.tensors.items() if "embed_tokens" not in k and "lm_head" not in k}
    write(tmp_path, Checkpoint(others, tiny.config))
    header = header_of(others)
    at = max(entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__")
    header[name] = {"dtype": "F32", "shape": [rows, 128], "data_offsets": [at, at + rows * 512]}
    data = b"".join(stored.array.tobytes() for stored in others.values())
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(file_bytes(json.dumps(header).encode(), data))
        file.truncate(file.tell() + rows * 512)
    command = [sys.executable, "-c", MEASURE, str(tmp_path)]
    measured = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    loaded, seconds, grown = (float(x) for x in measured.stdout.split())
    assert loaded > 2**31
    assert seconds < 0.5
    assert grown < 32 * 2**20


# The fingerprint


def test_fingerprint_is_of_the_content(tiny: Checkpoint, tmp_path: Path) -> None:
    """Files, shards and prefixes do not matter."""
    bare = {k.replace("language_model.", ""): v for k, v in tiny.tensors.items()}
    prints = {
        Weights(str(write(tmp_path / "one", tiny))).fingerprint,
        Weights(str(write(tmp_path / "many", tiny, shards=3))).fingerprint,
        Weights(str(write(tmp_path / "bare", Checkpoint(bare, tiny.config)))).fingerprint,
    }
    assert len(prints) == 1
    assert re.fullmatch("[0-9a-f]{16}", prints.pop())


def test_fingerprint_tells_checkpoints_apart(tiny: Checkpoint, tmp_path: Path) -> None:
    norm, gate = PREFIX + "norm.weight", PREFIX + "layers.3.mlp.shared_expert.up_proj"
    rng = np.random.default_rng(3)
    variants = {
        "same": tiny,
        "seed": make(seed=1),
        "norm": Checkpoint(tiny.tensors | {norm: store(np.ones(128, np.float32), "BF16")}, tiny.config),
        "type": Checkpoint(tiny.tensors | {norm: store(widen(tiny.tensors[norm]), "F32")}, tiny.config),
        "matrix": Checkpoint(
            tiny.tensors | quantised(gate, rng.standard_normal((64, 128), dtype=np.float32)), tiny.config
        ),
        "experts_per_token": make(num_experts_per_tok=3),
        "theta": make(),
    }
    variants["theta"].config["text_config"]["rope_parameters"]["rope_theta"] = 1e6
    prints = {name: Weights(str(write(tmp_path / name, c))).fingerprint for name, c in variants.items()}
    assert len(set(prints.values())) == len(variants), prints


def test_unknown_tensor_name_is_a_value_error(tiny: Checkpoint, tmp_path: Path) -> None:
    weights = Weights(str(write(tmp_path, tiny)))
    with pytest.raises(ValueError, match=r"no tensor is named layers\.9"):
        weights.tensor_bytes("layers.9")
