"""data.py: the text, the tokens, and batches that are a pure function of seed and step."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import train
from harness import Refused, data, documents, rank


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("It is a truth universally acknowledged. " * 50 + "ÄÖ€")
    return path


def test_bytes_are_tokens(text):
    corpus = data.load(text)
    raw = text.read_bytes()
    assert corpus.tokens.tolist() == [*raw, 256]
    assert corpus.encoding.decode(corpus.tokens[:-1].tolist()).encode() == raw


def test_stdlib_is_python_without_its_tests():
    files = data.find("stdlib")
    names = {f.name for f in files}
    assert {"argparse.py", "ast.py", "dataclasses.py"} <= names and files == sorted(files)
    assert not any("test" in f.parts or "site-packages" in f.parts for f in files)
    assert 5e6 < sum(f.stat().st_size for f in files) < 5e7


def test_folder_is_read_in_order(tmp_path):
    folder = tmp_path / "books"
    (folder / "b").mkdir(parents=True)
    (folder / "b" / "2.txt").write_text("two")
    (folder / "a.txt").write_text("one")
    (folder / "picture.png").write_bytes(b"\x89PNG\0\xff")
    corpus = data.load(folder)
    assert bytes(t for t in corpus.tokens if t < 256) == b"onetwo"


def test_documents(tmp_path):
    """Of a folder, of a file with marks, of ready-made tokens; a row's document begins anew."""
    folder, marked, ready = tmp_path / "files", tmp_path / "marked", tmp_path / "ready.npy"
    folder.mkdir()
    (folder / "1").write_text("ab")
    (folder / "2").write_text("c|d")
    marked.write_text("ab|c||d")
    np.save(ready, np.array([5, 1, 2, 5, 5, 3], np.uint16))
    end, (a, b, c, d), bar = 256, b"abcd", ord("|")
    args = SimpleNamespace(documents="|", tokenizer="bytes")
    for source, mark, expected in (
        (folder, None, [a, b, end, c, bar, d, end]),
        (folder, "|", [a, b, end, c, end, d, end]),
        (marked, "|", [a, b, end, c, end, d, end]),
    ):
        corpus = data.load(source, mark=mark)
        assert corpus.tokens.tolist() == expected
        documents.check(args, corpus)
    rows = torch.tensor([corpus.tokens[1:5].tolist(), corpus.tokens[2:6].tolist()])
    assert documents.starts_of(rows, args).tolist() == [[0, 1, 1, 3], [0, 0, 2, 2]]
    args = SimpleNamespace(documents="5", tokenizer="none")
    corpus = data.load(ready, "none", vocab=9, mark="5")
    rows = torch.from_numpy(corpus.tokens.astype(np.int64)).unsqueeze(0)
    assert documents.starts_of(rows, args).tolist() == [[0, 0, 0, 3, 4, 4]]
    assert documents.starts_of(rows, SimpleNamespace()) is None
    with pytest.raises(Refused, match="no token 7, which separates documents"):
        documents.check(SimpleNamespace(documents="7", tokenizer="none"), corpus)


def test_batch_is_a_function_of_seed_and_step(text):
    corpus = data.load(text)
    tokens, targets, samples = corpus.batch(3, range(8), 16, seed=5)
    assert tokens.shape == targets.shape == (8, 16) and tokens.dtype == torch.int64
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    for rows in (range(0, 3), range(3, 8)):  # every rank takes its rows of the same batch
        part = corpus.batch(3, rows, 16, seed=5)
        assert all(
            torch.equal(p, w[rows.start : rows.stop])
            for p, w in zip(part, (tokens, targets, samples))
        )
    ids = [
        corpus.batch(step, range(8), 16, seed, split)[2]
        for step in range(20)
        for seed in (5, 6)
        for split in ("train", "val")
    ]
    assert torch.cat(ids).unique().numel() == 20 * 2 * 2 * 8


def test_batches_reach_all_of_the_text(text):
    corpus = data.load(text)
    train, val = corpus.split("train", 16), corpus.split("val", 16)
    assert len(train) + len(val) == len(corpus.tokens)
    assert abs(len(val) - len(corpus.tokens) / 10) < 18
    samples = torch.cat([corpus.batch(step, range(64), 16, 1)[2] for step in range(100)])
    starts = samples.numpy().view(np.uint64) % (len(train) - 16)
    assert len(np.unique(starts)) > 0.95 * (len(train) - 16)
    assert abs(starts.mean() / (len(train) - 16) - 0.5) < 0.02


# --- ready-made tokens

TOKENS = np.array([data.hash64(7, i) % 300 for i in range(5000)])


