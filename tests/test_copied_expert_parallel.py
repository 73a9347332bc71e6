"""The top of expert_parallel.py alone, on a mixture that is not the project's, and what it
refuses."""

import copy
import re
import types

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

EXPERT_TOKENS = [11, 0, 5, 8]  # of each of 4 ranks
EXPERT_OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.3, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
}


class ExpertToyMLPs(nn.Module):
    """Experts with biases, a module each. Those without a row are skipped."""

    def __init__(self, experts, width):
        super().__init__()
        make = [
            nn.Sequential(nn.Linear(width, 7), nn.Tanh(), nn.Linear(7, width))
            for _ in range(experts)
        ]
        self.mlps = nn.ModuleList(make)

    def forward(self, rows, counts):
        parts = rows.split(counts.tolist())
        done = [mlp(part) for mlp, part in zip(self.mlps, parts) if len(part)]
        return torch.cat(done) if done else torch.zeros_like(rows)


class ExpertToy(nn.Module):
    """Tokens (n,) -> logits (n, 13), with a mixture of experts. Nobody chooses the last two
    experts."""

    def __init__(self, experts=7, width=6):
        super().__init__()
        self.embed = nn.Embedding(13, width)
        self.scale = nn.Parameter(torch.ones(width))
        self.router = nn.Linear(width, experts)
        self.experts = ExpertToyMLPs(experts, width)
        self.shared = nn.Linear(width, width)
        self.head = nn.Linear(width, 13)
        self.dispatch = expert_local_dispatch

    def forward(self, tokens):
        x = self.embed(tokens)
        if len(tokens):  # a rank without tokens has no gradient of it
            x = x * self.scale
        last = torch.arange(self.router.out_features) >= self.router.out_features - 2
        weights, chosen = self.router(x).masked_fill(last, -1e9).topk(2)
        shared = []
        y = self.dispatch(
            x, weights.softmax(-1), chosen, self.experts, lambda: shared.append(self.shared(x))
        )
        return self.head(x + y + shared[0])


