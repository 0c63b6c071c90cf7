"""Ctrl-C at any time: a program ends with 130, or goes on with a model that is as good as before."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

import lily
from lily import _core
from support import CHECKPOINTS, backends, options_of


@pytest.fixture(scope="module", params=["cpu", *(name for name in backends() if name == "sim")])
def session(request: pytest.FixtureRequest) -> tuple[_core.Session, np.ndarray]:
    """A session, and tokens that are a chunk of it that takes long."""
    if request.param == "cpu":
        return _core.Session(_core.Weights(lily.DEMO), {"prefill_chunk": "4096"}), np.full(3000, 5, np.int32)
    options = options_of("sim") | {"prefill_chunk": "256"}
    return _core.Session(_core.Weights(str(CHECKPOINTS["tiny"])), options), np.full(150, 5, np.int32)


@pytest.fixture
def real_interrupts() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Stopped(Exception):  # noqa: N818  it is no error
    pass


def stop() -> None:
    raise Stopped


def test_a_chunk_can_be_left_between_its_layers(session: tuple[_core.Session, np.ndarray]) -> None:
    model, long = session
    state = model.new_state()
    model.extend(state, long[:20])
    shared, before = model.fork(state), model.last_logits(state)
    with pytest.raises(Stopped):
        model.extend(state, long, None, stop)
    assert (state.length, state.has_logits) == (20, True)
    assert np.array_equal(model.last_logits(state), before)
    assert np.array_equal(model.last_logits(shared), before)
    for left in (state, shared):
        model.extend(left, long[:10])
    fresh = model.new_state()
    model.extend(fresh, long[:20])
    model.extend(fresh, long[:10])
    for left in (state, shared):
        assert np.array_equal(model.last_logits(left), model.last_logits(fresh))
    with pytest.raises(Stopped):
        model.logits(model.new_state(), long, None, stop)


def test_what_interrupts_cannot_use_the_model(session: tuple[_core.Session, np.ndarray]) -> None:
    """It would wait for itself for ever, as a signal handler could."""
    model, long = session
    other = model.new_state()
    model.extend(other, long[:5])

    def use() -> None:
        model.extend(other, long[:5])

    with pytest.raises(lily.LilyError, match="the model is at work in this very thread: a signal handler"):
        model.extend(model.new_state(), long, None, use)
    model.extend(other, long[:5])  # and is free again


def test_ctrl_c_does_not_wait_for_the_chunk(real_interrupts: None) -> None:
    with lily.Model.load(lily.DEMO, prefill_chunk=4096) as model:
        want = model.generate("A story.", seed=1, max_tokens=20).tokens
        base = model.prefill([5] * 10)
        for work in (model.prefill, base.extend):
            started = time.monotonic()
            work([5] * 1500)
            whole = time.monotonic() - started
            timer = threading.Timer(whole / 5, os.kill, (os.getpid(), signal.SIGINT))
            timer.start()
            started = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                work([5] * 1500)
            # A layer in eight, the 50 ms, and this machine's mood.
            assert time.monotonic() - started < 0.75 * whole + 0.2
            timer.join()
        assert model.generate("A story.", seed=1, max_tokens=20).tokens == want
        assert np.array_equal(base.logits(), model.prefill([5] * 10).logits())


PROGRAM = """
import os, signal, sys, lily
signal.signal(signal.SIGINT, signal.default_int_handler)
model = lily.Model.load(lily.DEMO, prefill_chunk=16)
want = model.generate("A story.", seed=1, max_tokens=20).tokens

def decode():
    for i, chunk in enumerate(model.stream("A story.", stop_tokens=(), max_tokens=4000)):
        if i == 10:
            print(os.getpid(), flush=True)

def prefill():
    model.prefill([5] * 4096, progress=lambda done, total: done == 16 and print(os.getpid(), flush=True))

def idle():
    print(os.getpid(), flush=True)
    input()

try:
    {work}()
    print("never interrupted")
except KeyboardInterrupt:
    assert model.generate("A story.", seed=1, max_tokens=20).tokens == want
    print("usable", flush=True)
    if {leave}:
        raise
"""


@pytest.mark.parametrize("leave", [False, True])
@pytest.mark.parametrize("work", ["decode", "prefill", "idle"])
def test_a_script_goes_on_or_ends_as_interrupted(work: str, leave: bool) -> None:
    code = PROGRAM.format(work=work, leave=leave)
    # Through a shell, which says 130 for a program that was ended by the signal.
    with subprocess.Popen(
        ["sh", "-c", '"$0" -c "$1"; exit $?', sys.executable, code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as child:
        assert child.stdout is not None
        os.kill(int(child.stdout.readline()), signal.SIGINT)
        output, errors = child.communicate(timeout=30)
    assert output == "usable\n", errors
    assert child.returncode == (130 if leave else 0)


COMMAND = """
import os, signal, sys, threading, lily, lily.__main__
work = lily.Model.{method}
def interrupted(*arguments, **settings):
    threading.Timer({seconds}, os.kill, (os.getpid(), signal.SIGINT)).start()
    if "seed" in settings:
        settings["stop_tokens"] = ()  # so that it can't be done before it is interrupted
    return work(*arguments, **settings)
lily.Model.{method} = interrupted
sys.exit(lily.__main__.main({arguments!r}))
"""
ENDLESS = ["--max-tokens", "4000", "--temp", "1000", "--top-k", "0", "--top-p", "1"]


@pytest.mark.parametrize(
    ("arguments", "method", "seconds"),
    [
        (["generate"], "load", 0),
        (["chat"], "load", 0),
        (["info"], "load", 0),
        (["generate", "-", "--option", "prefill_chunk=4096"], "stream", 0.3),
        (["generate", *ENDLESS], "stream", 0.3),
    ],
    ids=["generate loads", "chat loads", "info loads", "prefill", "decode"],
)
def test_a_command_ends_with_130(arguments: list[str], method: str, seconds: float) -> None:
    code = COMMAND.format(method=method, seconds=seconds, arguments=arguments)
    done = subprocess.run(
        [sys.executable, "-c", code], input="fox " * 3900, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
    assert (done.stdout.strip() != "") == (arguments[1:] == ENDLESS)  # it was writing, or was not


@pytest.mark.parametrize(
    "work", ["model.generate('x', max_tokens=3000, seed=1, stop_tokens=())", "model.logits([1] * 4000)"]
)
def test_the_interpreter_ends_while_a_daemon_thread_is_at_work(work: str) -> None:
    program = f"""
import threading, time
import lily

model = lily.Model.load(lily.DEMO)
threading.Thread(target=lambda: {work}, daemon=True).start()
time.sleep(0.3)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
