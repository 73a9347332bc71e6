"""Data parallelism: every rank holds the whole model and works on its own rows of the batch.

    rank 0   rows 0..3    forward  backward --+
    rank 1   rows 4..7    forward  backward --+-- sum of the gradients -> the same step everywhere
    rank 2   rows 8..11   forward  backward --+

Sent      The gradients, once a step. In a ring all-reduce each of N ranks sends 2 r P e bytes, with
          P parameters of e bytes and r = (N-1)/N. There are three ways to add them up:

          naive       after backward, one all-reduce per parameter
          bucketed    after backward, one per bucket of parameters: fewer, larger messages
          overlapped  one per bucket, as soon as backward has filled it, while backward goes on

Backward  The gradient of a sum is the sum of the gradients. A rank's loss is the sum over its own
          tokens, divided by the number of tokens in the whole batch. So the gradients of all ranks
          add up to that of the batch, even if some ranks have more rows. (torch's DDP divides the
          sum by N, so there each rank gives its mean loss.)
Limits    Parameters, gradients and AdamW's two moments, 4 P e bytes, and the activations must fit
          on one rank. If they don't: zero.py. Each rank keeps buffers of its own (BatchNorm's
          statistics). For more: docs/learn/data-parallelism.md.

    torchrun --nproc_per_node=4 ddp.py                 (needs model.py, to train and prove itself)

Li et al. 2020, PyTorch Distributed, arXiv:2006.15704, section 3.2 (buckets, overlap).
"""

import argparse
import functools
from collections import Counter

import torch
import torch.distributed as dist

# --- the plainest form: after backward, one all-reduce per parameter


def sum_gradients(parameters, group):
    """After backward on this rank's rows: add up each gradient over the ranks of `group`.

    All ranks have equal weights, and a loss that is divided by the number of all ranks' targets:
    count_targets, below. Then p.grad is the gradient of the whole batch, and every rank takes the
    same step."""
    for p in parameters:
        if p.requires_grad:
            if p.grad is None:  # this rank's rows did not use p, but other ranks wait for its part
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad, group=group)


def count_targets(targets, group, ignored=-100):
    """The number of targets of all ranks, by which each backward pass divides its sum of losses.
    Call it before a step's first pass. targets: this rank's, of all its micro-batches. With a
    rank's own number in its place gradients are about N times too large, silently."""
    count = (targets != ignored).sum()
    dist.all_reduce(count, group=group)
    return count


# --- overlap: gradients are summed in buckets, while backward goes on

OTHER_LOSS = "or another network's loss reached this one (a GAN): freeze it in that pass"


class DDP:
    """Sums gradients in buckets, each as soon as the last micro-batch's backward has filled it.

    A step is zero_grad(), `microbatches` backward passes, finish(), which waits for the sums, and
    the optimizer's step. Call this zero_grad(), not the optimizer's: p.grad is a view of a bucket.

    microbatches  backward passes of a step, on every rank
    bucket_bytes  of the largest bucket; a larger parameter has one of its own
    overlap       False: nothing is sent before finish()
    all_reduce    in place of torch's: (flat, group=group) -> a handle with wait(), or None if done
    groups_of     p -> the groups over which p.grad is summed, one after the other; None: (group,).
                  For parameters that another technique has cut: advanced/composition.py

    Give all ranks equal weights first (broadcast rank 0's, as the demo does): DDP neither sends nor
    checks them. A parameter that got no gradient has zeros, not None, so weight decay moves it. Its
    bucket never fills, so finish() sends it and all later ones, and nothing hides them. If backward
    raises, end the run on all ranks: others may wait.
    Raises ValueError if no parameter needs a gradient; RuntimeError for a step in another order,
    and for a p.grad that has left its bucket."""

    def __init__(
        self,
        parameters,
        group,
        microbatches=1,
        bucket_bytes=25e6,
        overlap=True,
        all_reduce=functools.partial(dist.all_reduce, async_op=True),
        groups_of=None,
    ):
        # Usually 1. A caller lists p twice if two pipeline stages of this rank share it: each stage
        # has a backward pass of its own
        grads_per_pass = Counter(parameters)
        trained = [p for p in grads_per_pass if p.requires_grad]
        if not trained:
            raise ValueError("no parameter needs a gradient: all frozen, or an iterator used up")
        self.parameters, self.microbatches = list(grads_per_pass), microbatches
        self.overlap, self.all_reduce = overlap, all_reduce
        self.buckets = []
        if groups_of is None and any(hasattr(p, "placement") for p in trained):
            raise ValueError("another technique has cut the model: give groups_of")
        groups = {p: groups_of(p) if groups_of else (group,) for p in trained}
        kinds = {p: (p.dtype, p.device, groups[p]) for p in trained}
        for members in group_parameters(trained, bucket_bytes, kinds.get):
            grads_per_step = microbatches * sum(grads_per_pass[p] for p in members)
            bucket = Bucket(members, groups[members[0]], grads_per_step)
            for p in members:
                p.register_post_accumulate_grad_hook(functools.partial(self._arrived, bucket))
            self.buckets.append(bucket)
        self.addresses = {p: p.grad.data_ptr() for p in trained}
        self.state = "summed"  # of the gradients: "zero", then "local" (this rank's), then "summed"
        self.zero_grad()

    def zero_grad(self):
        if self.state == "local":  # all-reduces may be on their way, and would meet the next step's
            why = f"without finish(); or backward raised; {OTHER_LOSS}"
            raise RuntimeError(f"zero_grad() after backward(), {why}")
        self.state = "zero"
        self.works = []  # this step's all-reduces: works[i] belongs to buckets[i]
        for bucket in self.buckets:
            bucket.zero()

    def _arrived(self, bucket, p):  # the hook of each p, after autograd has added to p.grad
        if bucket.grads_left == 0:  # the bucket may have been sent
            count = f"microbatches={self.microbatches}"
            why = f"or no zero_grad(); {OTHER_LOSS}"
            raise RuntimeError(f"more backward passes than {count}, {why}")
        bucket.grads_left -= 1
        self.state = "local"
        if self.overlap:
            self._start_buckets(only_full=True)

    def _start_buckets(self, only_full):
        # All ranks start the buckets in one order, or all-reduces would add up the wrong buckets,
        # silently. So a bucket that is full early waits for those before it.
        for bucket in self.buckets[len(self.works) :]:
            if only_full and bucket.grads_left > 0:
                break
            self.works.append(self.all_reduce(bucket.flat, group=bucket.groups[0]))

    def finish(self):
        if self.state == "summed":
            return
        self._check_addresses()
        self._start_buckets(only_full=False)
        for work in self.works:
            if work is not None:
                work.wait()
        for bucket in self.buckets:
            for group in bucket.groups[1:]:  # rarely any, so not overlapped
                dist.all_reduce(bucket.flat, group=group)
        self.state = "summed"

    def _check_addresses(self):
        for p in self.parameters:
            if p.requires_grad and (p.grad is None or p.grad.data_ptr() != self.addresses.get(p)):
                raise RuntimeError(
                    "p.grad was replaced, and would not be summed: by the optimizer's zero_grad(), "
                    "a second DDP, create_graph=True, a p unfrozen, a model moved or cast after DDP"
                )


