"""Guessing ahead, measured: what it wins or loses, how many guesses are right, and what checking them reads.

    python -m bench.speculate DIRECTORY [TEXT] [--option device=cuda --option kernels=FILE ...]
                              [--prompt 512] [--tokens 256] [--guesses 2,4,7] [--rounds 3] [--record [FILE]]

The prompt is the beginning of a text, or without one random ids of which the second half is the first. After
it the model writes greedily, with and without guesses, by turns; the tokens must be the same, or nothing is
recorded. Random weights write what nobody can guess: "if all are right" therefore measures what right guesses
would win, with the model's own answer as the guess.

For passes of 1 to 5 rows over the text: the experts that a layer's rows choose together, the bytes that such
a pass cannot do without, and its seconds.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench import ops, record, run
from bench.speed import about, lengths, option
from lily import _core, stages
from lily.guess import Guesser
from lily.speed import BEST, Tokens

ROWS = (1, 2, 3, 4, 5)  # of a pass that checks up to four guesses


class Writer:
    """Writes greedily after a prompt, the same tokens each time."""

    def __init__(self, session: _core.Session, prompt: Tokens, count: int) -> None:
        """Take the prompt in, and write `count` tokens one by one to know them."""
        self.session, self.prompt, self.count = session, prompt, count
        self.state = session.new_state()
        session.extend(self.state, prompt)
        self.answer: list[int] = []
        self.answer = self.write(0)[0]

    def write(self, most: int, *, knowing: bool = False) -> tuple[list[int], float, int, int]:
        """Write with up to `most` guesses a pass; knowing: the guesses are the answer itself.

        Returns the tokens, their rate, how many were guessed, and how many of these were right.
        Raises ValueError if the tokens are not those of single steps.
        """
        state, history = self.session.fork(self.state), _core.History()
        token = self.session.sample(state, BEST)
        written, guessed, right = [token], 0, 0
        guesser = Guesser(self.prompt.tolist())
        guesser.add(token)
        started = time.perf_counter()
        while len(written) < self.count:
            room = min(most, self.count - len(written) - 1)
            guess: Sequence[int] = ()
            if room > 0:
                guess = self.answer[len(written) :][:room] if knowing else guesser.guess(room)
            if guess:
                ids = np.asarray(guess, np.int32)
                drawn = self.session.step_with(state, written[-1], ids, BEST, history)
            else:
                drawn = [self.session.step(state, written[-1], BEST, history)]
            guessed += len(guess)
            right += len(drawn) - 1
            for token in drawn:
                guesser.add(token)
            written += drawn
        rate = (self.count - 1) / (time.perf_counter() - started)
        if self.answer and written != self.answer:
            at = next(i for i, (a, b) in enumerate(zip(written, self.answer, strict=True)) if a != b)
            raise ValueError(f"guesses: wanted the tokens of single steps, got another at place {at}")
        return written, rate, guessed, right


def gains(writer: Writer, most: int, rounds: int) -> Iterator[tuple[str, str, list[float]]]:
    """Yield (case, unit, samples) for one number of guesses, matched with single steps by turns."""
    for knowing in (False, True):
        won, shares, counts = [], [], []
        for k in range(rounds + 1):
            found = {}
            for guesses in (0, most) if k % 2 == 0 else (most, 0):
                found[guesses] = writer.write(guesses, knowing=knowing)
            if k == 0:
                continue  # warms up
            _, rate, guessed, right = found[most]
            won.append(100 * (rate / found[0][1] - 1))
            counts.append(float(guessed))
            shares.append(100 * right / guessed if guessed else 0.0)
        if knowing:
            yield f"guesses {most}, gain if all are right", "%", won
            return
        yield f"guesses {most}, gain", "%", won
        yield f"guesses {most}, guessed", "tokens", counts
        yield f"guesses {most}, right", "%", shares


def chosen(session: _core.Session, config: dict[str, Any], tokens: Tokens) -> list[np.ndarray[Any, Any]]:
    """Return the experts (T, K) that each layer chooses for tokens, from the start."""
    state, found = session.new_state(), []
    parts = [(state, tokens)]
    for op, layer in ops.of_pass(config):
        session._run(op, layer, parts)
        if op == "moe_up":
            found.append(session._get("expert", len(tokens)).astype(np.int32))
    return found


def distinct(layers: Sequence[np.ndarray[Any, Any]], rows: int) -> float:
    """Return how many experts of a layer `rows` consecutive tokens choose together, on average."""
    return float(
        np.mean(
            [
                len(np.unique(experts[begin : begin + rows]))
                for experts in layers
                for begin in range(0, len(experts) - rows + 1)
            ]
        )
    )


def reads(session: _core.Session, config: dict[str, Any], tokens: Tokens) -> Iterator[tuple[str, str, float]]:
    """Yield (case, unit, figure) of passes of a few rows after a text."""
    layers = chosen(session, config, tokens)
    state = session.new_state()
    session.extend(state, tokens[: -max(ROWS)])
    for rows in ROWS:
        experts = distinct(layers, rows)
        read = stages.floor({**config, "experts_per_token": experts}, state.length)
        parts = [(session.fork(state), tokens[state.length :][:rows])]
        seconds = sum(session._time(ops.of_pass(config), 10, parts)) / 10
        yield f"{rows} rows, distinct experts", "", experts
        yield f"{rows} rows, at least", "MB", read / 1e6
        yield f"{rows} rows, a pass", "ms", 1e3 * seconds


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.speculate", description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("text", type=Path, nargs="?")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the text to begin with")
    parser.add_argument("--tokens", type=int, default=256, help="tokens to write")
    parser.add_argument("--guesses", type=lengths, default=[2, 4, 7], help="a pass, with commas between")
    parser.add_argument("--rounds", type=int, default=3, help="samples of each")
    parser.add_argument("--option", type=option, action="append", default=[], help="NAME=VALUE")
    record.add_option(parser)
    given = parser.parse_args(arguments)

    weights = _core.Weights(str(given.directory))
    session = _core.Session(weights, dict(given.option))
    if given.text is None:
        half = np.random.default_rng(0).integers(
            0, weights.config["vocab"], given.prompt // 2, dtype=np.int32
        )
        prompt = np.concatenate([half, half])
    else:
        from lily.tokenizer import Tokenizer

        ids = Tokenizer.load(given.directory).encode(given.text.read_text(encoding="utf-8"))
        prompt = np.asarray(ids[: given.prompt], np.int32)
    if len(prompt) < max(ROWS) + 1 or given.tokens < 2 or given.rounds < 1:
        parser.error("wanted a text of some tokens, two tokens to write and a round at least")
    facts = about(given.directory, session, dict(given.option))
    note = f"after {len(prompt)} tokens of {given.text.name if given.text else 'random ids, repeated'}"
    keep = partial(
        record.keep, given.record, bench="speculate", note=note, options=facts, device=session.device
    )
    print(f"{given.directory}: {facts}")
    writer = Writer(session, prompt, given.tokens)
    for most in given.guesses:
        for case, unit, samples in gains(writer, most, given.rounds):
            keep(case, unit, samples)
    for case, unit, figure in reads(session, weights.config, prompt[:256]):
        keep(case, unit, [figure])


if __name__ == "__main__":
    run(main)
