"""What the loader refuses, and what it says: damaged files, hostile headers, JSON, other models' configs."""

import json
import os
import struct
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoint_maker import PREFIX, Checkpoint, Stored, file_bytes, header_of, made, to_bf16, write
from lily._core import Weights
from loading_checks import assert_says, check_bound, refusal


@pytest.fixture
def tiny() -> Checkpoint:
    """A checkpoint to change: the tensors are shared, the dicts are not."""
    return made().copy()


# Damaged files

LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:09f3e6ec\nsize 5288196018\n"


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "model.safetensors.index.json"])
@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (b"", ["is empty", "wanted data, got 0 bytes", "Download the file again"]),
        (LFS_POINTER, ["Git LFS pointer", "git lfs pull"]),
    ],
)
def test_file_without_content(
    tiny: Checkpoint, tmp_path: Path, file: str, content: bytes, parts: list[str]
) -> None:
    (write(tmp_path, tiny) / file).write_bytes(content)
    assert_says(refusal(tmp_path), file, *parts)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "model.safetensors.index.json"])
def test_folder_instead_of_file(tiny: Checkpoint, tmp_path: Path, file: str) -> None:
    path = write(tmp_path, tiny) / file
    path.unlink(missing_ok=True)
    path.mkdir()
    assert_says(refusal(tmp_path), file, "wanted a file, got a folder")


def test_pipe_instead_of_file(tiny: Checkpoint, tmp_path: Path) -> None:
    path = write(tmp_path, tiny) / "model.safetensors"
    path.unlink()
    os.mkfifo(path)
    assert_says(refusal(tmp_path), "model.safetensors", "wanted a regular file")


