"""Schemas written as Python functions, and a client for them.

    @schema(role="system")
    def rules(add, brief: bool, language: Literal["en", "fr"]):
        add("You keep an archive.")
        if brief:
            add("Answer in one sentence.")
        match language:
            case "en":
                add("Write English.")
            case "fr":
                add("Write French.")

The function is read, not run: each statement `add(...)` with a text is text, an `if` on an argument
is an optional module of the argument's name, and a `match` on an argument is a union with a module
for each case. With a role, all of it is one message. `rules.pml` is the schema;
`rules(brief=True, language="fr")` is a selection, which `PromptSchemaClient.generate` sends.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape, quoteattr

import requests

from sglang_hybrid.extensions.schemas.declared.schema import read_schema

TIMEOUT = 600.0


@dataclass(frozen=True)
class Selection:
    """Modules of a schema that a prompt imports, as markup."""

    schema: str
    imports: str

    def pml(self, user: str | None = None) -> str:
        """The prompt, with a message of the user's, as it is, behind the imports."""
        asked = ""
        if user is not None:
            text = escape(user, {"\r": "&#13;"})
            asked = f'<user xml:space="preserve">{text}</user>'
        return f"<prompt schema={quoteattr(self.schema)}>{self.imports}{asked}</prompt>"


class PythonSchema:
    """A schema that was written as a function. Raises ValueError for what it cannot express."""

    def __init__(self, function: Callable[..., None], role: str | None = None) -> None:
        source = textwrap.dedent(inspect.getsource(function))
        tree = ast.parse(source).body[0]
        assert isinstance(tree, ast.FunctionDef)
        names = [argument.arg for argument in tree.args.args]
        if not names:
            raise ValueError(f"{tree.name}() needs an argument that adds text, as in add('...').")
        self.name = tree.name
        self._reader = _FunctionReader(tree.name, names[0], set(names[1:]))
        parts, self._choices = self._reader.parts(tree.body)
        if role is not None:
            parts = f"<{role}>{parts}</{role}>"
        self.pml = f'<schema name="{self.name}">{parts}</schema>'
        read_schema(self.pml)

    def __call__(self, **chosen: Any) -> Selection:
        """The selection for these arguments; those that are left out choose nothing."""
        unknown = chosen.keys() - self._reader.arguments
        if unknown:
            raise ValueError(f"{self.name}() has no argument {min(unknown)!r}.")
        for argument, value in chosen.items():
            known = self._reader.cases.get(argument)
            if known is not None and value is not None and value not in known:
                raise ValueError(
                    f"{argument} of {self.name}() is {value!r}; it can be {', '.join(known)}."
                )
        return Selection(self.name, _imports(self._choices, chosen))


def schema(*, role: str | None = None) -> Callable[[Callable[..., None]], PythonSchema]:
    """Decorates a function that says what a schema holds.

    role: of the one message that it is; without it the schema is text without messages.
    """
    return lambda function: PythonSchema(function, role)


