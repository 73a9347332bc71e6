"""What a Muon rank sends and holds: 2 r P e, and about 1/N of the states; and the same optimizer on
one process."""

from harness.optimizer import make_optimizer
from proof.receipt import Count
from receipts.formulas import SCALAR, Group, held, sizes_of, summed


def expected(sizes, group, matrices, others):
    """(sent, held) of a rank that owns so many elements of matrices, and of others."""
    size = (1 - 1 / group.ranks) * sizes.parameters()
    sent = {
        ("reduce", group.name): (size * sizes.reduced, "r P e of gradients, to their owners"),
        ("broadcast", group.name): (size * sizes.e, "r P e of weights, from their owners"),
    }
    sent |= summed(group, 2 * SCALAR, "the loss and the norm, 8 bytes each")
    states = (matrices + 2 * others) * sizes.master
    text = f"of the {matrices + others:,} that it owns: e in a matrix, else 2 e"
    return sent, held(sizes) | {"optimizer": (states, text)}


def of_demo(run, muon, early):
    """(layout, sent, held, notes) of the demo's receipt. early: how many of the buckets started
    during backward."""
    sizes = sizes_of(run.args, run.config, run.world)
    matrices = others = 0
    for bucket in muon.buckets:
        owned = bucket.piece.numel()
        if bucket.owner is None:
            others += owned
        else:
            matrices += owned
    table = expected(sizes, Group("dp", run.world), matrices, others)
    text = f"{early} of {len(muon.buckets)} buckets started during backward"
    # Backward fills all of them, but for an expert's without tokens
    notes = [Count(text, early, None if run.config.experts else len(muon.buckets))]
    return {"dp": run.world, "optimizer": "muon"}, *table, notes


# --- the same optimizer on one process


class Optimizers:
    """Several optimizers as one."""

    def __init__(self, *optimizers):
        self.optimizers = optimizers
        self.param_groups = [group for each in optimizers for group in each.param_groups]

    @property
    def state(self):
        return {p: state for each in self.optimizers for p, state in each.state.items()}

    def zero_grad(self):
        for each in self.optimizers:
            each.zero_grad()

    def step(self):
        for each in self.optimizers:
            each.step()


def one_process(model, matrices, muon):
    """A function of the parameters of another such model, and the flags, that makes its optimizer:
    `muon` for the same matrices, AdamW for the rest."""
    chosen = [p in set(matrices) for p in model.parameters()]

    def make(parameters, args):
        pairs = list(zip(parameters, chosen, strict=True))
        matrices = [p for p, is_muons in pairs if is_muons]
        others = [p for p, is_muons in pairs if not is_muons]
        return Optimizers(muon(matrices, args.lr, args.weight_decay), make_optimizer(others, args))

    return make
