"""A decode step of the GPU kernels, counted without a GPU or weights: what `lily info --stages` shows.

The core records the step dry, from a config.json alone: every dispatch, the barriers between them, and the
bytes that each declares to read and to write. The floor is what no implementation can do without: every
weight that a token meets, the states and the context's keys and values, once each.
"""

import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lily import _core

CONTEXTS = (256, 4096, 32768, 131072)
LINE = 64  # bytes: what a GPU's memory is counted in here
OPS = (
    "embed",
    "gdn_in",
    "gdn_mix",
    "gdn_out",
    "attn_in",
    "attn_mix",
    "attn_out",
    "moe_route",
    "moe_up",
    "moe_down",
    "head",
    "sample",
)


@dataclass(frozen=True)
class Stage:
    """The dispatches of one op's kernel in a step, of all layers together; bytes in whole lines of 64."""

    op: str
    kernel: str
    dispatches: int
    stages: int  # in which it is the first: runs of dispatches that need nothing of each other
    read: int
    written: int


@dataclass(frozen=True)
class Step:
    """One decode step with `context` tokens before it."""

    context: int
    table: tuple[Stage, ...]
    dispatches: int
    stages: int
    read: int
    written: int
    floor: int  # bytes, see floors()

    @property
    def ratio(self) -> float:
        """Bytes read and written, in whole lines, over the floor."""
        return (self.read + self.written) / self.floor


def step(folder: Path | None, context: int, options: Mapping[str, str]) -> Step:
    """Record the decode step after `context` tokens.

    folder: whose config.json it is; None is Qwen3.6-35B-A3B as it is published in 4 bits.
    options: of the core, as text; those that choose kernels have an effect.
    Raises ModelFilesError for a config.json that Lily can't run, ValueError for a context that is too long.
    """
    if folder is None:
        with tempfile.TemporaryDirectory() as published:
            Path(published, "config.json").write_text(json.dumps(_published()))
            return step(Path(published), context, options)
    longest = _core.read_config(folder)["max_positions"]
    if context >= longest:
        raise ValueError(
            f"context: wanted at most {longest - 1} tokens before the step, the model's last position, "
            f"got {context}"
        )
    recorded = _core.record_decode(folder, context, options)
    table = tuple(_by_kernel(recorded))
    return Step(
        context=context,
        table=table,
        dispatches=len(recorded),
        stages=recorded[-1].stage + 1,
        read=sum(row.read for row in table),
        written=sum(row.written for row in table),
        floor=floor(_core.read_config(folder), context),
    )


def apart(folder: Path | None, context: int, options: Mapping[str, str]) -> dict[str, Step]:
    """Record the step once without each thing that a decode step fuses, by its option; as step()."""
    fusions = [
        name for name, _, _, text in _core.option_list() if name.startswith("fused_") and "decode" in text
    ]
    return {name: step(folder, context, {**options, name: "false"}) for name in fusions}


def contexts_of(folder: Path | None) -> list[int]:
    """Return the contexts to look at, 4K first, without those that a folder's model is not made for."""
    standard = sorted(CONTEXTS, key=lambda context: context != 4096)
    if folder is None:
        return standard
    longest = _core.read_config(folder)["max_positions"]
    return [context for context in standard if context < longest] or [longest - 1]


def floor(config: Mapping[str, Any], context: int) -> int:
    """Return the bytes that a decode step after `context` tokens must read and write; see floors()."""
    return sum(floors(config, context).values())


def floors(config: Mapping[str, Any], context: int) -> dict[str, int]:
    """Return the bytes that each op must read and write in a decode step after `context` tokens.

    Of all layers together, and of the ops that must any. What is counted, once each: the matrices of every
    layer but the experts that were not chosen, and the head, as they are stored (MLX's affine quantisation:
    `bits` a number, and a scale and a bias of 16 bits for every group); norms, convolution taps and dt_bias
    in 16 bits, A_log in 32; S in float32, read and written; the convolution's last inputs in 16 bits, read
    and written; keys and values of the context in bfloat16, read, and one token's written. Not counted: the
    embedding's row and whatever goes from one kernel to the next, which a cache can hold.
    Sources: the dimensions and formats are the checkpoint's config.json; what a step consists of is
    reference.py and docs/model.md.
    """
    c = config
    D, keys = c["hidden"], c["kv_heads"] * c["head_dim"]
    queries, values = c["heads"] * c["head_dim"], c["value_heads"] * c["value_dim"]
    channels = 2 * c["key_heads"] * c["key_dim"] + values
    inputs = (c["conv_taps"] - 1) * channels
    chosen, shared = c["experts_per_token"] * c["expert_width"] * D, c["shared_width"] * D
    found: Counter[str] = Counter(head=_stored(c, "lm_head", c["vocab"] * D) + 2 * D)
    for number, attention in enumerate(c["attention"]):

        def stored(op: str, counts: Mapping[str, int], layer: str = f"layers.{number}.") -> None:
            found[op] += sum(_stored(c, layer + name, count) for name, count in counts.items())

        if attention:
            stored("attn_in", {"self_attn.q_proj": 2 * queries * D})
            stored("attn_in", {f"self_attn.{name}_proj": keys * D for name in "kv"})
            stored("attn_out", {"self_attn.o_proj": queries * D})
            found["attn_in"] += 2 * D
            found["attn_mix"] += 2 * 2 * c["head_dim"] + 2 * 2 * keys * (context + 1)
        else:
            stored("gdn_in", {"linear_attn.in_proj_qkv": channels * D, "linear_attn.in_proj_z": values * D})
            stored("gdn_in", {f"linear_attn.in_proj_{gate}": c["value_heads"] * D for gate in "ba"})
            stored("gdn_out", {"linear_attn.out_proj": values * D})
            found["gdn_in"] += 2 * D
            found["gdn_out"] += 2 * c["value_dim"]
            found["gdn_mix"] += (4 + 2) * c["value_heads"] + 2 * c["conv_taps"] * channels
            found["gdn_mix"] += 2 * 4 * values * c["key_dim"] + 2 * 2 * inputs
        stored("moe_route", {"mlp.gate": c["experts"] * D, "mlp.shared_expert_gate": D})
        stored("moe_route", {f"mlp.shared_expert.{name}_proj": shared for name in ("gate", "up")})
        stored("moe_up", {f"mlp.switch_mlp.{name}_proj": chosen for name in ("gate", "up")})
        stored("moe_down", {"mlp.switch_mlp.down_proj": chosen, "mlp.shared_expert.down_proj": shared})
        found["moe_route"] += 2 * D
    return dict(found)


