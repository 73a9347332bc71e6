"""config.json of Hugging Face folders, as the fields of FamilyConfig, and the other way round.

FAMILIES lists what can be read. A field that is left out has transformers' default for the family.
A model that model.py would compute in another way is refused in one sentence.

    rotary positions    plain, or stretched for long contexts: linear, llama3 (Llama 3.1 to 3.3),
                        yarn (as Qwen3's pages advise)
    biases              GPT-2's everywhere; none; on q, k and v alone (Qwen2)
    a sliding window    up to its length it is plain attention: the context ends there
"""

import json
import math
import pathlib
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch

from harness import read_json
from harness.presets import checked

# Fields of FamilyConfig, and what config.json calls them
GPT2_NAMES = {
    "layers": "n_layer",
    "heads": "n_head",
    "width": "n_embd",
    "hidden": "n_inner",
    "context": "n_positions",
    "vocab": "vocab_size",
    "norm_eps": "layer_norm_epsilon",
    "tied": "tie_word_embeddings",
}
LLAMA_NAMES = {
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "width": "hidden_size",
    "hidden": "intermediate_size",
    "context": "max_position_embeddings",
    "vocab": "vocab_size",
    "norm_eps": "rms_norm_eps",
    "tied": "tie_word_embeddings",
    "rope_theta": "rope_theta",
}
MIXTRAL_NAMES = LLAMA_NAMES | {"experts": "num_local_experts", "top_k": "num_experts_per_tok"}
OLMOE_NAMES = MIXTRAL_NAMES | {"experts": "num_experts", "renormalize": "norm_topk_prob"}
QWEN3_MOE_NAMES = OLMOE_NAMES | {"hidden": "moe_intermediate_size"}
QWEN2_MOE_NAMES = QWEN3_MOE_NAMES | {"shared": "shared_expert_intermediate_size"}
SMOLLM3_NAMES = LLAMA_NAMES | {"no_rope_every": "no_rope_layer_interval"}
GRANITE_NAMES = LLAMA_NAMES | {
    "embedding_scale": "embedding_multiplier",
    "query_scale": "attention_multiplier",
    "residual_scale": "residual_multiplier",
    "logits_scale": "logits_scaling",
}

# Fields that all models of a family have, unless a name above says where each has its own. A
# family below gives those that differ from Llama's
LLAMA = dict(positions="rope", norm="rmsnorm", mlp="swiglu", bias=False, no_rope_every=0)
LLAMA |= dict(qk_norm="none", norm_after=False)
LLAMA |= dict(embedding_scale=1.0, query_scale=1.0, residual_scale=1.0, logits_scale=1.0)
LLAMA |= dict(experts=0, shared=0, shared_gate=False, scores="softmax", renormalize=True)
GPT2 = dict(positions="learned", norm="layernorm", mlp="gelu", bias=True)

# What transformers takes where config.json says nothing. Likewise
DEFAULTS = dict(rms_norm_eps=1e-6, tie_word_embeddings=False, rope_theta=1e4, sliding_window=None)
DEFAULTS |= dict(num_key_value_heads=None, head_dim=None, norm_topk_prob=False)
DEFAULTS |= dict.fromkeys(list(GRANITE_NAMES.values())[-4:], 1.0)
GPT2_DEFAULTS = dict(n_inner=None, layer_norm_epsilon=1e-5, tie_word_embeddings=True)
MISTRAL_DEFAULTS = dict(num_key_value_heads=8, sliding_window=4096)
MIXTRAL_DEFAULTS = dict(num_key_value_heads=8, rope_theta=1e6, rms_norm_eps=1e-5)
SMOLLM3_DEFAULTS = dict(num_key_value_heads=4, rope_theta=2e6, tie_word_embeddings=True)
SMOLLM3_DEFAULTS |= dict(no_rope_layer_interval=4)


class Family(NamedTuple):
    architecture: str  # the class in transformers
    names: dict = LLAMA_NAMES
    fields: dict = {}
    defaults: dict = {}


