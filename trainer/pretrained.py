"""Real weights in and out: Hugging Face folders of GPT-2, Llama and Mixtral models.

A folder holds config.json and the weights: model.safetensors, or several files and
model.safetensors.index.json, which says what is where. `Folder` reads it. Asked for a parameter by
our name, it returns the whole parameter, made from the folder's tensors:

    ours                        Llama, Mixtral                           GPT-2 (stored (in, out))
    attn.qkv (q..q k v | ...)   q_proj, k_proj, v_proj                   c_attn, columns q | k | v
    mlp.gate, up, down          gate_proj, up_proj, down_proj            -, c_fc, c_proj
    mlp.experts.gate, up, down  block_sparse_moe.experts.N.w1, w3, w2,   -
    (E, out, in)                or mlp.experts.gate_up_proj, down_proj
    head.out                    lm_head, or the embedding if tied        the embedding

The model's filling calls it in the place of random numbers, so every layout is filled as ever: each
rank takes its piece of one whole parameter and drops the rest. `write` goes the other way, from
(name, whole tensor) pairs to a folder that transformers loads. Nothing is unpickled. Sizes in a
file's header are compared with what the model needs before memory is taken.

    python train.py --init-from FOLDER --tokenizer gpt2 --context 256
    python train.py --export FOLDER
"""

import json
import os
import pathlib
import shutil

import torch
import torch.distributed as dist

from harness import Refused
from harness.placement import placement
from harness.presets import configure, parameter_shapes
from trainer.checkpoint import holdings, speaks

GPT2 = dict(positions="learned", norm="layernorm", mlp="gelu", bias=True)
LLAMA = dict(positions="rope", norm="rmsnorm", mlp="swiglu", bias=False)


# --- what train.py calls


def add_flags(parser):
    g = parser.add_argument_group("real weights (see trainer/pretrained.py)")
    why = "start from a Hugging Face folder of a GPT-2, Llama or Mixtral model, in any layout"
    g.add_argument("--init-from", metavar="FOLDER", help=why)
    g.add_argument(
        "--export",
        metavar="FOLDER",
        help="write the model at the end as a folder that transformers loads",
    )


def shape_of(args):
    """The fields of model.Config that --init-from asks for, or None without it. Refuses a folder
    that can't be read."""
    try:
        return read_config(args.init_from) if args.init_from else None
    except ValueError as e:
        raise Refused(str(e)) from e


