"""`lily chat` as a person has it, in a terminal, interrupted and left; and as a program pipes into it."""

import os
import re
import select
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import lily
from lily.terminal import Conversation
from scripted import make_checkpoint, scripted

pytestmark = pytest.mark.unsanitized
SCRIPTED = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import lily
from scripted import scripted
from lily.terminal import Conversation, talk
with lily.Model.load({folder!r}) as model, scripted(model, {answer!r}):
    talk(Conversation(model, None, None, {{}}))
"""


class Terminal:
    """A program on a terminal of its own, and all that it has written there."""

    def __init__(self, *arguments: str, **variables: str) -> None:
        self.master, end = os.openpty()
        termios.tcsetwinsize(end, (24, 200))
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=end,
            stdout=end,
            stderr=end,
            env=os.environ | {"TERM": "xterm"} | variables,
            start_new_session=True,
            preexec_fn=lambda: os.close(os.open(os.ttyname(end), os.O_RDWR)),  # makes it the controlling one
        )
        os.close(end)
        self.text = ""

    def read(self, wanted: str, timeout: float = 30) -> str:
        """Return what is written up to a pattern, which is waited for."""
        deadline = time.monotonic() + timeout
        while not (found := re.search(wanted, self.text)):
            left = deadline - time.monotonic()
            assert left > 0, f"wanted {wanted!r}, got {self.text!r}"
            if select.select([self.master], [], [], left)[0]:
                try:
                    data = os.read(self.master, 10_000)
                except OSError:  # the program has ended
                    data = b""
                assert data, f"wanted {wanted!r}, got {self.text!r} and the end"
                self.text += data.decode(errors="replace").replace("\r\n", "\n")
        before, self.text = self.text[: found.end()], self.text[found.end() :]
        return before

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def end(self) -> int:
        """Return the exit code, once there is one."""
        return self.process.wait(30)

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.master)


@pytest.fixture
def demo() -> Iterator[Terminal]:
    with Terminal("-m", "lily", "chat", "--seed", "7", "--max-tokens", "40") as terminal:
        yield terminal


def test_a_conversation_with_the_demo(demo: Terminal) -> None:
    greeting = demo.read("> ")
    assert "the embedded demo; it only tells stories" in greeting
    assert "Ctrl-D leaves, /help says more." in greeting
    demo.type("Tell me a story about a fox.\n")
    answer = demo.read(r"tokens, [\d.]+/s, cut at the limit\x1b\[22m\n")
    assert len(re.findall(r"[a-z]+", answer)) > 20
    assert re.search(r"\x1b\[2m\d+ tokens asked, answer after [\d.]+ s; 40 tokens", answer)
    demo.read("> ")
    demo.type("/undo\n")
    demo.read("Taken back.")
    demo.type("/undo\n")
    demo.read("There is nothing to take back.")
    demo.type("/reset\n")
    demo.read("All forgotten.")
    demo.type("/dance\n")
    demo.read("no command /dance; /help lists them")
    demo.type("/help\n")
    assert "/reset  begin anew" in demo.read("several lines")
    demo.read("> ")
    demo.type('"""Tell me a story\nabout a hen."""\n')
    demo.read(r"\n\. ")
    demo.read("cut at the limit")
    demo.read("> ")
    demo.type("\x04")
    assert demo.end() == 0


ENDLESS = """
import sys, lily.__main__, lily.terminal
class Endless(lily.terminal.Conversation):
    def __init__(self, model, system, thinking, settings):
        super().__init__(model, system, thinking, settings | {"stop_tokens": ()})
