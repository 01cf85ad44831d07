"""R24: five users, every id of each, every verb: a stranger's id is answered as one that never was.

The routes are those of the server's own openapi.json, so a new route is in the matrix, and ids in bodies and cursors
are tried too. Caches: what one key has asked makes no other key's answer cheaper, by `cached_tokens` and by time, nor
of the demonstration's reader, by time. The control: the same key's answer is.
"""

from __future__ import annotations

import itertools
import random
import re
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from paceline.commands.demo import Children
from tests.e2e.pair import started
from tests.reliability.conftest import Figure, Size

USERS = ("ann", "bert", "cleo", "dora", "emil")
PARAMETERS = ("file_id", "store_id", "response_id", "batch_id", "conversation_id", "item_id")
VERBS = ("GET", "POST", "DELETE", "HEAD", "PUT", "PATCH")
TEXT = "The red boat of {user} lies in the harbour behind the old mill. "


@dataclass(slots=True)
class User:
    """A key, and the ids of what it has made by the name of the path's parameter."""

    name: str
    http: httpx.Client
    ids: dict[str, str]

    @property
    def unknown(self) -> dict[str, str]:
        """Ids like these that nobody has."""
        return {key: re.sub("[0-9a-f](?=[0-9a-f]{0,15}$)", "0", value) for key, value in self.ids.items()}

    def post(self, path: str, body: Mapping[str, object]) -> Any:
        answer = self.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def snapshot(self, paths: list[str]) -> dict[str, Any]:
        """What it sees of its own."""
        return {path: self.http.get(path.format(**self.ids)).text for path in paths}


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[User]]:
    directory = tmp_path_factory.mktemp("users")
    keys = [word for name in USERS for word in ("--api-keys", name)]
    with Children(directory) as children:
        url = started(children, "cloud", "serve", "--model", "fake", "--model", "demo", *keys).url
        made = []
        for name in USERS:
            headers = {"authorization": f"Bearer {name}"}
            http = httpx.Client(base_url=url, timeout=60, trust_env=False, verify=False, headers=headers)
            made.append(User(name, http, {}))
        for user in made:
            text = TEXT.format(user=user.name)
            file = user.http.post(
                "/v1/files", files={"file": (f"{user.name}.txt", text)}, data={"purpose": "assistants"}
            )
            user.ids["file_id"] = file.json()["id"]
            user.ids["store_id"] = user.post("/v1/vector_stores", {"name": user.name})["id"]
            store = f"/v1/vector_stores/{user.ids['store_id']}"
            batch = user.post(f"{store}/file_batches", {"file_ids": [user.ids["file_id"]]})
            user.ids["batch_id"] = batch["id"]
            while user.http.get(store).json()["file_counts"]["in_progress"]:
                pass  # each look is a request
            body = {"model": "fake", "input": "Where is the boat?", "max_output_tokens": 4}
            user.ids["response_id"] = user.post("/v1/responses", body)["id"]
            item = {"type": "message", "role": "user", "content": text}
            user.ids["conversation_id"] = user.post("/v1/conversations", {"items": [item]})["id"]
            items = user.http.get(f"/v1/conversations/{user.ids['conversation_id']}/items").json()
            user.ids["item_id"] = items["data"][0]["id"]
        yield made
        for user in made:
            user.http.close()


def own_paths(user: User) -> list[str]:
    """Paths of the server with an id in them."""
    paths = user.http.get("/openapi.json").json()["paths"]
    found = [path for path in paths if "{" in path and "{name}" not in path and "{id}" not in path]
    assert {parameter for path in found for parameter in PARAMETERS if f"{{{parameter}}}" in path} == {*PARAMETERS}
    return found


def without(text: str, *ids: str) -> str:
    for each in ids:
        text = text.replace(each, "ID")
    return text


