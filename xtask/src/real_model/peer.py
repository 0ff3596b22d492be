#!/usr/bin/env python3
"""Loads a folder with transformers and continues a prompt greedily, in f32 on the CPU; prints times and memory as JSON.

  peer.py MODEL THREADS NEW_TOKENS PROMPT
"""
import json, resource, sys, time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

model, threads, new, prompt = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
torch.set_num_threads(threads)
start = time.perf_counter()
model_ = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
load = time.perf_counter() - start
for parameter in model_.parameters():
    parameter.sum()  # a file that is mapped is read when its weights are used
touched = time.perf_counter() - start
ids = AutoTokenizer.from_pretrained(model)(prompt, return_tensors="pt")["input_ids"]


def run(count):
    start = time.perf_counter()
    out = model_.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=2)
    return out[0, ids.shape[1]:].tolist(), time.perf_counter() - start


with torch.no_grad():
    run(4)
    _, first = run(1)
    tokens, whole = run(new)
print(json.dumps({
    "seconds_to_load": load, "seconds_to_load_and_read": touched, "seconds_to_first_token": first, "tokens_per_second": (len(tokens) - 1) / (whole - first),
    "tokens": tokens, "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    "version": f"transformers {__import__('transformers').__version__}, torch {torch.__version__}",
}))
