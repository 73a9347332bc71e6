"""Islands in train.py: the outermost dimension of its mesh, over which weights are averaged rarely.

    python train.py --islands 2 --dp 2 --sync-every 50             all ranks on this machine
    torchrun ... train.py --islands 2 --dp 8 --zero 1              islands x dp x cp x tp x pp ranks

An island is a run with its own rows of the batch; all islands have the same layout. DiLoCo
(diloco.py) works element by element. So each rank averages what its own optimizer steps on, be it
ZeRO's shards, over the ranks that have the same place in every island.

    island 0   rank 0   rank 1        tp 2: rank 0 averages its pieces with rank 2,
                 |        |                 rank 1 its own with rank 3
    island 1   rank 2   rank 3

A checkpoint has the first island's weights and states under their usual names, so that --islands 1
goes on from it. Those of island 1 are of the kinds "island 1 weight" and so on; old weights and
outer momentum, which all islands share, are of kinds that begin with "outer".
"""

from types import SimpleNamespace

import torch

import diloco
import harness
from harness import Refused
from harness.presets import parameter_shapes
from proof.ledger import Ledger
from receipts import diloco as player
from trainer import checkpoint, outer_bits

# Kinds of a checkpoint's pieces: the first two are equal on all islands
OLD, MOMENTUM, ERROR = (checkpoint.OUTER + kind for kind in ("old", "momentum", "error"))
EVERY = 50  # the default of --sync-every


def add_flags(parser):
    g = parser.add_argument_group("islands (see diloco.py): they average rarely")
    why = "number of islands; each has the layout of the other flags, and its share of the batch"
    g.add_argument("--islands", **harness.POSITIVE, default=1, help=why)
    player.add_flags(g, EVERY)


def settle(args):
    """Fill in what follows from --islands, in place: from here on --batch is that of one island.
    Refuses a batch that they can't share, and flags that contradict each other."""
    if args.islands == 1:
        return args
    player.settle(args, EVERY)
    if args.batch % args.islands:
        use = f"use {max(1, round(args.batch / args.islands)) * args.islands}"
        raise Refused(f"--batch {args.batch} does not divide by {args.islands} islands: {use}")
    args.batch //= args.islands
    return args


