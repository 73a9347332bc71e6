"""Which tokens a run of train.py is of: the model's own, unless others are asked for by name."""

import pathlib

from harness import ready_made, tokens
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
    if args.init_from and has_tokenizer(args.init_from):
        return args.init_from
    if ready_made.files_of(args.data):
        return "none"
    if args.init_from:
        raise Refused(
            f"{args.init_from} has no tokenizer.json, so the model's own tokens are not known: "
            "fetch that file too, or say --tokenizer FOLDER, gpt2 or bytes"
        )
    return "bytes"


def has_tokenizer(folder):
    return (pathlib.Path(folder) / "tokenizer.json").is_file()


def is_models_own(args, encoding):
    """Whether an encoding makes the tokens of --init-from's model. None: nothing says so."""
    if encoding.name == "none" or not has_tokenizer(args.init_from):
        return None
    return tokens.same(encoding, tokens.of(args.init_from))


def describe(args, encoding):
    """What to say about the tokens before the first step: a list of sentences. encoding:
    None in a dry run."""
    if not args.init_from or encoding is None or encoding.name == "none":
        return []
    chosen, own = f"--tokenizer {args.tokenizer}", is_models_own(args, encoding)
    if own is None:
        missing = f"{args.init_from} has no tokenizer.json to compare {chosen} with"
        return [f"{missing}: it is taken for the model's own"]
    reason = "its weights were trained on other tokens, and begin with a high loss"
    return [] if own else [f"{chosen} is not the model's own: {reason}"]


def exported(args, encoding):
    """What an exported folder has of tokens: {name: content} of files, and the fields of
    config.json that name tokens, {} to leave those of --init-from.

    The files are those of --tokenizer's folder, or of --init-from's if it has the same tokens: then
    its generation settings go along. None: bytes, or weights trained on other tokens."""
    folder, paths, fields = getattr(encoding, "folder", None), [], {}
    # As far as can be known
    if args.init_from and is_models_own(args, encoding) is not False:
        folder = folder or pathlib.Path(args.init_from)
        paths.append(pathlib.Path(args.init_from) / "generation_config.json")
    elif encoding.end is not None:
        fields = {"bos_token_id": encoding.start, "eos_token_id": encoding.end}
        fields["pad_token_id"] = None
    if folder:
        paths = [folder / name for name in FILES] + paths
    return {path.name: path.read_bytes() for path in paths if path.is_file()}, fields
