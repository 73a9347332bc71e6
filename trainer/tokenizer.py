"""Which tokens a run of train.py is of: the model's own, unless others are asked for by name."""

import pathlib

from harness.ready_made import find_tokens
from harness.refusal import Refused

# What a Hugging Face folder has beside config.json and the weights
FILES = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"]
FILES += ["added_tokens.json", "tokenizer.model", "vocab.json", "merges.txt"]
FILES += ["chat_template.jinja", "chat_template.json"]


def choose(args):
    """--tokenizer, or its default: that of --init-from; none for ready-made tokens; else bytes. A
    dry run reads no text, and needs none."""
    if args.tokenizer or args.dry_run or args.plan:
        return args.tokenizer or "bytes"
    if args.init_from and (pathlib.Path(args.init_from) / "tokenizer.json").is_file():
        return args.init_from
    if find_tokens(args.data):
        return "none"
    if args.init_from:
        raise Refused(
            f"{args.init_from} has no tokenizer.json, so the model's own tokens are not known: "
            "fetch that file too, or say --tokenizer FOLDER, gpt2 or bytes"
        )
    return "bytes"


def exported(args, encoding):
    """What an exported folder has of tokens: {name: content} of files, and the fields of
    config.json that name tokens, {} to leave those of --init-from.

    The files are those of the tokenizer's folder: --init-from's generation settings go along with
    its own tokenizer. None: bytes, or tokens of another kind."""
    folder, paths, fields = getattr(encoding, "folder", None), [], {}
    if args.init_from and args.tokenizer in (args.init_from, "none"):
        folder = pathlib.Path(args.init_from)
        paths.append(folder / "generation_config.json")
    elif encoding.end is not None:
        fields = {"bos_token_id": encoding.start, "eos_token_id": encoding.end}
        fields["pad_token_id"] = None
    if folder:
        paths = [folder / name for name in FILES] + paths
    return {path.name: path.read_bytes() for path in paths if path.is_file()}, fields
