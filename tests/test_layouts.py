"""One curve: train.py in any layout against one process, and the bugs that are caught."""

import collections
import functools
import importlib
import inspect
import math
import re
import textwrap
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT
from reference import case

import harness
import mixture
import proof
import train
from harness import data, documents, initialize
from muon import PlainMuon
from proof import one_process
from receipts import muon as of_muon
from trainer import pretrained

# 3 layers do not divide by 2 stages (without stages 2 are enough), 5 (DEEP) not by 2, 3 or 4; 257
# tokens not by 2 or 4; a clip of 0.1 always binds; the second step is the one that the ledger
# watches
BASE = "--layers 3 --heads 4 --width 32 --context 16 --batch 24 --steps 2 --dtype float64 --seed 3"
BASE += " --grad-clip 0.1 --lr 0.01 --min-lr 0.01 --warmup 0 --sample 0 --eval-batches 1 --quiet"
SGD = "--optimizer sgd --lr 0.3 --min-lr 0.3"
MIXTURE = "--experts 5 --top-k 2 --shared 1 --balance-loss 0.1 --z-loss 0.01"
VARIANTS = {
    "gpt2": "",
    "llama": "--family llama --kv-heads 4",
    "grouped": "--family llama --kv-heads 2",
    "sgd": SGD,
    "odd": f"--context 15 {SGD}",
    "13-tokens": "--context 13",
    "olmo2": "--family llama --like olmo2 --kv-heads 2",
    "odd-biases": f"--hidden 25 --heads 2 --width 12 {SGD}",  # small buckets have odd sizes
    "by-3": "--family llama --heads 6 --kv-heads 3 --width 36 --hidden 50 --context 9",
    "a-token-each": f"--heads 6 --width 36 --hidden 50 --context 3 {SGD}",
    "dropout": f"--dropout 0.2 {SGD}",
    "dropout-grouped": f"--family llama --kv-heads 2 --dropout 0.2 {SGD}",
    "moe": f"{MIXTURE} --family llama --kv-heads 2",
    "moe-gpt2": f"{MIXTURE} {SGD} --bias-rate 0.01",
    "moe-top-1": f"--experts 6 --top-k 1 --dropout 0.2 {SGD}",
    # 'e' stands between documents: some are longer than a row, and some of one token
    "docs": f"--documents e --context 24 --batch 6 {SGD}",
    "docs-llama": "--documents e --family llama --kv-heads 2 --context 37 --batch 8",
    # 45 hidden units do not divide by 2
    "muon-moe": f"{MIXTURE} --optimizer muon --family llama --kv-heads 2 --hidden 45",
}
# Two copies of experts, each on two ranks; experts that are not split
IN_GROUPS = """
moe       --cp 2 --dp 4 --ep 2 --zero 3 --zero-ranks 4
moe-gpt2  --dp 8 --ep 4 --zero 2 --zero-ranks 2 --batch 16 --microbatches 2 --reduce-once
moe-gpt2  --tp 2 --sp --dp 4 --ep 2 --fold-experts --zero 3 --zero-ranks 2
odd       --tp 2 --sp --dp 4 --zero 1 --zero-ranks 2
dropout   --dp 2 --cp 2 --pp 2 --zero 3 --zero-ranks 2 --schedule zb-h1 --microbatches 2 --offload
"""


# {name: the fields of its Config that no flag sets}, for --like, which these tests add to Llama
LIKE = {
    "qwen3": dict(qk_norm="each", head_dim=10, tied=True),
    "olmo2": dict(qk_norm="all", norm_after=True, norm_eps=1e-6),
    "olmoe": dict(qk_norm="all", renormalize=False),
    "qwen2-moe": dict(bias="qkv", shared_gate=True, renormalize=False),
    "smollm3": dict(no_rope_every=2),
    "granite": dict(embedding_scale=3, query_scale=0.4, residual_scale=0.2, logits_scale=0.3),
}


def rows(table):
    """[(flags of the variant, flags of the layout)] of a table's lines."""
    table = table.replace("DEEP", "--layers 5").replace("SHALLOW", "--layers 2")
    found = [line.split(maxsplit=1) for line in table.strip().splitlines()]
    return [(VARIANTS[of], row if "--pp" in row else f"--layers 2 {row}") for of, row in found]


