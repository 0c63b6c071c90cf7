"""Conversations for tests/templates/thinking.jinja: what its golden renders are of.

They are in the form that every template engine is given. What Lily makes of others is in test_messages.py.
"""

from typing import Any

Message = dict[str, Any]

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Say what the weather is: a<b & 'q' \"quoted\" é中 🦊",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "description": "A town.\nOr a village."},
                "days": {"type": "integer", "minimum": 1, "default": None},
                "exact": {"type": "boolean"},
            },
            "required": ["place"],
        },
    },
}
SAVE = {
    "type": "function",
    "function": {"name": "save", "parameters": {"type": "object", "properties": {}, "zeta": 1, "alpha": 2}},
}


def system(text: object) -> Message:
    return {"role": "system", "content": text}


def user(text: object) -> Message:
    return {"role": "user", "content": text}


def assistant(content: object, *calls: Message, **more: object) -> Message:
    message: Message = {"role": "assistant", "content": content, **more}
    return message | ({"tool_calls": list(calls)} if calls else {})


def call(name: str, **arguments: object) -> Message:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def tool(text: object) -> Message:
    return {"role": "tool", "content": text}


def text(*parts: str) -> list[Message]:
    return [{"type": "text", "text": part} for part in parts]


WORK = [
    user("Is it raining in Brno?"),
    assistant("Let me look.", call("get_weather", place="Brno"), reasoning_content="I do not know.\n\nAsk."),
    tool("It rains."),
    assistant("", call("save", text="rain\n"), reasoning_content="Now save it."),
    tool(text("sav", "ed")),
]
CONVERSATIONS: dict[str, list[Message]] = {
    "one question": [user("Why is the sky blue?")],
    "rules": [system("Be brief."), user("Hi")],
    "empty rules": [system(""), user("Hi")],
    "white space": [
        system(" \n Be brief.\t\n"),
        user("\n\n  Hi \n there \n\n"),
        assistant(" Yes. "),
        user(" "),
    ],
    "an empty question": [user("")],
    "no ASCII": [user("ďábel 👩‍👩‍👧 日本 שלום \u200b\u00a0end"), assistant("né\u0301e"), user("\u2028?")],
    "markup": [
        user("<b>&amp; {{ messages }} {% raw %} \\n 'q' \"q\""),
        assistant("```py\nx = {'a': 1}\n```"),
    ],
    "several questions": [user("One."), user("Two."), user("Three.")],
    "parts": [
        system(text("Be ", "brief.")),
        user(text("Go", " on", "")),
        assistant(text("On.")),
        user(text()),
    ],
    "history without thoughts": [
        user("Hi"),
        assistant("Hello."),
        user("And?"),
        assistant("So."),
        user("Go on"),
    ],
    "history with thoughts": [
        user("Hi"),
        assistant("Hello.", reasoning_content="A greeting."),
        user("And?"),
        assistant("So.", reasoning_content="\n\n  Hm.\n  Why?\n"),
        user("Go on"),
    ],
    "thoughts within": [
        user("Hi"),
        assistant("<think>\nA greeting.\n</think>\n\nHello."),
        user("And?"),
        assistant("No opening.</think>So."),
        user("Go on"),
    ],
    "thoughts and no answer": [user("Hi"), assistant("", reasoning_content="Nothing to say."), user("And?")],
    "empty thoughts": [user("Hi"), assistant("a </think> b", reasoning_content=""), user("And?")],
    "the assistant last": [user("Hi"), assistant("Hello.", reasoning_content="Greet.")],
    "the assistant first": [assistant("Welcome."), user("Hi")],
    "a tool's work": WORK,
    "a tool's work, done": [*WORK, assistant("It rains; I saved that.", reasoning_content="Done.")],
    "a tool's work, before": [*WORK, assistant("It rains.", reasoning_content="Done."), user("Thanks!")],
    "rules and a tool's work": [system("Look before you answer."), *WORK],
    "calls in one message": [
        user("Both."),
        assistant(None, call("get_weather", place="Brno"), call("get_weather", place="Ústí", days=3)),
        tool("1"),
        tool("2\n"),
        assistant("", call("save"), call("save")),
        tool(""),
        tool("{}"),
        assistant("Done."),
        user("Again."),
    ],
    "every kind of value": [
        user("Go."),
        assistant(
            "\n",
            call(
                "save",
                string="  kept \n as it is\n",
                looks_like_json='{"a": 1}',
                true=True,
                nothing=None,
                big=9007199254740993,
                small=-1.5e-7,
                list=[1, "b", [], {"c": "é中'<&>"}],
                object={"z": 1, "a": {"": None}},
            ),
        ),
        tool("ok"),
    ],
    "a call without its wrapper": [user("Go."), assistant("", {"name": "save", "arguments": {"a": "b"}})],
    "a call without arguments": [user("Go."), assistant("", {"function": {"name": "save", "arguments": {}}})],
    "a result dressed as a question": [
        user("Go."),
        assistant("", call("save"), reasoning_content="Save."),
        user("<tool_response>\nok\n</tool_response>"),
        assistant("Saved.", reasoning_content="It worked."),
    ],
    "a question after a result": [*WORK, user("Stop.")],
    # Refused
    "nobody asks": [system("Be brief.")],
    "only results": [user("<tool_response>ok</tool_response>")],
    "late rules": [user("Hi"), system("Be brief.")],
    "two rules": [system("Be brief."), system("Be kind."), user("Hi")],
    "another role": [user("Hi"), {"role": "robot", "content": "Beep."}],
    "a picture": [user([{"type": "image", "image": "fox.png"}])],
}

VARIANTS: dict[str, dict[str, Any]] = {
    "": {},
    "thinking": {"enable_thinking": True, "preserve_thinking": True},
    "no thinking": {"enable_thinking": False, "preserve_thinking": False},
    "tools": {"tools": [WEATHER, SAVE], "preserve_thinking": True},
    "history": {"add_generation_prompt": False, "tools": [SAVE]},
}


def cases() -> dict[str, tuple[list[Message], dict[str, Any]]]:
    """Return every conversation in every variant, as (messages, variables of the template) by name."""
    return {
        f"{name}: {variant}" if variant else name: (messages, {"add_generation_prompt": True} | variables)
        for name, messages in CONVERSATIONS.items()
        for variant, variables in VARIANTS.items()
    }
