"""Two and three techniques at once, on a model that is not ours: what a user writes who has copied
their tops. `Layout` says how many ranks share what, cuts the model and trains it."""

import functools

import torch
import torch.distributed as dist
import torch.nn as nn
from foreign import IGNORE, LIMIT, OPTIMIZERS, VOCAB, WIDTH, Block, Mixture, causal, mean_loss

ROWS, LENGTH, STEPS, MICROBATCHES, EXPERTS = 8, 8, 5, 2, 6
EVERY = 2  # steps between DiLoCo's averages


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.position = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        nn.init.normal_(self.token.weight, std=0.2)

    def forward(self, tokens, positions=None):
        positions = torch.arange(tokens.shape[1]) if positions is None else positions
        return self.token(tokens) + self.position(positions)


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, x):
        return self.out(self.norm(x))


class Model(nn.Module):
    """Three blocks, and a head that is tied. The middle block may have a mixture of experts."""

    def __init__(self, experts=False, tied=True):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = Embedding(), Head()
        self.blocks = nn.ModuleList(Block(heads=4) for _ in range(3))
        if experts:
            self.blocks[1].mlp = Mixture()
        if tied:
            self.head.out.weight = self.embed.token.weight
        self.double()
        for name, p in self.named_parameters():
            p.full_name = name  # techniques pass attributes on

    def forward(self, tokens, positions=None):
        x = self.embed(tokens, positions)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(step, island=0):
    """Tokens, targets, nine of which don't count, and the number of those that do."""
    generator = torch.Generator().manual_seed(step + 100 * island)
    tokens, targets = torch.randint(VOCAB, (2, ROWS, LENGTH), generator=generator)
    targets.view(-1)[torch.randperm(ROWS * LENGTH, generator=generator)[:9]] = IGNORE
    return tokens, targets, torch.tensor(ROWS * LENGTH - 9)


def one_process(optimizer, experts=False, tied=True, islands=1):
    """Of each island (losses and norms, {name: last step's gradient}, {name: weight after it}).
    Several islands average how far they have moved, after every EVERY steps and the last."""
    models = [Model(experts, tied) for _ in range(islands)]
    optimizers = [OPTIMIZERS[optimizer](model.parameters()) for model in models]
    old = [p.detach().clone() for p in models[0].parameters()]
    outer = torch.optim.SGD(old, lr=0.7, momentum=0.9, nesterov=True)
    history = [[] for _ in models]
    for step in range(STEPS):
        for island, model in enumerate(models):
            history[island] += train_step(model, optimizers[island], *batch(step, island))
        if islands > 1 and ((step + 1) % EVERY == 0 or step + 1 == STEPS):
            everywhere = list(zip(old, *(model.parameters() for model in models)))
            for start, *ends in everywhere:
                start.grad = sum(start - p.detach() for p in ends) / islands
            outer.step()
            for start, *ends in everywhere:
                for p in ends:
                    p.data.copy_(start)
    found = []
    for island, model in enumerate(models):
        named = dict(model.named_parameters())
        gradients = {name: p.grad for name, p in named.items()}
        found.append((history[island], gradients, {name: p.detach() for name, p in named.items()}))
    return found


def train_step(model, optimizer, tokens, targets, count):
    """[loss, norm]"""
    for p in model.parameters():
        p.grad = torch.zeros_like(p)  # AdamW's decay moves an expert without tokens too
    loss = mean_loss(model(tokens), targets, count)
    loss.backward()
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    nn.utils.clip_grads_with_norm_(model.parameters(), LIMIT, norm)
    optimizer.step()
    return [loss.item(), norm.item()]


