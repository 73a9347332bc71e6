"""The product of train.py's axes: a table in which all pairs meet, and layouts drawn at random.

    python -m tests.product

writes tests/layouts.txt again: its lines are run by test_layouts.py. Each pair of values of two
axes, and each family with each schedule and stage of ZeRO, stands in one of them, unless every
layout with it is refused. Then it stands at the end, with a sentence."""

import collections
import functools
import itertools
import pathlib
import random
import re
import sys

import harness
from receipts.pipeline import SCHEDULES
from trainer.context import KINDS

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from test_layouts import LIKE, MIXTURE, SGD, arguments, ranks_of  # noqa: E402

TABLE = pathlib.Path(__file__).parent / "layouts.txt"
MOST_RANKS = 8


def flags(flag, values):
    return [f"--{flag} {value}" for value in values]


# {axis: the flags of its values}, a neutral value first. These change the curve
VARIANT = {
    "family": ["--family gpt2", "--family llama"],
    "like": ["", *flags("like", LIKE)],
    "heads": ["--heads 4", "--heads 4 --kv-heads 2"],
    "optimizer": [SGD, "--optimizer adamw", "--optimizer muon"],
    "mixture": ["", MIXTURE],
    "dropout": ["", "--dropout 0.2"],
    "documents": ["", "--documents e"],  # some are longer than a row, some have one token
    "sizes": ["", "--context 13 --hidden 45"],  # they divide by nothing
}
# And these do not
LAYOUT = {
    "dp": flags("dp", (2, 1)),
    "pp": flags("pp", (2, 1)),
    "schedule": flags("schedule", SCHEDULES),
    "micro-batches": flags("microbatches", (3, 1, 4)),
    "zero": flags("zero", range(4)),
    "with zero": ["", "--zero-ranks 2", "--reduce-once", "--keep-gathered"]
    + ["--offload --bucket-mb 0.01"],
    "tp": ["", "--tp 2", "--tp 2 --sp", "--tp 2 --sp --gather-again"],
    "cp": ["", *flags("cp 2 --cp-kind", KINDS)],
    "ep": ["", "--ep 2", "--ep 2 --fold-experts", "--ep 4 --expert-chunks 2"],
    "recompute": flags("recompute", harness.RECOMPUTATIONS),
}
AXES = VARIANT | LAYOUT
TRIPLE = "family", "schedule", "zero"


def command(layout):
    """The flags of a layout {axis: flags of its value}. The stages' layers do not divide."""
    words = " ".join(filter(None, layout.values()))
    return f"{words} --layers {stages_of(words) + 1}"


def stages_of(flags):
    chunks = 2 if re.search("interleaved|zb-v|dualpipev", flags) else 1
    return chunks * int(re.search(r"--pp (\d+)|$", flags)[1] or 1)


def layout_of(line):
    """The layout of a command: of each axis the longest value that stands in it."""
    found = {}
    for axis, values in AXES.items():
        found[axis] = max((value for value in values if f"{value} " in line), key=len)
    return found


@functools.cache
def refusal(flags):
    """The sentence with which a layout is refused; None if it is legal."""
    if ranks_of(flags) > MOST_RANKS:
        return f"{ranks_of(flags)} ranks are more than {MOST_RANKS}, which is enough for a test"
    try:
        arguments("stdlib", flags)
    except harness.Refused as e:
        return str(e)


def is_legal(layout):
    return refusal(command(layout)) is None


# --- a covering array


def goals_in(layout):
    """The pairs of a layout's values, and its triple if it has replicas, stages, micro-batches."""
    goals = {*itertools.combinations(layout.items(), 2)}
    values = {*layout.values()}
    plain = {"--pp 1", "--microbatches 1"} & values
    plain = plain or {"--optimizer muon", "--zero 0"} <= values  # Muon then has stage 1
    if not plain and (layout.get("cp") or layout.get("dp") != "--dp 1"):
        goals.add(tuple((axis, layout[axis]) for axis in TRIPLE if axis in layout))
    return goals


def all_goals(axes):
    """What some layout should have, legal or not: triples first."""
    for names in (TRIPLE, *itertools.combinations(axes, 2)):
        if set(names) <= set(axes):
            for values in itertools.product(*map(axes.get, names)):
                yield tuple(zip(names, values))


