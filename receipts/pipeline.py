"""Schedules of pipelines by name, and what they are worth: simulated without ranks. Spans are a
schedule with times: for each rank a list of (start, end, action).

    python -m receipts.pipeline --nproc 4 --microbatches 8     all of them, beside their papers
"""

import collections
import functools
import itertools

import advanced  # noqa: F401  (its lessons have plain names)
from dualpipe import dualpipev
from harness.flags import POSITIVE, Parser
from harness.presets import ceil
from harness.refusal import Refused, refusing
from harness.start import script
from pipeline import Schedule, gpipe, interleaved, one_f_one_b
from receipts.formulas import SCALAR, flops_per_token, held, summed
from zero_bubble import zb_h1, zb_h2, zb_v

MOST_ACTIONS = 20_000_000  # of a schedule: 160 bytes and 7 microseconds each
MOST_COMPARED = 30_000  # of each schedule that main() simulates

SCHEDULES = {  # what makes a rank's row
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-v": zb_v,
    "dualpipev": dualpipev,
}


def make_row(name, rank, ranks, microbatches, chunks=None):
    """A rank's row. chunks: stages per rank of interleaved; others have their own number."""
    options = {"chunks": chunks} if chunks and name == "interleaved" else {}
    return SCHEDULES[name](rank, ranks, microbatches, **options)


@functools.cache
def find_schedule(name, ranks, microbatches, chunks=None):
    """The schedule of that name. Raises ValueError where none exists for these numbers."""
    rows = [make_row(name, rank, ranks, microbatches, chunks) for rank in range(ranks)]
    schedule = Schedule(rows)
    held = len(schedule.stages(0))
    if chunks not in (None, held):
        raise ValueError(f"stages a rank of {name}: {held}, not {chunks}: leave out --chunks")
    return schedule


def check_schedule(args, config, ranks):
    """Refuse a schedule of --schedule, --microbatches and --chunks that does not exist, and a model
    with fewer layers than stages."""
    check_length(ranks, args.microbatches, args.chunks or 2)
    with refusing():
        schedule = find_schedule(args.schedule, ranks, args.microbatches, args.chunks)
        stage_layers(config, schedule.last + 1)


def check_length(ranks, microbatches, chunks, most=MOST_ACTIONS):
    """Refuse a schedule that would take minutes to make or to simulate, or gigabytes to hold."""
    actions = 2 * ranks * max(microbatches, 2 * ranks) * chunks  # zb-v plans 2 p - 1 or more
    if actions > most:
        what = f"{ranks:,} ranks with {microbatches:,} micro-batches have a schedule"
        raise Refused(f"{what} of {actions:,} actions, more than {most:,}: use fewer of them")


# --- where to cut the layers


def stage_layers(config, stages):
    """The range of layers of each stage, balanced by a token's FLOPs: the most expensive stage is
    as cheap as can be, and of such cuts the most even one is taken. The output projection counts
    with the last layer. The embedding is a look-up: no work beside a layer's."""
    if config.layers < stages:
        what = f"{config.layers} layers are too few for {stages} pipeline stages"
        raise ValueError(f"{what}: use fewer stages, or more --layers")
    if stages == 1:
        return [range(config.layers)]
    projection = 6 * config.width * config.vocab
    layer = (flops_per_token(config) - projection) // config.layers
    cuts = []
    for last in range(1, config.layers - stages + 2):  # layers of the last stage
        each, more = divmod(config.layers - last, stages - 1)
        lengths = [each] * (stages - 1 - more) + [each + 1] * more + [last]
        costs = [layer * length for length in lengths]
        costs[-1] += projection
        cuts.append((max(costs), sum(cost**2 for cost in costs), -last, lengths))
    *_, lengths = min(cuts)
    ends = itertools.accumulate(lengths)
    return [range(end - length, end) for end, length in zip(ends, lengths)]


# --- without ranks


def unit(action):
    """A stage's F, I and W take the same time, and B that of I and W."""
    return 2.0 if action.kind == "B" else 1.0


