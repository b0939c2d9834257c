"""Small Hugging Face folders, written with NumPy and the format's own description."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np

NAMES = {
    "float32": "F32", "float16": "F16", "bfloat16": "BF16", "uint8": "U8", "int8": "I8",
    "float8_e4m3fn": "F8_E4M3", "int64": "I64", "int32": "I32", "bool": "BOOL",
}  # fmt: skip
VOCAB, EMBED, LAYERS, HEADS, KV_HEADS, MLP = 40, 16, 3, 4, 2, 24
DIM = EMBED // HEADS

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": EMBED,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "intermediate_size": MLP,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
}
GPT2 = {
    "model_type": "gpt2",
    "n_embd": EMBED,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "vocab_size": VOCAB,
    "n_positions": 64,
}


def write(path: Path, tensors: dict[str, np.ndarray]) -> None:
    header, offset = {}, 0
    for name, x in tensors.items():
        end = offset + x.nbytes
        header[name] = {
            "dtype": NAMES[x.dtype.name], "shape": x.shape, "data_offsets": [offset, end],
        }  # fmt: skip
        offset = end
    text = json.dumps(header).encode()
    parts = [len(text).to_bytes(8, "little"), text, *(x.tobytes() for x in tensors.values())]
    path.write_bytes(b"".join(parts))


def folder(path: Path, config: dict, tensors: dict[str, np.ndarray], files: int = 1) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    if files == 1:
        write(path / "model.safetensors", tensors)
        return path
    where = {}
    for i in range(files):
        file = f"model-{i + 1:05d}-of-{files:05d}.safetensors"
        part = {name: x for k, (name, x) in enumerate(tensors.items()) if k % files == i}
        write(path / file, part)
        where |= dict.fromkeys(part, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return path


def llama_tensors(dtype=np.float32, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {"model.embed_tokens.weight": (VOCAB, EMBED), "model.norm.weight": (EMBED,)}
    for i in range(LAYERS):
        for name, shape in {
            "input_layernorm": (EMBED,),
            "post_attention_layernorm": (EMBED,),
            "self_attn.q_proj": (EMBED, EMBED),
            "self_attn.k_proj": (KV_HEADS * DIM, EMBED),
            "self_attn.v_proj": (KV_HEADS * DIM, EMBED),
            "self_attn.o_proj": (EMBED, EMBED),
            "mlp.gate_proj": (MLP, EMBED),
            "mlp.up_proj": (MLP, EMBED),
            "mlp.down_proj": (EMBED, MLP),
        }.items():
            shapes[f"model.layers.{i}.{name}.weight"] = shape
    shapes["lm_head.weight"] = (VOCAB, EMBED)
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def llama_parameters(t: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The parameters of these tensors, by NumPy's own transposes."""

    def stack(name, shape=None):
        layers = [t[f"model.layers.{i}.{name}.weight"] for i in range(LAYERS)]
        return np.stack([x.T.reshape(shape) if shape else x.T for x in layers])

    return {
        "embed/table": t["model.embed_tokens.weight"],
        "head/table": t["lm_head.weight"],
        "norm/scale": t["model.norm.weight"],
        "blocks/attn_norm/scale": stack("input_layernorm"),
        "blocks/mlp_norm/scale": stack("post_attention_layernorm"),
        "blocks/attn/q_proj/kernel": stack("self_attn.q_proj", (EMBED, HEADS, DIM)),
        "blocks/attn/k_proj/kernel": stack("self_attn.k_proj", (EMBED, KV_HEADS, DIM)),
        "blocks/attn/v_proj/kernel": stack("self_attn.v_proj", (EMBED, KV_HEADS, DIM)),
        "blocks/attn/o_proj/kernel": stack("self_attn.o_proj", (HEADS, DIM, EMBED)),
        "blocks/mlp/gate/kernel": stack("mlp.gate_proj"),
        "blocks/mlp/up/kernel": stack("mlp.up_proj"),
        "blocks/mlp/down/kernel": stack("mlp.down_proj"),
    }


def gpt2_tensors(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {"transformer.wte.weight": (VOCAB, EMBED), "transformer.wpe.weight": (64, EMBED)}
    for i in range(LAYERS):
        for name, shape in {
            "ln_1.weight": (EMBED,),
            "ln_1.bias": (EMBED,),
            "attn.c_attn.weight": (EMBED, 3 * EMBED),
            "attn.c_attn.bias": (3 * EMBED,),
            "attn.c_proj.weight": (EMBED, EMBED),
            "attn.c_proj.bias": (EMBED,),
            "ln_2.weight": (EMBED,),
            "ln_2.bias": (EMBED,),
            "mlp.c_fc.weight": (EMBED, 4 * EMBED),
            "mlp.c_fc.bias": (4 * EMBED,),
            "mlp.c_proj.weight": (4 * EMBED, EMBED),
            "mlp.c_proj.bias": (EMBED,),
        }.items():
            shapes[f"transformer.h.{i}.{name}"] = shape
    shapes |= {"transformer.ln_f.weight": (EMBED,), "transformer.ln_f.bias": (EMBED,)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


BF16 = ml_dtypes.bfloat16
