"""What a prompt's rows go through on the GPU: products in matrix tiles, and the experts' sort.

A matrix unit takes bfloat16 operands. So these ops are compared with reference.py twice: as it is, within
what that rounding may do, and with its own operands rounded, where nearly every number must agree to
float32's last digits.
"""

import contextlib

import numpy as np
import pytest

import rungs
from bench.agree import text_figures
from cases import OPS, Case, inputs
from lily import _core, errors, reference
from lily.agreement import kl_divergence, top1_agreement
from support import CHECKPOINTS, GOLDEN, compare, kernels
from test_ops import padded, widths

ROWS = (9, 31, 32, 33, 63, 65, 129, 257)  # around the blocks of 16, 32 and 128 rows
TILED = [op for op in OPS if not op.endswith("_mix")]
# Each operand is off by up to 2^-9 of itself and a product by 2^-8; so are sums, beside their largest.
ROUNDING = 2**-7

SLABS = (2 * 64 * 72 * 2,)  # bytes of matmul.h's two: 64 rows of 64 bfloats and 8 between them


@pytest.fixture(autouse=True, scope="module")
def metal():
    rungs.climb("metal")


@pytest.fixture(scope="module")
def models():
    return {name: reference.Model(path) for name, path in CHECKPOINTS.items()}


@pytest.fixture(scope="module")
def session_of():
    made = {}

    def get(checkpoint, instrumented=False, **options):
        key = (checkpoint, instrumented, *options.items())
        if key not in made:
            shared = {"device": "sim", "kernels": kernels(instrumented), "kv": "f32", "prefill_chunk": "300"}
            shared |= {
                "flash_from": "0",
                "gdn_scan_from": "0",
            }  # mixers row by row: products are looked at here
            made[key] = _core.Session(_core.Weights(str(CHECKPOINTS[checkpoint])), shared | options)
        return made[key]

    return get


@contextlib.contextmanager
def rounded_operands(monkeypatch):
    """Let the reference multiply as a matrix unit does, and round what experts give, which is stored."""

    def linear(self, name, x, index=slice(None)):
        matrix = reference.to_bf16(self.rows(name, index).astype(np.float32))
        y = reference.to_bf16(x) @ matrix.astype(x.dtype).T
        return reference.to_bf16(y) if "switch_mlp.down_proj" in name else y

    with monkeypatch.context() as patch:
        patch.setattr(reference.Weights, "linear", linear)
        yield


def wanted_of(model, case, given):
    function, reads, writes = OPS[case.op]
    arguments = {name: array.astype(np.float64) for name, array in given.items()}
    if "expert" in given:
        arguments["expert"] = given["expert"].astype(np.int32)
    layer = model.layers[3 if case.op.startswith("attn") else 0]
    result = function(layer, *(arguments[name] for name in reads))
    return dict(zip(writes, result if isinstance(result, tuple) else (result,), strict=True))


def run(session, case, given):
    """Run an op whose outputs start as NaN. Returns what it wrote."""
    _, reads, writes = OPS[case.op]
    wide, rows = widths(session), len(next(iter(given.values())))
    for name in writes:
        if name not in (*reads, "expert"):
            session._set(name, np.full((rows, wide[name]), np.nan, np.float32))
    for name, array in given.items():
        session._set(name, padded(array, wide[name]))
    layer = 3 if case.op.startswith("attn") else 0
    session._run(case.op, layer, [(session.new_state(), np.zeros(rows, np.int32))])
    return {name: session._get(name, rows) for name in writes}


def check(model, session, case, given, monkeypatch):
    got = run(session, case, given)
    plain = wanted_of(model, case, given)
    with rounded_operands(monkeypatch):
        rounded = wanted_of(model, case, given)
    for name, want in plain.items():
        compare(name, got[name], want, 0 if name == "expert" else ROUNDING)
        largest = np.abs(rounded[name]).max()
        typical = np.median(np.abs(got[name] - rounded[name]))
        assert typical <= 5e-7 * largest, f"{name}: typically off by {typical:.3g} of {largest:.3g}"


