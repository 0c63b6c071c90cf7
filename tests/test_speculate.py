"""bench.speculate: what it counts, that it refuses other tokens than single steps', and that it runs."""

import json
from pathlib import Path

import numpy as np
import pytest

from bench import ops, speculate
from lily import _core
from support import CHECKPOINTS, code_paths, options_of

pytestmark = pytest.mark.unsanitized
TINY = CHECKPOINTS["tiny"]


def test_distinct_experts_are_those_of_neighbours() -> None:
    layers = [np.array([[1, 2], [2, 3], [2, 3]]), np.array([[1, 2], [1, 2], [5, 6]])]
    assert speculate.distinct(layers, 1) == 2
    assert speculate.distinct(layers, 2) == pytest.approx((3 + 2 + 2 + 4) / 4)
    assert speculate.distinct(layers, 3) == pytest.approx((3 + 4) / 2)


@pytest.mark.parametrize("backend", code_paths())
def test_experts_are_those_of_the_reference(backend: str) -> None:
    from lily import reference

    tokens = np.random.default_rng(1).integers(0, 600, 12).astype(np.int32)
    session = _core.Session(_core.Weights(str(TINY)), options_of(backend))
    found = speculate.chosen(session, _core.read_config(TINY), tokens)
    model = reference.Model(TINY)
    x = reference.embed(model.weights, tokens)
    for index, state in enumerate(model.new_states()):
        x, _ = model.mix(index, x, state)
        h, router, _, _ = reference.moe_route(model.layers[index], x)
        expert = reference.moe_up(model.layers[index], h, router)[0]
        same = [set(a) == set(b) for a, b in zip(expert, found[index], strict=True)]
        assert np.mean(same) >= 0.75, index  # near ties may fall the other way in bfloat16
        x = model.moe(index, x)


def test_other_tokens_than_those_of_single_steps_are_refused() -> None:
    session = _core.Session(_core.Weights(str(TINY)), {})
    writer = speculate.Writer(session, np.arange(9, dtype=np.int32), 12)
    for most in (1, 4):
        tokens, rate, guessed, right = writer.write(most, knowing=True)
        assert tokens == writer.answer
        assert right == guessed > 0
        assert rate > 0
    writer.answer = [*writer.answer[:5], writer.answer[5] + 1, *writer.answer[6:]]
    with pytest.raises(ValueError, match="wanted the tokens of single steps, got another at place 5"):
        writer.write(2)


def test_gains_counts_and_reads_become_samples(tmp_path: Path) -> None:
    text, file = tmp_path / "text", tmp_path / "samples.jsonl"
    text.write_text("the sea and the hill and the sea and " * 3)
    arguments = ["--prompt", "40", "--tokens", "9", "--guesses", "2", "--rounds", "2", "--record", str(file)]
    speculate.main([str(TINY), str(text), *arguments])
    lines = {line["case"]: line for line in map(json.loads, file.read_text().splitlines())}
    assert len(lines) == 4 + 3 * len(speculate.ROWS)
    assert lines["guesses 2, gain"]["unit"] == "%"
    assert len(lines["guesses 2, gain if all are right"]["samples"]) == 2
    read = [lines[f"{rows} rows, at least"]["samples"][0] for rows in speculate.ROWS]
    assert read == sorted(read)
    speculate.main([str(TINY), *arguments[:-2]])  # without a text
    k = _core.read_config(TINY)["experts_per_token"]
    assert lines["1 rows, distinct experts"]["samples"] == [k]


def test_a_pass_has_every_op_of_its_layers() -> None:
    config = _core.read_config(TINY)
    listed = ops.of_pass(config)
    assert len(listed) == 1 + 6 * config["layers"]
    assert ops.layers_with(config, "attn_mix") == [i for i, a in enumerate(config["attention"]) if a]
