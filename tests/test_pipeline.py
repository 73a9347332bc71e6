"""Schedules as data; pipelines against one process and PyTorch's pipelining."""

import collections
import contextlib
import dataclasses
import itertools
import sys
import weakref

import pytest
import torch
from reference import CONFIGS, batch, case, make_optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointError, checkpoint

import harness
import model as gpt
import pipeline as pp
import zero_bubble as zb
from dualpipe import PairedSchedule
from harness import families, initialize, presets
from receipts import pipeline as schedules
from receipts.formulas import flops_per_token
from receipts.pipeline import SCHEDULES, find_schedule
from trainer.runner import forwards_of
from trainer.split_backward import FullStore


def shapes(name, ranks=range(1, 9), microbatches=range(1, 18)):
    """(ranks, micro-batches, chunks, schedule) of all the sizes for which a schedule of that name
    exists."""
    for p, m in itertools.product(ranks, microbatches):
        for chunks in (1, 2, 3, 4) if name == "interleaved" else (None,):
            try:
                yield p, m, chunks, find_schedule(name, p, m, chunks)
            except ValueError as e:
                assert name == "interleaved" and m % p or name == "dualpipev" and m < 2 * p, e


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_formula_holds_just_where_its_condition_does(name):
    for p, m, chunks, schedule in shapes(name, (2, 3, 4, 6), range(1, 19)):
        v = len(schedule.stages(0))
        spans = schedules.simulate(schedule)
        waits = schedules.waiting(spans)
        holds = waits == schedules.BUBBLES[name][1](p, m, v, v, v, v)
        expected, text = schedules.by_paper(name, p, m, v, v, v, v)
        assert holds == (expected is not None) and holds != ("only for m >=" in text)
        if name in ("gpipe", "1f1b", "interleaved"):
            assert schedules.utilisation(spans) == pytest.approx(v * m / (v * m + p - 1))


def ends(schedule, receives, line=None):
    """Whether a step ends on the strictest nccl that its sources allow. A message needs the kernels
    of both its ranks. Before each action the host waits until its device is idle, as when CUDA
    loads a kernel or frees memory: until all that its rank has posted is through.

    receives: as of Schedule. line(message): messages of one name pass a rank one by one, in the
    order in which it posts them; without it each has a stream of its own."""
    lines = [collections.defaultdict(collections.deque) for _ in schedule.rows]  # {name: messages}
    steps = [schedules.steps_of(schedule, rank) for rank in range(len(schedule.rows))]
    done = [0] * len(steps)

    def post(rank, message):
        lines[rank][line(message) if line else message].append(message)

    def stand_before(rank):
        for action in steps[rank][done[rank]] if done[rank] < len(steps[rank]) else ():
            for message in receives.get(action, []):
                post(rank, message)

    for rank in range(len(steps)):
        stand_before(rank)
    progress = True
    while progress:
        progress = False
        for rank, queues in enumerate(lines):
            for queue in list(queues.values()):
                while queue:
                    message, [other] = queue[0], {queue[0].source, queue[0].target} - {rank}
                    opposite = lines[other][line(message) if line else message]
                    if not opposite or opposite[0] != message:
                        break
                    queue.popleft(), opposite.popleft()
                    progress = True
            if done[rank] < len(steps[rank]) and not any(queues.values()):
                for outgoing in map(schedule.outgoing, steps[rank][done[rank]]):
                    if outgoing is not None and outgoing.source != outgoing.target:
                        post(rank, outgoing)
                done[rank] += 1
                stand_before(rank)
                progress = True
    return done == [len(row) for row in steps]


def one_ahead(schedule):
    """The second edition's rule, as {action: receives}: of each channel one is always posted."""
    receives = collections.defaultdict(list)
    for row in schedule.rows:
        waiting = collections.defaultdict(list)
        for action in row:
            message = schedule.incoming(action)
            if message is not None and message.source != message.target:
                waiting[channels(message)].append((message, action))
        for pairs in waiting.values():
            receives[row[0]].append(pairs[0][0])
            for (_, action), (following, _) in itertools.pairwise(pairs):
                receives[action].append(following)
    return receives


def channels(message):
    return message.kind, message.source, message.target