class PromptSchemaClient:
    """Registers schemas with a server, and sends prompts of their modules.

    tenant: `extra_key` and `cache_salt` of all requests.
    """

    def __init__(self, url: str, api_key: str | None = None, **tenant: str) -> None:
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._tenant = tenant

    def register(self, what: PythonSchema | str) -> Mapping[str, Any]:
        """Register a schema, or markup; what the server says of it."""
        pml = what if isinstance(what, str) else what.pml
        return self._post("/v1/prompt_schemas", {"pml": pml, **self._tenant})

    def generate(self, selection: Selection, user: str, **sampling: Any) -> Mapping[str, Any]:
        """An answer of /generate."""
        body = {"pml": selection.pml(user), "sampling_params": sampling, **self._tenant}
        return self._post("/generate", body)

    def prewarm(self, name: str, budget_mb: float | None = None) -> Mapping[str, Any]:
        """Compute the prefixes that are worth most within a budget; None: within what one tenant
        may pin.
        """
        path = f"/v1/prompt_schemas/{name}/prewarm"
        return self._post(path, {"budget_mb": budget_mb, **self._tenant})

    def _post(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        answer = requests.post(
            self._url + path, json=dict(body), headers=self._headers, timeout=TIMEOUT
        )
        if not answer.ok:
            error = answer.json().get("error", answer.text)
            raise ValueError(error.get("message", error) if isinstance(error, dict) else error)
        found: Mapping[str, Any] = answer.json()
        return found


@dataclass(frozen=True)
class _Choice:
    """A module that is imported if an argument has a value (None: if it is true)."""

    argument: str
    value: str | None
    module: str
    inner: Sequence[_Choice]


class _FunctionReader:
    """Markup and choices from the statements of a function."""

    def __init__(self, name: str, add: str, arguments: set[str]) -> None:
        self.arguments = arguments
        self.cases: dict[str, list[str]] = {}  # values of the arguments of unions
        self._name = name
        self._add = add

    def parts(self, body: Sequence[ast.stmt]) -> tuple[str, list[_Choice]]:
        markup, choices = "", []
        for at, statement in enumerate(body):
            if at == 0 and _text_of(statement) is not None:
                continue  # the docstring
            if isinstance(statement, ast.If):
                text, found = self._optional(statement)
            elif isinstance(statement, ast.Match):
                text, found = self._union(statement)
            else:
                text, found = self._text(statement), []
            markup += text
            choices += found
        return markup, choices

    def _optional(self, statement: ast.If) -> tuple[str, list[_Choice]]:
        argument = self._argument(statement.test)
        if statement.orelse:
            raise self._error(statement, "an `if` has no `else`; write a `match`.")
        inner, choices = self.parts(statement.body)
        markup = f'<module name="{argument}">{inner}</module>'
        return markup, [_Choice(argument, None, argument, choices)]

    def _union(self, statement: ast.Match) -> tuple[str, list[_Choice]]:
        argument = self._argument(statement.subject)
        markup, choices = "", []
        for case in statement.cases:
            name = _text_of(case.pattern)
            if name is None or case.guard is not None:
                raise self._error(statement, "each `case` is a text, without a condition.")
            self.cases.setdefault(argument, []).append(name)
            inner, found = self.parts(case.body)
            markup += f"<module name={quoteattr(name)}>{inner}</module>"
            choices.append(_Choice(argument, name, name, found))
        return f"<union>{markup}</union>", choices

    def _text(self, statement: ast.stmt) -> str:
        match statement:
            case ast.Expr(ast.Call(ast.Name(self._add), [argument], [])):
                text = _text_of(argument)
                if text is not None:
                    return escape(text)
        raise self._error(
            statement,
            f"a statement is {self._add}('...'), `if argument:` or `match argument:`.",
        )

    def _argument(self, node: ast.expr) -> str:
        if isinstance(node, ast.Name) and node.id in self.arguments:
            return node.id
        raise self._error(node, "a choice is made by one argument of the function.")

    def _error(self, node: ast.AST, why: str) -> ValueError:
        return ValueError(f"{self._name}(), line {getattr(node, 'lineno', 0)}: {why}")


def _imports(choices: Sequence[_Choice], chosen: Mapping[str, Any]) -> str:
    markup = ""
    for choice in choices:
        given = chosen.get(choice.argument)
        if given == choice.value if choice.value is not None else bool(given):
            inner = _imports(choice.inner, chosen)
            markup += f"<{choice.module}>{inner}</{choice.module}>"
    return markup


def _text_of(node: ast.AST) -> str | None:
    """The text that an expression, a statement or a pattern is; None if it is something else."""
    match node:
        case ast.Expr(value) | ast.MatchValue(value):
            return _text_of(value)
        case ast.Constant(str(text)):
            return text
    return None
