"""Muon: each matrix steps along its orthogonalised momentum, on the one rank that owns it.

    gradients of 3 ranks          the owner, alone                            all ranks
    matrix A    g0 + g1 + g2 -->  rank 0: momentum -> Newton-Schulz -> step   --> new A
    matrix B    g0 + g1 + g2 -->  rank 1: momentum -> Newton-Schulz -> step   --> new B
    embedding   g0 + g1 + g2 -->  ranks 0, 1 and 2: AdamW on a third each     --> new embedding

A matrix's momentum, U S V^T in its singular value decomposition, has a few large singular values: a
step along it moves the weights in those directions only. Muon steps along nearly U V^T, so all move
equally far. That takes the whole matrix, so ZeRO's slices won't do: each matrix has one owner. All
other parameters take AdamW, which works on any piece: each rank owns 1/N of each.

Sent      On average 2 r P e bytes per rank, as in ZeRO-1: P parameters of e bytes, N ranks, r =
          (N-1)/N. One reduce takes a matrix's gradient to its owner, one broadcast brings the new
          matrix to all. A parameter of AdamW has N owners, so N reduces and N broadcasts.
Held      Weights and gradients whole, and 1/N of the optimizer's states: of a matrix one number per
          element (the momentum), of AdamW's parameters two.
Computed  Per step, on the owner: 20 m^2 n + 10 m^3 FLOPs for a matrix of m x n, m <= n. With m = n
          = 4096 and a million tokens a step that is 2% of the model's own 6 m n a token.
Backward  The model's own. A matrix is reduced when its gradient is there, and those before it.
Use       For the layers of a language model: a lower loss than AdamW's after as many tokens.
Limits    More ranks than matrices are no faster. Keep weights in float32: in bfloat16 small steps
          and the decay round away.

    torchrun --nproc_per_node=4 -m advanced.muon       (needs model.py, to train and prove itself)

Jordan et al. 2024, https://kellerjordan.github.io/posts/muon. Liu et al. 2025, arXiv:2502.16982
(Moonlight: the update's scale, distributed Muon). GLM-5, arXiv:2602.15763 (heads).
"""

import argparse
import functools
import math
from collections import Counter

import torch
import torch.distributed as dist
import torch.nn as nn

# --- Muon in its plainest form: on one process


def orthogonalize(matrix, dtype=None):
    """Nearly U V^T of a matrix U S V^T, or of each matrix in a stack (..., rows, columns). dtype:
    what the iteration computes in. None: as the matrix.

    x x^T x = U S^3 V^T: odd powers keep U and V. So each of five Newton-Schulz steps puts every
    singular value s through one polynomial. At first s <= 1, because the matrix is divided by its
    norm. Jordan's factors lift small s fast, but don't converge: any s from 0.002 to 1 ends between
    0.68 and 1.21. That is near enough to 1. A smaller one grows up to 485-fold."""
    if matrix.shape[-2] > matrix.shape[-1]:
        return orthogonalize(matrix.mT, dtype).mT  # so that `gram` has the shorter side
    a, b, c = 3.4445, -4.7750, 2.0315
    norm = torch.linalg.matrix_norm(matrix, keepdim=True).clamp(min=1e-7)
    x = (matrix / norm).to(dtype or matrix.dtype)  # (..., m, n) with m <= n
    for _ in range(5):
        gram = x @ x.mT  # (..., m, m)
        x = a * x + (b * gram + c * gram @ gram) @ x  # s -> a s + b s^3 + c s^5
    return x.to(matrix.dtype)


def update_of(direction, p, dtype=None):
    """The orthogonalised direction, with a root mean square of about 0.2, as that of AdamW's update
    (Moonlight), or less where many singular values are tiny. So both take the same learning rate
    and weight decay.

    p is one matrix, or a stack of them. With p.matrix_rows, so many rows at a time are a matrix of
    their own: each head of q, k and v, so that one with small gradients moves as far as others."""
    rows = getattr(p, "matrix_rows", direction.shape[-2])
    matrices = direction.reshape(-1, rows, direction.shape[-1])  # one, or a stack of them
    # U V^T has the root mean square 1 / sqrt(longer side)
    scale = 0.2 * max(matrices.shape[-2:]) ** 0.5
    return scale * orthogonalize(matrices, dtype).reshape(direction.shape)


