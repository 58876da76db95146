"""A GGUF file becomes a folder of safetensors, `tokenizer.json`, chat template and configs.

Beside `model_loader.py` this is the one module that imports transformers. Run as a program
(`python model_convert.py GGUF FOLDER`, as pdserve/models.py does) it leaves its caller's memory alone.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write the model of `gguf` to `folder` with its weights dequantized to bfloat16.

    What transformers can't read raises its own error. Needs about three times the size of the
    bfloat16 weights in memory.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    _restore_pre_tokenizer(tokenizer, gguf)
    # Without `dequantize` the weights stay packed, and packed weights can't be saved.
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    if "quantization_config" in json.loads((folder / "config.json").read_text()):
        raise RuntimeError(f"{gguf}: transformers kept a quantization_config for weights that are plain bfloat16")


def _restore_pre_tokenizer(tokenizer: object, gguf: Path) -> None:
    r"""Split text as the model was trained to, where transformers' GGUF reader forgets how.

    It reads every byte-level vocabulary as GPT-2's. SmolLM splits digits off first, so that in
    "\n\n1." the two newlines are one token.
    """
    from gguf import GGUFReader
    from tokenizers import pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    field = GGUFReader(gguf).get_field("tokenizer.ggml.pre")
    if field is None or field.contents() != "smollm":
        return
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


if __name__ == "__main__":
    convert_gguf(Path(sys.argv[1]), Path(sys.argv[2]))
