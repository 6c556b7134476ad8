"""`Section`: the base of all blocks of the configuration."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


class Section(BaseModel):
    """A block of DeepSpeed's JSON. Attributes have the keys' names; unknown keys are errors; frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("expected a number, not true or false")
    return value


Count = Annotated[int, BeforeValidator(_no_bool), Field(ge=0)]
Positive = Annotated[int, BeforeValidator(_no_bool), Field(gt=0)]
Fraction = Annotated[float, BeforeValidator(_no_bool), Field(ge=0, le=1)]