def test_another_user_s_id_is_answered_as_one_that_never_was(
    users: list[User], rng: random.Random, size: Size, figure: Figure
) -> None:
    paths = own_paths(users[0])
    before = [user.snapshot(paths) for user in users]
    tried = 0
    pairs = list(itertools.permutations(users, 2))
    for owner, stranger in rng.sample(pairs, size(4, len(pairs))):
        for path in paths:
            wholly = owner.ids
            # A file or batch of another's in a store of one's own.
            half = stranger.ids | {key: owner.ids[key] for key in ("file_id", "batch_id")}
            for ids in (wholly, half) if "{store_id}" in path and path.count("{") > 1 else (wholly,):
                nobody = {key: owner.unknown[key] if value == owner.ids[key] else value for key, value in ids.items()}
                body = {"query": "boat"} if path.endswith("search") else {}
                for verb in VERBS:
                    got = stranger.http.request(verb, path.format(**ids), json=body)
                    none = stranger.http.request(verb, path.format(**nobody), json=body)
                    assert got.status_code == none.status_code and got.status_code in (400, 404, 405), (verb, path)
                    assert without(got.text, *owner.ids.values()) == without(none.text, *owner.unknown.values())
                    assert f"of {owner.name}" not in got.text
                    tried += 1
    assert [user.snapshot(paths) for user in users] == before, "nothing of anybody has changed"
    figure("tries of foreign ids", tried)
    figure("foreign ids read or changed", 0, at_most=0)


def test_foreign_ids_in_bodies_cursors_and_lists_open_nothing(users: list[User]) -> None:
    ann, bert = users[:2]
    asked: dict[str, object] = {"model": "fake", "input": "boat", "max_output_tokens": 4}
    chat = {"model": "fake", "messages": [{"role": "user", "content": "boat"}], "max_tokens": 4}
    own = f"/v1/vector_stores/{bert.ids['store_id']}"

    def foreign(ids: Mapping[str, str]) -> list[tuple[str, dict[str, object]]]:
        search = {"type": "file_search", "vector_store_ids": [ids["store_id"]]}
        return [
            ("/v1/responses", asked | {"tools": [search]}),
            ("/v1/responses", asked | {"previous_response_id": ids["response_id"]}),
            ("/v1/chat/completions", chat | {"paceline": {"vector_stores": [ids["store_id"]]}}),
            ("/v1/vector_stores", {"file_ids": [ids["file_id"]]}),
            (f"{own}/files", {"file_id": ids["file_id"]}),
            (f"{own}/file_batches", {"file_ids": [ids["file_id"]]}),
        ]

    for (path, body), (_, other) in zip(foreign(ann.ids), foreign(ann.unknown), strict=True):
        got, none = bert.http.post(path, json=body), bert.http.post(path, json=other)
        assert got.status_code == none.status_code and got.status_code in (400, 404), (path, got.text)
        assert without(got.text, *ann.ids.values()) == without(none.text, *ann.unknown.values())
    passages = [f"/v1/passages/{number}" for number in range(1, 20)]
    foreign_ones = [path for path in passages if ann.http.get(path).status_code == 200]
    assert foreign_ones, "Ann can open her own"
    nobodys = bert.http.get("/v1/passages/999999")
    for path in foreign_ones:
        assert (bert.http.get(path).status_code, bert.http.get(path).text) == (404, nobodys.text)
    for path in ("/v1/files", "/v1/vector_stores"):
        listed = bert.http.get(path).text
        assert not any(identifier in listed for identifier in ann.ids.values())
        after = bert.http.get(path, params={"after": ann.ids["file_id" if "files" in path else "store_id"]})
        assert not any(identifier in after.text.split('"message"')[0] for identifier in ann.ids.values())


