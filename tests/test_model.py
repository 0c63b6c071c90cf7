"""The Python surface on the demo checkpoint: answers, streams, prefixes, limits, threads, interrupts."""

import gc
import json
import logging
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import lily

EXAMPLES = Path(__file__).parent.parent / "examples"
PROMPT = "Tell me a story about a fox."


@pytest.fixture(scope="module")
def model() -> Iterator[lily.Model]:
    with lily.Model.load(lily.DEMO) as model:
        yield model


@pytest.fixture(scope="module")
def prompt(model: lily.Model) -> tuple[int, ...]:
    """The tokens of PROMPT as a message."""
    return model.prefill(PROMPT).tokens


@pytest.fixture(scope="module")
def story(model: lily.Model) -> lily.Completion:
    """An answer that ends by itself. Which seeds give one differs between code paths; 4 does on most."""
    prefix = model.prefill(PROMPT)
    for seed in (4, *range(100, 200)):
        story = prefix.generate(seed=seed, max_tokens=200)
        if story.finish_reason == "stop":
            return model.generate(PROMPT, seed=seed)
    raise AssertionError("no seed of a hundred gave a story that ends")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the demo checkpoint, to damage."""
    return Path(shutil.copytree(lily.DEMO, tmp_path / "copy"))


def run(code: str, timeout: float = 60, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=os.environ | variables,
        check=False,
    )


# Answers


def test_a_story_is_english(model: lily.Model) -> None:
    story = model.generate(PROMPT, seed=7, max_tokens=200)
    words = re.findall(r"[a-z']+", story.text.lower())
    assert len(words) > 100
    assert {"the", "and", "a", "to", "fox"} <= set(words)
    assert sum(len(word) for word in words) / len(words) < 6
    assert not re.search(r"<\||\|>|\ufffd", story.text)


def test_the_same_seed_tells_the_same_story(model: lily.Model, story: lily.Completion) -> None:
    again = model.generate(PROMPT, seed=story.seed)
    assert (again.text, again.tokens, again.seed) == (story.text, story.tokens, story.seed)
    assert model.generate(PROMPT, seed=story.seed + 1, max_tokens=len(story.tokens)).tokens != story.tokens


def test_without_a_seed_the_one_used_is_told(model: lily.Model) -> None:
    first, second = (model.generate(PROMPT, max_tokens=40) for _ in range(2))
    assert first.seed != second.seed
    assert first.tokens != second.tokens
    assert model.generate(PROMPT, max_tokens=40, seed=first.seed).tokens == first.tokens


def test_another_process_tells_the_same_story(story: lily.Completion) -> None:
    seed = story.seed
    done = run(f"import lily; print(lily.Model.load(lily.DEMO).generate({PROMPT!r}, seed={seed}).tokens)")
    assert done.stdout == f"{story.tokens}\n", done.stderr


def test_greedy_takes_the_likeliest_token_each_time(model: lily.Model, prompt: tuple[int, ...]) -> None:
    done = model.generate(PROMPT, temperature=0, max_tokens=30, seed=1)
    likeliest = model.logits([*prompt, *done.tokens[:-1]])[len(prompt) - 1 :].argmax(axis=-1)
    assert done.tokens == tuple(likeliest.tolist())
    for same in ({"temperature": 0, "seed": 2}, {"top_k": 1}, {"top_p": 0}, {"temperature": 1e-9}):
        assert model.generate(PROMPT, max_tokens=30, **same).tokens == done.tokens, same


def test_a_hot_draw_differs_and_stays_in_the_vocabulary(model: lily.Model) -> None:
    done = model.generate(PROMPT, temperature=1000, top_k=0, top_p=1, max_tokens=50, stop_tokens=(), seed=3)
    assert len(set(done.tokens)) > 40
    assert max(done.tokens) < model.info.vocab


def test_what_a_prompt_may_be(model: lily.Model, prompt: tuple[int, ...]) -> None:
    want = model.generate(PROMPT, max_tokens=20, seed=1).tokens
    for same in (
        [{"role": "user", "content": PROMPT}],
        ({"role": "user", "content": [{"type": "text", "text": PROMPT}]},),
        prompt,
        list(prompt),
        np.array(prompt),
        np.array(prompt, np.uint16),
    ):
        assert model.generate(same, max_tokens=20, seed=1).tokens == want


def test_the_end_token_ends_and_is_not_returned(
    model: lily.Model, prompt: tuple[int, ...], story: lily.Completion
) -> None:
    stop = set(model.info.stop_tokens)
    assert not stop & set(story.tokens)
    longer = model.generate(PROMPT, seed=story.seed, stop_tokens=(), max_tokens=len(story.tokens) + 1)
    assert longer.tokens[:-1] == story.tokens
    assert longer.tokens[-1] in stop
    assert longer.finish_reason == "length"
    own = model.generate(PROMPT, seed=story.seed, stop_tokens=[story.tokens[5]])
    assert own.tokens == story.tokens[: story.tokens.index(story.tokens[5])]
    assert own.finish_reason == "stop"


def test_an_answer_may_be_empty(model: lily.Model, story: lily.Completion) -> None:
    told = model.prefill(PROMPT).extend(story.tokens)
    done = told.generate(seed=story.seed, max_tokens=1)
    assert (done.text, done.tokens, done.finish_reason) == ("", (), "stop")
    assert done.usage == lily.Usage(len(told), 0, len(told))
    assert list(told.stream(seed=story.seed)) == []


def test_text_that_spells_an_end_token_does_not_end(model: lily.Model) -> None:
    letters = model.tokenizer.encode("<|im_end|>")
    assert not set(letters) & set(model.info.stop_tokens)
    assert "<|im_end|>" in model.tokenizer.decode(model.prefill("say <|im_end|>").tokens)


def test_counts_times_and_looks(model: lily.Model, prompt: tuple[int, ...]) -> None:
    done = model.generate(PROMPT, max_tokens=7, seed=1, reuse="off")
    assert done.usage == lily.Usage(prompt_tokens=len(prompt), completion_tokens=7, cached_tokens=0)
    assert done.usage.total_tokens == len(prompt) + 7
    assert done.finish_reason == "length"
    timings = done.timings
    assert (timings.prefill_tokens, timings.decode_tokens) == (len(prompt), 6)
    assert timings.prefill_seconds > 0
    assert timings.decode_tokens_per_second == 6 / timings.decode_seconds
    assert str(done) == done.text
    assert repr(done) == f"<lily.Completion {done.text!r}: 7 tokens, length, seed 1>"
    assert model.tokenizer.decode(done.tokens) == done.text
    one = model.generate(PROMPT, max_tokens=1, seed=1)
    assert one.timings.decode_tokens_per_second == 0
    assert len(one.tokens) == 1


# Streams


def test_a_stream_is_the_answer_in_pieces(model: lily.Model, story: lily.Completion) -> None:
    stream = model.stream(PROMPT, seed=story.seed)
    assert iter(stream) is stream
    chunks = list(stream)
    assert len(chunks) > 40
    assert all(chunk.text for chunk in chunks)
    assert "".join(chunk.text for chunk in chunks) == story.text
    assert sum((chunk.tokens for chunk in chunks), ()) == story.tokens
    whole = stream.completion()
    assert (whole.text, whole.tokens, whole.finish_reason) == (story.text, story.tokens, "stop")
    assert whole.usage == story.usage


def test_the_rest_of_a_stream_may_be_taken_at_once(model: lily.Model, story: lily.Completion) -> None:
    stream = model.stream(PROMPT, seed=story.seed)
    next(stream)
    assert stream.completion().tokens == story.tokens


def test_bytes_that_make_no_character_end_as_one_replacement(model: lily.Model) -> None:
    fox = model.tokenizer.encode("\N{FOX FACE}")
    assert len(fox) == 4

    # Forces one byte a token, whatever the model thinks of it.
    class Forced:
        def __init__(self, session: object, tokens: list[int]) -> None:
            self.session, self.tokens = session, iter(tokens)

        def sample(self, *_: object) -> int:
            return next(self.tokens)

        def step(self, *_: object) -> int:
            return next(self.tokens)

        def __getattr__(self, name: str) -> object:
            return getattr(self.session, name)

    engine = model._engine
    session = engine._session
    try:
        engine._session = Forced(session, [*fox, *fox])
        chunks = list(model.stream(PROMPT, max_tokens=8))
        assert chunks == [lily.Chunk("\N{FOX FACE}", tuple(fox))] * 2
        engine._session = Forced(session, fox)
        chunks = list(model.stream(PROMPT, max_tokens=3))
        assert chunks == [lily.Chunk("\ufffd", tuple(fox[:3]))]
    finally:
        engine._session = session


def test_a_stream_may_be_left_or_closed(model: lily.Model, story: lily.Completion) -> None:
    for _ in model.stream(PROMPT, seed=story.seed):
        break
    with model.stream(PROMPT, seed=story.seed) as stream:
        first = next(stream)
    assert next(stream, None) is None
    cut = stream.completion()
    assert (cut.text, cut.finish_reason) == (first.text, None)
    model.stream(PROMPT).close()
    assert model.generate(PROMPT, seed=story.seed).tokens == story.tokens


def test_a_stream_may_move_to_another_thread(model: lily.Model, story: lily.Completion) -> None:
    stream = model.stream(PROMPT, seed=story.seed)
    start = next(stream).text
    with ThreadPoolExecutor(1) as pool:
        rest = pool.submit(lambda: "".join(chunk.text for chunk in stream)).result()
    assert start + rest == story.text


# Prefixes


def test_a_prefix_answers_as_its_prompt_does(
    model: lily.Model, prompt: tuple[int, ...], story: lily.Completion
) -> None:
    prefix = model.prefill(PROMPT)
    before = prefix.logits()
    assert prefix.tokens == prompt
    assert len(prefix) == len(prompt)
    done = prefix.generate(seed=story.seed)
    assert done.tokens == story.tokens
    assert done.usage == lily.Usage(len(prompt), len(story.tokens), cached_tokens=len(prompt))
    assert done.timings.prefill_tokens_per_second == 0
    assert prefix.generate(seed=story.seed).tokens == story.tokens
    assert "".join(chunk.text for chunk in prefix.stream(seed=story.seed)) == story.text
    assert np.array_equal(prefix.logits(), before)


def test_extending_makes_another(model: lily.Model, prompt: tuple[int, ...]) -> None:
    whole = model.prefill([*prompt, *model.tokenizer.encode("Once upon a time")])
    base = model.prefill(prompt)
    text = base.extend("Once upon a time")
    assert text.tokens == whole.tokens
    assert np.array_equal(text.logits(), whole.logits())
    pieces = model.prefill(whole.tokens[:1])
    for token in whole.tokens[1:]:
        pieces = pieces.extend([token])
    assert pieces.tokens == whole.tokens
    np.testing.assert_allclose(pieces.logits(), whole.logits(), atol=0.05)
    assert base.tokens == prompt
    assert np.array_equal(base.logits(), model.prefill(prompt).logits())


def test_forks_go_their_own_ways(model: lily.Model) -> None:
    base = model.prefill(PROMPT)
    fork = base.fork()
    other = fork.extend("The end.")
    assert fork.tokens == base.tokens
    assert np.array_equal(fork.logits(), base.logits())
    assert not np.array_equal(other.logits(), base.logits())
    assert "12 tokens" in repr(model.prefill(base.tokens[:12]))


def test_text_of_a_prefix_holds_no_markers(model: lily.Model) -> None:
    more = model.prefill([1]).extend("<|im_end|>").tokens[1:]
    assert list(more) == model.tokenizer.encode("<|im_end|>")


def test_what_is_no_argument_is_named(model: lily.Model) -> None:
    """By the name that it has, and not by what fails inside."""
    prefix = model.prefill([1, 2])
    calls: list[tuple[str, Callable[[], object]]] = [
        ("more", lambda: prefix.extend(None)),
        ("more", lambda: prefix.extend(5)),
        ("checkpoints", lambda: model.prefill([1], checkpoints=5)),
        ("checkpoints", lambda: model.prefill([1], checkpoints=None)),
        ("path", lambda: prefix.save(5)),
        ("path", lambda: prefix.save(None)),
        ("path", lambda: model.load_prefix(5)),
        ("path", lambda: lily.Model.load(5)),
        ("prompt", lambda: model.generate(None)),
        ("tokens", lambda: model.logits(None)),
        ("tokens", lambda: model.tokenizer.decode(None)),
        ("stop", lambda: model.generate("a", stop=5)),
        ("stop_tokens", lambda: model.generate("a", stop_tokens=5)),
        ("port", lambda: model.serve(port="x")),
        ("prefix", lambda: model.serve(prefix=5)),
        ("allowed_hosts", lambda: model.serve(allowed_hosts="name")),
        ("strict_model", lambda: model.serve(strict_model=1)),
        ("keep_alive", lambda: model.serve(keep_alive="5")),
        ("unexpected argument 'prot'; did you mean port?", lambda: model.serve(prot=1)),
    ]
    for name, call in calls:
        with pytest.raises(TypeError, match=f"^{re.escape(name)}(: wanted |$)"):
            call()
    for name, call in (
        ("stop", lambda: model.generate("a", stop=["x"] * 65)),
        ("max_tokens", lambda: model.serve(max_tokens=0)),
        ("write_seconds", lambda: model.serve(write_seconds=math.nan)),
        ("port", lambda: model.serve(port=70000)),
    ):
        with pytest.raises(ValueError, match=f"^{name}: wanted "):
            call()


def test_one_thread_at_a_time_reads_a_stream(model: lily.Model) -> None:
    told = threading.Event()
    going_on = threading.Event()

    def report(done: int, total: int) -> None:
        told.set()
        assert going_on.wait(10)

    stream = model.stream("Tell me a story.", max_tokens=3, progress=report, reuse="off")
    reader = threading.Thread(target=stream.completion)
    reader.start()
    assert told.wait(10)
    for read in (lambda: next(stream), stream.close, stream.completion):
        with pytest.raises(lily.LilyError, match=r"^the stream: another thread is iterating over it; "):
            read()
    going_on.set()
    reader.join()
    assert len(stream.so_far().tokens) == 3
    stream.close()


@pytest.mark.parametrize("nothing", ["", [], (), np.empty(0, np.int32)])
def test_a_prefix_has_tokens(model: lily.Model, nothing: object) -> None:
    with pytest.raises(ValueError, match=r"^more: wanted at least one token, got none$"):
        model.prefill([1]).extend(nothing)
    if not isinstance(nothing, str):
        with pytest.raises(ValueError, match=r"^prompt: wanted a str, at least one message or one token"):
            model.prefill(nothing)


# Logits


def test_logits_of_every_position(model: lily.Model, prompt: tuple[int, ...]) -> None:
    logits = model.logits(prompt)
    assert logits.shape == (len(prompt), model.info.vocab)
    assert logits.dtype == np.float32
    assert np.isfinite(logits).all()
    last = model.prefill(prompt).logits()
    assert last.shape == (model.info.vocab,)
    assert last.dtype == np.float32
    assert np.array_equal(logits[-1], last)
    np.testing.assert_allclose(model.logits(prompt[:5]), logits[:5], atol=0.05)


# Progress


def test_progress_counts_up_to_the_end() -> None:
    tokens = [5] * 100
    with lily.Model.load(lily.DEMO, prefill_chunk=32) as model:
        for work in (model.prefill, model.logits, model.prefill([5]).extend):
            calls: list[tuple[int, int]] = []
            work(tokens, progress=lambda done, total, calls=calls: calls.append((done, total)))
            assert len(calls) > 3
            assert calls == sorted(set(calls))
            assert calls[-1] == (100, 100)


def test_progress_may_stop_the_work(capfd: pytest.CaptureFixture[str]) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with lily.Model.load(lily.DEMO, prefill_chunk=32) as model:
        want = model.generate([5] * 100, seed=1, max_tokens=5).tokens
        with pytest.raises(KeyboardInterrupt):
            model.prefill([5] * 100, progress=stop)
        assert model.generate([5] * 100, seed=1, max_tokens=5).tokens == want
        model.prefill([5] * 100, progress=True)  # stderr is no terminal here
        with pytest.raises(TypeError, match="progress: wanted a bool or a function of"):
            model.prefill([5], progress="yes")
    assert capfd.readouterr() == ("", "")


# Threads and processes


def test_threads_take_turns_and_change_nothing(model: lily.Model) -> None:
    def tell(seed: int) -> tuple[int, ...]:
        return model.generate(PROMPT, seed=seed, max_tokens=20).tokens

    alone = [tell(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(tell, range(4))) == alone
    assert len(set(alone)) == 4


def test_other_threads_run_while_the_core_works() -> None:
    """A prompt of one chunk is one call of the core: Python runs beside it only if the core lets go of it."""
    with lily.Model.load(lily.DEMO, prefill_chunk=4096) as model:
        started, done = threading.Event(), threading.Event()

        def work() -> None:
            started.set()
            model.prefill([5] * 800)
            done.set()

        thread = threading.Thread(target=work)
        thread.start()
        started.wait()
        beats = 0
        while not done.wait(0.001):
            beats += 1
        thread.join()
    assert beats >= 3


FORKED = """
import os, sys, lily
model = lily.Model.load(lily.DEMO, threads=2)
prefix = model.prefill([1, 2, 3])
stream = model.stream([1, 2, 3], stop_tokens=())
next(stream)
child = os.fork()
if child == 0:
    for use in (model.generate, model.prefill, lambda _: prefix.generate(), lambda _: next(stream), lambda _:
    model.info):
        try:
            use([1])
            print("no error")
        except lily.LilyError as error:
            print(error)
    model.close()
    del model, prefix, stream
    own = lily.Model.load(lily.DEMO, threads=2)
    print(len(own.generate([1, 2, 3], max_tokens=4, stop_tokens=()).tokens))
    sys.exit(0)
