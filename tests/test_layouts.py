"""One curve: train.py in any layout against one process, and the bugs that its checks must
catch."""

import functools
import itertools

import pytest
import torch
import torch.distributed as dist

import ddp
import harness
import model as gpt
import pipeline
import proof
import sequence_parallel
import tensor_parallel
import train
import zero
import zero_bubble
from harness import data, initialize
from trainer.large_vocabulary import LeanCrossEntropy

# 3 layers do not divide by 2 stages, 5 (DEEP) not by 2, 3 or 4; 257 tokens not by 2 or 4; a clip
# of 0.1 always binds; the second step is the one that the ledger watches
BASE = "--layers 3 --heads 4 --width 32 --context 16 --batch 12 --steps 2 --dtype float64 --seed 3"
BASE += " --grad-clip 0.1 --lr 0.01 --min-lr 0.01 --warmup 0 --sample 0 --eval-batches 1 --quiet"
SGD = "--optimizer sgd --lr 0.3 --min-lr 0.3"
MIXTURE = "--experts 5 --top-k 2 --shared 1 --balance-loss 0.1 --z-loss 0.01"
VARIANTS = {
    "gpt2": "",
    "llama": "--family llama --kv-heads 4",
    "grouped": "--family llama --kv-heads 2",
    "sgd": SGD,
    "odd": f"--context 15 {SGD}",
    "dropout": f"--dropout 0.2 {SGD}",
    "dropout-grouped": f"--family llama --kv-heads 2 --dropout 0.2 {SGD}",
    "moe": f"{MIXTURE} --family llama --kv-heads 2",
    "moe-gpt2": f"{MIXTURE} {SGD} --bias-rate 0.01",
}
LAYOUTS = """
gpt2      --dp 1
gpt2      --dp 2 --microbatches 3 --recompute selective
sgd       --dp 3 --microbatches 2 --bucket-mb 0.01 --steps 3
llama     --tp 4 --microbatches 2 --recompute block
dropout   --pp 4 --schedule naive --microbatches 3 DEEP
llama     --dp 2 --pp 3 --microbatches 3
dropout   --dp 3 --zero 1 --microbatches 2
sgd       --dp 4 --zero 2 --microbatches 3 --bucket-mb 0.01
llama     --dp 3 --zero 3 --microbatches 2 --recompute block --steps 3
grouped   --dp 2 --tp 2 --zero 1 --microbatches 2 --bucket-mb 0.01
gpt2      --dp 2 --tp 2 --zero 2 --microbatches 2 --reduce-once
dropout   --dp 2 --pp 3 --zero 3 --microbatches 3 --recompute half DEEP
llama     --dp 2 --pp 2 --zero 3 --microbatches 2 --keep-gathered --schedule gpipe
gpt2      --zero 3
dropout   --pp 2 --schedule zb-v --microbatches 3 --tp 2 --recompute block DEEP
dropout-grouped --pp 2 --schedule zb-h2 --microbatches 4 --tp 2 --recompute half DEEP
dropout   --pp 2 --schedule dualpipev --dp 2 --zero 2 --microbatches 6 --recompute block DEEP
gpt2      --pp 2 --schedule dualpipev --dp 2 --zero 3 --microbatches 6 --keep-gathered DEEP
sgd       --pp 2 --schedule interleaved --dp 2 --zero 2 --microbatches 2 --recompute selective DEEP
llama     --pp 2 --schedule interleaved --dp 2 --zero 3 --microbatches 2 --reduce-once DEEP
gpt2      --pp 2 --schedule zb-h1 --dp 2 --zero 3 --microbatches 3 --recompute selective
llama     --tp 4 --sp --gather-again --recompute selective
sgd       --tp 2 --sp --pp 2 --schedule zb-v --microbatches 3 --recompute selective DEEP
grouped   --tp 2 --sp --dp 2 --zero 2 --microbatches 2 --recompute half
dropout   --tp 2 --sp --pp 2 --schedule zb-h1 --microbatches 2 --gather-again
moe-gpt2  --dp 2 --ep 2 --microbatches 3
moe       --dp 4 --ep 2 --expert-chunks 2 --recompute half
moe-gpt2  --tp 2 --sp --microbatches 2 --recompute selective
moe-gpt2  --tp 2 --sp --gather-again --dp 2 --ep 2 --zero 1 --layers 2
moe-gpt2  --dp 2 --ep 2 --pp 2 --schedule zb-v --zero 3 --microbatches 2 --recompute block DEEP
grouped   --cp 4 --cp-kind ulysses --recompute half
llama     --cp 4 --cp-kind ring-ulysses --microbatches 2 --recompute block
odd       --cp 3 --dp 2 --microbatches 2
odd       --cp 2 --tp 2 --sp --recompute block
sgd       --cp 2 --pp 2 --schedule zb-v --microbatches 3 DEEP
gpt2      --cp 2 --pp 2 --zero 2 --cp-kind gather --microbatches 2 --recompute half
dropout   --cp 2 --tp 2 --sp --microbatches 2
moe-gpt2  --cp 2 --dp 2 --ep 4 --zero 1
moe       --cp 2 --dp 2 --ep 2 --tp 2 --sp --zero 2 --recompute block --layers 2
moe       --dp 2 --tp 2 --pp 2 --cp 2 --ep 4 --sp --zero 3 --schedule zb-h1 --microbatches 2 SHALLOW
llama     --pp 2 --dp 2 --schedule zb-h1 --zero 2 --microbatches 3
llama     --pp 2 --dp 2 --schedule zb-h2 --zero 3 --microbatches 3
sgd       --dp 2 --schedule zb-h1 --microbatches 3
"""
# Two copies of experts, each on two ranks; experts that are not split
IN_GROUPS = """
moe       --cp 2 --dp 4 --ep 2 --zero 3 --zero-ranks 4
moe-gpt2  --dp 8 --ep 4 --zero 2 --zero-ranks 2 --batch 16 --bucket-mb 0.01
odd       --tp 2 --sp --dp 4 --zero 1 --zero-ranks 2
dropout   --dp 2 --cp 2 --pp 2 --zero 3 --zero-ranks 2 --schedule zb-h1 --microbatches 2 --offload
"""


