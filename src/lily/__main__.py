"""The command line, but for what `lily chat` does. Answers go to stdout, all else to stderr."""

import argparse
import io
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import lily
from lily.errors import LilyError
from lily.measuring import add_commands

if TYPE_CHECKING:
    from lily.settings import Generation

DEMO_PROMPT = "Tell me a story about a fox who wanted to see the sea."
DEMO_TOKENS = 300  # where the demo's story is cut by default: it seldom finds an end by itself


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code.

    0 done, 1 failed (one line on stderr), 2 wrong usage, 130 stopped by Ctrl-C, 141 stdout was closed.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a story goes on where its terminal lacks a letter
    try:
        code: int = options.command(options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The interpreter flushes stdout once more when it ends, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (LilyError, MemoryError, OSError) as error:
        print(f"lily: {error or 'out of memory'}", file=sys.stderr)
        return 1
    except ValueError as error:
        print(f"lily: {error}", file=sys.stderr)
        return 2
    return code


def _parser() -> argparse.ArgumentParser:
    model = argparse.ArgumentParser(add_help=False)
    model.add_argument(
        "--model",
        metavar="FOLDER",
        help="the checkpoint's folder, or its id on the Hugging Face hub; by default the embedded demo",
    )
    model.add_argument("--threads", type=int, metavar="N", help="CPU threads; by default one per core")
    model.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="any other way to run it, see `lily info`; may be repeated",
    )
    answer = _answer_parser()
    parser = argparse.ArgumentParser(prog="lily", description="Run Qwen3.6-35B-A3B from its MLX checkpoint.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    generate = commands.add_parser("generate", parents=[model, answer], help="write an answer to a prompt")
    generate.add_argument("prompt", nargs="?", help="the user's message; - reads it from stdin")
    generate.add_argument(
        "--raw", action="store_true", help="continue the prompt's text, without a chat template"
    )
    generate.add_argument(
        "--stats", action="store_true", help="print counts and speed even if stderr is no terminal"
    )
    generate.set_defaults(command=_generate)

    chat = commands.add_parser("chat", parents=[model, answer], help="talk to it in the terminal")
    chat.set_defaults(command=_chat)

    _add_serve(commands, model)
    add_commands(commands, model, _options)

    download = commands.add_parser("download", help="fetch a model's files from the Hugging Face hub")
    download.add_argument("id", help="the model's id there, org/name")
    download.add_argument("--revision", metavar="NAME", help="a branch, tag or commit; by default main")
    download.set_defaults(command=_download)

    info = commands.add_parser(
        "info", parents=[model], help="say what is installed and how a model runs here"
    )
    info.add_argument("--json", action="store_true", help="print JSON")
    info.add_argument(
        "--stages",
        action="store_true",
        help="count a decode step of the GPU kernels instead; reads no weights, and without --model it is "
        "Qwen3.6-35B-A3B's",
    )
    info.add_argument(
        "--context",
        metavar="N",
        nargs="+",
        help="--stages: tokens before the step, such as 4096 or 4K; by default 4K, 256, 32K and 128K",
    )
    info.set_defaults(command=_info)
    return parser


def _add_serve(commands: Any, model: argparse.ArgumentParser) -> None:
    serve = commands.add_parser(
        "serve", parents=[model], help="answer over HTTP, as OpenAI's and Anthropic's servers do"
    )
    serve.add_argument(
        "--host", default="127.0.0.1", help="where to listen; by default %(default)s, this machine only"
    )
    serve.add_argument("--port", type=int, default=8080, help="by default %(default)s; 0 takes a free one")
    serve.add_argument(
        "--api-key",
        metavar="KEY",
        help="what clients must send; by default LILY_API_KEY of the environment, or none",
    )
    serve.add_argument("--allow-public", action="store_true", help="listen beyond this machine without a key")
    serve.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a name this server goes by, beside this machine's own; may be repeated",
    )
    serve.add_argument(
        "--allowed-origin",
        action="append",
        default=[],
        metavar="URL",
        help="a web page that may use it, beside this machine's own; may be repeated",
    )
    serve.add_argument(
        "--served-model-name", metavar="NAME", help="the model's name in /v1/models; by default its folder's"
    )
    serve.add_argument("--strict-model", action="store_true", help="refuse requests that name another model")
    serve.add_argument(
        "--prefix", metavar="FILE", help="a saved prefix that prompts may begin with; by default none"
    )
    serve.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help="cut an answer after N tokens if its request doesn't say; by default 32768, the demo's after "
        f"{DEMO_TOKENS}",
    )
    serve.add_argument(
        "--thinking",
        action=argparse.BooleanOptionalAction,
        help="whether it thinks first if a request doesn't say; by default as the chat template has it",
    )
    serve.add_argument(
        "--max-active",
        type=int,
        default=8,
        metavar="N",
        help="requests that run in turns; by default %(default)s",
    )
    serve.add_argument(
        "--max-waiting",
        type=int,
        default=64,
        metavar="N",
        help="requests that wait behind; by default %(default)s",
    )
    serve.add_argument("--verbose", action="store_true", help="log requests, without their text, to stderr")
    serve.set_defaults(command=_serve)


