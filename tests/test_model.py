"""model.py: the promises that let techniques cut it. test_pretrained.py has transformers."""

import contextlib
import io
import itertools
import re
import shutil

import pytest
import tops
import torch

import harness
import mixture
import model as gpt
from harness import families, initialize, presets
from proof.ledger import Ledger
from receipts.formulas import Sizes, block_bytes, flops_per_token
from trainer import document_core

SMALL = dict(layers=3, heads=4, width=32, context=24, vocab=61)


def batch(vocab=61, rows=2, context=24, seed=0):
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab, (rows, context + 1), generator=g)
    return tokens[:, :-1], tokens[:, 1:]


MIXTURE = dict(experts=5, top_k=2, shared=1, balance_loss=0.3, z_loss=0.2)


def loop_over_experts(moe, x):
    """The layer token by token, expert by expert. Returns its output, the sum over sequences of the
    two losses by the papers' formulas, and the experts' load."""
    c = moe.router.config
    logits = x @ moe.router.weight.t()
    scores = logits.softmax(-1) if c.scores == "softmax" else logits.sigmoid()
    rows, losses, load = [], 0.0, torch.zeros(c.experts)
    for i in range(len(x)):
        assigned = torch.zeros(c.experts, dtype=x.dtype)
        for t in range(x.shape[1]):
            chosen = (scores[i, t] + moe.router.choice_bias).topk(c.top_k).indices
            weights = scores[i, t, chosen] / (scores[i, t, chosen].sum() if c.renormalize else 1)
            y = 0
            for w, e in zip(weights, chosen):
                assigned[e] += 1
                up = moe.experts.up[e] @ x[i, t]
                if moe.experts.gate is None:
                    up = torch.nn.functional.gelu(up, approximate="tanh")
                else:
                    up = up * torch.nn.functional.silu(moe.experts.gate[e] @ x[i, t])
                y = y + w * (moe.experts.down[e] @ up)
            rows.append(y + moe.shared(x[i, t]))
        load += assigned
        f = assigned / c.top_k / x.shape[1]
        p = (scores[i] / scores[i].sum(-1, keepdim=True)).mean(0)
        losses = losses + c.balance_loss * c.experts * (f * p).sum()
        losses = losses + c.z_loss * logits[i].logsumexp(-1).square().mean()
    return torch.stack(rows).view_as(x), losses, load


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("family, renormalize", [("gpt2", True), ("llama", False)])
def test_mixture_is_a_loop_over_tokens_and_experts(family, scores, renormalize):
    torch.manual_seed(0)
    config = presets.configure(
        family=family, **SMALL, **MIXTURE, scores=scores, renormalize=renormalize
    )
    moe = initialize.build(config, dtype=torch.float64).blocks["0"].mlp
    for p in moe.parameters():
        p.data = torch.randn(
            p.shape, dtype=p.dtype, generator=torch.Generator().manual_seed(p.numel())
        )
    moe.router.choice_bias += 0.1 * torch.arange(5)
    x = torch.randn(3, 6, 32, dtype=torch.float64, requires_grad=True)
    expected, losses, load = loop_over_experts(moe, x)
    everything = [x, *moe.parameters()]
    # count = 2 x 3 x 6: each sequence's losses count tokens / count = 1/6
    expected_grads = torch.autograd.grad(expected.square().sum() + losses / 6, everything)
    y = moe(x, gpt.Batch(target_count=36))
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
    grads = torch.autograd.grad(y.square().sum(), everything)
    torch.testing.assert_close(grads, expected_grads, rtol=1e-10, atol=1e-10)
    assert torch.equal(moe.router.load, load.long())


def test_losses_of_the_router_are_not_in_the_loss():
    """How they add up over pieces of a batch test_layouts.py shows."""
    tokens, targets = batch(rows=5)
    losses = set()
    for factors in ({}, dict(balance_loss=0, z_loss=0)):
        config = presets.configure(**SMALL, **MIXTURE | factors)
        losses.add(initialize.build(config)(tokens, targets=targets).item())
    assert len(losses) == 1


def test_equal_scores_go_to_the_first_experts():
    router = mixture.Router(presets.configure(**SMALL, **MIXTURE))
    torch.nn.init.zeros_(router.weight)
    with pytest.warns(UserWarning, match="load is not balanced"):
        weights, chosen = router(torch.randn(2, 7, 32))
    assert (chosen == torch.tensor([0, 1])).all() and (weights == 0.5).all()


