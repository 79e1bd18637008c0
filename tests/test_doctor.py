"""`doctor` on good, wrong and damaged pairs: it names what the engine refuses, and never crashes.

The engine is the reference: what loads has no error finding, what is refused has one.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from graphengine.api import Engine
from graphengine.build import Options
from graphengine.config import DraftConfig, ModelConfig
from graphengine.doctor import Examination, diagnose, examine
from graphengine.doctor_files import read_model_files
from graphengine.doctor_host import Host, host_findings, read_host, speed_findings
from graphengine.doctor_pair import resolve_run
from graphengine.findings import Finding, error, guarded, one_line
from graphengine.hub import TINY_DRAFT, TINY_TARGET
from graphengine.memory import DeviceMemory
from tests.checkpoints import (
    as_deepspec,
    as_speculators,
    edit_config,
    make_drafter,
    make_target,
)

GIB = 1 << 30
OPTIONS = Options(buckets=(1, 2), max_model_len=64, device="cpu")
HOST = read_host()
H200 = replace(
    HOST,
    versions={**HOST.versions, "torch": "2.11.0+cu130", "flashinfer-python": "0.6.12"},
    cuda_version="13.0",
    driver_version="580.95.05",
    nsys="/usr/bin/nsys",
    gpu_name="NVIDIA H200",
    capability=(9, 0),
    memory=DeviceMemory(139 * GIB, 140 * GIB, 132),
)
Edit = Callable[[dict[str, Any]], dict[str, Any]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("pair")
    target = make_target(directory / "target", layers=3)
    draft = make_drafter(
        directory / "draft", target, taps=(0, 2), rope={"rope_theta": 10000.0}, block_size=4
    )
    edit_config(target, lambda values: values | {"max_position_embeddings": 256})
    return target, draft


@pytest.fixture
def copies(pair: tuple[Path, Path], tmp_path: Path) -> tuple[Path, Path]:
    """The pair's own copy, to damage."""
    for path in pair:
        shutil.copytree(path, tmp_path / path.name)
    return tmp_path / "target", tmp_path / "draft"


def load(target: Path, draft: Path) -> Engine:
    return Engine.from_pretrained(target, draft, buckets=(1, 2), max_model_len=64, device="cpu")


def check(target: Path | str, draft: Path | str | None, **options: Any) -> Examination:
    return examine(target, draft, replace(OPTIONS, **options), HOST)


def named(found: Examination | list[Finding], name: str) -> list[Finding]:
    findings = found.findings if isinstance(found, Examination) else found
    return [finding for finding in findings if finding.name == name]


def errors(found: Examination) -> list[str]:
    return [finding.name for finding in found.findings if finding.level == "error"]


def test_good_pairs_have_no_error(pair: tuple[Path, Path]) -> None:
    """Bug: a check that is too strict turns a user away from a pair that works."""
    for models in (pair, (TINY_TARGET, TINY_DRAFT), ("qwen3-8b", "qwen3-8b-dflash-b16")):
        found = check(*models)
        assert not found.has_errors, errors(found)
        assert found.memory_plan is not None
        # On the CPU, and on whatever machine this test runs.
        warned = {f.name for f in found.findings if f.level == "warning"}
        assert not {name for name in warned if not name.startswith("host.")} - {"speed.device"}
    assert not check(pair[0], None).has_errors


def test_what_is_reported(pair: tuple[Path, Path]) -> None:
    """Bug: a property that the engine goes by is missing from the report, or is another one's."""
    found = check(TINY_TARGET, TINY_DRAFT)
    expected = {
        "draft.format": "z-lab-old",
        "draft.slots": "anchor-dropped",
        "draft.taps": "1, 3, 5, 6",
        "draft.block_size": "16 rows, 15 drafts a step, read from block_size",
        "draft.layers": "3 x full, non-causal",
        "draft.rope": "theta 1000000, 64 rotary dims of 64, not scaled",
        "target.rope": "theta 1000000",
        "target.head": "the embedding",
        "target.stop_tokens": "2042, 2040 from generation_config.json",
        "pair.mask_token": "2043 of 2048 rows",
        "pair.theta": "1000000 in both",
        "run.context": "64 tokens a request; the models allow 4080 with drafting",
    }
    for name, text in expected.items():
        (finding,) = named(found, name)
        assert text in finding.value
        assert finding.level == "ok"
    assert found.num_by_level["ok"] > 25
    nested = check(*pair)
    assert "read from dflash_config.block_size" in named(nested, "draft.block_size")[0].value


