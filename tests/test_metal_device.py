"""csrc/gpu/metal.mm on a simulated Metal: the same answers, order, errors, memory."""

import gc

import numpy as np
import pytest

import lily
import rungs
from lily import _core, errors
from simulated_metal import GREEDY, PROMPT, begin, go_on, greedy, simulated
from support import CHECKPOINTS, ROW_BY_ROW, kernels


@pytest.fixture(scope="module")
def framework():
    rungs.climb("metal")
    return simulated()


@pytest.fixture(autouse=True)
def _nothing_misused(framework):
    yield
    assert framework.lines("problems") == []


def simulator(checkpoint, **options):
    given = {"device": "sim", "kernels": kernels(), "prefill_chunk": "64"} | ROW_BY_ROW | options
    return _core.Session(_core.Weights(str(CHECKPOINTS[checkpoint])), given)


def states_of(session, state):
    return [part for layer in range(4) for part in session.layer_state(state, layer)]


def assert_same_states(one, other):
    for a, b in zip(one, other, strict=True):
        assert np.array_equal(a, b)


# The same answers.


@pytest.mark.long
def test_tells_the_same_story_as_the_simulator(framework):
    prompt = np.arange(300, 312, dtype=np.int32)
    told = greedy(framework.session("demo"), 32, prompt)
    assert told == greedy(simulator("demo"), 32, prompt)
    assert len(set(told)) > 8


@pytest.mark.parametrize("tiles", [False, True])
def test_gives_the_simulators_bits(framework, tiles):
    options = dict.fromkeys(ROW_BY_ROW, "9") if tiles else {}
    metal, sim = framework.session(**options), simulator("tiny", **options)
    states = [metal.new_state(), sim.new_state()]
    logits = [s.logits(state, PROMPT) for s, state in zip((metal, sim), states, strict=True)]
    assert np.array_equal(*logits)
    assert_same_states(states_of(metal, states[0]), states_of(sim, states[1]))


def test_is_named_and_times_the_gpu(framework):
    session = framework.session()
    assert session.device == "metal (Simulated Apple GPU)"
    greedy(session, 3)
    assert 0 < session._device_seconds() < 60
    assert session._device_seconds() == 0


# Two steps in flight.


def test_a_step_is_committed_before_the_one_before_it_begins(framework):
    """With `ahead`, no command buffer runs before a later one is there: waiting for its token would hang."""
    session = framework.session()
    want = greedy(session, 8)
    state, token = begin(session)
    framework.lines("log")
    with framework.having(ahead=1, log=1):
        assert go_on(session, state, token, 8) == want
        events = framework.lines("log")
    first = int(events[0].split()[1])
    for number in range(first, first + 7):
        assert events.index(f"commit {number + 1}") < events.index(f"signal {number}")


