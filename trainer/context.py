"""Context parallelism as train.py composes it: the kinds of attention, with packed documents or
without, and routers that see a piece of each sequence."""

import torch.distributed as dist
import torch.nn as nn

from context_parallel import Ring, parallelize_context
from gather_context import Gather
from packed_documents import DocumentRing
from trainer.document_core import DocumentCore
from ulysses import Ulysses, local_attention

KINDS = ("ring", "ulysses", "gather", "ring-ulysses")  # of --cp-kind


def make_core(kind, groups, documents=False):
    """What takes the place of attention's core in all blocks. groups: "cp", for ring-ulysses "ring"
    and "ulysses". documents: the model is called with starts."""
    ring, local = (DocumentRing, DocumentCore()) if documents else (Ring, local_attention)
    if kind == "ulysses":
        return Ulysses(groups["cp"], local)
    if kind == "ring-ulysses":
        return Ulysses(groups["ulysses"], ring(groups["ring"]))
    return Gather(groups["cp"]) if kind == "gather" else ring(groups["cp"])


def attend_over_ranks(model, group, core):
    """Put the core in the place of every block's. What a router of experts sums over a sequence is
    summed over the ranks, too. T must divide into equal chunks then, as a router counts padding."""
    parallelize_context(model, core)
    for block in model.blocks.values() if model.config.experts else ():
        router = block.mlp.router
        router.sum_over_sequence = nn.Sequential(router.sum_over_sequence, SumOverRanks(group))


class SumOverRanks(nn.Module):
    """Adds up the ranks' parts. Backward is the identity."""

    def __init__(self, group):
        super().__init__()
        self.group = group

    def forward(self, sums):
        total = sums.detach().clone()
        dist.all_reduce(total, group=self.group)
        return total + (sums - sums.detach())
