"""dspy: a program with demonstrations, asked six questions; its answers are typed."""

from typing import Any, Literal

import dspy
from common import QUESTIONS, RULES, main
from dspy.lm15 import (
    AccessPolicy,
    ModelSupport,
    OpenAIChatCompat,
    ProviderDefinition,
    register_provider,
)


class Locate(dspy.Signature):
    question: str = dspy.InputField()
    room: Literal["north", "south", "east", "west"] = dspy.OutputField()
    lit: bool = dspy.OutputField()


def run(url: str) -> dict[str, Any]:
    server = AccessPolicy(provider="archive", env_keys=(), base_url=url + "/v1")
    chat = ProviderDefinition.chat(server, compat=OpenAIChatCompat.preset("sglang"))
    register_provider(chat, supports=ModelSupport(response_schema=True), replace=True)
    lm = dspy.LM(
        "archive/default",
        api_key="none",
        cache=False,
        temperature=0,
        max_tokens=64,
    )
    dspy.configure(lm=lm, adapter=dspy.JSONAdapter())
    locate = dspy.Predict(Locate.with_instructions(RULES))
    locate.demos = [dspy.Example(question=q, room="north", lit=True) for q in QUESTIONS[:3]]
    answers = []
    for question in QUESTIONS:
        found = locate(question=question + " Now?")
        answers.append([found.room, found.lit])
    usages = [dict(entry["usage"]) for entry in lm.history]
    return {
        "answers": answers,
        "prompts": [usage["prompt_tokens"] for usage in usages],
        "cached": [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages],
    }


if __name__ == "__main__":
    main("dspy", run)
