"""Records for the tiny pair: written as JSON, changed, or told in words."""

from __future__ import annotations

import json

from corpus_words import (
    CITIES,
    COLORS,
    DAYS,
    HOBBIES,
    ITEMS,
    JOBS,
    NAMES,
    TREASURES,
    Pair,
    Rng,
    article,
    join_words,
)


def _json_answer(record: object, compact: bool) -> str:
    return "```json\n" + json.dumps(record, indent=None if compact else 2) + "\n```"


def _json_style(r: Rng) -> tuple[str, bool]:
    compact = r.random() < 0.4
    return (r.choice(["compact JSON", "JSON on one line"]) if compact else "JSON"), compact


def json_person(r: Rng) -> Pair:
    who, age, city = r.choice(NAMES), r.randint(18, 80), r.choice(CITIES)
    likes, job = r.sample(HOBBIES, r.randint(1, 3)), r.choice(list(JOBS))
    style, compact = _json_style(r)
    lead = r.choice([f"Write a {style} record for", f"Make a {style} profile of"])
    prompt = f"{lead} {who}, {article(job)} aged {age} from {city} who likes {join_words(likes)}."
    record = {"name": who, "age": age, "job": job, "city": city, "likes": likes}
    return prompt, _json_answer(record, compact)


def json_order(r: Rng) -> Pair:
    who, city, day = r.choice(NAMES), r.choice(CITIES), r.choice(DAYS)
    chosen = [(x, r.randint(2, 40)) for x in r.sample(ITEMS, r.randint(1, 3))]
    style, compact = _json_style(r)
    text = f"{who} from {city} ordered {join_words([f'{n} {x}' for x, n in chosen])} on {day}."
    ask = r.choice([f"Extract the order as {style}.", f"Turn this order into {style}."])
    prompt = f"{ask} {text}" if r.random() < 0.5 else f"{text} {ask}"
    items = [{"item": x, "quantity": n} for x, n in chosen]
    record = {"customer": who, "city": city, "day": day, "items": items}
    return prompt, _json_answer(record, compact)


def json_stock(r: Rng) -> Pair:
    rows = [(x, r.randint(1, 90), r.randint(1, 30)) for x in r.sample(ITEMS, r.randint(2, 9))]
    text = "; ".join(f"{x}: {n} in stock, price {p}" for x, n, p in rows)
    ask = r.choice(["Convert this list to a JSON array.", "Write these rows as a JSON array."])
    records = [{"name": x, "stock": n, "price": p} for x, n, p in rows]
    lines = ",\n".join("  " + json.dumps(record) for record in records)
    return f"{ask} {text}.", f"```json\n[\n{lines}\n]\n```"


def json_config(r: Rng) -> Pair:
    service = r.choice("web mail search photo music chat video news map shop".split())
    port, retries, debug = r.randint(1000, 9999), r.randint(1, 9), r.random() < 0.5
    level = r.choice(["info", "warning", "error"])
    style, compact = _json_style(r)
    prompt = (
        f"Write a {style} config for the {service} server on port {port} with {retries} "
        f"retries, log level {level} and debug {'on' if debug else 'off'}."
    )
    record = {
        "service": service,
        "port": port,
        "retries": retries,
        "logging": {"level": level, "debug": debug},
    }
    return prompt, _json_answer(record, compact)


def json_update(r: Rng) -> Pair:
    record: dict[str, object] = {
        "id": r.randint(100, 999),
        "color": r.choice(COLORS),
        "item": r.choice(list(TREASURES)),
        "count": r.randint(1, 50),
    }
    old = json.dumps(record)
    key = r.choice(["color", "item", "count"])
    pool: dict[str, list[object]] = {
        "color": [*COLORS],
        "item": [*TREASURES],
        "count": [*range(1, 51)],
    }
    new = r.choice([v for v in pool[key] if v != record[key]])
    prompt = f"Set the {key} to {new} in this record: {old}"
    answer = f"```json\n{json.dumps({**record, key: new})}\n```\n"
    return prompt, answer + f"The {key} changed from {record[key]} to {new}."


def json_describe(r: Rng) -> Pair:
    who, age, city, hobby = r.choice(NAMES), r.randint(18, 80), r.choice(CITIES), r.choice(HOBBIES)
    pet = r.choice(["cat", "dog", "rabbit", "horse", "mouse", "turtle"])
    color = r.choice(COLORS)
    record = {
        "name": who,
        "age": age,
        "city": city,
        "hobby": hobby,
        "pet": {"kind": pet, "color": color},
    }
    ask = r.choice(["Describe this record in plain words:", "Explain this record:"])
    answer = (
        f"{who} is {age} years old and lives in {city}. The favorite hobby of {who} is "
        f"{hobby}. At home there is {article(color)} {pet}."
    )
    return f"{ask} {json.dumps(record)}", answer
