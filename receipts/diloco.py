"""Islands that train alone and speak rarely: their flags, one process that plays all of them, and
what train.py's receipt is held against.

The player shares no line with diloco.py: it is written down again, from the papers.
"""

import torch

from harness.flags import NATURAL, POSITIVE, real
from harness.presets import ceil
from harness.refusal import Refused
from proof.ledger import storage_bytes
from proof.one_process import OneProcess, Trainee
from receipts import formulas

# --- flags


DEFAULTS = {"outer_lr": 0.7, "outer_momentum": 0.9, "stream": 1, "stream_delay": 0}


def add_flags(g, every):
    """Add flags to a group. Flags that are not given are None: see
    `settle`. every: the default of --sync-every, in words."""
    why = f"steps that an island takes alone, between two averages (default: {every})"
    g.add_argument("--sync-every", **POSITIVE, help=why)
    why = "rate of the outer optimizer; 1 without momentum takes the mean weights (default: 0.7)"
    g.add_argument("--outer-lr", type=real(0), metavar="X", help=why)
    why = "its Nesterov momentum (default: 0.9)"
    g.add_argument("--outer-momentum", type=real(0), metavar="X", help=why)
    why = "average the model in N parts that take turns: smaller messages, more of them"
    g.add_argument("--stream", **POSITIVE, help=why + " (default: 1)")
    why = "steps that a message may travel while training goes on; then it is mixed in"
    g.add_argument("--stream-delay", **NATURAL, help=why + " (default: 0)")
    why = "bits of a number that is sent, the error goes along later (default: as it is)"
    g.add_argument("--outer-bits", type=int, choices=[16, 8, 4], help=why)


def settle(args, every):
    """Fill in the flags that are not given, in place, and refuse those that contradict each other.
    Returns args."""
    for name, value in (DEFAULTS | {"sync_every": every}).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    check_flags(args)
    return args


def options(args):
    """The flags as DiLoCo's options."""
    return {
        "outer_lr": args.outer_lr,
        "outer_momentum": args.outer_momentum,
        "parts": args.stream,
        "delay": args.stream_delay,
    }


def check_flags(args):
    """Refuse flags that contradict each other."""
    if args.stream > args.sync_every:
        advice = f"--sync-every {args.stream} or more, or fewer parts"
        raise Refused(f"--stream {args.stream}: each part has a step of its own; use {advice}")
    if args.stream_delay >= args.sync_every:
        advice = f"use less than --sync-every {args.sync_every}"
        raise Refused(f"--stream-delay {args.stream_delay}: the next message comes first; {advice}")
    if args.outer_momentum >= 1:
        raise Refused("--outer-momentum must be less than 1, or the steps never end")


# --- one process that plays all islands, one after the other


class Island(Trainee):
    """One island of the player: a model in training, and the error of its messages."""

    def __init__(self, player):
        super().__init__(player)
        self.errors = {}  # {part: what its messages have left out}

    def message(self, part, names, old, bits):
        """What this island says of a part, as the others read it."""
        weights = [self.weights[name] for name in names]
        sizes = [weight.numel() for weight in weights]
        # The old weights as the island had them, in its own dtype
        moved = [old[name].to(w).to(old[name]) - w.to(old[name]) for name, w in zip(names, weights)]
        wanted = torch.cat([m.flatten() for m in moved]) + self.errors.get(part, 0)
        said = rounded(wanted, bits)
        if bits:
            self.errors[part] = wanted - said.to(wanted)
        return [piece.view_as(w) for piece, w in zip(said.split(sizes), weights)]


def rounded(x, bits):
    """The numbers of x in float64, as they are after being sent in `bits` bits."""
    if bits is None:
        return x.double()
    if bits == 16:
        return x.bfloat16().double()
    most = 2 ** (bits - 1) - 1
    pieces = []
    for block in x.split(128):
        scale = (block.abs().max() / most).float()
        steps = (block / scale).round().clamp(-most, most) if scale > 0 else 0 * block
        pieces.append(steps.double() * scale.double())
    return torch.cat(pieces)


