"""Schemas and prompts: what is read, what it resolves to, and what is said of mistakes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from sglang_hybrid.extensions.schemas.declared import xml
from sglang_hybrid.extensions.schemas.declared.registry import Registry
from sglang_hybrid.extensions.schemas.declared.resolve import Import, Prompt, read_prompt, resolve
from sglang_hybrid.extensions.schemas.declared.schema import Schema, read_schema, tidy
from sglang_hybrid.extensions.schemas.declared.tokens import PromptTokenizer
from sglang_hybrid.extensions.schemas.declared.xml import MOST_BYTES, MarkupError
from tests.extensions.schemas import schemas


@pytest.fixture
def registry(tokenizer: PreTrainedTokenizerFast) -> Registry:
    found = Registry(PromptTokenizer(tokenizer))
    for text in schemas.all_schemas().values():
        found.register(None, text)
    return found


def read(name: str) -> Schema:
    return read_schema(schemas.all_schemas()[name])


def text(schema: Schema, imports: str, tail: str = "") -> str:
    prompt = read_prompt(f'<prompt schema="{schema.name}">{imports}{tail}</prompt>')
    return "".join(piece.text for piece in resolve(schema, prompt).pieces)


def said(markup: str, folder: Path | None = None) -> MarkupError:
    with pytest.raises(MarkupError) as error:
        read_schema(markup, folder)
    assert str(error.value).endswith(".") and "\n" not in str(error.value)
    return error.value


# What is read.


def test_the_five_schemas_have_their_modules() -> None:
    counts = {name: len([*read(name).modules()]) for name in schemas.all_schemas()}
    assert counts == {
        "code-generation-game": 5,
        "code-generation-bookstore": 5,
        "travel": 11,
        "persona": 35,
        "education": 30,
    }


def test_a_prompt_is_its_modules_in_order_and_new_text() -> None:
    plan = '<travel-plan duration="3 days"><overseas><forum/></overseas></travel-plan>'
    assert text(read("travel"), plan, "<user>When?</user>") == (
        "\nI want to go away for 3 days and see something new.\n"
        "I go far away, to  the forum, where the light is long.When?"
    )


@pytest.mark.parametrize(
    ("written", "read_as"),
    [
        ("one line", "one line"),
        (" for ", " for "),
        ("\n    ", ""),
        ("\n  two\n    lines\n  ", "\ntwo\n  lines\n"),
        ("  end\n\n", "  end\n"),
    ],
)
def test_white_space_around_text_is_tidied(written: str, read_as: str) -> None:
    assert tidy(written) == read_as


def test_files_are_read_from_the_schemas_folder_only(tmp_path: Path) -> None:
    folder = tmp_path / "schemas"
    (folder / "texts").mkdir(parents=True)
    (folder / "texts" / "rules.txt").write_text("Be brief.")
    (tmp_path / "secret.txt").write_text("secret")
    (folder / "link.txt").symlink_to(tmp_path / "secret.txt")

    def schema(source: str) -> str:
        return f'<schema name="s">\n  <module name="m" src="{source}"/></schema>'

    found = read_schema(schema("texts/rules.txt"), folder)
    assert text(found, "<m/>") == "Be brief."
    for source in ("../secret.txt", "../../etc/passwd", "/etc/passwd", "link.txt", "none.txt"):
        error = said(schema(source), folder)
        assert "is no file in the schema's folder" in str(error)
        assert (error.line, error.column) == (2, 3)
    assert "was not read from a folder" in str(said(schema("texts/rules.txt")))


# What is refused.


@pytest.mark.parametrize(
    ("markup", "line", "sentence"),
    [
        ('<schema name="s">\n<module name="a">x</modul></schema>', 2, "not well-formed"),
        ('<schema name="s">\n<module name=a>x</module></schema>', 2, "not well-formed"),
        ('<schema name="s">\n<modul name="a"/></schema>', 2, "<modul> cannot stand in <schema>"),
        ('<schema name="s">\n<module name="1a"/></schema>', 2, "name of <module> is '1a'"),
        ('<schema name="s">\n<module/></schema>', 2, "name of <module> is ''"),
        ('<schema name="s">\n<module name="user"/></schema>', 2, "name of <module> is 'user'"),
        ('<schema name="s"><module name="a"/>\n<module name="a"/></schema>', 2, "on line 1"),
        ('<schema name="s">\n<parameter name="p" length="5"/></schema>', 2, "<parameter> cannot"),
        (
            '<schema name="s"><module name="a">\n<parameter name="p" length="x"/></module></schema'
            ">",
            2,
            "length of parameter 'p' is 'x'",
        ),
        *(
            (
                f'<schema name="s"><module name="a">\n<parameter name="p" length="{length}"/>'
                "</module></schema>",
                2,
                "length of parameter 'p' is '",
            )
            for length in ("0", "-1", "1000000", "000000001" + "9" * 4_200, "9" * 5_000, "\u0661")
        ),
        (f'<schema name="s">\n<module name="{"a" * 129}"/></schema>', 2, "longer than 128 char"),
        ('<schema name="s">\n<union>text</union></schema>', 2, "a <union> holds modules only"),
        ('<schema name="s">\n<union/></schema>', 2, "must have one module at least"),
        (
            '<schema name="s">\n<union scaffold="b"><module name="a"/></union></schema>',
            2,
            "scaffold is 'b'",
        ),
        ('<schema name="s">\n<module name="a" cache="x"/></schema>', 2, "the attribute 'cache'"),
        ('<prompt schema="s"/>', 1, "it must be a <schema>"),
        ('<!DOCTYPE s [<!ENTITY a "b">]><schema name="s">&a;</schema>', 1, "an entity"),
        ('<!DOCTYPE s SYSTEM "http://localhost/x"><schema name="s"/>', 1, "a document type"),
        ("", 1, "not well-formed"),
    ],
)
def test_a_mistake_has_a_line_and_a_sentence(markup: str, line: int, sentence: str) -> None:
    error = said(markup)
    assert error.line == line and error.column > 0
    assert sentence in str(error)


def test_text_that_comments_divide_is_put_together_once() -> None:
    """A mebibyte of `a<?b?>` took three seconds where each run was added to those before it."""

    class Run(str):
        def __add__(self, _: str) -> str:
            raise AssertionError("a run was added to another")

    builder = xml._Builder()
    builder.start("module", {})
    for _ in range(3):
        builder.data(Run("a"))
    builder.end("module")
    assert builder.close().children == ["aaa"]
    assert xml.parse("<a>b<!-- -->c<d/>e<?f?>g</a>").children[::2] == ["bc", "eg"]


def test_bombs_are_refused() -> None:
    laughs = "".join(f'<!ENTITY l{n} "{f"&l{n - 1};" * 10 if n else "lol"}">' for n in range(10))
    bomb = f'<!DOCTYPE s [{laughs}]><schema name="s"><module name="m">&l9;</module></schema>'
    assert "entity" in str(said(bomb))
    deep = "<module name='m'>" * (10 << 20 >> 4)
    assert f"may have {MOST_BYTES:,} at most" in str(said("<schema name='s'>" + deep))
    assert "nested more than 64 deep" in str(said("<schema name='s'>" + deep[: MOST_BYTES - 50]))
    wide = "<schema name='s'>" + "<module name='m'/>" * 3_000 + "</schema>"
    assert "more than 2,000 elements" in str(said(wide))


@pytest.mark.parametrize(
    ("imports", "sentence"),
    [
        ("<travel-plan/>", "parameter 'duration' of module 'travel-plan' has no value"),
        ("<nowhere/>", "schema 'travel' has no module 'nowhere' here"),
        ("<forum/>", "schema 'travel' has no module 'forum' here"),
        ('<travel-plan duration="3"><forum/></travel-plan>', "has no module 'forum' here"),
        ('<travel-plan duration="3" where="x"/>', "has no parameter 'where'"),
        (
            '<travel-plan duration="3"><domestic city="a"/><overseas/></travel-plan>',
            "modules 'domestic' and 'overseas' exclude each other",
        ),
        ('<travel-plan duration="3"/><travel-plan duration="4"/>', "is imported twice"),
        ('<travel-plan duration="3">text</travel-plan>', "<travel-plan> has text"),
        ('Hello <travel-plan duration="3"/>', "imported behind new text"),
        ('<user>Hello</user><travel-plan duration="3"/>', "imported behind new text"),
    ],
)
def test_what_a_prompt_cannot_import_is_named(imports: str, sentence: str) -> None:
    with pytest.raises(MarkupError) as error:
        text(read("travel"), imports)
    assert sentence in str(error.value) and error.value.line == 1


def test_imports_out_of_order_are_put_in_order_with_a_warning() -> None:
    schema = read("code-generation-game")
    files = [Import(name) for name in ("map.py", "unit.py", "game.py")]
    found = resolve(schema, Prompt(schema.name, tuple(files)))
    ordered = resolve(schema, Prompt(schema.name, (files[1], files[0], files[2])))
    assert found.pieces == ordered.pieces
    assert found.warnings == (
        "Module 'unit.py' was imported out of order; it stands where schema "
        "'code-generation-game' has it.",
    )
    assert ordered.warnings == ()


# What it comes to.


def pupils() -> Iterator[tuple[Import, ...]]:
    for names in itertools.product(*schemas.PUPIL.values()):
        yield tuple(Import(name) for name in names)


def persons() -> Iterator[tuple[Import, ...]]:
    """A value of each trait; each trait is a module around a union."""
    for names in itertools.product(*schemas.PERSON.values()):
        traits = zip(schemas.PERSON, names, strict=True)
        yield tuple(Import(trait, imports=(Import(name),)) for trait, name in traits)


def journeys() -> Iterator[tuple[Import, ...]]:
    abroad = [(Import("overseas", imports=(Import(place),)),) for place in schemas.PLACES]
    for way in [(), (Import("domestic", {"city": "Berne"}),), (Import("overseas"),), *abroad]:
        yield (Import("travel-plan", {"duration": "a week"}, way),)


def files(name: str) -> Iterator[tuple[Import, ...]]:
    for count in range(6):
        for names in itertools.combinations(schemas.FILES[name], count):
            yield tuple(Import(name) for name in names)


@pytest.mark.parametrize(
    ("name", "selections", "count"),
    [
        ("education", pupils(), 14_400),
        ("persona", persons(), 5**5 * 4),
        ("travel", journeys(), 11),
        *((name, files(name), 2**5) for name in schemas.FILES),
    ],
)
def test_every_selection_is_a_path_of_its_own(
    name: str, selections: Iterator[tuple[Import, ...]], count: int
) -> None:
    schema = read(name)
    paths = {resolve(schema, Prompt(name, imports)).pieces for imports in selections}
    assert len(paths) == count


def test_every_subset_of_files_has_tokens_of_its_own(registry: Registry) -> None:
    game = registry.get(None, "code-generation-game")
    found = {tuple(registry.expand_path(game, each).ids) for each in files(game.schema.name)}
    assert len(found) == 2**5


def test_ends_are_where_other_selections_part(registry: Registry) -> None:
    """Two selections share exactly the tokens up to the end of the last module in common."""
    registered = registry.get(None, "education")
    shared = [Import("high"), Import("novice"), Import("yesterday")]
    one = registry.expand_path(registered, [*shared, Import("seeing")])
    other = registry.expand_path(registered, [*shared, Import("doing")])
    common = next(at for at, (a, b) in enumerate(zip(one.ids, other.ids, strict=False)) if a != b)
    ends = {end.path: end.position for end in one.ends}
    assert ends["yesterday",] <= common
    assert one.ids[: ends["yesterday",]] == other.ids[: ends["yesterday",]]
    assert ends["yesterday",] in [end.position for end in other.ends]


def test_the_text_is_what_the_chat_template_writes(
    registry: Registry, tokenizer: PreTrainedTokenizerFast
) -> None:
    imports = "<unit.py/><game.py/><user>Write the main entry.</user>"
    expanded = registry.expand(None, f'<prompt schema="code-generation-game">{imports}</prompt>')
    pieces = resolve(
        read("code-generation-game"),
        read_prompt(f'<prompt schema="code-generation-game">{imports}</prompt>'),
    ).pieces
    files = "".join(piece.text for piece in pieces if piece.path)
    messages = [
        {"role": "system", "content": "You write Python."},
        {"role": "user", "content": files},
        {"role": "user", "content": "Write the main entry."},
    ]
    written = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(expanded.tokenized.ids) == written


def test_a_value_ends_the_exact_prefix_until_it_comes_back(registry: Registry) -> None:
    def prompt(duration: str) -> str:
        plan = f'<travel-plan duration="{duration}"><overseas><bay/></overseas></travel-plan>'
        return f'<prompt schema="travel">{plan}<user>Go.</user></prompt>'

    registry.expand(None, prompt("3 days"), counts=False)  # looked up and not sent
    assert registry.get(None, "travel").requests == 0
    first, other = registry.expand(None, prompt("3 days")), registry.expand(None, prompt("a week"))
    again = registry.expand(None, prompt("3 days"))
    ends = [end.position for end in first.tokenized.ends if end.values]
    assert ends and not set(ends) & {*first.positions, *other.positions}
    assert set(ends) <= set(again.positions)


def test_the_parts_of_a_stream_do_not_repeat_what_may_be_long(registry: Registry) -> None:
    expanded = registry.expand(None, '<prompt schema="travel"/>')
    assert expanded.on_answer({"finish_reason": None}) == {"schema": "travel"}
    told = expanded.on_answer({"finish_reason": {"type": "stop"}})
    assert told.keys() == {"schema", "ends", "declared", "warnings"}


def test_a_value_that_is_too_long_is_named_with_its_limit(registry: Registry) -> None:
    plan = '<travel-plan duration="one two three four five six seven"/>'
    with pytest.raises(ValueError, match=r"'duration' has \d+ tokens; it may have 5 at most"):
        registry.expand(None, f'<prompt schema="travel">{plan}</prompt>')