class PlainMuon(torch.optim.Optimizer):
    """Muon on one process, for matrices and for stacks of them. Of a language model these are its
    layers'. Embedding, head and vectors take make_adamw(), below.

    dtype   torch.bfloat16: the iteration is faster on GPUs
    update  another update_of: advanced/composition.py has one for a matrix that is cut"""

    def __init__(
        self, matrices, lr=1e-3, weight_decay=0.1, momentum=0.95, dtype=None, update=update_of
    ):
        defaults = dict(lr=lr, weight_decay=weight_decay, momentum=momentum, dtype=dtype)
        super().__init__(matrices, defaults)
        self.update = update

    @torch.no_grad()
    def step(self):
        for settings in self.param_groups:
            for p in settings["params"]:
                if p.grad is not None:
                    self.step_on(p, settings)

    @torch.no_grad()
    def step_on(self, p, settings):
        lr, momentum = settings["lr"], settings["momentum"]
        state = self.state[p]
        if not state:
            state["average"] = torch.zeros_like(p)  # of gradients: the momentum
        state["average"].lerp_(p.grad, 1 - momentum)
        direction = p.grad.lerp(state["average"], momentum)  # Nesterov: as if a step ahead
        p.mul_(1 - lr * settings["weight_decay"])
        p.sub_(lr * self.update(direction, p, settings["dtype"]))