def steps_with(kind, **sizes):
    """Train two micro-batches with dropout. Returns gradients and loads of routers, and the bytes
    held before the last backward."""
    config = presets.configure(**SMALL, dropout=0.1, **sizes)
    model = initialize.build(config, dtype=torch.float64)
    harness.recompute(model, kind)
    tokens, targets = batch(rows=6)
    ledger = Ledger({})
    ledger.watch(model.parameters())
    for rows in torch.arange(6).chunk(2):
        with ledger:
            loss = model(
                tokens[rows], targets=targets[rows], target_count=tokens.numel(), sample_ids=rows
            )
        held = ledger.bytes
        loss.backward()
    loads = [block.mlp.router.load for block in model.blocks.values()] if config.experts else []
    return {name: p.grad for name, p in model.named()} | dict(enumerate(loads)), held


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("mixture", [{}, MIXTURE | dict(bias_rate=0.1)], ids=["plain", "mixture"])
def test_recomputation_changes_no_bit_and_holds_less(family, mixture):
    whole, most = steps_with("none", family=family, **mixture)
    for kind, part in (("selective", 0.85), ("half", 0.8), ("block", 0.5)):
        again, held = steps_with(kind, family=family, **mixture)
        assert again.keys() == whole.keys() and all(
            torch.equal(again[name], whole[name]) for name in whole
        )
        assert held < part * most
    if mixture:
        assert [whole[i].sum() for i in range(3)] == [6 * 24 * 2] * 3


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("mixture", [{}, {"experts": 4}, {"experts": 4, "shared": 1}])
@pytest.mark.parametrize("kind", ["half", "block"])
def test_what_a_recomputed_block_keeps_is_as_the_formula_says(family, mixture, kind):
    """To the byte: beside it attention's kernel keeps a number a token and head, and a router the
    load of its experts."""
    held, (tokens, targets) = [], batch(rows=6)
    for layers in (2, 3):
        config = presets.configure(**SMALL | dict(layers=layers), family=family, **mixture)
        model = initialize.build(config)
        harness.recompute(model, kind)
        ledger = Ledger({})
        ledger.watch(model.parameters())
        with ledger:
            loss = model(tokens, targets=targets)
        held.append(ledger.bytes)
        del loss
    beside = 6 * config.context * config.heads * 4 if kind == "half" else 0
    beside += 8 * config.experts
    formula = block_bytes(Sizes(config, *tokens.shape), kind)
    assert held[1] - held[0] == formula + beside


def test_half_keeps_one_tile_of_a_ring():
    """However many kernels attention is made of."""

    class Tiles(gpt.AttentionCore):
        def forward(self, q, k, v):
            return sum(super(Tiles, self).forward(q, k, v) for _ in range(self.tiles))

    held, (tokens, targets) = [], batch(rows=6)
    for Tiles.tiles in (1, 3):
        model = initialize.build(presets.configure(**SMALL))
        for block in model.blocks.values():
            block.attn.core = Tiles()
        harness.recompute(model, "half")
        ledger = Ledger({})
        with ledger:
            loss = model(tokens, targets=targets)
        held.append(ledger.bytes)
        loss.backward()
    assert held[0] == held[1]


def test_bias_brings_the_load_into_balance():
    config = presets.configure(
        **SMALL, **MIXTURE | dict(experts=8, shared=0, balance_loss=0, z_loss=0, bias_rate=5e-4)
    )
    model = initialize.build(config)
    tokens, targets = batch(rows=16)
    spread = []
    for _ in range(40):  # without training: the bias alone
        model(tokens, targets=targets).backward()
        loads = torch.stack([block.mlp.router.load for block in model.blocks.values()]).double()
        assert loads.sum(1).tolist() == [16 * 24 * 2] * 3
        spread.append((loads.max(1).values / loads.mean(1)).mean().item())
        mixture.rebalance(model)
    assert spread[-1] < 1.3 < spread[0]
    assert all(block.mlp.router.load.sum() == 0 for block in model.blocks.values())


