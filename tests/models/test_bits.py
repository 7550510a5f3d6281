"""Zero differing logits on CPU: whatever a row's company, and however its past came to be cached."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from parlay.compiled.build import NAMES
from parlay.compiled.library import SWITCH, NotLoaded
from parlay.compiled.library import load as load_library
from parlay.models.config import DecoderConfig, Experts, LayerForm, RopeConfig
from parlay.models.native import NativeRunner
from parlay.models.weights.formats import Format
from parlay.models.weights.shapes import Weight, weight_shapes
from parlay.models.weights.stored import StoredTensor
from parlay.system import threads
from parlay.types import Exactness, Segment, Tree, trees

VOCAB = 97
SMALL = {"hidden_size": 48, "intermediate_size": 80, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
WIDE = {"hidden_size": 256, "intermediate_size": 704, "num_heads": 6, "num_kv_heads": 2, "head_dim": 64}
ODD = {"hidden_size": 40, "intermediate_size": 52, "num_heads": 3, "num_kv_heads": 3, "head_dim": 24}
LARGE_INPUT = {"hidden_size": 64, "intermediate_size": 2048, "num_heads": 5, "num_kv_heads": 1, "head_dim": 80}

BLOCKS = {"hidden_size": 256, "intermediate_size": 512, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64}

Model = tuple[dict[str, int], torch.dtype, bool, str]
FORMS = (
    LayerForm(window=9, qk_norm=True),
    LayerForm(window=70, rope=None, post_norms=True, activation="gelu_tanh", scale=0.2, score_cap=3.0, qk_norm=True),
)
"""The layers of models that are ``formed``: a narrow window, then a wide one with all that a layer may do besides."""


def mixtures(size: int) -> tuple[LayerForm, LayerForm]:
    """Layers of experts of so many inner numbers, with sinks, and with positions that turn a part of each head."""
    return (
        LayerForm(
            window=9, sinks=True, out_bias=True, experts=Experts(count=4, chosen=2, size=size, bias=True, shared=size)
        ),
        LayerForm(
            rope=RopeConfig(rotated=8),
            pre_norms=False,
            post_norms=True,
            qk_norm=True,
            wide_qk_norm=True,
            activation="clamped_swiglu",
            residual_scale=0.5,
            experts=Experts(count=3, chosen=2, size=size, normalized=False, shared=2 * size, shared_gate=True),
        ),
    )


UNEVEN = (
    LayerForm(window=9, value_norm=True, out_scale=True, post_norms=True, qk_norm=True, activation="gelu_tanh"),
    LayerForm(kv_heads=1, head_dim=40, keys_as_values=True, value_norm=True, post_norms=True, qk_norm=True, scale=1.0),
    LayerForm(window=9, keys_of=0, mlp_size=100, post_norms=True, qk_norm=True),
    LayerForm(kv_heads=1, head_dim=40, keys_of=1, post_norms=True, out_scale=True, rope=RopeConfig(theta=99.0)),
)
"""Layers that differ in their heads and in whose keys they see."""

MODELS: list[Model] = [
    *(
        (shape, dtype, norm, "plain")
        for shape, norm in ((SMALL, False), (ODD, True), (WIDE, True), (LARGE_INPUT, False))
        for dtype in (torch.float32, torch.bfloat16)
    ),
    (ODD, torch.float32, True, "formed"),
    (SMALL, torch.bfloat16, True, "formed"),
    (LARGE_INPUT, torch.bfloat16, True, "formed"),
    (WIDE, torch.float32, True, "q8_0"),
    (BLOCKS, torch.bfloat16, True, "formed q8_0"),
    (ODD, torch.float32, True, "experts"),
    (BLOCKS, torch.bfloat16, True, "experts stored"),
    (ODD, torch.float32, True, "uneven"),
    (BLOCKS, torch.bfloat16, True, "uneven stored"),
]
"""Shape, type, norms of heads, and how weights are held: ``stored`` has all formats of blocks beside each other.

