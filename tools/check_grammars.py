"""Answers under random JSON schemas, all of them checked; and masks against their definition.

Why: "always valid" is a claim about every schema, not about the one in a test. `outputs` has the
bundled pair answer, drawn at temperature 1, drafter on, a batch of schemas at a time; each answer
is read by `json` and checked by `jsonschema`, which know nothing of masks. One that its budget cut
off must be the beginning of a valid one. `masks` walks at random through grammars with any
tokenizer, some drafts right and some wrong. The masks of each block, whose rows several threads
share, are compared with those of a matcher that goes token by token and looks at the whole
vocabulary, and for a sample of tokens with whether it takes them.

    python tools/check_grammars.py outputs --count 500
    python tools/check_grammars.py masks --tokenizer Qwen/Qwen3-8B --count 1000 --out masks.json

Exit code 1 if an answer or a mask is wrong. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import json
import math
import random
import string
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import torch
from result_file import add_result_file, parser_of, store

from graphengine import TINY_DRAFT, TINY_TARGET, Engine
from graphengine.checkpoints.hub import resolve
from graphengine.checkpoints.tokenizer import Tokenizer
from graphengine.config.constraint import Constraint
from graphengine.decode.grammar import Grammar, Grammars, Matcher, fill_masks

ROWS, AT_A_TIME, BUDGET = 16, 256, 400  # of a step, asked for at once, tokens of an answer
DEPTH = 3
BLOCK, NUM_BLOCKS, SAMPLE = 16, 6, 40  # rows, blocks of a walk, tokens tried at a row
COMPACT = {"whitespace_pattern": ""}
OTHERS = (
    ("regex", r"([a-z]{1,8}@[a-z]{1,8}\.(org|net) ){1,3}"),
    ("regex", r"[0-9]{4}-(0[1-9]|1[0-2])-[0-3][0-9]T[0-9:]{5}"),
    ("choice", json.dumps(["yes", "yes, but", "no", "perhaps not"])),
    ("grammar", 'start: e\ne: n | "(" e ("+" | "*") e ")"\nn: /[0-9]{1,4}/'),
)


class Schemas:
    """Random schemas whose answers end."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            schema = self._value(DEPTH)
            if self.random.random() < 0.5:
                schema = schema | {"x-guidance": COMPACT}
            yield schema

    def _value(self, depth: int) -> dict[str, Any]:
        kinds = [self._string, self._integer, self._leaf, self._enum]
        if depth:
            kinds += 2 * [self._object] + [self._array, self._any_of]
        return self.random.choice(kinds)(depth - 1)

    def _word(self) -> str:
        letters = string.ascii_lowercase + '_é"\\ '
        return "".join(self.random.choices(letters, k=self.random.randint(1, 8)))

    def _string(self, depth: int) -> dict[str, Any]:
        shapes = [
            {"maxLength": self.random.randint(0, 12)},
            {"minLength": 2, "maxLength": 6},
            {"pattern": r"^[A-Z][a-z]{1,5}( [0-9]{2})?$"},
            {"format": "date"},
        ]
        return {"type": "string"} | self.random.choice(shapes)

    def _integer(self, depth: int) -> dict[str, Any]:
        low = self.random.randint(-200, 200)
        return {"type": "integer", "minimum": low, "maximum": low + self.random.randint(0, 5000)}

    def _leaf(self, depth: int) -> dict[str, Any]:
        return {"type": self.random.choice(["boolean", "null"])}

    def _enum(self, depth: int) -> dict[str, Any]:
        values = [self._word(), self.random.randint(-9, 99), None, 1.5, True, [1, "a"]]
        if self.random.random() < 0.3:
            return {"const": self.random.choice(values)}
        return {"enum": self.random.sample(values, 3)}

    def _object(self, depth: int) -> dict[str, Any]:
        names = list({self._word(): None for _ in range(self.random.randint(1, 4))})
        needed = [name for name in names if self.random.random() < 0.7]
        return {
            "type": "object",
            "properties": {name: self._value(depth) for name in names},
            "required": needed,
            "additionalProperties": False,
        }

    def _array(self, depth: int) -> dict[str, Any]:
        low = self.random.randint(0, 2)
        most = low + self.random.randint(0, 2)
        return {"type": "array", "items": self._value(depth), "minItems": low, "maxItems": most}

    def _any_of(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self._value(depth), self._value(depth)]}