def simulate(schedule, time=unit, transfer=0.0, together=lambda step, time: sum(map(time, step))):
    """The spans of a schedule, if an action starts when its rank is free and its message is there.

    time(action): how long it takes. transfer: how long a message between two ranks takes, from when
    it is sent and its receive is posted. together(step, time): how long a step takes, whose actions
    start together (dualpipe.py); their spans are the same."""
    sent, posted = {None: 0.0}, {}  # {message: when}; without a message nothing is waited for
    spans = [[] for _ in schedule.rows]
    steps = [collections.deque(steps_of(schedule, rank)) for rank in range(len(spans))]
    while any(steps):
        for row, of_rank in zip(steps, spans):
            while row and all(schedule.incoming(action) in sent for action in row[0]):
                actions = row.popleft()
                start = free = of_rank[-1][1] if of_rank else 0.0
                for action in actions:
                    posted |= dict.fromkeys(schedule.receives_before.get(action, []), free)
                for message in map(schedule.incoming, actions):
                    there = sent[message]
                    if message in posted:  # else none, or from this rank
                        there = max(there, posted[message]) + transfer
                    start = max(start, there)
                end = start + together(actions, time)
                of_rank += [(start, end, action) for action in actions]
                sent |= {schedule.outgoing(action): end for action in actions} | {None: 0.0}
    return spans


def steps_of(schedule, rank):
    """A rank's actions in tuples of those that start together: one, or a pair of dualpipe.py's."""
    paired = hasattr(schedule, "steps")
    return schedule.steps(rank) if paired else [(action,) for action in schedule[rank]]


def working(row):
    """The time that one rank's actions take."""
    return sum(end - start for start, end in {(start, end) for start, end, _ in row})


def utilisation(spans):
    """The part of a step, from the first action of all ranks to the last, in which ranks work.
    Waits at its ends count as idle."""
    end = max(row[-1][1] for row in spans)
    return sum(working(row) for row in spans) / (len(spans) * end)


def waiting(spans):
    """The longest that a rank waits between its own first and last action: what a step loses if no
    rank waits for the others before the next step, the bubble of the zero-bubble papers."""
    return max(row[-1][1] - row[0][0] - working(row) for row in spans)


def in_flight(row, size=lambda stage: 1):
    """The most activations that a rank holds at a time, each from forward to the end of backward,
    in stages x micro-batches. size(stage) weighs them."""
    change = {"F": 1, "I": 0, "W": -1, "B": -1}
    return max(itertools.accumulate(change[a.kind] * size(a.stage) for a in row))


def boundaries(schedule, rank):
    """How many messages this rank sends to others per micro-batch: [activations, gradients]."""
    messages = [schedule.outgoing(action) for action in schedule[rank] if action.microbatch == 0]
    kinds = [m.kind for m in messages if m is not None and m.source != m.target]
    return [kinds.count("F"), kinds.count("B")]


# The time that a rank waits, by the papers: p ranks, m micro-batches, v stages a rank. F, I and W
# are the times of all stages of a rank. Each entry is (text, function of p, m, v, F, I, W).
BUBBLES = {
    "gpipe": ("(p-1) (F+I+W)", lambda p, m, v, f, i, w: (p - 1) * (f + i + w)),
    "1f1b": ("(p-1) (F+I+W)", lambda p, m, v, f, i, w: (p - 1) * (f + i + w)),
    "interleaved": ("(p-1) (F+I+W) / v", lambda p, m, v, f, i, w: (p - 1) * (f + i + w) / v),
    "zb-h1": ("(p-1) (F+I-W)", lambda p, m, v, f, i, w: (p - 1) * (f + i - w)),
    "zb-h2": ("(p-1) (F+I-2W)", lambda p, m, v, f, i, w: (p - 1) * (f + i - 2 * w)),
    "zb-v": ("0 if F = I = W", lambda p, m, v, f, i, w: 0.0),
    "dualpipev": ("(p-1) (F+I-W) / 2", lambda p, m, v, f, i, w: (p - 1) * (f + i - w) / v),
}


def by_paper(name, ranks, microbatches, stages, *times):
    """The time that a rank waits by the paper, or None where the paper's condition excludes it; and
    the formula, or that condition, as text. times: of a rank's F, I and W."""
    text, formula = BUBBLES[name]
    twice = "m >= 2p-1", 2 * ranks - 1
    conditions = {"zb-h1": ("m >= p", ranks), "zb-h2": twice, "zb-v": twice}
    condition, least = conditions.get(name, ("", 1))
    if microbatches < least:
        return None, f"{text}, only for {condition} = {least}"
    return formula(ranks, microbatches, stages, *times), text


