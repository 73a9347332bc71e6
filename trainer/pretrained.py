"""Real weights in and out: Hugging Face folders of GPT-2, Llama, Mistral, Mixtral and Qwen2 models.

A folder holds config.json (hf_config.py reads it) and the weights: model.safetensors, or several
files and model.safetensors.index.json, which names them. `Folder` reads it. Asked for a parameter
by our name, it returns the whole parameter, made from the folder's tensors:

    ours                        Llama and those after it                 GPT-2 (stored (in, out))
    attn.qkv (q..q k v | ...)   q_proj, k_proj, v_proj                   c_attn, columns q | k | v
    mlp.gate, up, down          gate_proj, up_proj, down_proj            -, c_fc, c_proj
    mlp.experts.gate, up, down  block_sparse_moe.experts.N.w1, w3, w2,   -
    (E, out, in)                or mlp.experts.gate_up_proj, down_proj
    head.out                    lm_head, or the embedding if tied        the embedding

The model's filling calls it in the place of random numbers, so every layout is filled as ever: each
rank takes its piece of one whole parameter and drops the rest. `write` goes the other way, from
(name, whole tensor) pairs to a folder that transformers loads. Nothing is unpickled. Sizes in a
file's header are compared with what the model needs before memory is taken, and a folder with a
tensor that no parameter is made from is refused: it would be another model.

    python train.py --init-from FOLDER --context 256
    python train.py --export FOLDER
"""

import functools
import json
import os
import pathlib
import re
import tempfile

import torch
import torch.distributed as dist
from safetensors import SafetensorError

import harness
from harness import Refused, presets, say, tokenizer
from harness.placement import placement
from trainer import hf_config
from trainer.checkpoint import holdings, speaks
from trainer.folder_writer import FolderWriter, weights_in
from trainer.hf_config import GPT2, LLAMA

CONTEXT = 1024  # the default of --context is at most this
EXPORT_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


# --- what train.py calls


def add_flags(parser):
    g = parser.add_argument_group("real weights (see trainer/pretrained.py)")
    why = (
        "start from a Hugging Face folder of a GPT-2, Llama, Mistral, Mixtral or Qwen2 model, in "
        f"any layout; --context is then at most {CONTEXT} by default"
    )
    g.add_argument("--init-from", metavar="FOLDER", help=why)
    g.add_argument(
        "--export",
        metavar="FOLDER",
        help="write the model at the end as a folder that transformers loads",
    )
    why = "type of the weights in --export (default: --dtype)"
    g.add_argument("--export-dtype", choices=list(EXPORT_DTYPES), help=why)


def shape_of(args):
    """The fields of model.Config that --init-from asks for, or None without it. Refuses a folder
    that can't be read, and flags that ask for another model."""
    if not args.init_from:
        return None
    with harness.refusing():
        fields, window = hf_config.read(args.init_from)
    if args.context is None:
        fields["context"] = min(fields["context"], CONTEXT)
    if window is not None and (args.context or 0) > window:
        raise Refused(
            f"--context {args.context}: the model in {args.init_from} has a sliding window of "
            f"{window}, which is not known here: give at most --context {window}"
        )
    return fields


def check_family(args):
    """Refuse a --family or --preset that names another model than the one in args.shape."""
    where, fields = args.init_from or args.out, args.shape
    family = "gpt2" if fields["positions"] == "learned" else "llama"
    if args.family not in (None, family):
        raise Refused(
            f"--family {args.family}: the model in {where} is of the family {family}: leave "
            "--family out"
        )
    with harness.refusing():
        named = presets.configure(args.preset)
    for name in presets.PRESETS[args.preset]:
        if name not in ("context", "vocab") and getattr(named, name) != fields[name]:
            raise Refused(
                f"--preset {args.preset} has {name} {getattr(named, name)}, the model in {where} "
                f"{fields[name]}: leave --preset out"
            )


say_once = functools.cache(harness.say)


