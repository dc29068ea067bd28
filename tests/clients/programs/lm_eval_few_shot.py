"""lm-eval: a multiple-choice task and one of short answers, eight shots each.

Choices are compared by the log probabilities of their tokens. lm-eval's own models ask for those of
the whole prompt, which so is computed; `FromContext` asks for those of the choice alone.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import lm_eval
from common import ROOMS, main, tokenizer
from lm_eval.api.registry import get_model
from lm_eval.models.sglang_generate_API import SGLANGGENERATEAPI

SHOTS = 8
QUESTIONS = 4
seen: list[dict[str, Any]] = []


class FromContext(SGLANGGENERATEAPI):
    """`sglang-generate`, which asks for log probabilities from the context's last token on."""

    def batch_loglikelihood_requests(self, chunks: Any) -> Any:
        inputs, lengths, keys = super().batch_loglikelihood_requests(chunks)
        self._starts = {tuple(i): n - 1 for i, n in zip(inputs, lengths, strict=True)}
        return inputs, [1] * len(lengths), keys  # the first that comes back is no choice's

    def _create_payload(self, messages: Any, generate: bool = False, **more: Any) -> Any:
        payload = super()._create_payload(messages, generate=generate, **more)
        if not generate:
            payload["logprob_start_len"] = [self._starts[tuple(each)] for each in messages]
        return payload

    def model_call(self, messages: Any, **more: Any) -> Any:
        answer = super().model_call(messages, **more)
        seen.extend(choice["meta_info"] for choice in answer)
        return answer


def task(kind: str, data: Path) -> dict[str, Any]:
    files = {"train": str(data / "shots.jsonl"), "test": str(data / "questions.jsonl")}
    task = {
        "task": kind,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": files},
        "fewshot_split": "train",
        "test_split": "test",
        "doc_to_text": "{{question}}\nAnswer:",
        "output_type": kind,
        "num_fewshot": SHOTS,
        "fewshot_config": {"sampler": "first_n"},
    }
    if kind == "multiple_choice":
        return {**task, "doc_to_choice": ROOMS, "doc_to_target": "{{room}}"}
    stop = {"until": ["\n\n"], "max_gen_toks": 16}
    return {**task, "doc_to_target": "{{choices[room]}}", "generation_kwargs": stop}


def run(url: str) -> dict[str, Any]:
    seen.clear()
    answers: list[Any] = []
    logprobs: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, count in (("shots", SHOTS), ("questions", QUESTIONS)):
            lines = [
                {
                    "question": f"In {name} {n}, after keeper {n * 7 % 31} had counted all "
                    f"the lanterns of the house and written {n * 3} into the book, in which room "
                    "was the last one?",
                    "room": n % 4,
                    "choices": ROOMS,
                }
                for n in range(count)
            ]
            (Path(folder) / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
        own = get_model("local-completions")
        for make, address in ((FromContext, "/generate"), (own, "/v1/completions")):
            model = make(
                base_url=url + address,
                model="default",
                tokenizer_backend="huggingface",
                tokenizer=tokenizer(url),
                num_concurrent=1,
                max_retries=1,
            )
            for kind in ("multiple_choice", "generate_until"):
                found = lm_eval.simple_evaluate(
                    model=model, tasks=[task(kind, Path(folder))], bootstrap_iters=0
                )
                for sample in found["samples"][kind]:
                    if kind == "multiple_choice":
                        logprobs += [choice[0][0] for choice in sample["resps"]]
                    else:
                        answers.append(sample["resps"])
    return {
        "answers": answers,
        "logprobs": logprobs,
        "prompts": [each["prompt_tokens"] for each in seen],
        "cached": [each["cached_tokens"] for each in seen],
    }


if __name__ == "__main__":
    main("lm-eval", run)
