"""How the core keeps the precision contract, on the checkpoints that mlx-lm has been recorded on.

    python -m bench.agree [--record] [--kv int8]
    python -m bench.agree --kernels build/kernels.so [--record]
    python -m bench.agree --kernels build/kernels.ptx --device cuda --own 128 [--record]

The vectors compared with are mlx-lm's in float32; tests/golden says how they were made. With --kernels the
GPU kernels run in the simulator, and are compared with reference.py, beside reference.py in bfloat16.

With --own N they are compared with the CPU, which keeps keys and values in float32 and is itself within
2e-5 % of mlx-lm, over N texts of 512 tokens that the model draws itself. A difference in perplexity is a mean
of errors of either sign: over the 5,120 positions of the golden text chance alone moves it by 0.03 %, so a
bound of 0.04 % takes more of them.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench import record, run
from lily.agreement import kl_divergence, perplexity, target_log_probabilities

Array = NDArray[Any]


ROOT = Path(__file__).parent.parent
DEMO = ROOT / "src" / "lily" / "demo" / "lily-tales-22m-4bit"
GOLDEN = ROOT / "tests" / "golden"
KV = ("bf16", "f32", "int8")


def core_logits(directory: Path, windows: Array, options: dict[str, str]) -> tuple[str, Array]:
    """Run the core over windows (N, T) of tokens; return its device and float32 logits (N, T, V)."""
    from lily import _core

    session = _core.Session(_core.Weights(directory), options)
    return session.device, np.stack([session.logits(session.new_state(), window) for window in windows])


def text_figures(logits: Array, golden: dict[str, Array]) -> dict[str, tuple[str, float]]:
    """Compare logits over the held-out text with what mlx-lm recorded of it; return case: (unit, figure)."""
    pairs = zip(logits, golden["tokens"], strict=True)
    ours = perplexity(np.stack([target_log_probabilities(*pair) for pair in pairs]))
    theirs = perplexity(golden["target_log_probability"])
    shown = logits.reshape(-1, logits.shape[-1])[golden["shown"]]
    return {
        "demo, same best token": ("%", 100 * float(np.mean(logits.argmax(-1) == golden["top1"]))),
        "demo, perplexity difference": ("%", 100 * (ours / theirs - 1)),
        "demo, mean KL": ("nat", float(kl_divergence(golden["shown_logits"], shown).mean())),
    }


def rounding_figures(windows: Array, options: dict[str, str]) -> tuple[str, dict[str, tuple[str, float]]]:
    """Compare a path that rounds activations, and the ideal one, with the truth over windows (N, T)."""
    from lily import reference

    runs: list[list[Array]] = []
    device, logits = core_logits(DEMO, windows, options)
    for window, ours in zip(windows, logits, strict=True):
        truth = reference.Model(DEMO).logits(window)
        yardstick = reference.Model(DEMO, dtype="bf16").logits(window)
        runs.append(
            [truth.argmax(-1) == run.argmax(-1) for run in (ours, yardstick)]
            + [kl_divergence(truth, run) for run in (ours, yardstick)]
            + [target_log_probabilities(run, window) for run in (truth, ours, yardstick)]
        )
    same, same_ideal, kl, kl_ideal, true, got, ideal = (
        np.concatenate(parts) for parts in zip(*runs, strict=True)
    )
    return device, {
        "demo, same best token": ("%", 100 * float(same.mean())),
        "demo, same best token, yardstick": ("%", 100 * float(same_ideal.mean())),
        "demo, perplexity difference": ("%", 100 * (perplexity(got) / perplexity(true) - 1)),
        "demo, perplexity difference, yardstick": ("%", 100 * (perplexity(ideal) / perplexity(true) - 1)),
        "demo, mean KL": ("nat", float(kl.mean())),
        "demo, mean KL, yardstick": ("nat", float(kl_ideal.mean())),
    }


OWN_TOKENS = 512  # of a text that the model draws
# The GPU's row-by-row kernels for any number of rows: float32 throughout, one result whatever lies beside.
ROW_BY_ROW = {"matmul_rows": "65536", "flash_from": "0", "gdn_scan_from": "0"}


def own_texts(count: int) -> list[Array]:
    """Return texts (OWN_TOKENS) that the demo draws at temperature 1, each with a seed of its own."""
    from lily import _core

    session = _core.Session(_core.Weights(DEMO), {"device": "cpu", "kv": "f32"})
    with np.load(GOLDEN / "demo.npz") as golden:
        begin = golden["tokens"][0, :4]  # how a text of its kind begins
    texts = []
    for seed in range(count):
        state, history = session.new_state(), _core.History()
        session.extend(state, begin)
        sampling = _core.Sampling(temperature=1.0, seed=seed)
        tokens = [*begin, session.sample(state, sampling)]
        while len(tokens) < OWN_TOKENS:
            tokens.append(session.step(state, int(tokens[-1]), sampling, history))
        texts.append(np.array(tokens, np.int32))
    return texts


def own_figures(texts: list[Array], options: dict[str, str]) -> tuple[str, dict[str, tuple[str, float]]]:
    """Compare a way to run the demo with the CPU in float32 over texts; return the device and figures."""
    from lily import _core

    weights = _core.Weights(DEMO)
    true, other = (_core.Session(weights, chosen) for chosen in ({"device": "cpu", "kv": "f32"}, options))
    same, kl, gained = [], [], []
    for text in texts:
        truth, logits = (session.logits(session.new_state(), text) for session in (true, other))
        same.append(truth.argmax(-1) == logits.argmax(-1))
        kl.append(kl_divergence(truth, logits))
        gained.append(target_log_probabilities(logits, text) - target_log_probabilities(truth, text))
    gains = np.concatenate(gained)
    return other.device, {
        "demo's own text, same best token": ("%", 100 * float(np.concatenate(same).mean())),
        "demo's own text, perplexity difference": ("%", 100 * float(np.expm1(-gains.mean()))),
        "demo's own text, its standard error": ("%", 100 * float(gains.std() / len(gains) ** 0.5)),
        "demo's own text, mean KL": ("nat", float(np.concatenate(kl).mean())),
    }


def show(
    figures: dict[str, tuple[str, float]], options: dict[str, str], keep: bool, against: Callable[[str], str]
) -> None:
    """Print figures, and append them to bench/records if they are to be kept."""
    for case, (unit, figure) in figures.items():
        print(f"{options} {record.line(case, unit, record.summarise([figure]))}")
        if keep:
            record.append(
                bench="agree", case=case, unit=unit, samples=[figure], options=options, note=against(case)
            )


def random_figures(preset: str, options: dict[str, str]) -> tuple[str, dict[str, tuple[str, float]]]:
    """Compare logits of a random checkpoint over its recorded tokens; return the device and the figure."""
    with np.load(GOLDEN / f"{preset}.npz") as golden:
        directory = ROOT / "tests" / "checkpoints" / preset
        device, logits = core_logits(directory, golden["random_tokens"][None], options)
        largest = float(np.abs(logits[0] - golden["random_logits"]).max())
    return device, {f"{preset}, largest logit difference": ("logit", largest)}


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.agree", description="Compare the core with what mlx-lm computes in float32."
    )
    parser.add_argument("--record", action="store_true", help="append the figures to bench/records")
    parser.add_argument("--kernels", default="", help="the GPU kernels, made by `make kernels`")
    parser.add_argument("--kv", choices=KV, action="append", help="what keys and values are kept in; all")
    parser.add_argument("--device", default="sim", choices=("sim", "cuda"), help="what runs the kernels")
    parser.add_argument("--own", type=int, default=0, help="compare over so many texts of the model's own")
    given = parser.parse_args(arguments)
    if given.own:
        texts = own_texts(given.own)
        note = f"the CPU with keys and values in float32, over {given.own * (OWN_TOKENS - 1)} positions"
        for kind, ways in (("tiles", {}), ("rows", ROW_BY_ROW)):
            device, figures = own_figures(texts, {"device": given.device, "kernels": given.kernels, **ways})
            about = {"kv": "bf16", "device": f"{device.split(' ')[0]}, {kind}"}
            show(figures, about, given.record, lambda _: note)
        return
    with np.load(GOLDEN / "demo.npz") as file:
        golden = dict(file)
    over = f"over {golden['tokens'].size} positions"
    if given.kernels:
        device, figures = rounding_figures(
            golden["tokens"], {"device": "sim", "kernels": given.kernels, "kv": "bf16"}
        )
        note = f"reference.py, float64, {over}; the yardstick is reference.py in bfloat16"
        show(figures, {"kv": "bf16", "device": device}, given.record, lambda _: note)
        return

    def against(case: str) -> str:
        return f"mlx-lm 0.32.2, float32, {over if case.startswith('demo') else 'over 70 positions'}"

    for kv in given.kv or KV:
        device, logits = core_logits(DEMO, golden["tokens"], {"kv": kv})
        runs = [(device, text_figures(logits, golden))]
        if kv == "f32":
            runs += [random_figures(preset, {"kv": kv}) for preset in ("tiny", "small")]
        for device, figures in runs:
            show(figures, {"kv": kv, "device": device}, given.record, against)


if __name__ == "__main__":
    run(main)
