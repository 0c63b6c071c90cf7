"""262,144 positions: RoPE, attention and the page table up to the last one, against the reference.

A prompt of that length would take hours in the simulator. So a state is made up: a file of random keys and
values, restored, of which the reference gets what the core reads there.
"""

import os
import time

import numpy as np
import pytest

import checkpoint_maker
from lily import _core, errors, reference
from support import backends, compare, options_of

CONTEXT = 262_144
PAGE = 256
EXACT = 2e-5  # of the largest value: float32 sums
TILES = [name for name in ("sim tiles", "amx tiles") if name in backends()]
# A token at a time: the kernels of rows. One code path of the CPU here, the others among the long tests.
FIRST = [backends()[0], *(name for name in backends() if name == "sim rows")]
ALL = [
    name if name in FIRST else pytest.param(name, marks=pytest.mark.long)
    for name in backends()
    if name not in TILES
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = checkpoint_maker.make(
        num_attention_heads=2, num_key_value_heads=1, head_dim=64, linear_num_value_heads=2
    )
    made.config["text_config"]["max_position_embeddings"] = CONTEXT
    return checkpoint_maker.write(tmp_path_factory.mktemp("long") / "checkpoint", made)


@pytest.fixture(scope="module")
def model(folder):
    return {kv: reference.Model(folder, kv=kv) for kv in ("bf16", "int8")}


def session_of(folder, backend, kv):
    options = {**options_of(backend), "kv": kv, "prefill_chunk": "64", "threads": "2"}
    return _core.Session(_core.Weights(str(folder)), options)


def made_up(session, folder, kv, length):
    """A state of `length` tokens that nobody took in: random keys and values, and states of zeros."""
    page, recurrent, _ = session.state_sizes
    pages, rng = -(-length // PAGE), np.random.default_rng(length)
    with open(folder / "state", "wb") as file:
        for _ in range(pages):
            file.write(page_of(rng, page, kv))
        file.write(bytes(recurrent))
    handle = os.open(folder / "state", os.O_RDONLY)
    try:
        size = pages * page + recurrent
        return session.restore(handle, size, 0, [(length, pages * page, -1)])[0]
    finally:
        os.close(handle)


def page_of(rng, size, kv):
    """A page of one attention layer with one head of 64: keys, then values."""
    if kv == "bf16":
        return checkpoint_maker.to_bf16(rng.standard_normal(size // 2)).tobytes()
    rows = [
        rng.integers(-127, 128, PAGE * 64, np.int8).tobytes()
        + rng.uniform(0.005, 0.02, PAGE).astype(np.float32).tobytes()
        for _ in range(2)
    ]
    return b"".join(rows)


def states_of(session, state, layers):
    return [tuple(part.astype(np.float64) for part in session.layer_state(state, n)) for n in range(layers)]


@pytest.mark.parametrize("kv", ["bf16", "int8"])
@pytest.mark.parametrize("backend", ALL)
def test_the_last_positions_of_the_context(folder, model, backend, kv):
    session, truth = session_of(folder, backend, kv), model[kv]
    state = made_up(session, folder, kv, CONTEXT - 2)
    before = states_of(session, state, truth.config.layers)
    tokens = np.array([3, 500], np.int32)
    wanted, after = truth.forward(tokens, before)
    logits = np.concatenate([session.logits(state, tokens[i : i + 1]) for i in range(2)])
    compare("logits", logits, wanted, 1e-3)
    for part, (got, want) in enumerate(zip(session.layer_state(state, 3), after[3], strict=True)):
        # In bf16 and int8 a number may fall on either side of a step.
        compare(f"state part {part}", got[:, -2:], want[:, -2:], 1.01 / 127)
        assert np.abs(got[:, -2:] - want[:, -2:]).mean() <= EXACT * np.abs(want[:, -2:]).max()
    assert state.length == CONTEXT
    with pytest.raises(errors.ContextError, match="1 tokens do not fit: the context holds 262144"):
        session.extend(state, tokens[:1])


@pytest.mark.parametrize("position", [0, 255, 65_535, CONTEXT - 1])
@pytest.mark.parametrize("backend", ALL)
def test_rope_turns_by_the_position(folder, backend, position):
    """What a key is at a position does not depend on what is before it, and is as long everywhere."""
    session, truth = session_of(folder, backend, "f32"), reference.Model(folder)
    page, recurrent, _ = session.state_sizes
    size = -(-position // PAGE) * page + recurrent
    with open(folder / "zeros", "wb") as file:
        file.truncate(size)  # a hole, which takes no room
    handle = os.open(folder / "zeros", os.O_RDONLY)
    state = session.restore(handle, size, 0, [(position, size - recurrent, -1)])[0]
    os.close(handle)
    rng = np.random.default_rng(position)
    wide = {name: session._get(name, 1).shape[1] for name in ("qg", "k", "v")}
    given = {name: rng.standard_normal((1, width)).astype(np.float32) for name, width in wide.items()}
    for name, array in given.items():
        session._set(name, array)
    session._run("attn_mix", 3, [(state, np.zeros(1, np.int32))])
    session._finish()
    session._advance(state, 1)
    key = session.layer_state(state, 3)[0][0, -1]
    n, c = truth.layers[3].numerics, truth.config
    norm = truth.layers[3].vector("self_attn.k_norm.weight")
    wanted = reference.rms_norm(n, given["k"].astype(np.float64).reshape(1, 1, -1), norm, c.norm_epsilon)
    wanted = reference.rope(n, wanted, position, c.rotary_dim, c.rope_theta)
    compare("key", key, wanted[0, 0], 1e-6)


@pytest.mark.long  # tiles of 262,144 positions, simulated
@pytest.mark.parametrize("backend", TILES)
def test_a_prompt_that_ends_with_the_context(folder, model, backend):
    session, truth = session_of(folder, backend, "bf16"), model["bf16"]
    state = made_up(session, folder, "bf16", CONTEXT - 40)
    tokens = np.random.default_rng(0).integers(0, 600, 40).astype(np.int32)
    wanted, _ = truth.forward(tokens, states_of(session, state, truth.config.layers))
    compare("logits", session.logits(state, tokens), wanted, 5e-2)


@pytest.mark.unsanitized  # measures
def test_a_full_page_table_forks_in_no_time(folder):
    session = session_of(folder, backends()[0], "bf16")
    state = made_up(session, folder, "bf16", CONTEXT - 1)
    page, recurrent, _ = session.state_sizes
    assert state.nbytes == CONTEXT // PAGE * page + recurrent
    before, taken = session.state_bytes, []
    for _ in range(20):
        started = time.perf_counter()
        fork = session.fork(state)
        taken.append(time.perf_counter() - started)
    assert min(taken) < 1e-3
    session.extend(fork, np.array([1], np.int32))  # copies the page that it writes to, of 1,024
    assert session.state_bytes - before == page + recurrent + session.state_sizes[2]
