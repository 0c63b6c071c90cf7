"""Synthetic checkpoints: named and sized as the published one, valid, of the statistics they promise."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors import safe_open
from tokenizers import Tokenizer

from bench import synthetic, synthetic_config
from lily import reference

pytestmark = pytest.mark.unsanitized

# What is published of mlx-community/Qwen3.6-35B-A3B-4bit at revision 38740b84.
PUBLISHED_BYTES = 20_401_929_952
PUBLISHED_SHARDS = [5_288_196_018, 5_368_472_749, 5_368_324_139, 4_377_211_365]
PUBLISHED_INVENTORY = "f25b787cfe2c6848302b9bbc1d382c3cbe2affc17ba326429b492e428ed6399e"  # sha256
PUBLISHED_GENERATION_CONFIG = "023756cfadf88e5bf69eefeee3e172f38c448d64"  # git's hash of the file

SMALL: dict[str, Any] = {"layers": 4, "experts": 16, "vocab": 1024}
SHARD_BYTES = 60 << 20  # parts some companions


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Write four layers of evenly used experts, with vision tensors, in several shards."""
    directory = tmp_path_factory.mktemp("plain")
    synthetic.write(directory, **SMALL, vision=True, shard_bytes=SHARD_BYTES)
    yield directory
    for file in directory.iterdir():
        file.unlink()  # pytest keeps the directories of three runs


