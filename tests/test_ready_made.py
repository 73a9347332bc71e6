"""ready_made.py: files of tokens that another program wrote."""

import numpy as np
import pytest

import train
from harness import Refused, data

TOKENS = np.array([data.hash64(7, i) % 300 for i in range(5000)])


def write(path, tokens=TOKENS, dtype=np.uint16, header=b""):
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(header + tokens.astype(dtype).tobytes())
    return path


def header(magic=20240520, version=1, count=len(TOKENS)):
    return np.array([magic, version, count, *[0] * 253], dtype=np.int32).tobytes()


def load(path, vocab=300, **options):
    return data.load(path, "none", vocab=vocab, **options)


def test_dtype_of_a_bare_file_follows_the_vocabulary(tmp_path):
    small, large = write(tmp_path / "a.bin"), write(tmp_path / "b.bin", dtype=np.uint32)
    for corpus in (load(small), load(large, 128256), load(large)):
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
    "magic, version, dtype", [(20240520, 1, "uint16"), (20240801, 7, "uint32")]
)
def test_headers_are_recognised(tmp_path, magic, version, dtype):
    """As llm.c writes them, for GPT-2 and for Llama 3."""
    path = write(tmp_path / "a.bin", dtype=dtype, header=header(magic, version))
    assert load(path).tokens.tolist() == TOKENS.tolist()
    write(path, dtype=dtype, header=header(magic, version, 4000))
    assert load(path).tokens.tolist() == TOKENS[:4000].tolist()


def test_a_folder_with_both_splits(tmp_path):
    write(tmp_path / "train.bin", TOKENS[:4000])
    held_out = write(tmp_path / "val.bin", TOKENS[4000:4030])
    corpus = load(tmp_path)
    assert corpus.split("train", 16).tolist() == TOKENS[:4000].tolist()
    assert corpus.split("val", 16).tolist() == TOKENS[4000:4030].tolist()
    with pytest.raises(Refused, match="the val split .* 30 tokens.* needs 33"):
        corpus.split("val", 32)
    held_out.unlink()
    assert len(load(tmp_path).split("val", 16)) == 400  # the last tenth


@pytest.mark.parametrize(
    "name, make, words",
    [
        ("a.bin", lambda p: write(p, TOKENS + 100), "has token 3.. .* is 300: give --vocab 3.. or"),
        ("a.bin", lambda p: p.write_bytes(b"\1\0\1"), "not a multiple of the data-type size"),
        ("a.bin", lambda p: p.write_bytes(b""), "can't be read .*empty"),
        ("a.bin", lambda p: None, "No such file"),
        ("a.bin", lambda p: write(p, header=header(version=2)), "version 2 and 5000 tokens"),
        ("a.bin", lambda p: write(p, header=header(count=-5)), "version 1 and -5 tokens"),
        ("a.bin", lambda p: write(p, header=header(count=5001)), "greater than file size"),
        ("a.bin", lambda p: write(p, header=header(count=0)), "shape"),
        ("a.npy", lambda p: np.save(p, TOKENS.reshape(2, -1)), r"int64 of shape \(2, 2500\)"),
        ("a.npy", lambda p: np.save(p, -TOKENS), "has token -"),
        ("a.npy", lambda p: p.write_bytes(b"\x93NUMPY\1\0junk"), "can't be read"),
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
