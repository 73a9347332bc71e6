"""pipeline.py and zero_bubble.py: the schedules as data, and the executor against one process and
PyTorch's pipelining."""

import collections
import contextlib
import dataclasses
import itertools
import sys
import weakref

import pytest
import torch
import torch.distributed as dist
from reference import CONFIGS, STEPS, batch, case, equals_one_process, make_optimizer
from torch.utils._python_dispatch import TorchDispatchMode

import harness
import model as gpt
import pipeline as pp
import zero_bubble as zb
from harness import initialize, presets
from receipts import pipeline as schedules
from receipts.formulas import flops_per_token

make = zb.find_schedule


def shapes(name, ranks=range(1, 9), microbatches=range(1, 18)):
    """(ranks, micro-batches, chunks, schedule) of all the sizes for which a schedule of that name
    exists."""
    for p, m in itertools.product(ranks, microbatches):
        for chunks in (1, 2, 3, 4) if name == "interleaved" else (None,):
            try:
                yield p, m, chunks, make(name, p, m, chunks)
            except ValueError as e:
                assert name == "interleaved" and m % p or name == "dualpipev" and m < 2 * p, e


@pytest.mark.parametrize("name", zb.ALL_SCHEDULES)
def test_a_formula_holds_just_where_its_condition_does(name):
    for p in (2, 3, 4, 6):
        for m in range(1, 3 * p + 1):
            try:
                schedule = make(name, p, m)
            except ValueError:  # interleaved, dualpipev
                continue
            v = len(schedule.stages(0))
            waits = schedules.waiting(schedules.simulate(schedule))
            holds = waits == schedules.BUBBLES[name][1](p, m, v, v, v, v)
            expected, text = schedules.by_paper(name, p, m, v, v, v, v)
            assert holds == (expected is not None) and holds != ("only for m >=" in text)


def hangs(schedule, sends_block=False, cold=False):
    """Whether a step never ends. sends_block: a send waits until its receive is posted, so until
    the message before it in its channel is taken. cold: a rank's first action of each kind waits
    until no message is on its way to it, as on a GPU that loads a kernel at its first launch."""
    arrived, done, under_way = {None}, [0] * len(schedule), collections.Counter()
    sent_to, progress = {}, True  # {rank: channel of its last message}

    def channel(message):
        return message and message.source != message.target and message.channel

    while progress:
        progress = False
        for rank, row in enumerate(schedule):
            while done[rank] < len(row):
                action, later = row[done[rank]], row[done[rank] + 1 :]
                taken, sent = schedule.incoming(action), schedule.outgoing(action)
                awaited = {taken}
                if cold and action.kind not in {a.kind for a in row[: done[rank]]}:
                    posted = [m for m in map(schedule.incoming, later) if channel(m)]
                    awaited.update({m.channel: m for m in reversed(posted)}.values())
                if not awaited <= arrived or sends_block and under_way[sent_to.get(rank)] > 1:
                    break
                arrived.add(sent)
                under_way[channel(taken)] -= 1
                under_way[channel(sent)] += 1
                if channel(sent):
                    sent_to[rank] = sent.channel
                done[rank] += 1
                progress = True
    return done != [len(row) for row in schedule]


@pytest.mark.parametrize("name", zb.ALL_SCHEDULES)
def test_schedules_are_sound(name):
    count = 0
    for p, m, chunks, schedule in shapes(name):
        stages = p * (chunks or (2 if name in ("zb-v", "dualpipev") else 1))
        assert len(schedule) == p and sorted(schedule.owner) == list(range(stages))
        # Each action is there, and none waits for ever, even where a send blocks
        assert not hangs(schedule, sends_block=True)
        for stage, rank in schedule.owner.items():
            microbatches = [a.microbatch for a in schedule[rank] if a[::2] == ("F", stage)]
            assert sorted(microbatches) == list(range(m))
        count += 1
    assert count >= (70 if name in ("interleaved", "dualpipev") else 136)


def test_where_stages_are():
    assert make("interleaved", 3, 3, 3).owner == {stage: stage % 3 for stage in range(9)}
    for name in ("zb-v", "dualpipev"):
        assert make(name, 3, 6).owner == {0: 0, 1: 1, 2: 2, 3: 2, 4: 1, 5: 0}


