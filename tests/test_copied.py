"""Copied tops, used rightly: each alone in an empty folder, on models that are not ours, against
one process."""

import functools
import importlib.util
import itertools
import sys
import textwrap

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import uses
from conftest import ROOT
from foreign import (
    EXPERTS,
    LENGTH,
    LIMIT,
    MODELS,
    ROWS,
    STEPS,
    VOCAB,
    WIDTH,
    OneProcess,
    batch,
    islands_here,
    one_process,
)
from reference import case, cuts_of, piece
from tops import choices, in_one_file, on_top_of, run_usage
from torch.distributed import group
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from uses import TOPS, Layout, equals_one_process, play_alone, saliency

# --- training: ranks, model, optimizer and options of the Layout. {a | b} stands for both

TABLE = {
    "collectives": """
3 mlp sgd data="plain"
3 torch adamw data="{ring|hierarchical}"
""",
    "ddp": """
{1 mlp|2 sparse} sgd data="ddp"
{3 mlp sgd|2 torch adamw|4 torch sgd|3 odd adamw} data="ddp", way="{naive|bucketed|overlapped}"
""",
    # odd: in stage 3 as one unit. Ranks that skip different units gather in different orders
    "zero": """
{3 torch adamw|2 mlp scheduled} data="{zero 0|zero 1|zero 2|fsdp}"
{3 odd adamw|2 odd sgd} {data="zero 0"|data="zero 1"|data="zero 2"|data="fsdp"}
3 odd adamw data="zero {0|1|2}", bucket_bytes=0
2 own adamw data="{zero 2|fsdp}", microbatches=3, {reduce_each=False|order="FFBFBB"}
2 own adamw data="fsdp", microbatches=3, reshard=False{|, order="FFFBBB"}
2 own adamw data="fsdp", microbatches=3, units=lambda model: {[model.blocks[0]]|[]}
2 own adamw data="fsdp", microbatches=3, units={in_wrong_order|recomputed_inside_hooks}
2 own adamw data="fsdp", microbatches=3, units=recomputed_outside_hooks
2 own adamw data="fsdp", microbatches=3, units=partial(recomputed_outside_hooks, together=2)
2 mlp sgd data="zero 2", param_dtype=torch.float32
2 mlp sgd use=Probed, {data="zero 1"|data="fsdp"|data="fsdp", reshard=False}
""",
    "muon": """
{4 mlp|3 torch} muon data="muon"
2 mlp muon data="muon", microbatches=1
3 torch muon data="muon", microbatches=3
""",
    "tensor_parallel": """
{2 own sgd|3 own adamw|2 llama adamw} tp=ranks
""",
    "sequence_parallel": """
2 own adamw tp=2, tensor="sequence"
3 own sgd tp=3, tensor="sequence", again=True
4 heads {sgd|adamw} tp=4, tensor="stream"
""",
    "context_parallel": """
3 grouped {sgd cp=3, context="ring"|adamw cp=3, context="contiguous"}
2 grouped sgd cp=2, context="gather"
4 grouped {sgd cp=4, context="ring-ulysses"|adamw cp=4, context="ulysses"}
""",
    "pipeline": """
2 {in-place sgd|chain adamw} pp=2, schedule="interleaved"
3 {in-place sgd|chain adamw} pp=3, schedule="{1f1b|zb-v}"
4 {in-place sgd|chain adamw} pp=4, schedule="gpipe"
3 {in-place sgd|chain adamw} pp=3, schedule="zb-h1", microbatches=4
4 {in-place sgd|chain adamw} pp=4, schedule="zb-h2", microbatches=8
2 {in-place sgd|chain adamw} pp=2, schedule="dualpipev", microbatches=4
4 heads sgd data="{zero 2|fsdp}", pp=2, schedule="zb-h1", microbatches=4
2 chain adamw data="fsdp", pp=2, schedule="interleaved", units=list
""",
    "dualpipe": """
4 experts {sgd data="ddp"|adamw data="zero 2"}, ep="all", pp=2, microbatches=4, DUALPIPE
""",
    # Uneven rows, a rank without any, a rank whose experts nobody chooses; two copies of experts
    "expert_parallel": """
4 mixture {sgd|adamw} ep="all"
{3 mixture sgd ep="all", plain=True|4 mixture sgd ep=2}
""",
    "three techniques": """
8 heads {sgd data="zero 1", tp=2, pp=2, schedule="1f1b"|sgd data="ddp", cp=2, tp=2}
8 heads adamw data="ddp", tp=2, tensor="sequence", pp=2, schedule="zb-v"
8 experts adamw data="zero 1", pp=2, schedule="zb-v", ep="all"
""",
}


