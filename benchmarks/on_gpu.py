"""What benchmarks/gpu.py measures in processes of its own.

    python -m benchmarks.on_gpu NAME FILE WORDS

calls the function NAME with FILE and the words, and it writes its result to FILE, as JSON.
"""

import collections
import contextlib
import json
import os
import statistics
import sys
import time
import warnings

import torch
import torch.nn as nn
import torch.nn.functional as F

import harness
import proof
import train
from harness import missing
from trainer import layout

ALONE = "--sample 0 --eval-every 0 --quiet"  # train.py, without what follows the steps
GPT2 = f"--preset gpt2 --vocab 50304 --param-dtype bfloat16 --nproc 1 {ALONE}"
WARM_UP, STEPS = 10, 30


def report(path, result):
    with open(path, "w") as file:
        json.dump(result, file)


def prepared(flags):
    """train.py's flags of a run of gpt2, and the model's Config."""
    return layout.prepare(train.flags().parse_args([*GPT2.split(), *flags]))


# --- launch


def launch_times(path):
    """Seconds of the host to launch a kernel that this process knows, and a new one, while another
    stream spins for about two seconds."""
    x, side = torch.ones(1024, device="cuda"), torch.cuda.Stream()
    x.mul_(2)
    spin(torch.cuda.current_stream(), 10**6)()  # the first spin loads the kernel
    cycles = 2 * 10**8 / spin(torch.cuda.current_stream(), 10**8)()
    spun = spin(side, int(cycles))
    known = host_seconds(lambda: x.mul_(2))
    new = host_seconds(x.atan_)
    waited = side.query()  # the spin has ended
    report(path, {"known": known, "new": new, "spin": spun(), "waited": waited})


def spin(stream, cycles):
    """Have a stream spin. Returns a function that waits for its end and returns the seconds."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        begin.record()
        torch.cuda._sleep(cycles)
        end.record()

    def seconds():
        end.synchronize()
        return begin.elapsed_time(end) / 1000

    return seconds


def host_seconds(work):
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


# --- kernels


def kernel_errors(path, kind, dtype, device):
    torch.manual_seed(0)
    errors = {"attention": attention_errors, "products": product_errors}[kind]
    report(path, errors(getattr(torch, dtype), device))


def attention_errors(dtype, device, tokens=512, heads=8, kv_heads=2):
    """The largest relative difference forward and backward, over the three tiles of a zigzag."""
    from context_parallel import Tile, attend, attend_backward, tile_attention, tile_gradients

    whole, half = slice(0, tokens), tokens // 2
    q, grad = torch.randn(2, 2, heads, tokens, 64, dtype=dtype, device=device)
    kv = torch.randn(2, 2, kv_heads, tokens, 64, dtype=dtype, device=device)
    copies = heads // kv_heads
    forward, backward = [], []
    for tile in (
        Tile(whole, whole, True),
        Tile(whole, slice(0, half), False),
        Tile(slice(half, tokens), whole, False),
    ):
        out, lse = torch.zeros_like(q), q.new_zeros(q.shape[:3], dtype=torch.float32)
        out[:, :, tile.queries], lse[:, :, tile.queries] = attend(q, kv, tile)
        gradients = attend_backward(grad, q, kv, out, lse, tile)
        exact_q, exact_grad = (t[:, :, tile.queries].double() for t in (q, grad))
        k, v = kv[:, :, :, tile.keys].double().repeat_interleave(copies, dim=2)
        exact, exact_lse = tile_attention(exact_q, k, v, tile.causal)
        dq, dk, dv = tile_gradients(exact_grad, exact_q, k, v, exact, exact_lse, tile.causal)
        dk, dv = (t.unflatten(1, (kv_heads, copies)).sum(2) for t in (dk, dv))
        forward.append(difference(out[:, :, tile.queries], exact))
        backward += map(difference, gradients, (dq, dk, dv))
    return torch.tensor(forward).max().item(), torch.tensor(backward).max().item()


def product_errors(dtype, device):
    """The largest relative difference forward and backward. The second expert gets no row."""
    from model import grouped_linear

    ends = torch.tensor([100, 100, 230, 301, 384], dtype=torch.int32, device=device)
    x = torch.randn(384, 128, dtype=dtype, device=device, requires_grad=True)
    weight = torch.randn(5, 256, 128, dtype=dtype, device=device, requires_grad=True)
    grad = torch.randn(384, 256, dtype=dtype, device=device)
    exact_x, exact_weight = (t.detach().double().requires_grad_() for t in (x, weight))
    parts = exact_x.tensor_split(ends[:-1].tolist())
    out = grouped_linear(x, weight, ends)
    exact = torch.cat([part @ matrix.T for part, matrix in zip(parts, exact_weight)])
    gradients = torch.autograd.grad(out, (x, weight), grad)
    exact_gradients = torch.autograd.grad(exact, (exact_x, exact_weight), grad.double())
    backward = list(map(difference, gradients, exact_gradients))
    return difference(out, exact), torch.tensor(backward).max().item()


def difference(x, exact):
    """The largest difference, relative to the largest element; NaN if there is one."""
    return ((x.double() - exact).abs().max() / exact.abs().max()).item()


# --- speed


def product_rate(path, size=8192):
    """FLOP/s of a product in bfloat16, the median of 50."""
    a, times = torch.randn(size, size, device="cuda", dtype=torch.bfloat16), []
    for _ in range(50):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        a @ a
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    report(path, 2 * size**3 / statistics.median(times))


class PlainBlock(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):  # (B, T, C)
        qkv = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1))  # (B, T, 3, H, D)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, H, T, D) each
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class PlainGPT(nn.Module):
    """GPT-2 as nanoGPT writes it, with the loss in it."""

    def __init__(self, config):
        super().__init__()
        self.token = nn.Embedding(config.vocab, config.width)  # also the head
        self.position = nn.Embedding(config.context, config.width)
        blocks = [PlainBlock(config.width, config.heads) for _ in range(config.layers)]
        self.blocks, self.norm = nn.Sequential(*blocks), nn.LayerNorm(config.width)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens, targets):
        where = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.norm(self.blocks(self.token(tokens) + self.position(where)))
        logits = F.linear(x, self.token.weight)  # (B, T, V)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def plain_rates(path, *flags, device="cuda"):
    """tokens/s of nanoGPT's recipe with the sizes of train.py's flags: autocast, fused AdamW."""
    from receipts.formulas import flops_per_token

    args, config = prepared(flags)
    torch.set_float32_matmul_precision("high")
    model = PlainGPT(config).to(device)
    forward = torch.compile(model) if args.compile else model
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), fused=True)
    shape, rates = (2, args.batch // args.microbatches, config.context), []
    for _ in range(STEPS):
        begin = time.perf_counter()
        for _ in range(args.microbatches):
            text = torch.randint(config.vocab, shape)
            text = text.pin_memory() if device == "cuda" else text
            tokens, targets = text.to(device, non_blocking=True)
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = forward(tokens, targets) / args.microbatches
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()  # waits for the step
        rates.append(args.batch * config.context / (time.perf_counter() - begin))
    report(path, {"rates": rates[WARM_UP:], "flops_per_token": flops_per_token(config)})


# --- waits and memory


def project_line():
    """The line of the project that runs, without this file's."""
    frame = sys._getframe()
    this = frame.f_code.co_filename
    while frame:
        file = frame.f_code.co_filename
        if missing.is_own(file) and file != this:
            return f"{os.path.relpath(file, missing.ROOT)}:{frame.f_lineno}"
        frame = frame.f_back
    return "a thread of autograd's"