def play(player, steps, parts, finish=False, watch=lambda step, islands: None):
    """The islands after `steps` steps.

    parts   lists of parameters' names
    finish  what has moved since the latest outer steps is averaged too
    watch   watch(steps so far, islands) is called after each step
    """
    args = player.args
    islands = [Island(player) for _ in range(player.islands)]
    kind = torch.promote_types(player.dtype, torch.float32)
    old = {name: w.to(kind, copy=True) for name, w in islands[0].weights.items()}
    velocity = {name: torch.zeros_like(w) for name, w in old.items()}
    keep = 0.5 if args.stream_delay else 0
    travelling = {}  # {part: (step at which it is applied, the islands' messages)}
    sent_at = dict.fromkeys(range(len(parts)), -1)

    def send(part, step):
        about = part, parts[part], old, args.outer_bits
        said = [island.message(*about) for island in islands]
        travelling[part], sent_at[part] = (step + args.stream_delay, said), step

    def apply(part):
        _, said = travelling.pop(part)
        for i, name in enumerate(parts[part]):
            mean = (sum(of_island[i] for of_island in said) / len(said)).to(kind)
            velocity[name] = args.outer_momentum * velocity[name] + mean
            ahead = mean + args.outer_momentum * velocity[name]
            old[name] = old[name] - args.outer_lr * ahead
            mix(name, keep)

    def mix(name, keep):
        for island in islands:
            weight = island.weights[name]
            weight.copy_(keep * weight + (1 - keep) * old[name])

    for step in range(steps):
        for number, island in enumerate(islands):
            [rows] = player.rows_of(number, step)
            island.train(step, rows, player.target_count)
        for part in range(len(parts)):
            if (step + 1) % args.sync_every == part * args.sync_every // len(parts):
                send(part, step)
        for part in range(len(parts)):
            if part in travelling and travelling[part][0] == step:
                apply(part)
        watch(step + 1, islands)
    for part in range(len(parts)) if finish else ():
        if part in travelling:
            apply(part)
        if sent_at[part] < steps - 1:
            send(part, steps - 1)
            apply(part)
        for name in parts[part]:
            mix(name, 0)
    return islands


class Player(OneProcess):
    """The reference of a run of islands: one process that plays all of them.

    rows_of       rows_of(island, step): an island's rows, as one micro-batch
    target_count  valid targets of an island's rows
    parts         lists of parameters' names
    finishes      after the last step, what has moved is averaged too
    """

    has_diagnosis = False

    def __init__(self, run, island, islands, rows_of, target_count, parts, finishes=False):
        self.args, self.config, self.draw = run.args, run.config, run.draw
        self.device, self.dtype = run.device, run.dtype
        self.make_optimizer = getattr(run, "make_optimizer", None)
        self.island, self.islands, self.rows_of = island, islands, rows_of
        self.target_count = target_count
        self.parts, self.finishes = parts, finishes

    def train(self, run, steps):
        if run.rank > 0:
            return [None] * self.islands
        finish = self.finishes and steps == self.args.steps
        return play(self, steps, self.parts, finish)


# --- what the outer steps send and hold


def message_bytes(numbers, bits, element_size):
    """Bytes of one message between islands, of so many of the model's numbers: as they are (bits
    None), in bfloat16, or in blocks of 128 with a scale of 4 bytes."""
    if bits is None:
        return numbers * element_size
    if bits == 16:
        return numbers * 2
    return ceil(numbers, 128) * (4 + 128 * bits // 8)


def expected(parts, group, args, element_size, steps, finished=False):
    """(sent, held) of the outer steps. What is sent is the mean of `steps`, a range of numbers.

    parts: (numbers that this rank has of it, offset) of each part of the model. finished: whether
    the rest was averaged after the last step."""
    size = 0
    for numbers, offset in parts:
        times = sum(step % args.sync_every == offset for step in steps)
        if finished:
            times += steps[-1] % args.sync_every != offset
        size += times * message_bytes(numbers, args.outer_bits, element_size)
    size /= len(steps)
    sent = formulas.summed(group, size, "2 r P e, each H steps")
    if args.outer_bits:
        text = "(N-1) of P b / 8 and scales, each H steps"
        sent = {("all_gather", group.name): ((group.ranks - 1) * size, text)}
    old = sum(numbers for numbers, _ in parts) * element_size
    return sent, {
        "old_weights": (old, "P, in float32 at least"),
        "outer_momentum": (old if args.outer_momentum else 0, "the same"),
        "outer_error": (old if args.outer_bits else 0, "the same, if numbers are rounded"),
    }


def outer_rows(args, diloco, islands, ledger, steps, finished=False):
    """(sent, held) for the receipt, with what was counted: by a ledger in `steps`, most of which
    send nothing; and of a DiLoCo's tensors."""
    parts = [(part.old.numel(), part.offset) for part in diloco.parts]
    group, element_size = formulas.Group("islands", islands), diloco.parts[0].old.element_size()
    sent, held = expected(parts, group, args, element_size, steps, finished)
    rows = {key: (None, "") for key in ledger.sent} | sent
    for key, row in rows.items():
        calls, payload, wire = ledger.sent.get(key, (0, 0, 0.0))
        rows[key] = *row, [calls, payload // len(steps), wire / len(steps)]
    tensors = {"old_weights": [], "outer_momentum": [], "outer_error": []}
    for part in diloco.parts:
        tensors["old_weights"].append(part.old)
        tensors["outer_momentum"].append(part.outer.state[part.old].get("momentum_buffer"))
        tensors["outer_error"].append(part.rounding_error)
    for kind, row in held.items():
        held[kind] = *row, storage_bytes(t for t in tensors[kind] if t is not None)
    return rows, held
