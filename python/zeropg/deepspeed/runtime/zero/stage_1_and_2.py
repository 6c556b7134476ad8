"""DeepSpeed's `runtime.zero.stage_1_and_2`: how much memory stage 2 takes."""

from zeropg.deepspeed.zero.estimates import (
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
)

__all__ = ["estimate_zero2_model_states_mem_needs_all_cold", "estimate_zero2_model_states_mem_needs_all_live"]
