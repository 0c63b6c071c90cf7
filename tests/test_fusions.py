"""What a decode step fuses, against the same in dispatches of their own: results, stages, declarations.

Nearly all that is fused gives the same bits apart, since both ways add up in one order. Two do not: one pass
over S takes S k and S q before the decay, and moe_down adds experts up within a lane.
"""

from functools import cache

import numpy as np
import pytest

import rungs
from cases import OPS, Case, cases, inputs
from lily import _core, reference, stages
from support import CHECKPOINTS, ROW_BY_ROW, compare, kernels
from test_ops import TOLERANCE, check, padded, widths

GREEDY = _core.Sampling(temperature=0)
# Each option, and the ops that it takes apart.
FUSIONS = {
    "fused_norm": ("gdn_in", "gdn_out", "attn_in", "moe_route"),
    "fused_gdn": ("gdn_mix",),
    "fused_attention": ("attn_mix",),
    "fused_choice": ("moe_up",),
    "fused_moe": ("moe_route", "moe_up", "moe_down"),
    "fused_argmax": (),
}
OTHER_SUMS = {("fused_gdn", "gdn_mix"), ("fused_moe", "moe_route"), ("fused_moe", "moe_down")}
PAIRS = [(option, op) for option, ops in FUSIONS.items() for op in ops]
ALL_APART = dict.fromkeys(FUSIONS, "false")


@pytest.fixture(autouse=True, scope="module")
def metal() -> None:
    rungs.climb("metal")


@cache
def session_of(
    checkpoint: str, instrumented: bool = False, kv: str = "bf16", apart: tuple[str, ...] = ()
) -> _core.Session:
    options = {"device": "sim", "kernels": kernels(instrumented), "kv": kv, "prefill_chunk": "300"}
    options |= ROW_BY_ROW | dict.fromkeys(apart, "false")
    return _core.Session(_core.Weights(str(CHECKPOINTS[checkpoint])), options)


@cache
def model_of(checkpoint: str) -> reference.Model:
    return reference.Model(CHECKPOINTS[checkpoint])


def past_of(session: _core.Session, tokens: int) -> _core.State:
    state = session.new_state()
    if tokens:
        session.extend(state, np.random.default_rng(7).integers(0, 600, tokens).astype(np.int32))
    return state


def test_every_fusion_is_here() -> None:
    assert {name for name, *_ in _core.option_list() if name.startswith("fused_")} - set(FUSIONS) == {
        "fused_dequantisation"  # of a prompt: test_tiles.py
    }


@pytest.mark.parametrize(("option", "op"), PAIRS)
@pytest.mark.parametrize("rows", [1, 3])
def test_apart_is_the_reference(option: str, op: str, rows: int) -> None:
    session = session_of("tiny", kv="f32", apart=(option,))
    check(Case(op, "tiny", rows, 3), model_of("tiny"), session, past_of(session, 3), TOLERANCE)


@pytest.mark.long
@pytest.mark.parametrize("case", cases(), ids=str)
def test_all_apart_is_the_reference(case: Case) -> None:
    """Every op case, with nothing fused."""
    session = session_of(case.checkpoint, kv="f32", apart=tuple(FUSIONS))
    state = session.fork(cached_past(case.checkpoint, case.past))
    check(case, model_of(case.checkpoint), session, state, TOLERANCE)


@cache
def cached_past(checkpoint: str, tokens: int) -> _core.State:
    return past_of(session_of(checkpoint, kv="f32", apart=tuple(FUSIONS)), tokens)


def run(session: _core.Session, op: str, rows: int) -> dict[str, np.ndarray]:
    """Run an op whose outputs start as NaN, after three tokens; return what it wrote, states included."""
    _, reads, writes = OPS[op]
    layer, wide = 3 if op.startswith("attn") else 0, widths(session)
    given = inputs(Case(op, "tiny", rows), model_of("tiny").config, wide)
    for name in writes:
        if name not in (*reads, "state", "expert"):
            session._set(name, np.full((rows, wide[name]), np.nan, np.float32))
    for name, array in given.items():
        session._set(name, padded(array, wide[name]))
    state = session.new_state()
    session._run(op, layer, [(state, np.zeros(rows, np.int32))])
    found = {name: session._get(name, rows) for name in writes if name != "state"}
    session._advance(state, rows)
    return found | {f"state {i}": part for i, part in enumerate(session.layer_state(state, layer))}


