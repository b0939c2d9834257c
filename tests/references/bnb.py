"""bitsandbytes' tables and quantized values, on the CPU."""

import torch
from bitsandbytes import functional


def tables() -> dict[str, torch.Tensor]:
    return {
        "nf4": functional.get_4bit_type("nf4", "cpu"),
        "fp4": functional.get_4bit_type("fp4", "cpu"),
        "signed": functional.create_dynamic_map(signed=True),
        "unsigned": functional.create_dynamic_map(signed=False),
        "six exponents": functional.create_dynamic_map(signed=True, max_exponent_bits=6),
    }


def quantized(weight: torch.Tensor, values: str, double: bool = False) -> dict[str, torch.Tensor]:
    """A weight [out, in] in 4 bits, and what `Params4bit` would save of it."""
    packed, state = functional.quantize_4bit(
        weight, blocksize=64, quant_type=values, compress_statistics=double
    )
    found = {"packed": packed, "value": functional.dequantize_4bit(packed, state)}
    if not double:
        return found | {"absmax": state.absmax}
    absmax = functional.dequantize_blockwise(state.absmax, state.state2) + state.offset
    groups = state.state2.absmax
    return found | {"offset": state.offset, "groups": groups, "absmax": absmax}


def in_rows(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """A weight [out, in] in 8 bits."""
    codes, stats, _ = functional.int8_vectorwise_quant(weight)
    value = functional.int8_vectorwise_dequant(codes, stats)
    return {"codes": codes, "stats": stats, "value": value}


def saved(weights: dict[str, torch.Tensor], values: str, double: bool) -> dict[str, torch.Tensor]:
    """The tensors of a file of weights [out, in], and their values below `value of `."""
    found = {}
    for name, weight in weights.items():
        if values == "int8":
            codes, stats, _ = functional.int8_vectorwise_quant(weight)
            base = name.removesuffix(".weight")
            found |= {name: codes, f"{base}.SCB": stats}
            found[f"{base}.weight_format"] = torch.tensor(0, dtype=torch.uint8)
            found[f"value of {name}"] = functional.int8_vectorwise_dequant(codes, stats)
            continue
        packed, state = functional.quantize_4bit(
            weight, blocksize=64, quant_type=values, compress_statistics=double
        )
        found[name] = packed
        found |= {f"{name}.{part}": x for part, x in state.as_dict(packed=True).items()}
        found[f"value of {name}"] = functional.dequantize_4bit(packed, state)
    return found
