"""instructor: records of six questions about one text, by a tool and by a JSON schema."""

from typing import Any

import instructor
import openai
from common import QUESTIONS, RULES, Lantern, main


def run(url: str) -> dict[str, Any]:
    client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
    answers, usages = [], []
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        patched = instructor.from_openai(client, mode=mode)
        for question in QUESTIONS:
            record, answer = patched.chat.completions.create_with_completion(
                model="default",
                response_model=Lantern,
                messages=[
                    {"role": "system", "content": RULES},
                    {"role": "user", "content": question},
                ],
                temperature=0,
                max_tokens=64,
                max_retries=0,
            )
            answers.append(record.model_dump())
            usages.append(answer.usage)
    return {
        "answers": answers,
        "prompts": [usage.prompt_tokens for usage in usages],
        "cached": [usage.prompt_tokens_details.cached_tokens for usage in usages],
    }


if __name__ == "__main__":
    main("instructor", run)
