"""The top of tensor_parallel.py alone, on models that are not ours: right, or refused in a
sentence."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

VOCAB, WIDTH, HEADS, IGNORE = 29, 24, 6, -1


class ForeignAttention(nn.Module):
    """Causal attention, its qkv rows grouped by head, on F.scaled_dot_product_attention."""

    def __init__(self, heads=HEADS):
        super().__init__()
        self.size = WIDTH // heads
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (-1, 3, self.size)).transpose(1, 3).unbind(1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.proj(y.transpose(1, 2).flatten(2))


class ForeignMLP(nn.Module):
    def __init__(self, hidden=37, act=F.gelu):
        super().__init__()
        self.norm, self.act = nn.LayerNorm(WIDTH), act
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(x))))


def tensor_parallel_foreign(seed=0):
    """A language model of neither of our families, in float64. Sizes do not divide by 2 or 3."""
    torch.manual_seed(seed)
    layers = [ForeignAttention(), ForeignMLP(), ForeignAttention(), ForeignMLP()]
    embed, head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
    return nn.Sequential(embed, *layers, nn.LayerNorm(WIDTH), head).double()


def tensor_parallel_cut(model, tp, group):
    """Cut it as the usage block says."""
    for layer in model:
        first, last = ("qkv", "proj") if isinstance(layer, ForeignAttention) else ("up", "down")
        if hasattr(layer, first):
            layer.norm = nn.Sequential(layer.norm, tp.Enter(group))
            setattr(layer, first, tp.ColumnParallelLinear(getattr(layer, first), group))
            setattr(layer, last, tp.RowParallelLinear(getattr(layer, last), group))
    model[0] = tp.VocabParallelEmbedding(model[0], group)
    model[-1] = nn.Sequential(tp.Enter(group), tp.ColumnParallelLinear(model[-1], group))
    return model


def tensor_parallel_batch(step, rows=4, length=7):
    generator = torch.Generator().manual_seed(50 + step)
    tokens, targets = torch.randint(VOCAB, (2, rows, length), generator=generator)
    targets[0, :3] = IGNORE
    targets[-1, 0] = IGNORE
    return tokens, targets, (targets != IGNORE).sum()


def tensor_parallel_take(tp, full, parameter):
    """This rank's shard of a full tensor, as the parameter's placement says."""
    for dim, (group, _, _) in tp.placement(parameter)["cuts"].items():
        full = tp.shard_tensor(full, dim, dist.get_rank(group), dist.get_world_size(group))
    return full


def tensor_parallel_optimizer(kind, parameters):
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=0.3)
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def tensor_parallel_sum(logits, targets, count):
    flat, which = logits.flatten(0, -2), targets.flatten()
    return F.cross_entropy(flat, which, ignore_index=IGNORE, reduction="sum") / count


def tensor_parallel_train(model, criterion, kind, clip, steps=3):
    """Losses and norms of a run with two micro-batches a step, of 3 rows and of 1."""
    optimizer, history = tensor_parallel_optimizer(kind, model.parameters()), []
    for step in range(steps):
        tokens, targets, count = tensor_parallel_batch(step)
        optimizer.zero_grad()
        total = 0.0
        for rows in (slice(0, 3), slice(3, 4)):
            loss = criterion(model(tokens[rows]), targets[rows], count)
            loss.backward()
            total += loss.item()
        history += [total, clip(model.parameters()).item()]
        optimizer.step()
    return torch.tensor(history)


def tensor_parallel_clip(tp, parameters, limit, group):
    """As the usage block says. Returns the norm before."""
    parameters = list(parameters)
    norm = tp.grad_norm(parameters, group)
    nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return norm


def tensor_parallel_compare(tp, model, cut, kind, group):
    """Train both for 3 steps, the norm clipped: everything equal to 1e-10, on every rank."""
    clip = functools.partial(nn.utils.clip_grad_norm_, max_norm=0.5)
    reference = tensor_parallel_train(model, tensor_parallel_sum, kind, clip)
    clip = functools.partial(tensor_parallel_clip, tp, limit=0.5, group=group)
    criterion = tp.VocabParallelCrossEntropy(VOCAB, group)
    result = tensor_parallel_train(cut, criterion, kind, clip)
    torch.testing.assert_close(result, reference, rtol=1e-10, atol=0)
    assert reference[1] > 0.5  # it clips
    for p, whole in zip(cut.parameters(), model.parameters(), strict=True):
        for mine, full in ((p, whole), (p.grad, whole.grad)):
            torch.testing.assert_close(
                mine, tensor_parallel_take(tp, full, p), rtol=1e-10, atol=1e-10
            )


class Logits(nn.Module):
    """A Hugging Face model as a function of tokens alone."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens):
        return self.model(input_ids=tokens, use_cache=False).logits


