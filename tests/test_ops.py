"""Every op of every code path against reference.py, case by case, with outputs that start as NaN."""

from functools import cache

import numpy as np
import pytest

import rungs
from cases import OPS, Case, Draw, cases, draws, inputs
from lily import _core, reference
from support import (
    CHECKPOINTS,
    backends,
    compare,
    core_of,
    emulated_paths,
    kernels,
    options_of,
    packed_paths,
)

# Of the largest value. Float32 sums of some thousand products; in matrix tiles, operands are bfloat16.
CPU, TOLERANCE, TILES = 1e-5, 2e-5, 2e-2
STEP = (
    1.01 / 127
)  # of int8: what a number that lies between two steps is off by if it is rounded the other way
ACTIVATIONS = sorted({name for _, reads, writes in OPS.values() for name in (*reads, *writes)} - {"state"})


@pytest.fixture(scope="module")
def models():
    return {name: reference.Model(path) for name, path in CHECKPOINTS.items()}


METAL = [] if rungs.why_left_out("metal") else ["metal rows", "metal tiles"]
AMX = ["amx packed tiles"] if "amx tiles" in backends() else []
LONG = [
    pytest.param(name, marks=pytest.mark.long)
    for name in (*METAL, *packed_paths()[1:], *emulated_paths(), *AMX)
]


@pytest.fixture(scope="module", params=[*backends(), *LONG])
def backend(request):
    return request.param


@pytest.fixture(scope="module")
def tolerance(backend):
    return (
        TILES if backend.endswith("tiles") else CPU if options_of(backend)["device"] == "cpu" else TOLERANCE
    )


@pytest.fixture(scope="module")
def sessions(backend):
    options = options_of(backend) | {"kv": "f32", "prefill_chunk": "300", "threads": "2"}
    core = core_of(backend)
    return {name: core.Session(core.Weights(str(path)), options) for name, path in CHECKPOINTS.items()}


@cache
def int8_session(backend: str, checkpoint: str):
    options = options_of(backend) | {"kv": "int8", "prefill_chunk": "300", "threads": "2"}
    core = core_of(backend)
    return core.Session(core.Weights(str(CHECKPOINTS[checkpoint])), options)


@cache
def int8_past(backend: str, checkpoint: str, tokens: int):
    session = int8_session(backend, checkpoint)
    state = session.new_state()
    if tokens:
        session.extend(state, np.random.default_rng(7).integers(0, 600, tokens).astype(np.int32))
    return session, state


@cache
def int8_model(checkpoint: str):
    return reference.Model(CHECKPOINTS[checkpoint], kv="int8")


def widths(session):
    return {name: session._get(name, 1).shape[1] for name in ACTIVATIONS}


@pytest.fixture(scope="module")
def past_state(sessions, models):
    """A state that has taken in so many tokens, made once."""
    made = {}

    def after(checkpoint, tokens):
        session = sessions[checkpoint]
        if (checkpoint, tokens) not in made:
            state = made[checkpoint, tokens] = session.new_state()
            if tokens:
                vocab = models[checkpoint].config.vocab
                session.extend(state, np.random.default_rng(7).integers(0, vocab, tokens).astype(np.int32))
        return session.fork(made[checkpoint, tokens])

    return after


@pytest.mark.parametrize("case", cases(), ids=str)
def test_op(case: Case, models, sessions, past_state, tolerance):
    state = past_state(case.checkpoint, case.past)
    check(case, models[case.checkpoint], sessions[case.checkpoint], state, tolerance)


@cache
def watched_session(kind: str, checkpoint: str):
    options = options_of(f"sim {kind}") | {"kernels": kernels(instrumented=True), "prefill_chunk": "300"}
    return _core.Session(_core.Weights(str(CHECKPOINTS[checkpoint])), options | {"kv": "f32"})


@cache
def watched_past(kind: str, checkpoint: str, tokens: int):
    session = watched_session(kind, checkpoint)
    state = session.new_state()
    if tokens:
        session.extend(state, np.random.default_rng(7).integers(0, 600, tokens).astype(np.int32))
    return state


@pytest.mark.long
@pytest.mark.parametrize("case", cases(), ids=str)
@pytest.mark.parametrize("kind", ["rows", "tiles"])
def test_op_watched(case: Case, kind, models):
    """By kernels that report every access out of bounds, undeclared, unordered, or of unwritten memory."""
    rungs.climb("metal")
    session = watched_session(kind, case.checkpoint)
    state = session.fork(watched_past(kind, case.checkpoint, case.past))
    check(case, models[case.checkpoint], session, state, TILES if kind == "tiles" else TOLERANCE)


