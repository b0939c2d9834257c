"""Sections that say in which number format to compute, to accumulate and to step."""

from jaxspeed.config.types import (
    Count,
    Dtype,
    Flag,
    NonNegative,
    Positive,
    ScalePower,
    Section,
    Text,
)


class Fp16(Section):
    """fp16 with loss scaling, by DeepSpeed's names."""

    enabled: Flag = False
    loss_scale: NonNegative = 0.0
    initial_scale_power: ScalePower = 16
    loss_scale_window: Count = 1000
    hysteresis: Count = 2
    consecutive_hysteresis: Flag = False
    min_loss_scale: Positive = 1.0
    auto_cast: Flag = False
    fp16_master_weights_and_grads: Flag = False

    @property
    def dynamic(self) -> bool:
        """Whether the scale follows the overflows; DeepSpeed says this with a scale of 0."""
        return self.loss_scale == 0


class Bf16(Section):
    """bf16 by DeepSpeed's names."""

    enabled: Flag = False
    check_grad_overflow: Flag = True
    bf16_master_weights_and_grads: Flag = False
    bf16_optimizer_states: Flag = False
    immediate_grad_update: Flag = False


class DataTypes(Section):
    """Formats apart from the compute format."""

    grad_accum_dtype: Dtype | None = None
    param_dtype: Dtype | None = None
    buffer_dtype: Dtype | None = None


class TorchAutocast(Section):
    """Autocast in torch's words; here it names the compute format."""

    enabled: Flag = False
    dtype: Dtype | None = None
    lower_precision_safe_modules: list[Text] | None = None
