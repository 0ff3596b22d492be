"""Writes folders.json: 60 tokenizer folders, and the ids that transformers gives for some texts.

    pip install transformers
    python3 generate.py                          # writes folders.json anew
    python3 generate.py --random 500 --seed 1 --out more.json

54 folders combine nine post-processors with six sets of start-token options; six have added tokens outside tokenizer.json. All share
one vocabulary. FP8_TEST_GOLDEN_TOKENIZERS=more.json makes the test compare with the folders in that file, too. A random folder that
transformers refuses, or whose files state ids that the tokenizer does not have, is left out.
"""

import argparse
import copy
import json
import random
import tempfile
from pathlib import Path

BOS, EOS = "<s>", "</s>"
TEXTS = [
    "", "a", "ab cab", " a  b ", "a<|im_end|>b<think>c", "<s>ab</s> c", "a <think> b", "x<think>y <think>", "<|im_end|> \n<|im_end|>a",
    "caf\u00e9 \u4f60 \U0001f600", "A <THINK> \u00c9\u0301", "<img><pad><tool>\u2026<unk>",
]


def byte_letters():
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return [chr(byte) for byte in plain] + [chr(256 + index) for index in range(len(others))]


def base():
    merges = [["a", "b"], ["c", "ab"], ["\u0120", "a"], ["\u0120", "c"], ["t", "h"]]
    tokens = byte_letters() + ["".join(merge) for merge in merges] + ["<unk>", BOS, EOS]
    vocab = {token: index for index, token in enumerate(tokens)}
    added = [own(vocab[token], token, special=True, normalized=False) for token in ("<unk>", BOS, EOS)]
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
            "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "vocab": vocab, "merges": merges,
        },
    }


def flags(content, **given):
    all_flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"content": content, **all_flags, **given}


def own(index, content, **given):
    return {"id": index, **flags(content, **given)}


def marked(content, **given):
    return {"__type": "AddedToken", **flags(content, **given)}


BASE = base()
VOCAB = BASE["model"]["vocab"]
FREE = len(VOCAB)


