"""DeepSpeed's `runtime.config_utils`: what programs use for blocks of their own beside its configuration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict


class DeepSpeedConfigModel(BaseModel):
    """The base of a block: unknown keys are errors, and a key that is "auto" keeps its default, unless `strict`.

    Raises NotImplementedError for a class with a field that says `deprecated`, which DeepSpeed moves to another one.
    """

    model_config = ConfigDict(
        validate_default=True,
        validate_assignment=True,
        use_enum_values=True,
        populate_by_name=True,
        extra="forbid",
        arbitrary_types_allowed=True,
        protected_namespaces=(),
    )

    def __init__(self, strict: bool = False, **data: Any) -> None:
        is_kept = {key: strict or key == "replace_method" or value != "auto" for key, value in data.items()}
        super().__init__(**{key: value for key, value in data.items() if is_kept[key]})

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        for name, field in cls.model_fields.items():
            extra = field.json_schema_extra
            if field.deprecated or (isinstance(extra, Mapping) and extra.get("deprecated")):
                raise NotImplementedError(
                    f"[zeropg] {cls.__name__}.{name} is deprecated in favour of another field, to which nothing moves "
                    "its value here; move it in a validator of your own"
                )


def get_scalar_param(param_dict: Mapping[str, Any], param_name: str, param_default_value: Any) -> Any:
    """Returns a value of a dictionary, or the default."""
    return param_dict.get(param_name, param_default_value)


get_list_param = get_dict_param = get_scalar_param


def dict_raise_error_on_duplicate_keys(ordered_pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """For json's object_pairs_hook. Raises ValueError for a key that is there more than once."""
    twice = [key for key, count in Counter(key for key, _ in ordered_pairs).items() if count > 1]
    if twice:
        raise ValueError(f"[zeropg] {', '.join(map(repr, twice))} is there more than once; expected each key once")
    return dict(ordered_pairs)


__all__ = [
    "DeepSpeedConfigModel",
    "dict_raise_error_on_duplicate_keys",
    "get_dict_param",
    "get_list_param",
    "get_scalar_param",
]