def tensor_parallel_llama(rank, whole):
    import tensor_parallel as tp

    group, model = dist.group.WORLD, Logits(whole)
    cut = copy.deepcopy(model)

    def column(module, *names):
        for name in names:
            setattr(module, name, tp.ColumnParallelLinear(getattr(module, name), group))

    def row(module, name):
        setattr(module, name, tp.RowParallelLinear(getattr(module, name), group))

    inner = cut.model.model
    inner.embed_tokens = tp.VocabParallelEmbedding(inner.embed_tokens, group)
    for layer in inner.layers:
        layer.input_layernorm = nn.Sequential(layer.input_layernorm, tp.Enter(group))
        layer.post_attention_layernorm = nn.Sequential(
            layer.post_attention_layernorm, tp.Enter(group)
        )
        column(layer.self_attn, "q_proj", "k_proj", "v_proj")
        row(layer.self_attn, "o_proj")
        column(layer.mlp, "gate_proj", "up_proj")
        row(layer.mlp, "down_proj")
    inner.norm = nn.Sequential(inner.norm, tp.Enter(group))
    column(cut.model, "lm_head")
    tensor_parallel_compare(tp, model, cut, "adamw", group)


def test_hugging_face_llama_equals_one_process(copied):
    """On ranks that are forked when transformers is there, or each would import it."""
    transformers = pytest.importorskip("transformers")
    sizes = dict(vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=37, num_hidden_layers=2)
    config = transformers.LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).double()
    copied("tensor_parallel", 2, tensor_parallel_llama, model)


def tensor_parallel_equals(rank, kind):
    import tensor_parallel as tp

    group, model = dist.group.WORLD, tensor_parallel_foreign()
    cut = tensor_parallel_cut(copy.deepcopy(model), tp, group)
    assert sum(tp.split_over(p, group) for p in cut.parameters()) == 14
    tensor_parallel_compare(tp, model, cut, kind, group)


@pytest.mark.parametrize("world, kind", [(2, "sgd"), (3, "adamw")])
def test_foreign_model_equals_one_process(copied, world, kind):
    copied("tensor_parallel", world, tensor_parallel_equals, kind)


def tensor_parallel_orders(rank):
    import tensor_parallel as tp

    enter = tp.Enter(dist.group.WORLD)
    for enter_first in (True, False):
        leaf = torch.full((3,), 2.0, requires_grad=True)
        other = torch.full((3,), 3.0, requires_grad=True)
        if enter_first:
            u = enter(leaf)
            y = u + other * 1
        else:
            v = other * 1
            y = enter(leaf) + v
        (5 * y).sum().backward()
        assert leaf.grad.tolist() == [10.0] * 3  # f: both ranks' uses
        assert other.grad.tolist() == [5.0] * 3, enter_first


def test_f_leaves_the_gradient_of_what_is_added_to_it(copied):
    copied("tensor_parallel", 2, tensor_parallel_orders)


def tensor_parallel_holders(rank):
    import tensor_parallel as tp

    leave = tp.Leave(dist.group.WORLD)
    leaf = torch.ones(3, requires_grad=True)
    leave(leaf).sum().backward()
    assert leaf.tolist() == [1.0] * 3 and leaf.grad.tolist() == [1.0] * 3
    data = torch.ones(3)
    assert leave(data).tolist() == [2.0] * 3 and data.tolist() == [1.0] * 3
    base = torch.ones(2, 4, requires_grad=True) * 1
    view = base[:, :2]  # not contiguous either
    total = leave(view)
    assert total.tolist() == [[2.0, 2.0]] * 2 and base.tolist() == [[1.0] * 4] * 2
    partial = torch.ones(3, requires_grad=True) * 1
    assert (leave(partial) + partial).tolist() == [3.0] * 3


