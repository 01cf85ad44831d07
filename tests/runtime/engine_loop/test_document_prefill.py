"""Document KV in a running program: equal text with and without it, fewer rows computed, removed with documents."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from safetensors import SafetensorError
from transformers import LlamaConfig

from paceline.bootstrap import open_kv, open_store
from paceline.core.batching.block_manager import KvPrefix
from paceline.core.batching.segment import Segment, SeqId
from paceline.core.sampling.sampler import SamplingParams
from paceline.engine.base import Engine, LoadedModel
from paceline.engine.fake import VOCAB, ByteTokenizer, FakeEngine
from paceline.engine.loader import EngineOptions, load_engine, quiet
from paceline.postgres import Postgres
from paceline.rag import document_kv
from paceline.rag.document_kv import FOLDER, DocumentKvStore
from paceline.rag.embedder import HashEmbedder
from paceline.rag.store.documents import DocumentStore
from paceline.runtime import node as node_module
from paceline.runtime.engine_loop.document_prefill import DocumentPrefiller, kv_key
from paceline.runtime.engine_loop.executor import StepExecutor
from paceline.runtime.engine_loop.requests import ForwardRequest, SequenceOp, StoredPrefix
from paceline.runtime.engine_loop.worker import EngineWorker
from paceline.runtime.lookup_tables import FOLDER as TABLES
from paceline.runtime.lookup_tables import TableStore
from paceline.runtime.node import Node
from paceline.runtime.resources import Company, Kept, NodeParts
from paceline.runtime.service import GenerationResult
from paceline.settings import AgentSettings
from paceline.settings_sources import resolve
from paceline.strategies.base import SIDES, Side
from tests.engine.checkpoints import save
from tests.postgres import RealPostgres
from tests.requests import a_request, changed
from tests.runtime.test_node import bench_of, collect, open_gate, side_by_side, stores_of

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

MIB = 1 << 20
NOTES: dict[Side, dict[str, str]] = {
    "cloud": {"public.md": "The harbour museum opens at nine and shows the old red boat."},
    "device": {"private.md": "My key to the old red boat lies under the flat stone."},
}
REQUEST = a_request(
    messages=({"role": "user", "content": "Where is the key to the old red boat?"},),
    sampling=SamplingParams(temperature=0.8, seed=5),
    max_tokens=24,
    strategy="aggregate",
)


def config_of(layers: int) -> LlamaConfig:
    """Of a random model over bytes."""
    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=256,
    )


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random model."""
    with quiet():
        return save(config_of(2), tmp_path_factory.mktemp("tiny"))


def fake(side: Side) -> Engine:
    return FakeEngine(seed=SIDES.index(side), spread=0.3)


@pytest.fixture(params=["fake", "paged"])
def make(request: pytest.FixtureRequest, tiny: Path) -> Callable[[Side], Engine]:
    """Factory of an engine for a side."""
    if request.param == "fake":
        return fake
    options = EngineOptions(backend=request.param, kv_rows=2048)
    return lambda _: load_engine(tiny, options, name="tiny")


class Pair:
    """Two linked nodes with a document each."""

    def __init__(
        self, nodes: dict[Side, Node], stores: dict[Side, DocumentStore], files: dict[Side, DocumentKvStore]
    ) -> None:
        self.nodes, self.stores, self.files = nodes, stores, files
        self.last: GenerationResult | None = None  # of the last answer

    def rows(self) -> int:
        """Rows computed so far on both sides."""
        return sum(node.worker.steps.rows for node in self.nodes.values())

    def adopted(self) -> int:
        return sum(node.worker.steps.prefixes.adopted for node in self.nodes.values())

    async def text(self, strategy: str) -> str:
        text, self.last = await collect(await self.nodes["device"].prepare(changed(REQUEST, strategy=strategy)))
        assert self.last.degraded is None
        return text


