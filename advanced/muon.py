"""Muon: each matrix steps along its orthogonalised momentum, on the one rank that owns it.

    gradients of 3 ranks          the owner, alone                            all ranks
    matrix A    g0 + g1 + g2 -->  rank 0: momentum -> Newton-Schulz -> step   --> new A
    matrix B    g0 + g1 + g2 -->  rank 1: momentum -> Newton-Schulz -> step   --> new B
    embedding   g0 + g1 + g2 -->  ranks 0, 1 and 2: AdamW on a third each     --> new embedding

A matrix's momentum, U S V^T in its singular value decomposition, has a few large singular values: a
step along it moves the weights in those directions only. Muon steps along nearly U V^T, so all move
equally far. Five Newton-Schulz steps compute it, from the whole matrix. So ZeRO's slices won't do:
each matrix has one owner.

Split     Each of the layers' matrices goes to one rank, so that all ranks have about equal work.
          All other parameters take AdamW, which works on any piece: each rank owns 1/N of each.
Sent      On average 2 r P e bytes per rank, as in ZeRO-1, with P parameters of e bytes, N ranks,
          r = (N-1)/N. One reduce takes a matrix's gradient to its owner, one broadcast brings the
          new matrix to all. A parameter of AdamW has N owners, so N reduces and N broadcasts.
Held      Weights and gradients whole, and 1/N of the optimizer's states: of a matrix one number per
          element (the momentum), of AdamW's parameters two.
Computed  Per step, on the owner: 20 m^2 n + 10 m^3 FLOPs for a matrix of m x n, m <= n. With m = n
          = 4096 and a million tokens a step that is 2% of the model's own 6 m n a token.
Backward  The model's own. A matrix is reduced as soon as its gradient is there.
Use       For the layers of a language model: a lower loss than AdamW's after as many tokens.
Limits    More ranks than matrices are no faster. Keep weights in float32: in bfloat16 small steps
          and the decay round away. Beside tensor parallelism: the end.

    torchrun --nproc_per_node=4 -m advanced.muon       (needs model.py, to train and prove itself)

Jordan et al. 2024, https://kellerjordan.github.io/posts/muon. Liu et al. 2025, Muon is scalable,
arXiv:2502.16982 (Moonlight: the update's scale, distributed Muon).
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


class PlainMuon(torch.optim.Optimizer):
    """Muon on one process, for matrices and for stacks of them.

    Of a language model these are its layers'. Embedding, head and vectors take make_adamw(), below.

    The update's root mean square is about 0.2, as AdamW's (Moonlight), or less where many singular
    values are tiny. So both take the same learning rate and weight decay. dtype=torch.bfloat16: the
    iteration is faster on GPUs.

    by_heads=True: each head of q, k and v is a matrix of its own (GLM-5, arXiv:2602.15763), so that
    a head with small gradients moves as far as the others. p.matrix_rows, which model.py sets, says
    how many rows a head has."""

    def __init__(
        self, matrices, lr=1e-3, weight_decay=0.1, momentum=0.95, dtype=None, by_heads=False
    ):
        defaults = dict(lr=lr, weight_decay=weight_decay, momentum=momentum, dtype=dtype)
        super().__init__(matrices, defaults)
        self.by_heads = by_heads

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
        rows = getattr(p, "matrix_rows", None) if self.by_heads else None
        p.sub_(lr * update_of(direction, p, rows, settings["dtype"]))


def make_adamw(decayed, undecayed, lr=1e-3, weight_decay=0.1):
    """For the other parameters: embedding and head, and then vectors. GPT-3's betas."""
    groups = [{"params": decayed, "weight_decay": weight_decay}]
    groups += [{"params": undecayed, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr, betas=(0.9, 0.95), fused=True)


def update_of(direction, p, rows, dtype):
    """The orthogonalised direction, scaled to a root mean square of about 0.2. rows: of each matrix
    in p; None: p is one matrix, or a stack of them."""
    cuts = cuts_within(p, rows)
    if cuts:
        return update_of_shard(direction, p, cuts, rows, dtype)
    rows = rows or direction.shape[-2]
    matrices = direction.reshape(-1, rows, direction.shape[-1])  # one, or a stack of them
    # U V^T has the root mean square 1 / sqrt(longer side)
    scale = 0.2 * max(matrices.shape[-2:]) ** 0.5
    return scale * orthogonalize(matrices, dtype).reshape(direction.shape)


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


# --- the same in full: reductions during backward, broadcasts during the step, a norm in which each
#     element counts once, where it is owned, owners with equal work, AdamW on 1/N of the rest


class Muon:
    """Trains `model` over `group`: Muon for `matrices`, AdamW for its other parameters.

    zero_grad()  all gradients are 0. Not the model's zero_grad(): p.grad is a view of a bucket
    backward     `microbatches` passes. _arrived counts gradients, and starts to reduce the buckets
                 that are full, in order
    finish()     reduces what backward has not, and waits for all. p.grad is complete on p's owner
    step()       AdamW on this rank's pieces, Muon on its matrices. Each is sent once it is done.
                 Before it clip(grad_norm(), limit), if wanted

    groups_of    beside another technique: advanced/composition.py. There the model may be {stage:
                 module}, the stages of a pipeline that this rank has
    options      of PlainMuon: momentum, dtype and by_heads

    Before Muon(...): tie, cast and freeze weights, move the model to one device, and give all ranks
    equal weights. A parameter that got no gradient still moves, by its momentum and its decay.
    Schedulers set learning rates in muon.param_groups."""

    def __init__(
        self,
        model,
        group,
        matrices,
        lr=1e-3,
        weight_decay=0.1,  # of each matrix, the embedding too; vectors have none
        microbatches=1,
        groups_of=None,
        **options,
    ):
        stages = model if isinstance(model, dict) else {None: model}
        # A matrix that two stages of a pipeline share gets a gradient from each
        self.uses = Counter(p for module in stages.values() for p in module.parameters())
        if groups_of is None and any(hasattr(p, "placement") for p in self.uses):
            raise ValueError("another technique has cut the model: give groups_of")
        self.in_grid, self.groups_of = groups_of is not None, groups_of or (lambda p: (group,))
        self.model = model = nn.ModuleList(stages.values()) if isinstance(model, dict) else model
        self.group, self.microbatches = group, microbatches
        matrices = set(matrices)
        if not matrices:
            raise ValueError("no matrices: an iterator used up, or a model for AdamW alone")
        for p in matrices:
            if p not in self.uses or p.dim() not in (2, 3):
                raise ValueError(f"{tuple(p.shape)} is no matrix of the model, nor a stack of them")

        # 1  Buckets, in the order in which backward fills them. Each matrix has its own. Vectors
        #    are small: they share one, the last
        trained = [p for p in model.parameters() if p.requires_grad]
        lists = [[p] for p in reversed(trained) if p.dim() > 1]
        vectors = {}  # {kind: those that share a bucket}
        for p in trained:
            if p.dim() < 2:
                vectors.setdefault((p.dtype, self.groups_of(p)), []).append(p)
        by_heads = options.get("by_heads", False)
        owners = self.owners_of([p for p in trained if p in matrices], by_heads)
        self.buckets = []
        for parameters in [*lists, *vectors.values()]:
            owner = owners.get(parameters[0])  # None: AdamW's, of all ranks
            self.buckets.append(self.make_bucket(parameters, owner))

        # 2  Hooks count the gradients
        for bucket in self.buckets:
            for p in bucket.parameters:
                p.register_post_accumulate_grad_hook(functools.partial(self._arrived, bucket))

        # 3  The optimizers step on what this rank owns
        own_matrices, decayed, undecayed = [], [], []
        for bucket in self.buckets:
            if bucket.owner == bucket.rank:
                own_matrices += bucket.pieces
            elif bucket.owner is None and bucket.parameters[0].dim() > 1:
                decayed += bucket.pieces
            elif bucket.owner is None:
                undecayed += bucket.pieces
        self.muon = PlainMuon([{"params": own_matrices}], lr, weight_decay, **options)
        self.adamw = make_adamw(decayed, undecayed, lr, weight_decay)
        self.optimizers = self.muon, self.adamw

        self.addresses = self.find_addresses()
        self.messages = []  # on their way
        self.finished = True  # whether the gradients are summed
        self.zero_grad()

    def zero_grad(self):
        """After an exception in backward on any rank call finish() on all ranks first: reductions
        may still run."""
        self.check_addresses()
        if not self.finished and any(b.grads_left < b.grads_per_step for b in self.buckets):
            raise RuntimeError("there was no finish(): gradients would be lost")
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
        """grad_norm(), step() and gather_full() call it, too."""
        if self.finished:
            return
        self.check_addresses()
        for bucket in self.buckets:
            bucket.grads_left = 0  # a rank that ran fewer passes must still join the reductions
        self._start_full_buckets()
        self._wait()
        for bucket in self.buckets:
            # The same rank of each column owns a bucket: all of a group have a part of it, or none
            for group in bucket.partial if len(bucket.own_gradient) else ():
                dist.all_reduce(bucket.own_gradient, group=group)
        self.finished = True

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

    def _wait(self):
        for message in self.messages:
            message.wait()
        self.messages = []

    def find_addresses(self):  # of weights and gradients
        trained = [p for p in self.model.parameters() if p.requires_grad]
        return {p: (p.data_ptr(), p.grad is not None and p.grad.data_ptr()) for p in trained}

    def check_addresses(self):
        if self.find_addresses() != self.addresses:
            raise RuntimeError(
                "p.grad was replaced: call Muon's zero_grad(), not the model's. Or a parameter was"
                " replaced, moved, cast, frozen or unfrozen: do that before Muon(...)"
            )

    # --- beside a step: schedules, checkpoints, whole gradients

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

    # --- beside another technique: advanced/composition.py

    def gradient_parts(self):
        """For the norm: [(parameter, this rank's part of its gradient, split over how many)]."""
        self.finish()
        parts = []
        for bucket in self.buckets:
            ranks = dist.get_world_size(bucket.group)  # each element has one owner of these
            parts += [(p, piece.grad, ranks) for p, piece in zip(bucket.parameters, bucket.pieces)]
        return parts

    def owners_of(self, matrices, by_heads):
        owners, alike = {}, {}  # alike: {data group: matrices}. Experts have their own replicas
        for p in matrices:
            alike.setdefault(self.groups_of(p)[0], []).append(p)
        for group, members in alike.items():
            work = functools.partial(flops, by_heads=by_heads)
            owners |= deal_to_owners(members, dist.get_world_size(group), work)
        return owners

    def make_bucket(self, parameters, owner):
        group, *partial = self.groups_of(parameters[0])
        grads_per_pass = sum(self.uses[p] for p in parameters)
        bucket = OwnedBucket(parameters, owner, group, self.microbatches * grads_per_pass)
        bucket.partial = partial
        return bucket


# --- owners and their buckets


def flops(p, by_heads=False):
    """FLOPs of a step's iterations on p, a matrix or a stack; of a shard those on the whole."""
    shape = getattr(p, "placement", {}).get("shape") or p.shape
    rows = getattr(p, "matrix_rows", shape[-2]) if by_heads else shape[-2]
    m, n = sorted((rows, shape[-1]))
    count = math.prod(shape) // (m * n)
    return count * (20 * m * m * n + 10 * m**3)


def deal_to_owners(matrices, ranks, work=flops):
    """{matrix: the rank that owns it}: the largest first, each to the rank with the least to do."""
    owners, loads = {}, [0] * ranks
    for p in sorted(matrices, key=work, reverse=True):
        owners[p] = loads.index(min(loads))
        loads[owners[p]] += work(p)
    return owners


class OwnedBucket:
    """One flat tensor of weights and one of gradients. Each p and p.grad is a view of them.

        a matrix              | its owner                        |  for Muon
        AdamW's parameters    | rank 0 | rank 1 | ... | rank N-1 |  a slice each: owner is None

    owned           {rank: the slice that it owns}. own_slice: this rank's, maybe empty
    pieces          what this rank owns of each parameter, maybe nothing: for the optimizers
    slices          each parameter's place in the flat tensors: for checkpoints
    grads_left      how many of grads_per_step gradients backward has still to add"""

    def __init__(self, parameters, owner, group, grads_per_step):
        self.parameters, self.owner, self.group = parameters, owner, group
        self.grads_per_step = grads_per_step
        self.rank = dist.get_rank(group)
        self.weights = torch.cat([p.detach().flatten() for p in parameters])
        self.gradients = torch.zeros_like(self.weights)
        self.owned = owned_slices(len(self.weights), owner, dist.get_world_size(group))
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
                piece = nn.Parameter(self.weights[part])
                piece.grad = self.gradients[part]
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


# --- beside tensor parallelism


def cuts_within(p, rows=None):
    """The cuts that leave no rank a whole matrix, as [(dimension, cut)]. The last two dimensions
    are a matrix's. A cut of an earlier one only deals out whole experts. rows: of each head, which
    is a matrix: a cut of p's rows lies between heads."""
    within = [p.dim() - 1] if rows else [p.dim() - 2, p.dim() - 1]
    cuts = getattr(p, "placement", {}).get("cuts", {})
    return [(dim, cut) for dim, cut in cuts.items() if dim in within]


def update_of_shard(direction, p, cuts, rows, dtype):
    """With tensor parallelism. Momentum and weight decay work element by element: they stay with
    the shards. Only the iteration needs the whole matrix. All columns deal out their shards alike,
    so the owners of a matrix are in one row of the grid. They gather the direction, all iterate on
    the whole, and each keeps its part."""
    [(dim, (group, start, length))] = cuts  # tensor parallelism cuts in one dimension
    shards = [torch.empty_like(direction) for _ in range(dist.get_world_size(group))]
    dist.all_gather(shards, direction, group=group)
    # Without the padding of the last shards, so that the scale is that of the true shape
    whole = torch.cat(shards, dim).narrow(dim, 0, p.placement["shape"][dim])
    update = update_of(whole, whole, rows, dtype).narrow(dim, start, length)
    part = torch.zeros_like(p)  # padded again
    part.narrow(dim, 0, length).copy_(update)
    return part


# --- demo ---

if __name__ == "__main__":  # importing this file needs no model.py
    from model import GPT, Config, OneProcess, Sent, join_ranks, leave, text_batch


def main():
    parser = argparse.ArgumentParser(description="train a GPT in each form, and prove it")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=2, help="of each rank, a step")
    args = parser.parse_args()
    device = join_ranks()
    for form in ("plain", "full", "full, by heads"):
        train(form, args, device)
    leave()