def test_refusals_of_foreign_ids_take_as_long_as_those_of_unknown_ones(
    users: list[User], rng: random.Random, size: Size, figure: Figure
) -> None:
    ann, bert = users[:2]
    times: dict[str, list[float]] = {"foreign": [], "unknown": []}
    for path in ("/v1/files/{file_id}", "/v1/responses/{response_id}", "/v1/vector_stores/{store_id}"):
        for _ in range(size(10, 500)):
            for kind in rng.sample(sorted(times), 2):
                url = path.format(**(ann.ids if kind == "foreign" else ann.unknown))
                begun = time.perf_counter()
                assert bert.http.get(url).status_code == 404
                times[kind].append(time.perf_counter() - begun)
    ratio = statistics.median(times["foreign"]) / statistics.median(times["unknown"])
    figure("time of a foreign id / of an unknown one, medians", ratio, at_most=1.1, at_least=0.9)


def auc(above: Sequence[float], below: Sequence[float]) -> float:
    """Chance that a value of the first list is above one of the second; ties count half."""
    wins = sum((one > other) + (one == other) / 2 for one in above for other in below)
    return wins / (len(above) * len(below))


def test_no_answer_is_cheaper_because_another_key_has_asked(
    users: list[User], rng: random.Random, size: Size, figure: Figure
) -> None:
    ann, bert = users[:2]

    def ask(user: User, text: str) -> tuple[int, float]:
        body = {"model": "fake", "prompt": text, "max_tokens": 1, "seed": 1}
        begun = time.perf_counter()
        answer = user.post("/v1/completions", body)
        took = time.perf_counter() - begun
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"]), took

    def text() -> str:
        return rng.randbytes(800).hex()

    warm: list[tuple[int, float]] = []  # bert's, of what ann has asked
    cold: list[tuple[int, float]] = []  # bert's, of what nobody has
    own: list[tuple[int, float]] = []  # ann's own, again
    for _ in range(size(8, 500)):
        secret = text()
        ask(ann, secret)
        for kind in rng.sample((warm, cold), 2):
            kind.append(ask(bert, secret if kind is warm else text()))
        own.append(ask(ann, secret))
    # Beginnings of one or two letters are those of one's own other prompts.
    assert max(cached for cached, _ in warm + cold) < 16, "no key sees what another has asked"
    assert min(cached for cached, _ in own) > 1000, "the control: one's own is cached"
    faster = auc([-took for _, took in warm], [-took for _, took in cold])
    control = auc([-took for _, took in own], [-took for _, took in cold])
    figure("pairs of prompts", len(warm))
    told = auc([cached for cached, _ in warm], [cached for cached, _ in cold])
    figure("AUC of cached_tokens between keys", told, at_most=0.55)
    figure("AUC of times between keys", faster, at_most=0.55)
    figure("AUC of times of one key, the control", control, at_least=0.9)


def test_no_text_is_read_sooner_because_another_key_has_had_it_read(
    users: list[User], rng: random.Random, size: Size, figure: Figure
) -> None:
    ann, bert = users[:2]

    def ask(user: User, text: str) -> float:
        asked = [{"role": "user", "content": f"{text}\nWhat is the code of the garage?"}]
        begun = time.perf_counter()
        user.post("/v1/chat/completions", {"model": "demo:plain", "messages": asked})
        return time.perf_counter() - begun

    def text() -> str:
        return f"The code of the garage is {rng.randrange(10**6)}. " + TEXT.format(user="Ann") * 12

    times: dict[str, list[float]] = {"warm": [], "cold": [], "own": []}
    for _ in range(size(5, 200)):
        secret = text()
        ask(ann, secret)
        for kind in rng.sample(("warm", "cold"), 2):
            times[kind].append(ask(bert, secret if kind == "warm" else text()))
        times["own"].append(ask(ann, secret))
    below = [-took for took in times["cold"]]
    figure("pairs of texts read", len(below))
    figure("AUC of times of the reader between keys", auc([-took for took in times["warm"]], below), at_most=0.6)
    control = auc([-took for took in times["own"]], below)
    figure("AUC of times of the reader, one key, the control", control, at_least=0.8)
