"""Models that are not ours, and how one process trains them: what every copied top is held against.
All are of plain torch modules, in float64, and map tokens (B, T) to logits (B, T, VOCAB)."""

import contextlib
import functools
from unittest import mock

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim._muon as torchs_muon

VOCAB, WIDTH, ROWS, STEPS = 29, 24, 8, 3
LENGTH = 5  # tokens: 3 + 2 on two ranks, 2 + 2 + 1 + 0 on four
IGNORE = -100
EXPERTS = 6
LIMIT = 0.3  # of the gradient's norm

# --- models


def mlp(sparse=False, frozen=True):
    """A network for each token: odd sizes, a frozen layer, a weight whose memory is transposed."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(VOCAB, 6, sparse=sparse),
        nn.Linear(6, 13),
        nn.Tanh(),
        nn.LayerNorm(13),
        nn.Linear(13, 13),
        nn.GELU(),
        nn.Linear(13, VOCAB),
    )
    model[3].requires_grad_(not frozen)
    model[6].weight = nn.Parameter(model[6].weight.detach().t().clone().t())
    model.length = LENGTH
    return model.double()


class Odd(nn.Module):
    """Odd shapes, a parameter of one element and one of none, one that is frozen, one that nobody
    uses; and a layer for some sequences only, which not every rank has."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.length = LENGTH
        self.embed, self.rare = nn.Embedding(VOCAB, 5), nn.Linear(5, 5)
        self.head, self.unused = nn.Linear(5, VOCAB), nn.Linear(2, 3)
        self.scale, self.empty = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(0))
        self.rare.bias.requires_grad_(False)
        self.double()

    def forward(self, tokens):
        x = self.embed(tokens)
        chosen = tokens[:, 0] < 7
        if chosen.any():
            x = x.index_put((chosen,), self.rare(x[chosen]).tanh())
        return self.head(x) * self.scale


class Place(nn.Module):
    """Learned positions, and a scale. `where`: the positions of a rank's tokens, if not all."""

    def __init__(self, length):
        super().__init__()
        self.positions, self.scale = nn.Embedding(length, WIDTH), nn.Parameter(torch.rand(WIDTH))
        self.where = torch.arange(length)

    def forward(self, x, where=None):
        return x * self.scale + self.positions(self.where if where is None else where)


class Transformer(nn.Module):
    """A head tied to the embedding. With extras an unused module, and a frozen parameter."""

    def __init__(self, make_block, layers=2, length=LENGTH, extras=False):
        super().__init__()
        torch.manual_seed(0)
        self.length = length
        self.embed = nn.Embedding(VOCAB, WIDTH, padding_idx=3)
        nn.init.normal_(self.embed.weight, std=0.2)
        self.place = Place(length)
        self.blocks = nn.ModuleList(make_block() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        if extras:
            self.unused = nn.Linear(7, 7)
            self.norm.bias.requires_grad_(False)
        self.double()

    def __iter__(self):
        return iter([self.embed, self.place, *self.blocks, self.norm, self.head])

    def forward(self, tokens, where=None, starts=None):
        x = self.place(self.embed(tokens), where)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def with_experts():
    """A mixture in its second block."""
    model = MODELS["heads"]()
    model.blocks[1].mlp = Mixture().double()
    return model


def chain(make_block, tied=True):
    """An embedding, six blocks, a head: what a pipeline cuts."""
    torch.manual_seed(0)
    blocks = [make_block() for _ in range(6)]
    embed, head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
    nn.init.normal_(embed.weight, std=0.2)
    if tied:
        head.weight = embed.weight
    model = nn.Sequential(embed, *blocks, head)
    model.length = LENGTH
    return model.double()


causal = functools.partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)


class Attention(nn.Module):
    """The rows of qkv are grouped by kv-head: its `share` query heads, its k, its v."""

    def __init__(self, heads, share):
        super().__init__()
        self.heads, self.share, self.size, self.core = heads, share, WIDTH // heads, causal
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, WIDTH + 2 * WIDTH // share)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        groups = self.heads // self.share
        qkv = self.qkv(self.norm(x)).unflatten(-1, (groups, self.share + 2, self.size))
        q, k, v = qkv.split([self.share, 1, 1], dim=3)
        y = self.core(*(t.flatten(2, 3).transpose(1, 2) for t in (q, k, v)))
        return x + self.proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.norm, self.act = nn.LayerNorm(WIDTH), act
        self.up, self.down = nn.Linear(WIDTH, 37), nn.Linear(37, WIDTH)

    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(x))))


class Block(nn.Module):
    def __init__(self, heads=6, share=1):
        super().__init__()
        self.attn, self.mlp = Attention(heads, share), MLP(nn.GELU())

    def forward(self, x):
        return self.mlp(self.attn(x))