def rows(table):
    """[(variant, layout)] of a table's lines."""
    table = table.replace("DEEP", "--layers 5").replace("SHALLOW", "--layers 2")
    return [line.split(maxsplit=1) for line in table.strip().splitlines()]


def arguments(text, flags):
    args = train.flags().parse_args(f"{BASE} {flags} --data {text}".split())
    args, _ = train.prepare(args)
    return args


def run_layout(rank, args, broken=None):
    """train.py's own function on this rank; returns its exit code and the receipt."""
    if broken:
        broken()
    run = proof.Run(args, rank, dist.get_world_size(), torch.device("cpu"))
    code = train.train(run)
    return code, getattr(run, "result", None)


@pytest.fixture(scope="session")
def reference(text):
    """Loss and gradient norm of each step of one process: a plain loop, with PyTorch's own
    clipping."""

    @functools.cache
    def train_alone(variant, layers, steps):
        args = arguments(text, f"{VARIANTS[variant]} --layers {layers} --steps {steps}")
        config, corpus = harness.configure(args), data.load(text)
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
        }
        optimizer, pairs = kind[args.optimizer](groups), []
        for step in range(args.steps):
            where = range(args.batch), config.context, args.seed
            tokens, targets, samples = corpus.batch(step, *where)
            loss = model(tokens, targets=targets, sample_ids=samples)
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)
            optimizer.step()
            gpt.rebalance(model)
            pairs.append((loss.item(), norm.item()))
        assert min(norm for _, norm in pairs) > args.grad_clip
        return pairs

    return train_alone


