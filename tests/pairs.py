"""Two and three copied tops at once, on a model that is not ours: what a user writes to combine
them. A layout says how many ranks share what; `train_layout` trains a few steps.

The model is a chain: an embedding with positions, blocks, a head that is tied where no pipeline
cuts it apart."""

import contextlib

import torch
import torch.distributed as dist
import torch.nn as nn
from foreign import IGNORE, LIMIT, VOCAB, WIDTH, Block, Mixture, causal, mean_loss
from foreign import OPTIMIZERS as MAKE

ROWS, LENGTH, STEPS, MICROBATCHES = 8, 8, 5, 2
EXPERTS = 6


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.position = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        nn.init.normal_(self.token.weight, std=0.2)

    def forward(self, tokens, where):
        return self.token(tokens) + self.position(where)


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, x):
        return self.out(self.norm(x))


class Model(nn.Module):
    """Three blocks, the middle one with a mixture of experts if one is wanted."""

    def __init__(self, experts):
        super().__init__()
        torch.manual_seed(0)
        self.embed = Embedding()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        if experts:
            self.blocks[1].mlp = Mixture()
        self.head = Head()
        self.head.out.weight = self.embed.token.weight
        self.double()

    def forward(self, tokens, where):
        x = self.embed(tokens, where)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Layout:
    """How many ranks share what: dict(dp=2, tp=2), for example. The options:

    data      "ddp", "zero 1", "zero 2", "fsdp"; sums over the dp and the cp ranks
    tensor    "tensor", "sequence"; over tp ranks
    schedule  of a pipeline of pp ranks
    context   "ring", "ulysses"; over cp ranks
    experts   over the dp and cp ranks; islands: each trains by itself"""

    def __init__(
        self,
        optimizer,
        dp=1,
        cp=1,
        tp=1,
        pp=1,
        data="ddp",
        tensor="tensor",
        schedule="1f1b",
        context="ring",
        experts=False,
    ):
        self.cp, self.t, self.tensor, self.context = cp, tp, tensor, context
        self.make, self.data_kind, self.has_experts = MAKE[optimizer], data, experts
        ranks = torch.arange(pp * dp * cp * tp).view(pp, dp * cp, tp)
        self.data = own_group(ranks.transpose(1, 2))
        self.ep = own_group(ranks.transpose(1, 2))  # messages of its own, in an order of their own
        self.tp = own_group(ranks)
        self.pp = own_group(ranks.flatten(1).T)
        self.cps = own_group(ranks.view(pp, dp, cp, tp).transpose(2, 3))
        self.alone = own_group(ranks.unsqueeze(-1))
        self.part, self.parts = dist.get_rank(self.data) // cp, dp
        self.tied = None
        self.model = Model(experts)
        self.names = {p: name for name, p in self.model.named_parameters()}
        if experts:
            self.deal_experts(self.model.blocks[1].mlp)
        if tp > 1:
            self.split_layers()
        if cp > 1:
            self.split_sequences()
        self.scopes, self.schedule = {0: self.model}, None
        if pp > 1:
            self.split_stages(schedule)
        self.parameters = list({p: p for scope in self.scopes.values() for p in scope.parameters()})
        for p in self.parameters:
            p.full_name = self.names[p]
        self.wrap()

    def deal_experts(self, mixture):
        import expert_parallel as ep

        rank, n = dist.get_rank(self.ep), dist.get_world_size(self.ep)
        sizes = ep.expert_counts(EXPERTS, n)
        start = sum(sizes[:rank])
        mixture.experts.mlps = mixture.experts.mlps[start : start + sizes[rank]]
        for p in mixture.experts.parameters():
            p.placement = {"cuts": {0: (self.ep, start, sizes[rank])}, "data": self.alone}
        mixture.dispatch = ep.ExpertDispatch(sizes, self.ep)

    def split_layers(self):
        import tensor_parallel as tp

        enter, leave = tp.Enter, tp.Leave
        if self.tensor == "sequence":
            import sequence_parallel as sp

            enter, leave = sp.Enter, sp.Leave
        for block in self.model.blocks:
            block.attn.norm = nn.Sequential(block.attn.norm, enter(self.tp))
            self.replace(block.attn, "qkv", tp.ColumnParallelLinear)
            self.replace(block.attn, "proj", tp.RowParallelLinear)
            block.attn.proj.leave = leave(self.tp)
            block.attn.heads //= self.t
            if hasattr(block.mlp, "up"):
                block.mlp.norm = nn.Sequential(block.mlp.norm, enter(self.tp))
                self.replace(block.mlp, "up", tp.ColumnParallelLinear)
                self.replace(block.mlp, "down", tp.RowParallelLinear)
                block.mlp.down.leave = leave(self.tp)
        self.replace(self.model.embed, "token", tp.VocabParallelEmbedding)
        self.model.embed.token.leave = leave(self.tp)
        self.model.head.norm = nn.Sequential(self.model.head.norm, enter(self.tp))
        self.replace(self.model.head, "out", tp.ColumnParallelLinear)
        self.model.head.out.weight = self.model.embed.token.weight
        if self.tensor == "sequence":
            sp.mark_partial(self.model.parameters(), self.tp)
        self.criterion = tp.VocabParallelCrossEntropy(VOCAB, self.tp)

    def replace(self, module, name, make):
        """Put a rank's shard of a layer in its place."""
        old = getattr(module, name)
        new = make(old, self.tp)
        setattr(module, name, new)
        for kind in ("weight", "bias"):
            if getattr(old, kind, None) is not None:
                self.names[getattr(new, kind)] = self.names[getattr(old, kind)]

    def split_sequences(self):
        import context_parallel as cp

        core = cp.Ulysses(self.cps, causal) if self.context == "ulysses" else cp.Ring(self.cps)
        for block in self.model.blocks:
            block.attn.core = core
        self.core = core

    def split_stages(self, name):
        import pipeline as pp
        import zero_bubble as zb

        rank, p = dist.get_rank(self.pp), dist.get_world_size(self.pp)
        self.play, self.reduce_tied = pp.play, pp.reduce_tied
        self.schedule = zb.make_schedule(name, p, MICROBATCHES)
        first, last = self.schedule.owner[0], self.schedule.owner[self.schedule.last]
        if first != last:
            old = self.model.embed.token.weight
            weight = nn.Parameter(old.detach().clone())
            weight.__dict__.update(old.__dict__)
            self.names[weight] = self.names[old]
            self.model.head.out.weight = weight
            tied = [self.pp] if p == 2 else [None]
            for copy in (weight, old):
                groups = getattr(copy, "placement", {}).get("partial", [])
                copy.placement = getattr(copy, "placement", {}) | {"partial": [*groups, *tied]}
            self.tied = tied[0]
        pieces = [self.model.embed, *self.model.blocks, self.model.head]
        cuts = torch.arange(len(pieces)).tensor_split(self.schedule.last + 1)
        self.stages = [[pieces[i] for i in cut] for cut in cuts]
        held = self.schedule.stages(rank)
        self.scopes = {stage: nn.ModuleList(self.stages[stage]) for stage in held}
        ranks = dist.get_process_group_ranks(self.pp)
        self.links = own_links(pp, ranks)

    def wrap(self):
        """Make what sums gradients over the data-parallel ranks, and what takes the step."""
        if self.data_kind == "ddp":
            import ddp

            uses = [p for scope in self.scopes.values() for p in scope.parameters()]
            self.sync = ddp.DDP(uses, self.data, MICROBATCHES)
            self.optimizer = self.make(self.parameters)
        elif self.data_kind == "fsdp":
            import fsdp

            self.sync = fsdp.FSDP(
                self.whole(), self.data, self.make, MICROBATCHES, scopes=self.given_scopes()
            )
        else:
            import zero

            stage = int(self.data_kind.split()[1])
            self.sync = zero.ZeRO(
                self.whole(),
                self.data,
                stage,
                self.make,
                MICROBATCHES,
                bucket_bytes=4000,
                scopes=self.given_scopes(),
            )

    def whole(self):
        return self.model if self.schedule is None else nn.ModuleList(self.scopes.values())

    def given_scopes(self):
        return None if self.schedule is None else self.scopes

    # --- a step

    def run(self, tokens, targets, count):
        """This rank's part of the loss, after all backward passes."""
        pieces = []
        for full, fill in ((tokens, 0), (targets, IGNORE)):
            rows = full.tensor_split(self.parts)[self.part]
            if self.cp > 1:
                import context_parallel as cp

                rows = cp.shard_sequence(rows, self.core.positions(LENGTH), fill)
            pieces.append(rows.tensor_split(MICROBATCHES))
        inputs, targets = pieces
        where = self.core.positions(LENGTH) if self.cp > 1 else torch.arange(LENGTH)
        if self.tensor == "sequence" and self.t > 1:
            import sequence_parallel as sp

            where = sp.shard_tokens(where, self.tp)
        if self.schedule is None:
            total = 0.0
            for x, y in zip(inputs, targets):
                loss = self.loss(self.model(x, where), y, count)
                loss.backward()
                total += loss.item()
            return total

        def forward(stage, m, x):
            for piece in self.stages[stage]:
                x = piece(inputs[m], where) if piece is self.model.embed else piece(x)
            return self.loss(x, targets[m], count) if stage == self.schedule.last else x

        shape = (len(inputs[0]), len(where), WIDTH)
        losses = self.play(
            self.schedule, forward, shape, torch.float64, "cpu", self.links, **self.around()
        )
        return float(sum(losses))

    def around(self):
        if self.data_kind == "ddp":
            return {}

        def around(action):
            if action.kind == "F":
                return contextlib.nullcontext()
            return self.sync.backward(action.stage, complete=action.kind != "I")

        return {"around": around}

    def loss(self, logits, targets, count):
        if self.t > 1:
            return self.criterion(logits, targets, count)
        return mean_loss(logits, targets, count)

    def norm(self):
        if self.data_kind != "ddp":
            return self.sync.grad_norm(self.pp if self.schedule else None)
        return grad_norm(self.parameters, self.pp)

    def train(self):
        history = []
        for step in range(STEPS):
            x, y, count = batch(step)
            self.sync.zero_grad()
            loss = torch.tensor(self.run(x, y, count), dtype=torch.float64)
            self.sync.finish()
            dist.all_reduce(loss, group=self.data)
            dist.all_reduce(loss, group=self.pp)
            norm = self.norm()
            if self.data_kind == "ddp":
                nn.utils.clip_grads_with_norm_(self.parameters, LIMIT, norm)
            else:
                self.sync.clip(norm, LIMIT)
            history += [loss.item(), norm.item()]
            found = self.states()
            (self.optimizer if self.data_kind == "ddp" else self.sync).step()
        return history, found, self.states()

    def states(self):
        if self.data_kind == "ddp":
            named = [(self.names[p], p) for p in self.parameters]
        else:
            named = [(p.full_name, p) for p in self.whole().parameters()]
            named = self.sync.gather_full(named)
        return {name: (p.detach().clone(), p.grad.clone(), p) for name, p in named}


