"""The real widths of the 35B, end to end: three Gated DeltaNet layers and one attention layer, 16 experts.

This case belongs to every backend's suite.
"""

import numpy as np
import pytest

from bench import synthetic
from bench.agree import top1_agreement
from lily import _core, reference
from support import code_paths, compare

VOCAB = 2048
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


@pytest.mark.parametrize("simd", code_paths())
def test_full_width_is_the_reference(checkpoint, truth, simd):
    session = _core.Session(_core.Weights(str(checkpoint)), {"simd": simd, "kv": "f32"})
    state = session.new_state()
    prompt, steps = TOKENS[:-8], TOKENS[-8:]
    logits = [session.logits(state, prompt)] + [session.logits(state, steps[i : i + 1]) for i in range(8)]
    logits = np.concatenate(logits)
    wanted, states = truth
    assert np.abs(logits - wanted).max() <= 1e-3
    assert top1_agreement(wanted, logits) == 1
    for layer, parts in enumerate(states):
        for part, got in enumerate(session.layer_state(state, layer)):
            compare(f"layer {layer} part {part}", got, parts[part], 1e-4)