def template(single):
    def piece(token):
        if token == "$A":
            return {"Sequence": {"id": "A", "type_id": 0}}
        return {"SpecialToken": {"id": token, "type_id": 0}}

    names = {token for token in single if token != "$A"}
    special = {token: {"id": token, "ids": [VOCAB[token]], "tokens": [token]} for token in sorted(names)}
    pair = [*map(piece, single), {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": [*map(piece, single)], "pair": pair, "special_tokens": special}


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
ENDS = {"sep": [EOS, VOCAB[EOS]], "cls": [BOS, VOCAB[BOS]]}
POST_PROCESSORS = {
    "none": None,
    "byte level": BYTE_LEVEL,
    "bos": template([BOS, "$A"]),
    "eos": template(["$A", EOS]),
    "bos and eos": template([BOS, "$A", EOS]),
    "two bos": template([BOS, BOS, "$A"]),
    "roberta": {"type": "RobertaProcessing", **ENDS, "trim_offsets": True, "add_prefix_space": False},
    "bert": {"type": "BertProcessing", **ENDS},
    "sequence": {"type": "Sequence", "processors": [BYTE_LEVEL, template([BOS, "$A"])]},
}
NAMES = {"bos_token": BOS, "eos_token": EOS, "unk_token": "<unk>"}
# The model type of config.json, and tokenizer_config.json.
OPTIONS = {
    "no config": ("llama", None),
    "names": ("llama", {"tokenizer_class": "PreTrainedTokenizerFast", **NAMES}),
    "add bos": ("llama", {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True, **NAMES}),
    "add eos alone": (
        "gpt2", {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": False, "add_eos_token": True, **NAMES},
    ),
    "add both without names": (
        "mistral", {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": True, "add_eos_token": True},
    ),
    "add neither": (
        "qwen3", {"tokenizer_class": "PreTrainedTokenizer", "add_bos_token": False, "add_eos_token": False, **NAMES},
    ),
}


def start_folders():
    for processor, post in POST_PROCESSORS.items():
        for option, (model_type, config) in OPTIONS.items():
            files = {"config.json": {"model_type": model_type}}
            if config is not None:
                files["tokenizer_config.json"] = config
            yield {"name": f"{processor}, {option}", "tokenizer": {"post_processor": post}, "files": files}


def added_folders():
    """One for each of the four places, and two with several."""
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **NAMES}
    known = {str(VOCAB[token]): flags(token, special=True) for token in ("<unk>", BOS, EOS)}
    tokenizer = {"post_processor": POST_PROCESSORS["bos"]}
    decoder = {
        **known,
        str(FREE): flags("<|im_end|>", special=True, rstrip=True),
        str(FREE + 1): flags("<think>", normalized=True, lstrip=True, single_word=True),
    }
    yield "added_tokens_decoder", tokenizer, {"tokenizer_config.json": {**config, "added_tokens_decoder": decoder}}
    listed = ["<think>", marked("<|im_end|>", lstrip=True)]
    yield "additional_special_tokens", tokenizer, {
        "tokenizer_config.json": {**config, "pad_token": "<pad>", "additional_special_tokens": listed},
    }
    yield "added_tokens.json", tokenizer, {
        "added_tokens.json": {"<think>": FREE + 1, "<|im_end|>": FREE, "\u00c9\u0301": FREE + 2},
    }
    yield "special_tokens_map.json", tokenizer, {
        "tokenizer_config.json": {**config, "eos_token": "<|im_end|>", "image_token": "<img>"},
        "special_tokens_map.json": {
            "bos_token": {"content": BOS, "single_word": False, "lstrip": True, "rstrip": False, "normalized": False},
            "eos_token": "</s>", "pad_token": "<pad>", "additional_special_tokens": ["<think>", "<tool>"],
        },
    }
    more = copy.deepcopy(BASE["added_tokens"]) + [own(FREE, "<think>", rstrip=True)]
    yield "three places without added_tokens_decoder", {**tokenizer, "added_tokens": more}, {
        "tokenizer_config.json": {**config, "additional_special_tokens": ["<tool>"], "image_token": "<img>"},
        "special_tokens_map.json": {"additional_special_tokens": ["<ignored>"], "pad_token": "<pad>"},
        "added_tokens.json": {"<think>": FREE, "<|im_end|>": FREE + 1, "<tool>": FREE + 2},
    }
    yield "all four places", {**tokenizer, "added_tokens": more}, {
        "tokenizer_config.json": {
            **config, "added_tokens_decoder": {**known, str(FREE): flags("<think>", lstrip=True, normalized=True)},
            "extra_special_tokens": {"image_token": "<img>", "tool_token": "<tool>"}, "split_special_tokens": True,
        },
        "special_tokens_map.json": {"pad_token": "<pad>"},
        "added_tokens.json": {"<think>": FREE},
    }


def random_folders(count, draw):
    contents = ["<think>", "<|im_end|>", "<img>", "<tool>", "<pad>", "ab", " a", "\u00c9", "th", "a<", BOS, EOS, ""]
    names = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token", "image_token", "a_token"]

    def drawn_flags(content, keys=("single_word", "lstrip", "rstrip", "normalized", "special")):
        return {"content": content, **{key: draw.random() < 0.3 for key in keys if draw.random() < 0.7}}

    def some(most):
        return draw.sample(contents, draw.randrange(most + 1))

    def entry(is_map=False):
        content = draw.choice(contents)
        kind = draw.randrange(4)
        if kind == 0 or (kind == 1 and not is_map):
            return {**({} if is_map else {"__type": "AddedToken"}), **drawn_flags(content)}
        return None if kind == 2 and draw.random() < 0.3 else content

    def lists(target):
        for key in ("additional_special_tokens", "extra_special_tokens"):
            kind = draw.randrange(7)
            if kind < 2:
                target[key] = [{"__type": "AddedToken", **drawn_flags(c)} if draw.random() < 0.3 else c for c in some(3)]
            elif kind == 2 and key == "extra_special_tokens":
                target[key] = {f"own_{index}_token": content for index, content in enumerate(some(2))}
            elif kind == 3 and draw.random() < 0.3:
                target[key] = None

    def by_id(known, most):
        fresh = [content for content in some(most) if content not in VOCAB]
        return {**{VOCAB[token]: token for token in known}, **{FREE + index: token for index, token in enumerate(fresh)}}

    for index in range(count):
        files, tokenizer = {}, {"post_processor": draw.choice([*POST_PROCESSORS.values()])}
        if draw.random() < 0.5:
            tokens = by_id([token for token in ("<unk>", BOS, EOS) if draw.random() < 0.8], 2)
            tokenizer["added_tokens"] = [
                {"id": at, **flags(token), **drawn_flags(token)} for at, token in tokens.items()
            ]
        if draw.random() < 0.3:
            tokenizer["normalizer"] = draw.choice([{"type": "NFC"}, {"type": "Lowercase"}])
        if draw.random() < 0.8:
            config = {"tokenizer_class": "PreTrainedTokenizerFast"}
            for name in names:
                if draw.random() < 0.3:
                    config[name] = entry()
            lists(config)
            for name in ("add_bos_token", "add_eos_token", "split_special_tokens"):
                if draw.random() < 0.2:
                    config[name] = draw.random() < 0.5
            if draw.random() < 0.4:
                tokens = by_id([token for token in ("<unk>", BOS, EOS, "ab") if draw.random() < 0.5], 3)
                config["added_tokens_decoder"] = {str(at): drawn_flags(token) for at, token in tokens.items()}
            files["tokenizer_config.json"] = config
        if draw.random() < 0.4:
            mapped = {name: entry(is_map=True) for name in names if draw.random() < 0.3}
            lists(mapped)
            files["special_tokens_map.json"] = mapped
        if draw.random() < 0.4:
            files["added_tokens.json"] = {token: at for at, token in by_id([BOS] if draw.random() < 0.3 else [], 3).items()}
        files["config.json"] = {"model_type": "llama"}
        yield {"name": f"random {index}", "tokenizer": tokenizer, "files": files}


def states_other_ids(folder, tokenizer):
    """Whether a file states an id that the tokenizer does not have: an error here, which transformers does not look for."""
    found = {added["content"]: added["id"] for added in folder["tokenizer"].get("added_tokens", [])}.items()
    stated = [*found, *folder["files"].get("added_tokens.json", {}).items()]
    decoder = folder["files"].get("tokenizer_config.json", {}).get("added_tokens_decoder", {})
    stated += [(token["content"], int(index)) for index, token in decoder.items()]
    vocab = tokenizer.get_vocab()
    holders = {index: token for token, index in vocab.items()}
    return any(token and vocab.get(token, index) != index or token and holders.get(index, token) != token for token, index in stated)


def ids(folder):
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as place:
        for name, content in {"tokenizer.json": {**BASE, **folder["tokenizer"]}, **folder["files"]}.items():
            Path(place, name).write_text(json.dumps(content, sort_keys=True))
        tokenizer = AutoTokenizer.from_pretrained(place)
        if states_other_ids(folder, tokenizer):
            raise ValueError("contradiction")
        return [tokenizer(text)["input_ids"] for text in TEXTS]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--random", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("folders.json"))
    options = parser.parse_args()
    if options.random is None:
        config = {"config.json": {"model_type": "llama"}}
        added = [{"name": name, "tokenizer": own, "files": {**config, **files}} for name, own, files in added_folders()]
        folders = [*start_folders(), *added]
        assert len(folders) == 60
    else:
        folders = [*random_folders(options.random, random.Random(options.seed))]
    done, refused = [], []
    for folder in folders:
        try:
            done.append({**folder, "ids": ids(folder)})
        except Exception as error:
            refused.append((folder, error))
            if options.random is None:
                raise
    import transformers

    print(f"{len(done)} folders, {len(refused)} refused; transformers {transformers.__version__}")
    lines = [f'"transformers": {json.dumps(transformers.__version__)}', f'"texts": {json.dumps(TEXTS)}', f'"base": {json.dumps(BASE)}']
    lines.append('"folders": [\n' + ",\n".join(json.dumps(folder) for folder in done) + "\n]")
    options.out.write_text("{" + ",\n".join(lines) + "}\n")
    for folder, error in refused[:5]:
        print(type(error).__name__, str(error)[:100])


main()