@asynccontextmanager
async def pair(folder: Path, make: Callable[[Side], Engine], *, keep_kv: bool = True) -> AsyncIterator[Pair]:
    """Two linked nodes. Pending KV is written when this ends."""
    tokenizer = ByteTokenizer()
    with stores_of(folder, NOTES) as stores:
        files = {side: DocumentKvStore(folder / side / FOLDER, MIB) for side in SIDES}
        parts = {}
        for side in SIDES:
            tables = TableStore(folder / side / TABLES, tokenizer.fingerprint, tokenizer.vocab_size)
            kept = Kept(kv=files[side] if keep_kv else None, tables=tables)
            parts[side] = NodeParts(kept=kept, company=Company(asks=open_gate()))
        models = {side: LoadedModel(make(side), tokenizer) for side in SIDES}
        async with side_by_side(bench := bench_of(models, stores, parts)):
            yield Pair({side: bench.of(side) for side in SIDES}, stores, files)


@pytest.fixture
def lazy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable prefill while idle."""

    async def no_prefill(*_: object) -> int:
        return 0

    monkeypatch.setattr(DocumentPrefiller, "prefill_missing", no_prefill)


@pytest.mark.usefixtures("lazy")
@pytest.mark.parametrize("strategy", ["autoregressive", "aggregate"])
async def test_the_text_is_the_same_without_the_store_at_the_first_and_at_later_uses(
    tmp_path: Path, make: Callable[[Side], Engine], strategy: str
) -> None:
    async with pair(tmp_path, make, keep_kv=False) as without:
        expected, most = await without.text(strategy), without.rows()
        assert not without.files["device"].groups() and expected
    async with pair(tmp_path, make) as first:
        assert await first.text(strategy) == expected
        assert first.adopted() == 0
        assert first.last is not None and first.last.stats["cached_tokens"] == 0
    sides = 1 if strategy == "autoregressive" else 2
    assert sum(len(first.files[side].groups()) for side in SIDES) == sides
    async with pair(tmp_path, make) as later:
        assert await later.text(strategy) == expected
        assert later.adopted() > 50 * sides
        assert later.last is not None
        assert 50 < later.last.stats["cached_tokens"] < later.last.prompt_tokens, "of this side's prompt alone"
        if sides == 1:
            assert later.last.stats["cached_tokens"] == later.adopted()
        if strategy == "autoregressive":  # in `aggregate` the number of drafted rows depends on timing
            assert later.rows() == most - later.adopted()


@pytest.mark.usefixtures("lazy")
async def test_damaged_files_cost_only_time(tmp_path: Path) -> None:
    async with pair(tmp_path, fake) as first:
        expected = await first.text("autoregressive")
    (file,) = (tmp_path / "device" / FOLDER).iterdir()
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    for healed in (False, True):
        async with pair(tmp_path, fake) as again:
            assert await again.text("autoregressive") == expected
            assert (again.adopted() > 0) == healed


async def test_passages_of_one_context_take_their_rows_along(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Of a model of one layer, whose rows see nothing of one another, so that the text is that of all computed anew."""
    with quiet():
        folder = save(config_of(1), tmp_path_factory.mktemp("one_layer"))
    engine = load_engine(folder, EngineOptions(backend="paged", kv_rows=4096), name="one")
    files = DocumentKvStore(tmp_path / FOLDER, MIB)
    with DocumentStore.open(tmp_path, HashEmbedder()) as store:
        for number in range(3):
            store.add_text(
                f"{number}.md", f"Boat {number}: the key of the old red boat {number} is here.", zone="device"
            )
        parts = NodeParts(kept=Kept(kv=files))
        async with asyncio.timeout(60), Node("device", LoadedModel(engine, ByteTokenizer()), store, parts) as node:
            while len(files.groups()) < 3:
                await asyncio.sleep(0)  # a pass of the loop: it prefills while it is idle
            found: dict[str, list[tuple[str, int, str]]] = {}
            for reading in ("reused", "together", "reused", "together"):
                before = node.worker.steps.rows
                asked = changed(REQUEST, strategy="autoregressive", options={"reading": reading}, documents=3)
                text, done = await collect(await node.prepare(asked))
                assert len(done.found) == 3
                found.setdefault(reading, []).append((text, node.worker.steps.rows - before, done.strategy_reason))
    (ours, rows, reason), (again, rows_again, _) = found["reused"]
    (expected, all_rows, plain), (expected_again, rows_cached, _) = found["together"]
    assert ours == again == expected == expected_again and ours
    assert "approximate: passages keep the rows that were computed for each alone" in reason
    assert "approximate" not in plain
    assert rows < all_rows - 2 * 20, "of two passages only the first rows are computed"
    assert rows_cached < rows_again < all_rows, "rows of the one way are never the other's"


