"""Deterministic chat corpus of the tiny pair: arithmetic, JSON, Python, stories, questions.

The tiny target must be a real language model whose greedy text is sensible, and whose next words a
drafter can partly guess, with no download. Every exchange is made from a seeded `random.Random`.

Invariant: an answer is a function of its prompt alone, and it is right (sums are computed, JSON is
dumped by `json`, code is executed by `--check`). Otherwise the target would learn coin flips, and
its greedy text would sit on near ties that differ between two numerically equivalent engines.

The split is a hash of the prompt: a held-out prompt cannot occur in training.

    python tools/tiny_corpus.py --check
    python tools/tiny_corpus.py --show 3
    python tools/tiny_corpus.py --write-heldout tests/data/heldout.jsonl
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

HELDOUT_SHARE = 24  # one prompt in HELDOUT_SHARE is held out
NAMES = (
    "Anna Ben Clara David Emma Felix Grace Henry Iris Jack Kate Leo Mia Noah Olivia Paul Quinn Rosa"
    " Sam Tara Uma Victor Wendy Xavier Yara Zoe Alan Bella Carlos Diana Ethan Fiona George Hannah"
    " Ivan Julia Kevin Laura Mark Nina Oscar Petra Ravi Sara Tom Vera Will Amir Lena Hugo"
).split()
ITEMS = (
    "apples pears books pencils stamps shells marbles cards cookies candles balloons stickers coins"
    " oranges lemons cups plates flowers notebooks buttons ribbons toys eggs bottles boxes plums"
    " lamps mugs scarves tickets peaches brushes kites drums hats bells"
).split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = (
    "January February March April May June July August September October November December"
).split()
CITIES = (
    "Paris Rome Madrid Berlin Oslo Vienna Lisbon Dublin Athens Prague Tokyo Cairo Lima Quito Delhi"
    " Boston Denver Toronto Sydney Nairobi"
).split()
HOBBIES = (
    "chess painting hiking cooking reading swimming dancing gardening cycling singing fishing"
    " running drawing sailing knitting skating"
).split()
COLORS = "red blue green yellow purple orange white black brown pink silver golden".split()
FRUITS = "apple banana cherry grape lemon mango orange peach pear plum kiwi fig".split()
TOOLS = "hammer ladder wrench saw drill shovel rake bucket rope nail".split()
CLOTHES = "coat scarf glove shirt sock boot jacket dress belt cap".split()
COUNTRIES: dict[str, tuple[str, str, str]] = {
    "France": ("Paris", "Europe", "French"), "Italy": ("Rome", "Europe", "Italian"),
    "Spain": ("Madrid", "Europe", "Spanish"), "Germany": ("Berlin", "Europe", "German"),
    "Norway": ("Oslo", "Europe", "Norwegian"), "Austria": ("Vienna", "Europe", "German"),
    "Portugal": ("Lisbon", "Europe", "Portuguese"), "Greece": ("Athens", "Europe", "Greek"),
    "Japan": ("Tokyo", "Asia", "Japanese"), "Egypt": ("Cairo", "Africa", "Arabic"),
    "Peru": ("Lima", "South America", "Spanish"), "Cuba": ("Havana", "North America", "Spanish"),
    "China": ("Beijing", "Asia", "Chinese"), "Thailand": ("Bangkok", "Asia", "Thai"),
    "Poland": ("Warsaw", "Europe", "Polish"), "Sweden": ("Stockholm", "Europe", "Swedish"),
    "Finland": ("Helsinki", "Europe", "Finnish"), "Denmark": ("Copenhagen", "Europe", "Danish"),
    "Hungary": ("Budapest", "Europe", "Hungarian"), "Turkey": ("Ankara", "Asia", "Turkish"),
    "Vietnam": ("Hanoi", "Asia", "Vietnamese"), "Chile": ("Santiago", "South America", "Spanish"),
    "Iceland": ("Reykjavik", "Europe", "Icelandic"), "Morocco": ("Rabat", "Africa", "Arabic"),
}  # fmt: skip
ANIMALS: dict[str, tuple[str, str, str]] = {  # home, food, what it is known for
    "fox": ("in the forest", "berries and mice", "its clever tricks and its bushy tail"),
    "owl": ("in old trees", "mice", "its silent flight and its sharp eyes"),
    "bear": ("in the mountains", "honey and fish", "its great strength and its long winter sleep"),
    "rabbit": ("in the meadow", "grass and carrots", "its long ears and its quick jumps"),
    "turtle": ("near the pond", "leaves", "its hard shell and its slow steps"),
    "cat": ("in the house", "fish", "its soft paws and its quiet steps"),
    "dog": ("on the farm", "bones", "its loyal heart and its good nose"),
    "horse": ("in the stable", "hay and oats", "its speed and its strong legs"),
    "duck": ("on the lake", "water plants", "its loud voice and its flat beak"),
    "mouse": ("under the floor", "cheese and seeds", "its small size and its sharp teeth"),
    "wolf": ("in the cold north", "meat", "its long howl and its close family"),
    "frog": ("in the swamp", "flies", "its long jumps and its green skin"),
    "bee": ("in the garden", "nectar", "its hard work and its sweet honey"),
    "lion": ("on the plains", "meat", "its loud roar and its proud mane"),
    "elephant": ("on the savanna", "leaves and fruit", "its long trunk and its good memory"),
    "penguin": ("on the ice", "fish", "its funny walk and its fast swimming"),
    "squirrel": ("in the oak tree", "nuts", "its quick climbing and its hidden stores"),
    "deer": ("in the quiet woods", "grass and bark", "its thin legs and its careful ears"),
}  # fmt: skip
PLACES: dict[str, str] = {
    "forest": "The trees were tall, and the light fell softly through the leaves.",
    "harbor": "The boats rocked on the waves, and the air smelled of salt.",
    "library": "The shelves reached up to the roof, and nobody spoke above a whisper.",
    "market": "The stalls were full of bread and fruit, and everyone was talking at once.",
    "garden": "The flowers stood in long rows, and the bees were busy all day.",
    "castle": "The walls were made of grey stone, and the towers touched the clouds.",
    "desert": "The sand stretched to the horizon, and the sun burned in the empty sky.",
    "village": "The houses were small and bright, and smoke rose from every chimney.",
    "cave": "The rocks were wet and cold, and every sound came back as an echo.",
    "island": "The beach was white, and the sea was warm and clear.",
    "valley": "The river ran between green hills, and sheep slept in the shade.",
    "station": "The trains came and went, and the big clock never stopped.",
    "museum": "The halls were quiet, and old paintings looked down from the walls.",
    "bakery": "The oven was hot before sunrise, and the street smelled of warm bread.",
    "farm": "The fields were yellow with wheat, and the rooster sang every morning.",
    "mountain": "The path was steep, and snow covered the highest rocks.",
}  # fmt: skip
TREASURES: dict[str, tuple[str, str]] = {  # how it looked, what happened
    "lamp": ("It was dusty, but it still gave a warm light.", "showed the way home in the dark"),
    "map": ("It was drawn in blue ink on thin paper.", "led to a hidden spring of fresh water"),
    "key": ("It was small and made of silver.", "opened a door that nobody had used for years"),
    "bell": ("It was heavy, and it rang like clear water.", "called all the neighbors together"),
    "coin": ("It was older than anyone could remember.", "paid for a new roof on the school"),
    "book": ("Its pages were full of songs and pictures.", "taught everyone a song about spring"),
    "seed": ("It was no bigger than a grain of rice.", "grew into a tree with golden leaves"),
    "ring": ("It had a green stone that glowed at night.", "turned out to belong to the queen"),
    "flute": ("It was carved from a single piece of wood.", "made even the tired birds dance"),
    "mirror": ("Its glass was as clear as a calm lake.", "sent the sunlight into every dark room"),
    "rope": ("It was long and very strong.", "pulled a lost boat back to the shore"),
    "letter": ("It was sealed with red wax.", "brought good news from far away"),
    "compass": ("Its needle always shook a little.", "pointed to a friend in need"),
    "blanket": ("It was soft and full of stars.", "kept three children warm in the storm"),
}  # fmt: skip
MOODS: dict[str, str] = {
    "happy": "Everyone laughed and danced until the stars came out. It was a very happy day.",
    "sad": "In the end the two friends had to say goodbye, and they cried a little. But they never"
    " forgot each other.",
    "funny": "Then the wind took the hat of the mayor and dropped it on a goat. People still laugh"
    " about it today.",
    "calm": "In the evening the wind became quiet, and the moon rose slowly. All was well.",
    "brave": "It took a lot of courage, but fear did not win that day. From then on everyone told"
    " the tale with pride.",
    "mysterious": "The next morning there was nothing left but a small blue feather. Nobody ever"
    " found out where it came from.",
}  # fmt: skip
JOBS: dict[str, tuple[str, str, str]] = {
    "baker": ("lights the oven and mixes the dough", "sells fresh bread to the neighbors",
              "cleans the tables and counts the coins"),
    "teacher": ("writes a question on the board", "helps the children with their reading",
                "marks the homework with a red pen"),
    "farmer": ("feeds the chickens and the cows", "drives the tractor over the field",
               "closes the gate and looks at the sky"),
    "doctor": ("reads the notes about the patients", "listens to hearts and looks at sore throats",
               "washes her hands and calls the hospital"),
    "pilot": ("checks the weather and the fuel", "flies over mountains and rivers",
              "lands the plane and thanks the crew"),
    "gardener": ("waters the roses and the beans", "cuts the hedge and pulls the weeds",
                 "puts the tools back into the shed"),
    "sailor": ("raises the sails and studies the map", "steers the ship through the waves",
               "ties the ropes and watches the stars"),
    "painter": ("opens the window and mixes the colors", "paints the hills in green and gold",
                "cleans the brushes in warm water"),
    "cook": ("buys fish and herbs at the market", "chops the onions and stirs the soup",
             "serves the last guests and washes the pots"),
    "builder": ("carries the bricks up the ladder", "lays the bricks in a straight line",
                "covers the wall in case of rain"),
}  # fmt: skip
DISHES: dict[str, tuple[tuple[str, int], tuple[str, int], tuple[str, ...]]] = {
    "pancakes": (("eggs", 1), ("cups of flour", 2), ("Mix the eggs and the flour with milk.",
                 "Heat some butter in a pan.", "Fry each side until it is golden.")),
    "tomato soup": (("tomatoes", 3), ("cups of water", 2), ("Cut the tomatoes into small pieces.",
                    "Boil them in the water for twenty minutes.", "Add salt and stir well.")),
    "fruit salad": (("apples", 1), ("spoons of honey", 2), ("Wash the fruit in cold water.",
                    "Cut it into small pieces.", "Mix everything with the honey.")),
    "fried rice": (("eggs", 1), ("cups of rice", 1), ("Boil the rice and let it cool.",
                   "Fry the eggs in a hot pan.", "Add the rice and stir for five minutes.")),
    "pasta": (("tomatoes", 2), ("handfuls of noodles", 2), ("Boil the noodles in salted water.",
              "Cook the tomatoes with garlic.", "Pour the sauce over the noodles.")),
    "omelette": (("eggs", 2), ("slices of cheese", 1), ("Beat the eggs with a fork.",
                 "Pour them into a warm pan.", "Add the cheese and fold it in half.")),
    "potato salad": (("potatoes", 3), ("spoons of oil", 1), ("Boil the potatoes until soft.",
                     "Peel them and cut them into slices.", "Mix them with the oil and salt.")),
}  # fmt: skip


class Exchange(NamedTuple):
    """One user prompt and the assistant's answer (plain text, no chat markup)."""

    category: str
    prompt: str
    answer: str