def parts_of(args, config):
    """([names of each part's parameters], [each part's offset]), as diloco.py cuts the model."""
    shapes = parameter_shapes(config)
    tensors = {torch.empty(shape, device="meta"): name for name, shape in shapes.items()}
    lists = [[tensors[t] for t in part] for part in diloco.consecutive(list(tensors), args.stream)]
    return lists, [i * args.sync_every // len(lists) for i in range(len(lists))]


# --- in the loop


def make(run, model, optimizer, groups):
    """An Averaging. Where there is one island, an object in its place that averages nothing."""
    if run.args.islands > 1:
        return Averaging(run, model, optimizer, groups)
    return SimpleNamespace(
        reference=None,
        beside=lambda stepped: {},
        arrange=lambda pieces, index: pieces,
        go_on=lambda first: None,
        average_if_due=lambda step: None,
        expected=lambda *row: row,
    )


class Averaging(diloco.DiLoCo):
    """diloco.py's class on what this rank's optimizer steps on."""

    def __init__(self, run, model, optimizer, groups):
        self.run, self.args, self.inner = run, run.args, optimizer
        self.lists, self.offsets = parts_of(run.args, run.config)
        self.holdings = [h for h in checkpoint.holdings(model.named(), optimizer) if len(h[2])]
        self.ledger = Ledger({"islands": groups["islands"]})
        self.loaded = False  # whether a checkpoint had the outer state
        stepped = [stepped for *_, stepped, _ in self.holdings]
        options = player.options(run.args)
        super().__init__(stepped, groups["islands"], run.args.sync_every, **options)
        self.cut(options["outer_lr"], options["outer_momentum"])
        self.reference = player.Player(
            run,
            island=run.rank // (run.world // self.args.islands),
            islands=self.args.islands,
            rows_of=lambda island, step: run.microbatches(step, island, pieces=1),
            target_count=run.target_count,
            parts=self.lists,
            finishes=True,
        )

    def cut(self, lr, momentum):
        """Cut the whole model into parts. Of each, this rank has the pieces that it steps on."""
        self.parts, self.places = [], {}  # {tensor: (number of its part, where it begins there)}
        for names, offset in zip(self.lists, self.offsets):
            tensors, size = [], 0
            for name, *_, stepped, _ in self.holdings:
                if name in names:
                    self.places[stepped] = len(self.parts), size
                    tensors.append(stepped)
                    size += stepped.numel()
            if not tensors:
                continue  # another stage's
            part = diloco.Part(tensors, offset, lr, momentum)
            part.rounding_error = torch.zeros_like(part.old) if self.args.outer_bits else None
            if momentum:
                part.outer.state[part.old]["momentum_buffer"] = torch.zeros_like(part.old)
            self.parts.append(part)

    def start_mean(self, part):
        """Messages go from device to device, also where masters are in the host's memory."""
        bits, device = self.args.outer_bits, self.run.device
        if bits:
            return outer_bits.start_mean(part, bits, self.group, device)
        mean = diloco.start_mean(part.outer_gradient().to(device), self.group)
        return lambda: mean().to(part.old.device)

    def average_if_due(self, step):
        """After step number `step` of this island: an outer step, for the parts that are due."""
        last = step + 1 == self.args.steps
        with self.ledger:
            arrived = self.step()
            if last:
                self.finish()
        if (arrived or last) and hasattr(self.inner, "update_weights"):
            # ZeRO: the weights follow the masters, on all ranks of the island
            self.inner.update_weights()

    # --- checkpoints

    def beside(self, stepped):
        """{kind: flat tensor} of the outer state, in the place of what the optimizer steps on."""
        if stepped not in self.places:
            return {}
        number, start = self.places[stepped]
        part, own = self.parts[number], slice(start, start + stepped.numel())
        momentum = part.outer.state[part.old].get("momentum_buffer")
        states = {OLD: part.old, MOMENTUM: momentum, ERROR: part.rounding_error}
        return {kind: t[own] for kind, t in states.items() if t is not None}

    def arrange(self, pieces, index):
        """The pieces of a checkpoint to write; or (index) those to read from one, which may be of
        more islands, of fewer, or of none. A new island begins with the old weights and the outer
        momentum, and an empty optimizer."""
        shared, found = (OLD, MOMENTUM), []
        island = self.reference.island
        own = f"{checkpoint.ISLAND}{island} " if island else ""
        there, new = None, False
        if index is not None:
            there = {kind for kinds in index["tensors"].values() for kind in kinds}
            self.loaded = OLD in there
            own = own if self.loaded else ""
            new = own + "weight" not in there
        for piece in pieces:
            kind = piece.kind if piece.kind in shared else own + piece.kind
            if new and piece.kind == "weight":
                kind = OLD
            if there is None or kind in there:
                found.append(piece._replace(kind=kind))
        return found

    def go_on(self, first):
        """Go on after `first` steps: 0, or those of a checkpoint, which may have no outer state. A
        message that was on its way then is lost; its movement goes with the next."""
        self.first = self.steps = first
        for part in self.parts:
            part.sent_at = max(0, first - (first - part.offset) % self.every)
            if first and not self.loaded:
                part.old.copy_(diloco.flat_copy(part.parameters))

    # --- the receipt

    def expected(self, layout, sent, held, notes):
        """The receipt's rows, with those of the outer steps."""
        args = self.args
        steps = range(self.first + 1, args.steps + 1)
        about = args, self, args.islands, self.ledger, steps
        outer_sent, outer_held = player.outer_rows(*about, finished=True)
        notes = [*notes, f"in islands: the mean of {len(steps)} steps; calls: of all"]
        layout = {"islands": args.islands, "every": args.sync_every} | layout
        return layout, sent | outer_sent, held | outer_held, notes
