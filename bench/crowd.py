"""What the cache spares, and what answers written at once gain from sharing their passes.

    python -m bench.crowd [--record]

Both ways are measured in one run, by turns, on the embedded checkpoint: a machine's mood falls on both.
"""

import argparse
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import lily
from bench import record, run
from lily.settings import Reuse

PROMPT_TOKENS, NEW_TOKENS = 3584, 16
ANSWER_TOKENS, CROWD, ROUNDS = 64, (1, 2, 4, 8), 5
TOPICS = ("fox", "hen", "cat", "dog", "crow", "moon", "king", "tree")


def first_token_seconds(model: lily.Model, prompt: list[int], reuse: Reuse) -> float:
    """Return how long a prompt's first token takes."""
    started = time.perf_counter()
    model.generate(prompt, max_tokens=1, seed=1, stop_tokens=(), reuse=reuse)
    return time.perf_counter() - started


def first_tokens(rounds: int = 3) -> tuple[list[float], list[float]]:
    """Return the seconds to the first token of prompts that are new, and of prompts of which the end is."""
    cold, warm = [], []
    with lily.Model.load(lily.DEMO) as model:
        text = model.tokenizer.encode("The fox went on until she came to a river. " * 400)
        for turn in range(rounds):
            prompt = text[turn : turn + PROMPT_TOKENS]
            cold.append(first_token_seconds(model, prompt, "off"))
            model.generate(prompt[:-NEW_TOKENS], max_tokens=1)
            warm.append(first_token_seconds(model, prompt, "auto"))
    return cold, warm


def together(model: lily.Model, prefixes: list[lily.Prefix]) -> float:
    """Return the tokens per second that answers to some prefixes come to, all written at once."""
    threads = [
        threading.Thread(
            target=prefix.generate,
            kwargs={"max_tokens": ANSWER_TOKENS, "stop_tokens": (), "seed": seed},
        )
        for seed, prefix in enumerate(prefixes)
    ]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(prefixes) * ANSWER_TOKENS / (time.perf_counter() - started)


@contextmanager
def crowds() -> Iterator[list[tuple[int, lily.Model, list[lily.Prefix]]]]:
    """Yield a model that takes one sequence a pass and one that takes eight, with prefixes to go on from."""
    found = []
    for batch in (1, 8):
        model = lily.Model.load(lily.DEMO, decode_batch=batch)
        starts = [f"Once upon a time there was a little {topic}" for topic in TOPICS]
        found.append((batch, model, [model.prefill(model.tokenizer.encode(start)) for start in starts]))
    yield found
    for _, model, _ in found:
        model.close()


def main() -> None:
    """Measure, print, and record what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", action="store_true", help="add the figures to bench/records")
    keep = parser.parse_args().record

    def tell(case: str, unit: str, samples: list[float], options: dict[str, object], note: str = "") -> None:
        print(record.line(case, unit, record.summarise(samples)))
        if keep:
            record.append(bench="crowd", case=case, unit=unit, samples=samples, options=options, note=note)

    cold, warm = first_tokens()
    prompt = f"{PROMPT_TOKENS} tokens"
    tell(f"first token, {prompt} new", "s", cold, {})
    tell(f"first token, {NEW_TOKENS} of {prompt} new", "s", warm, {})
    tell("ratio of the two", "x", [c / w for c, w in zip(cold, warm, strict=True)], {})
    with crowds() as models:
        for _, model, prefixes in models:
            together(model, prefixes)  # warms up
        for count in CROWD:
            rates: dict[int, list[float]] = {batch: [] for batch, _, _ in models}
            for _ in range(ROUNDS):
                for batch, model, prefixes in models:
                    rates[batch].append(together(model, prefixes[:count]))
            for batch, samples in rates.items():
                tell(f"{count} at once", "tok/s", samples, {"decode_batch": batch})


if __name__ == "__main__":
    run(main)
