"""pretrained.py against transformers: its folders read, and ours read by it, in any layout."""

import json
import shutil

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from test_layouts import run_layout

import harness
import proof
import train
from harness import initialize, presets
from proof import one_process
from simulator import command
from trainer import hf_config, pretrained

transformers = pytest.importorskip("transformers")
SIZES = dict(
    vocab_size=300, hidden_size=32, intermediate_size=56, num_hidden_layers=4, num_attention_heads=4
)
SIZES |= dict(num_key_value_heads=2, max_position_embeddings=32)
# Of the four waves of a head of 8 one stays, one is between, two are stretched
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3 |= dict(original_max_position_embeddings=128, rope_theta=10000.0)
# {name: (transformers' name, its config)}
GPT2 = dict(n_layer=4, n_head=4, n_embd=32, n_positions=32, vocab_size=300)
MIXTURE = dict(num_local_experts=5, num_experts_per_tok=2)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2)
LINEAR = dict(rope_type="linear", factor=3.0, rope_theta=5e3)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16, rope_theta=1e4)
WIDE = dict(head_dim=16)  # heads wider than width / heads
MULTIPLIERS = dict(embedding_multiplier=12.0, attention_multiplier=0.02)
MULTIPLIERS |= dict(residual_multiplier=0.22, logits_scaling=8.0)
THEIRS = {
    "gpt2": ("GPT2", GPT2),
    "llama": ("Llama", SIZES | dict(rms_norm_eps=1e-5)),
    "tied llama": ("Llama", SIZES | dict(tie_word_embeddings=True)),
    "mixtral": ("Mixtral", SIZES | MIXTURE),
    "one expert a token": ("Mixtral", SIZES | dict(num_local_experts=5, num_experts_per_tok=1)),
    "llama 3.1": ("Llama", SIZES | dict(rope_parameters=LLAMA3)),
    "linear llama": ("Llama", SIZES | dict(rope_parameters=LINEAR)),
    "qwen2": ("Qwen2", SIZES),
    "mistral": ("Mistral", SIZES | dict(sliding_window=24)),
    "mistral nemo": ("Mistral", SIZES | WIDE | dict(sliding_window=None)),
    "qwen3": ("Qwen3", SIZES | WIDE | dict(tie_word_embeddings=True)),
    "qwen3 with yarn": ("Qwen3", SIZES | WIDE | dict(rope_parameters=YARN)),
    "qwen3-moe": ("Qwen3Moe", SIZES | WIDE | EXPERTS | dict(moe_intermediate_size=24)),
    "olmo2": ("Olmo2", SIZES),
    "olmoe": ("Olmoe", SIZES | EXPERTS | dict(norm_topk_prob=True)),
    "qwen2-moe": (
        "Qwen2Moe",
        SIZES | EXPERTS | dict(moe_intermediate_size=24, shared_expert_intermediate_size=48),
    ),
    "smollm3": ("SmolLM3", SIZES | dict(no_rope_layer_interval=2, pad_token_id=None)),
    "granite": ("Granite", SIZES | MULTIPLIERS),
}


def config_of(name):
    kind, fields = THEIRS[name]
    return getattr(transformers, f"{kind}Config")(**fields)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    saved = {}
    for i, name in enumerate(THEIRS):
        torch.manual_seed(i)
        theirs = transformers.AutoModelForCausalLM.from_config(config_of(name)).eval()
        for p in theirs.parameters():
            p.data += 0.05 * torch.randn_like(p)
        saved[name] = tmp_path_factory.mktemp("models") / name.replace(" ", "-")
        theirs.save_pretrained(saved[name], max_shard_size="60KB" if name == "llama" else "1GB")
    return saved


def read(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, experts_implementation="eager"
    )


def build(folder):
    config = presets.configure(**hf_config.read(folder))
    return initialize.build(config, draw=pretrained.Folder(folder, config).draw)