def test_g_leaves_the_partial_sum_to_who_holds_it(copied):
    copied("tensor_parallel", 2, tensor_parallel_holders)


def tensor_parallel_norms(rank):
    import tensor_parallel as tp

    group = dist.group.WORLD
    whole, cut = (
        tensor_parallel_foreign(),
        tensor_parallel_cut(tensor_parallel_foreign(), tp, group),
    )
    frozen = nn.Parameter(torch.ones(3), requires_grad=False)  # without a gradient
    tokens, targets, count = tensor_parallel_batch(0)
    tensor_parallel_sum(whole(tokens), targets, count).backward()
    tp.VocabParallelCrossEntropy(VOCAB, group)(cut(tokens), targets, count).backward()
    full = nn.utils.get_total_norm([p.grad for p in whole.parameters()])
    torch.testing.assert_close(tp.grad_norm([*cut.parameters(), frozen], group), full)
    torch.testing.assert_close(tp.grad_norm(iter(list(cut.parameters())), None), full)
    theirs = nn.utils.get_total_norm([p.grad for p in cut.parameters()])
    assert abs(theirs / full - 1) > 0.01  # what would let the copies drift apart
    norm = tensor_parallel_clip(tp, cut.parameters(), full.item() / 2, group)
    torch.testing.assert_close(norm, full)
    torch.testing.assert_close(tp.grad_norm(cut.parameters(), group), full / 2, rtol=1e-5, atol=0)


def test_gradient_norm_counts_each_element_once(copied):
    copied("tensor_parallel", 3, tensor_parallel_norms)


def tensor_parallel_mistakes_in_gradients(rank, mistake):
    import tensor_parallel as tp

    group, model = (
        dist.group.WORLD,
        tensor_parallel_cut(tensor_parallel_foreign(), tp, dist.group.WORLD),
    )
    tokens, targets, count = tensor_parallel_batch(0)
    if mistake == "no f":
        model[2].norm = model[2].norm[0]
        tp.VocabParallelCrossEntropy(VOCAB, group)(model(tokens), targets, count).backward()
    else:  # another input for the layers between embedding and head
        x = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(rank)).double()
        model[1:-1](x).square().sum().backward()
    with pytest.raises(RuntimeError, match="gradients of whole parameters differ"):
        tp.grad_norm(model.parameters(), group)


@pytest.mark.parametrize("mistake", ["no f", "other inputs"])
def test_gradient_norm_notices_copies_that_differ(copied, mistake):
    copied("tensor_parallel", 2, tensor_parallel_mistakes_in_gradients, mistake)


def tensor_parallel_refusals(rank):
    import tensor_parallel as tp

    group, weight = dist.group.WORLD, nn.Parameter(torch.randn(6, 4))
    part = tp.shard(weight, 0, group)
    assert tp.split_over(tp.shard(weight, 0, None), group) and tp.split_over(part, None)
    assert list(tp.shard(weight, -1, group).placement["cuts"]) == [1]
    for dim in (0, 1, -2):
        with pytest.raises(ValueError, match="is a shard already"):
            tp.shard(part, dim, group)
    linear, embedding = nn.Linear(4, 6), nn.Embedding(6, 4)
    column, row = tp.ColumnParallelLinear(linear, group), tp.RowParallelLinear(linear, group)
    assert column.weight.shape == (3, 4) and row.weight.shape == (6, 2)
    assert column.bias.shape == (3,) and row.bias is linear.bias
    embed = tp.VocabParallelEmbedding(embedding, group)
    for layer, module in (
        (tp.ColumnParallelLinear, column),
        (tp.ColumnParallelLinear, row),
        (tp.RowParallelLinear, column),
        (tp.RowParallelLinear, row),
        (tp.VocabParallelEmbedding, embed),
    ):
        with pytest.raises(ValueError, match="is a shard already"):
            layer(module, group)


def test_a_second_cut_is_refused(copied):
    copied("tensor_parallel", 2, tensor_parallel_refusals)


