"""Request fields common to every endpoint that generates text, with OpenAI's names and ranges.

Fields inside `paceline` that are unknown are refused, since they can only be meant for this server. Source:
openai-openapi 2.3.0, CreateChatCompletionRequest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Final, Literal, Self

from pydantic import AliasChoices, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from paceline.api.http.body import Schema
from paceline.core.sampling.sampler import MAX_BIASES, MAX_STOP_IDS, MAX_TEMPERATURE
from paceline.core.side import HandoffLevel, WayOfReading
from paceline.errors import RequestError
from paceline.runtime.service import OnLoss
from paceline.strategies.base import Privacy
from paceline.wire.messages import MAX_STRETCH, MIN_STRETCH
from paceline.workflow.flows import WorkflowName

MAX_CHOICES = 128
MAX_STOPS = 64
MAX_STOP_LENGTH = 256  # characters
MAX_DOCUMENTS = 64
MAX_TOOLS = 128
MAX_METADATA = 16  # pairs
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=MAX_METADATA)
]
MAX_SEARCHED = 8  # vector stores in one search
MAX_HINT = 1024  # characters of a field that has no effect
NAME_PATTERN = "^[a-zA-Z0-9_-]{1,64}$"  # of functions and of response formats

Name = Annotated[str, Field(pattern=NAME_PATTERN)]
Hint = Annotated[str, Field(max_length=MAX_HINT)]
StoreId = Annotated[str, Field(min_length=1, max_length=64)]
StoreIds = Annotated[list[StoreId], Field(min_length=1, max_length=MAX_SEARCHED)]
JsonObject = dict[str, object]  # a JSON schema, unchecked
Temperature = Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)]
Penalty = Annotated[float, Field(ge=-100, le=100)]
Probability = Annotated[float, Field(ge=0, le=1)]
Joules = Annotated[float, Field(ge=0, le=1_000_000)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]


def unsupported(param: str, sentence: str) -> RequestError:
    return RequestError(f"{sentence} (in `{param}`).", code="unsupported_parameter", param=param)


def required(param: str) -> RequestError:
    return RequestError(f"The field {param} is required.", param=param)


def unreadable(kind: str, where: str) -> RequestError:
    """The refusal of a part of a message, such as an image. where: it stands."""
    return RequestError(
        f"This model reads text only: a part of the type {kind[:64]!r} is not supported ({where}).",
        code="unsupported_content",
        param=where,
    )


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


_Stops = Annotated[list[Stop], Field(max_length=MAX_STOPS)]
Stops = Annotated[_Stops, BeforeValidator(_as_list, json_schema_input_type=Stop | _Stops)]


class StreamOptions(Schema):
    include_usage: bool = False
    continuous_usage_stats: bool = False  # as in vLLM


class EnergyFields(Schema):
    """Energy budget of the device's drafting; see docs/deployment.md."""

    model_config = ConfigDict(extra="forbid")

    joules_per_token: Joules | None = None
    joules_per_step: Joules | None = None

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
    reading: WayOfReading | None = None  # of passages
    # Where documents were found and none answers: begin by saying so, or write as if none had been found.
    unanswered: Literal["say", "write"] = "say"
    search_every: Annotated[int, Field(ge=MIN_STRETCH, le=MAX_STRETCH)] | None = None  # tokens, of `aggregate`
    on_device_loss: OnLoss = "continue"
    handoff: HandoffLevel | None = None  # of a device that may begin by itself; default: as it is set
    energy: EnergyFields | None = None
    workflow: WorkflowName | None = None  # agents that search before the answer
    steps: bool = False  # tell of their steps as they end
    report: bool = False
    timeline: bool = False  # in the report: what happened at which side and when
    # Options of strategies by their fields, such as the forms that papers describe: where `--debug-options` is set.
    debug: JsonObject | None = None


# ---- the form of an answer ------------------------------------------------------------------------------------------
def kind_tag(value: object) -> str | None:
    """Tag of the union's alternative for a string or an object with a `type`. Tags are in <>."""
    if isinstance(value, str):
        return "<word>"
    kind = value.get("type", "function") if isinstance(value, dict) else getattr(value, "type", None)
    return f"<{kind}>" if isinstance(kind, str) else None


class TextFormat(Schema):
    type: Literal["text"]


class JsonFormat(Schema):
    """Any JSON object, or JSON of a schema, as llama.cpp and others take it."""

    type: Literal["json_object"]
    schema_: JsonObject | None = Field(default=None, alias="schema")