def all_rows():
    """All pairs of axes (see product.py), and by hand other sizes and numbers of ranks."""
    by_hand = rows((ROOT / "tests/layouts_by_hand.txt").read_text())
    lines = (ROOT / "tests/layouts.txt").read_text().splitlines()
    found = [line.split(" --dp") for line in lines if not line.startswith("refused")]
    return by_hand + [(variant, f"--dp{layout}") for variant, layout in found]


parser = functools.cache(train.flags)


def arguments(text, flags):
    like = re.search(r"--like (\S+)", flags)
    flags = flags.replace(like[0], "") if like else flags
    args = parser().parse_args(f"{BASE} {flags} --data {text}".split())
    if not like:
        return train.prepare(args)[0]
    if args.family != "llama":
        raise harness.Refused(f"{like[0]} differs from Llama: use --family llama")
    with mock.patch.object(pretrained, "shape_of", lambda args: LIKE[like[1]]):
        return train.prepare(args)[0]


def run_layout(rank, args, broken=None):
    """train.py's own function on this rank; returns its exit code and the receipt."""
    if broken:
        broken()
    run = proof.Run(args, rank, dist.get_world_size(), torch.device("cpu"))
    code = train.train(run)
    return code, getattr(run, "result", None)


@pytest.fixture(scope="session")
def reference(text):
    """One process, in a plain loop. It stands in for the one of a run's own proof."""

    @functools.cache
    def train_alone(variant, layers, steps):
        args = arguments(text, f"{variant} --layers {layers} --steps {steps}")
        config, corpus = harness.configure(args), data.load(text, mark=args.documents)
        model = initialize.build(config, args.seed, dtype=torch.float64)
        matrices = [p for p in model.parameters() if p.dim() > 1]
        vectors = [p for p in model.parameters() if p.dim() == 1]
        groups = [
            {"params": matrices, "weight_decay": 0.1},
            {"params": vectors, "weight_decay": 0.0},
        ]
        kind = {
            "adamw": lambda g: torch.optim.AdamW(g, lr=args.lr, betas=(0.9, 0.95)),
            "sgd": lambda g: torch.optim.SGD(g, lr=args.lr),
            "muon": lambda _: of_muon.one_process(PlainMuon)(model, args),
        }
        optimizer = kind[args.optimizer](groups)
        alone = SimpleNamespace(losses=[], norms=[], outputs=[], first_gradients=None)
        for step in range(args.steps):
            where = range(args.batch), config.context, args.seed
            tokens, targets, samples = corpus.batch(step, *where)
            optimizer.zero_grad()
            if args.documents and not (args.dropout or args.balance_loss):
                loss = each_document_alone(model, tokens, targets)
            else:  # dropout is another in another place, and a mean load one of all documents
                starts = documents.starts_of(tokens, args)
                loss = model(tokens, targets=targets, sample_ids=samples, starts=starts)
                loss.backward()
            alone.gradients = {name: p.grad.clone() for name, p in model.named()}
            alone.first_gradients = alone.first_gradients or alone.gradients
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)
            optimizer.step()
            mixture.rebalance(model)
            alone.losses.append(loss.item())
            alone.norms.append(norm.item())
        alone.weights = {name: p.detach() for name, p in model.named()}
        assert min(alone.norms) > args.grad_clip
        return alone

    return train_alone


def each_document_alone(model, tokens, targets):
    """The loss. Each document goes through the model by itself. It begins with the separator."""
    total = 0
    for row, labels in zip(tokens, targets):
        borders = (row[1:] == 256).nonzero().flatten() + 1
        parts = [t.unsqueeze(0).tensor_split(borders, dim=1) for t in (row, labels)]
        for document, of_document in zip(*parts, strict=True):
            loss = model(document, targets=of_document, target_count=targets.numel())
            loss.backward()
            total += loss.detach()
    return total


def ranks_of(layout):
    return math.prod(int(size) for size in re.findall(r"--(?:dp|cp|tp|pp) (\d+)", layout))


