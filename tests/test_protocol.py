"""Every interleaving of the slot and tag protocol that the docstring of `m3cp.kernels.fused` states, in small worlds.

Ranks run the same list of launches. A program of a rank does its steps in order (store a word in a rank's memory, or
await one), a rank's next launch begins when all its programs have finished, and ranks interleave freely. A word has one
writer, so what memory holds follows from how far each program is: a state is the programs' positions.

A launch is a letter: "n" does not exchange; "f": every rank holds a block of the row; "l": the last rank holds none.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Rules:
    """The protocol, and what breaks it."""

    slots: int = 2
    presence: bool = True  # presence words in every exchanging launch
    gather: bool = False  # queries travel too: sent first, awaited by the ranks that score
    programs: int = 1  # of a rank; program p scores block p of the rank's share, one chooses
    chooser: int = -1  # which: the last
    resident: int = 0  # programs that a rank runs at once, in order; 0: all
    push_first: bool = True
    tags: bool = True  # a reader compares tags; without, it takes what it finds
    slot_by: str = "exchanges"  # or "steps": a step number picks the slot
    one_counts_all: bool = False  # rank 0's exchange counter advances in every launch
    quiet: bool = True  # launches that do not exchange store nothing in a peer's memory
    expiry: bool = False  # any wait may expire; the rank finishes that launch and pushes nothing ever after
    stops: bool = True  # ... which is this rule


def scripts(world: int, launches: str, rules: Rules) -> list[list[tuple]]:
    """The steps of each program, rank-major: ("push" | "await", word, tag, launch), and ("end", launch)."""
    made = []
    for rank, program in itertools.product(range(world), range(rules.programs)):
        steps, exchanges = [], 0
        for launch, kind in enumerate(launches):
            counts = kind != "n"
            exchanges += counts or (rules.one_counts_all and rank == 0)
            tag = exchanges + (not counts)
            slot = (launch if rules.slot_by == "steps" else tag) % rules.slots
            senders = range(world - (kind == "l"))
            chooses = program == rules.chooser % rules.programs

            def words(name, ranks, to, rank=rank, slot=slot, tag=tag, launch=launch):
                return [
                    ("push" if to else "await", (name, r if to else rank, slot, rank if to else r), tag, launch)
                    for r in ranks
                    if r != rank
                ]

            queries_out = words("q", range(world), True) if rules.gather and program == 0 else []
            queries_in = words("q", range(world), False) if rules.gather and rank in senders else []
            scores_out = words(f"s{program}", range(world), True) if rank in senders else []
            scores_in = (
                [step for p in range(rules.programs) for step in words(f"s{p}", senders, False)] if chooses else []
            )
            here_out = words("p", range(world), True) if rules.presence and program == 0 else []
            here_in = words("p", range(world), False) if rules.presence and program == 0 else []
            if not counts:
                steps += [] if rules.quiet else words("q", range(world), True)
            elif rules.push_first:
                steps += here_out + queries_out + queries_in + scores_out + scores_in + here_in
            else:
                steps += queries_out + queries_in + scores_in + here_in + here_out + scores_out
            steps.append(("end", None, 0, launch))
        made.append(steps)
    return made


def fault(world: int, launches: str, rules: Rules) -> str:
    """The first fault that some interleaving runs into, in words; "" when none does."""
    made = scripts(world, launches, rules)
    holds, writer = [], {}  # what a program's words hold at each position; the program that writes a word
    for i, steps in enumerate(made):
        now, history = {}, [{}]
        for what, word, tag, launch in steps:
            if what == "push":
                now = now | {word: (tag, launch)}
                assert writer.setdefault(word, i) == i
            history.append(now)
        holds.append(history)
    ends = [[i for i, step in enumerate(steps) if step[0] == "end"] for steps in made]
    begin = ((0, False),) * len(made)  # (position, whether a wait has expired)
    seen, todo = {begin}, [begin]
    while todo:
        state = todo.pop()
        moved = False
        for i, (at, failed) in enumerate(state):
            rank, steps = i // rules.programs, made[i]
            if over(steps, at, failed, rules):
                continue
            what, word, tag, launch = steps[at]
            if launch and any(
                state[j][0] <= ends[j][launch - 1] for j in range(rank * rules.programs, (rank + 1) * rules.programs)
            ):
                continue  # another program of this rank is still in the last launch
            before = [state[j][0] > ends[j][launch] for j in range(rank * rules.programs, i)]
            if rules.resident and sum(before) < len(before) - rules.resident + 1:
                continue  # no room for it yet beside those that started before it
            after = [(at + 1, failed)]
            if what == "await":
                found = holds[writer[word]][state[writer[word]][0]].get(word, NOTHING) if word in writer else NOTHING
                if found[1] > launch:
                    return f"overwritten: rank {rank} awaits launch {launch}, its slot holds launch {found[1]}'s word"
                accepted = found is not NOTHING and (found[0] == tag or not rules.tags)
                if accepted and found[1] != launch:
                    return f"accepted: rank {rank} takes launch {found[1]}'s word in launch {launch}"
                after = [(at + 1, failed)] * accepted + [(at + 1, True)] * rules.expiry
            for new in after:
                moved = True
                next_state = (*state[:i], new, *state[i + 1 :])
                if next_state not in seen:
                    seen.add(next_state)
                    todo.append(next_state)
        if not moved and not all(
            over(steps, at, failed, rules) for (at, failed), steps in zip(state, made, strict=True)
        ):
            return "deadlock"
    return ""


def over(steps: list[tuple], at: int, failed: bool, rules: Rules) -> bool:
    """Whether a program has no more steps: it is done, or a wait expired in an earlier launch."""
    return at == len(steps) or (failed and rules.stops and at > 0 and steps[at - 1][0] == "end")


NOTHING = (0, -1)  # what memory holds before any word: no tag, no launch
MIXES = ["".join(kinds) for kinds in itertools.product("nfl", repeat=4)]


@pytest.mark.parametrize("gather", [False, True], ids=["replicated", "gathered"])
@pytest.mark.parametrize(
    "world, launches, programs",
    [*((2, mix, 1) for mix in MIXES if "f" in mix or "l" in mix), (2, "ffnff", 2), (2, "flnfl", 2)]
    + [(3, mix, 1) for mix in ("fnff", "lfnl", "llll")] + [(4, "fff", 1), (4, "lnll", 1)],
)  # fmt: skip
def test_no_interleaving_goes_wrong(world, launches, programs, gather):
    assert fault(world, launches, Rules(programs=programs, gather=gather)) == ""


@pytest.mark.parametrize("world, launches", [(2, "fffff"), (2, "fnfnf"), (3, "fnff"), (4, "fff")])
def test_presence_words_are_not_needed_where_every_rank_holds_a_block(world, launches):
    assert fault(world, launches, Rules(presence=False)) == ""


@pytest.mark.parametrize("world, launches", [(2, "fnlf"), (2, "llnf"), (3, "fff")])
@pytest.mark.parametrize("gather", [False, True], ids=["replicated", "gathered"])
def test_waits_that_expire_never_make_a_wrong_choice(world, launches, gather):
    assert fault(world, launches, Rules(expiry=True, gather=gather)) == ""


@pytest.mark.parametrize("programs, chooser, resident", [(2, 0, 2), (2, 1, 2), (2, 1, 1), (3, 0, 2)])
def test_programs_that_are_all_resident_may_wait_for_each_other(programs, chooser, resident):
    """Also fewer at once, as long as those that don't wait make room for those that are waited for."""
    assert fault(2, "fnf", Rules(programs=programs, chooser=chooser, resident=resident)) == ""


