"""The best prefixes to hold: against every set of small trees, and against simpler ways."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from sglang_hybrid.extensions.schemas.declared import budget as budget_module
from sglang_hybrid.extensions.schemas.declared import tree as tree_module
from sglang_hybrid.extensions.schemas.declared.budget import (
    best_prefixes,
    cost,
    saved,
)
from sglang_hybrid.extensions.schemas.declared.resolve import Import, Prompt, resolve
from sglang_hybrid.extensions.schemas.declared.schema import inside, read_schema
from sglang_hybrid.extensions.schemas.declared.tree import (
    Edge,
    PrefixNode,
    Shape,
    as_imports,
    prefix_tree,
)
from tests.examples import seeds
from tests.extensions.schemas import schemas


def random_tree(source: random.Random, nodes: int) -> PrefixNode:
    shapes = [Shape()]
    for _ in range(nodes):
        parent = source.choice(shapes)
        left = 1 - sum(edge.share for edge in parent.edges)
        shapes.append(Shape())
        parent.edges.append(Edge(left * source.random(), source.randint(1, 9), (), shapes[-1]))
    return PrefixNode(shapes[0])


@pytest.mark.parametrize("seed", seeds(15))
def test_no_other_set_saves_more(seed: int) -> None:
    source = random.Random(seed)
    root = random_tree(source, source.randint(1, 9))
    state, kv = source.randint(1, 12), source.randint(0, 3)
    nodes = [node for node in root.walk() if node.depth]
    for budget in (0, state, 3 * state + 5 * kv, 5 * state + 20 * kv, 900):
        plan = best_prefixes(root, budget, state, kv)
        assert plan.cost == cost(plan.nodes, state, kv) <= budget
        most = max(
            saved(chosen)
            for count in range(len(nodes) + 1)
            for chosen in itertools.combinations(nodes, count)
            if cost(chosen, state, kv) <= budget
        )
        assert plan.saved == pytest.approx(most)


def test_the_tree_of_a_schema_has_every_prefix() -> None:
    schema = read_schema(
        '<schema name="s">root <module name="a">one <module name="b">two</module></module>'
        '<union><module name="c">three</module><module name="d">four '
        '<parameter name="p" length="3"/> five</module></union></schema>'
    )
    counts = {("a",): 6, ("a", "b"): 3, ("c",): 8}
    root = prefix_tree(schema, len, counts, requests=8)
    found = {node.imports: (node.depth, node.probability) for node in root.walk() if node.depth}
    a, skipped = 7 / 10, 3 / 10
    c, d = 9 / 11, 1 / 11
    assert found == {
        (): (5, pytest.approx(1)),
        (("a",),): (9, pytest.approx(a)),
        (("a",), ("a", "b")): (12, pytest.approx(a * 4 / 8)),
        (("a",), ("c",)): (14, pytest.approx(a * 4 / 8 * c)),
        (("a",), ("d",)): (14, pytest.approx(a * 4 / 8 * d)),
        (("a",), ("a", "b"), ("c",)): (17, pytest.approx(a * 4 / 8 * c)),
        (("a",), ("a", "b"), ("d",)): (17, pytest.approx(a * 4 / 8 * d)),
        (("c",),): (10, pytest.approx(skipped * c)),
        (("d",),): (10, pytest.approx(skipped * d)),
    }


def test_what_is_too_large_to_weigh_is_refused() -> None:
    def modules(count: int) -> str:
        return "".join(f'<module name="m{n}">text</module>' for n in range(count))

    def tree(parts: str) -> PrefixNode:
        return prefix_tree(read_schema(f'<schema name="s">{parts}</schema>'), len, {}, 0)

    assert len(tree(modules(70)).children) == 70
    with pytest.raises(ValueError, match="400 parts one after another"):
        tree(modules(200))
    assert len(tree(f"<union>{modules(1_900)}</union>").children) == 1_900
    many = "".join(f"<union>{modules(45)}</union>".replace('"m', f'"u{n}.') for n in range(40))
    with pytest.raises(ValueError, match="more than 20,000 ways"):
        tree(many)


def test_a_schema_is_weighed_or_refused_in_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client may send any: one whose unions all but repeat each other, or are nested."""
    steps: Counter[str] = Counter()

    def count(function: Any) -> None:
        def counted(*args: Any, **more: Any) -> Any:
            steps[function.__name__] += 1
            return function(*args, **more)

        monkeypatch.setattr(tree_module, function.__name__, counted)

    count(inside)
    count(replace)

    def union(count: int, text: str, name: str) -> str:
        inner = "".join(f'<module name="{name}{n}">{text}</module>' for n in range(count))
        return f"<union>{inner}</union>"

    wide = union(30, "", "a") + union(138, "", "b") + union(138, "text", "c")
    with pytest.raises(ValueError, match="more than 20,000 ways"):
        prefix_tree(read_schema(f'<schema name="s">{wide}</schema>'), len, {}, 0)
    deep = '<union><module name="m">' * 10 + "text" + "</module></union>" * 10
    prefix_tree(read_schema(f'<schema name="s">{deep}</schema>'), len, {}, 0)
    assert steps["replace"] <= 3 * tree_module.MOST_EDGES
    assert steps["inside"] < 1_000


def test_a_node_is_reached_by_its_imports() -> None:
    schema = read_schema(schemas.pupil())
    root = prefix_tree(schema, len, {}, 0)
    nodes = random.Random(1).sample([*root.walk()], 50)
    for node in nodes:
        pieces = resolve(schema, Prompt("education", as_imports(node.imports))).pieces
        assert sum(len(piece.text) for piece in pieces) == node.depth
    assert as_imports((("a",), ("a", "b"), ("c",))) == (
        Import("a", {}, (Import("b"),)),
        Import("c"),
    )


def test_what_takes_too_long_to_choose_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = "".join(f"<module name='m{at}'>text {at}</module>" for at in range(12))
    root = prefix_tree(read_schema(f"<schema name='s'>{modules}</schema>"), len, {}, 0)
    assert best_prefixes(root, 10_000, 10, 1).nodes
    monkeypatch.setattr(budget_module, "MOST_STEPS", 100)
    with pytest.raises(ValueError, match="so many choices one after another"):
        best_prefixes(root, 10_000, 10, 1)