def groups(message):
    """Where nccl gives a group one stream: with init_process_group(device_id=...)."""
    return message.kind, message.source < message.target


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_rank_waits_for_ever_on_nccl(name):
    """In training and forward alone, whatever is loaded or freed. Posting too early would hang."""
    for _, _, _, schedule in shapes(name, (2, 3, 4, 6, 8, 16), (1, 3, 8, 16, 17)):
        if name == "dualpipev":
            schedule = PairedSchedule(schedule.rows)
        for played in (schedule, forwards_of(schedule), forwards_of(schedule, 1)):
            for line in (None, channels, groups):
                assert ends(played, played.receives_before, line)
        assert not ends(schedule, one_ahead(schedule), channels)


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_are_sound(name):
    count = 0
    for p, m, chunks, schedule in shapes(name):
        stages = p * (chunks or (2 if name in ("zb-v", "dualpipev") else 1))
        assert len(schedule.rows) == p and sorted(schedule.owner) == list(range(stages))
        for stage, rank in schedule.owner.items():
            microbatches = [a.microbatch for a in schedule[rank] if a[:2] == ("F", stage)]
            assert sorted(microbatches) == list(range(m))
        held = [schedules.in_flight(row) for row in schedule.rows]
        assert schedules.most_in_flight(name, p, m, chunks or 2) in (None, max(held))
        assert name != "1f1b" or held == [min(m, p - rank) for rank in range(p)]
        assert name != "zb-v" or m < 2 * p or held == [2 * p] * p
        count += 1
    assert count >= (70 if name in ("interleaved", "dualpipev") else 136)


def test_where_stages_are():
    assert find_schedule("interleaved", 3, 3, 3).owner == {stage: stage % 3 for stage in range(9)}
    for name in ("zb-v", "dualpipev"):
        assert find_schedule(name, 3, 6).owner == {0: 0, 1: 1, 2: 2, 3: 2, 4: 1, 5: 0}


def simulate(name, p, m, transfer=0.0, **times):
    times["B"] = times["I"] + times["W"]
    return schedules.simulate(find_schedule(name, p, m), lambda a: times[a.kind], transfer)


def test_zero_bubble_with_other_times():
    """H1 and H2 where a weight's gradient takes less than an input's: (p-1)(F + I - W) and (p-1)(F
    + I - 2W)."""
    for p, (f, i, w) in itertools.product((2, 4, 8), ((1, 1, 0.75), (1, 1.25, 0.75), (1.5, 2, 1))):
        for name, saved in (("zb-h1", w), ("zb-h2", 2 * w)):
            waits = schedules.waiting(simulate(name, p, 4 * p, F=f, I=i, W=w))
            paper = schedules.BUBBLES[name][1](p, 4 * p, 1, f, i, w)
            assert waits == pytest.approx(paper) == (p - 1) * (f + i - saved), name


def test_transfers_take_time():
    spans = simulate("gpipe", 2, 1, transfer=1, F=1, I=1, W=1)
    assert schedules.utilisation(spans) == pytest.approx(6 / (2 * 8))
    # in a V the turn stays on its rank: 6 messages of 3 boundaries instead of 8 of 4
    spans = simulate("zb-v", 2, 1, transfer=10, F=1, I=1, W=0)
    assert max(row[-1][1] for row in spans) == 8 + 4 * 10


def test_a_schedule_that_hangs_is_refused():
    """Rank 0 wants a gradient before its second forward, rank 1 a second forward before it."""
    first, second = ["F0 B0 F1 B1".split(), "F0 F1 B0 B1".split()]
    rows = [[pp.Action(k, s, int(m)) for k, m in row] for s, row in enumerate((first, second))]
    with pytest.raises(ValueError, match="each rank waits for another"):
        pp.Schedule(rows)


def test_a_forward_without_a_backward_is_refused(ranks):
    """Its gradient would be missing. Not so in an evaluation."""

    def work(rank):
        schedule, weight = pp.Schedule([pp.Row("FFB", 0)]), torch.ones(2, requires_grad=True)
        pipeline = pp.Pipeline(schedule, lambda *_: weight.sum(), (2,), torch.float32, "cpu")
        with pytest.raises(RuntimeError, match=r"no backward of \[\(0, 1\)\]"):
            pipeline.run()
        with torch.no_grad():
            forwards = forwards_of(schedule)
            again = pp.Pipeline(forwards, lambda *_: weight.sum(), (2,), torch.float32, "cpu")
            assert again.run() == [2, 2]

    ranks(1, work)