@pytest.mark.parametrize("name", THEIRS)
def test_reads_and_writes_what_transformers_does(folders, tmp_path, monkeypatch, name):
    """Logits and every gradient, in float64, without transformers' casts to float32, which would
    hide small differences. Gradients are written and read as a trained model's weights are."""
    generator = torch.Generator().manual_seed(0)
    tokens, targets = torch.randint(300, (2, 2, 24), generator=generator)
    ours, theirs = build(folders[name]), read(folders[name])
    torch.testing.assert_close(ours(tokens), theirs.float()(tokens).logits, rtol=0, atol=2e-5)
    ours, theirs = ours.double(), without_casts(read(folders[name]), monkeypatch)
    close, logits = dict(rtol=1e-10, atol=1e-10), theirs(tokens).logits
    torch.testing.assert_close(ours(tokens), logits, **close)

    ours(tokens, targets=targets).backward()
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    gradients = {key: p.grad.contiguous() for key, p in theirs.named_parameters()}
    theirs.save_pretrained(tmp_path / "gradients", state_dict=gradients)
    source = pretrained.Folder(tmp_path / "gradients", ours.config)
    for key, p in ours.named():
        torch.testing.assert_close(p.grad, source.draw(key, p.shape), **close, msg=key)

    pretrained.write(tmp_path / "out", ours.config, ours.named())
    out = without_casts(read(tmp_path / "out"), monkeypatch)
    torch.testing.assert_close(out(tokens).logits, logits, **close)
    again = dict(build(tmp_path / "out").named())
    assert all(torch.equal(p, again[n]) for n, p in ours.named())


def without_casts(model, monkeypatch):
    for kind in {type(module) for module in model.modules()}:
        if kind.__name__.endswith("RMSNorm"):
            monkeypatch.setattr(kind, "forward", rms_norm)
        if kind.__name__.endswith("TopKRouter"):
            monkeypatch.setattr(kind, "forward", router)
    return model


def rms_norm(self, x):
    return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


def router(self, x):
    scores = torch.nn.functional.linear(x.reshape(-1, x.shape[-1]), self.weight)
    weights, chosen = scores.softmax(-1).topk(self.top_k)
    if getattr(self, "norm_topk_prob", True):
        weights = weights / weights.sum(-1, keepdim=True)
    return scores, weights, chosen


def test_presets_are_of_the_families(folders):
    sizes = dict(layers=4, heads=4, width=32, context=32, vocab=300)
    grouped = dict(kv_heads=2, hidden=56)
    for name, turned in {
        "gpt2": presets.configure("gpt2", **sizes),
        "llama": presets.configure(family="llama", **sizes, **grouped),
        "mixtral": presets.configure("mixtral-8x7b", **sizes, **grouped, experts=5, top_k=2),
    }.items():
        assert presets.configure(**hf_config.read(folders[name])) == turned


def train_and_prove(rank, args):
    run = proof.Run(args, rank, dist.get_world_size(), torch.device("cpu"))
    code = train.train(run)
    weights = one_process.one_process(run, 2).weights if rank == 0 else None
    return code, weights


@pytest.mark.parametrize(
    "name, layout",
    [
        ("llama 3.1", "--dp 1"),
        ("gpt2", "--tp 2 --pp 2 --schedule zb-v --microbatches 3"),
        ("linear llama", "--tp 2 --sp --zero 1"),
        ("mixtral", "--dp 2 --tp 2 --sp --ep 4 --fold-experts --zero 3"),
        ("qwen2", "--cp 2 --cp-kind ulysses --pp 2"),
        ("tied llama", "--dp 2 --pp 3 --zero 2"),
        ("qwen3", "--tp 2 --pp 2 --microbatches 3"),
        ("qwen3 with yarn", "--tp 2 --sp --cp 2 --zero 2"),
        ("qwen3-moe", "--dp 2 --tp 2 --ep 2 --zero 1"),
        ("qwen3-moe", "--tp 2 --sp --cp 2 --ep 4 --fold-experts --recompute block"),
        ("olmo2", "--tp 2 --cp 2 --recompute block"),
        ("olmo2", "--tp 2 --sp --pp 2 --schedule zb-h1"),
        ("olmoe", "--tp 2 --sp --dp 2 --ep 2 --zero 3"),
        ("qwen2-moe", "--tp 2 --pp 2 --recompute selective"),
        ("qwen2-moe", "--tp 2 --sp --cp 2 --ep 2"),
        ("smollm3", "--tp 2 --pp 2 --schedule interleaved --chunks 2"),
        ("smollm3", "--dp 2 --cp 2 --cp-kind ulysses"),
        ("granite", "--tp 2 --cp 2 --dropout 0.1"),
        ("granite", "--tp 2 --sp --pp 2"),
    ],
)
def test_any_layout_starts_from_it_and_exports(ranks, folders, text, tmp_path, name, layout):
    """Two steps equal to one process that starts there too; what is exported is its model."""
    flags = f"{layout} --context 16 --batch 12 --steps 2 --layers 4 --heads 4 --width 32 "
    flags += "--dtype float64 --sample 0 --eval-batches 1 --quiet --optimizer sgd --lr 0.1 "
    flags += f"--min-lr 0.1 --warmup 0 --tokenizer bytes --data {text}"
    args, _ = prepare(f"{flags} --init-from {folders[name]} --export {tmp_path}/out")
    results = ranks(args.dp * args.cp * args.tp * args.pp, train_and_prove, args)
    assert {code for code, _ in results} == {0}
    config = presets.configure(**hf_config.read(tmp_path / "out"))
    source = pretrained.Folder(tmp_path / "out", config)
    for key, weight in results[0][1].items():
        torch.testing.assert_close(source.draw(key, weight.shape), weight, rtol=1e-10, atol=1e-12)


