"""reference.py against what mlx-lm computes in float32 (tests/golden), and against its own promises."""

import ast
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sharding
from lily import reference
from lily.agreement import kl_divergence, perplexity, target_log_probabilities, top1_agreement

HERE = Path(__file__).parent
CHECKPOINTS, GOLDEN = HERE / "checkpoints", HERE / "golden"
DEMO = Path(reference.__file__).parent / "demo" / "lily-tales-22m-4bit"


@pytest.fixture(scope="module", params=["tiny", "small"])
def preset(request):
    return request.param


@pytest.fixture(scope="module", params=["plain", "vlm"])
def checkpoint(request, preset, tmp_path_factory):
    plain = CHECKPOINTS / preset
    if request.param == "plain":
        return plain
    return sharding.vlm_style(plain, tmp_path_factory.mktemp("vlm") / preset)


@pytest.fixture(scope="module")
def golden(preset):
    with np.load(GOLDEN / f"{preset}.npz") as record:
        return dict(record)


@pytest.fixture(scope="module")
def tiny():
    return reference.Model(CHECKPOINTS / "tiny")


@pytest.fixture(scope="module")
def text():
    with np.load(GOLDEN / "demo.npz") as record:
        return dict(record)


@pytest.fixture(scope="module")
def demo_logits(text):
    model = reference.Model(DEMO)
    return np.stack([model.logits(window) for window in text["tokens"]])  # (windows, T, V)


def test_it_imports_nothing_of_ours():
    tree = ast.parse(Path(reference.__file__).read_text(encoding="utf-8"))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
    assert {name.split(".")[0] for name in imported} <= {"numpy", *sys.stdlib_module_names}


# Against mlx-lm in float32.


@pytest.mark.parametrize("sequence", ["chat", "random"])
def test_logits_are_mlx_lms(checkpoint, golden, sequence):
    logits = reference.Model(checkpoint).logits(golden[f"{sequence}_tokens"])
    assert np.abs(logits - golden[f"{sequence}_logits"]).max() <= 1e-4


def test_states_are_mlx_lms(checkpoint, golden):
    _, states = reference.Model(checkpoint).forward(golden["random_tokens"])
    for layer, state in enumerate(states):
        for part, array in enumerate(state):
            want = golden[f"state_{layer}_{part}"]
            got = array.reshape(-1)[:: golden["every"]]
            assert np.abs(got - want).max() <= 1e-4 * np.abs(want).max(), (layer, part)


def test_greedy_continuation_is_mlx_lms(golden, preset):
    logits = reference.Model(CHECKPOINTS / preset).logits(golden["chat_tokens"])
    start = golden["prompt_length"] - 1
    assert logits[start:-1].argmax(-1).tolist() == golden["chat_tokens"][start + 1 :].tolist()


def test_demo_agrees_with_mlx_lm_over_a_text(text, demo_logits):
    assert text["tokens"].size >= 4096
    assert np.mean(demo_logits.argmax(-1) == text["top1"]) >= 0.999
    ours = np.stack(
        [target_log_probabilities(*pair) for pair in zip(demo_logits, text["tokens"], strict=True)]
    )
    theirs = text["target_log_probability"]
    assert np.abs(ours - theirs).max() <= 1e-4
    assert perplexity(ours) == pytest.approx(perplexity(theirs), rel=1e-6)
    shown = demo_logits.reshape(-1, demo_logits.shape[-1])[text["shown"]]
    assert np.abs(shown - text["shown_logits"]).max() <= 1e-4


# Precision.


def test_float32_computes_the_same(golden, preset):
    logits = reference.Model(CHECKPOINTS / preset, dtype="f32").logits(golden["random_tokens"])
    assert logits.dtype == np.float32
    assert np.abs(logits - golden["random_logits"]).max() <= 1e-3


def test_yardstick_bounds_what_rounds_less(text, demo_logits):
    """An ideal bfloat16 pipeline strays further from the truth than bfloat16 keys and values alone do."""
    tokens, truth = text["tokens"][0, :256], demo_logits[0, :256]
    runs = {
        "yardstick": reference.Model(DEMO, dtype="bf16").logits(tokens),
        "kv": reference.Model(DEMO, kv="bf16").logits(tokens),
        "float32": reference.Model(DEMO, dtype="f32").logits(tokens),
    }
    kl = {name: kl_divergence(truth, logits).mean() for name, logits in runs.items()}
    assert kl["float32"] < kl["kv"] < kl["yardstick"]
    shown = demo_logits.reshape(-1, demo_logits.shape[-1])[text["shown"]]
    assert kl_divergence(shown, text["shown_logits"]).mean() < kl["kv"]
    assert top1_agreement(truth, runs["kv"]) >= 0.995