@pytest.mark.parametrize("ratio", [(1, 1), (1, 2), (2, 3)])
def test_bubble_is_the_papers(ratio):
    forward, backward = ratio

    def used(name, v=1):
        times = forward / v, backward / v / 2, backward / v / 2
        return schedules.utilisation(schedules.simulate(make(name, p, m, v), *times))

    for p, m in itertools.product(range(1, 9), range(1, 13)):
        assert m > 1 or used("gpipe") == pytest.approx(1 / p)
        assert used("gpipe") == used("1f1b") == pytest.approx(m / (m + p - 1))
        for v in (1, 2, 3) if m % p == 0 else ():
            assert used("interleaved", v) == pytest.approx(v * m / (v * m + p - 1))


def test_zero_bubble_with_other_times():
    """H1 and H2 where a weight's gradient takes less than an input's: (p-1)(F + I - W) and (p-1)(F
    + I - 2W)."""
    for p, (f, i, w) in itertools.product((2, 4, 8), ((1, 1, 0.75), (1, 1.25, 0.75), (1.5, 2, 1))):
        for name, saved in (("zb-h1", w), ("zb-h2", 2 * w)):
            waits = schedules.waiting(schedules.simulate(make(name, p, 4 * p), f, i, w))
            paper = schedules.BUBBLES[name][1](p, 4 * p, 1, f, i, w)
            assert waits == pytest.approx(paper) == (p - 1) * (f + i - saved), name


def test_transfers_take_time():
    spans = schedules.simulate(make("gpipe", 2, 1), 1, 1, 1, transfer=1)
    assert schedules.utilisation(spans) == pytest.approx(6 / (2 * 8))
    # in a V the turn stays on its rank: 6 messages of 3 boundaries instead of 8 of 4
    spans = schedules.simulate(make("zb-v", 2, 1), 1, 1, 0, transfer=10)
    assert max(row[-1][1] for row in spans) == 8 + 4 * 10


@pytest.mark.parametrize("name", zb.ALL_SCHEDULES)
def test_activations_held(name):
    for p, m, chunks, schedule in shapes(name, microbatches=range(1, 25)):
        held = [schedules.in_flight(row) for row in schedule]
        expected = schedules.most_in_flight(name, p, m, chunks or 2)
        assert expected in (None, max(held))
        if name == "1f1b":
            assert held == [min(m, p - rank) for rank in range(p)]
        if name == "zb-v" and m >= 2 * p:
            assert held == [2 * p] * p


def test_a_schedule_that_hangs_is_found():
    """It ends if sends return at once. If they block, rank 0 can't send a fourth activation before
    it has taken a gradient, and rank 1 has sent two of them by then."""
    first, second = ([pp.Action(kind, m, 0) for m in range(4)] for kind in "FB")
    in_turn = [a._replace(stage=1) for pair in zip(first, second) for a in pair]
    assert hangs(pp.Schedule([first + second, in_turn]), sends_block=True)
    assert not hangs(pp.Schedule([first + second, in_turn]))


def test_stages_of_a_tied_model_on_two_ranks_need_a_group():
    with torch.device("meta"), pytest.raises(ValueError, match="tied_group"):
        harness.split(lambda: gpt.GPT(DEEP), [range(4), range(4, 8)], [0])


def test_what_there_is_no_schedule_for():
    for name, p, m, chunks, text in (
        ("interleaved", 4, 6, 2, "a multiple of 4"),
        ("dualpipev", 4, 7, None, "at least 8"),
        ("1f1b", 4, 8, 2, "leave out --chunks"),
    ):
        with pytest.raises(ValueError, match=text):
            schedules.checked(zb.find_schedule, name, p, m, chunks)


@pytest.mark.parametrize("vocab", [100, 2000, 10000])
def test_balance_is_the_best_there_is(vocab):
    """In no cut does the most expensive stage cost less. The output projection costs as much as a
    part of a layer, as one, as five and a half."""
    config = presets.configure("tiny", layers=7, vocab=vocab)
    projection = 6 * config.width * vocab
    layer = (flops_per_token(config) - projection) // 7

    def most(lengths):
        return max(*(layer * n for n in lengths), layer * lengths[-1] + projection)

    for stages in range(1, 8):
        cuts = schedules.stage_layers(config, stages)
        assert [i for r in cuts for i in r] == list(range(7)) and all(cuts)
        others = []
        for ends in itertools.combinations(range(1, 7), stages - 1):
            others.append([b - a for a, b in zip((0, *ends), (*ends, 7))])
        assert most([len(r) for r in cuts]) == min(map(most, others))


