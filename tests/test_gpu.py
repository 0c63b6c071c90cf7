"""The GPU kernels end to end in the simulator, and what holds their dispatches together."""

import json

import numpy as np
import pytest

import rungs
from lily import _core, errors, reference
from support import CHECKPOINTS, ROW_BY_ROW, compare, kernels

GREEDY = _core.Sampling(temperature=0)
PREFILL = {"matmul_rows": "9", "flash_from": "32", "gdn_scan_from": "32"}  # the defaults
PROMPT = np.random.default_rng(2).integers(0, 640, 21).astype(np.int32)


@pytest.fixture(autouse=True)
def metal():
    rungs.climb("metal")


def make_session(checkpoint, instrumented=False, **options):
    options = {"device": "sim", "kernels": kernels(instrumented)} | ROW_BY_ROW | options
    return _core.Session(_core.Weights(str(CHECKPOINTS[checkpoint])), options)


def greedy(session, prompt, count):
    state = session.new_state()
    session.extend(state, prompt)
    history = _core.History()
    tokens = [session.sample(state, GREEDY)]
    while len(tokens) < count:
        tokens.append(session.step(state, tokens[-1], GREEDY, history))
    return tokens


@pytest.mark.parametrize(
    ("rows", "options"),
    [(12, ROW_BY_ROW), pytest.param(100, PREFILL, marks=pytest.mark.long)],
    ids=["row by row", "prompt in tiles"],
)
def test_the_demo_tells_the_same_story(rows, options):
    weights = _core.Weights(str(CHECKPOINTS["demo"]))
    prompt = np.arange(300, 300 + rows, dtype=np.int32)
    told = greedy(make_session("demo", **options), prompt, 64)
    assert told == greedy(_core.Session(weights, {}), prompt, 64)
    assert len(set(told)) > 16


@pytest.mark.parametrize("preset", ["tiny", "small"])
def test_logits_and_states_are_the_references(preset):
    session = make_session(preset, kv="f32")
    state = session.new_state()
    tokens = PROMPT % session_vocab(preset)
    logits = session.logits(state, tokens)
    wanted, states = reference.Model(CHECKPOINTS[preset]).forward(tokens)
    compare("logits", logits, wanted, 2e-5)
    for layer, parts in enumerate(states):
        for part, got in enumerate(session.layer_state(state, layer)):
            compare(f"layer {layer} part {part}", got, parts[part], 2e-5)


def session_vocab(preset):
    return reference.read_config(CHECKPOINTS[preset]).vocab


@pytest.mark.parametrize("cuts", [[1], [7, 8, 20], list(range(1, 21))])
def test_any_chunking_gives_the_same_bits(cuts):
    session = make_session("tiny")
    one, other = session.new_state(), session.new_state()
    wanted = session.logits(one, PROMPT)
    got = np.concatenate([session.logits(other, part) for part in np.split(PROMPT, cuts)])
    assert np.array_equal(got, wanted)
    for layer in range(4):
        for a, b in zip(session.layer_state(one, layer), session.layer_state(other, layer), strict=True):
            assert np.array_equal(a, b)


def test_a_row_does_not_see_its_neighbours_in_a_batch():
    session = make_session("tiny")
    alone, together, fresh, rows = [], [], [], []
    for i, length in enumerate((1, 5, 1)):
        state = session.new_state()
        session.extend(state, PROMPT[: 4 * i + 1])
        alone.append(state)
        together.append(session.fork(state))
        fresh.append(PROMPT[-length:])
        session._run("forward", 0, [(state, fresh[-1])])
        rows.append(session._get("x", length))
    session._run("forward", 0, list(zip(together, fresh, strict=True)))
    assert np.array_equal(session._get("x", 7), np.concatenate(rows))


def test_a_fork_and_its_origin_go_their_own_ways():
    session = make_session("tiny")
    base = session.new_state()
    session.extend(base, PROMPT[:10])
    fork = session.fork(base)
    session.extend(fork, PROMPT[10:13])
    session.extend(base, PROMPT[10:])
    straight = session.new_state()
    session.extend(straight, PROMPT)
    assert np.array_equal(session.last_logits(base), session.last_logits(straight))
    assert (base.length, fork.length) == (21, 13)


def test_scratch_does_not_grow_with_the_context():
    session = make_session("tiny")
    before = session.scratch_bytes
    session.extend(session.new_state(), np.tile(PROMPT, 30))
    assert session.scratch_bytes == before


@pytest.mark.parametrize("checkpoint", ["tiny", "small"])
def test_side_by_side_or_one_by_one_gives_the_same_bits(checkpoint):
    """The simulator runs what lies between two barriers in the reverse of its order."""
    results = []
    for concurrent in ("true", "false"):
        session = _core.Session(
            _core.Weights(str(CHECKPOINTS[checkpoint])),
            {"device": "sim", "kernels": kernels(), "concurrent": concurrent, "prefill_chunk": "40"},
        )
        state = session.new_state()
        found = [session.logits(state, np.tile(PROMPT, 4) % session_vocab(checkpoint))]
        for token in (3, 1, 2):
            session.step(state, token, GREEDY, _core.History())
            found.append(session.last_logits(state))
        results.append([*found, *(part for layer in range(4) for part in session.layer_state(state, layer))])
    for one, other in zip(*results, strict=True):
        assert np.array_equal(one, other)