def test_without_handover_a_step_waits_for_the_one_before(framework):
    session = framework.session(token_handoff="false")
    framework.lines("log")
    with framework.having(log=1):
        greedy(session, 4)
        events = framework.lines("log")
    events = [line.split() for line in events if line.startswith(("commit", "signal"))]
    assert [event for event, _ in events] == ["commit", "signal"] * (len(events) // 2)


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_step_that_is_not_taken_leaves_no_trace(framework, steps):
    """A stop, a stop string and a cancel look alike from here: nobody asks for the step in flight."""
    session, plain = framework.session(), framework.session(token_handoff="false")
    state, token = begin(session)
    with framework.having(ahead=1):
        tokens = go_on(session, state, token, steps + 1)  # the next is in flight, and can't begin
    reference, first = begin(plain)
    assert go_on(plain, reference, first, steps + 1) == tokens
    assert state.length == reference.length
    assert_same_states(states_of(session, state), states_of(plain, reference))
    more = np.array([5, 6, 7], np.int32)
    for s, to in ((session, state), (plain, reference)):
        s.extend(to, more)
    assert_same_states(states_of(session, state), states_of(plain, reference))
    assert session.sample(state, GREEDY) == plain.sample(reference, GREEDY)


def test_another_token_than_the_drawn_one_drops_the_step_in_flight(framework):
    session, plain = framework.session(), framework.session(token_handoff="false")
    answers = []
    for s in (session, plain):
        state, token = begin(s)
        history = _core.History()
        after = s.step(state, token, GREEDY, history)
        answers.append([after, *(s.step(state, other, GREEDY, history) for other in (after ^ 1, 3, 4))])
        answers[-1] += states_of(s, state)
    for a, b in zip(*answers, strict=True):
        assert np.array_equal(a, b)


def test_other_states_and_settings_between_steps_change_nothing(framework):
    session, plain = framework.session(), framework.session(token_handoff="false")
    told = []
    for s in (session, plain):
        one, two = begin(s), begin(s, PROMPT[:9])
        hot = _core.Sampling(temperature=1.5, seed=4)
        tokens = [go_on(s, *one, 3), go_on(s, *two, 3), go_on(s, one[0], 11, 3, hot)]
        fork = s.fork(one[0])
        tokens += [go_on(s, fork, 12, 3), go_on(s, one[0], 12, 3), [s.sample(two[0], hot)]]
        told.append(tokens)
    assert told[0] == told[1]


def test_a_drawn_token_is_taken_from_the_pass_that_drew_it(framework):
    """Passes between a draw and its step take the slots in turns; the token stays where it is."""
    told = []
    for s in (framework.session(), framework.session(token_handoff="false")):
        for passes in (1, 2, 3):
            state, token = begin(s)
            for _ in range(passes):
                s.extend(s.new_state(), PROMPT[:2])
            told.append(go_on(s, state, token, 3))
    assert told[:3] == told[3:]
    assert told[0] == told[1] == told[2]


def test_penalties_need_the_token_and_wait_for_it(framework):
    session, plain = framework.session(), framework.session(token_handoff="false")
    penalty = _core.Sampling(temperature=0, repetition_penalty=1.3)
    assert go_on(session, *begin(session), 6, penalty) == go_on(plain, *begin(plain), 6, penalty)


@pytest.mark.long
def test_answers_that_are_stopped_or_called_off_leave_what_they_said(framework):
    """A stop string, a count and a stream that is closed: each sees its end with a step in flight."""
    prompt, told = "Tell me a story about a fox.", []
    for handoff in (True, False):
        options = {"device": "metal", "kernels": framework.path, "token_handoff": handoff}
        with lily.Model.load(lily.DEMO, **options) as model:
            doc = model.prefill(prompt)
            whole = doc.generate(max_tokens=14, seed=3).text
            stopped = doc.generate(max_tokens=14, seed=3, stop=[whole[5:9]]).text
            stream = doc.stream(max_tokens=14, seed=3)
            first = [next(stream).text for _ in range(3)]
            stream.close()
            again = doc.generate(max_tokens=14, seed=3)
            after = doc.extend(whole)
            told.append([whole, stopped, first, again.text, after.logits().tobytes()])
    assert told[0] == told[1]
    assert told[0][0] == told[0][3]
    assert len(told[0][1]) < len(told[0][0])


# Command buffers.


def test_a_prompt_is_cut_by_the_work_that_it_is(framework):
    """The bodies of kernels are skipped: what is counted is what 1,024 tokens of the demo commit."""
    tiles = {"matmul_rows": "9", "flash_from": "32", "gdn_scan_from": "32", "prefill_chunk": "1024"}
    prompt = np.zeros(1024, np.int32)
    commits = []
    for cores in (1, 40):
        with framework.having(cores=cores, family=1007, skip_kernels=1, log=1):
            session = framework.session("demo", **tiles)
            framework.lines("log")
            session.extend(session.new_state(), prompt)
            commits.append(sum(line.startswith("commit") for line in framework.lines("log")))
    assert commits[0] >= 4
    assert commits[1] == 1


# Memory.


def test_weights_are_read_where_the_file_has_them(framework):
    before = framework.get("used")
    session = framework.session("demo")
    taken = framework.get("used") - before
    held = sum(file.stat().st_size for file in CHECKPOINTS["demo"].glob("*.safetensors"))
    assert taken < session.scratch_bytes + held / 8


def test_a_file_longer_than_a_buffer_is_mapped_in_views_that_overlap(framework):
    want = greedy(framework.session("demo"), 2, PROMPT[:3])
    before = framework.get("used")
    with framework.having(max_buffer=8 << 20):  # of 12 MB
        session = framework.session("demo")
    assert framework.get("used") - before < session.scratch_bytes + (2 << 20)
    assert greedy(session, 2, PROMPT[:3]) == want


def test_without_residency_sets_encoders_name_what_they_reach(framework):
    want = greedy(framework.session(), 4)
    with framework.having(residency=0):
        session = framework.session()
    assert greedy(session, 4) == want


def test_too_small_a_machine_is_told_so_before_anything_is_allocated(framework):
    gc.collect()
    before = framework.get("allocated")
    with (
        framework.having(working_set=520 << 20),
        pytest.raises(
            errors.DeviceError, match=r"GB that the GPU may use are taken.*iogpu\.wired_limit_mb=\d"
        ),
    ):
        framework.session("demo")
    assert framework.get("allocated") == before


# Errors: each is typed, says what to do, and leaves the process able to load again.


def fails(framework, wanted, **settings):
    with pytest.raises(errors.DeviceError, match=wanted), framework.having(**settings):
        greedy(framework.session(), 3)


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"no_device": 1}, r'found no GPU.*device="cpu"'),
        ({"family": 1006}, "wants Apple silicon"),
        ({"simd_width": 16}, "kernel embed: wanted SIMD-groups of 32 threads, this GPU has 16"),
        ({"max_threads": 64}, "kernel embed wants 256 threads a threadgroup, this GPU runs at most 64"),
        ({"refuse_buffer": 3}, "gave no .* GB of memory.*shorter prompt"),
        ({"refuse_buffer": 60}, "gave no .* GB of memory.*shorter prompt"),
        ({"refuse_pipeline": 4}, r"kernel \w+ does not compile: Compiler encountered"),
    ],
    ids=str,
)
def test_refusals(framework, settings, wanted):
    want = greedy(framework.session(), 3)
    fails(framework, wanted, **settings)
    assert greedy(framework.session(), 3) == want


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (8, "too little memory.*iogpu.wired_limit_mb"),
        (2, "smaller prefill_chunk"),
        (4, "start it again"),
        (7, "background"),
        (11, "load the model again"),
        (1, "lily selftest"),
    ],
)
def test_a_command_buffer_that_fails(framework, code, advice):
    session = framework.session()
    want = greedy(session, 3)
    state = session.new_state()
    with (
        framework.having(fail_buffer=1, fail_code=code),
        pytest.raises(
            errors.DeviceError, match=rf"kernels embed to \w+: simulated failure \({code}\).*{advice}"
        ),
    ):
        session.extend(state, PROMPT)
    with pytest.raises(errors.DeviceError, match="simulated failure"):  # nothing after it can be trusted
        begin(session)
    assert greedy(framework.session(), 3) == want