_, status = os.waitpid(child, 0)
told = model.generate([1, 2], max_tokens=3, stop_tokens=())
print("parent", os.waitstatus_to_exitcode(status), len(told.tokens))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_is_told() -> None:
    done = run(FORKED, PYTHONWARNINGS="ignore::DeprecationWarning")
    lines = done.stdout.splitlines()
    assert len(lines) == 7, done.stdout + done.stderr
    assert len(set(lines[:5])) == 1
    assert re.search(r"was loaded before this process was forked.*load it in the child", lines[0])
    assert lines[5:] == ["4", "parent 0 3"]
    assert done.returncode == 0


# Limits and arguments


@pytest.mark.parametrize("bad", [0, -1, True, False, 1.5, 2.0, "3", 2**63])
def test_max_tokens_is_a_count(model: lily.Model, bad: object) -> None:
    for work in (model.generate, model.stream):
        with pytest.raises(ValueError, match=r"^max_tokens: wanted an int of at least 1.*got ") as caught:
            work([1], max_tokens=bad)
        assert str(caught.value).endswith(repr(bad))


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "seed"])
def test_sampling_arguments_are_checked(model: lily.Model, name: str) -> None:
    for work in (model.generate, model.stream):
        with pytest.raises(ValueError, match=f"^{name}: wanted "):
            work([1], **{name: -1})
    prefix = model.prefill([1])
    for work in (prefix.generate, prefix.stream):
        with pytest.raises(ValueError, match=f"^{name}: wanted "):
            work(**{name: -1})