class MuonAndAdamW:
    """On one process, and for step_by_owner."""

    def __init__(self, parameters, is_matrix, **options):
        kinds = {True: [], "decayed": [], "undecayed": []}
        for p, matrix in zip(parameters, is_matrix):
            kinds[matrix or ("decayed" if p.dim() > 1 else "undecayed")].append(p)
        matrices, *others = kinds.values()
        self.muon, self.adamw = PlainMuon(matrices, **options), make_adamw(*others)

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
    options = {"by_heads": "by heads" in form}
    make_optimizer = functools.partial(MuonAndAdamW, is_matrix=is_matrix, **options)
    one = OneProcess(model, make_optimizer)
    for p, q in zip(model.parameters(), one.model.parameters()):
        q.__dict__.update(p.__dict__)  # matrix_rows, which a copy has lost
    if plain:
        optimizer = make_optimizer(model.parameters())
    else:
        matrices = [p for p, matrix in zip(model.parameters(), is_matrix) if matrix]
        optimizer = Muon(model, group, matrices, microbatches=m, **options)
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
        gradients, weights = [], []
        for (name, p), q in zip(model.named_parameters(), one.model.parameters()):
            weights.append((name, p.data, q.data))
            if p.grad is not None:  # in the plain form a matrix's gradient is on its owner
                gradients.append((name, p.grad, q.grad))
        one.compare(step, loss, alone, gradients, weights)
    r, size = (ranks - 1) / ranks, sum(p.nbytes for p in model.parameters())
    one.prove(sent, "2 r P e, and the norm", 2 * r * size + (0 if plain else 2 * r * 8))


if __name__ == "__main__":
    main()
