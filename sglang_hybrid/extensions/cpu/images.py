"""Images without torchvision, which has no CPU build on the package registry.

transformers cuts images into patches with Pillow alone, but its processor of Qwen3.5 also wants one
for videos, which needs torchvision.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

MODEL_TYPES = ("qwen3_5", "qwen3_5_moe")


class PillowProcessor:
    """A processor that SGLang loads in the place of that of transformers."""

    @staticmethod
    def from_pretrained(model: str, **options: Any) -> Any:
        """The processor of the model in a folder. It refuses videos."""
        import transformers

        base: Any = transformers.Qwen3VLProcessor

        class Images(base):
            """`Qwen3VLProcessor` of two parts: transformers loads those that `__init__` names."""

            def __init__(
                self, image_processor: Any, tokenizer: Any, chat_template: str | None = None
            ) -> None:
                super().__init__(image_processor, tokenizer, None, chat_template)
                self.video_processor = None

            def _process_videos(self, videos: Any, **options: Any) -> Any:
                raise ValueError("this server reads no videos: torchvision is not installed.")

        return Images.from_pretrained(model, **options)


def register() -> None:
    """Name the processor in SGLang's registry, if torchvision is not there."""
    from sglang.srt.multimodal.customized_mm_processor_utils import _CUSTOMIZED_MM_PROCESSOR

    if find_spec("torchvision") is None:
        _CUSTOMIZED_MM_PROCESSOR.update(dict.fromkeys(MODEL_TYPES, PillowProcessor))
