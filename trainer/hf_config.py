"""config.json of Hugging Face folders, as the fields of model.Config.

Five families can be read: gpt2, llama, mistral, mixtral and qwen2. A field that is left out has
transformers' default for the family. A field of the wrong type, and a model that model.py would
compute in another way, are refused in one sentence.

    rotary positions    plain, or stretched for long contexts: linear, llama3 (Llama 3.1 to 3.3)
    biases              GPT-2's everywhere; none; on q, k and v alone (Qwen2)
    a sliding window    up to its length it is plain attention: the context ends there
"""

import json
import math
import pathlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import NamedTuple

from model import Config

GPT2 = dict(positions="learned", norm="layernorm", mlp="gelu", bias=True)
LLAMA = dict(positions="rope", norm="rmsnorm", mlp="swiglu", bias=False)
# What all five have in common
PLAIN = dict(experts=0, shared=0, scores="softmax", renormalize=True, rope_scaling=None)
LLAMAS = ("llama", "mistral", "mixtral", "qwen2")


class Published(NamedTuple):
    """A model as its config.json describes it."""

    fields: dict  # of model.Config
    window: int | None  # the longest sequence that its sliding window lets it see whole


def read(folder):
    """A folder's config.json, as Published. Raises ValueError, in one sentence, for what is
    missing, of the wrong type, or not what our model does."""
    path = pathlib.Path(folder) / "config.json"
    try:
        theirs = read_json(path)
    except OSError as e:
        raise ValueError(
            f"{path} can't be read ({e.strerror}): give a folder with config.json and safetensors "
            "files"
        ) from e
    try:
        return translate(theirs)
    except ValueError as e:
        raise ValueError(f"{path}: {e}") from e


