"""The set that comes with Branchwise: ten prompts of its own, some with much to repeat and some with little."""

from __future__ import annotations

from branchwise.bench.items import Item

FREE = (
    "Explain how a lock lifts a boat from one level of a canal to the next.",
    "Write a short letter that thanks a neighbour for watering the garden.",
    "List ten things to pack for a week of hiking, with a reason for each.",
    "Write a Python function that finds all prime numbers below n, and explain it.",
    "What happens in a cell when it divides?",
    "Give advice to someone who wants to learn the violin as an adult.",
)
SPELLING = """Correct the spelling and keep everything else: The old mil stands at the end of the vilage, where the \
brook turns towards the lake. Its weel has not moved for thirty years, but the miller's grandson still oils the axle \
every spring, because he belives that one day the water will come back to the brook and the weel will turn again."""
RECIPE = """Repeat this recipe, but for eight people instead of four: Take 400 grams of flour, 200 grams of butter, \
4 eggs and 100 grams of sugar. Mix the flour and the butter, add the eggs one by one, then the sugar. Knead the dough, \
let it rest for 30 minutes in a cool place, roll it out, and bake it for 25 minutes."""
CODE = """Rename the variable total to balance in this code and print all of it:

def settle(entries):
    total = 0
    for entry in entries:
        if entry.kind == "credit":
            total = total + entry.amount
        else:
            total = total - entry.amount
    return total"""
NOTE = """Turn this note into a list, one sentence a line, and change no word: The ferry leaves at eight. Bring warm \
clothes and something to eat. The crossing takes two hours when the sea is calm. On the island we walk to the \
lighthouse and back. The last ferry returns at six, and there is no other way home."""
EDITING = (SPELLING, RECIPE, CODE, NOTE)


def own_items(limit: int | None = None) -> list[Item]:
    """At most `limit` of each of the two categories."""
    sets = {"free writing": FREE[:limit], "editing": EDITING[:limit]}
    return [
        Item(f"own/{category.replace(' ', '-')}-{number}", "own", category, (prompt,))
        for category, prompts in sets.items()
        for number, prompt in enumerate(prompts)
    ]
