"""`doctor` on anything at all: any config and any header ends in findings, never in a traceback."""

from __future__ import annotations

import json
import shutil
import struct
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphengine.config.draft_formats import parse_draft
from graphengine.config.model import ModelConfig
from graphengine.doctor.doctor import diagnose
from graphengine.doctor.files import read_model_files
from tests.support.doctored import HOST, OPTIONS
from tests.support.examples import examples

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
    max_examples=examples(200),
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
        (parse_draft if of_draft else ModelConfig.from_hf)(config, "x")


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


@settings(FUZZ, max_examples=examples(30))
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