def own_group(rows):
    """A group of each row, in the last dimension. Returns this rank's."""
    own = None
    for row in rows.flatten(0, -2).tolist():
        group = dist.new_group(row)
        if dist.get_rank() in row:
            own = group
    return own


def batch(step):
    generator = torch.Generator().manual_seed(step)
    tokens, targets = torch.randint(VOCAB, (2, ROWS, LENGTH), generator=generator)
    targets.view(-1)[torch.randperm(ROWS * LENGTH, generator=generator)[:9]] = IGNORE
    return tokens, targets, torch.tensor(ROWS * LENGTH - 9)


def one_process(optimizer, experts):
    model, history = Model(experts), []
    stepper = MAKE[optimizer](model.parameters())
    for step in range(STEPS):
        x, y, count = batch(step)
        stepper.zero_grad()
        for p in model.parameters():
            p.grad = torch.zeros_like(p)  # AdamW's decay moves an expert without tokens too
        loss = mean_loss(model(x, torch.arange(LENGTH)), y, count)
        loss.backward()
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        nn.utils.clip_grads_with_norm_(model.parameters(), LIMIT, norm)
        history += [loss.item(), norm.item()]
        stepper.step()
    grads = {n: p.grad for n, p in model.named_parameters()}
    return history, grads, {n: p.detach() for n, p in model.named_parameters()}


