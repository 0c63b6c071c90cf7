"""csrc/gpu/metal.mm on a simulated Metal: the same answers, order, errors, memory."""

import gc
import json
import logging
import os
import shutil
import time

import numpy as np
import pytest

import lily
import rungs
from lily import _core, errors
from lily.__main__ import main
from simulated_metal import GREEDY, PROMPT, begin, go_on, greedy, simulated
from support import CHECKPOINTS, HERE, ROW_BY_ROW, kernels


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
        events = framework.events("commit", "signal")
    first = int(events[0].split()[1])
    for number in range(first, first + 7):
        assert events.index(f"commit {number + 1}") < events.index(f"signal {number}")


def test_without_handover_a_step_waits_for_the_one_before(framework):
    session = framework.session(token_handoff="false")
    framework.lines("log")
    with framework.having(log=1):
        greedy(session, 4)
        events = framework.events("commit", "signal")
    assert [event.split()[0] for event in events] == ["commit", "signal"] * (len(events) // 2)


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


def told_by(stream, framework, enough):
    """Take an answer's pieces, each step held until the next is there; whether the last is still held."""
    pieces = [next(stream).text]
    framework.lines("log")
    with framework.having(ahead=1, log=1):
        pieces += [chunk.text for chunk, _ in zip(stream, range(enough), strict=False)]
        stream.close()
        events = framework.events("commit", "signal")
    held = {event.split()[1] for event in events if event.startswith("commit")}
    return "".join(pieces), held - {event.split()[1] for event in events if event.startswith("signal")}


@pytest.mark.long
def test_an_answer_that_ends_with_a_step_in_flight_leaves_what_it_said(framework):
    """By its count, a stop string, a token that ends it, and by being called off."""
    prompt, told = "Tell me a story about a fox.", []
    for handoff in (True, False):
        options = {"device": "metal", "kernels": framework.path, "token_handoff": handoff}
        with lily.Model.load(lily.DEMO, **options) as model:
            doc = model.prefill(prompt)
            whole = doc.generate(max_tokens=14, seed=3)
            tokens = model.tokenizer.encode(whole.text)
            for end, enough in (
                ({}, 99),
                ({"stop": [whole.text[15:20]]}, 99),
                ({"stop_tokens": [tokens[8]]}, 99),
                ({}, 4),  # called off
            ):
                stream = doc.stream(max_tokens=14, seed=3, **end)
                if handoff:
                    text, in_flight = told_by(stream, framework, enough)
                    assert len(in_flight) == 1
                else:
                    text = "".join(chunk.text for chunk, _ in zip(stream, range(enough + 1), strict=False))
                    stream.close()
                told.append([text, doc.extend(text).logits().tobytes()])
            assert doc.generate(max_tokens=14, seed=3).text == whole.text
    assert told[:4] == told[4:]
    assert len({text for text, _ in told}) == 4
    assert all(told[0][0].startswith(text) for text, _ in told)


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
            commits.append(len(framework.events("commit")))
    assert commits[0] >= 4
    assert commits[1] == 1


# Memory.


def in_two_files(folder, bytes_past):
    """Write the demo again, in two files whose tensors begin so many bytes past a multiple of 16."""
    shutil.copytree(CHECKPOINTS["demo"], folder, ignore=shutil.ignore_patterns("*.safetensors"))
    data = (CHECKPOINTS["demo"] / "model.safetensors").read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    header.pop("__metadata__", None)
    entries = sorted(header.items(), key=lambda entry: entry[1]["data_offsets"])
    homes, sizes = {}, []
    for number, past in enumerate(bytes_past):
        part, held = {}, b""
        for name, entry in entries[len(entries) * number // 2 : len(entries) * (number + 1) // 2]:
            first, last = entry["data_offsets"]
            part[name] = entry | {"data_offsets": [len(held), len(held) + last - first]}
            held += data[begin + first : begin + last]
            homes[name] = f"{number}.safetensors"
        text = json.dumps(part).encode()
        text += b" " * ((past - 8 - len(text)) % 16)
        (folder / f"{number}.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + held)
        sizes.append(len(held))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": homes}))
    return sizes


@pytest.mark.parametrize("bytes_past", [(0, 0), (0, 1), (3, 12)], ids=str)
def test_a_file_is_read_where_it_lies_or_copied_but_not_both(framework, tmp_path, bytes_past):
    """The published files begin their tensors anywhere; what no kernel can load is copied."""
    sizes = in_two_files(tmp_path / "demo", bytes_past)
    want = greedy(framework.session("demo"), 2, PROMPT[:3])
    before, mapped = framework.get("used"), framework.get("mapped")
    session = framework.session(tmp_path / "demo")
    taken, mapped = framework.get("used") - before, framework.get("mapped") - mapped
    copied = sum(size for size, past in zip(sizes, bytes_past, strict=True) if past % 8)
    assert -1 << 17 < taken - session.scratch_bytes - copied < 1 << 17  # vectors, which are float32 by then
    assert 0 <= mapped - (sum(sizes) - copied) < 1 << 17  # headers and whole pages
    assert greedy(session, 2, PROMPT[:3]) == want


def test_a_file_longer_than_a_buffer_is_mapped_in_views_that_overlap(framework, tmp_path):
    want = greedy(framework.session("demo"), 2, PROMPT[:3])
    in_two_files(tmp_path / "demo", (0, 0))
    before = framework.get("used")
    with framework.having(max_buffer=5 << 20):  # of 6 MB
        session = framework.session(tmp_path / "demo")
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


def test_what_the_gpu_may_use_bounds_what_states_may_take(framework):
    """A prompt that the GPU has no memory for is refused before it is begun, though the machine has it."""
    options = {
        "device": "metal",
        "kernels": framework.path,
        "kv": "f32",
        "prefill_chunk": 64,
        "cache_bytes": 0,
    }
    gc.collect()
    with framework.having(working_set=(512 << 20) + (52 << 20)):
        with lily.Model.load(lily.DEMO, **options) as model:
            engine = model._engine
            limit = engine.session.state_limit
            assert limit == engine.session.room
            assert limit < (52 << 20) - engine.weight_bytes - engine.session.scratch_bytes
            assert engine.bytes_for(16) < limit < engine.bytes_for(4000)
            before = framework.get("allocated")
            with pytest.raises(lily.MemoryLimitError, match=r"of the \d+\.\d MB for states"):
                model.prefill(np.zeros(4000, np.int32))
            assert framework.get("allocated") == before
        gc.collect()
        with lily.Model.load(lily.DEMO, **options, memory_bytes=1 << 40) as model:
            assert model._engine.session.state_limit == limit
    assert lily.Model.load(lily.DEMO, device="cpu")._engine.session.room is None


def threads():
    return len(os.listdir("/proc/self/task"))


def test_memory_stays_resident_between_answers_for_a_while(framework):
    greedy(framework.session(resident_seconds="0"), 1)  # starts what stays for the process
    gc.collect()
    before = threads()
    session = framework.session(resident_seconds="2")
    greedy(session, 2)
    with framework.having(log=1):
        framework.lines("log")
        begin = time.monotonic()
        asked = 0
        while time.monotonic() - begin < 2.2:
            time.sleep(0.1)
            asked += len(framework.events("request"))
        assert 1 <= asked <= 4
        time.sleep(0.7)
        assert framework.events("request") == []  # nobody has come
        greedy(session, 2)
        assert framework.events("request")
        without = framework.session(resident_seconds="0")
        greedy(without, 2)
        assert threads() == before + 3  # two queues, and who keeps the first's memory
    del session, without
    gc.collect()
    assert threads() == before


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


def test_a_command_buffer_that_fails_in_the_middle_of_a_prompt(framework):
    options = {"device": "metal", "kernels": framework.path, "prefill_chunk": 16}
    prompt = np.arange(60, dtype=np.int32)
    with lily.Model.load(lily.DEMO, **options) as model:
        seen = []
        with (
            pytest.raises(lily.DeviceError, match=r"simulated failure \(8\).*shorter prompt"),
            framework.having(fail_buffer=3),
        ):
            model.prefill(prompt, progress=lambda done, total: seen.append(done))
        assert 0 < max(seen) < 60
        with pytest.raises(lily.DeviceError, match="simulated failure"):
            model.prefill(prompt)
    with lily.Model.load(lily.DEMO, **options) as model:
        assert model.prefill(prompt).logits().shape == (model.info.vocab,)


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
                seen.append(set(framework.events("archived", "compiled")))
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
def test_kernels_compile_from_what_the_extension_holds(framework, tmp_path, caplog):
    """Which a first load says, a line for each source, through Python's logging."""
    source = simulated(source=True)
    source.set_text("caches", str(tmp_path))
    told = []
    assert greedy(source.session(notice=told.append), 4) == greedy(framework.session(), 4)
    names = {file.stem for file in (HERE.parent / "metal").glob("*.metal")} - {"tensors"}
    assert {line.split()[2] for line in told} == {f"{name}.metal," for name in names}
    gc.collect()  # which saves the pipelines
    told.clear()
    source.session(notice=told.append)
    assert told == []
    source.set_text("caches", "")
    caplog.set_level(logging.INFO, "lily.device")
    lily.Model.load(lily.DEMO, device="metal", kernels=source.path).close()
    assert "Metal: compiling matmul.metal, for the first time on this machine" in caplog.messages
    assert source.lines("problems") == []


@pytest.mark.long
def test_a_metallib_that_the_system_refuses_gives_way_to_the_sources(framework):
    with framework.having(refuse_library=1, log=1):
        framework.lines("log")
        session = framework.session()
        assert framework.events("source")
    assert greedy(session, 4) == greedy(framework.session(), 4)


@pytest.mark.long
def test_a_load_that_is_interrupted_can_be_made_again(framework):
    source = simulated(source=True)

    def interrupt(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        source.session(notice=interrupt)
    assert greedy(source.session(), 2)
    assert source.lines("problems") == []


@pytest.mark.long
def test_an_m5_gets_tensor_operations_and_goes_without_if_they_do_not_compile(framework, capsys):
    tiles = {"matmul_rows": "9", "flash_from": "9", "gdn_scan_from": "9"}
    plain = "metal (Simulated Apple GPU)"
    want = greedy(framework.session(**tiles), 4)
    assert framework.session(**tiles).device == plain
    told = []
    with framework.having(family=1010):
        session = framework.session(**tiles)
        assert session.device == plain + ", tensor operations"
        with framework.having(log=1):
            framework.lines("log")
            assert greedy(session, 4) == want
            assert any(event.endswith("_tensor") for event in framework.events("run"))
        assert framework.session(tiles="simdgroup").device == session.device  # does not use them
        for refusal in ({"refuse_tensors": 1}, {"refuse_pipeline": 2}):
            with framework.having(**refusal):
                other = framework.session(notice=told.append, **tiles)
            assert other.device == plain + ", no tensor operations: their kernels do not compile"
            assert greedy(other, 4) == want
            with pytest.raises(errors.DeviceError, match='Use tiles="auto"'), framework.having(**refusal):
                framework.session(tiles="tensor")
        with framework.having(refuse_tensors=1):
            assert main(["info", "--option", "device=metal", "--option", f"kernels={framework.path}"]) == 0
    assert "no tensor operations: their kernels do not compile" in capsys.readouterr().out
    reasons = [line for line in told if "goes without tensor operations" in line]
    assert "tensors.metal: program_source" in reasons[0]
    assert "_tensor does not compile: Compiler encountered" in reasons[1]