def test_layers_of_the_stages():
    with pytest.raises(ValueError, match="too few"):
        schedules.stage_layers(presets.configure("gpt2"), 13)
    # GPT-2's output projection costs as much as five of its layers
    assert [len(r) for r in schedules.stage_layers(presets.configure("gpt2"), 4)] == [3, 4, 4, 1]
    # It costs little beside a layer whose tokens pass six experts
    mixture = presets.configure("gpt2", experts=8, top_k=4, shared=2)
    assert [len(r) for r in schedules.stage_layers(mixture, 4)] == [3, 3, 4, 2]


def build(config, schedule, rank, ends):
    def whole():
        with torch.device("meta"):
            return gpt.GPT(config)

    layers = schedules.stage_layers(config, schedule.last + 1)
    parts = harness.split(whole, layers, schedule.stages(rank), ends)
    return initialize.fill(harness.Stages(parts), 7, dtype=torch.float64)


def train_parallel(config, kind, name, microbatches, steps=STEPS):
    rank, links = dist.get_rank(), pp.make_links()
    schedule = zb.find_schedule(name, dist.get_world_size(), microbatches)
    ends = dist.new_group(sorted({schedule.owner[0], schedule.owner[schedule.last]}))
    model = build(config, schedule, rank, ends)
    optimizer, losses = make_optimizer(model.parameters(), kind), []
    for step in range(steps):
        tokens, targets, samples, count = batch(step)
        pieces = torch.arange(len(tokens)).tensor_split(microbatches)
        optimizer.zero_grad()

        def forward(stage, m, x):
            rows = pieces[m]
            given = dict(targets=targets[rows], target_count=count, sample_ids=samples[rows])
            return model[stage](tokens[rows] if x is None else x, **given)

        shape = (len(pieces[0]), tokens.shape[1], config.width)
        results = pp.Pipeline(schedule, forward, shape, torch.float64, "cpu", links).run()
        for p in model.parameters():
            for group in getattr(p, "placement", {}).get("partial", ()):
                pp.reduce_tied(p, group)
        optimizer.step()
        loss = torch.tensor(float(sum(results)), dtype=torch.float64)
        dist.all_reduce(loss)
        losses.append(loss.item())
    gradients = {n: p.grad for n, p in model.named()}
    weights = {n: p.detach() for n, p in model.named()}
    return (losses, gradients, weights), dict.fromkeys(weights, ())


DEEP = dataclasses.replace(CONFIGS["gpt2"], layers=8)
SMALL = dict(heads=2, width=16, context=12, vocab=61)

# Fewer micro-batches than stages, and stages of unequal length. test_copied.py and test_layouts.py
# have all schedules
test_eight_ranks_equal_one_process = equals_one_process(
    train_parallel,
    {8: [("11", "sgd", "1f1b", 3), ("11", "adamw", "zb-h2", 6), ("17", "sgd", "zb-v", 6)]},
    {layers: presets.configure(layers=int(layers), **SMALL) for layers in ("11", "17")},
)


MIXTURE = presets.configure(
    layers=4, heads=4, width=32, context=12, vocab=61, experts=4, shared=1, family="llama"
)


def hooked(rank, name, config, dtype, watch=contextlib.nullcontext, recompute="none"):
    """A step of a schedule: (parameter, "whole" or "part" of a backward) of each hook that ran, and
    all gradients."""
    schedule, links, hooks, now = zb.find_schedule(name, 2, 4), pp.make_links(), [], []
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
        pp.Pipeline(schedule, forward, (1, 12, 32), dtype, "cpu", links, around).run()
    return hooks, {n: p.grad for n, p in model.named()}


def test_experts_are_deferred_too(ranks):
    """By the grouped kernel in float32, by a loop in float64; the gradients as without the
    split."""
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


def test_weight_gradients_come_last_once_and_cost_nothing_twice(ranks):
    """Of each micro-batch: the hook of a linear layer's weight runs in W, that of a norm in I, each
    once; and the matrix products are as many as without the split, even where norms and activation
    functions are recomputed. (Of whole blocks run again, all but the last of the 5; of these 4 the
    kind "half" keeps 2.)"""
    repeated = {"none": 0, "selective": 0, "half": 2, "block": 4}

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
        for recompute, again in repeated.items():
            with case(recompute):
                hooks, grads, products = found["zb-h1", recompute]
                (_, _, unsplit), (_, _, usual) = found["1f1b", recompute], found["1f1b", "none"]
                assert collections.Counter(n for n, _ in hooks) == {n: 4 for n in grads}
                for name, when in hooks:
                    linear = name.endswith("weight") and "norm" not in name and "embed" not in name
                    assert when == ("whole" if linear else "part"), name
                blocks = sum(n.endswith("attn_norm.weight") for n in grads)
                assert products == unsplit == usual + 4 * blocks * again > 0


