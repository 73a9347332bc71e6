"""What a Muon rank sends and holds: 2 r P e, and about 1/N of the states. Muon on one process."""

from typing import NamedTuple

import torch.distributed as dist

from harness.optimizer import make_optimizer
from receipts.formulas import SCALAR, add, held, summed


class Owned(NamedTuple):
    """Elements that this rank owns: of matrices, of others. {group's name: elements} of those
    whose gradients are partial sums over the group, and of shards of matrices that it cuts."""

    matrices: int
    others: int
    partial: dict
    gathered: dict


def owned_by(muon, groups):
    """Of a Muon. groups: {name: process group}."""
    names = {group: name for name, group in groups.items() if isinstance(group, dist.ProcessGroup)}
    matrices = others = 0
    partial, gathered = {}, {}
    for bucket in muon.buckets:
        size = bucket.own_slice.stop - bucket.own_slice.start
        if bucket.owner is None:
            others += size
        else:
            matrices += size
        for group in getattr(bucket.parameters[0], "placement", {}).get("partial", ()):
            partial[names[group]] = partial.get(names[group], 0) + size
        for p in bucket.parameters if bucket.owner is not None and size else ():
            cuts = getattr(p, "placement", {}).get("cuts", {})
            # A cut of an earlier dimension leaves matrices whole, a cut of rows leaves heads whole
            dims = [p.dim() - 1] if hasattr(p, "matrix_rows") else [p.dim() - 2, p.dim() - 1]
            for group, _, _ in [cut for dim, cut in cuts.items() if dim in dims]:
                gathered[names[group]] = gathered.get(names[group], 0) + p.numel()
    return Owned(matrices, others, partial, gathered)


def expected(sizes, groups, owned):
    """(sent, held). groups: {name: Group}: dp; copies, if experts have fewer replicas; those whose
    ranks have other parts of a parameter. owned: an Owned."""
    own = sizes.parameters()
    parts = {"dp": own}
    if "copies" in groups:
        parts["dp"] = sizes.parameters(experts=0)
        parts["copies"] = own - parts["dp"]
    sent = {}
    for name, elements in parts.items():
        size = (1 - 1 / groups[name].ranks) * elements
        sent["reduce", name] = size * sizes.reduced, "r P e of gradients, to their owners"
        sent["broadcast", name] = size * sizes.e, "r P e of weights, from their owners"
    sent |= summed(groups["dp"], 2 * SCALAR, "the loss and the norm, 8 bytes each")
    for name, elements in owned.partial.items():
        text = "2 r of partial sums that it owns"
        sent = add(sent, summed(groups[name], elements * sizes.reduced, text))
    for name, elements in owned.gathered.items():
        size = (groups[name].ranks - 1) * elements * sizes.master
        sent["all_gather", name] = size, "(t-1) shards of matrices that it owns"
    states = (owned.matrices + 2 * owned.others) * sizes.master
    text = f"of the {owned.matrices + owned.others:,} that it owns: e in a matrix, else 2 e"
    return sent, held(sizes) | {"optimizer": (states, text)}


# --- the same optimizer on one process


class Optimizers:
    """Several optimizers as one."""

    def __init__(self, *optimizers):
        self.optimizers = optimizers
        self.param_groups = [group for each in optimizers for group in each.param_groups]

    def zero_grad(self):
        for each in self.optimizers:
            each.zero_grad()

    def step(self):
        for each in self.optimizers:
            each.step()


def matrices_of(model):
    """The matrices of its layers: those that Muon steps on."""
    return [p for name, p in model.named() if name.startswith("blocks.") and p.dim() > 1]


def one_process(muon):
    """A function of a whole model and the flags that makes its optimizer: `muon` for the layers'
    matrices, AdamW for the rest."""

    def make(model, args):
        matrices = matrices_of(model)
        others = [p for p in model.parameters() if p not in set(matrices)]
        own = muon(matrices, args.lr, args.weight_decay)
        return Optimizers(own, make_optimizer(others, args))

    return make
