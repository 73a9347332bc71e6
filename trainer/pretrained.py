"""Real weights in and out: Hugging Face folders of the families that hf_config.py lists.

A folder holds config.json (hf_config.py reads it) and the weights: model.safetensors, or several
files and model.safetensors.index.json, which names them. `Folder` reads it. Asked for a parameter
by our name, it returns the whole parameter, made from the folder's tensors:

    ours                        Llama and those after it                 GPT-2 (stored (in, out))
    attn.qkv (q..q k v | ...)   q_proj, k_proj, v_proj                   c_attn, columns q | k | v
    mlp.gate, up, down          gate_proj, up_proj, down_proj            -, c_fc, c_proj
    mlp.experts.gate, up, down  experts.N.gate_proj, up_proj, down_proj  -
    (E, out, in)                (Mixtral: w1, w3, w2)
    head.out                    lm_head, or the embedding if tied        the embedding

The model's filling calls it in the place of random numbers, so every layout is filled as ever: each
rank takes its piece of one whole parameter and drops the rest. `write` goes the other way. Nothing
is unpickled. Sizes in a file's header are compared with the model's before memory is taken. A
folder with a tensor that no parameter is made from is refused: it would be another model.

    python train.py --init-from FOLDER --context 256
    python train.py --export FOLDER
"""

import json
import pathlib
import re

import torch
from safetensors import SafetensorError, safe_open

import harness
from harness import Refused, check_folder, files, presets, read_json
from trainer import checkpoint, hf_config, saving, tokenizer

CONTEXT = 1024  # the default of --context is at most this


# --- what train.py calls


def add_flags(parser):
    g = parser.add_argument_group("real weights (see trainer/pretrained.py)")
    why = f"start from a Hugging Face folder of one of {', '.join(hf_config.FAMILIES)}, in any "
    why += f"layout; --context is then at most {CONTEXT} by default"
    g.add_argument("--init-from", metavar="FOLDER", help=why)
    why = "write the model at the end as a folder that transformers loads"
    g.add_argument("--export", metavar="FOLDER", help=why)
    why = "type of the weights in --export (default: --dtype)"
    g.add_argument("--export-dtype", choices=["float32", "bfloat16", "float16"], help=why)


def shape_of(args):
    """The fields of FamilyConfig that --init-from asks for, or None without it. Refuses a folder
    that can't be read, and flags that ask for another model."""
    if not args.init_from:
        return None
    for flag, default in (("family", None), ("preset", "tiny")):
        value = getattr(args, flag)
        if value != default:
            what = f"the model in {args.init_from} says itself what it is"
            raise Refused(f"--{flag} {value}: {what}: leave --{flag} out")
    with harness.refusing():
        fields = hf_config.read(args.init_from, args.context)
    if args.context is None:
        fields["context"] = min(fields["context"], CONTEXT)
    return fields


def check(args, config):
    """Refuse a folder that lacks weights, or an --export that can't be written. A dry run reads no
    weights: config.json is enough."""
    with harness.refusing():
        if args.init_from and not (args.dry_run or args.plan):
            Folder(args.init_from, config).check(presets.parameter_shapes(config))
        if args.export and not args.init_from:
            hf_config.write(config)
    if not args.export:
        return
    check_folder("--export", args.export)
    found = model_in(args.export)
    if found and not saving.may_restart():  # else it may be this run's own
        there = f"a model already ({found[0].name})"
        raise Refused(f"--export {args.export} holds {there}: give another folder, or remove it")


def export(run, model, optimizer, island):
    """Write the whole model from rank 0, whose memory it must fit. island: as of whole_weights."""
    args = run.args
    if not args.export:
        return
    parameters = checkpoint.whole_weights(run, model, optimizer, island)
    if run.rank == 0:
        dtype = args.export_dtype and getattr(torch, args.export_dtype)
        try:
            files, fields = tokenizer.exported(args, run.corpus.encoding)
            write(args.export, run.config, parameters, dtype, args.init_from, fields, files)
        except (OSError, ValueError) as e:
            reason = getattr(e, "strerror", None) or e
            problem = f"--export {args.export} can't be written ({reason})"
            advice = "with --out, --only-sample --export FOLDER writes the last checkpoint's"
            raise Refused(f"{problem}; {advice} weights", code=1, alone=True) from e
        run.print(f"exported to {args.export}{' with ' if files else ''}{', '.join(files)}")
    for _ in parameters:  # the other ranks wait in their sums
        pass


