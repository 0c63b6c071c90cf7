"""Prefixes as values: what forks share, where rollback goes on from, and what all of it holds in memory."""

import time

import numpy as np
import pytest

import lily
from lily import _core
from support import CHECKPOINTS, backends, options_of

LENGTHS = (1, 2, 63, 64, 65, 66, 127, 128, 129, 256, 300)
BACK = (0, 1, 2, 65, 66, 129, 200, 298, 299)  # tokens to take back of 300
SLOW = "sim rows"  # ten times as slow as tiles, with the same states: it goes through fewer tests


@pytest.fixture(scope="module", params=[name for name in backends() if name != SLOW])
def model(request):
    """The tiny checkpoint, with checkpoints close together and chunks of prompts that do not hold many."""
    options = {"prefill_chunk": 128, "checkpoint_tokens": 64, "threads": 2, **options_of(request.param)}
    with lily.Model.load(CHECKPOINTS["tiny"], **options) as loaded:
        yield loaded


def everywhere(name, values, slow):
    """Parametrise over the backends and some values, of which a slow backend gets few, and late."""

    def late(backend, n):
        return backend == SLOW or (backend.startswith("sim") and n not in slow)

    cases = [
        pytest.param(backend, n, marks=pytest.mark.long if late(backend, n) else ())
        for backend in backends()
        for n in (slow if backend == SLOW else values)
    ]
    return pytest.mark.parametrize(("model", name), cases, indirect=["model"], scope="module")


@pytest.fixture(scope="module")
def tokens(model):
    return np.random.default_rng(3).integers(0, model.info.vocab, 330).tolist()


@pytest.fixture(scope="module")
def cold(model, tokens):
    """The logits after so many tokens, taken in at once."""
    known = {}

    def logits(length):
        if length not in known:
            known[length] = model.prefill(tokens[:length]).logits()
        return known[length]

    return logits


@everywhere("length", LENGTHS, (1, 65))
def test_extended_and_rolled_back_is_cold(model, tokens, cold, length):
    prefix = model.prefill(tokens[:length])
    for more in (1, 30) if length > 1 else (1, 2, 3):
        longer = prefix.extend(tokens[length : length + more])
        assert longer.tokens == tuple(tokens[: length + more])
        assert np.array_equal(longer.logits(), cold(length + more)), more
        assert np.array_equal(longer.rollback(more).logits(), cold(length)), more
    assert np.array_equal(prefix.logits(), cold(length))


@everywhere("back", BACK, (236,))
def test_rollback_is_cold_and_goes_another_way(model, tokens, cold, back):
    prefix = model.prefill(tokens[:300])
    shorter = prefix.rollback(back)
    assert shorter.tokens == tuple(tokens[: 300 - back])
    assert np.array_equal(shorter.logits(), cold(300 - back))
    elsewhere = shorter.extend([7] * 40)
    assert np.array_equal(elsewhere.logits(), model.prefill([*tokens[: 300 - back], *[7] * 40]).logits())
    assert np.array_equal(prefix.extend(tokens[300:330]).logits(), cold(330))


