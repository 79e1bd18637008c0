"""`graphengine graphs`: what was captured for a model, graph by graph.

Structure does not depend on the weights' values, so they are random: a config.json is enough.
Without CUDA graphs (CPU, --graph-mode none) the same list shows the chain's steps and shapes.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from graphengine.cli import options as shared

if TYPE_CHECKING:
    from graphengine.capture.inventory import Entry

_EPILOG = """\b
Examples:
  graphengine graphs
  graphengine graphs qwen3-8b --draft qwen3-8b-dflash-b16 --bucket 1,8 --dot dots
  graphengine graphs Qwen/Qwen3-4B --graph-mode full --attention-backend triton --json
"""
_CONTEXT = 2048  # no graph depends on it


@click.command("graphs", epilog=_EPILOG)
@shared.MODEL
@shared.DRAFT
@shared.declared("graphs", buckets=(1,))
@shared.path(
    "--dot",
    metavar="DIR",
    file_okay=False,
    text="Write every graph's nodes as DIR/<bucket>-<segment>.dot.",
)
@click.option("--all", "show_all", is_flag=True, help="A line per segment, also of equal ones.")
@shared.as_json("The list as JSON on stdout.")
def graphs(model: str | None, draft: str | None, **options: Any) -> None:
    """List the CUDA graphs of MODEL: segment, bucket, kernels, pool memory, shapes.

    MODEL: a preset, hub id or directory; its weights are not read.
    """
    import torch

    from graphengine.api import Engine
    from graphengine.capture.inventory import inventory, write_dot
    from graphengine.checkpoints.pairs import named_pair
    from graphengine.report import named, print_table, stderr_console

    console = stderr_console(quiet=False)
    model, draft = named_pair(model, draft)
    with (
        Engine.from_pretrained(
            model,
            draft,
            max_model_len=shared.longest_context(model, draft, _CONTEXT),
            load_format="dummy",
            acceptance_floor=0.0,
            fallback=False,
            **shared.taken(options),
        ) as engine,
        torch.no_grad(),
    ):
        config = engine.config
        if options["dot"] is not None and config.graph_mode == "none":
            raise ValueError(
                "--dot: there are no CUDA graphs with graph mode none; use a GPU and --graph-mode "
                "piecewise or full"
            )
        listed: dict[int, list[Entry]] = {}
        num_dots = 0
        for size, bucket in engine.built.loop.first.buckets.items():
            runners = bucket.runners
            listed[size] = [entry for runner in runners for entry in inventory(runner)]
            if options["dot"] is not None:
                options["dot"].mkdir(parents=True, exist_ok=True)
                num_dots += sum(len(write_dot(r, options["dot"], f"{size}-")) for r in runners)
    if config.graph_mode == "none":
        why = "on the CPU" if config.device == "cpu" else "with --graph-mode none"
        console.print(f"no CUDA graphs {why}; these are the steps of the chains", markup=False)
    print_table(console, _table(listed, options["show_all"]))
    if num_dots:
        console.print(f"wrote {num_dots} files to {options['dot']}", markup=False)
    if options["as_json"]:
        document = {
            **named(model, draft),
            "graph_mode": config.graph_mode,
            "attention_backend": config.attention_backend,
            "compile": config.compile,
            "steps": [
                {"bucket": size} | entry._asdict()
                for size, entries in listed.items()
                for entry in entries
            ],
        }
        click.echo(json.dumps(document))


def _table(listed: dict[int, list[Entry]], show_all: bool) -> Any:
    """Rows of equal graphs of one chain are joined, `verify.01 .. verify.35`, unless show_all."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE)
    for name in ("bucket", "segment", "count", "launch", "kernels", "nodes", "pool MB", "live MB"):
        table.add_column(name, justify="left" if name in ("segment", "launch") else "right")
    table.add_column("inputs -> outputs")
    for size, entries in listed.items():
        for group in [[entry] for entry in entries] if show_all else _joined(entries):
            first = group[0]
            name = first.name if len(group) == 1 else f"{first.name} .. {group[-1].name}"
            if first.steps:
                name += f": {first.steps[0]} .. {first.steps[-1]}"
            of_graph = ["-"] * 4
            if first.launch == "graph":
                of_graph = [str(first.num_kernels), str(first.num_nodes)]
                for sizes in ([e.pool_bytes for e in group], [e.live_bytes for e in group]):
                    of_graph.append(f"{sum(size or 0 for size in sizes) / 1e6:.2f}")
            shapes = (", ".join(s) or "-" for s in (first.input_shapes, first.output_shapes))
            row = [str(size), name, str(len(group)), first.launch, *of_graph, " -> ".join(shapes)]
            table.add_row(*row)
        table.add_section()
    return table


def _joined(entries: list[Entry]) -> list[list[Entry]]:
    """Entries of one chain and class that differ only in their layer and in memory."""
    groups: dict[Any, list[Entry]] = {}
    for entry in entries:
        kind = (entry.name.endswith(".attn"), entry.launch, entry.num_kernels, entry.num_nodes)
        shapes = (tuple(entry.input_shapes), tuple(entry.output_shapes))
        groups.setdefault((entry.name.split(".")[0], kind, shapes), []).append(entry)
    return list(groups.values())
