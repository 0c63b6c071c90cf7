"""What the GPU kernels ask of memory, counted by the instrumented simulator: never more than was claimed."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest

import rungs
from bench import synthetic, traffic
from lily import _core, stages
from support import CHECKPOINTS, kernels


@pytest.fixture(autouse=True, scope="module")
def metal():
    rungs.climb("metal")


@cache
def make_session(folder: Path, **options: str) -> _core.Session:
    given = {"device": "sim", "kernels": kernels(instrumented=True), "prefill_chunk": "128"}
    return _core.Session(_core.Weights(str(folder)), given | options)


def run(session, op, layer, rows, past=0):
    """Run an op on one layer, on zeros, after tokens that were never computed; return what was seen."""
    state = session.new_state()
    session._advance(state, past)
    session._recorded()
    session._run(op, layer, [(state, np.zeros(rows, np.int32))])
    session._finish()
    return session._recorded()


# Keys and values.


@pytest.fixture(scope="module")
def widths(tmp_path_factory):
    """Write a checkpoint with 16 query heads on 2 key/value heads of 256, and all else small."""
    directory = tmp_path_factory.mktemp("widths")
    synthetic.write(directory, layers=4, experts=8, vocab=600)
    yield directory
    for file in directory.glob("*.safetensors"):
        file.unlink()


PAST = 1000  # tokens: four pages, the last one not full


def attend(folder, **options):
    """Run attn_mix of one token; return y, and what the pages of keys and values saw, added up."""
    session = make_session(folder, **options)
    rng = np.random.default_rng(3)
    for name in ("qg", "k", "v"):
        wide = session._get(name, 1).shape[1]
        session._set(name, rng.standard_normal((1, wide)).astype(np.float32))
    split = run(session, "attn_mix", 3, 1, PAST)[0]
    rows = 2 * 2 * 256 * 2  # bytes that one position has in a layer: keys and values of two heads
    pages = [t for t in split.memory if t.bytes == 256 * rows]
    assert len(pages) == 4
    assert sum(t.reads for t in pages) == PAST * rows
    assert sum(t.read_lines for t in pages) * 64 == PAST * rows
    seen = {name: sum(getattr(t, name) for t in pages) for name in ("asked_read", "accesses", "sectors")}
    written = sum(t.asked_written for t in pages)
    assert written == rows  # the token's own, once
    return session._get("y", 1), seen, PAST * rows, rows


BLOCK = 64  # positions that attn_mix_split takes at a time; past the last it asks for that one's row again


def test_eight_heads_share_a_load_of_keys_and_values(widths):
    """A key/value head's row is asked for once for its eight query heads; without packing, eight times."""
    packed, with_packing, once, row = attend(widths)
    alone, without, _, _ = attend(widths, gqa_packing="false")
    again = -(PAST + 1) % BLOCK * row
    assert with_packing["asked_read"] == once + again
    assert without["asked_read"] == 8 * (once + again)
    assert np.array_equal(packed, alone)
    assert np.isfinite(packed).all()
    assert packed.any()


def test_coalesced_loads_take_an_eighth_of_the_transactions(widths):
    """16 bytes a lane: an access of a SIMD-group is 512 bytes, and no sector is fetched twice."""
    fast, coalesced, once, row = attend(widths)
    slow, scattered, _, _ = attend(widths, coalesced_kv="false")
    store = row // 2 // 32  # the token's own row is stored 2 bytes a lane
    reads = once + -(PAST + 1) % BLOCK * row
    assert coalesced["asked_read"] == scattered["asked_read"] == reads
    assert once / 32 <= coalesced["sectors"] <= reads / 32 + 32 * store
    assert coalesced["accesses"] <= reads / 512 + 2 * store
    assert scattered["sectors"] >= 7.9 * coalesced["sectors"]
    assert scattered["accesses"] >= 7.9 * coalesced["accesses"]
    assert np.array_equal(fast, slow)


# Weights.

TINY = CHECKPOINTS["tiny"]
OPS = [("gdn_in", 0), ("gdn_out", 0), ("attn_in", 3), ("attn_out", 3), ("moe_route", 0)]
EXPERTS = [("moe_up", 0), ("moe_down", 0)]
SLAB = 64  # outputs of a threadgroup that multiplies in tiles