def check(args, config):
    """Refuse a folder that lacks weights, or an --export that can't be written. A dry run reads no
    weights: config.json is enough."""
    if args.export_dtype and not args.export:
        raise Refused("--export-dtype means nothing without --export: add that, or leave it out")
    try:
        weights = weights_in(args.export) if args.export else []
        # A run that torchrun starts again may meet its own. Which attempt this is, nobody knows yet
        if weights and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
            raise Refused(
                f"--export {args.export} holds weights already ({weights[0].name}): give another "
                "folder, or remove them"
            )
        if args.init_from and not (args.dry_run or args.plan):
            Folder(args.init_from, config).check(presets.parameter_shapes(config).items())
        if args.export:
            if not args.init_from:
                write_config(config)
            os.makedirs(args.export, exist_ok=True)
            tempfile.TemporaryFile(dir=args.export).close()
    except ValueError as e:
        raise Refused(str(e)) from e
    except OSError as e:
        raise Refused(
            f"--export {args.export} can't be written ({e.strerror}): give another folder"
        ) from e
    if args.init_from and args.context is None and not args.quiet:
        longest = read_config(args.init_from)["context"]
        if longest > config.context and os.environ.get("RANK", "0") == "0":
            say_once(
                f"--context is {config.context:,} by default; the model in {args.init_from} knows "
                f"{longest:,} positions"
            )


@torch.no_grad()
def export(run, model, optimizer, data_group):
    """Write the whole model from rank 0, parameter by parameter. Of the ranks that hold the same
    piece one puts it into a tensor of zeros, and the sum over all ranks is the whole. No rank has
    more than one parameter, and one file, at a time."""
    own = {
        name: (p, values, first)
        for name, p, values, first, *_ in holdings(model.named(), optimizer)
    }

    def wholes():
        for name, shape in presets.parameter_shapes(run.config).items():
            whole = torch.zeros(shape, dtype=run.dtype, device=run.device)
            if name in own and speaks(own[name][0], data_group, optimizer):
                put(whole, *own[name])
            dist.all_reduce(whole, group=run.members)
            yield name, whole

    args, encoding, parameters = run.args, run.corpus.encoding, wholes()
    if run.rank == 0:
        files = tokenizer.files_of(args, encoding)
        options = dict(
            dtype=EXPORT_DTYPES.get(args.export_dtype),
            source=args.init_from,
            fields=tokenizer.marks(args, encoding),
            files=files,
        )
        try:
            infinite = write(args.export, run.config, parameters, **options)
        except (OSError, SafetensorError) as e:
            run.incomplete = True
            reason = getattr(e, "strerror", None) or str(e).splitlines()[0]
            say(
                f"--export {args.export} can't be written ({reason}); the run goes on. With --out, "
                "--only-sample --export FOLDER writes the last checkpoint's weights"
            )
        else:
            names = ", ".join(path.name for path in files)
            run.print(f"exported to {args.export}{f' with {names}' if names else ''}")
            if infinite:
                say(
                    f"--export-dtype {args.export_dtype} can't hold {infinite:,} of the weights, "
                    f"which are infinite in {args.export}: export bfloat16 or float32"
                )
    for _ in parameters:  # the other ranks wait in their sums
        pass


def put(whole, parameter, values, first):
    """Write `values`, the elements of this rank's piece of a parameter from number `first` on,
    where they belong."""
    piece = torch.zeros(parameter.numel(), dtype=whole.dtype, device=whole.device)
    piece[first : first + len(values)] = values
    piece = piece.view(parameter.shape)
    for dim, (_, start, size) in placement(parameter)["cuts"].items():
        whole, piece = whole.narrow(dim, start, size), piece.narrow(dim, 0, size)
    whole.copy_(piece)


# --- config.json


def read_config(folder):
    """The fields of model.Config that a folder's config.json asks for, as a dict. Raises
    ValueError: see hf_config.read."""
    return hf_config.read(folder).fields


def write_config(config):
    """config.json's content for a Config; the other way round. Raises ValueError for a model that
    no known family is."""
    fields = {name: getattr(config, name) for name in GPT2}
    if fields == GPT2 and not config.experts:
        ours = dict(
            n_layer=config.layers,
            n_head=config.heads,
            n_embd=config.width,
            n_positions=config.context,
            n_inner=config.hidden,
            layer_norm_epsilon=config.norm_eps,
            activation_function="gelu_new",
            model_type="gpt2",
            architectures=["GPT2LMHeadModel"],
            embd_pdrop=config.dropout,
            resid_pdrop=config.dropout,
            attn_pdrop=0.0,
        )
        if config.kv_heads != config.heads:
            raise ValueError("a GPT-2 with grouped queries is not one that transformers knows")
    elif fields in (LLAMA, LLAMA | {"bias": "qkv"}):
        ours = dict(
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            hidden_size=config.width,
            intermediate_size=config.hidden,
            max_position_embeddings=config.context,
            rms_norm_eps=config.norm_eps,
            rope_theta=config.rope_theta,
            hidden_act="silu",
            attention_bias=False,
            model_type="llama",
            architectures=["LlamaForCausalLM"],
        )
        if config.rope_scaling is not None:
            ours["rope_scaling"] = config.rope_scaling.written()
        if config.bias == "qkv":
            if config.experts:
                raise ValueError("experts and biases on q, k and v are not of one known family")
            ours |= dict(model_type="qwen2", architectures=["Qwen2ForCausalLM"])
            ours |= dict(use_sliding_window=False)
            del ours["attention_bias"]
        if config.experts:
            if config.shared or config.scores != "softmax" or not config.renormalize:
                raise ValueError(
                    "shared experts, sigmoid scores and weights that do not sum to 1 are not "
                    "Mixtral's"
                )
            ours |= dict(
                num_local_experts=config.experts,
                num_experts_per_tok=config.top_k,
                sliding_window=None,
            )
            ours |= dict(model_type="mixtral", architectures=["MixtralForCausalLM"])
    else:
        raise ValueError(
            "this model is of no family that transformers knows: take --family gpt2 or llama as "
            "they are"
        )
    return ours | dict(vocab_size=config.vocab, tie_word_embeddings=config.tied)


# --- names


def join_heads(q, k, v, kv_heads):
    """Rows grouped by kv-head, q..q k v | q..q k v | ..., from separate q, k and v (rows, ...)."""
    return torch.cat([x.unflatten(0, (kv_heads, -1)) for x in (q, k, v)], dim=1).flatten(0, 1)


def split_heads(qkv, config):
    """The way back."""
    queries, size = config.heads // config.kv_heads, config.width // config.heads
    groups = qkv.unflatten(0, (config.kv_heads, queries + 2, size))
    return [x.flatten(0, 2) for x in groups.split((queries, 1, 1), dim=1)]


def theirs(name, config):
    """What a parameter of ours is made of: (their names, make ours from theirs, make theirs from
    ours)."""
    return (theirs_gpt2 if config.norm == "layernorm" else theirs_llama)(name, config)


def theirs_gpt2(name, config):
    ends = {"embed.token.weight": "wte.weight", "embed.position.weight": "wpe.weight"}
    ends |= {f"head.norm.{kind}": f"ln_f.{kind}" for kind in ("weight", "bias")}
    if name in ends:
        return [f"transformer.{ends[name]}"], lambda x: x, lambda x: [x]
    if name == "head.out.weight":
        return ["lm_head.weight"], lambda x: x, lambda x: [x]
    _, layer, *rest, kind = name.split(".")
    inner = ".".join(rest)
    names = {
        "attn_norm": "ln_1",
        "mlp_norm": "ln_2",
        "attn.qkv": "attn.c_attn",
        "attn.proj": "attn.c_proj",
    }
    names |= {"mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
    there = [f"transformer.h.{layer}.{names[inner]}.{kind}"]
    if inner == "attn.qkv":
        # t() leaves a bias as it is
        return (
            there,
            lambda x: join_heads(*x.t().chunk(3), config.heads),
            lambda x: [torch.cat(split_heads(x, config)).t()],
        )
    if kind == "weight" and "norm" not in inner:
        return there, lambda x: x.t(), lambda x: [x.t()]
    return there, lambda x: x, lambda x: [x]


def theirs_llama(name, config):
    ends = {
        "embed.token.weight": "model.embed_tokens.weight",
        "head.norm.weight": "model.norm.weight",
    }
    ends |= {"head.out.weight": "lm_head.weight"}
    if name in ends:
        return [ends[name]], lambda x: x, lambda x: [x]
    _, layer, *rest = name.removesuffix(".weight").split(".")
    inner, block = ".".join(rest), f"model.layers.{layer}."
    if inner in ("attn.qkv", "attn.qkv.bias"):
        kind = "bias" if inner.endswith("bias") else "weight"
        there = [f"{block}self_attn.{x}_proj.{kind}" for x in "qkv"]
        return (
            there,
            lambda *qkv: join_heads(*qkv, config.kv_heads),
            lambda x: split_heads(x, config),
        )
    if inner.startswith("mlp.experts."):
        which = {"gate": "w1", "up": "w3", "down": "w2"}[rest[-1]]
        there = [
            f"{block}block_sparse_moe.experts.{e}.{which}.weight" for e in range(config.experts)
        ]
        return there, lambda *each: torch.stack(each), lambda x: list(x)
    names = {
        "attn_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "attn.proj": "self_attn.o_proj",
    }
    names |= {f"mlp.{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")} | {
        "mlp.router": "block_sparse_moe.gate"
    }
    return [f"{block}{names[inner]}.weight"], lambda x: x, lambda x: [x]


def recorder_names(folder):
    """What proof/recorder.py needs to record a transformers model under our names: (names,
    outputs). folder: has its config.json. Raises ValueError for a mixture, whose tensors have
    several forms."""
    config = presets.configure(**read_config(folder))
    if config.experts:
        raise ValueError("a mixture's names are not known to the recorder: give it your own")
    names = {name: theirs(name, config)[:2] for name in presets.parameter_shapes(config)}
    if config.norm == "layernorm":
        embed, block = "transformer.drop", "transformer.h"
    else:
        embed, block = "model.embed_tokens", "model.layers"
    blocks = {f"blocks.{i}": f"{block}.{i}" for i in range(config.layers)}
    return names, {"embed": embed} | blocks


# --- reading

# What a file may have without a parameter of ours: tables that older versions of transformers saved
BUFFERS = {
    "gpt2": r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias",
    "llama": r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",
}
DTYPES = ("F64", "F32", "F16", "BF16")  # others, such as F8_E4M3, need scales


def wide(x):
    """In float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def files_of(folder):
    """The names of a folder's weight files. As in transformers model.safetensors goes before an
    index."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").exists() or not index.exists():
        return ["model.safetensors"]
    try:
        where = hf_config.read_json(index).get("weight_map")
    except OSError as e:
        raise ValueError(f"{index} can't be read ({e.strerror}): fetch it again") from e
    names = list(where.values()) if isinstance(where, dict) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{index} has no weight_map from tensors to files: fetch it again")
    for name in names:
        if pathlib.PurePath(name).name != name or "\0" in name:
            raise ValueError(f"{index} names {name!r}: weights must lie in the folder itself")
    return sorted(set(names))


class Folder:
    """The weights of a folder: read(name, shape) gives one whole parameter of ours, in float32 or
    wider.

    Raises ValueError, in one sentence, for a file or tensor that is missing, damaged, or of another
    size."""

    def __init__(self, folder, config):
        from safetensors import SafetensorError, safe_open

        self.folder, self.config = pathlib.Path(folder), config
        self.files = {}  # {tensor's name: its open file}
        self.seen = set()  # the names that `look` has been asked for
        for name in files_of(self.folder):
            try:
                file = safe_open(self.folder / name, framework="pt")
            except (OSError, SafetensorError) as e:
                raise ValueError(f"{self.folder / name} can't be read ({e}): fetch it again") from e
            twice = self.files.keys() & file.keys()
            if twice:
                raise ValueError(
                    f"{self.folder / name} has {min(twice)}, and so has another file of the "
                    "folder: leave one of them there"
                )
            self.files |= dict.fromkeys(file.keys(), file)

    def find(self, name):
        """Their tensor's name as it is in this folder. A model without its head was saved without
        the prefix, the hub's GPT-2 too; one tied matrix may have either of its names."""
        names = [name, name.removeprefix("transformer.").removeprefix("model.")]
        if self.config.tied and name == self.their("embed.token.weight"):
            names.append("lm_head.weight")
        return next((there for there in names if there in self.files), name)

    def their(self, name):
        """Their name of a parameter of ours that is one tensor there."""
        return theirs(name, self.config)[0][0]

    def tensor(self, name, shape=None):
        self.look(name, shape)
        return self.files[self.find(name)].get_tensor(self.find(name))

    def check(self, named):
        """Refuse a folder that lacks one of (our name, shape) pairs, or has more than them. Reads
        no values, but for a tied matrix that is there twice."""
        with torch.device("meta"):
            for name, shape in named:
                self.read(name, shape, self.look)
        buffer = BUFFERS["gpt2" if self.config.norm == "layernorm" else "llama"]
        rest = {name for name in self.files if not re.fullmatch(buffer, name)} - self.seen
        if self.config.tied and "lm_head.weight" in rest:
            self.check_tied()
            rest.remove("lm_head.weight")
        if rest:
            others = f" and {len(rest) - 1} more" if len(rest) > 1 else ""
            raise ValueError(
                f"{self.folder} has {min(rest)}{others}, which nothing here reads: it is not the "
                "model that its config.json describes"
            )

    def check_tied(self, rows=4096):
        """Refuse an output matrix that is not the embedding, though the config ties them."""
        embedding = self.find(self.their("embed.token.weight"))
        shapes = [list(self.look(name).shape) for name in (embedding, "lm_head.weight")]
        same = shapes[0] == shapes[1]
        a, b = (self.files[name].get_slice(name) for name in (embedding, "lm_head.weight"))
        for i in range(0, shapes[0][0], rows):
            same = same and torch.equal(wide(a[i : i + rows]), wide(b[i : i + rows]))
        if not same:
            raise ValueError(
                f"{self.folder} has an lm_head.weight that differs from {embedding}, though its "
                "config.json ties them: set tie_word_embeddings to false there"
            )

    def look(self, name, shape=None):
        """An empty tensor like the one of that name."""
        name = self.find(name)
        if name not in self.files:
            raise ValueError(
                f"{self.folder} has no {name}: it is not the model that its config.json describes"
            )
        self.seen.add(name)
        header = self.files[name].get_slice(name)
        there, dtype = header.get_shape(), header.get_dtype()
        if dtype not in DTYPES:
            raise ValueError(
                f"{self.folder}: {name} is of type {dtype}: give the model in bfloat16 or float32"
            )
        if shape is not None and list(there) != list(shape):
            raise ValueError(
                f"{self.folder}: {name} is {there}, not {list(shape)} as config.json says"
            )
        return torch.empty(there, device="meta")

    def read(self, name, shape, get=None):
        """A whole parameter of ours, of that shape. Learned positions may be fewer than there
        are."""
        get = get or self.tensor
        there, make, cut = theirs(name, self.config)
        stacked = name.split(".mlp.experts.")
        if len(stacked) == 2 and self.find(there[0]) not in self.files:
            return self.stacked(
                get, f"model.layers.{stacked[0].split('.')[1]}.mlp.experts.", stacked[1], shape
            )
        if name.endswith("mlp.router.weight") and self.find(there[0]) not in self.files:
            there = [there[0].replace("block_sparse_moe", "mlp")]
        if name == "embed.position.weight":
            every = get(there[0])
            there = list(every.shape)
            if len(there) != 2 or there[1:] != list(shape[1:]):
                raise ValueError(f"{self.folder}: the positions are {there}, not {list(shape)}")
            if there[0] < shape[0]:
                raise ValueError(
                    f"{self.folder} knows {there[0]} positions, not {shape[0]}: use a shorter "
                    "--context"
                )
            return wide(every[: shape[0]])
        with torch.device("meta"):
            shapes = [x.shape for x in cut(torch.empty(shape))]
        tensors = [get(*pair) for pair in zip(there, shapes)]
        return make(*map(wide, tensors)).contiguous()

    def draw(self, name, shape, init, seed):
        """In the place of model.draw: the folder's value in the place of a random one."""
        return self.read(name, shape)

    def stacked(self, get, prefix, which, shape):
        """Experts as transformers 5 holds them: gate above up in one tensor (E, 2 H, C)."""
        if which == "down":
            return wide(get(prefix + "down_proj", shape))
        both = get(prefix + "gate_up_proj", (shape[0], 2 * shape[1], shape[2]))
        return wide(both.chunk(2, dim=1)[which == "up"])


# --- writing


def write(
    folder, config, tensors, limit=2 << 30, *, dtype=None, source=None, fields=None, files=()
):
    """Write (our name, whole tensor) pairs as a folder that transformers loads, in files of at most
    about `limit` bytes, of which one at a time is in memory.

    dtype   of the weights (default: as they are)
    source  the folder that the model comes from. Its config.json is kept, and what a shorter
            --context leaves of learned positions comes from its weights
    fields  of config.json, in the place of others
    files   paths of other files to copy: the tokenizer's

    Returns how many weights are infinite in `dtype` only. Raises OSError, and ValueError for a
    model of no known family."""
    if source:
        content = json.loads((pathlib.Path(source) / "config.json").read_text())
        content.pop("quantization_config", None)  # these weights are plain
        if "max_position_embeddings" in content:  # rotary: --context may be longer
            longest = max(config.context, content["max_position_embeddings"])
            content["max_position_embeddings"] = longest
        source = Folder(source, config)
    else:
        content = write_config(config)
    writer, infinite = FolderWriter(folder, limit), 0
    for name, tensor in tensors:
        if source and name == "embed.position.weight":
            every = source.tensor("transformer.wpe.weight")
            tensor = torch.cat((tensor.cpu(), every[len(tensor) :].to(tensor.dtype)))
        there, _, cut = theirs(name, config)
        for key, part in zip(there, cut(tensor)):
            written = part.to("cpu", dtype)
            if dtype:
                infinite += (part.isfinite().cpu() & ~written.isfinite()).sum().item()
            writer.add(key, written)
            dtype_name = str(written.dtype).removeprefix("torch.")
    types = {"dtype": dtype_name, "torch_dtype": dtype_name}
    writer.finish(content | (fields or {}) | types, files)
    return infinite