def test_kernel_and_loop_of_grouped_products_agree():
    for sizes in ([3, 0, 5, 0], [0, 0, 0, 8], [0, 0, 0, 0]):
        g = torch.Generator().manual_seed(0)
        x, w = torch.randn(sum(sizes), 8, generator=g), torch.randn(4, 12, 8, generator=g)
        ends, results = torch.tensor(sizes).cumsum(0).int(), []
        for dtype in (torch.float32, torch.float64):
            a, b = x.to(dtype).requires_grad_(), w.to(dtype).requires_grad_()
            y = mixture.grouped_linear(a, b, ends)
            results.append([y, *torch.autograd.grad(y.square().sum(), (a, b))])
        for kernel, loop in zip(*results):
            torch.testing.assert_close(kernel.double(), loop, rtol=1e-5, atol=1e-5)
    # The kernel refuses rows of 28 bytes
    assert mixture.grouped_linear(torch.randn(8, 7), torch.randn(4, 5, 7), ends).shape == (8, 5)


def test_published_sizes():
    sizes = {"gpt2": 124439808, "gpt2-medium": 354823168}
    sizes |= {"gpt2-large": 774030080, "gpt2-xl": 1557611200}
    sizes |= {"llama3-8b": 8030261248, "llama3-70b": 70553706496, "llama3-405b": 405853388800}
    sizes |= {"mixtral-8x7b": 46702792704, "olmo2-7b": 7298617344}
    sizes |= {"llama3.2-1b": 1235814400, "llama3.2-3b": 3212749824, "qwen3-0.6b": 596049920}
    sizes |= {"qwen3-1.7b": 1720574976, "qwen3-4b": 4022468096, "qwen3-8b": 8190735360}
    sizes |= {"qwen3-14b": 14768307200, "qwen3-32b": 32762123264, "qwen3-30b-a3b": 30532122624}
    assert {name: presets.parameter_count(presets.configure(name)) for name in sizes} == sizes


def test_with_one_expert_a_token_the_router_learns():
    model = families.build(presets.configure(layers=1, experts=3, top_k=1))
    tokens = torch.randint(model.config.vocab, (2, 9))
    model(tokens, targets=tokens).backward()
    assert model.blocks["0"].mlp.router.weight.grad.abs().max() > 1e-6


def test_a_preset_turned_into_the_other_family():
    turned = presets.configure("llama3-8b", "gpt2")
    assert (turned.hidden, turned.kv_heads) == (4 * 4096, 32)
    assert (turned.norm, turned.bias) == ("layernorm", True)
    assert presets.configure("llama3-8b", "llama") == presets.configure("llama3-8b")
    assert presets.configure("tiny", "llama").rope_theta == 10000.0


def test_flops_count_every_matrix():
    for config in map(presets.configure, ("tiny", "llama3-8b", "qwen3-8b", "qwen3-0.6b")):
        with torch.device("meta"):
            linear = [m for m in families.build(config).modules() if isinstance(m, torch.nn.Linear)]
        attention = 12 * config.layers * config.context * config.heads * config.head_dim
        assert flops_per_token(config) == 6 * sum(m.weight.numel() for m in linear) + attention
    dense, mixture = presets.configure(), presets.configure(experts=8, top_k=3, shared=2)
    # 3 + 2 MLPs in place of one, and the router
    extra = 6 * dense.layers * (4 * 2 * dense.width * dense.hidden + 8 * dense.width)
    assert flops_per_token(mixture) - flops_per_token(dense) == extra


def test_weights_depend_on_seed_and_name_only():
    small, deep = presets.configure(layers=2), presets.configure(layers=5)
    a, other = (dict(initialize.build(small, seed).named()) for seed in (1, 2))
    b = dict(initialize.build(deep, 1, dtype=torch.float64).named())
    name = "blocks.1.mlp.up.weight"
    assert torch.equal(a[name], b[name].float()) and not torch.equal(a[name], other[name])
    assert abs(a[name].std().item() - 0.02) < 1e-3
    # the residual projections shrink with depth
    assert abs(b["blocks.1.mlp.down.weight"].std().item() - 0.02 / 10**0.5) < 1e-3
    matrices = [p for n, p in a.items() if n.startswith("blocks") and p.dim() > 1]
    values = torch.cat([p.detach().flatten() for p in matrices])
    assert values.unique().numel() > 0.9 * values.numel()  # no two parameters share a stream