def read_json(path):
    """The object in a JSON file. Raises OSError, and ValueError for anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{path} is no JSON: fetch it again") from e
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds {shown(content)}, not a JSON object: fetch it again")
    return content


def translate(theirs):
    """The content of a config.json, as Published. Raises ValueError: see read."""
    kind = theirs.get("model_type")
    if kind != "gpt2" and kind not in LLAMAS:
        readable = f"gpt2, {', '.join(LLAMAS[:-1])} and {LLAMAS[-1]}"
        raise ValueError(f"its model_type is {shown(kind)}: {readable} can be read")
    check_types(theirs, TYPES)
    if theirs.get("quantization_config") is not None:
        raise ValueError("its weights are quantized: give the model in bfloat16 or float32")
    names = SIZES_GPT2 if kind == "gpt2" else SIZES_LLAMA
    for name in names.values():
        if name not in theirs:
            raise ValueError(f"it has no {name}: fetch it again")
    sizes = PLAIN | {ours: theirs[name] for ours, name in names.items()}
    published = of_gpt2(theirs, sizes) if kind == "gpt2" else of_llama(theirs, sizes, kind)
    Config(**published.fields)  # raises ValueError for sizes that contradict each other
    return published


# --- the types of its fields


class Type(NamedTuple):
    words: str
    fits: Callable


def whole(most):
    """A whole number. The limit is far above any model, and keeps products within 64 bits."""
    return Type(f"a whole number from 1 to {most:,}", lambda x: type(x) is int and 1 <= x <= most)


def number(least, most):
    # NaN fits nowhere
    return Type(
        f"a number from {least:g} to {most:g}",
        lambda x: type(x) in (int, float) and least <= x <= most,
    )


def or_null(kind):
    return Type(f"{kind.words}, or null", lambda x: x is None or kind.fits(x))


FLAG = Type("true or false", lambda x: type(x) is bool)
WORD = Type("a word", lambda x: type(x) is str)
WORDS = Type("a list of words", lambda x: type(x) is list and all(type(y) is str for y in x))
OBJECT = Type("an object", lambda x: type(x) is dict)
POSITIONS, WIDTH = whole(2**31), whole(2**20)
SIZES_GPT2 = dict(
    layers="n_layer", heads="n_head", width="n_embd", context="n_positions", vocab="vocab_size"
)
SIZES_LLAMA = dict(
    layers="num_hidden_layers",
    heads="num_attention_heads",
    width="hidden_size",
    hidden="intermediate_size",
    context="max_position_embeddings",
    vocab="vocab_size",
)
TYPES = dict(
    vocab_size=whole(2**26),
    tie_word_embeddings=FLAG,
    # GPT-2
    n_layer=whole(2**10),
    n_head=whole(2**16),
    n_embd=WIDTH,
    n_positions=POSITIONS,
    n_inner=or_null(WIDTH),
    layer_norm_epsilon=number(0, 1),
    activation_function=WORD,
    scale_attn_weights=FLAG,
    scale_attn_by_inverse_layer_idx=FLAG,
    # Llama and those after it
    num_hidden_layers=whole(2**10),
    num_attention_heads=whole(2**16),
    num_key_value_heads=or_null(whole(2**16)),
    head_dim=or_null(WIDTH),
    hidden_size=WIDTH,
    intermediate_size=WIDTH,
    max_position_embeddings=POSITIONS,
    rms_norm_eps=number(0, 1),
    hidden_act=WORD,
    attention_bias=FLAG,
    mlp_bias=FLAG,
    rope_theta=number(1, 1e12),
    rope_scaling=or_null(OBJECT),
    rope_parameters=or_null(OBJECT),
    partial_rotary_factor=or_null(number(1e-6, 1)),
    original_max_position_embeddings=POSITIONS,
    sliding_window=or_null(POSITIONS),
    use_sliding_window=FLAG,
    max_window_layers=Type(
        f"a whole number from 0 to {2**31:,}", lambda x: x == 0 or POSITIONS.fits(x)
    ),
    layer_types=or_null(WORDS),
    num_local_experts=whole(2**12),
    num_experts_per_tok=whole(2**12),
)
ROPE_TYPES = dict(
    rope_type=WORD,
    type=WORD,
    rope_theta=number(1, 1e12),
    factor=number(1e-6, 1e6),
    low_freq_factor=number(1e-6, 1e6),
    high_freq_factor=number(1e-6, 1e6),
    original_max_position_embeddings=POSITIONS,
    partial_rotary_factor=or_null(number(1e-6, 1)),
)


def check_types(content, types, where=""):
    """Raise ValueError for the first field that is not of its type."""
    for name, kind in types.items():
        if name in content and not kind.fits(content[name]):
            raise ValueError(f"{where}{name} is {shown(content[name])}, not {kind.words}")


def shown(value):
    """A value from JSON in few words."""
    if isinstance(value, (dict, list)):
        return "a list" if isinstance(value, list) else "an object"
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


# --- families


def of_gpt2(theirs, sizes):
    activation = theirs.get("activation_function", "gelu_new")
    if activation not in ("gelu_new", "gelu_pytorch_tanh"):  # two names of one function
        raise ValueError(f"activation {shown(activation)} is not GPT-2's gelu_new")
    if theirs.get("scale_attn_by_inverse_layer_idx") or not theirs.get("scale_attn_weights", True):
        raise ValueError(
            "attention scaled by the layer's number, or not at all, is not known here: "
            "scale_attn_by_inverse_layer_idx must be false and scale_attn_weights true"
        )
    hidden = theirs.get("n_inner")
    ours = dict(
        hidden=4 * sizes["width"] if hidden is None else hidden,
        kv_heads=sizes["heads"],
        tied=theirs.get("tie_word_embeddings", True),
        norm_eps=float(theirs.get("layer_norm_epsilon", 1e-5)),
    )
    return Published(GPT2 | sizes | ours, None)


def of_llama(theirs, sizes, kind):
    activation = theirs.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ValueError(f"activation {shown(activation)} is not silu, the only one known here")
    if theirs.get("attention_bias") or theirs.get("mlp_bias"):
        raise ValueError("attention_bias and mlp_bias are not known here: both must be false")
    heads = sizes["heads"]
    head_dim = theirs.get("head_dim")
    if head_dim not in (None, sizes["width"] // heads):
        raise ValueError(f"heads of {head_dim}, not {sizes['width']} / {heads}, are not known here")
    # Where it is left out. null is as many as heads
    default = dict(mistral=8, mixtral=8, qwen2=32).get(kind)
    kv_heads = theirs.get("num_key_value_heads", default)
    theta, scaling = rope_of(theirs, kind)
    ours = dict(
        kv_heads=heads if kv_heads is None else kv_heads,
        rope_theta=theta,
        rope_scaling=scaling,
        tied=theirs.get("tie_word_embeddings", False),
        norm_eps=float(theirs.get("rms_norm_eps", 1e-5 if kind == "mixtral" else 1e-6)),
    )
    if kind == "qwen2":
        ours["bias"] = "qkv"
    if kind == "mixtral":
        for ours_name, name in (("experts", "num_local_experts"), ("top_k", "num_experts_per_tok")):
            if name not in theirs:
                raise ValueError(f"it has no {name}: fetch it again")
            ours[ours_name] = theirs[name]
    window = window_of(theirs, kind)
    if window is not None:
        ours["context"] = min(sizes["context"], window)
    return Published(LLAMA | sizes | ours, window)


def window_of(theirs, kind):
    """The length of the sliding window, or None if no layer has one."""
    types = theirs.get("layer_types")
    for word in types or ():
        if word not in ("full_attention", "sliding_attention"):
            raise ValueError(f"layers of the type {shown(word)} are not known here")
    if kind != "qwen2":
        return theirs.get("sliding_window", 4096 if kind == "mistral" else None)
    slides = theirs.get("max_window_layers", 28) < theirs["num_hidden_layers"]
    if types is not None:
        slides = "sliding_attention" in types
    if not slides or not theirs.get("use_sliding_window", False):
        return None
    return theirs.get("sliding_window", 4096)


# --- rotary positions


@dataclass(frozen=True)
class RopeScaling:
    """How the frequencies of rotary positions are lowered for sequences longer than those that a
    model was first trained on. The fields have their names in config.json."""

    rope_type: str  # "linear" or "llama3"
    factor: float
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None

    def __call__(self, frequencies):
        """The lowered frequencies (D/2,). The operations and their order are transformers'."""
        if self.rope_type == "linear":
            return frequencies / self.factor
        # llama3: waves that go round often within the original context stay, slow ones are
        # stretched by `factor`, and those between are a mixture of both
        wavelengths = 2 * math.pi / frequencies
        rounds = self.original_max_position_embeddings / wavelengths
        width = self.high_freq_factor - self.low_freq_factor
        stay = ((rounds - self.low_freq_factor) / width).clamp(0, 1)
        return (1 - stay) * frequencies / self.factor + stay * frequencies

    def written(self):
        """As config.json has it."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def read_scaling(content):
    """The RopeScaling that `asdict` made `content` of, or None. Raises TypeError or ValueError for
    anything else."""
    if content is None:
        return None
    written = {name: value for name, value in content.items() if value is not None}
    check_types(written, ROPE_TYPES)
    return RopeScaling(**written)


def rope_of(theirs, kind):
    """(theta, RopeScaling or None). As in transformers, rope_scaling goes before rope_parameters,
    and the theta in it before the one beside it."""
    where = "rope_scaling" if theirs.get("rope_scaling") else "rope_parameters"
    rope = theirs.get(where) or {}
    check_types(rope, ROPE_TYPES, f"{where}'s ")
    if any(isinstance(value, dict) for value in rope.values()):
        raise ValueError(f"{where} differs from layer to layer, which is not known here")
    if (rope.get("partial_rotary_factor") or theirs.get("partial_rotary_factor") or 1) != 1:
        raise ValueError("a partial_rotary_factor other than 1 is not known here")
    default = 1e6 if kind == "mixtral" else 1e4
    theta = float(rope.get("rope_theta", theirs.get("rope_theta", default)))
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type == "default":
        return theta, None
    needed = dict(linear=["factor"], llama3=["factor", "low_freq_factor", "high_freq_factor"])
    if rope_type not in needed:
        raise ValueError(
            f"rotary positions of type {shown(rope_type)}: default, linear and llama3 are known "
            "here"
        )
    for name in needed[rope_type]:
        if name not in rope:
            raise ValueError(f"{where} has no {name}: fetch it again")
    values = {name: float(rope[name]) for name in needed[rope_type]}
    if rope_type == "llama3":
        if values["low_freq_factor"] >= values["high_freq_factor"]:
            raise ValueError(f"{where}'s low_freq_factor must be below its high_freq_factor")
        name = "original_max_position_embeddings"
        longest = rope.get(name, theirs["max_position_embeddings"])
        values[name] = theirs.get(name, longest)
    return theta, RopeScaling(rope_type, **values)
