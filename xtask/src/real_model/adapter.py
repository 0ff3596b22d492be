#!/usr/bin/env python3
"""The mean loss of a model over windows of tokens, in f32 on the CPU, with an adapter if one is named; prints it as JSON.

  adapter.py MODEL IDS WINDOWS [ADAPTER]
"""
import json, sys

import torch, transformers
from safetensors.torch import load_file

model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
version = f"transformers {transformers.__version__}"
if len(sys.argv) > 4:
    import peft
    model = peft.PeftModel.from_pretrained(model, sys.argv[4])
    version = f"peft {peft.__version__}"
model.eval()
windows = load_file(sys.argv[2])["input_ids"][: int(sys.argv[3])].long()
total, count = 0.0, 0
with torch.no_grad():
    for window in windows:
        logits = model(window[None]).logits[0, :-1].double()
        total += torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum").item()
        count += len(window) - 1
print(json.dumps({"loss": total / count, "version": version}))