@pytest.fixture(scope="module")
def skewed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Write two layers of 64 experts whose loads fall with their rank."""
    directory = tmp_path_factory.mktemp("skewed")
    synthetic.write(directory, layers=2, experts=64, vocab=1024, skew=1.5)
    yield directory
    for file in directory.iterdir():
        file.unlink()


def total(tensors: list[synthetic.TensorInfo]) -> int:
    return sum(map(synthetic.bytes_of, tensors))


# ---- the published inventory


def test_inventory_is_the_published_one() -> None:
    tensors = synthetic.inventory()
    vision = [tensor for tensor in tensors if tensor[0].startswith("vision_tower.")]
    text = [tensor for tensor in tensors if tensor[0].startswith("language_model.")]
    assert len({name for name, _, _ in tensors}) == len(tensors) == 2090
    assert (len(text), total(text)) == (1757, 19_508_787_456)
    assert (len(vision), total(vision)) == (333, 893_142_496)
    assert total(tensors) == PUBLISHED_BYTES
    # The whole list, of the published headers and of ours, by name, type and shape in the order of names.
    listed = "\n".join(
        f"{name} {dtype} {'x'.join(map(str, shape))}" for name, dtype, shape in sorted(tensors)
    )
    assert hashlib.sha256(listed.encode()).hexdigest() == PUBLISHED_INVENTORY


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("language_model.lm_head.weight", "U32", (248320, 256)),
        ("language_model.model.embed_tokens.scales", "BF16", (248320, 32)),
        ("language_model.model.layers.0.linear_attn.conv1d.weight", "BF16", (8192, 4, 1)),
        ("language_model.model.layers.38.linear_attn.in_proj_a.biases", "BF16", (32, 32)),
        ("language_model.model.layers.39.self_attn.q_proj.weight", "U32", (8192, 256)),
        ("language_model.model.layers.39.mlp.gate.weight", "U32", (256, 512)),
        ("language_model.model.layers.7.mlp.shared_expert_gate.weight", "U32", (1, 512)),
        ("language_model.model.layers.7.mlp.switch_mlp.down_proj.weight", "U32", (256, 2048, 64)),
        ("vision_tower.merger.linear_fc2.weight", "BF16", (2048, 4608)),
    ],
)
def test_inventory_has_the_published_shapes(name: str, dtype: str, shape: tuple[int, ...]) -> None:
    assert (name, dtype, shape) in synthetic.inventory()


def test_shards_are_cut_where_the_published_ones_are() -> None:
    parts = synthetic.shards(synthetic.inventory())
    sizes = [len(synthetic.header(part)) + total(part) for part in parts]
    # MLX stores a shard's tensors in the order of a hash table, which changes how many digits the offsets
    # have. That is hundreds of bytes; the smallest matrix in another shard would be thousands.
    for size, published in zip(sizes, PUBLISHED_SHARDS, strict=True):
        assert abs(size - published) < 600
    companions = [
        "language_model.model.layers.20.linear_attn.in_proj_qkv." + part for part in ("scales", "biases")
    ]
    assert companions[0] == parts[1][-1][0]
    assert companions[1] == parts[2][0][0]


def test_tensor_data_is_never_aligned() -> None:
    for layers in range(1, 9):
        assert len(synthetic.header(synthetic.inventory(layers=layers))) % 4 == 1


def test_generation_config_is_the_published_file(tmp_path: Path) -> None:
    synthetic_config.write_companions(tmp_path, 40, 256, synthetic_config.VOCAB)
    content = (tmp_path / "generation_config.json").read_bytes()
    blob = b"blob %d\0" % len(content) + content
    assert hashlib.sha1(blob).hexdigest() == PUBLISHED_GENERATION_CONFIG


def test_config_overrides_two_modules_of_each_layer() -> None:
    config = synthetic_config.config(40, 256, synthetic_config.VOCAB)
    overrides = {name: value for name, value in config["quantization"].items() if isinstance(value, dict)}
    columns = {name: shape[-1] for name, _, shape in synthetic.inventory()}
    paths = [name.removesuffix(".scales") for name in columns if name.endswith(".scales")]
    # 64 values of 8 bits are 16 words, and have one scale.
    eight_bit = {path for path in paths if columns[f"{path}.weight"] == 16 * columns[f"{path}.scales"]}
    assert len(overrides) == 80
    assert set(overrides) == eight_bit
    assert all(value == {"group_size": 64, "bits": 8} for value in overrides.values())
    assert config["text_config"]["layer_types"].count("full_attention") == 10


# ---- a written checkpoint


def test_files_are_valid_and_complete(plain: Path) -> None:
    index = json.loads((plain / "model.safetensors.index.json").read_text())
    found = {}
    for file in sorted(plain.glob("*.safetensors")):
        with safe_open(file, framework="np") as shard:
            assert shard.metadata() == {"format": "mlx"}
            for name in shard.keys():  # noqa: SIM118, it is not a mapping
                part = shard.get_slice(name)
                assert index["weight_map"][name] == file.name
                found[name] = (part.get_dtype(), tuple(part.get_shape()))
    wanted = synthetic.inventory(**SMALL)
    assert found == {name: (dtype, shape) for name, dtype, shape in wanted}
    assert len(index["weight_map"]) == len(found)
    assert index["metadata"]["total_size"] == total(wanted)


def test_companions_are_parted(plain: Path) -> None:
    shard_of = json.loads((plain / "model.safetensors.index.json").read_text())["weight_map"]
    paths = [name.removesuffix(".scales") for name in shard_of if name.endswith(".scales")]
    assert any(shard_of[f"{path}.weight"] != shard_of[f"{path}.biases"] for path in paths)


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    hashes = []
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        synthetic.write(tmp_path / name, layers=1, experts=8, vocab=600, seed=seed)
        hashes.append(
            [hashlib.sha256(file.read_bytes()).digest() for file in sorted((tmp_path / name).iterdir())]
        )
    assert hashes[0] == hashes[1]
    assert hashes[0] != hashes[2]


def test_tokenizer_reads_and_writes_any_text(plain: Path) -> None:
    tokenizer = Tokenizer.from_file(str(plain / "tokenizer.json"))
    text = "<|im_start|>user\nEin Café, 你好 🌷\x00\t<|im_end|>"
    ids = tokenizer.encode(text).ids
    added = synthetic_config.added_token_ids(SMALL["vocab"])
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert (ids[0], ids[-1]) == (added["<|im_start|>"], added["<|im_end|>"])
    assert len(ids) == 2 + len(text.encode()) - len("<|im_start|><|im_end|>")
    assert {token: tokenizer.token_to_id(token) for token in added} == added
    eos = json.loads((plain / "generation_config.json").read_text())["eos_token_id"]
    assert [tokenizer.id_to_token(k) for k in eos] == ["<|im_end|>", "<|endoftext|>"]


def test_full_tokenizer_has_the_published_ids(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(synthetic_config.tokenizer(synthetic_config.VOCAB)))
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 248077
    published = {"<|endoftext|>": 248044, "<|im_end|>": 248046, "<think>": 248068, "<|audio_pad|>": 248076}
    assert {token: tokenizer.token_to_id(token) for token in published} == published


@pytest.mark.parametrize(
    ("thinking", "end"), [({}, "<think>\n"), ({"enable_thinking": False}, "<think>\n\n</think>\n\n")]
)
def test_chat_template(plain: Path, thinking: dict[str, bool], end: str) -> None:
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((plain / "chat_template.jinja").read_text())
    messages = [{"role": "system", "content": " Be brief.\n"}, {"role": "user", "content": "Hello"}]
    assert template.render(messages=messages, add_generation_prompt=True, **thinking) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
        + end
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": 0}, "at least 1, 8, 532, got 0, 16, 1024"),
        ({"experts": 7}, "at least 1, 8, 532, got 4, 7, 1024"),
        ({"vocab": 531}, "at least 1, 8, 532, got 4, 16, 531"),
        ({"skew": -1.0}, "skew: wanted 0 or more, got -1.0"),
    ],
)
def test_impossible_sizes_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        synthetic.write(tmp_path / "refused", **{**SMALL, **options})
    assert not (tmp_path / "refused").exists()


def test_a_directory_in_use_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(FileExistsError, match="wanted an empty directory"):
        synthetic.write(tmp_path, **SMALL)
    assert [file.name for file in tmp_path.iterdir()] == ["mine"]


# ---- statistics


def test_matrices_have_zero_mean_and_the_gain_of_their_inputs(plain: Path) -> None:
    model = reference.Model(plain, "f32")
    for layer, name, gain in [
        (0, "linear_attn.in_proj_qkv", 1.0),
        (3, "self_attn.v_proj", 1.0),
        (2, "mlp.gate", synthetic.ROUTER_GAIN),
        (1, "mlp.switch_mlp.up_proj", 1.0),
    ]:
        matrix = model.layers[layer].rows(name, slice(None))
        deviation = gain / np.sqrt(matrix.shape[-1])
        assert matrix.std() == pytest.approx(deviation, rel=0.02)
        assert abs(matrix.mean()) < 0.02 * deviation
    scales = model.weights.tensors["model.layers.0.linear_attn.in_proj_z.scales"]
    assert 0.45 < np.mean(scales >> 15) < 0.55  # a scale's sign is either, as the quantiser leaves it


def test_no_two_experts_are_alike(plain: Path) -> None:
    words = reference.Model(plain, "f32").weights.tensors["model.layers.0.mlp.switch_mlp.gate_proj.weight"]
    rows = words.reshape(-1, words.shape[-1])
    assert len(np.unique(rows, axis=0)) == len(rows)


def test_residual_grows_from_one_to_root_two(plain: Path) -> None:
    model = reference.Model(plain, "f32")
    layers = model.config.layers
    planned = 1 / np.sqrt(2 * layers)
    x = reference.embed(model.weights, np.arange(0, 960, 10))
    assert rms(x) == pytest.approx(1, rel=0.02)
    for index, state in enumerate(model.new_states()):
        mixed, _ = model.mix(index, x, state)
        # Attention averages values over the tokens before, which only ever lowers a mixer's RMS.
        low = 0.3 if model.config.attention[index] else 0.9
        assert low * planned < rms(mixed - x) < 1.1 * planned
        x = model.moe(index, mixed)
        assert rms(x - mixed) == pytest.approx(planned, rel=0.2)
        assert rms(x) == pytest.approx(np.sqrt(1 + (index + 1) / layers), rel=0.05)
    assert reference.head(model.weights, x).std() == pytest.approx(synthetic.HEAD_GAIN, rel=0.05)


def rms(x: NDArray[np.float32]) -> float:
    return float(np.sqrt(np.mean(x * x)))


def loads(directory: Path) -> list[NDArray[np.int64]]:
    """Return how many of 256 tokens each expert gets, (E), for each of the first two layers."""
    model = reference.Model(directory, "f32")
    x = reference.embed(model.weights, np.random.default_rng(1).integers(0, 1024, 256))
    counts = []
    for index, state in enumerate(model.new_states()[:2]):
        x, _ = model.mix(index, x, state)
        _, router, _, _ = reference.moe_route(model.layers[index], x)
        chosen = np.argsort(-router, axis=-1)[:, : model.config.experts_per_token]
        counts.append(np.bincount(chosen.ravel(), minlength=model.config.experts))
        x = model.moe(index, x) if index == 0 else x
    return counts


def test_skewed_routing_is_skewed_and_plain_routing_is_not(plain: Path, skewed: Path) -> None:
    for counts in loads(plain):
        assert counts.max() < 1.6 * counts.mean()
    skewed_loads = loads(skewed)
    for counts in skewed_loads:
        falling = np.sort(counts)[::-1]
        assert falling[0] > 5 * counts.mean()  # the most there can be is 64 / 8 times the mean
        assert falling[:8].sum() > 0.45 * counts.sum()
        assert np.median(counts) < 0.6 * counts.mean()
    # Each layer has its own favourites.
    assert np.argmax(skewed_loads[0]) != np.argmax(skewed_loads[1])


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "made"
    arguments = [str(directory), "--layers", "1", "--experts", "8", "--vocab", "600", "--seed", "2"]
    synthetic.main(arguments)
    bytes_made = total(synthetic.inventory(1, 8, 600, vision=False))
    assert f"{bytes_made:,} bytes of tensors" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        synthetic.main(arguments)
    assert "wanted an empty directory" in capsys.readouterr().err