class Experts(nn.Module):
    """A module each, with biases. Those without a row are skipped."""

    def __init__(self):
        super().__init__()
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, WIDTH))
            for _ in range(EXPERTS)
        )

    def forward(self, rows, counts):
        parts = rows.split(counts.tolist())
        done = [mlp(part) for mlp, part in zip(self.mlps, parts) if len(part)]
        return torch.cat(done) if done else rows


class Mixture(nn.Module):
    """Two experts a token, and a shared layer. Nobody chooses the last two experts."""

    def __init__(self):
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.experts, self.shared = Experts(), nn.Linear(WIDTH, WIDTH)
        self.dispatch = self.dispatch_here

    def forward(self, x):
        rows = self.norm(x).flatten(0, 1)
        last = torch.arange(EXPERTS) >= EXPERTS - 2
        weights, chosen = self.router(rows).masked_fill(last, -1e9).topk(2)
        y = self.dispatch(rows, weights.softmax(-1), chosen, self.experts)
        return x + (y + self.shared(rows)).view_as(x)

    @staticmethod
    def dispatch_here(rows, weights, chosen, experts):
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=EXPERTS)
        results = experts(rows[order // 2], counts) * weights.flatten()[order].unsqueeze(1)
        return torch.zeros_like(rows).index_add(0, order // 2, results)


class Llama(nn.Module):
    """Hugging Face's, as a function of tokens alone: grouped heads, a gate, an untied head."""

    def __init__(self):
        import transformers

        super().__init__()
        torch.manual_seed(0)
        self.length = LENGTH
        sizes = dict(vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=37, num_hidden_layers=2)
        config = transformers.LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes)
        self.model = transformers.LlamaForCausalLM(config).double()

    def forward(self, tokens):
        return self.model(input_ids=tokens, use_cache=False).logits


def torchs():
    return nn.TransformerEncoderLayer(WIDTH, 2, 20, 0.0, batch_first=True)


MODELS = {
    "mlp": mlp,
    "sparse": lambda: mlp(sparse=True),
    "trainable": lambda: mlp(frozen=False),
    "odd": Odd,
    "torch": lambda: Transformer(torchs, extras=True),
    "own": lambda: Transformer(Block, length=6, extras=True),  # 2 and 3 ranks divide it
    "heads": lambda: Transformer(lambda: Block(heads=4), length=8),
    "grouped": lambda: Transformer(lambda: Block(heads=4, share=2), length=13),
    "mixture": lambda: Transformer(Mixture, layers=1),
    "experts": with_experts,
    "chain": lambda: chain(torchs),
    "untied": lambda: chain(Block, tied=False),
    "in-place": lambda: chain(lambda: MLP(nn.ReLU(inplace=True))),
    "llama": Llama,
}

# --- one process


def scheduled(parameters):
    """The rate halves with each call of step()."""
    optimizer = torch.optim.SGD(parameters, lr=0.2, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    return optimizer


def by_singular_values(matrix, *_):
    """Muon's iteration, without iterating on matrices: the polynomial of each singular value."""
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    s = s / s.norm(dim=-1, keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u * s.unsqueeze(-2) @ v


def is_muons(p):
    """Whether Muon steps on it: the layers' matrices."""
    return p.requires_grad and p.dim() > 1 and VOCAB not in p.shape and min(p.shape) > LENGTH


class MuonAndAdamW:
    """torch's own, in the dtype of the matrices. Its iteration is in bfloat16."""

    def __init__(self, parameters, lr=1e-2, eps=1e-5):
        parameters = list(parameters)
        rest = [p for p in parameters if not is_muons(p)]
        decayed, others = [p for p in rest if p.dim() > 1], [p for p in rest if p.dim() <= 1]
        rates = dict(lr=lr, weight_decay=0.1)
        matrices = [p for p in parameters if is_muons(p)]
        groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
        self.muon = torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **rates)
        self.adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=eps, **rates)

    def zero_grad(self, **options):
        self.muon.zero_grad(**options)
        self.adamw.zero_grad(**options)

    def step(self):
        with mock.patch.object(torchs_muon, "_zeropower_via_newtonschulz", by_singular_values):
            self.muon.step()
        self.adamw.step()


OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    # A larger eps: the gradient of k's bias is 0 but for rounding, which Adam would blow up
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-5, weight_decay=0.1),
    "rmsprop": functools.partial(torch.optim.RMSprop, lr=0.01),
    "scheduled": scheduled,
    "muon": MuonAndAdamW,
    "AdamW": torch.optim.AdamW,  # as usage blocks make them
    "SGD": torch.optim.SGD,
    "Muon": functools.partial(MuonAndAdamW, lr=1e-3, eps=1e-8),
}


def batch(step, length):
    """Tokens, targets, nine of which don't count, and the number of those that do."""
    generator = torch.Generator().manual_seed(step)
    tokens, targets = torch.randint(VOCAB, (2, ROWS, length), generator=generator)
    targets.view(-1)[torch.randperm(ROWS * length, generator=generator)[:9]] = IGNORE
    return tokens, targets, torch.tensor(ROWS * length - 9)


