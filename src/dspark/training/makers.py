"""Makers of example inputs: functions from a random generator to a value.

The task files in `tasks/` name them in expressions, so every public name here is used there.
"""

import random
from collections.abc import Callable
from typing import Any

Maker = Callable[[random.Random], Any]


def choice(*options: Any) -> Maker:
    """One of the given values."""
    return lambda rng: rng.choice(options)


def integer(low: int, high: int) -> Maker:
    """An integer in [low, high]."""
    return lambda rng: rng.randint(low, high)


def decimals(low: int, high: int) -> Maker:
    """A float in [low, high] with one decimal."""
    return lambda rng: rng.randint(low * 10, high * 10) / 10


def listing(item: Maker, shortest: int = 2, longest: int = 5) -> Maker:
    """A list of made items."""
    return lambda rng: [item(rng) for _ in range(rng.randint(shortest, longest))]


def integers(low: int = -20, high: int = 60, shortest: int = 3, longest: int = 8) -> Maker:
    """A list of integers; now and then its last element repeats the first."""

    def make(rng: random.Random) -> list[int]:
        values = [rng.randint(low, high) for _ in range(rng.randint(shortest, longest))]
        if len(values) > 2 and rng.random() < 0.3:
            values[-1] = values[0]
        return values

    return make


def grid(low: int = 0, high: int = 9, *, square: bool = False) -> Maker:
    """A rectangular list of lists of integers, 2 or 3 rows."""

    def make(rng: random.Random) -> list[list[int]]:
        rows = rng.randint(2, 3)
        columns = rows if square else rng.randint(2, 4)
        return [[rng.randint(low, high) for _ in range(columns)] for _ in range(rows)]

    return make


def stock(rng: random.Random) -> dict[str, int]:
    """A small dictionary from fruit to a count."""
    return {name: rng.randint(0, 20) for name in rng.sample(FRUIT, rng.randint(2, 4))}


def people(rng: random.Random) -> list[dict[str, object]]:
    """A list of records with a name and an age."""
    return [
        {"name": name, "age": rng.randint(15, 70)} for name in rng.sample(PEOPLE, rng.randint(1, 3))
    ]


FRUIT = ("apples", "pears", "plums", "figs", "limes", "dates")
PEOPLE = ("Ana", "Ben", "Chen", "Dina", "Emil", "Fay")
NOUNS = (
    *("apple", "bridge", "cloud", "desk", "engine", "forest", "garden", "hammer", "island"),
    *("jacket", "kettle", "ladder", "mirror", "needle", "orange", "pencil", "quilt", "river"),
    *("stone", "table", "umbrella", "violin", "window", "yellow", "zebra", "level", "radar"),
    *("noon", "data", "cafe", "piano", "stats", "book", "tree", "coffee", "letter", "summer"),
    "bottle",
)
word = choice(*NOUNS)
words = listing(word, 2, 5)
sentence = choice(
    "the quick train left at noon",
    "Call me at 5 or text me at 7",
    "A man, a cat, and a canal",
    "rain falls on the old stone bridge",
    "Order 66 shipped on day 12",
    "Hello World",
    "never odd or even",
    "Keep it simple",
    "we build small tools that last",
    "Room 101 is on the first floor",
    "to be tested is to be trusted",
    "She said: stop, look, listen!",
    "one fish two fish",
    "Python 3 is FUN",
    "",
)
note = choice(
    "Meet @ana at 09:30 or 14:00",
    "Paid $12.50 and $3 for lunch",
    "Row -4 and row 17 of #data",
    "#python and #regex with @bob",
    "Anna met Bob in Paris",
    "nothing here",
    "Lost 15 of 20, kept -5",
    "Tea $2.25 at 08:15 #break",
)
code_like = choice(
    *("#a0c", "#12", "#11aaff", "09:45", "24:10", "2024-02-30", "24-2-3", "name_1", "1name"),
    *("-3.25", "7.", "12.0", "x", "#GGG", "23:59", "2023-11-05"),
)
iso_date = choice(
    *("2024-02-28", "2023-12-31", "2024-03-01", "2022-07-15", "2021-01-01", "2025-10-09"),
    "2024-06-02",
)
nested_list = choice(
    *([1, [2, [3, 4]], 5], [[1], [[2]], [[[3]]]], [7], [], [[4, 5], 6], [1, [2], [3, [4, [5]]]])
)
graph = choice(
    {"a": ["b", "c"], "b": ["d"], "c": ["d"], "d": []},
    {"a": ["b"], "b": ["a"], "c": ["d"], "d": ["c"]},
    {"a": ["c"], "b": [], "c": ["b", "d"], "d": []},
)