@pytest.mark.parametrize("op", TILED)
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_tiled_op(op, checkpoint, models, session_of, monkeypatch):
    session, model = session_of(checkpoint), models[checkpoint]
    for rows in ROWS:
        case = Case(op, checkpoint, rows)
        check(model, session, case, inputs(case, model.config, widths(session)), monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize("op", TILED)
def test_tiled_op_keeps_within_bounds(op, models, session_of, monkeypatch):
    """An instrumented library sees every access, and every pair of dispatches without a barrier."""
    session, model = session_of("tiny", instrumented=True), models["tiny"]
    for rows in (9, 33, 129):
        case = Case(op, "tiny", rows)
        check(model, session, case, inputs(case, model.config, widths(session)), monkeypatch)


@pytest.mark.parametrize("option", ["fused_dequantisation", "gpu_routing"])
@pytest.mark.parametrize("checkpoint", ["tiny", "small"])
def test_what_is_done_beforehand_leaves_no_trace(checkpoint, option, models, session_of):
    """Weights expanded before a product, and rows sorted by the host, give the same bits."""
    sessions = [session_of(checkpoint), session_of(checkpoint, **{option: "false"})]
    for op in TILED if option == "fused_dequantisation" else ["moe_up", "moe_down"]:
        case = Case(op, checkpoint, 129)
        given = inputs(case, models[checkpoint].config, widths(sessions[0]))
        whole, other = (run(session, case, given) for session in sessions)
        for name in whole:
            assert np.array_equal(whole[name], other[name]), (op, name)


@pytest.mark.parametrize("op", TILED)
def test_a_row_does_not_see_its_neighbours_in_a_tile(op, models, session_of):
    tiles = ("0", "16", "32") if op in ("moe_up", "moe_down") else ("0",)
    sessions = [session_of("tiny", expert_tile=tile) for tile in tiles]
    case = Case(op, "tiny", 257)
    given = inputs(case, models["tiny"].config, widths(sessions[0]))
    whole = run(sessions[0], case, given)
    for session in sessions:
        for some in (slice(0, 9), slice(3, 20), slice(100, 133), slice(40, 257)):
            part = run(session, case, {name: array[some] for name, array in given.items()})
            for name in whole:
                assert np.array_equal(part[name], whole[name][some]), f"{name} of rows {some}"


def test_a_prompt_agrees_better_than_a_pipeline_in_bfloat16(models, session_of):
    """The bound of the precision contract: the yardstick also rounds whatever lies between the products."""
    session, model = session_of("demo"), models["demo"]
    tokens = np.random.default_rng(3).integers(0, model.config.vocab, 150).astype(np.int32)
    truth = model.logits(tokens)
    yardstick = reference.Model(CHECKPOINTS["demo"], dtype="bf16").logits(tokens)
    logits = session.logits(session.new_state(), tokens)
    assert kl_divergence(truth, logits).mean() <= kl_divergence(truth, yardstick).mean()
    assert top1_agreement(truth, logits) >= 0.97


@pytest.mark.long
@pytest.mark.unsanitized
def test_the_demo_agrees_over_a_text():
    """A prompt's tiles over 5,120 positions, against mlx-lm in float32.

    The precision contract asks for a perplexity within 0.04 % of paths that round activations. It is 0.072 %
    here, of which chance makes 0.03 % either way, and 0.157 % for reference.py's own bfloat16 pipeline
    (python -m bench.agree --kernels). Over 65,408 positions it is 0.024 %, standard error 0.011 % (--own).
    """
    with np.load(GOLDEN / "demo.npz") as file:
        golden = dict(file)
    options = {"device": "sim", "kernels": kernels()}
    session = _core.Session(_core.Weights(str(CHECKPOINTS["demo"])), options)
    logits = np.stack([session.logits(session.new_state(), window) for window in golden["tokens"]])
    figures = text_figures(logits, golden)
    assert golden["tokens"].size >= 4096
    assert figures["demo, same best token"][1] >= 97
    assert abs(figures["demo, perplexity difference"][1]) <= 0.1


@pytest.mark.long
@pytest.mark.unsanitized
def test_a_long_context_end_to_end(models):
    """Tiles and scans over 2,300 tokens, then steps across the lowered threshold of fixed blocks."""
    model = models["tiny"]
    tokens = np.random.default_rng(6).integers(0, model.config.vocab, 2310).astype(np.int32)
    truth = model.logits(tokens)[-60:]
    ideal = reference.Model(CHECKPOINTS["tiny"], dtype="bf16").logits(tokens)[-60:]
    options = {"device": "sim", "kernels": kernels(), "fixed_blocks_from": "2305"}
    session = _core.Session(_core.Weights(str(CHECKPOINTS["tiny"])), options)
    state = session.new_state()
    session.extend(state, tokens[:2250])
    parts = [session.logits(state, tokens[2250:2300])]
    parts += [session.logits(state, tokens[i : i + 1]) for i in range(2300, 2310)]
    logits = np.concatenate(parts)
    assert kl_divergence(truth, logits).mean() <= kl_divergence(truth, ideal).mean()
    assert top1_agreement(truth, logits) >= min(0.97, top1_agreement(truth, ideal))


@pytest.mark.parametrize("cuts", [[9], [10, 30], [16, 32, 48]])
def test_chunks_that_are_all_tiled_give_the_same_bits(cuts, session_of):
    session = session_of("tiny")
    prompt = np.random.default_rng(5).integers(0, 640, 65).astype(np.int32)
    one, other = session.new_state(), session.new_state()
    wanted = session.logits(one, prompt)
    got = np.concatenate([session.logits(other, part) for part in np.split(prompt, cuts)])
    assert np.array_equal(got, wanted)


# Routing


def routed(counts, rows, rng):
    """Return two experts for each of `rows` tokens: expert e has counts[e] rows, the last the rest."""
    assigned = np.repeat(np.arange(len(counts) + 1), [*counts, 2 * rows - sum(counts)])
    return assigned.reshape(2, rows).T[rng.permutation(rows)]


@pytest.mark.parametrize("tile", ["0", "16", "32"])
@pytest.mark.parametrize("routing", ["around a tile", "all to one"])
def test_skewed_routing(tile, routing, models, session_of, monkeypatch):
    rng = np.random.default_rng(4)
    session, model, rows = session_of("tiny", expert_tile=tile), models["tiny"], 256
    experts = model.config.experts
    if routing == "around a tile":
        chosen = routed([0, 1, 127, 128, 129], rows, rng)
    else:
        chosen = np.tile([5, 0], (rows, 1))
    case = Case("moe_up", "tiny", rows)
    given = inputs(case, model.config, widths(session))
    given["router"] = rng.standard_normal((rows, experts)).astype(np.float32)
    np.put_along_axis(given["router"], chosen, np.array([30, 20], np.float32)[None], axis=1)
    check(model, session, case, given, monkeypatch)

    case = Case("moe_down", "tiny", rows)
    given = inputs(case, model.config, widths(session))
    given["expert"] = (chosen if routing == "around a tile" else np.full((rows, 2), 5)).astype(np.float32)
    check(model, session, case, given, monkeypatch)


def test_ties_go_to_the_lower_id_and_nan_to_an_expert_that_exists(models, session_of):
    session, model = session_of("small", instrumented=True), models["small"]
    rows, experts, chosen = 40, model.config.experts, model.config.experts_per_token
    case = Case("moe_up", "small", rows)
    given = inputs(case, model.config, widths(session))
    given["router"] = np.round(given["router"])
    given["router"][7] = np.nan
    given["router"][8] = 0
    got = run(session, case, given)["expert"]
    wanted = np.argsort(-given["router"], axis=1, kind="stable")[:, :chosen]
    finite = np.arange(rows) != 7
    assert np.array_equal(got[finite], wanted[finite])
    assert np.all((got[7] >= 0) & (got[7] < experts))


@pytest.fixture(scope="module")
def library():
    from tools.metal.simulator import Library

    return Library(kernels(instrumented=True))


@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
@pytest.mark.parametrize(("tokens", "experts", "chosen"), [(1, 8, 2), (100, 100, 3), (300, 256, 8)])
def test_the_sort_is_stable(tokens, experts, chosen, order, library):
    rng = np.random.default_rng(tokens)
    assignments, tile = tokens * chosen, 32
    expert = (experts * rng.random(assignments) ** 3).astype(np.int32)  # the low ids take most
    runs = -(-assignments // 256)
    counts, grids = np.zeros((runs, experts), np.uint32), np.zeros((2, 3), np.uint32)
    tiles = np.zeros((assignments // tile + experts, 3), np.uint32)
    place = np.zeros(assignments, np.uint32)
    p = np.array([assignments, experts, runs, tile, 7, 9], np.uint32)
    shared = {"threads": (256,), "order": order}
    library.run("moe_sort_count", {0: p, 1: expert, 2: counts}, (runs,), threadgroup=(4 * experts,), **shared)
    library.run(
        "moe_sort_plan", {0: p, 1: counts, 2: tiles, 3: grids}, (1,), threadgroup=(4 * experts,), **shared
    )
    library.run("moe_sort_place", {0: p, 1: expert, 2: counts, 3: place}, (runs,), **shared)

    sorted_by_expert = np.argsort(expert, kind="stable")
    assert np.array_equal(place, sorted_by_expert)
    needed = grids[0, 1]
    assert np.array_equal(grids, [[7, needed, 1], [9, needed, 1]])
    listed = [np.arange(first, first + rows) for _, first, rows in tiles[:needed]]
    assert np.array_equal(np.concatenate(listed), np.arange(assignments))
    for e, first, rows in tiles[:needed]:
        assert 0 < rows <= tile
        assert np.all(expert[sorted_by_expert[first : first + rows]] == e)


# Products, one at a time


def stored(rng, rows, columns, bits, dtype):
    """Draw a matrix. Returns weight, scales and biases as stored, its args::Matrix, and its numbers."""
    as_bytes, number, value = {
        "bf16": (lambda x: (x.view(np.uint32) >> 16).astype(np.uint16), 0, reference.to_bf16),
        "f16": (lambda x: x.astype(np.float16), 1, lambda x: x.astype(np.float16).astype(np.float32)),
        "f32": (lambda x: x, 2, lambda x: x),
    }[dtype]
    shape = np.array([rows, columns, bits, number], np.uint32)
    if bits == 0:
        numbers = value(rng.standard_normal((rows, columns)).astype(np.float32))
        return [as_bytes(numbers)] * 3, shape, numbers
    q = rng.integers(0, 2**bits, (rows, columns), np.uint32)
    slots = 32 // bits
    words = (q.reshape(rows, -1, slots) << (bits * np.arange(slots, dtype=np.uint32))).sum(
        -1, dtype=np.uint32
    )
    scales, biases = (value(rng.standard_normal((rows, columns // 64)).astype(np.float32)) for _ in range(2))
    numbers = np.repeat(scales, 64, axis=1) * q + np.repeat(biases, 64, axis=1)
    return [words, as_bytes(scales), as_bytes(biases)], shape, numbers


@pytest.mark.parametrize(
    ("bits", "dtype"), [(4, "bf16"), (4, "f32"), (8, "f16"), (0, "bf16"), (0, "f16"), (0, "f32")]
)
@pytest.mark.parametrize("rows", [1, 33, 128])
def test_matmul_takes_every_matrix(bits, dtype, rows, library):
    """Also: all weights are read exactly once for 100 rows of x, and nothing is written but y."""
    rng = np.random.default_rng([bits, rows])
    tokens, columns, stride = 100, 192, 200
    matrix, shape, numbers = stored(rng, rows, columns, bits, dtype)
    x = rng.standard_normal((tokens, stride)).astype(np.float32)
    y = rng.standard_normal((tokens, rows)).astype(np.float32)
    wanted = y + reference.to_bf16(x[:, :columns]) @ reference.to_bf16(numbers).T
    p = np.concatenate([shape, [tokens, stride, 1]]).astype(np.uint32)
    buffers = dict(enumerate([p, x, *matrix, y]))
    groups = (-(-rows // 64), 1)
    ran = library.run("matmul_f32_128", buffers, groups, (128,), threadgroup=SLABS, read_only=(1, 2, 3, 4))
    compare("y", y, wanted, 1e-6)
    assert set(ran.written) == {5}
    if rows % 64 == 0:  # otherwise the last slab repeats its last row
        assert ran.traffic[2].bytes_read == matrix[0].nbytes


def test_tensor_operations_give_what_simdgroup_matrix_gives(library):
    """Metal 4's tiles have a layout of the simulator's own, so code that assumes one gives other numbers."""
    rng = np.random.default_rng(8)
    gate, shape, _ = stored(rng, 100, 128, 4, "bf16")
    up, _, _ = stored(rng, 100, 128, 4, "bf16")
    for tokens, block, threads in ((9, 16, 64), (33, 32, 128), (129, 128, 128)):
        x = rng.standard_normal((tokens, 128)).astype(np.float32)
        results = []
        for tiles in ("", "_tensor"):
            y, activated = np.full((2, tokens, 100), np.nan, np.float32)
            groups = -(-tokens // block)
            p = np.concatenate([shape, [tokens, 128, 0]]).astype(np.uint32)
            buffers = dict(enumerate([p, x, *gate, y]))
            library.run(f"matmul_f32_{block}{tiles}", buffers, (2, groups), (threads,), threadgroup=SLABS)
            p = np.concatenate([shape, shape, [tokens]]).astype(np.uint32)
            buffers = dict(enumerate([p, x, *gate, *up, activated]))
            library.run(f"matmul_swiglu_{block}{tiles}", buffers, (4, groups), (threads,), threadgroup=SLABS)
            results.append((y, activated))
        for name, got, want in zip(("y", "activated"), results[1], results[0], strict=True):
            compare(name, got, want, 1e-6)


# Which kernels multiply in tiles: what the device says it can, and the option `tiles`


@pytest.mark.parametrize(("tiles", "tensors"), [("auto", True), ("tensor", True), ("simdgroup", False)])
def test_tiles_are_chosen_by_what_the_device_can(tiles, tensors, session_of):
    session = session_of("tiny", kv="bf16", flash_from="2", tiles=tiles)
    session._recorded()
    session._run("forward", 0, [(session.new_state(), np.zeros(9, np.int32))])
    families = ("matmul_", "moe_up_tiles_", "moe_down_tiles_", "attn_mix_flash_")
    seen = session._recorded()
    kernels_of = [{d.kernel for d in seen if d.kernel.startswith(name)} for name in families]
    assert all(kernels_of)
    assert {kernel.endswith("_tensor") for kernel in set().union(*kernels_of)} == {tensors}


def test_tensor_operations_that_a_device_lacks_are_refused():
    """As on a GPU without a matrix unit: a library without those kernels stands for one."""
    from tools.metal import compile as compiler

    source = CHECKPOINTS["tiny"].parents[2] / "metal" / "embed.metal"
    options = {"device": "sim", "kernels": str(compiler.compile([source]))}
    weights = _core.Weights(str(CHECKPOINTS["tiny"]))
    with pytest.raises(errors.DeviceError, match="option tiles: wanted tensor operations, which sim, or its"):
        _core.Session(weights, options | {"tiles": "tensor"})
    assert _core.Session(weights, options).options["tiles"] == "auto"


@pytest.mark.long
@pytest.mark.parametrize("op", TILED)
def test_an_op_in_tensor_operations_gives_what_it_gives_in_simdgroup_matrix(op, models, session_of):
    case = Case(op, "small", 129)
    sessions = [session_of("small", tiles=tiles) for tiles in ("simdgroup", "tensor")]
    given = inputs(case, models["small"].config, widths(sessions[0]))
    plain, tensors = (run(session, case, given) for session in sessions)
    for name in plain:
        assert np.array_equal(plain[name], tensors[name]), name


def is_missed(session, chunk, barrier):
    """Whether two dispatches of a pass touch the same bytes side by side once a barrier is left out."""
    session._finish()
    session._drop_barrier(barrier)
    try:
        session.extend(session.new_state(), chunk)
    except errors.DeviceError as error:
        return "and there is no barrier between them" in str(error)
    finally:
        session._drop_barrier(-1)
    return False


@pytest.mark.long
def test_every_barrier_of_a_chunk_is_missed(session_of):
    """Barriers are numbered from the pass's first; leaving out one past its last changes nothing."""
    session = session_of("tiny", instrumented=True)
    chunk = np.random.default_rng(2).integers(0, 640, 9).astype(np.int32)
    missed = 0
    while is_missed(session, chunk, missed):
        missed += 1
    assert missed > 40
    assert not any(is_missed(session, chunk, missed + beyond) for beyond in range(1, 4))