async def test_both_sides_say_that_they_reuse_rows(tmp_path: Path, tiny: Path) -> None:
    make = partial(load_engine, tiny, EngineOptions(backend="paged", kv_rows=4096), name="tiny")
    async with asyncio.timeout(60), pair(tmp_path, lambda _: make()) as both:
        for side in SIDES:
            both.stores[side].add_text("boat.md", "The old red boat has a key too.", zone=side)
            while len(both.files[side].groups()) < 2:
                await asyncio.sleep(0)  # a pass of the loop: it prefills while it is idle
        asked = changed(REQUEST, options={"reading": "reused"}, documents=2)
        _, done = await collect(await both.nodes["device"].prepare(asked))
    assert "approximate: passages keep" in done.strategy_reason and "approximate at the cloud" in done.strategy_reason


class Alone:
    """A document store with its KV files and an engine, without a node."""

    def __init__(self, folder: Path, store: DocumentStore, *, limit: int = MIB) -> None:
        self.store = store
        self.files = DocumentKvStore(folder / FOLDER, limit)
        self.engine = FakeEngine(seed=1)
        self.worker = EngineWorker(self.engine)
        self.kv = DocumentPrefiller(self.files, store, self.worker, LoadedModel(self.engine, ByteTokenizer()))

    async def __aenter__(self) -> Alone:
        await self.worker.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.worker.stop()
        await asyncio.to_thread(self.kv.close)
        assert all(self.engine.length(SeqId(i)) == 0 for i in range(50)), "sequences leaked"


@pytest.fixture
def store(tmp_path: Path) -> DocumentStore:
    opened = DocumentStore.open(tmp_path, HashEmbedder())
    for i in range(3):
        opened.add_text(f"{i}.md", f"Text number {i}.", zone="device")
    return opened


async def test_a_full_disk_ends_the_prefill_in_a_line(
    tmp_path: Path, store: DocumentStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object, **__: object) -> None:
        raise SafetensorError("No space left on device (os error 28)")

    monkeypatch.setattr(document_kv, "serialize_file", full)
    async with Alone(tmp_path, store) as alone:
        for _ in range(2):  # the second time not even one passage is computed
            assert await alone.kv.prefill_missing(lambda: False) == 0
    assert [each.message for each in caplog.records if "os error 28" in each.message] == [
        "KV of a document cannot be kept: No space left on device (os error 28)"
    ]


async def test_added_documents_are_prefilled_once(tmp_path: Path, store: DocumentStore) -> None:
    async with Alone(tmp_path, store) as alone:
        assert await alone.kv.prefill_missing(lambda: False) == 3
        assert len(alone.files.groups()) == 3
        assert await alone.kv.prefill_missing(lambda: False) == 0
        store.add_text("new.md", "A new text.", zone="device")
        store.add_text("copy.md", "  Text number 1. ", zone="device")  # another document of the same text
        assert await alone.kv.prefill_missing(lambda: False) == 1
        prefix = alone.kv.prefix(passage := store.passages(0, 1)[0], tuple(f"document: {passage.text}\n".encode()))
        assert prefix.rows is not None
    async with Alone(tmp_path, store) as restarted:
        assert await restarted.kv.prefill_missing(lambda: False) == 0


async def test_a_full_folder_ends_prefill_and_keeps_used_kv(tmp_path: Path, store: DocumentStore) -> None:
    async with Alone(tmp_path, store, limit=4000) as alone:  # a file is about 1.5 kB
        assert await alone.kv.prefill_missing(lambda: False) < 3
        before = alone.files.groups()
        assert before and alone.files.num_bytes() <= 4000
        assert await alone.kv.prefill_missing(lambda: False) == 0
        assert alone.files.groups() == before