@contextlib.contextmanager
def noting_waits(places):
    """Count in `places` the lines at which the host waits, as far as PyTorch's debug mode sees."""

    def note(message, *_):
        if "synchronizing CUDA operation" in str(message):
            places[project_line()] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


class WaitsRun(proof.Run):
    """Notes where steps 3 and 4 wait."""

    def steps(self, *args):
        places = collections.Counter()
        for step in super().steps(*args):
            with noting_waits(places) if step in (2, 3) else contextlib.nullcontext():
                yield step
        report(self.path, dict(places.most_common()))


def waits_by_place(path):
    # Step 4 is not the last, after which a validation follows
    train_with(WaitsRun, path, ["--batch", "16", "--steps", "5"])


def train_with(kind, path, flags):
    """Run train.py with a Run of this file, which knows where to report, and end the process."""
    kind.path = path
    args, _ = prepared(flags)
    proof.launch(train.train, args, needed=1, make=kind)


class PeakRun(proof.Run):
    """Reads the allocator's peak of the step that the ledger watches."""

    def steps(self, *args):
        for step in super().steps(*args):
            if step == self.measured:
                torch.cuda.reset_peak_memory_stats()
            yield step
            if step == self.measured:
                allocated = torch.cuda.max_memory_allocated()
        sizes = {"gathered_peak": self.ledger.gathered_peak, "allocated": allocated}
        report(self.path, self.held | sizes)


def peaks(path, *flags):
    train_with(PeakRun, path, [*flags, "--steps", "3"])


def main():
    parts = (launch_times, kernel_errors, product_rate, plain_rates, waits_by_place, peaks)
    names = {part.__name__: part for part in parts}
    if len(sys.argv) < 3 or sys.argv[1] not in names:
        raise harness.Refused(f"give NAME FILE WORDS: NAME is one of {', '.join(names)}")
    _, name, path, *words = sys.argv
    names[name](path, *words)


if __name__ == "__main__":
    harness.script(main)