@pytest.mark.parametrize(("option", "op"), [pair for pair in PAIRS if pair not in OTHER_SUMS])
def test_apart_gives_the_same_bits(option: str, op: str) -> None:
    fused, apart = (run(session_of("tiny", apart=some), op, 3) for some in ((), (option,)))
    assert fused.keys() == apart.keys()
    for name in fused:
        assert np.array_equal(fused[name], apart[name], equal_nan=True), name


def decoded(session: _core.Session) -> tuple[list[int], np.ndarray]:
    """Take a few tokens in and draw four; return them and the last logits."""
    state = past_of(session, 5)
    tokens = [session.sample(state, GREEDY)]
    while len(tokens) < 4:
        tokens.append(session.step(state, tokens[-1], GREEDY, _core.History()))
    return tokens, session.last_logits(state)


@pytest.mark.parametrize("option", [*FUSIONS, "all"])
def test_a_step_apart_draws_the_same_tokens(option: str) -> None:
    apart = tuple(FUSIONS) if option == "all" else (option,)
    (tokens, logits), (got_tokens, got) = (decoded(session_of("tiny", apart=some)) for some in ((), apart))
    assert got_tokens == tokens
    if option in ("fused_gdn", "fused_moe", "all"):
        compare("logits", got, logits, 1e-2)  # keys in bfloat16 may round to the other side
    else:
        assert np.array_equal(got, logits)


def test_a_row_does_not_see_its_neighbours_apart() -> None:
    session = session_of("tiny", apart=tuple(FUSIONS))
    alone = [past_of(session, length) for length in (1, 5, 9)]
    together = [session.fork(state) for state in alone]
    tokens = np.arange(1, dtype=np.int32)
    rows = []
    for state in alone:
        session._run("forward", 0, [(state, tokens)])
        rows.append(session._get("x", 1))
    session._run("forward", 0, [(state, tokens) for state in together])
    assert np.array_equal(session._get("x", 3), np.concatenate(rows))


# Held to what is declared, by an instrumented library.


@pytest.mark.parametrize("option", [*FUSIONS, "all"])
def test_apart_touches_what_it_declares_and_no_more(option: str) -> None:
    session = session_of("tiny", True, apart=tuple(FUSIONS) if option == "all" else (option,))
    state = session.new_state()
    session._advance(state, 300)  # two pages; two spans
    session._recorded()
    session.step(state, 5, GREEDY, _core.History())
    session._finish()
    seen = session._recorded()
    assert {d.op for d in seen} == set(stages.OPS)
    for dispatch in seen:
        for number, t in enumerate(dispatch.memory):
            where = f"{dispatch.kernel}, buffer {number}"
            assert t.reads or not t.read_lines, where
            assert t.writes or not t.written_lines, where
            assert 64 * t.read_lines <= stages.in_lines(t.reads) + 64 * 16, where
            assert 64 * t.written_lines <= stages.in_lines(t.writes) + 64 * 16, where


@pytest.mark.long
def test_every_barrier_of_a_step_apart_is_missed() -> None:
    from test_gpu import every_barrier_is_missed

    session = session_of("tiny", True, apart=tuple(FUSIONS))
    base = session.new_state()
    session.extend(base, np.arange(2, dtype=np.int32))
    options = session.options | {"token_handoff": "false"}  # the token is the host's own
    count = _core.record_decode(CHECKPOINTS["tiny"], base.length, options)[-1].stage
    every_barrier_is_missed(
        session, base, lambda state: session.step(state, 5, GREEDY, _core.History()), count
    )


# What a fusion saves, in the 35B's step.


@pytest.mark.parametrize(
    ("option", "more"),
    [
        ("fused_norm", 30 + 10 + 40 + 30 + 1),  # gdn_in, attn_in, moe_route, gdn_out, head
        ("fused_gdn", 30),
        ("fused_attention", 10),
        ("fused_choice", 40),
        ("fused_moe", 40 * (1 + 1 + 1 + 1)),  # norm; SwiGLU beside the choice; SwiGLU; sum
        ("fused_argmax", 1),
    ],
)
def test_a_fusion_saves_stages_and_bytes(option: str, more: int) -> None:
    fused, apart = (stages.step(None, 4096, options) for options in ({}, {option: "false"}))
    assert apart.stages == fused.stages + more
    assert apart.read + apart.written > fused.read + fused.written
    ops = FUSIONS[option] or ("head", "sample")
    by_op = [
        {op: sum(row.stages for row in step.table if row.op == op) for op in stages.OPS}
        for step in (fused, apart)
    ]
    changed = {op for op in stages.OPS if by_op[0][op] != by_op[1][op]}
    assert changed <= {*ops, "head"}