def test_bf16_keys_and_values_are_bf16():
    model = reference.Model(CHECKPOINTS / "tiny", kv="bf16")
    keys, values = model.forward(np.arange(9))[1][3]
    for array in (keys, values):
        assert (array == reference.to_bf16(array)).all()


@given(st.integers(0, 0x7F00), st.booleans(), st.one_of(st.just(0x8000), st.integers(0, 0xFFFF)))
def test_to_bf16_takes_the_nearest_and_the_even_of_two(high, negative, low):
    bits = np.array([high, high + 1], np.uint32) << 16 | np.uint32(negative) << 31
    x = (bits[:1] | np.uint32(low)).view(np.float32)
    below, above = bits.view(np.float32).astype(np.float64)
    got = reference.to_bf16(x)[0]
    if low == 0x8000:
        assert got == (below if high % 2 == 0 else above)
    else:
        assert got == (below if low < 0x8000 else above)


# Chunks and states.


@pytest.fixture(scope="module")
def whole(tiny):
    tokens = np.random.default_rng(2).integers(0, tiny.config.vocab, 40)
    return tokens, *tiny.forward(tokens)


@settings(deadline=None, max_examples=15)
@given(st.sets(st.integers(1, 39), max_size=8))
def test_chunks_give_what_one_pass_gives(tiny, whole, cuts):
    tokens, logits, states = whole
    parts, carried = [], None
    for chunk in np.split(tokens, sorted(cuts)):
        part, carried = tiny.forward(chunk, carried)
        parts.append(part)
    assert np.abs(np.concatenate(parts) - logits).max() <= 1e-10
    for one, other in zip(states, carried, strict=True):
        for a, b in zip(one, other, strict=True):
            assert np.abs(a - b).max() <= 1e-10


def test_forward_leaves_the_states_it_was_given(tiny):
    _, states = tiny.forward([1, 2, 3])
    before = [(a.copy(), b.copy()) for a, b in states]
    tiny.forward([4, 5], states)
    for one, other in zip(states, before, strict=True):
        for a, b in zip(one, other, strict=True):
            assert np.array_equal(a, b)


def test_matrices_kept_change_nothing(tiny):
    small = reference.Model(CHECKPOINTS / "tiny", keep_bytes=1 << 20)
    assert np.array_equal(small.logits([5, 6, 7]), tiny.logits([5, 6, 7]))
    assert 0 < sum(matrix.nbytes for matrix in small.weights.kept.values()) <= 1 << 20


# Ops.


def test_activations_have_the_widths_of_ops_h(tiny):
    c, tokens = tiny.config, np.arange(5)
    x = reference.embed(tiny.weights, tokens)
    assert x.shape == (5, c.hidden)
    delta, attention = tiny.layers[0], tiny.layers[3]
    qkv, z, b, a = reference.gdn_in(delta, x)
    assert [part.shape[1] for part in (qkv, z, b, a)] == [
        c.channels, c.value_heads * c.value_dim, c.value_heads, c.value_heads
    ]  # fmt: skip
    y, (conv, S) = reference.gdn_mix(delta, qkv, b, a, tiny.new_states()[0])
    assert y.shape == (5, c.value_heads * c.value_dim)
    assert conv.shape == (c.conv_taps - 1, c.channels)
    assert S.shape == (c.value_heads, c.value_dim, c.key_dim)
    qg, k, v = reference.attn_in(attention, x)
    assert qg.shape == (5, c.heads * 2 * c.head_dim)
    assert k.shape == v.shape == (5, c.kv_heads * c.head_dim)
    y, (keys, values) = reference.attn_mix(attention, qg, k, v, tiny.new_states()[3])
    assert y.shape == (5, c.heads * c.head_dim)
    assert keys.shape == values.shape == (c.kv_heads, 5, c.head_dim)
    h, router, shared_gate, shared = reference.moe_route(delta, x)
    assert [part.shape[1] for part in (h, router, shared_gate, shared)] == [c.hidden, c.experts, 1, 64]
    expert, weight, hidden = reference.moe_up(delta, h, router)
    assert expert.shape == weight.shape == (5, c.experts_per_token)
    assert hidden.shape == (5, c.experts_per_token * 64)
    assert np.allclose(weight.sum(-1), 1)


def test_equal_experts_go_to_the_lower_id(tiny):
    h = np.zeros((2, tiny.config.hidden))
    router = np.array([[0, 3, 1, 3, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0]], np.float64)
    expert, weight, _ = reference.moe_up(tiny.layers[0], h, router)
    assert expert.tolist() == [[1, 3], [0, 1]]
    assert weight.tolist() == [[0.5, 0.5], [0.5, 0.5]]


