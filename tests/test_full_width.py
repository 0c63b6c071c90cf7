"""The real widths of the 35B, end to end: three Gated DeltaNet layers and one attention layer, 16 experts.

This case belongs to every backend's suite.
"""

import os

import numpy as np
import pytest

import rungs
from bench import synthetic
from lily import _core, reference
from lily.agreement import kl_divergence, top1_agreement
from support import code_paths, compare, options_of

VOCAB = 2048
CUDA = ["cuda"] if "LILY_PTX" in os.environ else []  # as in support.backends
TOKENS = np.random.default_rng(1).integers(0, VOCAB, 48).astype(np.int32)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("full-width")
    synthetic.write(directory, layers=4, experts=16, vocab=VOCAB, skew=1.0)
    yield directory
    for file in directory.glob("*.safetensors"):
        file.unlink()  # pytest keeps the directories of three runs


@pytest.fixture(scope="module")
def truth(checkpoint):
    model = reference.Model(checkpoint, dtype="f32", keep_bytes=0)
    assert (model.config.heads, model.config.kv_heads, model.config.head_dim) == (16, 2, 256)
    assert (model.config.key_heads, model.config.value_heads, model.config.hidden) == (16, 32, 2048)
    return model.forward(TOKENS)


def taken_in(session, state):
    """Take in 40 tokens together and 8 one by one; return the logits after each, (48, V)."""
    prompt, steps = TOKENS[:-8], TOKENS[-8:]
    return np.concatenate(
        [session.logits(state, prompt)] + [session.logits(state, steps[i : i + 1]) for i in range(8)]
    )


def check(session, truth):
    state = session.new_state()
    logits = taken_in(session, state)
    wanted, states = truth
    assert np.abs(logits - wanted).max() <= 1e-3
    assert top1_agreement(wanted, logits) == 1
    for layer, parts in enumerate(states):
        for part, got in enumerate(session.layer_state(state, layer)):
            compare(f"layer {layer} part {part}", got, parts[part], 1e-4)


@pytest.mark.parametrize("simd", code_paths())
def test_full_width_is_the_reference(checkpoint, truth, simd):
    check(_core.Session(_core.Weights(str(checkpoint)), {"simd": simd, "kv": "f32"}), truth)


@pytest.mark.long
@pytest.mark.unsanitized
@pytest.mark.parametrize("device", ["sim", "metal", *CUDA])
def test_full_width_row_by_row_on_a_gpu(checkpoint, truth, device):
    if device != "cuda":
        rungs.climb("metal")
    options = options_of(f"{device} rows") | {"kv": "f32", "prefill_chunk": "64"}
    check(_core.Session(_core.Weights(str(checkpoint)), options), truth)


@pytest.mark.long
@pytest.mark.unsanitized
@pytest.mark.parametrize(
    ("device", "tiles"), [("sim", "simdgroup"), ("sim", "tensor"), *((cuda, "auto") for cuda in CUDA)]
)
def test_full_width_in_tiles_keeps_to_the_yardstick(checkpoint, truth, device, tiles):
    """Products in bfloat16: no further from the truth than a pipeline that rounds every step's result."""
    if device != "cuda":
        rungs.climb("metal")
    options = options_of(f"{device} tiles") | {"prefill_chunk": "64", "tiles": tiles}
    session = _core.Session(_core.Weights(str(checkpoint)), options)
    logits = taken_in(session, session.new_state())
    ideal = reference.Model(checkpoint, dtype="bf16", keep_bytes=0).logits(TOKENS)
    wanted, _ = truth
    assert kl_divergence(wanted, logits).mean() <= kl_divergence(wanted, ideal).mean()
    assert top1_agreement(wanted, logits) >= min(0.97, top1_agreement(wanted, ideal))