def narrow(folder):
    """Return the outputs of matrices that have fewer than a slab, by the bytes of their numbers."""
    table = _core.Weights(str(folder)).tensor_table()
    shapes = [shape for _, kind, shape in table if kind.lower() == "u32"]
    return {4 * int(np.prod(shape)): shape[0] for shape in shapes if shape[0] < SLAB and len(shape) == 2}


def multiplied(dispatches):
    """Return (dispatch, what a matrix's numbers saw) for every quantised matrix that a dispatch binds.

    One is known by the scales and biases that follow it: 16 bits each for 64 numbers of 4 or 8 bits.
    """
    found = []
    for d in dispatches:
        for numbers, scales, biases in zip(d.memory, d.memory[1:], d.memory[2:], strict=False):
            sizes = (16 * scales.bytes, 32 * scales.bytes)
            if scales.bytes == biases.bytes and numbers.bytes in sizes and not biases.writes:
                found.append((d, numbers))
    return found


def weights_seen(op, layer, rows, **options):
    """Run an op on zeros, for which every token goes to the same experts."""
    session, K = make_session(TINY, **options), _core.read_config(TINY)["experts_per_token"]
    if op == "moe_down":  # moe_up chooses for itself
        session._set("expert", np.tile(np.arange(K, dtype=np.float32), (rows, 1)))
    return multiplied(run(session, op, layer, rows))


@pytest.mark.parametrize(("op", "layer"), OPS + EXPERTS)
@pytest.mark.parametrize("rows", [1, 65, pytest.param(128, marks=pytest.mark.long)])
def test_weights_are_read_once(op, layer, rows):
    """By a token, and by up to 128 rows of a prompt at a time: each word once, of the chosen experts only."""
    config, few = _core.read_config(TINY), narrow(TINY)
    found = weights_seen(op, layer, rows)
    assert len(found) >= {"gdn_in": 4, "attn_in": 3, "moe_route": 4, "moe_up": 2}.get(op, 1)
    for number, (dispatch, t) in enumerate(found):
        wanted = t.bytes
        routed = dispatch.kernel.startswith("moe_down") and (
            number == 0 or rows > 1
        )  # not the shared expert's
        if op == "moe_up" or routed:
            wanted = t.bytes * config["experts_per_token"] // config["experts"]
        once = wanted
        if rows > 1 and t.bytes in few:  # a slab's rows past the last read the last one again
            wanted = t.bytes // few[t.bytes] * SLAB
        if rows == 1:  # lanes past a narrow matrix's last word ask for it again, and find it in the cache
            assert t.asked_read >= wanted, dispatch.kernel
        else:
            assert t.asked_read == wanted, dispatch.kernel
        assert once <= 64 * t.read_lines <= once + 64 * 2 * config["experts_per_token"], dispatch.kernel
        assert t.asked_written == 0


