"""Five schemas of the shapes that Prompt Cache was evaluated with (arXiv 2311.04934, appendix A).

Five files of code, twice; a journey with nested unions and parameters; six traits of a person with
five values each (one has four); six properties of a pupil. The texts are our own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

FILES = {
    "code-generation-game": ("unit.py", "map.py", "player.py", "game.py", "database.py"),
    "code-generation-bookstore": ("book.py", "shelf.py", "customer.py", "order.py", "shop.py"),
}

PLACES = ("atoll", "rainforest", "desert", "harbour", "forum", "cape", "bay", "pampas")

PERSON = {
    "age": ("child", "teenager", "adult", "elder", "ancient"),
    "home": ("village", "town", "city", "island", "valley"),
    "trade": ("baker", "smith", "weaver", "sailor", "scribe"),
    "temper": ("calm", "brisk", "wry", "stern", "merry"),
    "speech": ("plain", "ornate", "terse", "lyrical", "formal"),
    "season": ("spring", "summer", "autumn", "winter"),
}

PUPIL = {
    "grade": ("elementary", "middle", "high", "college", "graduate", "evening"),
    "level": ("novice", "beginner", "practised", "expert"),
    "past": ("never", "long-ago", "last-year", "last-month", "last-week", "yesterday"),
    "style": ("seeing", "hearing", "reading", "doing", "talking"),
    "test": ("essay", "quiz", "project", "oral", "none"),
    "drive": ("curious", "dutiful", "playful", "hesitant"),
}


def code(name: str) -> str:
    files = "".join(
        f'<module name="{file}">\n# {file}\nclass {file[:-3].title()}:\n'
        f'    """One {file[:-3]} of the {name}."""\n    name: str = "{file}"\n</module>\n'
        for file in FILES[name]
    )
    return (
        f'<schema name="{name}">\n<system>You write Python.</system>\n<user>{files}</user></schema>'
    )


def travel() -> str:
    places = "".join(
        f'<module name="{place}"> the {place}, where the light is long.</module>'
        for place in PLACES
    )
    return f"""<schema name="travel">
<user>
<module name="travel-plan">
I want to go away for <parameter name="duration" length="5"/> and see something new.
<union>
<module name="domestic">I stay in this country, in <parameter name="city" length="10"/>.</module>
<module name="overseas">I go far away, to <union scaffold="forum">{places}</union></module>
</union>
</module>
</user>
</schema>"""


def person() -> str:
    traits = "".join(
        f'<module name="{trait}">{trait.title()}: {_union(trait, values)}</module>\n'
        for trait, values in PERSON.items()
    )
    return f'<schema name="persona"><system>Play this person.\n{traits}</system></schema>'


def pupil() -> str:
    unions = "\n".join(_union(trait, values) for trait, values in PUPIL.items())
    return f'<schema name="education"><system>Teach this pupil.\n{unions}</system></schema>'


def all_schemas() -> Mapping[str, str]:
    return {
        **{name: code(name) for name in FILES},
        "travel": travel(),
        "persona": person(),
        "education": pupil(),
    }


def _union(trait: str, values: Sequence[str]) -> str:
    modules = "".join(
        f'<module name="{value}">The {trait} is {value}, and that shows.\n</module>'
        for value in values
    )
    return f"<union>{modules}</union>"
