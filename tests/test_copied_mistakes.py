"""Copied tops, used wrongly: each mistake is refused in a sentence, or what follows is right."""

import importlib
import re
import sys
from contextlib import nullcontext
from copy import deepcopy
from types import SimpleNamespace as Names

import foreign
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import uses
from foreign import LENGTH, MODELS, WIDTH, batch, broken
from reference import case
from tops import choices, on_top_of, refused
from torch.distributed import group
from uses import TOPS, WAYS, Layout, context_core, equals_one_process, own_links

TOKENS, TARGETS, COUNT = batch(0, LENGTH)

# --- lines of code that are wrong by themselves, on two ranks, and the words that refuse them.
# {a | b} stands for both, and ... for any words

REFUSED = {
    "ddp": """
DDP(iter([]), world)  # used up
DDP(model.requires_grad_(False).parameters(), world)  # all frozen
DDP([p.detach() for p in model.parameters()], world)  # no parameter needs a gradient
DDP([shard_over(world)], world)  # has cut the model
""",
    "zero": """
ZeRO(model, world, {3 | 4}, SGD)  # there is no stage ... 3 is fsdp.FSDP
ZeRO(model, (world, world), 2, SGD)  # only this rank in common
setattr(linear.weight, "placement", {}) or {PlainZeRO(linear, world | ZeRO(linear, world, 1}, SGD)
    # has cut the model
PlainZeRO(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).{bfloat16() | requires_grad_(False)}),
    world, SGD)  # can't hold two dtypes, or frozen weights
ZeRO(nn.Linear(4, 4, bias=False), world, 2, torch.optim.{Adafactor | LBFGS | Muon})
    # needs whole matrices
torch.optim.lr_scheduler.StepLR(ZeRO(model, world, 2, SGD), 1)  # ZeRO is not an Optimizer
""",
    "zero fsdp": """
[PlainFSDP(linear, world) for _ in range(2)]  # in two units
FSDP(nn.Linear(4, 4, bias=False), world, torch.optim.{Adafactor | LBFGS | Muon})
    # needs whole matrices
FSDP(model, world, SGD).model{ | [1]}.state_dict()  # weights that are not here
FSDP(model, world, SGD).model{.float() | .to("cpu") | [1].to("cpu")}  # weights that are not here
deepcopy(FSDP(model, world, SGD).model{ | [1]})  # weights that are not here
twice_before_backward(FSDP(MODELS["mlp"](), world, SGD))  # ran twice before backward: units=
FSDP(model, world, SGD).model[1].load_state_dict(nn.Linear(6, 13).state_dict())
    # weights that are not here
linear.register_forward_hook(lambda *_: Names()) and FSDP(linear, world, SGD).model(
    torch.ones(WIDTH))  # returned a SimpleNamespace ... FSDP finds no tensor
""",
    "muon": """
Muon(model.parameters(), world, {[model[1].bias] | [weight] | [model[1].weight.detach()]})
    # is no matrix of the model, nor a stack
(lambda conv: Muon(conv.parameters(), world, [conv.weight]))(nn.Conv2d(3, 4, 2))  # is no matrix
Muon(model.parameters(), world, iter([]))  # no matrices
setattr(model[1].weight, "placement", {}) or Muon(model.parameters(), world, [model[1].weight],
    {momentum=0.5 | groups_of=lambda p: (world,) | update=len})  # has cut
""",
    "composition": """
groups_in_grid([shard_over(world)], {world | (alone(), world)})  # would add different shards
norm_in_grid(whole_gradients([shard_over(world)]), [alone()])  # the norm lacks ranks of [0, 1]
groups_in_grid(tied_matrices(), world)  # share parameters in another order
""",
    "tensor_parallel": """
parallelize_tensors(three_heads, world)
    # 6 heads and 3 kv-heads do not divide over 2 ... use 1 or 3
shard(shard(weight, 0, world), {0 | 1 | -2}, world)  # is a shard already
{ColumnParallelLinear | RowParallelLinear}({ColumnParallelLinear(nn.Linear(4, 6), world) |
    LoRA(4, 4) | nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)) |
    nn.utils.spectral_norm(nn.Linear(4, 4))}, world)  # a plain nn.Linear is needed, not this
VocabParallelEmbedding({VocabParallelEmbedding(nn.Embedding(6, 4), world) |
    ScaledEmbedding(6, 4)}, world)  # a plain nn.Embedding is needed
order_by_rank(nn.Linear(4, 9), [3, 6], 2)  # 2 ranks do not divide
VocabParallelEmbedding(nn.Embedding(7, 4), world)(torch.tensor([{7 | 8 | -1}]))
    # tokens must be from 0 to 6
VocabParallelCrossEntropy(7, world)(torch.ones(2, 4), torch.tensor([0, {7 | 8}]), 2)
    # targets must be below 7
VocabParallelCrossEntropy(7, world)(torch.ones(2, 7), torch.tensor([0, 1]), 2)
    # 4 of 7 logits ... not 7
twice(lambda x: {Enter | Leave}.apply(x * 1, world) ** 3, 2, 3)  # once_differentiable
twice(lambda x: VocabParallelCrossEntropy(7, world)(x @ torch.ones(3, 4), torch.tensor([0, 5]), 2),
    2, 3)  # does not require grad
""",
    "tensor_parallel sequence_parallel": """
mark_partial([weight], world) or tp.Boundary(tp.Enter, world)(weight)  # leave out Enter
twice(lambda x: {GatherTokens | ReduceScatterTokens}.apply(x, world) ** 3, 2, 4, WIDTH)
    # once_differentiable
""",
    "tensor_parallel sequence_parallel tensor_overlap": """
Layout(Transformer(lambda: Block(heads=3)), "sgd", tp=2).model(TOKENS)  # unflatten
twice(lambda x: sum(EnterAndProject(tp.Boundary(tp.Enter, world), [linear])(x).values()) ** 3,
    2, WIDTH)  # once_differentiable
twice(lambda x: sum(EnterAndProject(tp.Boundary(GatherTokens, world), [linear],
    {True | False})(x).values()) ** 3, 2, 4, WIDTH)  # once_differentiable
""",
    "pipeline": """
cut([*MODELS["chain"]()], 4)  # 1.weight of stage 3 is on rank 0 already ... reduce_tied
cut([linear, nn.Tanh()], 2)  # stage 1 has no parameters
""",
    "context_parallel gather_context": """
core({"ring" | "gather"})(*qkv({k=(2, 3, 6, 8) | k=(1, 2, 6, 8) | k=(2, 2, 5, 8) |
    k=(2, 2, 8, 8) | k=(2, 2, 6, 4) | dtype=torch.float64 | q=(4, 6, 8), k=(2, 6, 8)}))
    # give q ... a multiple of H_kv
core({"ring" | "gather"})(*qkv({v=(2, 2, 6, 4) | v=(2, 1, 6, 8)}))  # stack expects
core({"ring" | "gather"})(*qkv((2, 4, 5, 8), (2, 2, 5, 8)))  # not 2 equal chunks
core({"ring" | "gather"})(*qkv(), is_causal=False)  # unexpected keyword argument 'is_causal'
core({"ring" | "gather"})(*qkv(), attn_mask=torch.ones(6, 6))  # keyword argument 'attn_mask'
twice(lambda q: core({"ring" | "gather"})(q, q, q) ** 3, 2, 4, 6, 8)  # once_differentiable
""",
    "context_parallel ulysses": """
core("ulysses")(*qkv((2, 3, 6, 8), (2, 3, 6, 8)))  # 2 ranks do not divide the 3 heads
twice(lambda q: core("ulysses")(q, q, q) ** 3, 2, 4, 6, 8)  # once_differentiable
""",
    "expert_parallel": """
dispatch(chosen={4 | 5 | -1})  # out of bounds for dimension 0 with size 4
twice(lambda x: dispatch(x, experts=lambda rows, counts: rows**3), 3, 4)  # once_differentiable
""",
    "diloco": """
DiLoCo({iter([]) | [p.detach() for p in model.parameters()]}, world, 2)
    # no parameter needs a gradient
DiLoCo(stepped_on_in_pieces(model), world, 2)  # ZeRO's optimizer steps on ... update_weights()
DiLoCo(model, world, {0 | 2, delay=2})  # 0 <= delay < every
""",
}


