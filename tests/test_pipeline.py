"""pipeline.py: the schedules as data, and the executor against one process and PyTorch's pipelining."""

import itertools

import pytest
import torch
import torch.distributed as dist
from reference import CONFIGS, assert_equal, batch, make_optimizer, train

import model as gpt
import pipeline as pp


@pytest.mark.parametrize("name", pp.SCHEDULES)
def test_schedules_are_whole_and_do_not_block(name):
    for stages, microbatches in itertools.product(range(1, 9), range(1, 13)):
        schedule = pp.SCHEDULES[name](stages, microbatches)
        assert len(schedule) == stages
        for actions in schedule:
            assert sorted(actions) == sorted(pp.Action(k, m) for k in "FB" for m in range(microbatches))
        pp.simulate(schedule)  # raises where it is stuck
        for kind, step in (("F", 1), ("B", -1)):  # messages of a pair come in the order in which they are awaited
            orders = [[a.microbatch for a in actions if a.kind == kind] for actions in schedule]
            assert all(order == orders[0] for order in orders)


@pytest.mark.parametrize("forward, backward", [(1, 1), (1, 2), (2, 3)])
def test_bubble_is_the_papers(forward, backward):
    for p, m in itertools.product(range(1, 9), range(1, 13)):
        used = {name: pp.utilisation(pp.simulate(make(p, m), forward, backward)) for name, make in pp.SCHEDULES.items()}
        assert used["naive"] == pytest.approx(1 / p)
        assert used["gpipe"] == used["1f1b"] == pytest.approx(m / (m + p - 1))


def test_the_lectures_two_figures():
    assert pp.utilisation(pp.simulate(pp.naive(4, 1))) == 0.25
    assert round(pp.utilisation(pp.simulate(pp.gpipe(4, 4))), 2) == 0.57


def test_micro_batches_in_flight():
    for p, m in itertools.product(range(1, 9), range(1, 13)):
        assert [pp.in_flight(a) for a in pp.naive(p, m)] == [1] * p
        assert [pp.in_flight(a) for a in pp.gpipe(p, m)] == [m] * p
        assert [pp.in_flight(a) for a in pp.one_f_one_b(p, m)] == [min(m, p - rank) for rank in range(p)]


def test_a_stuck_schedule_is_found():
    F, B = pp.Action("F", 0), pp.Action("B", 0)
    with pytest.raises(ValueError, match="stuck"):
        pp.simulate([[F, B], [B, F]])
    first, second = pp.Action("F", 0), pp.Action("F", 1)
    with pytest.raises(ValueError, match="different orders"):
        pp.simulate([[second, first], [first, second]])
    with torch.device("meta"), pytest.raises(ValueError, match="tied_group"):
        pp.split(gpt.GPT(CONFIGS["gpt2"]), 2, 0)


def test_timeline():
    assert pp.timeline(pp.simulate(pp.gpipe(2, 2))) == " 0 1 . . .[0 ][1 ]\n . 0 1[0 ][1 ]"


def test_balance_is_the_best_there_is():
    for costs in ([1] * 7, [1, 1, 1, 4], [3, 1, 1, 1, 1, 9], [2, 5, 3, 1, 8, 1]):
        for stages in range(1, len(costs) + 1):
            cuts = pp.balance(costs, stages)
            assert [i for r in cuts for i in r] == list(range(len(costs))) and all(len(r) for r in cuts)
            best = min(
                max(sum(costs[a:b]) for a, b in zip((0, *ends), (*ends, len(costs))))
                for ends in itertools.combinations(range(1, len(costs)), stages - 1)
            )
            assert max(sum(costs[r.start : r.stop]) for r in cuts) == best
    assert [len(r) for r in pp.balance([1] * 7, 3)] in ([2, 2, 3], [2, 3, 2], [3, 2, 2])
    with pytest.raises(ValueError, match="too few"):
        pp.balance([1, 1], 3)
    # GPT-2's output projection costs as much as five of its layers
    assert [len(r) for r in pp.stage_layers(gpt.configure("gpt2"), 4)] == [3, 4, 4, 1]


def build(config, group, ends, seed=7):
    with torch.device("meta"):
        model = gpt.GPT(config)
    return gpt.fill(pp.split(model, dist.get_world_size(group), dist.get_rank(group), ends), seed, dtype=torch.float64)