def launches(rows, most=6):
    """[(ranks, rows)]: one launch has several rows of as many ranks."""
    of_ranks = {}
    for variant, layout in rows:
        of_ranks.setdefault(ranks_of(layout), []).append((variant, layout))
    found = []
    for world in sorted(of_ranks):
        every = range(0, len(of_ranks[world]), most)
        found += [(world, of_ranks[world][i : i + most]) for i in every]
    return found


@pytest.mark.parametrize("world, layouts", launches(all_rows()))
def test_one_curve(ranks, text, reference, world, layouts):
    """Else a layout changes the training run, or sends what the papers do not say."""
    cases = [arguments(text, f"{variant} {layout}") for variant, layout in layouts]
    alone = [reference(of, args.layers, args.steps) for (of, _), args in zip(layouts, cases)]

    def work(rank):
        found = []
        for of, args, expected in zip(layouts, cases, alone):
            with case(*of), mock.patch.object(one_process, "one_process", lambda *_: expected):
                found.append(run_layout(rank, args))
        return found

    of_cases = zip(*ranks(world, work, timeout=400), strict=True)
    for of, args, results in zip(layouts, cases, of_cases, strict=True):
        with case(*of):
            check_receipts(results, args)


def test_all_pairs_stand_in_the_table():
    """Else a composition is tested by nobody. Write the table again: python -m tests.product"""
    import product

    lines = product.TABLE.read_text().splitlines()
    layouts = [product.layout_of(line) for line in lines if not line.startswith("refused")]
    covered = set().union(*map(product.goals_in, layouts))
    missing = [goal for goal in product.all_goals(product.AXES) if goal not in covered]
    assert [product.refused_line(goal) for goal in missing] == lines[len(layouts) :]


def check_receipts(results, args):
    """Errors are within 1e-10, and every byte is as the formulas say. Returns rank 0's receipt."""
    assert all(code == 0 for code, _ in results)
    receipt = results[0][1]
    assert receipt["ok"] and len(receipt["steps"]) == args.steps
    assert receipt["max_error"].keys() == {"loss", "grad_norm", "grad", "param"}
    assert max(receipt["max_error"].values()) < 1e-10
    return receipt


def test_zero_in_groups_of_ranks(ranks, text):
    """HSDP in every kind of layout, on the same 8 ranks in one launch: the curve is one process's,
    and the bytes inside groups and across them are those of the formulas."""
    cases = []
    for variant, layout in rows(IN_GROUPS):
        cases.append(arguments(text, f"{variant} {layout} --layers 2"))

    def work(rank):
        return [run_layout(rank, args) for args in cases]

    for args, results in zip(cases, zip(*ranks(8, work))):
        receipt = check_receipts(results, args)
        sent = {(row["op"], row["group"]): row for row in receipt["sent"]}
        experts = ("all_reduce", "copies across") in sent
        assert ("all_reduce", "across") in sent and experts == (args.ep > 1)
        assert ("all_gather", "inside") in sent and ("all_gather", "dp") not in sent
        assert (("all_gather", "copies inside") in sent) == (args.ep == 2)
        assert receipt["layout"]["zero-ranks"] == args.zero_ranks


def test_compiled_blocks(ranks, text, monkeypatch):
    """A block is one graph, as is each half of the loss. They run in all steps but the ledger's,
    and the first two in validation. Here they run as they are: code takes long to make."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="counted"))
    args = arguments(text, "--layers 1 --zero 3 --compile --steps 5")

    def work(rank):
        runs = []

        @torch._dynamo.register_backend(name="counted")
        def compile(graph, inputs):
            return lambda *args: [graph(*args), runs.append(1)][0]

        return run_layout(rank, args)[0], len(runs)

    assert ranks(1, work) == [(0, 4 * 3 + 2)]


def test_compiled_blocks_that_gather_again(ranks, text, monkeypatch):
    """Also in validation, where nothing is kept for backward, so nothing is gathered again."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    args = arguments(text, "--layers 1 --tp 2 --sp --gather-again --compile --steps 2")
    assert [code for code, *_ in ranks(2, run_layout, args)] == [0, 0]