def mean_loss(logits, targets, count):
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum") / count


class OneProcess:
    """Trains a model on the whole batch at once. uses.py says what techniques do instead. A
    parameter without a gradient gets zeros."""

    limit = LIMIT  # of the gradient's norm, or 0: no norm is known
    islands, island = 1, 0
    tolerance = dict(rtol=1e-10, atol=1e-11)

    def __init__(self, model, optimizer, **options):
        self.model, self.trained, self.length, self.steps = model, model, model.length, 0
        for name, p in model.named_parameters():
            p.full_name = name  # techniques pass attributes on
        self.make_optimizer, self.options = OPTIMIZERS[optimizer], options
        self.set_up(**options)

    def set_up(self):
        self.optimizer = self.make_optimizer(self.trained.parameters())

    def zero_grad(self):
        self.steps += 1
        self.optimizer.zero_grad(set_to_none=self.steps % 2 == 0)

    def run(self, x, y, count):
        """All backward passes of a step. Returns this rank's part of the loss."""
        loss = mean_loss(self.model(x), y, count)
        loss.backward()
        return loss.item()

    def add_up(self, loss):
        """The whole loss, from each rank's part."""

    def finish(self):
        """Complete the gradients."""
        for p in self.trained.parameters():
            if p.requires_grad:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad.to_dense()

    def norm(self):
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        return nn.utils.get_total_norm(grads)

    def clip(self, norm):
        nn.utils.clip_grads_with_norm_(self.trained.parameters(), self.limit, norm)

    def step(self):
        self.optimizer.step()

    def average(self, last=False):
        """With the other islands."""

    def named(self):
        """This rank's parameters by their names in the whole model."""
        return {p.full_name: p for p in self.trained.parameters()}

    def piece(self, full, p):
        """This rank's piece of a whole parameter or gradient."""
        return full


def train_step(use, step):
    """([loss, norm], {name: gradient})"""
    use.zero_grad()
    loss = torch.tensor(use.run(*batch(step + 100 * use.island, use.length)), dtype=torch.float64)
    use.finish()
    use.add_up(loss)
    numbers = [loss.item()]
    if use.limit:
        norm = use.norm()
        use.clip(norm)
        numbers.append(norm.item())
    found = use.named().items()
    gradients = {name: p.grad if p.grad is None else p.grad.clone() for name, p in found}
    use.step()
    return numbers, gradients


def train(use, steps=STEPS, disturb=None):
    """(losses and norms, the last step's gradients, weights after it). disturb: before a step."""
    history, use.steps = [], 0
    for step in range(steps):
        if disturb:
            disturb(use, step)
        numbers, gradients = train_step(use, step)
        history += numbers
        use.average(last=step + 1 == steps)
    return history, gradients, {name: p.detach() for name, p in use.named().items()}


@functools.cache
def islands_here(
    islands, model, optimizer, steps=STEPS, limit=LIMIT, every=2, lr=0.7, momentum=0.9
):
    """What train() returns, of each island. Several average how far they have moved, every few
    steps and at the end: the paper's algorithm 1 with torch's own outer optimizer."""
    uses = [OneProcess(MODELS[model](), optimizer) for _ in range(islands)]
    for island, use in enumerate(uses):
        use.island, use.limit, use.history = island, limit, []
    old = [p.detach().clone() for p in uses[0].model.parameters()]
    outer = torch.optim.SGD(old, lr=lr, momentum=momentum, nesterov=momentum > 0)
    for step in range(steps):
        for use in uses:
            numbers, use.gradients = train_step(use, step)
            use.history += numbers
        if islands > 1 and ((step + 1) % every == 0 or step + 1 == steps):
            everywhere = list(zip(old, *(use.model.parameters() for use in uses)))
            for start, *ends in everywhere:
                start.grad = sum(start - p.detach() for p in ends) / islands
            outer.step()
            for start, *ends in everywhere:
                for p in ends:
                    p.data.copy_(start)
    assert limit != LIMIT or uses[0].history[1] > limit, "it does not clip"
    weights = [{name: p.detach() for name, p in use.named().items()} for use in uses]
    return [(use.history, use.gradients, weights[use.island]) for use in uses]


def one_process(model, optimizer, steps=STEPS, limit=LIMIT):
    return islands_here(1, model, optimizer, steps, limit)[0]


@contextlib.contextmanager
def broken(module):
    """A backward pass through the module's result raises ArithmeticError."""

    def break_off(gradient):
        raise ArithmeticError("broke off")

    def spoil(module, inputs, y):
        y.register_hook(break_off)

    hook = module.register_forward_hook(spoil)
    try:
        yield
    finally:
        hook.remove()
