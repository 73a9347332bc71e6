"""pretrained.py against transformers: its folders read, and ours read by it, in any layout."""

import json
import math
import os
import shutil

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

import harness
import model as gpt
import proof
import train
from harness import presets
from proof import one_process
from simulator import planner
from trainer import hf_config, pretrained

transformers = pytest.importorskip("transformers")
SIZES = dict(
    vocab_size=300, hidden_size=32, intermediate_size=56, num_hidden_layers=4, num_attention_heads=4
)
SIZES |= dict(num_key_value_heads=2, max_position_embeddings=32)
# Of the four waves of a head of 8 one stays, one is between, two are stretched
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3 |= dict(original_max_position_embeddings=128, rope_theta=10000.0)
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
    "llama 3.1": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3)
    ),
    "linear llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            **SIZES, rope_parameters={"rope_type": "linear", "factor": 3.0, "rope_theta": 5e3}
        )
    ),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES)),
    "mistral": lambda: transformers.MistralForCausalLM(
        transformers.MistralConfig(**SIZES, sliding_window=24)
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


def train_and_prove(rank, args):
    run = proof.Run(args, rank, dist.get_world_size(), torch.device("cpu"))
    code = train.train(run)
    weights = one_process.one_process(run, 2)[3] if rank == 0 else None
    return code, weights


@pytest.mark.parametrize(
    "name, layout",
    [
        ("gpt2", "--dp 1"),
        ("llama 3.1", "--cp 2"),
        ("linear llama", "--pp 2 --schedule zb-h1 --microbatches 4"),
        ("gpt2", "--tp 2 --pp 2 --schedule zb-v --microbatches 3"),
        ("llama", "--dp 2 --tp 2 --zero 3"),
        ("llama", "--cp 2 --tp 2 --sp --zero 1"),
        ("mixtral", "--dp 2 --ep 2 --tp 2 --zero 3"),
        ("qwen2", "--tp 2 --sp --gather-again --pp 2"),
        ("qwen2", "--cp 2 --cp-kind ulysses --pp 2 --schedule zb-v --microbatches 4"),
        ("tied llama", "--dp 2 --pp 3 --zero 2"),
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
    results = ranks(args.dp * args.cp * args.tp * args.pp, train_and_prove, args)
    assert {code for code, _ in results} == {0}
    config = presets.configure(**pretrained.read_config(tmp_path / "out"))
    source = pretrained.Folder(tmp_path / "out", config)
    for key, weight in results[0][1].items():
        torch.testing.assert_close(source.read(key, weight.shape), weight, rtol=1e-10, atol=1e-12)


def pipe(path):
    path.unlink()
    os.mkfifo(path)  # nobody writes to it


@pytest.mark.parametrize(
    "damage, said",
    [
        (lambda f: (f / "config.json").unlink(), "config.json can't be read"),
        (lambda f: pipe(f / "config.json"), "config.json can't be read .it is a device or a pipe"),
        (lambda f: (f / "config.json").write_text("{"), "is no JSON"),
        (lambda f: change(f, model_type="bert"), "mixtral and qwen2 can be read"),
        (lambda f: change(f, n_inner=64), "not .* as config.json says"),
        (lambda f: change(f, n_layer=5), "has no .*h.4"),
        (lambda f: change(f, activation_function="relu"), "gelu_new"),
        (lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 100), "can't be read"),
        (lambda f: change(f, n_layer=3), "h.3.* and 11 more, which nothing here reads"),
        (lambda f: change(f, n_layer="4"), 'config.json: n_layer is "4", not a whole number'),
        (lambda f: (f / "config.json").write_text("[1]"), "config.json holds a list"),
        (lambda f: (f / "config.json").write_text("[" * 100000), "config.json is no JSON"),
        (
            lambda f: change(f, quantization_config={"load_in_8bit": True}),
            "quantization_config is an object",
        ),
        (lambda f: change(f, scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse"),
        (lambda f: change(f, scale_attn_weights=False), "only true is known"),
        (lambda f: index(f, '{"weight_map": {"x": "y"}}'), "can't be read"),
        (lambda f: index(f, '{"weight_map": {"x": 1}}'), "index.json has no weight_map"),
        (lambda f: index(f, '{"weight_map": ["x"]}'), "index.json has no weight_map"),
        (lambda f: index(f, '{"weight_map": {}}'), "index.json has no weight_map"),
        (lambda f: index(f, "{}"), "index.json has no weight_map"),
        (lambda f: index(f, "[]"), "index.json holds a list"),
        (lambda f: index(f, "{"), "index.json is no JSON"),
        (lambda f: index(f, {"a": "model-1", "b": "model-2"}), "so has another file"),
        (lambda f: save(f, {"lm_head.bias": torch.zeros(300)}), "lm_head.bias, which nothing"),
        (lambda f: save(f, {"lm_head.weight": torch.zeros(300, 32)}), "config.json ties them"),
        (lambda f: save(f, {"lm_head.weight": torch.zeros(30, 32)}), "config.json ties them"),
        (lambda f: save(f, {"lm_head.weight": torch.zeros(300, 32).byte()}), "of type U8"),
        (lambda f: save(f, {f"{MLP}.SCB": torch.zeros(128)}), "c_fc.SCB, which nothing"),
        (lambda f: save(f, {f"{MLP}.weight": FP8}), "c_fc.weight is of type F8_E4M3"),
        (lambda f: save(f, {f"{MLP}.weight": FP8.view(torch.int8)}), "c_fc.weight is of type I8"),
        (lambda f: save(f, {"transformer.wpe.weight": torch.zeros(())}), r"positions are \[\]"),
        (lambda f: save(f, {"transformer.wpe.weight": torch.zeros(5, 32)}), "knows 5 positions"),
    ],
)
def test_a_damaged_folder_is_refused_in_one_sentence(folders, tmp_path, monkeypatch, damage, said):
    folder = tmp_path / "model"
    shutil.copytree(folders["gpt2"], folder)
    damage(folder)
    with pytest.raises(harness.Refused, match=said) as refused:
        prepare(f"--init-from {folder} --tokenizer bytes")
    assert refused.value.code == 2
    assert str(folder) in refused.value.message and "\n" not in refused.value.message


MLP, FP8 = "transformer.h.0.mlp.c_fc", torch.zeros(32, 128).to(torch.float8_e4m3fn)


def prepare(flags):
    return train.prepare(train.flags().parse_args(flags.split()))


def change(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def save(folder, tensors, without=()):
    """Change tensors of a folder, or add them."""
    there = load_file(folder / "model.safetensors") | tensors
    save_file({k: v for k, v in there.items() if k not in without}, folder / "model.safetensors")


def index(folder, content):
    """Give a folder an index. content: its text, or the names of some of its files, which then hold
    all that model.safetensors holds."""
    whole = folder / "model.safetensors"
    if isinstance(content, dict):
        content = {name: f"{file}.safetensors" for name, file in content.items()}
        for file in content.values():
            shutil.copy(whole, folder / file)
        content = json.dumps({"weight_map": content})
    whole.unlink()
    (folder / "model.safetensors.index.json").write_text(content)


@pytest.mark.parametrize(
    "name, flags, said",
    [
        ("gpt2", "--layers 7", "--layers 7 is not the model's 4"),
        ("gpt2", "--shared 1", "--shared 1 is not the model's 0"),
        ("gpt2", "--experts 4", "--experts 4 is not the model's 0"),
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


def test_a_model_of_no_known_family_is_not_exported():
    with pytest.raises(harness.Refused, match="no family that transformers knows"):
        prepare("--experts 4 --export x")
    qwen2_with_experts = presets.configure(family="llama", bias="qkv", experts=4)
    with pytest.raises(ValueError, match="experts and biases"):
        hf_config.write(qwen2_with_experts)


@pytest.mark.parametrize("name", [name for name in THEIRS if name != "mixtral"])
def test_is_transformers_model_in_float64(folders, monkeypatch, name):
    """Without the casts to float32 in transformers' norm, which would hide small differences.
    test_model.py has Mixtral's."""
    for family in ("llama", "mistral", "qwen2"):
        module = getattr(transformers.models, family)
        module = getattr(module, f"modeling_{family}")
        [norm] = [kind for key, kind in vars(module).items() if key.endswith("RMSNorm")]
        monkeypatch.setattr(norm, "forward", rms_norm)
    there = transformers.AutoModelForCausalLM.from_pretrained(folders[name], dtype=torch.float64)
    ours = build(folders[name]).double()
    tokens = torch.randint(300, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), there(tokens).logits, rtol=1e-10, atol=1e-10)


def rms_norm(self, x):
    return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


@pytest.mark.parametrize(
    "theta, longest, scaling",
    [
        (5e5, 131072, ("llama3", 8.0, 1.0, 4.0, 8192)),  # Llama 3.1
        (5e5, 131072, ("llama3", 32.0, 1.0, 4.0, 8192)),  # Llama 3.2
        (1e4, 16384, ("linear", 4.0)),
        (1e6, 16384, ("linear", 2.5)),
    ],
)
def test_scaled_frequencies_are_transformers_to_the_last_bit(theta, longest, scaling):
    scaling = hf_config.RopeScaling(*scaling)
    config = transformers.LlamaConfig(
        hidden_size=512,
        num_attention_heads=4,
        max_position_embeddings=longest,
        rope_parameters=scaling.written() | {"rope_theta": theta},
    )
    right, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[scaling.rope_type](config)
    plain = 1.0 / theta ** (torch.arange(0, 128, 2).float() / 128)
    assert torch.equal(scaling(plain), right) and not torch.equal(plain, right)


@pytest.mark.parametrize(
    "name, field, other",
    [
        ("gpt2", "activation_function", "gelu_pytorch_tanh"),
        ("llama", "hidden_act", "swish"),
    ],
)
def test_two_names_of_an_activation_are_one_function(name, field, other):
    content = THEIRS[name]().config.to_dict()
    right = hf_config.translate(content)
    assert hf_config.translate(content | {field: other}) == right
    x = torch.randn(9, dtype=torch.float64)
    one, two = (transformers.activations.ACT2FN[name](x) for name in (content[field], other))
    torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)


REQUIRED = dict(model_type="llama", **SIZES)
LINEAR = {"type": "linear", "factor": 2.0}


@pytest.mark.parametrize("kind", ["llama", "mistral", "mixtral", "qwen2"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"rope_theta": 3e4, "rms_norm_eps": 1e-4},
        {"rope_scaling": LINEAR},
        {"rope_parameters": LINEAR | {"rope_theta": 7e4}, "rope_theta": 3e4},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 7e4}, "rope_scaling": LINEAR},
        {"rope_parameters": LINEAR, "rope_scaling": {}, "rope_theta": 3e4},
        {"rope_parameters": LINEAR | {"rope_type": "default"}},
        {"rope_scaling": LLAMA3},
        {"rope_scaling": LLAMA3, "original_max_position_embeddings": 16},
        {"rope_scaling": {k: LLAMA3[k] for k in LLAMA3 if not k.startswith("original")}},
        {"num_key_value_heads": None},
        {"tie_word_embeddings": True},
    ],
)
def test_defaults_and_precedence_are_transformers(tmp_path, kind, fields):
    sizes = dict(num_local_experts=4, num_experts_per_tok=2) if kind == "mixtral" else {}
    content = REQUIRED | sizes | fields | {"model_type": kind}
    if "num_key_value_heads" in fields and kind in ("mistral", "mixtral"):
        pytest.skip("transformers takes no null there; it is read as everywhere else")
    if "num_key_value_heads" not in fields:
        content |= {"num_attention_heads": 32, "hidden_size": 128}
        del content["num_key_value_heads"]
    (tmp_path / "config.json").write_text(json.dumps(content))
    right = transformers.AutoConfig.from_pretrained(tmp_path)
    ours = hf_config.Config(**hf_config.read(tmp_path)[0])
    assert ours.kv_heads == right.num_key_value_heads
    assert (ours.norm_eps, ours.tied) == (right.rms_norm_eps, right.tie_word_embeddings)
    right.standardize_rope_params()  # as it is called again when the model is built
    rope = right.rope_parameters
    assert ours.rope_theta == rope["rope_theta"]
    if rope["rope_type"] == "default":
        assert ours.rope_scaling is None
    else:
        assert ours.rope_scaling.written().items() <= rope.items()


@pytest.mark.parametrize(
    "kind, fields, window",
    [
        ("mistral", {}, 4096),
        ("mistral", {"sliding_window": None}, None),
        ("mistral", {"sliding_window": 9}, 9),
        ("mixtral", {}, None),
        ("mixtral", {"sliding_window": 9}, 9),
        ("qwen2", {"sliding_window": 9}, None),
    ],
)
def test_a_sliding_window_ends_the_context(kind, fields, window):
    sizes = dict(num_local_experts=4, num_experts_per_tok=2) if kind == "mixtral" else {}
    read = hf_config.translate(REQUIRED | sizes | fields | {"model_type": kind})
    assert read[1] == window and read[0]["context"] == min(window or 32, 32)


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, 'type "yarn"'),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling has no factor"),
        ({"rope_scaling": {"type": "llama3", "factor": 8}}, "has no low_freq_factor"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, "must be below"),
        ({"rope_parameters": "default"}, 'rope_parameters is "default", not an object'),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "layer to layer"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, 'hidden_act is "gelu", and only'),
        ({"attention_bias": True}, "attention_bias is true"),
        ({"mlp_bias": True}, "mlp_bias is true"),
        ({"use_sliding_window": True}, "use_sliding_window is true"),
        ({"head_dim": 16}, "heads of 16, not 32 / 4"),
        ({"layer_types": ["linear_attention"]}, "linear_attention"),
        ({"hidden_size": 33}, "width 33 is not a multiple of 4 heads"),
        ({"model_type": "mixtral"}, "has no num_local_experts"),
        (
            {"model_type": ["llama"]},
            "model_type is a list: .* and qwen2 can be read",
        ),
    ],
)
def test_what_is_not_known_is_refused(tmp_path, fields, said):
    (tmp_path / "config.json").write_text(json.dumps(REQUIRED | fields))
    with pytest.raises(ValueError, match=said):
        hf_config.read(tmp_path)


