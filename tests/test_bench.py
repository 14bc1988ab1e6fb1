"""The benchmark's arithmetic, and that it runs; how fast anything is, is not tested."""

import json
import time

import bench
import numpy as np
import pytest
from conftest import ROOT, finish, start
from hypothesis import given
from hypothesis import strategies as st


def quick(*flags, cwd):
    """-> what a quick benchmark printed, and its JSON"""
    printed = finish(start(ROOT / "tests" / "bench.py", "--quick", "--json", "bench.json", *flags, cwd=cwd))
    return printed, json.loads((cwd / "bench.json").read_text())


@pytest.mark.parametrize("power", [0, 0.5, 1, 2])
def test_exponent(power):
    assert bench.exponent((1, 2, 4), [3 * n**power for n in (1, 2, 4)]) == pytest.approx(power, abs=1e-12)


def test_growth_is_that_of_the_medians():
    row = bench.growth(7, "time", (1, 2, 4), [[1, 1, 9], [2, 2, 2], [4, 4, 0.1]], "s")
    assert (row.ratio, row.ours, row.other, row.met) == (pytest.approx(1), 4, 1, True)
    assert row.quartiles == pytest.approx((bench.exponent((1, 4), (9, 0.1)) / 2 + 0.5, 1))


def test_a_table_of_pairs_shows_beside_what_any_run_adds():
    counts = [scale * bench.Sizes.many for scale in (1, 2, 4)]
    met = lambda kept: bench.growth(7, "memory", counts, [[28 + kept(n) / 1e6] for n in counts], "MB").met
    assert met(lambda n: 4 * 3 * 64 * 64 * n)  # all pixels
    assert not met(lambda n: n * n / 8)  # bits, even


def test_repeats_take_turns():
    order = []
    found = bench.interleave(3, a=lambda: order.append("a") or len(order), b=lambda: order.append("b") or len(order))
    assert "".join(order) == "abbaab"
    assert found == {"a": [1, 4, 5], "b": [2, 3, 6]}


positive = st.floats(1e-3, 1e3)


@given(st.lists(st.tuples(positive, positive), min_size=2, max_size=9), st.booleans())
def test_a_ratio_lies_between_its_quartiles(pairs, faster):
    row = bench.compare(1, "any", *map(list, zip(*pairs)), "s", faster=faster)
    assert row.quartiles[0] <= row.ratio <= row.quartiles[1]


def test_a_ratio_is_that_of_what_was_measured_together():
    """The medians are of different repeats here: their ratio, 4, would lie outside of its quartiles"""
    row = bench.compare(1, "drift", [1.0, 8.0, 4.0], [1.0, 16.0, 1.0], "s")
    assert (row.ours, row.other, row.ratio) == (4, 1, 1)  # of 1, 0.5 and 4
    assert row.quartiles == (0.75, 2.5)


def test_compare_takes_medians():
    cost = bench.compare(2, "cost", [1.0, 2.0, 90.0], [4.0, 4.0, 4.0], "s", at_most=0.4)
    assert (cost.ours, cost.other, cost.ratio, cost.met) == (2, 4, 0.5, False)
    assert cost.quartiles == (0.375, 11.5)
    speed = bench.compare(3, "speed", [1.0, 2.0, 90.0], [4.0, 4.0, 4.0], "s", faster=True, at_least=2)
    assert (speed.ratio, speed.met) == (2, True)
    assert bench.compare(6, "no bar", [1.0], [2.0], "s").met is None


def test_a_missed_bar_shows():
    missed, free = bench.Row(1, "loop", 90, 100, "img/s", 0.9, at_least=0.95), bench.Row(8, "free", 1, 2, "s", 0.5)
    assert bench.line(missed) == "| 1 | loop | 90 | 100 | img/s | 0.9 |  | >= 0.95 | NOT MET |"
    assert bench.line(free) == "| 8 | free | 1 | 2 | s | 0.5 |  |  |  |"


def test_the_docs_have_the_costs_on_paper():
    """By hand, VOC on an RTX 3090: 10 x (4574 + 6966 / 3) x 4 / 1218 = 226 s; 11540 / 143 = 80.7 s, once or 10 times"""
    rows = {name: list(bench.on_paper(name, getattr(bench, name))) for name in ("VOC", "COCO")}
    assert rows["VOC"][0].ours * 60 == pytest.approx(226 + 81, abs=1)
    assert rows["VOC"][0].other * 60 == pytest.approx(226 + 807, abs=1)
    number = lambda value: f"{value:.1f}" if value < 10 else f"{value:.0f}"
    lines = (ROOT / "docs" / "speed.md").read_text().splitlines()
    for n, gpu in enumerate(bench.PUBLISHED):
        (line,) = [line for line in lines if line.startswith(f"| {gpu}")]
        cells = [cell.strip() for cell in line.split("|")]
        for row, found in ((rows["VOC"][n], cells[4:7]), (rows["COCO"][n], cells[7:10])):
            with_clip = [f"{number(row.ours)} min", f"{number(row.other)} min", f"{number(row.ratio)} x"]
            assert found == (with_clip if row.faster else [f"{number(row.ours)} min without CLIP", "", ""])


def use_memory():
    pages = np.ones(50_000_000, dtype=np.uint8)
    time.sleep(0.1)
    del pages


def test_peak_memory_sees_what_was_freed():
    """In a process of its own, as bench.py does: this one may have kept freed memory, which would serve again"""
    before, peak = bench.in_new_process(bench.peak_memory, "cpu", use_memory)
    assert 40 < peak - before < 100


def test_quick(tmp_path):
    printed, found = quick("--only", "4,4", cwd=tmp_path)
    assert "| 4 | mAP against scikit-learn, 500 x 8 |" in printed
    assert printed.count(bench.HEADER) == 1
    assert "mean nothing" in printed
    assert found["machine"]["cores"] >= 1
    assert [row["item"] for row in found["rows"]] == [4, 4, 4]
    assert len(found["rows"][0]["raw"]["ours"]) == found["sizes"]["repeats"]
    assert found["rows"][2]["met"]  # the same values as scikit-learn's, at any size


def test_unknown_item(tmp_path):
    out = finish(start(ROOT / "tests" / "bench.py", "--only", "4,77", cwd=tmp_path), code=1)
    assert "error: --only 4,77: there are 1, 2, 3, 4, 5, 6, 7, 8, 10" in out


def test_unwritable_json_is_met_first(tmp_path):
    out = finish(start(ROOT / "tests" / "bench.py", "--json", "nowhere/x.json", cwd=tmp_path), code=1)
    assert "error: nowhere/x.json can't be written" in out
    assert bench.HEADER not in out


@pytest.mark.slow
@pytest.mark.parametrize("item", bench.ITEMS)
def test_every_item_runs(item, tmp_path):
    _, found = quick("--only", item, "--device", "cpu", cwd=tmp_path)
    assert {row["item"] for row in found["rows"]} == {item}