``formed`` are plain weights in layers of `FORMS`, ``experts`` layers of `mixtures`, ``uneven`` those of `UNEVEN` that
read numbers of their own, the last with experts besides, and with ``q8_0`` keys and values are cached in blocks."""

HELD: list[Model] = [
    (ODD, torch.bfloat16, True, "int8"),
    (WIDE, torch.float32, True, "int8"),
    (BLOCKS, torch.float32, False, "stored"),
    (BLOCKS, torch.bfloat16, True, "stored"),
]
"""They differ from models above in how weights are held, which attention doesn't see: what is here of rows that share
products runs on these too, what is of keys and of who sees them doesn't."""


def random_weights(config: DecoderConfig) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)

    def drawn(name: str, shape: tuple[int, ...]) -> Tensor:
        numbers = torch.randn(shape, generator=generator)
        if len(shape) == 1:
            return 0.1 * numbers + (1 if name.endswith("norm.weight") else 0)
        return numbers if name == "model.embed_tokens.weight" else numbers * shape[1] ** -0.5

    return {name: drawn(name, shape) for name, shape in weight_shapes(config).items()}


def in_blocks(weights: dict[str, Tensor]) -> dict[str, Weight]:
    """Random blocks in the place of the matrices, each matrix in another format than the one before."""
    formats = itertools.cycle(Format)
    return {name: stored(next(formats), weight) if weight.dim() == 2 else weight for name, weight in weights.items()}


def stored(format: Format, weight: Tensor) -> StoredTensor:
    """Blocks of the matrix's shape, whose scales are small."""
    if format.plain is not None:
        return StoredTensor(format, tuple(weight.shape), weight.to(format.plain).view(torch.uint8))
    data = torch.randint(0, 256, (len(weight), format.row_bytes(weight.shape[1])), dtype=torch.uint8)
    blocks = data.view(-1, format.block_bytes)
    two = [0, 1] if format.name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else [0]
    scales = {Format.Q6_K: [104], Format.Q3_K: [54], Format.Q2_K: [40, 41], Format.IQ1_M: [24, 25, 26, 27]}.get(
        format, two
    )
    for place in scales:
        half = torch.full((len(blocks), 1), 0.01 / 16, dtype=torch.float16)
        blocks[:, 2 * place : 2 * place + 2] = half.view(torch.uint8)
    if format is Format.MXFP4:
        blocks[:, 0] = 118
    return StoredTensor(format, tuple(weight.shape), data)


def scatter(runner: NativeRunner) -> None:
    """Take pages in turns and give most of them back in another order: those of later texts lie all over the place."""
    names = list(range(-100, 0))
    for name in names:
        runner.open(name, (0,))
    for tokens in (16, 32, 48):
        assert all(runner.reserve(name, tokens) for name in names)
    random.Random(0).shuffle(names)
    for name in names[10:]:
        runner.release(name)
    runner.open(0, (0,))
    runner.reserve(0, 160)
    text = runner.store._live[0]
    addresses = [page.address for page in text.recent or text.table]
    runner.release(0)
    steps = {after - before for before, after in itertools.pairwise(addresses)}
    assert len(steps) > 5
    assert min(steps) < 0


