"""The web page in a real Chromium, driven by playwright-core: `make clients tools` installs both.

Each scenario is a function of `tests/e2e/clients/page.mjs`, which reports what it saw; the checks are here. None may
cause an error in the console, a request to another host, or a serious finding of axe-core.
"""

from __future__ import annotations

import json
import select
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
from prometheus_client.parser import text_string_to_metric_families

from paceline.commands.demo import Children, clean_environment, command, configured
from paceline.core.side import SIDES
from server.keys import Keys
from tests.depth import DEPTH
from tests.e2e.pair import QUESTION, Pair, running_pair, started

CLIENTS = Path(__file__).parent / "clients"
TIMEOUT = 240.0  # s for one scenario
PACE = "tuning.emulate = 'forward=15ms'"  # slow enough to be stopped in mid-answer
HOSTILE_NAME = "<img src=x onerror=alert(1)>.md"
Seen = dict[str, Any]


class Browse(Protocol):
    def __call__(self, scenario: str, url: str, *, key: str = "", given: object = None) -> Seen:
        """What a scenario saw, in a fresh profile."""


@pytest.fixture(scope="module")
def browse() -> Iterator[Browse]:
    """One browser for the scenarios of this module."""
    browser = shutil.which("chromium")
    assert browser is not None, "make tools"
    node = subprocess.Popen(
        ["node", str(CLIENTS / "page.mjs"), browser],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=clean_environment({"PATH": "/usr/local/bin:/usr/bin:/bin"}),
    )
    assert node.stdin is not None and node.stdout is not None
    asked, answers = node.stdin, node.stdout

    def run(scenario: str, url: str, *, key: str = "", given: object = None) -> Seen:
        print(json.dumps({"scenario": scenario, "url": f"{url}/", "key": key, "given": given}), file=asked, flush=True)
        if not select.select([answers], [], [], TIMEOUT)[0]:
            node.kill()  # it would not end with its input
            raise AssertionError(f"nothing was seen in {TIMEOUT} s")
        seen: Seen = json.loads(answers.readline())
        assert "fault" not in seen, seen["fault"]
        assert seen["hosts"] == [], "nothing of another host"
        return seen

    with node:  # ends with its input
        yield run


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    directory = tmp_path_factory.mktemp("pair")
    flags = configured(directory, "answers.max_tokens_default = 60", PACE)
    with running_pair(directory, flags=flags) as started:
        yield started


def test_upload_ask_watch_the_lanes_stop_reload_and_find_the_conversation(browse: Browse, pair: Pair) -> None:
    seen = browse("journey", pair.url("cloud"))
    assert seen["errors"] == []
    assert seen["dialogs"] == ["Delete “How is the lighthouse of Omber painted, and who is my landlo…”?"]
    assert seen["uploaded"] == ["omber.md"]
    first = seen["first"]
    assert seen["busy"] and first["state"] == "done" and first["cloud"] and first["device"], "two colours in one answer"
    assert any("omber.md" in source for source in first["sources"])
    assert seen["source"] == {"title": "omber.md", "text": "The lighthouse of Omber is painted in green stripes."}
    assert {name: found for name, found in seen["faults"].items() if found} == {}
    assert seen["wide"] <= 360, "nothing is wider than a telephone"
    assert seen["stopped"]["state"] == "stopped" and seen["stopped"]["notes"] == ["Stopped."]
    assert seen["resumed"]["state"] == "writing" and seen["resumed"]["text"].startswith(seen["before"].strip()), (
        "it goes on"
    )
    assert seen["versions"] == "2/2" and seen["turned"] == seen["stopped"]["text"], (
        "what was written before is still there"
    )
    assert seen["kept"] == ["How is the lighthouse of Omber painted, and who is my landlord?", "And who else?"]
    assert seen["again"] == first["text"]
    assert (seen["empty"], seen["found"], seen["left"]) == (0, 2, 0)


