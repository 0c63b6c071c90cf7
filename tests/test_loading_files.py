"""Which files and tensors make a checkpoint: paths, links, shards, the index, what is missing or extra."""

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoint_maker import PREFIX, Checkpoint, Stored, made, write, write_file, write_index
from lily._core import Weights
from lily.errors import LilyError, ModelFilesError
from loading_checks import assert_says, check_bound, refusal


@pytest.fixture
def tiny() -> Checkpoint:
    """A checkpoint to change: the tensors are shared, the dicts are not."""
    return made().copy()


# Where the files lie


@pytest.mark.parametrize(
    "name", ["with spaces", "schön-模型-🌸", 'quote\'s "and" %s %n', os.fsdecode(b"latin-\xe9")]
)
def test_folder_may_have_any_name(tiny: Checkpoint, tmp_path: Path, name: str) -> None:
    try:
        write(tmp_path / name, tiny)
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    check_bound(Weights(str(tmp_path / name)), tiny)
    (tmp_path / name / "model.safetensors").unlink()
    assert_says(
        refusal(tmp_path / name),
        "model.safetensors",
        name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace"),
    )


def test_cache_of_links_loads(tiny: Checkpoint, tmp_path: Path) -> None:
    """The Hugging Face cache, snapshots/<revision>/<name> -> ../../blobs/<hash>, moved as a whole."""
    snapshot, blobs = tmp_path / "hub/snapshots/38740b8", tmp_path / "hub/blobs"
    write(blobs, tiny, shards=2)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(blobs.iterdir())):
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
        file.rename(blobs / str(number))
    (tmp_path / "hub").rename(tmp_path / "moved")
    check_bound(Weights(str(tmp_path / "moved/snapshots/38740b8")), tiny)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "model.safetensors.index.json"])
def test_link_to_nowhere_names_its_target(tiny: Checkpoint, tmp_path: Path, file: str) -> None:
    write(tmp_path, tiny)
    (tmp_path / file).unlink(missing_ok=True)
    (tmp_path / file).symlink_to("../blobs/09f3e6ec")
    assert_says(
        refusal(tmp_path), file, "a link to ../blobs/09f3e6ec, which does not exist", "incomplete download?"
    )


def test_link_to_nowhere_among_shards_names_its_target(tiny: Checkpoint, tmp_path: Path) -> None:
    write(tmp_path, tiny, shards=4)
    (tmp_path / "model-00003-of-00004.safetensors").unlink()
    (tmp_path / "model-00003-of-00004.safetensors").symlink_to("../blobs/3e66de06")
    assert_says(refusal(tmp_path), "missing model-00003-of-00004.safetensors (a link to ../blobs/3e66de06")


def test_read_only_folder_loads(tiny: Checkpoint, tmp_path: Path) -> None:
    folder = write(tmp_path / "checkpoint", tiny)
    for path in (folder / "config.json", folder / "model.safetensors", folder):
        path.chmod(0o555)
    try:
        check_bound(Weights(str(folder)), tiny)
    finally:
        folder.chmod(0o755)


def test_path_may_be_a_path(tiny: Checkpoint, tmp_path: Path) -> None:
    assert Weights(write(tmp_path, tiny)).tensors == len(tiny.tensors)
    with pytest.raises(TypeError):
        Weights(7)  # type: ignore[arg-type]


def test_no_folder(tmp_path: Path) -> None:
    assert_says(refusal(tmp_path / "absent"), "absent: no such folder", "wanted", "Check the path")


def test_file_instead_of_folder(tiny: Checkpoint, tmp_path: Path) -> None:
    assert_says(refusal(write(tmp_path, tiny) / "model.safetensors"), "is not a folder", "config.json")


def test_error_is_a_lily_error(tmp_path: Path) -> None:
    assert issubclass(ModelFilesError, LilyError)
    assert refusal(tmp_path).startswith(str(tmp_path / "config.json") + ": no such file")


# Which files


@pytest.mark.parametrize("index", [True, False])
def test_missing_shards_are_all_listed(tiny: Checkpoint, tmp_path: Path, index: bool) -> None:
    write(tmp_path, tiny, shards=6, index=index)
    (tmp_path / "model-00002-of-00006.safetensors").unlink()
    assert_says(
        refusal(tmp_path), "missing model-00002-of-00006.safetensors (incomplete download?)", "Download it."
    )
    for shard in (1, 4, 5):
        (tmp_path / f"model-{shard:05d}-of-00006.safetensors").unlink()
    listed = re.findall(r"model-\d{5}-of-00006", refusal(tmp_path))
    assert listed == [f"model-{shard:05d}-of-00006" for shard in (1, 2, 4, 5)]