@pytest.mark.parametrize("variant, layout", rows(LAYOUTS))
def test_one_curve(ranks, text, reference, variant, layout):
    args = arguments(text, f"{VARIANTS[variant]} {layout}")
    results = ranks(args.dp * args.cp * args.tp * args.pp, run_layout, args)
    receipt = check_receipts(results, args)
    for step, (loss, norm) in zip(receipt["steps"], reference(variant, args.layers, args.steps)):
        assert step["loss"] == pytest.approx(loss, rel=1e-10)
        assert step["grad_norm"] == pytest.approx(norm, rel=1e-10)


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
        cases.append(arguments(text, f"{VARIANTS[variant]} {layout} --layers 2"))

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


@pytest.mark.parametrize("variant", ["gpt2", "llama"])
def test_recomputation_shrinks_the_peak(ranks, text, variant):
    """One long sequence through 8 blocks, so that head and embedding are little beside them."""
    peaks = []
    for kind in ("none", "selective", "half", "block"):
        flags = f"{VARIANTS[variant]} --tp 2 --sp --layers 8 --context 128 --batch 1 --prove 0"
        flags += f" --dtype float32 --recompute {kind}"
        [(code, receipt), _] = ranks(2, run_layout, arguments(text, flags))
        assert code == 0
        held = receipt["held"]["activations_peak"]
        assert 1 < held["bytes"] / held["formula_bytes"] < 1.6
        peaks.append(held["bytes"])
    assert peaks[1] < 0.8 * peaks[0] and peaks[3] < 0.5 * peaks[0]
    assert 1.05 * peaks[3] < peaks[2] < 0.95 * peaks[1]


