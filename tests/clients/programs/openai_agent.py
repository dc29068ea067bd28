"""openai: an agent with tools over six turns; a streamed answer with usage; a parsed one."""

from typing import Any

import openai
from common import QUESTIONS, RULES, TOOLS, Lantern, main
from openai.types import CompletionUsage


def run(url: str, api_key: str = "none") -> dict[str, Any]:
    client = openai.OpenAI(base_url=url + "/v1", api_key=api_key, max_retries=0)
    settings: dict[str, Any] = {"model": "default", "temperature": 0, "max_tokens": 64}
    answers: list[Any] = []
    usages: list[CompletionUsage | None] = []
    messages: list[Any] = [{"role": "system", "content": RULES}]
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        answer = client.chat.completions.create(
            messages=messages,
            tools=TOOLS,
            tool_choice="required",
            parallel_tool_calls=False,
            **settings,
        )
        message = answer.choices[0].message
        assert message.tool_calls, answer
        (call,) = message.tool_calls
        answers.append([call.function.name, call.function.arguments])
        usages.append(answer.usage)
        result = f"{call.function.name} says {len(messages)}."
        messages.append(message.model_dump(exclude_none=True))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})

    system = {"role": "system", "content": "Be short. " + RULES}
    messages = [system, {"role": "user", "content": QUESTIONS[0]}]
    chunks = list(
        client.chat.completions.create(
            messages=messages, stream=True, stream_options={"include_usage": True}, **settings
        )
    )
    answers.append("".join(c.choices[0].delta.content or "" for c in chunks if c.choices))
    usages.append(chunks[-1].usage)

    parsed = client.chat.completions.parse(messages=messages, response_format=Lantern, **settings)
    lantern = parsed.choices[0].message.parsed
    assert lantern is not None
    answers.append(lantern.model_dump())
    usages.append(parsed.usage)

    told = [usage for usage in usages if usage is not None]
    return {
        "answers": answers,
        "prompts": [usage.prompt_tokens for usage in told],
        "cached": [usage.prompt_tokens_details.cached_tokens for usage in told],
    }


if __name__ == "__main__":
    main("openai", run)
