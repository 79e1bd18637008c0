"""`graphengine compile`: compile a model's code once, so that later starts find it.

Shapes decide what is compiled, not weights, so random ones do and only config.json is read. Every
bucket is built and takes one step, so that kernels of the prefill are compiled too. What is
compiled goes to this platform's folder (artifact.py), where every later command of this machine
looks; `--output` packs that folder for others, `--artifact` adds a packed one first.
"""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from graphengine.cli import options as shared

if TYPE_CHECKING:
    from graphengine.startup.artifact import Store

_EPILOG = """\b
Examples:
  graphengine compile qwen3-8b --draft qwen3-8b-dflash-b16 --bucket 1,8,16
  graphengine compile qwen3-8b --draft qwen3-8b-dflash-b16 --fresh --output qwen3-8b.tar.gz
  graphengine run Qwen/Qwen3-8B --draft z-lab/Qwen3-8B-DFlash-b16 --artifact qwen3-8b.tar.gz
"""
_PROMPT_TOKENS = 17  # the lengths with kernels of their own are warmup's business


@click.command("compile", epilog=_EPILOG)
@shared.MODEL
@shared.DRAFT
@shared.declared("compile")
@shared.path(
    "--output",
    dir_okay=False,
    text="Pack everything that is compiled for this platform, to be used elsewhere.",
)
@shared.path(
    "--artifact",
    "--load",
    text="Add a packed artifact first; what it lacks is compiled. Only your own: it is executed.",
)
@click.option("--fresh", is_flag=True, help="Drop this platform's compiled code first.")
@shared.as_json("The result as JSON on stdout.")
@click.pass_obj
def compile_(store: Store | None, model: str | None, draft: str | None, **options: Any) -> None:
    """Compile the code of MODEL ahead: a preset, hub id or directory; its weights are not read."""
    if store is None:
        raise ValueError(
            "there is no folder for compiled code; set GRAPHENGINE_CACHE to one that can be written"
        )
    from graphengine.api import Engine
    from graphengine.checkpoints.pairs import named_pair
    from graphengine.report import cache_line, print_note, stderr_console
    from graphengine.startup import artifact

    asked = shared.taken(options)
    console = stderr_console(quiet=False)
    output: Path | None = options["output"]
    shared.check_places(options)
    if output is not None:
        _check_output(output)
    if options["fresh"]:
        shutil.rmtree(store.folder, ignore_errors=True)
    model, draft = named_pair(model, draft)
    files_before = artifact.num_files(store.folder)
    began = time.perf_counter()
    with Engine.from_pretrained(
        model,
        draft,
        compile=True,
        load_format="dummy",
        prepare_plain_decode=draft is not None,  # else the first fallback compiles mid-answer
        **asked,
    ) as engine:
        built_s = time.perf_counter() - began
        longest = engine.config.max_model_len - 1
        for size in engine.config.buckets:
            prompts = [[1] * min(_PROMPT_TOKENS, longest)] * size
            engine.generate(prompts, max_new_tokens=2, ignore_eos=True)
        startup, built = engine.startup, engine.built
        compiled = artifact.engine_parts(engine.config, built.target, built.draft)
    total_s = time.perf_counter() - began
    notes = _notes(store, options["artifact"], artifact.nearest(store.folder, compiled))
    artifact.record_(store.folder, store.parts, compiled)
    num_new = artifact.num_files(store.folder) - files_before
    for note in notes:
        print_note(console, note)
    print_note(console, cache_line(startup, store.segments))
    console.print(
        f"load {startup.load_s:.1f} s, compile {startup.compile_s:.1f} s "
        f"({startup.compiler_wait_s:.1f} s of it for imports), capture "
        f"{startup.capture_s:.1f} s, warm-up {startup.warmup_s:.1f} s, first steps "
        f"{total_s - built_s:.1f} s; {num_new} new files",
        markup=False,
    )
    document: dict[str, Any] = {
        "folder": str(store.folder),
        "platform": store.parts,
        "compiled": compiled,
        "notes": notes,
        "num_new_files": num_new,
        "total_s": total_s,
        "startup": asdict(startup),
    }
    try:
        if output is not None:
            document["output_bytes"] = artifact.pack(store.folder, output)
            size = document["output_bytes"] / 1e6
            console.print(f"wrote {output} ({size:.1f} MB)", markup=False)
    finally:
        if options["as_json"]:
            click.echo(json.dumps(document))


def _check_output(output: Path) -> None:
    """Refuses a file that cannot be packed into, or would be empty, before anything is compiled."""
    from graphengine.capture.precompiled import are_kept
    from graphengine.capture.torch_internals import is_off

    if output.exists() and not output.is_file():
        raise ValueError(f"--output {output}: is no regular file; choose another path")
    if is_off():
        raise ValueError(
            f"--output {output}: torch is told to compile nothing, so there would be nothing to "
            "pack; unset TORCH_COMPILE_DISABLE and TORCHDYNAMO_DISABLE"
        )
    if not are_kept():
        raise ValueError(
            f"--output {output}: torch's settings keep compiled code from being stored, so there "
            "would be none to pack; unset TORCHINDUCTOR_FORCE_DISABLE_CACHES and its like"
        )


def _notes(store: Store, added: Path | None, apart: list[str] | None) -> list[str]:
    """Why what is compiled lies elsewhere, or was not in the packed artifact that was added.

    Args: apart: in what the folder's nearest entry differs.
    """
    notes = list(store.notes)
    if store.segments != str(store.folder):
        notes.append(
            f"TORCHINDUCTOR_CACHE_DIR is {store.segments}: what is compiled lies there, and is "
            "neither packed nor dropped"
        )
    if added is not None and not notes and apart:
        notes.append(
            f"{added} was compiled for something else, what is missing was compiled: "
            + "; ".join(apart)
        )
    return notes
