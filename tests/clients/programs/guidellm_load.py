"""guidellm: a synthetic load of two shared prefixes, four requests at a time."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import main, tokenizer

GREEDY = "extras.body.temperature=0"


def run(url: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "benchmarks.json"
        subprocess.run(
            [
                *(str(Path(sys.executable).parent / "guidellm"), "run"),
                *("--backend", f"kind=openai_http,target={url},model=default,{GREEDY}"),
                *("--profile", "kind=concurrent,streams=4"),
                *("--constraint", "kind=max_requests,count=24"),
                *("--tokenizer", f"kind=huggingface_auto,model={tokenizer(url)}"),
                "--data",
                "kind=synthetic_text,prompt_tokens=40,output_tokens=8,prefix_tokens=400,prefix_count=2",
                *("--output", f"kind=json,path={out}", "--disable-console"),
            ],
            check=True,
            stdout=sys.stderr,
        )
        benchmark = json.loads(out.read_text())["benchmarks"][0]
    requests_done = benchmark["requests"]["successful"]
    assert not benchmark["requests"]["errored"], benchmark["requests"]["errored"]
    inputs = [request["input_metrics"] for request in requests_done]
    return {
        "answers": sorted(request["output"] for request in requests_done),
        "prompts": [each["text_tokens"] for each in inputs],
        "cached": [each["cached_tokens"] for each in inputs],
    }


if __name__ == "__main__":
    main("guidellm", run)