class Layout:
    """dp x cp x tp x pp ranks, tp innermost and pp outermost, on each of the islands.

    data      sums gradients over the dp and cp ranks: "ddp", "zero 1", "zero 2", "fsdp", "muon"
    tensor    of the tp ranks: "tensor", "sequence"
    context   of the cp ranks: "ring", "ulysses"
    schedule  of the pp ranks
    experts   whether experts are dealt out to the dp and cp ranks"""

    def __init__(
        self,
        data,
        optimizer,
        dp=1,
        cp=1,
        tp=1,
        pp=1,
        tensor="tensor",
        context="ring",
        schedule=None,
        experts=False,
        islands=1,
    ):
        self.cp, self.t, self.is_sequence = cp, tp, tp > 1 and tensor == "sequence"
        self.kind, self.make_optimizer = data, OPTIMIZERS[optimizer]
        ranks = torch.arange(islands * pp * dp * cp * tp).view(islands, pp, dp, cp, tp)
        of_data, pipelines = ranks.flatten(2, 3).transpose(2, 3), ranks.flatten(2).transpose(1, 2)
        self.data, self.tp, self.pp = own(of_data), own(ranks), own(pipelines)
        self.pipelines = tuple(map(tuple, pipelines.flatten(0, 1).tolist()))
        self.cp_group, self.islands = own(ranks.transpose(3, 4)), own(ranks.flatten(1).T)
        self.island = dist.get_rank(self.islands)
        # The same ranks as data, but messages in an order of their own
        self.ep, self.alone = own(of_data, "experts"), own(ranks.unsqueeze(-1))
        self.part, self.parts = dist.get_rank(self.data) // cp, dp
        self.model = Model(experts)
        if experts:
            self.deal_experts(self.model.blocks[1].mlp)
        if tp > 1:
            self.split_layers()
        if cp > 1:
            self.split_sequences(context)
        self.stages, self.schedule, self.trained = None, None, self.model
        if pp > 1:
            self.split_stages(schedule)
        self.parameters, self.prepared = list(self.trained.parameters()), False
        self.wrap()

    def deal_experts(self, mixture):
        import expert_parallel as ep

        rank, n = dist.get_rank(self.ep), dist.get_world_size(self.ep)
        sizes = ep.expert_counts(EXPERTS, n)
        start = sum(sizes[:rank])
        mixture.experts.mlps = mixture.experts.mlps[start : start + sizes[rank]]
        for p in mixture.experts.parameters():
            p.placement = {"cuts": {None: (self.ep, start, sizes[rank])}, "data": self.alone}
        mixture.dispatch = ep.ExpertDispatch(sizes, self.ep)

    def split_layers(self):
        import tensor_parallel as tp

        enter, leave = tp.Enter, tp.Leave
        if self.is_sequence:
            import sequence_parallel as sp

            enter, leave = sp.SequenceEnter, sp.SequenceLeave

        def cut(module, first, last):
            module.norm = nn.Sequential(module.norm, enter(self.tp))
            setattr(module, first, tp.ColumnParallelLinear(getattr(module, first), self.tp))
            setattr(module, last, tp.RowParallelLinear(getattr(module, last), self.tp))
            getattr(module, last).leave = leave(self.tp)

        for block in self.model.blocks:
            cut(block.attn, "qkv", "proj")
            block.attn.heads //= self.t
            if not isinstance(block.mlp, Mixture):  # each tp rank has the mixture, whole
                cut(block.mlp, "up", "down")
        embed, head = self.model.embed, self.model.head
        embed.token = tp.VocabParallelEmbedding(embed.token, self.tp)
        embed.token.leave = leave(self.tp)
        head.norm = nn.Sequential(head.norm, enter(self.tp))
        head.out = tp.ColumnParallelLinear(head.out, self.tp)
        head.out.weight = embed.token.weight
        self.criterion = tp.VocabParallelCrossEntropy(VOCAB, self.tp)
        if self.is_sequence:
            sp.mark_partial(self.model.parameters(), self.tp)

    def split_sequences(self, kind):
        import context_parallel as cp

        group = self.cp_group
        self.core = cp.Ulysses(group, causal) if kind == "ulysses" else cp.Ring(group)
        for block in self.model.blocks:
            block.attn.core = self.core

    def split_stages(self, name):
        import pipeline as pp
        import zero_bubble as zb

        self.schedule = zb.find_schedule(name, dist.get_world_size(self.pp), MICROBATCHES)
        embed, head = self.model.embed, self.model.head
        if self.schedule.owner[0] != self.schedule.owner[self.schedule.last]:
            weight = embed.token.weight  # each end gets a copy
            head.out.weight = nn.Parameter(weight.detach().clone())
            head.out.weight.__dict__.update(weight.__dict__)
            for p in (weight, head.out.weight):
                place = getattr(p, "placement", {})
                p.placement = place | {"partial": [*place.get("partial", ()), self.pp]}
        layers = [embed, *self.model.blocks, head]
        cuts = torch.arange(len(layers)).tensor_split(self.schedule.last + 1)
        self.stages = {}
        for stage in self.schedule.stages(dist.get_rank(self.pp)):
            self.stages[stage] = nn.ModuleList(layers[i] for i in cuts[stage])
        self.trained = nn.ModuleList(self.stages.values())
        self.pp_top, self.links = pp, own_links(pp.make_links, self.pipelines)

    def wrap(self):
        """Make what sums gradients over the data-parallel ranks and takes the step."""
        if self.kind == "ddp":
            import ddp
            import tensor_parallel

            self.grad_norm = tensor_parallel.grad_norm
            # A tied matrix on two stages of this rank is listed twice
            parts = [self.trained] if self.stages is None else self.stages.values()
            uses = [p for part in parts for p in part.parameters()]
            self.sync = ddp.DDP(uses, self.data, MICROBATCHES)
            self.optimizer = self.make_optimizer(self.parameters)
            return
        options = dict(microbatches=MICROBATCHES, scopes=self.stages)
        if self.kind == "muon":
            from foreign import is_muons

            import muon

            whole = Model(any("experts" in p.full_name for p in self.parameters))
            names = {p.full_name for p in whole.parameters() if is_muons(p)}
            matrices = [p for p in self.parameters if p.full_name in names]
            options = dict(lr=1e-2, microbatches=MICROBATCHES, bucket_bytes=4000)
            options["stages"] = list(self.stages.values()) if self.stages else None
            self.sync = muon.Muon(self.trained, self.data, matrices, **options)
            for settings in self.sync.adamw.param_groups:
                settings["eps"] = 1e-5  # as foreign.py's
        elif self.kind == "fsdp":
            import fsdp

            self.sync = fsdp.FSDP(self.trained, self.data, self.make_optimizer, **options)
        else:
            import zero

            stage = int(self.kind.removeprefix("zero "))
            make = self.make_optimizer
            self.sync = zero.ZeRO(
                self.trained, self.data, stage, make, bucket_bytes=4000, **options
            )
        self.optimizer = self.sync

    def average(self):
        """What averages over the islands that which this rank's optimizer steps on."""
        import diloco

        stepped = [p for group in self.optimizer.param_groups for p in group["params"]]
        return diloco.DiLoCo(stepped, self.islands, EVERY)

    # --- a step

    def run(self, tokens, targets, count):
        """This rank's part of the loss, after all backward passes."""
        positions = torch.arange(LENGTH)
        rows = [full.tensor_split(self.parts)[self.part] for full in (tokens, targets)]
        if self.cp > 1:
            import context_parallel as cp

            positions = self.core.positions(LENGTH)
            rows = [cp.shard_sequence(rows[0], positions), cp.shard_sequence(rows[1], positions)]
        if self.is_sequence:
            import sequence_parallel as sp

            positions = sp.shard_tokens(positions, self.tp)
        inputs, targets = (full.tensor_split(MICROBATCHES) for full in rows)
        if self.stages is None:
            losses = []
            for x, y in zip(inputs, targets):
                loss = self.loss(self.model(x, positions), y, count)
                loss.backward()
                losses.append(loss.detach())
            return sum(losses)

        def forward(stage, m, x):
            for layer in self.stages[stage]:
                x = layer(inputs[m], positions) if x is None else layer(x)
            return self.loss(x, targets[m], count) if stage == self.schedule.last else x

        around = {"around": self.sync.around} if self.kind in ("zero 2", "fsdp") else {}
        shape = len(inputs[0]), len(positions), WIDTH
        given = self.schedule, forward, shape, torch.float64, "cpu", self.links
        pipeline = self.pp_top.Pipeline(*given, **around)
        if not self.prepared:
            self.prepared = True
            pipeline.prepare()
            assert all(p.grad is None or not p.grad.any() for p in self.parameters)
        return sum(pipeline.run(), torch.zeros((), dtype=torch.float64))

    def loss(self, logits, targets, count):
        criterion = self.criterion if self.t > 1 else mean_loss
        return criterion(logits, targets, count)

    def train(self):
        """(losses and norms, {name: gradient of the last step}, {name: weight after it}, and for
        each name the function that takes this rank's shard of a whole)."""
        history, stages = [], self.pp if self.stages else None
        diloco = self.average() if dist.get_world_size(self.islands) > 1 else None
        for step in range(STEPS):
            self.sync.zero_grad()
            loss = self.run(*batch(step, self.island))
            self.sync.finish()
            for group in (self.data, self.pp):
                dist.all_reduce(loss, group=group)
            if self.kind == "ddp":
                norm = self.grad_norm(self.parameters, stages)
                nn.utils.clip_grads_with_norm_(self.parameters, LIMIT, norm)
            else:
                norm = self.sync.grad_norm(stages)
                self.sync.clip(norm, LIMIT)
            history += [loss.item(), norm.item()]
            gradients = {name: p.grad.clone() for name, p in self.named()}
            self.optimizer.step()
            if diloco and diloco.step() and self.kind != "ddp":
                self.sync.reload()
        if diloco:
            diloco.finish()
            if self.kind != "ddp":
                self.sync.reload()
        named = dict(self.named())
        return history, gradients, {name: p.detach() for name, p in named.items()}, named

    def named(self):
        named = [(p.full_name, p) for p in self.trained.parameters()]
        if self.kind == "muon":
            self.sync.gather_gradients()
        return named if self.kind in ("ddp", "muon") else self.sync.gather_full(named)


def own(rows, purpose=""):
    """This rank's group of those of each row of ranks. A process makes them once for a purpose."""
    return make_own(tuple(map(tuple, rows.flatten(0, -2).tolist())), purpose)


@functools.cache
def make_own(rows, purpose):
    groups = [dist.new_group(list(row)) for row in rows]
    return next(group for group in groups if isinstance(group, dist.ProcessGroup))


@functools.cache
def own_links(make_links, rows):
    """The links of this rank's pipeline. All processes make those of all pipelines."""
    links = {row: make_links(list(row)) for row in rows}
    return next(links[row] for row in rows if dist.get_rank() in row)
