"""What becomes of batch sizes, precision, the optimizer and its schedule, and how gradients are averaged."""

from __future__ import annotations

from typing import Any

from zeropg.deepspeed.config.keys.key import honoured, mapped, no_effect, refused, what_is_on

_AVERAGES = "Gradients are added up in fp32 and divided once, so nothing overflows on the way."


def _is_sum(operation: Any) -> bool:
    return bool(operation == "sum")


def _is_other_than_bf16(dtype: Any) -> bool:
    return dtype not in ("bf16", "bfloat16", "torch.bfloat16")


BATCH = {
    "train_batch_size": honoured("Samples of a step of all ranks: micro batch * accumulation * ranks."),
    "train_micro_batch_size_per_gpu": honoured("Samples of one forward of one rank."),
    "gradient_accumulation_steps": honoured("Forwards and backwards of a step; the loss is divided by it."),
    "managed_gradient_accumulation": honoured("False: each step() of the engine is a step of the optimizer."),
    "dataloader_drop_last": honoured("Of the loader that initialize(training_data=) makes."),
}

FP16 = {
    "enabled": honoured("fully_shard(param_dtype=torch.float16), with a scaled loss; masters stay fp32."),
    "auto_cast": honoured("true: floating inputs of the model, labels and masks too, are cast to fp16."),
    "loss_scale": honoured("The scale of the loss; 0: a dynamic one."),
    "initial_scale_power": honoured("A dynamic scale begins at 2 to this power."),
    "loss_scale_window": honoured("Steps without an overflow before the scale doubles."),
    "hysteresis": honoured("Overflows before the scale is halved."),
    "consecutive_hysteresis": honoured("Whether each step without an overflow restores the hysteresis."),
    "min_loss_scale": honoured("The least scale; an overflow at it is an error."),
    "fp16_master_weights_and_grads": refused(
        "Masters are fp32, which is what keeps small updates.",
        instead="Use zero_optimization.offload_optimizer to keep them out of memory.",
    ),
}

BF16 = {
    "enabled": honoured("fully_shard(param_dtype=torch.bfloat16); masters stay fp32."),
    "immediate_grad_update": no_effect("Gradients go to their accumulators as the backward makes them."),
    "check_grad_overflow": honoured("A step whose gradients are not finite on some rank is left out on all."),
    "bf16_master_weights_and_grads": refused(
        "Masters are fp32, which is what keeps small updates.",
        instead="Use zero_optimization.offload_optimizer to keep them out of memory.",
    ),
    "bf16_optimizer_states": mapped(
        "True: Adam and AdamW keep moments in bfloat16, rounded stochastically: zeropg.optim.AdamW(state_bits=16)."
    ),
}

AUTOCAST = {
    "enabled": honoured(
        "The engine's forward runs in torch.autocast; parameters and gradients stay fp32. In stage 3 the 16-bit copies "
        "of weights live from the forward to the backward, as autograd keeps them: bf16.enabled needs less."
    ),
    "dtype": mapped(
        "bfloat16, which is the default.",
        refuses=_is_other_than_bf16,
        because="Forwards are cast to bfloat16 only: float16 needs a scaled loss.",
        instead='Use bfloat16, or the block "fp16", which scales it.',
    ),
    "lower_precision_safe_modules": no_effect("Gradients travel in fp32, or as communication_data_type says."),
}

DATA_TYPES = {
    "grad_accum_dtype": mapped("Gradients are always accumulated in the masters' dtype, fp32."),
    "param_dtype": honoured("fully_shard(param_dtype=); it must agree with fp16 and bf16."),
    "buffer_dtype": honoured(
        "fully_shard(buffer_dtype=); without it buffers stay as they are, but for the statistics of batch norms in "
        "fp16 and bf16, which are rounded."
    ),
    "keep_in_fp32_modules": mapped("Buffers are never cast unless buffer_dtype is set, and then all of them are."),
}

UPDATE = {
    "optimizer.type": mapped(
        "AdamW, Adam and the elementwise classes of torch.optim; Lamb, Lion and Muon of zeropg.optim; OneBitAdam, "
        "OneBitLamb and ZeroOneAdam, which takes no local steps, in stages 0 and 1."
    ),
    "optimizer.params": mapped("Arguments of the class, with DeepSpeed's defaults (a weight_decay of 0, for one)."),
    "optimizer.legacy_fusion": no_effect("It chooses between two Adams of Apex's."),
    "scheduler.type": honoured("DeepSpeed's five schedules with the same rates at every step, or a class of torch's."),
    "scheduler.params": honoured("Arguments of the class."),
    "gradient_clipping": honoured("The L2 norm of all gradients is cut to it before each step; 0: it is not."),
}

COMMUNICATION = {
    "communication_data_type": mapped("fully_shard(reduce_dtype=); without it gradients travel in fp32."),
    "seq_parallel_communication_data_type": no_effect("It belongs to sequence parallelism, which is refused."),
    "gradient_allreduce_op": refused(
        "Gradients of all ranks are averaged.", instead="Multiply the loss by the number of ranks.", refuses=_is_sum
    ),
    "prescale_gradients": no_effect(_AVERAGES),
    "gradient_predivide_factor": no_effect(_AVERAGES),
    "disable_allgather": no_effect("Updated parameters are always gathered, or shared by the ranks of a node."),
    "sparse_gradients": refused(
        "DeepSpeed has removed it, and gradients of sharded models are dense.",
        instead="Use nn.Embedding(sparse=False), and zero_optimization.zero_quantized_gradients on a slow link.",
        refuses=what_is_on,
    ),
}
