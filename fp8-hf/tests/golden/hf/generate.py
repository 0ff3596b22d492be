#!/usr/bin/env python3
"""Condenses checkpoints that peers wrote into export/digests.json, export/input_scales.json and export/matrices.safetensors.

  generate.py FULL     # FULL: the folder with all models, `export/<model>-<scheme>/model.safetensors`, `export/matrices.safetensors`

digests.json: {"<model>-<scheme>": {"<tensor>": [dtype, shape, sha256 of the bytes]}}.
input_scales.json: {"<model>-<scheme>": {"<tensor>": its value}}. Needs torch and safetensors.
"""
import hashlib, json, os, struct, sys
from safetensors.torch import load_file, save_file

scales = {}
full, here = sys.argv[1], os.path.dirname(os.path.abspath(__file__))
digests = {}
for name in sorted(os.listdir(os.path.join(full, "export"))):
    path = os.path.join(full, "export", name, "model.safetensors")
    if os.path.exists(path):
        data = open(path, "rb").read()
        size = struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8 : 8 + size])
        header.pop("__metadata__", None)
        digests[name] = {
            tensor: [info["dtype"], info["shape"], hashlib.sha256(data[8 + size + info["data_offsets"][0] : 8 + size + info["data_offsets"][1]]).hexdigest()]
            for tensor, info in sorted(header.items())
        }
        found = {tensor: value.item() for tensor, value in load_file(path).items() if tensor.endswith("input_scale")}
        if found:
            scales[name] = dict(sorted(found.items()))
with open(os.path.join(here, "export", "input_scales.json"), "w") as f:
    json.dump(scales, f, indent=1)
    f.write("\n")
with open(os.path.join(here, "export", "digests.json"), "w") as f:
    rows = [f'"{name}": {{\n' + ",\n".join(f"{json.dumps(t)}: {json.dumps(i)}" for t, i in d.items()) + "\n}" for name, d in digests.items()]
    f.write("{" + ",\n".join(rows) + "}\n")
matrices = load_file(os.path.join(full, "export", "matrices.safetensors"))
small = {name: tensor for name, tensor in matrices.items() if not name.startswith("mixed.")}
save_file(small, os.path.join(here, "export", "matrices.safetensors"), {"format": "pt"})
