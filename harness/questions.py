"""Questions with numbers to work out. The answers are computed by the functions that the receipts
and the planner use."""

import argparse
from typing import Callable, NamedTuple

from harness import formulas, network, presets, schedules
from harness.flags import SIZE, TIME, quantity
from harness.start import Refused

NEAR = 0.02  # relative difference of an answer that counts as right
COUNT = {"": 1, "K": 1e3, "M": 1e6, "B": 1e9}  # B: billions, as in "a 7B model"
UNITS = {
    "bytes": (SIZE, "GB"),
    "seconds": (TIME, "ms"),
    "percent": ({"%": 0.01}, "%"),
    "number": (COUNT, ""),
}


class Question(NamedTuple):
    text: str
    kind: str  # of the answer: a key of UNITS
    work: Callable  # () -> (answer, lines that say how it comes about)

    @property
    def example(self):
        return f"3.5{UNITS[self.kind][1]}"

    @property
    def unit_text(self):
        units = [unit for unit in UNITS[self.kind][0] if unit]
        return f"in {', '.join(units)}" if self.kind != "number" else "(K, M or B may follow it)"


def parse(asked, text):
    """The answer that a text means. Raises Refused where it means none."""
    units, _ = UNITS[asked.kind]
    try:
        if asked.kind in ("bytes", "seconds"):
            return quantity(units, asked.example)(text)
        suffix = text[-1:] if text[-1:] in units else ""
        return float(text.removesuffix(suffix)) * units[suffix]
    except (argparse.ArgumentTypeError, ValueError, KeyError) as e:
        problem = f"--answer {text} is no number {asked.unit_text}"
        raise Refused(f"{problem}: write it as {asked.example}") from e


def is_right(asked, text):
    answer, _ = asked.work()
    return abs(parse(asked, text) - answer) <= NEAR * abs(answer)


def working(asked):
    """How the answer comes about, line by line."""
    answer, lines = asked.work()
    return "\n".join([*(f"  {line}" for line in lines), f"answer: {shown(asked, answer)}"])


def shown(asked, answer):
    units, _ = UNITS[asked.kind]
    if asked.kind == "percent":
        return f"{answer:.1%}"
    if asked.kind == "number":
        return f"{answer:,.0f}"
    return network.shown(answer, units)


# --- the answers


def zero_2():
    weights, gradients, states = formulas.model_states(2, 32)
    each = weights + gradients + states
    lines = [
        f"a parameter's weight in 16 bits, whole: {weights:g} bytes",
        f"its gradient in 16 bits, 1/32 of it: {gradients:g}",
        f"master copy and Adam's two moments in 32 bits, 1/32 of them: {states:g}",
        f"7e9 parameters x {each:g} bytes = {7e9 * each:,.0f} bytes",
    ]
    return 7e9 * each, lines


def zero_3_fits():
    each = sum(formulas.model_states(3, 64))
    lines = [
        f"stage 3 divides all 16 bytes a parameter by 64: {each:g} bytes on each rank",
        f"80e9 bytes / {each:g} = {80e9 / each:,.0f} parameters, if nothing else needed memory",
    ]
    return 80e9 / each, lines


def ring_bytes():
    sent = formulas.all_reduce_sent(1e9, 8)
    lines = [
        f"reduce-scatter: 7 rounds with 1/8 of the tensor each: {sent / 2:,.0f} bytes",
        f"all-gather: as many again. 2 (N-1)/N S = {sent:,.0f} bytes",
    ]
    return sent, lines


def ring_latency():
    link = network.Link(5e-6, 1 / 50e9)
    cost = network.formulas(1024, 1e6)["ring"]
    seconds = network.predict(1024, 1e6, link)["ring"]
    lines = [
        f"2 (N-1) = {cost.rounds} rounds x 5 us = {cost.rounds * link.alpha * 1e3:.4g} ms",
        f"2 (N-1)/N S = {cost.sent:,.0f} bytes / 50 GB/s = {cost.sent * link.beta * 1e3:.3g} ms",
        "nearly all of it is latency: a small tensor on many ranks wants halving-doubling",
    ]
    return seconds, lines


def tensor_parallel_bytes():
    config = presets.configure("llama3-8b")
    sent = formulas.tensor_parallel_sent(config, 8, 8192, 2, config.layers, False, False)
    message = 8192 * config.width * 2
    lines = [
        f"an all-reduce of (tokens, C): 8192 x {config.width} x 2 bytes = {message:,} bytes",
        f"on a ring of 8 a rank sends 2 x 7/8 of it: {formulas.all_reduce_sent(message, 8):,.0f}",
        f"4 of them a block (attention and MLP, forward and backward) x {config.layers} blocks"
        f" = {sent:,.0f} bytes",
    ]
    return sent, lines


def activations():
    config = presets.configure("gpt2-xl")
    block = formulas.activation_bytes(config, 1, 2)
    values = block / (config.context * 2)
    lines = [
        "a block keeps inputs and outputs of two norms; q, k, v and the heads' result; the MLP's"
        " hidden values, twice",
        f"that is {values / config.width:g} x C = {values:,.0f} values a token",
        f"x {config.context} tokens x 2 bytes = {block:,.0f} bytes a block",
        f"x {config.layers} blocks = {block * config.layers:,.0f} bytes",
    ]
    return block * config.layers, lines


