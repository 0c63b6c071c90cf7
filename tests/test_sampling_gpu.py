"""Drawing on the GPU: the tokens that the CPU draws, whatever the logits, and their way into the next step.

test_ops.py has the common cases, for every backend.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rungs
from cases import Draw, draws
from lily import _core, errors
from support import CHECKPOINTS, ROW_BY_ROW, kernels
from test_ops import drawn, wanted

SAMPLED = {"temperature": 0.9, "top_k": 20, "top_p": 0.95, "seed": 3}


@pytest.fixture(autouse=True, scope="module")
def metal():
    rungs.climb("metal")


def make_session(checkpoint="tiny", instrumented=False, **options):
    options = {"device": "sim", "kernels": kernels(instrumented)} | options
    return _core.Session(_core.Weights(str(CHECKPOINTS[checkpoint])), options)


@pytest.fixture(scope="module")
def watched():
    return make_session(instrumented=True)


# Few different numbers, so that ties are the rule; among them what floats have at their ends.
NUMBERS = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 1.5, 2.0, 30.0, -30.0, 3.4e38, -3.4e38])


@given(
    logits=st.lists(NUMBERS, min_size=1, max_size=150),
    temperature=st.sampled_from([0.0, 1e-3, 0.7, 1.0, 50.0]),
    top_k=st.integers(0, 160),
    top_p=st.sampled_from([0.0, 0.3, 0.9, 1 - 2.0**-24, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**63 - 1),
    biased=st.dictionaries(st.integers(0, 150), st.sampled_from([-np.inf, -3.0, 1.0, 3e38]), max_size=5),
    history=st.lists(st.integers(0, 149), max_size=5),
)
def test_ties_are_broken_alike(watched, logits, biased, history, position, **sampling):
    vocab = len(logits)
    sampling |= {"logit_bias": {token % vocab: bias for token, bias in biased.items()}}
    sampling |= {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.1}
    draw = Draw(
        np.array(logits, np.float32), sampling, position, [token % vocab for token in history], allowed=None
    )
    assert drawn(_core, watched, draw) == wanted(draw)


def test_no_access_strays(watched):
    for number, draw in enumerate(draws(60)):
        assert drawn(_core, watched, draw) == wanted(draw), number


@pytest.mark.parametrize("equal", [False, True], ids=["spread", "equal"])
@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0},
        {"temperature": 1},
        {"temperature": 1, "min_p": 0.1},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
        {"temperature": 1, "top_k": 100_000, "top_p": 0.999},
        {"temperature": 1, "top_p": 0.95},
    ],
    ids=str,
)
def test_the_vocabulary_of_the_35b(equal, sampling):
    session = make_session()
    rng = np.random.default_rng(9)
    logits = 3 * rng.standard_normal(248_320).astype(np.float32)
    logits[rng.integers(0, len(logits), 4)] = 12  # ties of the best
    draw = Draw(0 * logits if equal else logits, {**sampling, "seed": 5}, 77, [], None)
    assert drawn(_core, session, draw) == wanted(draw)


@pytest.mark.parametrize("number", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("sampling", [{"temperature": 0}, SAMPLED | {"logit_bias": {7: -np.inf}}], ids=str)
@pytest.mark.parametrize("options", [{"device": "cpu"}, {}], ids=["cpu", "sim"])
def test_a_logit_that_is_not_finite_is_named(options, sampling, number):
    logits = np.zeros(100, np.float32)
    logits[[7, 60]] = number
    shown = "-?nan" if np.isnan(number) else f"{number:g}"
    with pytest.raises(
        errors.DeviceError, match=f"sample: wanted finite logits, got {shown} for token 7 of 100"
    ):
        make_session(**options)._sample_from(logits, _core.Sampling(**sampling), 0)


@pytest.mark.parametrize("options", [{"device": "cpu"}, {}], ids=["cpu", "sim"])
def test_nothing_left_to_draw_is_said(options):
    session = make_session(**options)
    state = session.new_state()
    session.extend(state, np.arange(5, dtype=np.int32))
    nothing = np.zeros(20, np.uint32)
    with pytest.raises(ValueError, match="no token is left to draw; the mask and logit_bias exclude all 640"):
        session.sample(state, _core.Sampling(**SAMPLED), allowed=nothing)
    with pytest.raises(ValueError, match="allowed: wanted 20 words, a bit for each of 640 tokens, got 3"):
        session.sample(state, _core.Sampling(**SAMPLED), allowed=nothing[:3])
    assert session.sample(state, _core.Sampling(temperature=0)) == session.last_logits(state).argmax()


# The way of a token.


def answer(session, prompt, count, sampling):
    state, history = session.new_state(), _core.History()
    session.extend(state, prompt)
    tokens = [session.sample(state, _core.Sampling(**sampling))]
    while len(tokens) < count:
        tokens.append(session.step(state, tokens[-1], _core.Sampling(**sampling), history))
    return tokens


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0}, SAMPLED, SAMPLED | {"presence_penalty": 1}], ids=str
)
def test_the_host_may_carry_tokens_or_not(sampling):
    prompt = np.arange(300, 309, dtype=np.int32)
    kept, carried = (make_session("small", token_handoff=way) for way in ("true", "false"))
    told = answer(kept, prompt, 24, sampling)
    assert told == answer(carried, prompt, 24, sampling)
    assert len(set(told)) > 3


def test_a_drawn_token_is_taken_from_the_device():
    """What a step takes in is what the device drew, also when others have been at work in between."""
    sampling, history = _core.Sampling(**SAMPLED), _core.History()
    for between in ("nothing", "a pass", "another draw", "another token"):
        session = make_session(**ROW_BY_ROW)
        state, other, straight = (session.new_state() for _ in range(3))
        for each in (state, other):
            session.extend(each, np.arange(9, dtype=np.int32))
        token = session.sample(state, sampling)
        if between == "a pass":
            session.extend(other, np.array([5, 6], np.int32))
        elif between == "another draw":
            session.step(other, 5, sampling, _core.History())
        elif between == "another token":
            token = (token + 1) % 640
        session.step(state, token, sampling, history)
        session.extend(straight, np.arange(9, dtype=np.int32))
        session.extend(straight, np.array([token], np.int32))
        assert np.array_equal(session.last_logits(state), session.last_logits(straight)), between


def test_a_step_hands_its_token_over():
    """Recorded dry: with the hand-over no dispatch looks up the step's first row, which the last draw did."""
    folder = CHECKPOINTS["tiny"]
    steps = [
        [dispatch.kernel for dispatch in _core.record_decode(folder, 9, {"token_handoff": way})]
        for way in ("true", "false")
    ]
    assert steps[1] == ["embed", *steps[0]]
    assert steps[0][-2:] == ["head", "sample"]
