"""The top of pipeline.py alone, on models that are not ours: right to rounding, and mistakes
refused."""

import re
import textwrap

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

WIDTH, VOCAB, ROWS, LENGTH = 8, 11, 8, 5
DOUBLE = torch.float64


class PipelineMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.relu = nn.LayerNorm(WIDTH), nn.ReLU(inplace=True)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(self.relu(self.up(self.norm(x))))


def pipeline_layers(kind):
    """A foreign model as a list: an embedding, six blocks, the output projection tied to the
    embedding."""
    torch.manual_seed(1)
    embedding, head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
    head.weight = nn.Parameter(embedding.weight.detach().clone())
    blocks = [
        PipelineMLP()
        if kind == "mlp"
        else nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        for _ in range(6)
    ]
    return nn.ModuleList([embedding, *blocks, head]).to(DOUBLE)


def pipeline_batch(step):
    """Tokens, and targets of which some don't count."""
    generator = torch.Generator().manual_seed(step)
    tokens, targets = torch.randint(VOCAB, (2, ROWS, LENGTH), generator=generator)
    targets[torch.rand(ROWS, LENGTH, generator=generator) < 0.4] = -100
    return tokens, targets


def pipeline_loss(logits, targets, count):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / count


def pipeline_optimizer(kind, parameters):
    return (
        torch.optim.SGD(parameters, 0.3, 0.9)
        if kind == "sgd"
        else torch.optim.AdamW(parameters, 0.01, eps=1e-5)
    )


def pipeline_one_process(model, optimizer):
    layers = pipeline_layers(model)
    layers[-1].weight = layers[0].weight
    optimizer, losses = pipeline_optimizer(optimizer, layers.parameters()), []
    for step in range(3):
        tokens, targets = pipeline_batch(step)
        optimizer.zero_grad()
        x = tokens
        for layer in layers:
            x = layer(x)
        loss = pipeline_loss(x, targets, (targets >= 0).sum())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    named = dict(layers.named_parameters(remove_duplicate=False))
    return losses, {n: (p.detach(), p.grad) for n, p in named.items()}