# --- wrong pairs, damaged files: as the engine says ---


def drop_tensor(path: Path, name: str) -> None:
    file = path / "model.safetensors"
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file)


def put_tensor(path: Path, name: str, tensor: torch.Tensor) -> None:
    file = path / "model.safetensors"
    save_file(load_file(file) | {name: tensor}, file)


def truncate(path: Path, name: str = "model.safetensors") -> None:
    file = path / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def dflash(**values: Any) -> Edit:
    return lambda config: config | {"dflash_config": config["dflash_config"] | values}


DAMAGES: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "missing tensor": (lambda t, d: drop_tensor(d, "fc.weight"), "draft.weights"),
    "unexpected tensor": (lambda t, d: put_tensor(t, "x", torch.ones(2)), "target.weights"),
    "misshaped tensor": (
        lambda t, d: put_tensor(d, "norm.weight", torch.ones(2)),
        "draft.weights",
    ),
    "integer weights": (
        lambda t, d: put_tensor(d, "norm.weight", torch.ones(64, dtype=torch.int64)),
        "draft.weights.dtype",
    ),
    "map of complex numbers": (
        lambda t, d: put_tensor(d, "d2t", torch.zeros(512, dtype=torch.complex64)),
        "draft.weights.dtype",
    ),
    "map in float8": (
        lambda t, d: put_tensor(d, "d2t", torch.zeros(512).to(torch.float8_e4m3fn)),
        "draft.weights.dtype",
    ),
    "shard with a long name": (
        lambda t, d: (d / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"fc.weight": "x" * 5000}})
        ),
        "draft.weights",
    ),
    "truncated weights": (lambda t, d: truncate(t), "target.weights"),
    "no weights": (lambda t, d: (d / "model.safetensors").unlink(), "draft.weights"),
    "truncated config": (lambda t, d: truncate(t, "config.json"), "target.config"),
    "truncated tokenizer": (lambda t, d: truncate(t, "tokenizer.json"), "target.tokenizer"),
    "config is a list": (lambda t, d: (d / "config.json").write_text("[]"), "draft.config"),
    "deep config": (lambda t, d: (d / "config.json").write_text("[" * 99999), "draft.config"),
    "no config": (lambda t, d: (d / "config.json").unlink(), "draft.directory"),
    "no tokenizer": (lambda t, d: (t / "tokenizer.json").unlink(), "target.tokenizer"),
    "no theta": (lambda t, d: edit_config(d, lambda c: c | {"rope_theta": None}), "draft.config"),
    "other hidden": (
        lambda t, d: edit_config(d, lambda c: c | {"hidden_size": 32}),
        "pair.hidden_size",
    ),
    "other vocabulary": (
        lambda t, d: edit_config(d, lambda c: c | {"vocab_size": 500}),
        "pair.vocabulary",
    ),
    "other depth": (lambda t, d: edit_config(d, dflash(num_target_layers=9)), "pair.num_layers"),
    "taps past the target": (
        lambda t, d: edit_config(d, dflash(num_target_layers=None, target_layer_ids=[0, 7])),
        "pair.taps",
    ),
    "duplicate taps": (
        lambda t, d: edit_config(d, dflash(target_layer_ids=[1, 1])),
        "draft.config",
    ),
    "mask outside": (lambda t, d: edit_config(d, dflash(mask_token_id=512)), "pair.mask_token"),
    "no mask": (lambda t, d: edit_config(d, dflash(mask_token_id=None)), "draft.config"),
    "layers past reason": (
        lambda t, d: edit_config(t, lambda c: c | {"num_hidden_layers": 10**9}),
        "target.config",
    ),
    "a number past any float": (
        lambda t, d: edit_config(t, lambda c: c | {"rms_norm_eps": 10**400}),
        "target.config",
    ),
    "small embedding": (
        lambda t, d: edit_config(t, lambda c: c | {"vocab_size": 100}),
        "target.tokenizer",
    ),
    "bad stop tokens": (
        lambda t, d: edit_config(t, lambda c: {"eos_token_id": "x"}, "generation_config.json"),
        "target.stop_tokens",
    ),
    "another kind of model": (
        lambda t, d: edit_config(t, lambda c: c | {"model_type": "llama"}),
        "target.config",
    ),
    "no drafter": (lambda t, d: shutil.rmtree(d), "draft.directory"),
    "no target": (lambda t, d: shutil.rmtree(t), "target.directory"),
    "swapped": (
        lambda t, d: (t.rename(t.with_name("x")), d.rename(t), t.with_name("x").rename(d)),
        "target.config",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_before_loading(copies: tuple[Path, Path], damage: str) -> None:
    """Bug: doctor passes a pair that the engine refuses, or names the wrong file for it."""
    change, name = DAMAGES[damage]
    change(*copies)
    found = check(*copies)
    assert name in errors(found), [str(f) for f in found.findings if f.level != "ok"]
    for finding in found.findings:
        if finding.level in ("warning", "error"):
            assert finding.value
            assert finding.remedy
    with pytest.raises(ValueError, match=r"."):
        load(*copies)


@pytest.mark.parametrize(
    ("edit", "name"),
    [
        (lambda c: c | {"rope_theta": 1000000.0}, "pair.theta"),
        (
            lambda c: (
                c
                | {
                    "rope_scaling": {
                        "rope_type": "yarn",
                        "factor": 4.0,
                        "original_max_position_embeddings": 64,
                    }
                }
            ),
            "pair.rope_scaling",
        ),
        (
            lambda c: (
                c
                | {
                    "rope_scaling": {
                        "type": "yarn",
                        "factor": 64.0,
                        "original_max_position_embeddings": 64,
                        "mscale": 1.0,
                        "mscale_all_dim": 1.0,
                    }
                }
            ),
            "draft.rope_amplitude",
        ),
    ],
)
def test_legal_but_suspect(copies: tuple[Path, Path], edit: Edit, name: str) -> None:
    """Bug: a theta or a scaling that an export has lost costs acceptance without a word."""
    edit_config(copies[1], edit)
    found = check(*copies)
    assert not found.has_errors
    (finding,) = named(found, name)
    assert finding.level == "warning"
    assert finding.remedy
    load(*copies).close()


@pytest.mark.parametrize(
    ("extra", "per_type", "warned"),
    [({}, False, True), ({}, True, True), ({"attention_factor": 1.4}, False, False)],
)
def test_amplitude_that_engines_read_in_two_ways(
    copies: tuple[Path, Path], extra: dict[str, Any], per_type: bool, warned: bool
) -> None:
    """Bug: the warning is lost where ropes are said per layer type, or comes where the file itself
    says the amplitude."""
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 64.0, "mscale": 1.0}
    rope |= {"original_max_position_embeddings": 64, "mscale_all_dim": 1.0} | extra
    nested = {"full_attention": rope} if per_type else rope
    edit_config(
        copies[1],
        lambda c: c | {"rope_scaling": None, "rope_theta": None, "rope_parameters": nested},
    )
    found = check(*copies)
    assert not found.has_errors
    assert bool(named(found, "draft.rope_amplitude")) == warned