class NamedSchema(Schema):
    """The schema of an answer. Unless `strict`, schema keywords that cannot be enforced are ignored."""

    name: Name
    description: str | None = None
    schema_: JsonObject = Field(alias="schema")
    strict: bool = False


class SchemaFormat(Schema):
    type: Literal["json_schema"]
    json_schema: NamedSchema


class RegexFormat(Schema):
    type: Literal["regex"]
    pattern: Annotated[str, Field(min_length=1)] = Field(validation_alias=AliasChoices("pattern", "regex", "value"))


class GrammarFormat(Schema):
    type: Literal["grammar"]
    grammar: Annotated[str, Field(min_length=1)]


ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("<text>")]
    | Annotated[JsonFormat, Tag("<json_object>")]
    | Annotated[SchemaFormat, Tag("<json_schema>")]
    | Annotated[RegexFormat, Tag("<regex>")]
    | Annotated[GrammarFormat, Tag("<grammar>")],
    Discriminator(
        kind_tag,
        custom_error_type="response_format",
        custom_error_message='it must be an object of the type "text", "json_object", "json_schema", "regex" or '
        '"grammar"',
    ),
]
SchemaText = JsonObject | str  # a JSON schema, or its text


class StructuredOutputs(Schema):
    """A form as vLLM names it. A key that is not known here may promise another, and is refused."""

    model_config = ConfigDict(extra="forbid")

    json_: SchemaText | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool = False
    disable_any_whitespace: Literal[False] = False
    disable_fallback: bool = False  # there is no other way to enforce a form here
    disable_additional_properties: bool = False  # objects are closed where the schema does not say otherwise


class TypedGrammar(Schema):
    """A form as TGI names it."""

    type: Literal["json", "regex"]
    value: SchemaText


_OTHER_FORMS = {  # of other servers: each promises something about the text of an answer, where it says anything
    "guided_whitespace_pattern": "White space of JSON is fixed here: one blank at most, after a comma or colon",
    "format": "It is a field of /api/chat and /api/generate: send response_format",
    "structural_tag": "It is not supported: send tools, or a grammar",
    "grammar_lazy": "A grammar holds for the whole answer here",
    "allowed_token_ids": "It is not supported: send a logit_bias, or a form of the answer",
    "bad_words": "It is not supported: send a logit_bias",
    "include_stop_str_in_output": "Stop strings are never part of an answer here",
    "use_beam_search": "Answers are sampled here",
    "echo": "Only what is written anew is returned; /v1/completions has echo",
}


_NOTHING: Final[tuple[object, ...]] = (None, False, "", [])  # values that ask for nothing


class FormFields(Schema):
    """Form and end of an answer, by the names of vLLM, llama.cpp, SGLang and TGI: the same on every surface."""

    refused: ClassVar[Mapping[str, str]] = {}
    """Fields that ask for what is not done here, each with a sentence. Hints (user, verbosity …) are accepted without
    effect, since they promise nothing."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaText | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: SchemaText | None = None
    grammar: str | TypedGrammar | None = None
    regex: str | None = None
    ebnf: str | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] = 0
    ignore_eos: bool = False
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=MAX_STOP_IDS)] = Field(
        default_factory=list
    )

    @model_validator(mode="before")
    @classmethod
    def _only_what_is_done_here(cls, body: object) -> object:
        if isinstance(body, dict):
            for name, sentence in {**cls.refused, **_OTHER_FORMS}.items():
                if body.get(name) not in _NOTHING and name not in cls.model_fields:
                    raise unsupported(name, sentence)
        return body

    def onto(self, body: JsonObject) -> JsonObject:
        """The body of another endpoint with those of these fields that this request has. Raises RequestError (400)
        where the body has a `response_format` already, by this endpoint's own name for it."""
        if self.response_format is not None and body.get("response_format") is not None:
            raise RequestError(
                "response_format and this endpoint's own field both ask for a form of the answer.",
                param="response_format",
            )
        return body | self.model_dump(include=set(FormFields.model_fields), exclude_unset=True, by_alias=True)


class SamplingFields(FormFields):
    """Sampling parameters and the end of an answer: the same in every endpoint that generates text.

    The default of a field that may be null is the server's setting, then the model's recommendation, then OpenAI's.
    """

    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Probability | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_BIASES)] = Field(
        default_factory=dict
    )
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stops = Field(default_factory=list)
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    paceline: Extension = Field(default_factory=Extension)

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def running_usage(self) -> bool:
        """Every event has the usage so far."""
        return self.include_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats
