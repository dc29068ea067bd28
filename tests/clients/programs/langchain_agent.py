"""langchain: an agent that calls tools six times; a stream; a structured answer."""

from collections.abc import Callable
from typing import Any, Literal

from common import NAMES, QUESTIONS, RULES, Lantern, main
from langchain.agents import create_agent
from langchain.agents.middleware import ModelCallLimitMiddleware, wrap_model_call
from langchain.messages import AIMessage, AIMessageChunk
from langchain.tools import tool
from langchain_openai import ChatOpenAI


@wrap_model_call
def always_call(request: Any, handler: Callable[[Any], Any]) -> Any:
    return handler(request.override(tool_choice="required"))


def rooms(name: str) -> Any:
    def use(room: Literal["north", "south", "east", "west"]) -> str:
        return f"{name} {room}: three."

    return tool(name, description=f"To {name} lanterns.")(use)


def run(url: str) -> dict[str, Any]:
    base_url = url + "/v1"
    model = ChatOpenAI(
        base_url=base_url,
        api_key="none",
        model="default",
        temperature=0,
        max_tokens=64,
        max_retries=0,
        stream_usage=True,
        model_kwargs={"parallel_tool_calls": False},
    )
    graph = create_agent(
        model,
        tools=[rooms(name) for name in NAMES],
        system_prompt=RULES,
        middleware=[ModelCallLimitMiddleware(run_limit=6), always_call],
    )
    state = graph.invoke({"messages": [{"role": "user", "content": QUESTIONS[0]}]})
    messages = [m for m in state["messages"] if isinstance(m, AIMessage) and m.usage_metadata]
    answers: list[Any] = [[(c["name"], c["args"]) for c in m.tool_calls] for m in messages]
    usages = [m.usage_metadata for m in messages]

    plain = ChatOpenAI(
        base_url=base_url,
        api_key="none",
        model="default",
        temperature=0,
        max_tokens=64,
        stream_usage=True,
    )
    question = [("system", "Be short. " + RULES), ("user", QUESTIONS[0])]
    whole: AIMessageChunk | None = None
    for chunk in plain.stream(question):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    answers.append(whole.content)
    usages.append(whole.usage_metadata)

    structured = plain.with_structured_output(Lantern, method="json_schema", include_raw=True)
    record = structured.invoke(question)
    answers.append(record["parsed"].model_dump())
    usages.append(record["raw"].usage_metadata)

    told = [usage for usage in usages if usage is not None]
    return {
        "answers": answers,
        "prompts": [usage["input_tokens"] for usage in told],
        "cached": [usage["input_token_details"]["cache_read"] for usage in told],
    }


if __name__ == "__main__":
    main("langchain", run)
