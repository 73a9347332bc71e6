"""data.py: the text, the tokens, and batches that are a pure function of seed and step."""

import struct
import subprocess
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
    text.write_bytes(b"\xef\xbb\xbf" + raw)  # a byte-order mark is no token
    assert data.load(text).tokens.tolist() == [*raw, 256]


def test_stdlib_is_python_without_its_tests():
    files, _ = data.find("stdlib")
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
    (folder / "c").symlink_to(folder / "b")
    corpus = data.load(folder)
    assert bytes(t for t in corpus.tokens if t < 256) == b"onetwo"
    assert corpus.note == "2 files, passed over, as no text: c, picture.png"
    corpus = data.load(f"{folder}/*/?.txt")
    assert bytes(t for t in corpus.tokens if t < 256) == b"twotwo" and corpus.note == "2 files"
    with pytest.raises(Refused, match="matches no file"):
        data.load(f"{folder}/*.md")


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("a.txt", "café".encode("latin-1") * 9, r"1 of 2 files are text, but not UTF-8 \(a.txt\)"),
        ("a.txt", "text".encode("utf-16"), "1 of 2 files are text, but not UTF-8"),
        ("a.jsonl", b"{}", "has a.jsonl, which is not read here: unpack it"),
        ("b/a.bin", b"1234", "has a.bin, which is not read here"),
        ("a.parquet", b"PAR1", "has a.parquet, which .* by python -c .*pyarrow"),
    ],
)
def test_what_looks_like_data_is_refused(tmp_path, name, content, words):
    (tmp_path / "README.md").write_text("a text " * 99)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(Refused, match=words):
        data.load(tmp_path)


def test_the_command_for_parquet(tmp_path):
    """Runs, with stand-ins for the two libraries."""
    (tmp_path / "tiktoken.py").write_text(
        "class get_encoding:\n    eot_token = 9\n    def __init__(self, name): pass\n"
        "    def encode_ordinary(self, text): return [*text.encode()]\n"
    )
    (tmp_path / "pyarrow").mkdir()
    (tmp_path / "pyarrow/__init__.py").touch()
    (tmp_path / "pyarrow/parquet.py").write_text(
        "class Column(list):\n    tolist = to_pylist = list.copy\n"
        "def read_table(f, columns): return {'text': Column(open(f).read().split())}\n"
    )
    for name, text in (("1.parquet", "d"), ("0.parquet", "ab c")):
        (tmp_path / name).write_text(text)
    subprocess.run(data.PARQUET, shell=True, cwd=tmp_path, check=True)
    a, b, c, d = b"abcd"
    assert np.fromfile(tmp_path / "train.bin", "u2").tolist() == [a, b, 9, c, 9, d, 9]


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


def megatron(path, tokens=TOKENS, dtype=np.uint16, code=8):
    """As Megatron-LM's IndexedDatasetBuilder writes them, here of two documents."""
    path.write_bytes(tokens.astype(dtype).tobytes())
    sizes, pointers = [5, len(tokens) - 5], [0, 5 * np.dtype(dtype).itemsize]
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, 2, 3)
    index = head + struct.pack("<2i2q3q", *sizes, *pointers, 0, 1, 2)
    path.with_suffix(".idx").write_bytes(index)
    return path


def with_header(path, tokens):
    return write(path, tokens, header=(20240520, 1, len(tokens)))


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
    path = write(tmp_path / "a.bin", dtype=dtype, header=(magic, version, 5000))
    assert load(path).tokens.tolist() == TOKENS.tolist()


