"""What DualPipeV hides: of a schedule, and in the receipt of train.py."""

from proof.receipt import Count
from receipts import pipeline


def alone(action):
    """Its time: computing, and if it has messages as long as a forward computes for these."""
    return pipeline.unit(action) + (action.kind != "W")


def hide(actions, time):
    """The time of actions that start together: while one waits another computes."""
    return max(sum(map(pipeline.unit, actions)), *map(time, actions), 0)


def waits(action, layers, chunks=1, forwards=1):
    """How often an action waits for rows: twice for each layer of its stage and chunk. A backward
    waits in its recomputation as well (forwards=2), and W not at all."""
    passes = {"F": 1, "B": forwards, "I": forwards, "W": 0}[action.kind]
    return 2 * chunks * passes * len(layers[action.stage])


def switches_in_pair(first, second):
    """How often two calls that have so many waits go on in each other's. They wait in turn, and the
    one that has more waits ends alone."""
    return 2 * first if first <= second else 2 * second + 1


def switches(schedule, rank, layers, chunks=1, forwards=1):
    """(at how many waits of a rank another call goes on, how many waits it has) in a step."""
    total = found = 0
    for step in pipeline.steps_of(schedule, rank):
        counts = [waits(action, layers, chunks, forwards) for action in step]
        total += sum(counts)
        found += switches_in_pair(*counts) if len(counts) == 2 else 0
    return found, total


def notes(rows, *schedule):
    """Lines of the receipt. rows: a train.ExpertRows. schedule: see `switches`."""
    wanted, total = switches(*schedule)
    text = f"waits in which the other micro-batch went on: {rows.switches}"
    return [
        Count(f"waits for experts' rows: {rows.waits}", rows.waits, total),
        Count(text, rows.switches, wanted),
    ]