@pytest.mark.parametrize("tile", ["16", "32"])
def test_smaller_tiles_of_experts_read_weights_more_often(tile):
    """65 rows of an expert meet its weights once, or once for each 16 or 32 of them."""
    asked = [
        sum(t.asked_read for _, t in weights_seen("moe_up", 0, 65, expert_tile=rows)) for rows in ("0", tile)
    ]
    assert asked[1] == asked[0] * -(-65 // int(tile))


def test_no_weight_is_expanded_in_memory():
    """No product of a prompt's chunk writes as much as its weights would take in 16 bits."""
    session, rows = make_session(TINY), 9
    found = [(d, t) for d, t in multiplied(run(session, "forward", 0, rows)) if d.kernel != "embed"]
    assert len({d.kernel for d, _ in found}) >= 4
    for dispatch, t in found:
        expanded = 4 * t.asked_read  # of 4 bits a number
        written = sum(t.asked_written for t in dispatch.memory)
        assert 0 < written < expanded / 2, dispatch.kernel


# The recurrent state.


def sizes_of_state(folder):
    """Return the bytes of a layer's convolution inputs and of its S."""
    c = _core.read_config(folder)
    values = c["value_heads"] * c["value_dim"]
    return 4 * (c["conv_taps"] - 1) * (2 * c["key_heads"] * c["key_dim"] + values), 4 * values * c["key_dim"]


@pytest.mark.parametrize("scan", ["registers", "packed", "chunked"])
@pytest.mark.parametrize("rows", [33, pytest.param(128, marks=pytest.mark.long)])
def test_a_scan_reads_and_writes_the_state_once(scan, rows):
    conv, delta = sizes_of_state(TINY)
    seen = run(make_session(TINY, gdn_scan=scan, gdn_scan_from="3"), "gdn_mix", 0, rows, past=37)
    assert [d.kernel.startswith("gdn_mix_prepare") for d in seen] == [True] + [False] * (len(seen) - 1)
    before, after = (t for t in seen[-1].memory if t.bytes == delta)
    assert (before.asked_read, before.asked_written) == (delta, 0)
    assert (after.asked_read, after.asked_written) == (0, delta)
    assert before.sectors == after.sectors == delta // 32  # each fetched once: loads are coalesced
    for dispatch in seen[:-1]:
        assert not any(t.bytes == delta and (t.reads or t.writes) for t in dispatch.memory)
    assert next(t for t in seen[0].memory if t.bytes == conv and t.writes).asked_written == conv


@pytest.mark.parametrize("rows", [1, 5])
def test_a_few_tokens_read_and_write_the_state_once(rows):
    """Threadgroups that share q and k convolve them each for itself, and so read those inputs each."""
    conv, delta = sizes_of_state(TINY)
    (step,) = run(make_session(TINY), "gdn_mix", 0, rows)
    before, after = (t for t in step.memory if t.bytes == conv + delta)
    c = _core.read_config(TINY)
    tiles = c["value_dim"] // min(64, c["value_dim"]) * c["value_heads"]
    channels = tiles * (2 * c["key_dim"] + min(64, c["value_dim"]))  # convolved by all threadgroups together
    inputs = 4 * channels * sum(max(0, c["conv_taps"] - 1 - t) for t in range(rows))
    if rows < c["conv_taps"] - 1:  # inputs that stay are copied
        inputs += 4 * (c["conv_taps"] - 1 - rows) * (conv // 4 // (c["conv_taps"] - 1))
    assert before.asked_read == delta + inputs
    assert after.asked_written == conv + delta
    assert after.sectors == (conv + delta) // 32


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_nothing_is_touched_that_was_not_counted(rows):
    """In a step and in a prompt's chunk: no more is read, and no more written, than was declared."""
    for dispatch in run(make_session(TINY), "forward", 0, rows, past=300):
        for number, t in enumerate(dispatch.memory):
            where = f"{dispatch.kernel}, buffer {number}"
            assert t.reads or not t.read_lines, where
            assert t.writes or not t.written_lines, where
            assert 64 * t.read_lines <= stages.in_lines(t.reads) + 64 * 16, where
            assert 64 * t.written_lines <= stages.in_lines(t.writes) + 64 * 16, where


# A whole step at the 35B's widths, against its dry record.


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """Write one checkpoint of every real width: 256 experts, the whole vocabulary, four layers."""
    directory = tmp_path_factory.mktemp("real")
    synthetic.write(directory, layers=4, experts=256, vocab=248320)
    yield directory
    for file in directory.glob("*.safetensors"):
        file.unlink()


def close(lines: int, declared: int, pieces: int) -> bool:
    """Whether lines are those of the bytes declared, whose pieces may begin and end within a line."""
    return declared <= 64 * lines <= declared + 2 * 64 * pieces


@pytest.mark.long
@pytest.mark.unsanitized
def test_a_step_at_real_widths_touches_what_the_dry_one_declares(real):
    """A Gated DeltaNet layer, the attention layer, embedding and head: stage by stage, buffer by buffer."""
    bench = traffic.Bench(real, kernels(instrumented=True))
    seen = bench.step(traffic.STEP)
    dry = _core.record_decode(real, traffic.STEP, bench.session.options)
    seen = seen[len(seen) - len(dry) :]  # a step that samples on the device needs no embed of its own
    assert [(d.kernel, d.groups) for d in seen] == [(d.kernel, d.groups) for d in dry]
    assert len({d.stage for d in seen}) == dry[-1].stage + 1
    for got, want in zip(seen, dry, strict=True):
        for number, (t, declared) in enumerate(zip(got.memory, want.memory, strict=True)):
            where = f"{got.kernel}, buffer {number}"
            assert (t.bytes, t.reads, t.writes) == (declared.bytes, declared.reads, declared.writes), where
            assert close(t.read_lines, t.reads, 8), where
            assert close(t.written_lines, t.writes, 1), where
    for context in stages.CONTEXTS:
        total = traffic.of_the_35b(seen, bench.attend(context))
        step = stages.step(None, context, bench.session.options)
        assert abs(64 * total.lines / (step.read + step.written) - 1) < 1e-3
        assert 64 * total.lines <= 1.03 * step.floor
        assert total.asked > 64 * total.lines
