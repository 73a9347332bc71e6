"""A picture of one estimated step: computing and messages of the first, a middle and the last stage
on one axis, for Perfetto (ui.perfetto.dev).

Of an action the estimate knows how long it computes, how long it waits for messages within it, and
how long those last that travel beside it. Where in the action they are is not known: here what is
waited for comes after computing, and what travels beside begins with it."""

import json

from harness.outputs import check_file

COMPUTING, WAITING, BESIDE, SENDING = TRACKS = (
    "computing",
    "waiting for messages",
    "messages beside",
    "to another stage",
)
NAMES = {"F": "forward", "B": "backward", "I": "backward, inputs", "W": "backward, weights"}


def spans_of(step, schedule, rank):
    """(track, name, start, end) of all that a rank of the pipeline does, in seconds."""
    for start, end, action in step.spans[rank]:
        part = step.part_of(action)
        name = f"{NAMES[action.kind]} {action.microbatch}, stage {action.stage}"
        computed = min(end, start + part.slowed)
        yield COMPUTING, name, start, computed
        yield WAITING, name, computed, min(end, computed + part.waited)
        yield BESIDE, name, start, start + part.beside
        message = schedule.outgoing(action)
        if message is not None and message.target != rank:
            what = f"micro-batch {action.microbatch} to stage {message.stage}"
            yield SENDING, what, end, end + step.transfer
    begin = max(row[-1][1] for row in step.spans)
    yield COMPUTING, "norm, optimizer", begin, begin + step.rest.compute
    yield WAITING, "sums, new weights", begin, begin + step.rest.waited + step.rest.beside


def perfetto(step, schedule):
    """The spans in the trace format of Chrome and Perfetto, in microseconds."""
    ranks = sorted({0, len(schedule) // 2, len(schedule) - 1})
    events = []
    for rank in ranks:
        about = {"ph": "M", "pid": rank}
        events.append(about | {"name": "process_name", "args": {"name": f"pipeline rank {rank}"}})
        for i, track in enumerate(TRACKS):
            events.append(about | {"name": "thread_name", "tid": i, "args": {"name": track}})
    for rank in ranks:
        for track, name, start, end in spans_of(step, schedule, rank):
            if end > start:
                place = {"ph": "X", "name": name, "pid": rank, "tid": TRACKS.index(track)}
                events.append(place | {"ts": start * 1e6, "dur": (end - start) * 1e6})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write(name, step, schedule):
    """Write NAME.json."""
    check_file("--timeline", f"{name}.json")
    with open(f"{name}.json", "w") as file:
        json.dump(perfetto(step, schedule), file)
    print(f"\n  {name}.json: one step for ui.perfetto.dev")