def test_a_large_weight_is_drawn_in_pieces_alike_on_any_number_of_cores(monkeypatch):
    monkeypatch.setattr(initialize, "DRAW_CHUNK", 1000)
    drawn = []
    for cores in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda: cores)
        drawn.append(initialize.draw("blocks.0.mlp.up.weight", (70, 50), (0.0, 0.02), 7))
    assert torch.equal(*drawn)
    pieces = drawn[0].view(-1).split(1000)
    assert len(pieces) == 4 and not torch.equal(pieces[0], pieces[1])
    assert drawn[0].std().item() == pytest.approx(0.02, rel=0.1)


FLASH = torch.ops.aten._flash_attention_forward


def by_a_mask(q, k, v, edges, edges_k, longest, longest_k, *options):
    """What aten's FlashAttention returns for sequences between the edges, by a mask."""
    given = q, k, v, edges, edges_k, longest, longest_k, *options
    on_meta = [t.to("meta") if torch.is_tensor(t) else t for t in given]
    assert FLASH(*on_meta)[0].shape == q.shape
    assert edges is edges_k and longest == longest_k == edges.diff().max()
    assert edges.dtype == torch.int32 and options == (0.0, True, False)
    number = torch.bucketize(torch.arange(len(q)), edges, right=True)
    mask = (number.unsqueeze(1) == number).tril()
    q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(q, k, v, mask, enable_gqa=q.shape != k.shape).transpose(0, 1), None


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_documents_are_each_alone(family, monkeypatch):
    """Of one token, of a whole row. Planted: attention that sees a token of the document before,
    and positions that go on."""
    rows = [[1, 5, 1, 17], [24], [23, 1]]
    borders = [[0, *itertools.accumulate(lengths)] for lengths in rows]
    starts = [
        [at for at, n in zip(row, lengths) for _ in range(n)] for row, lengths in zip(borders, rows)
    ]
    starts = torch.tensor(starts)
    config = presets.configure(**SMALL, family=family)
    model = initialize.build(config, dtype=torch.float64)
    tokens, targets = batch(rows=3)

    def gradients():
        grads = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        return grads

    def packed():
        loss = model(tokens, targets=targets, starts=starts)
        loss.backward()
        return [loss.detach(), *gradients()]

    losses = []
    for row, edges in enumerate(borders):
        for a, b in itertools.pairwise(edges):
            part = tokens[row : row + 1, a:b], targets[row : row + 1, a:b]
            losses.append(model(part[0], targets=part[1], target_count=tokens.numel()))
    sum(losses).backward()
    alone = [sum(losses).detach(), *gradients()]
    torch.testing.assert_close(packed(), alone, rtol=1e-10, atol=1e-12)
    document_core.attend_by_document(model)
    torch.testing.assert_close(packed(), alone, rtol=1e-10, atol=1e-12)
    with monkeypatch.context() as patch:  # FlashAttention takes them all, where it runs
        patch.setattr(torch.backends.cuda, "can_use_flash_attention", lambda given: True)
        patch.setattr(torch.ops.aten, "_flash_attention_forward", by_a_mask)
        patch.setattr(torch.Tensor, "pin_memory", lambda t: t)
        torch.testing.assert_close(packed(), alone, rtol=1e-10, atol=1e-12)
    core, embed = document_core.DocumentCore, gpt.Embedding.forward
    attend = core.forward
    one_document = torch.zeros_like(starts)
    with monkeypatch.context() as patch:
        patch.setattr(core, "forward", lambda *qkv: attend(*qkv[:-1], one_document))
        assert (packed()[0] - alone[0]).abs() > 1e-5
    if family == "gpt2":  # rotary positions count from one token to another
        with monkeypatch.context() as patch:
            going_on = gpt.Batch(torch.arange(24))
            patch.setattr(gpt.Embedding, "forward", lambda *x: embed(*x[:2], going_on))
            assert (packed()[0] - alone[0]).abs() > 1e-5


def test_ignored_targets_add_nothing():
    ours = initialize.build(presets.configure(**SMALL), dtype=torch.float64)
    tokens, targets = batch()
    masked = targets.clone()
    masked[0, 5:] = gpt.IGNORE
    logits = ours(tokens)
    expected = torch.nn.functional.cross_entropy(logits[masked >= 0], masked[masked >= 0])
    torch.testing.assert_close(ours(tokens, targets=masked), expected, rtol=1e-12, atol=0)
    count = (masked >= 0).sum()
    parts = [ours(tokens[[i]], targets=masked[[i]], target_count=count) for i in range(2)]
    # Unequal parts add up: no mean of means
    torch.testing.assert_close(sum(parts), expected, rtol=1e-12, atol=0)