def train_parallel(rank, config, kind, schedule, microbatches, stages, steps=3):
    down, up, ends = dist.group.WORLD, dist.new_group(), dist.new_group(sorted({0, stages - 1}))
    model = build(config, down, ends)
    optimizer, losses = make_optimizer(model.parameters(), kind), []
    for step in range(steps):
        tokens, targets, samples, count = batch(step)
        pieces = torch.arange(len(tokens)).tensor_split(microbatches)
        optimizer.zero_grad()

        def forward(m, x):
            x = tokens[pieces[m]] if x is None else x
            return model(x, targets=targets[pieces[m]], count=count, samples=samples[pieces[m]])

        shape = (len(pieces[0]), tokens.shape[1], config.width)
        results = pp.play(pp.SCHEDULES[schedule](stages, microbatches), forward, shape, torch.float64, "cpu", down, up)
        pp.reduce_tied(model.parameters())
        optimizer.step()
        loss = torch.tensor(float(sum(results)), dtype=torch.float64)
        dist.all_reduce(loss)
        losses.append(loss.item())
    return losses, {n: p.grad for n, p in model.named()}, {n: p.detach() for n, p in model.named()}


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("schedule", pp.SCHEDULES)
def test_equals_one_process(ranks, schedule, kind):
    for config, stages, microbatches in (("gpt2", 4, 6), ("gpt2", 3, 2), ("llama", 3, 4), ("dropout", 2, 3), ("gpt2", 1, 2)):
        reference = train(CONFIGS[config], kind)
        results = ranks(stages, train_parallel, CONFIGS[config], kind, schedule, microbatches, stages)
        for ours in results:
            assert_equal(ours, reference)
        assert {n for _, _, weights in results for n in weights} == reference[2].keys()
        if CONFIGS[config].tied and stages > 1:  # both copies of the tied matrix stay equal
            first, last = results[0][2], results[-1][2]
            assert torch.equal(first["embed.token.weight"], last["embed.token.weight"])


def test_more_stages_than_micro_batches_in_a_deep_model(ranks):
    config = gpt.configure(layers=11, heads=2, width=16, context=12, vocab=61)
    for ours in ranks(8, train_parallel, config, "sgd", "1f1b", 3, 8):
        assert_equal(ours, train(config, "sgd"))


def test_activations_are_freed_with_their_backward(ranks):
    """As many micro-batches' activations alive as the schedule says: counted from live tensors of the graph."""

    def work(rank, schedule, microbatches):
        stages, alive, peak = 3, set(), [0]
        group, up = dist.group.WORLD, dist.new_group()

        class Watch(torch.autograd.Function):  # holds a tensor for backward, and knows when it is let go
            @staticmethod
            def forward(ctx, x, m):
                import weakref

                kept = x * 2
                ctx.save_for_backward(kept)
                alive.add(m)
                weakref.finalize(kept.untyped_storage(), alive.discard, m)
                peak[0] = max(peak[0], len(alive))
                return x * 3

            @staticmethod
            def backward(ctx, grad):
                return grad * 3, None

        weight = torch.ones(2, requires_grad=True)

        def forward(m, x):
            y = Watch.apply((torch.ones(2) if x is None else x) * weight, m)
            return y.sum() if rank == stages - 1 else y

        pp.play(pp.SCHEDULES[schedule](stages, microbatches), forward, (2,), torch.float32, "cpu", group, up)
        return peak[0], len(alive)

    for schedule, m in (("gpipe", 5), ("1f1b", 5), ("naive", 5)):
        results = ranks(3, work, schedule, m)
        assert results == [(pp.in_flight(a), 0) for a in pp.SCHEDULES[schedule](3, m)]


def test_forward_only_keeps_nothing(ranks):
    def work(rank):
        model = build(CONFIGS["gpt2"], dist.group.WORLD, dist.new_group([0, 2]))
        tokens = batch(0)[0]
        with torch.no_grad():
            return pp.play(
                pp.forward_only(3, 2),
                lambda m, x: model(tokens[m : m + 1] if x is None else x),
                (1, 12, 32),
                torch.float64,
                "cpu",
                dist.group.WORLD,
                dist.new_group(),
            )

    results = ranks(3, work)
    whole = gpt.build(CONFIGS["gpt2"], 7, dtype=torch.float64)(batch(0)[0][:2])
    assert results[0] == results[1] == []
    torch.testing.assert_close(torch.cat(results[2]), whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("schedule, theirs", [("gpipe", "ScheduleGPipe"), ("1f1b", "Schedule1F1B")])
def test_equals_pytorchs_pipelining(ranks, schedule, theirs):
    """The same weights after 10 steps as torch.distributed.pipelining with the same stages."""
    config = CONFIGS["llama"]

    def reference(rank):
        from torch.distributed import pipelining

        model = build(config, dist.group.WORLD, None)
        stage = pipelining.PipelineStage(model, rank, 3, torch.device("cpu"))
        optimizer = make_optimizer(model.parameters(), "sgd")
        for step in range(10):
            tokens, targets, _, count = batch(step)

            def loss(logits, targets):
                return model.loss(logits, targets, count)

            run = getattr(pipelining, theirs)(stage, 4, loss_fn=loss, scale_grads=False)
            optimizer.zero_grad()
            run.step(*((tokens,) if rank == 0 else ()), **({"target": targets} if rank == 2 else {}))
            optimizer.step()
        return {n: p.detach() for n, p in model.named()}

    ours = ranks(3, train_parallel, config, "sgd", schedule, 4, 3, 10)
    for mine, their in zip(ours, ranks(3, reference)):
        for name, p in mine[2].items():
            torch.testing.assert_close(p, their[name], rtol=1e-12, atol=1e-12)