@pytest.mark.parametrize(
    ("bad", "kind", "text"),
    [
        ([-1], ValueError, "stop_tokens: wanted an int of at least 0 and below 4096, got -1"),
        ([4096], ValueError, "stop_tokens: wanted an int of at least 0 and below 4096, got 4096"),
        ("a", ValueError, "stop_tokens: wanted an int of at least 0 and below 4096, got 'a'"),
        (7, TypeError, "stop_tokens: wanted token ids, got int"),
    ],
)
def test_stop_tokens_are_checked(model: lily.Model, bad: object, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=f"^{re.escape(text)}$"):
        model.stream([1], stop_tokens=bad)


@pytest.mark.parametrize(
    ("bad", "kind", "text"),
    [
        (b"fox", TypeError, "prompt: wanted a str, a list of messages or token ids, got bytes"),
        (None, TypeError, "prompt: wanted a str, a list of messages or token ids, got NoneType"),
        (7, TypeError, "prompt: wanted a str, a list of messages or token ids, got int"),
        ({"role": "user"}, TypeError, "prompt: wanted a str, a list of messages or token ids, got dict"),
        ([1.5], TypeError, "prompt: wanted a flat sequence of int token ids, got shape (1,) of float64"),
        ([[1, 2]], TypeError, "prompt: wanted a flat sequence of int token ids, got shape (1, 2) of int64"),
        ([[1], [1, 2]], TypeError, "prompt: wanted a flat sequence of int token ids: "),
        ([5, True], TypeError, "prompt[1]: wanted an int token id, got True"),
        (
            np.array([True]),
            TypeError,
            "prompt: wanted a flat sequence of int token ids, got shape (1,) of bool",
        ),
        (["fox"], TypeError, "prompt: wanted a flat sequence of int token ids, got shape (1,) of <U3"),
        (
            np.array([1, 2], object),
            TypeError,
            "prompt: wanted a flat sequence of int token ids, got shape (2,)",
        ),
        ([1, 10**30], ValueError, f"prompt[1]: wanted a token id from 0 to 4095, got {10**30}"),
        ([1, -1], ValueError, "prompt[1]: wanted a token id from 0 to 4095, got -1"),
        (np.array([4096, 1]), ValueError, "prompt[0]: wanted a token id from 0 to 4095, got 4096"),
        (np.array([2**63], np.uint64), ValueError, "prompt[0]: wanted a token id from 0 to 4095, got 92233"),
        (
            [{"role": "user", "content": "a"}, 7],
            TypeError,
            "messages[1]: wanted a dict with role and content",
        ),
    ],
)
def test_prompts_are_checked(model: lily.Model, bad: object, kind: type[Exception], text: str) -> None:
    for work in (model.generate, model.stream, model.prefill):
        with pytest.raises(kind, match=f"^{re.escape(text)}"):
            work(bad)