# --- names

# What stands before .weight or .bias, of ours: (GPT-2's; Llama's and those after it)
NAMES = {
    "embed.token": ("transformer.wte", "model.embed_tokens"),
    "embed.position": ("transformer.wpe", None),
    "attn_norm": ("ln_1", "input_layernorm"),
    "attn.qkv": ("attn.c_attn", None),
    "attn.q_norm": (None, "self_attn.q_norm"),
    "attn.k_norm": (None, "self_attn.k_norm"),
    "attn.proj": ("attn.c_proj", "self_attn.o_proj"),
    "mlp_norm": ("ln_2", "post_attention_layernorm"),
    "mlp.gate": (None, "mlp.gate_proj"),
    "mlp.up": ("mlp.c_fc", "mlp.up_proj"),
    "mlp.down": ("mlp.c_proj", "mlp.down_proj"),
    "mlp.router": (None, "mlp.gate"),
    "mlp.shared_gate": (None, "mlp.shared_expert_gate"),
    "mlp.shared.gate": (None, "mlp.shared_expert.gate_proj"),
    "mlp.shared.up": (None, "mlp.shared_expert.up_proj"),
    "mlp.shared.down": (None, "mlp.shared_expert.down_proj"),
    "head.norm": ("transformer.ln_f", "model.norm"),
    "head.out": ("lm_head", "lm_head"),
}
# Mixtral's are others
EXPERTS = "mlp.experts", {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
MIXTRAL_EXPERTS = "block_sparse_moe.experts", {"gate": "w1", "up": "w3", "down": "w2"}
MIXTRAL = {"mlp.router": (None, "block_sparse_moe.gate")}
# Norms after attention and MLP: OLMo 2's
NORMS_AFTER = {
    "attn_norm": (None, "post_attention_layernorm"),
    "mlp_norm": (None, "post_feedforward_layernorm"),
}


def theirs(name, config):
    """What a parameter of ours is made of: (their names, make ours from theirs, make theirs from
    ours)."""
    family, block, inner = hf_config.family_of(config), "", name
    is_gpt2 = family == "gpt2"
    if name.startswith("blocks."):
        _, layer, inner = name.split(".", 2)
        block = f"transformer.h.{layer}." if is_gpt2 else f"model.layers.{layer}."
    module, kind = inner.rsplit(".", 1)
    if module == "mlp.experts":
        experts, projections = MIXTRAL_EXPERTS if family == "mixtral" else EXPERTS
        last = f"{projections[kind]}.weight"
        names = [f"{block}{experts}.{expert}.{last}" for expert in range(config.experts)]
        return names, lambda *each: torch.stack(each), list
    if module == "attn.qkv" and not is_gpt2:
        names = [f"{block}self_attn.{x}_proj.{kind}" for x in "qkv"]
        return names, lambda *qkv: join_heads(*qkv, config), lambda x: split_heads(x, config)
    table = NAMES | (MIXTRAL if family == "mixtral" else {})
    of_gpt2, of_llama = (table | (NORMS_AFTER if config.norm_after else {}))[module]
    names = [f"{block}{of_gpt2 if is_gpt2 else of_llama}.{kind}"]
    if module == "attn.qkv":  # t() leaves a bias as it is
        cut = lambda x: [torch.cat(split_heads(x, config)).t()]  # noqa: E731
        return names, lambda x: join_heads(*x.t().chunk(3), config), cut
    if is_gpt2 and module.startswith(("attn.", "mlp.")):
        return names, lambda x: x.t(), lambda x: [x.t()]
    return names, lambda x: x, lambda x: [x]


def join_heads(q, k, v, config):
    """Rows grouped by kv-head, q..q k v | q..q k v | ..., from separate q, k and v (rows, ...)."""
    groups = [x.unflatten(0, (config.kv_heads, -1)) for x in (q, k, v)]
    return torch.cat(groups, dim=1).flatten(0, 1)


def split_heads(qkv, config):
    """The way back."""
    queries = config.heads // config.kv_heads
    groups = qkv.unflatten(0, (config.kv_heads, queries + 2, config.head_dim))
    return [x.flatten(0, 2) for x in groups.split((queries, 1, 1), dim=1)]


def recorder_names(folder):
    """What proof/recorder.py needs to record a transformers model under our names: (names,
    outputs). folder: has its config.json. Raises ValueError for a mixture, whose tensors have
    several forms."""
    config = presets.configure(**hf_config.read(folder))
    if config.experts:
        raise ValueError("a mixture's names are not known to the recorder: give it your own")
    names = {name: theirs(name, config)[:2] for name in presets.parameter_shapes(config)}
    embed, block = "model.embed_tokens", "model.layers"
    if config.norm == "layernorm":
        embed, block = "transformer.drop", "transformer.h"
    blocks = {f"blocks.{i}": f"{block}.{i}" for i in range(config.layers)}
    return names, {"embed": embed} | blocks


# --- reading

# What a file may have without a parameter of ours: tables that older versions of transformers saved
BUFFERS = r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias"
BUFFERS += r"|(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"
HEAD = "lm_head.weight"
CONVERT = "from transformers import AutoModelForCausalLM as M; "
CONVERT += "M.from_pretrained({0!r}, dtype='auto').save_pretrained({0!r})"


def files_of(folder):
    """The names of a folder's weight files. As in transformers, model.safetensors goes first."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").exists() or not index.exists():
        return ["model.safetensors"]
    return sorted(set(read_json(index).get("weight_map", {}).values()))


class Folder:
    """The weights of a folder: draw(name, shape) gives one whole parameter of ours, in float32 or
    wider.

    Raises ValueError, in one sentence, for a file or tensor that is missing, damaged, or of another
    size."""

    def __init__(self, folder, config):
        self.folder, self.config = pathlib.Path(folder), config
        self.files = {}  # {tensor's name: (its open file, its name there)}
        found = files_of(self.folder)
        pickled = sorted(path.name for path in self.folder.glob("pytorch_model*.bin*"))
        if pickled and not (self.folder / found[0]).exists():
            advice = f'python -c "{CONVERT.format(str(self.folder))}"'
            what = f"{self.folder} has its weights as {pickled[0]}, and only safetensors are read"
            raise ValueError(f"{what}: convert them once with {advice}")
        for name in found:
            try:
                files.check_regular(self.folder / name)
                file = safe_open(self.folder / name, framework="pt")
            except (OSError, SafetensorError) as e:
                reason = getattr(e, "strerror", None) or e
                what = f"{self.folder / name} can't be read ({reason})"
                raise ValueError(f"{what}: fetch it again") from e
            for there in file.keys():
                if not re.fullmatch(BUFFERS, there):
                    self.files[self.full_name(there)] = file, there
        if config.tied and HEAD in self.files:  # one matrix, of which either may be there
            [embedding], *_ = theirs("embed.token.weight", config)
            self.files.setdefault(embedding, self.files[HEAD])

    def full_name(self, there):
        """Of a tensor in a file. A model without its head was saved without the prefix, the hub's
        GPT-2 too."""
        prefix = "transformer." if self.config.norm == "layernorm" else "model."
        return there if there.startswith((prefix, "lm_head.")) else prefix + there

    def shape(self, name):
        """The shape of one of their tensors."""
        if name not in self.files:
            what = "it is not the model that its config.json describes"
            raise ValueError(f"{self.folder} has no {name}: {what}")
        file, there = self.files[name]
        return file.get_slice(there).get_shape()

    def sources(self, name, shape):
        """What a parameter of ours, of that shape, is made of here: ([(their name, their shape)],
        make ours from theirs)."""
        names, make, cut = theirs(name, self.config)
        with torch.device("meta"):
            shapes = [list(x.shape) for x in cut(torch.empty(shape))]
        if name == "embed.position.weight":  # they may be more than the context
            there = self.shape(names[0])
            if there[0] < shape[0]:
                what = f"{self.folder} knows {there[0]} positions, not {shape[0]}"
                raise ValueError(f"{what}: use a shorter --context")
            return [(names[0], there)], lambda x: x[: shape[0]]
        return zip(names, shapes), make

    def check(self, shapes):
        """Refuse a folder that has fewer parameters than {our name: shape}, or more."""
        expected = {}
        for name, shape in shapes.items():
            expected |= dict(self.sources(name, shape)[0])
        for name, shape in expected.items():
            there = self.shape(name)
            if there != shape:
                what = f"{self.folder}: {name} is {there}, not {shape}"
                raise ValueError(f"{what} as config.json says")
        extra = self.files.keys() - expected.keys()
        if self.config.tied and HEAD in extra:  # transformers does not tie two that differ
            [embedding], *_ = theirs("embed.token.weight", self.config)
            if not torch.equal(self.tensor(HEAD), self.tensor(embedding)):
                what = f"{HEAD} is not {embedding}, though its config.json ties them"
                advice = 'transformers does not: say "tie_word_embeddings": false there'
                raise ValueError(f"{self.folder}: {what}; {advice}")
            extra -= {HEAD}
        if extra:
            others = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
            what = f"{self.folder} has {min(extra)}{others}, which nothing here reads"
            raise ValueError(f"{what}: it is not the model that its config.json describes")

    def tensor(self, name):
        """One of their tensors, in float32 at least."""
        file, there = self.files[name]
        x = file.get_tensor(there)
        return x.to(torch.promote_types(x.dtype, torch.float32))

    def draw(self, name, shape, init=None, seed=None):
        """A whole parameter of ours, in the place of initialize.draw's random numbers."""
        sources, make = self.sources(name, shape)
        return make(*(self.tensor(there) for there, _ in sources)).contiguous()


# --- writing


def model_in(folder):
    """The files of a model that a folder holds, by their paths: config.json, then weights."""
    folder = pathlib.Path(folder)
    return sorted([*folder.glob("config.json"), *folder.glob("*.safetensors*")])


def write(folder, config, tensors, dtype=None, source=None, fields=(), files=()):
    """Write (our name, whole tensor) pairs as a folder that transformers loads.

    dtype   of the weights (default: as they are)
    source  the folder that the model comes from. Its config.json is kept, and what a shorter
            --context leaves of learned positions comes from its weights
    fields  of config.json, in the place of others
    files   {name: content} of other files: the tokenizer's

    The folder never loads half old and half new. Without config.json neither transformers nor
    --init-from loads anything: so an old model's goes first, and the new one comes last, when all
    else is on the disk. Raises OSError, and ValueError for a model of no known family."""
    if source:
        content = read_json(pathlib.Path(source) / "config.json")
        content.pop("quantization_config", None)  # null: these weights are plain
        if "max_position_embeddings" in content:  # rotary: --context may be longer
            longest = max(config.context, content["max_position_embeddings"])
            content["max_position_embeddings"] = longest
        source = Folder(source, config)
    else:
        content = hf_config.write(config)
    weights = {}
    for name, tensor in tensors:
        if source and name == "embed.position.weight":
            every = source.tensor("transformer.wpe.weight")
            tensor = torch.cat((tensor.cpu(), every[len(tensor) :].to(tensor.dtype)))
        names, _, cut = theirs(name, config)
        for there, part in zip(names, cut(tensor)):
            weights[there] = part.to("cpu", dtype).contiguous()
    written = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    content |= dict(fields) | {"dtype": written, "torch_dtype": written}

    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for path in model_in(folder):
        path.unlink()
        checkpoint.sync(folder)
    checkpoint.write_tensors(folder / "model.safetensors", weights, {"format": "pt"})
    for name, file in dict(files).items():
        checkpoint.write(folder / name, file)
    checkpoint.sync(folder)
    checkpoint.write(folder / "config.json", json.dumps(content, indent=1).encode())