async def test_kv_of_documents_that_another_server_removes_is_deleted(tmp_path: Path, postgres: RealPostgres) -> None:
    with ExitStack() as stack:
        home = stack.enter_context(closing(Postgres(postgres.new_database())))
        here, there = (
            stack.enter_context(DocumentStore.open(tmp_path / name, HashEmbedder(), home=home)) for name in "ab"
        )
        for i in range(2):
            there.add_text(f"{i}.md", f"Text number {i}.", zone="cloud")
        async with Alone(tmp_path / "a", here) as alone:
            assert await alone.kv.prefill_missing(lambda: False) == 2
            there.remove("0.md")
            assert await alone.kv.prefill_missing(lambda: False) == 0
            assert len(alone.files.groups()) == 1


async def test_a_running_node_fills_its_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled = {side: asyncio.Event() for side in SIDES}
    prefill_missing = DocumentPrefiller.prefill_missing

    async def prefill(self: DocumentPrefiller, busy: Callable[[], bool]) -> int:
        computed = await prefill_missing(self, busy)
        for side, node in linked.nodes.items():
            if node._resources.prefiller is self:
                filled[side].set()
        return computed

    monkeypatch.setattr(DocumentPrefiller, "prefill_missing", prefill)
    monkeypatch.setattr(node_module, "WATCH_S", 0.0)
    async with pair(tmp_path, fake) as linked:
        for event in filled.values():
            await event.wait()
        assert [len(linked.files[side].groups()) for side in SIDES] == [1, 1]
        assert await linked.text("aggregate")
        assert linked.adopted() > 100


def run_all(steps: StepExecutor) -> None:
    while (scheduled := steps.next()) is not None:
        for answer, result in steps.run(scheduled):
            answer(result)
        steps.prefixes.export()
        steps.engine.check()


def rows_of(tokens: tuple[int, ...]) -> KvPrefix:
    engine = FakeEngine()
    kept: list[KvPrefix] = []
    steps = StepExecutor(engine)
    steps.submit(
        ForwardRequest(Segment(SeqId(1), 0, (*tokens, 0)), lambda _: None, StoredPrefix(tokens, keep=kept.append))
    )
    run_all(steps)
    return kept[0]


PROMPT = tuple(b"a document and a question")
BEGIN = PROMPT[:10]


@pytest.mark.parametrize("budget", [8, 512])
def test_a_prompt_with_stored_rows_gives_the_same_dists_as_one_without(budget: int) -> None:
    results: list[object] = []
    for prefix in (None, StoredPrefix(BEGIN, rows_of(BEGIN))):
        steps = StepExecutor(FakeEngine(), budget)
        steps.submit(ForwardRequest(Segment(SeqId(1), 0, PROMPT), results.append, prefix))
        run_all(steps)
    assert (steps.rows, steps.prefixes.adopted) == (len(PROMPT) - 10, 10)
    first, second = results
    assert isinstance(first, tuple) and isinstance(second, tuple)
    assert (first[0].probs == second[0].probs).all()


def test_rows_the_engine_refuses_are_computed(caplog: pytest.LogCaptureFixture) -> None:
    for rows in (changed(rows_of(BEGIN), model="another"), rows_of(BEGIN)):
        results: list[object] = []
        steps = StepExecutor(FakeEngine())
        if rows.model != "another":  # a sequence that the engine already has
            steps.engine.import_kv(SeqId(1), rows)
            steps.engine.truncate(SeqId(1), 0)
        steps.submit(ForwardRequest(Segment(SeqId(1), 0, PROMPT), results.append, StoredPrefix(BEGIN, rows)))
        run_all(steps)
        assert steps.rows == len(PROMPT) and isinstance(results[0], tuple)
    assert "computed again" in caplog.text


@pytest.mark.parametrize(
    "segment",
    [
        Segment(SeqId(1), 0, BEGIN),
        Segment(SeqId(1), 0, PROMPT, logits="all"),
        Segment(SeqId(1), 0, (0, *PROMPT)),
        Segment(SeqId(1), 0, PROMPT, (-1,) * len(PROMPT)),
    ],
    ids=["nothing is left", "all rows wanted", "another beginning", "a tree"],
)
def test_stored_rows_that_do_not_match_are_not_imported(segment: Segment) -> None:
    steps = StepExecutor(FakeEngine())
    results: list[object] = []
    steps.submit(ForwardRequest(segment, results.append, StoredPrefix(BEGIN, rows_of(BEGIN))))
    run_all(steps)
    assert steps.rows == len(segment.tokens) and steps.prefixes.adopted == 0 and isinstance(results[0], tuple)


