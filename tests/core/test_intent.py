"""What a prefill gets of what it wants, and what is told of the rest."""

from __future__ import annotations

from dataclasses import dataclass, field

from sglang_hybrid.core.admission import Room, Skip
from sglang_hybrid.core.cost import CostModel
from sglang_hybrid.core.eviction import make_policy
from sglang_hybrid.core.intent import Intent, Wish, room_for
from sglang_hybrid.core.nodes import Kind, NodeTree
from sglang_hybrid.core.pool import Pool, Scarce


@dataclass
class Slots:
    """A full pool of states; a slot that is given up can be had once."""

    pool: Pool
    wishes: list[Wish | None] = field(default_factory=list)

    def free(self) -> int:
        return 0

    def take(self, wish: Wish | None = None) -> int | None:
        self.wishes.append(wish)
        return len(self.wishes)

    def give_back(self, slot: int) -> None:
        raise AssertionError("nothing is given back")

    def room(self, intent: Intent[int]) -> Room:
        return room_for(intent, self.free(), self.pool)


def test_a_wish_tells_what_it_is_for_and_how_it_compared() -> None:
    tree = NodeTree()
    pool = Pool(Scarce.STATES, CostModel.paper_7b(), make_policy("seglen"), tree.clock)
    tree.listen(pool)
    tree.give_state(tree.add(tree.root, 1, 300), Kind.TAIL)
    slots = Slots(pool)
    wanted = {400: Kind.BRANCH, 500: Kind.MESSAGE, 1_000: Kind.CHUNK}
    intent: Intent[int] = Intent(1_001, 0, wanted, True, None, owner="someone")
    taken, skipped = intent.take(slots, list(wanted), 1_001)
    assert [planned.position for planned in taken] == [400]
    (wish,) = slots.wishes
    assert wish is not None and wish.contest is not None
    assert (wish.position, wish.kind, wish.owner) == (400, Kind.BRANCH, "someone")
    assert (wish.contest.new, wish.contest.cheapest, wish.contest.wins) == (400.0, 300.0, True)
    (refused, skip), (never_weighed, other_skip) = skipped
    assert (refused.position, skip, other_skip) == (500, Skip.NOT_WORTH, Skip.NOT_WORTH)
    assert refused.contest is not None  # from the state at 400 on, it would save 100 tokens
    assert (refused.contest.new, refused.contest.wins) == (100.0, False)
    assert (never_weighed.position, never_weighed.contest) == (1_000, None)
