"""Switches behind the name of a model, as in `demo:plain`: every program that has a menu of models can set them.

A switch sets one field of `paceline`; a request that sets the same field otherwise is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from paceline.api.generation.schema import Extension, SamplingFields
from paceline.errors import RequestError
from paceline.workflow.builder import WORKFLOWS

SWITCHES: Mapping[str, tuple[str, object]] = {
    "plain": ("documents", 0),  # no document is read, on either side
    "local-only": ("privacy", "local-only"),
    **{workflow: ("workflow", workflow) for workflow in WORKFLOWS},
}
"""By what stands after the colon: a field of `paceline` and its value."""

Fields = TypeVar("Fields", bound=SamplingFields)


def switched(asked: Fields, switch: str | None) -> Fields:
    """The request with its model's switch. Raises RequestError (400) where the request says otherwise."""
    if switch is None:
        return asked
    field, value = SWITCHES[switch]
    own: Extension = asked.paceline
    said = getattr(own, field) if field in own.model_fields_set else None
    if said not in (None, value):
        raise RequestError(
            f"The model's name asks for {field} {value!r}, and paceline.{field} for {said!r}.",
            param=f"paceline.{field}",
        )
    return asked.model_copy(update={"paceline": own.model_copy(update={field: value})})
