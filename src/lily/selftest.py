"""Whether this machine's GPU runs the kernels as the CPU does: the checks of `lily selftest`.

As a program it makes them and prints a line each; the command runs it as a process of its own, so that a
driver that fails takes nobody else with it. Everything is tried on the embedded checkpoint.
"""

import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lily import DEMO, _core
from lily.errors import LilyError
from lily.files import checkpoint_folder

# Ops of a layer in their order, with what each reads and writes: docs/model.md.
MIXERS = {
    0: {
        "gdn_in": (("x",), ("qkv", "z", "b", "a")),
        "gdn_mix": (("qkv", "b", "a"), ("y",)),
        "gdn_out": (("x", "y", "z"), ("x",)),
    },
    3: {
        "attn_in": (("x",), ("qg", "k", "v")),
        "attn_mix": (("qg", "k", "v"), ("y",)),
        "attn_out": (("x", "y"), ("x",)),
    },
}
EXPERTS = {
    "moe_route": (("x",), ("h", "router", "shared_gate", "shared")),
    "moe_up": (("h", "router"), ("expert", "weight", "hidden")),
    "moe_down": (("x", "shared_gate", "shared", "expert", "weight", "hidden"), ("x",)),
}
ROW_BY_ROW = {"matmul_rows": "65536", "flash_from": "0", "gdn_scan_from": "0"}
ROWS = (1, 2, 33, 130)
PASTS = (0, 300)  # one of them past a page of keys and values
TOKENS = 300
# The same where a kernel takes a second: in a simulator.
QUICK_ROWS, QUICK_PASTS, QUICK_TOKENS = (1, 33), (0, 40), 72
# Of the largest value: float32 sums in another order, and operands rounded to bfloat16 in matrix tiles.
TOLERANCE, TILES = 1e-3, 4e-2
# Each way in which a GPU's options can be turned, against the way they stand.
TURNED = (
    *(
        {"concurrent": "false"},
        {"token_handoff": "false"},
        {"gpu_routing": "false"},
        {"gqa_packing": "false"},
    ),
    *({"coalesced_kv": "false"}, {"fixed_blocks_from": "64"}, {"fused_dequantisation": "false"}),
    *({"gdn_scan": "registers"}, {"gdn_scan": "packed"}, {"expert_tile": "16"}, {"expert_tile": "32"}),
    *({"matmul_rows": "2"}, {"prefill_chunk": "64"}, ROW_BY_ROW),
)
SAME_BITS = ("concurrent", "token_handoff", "gpu_routing")

Outcome = tuple[str, bool, str]  # what, whether it is right, a figure or a reason
Array = NDArray[Any]


def checks(options: dict[str, str], quick: bool = False) -> Iterator[Outcome]:
    """Make every check with a GPU's options, one after another."""
    rows, pasts = (QUICK_ROWS, QUICK_PASTS) if quick else (ROWS, PASTS)
    prompt = (np.arange(QUICK_TOKENS if quick else TOKENS, dtype=np.int32) * 37) % 500
    weights = _core.Weights(str(checkpoint_folder(DEMO)))

    def session(**more: str) -> _core.Session:
        return _core.Session(weights, {"prefill_chunk": "256"} | options | more)

    cpu = _core.Session(weights, {"device": "cpu", "prefill_chunk": "256"})
    start = time.perf_counter()
    gpu = session()
    yield "load", True, f"{gpu.device}, {time.perf_counter() - start:.2f} s"
    if gpu.device.startswith("cpu"):
        yield "no GPU", True, "none here that Lily runs on, so there is nothing to compare"
        return
    start = time.perf_counter()
    faults = gpu._compile()
    yield "kernels", not faults, "; ".join(faults) or f"{time.perf_counter() - start:.2f} s"
    for kind, more, tolerance in (("rows", ROW_BY_ROW, TOLERANCE), ("tiles", {}, TILES)):
        for name, worst in _ops(cpu, session(**more), rows, pasts, prompt).items():
            yield f"{name}, {kind}", worst <= tolerance, f"off by {worst:.1e}, at most {tolerance:.0e}"
    wanted = _story(gpu, prompt)
    for turned in TURNED:
        name = ", ".join(f"{key} {value}" for key, value in turned.items())
        logits, tokens = _story(session(**turned), prompt)
        if set(turned) <= set(SAME_BITS):
            yield name, bool(np.array_equal(logits, wanted[0])) and tokens == wanted[1], "the same bits"
        else:
            off = _off(logits, wanted[0])
            yield name, off <= TILES, f"logits off by {off:.1e}, at most {TILES:.0e}"
    off = _off(_story(cpu, prompt)[0], wanted[0])
    yield "the CPU's logits", off <= TILES, f"off by {off:.1e}, at most {TILES:.0e}"