def test_unreadable_file(tiny: Checkpoint) -> None:
    """As root, who may read every file, the test becomes nobody meanwhile."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        (write(Path(folder), tiny) / "model.safetensors").chmod(0)
        user = os.geteuid()
        try:
            if user == 0:
                os.seteuid(65534)
            message = refusal(Path(folder))
        finally:
            os.seteuid(user)
    assert_says(message, "model.safetensors: cannot be opened", "Check its permissions")


def one(dtype: Any = "F32", shape: Any = (2, 2), offsets: Any = (0, 16), **more: Any) -> dict[str, Any]:
    return {"x": {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}}


def two(first: tuple[int, int], second: tuple[int, int]) -> dict[str, Any]:
    names = {"x": first, "y": second}
    return {n: {"dtype": "U8", "shape": [o[1] - o[0]], "data_offsets": o} for n, o in names.items()}


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        pytest.param(b"short", ["wanted at least 8 bytes, got 5"], id="shorter than a length"),
        pytest.param(
            struct.pack("<Q", 50) + b"{}",
            ["cut short", "header of 50 bytes, got 2"],
            id="header past the file",
        ),
        pytest.param(
            struct.pack("<Q", 2**64 - 1), ["at most 100000000 bytes", str(2**64 - 1)], id="length overflows"
        ),
        pytest.param(
            struct.pack("<Q", 100_000_001) + b"{}",
            ["at most 100000000", "100000001"],
            id="length over the limit",
        ),
        pytest.param(b"<!doctype html><title>404</title>", ["no safetensors file"], id="a web page"),
        pytest.param(file_bytes(b""), ["the header", "line 1, column 1", "end of the text"], id="no header"),
        pytest.param(file_bytes(b"{"), ["the header", "column 2", "wanted a key"], id="half a header"),
        pytest.param(file_bytes(b"[]"), ["the header", "wanted an object, got an array"], id="array"),
        pytest.param(file_bytes(b'{"x":1}'), ['tensor "x"', "wanted an object, got 1"], id="entry a number"),
        pytest.param(file_bytes(b'{"x":{}}'), ['tensor "x"', "has no dtype"], id="entry empty"),
        pytest.param(file_bytes(b'{"x":{"dtype":"U8"}}'), ['tensor "x"', "has no shape"], id="no shape"),
        pytest.param(
            file_bytes(b'{"x":{"dtype":"U8","shape":[]}}'),
            ['tensor "x"', "has no data_offsets"],
            id="no offsets",
        ),
        pytest.param(
            file_bytes(b'{"x":{},"x":{}}'), ['the key "x" appears twice', "column 9"], id="duplicate tensors"
        ),
        pytest.param(
            file_bytes(b'{"__metadata__":{"format":3}}'),
            ["__metadata__", "wanted a string, got 3"],
            id="metadata",
        ),
        pytest.param(file_bytes(b"{} {}"), ["text after the end", "column 4"], id="two headers"),
        pytest.param(file_bytes(b'{"\xff":{}}'), ["not UTF-8"], id="not UTF-8"),
        pytest.param(one(dtype="F31"), ['tensor "x"', 'unknown dtype "F31"'], id="unknown dtype"),
        pytest.param(one(dtype=4), ['tensor "x"', "wanted a string, got 4"], id="dtype a number"),
        pytest.param(
            one(shape=[-2, -2]), ['tensor "x"', "the dimension -2 is negative"], id="negative dimension"
        ),
        pytest.param(
            one(shape=[2.0, 2]), ['tensor "x"', "wanted an integer, got 2"], id="dimension not whole"
        ),
        pytest.param(one(shape="2x2"), ['tensor "x"', 'wanted an array, got "2x2"'], id="shape a string"),
        pytest.param(one(shape=[1] * 9), ['tensor "x"', "9 dimensions"], id="rank"),
        pytest.param(one(shape=[2**40, 2**40]), ['tensor "x"', "fits 64 bits"], id="size overflows"),
        pytest.param(one(shape=[2**62, 4]), ['tensor "x"', "fits 64 bits"], id="size wraps to zero"),
        pytest.param(one(shape=[10**30]), ["a number out of range"], id="dimension overflows"),
        pytest.param(one(shape=[2, 3]), ['tensor "x"', "F32 [2, 3] wanted 24 bytes", "span 16"], id="span"),
        pytest.param(one(dtype="F4", shape=[31]), ['tensor "x"', "whole number of bytes"], id="half a byte"),
        pytest.param(
            one(offsets=[0, -16]), ['tensor "x"', "the offset -16 is negative"], id="negative offset"
        ),
        pytest.param(one(offsets=[16, 0]), ['tensor "x"', "end before they begin"], id="offsets swapped"),
        pytest.param(one(offsets=[16]), ['tensor "x"', "wanted two data_offsets, got 1"], id="one offset"),
        pytest.param(one(offsets=[0, 2**63]), ["a number out of range"], id="offset overflows"),
        pytest.param(
            one(dtype="U8", shape=[2**60], offsets=[0, 2**60]),
            ["cut short", f"wanted {2**60 + 104}"],
            id="far past the end",
        ),
        pytest.param(
            one(shape=[100], offsets=[0, 400]), ["cut short", "does not fit", "incomplete"], id="truncated"
        ),
        pytest.param(one(offsets=[4, 20]), ["cut short", "does not fit"], id="offset past the end"),
        pytest.param(two((0, 16), (8, 16)), ['tensor "y" overlaps tensor "x"'], id="overlap"),
        pytest.param(two((8, 16), (0, 9)), ['tensor "x" overlaps tensor "y"'], id="overlap, unsorted"),
        pytest.param(two((0, 8), (0, 16)), ["overlaps"], id="overlap at one start"),
        pytest.param(two((0, 4), (8, 16)), ['4 bytes before tensor "y"', "no tensor"], id="hole"),
        pytest.param(
            two((1, 8), (8, 16)), ['1 bytes before tensor "x"', "no tensor"], id="hole at the start"
        ),
        pytest.param(two((0, 4), (4, 8)), ["the rest belongs to no tensor", "got"], id="tail"),
    ],
)
def test_hostile_file(tiny: Checkpoint, tmp_path: Path, content: Any, parts: list[str]) -> None:
    """A header is given with 16 bytes of data, or the file as it is."""
    if isinstance(content, dict):
        content = file_bytes(json.dumps(content).encode(), bytes(16))
    (write(tmp_path, tiny) / "model.safetensors").write_bytes(content)
    assert_says(refusal(tmp_path), str(tmp_path / "model.safetensors"), *parts)


@pytest.mark.parametrize("keep", [0.999999, 0.5, 0.05])
def test_truncated_file_says_how_much_is_there(tiny: Checkpoint, tmp_path: Path, keep: float) -> None:
    path = write(tmp_path, tiny) / "model.safetensors"
    whole = path.stat().st_size
    os.truncate(path, kept := int(whole * keep))
    assert_says(
        refusal(tmp_path),
        f"wanted {whole} bytes, got {kept}",
        "incomplete download?",
        "Download the file again",
    )


def test_order_of_the_header_does_not_matter(tiny: Checkpoint, tmp_path: Path) -> None:
    header = dict(sorted(header_of(tiny.tensors).items(), reverse=True))
    data = b"".join(stored.array.tobytes() for stored in tiny.tensors.values())
    (write(tmp_path, tiny) / "model.safetensors").write_bytes(file_bytes(json.dumps(header).encode(), data))
    check_bound(Weights(str(tmp_path)), tiny)


def test_strange_names_are_shown_safely(tiny: Checkpoint, tmp_path: Path) -> None:
    name = "bell\x07 newline\n nul\0 " + "ü" * 400
    header = json.dumps({name: {"dtype": "Q"}}).encode()
    (write(tmp_path, tiny) / "model.safetensors").write_bytes(file_bytes(header))
    message = refusal(tmp_path)
    assert_says(message, r"bell\x07 newline\x0a nul\x00 ü", "...")
    assert len(message) < len(str(tmp_path)) + 300


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_vectors_must_be_finite(tiny: Checkpoint, tmp_path: Path, value: float) -> None:
    values = np.ones(128, np.float32)
    values[5] = value
    tiny.tensors[PREFIX + "norm.weight"] = Stored("BF16", to_bf16(values))
    assert_says(refusal(write(tmp_path, tiny)), 'norm.weight"', "wanted finite values", "at 5")


# JSON


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (b'{"a": 1,\n "b": 2,\n "a": 3}', ["line 3, column 2", 'the key "a" appears twice']),
        (b'{"a": {"b": 1, "b": 1}}', ["line 1, column 16", "twice"]),
        (b'{"a": 1} x', ["column 10", "text after the end"]),
        (b"[" * 100_000, ["column 66", "nested deeper than 64"]),
        (b'{"a":' * 100_000, ["nested deeper than 64"]),
        (b"[" + b"0," * 2**21 + b"0]", ["more than 2097152 values"]),
        (b'{"a": 9223372036854775808}', ["column 7", "out of range"]),
        (b'{"a": 1e999}', ["column 7", "out of range"]),
        (b'{"a": -1e999}', ["column 7", "out of range"]),
        (b'{"a": NaN}', ["column 7", "wanted a value"]),
        (b'{"a": Infinity}', ["wanted a value"]),
        (b'{"a": 01}', ["column 8"]),
        (b'{"a": +1}', ["wanted a value"]),
        (b'{"a": .5}', ["wanted a value"]),
        (b'{"a": 1.}', ["wanted a digit"]),
        (b'{"a": 1e}', ["wanted a digit"]),
        (b'{"a": 0x10}', ["column 8"]),
        (b'{"a": True}', ["wanted a value"]),
        (b'{"a": tru', ["wanted a value"]),
        (b'{"a" 1}', ["wanted ':' after a key"]),
        (b'{"a": 1 "b": 2}', ["wanted '}' or ','"]),
        (b'{"a": 1,}', ["wanted a key"]),
        (b'{"a": [1,]}', ["wanted a value"]),
        (b"{'a': 1}", ["wanted a key in quotes"]),
        (b'{"a": "x', ["without its closing quote"]),
        (b'{"a": "x\ny"}', ["control character"]),
        (b'{"a": "\\x"}', ["unknown escape"]),
        (b'{"a": "\\u12g4"}', ["four hex digits"]),
        (b'{"a": "\\u12', ["four hex digits"]),
        (b'{"a": "\\u+123"}', ["four hex digits"]),
        (b'{"a": "\\ud800"}', ["surrogate"]),
        (b'{"a": "\\ud800\\u0041"}', ["surrogate"]),
        (b'{"a": "\\udc00"}', ["surrogate"]),
        (b'{"a": "\xc0\xaf"}', ["not UTF-8"]),
        (b'{"a": "\xed\xa0\x80"}', ["not UTF-8"]),
        (b'{"a": "\xf4\x90\x80\x80"}', ["not UTF-8"]),
        (b'{"a": "\xe2\x82', ["not UTF-8"]),
        (b"\xef\xbb\xbf{}", ["column 1", "wanted a value"]),
        (b"// comment\n{}", ["wanted a value"]),
        (b" ", ["end of the text"]),
        (b"3", ["wanted an object, got 3"]),
        (b'"x"', ['wanted an object, got "x"']),
        (b"null", ["wanted an object, got null"]),
    ],
)
def test_json_is_read_strictly(tmp_path: Path, text: bytes, parts: list[str]) -> None:
    (tmp_path / "config.json").write_bytes(text)
    assert_says(refusal(tmp_path), "config.json: is not the JSON it should be", *parts)


def test_json_escapes_mean_what_they_say(tiny: Checkpoint, tmp_path: Path) -> None:
    write(tmp_path, tiny)
    escaped = r'"hidden_act": "\"\\\/\u0041\u00e9\u20ac\ud83c\udf38\udbff\udfff\b\n"'
    text = json.dumps(tiny.config).replace('"hidden_act": "silu"', escaped)
    (tmp_path / "config.json").write_text(text)
    assert_says(refusal(tmp_path), 'got ""\\/Aé€🌸\U0010ffff\\x08\\x0a"')


def test_json_values_are_read_exactly(tiny: Checkpoint, tmp_path: Path) -> None:
    """Escapes, characters beyond the basic plane, spaces, numbers in every notation."""
    write(tmp_path, tiny)
    text = json.dumps(tiny.config, ensure_ascii=True)
    text = text.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps":\t1.25E-5').replace(
        '"hidden_size"', r'"h\u0069dden_size"'
    )
    text = (
        text[:-1]
        + r', "note": "\"\\\/\b\f\n\r\t\u00e9\ud83c\udf38 é🌸", "least": -9223372036854775808}'
        + "\r\n"
    )
    (tmp_path / "config.json").write_text(text)
    config = Weights(str(tmp_path)).config
    assert (config["norm_epsilon"], config["hidden"]) == (1.25e-5, 128)


# The config


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"num_hidden_layers": 0}, ["num_hidden_layers", "from 1 to", "got 0"]),
        ({"hidden_size": -128}, ["hidden_size", "got -128"]),
        ({"hidden_size": 128.5}, ["hidden_size", "wanted an integer", "got 128.5"]),
        ({"hidden_size": "128"}, ["hidden_size", 'got "128"']),
        ({"hidden_size": True}, ["hidden_size", "got true"]),
        ({"hidden_size": 2**31 + 128}, ["hidden_size", "got 2147483776"]),
        ({"hidden_size": 120}, ["hidden_size", "a multiple of 16", "got 120"]),
        ({"vocab_size": 2**40}, ["vocab_size"]),
        ({"vocab_size": []}, ["vocab_size", "got an array"]),
        ({"num_attention_heads": 5}, ["num_key_value_heads", "a divisor of num_attention_heads 5", "got 2"]),
        (
            {"linear_num_key_heads": 3},
            ["linear_num_key_heads", "a divisor of linear_num_value_heads 4", "got 3"],
        ),
        ({"head_dim": 72}, ["head_dim", "a multiple of 16", "got 72"]),
        ({"linear_key_head_dim": 8}, ["linear_key_head_dim", "a multiple of 16", "got 8"]),
        ({"linear_value_head_dim": 100}, ["linear_value_head_dim", "a multiple of 16", "got 100"]),
        ({"linear_conv_kernel_dim": 1}, ["linear_conv_kernel_dim", "at least 2"]),
        ({"num_experts_per_tok": 9}, ["num_experts_per_tok", "at most num_experts 8", "got 9"]),
        ({"moe_intermediate_size": 2**20}, ["moe_intermediate_size"]),
        ({"rms_norm_eps": -1e-6}, ["rms_norm_eps", "wanted a number from 0 to 1"]),
        ({"rms_norm_eps": "1e-6"}, ["rms_norm_eps", 'got "1e-6"']),
        ({"max_position_embeddings": 0}, ["max_position_embeddings"]),
        ({"hidden_act": "gelu"}, ["hidden_act", 'wanted "silu", got "gelu"', "does not compute"]),
        ({"attention_bias": True}, ["attention_bias", "wanted false, got true"]),
        ({"attn_output_gate": False}, ["attn_output_gate", "wanted true, got false"]),
        ({"norm_topk_prob": False}, ["norm_topk_prob", "wanted true, got false"]),
        ({"norm_topk_prob": 1}, ["norm_topk_prob", "wanted true, got 1"]),
        ({"use_sliding_window": True}, ["use_sliding_window"]),
        ({"decoder_sparse_step": 2}, ["decoder_sparse_step", "wanted 1, got 2"]),
        ({"mlp_only_layers": [0]}, ["mlp_only_layers", "an empty array"]),
        ({"layer_types": ["linear_attention"] * 3}, ["layer_types", "4 entries, got 3"]),
        ({"layer_types": ["mamba"] * 4}, ["layer_types", 'unknown kind "mamba"']),
        ({"layer_types": "full_attention"}, ["layer_types", "wanted an array"]),
        ({"layer_types": None, "full_attention_interval": 0}, ["full_attention_interval"]),
        (
            {"rope_parameters": {"rope_type": "yarn"}},
            ["rope_parameters.rope_type", 'wanted "default", got "yarn"'],
        ),
        ({"rope_parameters": {"type": "linear"}}, ["rope_parameters.type", 'got "linear"']),
        (
            {"rope_parameters": None, "rope_scaling": {"type": "yarn", "factor": 4}},
            ["rope_scaling.type", 'got "yarn"'],
        ),
        ({"rope_parameters": 5}, ["rope_parameters", "wanted an object, got 5"]),
        ({"rope_parameters": {"rope_theta": 0}}, ["rope_parameters.rope_theta"]),
        (
            {"rope_parameters": {"partial_rotary_factor": 1.5}},
            ["partial_rotary_factor", "from 0 to 1", "got 1.5"],
        ),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.05}},
            ["partial_rotary_factor", "even number", "makes 3"],
        ),
        ({"rope_parameters": {"partial_rotary_factor": 0}}, ["partial_rotary_factor", "makes 0"]),
        ({"model_type": "qwen3_next"}, ["text_config.model_type", "qwen3_next model; Lily runs qwen3_5_moe"]),
        ({"tie_word_embeddings": "no"}, ["tie_word_embeddings", "wanted true or false"]),
    ],
)
def test_config_that_lily_does_not_run(
    tiny: Checkpoint, tmp_path: Path, change: dict[str, Any], parts: list[str]
) -> None:
    tiny.config["text_config"] |= change
    assert_says(refusal(write(tmp_path, tiny)), "config.json", "text_config.", *parts)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"model_type": "llama"}, ["this is a llama model; Lily runs qwen3_5_moe"]),
        ({"model_type": "qwen3_5"}, ["this is a qwen3_5 model; Lily runs qwen3_5_moe"]),
        ({"model_type": 3}, ["model_type", "got 3"]),
        ({"model_type": None, "text_config": None}, ["model_type", "got nothing"]),
        ({"text_config": [1]}, ["text_config", "wanted an object, got an array"]),
    ],
)
def test_other_architecture_is_named(
    tiny: Checkpoint, tmp_path: Path, change: dict[str, Any], parts: list[str]
) -> None:
    assert_says(
        refusal(write(tmp_path, Checkpoint(tiny.tensors, tiny.config | change))), "config.json", *parts
    )


def test_config_of_other_dimensions_shows_in_the_first_tensor(tiny: Checkpoint, tmp_path: Path) -> None:
    tiny.config["text_config"]["hidden_size"] = 256
    assert_says(
        refusal(write(tmp_path, tiny)), 'norm.weight"', "[256], got BF16 [128]", "Does config.json belong"
    )