def tensor_parallel_vocabulary(rank):
    import tensor_parallel as tp

    group = dist.group.WORLD
    embed = tp.VocabParallelEmbedding(nn.Embedding(7, 4), group)
    assert embed(torch.tensor([[0, 6]])).shape == (1, 2, 4)
    for token in (7, 8, -1):  # 7: the padding of 2 pieces of 4
        with pytest.raises(RuntimeError, match="tokens must be from 0 to 6"):
            embed(torch.tensor([[0, token]]))
    criterion, logits = (
        tp.VocabParallelCrossEntropy(7, group),
        torch.randn(2, 4, requires_grad=True),
    )
    for target in (7, 8):
        with pytest.raises(RuntimeError, match="targets must be below 7"):
            criterion(logits, torch.tensor([0, target]), 2)
    with pytest.raises(ValueError, match="4 of 7 logits .* not 7"):
        criterion(torch.randn(2, 7), torch.tensor([0, 1]), 2)
    loss = criterion(logits, torch.tensor([0, -100]), 2)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace operation"):
        loss.backward()  # the first one has used up what was saved


def test_indices_outside_of_the_vocabulary_are_refused(copied):
    copied("tensor_parallel", 2, tensor_parallel_vocabulary)


def tensor_parallel_other_models(rank):
    from types import SimpleNamespace

    import tensor_parallel as tp

    group, other = dist.group.WORLD, nn.Linear(4, 4)
    lookalike = nn.Linear(4, 4)  # has a config, as Hugging Face's models do
    lookalike.config = SimpleNamespace(vocab_size=7)
    for model in (other, lookalike, nn.Sequential(other)):
        with pytest.raises(ValueError, match="parallelize knows model.py's GPT alone, not "):
            tp.parallelize(model, group)
    three = SimpleNamespace(heads=6, kv_heads=3, experts=0, vocab=7)
    gpt = SimpleNamespace(config=three, embed=None, blocks={}, head=None)
    with pytest.raises(
        ValueError,
        match="6 heads and 3 kv-heads do not divide over 2 tensor-parallel ranks: use 1 or 3",
    ):
        tp.parallelize(gpt, group)


def test_other_models_and_heads_that_do_not_divide_are_refused(copied):
    copied("tensor_parallel", 2, tensor_parallel_other_models)


def tensor_parallel_orders_of_qkv(rank):
    """nn.MultiheadAttention's rows as the docstring orders them, against that module."""
    import tensor_parallel as tp

    group, theirs, mine = (
        dist.group.WORLD,
        nn.MultiheadAttention(WIDTH, HEADS, batch_first=True),
        ForeignAttention(),
    )
    mine.norm = nn.Identity()
    torch.manual_seed(0)
    with torch.no_grad():
        for p in theirs.parameters():
            p.normal_()
        weight, bias = theirs.in_proj_weight, theirs.in_proj_bias
        mine.qkv.weight.copy_(weight.view(3, HEADS, -1, WIDTH).transpose(0, 1).flatten(0, 2))
        mine.qkv.bias.copy_(bias.view(3, HEADS, -1).transpose(0, 1).flatten())
        mine.proj.load_state_dict(theirs.out_proj.state_dict())
    cut = tensor_parallel_cut(
        nn.Sequential(nn.Embedding(VOCAB, WIDTH), mine, nn.Linear(WIDTH, VOCAB)), tp, group
    )[1]
    x = torch.randn(2, 5, WIDTH)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    expected = x + theirs(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]
    torch.testing.assert_close(cut(x), expected, rtol=1e-4, atol=1e-4)


def test_torchs_qkv_ordered_by_head(copied):
    copied("tensor_parallel", 2, tensor_parallel_orders_of_qkv)


def tensor_parallel_cut_heads(rank):
    import tensor_parallel as tp

    model = tensor_parallel_cut(tensor_parallel_foreign(), tp, dist.group.WORLD)
    with pytest.raises(RuntimeError, match="unflatten"):  # 6 heads on 4 ranks
        model(tensor_parallel_batch(0)[0])


def test_a_view_fails_on_cut_heads(copied):
    copied("tensor_parallel", 4, tensor_parallel_cut_heads)