def most_in_flight(name, ranks, microbatches, stages):
    """The activations that the fullest rank holds at a time, in stages x micro-batches, by the
    papers. None where they have no formula for so few micro-batches."""
    p, m = ranks, microbatches
    if name == "interleaved":  # p (1 + (p-1)/(p v)), times v
        return stages * p + p - 1 if m > p else None
    if name == "dualpipev":
        return 2 * p + 1 if p > 1 or m > 2 else None
    if name == "zb-v":
        return 2 * p if m >= 2 * p else None
    most = {"gpipe": m, "1f1b": p, "zb-h1": p, "zb-h2": 2 * p - 1}[name]
    return min(m, most)


# --- the receipt


def expected(sizes, group, messages, tied=None, scalars=2):
    """(sent, held). messages: how many activations and gradients this rank sends for each
    micro-batch, as `boundaries` counts them. tied: the Group of the two ends, if the first and the
    last stage are on two ranks and share a matrix. scalars: how many numbers are summed over all
    stages: the loss and the norm."""
    config, size = sizes.config, sizes.microbatches * sizes.stream
    sent = summed(group, scalars * SCALAR, "loss and norm")
    for name, count in zip(("down", "up"), messages):
        sent["send", name] = count * size, "m b T C e a boundary to another rank"
    if tied and config.tied and sizes.embedding != sizes.head:
        matrix = ceil(config.vocab, sizes.tp) * config.width
        sent |= summed(tied, matrix * sizes.reduced, "2 r V C e, the tied matrix")
    return sent, held(sizes, "blocks of the stages, and the ends' matrices", "in flight x blocks")


def of_rank(config, schedule, rank):
    """What a rank of the schedule has of the model, as fields of Sizes."""
    layers, stages = stage_layers(config, schedule.last + 1), schedule.stages(rank)
    return {
        "layers": tuple(layers[stage] for stage in stages),
        "embedding": 0 in stages,
        "head": schedule.last in stages,
        "in_flight": in_flight(schedule[rank], lambda stage: len(layers[stage])),
    }


# --- shown


def main():
    """Print each schedule that exists for --nproc ranks and --microbatches, or that of --schedule,
    beside its paper's formula."""
    parser = Parser(__doc__)
    g = parser.add_argument_group("schedules")
    g.add_argument("--nproc", **POSITIVE, default=4, help="ranks")
    g.add_argument("--microbatches", **POSITIVE, default=8, help="micro-batches of a step")
    g.add_argument("--schedule", choices=SCHEDULES, help="only this one")
    g.add_argument("--chunks", **POSITIVE, help="stages a rank of interleaved (default: 2)")
    args = parser.parse_args()
    ranks, microbatches = args.nproc, args.microbatches
    check_length(ranks, microbatches, args.chunks or 2, MOST_COMPARED)
    print(
        f"{ranks} ranks, {microbatches} micro-batches; a rank's forward, input gradient and weight "
        "gradient of all its layers take 1 each\n"
        "  schedule      stages   a rank waits: simulated, by the paper       utilisation   "
        "activations held    sends a rank"
    )
    for name in [args.schedule] if args.schedule else SCHEDULES:
        chunks = args.chunks if args.schedule or name == "interleaved" else None
        try:
            schedule = find_schedule(name, ranks, microbatches, chunks)
        except ValueError as e:
            print(f"  {name:12s}  {e}")
            continue
        v = len(schedule.owner) // ranks
        spans = simulate(schedule, lambda action, v=v: unit(action) / v)
        expected, text = by_paper(name, ranks, microbatches, v, 1, 1, 1)
        paper = text if expected is None else f"{expected:6.2f} = {text}"
        flying = max(in_flight(row) for row in schedule.rows) / v
        sends = microbatches * max(sum(boundaries(schedule, rank)) for rank in range(ranks))
        waits, used = waiting(spans), utilisation(spans)
        print(f"  {name:12s}{v:6d}   {waits:6.2f}  {paper:38s}{used:9.1%}{flying:15.2f}{sends:18}")


if __name__ == "__main__":
    script(main)
