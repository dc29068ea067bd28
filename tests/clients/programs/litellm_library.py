"""litellm as a library: six turns with tools; a stream with usage."""

from typing import Any

import litellm
from common import QUESTIONS, RULES, TOOLS, main


def run(url: str) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "model": "openai/default",
        "api_base": url + "/v1",
        "api_key": "none",
        "temperature": 0,
        "max_tokens": 64,
        "num_retries": 0,
    }
    answers: list[Any] = []
    usages: list[Any] = []
    messages: list[Any] = [{"role": "system", "content": RULES}]
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        answer = litellm.completion(
            messages=messages,
            tools=TOOLS,
            tool_choice="required",
            parallel_tool_calls=False,
            **settings,
        )
        message = answer.choices[0].message
        (call,) = message.tool_calls
        answers.append([call.function.name, call.function.arguments])
        usages.append(answer.usage)
        messages.append(message.model_dump(exclude_none=True))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "Three."})
    chunks = list(
        litellm.completion(
            messages=[
                {"role": "system", "content": "Be short. " + RULES},
                {"role": "user", "content": QUESTIONS[0]},
            ],
            stream=True,
            stream_options={"include_usage": True},
            **settings,
        )
    )
    answers.append("".join(c.choices[0].delta.content or "" for c in chunks if c.choices))
    usages.append(next(c.usage for c in reversed(chunks) if getattr(c, "usage", None)))
    return {
        "answers": answers,
        "prompts": [usage.prompt_tokens for usage in usages],
        "cached": [usage.prompt_tokens_details.cached_tokens for usage in usages],
    }


if __name__ == "__main__":
    main("litellm", run)
