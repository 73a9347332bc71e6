"""tokens.py and trainer/tokenizer.py: tokenizer.json of a folder, whose tokens a run is of, and
where a sample ends. transformers is the oracle."""

import json
import shutil
import sys
import types

import pytest
import torch

import train
from harness import Refused, data, tokens
from trainer import sampling

transformers = pytest.importorskip("transformers")
TEXT = "It is a truth universally acknowledged.\n\n  A man, 1234 of them -- ÄÖ€ 🙂\n" * 40
SPECIAL = ["<s>", "</s>", "<|turn|>"]
SIZES = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)


def make_tokenizer(folder, bos=True):
    """A byte-level BPE tokenizer in a folder, trained on TEXT; as Llama's it begins a text with
    <s>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([TEXT], trainer)
    if bos:
        made.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"bos_token": "<s>"}))
    return made


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A Llama folder with a tokenizer; its vocabulary is padded from 290 to 512."""
    folder = tmp_path_factory.mktemp("llama")
    config = transformers.LlamaConfig(**SIZES, vocab_size=512, bos_token_id=0, eos_token_id=[1, 2])
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    make_tokenizer(folder)
    return folder


def test_a_folders_tokens_are_those_of_transformers(model):
    ours, theirs = tokens.of(model), transformers.AutoTokenizer.from_pretrained(model)
    ids = theirs(TEXT).input_ids
    assert ours.encode_ordinary(TEXT) == ids and ids[0] == theirs.bos_token_id == 0
    assert ours.document(TEXT).tolist() == [*ids, theirs.eos_token_id]
    assert ours.decode(ids) == TEXT
    assert ours.n_vocab == len(theirs) < 512
    assert (ours.start, ours.end, ours.stops) == (0, 1, {1, 2})


def test_marks_of_every_kind(tmp_path):
    """A prompt goes on, so it has no end but one that it writes itself."""
    from tokenizers import processors

    made = make_tokenizer(tmp_path)
    marks = [("<s>", 0), ("</s>", 1)]
    for template, head in (("<s> $A </s>", [0]), ("$A </s>", []), ("</s> $A", [1])):
        made.post_processor = processors.TemplateProcessing(single=template, special_tokens=marks)
        made.save(str(tmp_path / "tokenizer.json"))
        tokens.read_tokenizer.cache_clear()
        encoding = tokens.of(tmp_path)
        plain = made.encode("truth", add_special_tokens=False).ids
        assert encoding.encode_ordinary("truth") == head + plain
        assert encoding.encode_ordinary("truth</s>") == [*head, *plain, 1]
        assert encoding.document("truth").tolist() == [*head, *plain, 1]
        assert encoding.start == [*head, 1][0]
    made = make_tokenizer(tmp_path, bos=False)
    (tmp_path / "tokenizer_config.json").unlink()
    tokens.read_tokenizer.cache_clear()
    encoding = tokens.of(tmp_path)
    assert (
        encoding.document(TEXT).tolist() == encoding.encode_ordinary(TEXT) == made.encode(TEXT).ids
    )
    assert (encoding.start, encoding.end, encoding.stops) == (None, None, set())


