"""Values that are "auto": what fills them, and what becomes of those that nobody filled."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

_AUTO = "auto"
# Keys that Hugging Face's Trainer fills, and from what: filled by `hugging_face_auto`.
FILLED_BY = {
    "train_batch_size": "per_device_train_batch_size * gradient_accumulation_steps * ranks",
    "train_micro_batch_size_per_gpu": "TrainingArguments.per_device_train_batch_size",
    "gradient_accumulation_steps": "TrainingArguments.gradient_accumulation_steps",
    "gradient_clipping": "TrainingArguments.max_grad_norm",
    "optimizer.params.lr": "TrainingArguments.learning_rate",
    "optimizer.params.betas": "TrainingArguments.adam_beta1 and adam_beta2",
    "optimizer.params.eps": "TrainingArguments.adam_epsilon",
    "optimizer.params.weight_decay": "TrainingArguments.weight_decay",
    "scheduler.params.warmup_min_lr": "0",
    "scheduler.params.warmup_max_lr": "TrainingArguments.learning_rate",
    "scheduler.params.warmup_num_steps": "TrainingArguments.warmup_steps",
    "scheduler.params.total_num_steps": "the number of steps of the run",
    "fp16.enabled": "TrainingArguments.fp16",
    "bf16.enabled": "TrainingArguments.bf16",
    "zero_optimization.reduce_bucket_size": "hidden_size squared",
    "zero_optimization.stage3_prefetch_bucket_size": "0.9 * hidden_size squared",
    "zero_optimization.stage3_param_persistence_threshold": "10 * hidden_size",
}
# DeepSpeed takes "auto" for the default in these blocks; not here where what is trained hangs on it.
_DEFAULTED_BLOCKS = (
    "zero_optimization",
    "fp16",
    "bf16",
    "comms_logger",
    "tensorboard",
    "csv_monitor",
    "wandb",
    "comet",
)
_NEVER_DEFAULTED = {"zero_optimization.stage", "fp16.enabled", "bf16.enabled"}
# Blocks in which "auto" is a value of its own.
_OWN_WORD = ("zero_optimization.zenflow", "data_types.keep_in_fp32_modules", "pipeline", "autotuning", "compile")
# What the Trainer fills without comparing a value that is there with its own.
_ONLY_FILLED = {key for key in FILLED_BY if key.startswith("zero_optimization.")} | {"scheduler.params.warmup_min_lr"}


class Unfilled(NamedTuple):
    """A key that is "auto", and what would fill it."""

    key: str
    filled_by: str

    def __str__(self) -> str:
        return f'{self.key} is "auto", and nobody filled it; expected {self.filled_by}'


def fill(config: dict[str, Any], auto: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of a configuration in which each key that is "auto" and in `auto` has the value there.

    Keys of `auto` are paths: {"optimizer.params.lr": 1e-4}. Other values stay as they are.
    """
    filled = copy.deepcopy(config)
    for path, value in auto.items():
        block, name = _block_of(filled, path)
        if block.get(name) == _AUTO:
            block[name] = value
    return filled


def mismatches(config: dict[str, Any], auto: Mapping[str, Any]) -> list[str]:
    """Returns a sentence for each key that is neither "auto" nor what Hugging Face's arguments say, as in `auto`."""
    found = []
    for path, value in auto.items():
        block, name = _block_of(config, path)
        own = block.get(name)
        if path not in _ONLY_FILLED and own is not None and own not in (_AUTO, value):
            found.append(f'{path} is {own!r}, but {FILLED_BY[path]} is {value!r}; expected "auto" or the same')
    return found


def hugging_face_auto(
    args: Any, *, hidden_size: int | None = None, num_training_steps: int | None = None
) -> dict[str, Any]:
    """Returns what Hugging Face's Trainer would fill "auto" with, by path: for `fill` and `mismatches`.

    Args:
        args: `transformers.TrainingArguments`, or anything with its attributes.
        hidden_size: of the model (`hidden_size_of`); None leaves the keys out that depend on it.
        num_training_steps: optimizer steps of the run; None leaves the lengths of schedules out.
    """
    micro, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
    auto = {
        "train_batch_size": args.world_size * micro * accumulation,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": args.max_grad_norm,
        "optimizer.params.lr": args.learning_rate,
        "optimizer.params.betas": [args.adam_beta1, args.adam_beta2],
        "optimizer.params.eps": args.adam_epsilon,
        "optimizer.params.weight_decay": args.weight_decay,
        "scheduler.params.warmup_min_lr": 0,
        "scheduler.params.warmup_max_lr": args.learning_rate,
        "fp16.enabled": bool(args.fp16 or args.fp16_full_eval),
        "bf16.enabled": bool(args.bf16 or args.bf16_full_eval),
    }
    if hidden_size is not None:
        auto["zero_optimization.reduce_bucket_size"] = hidden_size * hidden_size
        auto["zero_optimization.stage3_prefetch_bucket_size"] = int(0.9 * hidden_size * hidden_size)
        auto["zero_optimization.stage3_param_persistence_threshold"] = 10 * hidden_size
    if num_training_steps is not None:
        auto["scheduler.params.total_num_steps"] = num_training_steps
        auto["scheduler.params.warmup_num_steps"] = max(1, args.get_warmup_steps(num_training_steps))
    return auto


def hidden_size_of(model_config: Any) -> int | None:
    """Returns the (largest) hidden size in a configuration of transformers; None where it names none."""
    for config in (model_config, getattr(model_config, "text_config", None)):
        if (size := getattr(config, "hidden_size", None)) is not None:
            return int(size)
        if sizes := getattr(config, "hidden_sizes", None):
            return int(max(sizes))
    return None


def take_out(config: dict[str, Any]) -> tuple[dict[str, Any], list[Unfilled]]:
    """Returns a copy without the keys that are "auto", and those of them whose default must not be assumed."""
    unfilled: list[Unfilled] = []
    taken = copy.deepcopy(config)
    for block, name, path in list(_autos(taken)):
        del block[name]
        if path in _NEVER_DEFAULTED or not _is_in(path, _DEFAULTED_BLOCKS):
            unfilled.append(Unfilled(path, FILLED_BY.get(path, "a value of your own")))
    return taken, unfilled


def _autos(block: dict[str, Any], path: str = "") -> Iterator[tuple[dict[str, Any], str, str]]:
    for name, value in block.items():
        here = f"{path}{name}"
        if _is_in(here, _OWN_WORD):
            continue
        if isinstance(value, dict):
            yield from _autos(value, f"{here}.")
        elif value == _AUTO:
            yield block, name, here


def _is_in(path: str, blocks: tuple[str, ...]) -> bool:
    return any(path == block or path.startswith(f"{block}.") for block in blocks)


def _block_of(config: Mapping[str, Any], path: str) -> tuple[Any, str]:
    """The block that has the last part of `path`, or an empty one, and this part."""
    *blocks, name = path.split(".")
    block: Any = config
    for part in blocks:
        block = block.get(part, {}) if isinstance(block, Mapping) else {}
    return (block if isinstance(block, Mapping) else {}), name