def test_logits_take_tokens_only(model: lily.Model) -> None:
    with pytest.raises(
        TypeError, match=r"wanted token ids, got a str; pass model\.tokenizer\.encode\(text\)"
    ):
        model.logits("fox")
    with pytest.raises(ValueError, match=r"^tokens\[0\]: wanted a token id from 0 to 4095, got 4096$"):
        model.logits([4096])


@pytest.fixture
def small(folder: Path) -> Iterator[lily.Model]:
    """The demo with a context of 64 tokens."""
    config = folder / "config.json"
    config.write_text(
        config.read_text().replace('"max_position_embeddings": 4096', '"max_position_embeddings": 64')
    )
    with lily.Model.load(folder) as model:
        assert model.info.context == 64
        yield model


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("", "path: wanted a checkpoint's folder, got an empty path; '.' is the current one"),
        ("~no-such-user/model", "~no-such-user/model: no such user's home directory; write the path out"),
        ("x" * 300, "x: cannot be read: File name too long"),
        ("models/" + "x/" * 3000, "x/: cannot be read: File name too long"),
    ],
)
def test_a_path_that_cannot_be_one_is_refused(path: str, message: str) -> None:
    with pytest.raises(lily.ModelFilesError, match=re.escape(message)):
        lily.Model.load(path)


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    ],
)
def test_a_pipe_among_the_files_keeps_nobody_waiting(name: str, tmp_path: Path) -> None:
    for file in Path(lily.DEMO).iterdir():
        if file.name != name:
            (tmp_path / file.name).symlink_to(file)
    os.mkfifo(tmp_path / name)
    with pytest.raises(lily.ModelFilesError, match=f"{re.escape(name)}: "):
        lily.Model.load(tmp_path)


