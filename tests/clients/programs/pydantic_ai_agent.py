"""pydantic-ai: six questions to an agent with tools and a typed result, which keeps its history."""

from typing import Any, Literal

from common import QUESTIONS, RULES, Lantern, main
from openai.types.chat import ChatCompletion
from pydantic_ai import Agent
from pydantic_ai.messages import ModelResponse
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class SGLangChatModel(OpenAIChatModel):
    """SGLang's `metadata` of an answer has a list, and OpenAI's texts only: it is left out."""

    def _validate_completion(self, response: ChatCompletion) -> Any:
        response.metadata = None  # type: ignore[attr-defined]
        return super()._validate_completion(response)


def run(url: str) -> dict[str, Any]:
    provider = OpenAIProvider(base_url=url + "/v1", api_key="none")
    settings: Any = {"temperature": 0, "max_tokens": 64, "parallel_tool_calls": False}
    keeper = Agent(
        SGLangChatModel("default", provider=provider),
        instructions=RULES,
        output_type=Lantern,
        model_settings=settings,
    )

    @keeper.tool_plain
    def find(room: Literal["north", "south", "east", "west"]) -> str:
        """Find lanterns."""
        return f"Three in the {room}."

    history: list[Any] = []
    answers: list[Any] = []
    for question in QUESTIONS:
        result = keeper.run_sync(question, message_history=history)
        history = result.all_messages()
        answers.append(result.output.model_dump())
    usages = [message.usage for message in history if isinstance(message, ModelResponse)]
    return {
        "answers": answers,
        "prompts": [usage.input_tokens for usage in usages],
        "cached": [usage.cache_read_tokens for usage in usages],
    }


if __name__ == "__main__":
    main("pydantic-ai-slim", run)