def test_activations_are_freed_with_their_backward(ranks):
    """As many micro-batches' activations alive as the schedule says: counted from live tensors of
    the graph."""

    def peak(rank, schedule, microbatches):
        stages, alive, most = 3, set(), [0]

        # Holds a tensor for backward, and knows when it is let go
        class Watch(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, m):
                import weakref

                kept = x * 2
                ctx.save_for_backward(kept)
                alive.add(m)
                weakref.finalize(kept.untyped_storage(), alive.discard, m)
                most[0] = max(most[0], len(alive))
                return x * 3

            @staticmethod
            def backward(ctx, grad):
                return grad * 3, None

        weight = torch.ones(2, requires_grad=True)

        def forward(stage, m, x):
            y = Watch.apply((torch.ones(2) if x is None else x) * weight, (stage, m))
            return y.sum() if stage == last else y

        schedule = zb.find_schedule(schedule, stages, microbatches)
        last = schedule.last
        pp.Pipeline(schedule, forward, (2,), torch.float32, "cpu").run()
        return most[0], len(alive)

    cases = (("gpipe", 5), ("1f1b", 5), ("interleaved", 6))
    results = ranks(3, lambda rank: [peak(rank, *of) for of in cases])
    for (name, m), peaks in zip(cases, zip(*results), strict=True):
        with case(name, m):
            expected = [(schedules.in_flight(a), 0) for a in zb.find_schedule(name, 3, m)]
            assert list(peaks) == expected


def test_no_more_than_one_receive_waits_in_each_channel(ranks):
    def work(rank):
        weight, links = torch.ones(2, requires_grad=True), pp.make_links()
        waiting, most, irecv = [], [0], dist.irecv

        def counted(tensor, **where):
            work = irecv(tensor, **where)
            waiting[:] = [w for w in waiting if not w.is_completed()] + [work]
            most[0] = max(most[0], len(waiting))
            return work

        def forward(stage, m, x):
            y = (torch.ones(2) if x is None else x) * weight
            return y.sum() if stage == 5 else y

        dist.irecv = counted
        schedule = zb.find_schedule("zb-v", 3, 9)
        pp.Pipeline(schedule, forward, (2,), torch.float32, "cpu", links).run()
        return most[0], weight.grad.tolist()

    # Two stages, nine micro-batches
    assert all(most <= 4 and grad == [18.0, 18.0] for most, grad in ranks(3, work))