def test_stop_tokens_outside_the_vocabulary(copies: tuple[Path, Path]) -> None:
    """Bug: a stop token that cannot come up stops doctor, though the pair loads and runs."""
    edit_config(copies[0], lambda c: {"eos_token_id": [9999, 2]}, "generation_config.json")
    found = check(*copies)
    assert not found.has_errors
    (finding,) = named(found, "target.stop_tokens")
    assert finding.level == "warning" and "9999" in finding.value
    load(*copies).close()


def test_block_past_the_positions(copies: tuple[Path, Path]) -> None:
    """Bug: the refusal of a block that no context holds names an option that nobody passed, and
    lengths below zero."""
    edit_config(copies[1], dflash(block_size=600))
    (finding,) = [f for f in check(*copies, max_model_len=None).findings if f.level == "error"]
    assert finding.name == "run.options"
    assert "block of 600" in finding.value and "256 positions" in finding.value
    assert "--max-model-len" not in finding.value


def test_theta_that_transformers_fills_in(copies: tuple[Path, Path]) -> None:
    """Bug: the one wrong theta that is common, 10000, is not called by its cause."""
    edit_config(copies[0], lambda c: c | {"rope_theta": 1000000.0})
    (finding,) = named(check(*copies), "pair.theta")
    assert finding.level == "warning"
    assert "transformers fills in" in finding.remedy


def test_wrong_target_of_the_tiny_drafter(pair: tuple[Path, Path]) -> None:
    """Bug: a drafter is accepted for a target that it was not trained on."""
    for target in (pair[0], "qwen3-8b"):
        assert {"pair.hidden_size", "pair.vocabulary", "pair.num_layers"} <= set(
            errors(check(target, TINY_DRAFT))
        )