def table(steps: Sequence[Step], without: Mapping[str, Step], title: str) -> str:
    """Lay out the stages of the first step, the totals of all, and those of the first without each fusion."""
    first = steps[0]
    lines = [
        f"One token after {first.context} of {title}, recorded dry; megabytes in whole lines of 64 bytes"
    ]
    lines += [
        "",
        f"{'op':10} {'kernel':28} {'dispatches':>10} {'stages':>7} {'MB read':>10} {'MB written':>10}",
    ]
    for row in first.table:
        lines.append(
            f"{row.op:10} {row.kernel:28} {row.dispatches:10} {row.stages:7} "
            f"{row.read / 1e6:10.3f} {row.written / 1e6:10.3f}"
        )
    lines += ["", f"{'context':>8} {'dispatches':>10} {'stages':>7} {'MB read':>10} {'MB written':>10}"]
    lines[-1] += f" {'floor, MB':>10} {'of the floor':>13}"
    for one in sorted(steps, key=lambda one: one.context):
        lines.append(
            f"{one.context:8} {one.dispatches:10} {one.stages:7} {one.read / 1e6:10.2f} "
            f"{one.written / 1e6:10.2f} {one.floor / 1e6:10.2f} {one.ratio:13.4f}"
        )
    lines += ["", f"{'after ' + str(first.context) + ', without':26} {'dispatches':>10} {'stages':>7} "]
    lines[-1] += f"{'MB read':>10} {'MB written':>10}"
    for name, one in without.items():
        lines.append(
            f"{name:26} {one.dispatches:10} {one.stages:7} {one.read / 1e6:10.2f} {one.written / 1e6:10.2f}"
        )
    return "\n".join(lines)


def tokens(text: str) -> int:
    """Read a number of tokens: 4096, or 4K.

    Raises ValueError for anything else.
    """
    number = text.removesuffix("K").removesuffix("k")
    if not number.isdecimal():
        raise ValueError(f"wanted a number of tokens, such as 4096 or 4K, got {text!r}")
    return int(number[:12]) * (1 if number == text else 1024)


def _by_kernel(recorded: Sequence[_core.Dispatch]) -> Iterator[Stage]:
    """Add up the dispatches of each kernel of an op, in the order of the ops."""
    first_of_stage = {d.stage: (d.op, d.kernel) for d in reversed(recorded)}
    for op, kernel in sorted({(d.op, d.kernel): None for d in recorded}, key=lambda key: OPS.index(key[0])):
        mine = [d for d in recorded if (d.op, d.kernel) == (op, kernel)]
        yield Stage(
            op=op,
            kernel=kernel,
            dispatches=len(mine),
            stages=sum(first == (op, kernel) for first in first_of_stage.values()),
            read=sum(in_lines(t.reads) for d in mine for t in d.memory),
            written=sum(in_lines(t.writes) for d in mine for t in d.memory),
        )


def in_lines(count: int) -> int:
    """Round bytes up to whole lines."""
    return (count + LINE - 1) // LINE * LINE


def _stored(config: Mapping[str, Any], module: str, count: int) -> int:
    """Return the bytes of `count` numbers of a module."""
    quantisation = config["override"].get(module, config["quantisation"])
    if quantisation is None:
        return 2 * count
    return int(count * quantisation["bits"]) // 8 + 4 * count // int(quantisation["group"])


def _published() -> dict[str, Any]:
    """Give what the core has no default for of the published config.json: the sizes are its defaults."""
    exact = [f"model.layers.{i}.mlp.{name}" for i in range(40) for name in ("gate", "shared_expert_gate")]
    eight_bits = {f"language_model.{name}": {"group_size": 64, "bits": 8} for name in exact}
    return {"model_type": "qwen3_5_moe", "quantization": {"group_size": 64, "bits": 4} | eight_bits}