def test_a_step_in_flight_that_fails(framework):
    session = framework.session()
    state, token = begin(session)
    with pytest.raises(errors.DeviceError, match="simulated failure"), framework.having(fail_buffer=4):
        go_on(session, state, token, 8)
    del session, state
    assert greedy(framework.session(), 3)


def test_a_gpu_that_is_lost(framework):
    session = framework.session()
    state, token = begin(session)
    with framework.having(lost=1):
        with pytest.raises(errors.DeviceError, match="The GPU is gone: load the model again"):
            go_on(session, state, token, 8)
        with pytest.raises(errors.DeviceError, match="The GPU is gone"):
            greedy(framework.session(), 2)
    assert greedy(framework.session(), 3)


@pytest.mark.long
def test_a_kernel_that_does_not_compile(framework):
    source = simulated(source=True)
    with (
        source.having(refuse_library=1),
        pytest.raises(errors.DeviceError, match=r"do not compile; use .*: \w+\.metal: program"),
    ):
        source.session()
    assert source.lines("problems") == []


def test_elsewhere_there_is_no_metal(framework):
    weights = _core.Weights(str(CHECKPOINTS["tiny"]))
    with pytest.raises(errors.DeviceError, match="wants a Mac with Apple silicon"):
        _core.Session(weights, {"device": "metal"})
    with pytest.raises(errors.DeviceError, match="option kernels"):
        _core.Session(weights, {"device": "metal", "kernels": kernels()})


