"""The code path amx: prompts in tiles of bfloat16, rows or few as avx512vnni takes them."""

import numpy as np
import pytest

from cases import OPS, Case, inputs
from lily import _core, reference
from lily.agreement import kl_divergence, perplexity, target_log_probabilities, top1_agreement
from support import CHECKPOINTS, GOLDEN, runs
from test_ops import TILES, check

pytestmark = pytest.mark.skipif(not runs("amx"), reason="is for CPUs with AMX")


def session_of(checkpoint: str, simd: str = "amx", **options: str) -> _core.Session:
    given = {"device": "cpu", "simd": simd, "prefill_chunk": "256", "threads": "2"} | options
    return _core.Session(_core.Weights(str(CHECKPOINTS[checkpoint])), given)


def random_tokens(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 600, count).astype(np.int32)


def test_auto_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LILY_SIMD")
    session = _core.Session(_core.Weights(str(CHECKPOINTS["tiny"])), {"device": "cpu"})
    assert (session.device, session.grid) == ("cpu amx", 16)


@pytest.mark.unsanitized
def test_demo_keeps_to_the_yardstick() -> None:
    """The contract for bfloat16 activations; a perplexity within 0.04 % takes more text than there is."""
    with np.load(GOLDEN / "demo.npz") as record:
        golden = dict(record)
    exact, session = session_of("demo", "avx512vnni", kv="f32"), session_of("demo")
    windows = golden["tokens"][:1]
    truth, logits = (
        np.stack([s.logits(s.new_state(), window) for window in windows]) for s in (exact, session)
    )
    assert top1_agreement(truth, logits) >= 0.97
    ours = np.stack([target_log_probabilities(*pair) for pair in zip(logits, windows, strict=True)])
    assert abs(perplexity(ours) / perplexity(golden["target_log_probability"][:1]) - 1) <= 0.001
    yardstick = reference.Model(CHECKPOINTS["demo"], dtype="bf16").logits(windows[0])
    assert kl_divergence(truth[0], logits[0]).mean() <= kl_divergence(truth[0], yardstick).mean()


@pytest.mark.parametrize("checkpoint", ["tiny", "small", "demo"])
@pytest.mark.parametrize(("past", "rows"), [(0, 16), (0, 33), (0, 300), (250, 40), (700, 17), (512, 256)])
def test_attention_in_tiles(checkpoint: str, past: int, rows: int) -> None:
    session, model = (
        session_of(checkpoint, prefill_chunk="300"),
        reference.Model(CHECKPOINTS[checkpoint], kv="bf16"),
    )
    state = session.new_state()
    if past:
        session.extend(state, random_tokens(past))
    check(Case("attn_mix", checkpoint, rows, past), model, session, state, TILES)


@pytest.mark.parametrize("repack", ["on", "off"])
@pytest.mark.parametrize("cuts", [[16], [48, 64], [128, 144], [16, 32, 240], [256], [304]], ids=str)
def test_a_prompt_is_cut_on_its_grid(cuts: list[int], repack: str) -> None:
    session = session_of("tiny", repack=repack)
    tokens = random_tokens(611, seed=2)
    whole, pieces = session.new_state(), session.new_state()
    session.extend(whole, tokens)
    for begin, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
        session.extend(pieces, tokens[begin:end], end=len(tokens))
    assert np.array_equal(session.last_logits(whole), session.last_logits(pieces))
    for layer in range(4):
        for one, other in zip(
            session.layer_state(whole, layer), session.layer_state(pieces, layer), strict=True
        ):
            assert np.array_equal(one, other)


@pytest.mark.parametrize("checkpoint", ["tiny", "small", "demo"])
def test_neither_threads_nor_packing_change_a_bit(checkpoint: str) -> None:
    tokens = random_tokens(333, seed=5)
    logits = [
        session.logits(session.new_state(), tokens)
        for session in (
            session_of(checkpoint, threads=threads, repack=repack)
            for threads, repack in (("1", "off"), ("2", "off"), ("3", "on"))
        )
    ]
    assert np.array_equal(logits[0], logits[1])
    assert np.array_equal(logits[0], logits[2])


@pytest.mark.parametrize("checkpoint", ["tiny", "demo"])
def test_few_rows_are_those_of_avx512vnni(checkpoint: str) -> None:
    tokens = random_tokens(15, seed=7)
    one, other = (session_of(checkpoint, simd) for simd in ("amx", "avx512vnni"))
    assert np.array_equal(one.logits(one.new_state(), tokens), other.logits(other.new_state(), tokens))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_inputs_that_are_no_numbers_stay_in_their_row(bad: float) -> None:
    session = session_of("small")
    config = reference.Model(CHECKPOINTS["small"]).config
    for op in ("gdn_out", "attn_out"):
        widths = {name: session._get(name, 1).shape[1] for name in OPS[op][1] if name != "state"}
        given = inputs(Case(op, "small", 40), config, widths, seed=5)
        results = []
        for value in (None, bad):
            for name, array in given.items():
                array = array.copy()
                if value is not None and name == "y":
                    array[7, 3] = value
                wide = session._get(name, 1).shape[1]
                session._set(name, np.pad(array, ((0, 0), (0, wide - array.shape[1]))))
            session._run(op, 3 if op == "attn_out" else 0, [(session.new_state(), np.zeros(40, np.int32))])
            results.append(session._get("x", 40).copy())
        rest = np.arange(40) != 7
        assert np.array_equal(results[0][rest], results[1][rest])
        assert not np.isfinite(results[1][7]).all()
