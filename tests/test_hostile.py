"""Whatever a flag is given, a script refuses it in one sentence or would start; and a run survives
what it can't write."""

import importlib
import json
import os
import pathlib
import signal
import sys
from types import SimpleNamespace

import pytest
import torch
from test_flags import SCRIPTS, parser_of

import harness
from harness import data, presets, start, tokens
from proof import compare, receipt
from trainer import checkpoint, hf_config, pretrained, tracking

NUMBERS = ["0", "-1", "1", "3", "1e308", "nan", "inf", "1" + "0" * 8, "9" * 5000]
TEXTS = ["/dev/full", "pipe", "folder", "x" * 5000, "folder/" + "ä" * 127, "\udcff", "="]
MODES = ("--plan", "--dry-run", "--fit")
SIZES = ("--batch", "--layers", "--width", "--microbatches", "--nproc", "--seed")


class Ended(BaseException):
    """Where a process would begin to work."""


def end(*_, **__):
    raise Ended


@pytest.fixture
def nothing_starts(monkeypatch, tmp_path):
    """Scripts go as far as their checks: no rank, no other process, no simulation, no picture. The
    text is a small one: each command line reads it."""
    from receipts import pipeline
    from simulator import command, dryrun, layouts

    monkeypatch.chdir(tmp_path)
    for module, name in (
        (start, "one_rank"),
        (start, "start_ranks"),
        (command, "play_all"),
        (dryrun, "play_brief"),
        (pipeline, "simulate"),
    ):
        monkeypatch.setattr(module, name, end)
    monkeypatch.setattr(layouts, "candidates", lambda *_: [])
    find, small = data.find, pathlib.Path(json.__file__).parent
    monkeypatch.setattr(data, "find", lambda path: find(small if path == "stdlib" else path))
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")


def tries(parser):
    """The command lines to try: every flag with every value, alone; the modes with large sizes."""
    yield []
    for action in parser._actions:
        flag = action.option_strings[-1]
        if action.nargs == 0 and not flag.startswith("--help"):
            yield [flag]
        elif action.nargs != 0:
            for value in ["", *NUMBERS, *TEXTS]:
                yield [f"{flag}={value}"]
    for flag in MODES:
        if flag in parser._option_string_actions:
            for size in SIZES:
                for value in ("0", "3", "1" + "0" * 8):
                    yield [flag, size, value]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_flag_is_refused_in_one_sentence(name, nothing_starts, monkeypatch, capsys):
    """In this process, up to the point where ranks would start: some thousand command lines."""
    module, parser = importlib.import_module(name), parser_of(name, monkeypatch)
    problems, ends = [], {"started": 0, "refused": 0}
    for words in tries(parser):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
        line, outcome = " ".join(words)[:100], "started"
        try:
            module.main()
        except harness.Refused as e:
            outcome = "refused"
            if e.code != 2 or "\n" in str(e):
                problems.append(f"{line}: {e.code} {e}")
        except Ended:
            pass
        except Exception as e:
            problems.append(f"{line}: {type(e).__name__}: {str(e)[:200]}")
        ends[outcome] += 1
    assert not problems, "\n" + "\n".join(problems)
    assert all(ends.values()), ends


@pytest.mark.parametrize(
    "cgroup, file, found",
    [
        ("0::/jobs/7", "jobs/memory.max", 5000),  # of a folder above
        ("0::/../elsewhere", "memory.max", 5000),  # in a container
        ("9:cpu,io:/x\n5:memory:/jobs/7", "memory/jobs/7/memory.limit_in_bytes", 5000),
        ("0::/jobs/7", "other/memory.max", None),
    ],
)
def test_the_memory_that_a_cgroup_allows(tmp_path, cgroup, file, found):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(cgroup)
    path = tmp_path / "sys/fs/cgroup" / file
    path.parent.mkdir(parents=True)
    path.write_text("5000\n")
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert harness.files.memory(tmp_path) == (found or host)


# --- files that are none, and files without end or room


def replace(path, kind):
    """Put something in the place of a file."""
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.touch()
        os.truncate(path, 1 << 42)  # of zeros, which take no place on the disk


READ = {
    "config.json": lambda folder: hf_config.read(folder),
    "model.safetensors": lambda folder: pretrained.Folder(folder, presets.configure()),
    "model.safetensors.index.json": lambda folder: pretrained.files_of(folder),
    "tokenizer.json": lambda folder: tokens.read_tokenizer(folder / "tokenizer.json"),
    "tokenizer_config.json": lambda folder: harness.read_json(folder / "tokenizer_config.json"),
    "index.json": lambda folder: checkpoint.read_index(folder),
    "record.jsonl": lambda folder: compare.load(folder),
    "text": lambda folder: data.load(folder / "text"),
    "tokens.bin": lambda folder: data.load(folder / "tokens.bin", "none", vocab=300),
    "tokens.npy": lambda folder: data.load(folder / "tokens.npy", "none", vocab=300),
}


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "huge"])
@pytest.mark.parametrize("name", READ)
def test_what_is_no_file_is_refused_at_once(name, kind, tmp_path):
    """Opening a pipe would wait for its writer, reading /dev/zero would take all memory."""
    folder = tmp_path / "step-00000001"
    folder.mkdir()
    replace(folder / name, kind)
    signal.alarm(20)
    try:
        words = "a folder, a device or a pipe"
        if kind == "folder" and name in ("text", "tokens.bin", "tokens.npy"):
            words = "has no text"  # --data takes folders
        elif kind == "huge":
            words = "GB|can't be read|magic string|numbers are all 0"
        with pytest.raises((harness.Refused, ValueError, OSError), match=words) as error:
            READ[name](folder)
        assert "\n" not in str(error.value)
    finally:
        signal.alarm(0)


# --- files on a full disk


def test_a_receipt_without_room_is_printed(capsys):
    assert not receipt.write_json("/dev/full", {"ok": True})
    out, err = capsys.readouterr()
    assert out == '{"ok": true}\n' and "--json /dev/full can't be written (No space left" in err


def test_a_log_without_room_ends_no_run(capsys):
    with open("/dev/full", "wb", buffering=0) as file:
        tracking.write_line(file, {"step": 1, "loss": 1.0})
    assert "can't be written (No space left on device); the run goes on" in capsys.readouterr().err


def test_an_export_without_room_is_one_sentence(monkeypatch):
    """The other ranks, which wait in the sums of all parameters, end because rank 0 does."""
    config = harness.configure(harness.parser("").parse_args(["--layers", "1"]))
    args = SimpleNamespace(export="/nowhere", export_dtype=None, init_from=None)
    corpus = SimpleNamespace(encoding=SimpleNamespace(name="bytes", start=None, end=None))
    run = SimpleNamespace(rank=0, args=args, config=config, dtype=torch.float32, device="cpu")
    run.corpus = corpus

    def full(folder, config, parameters, *options):
        next(parameters)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pretrained, "write", full)
    monkeypatch.setattr(checkpoint, "pieces_of", lambda *_: [])
    monkeypatch.setattr(checkpoint, "share_out", lambda pieces: ([], {}))
    monkeypatch.setattr(checkpoint.dist, "all_reduce", lambda x, group: None)
    model = SimpleNamespace(named=lambda: [])
    with pytest.raises(harness.Refused, match="export /nowhere can.t be written .No space"):
        pretrained.export(run, model, None, None)