def made_in(model, length):
    """Every 64 tokens, and before the rest of a chunk of the position grid, from which it can go on."""
    grid = model._engine.session.grid
    return {64, 128, 192, 256, *({length // grid * grid} if grid > 1 else ())}


def test_rollback_takes_in_only_what_lies_behind_a_checkpoint(model, tokens):
    prefix = model.prefill(tokens[:300])
    assert set(prefix.checkpoints) == made_in(model, 300)
    seen = []
    prefix.rollback(36, progress=lambda done, total: seen.append(total))  # 264: 8 behind 256
    assert seen[-1] == 8
    exact = prefix.rollback(44, progress=lambda done, total: seen.append(-total))  # to 256 itself
    assert seen[-1] == 8
    assert np.array_equal(exact.logits(), model.prefill(tokens[:256]).logits())


def test_checkpoints_where_they_are_asked_for(model, tokens, cold):
    grid = model._engine.session.grid
    pinned = sorted({10 // grid * grid, 200 // grid * grid} - {0})
    prefix = model.prefill(tokens[:300], checkpoints=[200, 10, 10])
    assert set(prefix.checkpoints) == made_in(model, 300) | set(pinned)
    assert np.array_equal(prefix.logits(), cold(300))
    assert set(pinned) <= set(prefix.extend(tokens[300:330]).checkpoints)
    with pytest.raises(ValueError, match="checkpoints: wanted an int of at least 1"):
        model.prefill(tokens[:300], checkpoints=[0])


@pytest.mark.parametrize("tokens_back", [-1, 300, 1.5, True, None])
def test_what_cannot_be_rolled_back(model, tokens, tokens_back):
    with pytest.raises(ValueError, match="tokens: wanted an int of at least 0 and below 300, got"):
        model.prefill(tokens[:300]).rollback(tokens_back)


def test_checkpoints_of_a_long_prefix_are_few():
    with lily.Model.load(CHECKPOINTS["tiny"], checkpoint_tokens=16, threads=2) as model:
        prefix = model.prefill([5] * 200)
        assert prefix.checkpoints == (32, 64, 96, 128, 160, 192)
        assert prefix.extend([6] * 100).checkpoints == (64, 128, 192, 256)
    with lily.Model.load(CHECKPOINTS["tiny"], checkpoint_tokens=0, threads=2) as model:
        prefix = model.prefill([5] * 200)
        assert prefix.checkpoints == ()
        assert np.array_equal(prefix.rollback(150).logits(), model.prefill([5] * 50).logits())


# Memory


def test_a_fork_costs_nothing_until_it_is_written(model, tokens):
    session = model._engine.session
    page, recurrent, logits = session.state_sizes
    prefix = model.prefill(tokens[:300])
    before = session.state_bytes
    forks = [prefix.fork() for _ in range(100)]
    assert session.state_bytes == before
    # The first to go on appends to the last page, which it shares; the second must have its own.
    states = [session.fork(prefix._state) for _ in range(3)]
    assert session.state_bytes == before
    session.extend(states[0], np.array([1], np.int32))
    one = session.state_bytes - before
    assert one == recurrent + logits
    session.extend(states[1], np.array([2], np.int32))
    assert session.state_bytes - before - one == page + recurrent + logits
    del forks, states
    assert session.state_bytes == before
    del prefix
    assert session.state_bytes == 0


def test_bytes_count_what_is_shared_once(model, tokens):
    session = model._engine.session
    page, recurrent, logits = session.state_sizes
    prefix = model.prefill(tokens[:300])
    states = 1 + len(prefix.checkpoints)
    assert prefix.nbytes == session.state_bytes == 2 * page + states * (recurrent + logits)
    assert _core.bytes_of([prefix._state, prefix.fork()._state]) == prefix._state.nbytes
    assert _core.bytes_of([]) == 0


def test_the_limit_holds_at_every_moment(model, tokens):
    session = model._engine.session
    prefix = model.prefill(tokens[:300])
    session.state_limit = limit = session.state_bytes + sum(session.state_sizes)
    session.reset_state_peak()
    try:
        with pytest.raises(
            lily.MemoryLimitError, match=r"states: wanted \d+ bytes more, \d+ of the \d+ allowed"
        ):
            model.prefill(tokens)
        assert session.state_peak <= limit
        assert session.state_bytes == prefix.nbytes
    finally:
        session.state_limit = 0
    assert np.array_equal(prefix.extend(tokens[300:]).logits(), model.prefill(tokens).logits())


def test_an_abandoned_prompt_leaves_nothing_behind(model, tokens, cold):
    """Neither memory nor positions in a page that others share."""
    session = model._engine.session
    prefix = model.prefill(tokens[:200])
    before = session.state_bytes

    def stop(done, total):
        raise KeyError

    for _ in range(3):
        with pytest.raises(KeyError):
            prefix.extend([9] * 100, progress=stop)
    assert session.state_bytes == before
    assert np.array_equal(prefix.extend(tokens[200:300]).logits(), cold(300))


@pytest.mark.unsanitized  # measures
def test_a_fork_of_a_long_prefix_takes_no_time():
    with lily.Model.load(CHECKPOINTS["tiny"], threads=2) as model:
        prefix = model.prefill(np.random.default_rng(1).integers(0, model.info.vocab, 3584).tolist())
        session = model._engine.session
        before, taken = session.state_bytes, []
        for _ in range(20):
            started = time.perf_counter()
            fork = prefix.fork()
            session.fork(fork._state)
            taken.append(time.perf_counter() - started)
        assert min(taken) < 1e-3
        assert session.state_bytes == before
