"""The clients that people use, against the server: OpenAI's, Anthropic's, LangChain's, LiteLLM's."""

import json
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

import lily
from serving import CALL, PARAMETERS, QUESTION, TOOL, queue, quick

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or its import fetches one
pytestmark = [
    pytest.mark.unsanitized,
    pytest.mark.filterwarnings("default"),  # theirs are not ours to mend
]
SAID = f"I wonder.\n</think>\n\nLet me see.\n\n{CALL}"
SCHEMA = {
    "type": "object",
    "properties": {
        "animal": {"enum": ["fox", "hen"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["animal", "age"],
    "additionalProperties": False,
}
JSON = {"type": "json_schema", "json_schema": {"name": "animal", "strict": True, "schema": SCHEMA}}


@pytest.fixture(scope="module")
def server(model: lily.Model) -> Iterator[Any]:
    with model.serve(background=True, port=0) as server:
        yield server


@pytest.fixture
def openai(server: Any) -> Iterator[Any]:
    import openai

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        yield client


@pytest.fixture
def anthropic(server: Any) -> Iterator[Any]:
    import anthropic

    with anthropic.Anthropic(base_url=server.url, api_key="none") as client:
        yield client


def idle(server: Any) -> None:
    patience = time.monotonic() + 5
    while server.app.scheduler.active:
        assert time.monotonic() < patience, "the model is still at work"
        time.sleep(0.01)


def asked(server: Any) -> int:
    """Return how many requests were answered, once no more come."""
    count = -1
    while count != (now := sum(server.app.metrics.requests.values())):
        count = now
        time.sleep(0.5)
    return count


def gone(server: Any) -> None:
    """Wait until the server has seen that its client closed the connection."""
    patience = time.monotonic() + 5
    while server._server.server_state.connections:
        assert time.monotonic() < patience, "the connection is still there"
        time.sleep(0.01)
    time.sleep(0.2)


# OpenAI's


def test_openai_chat(model: lily.Model, openai: Any) -> None:
    with quick(model, SAID):
        done = openai.chat.completions.create(model="m", messages=QUESTION, tools=[TOOL])
        chunks = list(
            openai.chat.completions.create(
                model="m",
                messages=QUESTION,
                tools=[TOOL],
                stream=True,
                stream_options={"include_usage": True},
            )
        )
    message = done.choices[0].message
    assert (message.content, message.reasoning_content) == ("Let me see.", "I wonder.")
    assert json.loads(message.tool_calls[0].function.arguments) == {"path": "/a"}
    assert done.choices[0].finish_reason == "tool_calls"
    assert chunks[-1].usage.total_tokens == done.usage.total_tokens > 0
    deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
    assert "".join(delta.content or "" for delta in deltas) == message.content


def test_openais_helper_for_streams(model: lily.Model, openai: Any) -> None:
    """It is picky: about indexes, and about ids and names that come twice."""
    with (
        quick(model, SAID + CALL),
        openai.chat.completions.stream(model="m", messages=QUESTION, tools=[TOOL]) as stream,
    ):
        kinds = [event.type for event in stream]
        done = stream.get_final_completion()
    calls = done.choices[0].message.tool_calls
    assert [(call.function.name, call.function.arguments) for call in calls] == [("f", '{"path": "/a"}')] * 2
    assert len({call.id for call in calls}) == 2
    assert "tool_calls.function.arguments.done" in kinds


def test_openai_goes_on_after_a_call(model: lily.Model, openai: Any) -> None:
    with quick(model, SAID):
        message = (
            openai.chat.completions.create(model="m", messages=QUESTION, tools=[TOOL]).choices[0].message
        )
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "It is there."}
    with quick(model, "</think>It is."):
        done = openai.chat.completions.create(model="m", messages=[*QUESTION, message, result], tools=[TOOL])
    assert done.choices[0].message.content == "It is."


def test_openai_structured_output(openai: Any) -> None:
    more = {"reasoning_effort": "none", "model": "m", "messages": QUESTION}
    done = openai.chat.completions.create(response_format=JSON, **more)
    jsonschema.validate(json.loads(done.choices[0].message.content), SCHEMA)
    parsed = openai.responses.create(
        model="m",
        input="Why?",
        reasoning={"effort": "none"},
        text={"format": {"type": "json_schema", **JSON["json_schema"]}},
    )
    jsonschema.validate(json.loads(parsed.output_text), SCHEMA)
    named = {"type": "function", "function": {"name": "animal"}}
    tools = [{"type": "function", "function": {"name": "animal", "parameters": SCHEMA}}]
    done = openai.chat.completions.create(tools=tools, tool_choice=named, parallel_tool_calls=False, **more)
    (call,) = done.choices[0].message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)


def test_openai_parses_into_pydantics_classes(openai: Any) -> None:
    import pydantic

    class Animal(pydantic.BaseModel):
        animal: str = pydantic.Field(max_length=5)
        wild: bool

    done = openai.chat.completions.parse(
        model="m", messages=QUESTION, response_format=Animal, reasoning_effort="none", max_tokens=400
    )
    assert isinstance(done.choices[0].message.parsed, Animal)


def test_openai_responses(model: lily.Model, openai: Any) -> None:
    tools = [{"type": "function", **TOOL["function"]}]
    with quick(model, SAID):
        done = openai.responses.create(model="m", input="Why?", tools=tools)
        with openai.responses.stream(model="m", input="Why?", tools=tools) as stream:
            kinds = [event.type for event in stream]
            streamed = stream.get_final_response()
        later = [{"role": "user", "content": "Why?"}, *done.output]
        later.append({"type": "function_call_output", "call_id": done.output[-1].call_id, "output": "ok"})
        assert openai.responses.create(model="m", input=later, tools=tools).output_text == "Let me see."
    assert done.output_text == streamed.output_text == "Let me see."
    assert [item.type for item in done.output] == ["reasoning", "message", "function_call"]
    assert done.output[2].arguments == streamed.output[2].arguments == '{"path": "/a"}'
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert done.usage.output_tokens_details.reasoning_tokens > 0


def test_openai_completions_logprobs_and_models(model: lily.Model, openai: Any) -> None:
    with quick(model, "and on"):
        assert openai.completions.create(model="m", prompt="Go", logprobs=1).choices[0].text == "and on"
        chunks = list(openai.completions.create(model="m", prompt="Go", stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == "and on"
    with quick(model, "</think>Ünd"):
        done = openai.chat.completions.create(model="m", messages=QUESTION, logprobs=True, top_logprobs=2)
    tokens = done.choices[0].logprobs.content
    assert bytes(byte for token in tokens for byte in token.bytes).decode() == "Ünd"
    (card,) = openai.models.list()
    assert openai.models.retrieve(card.id).id == card.id


def test_openais_errors(model: lily.Model, openai: Any, server: Any) -> None:
    import openai as package

    def ask(**more: Any) -> Any:
        return openai.chat.completions.create(**({"model": "m", "messages": QUESTION} | more))

    before = asked(server)
    with pytest.raises(package.BadRequestError, match="maximum context length") as caught:
        ask(messages=[{"role": "user", "content": "word " * 5000}])
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(package.BadRequestError, match="temperature") as caught:
        ask(temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(package.NotFoundError):
        openai.models.retrieve("other")
    with quick(model, "</think>Yes, and so on.") as script:
        draws = iter(range(4))
        draw = script._draw

        def fail() -> int:
            if next(draws, None) is None:
                raise lily.DeviceError("the device is gone")
            return draw()

        script._draw = fail  # type: ignore[method-assign]
        with pytest.raises(package.APIError, match="the device is gone"):
            list(ask(stream=True))
        with pytest.raises(package.InternalServerError, match="the device is gone"):
            ask()
    # Not one of them was sent again.
    assert asked(server) == before + 5


def test_openai_tries_again_when_it_is_busy(model: lily.Model) -> None:
    import openai as package

    with (
        queue(model, 1, 0),
        model.serve(background=True, port=0) as server,
        quick(model, SAID, hold_at=1) as script,
    ):
        with package.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            first = threading.Thread(
                target=lambda: client.chat.completions.create(model="m", messages=QUESTION)
            )
            first.start()
            assert script.waits.wait(5)
            threading.Timer(0.5, script.release.set).start()
            assert client.chat.completions.create(model="m", messages=QUESTION).choices
            first.join(5)
        assert server.app.metrics.requests["/v1/chat/completions", 429] >= 1


def test_openai_leaves(model: lily.Model, openai: Any, server: Any) -> None:
    with quick(model, "</think>" + "word " * 400, hold_at=20) as script:
        stream = openai.chat.completions.create(model="m", messages=QUESTION, stream=True)
        next(iter(stream))
        stream.close()
        gone(server)
        script.release.set()
        idle(server)
        assert script.drawn < 30
        assert openai.chat.completions.create(model="m", messages=QUESTION, max_tokens=2).choices


def test_openai_async(model: lily.Model, server: Any) -> None:
    import asyncio

    import openai as package

    async def run() -> list[str]:
        async with package.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            work = [
                client.chat.completions.create(model="m", messages=QUESTION, max_tokens=4, temperature=0)
                for _ in range(6)
            ]
            return [done.choices[0].message.reasoning_content for done in await asyncio.gather(*work)]

    assert len(set(asyncio.run(run()))) == 1


# Anthropic's


def test_anthropic_messages(model: lily.Model, anthropic: Any) -> None:
    tools = [{"name": "f", "input_schema": PARAMETERS}]
    ask = {
        "model": "m",
        "max_tokens": 2000,
        "tools": tools,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    with quick(model, SAID):
        done = anthropic.messages.create(messages=QUESTION, **ask)
        with anthropic.messages.stream(messages=QUESTION, **ask) as stream:
            text = "".join(stream.text_stream)
            streamed = stream.get_final_message()
        result = {"type": "tool_result", "tool_use_id": done.content[-1].id, "content": "ok"}
        turns = [
            *QUESTION,
            {"role": "assistant", "content": done.content},
            {"role": "user", "content": [result]},
        ]
        assert anthropic.messages.create(messages=turns, **ask).stop_reason == "tool_use"
    assert [block.type for block in done.content] == ["thinking", "text", "tool_use"]
    assert (done.content[0].thinking, done.content[1].text, text) == (
        "I wonder.",
        "Let me see.",
        "Let me see.",
    )
    assert done.content[2].input == streamed.content[2].input == {"path": "/a"}
    assert streamed.content[0].signature
    assert done.stop_reason == streamed.stop_reason == "tool_use"
    assert done.usage.output_tokens == streamed.usage.output_tokens > 0
    usages = (done.usage, streamed.usage)
    prompts = {usage.input_tokens + usage.cache_read_input_tokens for usage in usages}
    assert len(prompts) == 1


def test_anthropic_forces_a_call_and_a_schema(anthropic: Any) -> None:
    tools = [{"name": "animal", "input_schema": SCHEMA}]
    choice = {"type": "tool", "name": "animal", "disable_parallel_tool_use": True}
    done = anthropic.messages.create(
        model="m", messages=QUESTION, max_tokens=400, tools=tools, tool_choice=choice
    )
    jsonschema.validate(done.content[0].input, SCHEMA)
    body = {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}
    done = anthropic.messages.create(model="m", messages=QUESTION, max_tokens=400, extra_body=body)
    jsonschema.validate(json.loads(done.content[0].text), SCHEMA)


def test_anthropics_counts_cuts_and_stops(model: lily.Model, anthropic: Any) -> None:
    with quick(model, "alpha beta gamma"):
        done = anthropic.messages.create(
            model="m", messages=QUESTION, max_tokens=100, stop_sequences=["beta"]
        )
        cut = anthropic.messages.create(model="m", messages=QUESTION, max_tokens=2)
    assert (done.content[0].text, done.stop_reason, done.stop_sequence) == ("alpha ", "stop_sequence", "beta")
    assert cut.stop_reason == "max_tokens"
    counted = anthropic.messages.count_tokens(model="m", messages=QUESTION)
    assert counted.input_tokens == done.usage.input_tokens + done.usage.cache_read_input_tokens
    assert [card.id for card in anthropic.models.list()]


def test_anthropics_errors(model: lily.Model, anthropic: Any, server: Any) -> None:
    import anthropic as package

    with pytest.raises(package.BadRequestError, match="prompt is too long"):
        anthropic.messages.create(
            model="m", max_tokens=9, messages=[{"role": "user", "content": "word " * 5000}]
        )
    with pytest.raises(package.BadRequestError, match=r"messages.*role"):
        anthropic.messages.create(model="m", max_tokens=9, messages=[{"role": "judge", "content": "x"}])
    with quick(model, "Yes, and so on.") as script:
        script._draw = lambda: (_ for _ in ()).throw(lily.DeviceError("the device is gone"))
        with (
            pytest.raises(package.APIStatusError, match="the device is gone"),
            anthropic.messages.stream(model="m", max_tokens=9, messages=QUESTION) as stream,
        ):
            stream.get_final_message()
        before = asked(server)
        with pytest.raises(package.InternalServerError, match="the device is gone"):
            anthropic.messages.create(model="m", max_tokens=9, messages=QUESTION)
    assert asked(server) == before + 1


def test_anthropic_leaves(model: lily.Model, anthropic: Any, server: Any) -> None:
    with quick(model, "word " * 400, hold_at=20) as script:
        with anthropic.messages.stream(model="m", max_tokens=1000, messages=QUESTION) as stream:
            next(stream.text_stream)
        gone(server)
        script.release.set()
        idle(server)
        assert script.drawn < 30


def test_keys(model: lily.Model) -> None:
    import anthropic
    import openai

    with model.serve(background=True, port=0, api_key="secret") as server, quick(model, "</think>Yes."):
        for key in ("secret", "wrong"):
            with (
                openai.OpenAI(base_url=f"{server.url}/v1", api_key=key) as one,
                anthropic.Anthropic(base_url=server.url, api_key=key) as other,
            ):
                if key == "secret":
                    assert one.chat.completions.create(model="m", messages=QUESTION).choices
                    assert other.messages.create(model="m", messages=QUESTION, max_tokens=9).content
                    continue
                with pytest.raises(openai.AuthenticationError):
                    one.chat.completions.create(model="m", messages=QUESTION)
                with pytest.raises(anthropic.AuthenticationError):
                    other.messages.create(model="m", messages=QUESTION, max_tokens=9)


# LangChain's


def test_langchain(model: lily.Model, server: Any) -> None:
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(base_url=f"{server.url}/v1", api_key="none", model="m", stream_usage=True)
    with quick(model, SAID):
        done = chat.bind_tools([TOOL]).invoke("Why?")
        pieces = list(chat.bind_tools([TOOL]).stream("Why?"))
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += piece
    for each in (done, whole):
        assert each.content == "Let me see."
        assert [(call["name"], call["args"]) for call in each.tool_calls] == [("f", {"path": "/a"})]
        assert each.usage_metadata["input_token_details"]["cache_read"] >= 0
        assert each.usage_metadata["output_tokens"] > 0
    quiet = ChatOpenAI(base_url=f"{server.url}/v1", api_key="none", model="m", reasoning_effort="none")
    for method in ("json_schema", "function_calling"):
        found = quiet.with_structured_output({**SCHEMA, "title": "animal"}, method=method).invoke(
            "An animal?"
        )
        jsonschema.validate(found, SCHEMA)


# LiteLLM's


def test_litellm(model: lily.Model, server: Any) -> None:
    import litellm

    ask = {
        "model": "hosted_vllm/m",
        "api_base": f"{server.url}/v1",
        "api_key": "none",
        "messages": QUESTION,
        "num_retries": 0,
    }
    with quick(model, SAID):
        done = litellm.completion(**ask, tools=[TOOL])
        chunks = list(litellm.completion(**ask, tools=[TOOL], stream=True))
    message = done.choices[0].message
    assert (message.content, message.reasoning_content) == ("Let me see.", "I wonder.")
    assert message.tool_calls[0].function.arguments == '{"path": "/a"}'
    assert done.choices[0].finish_reason == "tool_calls"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Let me see."
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**ask | {"messages": [{"role": "user", "content": "word " * 5000}]})
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    done = litellm.completion(**ask, response_format=JSON, extra_body=off)
    jsonschema.validate(json.loads(done.choices[0].message.content), SCHEMA)
    with quick(model, "</think>Yes.") as script:
        script._draw = lambda: (_ for _ in ()).throw(lily.DeviceError("the device is gone"))
        with pytest.raises(Exception, match="the device is gone"):  # it has a class for each way
            list(litellm.completion(**ask, stream=True))