@pytest.mark.parametrize(
    "variant, layouts",
    [
        ("gpt2", ["--tp 2 --pp 2 --cp 2", "--dp 2 --pp 2 --schedule zb-v"]),
        ("moe", ["--tp 2 --cp 2 --ep 2 --sp --zero 3"]),
    ],
)
def test_sample_and_validation_are_the_same_in_every_layout(ranks, text, capfd, variant, layouts):
    said = []
    for layout in ("--dp 1", *layouts):
        args = arguments(text, f"{VARIANTS[variant]} {layout} --layers 4 --prove 0")
        args.sample, args.quiet, args.prompt, args.steps = 6, False, "a b", 1
        ranks(args.dp * args.cp * args.tp * args.pp, run_layout, args)
        lines = capfd.readouterr().out.splitlines()
        start = lines.index("sample:")
        [validation] = [line for line in lines if line.startswith("validation loss")]
        said.append((lines[start : start + 2], validation))
    assert all(other == said[0] for other in said) and len(said[0][0][1]) > 3


# --- planted bugs, each once real in a published project: the checks must fail, and say why

# The bug, and the function that has it; a line of it -> what stands there instead, or + what stands
# before it; the variant and layout -> what is off first -> its cause
BUGS = r"""
gradients summed twice: ddp:DDP.finish
    in bucket.groups[1:]: -> in [*bucket.groups[1:], bucket.groups[0]]:
    gpt2 --dp 2 -> step 1, backward -> it is 2 times the right one: as if summed once too often
tied gradients never meet: ddp:DDP.finish
    in bucket.groups[1:]: -> in ():
    sgd --pp 3 --layers 3 -> step 1, backward -> add up to the right one: never summed over tied
averaged once too often: ddp:DDP.finish
    for bucket in self.buckets: -> + a_bias(self).div_(dist.get_world_size())
    sgd --dp 3 -> step 1, backward -> averaged once too often
never received: ddp:DDP.finish
    for bucket in self.buckets: -> + a_bias(self).zero_()
    sgd --dp 2 -> step 1, backward -> it is zero: it was never computed
right on the first rank alone: ddp:DDP.finish
    for bucket in self.buckets: -> + a_bias(self).mul_(1 + 5 * dist.get_rank())
    sgd --dp 3 -> step 1, backward -> and one is right
half a gradient in step 2: ddp:DDP.finish
    for bucket in self.buckets: -> + halve_in_step_2(self)
    sgd --dp 2 --steps 3 -> step 2, backward or the norm -> 0.5 times
padding gets a gradient: ddp:DDP.finish
    for bucket in self.buckets: -> + fill_padding(self)
    sgd --tp 2 -> step 1, backward -> only its padding is off
one bias left out: ddp:DDP.__init__
    Counter(parameters) -> all_but_a_bias(parameters)
    gpt2 --dp 2 -> step 1, backward -> add up to the right one: never summed over dp
ZeRO sums twice: zero:ZeRO.finish
    self.state = "summed" -> + [b.gradient_shard.mul_(2) for b in self.trained_buckets]
    gpt2 --dp 2 --zero 3 -> step 1, backward -> summed once too often, or not averaged, over dp (2)
copies not summed: zero:ZeRO._wait
    bucket.across is not None and -> bucket.across is None and
    sgd --dp 4 --zero 2 --zero-ranks 2 -> step 1, backward -> never summed over inside or across
no rank adds to a shard: zero:ShardedBucket.start_reduction
    if dist.get_world_size(self.group) == 1: -> if True:
    sgd --dp 2 --zero 1 -> step 1, backward ->
norm counts copies: composition:norm_in_grid
    count_ranks(groups) / count_ranks(groups_cutting(p)) -> 1
    gpt2 --tp 2 -> step 1, the norm -> times the right one
norm counts experts on each rank: composition:norm_in_grid
    / count_ranks(groups_cutting(p)) -> / 1
    moe-gpt2 --tp 2 --sp --ep 2 --fold-experts -> step 1, the norm ->
norm is local: composition:norm_in_grid
    if pipeline_group is None else [*groups, pipeline_group] ->
    sgd --pp 2 -> step 1, the norm -> times the right one
first piece on every rank: tensor_parallel:span
    start = min(index * width, size) -> start = 0
    sgd --tp 2 -> step 1, forward: the output of blocks.0 on all ->
all shards equal: harness.placement:placement_of
    "placement", {}) -> "placement", {}) | first_cuts(parameter)
    sgd --tp 2 -> step 1, forward: the output of blocks.0 on all ->
shards counted as copies: composition:norm_in_grid
    / count_ranks(groups_cutting(p)) -> / 1
    llama --tp 4 --zero 1 -> step 1, the norm ->
gradients of keys never come home: packed_documents:DocumentRingAttention.backward
    = part[:, :, :, plan -> = 0 * part[:, :, :, plan
    docs --cp 2 -> step 1, backward -> attn.qkv.weight: off by
bias on every rank: tensor_parallel:RowParallelLinear.forward
    self.weight)) -> self.weight, self.bias))\n    return y
    sgd --tp 2 -> step 2, forward: the output of blocks.0 on all ->
x's gradient before its sum is there: tensor_overlap:EnterLinears.backward
    all_reduce(dx, -> all_reduce(dx.clone(),
    sgd --tp 2 -> step 1, backward -> add up to the right one: never summed over tp
a weight's gradient of tokens that are not there yet: tensor_overlap:GatherLinears.backward
    x = parts.transpose -> x = torch.zeros_like(parts).transpose
    sgd --tp 2 --sp --gather-again -> step 1, backward -> it is zero: it was never computed
recomputed without the collectives: tensor_parallel:Leave.forward
    dist.all_reduce(total -> torch._C._current_graph_task_id() < 0 and dist.all_reduce(total
    sgd --tp 2 --recompute block -> step 1, backward ->
a message that no formula has: tensor_parallel:Leave.forward
    dist.all_reduce(total -> + dist.broadcast(x.clone(), group_src=0, group=group)
    sgd --tp 2 -> nothing ->
partial gradients left partial: sequence_parallel:mark_partial
    if group not in cut_over and -> if group in cut_over and
    sgd --tp 2 --sp -> step 1, backward -> add up to the right one: never summed over tp
router's gradient left partial: sequence_parallel:parallelize_sequence
    if ".experts." not in name -> if ".experts." not in name and "router" not in name
    moe-gpt2 --tp 2 --sp --ep 2 --fold-experts -> step 1, backward -> right one: never summed over
whole experts summed over tp: sequence_parallel:parallelize_sequence
    if ".experts." not in name ->
    moe-top-1 --tp 2 --sp --ep 2 --fold-experts -> step 1, backward ->
last micro-batch only: pipeline:Pipeline.run_forward
    self.saved[stage, m] = x, y -> self.saved[stage, m] = x, y if m == 1 else 0 * y
    sgd --dp 2 --microbatches 2 -> step 1, backward ->
loss is a mean of means: trainer.large_vocabulary:LeanCrossEntropy.forward
    losses.sum() / target_count -> losses.sum() / targets.numel()
    sgd --dp 2 --microbatches 2 -> step 1, the loss -> it is 4 times the right one
one seed for all samples: model:GPT.make_batch
    drop_key(sample_ids, -> drop_key(torch.arange(len(sample_ids)),
    dropout --dp 2 -> step 1, forward: the output of embed ->
nothing recomputed: harness:recompute
    model.blocks.modules() if kind == "selective" else () -> ()
    sgd --tp 2 --sp --recompute selective -> nothing ->
a tied matrix is deferred: trainer.split_backward:FullStore.can_defer
    getattr(base, "used_twice", False) -> False
one weight never moved: harness:make_optimizer
    [p for p in parameters if p.requires_grad] -> [p for p in parameters if p.requires_grad][1:]
    sgd --dp 2 --steps 1 -> step 1, the optimizer -> it did not move
"""