def check_outputs(
    count: int, seed: int, options: dict[str, Any], seconds: float
) -> tuple[Any, list[str]]:
    """(numbers, what was wrong) of so many answers by the bundled pair, or as far as time goes."""
    schemas, wrong = iter(Schemas(seed)), list[str]()
    kinds = ("num_answers", "num_valid", "num_cut_off", "num_steps", "num_answer_tokens")
    numbers, began = dict.fromkeys(kinds, 0), time.monotonic()
    with Engine.from_pretrained(
        TINY_TARGET,
        draft=TINY_DRAFT,
        buckets=(ROWS,),
        acceptance_floor=0.0,
        fallback=False,
        structured_outputs=True,
        sampling=True,
        **options,
    ) as engine:
        for first in range(0, count, AT_A_TIME):
            if first and time.monotonic() - began > seconds:
                break
            asked = [next(schemas) for _ in range(min(AT_A_TIME, count - first))]
            numbers["num_answers"] += len(asked)
            handles = [
                engine.submit(
                    f"Write JSON number {first + i}.",
                    json_schema=schema,
                    temperature=1.0,
                    seed=seed + first + i,
                    max_new_tokens=BUDGET,
                )
                for i, schema in enumerate(asked)
            ]
            for schema, handle in zip(asked, handles, strict=True):
                result = handle.result()
                numbers["num_steps"] += result.metrics.acceptance.num_steps
                numbers["num_answer_tokens"] += len(result.token_ids)
                if result.finish_reason == "length" and _may_go_on(engine, schema, result):
                    numbers["num_cut_off"] += 1
                    continue
                try:
                    assert result.finish_reason == "stop", result.error or result.finish_reason
                    jsonschema.validate(json.loads(result.text), schema)
                    numbers["num_valid"] += 1
                except (AssertionError, ValueError, jsonschema.ValidationError) as error:
                    reason = str(error).partition("\n")[0]
                    wrong.append(f"{json.dumps(schema)}: {result.text!r}: {reason}")
    return numbers, wrong


def _may_go_on(engine: Engine, schema: dict[str, Any], result: Any) -> bool:
    assert engine.built.grammars is not None
    constraint = Constraint("json_schema", json.dumps(schema))
    return engine.built.grammars.matcher(constraint).advance(result.token_ids) is None


