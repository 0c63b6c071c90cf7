"""Several callers at once: who gets the device, and that nobody's result depends on the others."""

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from lily import _core
from support import CHECKPOINTS, backends, options_of

PROMPTS = [np.arange(1, 2 + 3 * i, dtype=np.int32) for i in range(8)]


@pytest.fixture(scope="module", params=[name for name in backends() if name != "sim tiles"])
def session(request: pytest.FixtureRequest) -> _core.Session:
    return _core.Session(_core.Weights(str(CHECKPOINTS["tiny"])), options_of(request.param))


def write(session: _core.Session, i: int, tokens: int = 12) -> tuple[list[int], bytes]:
    """Return the i-th story, and the logits that it ends with."""
    state, history = session.new_state(), _core.History()
    sampling = _core.Sampling(temperature=0.9, seed=i, presence_penalty=0.5)
    session.extend(state, PROMPTS[i])
    story = [session.sample(state, sampling)]
    for _ in range(tokens):
        story.append(session.step(state, story[-1], sampling, history))
    return story, session.last_logits(state).tobytes()


def test_steps_go_together_and_give_what_they_give_alone(session: _core.Session) -> None:
    tokens = 4 if session.device.startswith("sim") else 24
    alone = [write(session, i, tokens) for i in range(8)]
    for _ in range(5):  # how many meet is the machine's mood: on a busy one, none may
        steps, batches = session._step_counts
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(lambda i: write(session, i, tokens), range(8))) == alone
        now = session._step_counts
        assert now[0] - steps == 8 * tokens
        if now[1] - batches < 0.95 * (now[0] - steps):
            return
    pytest.fail("eight threads' steps went one by one, five times over")


def test_a_batch_can_be_forbidden() -> None:
    session = _core.Session(_core.Weights(str(CHECKPOINTS["tiny"])), {"decode_batch": "1"})
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: write(session, i), range(4)))
    assert session._step_counts == (48, 48)
    with pytest.raises(ValueError, match="decode_batch: wanted 1 to 32, got 33"):
        _core.Session(_core.Weights(str(CHECKPOINTS["tiny"])), {"decode_batch": "33"})


def test_an_error_is_its_own_callers(session: _core.Session) -> None:
    """A step that has no token left to draw fails alone, in the middle of others that do not."""
    none_allowed = np.zeros(session_words(session), np.uint32)
    want = write(session, 3)
    failed = []

    def fail(_: int) -> None:
        state, history = session.new_state(), _core.History()
        session.extend(state, PROMPTS[1])
        for _ in range(6):
            with pytest.raises(ValueError, match="token"):
                session.step(state, 1, _core.Sampling(), history, none_allowed)
            failed.append(1)

    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(fail, i) for i in range(2)]
        stories = list(pool.map(lambda _: write(session, 3), range(2)))
        for other in others:
            other.result()
    assert stories == [want, want]
    assert len(failed) == 12


def session_words(session: _core.Session) -> int:
    state = session.new_state()
    session.extend(state, PROMPTS[0])
    return (len(session.last_logits(state)) + 31) // 32


def test_a_state_has_one_next_token(session: _core.Session) -> None:
    """Two threads that step the same state do so one after the other."""
    state, history = session.new_state(), _core.History()
    session.extend(state, PROMPTS[2])
    before = state.length
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: session.step(state, 1, _core.Sampling(), history), range(8)))
    assert state.length == before + 8


class Stopped(Exception):  # noqa: N818  it is no error
    pass


def test_whoever_waits_for_a_chunk_can_leave() -> None:
    """And those behind it are served all the same."""
    session = _core.Session(_core.Weights(str(CHECKPOINTS["demo"])), {"prefill_chunk": "4096"})
    started, left = threading.Event(), threading.Event()

    def stop() -> None:
        left.set()
        raise Stopped

    def at_work() -> None:
        started.set()
        if left.is_set():
            raise Stopped

    def hold() -> None:
        with pytest.raises(Stopped):
            session.extend(session.new_state(), np.full(4000, 5, np.int32), None, at_work)

    with ThreadPoolExecutor(3) as pool:
        holder = pool.submit(hold)
        assert started.wait(30)
        begun = time.monotonic()
        waits = session.new_state()
        with pytest.raises(Stopped):
            session.extend(waits, np.full(10, 5, np.int32), None, stop)
        assert waits.length == 0
        session.extend(waits, np.full(10, 5, np.int32))
        holder.result()
    assert waits.length == 10
    assert time.monotonic() - begun < 20


def test_prompts_and_answers_take_turns() -> None:
    """An answer goes on while a prompt is taken in: a token, or a batch of them, after each chunk."""
    session = _core.Session(_core.Weights(str(CHECKPOINTS["demo"])), {"prefill_chunk": "64"})
    chunks: list[int] = []
    state, history = session.new_state(), _core.History()
    session.extend(state, PROMPTS[1])

    def take_in() -> None:
        session.extend(
            session.new_state(), np.full(64 * 24, 5, np.int32), lambda done, _: chunks.append(done)
        )

    reached = []
    with ThreadPoolExecutor(1) as pool:
        prompt = pool.submit(take_in)
        while not chunks:
            time.sleep(0.001)
        for _ in range(12):
            session.step(state, 1, _core.Sampling(), history)
            reached.append(len(chunks))
        prompt.result()
    assert reached[-1] < 24  # the prompt was not done first
    assert max(b - a for a, b in itertools.pairwise(reached)) <= 3


def test_memory_is_counted_where_it_is_allocated(session: _core.Session) -> None:
    session.extend(session.new_state(), PROMPTS[1])  # lets go of a step that was begun ahead
    before = session.state_bytes
    state = session.new_state()
    session.extend(state, PROMPTS[1])
    assert session.state_bytes - before == state.nbytes
    fork = state.fork()
    assert session.state_bytes - before == state.nbytes
    session.extend(fork, PROMPTS[1])
    assert session.state_bytes - before == _core.bytes_of([state, fork]) > state.nbytes
    assert session.cost(state) == state.nbytes
    together = _core.bytes_of([state, fork])
    assert session.keep(state, state.nbytes)
    assert session.cost(fork) == together - state.nbytes
    assert not session.keep(fork, together - 1)
    assert session.kept_bytes == state.nbytes
    assert session.keep(fork, together)
    session.let_go(state)
    assert session.kept_bytes == fork.nbytes
    session.let_go(fork)
    assert session.kept_bytes == 0
    del state, fork
    assert session.state_bytes == before
    assert session.state_peak >= before + together