def test_options_are_python_values() -> None:
    options: dict[str, Any] = {"threads": np.int64(2), "gqa_packing": False, "kv": "f32"}
    with lily.Model.load(lily.DEMO, **options) as model:
        assert {name: model.info.options[name] for name in options} == {
            "threads": "2",
            "gqa_packing": "false",
            "kv": "f32",
        }
    for wrong, error in (
        ({"threads": 2.0}, TypeError),
        ({"threads": True}, ValueError),
        ({"kv": "\ud800"}, ValueError),
        ({"\ud800": 1}, ValueError),
    ):
        with pytest.raises(error, match="option "):
            lily.Model.load(lily.DEMO, **cast(Any, wrong))


def test_a_token_that_is_none_is_refused_by_the_tokenizer(model: lily.Model) -> None:
    for token in (-1, 1.5, True, None):
        with pytest.raises(ValueError, match="token: wanted an int of at least 0"):
            model.tokenizer.token_bytes(cast(Any, token))
    assert model.tokenizer.token_id("\ud800") is None
    with pytest.raises(TypeError, match="text: wanted a str, got int"):
        model.tokenizer.token_id(cast(Any, 5))


def test_a_prompt_past_the_context_is_refused_before_any_work(small: lily.Model) -> None:
    def never(done: int, total: int) -> None:
        raise AssertionError("work was done")

    prefix = small.prefill([5, 6])
    for work, tokens in ((small.prefill, 65), (small.logits, 65), (prefix.extend, 63)):
        with pytest.raises(
            lily.ContextError, match=r"^65 tokens do not fit the context of 64; shorten the prompt$"
        ):
            work([5] * tokens, progress=never)
    for work in (small.generate, small.stream):
        with pytest.raises(
            lily.ContextError, match=r"^65 tokens do not fit the context of 64; shorten the prompt$"
        ):
            work([5] * 65)
        with pytest.raises(
            lily.ContextError, match=r"^64 tokens leave no room for an answer in the context of 64; shorten"
        ):
            work([5] * 64)
        with pytest.raises(lily.ContextError, match=r"tokens do not fit the context of 64"):
            work("fox " * 200)