def a_bias(ddp):
    """Its gradient, when all are complete."""
    return next(p for p in ddp.parameters if p.dim() == 1).grad


def all_but_a_bias(parameters):
    listed = collections.Counter(parameters)
    del listed[next(p for p in listed if p.dim() == 1)]
    return listed


def halve_in_step_2(ddp):
    ddp.steps = getattr(ddp, "steps", 0) + 1
    for bucket in ddp.buckets:
        bucket.flat *= 0.5 if ddp.steps == 2 else 1


def first_cuts(p):
    """The cuts of rank 0's shard."""
    cuts = getattr(p, "placement", {}).get("cuts", {})
    return {"cuts": {dim: (group, 0, size) for dim, (group, _, size) in cuts.items()}}


def fill_padding(ddp):
    for p in ddp.parameters:
        for dim, (_, _, size) in getattr(p, "placement", {}).get("cuts", {}).items():
            p.grad.narrow(dim, size, p.shape[dim] - size).fill_(0.1)


def bugs():
    """{bug: (function, its line, what is there instead)} and {ranks: [(bug, variant, layout, what
    is off first, its cause)]}"""
    changes, found = {}, {}
    for row in re.split(r"\n(?! )", BUGS.strip()):
        header, change, *cases = row.split("\n")
        bug, place = header.split(": ")
        line, other = change.strip().replace("\\n", "\n").split(" ->")
        other = other.removeprefix(" ")
        changes[bug] = place, line, other
        for flags, first_off, cause in (line.strip().split(" ->") for line in cases):
            variant, layout = flags.split(maxsplit=1)
            rows = found.setdefault(ranks_of(layout), [])
            rows.append((bug, variant, layout, first_off.strip(), cause.strip()))
    return changes, found