def test_stages_of_a_tied_model_on_two_ranks_need_a_group():
    config = CONFIGS["gpt2"]
    with torch.device("meta"), pytest.raises(ValueError, match="tied_group"):
        harness.split(lambda: families.build(config), [range(1), range(1, config.layers)], [0])


@pytest.mark.parametrize("vocab", [100, 2000, 10000])
def test_balance_is_the_best_there_is(vocab):
    """In no cut does the most expensive stage cost less. The output projection costs as much as a
    part of a layer, as one, as five and a half."""
    config = presets.configure("tiny", layers=7, vocab=vocab)
    projection = 6 * config.width * vocab
    layer = (flops_per_token(config) - projection) // 7

    def most(ranges):
        return max(layer * len(r) + projection * (r[-1] == 6) for r in ranges)

    for stages in range(1, 8):
        layers = schedules.stage_layers(config, stages)
        assert [i for r in layers for i in r] == list(range(7)) and all(layers)
        cuts = [(0, *ends, 7) for ends in itertools.combinations(range(1, 7), stages - 1)]
        others = [[range(*pair) for pair in itertools.pairwise(cut)] for cut in cuts]
        assert most(layers) == min(map(most, others))
    with pytest.raises(ValueError, match="too few"):
        schedules.stage_layers(config, 8)


def build(config, schedule, rank, ends):
    def whole():
        with torch.device("meta"):
            return families.build(config)

    layers = schedules.stage_layers(config, schedule.last + 1)
    parts = harness.split(whole, layers, schedule.stages(rank), ends)
    return initialize.fill(harness.Stages(parts), 7, dtype=torch.float64)


MIXTURE = presets.configure(
    layers=4, heads=4, width=32, context=12, vocab=61, experts=4, shared=1, family="llama"
)


def hooked(rank, name, config, dtype, watch=contextlib.nullcontext, recompute="none"):
    """A step of a schedule: (parameter, "whole" or "part") of each hook that ran, and gradients."""
    schedule, links, hooks, now = find_schedule(name, 2, 4), pp.make_links(), [], []
    model = build(config, schedule, rank, None).to(dtype)
    for part in model.parts.values():
        harness.recompute(part, recompute)
    for n, p in model.named():
        p.register_post_accumulate_grad_hook(lambda _, n=n: hooks.append((n, now[-1])))
    tokens, targets, _, count = batch(0)

    def forward(stage, m, x):
        return model[stage](
            tokens[m : m + 1] if x is None else x, targets=targets[m : m + 1], target_count=count
        )

    @contextlib.contextmanager
    def around(action):
        now.append("part" if action.kind == "I" else "whole")
        yield

    with watch():
        options = dict(around=around, make_store=FullStore)
        zb.SplitPipeline(schedule, forward, (1, 12, 32), dtype, "cpu", links, **options).run()
    return hooks, {n: p.grad for n, p in model.named()}


def test_experts_are_deferred_too(ranks):
    """By the grouped kernel in float32, by a loop in float64. The split changes no gradient."""
    cases = list(itertools.product((torch.float32, torch.float64), ("zb-h1", "1f1b")))

    def work(rank):
        return {(dtype, name): hooked(rank, name, MIXTURE, dtype) for dtype, name in cases}

    for found in ranks(2, work):
        for dtype in (torch.float32, torch.float64):
            with case(dtype):
                (hooks, mine), (_, usual) = found[dtype, "zb-h1"], found[dtype, "1f1b"]
                experts = [(n, when) for n, when in hooks if "experts" in n]
                assert len(experts) == 2 * 3 * 4 and {when for _, when in experts} == {"whole"}
                rtol = 1e-4 if dtype == torch.float32 else 1e-12
                for name, grad in usual.items():
                    torch.testing.assert_close(mine[name], grad, rtol=rtol, atol=1e-7)