@pytest.mark.parametrize("kind", [write, with_header, megatron])
def test_shards_are_one_text(tmp_path, kind):
    """Memory-mapped, in the order of their names; a folder and a pattern, with other files."""
    one, folder = load(write(tmp_path / "one.bin")), tmp_path / "shards"
    folder.mkdir()
    (folder / "README.md").write_text("a readme " * 99)
    for name, a, b in (("train_000002", 3999, 5000), ("train_000001", 9, 3999), ("train_0", 0, 9)):
        kind(folder / f"fineweb_{name}.bin", tokens=TOKENS[a:b])
    for source in (folder, f"{folder}/fineweb_*.bin"):
        corpus = load(source)
        assert corpus.held_out is None and len(corpus.tokens) == 5000
        assert all(isinstance(part, np.memmap) for part in corpus.tokens.parts)
        for split in ("train", "val"):
            assert np.asarray(corpus.split(split, 16)).tolist() == one.split(split, 16).tolist()
        for a, b in zip(corpus.batch(1, range(64), 100, 1), one.batch(1, range(64), 100, 1)):
            assert torch.equal(a, b)
        assert ("README.md" in corpus.note) == (source == folder) and "3 files" in corpus.note
    kind(folder / "fineweb_val_000000.bin", tokens=TOKENS[:100])
    corpus = load(folder)
    assert len(corpus.tokens) == 5000 and len(corpus.held_out) == 100
    assert len(load(f"{folder}/*val*").tokens) == 100
    write(folder / "fineweb_train_0.npy")
    with pytest.raises(Refused, match="as .bin and as .npy"):
        load(folder)


def test_megatrons_index_has_the_dtype(tmp_path):
    path = megatron(tmp_path / "a.bin", TOKENS, np.int32, 4)
    assert load(path).tokens.dtype == np.int32 and load(path).tokens.tolist() == TOKENS.tolist()
    for content, words in (
        (b"MM", "no index"),
        (path.with_suffix(".idx").read_bytes()[:-8], "size"),
    ):
        path.with_suffix(".idx").write_bytes(content)
        with pytest.raises(Refused, match=words):
            load(path)
    megatron(path, TOKENS, np.int32, 8)
    with pytest.raises(Refused, match="5,000 tokens of uint16, and the file another size"):
        load(path)


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
        ("a.bin", lambda p: write(p, TOKENS + 100), "has token 3.. .* is 300: give --vocab 400 or"),
        (
            "a.bin",
            lambda p: write(p, dtype=np.uint32),
            "4 bytes, as if of uint32: a vocabulary of 300 takes uint16",
        ),
        ("a.bin", lambda p: p.write_bytes(b"\1\0\1"), "not a multiple of the data-type size"),
        ("a.bin", lambda p: p.write_bytes(b""), "can't be used .*empty"),
        ("a.bin", lambda p: None, "No such file"),
        ("a.bin", lambda p: write(p, header=(20240520, 2, 5000)), "version 2 and 5000 tokens"),
        ("a.bin", lambda p: write(p, header=(20240520, 1, -5)), "version 1 and -5 tokens"),
        (
            "a.bin",
            lambda p: write(p, header=(20240520, 1, 5001)),
            "header says 5,001 tokens, its size 5,000",
        ),
        ("a.bin", lambda p: write(p, header=(20240520, 1, 4000)), "a pattern, not joined by cat"),
        ("a.bin", lambda p: write(p, header=(20240328, 1, 5000)), "it has no tokens"),
        (
            "a.bin",
            lambda p: write(p, TOKENS + 2**16, np.int64),
            "8 bytes.*uint64.*above 65,536 uint32",
        ),
        ("a.bin", lambda p: write(p, TOKENS * 400, np.uint32), "4 bytes, as if of uint32"),
        ("a.npy", lambda p: np.save(p, TOKENS << 40), "is 300: give the model's own tokens"),
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


def test_two_bytes_for_a_large_vocabulary(tmp_path):
    """Ids that wrapped in uint16: no --vocab fits what four bytes of them are."""
    path = write(tmp_path / "a.bin", np.arange(5000) * 3001 % 128256)
    with pytest.raises(
        Refused, match="2 bytes, as if of uint16: a vocabulary of 128,256 takes uint32"
    ):
        load(path, 128256)


def test_a_run_without_a_tokenizer(tmp_path):
    path = write(tmp_path / "a.bin")
    args = train.flags().parse_args(["--data", str(path)])
    with pytest.raises(Refused, match="none needs --vocab"):
        train.prepare(args)
    args.vocab = 300
    args, config = train.prepare(args)
    assert args.tokenizer == "none" and config.vocab == 300 and args.sample == 0
