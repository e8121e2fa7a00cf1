"""Turns SmolLM2-135M-Instruct from GGUF into the Hugging Face folder that `eagle3` reads.

    python from_gguf.py OUT FILE [FILE ...]

Only for machines that hold a GGUF and cannot reach the hub; otherwise use `HuggingFaceTB/SmolLM2-135M-Instruct`
itself. Several files are taken as the pieces of one (`split -b 30M model.gguf piece.`), in the order given.
Quantised blocks are expanded exactly and rounded once, to bfloat16. Needs the `gguf` package.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf import GGUFReader, dequantize
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
IN_LAYER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}
CONTROL = 3  # GGUF's token type of special tokens


def join(pieces: list[Path], folder: Path) -> Path:
    """One file from its pieces."""
    whole = folder / "model.gguf"
    with whole.open("wb") as out:
        for piece in pieces:
            with piece.open("rb") as data:
                shutil.copyfileobj(data, out)
    return whole


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor."""
    if found := re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name):
        return f"model.layers.{found[1]}.{IN_LAYER[found[2]]}.weight"
    return TOP[name]


def halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undoes llama.cpp's interleaving of rotary pairs: [heads * H, D] with pairs apart by H / 2 again."""
    pairs = weight.reshape(heads, -1, 2, weight.shape[-1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def read_tensors(reader: GGUFReader, heads: int, kv_heads: int) -> dict[str, np.ndarray]:
    """All tensors under Hugging Face names, bfloat16."""
    tensors = {}
    for tensor in reader.tensors:
        name = hf_name(tensor.name)
        value = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        value = value.reshape([int(size) for size in reversed(tensor.shape)])
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            value = halves(value, heads if "q_proj" in name else kv_heads)
        tensors[name] = np.ascontiguousarray(value).astype(ml_dtypes.bfloat16)
    return tensors


def hf_config(fields: dict[str, Any]) -> dict[str, Any]:
    """config.json from GGUF metadata."""
    get = {key.removeprefix("llama."): value for key, value in fields.items()}
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]), "hidden_size": get["embedding_length"],
        "intermediate_size": get["feed_forward_length"], "num_hidden_layers": get["block_count"],
        "num_attention_heads": get["attention.head_count"], "num_key_value_heads": get["attention.head_count_kv"],
        "head_dim": get["embedding_length"] // get["attention.head_count"],
        "max_position_embeddings": get["context_length"], "rope_theta": get["rope.freq_base"],
        "rms_norm_eps": float(f"{get['attention.layer_norm_rms_epsilon']:.6g}"),
        "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False, "dtype": "bfloat16",
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"], "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
    }


def save_tokenizer(fields: dict[str, Any], out: Path) -> None:
    """tokenizer.json and tokenizer_config.json: byte-level BPE with single digits, and the chat template."""
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.save(str(out / "tokenizer.json"))
    end = tokens[fields["tokenizer.ggml.eos_token_id"]]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "pad_token": end,
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]], "add_bos_token": False, "add_prefix_space": False,
        "clean_up_tokenization_spaces": False, "chat_template": fields["tokenizer.chat_template"],
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


def convert(gguf: Path, out: Path) -> None:
    """Writes config, generation config, weights and tokenizer to `out`.

    Raises:
      ValueError: the file is not a SmolLM2 (llama architecture, its own pre-tokenizer).
    """
    reader = GGUFReader(gguf)
    fields = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    kind = (fields["general.architecture"], fields["tokenizer.ggml.pre"])
    if kind != ("llama", "smollm"):
        raise ValueError(f"{gguf}: architecture and pre-tokenizer are {kind}, this script reads ('llama', 'smollm')")
    out.mkdir(parents=True, exist_ok=True)
    config = hf_config(fields)
    tensors = read_tensors(reader, config["num_attention_heads"], config["num_key_value_heads"])
    (out / "config.json").write_text(json.dumps(config, indent=2))
    (out / "generation_config.json").write_text(json.dumps({"eos_token_id": config["eos_token_id"]}))
    save_tokenizer(fields, out)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    print(f"{len(tensors)} tensors, {sum(value.size for value in tensors.values()):,} parameters -> {out}")


def main() -> None:
    """Joins the pieces and converts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("files", type=Path, nargs="+")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        convert(args.files[0] if len(args.files) == 1 else join(args.files, Path(folder)), args.out)


if __name__ == "__main__":
    main()