WRONG = [None, [], [1], {}, {"a": 1}, "", "3", -1, 0, 2.5, 10**9, 10**30, 10**400, 1e308]
WRONG += [math.nan, math.inf, -math.inf, True, False]


@pytest.mark.parametrize("kind", hf_config.DEFAULTS)
def test_any_value_of_any_field_is_read_or_refused_in_one_sentence(folders, kind):
    names = {"llama": "llama 3.1"}
    content = json.loads((folders[names.get(kind, kind)] / "config.json").read_text())
    rope = content.get("rope_parameters") or {}
    trials = [
        content | {name: x} for name in content | hf_config.TYPES | hf_config.KNOWN for x in WRONG
    ]
    for name in rope | hf_config.TYPES:
        trials += [content | {"rope_parameters": rope | {name: value}} for value in WRONG]
        trials += [content | {"rope_scaling": LLAMA3 | {name: value}} for value in WRONG]
    read = 0
    for trial in trials:
        try:
            fields = hf_config.translate(trial)[0]
        except ValueError as e:
            assert "\n" not in str(e) and 20 < len(str(e)) < 200, trial
        else:
            read += 1
            config = hf_config.Config(**fields)
            if config.positions == "rope" and config.width < 1000:
                rope = config.rope_theta, torch.float64, config.rope_scaling
                table = gpt.rotary_table(torch.arange(3), 8, *rope)
                assert all(x.isfinite().all() for x in table), trial
    assert 0 < read < len(trials) - 300