def rows_of(text):
    """[(ranks, model, optimizer, options)]"""
    for line in itertools.chain.from_iterable(map(choices, text.strip().splitlines())):
        line = line.replace("DUALPIPE", 'schedule="dualpipev", overlap=True')
        ranks, model, optimizer, options = line.split(maxsplit=3)
        if model != "llama" or importlib.util.find_spec("transformers"):
            names = vars(uses) | {"ranks": int(ranks), "partial": functools.partial}
            yield int(ranks), model, optimizer, eval(f"dict({options})", names)


# --- any two techniques

SPLITS = [
    dict(tp=2),
    dict(tp=2, tensor="sequence"),
    dict(cp=2),
    dict(cp=2, context="ulysses"),
    dict(pp=2, schedule="1f1b"),
    dict(pp=2, schedule="zb-v"),
    dict(ep="all"),
    dict(islands=2),
]
DATA = "ddp", "zero 1", "zero 2", "fsdp", "muon"


def pairs():
    """[(ranks, model, optimizer, options)]: each data parallelism beside each split, and each two
    splits of something else beside one of them. Optimizers take turns."""
    found = [dict(data=data) | split for split in SPLITS for data in DATA]
    for a, b in itertools.combinations(SPLITS, 2):
        if a.keys().isdisjoint(b):
            found.append(dict(data=DATA[len(found) % len(DATA)]) | a | b)
    rows = []
    for i, options in enumerate(found):
        if options["data"] not in ("fsdp", "muon"):  # the table has small buckets
            options["bucket_bytes"] = 8000
        optimizer = "muon" if options["data"] == "muon" else ("sgd", "adamw")[i % 2]
        rows.append((4, "experts" if "ep" in options else "heads", optimizer, options))
    return rows


TRAINED = {technique: list(rows_of(text)) for technique, text in TABLE.items()}
for row in pairs():
    TRAINED.setdefault(f"two techniques, {row[3]['data']}", []).append(row)
LAUNCHES = []
for technique, rows in TRAINED.items():
    first, *others = sorted({row[0] for row in rows})
    quick = technique in TABLE or technique.endswith("ddp")
    LAUNCHES.append(pytest.param(technique, first, marks=pytest.mark.quick if quick else ()))
    LAUNCHES += [(technique, ranks) for ranks in others]


@pytest.mark.parametrize("technique, ranks", LAUNCHES)
def test_one_curve(copied, technique, ranks):
    """Else a copied top trains another model than one process does."""
    rows = [row[1:] for row in TRAINED[technique] if row[0] == ranks]

    def steps(options):
        """A second one follows a step; a third one follows an average over islands."""
        return 2 if "two" in technique and "islands" not in options else STEPS

    def work(rank):
        for model, optimizer, options in rows:
            with case(model, optimizer, options):
                given = dict(options)
                use = given.pop("use", Layout)(MODELS[model](), optimizer, **given)
                equals_one_process(use, model, optimizer, steps(options))

    for model, optimizer, options in rows:  # once for all ranks
        islands_here(options.get("islands", 1), model, optimizer, steps(options))
    copied(TOPS, ranks, work)


