"""Rewrites a checkpoint as the published one lies on disk: shards, vision and multi-token-prediction tensors.

Standard library only, on bytes, so that nothing of ours reads what it writes.
"""

import json
import shutil
from pathlib import Path

# name: (dtype, shape, bytes)
Tensors = dict[str, tuple[str, list[int], bytes]]

EXTRA = {
    "vision_tower.patch_embed.proj.weight": [32, 2, 4, 4, 3],
    "vision_tower.pos_embed.weight": [16, 32],
    "vision_tower.blocks.0.norm1.weight": [32],
    "language_model.mtp.fc.weight": [64, 128],
    "language_model.mtp.layers.0.input_layernorm.weight": [64],
}


def read(file: Path) -> Tensors:
    """Read every tensor of a safetensors file."""
    raw = file.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    header.pop("__metadata__", None)
    return {
        name: (entry["dtype"], entry["shape"], raw[start + begin : start + end])
        for name, entry in header.items()
        for begin, end in [entry["data_offsets"]]
    }


def write(file: Path, tensors: Tensors) -> None:
    """Write a safetensors file, its header padded to eight bytes as the format asks."""
    header: dict[str, object] = {"__metadata__": {"format": "mlx"}}
    end = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(data)]}
        end += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for _, _, data in tensors.values():
            out.write(data)


def vlm_style(source: Path, destination: Path, shards: int = 3) -> Path:
    """Copy a one-file checkpoint as mlx-vlm writes it, and return the copy's directory.

    Tensors are dealt out in turn, so that weight, scales and biases of a matrix lie in different shards; the
    vision and multi-token-prediction tensors are NaN throughout, so that no use of them goes unseen.
    """
    shutil.copytree(source, destination)
    tensors = read(destination / "model.safetensors")
    (destination / "model.safetensors").unlink()
    for name, shape in EXTRA.items():
        count = 1
        for n in shape:
            count *= n
        tensors[name] = ("BF16", shape, b"\xc0\x7f" * count)
    names, found = sorted(tensors), {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        write(destination / file, {name: tensors[name] for name in names[i::shards]})
        found |= dict.fromkeys(names[i::shards], file)
    total = sum(len(data) for _, _, data in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(found.items()))}
    (destination / "model.safetensors.index.json").write_text(json.dumps(index, indent=4), encoding="utf-8")
    config = json.loads((destination / "config.json").read_text(encoding="utf-8"))
    config["vision_config"] = {"model_type": "qwen3_5_moe", "depth": 1, "hidden_size": 32}
    (destination / "config.json").write_text(json.dumps(config, indent=4), encoding="utf-8")
    return destination
