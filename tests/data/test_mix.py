"""A mix has the shares it was asked for, exactly, is uniform within each source, and always the same."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.cli.main import main
from rollbook.data.mix import mix
from rollbook.data.sample import sample
from rollbook.data.shares import Shortfall, Source, counts_of, largest_total, parse_sources, plan_counts
from rollbook.errors import BadLineError, UsageError
from rollbook.records.rows import read_rows


def write_source(path: Path, count: int, **fields: Any) -> Path:
    rows = ({"_rb_key": f"{path.stem}-{n}#0", "n": n, **fields} for n in range(count))
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return path


def values(path: Path) -> list[dict[str, Any]]:
    return [row.value() for row in read_rows(path)]


@pytest.fixture
def three(tmp_path: Path) -> list[str]:
    sizes = {"high_quality": 80, "exploration": 50, "hard": 30}
    for name, size in sizes.items():
        write_source(tmp_path / f"{name}.jsonl", size)
    shares = {"high_quality": 0.6, "exploration": 0.3, "hard": 0.1}
    return [f"{name}={tmp_path}/{name}.jsonl:{share}" for name, share in shares.items()]


def test_the_shares_are_exact_and_every_row_names_its_source(three: list[str], tmp_path: Path) -> None:
    manifest = mix(three, tmp_path / "mixed.jsonl", total=100, seed=7)
    rows = values(tmp_path / "mixed.jsonl")
    assert Counter(row["source"] for row in rows) == {"high_quality": 60, "exploration": 30, "hard": 10}
    assert all(row["_rb_key"].startswith(row["source"] + "-") for row in rows)
    assert len({row["_rb_key"] for row in rows}) == 100
    assert (tmp_path / "mixed.jsonl").read_bytes().startswith(b'{"_rb_key":')
    assert (manifest.rows_in, manifest.rows_out, manifest.seed) == (160, 100, 7)
    assert [source["taken"] for source in manifest.details["sources"]] == [60, 30, 10]
    assert [record.rows for record in manifest.inputs] == [80, 50, 30]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "exploration.jsonl",
        "hard.jsonl",
        "high_quality.jsonl",
        "mixed.jsonl",
        "mixed_manifest.json",
    ]


def test_the_same_seed_gives_the_same_bytes(three: list[str], tmp_path: Path) -> None:
    made = []
    for number, seed in enumerate((7, 7, 8)):
        mix(three, tmp_path / f"{number}.jsonl", total=100, seed=seed)
        made.append((tmp_path / f"{number}.jsonl").read_bytes())
    assert made[0] == made[1]
    assert made[0] != made[2]
    assert sorted(made[0].split(b"\n")) != sorted(made[2].split(b"\n"))  # other rows, not only another order


def test_memory_does_not_change_the_bytes(
    three: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mix(three, tmp_path / "roomy.jsonl", total=100, seed=3)
    monkeypatch.setattr("rollbook.data.external_sort.ExternalSort.__init__.__kwdefaults__", {"budget": 1000})
    mix(three, tmp_path / "tight.jsonl", total=100, seed=3)
    assert (tmp_path / "roomy.jsonl").read_bytes() == (tmp_path / "tight.jsonl").read_bytes()


def chi_square(counts: list[int]) -> float:
    expected = sum(counts) / len(counts)
    return sum((count - expected) ** 2 / expected for count in counts)


def test_the_sample_is_uniform(tmp_path: Path) -> None:
    """Every row as often as any other, every pair too, and every place in the output, over fixed seeds."""
    write_source(tmp_path / "a.jsonl", 12)
    write_source(tmp_path / "b.jsonl", 12)
    rows: Counter[int] = Counter()
    pairs: Counter[tuple[int, ...]] = Counter()
    first: Counter[int] = Counter()
    sources: Counter[tuple[int, str]] = Counter()
    words = [f"a={tmp_path}/a.jsonl:0.5", f"b={tmp_path}/b.jsonl:0.5"]
    for seed in range(120):
        mix(words, tmp_path / "out.jsonl", total=8, seed=seed, overwrite=True)
        mixed = values(tmp_path / "out.jsonl")
        taken = [row["n"] for row in mixed if row["source"] == "a"]
        rows.update(taken)
        pairs.update(itertools.combinations(sorted(taken), 2))
        first[taken[0]] += 1
        sources.update((place, row["source"]) for place, row in enumerate(mixed))
    # The quantiles of chi-square at 1 - 1e-6 for 11, 65 and 7 degrees of freedom.
    assert chi_square([rows[n] for n in range(12)]) < 49.0
    assert chi_square([pairs[pair] for pair in itertools.combinations(range(12), 2)]) < 130.0
    assert chi_square([first[n] for n in range(12)]) < 49.0
    assert chi_square([sources[place, "a"] for place in range(8)]) < 41.0


def test_without_a_total_it_is_as_large_as_the_shares_allow(three: list[str], tmp_path: Path) -> None:
    mix(three, tmp_path / "out.jsonl")
    assert Counter(row["source"] for row in values(tmp_path / "out.jsonl")) == {
        "high_quality": 80,
        "exploration": 40,
        "hard": 13,
    }


def test_a_shortfall_is_an_error_unless_a_policy_is_named(three: list[str], tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        mix(three, tmp_path / "out.jsonl", total=200)
    assert "high_quality: 120 wanted, 80 available (too few)" in str(caught.value)
    assert "exploration: 60 wanted, 50 available (too few)" in str(caught.value)
    assert "hard: 20 wanted, 30 available\n" in str(caught.value)
    assert "--total 133 fits" in str(caught.value)
    assert not (tmp_path / "out.jsonl").exists()


def test_shrink_keeps_the_shares(three: list[str], tmp_path: Path) -> None:
    manifest = mix(three, tmp_path / "out.jsonl", total=200, shortfall=Shortfall.SHRINK)
    assert Counter(row["source"] for row in values(tmp_path / "out.jsonl")) == {
        "high_quality": 80,
        "exploration": 40,
        "hard": 13,
    }
    assert manifest.counts == {"short_of_total": 67}


def test_repeat_repeats_whole_passes_and_samples_the_rest(three: list[str], tmp_path: Path) -> None:
    manifest = mix(three, tmp_path / "out.jsonl", total=500, shortfall=Shortfall.REPEAT)
    rows = values(tmp_path / "out.jsonl")
    times = Counter(row["n"] for row in rows if row["source"] == "high_quality")
    assert sum(times.values()) == 300
    assert sorted(Counter(times.values()).items()) == [(3, 20), (4, 60)]  # 3 passes over 80, then 60
    assert manifest.counts == {"repeated": 220 + 100 + 20}


def test_a_source_of_its_own_is_refused_or_kept(tmp_path: Path) -> None:
    write_source(tmp_path / "a.jsonl", 3)
    write_source(tmp_path / "b.jsonl", 3, source="elsewhere")
    words = [f"a={tmp_path}/a.jsonl:0.5", f"b={tmp_path}/b.jsonl:0.5"]
    with pytest.raises(
        BadLineError, match=r"b\.jsonl:\d: has a 'source' of its own, 'elsewhere'.*--source-key"
    ):
        mix(words, tmp_path / "out.jsonl")
    mix(words, tmp_path / "out.jsonl", source_key="mixed_from")
    rows = values(tmp_path / "out.jsonl")
    assert Counter(row["mixed_from"] for row in rows) == {"a": 3, "b": 3}
    assert Counter(row.get("source") for row in rows) == {None: 3, "elsewhere": 3}
    # A mix of a mix: the rows that say the same already stay as they are.
    mix([f"elsewhere={tmp_path}/b.jsonl:1"], tmp_path / "again.jsonl")
    assert sorted((tmp_path / "again.jsonl").read_bytes()) == sorted((tmp_path / "b.jsonl").read_bytes())


@pytest.mark.parametrize("ending", [".jsonl.zst", ".jsonl.gz", ".parquet"])
def test_compressed_and_parquet_sources(tmp_path: Path, ending: str) -> None:
    write_source(tmp_path / "a.jsonl", 20)
    sample([tmp_path / "a.jsonl"], tmp_path / f"packed{ending}", fraction=1)
    plain, packed = tmp_path / "plain.jsonl", tmp_path / f"mixed{ending}"
    mix([f"a={tmp_path}/a.jsonl:1"], plain, total=10, seed=5)
    mix([f"a={tmp_path}/packed{ending}:1"], packed, total=10, seed=5)
    assert values(plain) == values(packed)


def test_blank_lines_a_missing_newline_and_odd_rows(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\n{"n":1}\r\n\n  {"n":2}  \n \t \n{}\n{"n":3}')
    manifest = mix([f"a={tmp_path}/a.jsonl:1"], tmp_path / "out.jsonl")
    rows = values(tmp_path / "out.jsonl")
    assert sorted(row.get("n", 0) for row in rows) == [0, 1, 2, 3]
    assert {row["source"] for row in rows} == {"a"}
    assert manifest.counts == {"blank_lines": 3}


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        (b'{"n":1}\n{"n":2\n{"n":3}\n', 2, "not valid JSON"),
        (b'{"n":1}\n\n[3]\n', 3, "not a JSON object"),
        (b'{"n":1}\n{"n":2}{"n":3}\n', 2, "not valid JSON"),
        (b'{"n":1}\n{"n":2}\n{"n":', 3, "not valid JSON"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, text: bytes, line: int, why: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(text)
    with pytest.raises(BadLineError, match=rf"a\.jsonl:{line}: {why}"):
        mix([f"a={tmp_path}/a.jsonl:1"], tmp_path / "out.jsonl")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a.jsonl:0.5"], "a source is written name=path:share"),
        (["a=a.jsonl"], "a source is written name=path:share"),
        (["=a.jsonl:1"], "a source is written name=path:share"),
        (["a=a.jsonl:half"], "the share 'half' must be a number above 0"),
        (["a=a.jsonl:0"], "the share '0' must be a number above 0"),
        (["a=a.jsonl:-1"], "the share '-1' must be a number above 0"),
        (["a=a.jsonl:0.6", "b=b.jsonl:0.6"], "the shares sum to 1.2, not to 1; .* a 0.5, b 0.5"),
        (["a=a.jsonl:0.5", "a=b.jsonl:0.5"], "the source 'a' is given twice"),
        ([], "no sources"),
    ],
)
def test_words_that_make_no_sense(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_sources(words)


def test_paths_may_hold_colons_and_equal_signs(tmp_path: Path) -> None:
    assert parse_sources(["a=x=1:2/b.jsonl,c.jsonl:1"]) == [
        Source("a", ("x=1:2/b.jsonl", "c.jsonl"), Fraction(1))
    ]
    (tmp_path / "run=1:2").mkdir()
    write_source(tmp_path / "run=1:2" / "a.jsonl", 2)
    write_source(tmp_path / "run=1:2" / "b.jsonl", 2)
    assert mix([f"a={tmp_path}/run=1:2:1"], tmp_path / "out.jsonl").rows_out == 4
    write_source(tmp_path / "a, b.jsonl", 3)  # a comma parts paths, unless there is such a file
    assert mix([f"a={tmp_path}/a, b.jsonl:1"], tmp_path / "comma.jsonl").rows_out == 3


def test_a_source_that_stands_beside_another_is_in_the_manifest(tmp_path: Path) -> None:
    one, other = write_source(tmp_path / "x.jsonl", 4), write_source(tmp_path / "x_tasks.jsonl", 4)
    manifest = mix([f"a={one}:0.5", f"b={other}:0.5"], tmp_path / "mixed.jsonl")
    assert [(record.path, record.rows) for record in manifest.inputs] == [(str(one), 4), (str(other), 4)]


def test_thirds_may_be_typed_as_decimals() -> None:
    thirds = parse_sources(["a=a:0.333", "b=b:0.333", "c=c:0.333"])
    assert [source.share for source in thirds] == [Fraction(1, 3)] * 3
    assert counts_of(10, [source.share for source in thirds]) == [4, 3, 3]


def test_missing_and_empty_sources(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nothing\.jsonl: no such file"):
        mix([f"a={tmp_path}/nothing.jsonl:1"], tmp_path / "out.jsonl")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(UsageError, match="the source a has no rows"):
        mix([f"a={tmp_path}/empty.jsonl:1"], tmp_path / "out.jsonl")
    write_source(tmp_path / "one.jsonl", 1)
    write_source(tmp_path / "two.jsonl", 1)
    with pytest.raises(UsageError, match="is an input as well"):
        mix([f"a={tmp_path}/one.jsonl:1"], tmp_path / "one.jsonl")


def test_one_file_under_two_names(tmp_path: Path) -> None:
    write_source(tmp_path / "a.jsonl", 10)
    manifest = mix(
        [f"x={tmp_path}/a.jsonl:0.5", f"y={tmp_path}/a.jsonl:0.5"], tmp_path / "out.jsonl", total=10
    )
    assert Counter(row["source"] for row in values(tmp_path / "out.jsonl")) == {"x": 5, "y": 5}
    assert len(manifest.inputs) == 1


SHARES = st.lists(st.integers(1, 50), min_size=1, max_size=5).map(
    lambda weights: [Fraction(weight, sum(weights)) for weight in weights]
)


@given(total=st.integers(0, 10_000), shares=SHARES)
def test_counts_add_up_and_are_never_a_row_away(total: int, shares: list[Fraction]) -> None:
    counts = counts_of(total, shares)
    assert sum(counts) == total
    assert all(abs(count - total * share) < 1 for count, share in zip(counts, shares, strict=True))


@given(
    shares=SHARES, data=st.data(), policy=st.sampled_from(Shortfall), total=st.none() | st.integers(1, 500)
)
def test_every_policy_keeps_its_word(
    shares: list[Fraction], data: st.DataObject, policy: Shortfall, total: int | None
) -> None:
    available = [data.draw(st.integers(1, 100)) for _ in shares]
    sources = [Source(str(number), ("x",), share) for number, share in enumerate(shares)]
    most = largest_total(available, shares)
    try:
        counts = plan_counts(sources, available, total, policy)
    except UsageError:
        assert most == 0 or (policy is Shortfall.ERROR and total is not None and total > most)
        return
    fits = all(count <= rows for count, rows in zip(counts, available, strict=True))
    assert counts == counts_of(sum(counts), shares)
    assert fits or (policy is Shortfall.REPEAT and total is not None)
    if total is not None and policy is not Shortfall.SHRINK:
        assert sum(counts) == total


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=3),
    total=st.integers(1, 80),
    policy=st.sampled_from([Shortfall.SHRINK, Shortfall.REPEAT]),
    seed=st.integers(0, 1 << 40),
)
def test_what_is_written_is_what_was_planned(
    sizes: list[int], total: int, policy: Shortfall, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("mix")
    words = []
    for number, size in enumerate(sizes):
        path = write_source(directory / f"s{number}.jsonl", size)
        words.append(f"s{number}={path}:{Fraction(1, len(sizes)).limit_denominator(3).__float__():.3f}")
    try:
        manifest = mix(words, directory / "out.jsonl", total=total, shortfall=policy, seed=seed)
    except UsageError as error:
        assert "not one row" in str(error)
        return
    rows = values(directory / "out.jsonl")
    for number, size in enumerate(sizes):
        times = Counter(row["n"] for row in rows if row["source"] == f"s{number}")
        assert sum(times.values()) == manifest.details["sources"][number]["taken"]
        assert set(times) <= set(range(size))
        if times:
            assert max(times.values()) - min(times[n] for n in range(size)) <= 1


def test_the_command(three: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["data", "mix", *three, "--total", "100", "--seed", "7", "-o", str(tmp_path / "out.jsonl")]
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0
    assert "hard: 10 of 30 (0.1 of the mix)" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main([*words, "--overwrite", "--json"])
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out)["rows_out"] == 100
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "exists; choose another name or add --overwrite" in capsys.readouterr().err
