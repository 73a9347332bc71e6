"""The blocks of docs/use/transformers.md, on tiny models of transformers, against one process."""

import re

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from conftest import ROOT
from tops import refused

from ddp import sum_gradients
from tensor_parallel import order_by_rank, placement_of, unshard
from zero import ZeRO

transformers = pytest.importorskip("transformers")
PAGE = (ROOT / "docs" / "use" / "transformers.md").read_text()
VOCAB, ROWS, T, STEPS = 21, 8, 9, 3
SIZES = dict(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2)
HEADS = dict(num_attention_heads=4, num_key_value_heads=2, intermediate_size=24)
NO_DROPOUT = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
STACKED = dict(num_experts_per_tok=2, num_experts=4, num_local_experts=4, moe_intermediate_size=12)
MODELS = {
    "llama": ("LlamaForCausalLM", SIZES | HEADS),
    "qwen3": ("Qwen3ForCausalLM", SIZES | HEADS | dict(head_dim=4)),
    "tied qwen3": ("Qwen3ForCausalLM", SIZES | HEADS | dict(head_dim=4, tie_word_embeddings=True)),
    "mixtral": ("MixtralForCausalLM", SIZES | HEADS | STACKED),
    "qwen3-moe": ("Qwen3MoeForCausalLM", SIZES | HEADS | STACKED | dict(head_dim=4)),
    "gpt2": (
        "GPT2LMHeadModel",
        NO_DROPOUT | dict(vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=4),
    ),
    "t5": (
        "T5ForConditionalGeneration",
        dict(vocab_size=VOCAB, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4)
        | dict(dropout_rate=0.0, decoder_start_token_id=0),
    ),
}


def make(name):
    """A random model of transformers, the same on every rank."""
    kind, fields = MODELS[name]
    model_class = getattr(transformers, kind)
    config = model_class.config_class(**fields)
    torch.manual_seed(0)
    # The grouped matmul of experts takes no float64
    config._experts_implementation = "eager"
    model = model_class(config).double()
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)  # norms and biases are random, too
    return model


def batches_of(place=0, ranks=1, micro_batches=2):
    """Of each step: the micro-batches, (tokens, targets), of this rank's rows, and the number of
    targets of the whole batch. Rows have unevenly many."""
    batches, generator = [], torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        tokens = torch.randint(VOCAB, (ROWS, T + 1), generator=generator)
        targets = tokens[:, 1:].clone()
        for row in range(ROWS):
            targets[row, : row % 4] = -100
        parts = [t.tensor_split(ranks)[place] for t in (tokens[:, :-1], targets)]
        parts = zip(*[part.tensor_split([1] if micro_batches == 2 else []) for part in parts])
        batches.append((list(parts), (targets != -100).sum()))
    return batches


def for_t5(batches):
    """Another text for the encoder."""
    return [([((x.flip(1), x), y) for x, y in parts], count) for parts, count in batches]


def one_process(model, limit=1.0, prepare=lambda batches: batches):
    """{name: (gradient of the last step, weight)} after the steps, on the whole batches."""
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    for [(x, y)], count in prepare(batches_of(micro_batches=1)):
        optimizer.zero_grad()
        inputs = dict(input_ids=x) if torch.is_tensor(x) else None
        inputs = inputs or dict(input_ids=x[0], decoder_input_ids=x[1])
        logits = model(**inputs, use_cache=False).logits
        (F.cross_entropy(logits.mT, y, reduction="sum") / count).backward()
        nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
    return {name: (p.grad, p.detach()) for name, p in model.named_parameters()}


def run(heading, model, batches, change=lambda code: code, **names):
    """The first block of a section of the page. Returns all names that it leaves."""
    text = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    names |= dict(model=model, group=dist.group.WORLD, batches=batches)
    for block in blocks:
        exec(change(block), names)
    return names


