"""A decode step recorded dry: its stages, its bytes against the floor, and `lily info --stages`."""

import json
from pathlib import Path
from typing import Any

import pytest

from lily import _core, errors, stages
from lily.__main__ import main
from support import CHECKPOINTS

CONTEXTS = [256, 4096, 32768, 131072]


@pytest.mark.parametrize("context", CONTEXTS)
def test_a_decode_step_of_the_35b_is_252_stages_and_close_to_the_floor(context: int) -> None:
    step = stages.step(None, context, {})
    assert step.dispatches == step.stages <= 252
    assert 1 < step.ratio <= 1.03
    by_op = {op: sum(row.stages for row in step.table if row.op == op) for op in stages.OPS}
    delta, attention = by_op["gdn_in"], by_op["attn_in"]
    assert (delta, attention) == (30, 10)
    assert by_op.pop("embed") + by_op.pop("sample") == 1  # who draws looks the next row up
    assert by_op == {
        **dict.fromkeys(("gdn_in", "gdn_mix", "gdn_out"), 30),
        **{"attn_in": 10, "attn_mix": 20, "attn_out": 10},
        **dict.fromkeys(("moe_route", "moe_up", "moe_down"), 40),
        "head": 1,
    }


def test_one_span_needs_no_merge() -> None:
    step = stages.step(None, 255, {})
    assert step.stages == 242


def bytes_of_tensors(folder: Path) -> dict[str, int]:
    """Read the headers of a checkpoint's files: how many bytes each tensor of the text model takes."""
    found = {}
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as opened:
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        found |= {name: tensor["data_offsets"] for name, tensor in header.items() if name != "__metadata__"}
    skipped = ("vision", "visual", "mtp")
    return {name: b - a for name, (a, b) in found.items() if not any(part in name for part in skipped)}


@pytest.mark.parametrize("preset", ["small", "demo"])
def test_the_floor_is_the_files_bytes_and_the_states(preset: str) -> None:
    """With every expert chosen, all weights but the embedding are read: what the files hold of them."""
    config: dict[str, Any] = _core.read_config(CHECKPOINTS[preset])
    config["experts_per_token"] = config["experts"]
    stored = bytes_of_tensors(CHECKPOINTS[preset])
    read = sum(count for name, count in stored.items() if "embed_tokens" not in name)
    values = config["value_heads"] * config["value_dim"]
    channels = 2 * config["key_heads"] * config["key_dim"] + values
    state = 8 * values * config["key_dim"] + 4 * (config["conv_taps"] - 1) * channels
    layers = config["attention"].count(False)
    assert stages.floor(config, -1) == read + layers * state
    one_token = 4 * config["kv_heads"] * config["head_dim"] * config["attention"].count(True)
    assert stages.floor(config, 9) - stages.floor(config, -1) == 10 * one_token


def test_what_is_declared_grows_with_the_context_as_the_floor_does() -> None:
    shorter, longer = (stages.step(CHECKPOINTS["demo"], context, {}) for context in (1024, 2048))
    rows = [{row.kernel: row.read for row in step.table} for step in (shorter, longer)]
    split = next(kernel for kernel in rows[0] if kernel.startswith("attn_mix_split"))
    assert rows[1][split] - rows[0][split] >= longer.floor - shorter.floor > 0


def test_info_shows_the_stages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--stages", "--context", "4K", "256"]) == 0
    out = capsys.readouterr().out
    assert "One token after 4096 of Qwen3.6-35B-A3B" in out
    step = stages.step(None, 4096, {})
    for row in step.table:
        (line,) = (line for line in out.splitlines() if line.split()[1:2] == [row.kernel])
        assert line.split()[0] == row.op
        assert line.split()[2:4] == [str(row.dispatches), str(row.stages)]
    totals, fusions = ([line.split() for line in part.splitlines()[1:]] for part in out.split("\n\n")[-2:])
    assert [total[0] for total in totals] == ["256", "4096"]
    assert totals[1][-1] == f"{step.ratio:.4f}"
    for (name, dispatches, stages_of_it, *_), (option, one) in zip(
        fusions, stages.apart(None, 4096, {}).items(), strict=True
    ):
        assert (name, dispatches, stages_of_it) == (option, str(one.dispatches), str(one.stages))


def test_info_counts_any_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["info", "--stages", "--json", "--model", str(CHECKPOINTS["tiny"]), "--context", "300"]
    assert main([*arguments, "--option", "gqa_packing=false"]) == 0
    (step,) = json.loads(capsys.readouterr().out)
    assert step["context"] == 300
    assert step["ratio"] == (step["read"] + step["written"]) / step["floor"]
    assert any("_1_false" in row["kernel"] for row in step["table"])


def test_contexts_are_those_that_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert stages.contexts_of(None) == [4096, 256, 32768, 131072]
    assert main(["info", "--stages", "--json", "--model", str(CHECKPOINTS["demo"])]) == 0
    assert [step["context"] for step in json.loads(capsys.readouterr().out)] == [256]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stages", "--context", "many"], "wanted a number of tokens, such as 4096 or 4K, got 'many'"),
        (["--stages", "--context", "256K"], "context: wanted at most 262143 tokens before the step"),
        (["--context", "4K"], "--context: wanted with --stages only"),
    ],
)
def test_wrong_contexts_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["info", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_without_a_config_is_refused(tmp_path: Any) -> None:
    with pytest.raises(errors.ModelFilesError, match=r"config\.json"):
        stages.step(tmp_path, 1, {})
