"""The settings in groups with titles, in the order in which people read them: what everybody sets comes first.

`--help`, `--show-settings` and the log of a start have this order. A program shows those of a group that it has; a test
sees to it that every setting of every program stands in one group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

GROUPS: Final[Mapping[str, tuple[str, ...]]] = {
    "Model": ("model", "name", "layers", "system"),
    "Address": ("port", "host", "listen", "public_url"),
    "Link": (
        "cloud",
        "server",
        "code",
        "code_file",
        "device",
        "insecure",
        "credential",
        "credential_hours",
        "device_days",
        "emulate",
    ),
    "Documents": (
        "documents",
        "docs_dir",
        "embedder",
        "reranker",
        "relevance_temperature",
        "document_kv_mib",
    ),
    "Privacy": (
        "cloud_may_ask",
        "cloud_asks_per_minute",
        "cloud_asks_per_hour",
        "share_distributions",
        "cloud_texts",
        "encrypt_documents",
    ),
    "Keys and access": (
        "api_key_file",
        "api_keys",
        "local_users",
        "allowed_origins",
        "trusted_proxies",
        "strangers_per_address",
    ),
    "Answers, where a request does not say": (
        "max_tokens_default",
        "longest_silent_answer",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
    ),
    "State": ("state_dir", "responses_mib", "responses_days"),
    "Logging": ("log_level", "log_format"),
    "Engine and memory": (
        "engine_device",
        "threads",
        "kv_mib",
        "model_idle_minutes",
        "dtype",
        "backend",
        "step_rows",
        "step_sequences",
    ),
    "Model in stages": ("stages", "stage_format", "draft_model", "draft_kv_mib"),
    "Workflows and the web": (
        "web_search",
        "web_search_seconds",
        "web_results",
        "web_pages",
        "web_page_seconds",
        "web_page_mib",
        "units",
    ),
    "Energy": (
        "energy_meter",
        "energy_per_token",
        "energy_per_step",
        "compute_watts",
        "send_watts",
        "compute_gflops",
    ),
}


def grouped(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """(title, name) of each of these settings, in the order of the groups. One in no group is left out."""
    known = set(names)
    return ((title, name) for title, group in GROUPS.items() for name in group if name in known)
