"""sglang.bench_serving: groups of prompts that share a system prompt, four requests at a time."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import main, tokenizer


def run(url: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.jsonl"
        subprocess.run(
            [
                *(sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang"),
                *("--base-url", url, "--model", tokenizer(url), "--max-concurrency", "4"),
                *("--dataset-name", "generated-shared-prefix", "--gsp-num-groups", "3"),
                *("--gsp-prompts-per-group", "8", "--gsp-system-prompt-len", "400"),
                *("--gsp-question-len", "40", "--gsp-output-len", "8"),
                *("--num-prompts", "24", "--warmup-requests", "0", "--disable-tqdm"),
                *("--output-file", str(out), "--output-details", "--cache-report"),
                *("--extra-request-body", '{"sampling_params": {"temperature": 0}}'),
            ],
            check=True,
            stdout=sys.stderr,
            env={"HOME": folder, "PATH": "/usr/bin:/bin"},  # it keeps prompts below its home
        )
        details = json.loads(out.read_text())
    assert not any(details["errors"]), details["errors"]
    return {
        "answers": details["generated_texts"],
        "prompts": details["input_lens"],
        "cached": details["cached_tokens"],
    }


if __name__ == "__main__":
    main("sglang", run)