CHANGES, FOUND = bugs()


def planted(bug):
    """A context in which the function has another line."""
    place, line, other = CHANGES[bug]
    module, _, path = place.partition(":")
    *parts, name = path.split(".")
    owner = functools.reduce(getattr, parts, importlib.import_module(module))
    right, found = inspect.unwrap(getattr(owner, name)), {}
    source = textwrap.dedent(inspect.getsource(right))
    assert source.count(line) == 1, f"{place} has changed: {line}"
    if other.startswith("+ "):
        [indent] = re.findall(rf"^( *).*{re.escape(line)}", source, re.M)
        other = f"{other[2:]}\n{indent}{line}"
    helpers = dict(torch=torch, dist=dist, a_bias=a_bias, all_but_a_bias=all_but_a_bias)
    helpers |= dict(halve_in_step_2=halve_in_step_2, fill_padding=fill_padding)
    helpers["first_cuts"] = first_cuts
    exec(source.replace(line, other), right.__globals__ | helpers, found)
    return mock.patch.object(owner, name, found[name])


@pytest.mark.parametrize("world", FOUND)
def test_planted_bugs_are_caught(ranks, text, world):
    """Else a receipt passes with a bug, or sends its reader to another place."""
    cases, page = [], (ROOT / "docs/reference/planted-bugs.md").read_text()
    for bug, variant, layout, *_ in FOUND[world]:
        args = arguments(text, f"{VARIANTS[variant]} --layers 2 {layout}")
        if bug == "one bias left out":  # it starts at zero and gets a step of the learning rate
            args.weight_decay = 0.0
        cases.append((bug, args))
        assert bug in page and f"plants {len(CHANGES)} bugs" in page

    def work(rank):
        found = []
        for bug, args in cases:
            with case(bug), planted(bug):
                found.append(run_layout(rank, args))
        return found

    for row, results in zip(FOUND[world], zip(*ranks(world, work, timeout=400)), strict=True):
        with case(*row):
            receipt, (first_off, cause) = results[0][1], row[3:]
            assert {code for code, _ in results} == {1} and not receipt["ok"]
            if first_off == "nothing":  # what differs is no number
                assert receipt["first_off"] is None and not receipt["findings"]
            else:
                assert first_off in receipt["first_off"]
                assert cause in "\n".join(receipt["findings"])


def test_a_gradient_in_two_pieces_is_refused(ranks, text):
    """Else a gradient lacks a piece: a tied matrix on one stage gets one from the embedding and one
    from the head. With a split backward DDP would count two passes. (ZeRO 2 takes both.)"""
    args = arguments(text, f"{VARIANTS['sgd']} --dp 2 --schedule zb-h1 --microbatches 3")

    def work(rank):
        with planted("a tied matrix is deferred"):
            with pytest.raises(RuntimeError, match="more backward passes"):
                run_layout(rank, args)

    ranks(2, work)
