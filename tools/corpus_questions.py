"""Questions for the tiny pair: about the world, lists, days, recipes, units and itself."""

from __future__ import annotations

from corpus_words import (
    ANIMALS,
    CITIES,
    CLOTHES,
    COUNTRIES,
    DAYS,
    DISHES,
    FRUITS,
    HOBBIES,
    MONTHS,
    NAMES,
    TOOLS,
    Pair,
    Rng,
    article,
    in_steps,
    join_words,
)


def qa_countries(r: Rng) -> Pair:
    chosen = r.sample(list(COUNTRIES), r.choice([2, 2, 3, 3, 4, 6, 9]))
    ask = r.choice(
        ["Tell me about", "What are the capitals and languages of", "Give me facts about"]
    )
    lines = [
        f"{c} is a country in {COUNTRIES[c][1]}. Its capital is {COUNTRIES[c][0]}, and people "
        f"there speak {COUNTRIES[c][2]}."
        for c in chosen
    ]
    end = "?" if ask.startswith("What") else "."
    return f"{ask} {join_words(chosen)}{end}", "\n".join(lines)


def qa_animals(r: Rng) -> Pair:
    a, b = r.sample(list(ANIMALS), 2)
    ask = r.choice([f"Compare the {a} and the {b}.", f"How do the {a} and the {b} differ?"])
    (h1, f1, k1), (h2, f2, k2) = ANIMALS[a], ANIMALS[b]
    answer = (
        f"The {a} lives {h1}, but the {b} lives {h2}. The {a} eats {f1}, and the {b} eats "
        f"{f2}. The {a} is known for {k1}, while the {b} is known for {k2}."
    )
    return ask, answer


def qa_sort(r: Rng) -> Pair:
    words = r.sample(FRUITS + TOOLS + CLOTHES + list(ANIMALS), r.randint(3, 6))
    if r.random() < 0.5:
        answer = "In alphabetical order:\n" + "\n".join(
            f"{i}. {w}" for i, w in enumerate(sorted(words), 1)
        )
        return f"Sort these words: {', '.join(words)}.", answer
    answer = "In reverse order:\n" + "\n".join(f"{i}. {w}" for i, w in enumerate(words[::-1], 1))
    return f"Reverse this list: {', '.join(words)}.", answer


def qa_classify(r: Rng) -> Pair:
    kinds = {"fruit": FRUITS, "tool": TOOLS, "piece of clothing": CLOTHES, "animal": list(ANIMALS)}
    words = [
        (w, kind)
        for kind in r.sample(list(kinds), 3)
        for w in r.sample(kinds[kind], r.randint(1, 2))
    ]
    r.shuffle(words)
    ask = r.choice(["What kind of thing is each word?", "Put each word into a group."])
    lines = [f"- {w[0].upper()}{w[1:]} is {article(kind)}." for w, kind in words]
    return f"{ask} {', '.join(w for w, _ in words)}", "\n".join(lines)


def qa_calendar(r: Rng) -> Pair:
    day, n, month = r.randrange(7), r.randint(1, 6), r.randrange(12)
    who = r.choice(NAMES)
    verb = r.choice(["starts a trip", "begins a course", "opens a shop"])
    prompt = f"{who} {verb} on a {DAYS[day]} in {MONTHS[month]}. Which day is it {n} days later?"
    walk = [DAYS[(day + i) % 7] for i in range(n + 1)]
    lines = [f"Day {i}: {d}" for i, d in enumerate(walk)]
    answer = "\n".join(lines) + f"\nSo {n} days after {walk[0]} it is {walk[-1]}. "
    after = MONTHS[(month + 1) % 12]
    return prompt, answer + f"The month after {MONTHS[month]} is {after}."


def qa_recipe(r: Rng) -> Pair:
    dish, n, who = r.choice(list(DISHES)), r.randint(2, 12), r.choice(NAMES)
    (x, a), (y, b), steps = DISHES[dish]
    prompt = f"{who} wants to make {dish} for {n} people. What is needed and what are the steps?"
    lines = [f"{i}. {s}" for i, s in enumerate(steps, 1)]
    answer = (
        f"For {n} people {who} needs {a * n} {x} and {b * n} {y}.\n"
        + "\n".join(lines)
        + f"\n{len(steps) + 1}. Serve the {dish} to {n} hungry people."
    )
    return prompt, answer


def qa_units(r: Rng) -> Pair:
    big, small, k = r.choice(
        [
            ("hours", "minutes", 60),
            ("weeks", "days", 7),
            ("meters", "centimeters", 100),
            ("dozens", "pieces", 12),
            ("kilograms", "grams", 1000),
            ("years", "months", 12),
        ]
    )
    n = r.randint(2, 20)
    m = r.randint(1, k - 1 if k < 100 else 9)
    prompt = r.choice(
        [
            f"How many {small} are {n} {big} and {m} {small}?",
            f"Convert {n} {big} and {m} {small} to {small}.",
        ]
    )
    one = big[:-1]
    steps = [
        f"One {one} has {k} {small}.",
        f"{n} {big} have {n} * {k} = {n * k} {small}.",
        f"Adding {m} gives {n * k} + {m} = {n * k + m} {small}.",
    ]
    return prompt, in_steps(steps, f"{n * k + m} {small}")


def qa_hello(r: Rng) -> Pair:
    who, city, hobby = r.choice(NAMES), r.choice(CITIES), r.choice(HOBBIES)
    lead = r.choice(["Hello!", "Hi!", "Good morning!"])
    prompt = f"{lead} I am {who} from {city}, and I like {hobby}. Who are you?"
    answer = (
        f"{lead} Nice to meet you, {who}. I am a very small language model. I can solve "
        f"little sums, write JSON and Python, and tell stories. Would you like a story about "
        f"{hobby} or a question about {city}?"
    )
    return prompt, answer
