"""Each technique's copied top, used rightly to train a model that is not ours. Ranks make these,
where `import ddp` finds the top alone (tops.py)."""

import functools

import torch
import torch.distributed as dist
import torch.nn as nn
from foreign import (
    EXPERTS,
    LENGTH,
    ROWS,
    STEPS,
    VOCAB,
    WIDTH,
    OneProcess,
    causal,
    is_muons,
    mean_loss,
    mlp,
    one_process,
    train,
)
from reference import cuts_of, piece
from tops import run_usage, usage
from torch.distributed import group
from torch.utils.checkpoint import checkpoint


def equals_one_process(use, model, optimizer, steps=STEPS, disturb=None):
    """Train: every loss, norm, gradient and weight is that of one process."""
    history, *whole = one_process(model, optimizer, steps, use.limit, use.zeros)
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
        assert set().union(*names) in ({*full}, set()), "a parameter is on no rank"
    torch.testing.assert_close(list(ours), theirs, **use.tolerance)


# --- the batch is split


class DataParallel(OneProcess):
    """Ranks have rows of their own, some more than others, in micro-batches."""

    zeros = True
    losses_add_up = True
    shares = {1: [8], 2: [5, 3], 3: [4, 2, 2], 4: [2, 2, 2, 2]}

    def rows(self):
        return super().rows().split(self.shares[dist.get_world_size()])[dist.get_rank()]


class Collectives(DataParallel):
    """An all-reduce a parameter, by hand."""

    files = "collectives"

    def set_up(self, algorithm=None):
        import collectives

        self.all_reduce = collectives.plain_ring_all_reduce
        if algorithm is not None:
            self.all_reduce = functools.partial(collectives.all_reduce, algorithm=algorithm)
        for p in self.model.parameters():
            p.data += dist.get_rank()
            collectives.broadcast(p.data, group_src=0)
        super().set_up()

    def finish(self):
        for p in self.model.parameters():
            if p.requires_grad:
                self.all_reduce(p.grad)


class DDP(DataParallel):
    files = "ddp"
    ways = {
        "naive": dict(bucket_bytes=0, overlap=False),
        "bucketed": dict(bucket_bytes=800, overlap=False),
        "overlapped": dict(bucket_bytes=800),
    }

    def set_up(self, way="overlapped", microbatches=2, **options):
        import ddp

        self.microbatches, options = microbatches, self.ways[way] | options
        parameters = self.model.parameters()
        self.sync = ddp.DDP(parameters, group.WORLD, microbatches, **options)
        self.finish = self.sync.finish
        super().set_up()

    def zero_grad(self, give_up=False):
        self.sync.zero_grad(give_up)