def test_compiled_blocks(ranks, text, monkeypatch):
    """Each block is one graph. The graphs run as they are: code for them takes long to make."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    args = arguments(text, "--layers 1 --zero 3 --compile")

    def work(rank):
        code, _ = run_layout(rank, args)
        return code, torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0

    assert ranks(1, work) == [(0, True)]


DENSE = ["--tp 2 --pp 2 --cp 2", "--dp 2 --pp 2 --schedule zb-v"]  # zb-v has 4 stages
EXPERTS = ["--dp 2 --ep 2 --pp 2", "--tp 2 --cp 2 --ep 2 --sp --zero 3"]


@pytest.mark.parametrize(
    "variant, layers, layouts",
    [("gpt2", "--layers 4", DENSE), ("moe", "--layers 2", EXPERTS)],
)
def test_sample_and_validation_are_the_same_in_every_layout(
    ranks, text, capfd, variant, layers, layouts
):
    said = []
    for layout in ("--dp 1", *layouts):
        args = arguments(text, f"{VARIANTS[variant]} {layout} {layers} --prove 0")
        args.sample, args.quiet, args.prompt, args.steps = 6, False, "a b", 1
        ranks(args.dp * args.cp * args.tp * args.pp, run_layout, args)
        lines = capfd.readouterr().out.splitlines()
        start = lines.index("sample:")
        validation = [line for line in lines if line.startswith("validation loss")]
        said.append((lines[start : start + 2], validation))
    assert said[0] == said[1] == said[2] and len(said[0][0][1]) > 3 and len(said[0][1]) == 1


# --- planted bugs, each once real in a published project: the checks must fail


def gradients_summed_twice():
    finish = ddp.DDP.finish

    def wrong(self):
        finish(self)
        for bucket in self.buckets:
            bucket.flat *= dist.get_world_size(self.group)

    ddp.DDP.finish = wrong


def gradients_not_summed():
    ddp.DDP._start_full_buckets = lambda self, rest=False: None


def zero_sums_twice():
    finish = zero.ZeRO.finish

    def wrong(self):
        if self.last_call != "finish":
            finish(self)
            for bucket in self.trainable:
                bucket.gradient *= dist.get_world_size(self.group)

    zero.ZeRO.finish = wrong


def copies_not_summed():
    zero.ZeRO._keep_shard = lambda self, bucket: bucket.keep_shard()


def norm_counts_copies():
    def wrong(parameters, groups=()):
        total = sum(p.grad.double().square().sum() for p in parameters)
        for group in groups:
            dist.all_reduce(total, group=group)
        return total.sqrt()

    harness.grad_norm = wrong


def norm_is_local():
    right = harness.grad_norm
    harness.grad_norm = lambda parameters, groups=(): right(parameters)


def one_bias_left_out():
    start = ddp.DDP.__init__

    def wrong(self, parameters, *rest, **options):
        parameters = list(parameters)
        left = next(p for p in parameters if p.dim() == 1)
        left.grad = torch.zeros_like(left)
        start(self, [p for p in parameters if p is not left], *rest, **options)

    ddp.DDP.__init__ = wrong


def no_rank_adds_to_a_shard():
    zero.ZeRO._reduce = lambda self, bucket: bucket.keep_shard()


def first_piece_on_every_rank():
    right = tensor_parallel.span
    tensor_parallel.span = lambda size, rank, t: right(size, 0, t)


def last_microbatch_only():
    play = pipeline.play

    def wrong(schedule, forward, *rest, **options):
        last = max(a.microbatch for a in schedule[0])

        def only_last(stage, m, x):
            y = forward(stage, m, x)
            return y if m == last or not y.requires_grad else y - y + y.detach()

        return play(schedule, only_last, *rest, **options)

    pipeline.play = wrong


def partial_gradients_left_partial():
    parallelize = sequence_parallel.parallelize

    def wrong(model, group, keep_gathered=True):
        parallelize(model, group, keep_gathered)
        for p in model.parameters():
            if not tensor_parallel.split_over(p, group):
                others = [g for g in p.placement["partial"] if g is not group]
                p.placement = p.placement | {"partial": others}
        return model

    sequence_parallel.parallelize = wrong


def bias_on_every_rank():
    def wrong(self, x):
        return self.leave(torch.nn.functional.linear(x, self.weight, self.bias))

    tensor_parallel.RowParallelLinear.forward = wrong


def no_f():
    def wrong(ctx, grad):
        return grad, *(None for _ in ctx.needs_input_grad[1:])

    tensor_parallel.CopyToGroup.backward = staticmethod(wrong)


def tied_gradients_never_meet():
    def forgetful(finish):
        def wrong(self):
            for bucket in self.buckets:
                bucket.partial_groups = []
                if isinstance(self, zero.ZeRO):
                    bucket.place = bucket.place._replace(partial=())
            finish(self)

        return wrong

    for kind in (ddp.DDP, zero.ZeRO):
        kind.finish = forgetful(kind.finish)


def all_shards_equal():
    """All ranks take the first piece when the model is filled. The proof's own pieces are right."""

    right = harness.rank.take

    def wrong(full, parameter):
        cuts = harness.placement(parameter)["cuts"]
        lookalike = torch.empty(parameter.shape, device="meta")
        first = {dim: (group, 0, size) for dim, (group, _, size) in cuts.items()}
        lookalike.placement = {"cuts": first}
        return right(full, lookalike)

    harness.rank.take = wrong


def loss_is_a_mean_of_means():
    forward = LeanCrossEntropy.forward

    def wrong(self, logits, targets, count):
        return forward(self, logits, targets, targets.numel())

    LeanCrossEntropy.forward = wrong


def one_seed_for_all_samples():
    forward = gpt.GPT.forward

    def wrong(self, x, positions=None, targets=None, target_count=None, sample_ids=None):
        sample_ids = None if sample_ids is None else torch.arange(len(sample_ids))
        return forward(self, x, positions, targets, target_count, sample_ids)

    gpt.GPT.forward = wrong


def nothing_recomputed():
    harness.recompute = lambda model, kind: None


def recomputed_without_the_collectives():
    right = tensor_parallel.ReduceFromGroup.forward

    def wrong(ctx, x, *rest):
        in_backward = torch._C._current_graph_task_id() != -1
        return x.clone() if in_backward else right(ctx, x, *rest)

    tensor_parallel.ReduceFromGroup.forward = staticmethod(wrong)


