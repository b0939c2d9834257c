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