class Bucket:
    """One flat buffer for the gradients of several parameters: each p.grad is a view of it.
    Autograd adds in place to a p.grad that exists, so nothing is copied."""

    def __init__(self, parameters, groups, grads_per_step):
        self.groups = groups  # one, unless another technique has cut these parameters
        self.grads_per_step = grads_per_step  # after so many gradients the bucket is full
        sizes = [p.numel() for p in parameters]
        self.flat = parameters[0].new_zeros(sum(sizes))
        for p, piece in zip(parameters, self.flat.split(sizes)):
            p.grad = piece.view_as(p)

    def zero(self):
        self.flat.zero_()
        self.grads_left = self.grads_per_step


def group_parameters(parameters, bucket_bytes, kind_of):
    """Lists of at most bucket_bytes, one per bucket, from the last parameter to the first, as
    backward reaches them. A larger parameter has a list of its own. Parameters share a list only if
    kind_of(p), such as dtype and group, is equal. Backward completes the first list first."""
    position = {p: i for i, p in enumerate(reversed(list(parameters)))}
    lists, newest = [], {}  # newest: {kind: its last list}
    for p in position:
        kind = kind_of(p)
        members = newest.get(kind)
        if members is None or sum(q.nbytes for q in members) + p.nbytes > bucket_bytes:
            members = newest[kind] = []
            lists.append(members)
        members.append(p)
    # Lists of different kinds interleave. Sort them by the parameter that backward reaches last
    return sorted(lists, key=lambda members: position[members[-1]])


# --- demo ---

if __name__ == "__main__":  # importing this file needs no model.py
    from model import GPT, IGNORE, Config, OneProcess, Sent, join_ranks, leave, text_batch


def main():
    parser = argparse.ArgumentParser(description="train a GPT in each way, and prove it")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=2, help="of each rank, a step")
    parser.add_argument("--bucket-kb", type=float, default=50, help="the largest bucket")
    args = parser.parse_args()
    device = join_ranks()
    for way in ("naive", "bucketed", "overlapped"):
        train(way, args, device)
    leave()


def train(way, args, device):
    group, m = dist.group.WORLD, args.microbatches
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    model = GPT(Config(layers=2, width=32, context=32)).to(device, torch.float64)
    for p in model.parameters():
        dist.broadcast(p.data, src=0)  # each rank drew other weights: take rank 0's
    one = OneProcess(model, torch.optim.AdamW)
    optimizer = torch.optim.AdamW(model.parameters())
    zero_grad, finish = optimizer.zero_grad, lambda: sum_gradients(model.parameters(), group)
    if way != "naive":
        options = dict(bucket_bytes=args.bucket_kb * 1024, overlap=way == "overlapped")
        sync = DDP(model.parameters(), group, microbatches=m, **options)
        zero_grad, finish = sync.zero_grad, sync.finish
    if rank == 0:
        print(f"{way}, {ranks} ranks, {m} micro-batches")
    for step in range(args.steps):
        tokens, targets, count_in_batch = text_batch(step, 2 * m * ranks + 1, 32, device)
        rows = torch.arange(len(tokens)).tensor_split(ranks)[rank]  # unequally many
        count = count_targets(targets[rows], group, IGNORE)
        loss = torch.zeros_like(count, dtype=torch.float64)
        with Sent() as sent:
            zero_grad()
            for micro_batch in rows.tensor_split(m):
                x, y = tokens[micro_batch], targets[micro_batch]
                part = model(x, targets=y, target_count=count)  # the sum over y, divided by count
                part.backward()
                loss += part.detach()
            finish()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        dist.all_reduce(loss)  # a rank has its part of the loss, as of the gradients
        alone = one.train_step(tokens, targets, count_in_batch, 0.5)
        one.compare(step, loss, alone, model.named_parameters())
    size = sum(p.nbytes for p in model.parameters())
    one.prove(sent, "2 r P e", 2 * (ranks - 1) / ranks * size)


if __name__ == "__main__":
    main()
