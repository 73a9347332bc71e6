"""config.json of Hugging Face folders, as the fields of model.Config, and the other way round.

Five families can be read: gpt2, llama, mistral, mixtral and qwen2. A field that is left out has
transformers' default for the family. A model that model.py would compute in another way is refused
in one sentence.

    rotary positions    plain, or stretched for long contexts: linear, llama3 (Llama 3.1 to 3.3)
    biases              GPT-2's everywhere; none; on q, k and v alone (Qwen2)
    a sliding window    up to its length it is plain attention: the context ends there
"""

import json
import math
import pathlib
from dataclasses import asdict, dataclass

from harness import read_json
from harness.presets import checked

# Fields of model.Config, and what config.json calls them: (GPT-2's; Llama's and those after it)
NAMES = {
    "layers": ("n_layer", "num_hidden_layers"),
    "heads": ("n_head", "num_attention_heads"),
    "kv_heads": (None, "num_key_value_heads"),
    "width": ("n_embd", "hidden_size"),
    "hidden": ("n_inner", "intermediate_size"),
    "context": ("n_positions", "max_position_embeddings"),
    "vocab": ("vocab_size", "vocab_size"),
    "norm_eps": ("layer_norm_epsilon", "rms_norm_eps"),
    "tied": ("tie_word_embeddings", "tie_word_embeddings"),
    "rope_theta": (None, "rope_theta"),
}
GPT2_NAMES = {ours: name for ours, (name, _) in NAMES.items() if name}
LLAMA_NAMES = {ours: name for ours, (_, name) in NAMES.items()}
MIXTRAL_NAMES = LLAMA_NAMES | {"experts": "num_local_experts", "top_k": "num_experts_per_tok"}

# Fields that all models of a family have
GPT2 = dict(positions="learned", norm="layernorm", mlp="gelu", bias=True, experts=0)
ROTARY = dict(positions="rope", norm="rmsnorm", mlp="swiglu", bias=False)
LLAMA = ROTARY | dict(experts=0)
QWEN2 = LLAMA | dict(bias="qkv")
MIXTRAL = ROTARY | dict(shared=0, scores="softmax", renormalize=True)

# What transformers takes where config.json says nothing
PLAIN = dict(rms_norm_eps=1e-6, tie_word_embeddings=False, rope_theta=1e4, sliding_window=None)
GPT2_DEFAULTS = dict(n_inner=None, layer_norm_epsilon=1e-5, tie_word_embeddings=True)
MISTRAL_DEFAULTS = PLAIN | dict(num_key_value_heads=8, sliding_window=4096)
MIXTRAL_DEFAULTS = PLAIN | dict(num_key_value_heads=8, rope_theta=1e6, rms_norm_eps=1e-5)

# {model_type: (names, fields that all models have, defaults, class in transformers)}
FAMILIES = {
    "gpt2": (GPT2_NAMES, GPT2, GPT2_DEFAULTS, "GPT2LMHeadModel"),
    "llama": (LLAMA_NAMES, LLAMA, PLAIN | dict(num_key_value_heads=None), "LlamaForCausalLM"),
    "mistral": (LLAMA_NAMES, LLAMA, MISTRAL_DEFAULTS, "MistralForCausalLM"),
    "mixtral": (MIXTRAL_NAMES, MIXTRAL, MIXTRAL_DEFAULTS, "MixtralForCausalLM"),
    "qwen2": (LLAMA_NAMES, QWEN2, PLAIN | dict(num_key_value_heads=32), "Qwen2ForCausalLM"),
}

# The values that these may have
KNOWN = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),  # two names of one function
    "hidden_act": ("silu", "swish"),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "partial_rotary_factor": (1, None),
    "quantization_config": (None,),
}


# --- reading


def read(folder, context=None):
    """The fields of model.Config that a folder's config.json asks for. context: the longest
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
        readable = "gpt2, llama, mistral, mixtral and qwen2 can be read"
        raise ValueError(f"its model_type is {json.dumps(kind)}: {readable}")
    names, fixed, defaults, _ = FAMILIES[kind]
    check(content)
    theirs = defaults | content
    fields = dict(shared=0, scores="softmax", renormalize=True, rope_scaling=None)
    fields |= fixed | {ours: theirs[name] for ours, name in names.items()}
    fields["norm_eps"] = float(fields["norm_eps"])
    if fields.get("kv_heads") is None:
        fields["kv_heads"] = fields["heads"]
    if fields["hidden"] is None:  # GPT-2's
        fields["hidden"] = 4 * fields["width"]
    if kind != "gpt2":
        fields["rope_theta"], fields["rope_scaling"] = rope_of(theirs)
    if kind in ("mistral", "mixtral") and theirs["sliding_window"] is not None:
        window = theirs["sliding_window"]
        if context is not None and context > window:
            what = f"the model has a sliding window of {window}, which is not known here"
            raise ValueError(f"{what}: give at most --context {window}")
        fields["context"] = min(fields["context"], window)
    checked(fields)  # raises ValueError for sizes that contradict each other
    head_dim, width, heads = theirs.get("head_dim"), fields["width"], fields["heads"]
    if head_dim not in (None, width // heads):
        raise ValueError(f"heads of {head_dim}, not {width} / {heads}, are not known here")
    return fields


def check(content):
    """Raise ValueError for a field with a value that is not known here."""
    for name, values in KNOWN.items():
        if name in content and content[name] not in values:
            known = " or ".join(map(json.dumps, values))
            value = json.dumps(content[name])
            raise ValueError(f"{name} is {value}, and only {known} is known here")


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
    if rope_type != "llama3":
        known = "default, linear and llama3 are known here"
        raise ValueError(f"rotary positions of type {json.dumps(rope_type)}: {known}")
    factors = [float(rope[f"{kind}factor"]) for kind in ("", "low_freq_", "high_freq_")]
    name = "original_max_position_embeddings"
    original = theirs.get(name, rope.get(name, theirs["max_position_embeddings"]))
    return theta, RopeScaling("llama3", *factors, original)


# --- writing


def write(config):
    """config.json's content for a Config. Raises ValueError for a model that no known family is."""
    for kind, (names, fields, _, architecture) in FAMILIES.items():
        fits = all(getattr(config, name) == value for name, value in fields.items())
        if fits and (kind != "gpt2" or config.kv_heads == config.heads):
            break
    else:
        advice = "take --family gpt2 or llama as they are, and experts like Mixtral's"
        raise ValueError(f"this model is of no family that transformers knows: {advice}")
    content = dict(model_type=kind, architectures=[architecture])
    if kind == "gpt2":
        content |= dict(activation_function="gelu_new", attn_pdrop=0.0)
        content |= dict(embd_pdrop=config.dropout, resid_pdrop=config.dropout)
    else:
        content |= dict(hidden_act="silu", attention_bias=False, sliding_window=None)
    if config.rope_scaling is not None:
        scaling = asdict(config.rope_scaling).items()
        content["rope_scaling"] = {name: value for name, value in scaling if value is not None}
    return content | {name: getattr(config, ours) for ours, name in names.items()}