def equal(named, whole, part=lambda name, tensor: tensor):
    """All gradients and weights, which the page's replacements have moved."""
    named = dict(named)
    assert len(named) == len(whole)
    for moved, p in named.items():
        name = moved.replace(".parametrizations.weight.original", ".weight")
        name = re.sub(r"\.0\.(weight|bias)$", r".\1", name)  # of nn.Sequential(norm, Boundary)
        placed = placement_of(p)
        gradient, weight = whole[name]
        assert (p.grad is None) == (gradient is None), name
        for ours, theirs in ((p.detach(), weight), (p.grad, gradient)):
            if theirs is not None:
                ours = unshard(ours, placed["shape"], dist.group.WORLD)
                torch.testing.assert_close(
                    ours, part(name, theirs), rtol=1e-10, atol=1e-10, msg=lambda m: f"{name}: {m}"
                )


# --- the loss


def test_the_loss(ranks):
    """With num_items_in_batch it is one process's on the whole batch; a mean of means is not."""

    def work(rank):
        model, whole, means = make("llama"), make("llama"), make("llama")
        mine, full = (
            [[labels(x, y) for x, y in parts] for parts, _ in b]
            for b in (batches_of(rank, 2), batches_of(micro_batches=1))
        )
        run("The loss", model, mine)
        optimizer = torch.optim.AdamW(whole.parameters())
        for [(tokens, of_whole)] in full:
            optimizer.zero_grad()
            count = (of_whole[:, 1:] != -100).sum()
            whole(tokens, labels=of_whole, num_items_in_batch=count).loss.backward()
            optimizer.step()
        equal(
            model.named_parameters(), {n: (p.grad, p.detach()) for n, p in whole.named_parameters()}
        )
        [(tokens, of_whole)] = full[0]
        means(tokens, labels=of_whole).loss.backward()
        of_mean = means.lm_head.weight.grad.clone()
        means.zero_grad()
        for rows in range(2):
            for tokens, own in [labels(x, y) for x, y in batches_of(rows, 2)[0][0]]:
                (means(tokens, labels=own).loss / 4).backward()
        assert (means.lm_head.weight.grad - of_mean).abs().max() > 1e-3

    ranks(2, work)


def labels(tokens, targets):
    """As transformers wants them: not shifted. The first is no target."""
    return tokens, torch.cat([torch.full_like(targets[:, :1], -100), targets[:, :-1]], 1)


def test_t5_ignores_the_number_of_items():
    """Else the page's warning is out of date."""
    model, tokens = make("t5"), torch.ones(2, 4, dtype=torch.long)
    losses = [
        model(tokens, labels=tokens, **given).loss for given in ({}, {"num_items_in_batch": 99})
    ]
    assert losses[0] == losses[1]


# --- data parallelism


@pytest.mark.parametrize("stage", [3, 0, 2])
def test_t5(ranks, tmp_path, stage):
    whole = one_process(make("t5"), prepare=for_t5)

    def work(rank):
        model, change = make("t5"), with_zero(stage)
        names = run(
            "FSDP, or ZeRO", model, for_t5(batches_of(rank, 2)), change, folder=tmp_path, ZeRO=ZeRO
        )
        equal(names["fsdp"].gather_full(model.named_parameters()), whole)

    ranks(2, work)
    saved = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float64)
    for name, p in saved.named_parameters():
        torch.testing.assert_close(p.detach(), whole[name][1], rtol=1e-10, atol=1e-10)


def with_zero(stage):
    """Turns a block with FSDP into one with a stage of ZeRO."""
    if stage == 3:
        return lambda code: code
    return lambda code: code.replace("FSDP(model, group, ", f"ZeRO(model, group, {stage}, ")


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "gpt2"])
def test_fsdp_of_other_families(ranks, tmp_path, name):
    """Stacked experts, and GPT-2 with activation checkpointing: the same block, but no encoder."""

    def without_encoder(code):
        code = code.replace("(source, decoder_tokens)", "tokens")
        return code.replace("source, decoder_input_ids=decoder_tokens", "tokens")

    def work(rank):
        model = make(name)
        if name == "gpt2":
            model.gradient_checkpointing_enable()
        batches = batches_of(rank, 2)
        names = run("FSDP, or ZeRO", model, batches, without_encoder, folder=tmp_path)
        equal(names["fsdp"].gather_full(model.named_parameters()), one_process(make(name)))

    ranks(2, work)