def test_the_context_can_be_filled(small: lily.Model) -> None:
    prefix = small.prefill([5, 6, 7, 8] * 14)
    for limit in (None, 8, 9, 10**6):
        done = prefix.generate(max_tokens=limit, stop_tokens=(), seed=1)
        assert (len(done.tokens), done.finish_reason) == (8, "length")
    full = prefix.extend(done.tokens)
    assert len(full) == 64
    assert np.isfinite(full.logits()).all()
    assert small.logits(full.tokens).shape == (64, 4096)
    with pytest.raises(lily.ContextError, match="no room for an answer"):
        full.generate()


# Loading and the end of life


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (Path(lily.DEMO) / "config.json", r"config\.json: wanted a checkpoint's folder, got a file"),
        ("/no/such/folder", r"^/no/such/folder: no such folder; wanted one that holds config\.json"),
    ],
)
def test_a_path_that_is_no_folder(path: str | Path, text: str) -> None:
    with pytest.raises(lily.ModelFilesError, match=text):
        lily.Model.load(path)


def test_a_path_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="path: wanted a str or a path of a checkpoint's folder, got int"):
        lily.Model.load(7)
    with pytest.raises(lily.ModelFilesError, match=r"config\.json"):
        lily.Model.load(tmp_path)
    place = tmp_path / "with space ü"
    place.symlink_to(lily.DEMO, target_is_directory=True)
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in (place, str(place), "~/with space ü"):
        with lily.Model.load(path) as model:
            assert model.info.path == str(place)