def flat_cross_entropy(logits, targets, **options):
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), **options)


# --- DiLoCo: islands that train on batches of their own


@on_top_of("diloco", 3)
def test_islands_in_bfloat16_keep_old_weights_in_float32(diloco):
    p = nn.Parameter(torch.full((3,), 1.0, dtype=torch.bfloat16))
    islands = diloco.DiLoCo([p], group.WORLD, every=1, outer_lr=1.0, outer_momentum=0.0)
    [part] = islands.parts
    for _ in range(4):  # one island moves by 2^-7: the mean of three is less than bfloat16 has
        p.data -= 2**-7 * (dist.get_rank() == 0)
        islands.step()
    assert part.old.dtype == torch.float32
    assert part.old.tolist() == pytest.approx([1 - 4 * 2**-7 / 3] * 3, abs=1e-6)
    assert p.tolist() == part.old.bfloat16().tolist()


@on_top_of("diloco", 3)
def test_a_transport_may_leave_islands_out(diloco):
    class WithoutIsland2(diloco.DiLoCo):
        def start_mean(self, part):
            total = part.outer_gradient() * (dist.get_rank() < 2)
            dist.all_reduce(total)
            return lambda: total / 2

    p = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    islands = WithoutIsland2([p], group.WORLD, 1, outer_lr=1.0, outer_momentum=0.0)
    p.data += torch.tensor([1.0, 2.0, 90.0])[dist.get_rank()]
    islands.step()
    assert p.tolist() == [1.5] * 4


# --- usage blocks run as they are printed


def loop_names(use, module):
    """What the loops of data parallelism take as given."""
    batches = []
    for x, y, count in (batch(step, LENGTH) for step in range(STEPS)):
        batches.append((use.parts(x, y), count))
    names = dict(model=use.model, parameters=list(use.model.parameters()), batches=batches)
    names |= dict(optimizer=use.optimizer, cross_entropy=flat_cross_entropy, group=group.WORLD)
    return vars(module) | names