def expert_local_dispatch(x, weights, chosen, experts, meanwhile):
    meanwhile()
    order = chosen.flatten().argsort(stable=True)
    counts = torch.bincount(chosen.flatten(), minlength=len(experts.mlps))
    rows = experts(x[order // 2], counts) * weights.flatten()[order].unsqueeze(1)
    return torch.zeros_like(x).index_add(0, order // 2, rows)


def expert_toy():
    torch.manual_seed(0)
    return ExpertToy().double()


def expert_batch(step):
    g = torch.Generator().manual_seed(step)
    return torch.randint(13, (2, sum(EXPERT_TOKENS)), generator=g)


def expert_train(model, kind, part, sum_gradients=lambda: None, steps=3):
    """Trains on a part of each batch, in 2 micro-batches. Returns {name: (gradient, weight)}."""
    optimizer = EXPERT_OPTIMIZERS[kind](model.parameters())
    for step in range(steps):
        tokens, targets = (t[part] for t in expert_batch(step))
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        for x, y in zip(tokens.tensor_split(2), targets.tensor_split(2)):
            loss = F.cross_entropy(model(x), y, reduction="sum") / sum(EXPERT_TOKENS)
            loss.backward()
        sum_gradients()
        optimizer.step()
    return {name: (p.grad, p.detach()) for name, p in model.named_parameters()}


def expert_deal_out(model, group, place=True):
    """Keep this rank's experts of a toy: (the model, the number of its first expert)."""
    import expert_parallel

    sizes = expert_parallel.expert_counts(len(model.experts.mlps), dist.get_world_size(group))
    first = sum(sizes[: dist.get_rank(group)])
    model.experts.mlps = model.experts.mlps[first : first + sizes[dist.get_rank(group)]]
    for p in model.experts.parameters() if place else ():
        p.placement = {"cuts": {0: (group, 0, 1)}}
    model.dispatch = expert_parallel.ExpertDispatch(sizes, group, chunks=2)
    return model, first


def expert_work(rank, kind):
    import expert_parallel

    group, end = dist.group.WORLD, sum(EXPERT_TOKENS[: rank + 1])
    model, first = expert_deal_out(expert_toy(), group)
    part = slice(end - EXPERT_TOKENS[rank], end)
    states = expert_train(
        model, kind, part, lambda: expert_parallel.sum_gradients(model.parameters(), group)
    )
    whole_names = {}
    for name, state in states.items():
        if name.startswith("experts."):
            _, _, number, rest = name.split(".", 3)
            name = f"experts.mlps.{first + int(number)}.{rest}"
        whole_names[name] = state
    return whole_names


def expert_assert_equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name in ours:
        for a, b in zip(ours[name], theirs[name]):
            assert (a is None) == (b is None), name
            if a is not None:
                torch.testing.assert_close(
                    a, b, rtol=1e-10, atol=1e-12, msg=lambda text: f"{name}: {text}"
                )


@pytest.mark.parametrize("kind", EXPERT_OPTIMIZERS)
def test_foreign_mixture_equals_one_process(copied, kind):
    """Uneven tokens and experts, a rank without tokens, a rank whose experts nobody chooses."""
    alone = expert_train(expert_toy(), kind, slice(None))
    together = {}
    for ours in copied("expert_parallel", 4, expert_work, kind):
        expert_assert_equal(ours, {name: alone[name] for name in ours})
        together |= ours
    assert together.keys() == alone.keys()


def expert_stacked(up, down):
    def experts(rows, counts):
        parts = rows.split(counts.tolist())
        return torch.cat([(part @ a).tanh() @ b for part, a, b in zip(parts, up, down)])

    return experts


def expert_stacked_work(rank, world):
    """5 steps of SGD on stacked experts that `shard` cuts; two groups of ranks have copies of
    them."""
    import expert_parallel

    g = torch.Generator().manual_seed(0)
    up, down, choices = (
        torch.randn(*size, generator=g, dtype=torch.float64)
        for size in [(3, 4, 5), (3, 5, 4), (5, 8, 3)]
    )
    inputs = torch.randn(8, 4, generator=g, dtype=torch.float64)
    group = copies = None
    if world > 1:
        pairs = [
            dist.new_group([0, 1]),
            dist.new_group([2, 3]),
            dist.new_group([0, 2]),
            dist.new_group([1, 3]),
        ]
        group, copies = pairs[rank // 2], pairs[2 + rank % 2]
    gain = nn.Parameter(torch.ones(4, dtype=torch.float64))
    up, down = nn.Parameter(up), nn.Parameter(down)
    if world > 1:
        up, down = (expert_parallel.shard(p, group, copies) for p in (up, down))
        dispatch = expert_parallel.ExpertDispatch(expert_parallel.expert_counts(3, 2), group)
    optimizer = torch.optim.SGD([gain, up, down], lr=0.1)
    for choice in choices:
        weights, chosen = choice.softmax(-1).topk(1)
        optimizer.zero_grad(set_to_none=False)
        x = inputs * gain
        if world == 1:
            order = chosen.flatten().argsort()
            rows = expert_stacked(up, down)(x[order], torch.bincount(chosen.flatten(), minlength=3))
            y = weights * rows[order.argsort()]
        else:
            mine = slice(2 * rank, 2 * rank + 2)
            y = dispatch(
                x[mine], weights[mine], chosen[mine], expert_stacked(up, down), lambda: None
            )
        y.square().sum().backward()
        for over in (group, copies) if world > 1 else ():
            expert_parallel.sum_gradients([gain, up, down], over)
        optimizer.step()
    return {name: (p.grad, p.detach()) for name, p in zip(("gain", "up", "down"), (gain, up, down))}


def test_stacked_experts_and_their_copies(copied):
    (alone,) = copied("expert_parallel", 1, expert_stacked_work, 1)
    for rank, ours in enumerate(copied("expert_parallel", 4, expert_stacked_work, 4)):
        cut = slice(0, 2) if rank % 2 == 0 else slice(2, 3)
        expected = {
            name: tuple(t if name == "gain" else t[cut] for t in alone[name]) for name in alone
        }
        expert_assert_equal(ours, expected)


def expert_few(world):
    """A dispatch of one expert a rank, tokens of which rank 0 alone has one, and experts that skip
    an empty batch."""
    import expert_parallel

    group, rank = dist.group.WORLD, dist.get_rank()
    x, matrix = torch.ones(1 - min(rank, 1), 4), nn.Parameter(torch.full((4, 4), rank + 1.0))
    chosen = torch.zeros(len(x), 1, dtype=torch.int64)

    def experts(rows, counts):
        return rows @ matrix if len(rows) else torch.zeros_like(rows)

    def plain(x, weights):
        sizes = [1] * world
        return expert_parallel.plain_dispatch(x, weights, chosen, experts, sizes, group)

    def overlapped(x, weights):
        return expert_parallel.ExpertDispatch([1] * world, group)(x, weights, chosen, experts)

    return x, matrix, plain, overlapped


@pytest.mark.parametrize("trained", ["x", "x of rank 0", "weights", "experts", "experts of rank 0"])
def test_what_is_frozen_may_differ_between_ranks(copied, trained):
    """All ranks send the same messages in backward: none of them hangs."""

    def work(rank):
        x, matrix, *dispatches = expert_few(3)
        matrix.requires_grad_(trained == "experts" or trained == "experts of rank 0" and rank == 0)
        grads = []
        for dispatch in dispatches:
            inputs = x.clone().requires_grad_(
                trained == "x" or trained == "x of rank 0" and not rank
            )
            weights = torch.full((len(x), 1), 0.5, requires_grad=trained == "weights")
            matrix.grad = None
            dispatch(inputs, weights).sum().backward()
            grads.append([t.grad for t in (inputs, weights, matrix)])
        if rank == 0:
            which = {"x": 0, "weights": 1, "experts": 2}[trained.split()[0]]
            expected = [torch.full((1, 4), 2.0), torch.full((1, 1), 16.0), torch.full((4, 4), 0.5)]
            for of_dispatch in grads:
                assert torch.equal(of_dispatch[which], expected[which])
                assert [i for i in range(3) if of_dispatch[i] is not None] == [which]
        with torch.no_grad():
            assert not any(dispatch(x, weights).requires_grad for dispatch in dispatches)

    copied("expert_parallel", 3, work)


@pytest.mark.parametrize(
    "of_x, of_weights", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]
)
def test_weights_of_another_dtype(copied, of_x, of_weights):
    def work(rank):
        x, matrix, *dispatches = expert_few(2)
        matrix.data = matrix.data.to(of_x)
        for dispatch in dispatches:
            inputs = x.clone().to(of_x).requires_grad_()
            weights = torch.full((len(x), 1), 0.5, dtype=of_weights, requires_grad=True)
            y = dispatch(inputs, weights)
            y.sum().backward()
            assert y.dtype == inputs.grad.dtype == of_x and weights.grad.dtype == of_weights
            assert y.tolist() == [[2.0] * 4] * len(x) == inputs.grad.tolist()

    copied("expert_parallel", 2, work)


def test_the_usage_that_is_printed(copied):
    """It runs as it stands, and trains as one process does."""
    pattern = r"# --- a model of yours.*?\n#\n(.*?)\n\n"

    def work(rank, world):
        import expert_parallel

        text = re.search(pattern, open("expert_parallel.py").read(), re.S)[1]
        text = "\n".join(line[6:] for line in text.splitlines())
        torch.manual_seed(0)
        tokens = torch.randn(9, 4, dtype=torch.float64)
        targets = torch.randint(5, (9,))
        router, head = nn.Linear(4, 3).double(), nn.Linear(4, 5).double()
        up = nn.Parameter(torch.randn(3, 6, 4, dtype=torch.float64))
        down = nn.Parameter(torch.randn(3, 4, 6, dtype=torch.float64))
        model = nn.Module()
        model.router, model.head = router, head
        given = dict(F=F, group=dist.group.WORLD, N=world, E=3, k=2, total_tokens=9, model=model)
        names = vars(expert_parallel) | given | dict(up=up, down=down)
        part = slice(9 * rank // world, 9 * (rank + 1) // world)
        halves = (t[part].tensor_split(2) for t in (tokens, targets))
        names["microbatches"] = list(zip(*halves))
        exec(text, names)
        return [p.grad for p in (router.weight, head.weight, model.up, model.down)]

    ((*commons, up, down),) = copied("expert_parallel", 1, work, 1)
    results = copied("expert_parallel", 2, work, 2)
    for result in results:
        torch.testing.assert_close(result[:2], commons)
    torch.testing.assert_close(torch.cat([result[2] for result in results]), up)
    torch.testing.assert_close(torch.cat([result[3] for result in results]), down)


# --- refusals


def expert_step(model, rank, step=0):
    tokens, targets = (t.tensor_split(2)[rank] for t in expert_batch(step))
    (F.cross_entropy(model(tokens), targets, reduction="sum") / sum(EXPERT_TOKENS)).backward()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_sum_after_each_microbatch_is_refused(copied, set_to_none):
    def work(rank):
        import expert_parallel

        model, _ = expert_deal_out(expert_toy(), dist.group.WORLD)
        for step in range(2):
            model.zero_grad(set_to_none)
            expert_step(model, rank)
            expert_parallel.sum_gradients(model.parameters(), dist.group.WORLD)
        with pytest.raises(RuntimeError, match="call sum_gradients once a step"):
            expert_step(model, rank)

    copied("expert_parallel", 2, work)


@pytest.mark.parametrize("clip", [True, False])
def test_two_sums_are_refused(copied, clip):
    def work(rank):
        import expert_parallel

        model, _ = expert_deal_out(expert_toy(), dist.group.WORLD)
        expert_step(model, rank)
        expert_parallel.sum_gradients(model.parameters(), dist.group.WORLD)
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with pytest.raises(RuntimeError, match="call sum_gradients once a step"):
            expert_parallel.sum_gradients(model.parameters(), dist.group.WORLD)

    copied("expert_parallel", 2, work)


@pytest.mark.parametrize("kind", ["module", "alike", "copy", "function", "group"])
def test_experts_that_are_not_known_as_such_are_refused(copied, kind):
    """alike: their weights do not tell that they are different experts. group: split over another
    one."""

    def work(rank):
        import expert_parallel

        group = dist.new_group([0, 1]) if kind == "group" else dist.group.WORLD
        toy = expert_toy()
        toy.experts.mlps, toy.router = toy.experts.mlps[:6], nn.Linear(6, 6).double()
        for p in toy.router.parameters():
            p.data.fill_(0.1)
        if kind == "alike":
            for mlp in toy.experts.mlps:
                mlp.load_state_dict(toy.experts.mlps[0].state_dict())
        model, _ = expert_deal_out(toy, group, place=kind in ("copy", "group"))
        if kind == "copy":
            model = copy.deepcopy(model.experts)
            toy.experts = model
        if kind == "function":
            dispatch = model.dispatch
            del model.dispatch
            model.dispatch = lambda x, w, c, experts, meanwhile: dispatch(
                x, w, c, lambda *a: experts(*a), meanwhile
            )
        expert_step(toy, rank)
        for p in toy.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        before = {p: p.grad.clone() for p in toy.parameters()}
        with pytest.raises(ValueError, match="cut it by shard|cut experts by shard"):
            expert_parallel.sum_gradients(toy.parameters(), dist.group.WORLD)
        assert all(torch.equal(p.grad, grad) for p, grad in before.items())

    copied("expert_parallel", 2, work)


def test_replicas_that_start_unequal_are_refused(copied):
    def work(rank):
        import expert_parallel

        torch.manual_seed(rank)
        p = nn.Parameter(torch.randn(3, 2))
        p.grad = torch.ones(3, 2)
        with pytest.raises(
            ValueError, match=r"\[\(3, 2\)\] differ between ranks.*start from the same weights"
        ):
            expert_parallel.sum_gradients([p], dist.group.WORLD)

    copied("expert_parallel", 2, work)


def test_parameters_without_a_gradient(copied):
    def work(rank):
        import expert_parallel

        some, none, frozen = (nn.Parameter(torch.ones(2)) for _ in range(3))
        frozen.requires_grad_(False)
        if rank == 1:
            some.grad = torch.full((2,), 3.0)
        expert_parallel.sum_gradients([some, none, frozen], dist.group.WORLD)
        assert frozen.grad is None
        return some.grad.tolist(), none.grad.tolist()

    assert copied("expert_parallel", 2, work) == [([3.0, 3.0], [0.0, 0.0])] * 2


def test_a_weight_that_is_used_more_often_in_a_later_step(copied):
    """Its new gradient may begin with the version that the last one ended with."""

    def work(rank):
        import expert_parallel

        p = nn.Parameter(torch.ones(2))
        for times in (1, 3, 2, 4):
            p.grad = None
            y = torch.ones(2)
            for _ in range(times):
                y = y * p
            y.sum().backward()
            expert_parallel.sum_gradients([p], dist.group.WORLD)
            assert p.grad.tolist() == [2.0 * times] * 2

    copied("expert_parallel", 2, work)


def expert_dispatch(
    sizes=(2, 2), x=(3, 4), weights=(3, 2), chosen=None, experts=lambda rows, counts: rows
):
    import expert_parallel

    chosen = torch.zeros(3, 2, dtype=torch.int64) if chosen is None else chosen
    x = torch.ones(x, requires_grad=True)
    return x, expert_parallel.ExpertDispatch(sizes, dist.group.WORLD)(
        x, torch.ones(weights), chosen, experts, lambda: None
    )


@pytest.mark.parametrize(
    "wrong, words",
    [
        (lambda: dict(sizes=[4]), r"not \[4\] for 2 ranks"),
        (lambda: dict(sizes=[2, 1, 1]), r"not \[2, 1, 1\] for 2 ranks"),
        (lambda: dict(chosen=torch.full((3, 2), 4)), r"beyond the 4 of sizes \[2, 2\]"),
        (lambda: dict(x=(1, 3, 4)), r"not \(1, 3, 4\), \(3, 2\) and \(3, 2\): flatten them"),
        (lambda: dict(x=(5, 4)), r"not \(5, 4\), \(3, 2\)"),
        (lambda: dict(weights=(3, 1)), r"\(3, 1\) and \(3, 2\)"),
        (
            lambda: dict(experts=lambda rows, counts: torch.cat((rows, rows))),
            "must return the shape of its rows",
        ),
        (
            lambda: dict(experts=lambda rows, counts: rows[:, :1]),
            "must return the shape of its rows",
        ),
    ],
)
def test_sizes_and_shapes_are_checked(copied, wrong, words):
    def work(rank):
        # each rank its own experts, so that all see a wrong result
        chosen = torch.full((3, 2), 2 * rank)
        with pytest.raises(ValueError, match=words):
            expert_dispatch(**{"chosen": chosen} | wrong())

    copied("expert_parallel", 2, work)


@pytest.mark.parametrize("capacity", [None, 1.0])
@pytest.mark.parametrize("number", [4, 5, -1])
def test_a_wrong_choice_of_one_rank_is_refused_on_all(copied, number, capacity):
    def work(rank):
        import expert_parallel

        dispatch = expert_parallel.ExpertDispatch([2, 2], dist.group.WORLD, capacity, chunks=2)
        x, weights = torch.ones(3, 4), torch.ones(3, 2)
        for wrong in (False, True, False):
            chosen = torch.zeros(3, 2, dtype=torch.int64)
            if wrong and rank == 1:
                chosen[0, 1] = number
                with pytest.raises(ValueError, match=r"beyond the 4 of sizes \[2, 2\]"):
                    dispatch(x, weights, chosen, lambda rows, counts: rows)
            elif wrong:
                with pytest.raises(ValueError, match="beyond the 4"):
                    dispatch(x, weights, chosen, lambda rows, counts: rows)
            else:
                dispatch(x, weights, chosen, lambda rows, counts: rows)

    copied("expert_parallel", 2, work)


def test_no_group_is_the_whole_world(copied):
    def work(rank):
        import expert_parallel

        p = expert_parallel.shard(nn.Parameter(torch.ones(4, 3)), None)
        assert expert_parallel.split_over(p, None) and len(p) == 2
        p.grad = torch.full_like(p, rank)
        expert_parallel.sum_gradients([p], None)  # nothing to sum
        assert (p.grad == rank).all()

    copied("expert_parallel", 2, work)


def test_a_gradient_of_a_gradient_is_refused(copied):
    def work(rank):
        x, y = expert_dispatch(experts=lambda rows, counts: rows**3)
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()

    copied("expert_parallel", 2, work)


def test_experts_are_dealt_out_once_and_of_the_gpt_alone(copied):
    def work(rank):
        import expert_parallel

        group = dist.group.WORLD
        part = expert_parallel.shard(nn.Parameter(torch.ones(4, 3)), group)
        with pytest.raises(ValueError, match="dealt out already"):
            expert_parallel.shard(part, group)
        foreign = [
            nn.Linear(2, 2),
            expert_toy(),
            types.SimpleNamespace(config=types.SimpleNamespace(num_local_experts=4)),
        ]
        for model in foreign:
            with pytest.raises(ValueError, match="knows the GPT of model.py alone"):
                expert_parallel.parallelize(model, group)

    copied("expert_parallel", 2, work)
