#!/usr/bin/env python3
"""NVFP4 by compressed-tensors, for what `fp8 quantize --scheme nvfp4a16` writes and `fp8 eval` reads.

  nvfp4.py write MODEL LIKE OUT     quantizes the f32 weights of MODEL, with the names and files of the folder LIKE
  nvfp4.py loss BASE FOLDER IDS WINDOWS    the mean loss of the weights in FOLDER, widened to f32, in the model BASE; prints JSON

Weights that readers compute as one (q, k and v; gate and up) share a global scale, as both programs are asked to.
"""
import json, os, shutil, sys

import compressed_tensors, torch, transformers
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file

SCHEME = preset_name_to_scheme("NVFP4A16", ["Linear"])
find = getattr(BaseCompressor, "get_value_from_registry", None) or BaseCompressor.load_from_registry
COMPRESSOR = find("nvfp4-pack-quantized")
if isinstance(COMPRESSOR, type) and not isinstance(getattr(COMPRESSOR, "compress", None), (classmethod, staticmethod)):
    try:
        COMPRESSOR = COMPRESSOR()
    except TypeError:
        pass  # its methods are the class's own
GROUPS = [("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")]


def amax_of_group(tensors, module):
    parent, name = module.rsplit(".", 1)
    group = next((group for group in GROUPS if name in group), (name,))
    return max(tensors[f"{parent}.{other}.weight"].abs().amax() for other in group).reshape(1)


def write(model, like, out):
    tensors = load_file(f"{model}/model.safetensors")
    shutil.copytree(like, out)
    names = load_file(f"{like}/model.safetensors")
    done = {name: tensors[name] for name in names if name in tensors}
    for packed in (name for name in names if name.endswith(".weight_packed")):
        module = packed.removesuffix(".weight_packed")
        weight, amax = tensors[f"{module}.weight"], amax_of_group(tensors, module)
        scale = generate_gparam(-amax, amax)
        blocks = weight.reshape(weight.shape[0], -1, 16).abs().amax(-1)
        scales, _ = calculate_qparams(-blocks, blocks, SCHEME.weights, global_scale=scale)
        state = COMPRESSOR.compress({"weight": weight, "weight_scale": scales, "weight_global_scale": scale}, SCHEME)
        done |= {f"{module}.{end}": value.contiguous() for end, value in state.items()}
    save_file(done, f"{out}/model.safetensors", {"format": "pt"})


def loss(base, folder, ids, windows):
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tensors, state = load_file(f"{folder}/model.safetensors"), model.state_dict()
    for packed in (name for name in tensors if name.endswith(".weight_packed")):
        module = packed.removesuffix(".weight_packed")
        codes, scales, scale = (tensors[f"{module}.{end}"] for end in ("weight_packed", "weight_scale", "weight_global_scale"))
        values = unpack_fp4_from_uint8(codes, codes.shape[0], 2 * codes.shape[1], torch.float32)  # not rounded to bf16
        values = dequantize(values, scales.float(), args=SCHEME.weights, global_scale=scale, dtype=torch.float32)
        state[f"{module}.weight"].copy_(values)
    model.eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for window in load_file(ids)["input_ids"][: int(windows)].long():
            logits = model(window[None]).logits[0, :-1].double()
            total += torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum").item()
            count += len(window) - 1
    version = f"compressed-tensors {compressed_tensors.__version__}, torch {torch.__version__}"
    print(json.dumps({"loss": total / count, "version": version}))


if __name__ == "__main__":
    {"write": write, "loss": loss}[sys.argv[1]](*sys.argv[2:])
