"""A picture of one estimated step: computing and messages of the first, a middle and the last stage
on one axis, for Perfetto (ui.perfetto.dev).

Of an action the estimate knows how long it computes, how long it waits for messages within it, and
how long those last that travel beside it. Where in the action they are is not known: here what is
waited for comes after computing, and what travels beside begins with it."""

import json
from typing import NamedTuple

from harness import outputs

TRACKS = ("computing", "waiting for messages", "messages beside", "to another stage")
NAMES = {"F": "forward", "B": "backward", "I": "backward, inputs", "W": "backward, weights"}


class Event(NamedTuple):
    """Something that takes from `start` to `end`, in seconds, on a track of a pipeline rank."""

    rank: int
    track: str
    name: str
    start: float
    end: float


def events_of(step, schedule):
    """The Events of a step's first, middle and last rank of the pipeline."""
    found = []
    for rank in sorted({0, len(schedule) // 2, len(schedule) - 1}):
        for start, end, action in step.spans[rank]:
            part = step.part_of(action)
            name = f"{NAMES[action.kind]} {action.microbatch}, stage {action.stage}"
            computed = min(end, start + part.slowed)
            found.append(Event(rank, TRACKS[0], name, start, computed))
            found.append(Event(rank, TRACKS[1], name, computed, min(end, computed + part.waited)))
            found.append(Event(rank, TRACKS[2], name, start, start + part.beside))
            message = schedule.outgoing(action)
            if message is not None and message.target != rank:
                what = f"micro-batch {action.microbatch} to stage {message.stage}"
                found.append(Event(rank, TRACKS[3], what, end, end + step.transfer))
        begin = max(row[-1][1] for row in step.spans)
        found.append(Event(rank, TRACKS[0], "norm, optimizer", begin, begin + step.rest.compute))
        rest = step.rest.waited + step.rest.beside
        found.append(Event(rank, TRACKS[1], "sums, new weights", begin, begin + rest))
    return [event for event in found if event.end > event.start]


def perfetto(events):
    """The Events in the trace format of Chrome and Perfetto, in microseconds."""
    written = []
    for rank in sorted({event.rank for event in events}):
        about = {"ph": "M", "pid": rank}
        written.append(about | {"name": "process_name", "args": {"name": f"pipeline rank {rank}"}})
        for i, track in enumerate(TRACKS):
            written.append(about | {"name": "thread_name", "tid": i, "args": {"name": track}})
    for event in events:
        times = {"ts": event.start * 1e6, "dur": (event.end - event.start) * 1e6}
        place = {"pid": event.rank, "tid": TRACKS.index(event.track)}
        written.append({"ph": "X", "name": event.name} | place | times)
    return {"traceEvents": written, "displayTimeUnit": "ms"}


def write(name, step, schedule):
    """Write NAME.json."""
    with outputs.writing("--timeline", f"{name}.json"), open(f"{name}.json", "w") as file:
        json.dump(perfetto(events_of(step, schedule)), file)
    print(f"\n  {name}.json: one step for ui.perfetto.dev")
