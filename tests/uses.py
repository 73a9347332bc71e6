"""Copied tops, used rightly to train a model that is not ours: what a user writes who has copied
them. `Layout` says how many ranks share what, cuts the model and trains it. Ranks make these, where
`import ddp` finds the top alone (tops.py)."""

import functools

import torch
import torch.distributed as dist
import torch.nn as nn
from foreign import (
    EXPERTS,
    IGNORE,
    ROWS,
    STEPS,
    VOCAB,
    WIDTH,
    Llama,
    Mixture,
    OneProcess,
    causal,
    is_muons,
    islands_here,
    mean_loss,
    mlp,
    train,
)
from reference import cuts_of, piece
from torch.distributed import group
from torch.utils.checkpoint import checkpoint

TOPS = "collectives ddp zero fsdp tensor_parallel sequence_parallel tensor_overlap pipeline"
TOPS += " zero_bubble dualpipe context_parallel packed_documents expert_parallel muon diloco"
TOPS += " ulysses gather_context composition"
WAYS = {
    "naive": dict(bucket_bytes=0, overlap=False),
    "bucketed": dict(bucket_bytes=800, overlap=False),
    "overlapped": dict(bucket_bytes=800),
}
# Rows of the batch on each data-parallel rank, some more than others
SHARES = {1: [8], 2: [5, 3], 3: [4, 2, 2], 4: [2, 2, 2, 2]}
SHARES_OF_EXPERTS = SHARES | {4: [4, 0, 3, 1]}


def equals_one_process(use, model, optimizer, steps=STEPS, disturb=None):
    """Train: every loss, norm, gradient and weight is that of one process."""
    history, *whole = islands_here(use.islands, model, optimizer, steps)[use.island]
    ours = train(use, steps, disturb)
    parameters, theirs = use.named(), [history]
    for states, full in zip(ours[1:], whole):
        pieces = {name: full[name] for name in states}
        for name, tensor in pieces.items():
            if tensor is not None:
                pieces[name] = use.piece(tensor, parameters[name])
        theirs.append(pieces)
        names = [None] * dist.get_world_size()
        dist.all_gather_object(names, list(states))
        assert set().union(*names) == {*full}, "a parameter is on no rank"
    torch.testing.assert_close(list(ours), theirs, **use.tolerance)