# Declarations and barriers, by an instrumented library that sees every access.


def test_no_dispatch_touches_what_it_does_not_declare():
    session = make_session("tiny", instrumented=True)
    state = session.new_state()
    session.extend(state, PROMPT[:3])
    session.step(state, 5, GREEDY, _core.History())


def barriers_of_a_step(session, state):
    """Count the barriers of one decode step: the stages of a dry run, less one."""
    folder = CHECKPOINTS["tiny"]
    options = session.options | {"token_handoff": "false"}  # the token is the host's own
    return _core.record_decode(folder, state.length, options)[-1].stage


def every_barrier_is_missed(session, base, take_in, count):
    """Leave out each of a pass's barriers in turn: every time, two dispatches touch the same bytes."""
    for number in range(count):
        state = session.fork(base)
        session._finish()
        session._drop_barrier(number)
        with pytest.raises(errors.DeviceError, match="and there is no barrier between them"):
            take_in(state)
        session._drop_barrier(-1)
        session._finish()


def test_dispatches_of_nothing_wait_for_each_other():
    session = make_session("tiny", instrumented=True)
    state = session.new_state()
    session._recorded()
    assert len(session._time([("nothing", 0)] * 3, 1, [(state, np.zeros(1, np.int32))])) == 3
    stages = [dispatch.stage for dispatch in session._recorded() if dispatch.kernel == "nothing"]
    assert len(stages) == 6  # it warms up, and waits
    assert all(np.diff(stages)[[0, 1, 3, 4]] == 1)
    assert session._stages == 0  # the host counts none


def test_every_barrier_is_missed():
    """Without any one barrier of a decode step, two dispatches touch the same bytes side by side."""
    session = make_session("tiny", instrumented=True)
    base = session.new_state()
    session.extend(base, PROMPT[:2])
    count = barriers_of_a_step(session, base)
    assert count > 20
    every_barrier_is_missed(
        session, base, lambda state: session.step(state, 5, GREEDY, _core.History()), count
    )


@pytest.mark.long
@pytest.mark.unsanitized
def test_every_barrier_of_a_prompts_chunk_is_missed():
    """The same for a chunk of 40 rows, whole model: experts sorted, tiles, flash attention, chunked rule."""
    session = make_session("tiny", instrumented=True, **PREFILL)
    chunk = np.resize(PROMPT, 40)
    base = session.new_state()
    session.extend(base, PROMPT[:5])
    session._recorded()
    session.extend(session.fork(base), chunk)
    seen = session._recorded()
    for family in ("moe_sort", "moe_up_tiles", "moe_down_tiles", "attn_mix_flash", "gdn_mix_chunks"):
        assert any(d.kernel.startswith(family) for d in seen), family
    count = seen[-1].stage - seen[0].stage
    assert count > 50
    every_barrier_is_missed(session, base, lambda state: session.extend(state, chunk), count)


# Recorded dry, at the 35B's shape.


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    folder = tmp_path_factory.mktemp("published")
    modules = [
        f"language_model.model.layers.{i}.mlp.{m}" for i in range(40) for m in ("gate", "shared_expert_gate")
    ]
    exceptions = {module: {"group_size": 64, "bits": 8} for module in modules}
    config = {"model_type": "qwen3_5_moe", "quantization": {"group_size": 64, "bits": 4} | exceptions}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("position", [255, 4095, 32767, 131071])
def test_a_decode_step_of_the_35b_has_few_stages(published, position):
    """30 x 6 for Gated DeltaNet, 10 x 7 for attention, head and draw; one span needs no merge."""
    dispatches = _core.record_decode(published, position, {})
    assert dispatches[-1].stage + 1 == (242 if position < 256 else 252)
    assert [dispatch.kernel for dispatch in dispatches[-2:]] == ["head", "sample"]


@pytest.mark.parametrize("chunk", ["512", "2048"])
def test_scratch_does_not_grow_with_the_prompt_of_the_35b(published, chunk):
    """All that the device is asked for, less the state; recorded dry."""
    options = {"prefill_chunk": chunk}
    short, long = (_core._scratch_of_prefill(published, tokens, options) for tokens in (4096, 65536))
    assert short == long
    assert 0 < short < 1 << 30


def test_one_by_one_every_dispatch_is_a_stage(published):
    dispatches = _core.record_decode(published, 4095, {"concurrent": "false"})
    assert [dispatch.stage for dispatch in dispatches] == list(range(len(dispatches)))


def test_positions_outside_the_context_are_refused(published):
    with pytest.raises(ValueError, match="position: wanted 0 to 262143, got 262144"):
        _core.record_decode(published, 262144, {})


def test_a_library_that_is_none_is_named(tmp_path):
    weights = _core.Weights(str(CHECKPOINTS["tiny"]))
    for file in (tmp_path / "absent.so", CHECKPOINTS["tiny"] / "config.json"):
        with pytest.raises(
            errors.DeviceError, match="option kernels: wanted a library made by `make kernels`"
        ):
            _core.Session(weights, {"device": "sim", "kernels": str(file)})
