"""Request fields common to every endpoint that generates text, with OpenAI's names and ranges.

Fields inside `paceline` that are unknown are refused, since they can only be meant for this server. Source:
openai-openapi 2.3.0, CreateChatCompletionRequest.
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from paceline.api.http.validation import Schema
from paceline.core.aggregation.registry import AggregatorName
from paceline.core.offloading.draft_length import Objective
from paceline.core.stretches import MAX_STRETCH, MIN_STRETCH
from paceline.core.verification.names import VerifierName
from paceline.runtime.service import DraftMode, OnLoss
from paceline.strategies.strategy import Privacy
from paceline.workflow.builder import WorkflowName

MAX_CHOICES = 8
MAX_STOPS = 4
MAX_STOP_LENGTH = 64  # characters
MAX_BIASES = 300
MAX_DOCUMENTS = 64
MAX_TOOLS = 128
MAX_METADATA = 16  # pairs
MAX_SEARCHED = 8  # vector stores in one search
MAX_HINT = 1024  # characters of a field that has no effect
NAME_PATTERN = "^[a-zA-Z0-9_-]{1,64}$"  # of functions and of response formats

Name = Annotated[str, Field(pattern=NAME_PATTERN)]
Hint = Annotated[str, Field(max_length=MAX_HINT)]
StoreId = Annotated[str, Field(min_length=1, max_length=64)]
StoreIds = Annotated[list[StoreId], Field(min_length=1, max_length=MAX_SEARCHED)]
JsonObject = dict[str, object]  # a JSON schema, unchecked
Temperature = Annotated[float, Field(ge=0, le=2)]
Probability = Annotated[float, Field(ge=0, le=1)]
Joules = Annotated[float, Field(ge=0, le=1_000_000)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


_Stops = Annotated[list[Stop], Field(max_length=MAX_STOPS)]
Stops = Annotated[_Stops, BeforeValidator(_as_list, json_schema_input_type=Stop | _Stops)]


class StreamOptions(Schema):
    include_usage: bool = False


class EnergyFields(Schema):
    """Energy budget of the device's drafting; see docs/energy.md."""

    model_config = ConfigDict(extra="forbid")

    joules_per_token: Joules | None = None
    joules_per_step: Joules | None = None
    objective: Objective | None = None

    @model_validator(mode="after")
    def _one_budget(self) -> Self:
        if self.joules_per_token is not None and self.joules_per_step is not None:
            raise ValueError("joules_per_token and joules_per_step cannot be named together")
        return self


class Extension(Schema):
    """All fields that Paceline adds to OpenAI's API."""

    model_config = ConfigDict(extra="forbid")

    strategy: str | None = None
    device: str | None = None
    privacy: Privacy = "document-private"
    documents: Annotated[int, Field(ge=0, le=MAX_DOCUMENTS)] | None = None
    vector_stores: StoreIds | None = None  # read instead of this side's own collection, which is named `default`
    aggregator: AggregatorName | None = None
    drafts: DraftMode = "tree"
    rescoring: bool = True
    search_every: Annotated[int, Field(ge=MIN_STRETCH, le=MAX_STRETCH)] | None = None  # tokens, of `aggregate`
    verifier: VerifierName = "agreement"  # of `draft_verify`
    on_device_loss: OnLoss = "continue"
    energy: EnergyFields | None = None
    workflow: WorkflowName | None = None  # agents that search before the answer
    steps: bool = False  # tell of their steps as they end
    report: bool = False


class SamplingFields(Schema):
    """Sampling parameters and the end of an answer: the same in every endpoint that generates text.

    The default of a field that may be null is the server's setting, then the model's recommendation, then OpenAI's.
    """

    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Probability | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_BIASES)] = Field(
        default_factory=dict
    )
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stops = Field(default_factory=list)
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    paceline: Extension = Field(default_factory=Extension)