def check(args, config):
    """Refuse a folder that lacks weights, or an --export that can't be written."""
    try:
        if args.init_from:
            Folder(args.init_from, config).check(parameter_shapes(config).items())
        if args.export:
            write_config(config)
            os.makedirs(args.export, exist_ok=True)
    except ValueError as e:
        raise Refused(str(e)) from e
    except OSError as e:
        raise Refused(
            f"--export {args.export} can't be written ({e.strerror}): give another folder"
        ) from e


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
        for name, shape in parameter_shapes(run.config).items():
            whole = torch.zeros(shape, dtype=run.dtype, device=run.device)
            if name in own and speaks(own[name][0], data_group, optimizer):
                put(whole, *own[name])
            dist.all_reduce(whole)
            yield name, whole

    if run.rank == 0:
        write(run.args.export, run.config, wholes())
        run.print(f"exported to {run.args.export}")
    else:
        for _ in wholes():
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
    ValueError, in one sentence, for what is missing, or what our model does not do."""
    path = pathlib.Path(folder) / "config.json"
    try:
        theirs = json.loads(path.read_text())
    except OSError as e:
        raise ValueError(
            f"{path} can't be read ({e.strerror}): give a folder with config.json and safetensors "
            "files"
        ) from e
    except ValueError as e:
        raise ValueError(f"{path} is no JSON: fetch it again") from e
    kind = theirs.get("model_type")
    try:
        if kind == "gpt2":
            return of_gpt2(theirs)
        if kind in ("llama", "mixtral"):
            return of_llama(theirs)
    except KeyError as e:
        raise ValueError(f"{path} has no {e.args[0]}: fetch it again") from e
    raise ValueError(f"{path} is of a {kind!r} model: gpt2, llama and mixtral can be read")


def of_gpt2(theirs):
    if theirs.get("activation_function", "gelu_new") != "gelu_new":
        raise ValueError(f"activation {theirs['activation_function']!r} is not GPT-2's gelu_new")
    names = dict(
        layers="n_layer", heads="n_head", width="n_embd", context="n_positions", vocab="vocab_size"
    )
    ours = {name: theirs[there] for name, there in names.items()}
    hidden, tied = (
        theirs.get("n_inner") or 4 * ours["width"],
        theirs.get("tie_word_embeddings", True),
    )
    return (
        GPT2
        | ours
        | dict(
            hidden=hidden,
            kv_heads=ours["heads"],
            tied=tied,
            norm_eps=theirs.get("layer_norm_epsilon", 1e-5),
        )
    )


def of_llama(theirs):
    rope = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise ValueError(
            f"rotary positions of type {rope.get('rope_type', rope.get('type'))!r}: only the "
            "plain ones are known here"
        )
    if (
        theirs.get("hidden_act", "silu") != "silu"
        or theirs.get("attention_bias")
        or theirs.get("mlp_bias")
    ):
        raise ValueError(
            "an activation other than silu, or biases: this Llama is not one that we know"
        )
    names = dict(
        layers="num_hidden_layers",
        heads="num_attention_heads",
        width="hidden_size",
        hidden="intermediate_size",
    )
    names |= dict(context="max_position_embeddings", vocab="vocab_size")
    ours = {name: theirs[there] for name, there in names.items()}
    if theirs.get("head_dim") not in (None, ours["width"] // ours["heads"]):
        raise ValueError(
            f"heads of {theirs['head_dim']}, not {ours['width']} / {ours['heads']}, are not known "
            "here"
        )
    if theirs.get("sliding_window"):
        raise ValueError("attention in a sliding window is not known here")
    ours["kv_heads"] = theirs.get("num_key_value_heads") or ours["heads"]
    ours["rope_theta"] = float(theirs.get("rope_theta") or rope.get("rope_theta", 10000.0))
    ours |= dict(
        tied=bool(theirs.get("tie_word_embeddings", False)),
        norm_eps=theirs.get("rms_norm_eps", 1e-6),
    )
    if theirs["model_type"] == "mixtral":
        ours |= dict(experts=theirs["num_local_experts"], top_k=theirs["num_experts_per_tok"])
    return LLAMA | ours


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
    elif fields == LLAMA:
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
    if inner == "attn.qkv":
        there = [f"{block}self_attn.{x}_proj.weight" for x in "qkv"]
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
    """What harness/recorder.py needs to record a transformers model under our names: (names,
    outputs). folder: has its config.json. Raises ValueError for a mixture, whose tensors have
    several forms."""
    config = configure(**read_config(folder))
    if config.experts:
        raise ValueError("a mixture's names are not known to the recorder: give it your own")
    names = {name: theirs(name, config)[:2] for name in parameter_shapes(config)}
    if config.norm == "layernorm":
        embed, block = "transformer.drop", "transformer.h"
    else:
        embed, block = "model.embed_tokens", "model.layers"
    blocks = {f"blocks.{i}": f"{block}.{i}" for i in range(config.layers)}
    return names, {"embed": embed} | blocks


# --- reading


def wide(x):
    """In float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Folder:
    """The weights of a folder: read(name, shape) gives one whole parameter of ours, in float32 or
    wider.

    Raises ValueError, in one sentence, for a file or tensor that is missing, damaged, or of another
    size."""

    def __init__(self, folder, config):
        from safetensors import SafetensorError, safe_open

        self.folder, self.config, self.files, self.error = (
            pathlib.Path(folder),
            config,
            {},
            SafetensorError,
        )
        index = self.folder / "model.safetensors.index.json"
        names = ["model.safetensors"]
        if index.exists():
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        for name in names:
            if pathlib.PurePath(name).name != name:
                raise ValueError(f"{index} names {name!r}: weights must lie in the folder itself")
            try:
                file = safe_open(self.folder / name, framework="pt")
            except (OSError, SafetensorError) as e:
                raise ValueError(f"{self.folder / name} can't be read ({e}): fetch it again") from e
            self.files |= dict.fromkeys(file.keys(), file)

    def find(self, name):
        """Their tensor's name as it is in this folder: the hub's GPT-2 has no prefix."""
        return name if name in self.files else name.removeprefix("transformer.")

    def tensor(self, name, shape=None):
        self.look(name, shape)
        return self.files[self.find(name)].get_tensor(self.find(name))

    def check(self, named):
        """Whether there is all of (our name, shape) pairs, without reading it."""
        with torch.device("meta"):
            for name, shape in named:
                self.read(name, shape, self.look)

    def look(self, name, shape=None):
        """An empty tensor like the one of that name."""
        name = self.find(name)
        if name not in self.files:
            raise ValueError(
                f"{self.folder} has no {name}: it is not the model that its config.json describes"
            )
        there = self.files[name].get_slice(name).get_shape()
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
            if len(every) < shape[0] or every.shape[1:] != shape[1:]:
                raise ValueError(
                    f"{self.folder} knows {len(every)} positions, not {shape[0]}: use a shorter "
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


def write(folder, config, tensors, limit=2 << 30):
    """Write (our name, whole tensor) pairs as a folder that transformers loads, in files of at most
    about `limit` bytes, of which one at a time is in memory. Raises OSError, and ValueError for a
    model of no known family."""
    from safetensors.torch import save_file

    content = write_config(config)
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    files, current, size = [], {}, 0

    def flush():
        nonlocal current, size
        if current:
            files.append(list(current))
            save_file(current, folder / f"part-{len(files)}.safetensors", metadata={"format": "pt"})
            current, size = {}, 0

    total = 0
    for name, tensor in tensors:
        there, _, cut = theirs(name, config)
        for key, part in zip(there, cut(tensor)):
            if size + part.nbytes > limit:
                flush()
            current[key] = part.contiguous()
            size, total = size + part.nbytes, total + part.nbytes
    dtype = str(tensor.dtype).removeprefix("torch.")
    flush()
    (folder / "config.json").write_text(
        json.dumps(content | {"dtype": dtype, "torch_dtype": dtype}, indent=1)
    )
    for i in range(len(files)):  # save_file lets nobody else read them
        shutil.copymode(folder / "config.json", folder / f"part-{i + 1}.safetensors")
    if len(files) == 1:
        return (folder / "part-1.safetensors").replace(folder / "model.safetensors")
    where = {}
    for i, names in enumerate(files, 1):
        name = f"model-{i:05d}-of-{len(files):05d}.safetensors"
        (folder / f"part-{i}.safetensors").replace(folder / name)
        where |= dict.fromkeys(names, name)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
