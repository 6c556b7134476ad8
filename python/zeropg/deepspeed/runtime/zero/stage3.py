"""DeepSpeed's `runtime.zero.stage3`: how much memory stage 3 takes, and whole models for generation."""

from zeropg.deepspeed.zero.estimates import (
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
from zeropg.deepspeed.zero.gathered_parameters import unwrap_model_for_generation

__all__ = [
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
    "unwrap_model_for_generation",
]