def test_deferred_gradients_come_last_layer_first():
    """As in a whole backward: DDP and ZeRO line their buckets up in this order."""
    layers = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(4)))
    order, deferred = [], zb.Deferred()
    for i, layer in enumerate(layers):
        layer.weight.register_post_accumulate_grad_hook(lambda _, i=i: order.append(i))
    with deferred:
        layers(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert order == []
    deferred.accumulate()
    assert order == [3, 2, 1, 0]


def test_forward_only_frees_graphs_even_with_gradients_on(ranks):
    def work(rank):
        alive, most = weakref.WeakSet(), []
        weight = torch.ones(2, requires_grad=True)

        def forward(stage, m, x):
            most.append(len(alive))
            y = (torch.ones(2) if x is None else x) * weight
            alive.add(y)
            return y

        some = pp.forward_only(zb.find_schedule("gpipe", 1, 4))
        pp.Pipeline(some, forward, (2,), torch.float32, "cpu").run()
        return max(most)

    assert ranks(1, work) == [0]


def test_forward_only_keeps_nothing(ranks):
    names = ("1f1b", "interleaved", "zb-v")

    def logits(rank, name):
        schedule = zb.find_schedule(name, 2, 4)
        model = build(DEEP, schedule, rank, dist.group.WORLD)
        tokens = batch(0)[0]
        with torch.no_grad():
            some = pp.forward_only(schedule, 3)

            def forward(stage, m, x):
                return model[stage](tokens[m : m + 1] if x is None else x)

            return pp.Pipeline(some, forward, (1, 12, 32), torch.float64, "cpu").run()

    results = ranks(2, lambda rank: [logits(rank, name) for name in names])
    whole = initialize.build(DEEP, 7, dtype=torch.float64)(batch(0)[0][:3])
    for name, of_ranks in zip(names, zip(*results), strict=True):
        with case(name):
            [full] = [r for r in of_ranks if r]
            torch.testing.assert_close(torch.cat(full), whole, rtol=1e-12, atol=1e-12)


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

    def reference(rank, name, theirs):
        schedule = zb.find_schedule(name, p, m)
        model, count = build(config, schedule, rank, None), schedule.last + 1
        stages = [
            pipelining.PipelineStage(model[stage], stage, count, torch.device("cpu"))
            for stage in schedule.stages(rank)
        ]
        optimizer = make_optimizer(model.parameters(), "sgd")
        for step in range(4):
            tokens, targets, _, count = batch(step)

            def loss(logits, targets):
                return gpt.CrossEntropy()(logits, targets, count)

            kind = getattr(pipelining.schedules, theirs)
            run = kind(stages if len(stages) > 1 else stages[0], m, loss_fn=loss, scale_grads=False)
            optimizer.zero_grad()
            run.step(
                *((tokens.contiguous(),) if rank == 0 else ()),
                **({"target": targets} if rank == schedule.owner[schedule.last] else {}),
            )
            optimizer.step()
        return {n: p.detach() for n, p in model.named()}

    def work(rank):
        found = {}
        for name, theirs in cases.items():
            with case(name):
                (_, _, ours), _ = train_parallel(config, "sgd", name, m, 4)
                found[name] = ours, reference(rank, name, theirs)
        return found

    for found in ranks(p, work):
        assert found.keys() == cases.keys()
        for name, (mine, their) in found.items():
            with case(name):
                assert mine.keys() == their.keys()
                for key, weight in mine.items():
                    torch.testing.assert_close(weight, their[key], rtol=1e-12, atol=1e-12)


def test_compare(capsys, monkeypatch):
    """All schedules, or the one of --schedule; what it can't show is refused."""

    def lines(flags):
        monkeypatch.setattr(sys, "argv", ["pipeline.py", "--compare", *flags.split()])
        pp.main()
        words = [line.split() for line in capsys.readouterr().out.splitlines()]
        return {row[0]: row for row in words if row and row[0] in zb.ALL_SCHEDULES}

    assert lines("--nproc 4").keys() == zb.ALL_SCHEDULES.keys()
    assert lines("--microbatches 6")["dualpipev"][1:4] == ["dualpipev", "needs", "at"]
    [row] = lines("--schedule interleaved --chunks 4 --nproc 2").values()
    assert row[1:4] == ["4", "0.75", "0.75"]
    for flags, words in {
        "--json x.json": "--compare runs nothing",
        "--trace x.json": "--trace is gone: --compare --plot NAME",
    }.items():
        with pytest.raises(harness.Refused, match=words):
            lines(flags)
    monkeypatch.setattr(sys, "argv", ["pipeline.py", "--plot", "x"])
    with pytest.raises(harness.Refused, match="add --compare"):
        pp.main()


@pytest.mark.parametrize("name", zb.ALL_SCHEDULES)
def test_cold_kernels_would_hang(name):
    """Every schedule hangs if a kernel's first launch waits for the receives that are posted ahead:
    why there is prepare. A rank that waits for nobody else is no pipeline."""
    assert all(hangs(make(name, p, m), cold=True) for p, m in ((2, 4), (4, 8)))
    assert not hangs(make("gpipe", 1, 4), cold=True)


def test_prepare_runs_each_kind_on_each_stage(ranks):
    def prepare(rank, name):
        links, schedule, seen, computed = pp.make_links(), zb.find_schedule(name, 3, 6), [], []
        weight = torch.nn.Parameter(torch.ones(4, 4))
        weight.register_hook(computed.append)

        def forward(stage, m, x):
            assert m < 2
            x = torch.ones(2, 4) if x is None else x
            y = torch.nn.functional.linear(x, weight)
            return y.sum() if stage == schedule.last else y

        @contextlib.contextmanager
        def around(action):
            seen.append(action)
            yield

        pp.Pipeline(schedule, forward, (2, 4), torch.float32, "cpu", links, around).prepare()
        assert weight.grad is None  # it is thrown away
        assert len(computed) == 2 * len(schedule.stages(rank))
        assert {a.kind for a in seen} == {a.kind for a in schedule[rank]}
        assert sorted({a.stage for a in seen}) == schedule.stages(rank)

    ranks(3, lambda rank: [prepare(rank, name) for name in ("1f1b", "zb-v")])