def test_names_without_prefix_and_known_buffers_are_read(folders, tmp_path):
    """A base model has no head and no prefix; a tied matrix may have either name, or both; old
    folders have tables of attention's mask and of the frequencies."""
    buffers = {
        "gpt2": {"transformer.h.3.attn.bias": torch.ones(1, 1, 32, 32)}
        | {"transformer.h.0.attn.masked_bias": torch.tensor(-1e4)},
        "tied llama": {"model.layers.3.self_attn.rotary_emb.inv_freq": torch.ones(4)}
        | {"model.rotary_emb.inv_freq": torch.ones(4)},
    }
    for name, prefix, embedding in [
        ("gpt2", "transformer.", "transformer.wte.weight"),
        ("tied llama", "model.", "model.embed_tokens.weight"),
    ]:
        right = dict(build(folders[name]).named())
        there = load_file(folders[name] / "model.safetensors")
        matrix = there[embedding]
        bare = {key.removeprefix(prefix): x for key, x in (there | buffers[name]).items()}
        for i, tensors in enumerate(
            [
                there | buffers[name],
                bare,
                there | {"lm_head.weight": matrix.double()},
                {k: x for k, x in there.items() if k != embedding} | {"lm_head.weight": matrix},
            ]
        ):
            folder = tmp_path / f"{prefix}{i}"
            shutil.copytree(folders[name], folder)
            save_file(tensors, folder / "model.safetensors")
            _, config = prepare(f"--init-from {folder} --tokenizer bytes")
            source = pretrained.Folder(folder, config)
            assert all(torch.equal(source.read(n, p.shape), p) for n, p in right.items())