def twice(function, *shape):
    """A gradient of a gradient."""
    x = torch.randn(shape, requires_grad=True)
    (gradient,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
    gradient.square().sum().backward()


class LoRA(nn.Linear):
    """It would have a forward of its own."""


class ScaledEmbedding(nn.Embedding):
    """So would this."""


def twice_before_backward(sharded):
    (sharded.model(TOKENS) + sharded.model(TOKENS)).sum().backward()


def qkv(q=(2, 4, 6, 8), k=(2, 2, 6, 8), v=None, dtype=torch.float32):
    return torch.randn(q, dtype=dtype), torch.randn(k), torch.randn(v or k)


def stepped_on_in_pieces(model):  # as ZeRO marks it
    model[1].weight.stepped_on_in_pieces = True
    return model


def user_names(module):
    """What the lines above may name."""

    def dispatch(x=torch.ones(3, 4), weights=torch.ones(3, 2), **given):
        given = dict(chosen=2 * dist.get_rank(), experts=lambda rows, counts: rows) | given
        chosen = torch.full((3, 2), given["chosen"])
        made = module.ExpertDispatch(4, group.WORLD)
        return made(x, weights, chosen, given["experts"])

    three_heads = Names(heads=6, kv_heads=3, experts=0, vocab=7)
    names = dict(
        world=group.WORLD,
        alone=lambda: dist.new_subgroups(1)[0],
        SGD=torch.optim.SGD,
        x=torch.ones(4),
        deepcopy=deepcopy,
        linear=nn.Linear(WIDTH, WIDTH),
        pipeline=sys.modules.get("pipeline"),
        tp=sys.modules.get("tensor_parallel"),
        weight=nn.Parameter(torch.ones(6, 4)),
        model=MODELS["mlp"](),
        core=context_core,
        three_heads=Names(config=three_heads, embed=None, blocks={}, head=None),
    )
    return vars(foreign) | vars(uses) | globals() | vars(module) | locals() | names


@pytest.mark.parametrize("files", REFUSED)
def test_lines_that_are_refused(copied, files):
    """Else a copier's mistake gives a wrong number without a word, or hangs."""

    def work(rank):
        module = importlib.import_module(files.split()[-1])
        for line, words in lines(REFUSED[files]):
            names = user_names(module)
            with case(line), refused(words):
                eval(line, names)

    copied(files, 2, work)


def shard_over(ranks):
    shard = nn.Parameter(torch.ones(3))
    shard.grad, shard.placement = torch.ones(3), {"cuts": {0: (ranks, 0, 3)}}
    return shard


def tied_matrices():
    """Two that two stages share, each in an order of its own."""
    matrices = [nn.Parameter(torch.full((2, 2), value)) for value in (1.0, 10.0)]
    for p in matrices:
        p.placement = {"partial": [group.WORLD]}
    return matrices[:: (1, -1)[dist.get_rank()]]


def lines(text):
    """(a line of code, the words that refuse it) of a text above."""
    for row in re.split(r"\n(?! )", text.strip()):
        code, words = row.split(" # ")
        words = ".*".join(re.escape(part) for part in words.split(" ... "))
        for line in choices(code):
            yield line.strip(), words


# --- a step's calls in the wrong order, or a model that is changed between them


def assign_gradients(use):
    for p in use.model.parameters():
        p.grad = torch.zeros_like(p)


def one_pass(use):
    x, y, count = batch(0, use.length)
    use.backward(*use.parts(x, y)[0], count)


def with_graph(use):
    use.model(batch(0, use.length)[0]).sum().backward(create_graph=True)


CALLS = {
    "run": lambda use: use.run(*batch(0, use.length)),
    "pass": one_pass,
    "clip": lambda use: use.clip(torch.ones(())),
    "break_off": lambda use: break_off(use, use.model[3]),
    "cast": lambda use: use.model.float(),
    "move": lambda use: use.model.to("meta"),
    "freeze": lambda use: use.model.requires_grad_(False),
    "unfreeze": lambda use: use.model.requires_grad_(True),
    "replace": lambda use: setattr(use.model[1], "weight", nn.Parameter(torch.ones(13, 6))),
    "wrap": lambda use: Layout(use.model, "sgd", **use.options),
    "drop_gradients": lambda use: use.model.zero_grad(),
    "assign_gradients": assign_gradients,
    "create_graph": with_graph,
    "leave_out_around": lambda use: setattr(use.sync, "around", lambda _: nullcontext()),
}

DDP = [("mlp", dict(data="ddp", way=way)) for way in WAYS]
STAGES = [("mlp", dict(data=data)) for data in ("zero 0", "zero 1", "zero 2", "fsdp")]
MUON = [("mlp", dict(data="muon"))]
PIPELINES = [("in-place", dict(pp=2, schedule="1f1b"))]
SPLIT_BACKWARDS = [
    ("heads", dict(pp=2, schedule="zb-v", data=data)) for data in ("zero 1", "zero 2", "fsdp")
]

REPLACED = "was replaced.*zero_grad.*second DDP.*create_graph.*unfrozen.*moved or cast after DDP"
MOVED = "replaced, moved or cast, frozen or unfrozen after ZeRO|cast, move, copy and load before"
SUMMED = "summed over the ranks already: sum once a step, .*zero_grad"
NEW_GRADIENTS = "cast", "wrap", "assign_gradients"
FREEZING = "freeze", "unfreeze"
CHANGES_OF_GRADIENTS = "cast", "drop_gradients", "assign_gradients", "wrap", "unfreeze"

# Uses; calls, between bars what is refused, then what is right. Where it ends with a bar, training
# goes on afterwards, and is one process's
ORDERS = [
    (DDP, "run | zero_grad | finish zero_grad zero_grad |", r"zero_grad\(\) after backward"),
    (DDP, "run finish finish | pass | zero_grad |", r"more backward passes than microbatches=2"),
    (DDP, "run | pass", "more backward passes than microbatches=2"),
    (DDP, "break_off | zero_grad", "or backward raised"),
    *[(DDP, f"| {change} run finish", REPLACED) for change in CHANGES_OF_GRADIENTS],
    (DDP, "| create_graph finish", REPLACED),
    (DDP, "run | drop_gradients finish", REPLACED),
    (STAGES, "run | zero_grad | finish |", r"zero_grad\(\) after backward"),
    (STAGES, "run finish | pass", "more backward passes than microbatches=2, or no zero_grad"),
    (STAGES, "break_off | zero_grad", "or backward raised"),
    (STAGES[:3], "run finish step | cast zero_grad", MOVED),
    (STAGES, "run finish step | move zero_grad", MOVED),
    (STAGES, "run finish step | replace zero_grad", MOVED),
    (STAGES, "run finish step | freeze zero_grad", MOVED),
    (STAGES, "run finish step | unfreeze zero_grad", MOVED),
    (STAGES[:3], "run finish step | wrap zero_grad", MOVED),
    (MUON, "run | zero_grad | finish |", r"no finish\(\)"),
    (MUON, "run | pass | finish |", "more backward passes than microbatches"),
    (MUON, "pass norm | pass | finish |", "backward after finish"),
    (MUON, "| drop_gradients run finish", "p.grad was replaced"),
    (MUON, "| create_graph finish", "p.grad was replaced"),
    *[(MUON, f"run step | {change} zero_grad", "frozen or unfrozen") for change in FREEZING],
    *[(MUON, f"run step zero_grad | {call} run", "p.grad was replaced") for call in NEW_GRADIENTS],
    (
        SPLIT_BACKWARDS,
        "leave_out_around | run finish",
        "more backward passes than microbatches=2, or no zero_grad",
    ),
]

TECHNIQUES = {}  # one launch has all rows of the same model and kind
for row in ORDERS:
    model, options = row[0][0]
    TECHNIQUES.setdefault(f"{model}, {[*options.values()][0]}", []).append(row)


@pytest.mark.parametrize("technique", TECHNIQUES)
def test_calls_in_the_wrong_order(copied, technique):
    """Else a step sums too much or too little without a word, or a refused one spoils the next."""

    def work(rank):
        for uses_of_row, calls, words in TECHNIQUES[technique]:
            for model, options in uses_of_row:
                with case(model, options, calls):
                    refuses(model, options, calls, words)

    copied(TOPS, 2, work)


def refuses(model, options, calls, words):
    use = make(model, options)
    before, wrong, *after = calls.split("|")
    act(use, before)
    for reduction in use.sync.works if use.kind == "ddp" else ():
        reduction.wait()  # what is on its way would change the gradients later
    gradients = {p: p.grad.clone() for p in use.model.parameters() if p.grad is not None}
    # The error's frames hold what is being sent: without them a slow rank waits for ever
    with refused(words) as error:
        act(use, wrong)
    dist.barrier()
    del error
    own_links.cache_clear()  # the next use needs new links: messages may be on their way
    if wrong.strip() == "finish":
        assert all(torch.equal(p.grad, g) for p, g in gradients.items())
    for calls_after in after:
        act(use, calls_after)
    if len(after) == 2:
        equals_one_process(use, model, optimizer_of(options))


def optimizer_of(options):
    return "muon" if options.get("data") == "muon" else "sgd"


def make(model, options):
    return Layout(MODELS[model](), optimizer_of(options), **options)


def act(use, calls):
    for call in calls.split():
        CALLS.get(call, lambda use: getattr(use, call)())(use)


# --- steps that are given up: afterwards training goes on as if they had not been


def break_off(use, module):
    with broken(module), pytest.raises(ArithmeticError):
        act(use, "pass")


def give_up(use):
    use.sync.finish()
    use.zero_grad()


def anywhere(use, step):
    """A backward raises, elsewhere on each rank. All ranks know of it."""
    use.zero_grad()
    act(use, "pass" if step % use.microbatches else "")
    break_off(use, use.model[5 - 2 * dist.get_rank()])
    give_up(use)


def between_passes(use, step):
    """Or by mistake: zero_grad() in the loop over micro-batches."""
    use.zero_grad()
    act(use, "pass")
    use.model(TOKENS)  # an exception comes before its backward
    with refused(r"zero_grad\(\) after backward|no finish\(\)"):
        use.zero_grad()
    give_up(use)


GIVEN_UP = [(3, MUON, anywhere), (2, MUON, between_passes), (2, DDP[:3], between_passes)]


@pytest.mark.parametrize("ranks, uses, give_up", GIVEN_UP)
def test_steps_given_up(copied, ranks, uses, give_up):
    """Else a run that goes on after an exception is not the same run any more."""

    def work(rank):
        for model, options in uses:
            with case(give_up.__name__, options):
                use = make(model, options)
                equals_one_process(use, model, optimizer_of(options), 4, give_up)

    copied(TOPS, ranks, work)


# --- the rest


@pytest.mark.parametrize(
    "cut, words",
    [
        (lambda y: y[:-1], r"stage 0 sends \(\(3, 5, 24\), torch.float64\), not \(\(4, 5"),
        (lambda y: y.float(), r"torch.float32\), not .* torch.float64"),
    ],
)
def test_results_of_stages_that_cannot_be_sent(copied, cut, words):
    """Else the next stage waits for ever, or reads bytes of another dtype."""

    def work(rank):
        use = make(*PIPELINES[0])
        act(use, "run zero_grad")
        if rank == 0:
            stage = use.stages[0]
            use.stages[0] = lambda tokens: cut(stage(tokens))
        act(use, "run")

    with pytest.raises(AssertionError, match=f"ValueError: .*{words}"):
        copied(TOPS, 2, work)


@on_top_of("diloco", 2)
def test_islands_that_start_with_different_weights(diloco):
    model = MODELS["mlp"]()
    model[1].weight.data += dist.get_rank()
    with refused("start with different weights"):
        diloco.DiLoCo(model, group.WORLD, 2)