def test_settings_reach_the_request_and_stay(browse: Browse, pair: Pair) -> None:
    seen = browse("settings", pair.url("device"))
    assert seen["errors"] == [] and seen["faults"] == []
    body, further = seen["bodies"]
    assert body["model"] == "fake" and body["temperature"] == 0.5 and body["instructions"] == "Be brief."
    assert body["background"] and body["store"]
    assert further["continue_final_message"] and [item["role"] for item in further["input"]] == ["user", "assistant"]
    assert seen["texts"][1].startswith(seen["texts"][0]), "a cut answer goes on"
    asked = {"report": True, "timeline": True, "strategy": "autoregressive", "privacy": "local-only", "documents": 0}
    assert body["paceline"] == asked
    assert seen["back"] == "rgb(20, 22, 26)", "dark although the system is light"
    assert seen["state"] == "stopped"


def test_what_a_model_a_document_or_a_file_name_holds_stays_text(browse: Browse, pair: Pair) -> None:
    seen = browse("hostile", pair.url("cloud"))
    assert seen["dialogs"] == [] and seen["made"] == 0
    first, second = "<img src=x onerror=alert(8)>?", f"What does {HOSTILE_NAME} say about <b>t?"
    assert seen["suggested"] == {"shown": [first, second], "early": 0, "asked": [second]}, "by a click, as it is shown"
    assert seen["name"] == HOSTILE_NAME
    assert seen["title"] == "<img src=x onerror=alert(7)>"
    assert seen["source"] == {"title": HOSTILE_NAME, "text": "<svg onload=alert(6)>"}
    text = seen["answer"]["text"]
    assert "<script>alert(1)</script> <img src=//evil.test/a onerror=alert(2)>" in text
    assert "[a](javascript:alert(3))" in text and "[c](data:text/html" in text and "[d](/v1/models)" in text
    rel = "noopener noreferrer nofollow"
    addresses = [
        "https://evil.test/pixel?secret",
        "https://evil.test/",
        *(f"https://example.org/{x}" for x in ("a_(b)", "c")),
    ]
    assert seen["links"] == [[address, rel] for address in addresses], "an image is a link that nobody follows"
    assert seen["formulas"][0] == 0 < seen["formulas"][1], "one that defines something is shown as it was written"
    assert seen["clipped"], "nothing of an answer's text is drawn over what stands around it"
    assert seen["imported"] == {"path": ["a", "b"], "ids": 3, "first": [[], "", "cut", ""], "plain": ["a", "b", "c"]}
    assert not seen["assigned"]
    assert len(seen["errors"]) == 1 and "TrustedHTML" in seen["errors"][0], "only of the attempt in the test"