def _answer_parser() -> argparse.ArgumentParser:
    """Return the options of commands that write answers."""
    answer = argparse.ArgumentParser(add_help=False)
    answer.add_argument("--system", metavar="TEXT", help="what the model is told before anything else")
    answer.add_argument(
        "--thinking",
        action=argparse.BooleanOptionalAction,
        help="whether it thinks first; by default as the model's chat template has it",
    )
    answer.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help=f"cut an answer after N tokens; the demo's after {DEMO_TOKENS}",
    )
    answer.add_argument(
        "--temp", "--temperature", type=float, metavar="T", help="0 takes the likeliest token"
    )
    answer.add_argument("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens; 0 from all")
    answer.add_argument("--top-p", type=float, metavar="P", help="draw from the likeliest that sum to P")
    answer.add_argument(
        "--min-p", type=float, metavar="P", help="draw from those with P times the likeliest's probability"
    )
    answer.add_argument(
        "--repetition-penalty", type=float, metavar="R", help="divide the logits of the answer's tokens by R"
    )
    answer.add_argument(
        "--presence-penalty", type=float, metavar="A", help="take A off the logits of the answer's tokens"
    )
    answer.add_argument(
        "--frequency-penalty",
        type=float,
        metavar="A",
        help="take A off them for each time that they are there",
    )
    answer.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same answer")
    answer.add_argument(
        "--stop", action="append", metavar="TEXT", help="where an answer ends; may be repeated"
    )
    return answer


class _Version(argparse.Action):
    """Look the version up only if it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"lily {lily.__version__}")
        parser.exit()


def _given(options: argparse.Namespace) -> dict[str, str]:
    """Return what --option gave."""
    settings: dict[str, str] = {}
    for setting in options.option:
        name, equals, value = setting.partition("=")
        if not equals:
            raise ValueError(f"--option: wanted NAME=VALUE, got {setting!r}")
        settings[name] = value
    return settings


def _options(options: argparse.Namespace) -> dict[str, str]:
    """Return how a model is to be run, as the core takes it."""
    settings = _given(options)
    if options.threads is not None:
        settings["threads"] = str(options.threads)
    return settings


def _load(options: argparse.Namespace, **capacity: int) -> "lily.Model":
    settings: dict[str, Any] = {**_options(options), **capacity}
    return lily.Model.load(lily.DEMO if options.model is None else options.model, **settings)


def _settings(options: argparse.Namespace) -> "Generation":
    """Return the options that an answer is written by; the demo's seldom ends by itself."""
    return {
        "max_tokens": DEMO_TOKENS
        if options.max_tokens is None and options.model is None
        else options.max_tokens,
        "temperature": options.temp,
        "top_k": options.top_k,
        "top_p": options.top_p,
        "min_p": options.min_p,
        "repetition_penalty": options.repetition_penalty,
        "presence_penalty": options.presence_penalty,
        "frequency_penalty": options.frequency_penalty,
        "seed": options.seed,
        "stop": options.stop,
    }


def _generate(options: argparse.Namespace) -> int:
    prompt: str | None = sys.stdin.read() if options.prompt == "-" else options.prompt
    if options.model is None:
        print("lily: no --model, so the embedded demo writes; it only tells stories", file=sys.stderr)
        prompt = DEMO_PROMPT if prompt is None else prompt
    if prompt is None:
        raise ValueError("no prompt; pass one, or - to read it from stdin")
    if options.raw and (options.system is not None or options.thinking is not None):
        raise ValueError("--raw: wanted neither --system nor --thinking, which the chat template is for")
    from lily.terminal import write

    with _load(options) as model:
        progress = sys.stderr.isatty()
        if options.raw:
            tokens = model.tokenizer.encode(prompt)
            stream = model.stream(tokens, progress=progress, **_settings(options))
        else:
            system = [] if options.system is None else [{"role": "system", "content": options.system}]
            stream = model.stream(
                [*system, {"role": "user", "content": prompt}],
                progress=progress,
                thinking=options.thinking,
                **_settings(options),
            )
        write(stream)
    if options.stats or sys.stderr.isatty():
        print(_stats(stream.completion()), file=sys.stderr)
    return 0


