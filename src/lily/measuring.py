"""The commands that measure: `lily bench` and `lily agree`."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lily

Given = Callable[[argparse.Namespace], dict[str, str]]


def add_commands(commands: Any, model: argparse.ArgumentParser, given: Given) -> None:
    """Add both to a command line. given: reads the options of a model."""
    bench = commands.add_parser(
        "bench",
        parents=[model],
        help="measure prompts and answers of many lengths, beside another engine if it is installed",
    )
    bench.add_argument(
        "-p",
        "--prompt-tokens",
        metavar="N",
        nargs="+",
        help="lengths of prompts, such as 512 or 4K; by default ten from 256 to 128K, those that fit",
    )
    bench.add_argument("-g", "--generation-tokens", type=int, metavar="N", help="tokens to write; 64")
    bench.add_argument("-n", "--num-trials", type=int, default=5, metavar="N", help="rounds; 5")
    bench.add_argument("--peer", metavar="NAME", help="an engine to measure by turns with: mlx-lm")
    bench.add_argument("--json", metavar="FILE", help="write every sample to a file; - is stdout")
    bench.add_argument("--plot", metavar="FILE", help="write a picture, SVG")
    bench.set_defaults(command=lambda options: _bench(options, given(options)))

    agree = commands.add_parser(
        "agree", parents=[model], help="compare the model with another engine, or other options, over a text"
    )
    agree.add_argument("text", help="a file of plain text; - is stdin")
    agree.add_argument(
        "--against",
        default="mlx-lm",
        metavar="WHAT",
        help="mlx-lm, or options of Lily, NAME=VALUE with commas between; by default mlx-lm",
    )
    agree.add_argument("--positions", type=int, metavar="N", help="tokens of the text; all of them")
    agree.add_argument("--json", action="store_true", help="print JSON")
    agree.set_defaults(command=lambda options: _agree(options, given(options)))


def _folder(options: argparse.Namespace) -> Path:
    from lily.files import checkpoint_folder

    return Path(checkpoint_folder(lily.DEMO if options.model is None else options.model))


def _bench(options: argparse.Namespace, given: dict[str, str]) -> int:
    from lily import _core, peers, plot, speed, stages

    steps = speed.STEPS if options.generation_tokens is None else options.generation_tokens
    if steps < 1 or options.num_trials < 1:
        raise ValueError("wanted at least one token to write and one trial")
    folder = _folder(options)
    weights = _core.Weights(folder)
    room = weights.config["max_positions"] - steps - 1
    asked = [stages.tokens(text) for text in options.prompt_tokens or ()]
    lengths = asked or [n for n in speed.LENGTHS if n <= room]
    if not lengths or min(lengths) < 1 or max(lengths) > room:
        raise ValueError(f"--prompt-tokens: wanted lengths from 1 to {room}, got {lengths or 'none'}")
    session = _core.Session(weights, given)
    runners: list[speed.Runner] = [speed.Lily(session, lily.__version__)]
    if options.peer is not None:
        runners.append(peers.load(options.peer, folder))
    print(f"lily: {folder} on {session.device}, {options.num_trials} trials of random ids", file=sys.stderr)
    rows = speed.sweep(runners, lengths, weights.config["vocab"], steps, options.num_trials)
    about: dict[str, Any] = {"model": str(folder), "device": session.device, "options": given}
    about |= {"generation_tokens": steps, "num_trials": options.num_trials}
    if options.json == "-":
        print(json.dumps(speed.document(rows, about), indent=2))
    else:
        print(speed.table(rows))
        if options.json is not None:
            Path(options.json).write_text(json.dumps(speed.document(rows, about), indent=2) + "\n")
    if options.plot is not None:
        Path(options.plot).write_text(plot.svg(rows, f"{folder.name} on {session.device}"))
    return 0


def _agree(options: argparse.Namespace, given: dict[str, str]) -> int:
    import dataclasses

    from lily import agreement, peers
    from lily.tokenizer import Tokenizer

    folder = _folder(options)
    text = sys.stdin.read() if options.text == "-" else Path(options.text).read_text(encoding="utf-8")
    tokens = Tokenizer.load(folder).encode(text)[: options.positions]
    ours = agreement.Lily(folder, given)
    theirs: agreement.Side
    if "=" in options.against:
        pairs = [part.partition("=") for part in options.against.split(",")]
        theirs = agreement.Lily(folder, {name: value for name, _, value in pairs})
    else:
        theirs = peers.load(options.against, folder)
    found = agreement.compare(ours, theirs, tokens)
    if options.json:
        more = {"perplexity_difference_percent": found.perplexity_difference}
        print(json.dumps(dataclasses.asdict(found) | more, indent=2))
    else:
        print(found)
    return 0