def test_float16_weights_are_noted(copies: tuple[Path, Path]) -> None:
    """Bug: float16 weights are taken without saying that they run as bfloat16."""
    file = copies[1] / "model.safetensors"
    save_file({name: tensor.half() for name, tensor in load_file(file).items()}, file)
    found = check(*copies)
    (finding,) = named(found, "draft.weights.dtype")
    assert (finding.value, finding.level) == ("F16", "info")
    assert not found.has_errors


def test_options_that_cannot_work(pair: tuple[Path, Path]) -> None:
    """Bug: a refusal of the options or of the memory plan ends the report, or is left out."""
    found = check(*pair, max_model_len=9999)
    assert errors(found) == ["run.options"]
    found = check(*pair, kv_cache_memory=100)
    assert errors(found) == ["run.memory"]
    assert found.memory_plan is None
    found = check(*pair, graph_mode="full", device="cpu")
    assert errors(found) == ["run.options"]


FORMATS: dict[str, Callable[[Path, Path], Path]] = {
    "z-lab": lambda d, t: make_drafter(d / "z", t),
    "z-lab-old": lambda d, t: make_drafter(d / "z", t, nested=False),
    "mixed layers": lambda d, t: make_drafter(d / "z", t, layers=3, sliding="sfs", window=5),
    "own tables": lambda d, t: make_drafter(d / "z", t, own_embedding=True, own_head=True),
    "other width": lambda d, t: make_drafter(d / "z", t, hidden=96, heads=3, kv_heads=1),
    "speculators": lambda d, t: as_speculators(d / "s", make_drafter(d / "z", t), t),
    "few ids": lambda d, t: as_speculators(d / "s", make_drafter(d / "z", t), t, kept=[3, 7, 300]),
    "anchor first": lambda d, t: as_speculators(
        d / "s", make_drafter(d / "z", t), t, sample_from_anchor=True
    ),
    "deepspec": lambda d, t: as_deepspec(d / "s", make_drafter(d / "z", t), t),
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_that_loads_passes(pair: tuple[Path, Path], tmp_path: Path, name: str) -> None:
    """Bug: a format that the engine runs has an error in doctor, or tensors of its own that the
    memory plan does not count."""
    target = pair[0]
    draft = FORMATS[name](tmp_path, target)
    found = check(target, draft)
    assert not found.has_errors, [f for f in found.findings if f.level == "error"]
    plan = found.memory_plan
    assert plan is not None
    with load(target, draft) as engine:
        assert plan == engine.memory_plan
        config, loop = engine.built.draft, engine.built.loop
        assert config is not None
        assert f"{config.format}: " in named(found, "draft.format")[0].value
        assert (
            f"{config.num_draft_tokens} drafts a step" in named(found, "draft.block_size")[0].value
        )
        assert plan.step_buffer_bytes == num_bytes(*dict.fromkeys(loop._buffers))
        weights = plan.target_weight_bytes + plan.draft_weight_bytes + plan.rope_table_bytes
        if name == "deepspec":  # copies of the target's tables, which only their values tell
            assert weights > engine.startup.weight_bytes
        else:
            assert weights == engine.startup.weight_bytes


def num_bytes(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def test_speculators_file_alone_finds_its_target(copies: tuple[Path, Path], tmp_path: Path) -> None:
    """Bug: a drafter that names its target must be passed with it nevertheless; its id map is not
    looked at before it is used."""
    target = copies[0]
    draft = as_speculators(tmp_path / "s", copies[1], target, kept=[3, 7, 300])
    for found in (check(draft, None), check(target, draft)):
        assert not found.has_errors, errors(found)
        assert (found.target, found.draft) == (str(target), str(draft))
        assert "after target layers 0, 2 " in named(found, "draft.taps")[0].value
        assert named(found, "pair.verifier")[0].level == "ok"
        assert "3 of 512 tokens" in named(found, "pair.draft_vocabulary")[0].value
        assert "its own [3, 64]" in named(found, "draft.head")[0].value
    assert (check(draft, "none").target, check(draft, "none").draft) == (str(target), None)
    assert check(draft, "none-of-these").has_errors
    put_tensor(draft, "d2t", torch.ones(3))
    assert errors(check(draft, None)) == ["draft.weights.dtype"]
    drop_tensor(draft, "d2t")
    assert "d2t, which is missing" in named(check(draft, None), "pair.draft_vocabulary")[0].value
    with pytest.raises(ValueError, match="d2t"):
        load(target, draft)


# --- the machine ---


def on(host: Host, **options: Any) -> list[Finding]:
    """The machine's findings for Qwen3-8B shapes in a CUDA run, whatever this machine is."""
    files = [read_model_files(name, with_tokenizer=False) for name in ("qwen3-8b",) * 2]
    run = replace(Options(), **{"device": "cpu", **options})
    found, _ = diagnose(files[0], None, run, host)
    return found


def cuda_config(**values: Any) -> Any:
    from graphengine.build import read_configs

    target, draft = read_configs("qwen3-8b", "qwen3-8b-dflash-b16")
    config, _ = resolve_run(Options(device="cpu"), target, draft)
    assert config is not None
    values = {
        "device": "cuda",
        "dtype": "bfloat16",
        "compile": True,
        "graph_mode": "piecewise",
        "attention_backend": "flashinfer",
        "prefill_attention_backend": "flashinfer",
    } | values
    return replace(config, **values), target, draft


def test_a_good_machine_has_no_warning() -> None:
    """Bug: doctor finds fault with the machine that the engine is made for."""
    found = list(host_findings(H200)) + list(speed_findings(H200, *cuda_config()))
    assert [f for f in found if f.level in ("warning", "error")] == []
    assert any("NVIDIA H200, capability 9.0, 139 GiB free" in f.value for f in found)
    assert not any(f.level == "error" for f in on(H200))


@pytest.mark.parametrize(
    ("change", "name", "level"),
    [
        ({"driver_version": "570.1"}, "host.driver", "warning"),
        ({"driver_version": None}, "host.driver", "info"),
        ({"capability": (8, 0)}, "speed.gemm", "warning"),
        ({"capability": (10, 0)}, "speed.gemm", "warning"),
        ({"capability": (7, 5)}, "host.gpu", "error"),
        ({"nsys": None}, "host.nsys", "info"),
        ({"gpu_name": None, "capability": None, "memory": None}, "host.gpu", "warning"),
    ],
)
def test_lesser_machines(change: dict[str, Any], name: str, level: str) -> None:
    """Bug: an old driver, a missing package or another GPU is not named."""
    host = replace(H200, **change)
    found = list(host_findings(host)) + list(speed_findings(host, *cuda_config()))
    assert [f.level for f in found if f.name == name] == [level]


@pytest.mark.parametrize("package", ["torch", "triton", "flashinfer-python", "transformers"])
def test_missing_packages(package: str) -> None:
    """Bug: a package that is not installed crashes the report, or is not missed."""
    host = replace(H200, versions={**H200.versions, package: None})
    name = f"host.{package.removesuffix('-python')}"
    assert [f.level for f in host_findings(host) if f.name == name] == ["warning"]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"dtype": "float32"}, "speed.dtype"),
        ({"compile": False}, "speed.compile"),
        ({"graph_mode": "none"}, "speed.graphs"),
        ({"prefill_attention_backend": "torch"}, "speed.attention"),
        ({"device": "cpu"}, "speed.device"),
    ],
)
def test_slow_options(change: dict[str, Any], name: str) -> None:
    """Bug: a slow choice is taken silently."""
    found = list(speed_findings(H200, *cuda_config(**change)))
    assert [f.level for f in found if f.name == name] == ["warning"]