MLP, POSITIONS = "transformer.h.0.mlp.c_fc", "transformer.wpe.weight"
INDEX = "model.safetensors.index.json"
# (a file of GPT-2's folder; its content, or the fields or tensors of it that are changed; what is
# said). With an index there is no model.safetensors
DAMAGES = [
    ("config.json", None, "config.json can't be read"),
    ("config.json", "{", "config.json is no JSON"),
    ("config.json", {"n_inner": 64}, "not .* as config.json says"),
    ("config.json", {"n_layer": 5}, "has no .*h.4"),
    ("config.json", {"n_layer": 3}, "h.3.* and 11 more, which nothing here reads"),
    ("config.json", {"n_layer": "4"}, "config.json: a field is not of its type"),
    ("config.json", {"n_layer": 10**9}, "1,000,000,000 layers are too many"),
    ("model.safetensors", None, "can't be read"),
    ("model.safetensors", "\xff" * 100, "can't be read"),
    ("model.safetensors", {"lm_head.bias": torch.zeros(300)}, "lm_head.bias, which nothing"),
    ("model.safetensors", {f"{MLP}.SCB": torch.zeros(128)}, "c_fc.SCB, which nothing"),
    ("model.safetensors", {POSITIONS: torch.zeros(5, 32)}, "knows 5 positions"),
    (INDEX, "{", "index.json is no JSON"),
    (INDEX, "{}", "has no transformer.wpe.weight"),
    ("pytorch_model.bin", "", "as pytorch_model.bin, and only safetensors .* once with python -c"),
]


@pytest.mark.parametrize("file, content, said", DAMAGES)
def test_a_damaged_folder_is_refused_in_one_sentence(folders, tmp_path, file, content, said):
    folder = tmp_path / "model"
    shutil.copytree(folders["gpt2"], folder)
    if file == "pytorch_model.bin":
        (folder / "model.safetensors").unlink()
    if file == INDEX:
        for name in ("one", "two"):
            shutil.copy(folder / "model.safetensors", folder / name)
        (folder / "model.safetensors").unlink()
    change(folder / file, content)
    with pytest.raises(harness.Refused, match=said) as refused:
        prepare(f"--init-from {folder} --tokenizer bytes")
    assert refused.value.code == 2 and "\n" not in refused.value.message
    assert str(folder) in refused.value.message or "layers are too many" in said


def change(path, content):
    """Change a file: remove it, or replace its text, some of its tensors or fields."""
    if not isinstance(content, dict):
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_text(content)
    elif path.suffix == ".json":
        path.write_text(json.dumps(json.loads(path.read_text()) | content))
    else:
        save_file(load_file(path) | content, path)


def prepare(flags):
    return train.prepare(train.flags().parse_args(flags.split()))


@pytest.mark.parametrize(
    "name, flags, said",
    [
        ("gpt2", "--layers 7", "--layers 7 is not the model's 4"),
        ("mixtral", "--shared 1", "--shared 1 is not the model's 0"),
        ("gpt2", "--family llama", "--family llama: .* says itself what it is: leave"),
        ("mixtral", "--preset gpt2", "--preset gpt2: .*: leave --preset out"),
        ("mistral", "--context 25", "sliding window of 24, .* at most --context 24"),
        ("gpt2", "--context 33", "knows 32 positions, not 33"),
    ],
)
def test_flags_that_contradict_the_model_are_refused(folders, name, flags, said):
    with pytest.raises(harness.Refused, match=said):
        prepare(f"--init-from {folders[name]} --tokenizer bytes {flags}")


REQUIRED = dict(model_type="llama", **SIZES)
OLD_LINEAR = {"type": "linear", "factor": 2.0}