def _ops(
    cpu: _core.Session, gpu: _core.Session, counts: tuple[int, ...], pasts: tuple[int, ...], prompt: Array
) -> dict[str, float]:
    """Run every op on both with what the CPU made so far; return how far apart they were at worst."""
    worst: dict[str, float] = {}
    for past in pasts:
        states = []
        for one in (cpu, gpu):
            state = one.new_state()
            if past:
                one.extend(state, np.resize(prompt, past))
            states.append(state)
        for rows in counts:
            for layer, mixer in MIXERS.items():
                rng = np.random.default_rng([rows, layer])
                x = rng.standard_normal((rows, cpu._get("x", 1).shape[1])).astype(np.float32)
                cpu._set("x", x)
                for op, (reads, writes) in {**mixer, **EXPERTS}.items():
                    off = _op(cpu, gpu, states, op, layer, rows, reads, writes)
                    worst[op] = max(off, worst.get(op, 0.0))
    return worst


def _op(
    cpu: _core.Session,
    gpu: _core.Session,
    states: list[_core.State],
    op: str,
    layer: int,
    rows: int,
    reads: tuple[str, ...],
    writes: tuple[str, ...],
) -> float:
    for name in reads:
        gpu._set(name, cpu._get(name, rows))
    for name in set(writes) - set(reads):  # which may be wider than what the op writes
        for one in (cpu, gpu):
            one._set(name, np.zeros((rows, one._get(name, 1).shape[1]), np.float32))
    tokens = np.zeros(rows, np.int32)
    for one, state in zip((cpu, gpu), states, strict=True):
        one._run(op, layer, [(one.fork(state), tokens)])
    return max(_off(gpu._get(name, rows), cpu._get(name, rows)) for name in writes)


def _off(got: Array, want: Array) -> float:
    """Return the largest difference as a part of the largest value; what is not finite is far off."""
    error = np.abs(got.astype(np.float64) - want)
    worst = float(error.max() / max(1e-30, float(np.abs(want).max())))
    return worst if np.isfinite(worst) else float("inf")


def _story(session: _core.Session, prompt: Array) -> tuple[Array, list[int]]:
    """Return the logits after a prompt, and the tokens that follow."""
    greedy, history, state = _core.Sampling(temperature=0), _core.History(), session.new_state()
    session.extend(state, prompt[:-1])
    logits = session.logits(state, prompt[-1:])[-1]
    tokens = [session.sample(state, greedy)]
    while len(tokens) < 8:
        tokens.append(session.step(state, tokens[-1], greedy, history))
    return logits, tokens


def run(options: dict[str, str], quick: bool = False) -> Iterator[Outcome]:
    """Yield what checks() yields, and what stopped them, if anything did."""
    try:
        yield from checks(options, quick)
    except (LilyError, ValueError, MemoryError) as error:
        yield "stopped", False, str(error)


def main() -> None:
    """Print each outcome as a line of JSON, for the command that reads them."""
    for outcome in run(*json.loads(sys.argv[1])):
        print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    main()