def check_masks(
    directory: Path, count: int, seed: int, seconds: float = math.inf
) -> tuple[dict[str, Any], list[str]]:
    """(numbers, what was wrong) of so many walks with a tokenizer, or as far as time goes."""
    tokenizer = Tokenizer(directory)
    size = (len(tokenizer) + 31) // 32 * 32
    # No end token of the model is known here: a special one stands for it.
    end = max(i for i in range(len(tokenizer)) if tokenizer.spells(i) and not tokenizer.decode([i]))
    grammars, plain = (Grammars(tokenizer.as_json, size, [end]) for _ in range(2))
    plain.prepare(slices=[])
    rng = random.Random(seed)
    schemas, wrong, taken_us = iter(Schemas(seed)), list[str](), list[float]()
    kinds = ("num_walks", "num_rows", "num_tokens_tried", "num_tokens_narrowed")
    numbers: dict[str, float] = dict.fromkeys(kinds, 0)
    until = time.perf_counter() + seconds
    for walk in range(count):
        if walk and time.perf_counter() > until:
            break
        numbers["num_walks"] += 1
        if walk % 4 == 3:
            constraint = Constraint(*OTHERS[walk // 4 % len(OTHERS)])
        else:
            constraint = Constraint("json_schema", json.dumps(next(schemas)))
        matcher, history = grammars.matcher(constraint), list[int]()
        matcher.grammar.spread()
        assert matcher.grammar.spreading is not None
        matcher.grammar.spreading.join()
        for _ in range(NUM_BLOCKS):
            masks = torch.zeros(BLOCK, size // 32, dtype=torch.int32)
            drafts = _drafts(matcher, size, rng)
            if end in drafts:
                drafts = drafts[: drafts.index(end)]
            began = time.perf_counter()
            fill_masks([(0, matcher, drafts)], masks)
            taken_us.append((time.perf_counter() - began) * 1e6)
            single = plain.matcher(constraint)
            single.advance(history)
            fits = _compare(single, masks, drafts, rng, numbers)
            if isinstance(fits, str):
                wrong.append(f"{constraint}: {history}: {fits}")
                break
            said = drafts[: rng.randint(min(1, fits), fits)]
            history += said
            if matcher.advance(said) is not None:
                wrong.append(f"{constraint}: {history} cannot be followed")
            if not said or matcher.inner.is_stopped():
                break
    taken_us.sort()
    numbers["masks_of_a_block_p50_us"] = taken_us[len(taken_us) // 2]
    numbers["masks_of_a_block_p99_us"] = taken_us[len(taken_us) * 99 // 100]
    return numbers, wrong


def _row(matcher: Matcher, size: int) -> torch.Tensor:
    mask = torch.zeros(1, size // 32, dtype=torch.int32)
    fill_masks([(0, matcher, [])], mask)
    return mask[0]


def _tokens(mask_W: torch.Tensor) -> list[int]:
    bits = (mask_W[:, None] >> torch.arange(32, dtype=torch.int32)) & 1
    return bits.flatten().nonzero()[:, 0].tolist()


def _drafts(matcher: Matcher, size: int, rng: random.Random) -> list[int]:
    """A block's, each allowed behind the one before, most likely up to a wrong one."""
    inner, drafts = Matcher(Grammar(matcher.inner, matcher.inner.deep_copy), ()), []
    while len(drafts) < BLOCK - 1:
        allowed = _tokens(_row(inner, size))
        if not allowed or rng.random() < 0.07:
            return drafts + [rng.randrange(size) for _ in range(BLOCK - 1 - len(drafts))]
        drafts.append(rng.choice(allowed))
        if inner.inner.is_stopped() or inner.advance(drafts[-1:]) is not None:
            return drafts
    return drafts


def _compare(
    single: Matcher, masks: torch.Tensor, drafts: list[int], rng: random.Random, numbers: Any
) -> int | str:
    """How many drafts fit, single led along these; or what is wrong with a mask."""
    size = masks.shape[1] * 32
    for i in range(len(drafts) + 1):
        expected, allowed = _row(single, size), set(_tokens(_row(single, size)))
        numbers["num_rows"] += 1
        if not torch.equal(masks[i], expected):
            other = set(_tokens(masks[i])) ^ allowed
            return f"row {i} of {drafts} differs from its single step's in {sorted(other)[:9]}"
        tried = rng.sample(sorted(allowed), min(SAMPLE // 2, len(allowed)))
        tried += [rng.randrange(size) for _ in range(SAMPLE // 2)]
        for token in tried if not single.inner.is_stopped() else ():
            numbers["num_tokens_tried"] += 1
            fits = single.inner.validate_tokens([token]) == 1
            if token in allowed and not fits:
                return f"row {i} of {drafts} allows {token}"
            # Where bytes are forced a mask has their usual token alone, and not its parts.
            numbers["num_tokens_narrowed"] += fits and token not in allowed
        if i == len(drafts) or drafts[i] not in allowed or single.inner.is_stopped():
            return i
        if (error := single.advance([drafts[i]])) is not None:
            return f"row {i} of {drafts}: {error}"
    return len(drafts)


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("what", choices=["outputs", "masks"])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokenizer", default=str(TINY_TARGET), help="a directory or hub id")
    parser.add_argument("--device", default="auto", help="outputs: where the pair runs")
    parser.add_argument("--graph-mode", default="auto")
    parser.add_argument("--num-speculative-tokens", type=int, help="outputs: drafts a step")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing later")
    add_result_file(parser)
    args = parser.parse_args()
    if args.count < 1:
        parser.error(f"--count {args.count}: pass 1 or more, or nothing is checked")
    options = {n: getattr(args, n) for n in ("device", "graph_mode", "num_speculative_tokens")}
    began = time.perf_counter()
    if args.what == "outputs":
        numbers, wrong = check_outputs(args.count, args.seed, options, args.seconds)
    else:
        numbers, wrong = check_masks(resolve(args.tokenizer), args.count, args.seed, args.seconds)
    numbers |= {"num_wrong": len(wrong), "duration_s": time.perf_counter() - began}
    for text in wrong[:5]:
        print(text)
    print("  ".join(f"{key} {value:g}" for key, value in numbers.items()))
    config = {"what": args.what, "seed": args.seed, "wrong": wrong[:20], "options": options}
    store(args, "grammars", numbers, config=config)
    print(json.dumps(numbers))
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
