"""How modules are stored: what the config says, what the tensors say, and what Lily reads."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoint_maker import (
    PREFIX,
    Checkpoint,
    Stored,
    made,
    quantised,
    store,
    write,
)
from lily._core import Weights
from loading_checks import assert_says, check_bound, refusal

ROUTER = "layers.0.mlp.gate"


@pytest.fixture
def tiny() -> Checkpoint:
    """A checkpoint to change: the tensors are shared, the dicts are not."""
    return made().copy()


def set_plan(checkpoint: Checkpoint, **entries: Any) -> None:
    for section in ("quantization", "quantization_config"):
        checkpoint.config[section] |= entries


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"bits": 5}, ["quantization", "5-bit affine group 64 not supported (supported: 4-bit and 8-bit"]),
        ({"bits": 4, "group_size": 32}, ["quantization", "4-bit affine group 32 not supported"]),
        ({"bits": 4, "mode": "mxfp4"}, ["quantization", "mode mxfp4 not supported"]),
        ({"bits": "4"}, ["quantization.bits", 'got "4"']),
        ({"bits": None}, ["quantization.bits", "got nothing"]),
        ({"bits": None, "quant_method": "fp8"}, ['quant_method "fp8" not supported']),
        ({PREFIX + ROUTER: {"bits": 6}}, [PREFIX + ROUTER, "6-bit affine group 64 not supported"]),
        ({PREFIX + ROUTER: {"group_size": 128}}, [PREFIX + ROUTER, "4-bit affine group 128 not supported"]),
        ({PREFIX + ROUTER: {"mode": "nvfp4"}}, [PREFIX + ROUTER, "mode nvfp4 not supported"]),
        ({PREFIX + ROUTER: {"bits": [8]}}, [PREFIX + ROUTER, "bits", "got an array"]),
        ({"model." + ROUTER: {"bits": 4}}, ["contradicts another entry for the same module", ROUTER]),
    ],
)
def test_quantisation_that_lily_does_not_read(
    tiny: Checkpoint, tmp_path: Path, change: dict[str, Any], parts: list[str]
) -> None:
    set_plan(tiny, **change)
    assert_says(refusal(write(tmp_path, tiny)), "config.json", *parts)


def test_sections_must_agree(tiny: Checkpoint, tmp_path: Path) -> None:
    del tiny.config["quantization_config"][PREFIX + ROUTER]
    assert_says(refusal(write(tmp_path, tiny)), "quantization_config contradicts quantization")


@pytest.mark.parametrize("section", ["quantization", "quantization_config"])
def test_one_section_is_enough(tiny: Checkpoint, tmp_path: Path, section: str) -> None:
    del tiny.config[section]
    assert Weights(str(write(tmp_path, tiny))).warnings == []


@pytest.mark.parametrize("prefix", ["model.language_model.", "model.", "", "thinker.text_model.model."])
def test_exceptions_may_have_another_prefix(tiny: Checkpoint, tmp_path: Path, prefix: str) -> None:
    for section in ("quantization", "quantization_config"):
        tiny.config[section] = {k.replace(PREFIX, prefix): v for k, v in tiny.config[section].items()}
    weights = Weights(str(write(tmp_path, tiny)))
    assert weights.config["override"][ROUTER] == {"bits": 8, "group": 64}
    assert weights.warnings == []


def test_exception_may_say_unquantised(tiny: Checkpoint, tmp_path: Path) -> None:
    name = PREFIX + "layers.1.mlp.gate"
    del tiny.tensors[name + ".scales"], tiny.tensors[name + ".biases"]
    tiny.tensors[name + ".weight"] = store(np.ones((8, 128), np.float32), "BF16")
    set_plan(tiny, **{name: False, PREFIX + "layers.1.mlp.shared_expert.up_proj": True})
    weights = Weights(str(write(tmp_path, tiny)))
    assert weights.config["override"]["layers.1.mlp.gate"] is None
    assert weights.config["override"]["layers.1.mlp.shared_expert.up_proj"] == {"bits": 4, "group": 64}
    assert weights.warnings == []
    check_bound(weights, tiny)


def test_tensors_are_believed_over_the_config(tiny: Checkpoint, tmp_path: Path) -> None:
    """The config says 8-bit throughout, the tensors are 4-bit except the routers."""
    set_plan(tiny, bits=8)
    weights = Weights(str(write(tmp_path, tiny)))
    check_bound(weights, tiny)
    modules = sum(name.endswith(".scales") for name in tiny.tensors) - 8
    (warning,) = weights.warnings
    assert_says(
        warning,
        f"{modules} modules",
        "embed_tokens (config.json says 8-bit, the tensors are 4-bit)",
        f"and {modules - 5} more",
    )


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({PREFIX + ROUTER: {"bits": 4}}, f"{ROUTER} (config.json says 4-bit, the tensors are 8-bit)"),
        ({PREFIX + ROUTER: False}, f"{ROUTER} (config.json says unquantised, the tensors are 8-bit)"),
    ],
)
def test_wrong_exception_is_named(
    tiny: Checkpoint, tmp_path: Path, change: dict[str, Any], text: str
) -> None:
    set_plan(tiny, **change)
    (warning,) = Weights(str(write(tmp_path, tiny))).warnings
    assert_says(warning, "1 modules", text)


def test_modules_may_be_8_bit(tiny: Checkpoint, tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    name = PREFIX + "layers.2.mlp.switch_mlp.down_proj"
    tiny.tensors.update(quantised(name, rng.standard_normal((8, 128, 64), dtype=np.float32), bits=8))
    set_plan(tiny, **{name: {"bits": 8, "group_size": 64}})
    weights = Weights(str(write(tmp_path, tiny)))
    check_bound(weights, tiny)
    assert weights.warnings == []


@pytest.mark.parametrize("bits", [2, 3, 5, 6])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_other_packings_are_refused_by_name(tiny: Checkpoint, tmp_path: Path, bits: int, group: int) -> None:
    name = PREFIX + "layers.1.linear_attn.out_proj"
    tiny.tensors[name + ".weight"] = Stored("U32", np.zeros((128, 256 * bits // 32), np.uint32))
    for part in ("scales", "biases"):
        tiny.tensors[f"{name}.{part}"] = Stored("BF16", np.zeros((128, 256 // group), np.uint16))
    message = refusal(write(tmp_path, tiny))
    assert_says(
        message,
        f"layers.1.linear_attn.out_proj: {bits}-bit affine group {group} not supported",
        "supported: 4-bit and 8-bit affine, group 64",
    )


def test_mxfp4_is_refused_by_name(tiny: Checkpoint, tmp_path: Path) -> None:
    name = PREFIX + "layers.1.linear_attn.out_proj"
    del tiny.tensors[name + ".biases"]
    tiny.tensors[name + ".scales"] = Stored("U8", np.zeros((128, 8), np.uint8))
    assert_says(
        refusal(write(tmp_path, tiny)), "layers.1.linear_attn.out_proj: mxfp4 or nvfp4", "not supported"
    )


@pytest.mark.parametrize(
    ("part", "stored", "text"),
    [
        (
            "weight",
            Stored("U32", np.zeros((127, 32), np.uint32)),
            "wanted U32 [128, 32] (4-bit) or [128, 64] (8-bit)",
        ),
        ("weight", Stored("U32", np.zeros((128, 31), np.uint32)), "got U32 [128, 31]"),
        ("weight", Stored("U32", np.zeros((128, 512), np.uint32)), "got U32 [128, 512]"),
        ("weight", Stored("U32", np.zeros((128 * 32,), np.uint32)), "got U32 [4096]"),
        ("weight", Stored("U32", np.zeros((128, 0), np.uint32)), "got U32 [128, 0]"),
        ("weight", Stored("U32", np.zeros((), np.uint32)), "got U32 []"),
        (
            "weight",
            Stored("U8", np.zeros((128, 128), np.uint8)),
            "wanted U32 (packed) or BF16, F16, F32, got U8",
        ),
        ("weight", Stored("BF16", np.zeros((128, 255), np.uint16)), "wanted [128, 256], got BF16 [128, 255]"),
        ("scales", Stored("BF16", np.zeros((128, 3), np.uint16)), "with scales [128, 4]"),
        ("scales", Stored("BF16", np.zeros((64, 4), np.uint16)), "wanted BF16, F16 or F32 [128, 4]"),
        ("scales", Stored("BF16", np.zeros((128, 0), np.uint16)), "with scales [128, 4]"),
        ("scales", Stored("U32", np.zeros((128, 4), np.uint32)), "got U32 [128, 4]"),
        ("biases", Stored("BF16", np.zeros((128, 2), np.uint16)), "got BF16 [128, 2]"),
        ("biases", Stored("F32", np.zeros((128, 4), np.float32)), "scales and biases alike, got F32"),
    ],
)
def test_parts_of_a_module_must_fit(
    tiny: Checkpoint, tmp_path: Path, part: str, stored: Stored, text: str
) -> None:
    tiny.tensors[f"{PREFIX}layers.1.linear_attn.out_proj.{part}"] = stored
    assert_says(refusal(write(tmp_path, tiny)), "model.safetensors", "layers.1.linear_attn.out_proj.", text)


@pytest.mark.parametrize(
    ("name", "stored", "text"),
    [
        (
            "norm.weight",
            Stored("BF16", np.zeros((1, 128), np.uint16)),
            "wanted BF16, F16 or F32 [128], got BF16 [1, 128]",
        ),
        ("norm.weight", Stored("U32", np.zeros(128, np.uint32)), "got U32 [128]"),
        ("layers.0.linear_attn.A_log", Stored("F32", np.zeros(5, np.float32)), "[4], got F32 [5]"),
        (
            "layers.0.linear_attn.conv1d.weight",
            Stored("BF16", np.zeros((512, 4), np.uint16)),
            "[512, 4, 1], got BF16 [512, 4]",
        ),
        (
            "layers.3.self_attn.q_norm.weight",
            Stored("BF16", np.zeros(128, np.uint16)),
            "[64], got BF16 [128]",
        ),
    ],
)
def test_vectors_must_fit(tiny: Checkpoint, tmp_path: Path, name: str, stored: Stored, text: str) -> None:
    tiny.tensors[PREFIX + name] = stored
    assert_says(refusal(write(tmp_path, tiny)), f'tensor "{PREFIX}{name}"', text, "Does config.json belong")