def test_a_program_stores_kv_beside_its_documents_by_default(tmp_path: Path) -> None:
    flags = {"state_dir": tmp_path, "model": "fake"}
    settings, _ = resolve(AgentSettings, flags, {})
    assert settings.tuning.document_kv_mib > 0
    with open_store(settings) as store:
        store.add_text("a.md", "A text.", zone="device")
        rows = rows_of(BEGIN)
        files = open_kv(settings, store)
        assert files is not None
        key = kv_key(files, FakeEngine().info, store.passages(0, 1)[0], BEGIN)
        other = replace(FakeEngine().info, kept_as="another file's")
        assert files.put(key, rows) and files.get(kv_key(files, other, store.passages(0, 1)[0], BEGIN)) is None
        (file,) = (settings.docs_dir / FOLDER).iterdir()
        assert file.suffix == ".aes" and b"A text." not in file.read_bytes(), "a device encrypts it"
        store.remove("a.md")
        assert files.get(key) is None
        without, _ = resolve(AgentSettings, flags, {"PACELINE_TUNING_DOCUMENT_KV_MIB": "0"})
        assert open_kv(without, store) is None


async def test_documents_leave_room_for_an_answer_whose_request_sets_no_limit(tmp_path: Path) -> None:
    positions, least = 512, 64
    cited = 0
    for words in range(40, 100, 20):
        with DocumentStore.open(tmp_path / str(words), HashEmbedder()) as store:
            store.add_text("boat.md", "red boat " * words, zone="device")
            model = LoadedModel(FakeEngine(3, spread=0.3, max_positions=positions), ByteTokenizer())
            async with asyncio.timeout(60), Node("device", model, store) as node:
                sampling = SamplingParams(seed=5, logit_bias={256: -100.0})
                request = changed(REQUEST, max_tokens=None, strategy="autoregressive", sampling=sampling)
                _, done = await collect(await node.prepare(request))
        assert done.reason == "length" and done.completion_tokens >= least
        cited += len(done.citations)
    assert cited, "some are short enough, or are cut"


async def test_no_document_is_prefilled_while_an_answer_is_written(tmp_path: Path, store: DocumentStore) -> None:
    async with Alone(tmp_path, store) as alone:
        turns = iter([False, True])
        assert await alone.kv.prefill_missing(lambda: next(turns)) == 1
        assert await alone.kv.prefill_missing(lambda: False) == 2


async def test_kv_of_documents_removed_meanwhile_is_deleted_at_the_next_start(
    tmp_path: Path, store: DocumentStore
) -> None:
    async with Alone(tmp_path, store) as alone:
        await alone.kv.prefill_missing(lambda: False)
    aside = tmp_path / "aside"
    (tmp_path / FOLDER).rename(aside)  # as if the removing process had been killed before it deleted the files
    passage = store.passages(0, 1)[0]
    store.remove("0.md")
    aside.rename(tmp_path / FOLDER)
    async with Alone(tmp_path, store) as alone:
        late = alone.kv.prefix(passage, tuple(b"a request that found it before"))
        assert late.keep is not None
        assert await alone.kv.prefill_missing(lambda: False) == 0
        assert len(alone.files.groups()) == 2
        seq = alone.worker.allocate()
        ran = asyncio.Event()
        alone.worker.submit(ForwardRequest(Segment(seq, 0, (*late.tokens, 1)), lambda _: ran.set(), late))
        await ran.wait()
        alone.worker.submit(SequenceOp.release(seq))
    assert len(alone.files.groups()) == 2


def test_a_cancelled_request_imports_and_exports_no_rows() -> None:
    steps = StepExecutor(FakeEngine())
    kept: list[KvPrefix] = []
    for seq, prefix in ((1, StoredPrefix(BEGIN, rows_of(BEGIN))), (2, StoredPrefix(BEGIN, keep=kept.append))):
        steps.submit(ForwardRequest(Segment(SeqId(seq), 0, PROMPT), print, prefix))
        steps.submit(SequenceOp.release(SeqId(seq)))
    run_all(steps)
    assert (steps.rows, steps.prefixes.adopted, kept) == (0, 0, [])