def test_options_reach_the_core() -> None:
    with lily.Model.load(lily.DEMO, threads=1, kv="f32") as model:
        assert model.info.options["threads"] == "1"
        assert model.info.options["kv"] == "f32"
    with pytest.raises(ValueError, match="thread"):
        lily.Model.load(lily.DEMO, thread=1)
    with pytest.raises(ValueError, match="kv"):
        lily.Model.load(lily.DEMO, kv="f99")
    for bad in (1.5, None):
        with pytest.raises(TypeError, match=f"option threads: wanted a str, an int or a bool, got {bad}"):
            lily.Model.load(lily.DEMO, threads=bad)


def test_info_says_what_was_loaded(model: lily.Model) -> None:
    info = model.info
    weights = os.path.getsize(Path(lily.DEMO) / "model.safetensors")
    assert 0.98 * weights < info.weight_bytes <= weights
    assert info.scratch_bytes > 0
    assert (info.context, info.vocab) == (4096, 4096)
    assert info.stop_tokens == (4087, 4089)
    numbers = {"temperature": 0.7, "top_k": 40, "top_p": 0.95, "min_p": 0, "repetition_penalty": 1}
    assert info.sampling == numbers | {"presence_penalty": 0, "frequency_penalty": 0}
    assert info.device in repr(model)
    assert "lily-tales-22m-4bit" in repr(model)


def test_without_a_template_tokens_still_work(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    with lily.Model.load(folder) as model:
        assert len(model.generate(model.tokenizer.encode("Once"), max_tokens=3, stop_tokens=()).tokens) == 3
        with pytest.raises(lily.ModelFilesError, match=r"no chat_template\.jinja.*pass token ids"):
            model.generate(PROMPT)


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "model.safetensors"])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(lily.ModelFilesError, match=re.escape(name)):
        lily.Model.load(folder)


