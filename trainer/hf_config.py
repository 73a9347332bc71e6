"""config.json of Hugging Face folders, as the fields of model.Config, and the other way round.

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
from dataclasses import asdict, dataclass

from harness import outputs
from model import Config

GPT2 = dict(positions="learned", norm="layernorm", mlp="gelu", bias=True)
LLAMA = dict(positions="rope", norm="rmsnorm", mlp="swiglu", bias=False)

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

# What transformers takes where config.json says nothing
PLAIN = dict(rms_norm_eps=1e-6, tie_word_embeddings=False, rope_theta=1e4, sliding_window=None)
DEFAULTS = {
    "gpt2": dict(n_inner=None, layer_norm_epsilon=1e-5, tie_word_embeddings=True),
    "llama": PLAIN | dict(num_key_value_heads=None),
    "mistral": PLAIN | dict(num_key_value_heads=8, sliding_window=4096),
    "mixtral": PLAIN | dict(num_key_value_heads=8, rope_theta=1e6, rms_norm_eps=1e-5),
    "qwen2": PLAIN | dict(num_key_value_heads=32),
}

# The values that these may have
KNOWN = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),  # two names of one function
    "hidden_act": ("silu", "swish"),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "tie_word_embeddings": (True, False),
    "use_sliding_window": (False,),
    "partial_rotary_factor": (1, None),
    "quantization_config": (None,),
}
# What others must be, and a test of it. NaN passes none
INTEGER = "a whole number from 0 to 2**31", lambda x: type(x) is int and 0 <= x <= 2**31
NUMBER = "a number from 1e-12 to 1e12", lambda x: type(x) in (int, float) and 1e-12 <= x <= 1e12
OBJECT = "an object", lambda x: type(x) is dict
TYPES = dict.fromkeys([*GPT2_NAMES.values(), *MIXTRAL_NAMES.values()], INTEGER)
TYPES |= dict.fromkeys(["head_dim", "sliding_window", "original_max_position_embeddings"], INTEGER)
TYPES |= dict.fromkeys(["layer_norm_epsilon", "rms_norm_eps", "rope_theta"], NUMBER)
TYPES |= dict.fromkeys(["factor", "low_freq_factor", "high_freq_factor"], NUMBER)
TYPES |= dict.fromkeys(["rope_scaling", "rope_parameters"], OBJECT)
TYPES["layer_types"] = "a list", lambda x: type(x) is list
# These may be null
NULL = ["n_inner", "num_key_value_heads", "head_dim", "sliding_window", "layer_types"]
NULL += ["rope_scaling", "rope_parameters"]


def check(content, where=""):
    """Raise ValueError for a field that is not of its type, or not one of the values known here."""
    for name, value in content.items():
        if name in KNOWN and value not in KNOWN[name]:
            known = " or ".join(map(shown, KNOWN[name]))
            raise ValueError(f"{where}{name} is {shown(value)}, and only {known} is known here")
        if name in KNOWN or name not in TYPES or value is None and name in NULL:
            continue
        words, fits = TYPES[name]
        if not fits(value):
            raise ValueError(f"{where}{name} is {shown(value)}, not {words}")


def shown(value):
    """A value from JSON in few words."""
    if isinstance(value, (dict, list)):
        return "a list" if isinstance(value, list) else "an object"
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


# --- reading


def read(folder):
    """(the fields of model.Config that a folder's config.json asks for; the longest sequence that
    its sliding window lets it see whole, or None). Raises ValueError, in one sentence, for what is
    missing, of the wrong type, or not what our model does."""
    path = pathlib.Path(folder) / "config.json"
    theirs = read_json(path)
    try:
        return translate(theirs)
    except ValueError as e:
        raise ValueError(f"{path}: {e}") from e


def read_json(path):
    """The object in a JSON file of a folder. Raises ValueError for anything else."""
    try:
        content = json.loads(outputs.read(path))
    except OSError as e:
        advice = "give a folder with config.json and safetensors files"
        raise ValueError(f"{path} can't be read ({e.strerror}): {advice}") from e
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{path} is no JSON: fetch it again") from e
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds {shown(content)}, not a JSON object: fetch it again")
    return content


def translate(content):
    """See `read`. content: of a config.json."""
    kind = content.get("model_type")
    if kind not in [*DEFAULTS]:
        readable = "gpt2, llama, mistral, mixtral and qwen2 can be read"
        raise ValueError(f"its model_type is {shown(kind)}: {readable}")
    check(content)
    theirs = DEFAULTS[kind] | content
    names = {"gpt2": GPT2_NAMES, "mixtral": MIXTRAL_NAMES}.get(kind, LLAMA_NAMES)
    for name in names.values():
        if name not in theirs:
            raise ValueError(f"it has no {name}: fetch it again")
    fields = dict(experts=0, shared=0, scores="softmax", renormalize=True, rope_scaling=None)
    fields |= {ours: theirs[name] for ours, name in names.items()}
    fields["norm_eps"], window = float(fields["norm_eps"]), None
    if fields.get("kv_heads") is None:
        fields["kv_heads"] = fields["heads"]
    if kind == "gpt2":
        fields |= GPT2
        if fields["hidden"] is None:
            fields["hidden"] = 4 * fields["width"]
    else:
        fields |= LLAMA | {"bias": "qkv" if kind == "qwen2" else False}
        fields["rope_theta"], fields["rope_scaling"] = rope_of(theirs)
        window = theirs["sliding_window"] if kind != "qwen2" else None
        if window is not None:
            fields["context"] = min(fields["context"], window)
    Config(**fields)  # raises ValueError for sizes that contradict each other
    head_dim, width, heads = theirs.get("head_dim"), fields["width"], fields["heads"]
    if head_dim not in (None, width // heads):
        raise ValueError(f"heads of {head_dim}, not {width} / {heads}, are not known here")
    for word in theirs.get("layer_types") or ():
        if word not in ("full_attention", "sliding_attention"):
            raise ValueError(f"layers of the type {shown(word)} are not known here")
    return fields, window


# --- rotary positions

# What a type needs beside its name
ROPE_TYPES = {
    "default": [],
    "linear": ["factor"],
    "llama3": ["factor", "low_freq_factor", "high_freq_factor"],
}


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


def rope_of(theirs):
    """(theta, RopeScaling or None). As in transformers, rope_scaling goes before rope_parameters,
    and the theta in it before the one beside it."""
    where = "rope_scaling" if theirs.get("rope_scaling") else "rope_parameters"
    rope = theirs.get(where) or {}
    check(rope, f"{where}'s ")
    if any(isinstance(value, dict) for value in rope.values()):
        raise ValueError(f"{where} differs from layer to layer, which is not known here")
    theta = float(rope.get("rope_theta", theirs["rope_theta"]))
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in [*ROPE_TYPES]:
        known = "default, linear and llama3 are known here"
        raise ValueError(f"rotary positions of type {shown(rope_type)}: {known}")
    for name in ROPE_TYPES[rope_type]:
        if name not in rope:
            raise ValueError(f"{where} has no {name}: fetch it again")
    if rope_type == "default":
        return theta, None
    values = {name: float(rope[name]) for name in ROPE_TYPES[rope_type]}
    if rope_type == "llama3":
        if values["low_freq_factor"] >= values["high_freq_factor"]:
            raise ValueError(f"{where}'s low_freq_factor must be below its high_freq_factor")
        name = "original_max_position_embeddings"
        values[name] = theirs.get(name, rope.get(name, theirs["max_position_embeddings"]))
    return theta, RopeScaling(rope_type, **values)


# --- writing


def write(config):
    """config.json's content for a Config. Raises ValueError for a model that no known family is."""
    fields = {name: getattr(config, name) for name in GPT2}
    kind, names, architecture = "llama", LLAMA_NAMES, "LlamaForCausalLM"
    content = dict(hidden_act="silu", attention_bias=False)
    if fields == GPT2 and not config.experts:
        if config.kv_heads != config.heads:
            raise ValueError("a GPT-2 with grouped queries is not one that transformers knows")
        kind, names, architecture = "gpt2", GPT2_NAMES, "GPT2LMHeadModel"
        content = dict(activation_function="gelu_new", attn_pdrop=0.0)
        content |= dict(embd_pdrop=config.dropout, resid_pdrop=config.dropout)
    elif fields == LLAMA | {"bias": "qkv"}:
        if config.experts:
            raise ValueError("experts and biases on q, k and v are not of one known family")
        kind, architecture = "qwen2", "Qwen2ForCausalLM"
        content = dict(hidden_act="silu", use_sliding_window=False)
    elif fields != LLAMA:
        advice = "take --family gpt2 or llama as they are"
        raise ValueError(f"this model is of no family that transformers knows: {advice}")
    elif config.experts:
        if config.shared or config.scores != "softmax" or not config.renormalize:
            others = "shared experts, sigmoid scores and weights that do not sum to 1"
            raise ValueError(f"{others} are not Mixtral's")
        kind, names, architecture = "mixtral", MIXTRAL_NAMES, "MixtralForCausalLM"
        content["sliding_window"] = None
    if config.rope_scaling is not None:
        content["rope_scaling"] = config.rope_scaling.written()
    content |= {name: getattr(config, ours) for ours, name in names.items()}
    return content | dict(model_type=kind, architectures=[architecture])