class Bench:
    """A runner under test, and the logits of texts computed whole, each in a sequence of its own."""

    def __init__(self, shape: dict[str, int], dtype: torch.dtype, qk_norm: bool, held: str) -> None:
        blocks, inner = "stored" in held, shape["intermediate_size"]
        uneven = tuple(
            replace(form, head_dim=form.head_dim and 2 * shape["head_dim"], mlp_size=form.mlp_size and 2 * inner)
            for form in UNEVEN
        )
        beside = Experts(count=3, chosen=2, size=256 if blocks else 40, beside=True)
        uneven = (*uneven[:3], replace(uneven[3], experts=beside))
        kinds = {"formed": FORMS, "experts": mixtures(256 if blocks else 40), "uneven": uneven}
        layers = kinds.get(held.split()[0], ())
        config = DecoderConfig(
            architecture="test", vocab_size=VOCAB, num_layers=len(layers) or 2, rms_norm_eps=1e-6, max_context=4096,
            qk_norm=qk_norm, layers=layers, logit_cap=5.0 if layers else 0.0,
            per_layer_size=(256 if blocks else 10) * held.startswith("uneven"), **shape,
        )  # fmt: skip
        weights = random_weights(config)
        self.runner = NativeRunner(
            config,
            in_blocks(weights) if held.endswith("stored") else weights,
            dtype=dtype,
            device=torch.device("cpu"),
            max_tokens_cached=16384,
            quantize="int8" if held == "int8" else None,
            kv_cache_dtype="q8_0" if held.endswith("q8_0") else "auto",
        )
        self.names = itertools.count()
        scatter(self.runner)

    def whole(self, tokens: Sequence[int]) -> Tensor:
        """``[len(tokens), V]`` from one forward that shares nothing with any other."""
        name = next(self.names)
        self.open(name, tokens, salt=f"alone {name}")
        logits = self.runner.forward([Segment(name, tuple(tokens))]).logits_RV
        self.runner.release(name)
        return logits

    def open(self, name: int, tokens: Sequence[int], salt: str = "", more: int = 64) -> int:
        cached = self.runner.open(name, tokens, salt)
        assert self.runner.reserve(name, len(tokens) + more)
        return cached

    def feed(self, tokens: Sequence[int], chunks: Sequence[int], salt: str) -> tuple[int, Tensor]:
        """A new sequence that computes ``tokens`` in chunks of the given sizes, and all its logits."""
        name = next(self.names)
        cached = self.open(name, tokens, salt)
        parts = [torch.zeros(0, VOCAB)]
        for size in chunks:
            part = self.runner.forward([Segment(name, tuple(tokens[cached : cached + size]))]).logits_RV
            parts.append(part)
            cached = self.runner.keep(name, ())
        return name, torch.cat(parts)


KERNELS = ("0", *NAMES)
"""torch's operators, then the compiled decoder on every instruction set."""


def runs_here(kernels: str) -> bool:
    """Whether the library is there, and this processor knows the instruction set."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SWITCH, kernels)
        try:
            return kernels == "0" or load_library().name.decode() == kernels
        except (NotLoaded, ValueError):  # a library for tests may have one set alone
            return False


def parts(kernels: str, model: Model) -> set[str]:
    """What of the source an instruction set chooses for this model: code of a width, integer and bf16 products."""
    first, _, more = kernels.partition("_")
    width, more = {"avx": ("avx2", more), "dotprod": ("plain", "dotprod")}.get(first, (first, more))
    found = {width}
    if any(held in model[3] for held in ("int8", "stored", "q8_0")):
        found.add(f"integers {width} {bool(more)}")
    if model[1] is torch.bfloat16:
        found.add(f"halves {width} {more == 'bf16'}")
    return found


def kernels_of(model: Model) -> list[str]:
    """torch's operators, the widest instruction set here, and of the others those that choose something further."""
    here = [kernels for kernels in KERNELS if runs_here(kernels)]
    seen: set[str] = set()
    tried = []
    for kernels in here[-1:] + here[:-1]:
        if not parts(kernels, model) <= seen and not is_left_out(kernels, model[3]):
            seen |= parts(kernels, model)
            tried.append(kernels)
    return tried


def is_left_out(kernels: str, held: str) -> bool:
    """torch's operators have no cache in blocks; blocks and experts are tried apart where each product takes long."""
    if kernels == "0" and held.endswith("q8_0"):
        return True
    return kernels in ("0", "plain") and held in ("experts stored", "uneven stored")