def layout_with(goal, axes, fits, chance, tries=2000):
    """A layout that fits and has it, mostly neutral; None if none is found."""
    layout = neutral = {axis: values[0] for axis, values in axes.items()} | dict(goal)
    for _ in range(tries):
        if goal in goals_in(layout) and fits(layout):
            return layout
        some = chance.sample([*axes], len(axes) // 2)
        layout = neutral | {axis: chance.choice(axes[axis]) for axis in some} | dict(goal)


def cover(axes, steps, chance):
    """(legal layouts in which all goals stand, but the illegal ones; these). A greedy search: for
    each goal that is still open a layout, in which each step then changes what covers the most.
    Most goals fit on four ranks, which takes less time; the rest come after them.
    steps: lists of what one may change at once, as {axis: value}."""
    layouts, covered = [], set()
    for most in (4, MOST_RANKS):
        fits = lambda layout: size(layout) <= most and is_legal(layout)  # noqa: E731
        illegal = []
        for goal in all_goals(axes):
            if goal in covered:
                continue
            layout = layout_with(goal, axes, fits, chance)
            if layout is None:
                illegal.append(goal)
                continue

            def worth(layout):
                return len(goals_in(layout) - covered) / size(layout) ** 0.6

            for changes in chance.sample(steps * 2, 2 * len(steps)):
                options = [layout | change for change in chance.sample(changes, len(changes))]
                options = [o for o in options if goal in goals_in(o) and fits(o)]
                layout = max([layout, *options], key=worth)
            layouts.append(layout)
            covered |= goals_in(layout)
    return without_needless(layouts), illegal


def size(layout):
    return ranks_of(command(layout))


def without_needless(layouts):
    """Leave out a layout if others have all that it has, large ones first."""
    counts = collections.Counter(goal for layout in layouts for goal in goals_in(layout))
    for layout in sorted(layouts, key=lambda layout: -size(layout)):
        if all(counts[goal] > 1 for goal in goals_in(layout)):
            counts.subtract(goals_in(layout))
            layouts.remove(layout)
    return layouts


def refused_line(goal):
    neutral = {axis: values[0] for axis, values in AXES.items()} | {"mixture": MIXTURE}
    values = " with ".join(value or f"no {axis}" for axis, value in goal)
    return f"refused: {values}: {refusal(command(neutral | dict(goal)))}"


# --- by chance


def random_command(chance):
    """A layout with odd sizes, which need not be legal."""
    layout = {axis: chance.choice(values) for axis, values in AXES.items()}
    for axis in ("dp", "pp", "tp", "cp", "ep"):  # other numbers of ranks
        layout[axis] = re.sub(r"\d", chance.choice("11122234568"), layout[axis], count=1)
    heads = chance.choice((1, 2, 3, 4, 6, 8))
    groups = chance.choice([n for n in range(1, heads + 1) if heads % n == 0])
    width = heads * chance.choice((2, 4, 6, 10))
    layout["heads"] = f"--heads {heads} --kv-heads {groups} --width {width}"
    layout["sizes"] = f"--context {chance.randint(1, 24)} --hidden {chance.randint(1, 70)}"
    if layout["mixture"]:
        experts = chance.randint(1, 9)
        layout["mixture"] += f" --experts {experts} --top-k {chance.randint(1, min(experts, 3))}"
        layout["mixture"] += chance.choice(["", " --bias-rate 0.01"])
    pieces = chance.randint(1, 6)
    layout["micro-batches"] = f"--microbatches {pieces}"
    flags = " ".join(filter(None, layout.values()))
    rows = int(layout["dp"].split()[1]) * pieces * chance.randint(1, 3)
    return f"{flags} --batch {rows} --layers {stages_of(flags) + chance.randint(0, 3)}"


def main():
    harness.Parser(__doc__).parse_args()
    chance = random.Random(1)
    steps = {axis: [{axis: value} for value in values] for axis, values in AXES.items()}
    # Few variants, as one process trains each
    variants, _ = cover(VARIANT, [steps[axis] for axis in VARIANT], chance)
    layouts, illegal = cover(AXES, [variants, *map(steps.get, LAYOUT)], chance)
    lines = sorted(map(command, layouts), key=lambda line: (ranks_of(line), line))
    TABLE.write_text("\n".join([*lines, *map(refused_line, illegal)]) + "\n")
    print(f"{len(variants)} variants, {len(layouts)} layouts, {len(illegal)} refused")


if __name__ == "__main__":
    harness.script(main)