def test_dropout_is_the_same_for_every_piece():
    drop = gpt.Dropout(0.25, site=3)
    samples, positions = torch.tensor([5, -7, 11, 1 << 40]), torch.arange(64)
    key = gpt.drop_key(samples, positions)
    x = torch.ones(4, 64, 96, requires_grad=True)
    whole = drop(x, key)
    whole.sum().backward()
    assert torch.equal(x.grad, whole)  # the same mask in backward
    assert torch.equal(drop(x[1:3, 8:40], key[1:3, 8:40]), whole[1:3, 8:40])
    assert set(whole.unique().tolist()) == {0.0, torch.tensor(4 / 3).item()}
    assert abs((whole > 0).float().mean().item() - 0.75) < 0.01
    for dims in ((0, 1), (1, 2), (0, 2)):  # no sample, position or channel is favoured
        assert ((whole > 0).float().mean(dims) - 0.75).abs().max() < 0.12
    assert not torch.equal(gpt.Dropout(0.25, site=4)(x, key), whole)
    assert drop(x, None) is x


def test_dropout_has_the_masks_of_old_checkpoints():
    samples, x = torch.tensor([3, 1 << 40, 17]), torch.ones(3, 5, 8)
    key = gpt.drop_key(samples, torch.arange(5))
    y = gpt.Dropout(0.25, site=3)(x, key)
    bits = "".join(str(int(number > 0)) for number in y.flatten())
    assert hex(int(bits, 2)) == "0xb3c6697b0abffbe7fbf6ff7fe9fdff"


def test_dropout_is_off_without_samples():
    model, tokens = initialize.build(presets.configure(dropout=0.5, **SMALL)), batch()[0]
    off, on, again = model(tokens), *(model(tokens, sample_ids=torch.arange(2)) for _ in range(2))
    assert torch.equal(off, initialize.build(presets.configure(**SMALL))(tokens))
    assert torch.equal(on, again) and not torch.equal(on, off)


@pytest.mark.parametrize(
    "wrong, words",
    [
        (dict(preset="gpt3"), "unknown preset"),
        (dict(width=100, heads=3), "width 100 is not a multiple"),
        (dict(heads=4, kv_heads=3), "kv-heads"),
        (dict(family="llama", width=20, heads=4), "even head size"),
        (dict(dropout=1.0), "dropout"),
        (dict(experts=3, top_k=4), "4 of 3 experts"),
        (dict(positions="rotary"), "positions must be one of learned, rope"),
        (dict(mlp="relu"), "mlp must be one of"),
        (dict(norm="rms"), "norm must be one of"),
        (dict(scores="tanh"), "scores must be one of"),
        (dict(qk_norm="both"), "qk_norm must be one of none, each, all"),
        (dict(bias="all"), "bias must be one of True, False, qkv, not 'all'"),
        (dict(dropout=-0.1), "dropout"),
        (dict(experts=3, top_k=0), "top_k must be at least 1"),
        (dict(heads=0), "heads must be at least 1"),
    ],
)
def test_sizes_that_contradict_each_other(wrong, words):
    with pytest.raises(ValueError, match=words):
        presets.configure(**wrong)


def test_a_gpt_leaves_no_field_of_a_family_out():
    with pytest.raises(AssertionError, match="families"):
        gpt.GPT(families.FamilyConfig(embedding_scale=12.0))


def test_the_file_works_alone_and_refuses(ranks, tmp_path):
    """Copied into an empty folder: its docstring's lines run, and a wrong Config is refused."""
    for lesson in (gpt, mixture):
        shutil.copy(lesson.__file__, tmp_path)
    usage = re.findall(r"^    (\w+ = .*)$", gpt.__doc__, re.M)
    wrong = "try:\n    Config(experts=2, top_k=3)\nexcept AssertionError as e:\n    print(e)"
    lines = ["import torch", "from model import GPT, Config", *usage, "loss.backward()", wrong]

    def work(rank):
        said = io.StringIO()
        with tops.without_project(tmp_path), contextlib.redirect_stdout(said):
            exec("\n".join(lines), {})
        return said.getvalue()

    [said] = ranks(1, work)
    assert len(usage) == 4 and said.startswith("a token can't go to so many")