def write(path, tokens=TOKENS, dtype=np.uint16, header=()):
    """header: the numbers with which llm.c's files begin; 256 numbers of four bytes in all."""
    before = np.array([*header, *[0] * 253], np.int32).tobytes() if header else b""
    path.write_bytes(before + tokens.astype(dtype).tobytes())
    return path


def load(path, vocab=300):
    return data.load(path, "none", vocab)


def test_dtype_of_a_bare_file_follows_the_vocabulary(tmp_path):
    small, large = write(tmp_path / "a.bin"), write(tmp_path / "b.bin", dtype=np.uint32)
    for corpus in (load(small), load(large, 128256)):
        assert isinstance(corpus.tokens, np.memmap) and corpus.tokens.tolist() == TOKENS.tolist()
    windows, targets, _ = load(small).batch(0, range(4), 16, seed=1)
    assert (windows[:, 1:] == targets[:, :-1]).all() and windows.max() < 300


@pytest.mark.parametrize("dtype", [np.uint16, np.int64])
def test_npy_says_its_dtype_itself(tmp_path, dtype):
    np.save(tmp_path / "a.npy", TOKENS.astype(dtype))
    tokens = load(tmp_path / "a.npy").tokens
    assert isinstance(tokens, np.memmap) and tokens.dtype == dtype
    assert tokens.tolist() == TOKENS.tolist()


@pytest.mark.parametrize(
    "magic, version, dtype", [(20240520, 1, np.uint16), (20240801, 7, np.uint32)]
)
def test_headers_are_recognised(tmp_path, magic, version, dtype):
    """As llm.c writes them, for GPT-2 and for Llama 3."""
    for number in (5000, 4000):
        path = write(tmp_path / "a.bin", dtype=dtype, header=(magic, version, number))
        assert load(path).tokens.tolist() == TOKENS[:number].tolist()


def test_a_folder_with_both_splits(tmp_path):
    write(tmp_path / "train.bin", TOKENS[:4000])
    held_out = write(tmp_path / "val.bin", TOKENS[4000:4030])
    corpus = load(tmp_path)
    assert corpus.split("train", 16).tolist() == TOKENS[:4000].tolist()
    assert corpus.split("val", 16).tolist() == TOKENS[4000:4030].tolist()
    with pytest.raises(Refused, match="the val split .* 30 tokens.* needs 33"):
        corpus.split("val", 32)
    args = train.flags().parse_args(["--data", str(tmp_path), "--vocab", "300", "--context", "32"])
    with pytest.raises(Refused, match="the val split"):  # before the first step
        rank.text_of(train.prepare(args)[0])
    held_out.unlink()
    assert len(load(tmp_path).split("val", 16)) == 400  # the last tenth


@pytest.mark.parametrize(
    "name, make, words",
    [
        ("a.bin", lambda p: write(p, TOKENS + 100), "has token 3.. .* is 300: give --vocab 3.. or"),
        ("a.bin", lambda p: write(p, dtype=np.uint32), "as if each took four bytes: write uint16"),
        ("a.bin", lambda p: p.write_bytes(b"\1\0\1"), "not a multiple of the data-type size"),
        ("a.bin", lambda p: p.write_bytes(b""), "can't be used .*empty"),
        ("a.bin", lambda p: None, "No such file"),
        ("a.bin", lambda p: write(p, header=(20240520, 2, 5000)), "version 2 and 5000 tokens"),
        ("a.bin", lambda p: write(p, header=(20240520, 1, -5)), "version 1 and -5 tokens"),
        ("a.bin", lambda p: write(p, header=(20240520, 1, 5001)), "greater than file size"),
        ("a.npy", lambda p: np.save(p, TOKENS.reshape(2, -1)), r"int64 of shape \(2, 2500\)"),
        ("a.npy", lambda p: np.save(p, -TOKENS), "has token -"),
        ("a.npy", lambda p: p.write_bytes(b"\x93NUMPY\1\0junk"), "can't be used"),
    ],
)
def test_bad_files_are_one_sentence(tmp_path, name, make, words):
    make(tmp_path / name)
    with pytest.raises(Refused, match=words) as error:
        load(tmp_path / name)
    assert "\n" not in str(error.value)


def test_a_run_without_a_tokenizer(tmp_path):
    path = write(tmp_path / "a.bin")
    args = train.flags().parse_args(["--data", str(path)])
    with pytest.raises(Refused, match="none needs --vocab"):
        train.prepare(args)
    args.vocab = 300
    args, config = train.prepare(args)
    assert args.tokenizer == "none" and config.vocab == 300 and args.sample == 0