def test_a_context_of_at_most_1024_unless_asked(folders, tmp_path):
    folder = tmp_path / "long"
    shutil.copytree(folders["tied llama"], folder)
    change(folder, max_position_embeddings=131072)
    args, config = prepare(f"--init-from {folder} --tokenizer bytes")
    assert config.context == 1024
    [said] = pretrained.describe(args, config)
    assert "--context is 1,024 by default; the model in" in said
    args, config = prepare(f"--init-from {folder} --tokenizer bytes --context 4096")
    assert config.context == 4096 and not pretrained.describe(args, config)


@pytest.mark.parametrize(
    "name, layout, said",
    [
        ("gpt2", "--tp 2 --dp 2 --dry-run --ranks 0", "{:,} parameters, dp 2 tp 2"),
        ("qwen2", "--tp 2 --dry-run --ranks 1", "{:,} parameters, tp 2"),
        ("llama 3.1", "--gpus 1 --plan", "played, the best first"),
    ],
)
def test_a_dry_run_and_a_plan_read_the_config_alone(folders, tmp_path, capsys, name, layout, said):
    """One rank is played, so it is in this process."""
    shutil.copy(folders[name] / "config.json", tmp_path)
    args = f"--init-from {tmp_path} --batch 2 --device cpu {layout}".split()
    planner.main(train.flags().parse_args(args), train.prepare, train.train)
    size = sum(p.numel() for _, p in build(folders[name]).named())
    assert said.format(size) in capsys.readouterr().out