def tensor_parallel_second_gradients(rank):
    import tensor_parallel as tp

    group = dist.group.WORLD
    for module in (tp.Enter(group), tp.Leave(group)):
        x = torch.full((3,), 1.0 + rank, requires_grad=True)
        (grad,) = torch.autograd.grad(module(x).pow(3).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            grad.square().sum().backward()
    # The second gradient would lack the softmax's part, and have that of x
    x, weight = torch.randn(2, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    loss = tp.VocabParallelCrossEntropy(7, group)(F.linear(x, weight), torch.tensor([0, 5]), 2)
    with pytest.raises(RuntimeError, match="no second gradients"):
        torch.autograd.grad(loss, weight, create_graph=True)[0].square().sum().backward()


def test_a_gradient_of_a_gradient_is_refused(copied):
    copied("tensor_parallel", 2, tensor_parallel_second_gradients)


def tensor_parallel_embeddings(rank):
    """padding_idx is a row of either rank; what would need other ranks' rows is refused."""
    import tensor_parallel as tp

    group, tokens = dist.group.WORLD, torch.arange(7).repeat(2, 1)
    for padding in (0, 1, 4, -1, None):
        whole = nn.Embedding(7, 4, padding_idx=padding)
        embed = tp.VocabParallelEmbedding(copy.deepcopy(whole), group)
        for module in (whole, embed):
            module(tokens).mul(3).sum().backward()  # a zero vector has a gradient, too
        full = tensor_parallel_take(tp, whole.weight.grad, embed.weight)
        torch.testing.assert_close(embed.weight.grad, full)
    for options in ({"max_norm": 1.0}, {"scale_grad_by_freq": True}):
        with pytest.raises(ValueError, match="max_norm or scale_grad_by_freq"):
            tp.VocabParallelEmbedding(nn.Embedding(7, 4, **options), group)


def test_options_of_an_embedding_are_kept_or_refused(copied):
    copied("tensor_parallel", 2, tensor_parallel_embeddings)


class UsageBlock(nn.Module):
    """The names of the usage blocks: attn and mlp with a norm each, heads that forward counts."""

    def __init__(self):
        super().__init__()
        self.attn, self.mlp = ForeignAttention(), ForeignMLP(hidden=36)
        self.attn.heads = HEADS
        self.attn.norm.register_forward_hook(self.count_heads)

    def count_heads(self, *_):
        assert self.attn.qkv.weight.shape[0] == 3 * self.attn.size * self.attn.heads

    def forward(self, x):
        return self.mlp(self.attn(x))


class UsageModel(nn.Module):
    """Two blocks, learned positions, a tied head."""

    def __init__(self):
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(7, WIDTH)
        self.blocks = nn.ModuleList([UsageBlock(), UsageBlock()])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.local = lambda positions: positions

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.positions(self.local(torch.arange(tokens.shape[1])))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def tensor_parallel_usage(name, **names):
    """Run a file's usage block as it is printed. Returns the names that it leaves."""
    import pathlib

    text = pathlib.Path(f"{name}.py").read_text().partition("\n# --- a model of yours")[2]
    lines = text.partition("\n# --- ")[0].splitlines()[1:]
    exec("\n".join(line[6:] for line in lines if line.startswith("#     ")), names)
    return names


def tensor_parallel_usage_reference(model, microbatches, count):
    """Step a whole model on the same micro-batches, as the usage block steps the cut one."""
    optimizer = torch.optim.AdamW(model.parameters())
    for tokens, targets in microbatches:
        tensor_parallel_sum(model(tokens), targets, count).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def tensor_parallel_usage_equals(rank):
    import tensor_parallel as tp

    torch.manual_seed(0)
    whole, group = UsageModel().double(), dist.group.WORLD
    cut, (tokens, targets, count) = copy.deepcopy(whole), tensor_parallel_batch(0)
    microbatches = list(zip(tokens.split(2), targets.split(2)))
    names = dict(model=cut, group=group, t=2, vocab=VOCAB, microbatches=microbatches, count=count)
    tensor_parallel_usage("tensor_parallel", **vars(tp), **names)
    tensor_parallel_usage_reference(whole, microbatches, count)
    for p, full in zip(cut.parameters(), whole.parameters(), strict=True):
        for ours, theirs in ((p, full), (p.grad, full.grad)):
            expected = tensor_parallel_take(tp, theirs, p)
            torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)


def test_the_usage_block_runs_as_printed(copied):
    copied("tensor_parallel", 2, tensor_parallel_usage_equals)
