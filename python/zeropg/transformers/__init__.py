"""Hugging Face's Trainer over zeropg: `Trainer` and `TrainingArguments`, with the names and arguments of theirs."""

try:
    import transformers as _transformers  # noqa: F401
    from accelerate import Accelerator as _Accelerator  # noqa: F401
except ImportError as error:
    raise ImportError(
        "[zeropg] zeropg.transformers needs the packages transformers and accelerate; install them: "
        "pip install 'zeropg[transformers]'"
    ) from error

from zeropg.transformers.trainer import Trainer
from zeropg.transformers.training_arguments import TrainingArguments

__all__ = ["Trainer", "TrainingArguments"]