def test_all_shards_missing(tiny: Checkpoint, tmp_path: Path) -> None:
    write(tmp_path, tiny, shards=2)
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    assert_says(
        refusal(tmp_path), "missing model-00001-of-00002.safetensors, model-00002-of-00002.safetensors"
    )


def test_missing_shards_come_before_damaged_ones(tiny: Checkpoint, tmp_path: Path) -> None:
    write(tmp_path, tiny, shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    os.truncate(tmp_path / "model-00003-of-00003.safetensors", 100)
    message = refusal(tmp_path)
    assert_says(
        message, "missing model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors: is cut short"
    )
    assert message.index("00002") < message.index("00003-of-00003")


def test_stale_index_loads_with_a_warning(tiny: Checkpoint, tmp_path: Path) -> None:
    """The index of the original's 26 shards was shipped with a conversion of one file."""
    write(tmp_path, tiny)
    write_index(
        tmp_path,
        {name: f"model-{i % 26 + 1:05d}-of-00026.safetensors" for i, name in enumerate(tiny.tensors)},
    )
    weights = Weights(str(tmp_path))
    check_bound(weights, tiny)
    (warning,) = weights.warnings
    assert_says(
        warning, "index names files that are not here", "model-00001-of-00026.safetensors", "and 21 more"
    )


def test_stale_index_over_incomplete_files_is_an_error(tiny: Checkpoint, tmp_path: Path) -> None:
    del tiny.tensors[PREFIX + "norm.weight"]
    write(tmp_path, tiny)
    write_index(tmp_path, {PREFIX + "norm.weight": "model-00001-of-00002.safetensors"})
    assert_says(refusal(tmp_path), "missing model-00001-of-00002.safetensors (incomplete download?)")


def test_shard_of_vision_tensors_alone_is_not_needed(tiny: Checkpoint, tmp_path: Path) -> None:
    write(tmp_path, tiny)
    home = dict.fromkeys(tiny.tensors, "model.safetensors")
    write_index(tmp_path, home | {"vision_tower.pos_embed.weight": "model-vision.safetensors"})
    (warning,) = Weights(str(tmp_path)).warnings
    assert_says(warning, "model-vision.safetensors")


@pytest.mark.parametrize(
    ("index", "parts"),
    [
        ({"metadata": {}}, ["has no weight_map"]),
        ({"weight_map": {}}, ["its weight_map is empty"]),
        ({"weight_map": ["model.safetensors"]}, ["wanted an object, got an array"]),
        ({"weight_map": {"x": 1}}, ["wanted a string, got 1"]),
        ({"weight_map": {"x": "../secret.safetensors"}}, ["of the same folder", "../secret.safetensors"]),
        ({"weight_map": {"x": "/etc/secret.safetensors"}}, ["of the same folder", "/etc/secret.safetensors"]),
        ({"weight_map": {"x": "pytorch_model.bin"}}, ["wanted a .safetensors file", "pytorch_model.bin"]),
        ({"weight_map": {"x": "a\0.safetensors"}}, ["of the same folder"]),
        ([], ["wanted an object, got an array"]),
    ],
)
def test_damaged_index(tiny: Checkpoint, tmp_path: Path, index: Any, parts: list[str]) -> None:
    (write(tmp_path, tiny) / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_says(refusal(tmp_path), "model.safetensors.index.json", *parts)


def test_index_chooses_between_two_files_that_hold_a_tensor(tiny: Checkpoint, tmp_path: Path) -> None:
    name = PREFIX + "norm.weight"
    zeros = {name: Stored("BF16", np.zeros(128, np.uint16))}
    others = {k: v for k, v in tiny.tensors.items() if k != name}
    write(tmp_path, Checkpoint(others, tiny.config))
    (tmp_path / "model.safetensors").rename(tmp_path / "model-b.safetensors")
    for right, left in (("model-a", "model-c"), ("model-c", "model-a")):
        write_file(tmp_path / f"{right}.safetensors", {name: tiny.tensors[name]})
        write_file(tmp_path / f"{left}.safetensors", zeros | {"vision_tower.x": zeros[name]})
        home = dict.fromkeys(others, "model-b.safetensors") | {"vision_tower.x": f"{left}.safetensors"}
        write_index(tmp_path, home | {name: f"{right}.safetensors"})
        check_bound(Weights(str(tmp_path)), tiny)
    (tmp_path / "model.safetensors.index.json").unlink()
    assert_says(refusal(tmp_path), name, "is also in", "Remove the files of the other conversion")


def test_two_spellings_of_one_tensor(tiny: Checkpoint, tmp_path: Path) -> None:
    tiny.tensors["model.norm.weight"] = tiny.tensors[PREFIX + "norm.weight"]
    assert_says(refusal(write(tmp_path, tiny)), "model.norm.weight", "is also in", PREFIX + "norm.weight")


@pytest.mark.parametrize("name", [None, "pytorch_model.bin", "qwen.gguf", "consolidated.safetensors"])
def test_folder_without_weights(tiny: Checkpoint, tmp_path: Path, name: str | None) -> None:
    (write(tmp_path, tiny) / "model.safetensors").unlink()
    if name:
        (tmp_path / name).write_bytes(b"x")
    assert_says(
        refusal(tmp_path),
        "has no weights",
        "wanted model.safetensors",
        f"got {name or 'no such file'}".replace(f"got {name}", f'got "{name}"'),
    )


# Which tensors


def test_missing_tensors_are_counted_and_shown(tiny: Checkpoint, tmp_path: Path) -> None:
    gone = [name for name in tiny.tensors if ".layers.3." in name]
    for name in gone:
        del tiny.tensors[name]
    message = refusal(write(tmp_path, tiny))
    assert_says(
        message,
        f"{len(gone)} tensors are missing",
        f"and {len(gone) - 5} more",
        "config.json says 4 layers, the files hold 3",
    )
    assert len(re.findall(r"layers\.3\.", message)) == 5


@pytest.mark.parametrize("part", ["weight", "scales", "biases"])
def test_missing_part_is_named(tiny: Checkpoint, tmp_path: Path, part: str) -> None:
    del tiny.tensors[f"{PREFIX}layers.2.mlp.gate.{part}"]
    message = refusal(write(tmp_path, tiny))
    assert_says(message, f"1 tensors are missing: layers.2.mlp.gate.{part}.", "Download the checkpoint again")


def test_missing_head_asks_about_tying(tiny: Checkpoint, tmp_path: Path) -> None:
    for part in ("weight", "scales", "biases"):
        del tiny.tensors[f"language_model.lm_head.{part}"]
    assert_says(refusal(write(tmp_path, tiny)), "lm_head.weight", "Should tie_word_embeddings be true")


def test_extra_tensors_are_counted_and_shown(tiny: Checkpoint, tmp_path: Path) -> None:
    extra = {
        f"{PREFIX}layers.{i}.self_attn.q_proj.bias": tiny.tensors[PREFIX + "norm.weight"] for i in range(7)
    }
    weights = Weights(str(write(tmp_path, Checkpoint(tiny.tensors | extra, tiny.config))))
    (warning,) = weights.warnings
    assert_says(
        warning,
        "7 tensors belong to no part of the model",
        f"{PREFIX}layers.0.self_attn.q_proj.bias",
        "and 2 more",
    )
    check_bound(weights, tiny)


def test_names_of_another_model_are_not_taken_for_ours(tiny: Checkpoint, tmp_path: Path) -> None:
    tiny.tensors["audio_tower.norm.weight"] = tiny.tensors.pop(PREFIX + "norm.weight")
    assert_says(refusal(write(tmp_path, tiny)), "1 tensors are missing: norm.weight")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.language_model.layers.0.mlp.experts.gate_up_proj", (8, 128, 128)),
        ("model.layers.0.mlp.experts.0.gate_proj.weight", (64, 128)),
        ("model.language_model.layers.0.linear_attn.conv1d.weight", (512, 1, 4)),
    ],
)
def test_hugging_face_layout_is_named(
    tiny: Checkpoint, tmp_path: Path, name: str, shape: tuple[int, ...]
) -> None:
    tiny.tensors.pop(PREFIX + "layers.0.linear_attn.conv1d.weight")
    tensors = tiny.tensors | {name: Stored("BF16", np.zeros(shape, np.uint16))}
    message = refusal(write(tmp_path, Checkpoint(tensors, tiny.config)))
    assert_says(message, "Hugging Face layout", "wanted MLX layout", name, "mlx_lm.convert")