def test_auto_is_metal_where_it_is(framework):
    assert framework.session(device="auto").device.startswith("metal")
    with framework.having(no_device=1):
        assert framework.session(device="auto").device.startswith("cpu")
    with framework.having(family=1006):
        assert framework.session(device="auto").device.startswith("cpu")


# Compiled kernels are kept.


def test_pipelines_come_back_from_the_cache(framework, tmp_path):
    framework.set_text("caches", str(tmp_path))
    try:
        seen = []
        for _ in range(2):
            framework.lines("log")
            with framework.having(log=1):
                greedy(framework.session(), 2)
                gc.collect()
                seen.append(
                    {line for line in framework.lines("log") if line.split()[0] in ("archived", "compiled")}
                )
        assert {line.split()[0] for line in seen[0]} == {"compiled"}
        assert seen[1] == {line.replace("compiled", "archived") for line in seen[0]}
        (archive,) = (tmp_path / "lily").iterdir()
        archive.unlink()
        archive.mkdir()  # can't be read, nor written
        assert greedy(framework.session(), 2)
    finally:
        framework.set_text("caches", "")


# Nothing is left behind.


def alive_after(framework, session, state, token, steps):
    history = _core.History()
    for _ in range(steps):
        token = session.step(state, token, GREEDY, history)
    session._finish()
    return framework.alive(), token


def test_decoding_leaves_no_objects(framework):
    session = framework.session()
    state, token = begin(session)
    before, token = alive_after(framework, session, state, token, 8)
    after, _ = alive_after(framework, session, state, token, 40)
    assert after == before
    assert "autoreleased without a pool" not in after


@pytest.mark.long
def test_10000_steps_leave_no_objects(framework):
    session = framework.session()
    with framework.having(skip_kernels=1):
        state, token = begin(session, PROMPT[:5])
        counts = []
        for _ in range(21):  # forks begin where the state is; the first brings the kernels of long contexts
            fork = session.fork(state)
            alive_after(framework, session, fork, token, 500)
            del fork
            session.extend(session.new_state(), PROMPT[:3])  # the step in flight is forgotten
            session._finish()
            counts.append(framework.alive())
    assert counts[1:] == counts[:1] * 20


@pytest.mark.parametrize("cycles", [3, pytest.param(100, marks=pytest.mark.long)])
def test_loading_and_closing_leaves_no_objects(framework, cycles):
    greedy(framework.session(), 2)
    gc.collect()
    before, memory = framework.alive(), framework.get("allocated")
    for _ in range(cycles):
        greedy(framework.session(), 2)
        gc.collect()
    assert framework.alive() == before
    assert framework.get("allocated") == memory


# With every access watched.


@pytest.mark.long
@pytest.mark.parametrize("residency", [0, 1])
def test_no_dispatch_reaches_what_is_not_resident_or_not_ordered(residency):
    """Host addresses are none of the GPU's here, so an address that was not translated is a finding too."""
    watched = simulated(instrumented=True)
    with watched.having(residency=residency):
        for options in ({}, {"matmul_rows": "9", "flash_from": "9", "gdn_scan_from": "9"}):
            session = watched.session(**options)
            greedy(session, 4)
            del session
    assert watched.lines("problems") == []


# The kernels from their source.


@pytest.mark.long
def test_kernels_compile_from_what_the_extension_holds(framework):
    source = simulated(source=True)
    assert greedy(source.session(), 4) == greedy(framework.session(), 4)
    assert source.lines("problems") == []


@pytest.mark.long
def test_an_m5_gets_tensors_and_falls_back_without(framework):
    source = simulated(source=True)
    tiles = {"matmul_rows": "9", "flash_from": "9", "gdn_scan_from": "9"}
    with source.having(family=1010):
        session = source.session(**tiles)
        assert session.device == "metal (Simulated Apple GPU, tensors)"
        with source.having(refuse_library=3):
            other = source.session(**tiles)
        assert other.device == "metal (Simulated Apple GPU)"
    assert greedy(session, 4) == greedy(other, 4)
    assert source.lines("problems") == []