def after_finish(change):
    """change(parameter) for the gradient of one bias, when all are complete."""
    finish = ddp.DDP.finish

    def wrong(self):
        finish(self)
        change(next(p for bucket in self.buckets for p in bucket.parameters if p.dim() == 1))

    ddp.DDP.finish = wrong


def averaged_once_too_often():
    after_finish(lambda p: p.grad.div_(dist.get_world_size()))


def never_received():
    after_finish(lambda p: p.grad.zero_())


def right_on_the_first_rank_alone():
    after_finish(lambda p: p.grad.mul_(1 + 5 * dist.get_rank()))


def padding_gets_a_gradient():
    finish = ddp.DDP.finish

    def wrong(self):
        finish(self)
        for bucket in self.buckets:
            for p in bucket.parameters:
                for dim, (_, _, size) in harness.placement(p)["cuts"].items():
                    p.grad.narrow(dim, size, p.shape[dim] - size).fill_(0.1)

    ddp.DDP.finish = wrong


def half_a_gradient_in_step_2():
    finish, steps = ddp.DDP.finish, itertools.count(1)

    def wrong(self):
        finish(self)
        for bucket in self.buckets if next(steps) == 2 else ():
            bucket.flat *= 0.5

    ddp.DDP.finish = wrong


def one_weight_never_moved():
    right = harness.make_optimizer
    harness.make_optimizer = lambda parameters, args: right(list(parameters)[1:], args)


SUMMED = "one process's: as if summed once too often, or not averaged, over dp (2)"
PARTIAL = "own partial sum: it was never all-reduced over "
BACKWARD = "step 1, backward"
FORWARD = "step 1, forward: the output of "
LOCAL = "of gradients that are right: as if of rank 0's tensors alone"
COUNTED = "as if tensors that several ranks of {} hold counted once for each"
LAST = "it is that of the last micro-batch alone"
TIMES_4 = "it is 4 times one process's"