def test_weight_gradients_come_last_and_once(ranks):
    """Of each micro-batch: the hook of a linear layer's weight runs in W, that of a norm in I, each
    once. And the matrix products are as many as without the split, but that a recomputed region
    with a split backward runs its last product again: 4 of whole blocks, of these 5 the kind "half"
    keeps 3."""
    # {kind: products of a block's second run, without the split and with it}
    repeated = {"none": (0, 0), "selective": (0, 2), "half": (2, 3), "block": (4, 5)}

    class Products(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            Products.count += func.overloadpacket.__name__ in ("mm", "addmm", "bmm")
            return func(*args, **(kwargs or {}))

    def count(rank, name, recompute):
        Products.count = 0
        found = hooked(rank, name, CONFIGS["llama"], torch.float64, Products, recompute)
        return *found, Products.count

    def work(rank):
        cases = itertools.product(("zb-h1", "1f1b"), repeated)
        return {of: count(rank, *of) for of in cases}

    for found in ranks(2, work):
        for recompute, (again, split_again) in repeated.items():
            with case(recompute):
                hooks, grads, products = found["zb-h1", recompute]
                (_, _, unsplit), (_, _, usual) = found["1f1b", recompute], found["1f1b", "none"]
                assert collections.Counter(n for n, _ in hooks) == {n: 4 for n in grads}
                for name, when in hooks:
                    linear = name.endswith("weight") and "norm" not in name and "embed" not in name
                    assert when == ("whole" if linear else "part"), name
                blocks = sum(n.endswith("attn_norm.weight") for n in grads)
                assert unsplit == usual + 4 * blocks * again > 0
                assert products == usual + 4 * blocks * split_again


def test_activations_are_freed_with_their_backward(ranks):
    """As many micro-batches' activations alive as the schedule says: counted from live tensors of
    the graph."""

    def peak(schedule):
        alive, most, weight = set(), [0], torch.ones(2, requires_grad=True)

        class Watch(torch.autograd.Function):
            """Holds a tensor for backward, and knows when it is let go."""

            @staticmethod
            def forward(ctx, x, m):
                kept = x * 2
                ctx.save_for_backward(kept)
                alive.add(m)
                weakref.finalize(kept.untyped_storage(), alive.discard, m)
                most[0] = max(most[0], len(alive))
                return x * 3

            @staticmethod
            def backward(ctx, grad):
                return grad * 3, None

        def forward(stage, m, x):
            y = Watch.apply((torch.ones(2) if x is None else x) * weight, (stage, m))
            return y.sum() if stage == schedule.last else y

        pp.Pipeline(schedule, forward, (2,), torch.float32, "cpu").run()
        return most[0], len(alive)

    cases = [find_schedule(name, 3, 6) for name in ("gpipe", "1f1b", "interleaved")]
    found = ranks(3, lambda rank: [peak(schedule) for schedule in cases])
    for rank, peaks in enumerate(found):
        assert peaks == [(schedules.in_flight(schedule[rank]), 0) for schedule in cases]


def test_a_rank_may_await_messages_in_another_order(ranks):
    """Than they are sent: rank 1 takes the second micro-batch first, rank 0 gets its gradient."""

    def work(rank):
        first, second = find_schedule("1f1b", 2, 2)
        schedule, weight = pp.Schedule([first, second[2:] + second[:2]]), torch.ones(2)

        def forward(stage, m, x):
            y = (torch.ones(2) if x is None else x) * weight * (m + 1)
            return y.sum() if stage == 1 else y

        weight.requires_grad_()
        pp.Pipeline(schedule, forward, (2,), torch.float32, "cpu").run()
        return weight.grad.tolist()

    assert ranks(2, work) == [[5.0, 5.0]] * 2  # 1 + 4: of messages mixed up 2 + 2


def test_receives_take_few_buffers():
    for name, most in {"gpipe": 2, "1f1b": 2, "interleaved": 8, "zb-v": 3, "dualpipev": 3}.items():
        for _, _, _, schedule in shapes(name, (2, 3, 4, 8, 16), (4, 16, 32, 64)):
            for row in schedule.rows:
                held = 0
                for action in row:
                    held += len(schedule.receives_before[action])
                    assert held <= most
                    message = schedule.incoming(action)
                    held -= message is not None and message.source != message.target


def test_deferred_gradients_come_last_layer_first():
    """As in a whole backward: DDP and ZeRO line their buckets up in this order."""
    layers = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(4)))
    order, store = [], zb.WeightGradStore()
    for i, layer in enumerate(layers):
        layer.weight.register_post_accumulate_grad_hook(lambda _, i=i: order.append(i))
    with store:
        layers(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert order == []
    store.accumulate()
    assert order == [3, 2, 1, 0]


def test_a_store_in_which_a_layer_runs_again():
    """zero_bubble.py's ends in torch's error, also where a weight is square like its transpose."""
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(4, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    layer(x).square().sum().backward()
    expected = layer.weight.grad.clone()

    def split(store):
        layer.zero_grad()
        with store:
            y = checkpoint(layer, x.requires_grad_(), use_reentrant=False)
        with store:
            y.square().sum().backward()
        store.accumulate()

    with pytest.raises(CheckpointError):
        split(zb.WeightGradStore())
    split(FullStore())
    torch.testing.assert_close(layer.weight.grad, expected)


def test_equals_pytorchs_pipelining(ranks):
    """The same weights after 4 steps as torch.distributed.pipelining with the same stages."""
    # Imported here: once, and not in every rank
    from torch.distributed import pipelining

    config, p, m = dataclasses.replace(CONFIGS["llama"], layers=4), 2, 4
    cases = {
        "gpipe": "ScheduleGPipe",
        "1f1b": "Schedule1F1B",
        "interleaved": "ScheduleInterleaved1F1B",
    }
    if torch.__version__ >= "2.12":  # 2.11's sends to its own rank, which gloo can't
        cases |= {"zb-v": "ScheduleZBVZeroBubble", "dualpipev": "ScheduleDualPipeV"}

    def train(rank, schedule, theirs):
        model, last = build(config, schedule, rank, None), schedule.last
        optimizer, held = make_optimizer(model.parameters(), "sgd"), schedule.stages(rank)

        def forward(stage, i, x):
            x = tokens.chunk(m)[i] if x is None else x
            return model[stage](x, targets=targets.chunk(m)[i], target_count=count)

        def loss(logits, targets):
            return gpt.CrossEntropy()(logits, targets, count)

        if theirs is None:
            shape = (len(batch(0)[0]) // m, 12, 32)
            ours = zb.SplitPipeline(schedule, forward, shape, torch.float64, "cpu")
        else:
            place = last + 1, torch.device("cpu")
            stages = [pipelining.PipelineStage(model[s], s, *place) for s in held]
            kind = getattr(pipelining.schedules, theirs)
            stages = stages if len(stages) > 1 else stages[0]
        for step in range(4):
            tokens, targets, _, count = batch(step)
            optimizer.zero_grad()
            if theirs is None:
                ours.run()
            else:
                first = [tokens.contiguous()] if rank == 0 else []
                final = {"target": targets} if last in held else {}
                kind(stages, m, loss_fn=loss, scale_grads=False).step(*first, **final)
            optimizer.step()
        return {n: p.detach() for n, p in model.named()}

    def work(rank):
        for name, theirs in cases.items():
            with case(name):
                schedule = find_schedule(name, p, m)
                ours, reference = (train(rank, schedule, which) for which in (None, theirs))
                torch.testing.assert_close(ours, reference, rtol=1e-12, atol=1e-12)

    ranks(p, work)


def test_compare(capsys, monkeypatch):
    """All schedules, or the one of --schedule; what it can't show is refused."""

    def lines(flags):
        monkeypatch.setattr(sys, "argv", ["pipeline.py", *flags.split()])
        schedules.main()
        words = [line.split() for line in capsys.readouterr().out.splitlines()]
        return {row[0]: row for row in words if row and row[0] in SCHEDULES}

    assert lines("--nproc 4").keys() == SCHEDULES.keys()
    found = lines("--microbatches 6")
    assert " ".join(found["dualpipev"]).startswith("dualpipev dualpipev needs at least 8")
    assert "needs a multiple of 4" in " ".join(found["interleaved"])
    [row] = lines("--schedule interleaved --chunks 4 --nproc 2").values()
    assert row[1:4] == ["4", "0.75", "0.75"]
    [row] = lines("--schedule 1f1b --chunks 2").values()
    assert "leave out --chunks" in " ".join(row)
    for flags, words in {
        "--nproc 100000": "more than 30,000: use fewer",
        "--microbatches 1000000": "more than 30,000: use fewer",
    }.items():
        with pytest.raises(harness.Refused, match=words):
            lines(flags)
