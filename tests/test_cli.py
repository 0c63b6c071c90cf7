"""The command line, run as users run it."""

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lily
from lily.__main__ import main


def command(*arguments: str, stdin: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lily", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | variables,
        check=False,
    )


def test_an_option_that_is_near_to_none_is_not_guessed() -> None:
    done = command("generate", "hi", "--option", "foo=1")
    assert "no option 'foo'; the options are device, threads, " in done.stderr
    done = command("generate", "hi", "--option", "kvv=1")
    assert "no option 'kvv', did you mean 'kv'?" in done.stderr


def test_a_context_beyond_the_models_is_named() -> None:
    done = command("info", "--stages", "--context", "300K")
    assert done.returncode == 2
    assert done.stderr.startswith("lily: context: wanted at most 262143 tokens before the step, ")
    assert done.stderr.rstrip().endswith("got 307200")


def test_the_simulator_without_kernels_says_what_it_wants() -> None:
    done = command("generate", "hi", "--option", "device=sim")
    assert done.returncode == 1
    assert "option kernels: wanted the library that `make kernels` builds, got none; pass " in done.stderr


def test_serve_says_what_it_does_by_default() -> None:
    assert "Anthropic's servers do" in " ".join(command("--help").stdout.split())
    text = command("serve", "--help").stdout.partition("options:")[2]
    described = {
        each.split()[0].rstrip(","): " ".join(each.split()) for each in re.split(r"\n  (?=-)", text)[1:]
    }
    for option in ("host", "port", "api-key", "served-model-name", "prefix", "max-tokens", "thinking"):
        assert "by default" in described[f"--{option}"], option
    assert "by default 8" in described["--max-active"]
    assert "by default 64" in described["--max-waiting"]


def test_a_first_run_tells_a_story() -> None:
    first, second = (command("generate", "--seed", "7", "--max-tokens", "60") for _ in range(2))
    assert first.returncode == 0, first.stderr
    assert len(first.stdout.split()) > 20
    assert first.stdout.endswith("\n")
    assert first.stderr == "lily: no --model, so the embedded demo writes; it only tells stories\n"
    assert second.stdout == first.stdout
    assert command("generate", "--seed", "8", "--max-tokens", "60").stdout != first.stdout


def test_each_number_reaches_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"temperature": 0.9, "top_k": 5, "top_p": 0.8, "min_p": 0.2, "repetition_penalty": 1.5}
    given |= {"presence_penalty": -1, "frequency_penalty": 1.5, "seed": 3, "max_tokens": 9}
    asked = []

    def stream(_: lily.Model, prompt: object, **arguments: object) -> None:
        asked.append(arguments)
        raise lily.LilyError("that is all")

    monkeypatch.setattr(lily.Model, "stream", stream)
    flags = [part for name, value in given.items() for part in ("--" + name.replace("_", "-"), str(value))]
    assert main(["generate", "A dog.", "--model", lily.DEMO, *flags]) == 1
    assert main(["generate", "A dog.", "--model", lily.DEMO]) == 1
    for arguments, want in zip(asked, (given, dict.fromkeys(given)), strict=True):
        assert {name: arguments[name] for name in given} == want


def test_the_command_says_what_the_library_says() -> None:
    with lily.Model.load(lily.DEMO) as model:
        want = model.generate("A dog.", max_tokens=9, temperature=0.9, top_k=5, top_p=0.8, seed=3).text
        raw = model.generate(model.tokenizer.encode("Once upon"), max_tokens=9, temperature=0).text
    chosen = ["--max-tokens", "9", "--temp", "0.9", "--top-k", "5", "--top-p", "0.8", "--seed", "3"]
    done = command("generate", "A dog.", "--model", lily.DEMO, "--threads", "1", *chosen)
    assert done.stdout == f"{want}\n"
    assert done.stderr == ""
    assert command("generate", "-", "--model", lily.DEMO, *chosen, stdin="A dog.").stdout == f"{want}\n"
    done = command("generate", "Once upon", "--raw", "--max-tokens", "9", "--temp", "0")
    assert done.stdout == f"{raw}\n"