# What is left out of the protocol: (world, launches, rules, what must be found)
BROKEN = {
    "one slot": (2, "fff", Rules(slots=1), "overwritten"),
    "a counter that advances in every launch on one rank": (2, "fnf", Rules(one_counts_all=True), "deadlock"),
    "a step number picks the slot": (2, "fnfnf", Rules(slot_by="steps"), "overwritten"),
    "a peer from which no word is awaited": (2, "lll", Rules(presence=False), "overwritten"),
    "a peer of three from which no word is awaited": (3, "lll", Rules(presence=False), "overwritten"),
    "a peer of four from which no word is awaited": (4, "lll", Rules(presence=False), "overwritten"),
    "waiting before pushing": (2, "f", Rules(push_first=False), "deadlock"),
    "a grid larger than what is resident": (2, "f", Rules(programs=2, chooser=0, resident=1), "deadlock"),
    "no tags": (2, "fff", Rules(tags=False), "accepted"),
    "launches that do not exchange push all the same": (2, "fnnnf", Rules(quiet=False, gather=True), "accepted"),
    "pushing on after an expired wait": (2, "fff", Rules(expiry=True, stops=False), "overwritten"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_the_search_finds_what_a_missing_rule_breaks(name):
    world, launches, rules, expect = BROKEN[name]
    assert fault(world, launches, rules).startswith(expect)


def test_one_slot_is_enough_for_one_launch():
    """The search does not cry wolf: faults above come from reuse, not from the model."""
    assert fault(3, "f", Rules(slots=1)) == "" and fault(2, "nnn", Rules(slots=1)) == ""