def attends_alike(kernels: str, model: Model) -> bool:
    """Whether attention is that of another model here. Where code has no vectors, plain layers run in one shape."""
    shape, _, _, held = model
    return model in HELD or (kernels in ("0", "plain") and held == "plain" and shape is not ODD)


CASES = [(kernels, model) for model in (*MODELS, *HELD) for kernels in kernels_of(model)]
CASES.sort(key=lambda case: attends_alike(*case))
ATTENDING = [case for case in CASES if not attends_alike(*case)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests of products run with every way to hold weights, those of attention once for each kind of attention."""
    if "bench" in metafunc.fixturenames:
        cases = CASES if metafunc.function in OF_PRODUCTS else ATTENDING
        names = [f"{m[0]['hidden_size']}-{str(m[1])[6:]}-{int(m[2])}-{m[3]}-{kernels}" for kernels, m in cases]
        metafunc.parametrize("bench", cases, indirect=True, ids=names)


@pytest.fixture(scope="module")
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    kernels, model = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SWITCH, kernels)
        result = Bench(*model)
        assert (kernels == "0") == result.runner.spec.kernels.endswith(f"{SWITCH}=0")
        if result.runner.spec.exactness is not Exactness.BITS:
            pytest.skip(result.runner.spec.kernels)
        yield result


def text(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(VOCAB), k=length))


def random_tree(size: int, seed: int) -> Tree:
    draw = random.Random(seed)
    return Tree(text(size, seed), tuple(draw.randrange(max(-1, node - 4), node) for node in range(size)))


def same(left: Tensor, right: Tensor) -> bool:
    return bool(torch.equal(left, right))


def assert_paths(bench: Bench, tokens: Sequence[int], tree: Tree, logits: Tensor, salt: str = "") -> None:
    """Rows of root and nodes equal those of each path, from the root to a leaf, computed as plain text.

    The text before the root is computed once for all paths, or cached under a salt: neither chunks nor reuse show, as
    tests beside this prove.
    """
    name = next(bench.names)
    cached = bench.open(name, tokens, salt or f"paths {name}")
    if len(tokens) > cached + 1:
        bench.runner.forward([Segment(name, tuple(tokens[cached:-1]))])
        bench.runner.keep(name, ())
    for path in trees.leaf_paths(tree):
        text = (tokens[-1], *(tree.tokens[node] for node in path))
        alone = bench.runner.forward([Segment(name, text)]).logits_RV
        assert same(logits[[0, *(1 + node for node in path)]], alone), path
    bench.runner.release(name)


def test_rows_do_not_depend_on_how_many_there_are(bench: Bench) -> None:
    tokens = text(33)
    expected = bench.whole(tokens)
    for count in (*range(1, 18), 31, 32, 33):
        assert same(bench.whole(tokens[:count]), expected[:count]), count


def test_neither_rows_nor_chunks_nor_trees_show_behind_several_blocks_of_keys(bench: Bench) -> None:
    """The softmax goes on from one block of keys to the next: rows, drafts and paths end on either side of a border."""
    tokens = text(560, seed=21)
    expected = bench.whole(tokens)
    assert same(bench.whole(tokens[:257])[-3:], expected[254:257])
    assert same(bench.feed(tokens, [250, 5, 2, 6, 240, 9, 48], salt="blocks")[1], expected)
    for end, seed, salt in ((246, 1, "blocks"), (510, 2, "a tree behind them, in one forward")):
        name, tree = next(bench.names), random_tree(14, seed)
        cached = bench.open(name, tokens[:end], salt)
        logits = bench.runner.forward([Segment(name, tuple(tokens[cached:end]), tree)]).logits_RV
        assert_paths(bench, tokens[:end], tree, logits[end - cached - 1 :], salt="blocks")
        bench.runner.release(name)


def test_threads_do_not_show(bench: Bench) -> None:
    tokens = text(70, seed=11)
    expected = bench.whole(tokens)
    for count in (2, 7):
        with threads.using(count):
            assert same(bench.whole(tokens), expected), count
            assert same(bench.whole(tokens[:3]), expected[:3]), count


def test_chunk_sizes_do_not_show(bench: Bench) -> None:
    for sizes in ([1] * 20, [2, 3] * 4, [16, 1, 23]):
        tokens = text(sum(sizes), seed=1)
        assert same(bench.feed(tokens, sizes, salt=f"chunks {sizes}")[1], bench.whole(tokens))


def test_long_texts_cross_tiles_and_key_strides_unchanged(bench: Bench) -> None:
    tokens = text(420, seed=2)
    expected = bench.whole(tokens)
    for sizes in ([300, 1, 1, 90, 8, 20], [191, 1, 1, 204, 23]):
        assert same(bench.feed(tokens, sizes, salt=f"long {sizes}")[1], expected), sizes


def test_batch_mates_do_not_show(bench: Bench) -> None:
    texts = [text(length, seed=length) for length in (1, 2, 5, 19, 200)]
    expected = [bench.whole(tokens)[-1] for tokens in texts]
    for count in range(1, len(texts) + 1):
        names = [next(bench.names) for _ in texts[:count]]
        for name, tokens in zip(names, texts, strict=False):
            bench.open(name, tokens, salt=f"mates {name}")
        segments = [Segment(name, t, logits_from=len(t) - 1) for name, t in zip(names, texts, strict=False)]
        logits = bench.runner.forward(segments).logits_RV
        assert same(logits, torch.stack(expected[:count])), count


def test_tree_nodes_equal_their_paths_alone(bench: Bench) -> None:
    for start, size in ((1, 5), (40, 1), (40, 3), (40, 20), (189, 6), (380, 6)):
        tokens, tree = text(start, seed=3), random_tree(size, seed=start + size)
        name, _ = bench.feed(tokens, [start - 1] if start > 1 else [], salt=f"tree {start} {size}")
        logits = bench.runner.forward([Segment(name, tokens[start - 1 :], tree)]).logits_RV
        assert_paths(bench, tokens, tree, logits)


def test_a_chain_equals_its_path_alone(bench: Bench) -> None:
    """Drafted below the last of some pending tokens."""
    for start, size in ((2, 3), (60, 21), (190, 40)):
        tokens, chain = text(start, seed=12), trees.chain_tree(text(size, seed=13))
        name, _ = bench.feed(tokens, [start - 2] if start > 2 else [], salt=f"chain {start} {size}")
        logits = bench.runner.forward([Segment(name, tokens[start - 2 :], chain, logits_from=1)]).logits_RV
        assert_paths(bench, tokens, chain, logits)


def test_rows_that_see_each_other_depend_on_nothing_else(bench: Bench) -> None:
    """Alone, below other nodes, and in a batch; the rows before them are those of a text without them."""
    for start, size in ((1, 5), (40, 12), (60, 21), (189, 40)):
        tokens, canvas = text(start, seed=14), text(size, seed=15)
        names = [bench.feed(tokens, [start - 1] if start > 1 else [], salt=f"canvas {start}")[0]]
        for _ in range(2):
            names.append(next(bench.names))
            bench.runner.fork(names[0], names[-1])
            assert bench.runner.reserve(names[-1], start + 64)
        whole = bench.whole((*tokens[:-1], *tokens[-1:]))
        alone = Segment(names[0], tokens[start - 1 :], trees.chain_tree(canvas), together=size)
        expected = bench.runner.forward([alone]).logits_RV
        assert same(expected[0], whole[-1])
        assert not same(expected[1:], bench.whole((*tokens, *canvas))[start:])
        branch = Tree((7, 8, *canvas), (-1, 0, -1, *range(2, size + 1)))
        below = Segment(names[1], tokens[start - 1 :], branch, together=size)
        other = Segment(names[2], tokens[start - 1 :], random_tree(6, seed=1))
        logits = bench.runner.forward([other, below]).logits_RV[7:]
        assert same(logits[3:], expected[1:])
        assert same(logits[:3], bench.whole((*tokens, 7, 8))[start - 1 :])


def test_a_row_of_those_that_see_each_other_sees_the_last(bench: Bench) -> None:
    tokens, canvas = text(20, seed=16), text(6, seed=17)
    results = []
    for last in (1, 2):
        name, _ = bench.feed(tokens, [19], salt=f"last {last}")
        chain = trees.chain_tree((*canvas[:-1], last))
        results.append(bench.runner.forward([Segment(name, tokens[19:], chain, together=3)]).logits_RV)
    assert same(results[0][:4], results[1][:4])
    assert all(not same(results[0][row], results[1][row]) for row in (4, 5, 6))


def test_a_tree_behind_a_long_pending_run_equals_its_paths(bench: Bench) -> None:
    tokens, tree = text(210, seed=4), random_tree(5, seed=4)
    name = next(bench.names)
    bench.open(name, tokens, salt="long pending")
    logits = bench.runner.forward([Segment(name, tokens, tree, logits_from=209)]).logits_RV
    assert_paths(bench, tokens, tree, logits)


def test_what_is_kept_of_a_tree_equals_a_fresh_prefill(bench: Bench) -> None:
    tokens = text(20, seed=5)
    for size in (4, 11):
        name, _ = bench.feed(tokens, [19], salt=f"kept {size}")
        committed = list(tokens)
        for step in range(6):
            tree = random_tree(size, seed=size * 100 + step)
            bench.runner.reserve(name, len(committed) + size)
            bench.runner.forward([Segment(name, (committed[-1],), tree)])
            path = random.Random(step).choice([(), *trees.leaf_paths(tree), trees.path_to(tree, 2)])
            assert bench.runner.keep(name, path) == len(committed) + len(path)
            committed += [*(tree.tokens[node] for node in path), step]
        logits = bench.runner.forward([Segment(name, (committed[-1],))]).logits_RV
        assert same(logits[0], bench.whole(committed)[-1])


def test_a_reused_prefix_equals_a_cold_start(bench: Bench) -> None:
    tokens = text(100, seed=6)
    name, _ = bench.feed(tokens, [60, 40], salt="reuse")
    for released in (False, True):
        if released:
            bench.runner.release(name)
        other = (*tokens[:70], *text(30, seed=7))
        reader = next(bench.names)
        cached = bench.open(reader, other, salt="reuse")
        assert cached >= 64
        assert same(bench.runner.forward([Segment(reader, other[cached:])]).logits_RV, bench.whole(other)[cached:])


def test_after_truncation_and_in_a_fork_the_rest_equals_a_cold_start(bench: Bench) -> None:
    tokens = text(90, seed=8)
    name, _ = bench.feed(tokens, [90], salt="cut")
    copy = next(bench.names)
    bench.runner.fork(name, copy)
    assert bench.runner.truncate(name, 37) == 37
    bench.runner.reserve(name, 90)
    bench.runner.reserve(copy, 110)
    rest, more = text(30, seed=9), text(12, seed=10)
    logits = bench.runner.forward([Segment(name, rest), Segment(copy, more)]).logits_RV
    assert same(logits[:30], bench.whole((*tokens[:37], *rest))[37:])
    assert same(logits[30:], bench.whole((*tokens, *more))[90:])
    bench.runner.check()


OF_PRODUCTS = (
    test_rows_do_not_depend_on_how_many_there_are,
    test_threads_do_not_show,
    test_chunk_sizes_do_not_show,
    test_long_texts_cross_tiles_and_key_strides_unchanged,
    test_batch_mates_do_not_show,
    test_what_is_kept_of_a_tree_equals_a_fresh_prefill,
)