def pipeline_train(rank, name, ranks, microbatches, model, optimizer):
    """Three steps by the schedule of that name: (losses, {parameter: (weight, gradient)}) of this
    rank."""
    import pipeline as pp

    links, schedule = pp.make_links(), pp.make(name, ranks, microbatches)
    last, layers = schedule.last, pipeline_layers(model)
    cuts = [c.tolist() for c in torch.arange(len(layers)).tensor_split(last + 1)]
    mine = {i for stage in schedule.stages(rank) for i in cuts[stage]}
    tied = dist.new_group(sorted({0, schedule.owner[last]}))
    if schedule.owner[last] == 0:
        layers[-1].weight = layers[0].weight
    else:
        for i in (0, len(layers) - 1):
            layers[i].weight.placement = {"partial": [tied]}
    named = dict(layers.named_parameters(remove_duplicate=False))
    named = {n: p for n, p in named.items() if int(n.split(".")[0]) in mine}
    parameters = list(dict.fromkeys(named.values()))
    optimizer, losses = pipeline_optimizer(optimizer, parameters), []
    for step in range(3):
        tokens, targets = pipeline_batch(step)
        count = (targets >= 0).sum()
        tokens, targets = tokens.chunk(microbatches), targets.chunk(microbatches)

        def forward(stage, m, x):
            x = tokens[m] if x is None else x
            for i in cuts[stage]:
                x = layers[i](x)
            return pipeline_loss(x, targets[m], count) if stage == last else x

        optimizer.zero_grad()
        shape = (ROWS // microbatches, LENGTH, WIDTH)
        results = pp.play(schedule, forward, shape, DOUBLE, "cpu", links)
        pp.reduce_tied(parameters)
        optimizer.step()
        losses.append(sum(results))
    return losses, {n: (p.detach(), p.grad) for n, p in named.items()}, rank == schedule.owner[last]


@pytest.mark.parametrize(
    "name, ranks, microbatches",
    [
        ("naive", 2, 2),
        ("gpipe", 4, 2),
        ("1f1b", 3, 2),
        ("interleaved", 2, 2),
        ("zb-h1", 3, 4),
        ("zb-h2", 4, 8),
        ("zb-v", 3, 2),
        ("dualpipev", 2, 4),
    ],
)
@pytest.mark.parametrize("model, optimizer", [("mlp", "sgd"), ("transformer", "adamw")])
def test_pipeline_equals_one_process(copied, name, ranks, microbatches, model, optimizer):
    losses, whole = pipeline_one_process(model, optimizer)
    results = copied("pipeline", ranks, pipeline_train, name, ranks, microbatches, model, optimizer)
    seen = set()
    for mine, named, has_loss in results:
        for n, (weight, gradient) in named.items():
            torch.testing.assert_close(
                weight, whole[n][0], rtol=1e-10, atol=1e-12, msg=f"weight {n}"
            )
            torch.testing.assert_close(
                gradient, whole[n][1], rtol=1e-10, atol=1e-12, msg=f"gradient {n}"
            )
        seen |= named.keys()
        if has_loss:
            assert [float(x) for x in mine] == pytest.approx(losses, rel=1e-10)
    assert seen == whole.keys()


def pipeline_block(docstring):
    """The lines that a docstring indents."""
    lines = [line for line in docstring.splitlines()[1:] if line.startswith(" " * 8)]
    return textwrap.dedent("\n".join(lines))


def test_pipeline_usage_blocks_run_as_printed(copied):
    """The training loop of play, against one process, and the lines of Deferred."""

    def data(steps=3):
        for step in range(steps):
            tokens, targets = (t.clamp(min=0) for t in pipeline_batch(step))
            yield tokens.chunk(4), targets.chunk(4), tokens.numel()

    def work(rank):
        import pipeline as pp

        cuts = [pipeline_layers("mlp")[:4], pipeline_layers("mlp")[4:]]
        names = vars(pp) | dict(rank=rank, ranks=2, microbatches=4, batches=data())
        names |= dict(build_stage=lambda s: nn.Sequential(*cuts[s]), device="cpu", dtype=DOUBLE)
        exec(pipeline_block(pp.play.__doc__), names | dict(b=ROWS // 4, T=LENGTH, C=WIDTH))
        model, x, targets = (
            nn.Linear(4, 3),
            torch.ones(2, 4, requires_grad=True),
            torch.tensor([0, 1]),
        )
        names = vars(pp) | dict(model=model, x=x, targets=targets, count=2)
        exec(pipeline_block(pp.Deferred.__doc__), names)
        late = model.weight.grad.clone()
        model.zero_grad()
        F.cross_entropy(model(x), targets).backward()
        torch.testing.assert_close(late, model.weight.grad)
        return [p.detach() for p in nn.ModuleList(cuts[rank]).parameters()]

    layers = pipeline_layers("mlp")
    optimizer = torch.optim.AdamW(layers.parameters())
    for inputs, targets, count in data():
        optimizer.zero_grad()
        logits = nn.Sequential(*layers)(torch.cat(inputs))
        pipeline_loss(logits, torch.cat(targets), count).backward()
        optimizer.step()
    weights = [p for stage in copied("pipeline", 2, work) for p in stage]
    for mine, whole in zip(weights, layers.parameters(), strict=True):
        torch.testing.assert_close(mine, whole, rtol=1e-8, atol=1e-8)


def test_pipeline_defers_what_modules_call_alone(copied):
    """Of nn.TransformerEncoderLayer the two linear layers' weights, and none of
    nn.MultiheadAttention's."""

    def work(rank):
        import pipeline as pp

        layers, late = pipeline_layers("transformer"), []
        accumulate = pp.Deferred.accumulate

        def watched(deferred):
            late.extend(entry[0] for entry in deferred.entries)
            accumulate(deferred)

        def forward(stage, m, x):
            x = layers[stage + 1](layers[0](pipeline_batch(0)[0]) if x is None else x)
            return x.square().sum() if stage == 1 else x

        pp.Deferred.accumulate = watched
        pp.play(
            pp.make("zb-v", 1, 1), forward, (ROWS, LENGTH, WIDTH), DOUBLE, "cpu", pp.make_links()
        )
        return sorted(n for n, p in layers.named_parameters() if any(p is q for q in late))

    [late] = copied("pipeline", 1, work)
    assert late == [f"{i}.linear{k}.weight" for i in (1, 2) for k in (1, 2)]


def pipeline_refused(call, *args):
    """What it says in a ValueError or RuntimeError."""
    with pytest.raises((ValueError, RuntimeError)) as info:
        call(*args)
    return str(info.value)


def test_pipeline_refuses_links_and_schedules(copied):
    """Before anything is sent, and on every rank. Afterwards the same links are as good as new."""

    def work(rank):
        import pipeline as pp

        weight, links, pair = nn.Parameter(torch.ones(2)), pp.make_links(), pp.make_links([0, 1])
        good = pp.make("1f1b", 3, 3)

        def forward(stage, m, x):
            y = (torch.ones(2) if x is None else x) * weight
            return y.sum() if stage == 2 else y

        def play(schedule, links):
            return pp.play(schedule, forward, (2,), torch.float32, "cpu", links)

        wrong = {
            "four different groups": [
                (good, [links[0]] * 4),
                (good, links[:3]),
                (good, [*links[:3], links[0]]),
            ],
            "this process is not|four different groups": [(good, [*pair[:2], *links[:2]])],
            "for 2 ranks, but the links join 3": [(pp.make("1f1b", 2, 3), links)],
            "for 4 ranks, but the links join 3": [(pp.make("1f1b", 4, 3), links)],
        }
        unsound = {
            "as nothing": [good[0], good[1], good[2][:-2]],
            "as F B B": [good[0], good[1], [*good[2], good[2][-1]]],
            "as F$": [good[0], good[1][:-1], good[2]],
            "another order": [good[0], good[1], [good[2][i] for i in (2, 3, 0, 1, 4, 5)]],
            "another rank's stage": [good[0], good[1], good[1]],
            "number them from 0": [[a._replace(stage=2 * a.stage) for a in row] for row in good],
        }
        if rank == 2:
            wrong["this process is not"] = [(pp.make("1f1b", 2, 3), pair)]
        said = [
            (words, pipeline_refused(play, *args))
            for words, cases in wrong.items()
            for args in cases
        ]
        said += [(words, pipeline_refused(pp.Schedule, rows)) for words, rows in unsound.items()]
        said.append(("a Schedule", pipeline_refused(play, list(good), links)))
        with torch.no_grad():
            said.append(("gradients are off", pipeline_refused(play, good, links)))
            assert len(play(pp.forward_only(good, 2), links)) == 2 * (rank == 2)
        play(good, links)
        return said, weight.grad

    for said, grad in copied("pipeline", 3, work):
        for words, message in said:
            assert re.search(words, message), (words, message)
        assert grad.tolist() == [3.0, 3.0]


def pipeline_play(rank, ranks, name, stage_of, rows=4, **more):
    """A play of two linear stages on `ranks` ranks, each put through stage_of(stage, m, layer,
    x)."""
    import pipeline as pp

    torch.manual_seed(2)
    schedule, layers = pp.make(name, ranks, 2), [nn.Linear(4, 4).to(DOUBLE) for _ in range(2)]
    data = torch.randn(2, rows, 4, dtype=DOUBLE)

    def forward(stage, m, x):
        return stage_of(stage, m, layers[stage], data[m] if x is None else x)

    results = pp.play(
        schedule, forward, (rows, 4), DOUBLE, "cpu", more.get("links") or pp.make_links()
    )
    mine = [layers[stage] for stage in schedule.stages(rank)]
    gradients = [p.grad for layer in mine for p in layer.parameters()]
    for layer in layers:
        layer.zero_grad()
    for m in range(2):
        forward(1, m, forward(0, m, None)).backward()
    for gradient, p in zip(gradients, (p for layer in mine for p in layer.parameters())):
        torch.testing.assert_close(gradient, p.grad, rtol=1e-10, atol=1e-12)
    return results


def pipeline_fewer_rows(stage, m, layer, x):
    x = x[: 4 - m] if stage == 0 else x
    return layer(x).square().sum() if stage else layer(x)


def pipeline_other_dtype(stage, m, layer, x):
    y = layer(x.to(DOUBLE))
    return y.square().sum() if stage else y.float()


def pipeline_no_loss(stage, m, layer, x):
    return layer(x)


def pipeline_detached_input(stage, m, layer, x):
    return layer(x.detach()).square().sum() if stage else layer(x)


def pipeline_detached_loss(stage, m, layer, x):
    return layer(x).square().sum().detach() if stage else layer(x)


def pipeline_saliency(stage, m, layer, x):
    y = layer(x).tanh()
    if stage == 0:
        return y
    [gradient] = torch.autograd.grad(y.sum(), x, retain_graph=True)
    return (y * gradient).sum()


def pipeline_hypernetwork(stage, m, layer, x):
    """The second stage's weight depends on its input; so does a product of two activations."""
    if stage == 0:
        return layer(x)
    return (F.linear(x, layer.weight * x.mean()) + F.linear(x, x)).square().sum()


def pipeline_in_place(stage, m, layer, x):
    y = layer(layer(x).relu_())
    return y.square().sum() if stage else y


@pytest.mark.parametrize(
    "ranks, name, stage_of, words",
    [
        (
            2,
            "1f1b",
            pipeline_fewer_rows,
            r"has \[3, 4\] of torch.float64 .* micro-batch 1, .* \[4, 4\]",
        ),
        (2, "1f1b", pipeline_other_dtype, r"of torch.float32 .* torch.float64"),
        (1, "zb-v", pipeline_no_loss, r"last stage returned \[4, 4\]"),
        (1, "interleaved", pipeline_detached_input, "stage 1 has no gradient"),
        (1, "interleaved", pipeline_detached_loss, "stage 1 has no gradient"),
        (1, "zb-v", pipeline_saliency, "backward pass of its own"),
    ],
)
def test_pipeline_refuses_results_of_stages(copied, ranks, name, stage_of, words):
    with pytest.raises(AssertionError, match=f"(ValueError|RuntimeError): .*{words}"):
        copied("pipeline", ranks, pipeline_play, ranks, name, stage_of)


@pytest.mark.parametrize(
    "ranks, name, stage_of",
    [
        (2, "zb-h1", pipeline_hypernetwork),
        (2, "zb-h1", pipeline_in_place),
        (1, "interleaved", pipeline_saliency),
    ],
)
def test_pipeline_split_backward_is_right(copied, ranks, name, stage_of):
    copied("pipeline", ranks, pipeline_play, ranks, name, stage_of)


def test_pipeline_refuses_links_after_an_exception(copied):
    def work(rank):
        import pipeline as pp

        links = pp.make_links()

        def stage_of(stage, m, layer, x):
            if stage + m == 1:
                raise KeyError("spoilt data")
            return pipeline_in_place(stage, m, layer, x)

        # Kept: its frames hold the first message until rank 1 has it
        with pytest.raises(KeyError) as raised:
            pipeline_play(rank, 2, "zb-h1", stage_of, links=links)
        said = pipeline_refused(
            lambda: pipeline_play(rank, 2, "zb-h1", pipeline_in_place, links=links)
        )
        pipeline_play(rank, 2, "zb-h1", pipeline_in_place)
        del raised
        return said

    for said in copied("pipeline", 2, work):
        assert "make new links" in said


def test_pipeline_reduces_tied_gradients_once(copied):
    def work(rank):
        import pipeline as pp

        p, frozen, other = (nn.Parameter(torch.ones(2)) for _ in range(3))
        frozen.requires_grad_(False)
        for q in (p, frozen):
            q.placement = {"partial": [dist.group.WORLD]}
        sums = []
        for keep in (False, True, True):  # the gradient's tensor
            p.grad = None if not keep else p.grad.zero_()
            if rank == 0:
                (p.sum() * 3).backward()  # the other copy gets no gradient
            pp.reduce_tied([p, frozen, other])
            sums.append(p.grad.tolist())
        said = pipeline_refused(pp.reduce_tied, [p])
        named = pipeline_refused(pp.reduce_tied, nn.Sequential(nn.Linear(1, 1)).named_parameters())
        return sums, said, named, frozen.grad, other.grad

    for sums, said, named, *none in copied("pipeline", 2, work):
        assert sums == [[3.0, 3.0]] * 3 and none == [None, None]
        assert "once a step" in said and "needs parameters" in named


def test_pipeline_says_which_functions_are_for_our_model(copied):
    def work(rank):
        import stages

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.config = self.embed = self.head = None
                self.blocks = nn.ModuleDict()

        model = nn.Linear(2, 2)
        return [
            pipeline_refused(stages.split, lambda: model, [range(1)], [0]),
            pipeline_refused(stages.Stages, {0: model}),
            pipeline_refused(stages.split, Model, [range(0), range(0)], [-1]),
            pipeline_refused(stages.split, Model, [range(1)], [0]),
            pipeline_refused(lambda: stages.Stages({0: Model(), 3: Model()})[2]),
        ]

    [[*foreign, stage, layers, missing]] = copied("harness/stages", 1, work)
    assert all("GPT alone" in said and "cut your model yourself" in said for said in foreign)
    assert "not those of 0 blocks" in layers
    assert "no stage -1 among 2" in stage and "stage 2 is not here, but 0, 3" in missing