class Layout(OneProcess):
    """dp x cp x tp x pp ranks, tp innermost and pp outermost, on each of the islands. dp is what
    the others leave.

    data      sums gradients over the dp and cp ranks: "ddp", "zero 0", "zero 1", "zero 2", "fsdp",
              "muon", or an all-reduce of collectives.py. None: each technique does so by itself
    tensor    of the tp ranks: "tensor", "sequence", or "stream": embedding and head are whole
    again     whether sequence parallelism gathers a second time in backward
    context   of the cp ranks
    schedule  of the pp ranks
    overlap   whether its pairs overlap: DualPipeV
    ep        how many of the dp x cp ranks share experts: a number, "all", or 0
    plain     whether by plain_dispatch
    order     of a step's forwards and backwards, "FFBB"
    given     options of what data names"""

    def set_up(
        self,
        data=None,
        cp=1,
        tp=1,
        pp=1,
        islands=1,
        tensor="tensor",
        again=False,
        context="ring",
        schedule=None,
        overlap=False,
        ep=0,
        plain=False,
        order=None,
        microbatches=2,
        outer=(),
        **given,
    ):
        self.kind, self.cp, self.t, self.tensor, self.again = data, cp, tp, tensor, again
        self.microbatches, self.order, self.with_experts = microbatches, order, bool(ep)
        dp = dist.get_world_size() // (islands * pp * cp * tp)
        ranks = torch.arange(dist.get_world_size()).view(islands, pp, dp, cp, tp)
        of_data, pipelines = ranks.flatten(2, 3).transpose(2, 3), ranks.flatten(2).transpose(1, 2)
        self.data, self.tp, self.pp = own(of_data), own(ranks), own(pipelines)
        self.cp_group, self.over_islands = own(ranks.transpose(3, 4)), own(ranks.flatten(1).T)
        self.islands, self.island = islands, dist.get_rank(self.over_islands)
        self.share, self.shares = dist.get_rank(self.data) // cp, dp
        self.matrices = {p.full_name for p in self.model.parameters() if is_muons(p)}
        self.criterion, self.stages = mean_loss, None
        self.place = getattr(self.model, "place", None)
        self.turns = None
        if overlap:
            import dualpipe

            self.turns = dualpipe.Turns()
        if ep:
            ep = dp * cp if ep == "all" else ep
            self.deal_experts(of_data.unflatten(-1, (-1, ep)), plain)
        if tp > 1:
            self.split_layers()
        if cp > 1:
            self.core = context_core(context, self.cp_group)
            for block in self.model.blocks:
                block.attn.core = self.core
        if pp > 1:
            self.split_stages(schedule, pipelines.flatten(0, 1).tolist())
        self.wrap(**given)
        self.diloco = None
        if islands > 1:
            import diloco

            stepped = self.trained
            if self.sharded:
                stepped = [p for held in self.sharded.param_groups for p in held["params"]]
            self.diloco = diloco.DiLoCo(stepped, self.over_islands, every=2, **dict(outer))

    def deal_experts(self, ranks, plain):
        import expert_parallel as ep

        # The same ranks as data, perhaps, but messages in an order of their own
        self.ep, self.copies = own(ranks, "experts"), own(ranks.transpose(-1, -2), "copies")
        rank, n = dist.get_rank(self.ep), dist.get_world_size(self.ep)
        sizes = ep.experts_of_ranks(EXPERTS, n)
        start = sum(sizes[:rank])
        for mixture in self.model.modules():
            if not isinstance(mixture, Mixture):
                continue
            mixture.experts.mlps = mixture.experts.mlps[start : start + sizes[rank]]
            for p in mixture.experts.parameters():
                p.placement = {"cuts": {None: (self.ep, start, sizes[rank])}, "data": self.copies}
            dispatch = functools.partial(ep.plain_dispatch, expert_count=EXPERTS, group=self.ep)
            if not plain:
                options = {"before_wait": self.turns.turn} if self.turns else {}
                dispatch = ep.ExpertDispatch(EXPERTS, self.ep, chunks=2, **options)
            mixture.dispatch = dispatch

    def split_layers(self):
        import tensor_overlap
        import tensor_parallel as tp

        enter, leave, model = tp.Enter, tp.Leave, self.model
        self.criterion = tp.VocabParallelCrossEntropy(VOCAB, self.tp)
        if isinstance(model, Llama):
            return split_llama(tp, model.model, self.tp)
        if self.tensor != "tensor":
            import sequence_parallel as sp

            enter, leave = sp.GatherTokens, sp.ReduceScatterTokens

        def cut(module, first, last, **options):
            layer = tp.ColumnParallelLinear(getattr(module, first), self.tp)
            before = tp.Boundary(enter, self.tp)
            project = tensor_overlap.EnterAndProject(before, [layer], **options)
            setattr(module, first, *project.layers)
            module.norm = nn.Sequential(module.norm, project)
            setattr(module, last, tp.RowParallelLinear(getattr(module, last), self.tp, leave))

        for block in model.blocks:
            cut(block.attn, "qkv", "proj")
            block.attn.heads //= self.t
            if not isinstance(block.mlp, Mixture):  # each tp rank has the mixture, whole
                cut(block.mlp, "up", "down", gather_again=self.again)
        if self.tensor == "stream":
            self.criterion = mean_loss
        else:
            model.embed = tp.VocabParallelEmbedding(model.embed, self.tp, leave)
            head = tp.ColumnParallelLinear(model.head, self.tp)
            model.head = nn.Sequential(tp.Boundary(enter, self.tp), head)
            model.head[1].weight = model.embed.weight
        if self.tensor != "tensor":
            sp.mark_partial(model.parameters(), self.tp)
            sp.mark_partial(model.parameters(), self.tp)  # is told already

    def split_stages(self, name, pipelines):
        import dualpipe
        import pipeline as pp
        import zero_bubble as zb

        ranks = dist.get_world_size(self.pp)
        rows = {"gpipe": pp.gpipe, "1f1b": pp.one_f_one_b, "interleaved": pp.interleaved}
        rows |= {"zb-h1": zb.zb_h1, "zb-h2": zb.zb_h2, "zb-v": zb.zb_v}
        rows["dualpipev"] = dualpipe.dualpipev
        self.schedule = pp.Schedule(rows[name](r, ranks, self.microbatches) for r in range(ranks))
        layers = list(self.model)
        self.pipeline = zb.SplitPipeline
        if self.turns:
            self.schedule = dualpipe.PairedSchedule(self.schedule.rows)
            self.pipeline = functools.partial(dualpipe.DualPipeV, turns=self.turns)
        first, last = self.schedule.owner[0], self.schedule.owner[self.schedule.last]
        head = layers[-1][1] if self.t > 1 else layers[-1]
        if first != last and head.weight is layers[0].weight:  # each end gets a copy
            self.ends = own(torch.tensor(pipelines)[:, sorted([first, last])])
            attributes = vars(head.weight)
            head.weight = nn.Parameter(head.weight.detach().clone())
            head.weight.__dict__.update(attributes)
            for p in (layers[0].weight, head.weight):
                place = getattr(p, "placement", {})
                p.placement = place | {"partial": [*place.get("partial", ()), self.ends]}
        parts = pp.cut(layers, self.schedule.last + 1, self.schedule.owner)
        held = self.schedule.stages(dist.get_rank(self.pp))
        self.stages = {stage: nn.Sequential(*parts[stage]) for stage in held}
        self.trained = nn.ModuleList(self.stages.values())
        self.links = own_links(pp.make_links, tuple(map(tuple, pipelines)))
        pp.open_links(self.links, self.schedule, "cpu")

    def wrap(self, way="overlapped", units=None, **options):
        """Make what sums gradients over the data-parallel ranks and takes the step."""
        kind, self.sync, self.sharded = self.kind, None, None
        if kind in ("ddp", "muon", "fsdp", "zero 0", "zero 1", "zero 2") and self.in_grid():
            import composition

            groups_of = composition.groups_in_grid(self.trained.parameters(), self.data)
            options["groups_of"] = groups_of
        # A tied matrix on two stages of this rank is listed twice
        parts = [self.trained] if self.stages is None else self.stages.values()
        listed = [p for part in parts for p in part.parameters()]
        if kind == "ddp":
            import ddp

            self.sync = ddp.DDP(listed, self.data, self.microbatches, **WAYS[way] | options)
        elif kind == "muon":
            import muon

            matrices = [p for p in self.trained.parameters() if p.full_name in self.matrices]
            options = dict(lr=1e-2, microbatches=self.microbatches) | options
            if self.in_grid():
                options["update"] = composition.on_whole_matrices(muon.update_of)
            self.sharded = muon.Muon(listed, self.data, matrices, **options)
            for settings in self.sharded.adamw.param_groups:
                settings["eps"] = 1e-5  # as foreign.py's
        elif kind == "fsdp" or kind in ("zero 0", "zero 1", "zero 2"):
            arguments = self.stages or self.trained, self.data
            options |= dict(make_optimizer=self.make_optimizer, microbatches=self.microbatches)
            if units:
                options["units"] = units(self.model)
            if kind == "fsdp":
                import fsdp

                self.sharded = fsdp.FSDP(*arguments, **options)
            else:
                import zero

                options = {"bucket_bytes": 1000} | options
                self.sharded = zero.ZeRO(*arguments, int(kind[-1]), **options)
            if "param_dtype" in options:
                self.tolerance = dict(rtol=1e-4, atol=1e-5, check_dtype=False)
        elif kind:
            import collectives

            self.all_reduce = collectives.plain_ring_all_reduce
            if kind != "plain":
                self.all_reduce = functools.partial(collectives.all_reduce, algorithm=kind)
            for p in self.model.parameters():
                p.data += dist.get_rank()
                collectives.broadcast(p.data, group_src=0)
        self.sync = self.sync or self.sharded
        self.optimizer = self.sharded or self.make_optimizer(self.trained.parameters())

    def in_grid(self):
        return any(hasattr(p, "placement") for p in self.trained.parameters())

    # --- a step

    def zero_grad(self):
        if self.sync:
            self.sync.zero_grad()
        else:
            super().zero_grad()

    def parts(self, x, y):
        """This rank's part of the batch, in micro-batches."""
        shares = (SHARES_OF_EXPERTS if self.with_experts else SHARES)[self.shares]
        if self.stages:
            shares = [ROWS // self.shares] * self.shares  # the same shapes for all
        x, y = (full.split(shares)[self.share] for full in (x, y))
        where = torch.arange(self.length)
        if self.cp > 1:
            import context_parallel as cp

            where = self.core.positions(self.length)
            x, y = cp.shard_sequence(x, where), cp.shard_sequence(y, where, fill=IGNORE)
        if self.tensor != "tensor":
            import sequence_parallel as sp

            where = sp.shard_tokens(where, self.tp)
            if self.tensor == "stream":
                x, y = sp.shard_tokens(x, self.tp), sp.shard_tokens(y, self.tp)
        if self.place:
            self.place.where = where.clamp(max=self.length - 1)
        return list(zip(x.tensor_split(self.microbatches), y.tensor_split(self.microbatches)))

    def backward(self, x, y, count):
        loss = self.criterion(self.model(x), y, count)
        loss.backward()
        return loss.item()

    def run(self, x, y, count):
        parts = self.parts(x, y)
        if self.stages:
            return self.play(parts, count)
        if not self.order:
            return sum(self.backward(*part, count) for part in parts)
        losses, total = [], 0.0
        for action in self.order:
            if action == "F":
                x, y = parts.pop(0)
                losses.append(self.criterion(self.model(x), y, count))
                total += losses[-1].item()
            else:
                losses.pop(0).backward()
        return total

    def play(self, parts, count):
        def forward(stage, m, x):
            y = self.stages[stage](parts[m][0] if x is None else x)
            return self.criterion(y, parts[m][1], count) if stage == self.schedule.last else y

        length = len(self.place.where) if self.place else self.length
        shape = len(parts[0][0]), length, WIDTH
        around = {"around": self.sync.around} if hasattr(self.sync, "around") else {}
        given = self.schedule, forward, shape, torch.float64, "cpu", self.links
        return float(sum(self.pipeline(*given, **around).run()))

    def finish(self):
        if self.sync:
            return self.sync.finish()
        parameters = list(self.trained.parameters())
        if self.kind:
            super().finish()
            for p in parameters:
                if p.requires_grad:
                    self.all_reduce(p.grad)
        elif self.tensor != "tensor":
            import sequence_parallel

            sequence_parallel.reduce_partial(parameters)
        elif self.stages:
            import pipeline

            for p in parameters:
                if hasattr(p, "placement"):
                    pipeline.reduce_tied(p, self.ends)
        elif self.cp > 1:
            for p in parameters:
                if p.grad is not None:
                    dist.all_reduce(p.grad, group=self.cp_group)
        elif self.with_experts:
            import expert_parallel as ep

            ep.sum_replicated_gradients(parameters, self.ep)
            if dist.get_world_size(self.copies) > 1:
                ep.sum_replicated_gradients(parameters, self.copies)
        super().finish()

    def add_up(self, loss):
        for ranks in (self.data, self.pp) + ((self.tp,) if self.tensor == "stream" else ()):
            dist.all_reduce(loss, group=ranks)

    def norm(self):
        if self.sharded and not self.sharded.in_grid and not self.stages:
            return self.sharded.grad_norm()
        import composition

        parameters, groups = list(self.trained.parameters()), [self.data, self.tp]
        if self.sharded:
            parts = self.sharded.gradient_parts()
        else:
            parts = composition.whole_gradients(parameters)
        norm = composition.norm_in_grid(parts, groups, self.pp if self.stages else None)
        if self.t > 1 and not self.with_experts and not self.sharded and not self.stages:
            import tensor_parallel

            torch.testing.assert_close(tensor_parallel.grad_norm(parameters, self.tp), norm)
        return norm

    def clip(self, norm):
        if self.sharded:
            self.sharded.clip(norm, self.limit)
        else:
            super().clip(norm)

    def step(self):
        self.optimizer.step()
        if self.sharded and self.kind != "muon":
            assert all(p.grad is None for p in self.trained.parameters())
            assert self.gathered() == 0

    def gathered(self):
        """Bytes of weights that stage 3 has gathered and not freed."""
        units = [bucket for bucket in self.sharded.buckets if hasattr(bucket, "users")]
        return sum(bucket.weights.untyped_storage().nbytes() for bucket in units)

    def average(self, last=False):
        if self.diloco:
            moved = self.diloco.step()
            if last:
                self.diloco.finish()
            if self.sharded and (moved or last):
                self.sharded.update_weights()

    def named(self):
        if self.sharded is None:
            return super().named()
        return dict(self.sharded.gather_full([*super().named().items()]))

    def piece(self, full, p):
        return piece(full, cuts_of(p))


def own(rows, purpose=""):
    """This rank's group of those of each row of ranks, or None, made once for a purpose."""
    return make_own(tuple(map(tuple, rows.flatten(0, -2).tolist())), purpose)


@functools.cache
def make_own(rows, purpose):
    groups = [dist.new_group(list(row)) for row in rows]
    return next((group for group in groups if isinstance(group, dist.ProcessGroup)), None)


@functools.cache
def own_links(make_links, rows):
    """The links of this rank's pipeline. All processes make those of all pipelines."""
    links = {row: make_links(list(row)) for row in rows}
    return next(links[row] for row in rows if dist.get_rank() in row)


def context_core(kind, over=group.WORLD):
    import context_parallel as cp

    if "ulysses" in kind:
        import ulysses

    if kind == "ulysses":
        return ulysses.Ulysses(over, causal)
    if kind == "gather":
        import gather_context

        return gather_context.Gather(over)
    if kind == "ring-ulysses":  # four ranks in a square
        square = torch.arange(4).view(2, 2)
        return ulysses.Ulysses(own(square), cp.Ring(own(square.T)))
    return cp.Ring(over, zigzag=kind == "ring")


def split_llama(tp, llama, over):
    """Hugging Face's. Its heads follow from the width of q, k and v."""
    kinds = {"embed_tokens": tp.VocabParallelEmbedding}
    kinds |= dict.fromkeys(("o_proj", "down_proj"), tp.RowParallelLinear)
    for parent in list(llama.modules()):
        for name, child in list(parent.named_children()):
            if name.endswith("norm"):
                setattr(parent, name, nn.Sequential(child, tp.Boundary(tp.Enter, over)))
            elif name in kinds or isinstance(child, nn.Linear):
                kind = kinds.get(name, tp.ColumnParallelLinear)
                setattr(parent, name, kind(child, over))


# --- ZeRO's units behind checkpoints, and passes that are no part of a step


class Recomputed(nn.Module):
    """Blocks behind a checkpoint, which so stands outside their hooks."""

    def __init__(self, *blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        return checkpoint(nn.Sequential(*self.blocks), x, use_reentrant=False)


def in_wrong_order(model):
    """Units in an order that guesses the next one wrongly."""
    return [*reversed(model.blocks), model.head, model.embed]


def recomputed_inside_hooks(model):
    for block in model.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def recomputed_outside_hooks(model, together=1):
    """So many blocks at a time. Returns the units."""
    blocks = list(model.blocks)
    pieces = [blocks[i : i + together] for i in range(0, len(blocks), together)]
    model.blocks = nn.ModuleList(Recomputed(*piece) for piece in pieces)
    return [model.embed, *blocks, model.head]


class Probed(Layout):
    """Asks for gradients that are no pass of a step, and runs a forward without a backward."""

    def backward(self, x, y, count):
        loss, found = super().backward(x, y, count), []
        alone = mlp()
        for p, whole in zip(alone.parameters(), self.named().values()):
            p.data.copy_(whole)
        for model in (self.model, alone):
            vectors = model[0](x).detach().requires_grad_()
            loss_again = mean_loss(model[1:](vectors), y, count)
            found.append(torch.autograd.grad(loss_again, [vectors, model[4].weight]))
        torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)
        return loss

    def step(self):
        with torch.no_grad():
            self.model(torch.zeros(1, 1, dtype=torch.int64))
            assert self.gathered() == 0
        self.model(torch.zeros(1, 1, dtype=torch.int64))
        super().step()


# --- a pipeline on one rank


def play_alone(pp, zb, schedule, last, first=lambda layer, x: layer(x)):
    """Run two stages on this rank, two micro-batches: gradients are a plain backward's."""
    torch.manual_seed(0)
    layers, data = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), torch.randn(2, 3, 4)
    links = [pp.make_links([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]

    def forward(stage, m, x):
        return last(layers[1], x) if stage else first(layers[0], data[m])

    zb.SplitPipeline(schedule, forward, (3, 4), torch.float32, "cpu", links).run()
    gradients = [p.grad for p in layers.parameters()]
    layers.zero_grad()
    for m in range(2):
        forward(1, m, forward(0, m, None)).backward()
    torch.testing.assert_close(gradients, [p.grad for p in layers.parameters()])


def saliency(layer, x):
    y = layer(x).tanh()
    [gradient] = torch.autograd.grad(y.sum(), x, retain_graph=True)
    return (y * gradient).sum()