@pytest.mark.parametrize("case", [case for case in cases() if case.op == "attn_mix"], ids=str)
def test_attention_over_int8(case: Case, backend):
    """Keys and values are then off by half a step of a row's scale at most, as the reference's are."""
    session, past = int8_past(backend, case.checkpoint, case.past)
    check(case, int8_model(case.checkpoint), session, session.fork(past), STEP)


def check(case: Case, model, session, state, tolerance) -> None:
    """Run a case's op after the tokens of a state, and compare what it writes with the reference."""
    layer = 3 if case.op.startswith("attn") else 0
    function, reads, writes = OPS[case.op]
    wide = widths(session)
    given = inputs(case, model.config, wide)

    arguments = {name: array.astype(np.float64) for name, array in given.items()}
    arguments["state"] = tuple(part.astype(np.float64) for part in session.layer_state(state, layer))
    if "expert" in given:
        arguments["expert"] = given["expert"].astype(np.int32)
    wanted = function(model.layers[layer], *(arguments[name] for name in reads))
    wanted = dict(zip(writes, wanted if isinstance(wanted, tuple) else (wanted,), strict=True))

    for name in writes:
        if name not in (*reads, "state", "expert"):
            session._set(name, np.full((case.rows, wide[name]), np.nan, np.float32))
    for name, array in given.items():
        session._set(name, padded(array, wide[name]))
    session._run(case.op, layer, [(state, np.zeros(case.rows, np.int32))])

    for name in writes:
        if name == "state":
            session._advance(state, case.rows)
            for part, (got, want) in enumerate(
                zip(session.layer_state(state, layer), wanted[name], strict=True)
            ):
                compare(f"state part {part}", got, want, tolerance)
                few_flips(f"state part {part}", got, want, tolerance)
        else:
            want = wanted[name]
            got = session._get(name, case.rows)[:, : want.shape[1]]
            compare(name, got, want, tolerance)
            few_flips(name, got, want, tolerance)


def few_flips(name, got, want, tolerance) -> None:
    """In int8 a number may fall on either side of a step, but not many do."""
    if tolerance == STEP and want.size:
        assert np.abs(got - want).mean() <= TOLERANCE * np.abs(want).max(), name


def padded(array, width):
    return np.pad(array, ((0, 0), (0, width - array.shape[1])))


def test_every_op_has_cases():
    named = {case.op for case in cases()}  # embed and sample have tests of their own
    assert named == set(OPS)
    session = _core.Session(_core.Weights(str(CHECKPOINTS["tiny"])), {})
    parts = [(session.new_state(), np.zeros(1, np.int32))]
    with pytest.raises(ValueError, match="no op 'gdn_up'"):
        session._run("gdn_up", 0, parts)


@pytest.mark.parametrize("tokens", [[0], [5, 5, 639, 1]])
def test_embed(models, sessions, tokens):
    session = sessions["tiny"]
    session._run("embed", 0, [(session.new_state(), np.array(tokens, np.int32))])
    want = reference.embed(models["tiny"].weights, np.array(tokens))
    compare("x", session._get("x", len(tokens)), want, 1e-7)


def drawn(core, session, draw: Draw) -> int | None:
    history = core.History()
    for token in draw.history:
        history.add(token)
    sampling = core.Sampling(**draw.sampling)
    try:
        return session._sample_from(draw.logits, sampling, draw.position, history, draw.allowed)
    except ValueError:
        return None


def wanted(draw: Draw) -> int | None:
    sampling = reference.Sampling(**draw.sampling)
    try:
        return reference.sample(draw.logits, sampling, draw.position, draw.counts, draw.allowed)
    except ValueError:
        return None


def test_sample(backend, sessions):
    refused = 0
    for number, draw in enumerate(draws(3000)):
        want = wanted(draw)
        assert drawn(core_of(backend), sessions["tiny"], draw) == want, (number, draw)
        refused += want is None
    assert 0 < refused < 300


def test_sample_of_the_vocabulary_of_the_35b(backend, sessions):
    for number, draw in enumerate(draws(20, [248_320])):
        assert drawn(core_of(backend), sessions["tiny"], draw) == wanted(draw), (number, draw)
