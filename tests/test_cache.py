"""What a prompt that was taken in before spares, and that no answer changes by it."""

import itertools
import os
import threading
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lily
from lily.cache import Borders, PrefixCache
from scripted import make_checkpoint, scripted
from support import CHECKPOINTS, backends, options_of

SYSTEM = {"role": "system", "content": "Be brief, and tell of animals only. " * 20}


@pytest.fixture
def empty(model: lily.Model) -> lily.Model:
    model._engine.cache.clear()
    return model


def ask(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_a_turn_takes_in_what_is_new(empty: lily.Model) -> None:
    messages: list[Any] = [SYSTEM, ask("Who lives in the wood?")]
    known: list[int] = []
    for turn in range(4):
        with scripted(empty, f"I wonder {turn}.\n</think>\n\nA fox, an owl and {turn} hens."):
            done = empty.generate(messages)
        prompt = empty.encode(messages)
        common = next((i for i, (a, b) in enumerate(zip(known, prompt, strict=False)) if a != b), len(known))
        assert done.usage.prompt_tokens == len(prompt)
        assert done.usage.cached_tokens >= min(common, len(prompt)) - 64
        assert (
            done.timings.prefill_tokens == len(prompt) - done.usage.cached_tokens < (300 if turn == 0 else 64)
        )
        known = prompt + list(done.tokens)
        messages += [done.message, ask("And who else?")]


def test_the_same_request_again_and_again(empty: lily.Model) -> None:
    long = empty.tokenizer.encode("Once upon a time, in a wood far away, there was a fox. " * 3)
    for prompt in ([SYSTEM, ask("Why?")], long):
        answers = [empty.generate(prompt, seed=3, max_tokens=8) for _ in range(5)]
        streams = [list(empty.stream(prompt, seed=3, max_tokens=8)) for _ in range(2)]
        assert len({(done.tokens, done.text, done.reasoning) for done in answers}) == 1
        assert {sum((chunk.tokens for chunk in chunks), ()) for chunks in streams} == {answers[0].tokens}
        assert answers[0].usage.cached_tokens == 0
        assert all(0 < done.usage.cached_tokens <= done.usage.prompt_tokens for done in answers[1:])


def test_an_edit_in_the_middle_of_history(empty: lily.Model) -> None:
    history: list[Any] = [SYSTEM]
    for turn in range(3):
        history.append(ask(f"Question {turn} of a long conversation about the fox and the hen."))
        history.append(empty.generate(history, seed=turn, max_tokens=20, thinking=False).message)
    history.append(ask("And then?"))
    empty.generate(history, seed=9, max_tokens=8)
    edited = [*history]
    edited[3] = ask("Question 1 of a long conversation about the cat and the hen.")
    before, after = empty.encode(history), empty.encode(edited)
    edit = next(i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b)
    warm = empty.generate(edited, seed=9, max_tokens=8)
    assert 0 < warm.usage.cached_tokens <= edit
    assert warm.tokens == empty.generate(edited, seed=9, max_tokens=8, reuse="off").tokens


def test_an_answer_does_not_depend_on_what_came_before(empty: lily.Model) -> None:
    question = [SYSTEM, ask("Who lives in the wood?")]
    want = empty.generate(question, seed=5, max_tokens=12, reuse="off").tokens
    for others in (0, 1, 20):
        for other in range(others):
            empty.generate([SYSTEM, ask(f"Something else, number {other}.")], seed=other, max_tokens=3)
        assert empty.generate(question, seed=5, max_tokens=12).tokens == want


def test_requests_that_come_once_push_no_conversation_out(model: lily.Model, tmp_path: Any) -> None:
    _, recurrent, logits = model._engine.session.state_sizes
    state = recurrent + logits
    with lily.Model.load(make_checkpoint(tmp_path), cache_bytes=7 * state) as small:
        main: list[Any] = [SYSTEM, ask("Who lives in the wood?")]
        found = []
        for turn in range(6):
            done = small.generate(main, seed=turn, max_tokens=20)
            found.append((done.usage.cached_tokens, done.usage.prompt_tokens - done.usage.cached_tokens))
            main += [done.message, ask("And then?")]
            for _ in range(2):
                side = [{"role": "system", "content": f"Give a title, in style {turn}. " * 8}, *main[1:]]
                small.generate(side, seed=turn, max_tokens=4)
            assert small.cache_stats().bytes <= 7 * state
        # The first turn finds nothing, and it is the second that shows that it goes on.
        assert all(new < 100 for _, new in found[2:]), found
        assert [old for old, _ in found[2:]] == sorted(old for old, _ in found[2:])
        assert small.cache_stats().evictions > 5


def test_what_is_cancelled_is_gone_on_with(empty: lily.Model) -> None:
    prompt = [7] * 1500
    with lily.Model.load(lily.DEMO, prefill_chunk=128) as model:
        stream = model.stream(prompt, max_tokens=1, progress=lambda done, _: done >= 512 and stream.cancel())
        assert stream.completion().tokens == ()
        again = model.generate(prompt, max_tokens=1, seed=1)
        assert 512 <= again.usage.cached_tokens < 1500
        assert again.tokens == model.generate(prompt, max_tokens=1, seed=1, reuse="off").tokens


def test_it_can_be_switched_off(empty: lily.Model) -> None:
    with lily.Model.load(lily.DEMO, cache_bytes=0) as model:
        for _ in range(2):
            assert model.generate("A story.", max_tokens=20).usage.cached_tokens == 0
        assert model.cache_stats() == lily.CacheStats(0, 0, 0, 0, 0, 0, 0)
        assert model._engine.session.state_bytes == 0
    for _ in range(2):
        assert empty.generate([SYSTEM, ask("Why?")], max_tokens=3, reuse="off").usage.cached_tokens == 0
    assert empty.cache_stats().states == 0
    with pytest.raises(ValueError, match=r"^reuse: wanted one of auto, strict, off, got 'never'"):
        empty.stream("Why?", reuse="never")


def test_progress_tells_of_the_whole_prompt(empty: lily.Model) -> None:
    prompt = [SYSTEM, ask("Why?")]
    total = len(empty.encode(prompt))
    for found in (False, True):
        calls: list[tuple[int, int]] = []
        done = empty.generate(prompt, max_tokens=1, progress=lambda *call: calls.append(call))  # noqa: B023
        assert (done.usage.cached_tokens > 0) == found
        assert calls == [(total, total)]
    tokens = [5] * 100
    empty.generate(tokens, max_tokens=1)
    calls = []
    empty.generate(tokens, max_tokens=1, progress=lambda *call: calls.append(call))
    assert calls == [(100, 100)]


def test_closing_frees_it(model: lily.Model) -> None:
    other = lily.Model.load(lily.DEMO)
    other.generate("A story.", max_tokens=20)
    session = other._engine.session
    assert session.state_bytes == other.cache_stats().bytes > 0
    other.close()
    assert session.state_bytes == 0
    for work in (other.cache_stats, other.queue_stats):
        with pytest.raises(lily.LilyError, match="is closed"):
            work()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.unsanitized
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_lets_go_of_it(empty: lily.Model) -> None:
    empty.generate("A story.", max_tokens=20)
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            empty.generate("A story.", max_tokens=5)

    thread = threading.Thread(target=work)
    thread.start()
    for _ in range(5):
        time.sleep(0.02)
        child = os.fork()
        if child == 0:
            try:
                empty.cache_stats()
            except lily.LilyError as error:
                os._exit(0 if "forked" in str(error) else 1)
            os._exit(2)
        deadline = time.monotonic() + 10
        while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
            assert time.monotonic() < deadline, "the child hangs"
            time.sleep(0.01)
        assert os.waitstatus_to_exitcode(ended[1]) == 0
    stop.set()
    thread.join()


# ---- The budget, and every way to share


def test_the_budget_is_kept_at_every_moment() -> None:
    """The allocator refuses to go beyond it, and between two requests nothing else is alive."""
    with lily.Model.load(str(CHECKPOINTS["tiny"])) as probe:
        one = probe._engine.bytes_for(300) // 4
    budget = 5 * one
    with lily.Model.load(str(CHECKPOINTS["tiny"]), cache_bytes=budget) as model:
        session = model._engine.session
        session.state_limit = budget + model._engine.bytes_for(500)  # beside one request's own
        random = np.random.default_rng(1)
        known: list[list[int]] = [[]]
        for _ in range(60):
            before = known[random.integers(max(0, len(known) - 4), len(known))]
            prompt = before + random.integers(1, 200, random.integers(20, 60)).tolist()
            done = model.generate(prompt, max_tokens=int(random.integers(1, 24)), stop_tokens=())
            known.append(prompt + list(done.tokens[:-1]) if len(prompt) < 400 else [])
            stats = model.cache_stats()
            assert session.kept_bytes == stats.bytes == session.state_bytes <= budget
        assert stats.evictions > 20
        assert stats.hits > 20


@pytest.mark.parametrize(
    ("backend", "examples"),
    [(name, 2 if name == "sim rows" else 12) for name in backends() if name != "sim tiles"],
)
def test_warm_is_cold(backend: str, examples: int) -> None:
    """Whatever was there before, logits and tokens are those of a model that never saw anything."""
    options = options_of(backend) | {"prefill_chunk": "32"}
    with lily.Model.load(str(CHECKPOINTS["tiny"]), cache_bytes=1 << 20, **options) as tiny:
        check = settings(max_examples=examples)(given(st.data())(lambda data: check_warm(tiny, data)))
        check()


def check_warm(tiny: lily.Model, data: st.DataObject) -> None:
    tiny._engine.cache.clear()
    base = data.draw(st.lists(st.integers(1, 150), min_size=70, max_size=90))
    for _ in range(3):
        cut = data.draw(st.integers(1, len(base)))
        prompt = base[:cut] + data.draw(st.lists(st.integers(1, 150), max_size=20))
        ask = {"max_tokens": 3, "seed": 1, "stop_tokens": (), "logprobs": True}
        warm, cold = tiny.generate(prompt, **ask), tiny.generate(prompt, **ask, reuse="off")
        assert warm.tokens == cold.tokens
        assert warm.logprobs == cold.logprobs
        base = prompt + list(warm.tokens) + base[cut : cut + 30]


@pytest.mark.skipif("sim tiles" not in backends(), reason="the GPU kernels are simulated where clang is")
def test_strict_is_cold_where_sums_go_by_blocks() -> None:
    """Tiled kernels: only what lies on the grid and was a prompt is gone on with; or, by auto, an answer."""
    options = options_of("sim tiles") | {"prefill_chunk": "128"}
    with lily.Model.load(str(CHECKPOINTS["tiny"]), **options) as tiles:
        assert tiles._engine.session.grid == 64
        marker, header = tiles.tokenizer.token_id("<|im_start|>"), tiles.tokenizer.encode("assistant\n")
        prompt = [1 + i % 150 for i in range(140)] + [marker, *header]
        first = tiles.generate(prompt, max_tokens=24, seed=1, stop_tokens=())
        later = prompt + list(first.tokens) + [marker, *range(1, 9), marker, *header]
        ask = {"max_tokens": 1, "seed": 1, "stop_tokens": (), "logprobs": True}
        cold = tiles.generate(later, reuse="off", **ask)
        strict = tiles.generate(later, reuse="strict", **ask)
        auto = tiles.generate(later, **ask)
        assert (strict.tokens, strict.logprobs) == (cold.tokens, cold.logprobs)
        assert strict.usage.cached_tokens == 128
        assert auto.usage.cached_tokens == len(prompt) + 23
        assert abs(auto.logprobs[0].logprob - cold.logprobs[0].logprob) < 0.05


def test_the_trie_finds_what_a_list_finds() -> None:
    """Against the plainest of caches: all sequences in a list."""

    class State:
        has_logits = True

    class Session:
        kept_bytes, grid = 0, 1

        def cost(self, state: object) -> int:
            return 1

        def keep(self, state: object, budget: int) -> bool:
            self.kept_bytes += 1
            return True

        def let_go(self, state: object) -> None:
            self.kept_bytes -= 1

    random = np.random.default_rng(2)
    session = Session()
    cache = PrefixCache(1 << 30, lambda: session)
    known: dict[bytes, object] = {}
    for _ in range(2000):
        tokens = random.integers(0, 3, random.integers(1, 12)).astype(np.int32)
        want = max((n for n in range(len(tokens) + 1) if tokens[:n].tobytes() in known), default=0)
        hit = cache.find(tokens)
        assert hit.length == want
        assert hit.state is known.get(tokens[:want].tobytes())
        if random.random() < 0.3:
            state = known.setdefault(tokens.tobytes(), State())
            cache.put(tokens, state, hit)
        if random.random() < 0.01:
            cache.make_room(5)
            known = {
                key: state
                for key, state in known.items()
                if cache.find(np.frombuffer(key, np.int32)).state is state
            }
    assert cache.stats().states == session.kept_bytes == len(known)
    cache.clear()
    assert session.kept_bytes == 0


def test_a_trie_does_not_grow_with_what_is_gone() -> None:
    with lily.Model.load(str(CHECKPOINTS["tiny"]), cache_bytes=1 << 18) as model:
        cache = model._engine.cache
        session = model._engine.session
        random = np.random.default_rng(3)
        for _ in range(3000):
            state = session.new_state()
            cache.put(
                random.integers(0, 5000, 20).astype(np.int32), state.fork(), cache.find(np.ones(1, np.int32))
            )
        assert sum(1 for _ in cache._nodes()) < 1100
        assert cache._size < 1100


def test_prompts_are_cut_where_messages_begin(model: lily.Model) -> None:
    borders = Borders(model.tokenizer)
    text = "The fox went on. " * 60
    messages = [SYSTEM, *(ask(text) for _ in range(4)), {"role": "assistant", "content": "Yes."}, ask("Why?")]
    tokens = np.array(model.encode(messages), np.int32)
    starts = np.flatnonzero(tokens == model.tokenizer.token_id("<|im_start|>")).tolist()
    *cuts, end = borders.cuts(tokens)
    assert end == len(tokens)
    assert (
        cuts[-1] == borders.answers(tokens)[-1] == starts[-1] + 1 + len(model.tokenizer.encode("assistant\n"))
    )
    assert cuts[0] == starts[1]
    assert set(cuts[:-1]) <= {*starts, *borders.answers(tokens)}
    assert all(b - a >= 512 for a, b in itertools.pairwise(cuts[:-1]))
    assert borders.cuts(tokens, cuts[1]) == [*cuts[2:], end]
    assert borders.cuts(np.full(5000, 5, np.int32)) == [2048, 4096, 5000]
    assert borders.cuts(np.full(10, 5, np.int32)) == [10]
    grown = np.array(
        model.encode([*messages, {"role": "assistant", "content": "So."}, ask("And?")]), np.int32
    )
    assert borders.cuts(grown)[: len(cuts) - 1] == cuts[:-1]  # fixed by the tokens before them
