"""Writes checkpoints that have the 35B's real widths and random weights, in the layout of the published one.

    python -m bench.synthetic DIRECTORY [--layers 4] [--experts 256] [--vocab 248320] [--seed 0] [--skew 0]
                              [--vision]

Owns the list of published tensors (inventory) and the statistics of the random ones. Needs NumPy only. The
files beside the weights, such as config.json and the tokenizer, are in synthetic_config.py.

Statistics. A matrix has zero mean and a variance of gain^2 / columns, so it turns an input of RMS 1 into an
output of RMS gain. The last matrix of every block is scaled so that the block adds about 1 / (2 layers) to
the mean square of the residual stream, which therefore grows from RMS 1 at the embedding to about sqrt(2)
after the last layer.

Routing. With skew 0 all experts are equally likely. With skew S the rank-r expert of a layer (each layer has
its own ranking) gets -S ln r added to its logit, which makes loads fall about as r^-S with 256 experts. The
router has no bias vector for that, so it goes along a direction that all tokens share: the embedding has
+-SHARED added in alternating groups of 64 dimensions, and a router row has a multiple of this pattern, both
in the group biases.

Bytes. All weight bytes are drawn fresh, so that no two experts or layers are alike; scales and biases come
from a table of 256 pairs. A tensor's values depend on the seed, its name and the options, not on the tensors
around it.
"""

import argparse
import json
import math
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench import run, synthetic_config
from bench.synthetic_config import (
    CONV_TAPS,
    EXPERT_WIDTH,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KEY_DIM,
    KEY_HEADS,
    KV_HEADS,
    SHARED_WIDTH,
    VALUE_DIM,
    VALUE_HEADS,
    VISION_DEPTH,
    VISION_HIDDEN,
    VISION_WIDTH,
    is_attention,
)

GROUP = 64  # inputs that share a scale and a bias
SHARD_BYTES = 5 << 30  # mlx-vlm starts a new shard before one grows past this
ITEM_BYTES = {"U32": 4, "BF16": 2}

ROUTER_GAIN = 2.0  # standard deviation of a router logit
HEAD_GAIN = 2.0  # standard deviation of an output logit
SHARED = 0.3  # what every embedding row has in common when routing is skewed
SILU_RMS = 0.596  # root mean square of silu(z) for z ~ N(0, 1)
SIGMOID_RMS = 0.542  # the same for sigmoid(z)
ROUTED_RMS = 0.5  # about the root of the sum of the squared weights of a token's 8 experts, at ROUTER_GAIN

Fill = Callable[[np.random.Generator, int], NDArray[np.float64]]
TensorInfo = tuple[str, str, tuple[int, ...]]  # name, dtype, shape


class Vector(NamedTuple):
    """A tensor stored as bf16. Without a fill it is a hole in the file: zeros that take no disk."""

    name: str
    shape: tuple[int, ...]
    fill: Fill | None = None

    def tensors(self) -> Iterator[TensorInfo]:
        """Yield its name, dtype and shape."""
        yield self.name, "BF16", self.shape


