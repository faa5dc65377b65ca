"""What the sections of the settings have in common."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """Base of every section: unknown keys are errors, docstrings are descriptions, values do not change."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, frozen=True, validate_default=True)
