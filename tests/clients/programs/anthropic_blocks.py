"""anthropic: six turns; tools, rules and the last message are marked blocks. A stream."""

from typing import Any

import anthropic
from common import NAMES, QUESTIONS, ROOM, RULES, main

MARKED = {"type": "ephemeral"}


def run(url: str) -> dict[str, Any]:
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    tools: list[dict[str, Any]] = [
        {"name": name, "description": f"To {name} lanterns.", "input_schema": ROOM}
        for name in NAMES
    ]
    tools[-1]["cache_control"] = MARKED
    settings: dict[str, Any] = {
        "model": "default",
        "max_tokens": 64,
        "extra_body": {"temperature": 0},
        "system": [{"type": "text", "text": RULES, "cache_control": MARKED}],
        "tools": tools,
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    }
    answers: list[Any] = []
    usages: list[anthropic.types.Usage] = []
    messages: list[Any] = []
    for question in QUESTIONS:
        content = [{"type": "text", "text": question, "cache_control": MARKED}]
        if messages:
            last = messages[-1]["content"][0]
            content.insert(0, {"type": "tool_result", "tool_use_id": last.id, "content": "Three."})
        for message in messages[-2:]:
            if message["role"] == "user":
                message["content"][-1].pop("cache_control")
        messages.append({"role": "user", "content": content})
        answer = client.messages.create(messages=messages, **settings)
        (call,) = answer.content
        answers.append([call.name, call.input])
        usages.append(answer.usage)
        messages.append({"role": "assistant", "content": answer.content})
    del settings["tools"], settings["tool_choice"]
    with client.messages.stream(
        messages=[{"role": "user", "content": QUESTIONS[0]}], **settings
    ) as stream:
        final = stream.get_final_message()
    answers.append(final.content[0].text)
    usages.append(final.usage)
    cached = [usage.cache_read_input_tokens or 0 for usage in usages]
    written = [usage.cache_creation_input_tokens or 0 for usage in usages]
    prompts = [
        usage.input_tokens + read + wrote
        for usage, read, wrote in zip(usages, cached, written, strict=True)
    ]
    return {"answers": answers, "prompts": prompts, "cached": cached, "written": written}


if __name__ == "__main__":
    main("anthropic", run)