lily.terminal.Conversation = Endless
sys.exit(lily.__main__.main(["chat", "--max-tokens", "4000", "--temp", "1000", "--top-k", "0"]))
"""


def test_ctrl_c_stops_a_turn_and_not_the_conversation() -> None:
    with Terminal("-c", ENDLESS) as terminal:
        terminal.read("> ")
        time.sleep(0.2)  # no person is quicker; before it waits for a key, readline would not see the signal
        terminal.type("\x03")
        terminal.read("Ctrl-D leaves.")
        terminal.read("> ")
        terminal.type("A story.\n")
        terminal.read(r"A story\.\n(.|\n){20}")
        terminal.type("\x03")
        terminal.read("stopped")
        terminal.read("> ")
        terminal.type("Another.\n")
        terminal.read(r"Another\.\n(.|\n){20}")
        terminal.type("\x03")
        terminal.read("stopped")
        terminal.read("> ")
        terminal.type("/quit\n")
        assert terminal.end() == 0


def test_lines_can_be_recalled(demo: Terminal) -> None:
    pytest.importorskip("readline")
    demo.read("> ")
    demo.type("/reset\n")
    demo.read("All forgotten.")
    demo.read("> ")
    demo.type("\x1b[A\n")
    demo.read("All forgotten.")
    demo.type("/quit\n")
    assert demo.end() == 0


@pytest.mark.parametrize("plain", [False, True])
def test_thoughts_are_dim(tmp_path: Path, plain: bool) -> None:
    code = SCRIPTED.format(
        tests=str(Path(__file__).parent),
        folder=str(make_checkpoint(tmp_path)),
        answer="I wonder.\n</think>\n\nBecause.",
    )
    with Terminal("-c", code, **{"NO_COLOR": "1"} if plain else {}) as terminal:
        terminal.read("> ")
        terminal.type("Why?\n")
        want = "I wonder.\n\nBecause.\n" if plain else "\x1b[2mI wonder.\x1b[22m\n\nBecause.\n"
        assert terminal.read("tokens asked").count(want) == 1
        terminal.read("> ")
        terminal.type("\x04")
        assert terminal.end() == 0


def piped(text: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "lily", "chat", *arguments],
        input=text,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_piped_into_it_writes_answers_only() -> None:
    asked = ["A story about a fox.", "And then?"]
    with lily.Model.load(lily.DEMO) as model:
        messages, answers = [], []
        for question in asked:
            messages.append({"role": "user", "content": question})
            done = model.generate(messages, max_tokens=20, temperature=0)
            messages.append(done.message)
            answers.append(done.text)
    done = piped("\n".join(asked), "--max-tokens", "20", "--temp", "0", "--model", lily.DEMO)
    assert done.stdout == "".join(f"{answer}\n" for answer in answers)
    assert (done.stderr, done.returncode) == ("", 0)


def test_what_does_not_fit_is_said_and_not_kept() -> None:
    asked = "fox " * 6000 + "\nA story.\n"
    done = piped(asked, "--max-tokens", "5", "--seed", "1")
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == 1


def test_a_wrong_setting_is_named() -> None:
    done = piped("Hi\n", "--stop", "")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith(
        "lily: stop: wanted at least one character, got ''; leave it out to stop nowhere\n"
    )


def test_a_turn_takes_in_only_what_is_new(model: lily.Model) -> None:
    taken: list[int] = []
    conversation = Conversation(model, "Be brief.", None, {})
    with scripted(model, "Thought.\n</think>\n\nAnswer.") as script:
        extend = script._session.extend

        class Counted:
            def __getattr__(self, name: str) -> object:
                return getattr(session, name)

            def extend(self, state: object, tokens: object, *rest: object) -> object:
                taken.append(len(tokens))
                return extend(state, tokens, *rest)

        session, script._session = script._session, Counted()
        for turn in range(4):
            taken.clear()
            conversation.answered(conversation.ask(f"Question {turn}").completion())
            prompt = model.encode(conversation.messages[:-1])
            prompts = sum(length for length in taken if length > 1)
            if turn:
                assert prompts < 60 < len(prompt)
    whole = model.encode([*conversation.messages[:-1]])
    assert list(conversation._asked.tokens) == whole[: len(conversation._asked.tokens)]
    texts = [message["content"] for message in conversation.messages]
    assert texts == ["Be brief.", *(text for turn in range(4) for text in (f"Question {turn}", "Answer."))]


def test_what_is_taken_back_is_forgotten(model: lily.Model) -> None:
    conversation = Conversation(model, None, None, {})
    with scripted(model, "</think>Answer."):
        for question in ("One", "Two", "Three"):
            conversation.answered(conversation.ask(question).completion())
        assert conversation.undo()
        assert [m["content"] for m in conversation.messages] == ["One", "Answer.", "Two", "Answer."]
        conversation.answered(conversation.ask("Four").completion())
        prompt = model.encode(conversation.messages[:-1], add_generation_prompt=False)
        assert list(conversation._asked.tokens) == prompt
        conversation.reset()
        assert conversation.messages == []
        assert not conversation.undo()
        stream = conversation.ask("Five")
        stream.close()
        conversation.answered(stream.so_far())  # nothing was written
        assert conversation.messages == []