@pytest.mark.parametrize("kind", [kind for kind in hf_config.FAMILIES if kind != "gpt2"])
@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 3e4, "rms_norm_eps": 1e-4, "tie_word_embeddings": True},
        {"rope_scaling": OLD_LINEAR},
        {"rope_parameters": OLD_LINEAR | {"rope_theta": 7e4}, "rope_theta": 3e4},
        {"rope_parameters": {"rope_type": "default"}, "rope_scaling": OLD_LINEAR},
        {"rope_parameters": OLD_LINEAR | {"rope_type": "default"}, "rope_scaling": {}},
        {"rope_scaling": LLAMA3, "original_max_position_embeddings": 16},
        {"rope_scaling": {k: LLAMA3[k] for k in LLAMA3 if not k.startswith("original")}},
    ],
)
def test_defaults_and_precedence_are_transformers(tmp_path, kind, fields):
    sizes = dict(hidden_size=128, num_attention_heads=32, num_local_experts=4, num_experts=4)
    sizes |= dict(moe_intermediate_size=8, shared_expert_intermediate_size=16)
    content = REQUIRED | sizes | {"num_experts_per_tok": 2} | fields | {"model_type": kind}
    del content["num_key_value_heads"]
    (tmp_path / "config.json").write_text(json.dumps(content))
    right = transformers.AutoConfig.from_pretrained(tmp_path)
    right.standardize_rope_params()  # as it is called again when the model is built
    rope, ours = right.rope_parameters, presets.FamilyConfig(**hf_config.read(tmp_path))
    found = ours.kv_heads, ours.norm_eps, ours.tied, ours.rope_theta
    assert found == (
        right.num_key_value_heads,
        right.rms_norm_eps,
        right.tie_word_embeddings,
        rope["rope_theta"],
    )
    assert (ours.rope_scaling is None) == (rope["rope_type"] == "default")
    if ours.rope_scaling:
        assert hf_config.write(ours)["rope_scaling"].items() <= rope.items()


@pytest.mark.parametrize("more", [{}, dict(beta_fast=8, beta_slow=2, attention_factor=1.3)])
def test_yarn_is_transformers(more):
    fields = SIZES | WIDE | dict(rope_parameters=YARN | more)
    config = transformers.Qwen3Config(**fields)
    right = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["yarn"](config)
    _, ours = hf_config.rope_of(hf_config.DEFAULTS | config.to_dict())
    frequencies, factor = ours(torch.empty(8))
    assert torch.equal(frequencies, right[0]) and factor == right[1]


@pytest.mark.parametrize(
    "kind, fields, context",
    [
        ("mistral", {"max_position_embeddings": 9999}, 4096),
        ("mistral", {"sliding_window": None}, 32),
        ("mixtral", MIXTURE | {"sliding_window": 9}, 9),
        ("qwen2", {"sliding_window": 9, "use_sliding_window": False}, 32),
        ("llama", {"num_key_value_heads": None}, 32),
    ],
)
def test_a_sliding_window_ends_the_context(kind, fields, context):
    found = hf_config.translate(REQUIRED | fields | {"model_type": kind})
    assert found["context"] == context
    assert found["kv_heads"] == (2 if kind != "llama" else 4)  # null: all heads


UNKNOWN = [({name: "x"}, f'{name} is "x", and only') for name in hf_config.KNOWN]
UNKNOWN += [
    ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, 'type "longrope"'),
    ({"rope_scaling": {"type": "linear"}}, "has no factor"),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "only 1 or null is known"),
    ({"head_dim": 15}, "need an even head size, not 15"),
    ({"activation_function": "gelu"}, "is the exact gelu, and GPT-2's, here, is its approximation"),
    ({"model_type": "smollm3", "no_rope_layers": [1, 0, 0, 1]}, "not every so many-th layer"),
    ({"hidden_size": 33}, "width 33 is not a multiple of 4 heads"),
    ({"model_type": "mixtral"}, "has no num_local_experts"),
    ({"model_type": "bert"}, 'model_type is "bert", and only gpt2, .*, granite can be read'),
    ({"model_type": None}, "model_type is null, and only gpt2, .*, granite can be read"),
]


@pytest.mark.parametrize("fields, said", UNKNOWN)
def test_what_is_not_known_is_refused(tmp_path, fields, said):
    (tmp_path / "config.json").write_text(json.dumps(REQUIRED | fields))
    with pytest.raises(ValueError, match=said):
        hf_config.read(tmp_path)