def test_resume_needs_no_init_from(ranks, folders, text, tmp_path):
    """Two steps, then two more from the checkpoint alone, equal to four steps from the folder."""
    flags = "--tp 2 --context 16 --batch 4 --dtype float64 --sample 0 --eval-batches 1 --quiet "
    flags += f"--min-lr 0.003 --warmup 0 --prove 0 --data {text}"
    start, out = f"--init-from {folders['llama 3.1']} --tokenizer bytes", tmp_path / "out"

    def losses(more):
        args, _ = prepare(f"{flags} {more}")

        def work(rank):
            run = proof.Run(args, rank, 2, torch.device("cpu"))
            assert train.train(run) == 0
            return [row["loss"] for row in run.history]

        return ranks(2, work)[0]

    whole = losses(f"{start} --steps 4")
    first = losses(f"{start} --steps 2 --out {out}")
    export = tmp_path / "export"
    rest = losses(f"--steps 4 --out {out} --resume --export {export}")
    assert first + rest == pytest.approx(whole, rel=1e-10)
    assert hf_config.read(export)[0]["rope_scaling"].factor == 8.0
    sampled, begun = f"--out {out} --only-sample", f"{start} --context 16"
    assert prepare(sampled)[1] == prepare(begun)[1]
    with pytest.raises(harness.Refused, match="--layers 7 is not the model's 4"):
        prepare(f"--steps 4 --out {out} --resume --layers 7")
    path = out / "step-00000004" / "index.json"
    right = json.loads(path.read_text())
    for name in right["shape"]:
        for value in (None, [1], "x", 2.5):
            # A damaged shape is taken for none, unless it is as good: no traceback
            shape = right["shape"] | {name: value}
            path.write_text(json.dumps(right | {"shape": shape}))
            prepare(sampled)
    path.write_text(json.dumps(right))
    with pytest.raises(harness.Refused, match="--family gpt2: .* says itself"):
        prepare(f"--steps 4 --out {out} --resume --family gpt2")
