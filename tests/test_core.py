"""The core end to end: against mlx-lm's float32 vectors, in any chunking, fork or batch, and on errors."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import checkpoint_maker
import sharding
from lily import _core, errors, reference
from lily.agreement import kl_divergence, perplexity, target_log_probabilities, top1_agreement
from support import CHECKPOINTS, GOLDEN, can_pack, code_paths, compare

FLOAT32 = {"kv": "f32"}


def make_session(checkpoint, **options):
    return _core.Session(_core.Weights(str(CHECKPOINTS.get(checkpoint, checkpoint))), options)


def random_tokens(count, vocab=640, seed=0):
    return np.random.default_rng(seed).integers(0, vocab, count).astype(np.int32)


def states_of(session, state, layers):
    return [session.layer_state(state, layer) for layer in range(layers)]


def assert_same_states(session, one, other, layers):
    for layer in range(layers):
        for a, b in zip(session.layer_state(one, layer), session.layer_state(other, layer), strict=True):
            assert np.array_equal(a, b), f"layer {layer}"


@pytest.fixture(scope="module")
def tiny():
    return make_session("tiny")


# Against mlx-lm in float32.


@pytest.mark.parametrize("style", ["plain", "vlm"])
@pytest.mark.parametrize("simd", code_paths())
@pytest.mark.parametrize("preset", ["tiny", "small"])
def test_logits_and_states_are_mlx_lms(preset, simd, style, tmp_path):
    path = CHECKPOINTS[preset]
    if style == "vlm":
        path = sharding.vlm_style(path, tmp_path / preset)
    session = make_session(path, simd=simd, **FLOAT32)
    with np.load(GOLDEN / f"{preset}.npz") as record:
        golden = dict(record)
    for sequence in ("chat", "random"):
        state = session.new_state()
        logits = session.logits(state, golden[f"{sequence}_tokens"])
        assert np.abs(logits - golden[f"{sequence}_logits"]).max() <= 1e-3
    for layer in range(4):
        for part, array in enumerate(session.layer_state(state, layer)):
            want = golden[f"state_{layer}_{part}"]
            compare(f"layer {layer} part {part}", array.reshape(-1)[:: golden["every"]], want, 1e-4)


@pytest.mark.unsanitized  # 5,120 positions on every code path
@pytest.mark.parametrize(
    ("simd", "digits"),
    [
        *((simd, "3") for simd in code_paths()),
        *(
            pytest.param(simd, "2", marks=[] if simd == code_paths()[0] else pytest.mark.long)
            for simd in code_paths()
            if can_pack(simd)
        ),
    ],
)
def test_demo_agrees_with_mlx_lm_over_a_text(simd, digits, record_testsuite_property):
    """The precision contract for float32 activations, keys and values in bf16, over 5,120 positions."""
    with np.load(GOLDEN / "demo.npz") as record:
        golden = dict(record)
    session = make_session("demo", simd=simd, prefill_digits=digits)
    logits = np.stack([session.logits(session.new_state(), window) for window in golden["tokens"]])
    top1 = float(np.mean(logits.argmax(-1) == golden["top1"]))
    ours = np.stack([target_log_probabilities(*pair) for pair in zip(logits, golden["tokens"], strict=True)])
    ratio = perplexity(ours) / perplexity(golden["target_log_probability"])
    record_testsuite_property(f"demo_top1_{simd}_{digits}", top1)
    record_testsuite_property(f"demo_perplexity_ratio_{simd}_{digits}", ratio)
    assert golden["tokens"].size >= 4096
    assert top1 >= 0.995
    assert abs(ratio - 1) <= 0.0002


def test_bf16_keys_and_values_cost_less_than_the_yardstick():
    with np.load(GOLDEN / "demo.npz") as record:
        tokens = record["tokens"][0, :256]
    truth = reference.Model(CHECKPOINTS["demo"]).logits(tokens)
    yardstick = reference.Model(CHECKPOINTS["demo"], dtype="bf16").logits(tokens)
    session = make_session("demo")
    ours = session.logits(session.new_state(), tokens)
    assert kl_divergence(truth, ours).mean() < kl_divergence(truth, yardstick).mean()
    assert top1_agreement(truth, ours) >= 0.995


def test_int8_keys_and_values_cost_little():
    """The figures that bench/records keeps for int8, over 2,560 positions, with their bound."""
    with np.load(GOLDEN / "demo.npz") as record:
        golden = dict(record)
    windows = golden["tokens"][: len(golden["tokens"]) // 2]
    session = make_session("demo", kv="int8")
    logits = np.stack([session.logits(session.new_state(), window) for window in windows])
    ours = np.stack([target_log_probabilities(*pair) for pair in zip(logits, windows, strict=True)])
    theirs = golden["target_log_probability"][: len(windows)]
    assert np.mean(logits.argmax(-1) == golden["top1"][: len(windows)]) >= 0.99
    assert abs(perplexity(ours) / perplexity(theirs) - 1) <= 0.002


# One result, however the work is cut.


@settings(deadline=None)
@given(cuts=st.sets(st.integers(1, 299), max_size=12), chunk=st.sampled_from(["1", "7", "64", "2048"]))
def test_any_chunking_gives_the_same_bits(cuts, chunk):
    tokens = random_tokens(300)
    whole, parts = make_session("tiny"), make_session("tiny", prefill_chunk=chunk)
    one, other = whole.new_state(), parts.new_state()
    wanted = whole.logits(one, tokens)
    got = np.concatenate([parts.logits(other, part) for part in np.split(tokens, sorted(cuts))])
    assert np.array_equal(got, wanted)
    for left, right in zip(states_of(whole, one, 4), states_of(parts, other, 4), strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("simd", code_paths())
def test_decoding_far_along_gives_the_bits_of_one_pass(simd):
    """Beyond 2,048 positions attention is split over spans, in a way of its own for a few rows."""
    session = make_session("tiny", simd=simd)
    tokens = random_tokens(4400)
    whole, steps = session.new_state(), session.new_state()
    wanted = session.logits(whole, tokens)[-300:]
    session.extend(steps, tokens[:-300])
    got = [session.logits(steps, tokens[i : i + 1]) for i in range(4100, 4110)]
    got += [session.logits(steps, tokens[4110:4117]), session.logits(steps, tokens[4117:])]
    assert np.array_equal(np.concatenate(got), wanted)
    assert_same_states(session, whole, steps, 4)


@pytest.mark.parametrize("threads", ["1", "2", "5"])
def test_threads_do_not_show(tiny, threads):
    session = make_session("tiny", threads=threads)
    tokens = random_tokens(300)
    assert np.array_equal(session.logits(session.new_state(), tokens), tiny.logits(tiny.new_state(), tokens))


@pytest.mark.parametrize("lengths", [(1, 1, 1), (1, 40, 1), (3, 1, 260, 2)])
def test_a_row_does_not_see_its_neighbours_in_a_batch(tiny, lengths):
    """Sequences with pasts of different lengths, continued in one pass and each alone."""
    alone, together, fresh = [], [], []
    for i, length in enumerate(lengths):
        state = tiny.new_state()
        tiny.extend(state, random_tokens(100 * i + 3, seed=i))
        alone.append(state)
        together.append(tiny.fork(state))
        fresh.append(random_tokens(length, seed=50 + i))
    rows = []
    for state, tokens in zip(alone, fresh, strict=True):
        tiny._run("forward", 0, [(state, tokens)])
        rows.append(tiny._get("x", len(tokens)))
    tiny._run("forward", 0, list(zip(together, fresh, strict=True)))
    assert np.array_equal(tiny._get("x", sum(lengths)), np.concatenate(rows))
    for one, other in zip(alone, together, strict=True):
        assert_same_states(tiny, one, other, 4)


@pytest.mark.parametrize("length", [1, 255, 256, 257, 600])
def test_forks_go_their_own_ways(tiny, length):
    base = tiny.new_state()
    tiny.extend(base, random_tokens(length))
    before = states_of(tiny, base, 4), tiny.last_logits(base)
    left, right = tiny.fork(base), tiny.fork(base)
    tiny.extend(left, random_tokens(30, seed=1))
    tiny.extend(right, random_tokens(300, seed=2))
    for kept, now in zip(before[0], states_of(tiny, base, 4), strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(kept, now, strict=True))
    assert np.array_equal(before[1], tiny.last_logits(base))
    straight = tiny.new_state()
    tiny.extend(straight, np.concatenate([random_tokens(length), random_tokens(30, seed=1)]))
    assert_same_states(tiny, straight, left, 4)
    assert (base.length, left.length, right.length) == (length, length + 30, length + 300)


def test_a_step_is_extend_then_sample(tiny):
    one, other = tiny.new_state(), tiny.new_state()
    tiny.extend(one, random_tokens(20))
    tiny.extend(other, random_tokens(20))
    sampling = _core.Sampling(temperature=0.9, top_k=50, top_p=0.9, frequency_penalty=0.5, seed=11)
    history, counted = _core.History(), _core.History()
    drawn = [tiny.sample(one, sampling)]
    for _ in range(20):
        drawn.append(tiny.step(one, drawn[-1], sampling, history))
    again = []
    for _ in range(21):
        again.append(tiny.sample(other, sampling, counted))
        tiny.extend(other, np.array(again[-1:], np.int32))
        counted.add(again[-1])
    assert drawn == again
    assert len(set(drawn)) > 5
    assert history.counts == {token: drawn[:-1].count(token) for token in drawn[:-1]}


# Memory.


@pytest.mark.unsanitized  # 64K tokens take the sanitizers many minutes and show them nothing that 4K do not
def test_scratch_is_the_same_for_4k_and_64k(tmp_path):
    """Nothing the session allocates grows with the context; only pages of keys and values do."""
    small = checkpoint_maker.make(
        hidden_size=64, num_attention_heads=1, num_key_value_heads=1, head_dim=64, linear_num_value_heads=2
    )
    small.config["text_config"]["max_position_embeddings"] = 65536
    session = make_session(checkpoint_maker.write(tmp_path / "small", small))
    before = session.scratch_bytes
    short, long = session.new_state(), session.new_state()
    empty = sum(session.state_sizes[1:])  # recurrent states, logits
    session.extend(short, random_tokens(4096))
    after_4k = session.scratch_bytes
    session.extend(long, random_tokens(65536))
    assert session.scratch_bytes == after_4k == before
    assert long.nbytes - empty == 16 * (short.nbytes - empty) > 0


# When things go wrong.


def test_tokens_outside_the_vocabulary_are_refused(tiny):
    state = tiny.new_state()
    for bad in (-1, 640):
        with pytest.raises(ValueError, match=rf"tokens\[2\]: wanted an id from 0 to 639, got {bad}"):
            tiny.extend(state, np.array([1, 2, bad], np.int32))
    assert state.length == 0


def test_what_does_not_fit_the_context_is_refused_before_work():
    session = make_session("demo")
    state = session.new_state()
    session.extend(state, random_tokens(10, 4096))
    with pytest.raises(
        errors.ContextError, match="4090 tokens do not fit: the context holds 4096, of which 10"
    ):
        session.extend(state, random_tokens(4090, 4096))
    assert state.length == 10


def test_an_exception_in_progress_stops_between_chunks():
    session = make_session("tiny", prefill_chunk="16")
    state = session.new_state()
    tokens = random_tokens(64)

    def stop(done, total):
        assert total == 64
        if done == 32:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.extend(state, tokens, stop)
    assert state.length == 32
    assert not state.has_logits
    session.extend(state, tokens[32:])
    straight = session.new_state()
    session.extend(straight, tokens)
    assert_same_states(session, straight, state, 4)


def test_progress_counts_up_to_the_total():
    session = make_session("tiny", prefill_chunk="16")
    seen = []
    session.extend(session.new_state(), random_tokens(40), lambda done, total: seen.append((done, total)))
    assert seen == [(16, 40), (32, 40), (40, 40)]


def test_a_state_of_another_session_is_refused(tiny):
    other = make_session("tiny", kv="f32")
    state = tiny.new_state()
    tiny.extend(state, random_tokens(5))
    wanted = "state: wanted one of this session, got another's"
    for use in (
        lambda: other.extend(state, random_tokens(3)),
        lambda: other.fork(state),
        lambda: other.sample(state, _core.Sampling()),
        lambda: other.last_logits(state),
        lambda: other.layer_state(state, 0),
        lambda: other._run("gdn_mix", 0, [(state, random_tokens(1))]),
    ):
        with pytest.raises(ValueError, match=wanted):
            use()
    assert state.length == 5


def test_an_empty_state_has_nothing_to_continue(tiny):
    state = tiny.new_state()
    with pytest.raises(ValueError, match="nothing to continue"):
        tiny.sample(state, _core.Sampling())
    with pytest.raises(ValueError, match="nothing to continue"):
        tiny.logprobs(state, 0, 0)
    with pytest.raises(ValueError, match="no token's logits"):
        tiny.last_logits(state)
    tiny.extend(state, np.zeros(0, np.int32))
    assert state.length == 0
    with pytest.raises(IndexError, match="layer: wanted 0 to 3, got 4"):
        tiny.layer_state(state, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"thread": "2"}, "no option 'thread', did you mean 'threads'?"),
        ({"frobnicate": "2"}, "no option 'frobnicate'; the options are device, threads"),
        ({"threads": "two"}, "option threads: wanted an integer, got 'two'"),
        ({"threads": "-1"}, "option threads: wanted 0 to 1024, got -1"),
        ({"kv": "int3"}, "option kv: wanted one of bf16 f32 int8, got 'int3'"),
        ({"device": "abacus"}, "option device: wanted one of auto cpu metal cuda sim, got 'abacus'"),
        ({"prefill_chunk": "-1"}, "option prefill_chunk: wanted 0 to 65536, got -1"),
    ],
)
def test_wrong_options_say_what_is_right(options, message):
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        make_session("tiny", **options)


def test_options_come_from_the_environment_and_arguments_win(monkeypatch):
    monkeypatch.setenv("LILY_THREADS", "1")
    monkeypatch.setenv("LILY_KV", "f32")
    assert make_session("tiny").options["threads"] == "1"
    session = make_session("tiny", kv="bf16")
    assert session.options["kv"] == "bf16"
    assert session.threads == 1
    monkeypatch.setenv("LILY_THREADS", "many")
    with pytest.raises(
        ValueError, match="LILY_THREADS in the environment: option threads: wanted an integer, got 'many'"
    ):
        make_session("tiny")
