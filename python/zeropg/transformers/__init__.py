"""Hugging Face's Trainer over zeropg: `Trainer`, `Seq2SeqTrainer` and their arguments, under their names."""

try:
    import transformers as _transformers  # noqa: F401
    from accelerate import Accelerator as _Accelerator  # noqa: F401
except ImportError as error:
    raise ImportError(
        "[zeropg] zeropg.transformers needs the packages transformers and accelerate; install them: "
        "pip install 'zeropg[transformers]'"
    ) from error

from zeropg.transformers.seq2seq import Seq2SeqTrainer, Seq2SeqTrainingArguments
from zeropg.transformers.trainer import Trainer
from zeropg.transformers.training_arguments import TrainingArguments

__all__ = ["Seq2SeqTrainer", "Seq2SeqTrainingArguments", "Trainer", "TrainingArguments"]