class Recomputed(nn.Module):
    """Blocks behind a checkpoint, which so stands outside their hooks."""

    def __init__(self, *blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        return checkpoint(nn.Sequential(*self.blocks), x, use_reentrant=False)


def recomputed_inside_hooks(model):
    for block in model.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def recomputed_outside_hooks(model, together=1):
    """So many blocks at a time. Returns the units."""
    blocks = list(model.blocks)
    pieces = [blocks[i : i + together] for i in range(0, len(blocks), together)]
    model.blocks = nn.ModuleList(Recomputed(*piece) for piece in pieces)
    return [model.embed, *blocks, model.head]


class ZeRO(DataParallel):
    """units(model) gives the units of stage 3. order: of a step's forwards and backwards, "FFBB".
    native: reduce-scatter as on nccl."""

    files = "zero fsdp"

    def set_up(self, stage, microbatches=2, units=None, order=None, native=False, **options):
        import zero

        self.stage, self.microbatches = stage, microbatches
        self.order = order or "FB" * microbatches
        make = self.make_optimizer, microbatches
        if units:
            options["units"] = units(self.model)
        if stage == 3:
            import fsdp

            self.sharded = fsdp.FSDP(self.model, group.WORLD, *make, **options)
        else:
            options = {"bucket_bytes": 1000} | options
            self.sharded = zero.ZeRO(self.model, group.WORLD, stage, *make, **options)
        if native:
            self.sharded.reduce_scatter = zero.reduce_scatter_tensor
        self.zero_grad, self.finish = self.sharded.zero_grad, self.sharded.finish
        self.norm = self.sharded.grad_norm
        if "param_dtype" in options:
            self.tolerance = dict(rtol=1e-4, atol=1e-5, check_dtype=False)

    def run(self, x, y, count):
        if self.order == "FB" * self.microbatches:
            return super().run(x, y, count)
        parts, losses, total = iter(self.parts(x, y)), [], 0.0
        for action in self.order:
            if action == "F":
                x, y = next(parts)
                losses.append(mean_loss(self.model(x), y, count))
                total += losses[-1].item()
            else:
                losses.pop(0).backward()
        return total

    def clip(self, norm):
        self.sharded.clip(norm, self.limit)

    def step(self):
        self.sharded.step()
        assert all(p.grad is None for p in self.model.parameters())
        assert self.gathered() == 0

    def gathered(self):
        """Bytes of weights that stage 3 has gathered and not freed."""
        units = [bucket for bucket in self.sharded.buckets if hasattr(bucket, "users")]
        return sum(bucket.weights.untyped_storage().nbytes() for bucket in units)

    def named(self):
        found = self.sharded.gather_full(self.model.named_parameters())
        return dict(zip(self.names, (p for _, p in found), strict=True))


class Muon(DataParallel):
    files = "muon"

    def set_up(self, microbatches=2):
        import muon

        self.microbatches = microbatches
        matrices = [p for p in self.model.parameters() if is_muons(p)]
        options = dict(lr=1e-2, microbatches=microbatches, bucket_bytes=1000)
        self.sharded = muon.Muon(self.model, group.WORLD, matrices, **options)
        for options in self.sharded.adamw.param_groups:
            options["eps"] = 1e-5  # as foreign.py's
        self.zero_grad, self.finish = self.sharded.zero_grad, self.sharded.finish
        self.norm, self.step = self.sharded.grad_norm, self.sharded.step

    def clip(self, norm):
        self.sharded.clip(norm, self.limit)

    def gradients(self):
        self.sharded.gather_gradients()
        return super().gradients()


class PlainFSDP(DataParallel):
    """A unit for each layer."""

    files = "zero fsdp"
    limit = 0

    def set_up(self):
        import fsdp

        layers = [layer for layer in self.model if next(layer.parameters(), None) is not None]
        self.units = [fsdp.PlainFSDP(layer, group.WORLD) for layer in layers]
        self.optimizer = self.make_optimizer([unit.shard for unit in self.units])

    def zero_grad(self):
        self.steps += 1
        self.optimizer.zero_grad(set_to_none=self.steps % 2 == 0)

    def backward(self, x, y, count):
        with torch.no_grad():
            self.model(x)
        loss = super().backward(x, y, count)
        assert not any(unit.weights.untyped_storage().nbytes() for unit in self.units)
        assert all(p.grad is None for p in self.model.parameters())
        return loss

    def named(self):
        return dict(zip(self.names, gathered(self.units), strict=True))


def gathered(units):
    """Copies of the parameters of PlainFSDP's units, with gradients."""
    copies = []
    for unit in units:
        state = torch.zeros(2, len(unit.shard)).to(unit.shard)
        state[0] = unit.shard.detach()
        if unit.shard.grad is not None:
            state[1] = unit.shard.grad
        shards = [torch.empty_like(state) for _ in range(dist.get_world_size())]
        dist.all_gather(shards, state)
        full, end = torch.cat(shards, 1), 0
        for p in unit.parameters:
            start, end = end, end + p.numel()
            weight, gradient = full[:, start:end].reshape(2, *p.shape)
            copies.append(nn.Parameter(weight))
            copies[-1].grad = gradient
    return copies


class ProbedZeRO(ZeRO):
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


# --- matrices are split


class TensorParallel(OneProcess):
    files = "tensor_parallel"

    def set_up(self, microbatches=(), count=1):
        import tensor_parallel

        self.tp, self.given = tensor_parallel, dict(microbatches=microbatches, count=count)
        self.cut()
        self.criterion = self.tp.VocabParallelCrossEntropy(VOCAB, group.WORLD)
        super().set_up()

    def cut(self):
        """As the usage block says, which goes on to train on the micro-batches that are given."""
        names = dict(model=self.model, group=group.WORLD, t=dist.get_world_size(), vocab=VOCAB)
        return run_usage("tensor_parallel", **vars(self.tp), **names | self.given)

    def backward(self, x, y, count):
        loss = self.criterion(self.model(x), y, count)
        loss.backward()
        return loss.item()

    def norm(self):
        return self.tp.grad_norm(self.model.parameters())

    def piece(self, full, p):
        return piece(full, cuts_of(p))


class LlamaParallel(TensorParallel):
    """Hugging Face's Llama."""

    def cut(self):
        tp, llama = self.tp, self.model.model

        def replace(make, module, *names):
            for name in names:
                setattr(module, name, make(getattr(module, name), group.WORLD))

        def enter(module, name):
            setattr(module, name, nn.Sequential(getattr(module, name), tp.Enter(group.WORLD)))

        replace(tp.VocabParallelEmbedding, llama.model, "embed_tokens")
        for layer in llama.model.layers:
            enter(layer, "input_layernorm")
            enter(layer, "post_attention_layernorm")
            replace(tp.ColumnParallelLinear, layer.self_attn, "q_proj", "k_proj", "v_proj")
            replace(tp.RowParallelLinear, layer.self_attn, "o_proj")
            replace(tp.ColumnParallelLinear, layer.mlp, "gate_proj", "up_proj")
            replace(tp.RowParallelLinear, layer.mlp, "down_proj")
        enter(llama.model, "norm")
        replace(tp.ColumnParallelLinear, llama, "lm_head")


class SequenceParallel(TensorParallel):
    files = "tensor_parallel sequence_parallel"

    def set_up(self, keep=True, **given):
        import sequence_parallel

        self.sp, self.keep = sequence_parallel, keep
        super().set_up(**given)

    def cut(self):
        """By the blocks of both files."""
        # A rank adds the positions of its own tokens
        self.model.positions.register_forward_pre_hook(
            lambda _, where: self.sp.shard_tokens(*where, group.WORLD)
        )
        given, self.given["microbatches"] = self.given["microbatches"], ()
        names = super().cut() | vars(self.sp) | {"microbatches": given}
        run_usage("sequence_parallel", **names)
        for layer in () if self.keep else [block.mlp for block in self.model.blocks]:
            layer.up = self.sp.Projection(0, layer.up)
            layer.norm[1] = self.sp.EnterAndProject(group.WORLD, [layer.up])

    def finish(self):
        self.sp.reduce_partial(self.model.parameters())


class SplitStream(SequenceParallel):
    """Embedding, head and loss are whole, and see this rank's tokens."""

    losses_add_up = True

    def cut(self):
        embed, head = self.model.embed, self.model.head
        super().cut()
        self.model.embed, self.model.head = embed, head
        self.sp.mark_partial(self.model.parameters(), None)
        self.sp.mark_partial(self.model.parameters(), group.WORLD)  # is told already

    def backward(self, x, y, count):
        positions = torch.arange(x.shape[1])
        x, y = (self.sp.shard_tokens(full, group.WORLD) for full in (x, y))
        loss = mean_loss(self.model(x, positions), y, count)
        loss.backward()
        return loss.item()


# --- sequences, layers, experts are split


class ContextParallel(OneProcess):
    """By the usage block: its first lines once, the next for each micro-batch, the last at the end
    of a step."""

    files = "context_parallel"
    losses_add_up = True

    def set_up(self, kind):
        import context_parallel as cp

        given = dict(group=group.WORLD, Decoder=self.decoder, T=self.length, core=causal)
        given |= dict(kind=kind, tokens=torch.zeros(1))
        self.scope = vars(cp) | given | dict(context_core=context_core)
        code = usage(cp.Ring)
        begin, end = code.index("x = "), code.index("for p in ")
        first, self.each, self.last = code[:begin], code[begin:end], code[end:]
        if kind == "ulysses":
            first = usage(cp.Ulysses)
        elif kind != "ring":
            first = first.replace("Ring(group)", "context_core(kind)")
        exec(first, self.scope)
        super().set_up()

    def decoder(self, core):
        for block in self.model.blocks:
            block.attn.core = core
        return self.model

    def backward(self, x, y, count):
        self.scope |= dict(tokens=x, targets=y, target_count=count)
        exec(self.each, self.scope)
        return self.scope["loss"].item() / count.item()

    def finish(self):
        exec(self.last, self.scope)


def pairs():
    """This rank's row and column, of four ranks in a square."""
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return rows[dist.get_rank() // 2], columns[dist.get_rank() % 2]


def context_core(kind):
    import context_parallel as cp

    if kind == "ulysses":
        return cp.Ulysses(group.WORLD, causal)
    if kind == "gather":
        return cp.Gather(group.WORLD)
    if kind == "ring-ulysses":
        ulysses, ring = pairs()
        return cp.Ulysses(ulysses, cp.Ring(ring))
    return cp.Ring(group.WORLD, zigzag=kind == "ring")


class PlainPipeline(OneProcess):
    """The plainest form, of a list of layers."""

    files = "pipeline"
    limit = 0
    losses_add_up = True

    def set_up(self, microbatches):
        import pipeline as pp

        self.step_of, self.microbatches = pp.plain_gpipe, microbatches
        self.stage = pp.cut(list(self.model), dist.get_world_size())[dist.get_rank()]
        self.optimizer = self.make_optimizer(self.stage.parameters())

    def named(self):
        mine = set(self.stage.parameters())
        return {name: p for name, p in self.model.named_parameters() if p in mine}

    def run(self, x, y, count):
        inputs, targets = x.chunk(self.microbatches), y.chunk(self.microbatches)
        like = torch.empty(ROWS // self.microbatches, LENGTH, 13, dtype=torch.float64)

        def loss(logits, target):
            return mean_loss(logits, target, count)

        return float(sum(self.step_of(self.stage, inputs, targets, loss, like)))


class Pipeline(OneProcess):
    """Of a chain whose tied matrix may be on two ranks."""

    files = "pipeline zero_bubble"
    limit = 0
    losses_add_up = True

    def set_up(self, schedule, microbatches):
        import pipeline as pp
        import zero_bubble as zb

        self.pp, self.microbatches, self.links = pp, microbatches, pp.make_links()
        self.schedule = zb.find_schedule(schedule, dist.get_world_size(), microbatches)
        self.last = self.schedule.last
        self.stages = dict(enumerate(cut_chain(self.model, self.last + 1)))
        ends = {self.schedule.owner[0], self.schedule.owner[self.last]}
        self.copies, self.tied = dist.new_group(sorted(ends)), []
        if len(ends) == 2:
            self.model[-1].weight = nn.Parameter(self.model[0].weight.detach().clone())
            self.tied = [self.model[0].weight, self.model[-1].weight]
        held = self.schedule.stages(dist.get_rank())
        self.mine = {p for stage in held for p in self.stages[stage].parameters()}
        self.optimizer = self.make_optimizer(self.mine)

    def named(self):
        named = self.model.named_parameters()
        tied = f"{len(self.model) - 1}.weight"
        return {name.replace(tied, "0.weight"): p for name, p in named if p in self.mine}

    def run(self, x, y, count):
        inputs, targets = x.chunk(self.microbatches), y.chunk(self.microbatches)

        def forward(stage, m, x):
            y = self.stages[stage](inputs[m] if x is None else x)
            return mean_loss(y, targets[m], count) if stage == self.last else y

        shape = (ROWS // self.microbatches, LENGTH, WIDTH)
        given = self.schedule, forward, shape, torch.float64, "cpu", self.links
        return float(sum(self.pp.Pipeline(*given).run()))

    def finish(self):
        for weight in self.mine.intersection(self.tied):
            self.pp.reduce_tied(weight, self.copies)


def cut_chain(model, stages):
    cuts = torch.arange(len(model)).tensor_split(stages)
    return [model[cut[0] : cut[-1] + 1] for cut in cuts]


def play_alone(pp, schedule, last, first=lambda layer, x: layer(x)):
    """Run two stages on this rank, two micro-batches: gradients are a plain backward's."""
    torch.manual_seed(0)
    layers, data = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), torch.randn(2, 3, 4)
    links = [pp.make_links([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]

    def forward(stage, m, x):
        return last(layers[1], x) if stage else first(layers[0], data[m])

    pp.Pipeline(schedule, forward, (3, 4), torch.float32, "cpu", links).run()
    gradients = [p.grad for p in layers.parameters()]
    layers.zero_grad()
    for m in range(2):
        forward(1, m, forward(0, m, None)).backward()
    torch.testing.assert_close(gradients, [p.grad for p in layers.parameters()])


def saliency(layer, x):
    y = layer(x).tanh()
    [gradient] = torch.autograd.grad(y.sum(), x, retain_graph=True)
    return (y * gradient).sum()


class ExpertParallel(DataParallel):
    """Uneven rows, a rank without any, a rank whose experts nobody chooses."""

    files = "expert_parallel"
    limit = 0
    zeros = False
    shares = {2: [5, 3], 4: [4, 0, 3, 1]}

    def set_up(self, plain=False, copies=False):
        import expert_parallel as ep

        self.ep, mixture = ep, self.model.blocks[0]
        self.zeros = copies  # summed over the copies, an expert without a token has zeros
        self.groups = pairs() if copies else [group.WORLD]
        self.over = self.groups[0]
        self.names = {p: name for name, p in self.model.named_parameters()}
        rank, ranks = dist.get_rank(self.over), dist.get_world_size(self.over)
        self.sizes = ep.expert_counts(EXPERTS, ranks)
        start = sum(self.sizes[:rank])
        mixture.experts.mlps = mixture.experts.mlps[start : start + self.sizes[rank]]
        for p in mixture.experts.parameters():
            p.placement = {"cuts": {0: (self.over, start, self.sizes[rank])}}
        dispatch = ep.ExpertDispatch(self.sizes, self.over, chunks=2)
        mixture.dispatch = self.plain_dispatch if plain else dispatch
        super().set_up()

    def plain_dispatch(self, rows, weights, chosen, experts, meanwhile):
        meanwhile()
        return self.ep.plain_dispatch(rows, weights, chosen, experts, self.sizes, self.over)

    def finish(self):
        for over in self.groups:
            self.ep.sum_replicated_gradients(self.model.parameters(), over)

    def named(self):
        return {self.names[p]: p for p in self.model.parameters()}


class Islands(DataParallel):
    """DiLoCo: islands that step by themselves."""

    files = "diloco"

    def set_up(self, **options):
        import diloco

        super().set_up()
        self.islands = diloco.DiLoCo(self.model, group.WORLD, every=2, **options)
        self.average = self.islands.step