def assert_trained(named, whole, piece=lambda full, p: full):
    """Gradients and weights are one process's, to the rounding that Adam's own eps lets grow."""
    for name, p in named.items():
        gradient, weight = whole[1][name], whole[2][name]
        if gradient is not None:
            torch.testing.assert_close(p.grad, piece(gradient, p), rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(p.detach(), piece(weight, p), rtol=1e-8, atol=1e-8)


def test_usage_in_the_readme(copied):
    """Else whoever copies these lines trains another model."""
    _, _, readme = (ROOT / "README.md").read_text().partition("\n    from ddp import DDP\n")

    def work(rank):
        use = Layout(MODELS["torch"](), "sgd", microbatches=1)
        names = loop_names(use, importlib.import_module("ddp"))
        names["batches"] = [(*part, count) for [part], count in names["batches"]]
        exec(textwrap.dedent(readme.partition("\n## All of them")[0]), names)
        assert_trained(use.named(), one_process("torch", "sgd", limit=0))

    copied("ddp", 3, work)


@pytest.mark.parametrize("messages", [("Enter", "Leave"), ("GatherTokens", "ReduceScatterTokens")])
@on_top_of("tensor_parallel sequence_parallel", 2)
def test_usage_of_tensor_and_sequence_parallel(tp, sp, messages):
    """The lines of docs/learn/tensor-parallelism.md."""
    use, (x, y, count) = OneProcess(MODELS["heads"](), "AdamW"), batch(0, 8)
    page = (ROOT / "docs" / "learn" / "tensor-parallelism.md").read_text()
    lines = page.partition("```python\nenter, leave = Enter, Leave\n")[2].partition("```")[0]
    names = vars(tp) | vars(sp) | dict(group=group.WORLD, t=2, model=use.model)
    names["enter"], names["leave"] = (names[name] for name in messages)
    exec(lines, names)
    if messages[0] == "GatherTokens":
        sp.mark_partial(use.model.parameters(), group.WORLD)
        use.model.place.where = sp.shard_tokens(torch.arange(8), group.WORLD)
    for part in zip(x.split([5, 3]), y.split([5, 3])):
        names["criterion"](use.model(part[0]), part[1], count).backward()
    sp.reduce_partial(use.model.parameters())
    norm = tp.grad_norm(use.model.parameters(), group.WORLD)
    nn.utils.clip_grads_with_norm_(use.model.parameters(), 1.0, norm)
    names["optimizer"].step()
    whole = one_process("heads", "AdamW", 1, limit=1.0)
    assert_trained(use.named(), whole, lambda full, p: piece(full, cuts_of(p)))
    embedding = tp.unshard(use.model.embed.weight, (VOCAB, WIDTH), group.WORLD)
    torch.testing.assert_close(embedding, whole[2]["embed.weight"], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("microbatches, row", [(2, "gpipe_row"), (4, "one_f_one_b_row")])
@on_top_of("pipeline", 3)
def test_plain_pipeline(pp, microbatches, row):
    """With fewer micro-batches than ranks, and with more."""
    use, whole = OneProcess(MODELS["mlp"](), "sgd"), one_process("mlp", "sgd", limit=0)
    rank, (down, up) = dist.get_rank(), pp.make_links()[:2]
    stage = nn.Sequential(*pp.cut(list(use.model), 3)[rank])
    optimizer = use.make_optimizer(stage.parameters())
    like = torch.empty(ROWS // microbatches, LENGTH, 13, dtype=torch.float64)
    for step in range(STEPS):
        x, y, count = batch(step, LENGTH)
        optimizer.zero_grad()
        pp.plain_pipeline(
            stage,
            getattr(pp, row)(rank, 3, microbatches),
            x.chunk(microbatches),
            y.chunk(microbatches),
            lambda y, target: F.cross_entropy(y.mT, target, reduction="sum") / count,
            like,
            down,
            up,
        )
        optimizer.step()
    assert_trained({p.full_name: p for p in stage.parameters()}, whole)


@on_top_of("pipeline zero_bubble", 1)
def test_usage_of_the_store(pp, zb):
    model, x, targets = nn.Linear(4, 3), torch.ones(2, 4, requires_grad=True), torch.tensor([0, 1])
    run_usage(zb.WeightGradStore, **vars(zb), model=model, x=x, targets=targets, target_count=2)
    late = model.weight.grad.clone()
    model.zero_grad()
    F.cross_entropy(model(x), targets).backward()
    torch.testing.assert_close(late, model.weight.grad)


# Section of the page, model, which ranks have rows of their own
SECTIONS = [
    ("Tensor parallelism and DDP", "heads", "outer"),
    ("Tensor parallelism and ZeRO", "heads", "outer"),
    ("Pipeline and ZeRO", "untied", "inner"),
    ("Tensor parallelism, a pipeline and ZeRO", "untied", "boxes"),
    ("A pipeline with a split backward, and ZeRO", "untied", "inner"),
    ("FSDP and context parallelism", "heads", "outer"),
    ("DiLoCo, with ZeRO or any other in each island", "heads", "inner"),
    ("Experts and DDP", "experts", "all"),
]


def code_of(heading):
    """The indented blocks of a section of docs/use/two-techniques.md."""
    page = (ROOT / "docs" / "use" / "two-techniques.md").read_text()
    _, text = page.split(f"\n## {heading}\n")
    lines = text.partition("\n## ")[0].splitlines()
    return "\n".join(line[4:] for line in lines if line.startswith("    ") or not line)


@pytest.mark.parametrize("one_file", [False, True])
@pytest.mark.parametrize("heading, model, rows", SECTIONS)
def test_usage_of_two_techniques(copied, heading, model, rows, one_file):
    """The page's blocks, with the page's own imports, beside all tops or with these in one file."""
    tops = in_one_file(TOPS.split())  # once for all ranks

    def work(rank):
        names = {}
        if one_file:
            sys.modules.update(dict.fromkeys(TOPS.split(), tops))
        exec(code_of("Groups"), names)
        exec(code_of("Tensor parallelism and DDP").partition("\n\n")[0], names)  # split
        islands, use = 1 + ("DiLoCo" in heading), OneProcess(MODELS[model](), "AdamW")
        if model == "untied":
            use.model.embed, *use.model.blocks, use.model.head = use.model
        part = {"inner": rank % 2, "outer": rank // 2, "boxes": rank // 4, "all": rank}[rows]
        batches = []
        for step in range(STEPS):
            *full, count = batch(step + 100 * (rank // 2) * (islands - 1), use.length)
            own = [t.tensor_split(4 if rows == "all" else 2)[part].tensor_split(2) for t in full]
            batches.append((list(zip(*own)), count))
        names |= dict(model=use.model, batches=batches, T=use.length, C=WIDTH, b=2, E=EXPERTS)
        names |= dict(dtype=torch.float64, device="cpu")
        if model == "experts":
            names["mixture"] = use.model.blocks[1].mlp
        exec(code_of(heading).replace(", 1.0", f", {LIMIT}"), names)
        trained = names["zero"].model if "stages" in names else names.get("stage") or use.model
        named = [(p.full_name, p) for p in trained.parameters()]
        if sharded := names.get("zero") or names.get("fsdp"):
            named = sharded.gather_full(named)
        weights = islands_here(islands, model, "AdamW", STEPS)[0][2]
        for name, p in named:
            expected = piece(weights[name], cuts_of(p))
            torch.testing.assert_close(p.detach(), expected, rtol=1e-8, atol=1e-8)

    copied(TOPS, 8 if rows == "boxes" else 4, work)


# --- what a model may be besides


@on_top_of("collectives", 3)
def test_outputs_that_lie_in_the_input(collectives):
    inputs, rank = [torch.arange(1500.0) + 10000 * r for r in range(3)], dist.get_rank()
    for place in (0, 500, 1000, 250):
        x = inputs[rank].clone()
        output = x[place : place + 500]
        collectives.reduce_scatter_single(output, x)
        assert torch.equal(output, sum(inputs).chunk(3)[rank])
    both = torch.stack([inputs[rank], torch.zeros(1500)])  # parts that don't overlap
    collectives.all_to_all_single(both[1], both[0])
    assert torch.equal(both[1], torch.cat([x.chunk(3)[rank] for x in inputs]))


@on_top_of("ddp", 3)
def test_two_dtypes_one_frozen_and_one_listed_twice(ddp):
    a, b, c = (nn.Parameter(torch.ones(n)) for n in (2, 3, 4))
    d = nn.Parameter(torch.ones(5, dtype=torch.float64))
    c.requires_grad_(False)
    sync = ddp.DDP([a, b, c, d, a], group.WORLD, bucket_bytes=0)
    optimizer = torch.optim.SGD([a, b, c, d], lr=1.0)
    for _ in range(2):
        sync.zero_grad()
        ((a.sum() + b.sum() + d.sum()) * (dist.get_rank() + 1)).backward()
        sync.finish()
        optimizer.step()
    assert all((p == -11).all() for p in (a, b, d)) and (c == 1).all()


@on_top_of("parameter_server", 2)
def test_a_server_of_two_dtypes_and_a_frozen_parameter(server):
    module = nn.ParameterList([torch.ones(2), torch.ones(3), torch.ones(4, dtype=torch.float64)])
    module[1].requires_grad_(False)
    (sum(p.sum() for p in module) * (dist.get_rank() + 1)).backward()
    server.push(module.parameters(), group.WORLD)
    if dist.get_rank() == 0:
        assert [p.grad is None for p in module] == [False, True, False]
        assert all((module[i].grad == 3).all() for i in (0, 2))
        for p in module:
            p.data *= 5
    server.pull(module.parameters(), group.WORLD)
    assert all((module[i] == 5).all() for i in (0, 2))


@on_top_of("tensor_parallel", 2)
def test_enter_and_leave_keep_what_others_hold(tp):
    for f_first in (True, False):
        leaf, other = (torch.full((3,), x, requires_grad=True) for x in (2.0, 3.0))
        terms = [lambda: tp.Enter.apply(leaf, group.WORLD), lambda: other * 1]
        x, y = (term() for term in (terms if f_first else reversed(terms)))
        (5 * (x + y)).sum().backward()
        assert leaf.grad.tolist() == [10.0] * 3  # both ranks' uses
        assert other.grad.tolist() == [5.0] * 3
    leaf = torch.ones(3, requires_grad=True)
    y = tp.Leave.apply(leaf, group.WORLD)
    (5 * y + leaf).sum().backward()
    assert y.tolist() == [2.0] * 3 and leaf.grad.tolist() == [6.0] * 3


@on_top_of("tensor_parallel", 2)
def test_checkpointing_that_keeps_products(tp):
    """Leave must not sum what the second run is given back."""
    torch.manual_seed(0)
    mlp = tp.PlainTensorMLP(nn.Linear(3, 4), nn.Linear(4, 3), group.WORLD)
    products = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    keep = functools.partial(create_selective_checkpoint_contexts, products)
    found = []
    for options in (dict(), dict(context_fn=keep)):
        mlp.zero_grad()
        x = torch.ones(2, 5, 3, requires_grad=True)
        run = functools.partial(checkpoint, use_reentrant=False, **options)
        run(lambda x: mlp(x).square(), x).sum().backward()
        found.append([x.grad, *(p.grad for p in mlp.parameters())])
    torch.testing.assert_close(*found)


@on_top_of("tensor_parallel", 2)
def test_layers_that_make_several_things(tp):
    """Each rank gets its part of each: of q, k and v of two sizes."""
    torch.manual_seed(0)
    fused, x = nn.Linear(3, 12), torch.randn(5, 3)
    q, k, v = (t.chunk(2, -1)[dist.get_rank()] for t in fused(x).split([8, 2, 2], -1))
    tp.order_by_rank(fused, [8, 2, 2], 2)
    ours = tp.ColumnParallelLinear(fused, group.WORLD)(x).split([4, 1, 1], -1)
    torch.testing.assert_close(ours, (q, k, v))


@on_top_of("tensor_parallel sequence_parallel", 2)
def test_a_partial_gradient_that_one_rank_lacks_counts_as_zeros(tp, sp):
    parameters = [nn.Parameter(torch.ones(3)) for _ in range(4)]
    sp.mark_partial(parameters, group.WORLD)
    parameters[dist.get_rank()].grad = torch.full((3,), 10.0)
    parameters[2].grad = torch.full((3,), 2.0)
    if dist.get_rank():
        parameters[3].grad = torch.zeros(3)
    sp.reduce_partial([*parameters, parameters[2]])  # given twice, summed once
    assert [p.grad.tolist() for p in parameters[:3]] == [[10.0] * 3, [10.0] * 3, [4.0] * 3]
    assert parameters[3].grad.tolist() == [0.0] * 3  # on both ranks: AdamW's decay takes it on both
    sp.reduce_partial([])
    without = nn.Parameter(torch.ones(2))
    assert tp.grad_norm([*parameters, without], group.WORLD).item() == pytest.approx(648**0.5)
    assert tp.grad_norm([without], group.WORLD).item() == 0
    mlp = sp.PlainSequenceMLP(nn.Linear(3, 4), nn.Linear(4, 3), group.WORLD)
    sp.mark_partial(mlp.parameters(), group.WORLD)
    assert [n for n, p in mlp.named_parameters() if p.placement.get("partial")] == ["down_bias"]


@pytest.mark.parametrize("frozen", [False, True])
@on_top_of("tensor_parallel sequence_parallel tensor_overlap", 2)
def test_gathering_again_under_autocast(tp, sp, overlap, frozen):
    results = []
    for again in (False, True):
        use = Layout(MODELS["own"]().float(), "sgd", tp=2, tensor="sequence", again=again)
        for block in use.model.blocks:
            block.mlp.up.weight.requires_grad_(not frozen)
        with torch.autocast("cpu", torch.bfloat16):
            use.run(*batch(0, use.length))
        results.append({name: p.grad for name, p in use.named().items()})
    torch.testing.assert_close(*results, rtol=2e-2, atol=1e-3)


def hyper_network(layer, x):
    """A weight that depends on its input, and a product of two activations."""
    return (F.linear(x, layer.weight * x.mean()) + F.linear(x, x[:1].expand(4, 4))).square().sum()


@on_top_of("pipeline zero_bubble", 1)
def test_stages_that_are_no_plain_layers(pp, zb):
    play_alone(pp, zb, pp.Schedule([zb.zb_v(0, 1, 2)]), hyper_network)
    play_alone(pp, zb, pp.Schedule([pp.interleaved(0, 1, 2)]), saliency)


# --- experts


WHAT_IS_TRAINED = [
    ("x", torch.float32, torch.float32),
    ("x of rank 0", torch.float32, torch.float32),
    ("weights", torch.float32, torch.float32),
    ("experts", torch.float32, torch.float32),
    ("experts of rank 0", torch.float32, torch.float32),
    ("x and weights", torch.bfloat16, torch.float32),
    ("x and weights", torch.float32, torch.bfloat16),
]


@on_top_of("expert_parallel", 3)
def test_what_is_trained_and_its_dtype(ep):
    """Rank 0 alone has a token, and experts skip an empty batch. All ranks send the same messages
    in backward: none of them hangs."""
    rank = dist.get_rank()
    tokens = 1 if rank == 0 else 0
    chosen, matrix = torch.zeros(tokens, 1, dtype=torch.int64), torch.full((4, 4), rank + 1.0)

    def experts(rows, counts):
        return rows @ given["experts"] if len(rows) else torch.zeros_like(rows)

    def dispatch(x, weights):
        return ep.ExpertDispatch(3, group.WORLD)(x, weights, chosen, experts)

    for trained, of_x, of_weights in WHAT_IS_TRAINED:
        given = {"x": torch.ones(tokens, 4, dtype=of_x), "experts": matrix.to(of_x, copy=True)}
        given["weights"] = torch.full((tokens, 1), 0.5, dtype=of_weights)
        with torch.no_grad():
            assert not dispatch(given["x"], given["weights"]).requires_grad
        for name, tensor in given.items():
            tensor.requires_grad_(name in trained and (rank == 0 or "rank 0" not in trained))
        y = dispatch(given["x"], given["weights"])
        y.sum().backward()
        assert y.dtype == of_x and y.tolist() == [[2.0] * 4] * tokens
        if rank == 0:
            due = {"x": torch.full((1, 4), 2.0), "experts": torch.full((4, 4), 0.5)}
            due["weights"] = torch.tensor([[16.0]])
            for name, tensor in given.items():
                expected = due[name].to(tensor.dtype) if name in trained else None
                torch.testing.assert_close(tensor.grad, expected)


@on_top_of("expert_parallel", 2)
def test_parameters_that_are_summed(ep):
    """Without a gradient, on a rank or on all."""
    some, none, frozen = (nn.Parameter(torch.ones(2)) for _ in range(3))
    frozen.requires_grad_(False)
    some.grad = torch.full((2,), 3.0) if dist.get_rank() == 1 else None
    ep.sum_replicated_gradients([some, none, frozen], group.WORLD)
    assert (some.grad.tolist(), none.grad.tolist(), frozen.grad) == ([3.0] * 2, [0.0] * 2, None)
