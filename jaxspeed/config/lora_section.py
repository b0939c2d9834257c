"""Section `lora`: low-rank adapters, in PEFT's words."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, Tag

from jaxspeed.config.types import (
    Beta,
    Count,
    Flag,
    Natural,
    Positive,
    Section,
    Text,
    is_list,
    word_or,
)
from jaxspeed.config.verdicts import honoured

Names = Annotated[list[Text], Field(min_length=1)]
Layers = Annotated[
    list[Natural],
    Field(min_length=1),
    BeforeValidator(lambda value: value if is_list(value) else [value]),
]
Modules = Annotated[
    Annotated[Literal["all-linear"], Tag("[word]")] | Annotated[Names, Tag("[other]")],
    word_or("all-linear", is_list, '"all-linear" or a list of module names'),
]
Initialization = Annotated[
    Annotated[Literal["gaussian"], Tag("[word]")] | Annotated[Flag, Tag("[other]")],
    word_or("gaussian", lambda value: isinstance(value, bool), 'true, false or "gaussian"'),
]


class Lora(Section):
    """Low-rank adapters (LoRA): small factors are trained, and the model is frozen."""

    r: Count = honoured(8, "Rank: the number of columns of A and of rows of B.")
    lora_alpha: Positive = honoured(
        8, "The adapters' product is multiplied by lora_alpha / r, or by lora_alpha / sqrt(r)."
    )
    lora_dropout: Beta = honoured(
        0.0, "Dropout of an adapter's input during training; embeddings have none, as in PEFT."
    )
    target_modules: Modules = honoured(
        "all-linear",
        'The modules that are adapted: names that end their dotted paths ("q_proj", '
        '"attn.q_proj"), or path patterns ("blocks[8:]/mlp/*"). "all-linear" is all whose '
        "weights are operands of matmuls, but for the output layer; no default where "
        "target_parameters are named.",
    )
    exclude_modules: Names | None = honoured(
        None, "Modules that are not adapted, named as in target_modules."
    )
    target_parameters: Names | None = honoured(
        None,
        "Parameters that are adapted, such as stacked experts: ends of their dotted paths "
        '("experts.gate_up_proj"), or path patterns. As in PEFT without dropout and DoRA.',
    )
    layers_to_transform: Layers | None = honoured(
        None, "The numbers of the layers that are adapted, by default all."
    )
    rank_pattern: dict[Text, Count] = honoured({}, "Other ranks than r, by module.")
    alpha_pattern: dict[Text, Positive] = honoured({}, "Other values of lora_alpha, by module.")
    use_rslora: Flag = honoured(
        False, "Multiplies by lora_alpha / sqrt(r), which suits large ranks (rank-stabilized LoRA)."
    )
    use_dora: Flag = honoured(
        False, "Trains the magnitude of each output feature's weights beside the adapter (DoRA)."
    )
    init_lora_weights: Initialization = honoured(
        True,
        'How adapters start: true is A uniform and B 0, "gaussian" A normal and B 0, so that the '
        "model starts unchanged; false is A and B random.",
    )
    modules_to_save: Names | None = honoured(
        None, "Modules that are trained in full beside the adapters, such as a new head."
    )
    bias: Literal["none", "all", "lora_only"] = honoured(
        "none", "The biases that are trained: none, all, or those of adapted modules."
    )
    adapter: Text | None = honoured(
        None,
        "A folder with a saved adapter (adapter_config.json of PEFT), from which the adapters "
        "start; its settings apply.",
    )
