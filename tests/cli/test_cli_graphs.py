"""`graphengine graphs`: the steps of a pair on the CPU, its captures on a GPU."""

from pathlib import Path
from typing import Any

import pytest

from graphengine.capture.inventory import Entry
from graphengine.checkpoints.hub import TINY_DRAFT, TINY_TARGET
from graphengine.cli import graphs as cli_graphs
from tests.support import checkpoints
from tests.support.chains import chain_names
from tests.support.command_line import document, invoke

# First and last of equal steps of the bundled pair's chains.
JOINED = (("verify.01", "verify.07"), ("verify.L0.attn", "verify.L7.attn"))


def test_graphs_on_the_cpu_lists_the_steps() -> None:
    """Bug: without CUDA graphs the command shows nothing, or wrong shapes; or an attention, whose
    shapes are a dense segment's too, shares a line with those; or the JSON does not say of what
    the list is."""
    result = invoke("graphs", "--device", "cpu", "--bucket", "1,2", "--json")
    listed = document(result)
    assert "no CUDA graphs on the CPU" in result.stderr
    assert all(f" {a} .. {b} " in result.stderr for a, b in JOINED), result.stderr
    said = {"model": TINY_TARGET.name, "draft": TINY_DRAFT.name, "graph_mode": "none"}
    said |= {"attention_backend": "torch", "compile": False}
    assert {name: listed[name] for name in listed if name != "steps"} == said
    for bucket, rows in ((1, 16), (2, 32)):
        steps = [step for step in listed["steps"] if step["bucket"] == bucket]
        names = [*chain_names("draft", 3), *chain_names("verify", 8)]
        # Attention is planned here, so what needs no plan comes first: it was run one step ahead.
        assert [step["name"] for step in steps] == ["draft.context", *names, "accept"]
        by_name = {step["name"]: step for step in steps}
        assert by_name["verify.08"]["output_shapes"][-1] == f"{rows} int64"
        assert by_name["verify.01"]["input_shapes"][0] == f"{rows}x192 float32"
        assert {step["launch"] for step in steps} == {"eager"}
        assert {step["num_kernels"] for step in steps} == {None}


def test_graphs_say_whose_attention_they_list() -> None:
    """Bug: the JSON has the attention of prefills, which is another one beside our own kernel."""
    ours = ["--bucket", "1", "--draft", "none", "--attention-backend", "triton"]
    listed = document(invoke("graphs", "--device", "cpu", *ours, "--json"))
    assert (listed["attention_backend"], listed["draft"]) == ("triton", None)


def test_graphs_of_blocks_of_their_own() -> None:
    """Bug: numbers of drafts follow the sorted buckets instead of the typed ones, or all buckets
    are listed with the longest block."""
    typed = ["--bucket", "2,1", "--num-speculative-tokens", "3,15"]
    listed = document(invoke("graphs", "--device", "cpu", *typed, "--json"))
    found = {
        (step["bucket"], step["name"]): step["output_shapes"][-1]
        for step in listed["steps"]
        if step["name"] in ("draft.03", "verify.08") and step["output_shapes"]
    }
    assert found == {(1, "verify.08"): "16 int64", (2, "verify.08"): "8 int64"}


def test_graphs_needs_no_weights(tmp_path: Path) -> None:
    """Bug: a directory with a config alone is refused though only its structure is listed."""
    target = checkpoints.make_target(tmp_path / "target")
    for path in target.iterdir():
        if path.name != "config.json":
            path.unlink()
    listed = document(invoke("graphs", target, "--device", "cpu", "--json"))
    expected = [*chain_names("decode", 2), "accept"]
    assert [step["name"] for step in listed["steps"]] == expected


def test_dot_without_graphs_is_refused(tmp_path: Path) -> None:
    """Bug: an empty folder and no word."""
    result = invoke("graphs", "--device", "cpu", "--dot", tmp_path / "dots")
    assert result.exit_code == 2 and "--dot" in result.stderr
    assert not (tmp_path / "dots").exists()


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["piecewise", "full"])
def test_graphs_on_a_gpu(tmp_path: Path, mode: str) -> None:
    """Bug: a graph without nodes (captured on the wrong stream), or one that is not listed."""
    arguments = ["--graph-mode", mode, "--attention-backend", "triton", "--bucket", "1,2"]
    listed = document(invoke("graphs", *arguments, "--dot", tmp_path, "--json"))
    graphs = [step for step in listed["steps"] if step["launch"] == "graph"]
    # Piecewise: 4 + 9 segments, accept, context; full: the step.
    assert len(graphs) == 2 * (15 if mode == "piecewise" else 1)
    if mode == "full":
        assert {step["name"] for step in graphs} == {"speculate"}
        names = [*chain_names("draft", 3), *chain_names("verify", 8)]
        assert graphs[0]["steps"] == [*names, "accept", "draft.context"]
    assert all(0 < step["num_kernels"] <= step["num_nodes"] for step in graphs)
    assert all(step["pool_bytes"] >= 0 for step in graphs)
    assert len(list(tmp_path.glob("*.dot"))) == len(graphs)
    assert all("digraph" in path.read_text() for path in tmp_path.glob("*.dot"))


@pytest.mark.parametrize(
    ("show_all", "counts", "sizes", "named"),
    [
        (False, "211", "3.00 1.50 1.50", ["verify.00 .. verify.01", "verify.02", "verify.03"]),
        (True, "1111", "1.50 " * 4, ["verify.00", "verify.01", "verify.02", "verify.03"]),
    ],
)
def test_equal_graphs_share_a_line_unless_all_are_asked_for(
    show_all: bool, counts: str, sizes: str, named: list[str]
) -> None:
    """Bug: 36 equal layers fill the screen, and --all joins them; a line has one graph's memory,
    the pool's for what is alive in it, or not in MB; or it does not say which graphs it is of, how
    many, or of how many kernels, or is of other kernels or shapes too."""
    made: Any = [
        (f"verify.{i:02}", "graph", [], ["1"] * (i > 2), 5 + (i > 1), 7, 1500000, 500000)
        for i in range(4)
    ]
    table = cli_graphs._table({1: [Entry(*entry) for entry in made]}, show_all)
    cells = {column.header: list(column.cells) for column in table.columns}
    assert (cells["segment"], cells["count"]) == (named, [*counts])
    assert cells["pool MB"] == sizes.split()
    assert cells["live MB"] == [f"{float(size) / 3:.2f}" for size in sizes.split()]
    assert cells["kernels"] == ["5"] * (len(named) - 2) + ["6", "6"]
    assert {*cells["bucket"], *cells["nodes"], *cells["launch"]} == {"1", "7", "graph"}
    assert cells["inputs -> outputs"] == ["- -> -"] * (len(named) - 1) + ["- -> 1"]


def test_equal_graphs_of_two_chains_stay_apart() -> None:
    """Bug: a graph of the draft and one of the verify that are as large share a line, which names
    neither chain's graphs and adds up the memory of both."""
    made: Any = [
        (f"{chain}.{i:02}", "graph", [], [], 5, 7, 0, 0)
        for chain in ("draft", "verify")
        for i in range(2)
    ]
    table = cli_graphs._table({1: [Entry(*entry) for entry in made]}, False)
    segments = next(column for column in table.columns if column.header == "segment")
    assert list(segments.cells) == ["draft.00 .. draft.01", "verify.00 .. verify.01"]