@torch.no_grad()
def grad_norm(parameters, stages=None):
    """The norm of the whole model's gradient. A parameter's shards are summed over the groups that
    it is cut over; stages: the ranks of a pipeline, which have other parameters each."""
    squares = {}  # groups that parameters are cut over: the sum of their squares
    for p in parameters:
        place = getattr(p, "placement", {})
        groups = tuple(group for group, _, _ in place.get("cuts", {}).values())
        total = squares.setdefault(groups, torch.zeros((), dtype=torch.float64, device=p.device))
        if p.grad is not None and not held_by_earlier_stage(p, stages):
            total += torch.linalg.vector_norm(p.grad, dtype=torch.float64).square()
    for groups, total in squares.items():
        for group in groups:
            dist.all_reduce(total, group=group)
    total = sum(squares.values())
    if stages is not None:
        dist.all_reduce(total, group=stages)
    return total.sqrt()


def held_by_earlier_stage(p, stages):
    """Whether a stage before this one has the same parameter, such as a tied matrix."""
    if stages is None:
        return False
    of_stages = set(dist.get_process_group_ranks(stages))
    for group in getattr(p, "placement", {}).get("partial", ()):
        ranks = dist.get_process_group_ranks(group)
        if of_stages.issuperset(ranks) and dist.get_rank(group) > 0:
            return True
    return False


def own_links(pp, ranks):
    """The links of this rank's pipeline. Every process makes those of all pipelines."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, ranks)
    links = {
        tuple(ranks): pp.make_links(list(ranks))
        for ranks in map(tuple, dict.fromkeys(map(tuple, everyone)))
    }
    return links[tuple(ranks)]
