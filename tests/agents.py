"""Requests in the shapes that coding agents send, with words of our own: what they ask, and how they go on.

Each entry has the path, the headers that matter, and the body's peculiar fields. test_server_agents.py sends
them, and a second turn with the answer in it as that agent gives it back.
"""

from typing import Any

RULES = "You edit files in a folder. Look before you write, and say what you did."


def _function(i: int) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
    return {"name": f"tool_{i}", "description": f"Does {i}: a<b & 'c'.", "parameters": schema}


def functions(count: int) -> list[dict[str, Any]]:
    """Return tools as chat completions have them."""
    return [{"type": "function", "function": _function(i)} for i in range(count)]


def _blocks(*texts: str, mark: int | None = None) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = [{"type": "text", "text": text} for text in texts]
    if mark is not None:
        blocks[mark]["cache_control"] = {"type": "ephemeral"}
    return blocks


def claude_code() -> dict[str, Any]:
    """Three blocks of rules, the first a line for accounts; a system message behind the user's; 24 tools."""
    tools = [
        {"name": each["name"], "description": each["description"], "input_schema": each["parameters"]}
        for each in map(_function, range(24))
    ]
    return {
        "path": "/v1/messages?beta=true",
        "headers": {
            "anthropic-version": "2023-06-01",
            "anthropic-beta": "first-2025-01-01,second-2025-02-02",
            "authorization": "Bearer none",
        },
        "body": {
            "model": "some-model-4",
            "max_tokens": 32_000,
            "system": [
                {
                    "type": "text",
                    "text": "x-anthropic-billing-header: cc_version=2.1.0.a1b; cc_entrypoint=cli;",
                },
                *_blocks("You are an agent.", RULES, mark=1),
            ],
            "messages": [
                {"role": "user", "content": _blocks("say hi", mark=0)},
                {"role": "system", "content": "A reminder: the folder is empty."},
            ],
            "tools": tools,
            "thinking": {"type": "adaptive"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "medium"},
            "metadata": {"user_id": "user_0_account__session_0"},
            "stream": True,
        },
    }


def codex() -> dict[str, Any]:
    """Two developer items, two of the user's in a row, tools of kinds that nobody else has."""
    tools: list[dict[str, Any]] = [{"type": "function", "strict": False, **_function(i)} for i in range(6)]
    inner = {"type": "function", "strict": False, **_function(6)}
    tools += [
        {"type": "namespace", "name": "space", "description": "More.", "tools": [inner]},
        {"type": "web_search", "external_web_access": True},
    ]

    def item(role: str, text: str) -> dict[str, Any]:
        return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}

    return {
        "path": "/v1/responses",
        "headers": {},
        "body": {
            "model": "some-model-5",
            "instructions": RULES,
            "input": [
                item("developer", "The sandbox is read-only."),
                item("developer", "Be brief."),
                item("user", "<folder>project/x</folder>"),
                item("user", "say hi"),
            ],
            "tools": tools,
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "reasoning": {"summary": "auto"},
            "store": False,
            "stream": True,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "0000-1111",
            "client_metadata": {"installation": "0"},
        },
    }


def _chat(tools: int, **more: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": RULES}, {"role": "user", "content": "say hi"}]
    described = {"tools": functions(tools)} if tools else {}
    return {
        "path": "/v1/chat/completions",
        "headers": {"authorization": "Bearer none"},
        "body": {"model": "m", "messages": messages, "stream": True, **described, **more},
    }


USAGE = {"stream_options": {"include_usage": True}}
AGENTS: dict[str, dict[str, Any]] = {
    "claude code": claude_code(),
    "codex": codex(),
    "opencode": _chat(10, max_tokens=32_000, tool_choice="auto", **USAGE),
    "opencode's title": _chat(0, max_tokens=32_000, **USAGE),
    "cline": _chat(25, tool_choice="auto", **USAGE),
    "continue": _chat(9, **USAGE),
    "aider": _chat(0, temperature=0),
    "open webui": _chat(0, stream_options=None, metadata={"task": "title_generation"}),
}
