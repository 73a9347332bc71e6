"""What one layout costs: the seconds of a step, put together from what some of its ranks played.

Messages that the code starts with async_op overlap with the action that starts them, and slow its
computing down. An action takes the longer of its computing and these messages, plus the messages
that it waits for. The schedule is simulated with these times, on all stages. Then comes what
follows the last action: the norm, the optimizer, ZeRO's new weights."""

from typing import NamedTuple

from receipts import pipeline as schedules
from receipts.formulas import flops_per_token
from simulator import dryrun
from simulator.links import link_of
from trainer.layout import schedule_of

# Measured time / estimate, of nine in ten of the runs of benchmarks/published.py
LIKELY = 0.91, 1.23


class Estimate(NamedTuple):
    """Seconds of a step, and of the busiest rank's parts of it; model FLOPs a device and second."""

    seconds: float
    parts: dict
    rate: float


def estimate(args, config, cluster, played, sums=None, slower=1.0):
    """The Estimate of a step, from some of its ranks.

    sums    when gradients that are on their way are waited for: "each", at the end of the action
            that sends them, as zero.py does, so that the stage before waits too; "last", after the
            last action, as ddp.py does; "after", where they are sent only then. By default as the
            code that was played
    slower  how many times as long messages between stages take"""
    schedule = schedule_of(args)
    part_of = parts_of_all(args, config, schedule, played)
    each = args.dp * args.cp * args.tp
    transfer = 0.0
    if args.pp > 1:
        message = max(rank.message for rank in played)
        transfer = slower * link_of(cluster, [0, each]).seconds("send", message)
    if sums is None:
        plain = args.zero == 0 and args.dtype == args.param_dtype == args.reduce_dtype
        sums = "last" if plain else "each"

    def seconds_of(action):
        part = part_of(action)
        return seconds_until(part, sums) + part.waited

    def together(actions, time):
        """While one of a pair waits for experts' rows, the other computes (dualpipe.py)."""
        times = [time(action) for action in actions]
        return max(sum(times) - sum(part_of(action).rows for action in actions), *times, 0)

    spans = schedules.simulate(schedule, seconds_of, transfer, together)
    rows = [[part_of(action) for *_, action in row] for row in spans]
    makespan = max(row[-1][1] for row in spans)
    if sums == "last":
        makespan = max(makespan, *(on_their_way(row, part_of) for row in spans))
    elif sums == "after":
        makespan += max(sum(part.beside for part in row) for row in rows)
    busy, span = max(zip(rows, spans), key=lambda pair: sum(part.seconds for part in pair[0]))
    hidden = sum(seconds_of(action) for *_, action in span) - schedules.working(span)
    parts = {"computing": sum(part.compute for part in busy)}
    parts["waiting for messages"] = sum(part.waited for part in busy) - hidden
    not_hidden = (seconds_until(part, sums) - part.compute for part in busy)
    parts["gradients, weights not hidden"] = sum(not_hidden)
    parts["pipeline's bubble"] = makespan - sum(parts.values())
    parts = {name: 0.0 if abs(x) < 1e-9 * makespan else x for name, x in parts.items()}  # rounding
    rest = max((rank.rest for rank in played), key=lambda part: part.seconds)
    parts["after the last action"] = rest.seconds
    seconds = makespan + rest.seconds
    flops = flops_per_token(config) * args.batch * config.context
    return Estimate(seconds, parts, flops / seconds / (each * args.pp))


def parts_of_all(args, config, schedule, played):
    """A function that gives any action's Part. A stage that no rank played is like the nearest that
    is at no end, or the first, by its number of layers; a micro-batch, like the last but one."""
    layers = [len(layers) for layers in schedules.stage_layers(config, schedule.last + 1)]
    known = {action: part for rank in played for action, part in rank.actions.items()}
    stages, last = {action.stage for action in known}, max(action.microbatch for action in known)
    ends = {schedule.last: 2, 0: 1}  # the head is much work, the embedding is little

    def nearest(stage):
        return min(stages, key=lambda s: (s != stage, ends.get(s, 0), abs(s - stage)))

    like = [nearest(stage) for stage in range(len(layers))]

    def part_of(action):
        stage, is_last = like[action.stage], action.microbatch == args.microbatches - 1
        m = last if is_last else min(action.microbatch, last - 1)
        part = dryrun.part_of(known, action._replace(stage=stage, microbatch=m))
        return part.scaled(layers[action.stage] / layers[stage])

    return part_of


def seconds_until(part, sums):
    """Seconds of an action's computing, and of the messages beside it that it waits for."""
    if sums == "after":
        return part.compute
    return part.slowed if sums == "last" else part.seconds - part.waited


def on_their_way(row, part_of):
    """When the last message that a rank sends beside its actions is there. They go one by one."""
    end = 0.0
    for start, _, action in row:
        end = max(end, start) + part_of(action).beside
    return end