def bubble(name, stages_a_rank=1):
    """The part of a step in which a rank waits: 4 ranks, 8 micro-batches, backward twice as long as
    forward."""
    text, formula = schedules.BUBBLES[name]
    wait = formula(4, 8, stages_a_rank, 1, 1, 1)
    works = 8 * 3
    share = wait / (works + wait)
    lines = [
        f"a rank works 8 x (F + I + W) = {works}: backward is I, of inputs, and W, of weights",
        f"it waits {text} = {wait:g}, with p = 4 ranks and v = {stages_a_rank} stages a rank",
        f"{wait:g} / ({works} + {wait:g}) = {share:.4f}",
    ]
    return share, lines


def ring_hides():
    config = presets.configure("llama3-8b")
    tokens = formulas.ring_hides_from(config, 2, 400e12, 50e9)
    share = config.kv_heads / config.heads
    lines = [
        "a tile: 2 B (T/N)^2 C flops; its message: 2 B (T/N) C_kv e bytes",
        "the tile takes longer where T/N > (C_kv / C) e f / w",
        f"= {share:g} x 2 x 400e12 / 50e9 = {tokens:,.0f} tokens",
    ]
    return tokens, lines


def ring_keys():
    config = presets.configure("llama3-8b")
    tokens, head = 131072 // 8, config.width // config.heads
    heads = config.heads, config.kv_heads, head
    sent = formulas.context_parallel_sent("ring", 8, 1, 1, tokens, *heads, 2)["send"]
    kv = 2 * tokens * config.kv_heads * head
    lines = [
        f"K and V: 2 x {tokens:,} tokens x {config.kv_heads} x {head} = {kv:,} elements",
        f"7 hops in forward and 7 in backward, 2 bytes an element: {14 * kv * 2:,} bytes",
        f"dK and dV, 8 hops because they must come home, 4 bytes: {8 * kv * 4:,} bytes",
        f"together {sent:,.0f} bytes",
    ]
    return sent, lines


def utilisation():
    config = presets.configure("llama3-8b")
    flops = config.flops_per_token()
    lines = [
        f"6 x weights of matrices + 12 L T C = {flops:,} FLOPs a token, forward and backward",
        f"0.4 x 989e12 / {flops:,} = {0.4 * 989e12 / flops:,.0f} tokens/s",
    ]
    return 0.4 * 989e12 / flops, lines


def moe_share():
    config = presets.configure("mixtral-8x7b")
    whole = presets.parameter_count(config)
    expert = 3 * config.width * config.hidden
    idle = config.layers * (config.experts - config.top_k) * expert
    lines = [
        f"all parameters: {whole:,}",
        f"an expert: 3 x {config.width} x {config.hidden} = {expert:,}",
        f"a token leaves out {config.experts - config.top_k} of {config.experts} in each of"
        f" {config.layers} layers: {idle:,}",
        f"it passes {whole - idle:,}, that is {(whole - idle) / whole:.4f} of all",
    ]
    return (whole - idle) / whole, lines


QUESTIONS = [
    Question(
        "A model of 7e9 parameters trains with Adam, weights and gradients in 16 bits, on 32 ranks."
        " How much does ZeRO stage 2 hold on each, without activations?",
        "bytes",
        zero_2,
    ),
    Question(
        "64 ranks have 80 GB each. How many parameters can ZeRO stage 3 train there (16 bits,"
        " Adam), if nothing but the model's states needed memory?",
        "number",
        zero_3_fits,
    ),
    Question(
        "What does each of 8 ranks send in a ring all-reduce of 1 GB?",
        "bytes",
        ring_bytes,
    ),
    Question(
        "How long does a ring all-reduce of 1 MB take on 1024 ranks, if each round costs 5 us and"
        " links have 50 GB/s?",
        "seconds",
        ring_latency,
    ),
    Question(
        "Llama 3 8B (32 blocks, width 4096) in 16 bits, tensor-parallel on 8 ranks. What does a"
        " rank send for its blocks, forward and backward, for 8192 tokens?",
        "bytes",
        tensor_parallel_bytes,
    ),
    Question(
        "GPT-2 XL (48 blocks, width 1600) trains on one sequence of 1024 tokens in 16 bits, with"
        " flash attention and without dropout. What do its blocks keep for backward?",
        "bytes",
        activations,
    ),
    Question(
        "1F1B on 4 stages with 8 micro-batches: what share of the step does a rank wait?",
        "percent",
        lambda: bubble("1f1b"),
    ),
    Question(
        "The same with the interleaved schedule and 2 stages a rank?",
        "percent",
        lambda: bubble("interleaved", 2),
    ),
    Question(
        "From how many tokens a rank does ring attention hide its messages for Llama 3 8B (32"
        " heads, 8 kv-heads) in 16 bits, at 400e12 FLOP/s and links of 50 GB/s?",
        "number",
        ring_hides,
    ),
    Question(
        "A ring of 8 ranks attends to one sequence of 131,072 tokens: Llama 3 8B (8 kv-heads of"
        " 128), 16 bits, gradients summed in 32. What does a rank send for one block, forward and"
        " backward?",
        "bytes",
        ring_keys,
    ),
    Question(
        "How many tokens a second is 40% of a GPU of 989e12 FLOP/s, for Llama 3 8B with a context"
        " of 8192?",
        "number",
        utilisation,
    ),
    Question(
        "Mixtral 8x7B sends each token to 2 of its 8 experts. What share of its parameters does a"
        " token pass?",
        "percent",
        moe_share,
    ),
]
