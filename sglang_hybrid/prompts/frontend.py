"""Schemas in programs of SGLang's frontend language.

    import sglang as sgl
    from sglang_hybrid.prompts import frontend as prompts

    @prompts.schema(role="system")
    def archive(add, brief: bool):
        add("You keep an archive. ")
        if brief:
            add("Answer in one sentence.")

    @sgl.function
    def ask(s, question):
        prompts.use(s, archive(brief=True))
        s += sgl.user(question) + sgl.assistant(sgl.gen("answer", max_tokens=8))

    backend = sgl.RuntimeEndpoint("http://localhost:30000", chat_template_name="chatml")
    prompts.register(archive, backend)
    ask.run(question="Who keeps rule 3?", backend=backend)

These are functions of this package and no names of `sglang`: a client's program has imported
`sglang` before anything of ours is there, and its namespace is not ours to change. `use` does not
append text to the program's state. It gives the state a backend of its own, which names the modules
with each request, so the server makes their text and their tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint
from sglang.lang.global_config import global_config
from sglang.lang.interpreter import ProgramState, StreamExecutor

from sglang_hybrid.prompts.python import (
    PromptSchemaClient,
    PythonSchema,
    Selection,
    schema,
)

__all__ = ["register", "schema", "use"]


def register(what: PythonSchema | str, backend: Any = None) -> Mapping[str, Any]:
    """Register a schema, or markup, with the server of a backend; what the server says of it.

    backend: an `sgl.RuntimeEndpoint` or an `sgl.Runtime`; the default backend if it is left out.
    Raises ValueError with the server's sentence.
    """
    endpoint = _endpoint(backend or global_config.default_backend)
    return PromptSchemaClient(endpoint.base_url, endpoint.api_key).register(what)


def use(s: ProgramState, selection: Selection) -> None:
    """Begin a program's prompt with modules of a schema. All that the program appends, in its forks
    as well, is new text behind them; `s.text()` has the new text alone.

    Raises ValueError if the program has text already, or uses a schema, or has another backend than
    a server of `sglang_hybrid`.
    """
    executor: StreamExecutor = s.stream_executor
    executor.sync()
    endpoint = _endpoint(executor.backend)
    if isinstance(endpoint, _Importing):
        raise ValueError("the program uses a schema already; a prompt has one.")
    if executor.text_ or executor.images_:
        raise ValueError("the program has appended to its prompt already; use() comes first.")
    executor.backend = _Importing(endpoint, selection.pml())


def _endpoint(backend: Any) -> RuntimeEndpoint:
    endpoint = getattr(backend, "endpoint", backend)
    if not isinstance(endpoint, RuntimeEndpoint):
        raise ValueError(
            f"the backend is {type(backend).__name__}; schemas want an sgl.RuntimeEndpoint."
        )
    return endpoint


class _Importing(RuntimeEndpoint):
    """An endpoint that sends every text as what stands behind the modules of a prompt."""

    def __init__(self, endpoint: RuntimeEndpoint, pml: str) -> None:
        self.__dict__.update(endpoint.__dict__)
        self._pml = pml

    def _add_images(self, s: StreamExecutor, data: dict[str, Any]) -> None:
        """Called by SGLang with the body of each request to /generate."""
        if s.images_:
            raise ValueError("a prompt of a schema holds text only; send images without one.")
        if "text" in data:
            data["pml"] = self._pml

    def _generate_http_request(self, s: StreamExecutor, data: dict[str, Any]) -> Any:
        """A request with several texts is one for each, since a prompt of modules comes alone."""
        texts = data.get("text")
        if not isinstance(texts, list):
            return super()._generate_http_request(s, data)
        return [
            super(_Importing, self)._generate_http_request(s, {**data, "text": text})
            for text in texts
        ]