@pytest.mark.parametrize(
    "bug, variant, layout, first_off, cause",
    [
        (gradients_summed_twice, "sgd", "--dp 2", BACKWARD, f"it is 2 times {SUMMED}"),
        (gradients_summed_twice, "gpt2", "--dp 2", BACKWARD, SUMMED),
        (gradients_not_summed, "sgd", "--dp 2", BACKWARD, PARTIAL + "dp"),
        (norm_counts_copies, "gpt2", "--tp 2", COUNTED.format("tp"), ""),
        (norm_counts_copies, "sgd", "--pp 2", COUNTED.format("pp"), ""),
        (norm_is_local, "gpt2", "--tp 2", LOCAL, ""),
        (norm_is_local, "sgd", "--pp 2", LOCAL, ""),
        (one_bias_left_out, "sgd", "--dp 2", BACKWARD, PARTIAL + "dp"),
        (one_bias_left_out, "gpt2", "--dp 2", BACKWARD, PARTIAL + "dp"),
        (last_microbatch_only, "sgd", "--dp 2 --microbatches 2", BACKWARD, LAST),
        (last_microbatch_only, "sgd", "--pp 3 --microbatches 2", BACKWARD, LAST),
        # The bias is zero until the first step
        (bias_on_every_rank, "sgd", "--tp 2", "step 2, forward: the output of blocks.0", ""),
        (no_f, "sgd", "--tp 2", BACKWARD, PARTIAL + "tp"),
        (partial_gradients_left_partial, "sgd", "--tp 2 --sp", BACKWARD, PARTIAL + "tp"),
        (tied_gradients_never_meet, "sgd", "--pp 3", BACKWARD, PARTIAL + "tied"),
        (tied_gradients_never_meet, "sgd", "--pp 3 --zero 2", BACKWARD, PARTIAL + "tied"),
        (zero_sums_twice, "sgd", "--dp 2 --zero 2", BACKWARD, SUMMED),
        (zero_sums_twice, "gpt2", "--dp 2 --zero 3", BACKWARD, SUMMED),
        (copies_not_summed, "sgd", "--dp 4 --zero 2 --zero-ranks 2", BACKWARD, PARTIAL + "across"),
        (no_rank_adds_to_a_shard, "sgd", "--dp 2 --zero 1", BACKWARD, "of one rank's rows alone"),
        (first_piece_on_every_rank, "sgd", "--tp 2", "129:257 of dimension 0 of embed.token", ""),
        (all_shards_equal, "sgd", "--tp 2", FORWARD + "blocks.0", ""),
        (loss_is_a_mean_of_means, "sgd", "--dp 2 --microbatches 2", "step 1, the loss: 4", TIMES_4),
        (one_seed_for_all_samples, "dropout", "--dp 2", FORWARD + "embed", ""),
        (nothing_recomputed, "sgd", "--tp 2 --recompute block", None, None),
        (nothing_recomputed, "sgd", "--tp 2 --sp --recompute selective", None, None),
        (recomputed_without_the_collectives, "sgd", "--tp 2 --recompute block", BACKWARD, ""),
        (averaged_once_too_often, "sgd", "--dp 3", BACKWARD, "averaged once too often"),
        (never_received, "sgd", "--dp 2", BACKWARD, "it is zero: it was never computed"),
        (right_on_the_first_rank_alone, "sgd", "--dp 3", BACKWARD, "it is right on rank 0 alone"),
        (padding_gets_a_gradient, "sgd", "--tp 2", BACKWARD, "only its padding is off"),
        (half_a_gradient_in_step_2, "sgd", "--dp 2", "and the norm 0.5 times one process's", ""),
        (one_weight_never_moved, "sgd", "--dp 2", "the optimizer's step", "still has its initial"),
    ],
    ids=lambda x: x.__name__ if callable(x) else x if x in VARIANTS or "--" in str(x) else "",
)
def test_planted_bug_is_caught(ranks, text, bug, variant, layout, first_off, cause):
    """The receipt fails, and says where and why. first_off None: what differs is no number."""
    layers = 3 if "--pp 3" in layout else 2
    args = arguments(text, f"{VARIANTS[variant]} {layout} --layers {layers}")
    if bug is one_bias_left_out:  # a bias that starts at zero and gets a step of the learning rate
        args.weight_decay = 0.0
    args.steps = {one_weight_never_moved: 1, half_a_gradient_in_step_2: 3}.get(bug, 2)
    results = ranks(args.dp * args.cp * args.tp * args.pp, run_layout, args, bug)
    assert {code for code, _ in results} == {1} and not results[0][1]["ok"]
    receipt = results[0][1]
    if first_off is None:
        assert receipt["first_off"] is None and not receipt["findings"]
        return
    assert first_off in receipt["first_off"]
    assert cause in receipt["findings"][0]["cause"]
    assert 1 <= len(receipt["findings"]) <= 6
    in_first_step = "step 1, forward" in first_off or first_off == BACKWARD
    assert not in_first_step or receipt["findings"][0]["step"] == 1


def test_a_gradient_in_two_pieces_is_refused(ranks, text):
    """A tied matrix on one stage gets a gradient from the embedding and one from the head. With a
    split backward DDP would count two passes. (ZeRO reduces its bucket last, so it is right.)"""

    def defer_the_head_too():
        right = zero_bubble.can_defer

        def wrong(x, weight):
            weight.used_twice = False
            return right(x, weight)

        zero_bubble.can_defer = wrong

    flags = f"{VARIANTS['sgd']} --dp 2 --schedule zb-h1 --microbatches 3"
    with pytest.raises(AssertionError, match="more backward passes"):
        ranks(2, run_layout, arguments(text, flags), defer_the_head_too)
    for stage in (1, 2):
        args = arguments(text, f"{flags} --zero {stage}")
        results = ranks(2, run_layout, args, defer_the_head_too)
        assert {code for code, _ in results} == {0}