def test_names_without_prefix_and_known_buffers_are_read(folders, tmp_path):
    """A base model has no head and no prefix; a tied matrix may have either name, or both; old
    folders have tables of attention's mask and of the frequencies."""
    buffers = {"transformer.h.3.attn.bias": torch.ones(1, 1, 32, 32)}
    buffers |= {"transformer.h.0.attn.masked_bias": torch.tensor(-1e4)}
    buffers |= {"model.layers.3.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    buffers |= {"model.rotary_emb.inv_freq": torch.ones(4)}
    for name, prefix, embedding in [
        ("gpt2", "transformer.", "transformer.wte.weight"),
        ("tied llama", "model.", "model.embed_tokens.weight"),
    ]:
        right = dict(build(folders[name]).named())
        tensors = load_file(folders[name] / "model.safetensors")
        matrix = tensors[embedding]
        known = {key: x for key, x in buffers.items() if key.startswith(prefix)}
        bare = {key.removeprefix(prefix): x for key, x in (tensors | known).items()}
        both = tensors | {"lm_head.weight": matrix.double()}
        other = {key: x for key, x in both.items() if key != embedding}
        for saved in (tensors | known, bare, both, other):
            folder = shutil.copytree(folders[name], tmp_path / "model", dirs_exist_ok=True)
            save_file(saved, folder / "model.safetensors")
            _, config = prepare(f"--init-from {folder} --tokenizer bytes")
            source = pretrained.Folder(folder, config)
            assert all(torch.equal(source.draw(n, p.shape), p) for n, p in right.items())


@pytest.mark.parametrize("name", ["gpt2", "tied llama"])
def test_a_head_that_is_not_the_embedding(folders, tmp_path, name):
    """config.json ties them: transformers does not then. Refused; as it advises, the logits are
    those of transformers in both."""
    folder = shutil.copytree(folders[name], tmp_path / "model")
    head = torch.randn(300, 32, generator=torch.Generator().manual_seed(0))
    change(folder / "model.safetensors", {"lm_head.weight": head})
    tokens = torch.arange(24).view(1, 24)
    theirs = read(folder)(tokens).logits
    with pytest.raises(
        harness.Refused, match='lm_head.weight is not .*"tie_word_embeddings": false'
    ):
        prepare(f"--init-from {folder} --tokenizer bytes")
    change(folder / "config.json", {"tie_word_embeddings": False})
    prepare(f"--init-from {folder} --tokenizer bytes")
    torch.testing.assert_close(build(folder).double()(tokens), theirs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(read(folder)(tokens).logits, theirs)


def test_a_context_of_at_most_1024_unless_asked(folders, tmp_path):
    folder = tmp_path / "long"
    shutil.copytree(folders["tied llama"], folder)
    change(folder / "config.json", {"max_position_embeddings": 131072})
    for flags, context in (("", 1024), ("--context 4096", 4096)):
        _, config = prepare(f"--init-from {folder} --tokenizer bytes {flags}")
        assert config.context == context


def test_a_dry_run_and_a_plan_read_the_config_alone(folders, tmp_path, capsys):
    """One rank is played, so it is in this process."""
    shutil.copy(folders["llama 3.1"] / "config.json", tmp_path)
    size = sum(p.numel() for _, p in build(folders["llama 3.1"]).named())
    for layout, said in (
        ("--tp 2 --dry-run", f"{size:,} parameters, tp 2"),
        ("--gpus 1 --plan", "is the fastest that leaves 5%"),
    ):
        args = f"--init-from {tmp_path} --batch 2 --device cpu {layout}".split()
        command.main(train.flags().parse_args(args), train.prepare, train.train)
        assert said in capsys.readouterr().out


def test_resume_goes_on_with_the_folders_model(ranks, folders, text, tmp_path):
    """Its rotary positions too."""
    flags = "--tp 2 --batch 4 --dtype float64 --sample 0 --eval-batches 1 --quiet --prove 0 "
    flags += f"--init-from {folders['llama 3.1']} --tokenizer bytes --context 16"
    out, export = tmp_path / "out", tmp_path / "export"
    for more in ("--steps 2", f"--steps 4 --resume --export {export}"):
        args, _ = prepare(f"{flags} --data {text} --out {out} {more}")
        assert ranks(2, run_layout, args)[0][0] == 0
    assert hf_config.read(export)["rope_scaling"].factor == 8.0
    for more, said in (("--layers 7", "is not the model's 4"), ("--family gpt2", "says itself")):
        with pytest.raises(harness.Refused, match=said):
            prepare(f"{flags} --steps 5 --out {out} --resume {more}")