@pytest.mark.parametrize("stage", [3, 0, 2])
def test_lora(ranks, stage):
    """Each rank draws its adapters: all get rank 0's. Frozen weights stay as they are."""
    heading = "LoRA, with FSDP or ZeRO"

    def work(rank):
        torch.manual_seed(rank)
        model, whole = make("qwen3"), make("qwen3")
        torch.manual_seed(rank)
        names = run(heading, model, batches_of(rank, 2), with_zero(stage), ZeRO=ZeRO)
        torch.manual_seed(0)
        run(heading, whole, [], lambda code: code.partition("adapters =")[0])
        equal(names["fsdp"].gather_full(model.named_parameters()), one_process(whole))

    ranks(2, work)


# --- tensor parallelism, experts


@pytest.mark.parametrize("name", ["llama", "qwen3", "tied qwen3"])
def test_tensor_parallel_llama_and_qwen3(ranks, name):
    def work(rank):
        model = make(name)
        run("Tensor parallelism: Llama and Qwen3", model, batches_of())
        equal(model.named_parameters(), one_process(make(name)))

    ranks(2, work)


def test_tensor_parallel_gpt2(ranks):
    def as_linear(name, tensor):
        if ".c_" not in name:
            return tensor
        layer = nn.Linear(1, 1)
        layer.weight = nn.Parameter(tensor.T if name.endswith("weight") else tensor[:, None])
        layer.bias = None
        if ".c_attn" in name:
            order_by_rank(layer, [16] * 3, 2)
        return layer.weight.detach().view(tensor.T.shape)

    def work(rank):
        model = make("gpt2")
        run("Tensor parallelism: GPT-2", model, batches_of())
        equal(model.named_parameters(), one_process(make("gpt2")), as_linear)

    ranks(2, work)


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_expert_parallel(ranks, name):
    def work(rank):
        model = make(name)
        run("Expert parallelism: Mixtral and Qwen3-MoE", model, batches_of(rank, 2))
        equal(model.named_parameters(), one_process(make(name)))

    ranks(2, work)


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_load_balancing(ranks, name):
    """The lines of docs/learn/data-parallelism.md. The models' own loss balances a rank's rows."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    page = (ROOT / "docs" / "learn" / "data-parallelism.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    blocks = [block for block in blocks if "class Gather" in block or "balance" in block]

    def cross_entropy(logits, targets, reduction):
        return F.cross_entropy(logits.mT, targets, reduction=reduction)

    def work(rank):
        alone, _ = dist.new_subgroups(1)
        gradients = []
        for group, place, n in ((dist.group.WORLD, rank, 2), (alone, 0, 1)):
            model = make(name)
            model.router_aux_loss_coef = 1.0  # else it is small beside the other loss
            names = dict(torch=torch, dist=dist, group=group, cross_entropy=cross_entropy)
            names |= dict(load_balancing_loss_func=load_balancing_loss_func, model=model)
            [(tokens, targets)], count = batches_of(place, n, micro_batches=1)[0]
            names |= dict(tokens=tokens, targets=targets, target_count=count, microbatches=1)
            exec("\n".join(blocks), names)
            names["loss"].backward()
            sum_gradients(model.parameters(), group)
            gradients.append([p.grad for p in model.parameters()])
        torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-10)

    ranks(2, work)


# --- a ring


def test_a_ring(ranks):
    """Gradients of one process; a mask, a window and a lack of positions are refused."""

    def work(rank):
        model = make("llama")
        names = run("A ring, for long sequences", model, batches_of(), T=T)
        equal(model.named_parameters(), one_process(make("llama"), limit=1e9))
        x, place = names["x"], names["place"].expand(len(names["x"]), -1)
        for mask in (torch.ones_like(x), torch.ones(len(x), 1, 5, 5)):
            with refused("give the model no"):
                model(x, position_ids=place, attention_mask=mask)
        with refused("give the model position_ids"):
            model(x)
        q = torch.zeros(len(x), 4, 5, 4)
        for given in (dict(sliding_window=4), dict(scaling=1.0), dict(softcap=50.0)):
            with refused("causal over all tokens"):
                names["ring_attention"](None, q, q, q, None, position_ids=place, **given)

    ranks(2, work)