class Matrix(NamedTuple):
    """A matrix stored as weight, scales and biases; shape (..., rows, columns) before packing."""

    path: str
    shape: tuple[int, ...]
    gain: float = 1.0  # standard deviation of an element times sqrt(columns)
    bits: int = 4
    offset: NDArray[np.float64] | None = (
        None  # added to the elements of a group, broadcast over (rows, groups)
    )

    def tensors(self) -> Iterator[TensorInfo]:
        """Yield name, dtype and shape of the three tensors."""
        *rows, columns = self.shape
        yield f"{self.path}.weight", "U32", (*rows, columns * self.bits // 32)
        yield f"{self.path}.scales", "BF16", (*rows, columns // GROUP)
        yield f"{self.path}.biases", "BF16", (*rows, columns // GROUP)


Module = Vector | Matrix


def bytes_of(tensor: TensorInfo) -> int:
    """Return the bytes that a tensor takes in a file."""
    _, dtype, shape = tensor
    return math.prod(shape) * ITEM_BYTES[dtype]


# Fills of the small vectors, in the ranges of a trained model.


def _near_one(rng: np.random.Generator, n: int) -> NDArray[np.float64]:
    return 1 + 0.1 * rng.standard_normal(n)


def _sharp(rng: np.random.Generator, n: int) -> NDArray[np.float64]:
    """Return norm weights that give scores a deviation of 2.25, so that long contexts do not average out."""
    return 1.5 + 0.1 * rng.standard_normal(n)


def _taps(rng: np.random.Generator, n: int) -> NDArray[np.float64]:
    return rng.standard_normal(n) / math.sqrt(CONV_TAPS)


def _log_rate(rng: np.random.Generator, n: int) -> NDArray[np.float64]:
    return np.log(rng.uniform(1, 16, n))


def _step_bias(rng: np.random.Generator, n: int) -> NDArray[np.float64]:
    """Return the inverse softplus of steps between 0.001 and 0.1, even in their logarithm."""
    step = np.exp(rng.uniform(math.log(1e-3), math.log(1e-1), n))
    return step + np.log(-np.expm1(-step))


# The list of modules, in the order in which mlx-vlm stored them: it decides which tensors share a shard.


def _vision() -> Iterator[Module]:
    wide, merged, prefix = VISION_HIDDEN, 4 * VISION_HIDDEN, "vision_tower."

    def both(path: str, rows: int, *columns: int) -> Iterator[Vector]:
        yield Vector(f"{prefix}{path}.weight", (rows, *columns))
        yield Vector(f"{prefix}{path}.bias", (rows,))

    yield from both("patch_embed.proj", wide, 2, 16, 16, 3)
    yield Vector(f"{prefix}pos_embed.weight", (synthetic_config.VISION_POSITIONS, wide))
    for block in range(VISION_DEPTH):
        yield from both(f"blocks.{block}.norm1", wide)
        yield from both(f"blocks.{block}.norm2", wide)
        yield from both(f"blocks.{block}.attn.qkv", 3 * wide, wide)
        yield from both(f"blocks.{block}.attn.proj", wide, wide)
        yield from both(f"blocks.{block}.mlp.linear_fc1", VISION_WIDTH, wide)
        yield from both(f"blocks.{block}.mlp.linear_fc2", wide, VISION_WIDTH)
    yield from both("merger.norm", wide)
    yield from both("merger.linear_fc1", merged, merged)
    yield from both("merger.linear_fc2", HIDDEN, merged)


def _delta(prefix: str, branch: float) -> Iterator[Module]:
    value = VALUE_HEADS * VALUE_DIM
    channels = 2 * KEY_HEADS * KEY_DIM + value
    yield Vector(f"{prefix}conv1d.weight", (channels, CONV_TAPS, 1), _taps)
    yield Matrix(f"{prefix}in_proj_qkv", (channels, HIDDEN))
    yield Matrix(f"{prefix}in_proj_z", (value, HIDDEN))
    yield Matrix(f"{prefix}in_proj_b", (VALUE_HEADS, HIDDEN))
    yield Matrix(f"{prefix}in_proj_a", (VALUE_HEADS, HIDDEN))
    yield Vector(f"{prefix}dt_bias", (VALUE_HEADS,), _step_bias)
    yield Vector(f"{prefix}A_log", (VALUE_HEADS,), _log_rate)
    yield Vector(f"{prefix}norm.weight", (VALUE_DIM,), _near_one)
    # The delta rule's output is normalised to RMS 1 and multiplied by silu(z).
    yield Matrix(f"{prefix}out_proj", (HIDDEN, value), branch / SILU_RMS)


def _attention(prefix: str, branch: float) -> Iterator[Module]:
    yield Matrix(f"{prefix}q_proj", (2 * HEADS * HEAD_DIM, HIDDEN))
    yield Matrix(f"{prefix}k_proj", (KV_HEADS * HEAD_DIM, HIDDEN))
    yield Matrix(f"{prefix}v_proj", (KV_HEADS * HEAD_DIM, HIDDEN))
    # Values of RMS 1 times sigmoid(gate); the more positions are averaged, the smaller the branch.
    yield Matrix(f"{prefix}o_proj", (HIDDEN, HEADS * HEAD_DIM), branch / SIGMOID_RMS)
    yield Vector(f"{prefix}q_norm.weight", (HEAD_DIM,), _sharp)
    yield Vector(f"{prefix}k_norm.weight", (HEAD_DIM,), _sharp)


def _moe(
    prefix: str, branch: float, experts: int, preference: NDArray[np.float64] | None
) -> Iterator[Module]:
    # Routed and shared experts have the same gain; their outputs are independent, so their squares add.
    down = branch / SILU_RMS / math.hypot(ROUTED_RMS, SIGMOID_RMS)
    yield Matrix(f"{prefix}gate", (experts, HIDDEN), ROUTER_GAIN, bits=8, offset=preference)
    yield Matrix(f"{prefix}switch_mlp.gate_proj", (experts, EXPERT_WIDTH, HIDDEN))
    yield Matrix(f"{prefix}switch_mlp.up_proj", (experts, EXPERT_WIDTH, HIDDEN))
    yield Matrix(f"{prefix}switch_mlp.down_proj", (experts, HIDDEN, EXPERT_WIDTH), down)
    yield Matrix(f"{prefix}shared_expert.gate_proj", (SHARED_WIDTH, HIDDEN))
    yield Matrix(f"{prefix}shared_expert.down_proj", (HIDDEN, SHARED_WIDTH), down)
    yield Matrix(f"{prefix}shared_expert.up_proj", (SHARED_WIDTH, HIDDEN))
    yield Matrix(f"{prefix}shared_expert_gate", (1, HIDDEN), bits=8)


def _pattern() -> NDArray[np.float64]:
    """Return the sign of each group of 64 dimensions in the direction that all tokens share, (groups)."""
    return np.where(np.arange(HIDDEN // GROUP) % 2, -1.0, 1.0)


def _preference(experts: int, skew: float, rms: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Return the router offsets that add -skew ln(rank) to the logits, (experts, groups).

    rms: of the residual stream in front of the router, by which its norm divides the shared direction.
    """
    logit = -skew * np.log(1 + rng.permutation(experts))
    logit -= logit.mean()
    return (logit * rms / (HIDDEN * SHARED))[:, None] * _pattern()


def _text(layers: int, experts: int, vocab: int, seed: int, skew: float) -> Iterator[Module]:
    shared = SHARED * _pattern()[None] if skew else None
    own = math.sqrt(1 - SHARED**2) if skew else 1.0  # what leaves the embedding's RMS at 1
    model = "language_model.model."
    branch = 1 / math.sqrt(2 * layers)
    yield Matrix(f"{model}embed_tokens", (vocab, HIDDEN), own * math.sqrt(HIDDEN), offset=shared)
    for layer in range(layers):
        prefix = f"{model}layers.{layer}."
        if is_attention(layer):
            yield from _attention(f"{prefix}self_attn.", branch)
        else:
            yield from _delta(f"{prefix}linear_attn.", branch)
        yield Vector(f"{prefix}input_layernorm.weight", (HIDDEN,), _near_one)
        yield Vector(f"{prefix}post_attention_layernorm.weight", (HIDDEN,), _near_one)
        preference = None
        if skew:
            rms = math.sqrt(
                1 + (2 * layer + 1) / (2 * layers)
            )  # of the residual that this layer's router sees
            preference = _preference(experts, skew, rms, _generator(seed, f"{prefix}preference"))
        yield from _moe(f"{prefix}mlp.", branch, experts, preference)
    yield Vector(f"{model}norm.weight", (HIDDEN,), _near_one)
    yield Matrix("language_model.lm_head", (vocab, HIDDEN), HEAD_GAIN)


def inventory(
    layers: int = 40, experts: int = 256, vocab: int = synthetic_config.VOCAB, vision: bool = True
) -> list[TensorInfo]:
    """List a checkpoint's tensors as (name, dtype, shape) in stored order; by default the published 35B's."""
    modules = [*(_vision() if vision else ()), *_text(layers, experts, vocab, seed=0, skew=0)]
    return [tensor for module in modules for tensor in module.tensors()]


def shards(tensors: Iterable[TensorInfo], limit: int = SHARD_BYTES) -> list[list[TensorInfo]]:
    """Cut tensors, in their order, into shards of at most `limit` bytes; scales may leave their weight."""
    parts: list[list[TensorInfo]] = [[]]
    filled = 0
    for tensor in tensors:
        if parts[-1] and filled + bytes_of(tensor) > limit:
            parts.append([])
            filled = 0
        parts[-1].append(tensor)
        filled += bytes_of(tensor)
    return parts


def header(tensors: Iterable[TensorInfo]) -> bytes:
    """Return the beginning of a shard: the length of its table, then the table.

    MLX does not align tensor data, and in none of the published shards does it begin at a multiple of 4. The
    table is padded so that it never does here either: readers must cope, and their speed must include it.
    """
    table: dict[str, object] = {"__metadata__": {"format": "mlx"}}
    end = 0
    for tensor in tensors:
        name, dtype, shape = tensor
        start, end = end, end + bytes_of(tensor)
        table[name] = {"data_offsets": [start, end], "dtype": dtype, "shape": shape}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * ((1 - len(text)) % 4)
    return struct.pack("<Q", len(text)) + text


def _generator(seed: int, name: str) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64([seed, zlib.crc32(name.encode())]))


def _bytes(rng: np.random.Generator, n: int) -> NDArray[np.uint8]:
    words = rng.bit_generator.random_raw(-(-n // 8))  # three times as fast as Generator.bytes
    return np.asarray(words, dtype="<u8").view(np.uint8)[:n]


def _bf16(values: NDArray[np.float64]) -> NDArray[np.uint16]:
    """Round to bfloat16, ties to even; returned as its 16 bits."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype("<u2")


def _draw(module: Module, seed: int) -> Iterator[NDArray[np.generic] | None]:
    """Yield the contents of a module's tensors in the order of module.tensors(); None is a hole."""
    if isinstance(module, Vector):
        rng = _generator(seed, module.name)
        yield None if module.fill is None else _bf16(module.fill(rng, math.prod(module.shape)))
        return
    rng = _generator(seed, module.path)
    weight, scales, _ = module.tensors()
    yield _bytes(rng, bytes_of(weight))

    # q is even over 0 ... 2^bits - 1, so its mean is `middle` and its variance (4^bits - 1) / 12.
    middle = (2**module.bits - 1) / 2
    deviation = math.sqrt((4**module.bits - 1) / 12)
    spread = np.linspace(0.75, 1.25, 128)
    spread /= np.sqrt((spread**2).mean())
    pairs = np.concatenate([spread, -spread]) * (module.gain / math.sqrt(module.shape[-1]) / deviation)
    chosen = _bytes(rng, bytes_of(scales) // 2)
    yield _bf16(pairs)[chosen]
    if module.offset is None:
        yield _bf16(-middle * pairs)[chosen]
    else:
        yield _bf16((-middle * pairs)[chosen].reshape(-1, module.shape[-1] // GROUP) + module.offset)


class _ShardWriter:
    """Writes tensors one after another into shard files planned beforehand."""

    def __init__(self, directory: Path, plan: list[list[TensorInfo]]) -> None:
        names = [f"model-{k + 1:05d}-of-{len(plan):05d}.safetensors" for k in range(len(plan))]
        self.weight_map = {name: file for file, part in zip(names, plan, strict=True) for name, _, _ in part}
        self._directory = directory
        self._plan = dict(zip(names, plan, strict=True))
        self._file: BinaryIO | None = None
        self._open = ""

    def write(self, tensor: TensorInfo, values: NDArray[np.generic] | None) -> None:
        shard = self.weight_map[tensor[0]]
        if shard != self._open:
            self.close()
            self._file = (self._directory / shard).open("wb")
            self._open = shard
            self._file.write(header(self._plan[shard]))
        assert self._file is not None
        if values is None:
            self._file.seek(bytes_of(tensor), 1)
        else:
            self._file.write(np.ascontiguousarray(values).data.cast("B"))

    def close(self) -> None:
        if self._file is not None:
            self._file.truncate()  # a shard that ends in a hole gets its full length
            self._file.close()
            self._file = None


def write(
    directory: str | Path,
    layers: int = 4,
    experts: int = 256,
    vocab: int = synthetic_config.VOCAB,
    seed: int = 0,
    skew: float = 0.0,
    vision: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> int:
    """Write a checkpoint into a new or empty directory; return the bytes of its tensors.

    Raises ValueError for sizes that the architecture or the tokenizer cannot have, FileExistsError for a
    directory that has files in it.
    """
    if layers < 1 or experts < synthetic_config.EXPERTS_PER_TOKEN or vocab < synthetic_config.SMALLEST_VOCAB:
        raise ValueError(
            f"layers, experts, vocab: wanted at least 1, {synthetic_config.EXPERTS_PER_TOKEN}, "
            f"{synthetic_config.SMALLEST_VOCAB}, got {layers}, {experts}, {vocab}"
        )
    if skew < 0:
        raise ValueError(f"skew: wanted 0 or more, got {skew}")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise FileExistsError(
            f"{directory}: wanted an empty directory, got one with files in it; remove them first"
        )

    tensors = inventory(layers, experts, vocab, vision)
    shard = _ShardWriter(directory, shards(tensors, shard_bytes))
    try:
        for module in [*(_vision() if vision else ()), *_text(layers, experts, vocab, seed, skew)]:
            for tensor, values in zip(module.tensors(), _draw(module, seed), strict=True):
                shard.write(tensor, values)
    finally:
        shard.close()
    total = sum(map(bytes_of, tensors))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(shard.weight_map.items()))}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=4))
    synthetic_config.write_companions(directory, layers, experts, vocab)
    return total


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.synthetic", description="Write a full-width checkpoint."
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=synthetic_config.VOCAB)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--skew", type=float, default=0.0, help="how fast expert loads fall with rank: 0 even, 1 Zipf"
    )
    parser.add_argument(
        "--vision", action="store_true", help="also the vision tensors, all zero, which Lily skips"
    )
    options = parser.parse_args(arguments)
    started = time.perf_counter()
    try:
        total = write(**vars(options))
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(f"{options.directory}: {total:,} bytes of tensors in {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    run(main)