Pair = tuple[str, str]
Rng = random.Random


def _article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def _join(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


def _steps(steps: list[str], result: str) -> str:
    lines = [f"Step {i}: {step}" for i, step in enumerate(steps, 1)]
    return "\n".join([*lines, f"Answer: {result}"])


# ---- arithmetic -------------------------------------------------------------------------------


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
        return f"{buys} {ask}", _steps(steps, f"{total} dollars")
    note = (total // 50 + 1) * 50
    steps.append(f"The change is {note} - {total} = {note - total} dollars.")
    ask = f"{who} pays with {note} dollars. How much change does {who} get?"
    return f"{buys} {ask}", _steps(steps, f"{note - total} dollars")


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
    return prompt, _steps(steps, f"{a - b + c} {x}")


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
    return prompt, _steps(steps, f"{k} {x} each, {left} left")


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
    return prompt, _steps(steps, f"{d1 + d2} km")


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
    return prompt, _steps(steps, f"{a + n * w} dollars")


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
    return prompt, _steps(steps, str(value))


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
    return prompt, _steps(steps, f"{a} + {b} = {a + b}")


def math_geometry(r: Rng) -> Pair:
    a, b = r.randint(3, 20), r.randint(2, 9)
    thing = r.choice(["garden", "room", "field", "carpet", "table", "wall", "screen"])
    prompt = f"A {thing} is {a} m long and {b} m wide. What are its area and its perimeter?"
    steps = [
        f"The area is {a} * {b} = {a * b} square meters.",
        f"Length and width together are {a} + {b} = {a + b} m.",
        f"The perimeter is 2 * {a + b} = {2 * (a + b)} m.",
    ]
    return prompt, _steps(steps, f"area {a * b} square meters, perimeter {2 * (a + b)} m")


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
    return prompt, _steps(steps, f"{a + b + c} {x}")


# ---- JSON -------------------------------------------------------------------------------------


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
    prompt = f"{lead} {who}, {_article(job)} aged {age} from {city} who likes {_join(likes)}."
    record = {"name": who, "age": age, "job": job, "city": city, "likes": likes}
    return prompt, _json_answer(record, compact)


def json_order(r: Rng) -> Pair:
    who, city, day = r.choice(NAMES), r.choice(CITIES), r.choice(DAYS)
    chosen = [(x, r.randint(2, 40)) for x in r.sample(ITEMS, r.randint(1, 3))]
    style, compact = _json_style(r)
    text = f"{who} from {city} ordered {_join([f'{n} {x}' for x, n in chosen])} on {day}."
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
        f"{hobby}. At home there is {_article(color)} {pet}."
    )
    return f"{ask} {json.dumps(record)}", answer


# ---- Python -----------------------------------------------------------------------------------


class Task(NamedTuple):
    """A code task: `{x}` is the argument, `{k}` a constant, `example` the argument of a call."""

    names: str
    what: str
    body: str
    why: str
    example: str
    oracle: Callable[..., object]


TASKS: tuple[Task, ...] = (
    Task("sum_even add_evens even_total", "returns the sum of the even numbers in a list {x}",
         "    total = 0\n    for value in {x}:\n        if value % 2 == 0:\n"
         "            total += value\n    return total",
         "The loop adds a value only if it can be divided by 2.", "[1, 2, 3, 4]",
         lambda x, k: sum(v for v in x if v % 2 == 0)),
    Task("multiples_of_k divisible filter_multiples", "keeps the numbers in {x} divisible by {k}",
         "    return [value for value in {x} if value % {k} == 0]",
         "The list keeps every value that leaves no remainder when divided by {k}.",
         "[6, 10, 12, 15, 20]", lambda x, k: [v for v in x if v % k == 0]),
    Task("count_above number_above how_many_above", "counts the values in {x} greater than {k}",
         "    count = 0\n    for value in {x}:\n        if value > {k}:\n            count += 1\n"
         "    return count", "The counter grows by one for each value above {k}.", "[3, 8, 14, 5]",
         lambda x, k: len([v for v in x if v > k])),
    Task("scale multiply_all times", "multiplies every number in {x} by {k}",
         "    return [value * {k} for value in {x}]",
         "Each value is multiplied by {k}, and the order stays the same.", "[1, 2, 3]",
         lambda x, k: [v * k for v in x]),
    Task("shift add_to_all increase", "adds {k} to every number in {x}",
         "    result = []\n    for value in {x}:\n        result.append(value + {k})\n"
         "    return result", "Each value grows by {k}, and the input is not changed.",
         "[1, 2, 3]", lambda x, k: [v + k for v in x]),
    Task("largest find_max biggest", "returns the largest number in {x} without using max",
         "    best = {x}[0]\n    for value in {x}[1:]:\n        if value > best:\n"
         "            best = value\n    return best",
         "The variable best always holds the largest value seen so far.", "[4, 9, 2]",
         lambda x, k: sorted(x)[-1]),
    Task("smallest find_min lowest", "returns the smallest number in {x} without using min",
         "    best = {x}[0]\n    for value in {x}[1:]:\n        if value < best:\n"
         "            best = value\n    return best",
         "The variable best always holds the smallest value seen so far.", "[4, 9, 2]",
         lambda x, k: sorted(x)[0]),
    Task("average mean_value mean", "returns the average of the numbers in {x}",
         "    if not {x}:\n        return 0.0\n    return sum({x}) / len({x})",
         "An empty list has the average 0.0, so there is no division by zero.", "[2, 4, 6]",
         lambda x, k: 4.0),
    Task("reverse_text backwards flip", "returns the text {x} backwards",
         "    return {x}[::-1]", "The slice with step -1 reads the text from its end.",
         "'stone'", lambda x, k: "".join(reversed(x))),
    Task("is_palindrome same_backwards mirrors", "tells whether the text {x} is a palindrome",
         "    clean = {x}.lower().replace(' ', '')\n    return clean == clean[::-1]",
         "Spaces and upper case are ignored before the text is compared with its reverse.",
         "'Never odd or even'", lambda x, k: True),
    Task("count_vowels vowels number_of_vowels", "counts the vowels in the text {x}",
         "    count = 0\n    for letter in {x}.lower():\n        if letter in 'aeiou':\n"
         "            count += 1\n    return count",
         "The text is made lower case first, so upper case vowels count as well.", "'Banana'",
         lambda x, k: 3),
    Task("first_words take_words head", "returns the first {k} words of the text {x}",
         "    words = {x}.split()\n    return ' '.join(words[:{k}])",
         "The text is split at spaces, and only the first {k} words are joined again.",
         "'one two three four five six seven eight nine ten eleven'",
         lambda x, k: " ".join(x.split()[:k])),
    Task("repeat_text repeat many_times", "repeats the text {x} {k} times with a dash between",
         "    return '-'.join([{x}] * {k})",
         "The list holds the text {k} times, and join puts a dash between the copies.", "'ha'",
         lambda x, k: "-".join(x for _ in range(k))),
    Task("factorial fact product_up_to", "returns the factorial of {x}",
         "    result = 1\n    for i in range(2, {x} + 1):\n        result *= i\n    return result",
         "The loop multiplies all whole numbers from 2 up to the argument.", "5",
         lambda x, k: 120),
    Task("fibonacci fib fib_number", "returns the Fibonacci number with index {x}",
         "    a, b = 0, 1\n    for _ in range({x}):\n        a, b = b, a + b\n    return a",
         "Each step moves one place forward in the sequence.", "7", lambda x, k: 13),
    Task("power_of raise_to to_the_power", "raises {x} to the power {k} with a loop",
         "    result = 1\n    for _ in range({k}):\n        result *= {x}\n    return result",
         "The loop multiplies by the argument {k} times.", "2", lambda x, k: 2**k),
    Task("is_prime prime check_prime", "tells whether {x} is a prime number",
         "    if {x} < 2:\n        return False\n    divisor = 2\n"
         "    while divisor * divisor <= {x}:\n        if {x} % divisor == 0:\n"
         "            return False\n        divisor += 1\n    return True",
         "It is enough to try divisors up to the square root.", "13", lambda x, k: True),
    Task("digit_sum sum_digits add_digits", "returns the sum of the digits of {x}",
         "    total = 0\n    while {x} > 0:\n        total += {x} % 10\n        {x} //= 10\n"
         "    return total", "Each pass adds the last digit and then removes it.", "347",
         lambda x, k: 14),
    Task("unique remove_duplicates distinct", "removes duplicates from {x} and keeps the order",
         "    seen = set()\n    result = []\n    for value in {x}:\n"
         "        if value not in seen:\n            seen.add(value)\n"
         "            result.append(value)\n    return result",
         "The set remembers the values that were already added.", "[3, 1, 3, 2, 1]",
         lambda x, k: list(dict.fromkeys(x))),
    Task("count_items tally frequency", "counts how often each value occurs in {x}",
         "    counts = {{}}\n    for value in {x}:\n"
         "        counts[value] = counts.get(value, 0) + 1\n    return counts",
         "The dictionary maps each value to the number of times it was seen.", "['a', 'b', 'a']",
         lambda x, k: {"a": 2, "b": 1}),
    Task("chunks split_list groups", "splits the list {x} into parts of length {k}",
         "    parts = []\n    for start in range(0, len({x}), {k}):\n"
         "        parts.append({x}[start:start + {k}])\n    return parts",
         "Each part has {k} values, and the last part may be shorter.", "[1, 2, 3, 4, 5]",
         lambda x, k: [x[i : i + k] for i in range(0, len(x), k)]),
    Task("rotate rotate_left turn", "moves the first {k} values of {x} to the end",
         "    cut = {k} % len({x})\n    return {x}[cut:] + {x}[:cut]",
         "The remainder keeps the cut inside the list even if {k} is larger than its length.",
         "[1, 2, 3, 4, 5]", lambda x, k: x[k % 5 :] + x[: k % 5]),
    Task("clamp limit cap", "limits the number {x} to the range from 0 to {k}",
         "    if {x} < 0:\n        return 0\n    if {x} > {k}:\n        return {k}\n    return {x}",
         "Values outside of the range are replaced by the nearest end.", "50",
         lambda x, k: min(x, k)),
    Task("is_sorted in_order ascending", "tells whether the list {x} is sorted",
         "    for left, right in zip({x}, {x}[1:]):\n        if left > right:\n"
         "            return False\n    return True",
         "It is enough to compare each value with the next one.", "[1, 3, 2]", lambda x, k: False),
    Task("flatten join_lists merge_lists", "flattens a list of lists {x}",
         "    result = []\n    for part in {x}:\n        result.extend(part)\n    return result",
         "Each inner list is added to the end of the result.", "[[1, 2], [3]]",
         lambda x, k: [1, 2, 3]),
    Task("bubble_sort sort_numbers sort_values", "sorts the list {x} with bubble sort",
         "    result = list({x})\n    for end in range(len(result) - 1, 0, -1):\n"
         "        for i in range(end):\n            if result[i] > result[i + 1]:\n"
         "                result[i], result[i + 1] = result[i + 1], result[i]\n    return result",
         "After each pass the largest remaining value stands at the end.", "[5, 2, 9, 1]",
         lambda x, k: sorted(x)),
)  # fmt: skip
SUFFIXES = ("", "", "_fast", "_simple", "_v2", "_safe", "_new", "_here")


@functools.cache
def _example(task: Task, code: str, name: str, k: int) -> str:
    scope: dict[str, Callable[[object], object]] = {}
    exec(code, scope)  # our own code: the example's value and a check of it
    argument = eval(task.example)
    value = scope[name](eval(task.example))
    assert value == task.oracle(argument, k), (code, value)
    return f"`{name}({task.example})` returns `{value!r}`"


def code_function(r: Rng) -> Pair:
    task = r.choice(TASKS)
    name = r.choice(task.names.split()) + r.choice(SUFFIXES)
    texty = task.example.startswith("'")
    number = task.example[0].isdigit()
    x = r.choice(
        ["text", "line", "word"]
        if texty
        else ["n", "number", "x"]
        if number
        else ["values", "numbers", "items", "data"]
    )
    k = r.randint(2, 12)
    what, why = task.what.format(x=f"`{x}`", k=k), task.why.format(k=k)
    doc, example = r.random() < 0.4, r.random() < 0.4
    head = f"def {name}({x}):\n"
    if doc:
        plain = task.what.format(x=x, k=k)
        head += f'    """{plain[0].upper()}{plain[1:]}."""\n'
    code = head + task.body.format(x=x, k=k)
    shown = _example(task, code, name, k)
    lead = r.choice(["Write a Python function", "Define a Python function", "I need a function"])
    prompt = f"{lead} `{name}` that {what}."
    prompt += " Add a docstring." if doc else ""
    prompt += " Show an example." if example else ""
    answer = f"```python\n{code}\n```\n\n{why}"
    return prompt, answer + (f" For example, {shown}." if example else "")


def code_module(r: Rng) -> Pair:
    count = r.randint(2, 4)
    chosen = r.sample(TASKS, count)
    k = r.randint(2, 12)
    names = [task.names.split()[r.randrange(3)] for task in chosen]
    whats = [
        f"`{name}` {task.what.format(x='`x`', k=k)}"
        for name, task in zip(names, chosen, strict=True)
    ]
    lead = r.choice(["Write a Python module in which", "I need a Python file where"])
    prompt = f"{lead} {'; '.join(whats)}."
    parts = []
    for name, task in zip(names, chosen, strict=True):
        code = f"def {name}(x):\n" + task.body.format(x="x", k=k)
        _example(task, code, name, k)
        parts.append(code)
    joined = "\n\n\n".join(parts)
    return prompt, f"```python\n{joined}\n```\n\nThe file has {count} functions: " + (
        _join([f"`{name}`" for name in names]) + "."
    )


def code_class(r: Rng) -> Pair:
    kind = r.choice("Car Robot Player Book Shop Garden Boat Phone Card Bag Team Lamp".split())
    first, second = r.sample("name size color price speed level weight owner age".split(), 2)
    method = r.choice("describe summary show label report".split())
    prompt = (
        f"Write a Python class `{kind}` with the fields `{first}` and `{second}` and a "
        f"method `{method}` that returns both."
    )
    answer = (
        f"```python\nclass {kind}:\n    def __init__(self, {first}, {second}):\n"
        f"        self.{first} = {first}\n        self.{second} = {second}\n\n"
        f"    def {method}(self):\n"
        f'        return f"{kind}: {{self.{first}}}, {{self.{second}}}"\n```\n\n'
        f"The method `{method}` puts `{first}` and `{second}` into one line of text."
    )
    return prompt, answer


def code_loop(r: Rng) -> Pair:
    a, b, step = r.randint(0, 20), r.randint(30, 99), r.randint(2, 9)
    verb = r.choice(["prints", "shows"])
    what = r.choice(["square", "double", "half", "cube"])
    expr = {"square": "i * i", "double": "i * 2", "half": "i / 2", "cube": "i ** 3"}[what]
    prompt = (
        f"Write a Python loop that {verb} the {what} of each number from {a} to {b} in steps "
        f"of {step}."
    )
    answer = (
        f"```python\nfor i in range({a}, {b + 1}, {step}):\n    print(i, {expr})\n```\n\n"
        f"The range ends at {b + 1} because Python leaves out the last value."
    )
    return prompt, answer


# ---- stories ----------------------------------------------------------------------------------


def story_tale(r: Rng) -> Pair:
    who, animal, place = r.choice(NAMES), r.choice(list(ANIMALS)), r.choice(list(PLACES))
    thing, mood, color = r.choice(list(TREASURES)), r.choice(list(MOODS)), r.choice(COLORS)
    home, food, known = ANIMALS[animal]
    look, event = TREASURES[thing]
    find = f"a {color} {thing} in a {place}"
    prompt = r.choice(
        [
            f"Write a {mood} story about {who} the {animal} who finds {find}.",
            f"Tell me a {mood} story: {who} the {animal} finds {find}.",
        ]
    )
    answer = (
        f"Once upon a time there was {_article(animal)} named {who}, who lived {home} and "
        f"loved {food}. Everyone knew {who} for {known}.\n\nOne morning {who} walked into a "
        f"{place}. {PLACES[place]} Under a stone {who} found {_article(color)} {thing}. "
        f"{look} {who} took the {thing} along, and soon it {event}.\n\n{MOODS[mood]}"
    )
    return prompt, answer


def story_day(r: Rng) -> Pair:
    who, job, city = r.choice(NAMES), r.choice(list(JOBS)), r.choice(CITIES)
    day, hobby = r.choice(DAYS), r.choice(HOBBIES)
    morning, noon, evening = JOBS[job]
    hour = r.randint(5, 9)
    prompt = (
        f"Describe a {day} of {who}, {_article(job)} in {city} who gets up at {hour} and "
        f"loves {hobby}."
    )
    answer = (
        f"On {day} {who} gets up at {hour} o'clock and looks out over {city}. In the morning "
        f"{who} {morning}. After lunch {who} {noon}. In the evening {who} {evening}. Before "
        f"going to bed there is still some time for {hobby}. {who} likes being "
        f"{_article(job)}."
    )
    return prompt, answer


def story_letter(r: Rng) -> Pair:
    (to, sender), thing = r.sample(NAMES, 2), r.choice(list(TREASURES))
    day, place, color = r.choice(DAYS), r.choice(list(PLACES)), r.choice(COLORS)
    look, event = TREASURES[thing]
    prompt = r.choice(
        [
            f"Write a thank-you note from {sender} to {to} for a {color} {thing}.",
            f"Write a note: {sender} thanks {to} for a {color} {thing}.",
        ]
    )
    answer = f"Dear {to},\n\nThank you very much for the {color} {thing}. {look} You will laugh, "
    answer += f"but yesterday it {event}. "
    if r.random() < 0.6:
        prompt += f" Invite {to} to the {place} on {day}."
        answer += f"Please come and see me on {day}. We could walk to the {place} together. "
    return prompt, answer + f"I hope to see you soon.\n\nYour friend,\n{sender}"


def story_dialog(r: Rng) -> Pair:
    (a, b), animal = r.sample(NAMES, 2), r.choice(list(ANIMALS))
    place, food = r.choice(list(PLACES)), r.choice(list(DISHES))
    home, eats, known = ANIMALS[animal]
    prompt = (
        f"Write a short dialog in a {place}: {a} asks {b} about the {animal}, then they talk "
        f"about {food}."
    )
    step = DISHES[food][2][0]
    answer = (
        f"{a}: What do you know about the {animal}?\n{b}: The {animal} lives {home}.\n"
        f"{a}: And what does it eat?\n{b}: It eats {eats}. People know it for {known}.\n"
        f"{a}: Talking about food, I am hungry. Can you make {food}?\n"
        f"{b}: Of course. {step} The rest is easy.\n{a}: Then let us leave the {place} and "
        f"cook together."
    )
    return prompt, answer


def story_week(r: Rng) -> Pair:
    who, city, hobby = r.choice(NAMES), r.choice(CITIES), r.choice(HOBBIES)
    days = r.randint(2, 7)
    first = r.randrange(7)
    jobs = r.sample(list(JOBS), days)
    prompt = (
        f"Write a diary of {who} in {city}, who tries a new job every day from "
        f"{DAYS[first]}: {', '.join(jobs)}. Mention {hobby}."
    )
    lines = []
    for i, job in enumerate(jobs):
        morning, noon, evening = JOBS[job]
        lines.append(
            f"{DAYS[(first + i) % 7]}: Today I am {_article(job)} in {city}. The {job} "
            f"{morning}, then {noon}, and at night {evening}."
        )
    lines.append(f"I liked being {_article(jobs[0])} best, but I like {hobby} even more. {who}")
    return prompt, "\n".join(lines)


# ---- questions --------------------------------------------------------------------------------


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
    return f"{ask} {_join(chosen)}{end}", "\n".join(lines)


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
    lines = [f"- {w[0].upper()}{w[1:]} is {_article(kind)}." for w, kind in words]
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
    return prompt, _steps(steps, f"{n * k + m} {small}")


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


CATEGORIES: dict[str, tuple[Callable[[Rng], Pair], ...]] = {
    "math": (math_shop, math_give, math_share, math_travel, math_save, math_chain, math_column,
             math_geometry, math_table, math_count, math_times_as_many),
    "json": (json_person, json_order, json_stock, json_config, json_update, json_describe),
    "code": (code_function, code_function, code_module, code_class, code_loop),
    "story": (story_tale, story_tale, story_day, story_letter, story_dialog, story_week),
    "qa": (qa_countries, qa_animals, qa_sort, qa_classify, qa_calendar, qa_recipe, qa_units,
           qa_hello),
}  # fmt: skip


def is_heldout(prompt: str) -> bool:
    """Whether a prompt belongs to the held-out split: sha256(prompt) mod HELDOUT_SHARE == 0."""
    return int(hashlib.sha256(prompt.encode()).hexdigest()[:12], 16) % HELDOUT_SHARE == 0


def exchanges(seed: int, count: int, *, heldout: bool) -> Iterator[Exchange]:
    """Yield `count` exchanges of one split with distinct prompts, categories in turn.

    Args:
        seed: seeds `random.Random`; the same seed gives the same exchanges on every machine.
        count: number of exchanges.
        heldout: which split; the other one's prompts are skipped.
    """
    r = random.Random(f"graphengine-tiny-{seed}")
    seen: set[str] = set()
    names = list(CATEGORIES)
    while len(seen) < count:
        category = names[len(seen) % len(names)]
        while True:
            prompt, answer = r.choice(CATEGORIES[category])(r)
            if is_heldout(prompt) == heldout and prompt not in seen:
                break
        seen.add(prompt)
        yield Exchange(category, prompt, answer)


def heldout_set(count: int = 256) -> list[Exchange]:
    """The fixed held-out exchanges that acceptance is measured on (tests/data/heldout.jsonl)."""
    return list(exchanges(1_000_000, count, heldout=True))


def check(count: int) -> dict[str, int]:
    """Parse every JSON answer, compile every Python answer, and look for prompts with two answers.

    Raises:
        AssertionError: an answer is malformed, or one prompt has two different answers.
    """
    counts: dict[str, int] = {}
    answers: dict[str, str] = {}
    for shard in range(4):
        for ex in exchanges(shard, count // 4, heldout=False):
            assert answers.setdefault(ex.prompt, ex.answer) == ex.answer, ex
            assert ex.prompt.isascii() and ex.answer.isascii() and ex.answer == ex.answer.strip()
            for kind in ("json", "python"):
                if f"```{kind}\n" in ex.answer:
                    body = ex.answer.split(f"```{kind}\n")[1].split("\n```")[0]
                    _ = json.loads(body) if kind == "json" else compile(body, "answer", "exec")
                    block = f"{kind} blocks"
                    counts[block] = counts.get(block, 0) + 1
            counts[ex.category] = counts.get(ex.category, 0) + 1
    return counts


def main() -> None:
    """Command line: show samples or check the corpus."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--show", type=int, default=0, help="samples to print per category")
    parser.add_argument("--check", action="store_true", help="verify 40000 exchanges")
    parser.add_argument("--write-heldout", metavar="PATH", help="write the 256 held-out prompts")
    args = parser.parse_args()
    for ex in exchanges(0, args.show * len(CATEGORIES), heldout=True):
        print(f"[{ex.category}] {ex.prompt}\n---\n{ex.answer}\n")
    if args.write_heldout:
        with open(args.write_heldout, "w", encoding="ascii") as file:
            for ex in heldout_set():
                row = {"prompt": ex.prompt, "category": ex.category}
                file.write(json.dumps(row) + "\n")
    if args.check:
        print(json.dumps(check(40000)))


if __name__ == "__main__":
    main()