def test_statistics_are_on_stderr_when_asked_for() -> None:
    done = command("generate", "A dog.", "--model", lily.DEMO, "--max-tokens", "5", "--seed", "3", "--stats")
    assert done.stderr.startswith("lily: prompt ")
    assert done.stderr.endswith("finish length; seed 3\n")
    assert "answer 5 tokens, " in done.stderr
    assert "lily:" not in done.stdout


def test_version_loads_nothing() -> None:
    done = command("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"lily {lily.__version__}\n", "")
    loaded = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "lily", "--version"],
        capture_output=True,
        text=True,
        check=True,
    ).stderr
    assert "argparse" in loaded
    assert not any(name in loaded for name in ("numpy", "tokenizers", "jinja2", "lily._core"))


def test_info_is_what_a_report_needs() -> None:
    done = command("info")
    assert done.returncode == 0, done.stderr
    for part in (
        lily.__version__,
        platform.python_version(),
        platform.platform(),
        lily.DEMO,
        "prefill_chunk",
    ):
        assert part in done.stdout
    facts = json.loads(command("info", "--json", "--option", "kv=f32", "--threads", "1").stdout)
    assert facts["version"] == lily.__version__
    assert facts["model"]["context"] == 4096
    assert facts["model"]["weight_bytes"] > 10_000_000
    assert facts["model"]["device"].startswith("cpu ")
    options = {option["name"]: option for option in facts["options"]}
    assert (options["kv"]["value"], options["kv"]["default"]) == ("f32", "bf16")
    assert options["threads"]["value"] == "1"
    assert all(option["text"] for option in facts["options"])


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ([], 2, "COMMAND"),
        (["dance"], 2, "dance"),
        (["generate", "--max-tokens", "many"], 2, "--max-tokens"),
        (["generate", "--max-tokens", "0"], 2, "lily: max_tokens: wanted an int of at least 1"),
        (["generate", "--temp", "-1"], 2, "lily: temperature: wanted a number from 0 to 1000, got -1.0"),
        (["generate", "--option", "kv"], 2, "lily: --option: wanted NAME=VALUE, got 'kv'"),
        (["generate", "--option", "kw=f32"], 2, "lily: "),
        (["generate", "--model", lily.DEMO], 2, "lily: no prompt; pass one, or - to read it from stdin"),
        (["generate", "--model", "no/model", "Hi"], 1, "lily: no/model: no such folder"),
        (["info", "--model", "/no/model"], 1, "lily: /no/model: no such folder"),
        (["generate", "fox " * 9000], 1, "lily: "),
    ],
)
def test_failures_are_one_line_and_a_code(arguments: list[str], code: int, text: str) -> None:
    done = command(*arguments)
    assert done.returncode == code
    assert done.stdout == ""
    assert text in done.stderr
    assert "Traceback" not in done.stderr
    if text.startswith("lily: "):
        assert done.stderr.splitlines()[-1].startswith(text)


def endless() -> "subprocess.Popen[str]":
    """A story of random tokens, one in 2,048 an end token: now and then it is over before it is stopped."""
    any_token = ["--max-tokens", "4000", "--temp", "1000", "--top-k", "0", "--top-p", "1"]
    return subprocess.Popen(
        [sys.executable, "-m", "lily", "generate", *any_token],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_closed_pipe_is_no_drama() -> None:
    for _ in range(5):
        with endless() as child:
            assert child.stdout is not None
            assert child.stderr is not None
            assert child.stdout.read(20)
            child.stdout.close()
            errors = child.stderr.read()
            status = child.wait(timeout=30)
        if status != 0:
            break
    assert status == 141
    assert errors == "lily: no --model, so the embedded demo writes; it only tells stories\n"


def test_output_survives_a_narrow_terminal_encoding() -> None:
    done = command("generate", "A dog.", "--model", lily.DEMO, "--max-tokens", "40", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr


def test_the_installed_command_is_the_module() -> None:
    script = Path(sys.executable).parent / "lily"
    done = subprocess.run([script, "--version"], capture_output=True, text=True, check=False)
    assert done.stdout == f"lily {lily.__version__}\n"