def test_warnings_are_logged_and_nothing_is_printed(
    folder: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model.safetensors", "model-00001-of-00002.safetensors"))
    with caplog.at_level(logging.WARNING, logger="lily"), lily.Model.load(folder) as model:
        model.generate(PROMPT, max_tokens=3)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "index" in caplog.text
    assert capfd.readouterr() == ("", "")
    assert any(isinstance(handler, logging.NullHandler) for handler in logging.getLogger("lily").handlers)


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Not by what works, nor by what is warned of, which logging has."""
    with lily.Model.load(lily.DEMO) as model:
        prefix = model.prefill(PROMPT, progress=False)
        prefix.save(tmp_path / "a.lily")
        prefix.generate(max_tokens=3)
        for _ in model.stream(PROMPT, max_tokens=3, progress=True):
            pass
        repr(model), model.info, model.cache_stats(), model.queue_stats()
    with lily.Model.load(lily.DEMO, kv="int8") as other, pytest.raises(lily.PrefixMismatchError):
        other.load_prefix(tmp_path / "a.lily")
    shutil.copytree(lily.DEMO, tmp_path / "stale", symlinks=False)
    index = {"weight_map": {"a": "gone.safetensors"}}
    (tmp_path / "stale" / "model.safetensors.index.json").write_text(json.dumps(index))
    with lily.Model.load(tmp_path / "stale") as stale:
        assert stale._engine.tensors
    assert capfd.readouterr() == ("", "")


def test_after_close_everything_says_so() -> None:
    with lily.Model.load(lily.DEMO) as model:
        prefix = model.prefill(PROMPT)
        stream = model.stream(PROMPT, stop_tokens=())
        next(stream)
        late = model.stream(PROMPT)
    model.close()
    uses = (
        lambda: model.generate(PROMPT),
        lambda: model.stream(PROMPT),
        lambda: model.prefill(PROMPT),
        lambda: model.logits([1]),
        lambda: model.info,
        prefix.generate,
        lambda: prefix.extend("a"),
        prefix.logits,
        lambda: next(stream),
        lambda: next(late),
    )
    for use in uses:
        with pytest.raises(lily.LilyError, match=r"is closed; load it again with lily\.Model\.load"):
            use()
    assert repr(model) == "<lily.Model lily-tales-22m-4bit: closed>"
    assert model.tokenizer.encode("fox")


def test_the_last_reference_frees_the_model() -> None:
    gc.disable()
    try:
        model = lily.Model.load(lily.DEMO)
        engine = weakref.ref(model._engine)
        prefix = model.prefill(PROMPT)
        stream = prefix.stream()
        next(stream)
        model.generate(PROMPT, max_tokens=2)
        with pytest.raises(ValueError, match="max_tokens"):
            model.generate(PROMPT, max_tokens=0)
        del model
        assert prefix.generate(max_tokens=2).text
        del prefix
        assert engine() is not None
        del stream
        assert engine() is None
    finally:
        gc.enable()


MEMORY = """
import os, re, lily

def resident() -> int:
    return int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

def use() -> None:
    model = lily.Model.load(lily.DEMO)
    model.generate([1, 2, 3], max_tokens=3)

for _ in range(3):
    use()
before = resident()
for _ in range(10):
    use()
print(resident() - before)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads memory from /proc")
def test_loading_again_and_again_does_not_grow() -> None:
    done = run(MEMORY)
    assert int(done.stdout) < 6_000_000, done.stderr  # half of one copy of the weights, after ten


# Import


def test_importing_is_quick_and_brings_nothing_heavy() -> None:
    code = (
        "import sys, time; start = time.perf_counter(); import lily; took = time.perf_counter() - start;"
        "lily.DEMO, dir(lily);"
        "heavy = {'numpy', 'tokenizers', 'jinja2', 'lily._core', 'lily.model', 'logging'} & set(sys.modules);"
        "print(took, heavy)"
    )
    runs = [run(code).stdout.split(maxsplit=1) for _ in range(3)]
    assert {heavy.strip() for _, heavy in runs} == {"set()"}
    assert min(float(took) for took, _ in runs) < 0.15


def test_public_names_are_there() -> None:
    for name in lily.__all__:
        assert getattr(lily, name) is not None
    assert dir(lily) == sorted(lily.__all__)
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", lily.__version__)
    with pytest.raises(AttributeError, match="module 'lily' has no attribute 'Modle'"):
        _ = lily.Modle


@pytest.mark.parametrize("example", sorted(file.stem for file in EXAMPLES.glob("*.py")))
def test_examples_run(example: str) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{example}.py"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 100
    assert done.stderr == ""


def test_the_chat_example_goes_on_after_an_answer_that_is_stopped() -> None:
    with subprocess.Popen(
        [sys.executable, "-u", EXAMPLES / "chat.py"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as program:
        assert program.stdout is not None
        first = program.stdout.readline()
        assert program.stdout.read(10)  # of the answer
        program.send_signal(signal.SIGINT)
        rest, error = program.communicate(timeout=60)
    assert (program.returncode, error) == (0, "")
    assert first.startswith("> ")
    assert "> Tell me what happened then." in rest


def test_another_environments_interpreter_is_the_same(tmp_path: Path) -> None:
    """So `make` does not build .venv anew while one is active."""
    check = EXAMPLES.parent / "tools" / "check.sh"
    own = os.path.realpath(sys._base_executable)  # type: ignore[attr-defined]
    for recorded in (own, sys._base_executable):  # type: ignore[attr-defined]
        (tmp_path / "interpreter").write_text(f"{recorded} {sys.version}\n")
        for python in (own, sys.executable):
            done = subprocess.run([check, "venv", python, tmp_path], capture_output=True, text=True)
            assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert [path.name for path in tmp_path.iterdir()] == ["interpreter"]