@pytest.mark.parametrize("x", [-1e4, -20.0, 0.0, 20.0, 1e4])
def test_sigmoid_is_accurate_in_both_tails(x):
    got = reference.sigmoid(np.array([x]))[0]
    assert got == pytest.approx(1 / (1 + np.exp(np.longdouble(-x))), rel=1e-15)


# The checkpoint.


@given(st.sampled_from([4, 8]), st.integers(0, 2**32 - 1))
def test_dequantise_undoes_packing(bits, seed):
    random = np.random.default_rng(seed)
    q = random.integers(0, 2**bits, (3, 2, 64))
    scales, biases = random.standard_normal((2, 3, 2))
    packed = q.astype(np.uint8).reshape(3, 128)
    if bits == 4:
        packed = packed[:, 0::2] | packed[:, 1::2] << 4  # the lower half of a byte is the earlier element
    got = reference.dequantise(packed.view("<u4"), scales, biases)
    assert np.array_equal(got, (q * scales[..., None] + biases[..., None]).reshape(3, 128))


@pytest.mark.parametrize("words", [12, 13, 3])
def test_dequantise_refuses_other_widths(words):
    with pytest.raises(ValueError, match="expected 4 or 8 bits in groups of 64"):
        reference.dequantise(np.zeros((1, words), np.uint32), np.zeros((1, 1)), np.zeros((1, 1)))


def test_only_text_tensors_are_read(tiny, tmp_path):
    copy = sharding.vlm_style(CHECKPOINTS / "tiny", tmp_path / "vlm")
    assert reference.read_tensors(copy).keys() == tiny.weights.tensors.keys()


def test_unquantised_tensors_are_read(tiny, tmp_path):
    """The same matrices, stored as float32, float16 and bfloat16 as far as they hold them exactly."""
    tensors = sharding.read(CHECKPOINTS / "tiny" / "model.safetensors")
    plain = {}
    for name, (dtype, shape, data) in tensors.items():
        path = name.rpartition(".")[0]
        if name.endswith((".scales", ".biases")):
            continue
        if dtype == "U32":
            matrix = tiny.weights.rows(path.removeprefix("language_model."), slice(None)).astype(np.float32)
            dtype, shape, data = "F32", list(matrix.shape), matrix.tobytes()
        elif dtype == "BF16" and name.endswith("norm.weight"):
            value = (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
            dtype, data = "F16", value.astype(np.float16).tobytes()
        plain[name] = (dtype, shape, data)
    assert {dtype for dtype, _, _ in plain.values()} == {"F32", "F16", "BF16"}
    shutil.copy(CHECKPOINTS / "tiny" / "config.json", tmp_path)
    sharding.write(tmp_path / "model.safetensors", plain)
    tokens = np.arange(0, 640, 20)
    assert np.abs(reference.Model(tmp_path).logits(tokens) - tiny.logits(tokens)).max() <= 1e-5


def test_head_may_be_the_embedding(tiny, tmp_path):
    tensors = sharding.read(CHECKPOINTS / "tiny" / "model.safetensors")
    for part in ("weight", "scales", "biases"):
        del tensors[f"language_model.lm_head.{part}"]
    shutil.copy(CHECKPOINTS / "tiny" / "config.json", tmp_path)
    sharding.write(tmp_path / "model.safetensors", tensors)
    x = reference.embed(tiny.weights, np.arange(4))
    normed = reference.rms_norm(
        tiny.weights.numerics, x, tiny.weights.vector("model.norm.weight"), tiny.config.norm_epsilon
    )
    want = normed @ tiny.weights.rows("model.embed_tokens", slice(None)).T
    assert np.allclose(reference.head(reference.Model(tmp_path).weights, x), want, atol=1e-12)


def test_config_falls_back_to_the_published_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {}}), encoding="utf-8")
    config = reference.read_config(tmp_path)
    assert config.channels == 8192
    assert [i for i, kind in enumerate(config.attention) if kind] == list(range(3, 40, 4))
    assert (config.rotary_dim, config.rope_theta) == (64, 1e7)


def test_errors_say_what_was_wanted(tiny, tmp_path):
    with pytest.raises(ValueError, match="dtype: expected one of f64, f32, bf16, got 'f16'"):
        reference.Model(CHECKPOINTS / "tiny", dtype="f16")
    with pytest.raises(ValueError, match=r"kv: expected one of .*, got 'int4'"):
        reference.Model(CHECKPOINTS / "tiny", kv="int4")
    with pytest.raises(ValueError, match=r"tokens: expected ids in \[0, 640\), got -1 to 640"):
        tiny.forward([-1, 640])
    with pytest.raises(ValueError, match=r"tokens: expected \(T\) integers, T >= 1"):
        tiny.forward(np.zeros(0, np.int64))
    shutil.copy(CHECKPOINTS / "tiny" / "config.json", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no model\*\.safetensors"):
        reference.Model(tmp_path)