def test_a_tokenizer_of_four_letters(tmp_path):
    """Without the letter a, and without a token for what it does not know."""
    from tokenizers import Tokenizer, models, processors

    marks = [("<s>", 4)]
    made = Tokenizer(models.BPE({"A": 0, "C": 1, "G": 2, "T": 3, "<s>": 4, "</s>": 5}, []))
    made.add_special_tokens(["<s>", "</s>"])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=marks)
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    )
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "</s>"}')
    tokens.read_tokenizer.cache_clear()
    ours, theirs = tokens.of(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert ours.end == theirs.eos_token_id == 5 and ours.start == 4
    assert ours.document("GATC").tolist() == [*theirs("GATC").input_ids, 5] == [4, 2, 0, 3, 1, 5]


def test_a_mark_in_a_text_is_its_token(monkeypatch):
    """With gpt2 as with a folder's tokenizer. Stand-ins for the files that tiktoken downloads."""
    ranks = {bytes([i]): i for i in range(256)}
    marks = {"<|endoftext|>": 50256}
    made = tokens.tiktoken.Encoding("few", pat_str=".", mergeable_ranks=ranks, special_tokens=marks)
    monkeypatch.setattr(tokens.tiktoken, "get_encoding", lambda name: made)
    encoding = tokens.of("gpt2")
    assert encoding.document("a<|endoftext|>b").tolist() == [97, 50256, 98, 50256]
    assert encoding.encode_ordinary("a<|endoftext|>b") == [97, 50256, 98]


# --- which tokens


def prepare(*flags):
    return train.prepare(train.flags().parse_args([str(flag) for flag in flags]))


def test_the_models_own_tokenizer_is_the_default(model):
    args, config = prepare("--init-from", model)
    assert args.tokenizer == str(model) and config.vocab == 512
    assert prepare()[0].tokenizer == "bytes"


def test_another_tokenizer_must_be_asked_for(model, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(model, bare)
    (bare / "tokenizer.json").unlink()
    with pytest.raises(Refused, match="no tokenizer.json.*FOLDER, gpt2 or bytes"):
        prepare("--init-from", bare)
    assert prepare("--init-from", bare, "--tokenizer", model)[0].tokenizer == str(model)


def test_a_new_model_takes_the_tokenizers_vocabulary(model):
    n = tokens.of(model).n_vocab
    assert prepare("--tokenizer", model)[1].vocab == n
    assert prepare("--tokenizer", model, "--vocab", "1000")[1].vocab == 1000
    with pytest.raises(Refused, match=f"{n} tokens: give --vocab {n}"):
        prepare("--tokenizer", model, "--vocab", "200")


def test_bad_tokenizers_are_one_sentence(model, tmp_path, monkeypatch):
    with pytest.raises(Refused, match="nowhere.tokenizer.json can't be read.*bytes, gpt2"):
        prepare("--tokenizer", "nowhere")
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(Refused, match="tokenizer.json can't be read"):
        prepare("--tokenizer", tmp_path)
    with pytest.raises(Refused, match="none is for ready-made tokens"):
        data.load("stdlib", "none")
    with pytest.raises(Refused, match="vocabulary of 512 is too small.*50257.*fewer tokens"):
        prepare("--init-from", model, "--tokenizer", "gpt2")
    make_tokenizer(tmp_path, bos=False)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(Refused, match="no token that begins a text: give a --prompt"):
        prepare("--tokenizer", tmp_path, "--prompt", "")
    with pytest.raises(Refused, match="--prompt can't be read as text"):
        prepare("--tokenizer", tmp_path, "--prompt", "\udcff")

    def no_network(name):
        raise ConnectionError

    monkeypatch.setattr(tokens.tiktoken, "get_encoding", no_network)
    with pytest.raises(Refused, match="--tokenizer bytes"):
        data.load("stdlib", "gpt2")
    tokens.read_tokenizer.cache_clear()
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(Refused, match="pip install tokenizers"):
        prepare("--tokenizer", model)


# --- samples


def test_a_sample_ends_where_the_text_does(ranks, model):
    """A launch, because a sample's tokens travel over the groups of the mesh."""

    def work(rank, folder, stop):
        encoding = tokens.of(folder)
        wanted = [*encoding.encode_ordinary("truth")[1:], stop, 77, 77]
        args = types.SimpleNamespace(prompt="It is ", sample=6, temperature=0.0, seed=1)
        run = types.SimpleNamespace(
            args=args,
            corpus=types.SimpleNamespace(encoding=encoding),
            config=types.SimpleNamespace(context=8),
            device=torch.device("cpu"),
        )

        def logits_after(runner, window):
            return torch.nn.functional.one_hot(torch.tensor(wanted.pop(0)), 512).float() * 9

        sampling.logits_after = logits_after
        schedule = types.SimpleNamespace(owner=[0], last=0)
        everybody = {"cp": None, "pp": None}
        runner = types.SimpleNamespace(run=run, groups=everybody, schedule=schedule)
        return sampling.generate(runner, args.sample)

    assert ranks(1, work, model, 1) == ["It is truth"]
    assert ranks(1, work, model, 2) == ["It is truth"]