def test_a_server_with_keys_asks_for_one(browse: Browse, tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        key, first, second = map(Keys(tmp_path / "state").create, ("page", "first", "second"))
        flags = configured(tmp_path, "answers.max_tokens_default = 8", PACE)
        child = started(children, "cloud", "serve", "--embedder", "hash", *flags, state=tmp_path / "state")
        seen = browse("key", child.url, key=key)
        two = browse("keys", child.url, key=first, given=second)
    assert seen["faults"] == [] and seen["refused"] == "Incorrect API key provided."
    assert seen["answer"]["state"] == "done" and seen["answer"]["text"]
    assert seen["same"] == 1, "the conversation stays with the same key"
    assert seen["stored"] == [True, None], "kept in the tab alone, unless the user says otherwise"
    assert "POST /v1/chat/completions" in seen["routes"] and "GET /page/app.js" not in seen["routes"]
    assert all("401" in error for error in [*seen["errors"], *two["errors"]]), "logged by browsers themselves"
    assert two["digests"] == 200 and not two["told"], "the key's name tells nothing of it"
    assert two["first"] == ["Old", "Left"], "what was there before is the first key's"
    assert two["changed"] == [[], 0, False], "nothing of one key is shown to the other"
    assert two["tabs"] == [["Again?", "Other?"], ["Still mine?", "Mine?", "Old", "Left"]]
    assert two["kept"] == [["Mine?", "Still mine?"], ["Again?", "Other?"]], "nor pushed to the server for it"
    assert two["sent"] == [[0, 1], [0]], "a tab keeps the key that it was opened with"


def test_an_owner_lets_answers_read_a_document_at_the_page_and_nobody_else_can(browse: Browse, tmp_path: Path) -> None:
    (tmp_path / "diary.md").write_text("My landlord is called Velda.\n")
    policy = tmp_path / "policy.toml"
    policy.write_text(
        'api_keys = ["sk-owner=owner", "sk-guest=guest"]\n[agent.policy]\nask_me = ["diary.md"]\n'
        "keys.owner = {confirms = true}\n"
    )
    policy.chmod(0o600)
    with Children(tmp_path) as children:
        hashed, state = ("--embedder", "hash"), tmp_path / "state"
        added = ("docs", "add", str(tmp_path / "diary.md"), "--side", "device", "--state-dir", str(state))
        children.run(command(*added, *hashed))
        child = started(children, "device", "agent", *hashed, "--config", str(policy), state=state)
        question = "What is my landlord called?"
        guest = browse("confirms", child.url, key="sk-guest", given={"question": question, "may": False})
        owner = browse("confirms", child.url, key="sk-owner", given={"question": question, "may": True})
    assert (guest["asked"], guest["sources"]) == ("", []), "it is not even told that there is one"
    assert "diary.md" in owner["asked"] and owner["sources"] == ["diary.md"]
    assert guest["faults"] == owner["faults"] == []
    assert all("401" in error for error in (*guest["errors"], *owner["errors"])), "before a key is given"


def test_the_dashboard_shows_the_numbers_of_metrics_and_timelines_those_of_their_reports(
    browse: Browse, pair: Pair
) -> None:
    strategies = ["auto", "draft_verify", "lookup_tree", "autoregressive"]
    asked = {"model": "fake", "seed": 1, "messages": [{"role": "user", "content": QUESTION}]}
    bodies = [{**asked, "paceline": {"strategy": name, "report": True, "timeline": True}} for name in strategies]
    seen = browse("dashboard", pair.url("device"), given=bodies)
    assert seen["errors"] == [] and seen["faults"] == [] and seen["wide"] <= 360
    families = text_string_to_metric_families(seen["text"])
    samples = [sample for family in families for sample in family.samples]

    def total(name: str, **labels: str) -> float:
        found = (each for each in samples if each.name == f"paceline_{name}" and labels.items() <= each.labels.items())
        return sum(each.value for each in found)

    figures = seen["figures"]
    for figure, name in (
        ("answers", "finished_answers_total"),
        ("tokens", "tokens_total"),
        ("forward passes", "engine_steps_total"),
        ("rows", "engine_rows_total"),
        ("prompt tokens from the cache", "cached_prompt_tokens_total"),
        ("bytes sent", "link_sent_bytes_total"),
        ("bytes received", "link_received_bytes_total"),
        ("longest round trip", "link_rtt_seconds"),
        ("bytes to the other side", "sent_today_bytes"),
        ("documents", "documents"),
    ):
        assert figures[figure] == total(name) > 0, figure
    assert figures["first text after"] == pytest.approx(total("first_text_seconds_sum") / figures["answers"])
    assert figures["length"] == total("finished_answers_total", outcome="length")
    for strategy in {report["strategy"] for report in seen["reports"]}:
        (row,) = [row for row in seen["rows"] if row[0] == strategy]
        assert int(row[3]) == total("tokens_total", strategy=strategy) > 0
        assert int(row[2]) == total("chosen_answers_total", strategy=strategy)
    assert total("chosen_answers_total") == 1, "one was asked of auto"
    lines = [line.split(",") for line in seen["csv"].split("\r\n")[1:-1]]
    assert sum(int(size) for _, _, size in lines) == total("sent_today_bytes")

    for report, shown in zip(seen["reports"], seen["shown"], strict=True):
        stats, facts = report["stats"], shown["facts"]
        sent, received = (
            {name[len(way) + 1 : -len("_bytes")]: int(size) for name, size in stats.items() if name.startswith(way)}
            for way in ("sent", "received")
        )
        assert {name: (int(up), int(down)) for name, up, down in shown["bytes"]} == {
            name: (sent.get(name, 0), received.get(name, 0)) for name in {*sent, *received}
        }
        tokens = [int(row[3]) for row in shown["all"] if row[0] == "tokens of the answer"]
        assert sum(tokens) == 60 and all(shown["pictures"])
        both = [stats[f"drafted_{side}"] for side in SIDES if f"drafted_{side}" in stats]
        if drafted := sum(both) or stats.get("drafted", 0):
            assert f" of {drafted:g} (" in facts["drafts accepted"]
        assert f"{report['energy']['device']['joules']:.3g}" in facts["energy, device"].replace("k", "000")


def test_what_the_server_has_of_a_deleted_conversation_goes_as_soon_as_it_answers(browse: Browse, pair: Pair) -> None:
    seen = browse("forgotten", pair.url("cloud"))
    assert [error for error in seen["errors"] if "net::ERR_FAILED" not in error] == [], "those the test refuses"
    assert seen["one"] == ["", 200, 404], "before it was ever kept at the server"
    assert seen["two"] == [[], 200, 1, 404, 404], "while the server did not answer, over a reload"
    assert seen["three"] == [200, 404], "before the answer had a name"
    assert seen["foreign"] == 1, "another key's conversations are not deleted"


def test_what_is_deleted_as_it_waits_stays_deleted_and_two_are_answered_beside_each_other(
    browse: Browse, pair: Pair
) -> None:
    seen = browse("beside", pair.url("cloud"))
    # A reload may cut off the server's word that it has deleted what the page then deletes again.
    assert [error for error in seen["errors"] if "404" not in error or "/v1/conversations/" not in error] == []
    assert seen["left"] == 0
    assert seen["free"] and seen["two"] == ["Two?"] and seen["first"] == "writing", "stopping one leaves the other"
    assert sorted(seen["kept"]) == ["One?", "Two?"]


def test_another_browser_has_the_conversation_and_goes_on_with_its_answer(browse: Browse, pair: Pair) -> None:
    seen = browse("elsewhere", pair.url("cloud"))
    assert seen["errors"] == []
    assert len(seen["sources"]) == len(seen["first"]["sources"]) > 0, "the report of an answer is fetched too"
    assert seen["texts"][0] == seen["texts"][1] != "", "one answer, stopped in one of two browsers"


def test_conversations_are_renamed_pinned_found_edited_saved_and_taken_over(browse: Browse, pair: Pair) -> None:
    seen = browse("manage", pair.url("cloud"))
    assert seen["errors"] == [] and seen["faults"] == [] and seen["rich"] == 2
    first, second = seen["bodies"]
    assert not first["background"] and not first["store"], "kept in this browser alone"
    assert len(first["paceline"]["vector_stores"]) >= 2, "the file of this conversation is read"
    ((text, by_own_voice),) = seen["said"]
    assert text.startswith("So") and by_own_voice, "as it is shown, by a voice that sends nothing away"
    assert seen["summary"].startswith("fake · 3 tokens") and " tokens of context" in seen["summary"]
    assert [item["content"] for item in second["input"]] == ["How slow is a wave?"]
    assert seen["edited"] == seen["again"] == ["How slow is a wave?", "2/2"]
    assert seen["found"] == [*(f"Old {number}" for number in range(179, 169, -1)), "Old 17"]
    assert seen["top"] == "Pinned" and seen["kept"] == 0
    assert seen["left"] == [False, 0], "what was uploaded for a conversation goes with it"
    assert seen["markdown"].startswith("# How fast is a wave?\n\n## You\n\nHow slow is a wave?\n\n## Answer\n\n**So**")


def test_two_tabs_lose_none_of_each_others_questions(browse: Browse, pair: Pair) -> None:
    seen = browse("tabs", pair.url("cloud"))
    assert seen["errors"] == [] and seen["questions"] == ["One?", "Two?", "Three?"]


def test_copies_of_a_conversation_end_alike_in_whatever_order_they_are_merged(browse: Browse, pair: Pair) -> None:
    seen = browse("merged", pair.url("cloud"), given=300 * DEPTH)
    assert seen["errors"] == [] and seen["faults"] == []


def test_nothing_is_asked_without_the_messages_of_another_browser_nor_are_others_forgotten(
    browse: Browse, pair: Pair
) -> None:
    seen = browse("unread", pair.url("cloud"))
    assert seen["refused"] == ["More?", 0, "The server answered 503, without a reason."], "said where it is seen"
    assert seen["asked"] == ["Alpha?", "So.", "More?"] and seen["shown"] == ["Alpha?", "More?"]
    assert seen["listed"] == ["Alpha?", "Gamma?"]


def test_what_two_browsers_change_of_a_conversation_is_in_both_and_goes_with_it(browse: Browse, pair: Pair) -> None:
    seen = browse("changes", pair.url("cloud"))
    assert seen["errors"] == [] and seen["titles"] == ["Renamed"]
    assert (seen["instructions"], seen["stores"]) == ("Answer in Latin.", 1), "before anybody has looked"
    assert seen["files"] == ["b.md"]


def test_a_file_of_one_tab_is_read_in_the_other_and_one_that_is_lost_is_told(browse: Browse, pair: Pair) -> None:
    seen = browse("attached", pair.url("cloud"))
    assert seen["stores"] == 1 and seen["files"] == [["a.md", "b.md"]] * 2
    assert seen["lost"] == "The server has them no more: answers do not read them" and seen["again"] == ["new.md"]
    assert all("404" in error for error in seen["errors"]), "logged by browsers themselves"


def test_a_tab_that_writes_an_answer_undoes_nothing_of_another(browse: Browse, pair: Pair) -> None:
    seen = browse("overwritten", pair.url("cloud"))
    assert seen["errors"] == [] and seen["titles"] == ["Renamed"]
    assert seen["questions"] == ["Kept?", "Another?"]


def test_a_conversation_is_kept_once_and_whole(browse: Browse, pair: Pair) -> None:
    seen = browse("once", pair.url("cloud"))
    assert seen["titles"] == [["One?"], ["One?"]] and seen["sizes"] == [4, 4, 10_001]
    faults = ("ERR_FAILED", "413", "404")
    assert all(any(fault in error for fault in faults) for error in seen["errors"]), "those of the test"


def test_a_question_goes_where_it_was_asked_whatever_is_opened_while_it_waits(browse: Browse, pair: Pair) -> None:
    seen = browse("waiting", pair.url("cloud"))
    assert seen["errors"] == [] and seen["asked"] == [["Old?"], ["New?"]]
    assert seen["shown"] == ["Old?"] and seen["titles"] == ["New?", "Old?"], "nor is anybody taken away from it"


def test_an_answer_that_the_server_has_is_read_whatever_failed_before(browse: Browse, pair: Pair) -> None:
    seen = browse("reading", pair.url("cloud"))
    assert all(status in error for error, status in zip(seen["errors"], ("502", "429", "500"), strict=True))
    for answer in (seen["proxied"], seen["again"]):
        assert answer["state"] == "done" and answer["text"] and answer["notes"] == ["Cut at the limit of tokens."]
    assert seen["missing"] == 1 and seen["notes"] == ["Cut at the limit of tokens."] * 3, "asked for again"
    assert seen["on"] == 3 and seen["edited"] == "One? edited on", "nobody is disturbed"


def test_a_mishap_of_a_moment_is_not_for_good(browse: Browse, pair: Pair) -> None:
    seen = browse("mishaps", pair.url("cloud"))
    assert seen["model"] == "fake" and seen["privacy"] == "local-only", "whatever another tab has set"
    assert seen["pasted"] == 0 and seen["looks"] > 1
    assert seen["printed"] == [0, 0], "the conversation, whole and alone"
    assert seen["spoken"] == "New conversation", "English where the words of a language do not come"
    faults = ("503", "429", "404", "ERR_FAILED")
    assert all(any(fault in error for fault in faults) for error in seen["errors"]), "those of the test"


def test_a_question_waits_for_the_files_of_its_conversation_which_are_of_one_store(browse: Browse, pair: Pair) -> None:
    seen = browse("files", pair.url("cloud"))
    assert seen["errors"] == [] and seen["back"] == "Given up?"
    assert seen["stores"] == 1 and seen["names"] == ["a.md", "b dm.c"], "two choices at once; none is read backwards"
    (beside, others), (waited, own), _ = seen["asked"]
    assert (beside, waited, own) == ("Beside?", "What do they say?", others + 1), "and other conversations do not wait"
    assert seen["again"] == ["secret.md", ["New conversation", "What do they say?", "Beside?"]], "before any question"


def test_any_title_and_system_prompt_is_the_same_in_another_browser(browse: Browse, pair: Pair) -> None:
    seen = browse("texts", pair.url("cloud"))
    first, second = seen["seen"]
    title = f"{'a' * 59}😀"
    assert seen["errors"] == [] and first["title"] == second["title"] == f"{title}…"
    prompt = "x" * 499 + "😀" + '"a":\n' * 699  # longer than the metadata, were it JSON
    assert first["system"] == second["system"] == prompt
    assert first["said"] == [f"{title} and so on \ufffd?"], "half of a character, which no request may hold"


def test_what_is_taken_over_from_any_file_can_be_shown_saved_and_asked(browse: Browse, pair: Pair) -> None:
    seen = browse("foreign", pair.url("cloud"), given=500 * DEPTH)
    assert seen["errors"] == [] and seen["faults"] == []


def test_a_conversation_longer_than_a_request_is_kept_in_parts_and_goes_on(browse: Browse, pair: Pair) -> None:
    seen = browse("large", pair.url("cloud"))
    assert seen["last"] == "And now?" and seen["roles"] == ["user", "assistant"] * 7 + ["user"], "from a question on"
    assert seen["well"] == "" and "larger than 1048576 bytes" in seen["told"], "what is not kept is told to the eye"
    assert all("413" in error for error in seen["errors"]), "logged by browsers themselves"


def test_keys_of_any_characters_escape_and_addresses_do_what_they_mean(browse: Browse, pair: Pair) -> None:
    seen = browse("fingers", pair.url("cloud"))
    assert seen["errors"] == [] and "Incorrect API key" in seen["refused"]
    assert (seen["state"], seen["search"]) == ("writing", ""), "emptying a field stops no answer"
    assert (seen["title"], seen["asked"]) == ("One?", 1)


@pytest.mark.parametrize("storage", ["forbidden", "full", "damaged"])
def test_a_browser_that_keeps_nothing_still_asks_and_has_what_the_server_keeps(
    browse: Browse, pair: Pair, storage: str
) -> None:
    seen = browse("storage", pair.url("cloud"), given=storage)
    assert seen["errors"] == [] and seen["answer"]["state"] == "done" and seen["answer"]["text"]
    assert seen["kept"] == 1


def test_all_documents_are_listed_and_an_upload_that_a_proxy_answers_fails(browse: Browse, pair: Pair) -> None:
    seen = browse("crowd", pair.url("device"))
    assert seen["errors"] == [] and seen["rows"] == 103
    assert "perhaps a proxy in front of it" in seen["told"] and "perhaps a proxy in front of it" in seen["metrics"]
    assert seen["source"] == "1 gnp.exe device", "no name is read backwards, nor the side behind it"


MARKDOWN = [
    ("a *b* **c** _d_ ~~e~~ `f*`", "<p>a <em>b</em> <strong>c</strong> <em>d</em> <del>e</del> <code>f*</code></p>"),
    ("2 * 3 * 4, snake_case_name", "<p>2 * 3 * 4, snake_case_name</p>"),
    ("\\*a\\*\nb", "<p>*a*<br>b</p>"),
    ("# A\n\n---\n> b\n> c", "<h3>A</h3><hr><blockquote><p>b<br>c</p></blockquote>"),
    ("- a\n  - b\n- c", "<ul><li>a<ul><li>b</li></ul></li><li>c</li></ul>"),
    ("   - a\n   - b", "<ul><li>a</li><li>b</li></ul>"),
    ("3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'),
    (
        "|a|b|\n|-|-:|\n|1|<i>|",
        '<div class="table" tabindex="0"><table><thead><tr><th class="align-left">a</th><th class="align-right">b</th>'
        '</tr></thead><tbody><tr><td class="align-left">1</td><td class="align-right">&lt;i&gt;</td></tr></tbody>'
        "</table></div>",
    ),
    (
        "```py\nx = '*'\n",
        '<figure class="code"><figcaption><span>py</span><button type="button" class="quiet" aria-label="Copy" '
        'title="Copy" data-copy="x = \'*\'\n"><svg class="icon" aria-hidden="true"><use href="#i-copy"></use></svg>'
        "</button></figcaption><pre tabindex=\"0\"><code>x = '*'\n</code></pre></figure>",
    ),
    ("[a](http://me:pw@evil.test/)", "<p>[a](http://me:pw@evil.test/)</p>"),
    ("a &amp; b", "<p>a &amp;amp; b</p>"),
    (
        "|a|b|c|\n|-|-|-|\n|1",
        '<div class="table" tabindex="0"><table><thead><tr><th class="align-left">a</th><th class="align-left">b</th>'
        '<th class="align-left">c</th></tr></thead><tbody><tr><td class="align-left">1</td><td colspan="2"></td></tr>'
        "</tbody></table></div>",
    ),
    ("**a** " * 5000, f"<p>{'<strong>a</strong> ' * 4999}<strong>a</strong></p>"),  # as long as answers get
    ("- a\n  - b\n\n  c\n- d", "<ul><li>a<ul><li>b</li></ul><p>c</p></li><li>d</li></ul>"),
]
LANES = [
    (
        "ab *cd* e",
        "cc..d...c",
        '<p><span class="lane-cloud">ab</span> <em><span class="lane-device">c</span>d</em> '
        '<span class="lane-cloud">e</span></p>',
    )
]
LONG = 100_000  # characters, of which each search must be linear
HOSTILE = [
    "[", "](", "[a](", "*a ", "**a", "_", "`", "``a`", "> ", "- ", "|-", "|a|\n|-|\n", "~~~\n", "http://", "http://[",
    "[](", "[](http:", "h" + "ttp://a" + ")" * 2000, "\\", "#", "|a|b|c|\n|-|-|-|\n" + "|\n" * 20,
]  # fmt: skip
LINE = "a **b** \\* _c *d*_ `e` [f](https://g.example/) $h$, " * 100
STREAMED = [  # of one kind each, as long as answers get
    "```py\nif x:\n" + "    y = 1  # z\n" * 300 + "```\n",
    "- a **b** `c`\n" * 300,
    "|a|b|\n|-|-|\n" + "|`c`|d e|\n" * 300,
    "> a *b* c\n\n" * 300,
    "> - a\n" * 300,
    "# A\n\nb *c* d\n\n$$\nx\n$$\n\n" * 50,
    LINE,
    f"# {LINE}",
    f"> - {LINE}",
    f"|a|b|\n|-|-|\n|{LINE}|{LINE}|",
    "- a\n" + "  - b *c*\n" * 300,
]
LINES = ["~" * LONG + "`", "~~~" + " " * LONG + "`", "`" * LONG + "a`"]  # each searched once


def test_markdown_is_rendered_and_text_that_means_harm_takes_no_longer(browse: Browse, pair: Pair) -> None:
    lanes = [(text, given) for text, given, _ in LANES]
    long = [(text, None) for text in [*((piece * LONG)[:LONG] for piece in HOSTILE), *LINES]]
    seen = browse("markdown", pair.url("device"), given=[*((text, None) for text, _ in MARKDOWN), *lanes, *long])
    rendered = seen["rendered"]
    expected = [html for _, html in MARKDOWN] + [html for _, _, html in LANES]
    assert rendered[: len(expected)] == expected and len(rendered) == len(expected) + len(long)
    assert seen["slow"] == {"early": True, "later": 200}, "what takes too long is shown as it was written, for now"
    assert not [html[:200] for html in rendered if html.startswith("unlike")]


def test_a_streamed_answer_is_that_of_its_text_at_once_and_is_built_only_once(browse: Browse, pair: Pair) -> None:
    more = ["$x$", "$$\nx", "\n$$", "```", "```py\n", "1. a\n", "   b", "|", "a b", "é😀"]
    pieces = [*HOSTILE, *(text for text, _ in MARKDOWN), *more]
    seen = browse("streamed", pair.url("device"), given={"pieces": pieces, "rounds": 60 * DEPTH, "long": STREAMED})
    assert seen["errors"] == [] and seen["unlike"] == [] and seen["cuts"] > 750 * DEPTH
    assert max(seen["made"]) < 4, "nodes made for each that the answer has"


def test_a_conversation_is_printed_whole_and_nothing_else(browse: Browse, pair: Pair) -> None:
    seen = browse("print", pair.url("cloud"))
    assert seen["pages"] > 5 and seen["cut"] == 0
    assert seen["shown"] == ["title", "message question", "message answer"]
    assert seen["back"] == "rgb(253, 252, 250)", "dark words for light paper"


def test_a_page_whose_language_does_not_come_speaks_english_and_unfolds_what_it_has(browse: Browse, pair: Pair) -> None:
    seen = browse("pieces", pair.url("cloud"))
    assert all("net::ERR_FAILED" in error and "de.js" in error for error in seen["errors"])
    assert (seen["lang"], seen["word"], seen["text"]) == ("en", "New conversation", "So.")


def test_a_dashboard_shows_no_figures_of_a_proxys_page_and_says_of_when_old_ones_are(
    browse: Browse, pair: Pair
) -> None:
    page = browse("lost", pair.url("cloud"))
    proxy, first, lost = page["seen"]
    assert page["order"] == ["x1", "x2", "x10"]
    assert proxy["panels"] == 0 and "perhaps a proxy in front of it" in proxy["told"]
    assert first["rate"] == "tokens: not known yet" and first["level"] == "answers: 0 under way"
    assert (first["className"], first["colours"]) == ("", "none")
    assert "does not answer" in lost["told"] and "What is shown is of " in lost["told"]
    assert (proxy["className"], lost["className"], lost["colours"]) == ("error", "error", "grayscale(1)")


def test_long_calls_wrap_and_heads_of_tables_stand_as_their_columns(browse: Browse, pair: Pair) -> None:
    seen = browse("layout", pair.url("cloud"))
    assert seen["errors"] == [] and seen["sideways"] == 0 and seen["error"] == 0
    assert seen["heads"] == seen["cells"] == ["left", "left", "right"]


def test_what_is_marked_in_a_source_stands_in_one_line_of_the_answer_unless_it_has_that_end_too(
    browse: Browse, pair: Pair
) -> None:
    passage = "It is called the copper lantern. The ferry goes\nat nine from there."
    marked = {
        "The copper lantern.\nThe second: no.": "the copper lantern",
        "A copper lantern. The ferry.": "copper lantern. The ferry",
        "the ferry goes\nat nine": "The ferry goes\nat nine",
        "The ferry goes at nine.": "The ferry goes\nat nine",
        "No.": "",
    }
    assert browse("shared", pair.url("cloud"), given=[passage, *marked])["marked"] == [*marked.values()]


def test_a_speed_is_one_number_folded_and_unfolded_in_the_readers_language(browse: Browse, pair: Pair) -> None:
    seen = browse("german", pair.url("cloud"))
    assert seen["errors"] == [] and seen["unfolded"] == "47,6"
    assert seen["folded"].endswith(" · 47,6 Token/s") and seen["source"] == "privates Dokument"
    assert seen["share"] == "keine Seite 33 %"
