"""Questions with numbers to work out. The answers are computed by the functions that the receipts
and the planner use; docs/learn/exercises.md shows how one works them out."""

import re
from typing import Callable, NamedTuple

from harness import presets
from harness.refusal import Refused
from receipts import context_parallel, formulas, pipeline, tensor_parallel, zero
from receipts.formulas import Group, Sizes, activation_bytes, all_reduce_sent, all_sent

NEAR = 0.02  # relative difference of an answer that counts as right
UNITS = {
    "GB": {"B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9},
    "ms": {"s": 1, "ms": 1e-3, "us": 1e-6},
    "%": {"%": 0.01},
    "": {"": 1, "K": 1e3, "M": 1e6, "B": 1e9},  # B: billions, as in "a 7B model"
}


class Question(NamedTuple):
    text: str
    unit: str  # a key of UNITS
    work: Callable  # () -> the answer


def parse(asked, text):
    """The number that an answer means."""
    number, unit = re.fullmatch(r"(.*?)([A-Za-z%]*)", text, re.S).groups()
    try:
        return float(number) * UNITS[asked.unit][unit]
    except (ValueError, KeyError):
        raise Refused(f"--answer {text!r} is no answer: write it as 3.5{asked.unit}") from None


def is_right(asked, text):
    right = asked.work()
    return abs(parse(asked, text) - right) <= NEAR * right


def bubble(name, stages_a_rank):
    """The part of a step in which a rank waits: 4 ranks, 8 micro-batches, and backward takes twice
    as long as forward."""
    _, formula = pipeline.BUBBLES[name]
    wait, works = formula(4, 8, stages_a_rank, 1, 1, 1), 8 * 3
    return wait / (works + wait)


LLAMA, XL, MIXTRAL = map(presets.configure, ("llama3-8b", "gpt2-xl", "mixtral-8x7b"))
BLOCKS = Sizes(LLAMA, 1, 8192, e=2, tp=8, embedding=False, head=False)
BLOCK = Sizes(LLAMA, 1, 131072 // 8, e=2, layers=(range(1),))
QUESTIONS = [
    Question(
        "A model of 7e9 parameters trains with Adam, weights and gradients in 16 bits, on 32 ranks."
        " How much does ZeRO stage 2 hold on each, without activations?",
        "GB",
        lambda: 7e9 * sum(zero.model_states(2, 32)),
    ),
    Question(
        "64 ranks have 80 GB each. How many parameters can ZeRO stage 3 train there (16 bits,"
        " Adam), if nothing but the model's states needed memory?",
        "",
        lambda: 80e9 / sum(zero.model_states(3, 64)),
    ),
    Question(
        "What does each of 8 ranks send in a ring all-reduce of 1 GB?",
        "GB",
        lambda: all_reduce_sent(1e9, 8),
    ),
    Question(
        "How long does a ring all-reduce of 1 MB take on 1024 ranks, if each round costs 5 us and"
        " links have 50 GB/s?",
        "ms",
        lambda: 2 * 1023 * 5e-6 + all_reduce_sent(1e6, 1024) / 50e9,
    ),
    Question(
        "Llama 3 8B (32 blocks, width 4096) in 16 bits, tensor-parallel on 8 ranks. What does a"
        " rank send for its blocks, forward and backward, for 8192 tokens?",
        "GB",
        lambda: all_sent(tensor_parallel.expected(BLOCKS, Group("tp", 8))),
    ),
    Question(
        "GPT-2 XL (48 blocks, width 1600) trains on one sequence of 1024 tokens in 16 bits, with"
        " flash attention and without dropout. What do its blocks keep for backward?",
        "GB",
        lambda: activation_bytes(Sizes(XL, 1, 1024, e=2)),
    ),
    Question(
        "1F1B on 4 stages with 8 micro-batches: what share of the step does a rank wait?",
        "%",
        lambda: bubble("1f1b", 1),
    ),
    Question(
        "The same with the interleaved schedule and 2 stages a rank?",
        "%",
        lambda: bubble("interleaved", 2),
    ),
    Question(
        "From how many tokens a rank does ring attention hide its messages for Llama 3 8B (32"
        " heads, 8 kv-heads) in 16 bits, at 400e12 FLOP/s and links of 50 GB/s?",
        "",
        lambda: LLAMA.kv_heads / LLAMA.heads * 2 * 400e12 / 50e9,
    ),
    Question(
        "A ring of 8 ranks attends to one sequence of 131,072 tokens: Llama 3 8B (8 kv-heads of"
        " 128), 16 bits, gradients summed in 32. What does a rank send for one block, forward and"
        " backward?",
        "GB",
        lambda: all_sent(context_parallel.expected(BLOCK, Group("cp", 8), "ring", None)),
    ),
    Question(
        "How many tokens a second is 40% of a GPU of 989e12 FLOP/s, for Llama 3 8B with a context"
        " of 8192?",
        "",
        lambda: 0.4 * 989e12 / formulas.flops_per_token(LLAMA),
    ),
    Question(
        "Mixtral 8x7B sends each token to 2 of its 8 experts. What share of its parameters does a"
        " token pass?",
        "%",
        lambda: 1 - 32 * 6 * (3 * 4096 * 14336) / presets.parameter_count(MIXTRAL),
    ),
]