def make_adamw(parameters, lr=1e-3, weight_decay=0.1):
    """For the other parameters: embedding, head and vectors. These have no weight decay. The betas
    are GPT-3's."""
    parameters = list(parameters)
    decayed = [p for p in parameters if p.dim() > 1]
    vectors = [p for p in parameters if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": weight_decay}]
    groups += [{"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr, betas=(0.9, 0.95), fused=True)


# --- data parallelism in its plainest form: each matrix has one owner, which steps for all


def step_by_owner(plain_muon, adamw, group):
    """In place of plain_muon.step() and adamw.step(), after backward on this rank's part of the
    batch. Needs equal weights on all ranks, and a gradient of every parameter, if only zeros.
    Clipping before it would see this rank's part of the sum only; Muon, below, can clip."""
    matrices = [p for settings in plain_muon.param_groups for p in settings["params"]]
    others = [p for settings in adamw.param_groups for p in settings["params"]]
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    for p in others:
        dist.all_reduce(p.grad, group=group)  # simple: each rank steps on all of them
    for i, p in enumerate(matrices):
        dist.reduce(p.grad, group=group, group_dst=i % ranks)  # the sum, on its owner alone
        if i % ranks != rank:
            p.grad = None  # another rank owns p: step() skips it here
    adamw.step()
    plain_muon.step()
    for i, p in enumerate(matrices):
        dist.broadcast(p.data, group=group, group_src=i % ranks)


# --- the same in full: messages travel during backward and step, owners have equal work, and each
#     rank has 1/N of AdamW's states


class Muon:
    """Trains a model's parameters over `group`: Muon for `matrices`, AdamW for the others.

    zero_grad()  all gradients are 0. Not the model's zero_grad(): p.grad is a view of a bucket
    backward     `microbatches` passes. _arrived counts gradients, and starts to reduce the buckets
                 that are full, in order
    finish()     reduces what backward has not, and waits for all. p.grad is complete on p's owner
    step()       AdamW on this rank's pieces, Muon on its matrices. Each is sent once it is done.
                 Before it clip(grad_norm(), limit), if wanted

    groups_of    beside another technique, as for DDP: advanced/composition.py. If that cuts
                 matrices, give its `update`, too
    options      of PlainMuon: momentum, dtype and update

    Before Muon(...): tie, cast and freeze weights, move the model to one device, and give all ranks
    equal weights. A parameter that got no gradient still moves, by its momentum and its decay.
    Schedulers set learning rates in muon.param_groups."""

    def __init__(
        self,
        parameters,
        group,
        matrices,
        lr=1e-3,
        weight_decay=0.1,  # of each matrix, the embedding too; vectors have none
        microbatches=1,
        groups_of=None,
        **options,
    ):
        # Usually 1. 2 if p is listed twice, as in ddp.py
        grads_per_pass, matrices = Counter(parameters), set(matrices)
        check_muon_arguments(grads_per_pass, matrices, groups_of, options)
        self.group, self.in_grid = group, groups_of is not None
        groups_of = groups_of or (lambda p: (group,))

        # 1  Buckets, in the order in which backward fills them. Each matrix has its own. Vectors
        #    are small: they share one, the last
        self.was_trained = {p: p.requires_grad for p in grads_per_pass}
        trained = [p for p in grads_per_pass if p.requires_grad]
        lists = [[p] for p in reversed(trained) if p.dim() > 1]
        vectors = {}  # {kind: those that share a bucket}
        for p in trained:
            if p.dim() < 2:
                vectors.setdefault((p.dtype, groups_of(p)), []).append(p)
        owners = deal_to_owners([p for p in trained if p in matrices], groups_of)
        self.buckets = []
        for members in [*lists, *vectors.values()]:
            first, grads = members[0], sum(grads_per_pass[p] for p in members)
            # An owner None: AdamW's, of all ranks
            bucket = OwnedBucket(members, owners.get(first), groups_of(first), microbatches * grads)
            self.buckets.append(bucket)

        # 2  Hooks count the gradients
        for bucket in self.buckets:
            for p in bucket.parameters:
                p.register_post_accumulate_grad_hook(functools.partial(self._arrived, bucket))

        # 3  The optimizers step on what this rank owns
        own_matrices, own_pieces = [], []
        for bucket in self.buckets:
            if bucket.owner is None:
                own_pieces += bucket.pieces
            elif bucket.owner == bucket.rank:
                own_matrices += bucket.pieces
        self.muon = PlainMuon([{"params": own_matrices}], lr, weight_decay, **options)
        self.adamw = make_adamw(own_pieces, lr, weight_decay)
        self.optimizers = self.muon, self.adamw

        self.messages = []  # on their way
        self.finished = True  # whether the gradients are summed
        self.zero_grad()

    def zero_grad(self):
        """After an exception in backward on any rank call finish() on all ranks first: reductions
        may still run."""
        if not self.finished and any(b.grads_left < b.grads_per_step for b in self.buckets):
            raise RuntimeError("there was no finish(): gradients would be lost")
        if any(p.requires_grad != trained for p, trained in self.was_trained.items()):
            raise RuntimeError("a parameter was frozen or unfrozen after Muon(...): do it before")
        self.finished = False
        self.reductions_started = 0  # the number of buckets whose reduction has started
        for bucket in self.buckets:
            bucket.gradients.zero_()
            bucket.grads_left = bucket.grads_per_step

    def _arrived(self, bucket, p):  # autograd has added to p.grad
        if bucket.grads_left == 0:  # its gradient would not be summed
            raise RuntimeError(
                "more backward passes than microbatches=, or a backward after finish()"
            )
        if p.grad.untyped_storage()._cdata != bucket.gradients.untyped_storage()._cdata:
            use = "call Muon's zero_grad(), not the model's, and cast or move before Muon(...)"
            raise RuntimeError(f"p.grad was replaced: {use}")
        bucket.grads_left -= 1
        self._start_full_buckets()

    def _start_full_buckets(self):
        # In the same order on all ranks: swapped reductions would add up the wrong buckets,
        # silently. So a bucket that is full early waits for those before it
        for bucket in self.buckets[self.reductions_started :]:
            if bucket.grads_left > 0:
                break
            self.messages += bucket.sum_on_owners()
            self.reductions_started += 1

    def finish(self):
        """grad_norm(), clip(), step() and gather_full() call it, too."""
        if self.finished:
            return
        for bucket in self.buckets:
            bucket.grads_left = 0  # a rank that ran fewer passes must still join the reductions
        self._start_full_buckets()
        self._wait()
        for bucket in self.buckets:
            # A group of `partial` has the ranks at one place of their columns. All columns deal out
            # buckets alike, so all of these ranks own a part of this one, or none does
            for group in bucket.partial if len(bucket.own_gradient) else ():
                dist.all_reduce(bucket.own_gradient, group=group)
        self.finished = True

    def _wait(self):
        for message in self.messages:
            message.wait()
        self.messages = []

    def grad_norm(self):
        """The norm of the whole gradient: a float64 scalar, the same on all ranks."""
        self.finish()
        if self.in_grid:
            raise RuntimeError("other ranks have other parts: take norm_in_grid(gradient_parts())")
        parts = [bucket.own_gradient for bucket in self.buckets]  # each element has one owner
        square = sum(torch.linalg.vector_norm(part, dtype=torch.float64).square() for part in parts)
        dist.all_reduce(square, group=self.group)
        return square.sqrt()

    def clip(self, norm, limit):
        """Scale the gradients so that their norm is at most `limit` (0: leave them)."""
        self.finish()
        if limit > 0:
            scale = (limit / (norm + 1e-6)).clamp(max=1.0)
            for bucket in self.buckets:
                bucket.own_gradient.mul_(scale.to(bucket.gradients.dtype))

    def step(self):
        """Step on what this rank owns. A matrix is sent while its owner iterates on the next."""
        self.finish()
        self.adamw.step()
        [settings] = self.muon.param_groups  # all matrices are in one
        for bucket in self.buckets:
            if bucket.owner == bucket.rank:
                self.muon.step_on(bucket.parameters[0], settings)
            self.messages += bucket.send_from_owners(bucket.weights)
        self._wait()

    # --- beside a step: schedules, checkpoints, whole gradients, the norm beside another technique

    @property
    def param_groups(self):
        return self.muon.param_groups + self.adamw.param_groups  # for learning rates

    def update_weights(self):
        """Bring the owners' weights to all ranks, after a checkpoint filled them."""
        for bucket in self.buckets:
            self.messages += bucket.send_from_owners(bucket.weights)
        self._wait()

    def gather_full(self, named=()):
        """Bring whole gradients to every rank's p.grad, for checks. Returns the list of named."""
        self.finish()
        for bucket in self.buckets:
            self.messages += bucket.send_from_owners(bucket.gradients)
        self._wait()
        return list(named)

    def gradient_parts(self):
        """For norm_in_grid: [(parameter, this rank's part of its gradient, over how many ranks)]"""
        self.finish()
        parts = []
        for bucket in self.buckets:
            ranks = dist.get_world_size(bucket.group)  # each element has one owner of these
            parts += [(p, piece.grad, ranks) for p, piece in zip(bucket.parameters, bucket.pieces)]
        return parts


# --- owners and their buckets


def flops(p):
    """FLOPs of a step's iterations on p, a matrix or a stack; of a shard those on the whole."""
    shape = getattr(p, "placement", {}).get("shape") or p.shape
    m, n = sorted((getattr(p, "matrix_rows", shape[-2]), shape[-1]))
    count = math.prod(shape) // (m * n)
    return count * (20 * m * m * n + 10 * m**3)


def deal_to_owners(matrices, groups_of):
    """{matrix: the rank that owns it, of the group over which its gradient is summed}: the largest
    first, each to the rank with the least to do."""
    owners, loads = {}, {}
    for p in sorted(matrices, key=flops, reverse=True):
        group = groups_of(p)[0]
        load = loads.setdefault(group, [0] * dist.get_world_size(group))
        owners[p] = load.index(min(load))
        load[owners[p]] += flops(p)
    return owners


class OwnedBucket:
    """One flat tensor of weights and one of gradients. Each p and p.grad is a view of them.

        a matrix              | its owner                        |  for Muon
        AdamW's parameters    | rank 0 | rank 1 | ... | rank N-1 |  a slice each: owner is None

    owned           {rank: the slice that it owns}. own_slice: this rank's, maybe empty
    pieces          what this rank owns of each parameter, maybe nothing: for the optimizers
    slices          each parameter's place in the flat tensors: for checkpoints
    partial         groups over which the owners' sums are added up: advanced/composition.py
    grads_left      how many of grads_per_step gradients backward has still to add"""

    def __init__(self, parameters, owner, groups, grads_per_step):
        self.parameters, self.owner = parameters, owner
        self.group, *self.partial = groups
        self.grads_per_step = grads_per_step
        self.rank = dist.get_rank(self.group)
        self.weights = torch.cat([p.detach().flatten() for p in parameters])
        self.gradients = torch.zeros_like(self.weights)
        self.owned = owned_slices(len(self.weights), owner, dist.get_world_size(self.group))
        self.own_slice = self.owned.get(self.rank, slice(0, 0))
        self.own_gradient = self.gradients[self.own_slice]
        self.slices, self.pieces = [], []
        end = 0
        for p in parameters:
            start, end = end, end + p.numel()
            p.data = self.weights[start:end].view_as(p)
            p.grad = self.gradients[start:end].view_as(p)
            self.slices.append(slice(start, end))
            piece = p
            if owner != self.rank:  # this rank owns a part of p, or nothing
                part = slice(max(start, self.own_slice.start), min(end, self.own_slice.stop))
                shape = (1, -1) if p.dim() > 1 else (-1,)  # so that weight decay sees a matrix
                piece = nn.Parameter(self.weights[part].view(shape))
                piece.grad = self.gradients[part].view(shape)
            self.pieces.append(piece)

    def sum_on_owners(self):
        """Start to sum the gradients, each element on its owner alone. Returns the messages: one
        reduce per owner. (A reduce-scatter needs equal parts.)"""
        return [
            dist.reduce(self.gradients[part], group=self.group, group_dst=owner, async_op=True)
            for owner, part in self.owned.items()
        ]

    def send_from_owners(self, flat):
        """Start to bring the owners' elements of `weights` or `gradients` to all."""
        return [
            dist.broadcast(flat[part], group=self.group, group_src=owner, async_op=True)
            for owner, part in self.owned.items()
        ]


def owned_slices(size, owner, ranks):
    """{rank: the elements that it owns}. Without an owner each rank has an equal part of them."""
    if owner is not None:
        return {owner: slice(0, size)}
    ranks = min(ranks, size)  # each has something
    ends = [size * rank // ranks for rank in range(ranks + 1)]
    return {rank: slice(ends[rank], ends[rank + 1]) for rank in range(ranks)}


# --- mistakes that would be silent: refused


def check_muon_arguments(parameters, matrices, groups_of, options):
    cut = any(hasattr(p, "placement") for p in parameters)
    if cut and (groups_of is None or "update" not in options):
        raise ValueError("another technique has cut the model: give groups_of and update")
    if not matrices:
        raise ValueError("no matrices: an iterator used up, or a model for AdamW alone")
    for p in matrices:
        if p not in parameters or p.dim() not in (2, 3):
            raise ValueError(f"{tuple(p.shape)} is no matrix of the model, nor a stack of them")


# --- demo ---

if __name__ == "__main__":  # importing this file needs no model.py
    from model import GPT, Config, OneProcess, Sent, join_ranks, leave, text_batch


def main():
    parser = argparse.ArgumentParser(description="train a GPT in each form, and prove it")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=2, help="of each rank, a step")
    args = parser.parse_args()
    device = join_ranks()
    for form in ("plain", "full"):
        train(form, args, device)
    leave()


class MuonAndAdamW:
    """On one process, and for step_by_owner."""

    def __init__(self, parameters, is_matrix):
        pairs = list(zip(parameters, is_matrix))
        self.muon = PlainMuon([p for p, matrix in pairs if matrix])
        self.adamw = make_adamw([p for p, matrix in pairs if not matrix])

    def zero_grad(self):
        self.muon.zero_grad()
        self.adamw.zero_grad()

    def step(self):
        self.muon.step()
        self.adamw.step()


def train(form, args, device):
    group, m = dist.group.WORLD, args.microbatches
    rank, ranks = dist.get_rank(), dist.get_world_size()
    plain, max_norm = form == "plain", math.inf if form == "plain" else 0.5
    torch.manual_seed(0)  # all ranks draw equal weights
    model = GPT(Config(layers=2, width=32, context=32)).to(device, torch.float64)
    is_matrix = [n.startswith("blocks") and p.dim() > 1 for n, p in model.named_parameters()]
    one = OneProcess(model, functools.partial(MuonAndAdamW, is_matrix=is_matrix))
    for p, q in zip(model.parameters(), one.model.parameters()):
        q.__dict__.update(p.__dict__)  # matrix_rows, which a copy has lost
    if plain:
        optimizer = MuonAndAdamW(model.parameters(), is_matrix)
    else:
        matrices = [p for p, matrix in zip(model.parameters(), is_matrix) if matrix]
        optimizer = Muon(model.parameters(), group, matrices, microbatches=m)
    if rank == 0:
        print(f"{form}, {ranks} ranks, {m} micro-batches")
    for step in range(args.steps):
        tokens, targets, count = text_batch(step, 2 * m * ranks + 1, 32, device)
        rows = torch.arange(len(tokens)).tensor_split(ranks)[rank]  # unequally many
        loss = torch.zeros_like(count, dtype=torch.float64)
        with Sent() as sent:
            optimizer.zero_grad()
            for micro_batch in rows.tensor_split(m):
                x, y = tokens[micro_batch], targets[micro_batch]
                part = model(x, targets=y, target_count=count)  # the sum over y, divided by count
                part.backward()
                loss += part.detach()
            if plain:
                step_by_owner(optimizer.muon, optimizer.adamw, group)
            else:
                optimizer.clip(optimizer.grad_norm(), max_norm)
                optimizer.step()
        dist.all_reduce(loss)  # a rank has its part of the loss, as of the gradients
        alone = one.train_step(tokens, targets, count, max_norm)
        if not plain:
            optimizer.gather_full()
        # In the plain form a matrix's gradient is on its owner, and None elsewhere
        one.compare(step, loss, alone, model.named_parameters())
    r, size = (ranks - 1) / ranks, sum(p.nbytes for p in model.parameters())
    one.prove(sent, "2 r P e, and the norm", 2 * r * size + (0 if plain else 2 * r * 8))


if __name__ == "__main__":
    main()