def _stats(done: "lily.Completion") -> str:
    timings = done.timings
    return (
        f"lily: prompt {done.usage.prompt_tokens} tokens, {timings.prefill_tokens_per_second:.1f} tokens/s; "
        f"answer {done.usage.completion_tokens} tokens, {timings.decode_tokens_per_second:.1f} tokens/s; "
        f"finish {done.finish_reason}; seed {done.seed}"
    )


def _chat(options: argparse.Namespace) -> int:
    from lily.terminal import Conversation, talk

    with _load(options) as model:
        if options.model is None:
            print("lily: no --model, so this is the embedded demo; it only tells stories", file=sys.stderr)
        talk(Conversation(model, options.system, options.thinking, _settings(options)))
    return 0


def _serve(options: argparse.Namespace) -> int:
    import logging

    from lily.server import Server

    logging.basicConfig(level=logging.INFO if options.verbose else logging.WARNING)
    settings = {
        name: getattr(options, name)
        for name in ("host", "port", "allow_public", "strict_model", "thinking", "prefix")
    }
    demo = options.model is None
    with _load(options, max_active=options.max_active, max_waiting=options.max_waiting) as model:
        server = Server(
            model,
            api_key=options.api_key or os.environ.get("LILY_API_KEY") or None,
            allowed_hosts=tuple(options.allowed_host),
            allowed_origins=tuple(options.allowed_origin),
            name=options.served_model_name,
            max_tokens=DEMO_TOKENS if demo and options.max_tokens is None else options.max_tokens,
            **settings,
        )
        if demo:
            print("lily: no --model, so the embedded demo answers; it only tells stories", file=sys.stderr)
        print(f"lily: {server.url}/v1, until Ctrl-C", file=sys.stderr, flush=True)
        server.run()
    return 0


def _download(options: argparse.Namespace) -> int:
    from lily import hub

    print(hub.update(options.id, options.revision))
    return 0


def _info(options: argparse.Namespace) -> int:
    import dataclasses
    import json
    import platform

    if options.stages:
        return _stages(options)
    if options.context:
        raise ValueError("--context: wanted with --stages only")
    with _load(options) as model:
        loaded = dataclasses.asdict(model.info)
    in_use = loaded.pop("options")
    from lily import _core

    facts: dict[str, Any] = {
        "version": lily.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "model": loaded,
        "options": [
            {"name": name, "type": kind, "default": default, "value": in_use[name], "text": text}
            for name, kind, default, text in _core.option_list()
        ],
    }
    print(json.dumps(facts, indent=2, ensure_ascii=False) if options.json else _table(facts))
    return 0


def _stages(options: argparse.Namespace) -> int:
    import dataclasses
    import json

    from lily import stages
    from lily.files import checkpoint_folder

    folder = None if options.model is None else checkpoint_folder(options.model)
    contexts = [stages.tokens(text) for text in options.context or ()] or stages.contexts_of(folder)
    steps = [stages.step(folder, context, _given(options)) for context in contexts]
    if options.json:
        print(json.dumps([dataclasses.asdict(one) | {"ratio": one.ratio} for one in steps], indent=2))
    else:
        without = stages.apart(folder, contexts[0], _given(options))
        print(stages.table(steps, without, "Qwen3.6-35B-A3B" if folder is None else str(folder)))
    return 0


def _table(facts: dict[str, Any]) -> str:
    model = facts["model"]
    rows = [("lily", facts["version"]), ("python", facts["python"]), ("platform", facts["platform"])]
    rows += [(name.replace("_", " "), value) for name, value in model.items() if not isinstance(value, dict)]
    rows += [("sampling", " ".join(f"{name}={value}" for name, value in model["sampling"].items()))]
    rows += [
        (f"  {name}", value) for name, value in model["config"].items() if isinstance(value, int | float)
    ]
    lines = [f"{name:18} {value}" for name, value in rows]
    lines += ["", f"{'option':18} {'value':10} {'default':10}"]
    lines += [f"{o['name']:18} {o['value']:10} {o['default']:10} {o['text']}" for o in facts["options"]]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