@pytest.mark.gpu
def test_a_real_gpu() -> None:
    """Bug: the GPU's memory, driver or capability is read wrongly, so the plan is made for none."""
    options: Any = {"device": "cuda"}
    found = examine(TINY_TARGET, TINY_DRAFT, replace(OPTIONS, **options))
    assert not found.has_errors, errors(found)
    assert torch.cuda.get_device_name(0) in named(found, "host.gpu")[0].value
    assert named(found, "host.driver")
    assert found.memory_plan is not None
    assert found.memory_plan.budget_bytes is not None
    assert 0 < found.memory_plan.budget_bytes <= torch.cuda.mem_get_info()[1]


# --- anything at all ---

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 9)
    | st.integers(-(10**20), 10**20)
    | st.sampled_from([10**400, "", "full_attention", "yarn", "llama3", "\u202e\x00", 1e308])
    | st.floats(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["rope_theta", "rope_type", "factor", "full_attention", "verifier"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=5,
)
KEYS = st.sampled_from(
    "architectures model_type vocab_size hidden_size intermediate_size num_hidden_layers head_dim "
    "num_attention_heads num_key_value_heads rms_norm_eps rope_theta rope_scaling rope_parameters "
    "max_position_embeddings tie_word_embeddings attention_bias eos_token_id hidden_act block_size "
    "layer_types sliding_window use_sliding_window num_target_layers dflash_config is_causal "
    "quantization_config speculators_model_type transformer_layer_config mask_token_id "
    "aux_hidden_state_layer_ids draft_vocab_size speculators_config target_hidden_size "
    "dflash_config.mask_token_id dflash_config.target_layer_ids dflash_config.block_size "
    "dflash_config.num_target_layers dflash_config.use_swa dflash_config.causal".split()
)
FUZZ = settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def damaged(path: Path, changes: dict[str, Any], removed: set[str]) -> dict[str, Any]:
    """A config with other values; a dotted key lies inside dflash_config."""
    config = json.loads((path / "config.json").read_text())
    for key, value in changes.items():
        outer, _, inner = key.partition(".")
        place = config.get(outer) if inner else config
        if isinstance(place, dict):
            place[inner or outer] = value
    for key in removed:
        config.pop(key, None)
    return config


@FUZZ
@given(
    changes=st.dictionaries(KEYS, VALUES, min_size=1, max_size=3),
    of_draft=st.booleans(),
    removed=st.sets(KEYS, max_size=1),
)
def test_any_config_is_read_or_refused(
    pair: tuple[Path, Path], changes: dict[str, Any], of_draft: bool, removed: set[str]
) -> None:
    """Bug: a parser meets a value of another type than it thought, and the user a traceback."""
    config = damaged(pair[of_draft], changes, removed)
    with suppress(ValueError):
        (DraftConfig if of_draft else ModelConfig).from_hf(config, "x")


@FUZZ
@given(
    changes=st.dictionaries(KEYS, VALUES, min_size=1, max_size=4),
    of_draft=st.booleans(),
    removed=st.sets(KEYS, max_size=2),
)
def test_any_config_ends_in_findings(
    pair: tuple[Path, Path], changes: dict[str, Any], of_draft: bool, removed: set[str]
) -> None:
    """Bug: a value of a type or size that nobody thought of ends doctor in a traceback, an endless
    loop, or memory for what the file claims."""
    files = [read_model_files(pair[i], with_tokenizer=False) for i in (0, 1)]
    config = damaged(pair[of_draft], changes, removed)
    files[of_draft] = replace(files[of_draft], config=config)
    found, _ = diagnose(files[0], files[1], OPTIONS, HOST)
    assert found
    for finding in found:
        assert finding.value.isprintable()
        assert len(finding.value) < 1000
        assert finding.level in ("ok", "info") or finding.remedy
        assert "cannot be checked" not in finding.value, "a check of ours crashed"


@settings(FUZZ, max_examples=30)
@given(
    header=st.dictionaries(st.text(max_size=5), VALUES, max_size=3), noise=st.binary(max_size=40)
)
def test_any_header_ends_in_findings(
    pair: tuple[Path, Path],
    tmp_path: Path,
    header: dict[str, Any],
    noise: bytes,
) -> None:
    """Bug: a damaged safetensors header crashes the reader, or its tensors are taken for real."""
    directory = tmp_path / "draft"
    directory.mkdir(exist_ok=True)
    shutil.copy(pair[1] / "config.json", directory)
    text = json.dumps(header).encode()
    file = directory / "model.safetensors"
    target = read_model_files(pair[0], with_tokenizer=False)
    good = (pair[1] / "model.safetensors").read_bytes()
    length = struct.unpack("<Q", good[:8])[0]
    for content in (
        noise,
        struct.pack("<Q", len(text)) + text + noise,
        struct.pack("<Q", 1 << 62) + text,
        good[:8] + noise + good[8 + len(noise) :],
        good[: 8 + length] + noise,
    ):
        file.write_bytes(content)
        files = read_model_files(directory, with_tokenizer=False)
        found, _ = diagnose(target, files, OPTIONS, HOST)
        if content[: len(good)] != good:
            assert any(f.level == "error" and f.name == "draft.weights" for f in found)
        assert not any("cannot be checked" in f.value for f in found)


def test_a_crashing_check_is_a_finding() -> None:
    """Bug: one check that fails takes the findings of all others with it."""

    def broken() -> Any:
        yield error("a", "b", "c")
        raise KeyError("gone\n\x1b[31m")

    first, second = guarded("part", broken())
    assert first.name == "a"
    assert second.level == "error"
    assert "KeyError" in second.value
    assert second.value.isprintable()
    assert len(one_line("x" * 5000)) == 400
