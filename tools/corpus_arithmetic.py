"""Sums in words for the tiny pair, solved step by step."""

from __future__ import annotations

from corpus_words import CITIES, DAYS, ITEMS, NAMES, Pair, Rng, in_steps


def math_shop(r: Rng) -> Pair:
    who, (x, y) = r.choice(NAMES), r.sample(ITEMS, 2)
    a, p, b, q = r.randint(2, 9), r.randint(2, 12), r.randint(2, 9), r.randint(2, 12)
    buys = f"{who} buys {a} {x} at {p} dollars each and {b} {y} at {q} dollars each."
    steps = [
        f"The {x} cost {a} * {p} = {a * p} dollars.",
        f"The {y} cost {b} * {q} = {b * q} dollars.",
    ]
    total = a * p + b * q
    steps.append(f"Together that is {a * p} + {b * q} = {total} dollars.")
    if r.random() < 0.5:
        ask = r.choice([f"How much does {who} pay?", "What is the total price?"])
        return f"{buys} {ask}", in_steps(steps, f"{total} dollars")
    note = (total // 50 + 1) * 50
    steps.append(f"The change is {note} - {total} = {note - total} dollars.")
    ask = f"{who} pays with {note} dollars. How much change does {who} get?"
    return f"{buys} {ask}", in_steps(steps, f"{note - total} dollars")


def math_give(r: Rng) -> Pair:
    (who, friend), x = r.sample(NAMES, 2), r.choice(ITEMS)
    a, b = r.randint(30, 99), r.randint(5, 29)
    c = r.randint(5, 60)
    prompt = f"{who} has {a} {x}. {who} gives {b} {x} to {friend} and then finds {c} more. "
    prompt += r.choice([f"How many {x} does {who} have now?", f"How many {x} are left?"])
    steps = [
        f"After giving {b} {x} to {friend}, {who} has {a} - {b} = {a - b} {x}.",
        f"After finding {c} more, {who} has {a - b} + {c} = {a - b + c} {x}.",
    ]
    return prompt, in_steps(steps, f"{a - b + c} {x}")


def math_share(r: Rng) -> Pair:
    who, x = r.choice(NAMES), r.choice(ITEMS)
    n, k = r.randint(2, 9), r.randint(2, 12)
    left = r.randint(0, n - 1)
    total = n * k + left
    prompt = f"{who} shares {total} {x} equally among {n} friends. "
    prompt += r.choice(
        [
            "How many does each friend get, and how many are left?",
            f"How many {x} does each friend get? How many remain?",
        ]
    )
    steps = [
        f"Each friend gets {k} {x}, because {n} * {k} = {n * k}.",
        f"The remainder is {total} - {n * k} = {left}.",
    ]
    return prompt, in_steps(steps, f"{k} {x} each, {left} left")


def math_travel(r: Rng) -> Pair:
    who, (c1, c2) = r.choice(NAMES), r.sample(CITIES, 2)
    v, h, v2, h2 = r.randint(4, 12) * 5, r.randint(2, 6), r.randint(4, 12) * 5, r.randint(2, 6)
    way = r.choice(["by train", "by car", "by bus", "by bike"])
    prompt = (
        f"{who} travels from {c1} to {c2} {way}. First {who} moves {v} km per hour for {h} "
        f"hours, then {v2} km per hour for {h2} hours. How far is it?"
    )
    d1, d2 = v * h, v2 * h2
    steps = [
        f"The first part is {v} * {h} = {d1} km.",
        f"The second part is {v2} * {h2} = {d2} km.",
        f"The whole way is {d1} + {d2} = {d1 + d2} km.",
    ]
    return prompt, in_steps(steps, f"{d1 + d2} km")


def math_save(r: Rng) -> Pair:
    who, day = r.choice(NAMES), r.choice(DAYS)
    a, w, n = r.randint(5, 60), r.randint(2, 15), r.randint(3, 9)
    prompt = (
        f"{who} has {a} dollars and saves {w} dollars every {day}. "
        f"How much money does {who} have after {n} weeks?"
    )
    steps = [
        f"In {n} weeks {who} saves {n} * {w} = {n * w} dollars.",
        f"With the first {a} dollars that makes {a} + {n * w} = {a + n * w} dollars.",
    ]
    return prompt, in_steps(steps, f"{a + n * w} dollars")


def math_chain(r: Rng) -> Pair:
    value = r.randint(3, 40)
    words, steps, start = [], [], value
    for _ in range(r.randint(3, 7)):
        kind = r.choice("add sub double".split() if value <= 60 else ["sub", "sub", "add"])
        k = r.randint(2, max(2, min(value - 1, 40)))
        if kind == "double":
            words.append("double it")
            steps.append(f"{value} * 2 = {value * 2}")
            value *= 2
        elif kind == "add":
            words.append(f"add {k}")
            steps.append(f"{value} + {k} = {value + k}")
            value += k
        else:
            words.append(f"subtract {k}")
            steps.append(f"{value} - {k} = {value - k}")
            value -= k
    lead = r.choice(["Start with", "Take the number", "Begin with"])
    prompt = f"{lead} {start}, {', '.join(words[:-1])} and {words[-1]}. What is the result?"
    return prompt, in_steps(steps, str(value))


def math_column(r: Rng) -> Pair:
    a, b = r.randint(100, 899), r.randint(100, 899)
    prompt = r.choice([f"Add {a} and {b} digit by digit.", f"Work out {a} + {b} column by column."])
    steps, carry, digits = [], 0, ""
    for name, shift in (("Ones", 1), ("Tens", 10), ("Hundreds", 100)):
        x, y = a // shift % 10, b // shift % 10
        s = x + y + carry
        extra = f" + {carry}" if carry else ""
        steps.append(f"{name}: {x} + {y}{extra} = {s}, write {s % 10}, carry {s // 10}.")
        digits, carry = str(s % 10) + digits, s // 10
    assert int(f"{carry or ''}{digits}") == a + b
    return prompt, in_steps(steps, f"{a} + {b} = {a + b}")


def math_geometry(r: Rng) -> Pair:
    a, b = r.randint(3, 20), r.randint(2, 9)
    thing = r.choice(["garden", "room", "field", "carpet", "table", "wall", "screen"])
    prompt = f"A {thing} is {a} m long and {b} m wide. What are its area and its perimeter?"
    steps = [
        f"The area is {a} * {b} = {a * b} square meters.",
        f"Length and width together are {a} + {b} = {a + b} m.",
        f"The perimeter is 2 * {a + b} = {2 * (a + b)} m.",
    ]
    return prompt, in_steps(steps, f"area {a * b} square meters, perimeter {2 * (a + b)} m")


def math_table(r: Rng) -> Pair:
    n, m = r.randint(2, 25), r.randint(5, 30)
    ask = r.choice(["Write the multiplication table of", "Show the times table of"])
    rows = [f"{i} * {n} = {i * n}" for i in range(1, m + 1)]
    return f"{ask} {n} up to {m}.", f"Here is the table of {n}:\n" + "\n".join(rows)


def math_count(r: Rng) -> Pair:
    step, start, n = r.randint(2, 12), r.randint(0, 60), r.randint(5, 30)
    numbers = list(range(start, start + step * n, step))
    prompt = f"Count from {start} to {numbers[-1]} in steps of {step}."
    tail = f"That is {n} numbers."
    return prompt, ", ".join(map(str, numbers)) + ".\n" + tail


def math_times_as_many(r: Rng) -> Pair:
    (who, friend, third), x = r.sample(NAMES, 3), r.choice(ITEMS)
    a, k, d = r.randint(3, 20), r.randint(2, 5), r.randint(2, 20)
    prompt = (
        f"{who} has {a} {x}. {friend} has {k} times as many, and {third} has {d} more than "
        f"{friend}. How many {x} do they have together?"
    )
    b = a * k
    c = b + d
    steps = [
        f"{friend} has {a} * {k} = {b} {x}.",
        f"{third} has {b} + {d} = {c} {x}.",
        f"{who} and {friend} have {a} + {b} = {a + b} {x}.",
        f"All three have {a + b} + {c} = {a + b + c} {x}.",
    ]
    return prompt, in_steps(steps, f"{a + b + c} {x}")
