"""Islands that train alone and speak rarely: their flags, one process that plays all of them, and
what the receipt of diloco.py's demo is held against.

The player shares no line with diloco.py: it is written down again, from the papers.
"""

import torch
import torch.distributed as dist
from torch import nn

import model as gpt
from harness import flags
from harness.flags import NATURAL, POSITIVE, check_batch, real
from harness.optimizer import clip, grad_norm, learning_rate, make_optimizer
from harness.refusal import Refused
from proof import one_process
from proof.ledger import Ledger, human, storage_bytes
from proof.run import Run as OrdinaryRun
from receipts.formulas import activation_bytes, all_reduce_sent, islands_message

# --- flags


DEFAULTS = {"outer_lr": 0.7, "outer_momentum": 0.9, "stream": 1, "stream_delay": 0}


def add_flags(g, every):
    """Add what diloco.py and train.py share to a group. Flags that are not given are None: see
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
    """Fill in the flags that are not given, in place."""
    for name, value in (DEFAULTS | {"sync_every": every}).items():
        if getattr(args, name) is None:
            setattr(args, name, value)


def parse_args(doc):
    """The flags of diloco.py."""
    parser = flags.parser(doc, steps=20)
    add_flags(parser.add_argument_group("islands"), every=5)
    args = parser.parse_args()
    settle(args, every=5)
    return args


def options(args):
    """The flags as DiLoCo's options."""
    return {
        "lr": args.outer_lr,
        "momentum": args.outer_momentum,
        "parts": args.stream,
        "delay": args.stream_delay,
        "bits": args.outer_bits,
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


def check(args, world):
    """Refuse what does not fit `world` islands."""
    check_flags(args)
    check_batch(args, world)


# --- one process that plays all islands, one after the other


class Island:
    """One island of the player: a model, its optimizer, and the error of its messages."""

    def __init__(self, run, number):
        self.run, self.number = run, number
        self.model = gpt.build(run.config, run.args.seed, run.device, run.dtype, run.draw)
        self.weights = {name: p.data for name, p in self.model.named()}
        self.optimizer = make_optimizer(list(self.model.parameters()), run.args)
        self.errors = {}  # {part: what its messages have left out}
        self.losses, self.norms = [], []

    def train(self, step):
        """One step on this island's rows."""
        args, run = self.run.args, self.run
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        [(tokens, targets, samples)] = run.batch_of(self.number, step)
        self.optimizer.zero_grad()
        loss = self.model(tokens, targets=targets, count=run.count, samples=samples)
        loss.backward()
        self.gradients = {name: p.grad.clone() for name, p in self.model.named()}
        parameters = list(self.model.parameters())
        norm = grad_norm(parameters)
        clip(parameters, norm, args.grad_clip)
        self.optimizer.step()
        gpt.rebalance(self.model)
        self.losses.append(loss.item())
        self.norms.append(norm.item())

    def message(self, part, names, old, bits, pieces=None):
        """What this island says of a part, as the others read it. pieces: see `play`."""
        moved = [old[name].to(self.weights[name]).to(old[name]) for name in names]
        moved = [m - self.weights[name].to(m) for m, name in zip(moved, names)]
        wanted = torch.cat([m.flatten() for m in moved]) + self.errors.get(part, 0)
        if pieces is None:
            said = rounded(wanted, bits)
        else:
            split = wanted.split([m.numel() for m in moved])
            said = [rounded_in(pieces[name], x, bits) for name, x in zip(names, split)]
            said = torch.cat(said)
        if bits:
            self.errors[part] = wanted - said.to(wanted)
        sizes = [m.numel() for m in moved]
        return [piece.view_as(m) for piece, m in zip(said.split(sizes), moved)]


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


def rounded_in(pieces, x, bits):
    """The same, where each piece is rounded by itself: places in x, -1 for a zero that pads."""
    padded = nn.functional.pad(x, (0, 1))
    said = torch.zeros_like(padded, dtype=torch.float64)
    for piece in pieces:
        said[piece] = rounded(padded[piece], bits)
    return said[:-1]


def play(run, steps, parts, finish=False, watch=lambda step, islands: None, pieces=None):
    """The islands after `steps` steps.

    parts   lists of parameters' names
    finish  what has moved since the latest outer steps is averaged too
    watch   watch(steps so far, islands) is called after each step
    pieces  {parameter: pieces of it that are rounded by themselves}. Default: parts are
    """
    args = run.args
    islands = [Island(run, number) for number in range(run.islands)]
    kind = torch.promote_types(run.dtype, torch.float32)
    old = {name: w.to(kind, copy=True) for name, w in islands[0].weights.items()}
    velocity = {name: torch.zeros_like(w) for name, w in old.items()}
    keep = 0.5 if args.stream_delay else 0
    travelling = {}  # {part: (step at which it is applied, the islands' messages)}
    sent_at = dict.fromkeys(range(len(parts)), -1)

    def send(part, step):
        about = part, parts[part], old, args.outer_bits, pieces
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
        for island in islands:
            island.train(step)
        for part in range(len(parts)):
            if (step + 1) % args.sync_every == part * args.sync_every // args.stream:
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


def is_data_parallelism(args):
    """Whether the flags make the islands data-parallel ranks."""
    plain = args.sync_every == 1 and args.outer_lr == 1 and args.outer_momentum == 0
    exact = args.outer_bits is None and args.stream_delay == 0
    return plain and exact and args.optimizer == "sgd" and args.grad_clip == 0


# --- a run of islands


class IslandRun(OrdinaryRun):
    """A run of `islands` islands, of which this rank belongs to number `island`. Its proof is the
    player."""

    def __init__(self, *args):
        super().__init__(*args)
        if self.args.outer_bits and self.precision == "float32":
            self.precision = "float32, few bits"

    def prove(self):
        """Compare each island with the player's: its losses, norms, gradients and weights."""
        steps = len(self.history)
        named = dict(self.compared[0]())
        played = self.play(steps, named) if self.rank == 0 else [None] * self.islands
        tensors = {"grad": self.gradients, "param": {n: p.detach() for n, p in named.items()}}
        differences = {}
        for number, island in enumerate(played):
            own = named if number == self.island else {}
            whole = {"grad": island.gradients, "param": island.weights} if island else {}
            for kind in tensors:
                differences |= one_process.compare_tensors(
                    self, kind, whole.get(kind, {}), tensors[kind], own
                )
        curves = [[(i.losses, i.norms) for i in played] if self.rank == 0 else None]
        dist.broadcast_object_list(curves, 0)
        losses, norms = curves[0][self.island]
        worst = {"loss": 0.0, "grad_norm": 0.0, "grad": 0.0, "param": 0.0}
        for row, loss, norm in zip(self.history, losses, norms):
            worst["loss"] = one_process.larger(worst["loss"], abs(row["loss"] - loss) / abs(loss))
            off = abs(row["grad_norm"] - norm) / abs(norm)
            worst["grad_norm"] = one_process.larger(worst["grad_norm"], off)
        differences |= self.more_differences(steps, named, tensors["param"])
        for (kind, _), difference in differences.items():
            worst[kind] = one_process.larger(worst[kind], difference)
        self.worst = one_process.worst_names(self, differences)
        errors = torch.tensor(list(worst.values()), dtype=torch.float64, device=self.device)
        errors = torch.where(errors.isnan(), torch.inf, errors)
        dist.all_reduce(errors, op=dist.ReduceOp.MAX)
        return dict(zip(worst, errors.tolist()))

    def more_differences(self, steps, named, weights):
        """{("param", name): difference} of a second comparison."""
        return {}

    def mean(self, row):
        """A step's mean of what a ledger has counted in all steps, most of which send nothing."""
        calls, payload, wire = row
        steps = len(self.history)
        return [calls, payload // steps, wire / steps]

    def outer_rows(self, diloco, steps, finished=False):
        """(sent, held) of the receipt for the outer steps, and the largest message. Puts what is
        held beside. steps: their numbers. finished: finish() came after them."""
        args, every, sent, largest = self.args, diloco.every, 0, 0
        for part in diloco.parts:
            times = sum(step % every == part.offset for step in steps)
            if finished:
                times += steps[-1] % every != part.offset
            size = islands_message(part.old.numel(), args.outer_bits, part.old.element_size())
            sent += times * size
            largest = max(largest, size)
        formula = "(N-1) of P b / 8 and scales, each H steps"
        rows = {("all_gather", "islands"): ((self.islands - 1) * sent / len(steps), formula)}
        old = sum(part.old.nbytes for part in diloco.parts)
        held = {
            "old_weights": (old, "P, in float32 at least"),
            "outer_momentum": (old if args.outer_momentum else 0, "the same"),
            "outer_error": (old if args.outer_bits else 0, "the same, if numbers are rounded"),
        }
        momenta = [part.outer.state[part.old].get("momentum_buffer") for part in diloco.parts]
        self.held |= {
            "old_weights": storage_bytes([part.old for part in diloco.parts]),
            "outer_momentum": storage_bytes([m for m in momenta if m is not None]),
            "outer_error": storage_bytes([p.error for p in diloco.parts if p.error is not None]),
        }
        return rows, held, largest


# --- the demo's bookkeeping


class Run(IslandRun):
    """A run with an island on each rank. Its ledger adds up all steps, because most of them send
    nothing."""

    def __init__(self, *args):
        super().__init__(*args)
        self.islands, self.island = self.world, self.rank
        self.count //= self.islands  # the tokens of this island's rows

    def batch_of(self, number, step):
        """The rows of an island in a step, for the player."""
        return self.microbatches(step, number, self.islands, pieces=1)

    def play(self, steps, named):
        names = {p: name for name, p in named.items()}
        return play(
            self, steps, [[names[p] for p in part.parameters] for part in self.diloco.parts]
        )

    def follow(self, diloco):
        """diloco: the demo's DiLoCo, whose parts and bytes the receipt shows."""
        self.diloco = diloco
        self.unmeasured = Ledger({"islands": dist.group.WORLD})

    def steps(self, optimizer):
        for step in super().steps(optimizer):
            if step != self.measured:  # `log` ends this, as it does the ordinary ledger
                self.watching.enter_context(self.unmeasured)
            yield step

    def more_differences(self, steps, named, weights):
        if not is_data_parallelism(self.args):
            return {}
        return self.compare_with_data_parallelism(steps, named, weights)

    def compare_with_data_parallelism(self, steps, named, weights):
        """{("param", name): difference} of the weights from those of one ordinary process with the
        whole batch. Where they are equal to rounding, so are all the gradients on the way."""
        reference = {}
        if self.rank == 0:
            self.count *= self.islands
            reference = one_process.one_process(self, steps)[3]
            self.count //= self.islands
        differences = one_process.compare_tensors(self, "param", reference, weights, named)
        largest = torch.tensor(max(differences.values()), device=self.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        self.from_data_parallelism = largest.item()
        return {("param", f"{name}, beside ddp"): d for (_, name), d in differences.items()}

    def expected(self, diloco):
        """(sent, held, notes) of the receipt. Puts what was measured into the same units: the mean
        of all steps."""
        args, n, steps = self.args, self.islands, self.args.steps
        totals = {}
        for ledger in (self.ledger, self.unmeasured):
            for key, row in ledger.sent.items():
                totals[key] = [a + b for a, b in zip(row, totals.get(key, [0, 0, 0.0]))]
        self.ledger.sent = {key: self.mean(row) for key, row in totals.items()}
        rows, held, largest = self.outer_rows(diloco, range(1, steps + 1))
        size = sum(p.nbytes for p in diloco.kinds)
        held = self.states(size, "P e") | held
        sequences = args.batch // n // args.microbatches
        blocks = self.config.layers * activation_bytes(self.config, sequences, self.dtype.itemsize)
        held["activations_peak"] = blocks, "what backward needs of the blocks"
        [(sent, _)] = rows.values()
        return rows, held, self.notes(size, sent, largest)

    def notes(self, size, sent, largest):
        """Lines of the receipt: what it is beside ddp.py. sent: bytes a step."""
        n, args = self.islands, self.args
        ddp = all_reduce_sent(size, n)
        notes = [f"sent: the mean of {args.steps} steps; calls: of all"]
        if n > 1 and sent:
            notes.append(
                f"ddp.py sends {human(ddp).strip()} a step, {ddp / sent:,.1f} times as much; "
                f"the largest message here has {human(largest).strip()}"
            )
        if is_data_parallelism(args) and self.errors:
            off = self.from_data_parallelism
            notes.append(f"this is data parallelism: largest difference of a weight {off:.1e}")
        return notes
