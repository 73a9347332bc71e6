"""data.py: the text, the tokens, and batches that are a pure function of seed and step."""

import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from harness import Refused, data, documents


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("It is a truth universally acknowledged. " * 50 + "ÄÖ€")
    return path


def test_bytes_are_tokens(text, tmp_path):
    corpus = data.load(text, folder=tmp_path)
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
    corpus = data.load(folder, folder=tmp_path)
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
        corpus = data.load(source, folder=tmp_path, mark=mark)
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


def test_batch_is_a_function_of_seed_and_step(text, tmp_path):
    corpus = data.load(text, folder=tmp_path)
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


def test_batches_reach_all_of_the_text(text, tmp_path):
    corpus = data.load(text, folder=tmp_path)
    train, val = corpus.split("train", 16), corpus.split("val", 16)
    assert len(train) + len(val) == len(corpus.tokens)
    assert abs(len(val) - len(corpus.tokens) / 10) < 18
    samples = torch.cat([corpus.batch(step, range(64), 16, 1)[2] for step in range(100)])
    starts = samples.numpy().view(np.uint64) % (len(train) - 16)
    assert len(np.unique(starts)) > 0.95 * (len(train) - 16)
    assert abs(starts.mean() / (len(train) - 16) - 0.5) < 0.02


def test_a_cache_that_was_cut_off_is_made_again(text, tmp_path):
    whole = data.load(text, folder=tmp_path).tokens.tolist()
    [cache] = tmp_path.glob("*.npy")
    good = cache.read_bytes()
    for bad in (good[:50], good[:-10], b"", b"junk" * 100):
        cache.write_bytes(bad)
        assert data.load(text, folder=tmp_path).tokens.tolist() == whole


def test_changed_text_is_tokenised_again(text, tmp_path):
    before = data.load(text, folder=tmp_path)
    text.write_text("something else, long enough to be a text of its own")
    after = data.load(text, folder=tmp_path)
    assert after.digest != before.digest and after.tokens[0] == ord("s")


def test_eight_ranks_start_at_once(text, tmp_path, ranks):
    digests = ranks(8, lambda rank: data.load(text, folder=tmp_path).digest)
    assert len(set(digests)) == 1 and len(list(tmp_path.glob("*.npy"))) == 1


def test_a_read_only_clone_has_its_cache_elsewhere(text, tmp_path, monkeypatch):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    (tmp_path / "data").write_text("no folder")
    monkeypatch.setattr(data, "__file__", str(tmp_path / "harness" / "data.py"))
    monkeypatch.setattr(data.tempfile, "tempdir", str(temporary))
    for _ in range(2):
        assert data.load(text).tokens[:3].tolist() == [*b"It "]
    [folder] = temporary.iterdir()
    assert folder.name == f"tokens-{os.getuid()}" and folder.stat().st_mode & 0o777 == 0o700
    assert len(list(folder.glob("*.npy"))) == 1
