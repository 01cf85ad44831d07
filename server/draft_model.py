"""The draft model beside this server's model, which the setting `draft_model` names."""

from __future__ import annotations

import logging
from collections.abc import Callable

from paceline.engine.base import Engine, LoadedModel, ServedModel
from paceline.engine.loader import load_model
from paceline.errors import ConfigError
from paceline.models import CAUSAL, DEVICE
from paceline.settings import ServerSettings

log = logging.getLogger("paceline.server")


def opened_draft(settings: ServerSettings) -> Callable[[ServedModel], Engine] | None:
    """Loads it, given the model that it drafts for; None where the settings name none. What it returns raises
    ConfigError for a draft model that cannot be used."""
    wanted = settings.draft_model
    if wanted is None:
        return None

    def load(model: ServedModel) -> Engine:
        draft = load_model(
            DEVICE if wanted == CAUSAL else wanted,
            dtype=settings.dtype,
            device=settings.engine_device,
            threads=settings.threads,
            kv_mib=settings.draft_kv_mib,
        )
        check_vocabulary(wanted, draft, settings.first_model, model)
        log.info("drafts for the strategy pipeline come from %s", wanted)
        return draft.engine

    return load


def check_vocabulary(draft_name: str, draft: LoadedModel, name: str, model: ServedModel) -> None:
    """Raises ConfigError unless both models give every token id the same meaning."""
    if draft.tokenizer.fingerprint == model.tokenizer.fingerprint:
        return
    sizes = draft.tokenizer.vocab_size, model.tokenizer.vocab_size
    differs = f"{sizes[0]} tokens, not {sizes[1]}" if sizes[0] != sizes[1] else "as many tokens with other meanings"
    raise ConfigError(
        f"The draft model {draft_name} cannot draft for {name}: its vocabulary has {differs}. Give a draft model of "
        "the same family, or leave draft_model out."
    )