# Of two that a model fits the first one is written
FAMILIES = {
    "gpt2": Family("GPT2LMHeadModel", GPT2_NAMES, GPT2, GPT2_DEFAULTS),
    "llama": Family("LlamaForCausalLM"),
    "mistral": Family("MistralForCausalLM", defaults=MISTRAL_DEFAULTS),
    "mixtral": Family("MixtralForCausalLM", MIXTRAL_NAMES, defaults=MIXTRAL_DEFAULTS),
    "qwen2": Family(
        "Qwen2ForCausalLM", fields=dict(bias="qkv"), defaults=dict(num_key_value_heads=32)
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        QWEN2_MOE_NAMES,
        dict(bias="qkv", shared_gate=True),
        dict(num_key_value_heads=16),
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        fields=dict(qk_norm="each"),
        defaults=dict(num_key_value_heads=32, head_dim=128),
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        QWEN3_MOE_NAMES,
        dict(qk_norm="each"),
        dict(num_key_value_heads=4),
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        fields=dict(qk_norm="all", norm_after=True),
        defaults=dict(rms_norm_eps=1e-5),
    ),
    "olmoe": Family("OlmoeForCausalLM", OLMOE_NAMES, dict(qk_norm="all"), dict(rms_norm_eps=1e-5)),
    "smollm3": Family("SmolLM3ForCausalLM", SMOLLM3_NAMES, defaults=SMOLLM3_DEFAULTS),
    "granite": Family("GraniteForCausalLM", GRANITE_NAMES),
}

# The values that these may have
KNOWN = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),  # two names of one function
    "hidden_act": ("silu", "swish"),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "qkv_bias": (True,),  # Qwen2-MoE's
    "clip_qkv": (None,),
    "use_sliding_window": (False,),
    "partial_rotary_factor": (1, None),
    "mscale": (None,),
    "mscale_all_dim": (None,),
    "truncate": (True,),
    "decoder_sparse_step": (1,),  # every layer has experts
    "mlp_only_layers": ([], None),
    "quantization_config": (None,),
}


# --- reading


def read(folder, context=None):
    """The fields of FamilyConfig that a folder's config.json asks for. context: the longest
    sequence to be trained, if it is known. Raises ValueError, in one sentence, for what is missing,
    or not what our model does."""
    path = pathlib.Path(folder) / "config.json"
    content = read_json(path)
    try:
        return translate(content, context)
    except KeyError as e:
        raise ValueError(f"{path} has no {e.args[0]}: fetch it again") from e
    except (AttributeError, TypeError) as e:
        raise ValueError(f"{path}: a field is not of its type ({e}): fetch it again") from e
    except ValueError as e:
        raise ValueError(f"{path}: {e}") from e


def translate(content, context=None):
    """See `read`. content: of a config.json. Raises KeyError where a field is missing, and
    TypeError where it is of another type."""
    kind = content.get("model_type")
    if kind not in FAMILIES:
        what = f"its model_type is {json.dumps(kind)}"
        raise ValueError(f"{what}, and only {', '.join(FAMILIES)} can be read")
    family = FAMILIES[kind]
    check(content)
    theirs = DEFAULTS | family.defaults | content
    if "num_local_experts" in theirs:  # two names of one field, by transformers' version
        theirs.setdefault("num_experts", theirs["num_local_experts"])
    fields = LLAMA | family.fields | dict(rope_scaling=None)
    fields |= {ours: theirs[name] for ours, name in family.names.items()}
    fields["norm_eps"] = float(fields["norm_eps"])
    if fields.get("kv_heads") is None:
        fields["kv_heads"] = fields["heads"]
    if fields["hidden"] is None:  # GPT-2's
        fields["hidden"] = 4 * fields["width"]
    fields["head_dim"] = fields.get("head_dim") or 0
    if kind != "gpt2":
        fields["rope_theta"], fields["rope_scaling"] = rope_of(theirs)
    if kind == "qwen2_moe":
        fields["shared"] = in_experts(fields["shared"], fields["hidden"])
    if kind == "smollm3":
        fields["no_rope_every"] = no_rope_every(theirs)
    if kind in ("mistral", "mixtral") and theirs["sliding_window"] is not None:
        window = theirs["sliding_window"]
        if context is not None and context > window:
            what = f"the model has a sliding window of {window}, which is not known here"
            raise ValueError(f"{what}: give at most --context {window}")
        fields["context"] = min(fields["context"], window)
    config = checked(fields)  # raises ValueError for sizes that contradict each other
    if kind == "granite":
        fields["query_scale"] *= config.head_dim**0.5
        fields["logits_scale"] = 1 / fields["logits_scale"]
    return fields


def check(content):
    """Raise ValueError for a field with a value that is not known here."""
    if content.get("activation_function") == "gelu":
        what = "activation_function is the exact gelu, and GPT-2's, here, is its approximation"
        raise ValueError(f'{what} "gelu_new": fine-tuned with that it would be another model')
    for name, values in KNOWN.items():
        if name in content and content[name] not in values:
            known = " or ".join(map(json.dumps, values))
            value = json.dumps(content[name])
            raise ValueError(f"{name} is {value}, and only {known} is known here")


def in_experts(width, hidden):
    """The width of a shared MLP, in units of an expert's."""
    if width % hidden:
        what = f"shared_expert_intermediate_size {width} is no multiple of an expert's {hidden}"
        raise ValueError(f"{what}: that is not known here")
    return width // hidden


def no_rope_every(theirs):
    """Every so many-th layer has no rotary positions; 0: all have them."""
    layers, every = theirs["num_hidden_layers"], theirs["no_rope_layer_interval"]
    rotary = theirs.get("no_rope_layers")  # 1 or 0 for each layer, whatever its name says
    if rotary is None:
        return every if every <= layers else 0
    for every in (0, *range(1, layers + 1)):
        if rotary == rotary_layers(layers, every):
            return every
    raise ValueError("no_rope_layers is not every so many-th layer: that is not known here")


def rotary_layers(layers, every):
    return [int(not every or (layer + 1) % every != 0) for layer in range(layers)]


# --- rotary positions


@dataclass(frozen=True)
class RopeScaling:
    """How the frequencies of rotary positions are lowered for sequences longer than those that a
    model was first trained on. The fields have their names in config.json."""

    rope_type: str  # "linear", "llama3" or "yarn"
    factor: float
    low_freq_factor: float | None = None  # llama3
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None  # llama3, yarn
    beta_fast: float | None = None  # yarn
    beta_slow: float | None = None
    attention_factor: float | None = None
    rope_theta: float | None = None

    def __call__(self, frequencies):
        """The lowered frequencies (D/2,), and a factor of cos and sin. The operations and their
        order are transformers'."""
        if self.rope_type == "linear":
            return frequencies / self.factor, 1.0
        # Waves that go round often within the original context stay, slow ones are stretched by
        # `factor`, and those between are a mixture of both
        if self.rope_type == "yarn":
            waves, stay = self.yarn(frequencies)
            lowered = 1.0 / (self.factor * waves) * (1 - stay) + 1.0 / waves * stay
            return lowered, self.attention_factor
        wavelengths = 2 * math.pi / frequencies
        rounds = self.original_max_position_embeddings / wavelengths
        width = self.high_freq_factor - self.low_freq_factor
        stay = ((rounds - self.low_freq_factor) / width).clamp(0, 1)
        return (1 - stay) * frequencies / self.factor + stay * frequencies, 1.0

    def yarn(self, frequencies):
        """1 / frequencies, and which part of each stays: from 1 to 0 in equal steps, between the
        waves that go round beta_fast and beta_slow times (Peng et al. 2023, arXiv:2309.00071)."""
        size = 2 * len(frequencies)
        exponents = torch.arange(0, size, 2, device=frequencies.device).float() / size

        def index(rounds):  # of the wave that goes round so often
            length = self.original_max_position_embeddings / (rounds * 2 * math.pi)
            return size * math.log(length) / (2 * math.log(self.rope_theta))

        first = max(math.floor(index(self.beta_fast)), 0)
        last = min(math.ceil(index(self.beta_slow)), size - 1)
        steps = torch.arange(size // 2, dtype=torch.float32, device=frequencies.device) - first
        stretched = (steps / (last - first or 0.001)).clamp(0, 1)
        return self.rope_theta**exponents, 1 - stretched


def rope_of(theirs):
    """(theta, RopeScaling or None). As in transformers, rope_scaling goes before rope_parameters,
    and the theta in it before the one beside it."""
    rope = theirs.get("rope_scaling") or theirs.get("rope_parameters") or {}
    check(rope)
    theta = float(rope.get("rope_theta", theirs["rope_theta"]))
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type == "default":
        return theta, None
    if rope_type == "linear":
        return theta, RopeScaling("linear", float(rope["factor"]))
    if rope_type not in ("llama3", "yarn"):
        known = "default, linear, llama3 and yarn are known here"
        raise ValueError(f"rotary positions of type {json.dumps(rope_type)}: {known}")
    factor, name = float(rope["factor"]), "original_max_position_embeddings"
    original = theirs.get(name, rope.get(name, theirs["max_position_embeddings"]))
    if rope_type == "llama3":
        low, high = (float(rope[f"{kind}_freq_factor"]) for kind in ("low", "high"))
        return theta, RopeScaling("llama3", factor, low, high, original)
    fast, slow = float(rope.get("beta_fast") or 32), float(rope.get("beta_slow") or 1)
    scores = rope.get("attention_factor")
    if scores is None:
        scores = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    yarn = dict(beta_fast=fast, beta_slow=slow, attention_factor=float(scores), rope_theta=theta)
    return theta, RopeScaling("yarn", factor, None, None, original, **yarn)


# --- writing


def family_of(config):
    """The model_type of a Config. Raises ValueError for a model that no known family is."""
    for kind, family in FAMILIES.items():
        fields = (LLAMA | family.fields).items()
        fits = all(name in family.names or getattr(config, name) == x for name, x in fields)
        if kind == "gpt2":
            width = config.heads * config.head_dim
            fits = fits and config.kv_heads == config.heads and width == config.width
        if fits:
            return kind
    advice = "take a preset, --family gpt2 or llama as they are, or experts like Mixtral's"
    raise ValueError(f"this model is of no family that transformers knows: {advice}")


def write(config):
    """config.json's content for a Config. Raises ValueError as family_of does."""
    kind = family_of(config)
    content = dict(model_type=kind, architectures=[FAMILIES[kind].architecture])
    content |= {name: getattr(config, ours) for ours, name in FAMILIES[kind].names.items()}
    if kind == "gpt2":
        content |= dict(activation_function="gelu_new", attn_pdrop=0.0)
        return content | dict(embd_pdrop=config.dropout, resid_pdrop=config.dropout)
    content |= dict(hidden_act="silu", attention_bias=False, sliding_window=None)
    content["pad_token_id"] = None  # a default may lie beyond the vocabulary
    if config.rope_scaling is not None:
        scaling = asdict(config.rope_scaling) | dict(rope_theta=None)  # it stands beside it
        content["rope_scaling"] = {name: x for name, x in scaling.items() if x is not None}
    if kind == "qwen2_moe":
        content["shared_expert_intermediate_size"] = config.shared * config.hidden
    if kind == "smollm3":
        content["no_rope_layers"] = rotary_layers(config.layers, config.no_rope_every)
    if kind == "granite":
        content["attention_multiplier"] = shortest(config.query_scale / config.head_dim**0.5)
        content["logits_scaling"] = shortest(1 / config.logits_scale)
    return content


def shortest(x):
    """Without the last digits, which two roundings changed."""
    return float(f"{x:.14g}")
